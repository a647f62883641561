/* few, weights with scales: rows of activations in shared memory, as the mma takes them: arranged once a CTA. */
#ifndef CUMOE_FEW_ARRANGE_CUH
#define CUMOE_FEW_ARRANGE_CUH

#include "few/layout.cuh"
#include "device/fixed_point.cuh"
#include "device/quant.cuh"

struct alignas(8) fixed_run { /* FIXED: of 128 k */
  float unit;
  int32_t more; /* codes are 8 too large: -128 times the sum of the elements */
};

/* FIXED, of 32 k: the unit's exponent and first bit below, above it the sum of the elements, 22 bits. */
DEVICE uint32_t pack_group(float unit, uint32_t sum)
{
  return sum << 10 | __float_as_uint(unit) >> 22;
}
DEVICE float unit_of_group(uint32_t word)
{
  return __uint_as_float(word << 22);
}
DEVICE int32_t sum_of_group(uint32_t word)
{
  return (int32_t)word >> 10;
}

/*
 * A row of k elements: for every 256 of them 512 bytes of elements of M (s8 needs the first half of them all), zeros
 * past k, in the order in which lanes take them; behind all elements, a number for every EACH of them: what their sums
 * are to be multiplied by.
 */
template <class S> struct few_row {
  using M = typename S::CODE::M;
  static constexpr int EACH = S::BITS == 8 ? 128 : 32;
  char *base;
  int blocks;

  DEVICE few_row(char *room, int k) : base(room), blocks(ceil_div(k, 256)) {}
  DEVICE uint4 *elements(int k) const { return reinterpret_cast<uint4 *>(base + k * (int)sizeof(M)); }
  DEVICE float *factors(int k) const { return reinterpret_cast<float *>(base + blocks * 512) + k / EACH; }

  /* FIXED: of each 128 k 256 bytes: a vector for each of [half of 32 k, upper or lower bytes, k / 32], which has two
   * words of even and two of odd k. */
  DEVICE uint32_t *fixed_word(int k) const
  {
    return reinterpret_cast<uint32_t *>(base + k / 128 * 256 + k % 32 / 16 * 128 + k % 128 / 32 * 16 + k % 16 / 8 * 4);
  }
  DEVICE fixed_run *run(int k) const { return reinterpret_cast<fixed_run *>(base + blocks * 512) + k / 128; }

  /* FIXED, groups: of each 32 k 32 upper bytes, then 32 lower ones. */
  DEVICE char *group(int k) const { return base + k * 2; }
  DEVICE uint32_t *group_word(int k) const { return reinterpret_cast<uint32_t *>(base + blocks * 512 + (k >> 3)); }
};

template <class S> DEVICE few_row<S> row_of_x(const few_args &args, few_smem<S> &smem)
{
  return few_row<S>(reinterpret_cast<char *>(smem.room), args.up.k);
}
/* S::UP: behind x. */
template <class S> DEVICE few_row<S> row_of_h(const few_args &args, few_smem<S> &smem, bool with_x, int active)
{
  const int first = with_x ? FEW_ROW_BYTES(args.up.k) : 0;
  return few_row<S>(reinterpret_cast<char *>(smem.room) + first + active * FEW_ROW_BYTES(args.down.k), args.down.k);
}

/* ---- eight elements, a lane's ---- */

DEVICE bool is_unwritten(const uint4 &v)
{
  const uint32_t most = __vimax3_u16x2(__vimax3_u16x2(0, v.x, v.y), v.z, v.w);
  return most >= 0xffff0000u || (most & 0xffff) == 0xffff;
}

/* Bits of the largest size among those of LANES lanes: bits without a sign rank as numbers do. */
template <int LANES> DEVICE uint32_t largest_of(const uint4 &v)
{
  const uint32_t sizes = 0x7fff7fff,
                 two = __vimax3_u16x2(__vimax3_u16x2(0, v.x & sizes, v.y & sizes), v.z & sizes, v.w & sizes);
  uint32_t most = max(two & 0xffff, two >> 16);
#pragma unroll
  for (int lanes = LANES / 2; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, lanes));
  return most;
}

/* As codes. */
template <class S> DEVICE uint2 codes_of(const uint4 &v, float scale)
{
  using Q = typename S::X;
  using Y = typename S::Y;
  const float inverse = 1.f / scale;
  const float2 a = unpack_pair<Y>(v.x), b = unpack_pair<Y>(v.y), c = unpack_pair<Y>(v.z), d = unpack_pair<Y>(v.w);
  const float low[4] = {a.x, a.y, b.x, b.y}, high[4] = {c.x, c.y, d.x, d.y};
  return make_uint2(quantize_four<Q>(low, inverse), quantize_four<Q>(high, inverse));
}

/* Codes of e4m3 as their values. */
DEVICE uint4 values_of(const uint2 &codes)
{
  return make_uint4(cvt_f16x2_e4m3x2(codes.x), cvt_f16x2_e4m3x2(codes.x >> 16), cvt_f16x2_e4m3x2(codes.y),
                    cvt_f16x2_e4m3x2(codes.y >> 16));
}

template <class S> DEVICE void put_codes(const few_row<S> &row, int k, const uint4 &v, float scale)
{
  const uint2 codes = codes_of<S>(v, scale);
  if constexpr (same_type<typename S::X, e4m3>)
    *row.elements(k) = values_of(codes);
  else
    *reinterpret_cast<uint2 *>(row.elements(k)) = codes;
}

/* FIXED: eight elements of a lane as bytes. `sum`: of those of four lanes, which have a group of 32 k. */
template <class S>
DEVICE void put_run(const few_row<S> &row, int k, float unit, uint32_t sum, const uint32_t (&low)[2],
                    const uint32_t (&high)[2])
{
#pragma unroll
  for (int lanes = 4; lanes < 16; lanes *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
  uint32_t *const to = row.fixed_word(k);
  to[0] = high[0], to[2] = high[1];
  to[16] = low[0], to[18] = low[1];
  if (lane_id() % 16 == 0) *row.run(k) = {unit, (int32_t)(0u - 128 * sum)};
}

template <class S>
DEVICE void put_group(const few_row<S> &row, int k, float unit, uint32_t sum, const uint32_t (&low)[2],
                      const uint32_t (&high)[2])
{
  uint2 *const to = reinterpret_cast<uint2 *>(row.group(k / 32 * 32)) + k % 32 / 8;
  to[0] = make_uint2(high[0], high[1]), to[4] = make_uint2(low[0], low[1]);
  if (lane_id() % 4 == 0) *row.group_word(k) = pack_group(unit, sum);
}

/* In fixed point (device/fixed_point.cuh). Eight elements are half of what a lane reads at once, or a quarter
 * (fixed.cuh). */
template <class S> DEVICE void put_fixed(const few_row<S> &row, int k, const uint4 &v)
{
  using Y = typename S::Y;
  const fixed_unit unit(unpack_pair<Y>(largest_of<16>(v)).x);
  const float times = unit.times;
  uint32_t even[4], odd[4], low[2], high[2];
  fixed_pair<Y>(v.x, times, even[0], odd[0]), fixed_pair<Y>(v.y, times, even[1], odd[1]);
  fixed_pair<Y>(v.z, times, even[2], odd[2]), fixed_pair<Y>(v.w, times, even[3], odd[3]);
  uint32_t sum = 0u - 8 * __float_as_uint(FIXED_ONE);
#pragma unroll
  for (int i = 0; i < 4; i++) sum += even[i] + odd[i];
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
  if constexpr (same_type<typename S::W, mx4>) { /* in their order */
    const uint32_t first[4] = {even[0], odd[0], even[1], odd[1]}, second[4] = {even[2], odd[2], even[3], odd[3]};
    split_bytes(first, low[0], high[0]), split_bytes(second, low[1], high[1]);
  } else {
    split_bytes(even, low[0], high[0]), split_bytes(odd, low[1], high[1]);
  }
  low[0] ^= 0x80808080, low[1] ^= 0x80808080;
  if constexpr (S::WHOLE)
    put_run(row, k, unit.worth, sum, low, high);
  else
    put_group(row, k, unit.worth, sum, low, high);
}

/* `amax`: bits of the row's largest size, where it has one scale. */
template <class S> DEVICE void put_elements(const gemm_args &g, const few_row<S> &row, int k, uint4 v, uint32_t amax)
{
  using Y = typename S::Y;
  if constexpr (S::FIXED) return put_fixed<S>(row, k, v);
  float factor = 1.f;
  if constexpr (S::CODE::QUANTISES) {
    const uint32_t own = largest_of<16>(v);
    factor = row_scale<typename S::X>(g.rows, unpack_pair<Y>(g.rows.mode == ROWS_TOKEN ? amax : own).x);
    put_codes<S>(row, k, v, factor);
  } else {
    if constexpr (S::CODE::SUBNORMAL) { /* the largest stays below 2^128 */
      const int power = min(126, 254 - (int)(largest_of<4>(v) >> 7));
      const uint32_t both = (uint32_t)(power + 127 << 7) * 0x10001;
      const auto times = as_pair<bf16>(both);
      v = make_uint4(as_bits(__hmul2(as_pair<bf16>(v.x), times)), as_bits(__hmul2(as_pair<bf16>(v.y), times)),
                     as_bits(__hmul2(as_pair<bf16>(v.z), times)), as_bits(__hmul2(as_pair<bf16>(v.w), times)));
      factor = __uint_as_float((uint32_t)(126 - power + 127) << 23);
    }
    *row.elements(k) = pair_up(v);
  }
  if (lane_id() % (few_row<S>::EACH / 8) == 0) *row.factors(k) = factor;
}

/* ---- rows ---- */

enum { FEW_CHUNK = 8 * WARP_SIZE }; /* elements: a warp's at a time */

/* Nanoseconds between looks at h: consumers want the issue slots. */
constexpr int FEW_POLL = 40;

/* Elements k .. k + 7 of a row, as soon as they are written. By a warp. */
template <class S> DEVICE uint4 take_written(const typename S::Y *row, int k, int end, bool poll)
{
  uint4 v = make_uint4(0, 0, 0, 0);
  if (k < end) v = load_relaxed_vector(row + k);
  while (poll && __any_sync(ALL_LANES, is_unwritten(v))) {
    __nanosleep(FEW_POLL);
    if (k < end) v = load_relaxed_vector(row + k);
  }
  return v;
}

template <class S> DEVICE bool has_one_scale(const gemm_args &g)
{
  return S::CODE::QUANTISES && g.rows.mode == ROWS_TOKEN;
}

/* By all threads. */
template <class S> DEVICE void arrange_x(const few_args &args, few_smem<S> &smem)
{
  const gemm_args &g = args.up;
  const typename S::Y *from = static_cast<const typename S::Y *>(g.a);
  const few_row<S> to = row_of_x<S>(args, smem);
  const int end = to.blocks * FEW_CHUNK, step = S::THREADS * 8, first = threadIdx.x * 8;
  uint32_t most = 0;
  if (has_one_scale<S>(g)) {
    uint32_t *all = reinterpret_cast<uint32_t *>(&smem.partial);
#pragma unroll 1
    for (int k = first; k < end; k += step) most = max(most, largest_of<1>(take_written<S>(from, k, g.k, false)));
    most = __reduce_max_sync(ALL_LANES, most);
    if (lane_id() == 0) all[warp_id()] = most;
    __syncthreads();
    most = __reduce_max_sync(ALL_LANES, lane_id() < S::THREADS / WARP_SIZE ? all[lane_id()] : 0u);
  }
#pragma unroll 1
  for (int k = first; k < end; k += step) put_elements<S>(g, to, k, take_written<S>(from, k, g.k, false), most);
}

/* A chunk of an active expert's h, if there is one that no warp has taken yet. Where the row has one scale, its chunks
 * come twice: measured, then arranged. By a warp. */
template <class S> DEVICE bool arrange_chunk(const few_args &args, few_smem<S> &smem, int active)
{
  const gemm_args &g = args.down;
  const bool poll = args.protocol.tickets != nullptr, one = has_one_scale<S>(g);
  const few_row<S> to = row_of_h<S>(args, smem, poll, active);
  const int item = __shfl_sync(ALL_LANES, lane_id() == 0 ? atomicAdd(&smem.taken[active], 1) : 0, 0);
  if (item >= to.blocks * (one ? 2 : 1)) return false;
  const bool measured = item >= to.blocks;
  const int k = (measured ? item - to.blocks : item) * FEW_CHUNK + lane_id() * 8;
  const int64_t pair = column_pair(smem.table.column[active][0]);
  const uint4 v = take_written<S>(static_cast<const typename S::Y *>(g.a) + pair * g.a_ld, k, g.k, poll);
  if (one && !measured) {
    const uint32_t most = largest_of<WARP_SIZE>(v);
    if (lane_id() == 0) atomicMax(&smem.largest[active], most);
    mbarrier_arrive(&smem.measured[active]);
    return true;
  }
  if (one) wait_for(&smem.measured[active], 0);
  put_elements<S>(g, to, k, v, smem.largest[active]);
  mbarrier_arrive(&smem.arranged[active]);
  return true;
}

/* By the helpers: of one active expert after the other. */
template <class S> DEVICE void arrange_h(const few_args &args, few_smem<S> &smem, int experts)
{
#pragma unroll 1
  for (int active = 0; active < experts; active++)
    while (arrange_chunk<S>(args, smem, active)) {
    }
}

/* By a consumer warp, which has nothing better to do than what others will wait for: a chunk is mostly the way to L2
 * and back, so those of all experts are asked for side by side. Lanes need not see the barrier's phase end at once. */
template <class S> DEVICE void await_h(const few_args &args, few_smem<S> &smem, int active, int experts)
{
  for (int next = active; next < experts && !__any_sync(ALL_LANES, mbarrier_test_wait(&smem.arranged[active], 0));)
    if (!arrange_chunk<S>(args, smem, next)) next++;
  wait_for(&smem.arranged[active], 0);
}

/* Before all that, by all threads. A warp's lanes would make barriers one after the other, 80 clocks each. */
template <class S> DEVICE void prepare_rows(const few_args &args, few_smem<S> &smem)
{
  if (threadIdx.x < S::layout::NOTHING) smem.zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < S::PAIRS) smem.taken[threadIdx.x] = 0, smem.largest[threadIdx.x] = 0;
  const int arrivals = ceil_div(args.down.k, (int)FEW_CHUNK) * WARP_SIZE;
  for (int active = threadIdx.x / WARP_SIZE; threadIdx.x % WARP_SIZE == 0 && active < S::PAIRS;
       active += S::THREADS / WARP_SIZE) {
    mbarrier_init(&smem.arranged[active], arrivals);
    mbarrier_init(&smem.measured[active], arrivals);
  }
}

#endif
