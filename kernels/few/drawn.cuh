/*
 * drawn: the experts of several tokens, weights of 4 bits: few.cuh's one grid, another way.
 *
 *   drawn_layout.cuh   shapes, shared memory          drawn_products.cuh   products
 *   drawn_feed.cuh     units; what is asked for ahead
 *
 * Of weights of 4 bits an SM wants more of its instructions than of its copies, so no warp does anything but multiply,
 * and nothing is handed from one to another: a warp has whole units, 16 weight rows by all of k, finishes them itself,
 * and draws the next one, all of up's before the CTA's own of down. It copies its own slices, and with each the columns
 * of its expert's tokens, as they lie in memory; h is all ones until it is written, and is read again until it is.
 * What a warp waits for is always in the hands of one that drew it before.
 *
 * Codes become what activations are, in registers. An active expert stands for up to four pairs: of more the weights
 * are read again.
 */
#ifndef CUMOE_DRAWN_CUH
#define CUMOE_DRAWN_CUH

#include "few/drawn_products.cuh"
#include "few/epilogue.cuh"
#include "few/table.cuh"

/* ---- units ---- */

/* h that was not written yet when it was copied. */
template <class L>
DEVICE void await_columns(const gemm_args &g, const few_column *columns, int slice, drawn_stage<L> &stage)
{
  const int lane = lane_id(), k = slice * L::BK + lane * 8;
#pragma unroll 1
  for (int c = 0; c < L::COLUMNS && columns[c] >= 0; c++) {
    uint4 &mine = stage.columns[c][drawn_column_vector(c, lane)], v = mine;
    if (!__any_sync(ALL_LANES, is_unwritten(v))) continue;
    while (is_unwritten(v)) {
      __nanosleep(FEW_POLL);
      v = load_relaxed_vector(static_cast<const typename L::Y *>(g.a) + column_pair(columns[c]) * g.a_ld + k);
    }
    mine = v;
    __syncwarp();
  }
}

/* By the warp that has all of its sums: h to memory, y to shared memory. */
template <class P>
DEVICE void finish_drawn(const few_args &args, drawn_smem<P> &smem, const drawn_unit &unit, int first, float (&sum)[4])
{
  using Y = typename P::Y;
  const gemm_args &g = P::DOWN ? args.down : args.up;
  const bool gated = !P::DOWN && g.gated;
  const int expert = smem.table.expert[unit.active], local = lane_id() / 4, channel = unit.octet * 8 + local,
            end = P::DOWN ? smem.own.first + smem.own.count : g.n / 8, octets = gated ? 1 : min(2, end - unit.octet);
  float low_bias[1], high_bias[1] = {};
  load_bias(g.b, 0, expert, channel, low_bias);
  if (gated || octets > 1) load_bias(g.b, gated ? 1 : 0, expert, gated ? channel : channel + 8, high_bias);
  const float low = global_scale(g.b, 0, expert), high = global_scale(g.b, gated ? 1 : 0, expert);
  sum[0] *= low, sum[1] *= low, sum[2] *= high, sum[3] *= high;
  finish_tile<P>(g, smem.table.column[unit.active] + lane_id() % 4 * 2, P::DOWN ? channel - first * 8 : channel, octets,
                 low_bias[0], high_bias[0], sum, [&](int at, int row, Y value) {
                   if constexpr (P::DOWN)
                     smem.y[row][at] = value;
                   else
                     store_relaxed(static_cast<Y *>(g.c) + row * g.c_ld + at, value);
                 });
}

template <class L>
DEVICE void multiply_drawn(const few_args &args, drawn_smem<L> &smem, const drawn_slice &at, drawn_stage<L> &stage,
                           float (&sum)[2][4])
{
  const gemm_args &g = at.unit.down ? args.down : args.up;
  const few_column *columns = smem.table.column[at.unit.active];
  if (at.unit.down) await_columns<L>(g, columns, at.slice, stage);
  int count = 1;
#pragma unroll
  for (int c = 1; c < L::COLUMNS; c++) count += columns[c] >= 0;
  const drawn_reader<L> from(stage, count);
  const int runs = min(ceil_div(g.k - at.slice * L::BK, 128), (int)L::RUNS);
  if constexpr (same_type<typename L::W, mx4>)
    multiply_slice_mx4<L>(from, at.scales, runs, sum);
  else
    multiply_slice<L>(from, at.scales, g.b.scale.dtype, runs, sum);
}

/* A warp's units: of up, unless this is not the first round, and of down those of its CTA's octets from `first` on. */
template <class L> DEVICE void consume_drawn(const few_args &args, drawn_smem<L> &smem, int experts, int first)
{
  drawn_feed<L> feed(args, smem, experts, first);
  float sum[2][4] = {};
  if (!feed.at.down) feed.draw_ahead();
#pragma unroll 1
  for (int i = -(L::STAGES - 1), stage = 0;; i++) { /* the first rounds only ask */
    if (i >= 0) cp_async_wait_group<L::STAGES - 2>();
    __syncwarp(); /* all lanes' copies are there, and the stage before is read */
    const drawn_slice at = feed.next();
    if (args.protocol.weights && feed.routes) {
      const int token = __ffs(feed.routes) - 1;
      feed.routes &= feed.routes - 1;
      if (token < (int)token_total(args.gate.tokens))
        write_routing<L>(args, (int)gridDim.x - 1 - token, smem.scratch[warp_id()]);
    }
    if (i < 0) continue;
    if (at.unit.active < 0) break;
    multiply_drawn<L>(args, smem, at, smem.stages[warp_id()][stage], sum);
    stage = stage == L::STAGES - 1 ? 0 : stage + 1;
    if (at.slice + 1 < ceil_div((at.unit.down ? args.down : args.up).k, L::BK)) continue;
#pragma unroll
    for (int j = 0; j < 4; j++) sum[0][j] += sum[1][j];
    if (at.unit.down)
      finish_drawn<drawn_part<L, true>>(args, smem, at.unit, first, sum[0]);
    else
      finish_drawn<drawn_part<L, false>>(args, smem, at.unit, first, sum[0]);
#pragma unroll
    for (int j = 0; j < 4; j++) sum[0][j] = sum[1][j] = 0.f;
  }
}

/* ---- the grid ---- */

template <class L> DEVICE void write_drawn_outputs(const few_args &args, drawn_smem<L> &smem, int first)
{
  const few_outputs<L> outputs(args);
  const int end = min(first + (int)L::OCTETS, smem.own.first + smem.own.count);
#pragma unroll 1
  for (int octet = first; octet < end; octet += 2)
    store_outputs<L>(args, smem, outputs, octet, min(2, end - octet), (octet - first) * 8);
}

template <class L> DEVICE void drawn_gemm(const few_args &args, drawn_smem<L> &smem)
{
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.weights_ready, WARP_SIZE);
    smem.own = part_of_cta(args.down.n / 8), smem.drawn = 0;
  }
  wait_for_earlier_grids();
  check_token_count(args.map.tokens, args.map.fault);
  if (args.protocol.weights) choose_experts<L>(args.gate, smem);
  const int experts = build_few_table<L>(args, smem);
  const int end = smem.own.first + smem.own.count;
#pragma unroll 1
  for (int first = smem.own.first; first == smem.own.first || first < end; first += L::OCTETS) {
    consume_drawn<L>(args, smem, experts, first);
    if (first == smem.own.first && warp_id() == 0) take_weights<L>(args, smem);
    __syncthreads();
    if (threadIdx.x == 0) smem.drawn = 0;
    write_drawn_outputs<L>(args, smem, first);
    __syncthreads();
  }
  if (warp_id() == 1) report_counts<L>(args.map, smem.table);
}

#endif
