/*
 * dealt: the experts of few tokens whose weights are [E, in, out], behind a router: few.cuh's one grid, another way.
 *
 *   dealt_line.cuh     items, shared memory           dealt_products.cuh  products
 *   dealt_feed.cuh     copies, columns                dealt_h.cuh         sums of parts; h
 *
 * Units of whole k do not deal out, and equal shares of the bytes do not end together, for SMs do not get equal parts
 * of memory's rate: those ahead would have down's weights before others have all of up's. So k of a unit is cut into
 * parts, and parts are items that CTAs draw one after the other, all of up's before down's.
 *
 * One warp draws and fills a ring of stages, by boxes of 64 channels x 64 k in the swizzle of 128 bytes; ldmatrix
 * transposes. Each of eight consumer warps has an octet of either box, so that no sums have to be added up in the CTA.
 * Sums of an item go to memory, all ones until they are written: who needs them reads them again. Those of down are
 * added up where outputs are made. Of one token whoever brings a stage's h makes it of up's parts: a trip through
 * memory less. Of more, whoever drew a unit's last part makes h of it, which lies in memory, all ones as well. What a
 * CTA waits for is always in the hands of one that drew it before.
 */
#ifndef CUMOE_DEALT_CUH
#define CUMOE_DEALT_CUH

#include "few/dealt_products.cuh"
#include "few/outputs.cuh"
#include "few/schedule.cuh"
#include "few/table.cuh"

/* ---- outputs ---- */

/* Parts of four channels of a pair's y, by `lanes` lanes, of which this one has every lanes-th part from `first` on. */
template <class S>
DEVICE float4 take_parts(const few_sm90_args &all, const dealt_smem<S> &smem, int pair, int channel, int first,
                         int lanes)
{
  const dealt_line &line = smem.line[1];
  const int place = smem.place[pair], active = place / (int)FEW_COLUMNS, block = channel / (int)FEW_PART_N,
            in_block = channel - block * (int)FEW_PART_N, parts = line.parts_of(active * line.blocks + block).count;
  dealt_sums sums = sums_of<S>(all, smem, true, active, block, place % (int)FEW_COLUMNS);
  sums.first += first * sums.step, sums.step *= lanes;
  return add_up_quads < S::ONE ? 8 : 4 > (sums, first < parts ? ceil_div(parts - first, lanes) : 0, in_block);
}

/* The sums of `lanes` lanes, four apart, in each of them. */
DEVICE float4 add_lanes(float4 sum, int lanes)
{
#pragma unroll 1
  for (int i = 4; i < 4 * lanes; i *= 2) {
    sum.x += __shfl_xor_sync(ALL_LANES, sum.x, i), sum.y += __shfl_xor_sync(ALL_LANES, sum.y, i);
    sum.z += __shfl_xor_sync(ALL_LANES, sum.z, i), sum.w += __shfl_xor_sync(ALL_LANES, sum.w, i);
  }
  return sum;
}

template <class Y> DEVICE float4 round_y(const float4 &sum, const float (&bias)[4])
{
  return make_float4(
      to_f32(from_f32<Y>(weighted(sum.x, 1.f, 1.f, bias[0]))), to_f32(from_f32<Y>(weighted(sum.y, 1.f, 1.f, bias[1]))),
      to_f32(from_f32<Y>(weighted(sum.z, 1.f, 1.f, bias[2]))), to_f32(from_f32<Y>(weighted(sum.w, 1.f, 1.f, bias[3]))));
}

/* Four channels of a token: the sum over its slots, in their order, by a warp: lane l has quad l % 4. Eight slots at
 * once; of fewer slots several lanes share the parts of one. */
template <class S>
DEVICE float4 sum_dealt_slots(const few_sm90_args &all, const dealt_smem<S> &smem, int token, int channel)
{
  using T = typename S::Y;
  const few_args &args = all.f;
  const combine_args &out = args.out;
  const int k = out.top_k,
            lanes = k > 4   ? 1
                    : k > 2 ? 2
                    : k > 1 ? 4
                            : 8,
            slots = 8 / lanes, slot = lane_id() / 4 / lanes, first = lane_id() / 4 % lanes;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int s = 0; s < k; s += slots) {
    const int pair = token * k + s + slot, to = s + slot < k ? smem.table.to[pair] : ROW_DROPPED;
    const float own = s + slot < k && channel < args.down.n ? smem.table.weight[pair] : 0.f;
    const bool expert = own != 0 && to != ROW_IDENTITY;
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
    float bias[4] = {};
    if (expert) {
      load_bias(args.down.b, 0, to, channel, bias);
      y = take_parts<S>(all, smem, pair, channel, first, lanes);
    }
    y = round_y<T>(add_lanes(y, lanes), bias);
    if (own != 0 && !expert) {
      const T *x = static_cast<const T *>(out.x) + token * out.x_ld + channel;
      y = make_float4(to_f32(x[0]), to_f32(x[1]), to_f32(x[2]), to_f32(x[3]));
    }
#pragma unroll 1
    for (int j = 0; j < slots; j++) {
      const int lane = lane_id() % 4 + 4 * lanes * j;
      const float weight = __shfl_sync(ALL_LANES, own, lane);
      const float4 v = make_float4(__shfl_sync(ALL_LANES, y.x, lane), __shfl_sync(ALL_LANES, y.y, lane),
                                   __shfl_sync(ALL_LANES, y.z, lane), __shfl_sync(ALL_LANES, y.w, lane));
      if (weight == 0) continue;
      sum.x = fmaf(weight, v.x, sum.x), sum.y = fmaf(weight, v.y, sum.y);
      sum.z = fmaf(weight, v.z, sum.z), sum.w = fmaf(weight, v.w, sum.w);
    }
  }
  return sum;
}

/* Lane l < 16 writes channel l/4 of quad l%4. */
template <class S> DEVICE void store_dealt_output(const few_args &args, int token, int channel, const float4 &sums)
{
  const int i = lane_id() / 4;
  if (i >= 4 || channel >= args.down.n) return;
  store_sum<typename S::Y>(args.out, token, channel + i, i == 0 ? sums.x : i == 1 ? sums.y : i == 2 ? sums.z : sums.w);
}

/* 16 channels of a token a warp: consumers first, who have seen the CTA's last weights. */
template <class S> DEVICE void write_dealt_outputs(const few_sm90_args &all, dealt_smem<S> &smem)
{
  const few_args &args = all.f;
  const int groups = ceil_div(args.down.n, 16), items = (int)token_total(args.out.tokens) * groups;
  wait_for(&smem.weights_ready, 0);
#pragma unroll 1
  for (int item = warp_id() * (int)gridDim.x + (int)blockIdx.x; item < items; item += S::WRITERS * (int)gridDim.x) {
    const int token = item / groups, channel = (item - token * groups) * 16 + lane_id() % 4 * 4;
    store_dealt_output<S>(args, token, channel, sum_dealt_slots<S>(all, smem, token, channel));
  }
}

/* ---- the grid ---- */

/* The routing warp: shares of the routing until none is left. */
template <class S> DEVICE void dealt_route(const few_args &args, dealt_smem<S> &smem, int experts, int before)
{
  for (int i = lane_id(); i < S::PAIRS * S::COLUMNS; i += WARP_SIZE) {
    const int active = i / S::COLUMNS, c = i % S::COLUMNS;
    const few_column column = active < experts ? smem.table.column[active][c] : (few_column)-1;
    if (column >= 0) smem.place[column_pair(column)] = (int16_t)(active * (int)FEW_COLUMNS + c);
  }
  if (args.protocol.weights) {
    int share = __shfl_sync(ALL_LANES, share_of_ticket(before), 0);
#pragma unroll 1
    while (share < (int)gridDim.x) {
      write_routing<S>(args, smem.table, share);
      share = __shfl_sync(ALL_LANES, lane_id() == 0 ? draw_share(args) : 0, 0);
    }
  }
  take_weights<S>(args, smem);
  report_counts<S>(args.map, smem.table);
}

/* What does not depend on earlier grids. By a lane of each warp: what lanes of one do ptxas makes loops of, 1.5 us of
 * barriers; and lines by warps that score no experts of one token. */
template <class S> DEVICE void prepare_dealt(const few_sm90_args &all, dealt_smem<S> &smem)
{
  const few_args &args = all.f;
  const int warp = warp_id();
  static_assert(S::STAGES <= S::THREADS / WARP_SIZE && (S::ONE || S::QUEUE <= S::THREADS / WARP_SIZE), "a warp each");
  if (elect_one()) {
    if (warp < S::STAGES) {
      mbarrier_init(&smem.told[warp], 1);
      mbarrier_init(&smem.full[warp], 1);
      mbarrier_init(&smem.there[warp], WARP_SIZE);
      mbarrier_init(&smem.empty[warp], S::CONSUMERS);
    }
    if (!S::ONE && warp < S::QUEUE) {
      mbarrier_init(&smem.unit_full[warp], 1);
      mbarrier_init(&smem.unit_empty[warp], 1);
    }
    if (warp == S::COPIER) mbarrier_init(&smem.weights_ready, WARP_SIZE);
    fence_mbarrier_init();
    if (warp == S::ROUTING) prefetch_tensormap(all.up), prefetch_tensormap(all.down);
    if (warp == S::COPIER + 1) smem.line[0].set(args.up, args.up.gated, all.cut[0]);
    if (warp == S::COPIER + 3) smem.line[1].set(args.down, false, all.cut[1]);
  }
  __syncwarp();
}

template <class S> DEVICE void dealt_gemm(const few_sm90_args &all, dealt_smem<S> &smem)
{
  const few_args &args = all.f;
  prepare_dealt<S>(all, smem);
  wait_for_earlier_grids();
  int before = 0; /* of a counter, that its warp drew from: nobody waits for it until it is wanted */
  if (threadIdx.x == S::ROUTING * WARP_SIZE) before = atomicAdd(args.protocol.tickets, 1);
  if (threadIdx.x == S::COPIER * WARP_SIZE) before = atomicAdd(all.items, (int)DEALT_FIRST);
  check_token_count(args.map.tokens, args.map.fault);
  if (args.protocol.weights) choose_experts<S>(args.gate, smem);
  const int experts = build_few_table<S>(args, smem);
  if (threadIdx.x < 2) smem.line[threadIdx.x].deal(experts);
  __syncthreads();
  if (warp_id() < S::CONSUMERS)
    dealt_consume<S>(all, smem);
  else if (warp_id() == S::COPIER)
    copy_items<S>(all, smem, experts, before);
  else if (warp_id() < S::ROUTING)
    bring_columns<S>(all, smem);
  else if (warp_id() == S::ROUTING)
    return dealt_route<S>(args, smem, experts, before);
  else if (!S::ONE && warp_id() == S::FINISHER)
    return finish_units<S>(all, smem);
  else
    return;
  write_dealt_outputs<S>(all, smem);
}

#endif
