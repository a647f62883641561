/*
 * tile, ntile: grouped GEMM on tensor cores (mma.sync), a pipeline of shared-memory stages filled by
 * cp.async. A rows are gathered by the copies themselves. B is K-major (tile) or N-major (ntile); the columns of a
 * gated tile alternate 8 gate channels and the same 8 up channels, which is only another row address.
 *
 * The grid may have any size; units are taken in order, gridDim.x apart.
 */
#ifndef CUMOE_TILE_CUH
#define CUMOE_TILE_CUH

#include "gemm/epilogue.cuh"
#include "device/ptx.cuh"

template <class PRODUCT, weight_major MAJOR, int BM_, int BN, int BK_, int STAGES_, int WARPS>
struct tile_shape : PRODUCT {
  using X = typename PRODUCT::X;
  using W = typename PRODUCT::W;
  static_assert(same_type<X, W> && operand<X>::BITS == 16, "ldmatrix feeds mma.sync with both as they are");
  static constexpr bool N_MAJOR = MAJOR == MAJOR_N;
  static constexpr int BM = BM_, BK = BK_, STAGES = STAGES_, THREADS = WARPS * WARP_SIZE;
  static constexpr int COLUMNS = PRODUCT::HALVES * BN; /* accumulator columns */
  static constexpr int VECTOR = operand<X>::PER_16;    /* elements of a 16-byte copy */

  /* Warps: as square as the tile allows; a warp tile is WM x WN. */
  static constexpr int WARPS_M = BM >= 128 || BM == 64 && COLUMNS / WARPS < 64 ? 2 : 1, WARPS_N = WARPS / WARPS_M;
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
};

template <class S> struct tile_smem {
  union {
    struct {
      typename S::X a[S::STAGES][S::BM * S::BK];
      typename S::W b[S::STAGES][S::COLUMNS * S::BK];
    };
    float staged[S::BM * STAGED_LD<S::COLUMNS>];
  };
  int32_t source_rows[S::BM]; /* rows of the A operand; -1: zeros */
  tile_unit unit;             /* in shared memory, as accumulators fill the registers; rows 0: no more */
  int64_t next;               /* index of the unit after it */
  columns order;
  tile_table table;
};

/* Element offset of 16-byte vector `vector` of row `row`: vectors are permuted within 128 bytes so that 8 rows of
 * the same vector, which is what ldmatrix reads, lie in different banks. */
template <int VECTORS> DEVICE int swizzled(int row, int vector)
{
  static_assert(VECTORS == 4 || VECTORS % 8 == 0, "rows of 64 bytes, or of whole 128-byte lines");
  return (row * VECTORS + (VECTORS == 4 ? vector ^ (row / 2 % 4) : vector ^ (row % 8))) * 8;
}

/*
 * What a thread copies of one k tile: A_PASSES + B_PASSES times 16 bytes. A: the same k in rows ROWS_A_PASS apart. B,
 * K-major: the same k in columns of the tile ROWS_B_PASS apart; N-major: the same columns in k ROWS_B_PASS apart. The
 * N-major stage of a gated tile in blocks holds all gate channels, then all up channels, as they lie in memory: there
 * the fragments alternate.
 */
template <class S> struct tile_copies {
  using X = typename S::X;
  using W = typename S::W;
  const W *source;      /* B: of the next pass */
  int64_t step, rewind; /* B: elements from one pass to the next; from the last to the next k tile's first */
  int passes;           /* B: those before have channels */

  DEVICE tile_copies(const gemm_args &args, const tile_unit &unit, columns order)
  {
    const expert_matrix &b = args.b;
    const int row = threadIdx.x / S::B_VECTORS, vector = threadIdx.x % S::B_VECTORS;
    const int column = S::N_MAJOR ? vector * S::VECTOR : row;
    int half = 0, local = column; /* channel of the tile */
    if (order == COLUMNS_blocks) {
      half = S::N_MAJOR ? column / (S::COLUMNS / 2) : column / 8 % 2;
      local = S::N_MAJOR ? column % (S::COLUMNS / 2) : column / 16 * 8 + column % 8;
    } else if (order != COLUMNS_plain) { /* contiguous, starting with the half that lies first */
      half = order == COLUMNS_up_gate;
      local = column / 2;
    }
    const int channel = unit.n * (order == COLUMNS_plain ? S::COLUMNS : S::COLUMNS / 2) + local;
    const int channel_step = order == COLUMNS_plain ? S::ROWS_B_PASS : S::ROWS_B_PASS / 2;
    passes = channel >= args.n ? 0 : S::N_MAJOR ? S::B_PASSES : ceil_div(args.n - channel, channel_step);
    source = expert_base<W>(b, half, unit.expert) + channel * b.n_stride;
    source += S::N_MAJOR ? row * b.k_stride : vector * S::VECTOR;
    step = S::N_MAJOR ? S::ROWS_B_PASS * b.k_stride : channel_step * b.n_stride;
    rewind = (S::N_MAJOR ? S::BK * b.k_stride : S::BK) - S::B_PASSES * step;
  }

  DEVICE void a_pass(const gemm_args &args, const int32_t *source_rows, X *stage, int k0, int i) const
  {
    const int row = threadIdx.x / S::K_VECTORS + i * S::ROWS_A_PASS, vector = threadIdx.x % S::K_VECTORS;
    const int source = source_rows[row], k = k0 + vector * S::VECTOR;
    const bool there = source >= 0 && k < args.k;
    cp_async_cg_16(shared_address(stage + swizzled<S::K_VECTORS>(row, vector)),
                   static_cast<const X *>(args.a) + (there ? source * args.a_ld + k : 0), there ? 16 : 0);
  }

  DEVICE void b_pass(const gemm_args &args, W *stage, int k0, int i)
  {
    const int row = threadIdx.x / S::B_VECTORS + i * S::ROWS_B_PASS, vector = threadIdx.x % S::B_VECTORS;
    const bool there = i < passes && k0 + (S::N_MAJOR ? row : vector * S::VECTOR) < args.k;
    cp_async_cg_16(shared_address(stage + swizzled<S::B_VECTORS>(row, vector)), there ? source : args.a,
                   there ? 16 : 0); /* a copy of 0 bytes still needs a valid address */
    source += step;
  }

  DEVICE void copy(const gemm_args &args, tile_smem<S> &smem, int stage, int k0)
  {
#pragma unroll
    for (int i = 0; i < S::B_PASSES; i++) b_pass(args, smem.b[stage], k0, i);
    source += rewind;
#pragma unroll
    for (int i = 0; i < S::A_PASSES; i++) a_pass(args, smem.source_rows, smem.a[stage], k0, i);
  }
};

/* Operands of one k block (16) of a warp tile, in registers. */
template <class S> struct fragments {
  uint32_t a[S::M_BLOCKS][4], b[S::N_BLOCKS / 2][4]; /* b: two column blocks each */
};

/* Where a lane's fragments lie in a stage: the swizzle is an exclusive or on address bits 5 and 6, so any other k block
 * (N-major: column block) is at this one's offset with those bits flipped. */
template <class S> struct fragment_offsets {
  uint32_t a, b, b_step; /* bytes from the stage's begin; N-major: from one pair of column blocks to the next */

  DEVICE fragment_offsets(columns order)
  {
    const int lane = lane_id(), row = warp_id() % S::WARPS_M * S::WM, column = warp_id() / S::WARPS_M * S::WN;
    const bool apart = S::N_MAJOR && order == COLUMNS_blocks; /* a pair's blocks: gate, and half a stage row on, up */
    const int vector = apart ? column / 16 + lane / 16 * (S::B_VECTORS / 2) : column / 8 + lane / 16;
    b_step = apart ? 16 : 32;
    a = swizzled<S::K_VECTORS>(row + lane % 16, lane / 16) * sizeof(typename S::X);
    b = sizeof(typename S::W) * (S::N_MAJOR ? swizzled<S::B_VECTORS>(lane % 16, vector)
                                            : swizzled<S::B_VECTORS>(column + lane / 16 * 8 + lane % 8, lane / 8 % 2));
  }

  DEVICE void load(fragments<S> &f, const tile_smem<S> &smem, int stage, int k_block) const
  {
    constexpr int BYTES = sizeof(typename S::X), BLOCK_ROWS = 16;
    const uint32_t from_a = shared_address(smem.a[stage]) + a, from_b = shared_address(smem.b[stage]) + b;
#pragma unroll
    for (int i = 0; i < S::M_BLOCKS; i++) ldmatrix_x4(f.a[i], (from_a ^ k_block * 32) + i * BLOCK_ROWS * S::BK * BYTES);
#pragma unroll
    for (int j = 0; j < S::N_BLOCKS / 2; j++) {
      if (S::N_MAJOR)
        ldmatrix_x4_trans(f.b[j], (from_b ^ j * b_step) + k_block * BLOCK_ROWS * S::COLUMNS * BYTES);
      else
        ldmatrix_x4(f.b[j], (from_b ^ k_block * 32) + j * BLOCK_ROWS * S::BK * BYTES);
    }
  }
};

template <class S> DEVICE void multiply(float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4], const fragments<S> &f)
{
#pragma unroll
  for (int i = 0; i < S::M_BLOCKS; i++)
#pragma unroll
    for (int j = 0; j < S::N_BLOCKS; j++)
      mma_m16n8k16<typename S::X>(acc[i][j], f.a[i], {f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]});
}

/* acc = A B of a unit. The fragments of the next k block are read while the tensor cores work on this one, across
 * stages too; a stage is refilled one k tile after its last read, which the barrier of that tile has confirmed. */
template <class S>
DEVICE void accumulate(const gemm_args &args, tile_smem<S> &smem, float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4])
{
  tile_copies<S> copies(args, smem.unit, smem.order);
#pragma unroll
  for (int s = 0; s < S::STAGES - 1; s++) {
    copies.copy(args, smem, s, s * S::BK);
    cp_async_commit_group();
  }
  cp_async_wait_group<S::STAGES - 2>();
  __syncthreads();

  const fragment_offsets<S> offsets(smem.order);
  fragments<S> f[2];
  offsets.load(f[0], smem, 0, 0);
  int stage = 0;
  const int k_end = round_up(args.k, S::BK) + (S::STAGES - 1) * S::BK;
#pragma unroll 1
  for (int k0 = (S::STAGES - 1) * S::BK; k0 < k_end; k0 += S::BK) { /* k0: of the tile to fetch */
    const int next = stage + 1 == S::STAGES ? 0 : stage + 1, refill = stage == 0 ? S::STAGES - 1 : stage - 1;
#pragma unroll
    for (int block = 0; block < S::K_BLOCKS; block++) {
      const bool last = block == S::K_BLOCKS - 1;
      if (last) {
        cp_async_commit_group();
        cp_async_wait_group<S::STAGES - 2>();
        __syncthreads();
      }
      offsets.load(f[(block + 1) % 2], smem, last ? next : stage, last ? 0 : block + 1);
      multiply<S>(acc, f[block % 2]);
      if (block == 0) copies.copy(args, smem, refill, k0); /* after the mma: one of the fragments is dead then */
    }
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
        *reinterpret_cast<float2 *>(staged + (row0 + i * 16 + h * 8) * STAGED_LD<S::COLUMNS> +
                                    staged_offset(column0 + j * 8)) =
            make_float2(acc[i][j][2 * h], acc[i][j][2 * h + 1]);
}

template <class S, class SMEM> DEVICE void take_unit(const gemm_args &args, SMEM &smem)
{
  const int n_tiles = smem.order == COLUMNS_plain ? ceil_div(args.n, S::COLUMNS) : ceil_div(args.n, S::COLUMNS / 2);
  if (threadIdx.x == 0) {
    smem.unit.rows = 0;
    if (smem.next < (int64_t)smem.table.before[args.experts] * n_tiles)
      smem.unit = unit_of<S::BM, 2048 / S::BM>(args, smem.table, smem.next, n_tiles);
    smem.next += gridDim.x;
  }
  __syncthreads();
  for (int r = threadIdx.x; r < S::BM; r += S::THREADS)
    smem.source_rows[r] = r < smem.unit.rows ? source_row(args, smem.unit.row + r) : -1;
  __syncthreads();
}

/* All units of a CTA. `accumulate` and what it reads depend on the form. */
template <class S, class SMEM> DEVICE void multiply_units(const gemm_args &args, SMEM &smem)
{
  wait_for_earlier_grids();
  if (threadIdx.x == 0) {
    smem.next = blockIdx.x;
    smem.order = columns_of<S>(args);
  }
  build_tile_table<S::BM, S::THREADS>(args, smem.table);
#pragma unroll 1
  for (take_unit<S>(args, smem); smem.unit.rows > 0; take_unit<S>(args, smem)) {
    float acc[S::M_BLOCKS][S::N_BLOCKS][4] = {};
    accumulate<S>(args, smem, acc);
    stage_accumulators<S>(smem.staged, acc);
    __syncthreads();
    store_unit<S>(args, smem.unit, smem.staged, smem.order);
    __syncthreads();
  }
}

template <class S> DEVICE void tile_gemm(const gemm_args &args, tile_smem<S> &smem)
{
  multiply_units<S>(args, smem);
}

#endif
