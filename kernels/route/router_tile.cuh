/*
 * The router's tile form, on tensor cores: 16-bit operands. Small tiles split the reduction over the CTA's warps, so
 * that few experts or middling token counts still fill the GPU. Sums have a fixed order that the number of tokens does
 * not change.
 */
#ifndef CUMOE_ROUTER_TILE_CUH
#define CUMOE_ROUTER_TILE_CUH

#include "route/logits.cuh"

/* A CTA's tile and how its warps share it: SPLITS parts of the reduction, each with M x N warps. */
template <int BM_, int BN_, int BK_, int STAGES_, int WARPS_> struct router_tile_shape {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, STAGES = STAGES_, WARPS = WARPS_, THREADS = WARPS * WARP_SIZE;
  static constexpr int SPLITS = BM * BN >= 64 * 128 ? 1 : WARPS;
  static constexpr int M_WARPS = SPLITS == 1 ? 2 : 1, N_WARPS = SPLITS == 1 ? WARPS / 2 : 1;
  static constexpr int WM = BM / M_WARPS, WN = BN / N_WARPS; /* of a warp */
  static constexpr int MT = WM / 16, NT = WN / 8;            /* mma tiles of a warp */
  static constexpr int VECTORS = BK / 8;                     /* of 16 bytes, a row */
  static constexpr int STAGE_BYTES = (BM + BN) * BK * 2;
  static_assert(WM % 16 == 0 && WN % 16 == 0 && BK % (16 * SPLITS) == 0, "whole mma tiles");
  static_assert(VECTORS % 8 == 0 && THREADS % VECTORS == 0, "rows of at least 128 bytes, whole rows a pass");
};

/* Rows of x come first in a stage, rows of w after them. A vector's index is swizzled by its row, so
 * that neither the copies nor the eight rows of a matrix meet in a bank. */
template <class S> DEVICE uint32_t vector_offset(int row, int vector)
{
  return (row * S::VECTORS + (vector ^ (row & 7))) * 16;
}

/* One thread's copies of an operand: every EACH-th row, one vector of each stage. */
template <class T, class S, int ROWS> struct row_copier {
  static constexpr int EACH = S::THREADS / S::VECTORS, COPIES = ceil_div(ROWS, EACH);
  static_assert(EACH % 8 == 0 && ROWS % 8 == 0, "a thread's rows are swizzled alike");
  const T *source;
  int64_t ld;
  uint32_t target, there; /* bit i: its i-th row exists */

  DEVICE row_copier(const void *base, int64_t first, int64_t end, int64_t row_ld, int stage_row)
  {
    const int row = threadIdx.x / S::VECTORS, vector = threadIdx.x % S::VECTORS;
    source = row_of<T>(base, first + row, row_ld) + vector * 8;
    ld = row_ld * EACH;
    target = vector_offset<S>(stage_row + row, vector);
    there = 0;
#pragma unroll
    for (int i = 0; i < COPIES; i++) there |= (uint32_t)(row + i * EACH < ROWS && first + row + i * EACH < end) << i;
  }

  DEVICE void copy(uint32_t stage, int k, bool inside) const
  {
    const int row = threadIdx.x / S::VECTORS;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      if (ROWS % EACH && row + i * EACH >= ROWS) break;
      cp_async_cg_16(stage + target + i * EACH * S::VECTORS * 16, source + i * ld + k,
                     inside && there >> i & 1 ? 16 : 0);
    }
  }
};

template <class T, class S> struct stage_copier {
  row_copier<T, S, S::BM> x;
  row_copier<T, S, S::BN> w;

  DEVICE stage_copier(const router_args &a, logit_tile at, int64_t tokens)
      : x(a.x, at.token, tokens, a.x_ld, 0), w(a.w, at.expert, a.experts, a.w_ld, S::BM)
  {
  }

  DEVICE void copy(const router_args &a, int step, uint32_t shared) const
  {
    const uint32_t stage = shared + step % S::STAGES * S::STAGE_BYTES;
    const int k = step * S::BK;
    const bool inside = k + (int)(threadIdx.x % S::VECTORS) * 8 < a.hidden;
    if (k < a.hidden) x.copy(stage, k, inside), w.copy(stage, k, inside);
    cp_async_commit_group(); /* an empty group too: the wait counts them */
  }
};

/* A warp's operands of one mma step (16 columns of a stage). */
template <class T, class S> struct router_fragments {
  uint32_t x[S::MT][4], w[S::NT / 2][4];

  DEVICE void load(uint32_t stage, int m, int n, int vector)
  {
    const int lane = lane_id();
    const uint32_t x_at = stage + vector_offset<S>(m + lane % 16, vector + lane / 16);
    const uint32_t w_at = stage + vector_offset<S>(S::BM + n + lane % 8 + lane / 16 * 8, vector + lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < S::MT; i++) ldmatrix_x4(x[i], x_at + i * 16 * S::VECTORS * 16);
#pragma unroll
    for (int j = 0; j < S::NT / 2; j++) ldmatrix_x4(w[j], w_at + j * 16 * S::VECTORS * 16);
  }

  DEVICE void multiply(float (&sum)[S::MT][S::NT][4]) const
  {
#pragma unroll
    for (int i = 0; i < S::MT; i++)
#pragma unroll
      for (int j = 0; j < S::NT; j++) mma_m16n8k16<T>(sum[i][j], x[i], {w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]});
  }
};

/* Calls use(row, column, sum) for the lane's elements of the warp's tile. */
template <class S, class F> DEVICE void each_element(const float (&sum)[S::MT][S::NT][4], F use)
{
#pragma unroll
  for (int i = 0; i < S::MT; i++)
#pragma unroll
    for (int j = 0; j < S::NT; j++)
#pragma unroll
      for (int q = 0; q < 4; q++)
        use(i * 16 + lane_id() / 4 + q / 2 * 8, j * 8 + lane_id() % 4 * 2 + q % 2, sum[i][j][q]);
}

/* The warps' parts meet in shared memory, where the stages were, and are added in the order of the warps. */
template <class S>
DEVICE void add_splits(const router_args &a, logit_tile at, int64_t tokens, const float (&sum)[S::MT][S::NT][4],
                       float *shared)
{
  constexpr int LD = S::BN + 4;
  static_assert(S::WARPS * S::BM * LD * 4 <= S::STAGES * S::STAGE_BYTES, "the parts fit");
  __syncthreads();
  float *own = shared + warp_id() * S::BM * LD;
  each_element<S>(sum, [&](int row, int column, float value) { own[row * LD + column] = value; });
  __syncthreads();
  for (int i = threadIdx.x; i < S::BM * S::BN; i += S::THREADS) {
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < S::WARPS; warp++) total += shared[(warp * S::BM + i / S::BN) * LD + i % S::BN];
    store_logit(a, tokens, at.token + i / S::BN, at.expert + i % S::BN, total);
  }
}

/* The next step's operands leave shared memory while this one's are multiplied, across the stage's end too:
 * there the warps wait for the next stage, and with them for the one that the next copies overwrite. */
template <class T, class S> DEVICE void router_mma(const router_args &a)
{
  DYNAMIC_SHARED(uint8_t, stages, 128);
  constexpr int STEP = 2 * S::SPLITS; /* vectors of a stage that the warps multiply at once */
  const uint32_t shared = shared_address(stages);
  const logit_tile at = tile_of_cta<S::BM, S::BN>(a);
  const int64_t tokens = token_total(a.tokens);
  if (at.token >= tokens) return;
  const int steps = ceil_div(a.hidden, S::BK), split = S::SPLITS == 1 ? 0 : warp_id() * 2;
  const int m = S::SPLITS == 1 ? warp_id() % S::M_WARPS * S::WM : 0,
            n = S::SPLITS == 1 ? warp_id() / S::M_WARPS * S::WN : 0;
  const stage_copier<T, S> copier(a, at, tokens);
  float sum[S::MT][S::NT][4] = {};
  router_fragments<T, S> now, next;
  for (int step = 0; step < S::STAGES - 1; step++) copier.copy(a, step, shared);
  cp_async_wait_group<S::STAGES - 2>();
  __syncthreads();
  now.load(shared, m, n, split);
  for (int step = 0; step < steps; step++) {
#pragma unroll
    for (int vector = 0; vector < S::VECTORS; vector += STEP) {
      if (vector == 0) copier.copy(a, step + S::STAGES - 1, shared);
      const bool last = vector + STEP == S::VECTORS;
      if (last) {
        cp_async_wait_group<S::STAGES - 2>();
        __syncthreads();
      }
      next.load(shared + (step + last) % S::STAGES * S::STAGE_BYTES, m, n, split + (last ? 0 : vector + STEP));
      now.multiply(sum);
      now = next;
    }
  }
  cp_async_wait_group<0>();
  if constexpr (S::SPLITS > 1)
    add_splits<S>(a, at, tokens, sum, reinterpret_cast<float *>(stages));
  else
    each_element<S>(sum, [&](int row, int column, float value) {
      store_logit(a, tokens, at.token + m + row, at.expert + n + column, value);
    });
}

#endif
