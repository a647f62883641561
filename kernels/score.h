/*
 * What experts are ranked by where a bias or groups make it differ from their logits: in f32, from operations that
 * IEEE 754 rounds in one way only (sum, product, quotient, root, fused multiply-add), so that the CPU and every GPU
 * choose the same experts. None may be contracted: on a GPU they are intrinsics, and the host compiles with
 * -ffp-contract=off. For numbers: NaN is the caller's to keep away. Within 3 ulps; exponentials below 2^-126 are 0.
 */
#ifndef CUMOE_SCORE_H
#define CUMOE_SCORE_H

#include "args.h"
#include "exact.h"

/* 2^n e^r with n whole and |r| <= log(2) / 2. The sum with 1.5 * 2^23 rounds to n, and ends in its bits. */
EXACT float exact_exp(float x)
{
  const float shifted = exact_fma(x, 1.44269504f, 12582912.f), n = exact_add(shifted, -12582912.f);
  const float r = exact_fma(n, 2.12194440e-4f, exact_fma(n, -0.693359375f, x));
  float p = exact_fma(1.9875691500e-4f, r, 1.3981999507e-3f);
  p = exact_fma(p, r, 8.3334519073e-3f);
  p = exact_fma(p, r, 4.1665795894e-2f);
  p = exact_fma(p, r, 1.6666665459e-1f);
  p = exact_fma(p, r, 5.0000001201e-1f);
  p = exact_add(exact_fma(p, exact_mul(r, r), r), 1.f);
  const float scaled = exact_float(exact_bits(p) + (exact_bits(shifted) << 23));
  return x > 88.7f ? INFINITY : x < -87.3f ? 0.f : scaled;
}

/* log(1 + t), 0 <= t <= 1, as 2 artanh(t / (2 + t)). */
EXACT float exact_log1p(float t)
{
  const float z = exact_div(t, exact_add(2.f, t)), w = exact_mul(z, z), twice = exact_add(z, z);
  float p = exact_fma(w, 1.f / 13, 1.f / 11);
  p = exact_fma(p, w, 1.f / 9);
  p = exact_fma(p, w, 1.f / 7);
  p = exact_fma(p, w, 1.f / 5);
  p = exact_fma(p, w, 1.f / 3);
  return exact_fma(exact_mul(twice, w), p, twice);
}

EXACT float exact_tanh(float x)
{
  const float size = fabsf(x), w = exact_mul(x, x);
  float p = exact_fma(w, -5.70498872745e-3f, 2.06390887954e-2f);
  p = exact_fma(p, w, -5.37397155531e-2f);
  p = exact_fma(p, w, 1.33314422036e-1f);
  p = exact_fma(p, w, -3.33332819422e-1f);
  const float near = exact_fma(exact_mul(size, w), p, size);
  const float far = exact_add(1.f, exact_div(-2.f, exact_add(exact_exp(exact_add(size, size)), 1.f)));
  const float magnitude = size < .625f ? near : far;
  return x < 0.f ? -magnitude : magnitude;
}

/* -Inf is not capped. */
EXACT float exact_cap(float softcap, float l)
{
  return softcap > 0.f && l > -INFINITY ? exact_mul(softcap, exact_tanh(exact_div(l, softcap))) : l;
}

/* Of a capped logit; a softmax needs all of them. */
EXACT float exact_score(int score, float l)
{
  if (score == SCORE_SIGMOID) return exact_div(1.f, exact_add(1.f, exact_exp(-l)));
  if (score == SCORE_SQRT_SOFTPLUS) return exact_root(exact_add(fmaxf(l, 0.f), exact_log1p(exact_exp(-fabsf(l)))));
  return l;
}

/* SCORE_SPARSEMIXER: whether the best that is left, `top`, is weighed against l. (0 - 0) / 0 is. */
EXACT int mixes(float eps, float top, float l)
{
  return !(exact_div(exact_add(top, -l), fmaxf(fabsf(l), top)) > exact_add(eps, eps));
}

/* The sum of all is that of 32 partial sums, of experts e, e + 32 .., added in pairs: 16 apart, 8, 4, 2, 1. */
EXACT float exact_softmax_term(float l, float max)
{
  return l > -INFINITY ? exact_exp(exact_add(l, -max)) : 0.f;
}

#endif
