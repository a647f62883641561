/*
 * run: the experts of few tokens whose weights are [E, in, out], behind a router: few.cuh's one grid, another way.
 *
 *   run_line.cuh  who reads what; parts of sums      run_products.cuh  products, outputs
 *   run_feed.cuh  copies; x, and h of up's parts
 *
 * Such weights are, of one expert, rows of all its channels. So each CTA reads one run of memory, an equal share of all
 * rows of the active experts, by bulk copies of whole rows, and has some of k of an expert, but all its channels. A
 * thread has the same 8 channels of each row and multiplies without tensor cores: memory gives an SM 8 to 10 weights a
 * clock, of which each is a conversion and an FMA a token.
 *
 * What a CTA has of an expert's sums goes to memory; a flag a share tells how far it has come. Whoever needs h or y adds
 * parts up, in the order of k: h of those k that its share of down has rows of, y of its own channels. Down's rows follow
 * up's in the same stages, so memory is busy while h is awaited.
 *
 * Shares are drawn, of up and of down each, the last first: so what a CTA waits for is always in the hands of one that
 * has started.
 */
#ifndef CUMOE_RUN_CUH
#define CUMOE_RUN_CUH

#include "few/run_products.cuh"
#include "few/table.cuh"

/* The routing warp. */
template <class S> DEVICE void run_route(const few_args &args, run_smem<S> &smem)
{
  if (args.protocol.weights && smem.share[0] < (int)gridDim.x) write_routing<S>(args, smem.share[0], smem.scratch[0]);
  take_weights<S>(args, smem);
  report_counts<S>(args.map, smem.table);
}

/* What does not depend on earlier grids. */
template <class S> DEVICE void prepare_run(const few_args &args, run_smem<S> &smem)
{
  if (threadIdx.x < S::STAGES) {
    mbarrier_init(&smem.full[threadIdx.x], 2); /* the weights; the columns */
    mbarrier_init(&smem.empty[threadIdx.x], S::CONSUMERS);
    fence_mbarrier_init();
  }
  if (threadIdx.x == WARP_SIZE) {
    mbarrier_init(&smem.weights_ready, WARP_SIZE);
    smem.line[0].template set<S>(args.up, args.up.gated);
  }
  if (threadIdx.x == 2 * WARP_SIZE) smem.line[1].template set<S>(args.down, false);
}

template <class S> DEVICE void run_gemm(const few_args &args, run_smem<S> &smem)
{
  STAMP(threadIdx.x == 0, 0);
  prepare_run<S>(args, smem);
  wait_for_earlier_grids();
  if (warp_id() == S::ROUTING && lane_id() < 2) smem.share[lane_id()] = draw_run(args.protocol.tickets + lane_id());
  STAMP(threadIdx.x == 0, 1);
  check_token_count(args.map.tokens, args.map.fault);
  if (args.protocol.weights) choose_experts<S>(args.gate, smem);
  STAMP(threadIdx.x == 0, 2);
  const int experts = build_few_table<S>(args, smem);
  count_pairs<S>(smem, experts);
  STAMP(threadIdx.x == 0, 3);
  if (warp_id() < S::CONSUMERS)
    run_consume<S>(args, smem);
  else if (warp_id() < S::ROUTING)
    run_produce<S>(args, smem, experts);
  else
    run_route<S>(args, smem);
  __syncthreads();
  run_outputs<S>(args, smem, experts);
}

#endif
