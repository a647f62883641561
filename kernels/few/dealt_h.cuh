/* dealt: parts of sums of up or down added up; h, made of those of up. */
#ifndef CUMOE_DEALT_H_CUH
#define CUMOE_DEALT_H_CUH

#include "few/dealt_line.cuh"
#include "gemm/epilogue.cuh"

DEVICE float2 as_floats(uint64_t two)
{
  return make_float2(__uint_as_float((uint32_t)two), __uint_as_float((uint32_t)(two >> 32)));
}

/* Where a lane finds parts of two neighbouring sums: the first, the distance to the next one, how many. */
struct dealt_place {
  const float *first;
  int64_t step;
  int count;
};

/* Two sums of a unit that lie from `at` on, of one of its columns. */
template <class S>
DEVICE dealt_place place_of_sums(const few_sm90_args &all, const dealt_smem<S> &smem, bool down, int active, int block,
                                 int column, int at)
{
  const dealt_line &line = smem.line[down];
  const dealt_sums sums = sums_of<S>(all, smem, down, active, block, column);
  return {sums.first + at, sums.step, line.parts_of(active * line.blocks + block).count};
}

/* The parts at each of some places, in the order of k. SPARING: while nothing comes, a lane asks for the first one that
 * is missing alone. */
template <bool SPARING, int PLACES> DEVICE void add_up_parts(const dealt_place (&at)[PLACES], float2 (&sum)[PLACES])
{
  constexpr int AT_ONCE = 8 / PLACES;
  int most = 0;
#pragma unroll
  for (int j = 0; j < PLACES; j++) sum[j] = make_float2(0.f, 0.f), most = max(most, at[j].count);
#pragma unroll 1
  for (int p = 0; p < most; p += AT_ONCE) {
    uint64_t raw[AT_ONCE][PLACES];
    int missing = AT_ONCE * PLACES + 1;
    bool each = true;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (int j = 0; j < PLACES; j++) raw[i][j] = p + i < at[j].count ? ~(uint64_t)0 : 0;
#pragma unroll 1
    while (true) {
      bool behind = false;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int j = 0; j < PLACES; j++) {
          const bool ask = is_unwritten_sum(raw[i][j]);
          if (ask && (!SPARING || each || !behind))
            raw[i][j] = load_relaxed(reinterpret_cast<const uint64_t *>(at[j].first + (p + i) * at[j].step));
          behind |= ask;
        }
      int now = 0;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int j = 0; j < PLACES; j++) now += is_unwritten_sum(raw[i][j]);
      if (now == 0) break;
      each = now < missing, missing = now;
      if (SPARING && !each) __nanosleep(40);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (int j = 0; j < PLACES; j++) {
        const float2 two = as_floats(raw[i][j]);
        sum[j].x += two.x, sum[j].y += two.y;
      }
  }
}

/* Of gate and up, with their biases. */
DEVICE float h_of_sums(const gemm_args &g, const float2 &sum, const float2 &bias)
{
  float low[1] = {weighted(sum.x, 1.f, 1.f, bias.x)}, high[1] = {weighted(sum.y, 1.f, 1.f, bias.y)};
  activate<1>(g, low, high);
  return low[0];
}

/* Of two channels. */
DEVICE void h_biases(const gemm_args &g, int expert, int channel, float2 (&bias)[2])
{
  float gate[2], up[2] = {0.f, 0.f};
  load_bias(g.b, 0, expert, channel, gate);
  if (g.gated) load_bias(g.b, 1, expert, channel, up);
  bias[0] = make_float2(gate[0], up[0]), bias[1] = make_float2(gate[1], up[1]);
}

/* Two channels of a pair's h, of an even one on; past the last one zeros. */
template <class S>
DEVICE uint32_t two_of_h(const few_sm90_args &all, const dealt_smem<S> &smem, int active, int column, int channel)
{
  const dealt_line &line = smem.line[0];
  const int at = line.pairs ? 2 * channel : channel, block = at / (int)FEW_PART_N,
            in_block = at - block * (int)FEW_PART_N;
  if (channel >= all.f.up.n) return 0;
  float2 bias[2], sum[2];
  h_biases(all.f.up, smem.table.expert[active], channel, bias);
  dealt_place places[2] = {place_of_sums<S>(all, smem, false, active, block, column, in_block)};
  places[1] = places[0];
  if (line.pairs)
    places[1].first += 2;
  else if (line.gated)
    places[1] = place_of_sums<S>(all, smem, false, active, block + line.half, column, in_block);
  add_up_parts<S::ONE>(places, sum);
  float2 low = make_float2(sum[0].x, sum[1].x), high = make_float2(sum[0].y, sum[1].y);
  if (line.pairs) { /* gate, up, gate, up, or the other way */
    const few_halves of = smem.table.weights[active];
    const bool up_first = of.high < of.low;
    low = up_first ? make_float2(sum[0].y, sum[0].x) : sum[0];
    high = up_first ? make_float2(sum[1].y, sum[1].x) : sum[1];
  }
  return pack_pair<typename S::Y>(h_of_sums(all.f.up, low, bias[0]), h_of_sums(all.f.up, high, bias[1]));
}

#endif
