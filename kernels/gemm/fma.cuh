/*
 * fma: grouped GEMM in plain f32 FMA, either major. For f32 layers, where tf32 would not keep the promised
 * accuracy; not a fast path.
 */
#ifndef CUMOE_FMA_CUH
#define CUMOE_FMA_CUH

#include "gemm/epilogue.cuh"

/* Threads form a ROWS x COLS grid; each has BM / ROWS rows and 4 columns of every COLUMNS / 4 / COLS. */
template <class PRODUCT, int BM_, int BN, int BK_, int WARPS> struct fma_shape : PRODUCT {
  static constexpr int BM = BM_, BK = BK_, THREADS = WARPS * WARP_SIZE;
  static constexpr int COLUMNS = PRODUCT::HALVES * BN;
  static constexpr int COLS = 16, ROWS = THREADS / COLS;
  static constexpr int M_EACH = BM / ROWS, N_EACH = COLUMNS / COLS;
  static_assert(BM % ROWS == 0 && COLUMNS % (4 * COLS) == 0 && BM * BK % THREADS == 0 && COLUMNS * BK % THREADS == 0,
                "every thread has the same share");
};

template <class S> struct fma_smem {
  union {
    struct {
      float a[S::BK][S::BM + 4], b[S::BK][S::COLUMNS + 4];
    };
    float staged[S::BM * STAGED_LD<S::COLUMNS>];
  };
  int32_t row[S::BM]; /* of the A operand */
  tile_table table;
};

/* Channel and half of an accumulator column; gated tiles alternate blocks of 8 whatever the layout. */
DEVICE int column_channel(columns order, int column, int &half)
{
  half = order == COLUMNS_plain ? 0 : column / 8 % 2;
  return order == COLUMNS_plain ? column : column / 16 * 8 + column % 8;
}

template <class S>
DEVICE void load_fma_tiles(const gemm_args &args, const tile_unit &unit, columns order, int first, int k0,
                           fma_smem<S> &smem)
{
  const bool k_major = args.b.k_stride == 1;
#pragma unroll 4
  for (int i = threadIdx.x; i < S::BM * S::BK; i += S::THREADS) {
    int r = i / S::BK, k = i % S::BK, row = smem.row[r];
    bool there = row >= 0 && k0 + k < args.k;
    smem.a[k][r] = there ? to_f32(static_cast<const typename S::X *>(args.a)[row * args.a_ld + k0 + k]) : 0.f;
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < S::COLUMNS * S::BK; i += S::THREADS) {
    int column = k_major ? i / S::BK : i % S::COLUMNS, k = k_major ? i % S::BK : i / S::COLUMNS, half;
    int channel = first + column_channel(order, column, half);
    const typename S::W *base = expert_base<typename S::W>(args.b, half, unit.expert);
    bool there = channel < args.n && k0 + k < args.k;
    smem.b[k][column] = there ? to_f32(__ldg(base + channel * args.b.n_stride + (k0 + k) * args.b.k_stride)) : 0.f;
  }
}

template <class S> DEVICE void multiply_fma(const fma_smem<S> &smem, float (&acc)[S::M_EACH][S::N_EACH])
{
  const int row0 = threadIdx.x / S::COLS * S::M_EACH, column0 = threadIdx.x % S::COLS * 4;
#pragma unroll
  for (int k = 0; k < S::BK; k++) {
    float b[S::N_EACH];
#pragma unroll
    for (int j = 0; j < S::N_EACH; j += 4) {
      float4 v = *reinterpret_cast<const float4 *>(&smem.b[k][column0 + j * S::COLS]);
      b[j] = v.x, b[j + 1] = v.y, b[j + 2] = v.z, b[j + 3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < S::M_EACH; i++)
#pragma unroll
      for (int j = 0; j < S::N_EACH; j++) acc[i][j] = fmaf(smem.a[k][row0 + i], b[j], acc[i][j]);
  }
}

template <class S> DEVICE void fma_unit(const gemm_args &args, const tile_unit &unit, columns order, fma_smem<S> &smem)
{
  const int channels = order == COLUMNS_plain ? S::COLUMNS : S::COLUMNS / 2;
  float acc[S::M_EACH][S::N_EACH] = {};
  for (int r = threadIdx.x; r < S::BM; r += S::THREADS)
    smem.row[r] = r < unit.rows ? source_row(args, unit.row + r) : -1;
  __syncthreads();
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK) {
    load_fma_tiles<S>(args, unit, order, unit.n * channels, k0, smem);
    __syncthreads();
    multiply_fma<S>(smem, acc);
    __syncthreads();
  }
  const int row0 = threadIdx.x / S::COLS * S::M_EACH, column0 = threadIdx.x % S::COLS * 4;
#pragma unroll
  for (int i = 0; i < S::M_EACH; i++)
#pragma unroll
    for (int j = 0; j < S::N_EACH; j++)
      smem.staged[(row0 + i) * STAGED_LD<S::COLUMNS> + staged_offset(column0 + j / 4 * 4 * S::COLS + j % 4)] =
          acc[i][j];
  __syncthreads();
  store_unit<S>(args, unit, smem.staged, order);
  __syncthreads();
}

template <class S> DEVICE void fma_gemm(const gemm_args &args, fma_smem<S> &smem)
{
  const columns order = S::gated(args) ? COLUMNS_blocks : COLUMNS_plain;
  const int channels = order == COLUMNS_plain ? S::COLUMNS : S::COLUMNS / 2;
  const int n_tiles = ceil_div(args.n, channels);
  wait_for_earlier_grids();
  const int64_t units = (int64_t)build_tile_table<S::BM, S::THREADS>(args, smem.table) * n_tiles;
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < units; index += gridDim.x)
    fma_unit<S>(args, unit_of<S::BM, 2048 / S::BM>(args, smem.table, index, n_tiles), order, smem);
}

#endif
