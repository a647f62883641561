/* The activations, in f32: the one formula of every GEMM epilogue. */
#ifndef CUMOE_ACT_CUH
#define CUMOE_ACT_CUH

#include "common.cuh"

DEVICE float sigmoid_of(float x, float scale) { return 1.f / (1.f + expf(-scale * x)); }

/* Comparisons are written so that NaN goes through. */
DEVICE float activation(int act, float alpha, float g)
{
  switch (act) {
  case ACT_SILU: return g / (1.f + expf(-g));
  case ACT_GELU_ERF: return .5f * g * erfcf(-.70710678f * g); /* erfc: no cancellation for negative g */
  case ACT_GELU_TANH: return g * sigmoid_of(g * (1.f + .044715f * g * g), 1.5957691f); /* 1 + tanh z = 2 sigmoid(2z) */
  case ACT_RELU: return g < 0.f ? 0.f : g;
  case ACT_RELU2: return g < 0.f ? 0.f : g * g;
  case ACT_SWIGLU_OAI: return g * sigmoid_of(g, alpha);
  default: return g;
  }
}

/* The output element from the accumulators of its channel, weighted and with their biases. */
DEVICE float activate(const gemm_args &args, float g, float u)
{
  if (!args.gated) return activation(args.act, args.act_alpha, g);
  float limit = args.act_limit;
  if (limit > 0.f) {
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
  }
  if (args.act == ACT_SWIGLU_OAI) u += 1.f;
  return activation(args.act, args.act_alpha, g) * u;
}

#endif
