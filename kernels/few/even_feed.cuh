/* even: producer warps. One copies a share's weights into stages, box by box, and says what consumers do with them. The
 * others bring the columns, in turn a stage each: x by cp.async; h by way of registers, as soon as it is written, so
 * that as many stages of h are on their way as there are such warps. */
#ifndef CUMOE_EVEN_FEED_CUH
#define CUMOE_EVEN_FEED_CUH

#include "device/ptx_hinted_sm90.cuh"
#include "few/even_line.cuh"
#include "few/loads.cuh"
#include "few/routing.cuh"

enum { EVEN_PRODUCERS_BARRIER = 1 };

/* gridDim.x: none is left. */
DEVICE int draw_even(int32_t *tickets)
{
  const int ctas = gridDim.x, ticket = atomicAdd(tickets, 1) + 1; /* -1 at first */
  return ticket < ctas ? ctas - 1 - ticket : ctas;
}

template <class S> struct even_feed {
  using X = typename S::X;
  static constexpr int TURNS = S::PRODUCERS - 1;
  static constexpr int EACH = S::COLUMNS * S::VECTORS <= WARP_SIZE ? 1 : S::COLUMNS * S::VECTORS / WARP_SIZE;
  const few_sm90_args &all;
  const few_args &args;
  even_smem<S> &smem;
  const int experts, warp;
  const uint64_t policy = evict_first_policy();
  pipeline_state<S::STAGES> at;
  STAMP_FLAG(stamped)
  int turn; /* stages until this warp's columns */

  DEVICE even_feed(const few_sm90_args &a, even_smem<S> &s, int e)
      : all(a), args(a.f), smem(s), experts(e), warp(warp_id() - S::CONSUMERS), turn(warp_id() - S::CONSUMERS - 1)
  {
  }

  /* Shares behind this one that begin in the same unit. */
  DEVICE int shares_behind(const even_line &line, const even_shares &shares, const even_place &now, int share) const
  {
    const int w = line.width(now.block),
              last = now.active * line.each.d + now.block * line.whole.d + (line.granules - 1) * w;
    int behind = 1;
    while (share + 1 + behind < shares.count && shares.begin(share + 1 + behind) <= last) behind++;
    return behind;
  }

  /* ---- weights ---- */

  /* By one lane. Boxes that lie outside of the matrix are zeros. */
  DEVICE void copy_boxes(const even_run &run, int expert)
  {
    const even_line &line = smem.line[run.down];
    const bool apart = line.halves == 2 && !line.pairs;
    const int first = run.octet * (line.pairs ? 16 : 8);
    even_stage<S> &stage = smem.stages[at.stage];
    uint64_t *full = &smem.full[at.stage];
    smem.run[at.stage] = run;
    mbarrier_arrive_expect_tx(full, run.granules * (uint32_t)sizeof stage.boxes[0]);
    const void *map = run.down ? all.down : all.up;
#pragma unroll
    for (int i = 0; i < S::GRANULES; i++) {
      if (i >= run.granules) continue;
#pragma unroll
      for (int b = 0; b < S::BOXES; b++) {
        const int half = apart ? b / (S::BOXES / 2) : 0, in_half = apart ? b % (S::BOXES / 2) : b;
        cp_async_bulk_tensor_4d(stage.boxes[i][b], map, first + in_half * 64, (run.row + i) * EVEN_GRANULE,
                                apart && all.up_first ? 1 - half : half, expert, full, policy);
      }
    }
  }

  /* ---- columns ---- */

  /* A lane's vectors of a stage: row of x or h (-1: zeros), first element. */
  struct place {
    int column, in_row, row;
  };
  DEVICE place place_of(const even_run &run, int i) const
  {
    const int vector = lane_id() + i * WARP_SIZE, c = vector / S::VECTORS, in_row = vector % S::VECTORS * 8;
    if (c >= S::COLUMNS || in_row >= run.granules * EVEN_GRANULE) return {-1, 0, 0};
    const few_column column = smem.table.column[run.active][c];
    const bool there = column >= 0 && run.row * EVEN_GRANULE + in_row < (run.down ? args.down.k : args.up.k);
    return {c, in_row, !there ? -1 : run.down ? column_pair(column) : column_token(column)};
  }

  DEVICE void copy_x(const even_run &run)
  {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const place p = place_of(run, i);
      if (p.column < 0) continue;
      const X *from = static_cast<const X *>(args.up.a);
      if (p.row >= 0) from += p.row * args.up.a_ld + run.row * EVEN_GRANULE + p.in_row;
      cp_async_cg_16(shared_address(&smem.columns[at.stage][p.column][p.in_row]), from, p.row >= 0 ? 16 : 0);
    }
    cp_async_mbarrier_arrive_noinc(&smem.full[at.stage]);
  }

  DEVICE void take_h(const even_run &run)
  {
    uint4 h[EACH];
    place p[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) p[i] = place_of(run, i);
    bool again;
    do {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const X *from = static_cast<const X *>(args.down.a) + p[i].row * args.down.a_ld + run.row * EVEN_GRANULE;
        h[i] = make_uint4(0, 0, 0, 0);
        if (p[i].column >= 0 && p[i].row >= 0) h[i] = load_relaxed_vector(from + p[i].in_row);
      }
      again = has_unwritten(h);
    } while (again);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (p[i].column >= 0) *reinterpret_cast<uint4 *>(&smem.columns[at.stage][p[i].column][p[i].in_row]) = h[i];
    mbarrier_arrive(&smem.full[at.stage]);
  }

  /* ---- a stage ---- */

  DEVICE bool my_turn()
  {
    const bool mine = turn == 0;
    turn = mine ? TURNS - 1 : turn - 1;
    return mine;
  }

  DEVICE void fill(const even_run &run, int expert)
  {
    if (warp == 0) {
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      if (elect_one()) copy_boxes(run, expert);
      __syncwarp();
      STAMP_ONCE(stamped, lane_id() == 0, 4);
    } else if (my_turn()) {
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      if (run.down)
        take_h(run);
      else
        copy_x(run);
    }
    at.advance();
  }

  /* ---- a share ---- */

  DEVICE void stream(bool down, int share)
  {
    const even_line &line = smem.line[down];
    const even_shares shares(line, experts);
    if (share >= shares.count) return;
    even_place now = line.at(shares.begin(share));
    const even_place end = line.at(shares.begin(share + 1));
    even_run run;
    run.down = down, run.unused = 0;
#pragma unroll 1
    while (!(now == end)) {
      const bool ends = now.active == end.active && now.block == end.block;
      const int last = ends ? end.row : line.granules, expert = smem.table.expert[now.active];
      run.active = now.active, run.octet = now.block * line.step, run.width = line.width(now.block);
      run.share = (int16_t)share;
      run.follows = now.row > 0 ? -1 : ends ? (int16_t)shares_behind(line, shares, now, share) : 0;
#pragma unroll 1
      for (int r = now.row; r < last; r += S::GRANULES) {
        run.row = r, run.granules = min(last - r, S::GRANULES), run.last = r + S::GRANULES >= last;
        fill(run, expert);
      }
      now.row = 0;
      if (ends) break;
      if (++now.block == line.blocks) now.block = 0, now.active++;
    }
  }

  /* Another share, mostly none. */
  DEVICE int draw_again(bool down)
  {
    bar_sync(EVEN_PRODUCERS_BARRIER, S::PRODUCER_THREADS);
    if (warp == 0 && lane_id() == 0)
      smem.next = smem.drawn[down] ? (int)gridDim.x : draw_even(args.protocol.tickets + down);
    bar_sync(EVEN_PRODUCERS_BARRIER, S::PRODUCER_THREADS);
    return smem.next;
  }

  DEVICE void end()
  {
    const bool mine = warp > 0 && my_turn();
    if (warp > 0 && !mine) return;
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (mine) {
      mbarrier_arrive(&smem.full[at.stage]);
    } else if (lane_id() == 0) {
      smem.run[at.stage].granules = 0;
      mbarrier_arrive(&smem.full[at.stage]);
    }
  }
};

template <class S> DEVICE void even_produce(const few_sm90_args &all, even_smem<S> &smem, int experts)
{
  even_feed<S> feed(all, smem, experts);
  const few_args &args = all.f;
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
