/*
 * The exchange of ep.h between GPUs that reach each other's memory. Ranks push: 16-byte stores, a fence at system
 * scope, one flag a rank; whoever waits polls its own memory. Only waits spin, one CTA each, and none without a limit
 * of time.
 */
#include "ep/flags.cuh"
#include "ep/put.cuh"

/* ---- before a put ---- */

/* Gives every token its row of the segment at each rank, in the tokens' order: segments are the same on every run. One
 * CTA: 1,024 tokens take it some 3 us. */
extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS) cumoe_ep_slots(const __grid_constant__ ep_args a)
{
  __shared__ slots_smem s;
  wait_for_earlier_grids();
  const int64_t tokens = token_total(a.tokens);
  for (int first = 0; first < a.shape.ranks; first += WARP_SIZE) {
    if (warp_id() == 0) s.before[lane_id()] = 0;
    __syncthreads();
    for (int64_t token = threadIdx.x; token - threadIdx.x < tokens; token += blockDim.x)
      take_slots(a, s, token, token < tokens, first);
    if (warp_id() == 0 && first + lane_id() < a.shape.ranks) a.sent[first + lane_id()] = s.before[lane_id()];
    __syncthreads();
  }
}

/* How many of the tokens that the device has counted fall to this round. */
extern "C" __global__ void __launch_bounds__(WARP_SIZE) cumoe_ep_count(const __grid_constant__ ep_args a)
{
  wait_for_earlier_grids();
  if (threadIdx.x != 0) return;
  report_token_count(a.all_tokens, a.fault);
  *a.present = (int32_t)min(max(token_total(a.all_tokens) - a.first_token, (int64_t)0), a.tokens.count);
}

/* ---- waits ---- */

constexpr int IDS_IN_FLIGHT = 4;

/* What a peer sends is not trusted. Rows past its tokens hold what earlier exchanges left: they count as -1, no
 * expert. */
DEVICE int take_id(const ep_args &a, const int32_t *arrived, unsigned at, int id)
{
  const unsigned k = a.shape.top_k, room = (unsigned)a.shape.capacity * k, source = at / room,
                 slot = at - source * room;
  if (source >= (unsigned)a.shape.ranks || slot >= arrived[source] * k || id == -1) return -1;
  if (id >= 0 && id < a.local_experts) return id;
  report_fault(a.fault, FAULT_EXPERT_ID, slot % k, slot / k);
  return -1;
}

/* Both arrays' regions end on 256 bytes, so the last vector may hang over. */
DEVICE void take_ids(const ep_args &a, const int32_t *arrived)
{
  const unsigned ids = (unsigned)a.shape.ranks * (unsigned)a.shape.capacity * a.shape.top_k,
                 vectors = ceil_div(ids, 4u);
  const int4 *from = reinterpret_cast<const int4 *>(lane_of(a, a.rank) + a.at.ids);
  int4 *to = reinterpret_cast<int4 *>(a.ids_here), v[IDS_IN_FLIGHT];
  for (unsigned first = threadIdx.x; first < vectors; first += IDS_IN_FLIGHT * blockDim.x) {
#pragma unroll
    for (int j = 0; j < IDS_IN_FLIGHT; j++)
      if (first + j * blockDim.x < vectors) v[j] = from[first + j * blockDim.x];
#pragma unroll
    for (int j = 0; j < IDS_IN_FLIGHT; j++) {
      const unsigned i = first + j * blockDim.x, at = i * 4;
      if (i >= vectors) break;
      to[i] = make_int4(take_id(a, arrived, at, v[j].x), take_id(a, arrived, at + 1, v[j].y),
                        take_id(a, arrived, at + 2, v[j].z), take_id(a, arrived, at + 3, v[j].w));
    }
  }
}

/* Leaves in a.arrived how many tokens each rank has sent, and in a.ids_here their experts. */
DEVICE void wait_for_tokens(const ep_args &a)
{
  __shared__ int32_t arrived[EP_MAX_RANKS];
  const bool all = wait_for_all(a, a.at.in, EP_DISPATCH, arrived);
  let_next_grid_start();
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x) {
    if (!all) arrived[r] = 0;
    a.arrived[r] = arrived[r];
  }
  __syncthreads();
  take_ids(a, arrived);
}

DEVICE void wait_for_answers(const ep_args &a)
{
  wait_for_all(a, a.at.back, EP_RETURN, nullptr);
  let_next_grid_start();
}

extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS) cumoe_ep_wait_tokens(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.in);
  wait_for_earlier_grids_alone();
  wait_for_tokens(a);
}

extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS) cumoe_ep_wait_answers(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.back);
  wait_for_earlier_grids_alone();
  wait_for_answers(a);
}

/* then_waits: nothing comes between the put and its wait, so the CTA that has told the others also waits for them,
 * which saves a grid. */
extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS) cumoe_ep_put(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.in);
  look_ahead_at_places(a);
  wait_for_earlier_grids_alone();
  if (!a.then_waits) let_next_grid_start();
  const unsigned tokens = (unsigned)token_total(a.tokens);
  counters *c = counters_of(a);
  const uint32_t exchange = (uint32_t)c->exchanges + 1; /* none but the last CTA changes it, when all have come */
  put_rows(a, tokens);
  put_slots(a, tokens);
  if (tell_when_all_have_come(a, a.at.in, a.slots ? a.sent : nullptr, tokens, &c->put, exchange) && a.then_waits)
    wait_for_tokens(a);
}

/* ---- answer ---- */

/* Rows are dealt to the warps rank by rank in turn. */
struct answer_row {
  int64_t token; /* in all segments */
  int source, answer;
  unsigned row; /* in its segment */
  bool here;    /* this rank has it: of the slot, or of any */
};

DEVICE answer_row row_to_answer(const ep_args &a, unsigned i, unsigned end)
{
  const unsigned ranks = a.shape.ranks, answers = ep_answers(&a.shape);
  answer_row r;
  r.source = (int)((a.rank + i) % ranks);
  r.row = i / ranks;
  r.answer = (int)(r.row % answers);
  r.token = r.source * a.shape.capacity + r.row / answers;
  const bool sent = i < end && r.row < a.arrived[r.source] * answers;
  const int slot = a.shape.exact ? r.answer : lane_id();
  r.here = __any_sync(ALL_LANES, sent && slot < a.shape.top_k && a.ids_here[r.token * a.shape.top_k + slot] >= 0);
  return r;
}

DEVICE unsigned rows_to_answer(const ep_args &a)
{
  int most = 0;
  for (int r = lane_id(); r < a.shape.ranks; r += WARP_SIZE) most = max(most, a.arrived[r]);
  return (unsigned)warp_max(most) * ep_answers(&a.shape) * a.shape.ranks;
}

DEVICE void answer_rows(const ep_args &a)
{
  const int width = row_vectors(a);
  const int64_t bytes = (int64_t)width * 16, answers = ep_answers(&a.shape), here = a.rank * a.shape.capacity * answers;
  const unsigned end = rows_to_answer(a);
  answer_row r = row_to_answer(a, first_row(), end), next;
  for (unsigned i = first_row(); i < end; i += row_step(), r = next) {
    row_part p;
    if (r.here) load_part(p, static_cast<const char *>(a.y_here) + (r.token * answers + r.answer) * bytes, width);
    next = row_to_answer(a, i + row_step(), end);
    if (r.here) store_part(p, lane_of(a, r.source) + a.at.y + (here + r.row) * bytes, width);
  }
}

/* Rows of each expert, summed over rounds: those of the first one lie there already. */
DEVICE void add_counts(const ep_args &a)
{
  if (!a.counts || cta_of_grid() != 0) return;
  for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x) a.counts_sum[e] += a.counts[e];
}

extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS) cumoe_ep_answer(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.back);
  wait_for_earlier_grids_alone();
  if (!a.then_waits) let_next_grid_start();
  counters *c = counters_of(a);
  const uint32_t exchange = (uint32_t)c->exchanges;
  answer_rows(a);
  add_counts(a);
  if (tell_when_all_have_come(a, a.at.back, nullptr, 0, &c->answered, exchange) && a.then_waits) wait_for_answers(a);
}
