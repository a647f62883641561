/* few: slices of weights with scales: copies, columns, products. A row of a slice is 128 bytes. */
#ifndef CUMOE_FEW_SCALED_CUH
#define CUMOE_FEW_SCALED_CUH

#include "few/scales.cuh"

/* ---- where things lie in a stage: swizzled, so that lanes do not meet in a bank ---- */

/* A lane reads a vector of row l/4 of an octet, or a word of it, where lanes of a row have one vector. */
template <class S> DEVICE uint4 *few_codes(few_stage<S> &stage, int row, int vector)
{
  return &stage.codes[row][vector ^ ((row & 1) << 2 | (row >> 1 & 3))];
}

/* A lane reads vectors of column l/4: its codes' k. */
template <class S> DEVICE uint4 *few_elements(few_stage<S> &stage, int column, int vector)
{
  const int swizzle = S::BITS == 8 ? column & 1 : vector >> 3 & 1 ^ (column & 1) << 1;
  return &stage.columns[column][vector ^ swizzle];
}

/* A column's codes of s8 take the place of its elements. */
template <class S> DEVICE uint4 *few_column_codes(few_stage<S> &stage, int column, int vector)
{
  return &stage.columns[column][vector ^ (column & 1) << 2];
}

/* ---- copies ---- */

/* By a warp: 8 lanes bring 128 bytes of a row. Rows are shorter than 2^31 bytes. */
template <class S>
DEVICE void copy_codes(const gemm_args &g, const few_units<S> &unit, few_halves of, int slice, few_stage<S> &stage)
{
  const int r = lane_id() / 8, vector = lane_id() % 8, in_row = slice * 128 + vector * 16;
  const int stride = (int)(g.b.n_stride * S::BITS / 8), bytes = in_row * 8 < g.k * S::BITS ? 16 : 0;
  const char *low = static_cast<const char *>(of.low) + in_row, *high = static_cast<const char *>(of.high) + in_row;
  const uint32_t first = shared_address(few_codes<S>(stage, r, vector)),
                 second = shared_address(few_codes<S>(stage, 4 + r, vector));
#pragma unroll
  for (int o = 0; o < S::OCTETS; o++) {
    const few_rows at = rows_of<S>(g, unit, o);
    if (!at.there) continue;
    const char *from = at.half ? high : low;
    cp_async_cg_16(first + o * 1024, from + (int64_t)(at.octet * 8 + r) * stride, bytes, evict_first_policy());
    cp_async_cg_16(second + o * 1024, from + (int64_t)(at.octet * 8 + 4 + r) * stride, bytes, evict_first_policy());
  }
}

/* Of x, or of h: as many as there are. */
template <class S>
DEVICE void copy_elements(const gemm_args &g, const few_column (&of)[FEW_COLUMNS], int slice, few_stage<S> &stage)
{
  constexpr int VECTORS = S::BK / 8;
  const int vector = lane_id() % VECTORS, k = slice * S::BK + vector * 8;
#pragma unroll 1
  for (int c = lane_id() / VECTORS; c < S::COLUMNS; c += WARP_SIZE / VECTORS) {
    const few_column column = of[c];
    if (column < 0) break;
    const int row = S::GATHERED ? column_token(column) : column_pair(column);
    cp_async_cg_16(shared_address(few_elements<S>(stage, c, vector)),
                   static_cast<const typename S::Y *>(g.a) + row * g.a_ld + k, k < g.k ? 16 : 0);
  }
}

/* ---- columns as they are multiplied ---- */

/* A lane's part of a column: 4 elements of 128, 8 of 256. */
DEVICE uint2 load_relaxed_part(const void *source, const uint2 &)
{
  const uint64_t both = load_relaxed(static_cast<const uint64_t *>(source));
  return make_uint2((uint32_t)both, (uint32_t)(both >> 32));
}
DEVICE uint4 load_relaxed_part(const void *source, const uint4 &)
{
  return load_relaxed_vector(source);
}
DEVICE bool is_unwritten(const uint2 &v)
{
  const uint32_t most = __vmaxu2(v.x, v.y);
  return most >= 0xffff0000u || (most & 0xffff) == 0xffff;
}
DEVICE bool is_unwritten(const uint4 &v)
{
  return is_unwritten(make_uint2(__vmaxu2(v.x, v.y), __vmaxu2(v.z, v.w)));
}

/* The largest size of a warp's elements of 16 bits, four a lane: bits without a sign rank as numbers do. */
template <class T> DEVICE float largest_of_warp(const uint2 &v)
{
  const uint32_t two = __vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff);
  return unpack_pair<T>(__reduce_max_sync(ALL_LANES, max(two & 0xffff, two >> 16))).x;
}

/* s = max(amax, floor) / largest code and 1 / s as IEEE 754 has them, for numbers that are far from both ends: an
 * estimate, and what it lacks by fused multiply-add. (__fdiv_rn is a call.) */
template <class Q> DEVICE float divide_by_largest(float a)
{
  constexpr float LARGEST = LARGEST_CODE<Q>, INVERSE = 1.f / LARGEST;
  const float estimate = a * INVERSE;
  return fmaf(fmaf(-LARGEST, estimate, a), INVERSE, estimate);
}
DEVICE float inverse_of(float a)
{
  const float estimate = rcp_approx_ftz(a);
  return fmaf(estimate, fmaf(-a, estimate, 1.f), estimate);
}

/* A group's scale (quant.cuh: row_scale). */
template <class Q> DEVICE float few_row_scale(const row_format &format, float largest)
{
  if (format.mode == ROWS_STATIC) return same_type<Q, s8> && largest != largest ? largest : *format.static_scale;
  const float scale = divide_by_largest<Q>(larger<Q>(largest, ROWS_FLOOR));
  if (!format.power_of_two || scale != scale) return scale;
  return __uint_as_float(__float_as_uint(scale) + 0x007fffff & 0xff800000);
}

/* A lane's four elements of column c become codes, of e4m3 the codes' values in f16. Returns all lanes' scale. */
template <class S> DEVICE float quantize_part(const row_format &format, few_stage<S> &stage, int c, uint2 *part)
{
  using Q = typename S::X;
  const uint2 mine = *part;
  const float2 low = unpack_pair<typename S::Y>(mine.x), high = unpack_pair<typename S::Y>(mine.y);
  const float scale = few_row_scale<Q>(format, largest_of_warp<typename S::Y>(mine)), inverse = inverse_of(scale);
  const float values[4] = {low.x, low.y, high.x, high.y};
  const uint32_t codes = quantize_four<Q>(values, inverse);
  if constexpr (same_type<Q, e4m3>) {
    *part = make_uint2(cvt_f16x2_e4m3x2(codes), cvt_f16x2_e4m3x2(codes >> 16));
  } else {
    __syncwarp(); /* other lanes' elements, where these codes go, are read */
    reinterpret_cast<uint32_t *>(few_column_codes<S>(stage, c, lane_id() / 4))[lane_id() % 4] = codes;
  }
  return scale;
}

/*
 * A slice's columns as they are multiplied; of h as soon as they are written. By a warp. Returns the scales of columns
 * 2 (l%4) and the next.
 */
template <class S>
DEVICE void prepare_columns(const gemm_args &g, bool h_complete, const few_column (&of)[FEW_COLUMNS], int slice,
                            few_stage<S> &stage, float (&scale)[2])
{
  using Y = typename S::Y;
  using part = typename bytes_vector<S::BK / WARP_SIZE * 2>::type;
  constexpr int EACH = S::BK / WARP_SIZE, OF_VECTOR = 8 / EACH; /* elements of a part; parts of a vector */
#pragma unroll 1
  for (int c = 0; c < S::COLUMNS; c++) {
    const few_column column = of[c];
    if (c > 0 && column < 0) break;
    part *place = reinterpret_cast<part *>(few_elements<S>(stage, c, lane_id() / OF_VECTOR)) + lane_id() % OF_VECTOR;
    if (!S::UP && !h_complete) {
      const Y *h = static_cast<const Y *>(g.a) + column_pair(column) * g.a_ld + slice * S::BK + lane_id() * EACH;
      while (is_unwritten(*place)) *place = load_relaxed_part(h, *place);
      __syncwarp();
    }
    if constexpr (S::CODE::QUANTISES) {
      const float of_column = quantize_part<S>(g.rows, stage, c, place);
      if (c == lane_id() % 4 * 2) scale[0] = of_column;
      if (c == lane_id() % 4 * 2 + 1) scale[1] = of_column;
    }
    if constexpr (S::BITS == 4) pair_up(*place);
  }
  __syncwarp();
}

/* The column that a lane feeds. Where there are fewer, what it feeds makes sums that nobody reads. */
template <class S> DEVICE int column_of_lane()
{
  return lane_id() / 4 % S::COLUMNS;
}

/* A vector of the lane's column. */
template <class S> DEVICE uint4 take_elements(few_stage<S> &stage, int vector)
{
  return *few_elements<S>(stage, column_of_lane<S>(), vector);
}

/* ---- products ---- */

/* Word i of a vector. */
DEVICE uint32_t word_of(const uint4 &v, int i)
{
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* What a lane has of an mma's weights, rows l/4 and l/4 + 8: four k of each. */
template <class M>
DEVICE void multiply_four(float (&sum)[4], uint32_t low0, uint32_t low1, uint32_t high0, uint32_t high1, uint32_t x0,
                          uint32_t x1)
{
  mma_m16n8k16<M>(sum, {low0, high0, low1, high1}, {x0, x1});
}

/* 16 codes of a byte of rows l/4 and l/4 + 8 times those elements of column l/4, vector `at` of its codes. bias: what
 * the codes' offset asks for (decode.cuh). */
template <class S>
DEVICE void multiply_sixteen(float (&sum)[4], const uint4 &low, const uint4 &high, const uint4 (&x)[2], uint32_t bias)
{
  using M = typename S::CODE::M;
  using decode = decoder<typename S::W, M>;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint2 a = decode::decode(word_of(low, i), bias), b = decode::decode(word_of(high, i), bias);
    multiply_four<M>(sum, a.x, a.y, b.x, b.y, word_of(x[i / 2], i % 2 * 2), word_of(x[i / 2], i % 2 * 2 + 1));
  }
}
template <class S>
DEVICE void multiply_sixteen(int32_t (&sum)[4], const uint4 &low, const uint4 &high, const uint4 (&x)[2], uint32_t flip)
{
  mma_m16n8k32_s8(sum, {low.x ^ flip, high.x ^ flip, low.y ^ flip, high.y ^ flip}, {x[0].x, x[0].y});
  mma_m16n8k32_s8(sum, {low.z ^ flip, high.z ^ flip, low.w ^ flip, high.w ^ flip}, {x[0].z, x[0].w});
}

/* What decodes the offset of codes. */
template <class S> DEVICE uint32_t bias_of_bytes(int offset)
{
  if constexpr (same_type<typename S::CODE::SUM, int32_t>)
    return offset == 128 ? 0x80808080 : 0;
  else
    return decoder<typename S::W, typename S::CODE::M>::bias(offset);
}

/* Rows of a byte a code. */
template <class S, int TILES>
DEVICE void multiply_bytes(int offset, few_stage<S> &stage, const float (&row_scale)[S::OCTETS],
                           const float (&column_scale)[2], float (&sum)[S::TILES][4])
{
  const int row = lane_id() / 4;
  const uint32_t bias = bias_of_bytes<S>(offset);
  typename S::CODE::SUM part[TILES][4] = {};
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    const int vector = i * 4 + lane_id() % 4;
    uint4 x[2];
    if (same_type<typename S::CODE::SUM, int32_t>)
      x[0] = *few_column_codes<S>(stage, column_of_lane<S>(), vector);
    else
      x[0] = take_elements<S>(stage, 2 * vector), x[1] = take_elements<S>(stage, 2 * vector + 1);
#pragma unroll
    for (int t = 0; t < TILES; t++)
      multiply_sixteen<S>(part[t], *few_codes<S>(stage, t * 16 + row, vector),
                          *few_codes<S>(stage, t * 16 + 8 + row, vector), x, bias);
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int j = 0; j < 4; j++)
      sum[t][j] = fmaf((float)part[t][j], row_scale[2 * t + j / 2] * column_scale[j % 2], sum[t][j]);
  }
}

/* 16 bytes of a row are a lane's. step(sum, t, run, i, low, high, x): of tile t, word i of rows l/4 and l/4 + 8, and
 * its columns. */
template <class S, int TILES, class STEP> DEVICE void multiply_run(few_stage<S> &stage, int run, STEP step)
{
  const int row = lane_id() / 4, vector = run * 4 + lane_id() % 4;
  uint4 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = take_elements<S>(stage, 4 * vector + i);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const uint4 low = *few_codes<S>(stage, t * 16 + row, vector), high = *few_codes<S>(stage, t * 16 + 8 + row, vector);
#pragma unroll
    for (int i = 0; i < 4; i++) step(t, i, word_of(low, i), word_of(high, i), x[i]);
  }
}

/* Of a lane's values for each octet and run: the next run's take the place of this one's. Unrolled, the loop over runs
 * would want twice the registers. */
template <class T, int COUNT> DEVICE void next_run(T (&value)[COUNT])
{
#pragma unroll
  for (int o = 0; o < COUNT; o += 2) value[o] = value[o + 1];
}

/* The factor of word i of a run, for two bf16. */
DEVICE uint32_t factor_of(uint32_t factor, int)
{
  return factor;
}
DEVICE uint32_t factor_of(const uint2 &factor, int i)
{
  return i < 2 ? factor.x : factor.y;
}

template <class S, int TILES, class F>
DEVICE void multiply_owned(few_stage<S> &stage, F (&factor)[2 * S::OCTETS], float (&sum)[S::TILES][4])
{
  using M = typename S::CODE::M;
#pragma unroll 1
  for (int run = 0; run < 2; run++) {
    multiply_run<S, TILES>(stage, run, [&](int t, int i, uint32_t low, uint32_t high, const uint4 &x) {
      uint32_t a[4], b[4];
      unpack_e2m1_bf16(low, a), unpack_e2m1_bf16(high, b);
      multiply_pairs<M>(a, factor_of(factor[4 * t], i)), multiply_pairs<M>(b, factor_of(factor[4 * t + 2], i));
      multiply_four<M>(sum[t], a[0], a[1], b[0], b[1], x.x, x.y);
      multiply_four<M>(sum[t], a[2], a[3], b[2], b[3], x.z, x.w);
    });
    next_run(factor);
  }
}

/* Of u4 whose scales are those of 128 k. zero: pairs. */
template <class S, int TILES>
DEVICE void multiply_in_runs(few_stage<S> &stage, float (&scale)[2 * S::OCTETS], uint32_t (&zero)[2 * S::OCTETS],
                             float (&sum)[S::TILES][4])
{
  using M = typename S::CODE::M;
#pragma unroll 1
  for (int run = 0; run < 2; run++) {
    float part[TILES][4] = {};
    multiply_run<S, TILES>(stage, run, [&](int t, int i, uint32_t low, uint32_t high, const uint4 &x) {
      uint32_t a[4], b[4];
      unpack_u4<M>(low, zero[4 * t], a), unpack_u4<M>(high, zero[4 * t + 2], b);
      multiply_four<M>(part[t], a[0], a[1], b[0], b[1], x.x, x.y);
      multiply_four<M>(part[t], a[2], a[3], b[2], b[3], x.z, x.w);
    });
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int j = 0; j < 4; j++) sum[t][j] = fmaf(part[t][j], scale[4 * t + j / 2 * 2], sum[t][j]);
    }
    next_run(scale), next_run(zero);
  }
}

/* 32 k after 32 k. scale(octet, group), zero(octet, group): of row l/4 of that octet. */
template <class S, int TILES, int UNROLL, class SCALE, class ZERO>
DEVICE void multiply_grouped(few_stage<S> &stage, SCALE scale, ZERO zero, float (&sum)[S::TILES][4])
{
  using W = typename S::W;
  using M = typename S::CODE::M;
  const int row = lane_id() / 4, word = lane_id() % 4;
#pragma unroll UNROLL
  for (int group = 0; group < S::GROUPS; group++) {
    const uint4 x = take_elements<S>(stage, 4 * group + word);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      uint32_t a[4], b[4];
      float part[4] = {};
      unpack_group<W, M>(reinterpret_cast<const uint32_t *>(few_codes<S>(stage, t * 16 + row, group))[word],
                         zero(2 * t, group), a);
      unpack_group<W, M>(reinterpret_cast<const uint32_t *>(few_codes<S>(stage, t * 16 + 8 + row, group))[word],
                         zero(2 * t + 1, group), b);
      multiply_four<M>(part, a[0], a[1], b[0], b[1], x.x, x.y);
      multiply_four<M>(part, a[2], a[3], b[2], b[3], x.z, x.w);
      const float low = scale(2 * t, group), high = scale(2 * t + 1, group);
      sum[t][0] = fmaf(part[0], low, sum[t][0]), sum[t][1] = fmaf(part[1], low, sum[t][1]);
      sum[t][2] = fmaf(part[2], high, sum[t][2]), sum[t][3] = fmaf(part[3], high, sum[t][3]);
    }
  }
}

/* ---- a slice ---- */

/* Scales as OWNED multiplies by them: two bf16. */

/* 2^(code - 127), of which unpacked codes lack 2^126: right up to code 128. */
DEVICE uint32_t factor_of_e8m0(uint32_t code)
{
  return code * 0x00800080 + 0x3f003f00;
}

/* Of two scales of 16 k: times 2^110, which with 2^16 of REST is what unpacked codes lack. */
DEVICE uint2 factors_of_e4m3(uint32_t first, uint32_t second)
{
  const float2 both = unpack_pair<f16>(cvt_f16x2_e4m3x2(first | second << 8));
  const uint32_t a = __float_as_uint(both.x * 0x1p110f), b = __float_as_uint(both.y * 0x1p110f);
  return make_uint2(__byte_perm(a, 0, 0x3232), __byte_perm(b, 0, 0x3232));
}

/* Offset and zero point of row l/4, whose nibble that is of a word. */
DEVICE int zero_of_word(const expert_matrix &b, uint32_t word)
{
  return b.offset + (b.zero.table[0] || b.zero.base[0] ? (int)(word >> lane_id() / 4 * 4 & 15) + b.zero.add : 0);
}

/* From the lanes that loaded them to all of a row's. By a warp. */
template <class S> DEVICE void exchange_scales(const gemm_args &g, few_smem<S> &smem, const few_scales<S> &scales)
{
  auto &at = smem.exchange[warp_id()];
  const int row = lane_id() / 4, first = lane_id() % 4;
  float scale[few_scales<S>::COUNT];
  scales.decode(g.b.scale.dtype, scale);
#pragma unroll
  for (int i = 0; i < few_scales<S>::COUNT; i++) {
    const int r = i / 2 * 8 + row, group = first + i % 2 * 4;
    at.scale[r][group] = scale[i];
    if constexpr (few_scales<S>::ZEROS)
      at.zero[r][group] = (uint16_t)zero_subtrahend<typename S::CODE::M>(zero_of_word(g.b, scales.zero[i]));
  }
  __syncwarp();
}

template <class S, int TILES>
DEVICE void multiply_exchanged(few_smem<S> &smem, few_stage<S> &stage, float (&sum)[S::TILES][4])
{
  auto &at = smem.exchange[warp_id()];
  const int row = lane_id() / 4;
  multiply_grouped<S, TILES, 1>(
      stage, [&](int o, int group) { return at.scale[o * 8 + row][group]; },
      [&](int o, int group) { return (uint32_t)at.zero[o * 8 + row][group] * 0x10001; }, sum);
}

/* Scales that as factors would be too large for bf16. */
template <class S, int TILES>
DEVICE void multiply_large(const few_scales<S> &scales, few_stage<S> &stage, float (&sum)[S::TILES][4])
{
  multiply_grouped<S, TILES, 1>(
      stage,
      [&](int o, int group) {
        const int from = (lane_id() & ~3) | (group & 3);
        const uint32_t low = __shfl_sync(ALL_LANES, scales.raw[o * 2], from),
                       high = __shfl_sync(ALL_LANES, scales.raw[o * 2 + 1], from);
        return e8m0_to_f32(group < 4 ? low : high);
      },
      [](int, int) { return 0u; }, sum);
}

/* The slice whose scales are the next: they are replaced by those to come as soon as they are out of the way. */
template <class S, int TILES>
DEVICE void multiply_tiles(const gemm_args &g, few_smem<S> &smem, few_stage<S> &stage, few_scales<S> &scales,
                           const few_cursor<S> &next, const float (&column_scale)[2], float (&sum)[S::TILES][4])
{
  using code = typename S::CODE;
  using M = typename code::M;
  constexpr int COUNT = few_scales<S>::COUNT;
  if constexpr (S::BITS == 8) {
    float row_scale[COUNT];
    scales.decode(g.b.scale.dtype, row_scale);
    scales.load(g, smem, next);
    multiply_bytes<S, TILES>(g.b.offset, stage, row_scale, column_scale, sum);
  } else if constexpr (code::GROUPED) {
    if (code::IN_RUNS && g.b.scale.block_k >= 128) {
      float scale[COUNT];
      uint32_t zero[COUNT];
      scales.decode(g.b.scale.dtype, scale);
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        zero[i] = zero_subtrahend<M>(zero_of_word(g.b, scales.zero[few_scales<S>::ZEROS ? i : 0]));
      scales.load(g, smem, next);
      multiply_in_runs<S, TILES>(stage, scale, zero, sum);
    } else {
      exchange_scales<S>(g, smem, scales);
      scales.load(g, smem, next);
      multiply_exchanged<S, TILES>(smem, stage, sum);
    }
  } else if constexpr (few_scales<S>::PAIRS) {
    uint2 factor[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) factor[i] = factors_of_e4m3(scales.raw[i], scales.second[i]);
    scales.load(g, smem, next);
    multiply_owned<S, TILES>(stage, factor, sum);
  } else {
    uint32_t factor[COUNT], most = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) factor[i] = factor_of_e8m0(scales.raw[i]), most = max(most, scales.raw[i]);
    if (__any_sync(ALL_LANES, most > 128)) {
      multiply_large<S, TILES>(scales, stage, sum);
      scales.load(g, smem, next);
    } else {
      scales.load(g, smem, next);
      multiply_owned<S, TILES>(stage, factor, sum);
    }
  }
}

/* By a warp. */
template <class S>
DEVICE void multiply_scaled(const few_args &args, few_smem<S> &smem, const few_cursor<S> &here, int stage,
                            few_scales<S> &scales, float (&sum)[S::TILES][4])
{
  const gemm_args &g = gemm_of<S>(args);
  few_stage<S> &at = smem.stages[warp_id()][stage];
  few_cursor<S> next = here;
  next.slice += S::CONSUMERS;
  float column_scale[2] = {1.f, 1.f};
  prepare_columns<S>(g, !args.protocol.tickets, smem.table.column[here.unit.active], here.slice, at, column_scale);
  if (here.unit.octets > (S::gated(g) ? 1 : 2))
    multiply_tiles<S, 2>(g, smem, at, scales, next, column_scale, sum);
  else
    multiply_tiles<S, 1>(g, smem, at, scales, next, column_scale, sum);
}

#endif
