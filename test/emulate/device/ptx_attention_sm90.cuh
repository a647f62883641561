/* What kernels/device/ptx_attention_sm90.cuh has, done by the CPU: see there. */
#ifndef CUMOE_PTX_ATTENTION_SM90_CUH
#define CUMOE_PTX_ATTENTION_SM90_CUH

#include "device/ptx_sm90.cuh"

DEVICE float4 ld_shared_cluster(const float4 *place, uint32_t rank)
{
  grid::require_aligned(place, 16);
  return *of_cta(const_cast<float4 *>(place), rank);
}

#endif
