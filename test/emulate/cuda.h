/*
 * What nvcc gives a kernel, for a C++ compiler: kernels/ is compiled with it for the CPU (test/emulate/grid.cpp). Put
 * in front of every file; device/ptx.cuh beside it stands for the one of kernels/.
 */
#ifndef CUMOE_EMULATE_CUDA_H
#define CUMOE_EMULATE_CUDA_H

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using std::isfinite;
using std::isinf;
using std::isnan;

#define __CUDACC__ /* for kernels/; CUDA's own headers are in by now */
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __cluster_dims__
#undef __align__
#define __global__
#define __device__
#define __host__
#define __shared__      static thread_local
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
/* Dynamic shared memory: whoever asks for it by whatever name gets the CTA's, aligned no better than was asked for. */
#define DYNAMIC_SHARED(type, name, alignment)                                                                          \
  type *const name = reinterpret_cast<type *>(grid::dynamic_shared + (alignment) % grid::BEST_ALIGNMENT)

struct emulated_index {
  unsigned x, y, z;
};
/* Of the calling host thread, as shared memory is: a CTA never leaves the one that it runs on. */
extern thread_local emulated_index threadIdx, blockIdx, blockDim, gridDim;

namespace grid
{

enum { BEST_ALIGNMENT = 1024 };
extern thread_local unsigned char dynamic_shared[];

/* Threads of a CTA take turns; these let others run until all of the CTA, or of the warp, have come. */
int block_barrier(int value); /* returns the number of threads whose value is not 0 */
/* `work` is done once, on what all lanes of `mask` that have not ended handed in (NULL: not one of them). */
void warp_together(unsigned mask, void *mine, void (*work)(void **of_lane));
void named_barrier(int barrier, int threads);
void let_others_run();     /* of one that polls: also CTAs beside this one */
void polled();             /* a word was read that others may write: now and then the same */
void let_other_gpus_run(); /* which are other host threads: called in what waits for them */
uint64_t now_ns();         /* a clock that stands while any grid does something else than wait for other GPUs */
[[noreturn]] void fail(const char *what);

/* Every other launch takes all in the opposite order, and does what need not be done at once as late as can be. */
bool late();

/* Copies to shared memory, of the calling thread, which arrive no earlier than somebody waits for them. */
void copy_later(void *to, const void *from, int bytes, int room);
void commit_copies();
enum { ALL_COPIES = -1 };
void await_copies(int groups_left); /* of those that were committed; ALL_COPIES: nothing is left */

/* ---- sm_90 ---- */

/* In the 64 bits of an mbarrier. Nobody's word begins as one: shared memory begins as 0xff. */
struct mbarrier {
  int32_t bytes; /* to come */
  uint16_t missing, count : 15, phase : 1;
};
mbarrier &barrier_at(uint64_t *word); /* fails if it was not initialised */
void arrive(uint64_t *word, int threads, int64_t bytes);
void wait_for_phase(uint64_t *word, uint32_t parity);
void arrive_behind_copies(uint64_t *word); /* when what copy_later has of this thread has arrived */

/* Asynchronous: at once, or when no thread of the CTA has anything else to do. */
void land_later(std::function<void()> work);

/* Of a thread, in groups: at once, or when it waits for the group. The same of a warp, called for all of it. */
void group_later(std::function<void()> work, bool of_warp);
void commit_group(bool of_warp);
void await_groups(int groups_left, bool of_warp);

unsigned cluster_rank();
unsigned char *in_cluster(const void *mine, unsigned rank); /* the same place of a CTA beside this one */
void cluster_barrier();

inline void require_aligned(const void *p, size_t bytes)
{
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail("an address that is not aligned");
}

inline unsigned lane()
{
  return threadIdx.x % 32;
}

/* f(values of all lanes, lane) for each lane of the mask. */
template <class T, class R, class F> R exchange(unsigned mask, T value, F f)
{
  struct slot {
    T value;
    R result;
    F *f;
  } mine = {value, R(), &f};
  warp_together(mask, &mine, [](void **of_lane) {
    T values[32] = {};
    bool there[32];
    for (int l = 0; l < 32; l++)
      if ((there[l] = of_lane[l] != nullptr)) values[l] = static_cast<slot *>(of_lane[l])->value;
    for (int l = 0; l < 32; l++)
      if (there[l]) {
        slot *s = static_cast<slot *>(of_lane[l]);
        s->result = (*s->f)(values, there, l);
      }
  });
  return mine.result;
}

} // namespace grid

#define __syncthreads()           ((void)grid::block_barrier(0))
#define __syncthreads_count(what) grid::block_barrier((what) ? 1 : 0)
#define __syncthreads_or(what)    (grid::block_barrier((what) ? 1 : 0) != 0)
#define __syncthreads_and(what)   (grid::block_barrier((what) ? 0 : 1) == 0)

inline void __syncwarp(unsigned mask = ~0u)
{
  grid::warp_together(mask, &mask, [](void **) {});
}

template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32)
{
  return grid::exchange<T, T>(mask, value, [=](const T *v, const bool *there, int l) {
    const int source = l / width * width + (from & (width - 1));
    return there[source] ? v[source] : v[l];
  });
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32)
{
  (void)width;
  return grid::exchange<T, T>(
      mask, value, [=](const T *v, const bool *there, int l) { return there[l ^ with] ? v[l ^ with] : v[l]; });
}
template <class T> T __shfl_up_sync(unsigned mask, T value, int distance, int width = 32)
{
  return grid::exchange<T, T>(
      mask, value, [=](const T *v, const bool *, int l) { return l % width >= distance ? v[l - distance] : v[l]; });
}
inline unsigned __ballot_sync(unsigned mask, bool what)
{
  return grid::exchange<int, unsigned>(mask, what, [](const int *v, const bool *, int) {
    unsigned bits = 0;
    for (int l = 0; l < 32; l++) bits |= (unsigned)(v[l] != 0) << l;
    return bits;
  });
}
inline bool __any_sync(unsigned mask, bool what)
{
  return __ballot_sync(mask, what) != 0;
}
inline bool __all_sync(unsigned mask, bool what)
{
  return __ballot_sync(mask, !what) == 0;
}
template <class T> unsigned __match_any_sync(unsigned mask, T value)
{
  return grid::exchange<T, unsigned>(mask, value, [](const T *v, const bool *there, int l) {
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= (unsigned)(there[i] && v[i] == v[l]) << i;
    return bits;
  });
}
template <class T> T __reduce_max_sync(unsigned mask, T value)
{
  return grid::exchange<T, T>(mask, value, [](const T *v, const bool *there, int l) {
    T most = v[l];
    for (int i = 0; i < 32; i++)
      if (there[i] && v[i] > most) most = v[i];
    return most;
  });
}
template <class T> T __reduce_min_sync(unsigned mask, T value)
{
  return grid::exchange<T, T>(mask, value, [](const T *v, const bool *there, int l) {
    T least = v[l];
    for (int i = 0; i < 32; i++)
      if (there[i] && v[i] < least) least = v[i];
    return least;
  });
}

template <class A, class B> std::common_type_t<A, B> min(A a, B b)
{
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin((T)a, (T)b);
  return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b)
{
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax((T)a, (T)b);
  return (T)a < (T)b ? (T)b : (T)a;
}

template <class To, class From> To emulated_bits(From from)
{
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned v)
{
  return emulated_bits<float>(v);
}
inline float __int_as_float(int v)
{
  return emulated_bits<float>(v);
}
inline unsigned __float_as_uint(float v)
{
  return emulated_bits<unsigned>(v);
}
inline int __float_as_int(float v)
{
  return emulated_bits<int>(v);
}
inline int __ffs(unsigned v)
{
  return __builtin_ffs((int)v);
}
inline int __popc(unsigned v)
{
  return __builtin_popcount(v);
}
inline int __clz(int v)
{
  return v ? __builtin_clz((unsigned)v) : 32;
}
inline float __expf(float x)
{
  return expf(x);
}
inline float __fdividef(float a, float b)
{
  return a / b;
}
inline float __fdiv_rn(float a, float b)
{
  return a / b;
}
inline float __fadd_rn(float a, float b)
{
  return a + b;
}
inline float __fmul_rn(float a, float b)
{
  return a * b;
}
inline float __fmaf_rn(float a, float b, float c)
{
  return fmaf(a, b, c);
}
inline float __fsqrt_rn(float x)
{
  return sqrtf(x);
}
inline float __frcp_rn(float x)
{
  return 1 / x;
}
inline float rsqrtf(float x)
{
  return (float)(1 / sqrt((double)x));
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by)
{
  return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}
/* As prmt: a nibble's upper bit asks for the byte's upper bit in all places. */
inline unsigned byte_perm_spread(unsigned a, unsigned b, unsigned select)
{
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned s = select >> 4 * i & 15;
    unsigned byte = (unsigned)(bytes >> 8 * (s & 7)) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << 8 * i;
  }
  return out;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select)
{
  return byte_perm_spread(a, b, select & 0x7777);
}
inline unsigned __vimax3_u16x2(unsigned a, unsigned b, unsigned c)
{
  unsigned most = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const unsigned of[] = {a >> shift & 0xffff, b >> shift & 0xffff, c >> shift & 0xffff};
    most |= (of[0] > of[1] ? (of[0] > of[2] ? of[0] : of[2]) : (of[1] > of[2] ? of[1] : of[2])) << shift;
  }
  return most;
}
template <class T> T __ldg(const T *p)
{
  return *p;
}

/* One thread of a grid runs at a time, but grids of several host threads. */
template <class T, class U> T atomicAdd(T *p, U v)
{
  return __atomic_fetch_add(p, (T)v, __ATOMIC_RELAXED);
}
template <class T, class U> T atomicOr(T *p, U v)
{
  return __atomic_fetch_or(p, (T)v, __ATOMIC_RELAXED);
}
template <class T, class U> T atomicMax(T *p, U v)
{
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while ((T)v > old && !__atomic_compare_exchange_n(p, &old, (T)v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
template <class T, class U> T atomicExch(T *p, U v)
{
  return __atomic_exchange_n(p, (T)v, __ATOMIC_RELAXED);
}
template <class T, class U, class V> T atomicCAS(T *p, U expected, V v)
{
  T old = (T)expected;
  __atomic_compare_exchange_n(p, &old, (T)v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return old;
}
inline void __threadfence()
{
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_system()
{
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned)
{
  grid::let_others_run();
}

#endif
