/* What twin wants besides (sm_90a): words of memory whose neighbours are wanted soon. */
#ifndef CUMOE_PTX_LINE_SM90_CUH
#define CUMOE_PTX_LINE_SM90_CUH

#include "device/ptx_sm90.cuh"

/* Words that nobody writes; the line that they are in comes into L2. */
DEVICE uint32_t ld_line(const void *from)
{
  uint32_t v;
  asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

DEVICE void ld_line(const void *from, uint32_t (&v)[4])
{
  asm volatile("ld.global.nc.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(from));
}

#endif
