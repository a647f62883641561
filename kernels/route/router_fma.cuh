/* The router's tile form without tensor cores: an operand in f32 keeps its precision. */
#ifndef CUMOE_ROUTER_FMA_CUH
#define CUMOE_ROUTER_FMA_CUH

#include "route/logits.cuh"

/* Four elements of a row, zeros outside. */
template <class T>
DEVICE void load_four(const void *base, int64_t row, int64_t end, int64_t ld, int k, int hidden, float (&v)[4])
{
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = 0;
  if (row < end && k < hidden) load_f32<4>(row_of<T>(base, row, ld) + k, v);
}

/* Operands as a CTA of 256 threads holds them: 8 x 4 sums a thread, k outermost in shared memory. */
template <class X, class W, int BM, int BN, int BK> struct fma_tile {
  static constexpr int THREADS = 256, QUADS = BK / 4, XS = BM * QUADS / THREADS, WS = BN * QUADS / THREADS;
  static constexpr int X_LD = BM + 4, W_LD = BN + 4;
  static_assert(BM == 128 && BN == 64 && XS * THREADS == BM * QUADS && WS * THREADS == BN * QUADS, "8 x 4 a thread");
  float x[XS][4], w[WS][4];

  DEVICE void load(const router_args &a, logit_tile at, int64_t tokens, int k)
  {
    const int row = threadIdx.x / QUADS, quad = threadIdx.x % QUADS * 4;
#pragma unroll
    for (int i = 0; i < XS; i++)
      load_four<X>(a.x, at.token + row + i * (THREADS / QUADS), tokens, a.x_ld, k + quad, a.hidden, x[i]);
#pragma unroll
    for (int i = 0; i < WS; i++)
      load_four<W>(a.w, at.expert + row + i * (THREADS / QUADS), a.experts, a.w_ld, k + quad, a.hidden, w[i]);
  }

  DEVICE void store(float (&xs)[BK][X_LD], float (&ws)[BK][W_LD]) const
  {
    const int row = threadIdx.x / QUADS, quad = threadIdx.x % QUADS * 4;
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
      for (int i = 0; i < XS; i++) xs[quad + c][row + i * (THREADS / QUADS)] = x[i][c];
#pragma unroll
      for (int i = 0; i < WS; i++) ws[quad + c][row + i * (THREADS / QUADS)] = w[i][c];
    }
  }
};

template <int BK, int X_LD, int W_LD>
DEVICE void multiply_tiles(const float (&xs)[BK][X_LD], const float (&ws)[BK][W_LD], int m, int n, float (&sum)[8][4])
{
#pragma unroll
  for (int k = 0; k < BK; k++) {
    float x[8], w[4];
    load_f32<8>(&xs[k][m], x);
    load_f32<4>(&ws[k][n], w);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sum[i][j] = fmaf(x[i], w[j], sum[i][j]);
  }
}

template <class X, class W, int BM, int BN, int BK> DEVICE void router_fma(const router_args &a)
{
  using tile = fma_tile<X, W, BM, BN, BK>;
  __shared__ __align__(16) float xs[2][BK][tile::X_LD], ws[2][BK][tile::W_LD];
  const logit_tile at = tile_of_cta<BM, BN>(a);
  const int64_t tokens = token_total(a.tokens);
  if (at.token >= tokens) return;
  const int m = threadIdx.x / 16 * 8, n = threadIdx.x % 16 * 4;
  float sum[8][4] = {};
  tile next;
  next.load(a, at, tokens, 0);
  for (int k = 0, buffer = 0; k < a.hidden; k += BK, buffer ^= 1) {
    next.store(xs[buffer], ws[buffer]);
    __syncthreads();
    next.load(a, at, tokens, k + BK);
    multiply_tiles(xs[buffer], ws[buffer], m, n, sum);
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) store_logit(a, tokens, at.token + m + i, at.expert + n + j, sum[i][j]);
}

#endif
