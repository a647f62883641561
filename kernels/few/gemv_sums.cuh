/* gemv: sums of parts of k. From all threads of a CTA to memory; and from there, as soon as they are written, to h and
 * to the outputs. */
#ifndef CUMOE_GEMV_SUMS_CUH
#define CUMOE_GEMV_SUMS_CUH

#include "few/gemv_line.cuh"
#include "few/outputs.cuh"
#include "gemm/epilogue.cuh"

/* ---- slots ---- */

template <bool DOWN> DEVICE constexpr int slot_floats()
{
  return gemv_places<DOWN>() * 8;
}

template <bool DOWN> DEVICE float *slot_of(const few_args &args, int slot)
{
  float *sums = args.protocol.sums;
  if (DOWN) sums += FEW_UP_SUMS(args.map.top_k, args.up.n);
  return sums + (int64_t)slot * slot_floats<DOWN>();
}

/* Where in a slot element e of a unit's row is: four of an octet in either half. */
template <bool DOWN> DEVICE int place_in_slot(int e)
{
  return e / 4 % 2 * (slot_floats<DOWN>() / 2) + e / 8 * 4 + e % 4;
}

/* The sums of a unit's rows of this CTA, in the order of threads. No sum is all ones: a NaN that is computed has a sign
 * of 0. Other threads' parts are read until the next barrier. */
template <bool DOWN, class SMEM>
DEVICE void store_sums(const few_args &args, SMEM &smem, const gemv_run &run, int slot, const float (&sum)[8])
{
#pragma unroll
  for (int h = 0; h < 2; h++)
    smem.sums[h][threadIdx.x] = make_float4(sum[4 * h], sum[4 * h + 1], sum[4 * h + 2], sum[4 * h + 3]);
  bar_sync(1, GEMV_LANES);
  const int pairs = run.places * 2, half = threadIdx.x >= pairs, at = threadIdx.x - half * pairs;
  if (threadIdx.x >= 2 * pairs) return;
  const float2 *from = reinterpret_cast<const float2 *>(smem.sums[half]) + at;
  float2 all = make_float2(0.f, 0.f);
#pragma unroll 8
  for (int i = 0; i < run.each; i++, from += pairs) all.x += from->x, all.y += from->y;
  uint64_t *to = reinterpret_cast<uint64_t *>(slot_of<DOWN>(args, slot) + half * (slot_floats<DOWN>() / 2)) + at;
  store_relaxed(to, (uint64_t)__float_as_uint(all.y) << 32 | __float_as_uint(all.x));
}

/* The sum over `count` slots, in their order; of two elements at once. */
template <bool DOWN> DEVICE float2 take_sums(const float *first, const float *second, int count)
{
  constexpr uint32_t UNWRITTEN = (uint32_t)FEW_NOT_WRITTEN;
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int i = 0; i < count; i += 4) {
    float a[4], b[4];
    bool again;
    do {
      again = false;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        a[j] = i + j < count ? load_relaxed(first + (i + j) * slot_floats<DOWN>()) : 0.f;
        b[j] = i + j < count ? load_relaxed(second + (i + j) * slot_floats<DOWN>()) : 0.f;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) again |= __float_as_uint(a[j]) == UNWRITTEN || __float_as_uint(b[j]) == UNWRITTEN;
    } while (again);
#pragma unroll
    for (int j = 0; j < 4; j++) sum.x += a[j], sum.y += b[j];
  }
  return sum;
}

/* ---- h ---- */

/* An element of `row` that is to be passed over, whatever the weights: its expert's weight is 0. */
constexpr uint32_t GEMV_NOTHING = ~0u;

/* Channel c of an active expert, from its sums in slots `parts`; `local`: in its unit. */
template <class Y>
DEVICE float h_of(const few_args &args, int expert, int c, int local, int width, gemv_parts parts, bool up_first)
{
  const gemm_args &g = args.up;
  const bool pairs = g.gated && g.b.n_stride == 2;
  const int gate = pairs ? 2 * local + up_first : local,
            up = pairs ? 2 * local + !up_first : g.gated ? width * 8 + local : local;
  const float *from = slot_of<false>(args, parts.first);
  const float2 sum = take_sums<false>(from + place_in_slot<false>(gate), from + place_in_slot<false>(up), parts.count);
  float low[1] = {sum.x}, high[1] = {sum.y}, low_bias[1], high_bias[1] = {};
  const float one[1] = {1.f};
  load_bias(g.b, 0, expert, c, low_bias);
  if (g.gated) load_bias(g.b, 1, expert, c, high_bias);
  finish<EPILOGUE_activation, false>(g, one, low_bias, high_bias, low, high);
  return to_f32(from_f32<Y>(low[0]));
}

/* All of a run's h, which lies from `row` on in those of all experts, times their expert's weight. */
template <class Y, class SMEM> DEVICE void take_h(const few_args &args, SMEM &smem, const gemv_run &run, int row)
{
  const gemv_line &line = smem.line[0];
  const int active = row / args.down.k, k = row - active * args.down.k, unit = line.step * 8, first = k / unit,
            units = (k + run.rows - 1) / unit - first + 1, expert = smem.table.expert[active];
  if ((int)threadIdx.x < units) smem.parts[threadIdx.x] = parts_of(line, active, first + threadIdx.x);
  bar_sync(1, GEMV_LANES);
  const few_halves of = smem.table.weights[active];
  const float weight = smem.table.weight[column_pair(smem.table.column[active][0])];
#pragma unroll 1
  for (int i = threadIdx.x; i < run.rows + run.each; i += GEMV_LANES) {
    const int c = k + i, block = c / unit;
    float h = 0.f;
    if (i < run.rows)
      h = weight == 0.f ? __uint_as_float(GEMV_NOTHING)
                        : weight * h_of<Y>(args, expert, c, c - block * unit, line.width(block),
                                           smem.parts[block - first], of.high < of.low);
    smem.row[i] = h;
  }
}

template <class X, class SMEM> DEVICE void take_x(const few_args &args, SMEM &smem, const gemv_run &run, int row)
{
  const X *x = static_cast<const X *>(args.up.a) + row;
#pragma unroll 1
  for (int i = threadIdx.x; i < run.rows + run.each; i += GEMV_LANES)
    smem.row[i] = i < run.rows ? to_f32(x[i]) : 0.f;
}

/* ---- outputs ---- */

/* What does not come from memory's weights: biases, and experts that hand on x. */
template <class X, class SMEM>
DEVICE float rest_of_output(const few_args &args, const SMEM &smem, int experts, int channel)
{
  const combine_args &out = args.out;
  float sum = 0.f;
  for (int i = 0; args.down.b.bias[0] && i < experts; i++) {
    const float weight = smem.table.weight[column_pair(smem.table.column[i][0])];
    float bias[1];
    load_bias(args.down.b, 0, smem.table.expert[i], channel, bias);
    if (weight != 0.f) sum = fmaf(weight, bias[0], sum);
  }
  for (int pair = 0; args.map.identity_experts > 0 && pair < out.top_k; pair++) {
    const float weight = smem.table.weight[pair];
    if (weight != 0.f && smem.table.to[pair] == ROW_IDENTITY)
      sum = fmaf(weight, to_f32(static_cast<const X *>(out.x)[channel]), sum);
  }
  const float weight = out.shared ? shared_weight(out, 0) : 0.f;
  return weight == 0.f ? sum : fmaf(weight, to_f32(static_cast<const X *>(out.shared)[channel]), sum);
}

/* Of WARP_SIZE channels, by a warp. */
template <class X, class SMEM> DEVICE void write_channels(const few_args &args, SMEM &smem, int experts, int first)
{
  const combine_args &out = args.out;
  const gemv_line &line = smem.line[1];
  const int channel = first + lane_id(), block = channel / (line.step * 8);
  if (channel >= args.down.n) return;
  const gemv_parts parts = parts_of(line, 0, block);
  const float *from = slot_of<true>(args, parts.first) + place_in_slot<true>(channel - block * line.step * 8);
  const float rest = rest_of_output<X>(args, smem, experts, channel);
  const float residual = out.residual ? load_any(out.residual, channel, out.out_dtype) : 0.f;
  const float sum = take_sums<true>(from, from, parts.count).x + rest;
  store_output<X>(out.out, channel, out.residual ? fmaf(out.out_scale, sum, residual) : out.out_scale * sum,
                  out.out_dtype);
}

#endif
