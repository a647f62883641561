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

/* ---- copies ---- */

/* By a warp: 8 lanes bring 128 bytes of a row. */
template <class S>
DEVICE void copy_codes(const gemm_args &g, const few_units<S> &unit, few_halves of, int slice, few_stage<S> &stage)
{
  const int r = lane_id() / 8, vector = lane_id() % 8, in_row = slice * 128 + vector * 16;
  const int64_t stride = g.b.n_stride * S::BITS / 8;
  const bool there = slice * S::BK + vector * (128 / S::BITS) < g.k;
#pragma unroll
  for (int o = 0; o < S::OCTETS; o++) {
    const few_rows at = rows_of<S>(g, unit, o);
    if (!at.there) continue;
    const char *row = static_cast<const char *>(at.half ? of.high : of.low) + (at.octet * 8 + r) * stride + in_row;
#pragma unroll
    for (int i = 0; i < 2; i++)
      cp_async_cg_16(shared_address(few_codes<S>(stage, o * 8 + i * 4 + r, vector)), row + i * 4 * stride,
                     there ? 16 : 0, evict_first_policy());
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

/* s = max(amax, floor) / 448 and 1 / s as IEEE 754 has them, for numbers that are far from both ends: an estimate, and
 * what it lacks by fused multiply-add. (__fdiv_rn is a call.) */
DEVICE float divide_by_448(float a)
{
  const float estimate = a * (1.f / 448.f);
  return fmaf(fmaf(-448.f, estimate, a), 1.f / 448.f, estimate);
}
DEVICE float inverse_of(float a)
{
  const float estimate = rcp_approx_ftz(a);
  return fmaf(estimate, fmaf(-a, estimate, 1.f), estimate);
}

/* A group's scale (quant.cuh: row_scale). */
DEVICE float few_row_scale(const row_format &format, float largest)
{
  if (format.mode == ROWS_STATIC) return *format.static_scale;
  const float scale = divide_by_448(fmaxf(largest, ROWS_FLOOR));
  return format.power_of_two ? __uint_as_float(__float_as_uint(scale) + 0x007fffff & 0xff800000) : scale;
}

/* Four elements become the values of their codes, in f16. Returns the scale of the warp's 128. */
template <class Y> DEVICE float quantize_part(const row_format &format, uint2 &part)
{
  const float scale = few_row_scale(format, largest_of_warp<Y>(part)), inverse = inverse_of(scale);
  const float2 low = unpack_pair<Y>(part.x), high = unpack_pair<Y>(part.y);
  part.x = cvt_f16x2_e4m3x2(cvt_e4m3x2(low.x * inverse, low.y * inverse));
  part.y = cvt_f16x2_e4m3x2(cvt_e4m3x2(high.x * inverse, high.y * inverse));
  return scale;
}

/*
 * A slice's columns as they are multiplied; of h as soon as they are written. By a warp. Returns their number, and the
 * scales of columns 2 (l%4) and the next.
 */
template <class S>
DEVICE int prepare_columns(const gemm_args &g, bool h_complete, const few_column (&of)[FEW_COLUMNS], int slice,
                           few_stage<S> &stage, float (&scale)[2])
{
  using Y = typename S::Y;
  using part = typename bytes_vector<S::BK / WARP_SIZE * 2>::type;
  constexpr int EACH = S::BK / WARP_SIZE, OF_VECTOR = 8 / EACH; /* elements of a part; parts of a vector */
  int c = 0;
#pragma unroll 1
  for (; c < S::COLUMNS; c++) {
    const few_column column = of[c];
    if (column < 0) break;
    part *place =
        reinterpret_cast<part *>(few_elements<S>(stage, c, lane_id() / OF_VECTOR)) + lane_id() % OF_VECTOR;
    part mine = *place;
    if (!S::UP && !h_complete) {
      const Y *h = static_cast<const Y *>(g.a) + column_pair(column) * g.a_ld + slice * S::BK + lane_id() * EACH;
      while (is_unwritten(mine)) mine = load_relaxed_part(h, mine);
      __syncwarp();
    }
    if constexpr (S::CODE::QUANTISES) {
      const float of_column = quantize_part<Y>(g.rows, mine);
      if (c == lane_id() % 4 * 2) scale[0] = of_column;
      if (c == lane_id() % 4 * 2 + 1) scale[1] = of_column;
    }
    if constexpr (S::BITS == 4) pair_up(mine);
    *place = mine;
  }
  __syncwarp();
  return c;
}

/* A vector of column l/4. */
template <class S> DEVICE uint4 take_elements(few_stage<S> &stage, int columns, int vector)
{
  const int column = lane_id() / 4;
  return column < columns ? *few_elements<S>(stage, column, vector) : make_uint4(0, 0, 0, 0);
}

/* ---- products ---- */

/* What a lane has of an mma's weights, rows l/4 and l/4 + 8: four k of each. */
template <class M>
DEVICE void multiply_four(float (&sum)[4], uint32_t low0, uint32_t low1, uint32_t high0, uint32_t high1, uint32_t x0,
                          uint32_t x1)
{
  mma_m16n8k16<M>(sum, {low0, high0, low1, high1}, {x0, x1});
}

/* Rows of a byte a code. */
template <class S>
DEVICE void multiply_bytes(few_stage<S> &stage, int columns, int tiles, const float (&row_scale)[S::OCTETS],
                           const float (&column_scale)[2], float (&sum)[S::TILES][4])
{
  using M = typename S::CODE::M;
  const int row = lane_id() / 4;
  float part[S::TILES][4] = {};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int vector = i * 4 + lane_id() % 4;
    const uint4 x0 = take_elements<S>(stage, columns, 2 * vector), x1 = take_elements<S>(stage, columns, 2 * vector + 1);
#pragma unroll
    for (int t = 0; t < S::TILES; t++) {
      if (t >= tiles) continue;
      const uint4 low = *few_codes<S>(stage, t * 16 + row, vector), high = *few_codes<S>(stage, t * 16 + 8 + row, vector);
      uint2 a = unpack_bytes<typename S::W, M>(low.x), b = unpack_bytes<typename S::W, M>(high.x);
      multiply_four<M>(part[t], a.x, a.y, b.x, b.y, x0.x, x0.y);
      a = unpack_bytes<typename S::W, M>(low.y), b = unpack_bytes<typename S::W, M>(high.y);
      multiply_four<M>(part[t], a.x, a.y, b.x, b.y, x0.z, x0.w);
      a = unpack_bytes<typename S::W, M>(low.z), b = unpack_bytes<typename S::W, M>(high.z);
      multiply_four<M>(part[t], a.x, a.y, b.x, b.y, x1.x, x1.y);
      a = unpack_bytes<typename S::W, M>(low.w), b = unpack_bytes<typename S::W, M>(high.w);
      multiply_four<M>(part[t], a.x, a.y, b.x, b.y, x1.z, x1.w);
    }
  }
#pragma unroll
  for (int t = 0; t < S::TILES; t++) {
    if (t >= tiles) continue;
#pragma unroll
    for (int j = 0; j < 4; j++)
      sum[t][j] = fmaf(part[t][j], row_scale[2 * t + j / 2] * column_scale[j % 2], sum[t][j]);
  }
}

/* Word i of a vector. */
DEVICE uint32_t word_of(const uint4 &v, int i)
{
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* 16 bytes of a row are a lane's. factor(octet, run, half of the run): its scale, for two bf16. */
template <class S, class FACTOR>
DEVICE void multiply_owned(few_stage<S> &stage, int columns, int tiles, FACTOR factor, float (&sum)[S::TILES][4])
{
  using M = typename S::CODE::M;
  const int row = lane_id() / 4;
#pragma unroll
  for (int run = 0; run < 2; run++) {
    const int vector = run * 4 + lane_id() % 4;
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = take_elements<S>(stage, columns, 4 * vector + i);
#pragma unroll
    for (int t = 0; t < S::TILES; t++) {
      if (t >= tiles) continue;
      const uint4 low = *few_codes<S>(stage, t * 16 + row, vector), high = *few_codes<S>(stage, t * 16 + 8 + row, vector);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        uint32_t a[4], b[4];
        unpack_e2m1_bf16(word_of(low, i), a), unpack_e2m1_bf16(word_of(high, i), b);
        multiply_pairs<M>(a, factor(2 * t, run, i / 2)), multiply_pairs<M>(b, factor(2 * t + 1, run, i / 2));
        multiply_four<M>(sum[t], a[0], a[1], b[0], b[1], x[i].x, x[i].y);
        multiply_four<M>(sum[t], a[2], a[3], b[2], b[3], x[i].z, x[i].w);
      }
    }
  }
}

/* 32 k after 32 k. scale(octet, group), zero(octet, group): of row l/4 of that octet. */
template <class S, class SCALE, class ZERO>
DEVICE void multiply_grouped(few_stage<S> &stage, int columns, int tiles, SCALE scale, ZERO zero,
                             float (&sum)[S::TILES][4])
{
  using W = typename S::W;
  using M = typename S::CODE::M;
  const int row = lane_id() / 4, word = lane_id() % 4;
#pragma unroll 4
  for (int group = 0; group < S::GROUPS; group++) {
    const uint4 x = take_elements<S>(stage, columns, 4 * group + word);
#pragma unroll
    for (int t = 0; t < S::TILES; t++) {
      if (t >= tiles) continue;
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
#pragma unroll
  for (int i = 0; i < few_scales<S>::COUNT; i++) {
    const int r = i / 2 * 8 + row, group = first + i % 2 * 4;
    at.scale[r][group] = scale_of_bits(scales.raw[i], g.b.scale.dtype);
    if constexpr (few_scales<S>::ZEROS)
      at.zero[r][group] =
          (uint16_t)zero_subtrahend<typename S::CODE::M>(zero_of_word(g.b, scales.zero[i]));
  }
}

template <class S>
DEVICE void multiply_exchanged(few_smem<S> &smem, few_stage<S> &stage, int columns, int tiles,
                               float (&sum)[S::TILES][4])
{
  auto &at = smem.exchange[warp_id()];
  const int row = lane_id() / 4;
  multiply_grouped<S>(
      stage, columns, tiles, [&](int o, int group) { return at.scale[o * 8 + row][group]; },
      [&](int o, int group) { return (uint32_t)at.zero[o * 8 + row][group] * 0x10001; }, sum);
}

template <class S>
DEVICE void multiply_own(const few_scales<S> &scales, few_stage<S> &stage, int columns, int tiles,
                         float (&sum)[S::TILES][4])
{
  if constexpr (few_scales<S>::PAIRS) {
    multiply_owned<S>(
        stage, columns, tiles,
        [&](int o, int run, int half) {
          const uint2 both = factors_of_e4m3(scales.raw[o * 2 + run], scales.second[o * 2 + run]);
          return half ? both.y : both.x;
        },
        sum);
  } else {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < few_scales<S>::COUNT; i++) most = max(most, scales.raw[i]);
    if (!__any_sync(ALL_LANES, most > 128)) {
      multiply_owned<S>(
          stage, columns, tiles, [&](int o, int run, int) { return factor_of_e8m0(scales.raw[o * 2 + run]); }, sum);
      return;
    }
    multiply_grouped<S>(
        stage, columns, tiles,
        [&](int o, int group) {
          const int from = (lane_id() & ~3) | group & 3;
          const uint32_t low = __shfl_sync(ALL_LANES, scales.raw[o * 2], from),
                         high = __shfl_sync(ALL_LANES, scales.raw[o * 2 + 1], from);
          return e8m0_to_f32(group < 4 ? low : high);
        },
        [](int, int) { return 0u; }, sum);
  }
}

/* The slice whose scales are the next. By a warp. */
template <class S>
DEVICE void multiply_scaled(const few_args &args, few_smem<S> &smem, const few_cursor<S> &here, int stage,
                            few_scales<S> &scales, float (&sum)[S::TILES][4])
{
  using code = typename S::CODE;
  const gemm_args &g = gemm_of<S>(args);
  few_stage<S> &at = smem.stages[warp_id()][stage];
  const int tiles = S::gated(g) || here.unit.octets > 2 ? min(here.unit.octets, (int)S::TILES) : 1;
  float column_scale[2] = {1.f, 1.f};
  if constexpr (code::GROUPED) exchange_scales<S>(g, smem, scales); /* before the barrier in prepare_columns */
  const int columns = prepare_columns<S>(g, !args.protocol.tickets, smem.table.column[here.unit.active], here.slice, at,
                                         column_scale);
  if constexpr (S::BITS == 8) {
    float row_scale[S::OCTETS];
#pragma unroll
    for (int o = 0; o < S::OCTETS; o++) row_scale[o] = scale_of_bits(scales.raw[o], g.b.scale.dtype);
    scales.load(g, smem);
    multiply_bytes<S>(at, columns, tiles, row_scale, column_scale, sum);
  } else if constexpr (code::GROUPED) {
    scales.load(g, smem);
    multiply_exchanged<S>(smem, at, columns, tiles, sum);
  } else {
    const few_scales<S> now = scales;
    scales.load(g, smem);
    multiply_own<S>(now, at, columns, tiles, sum);
  }
}

#endif
