/*
 * FORM_tile and FORM_ntile: grouped GEMM on tensor cores (mma.sync), a ring of shared-memory stages filled by
 * cp.async. A rows are gathered by the copies themselves. B is K-major (tile) or N-major (ntile); the columns of a
 * gated tile alternate 8 gate channels and the same 8 up channels, which costs nothing: it is another row address.
 *
 * The grid may have any size; units are taken in order, gridDim.x apart.
 */
#ifndef CUMOE_TILE_CUH
#define CUMOE_TILE_CUH

#include "epilogue.cuh"
#include "mma.cuh"

template <class T_, bool UP_, bool N_MAJOR_, int BM_, int BN, int BK_, int STAGES_, int WARPS> struct tile_shape {
  using T = T_;
  static constexpr bool UP = UP_, N_MAJOR = N_MAJOR_;
  static constexpr int BM = BM_, BK = BK_, STAGES = STAGES_, THREADS = WARPS * WARP_SIZE;
  static constexpr int COLUMNS = UP ? 2 * BN : BN; /* accumulator columns: an ungated up tile has twice the channels */
  static constexpr int VECTOR = 8;                 /* elements of a 16-byte copy */

  /* Warps: as square as the tile allows; a warp tile is WM x WN. */
  static constexpr int WARPS_M = BM >= 64 ? 2 : 1, WARPS_N = WARPS / WARPS_M;
  static constexpr int WM = BM / WARPS_M, WN = COLUMNS / WARPS_N;
  static constexpr int M_BLOCKS = WM / 16, N_BLOCKS = WN / 8, K_BLOCKS = BK / 16;
  static_assert(WM % 16 == 0 && WN % 16 == 0 && K_BLOCKS % 2 == 0, "warp tiles are whole pairs of mma blocks");

  /* Copies: a pass is one 16-byte copy a thread. */
  static constexpr int K_VECTORS = BK / VECTOR, ROWS_A_PASS = THREADS / K_VECTORS;
  static constexpr int A_PASSES = BM / ROWS_A_PASS;
  static constexpr int B_VECTORS = N_MAJOR ? COLUMNS / VECTOR : K_VECTORS; /* in a row of the B stage */
  static constexpr int B_ROWS = N_MAJOR ? BK : COLUMNS, ROWS_B_PASS = THREADS / B_VECTORS;
  static constexpr int B_PASSES = B_ROWS / ROWS_B_PASS;
  static_assert(BM % ROWS_A_PASS == 0 && B_ROWS % ROWS_B_PASS == 0, "passes are full");
  static_assert(N_MAJOR || ROWS_B_PASS % 16 == 0, "a thread's B rows belong to one half");

  static constexpr int STAGED_LD = COLUMNS + 8; /* f32; + 8: rows of a fragment fall into different banks */
};

template <class S> struct tile_smem {
  union {
    struct {
      typename S::T a[S::STAGES][S::BM * S::BK], b[S::STAGES][S::COLUMNS * S::BK];
    };
    float staged[S::BM * S::STAGED_LD];
  };
  int32_t source_rows[S::BM]; /* rows of the A operand; -1: zeros */
  tile_unit unit;             /* kept here, not in registers, while the accumulators fill those */
  tile_table table;
};

/* Element offset of 16-byte vector `vector` of row `row`: vectors change places within 128 bytes so that 8 rows of
 * the same vector, which is what ldmatrix reads, lie in different banks. */
template <int VECTORS> DEVICE int swizzled(int row, int vector)
{
  static_assert(VECTORS == 4 || VECTORS % 8 == 0, "rows of 64 bytes, or of whole 128-byte lines");
  return (row * VECTORS + (VECTORS == 4 ? vector ^ (row / 2 % 4) : vector ^ (row % 8))) * 8;
}

/* What a thread copies of the A rows of a unit: the same 16 bytes of k in rows ROWS_A_PASS apart. */
template <class S> DEVICE void copy_a(const gemm_args &args, const int32_t *source_rows, typename S::T *stage, int k0)
{
  const int row = threadIdx.x / S::K_VECTORS, vector = threadIdx.x % S::K_VECTORS, k = k0 + vector * S::VECTOR;
#pragma unroll
  for (int i = 0; i < S::A_PASSES; i++) {
    const int32_t source = source_rows[row + i * S::ROWS_A_PASS];
    const bool there = source >= 0 && k < args.k;
    cp_async_cg_16(shared_address(stage + swizzled<S::K_VECTORS>(row + i * S::ROWS_A_PASS, vector)),
                   static_cast<const typename S::T *>(args.a) + (there ? source * args.a_ld + k : 0), there ? 16 : 0);
  }
}

/* What a thread copies of the weights. K-major: stage rows are columns of the tile; N-major: stage rows are k. */
template <class S> struct b_source {
  const typename S::T *origin; /* this thread's first copy at k = 0 */
  int64_t step;                /* elements from one pass to the next */
  int channel, channel_step;   /* of the first pass; from one pass to the next (K-major) */

  DEVICE b_source(const gemm_args &args, const tile_unit &unit, columns order)
  {
    const expert_matrix &b = args.b;
    const int column = S::N_MAJOR ? threadIdx.x % S::B_VECTORS * S::VECTOR : threadIdx.x / S::B_VECTORS;
    int half = 0;
    channel = unit.n * (order == COLUMNS_plain ? S::COLUMNS : S::COLUMNS / 2);
    channel_step = S::ROWS_B_PASS;
    switch (order) {
    case COLUMNS_plain: channel += column; break;
    case COLUMNS_blocks:
      half = column / 8 % 2;
      channel += column / 16 * 8 + column % 8;
      channel_step /= 2;
      break;
    default: /* element by element: one run of memory that starts with the half that lies first */
      half = order == COLUMNS_up_gate;
      channel += column / 2;
    }
    origin = expert_base<typename S::T>(b, half, unit.expert) + channel * b.n_stride;
    if (S::N_MAJOR) {
      origin += threadIdx.x / S::B_VECTORS * b.k_stride;
      step = S::ROWS_B_PASS * b.k_stride;
    } else {
      origin += threadIdx.x % S::B_VECTORS * S::VECTOR;
      step = channel_step * b.n_stride;
    }
  }

  DEVICE void copy(const gemm_args &args, typename S::T *stage, int k0) const
  {
    const int row = threadIdx.x / S::B_VECTORS, vector = threadIdx.x % S::B_VECTORS;
    const typename S::T *source = origin + (S::N_MAJOR ? k0 * args.b.k_stride : k0);
#pragma unroll
    for (int i = 0; i < S::B_PASSES; i++) {
      bool there = S::N_MAJOR ? channel < args.n && k0 + row + i * S::ROWS_B_PASS < args.k
                              : channel + i * channel_step < args.n && k0 + vector * S::VECTOR < args.k;
      cp_async_cg_16(shared_address(stage + swizzled<S::B_VECTORS>(row + i * S::ROWS_B_PASS, vector)),
                     there ? source : args.a, there ? 16 : 0); /* a copy of nothing still wants an address */
      source += step;
    }
  }
};

/* Operands of one k block (16) of a warp tile, in registers. */
template <class S> struct fragments {
  uint32_t a[S::M_BLOCKS][4], b[S::N_BLOCKS / 2][4]; /* b: two column blocks each */
};

/* Where a lane's fragments lie in a stage: the swizzle is an exclusive or on address bits 5 and 6, so the place of any
 * other k block (N-major: column block) is this one's with those bits turned. */
template <class S> struct fragment_places {
  uint32_t a, b; /* bytes from the stage's begin */

  DEVICE fragment_places()
  {
    const int lane = lane_id(), row = warp_id() % S::WARPS_M * S::WM, column = warp_id() / S::WARPS_M * S::WN;
    a = swizzled<S::K_VECTORS>(row + lane % 16, lane / 16) * sizeof(typename S::T);
    b = sizeof(typename S::T) * (S::N_MAJOR ? swizzled<S::B_VECTORS>(lane % 16, column / 8 + lane / 16)
                                            : swizzled<S::B_VECTORS>(column + lane / 16 * 8 + lane % 8, lane / 8 % 2));
  }

  DEVICE void load(fragments<S> &f, uint32_t stage_a, uint32_t stage_b, int k_block) const
  {
    constexpr int BYTES = sizeof(typename S::T), BLOCK_ROWS = 16;
#pragma unroll
    for (int i = 0; i < S::M_BLOCKS; i++)
      ldmatrix_x4(f.a[i], ((stage_a + a) ^ k_block * 32) + i * BLOCK_ROWS * S::BK * BYTES);
#pragma unroll
    for (int j = 0; j < S::N_BLOCKS / 2; j++) {
      if (S::N_MAJOR)
        ldmatrix_x4_trans(f.b[j], ((stage_b + b) ^ j % 4 * 32) + j / 4 * 128 + k_block * BLOCK_ROWS * S::COLUMNS * BYTES);
      else
        ldmatrix_x4(f.b[j], ((stage_b + b) ^ k_block * 32) + j * BLOCK_ROWS * S::BK * BYTES);
    }
  }
};

template <class S> DEVICE void multiply(float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4], const fragments<S> &f)
{
#pragma unroll
  for (int i = 0; i < S::M_BLOCKS; i++)
#pragma unroll
    for (int j = 0; j < S::N_BLOCKS; j++) {
      uint32_t b[2] = {f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]};
      mma_m16n8k16<typename S::T>(acc[i][j], f.a[i], b);
    }
}

/* acc = A B of a unit. The fragments of the next k block are read while the tensor cores work on this one, across
 * stages too; a stage is refilled one k tile after its last read, which the barrier of that tile has confirmed. */
template <class S>
DEVICE void accumulate(const gemm_args &args, const tile_unit &unit, columns order, tile_smem<S> &smem,
                       float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4])
{
  const b_source<S> b(args, unit, order);
  const int k_end = round_up(args.k, S::BK) + (S::STAGES - 1) * S::BK;
#pragma unroll
  for (int s = 0; s < S::STAGES - 1; s++) {
    if (s * S::BK < args.k) {
      b.copy(args, smem.b[s], s * S::BK);
      copy_a<S>(args, smem.source_rows, smem.a[s], s * S::BK);
    }
    cp_async_commit_group();
  }
  cp_async_wait_group<S::STAGES - 2>();
  __syncthreads();

  const fragment_places<S> places;
  const uint32_t stages_a = shared_address(smem.a), stages_b = shared_address(smem.b);
  fragments<S> f[2];
  places.load(f[0], stages_a, stages_b, 0);
  int stage = 0, refill = S::STAGES - 1;
#pragma unroll 1
  for (int k0 = (S::STAGES - 1) * S::BK; k0 < k_end; k0 += S::BK) { /* k0: of the tile to fetch */
    const int next = stage + 1 == S::STAGES ? 0 : stage + 1;
#pragma unroll
    for (int block = 0; block < S::K_BLOCKS; block++) {
      if (block == S::K_BLOCKS - 1) {
        cp_async_wait_group<S::STAGES - 2>();
        __syncthreads();
        places.load(f[0], stages_a + next * (int)sizeof smem.a[0], stages_b + next * (int)sizeof smem.b[0], 0);
      } else {
        places.load(f[(block + 1) % 2], stages_a + stage * (int)sizeof smem.a[0],
                    stages_b + stage * (int)sizeof smem.b[0], block + 1);
      }
      if (block == 0) {
        if (k0 < args.k) {
          b.copy(args, smem.b[refill], k0);
          copy_a<S>(args, smem.source_rows, smem.a[refill], k0);
        }
        cp_async_commit_group();
      }
      multiply<S>(acc, f[block % 2]);
    }
    refill = stage;
    stage = next;
  }
  cp_async_wait_group<0>();
  __syncthreads();
}

/* Accumulators to the staging area. */
template <class S> DEVICE void stage_accumulators(float *staged, const float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4])
{
  const int lane = lane_id(), row0 = warp_id() % S::WARPS_M * S::WM + lane / 4;
  const int column0 = warp_id() / S::WARPS_M * S::WN + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < S::M_BLOCKS; i++)
#pragma unroll
    for (int j = 0; j < S::N_BLOCKS; j++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        *reinterpret_cast<float2 *>(staged + (row0 + i * 16 + h * 8) * S::STAGED_LD + column0 + j * 8) =
            make_float2(acc[i][j][2 * h], acc[i][j][2 * h + 1]);
}

template <class S> DEVICE void tile_gemm(const gemm_args &args, tile_smem<S> &smem)
{
  constexpr int BAND = 2048 / S::BM;
  const columns order = columns_of(args, S::UP, S::N_MAJOR);
  const int channels = order == COLUMNS_plain ? S::COLUMNS : S::COLUMNS / 2;
  const int n_tiles = ceil_div(args.n, channels);
  const int64_t units = (int64_t)build_tile_table<S::BM, S::THREADS>(args, smem.table) * n_tiles;
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < units; index += gridDim.x) {
    if (threadIdx.x == 0) smem.unit = unit_of<S::BM, BAND>(args, smem.table, index, n_tiles);
    __syncthreads();
    for (int r = threadIdx.x; r < S::BM; r += S::THREADS)
      smem.source_rows[r] = r < smem.unit.rows ? source_row(args, smem.unit.row + r) : -1;
    __syncthreads();
    float acc[S::M_BLOCKS][S::N_BLOCKS][4] = {};
    accumulate<S>(args, smem.unit, order, smem, acc);
    stage_accumulators<S>(smem.staged, acc);
    __syncthreads();
    store_unit<typename S::T, S::UP, S::THREADS>(args, smem.unit, smem.staged, S::STAGED_LD, order, channels);
    __syncthreads();
  }
}

#endif
