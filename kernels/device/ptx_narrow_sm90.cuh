/* Wrappers of instructions on few bytes, of few and mixed (sm_90a). */
#ifndef CUMOE_PTX_NARROW_SM90_CUH
#define CUMOE_PTX_NARROW_SM90_CUH

#include "device/ptx_sm90.cuh"

/* As cp_async_cg_16, where the other half of the line is read elsewhere, or later. */
DEVICE void cp_async_cg_16_apart(uint32_t shared, const void *global, int bytes, uint64_t policy)
{
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::64B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(bytes), "l"(policy)
               : "memory");
}

DEVICE uint32_t lds_u8(uint32_t address)
{
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

DEVICE uint32_t lds_u16(uint32_t address)
{
  uint32_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

#endif
