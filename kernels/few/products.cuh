/* few, weights without scales: consumer warps. Each multiplies its own slices, and stores its part of a unit in shared
 * memory. */
#ifndef CUMOE_FEW_PRODUCTS_CUH
#define CUMOE_FEW_PRODUCTS_CUH

#include "few/loads.cuh"

/* Lane l feeds weight row l/4; the other eight are zero. */
template <class S>
DEVICE void multiply_wide_slice(const few_stage<S> &stage, const uint4 (&x)[2 * S::GROUPS], float (&sum)[2][4])
{
  const uint4 *weights = reinterpret_cast<const uint4 *>(stage.weights);
#pragma unroll
  for (int i = 0; i < 2 * S::GROUPS; i++) {
    const uint4 w = weights[few_vector(lane_id() / 4, i * 4 + lane_id() % 4, 2 * S::VECTORS)];
    mma_m16n8k16<typename S::X>(sum[0], {w.x, 0, w.y, 0}, {x[i].x, x[i].y});
    mma_m16n8k16<typename S::X>(sum[1], {w.z, 0, w.w, 0}, {x[i].z, x[i].w});
  }
}

/* Lane l feeds weight rows l/4 and l/4 + 8. */
template <class S>
DEVICE void multiply_slice(const few_stage<S> &stage, const uint4 (&x)[S::GROUPS], float (&sum)[2][4])
{
  const uint4 *weights = reinterpret_cast<const uint4 *>(stage.weights);
#pragma unroll
  for (int i = 0; i < S::GROUPS; i++) {
    const int at = few_vector(lane_id() / 4, i * 4 + lane_id() % 4, S::VECTORS);
    const uint4 w0 = weights[at], w1 = weights[at + 8 * S::VECTORS];
    mma_m16n8k16<typename S::X>(sum[0], {w0.x, w1.x, w0.y, w1.y}, {x[i].x, x[i].y});
    mma_m16n8k16<typename S::X>(sum[1], {w0.z, w1.z, w0.w, w1.w}, {x[i].z, x[i].w});
  }
}

/* `here` is the slice in that stage. */
template <class S>
DEVICE void multiply_stage(const few_args &args, few_smem<S> &smem, const few_cursor<S> &here, int stage,
                           float (&sum)[S::SUMS][4])
{
  const gemm_args &g = gemm_of<S>(args);
  const few_column(&of)[FEW_COLUMNS] = smem.table.column[here.unit.active];
  few_stage<S> &at = smem.stages[warp_id()][stage];
  if constexpr (S::N_MAJOR) {
    uint4 x[S::SLICE_K / 32];
    take_columns<S, S::SLICE_K / 8>(g, !args.protocol.tickets, of, here.slice, at, x);
    multiply_n_major<S>(few_apart<S>(g), at, x, sum);
  } else if (here.unit.wide()) {
    uint4 x[2 * S::GROUPS];
    take_columns<S, 2 * S::VECTORS>(g, !args.protocol.tickets, of, here.slice, at, x);
    multiply_wide_slice<S>(at, x, sum);
  } else {
    uint4 x[S::GROUPS];
    take_columns<S, S::VECTORS>(g, !args.protocol.tickets, of, here.slice, at, x);
    multiply_slice<S>(at, x, sum);
  }
}

/* A warp's part of a unit. `first`: its first slice of the unit, below CONSUMERS, which names the part: so the order of
 * the sum does not depend on which warp had which slice. Every lane arrives for itself: racecheck knows no other
 * order. */
template <class S>
DEVICE void store_partial(few_smem<S> &smem, typename S::RING &buffer, int first, const float (&sum)[S::SUMS][4])
{
  wait_for(&smem.partial_empty[stage_of(buffer)], phase_of(buffer) ^ 1);
  float4(&to)[S::layout::TILES][S::HOLDERS] = smem.partial[stage_of(buffer)][first];
  if constexpr (S::N_MAJOR) {
#pragma unroll
    for (int t = 0; t < S::TILES; t++) to[t][lane_id()] = make_float4(sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
  } else {
    to[0][lane_id()] =
        make_float4(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1], sum[0][2] + sum[1][2], sum[0][3] + sum[1][3]);
  }
  mbarrier_arrive(&smem.partial_full[stage_of(buffer)]);
  buffer.advance();
}

/* The warp's slices from `here` on, while next() loads those to come. */
template <class S, class NEXT>
DEVICE void consume_units(const few_args &args, few_smem<S> &smem, few_cursor<S> here, pipeline_state<S::STAGES> &stage,
                          typename S::RING &buffer, NEXT next)
{
#pragma unroll 1
  for (; here.unit.left > 0; here.next_unit()) {
    const int first = here.slice;
    float sum[S::SUMS][4] = {};
#pragma unroll 1
    for (; here.slice < here.slices(); here.slice += S::CONSUMERS, stage.advance()) {
      cp_async_wait_group<S::STAGES - 2>();
      __syncwarp(); /* all lanes' copies are there, and the stage before is read */
      next();
      multiply_stage<S>(args, smem, here, stage.stage, sum);
    }
    store_partial<S>(smem, buffer, first, sum);
  }
}

/* One share of up after the other. At the end, where the grid does both, all stages but one are down's first, or in
 * flight. */
template <class L>
DEVICE void consume_up(const few_args &args, few_memory<L> &smem, int experts, few_copier<L> &copies,
                       pipeline_state<L::STAGES> &stage, typename L::RING &buffer)
{
  using U = few_part<L, operation_up>;
  uint32_t phase = 0;
  while (true) {
    const few_cursor<U> here = copies.up;
#pragma unroll 1
    for (int i = 0; i < L::STAGES - 1; i++) copies.next_of_up();
    consume_units<U>(args, smem, here, stage, buffer, [&] { copies.next_of_up(); });
    if (!args.protocol.tickets) return;
    wait_for(&smem.share_ready, phase);
    const int share = smem.share[1];
    if (share == gridDim.x) return;
    phase ^= 1;
    cp_async_wait_group<0>(); /* what was loaded ahead is loaded again */
    __syncwarp();
    copies.up = few_cursor<U>(args.up, {args.up, experts, share});
    copies.down = few_cursor<few_part<L, operation_down>>(args.down, {smem.own, experts});
    copies.to = stage;
  }
}

/* A grid of down loads its first weights before h is complete, all in one cp.async group; then the columns. */
template <class L> DEVICE void begin_down(few_copier<L> &copies)
{
  few_copier<L> weights = copies;
#pragma unroll 1
  for (int i = 0; i < L::STAGES - 1; i++, weights.to.advance(), weights.down.slice += L::CONSUMERS)
    if (weights.down.find()) weights.down_weights();
  wait_for_earlier_grids();
#pragma unroll 1
  for (int i = 0; i < L::STAGES - 1; i++, copies.advance(), copies.down.slice += L::CONSUMERS)
    if (copies.down.find()) copies.down_columns();
}

template <class S> DEVICE void few_consume(const few_args &args, few_smem<S> &smem, int experts)
{
  using L = typename S::layout;
  using D = few_part<L, operation_down>;
  pipeline_state<L::STAGES> stage;
  typename L::RING buffer;
  few_copier<L> copies(args, smem, experts, S::UP ? smem.share[0] : (int)gridDim.x);
  if constexpr (S::UP) {
    consume_up<L>(args, smem, experts, copies, stage, buffer);
    if (!args.protocol.tickets) return;
  } else {
    begin_down<L>(copies);
  }
  const few_cursor<D> here(args.down, {smem.own, experts});
  consume_units<D>(args, smem, here, stage, buffer, [&] { copies.next_of_down(); });
}

#endif
