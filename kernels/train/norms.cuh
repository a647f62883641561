/*
 * Backward of layernorm and rmsnorm: mean and scale of each row, sums over runs of rows for the parameters, dx. In this
 * order, as dx may be dy.
 */
#ifndef CUMOE_NORMS_CUH
#define CUMOE_NORMS_CUH

#include "train/elements.cuh"
#include "train/sums.cuh"

/* What one row's h is made with. */
template <class R> struct row_stats {
  R mean, scale;
  DEVICE row_stats(const norm_backward_args &n, int64_t row) : mean((R)n.stats[row][0]), scale((R)n.stats[row][1]) {}
  DEVICE R h(R x) const { return (x - mean) * scale; }
};

template <int THREADS> DEVICE void any_norm_stats(const norm_backward_args &n)
{
  const int64_t row = blockIdx.x;
  const auto bring = [&](span columns) { return fetch(n.x, row, columns); };
  double mean = 0, squares = 0;
  if (n.centered) {
    for_fetched_vectors<THREADS>({0, n.cols}, bring, [&](span, const raw_vector &raw) {
      double x[VECTOR];
      get_values(x, raw, n.x.dtype);
#pragma unroll
      for (int i = 0; i < VECTOR; i++) mean += x[i];
    });
    mean = cta_sum<THREADS>(mean) / (double)n.cols;
  }
  for_fetched_vectors<THREADS>({0, n.cols}, bring, [&](span columns, const raw_vector &raw) {
    double x[VECTOR];
    get_values(x, raw, n.x.dtype);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
      if (columns.begin + i < columns.end) squares += (x[i] - mean) * (x[i] - mean);
  });
  squares = cta_sum<THREADS>(squares);
  if (threadIdx.x == 0) {
    n.stats[row][0] = mean;
    n.stats[row][1] = 1 / sqrt(squares / (double)n.cols + (double)n.eps);
  }
}

/* Sums of two gradients, weight's and bias's, of a thread's columns. */
struct parameter_sums {
  double of[2][VECTOR];
};

/* In double whatever the elements: the sums may be f32 numbers. */
DEVICE void add_row(const norm_backward_args &n, int64_t row, span columns, parameter_sums &sums)
{
  const raw_vector raw_x = fetch(n.x, row, columns), raw_dy = fetch(n.dy, row, columns);
  const row_stats<double> stats(n, row);
  double x[VECTOR], dy[VECTOR];
  get_values(x, raw_x, n.x.dtype);
  get_values(dy, raw_dy, n.dy.dtype);
#pragma unroll
  for (int i = 0; i < VECTOR; i++) {
    sums.of[0][i] += dy[i] * stats.h(x[i]);
    sums.of[1][i] += dy[i];
  }
}

/* A run of rows, a warp's width of vectors: a warp has every so many of the rows; the warps' sums are added in their
 * order. */
template <int THREADS> DEVICE void any_norm_partials(const norm_backward_args &n)
{
  constexpr int WARPS = THREADS / WARP_SIZE;
  static_assert(NORM_PART == WARP_SIZE * VECTOR, "a lane a vector");
  __shared__ parameter_sums of_warp[WARPS][WARP_SIZE];
  const int64_t parts = NORM_PARTS(n.cols), run = blockIdx.x / parts, column = (blockIdx.x - run * parts) * NORM_PART;
  const int64_t begin = column + lane_id() * VECTOR, end = min((run + 1) * NORM_ROWS, n.rows);
  const span columns = {begin, min(begin + VECTOR, n.cols)};
  parameter_sums sums = {};
#pragma unroll 2
  for (int64_t row = run * NORM_ROWS + warp_id(); row < end && begin < n.cols; row += WARPS)
    add_row(n, row, columns, sums);
  of_warp[warp_id()][lane_id()] = sums;
  __syncthreads();
  const int own = threadIdx.x % NORM_PART; /* a thread a column */
  if (threadIdx.x >= 2 * NORM_PART || column + own >= n.cols) return;
  const int which = threadIdx.x / NORM_PART;
  double sum = 0;
  for (int w = 0; w < WARPS; w++) sum += of_warp[w][own / VECTOR].of[which][own % VECTOR];
  n.partials[(run * 2 + which) * n.cols + column + own] = sum;
}

DEVICE void store_sum(const matrix &to, int64_t column, double sum, int accumulate)
{
  if (to.data) put(to, 0, column, accumulate ? get(to, 0, column) + sum : sum);
}

/* A lane a column, the runs' sums in their order. */
template <int THREADS> DEVICE void any_norm_dparameters(const norm_backward_args &n)
{
  static_assert(NORM_COLUMNS == THREADS, "a thread a column");
  const int64_t column = (int64_t)blockIdx.x * NORM_COLUMNS + threadIdx.x, runs = NORM_RUNS(n.rows);
  double dweight = 0, dbias = 0;
  if (column >= n.cols) return;
#pragma unroll 4
  for (int64_t run = 0; run < runs; run++) {
    dweight += n.partials[2 * run * n.cols + column];
    dbias += n.partials[(2 * run + 1) * n.cols + column];
  }
  store_sum(n.dweight, column, dweight, n.accumulate);
  store_sum(n.dbias, column, dbias, n.accumulate);
}

struct raw_norm {
  raw_vector dy, x, weight;
};

DEVICE raw_norm fetch_norm(const norm_backward_args &n, int64_t row, span columns)
{
  raw_norm raw = {fetch(n.dy, row, columns), fetch(n.x, row, columns)};
  if (n.weight.data) raw.weight = fetch(n.weight, 0, columns);
  return raw;
}

/* g and h of a vector; past the row's end 0, which a mean far away would not be. */
template <class R> struct norm_vector {
  R g[VECTOR], h[VECTOR];
  DEVICE norm_vector(const norm_backward_args &n, const row_stats<R> &stats, const raw_norm &raw, span columns)
  {
    get_values(g, raw.dy, n.dy.dtype);
    get_values(h, raw.x, n.x.dtype);
    R weight[VECTOR] = {1, 1, 1, 1};
    static_assert(VECTOR == 4, "");
    if (n.weight.data) get_values(weight, raw.weight, n.weight.dtype);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
      g[i] *= weight[i];
      h[i] = columns.begin + i < columns.end ? stats.h(h[i]) : 0;
    }
  }
};

template <int THREADS> DEVICE void any_norm_dx(const norm_backward_args &n)
{
  const int64_t row = blockIdx.x;
  in_type_of(n.x, [&](auto real) {
    using R = decltype(real);
    const row_stats<R> stats(n, row);
    const auto bring = [&](span columns) { return fetch_norm(n, row, columns); };
    double of_g = 0, of_gh = 0;
    for_fetched_vectors<THREADS>({0, n.cols}, bring, [&](span columns, const raw_norm &raw) {
      const norm_vector<R> v(n, stats, raw, columns);
      of_gh += sum_of_products(v.g, v.h);
#pragma unroll
      for (int i = 0; i < VECTOR && n.centered; i++) of_g += (double)v.g[i];
    });
    const R mean_g = n.centered ? (R)(cta_sum<THREADS>(of_g) / (double)n.cols) : (R)0;
    const R mean_gh = (R)(cta_sum<THREADS>(of_gh) / (double)n.cols);
    for_fetched_vectors<THREADS>({0, n.cols}, bring, [&](span columns, const raw_norm &raw) {
      norm_vector<R> v(n, stats, raw, columns);
#pragma unroll
      for (int i = 0; i < VECTOR; i++) v.g[i] = stats.scale * (v.g[i] - mean_g - v.h[i] * mean_gh);
      put_vector(v.g, n.dx, row, columns);
    });
  });
}

#endif
