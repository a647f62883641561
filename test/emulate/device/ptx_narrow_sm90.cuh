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

#endif
