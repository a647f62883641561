/*
 * tile: the gradients of weights on tensor cores (mma.sync), 16-bit operands, sums in f32. A CTA has 128 n x 128 k of an
 * expert and goes through its rows, 32 at a time, in a pipeline of cp.async, while it is worked out where the rows after those lie. Both operands lie row by row, which is the
 * reduction: ldmatrix turns them.
 */
#ifndef CUMOE_BACKWARD_TILE_CUH
#define CUMOE_BACKWARD_TILE_CUH

#include "backward/products.cuh"

template <class T_, int BM_, int BN_, int BK_, int STAGES_, int WARPS> struct gradient_shape {
  using T = T_;
  static constexpr int BM = BM_, BN = BN_, BK = BK_, STAGES = STAGES_, THREADS = WARPS * WARP_SIZE;
  static constexpr int WARPS_M = 2, WARPS_N = WARPS / WARPS_M, WM = BM / WARPS_M, WN = BN / WARPS_N;
  static constexpr int M_BLOCKS = WM / 16, N_BLOCKS = WN / 8, PACKET = 8, STAGED_LD = BN + 4;
  static_assert(BM == BN && BM == 128 && BK % 16 == 0 && N_BLOCKS % 2 == 0, "one size of row for both operands");
  static constexpr int CHUNKS = BM / PACKET, ROWS_PASS = THREADS / CHUNKS;
  static_assert(BK % ROWS_PASS == 0, "every thread has as many chunks");
};

template <class S> struct gradient_smem {
  union {
    struct {
      typename S::T a[S::STAGES][S::BK * S::BM], b[S::STAGES][S::BK * S::BN];
      gradient_row row[2][S::BK]; /* of the stage that is copied, and of the next */
    };
    float staged[S::BM * S::STAGED_LD];
  };
};

/* Byte offset of 16 bytes of a row: those of eight rows lie in different banks. */
DEVICE uint32_t chunk_of_row(int row, int chunk)
{
  return (uint32_t)(row * 256 + ((chunk ^ (row & 7)) << 4));
}

/* 8 elements times a weight. */
template <class T> DEVICE uint4 times(uint4 raw, float weight)
{
  uint32_t *words = reinterpret_cast<uint32_t *>(&raw);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack_pair<T>(words[i]);
    words[i] = pack_pair<T>(weight * pair.x, weight * pair.y);
  }
  return raw;
}

/* What a thread copies of one operand. */
template <class S> struct operand_copy {
  using T = typename S::T;
  const T *source; /* of the thread's columns */
  bool there;      /* they are inside */

  DEVICE operand_copy(const void *base, int64_t column, bool inside)
      : source(static_cast<const T *>(base) + (inside ? column : 0)), there(inside)
  {
  }

  DEVICE void copy(T *stage, int r, int64_t start, float weight, bool weighs) const
  {
    const bool read = there && start >= 0;
    unsigned char *to = reinterpret_cast<unsigned char *>(stage) + chunk_of_row(r, threadIdx.x % S::CHUNKS);
    const T *from = source + (read ? start : 0);
    if (weighs)
      *reinterpret_cast<uint4 *>(to) = times<T>(ld_global(from, read), weight);
    else
      cp_async_cg_16(shared_address(to), from, read ? 16 : 0);
  }
};

template <class S> struct gradient_copies {
  operand_copy<S> a, b;

  DEVICE gradient_copies(const weight_gradient_args &g, const gradient_unit &u)
      : a(g.a.base, g.a_half[u.half] + u.n0 + threadIdx.x % S::CHUNKS * S::PACKET,
          u.n0 + (int)threadIdx.x % S::CHUNKS * S::PACKET < g.n),
        b(g.b.base, u.k0 + threadIdx.x % S::CHUNKS * S::PACKET, u.k0 + (int)threadIdx.x % S::CHUNKS * S::PACKET < g.k)
  {
  }

  DEVICE void copy(const weight_gradient_args &g, gradient_smem<S> &smem, int stage, int slot) const
  {
#pragma unroll
    for (int i = 0; i < S::BK / S::ROWS_PASS; i++) {
      const int r = threadIdx.x / S::CHUNKS + i * S::ROWS_PASS;
      const gradient_row &row = smem.row[slot][r];
      a.copy(smem.a[stage], r, row.a, row.of_a, g.weighs == WEIGHS_A);
      b.copy(smem.b[stage], r, row.b, row.of_b, g.weighs == WEIGHS_B);
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
template <class S>
DEVICE void multiply_stage(const gradient_smem<S> &smem, int stage, float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4])
{
  const int index = lane_id() / 8, r = lane_id() % 8;
  const uint32_t a = shared_address(smem.a[stage]), b = shared_address(smem.b[stage]);
  const int chunk_a = warp_id() % S::WARPS_M * (S::WM / 8) + (index & 1);
  const int chunk_b = warp_id() / S::WARPS_M * (S::WN / 8) + (index >> 1);
#pragma unroll
  for (int step = 0; step < S::BK / 16; step++) {
    uint32_t of_a[S::M_BLOCKS][4], of_b[S::N_BLOCKS / 2][4];
#pragma unroll
    for (int i = 0; i < S::M_BLOCKS; i++)
      ldmatrix_x4_trans(of_a[i], a + chunk_of_row(step * 16 + (index >> 1) * 8 + r, chunk_a + 2 * i));
#pragma unroll
    for (int j = 0; j < S::N_BLOCKS / 2; j++)
      ldmatrix_x4_trans(of_b[j], b + chunk_of_row(step * 16 + (index & 1) * 8 + r, chunk_b + 2 * j));
#pragma unroll
    for (int i = 0; i < S::M_BLOCKS; i++)
#pragma unroll
      for (int j = 0; j < S::N_BLOCKS; j++)
        mma_m16n8k16<typename S::T>(acc[i][j], of_a[i], {of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1]});
  }
}

template <class S>
DEVICE void add_up_rows(const weight_gradient_args &g, gradient_smem<S> &smem, const gradient_unit &u,
                        float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4])
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

/* Sums in the order that the matrix has in memory: its rows are n, or (turned) k. */
template <class S> DEVICE void stage_sums(float *staged, bool turned, const float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4])
{
  const int n0 = warp_id() % S::WARPS_M * S::WM + lane_id() / 4;
  const int k0 = warp_id() / S::WARPS_M * S::WN + lane_id() % 4 * 2;
  const int of_n = turned ? 1 : S::STAGED_LD, of_k = turned ? S::STAGED_LD : 1;
#pragma unroll
  for (int i = 0; i < S::M_BLOCKS; i++)
#pragma unroll
    for (int j = 0; j < S::N_BLOCKS; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) staged[(n0 + i * 16 + e / 2 * 8) * of_n + (k0 + j * 8 + e % 2) * of_k] = acc[i][j][e];
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

template <class S>
DEVICE void store_sums(const weight_gradient_args &g, const gradient_unit &u, const float *staged, bool turned)
{
  int64_t first;
  void *base = const_cast<void *>(matrix_of(g.d, u.half, u.expert, &first));
  const int64_t row_stride = turned ? g.d.k_stride : g.d.n_stride, step = turned ? g.d.n_stride : g.d.k_stride;
  const int rows = turned ? g.k - u.k0 : g.n - u.n0, columns = turned ? g.n - u.n0 : g.k - u.k0;
  first += u.n0 * g.d.n_stride + u.k0 * g.d.k_stride;
  for (int i = threadIdx.x; i < S::BM * S::CHUNKS; i += S::THREADS) {
    const int row = i / S::CHUNKS, column = i % S::CHUNKS * S::PACKET;
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
    float acc[S::M_BLOCKS][S::N_BLOCKS][4] = {};
    add_up_rows<S>(g, smem, u, acc);
    stage_sums<S>(smem.staged, turned, acc);
    __syncthreads();
    store_sums<S>(g, u, smem.staged, turned);
    __syncthreads();
  }
}

#endif
