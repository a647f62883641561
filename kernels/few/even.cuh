/*
 * even: the experts of few tokens whose weights are [E, in, out], behind a router: few.cuh's one grid, another way.
 *
 *   even_line.cuh      who reads what                even_products.cuh  sums, h, y
 *   even_feed.cuh      copies
 *
 * Memory gives such weights as fast as others if it is asked for whole lines and all SMs have the same number of bytes:
 * units of whole k, and channels of all experts, do not deal out. So up and down are lines of which each CTA has an equal
 * share, wherever that begins and ends in k. Of a unit that lies in several shares the one with the first k finishes it.
 * It comes to it last, and the next share began with its part: so nobody waits but where a share is smaller than a unit.
 *
 * Producer warps fill a ring of stages, down's behind up's without a gap: weights by boxes of 64 channels x 16 k, in
 * the swizzle of 128 bytes; ldmatrix transposes. Each of eight consumer warps has some channels of every stage, so that
 * no sums have to be added up in the CTA. Who has nothing else to do writes outputs.
 *
 * Parts of sums, h and y are all ones until they are written, and who needs them reads them again. Shares are drawn, of
 * up and of down each, the last first: so what a CTA waits for is always in the hands of one that has started.
 */
#ifndef CUMOE_EVEN_CUH
#define CUMOE_EVEN_CUH

#include "few/even_products.cuh"
#include "few/outputs.cuh"
#include "few/table.cuh"

/* ---- outputs ---- */

/* Two channels of a token: the sum over its slots, as in outputs.cuh. */
template <class S>
DEVICE float2 sum_even_slots(const few_args &args, const even_smem<S> &smem, int token, int channel)
{
  using T = typename S::Y;
  constexpr int AT_ONCE = 8;
  const combine_args &out = args.out;
  const int first = token * out.top_k;
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int s = 0; s < out.top_k; s += AT_ONCE) {
    uint32_t y[AT_ONCE];
    bool again;
    do {
      again = false;
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        y[j] = 0;
        if (s + j >= out.top_k || smem.table.weight[first + s + j] == 0 || smem.table.to[first + s + j] < 0) continue;
        const T *from = static_cast<const T *>(args.down.c) + (first + s + j) * args.down.c_ld + channel;
        y[j] = (uint32_t)load_relaxed(reinterpret_cast<const int32_t *>(from));
        again |= y[j] >= 0xffff0000u || (y[j] & 0xffff) == 0xffff;
      }
    } while (again);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      if (s + j >= out.top_k) continue;
      const float weight = smem.table.weight[first + s + j];
      if (weight == 0) continue;
      if (args.map.identity_experts > 0 && smem.table.to[first + s + j] == ROW_IDENTITY)
        y[j] = *reinterpret_cast<const uint32_t *>(static_cast<const T *>(out.x) + token * out.x_ld + channel);
      const float2 value = unpack_pair<T>(y[j]);
      sum.x = fmaf(weight, value.x, sum.x), sum.y = fmaf(weight, value.y, sum.y);
    }
  }
  if (!out.shared) return sum;
  const float weight = shared_weight(out, token);
  if (weight == 0) return sum;
  const T *shared = static_cast<const T *>(out.shared) + token * out.shared_ld + channel;
  return make_float2(fmaf(weight, to_f32(shared[0]), sum.x), fmaf(weight, to_f32(shared[1]), sum.y));
}

/* The CTA's part: 16 channels in turn, so that CTAs do not share sectors. First by producers, who have been here and
 * looked for what is still to come since the last copies, then by consumers. */
template <class S> DEVICE void write_even_outputs(const few_args &args, even_smem<S> &smem)
{
  constexpr int EACH = 8; /* threads */
  const combine_args &out = args.out;
  const int halves = args.down.n / 2, items = (int)token_total(out.tokens) * halves,
            thread = (int)threadIdx.x - S::CONSUMER_THREADS + (warp_id() < S::CONSUMERS ? S::WRITERS : 0);
#pragma unroll 1
  for (int group = thread / EACH; true; group += S::WRITERS / EACH) {
    const int item = (group * (int)gridDim.x + (int)blockIdx.x) * EACH + thread % EACH;
    if (item >= items) return;
    const int token = item / halves, channel = (item - token * halves) * 2;
    const float2 sum = sum_even_slots<S>(args, smem, token, channel);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float s = i ? sum.y : sum.x;
      float value = out.out_scale * s;
      if (out.residual)
        value = fmaf(out.out_scale, s, load_any(out.residual, token * out.residual_ld + channel + i, out.out_dtype));
      store_output<typename S::Y>(out.out, token * out.out_ld + channel + i, value, out.out_dtype);
    }
  }
}

/* ---- the grid ---- */

/* The routing warp. At the end it looks whether all shares are drawn, so that nobody else has to wait for that. */
template <class S> DEVICE void even_route(const few_args &args, even_smem<S> &smem)
{
  if (args.protocol.weights && smem.share[0] < (int)gridDim.x) write_routing<S>(args, smem.share[0], smem.scratch[0]);
  take_weights<S>(args, smem);
  report_counts<S>(args.map, smem.table);
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    while (load_relaxed(args.protocol.tickets + i) < (int)gridDim.x - 1) __nanosleep(200);
    smem.drawn[i] = 1;
  }
}

/* What does not depend on earlier grids. */
template <class S> DEVICE void prepare_even(const few_sm90_args &all, even_smem<S> &smem)
{
  const few_args &args = all.f;
  if (warp_id() == S::CONSUMERS && lane_id() == 0) prefetch_tensormap(all.up), prefetch_tensormap(all.down);
  if (threadIdx.x < S::STAGES) {
    mbarrier_init(&smem.full[threadIdx.x], 1 + WARP_SIZE); /* the weights; the columns */
    mbarrier_init(&smem.empty[threadIdx.x], S::CONSUMERS);
    fence_mbarrier_init();
  }
  if (threadIdx.x == WARP_SIZE) {
    mbarrier_init(&smem.weights_ready, WARP_SIZE);
    smem.drawn[0] = smem.drawn[1] = 0;
    smem.line[0].set(args.up, args.up.gated, S::OCTETS);
  }
  if (threadIdx.x == 2 * WARP_SIZE) smem.line[1].set(args.down, false, S::OCTETS);
}

template <class S> DEVICE void even_outputs(const few_args &args, even_smem<S> &smem)
{
  wait_for(&smem.weights_ready, 0);
  STAMP(threadIdx.x == S::CONSUMER_THREADS, 11);
  write_even_outputs<S>(args, smem);
  STAMP(threadIdx.x == S::CONSUMER_THREADS, 12);
}

template <class S> DEVICE void even_gemm(const few_sm90_args &all, even_smem<S> &smem)
{
  const few_args &args = all.f;
  STAMP(threadIdx.x == 0, 0);
  prepare_even<S>(all, smem);
  wait_for_earlier_grids();
  if (warp_id() == S::ROUTING && lane_id() < 2) smem.share[lane_id()] = draw_even(args.protocol.tickets + lane_id());
  STAMP(threadIdx.x == 0, 1);
  check_token_count(args.map.tokens, args.map.fault);
  if (args.protocol.weights) choose_experts<S>(args.gate, smem);
  STAMP(threadIdx.x == 0, 2);
  const int experts = build_few_table<S>(args, smem);
  STAMP(threadIdx.x == 0, 3);
  if (warp_id() < S::CONSUMERS) {
    even_consume<S>(args, smem);
    even_outputs<S>(args, smem);
  } else if (warp_id() < S::ROUTING) {
    even_produce<S>(all, smem, experts);
    even_outputs<S>(args, smem);
  } else if (warp_id() == S::ROUTING) {
    even_route<S>(args, smem);
  }
}

#endif
