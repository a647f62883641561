/* Backward of layernorm (centered) and rmsnorm: statistics of each row, then parameters, then dx. */
#ifndef CUMOE_NORMS_CUH
#define CUMOE_NORMS_CUH

#include "train/elements.cuh"
#include "train/sums.cuh"

template <int THREADS> DEVICE void any_norm_stats(const norm_backward_args &n)
{
  const int64_t row = blockIdx.x;
  double mean = 0, squares = 0;
  if (n.centered) {
    for (int64_t c = threadIdx.x; c < n.cols; c += THREADS) mean += get(n.x, row, c);
    mean = cta_sum<THREADS>(mean) / (double)n.cols;
  }
  for (int64_t c = threadIdx.x; c < n.cols; c += THREADS) {
    const double distance = get(n.x, row, c) - mean;
    squares += distance * distance;
  }
  squares = cta_sum<THREADS>(squares);
  if (threadIdx.x == 0) {
    n.stats[row][0] = mean;
    n.stats[row][1] = 1 / sqrt(squares / (double)n.cols + (double)n.eps);
  }
}

DEVICE void store_sum(const matrix &to, int64_t column, double sum, int accumulate)
{
  if (to.data) put(to, 0, column, accumulate ? get(to, 0, column) + sum : sum);
}

/* A warp has every so many rows, its lanes the columns; the warps' sums are added in their order. */
template <int THREADS> DEVICE void any_norm_dparameters(const norm_backward_args &n)
{
  constexpr int WARPS = THREADS / WARP_SIZE;
  static_assert(NORM_COLUMNS == WARP_SIZE, "a lane a column");
  __shared__ double part[2][WARPS][WARP_SIZE];
  const int64_t column = (int64_t)blockIdx.x * NORM_COLUMNS + lane_id();
  double dweight = 0, dbias = 0;
#pragma unroll 4
  for (int64_t row = warp_id(); row < n.rows; row += WARPS) {
    if (column >= n.cols) break;
    const double dy = get(n.dy, row, column);
    dweight += dy * ((get(n.x, row, column) - n.stats[row][0]) * n.stats[row][1]);
    dbias += dy;
  }
  part[0][warp_id()][lane_id()] = dweight;
  part[1][warp_id()][lane_id()] = dbias;
  __syncthreads();
  if (warp_id() != 0 || column >= n.cols) return;
  for (int w = 1; w < WARPS; w++) {
    dweight += part[0][w][lane_id()];
    dbias += part[1][w][lane_id()];
  }
  store_sum(n.dweight, column, dweight, n.accumulate);
  store_sum(n.dbias, column, dbias, n.accumulate);
}

DEVICE double times_weight(const norm_backward_args &n, int64_t row, int64_t c)
{
  return get(n.dy, row, c) * (n.weight.data ? get(n.weight, 0, c) : 1.);
}

template <int THREADS> DEVICE void any_norm_dx(const norm_backward_args &n)
{
  const int64_t row = blockIdx.x;
  const double mean = n.stats[row][0], scale = n.stats[row][1];
  double of_g = 0, of_gh = 0; /* means over the row */
  for (int64_t c = threadIdx.x; c < n.cols; c += THREADS) {
    const double g = times_weight(n, row, c);
    of_g += g;
    of_gh += g * ((get(n.x, row, c) - mean) * scale);
  }
  of_g = n.centered ? cta_sum<THREADS>(of_g) / (double)n.cols : 0.;
  of_gh = cta_sum<THREADS>(of_gh) / (double)n.cols;
  for (int64_t c = threadIdx.x; c < n.cols; c += THREADS)
    put(n.dx, row, c, scale * (times_weight(n, row, c) - of_g - (get(n.x, row, c) - mean) * scale * of_gh));
}

#endif
