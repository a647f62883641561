/* What kernels/device/ptx_narrow_sm90.cuh has, done by the CPU: see there. */
#ifndef CUMOE_PTX_NARROW_SM90_CUH
#define CUMOE_PTX_NARROW_SM90_CUH

#include "device/ptx_sm90.cuh"
#include "device/shared.cuh"

DEVICE void cp_async_cg_16_apart(uint32_t shared, const void *global, int bytes, uint64_t)
{
  cp_async_cg_16(shared, global, bytes);
}
DEVICE uint32_t lds_u8(uint32_t address)
{
  return load_shared<uint8_t>(address);
}
DEVICE uint32_t lds_u16(uint32_t address)
{
  return load_shared<uint16_t>(address);
}

DEVICE uint32_t table_bytes(uint32_t low, uint32_t high, uint32_t codes)
{
  return byte_perm_spread(low, high, codes);
}
DEVICE void mma_m16n8k32_u8s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
  mma_lane<int32_t> mine = {d, a, b};
  grid::warp_together(ALL_LANES, &mine, mma_of_warp<4, int32_t, unsigned_of_four, element_of_four>);
}

#endif
