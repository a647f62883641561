/* Gated activations of the kind g sigmoid(alpha g) and their slopes, and bounds, as any kernel of the backward wants
 * them. */
#ifndef CUMOE_BACKWARD_SLOPE_CUH
#define CUMOE_BACKWARD_SLOPE_CUH

#include "device/ptx.cuh"

/* act(g) and its slope, before any limit. At a kink the slope is that from the left. */
struct activated {
  float value, slope;
};

/* FAST: to about 2^-20, for results that are rounded to 16 bits; 0 below 2^-126. */
template <bool FAST> DEVICE float sigmoid(float x)
{
  return FAST ? rcp_approx_ftz(1.f + ex2_approx_ftz(-1.442695041f * x)) : 1.f / (1.f + expf(-x));
}

template <bool FAST> DEVICE activated times_sigmoid(float g, float alpha)
{
  const float s = sigmoid<FAST>(alpha * g), value = g * s;
  return {value, fmaf(value * (1.f - s), alpha, s)};
}

DEVICE float bounded(float v, float low, float high)
{
  return v < low ? low : v > high ? high : v;
}

/* 0 where bounded() cuts. A NaN is not cut: it stays one. */
DEVICE float slope_within(float v, float low, float high)
{
  return v < low || v > high ? 0.f : 1.f;
}

/* Bounds of a gated activation, and what is added to u. */
struct gate_bounds {
  float gate_limit, limit, plus;
};

/* h = act(g) (u + plus) and the gradients of g and u for a given d h; act returns <activated>. Unless BOUNDED, nothing
 * is bounded or added. */
struct gated_gradient {
  float h, gate, up;
};

template <bool BOUNDED, class ACT>
DEVICE gated_gradient gradient_of_gated(float gate, float up, float given, const gate_bounds &b, ACT act)
{
  if (!BOUNDED) {
    const activated v = act(gate);
    return {v.value * up, given * up * v.slope, given * v.value};
  }
  const float u = bounded(up, -b.limit, b.limit) + b.plus;
  const activated v = act(bounded(gate, -INFINITY, b.gate_limit));
  return {v.value * u, given * u * v.slope * slope_within(gate, -INFINITY, b.gate_limit),
          given * v.value * slope_within(up, -b.limit, b.limit)};
}

#endif
