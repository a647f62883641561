/* dealt: parts of sums of up or down added up; h, made of those of up. */
#ifndef CUMOE_DEALT_H_CUH
#define CUMOE_DEALT_H_CUH

#include "few/dealt_line.cuh"
#include "gemm/epilogue.cuh"

DEVICE float2 as_floats(uint64_t two)
{
  return make_float2(__uint_as_float((uint32_t)two), __uint_as_float((uint32_t)(two >> 32)));
}

/* Parts of a pair's sums, in the order of k, at two places of a unit, two of each. SPARING: while nothing comes, a lane
 * asks for the first one that is missing alone. */
template <bool SPARING>
DEVICE void add_up_parts(const dealt_sums &sums, int parts, int first, int second, float2 &a, float2 &b)
{
  constexpr int AT_ONCE = 4;
  a = b = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int p = 0; p < parts; p += AT_ONCE) {
    uint64_t raw[AT_ONCE][2];
    int missing = AT_ONCE + 1;
    bool each = true;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) raw[i][0] = raw[i][1] = p + i < parts ? ~(uint64_t)0 : 0;
#pragma unroll 1
    while (true) {
      bool behind = false;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const bool ask = is_unwritten_sum(raw[i][0]) || is_unwritten_sum(raw[i][1]);
        if (ask && (!SPARING || each || !behind)) {
          const float *from = sums.first + (p + i) * sums.step;
          raw[i][0] = load_relaxed(reinterpret_cast<const uint64_t *>(from + first));
          raw[i][1] = load_relaxed(reinterpret_cast<const uint64_t *>(from + second));
        }
        behind |= ask;
      }
      int now = 0;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) now += is_unwritten_sum(raw[i][0]) || is_unwritten_sum(raw[i][1]);
      if (now == 0) break;
      each = now < missing, missing = now;
      if (SPARING && !each) __nanosleep(40);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const float2 low = as_floats(raw[i][0]), high = as_floats(raw[i][1]);
      a.x += low.x, a.y += low.y, b.x += high.x, b.y += high.y;
    }
  }
}

/* Likewise at one place, four of each. */
template <int AT_ONCE> DEVICE float4 add_up_quads(const dealt_sums &sums, int parts, int at)
{
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int p = 0; p < parts; p += AT_ONCE) {
    uint4 raw[AT_ONCE];
    bool again;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) raw[i] = p + i < parts ? make_uint4(~0u, ~0u, ~0u, ~0u) : make_uint4(0, 0, 0, 0);
#pragma unroll 1
    do {
      again = false;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (is_unwritten_quad(raw[i])) raw[i] = load_relaxed_vector(sums.first + (p + i) * sums.step + at);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) again |= is_unwritten_quad(raw[i]);
    } while (again);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      sum.x += __uint_as_float(raw[i].x), sum.y += __uint_as_float(raw[i].y);
      sum.z += __uint_as_float(raw[i].z), sum.w += __uint_as_float(raw[i].w);
    }
  }
  return sum;
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
  const int channels = line.gated ? (int)FEW_PART_N / 2 : (int)FEW_PART_N, block = channel / channels,
            in_block = channel - block * channels, first = line.pairs ? 2 * in_block : in_block,
            second = line.pairs   ? first + 2
                     : line.gated ? first + channels
                                  : first;
  if (channel >= all.f.up.n) return 0;
  float2 a, b, bias[2];
  h_biases(all.f.up, smem.table.expert[active], channel, bias);
  add_up_parts<S::ONE>(sums_of<S>(all, smem, false, active, block, column),
                       line.parts_of(active * line.blocks + block).count, first, second, a, b);
  float2 low = make_float2(a.x, b.x), high = make_float2(a.y, b.y);
  if (line.pairs) { /* gate, up, gate, up, or the other way */
    const few_halves of = smem.table.weights[active];
    const bool up_first = of.high < of.low;
    low = up_first ? make_float2(a.y, a.x) : a, high = up_first ? make_float2(b.y, b.x) : b;
  }
  return pack_pair<typename S::Y>(h_of_sums(all.f.up, low, bias[0]), h_of_sums(all.f.up, high, bias[1]));
}

#endif
