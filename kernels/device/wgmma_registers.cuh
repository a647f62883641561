/* Wrappers of instructions for unpacked weights (sm_90a), above all wgmma with its 64-row operand in registers. */
#ifndef CUMOE_WGMMA_REGISTERS_CUH
#define CUMOE_WGMMA_REGISTERS_CUH

#include "device/ptx_sm90.cuh"

DEVICE uint32_t lds_32(uint32_t address)
{
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

DEVICE uint4 lds_128(uint32_t address)
{
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

DEVICE void sts_32(uint32_t address, uint32_t v)
{
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

DEVICE void sts_128(uint32_t address, const uint4 &v)
{
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

/* Of 8 bytes in shared memory the first `bytes` are copied, the rest is 0. */
DEVICE void cp_async_ca_8(uint32_t shared, const void *global, int bytes)
{
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

/* a b, where it is asked for: not kept in a register from an earlier place. */
DEVICE uint32_t multiply_anew(uint32_t a, uint32_t b)
{
  uint32_t product;
  asm volatile("mul.lo.u32 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

/* Of two elements each, rounded once; subnormals are kept. */
template <class T> DEVICE uint32_t mul_pairs(uint32_t a, uint32_t b);
template <> DEVICE uint32_t mul_pairs<bf16>(uint32_t a, uint32_t b)
{
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
template <> DEVICE uint32_t mul_pairs<f16>(uint32_t a, uint32_t b)
{
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

/* d += a b: a 64 x 16 in registers, b 16 x N K-major in shared memory, by the lower half of wgmma_operand (the upper is
 * the same for all); d as wgmma_m64k16 has it. Of lane l of warp w: a[0] row 16w + l/4, k 2(l%4) + {0,1}; a[1] the same
 * k of 8 rows on; a[2], a[3] 8 k on. They may not be written until a wgmma_wait_group says that this is over. */
template <class T, int N> struct wgmma_registers_m64k16;

#define WGMMA_REGISTERS(type, N, D, A, B, ...)                                                                         \
  template <> struct wgmma_registers_m64k16<type, N> {                                                                 \
    template <int COUNT> static DEVICE void run(float (&d)[COUNT], const uint32_t (&a)[4], uint32_t b)                 \
    {                                                                                                                  \
      asm volatile("{.reg .b64 b; mov.b64 b, {" B ", 0x40000040}; wgmma.mma_async.sync.aligned.m64n" #N                \
                   "k16.f32." #type "." #type " {" D "}, {" A "}, b, 1, 1, 1, 0;}"                                     \
                   : __VA_ARGS__                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                              \
    }                                                                                                                  \
  };
#define WGMMA_REGISTERS_TYPES(...)  WGMMA_REGISTERS_TYPES_(__VA_ARGS__)
#define WGMMA_REGISTERS_TYPES_(...) WGMMA_REGISTERS(bf16, __VA_ARGS__) WGMMA_REGISTERS(f16, __VA_ARGS__)

WGMMA_REGISTERS_TYPES(8, "%0,%1,%2,%3", "%4,%5,%6,%7", "%8", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]))
WGMMA_REGISTERS_TYPES(16, DS16, "%8,%9,%10,%11", "%12", FS16)
WGMMA_REGISTERS_TYPES(32, DS32, "%16,%17,%18,%19", "%20", FS32)
WGMMA_REGISTERS_TYPES(48, DS48, "%24,%25,%26,%27", "%28", FS48)
WGMMA_REGISTERS_TYPES(64, DS64, "%32,%33,%34,%35", "%36", FS64)
WGMMA_REGISTERS_TYPES(80, DS80, "%40,%41,%42,%43", "%44", FS80)
WGMMA_REGISTERS_TYPES(96, DS96, "%48,%49,%50,%51", "%52", FS96)
WGMMA_REGISTERS_TYPES(112, DS112, "%56,%57,%58,%59", "%60", FS112)
WGMMA_REGISTERS_TYPES(128, DS128, "%64,%65,%66,%67", "%68", FS128)
WGMMA_REGISTERS_TYPES(144, DS144, "%72,%73,%74,%75", "%76", FS144)
WGMMA_REGISTERS_TYPES(160, DS160, "%80,%81,%82,%83", "%84", FS160)
WGMMA_REGISTERS_TYPES(176, DS176, "%88,%89,%90,%91", "%92", FS176)
WGMMA_REGISTERS_TYPES(192, DS192, "%96,%97,%98,%99", "%100", FS192)
WGMMA_REGISTERS_TYPES(208, DS208, "%104,%105,%106,%107", "%108", FS208)
WGMMA_REGISTERS_TYPES(224, DS224, "%112,%113,%114,%115", "%116", FS224)
WGMMA_REGISTERS_TYPES(240, DS240, "%120,%121,%122,%123", "%124", FS240)
WGMMA_REGISTERS_TYPES(256, DS256, "%128,%129,%130,%131", "%132", FS256)

/* The same of s8: k 4(l%4) .. + 3, 16 k on; d = a b if not `add`. */
template <int N> struct wgmma_registers_m64k32_s8;

#define WGMMA_REGISTERS_S8(...) WGMMA_REGISTERS_S8_(__VA_ARGS__)
#define WGMMA_REGISTERS_S8_(N, D, A, B, P, ...)                                                                        \
  template <> struct wgmma_registers_m64k32_s8<N> {                                                                    \
    template <int COUNT> static DEVICE void run(int32_t (&d)[COUNT], const uint32_t (&a)[4], uint32_t b, bool add)     \
    {                                                                                                                  \
      asm volatile("{.reg .b64 b; .reg .pred p; mov.b64 b, {" B ", 0x40000040}; setp.ne.b32 p, " P                     \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" D "}, {" A "}, b, p;}"                \
                   : __VA_ARGS__                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"((uint32_t)add));                          \
    }                                                                                                                  \
  };
WGMMA_REGISTERS_S8(16, DS16, "%8,%9,%10,%11", "%12", "%13", IS16)
WGMMA_REGISTERS_S8(32, DS32, "%16,%17,%18,%19", "%20", "%21", IS32)
WGMMA_REGISTERS_S8(48, DS48, "%24,%25,%26,%27", "%28", "%29", IS48)
WGMMA_REGISTERS_S8(64, DS64, "%32,%33,%34,%35", "%36", "%37", IS64)

/* The same of e4m3; STRIDE: bytes from octet to octet of b. */
template <int N> struct wgmma_registers_m64k32_e4m3;

#define WGMMA_REGISTERS_E4M3(...) WGMMA_REGISTERS_E4M3_(__VA_ARGS__)
#define WGMMA_REGISTERS_E4M3_(N, D, A, B, P, ...)                                                                      \
  template <> struct wgmma_registers_m64k32_e4m3<N> {                                                                  \
    template <int STRIDE> static DEVICE void run(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b, bool add)      \
    {                                                                                                                  \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N                      \
                   "k32.f32.e4m3.e4m3 {" D "}, {" A "}, " B ", p, 1, 1;}"                                              \
                   : __VA_ARGS__                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"((uint64_t)(1 << 30 | STRIDE >> 4) << 32 | b),     \
                     "r"((uint32_t)add));                                                                              \
    }                                                                                                                  \
  };
WGMMA_REGISTERS_E4M3(8, "%0,%1,%2,%3", "%4,%5,%6,%7", "%8", "%9", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]))
WGMMA_REGISTERS_E4M3(16, DS16, "%8,%9,%10,%11", "%12", "%13", FS16)
WGMMA_REGISTERS_E4M3(128, DS128, "%64,%65,%66,%67", "%68", "%69", FS128)

#undef WGMMA_REGISTERS_E4M3_
#undef WGMMA_REGISTERS_E4M3
#undef WGMMA_REGISTERS_S8_
#undef WGMMA_REGISTERS_S8
#undef WGMMA_REGISTERS_TYPES_
#undef WGMMA_REGISTERS_TYPES
#undef WGMMA_REGISTERS

#endif
