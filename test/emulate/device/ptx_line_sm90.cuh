/* What kernels/device/ptx_line_sm90.cuh has, done by the CPU: see there. */
#ifndef CUMOE_PTX_LINE_SM90_CUH
#define CUMOE_PTX_LINE_SM90_CUH

#include "device/ptx_sm90.cuh"

DEVICE uint32_t ld_line(const void *from)
{
  grid::require_aligned(from, 4);
  return *static_cast<const uint32_t *>(from);
}

DEVICE void ld_line(const void *from, uint32_t (&v)[4])
{
  grid::require_aligned(from, 16);
  for (int i = 0; i < 4; i++) v[i] = static_cast<const uint32_t *>(from)[i];
}

#endif
