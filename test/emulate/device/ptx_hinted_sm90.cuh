/* What kernels/device/ptx_hinted_sm90.cuh has, done by the CPU: see there. */
#ifndef CUMOE_PTX_HINTED_SM90_CUH
#define CUMOE_PTX_HINTED_SM90_CUH

#include "device/ptx_sm90.cuh"

DEVICE void cp_async_bulk_hinted(void *shared, const void *global, uint32_t bytes, uint64_t *barrier, uint64_t)
{
  cp_async_bulk(shared, global, bytes, barrier);
}

#endif
