/* few: the gate's and the map's work. Every CTA chooses experts for itself; some write down what all want to know. */
#ifndef CUMOE_FEW_ROUTING_CUH
#define CUMOE_FEW_ROUTING_CUH

#include "few/layout.cuh"

/* ---- choosing, by all warps of every CTA ---- */

constexpr int FEW_KEYS = 8; /* a lane's */

/* Lies where stages will be. */
template <class S> struct few_gate_smem {
  uint32_t key[S::TOKENS][FEW_KEYS][WARP_SIZE];
  gate_scratch scratch[S::THREADS / WARP_SIZE];
};

/* The keys of all scores, an expert a thread. */
template <class S> DEVICE void score_experts(const gate_args &a, few_gate_smem<S> &s)
{
  const int rows = ceil_div(a.experts, WARP_SIZE), items = (int)token_total(a.tokens) * rows;
#pragma unroll 1
  for (int item = warp_id(); item < items; item += S::THREADS / WARP_SIZE) {
    const int token = item / rows, row = item - token * rows, e = row * WARP_SIZE + lane_id();
    const int64_t logits = token * a.logits_ld;
    const float l = e < a.experts ? exact_cap(a.softcap, load_logit(a, logits + e)) : -INFINITY;
    s.key[token][row][lane_id()] = key_of_score(a, {logits, 0.f, 0.f}, e, l);
  }
  __syncthreads();
}

/* The ids of a token's slots, by a warp. N: keys of a lane. */
template <int N, class S> DEVICE int choose_few(const gate_args &a, int token, few_gate_smem<S> &s)
{
  gate_token t = {token * a.logits_ld, 0.f, 0.f};
  candidates<N> c;
  if (N < FEW_KEYS || GATE_BY_LOGIT(a)) {
    keys_of_logits(a, t, c.key, false);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) c.key[i] = i * WARP_SIZE < a.experts ? s.key[token][i][lane_id()] : KEY_NONE;
    if (a.n_group > 0) close_groups_of_rows(a, c.key);
  }
  return take_best(a, a.top_k, c, nullptr, s.scratch[warp_id()]).id;
}

/* Leaves the ids in the table. */
template <class S> DEVICE void choose_experts(gate_args a, few_smem<S> &smem)
{
  a.logits_dtype = DT_F32; /* the router's */
  few_gate_smem<S> &s = *reinterpret_cast<few_gate_smem<S> *>(&smem.stages);
  static_assert(sizeof s <= sizeof smem.stages, "room for it");
  const bool by_logit = GATE_BY_LOGIT(a);
  if (!by_logit) score_experts(a, s);
#pragma unroll 1
  for (int token = warp_id(); token < token_total(a.tokens); token += S::THREADS / WARP_SIZE) {
    const int id =
        by_logit && a.experts <= 4 * WARP_SIZE ? choose_few<4>(a, token, s) : choose_few<FEW_KEYS>(a, token, s);
    if (lane_id() < a.top_k) smem.table.id[token * a.top_k + lane_id()] = (int16_t)id;
  }
  __syncthreads();
}

/* ---- publishing, by one warp ---- */

/* The gate's results, and the weights for all CTAs: by whoever has this share of up, a token each. Nobody wants them
 * before the end of down. */
template <class S> DEVICE void write_routing(const few_args &args, const few_table<S::PAIRS> &table, int share)
{
  gate_args a = args.gate;
  a.logits_dtype = DT_F32;
#pragma unroll 1
  for (int token = gridDim.x - 1 - share; token < token_total(a.tokens); token += gridDim.x) {
    const int64_t pair = token * (int64_t)a.top_k + lane_id();
    const gate_slot slot = weigh_slots<FEW_KEYS>(a, token, lane_id() < a.top_k ? table.id[pair] : -1);
    if (lane_id() < a.top_k) store_relaxed(args.protocol.weights + pair, (uint64_t)__float_as_uint(slot.weight));
    store_slot(a, token, slot);
  }
}

/* A pair's weight, as soon as it is written: by a CTA that has started, so the wait ends. */
DEVICE uint64_t poll_weight(const uint64_t *weight)
{
  uint64_t value;
  do value = load_relaxed(weight);
  while (value == FEW_NOT_WRITTEN);
  return value;
}

/* The weights of all pairs, for the outputs; 0 for a dropped pair. By one warp, as each poll is a trip to L2. */
template <class S> DEVICE void take_weights(const few_args &args, few_smem<S> &smem)
{
  few_table<S::PAIRS> &t = smem.table;
  const int top_k = args.map.top_k, pairs = (int)token_total(args.map.tokens) * top_k;
  for (int pair = lane_id(); pair < pairs; pair += WARP_SIZE) {
    const int token = pair / top_k;
    const float weight =
        args.protocol.weights
            ? __uint_as_float((uint32_t)poll_weight(args.protocol.weights + pair))
            : load_relaxed(args.out.pair_weights + token * args.out.pair_weights_ld + (pair - token * top_k));
    t.weight[pair] = t.to[pair] >= 0 || (t.to[pair] == ROW_IDENTITY && args.out.x) ? weight : 0.f;
  }
  mbarrier_arrive(&smem.weights_ready);
}

/* The map's counts, by the last CTA. */
template <class S> DEVICE void report_counts(const map_args &a, const few_table<S::PAIRS> &t)
{
  if (blockIdx.x != gridDim.x - 1 || (!a.counts_out && !a.load)) return;
  for (int e = lane_id(); e < a.local_experts; e += WARP_SIZE) {
    int count = 0;
    for (int pair = 0; pair < S::PAIRS; pair++) count += t.to[pair] == e;
    if (a.counts_out) a.counts_out[e] = count;
    if (a.load) a.load[e] += count;
  }
}

#endif
