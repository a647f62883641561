/* Softmax cross-entropy with its gradient. */
#ifndef CUMOE_LOSS_CUH
#define CUMOE_LOSS_CUH

#include <float.h>

#include "train/elements.cuh"
#include "train/sums.cuh"

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

/* The largest of a row's logits and the sum of exp(logit - most). */
struct exponentials {
  double most, sum;
};

/* A thread's own on the way: what it has is scaled when a larger one comes. Without one, most is finite: exp of
 * -infinity less it is 0. */
template <int THREADS, class R> DEVICE exponentials sum_exponentials(const cross_entropy_args &a, int64_t t)
{
  R most = -FLT_MAX;
  double sum = 0;
  const auto bring = [&](span columns) { return fetch(a.logits, t, columns); };
  for_fetched_vectors<THREADS>({0, a.vocabulary}, bring, [&](span columns, const raw_vector &raw) {
    R x[VECTOR], larger = most, part = 0;
    get_values(x, raw, a.logits.dtype);
    const int count = (int)(columns.end - columns.begin);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
      if (i < count) larger = fmax(larger, x[i]);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) part += i < count ? exp_of(x[i] - larger) : (R)0;
    if (larger > most) sum *= (double)exp_of(most - larger);
    sum += (double)part;
    most = larger;
  });
  const double of_row = cta_max<THREADS>((double)most);
  return {of_row, cta_sum<THREADS>(sum * exp((double)most - of_row))};
}

/* dlogits may be the logits: each thread its own. What is left of 1 at the target wants all digits. */
template <int THREADS, class R>
DEVICE void store_dlogits(const cross_entropy_args &a, int64_t t, int64_t target, exponentials e)
{
  const double share = (double)a.scale / (double)*a.counted;
  const R most = (R)e.most, factor = (R)(share / e.sum);
  const auto bring = [&](span columns) { return fetch(a.logits, t, columns); };
  for_fetched_vectors<THREADS>({0, a.vocabulary}, bring, [&](span columns, const raw_vector &raw) {
    R x[VECTOR];
    get_values(x, raw, a.logits.dtype);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
      x[i] = columns.begin + i == target ? (R)(share * (exp((double)x[i] - e.most) / e.sum - 1))
                                         : factor * exp_of(x[i] - most);
    put_vector(x, a.dlogits, t, columns);
  });
}

template <int THREADS> DEVICE void any_cross_entropy_rows(const cross_entropy_args &a)
{
  const int64_t t = blockIdx.x, target = target_of(a, t);
  if (target < 0) {
    if (threadIdx.x == 0) a.losses[t] = 0;
    if (a.dlogits.data)
      for_vectors<THREADS>({0, a.vocabulary}, [&](span columns) {
        const float zero[VECTOR] = {};
        put_vector(zero, a.dlogits, t, columns);
      });
    return;
  }
  in_type_of(a.logits, [&](auto real) {
    using R = decltype(real);
    const double own = get(a.logits, t, target); /* all have read it when the sums are done */
    const exponentials e = sum_exponentials<THREADS, R>(a, t);
    if (threadIdx.x == 0) a.losses[t] = (float)(log(e.sum) + (e.most - own));
    if (a.dlogits.data) store_dlogits<THREADS, R>(a, t, target, e);
  });
}

template <int THREADS> DEVICE void any_cross_entropy_mean(const cross_entropy_args &a)
{
  double sum = 0;
  for (int64_t t = threadIdx.x; t < a.tokens; t += THREADS) sum += (double)a.losses[t];
  sum = cta_sum<THREADS>(sum);
  if (threadIdx.x == 0) *a.loss = *a.counted ? (float)(sum / (double)*a.counted) : 0.f;
}

#endif
