/*
 * tile: the products of the backward on tensor cores (mma.sync), sums in f32, tiles of 128 x 128 of an expert, in a
 * pipeline of cp.async.
 *   gradients of weights: the reduction runs over rows, and both operands lie row by row, so ldmatrix transposes them.
 *     While a block of rows is copied, threads find where the rows of the next block begin.
 *   rows times weights: the weights K-major or N-major.
 * X f32 (SPLIT): each element is multiplied as two, its bf16 and the bf16 of the difference; their sum is within 2^-17
 * of it.
 */
#ifndef CUMOE_BACKWARD_TILE_CUH
#define CUMOE_BACKWARD_TILE_CUH

#include "backward/products.cuh"

template <class X_, class W_, int BM_, int BN_, int BK_, int STAGES_, int WARPS> struct product_shape {
  using X = X_;
  using W = W_;
  static constexpr bool SPLIT = !same_type<X, W>;
  static constexpr int BM = BM_, BN = BN_, BK = BK_, STAGES = STAGES_, THREADS = WARPS * WARP_SIZE;
  static constexpr int WARPS_M = 2, WARPS_N = WARPS / WARPS_M, WM = BM / WARPS_M, WN = BN / WARPS_N;
  static constexpr int M_BLOCKS = WM / 16, N_BLOCKS = WN / 8, STAGED_LD = BN + 4;
  static_assert(BM == 128 && BN == 128 && BK == 32 && N_BLOCKS % 2 == 0, "what offsets count on");
  using sums = float[M_BLOCKS][N_BLOCKS][4];
};

/* Byte offsets of chunks of 16 bytes, in rows of 256, 64 and 128 bytes: swizzled, so that the same chunk of eight rows
 * lies in different banks. f32 of which lanes read single elements has rows of SPLIT_LD elements instead. */
DEVICE uint32_t chunk_of_256(int row, int chunk)
{
  return (uint32_t)(row * 256 + ((chunk ^ (row & 7)) << 4));
}
DEVICE uint32_t chunk_of_64(int row, int chunk)
{
  return (uint32_t)(row * 64 + ((chunk ^ (row >> 1 & 3)) << 4));
}
DEVICE uint32_t chunk_of_128(int row, int chunk)
{
  return (uint32_t)(row * 128 + ((chunk ^ (row & 7)) << 4));
}
constexpr int SPLIT_LD = 132;

/* 16 bytes times a weight. */
template <class T> DEVICE uint4 times(uint4 raw, float weight)
{
  uint32_t *words = reinterpret_cast<uint32_t *>(&raw);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(weight * __uint_as_float(words[i]));
    } else {
      const float2 pair = unpack_pair<T>(words[i]);
      words[i] = pack_pair<T>(weight * pair.x, weight * pair.y);
    }
  }
  return raw;
}

/* Two f32 as a pair of T (most), and a pair of what that leaves (rest). */
template <class T> DEVICE void split_pair(float low, float high, uint32_t &most, uint32_t &rest)
{
  most = pack_pair<T>(low, high);
  const float2 kept = unpack_pair<T>(most);
  rest = pack_pair<T>(low - kept.x, high - kept.y);
}

template <class S>
DEVICE void multiply_blocks(typename S::sums &acc, const uint32_t (&a)[S::M_BLOCKS][4],
                            const uint32_t (&b)[S::N_BLOCKS / 2][4])
{
#pragma unroll
  for (int i = 0; i < S::M_BLOCKS; i++)
#pragma unroll
    for (int j = 0; j < S::N_BLOCKS; j++)
      mma_m16n8k16<typename S::W>(acc[i][j], a[i], {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]});
}

/* The right operand of 16 steps of the reduction, from b whose rows are the reduction. */
template <class S> DEVICE void load_turned(uint32_t (&b)[S::N_BLOCKS / 2][4], uint32_t from, int step)
{
  const int index = lane_id() / 8, r = lane_id() % 8, chunk = warp_id() / S::WARPS_M * (S::WN / 8) + (index >> 1);
#pragma unroll
  for (int j = 0; j < S::N_BLOCKS / 2; j++)
    ldmatrix_x4_trans(b[j], from + chunk_of_256(step * 16 + (index & 1) * 8 + r, chunk + 2 * j));
}

/* ---- d = a^T b ---- */

template <class S> struct gradient_shape : S {
  using X = typename S::X;
  static constexpr int EACH_A = 16 / (int)sizeof(X), EACH_B = 8;
  static constexpr int A_ROW = S::SPLIT ? SPLIT_LD : S::BM; /* elements of a row of a stage */
};

template <class S> struct gradient_smem {
  union {
    struct {
      typename S::X a[S::STAGES][S::BK * S::A_ROW];
      typename S::W b[S::STAGES][S::BK * S::BN];
      gradient_row row[2][S::BK]; /* of the stage that is copied, and of the next */
    };
    float staged[S::BM * S::STAGED_LD];
  };
};

/* What a thread copies of one operand: EACH elements of some rows. */
template <class T, int COLUMNS, int THREADS> struct operand_copy {
  static constexpr int EACH = 16 / (int)sizeof(T), CHUNKS = COLUMNS / EACH, ROWS_PASS = THREADS / CHUNKS;
  const T *source; /* of the thread's columns */
  bool there;      /* they are inside */

  DEVICE operand_copy(const void *base, int64_t first, int columns)
      : source(static_cast<const T *>(base) + first), there((int)threadIdx.x % CHUNKS * EACH < columns)
  {
    source += there ? (int)threadIdx.x % CHUNKS * EACH : 0;
  }

  DEVICE void copy(T *stage, int r, int64_t start, float weight, bool weighs) const
  {
    const bool read = there && start >= 0;
    const int chunk = threadIdx.x % CHUNKS;
    unsigned char *to = reinterpret_cast<unsigned char *>(stage) +
                        (sizeof(T) == 4 ? (uint32_t)(r * SPLIT_LD * 4 + chunk * 16) : chunk_of_256(r, chunk));
    const T *from = source + (read ? start : 0);
    if (weighs)
      *reinterpret_cast<uint4 *>(to) = times<T>(ld_global(from, read), weight);
    else
      cp_async_cg_16(shared_address(to), from, read ? 16 : 0);
  }
};

template <class S> struct gradient_copies {
  operand_copy<typename S::X, S::BM, S::THREADS> a;
  operand_copy<typename S::W, S::BN, S::THREADS> b;

  DEVICE gradient_copies(const weight_gradient_args &g, const gradient_unit &u)
      : a(g.a.base, g.a_half[u.half] + u.n0, g.n - u.n0), b(g.b.base, u.k0, g.k - u.k0)
  {
  }

  DEVICE void copy(const weight_gradient_args &g, gradient_smem<S> &smem, int stage, int slot) const
  {
#pragma unroll
    for (int i = 0; i < S::BK / a.ROWS_PASS; i++) {
      const int r = threadIdx.x / a.CHUNKS + i * a.ROWS_PASS;
      a.copy(smem.a[stage], r, smem.row[slot][r].a, smem.row[slot][r].of_a, g.weighs == WEIGHS_A);
    }
#pragma unroll
    for (int i = 0; i < S::BK / b.ROWS_PASS; i++) {
      const int r = threadIdx.x / b.CHUNKS + i * b.ROWS_PASS;
      b.copy(smem.b[stage], r, smem.row[slot][r].b, smem.row[slot][r].of_b, g.weighs == WEIGHS_B);
    }
  }
};

/* Rows at .. at + BK - 1 of the expert; to be followed by a barrier. */
template <class S>
DEVICE void place_rows(const weight_gradient_args &g, gradient_smem<S> &smem, const gradient_unit &u, int slot,
                       int64_t at)
{
  const int r = threadIdx.x;
  if (r < S::BK) smem.row[slot][r] = gradient_row_of(g, u.rows.begin + at + r, at + r < u.rows.count);
}

/* acc += a^T b of a stage. */
template <class S> DEVICE void multiply_stage(const gradient_smem<S> &smem, int stage, typename S::sums &acc)
{
  const int index = lane_id() / 8, r = lane_id() % 8, m0 = warp_id() % S::WARPS_M * S::WM;
  const uint32_t b = shared_address(smem.b[stage]);
#pragma unroll
  for (int step = 0; step < S::BK / 16; step++) {
    uint32_t of_a[S::M_BLOCKS][4], of_b[S::N_BLOCKS / 2][4];
    load_turned<S>(of_b, b, step);
    if constexpr (S::SPLIT) {
      uint32_t rest[S::M_BLOCKS][4];
      const float *from = smem.a[stage] + (step * 16 + lane_id() % 4 * 2) * SPLIT_LD + m0 + lane_id() / 4;
#pragma unroll
      for (int i = 0; i < S::M_BLOCKS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float *at = from + (e / 2 * 8) * SPLIT_LD + i * 16 + e % 2 * 8;
          split_pair<typename S::W>(at[0], at[SPLIT_LD], of_a[i][e], rest[i][e]);
        }
      multiply_blocks<S>(acc, rest, of_b);
    } else {
      const uint32_t a = shared_address(smem.a[stage]);
#pragma unroll
      for (int i = 0; i < S::M_BLOCKS; i++)
        ldmatrix_x4_trans(of_a[i], a + chunk_of_256(step * 16 + (index >> 1) * 8 + r, m0 / 8 + (index & 1) + 2 * i));
    }
    multiply_blocks<S>(acc, of_a, of_b);
  }
}

template <class S>
DEVICE void add_up_rows(const weight_gradient_args &g, gradient_smem<S> &smem, const gradient_unit &u,
                        typename S::sums &acc)
{
  const gradient_copies<S> copies(g, u);
#pragma unroll
  for (int s = 0; s < S::STAGES - 1; s++) {
    place_rows<S>(g, smem, u, s % 2, s * S::BK);
    __syncthreads();
    copies.copy(g, smem, s, s % 2);
    cp_async_commit_group();
  }
  int stage = 0, slot = (S::STAGES - 1) % 2;
  place_rows<S>(g, smem, u, slot, (S::STAGES - 1) * S::BK);
#pragma unroll 1
  for (int64_t at = 0; at < u.rows.count; at += S::BK) {
    const int64_t next = at + (S::STAGES - 1) * S::BK;
    cp_async_wait_group<S::STAGES - 2>();
    __syncthreads(); /* the stage that is refilled was read one step ago */
    copies.copy(g, smem, stage == 0 ? S::STAGES - 1 : stage - 1, slot);
    cp_async_commit_group();
    slot ^= 1;
    place_rows<S>(g, smem, u, slot, next + S::BK);
    multiply_stage<S>(smem, stage, acc);
    stage = stage + 1 == S::STAGES ? 0 : stage + 1;
  }
  cp_async_wait_group<0>();
  __syncthreads();
}

/* The tile's sums into shared memory; of_m, of_n: floats from one row, one column to the next. */
template <class S> DEVICE void stage_sums(float *staged, int of_m, int of_n, const typename S::sums &acc)
{
  const int m0 = warp_id() % S::WARPS_M * S::WM + lane_id() / 4;
  const int n0 = warp_id() / S::WARPS_M * S::WN + lane_id() % 4 * 2;
#pragma unroll
  for (int i = 0; i < S::M_BLOCKS; i++)
#pragma unroll
    for (int j = 0; j < S::N_BLOCKS; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) staged[(m0 + i * 16 + e / 2 * 8) * of_m + (n0 + j * 8 + e % 2) * of_n] = acc[i][j][e];
}

DEVICE void store_packet(const weight_gradient_args &g, void *base, int64_t at, int64_t step, float (&value)[8])
{
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] *= g.scale;
  if (step == 1 && g.accumulates) {
    float before[8];
    load_any<8>(base, at, g.d_dtype, before);
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] += before[i];
  }
  if (step == 1) return store_any<8>(base, at, g.d_dtype, value);
#pragma unroll
  for (int i = 0; i < 8; i++)
    store_any(base, at + i * step, g.d_dtype,
              g.accumulates ? load_any(base, at + i * step, g.d_dtype) + value[i] : value[i]);
}

/* The tile to memory, along the rows that the matrix has there: these are n, or (turned) k. */
template <class S>
DEVICE void store_sums(const weight_gradient_args &g, const gradient_unit &u, const float *staged, bool turned)
{
  int64_t first;
  void *base = const_cast<void *>(matrix_of(g.d, u.half, u.expert, &first));
  const int64_t row_stride = turned ? g.d.k_stride : g.d.n_stride, step = turned ? g.d.n_stride : g.d.k_stride;
  const int rows = turned ? g.k - u.k0 : g.n - u.n0, columns = turned ? g.n - u.n0 : g.k - u.k0;
  first += u.n0 * g.d.n_stride + u.k0 * g.d.k_stride;
  for (int i = threadIdx.x; i < S::BM * S::BN / 8; i += S::THREADS) {
    const int row = i / (S::BN / 8), column = i % (S::BN / 8) * 8;
    if (row >= rows || column >= columns) continue;
    float value[8];
    load_f32<8>(staged + row * S::STAGED_LD + column, value);
    store_packet(g, base, first + row * row_stride + column * step, step, value);
  }
}

template <class S> DEVICE void gradient_gemm(const weight_gradient_args &g, gradient_smem<S> &smem)
{
  const int64_t units = gradient_units(g, S::BM, S::BN);
  const bool turned = g.d.k_stride != 1;
  wait_for_earlier_grids();
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < units; index += gridDim.x) {
    const gradient_unit u = gradient_of(g, index, S::BM, S::BN);
    if (g.accumulates && u.rows.count == 0) continue;
    typename S::sums acc = {};
    add_up_rows<S>(g, smem, u, acc);
    stage_sums<S>(smem.staged, turned ? 1 : S::STAGED_LD, turned ? S::STAGED_LD : 1, acc);
    __syncthreads();
    store_sums<S>(g, u, smem.staged, turned);
    __syncthreads();
  }
}

/* ---- c = a b ---- */

template <class S, weight_major MAJOR> struct rows_shape : S {
  static constexpr bool N_MAJOR = MAJOR == MAJOR_N;
  static_assert(N_MAJOR || !S::SPLIT, "f32 is multiplied by the router's weights alone");
};

template <class S> struct rows_smem {
  union {
    struct {
      typename S::X a[S::STAGES][S::BM * S::BK];
      typename S::W b[S::STAGES][S::BN * S::BK];
    };
    float staged[S::BM * S::STAGED_LD];
  };
  int64_t start[S::BM]; /* of rows of a, in elements; -1: zeros */
  rows_table<S::THREADS> table;
};

template <class S>
DEVICE void copy_product_stage(const rows_product_args &p, rows_smem<S> &smem, const product_unit &u, int stage,
                               int index)
{
  using X = typename S::X;
  using W = typename S::W;
  constexpr int EACH = 16 / (int)sizeof(X), CHUNKS = S::BK / EACH, PASS = S::THREADS / CHUNKS;
  const int steps = ceil_div(p.k, S::BK), half = index / steps, k0 = index % steps * S::BK;
#pragma unroll
  for (int i = 0; i < S::BM / PASS; i++) {
    const int r = threadIdx.x / CHUNKS + i * PASS, chunk = threadIdx.x % CHUNKS, k = k0 + chunk * EACH;
    const bool there = half < p.halves && smem.start[r] >= 0 && k < p.k;
    const X *from = static_cast<const X *>(p.a.base) + (there ? smem.start[r] + (int64_t)half * p.k + k : 0);
    cp_async_cg_16(shared_address(smem.a[stage]) + (S::SPLIT ? chunk_of_128(r, chunk) : chunk_of_64(r, chunk)), from,
                   there ? 16 : 0);
  }
  int64_t first;
  const W *base = static_cast<const W *>(matrix_of(p.b, min(half, p.halves - 1), u.expert, &first)) + first;
  constexpr int B_CHUNKS = S::N_MAJOR ? S::BN / 8 : S::BK / 8, B_PASS = S::THREADS / B_CHUNKS;
#pragma unroll
  for (int i = 0; i < (S::N_MAJOR ? S::BK : S::BN) / B_PASS; i++) {
    const int r = threadIdx.x / B_CHUNKS + i * B_PASS, chunk = threadIdx.x % B_CHUNKS;
    const int n = u.n0 + (S::N_MAJOR ? chunk * 8 : r), k = k0 + (S::N_MAJOR ? r : chunk * 8);
    const bool there = half < p.halves && n < p.n && k < p.k;
    cp_async_cg_16(shared_address(smem.b[stage]) + (S::N_MAJOR ? chunk_of_256(r, chunk) : chunk_of_64(r, chunk)),
                   there ? base + n * p.b.n_stride + k * p.b.k_stride : base, there ? 16 : 0);
  }
}

template <class S> DEVICE void load_channels(uint32_t (&b)[S::N_BLOCKS / 2][4], uint32_t from, int step)
{
  if (S::N_MAJOR) return load_turned<S>(b, from, step);
  const int index = lane_id() / 8, n0 = warp_id() / S::WARPS_M * S::WN + (index >> 1) * 8 + lane_id() % 8;
#pragma unroll
  for (int j = 0; j < S::N_BLOCKS / 2; j++) ldmatrix_x4(b[j], from + chunk_of_64(n0 + j * 16, step * 2 + (index & 1)));
}

template <class S> DEVICE void multiply_product_stage(const rows_smem<S> &smem, int stage, typename S::sums &acc)
{
  const int index = lane_id() / 8, r = lane_id() % 8, m0 = warp_id() % S::WARPS_M * S::WM;
  const uint32_t a = shared_address(smem.a[stage]), b = shared_address(smem.b[stage]);
#pragma unroll
  for (int step = 0; step < S::BK / 16; step++) {
    uint32_t of_a[S::M_BLOCKS][4], of_b[S::N_BLOCKS / 2][4];
    load_channels<S>(of_b, b, step);
    if constexpr (S::SPLIT) {
      uint32_t rest[S::M_BLOCKS][4];
      const unsigned char *from = reinterpret_cast<const unsigned char *>(smem.a[stage]) + lane_id() % 2 * 8;
#pragma unroll
      for (int i = 0; i < S::M_BLOCKS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int row = m0 + i * 16 + e % 2 * 8 + lane_id() / 4, chunk = step * 4 + e / 2 * 2 + lane_id() % 4 / 2;
          const float2 pair = *reinterpret_cast<const float2 *>(from + chunk_of_128(row, chunk));
          split_pair<typename S::W>(pair.x, pair.y, of_a[i][e], rest[i][e]);
        }
      multiply_blocks<S>(acc, rest, of_b);
    } else {
#pragma unroll
      for (int i = 0; i < S::M_BLOCKS; i++)
        ldmatrix_x4(of_a[i], a + chunk_of_64(m0 + i * 16 + (index & 1) * 8 + r, step * 2 + (index >> 1)));
    }
    multiply_blocks<S>(acc, of_a, of_b);
  }
}

template <class S>
DEVICE void multiply_rows(const rows_product_args &p, rows_smem<S> &smem, const product_unit &u, typename S::sums &acc)
{
  const int steps = p.halves * ceil_div(p.k, S::BK);
  for (int r = threadIdx.x; r < S::BM; r += S::THREADS) {
    const int64_t pair = r < u.rows ? pair_of_row(p.map, u.row + r) : -1;
    smem.start[r] = pair < 0 ? -1 : start_of(p.a, p.map, u.row + r, pair);
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < S::STAGES - 1; s++) {
    copy_product_stage<S>(p, smem, u, s, s);
    cp_async_commit_group();
  }
  int stage = 0;
#pragma unroll 1
  for (int index = 0; index < steps; index++) {
    cp_async_wait_group<S::STAGES - 2>();
    __syncthreads();
    copy_product_stage<S>(p, smem, u, stage == 0 ? S::STAGES - 1 : stage - 1, index + S::STAGES - 1);
    cp_async_commit_group();
    multiply_product_stage<S>(smem, stage, acc);
    stage = stage + 1 == S::STAGES ? 0 : stage + 1;
  }
  cp_async_wait_group<0>();
  __syncthreads();
}

template <class S> DEVICE void store_rows(const rows_product_args &p, const product_unit &u, const float *staged)
{
  for (int i = threadIdx.x; i < S::BM * S::BN / 8; i += S::THREADS) {
    const int row = i / (S::BN / 8), column = i % (S::BN / 8) * 8;
    if (row >= u.rows || u.n0 + column >= p.n) continue;
    float value[8];
    load_f32<8>(staged + row * S::STAGED_LD + column, value);
#pragma unroll
    for (int j = 0; j < 8; j++) value[j] *= p.scale;
    store_any<8>(p.c, (u.row + row) * p.c_ld + u.n0 + column, p.c_dtype, value);
  }
}

template <class S> DEVICE void rows_gemm(const rows_product_args &p, rows_smem<S> &smem)
{
  const int n_tiles = ceil_div(p.n, S::BN);
  wait_for_earlier_grids();
  const int64_t units = count_tiles<S::BM, S::THREADS>(p.map, smem.table) * n_tiles;
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < units; i += gridDim.x) {
    const product_unit u = unit_of<S::BM, S::THREADS>(p.map, smem.table, i, n_tiles, S::BN);
    typename S::sums acc = {};
    multiply_rows<S>(p, smem, u, acc);
    stage_sums<S>(smem.staged, S::STAGED_LD, 1, acc);
    __syncthreads();
    store_rows<S>(p, u, smem.staged);
    __syncthreads();
  }
}

#endif
