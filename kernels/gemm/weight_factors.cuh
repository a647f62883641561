/*
 * Codes of weights of 4 bits become the 16-bit elements that wgmma takes from registers, times their scales.
 * weight_factors<X, W>: what a lane multiplies its codes of four rows and 32 k by, and how they are unpacked.
 */
#ifndef CUMOE_WEIGHT_FACTORS_CUH
#define CUMOE_WEIGHT_FACTORS_CUH

#include "device/wgmma_registers.cuh"
#include "gemm/decode.cuh"

/* ---- e2m1 ---- */

/* Codes j and j + 4, j < 2, of a word, of which 8 bits have been shifted out for the other two pairs, become pair j:
 * magnitude at the lowest bit of the exponent, sign at the top. That is the value times 2^-126 in bf16, 2^-14 in f16,
 * and exact, subnormals and -0 included. */
template <class X> DEVICE void e2m1_pairs(uint32_t codes, uint32_t (&pair)[2]);
template <> DEVICE void e2m1_pairs<bf16>(uint32_t codes, uint32_t (&pair)[2])
{
  pair[0] = (codes & 0x000f000f) * 0x1040 & 0x81c081c0; /* sign and magnitude go to their places by one product */
  pair[1] = (codes & 0x00f000f0) * 0x0104 & 0x81c081c0;
}
template <> DEVICE void e2m1_pairs<f16>(uint32_t codes, uint32_t (&pair)[2])
{
  const uint32_t low = (codes & 0x000f000f) << 9, high = (codes & 0x00f000f0) << 5;
  pair[0] = (low & 0x10001000) * 7 + low;
  pair[1] = (high & 0x10001000) * 7 + high;
}

/* The same of all codes of a word: j and j + 4 become pair j. */
template <class X> DEVICE void e2m1_words(uint32_t codes, uint32_t (&pair)[4]);
template <> DEVICE void e2m1_words<bf16>(uint32_t codes, uint32_t (&pair)[4])
{
  const uint32_t high = codes >> 6; /* the last codes' magnitudes are in their places */
  pair[0] = (codes & 0x000f000f) * 0x1040 & 0x81c081c0;
  pair[1] = (codes & 0x00f000f0) * 0x0104 & 0x81c081c0;
  pair[2] = (high & 0x003c003c) * 0x0410 & 0x81c081c0;
  pair[3] = (high & 0x01c001c0) | (codes & 0x80008000);
}
template <> DEVICE void e2m1_words<f16>(uint32_t codes, uint32_t (&pair)[4])
{
  uint32_t each[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    e2m1_pairs<f16>(codes >> i * 8, each);
    pair[2 * i] = each[0];
    pair[2 * i + 1] = each[1];
  }
}

DEVICE float e2m1_to_f32(uint32_t code)
{
  return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}

/* ---- factors ---- */

/* Whether a scale's code is one that products of elements cannot have. */
template <class X, class W> DEVICE bool scale_is_absent(int code)
{
  if (same_type<W, nv4>) return (code & 127) == 127; /* NaN */
  return same_type<W, mx4> && (code > 128 || (same_type<X, f16> && code < 99));
}

/* set: of a row's scale. The same in two steps: `prepared` makes a word, `restore` sets what it was made of. decode:
 * pairs of codes j and j + 4 of a row's word, all four, or the first two of what has been shifted out; scaled: such a
 * pair of word w of a lane's 32 codes, times the scale. */
template <class X, class W> struct weight_factors;

template <class X> struct e2m1_factors {
  DEVICE static void decode(int, uint32_t codes, uint32_t (&pair)[2]) { e2m1_pairs<X>(codes, pair); }
  DEVICE static void decode(int, uint32_t codes, uint32_t (&pair)[4]) { e2m1_words<X>(codes, pair); }
};

template <class X> struct weight_factors<X, mx4> : e2m1_factors<X> {
  static constexpr float REST = 1.f;
  uint32_t by[4]; /* of each row: 2^(e - 127) over the unit of pairs, twice */

  static constexpr bool WIDE = same_type<X, bf16>;
  static constexpr uint32_t FIRST = WIDE ? 0 : 99, LAST = 128; /* codes that factors can have */
  static constexpr uint32_t ABSENT = WIDE ? 130 : 98;          /* makes a zero */

  DEVICE static bool any_absent(uint32_t e) { return e - FIRST > LAST - FIRST; }
  DEVICE static uint32_t prepared(uint32_t e) { return WIDE ? (e + 126) * 0x00800080 : (e - 98) * 0x04000400; }
  DEVICE void restore(int r, uint32_t word) { by[r] = word; }
  DEVICE void set(int r, uint32_t e) { restore(r, prepared(e)); }

  DEVICE uint32_t scaled(int r, int, uint32_t pair) const { return mul_pairs<X>(pair, by[r]); }
};

/* The scale over the unit of pairs would be too large: sums are short of 2^7. */
template <class X> struct weight_factors<X, nv4> : e2m1_factors<X> {
  static constexpr float REST = 128.f;
  static constexpr uint32_t ABSENT = 0; /* makes a zero */
  uint32_t by[4];                       /* of each row, for the first and last 16 of 32 codes */

  /* Of two codes of e4m3. */
  DEVICE static bool any_absent(uint32_t codes) { return ((codes & 0x7f7f) + 0x0101 & 0x8080) != 0; }
  DEVICE static uint32_t prepared(uint32_t codes)
  {
    const uint32_t each = __byte_perm(codes, 0, 0x4140);
    if (same_type<X, bf16>) {
      const uint32_t bits = (each & 0x007f007f) << 4 | (each & 0x00800080) << 8; /* the value times 2^-120 */
      return mul_pairs<bf16>(mul_pairs<bf16>(bits, 0x7f007f00), 0x77807780);     /* 2^127, 2^112 */
    }
    const uint32_t bits = (each & 0x007f007f) << 7 | (each & 0x00800080) << 8; /* 2^-8 */
    return mul_pairs<f16>(bits, 0x78007800);                                   /* 2^15 */
  }
  DEVICE void restore(int r, uint32_t word) { by[r] = word; }
  DEVICE void set(int r, uint32_t codes) { restore(r, prepared(codes)); }

  DEVICE uint32_t scaled(int r, int w, uint32_t pair) const
  {
    return mul_pairs<X>(pair, __byte_perm(by[r], 0, w < 2 ? 0x1010 : 0x3232));
  }
};

/* Codes less a zero point are exact, times the scale they are rounded once. */
template <class X> struct u4_factors {
  static constexpr float REST = 1.f;
  uint32_t zero[4]; /* of each row: decoder::bias */

  template <int PAIRS> DEVICE void decode(int r, uint32_t codes, uint32_t (&pair)[PAIRS]) const
  {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) pair[i] = decoder<u4, X>::decode_two(codes >> i * 4, zero[r]);
  }
};

/* Scales of X's own type. */
template <class X> struct weight_factors<X, u4> : u4_factors<X> {
  uint32_t by[4]; /* of each row, twice */

  /* A scale's bits, and a bias. */
  DEVICE static uint32_t prepared(uint32_t scale, uint32_t bias) { return __byte_perm(scale, bias, 0x5410); }
  DEVICE void restore(int r, uint32_t word) { set(r, __byte_perm(word, 0, 0x1010), __byte_perm(word, 0, 0x3232)); }
  DEVICE void set(int r, uint32_t twice, uint32_t bias) { by[r] = twice, this->zero[r] = bias; }

  DEVICE uint32_t scaled(int r, int, uint32_t pair) const { return mul_pairs<X>(pair, by[r]); }
};

/* Of another: the product is f32. */
template <class X> struct wide_factors : u4_factors<X> {
  float by[4];

  DEVICE uint32_t scaled(int r, int, uint32_t pair) const
  {
    const float2 both = unpack_pair<X>(pair);
    return pack_pair<X>(both.x * by[r], both.y * by[r]);
  }
};

/* Of word w of a lane's codes in each of its rows. */
template <class FACTORS, int ROWS, int PAIRS>
DEVICE void unpack_words(const FACTORS &factors, const uint32_t (&word)[ROWS], int w, uint32_t (&pair)[ROWS][PAIRS])
{
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    factors.decode(r, word[r], pair[r]);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) pair[r][i] = factors.scaled(r, w, pair[r][i]);
  }
}

#endif
