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
DEVICE int few_quotient(int n, float inverse)
{
  return (int)(((float)n + .5f) * inverse);
}

/* A lane's scales of row l/4 of each octet: of all the slice's k; of codes of 4 bits those of 32 k from 32 (l%4) and
 * from 128 + 32 (l%4) on. As they are stored: who converted them would wait for them. */
template <class S> struct few_scales {
  using W = typename S::W;
  static constexpr int RUNS = S::BITS == 8 ? 1 : 2, COUNT = S::OCTETS * RUNS;
  static constexpr bool PAIRS = operand<W>::K_PER_SCALE == 16, ZEROS = same_type<W, u4>;

  few_cursor<S> ahead;
  float rows, columns; /* 1 / blocks */
  uint32_t raw[COUNT], second[PAIRS ? COUNT : 1], zero[ZEROS ? COUNT : 1];

  DEVICE few_scales(const gemm_args &g, const few_cursor<S> &first)
      : ahead(first), rows(rcp_approx_ftz((float)g.b.scale.block_n)), columns(rcp_approx_ftz((float)g.b.scale.block_k)),
        raw{}, second{}, zero{}
  {
  }

  /* Blocks before k. */
  DEVICE int block(const scale_matrix &s, int k) const
  {
    if constexpr (operand<W>::K_PER_SCALE > 0) return (unsigned)(k + s.k_origin) / operand<W>::K_PER_SCALE;
    return few_quotient(k + s.k_origin, columns);
  }
  DEVICE int k_of(int run) const
  {
    return ahead.slice * S::BK + (S::BITS == 8 ? 0 : 32 * (lane_id() % 4 + 4 * run));
  }

  DEVICE void load_zeros(const gemm_args &g, int expert)
  {
    const zero_matrix &z = g.b.zero;
    if (!z.table[0] && !z.base[0]) return;
#pragma unroll
    for (int o = 0; o < S::OCTETS; o++) {
      const few_rows at = rows_of<S>(g, ahead.unit, o);
      const uint32_t *words = z.table[at.half] ? z.table[at.half][expert] : z.base[at.half] + expert * z.expert_stride;
#pragma unroll
      for (int run = 0; run < RUNS; run++) {
        const int64_t index = (int64_t)at.octet * (int)z.n_stride + (int64_t)block(g.b.scale, k_of(run)) * (int)z.k_stride;
        zero[o * RUNS + run] = load_bits<4>(words + index, at.there && k_of(run) < g.k);
      }
    }
  }

  /* Strides of an expert's scales fit 32 bits. Behind the last k codes and columns are 0, and so are scales. */
  template <int BYTES> DEVICE void load_scales(const gemm_args &g, int expert)
  {
    const scale_matrix &s = g.b.scale;
    const char *low = static_cast<const char *>(scale_base(s, 0, expert)),
               *high = S::gated(g) ? static_cast<const char *>(scale_base(s, 1, expert)) : low;
    const int n_bytes = (int)s.n_stride * BYTES, k_bytes = (int)s.k_stride * BYTES;
#pragma unroll
    for (int o = 0; o < S::OCTETS; o++) {
      const few_rows at = rows_of<S>(g, ahead.unit, o);
      int row = at.octet * 8 + lane_id() / 4 + s.n_origin[at.half];
      if (s.block_n != 1) row = few_quotient(row, rows);
      const char *of = (at.half ? high : low) + (int64_t)row * n_bytes;
#pragma unroll
      for (int run = 0; run < RUNS; run++) {
        const bool there = at.there && k_of(run) < g.k;
        raw[o * RUNS + run] = load_bits<BYTES>(of + (int64_t)block(s, k_of(run)) * k_bytes, there);
        if (PAIRS) second[o * RUNS + run] = load_bits<BYTES>(of + (int64_t)block(s, k_of(run) + 16) * k_bytes, there);
      }
    }
  }

  /* Of the slice that `ahead` has come to, which becomes the next. */
  DEVICE void load(const gemm_args &g, const few_smem<S> &smem)
  {
    if (!ahead.find()) return;
    const int expert = smem.table.expert[ahead.unit.active], dtype = g.b.scale.dtype;
    if (operand<W>::SCALE != DT_NONE || dtype == DT_E8M0 || dtype == DT_E4M3)
      load_scales<1>(g, expert);
    else if (dtype == DT_F32)
      load_scales<4>(g, expert);
    else
      load_scales<2>(g, expert);
    if (ZEROS) load_zeros(g, expert);
    ahead.slice += S::CONSUMERS;
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
