/* The norm of all gradients, clipping by it, and AdamW. */
#ifndef CUMOE_OPTIMISER_CUH
#define CUMOE_OPTIMISER_CUH

#include "train/elements.cuh"
#include "train/sums.cuh"

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

#endif
