/* The activations, in f32: the one formula of every GEMM epilogue. */
#ifndef CUMOE_ACTIVATION_CUH
#define CUMOE_ACTIVATION_CUH

#include "device/ptx.cuh"

/* FAST: to about 2^-20, for results that are rounded to 16 bits anyway; a fifth of the instructions. */
template <bool FAST = false> DEVICE float sigmoid_of(float x, float scale)
{
  if (!FAST) return 1.f / (1.f + expf(-scale * x));
  return rcp_approx(1.f + __expf(-scale * x));
}

/* Comparisons are written so that NaN goes through. */
template <int ACT, bool FAST> DEVICE float activation(float alpha, float g)
{
  switch (ACT) {
  case ACT_SILU: return FAST ? g * sigmoid_of<true>(g, 1.f) : g / (1.f + expf(-g));
  case ACT_GELU_ERF: return .5f * g * erfcf(-.70710678f * g); /* erfc: no cancellation for negative g */
  case ACT_GELU_TANH:
    return g * sigmoid_of<FAST>(g * (1.f + .044715f * g * g), 1.5957691f); /* 1 + tanh z = 2 sigmoid(2z) */
  case ACT_RELU: return g < 0.f ? 0.f : g;
  case ACT_RELU2: return g < 0.f ? 0.f : g * g;
  case ACT_SWIGLU_OAI: return g * sigmoid_of<FAST>(g, alpha);
  default: return g;
  }
}

template <int ACT, bool FAST, int N> DEVICE void activate_each(float alpha, float (&g)[N])
{
#pragma unroll
  for (int i = 0; i < N; i++) g[i] = activation<ACT, FAST>(alpha, g[i]);
}

DEVICE bool limits_gated(const gemm_args &args)
{
  return args.act_limit < INFINITY;
}

/* Of a gated activation. NaN goes through. */
DEVICE void clamp_gated(float gate_limit, float limit, float &g, float &u)
{
  g = min_nan(g, gate_limit);
  u = -min_nan(-min_nan(u, limit), limit);
}

/* g = act(g) u of N channels, or act(g); one choice of the activation for all. */
template <int N, bool FAST = false> DEVICE void activate(const gemm_args &args, float (&g)[N], float (&u)[N])
{
  const float shift = args.act == ACT_SWIGLU_OAI ? 1.f : 0.f;
  if (args.gated && limits_gated(args)) {
#pragma unroll
    for (int i = 0; i < N; i++) clamp_gated(args.gate_limit, args.act_limit, g[i], u[i]);
  }
  switch (args.act) {
  case ACT_SILU: activate_each<ACT_SILU, FAST>(args.act_alpha, g); break;
  case ACT_GELU_ERF: activate_each<ACT_GELU_ERF, FAST>(args.act_alpha, g); break;
  case ACT_GELU_TANH: activate_each<ACT_GELU_TANH, FAST>(args.act_alpha, g); break;
  case ACT_RELU: activate_each<ACT_RELU, FAST>(args.act_alpha, g); break;
  case ACT_RELU2: activate_each<ACT_RELU2, FAST>(args.act_alpha, g); break;
  case ACT_SWIGLU_OAI: activate_each<ACT_SWIGLU_OAI, FAST>(args.act_alpha, g); break;
  }
  if (!args.gated) return;
#pragma unroll
  for (int i = 0; i < N; i++) g[i] *= u[i] + shift;
}

#endif
