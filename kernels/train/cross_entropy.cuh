/* The loss of tokens by cross-entropy: its mean over those that count, and the gradients of the logits. */
#ifndef CUMOE_CROSS_ENTROPY_CUH
#define CUMOE_CROSS_ENTROPY_CUH

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

#endif
