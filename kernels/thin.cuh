/*
 * FORM_thin: grouped GEMM for few rows an expert. All that counts is to read each weight once, at the speed of the
 * memory: weights go from global memory straight into registers, one step ahead of their use, and are the 16-row
 * operand of mma.sync; up to 8, 16 or 32 rows (tokens) are the other. K is split over warps, whose sums meet in
 * shared memory in fixed order. K-major weights only.
 *
 * Within 32 elements of k, both operands take k in the same other order: lane q of a row holds 8q .. 8q + 7, which
 * is one 16-byte load, and the mma's k = 2q, 2q + 1, 2q + 8, 2q + 9 are its elements in turn.
 *
 * A CTA takes a run of consecutive units, hence mostly one expert: its tokens stay in L1 and the loads of the next
 * channel tile are under way while this one is reduced.
 */
#ifndef CUMOE_THIN_CUH
#define CUMOE_THIN_CUH

#include "epilogue.cuh"
#include "mma.cuh"

template <class T_, bool UP_, int BM_, int BN, int BK_, int WARPS> struct thin_shape {
  using T = T_;
  static constexpr bool UP = UP_;
  static constexpr int BM = BM_, BK = BK_, THREADS = WARPS * WARP_SIZE;
  static constexpr int COLUMNS = UP ? 2 * BN : BN; /* weight rows of a tile */
  static constexpr int WARP_COLUMNS = COLUMNS < 32 ? COLUMNS : 32, WARPS_N = COLUMNS / WARP_COLUMNS;
  static constexpr int WARPS_K = WARPS / WARPS_N, BLOCKS = WARP_COLUMNS / 16;
  static constexpr int LD = COLUMNS + 4; /* of the partial sums: the fragment's stores fall into different banks */
};

template <class S> struct thin_smem {
  float partial[S::WARPS_K][S::BM][S::LD];
  tile_table table;
};

/* A run of channel tiles of one block of rows of one expert. */
struct thin_run {
  int32_t expert, row, rows, first, last;
};

/* The weight rows of a warp: per mma block two rows a lane, l/4 of its first and of its second eight. */
template <class S> struct thin_weights {
  const typename S::T *origin[2]; /* at channel 0 of the tile and k = 0, for the first block's two eights */
  int64_t block_step, tile_step;  /* elements */
  int channel[2], block_channels, tile_channels;

  DEVICE thin_weights(const gemm_args &args, int expert, bool gated)
  {
    const int row = warp_id() % S::WARPS_N * S::WARP_COLUMNS;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      channel[h] = gated ? row / 2 : row + 8 * h;
      origin[h] = expert_base<typename S::T>(args.b, gated ? h : 0, expert) +
                  (channel[h] + lane_id() / 4) * args.b.n_stride + lane_id() % 4 * 8;
    }
    block_channels = gated ? 8 : 16;
    tile_channels = gated ? S::COLUMNS / 2 : S::COLUMNS;
    block_step = block_channels * args.b.n_stride;
    tile_step = tile_channels * args.b.n_stride;
  }
};

/* One step's operands: K elements of k. */
template <class S, int K> struct thin_step {
  uint4 weight[S::BLOCKS][2][K / 32];

  DEVICE void load(const gemm_args &args, const thin_weights<S> &w, int tile, int k0)
  {
    const bool whole = k0 + K <= args.k;
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const bool channel_there = tile * w.tile_channels + w.channel[h] + i * w.block_channels < args.n;
        const typename S::T *source = w.origin[h] + tile * w.tile_step + i * w.block_step + k0;
#pragma unroll
        for (int g = 0; g < K / 32; g++)
          weight[i][h][g] = ld_global_nc_no_allocate(
              source + g * 32, channel_there && (whole || k0 + g * 32 + lane_id() % 4 * 8 < args.k));
      }
  }
};

/* Tokens of a run: lane l feeds row l/4 of each block of 8. */
template <class S, int N> struct thin_tokens {
  const typename S::T *row[N]; /* NULL: zeros */

  DEVICE thin_tokens(const gemm_args &args, const thin_run &run)
  {
#pragma unroll
    for (int n = 0; n < N; n++) {
      int r = n * 8 + lane_id() / 4, source = r < run.rows ? source_row(args, run.row + r) : -1;
      row[n] = source < 0 ? nullptr : static_cast<const typename S::T *>(args.a) + source * args.a_ld + lane_id() % 4 * 8;
    }
  }
};

template <class S, int N, int K>
DEVICE void load_tokens(const gemm_args &args, const thin_tokens<S, N> &tokens, int k0, uint4 (&x)[N][K / 32])
{
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int g = 0; g < K / 32; g++)
      x[n][g] = ld_global_nc(tokens.row[n] + k0 + g * 32, tokens.row[n] && k0 + g * 32 + lane_id() % 4 * 8 < args.k);
}

template <class S, int N, int K>
DEVICE void multiply_thin(const thin_step<S, K> &step, const uint4 (&x)[N][K / 32], float (&acc)[S::BLOCKS][N][4])
{
#pragma unroll
  for (int g = 0; g < K / 32; g++)
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++)
#pragma unroll
      for (int n = 0; n < N; n++) {
        const uint4 &w0 = step.weight[i][0][g], &w1 = step.weight[i][1][g], &b = x[n][g];
        mma_m16n8k16<typename S::T>(acc[i][n], {w0.x, w1.x, w0.y, w1.y}, {b.x, b.y});
        mma_m16n8k16<typename S::T>(acc[i][n], {w0.z, w1.z, w0.w, w1.w}, {b.z, b.w});
      }
}

/* The warps' sums of a finished channel tile: to shared memory, added in the order of the warps, finished, stored. */
template <class S, int N>
DEVICE void reduce_and_store(const gemm_args &args, const thin_run &run, int tile, columns order, thin_smem<S> &smem,
                             const float (&acc)[S::BLOCKS][N][4])
{
  const int lane = lane_id(), column0 = warp_id() % S::WARPS_N * S::WARP_COLUMNS + lane / 4;
  float(*mine)[S::LD] = smem.partial[warp_id() / S::WARPS_N];
  __syncthreads(); /* the last tile's sums have been read */
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) mine[n * 8 + lane % 4 * 2 + j % 2][column0 + i * 16 + j / 2 * 8] = acc[i][n][j];
  __syncthreads();

  const int channels = order == COLUMNS_plain ? S::COLUMNS : S::COLUMNS / 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < run.rows * channels; i += S::THREADS) {
    int row = i / channels, channel = tile * channels + i % channels;
    if (channel >= args.n) continue;
    int column = order == COLUMNS_plain ? i % channels : i % channels / 8 * 16 + i % 8;
    float g = 0.f, u = 0.f;
#pragma unroll
    for (int w = 0; w < S::WARPS_K; w++) {
      g += smem.partial[w][row][column];
      if (order != COLUMNS_plain) u += smem.partial[w][row][column + 8];
    }
    float out = finish<S::UP>(args, run.expert, channel, row_weight(args, run.row + row), g, u);
    static_cast<typename S::T *>(args.c)[(int64_t)(run.row + row) * args.c_ld + channel] = from_f32<typename S::T>(out);
  }
}

/* N blocks of 8 tokens, K elements of k a step. */
template <class S, int N, int K>
DEVICE void stream_run(const gemm_args &args, const thin_run &run, columns order, thin_smem<S> &smem)
{
  const thin_weights<S> weights(args, run.expert, order != COLUMNS_plain);
  const thin_tokens<S, N> tokens(args, run);
  const int k_first = warp_id() / S::WARPS_N * K;
  thin_step<S, K> next;
  next.load(args, weights, run.first, k_first);
  int next_tile = run.first, next_k = k_first;
  for (int tile = run.first; tile < run.last; tile++) {
    float acc[S::BLOCKS][N][4] = {};
#pragma unroll 1
    for (int k0 = 0; k0 < args.k; k0 += S::WARPS_K * K) { /* the same number of steps in every warp */
      thin_step<S, K> step = next;
      uint4 x[N][K / 32];
      load_tokens<S, N, K>(args, tokens, k_first + k0, x);
      next_k += S::WARPS_K * K;
      if (next_k - k_first >= args.k) next_k = k_first, next_tile++;
      if (next_tile < run.last) next.load(args, weights, next_tile, next_k);
      multiply_thin<S, N, K>(step, x, acc);
    }
    reduce_and_store<S, N>(args, run, tile, order, smem, acc);
  }
}

template <class S> DEVICE void thin_gemm(const gemm_args &args, thin_smem<S> &smem)
{
  const columns order = S::UP && args.gated ? COLUMNS_blocks : COLUMNS_plain;
  const int n_tiles = ceil_div(args.n, order == COLUMNS_plain ? S::COLUMNS : S::COLUMNS / 2);
  const int64_t units = (int64_t)build_tile_table<S::BM, S::THREADS>(args, smem.table) * n_tiles;
  const int64_t last = units * (blockIdx.x + 1) / gridDim.x;
#pragma unroll 1
  for (int64_t index = units * blockIdx.x / gridDim.x; index < last;) {
    const int row_tile = (int)(index / n_tiles), first = (int)(index % n_tiles);
    thin_run run = {expert_of_tile(args, smem.table, row_tile), 0, 0, first,
                    (int)min((int64_t)n_tiles, first + last - index)};
    const row_range rows = expert_rows(args, run.expert);
    const int begin = (row_tile - smem.table.before[run.expert]) * S::BM;
    run.row = rows.begin + begin;
    run.rows = min(rows.count - begin, S::BM);
    index += run.last - run.first;
    if (run.rows <= 8) stream_run<S, 1, S::BK>(args, run, order, smem);
    else if (S::BM > 8 && run.rows <= 16) stream_run<S, S::BM / 8 < 2 ? 1 : 2, S::BK / 2>(args, run, order, smem);
    else stream_run<S, S::BM / 8, S::BM <= 8 ? S::BK : S::BK / 2>(args, run, order, smem);
  }
}

#endif
