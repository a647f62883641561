/* Sums and maxima of a CTA, in double, in an order of their own; functions by the type they are in. */
#ifndef CUMOE_SUMS_CUH
#define CUMOE_SUMS_CUH

#include "device/common.cuh"

/* Over the CTA; valid in every thread, and the same bits. Again only after a barrier. */
template <int THREADS> DEVICE double cta_sum(double value)
{
  constexpr int WARPS = THREADS / WARP_SIZE;
  __shared__ double part[WARPS];
  value = warp_sum(value);
  if (WARPS == 1) return value;
  __syncthreads();
  if (lane_id() == 0) part[warp_id()] = value;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < WARPS; w++) sum += part[w];
  return sum;
}

/* Not NaN, if there is anything else. */
template <int THREADS> DEVICE double cta_max(double value)
{
  constexpr int WARPS = THREADS / WARP_SIZE;
  __shared__ double part[WARPS];
  for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) value = fmax(value, __shfl_xor_sync(ALL_LANES, value, mask));
  if (WARPS == 1) return value;
  __syncthreads();
  if (lane_id() == 0) part[warp_id()] = value;
  __syncthreads();
  double most = part[0];
  for (int w = 1; w < WARPS; w++) most = fmax(most, part[w]);
  return most;
}

DEVICE double exp_of(double x)
{
  return exp(x);
}
DEVICE float exp_of(float x)
{
  return expf(x);
}
DEVICE double erfc_of(double x)
{
  return erfc(x);
}
DEVICE float erfc_of(float x)
{
  return erfcf(x);
}

template <class R, int COUNT> DEVICE double sum_of_products(const R (&a)[COUNT], const R (&b)[COUNT])
{
  R sum = 0;
#pragma unroll
  for (int i = 0; i < COUNT; i++) sum += a[i] * b[i];
  return (double)sum;
}

#endif
