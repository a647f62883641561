/*
 * few: N-major weights. Of each k the octets of a unit lie together: a slice of theirs has 2, 4 or 8 octets and so much
 * of k that it is as large as any other slice. 64 bytes of a row of memory are enough for its speed, and 32 for five
 * sixths of it, as long as neighbours are read at about the same time: the next unit of up is the next CTA's, and so
 * are the next channels of down, of which a CTA takes all that it has at once. ldmatrix transposes.
 *
 * Gate and up, if they lie apart: octets alternate. In pairs: element by element, and the two meet in the epilogue.
 */
#ifndef CUMOE_FEW_N_MAJOR_CUH
#define CUMOE_FEW_N_MAJOR_CUH

#include "few/schedule.cuh"

template <int WIDTH> struct few_width {
  static constexpr int VALUE = WIDTH;
};

/* f(few_width) of the unit's slices. */
template <class S, class F> DEVICE void with_width(const few_units<S> &unit, const F &f)
{
  if constexpr (S::UP) {
    f(few_width<S::UNIT>());
  } else {
    if (S::UNIT > 4 && unit.octets > 4) return f(few_width<S::UNIT>());
    if (unit.octets > 2) return f(few_width<4>());
    f(few_width<2>());
  }
}

/* Where 16 bytes go: so that neither copies nor ldmatrix meet in a bank. The latter reads k 0 1 8 9 16 17 24 25 of an
 * octet, or the same plus 2, 4 or 6. */
template <int WIDTH> DEVICE int n_major_vector(int k, int octet)
{
  const int at = k * WIDTH + octet;
  if (WIDTH == 8) return at ^ (k & 1 | (k >> 3 & 3) << 1);
  if (WIDTH == 4) return at ^ (k >> 3 & 3);
  return at ^ (k >> 3 & 1 | (k >> 4 & 1) << 2);
}

template <class S> DEVICE bool few_in_pairs(const gemm_args &g)
{
  return S::N_MAJOR && S::gated(g) && g.b.n_stride == 2;
}

/* Where in a row of a stage a lane's octet goes. Neighbouring lanes have neighbouring memory: those that share a sector
 * but are not neighbours would fetch it twice. */
template <class S, int WIDTH> DEVICE int lane_place(const gemm_args &g)
{
  const int octet = lane_id() % WIDTH;
  return S::gated(g) && !few_in_pairs<S>(g) ? octet % (WIDTH / 2) * 2 + octet / (WIDTH / 2) : octet;
}

/* A lane's octet of the slices of a unit, at k 0; NULL: it is not there. */
template <class S, int WIDTH>
DEVICE const typename S::W *lane_octet(const gemm_args &g, const few_units<S> &unit, few_halves of)
{
  using W = typename S::W;
  const W *low = static_cast<const W *>(of.low), *high = static_cast<const W *>(of.high);
  const int octet = lane_place<S, WIDTH>(g);
  if (!S::gated(g)) return octet < unit.octets ? low + (unit.octet + octet) * 8 : NULL;
  if (octet / 2 >= unit.octets) return NULL;
  if (few_in_pairs<S>(g)) return (low < high ? low : high) + (2 * unit.octet + octet) * 8;
  return (octet % 2 ? high : low) + (unit.octet + octet / 2) * 8;
}

template <class S, int WIDTH>
DEVICE void copy_width(const gemm_args &g, const few_units<S> &unit, few_halves of, int slice, few_stage<S> &stage)
{
  constexpr int AT_ONCE = WARP_SIZE / WIDTH, K = S::WEIGHTS / 8 / WIDTH; /* rows of memory; of a slice */
  const typename S::W *from = lane_octet<S, WIDTH>(g, unit, of);
  if (!from) return;
  const int row = lane_id() / WIDTH, k0 = slice * K + row, place = lane_place<S, WIDTH>(g);
  from += k0 * g.b.k_stride;
#pragma unroll
  for (int i = 0; i < K; i += AT_ONCE)
    cp_async_cg_16(shared_address(stage.weights) + n_major_vector<WIDTH>(row + i, place) * 16, from + i * g.b.k_stride,
                   k0 + i < g.k ? 16 : 0, evict_first_policy());
}

template <class S>
DEVICE void copy_n_major(const gemm_args &g, const few_units<S> &unit, few_halves of, int slice, few_stage<S> &stage)
{
  with_width<S>(unit, [&](auto w) { copy_width<S, decltype(w)::VALUE>(g, unit, of, slice, stage); });
}

/* x as in products.cuh: a lane has k 8 (l%4) .. + 7 of each 32, four for each of two products. */
template <class S, int WIDTH>
DEVICE void multiply_n_major(const few_stage<S> &stage, const uint4 (&x)[8 / WIDTH], float (&sum)[S::SUMS][4])
{
  const int row = lane_id() % 8, matrix = lane_id() / 8, k = row / 2 * 8 + matrix / 2 * 2 + row % 2;
#pragma unroll
  for (int i = 0; i < 8 / WIDTH; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int t = 0; t < WIDTH / 2; t++) {
        uint32_t w[4];
        ldmatrix_x4_trans(w, shared_address(stage.weights) +
                                 n_major_vector<WIDTH>(32 * i + 4 * half + k, 2 * t + matrix % 2) * 16);
        float(&d)[4] = sum[WIDTH == 2 ? half : t];
        if (half == 0)
          mma_m16n8k16<typename S::X>(d, w, {x[i].x, x[i].y});
        else
          mma_m16n8k16<typename S::X>(d, w, {x[i].z, x[i].w});
      }
    }
  }
}

/* As in warpgroup_tile.cuh: lanes exchange what they have of each other's channels, whose order in an octet becomes 0 4
 * 1 5 2 6 3 7. */
template <class S> DEVICE void part_pairs(const few_halves &weights, float (&sum)[S::TILES][4])
{
  const bool odd = lane_id() / 4 % 2, up_first = weights.high < weights.low;
#pragma unroll
  for (int t = 0; t < S::UNIT / 2; t++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float own = odd ? sum[t][j + 2] : sum[t][j], given = odd ? sum[t][j] : sum[t][j + 2],
                  other = __shfl_xor_sync(ALL_LANES, given, 4);
      sum[t][j] = odd != up_first ? other : own;
      sum[t][j + 2] = odd != up_first ? own : other;
    }
  }
}

/* The channel of a lane's sums in an octet. */
template <class S> DEVICE int row_channel(const gemm_args &g)
{
  return few_in_pairs<S>(g) ? lane_id() / 4 % 2 * 4 + lane_id() / 8 : lane_id() / 4;
}

#endif
