/* even: producer warps. They copy a share's weights and columns into stages, and say what consumers do with them. */
#ifndef CUMOE_EVEN_FEED_CUH
#define CUMOE_EVEN_FEED_CUH

#include "few/even_line.cuh"
#include "few/routing.cuh"

enum { EVEN_PRODUCERS_BARRIER = 1 };

/* gridDim.x: none is left. */
DEVICE int draw_even(int32_t *tickets)
{
  const int ctas = gridDim.x, ticket = atomicAdd(tickets, 1) + 1; /* -1 at first */
  return ticket < ctas ? ctas - 1 - ticket : ctas;
}

/* What octets of k's row of a stage are swapped by, so that neither copies nor ldmatrix meet in a bank: the latter
 * reads k 0 1 4 5 8 9 12 13 of an octet, or the same plus 2. */
DEVICE constexpr int even_swap(int k)
{
  return k & 1 | (k >> 2 & 3) << 1;
}

template <class S> struct even_feed {
  using W = typename S::W;
  using X = typename S::X;
  const few_args &args;
  even_smem<S> &smem;
  const int experts, octet, row; /* a thread's octet of a stage's row, and its first row */
  const uint64_t policy = evict_first_policy();
  pipeline_state<S::STAGES> at;
  int k_end;        /* of the product at hand */
  int64_t k_stride;

  DEVICE even_feed(const few_args &a, even_smem<S> &s, int e)
      : args(a), smem(s), experts(e), octet(producer() % S::OCTETS), row(producer() / S::OCTETS)
  {
  }
  DEVICE static int producer() { return threadIdx.x - S::CONSUMER_THREADS; }

  /* ---- a unit ---- */

  /* A thread's octet at k 0; NULL: it is not there. */
  DEVICE const W *weights_of(const even_line &line, bool down, const even_run &run) const
  {
    few_halves of = smem.table.weights[run.active];
    if (down) of.low = smem.table.down[run.active];
    const W *low = static_cast<const W *>(of.low), *high = static_cast<const W *>(of.high);
    if (line.halves == 1) return octet < run.width ? low + (run.octet + octet) * 8 : NULL;
    if (line.pairs) return octet < 2 * run.width ? (low < high ? low : high) + (2 * run.octet + octet) * 8 : NULL;
    const int in_half = octet % (S::OCTETS / 2);
    return in_half < run.width ? (octet == in_half ? low : high) + (run.octet + in_half) * 8 : NULL;
  }

  /* The row of x or h that is a thread's column, at its vector; NULL: zeros. */
  DEVICE const X *column_of(const gemm_args &g, bool down, int active) const
  {
    const few_column column = smem.table.column[active][producer() / S::VECTORS % S::COLUMNS];
    const int r = down ? column_pair(column) : column_token(column);
    return column < 0 ? NULL : static_cast<const X *>(g.a) + r * g.a_ld + producer() % S::VECTORS * 8;
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

  /* ---- a stage ---- */

  DEVICE void copy(const even_run &run, const W *weights, const X *column)
  {
    even_stage<S> &stage = smem.stages[at.stage];
    const int rows = run.granules * EVEN_GRANULE, first = run.row * EVEN_GRANULE, k = first + row;
    const W *from = weights + k * k_stride;
    const int64_t step = S::ROWS * k_stride;
    const uint32_t to = shared_address(stage.weights);
    const int place = row * S::OCTETS + (octet ^ even_swap(row));
    if (weights) {
#pragma unroll
      for (int i = 0; i < S::BK; i += S::ROWS, from += step)
        if (i < rows)
          cp_async_cg_16(to + ((place ^ even_swap(i)) + i * S::OCTETS) * 16, from, k + i < k_end ? 16 : 0, policy);
    }
    const int c = producer() / S::VECTORS, in_row = producer() % S::VECTORS * 8;
    if (c < S::COLUMNS && in_row < rows) {
      const bool there = column && first + in_row < k_end;
      cp_async_cg_16(shared_address(&stage.columns[c][in_row]), there ? column + first : args.up.a, there ? 16 : 0);
    }
  }

  DEVICE void fill(const even_run &run, const W *weights, const X *column)
  {
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    copy(run, weights, column);
    cp_async_mbarrier_arrive_noinc(&smem.full[at.stage]);
    if (producer() == 0) {
      smem.run[at.stage] = run;
      mbarrier_arrive(&smem.full[at.stage]);
    }
    STAMP(producer() == 0 && at.phase == 0 && at.stage == 0, 4);
    at.advance();
  }

  /* ---- a share ---- */

  DEVICE void stream(bool down, int share)
  {
    const gemm_args &g = down ? args.down : args.up;
    const even_line &line = smem.line[down];
    const even_shares shares(line, experts);
    if (share >= shares.count) return;
    even_place now = line.at(shares.begin(share));
    const even_place end = line.at(shares.begin(share + 1));
    even_run run;
    run.down = down, run.unused = 0;
    k_end = g.k, k_stride = g.b.k_stride;
#pragma unroll 1
    while (!(now == end)) {
      const bool ends = now.active == end.active && now.block == end.block;
      const int last = ends ? end.row : line.granules;
      run.active = now.active, run.octet = now.block * line.step, run.width = line.width(now.block);
      run.share = (int16_t)share;
      run.follows = now.row > 0 ? -1 : ends ? (int16_t)shares_behind(line, shares, now, share) : 0;
      const W *weights = weights_of(line, down, run);
      const X *column = column_of(g, down, now.active);
#pragma unroll 1
      for (int r = now.row; r < last; r += S::GRANULES) {
        run.row = r, run.granules = min(last - r, S::GRANULES), run.last = r + S::GRANULES >= last;
        fill(run, weights, column);
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
    if (producer() == 0) smem.next = smem.drawn[down] ? (int)gridDim.x : draw_even(args.protocol.tickets + down);
    bar_sync(EVEN_PRODUCERS_BARRIER, S::PRODUCER_THREADS);
    return smem.next;
  }

  DEVICE void end()
  {
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    cp_async_mbarrier_arrive_noinc(&smem.full[at.stage]);
    if (producer() > 0) return;
    smem.run[at.stage].granules = 0;
    mbarrier_arrive(&smem.full[at.stage]);
  }
};

template <class S> DEVICE void even_produce(const few_args &args, even_smem<S> &smem, int experts)
{
  even_feed<S> feed(args, smem, experts);
#pragma unroll 1
  for (int down = 0; down < 2; down++) {
    int share = smem.share[down];
#pragma unroll 1
    while (share < (int)gridDim.x) {
      feed.stream(down, share);
      share = feed.draw_again(down);
      if (!down && args.protocol.weights && share < (int)gridDim.x && feed.producer() < WARP_SIZE)
        write_routing<S>(args, share, smem.scratch[1]);
    }
  }
  feed.end();
}

#endif
