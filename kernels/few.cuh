/*
 * FORM_ring: the experts of up to FEW_TOKENS tokens in two grids, few_up and few_down, from ids or logits to the layer's output.
 * What counts besides the weights' way from memory is how often the whole GPU waits for something small, so there is no map, no
 * combine, and a CTA of down asks for its first weights as soon as up has left its SM. Where the router has cleared words for
 * it, every CTA of up is the gate for itself, and down waits for the h of an expert rather than for up's end: counts say how
 * much of it is made. Down starts when all of up runs, so that what it waits for comes.
 *
 * Weights are the 16-row operand of mma.sync (8 gate and the same 8 up channels, or 16 channels), the tokens themselves the
 * other: column t is token t, whatever expert is at hand, zero if it has not chosen it. The CTAs of up take (expert, channel
 * tile) units in turn; a CTA of down takes a few channels of all experts, so that it has all that their outputs are made of.
 *
 * Slices of 16 rows x 128 k of the CTA's units are dealt in turn to its warps, each of which has its own ring of stages in
 * shared memory, filled by its own copies: no warp waits for another. What they make of a unit (all of k) goes to shared
 * memory, where one more warp adds it up and finishes it while they go on. Sums do not depend on which warp had which slice of
 * a unit, hence not on other tokens.
 *
 * Within 32 elements of k both operands take k in another order, as in thin.cuh.
 */
#ifndef CUMOE_FEW_CUH
#define CUMOE_FEW_CUH

#include "epilogue.cuh"
#include "gate.cuh"
#include "pairs.cuh"
#include "ring.cuh"

template <class T_, bool UP_, int TOKENS_, int BK_, int STAGES_, int WARPS> struct few_shape {
  using T = T_;
  static constexpr bool UP = UP_, WIDE = !UP_; /* WIDE: has slices of 8 rows, too */
  static constexpr int TOKENS = TOKENS_, PAIRS = TOKENS == 1 ? (int)MAX_TOP_K : (int)FEW_PAIRS; /* at most */
  static constexpr int BK = BK_, STAGES = STAGES_, ROWS = 16, WEIGHTS = ROWS * BK;              /* elements */
  static constexpr int COLUMNS = WIDE ? 2 * BK : BK; /* k of the tokens in a stage, at most */
  static constexpr int CONSUMERS = WARPS - 1, THREADS = WARPS * WARP_SIZE, BUFFERS = 3;
  static constexpr int GROUPS = BK / 32, CHUNKS = BK / 8, COPY_ROWS = WARP_SIZE / CHUNKS, COPIES = ROWS / COPY_ROWS;
  static_assert(BK == 128 && THREADS >= FEW_PAIRS && WARPS >= FEW_TOKENS && FEW_TOKENS == 8 &&
                    (TOKENS == 1 || TOKENS == FEW_TOKENS),
                "see below");
};

/* What a pair adds to its token: y of this row, ROW_IDENTITY: x, ROW_DROPPED: nothing. */
struct few_slot {
  float weight;
  int32_t row;
};

/* An active expert's weights: gate and up, or, where there is only one half, that twice. */
struct few_halves {
  const void *low, *high;
};

/* Who has chosen what: the active experts in the order of their first pairs. */
template <int PAIRS> struct few_table {
  alignas(16) int32_t to[PAIRS];              /* of each pair: local expert, ROW_DROPPED or ROW_IDENTITY */
  alignas(16) int16_t row[PAIRS][FEW_TOKENS]; /* of an active expert: the token's row of h, a pair; -1: not chosen */
  alignas(16) few_halves weights[PAIRS];      /* of an active expert */
  int32_t expert[PAIRS];                      /* likewise */
  few_slot slot[PAIRS];
  uint32_t first[PAIRS / WARP_SIZE]; /* a bit a pair: the first of its expert */
};

/* A slice, and the same k of the rows of its expert's tokens: zeros where a token has not chosen it. */
template <class S> struct few_stage {
  typename S::T weights[S::WEIGHTS], columns[S::TOKENS][S::COLUMNS];
};

template <class S> struct few_smem {
  few_stage<S> ring[S::CONSUMERS][S::STAGES];
  float4 partial[S::BUFFERS][S::CONSUMERS][WARP_SIZE]; /* accumulators as they are, of some units in turn */
  typename S::T y[S::UP ? 1 : S::PAIRS][S::ROWS];      /* of the channels at hand */
  uint64_t summed[S::BUFFERS], taken[S::BUFFERS];
  uint64_t whole[S::UP ? 1 : S::PAIRS]; /* passed when an active expert's h is there */
  few_table<S::PAIRS> table;
};

/* ---- table ---- */

/* A bit for each pair with this expert. */
template <int PAIRS> DEVICE uint64_t pairs_alike(const few_table<PAIRS> &t, int to)
{
  uint64_t alike = 0;
#pragma unroll
  for (int i = 0; i < PAIRS; i += 4) {
    const int4 others = *reinterpret_cast<const int4 *>(t.to + i);
    const uint32_t bits = (others.x == to) | (others.y == to) << 1 | (others.z == to) << 2 | (others.w == to) << 3;
    alike |= (uint64_t)bits << i;
  }
  return alike;
}

/* Experts whose first pair comes before `pair`. */
template <int PAIRS> DEVICE int active_before(const few_table<PAIRS> &t, int pair)
{
  uint64_t firsts = t.first[0];
  if (PAIRS > WARP_SIZE) firsts |= (uint64_t)t.first[PAIRS / WARP_SIZE - 1] << 32;
  return __popcll(pair < PAIRS ? firsts & ((1ull << pair) - 1) : firsts);
}

template <class T, int PAIRS> DEVICE void place_expert(const gemm_args &g, few_table<PAIRS> &t, int active, int expert)
{
  t.expert[active] = expert;
  t.weights[active] = {expert_base<T>(g.b, 0, expert), expert_base<T>(g.b, g.gated ? 1 : 0, expert)};
}

/* Of one token: every pair is an expert of its own, also where two name the same. */
template <class T, int PAIRS> DEVICE void place_pairs_of_one(const gemm_args &g, few_table<PAIRS> &t, int pair, int to)
{
  const uint32_t firsts = __ballot_sync(ALL_LANES, to >= 0);
  if (lane_id() == 0) t.first[0] = firsts;
  if (to < 0) return;
  const int active = __popc(firsts & ((1u << pair) - 1));
  place_expert<T>(g, t, active, to);
  *reinterpret_cast<uint4 *>(t.row[active]) = make_uint4(0xffff0000u | pair, ~0u, ~0u, ~0u);
}

/* By whole warps: a pair's first one with the same expert, and the token's row in it. */
template <int PAIRS> DEVICE int note_first(few_table<PAIRS> &t, int pair, int to, int token, int top_k)
{
  int first = pair;
  if (to >= 0) {
    const uint64_t alike = pairs_alike(t, to);
    first = __ffsll((long long)alike) - 1;
    t.slot[pair].row = token * top_k + __ffsll((long long)(alike >> token * top_k)) - 1;
  }
  const uint32_t firsts = __ballot_sync(ALL_LANES, to >= 0 && first == pair);
  if (lane_id() == 0) t.first[warp_id()] = firsts;
  return first;
}

/* All threads. The first of them have a pair each, which goes to `to`. */
template <class T, int PAIRS>
DEVICE void place_pairs(const gemm_args &g, few_table<PAIRS> &t, int pair, int to, int token, int top_k)
{
  __syncthreads(); /* of all, although few have something to do: racecheck takes what follows a barrier of some for a race */
  const int first = pair < PAIRS ? note_first(t, pair, to, token, top_k) : 0;
  __syncthreads();
  if (to < 0 || t.slot[pair].row != pair) return;
  const int active = active_before(t, first);
  t.row[active][token] = (int16_t)pair;
  if (first == pair) place_expert<T>(g, t, active, to);
}

/* ---- gate ---- */

constexpr int FEW_KEYS = 8; /* a lane's */

/* Lies where stages will be. */
struct few_gate_smem {
  gate_scratch scratch[FEW_TOKENS];
  uint32_t key[FEW_TOKENS][FEW_KEYS][WARP_SIZE];
};

/* All threads: the keys of all scores, an expert a thread. */
template <int THREADS> DEVICE void score_experts(const gate_args &a, few_gate_smem &s)
{
  const int rows = ceil_div(a.experts, WARP_SIZE), items = (int)token_total(a.tokens) * rows;
#pragma unroll 1
  for (int item = warp_id(); item < items; item += THREADS / WARP_SIZE) {
    const int token = item / rows, row = item - token * rows, e = row * WARP_SIZE + lane_id();
    const int64_t logits = token * a.logits_ld;
    const float l = e < a.experts ? soft_cap(a, load_logit(a, logits + e)) : -INFINITY;
    s.key[token][row][lane_id()] = key_of_score(a, {logits, 0.f, 0.f}, e, l);
  }
  __syncthreads();
}

/* A token by a warp. N: keys of a lane. `all`: see choose_slots. */
template <int N> DEVICE gate_slot route_few_token(const gate_args &a, int token, bool all, few_gate_smem &s)
{
  gate_token t = {token * a.logits_ld, 0.f, 0.f};
  candidates<N> c;
  const unsigned first_nan = keys_of_logits(a, t, c.key, all);
  if (N == FEW_KEYS && !GATE_BY_LOGIT(a)) {
#pragma unroll
    for (int i = 0; i < N; i++) c.key[i] = i * WARP_SIZE < a.experts ? s.key[token][i][lane_id()] : KEY_NONE;
    if (a.n_group > 0) close_groups_of_rows(a, c.key);
  }
  return choose_slots(a, t, token, first_nan, all, c, nullptr, s.scratch[token]);
}

/* The gate's work, by every CTA for itself: leaves the ids in the table's `to`. The last one, which has as little to do as any,
 * also works out the weights and writes all down. */
template <class S> DEVICE void route_few_tokens(const few_args &args, few_smem<S> &smem)
{
  gate_args a = args.gate;
  a.logits_dtype = DT_F32; /* the router's */
  few_gate_smem &s = *reinterpret_cast<few_gate_smem *>(&smem.ring);
  static_assert(sizeof s <= sizeof smem.ring, "room for it");
  const int token = warp_id();
  const bool last = blockIdx.x == gridDim.x - 1, by_logit = GATE_BY_LOGIT(a);
  if (!by_logit) score_experts<S::THREADS>(a, s);
  if (token < token_total(a.tokens)) {
    const gate_slot slot = by_logit && a.experts <= 4 * WARP_SIZE ? route_few_token<4>(a, token, last, s)
                                                                  : route_few_token<FEW_KEYS>(a, token, last, s);
    const int pair = token * a.top_k + lane_id();
    if (lane_id() < a.top_k) smem.table.to[pair] = slot.id;
    if (last && lane_id() < a.top_k) store_release(args.notes + pair, FEW_NOTE(slot.id, __float_as_uint(slot.weight)));
    if (last) store_slot(a, token, slot);
  }
  __syncthreads();
}

/* ---- where pairs go ---- */

/* What a pair's note says, as soon as it is written: its CTA is at work, or this one would not have started. */
DEVICE uint64_t await_note(const uint64_t *note)
{
  uint64_t value;
  do value = load_acquire(note);
  while (value == 0);
  return value;
}

/* Where a pair goes, and with which weight. */
template <class S> DEVICE few_slot look_up_pair(const few_args &args, few_table<S::PAIRS> &t, int token, int pair)
{
  const map_args &map = args.map;
  const int slot = pair - token * map.top_k;
  if (args.notes) {
    const uint64_t note = S::UP ? 0 : await_note(args.notes + pair);
    const int id = S::UP ? t.to[pair] : FEW_NOTE_ID(note);
    const int to = S::UP && blockIdx.x == 0 ? destination_of<true, settled_reader>(map, id, token, slot)
                                            : destination_of<false, settled_reader>(map, id, token, slot);
    return {__uint_as_float((uint32_t)note), to};
  }
  const float weight = S::UP ? 0.f : load_settled(args.out.pair_weights + token * args.out.pair_weights_ld + slot);
  return {weight, S::UP && blockIdx.x == 0 ? destination<true, settled_reader>(map, pair)
                                           : destination<false, settled_reader>(map, pair)};
}

/* All threads; returns the number of active experts. In down, before the grid ahead has ended: of what was complete when
 * that one started, or of notes. */
template <class S> DEVICE int build_few_table(const few_args &args, few_table<S::PAIRS> &t)
{
  const int top_k = args.map.top_k, pair = threadIdx.x, token = S::TOKENS == 1 ? 0 : pair / top_k;
  int to = ROW_DROPPED;
  if (pair < S::PAIRS) {
    const int pairs = (int)token_total(args.map.tokens) * top_k;
    const few_slot found = pair < pairs ? look_up_pair<S>(args, t, token, pair) : few_slot{0.f, ROW_DROPPED};
    t.to[pair] = to = found.row;
    t.slot[pair] = {to == ROW_DROPPED ? 0.f : found.weight, to >= 0 ? pair : to};
    if (S::TOKENS == 1)
      place_pairs_of_one<typename S::T>(args.g, t, pair, to);
    else
      *reinterpret_cast<uint4 *>(t.row[pair]) = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  if (S::TOKENS > 1) place_pairs<typename S::T>(args.g, t, pair, to, token, top_k);
  __syncthreads();
  return active_before(t, S::PAIRS);
}

/* By the last CTA, which has as little to do as any. */
template <class S> DEVICE void report_counts(const map_args &a, const few_table<S::PAIRS> &t)
{
  if (blockIdx.x != gridDim.x - 1 || (!a.counts_out && !a.load)) return;
  for (int e = threadIdx.x; e < a.local_experts; e += S::THREADS) {
    int count = 0;
    for (int pair = 0; pair < S::PAIRS; pair++) count += t.to[pair] == e;
    if (a.counts_out) a.counts_out[e] = count;
    if (a.load) a.load[e] += count;
  }
}

/* ---- units ---- */

struct few_range {
  int first, count;
};

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
  int active, eight, eights, left; /* left: units from this one on */
  int experts, end, step, tiles;   /* of all; eights end there */

  DEVICE few_units(const gemm_args &g, int active_experts) : active(0), experts(active_experts)
  {
    const int all = g.n / 8, cta = blockIdx.x, ctas = gridDim.x;
    step = S::UP && g.gated ? 1 : 2;
    tiles = ceil_div(all, step);
    if (S::UP) {
      const int units = experts * tiles;
      active = cta / tiles, eight = cta % tiles * step, left = cta < units ? (units - cta - 1) / ctas + 1 : 0,
      end = all;
    } else {
      const few_range part = part_of_cta(all);
      eight = part.first, end = part.first + part.count, left = experts * ceil_div(part.count, step);
    }
    eights = min(step, end - eight);
  }

  DEVICE void next()
  {
    left--;
    if (S::UP) {
      eight += (int)gridDim.x * step;
      while (eight >= tiles * step) eight -= tiles * step, active++;
    } else {
      active++;
      if (active == experts) active = 0, eight += step;
    }
    eights = min(step, end - eight);
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
DEVICE void copy_column_chunks(const gemm_args &g, const int16_t (&of)[FEW_TOKENS], int slice, few_stage<S> &stage)
{
  const int chunk = lane_id() % CHUNKS, k = (slice * CHUNKS + chunk) * 8;
  const uint4 all = *reinterpret_cast<const uint4 *>(of); /* by one load, ahead of the copies */
#pragma unroll
  for (int i = 0; i < S::TOKENS; i += WARP_SIZE / CHUNKS) {
    const int token = i + lane_id() / CHUNKS;
    if (token >= S::TOKENS) continue;
    const uint32_t two = i < 2 ? all.x : i < 4 ? all.y : i < 6 ? all.z : all.w;
    const int row = (int16_t)(token % 2 ? two >> 16 : two);
    const typename S::T *source = static_cast<const typename S::T *>(g.a) + (S::UP ? token : max(row, 0)) * g.a_ld + k;
    cp_async_cg_16(shared_address(stage.columns) + few_chunk(token, chunk, CHUNKS) * 16, source,
                   row >= 0 && k < g.k ? 16 : 0);
  }
}

template <class S>
DEVICE void copy_columns(const gemm_args &g, const few_units<S> &unit, const int16_t (&of)[FEW_TOKENS], int slice,
                         few_stage<S> &stage)
{
  if (unit.wide())
    copy_column_chunks<S, 2 * S::CHUNKS>(g, of, slice, stage);
  else
    copy_column_chunks<S, S::CHUNKS>(g, of, slice, stage);
}

/* Lane l feeds weight row l/4; the other eight are zero. */
template <class S> DEVICE void multiply_wide_slice(const few_stage<S> &stage, float (&sum)[2][4])
{
  const uint4 *weights = reinterpret_cast<const uint4 *>(stage.weights);
  const uint4 *columns = reinterpret_cast<const uint4 *>(stage.columns);
  const int row = lane_id() / 4;
#pragma unroll
  for (int i = 0; i < 2 * S::GROUPS; i++) {
    const int at = few_chunk(row, i * 4 + lane_id() % 4, 2 * S::CHUNKS);
    const uint4 w = weights[at], x = row < S::TOKENS ? columns[at] : make_uint4(0, 0, 0, 0);
    mma_m16n8k16<typename S::T>(sum[0], {w.x, 0, w.y, 0}, {x.x, x.y});
    mma_m16n8k16<typename S::T>(sum[1], {w.z, 0, w.w, 0}, {x.z, x.w});
  }
}

/* Lane l feeds weight rows l/4 and l/4 + 8, and column l/4. */
template <class S> DEVICE void multiply_slice(const few_stage<S> &stage, float (&sum)[2][4])
{
  const uint4 *weights = reinterpret_cast<const uint4 *>(stage.weights);
  const uint4 *columns = reinterpret_cast<const uint4 *>(stage.columns);
  const int row = lane_id() / 4;
#pragma unroll
  for (int i = 0; i < S::GROUPS; i++) {
    const int at = few_chunk(row, i * 4 + lane_id() % 4, S::CHUNKS);
    const uint4 w0 = weights[at], w1 = weights[at + 8 * S::CHUNKS];
    const uint4 x = row < S::TOKENS ? columns[at] : make_uint4(0, 0, 0, 0);
    mma_m16n8k16<typename S::T>(sum[0], {w0.x, w1.x, w0.y, w1.y}, {x.x, x.y});
    mma_m16n8k16<typename S::T>(sum[1], {w0.z, w1.z, w0.w, w1.w}, {x.z, x.w});
  }
}

/* Where a warp is: its slice of a unit, `slice` >= slices if it has no more of that one. */
template <class S> struct few_cursor {
  few_units<S> unit;
  int narrow, wide, slice; /* slices of a unit of either kind; the next */

  DEVICE few_cursor(const gemm_args &g, int experts)
      : unit(g, experts), narrow(ceil_div(g.k, S::BK)), wide(ceil_div(g.k, 2 * S::BK)), slice(warp_id())
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

/* The copies of a consumer warp. */
template <class S> struct few_copier {
  const few_args &args;
  few_smem<S> &smem;
  few_cursor<S> next;
  ring_place<S::STAGES> to;
  uint64_t whole; /* a bit for each of down's experts whose h is there */

  DEVICE few_stage<S> &stage() const { return smem.ring[warp_id()][to.stage]; }
  DEVICE void advance() { to.advance(), next.slice += S::CONSUMERS; }

  DEVICE void weights()
  {
    copy_weights<S>(args.g, next.unit, smem.table.weights[next.unit.active], next.slice, stage());
  }
  DEVICE void columns()
  {
    const int active = next.unit.active;
    if (!S::UP && !(whole >> active & 1)) {
      wait_for(&smem.whole[active], 0);
      whole |= 1ull << active;
    }
    copy_columns<S>(args.g, next.unit, smem.table.row[active], next.slice, stage());
  }
};

/* All stages but one are under way. In down their weights are asked for before h is there. A group of copies for each slice,
 * be it empty; the first one has the first weights of all. */
template <class S> DEVICE void begin_copies(few_copier<S> &copies)
{
  few_copier<S> weights = copies;
#pragma unroll 1
  for (int i = 0; i < S::STAGES - 1; i++, weights.advance())
    if (weights.next.find()) weights.weights();
  if (!S::UP && !copies.args.made) wait_for_earlier_grids();
#pragma unroll 1
  for (int i = 0; i < S::STAGES - 1; i++, copies.advance()) {
    if (copies.next.find()) copies.columns();
    cp_async_commit_group();
  }
}

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

template <class S> DEVICE void few_consume(const few_args &args, few_smem<S> &smem, int experts)
{
  few_cursor<S> here(args.g, experts);
  few_copier<S> copies = {args, smem, here, {}, args.made ? 0 : ~0ull};
  ring_place<S::STAGES> stage;
  ring_place<S::BUFFERS> buffer;
  begin_copies<S>(copies);
#pragma unroll 1
  for (; here.unit.left > 0; here.next_unit()) {
    const int first = here.slice;
    float sum[2][4] = {};
#pragma unroll 1
    for (; here.slice < here.slices(); here.slice += S::CONSUMERS, stage.advance()) {
      cp_async_wait_group<S::STAGES - 2>();
      __syncwarp(); /* all lanes' copies are there, and the stage before is read */
      if (copies.next.find()) copies.weights(), copies.columns();
      cp_async_commit_group();
      copies.advance();
      if (here.unit.wide())
        multiply_wide_slice<S>(smem.ring[warp_id()][stage.stage], sum);
      else
        multiply_slice<S>(smem.ring[warp_id()][stage.stage], sum);
    }
    hand_over<S>(smem, buffer, first, sum);
  }
}

/* ---- finisher: one warp ---- */

/* In down, whose h is whole: asked for while there is nothing else to do, and told to the consumers. */
template <class S> struct few_watch {
  const few_args &args;
  few_smem<S> &smem;
  int experts;
  uint32_t told; /* a bit for each of the lane's experts */
  bool done;

  DEVICE few_watch(const few_args &a, few_smem<S> &s, int active)
      : args(a), smem(s), experts(active), told(0), done(S::UP || !a.made)
  {
  }

  /* Of expert 32 i + lane. */
  DEVICE bool tell(int i)
  {
    const int active = i * WARP_SIZE + lane_id();
    if (active >= experts || told >> i & 1) return true;
    if (load_acquire(args.made + active) != args.units) return false;
    mbarrier_arrive(&smem.whole[active]);
    told |= 1u << i;
    return true;
  }

  DEVICE void look()
  {
    bool all = true;
#pragma unroll
    for (int i = 0; i < S::PAIRS / WARP_SIZE; i++) all &= tell(i);
    done = __all_sync(ALL_LANES, all);
  }
};

/* The sum of the warps' parts, in the order of k. Lane l: [j + 2h] is weight row l/4 + 8h, token 2 (l%4) + j. */
template <class S>
DEVICE void take_sums(few_smem<S> &smem, few_watch<S> &watch, ring_place<S::BUFFERS> &buffer, float (&sum)[4])
{
  while (!watch.done && !mbarrier_test_wait(&smem.summed[buffer.stage], buffer.phase)) watch.look();
  wait_for(&smem.summed[buffer.stage], buffer.phase);
#pragma unroll
  for (int w = 0; w < S::CONSUMERS; w++) {
    const float4 part = smem.partial[buffer.stage][w][lane_id()];
    sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
  }
  mbarrier_arrive(&smem.taken[buffer.stage]);
  buffer.advance();
}

/* In down perhaps before the grid ahead has ended. */
DEVICE float few_bias(const expert_matrix &b, int half, int expert, int channel)
{
  if (!b.bias[half]) return 0.f;
  return load_any(b.bias[half], expert * b.bias_expert_stride + channel * b.bias_n_stride, b.bias_dtype);
}

/* Of a unit: the outputs of lane l are channels l/4 (gated) or l/4 and l/4 + 8, of two tokens. store(channel of the unit,
 * row, value). */
template <class S, class STORE>
DEVICE void finish_unit(const few_args &args, few_smem<S> &smem, const few_units<S> &unit, few_watch<S> &watch,
                        ring_place<S::BUFFERS> &buffer, STORE store)
{
  const gemm_args &g = args.g;
  const bool gated = S::UP && g.gated;
  const int expert = smem.table.expert[unit.active], local = lane_id() / 4, channel = unit.eight * 8 + local;
  const int16_t *rows = smem.table.row[unit.active] + lane_id() % 4 * 2;
  const bool second = unit.eights > 1;
  const float low_bias = few_bias(g.b, 0, expert, channel);
  const float high_bias = gated    ? few_bias(g.b, 1, expert, channel)
                          : second ? few_bias(g.b, 0, expert, channel + 8)
                                   : 0.f;
  float sum[4] = {};
  take_sums<S>(smem, watch, buffer, sum);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    if (rows[j] < 0) continue;
    float low[1] = {sum[j] + low_bias}, high[1] = {sum[j + 2] + high_bias};
    if (S::UP) activate<1>(g, low, high);
    store(local, rows[j], from_f32<typename S::T>(low[0]));
    if (gated || !second) continue;
    if (S::UP) activate<1>(g, high, low);
    store(local + 8, rows[j], from_f32<typename S::T>(high[0]));
  }
}

/* A token's sum over its slots, in their order; one of weight 0 adds nothing, whatever it holds. */
template <class S>
DEVICE float sum_slots(const combine_args &out, const few_smem<S> &smem, int token, int local, int channel)
{
  using T = typename S::T;
  float sum = 0;
#pragma unroll 4
  for (int pair = token * out.top_k; pair < (token + 1) * out.top_k; pair++) {
    const few_slot slot = smem.table.slot[pair];
    float value = to_f32(smem.y[max(slot.row, 0)][local]);
    if (slot.row == ROW_IDENTITY && out.x) value = to_f32(static_cast<const T *>(out.x)[token * out.x_ld + channel]);
    if (slot.weight != 0 && (slot.row >= 0 || out.x)) sum = fmaf(slot.weight, value, sum);
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

/* Of up to 16 channels, when y of all experts is there. The residual may be `out` itself. */
template <class S> DEVICE void store_outputs(const combine_args &out, const few_smem<S> &smem, int eight, int eights)
{
  const int local = lane_id() % S::ROWS, channel = eight * 8 + local, tokens = (int)token_total(out.tokens);
  __syncwarp();
  for (int token = lane_id() / S::ROWS; token < tokens && local < eights * 8; token += WARP_SIZE / S::ROWS) {
    const float sum = sum_slots<S>(out, smem, token, local, channel);
    float value = out.out_scale * sum;
    if (out.residual)
      value = fmaf(out.out_scale, sum, load_any(out.residual, token * out.residual_ld + channel, out.out_dtype));
    store_any<typename S::T>(out.out, token * out.out_ld + channel, value, out.out_dtype);
  }
  __syncwarp();
}

template <class S> DEVICE void few_finish(const few_args &args, few_smem<S> &smem, int experts)
{
  using T = typename S::T;
  ring_place<S::BUFFERS> buffer;
  few_units<S> unit(args.g, experts);
  few_watch<S> watch(args, smem, experts);
  if (!watch.done) watch.look(); /* whatever L1 held before is gone: biases */
  if constexpr (S::UP) {
#pragma unroll 1
    for (; unit.left > 0; unit.next()) {
      finish_unit<S>(args, smem, unit, watch, buffer, [&](int local, int row, T value) {
        static_cast<T *>(args.g.c)[row * args.g.c_ld + unit.eight * 8 + local] = value;
      });
      __syncwarp();
      if (args.made && lane_id() == 0) add_release(args.made + unit.active, 1);
    }
  } else {
#pragma unroll 1
    while (unit.eight < unit.end) {
      const int eight = unit.eight, eights = unit.eights;
#pragma unroll 1
      for (int i = 0; i < experts; i++, unit.next())
        finish_unit<S>(args, smem, unit, watch, buffer,
                       [&](int local, int row, T value) { smem.y[row][local] = value; });
      wait_for_earlier_grids(); /* h of all experts is there, so it will not be long */
      store_outputs<S>(args.out, smem, eight, eights);
      if (experts == 0) unit.eight += unit.step, unit.eights = min(unit.step, unit.end - unit.eight);
    }
  }
}

/* ---- kernel ---- */

template <class S> DEVICE void few_gemm(const few_args &args, few_smem<S> &smem)
{
  if (threadIdx.x < S::BUFFERS) {
    mbarrier_init(&smem.summed[threadIdx.x], S::CONSUMERS * WARP_SIZE);
    mbarrier_init(&smem.taken[threadIdx.x], WARP_SIZE);
  }
  if (!S::UP && threadIdx.x < S::PAIRS) mbarrier_init(&smem.whole[threadIdx.x], 1);
  if (S::UP) {
    wait_for_earlier_grids();
    check_token_count(args.map.tokens, args.map.fault);
    if (args.notes) route_few_tokens<S>(args, smem);
  }
  const int experts = build_few_table<S>(args, smem.table);
  if (S::UP) report_counts<S>(args.map, smem.table);
  if (warp_id() < S::CONSUMERS) {
    few_consume<S>(args, smem, experts);
  } else {
    if (!S::UP && !args.made) wait_for_earlier_grids();
    few_finish<S>(args, smem, experts);
  }
}

#endif
