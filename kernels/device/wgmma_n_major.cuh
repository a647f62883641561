/* wgmma with both operands N-major in shared memory (sm_90a): the reduction runs over rows of memory. */
#ifndef CUMOE_WGMMA_N_MAJOR_CUH
#define CUMOE_WGMMA_N_MAJOR_CUH

#include "device/ptx_sm90.cuh"

/* As wgmma_operand's N-major, of more than 64 of the operand's rows: those from 64, 128, ... on begin `next` bytes after
 * another. 16 k on: + 128. */
DEVICE uint64_t wgmma_operand_n_major(const void *shared, int next)
{
  return (uint64_t)(shared_address(shared) >> 4 & 0x3fff) | (uint64_t)(next >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
         1ull << 62;
}

/* As wgmma_m64k16. */
template <class T, int N> struct wgmma_n_major_m64k16;

#define WGMMA_N_MAJOR(type, N, D, A, B, P, ...)                                                                        \
  template <> struct wgmma_n_major_m64k16<type, N> {                                                                   \
    template <int COUNT> static DEVICE void run(float (&d)[COUNT], uint64_t a, uint64_t b, uint32_t add)               \
    {                                                                                                                  \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type     \
                   "." #type " {" D "}, " A ", " B ", p, 1, 1, 1, 1;}"                                                 \
                   : __VA_ARGS__                                                                                       \
                   : "l"(a), "l"(b), "r"(add));                                                                        \
    }                                                                                                                  \
  };
#define WGMMA_N_MAJOR_TYPES(...)  WGMMA_N_MAJOR_TYPES_(__VA_ARGS__)
#define WGMMA_N_MAJOR_TYPES_(...) WGMMA_N_MAJOR(bf16, __VA_ARGS__) WGMMA_N_MAJOR(f16, __VA_ARGS__)

WGMMA_N_MAJOR_TYPES(128, DS128, "%64", "%65", "%66", FS128)
WGMMA_N_MAJOR_TYPES(192, DS192, "%96", "%97", "%98", FS192)
WGMMA_N_MAJOR_TYPES(256, DS256, "%128", "%129", "%130", FS256)

#undef WGMMA_N_MAJOR_TYPES_
#undef WGMMA_N_MAJOR_TYPES
#undef WGMMA_N_MAJOR

#endif
