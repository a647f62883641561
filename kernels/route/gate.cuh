/*
 * The gate: a token's experts and their weights from its logits, by a warp. Logits are read into registers once, and
 * again only where they were chosen.
 */
#ifndef CUMOE_GATE_CUH
#define CUMOE_GATE_CUH

#include "route/ranks.cuh"
#include "route/rules.cuh"
#include "route/topk.cuh"

/* Lane j: the weight of slot j from its soft-capped logit, NaN where there is none. RULES: of gates that have them
 * (GATE_HAS_RULES). */
template <bool RULES> DEVICE float slot_weight(const gate_args &a, const gate_token &t, int id, float l)
{
  float weight = 0;
  if (RULES && a.weigh == SCORE_SPARSEMIXER) {
    weight = mixed_weight(a, t, id, l);
  } else if (weigh_after(a)) {
    float term = softmax_term(l, warp_max(fmaxf(l, -INFINITY))), sum = warp_sum(term);
    weight = sum > 0 ? term / sum : 0.f;
  } else if (l > -INFINITY) {
    weight = score_of(a, t, l);
  }
  if (a.flags & ROUTE_RENORMALIZE) {
    const float scale = RENORM_SCALE(a);
    weight *= scale;
    const float divisor = fmaxf(fmaf(a.renorm_eps, scale, warp_sum(weight)), a.renorm_min * scale);
    weight = divisor > 0 ? weight / divisor : 0.f;
  }
  weight *= a.routed_scale;
  return RULES && a.expert_scale && weight != 0 ? weight * a.expert_scale[id] : weight;
}

/* Slot j, in lane j. */
struct gate_slot {
  int id;
  float weight;
};

DEVICE void store_id(const gate_args &a, int64_t token, int id)
{
  if (a.ids_dtype == DT_I64)
    static_cast<int64_t *>(a.ids)[token * a.ids_ld + lane_id()] = id;
  else
    static_cast<int32_t *>(a.ids)[token * a.ids_ld + lane_id()] = id;
}

DEVICE void store_weight(const gate_args &a, int64_t token, float weight)
{
  a.weights[token * a.weights_ld + lane_id()] = weight;
}

DEVICE void store_slot(const gate_args &a, int64_t token, gate_slot slot)
{
  if (lane_id() >= a.top_k) return;
  store_id(a, token, slot.id);
  store_weight(a, token, slot.weight);
}

DEVICE void report_nan(const gate_args &a, int64_t token, unsigned first_nan)
{
  if (first_nan != ~0u && lane_id() == 0) report_token_fault(a.tokens, a.fault, FAULT_NAN_LOGIT, first_nan, token);
}

/* What route_token returns, where lane j knows the id of slot j. N: logits a lane holds in registers. */
template <int N> DEVICE gate_slot weigh_slots(const gate_args &a, int64_t token, int id)
{
  gate_token t = {token * a.logits_ld, 0.f, 0.f};
  report_nan(a, token, __reduce_min_sync(ALL_LANES, sum_scores<N>(a, t)));
  const float l = id >= 0 ? load_logit(a, t.logits + id) : not_a_number();
  return {id, slot_weight<false>(a, t, id, soft_cap(a, GATE_BY_LOGIT(a) ? l + 0.f : l))}; /* keys know no -0 */
}

/* From a token's keys. `all`: also the weights, and a report of NaN; else the ids alone. */
template <int N, bool RULES>
DEVICE gate_slot choose_slots(const gate_args &a, const gate_token &t, int64_t token, unsigned first_nan, bool all,
                              candidates<N> &c, uint32_t *choice, gate_scratch &scratch)
{
  if (RULES) first_nan = min(first_nan, nan_of_always(a, t));
  first_nan = __reduce_min_sync(ALL_LANES, first_nan);
  if (all) report_nan(a, token, first_nan);
  chosen_expert chosen = {-1, KEY_NAN};
  if (RULES && a.given)
    chosen.id = given_id(a, token);
  else
    chosen = take_best(a, RULES ? a.top_k - a.always : a.top_k, c, choice, scratch);
  if (RULES && !a.given) chosen.id = or_always(a, chosen.id);
  if (!all) return {chosen.id, 0.f};
  float l = GATE_BY_LOGIT(a) && !RULES ? float_of_key(chosen.key)
            : chosen.id >= 0           ? load_logit(a, t.logits + chosen.id)
                                       : not_a_number();
  return {chosen.id, slot_weight<RULES>(a, t, chosen.id, soft_cap(a, l))};
}

/* One token by one warp. N: keys a lane holds in registers. IN_TURN: as for keys_of_scores. */
template <int N, bool RULES = false, bool IN_TURN = false>
DEVICE gate_slot route_token(const gate_args &a, int64_t token, bool in_registers, uint32_t *choice,
                             gate_scratch &scratch)
{
  const bool by_logit = GATE_BY_LOGIT(a);
  gate_token t = {token * a.logits_ld, 0.f, 0.f};
  candidates<N> c;
  unsigned first_nan = ~0u;
  if (in_registers) {
    first_nan = N < 8 || by_logit ? keys_of_logits(a, t, c.key) : keys_of_scores<IN_TURN>(a, t, c.key);
  } else if (N == 8) {
    first_nan = keys_in_shared(a, t, by_logit, choice);
    c.load(a, choice);
  }
  return choose_slots<N, RULES>(a, t, token, first_nan, true, c, choice, scratch);
}

#endif
