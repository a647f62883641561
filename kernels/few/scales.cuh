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
struct few_divisor {
  int block;
  float inverse;

  DEVICE few_divisor(int b) : block(b), inverse(rcp_approx_ftz((float)b)) {}
  DEVICE int quotient(int n) const { return block == 1 ? n : (int)(((float)n + .5f) * inverse); }
};

/* As it is stored; not converted, so that nobody waits for it. */
DEVICE uint32_t load_scale_bits(const char *base, int64_t index, int dtype)
{
  if (dtype == DT_F32) return reinterpret_cast<const uint32_t *>(base)[index];
  if (dtype == DT_F16 || dtype == DT_BF16) return reinterpret_cast<const uint16_t *>(base)[index];
  return reinterpret_cast<const uint8_t *>(base)[index];
}

DEVICE float scale_of_bits(uint32_t bits, int dtype)
{
  if (dtype == DT_F32) return __uint_as_float(bits);
  if (dtype == DT_BF16) return __uint_as_float(bits << 16);
  if (dtype == DT_F16) return unpack_pair<f16>(bits).x;
  return dtype == DT_E8M0 ? e8m0_to_f32(bits) : e4m3_to_f32(bits);
}

/* A lane's scales of row l/4 of each octet: of all the slice's k; of codes of 4 bits those of 32 k from 32 (l%4) and
 * from 128 + 32 (l%4) on. */
template <class S> struct few_scales {
  static constexpr int RUNS = S::BITS == 8 ? 1 : 2, COUNT = S::OCTETS * RUNS;
  static constexpr bool PAIRS = operand<typename S::W>::K_PER_SCALE == 16, ZEROS = same_type<typename S::W, u4>;

  few_cursor<S> ahead;
  few_divisor rows, columns;
  uint32_t raw[COUNT], second[PAIRS ? COUNT : 1], zero[ZEROS ? COUNT : 1];

  DEVICE few_scales(const gemm_args &g, const few_cursor<S> &first)
      : ahead(first), rows(g.b.scale.block_n), columns(g.b.scale.block_k), raw{}, second{}, zero{}
  {
  }

  DEVICE int64_t step(const scale_matrix &s, int k) const { return columns.quotient(k + s.k_origin) * s.k_stride; }
  DEVICE int k_of(int run) const
  {
    return ahead.slice * S::BK + (S::BITS == 8 ? 0 : 32 * (lane_id() % 4 + 4 * run));
  }

  DEVICE void load_zeros(const gemm_args &g, int expert, const few_rows &at, int o)
  {
    const zero_matrix &z = g.b.zero;
    if (!z.table[0] && !z.base[0]) return;
    const uint32_t *words = z.table[at.half] ? z.table[at.half][expert] : z.base[at.half] + expert * z.expert_stride;
#pragma unroll
    for (int run = 0; run < RUNS; run++)
      if (k_of(run) < g.k)
        zero[o * RUNS + run] =
            words[at.octet * z.n_stride + columns.quotient(k_of(run) + g.b.scale.k_origin) * z.k_stride];
  }

  /* Of the slice that `ahead` has come to, which becomes the next. */
  DEVICE void load(const gemm_args &g, const few_smem<S> &smem)
  {
    if (!ahead.find()) return;
    const scale_matrix &s = g.b.scale;
    const int expert = smem.table.expert[ahead.unit.active];
    const bool gated = S::gated(g);
    const char *low = static_cast<const char *>(scale_base(s, 0, expert)),
               *high = gated ? static_cast<const char *>(scale_base(s, 1, expert)) : low;
#pragma unroll
    for (int o = 0; o < S::OCTETS; o++) {
      const few_rows at = rows_of<S>(g, ahead.unit, o);
      if (!at.there) continue;
      const int64_t row = rows.quotient(at.octet * 8 + lane_id() / 4 + s.n_origin[at.half]) * s.n_stride;
#pragma unroll
      for (int run = 0; run < RUNS; run++) {
        const int k = k_of(run);
        raw[o * RUNS + run] = 0; /* behind the last k codes and columns are 0, and so is what this multiplies */
        if (PAIRS) second[o * RUNS + run] = 0;
        if (k >= g.k) continue;
        raw[o * RUNS + run] = load_scale_bits(at.half ? high : low, row + step(s, k), s.dtype);
        if (PAIRS) second[o * RUNS + run] = load_scale_bits(at.half ? high : low, row + step(s, k + 16), s.dtype);
      }
      if (ZEROS) load_zeros(g, expert, at, o);
    }
    ahead.slice += S::CONSUMERS;
  }
};

#endif
