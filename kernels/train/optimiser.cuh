/* The norm of all gradients, and AdamW. */
#ifndef CUMOE_OPTIMISER_CUH
#define CUMOE_OPTIMISER_CUH

#include "train/elements.cuh"
#include "train/sums.cuh"

template <int THREADS> DEVICE void any_squares(const global_norm_args &a)
{
  const run_of_row run(a.cols);
  double sum = 0;
  for_vectors<THREADS>(run.columns, [&](span columns) {
    double value[VECTOR];
    get_vector(value, a.gradient, run.row, columns);
    sum += sum_of_products(value, value);
  });
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

/* What all elements of a step have alike. */
struct adamw_step {
  double factor, rate, decay, beta1, beta2, first, second, eps;

  DEVICE void move(double gradient, double &w, double &m, double &v) const
  {
    const double g = factor * gradient;
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    w = w - decay * w - rate * (m * first / (sqrt(v * second) + eps));
  }
};

DEVICE void move_vector(const adamw_args &a, const adamw_step &step, int64_t row, span columns)
{
  const raw_vector raw_g = fetch(a.gradient, row, columns), raw_w = fetch(a.master, row, columns),
                   raw_m = fetch(a.first, row, columns), raw_v = fetch(a.second, row, columns);
  double g[VECTOR], w[VECTOR], m[VECTOR], v[VECTOR];
  get_values(g, raw_g, a.gradient.dtype);
  get_values(w, raw_w, a.master.dtype);
  get_values(m, raw_m, a.first.dtype);
  get_values(v, raw_v, a.second.dtype);
  float master[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; i++) {
    step.move(g[i], w[i], m[i], v[i]);
    master[i] = (float)w[i];
  }
  put_vector(master, a.master, row, columns);
  put_vector(m, a.first, row, columns);
  put_vector(v, a.second, row, columns);
  if (a.weights.data) put_vector(master, a.weights, row, columns);
}

template <int THREADS> DEVICE void any_adamw(const adamw_args &a)
{
  __shared__ double bias[2];
  const double factor = a.factor ? (double)*a.factor : 1., t = (double)(*a.step < 1 ? 1 : *a.step);
  const double rate = (double)a.rate * (a.schedule ? (double)*a.schedule : 1.);
  if (!isfinite(factor)) return;
  if (threadIdx.x < 2) bias[threadIdx.x] = 1 / (1 - pow(threadIdx.x ? (double)a.beta2 : (double)a.beta1, t));
  __syncthreads();
  const adamw_step step = {factor,  rate,    rate * (double)a.decay, (double)a.beta1, (double)a.beta2,
                           bias[0], bias[1], (double)a.eps};
  const run_of_row run(a.cols);
  for_vectors<THREADS>(run.columns, [&](span columns) { move_vector(a, step, run.row, columns); });
}

#endif
