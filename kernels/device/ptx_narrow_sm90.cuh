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

/* Four bytes of the eight of `low` and `high`: nibble i of `codes` names byte i, and by its own upper bit asks for that
 * byte's upper bit eight times instead (__byte_perm does not look at it). */
DEVICE uint32_t table_bytes(uint32_t low, uint32_t high, uint32_t codes)
{
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(codes));
  return bytes;
}

/* As mma_m16n8k32_s8 (device/ptx.cuh), a of u8. */
DEVICE void mma_m16n8k32_u8s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif
