/* few: scales and zero points of a consumer warp's next slice, on their way to registers while it multiplies one. */
#ifndef CUMOE_FEW_SCALES_CUH
#define CUMOE_FEW_SCALES_CUH

#include "few/schedule.cuh"

/* Eight rows of a unit. */
struct few_rows {
  int half, octet; /* of the weights */
  bool there;
};
template <class S> DEVICE few_rows rows_of(const gemm_args &g, const few_units<S> &unit, int o)
{
  if (S::gated(g)) return {o % 2, unit.octet + o / 2, o / 2 < unit.octets};
  return {0, unit.octet + o, o < unit.octets};
}

/* n / block, for n below 2^21: a division of integers would be twenty instructions. */
DEVICE int few_quotient(int n, int block)
{
  return (int)(((float)n + .5f) * rcp_approx_ftz((float)block));
}

/* Blocks before k. */
template <class S> DEVICE int few_block(const scale_matrix &s, int k)
{
  constexpr int EACH = operand<typename S::W>::K_PER_SCALE;
  if constexpr (EACH > 0) return (unsigned)(k + s.k_origin) / EACH;
  return few_quotient(k + s.k_origin, s.block_k);
}

/* Into L2, as early as the slice's codes, for else they would come later than those: a lane a row. */
template <class S> DEVICE void prefetch_scales(const gemm_args &g, const few_units<S> &unit, int expert, int slice)
{
  const scale_matrix &s = g.b.scale;
  const few_rows at = rows_of<S>(g, unit, lane_id() / 8);
  if (!at.there) return;
  const int n = at.octet * 8 + lane_id() % 8 + s.n_origin[at.half];
  const int64_t index = (int64_t)(s.block_n == 1 ? n : few_quotient(n, s.block_n)) * (int)s.n_stride +
                        (int64_t)few_block<S>(s, slice * S::BK) * (int)s.k_stride;
  const int bytes = s.dtype == DT_F32 ? 4 : s.dtype == DT_BF16 || s.dtype == DT_F16 ? 2 : 1;
  prefetch_l2_line(static_cast<const char *>(scale_base(s, at.half, expert)) + index * bytes);
}

/* A lane's scales of row l/4 of each octet: of all the slice's k; of codes of 4 bits those of 32 k from 32 (l%4) and
 * from 128 + 32 (l%4) on. As they are stored: who converted them would wait for them. */
template <class S> struct few_scales {
  using W = typename S::W;
  static constexpr int RUNS = S::BITS == 8 ? 1 : 2, COUNT = S::OCTETS * RUNS;
  static constexpr bool PAIRS = operand<W>::K_PER_SCALE == 16, ZEROS = same_type<W, u4>;

  uint32_t raw[COUNT] = {}, second[PAIRS ? COUNT : 1] = {}, zero[ZEROS ? COUNT : 1] = {};

  DEVICE static int k_of(int slice, int run)
  {
    return slice * S::BK + (S::BITS == 8 ? 0 : 32 * (lane_id() % 4 + 4 * run));
  }

  DEVICE void load_zeros(const gemm_args &g, const few_cursor<S> &of, int expert)
  {
    const zero_matrix &z = g.b.zero;
    if (!z.table[0] && !z.base[0]) return;
#pragma unroll
    for (int o = 0; o < S::OCTETS; o++) {
      const few_rows at = rows_of<S>(g, of.unit, o);
      const uint32_t *words = z.table[at.half] ? z.table[at.half][expert] : z.base[at.half] + expert * z.expert_stride;
#pragma unroll
      for (int run = 0; run < RUNS; run++) {
        const int64_t index = (int64_t)at.octet * (int)z.n_stride +
                              (int64_t)few_block<S>(g.b.scale, k_of(of.slice, run)) * (int)z.k_stride;
        zero[o * RUNS + run] = load_bits<4>(words + index, at.there && k_of(of.slice, run) < g.k);
      }
    }
  }

  /* Strides of an expert's scales fit 32 bits. Behind the last k codes and columns are 0, and so are scales. */
  template <int BYTES> DEVICE void load_scales(const gemm_args &g, const few_cursor<S> &of, int expert)
  {
    const scale_matrix &s = g.b.scale;
    const char *low = static_cast<const char *>(scale_base(s, 0, expert)),
               *high = S::gated(g) ? static_cast<const char *>(scale_base(s, 1, expert)) : low;
    const int n_bytes = (int)s.n_stride * BYTES, k_bytes = (int)s.k_stride * BYTES;
#pragma unroll
    for (int o = 0; o < S::OCTETS; o++) {
      const few_rows at = rows_of<S>(g, of.unit, o);
      int row = at.octet * 8 + lane_id() / 4 + s.n_origin[at.half];
      if (s.block_n != 1) row = few_quotient(row, s.block_n);
      const char *base = (at.half ? high : low) + (int64_t)row * n_bytes;
#pragma unroll
      for (int run = 0; run < RUNS; run++) {
        const bool there = at.there && k_of(of.slice, run) < g.k;
        raw[o * RUNS + run] = load_bits<BYTES>(base + (int64_t)few_block<S>(s, k_of(of.slice, run)) * k_bytes, there);
        if (PAIRS)
          second[o * RUNS + run] =
              load_bits<BYTES>(base + (int64_t)few_block<S>(s, k_of(of.slice, run) + 16) * k_bytes, there);
      }
    }
  }

  /* Of the warp's first slice from `of` on. */
  DEVICE void load(const gemm_args &g, const few_smem<S> &smem, few_cursor<S> of)
  {
    if (!of.find()) return;
    const int expert = smem.table.expert[of.unit.active], dtype = g.b.scale.dtype;
    if (operand<W>::SCALE != DT_NONE || dtype == DT_E8M0 || dtype == DT_E4M3)
      load_scales<1>(g, of, expert);
    else if (dtype == DT_F32)
      load_scales<4>(g, of, expert);
    else
      load_scales<2>(g, of, expert);
    if (ZEROS) load_zeros(g, of, expert);
  }

  DEVICE void decode(int dtype, float (&value)[COUNT]) const
  {
    if (dtype == DT_F32) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) value[i] = __uint_as_float(raw[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      value[i] = dtype == DT_BF16   ? __uint_as_float(raw[i] << 16)
                 : dtype == DT_F16  ? unpack_pair<f16>(raw[i]).x
                 : dtype == DT_E8M0 ? e8m0_to_f32(raw[i])
                                    : e4m3_to_f32(raw[i]);
  }
};

#endif
