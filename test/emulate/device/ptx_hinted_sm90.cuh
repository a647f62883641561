/* What kernels/device/ptx_hinted_sm90.cuh has, done by the CPU: see there. */
#ifndef CUMOE_PTX_HINTED_SM90_CUH
#define CUMOE_PTX_HINTED_SM90_CUH

#include "device/ptx_sm90.cuh"

DEVICE void cp_async_bulk_tensor_4d(void *shared, const void *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                                    uint64_t *barrier, uint64_t)
{
  cp_async_bulk_tensor_4d(shared, map, c0, c1, c2, c3, barrier);
}

DEVICE void store_relaxed(float *target, float value)
{
  *target = value;
}

DEVICE uint32_t count_up(uint32_t *counter)
{
  const uint32_t before = *counter;
  *counter = before >= 0x7fffffff ? 0 : before + 1;
  return before;
}

#endif
