/*
 * gemv: the experts of one token whose weights are [E, in, out], behind a router: few.cuh's one grid, another way.
 *
 *   gemv_line.cuh  who reads what       gemv_sums.cuh  sums of parts of k, h, outputs
 *
 * Memory gives such weights as fast as others if it is asked for long pieces of rows and all SMs have the same number
 * of bytes: units of whole k do not deal out. So up and down are lines of octets of which each CTA has an equal share,
 * wherever that begins and ends in k. A thread has the same 8 channels of every so many rows: it copies 16 bytes of
 * each into its own places of a ring, and multiplies them by FMA: with one token tensor cores save nothing, and nobody
 * waits for another thread. Once or twice a share the threads of a CTA add up their sums of a unit.
 *
 * Sums go to memory as f32, which is all ones until then, as few's h is; whoever multiplies by h adds up what it needs
 * of up's. Outputs wait likewise for down's. Shares are drawn, of up and of down each: so what a CTA waits for is
 * always in the hands of one that has started.
 *
 * All that stands between the ids and the first copy, or between up and down, is waited for by the whole GPU, so it is
 * worked out before, and the code of both products is the same.
 */
#ifndef CUMOE_GEMV_CUH
#define CUMOE_GEMV_CUH

#include "few/gemv_sums.cuh"
#include "few/routing.cuh"
#include "few/table.cuh"

/* ---- shares ---- */

/* gridDim.x: none is left. The first goes to who starts first. */
DEVICE int draw_line(int32_t *tickets)
{
  const int ctas = gridDim.x, ticket = atomicAdd(tickets, 1) + 1; /* -1 at first */
  return ticket < ctas ? ctas - 1 - ticket : ctas;
}

/* Another share, mostly none. By all threads that stream. */
template <class SMEM> DEVICE int draw_again(const few_args &args, SMEM &smem, int down)
{
  bar_sync(1, GEMV_LANES);
  if (threadIdx.x == 0) smem.next[down] = smem.drawn[down] ? (int)gridDim.x : draw_line(args.protocol.tickets + down);
  bar_sync(1, GEMV_LANES);
  return smem.next[down];
}

/* ---- copies ---- */

/* A thread's copies of a share, and behind up's those of the CTA's first of down. */
template <class S> struct gemv_copier {
  using W = typename S::W;
  const few_args &args;
  gemv_smem<S> &smem;
  gemv_walk walk;
  bool down;
  const W *from;
  int64_t step;          /* elements from a row to the thread's next */
  int steps = 0, left;   /* of the run; of its rows, from this one on */
  int each;              /* rows from one to the next */
  uint32_t to = 0;       /* the next place */
  const uint64_t policy; /* of what is read once */

  DEVICE gemv_copier(const few_args &a, gemv_smem<S> &s) : args(a), smem(s), policy(evict_first_policy()) {}

  DEVICE void begin(bool of_down, int share)
  {
    down = of_down, steps = 0;
    walk.begin(smem.line[down], share);
#pragma unroll 1
    for (int i = 0; i < S::STAGES - 1; i++) next();
  }

  /* A thread's octet of the unit at hand, at row 0. */
  DEVICE const W *octet(const gemv_line &line, const gemv_run &run) const
  {
    const few_halves of = smem.table.weights[walk.now.active];
    const W *low = static_cast<const W *>(down ? smem.table.down[walk.now.active] : of.low),
            *high = static_cast<const W *>(of.high);
    const int first = walk.now.block * line.step;
    if (line.pairs) return (low < high ? low : high) + (2 * first + run.place) * 8;
    const bool up = run.place >= run.width;
    return (up ? high : low) + (first + run.place - (up ? run.width : 0)) * 8;
  }

  DEVICE void find()
  {
    if (!down && walk.over() && smem.share[1] < (int)gridDim.x) down = true, walk.begin(smem.line[1], smem.share[1]);
    if (walk.over()) return;
    const gemv_line &line = smem.line[down];
    const gemv_run run = walk.run(line);
    const int64_t stride = down ? args.down.b.k_stride : args.up.b.k_stride;
    from = octet(line, run) + (walk.now.row + run.first) * stride;
    step = run.each * stride, each = run.each;
    steps = gemv_quotient(run.rows + run.each - 1, run.each), left = run.there ? run.rows - run.first : 0;
    walk.advance(line, run.rows);
  }

  /* One step more: a cp.async group, also for none. */
  DEVICE void next()
  {
    if (steps == 0) find();
    if (steps > 0) {
      cp_async_cg_16(shared_address(&smem.stages[to][threadIdx.x]), from, left > 0 ? 16 : 0, policy);
      from += step, left -= each, steps--;
    }
    cp_async_commit_group();
    if (++to == S::STAGES) to = 0;
  }
};

/* ---- products ---- */

template <class W> DEVICE void add_product(float x, const uint4 &w, float (&sum)[8])
{
  const uint32_t pair[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 two = unpack_pair<W>(pair[i]);
    sum[2 * i] = fmaf(x, two.x, sum[2 * i]), sum[2 * i + 1] = fmaf(x, two.y, sum[2 * i + 1]);
  }
}

/* `at`: the place to read next. */
template <class S>
DEVICE void consume_share(const few_args &args, gemv_smem<S> &smem, int down, int share, gemv_copier<S> &copies,
                          uint32_t &at)
{
  const gemv_line &line = smem.line[down];
  gemv_walk walk;
  walk.begin(line, share);
  float sum[8] = {};
#pragma unroll 1
  while (!walk.over()) {
    const gemv_run run = walk.run(line);
    const int slot = walk.now.active * line.blocks + walk.now.block + share;
    bar_sync(1, GEMV_LANES); /* the row before, and the sums, are read */
    if (down)
      take_h<typename S::Y>(args, smem, run, walk.now.active, walk.now.row);
    else
      take_x<typename S::X>(args, smem, run, walk.now.row);
    bar_sync(1, GEMV_LANES);
    const float *x = smem.row + run.first;
#pragma unroll 1
    for (int i = gemv_quotient(run.rows + run.each - 1, run.each); i > 0; i--, x += run.each) {
      copies.next();
      cp_async_wait_group<S::STAGES - 1>();
      add_product<typename S::W>(*x, smem.stages[at][threadIdx.x], sum);
      if (++at == S::STAGES) at = 0;
    }
    if (!walk.advance(line, run.rows)) continue;
    store_sums(smem, run, slot_of(args, down, slot), sum);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = 0.f;
  }
}

/* ---- the grid ---- */

template <class S> DEVICE void stream_weights(const few_args &args, gemv_smem<S> &smem, int experts)
{
  gemv_copier<S> copies(args, smem);
  uint32_t at = 0;
  bool ahead = false; /* the share's first copies are on their way */
#pragma unroll 1
  for (int down = 0; down < 2; down++, ahead = true) {
    int share = smem.share[down];
#pragma unroll 1
    do {
      if (!ahead) cp_async_wait_group<0>(), copies.to = at, copies.begin(down, share);
      consume_share<S>(args, smem, down, share, copies, at);
      if (down && threadIdx.x == 0 && share < (int)gridDim.x) smem.done[share / 32] |= 1u << share % 32;
      share = draw_again(args, smem, down);
      ahead = false; /* those of down, too: they are copied again */
    } while (share < (int)gridDim.x);
  }
  wait_for(&smem.weights_ready, 0);
  if (token_total(args.out.tokens) == 0) return;
#pragma unroll 1
  for (int share = 0; share < (int)gridDim.x; share++) {
    if (!(smem.done[share / 32] >> share % 32 & 1)) continue;
    for (int i = share * WARP_SIZE; i < args.down.n; i += gridDim.x * WARP_SIZE)
      write_channels<S>(args, smem, experts, i);
  }
}

/* The routing warp; at the end it looks whether all shares are drawn, so that nobody else has to wait for that. */
template <class S> DEVICE void route_one(const few_args &args, gemv_smem<S> &smem)
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

/* How both products are dealt out. By all threads. */
template <class S> DEVICE void set_lines(const few_args &args, gemv_smem<S> &smem, int experts)
{
  const bool down = threadIdx.x >= GEMV_HALF;
  const int share = threadIdx.x - down * GEMV_HALF;
  if (share == 0)
    smem.line[down].set(down ? args.down : args.up, !down && args.up.gated, down ? GEMV_ROOM_H : GEMV_ROOM_X, experts);
  __syncthreads();
  if (share <= gridDim.x) smem.line[down].set_share(share);
}

template <class S> DEVICE void gemv_gemm(const few_args &args, gemv_smem<S> &smem)
{
  if (threadIdx.x == 0) mbarrier_init(&smem.weights_ready, WARP_SIZE);
  if (threadIdx.x < 2) smem.drawn[threadIdx.x] = 0;
  if (threadIdx.x < FEW_SHARES / 32) smem.done[threadIdx.x] = 0;
  set_lines<S>(args, smem, args.map.top_k); /* as it will be, mostly */
  wait_for_earlier_grids();
  if (warp_id() == S::ROUTING && lane_id() < 2) smem.share[lane_id()] = draw_line(args.protocol.tickets + lane_id());
  check_token_count(args.map.tokens, args.map.fault);
  if (args.protocol.weights) choose_experts<S>(args.gate, smem);
  const int experts = build_few_table<S>(args, smem);
  if (experts != args.map.top_k) {
    set_lines<S>(args, smem, experts);
    __syncthreads();
  }
  if (warp_id() == S::ROUTING)
    route_one<S>(args, smem);
  else
    stream_weights<S>(args, smem, experts);
}

#endif
