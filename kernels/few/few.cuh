/*
 * FORM_ring: the experts of up to FEW_TOKENS tokens, from ids or logits to the layer's output. What counts besides the weights'
 * way from memory is how often the whole GPU waits for something small, so there is no map and no combine; and where the
 * router has cleared memory for it, few_up is the gate, up and down in one grid. Else few_down is a second grid, whose CTAs ask
 * for their first weights as soon as few_up has left their SM.
 *
 * Weights are the 16-row operand of mma.sync (8 gate and the same 8 up channels, or 16 channels), the tokens themselves the
 * other: a column each of those that have chosen the expert at hand, eight at once (few_table.cuh). The CTAs take (expert,
 * channel tile) units of up in turn, then each a few channels of down for all experts, so that it has all that their outputs are
 * made of.
 *
 * Slices of 16 rows x 128 k of the CTA's units are dealt in turn to its warps, each of which has its own ring of stages in
 * shared memory, filled by its own copies: no warp waits for another. What they make of a unit (all of k) goes to shared
 * memory, where one more warp, the finisher, adds it up and finishes it while they go on; with the clerk and the helpers it then
 * sums y over a token's slots. Sums do not depend on which warp had which slice of a unit, hence not on other tokens.
 *
 * In one grid, down's weights follow up's in the rings without a gap, and h tells by itself whether it is there: it is all ones
 * before. Who finds that in a slice's columns reads them again until they have changed; no fence, no counter. What a CTA
 * waits for is always in the hands of one that has started: its part of up is claimed (claim_place), not given.
 *
 * Within 32 elements of k both operands take k in another order, as in thin.cuh.
 */
#ifndef CUMOE_FEW_CUH
#define CUMOE_FEW_CUH

#include "gemm/epilogue.cuh"
#include "few/few_table.cuh"
#include "device/pipeline.cuh"

template <class S> DEVICE const gemm_args &gemm_of(const few_args &args)
{
  return S::UP ? args.up : args.down;
}

/* ---- units ---- */

/* `count` things dealt to the grid. */
DEVICE few_range part_of_cta(int count)
{
  const int each = count / (int)gridDim.x, more = count - each * (int)gridDim.x, cta = blockIdx.x;
  return {cta * each + min(cta, more), each + (cta < more)};
}

/* The CTA's units, one after the other: 16 weight rows of an active expert, which are one eight of channels, gate and up, or
 * two eights, or one if that is all. In up the grid takes units in turn, so that experts are done in their order; in down a
 * CTA goes expert by expert of some channels. */
template <class S> struct few_units {
  int active, eight, eights, left; /* left: units from this one on; in up also other CTAs' */
  int experts, end, step, tiles;   /* of all; eights end there */

  /* Of up, whose units go to places in turn: the last place has the fewest, and gridDim.x none. */
  DEVICE few_units(const gemm_args &g, int active_experts, int place) : active(0), experts(active_experts)
  {
    end = g.n / 8, step = g.gated ? 1 : 2, tiles = g.gated ? end : (end + 1) / 2;
    eight = place * step, left = place < gridDim.x ? experts * tiles - place : 0;
    settle();
  }

  /* Of down. */
  DEVICE few_units(few_range own, int active_experts) : active(0), experts(active_experts)
  {
    eight = own.first, end = own.first + own.count, left = experts * ceil_div(own.count, S::EIGHTS);
    step = S::EIGHTS, tiles = 0;
    eights = min(step, end - eight);
  }

  DEVICE void settle()
  {
    while (eight >= tiles * step && left > 0) eight -= tiles * step, active++;
    eights = min(step, end - eight);
  }

  DEVICE void next()
  {
    if (S::UP) {
      left -= gridDim.x, eight += (int)gridDim.x * step;
      settle();
    } else {
      left--, active++;
      if (active == experts) active = 0, eight += step;
      eights = min(step, end - eight);
    }
  }

  /* In down one eight comes in slices of 8 rows and twice the k, so that as much is under way as of two. */
  DEVICE bool wide() const { return S::WIDE && eights == 1; }
};

/* ---- consumers ---- */

/* Chunks of 16 bytes; those of odd rows are turned, so that two rows do not meet in a bank. */
DEVICE int few_chunk(int row, int chunk, int chunks)
{
  return row * chunks + (chunk ^ (row & 1) << 2);
}

/* By a warp: 32 lanes bring 512 bytes of a row. */
template <class S>
DEVICE void copy_wide_weights(const gemm_args &g, const few_units<S> &unit, few_halves of, int slice,
                              few_stage<S> &stage)
{
  using T = typename S::T;
  const int k = slice * 2 * S::BK + lane_id() * 8;
  const T *row = static_cast<const T *>(of.low) + unit.eight * 8 * g.b.n_stride + k;
  const uint32_t to = shared_address(stage.weights);
#pragma unroll
  for (int i = 0; i < 8; i++)
    cp_async_cg_16(to + few_chunk(i, lane_id(), WARP_SIZE) * 16, row + i * g.b.n_stride, k < g.k ? 16 : 0,
                   evict_first_policy());
}

/* By a warp, as below: 16 lanes bring 256 bytes of a row. */
template <class S>
DEVICE void copy_weights(const gemm_args &g, const few_units<S> &unit, few_halves of, int slice, few_stage<S> &stage)
{
  using T = typename S::T;
  if (unit.wide()) return copy_wide_weights(g, unit, of, slice, stage);
  const int k0 = slice * S::BK;
  const int row = lane_id() / S::CHUNKS, chunk = lane_id() % S::CHUNKS, k = k0 + chunk * 8;
  const bool gated = S::UP && g.gated;
  const int64_t at = (unit.eight * 8 + row) * g.b.n_stride + k, step = S::COPY_ROWS * g.b.n_stride;
  const T *low = static_cast<const T *>(of.low) + at;
  const T *high = static_cast<const T *>(of.high) + (gated ? at : at + 8 * g.b.n_stride);
  const int low_bytes = k < g.k ? 16 : 0, high_bytes = gated || unit.eights > 1 ? low_bytes : 0;
  const uint32_t to = shared_address(stage.weights) + few_chunk(row, chunk, S::CHUNKS) * 16;
#pragma unroll
  for (int i = 0; i < S::COPIES / 2; i++) {
    cp_async_cg_16(to + i * WARP_SIZE * 16, low + i * step, low_bytes, evict_first_policy());
    cp_async_cg_16(to + (i + S::COPIES / 2) * WARP_SIZE * 16, high + i * step, high_bytes, evict_first_policy());
  }
}

/* Of x, or of h. */
template <class S, int CHUNKS>
DEVICE void copy_column_chunks(const gemm_args &g, const few_column (&of)[FEW_COLUMNS], int slice, few_stage<S> &stage)
{
  const int chunk = lane_id() % CHUNKS, k = (slice * CHUNKS + chunk) * 8;
  const uint4 all = *reinterpret_cast<const uint4 *>(of); /* by one load, ahead of the copies */
#pragma unroll
  for (int i = 0; i < S::COLUMNS; i += WARP_SIZE / CHUNKS) {
    const int c = i + lane_id() / CHUNKS;
    if (c >= S::COLUMNS) continue;
    const uint32_t two = i < 2 ? all.x : i < 4 ? all.y : i < 6 ? all.z : all.w;
    const few_column column = (few_column)(c % 2 ? two >> 16 : two);
    const int row = column < 0 ? 0 : S::UP ? token_of(column) : pair_of(column);
    cp_async_cg_16(shared_address(stage.columns) + few_chunk(c, chunk, CHUNKS) * 16,
                   static_cast<const typename S::T *>(g.a) + row * g.a_ld + k, column >= 0 && k < g.k ? 16 : 0);
  }
}

template <class S>
DEVICE void copy_columns(const gemm_args &g, const few_units<S> &unit, const few_column (&of)[FEW_COLUMNS], int slice,
                         few_stage<S> &stage)
{
  if (unit.wide())
    copy_column_chunks<S, 2 * S::CHUNKS>(g, of, slice, stage);
  else
    copy_column_chunks<S, S::CHUNKS>(g, of, slice, stage);
}

/* What a lane feeds of the columns: of column l/4. */
template <class S, int CHUNKS> DEVICE void load_columns(const few_stage<S> &stage, uint4 (&x)[CHUNKS / 4])
{
  const uint4 *columns = reinterpret_cast<const uint4 *>(stage.columns);
  const int row = lane_id() / 4;
#pragma unroll
  for (int i = 0; i < CHUNKS / 4; i++)
    x[i] = row < S::COLUMNS ? columns[few_chunk(row, i * 4 + lane_id() % 4, CHUNKS)] : make_uint4(0, 0, 0, 0);
}

/* Lane l feeds weight row l/4; the other eight are zero. */
template <class S>
DEVICE void multiply_wide_slice(const few_stage<S> &stage, const uint4 (&x)[2 * S::GROUPS], float (&sum)[2][4])
{
  const uint4 *weights = reinterpret_cast<const uint4 *>(stage.weights);
#pragma unroll
  for (int i = 0; i < 2 * S::GROUPS; i++) {
    const uint4 w = weights[few_chunk(lane_id() / 4, i * 4 + lane_id() % 4, 2 * S::CHUNKS)];
    mma_m16n8k16<typename S::T>(sum[0], {w.x, 0, w.y, 0}, {x[i].x, x[i].y});
    mma_m16n8k16<typename S::T>(sum[1], {w.z, 0, w.w, 0}, {x[i].z, x[i].w});
  }
}

/* Lane l feeds weight rows l/4 and l/4 + 8. */
template <class S>
DEVICE void multiply_slice(const few_stage<S> &stage, const uint4 (&x)[S::GROUPS], float (&sum)[2][4])
{
  const uint4 *weights = reinterpret_cast<const uint4 *>(stage.weights);
#pragma unroll
  for (int i = 0; i < S::GROUPS; i++) {
    const int at = few_chunk(lane_id() / 4, i * 4 + lane_id() % 4, S::CHUNKS);
    const uint4 w0 = weights[at], w1 = weights[at + 8 * S::CHUNKS];
    mma_m16n8k16<typename S::T>(sum[0], {w0.x, w1.x, w0.y, w1.y}, {x[i].x, x[i].y});
    mma_m16n8k16<typename S::T>(sum[1], {w0.z, w1.z, w0.w, w1.w}, {x[i].z, x[i].w});
  }
}

/* ---- h that is still being made ---- */

/* h is all ones before it is made, which no rounding gives: the NaN of those has another sign. */
template <int N> DEVICE bool is_unmade(const uint4 (&x)[N])
{
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < N; i++) most = __vimax3_u16x2(__vimax3_u16x2(most, x[i].x, x[i].y), x[i].z, x[i].w);
  return most >= 0xffff0000u || (most & 0xffff) == 0xffff;
}

/* A slice's columns once more, as often as it takes. By a warp. */
template <class S, int CHUNKS>
DEVICE void await_columns(const gemm_args &g, const few_column (&of)[FEW_COLUMNS], int slice, few_stage<S> &stage)
{
  const int chunk = lane_id() % CHUNKS, k = (slice * CHUNKS + chunk) * 8;
#pragma unroll 1
  for (int c = lane_id() / CHUNKS; c < S::COLUMNS; c += WARP_SIZE / CHUNKS) {
    if (of[c] < 0 || k >= g.k) continue;
    uint4 h[1];
    do h[0] = load_relaxed(static_cast<const typename S::T *>(g.a) + pair_of(of[c]) * g.a_ld + k);
    while (is_unmade(h));
    reinterpret_cast<uint4 *>(stage.columns)[few_chunk(c, chunk, CHUNKS)] = h[0];
  }
  __syncwarp();
}

/* made: h is known to be. */
template <class S, int CHUNKS>
DEVICE void take_columns(const gemm_args &g, bool made, const few_column (&of)[FEW_COLUMNS], int slice,
                         few_stage<S> &stage, uint4 (&x)[CHUNKS / 4])
{
  load_columns<S, CHUNKS>(stage, x);
  if (S::UP || made || !__any_sync(ALL_LANES, is_unmade(x))) return;
  __syncwarp();
  await_columns<S, CHUNKS>(g, of, slice, stage);
  load_columns<S, CHUNKS>(stage, x);
}

/* Where a warp is: its slice of a unit, `slice` >= slices if it has no more of that one. */
template <class S> struct few_cursor {
  few_units<S> unit;
  int narrow, wide, slice; /* slices of a unit of either kind; the next */

  DEVICE few_cursor(const gemm_args &g, few_units<S> first)
      : unit(first), narrow(ceil_div(g.k, S::BK)), wide(ceil_div(g.k, 2 * S::BK)), slice(warp_id())
  {
  }
  DEVICE int slices() const { return unit.wide() ? wide : narrow; }
  DEVICE bool behind() const { return slice >= slices() && unit.left > 0; }
  DEVICE void next_unit() { slice -= slices(), unit.next(); }
  /* Whether there is one more slice. */
  DEVICE bool find()
  {
    while (behind()) next_unit();
    return unit.left > 0;
  }
};

/* The copies of a consumer warp: a group for each slice, be it empty. */
template <class L> struct few_copier {
  using U = few_part<L, true>;
  using D = few_part<L, false>;
  const few_args &args;
  few_memory<L> &smem;
  few_cursor<U> up;
  few_cursor<D> down;
  ring_place<L::STAGES> to;

  DEVICE few_copier(const few_args &a, few_memory<L> &s, int experts, int place)
      : args(a), smem(s), up(a.up, {a.up, experts, place}), down(a.down, {s.own, experts})
  {
  }

  DEVICE few_stage_of<L> &stage() const { return smem.ring[warp_id()][to.stage]; }
  DEVICE void advance()
  {
    cp_async_commit_group();
    to.advance();
  }

  DEVICE void down_weights()
  {
    const void *of = smem.table.down[down.unit.active];
    copy_weights<D>(args.down, down.unit, {of, of}, down.slice, stage());
  }
  DEVICE void down_columns()
  {
    copy_columns<D>(args.down, down.unit, smem.table.column[down.unit.active], down.slice, stage());
  }
  DEVICE void next_of_down()
  {
    if (down.find()) down_weights(), down_columns();
    down.slice += L::CONSUMERS;
    advance();
  }
  /* When there is none left, down's, where the grid does both: with what there is of h. */
  DEVICE void next_of_up()
  {
    if (!up.find() && args.protocol.tickets) return next_of_down();
    if (up.unit.left > 0) {
      const int active = up.unit.active;
      copy_weights<U>(args.up, up.unit, smem.table.weights[active], up.slice, stage());
      copy_columns<U>(args.up, up.unit, smem.table.column[active], up.slice, stage());
      up.slice += L::CONSUMERS;
    }
    advance();
  }
};

/* A warp's part of a unit that it has no more slices of. `first`: its first slice of that unit, below CONSUMERS, which names
 * the sum. Every lane arrives for itself: racecheck knows no other order. */
template <class S>
DEVICE void hand_over(few_smem<S> &smem, ring_place<S::BUFFERS> &buffer, int first, const float (&sum)[2][4])
{
  wait_for(&smem.taken[buffer.stage], buffer.phase ^ 1);
  smem.partial[buffer.stage][first][lane_id()] =
      make_float4(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1], sum[0][2] + sum[1][2], sum[0][3] + sum[1][3]);
  mbarrier_arrive(&smem.summed[buffer.stage]);
  buffer.advance();
}

/* `here` is the slice in that stage. */
template <class S>
DEVICE void multiply_stage(const few_args &args, few_smem<S> &smem, const few_cursor<S> &here, int stage,
                           float (&sum)[2][4])
{
  const gemm_args &g = gemm_of<S>(args);
  const few_column(&of)[FEW_COLUMNS] = smem.table.column[here.unit.active];
  few_stage<S> &at = smem.ring[warp_id()][stage];
  if (here.unit.wide()) {
    uint4 x[2 * S::GROUPS];
    take_columns<S, 2 * S::CHUNKS>(g, !args.protocol.tickets, of, here.slice, at, x);
    multiply_wide_slice<S>(at, x, sum);
  } else {
    uint4 x[S::GROUPS];
    take_columns<S, S::CHUNKS>(g, !args.protocol.tickets, of, here.slice, at, x);
    multiply_slice<S>(at, x, sum);
  }
}

/* The warp's slices from `here` on, while next() asks for those to come. */
template <class S, class NEXT>
DEVICE void consume_units(const few_args &args, few_smem<S> &smem, few_cursor<S> here, ring_place<S::STAGES> &stage,
                          ring_place<S::BUFFERS> &buffer, NEXT next)
{
#pragma unroll 1
  for (; here.unit.left > 0; here.next_unit()) {
    const int first = here.slice;
    float sum[2][4] = {};
#pragma unroll 1
    for (; here.slice < here.slices(); here.slice += S::CONSUMERS, stage.advance()) {
      cp_async_wait_group<S::STAGES - 2>();
      __syncwarp(); /* all lanes' copies are there, and the stage before is read */
      next();
      multiply_stage<S>(args, smem, here, stage.stage, sum);
    }
    hand_over<S>(smem, buffer, first, sum);
  }
}

/* At the end, where the grid does both, all stages but one are down's first, or under way. */
template <class L>
DEVICE void consume_up(const few_args &args, few_memory<L> &smem, int experts, few_copier<L> &copies,
                       ring_place<L::STAGES> &stage, ring_place<L::BUFFERS> &buffer)
{
  using U = few_part<L, true>;
  uint32_t phase = 0;
  while (true) {
    const few_cursor<U> here = copies.up;
#pragma unroll 1
    for (int i = 0; i < L::STAGES - 1; i++) copies.next_of_up();
    consume_units<U>(args, smem, here, stage, buffer, [&] { copies.next_of_up(); });
    if (!args.protocol.tickets) return;
    wait_for(&smem.dealt, phase);
    const int place = smem.place[1];
    if (place == gridDim.x) return;
    phase ^= 1;
    cp_async_wait_group<0>(); /* what was asked for ahead is asked for again */
    __syncwarp();
    copies.up = few_cursor<U>(args.up, {args.up, experts, place});
    copies.down = few_cursor<few_part<L, false>>(args.down, {smem.own, experts});
    copies.to = stage;
  }
}

/* All stages but one are under way: their weights are asked for before h is there, all in one group. */
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
  using D = few_part<L, false>;
  ring_place<L::STAGES> stage;
  ring_place<L::BUFFERS> buffer;
  few_copier<L> copies(args, smem, experts, S::UP ? smem.place[0] : (int)gridDim.x);
  if constexpr (S::UP) {
    consume_up<L>(args, smem, experts, copies, stage, buffer);
    if (!args.protocol.tickets) return;
  } else {
    begin_down<L>(copies);
  }
  const few_cursor<D> here(args.down, {smem.own, experts});
  consume_units<D>(args, smem, here, stage, buffer, [&] { copies.next_of_down(); });
}

/* ---- finisher: one warp ---- */

/* The sum of the warps' parts, in the order of k. Lane l: [j + 2h] is weight row l/4 + 8h, token 2 (l%4) + j. */
template <class S> DEVICE void take_sums(few_smem<S> &smem, ring_place<S::BUFFERS> &buffer, float (&sum)[4])
{
  wait_for(&smem.summed[buffer.stage], buffer.phase);
#pragma unroll
  for (int w = 0; w < S::CONSUMERS; w++) {
    const float4 part = smem.partial[buffer.stage][w][lane_id()];
    sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
  }
  mbarrier_arrive(&smem.taken[buffer.stage]);
  buffer.advance();
}

DEVICE float few_bias(const expert_matrix &b, int half, int expert, int channel)
{
  if (!b.bias[half]) return 0.f;
  return load_any(b.bias[half], expert * b.bias_expert_stride + channel * b.bias_n_stride, b.bias_dtype);
}

/* Of a unit: the outputs of lane l are channels l/4 (gated) or l/4 and l/4 + 8, of two tokens. store(channel of the unit,
 * row, value). */
template <class S, class STORE>
DEVICE void finish_unit(const few_args &args, few_smem<S> &smem, const few_units<S> &unit,
                        ring_place<S::BUFFERS> &buffer, STORE store)
{
  const gemm_args &g = gemm_of<S>(args);
  const bool gated = S::UP && g.gated;
  const int expert = smem.table.expert[unit.active], local = lane_id() / 4, channel = unit.eight * 8 + local;
  const few_column *columns = smem.table.column[unit.active] + lane_id() % 4 * 2;
  const bool second = unit.eights > 1;
  const float low_bias = few_bias(g.b, 0, expert, channel);
  const float high_bias = gated    ? few_bias(g.b, 1, expert, channel)
                          : second ? few_bias(g.b, 0, expert, channel + 8)
                                   : 0.f;
  float sum[4] = {};
  take_sums<S>(smem, buffer, sum);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    if (columns[j] < 0) continue;
    const int row = pair_of(columns[j]);
    float low[1] = {sum[j] + low_bias}, high[1] = {sum[j + 2] + high_bias};
    if (S::UP) activate<1>(g, low, high);
    store(local, row, from_f32<typename S::T>(low[0]));
    if (gated || !second) continue;
    if (S::UP) activate<1>(g, high, low);
    store(local + 8, row, from_f32<typename S::T>(high[0]));
  }
}

/* A token's sum over its slots, in their order; one of weight 0 adds nothing, whatever it holds. IDENTITY: some may add x. */
template <class S, bool IDENTITY>
DEVICE float sum_slots(const combine_args &out, const few_smem<S> &smem, int token, int local, int channel)
{
  using T = typename S::T;
  float sum = 0;
#pragma unroll 4
  for (int pair = token * out.top_k; pair < (token + 1) * out.top_k; pair++) {
    const float weight = smem.table.weight[pair];
    float value = to_f32(smem.y[pair][local]);
    if (IDENTITY && weight != 0 && smem.table.to[pair] == ROW_IDENTITY)
      value = to_f32(static_cast<const T *>(out.x)[token * out.x_ld + channel]);
    if (weight != 0) sum = fmaf(weight, value, sum);
  }
  if (!out.shared) return sum;
  const float weight = shared_weight(out, token);
  if (weight == 0) return sum;
  return fmaf(weight, to_f32(static_cast<const T *>(out.shared)[token * out.shared_ld + channel]), sum);
}

template <class T> DEVICE void store_any(void *base, int64_t index, float value, int dtype)
{
  if (dtype == DT_F32)
    static_cast<float *>(base)[index] = value;
  else
    static_cast<T *>(base)[index] = from_f32<T>(value);
}

/* A writer's part of 8 or 16 channels, when y of all experts is there. The residual may be `out` itself. */
template <class S> DEVICE void store_outputs(const few_args &args, const few_smem<S> &smem, int eight, int eights)
{
  const combine_args &out = args.out;
  const int width = eights * 8, local = lane_id() % width, channel = eight * 8 + local,
            tokens = (int)token_total(out.tokens), at_once = WARP_SIZE / width;
  for (int token = (warp_id() - S::FINISHER) * at_once + lane_id() / width; token < tokens;
       token += S::WRITERS * at_once) {
    const float sum = args.map.identity_experts > 0 ? sum_slots<S, true>(out, smem, token, local, channel)
                                                    : sum_slots<S, false>(out, smem, token, local, channel);
    float value = out.out_scale * sum;
    if (out.residual)
      value = fmaf(out.out_scale, sum, load_any(out.residual, token * out.residual_ld + channel, out.out_dtype));
    store_any<typename S::T>(out.out, token * out.out_ld + channel, value, out.out_dtype);
  }
}

/* All channels of the CTA, by a writer; before each round, make() by whoever makes y. */
template <class S, class MAKE> DEVICE void write_outputs(const few_args &args, few_smem<S> &smem, MAKE make)
{
  const int end = smem.own.first + smem.own.count;
  uint32_t phase = 0;
#pragma unroll 1
  for (int eight = smem.own.first; eight < end; eight += S::EIGHTS, phase ^= 1) {
    make(eight > smem.own.first, phase ^ 1);
    wait_for(&smem.ready, phase);
    wait_for(&smem.weighed, 0);
    store_outputs<S>(args, smem, eight, min((int)S::EIGHTS, end - eight));
    mbarrier_arrive(&smem.stored);
  }
}

/* What the CTA does of up next: claimed, so that what a CTA waits for is never left to one that has not started. Each takes
 * one place when it starts; who is done takes another if some are left. */
DEVICE int claim_place(const few_args &args)
{
  const int ctas = gridDim.x, claimed = atomicAdd(args.protocol.tickets, 1) + 1; /* -1 at first */
  return claimed < ctas ? ctas - 1 - claimed : ctas;
}

/* The finisher's; the consumers are told when it is over, or of another place. */
template <class S> struct few_dealer {
  const few_args &args;
  few_smem<S> &smem;
  bool over; /* no place is left, and they know */

  DEVICE void tell(int place)
  {
    if (lane_id() == 0) {
      smem.place[1] = place;
      mbarrier_arrive(&smem.dealt);
    }
    over = place == gridDim.x;
  }

  DEVICE void look()
  {
    if (over) return;
    const int last = __shfl_sync(ALL_LANES, load_relaxed(args.protocol.tickets), 0);
    if (last >= (int)gridDim.x - 1) tell(gridDim.x);
  }

  DEVICE int claim()
  {
    look();
    return over ? gridDim.x : __shfl_sync(ALL_LANES, lane_id() == 0 ? claim_place(args) : 0, 0);
  }
};

/* A CTA's units of up. */
template <class S>
DEVICE void finish_up(const few_args &args, few_smem<S> &smem, int experts, int place, few_dealer<S> &dealer,
                      ring_place<S::BUFFERS> &buffer)
{
  using T = typename S::T;
  few_units<S> unit(args.up, experts, place);
#pragma unroll 1
  for (; unit.left > 0; unit.next()) {
    finish_unit<S>(args, smem, unit, buffer, [&](int local, int row, T value) {
      store_relaxed(static_cast<T *>(args.up.c) + row * args.up.c_ld + unit.eight * 8 + local, value);
    });
    dealer.look(); /* all consumers have part in a unit, so they know of this place by now */
  }
}

/* What a pair's note says, as soon as it is written: by a CTA that has started, as h was. */
DEVICE uint64_t await_note(const uint64_t *note)
{
  uint64_t value;
  do value = load_relaxed(note);
  while (value == FEW_NOT_WRITTEN);
  return value;
}

/* Of pairs, for the outputs; nothing can come of a dropped pair. By the clerk, as each look is a way to L2. */
template <class S> DEVICE void take_weights(const few_args &args, few_smem<S> &smem)
{
  few_table<S::PAIRS> &t = smem.table;
  const int top_k = args.map.top_k, pairs = (int)token_total(args.map.tokens) * top_k;
  for (int pair = lane_id(); pair < pairs; pair += WARP_SIZE) {
    const int token = pair / top_k;
    const float weight =
        args.protocol.weights
            ? __uint_as_float((uint32_t)await_note(args.protocol.weights + pair))
            : load_settled(args.out.pair_weights + token * args.out.pair_weights_ld + (pair - token * top_k));
    t.weight[pair] = t.to[pair] >= 0 || (t.to[pair] == ROW_IDENTITY && args.out.x) ? weight : 0.f;
  }
  mbarrier_arrive(&smem.weighed);
}

template <class S>
DEVICE void finish_down(const few_args &args, few_smem<S> &smem, int experts, ring_place<S::BUFFERS> &buffer)
{
  few_units<S> unit(smem.own, experts);
  write_outputs<S>(args, smem, [&](bool again, uint32_t phase) {
    if (again) wait_for(&smem.stored, phase);
#pragma unroll 1
    for (int i = 0; i < experts; i++, unit.next())
      finish_unit<S>(args, smem, unit, buffer,
                     [&](int local, int row, typename S::T value) { smem.y[row][local] = value; });
    mbarrier_arrive(&smem.ready);
  });
}

template <class S> DEVICE void few_finish(const few_args &args, few_smem<S> &smem, int experts)
{
  ring_place<S::BUFFERS> buffer;
  if constexpr (S::UP) {
    few_dealer<S> dealer = {args, smem, !args.protocol.tickets};
    int place = smem.place[0];
    finish_up<S>(args, smem, experts, place, dealer, buffer);
    if (!args.protocol.tickets) return;
    do {
      place = dealer.claim();
      if (args.protocol.weights && place < gridDim.x) write_routing<S>(args, place, smem.scratch[1]);
      if (place < gridDim.x && few_units<S>(args.up, experts, place).left <= 0) continue;
      if (!dealer.over) dealer.tell(place);
      finish_up<S>(args, smem, experts, place, dealer, buffer);
    } while (place < gridDim.x);
  } else {
    wait_for_earlier_grids();
  }
  finish_down<few_part<typename S::layout, false>>(args, smem, experts, buffer);
}

/* ---- clerk: one warp; helpers ---- */

template <class S> DEVICE void few_write(const few_args &args, few_smem<S> &smem)
{
  const bool clerk = warp_id() == S::CLERK;
  if (S::UP && clerk && args.protocol.weights && smem.place[0] < gridDim.x)
    write_routing<S>(args, smem.place[0], smem.scratch[0]);
  if (!S::UP) wait_for_earlier_grids();
  if (!S::UP || args.protocol.tickets) {
    if (clerk) take_weights<S>(args, smem);
    write_outputs<S>(args, smem, [](bool, uint32_t) {});
  }
  if (S::UP && clerk) report_counts<S>(args.map, smem.table);
}

/* ---- kernel ---- */

/* Before the wait: what does not depend on earlier grids. */
template <class S> DEVICE void prepare(const few_args &args, few_smem<S> &smem)
{
  if (threadIdx.x < S::BUFFERS) {
    mbarrier_init(&smem.summed[threadIdx.x], S::CONSUMERS * WARP_SIZE);
    mbarrier_init(&smem.taken[threadIdx.x], WARP_SIZE);
  }
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.weighed, WARP_SIZE);
    mbarrier_init(&smem.ready, WARP_SIZE);
    mbarrier_init(&smem.stored, S::WRITERS * WARP_SIZE);
    mbarrier_init(&smem.dealt, 1);
  }
  if (threadIdx.x == S::FINISHER * WARP_SIZE) smem.own = part_of_cta(args.down.n / 8);
}

template <class S> DEVICE void few_gemm(const few_args &args, few_smem<S> &smem)
{
  prepare<S>(args, smem);
  if (S::UP) {
    wait_for_earlier_grids();
    if (threadIdx.x == S::CLERK * WARP_SIZE) smem.place[0] = args.protocol.tickets ? claim_place(args) : blockIdx.x;
    check_token_count(args.map.tokens, args.map.fault);
    if (args.protocol.weights) choose_experts<S>(args.gate, smem);
  }
  const int experts = build_few_table<S>(args, smem);
  if (warp_id() < S::CONSUMERS) {
    few_consume<S>(args, smem, experts);
  } else if (warp_id() == S::FINISHER) {
    few_finish<S>(args, smem, experts);
  } else {
    few_write<S>(args, smem);
  }
}

#endif
