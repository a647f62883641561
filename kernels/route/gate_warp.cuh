/* The gate, a warp a token. */
#ifndef CUMOE_GATE_WARP_CUH
#define CUMOE_GATE_WARP_CUH

#include "route/gate.cuh"

DEVICE gate_slot choose_for_token(const gate_args &a, int64_t token, uint32_t *choice, gate_scratch &scratch)
{
  const bool by_logit = GATE_BY_LOGIT(a);
  if (!GATE_IN_REGISTERS(a)) return route_token<8>(a, token, false, choice, scratch);
  if (by_logit && a.experts <= 64) return route_token<2>(a, token, true, choice, scratch);
  if (by_logit && a.experts <= 128) return route_token<4>(a, token, true, choice, scratch);
  return route_token<8>(a, token, true, choice, scratch);
}

/* Any gate, in shared memory: one way for all that is rare. */
template <int TOKENS> DEVICE void gate_rules(const gate_args &a)
{
  __shared__ uint32_t choice[TOKENS][MAX_EXPERTS];
  __shared__ gate_scratch scratch[TOKENS];
  const int64_t token = (int64_t)blockIdx.x * TOKENS + warp_id();
  check_token_count(a.tokens, a.fault);
  if (token >= token_total(a.tokens)) return;
  const gate_slot slot = route_token<8, true>(a, token, false, choice[warp_id()], scratch[warp_id()]);
  if (lane_id() < a.top_k) {
    if (!a.given) store_id(a, token, slot.id);
    store_weight(a, token, slot.weight);
  }
}

template <int TOKENS> DEVICE void gate_warp(const gate_args &a)
{
  __shared__ uint32_t choice[TOKENS][MAX_EXPERTS];
  __shared__ gate_scratch scratch[TOKENS];
  const int64_t token = (int64_t)blockIdx.x * TOKENS + warp_id();
  check_token_count(a.tokens, a.fault);
  if (token < token_total(a.tokens))
    store_slot(a, token, choose_for_token(a, token, choice[warp_id()], scratch[warp_id()]));
}

#endif
