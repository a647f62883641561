/*
 * What training adds around the layer (cumoe/train.h). Bound by memory, so types are known at run time, and sums and
 * functions are in double as on the CPU device: an H200 converts and adds faster than it reads. Each sum has the order
 * of its shape: a thread's elements, the lanes of a warp, the warps of a CTA.
 */
#include "train/elements.cuh"
#include "train/sums.cuh"

/* ---- what all share ---- */

/* Elements begin .. end - 1 of a row, which unit blockIdx.x has. */
struct run_of_row {
  int64_t row, begin, end;
  DEVICE run_of_row(int64_t cols)
  {
    const int64_t runs = RUNS_IN_ROW(cols);
    row = blockIdx.x / runs;
    begin = (blockIdx.x - row * runs) * NORM_RUN;
    end = min(begin + NORM_RUN, cols);
  }
};

/* ---- embedding ---- */

/* Its row of the table; -1: none. */
DEVICE int64_t row_of_token(const embedding_args &e, int64_t token)
{
  const int64_t id = id_at(e.ids, token);
  if (id < e.vocabulary) return id < 0 ? -1 : id;
  report_fault(e.fault, FAULT_TOKEN_ID, 0, token);
  return -1;
}

template <int THREADS> DEVICE void any_embed(const embedding_args &e)
{
  const int64_t token = blockIdx.x, row = row_of_token(e, token);
  for (int64_t c = threadIdx.x; c < e.cols; c += THREADS) {
    const int64_t to = token * e.y.ld + c, from = row * e.table.ld + c;
    if (e.y.dtype == DT_F32)
      static_cast<uint32_t *>(e.y.data)[to] = row < 0 ? 0 : static_cast<const uint32_t *>(e.table.data)[from];
    else
      static_cast<uint16_t *>(e.y.data)[to] = row < 0 ? 0 : static_cast<const uint16_t *>(e.table.data)[from];
  }
}

template <int THREADS> DEVICE void any_embedding_clear(const embedding_args &e)
{
  const int64_t id = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (id <= e.vocabulary) e.begins[id] = 0;
}

/* Of id v in begins[v + 1]: integers, so their order is nothing. */
template <int THREADS> DEVICE void any_embedding_count(const embedding_args &e)
{
  const int64_t token = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  const int64_t row = token < e.tokens ? row_of_token(e, token) : -1;
  if (row >= 0) atomicAdd(&e.begins[row + 1], 1);
}

/* Counts become sums of all up to them. */
template <int THREADS> DEVICE void any_embedding_scan(const embedding_args &e)
{
  constexpr int WARPS = THREADS / WARP_SIZE;
  __shared__ int32_t part[WARPS];
  int32_t before = 0;
  for (int64_t first = 0; first <= e.vocabulary; first += THREADS) {
    const int64_t id = first + threadIdx.x;
    const int32_t sum = warp_scan(id <= e.vocabulary ? e.begins[id] : 0);
    if (lane_id() == WARP_SIZE - 1) part[warp_id()] = sum;
    __syncthreads();
    int32_t total = 0, earlier = 0;
    for (int w = 0; w < WARPS; w++) {
      if (w == warp_id()) earlier = total;
      total += part[w];
    }
    if (id <= e.vocabulary) e.begins[id] = before + earlier + sum;
    before += total;
    __syncthreads();
  }
}

template <int THREADS> DEVICE void any_embedding_place(const embedding_args &e)
{
  const int64_t token = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  const int64_t row = token < e.tokens ? row_of_token(e, token) : -1;
  if (row >= 0) e.order[atomicAdd(&e.begins[row], 1)] = (int32_t)token;
}

/* Puts up to THREADS tokens of an id in their order: each goes where so many are smaller. */
template <int THREADS> DEVICE void sort_few(int32_t *order, int count)
{
  __shared__ int32_t tokens[THREADS];
  const int own = threadIdx.x;
  if (own < count) tokens[own] = order[own];
  __syncthreads();
  int smaller = 0;
  for (int i = 0; own < count && i < count; i++) smaller += tokens[i] < tokens[own];
  if (own < count) order[smaller] = tokens[own];
  __syncthreads();
}

/* Any number of them: all ids are read again. */
template <int THREADS> DEVICE void list_again(const embedding_args &e, int64_t row, int32_t *order)
{
  __shared__ int found[THREADS / WARP_SIZE];
  int before = 0;
  for (int64_t first = 0; first < e.tokens; first += THREADS) {
    const int64_t token = first + threadIdx.x;
    const bool has = token < e.tokens && id_at(e.ids, token) == row;
    const unsigned lanes = __ballot_sync(ALL_LANES, has);
    if (lane_id() == 0) found[warp_id()] = __popc(lanes);
    __syncthreads();
    int earlier = before;
    for (int w = 0; w < THREADS / WARP_SIZE; w++) {
      earlier += w < warp_id() ? found[w] : 0;
      before += found[w];
    }
    if (has) order[earlier + __popc(lanes & ((1u << lane_id()) - 1))] = (int32_t)token;
    __syncthreads();
  }
}

template <int THREADS> DEVICE void any_embedding_backward(const embedding_args &e)
{
  const int64_t row = blockIdx.x;
  const int begin = row ? e.begins[row - 1] : 0, end = e.begins[row], count = end - begin;
  if (e.accumulate && count == 0) return;
  int32_t *order = e.order + begin;
  if (count > THREADS)
    list_again<THREADS>(e, row, order);
  else if (count > 1)
    sort_few<THREADS>(order, count);
  for (int64_t c = threadIdx.x; c < e.cols; c += THREADS) {
    double sum = e.accumulate ? get(e.table, row, c) : 0.;
    for (int i = 0; i < count; i++) sum += get(e.y, order[i], c);
    put(e.table, row, c, sum);
  }
}

/* ---- norms ---- */

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

/* ---- elementwise, softmax ---- */

DEVICE double sigmoid(double x)
{
  return 1 / (1 + exp(-x));
}

/* As kernels/cpu/train.c: factors that are 0 where another is infinite are left out. */
DEVICE double slope(int function, double x)
{
  if (function == EW_RELU) return x > 0 ? 1. : x <= 0 ? 0. : x;
  if (function == EW_SIGMOID) return sigmoid(x) * sigmoid(-x);
  if (fabs(x) > 1e3) return x > 0;
  if (function == EW_SILU) return sigmoid(x) + x * sigmoid(x) * sigmoid(-x);
  if (function == EW_GELU)
    return .5 * erfc(-x * 0.70710678118654752440) + x * 0.39894228040143267794 * exp(-.5 * x * x);
  const double z = 1.5957691216057307117 * x * (1 + .044715 * x * x); /* 1 + tanh z/2 = 2 sigmoid(z) */
  const double dz = 1.5957691216057307117 * (1 + 3 * .044715 * x * x);
  return sigmoid(z) + x * dz * sigmoid(z) * sigmoid(-z);
}

template <int THREADS> DEVICE void any_elementwise_backward(const elementwise_backward_args &e)
{
  const run_of_row run(e.cols);
  for (int64_t c = run.begin + threadIdx.x; c < run.end; c += THREADS)
    put(e.dx, run.row, c, get(e.dy, run.row, c) * slope(e.function, get(e.x, run.row, c)));
}

template <int THREADS> DEVICE void any_softmax_backward(const elementwise_backward_args &e)
{
  const int64_t row = blockIdx.x;
  double sum = 0;
  for (int64_t c = threadIdx.x; c < e.cols; c += THREADS) sum += get(e.x, row, c) * get(e.dy, row, c);
  sum = cta_sum<THREADS>(sum);
  for (int64_t c = threadIdx.x; c < e.cols; c += THREADS)
    put(e.dx, row, c, get(e.x, row, c) * (get(e.dy, row, c) - sum));
}

/* ---- loss ---- */

/* -1: not counted. */
DEVICE int64_t target_of(const cross_entropy_args &a, int64_t token)
{
  const int64_t target = id_at(a.targets, token);
  if (target < 0 || target == a.ignore) return -1;
  if (target < a.vocabulary) return target;
  report_fault(a.fault, FAULT_TOKEN_ID, 0, token);
  return -1;
}

template <int THREADS> DEVICE void any_cross_entropy_count(const cross_entropy_args &a)
{
  double counted = 0;
  for (int64_t t = threadIdx.x; t < a.tokens; t += THREADS) counted += target_of(a, t) >= 0;
  counted = cta_sum<THREADS>(counted);
  if (threadIdx.x == 0) *a.counted = (int64_t)counted;
}

/* The last pass may write over the logits: each thread its own, after all have read the target's. */
template <int THREADS> DEVICE void any_cross_entropy_rows(const cross_entropy_args &a)
{
  const int64_t t = blockIdx.x, target = target_of(a, t);
  double most = -INFINITY, sum = 0;
  if (target < 0) {
    if (threadIdx.x == 0) a.losses[t] = 0;
    for (int64_t v = threadIdx.x; v < a.vocabulary && a.dlogits.data; v += THREADS) put(a.dlogits, t, v, 0);
    return;
  }
  const double share = (double)a.scale / (double)*a.counted, own = get(a.logits, t, target);
  for (int64_t v = threadIdx.x; v < a.vocabulary; v += THREADS) most = fmax(most, get(a.logits, t, v));
  most = cta_max<THREADS>(most);
  for (int64_t v = threadIdx.x; v < a.vocabulary; v += THREADS) sum += exp(get(a.logits, t, v) - most);
  sum = cta_sum<THREADS>(sum);
  if (threadIdx.x == 0) a.losses[t] = (float)(log(sum) + (most - own));
  for (int64_t v = threadIdx.x; v < a.vocabulary && a.dlogits.data; v += THREADS)
    put(a.dlogits, t, v, share * (exp(get(a.logits, t, v) - most) / sum - (v == target)));
}

template <int THREADS> DEVICE void any_cross_entropy_mean(const cross_entropy_args &a)
{
  double sum = 0;
  for (int64_t t = threadIdx.x; t < a.tokens; t += THREADS) sum += (double)a.losses[t];
  sum = cta_sum<THREADS>(sum);
  if (threadIdx.x == 0) *a.loss = *a.counted ? (float)(sum / (double)*a.counted) : 0.f;
}

/* ---- optimiser ---- */

template <int THREADS> DEVICE void any_squares(const global_norm_args &a)
{
  const run_of_row run(a.cols);
  double sum = 0;
#pragma unroll 4
  for (int64_t c = run.begin + threadIdx.x; c < run.end; c += THREADS) {
    const double value = get(a.gradient, run.row, c);
    sum += value * value;
  }
  sum = cta_sum<THREADS>(sum);
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sum;
}

template <int THREADS> DEVICE void any_total(const global_norm_args &a)
{
  const double scale = (double)a.scale, most = (double)a.max_norm;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < a.count; i += THREADS) sum += a.sums[i];
  sum = cta_sum<THREADS>(sum);
  if (threadIdx.x != 0) return;
  const double norm = fabs(scale) * sqrt(sum);
  const bool finite = isfinite(norm) && isfinite((float)norm);
  *a.norm = (float)norm;
  *a.factor = !finite ? NAN : (float)(most > 0 && norm > most ? scale * (most / norm) : scale);
  if (a.step && finite) ++*a.step;
}

template <int THREADS> DEVICE void any_adamw(const adamw_args &a)
{
  __shared__ double bias[2];
  const double factor = a.factor ? (double)*a.factor : 1., t = (double)(*a.step < 1 ? 1 : *a.step);
  const double rate = (double)a.rate * (a.schedule ? (double)*a.schedule : 1.);
  const double beta1 = (double)a.beta1, beta2 = (double)a.beta2;
  if (!isfinite(factor)) return;
  if (threadIdx.x < 2) bias[threadIdx.x] = 1 / (1 - pow(threadIdx.x ? beta2 : beta1, t));
  __syncthreads();
  const double first = bias[0], second = bias[1];
  const run_of_row run(a.cols);
  for (int64_t c = run.begin + threadIdx.x; c < run.end; c += THREADS) {
    const double g = factor * get(a.gradient, run.row, c), w = get(a.master, run.row, c);
    const double m = beta1 * get(a.first, run.row, c) + (1 - beta1) * g;
    const double v = beta2 * get(a.second, run.row, c) + (1 - beta2) * g * g;
    const double step = m * first / (sqrt(v * second) + (double)a.eps);
    const float master = (float)(w - rate * (double)a.decay * w - rate * step);
    put(a.master, run.row, c, master);
    put(a.first, run.row, c, m);
    put(a.second, run.row, c, v);
    if (a.weights.data) put(a.weights, run.row, c, master);
  }
}

/* ---- kernels ---- */

#define ROWS_training
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ ARGUMENTS_##op a)              \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    any_##op<(WARPS)*WARP_SIZE>(a);                                                                                    \
  }
#define ARGUMENTS_embed                embedding_args
#define ARGUMENTS_embedding_clear      embedding_args
#define ARGUMENTS_embedding_count      embedding_args
#define ARGUMENTS_embedding_scan       embedding_args
#define ARGUMENTS_embedding_place      embedding_args
#define ARGUMENTS_embedding_backward   embedding_args
#define ARGUMENTS_norm_stats           norm_backward_args
#define ARGUMENTS_norm_dparameters     norm_backward_args
#define ARGUMENTS_norm_dx              norm_backward_args
#define ARGUMENTS_elementwise_backward elementwise_backward_args
#define ARGUMENTS_softmax_backward     elementwise_backward_args
#define ARGUMENTS_cross_entropy_count  cross_entropy_args
#define ARGUMENTS_cross_entropy_rows   cross_entropy_args
#define ARGUMENTS_cross_entropy_mean   cross_entropy_args
#define ARGUMENTS_squares              global_norm_args
#define ARGUMENTS_total                global_norm_args
#define ARGUMENTS_adamw                adamw_args
#include "variants.def"
