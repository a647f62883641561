/* The router's output, and how CTAs share it. */
#ifndef CUMOE_LOGITS_CUH
#define CUMOE_LOGITS_CUH

#include "device/ptx.cuh"

/* A CTA's tile of the logits: its first token and expert. */
struct logit_tile {
  int64_t token;
  int expert;
};

/* Experts fastest: neighbours share the tokens, which are the larger operand. */
template <int BM, int BN> DEVICE logit_tile tile_of_cta(const router_args &a)
{
  const unsigned columns = ceil_div(a.experts, BN);
  return {(int64_t)(blockIdx.x / columns) * BM, (int)(blockIdx.x % columns) * BN};
}

DEVICE float round_logit(int dtype, float logit)
{
  if (dtype == DT_BF16) return to_f32(from_f32<bf16>(logit));
  return dtype == DT_F16 ? to_f32(from_f32<f16>(logit)) : logit;
}

DEVICE float finish_logit(const router_args &a, int expert, float sum)
{
  const float logit = a.bias ? sum + load_any(a.bias, expert, a.bias_dtype) : sum;
  return a.scale * round_logit(a.round_dtype, logit);
}

DEVICE void store_logit(const router_args &a, int64_t tokens, int64_t token, int expert, float sum)
{
  if (token < tokens && expert < a.experts) a.logits[token * a.logits_ld + expert] = finish_logit(a, expert, sum);
}

template <class T> DEVICE const T *row_of(const void *base, int64_t row, int64_t ld)
{
  return static_cast<const T *>(base) + row * ld;
}

#endif
