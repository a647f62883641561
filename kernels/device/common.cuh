/* What every CUDA kernel file shares: names of kernels, small arithmetic, warp reductions, fault reports. */
#ifndef CUMOE_COMMON_CUH
#define CUMOE_COMMON_CUH

#include "args.h"

/* The kernel's name from its row of variants.def. */
#define VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)                                                \
  cumoe_##op##_##arch##_##form##_##X##_##W##_##Y##_##SCALE##_##MAJOR##_##BM##x##BN##x##BK
#define UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)                                                      \
  cumoe_##op##_##arch##_##form##_##X##_##Y##_##UNITS##x##COLUMNS##x##LANES

#define DEVICE __device__ __forceinline__

constexpr int WARP_SIZE = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

template <class T> __host__ __device__ constexpr T ceil_div(T a, T b)
{
  return (a + b - 1) / b;
}
template <class T> __host__ __device__ constexpr T round_up(T a, T b)
{
  return ceil_div(a, b) * b;
}

DEVICE int lane_id()
{
  return threadIdx.x % WARP_SIZE;
}
DEVICE int warp_id()
{
  return threadIdx.x / WARP_SIZE;
}

/* The butterfly leaves the same bits in every lane: addition commutes. */
template <class T> DEVICE T warp_sum(T value)
{
#pragma unroll
  for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(ALL_LANES, value, mask);
  return value;
}

template <class T> DEVICE T warp_max(T value)
{
#pragma unroll
  for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) value = max(value, __shfl_xor_sync(ALL_LANES, value, mask));
  return value;
}

/* Sum over lanes 0 .. own lane. */
template <class T> DEVICE T warp_scan(T value)
{
#pragma unroll
  for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
    T other = __shfl_up_sync(ALL_LANES, value, distance);
    if (lane_id() >= distance) value += other;
  }
  return value;
}

/* N sums at once (N a power of two, at most 32): lane l gets that of value[l / (32 / N)]. Each step halves what a lane
 * holds, so that all of it costs about N shuffles. Overwrites `value`. */
template <int N> DEVICE float warp_sum_each(float (&value)[N])
{
  int mask = WARP_SIZE / 2;
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2, mask /= 2) {
    const bool upper = lane_id() & mask;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float given = upper ? value[i] : value[i + half], kept = upper ? value[i + half] : value[i];
      value[i] = kept + __shfl_xor_sync(ALL_LANES, given, mask);
    }
  }
  for (; mask > 0; mask /= 2) value[0] += __shfl_xor_sync(ALL_LANES, value[0], mask);
  return value[0];
}

/* T of this launch, clamped; whoever makes the map reports a device count out of range. */
DEVICE int64_t token_total(const token_count &tokens)
{
  if (!tokens.device) return tokens.count;
  int64_t there = *tokens.device;
  return min(max(there, (int64_t)0), tokens.count);
}

/* Of the shared expert's output in a token's sum. The exact division would be a call, which costs registers. */
DEVICE float shared_weight(const combine_args &a, int64_t token)
{
  return a.shared_logit ? __fdividef(1.f, 1.f + expf(-a.shared_logit[token * a.shared_logit_ld])) : 1.f;
}

/* All CTAs, for few_up (protocol.h): their last warps first, which of few tokens have no products. */
DEVICE void fill_with_ones(const router_args &a)
{
  const int64_t threads = (int64_t)gridDim.x * blockDim.x; /* past 2^31 for many tokens in dot form */
  const int warp = (int)blockDim.x / WARP_SIZE - 1 - warp_id();
  int64_t i = ((int64_t)warp * gridDim.x + blockIdx.x) * WARP_SIZE + lane_id();
  for (; i < a.protocol.fill_vectors; i += threads)
    static_cast<uint4 *>(a.protocol.fill)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

/* Any thread, any number of times: the first report since the last clear stays. */
DEVICE void report_fault_inline(const fault_sink &sink, int code, int64_t slot, int64_t token)
{
  if (!sink.record) return;
  unsigned long long record = FAULT_RECORD(code, slot, token);
  if (atomicCAS((unsigned long long *)sink.record, 0ull, record) == 0ull && sink.mirror)
    *(volatile uint32_t *)sink.mirror = 1u;
}

/* A call, so that rare reports add no code. A call costs registers: where every one counts, use the inline one. */
static __device__ __noinline__ void report_fault(const fault_sink &sink, int code, int64_t slot, int64_t token)
{
  report_fault_inline(sink, code, slot, token);
}

DEVICE void report_token_count(const token_count &tokens, const fault_sink &sink)
{
  if (!tokens.device) return;
  if (*tokens.device < 0 || *tokens.device > tokens.count) report_fault_inline(sink, FAULT_TOKEN_COUNT, 0, 0);
}

/* Called by the whole grid; its first thread reports. */
DEVICE void check_token_count(const token_count &tokens, const fault_sink &sink)
{
  if (blockIdx.x == 0 && threadIdx.x == 0) report_token_count(tokens, sink);
}

/* A fault in a token's own data. A token count out of range is reported first, by whichever thread comes first. */
DEVICE void report_token_fault(const token_count &tokens, const fault_sink &sink, int code, int64_t slot, int64_t token)
{
  report_token_count(tokens, sink);
  report_fault_inline(sink, code, slot, token);
}

/* Dynamic shared memory, by a name. */
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name, alignment)                                                                          \
  extern __shared__ __align__(alignment)                                                                               \
  type name[]
#endif

/* The table's SMEM is exactly what the kernel lays out. */
template <size_t LAID_OUT, size_t SMEM> struct exact_smem {
  static_assert(LAID_OUT == SMEM, "the row's SMEM is not what its kernel lays out");
  static constexpr bool OK = true;
};

/* KERNEL_BODY(SMEM, body, shape ...): of a kernel that is body_gemm with body_smem in dynamic shared memory. */
#define KERNEL_BODY(...) KERNEL_BODY_(__VA_ARGS__)
#define KERNEL_BODY_(SMEM, body, ...)                                                                                  \
  {                                                                                                                    \
    using shape = __VA_ARGS__;                                                                                         \
    static_assert(exact_smem<sizeof(body##_smem<shape>), SMEM>::OK);                                                   \
    DYNAMIC_SHARED(unsigned char, smem, 1024);                                                                         \
    body##_gemm<shape>(args, *reinterpret_cast<body##_smem<shape> *>(smem));                                           \
  }

#endif
