/*
 * What a rank answers. Its rows of y lie in its own memory (few tokens, by few), or are made on the way: a layer's
 * combine writes its outputs straight to the tokens' ranks. Of few tokens answers are packets or lines, and one grid
 * waits for them and adds up those of all ranks.
 */
#ifndef CUMOE_EP_ANSWER_CUH
#define CUMOE_EP_ANSWER_CUH

#include "ep/flags.cuh"
#include "permute/combine.cuh"

/* ---- rows of y that are there ---- */

/* Rows are dealt to the warps rank by rank in turn. */
struct answer_row {
  int64_t token; /* in all segments */
  int source, answer;
  unsigned row; /* in its segment */
  bool here;    /* this rank has it: of the slot, or of any; or it distrusts, and answers all: who has sent an expert
                   that is not here waits for zeros */
};

DEVICE answer_row row_to_answer(const ep_args &a, unsigned i, unsigned end, bool distrusts)
{
  const unsigned ranks = a.shape.ranks, answers = ep_answers(&a.shape);
  answer_row r;
  r.source = (int)((a.rank + i) % ranks);
  r.row = i / ranks;
  r.answer = (int)(r.row % answers);
  r.token = r.source * a.shape.capacity + r.row / answers;
  const bool sent = i < end && r.row < a.arrived[r.source] * answers;
  const int slot = a.shape.exact ? r.answer : lane_id();
  const bool asks = sent && slot < a.shape.top_k;
  r.here = __any_sync(ALL_LANES, asks && (distrusts || a.ids_here[r.token * a.shape.top_k + slot] >= 0));
  return r;
}

DEVICE unsigned rows_to_answer(const ep_args &a)
{
  int most = 0;
  for (int r = lane_id(); r < a.shape.ranks; r += WARP_SIZE) most = max(most, a.arrived[r]);
  return (unsigned)warp_max(most) * ep_answers(&a.shape) * a.shape.ranks;
}

DEVICE void answer_rows(const ep_args &a, bool distrusts)
{
  const int width = row_vectors(a);
  const int64_t bytes = (int64_t)width * 16, answers = ep_answers(&a.shape), here = a.rank * a.shape.capacity * answers;
  const unsigned end = rows_to_answer(a), step = a.movers * WARPS;
  unsigned i = blockIdx.x * WARPS + warp_id();
  answer_row r = row_to_answer(a, i, end, distrusts), next;
  for (; i < end; i += step, r = next) {
    row_part p;
    if (r.here) load_part(p, static_cast<const char *>(a.y_here) + (r.token * answers + r.answer) * bytes, width);
    next = row_to_answer(a, i + step, end, distrusts);
    if (r.here) store_part(p, lane_of(a, r.source) + a.at.y + (here + r.row) * bytes, width);
  }
}

/* Rows of each expert, summed over rounds: those of the first one lie there already. */
DEVICE void add_counts(const ep_args &a)
{
  if (!a.counts || cta_of_grid(a) != 0) return;
  for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x) a.counts_sum[e] += a.counts[e];
}

/* ---- few tokens: packets ---- */

/* Beside packets a flag says that this rank has read what the others have put, which it has when the experts' grids
 * have ended: there is nothing to wait for, hence no release. */
DEVICE void tell_that_all_is_read(const ep_args &a, uint32_t exchange)
{
  tell<false>(a, a.at.back, nullptr, 0, exchange, 0, 1, blockDim.x);
}

/* The most rows that any rank has sent. Like all that the wait for tokens has left, it is there before the grid ahead
 * of this one has ended. */
DEVICE int most_arrived(const ep_args &a)
{
  int most = 0;
  for (int r = lane_id(); r < a.shape.ranks; r += WARP_SIZE) most = max(most, load_relaxed(&a.arrived[r]));
  return warp_max(most);
}

/* All rows that have come are answered, those of tokens without an expert here as well: nobody waits in vain for what
 * two ranks do not agree on. 16 bytes a thread, of all ranks' rows at once. */
DEVICE void answer_in_packets(const ep_args &a, int most, uint32_t exchange)
{
  const int width = row_vectors(a), items = a.shape.ranks * most * width, threads = ctas_of_grid(a) * blockDim.x;
  for (int i = cta_of_grid(a) * blockDim.x + threadIdx.x; i < items; i += threads) {
    const int line = i / width, vector = i - line * width, n = line / most, row = line - n * most,
              source = (a.rank + 1 + n) % a.shape.ranks;
    const uint4 *y = static_cast<const uint4 *>(a.y_here) + (source * a.shape.capacity + row) * width + vector;
    if (row < load_relaxed(&a.arrived[source]))
      store_as_packets(sum_packets(a, source, a.rank, row, vector), exchange, load_relaxed_vector(y));
  }
}

/* 16 bytes of a row in two packets, asked for at once, then waited for. */
struct packet_pair {
  packet low, high;
};

DEVICE packet_pair load_packets(const char *at)
{
  return {{load_words_system(at)}, {load_words_system(at + SECOND_PACKET)}};
}

template <class In>
DEVICE bool add_answer(const ep_args &a, const char *at, packet_pair p, uint32_t exchange, int rank, patience &patient,
                       float (&sum)[column_of<In>::SIZE])
{
  while (!is_of(p.low, exchange) || !is_of(p.high, exchange)) {
    if (patient.ends(a, EP_RETURN, rank, true)) return false;
    p = load_packets(at);
  }
  const uint2 low = data_of(p.low), high = data_of(p.high);
  add(column_of<In>{make_uint4(low.x, low.y, high.x, high.y)}, 1.f, sum);
  return true;
}

/* The rows that two ranks answer a token with; -1: none. */
struct answer_rows_of {
  int one, two;
};

DEVICE answer_rows_of find_answers(const combine_args &c, const ep_args &a, int token, int rank)
{
  const int32_t *rows = c.slot_row + (int64_t)token * a.shape.ranks + rank;
  return {load_relaxed(rows), rank + 1 < a.shape.ranks ? load_relaxed(rows + 1) : -1};
}

DEVICE const char *answer_of(const ep_args &a, int row, int rank, int vector)
{
  return row < 0 ? nullptr : sum_packets(a, a.rank, rank, row - (int)(rank * a.shape.capacity), vector);
}

/* What the ranks have answered for 16 bytes of a token, summed in their order, two at a time; the first two are known.
 * False: the group has given up. */
template <class In>
DEVICE bool sum_answers(const combine_args &c, const ep_args &a, answer_rows_of rows, uint32_t exchange, int token,
                        int vector, float (&sum)[column_of<In>::SIZE])
{
  patience patient;
#pragma unroll 1
  for (int rank = 0; rank < a.shape.ranks; rank += 2) {
    if (rank > 0) rows = find_answers(c, a, token, rank);
    const char *one = answer_of(a, rows.one, rank, vector), *two = answer_of(a, rows.two, rank + 1, vector);
    packet_pair p = {}, q = {};
    if (one) p = load_packets(one);
    if (two) q = load_packets(two);
    if (one && !add_answer<In>(a, one, p, exchange, rank, patient, sum)) return false;
    if (two && !add_answer<In>(a, two, q, exchange, rank + 1, patient, sum)) return false;
  }
  return true;
}

/* Of what a thread collects: 16 bytes each of so many, and the rows that the first ones are answered with. */
struct to_collect {
  int items;
  answer_rows_of rows;
};

DEVICE to_collect find_first_answers(const combine_args &c, const ep_args &a)
{
  const int width = row_vectors(a), first = cta_of_grid(a) * blockDim.x + threadIdx.x;
  to_collect t = {(int)token_total(c.tokens) * width, {}};
  if (first < t.items) t.rows = find_answers(c, a, first / width, 0);
  return t;
}

/* The rows of the next answers are looked up before those at hand are waited for. */
template <class In, class Out>
DEVICE void collect_packets(const combine_args &c, const ep_args &a, to_collect t, uint32_t exchange)
{
  const int width = row_vectors(a), items = t.items, threads = ctas_of_grid(a) * blockDim.x;
  int i = cta_of_grid(a) * blockDim.x + threadIdx.x;
  answer_rows_of rows = t.rows, next;
  for (; i < items; i += threads, rows = next) {
    const int token = i / width, vector = i - token * width, at = vector * column_of<In>::SIZE;
    float sum[column_of<In>::SIZE] = {};
    if (i + threads < items) next = find_answers(c, a, (i + threads) / width, 0);
    if (!sum_answers<In>(c, a, rows, exchange, token, vector, sum)) return;
    if (c.shared) add(load_shared<In>(c, token, at), shared_weight(c, token), sum);
    store_sum<Out>(c, token, at, sum, own_outputs{});
  }
}

/* ---- few tokens: lines ---- */

/* Of what a warp collects: parts of rows, and in lane r the row that rank r answers the first one's token with. */
struct lines_to_collect {
  int items, row;
};

/* -1: it does not answer. */
static_assert(MAX_TOP_K <= WARP_SIZE, "a lane a rank");
DEVICE int find_answer_of_lane(const combine_args &c, const ep_args &a, int token)
{
  return lane_id() < a.shape.ranks ? load_relaxed(c.slot_row + (int64_t)token * a.shape.ranks + lane_id()) : -1;
}

DEVICE lines_to_collect find_first_lines(const combine_args &c, const ep_args &a)
{
  const int parts = parts_of_row(a), first = cta_of_grid(a) * WARPS + warp_id();
  lines_to_collect t = {(int)token_total(c.tokens) * parts, -1};
  if (first < t.items) t.row = find_answer_of_lane(c, a, first / parts);
  return t;
}

DEVICE line_words load_lines(const ep_args &a, int part)
{
  return load_line_system(sum_lines(a, a.rank, part) + lane_id() * 16);
}

template <class In>
DEVICE bool add_part(const ep_args &a, int part, line_words p, uint32_t exchange, int rank, patience &patience,
                     float (&sum)[column_of<In>::SIZE])
{
  while (!are_whole(p, line_flag(exchange))) {
    if (__any_sync(ALL_LANES, patience.ends(a, EP_RETURN, rank, true))) return false;
    p = load_lines(a, part);
  }
  add(column_of<In>{data_of(p)}, 1.f, sum);
  return true;
}

constexpr int LINES_IN_FLIGHT = 4;

/* As sum_answers, of a part of a row; four ranks at a time. Lanes that have half a vector add the flag up as well. */
template <class In>
DEVICE bool sum_parts(const ep_args &a, int row_of_lane, uint32_t exchange, int part, float (&sum)[column_of<In>::SIZE])
{
  patience patience;
#pragma unroll 1
  for (int rank = 0; rank < a.shape.ranks; rank += LINES_IN_FLIGHT) {
    int parts[LINES_IN_FLIGHT];
    line_words p[LINES_IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < LINES_IN_FLIGHT; j++) {
      const int row = __shfl_sync(ALL_LANES, row_of_lane, rank + j), first = (rank + j) * (int)a.shape.capacity;
      parts[j] = row < 0 ? -1 : sum_part(a, rank + j, row - first, part);
      p[j] = {};
      if (row >= 0) p[j] = load_lines(a, parts[j]);
    }
#pragma unroll
    for (int j = 0; j < LINES_IN_FLIGHT; j++)
      if (parts[j] >= 0 && !add_part<In>(a, parts[j], p[j], exchange, rank + j, patience, sum)) return false;
  }
  return true;
}
static_assert(WARP_SIZE % LINES_IN_FLIGHT == 0, "lanes have rows of ranks that there are not");

/* Two lanes have half a vector each: the first of them gets the other's. */
template <int SIZE> DEVICE void join_halves(float (&sum)[SIZE])
{
#pragma unroll
  for (int i = 0; i < SIZE / 2; i++) {
    const float other = __shfl_xor_sync(ALL_LANES, sum[i], EP_LINE_LANES);
    if (has_flag()) sum[SIZE / 2 + i] = other;
  }
}

template <class In, class Out>
DEVICE void collect_lines(const combine_args &c, const ep_args &a, lines_to_collect t, uint32_t exchange)
{
  const int width = row_vectors(a), parts = parts_of_row(a), warps = ctas_of_grid(a) * WARPS;
  int row = t.row, next = -1;
#pragma unroll 1
  for (int i = cta_of_grid(a) * WARPS + warp_id(); i < t.items; i += warps, row = next) {
    const int token = i / parts, part = i - token * parts, vector = part * EP_LINE_VECTORS + vector_of_lane(),
              at = vector * column_of<In>::SIZE;
    float sum[column_of<In>::SIZE] = {};
    if (i + warps < t.items) next = find_answer_of_lane(c, a, (i + warps) / parts);
    if (!sum_parts<In>(a, row, exchange, part, sum)) return;
    join_halves(sum);
    if (vector >= width || has_second_half()) continue;
    if (c.shared) add(load_shared<In>(c, token, at), shared_weight(c, token), sum);
    store_sum<Out>(c, token, at, sum, own_outputs{});
  }
}

/* Answers, unless a grid ahead has; then waits and adds up, unless that is to be another grid's. Its few CTAs may all
 * wait; the one behind the movers has the flags. Where it is `early`, the grid ahead is the one that answers. What put
 * and the wait for tokens have left was there before the grid ahead started, and is looked up first. */
template <class In, class Out> DEVICE void finish(const combine_args &c, const ep_args &a)
{
  const bool moves = (int)blockIdx.x < a.movers;
  look_ahead(a, a.at.back);
  const uint32_t exchange = exchange_now(a);
  const int most = moves && a.y_here ? most_arrived(a) : 0;
  const bool lined = a.packets == EP_LINED;
  to_collect t = {};
  lines_to_collect l = {};
  if (moves && a.then_waits && lined) l = find_first_lines(c, a);
  if (moves && a.then_waits && !lined) t = find_first_answers(c, a);
  if (!a.early || (a.tells && !moves)) wait_for_earlier_grids_alone();
  if (a.tells && !moves) tell_that_all_is_read(a, exchange);
  if (a.y_here) {
    if (!a.then_waits) let_next_grid_start();
    if (moves)
      answer_in_packets(a, most, exchange);
    else
      tell_that_all_is_read(a, exchange);
    add_counts(a);
  }
  if (a.then_waits) {
    if (moves && lined) {
      collect_lines<In, Out>(c, a, l, exchange);
    } else if (moves) {
      collect_packets<In, Out>(c, a, t, exchange);
    } else {
      check_token_count(c.tokens, c.fault);
      wait_for_all<WHOLE_CTA>(a, a.at.back, EP_RETURN, exchange, nullptr);
    }
  }
  if (a.early) wait_for_earlier_grids_alone(); /* whoever waits for this grid waits for that one, too */
}

/* ---- answer by the layer's combine ---- */

struct outputs_of_ranks {
  const ep_args &a;
  const int *arrived; /* a.arrived, at hand: each part begins and ends with one of them */
  unsigned number;    /* of the part, in turn over segments and slices */
  uint32_t exchange;
  bool distrusts; /* who has sent a token may wait for a sum, or a slot, without a row here */

  static constexpr bool ALWAYS_ALL = false;
  DEVICE bool all() const { return a.packets || distrusts; }
  DEVICE void wait() const
  {
    wait_for_earlier_grids_alone();
    if (!a.then_waits) let_next_grid_start();
  }
  /* Parts of segments in turn, so that no link idles; this rank's own is the last one. */
  DEVICE combine_part part(const combine_args &c, unsigned, int columns) const
  {
    combine_part p(c, number, columns);
    const unsigned group = number / p.slices, ranks = a.shape.ranks, source = (a.rank + 1 + group) % ranks,
                   row = group / ranks * p.most;
    p.first_token = source * a.shape.capacity + row;
    p.tokens = min(arrived[source] - (int)row, p.most);
    return p;
  }
  template <class Out, int VECTOR>
  DEVICE void store_row(const combine_args &c, int64_t token, int slot, int at, const float (&value)[VECTOR]) const
  {
    const unsigned capacity = (unsigned)a.shape.capacity, source = (unsigned)token / capacity,
                   row = (unsigned)token - source * capacity;
    if (a.packets) {
      uint4 data;
      store_f32<VECTOR>(reinterpret_cast<Out *>(&data), value);
      return store_as_packets(sum_packets(a, source, a.rank, row, at / VECTOR), exchange, data);
    }
    const int64_t there = ((int64_t)a.rank * capacity + row) * ep_answers(&a.shape) + slot;
    store_f32<VECTOR>(reinterpret_cast<Out *>(lane_of(a, source) + a.at.y) + there * a.shape.hidden + at, value);
  }
  template <class Out, int VECTOR>
  DEVICE void store_sum(const combine_args &c, int64_t token, int at, const float (&value)[VECTOR]) const
  {
    store_row<Out>(c, token, 0, at, value);
  }
};

/* ---- sums, as rows or lines ---- */

/* A row of y that a sum takes, from the first column of a slice on: so many vectors. */
struct addend {
  const char *from; /* NULL: it weighs nothing */
  char *to;         /* of a sum's last one: where the sum goes; else NULL */
  float weight;
  int vectors, row;
};

/* Those of several sums, one sum behind the other. */
struct addends {
  addend of[EP_RETURN_THREADS];
  int sum[EP_RETURN_THREADS], of_warp[EP_RETURN_THREADS / WARP_SIZE]; /* which sum; how many a warp has found */
};

/* How a CTA's threads share a slice of the columns: a vector each, or as lines have them. */
template <class In> struct slicing {
  int columns, slices, vector; /* the last one: of this thread */

  DEVICE slicing(const combine_args &c, const ep_args &a)
  {
    const int of_warp = a.packets ? EP_LINE_VECTORS : WARP_SIZE;
    columns = EP_RETURN_THREADS / WARP_SIZE * of_warp * column_of<In>::SIZE;
    slices = (int)ceil_div((unsigned)c.hidden, (unsigned)columns);
    vector = warp_id() * of_warp + (a.packets ? vector_of_lane() : lane_id());
  }
};

/* A slot of sum `number`, in turn over segments and slices, so that no link idles. False: no row of it is here, and the
 * token's rank knows that; else the first slot stands for those without any. */
template <class In>
DEVICE bool find_addend(const combine_args &c, const outputs_of_ranks &place, const slicing<In> &s, unsigned number,
                        int slot, addend *found)
{
  const ep_args &a = place.a;
  const unsigned slices = s.slices, ranks = a.shape.ranks, capacity = (unsigned)a.shape.capacity;
  const unsigned group = number / slices, slice = number - group * slices, row = group / ranks,
                 source = (a.rank + 1 + (group - row * ranks)) % ranks;
  if (row >= place.arrived[source]) return false;
  const int64_t token = source * capacity + row, there = (int64_t)a.rank * capacity + row, first = slice * s.columns;
  const int line = load_relaxed(c.slot_row + token * c.top_k + slot);
  const float weight = c.pair_weights ? load_relaxed(c.pair_weights + token * c.pair_weights_ld + slot) : 1.f;
  const bool known = line < c.rows_cap && line >= ROW_DROPPED;
  if (!known && slice == 0) report_fault(c.fault, FAULT_ROUTE, slot, token);
  if (line < 0 && !(slot == 0 && place.distrusts)) return false;
  const bool adds = line >= 0 && known && weight != 0;
  found->from = adds ? static_cast<const char *>(c.y) + (line * c.y_ld + first) * sizeof(In) : nullptr;
  found->to = a.packets ? sum_lines(a, source, sum_part(a, a.rank, row, slice * (EP_RETURN_THREADS / WARP_SIZE)))
                        : lane_of(a, source) + a.at.y + (there * a.shape.hidden + first) * sizeof(In);
  found->weight = adds && !c.on_input ? weight : adds;
  found->vectors = (int)min((int64_t)s.columns, c.hidden - first) / column_of<In>::SIZE;
  found->row = line;
  return true;
}

/* Of sums number, number + movers ..., a thread a slot; returns how many there are. All know them when all have met. */
static_assert(MAX_TOP_K <= EP_RETURN_THREADS, "a sum at least");
template <class In>
DEVICE int find_addends(const combine_args &c, const outputs_of_ranks &place, const slicing<In> &slices,
                        unsigned number, unsigned end, addends &s)
{
  const int sum = (int)threadIdx.x / c.top_k, slot = (int)threadIdx.x - sum * c.top_k;
  const unsigned own = number + sum * place.a.movers;
  const bool asks = sum < EP_RETURN_THREADS / c.top_k && own < end;
  addend one = {};
  const bool here = asks && find_addend<In>(c, place, slices, own, slot, &one);
  const uint32_t who = __ballot_sync(ALL_LANES, here);
  if (lane_id() == 0) s.of_warp[warp_id()] = __popc(who);
  __syncthreads();
  int at = __popc(who & ((1u << lane_id()) - 1)), all = 0;
  for (int w = 0; w < EP_RETURN_THREADS / WARP_SIZE; w++) {
    if (w == warp_id()) at += all;
    all += s.of_warp[w];
  }
  if (here) s.of[at] = one, s.sum[at] = sum;
  __syncthreads();
  if ((int)threadIdx.x + 1 < all && s.sum[threadIdx.x] == s.sum[threadIdx.x + 1]) s.of[threadIdx.x].to = nullptr;
  return all;
}

/* A thread's vector of a sum; lines go as a whole, whatever their row has of them. */
template <class In>
DEVICE void store_addends(const outputs_of_ranks &place, const addend &last, int vector,
                          const float (&sum)[column_of<In>::SIZE])
{
  uint4 data;
  store_f32<column_of<In>::SIZE>(reinterpret_cast<In *>(&data), sum);
  if (!place.a.packets) {
    if (vector < last.vectors) reinterpret_cast<uint4 *>(last.to)[vector] = data;
  } else if (warp_id() * EP_LINE_VECTORS < last.vectors) {
    store_as_lines(last.to + warp_id() * (EP_LINES * EP_LINE), place.exchange, data);
  }
}

constexpr int ADDENDS_AT_ONCE = 8;
template <class In> struct columns_at_once {
  column_of<In> y[ADDENDS_AT_ONCE];

  DEVICE void load(const addends &s, int vector, int first, int count)
  {
#pragma unroll
    for (int j = 0; j < ADDENDS_AT_ONCE; j++) {
      const addend &one = s.of[min(first + j, count - 1)];
      const bool has = first + j < count && one.from && vector < one.vectors;
      y[j] = {ld_global_no_allocate(one.from + vector * 16, has)};
    }
  }

  DEVICE void add_up(const combine_args &c, const outputs_of_ranks &place, const addends &s, int vector, int first,
                     int count, float (&sum)[column_of<In>::SIZE]) const
  {
    constexpr int SIZE = column_of<In>::SIZE;
#pragma unroll
    for (int j = 0; j < ADDENDS_AT_ONCE; j++) {
      if (first + j >= count) return;
      const addend &one = s.of[first + j];
      add(y[j], one.weight, sum);
      if (!one.to) continue;
#pragma unroll
      for (int i = 0; i < SIZE; i++) sum[i] *= c.out_scale;
      store_addends<In>(place, one, vector, sum);
#pragma unroll
      for (int i = 0; i < SIZE; i++) sum[i] = 0;
    }
  }
};

/* As combine does (combine.cuh): lines of y that the list has, and what falls to the slice of these rows' h. */
template <class In>
DEVICE void discard_addends(const combine_args &c, const ep_args &a, const slicing<In> &slices, unsigned number,
                            int count, const addends &s)
{
  const int of_y = slices.columns * (int)sizeof(In) / DISCARD_LINE,
            of_h = (int)(c.protocol.discard_h_row / DISCARD_LINE);
#pragma unroll 1
  for (int i = threadIdx.x; i < count * of_y; i += EP_RETURN_THREADS) {
    const addend &one = s.of[i / of_y];
    const int at = i % of_y * DISCARD_LINE;
    if (one.from && at < one.vectors * 16) discard_l2(one.from + at);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < count * of_h; i += EP_RETURN_THREADS) {
    const addend &one = s.of[i / of_h];
    const unsigned line = i % of_h, slice = (number + s.sum[i / of_h] * a.movers) % slices.slices;
    if (one.from && line % slices.slices == slice)
      discard_l2(static_cast<const char *>(c.protocol.discard_h) + one.row * c.protocol.discard_h_row +
                 line * DISCARD_LINE);
  }
}

/* A rank of several has few of a token's k rows, and memory's latency is the limit: so rows that are here are listed
 * first, of many sums, and eight to sixteen of them a thread are in flight, whosever they are. */
template <class In>
DEVICE void sum_to_ranks(const combine_args &c, const slicing<In> &slices, const outputs_of_ranks &place)
{
  __shared__ addends s;
  const ep_args &a = place.a;
  const unsigned end = a.shape.ranks * (unsigned)a.shape.capacity * slices.slices,
                 step = EP_RETURN_THREADS / c.top_k * a.movers;
  if (!c.protocol.early_inputs) place.wait();
#pragma unroll 1
  for (unsigned number = blockIdx.x; number < end; number += step) {
    const int count = find_addends<In>(c, place, slices, number, end, s);
    float sum[column_of<In>::SIZE] = {};
    columns_at_once<In> now, next;
    if (c.protocol.early_inputs && number == blockIdx.x) place.wait();
    __syncthreads();
    if (count > 0) now.load(s, slices.vector, 0, count);
#pragma unroll 1
    for (int first = 0; first < count; first += ADDENDS_AT_ONCE, now = next) {
      next.load(s, slices.vector, first + ADDENDS_AT_ONCE, count);
      now.add_up(c, place, s, slices.vector, first, count, sum);
    }
    __syncthreads();
    if (c.protocol.discard_h) discard_addends<In>(c, a, slices, number, count, s);
  }
}

/* ---- answer by the layer's combine, of whatever kind ---- */

template <class In, int COLUMNS>
DEVICE void combine_to_ranks(const combine_args &c, const ep_args &a, uint32_t exchange)
{
  const unsigned most = COMBINE_TOKENS(c.top_k), slices = ceil_div(c.hidden, COLUMNS),
                 parts = a.shape.ranks * (((unsigned)a.shape.capacity + most - 1) / most) * slices;
  __shared__ int arrived[EP_MAX_RANKS];
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x) arrived[r] = load_relaxed(&a.arrived[r]);
  const bool distrusts = has_been_distrusted(a, exchange);
  __syncthreads();
  if (c.reduce && a.packets != EP_PACKETS)
    sum_to_ranks<In>(c, slicing<In>(c, a), outputs_of_ranks{a, arrived, 0, exchange, distrusts});
  else
#pragma unroll 1
    for (unsigned i = blockIdx.x; i < parts; i += a.movers)
      combine_gather<In, In, COLUMNS>(c, outputs_of_ranks{a, arrived, i, exchange, distrusts});
  add_counts(a);
}

#endif
