/*
 * twin: as mixed (gemm/mixed.cuh), of few rows an expert, where what counts is how few instructions a weight takes. A
 * code of e2m1 moved two bits up is a code of e4m3, 2^-6 of it; so eight weights become two registers of wgmma by seven
 * instructions, where bf16 takes twenty. Activations in bf16 have eight bits each: two codes of e4m3, of four bits each,
 * whose sum they are. Both are multiplied, into the same sums.
 *
 *   exact   what of x is a multiple of 2^-16 of the power of two at or below its slab's largest |x|; the rest is rounded
 *           to such multiples
 *   sums    of 32 k, whose weights share a scale: the tensor core adds in 14 bits. Scaled by the weights' scale they
 *           are added up in f32, those of a slab of 128 k scaled by the row's
 *
 * Order of k. Of 32 k lane q of four has the codes of k = 8 q .. 8 q + 7, a word: its lower nibbles, the even ones, are
 * multiplied by codes 4 q .. of a row in shared memory, the upper ones by 16 + 4 q .. So there the even k of each 32
 * come first, then the odd ones. A slab of rows is two operands, of the larger parts and of the smaller ones.
 */
#ifndef CUMOE_TWIN_CUH
#define CUMOE_TWIN_CUH

#include "gemm/mixed.cuh"

template <class S> struct twin_factors;

template <class PRODUCT, int CLUSTER, int BM, int BN, int BK, int STAGES, int WARPS>
struct twin_shape : mixed_shape<PRODUCT, CLUSTER, BM, BN, BK, STAGES, WARPS> {
  using SCALES = twin_factors<twin_shape>;
  static constexpr bool TWIN = true, SCALED = true, SCALES_BY_COPY = false; /* of rows, a scale a slab */
  static constexpr int RANGES = MAX_EXPERTS / 2;
  static_assert(same_type<typename PRODUCT::X, bf16> && same_type<typename PRODUCT::W, mx4>, "see above");
  static_assert(BK == 256, "row_scales has room for two slabs a stage");
  static_assert(BM <= 32, "sums of 32 k, of a slab and of all are in registers");
};

/* ---- producers ---- */

/* Two pairs' first (second: HIGH) elements as codes, of which each is one exactly or rounded. */
template <bool HIGH> DEVICE uint32_t four_codes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
  const float2 v[4] = {unpack_pair<bf16>(a), unpack_pair<bf16>(b), unpack_pair<bf16>(c), unpack_pair<bf16>(d)};
  return HIGH ? cvt_e4m3x2(v[0].y, v[1].y) | cvt_e4m3x2(v[2].y, v[3].y) << 16
              : cvt_e4m3x2(v[0].x, v[1].x) | cvt_e4m3x2(v[2].x, v[3].x) << 16;
}

/* Eight elements, times `by` (a pair), to 4 bytes of the even and 4 of the odd ones, 16 bytes apart but for the swizzle;
 * their rests to the other operand. An infinity or a NaN has the rest NaN. */
template <class S> DEVICE void store_eight(uint32_t to, uint32_t even, const uint4 &v, uint32_t by)
{
  const uint32_t x[4] = {mul_pairs<bf16>(v.x, by), mul_pairs<bf16>(v.y, by), mul_pairs<bf16>(v.z, by),
                         mul_pairs<bf16>(v.w, by)};
  uint32_t large[4], rest[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    large[i] = x[i] & 0xfff0fff0; /* four bits */
    rest[i] = sub_pairs_bf16(x[i], large[i]);
  }
  sts_32(to + even, four_codes<false>(large[0], large[1], large[2], large[3]));
  sts_32(to + (even ^ 16), four_codes<true>(large[0], large[1], large[2], large[3]));
  to += S::BM * 128;
  sts_32(to + even, four_codes<false>(rest[0], rest[1], rest[2], rest[3]));
  sts_32(to + (even ^ 16), four_codes<true>(rest[0], rest[1], rest[2], rest[3]));
}

/* A lane's elements of a row and slab: of each 32 those from 8 `word` on. Four lanes, 8 apart, have the slab; its
 * largest element is brought to 2^7 .. 2^8. */
template <class S>
DEVICE void store_twins(mixed_smem<S> &smem, int stage, int slab, int row, int word, const uint4 (&v)[4])
{
  uint32_t most = 0;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const uint32_t pairs[4] = {v[q].x, v[q].y, v[q].z, v[q].w};
#pragma unroll
    for (int i = 0; i < 4; i++) most = max_halves(most, pairs[i] & 0x7fff7fff);
  }
  most = max_halves(most, __shfl_xor_sync(ALL_LANES, most, 8));
  most = max_halves(most, __shfl_xor_sync(ALL_LANES, most, 16));
  const int exponent = (int)(max(most >> 16, most & 0xffff) >> 7),
            up = min(127 + 134 - exponent, 253); /* the exponent of a normal number, as 2 - up is */
  if (word == 0) smem.staging.row_scales[slab][stage][row] = __uint_as_float((uint32_t)(254 - up) << 23);
  const uint32_t to = shared_address(smem.rows[stage][slab * 2]) + row * 128 + word * 4;
#pragma unroll
  for (int q = 0; q < 4; q++) store_eight<S>(to, (2 * q ^ row % 8) * 16, v[q], (uint32_t)up * 0x00800080);
}

/* ---- consumers: scales ---- */

/* Of a weight's scale: the largest that sums of a slab have room for. */
enum { TWIN_LARGEST = 230 };

template <class S> DEVICE bool twin_scale_is_absent(int code)
{
  return code > TWIN_LARGEST;
}

/* What sums of 32 k lack: a lane's four rows' scales of its 32 k of a slab, times 2^6. */
template <class S> struct twin_factors : scale_places<S> {
  bool absent = false; /* some of a tile's scales are not in its products */

  DEVICE void load(const gemm_args &args, int stage, int slab, int k, float (&by)[4])
  {
    const uint32_t offset = this->slab_offset(stage, slab), turn = this->flip(args, slab, k);
    uint32_t e[4];
#pragma unroll
    for (int r = 0; r < 4; r++) e[r] = lds_u8((this->at[r] + offset) ^ turn);
    const bool some = max(max(e[0], e[1]), max(e[2], e[3])) > TWIN_LARGEST;
#pragma unroll
    for (int r = 0; r < 4; r++) by[r] = __uint_as_float(e[r] + 6 << 23);
    if (some) leave_out(args, k, e, by);
  }

  /* Also what lies past the end. */
  DEVICE void leave_out(const gemm_args &args, int k, const uint32_t (&e)[4], float (&by)[4])
  {
    absent = absent || this->inside(args, k);
#pragma unroll
    for (int r = 0; r < 4; r++)
      if (e[r] > TWIN_LARGEST) by[r] = 0.f;
  }
};

/* ---- consumers: products ---- */

/* A word of codes as two registers of four codes of e4m3. */
DEVICE void e4m3_words(uint32_t codes, uint32_t &even, uint32_t &odd)
{
  even = (codes << 4 & 0x80808080) | (codes << 2 & 0x1c1c1c1c);
  odd = (codes & 0x80808080) | (codes >> 2 & 0x1c1c1c1c);
}

/* A lane's four rows as fragments of 32 k and blocks. Octet r of weight rows is half r / 2 of block r % 2. */
template <class S> DEVICE void load_fragments(uint32_t from, uint32_t (&a)[S::BLOCKS][4])
{
#pragma unroll
  for (int r = 0; r < 4; r++)
    e4m3_words(lds_32(from + r * 8 * S::ROW_BYTES), a[r % 2][r / 2], a[r % 2][2 + r / 2]);
}

/* total += the sums of 32 k, b of four. */
template <class S, int N>
DEVICE void add_scaled(const float (&by)[4], int b, float (&part)[S::BLOCKS][N / 2], float (&total)[S::BLOCKS][N / 2])
{
  float factor[4];
#pragma unroll
  for (int r = 0; r < 4; r++) factor[r] = __shfl_sync(ALL_LANES, by[r], (int)(tid_x() % WARP_SIZE) / 4 * 4 + b);
#pragma unroll
  for (int block = 0; block < S::BLOCKS; block++) {
    hold(part[block]);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float own = factor[block + i / 2 % 2 * 2];
      total[block][i] = b == 0 ? part[block][i] * own : fmaf(part[block][i], own, total[block][i]);
    }
  }
}

/* sums += total, of a slab, whose rows' scales are there from `scales` on. */
template <class S, int N>
DEVICE void add_slab(const float *scales, const float (&total)[S::BLOCKS][N / 2],
                     float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const float2 own = *reinterpret_cast<const float2 *>(scales + j * 8 + (int)(tid_x() % 4) * 2);
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i++)
        sums[block][i] = fmaf(total[block][i], i % 2 ? own.y : own.x, sums[block][i]);
  }
}

/* sums += 128 k: 32 are unpacked while the 32 before are multiplied. codes: where a lane's word of the first 32 of its
 * first row is; rows: operand of the larger parts. */
template <class S, int N>
DEVICE void multiply_twin_slab(uint32_t codes, uint32_t rows, const float *scales, const float (&by)[4],
                               float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
  uint32_t a[2][S::BLOCKS][4];
  float part[2][S::BLOCKS][N / 2], total[S::BLOCKS][N / 2];
#pragma unroll
  for (int b = 0; b < 4; b++) {
    load_fragments<S>(codes ^ b * 16, a[b % 2]);
    wgmma_twins<N>::template run<S::BM * 128>(part[b % 2][0], part[b % 2][1], a[b % 2][0], a[b % 2][1], rows + b * 2);
    if (b == 0) continue;
    wgmma_wait_group<1>();
    add_scaled<S, N>(by, b - 1, part[(b - 1) % 2], total);
  }
  wgmma_wait_group<0>();
  add_scaled<S, N>(by, 3, part[1], total);
  add_slab<S, N>(scales, total, sums);
}

template <class S, int N, class SCALES>
DEVICE void multiply_twins_n(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, SCALES &scales,
                             float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
  const uint32_t first = shared_address(smem.codes[0]) + code_offset<S>(lane_row<S>(), 0) + (int)(tid_x() % 4) * 4;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS && k0 + slab * S::SLAB < args.k; slab++) {
      float by[4];
      scales.load(args, at.stage, slab, k0 + slab * S::SLAB, by);
      multiply_twin_slab<S, N>((first + at.stage * (uint32_t)sizeof(smem.codes[0])) ^ slab * 64,
                               (uint32_t)wgmma_operand(smem.rows[at.stage][slab * 2]),
                               smem.staging.row_scales[slab][at.stage], by, sums);
    }
    release<S>(smem, at.stage);
  }
}

/* In widths of whole octets. */
template <class S, int N, class SCALES>
DEVICE void multiply_twins(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int rows,
                           SCALES &scales, float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (N > 8) {
    if (rows <= N - 8) return multiply_twins<S, N - 8>(args, smem, at, rows, scales, sums);
  }
  multiply_twins_n<S, N>(args, smem, at, scales, sums);
}

#endif
