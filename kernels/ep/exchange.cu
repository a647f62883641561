/*
 * The exchange of ep.h between GPUs that reach each other's memory. Ranks push: 16-byte stores, then flags, or packets
 * that need none; whoever waits polls its own memory. Only waits spin, one CTA each, of few tokens up to 64 in the last
 * grid, and none without a limit of time.
 */
#include "ep/answer.cuh"
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

/* What a peer sends is not trusted. */
DEVICE int checked_id(const ep_args &a, unsigned slot, int id, uint32_t exchange)
{
  const unsigned k = a.shape.top_k;
  if (id >= -1 && id < a.local_experts) return id;
  report_fault(a.fault, FAULT_EXPERT_ID, slot % k, slot / k);
  counters_of(a)->distrusted = (int32_t)exchange;
  return -1;
}

/* Rows past a rank's tokens hold what earlier exchanges left: they count as -1, no expert. */
DEVICE int take_id(const ep_args &a, const int32_t *arrived, unsigned at, int id, uint32_t exchange)
{
  const unsigned k = a.shape.top_k, room = (unsigned)a.shape.capacity * k, source = at / room,
                 slot = at - source * room;
  if (source >= (unsigned)a.shape.ranks || slot >= arrived[source] * k) return -1;
  return checked_id(a, slot, id, exchange);
}

/* A CTA's share. Both arrays' regions end on 256 bytes, so the last vector may hang over. */
DEVICE void take_ids(const ep_args &a, const int32_t *arrived, uint32_t exchange, unsigned cta, unsigned ctas)
{
  const unsigned ids = (unsigned)a.shape.ranks * (unsigned)a.shape.capacity * a.shape.top_k,
                 vectors = ceil_div(ids, 4u);
  const int4 *from = reinterpret_cast<const int4 *>(lane_of(a, a.rank) + a.at.ids);
  const unsigned step = ctas * blockDim.x;
  int4 *to = reinterpret_cast<int4 *>(a.ids_here), v[IDS_IN_FLIGHT];
  for (unsigned first = cta * blockDim.x + threadIdx.x; first < vectors; first += IDS_IN_FLIGHT * step) {
#pragma unroll
    for (int j = 0; j < IDS_IN_FLIGHT; j++)
      if (first + j * step < vectors) v[j] = from[first + j * step];
#pragma unroll
    for (int j = 0; j < IDS_IN_FLIGHT; j++) {
      const unsigned i = first + j * step, at = i * 4;
      if (i >= vectors) break;
      to[i] = make_int4(take_id(a, arrived, at, v[j].x, exchange), take_id(a, arrived, at + 1, v[j].y, exchange),
                        take_id(a, arrived, at + 2, v[j].z, exchange), take_id(a, arrived, at + 3, v[j].w, exchange));
    }
  }
}

/* What the wait for tokens finds out, in shared memory. */
struct arrivals {
  uint32_t carried[EP_MAX_RANKS];
  int32_t tokens[EP_MAX_RANKS];
  bool packed[EP_MAX_RANKS]; /* their slots come as packets */
  bool any_packed;
};

/* A slot that comes as a packet, and was looked for, goes to where it would lie otherwise. */
DEVICE int take_packet(const ep_args &a, uint32_t exchange, int source, unsigned slot, packet found, patience &p)
{
  const unsigned k = a.shape.top_k;
  while (!is_of(found, exchange)) {
    if (p.ends(a, EP_DISPATCH, (int)source, true)) return -1;
    found = {load_words_system(slot_packet(a, a.rank, source, (int)(slot / k), (int)(slot % k)))};
  }
  const uint2 data = data_of(found);
  const int64_t at = source * a.shape.capacity * k + slot;
  reinterpret_cast<float *>(lane_of(a, a.rank) + a.at.weights)[at] = __uint_as_float(data.y);
  if (a.aside) reinterpret_cast<int32_t *>(lane_of(a, a.rank) + a.at.ids)[at] = (int32_t)data.x;
  return checked_id(a, slot, (int)data.x, exchange);
}

/* Where some come as packets: several of a thread's are looked for at once. */
template <int FIRST> DEVICE void take_ids_and_packets(const ep_args &a, const arrivals &s, uint32_t exchange)
{
  const unsigned k = a.shape.top_k, room = (unsigned)a.shape.capacity * k, ids = a.shape.ranks * room,
                 threads = waiting_threads<FIRST>();
  const int32_t *from = reinterpret_cast<const int32_t *>(lane_of(a, a.rank) + a.at.ids);
  patience p;
#pragma unroll 1
  for (unsigned first = threadIdx.x; first < ids; first += IDS_IN_FLIGHT * threads) {
    packet found[IDS_IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < IDS_IN_FLIGHT; j++) {
      const unsigned i = first + j * threads, source = i / room, slot = i - source * room;
      found[j] = {};
      if (i < ids && s.packed[source] && slot < s.tokens[source] * k)
        found[j] = {load_words_system(slot_packet(a, a.rank, source, (int)(slot / k), (int)(slot % k)))};
    }
#pragma unroll
    for (int j = 0; j < IDS_IN_FLIGHT; j++) {
      const unsigned i = first + j * threads, source = i / room, slot = i - source * room;
      if (i >= ids) break;
      int id = -1;
      if (slot < s.tokens[source] * k)
        id = s.packed[source] ? take_packet(a, exchange, source, slot, found[j], p)
                              : checked_id(a, slot, from[i], exchange);
      a.ids_here[i] = id;
    }
  }
}

/* Leaves in a.arrived how many tokens each rank has sent, and in a.ids_here their experts; of rows alone nothing. */
template <int FIRST> DEVICE void wait_for_tokens(const ep_args &a, arrivals &s, uint32_t exchange)
{
  const bool all = wait_for_all<FIRST>(a, a.at.in, EP_DISPATCH, exchange, s.carried);
  wait_for_earlier_grids_alone(); /* if these have not yet */
  let_next_grid_start();
  if (threadIdx.x == 0 && !a.more) counters_of(a)->exchanges = exchange;
  if (a.puts == EP_PUTS_ROWS) return;
  if (threadIdx.x == 0) s.any_packed = false;
  meet<FIRST>();
  for (int r = threadIdx.x; r < a.shape.ranks; r += waiting_threads<FIRST>()) {
    s.packed[r] = s.carried[r] & EP_PACKED;
    const int64_t room = s.packed[r] ? a.shape.packets : a.shape.capacity;
    const bool asks = all && !(a.own && r == a.rank);
    a.arrived[r] = s.tokens[r] = asks ? (int32_t)min((int64_t)(s.carried[r] & ~EP_PACKED), room) : 0;
    if (s.packed[r]) s.any_packed = true;
  }
  meet<FIRST>();
  if (a.aside && !s.any_packed) return;
  if (FIRST != WHOLE_CTA || s.any_packed)
    take_ids_and_packets<FIRST>(a, s, exchange);
  else
    take_ids(a, s.tokens, exchange, 0, 1);
}

DEVICE void wait_for_answers(const ep_args &a, uint32_t exchange)
{
  wait_for_all<WHOLE_CTA>(a, a.at.back, EP_RETURN, exchange, nullptr);
  let_next_grid_start();
}

extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS, 1) cumoe_ep_wait_tokens(const __grid_constant__ ep_args a)
{
  __shared__ arrivals s;
  look_ahead(a, a.at.in);
  wait_for_earlier_grids_alone();
  wait_for_tokens<WHOLE_CTA>(a, s, exchange_now(a) + a.aside);
}

/* Aside, behind the wait for slots: one CTA would be at it for 30 us with 8192 tokens of four ranks. */
extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS, 1) cumoe_ep_take_ids(const __grid_constant__ ep_args a)
{
  __shared__ int32_t arrived[EP_MAX_RANKS];
  wait_for_earlier_grids();
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x) arrived[r] = a.arrived[r];
  __syncthreads();
  take_ids(a, arrived, exchange_now(a) + 1, blockIdx.x, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS, 1)
    cumoe_ep_wait_answers(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.back);
  wait_for_earlier_grids_alone();
  wait_for_answers(a, exchange_now(a));
}

/* ---- put ---- */

DEVICE void wait_in_put(const ep_args &a)
{
  wait_for_earlier_grids_alone();
  if (!a.then_waits) let_next_grid_start();
}

DEVICE unsigned *put_counter(const ep_args &a)
{
  return a.puts == EP_PUTS_SLOTS ? &counters_of(a)->put_slots : &counters_of(a)->put;
}

/* then_waits: nothing comes between the put and its wait, so a CTA that has told the others also waits for them, which
 * saves a grid. */
extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS, 1) cumoe_ep_put(const __grid_constant__ ep_args a)
{
  __shared__ arrivals s;
  look_ahead(a, a.at.in);
  look_ahead_at_places(a);
  wait_in_put(a);
  if ((int)blockIdx.x >= a.movers) return fill_with_ones(a);
  const unsigned tokens = tokens_of_round(a);
  const uint32_t exchange = exchange_now(a) + 1; /* nobody changes it before all CTAs have come */
  put_tokens(a, tokens);
  if (tell_all(a, a.at.in, a.slots ? a.sent : nullptr, tokens, put_counter(a), exchange) && a.then_waits)
    wait_for_tokens<WHOLE_CTA>(a, s, exchange);
}

/* The rows of x, which the router has read as well, are on their way while it and the gate work, and are told as soon
 * as they have been stored: what the gate finds follows in packets. Whoever has moved them waits for the others
 * meanwhile. */
extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS, 1)
    cumoe_ep_gate_put(const __grid_constant__ gate_args g, const __grid_constant__ ep_args a)
{
  __shared__ arrivals s;
  __shared__ places_at_hand at_hand;
  constexpr int MOVERS = HALF * WARP_SIZE;
  look_ahead(a, a.at.in);
  look_ahead_at_places(a);
  const bool ahead = a.packets && tells_for_itself(a);
  if (!a.early) wait_in_put(a);
  if ((int)blockIdx.x >= a.movers) return fill_with_ones(a);
  const unsigned tokens = tokens_of_round(a), flag = tokens | (a.packets ? EP_PACKED : 0);
  const uint32_t exchange = exchange_now(a) + 1;
  __syncthreads(); /* all threads know it before any of them tells: who has heard of all changes it */
  if (has_rows()) {
    if (a.puts != EP_PUTS_SLOTS) put_rows_of_half(a, tokens);
    if (ahead) {
      meet<MOVERS>();
      tell(a, a.at.in, nullptr, flag, exchange, cta_of_grid(a), ctas_of_grid(a), MOVERS);
      if (cta_of_grid(a) == 0) wait_for_tokens<MOVERS>(a, s, exchange);
    }
  } else {
    const place_table t = take_places(g, a, at_hand);
    if (a.early) wait_in_put(a);
    check_token_count(g.tokens, g.fault);
    gate_and_put_slots(g, a, t, at_hand.bias, tokens, exchange);
  }
  if (ahead) return;
  if (tell_all(a, a.at.in, nullptr, flag, put_counter(a), exchange) && a.then_waits)
    wait_for_tokens<WHOLE_CTA>(a, s, exchange);
}

/* ---- answer ---- */

extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS, 1) cumoe_ep_answer(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.back);
  wait_for_earlier_grids_alone();
  if (!a.then_waits) let_next_grid_start();
  const uint32_t exchange = exchange_now(a);
  answer_rows(a, has_been_distrusted(a, exchange));
  add_counts(a);
  if (tell_all(a, a.at.back, nullptr, 0, &counters_of(a)->answered, exchange) && a.then_waits)
    wait_for_answers(a, exchange);
}

/* Of packets there is nothing to tell but that the experts have read what was put. */
template <class In, int COLUMNS> DEVICE void return_rows(const combine_args &c, const ep_args &a)
{
  static_assert(COLUMNS * sizeof(In) == EP_RETURN_THREADS * 16, "16 bytes a thread");
  look_ahead(a, a.at.back);
  const uint32_t exchange = exchange_now(a); /* since the wait for tokens: several grids ago */
  combine_to_ranks<In, COLUMNS>(c, a, exchange);
  if (a.packets && cta_of_grid(a) == 0) tell_that_all_is_read(a, exchange);
  if (a.packets || a.more) return;
  if (tell_all(a, a.at.back, nullptr, 0, &counters_of(a)->answered, exchange) && a.then_waits)
    wait_for_answers(a, exchange);
}

#define RETURN(name, In, COLUMNS)                                                                                      \
  extern "C" __global__ void __launch_bounds__(EP_RETURN_THREADS, EP_RETURN_RESIDENT)                                  \
      cumoe_ep_return_##name(const __grid_constant__ combine_args c, const __grid_constant__ ep_args a)                \
  {                                                                                                                    \
    return_rows<In, COLUMNS>(c, a);                                                                                    \
  }
RETURN(bf16, bf16, 1024)
RETURN(f16, f16, 1024)
RETURN(f32, float, 512)

#define FINISH(in, out, In, Out)                                                                                       \
  extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS, 2)                                                     \
      cumoe_ep_finish_##in##_##out(const __grid_constant__ combine_args c, const __grid_constant__ ep_args a)          \
  {                                                                                                                    \
    finish<In, Out>(c, a);                                                                                             \
  }
FINISH(bf16, bf16, bf16, bf16)
FINISH(bf16, f32, bf16, float)
FINISH(f16, f16, f16, f16)
FINISH(f16, f32, f16, float)
FINISH(f32, f32, float, float)
