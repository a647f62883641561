/* Wrappers of instructions for gradients of weights (sm_90a), above all wgmma with both operands N-major in shared
 * memory: the reduction runs over rows of memory. */
#ifndef CUMOE_PTX_GRADIENT_SM90_CUH
#define CUMOE_PTX_GRADIENT_SM90_CUH

#include "device/ptx_store_sm90.cuh"

/* ---- shared memory ---- */

/* Four 8 x 8 matrices of 16-bit elements; lanes 8i .. 8i+7 give the row addresses of matrix i. */
DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&r)[4])
{
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

DEVICE void sts_64(uint32_t address, float a, float b)
{
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

DEVICE float2 lds_64(uint32_t address)
{
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

DEVICE void sts_32(uint32_t address, uint32_t v)
{
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

DEVICE uint32_t lds_32(uint32_t address)
{
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

/* ---- wgmma ---- */

/* As wgmma_operand's N-major, of more than 64 of the operand's rows: those from 64, 128, ... on begin `next` bytes
 * after another. 16 k on: + 128. */
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
