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

#endif
