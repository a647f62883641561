/* Of kernels/device/ptx_sm90.cuh what files of any GPU name, without a row that comes there. */
#ifndef CUMOE_PTX_SM90_CUH
#define CUMOE_PTX_SM90_CUH

#include "device/ptx.cuh"

DEVICE uint32_t cluster_ctarank()
{
  grid::fail("a cluster");
}
DEVICE void barrier_cluster()
{
  grid::fail("a cluster");
}
DEVICE void st_shared_cluster(float *, uint32_t, float)
{
  grid::fail("a cluster");
}

#endif
