/* Wrappers of single PTX instructions, named after them. All inline assembly is here and in ptx_sm90.cuh. */
#ifndef CUMOE_PTX_CUH
#define CUMOE_PTX_CUH

#include "device/dtype.cuh"

/* ---- programmatic dependent launch ---- */

/*
 * A grid may start while the one before it in the stream still runs. Every kernel, on every path, calls this before it
 * reads what an earlier grid wrote and before it writes what an earlier grid may read. It returns when the grid before
 * is complete and its stores are visible; only then may the next grid start. So all that was complete before the
 * previous grid started may be read without waiting (`early_inputs` in protocol.h), and down may read what up has
 * released (handover.cuh). Calling it again does nothing. Below sm_90 grids start one after the other, and there is no
 * such instruction. In two steps where the next grid must not start meanwhile (ep/exchange.cu).
 */
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
#define GRIDDEPCONTROL(what) asm volatile("griddepcontrol." what ";" ::: "memory")
#elif defined CUMOE_ONE_PTX
/* A comment, of which the Makefile makes an instruction where this PTX is assembled for sm_90a. */
#define GRIDDEPCONTROL(what) asm volatile("// sm_90: griddepcontrol." what ";" ::: "memory")
#else
#define GRIDDEPCONTROL(what) (void)0
#endif
DEVICE void wait_for_earlier_grids_alone()
{
  GRIDDEPCONTROL("wait");
}
DEVICE void let_next_grid_start()
{
  GRIDDEPCONTROL("launch_dependents");
}
DEVICE void wait_for_earlier_grids()
{
  wait_for_earlier_grids_alone();
  let_next_grid_start();
}
#undef GRIDDEPCONTROL

/* Stands where code for sm_90 is another: a file whose PTX is one for both and that comes here does not assemble. */
#ifdef CUMOE_ONE_PTX
#define DIFFERS_BY_ARCHITECTURE() asm volatile("this file belongs into the list OWN_PTX of the Makefile;")
#else
#define DIFFERS_BY_ARCHITECTURE() (void)0
#endif

/* ---- words that other CTAs write ---- */

/* From L2, whatever L1 still holds of earlier grids; what other CTAs write meanwhile, each word of it whole. Says
 * nothing of other words. Volatile: stays behind what stands before it. */
DEVICE int32_t load_relaxed(const int32_t *source)
{
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

DEVICE int64_t load_relaxed(const int64_t *source)
{
  int64_t value;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
  return value;
}

DEVICE uint64_t load_relaxed(const uint64_t *source)
{
  return (uint64_t)load_relaxed(reinterpret_cast<const int64_t *>(source));
}

DEVICE float load_relaxed(const float *source)
{
  return __int_as_float(load_relaxed(reinterpret_cast<const int32_t *>(source)));
}

DEVICE uint4 load_relaxed_vector(const void *source)
{
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

DEVICE void store_relaxed(uint64_t *target, uint64_t value)
{
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(target), "l"(value) : "memory");
}

template <class T> DEVICE void store_relaxed(T *target, T value)
{
  static_assert(sizeof(T) == 2, "16-bit types");
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(target), "h"(*reinterpret_cast<const uint16_t *>(&value))
               : "memory");
}

/* One whole word that another CTA has released, and with it all that was written before. */
DEVICE int32_t load_acquire(const int32_t *source)
{
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

DEVICE void add_release(int32_t *target, int32_t value)
{
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

/* ---- tensor cores ---- */

DEVICE uint32_t shared_address(const void *pointer)
{
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* d += a b: a 16 x 16 (4 registers), b 16 x 8 (2), d 16 x 8 f32.
 * Lane l: a = rows l/4, l/4+8 x columns 2(l%4) + {0,1}, then the same rows at columns + 8;
 * b = rows 2(l%4) + {0,1} and + 8, column l/4; d = row l/4, columns 2(l%4) + {0,1}; row l/4+8, the same columns. */
template <class T> DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <> DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> DEVICE void mma_m16n8k16<f16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* d += a b: a 16 x 32 of s8 (4 registers), b 32 x 8 (2), d 16 x 8 s32, each lane's as above.
 * Lane l: a = rows l/4, l/4+8 x columns 4(l%4) + {0 .. 3}, then the same rows at columns + 16;
 * b = rows 4(l%4) + {0 .. 3} and + 16, column l/4. */
DEVICE void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four 8 x 8 matrices of 16-bit elements; lanes 8i .. 8i+7 give the row addresses of matrix i. */
DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/* ---- copies, loads, stores ---- */

/* 16 bytes global -> shared, of which the first `bytes` are read and the rest are zero. */
DEVICE void cp_async_cg_16(uint32_t shared, const void *global, int bytes)
{
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

/* What streams through L2 leaves the rest there: activations, code. */
DEVICE uint64_t evict_first_policy()
{
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/* The same with such a policy. */
DEVICE void cp_async_cg_16(uint32_t shared, const void *global, int bytes, uint64_t policy)
{
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(bytes), "l"(policy)
               : "memory");
}

/* 4 bytes, by way of L1. */
DEVICE void cp_async_ca_4(uint32_t shared, const void *global, int bytes)
{
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

DEVICE void cp_async_commit_group()
{
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING> DEVICE void cp_async_wait_group()
{
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* 16 bytes by one store: where elements may be stored one by one instead, the compiler splits the vector as well. It is
 * not told what is written: not for memory that the thread reads again. */
DEVICE void st_global(void *global, uint4 v)
{
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(global), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

/* All copies of this thread, committed or not. */
DEVICE void cp_async_wait_all()
{
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/* The larger in each half, as unsigned numbers. */
DEVICE uint32_t max_halves(uint32_t a, uint32_t b)
{
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  DIFFERS_BY_ARCHITECTURE();
  return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
#endif
}

/* 16 bytes by one qualified load; zeros, and no access, if not `there`. Volatile, so that it stays behind
 * wait_for_earlier_grids where it is written behind it. */
#define PREDICATED_LOAD(name, qualifiers)                                                                              \
  DEVICE uint4 name(const void *global, bool there)                                                                    \
  {                                                                                                                    \
    uint4 v;                                                                                                           \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"    \
                 "@p ld.global" qualifiers ".v4.u32 {%0,%1,%2,%3}, [%4];}"                                             \
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)                                                      \
                 : "l"(global), "r"((unsigned)there));                                                                 \
    return v;                                                                                                          \
  }

/* For weights, which a launch reads once: no place in L1. The source may not be written during the kernel. */
PREDICATED_LOAD(ld_global_nc_no_allocate, ".nc.L1::no_allocate.L2::128B")
/* For activations: not nc, for they may be written until wait_for_earlier_grids returns, and neither the compiler nor
 * the assembler may move the load up past that. Small and read again by every channel tile, so L1 keeps them. */
PREDICATED_LOAD(ld_global, "")
/* For activations that are read once. */
PREDICATED_LOAD(ld_global_no_allocate, ".L1::no_allocate.L2::128B")

/* 1, 2 or 4 bytes, without a branch; 0, and no access, if not `there`. Volatile, so that it stays ahead of what hides
 * it. The source may not be written during the kernel. */
#define PREDICATED_BITS(BYTES, type)                                                                                   \
  template <> DEVICE uint32_t load_bits<BYTES>(const void *global, bool there)                                         \
  {                                                                                                                    \
    uint32_t v;                                                                                                        \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; @p ld.global.nc." type " %0, [%1];}"             \
                 : "=&r"(v)                                                                                            \
                 : "l"(global), "r"((unsigned)there));                                                                 \
    return v;                                                                                                          \
  }
template <int BYTES> DEVICE uint32_t load_bits(const void *global, bool there);
PREDICATED_BITS(1, "u8")
PREDICATED_BITS(2, "u16")
PREDICATED_BITS(4, "u32")

/* The 128-byte line is not read again: L2 need not write it to memory. */
DEVICE void discard_l2(const void *line)
{
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(__cvta_generic_to_global(line)) : "memory");
}

/* ---- arithmetic ---- */

/* The smaller; NaN if one is. */
DEVICE float min_nan(float a, float b)
{
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}

/* The larger; NaN if one is. */
DEVICE float max_nan(float a, float b)
{
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

/* Nearest even, saturated; NaN is 0. */
DEVICE uint32_t cvt_s8(float value)
{
  uint32_t code;
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(code) : "f"(value));
  return code & 0xff;
}

#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 890
/* Two codes of e4m3, the lower byte's first, as f16. */
DEVICE uint32_t cvt_f16x2_e4m3x2(uint32_t codes)
{
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((uint16_t)codes));
  return pair;
}
#endif

/* Two codes of e4m3, that of `low` in the low byte: nearest even, saturated; NaN is 0x7f. */
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 890
DEVICE uint32_t cvt_e4m3x2(float low, float high)
{
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
#else
DEVICE uint32_t cvt_e4m3(float value)
{
  DIFFERS_BY_ARCHITECTURE();
  const uint32_t bits = __float_as_uint(value), size = bits & 0x7fffffff;
  if (size > 0x7f800000) return 0x7f;
  const float kept = fminf(__uint_as_float(size), 448.f);
  const uint32_t k = __float_as_uint(kept);
  /* Below 2^-6 steps of 2^-9, which is the last bit of 2^14 .. 2^15. */
  const uint32_t code =
      kept < 0x1p-6f ? __float_as_uint(kept + 0x1p14f) - 0x46800000 : (k + 0x7ffff + (k >> 20 & 1) >> 20) - (120 << 3);
  return code | bits >> 24 & 0x80;
}
DEVICE uint32_t cvt_e4m3x2(float low, float high)
{
  return cvt_e4m3(low) | cvt_e4m3(high) << 8;
}
#endif

/* 2^x to 2^-22 of itself; below 2^-126 it is 0. */
DEVICE float ex2_approx_ftz(float x)
{
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float rcp_approx(float x)
{
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* To 2^-23 of itself; 0 from 2^126 on. */
DEVICE float rcp_approx_ftz(float x)
{
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* ---- the compiler ---- */

/* Register values before and after are not one to the compiler: it converts them again rather than keep what it made of
 * them. */
DEVICE void hold(uint4 &raw)
{
  asm volatile("" : "+r"(raw.x), "+r"(raw.y), "+r"(raw.z), "+r"(raw.w));
}

/* blockIdx.x, threadIdx.x, read anew: no register holds them until then. */
DEVICE unsigned ctaid_x()
{
  unsigned index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}
DEVICE unsigned tid_x()
{
  unsigned index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

#endif
