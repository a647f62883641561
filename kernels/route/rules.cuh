/* The gate: what few models want besides (GATE_HAS_RULES). */
#ifndef CUMOE_RULES_CUH
#define CUMOE_RULES_CUH

#include "route/scores.cuh"

/* Lane j: the id of slot j; -1 where it names no expert: what of that is a fault, the map says. */
DEVICE int given_id(const gate_args &a, int64_t token)
{
  if (lane_id() >= a.top_k) return -1;
  const int64_t at = token * a.ids_ld + lane_id();
  const int64_t id =
      a.ids_dtype == DT_I64 ? static_cast<const int64_t *>(a.given)[at] : static_cast<const int32_t *>(a.given)[at];
  return id >= 0 && id < a.experts + a.always ? (int)id : -1;
}

/* Lane j: the id of slot j, where the last slots have experts of their own. */
DEVICE int or_always(const gate_args &a, int id)
{
  const int after = lane_id() - (a.top_k - a.always);
  return after >= 0 && lane_id() < a.top_k ? a.experts + after : id;
}

/* Its expert where such a slot's logit is NaN. */
DEVICE unsigned nan_of_always(const gate_args &a, const gate_token &t)
{
  if (lane_id() >= a.always) return ~0u;
  const float l = load_logit(a, t.logits + a.experts + lane_id());
  return l == l ? ~0u : a.experts + lane_id();
}

/* What ranks below a slot's expert, or is it, is what slots before have left. Lanes' shares of their sum, in f32. */
DEVICE float mixed_share(const gate_args &a, const gate_token &t, int id, float raw, float l)
{
  float sum = 0;
  for (int e = lane_id(); e < a.experts; e += WARP_SIZE) {
    const float other = load_logit(a, t.logits + e);
    if (!(other < raw || (other == raw && e >= id))) continue;
    const float capped = exact_cap(a.softcap, other);
    if (mixes(a.mixer_eps, l, capped)) sum += softmax_term(capped, l);
  }
  return sum;
}

/* Lane j: 1 / the sum over what is left near slot j's logit. By the whole warp. */
DEVICE float mixed_weight(const gate_args &a, const gate_token &t, int id, float l)
{
  float weight = 0;
  for (int j = 0; j < a.top_k; j++) {
    const int other = __shfl_sync(ALL_LANES, id, j);
    const float raw = other >= 0 ? load_logit(a, t.logits + other) : not_a_number(), top = exact_cap(a.softcap, raw);
    const float sum = warp_sum(mixed_share(a, t, other, raw, top));
    if (lane_id() == j && l > -INFINITY && sum > 0) weight = 1.f / sum;
  }
  return weight;
}

#endif
