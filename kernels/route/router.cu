/*
 * The router: logits = x w^T + bias, f32. Three regimes:
 *   rows       few tokens: the weights are the traffic, so a CTA takes two experts and all SMs pull at them
 *   tile       16-bit operands on tensor cores; small tiles split the reduction over the CTA's warps, so that
 * few experts or middling token counts still fill the GPU tile, f32  an operand in f32 keeps its precision:
 * plain FMA All sums have a fixed order that the number of tokens does not touch.
 */
#include "device/ptx.cuh"

struct tile_place {
  int64_t token; /* first of the CTA's tokens and experts */
  int expert;
};

/* Experts fastest: neighbours share the tokens, which are the larger operand. */
template <int BM, int BN> DEVICE tile_place place_of_cta(const router_args &a)
{
  const unsigned columns = ceil_div(a.experts, BN);
  return {(int64_t)(blockIdx.x / columns) * BM, (int)(blockIdx.x % columns) * BN};
}

DEVICE void store_logit(const router_args &a, int64_t tokens, int64_t token, int expert, float sum)
{
  if (token >= tokens || expert >= a.experts) return;
  a.logits[token * a.logits_ld + expert] = a.bias ? sum + load_any(a.bias, expert, a.bias_dtype) : sum;
}

template <class T> DEVICE const T *row_of(const void *base, int64_t row, int64_t ld)
{
  return static_cast<const T *>(base) + row * ld;
}

/* ---- rows ---- */

/* Eight elements as they lie in memory: all of a step's loads leave before the first conversion. */
template <class T> struct eight {
  uint4 raw[sizeof(T) / 2];
  DEVICE float operator[](int i) const { return to_f32(reinterpret_cast<const T *>(raw)[i]); }
};

template <class X, class W, int BM, int BN>
DEVICE void dot_rows(const router_args &a, tile_place at, int present, int k, float (&sum)[BM * BN])
{
  eight<W> w[BN];
  eight<X> x[BM];
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
DEVICE void router_rows(const router_args &a)
{
  static_assert(SMEM == 0, "nothing in dynamic shared memory");
  __shared__ float partial[WARPS][BM * BN];
  const tile_place at = place_of_cta<BM, BN>(a);
  const int64_t tokens = token_total(a.tokens);
  if (at.token >= tokens) return;
  const int present = (int)min(tokens - at.token, (int64_t)BM);
  float sum[BM * BN] = {};
  for (int k = threadIdx.x * 8; k < a.hidden; k += WARPS * WARP_SIZE * 8)
    dot_rows<X, W, BM, BN>(a, at, present, k, sum);
  const float own = warp_sum_each(sum);
  constexpr int LANES = WARP_SIZE / (BM * BN);
  if (lane_id() % LANES == 0) partial[warp_id()][lane_id() / LANES] = own;
  __syncthreads();
  if (threadIdx.x >= BM * BN) return;
  float total = 0;
  for (int warp = 0; warp < WARPS; warp++) total += partial[warp][threadIdx.x];
  store_logit(a, tokens, at.token + threadIdx.x / BN, at.expert + threadIdx.x % BN, total);
}

/* ---- tile, tensor cores ---- */

/* A CTA's tile and how its warps share it: SPLITS parts of the reduction, each with M x N warps. */
template <int BM_, int BN_, int BK_, int STAGES_, int WARPS_> struct tile_shape {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, STAGES = STAGES_, WARPS = WARPS_, THREADS = WARPS * WARP_SIZE;
  static constexpr int SPLITS = BM * BN >= 64 * 128 ? 1 : WARPS;
  static constexpr int M_WARPS = SPLITS == 1 ? 2 : 1, N_WARPS = SPLITS == 1 ? WARPS / 2 : 1;
  static constexpr int WM = BM / M_WARPS, WN = BN / N_WARPS; /* of a warp */
  static constexpr int MT = WM / 16, NT = WN / 8;            /* mma tiles of a warp */
  static constexpr int CHUNKS = BK / 8;                      /* of 16 bytes a row */
  static constexpr int STAGE_BYTES = (BM + BN) * BK * 2;
  static_assert(WM % 16 == 0 && WN % 16 == 0 && BK % (16 * SPLITS) == 0, "whole mma tiles");
  static_assert(CHUNKS % 8 == 0 && THREADS % CHUNKS == 0, "rows of at least 128 bytes, whole rows a pass");
};

/* Rows of x come first in a stage, rows of w after them. The chunk's place in its row turns with the row, so
 * that neither the copies nor the eight rows of a matrix meet in a bank. */
template <class S> DEVICE uint32_t chunk_offset(int row, int chunk)
{
  return (row * S::CHUNKS + (chunk ^ (row & 7))) * 16;
}

/* One thread's copies of an operand: every EACH-th row, one chunk of each stage. */
template <class T, class S, int ROWS> struct row_copier {
  static constexpr int EACH = S::THREADS / S::CHUNKS, COPIES = ceil_div(ROWS, EACH);
  static_assert(EACH % 8 == 0 && ROWS % 8 == 0, "a thread's rows turn alike");
  const T *source;
  int64_t ld;
  uint32_t target, there; /* bit i: its i-th row exists */

  DEVICE row_copier(const void *base, int64_t first, int64_t end, int64_t row_ld, int stage_row)
  {
    const int row = threadIdx.x / S::CHUNKS, chunk = threadIdx.x % S::CHUNKS;
    source = row_of<T>(base, first + row, row_ld) + chunk * 8;
    ld = row_ld * EACH;
    target = chunk_offset<S>(stage_row + row, chunk);
    there = 0;
#pragma unroll
    for (int i = 0; i < COPIES; i++) there |= (uint32_t)(row + i * EACH < ROWS && first + row + i * EACH < end) << i;
  }

  DEVICE void copy(uint32_t stage, int k, bool inside) const
  {
    const int row = threadIdx.x / S::CHUNKS;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      if (ROWS % EACH && row + i * EACH >= ROWS) break;
      cp_async_cg_16(stage + target + i * EACH * S::CHUNKS * 16, source + i * ld + k,
                     inside && there >> i & 1 ? 16 : 0);
    }
  }
};

template <class T, class S> struct stage_copier {
  row_copier<T, S, S::BM> x;
  row_copier<T, S, S::BN> w;

  DEVICE stage_copier(const router_args &a, tile_place at, int64_t tokens)
      : x(a.x, at.token, tokens, a.x_ld, 0), w(a.w, at.expert, a.experts, a.w_ld, S::BM)
  {
  }

  DEVICE void copy(const router_args &a, int step, uint32_t shared) const
  {
    const uint32_t stage = shared + step % S::STAGES * S::STAGE_BYTES;
    const int k = step * S::BK;
    const bool inside = k + (int)(threadIdx.x % S::CHUNKS) * 8 < a.hidden;
    if (k < a.hidden) x.copy(stage, k, inside), w.copy(stage, k, inside);
    cp_async_commit_group(); /* an empty group too: the wait counts them */
  }
};

/* A warp's operands of one mma step (16 columns of a stage). */
template <class T, class S> struct fragments {
  uint32_t x[S::MT][4], w[S::NT / 2][4];

  DEVICE void load(uint32_t stage, int m, int n, int chunk)
  {
    const int lane = lane_id();
    const uint32_t x_at = stage + chunk_offset<S>(m + lane % 16, chunk + lane / 16);
    const uint32_t w_at = stage + chunk_offset<S>(S::BM + n + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < S::MT; i++) ldmatrix_x4(x[i], x_at + i * 16 * S::CHUNKS * 16);
#pragma unroll
    for (int j = 0; j < S::NT / 2; j++) ldmatrix_x4(w[j], w_at + j * 16 * S::CHUNKS * 16);
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
DEVICE void add_splits(const router_args &a, tile_place at, int64_t tokens, const float (&sum)[S::MT][S::NT][4],
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
  extern __shared__ __align__(128) uint8_t stages[];
  constexpr int STEP = 2 * S::SPLITS; /* chunks of a stage that the warps multiply at once */
  const uint32_t shared = shared_address(stages);
  const tile_place at = place_of_cta<S::BM, S::BN>(a);
  const int64_t tokens = token_total(a.tokens);
  if (at.token >= tokens) return;
  const int steps = ceil_div(a.hidden, S::BK), split = S::SPLITS == 1 ? 0 : warp_id() * 2;
  const int m = S::SPLITS == 1 ? warp_id() % S::M_WARPS * S::WM : 0,
            n = S::SPLITS == 1 ? warp_id() / S::M_WARPS * S::WN : 0;
  const stage_copier<T, S> copier(a, at, tokens);
  float sum[S::MT][S::NT][4] = {};
  fragments<T, S> now, next;
  for (int step = 0; step < S::STAGES - 1; step++) copier.copy(a, step, shared);
  cp_async_wait_group<S::STAGES - 2>();
  __syncthreads();
  now.load(shared, m, n, split);
  for (int step = 0; step < steps; step++) {
#pragma unroll
    for (int chunk = 0; chunk < S::CHUNKS; chunk += STEP) {
      if (chunk == 0) copier.copy(a, step + S::STAGES - 1, shared);
      const bool last = chunk + STEP == S::CHUNKS;
      if (last) {
        cp_async_wait_group<S::STAGES - 2>();
        __syncthreads();
      }
      next.load(shared + (step + last) % S::STAGES * S::STAGE_BYTES, m, n, split + (last ? 0 : chunk + STEP));
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

/* ---- tile, FMA ---- */

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

  DEVICE void load(const router_args &a, tile_place at, int64_t tokens, int k)
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
DEVICE void multiply_fma(const float (&xs)[BK][X_LD], const float (&ws)[BK][W_LD], int m, int n, float (&sum)[8][4])
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
  const tile_place at = place_of_cta<BM, BN>(a);
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
    multiply_fma(xs[buffer], ws[buffer], m, n, sum);
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) store_logit(a, tokens, at.token + m + i, at.expert + n + j, sum[i][j]);
}

/* ---- kernels ---- */

template <class X, class W, int BM, int BN, int BK, int STAGES, int WARPS, int SMEM>
DEVICE void router_tile(const router_args &a)
{
  if constexpr (same_type<X, W> && sizeof(X) == 2) {
    using shape = tile_shape<BM, BN, BK, STAGES, WARPS>;
    static_assert(exact_smem<STAGES * shape::STAGE_BYTES, SMEM>::OK);
    router_mma<X, shape>(a);
  } else {
    static_assert(SMEM == 0, "nothing in dynamic shared memory");
    router_fma<X, W, BM, BN, BK>(a);
  }
}

#define ROWS_router
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ op##_args a)             \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    fill_with_ones(a);                                                                                                 \
    op##_##form<X, W, BM, BN, BK, STAGES, WARPS, SMEM>(a);                                                             \
  }
#include "variants.def"
