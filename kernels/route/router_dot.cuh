/*
 * The router's dot form, for few tokens: the weights are the traffic, so a CTA takes BN experts and all SMs read them
 * at once. The sum over a CTA's threads has a fixed order.
 */
#ifndef CUMOE_ROUTER_DOT_CUH
#define CUMOE_ROUTER_DOT_CUH

#include "route/logits.cuh"

/* As they lie in memory: all of a step's loads are issued before the first conversion. */
template <class T> struct eight_elements {
  uint4 raw[sizeof(T) / 2];
  DEVICE float operator[](int i) const { return to_f32(reinterpret_cast<const T *>(raw)[i]); }
};

template <class X, class W, int BM, int BN>
DEVICE void add_products(const router_args &a, logit_tile at, int present, int k, float (&sum)[BM * BN])
{
  eight_elements<W> w[BN];
  eight_elements<X> x[BM];
#pragma unroll
  for (int v = 0; v < (int)sizeof(W) / 2; v++)
#pragma unroll
    for (int e = 0; e < BN; e++)
      w[e].raw[v] = ld_global_nc_no_allocate(row_of<W>(a.w, at.expert + e, a.w_ld) + k + v * (16 / sizeof(W)),
                                             at.expert + e < a.experts);
#pragma unroll
  for (int v = 0; v < (int)sizeof(X) / 2; v++)
#pragma unroll
    for (int t = 0; t < BM; t++)
      x[t].raw[v] = ld_global(row_of<X>(a.x, at.token + t, a.x_ld) + k + v * (16 / sizeof(X)), t < present);
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int t = 0; t < BM; t++)
#pragma unroll
      for (int e = 0; e < BN; e++) sum[t * BN + e] = fmaf(x[t][i], w[e][i], sum[t * BN + e]);
}

template <class X, class W, int BM, int BN, int BK, int STAGES, int WARPS, int SMEM>
DEVICE void router_dot(const router_args &a)
{
  static_assert(SMEM == 0, "nothing in dynamic shared memory");
  __shared__ float partial[WARPS][BM * BN];
  const logit_tile at = tile_of_cta<BM, BN>(a);
  const int64_t tokens = token_total(a.tokens);
  if (at.token >= tokens) return;
  const int present = (int)min(tokens - at.token, (int64_t)BM);
  float sum[BM * BN] = {};
  for (int k = threadIdx.x * 8; k < a.hidden; k += WARPS * WARP_SIZE * 8)
    add_products<X, W, BM, BN>(a, at, present, k, sum);
  const float own = warp_sum_each(sum);
  constexpr int LANES = WARP_SIZE / (BM * BN);
  if (lane_id() % LANES == 0) partial[warp_id()][lane_id() / LANES] = own;
  __syncthreads();
  if (threadIdx.x >= BM * BN) return;
  float total = 0;
  for (int warp = 0; warp < WARPS; warp++) total += partial[warp][threadIdx.x];
  store_logit(a, tokens, at.token + threadIdx.x / BN, at.expert + threadIdx.x % BN, total);
}

#endif
