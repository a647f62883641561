/*
 * thin: grouped GEMM for few rows an expert. All that counts is to read each weight once, at the speed of the
 * memory: weights go from global memory straight into registers, one step ahead of their use, and are the 16-row
 * operand of mma.sync; 8 rows (tokens) are the other. K is split over warps, whose sums meet in shared memory in fixed
 * order. K-major weights only. An expert with more rows is right, but its weights are read again.
 *
 * Within 32 elements of k, both operands take k in the same other order: lane q of a row holds 8q .. 8q + 7, which
 * is one 16-byte load, and the mma's k = 2q, 2q + 1, 2q + 8, 2q + 9 are its elements in turn.
 *
 * A CTA takes a run of consecutive units, hence mostly one expert: its tokens stay in L1 and the loads of the next
 * channel tile are under way while this one is reduced.
 */
#ifndef CUMOE_THIN_CUH
#define CUMOE_THIN_CUH

#include "gemm/epilogue.cuh"
#include "device/ptx.cuh"

template <class PRODUCT, int BM_, int BN, int BK_, int WARPS> struct thin_shape : PRODUCT {
  static_assert(BM_ == 8 && BK_ % 32 == 0, "one mma block of tokens; whole groups of 32 k");
  static constexpr int BM = BM_, BK = BK_, GROUPS = BK / 32, THREADS = WARPS * WARP_SIZE;
  static constexpr int COLUMNS = PRODUCT::HALVES * BN; /* weight rows of a tile */
  static constexpr int WARP_COLUMNS = COLUMNS < 32 ? COLUMNS : 32, WARPS_N = COLUMNS / WARP_COLUMNS;
  static constexpr int WARPS_K = WARPS / WARPS_N, BLOCKS = WARP_COLUMNS / 16;
  static constexpr int LD = COLUMNS + 4; /* of the partial sums: the fragment's stores fall into different banks */
};

template <class S> struct thin_smem {
  float partial[S::WARPS_K][S::BM][S::LD];
  tile_table table;
  row_range rows[MAX_EXPERTS];
};

/* A run of channel tiles of one block of rows of one expert. */
struct thin_run {
  int32_t expert, row, rows, first, last;
};

/* The weight rows of a warp: per mma block two rows a lane, l/4 of its first and of its second octet. */
template <class S> struct thin_weights {
  const typename S::W *origin[2]; /* at channel 0 of the tile and k = 0, for the first block's two octets */
  int64_t block_step, tile_step;  /* elements */
  int left[2];                    /* channels from there on */
  int block_channels, tile_channels;

  DEVICE thin_weights(const gemm_args &args, int expert, bool gated)
  {
    const int row = warp_id() % S::WARPS_N * S::WARP_COLUMNS;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int channel = gated ? row / 2 : row + 8 * h;
      left[h] = args.n - channel;
      origin[h] = expert_base<typename S::W>(args.b, gated ? h : 0, expert) +
                  (channel + lane_id() / 4) * args.b.n_stride + lane_id() % 4 * 8;
    }
    block_channels = gated ? 8 : 16;
    tile_channels = gated ? S::COLUMNS / 2 : S::COLUMNS;
    block_step = block_channels * args.b.n_stride;
    tile_step = tile_channels * args.b.n_stride;
  }
};

/* The rows (tokens) of a run: lane l feeds row l/4. */
template <class S> DEVICE const typename S::X *thin_tokens(const gemm_args &args, const thin_run &run)
{
  const int r = lane_id() / 4, source = r < run.rows ? source_row(args, run.row + r) : -1;
  return source < 0 ? nullptr : static_cast<const typename S::X *>(args.a) + source * args.a_ld + lane_id() % 4 * 8;
}

/* One step's weights: BK elements of k. */
template <class S> struct thin_step {
  uint4 weight[S::BLOCKS][2][S::GROUPS];

  DEVICE void load_weights(const gemm_args &args, const thin_weights<S> &w, int tile, int k0)
  {
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const bool channel_there = tile * w.tile_channels + i * w.block_channels < w.left[h];
        const typename S::W *source = w.origin[h] + tile * w.tile_step + i * w.block_step + k0;
#pragma unroll
        for (int g = 0; g < S::GROUPS; g++)
          weight[i][h][g] = ld_global_nc_no_allocate(source + g * 32, channel_there && k_there(args, k0, g));
      }
  }

  /* Tokens come from L1 or L2: loaded now, they arrive before the weights, which were loaded one step ago. */
  DEVICE static void load_tokens(const gemm_args &args, const typename S::X *tokens, int k0, uint4 (&token)[S::GROUPS])
  {
#pragma unroll
    for (int g = 0; g < S::GROUPS; g++) token[g] = ld_global(tokens + k0 + g * 32, tokens && k_there(args, k0, g));
  }

  DEVICE static bool k_there(const gemm_args &args, int k0, int g)
  {
    return k0 + g * 32 + lane_id() % 4 * 8 < args.k;
  }

  DEVICE void multiply(float (&acc)[S::BLOCKS][4], const uint4 (&token)[S::GROUPS]) const
  {
#pragma unroll
    for (int g = 0; g < S::GROUPS; g++)
#pragma unroll
      for (int i = 0; i < S::BLOCKS; i++) {
        const uint4 &w0 = unpack<typename S::X, typename S::W>(weight[i][0][g]),
                    &w1 = unpack<typename S::X, typename S::W>(weight[i][1][g]), &x = token[g];
        mma_m16n8k16<typename S::X>(acc[i], {w0.x, w1.x, w0.y, w1.y}, {x.x, x.y});
        mma_m16n8k16<typename S::X>(acc[i], {w0.z, w1.z, w0.w, w1.w}, {x.z, x.w});
      }
  }
};

/* The warps' sums of a finished channel tile: to shared memory, added in the order of the warps, finished, stored. */
template <class S>
DEVICE void reduce_and_store(const gemm_args &args, const thin_run &run, int tile, columns order, thin_smem<S> &smem,
                             const float (&acc)[S::BLOCKS][4])
{
  const int lane = lane_id(), column0 = warp_id() % S::WARPS_N * S::WARP_COLUMNS + lane / 4;
  float(*mine)[S::LD] = smem.partial[warp_id() / S::WARPS_N];
  __syncthreads(); /* the last tile's sums have been read */
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++)
    for (int j = 0; j < 4; j++) mine[lane % 4 * 2 + j % 2][column0 + i * 16 + j / 2 * 8] = acc[i][j];
  __syncthreads();

  const int channels = order == COLUMNS_plain ? S::COLUMNS : S::COLUMNS / 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < run.rows * channels; i += S::THREADS) {
    int row = i / channels, channel = tile * channels + i % channels;
    if (channel >= args.n) continue;
    int column = order == COLUMNS_plain ? i % channels : i % channels / 8 * 16 + i % 8;
    float g[1] = {}, u[1] = {};
#pragma unroll
    for (int w = 0; w < S::WARPS_K; w++) {
      g[0] += smem.partial[w][row][column];
      if (order != COLUMNS_plain) u[0] += smem.partial[w][row][column + 8];
    }
    finish_channels<S, 1>(args, run.expert, channel, row_weight(args, run.row + row), g, u);
    static_cast<typename S::Y *>(args.c)[(int64_t)(run.row + row) * args.c_ld + channel] =
        from_f32<typename S::Y>(g[0]);
  }
}

/* Weights are loaded one step ahead, over the ends of channel tiles too; the first leave before anything about the
 * tokens is known, and before the grid ahead, which makes them, has ended. */
template <class S>
DEVICE void multiply_run(const gemm_args &args, const thin_run &run, columns order, thin_smem<S> &smem)
{
  const thin_weights<S> weights(args, run.expert, order != COLUMNS_plain);
  const int k_first = warp_id() / S::WARPS_N * S::BK;
  thin_step<S> next;
  next.load_weights(args, weights, run.first, k_first);
  wait_for_earlier_grids();
  const typename S::X *tokens = thin_tokens<S>(args, run);
  int next_tile = run.first, next_k = 0;
#pragma unroll 1
  for (int tile = run.first; tile < run.last; tile++) {
    float acc[S::BLOCKS][4] = {};
#pragma unroll 1
    for (int k0 = 0; k0 < args.k; k0 += S::WARPS_K * S::BK) { /* the same number of steps in every warp */
      const thin_step<S> step = next;
      uint4 token[S::GROUPS];
      thin_step<S>::load_tokens(args, tokens, k_first + k0, token);
      next_k += S::WARPS_K * S::BK;
      if (next_k >= args.k) next_k = 0, next_tile++;
      if (next_tile < run.last) next.load_weights(args, weights, next_tile, k_first + next_k);
      step.multiply(acc, token);
    }
    reduce_and_store<S>(args, run, tile, order, smem, acc);
  }
}

template <class S> DEVICE void thin_gemm(const gemm_args &args, thin_smem<S> &smem)
{
  if (!args.protocol.early_inputs) wait_for_earlier_grids();
  const columns order = S::gated(args) ? COLUMNS_blocks : COLUMNS_plain;
  const int n_tiles = ceil_div(args.n, order == COLUMNS_plain ? S::COLUMNS : S::COLUMNS / 2);
  const int64_t units = (int64_t)build_tile_table<S::BM, S::THREADS>(args, smem.table, smem.rows) * n_tiles;
  const int64_t last = units * (blockIdx.x + 1) / gridDim.x;
#pragma unroll 1
  for (int64_t index = units * blockIdx.x / gridDim.x; index < last;) {
    const int row_tile = (int)(index / n_tiles), first = (int)(index % n_tiles);
    thin_run run = {expert_of_tile(args, smem.table, row_tile), 0, 0, first,
                    (int)min((int64_t)n_tiles, first + last - index)};
    const row_range rows = smem.rows[run.expert];
    const int skipped = (row_tile - smem.table.before[run.expert]) * S::BM;
    run.row = rows.begin + skipped;
    run.rows = min(rows.count - skipped, S::BM);
    multiply_run<S>(args, run, order, smem);
    index += run.last - run.first;
  }
  wait_for_earlier_grids(); /* of a CTA that had no unit */
}

#endif
