/*
 * The router's wgmma form, for many tokens on sm_90a. A CTA has 64 tokens and BN experts, a pipeline of stages of 64 k,
 * one producer warp and one consumer warpgroup. All the weights pass through every CTA, and the way from L2 bounds
 * that: so CTAs come in clusters of two, and each loads half of the weights for both.
 */
#ifndef CUMOE_ROUTER_WGMMA_CUH
#define CUMOE_ROUTER_WGMMA_CUH

#include "device/dtype.cuh"
#include "device/pipeline.cuh"
#include "route/logits.cuh"

template <class T_, int CLUSTER_, int BM_, int BN_, int BK, int STAGES_, int WARPS> struct router_shape {
  using T = T_;
  static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_, CLUSTER = CLUSTER_, GROUP = 128;
  static_assert(BM == 64 && BK == WGMMA_BK && WARPS * WARP_SIZE == GROUP + WARP_SIZE,
                "a warpgroup's rows; one warp more");
};

template <class S> struct router_smem {
  typename S::T x[S::STAGES][S::BM * WGMMA_BK];
  typename S::T w[S::STAGES][S::BN * WGMMA_BK];
  uint64_t full[S::STAGES], empty[S::STAGES];
};

struct cluster_tile {
  int64_t token; /* the CTA's first token */
  int expert;    /* the cluster's first expert */
};

/* Experts fastest: neighbouring clusters share the tokens. */
template <class S> DEVICE cluster_tile tile_of_cluster(const router_args &a)
{
  const unsigned columns = ceil_div(a.experts, S::BN), cluster = blockIdx.x / S::CLUSTER;
  return {(int64_t)(cluster / columns * S::CLUSTER + cluster_ctarank()) * S::BM, (int)(cluster % columns) * S::BN};
}

/* The producer warp: its tokens, and its half of the weights for both CTAs. */
template <class S> DEVICE void load_stages(const router_sm90_args &args, router_smem<S> &smem, cluster_tile at)
{
  constexpr uint16_t ALL = (1 << S::CLUSTER) - 1;
  const int half = cluster_ctarank() * (args.columns / S::CLUSTER);
  const uint32_t bytes = (S::BM + args.columns) * WGMMA_BK * sizeof(typename S::T);
  pipeline_state<S::STAGES> stage;
#pragma unroll 1
  for (int k0 = 0; k0 < args.r.hidden; k0 += WGMMA_BK, stage.advance()) {
    uint64_t *full = &smem.full[stage.stage];
    wait_for(&smem.empty[stage.stage], stage.phase ^ 1);
    if (elect_one()) {
      mbarrier_arrive_expect_tx(full, bytes);
      cp_async_bulk_tensor_2d(smem.x[stage.stage], &args.x, k0, (int32_t)at.token, full);
      cp_async_bulk_tensor_2d_multicast(smem.w[stage.stage] + half * WGMMA_BK, &args.w, k0, at.expert + half, full,
                                        ALL);
    }
    __syncwarp();
  }
}

/* Two neighbouring experts of a token. */
DEVICE void store_logits(const router_args &a, int64_t tokens, int64_t token, int expert, float first, float second)
{
  if (token >= tokens || expert >= a.experts) return;
  float *to = a.logits + token * a.logits_ld + expert;
  first = finish_logit(a, expert, first);
  if (expert + 1 == a.experts) {
    *to = first;
    return;
  }
  second = finish_logit(a, expert + 1, second);
  if (reinterpret_cast<uintptr_t>(to) % sizeof(float2) == 0)
    *reinterpret_cast<float2 *>(to) = make_float2(first, second);
  else
    to[0] = first, to[1] = second;
}

template <class S> DEVICE void multiply_stages(const router_args &a, router_smem<S> &smem, cluster_tile at)
{
  float acc[S::BN / 2] = {};
  pipeline_state<S::STAGES> stage;
  int before = -1;
#pragma unroll 1
  for (int k0 = 0; k0 < a.hidden; k0 += WGMMA_BK, stage.advance()) {
    wait_for(&smem.full[stage.stage], stage.phase);
    const uint64_t x = wgmma_operand(smem.x[stage.stage]), w = wgmma_operand(smem.w[stage.stage]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < WGMMA_BK / 16; k++)
      wgmma_m64k16<typename S::T, S::BN>::run(acc, x + k * 2, w + k * 2, k > 0 || k0 > 0);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (before >= 0 && lane_id() < S::CLUSTER) mbarrier_arrive_cluster(&smem.empty[before], lane_id());
    before = stage.stage;
  }
  wgmma_wait_group<0>();
  hold(acc);
  const int64_t tokens = token_total(a.tokens), token = at.token + warp_id() * 16 + lane_id() / 4;
#pragma unroll
  for (int j = 0; j < S::BN / 8; j++)
#pragma unroll
    for (int h = 0; h < 2; h++)
      store_logits(a, tokens, token + 8 * h, at.expert + 8 * j + lane_id() % 4 * 2, acc[4 * j + 2 * h],
                   acc[4 * j + 2 * h + 1]);
}

template <class S> DEVICE void router_gemm(const router_sm90_args &args, router_smem<S> &smem)
{
  const cluster_tile at = tile_of_cluster<S>(args.r);
  if (threadIdx.x == 0) {
    prefetch_tensormap(&args.x);
    prefetch_tensormap(&args.w);
    for (int s = 0; s < S::STAGES; s++) {
      mbarrier_init(&smem.full[s], 1);
      mbarrier_init(&smem.empty[s], S::CLUSTER * S::GROUP / WARP_SIZE);
    }
    fence_mbarrier_init();
  }
  wait_for_earlier_grids();
  fill_with_ones(args.r);
  fence_proxy_async_global(); /* they wrote what the copies bring */
  barrier_cluster();
  if (at.token - cluster_ctarank() * S::BM >= token_total(args.r.tokens)) return; /* both: nothing is under way */
  if (threadIdx.x < S::GROUP)
    multiply_stages<S>(args.r, smem, at);
  else
    load_stages<S>(args, smem, at);
  __syncwarp();
  barrier_cluster(); /* nobody writes to a CTA that has left */
}

#endif
