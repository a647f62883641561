/* The gate: logits to scores, and the integers that experts are ranked by: ties are exact, and NaN has a rank. */
#ifndef CUMOE_SCORES_CUH
#define CUMOE_SCORES_CUH

#include "device/dtype.cuh"
#include "score.h"

/* ---- keys ---- */

/* Orders like the float, NaN lowest: greater float, greater key; -0 = +0. 0 is below every float: not to be
 * chosen. */
constexpr uint32_t KEY_NONE = 0, KEY_NAN = 1;

DEVICE uint32_t key_of(float value)
{
  uint32_t bits = __float_as_uint(value + 0.f);
  uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return value == value ? key : KEY_NAN;
}

DEVICE float float_of_key(uint32_t key)
{
  float value = __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
  return key == KEY_NAN ? __uint_as_float(0x7fffffffu) : value;
}

/* ---- scores, as in the public manual (cumoe_routing) ---- */

/* One token's softmax over all experts, where the score is that. */
struct gate_token {
  int64_t logits; /* index of its first logit */
  float max, sum;
};

DEVICE bool weigh_after(const gate_args &a)
{
  return a.flags & ROUTE_SCORE_AFTER_TOPK;
}
DEVICE bool softmax_over_all(const gate_args &a)
{
  return GATE_SOFTMAX_OVER_ALL(a);
}

constexpr float LARGEST = 3.402823466e38f;
DEVICE float finite_or_nan(float l)
{
  return l > LARGEST ? LARGEST : l;
}
DEVICE float not_a_number()
{
  return __uint_as_float(0x7fffffffu);
}

DEVICE float load_logit(const gate_args &a, int64_t index)
{
  return finite_or_nan(load_any(a.logits, index, a.logits_dtype));
}

DEVICE float soft_cap(const gate_args &a, float l)
{
  return a.softcap > 0 && l > -INFINITY ? a.softcap * tanhf(l / a.softcap) : l;
}

/* NaN and -Inf have no part in a softmax. */
DEVICE float softmax_term(float l, float max)
{
  return l > -INFINITY ? expf(l - max) : 0.f;
}

DEVICE float score_of(const gate_args &a, const gate_token &t, float l)
{
  switch (a.weigh) {
  case SCORE_SIGMOID: return 1.f / (1.f + expf(-l));
  case SCORE_SQRT_SOFTPLUS: return sqrtf(l > 20.f ? l + log1pf(expf(-l)) : log1pf(expf(l)));
  case SCORE_IDENTITY: return l;
  default: return weigh_after(a) ? l : t.sum > 0 ? softmax_term(l, t.max) / t.sum : 0.f;
  }
}

#endif
