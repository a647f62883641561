/*
 * Wrappers of single PTX instructions of sm_90a, named after them, and the one descriptor that wgmma wants of an
 * operand in shared memory.
 */
#ifndef CUMOE_PTX_SM90_CUH
#define CUMOE_PTX_SM90_CUH

#include "device/ptx.cuh"

/* ---- mbarrier ---- */

DEVICE void mbarrier_init(uint64_t *barrier, uint32_t count)
{
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

DEVICE void fence_mbarrier_init()
{
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void mbarrier_arrive(uint64_t *barrier)
{
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* On the barrier at the same place in CTA `rank` of the cluster. */
DEVICE void mbarrier_arrive_cluster(uint64_t *barrier, uint32_t rank)
{
  asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [a];}" ::"r"(
                   shared_address(barrier)),
               "r"(rank)
               : "memory");
}

/* To the same place in the shared memory of CTA `rank`. */
DEVICE void st_shared_cluster(float *place, uint32_t rank, float value)
{
  asm volatile(
      "{.reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; st.shared::cluster.f32 [a], %2;}" ::"r"(shared_address(place)),
      "r"(rank), "f"(value)
      : "memory");
}

/* The same, counted as 4 bytes by the barrier at the same place there. */
DEVICE void st_async_cluster(int32_t *place, uint32_t rank, int32_t value, uint64_t *barrier)
{
  asm volatile(
      "{.reg .b32 a, b; mapa.shared::cluster.u32 a, %0, %2; mapa.shared::cluster.u32 b, %1, %2; "
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], %3, [b];}" ::"r"(shared_address(place)),
      "r"(shared_address(barrier)), "r"(rank), "r"(value)
      : "memory");
}

DEVICE void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes)
{
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

/* Arrives, as one of the count, when all that this thread has copied by cp.async is there. */
DEVICE void cp_async_mbarrier_arrive_noinc(uint64_t *barrier)
{
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Whether the phase of this parity is over; the thread may sleep until it is, or for a while. */
DEVICE bool mbarrier_try_wait(uint64_t *barrier, uint32_t parity)
{
  uint32_t over;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(over)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return over;
}

/* Whether a phase is over: other than try_wait it never stays to wait. */
DEVICE bool mbarrier_test_wait(uint64_t *barrier, uint32_t parity)
{
  uint32_t over;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(over)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return over;
}

/* ---- bulk copies ---- */

/* Addresses and size multiples of 16. */
DEVICE void cp_async_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *barrier)
{
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

/* Boxes land whole: what lies outside the tensor is zero and counts as bytes. */
DEVICE void cp_async_bulk_tensor_2d(void *shared, const void *map, int32_t c0, int32_t c1, uint64_t *barrier)
{
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(c0), "r"(c1), "r"(shared_address(barrier))
      : "memory");
}

DEVICE void cp_async_bulk_tensor_4d(void *shared, const void *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                                    uint64_t *barrier)
{
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(barrier))
               : "memory");
}

DEVICE void cp_async_bulk_tensor_5d(void *shared, const void *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                                    int32_t c4, uint64_t *barrier)
{
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(shared)),
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(shared_address(barrier))
               : "memory");
}

/* Into the same place of every CTA of the cluster that `ctas` has a bit for, counted by the barriers there. */
DEVICE void cp_async_bulk_tensor_5d_multicast(void *shared, const void *map, int32_t c0, int32_t c1, int32_t c2,
                                              int32_t c3, int32_t c4, uint64_t *barrier, uint16_t ctas)
{
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(shared)),
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(shared_address(barrier)), "h"(ctas)
               : "memory");
}

DEVICE void cp_async_bulk_tensor_4d_multicast(void *shared, const void *map, int32_t c0, int32_t c1, int32_t c2,
                                              int32_t c3, uint64_t *barrier, uint16_t ctas)
{
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(barrier)), "h"(ctas)
               : "memory");
}

DEVICE void cp_async_bulk_tensor_2d_multicast(void *shared, const void *map, int32_t c0, int32_t c1, uint64_t *barrier,
                                              uint16_t ctas)
{
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
               "l"(map), "r"(c0), "r"(c1), "r"(shared_address(barrier)), "h"(ctas)
               : "memory");
}

/* Into L2; address and size multiples of 16. */
DEVICE void prefetch_l2(const void *from, uint32_t bytes)
{
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

DEVICE void prefetch_tensormap(const void *map)
{
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* evict_last: the line is discarded before long, and should stay in L2 until then. */
DEVICE void st_global_16(void *to, const uint4 &value, bool evict_last)
{
  if (!evict_last) {
    *static_cast<uint4 *>(to) = value;
    return;
  }
  uint64_t last;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w), "l"(last)
               : "memory");
}

/* What this thread wrote to shared memory (cp.async too, once waited for) becomes visible to wgmma. */
DEVICE void fence_proxy_async_shared()
{
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* What is visible to this thread in global memory becomes so to the bulk copies that it starts. */
DEVICE void fence_proxy_async_global()
{
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* ---- warps, clusters ---- */

DEVICE uint32_t cluster_ctarank()
{
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/* True in one lane of the warp. A bulk copy behind it is one instruction; behind a comparison of thread numbers ptxas
 * makes it a loop over the lanes that might be there. */
DEVICE bool elect_one()
{
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}

DEVICE void barrier_cluster()
{
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

template <int REGISTERS> DEVICE void setmaxnreg_dec()
{
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> DEVICE void setmaxnreg_inc()
{
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

DEVICE void bar_sync(int barrier, int threads)
{
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* Four 8 x 8 matrices of 16-bit elements, transposed on their way; lanes 8i .. 8i+7 give the row addresses of matrix
 * i. */
DEVICE void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4])
{
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

/* ---- wgmma ---- */

DEVICE void wgmma_fence()
{
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit_group()
{
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING> DEVICE void wgmma_wait_group()
{
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Keeps the compiler from moving accumulators across this point while wgmma owns them. */
template <int COUNT> DEVICE void hold(float (&d)[COUNT])
{
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int COUNT> DEVICE void hold(int32_t (&d)[COUNT])
{
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(d[i])::"memory");
}

/* Rows of 128 bytes along k in the 128-byte swizzle, 1024-byte aligned: 8 rows are 1024 bytes. Every `each`-th eight of
 * rows is the operand's. 16 elements of k on: + 2; 8 rows on: + 64.
 * Or N-major, each 1: 64 of the operand's rows at one k are 128 bytes, 8 k 1024 bytes. 16 k on: + 128. */
DEVICE uint64_t wgmma_operand(const void *shared, int each = 1)
{
  return (uint64_t)(shared_address(shared) >> 4 & 0x3fff) | 1ull << 16 | (uint64_t)(each * 1024 >> 4) << 32 |
         1ull << 62;
}

/* d += a b (d = a b if not `add`): a 64 x 16, b 16 x N, both K-major in shared memory, or a N-major; d 64 x N f32. Warp
 * w of the four has rows 16w .. 16w + 15; d[4j + 2h + i] of lane l is row 16w + l/4 + 8h, column 8j + 2(l%4) + i. */
template <class T, int N, bool N_MAJOR = false> struct wgmma_m64k16;

#define D0   "%0,%1,%2,%3,%4,%5,%6,%7"
#define D8   ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D16  ",%16,%17,%18,%19,%20,%21,%22,%23"
#define D24  ",%24,%25,%26,%27,%28,%29,%30,%31"
#define D32  ",%32,%33,%34,%35,%36,%37,%38,%39"
#define D40  ",%40,%41,%42,%43,%44,%45,%46,%47"
#define D48  ",%48,%49,%50,%51,%52,%53,%54,%55"
#define D56  ",%56,%57,%58,%59,%60,%61,%62,%63"
#define D64  ",%64,%65,%66,%67,%68,%69,%70,%71"
#define D72  ",%72,%73,%74,%75,%76,%77,%78,%79"
#define D80  ",%80,%81,%82,%83,%84,%85,%86,%87"
#define D88  ",%88,%89,%90,%91,%92,%93,%94,%95"
#define D96  ",%96,%97,%98,%99,%100,%101,%102,%103"
#define D104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define D112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define D120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define F8(i)                                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),          \
      "+f"(d[i + 7])
#define WGMMA(type, N_MAJOR, N, D, A, B, P, ...)                                                                       \
  template <> struct wgmma_m64k16<type, N, N_MAJOR> {                                                                  \
    template <int COUNT> static DEVICE void run(float (&d)[COUNT], uint64_t a, uint64_t b, uint32_t add)               \
    {                                                                                                                  \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type     \
                   "." #type " {" D "}, " A ", " B ", p, 1, 1, " #N_MAJOR ", 0;}"                                      \
                   : __VA_ARGS__                                                                                       \
                   : "l"(a), "l"(b), "r"(add));                                                                        \
    }                                                                                                                  \
  };
#define WGMMA_TYPES(...)  WGMMA_TYPES_(0, __VA_ARGS__) WGMMA_TYPES_(1, __VA_ARGS__)
#define WGMMA_TYPES_(...) WGMMA_(bf16, __VA_ARGS__) WGMMA_(f16, __VA_ARGS__)
#define WGMMA_(...)       WGMMA(__VA_ARGS__)
#define DS16              D0
#define FS16              F8(0)
#define DS32              DS16 D8
#define FS32              FS16, F8(8)
#define DS48              DS32 D16
#define FS48              FS32, F8(16)
#define DS64              DS48 D24
#define FS64              FS48, F8(24)
#define DS80              DS64 D32
#define FS80              FS64, F8(32)
#define DS96              DS80 D40
#define FS96              FS80, F8(40)
#define DS112             DS96 D48
#define FS112             FS96, F8(48)
#define DS128             DS112 D56
#define FS128             FS112, F8(56)
#define DS144             DS128 D64
#define FS144             FS128, F8(64)
#define DS160             DS144 D72
#define FS160             FS144, F8(72)
#define DS176             DS160 D80
#define FS176             FS160, F8(80)
#define DS192             DS176 D88
#define FS192             FS176, F8(88)
#define DS208             DS192 D96
#define FS208             FS192, F8(96)
#define DS224             DS208 D104
#define FS224             FS208, F8(104)
#define DS240             DS224 D112
#define FS240             FS224, F8(112)
#define DS256             DS240 D120
#define FS256             FS240, F8(120)
WGMMA_TYPES(16, DS16, "%8", "%9", "%10", FS16)
WGMMA_TYPES(32, DS32, "%16", "%17", "%18", FS32)
WGMMA_TYPES(48, DS48, "%24", "%25", "%26", FS48)
WGMMA_TYPES(64, DS64, "%32", "%33", "%34", FS64)
WGMMA_TYPES(80, DS80, "%40", "%41", "%42", FS80)
WGMMA_TYPES(96, DS96, "%48", "%49", "%50", FS96)
WGMMA_TYPES(112, DS112, "%56", "%57", "%58", FS112)
WGMMA_TYPES(128, DS128, "%64", "%65", "%66", FS128)
WGMMA_TYPES(144, DS144, "%72", "%73", "%74", FS144)
WGMMA_TYPES(160, DS160, "%80", "%81", "%82", FS160)
WGMMA_TYPES(176, DS176, "%88", "%89", "%90", FS176)
WGMMA_TYPES(192, DS192, "%96", "%97", "%98", FS192)
WGMMA_TYPES(208, DS208, "%104", "%105", "%106", FS208)
WGMMA_TYPES(224, DS224, "%112", "%113", "%114", FS224)
WGMMA_TYPES(240, DS240, "%120", "%121", "%122", FS240)
WGMMA_TYPES(256, DS256, "%128", "%129", "%130", FS256)

/* The same with elements of a byte: a 64 x 32, b 32 x N; d f32 of e4m3, which the tensor core adds up in 14 bits, or
 * s32 of s8. */
template <class T, int N> struct wgmma_m64k32;

#define I8(i)                                                                                                          \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]),          \
      "+r"(d[i + 7])
#define WGMMA_BYTES(type, SUM, sum, TAIL, N, D, A, B, P, ...)                                                          \
  template <> struct wgmma_m64k32<type, N> {                                                                           \
    template <int COUNT> static DEVICE void run(SUM (&d)[COUNT], uint64_t a, uint64_t b, uint32_t add)                 \
    {                                                                                                                  \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32." #sum          \
                   "." #type "." #type " {" D "}, " A ", " B ", p" TAIL ";}"                                           \
                   : __VA_ARGS__                                                                                       \
                   : "l"(a), "l"(b), "r"(add));                                                                        \
    }                                                                                                                  \
  };
#define WGMMA_E4M3(...)  WGMMA_E4M3_(__VA_ARGS__)
#define WGMMA_E4M3_(...) WGMMA_BYTES(e4m3, float, f32, ", 1, 1", __VA_ARGS__)
#define WGMMA_S8(...)    WGMMA_S8_(__VA_ARGS__)
#define WGMMA_S8_(...)   WGMMA_BYTES(s8, int32_t, s32, "", __VA_ARGS__)
#define IS16             I8(0)
#define IS32             IS16, I8(8)
#define IS48             IS32, I8(16)
#define IS64             IS48, I8(24)
#define IS80             IS64, I8(32)
#define IS96             IS80, I8(40)
#define IS112            IS96, I8(48)
#define IS128            IS112, I8(56)
#define IS144            IS128, I8(64)
#define IS160            IS144, I8(72)
#define IS176            IS160, I8(80)
WGMMA_E4M3(16, DS16, "%8", "%9", "%10", FS16)
WGMMA_E4M3(32, DS32, "%16", "%17", "%18", FS32)
WGMMA_E4M3(48, DS48, "%24", "%25", "%26", FS48)
WGMMA_E4M3(64, DS64, "%32", "%33", "%34", FS64)
WGMMA_E4M3(80, DS80, "%40", "%41", "%42", FS80)
WGMMA_E4M3(96, DS96, "%48", "%49", "%50", FS96)
WGMMA_E4M3(112, DS112, "%56", "%57", "%58", FS112)
WGMMA_E4M3(128, DS128, "%64", "%65", "%66", FS128)
WGMMA_E4M3(144, DS144, "%72", "%73", "%74", FS144)
WGMMA_E4M3(160, DS160, "%80", "%81", "%82", FS160)
WGMMA_E4M3(176, DS176, "%88", "%89", "%90", FS176)
WGMMA_S8(16, DS16, "%8", "%9", "%10", IS16)
WGMMA_S8(32, DS32, "%16", "%17", "%18", IS32)
WGMMA_S8(48, DS48, "%24", "%25", "%26", IS48)
WGMMA_S8(64, DS64, "%32", "%33", "%34", IS64)
WGMMA_S8(80, DS80, "%40", "%41", "%42", IS80)
WGMMA_S8(96, DS96, "%48", "%49", "%50", IS96)
WGMMA_S8(112, DS112, "%56", "%57", "%58", IS112)
WGMMA_S8(128, DS128, "%64", "%65", "%66", IS128)
WGMMA_S8(144, DS144, "%72", "%73", "%74", IS144)
WGMMA_S8(160, DS160, "%80", "%81", "%82", IS160)
WGMMA_S8(176, DS176, "%88", "%89", "%90", IS176)

#endif
