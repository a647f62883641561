/* dealt: warps that fill stages. One draws items and copies their weights, box by box, and tells the others what each
 * stage has. Those bring columns, in turn a stage each: x by cp.async; h by registers, as soon as it is there. */
#ifndef CUMOE_DEALT_FEED_CUH
#define CUMOE_DEALT_FEED_CUH

#include "device/ptx_hinted_sm90.cuh"
#include "few/dealt_h.cuh"
#include "few/loads.cuh"
#include "few/routing.cuh"

/* The next item, less one: the counter is -1 at first. Whoever draws goes on until he uses it. */
DEVICE int draw_ahead(const few_sm90_args &all)
{
  return (int)count_up(reinterpret_cast<uint32_t *>(all.items));
}

enum { DEALT_FIRST = 2 }; /* items that a CTA draws at once to begin with, as it cannot know the next so soon */

/* ---- weights ---- */

template <class S> struct dealt_copier {
  const few_sm90_args &all;
  dealt_smem<S> &smem;
  const uint64_t policy = evict_first_policy();
  pipeline_state<S::STAGES> at, before; /* before: WINDOW stages */
  pipeline_state<S::QUEUE> queue;

  DEVICE dealt_copier(const few_sm90_args &a, dealt_smem<S> &s) : all(a), smem(s)
  {
    before.stage = S::STAGES - S::WINDOW, before.phase = 1; /* the first ones wait for nothing */
  }

  /* By one lane. What lies outside of the matrix is zeros. */
  DEVICE void copy_boxes(const dealt_run &run, int expert)
  {
    const bool down = run.kind == DEALT_DOWN;
    const dealt_line &line = smem.line[down];
    const bool apart = line.gated && !line.pairs;
    const int first = run.block * (apart ? 64 : 128);
    uint64_t *full = &smem.full[at.stage];
    smem.run[at.stage] = run;
    mbarrier_arrive(&smem.told[at.stage]);
    mbarrier_arrive_expect_tx(full, sizeof smem.stages[0]);
#pragma unroll
    for (int b = 0; b < 2; b++)
      cp_async_bulk_tensor_4d(smem.stages[at.stage].boxes[b], down ? all.down : all.up, first + (apart ? 0 : b * 64),
                              run.chunk * S::BK, apart ? b ^ all.up_first : 0, expert, full, policy);
  }

  DEVICE void tell(const dealt_run &run, int expert)
  {
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    wait_for(&smem.full[before.stage], before.phase);
    before.advance();
    if (elect_one()) {
      if (run.kind == DEALT_END) {
        smem.run[at.stage] = run;
        mbarrier_arrive(&smem.told[at.stage]);
        mbarrier_arrive(&smem.full[at.stage]);
      } else {
        copy_boxes(run, expert);
      }
    }
    __syncwarp();
    at.advance();
  }

  DEVICE void hand_on(int active, int block)
  {
    wait_for(&smem.unit_empty[queue.stage], queue.phase ^ 1);
    __syncwarp(); /* all lanes have seen that phase */
    if (lane_id() == 0) {
      smem.unit[queue.stage] = {active, block};
      mbarrier_arrive(&smem.unit_full[queue.stage]);
    }
    __syncwarp();
    queue.advance();
  }

  DEVICE void copy_item(bool down, const dealt_item &item)
  {
    const int expert = smem.table.expert[item.active];
    dealt_run run = {
        (int16_t)(down ? DEALT_DOWN : DEALT_UP), 0, (int16_t)item.active, (int16_t)item.part, item.block, 0};
#pragma unroll 1
    for (int chunk = item.first; chunk < item.end; chunk++) {
      run.chunk = chunk, run.last = chunk + 1 == item.end;
      tell(run, expert);
    }
    /* Who has the last part of a unit makes h of it: all others are in the hands of those who have started. */
    const int parts = smem.line[0].parts_of(item.active * smem.line[0].blocks + item.block).count;
    if (!S::ONE && !down && item.part > 0 && item.part == parts - 1) hand_on(item.active, item.block);
  }
};

template <class S> DEVICE void copy_items(const few_sm90_args &all, dealt_smem<S> &smem, int experts, int before)
{
  dealt_copier<S> copier(all, smem);
  const int of_up = smem.line[0].items(experts), items = of_up + smem.line[1].items(experts);
  int index = __shfl_sync(ALL_LANES, before, 0) + 1, more = DEALT_FIRST - 1; /* behind it, that are drawn */
  bool ups_over = false;
  fence_proxy_async_shared(); /* stages were others' until now */
#pragma unroll 1
  while (index < items) {
    const bool down = index >= of_up;
    int next = 0;
    if (more == 0 && lane_id() == 0) next = draw_ahead(all);
    if (!S::ONE && down && !ups_over) copier.hand_on(-1, 0), ups_over = true;
    copier.copy_item(down, smem.line[down].find(down ? index - of_up : index));
    index = more > 0 ? index + 1 : __shfl_sync(ALL_LANES, next, 0) + 1;
    more = max(more - 1, 0);
  }
  if (!S::ONE && !ups_over) copier.hand_on(-1, 0);
  const dealt_run end = {DEALT_END, 0, 0, 0, 0, 0};
#pragma unroll 1
  for (int i = 0; i < S::FEEDERS; i++) copier.tell(end, 0);
}

/* ---- columns ---- */

template <class S> struct dealt_feeder {
  using X = typename S::X;
  static constexpr int EACH = S::COLUMNS * S::VECTORS <= WARP_SIZE ? 1 : S::COLUMNS * S::VECTORS / WARP_SIZE;
  const few_sm90_args &all;
  const few_args &args;
  dealt_smem<S> &smem;

  DEVICE dealt_feeder(const few_sm90_args &a, dealt_smem<S> &s) : all(a), args(a.f), smem(s) {}

  /* A lane's vectors of a stage: column (-1: none), row of x or h (-1: zeros), first element. */
  struct place {
    int column, in_row, row;
  };
  DEVICE place place_of(const dealt_run &run, bool down, int i) const
  {
    const int vector = lane_id() + i * WARP_SIZE, c = vector / S::VECTORS, in_row = vector % S::VECTORS * 8;
    if (c >= S::COLUMNS) return {-1, 0, 0};
    const few_column column = smem.table.column[run.active][c];
    const bool there = column >= 0 && run.chunk * S::BK + in_row < (down ? args.down.k : args.up.k);
    return {c, in_row, !there ? -1 : down ? column_pair(column) : column_token(column)};
  }

  DEVICE void copy_x(const dealt_run &run, int stage)
  {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const place p = place_of(run, false, i);
      if (p.column < 0) continue;
      const X *from = static_cast<const X *>(args.up.a);
      if (p.row >= 0) from += p.row * args.up.a_ld + run.chunk * S::BK + p.in_row;
      cp_async_cg_16(shared_address(&smem.columns[stage][p.column][p.in_row]), from, p.row >= 0 ? 16 : 0);
    }
    cp_async_mbarrier_arrive_noinc(&smem.there[stage]);
  }

  DEVICE void take_h(const dealt_run &run, int stage)
  {
    uint4 h[EACH];
    place p[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) p[i] = place_of(run, true, i);
    do {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const X *from = static_cast<const X *>(args.down.a) + p[i].row * args.down.a_ld + run.chunk * S::BK;
        h[i] = make_uint4(0, 0, 0, 0);
        if (p[i].column >= 0 && p[i].row >= 0) h[i] = load_relaxed_vector(from + p[i].in_row);
      }
    } while (has_unwritten(h));
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (p[i].column >= 0) *reinterpret_cast<uint4 *>(&smem.columns[stage][p[i].column][p[i].in_row]) = h[i];
    mbarrier_arrive(&smem.there[stage]);
  }

  /* ONE: of the sums of up, two channels a lane. */
  DEVICE void make_h(const dealt_run &run, int stage)
  {
    const int channel = run.chunk * S::BK + 2 * lane_id();
    *reinterpret_cast<uint32_t *>(&smem.columns[stage][0][2 * lane_id()]) =
        two_of_h<S>(all, smem, run.active, 0, channel);
    mbarrier_arrive(&smem.there[stage]);
  }
};

template <class S> DEVICE void bring_columns(const few_sm90_args &all, dealt_smem<S> &smem)
{
  dealt_feeder<S> feeder(all, smem);
  int stage = warp_id() - S::COPIER - 1;
  uint32_t phase = 0;
#pragma unroll 1
  while (true) {
    wait_for(&smem.told[stage], phase);
    const dealt_run run = smem.run[stage];
    if (run.kind == DEALT_UP) {
      feeder.copy_x(run, stage);
    } else if (run.kind == DEALT_DOWN) {
      if constexpr (S::ONE)
        feeder.make_h(run, stage);
      else
        feeder.take_h(run, stage);
    } else {
      mbarrier_arrive(&smem.there[stage]);
      return;
    }
    stage += S::FEEDERS;
    if (stage >= S::STAGES) stage -= S::STAGES, phase ^= 1;
  }
}

#endif
