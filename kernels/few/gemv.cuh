/*
 * gemv: the experts of one token whose weights are [E, in, out], behind a router: few.cuh's one grid, another way.
 *
 * Memory gives such weights as fast as others if it is asked for long pieces of rows, and if all SMs have the same
 * number of bytes: 132 of them do not deal out units of whole k. So up and down are lines of octets (gemv_line.cuh) of
 * which each CTA has an equal share, wherever that begins and ends in k. A thread has the same 8 channels of every so
 * many rows: 16 bytes of each, which it copies itself into its own places of a ring and multiplies by FMA: with one
 * token tensor cores save nothing, and nobody waits for another thread. Two to three times a share the threads of a CTA
 * add up their sums of a unit.
 *
 * Sums go to memory as f32, which is all ones until then, as few's h is; whoever multiplies by h adds up what it needs
 * of up's sums. h is multiplied by its expert's weight, so that down is one product over all experts' k. Outputs are
 * written by warps that wait for the sums of all CTAs. Shares are drawn, of up and of down each: so what a CTA waits
 * for is always in the hands of one that has started.
 */
#ifndef CUMOE_GEMV_CUH
#define CUMOE_GEMV_CUH

#include "few/gemv_sums.cuh"
#include "few/routing.cuh"
#include "few/table.cuh"

template <class S> using gemv_smem = few_memory<typename S::layout>;

/* ---- shares ---- */

/* gridDim.x: none is left. The first goes to who starts first. */
DEVICE int draw_line(int32_t *tickets)
{
  const int ctas = gridDim.x, ticket = atomicAdd(tickets, 1) + 1; /* -1 at first */
  return ticket < ctas ? ctas - 1 - ticket : ctas;
}

/* Another share, mostly none. By all threads that stream. */
template <bool DOWN, class SMEM> DEVICE int draw_again(const few_args &args, SMEM &smem)
{
  bar_sync(1, GEMV_LANES);
  if (threadIdx.x == 0)
    smem.next[DOWN] = smem.drawn[DOWN] ? (int)gridDim.x : draw_line(args.protocol.tickets + DOWN);
  bar_sync(1, GEMV_LANES);
  return smem.next[DOWN];
}

/* ---- copies ---- */

/* A thread's copies of a share, and behind up's those of the CTA's first of down. */
template <class S> struct gemv_copier {
  using W = typename S::W;
  const few_args &args;
  gemv_smem<S> &smem;
  gemv_place now, end;
  bool down;
  const W *from;
  int64_t step;     /* elements from a row to the thread's next */
  int steps, left;  /* of the run; of the rows from this one on */
  int each;
  uint32_t to = 0;  /* the next place */
  uint64_t policy = evict_first_policy();

  DEVICE gemv_copier(const few_args &a, gemv_smem<S> &s) : args(a), smem(s) {}

  template <bool DOWN> DEVICE void begin(int share)
  {
    const gemv_walk<DOWN> walk(smem.line[DOWN], share);
    now = walk.now, end = walk.end, down = DOWN, steps = 0;
#pragma unroll 1
    for (int i = 0; i < S::STAGES - 1; i++) next();
  }

  DEVICE const W *base(int octet, const gemv_run &run, int row) const
  {
    if (down) {
      const int active = row / args.down.k;
      return static_cast<const W *>(smem.table.down[active]) + (row - active * args.down.k) * args.down.b.k_stride +
             (octet + run.place) * 8;
    }
    const few_halves of = smem.table.weights[now.matrix];
    const W *low = static_cast<const W *>(of.low), *high = static_cast<const W *>(of.high);
    const int64_t at = row * args.up.b.k_stride;
    if (!args.up.gated) return low + at + (octet + run.place) * 8;
    if (args.up.b.n_stride == 2) return (low < high ? low : high) + at + (2 * octet + run.place) * 8;
    return run.place < run.width ? low + at + (octet + run.place) * 8 : high + at + (octet + run.place - run.width) * 8;
  }

  template <bool DOWN> DEVICE void set_run(gemv_walk<DOWN> &walk)
  {
    const gemv_line &line = smem.line[DOWN];
    const gemv_run run = walk.run(args, line);
    from = base(now.block * line.step, run, now.row + run.first);
    step = run.each * (DOWN ? args.down : args.up).b.k_stride;
    each = run.each, steps = ceil_div(run.rows, run.each), left = run.there ? run.rows - run.first : 0;
    walk.advance(line, run.rows);
    now = walk.now;
  }

  DEVICE void find()
  {
    if (!down && now == end) {
      if (smem.share[1] >= (int)gridDim.x) return;
      const gemv_walk<true> walk(smem.line[1], smem.share[1]);
      now = walk.now, end = walk.end, down = true;
    }
    if (now == end) return;
    if (down) {
      gemv_walk<true> walk(now, end);
      set_run<true>(walk);
    } else {
      gemv_walk<false> walk(now, end);
      set_run<false>(walk);
    }
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

template <class W, bool DOWN> DEVICE void add_product(float x, const uint4 &w, float (&sum)[8])
{
  if (DOWN && __float_as_uint(x) == GEMV_NOTHING) return;
  const uint32_t pair[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 two = unpack_pair<W>(pair[i]);
    sum[2 * i] = fmaf(x, two.x, sum[2 * i]), sum[2 * i + 1] = fmaf(x, two.y, sum[2 * i + 1]);
  }
}

/* `at`: the place to read next. */
template <class S, bool DOWN>
DEVICE void consume_share(const few_args &args, gemv_smem<S> &smem, int share, gemv_copier<S> &copies, uint32_t &at)
{
  const gemv_line &line = smem.line[DOWN];
  gemv_walk<DOWN> walk(line, share);
  float sum[8] = {};
#pragma unroll 1
  while (!walk.over()) {
    const gemv_run run = walk.run(args, line);
    const int slot = walk.now.matrix * line.blocks + walk.now.block + share;
    bar_sync(1, GEMV_LANES); /* the row before, and the sums, are read */
    if constexpr (DOWN)
      take_h<typename S::Y>(args, smem, run, walk.now.row);
    else
      take_x<typename S::X>(args, smem, run, walk.now.row);
    bar_sync(1, GEMV_LANES);
    const float *x = smem.row + run.first;
#pragma unroll 1
    for (int i = ceil_div(run.rows, run.each); i > 0; i--, x += run.each) {
      copies.next();
      cp_async_wait_group<S::STAGES - 1>();
      add_product<typename S::W, DOWN>(*x, smem.stages[at][threadIdx.x], sum);
      if (++at == S::STAGES) at = 0;
    }
    if (!walk.advance(line, run.rows)) continue;
    store_sums<DOWN>(args, smem, run, slot, sum);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = 0.f;
  }
}

/* ---- the grid ---- */

template <class S> DEVICE void stream_weights(const few_args &args, gemv_smem<S> &smem, int experts)
{
  gemv_copier<S> copies(args, smem);
  uint32_t at = 0;
  for (int share = smem.share[0];;) {
    copies.template begin<false>(share);
    consume_share<S, false>(args, smem, share, copies, at);
    share = draw_again<false>(args, smem);
    if (share == gridDim.x) break;
    cp_async_wait_group<0>(), copies.to = at; /* what was copied ahead is copied again */
  }
  wait_for(&smem.weights_ready, 0);
  for (int share = smem.share[1]; share < (int)gridDim.x;) {
    consume_share<S, true>(args, smem, share, copies, at);
    if (threadIdx.x == 0) smem.done[share / 32] |= 1u << share % 32;
    share = draw_again<true>(args, smem);
    if (share < (int)gridDim.x) cp_async_wait_group<0>(), copies.to = at, copies.template begin<true>(share);
  }
  if (token_total(args.out.tokens) == 0) return;
  bar_sync(1, GEMV_LANES);
#pragma unroll 1
  for (int share = 0; share < (int)gridDim.x; share++) {
    if (!(smem.done[share / 32] >> share % 32 & 1)) continue;
    for (int i = share + warp_id() * gridDim.x; i * WARP_SIZE < args.down.n; i += GEMV_WARPS * gridDim.x)
      write_channels<typename S::X>(args, smem, experts, i * WARP_SIZE);
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

template <class S> DEVICE void gemv_gemm(const few_args &args, gemv_smem<S> &smem)
{
  if (threadIdx.x == 0) mbarrier_init(&smem.weights_ready, WARP_SIZE);
  if (threadIdx.x < 2) smem.drawn[threadIdx.x] = 0;
  if (threadIdx.x < sizeof smem.done / sizeof *smem.done) smem.done[threadIdx.x] = 0;
  wait_for_earlier_grids();
  if (warp_id() == S::ROUTING && lane_id() < 2) smem.share[lane_id()] = draw_line(args.protocol.tickets + lane_id());
  check_token_count(args.map.tokens, args.map.fault);
  if (args.protocol.weights) choose_experts<S>(args.gate, smem);
  const int experts = build_few_table<S>(args, smem);
  if (threadIdx.x == 0) {
    smem.line[0].set(experts, args.up.k, args.up.n / 8, gemv_octets<false>(args));
    smem.line[1].set(1, experts * args.down.k, args.down.n / 8, gemv_octets<true>(args));
  }
  __syncthreads();
  if (warp_id() == S::ROUTING)
    route_one<S>(args, smem);
  else
    stream_weights<S>(args, smem, experts);
}

#endif
