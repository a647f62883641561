/*
 * From logits to rows: the gate (a warp a token) and the map (counting by chunks of pairs, no sorting).
 *
 * The gate ranks by integers that order like floats, so that ties are exact and NaN has a place; a token's logits
 * are read into registers once, and again only where they were chosen. The map ranks a pair among the pairs of
 * its expert by what lies before it: in its warp (match), in earlier warps (counts in shared memory), in earlier
 * chunks (counts in global memory). Nothing depends on the order in which warps or CTAs run.
 */
#include "dtype.cuh"

using map_count_args = map_args;

/* ---- gate: keys ---- */

/* Orders like the float, NaN lowest: greater float, greater key; -0 = +0. 0 is below every float: not to be chosen. */
constexpr uint32_t KEY_NONE = 0, KEY_NAN = 1;

DEVICE uint32_t key_of(float value)
{
  uint32_t bits = __float_as_uint(value + 0.f);
  uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return value == value ? key : KEY_NAN;
}

DEVICE float value_of(uint32_t key)
{
  float value = __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
  return key == KEY_NAN ? __uint_as_float(0x7fffffffu) : value;
}

/* ---- gate: scores, as in the public manual (cumoe_routing) ---- */

/* One token's softmax over all experts, where the score is that. */
struct gate_token {
  int64_t logits;        /* index of its first logit */
  float max, sum;
};

DEVICE bool weigh_after(const gate_args &a) { return a.flags & ROUTE_SCORE_AFTER_TOPK; }
DEVICE bool softmax_over_all(const gate_args &a) { return a.score == SCORE_SOFTMAX && !weigh_after(a); }

constexpr float LARGEST = 3.402823466e38f;
DEVICE float finite_or_nan(float l) { return l > LARGEST ? LARGEST : l; }
DEVICE float not_a_number() { return __uint_as_float(0x7fffffffu); }

DEVICE float load_logit(const gate_args &a, int64_t index)
{
  return finite_or_nan(load_any(a.logits, index, a.logits_dtype));
}

DEVICE float soft_cap(const gate_args &a, float l) { return a.softcap > 0 ? a.softcap * tanhf(l / a.softcap) : l; }

/* NaN and -Inf have no part in a softmax. */
DEVICE float softmax_term(float l, float max) { return l > -INFINITY ? expf(l - max) : 0.f; }

DEVICE float score_of(const gate_args &a, const gate_token &t, float l)
{
  switch (a.score) {
  case SCORE_SIGMOID: return 1.f / (1.f + expf(-l));
  case SCORE_SQRT_SOFTPLUS: return sqrtf(l > 20.f ? l + log1pf(expf(-l)) : log1pf(expf(l)));
  case SCORE_IDENTITY: return l;
  default: return weigh_after(a) ? l : t.sum > 0 ? softmax_term(l, t.max) / t.sum : 0.f;
  }
}

/* Reads the logits again: for the forms that registers do not hold them for. */
static __device__ __noinline__ float2 softmax_over_row(const gate_args &a, int64_t row)
{
  float max = -INFINITY, sum = 0;
  for (int e = lane_id(); e < a.experts; e += WARP_SIZE) max = fmaxf(max, soft_cap(a, load_logit(a, row + e)));
  max = warp_max(max);
  for (int e = lane_id(); e < a.experts; e += WARP_SIZE) sum += softmax_term(soft_cap(a, load_logit(a, row + e)), max);
  return make_float2(max, warp_sum(sum));
}

/* ---- gate: groups ---- */

struct best_two {
  uint32_t first, second;
};

DEVICE best_two better(best_two a, best_two b)
{
  return {max(a.first, b.first), max(min(a.first, b.first), max(a.second, b.second))};
}

/* The key of a group's score, known to the `lanes` lanes that share the group. Each starts at another place, so
 * that groups whose size is a multiple of 32 words do not meet in one bank. */
DEVICE uint32_t group_key(const gate_args &a, const uint32_t *choice, int group, int lanes)
{
  const int size = a.experts / a.n_group, steps = ceil_div(size, lanes);
  best_two best = {KEY_NONE, KEY_NONE};
  int step = group % steps;
  for (int i = 0; i < steps; i++) {
    int at = step * lanes + lane_id() % lanes;
    if (group < a.n_group && at < size) best = better(best, {choice[group * size + at], KEY_NONE});
    step = step + 1 == steps ? 0 : step + 1;
  }
  for (int mask = lanes / 2; mask > 0; mask /= 2)
    best = better(best, {__shfl_xor_sync(ALL_LANES, best.first, mask), __shfl_xor_sync(ALL_LANES, best.second, mask)});
  if (group >= a.n_group) return KEY_NONE;
  return a.group_score == GROUP_BEST || size == 1 ? best.first : key_of(value_of(best.first) + value_of(best.second));
}

/* Bit g: group g stays. */
DEVICE uint64_t open_groups(const gate_args &a, const uint32_t *choice)
{
  int lanes = WARP_SIZE;
  while (lanes > 1 && lanes * a.n_group > WARP_SIZE) lanes /= 2;
  uint32_t low = group_key(a, choice, lane_id() / lanes, lanes);
  low = __shfl_sync(ALL_LANES, low, lane_id() * lanes % WARP_SIZE);
  if (lane_id() >= a.n_group) low = KEY_NONE;
  uint32_t high = a.n_group > WARP_SIZE ? group_key(a, choice, lane_id() + WARP_SIZE, 1) : KEY_NONE;
  uint64_t open = 0;
  for (int i = 0; i < a.topk_group; i++) {
    uint32_t best = __reduce_max_sync(ALL_LANES, max(low, high));
    if (best == KEY_NONE) break;
    unsigned mine = low == best ? lane_id() : high == best ? lane_id() + WARP_SIZE : ~0u;
    unsigned group = __reduce_min_sync(ALL_LANES, mine);
    open |= 1ull << group;
    if (group == lane_id()) low = KEY_NONE;
    if (group == lane_id() + WARP_SIZE) high = KEY_NONE;
  }
  return open;
}

/* Experts of closed groups lose their keys. expert / size by a product: exact below 1024. */
DEVICE void close_groups(const gate_args &a, uint32_t *choice)
{
  const unsigned inverse = ceil_div(1u << 21, (unsigned)(a.experts / a.n_group));
  const uint64_t open = open_groups(a, choice);
  for (unsigned e = lane_id(); e < a.experts; e += WARP_SIZE)
    if (!(open >> (e * inverse >> 21) & 1)) choice[e] = KEY_NONE;
}

/* With a bias or groups: keys of the choice scores, in shared memory, which groups need. Returns the lane's first
 * NaN logit. */
DEVICE unsigned choose_by_score(const gate_args &a, const gate_token &t, uint32_t *choice)
{
  unsigned first_nan = ~0u;
#pragma unroll 2
  for (int e = lane_id(); e < a.experts; e += WARP_SIZE) {
    float l = soft_cap(a, load_logit(a, t.logits + e)), s = score_of(a, t, l);
    if (l != l) first_nan = min(first_nan, (unsigned)e);
    if (a.select_bias) s += a.select_bias[e];
    choice[e] = l == l ? key_of(s) : KEY_NAN;
  }
  __syncwarp();
  if (a.n_group > 0) close_groups(a, choice);
  return first_nan;
}

/* ---- gate: the token ---- */

/* Lane j gets the j-th best expert, -1 if there are fewer. key[i] is that of expert 32 i + lane. */
template <int N> DEVICE int take_best(const gate_args &a, uint32_t (&key)[N])
{
  int chosen = -1, removed = -1;
  for (int j = 0; j < a.top_k; j++) {
    uint32_t best = KEY_NONE;
    int where = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (i == removed) key[i] = KEY_NONE;
      if (key[i] > best) best = key[i], where = i;
    }
    uint32_t winner = __reduce_max_sync(ALL_LANES, best);
    if (winner == KEY_NONE) break;
    unsigned id = __reduce_min_sync(ALL_LANES, best == winner ? where * WARP_SIZE + lane_id() : ~0u);
    if (lane_id() == j) chosen = id;
    removed = id % WARP_SIZE == lane_id() ? where : -1;
  }
  return chosen;
}

/* Lane j: the weight of slot j. */
DEVICE float slot_weight(const gate_args &a, const gate_token &t, int chosen)
{
  float l = chosen >= 0 ? soft_cap(a, load_logit(a, t.logits + chosen)) : not_a_number(), weight = 0;
  if (weigh_after(a)) {
    float term = softmax_term(l, warp_max(fmaxf(l, -INFINITY))), sum = warp_sum(term);
    weight = sum > 0 ? term / sum : 0.f;
  } else if (l == l) {
    weight = score_of(a, t, l);
  }
  if (a.flags & ROUTE_RENORMALIZE) {
    float divisor = fmaxf(warp_sum(weight) + a.renorm_eps, a.renorm_min);
    weight = divisor > 0 ? weight / divisor : 0.f;
  }
  return weight * a.routed_scale;
}

template <int N, class T> DEVICE void load_keys(const gate_args &a, const gate_token &t, uint32_t (&key)[N])
{
  const T *logits = static_cast<const T *>(a.logits) + t.logits;
  float l[N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    int e = i * WARP_SIZE + lane_id();
    l[i] = e < a.experts ? to_f32(logits[e]) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < N; i++)
    key[i] = i * WARP_SIZE + lane_id() < a.experts ? key_of(finite_or_nan(l[i])) : KEY_NONE;
}

/* Keys of the logits themselves: every score keeps their order, but may round. */
template <int N> DEVICE unsigned choose_by_logit(const gate_args &a, gate_token &t, uint32_t (&key)[N])
{
  switch (a.logits_dtype) {
  case DT_F16: load_keys<N, f16>(a, t, key); break;
  case DT_BF16: load_keys<N, bf16>(a, t, key); break;
  default: load_keys<N, f32>(a, t, key);
  }
  unsigned first_nan = ~0u;
  uint32_t best = KEY_NAN;
#pragma unroll
  for (int i = N - 1; i >= 0; i--) {
    if (key[i] == KEY_NAN) first_nan = i * WARP_SIZE + lane_id();
    best = max(best, key[i]);
  }
  if (softmax_over_all(a) && a.softcap <= 0) {
    t.max = value_of(__reduce_max_sync(ALL_LANES, best));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) sum += key[i] > KEY_NAN ? softmax_term(value_of(key[i]), t.max) : 0.f;
    t.sum = warp_sum(sum);
  }
  return first_nan;
}

template <int N> DEVICE void route_token(const gate_args &a, int64_t token, uint32_t *choice)
{
  const bool by_logit = !a.select_bias && a.n_group == 0;
  gate_token t = {token * a.logits_ld, 0.f, 0.f};
  uint32_t key[N];
  unsigned first_nan;
  if (softmax_over_all(a) && (!by_logit || a.softcap > 0)) {
    float2 of_row = softmax_over_row(a, t.logits);
    t.max = of_row.x, t.sum = of_row.y;
  }
  if (by_logit) {
    first_nan = choose_by_logit(a, t, key);
  } else {
    first_nan = choose_by_score(a, t, choice);
#pragma unroll
    for (int i = 0; i < N; i++) {
      int e = i * WARP_SIZE + lane_id();
      key[i] = e < a.experts ? choice[e] : KEY_NONE;
    }
  }
  first_nan = __reduce_min_sync(ALL_LANES, first_nan);
  if (first_nan != ~0u && lane_id() == 0) report_fault(a.fault, FAULT_NAN_LOGIT, first_nan, token);
  int chosen = take_best(a, key);
  float weight = slot_weight(a, t, chosen);
  if (lane_id() >= a.top_k) return;
  if (a.ids_dtype == DT_I64) static_cast<int64_t *>(a.ids)[token * a.ids_ld + lane_id()] = chosen;
  else static_cast<int32_t *>(a.ids)[token * a.ids_ld + lane_id()] = chosen;
  a.weights[token * a.weights_ld + lane_id()] = weight;
}

template <int TOKENS> DEVICE void gate_warp(const gate_args &a)
{
  __shared__ uint32_t choice[TOKENS][MAX_EXPERTS];
  const int64_t token = (int64_t)blockIdx.x * TOKENS + warp_id();
  check_token_count(a.tokens, a.fault);
  if (token >= token_total(a.tokens)) return;
  uint32_t *own = choice[warp_id()];
  if (a.experts <= 64) route_token<2>(a, token, own);
  else if (a.experts <= 128) route_token<4>(a, token, own);
  else if (a.experts <= 256) route_token<8>(a, token, own);
  else if (a.experts <= 384) route_token<12>(a, token, own);
  else if (a.experts <= 512) route_token<16>(a, token, own);
  else route_token<32>(a, token, own);
}

/* ---- map ---- */

/* 32 warps in blocks of 8: the rows of an expert in seven warps still count in a byte. */
constexpr int RUN = 1024, RUN_WARPS = RUN / WARP_SIZE, BLOCK_WARPS = 8, BLOCKS = RUN_WARPS / BLOCK_WARPS;

struct map_shared {
  int32_t next[MAX_EXPERTS]; /* counts first, then the row that the run's first pair of each expert gets */
  union {
    int32_t earlier[MAX_EXPERTS];          /* rows in earlier chunks */
    uint16_t in_block[BLOCKS][MAX_EXPERTS]; /* rows in each block of warps */
  };
  alignas(16) uint8_t in_warp[RUN_WARPS][MAX_EXPERTS]; /* rows in each warp, then in the earlier warps of its block */
  int32_t warp_rows[RUN_WARPS];
};

struct pair_range {
  int64_t begin, end, padded_end; /* this chunk's pairs; up to padded_end: of tokens that are not there */
};

DEVICE pair_range chunk_of(const map_args &a)
{
  int64_t begin = (int64_t)blockIdx.x * a.chunk_pairs, end = begin + a.chunk_pairs;
  return {begin, min(end, token_total(a.tokens) * a.top_k), min(end, a.tokens.count * a.top_k)};
}

/* Local expert of a pair, or ROW_DROPPED, or ROW_IDENTITY. */
template <bool REPORT> DEVICE int destination(const map_args &a, int64_t pair)
{
  const unsigned token = (unsigned)pair / (unsigned)a.top_k, slot = (unsigned)pair - token * (unsigned)a.top_k;
  const int64_t at = token * a.ids_ld + slot;
  const int64_t id = a.ids_dtype == DT_I64 ? static_cast<const int64_t *>(a.ids)[at] : static_cast<const int32_t *>(a.ids)[at];
  const int zero_end = a.num_experts + a.zero_experts;
  if (id == -1) return ROW_DROPPED;
  if (id < 0 || id >= zero_end + a.identity_experts) {
    if (REPORT) report_fault(a.fault, FAULT_EXPERT_ID, slot, token);
    return ROW_DROPPED;
  }
  if (id >= a.num_experts) return id < zero_end ? ROW_DROPPED : ROW_IDENTITY;
  const int local = a.expert_map ? a.expert_map[id] : (int)id;
  if (local >= 0 && local < a.local_experts) return local;
  if (REPORT && local != -1) report_fault(a.fault, FAULT_EXPERT_MAP, slot, token);
  return ROW_DROPPED;
}

/* Integer sums: the order of the atomics does not show. */
DEVICE void count_chunk(const map_args &a, pair_range chunk, int32_t *count)
{
  for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  for (int64_t pair = chunk.begin + threadIdx.x; pair < chunk.end; pair += blockDim.x) {
    int to = destination<false>(a, pair);
    if (to >= 0) atomicAdd(&count[to], 1);
  }
  __syncthreads();
}

template <int PAIRS> DEVICE void map_count_chunk(const map_args &a)
{
  __shared__ int32_t count[MAX_EXPERTS];
  count_chunk(a, chunk_of(a), count);
  for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x)
    a.hist[(int64_t)blockIdx.x * a.local_experts + e] = count[e];
}

/* Every CTA adds up the whole table: cheaper than a third launch, and `earlier` falls out of it. */
DEVICE void sum_chunks(const map_args &a, map_shared &s)
{
  const int columns = round_up(a.local_experts, WARP_SIZE), readers = blockDim.x / columns;
  const int e = threadIdx.x % columns, reader = threadIdx.x / columns;
  s.next[threadIdx.x] = s.earlier[threadIdx.x] = 0;
  __syncthreads();
  if (e < a.local_experts && reader < readers) {
    int total = 0, earlier = 0;
#pragma unroll 8
    for (int chunk = reader; chunk < a.chunks; chunk += readers) {
      int rows = a.hist[(int64_t)chunk * a.local_experts + e];
      total += rows;
      if (chunk < blockIdx.x) earlier += rows;
    }
    atomicAdd(&s.next[e], total);
    atomicAdd(&s.earlier[e], earlier);
  }
  __syncthreads();
}

/* Counts to offsets, a thread an expert; the first CTA writes them out. */
DEVICE void lay_out_rows(const map_args &a, map_shared &s)
{
  const int e = threadIdx.x;
  const bool is_expert = e < a.local_experts;
  const int count = is_expert ? s.next[e] : 0, inclusive = warp_scan(count);
  if (lane_id() == WARP_SIZE - 1) s.warp_rows[warp_id()] = inclusive;
  __syncthreads();
  const int of_warp = s.warp_rows[lane_id()], warps_before = __shfl_sync(ALL_LANES, warp_scan(of_warp) - of_warp, warp_id());
  const int offset = warps_before + inclusive - count;
  if (is_expert) s.next[e] = offset + (a.chunks > 1 ? s.earlier[e] : 0);
  __syncthreads(); /* `earlier` gives way to `in_block` */
  if (blockIdx.x != 0 || !is_expert) return;
  a.counts[e] = count;
  a.offsets[e] = offset;
  if (e == a.local_experts - 1) a.offsets[e + 1] = offset + count;
  if (a.counts_out) a.counts_out[e] = count;
  if (a.load) a.load[e] += count;
}

/* Rows a warp -> rows in the earlier warps of its block and rows a block; a thread takes four experts of a block. */
DEVICE void scan_warps(const map_args &a, map_shared &s)
{
  constexpr int WORDS = MAX_EXPERTS / 4;
  const int word = threadIdx.x % WORDS, block = threadIdx.x / WORDS;
  if (word * 4 >= a.local_experts) return;
  uint32_t rows[BLOCK_WARPS], before = 0;
#pragma unroll
  for (int w = 0; w < BLOCK_WARPS; w++)
    rows[w] = reinterpret_cast<uint32_t *>(s.in_warp[block * BLOCK_WARPS + w])[word];
#pragma unroll
  for (int w = 0; w < BLOCK_WARPS; w++) {
    reinterpret_cast<uint32_t *>(s.in_warp[block * BLOCK_WARPS + w])[word] = before;
    if (w < BLOCK_WARPS - 1) before += rows[w];
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    s.in_block[block][word * 4 + i] = (before >> 8 * i & 0xff) + (rows[BLOCK_WARPS - 1] >> 8 * i & 0xff);
}

/* One pair a thread: its place among the run's pairs of the same expert. */
DEVICE void place_run(const map_args &a, map_shared &s, pair_range chunk, int64_t begin)
{
  const int64_t pair = begin + threadIdx.x;
  const int to = pair < chunk.end ? destination<true>(a, pair) : ROW_DROPPED;
  uint8_t *own = s.in_warp[warp_id()];
  for (int word = lane_id(); word * 4 < a.local_experts; word += WARP_SIZE) reinterpret_cast<uint32_t *>(own)[word] = 0;
  __syncwarp();
  const unsigned peers = __match_any_sync(ALL_LANES, to), before = __popc(peers & ((1u << lane_id()) - 1));
  if (to >= 0 && before == 0) own[to] = __popc(peers);
  __syncthreads();
  scan_warps(a, s);
  __syncthreads();
  int row = to;
  if (to >= 0) {
    row = s.next[to] + own[to] + before;
    for (int block = 0; block < warp_id() / BLOCK_WARPS; block++) row += s.in_block[block][to];
    a.row_pair[row] = (int32_t)pair;
  }
  if (pair < chunk.padded_end) a.slot_row[pair] = row;
}

template <int PAIRS> DEVICE void map_chunk(const map_args &a)
{
  static_assert(PAIRS == RUN && RUN >= MAX_EXPERTS, "a thread a pair, a thread an expert");
  __shared__ map_shared s;
  const pair_range chunk = chunk_of(a);
  check_token_count(a.tokens, a.fault);
  if (a.chunks > 1) sum_chunks(a, s);
  else count_chunk(a, chunk, s.next);
  lay_out_rows(a, s);
  for (int64_t begin = chunk.begin; begin < chunk.padded_end; begin += RUN) {
    place_run(a, s, chunk, begin);
    __syncthreads();
    if (threadIdx.x < a.local_experts)
      for (int block = 0; block < BLOCKS; block++) s.next[threadIdx.x] += s.in_block[block][threadIdx.x];
    __syncthreads();
  }
}

/* ---- kernels ---- */

#define ROWS_route
#define VARIANT(op, arch, file, form, in, w, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                           \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                        \
      VARIANT_NAME(op, arch, form, in, w, BM, BN, BK)(const __grid_constant__ op##_args a)                    \
  {                                                                                                           \
    op##_##form<BM>(a);                                                                                       \
  }
#include "variants.def"
