/* gemv: what a CTA has in shared memory; sums of parts of k, from all its threads to memory; and from there, as soon as
 * they are written, to h and to the outputs. */
#ifndef CUMOE_GEMV_SUMS_CUH
#define CUMOE_GEMV_SUMS_CUH

#include "few/gemv_line.cuh"
#include "few/outputs.cuh"
#include "gemm/epilogue.cuh"

/* ---- shared memory ---- */

template <class PRODUCT, int STAGES_> struct gemv_layout {
  using layout = gemv_layout;
  using X = typename PRODUCT::X;
  using W = typename PRODUCT::W;
  using Y = typename PRODUCT::Y;
  static_assert(same_type<X, W> && same_type<X, Y> && operand<W>::BITS == 16, "multiplied as they are");
  static constexpr bool UP = true; /* the table has both */
  static constexpr int TOKENS = 1, COLUMNS = 1, PAIRS = FEW_PAIRS(1), STAGES = STAGES_;
  static constexpr int ROUTING = GEMV_WARPS, THREADS = GEMV_LANES + WARP_SIZE; /* the last warp routes */
};

template <class PRODUCT, int STAGES> struct few_memory<gemv_layout<PRODUCT, STAGES>> {
  static constexpr int PAIRS = FEW_PAIRS(1);
  uint4 stages[STAGES][GEMV_LANES];        /* a thread's own place in each */
  float4 sums[2][GEMV_LANES];              /* of four of a thread's channels, and of the others */
  float row[GEMV_ROOM_X + GEMV_LANES];     /* x, or h of an expert */
  float y[PAIRS][WARP_SIZE];               /* of the channels at hand */
  gemv_parts parts[GEMV_ROOM_H / 128 + 2]; /* of units that `row` comes from */
  gemv_line line[2];                       /* of up, of down */
  uint64_t weights_ready;                  /* the table's `weight` */
  int32_t share[2], next[2];               /* the CTA's first shares of up and of down; those it has next */
  volatile int32_t drawn[2];               /* all shares have been */
  uint32_t done[FEW_SHARES / 32];          /* a bit a share of down */
  few_table<PAIRS> table;
  gate_scratch scratch[1];
};
template <class S> using gemv_smem = few_memory<typename S::layout>;

/* ---- slots ---- */

DEVICE float *slot_of(const few_args &args, bool down, int slot)
{
  float *sums = args.protocol.sums;
  if (down) sums += GEMV_SUMS(args.map.top_k, args.up.n, 128);
  return sums + (int64_t)slot * GEMV_SLOT;
}

/* Where in a slot element e of a unit's row is: four of an octet in either half. */
DEVICE int place_in_slot(int e)
{
  return e / 4 % 2 * (GEMV_SLOT / 2) + e / 8 * 4 + e % 4;
}

/* The sums of a unit's rows of this CTA, in the order of threads. No sum is all ones: a NaN that is computed has a sign
 * of 0. Those of other threads are read until the next barrier. */
template <class SMEM> DEVICE void store_sums(SMEM &smem, const gemv_run &run, float *slot, const float (&sum)[8])
{
#pragma unroll
  for (int h = 0; h < 2; h++)
    smem.sums[h][threadIdx.x] = make_float4(sum[4 * h], sum[4 * h + 1], sum[4 * h + 2], sum[4 * h + 3]);
  bar_sync(1, GEMV_LANES);
  const int twos = run.places * 2, half = threadIdx.x >= twos, at = threadIdx.x - half * twos;
  if (threadIdx.x >= 2 * twos) return;
  const float2 *from = reinterpret_cast<const float2 *>(smem.sums[half]) + at;
  float2 all = make_float2(0.f, 0.f);
#pragma unroll 8
  for (int i = 0; i < run.each; i++, from += twos) all.x += from->x, all.y += from->y;
  store_relaxed(reinterpret_cast<uint64_t *>(slot + half * (GEMV_SLOT / 2)) + at,
                (uint64_t)__float_as_uint(all.y) << 32 | __float_as_uint(all.x));
}

/* The sum over `count` slots, in their order; of two elements at once. */
DEVICE float2 take_sums(const float *first, const float *second, int count)
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
        a[j] = i + j < count ? load_relaxed(first + (i + j) * GEMV_SLOT) : 0.f;
        b[j] = i + j < count ? load_relaxed(second + (i + j) * GEMV_SLOT) : 0.f;
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

/* Channel c of an active expert, from its sums in slots `parts`; `local`: in its unit of `width` octets. */
template <class Y>
DEVICE float h_of(const few_args &args, const gemv_line &line, int expert, int c, int local, int width,
                  gemv_parts parts, bool up_first)
{
  const gemm_args &g = args.up;
  const int gate = line.pairs ? 2 * local + up_first : local,
            up = line.pairs ? 2 * local + !up_first : local + (line.halves - 1) * width * 8;
  const float *from = slot_of(args, false, parts.slot);
  const float2 sum = take_sums(from + place_in_slot(gate), from + place_in_slot(up), parts.count);
  float low[1] = {sum.x}, high[1] = {sum.y}, low_bias[1], high_bias[1] = {};
  const float one[1] = {1.f};
  load_bias(g.b, 0, expert, c, low_bias);
  if (g.gated) load_bias(g.b, 1, expert, c, high_bias);
  finish<EPILOGUE_activation, false>(g, one, low_bias, high_bias, low, high);
  return to_f32(from_f32<Y>(low[0]));
}

/* Of an active expert's h what a run of down multiplies, from channel k on; zeros behind it. */
template <class Y, class SMEM>
DEVICE void take_h(const few_args &args, SMEM &smem, const gemv_run &run, int active, int k)
{
  const gemv_line &line = smem.line[0];
  const int log = line.halves == 2 ? 7 : 8, first = k >> log, units = (k + run.rows - 1 >> log) - first + 1,
            expert = smem.table.expert[active];
  static_assert(GEMV_PLACES == 32, "channels of a unit of up");
  if ((int)threadIdx.x < units) smem.parts[threadIdx.x] = parts_of(line, active, first + threadIdx.x);
  bar_sync(1, GEMV_LANES);
  const few_halves of = smem.table.weights[active];
#pragma unroll 1
  for (int i = threadIdx.x; i < run.rows + run.each; i += GEMV_LANES) {
    const int c = k + i, block = c >> log;
    smem.row[i] = i < run.rows ? h_of<Y>(args, line, expert, c, c - (block << log), line.width(block),
                                         smem.parts[block - first], of.high < of.low)
                               : 0.f;
  }
}

template <class X, class SMEM> DEVICE void take_x(const few_args &args, SMEM &smem, const gemv_run &run, int k)
{
  const X *x = static_cast<const X *>(args.up.a) + k;
#pragma unroll 1
  for (int i = threadIdx.x; i < run.rows + run.each; i += GEMV_LANES) smem.row[i] = i < run.rows ? to_f32(x[i]) : 0.f;
}

/* ---- outputs ---- */

/* Of an active expert y of WARP_SIZE channels, by a warp. */
template <class Y, class SMEM> DEVICE void take_y(const few_args &args, SMEM &smem, int active, int channel)
{
  const gemv_line &line = smem.line[1];
  if (channel >= args.down.n) return;
  const int block = channel / GEMV_SLOT;
  float bias[1];
  load_bias(args.down.b, 0, smem.table.expert[active], channel, bias);
  const gemv_parts parts = parts_of(line, active, block);
  const float *from = slot_of(args, true, parts.slot) + place_in_slot(channel - block * GEMV_SLOT);
  smem.y[active][lane_id()] = to_f32(from_f32<Y>(take_sums(from, from, parts.count).x + bias[0]));
}

/* The sum over the token's slots, as in outputs.cuh. */
template <class X, class SMEM> DEVICE float sum_of_slots(const few_args &args, const SMEM &smem, int channel)
{
  const combine_args &out = args.out;
  float sum = 0.f;
  int active = 0;
#pragma unroll 1
  for (int pair = 0; pair < out.top_k; pair++) {
    const float weight = smem.table.weight[pair];
    const int to = smem.table.to[pair];
    float value = to >= 0 ? smem.y[active++][lane_id()] : 0.f;
    if (weight != 0.f && to == ROW_IDENTITY) value = to_f32(static_cast<const X *>(out.x)[channel]);
    if (weight != 0.f) sum = fmaf(weight, value, sum);
  }
  const float weight = out.shared ? shared_weight(out, 0) : 0.f;
  return weight == 0.f ? sum : fmaf(weight, to_f32(static_cast<const X *>(out.shared)[channel]), sum);
}

template <class S> DEVICE void write_channels(const few_args &args, gemv_smem<S> &smem, int experts, int first)
{
  const combine_args &out = args.out;
  const int channel = first + lane_id();
  bar_sync(1, GEMV_LANES); /* y before is read */
#pragma unroll 1
  for (int active = warp_id(); active < experts; active += GEMV_WARPS)
    take_y<typename S::Y>(args, smem, active, channel);
  bar_sync(1, GEMV_LANES);
  if (warp_id() > 0 || channel >= args.down.n) return;
  const float sum = sum_of_slots<typename S::X>(args, smem, channel);
  float value = out.out_scale * sum;
  if (out.residual) value = fmaf(out.out_scale, sum, load_any(out.residual, channel, out.out_dtype));
  store_output<typename S::Y>(out.out, channel, value, out.out_dtype);
}

#endif
