/* run: warps that fill stages. One copies a share's rows of weights as they lie in memory. The others bring what they are
 * multiplied by, a stage each in turn: x; or h, which they make of up's parts. */
#ifndef CUMOE_RUN_FEED_CUH
#define CUMOE_RUN_FEED_CUH

#include "device/ptx_hinted_sm90.cuh"
#include "few/routing.cuh"
#include "few/run_line.cuh"
#include "gemm/epilogue.cuh"

enum { RUN_PRODUCERS_BARRIER = 1, RUN_CONSUMERS_BARRIER };

/* gridDim.x: none is left. */
DEVICE int draw_run(int32_t *tickets)
{
  const int ctas = gridDim.x, ticket = atomicAdd(tickets, 1) + 1; /* -1 at first */
  return ticket < ctas ? ctas - 1 - ticket : ctas;
}

/* Columns are multiplied one, two, four or eight at once. */
template <class S> DEVICE int columns_at_once(int count)
{
  return S::COLUMNS == 1 || count <= 1 ? 1 : count <= 2 ? 2 : count <= 4 ? 4 : 8;
}

template <class S> struct run_feed {
  using W = typename S::W;
  using Y = typename S::Y;
  const few_args &args;
  run_smem<S> &smem;
  const int experts, warp;
  pipeline_state<S::STAGES> at;
  int turn;       /* stages until this warp's columns */
  int known = -1; /* the active expert whose h can be made */

  DEVICE run_feed(const few_args &a, run_smem<S> &s, int e)
      : args(a), smem(s), experts(e), warp(warp_id() - S::COPIER), turn(warp_id() - S::COPIER - 1)
  {
  }

  /* ---- weights ---- */

  DEVICE const W *rows_of(const run_stage &run) const
  {
    if (run.down) return static_cast<const W *>(smem.table.down[run.active]);
    const run_line &line = smem.line[0];
    const few_halves of = smem.table.weights[run.active];
    const bool high = line.matrices == 2 ? line.matrix_of(run.unit) : line.up_first;
    return static_cast<const W *>(high ? of.high : of.low);
  }

  /* By one lane. */
  DEVICE void copy_rows(const run_stage &run)
  {
    const run_line &line = smem.line[run.down];
    const int64_t stride = run.down ? args.down.b.k_stride : args.up.b.k_stride;
    const W *from = rows_of(run) + run.row * stride + line.block_of(run.unit) * line.wide * 8;
    const uint32_t bytes = run.width * 16u;
    const uint64_t policy = evict_first_policy();
    uint64_t *full = &smem.full[at.stage];
    smem.stage[at.stage] = run;
    mbarrier_arrive_expect_tx(full, run.rows * bytes);
    if (stride == run.width * 8) {
      cp_async_bulk_hinted(smem.stages[at.stage], from, run.rows * bytes, full, policy);
      return;
    }
#pragma unroll 1
    for (int r = 0; r < run.rows; r++, from += stride)
      cp_async_bulk_hinted(smem.stages[at.stage] + r * run.width, from, bytes, full, policy);
  }

  /* ---- columns ---- */

  DEVICE void take_x(const run_stage &run)
  {
    const int values = run.rows * columns_at_once<S>(run.columns);
    for (int i = lane_id(); i < values; i += WARP_SIZE) {
      const int column = i / run.rows, row = i - column * run.rows;
      float x = 0.f;
      if (column < run.columns) {
        const int token = column_token(smem.table.column[run.active][column]);
        x = to_f32(static_cast<const typename S::X *>(args.up.a)[token * args.up.a_ld + run.row + row]);
      }
      smem.columns[at.stage][row][column] = x;
    }
  }

  /* Until all of an active expert's up is in memory. */
  DEVICE void await_up(const run_parts<S> &parts, const run_shares &shares, int active)
  {
    if (known == active) return;
    known = active;
    const run_line &line = parts.line;
    const int unit = line.units() - 1, last = shares.of(line.last_row(active, unit));
#pragma unroll 1
    for (int s = shares.of(line.begin(active, 0)) + lane_id(); s <= last; s += WARP_SIZE)
      while (load_acquire(parts.flags + s) < parts.number(active, unit)) {
      }
    __syncwarp();
  }

  /* A lane's part of the sum of one channel of a half: of every `step`-th share. */
  DEVICE float add_parts(const run_parts<S> &parts, const run_shares &shares, const run_stage &run, int half,
                         int column, int n, int first, int step) const
  {
    constexpr int AT_ONCE = 4;
    const run_line &line = parts.line;
    const auto place = line.find(half, n);
    const int begin = shares.of(line.begin(run.active, place.unit)),
              last = shares.of(line.last_row(run.active, place.unit));
    const float *from = parts.of(smem, 0, run.active, place.unit, column) + place.in_unit;
    float sum = 0.f;
#pragma unroll 1
    for (int s = begin + first; s <= last; s += AT_ONCE * step) {
      float part[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        part[i] = s + i * step <= last ? load_relaxed(from + (s + i * step) * parts.most) : 0.f;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) sum += part[i];
    }
    return sum;
  }

  DEVICE float h_of(const run_stage &run, int row, float gate, float up) const
  {
    const int expert = smem.table.expert[run.active];
    const float none[1] = {1.f};
    float gate_bias[1], up_bias[1] = {0.f}, g[1] = {gate}, u[1] = {up};
    load_bias(args.up.b, 0, expert, run.row + row, gate_bias);
    if (args.up.gated) load_bias(args.up.b, 1, expert, run.row + row, up_bias);
    finish<EPILOGUE_activation, false>(args.up, none, gate_bias, up_bias, g, u);
    return to_f32(from_f32<Y>(g[0]));
  }

  /* Lanes have values, rows fastest; several lanes one, if there are more lanes. */
  DEVICE void take_h(const run_stage &run)
  {
    const run_parts<S> parts(args, smem, false);
    const run_shares shares(smem.line[0], experts);
    await_up(parts, shares, run.active);
    const int values = run.rows * columns_at_once<S>(run.columns);
    int width = 1;
    while (width < values && width < WARP_SIZE) width *= 2;
    const int first = lane_id() / width, step = WARP_SIZE / width;
#pragma unroll 1
    for (int v = 0; v < values; v += width) {
      const int i = v + lane_id() % width, column = i / run.rows, row = i - column * run.rows;
      const bool there = i < values && column < run.columns;
      float gate = 0.f, up = 0.f;
      if (there) {
        gate = add_parts(parts, shares, run, 0, column, run.row + row, first, step);
        if (args.up.gated) up = add_parts(parts, shares, run, 1, column, run.row + row, first, step);
      }
      for (int mask = width; mask < WARP_SIZE; mask *= 2) {
        gate += __shfl_xor_sync(ALL_LANES, gate, mask);
        up += __shfl_xor_sync(ALL_LANES, up, mask);
      }
      if (first == 0 && i < values) smem.columns[at.stage][row][column] = there ? h_of(run, row, gate, up) : 0.f;
    }
  }

  /* ---- a stage ---- */

  DEVICE bool my_turn()
  {
    const bool mine = turn == 0;
    turn = mine ? S::FEEDERS - 1 : turn - 1;
    return mine;
  }

  DEVICE void fill(const run_stage &run)
  {
    if (warp == 0) {
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      if (elect_one()) copy_rows(run);
      __syncwarp();
    } else if (my_turn()) {
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      if (run.down)
        take_h(run);
      else
        take_x(run);
      __syncwarp();
      if (lane_id() == 0) mbarrier_arrive(&smem.full[at.stage]);
    }
    at.advance();
  }

  /* ---- a share ---- */

  DEVICE void stream(bool down, int share)
  {
    const run_line &line = smem.line[down];
    const run_shares shares(line, experts);
    if (share >= shares.count) return;
    run_place now = line.at(shares.begin(share));
    const run_place end = line.at(shares.begin(share + 1));
    run_stage run;
    run.down = down, run.share = (int16_t)share;
#pragma unroll 1
    while (!(now == end)) {
      const bool ends = now.active == end.active && now.unit == end.unit;
      run_place next = {now.active, now.unit + 1, 0};
      if (next.unit == line.units()) next.unit = 0, next.active++;
      if (ends) next = end;
      const int last = ends ? end.row : line.k;
      run.active = (int16_t)now.active, run.unit = (int16_t)now.unit, run.width = (int16_t)line.width(now.unit);
      run.columns = S::COLUMNS == 1 ? 1 : smem.count[now.active];
      const int each = min(S::STAGE_VECTORS / run.width, (int)S::ROWS);
#pragma unroll 1
      for (int r = now.row; r < last; r += each) {
        run.row = r, run.rows = min(last - r, each);
        run.last = r + each < last ? 0 : next == end ? RUN_SHARE : RUN_UNIT;
        fill(run);
        STAMP(warp == 0 && lane_id() == 0 && r == now.row && !down, 4);
      }
      now = next;
    }
  }

  /* Another share, mostly none. */
  DEVICE int draw_again(bool down)
  {
    bar_sync(RUN_PRODUCERS_BARRIER, S::PRODUCER_THREADS);
    if (warp == 0 && lane_id() == 0) smem.next = draw_run(args.protocol.tickets + down);
    bar_sync(RUN_PRODUCERS_BARRIER, S::PRODUCER_THREADS);
    return smem.next;
  }

  DEVICE void end()
  {
    const bool mine = warp > 0 && my_turn();
    if (warp > 0 && !mine) return;
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (lane_id() > 0) return;
    if (warp == 0) smem.stage[at.stage].rows = 0;
    mbarrier_arrive(&smem.full[at.stage]);
  }
};

template <class S> DEVICE void run_produce(const few_args &args, run_smem<S> &smem, int experts)
{
  run_feed<S> feed(args, smem, experts);
  if (feed.warp == 0) fence_proxy_async_shared(); /* stages were others' until now */
#pragma unroll 1
  for (int down = 0; down < 2; down++) {
    int share = smem.share[down];
#pragma unroll 1
    while (share < (int)gridDim.x) {
      feed.stream(down, share);
      share = feed.draw_again(down);
      if (!down && args.protocol.weights && share < (int)gridDim.x && feed.warp == 0)
        write_routing<S>(args, share, smem.scratch[1]);
    }
  }
  feed.end();
}

#endif
