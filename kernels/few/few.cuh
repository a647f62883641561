/*
 * few: the experts of up to FEW_TOKENS tokens, from ids or logits to the layer's output. Besides the weights' way from
 * memory, what counts is how often the whole GPU waits for something small. So there is no map and no combine; and
 * after a router, few_up is gate, up and down in one grid. Else few_down is a second grid, which asks for its first
 * weights as soon as few_up has left the SM.
 *
 *   layout.cuh    shapes, shared memory             products.cuh  consumer warps
 *   routing.cuh   gate and map                      arrange.cuh   weights with scales: x and h as they are multiplied
 *   table.cuh     which pairs go together           feed.cuh      likewise: what consumers ask memory for
 *   schedule.cuh  units, shares, tickets            scaled.cuh    likewise: consumer warps
 *   loads.cuh     copies into stages; h that is     fixed.cuh     likewise: u4, mx4 by integer products
 *                 still being written               epilogue.cuh  the epilogue warp
 *   n_major.cuh   weights [E, in, out]: copies,     outputs.cuh   combine
 *                 products
 *
 * Weights are the 16-row operand of mma.sync, 8 gate and the same 8 up channels, or 16 channels. The other operand has
 * a column for each token that has chosen the expert at hand, eight at once. Units of (expert, channels) of up go to
 * the CTAs in turn; of down each CTA has a few channels of all experts, so that it has all that its outputs are made
 * of.
 *
 * A unit is cut into slices of 16 rows x 128 k, which go to the CTA's consumer warps in turn. Each warp fills its own
 * pipeline of stages and waits for no other. Sums do not depend on which warp had which slice, hence not on other
 * tokens.
 *
 * In one grid, down's weights follow up's in the stages without a gap. h is all ones until it is written (protocol.h):
 * a warp that finds ones in a slice's columns reads them again until they have changed, without a fence or a counter.
 *
 * Within 32 elements of k both operands take k in another order, as in thin.cuh.
 *
 * Weights with scales, of one token: what a slice costs besides its products decides. So x and h are made what the mma
 * takes once a CTA and not once a slice, h by helpers and by consumers that would wait for it; slices are of 32 rows,
 * or of 16 and twice the k; a lane copies what it reads itself and keeps scales in registers. The mma's other seven
 * columns are free: with codes of 4 bits each has the token in one group of k alone, so the sums of eight groups come
 * apart by themselves, and scales multiply sums, not weights.
 */
#ifndef CUMOE_FEW_CUH
#define CUMOE_FEW_CUH

#include "few/epilogue.cuh"
#include "few/products.cuh"
#include "few/scaled.cuh"
#include "few/table.cuh"

/* The routing warp, and helpers. */
template <class S> DEVICE void few_route(const few_args &args, few_smem<S> &smem, int experts)
{
  const bool routing = warp_id() == S::ROUTING;
  if (S::UP && routing && args.protocol.weights && smem.share[0] < gridDim.x)
    write_routing<S>(args, smem.table, smem.share[0]);
  if (!S::UP) wait_for_earlier_grids();
  if (!S::UP || args.protocol.tickets) {
    if constexpr (S::SCALED)
      if (!routing) arrange_h<S>(args, smem, experts);
    if (routing) take_weights<S>(args, smem);
    write_outputs<S>(args, smem, [](bool, uint32_t) {});
  }
  if (S::UP && routing) report_counts<S>(args.map, smem.table);
}

/* What does not depend on earlier grids. */
template <class S> DEVICE void prepare(const few_args &args, few_smem<S> &smem)
{
  if (threadIdx.x < S::BUFFERS) {
    mbarrier_init(&smem.partial_full[threadIdx.x], S::CONSUMERS * WARP_SIZE);
    mbarrier_init(&smem.partial_empty[threadIdx.x], WARP_SIZE);
  }
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.weights_ready, WARP_SIZE);
    mbarrier_init(&smem.y_full, WARP_SIZE);
    mbarrier_init(&smem.y_empty, S::WRITERS * WARP_SIZE);
    mbarrier_init(&smem.share_ready, 1);
  }
  if (threadIdx.x == S::EPILOGUE * WARP_SIZE) smem.own = own_octets<typename S::layout>(args.down.n);
  if constexpr (S::SCALED) prepare_rows<S>(args, smem);
}

template <class S> DEVICE void few_gemm(const few_args &args, few_smem<S> &smem)
{
  prepare<S>(args, smem);
  if (S::UP) {
    const bool early = S::SCALED && args.protocol.weights; /* the grid ahead is the router, which reads x as well */
    if constexpr (S::SCALED)
      if (early) arrange_x<S>(args, smem);
    wait_for_earlier_grids();
    if constexpr (S::SCALED)
      if (!early) arrange_x<S>(args, smem);
    if (threadIdx.x == S::ROUTING * WARP_SIZE) smem.share[0] = args.protocol.tickets ? draw_share(args) : blockIdx.x;
    check_token_count(args.map.tokens, args.map.fault);
    if (args.protocol.weights) choose_experts<S>(args.gate, smem);
  }
  const int experts = build_few_table<S>(args, smem);
  if (warp_id() < S::CONSUMERS) {
    if constexpr (S::SCALED)
      consume_scaled<S>(args, smem, experts);
    else
      few_consume<S>(args, smem, experts);
  } else if (warp_id() == S::EPILOGUE) {
    few_finish<S>(args, smem, experts);
  } else {
    few_route<S>(args, smem, experts);
  }
}

#endif
