/*
 * Activations become codes of 8 bits with scales (args.h: row_format). A thread has eight elements of a group of 128,
 * so half a warp has the group, and several groups are in flight, for the speed of memory is the limit. Where a row has
 * one scale, one to all warps of a CTA have the row.
 */
#ifndef CUMOE_QUANTIZE_CUH
#define CUMOE_QUANTIZE_CUH

#include "device/quant.cuh"

enum { EACH = 8, GROUP = 128, GROUP_LANES = GROUP / EACH };

/* Eight elements as they lie in memory. */
template <class X> struct octet {
  uint4 raw[EACH * sizeof(X) / 16];

  DEVICE void load(const quantize_args &a, int64_t row, int k, bool there)
  {
    const X *source = static_cast<const X *>(a.x) + row * a.x_ld + k;
#pragma unroll
    for (int i = 0; i < (int)(EACH * sizeof(X) / 16); i++)
      raw[i] = ld_global_no_allocate(source + i * (16 / sizeof(X)), there);
  }
  DEVICE void to_floats(float (&value)[EACH]) const
  {
    const uint32_t *words = reinterpret_cast<const uint32_t *>(raw);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if constexpr (sizeof(X) == 4) {
        value[i] = __uint_as_float(words[i]);
      } else {
        const float2 two = unpack_pair<X>(words[i / 2]);
        value[i] = i % 2 ? two.y : two.x;
      }
    }
  }
};

template <class Q, class X> DEVICE float largest(const octet<X> &x, float most)
{
  float value[EACH];
  x.to_floats(value);
#pragma unroll
  for (int i = 0; i < EACH; i++) most = larger<Q>(most, fabsf(value[i]));
  return most;
}

/* Over LANES neighbours; each of them gets it. */
template <class Q, int LANES> DEVICE float largest_of_lanes(float most)
{
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) most = larger<Q>(most, __shfl_xor_sync(ALL_LANES, most, mask));
  return most;
}

template <class Q, class X>
DEVICE void store_codes(const quantize_args &a, int64_t row, int k, const octet<X> &x, float inverse)
{
  float value[EACH];
  x.to_floats(value);
  *reinterpret_cast<uint2 *>(static_cast<uint8_t *>(a.codes) + row * a.codes_ld + k) =
      make_uint2(quantize_four<Q>(value, inverse), quantize_four<Q>(value + 4, inverse));
}

/* ---- a scale for every 128 elements ---- */

/* The rows begin .. end - 1 of a matrix, of which CTA `cta` of `ctas` takes its part. */
struct row_range {
  int32_t begin, end;
  unsigned cta, ctas;
};

/* A group of the CTAs' walk through all of them, half a warp each. */
struct group_place {
  int32_t row, group;

  DEVICE void advance(group_place step, int32_t groups)
  {
    row += step.row;
    group += step.group;
    if (group >= groups) {
      group -= groups;
      row++;
    }
  }
};

template <class X, class Q, int HALF_WARPS> DEVICE void quantize_groups(const quantize_args &a, row_range rows)
{
  constexpr int IN_FLIGHT = 8 / sizeof(X);
  const unsigned groups = ROW_GROUPS(a.format, a.cols), all = rows.ctas * HALF_WARPS;
  const unsigned first = rows.cta * HALF_WARPS + threadIdx.x / GROUP_LANES;
  const group_place step = {(int32_t)(all / groups), (int32_t)(all % groups)};
  const int k0 = threadIdx.x % GROUP_LANES * EACH - a.format.origin % GROUP;
  group_place next = {rows.begin + (int32_t)(first / groups), (int32_t)(first % groups)}, ahead = next;
  while (__any_sync(ALL_LANES, next.row < rows.end)) {
    octet<X> x[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const int k = ahead.group * GROUP + k0;
      x[i].load(a, ahead.row, k, ahead.row < rows.end && k >= 0 && k < a.cols);
      ahead.advance(step, groups);
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const float scale = row_scale<Q>(a.format, largest_of_lanes<Q, GROUP_LANES>(largest<Q>(x[i], 0.f)));
      const int k = next.group * GROUP + k0;
      if (next.row < rows.end) {
        if (k >= 0 && k < a.cols) store_codes<Q>(a, next.row, k, x[i], __frcp_rn(scale));
        if (threadIdx.x % GROUP_LANES == 0) a.scale[next.group * a.scale_ld + next.row] = scale;
      }
      next.advance(step, groups);
    }
  }
}

/* ---- a scale for a row ---- */

/* A row's first vectors stay in registers, the others are read twice. */
template <class X, class Q, int WARPS>
DEVICE void quantize_rows(const quantize_args &a, row_range rows, float (&warp_most)[WARPS])
{
  constexpr int KEPT = 8 / sizeof(X);
  int team = 1; /* warps a row */
  while (team < WARPS && team * WARP_SIZE * EACH * KEPT < a.cols) team *= 2;
  const int lanes = team * WARP_SIZE, k0 = threadIdx.x % lanes * EACH;
  const unsigned begin = rows.begin, end = rows.end;
  for (unsigned first = begin + rows.cta * (WARPS / team); first < end; first += rows.ctas * (WARPS / team)) {
    const unsigned row = first + warp_id() / team;
    const int cols = row < end ? a.cols : 0;
    octet<X> kept[KEPT], x;
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < KEPT; i++) kept[i].load(a, row, k0 + i * lanes * EACH, k0 + i * lanes * EACH < cols);
#pragma unroll
    for (int i = 0; i < KEPT; i++) most = largest<Q>(kept[i], most);
    for (int k = k0 + KEPT * lanes * EACH; k < cols; k += lanes * EACH) {
      x.load(a, row, k, true);
      most = largest<Q>(x, most);
    }
    most = largest_of_lanes<Q, WARP_SIZE>(most);
    if (team > 1) {
      __syncthreads(); /* those of the rows before have been read */
      if (lane_id() == 0) warp_most[warp_id()] = most;
      __syncthreads();
      for (int w = 0; w < team; w++) most = larger<Q>(most, warp_most[warp_id() / team * team + w]);
    }
    const float scale = row_scale<Q>(a.format, most), inverse = __frcp_rn(scale);
    if (row < end && threadIdx.x % lanes == 0) a.scale[row] = scale;
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (k0 + i * lanes * EACH < cols) store_codes<Q>(a, row, k0 + i * lanes * EACH, kept[i], inverse);
    for (int k = k0 + KEPT * lanes * EACH; k < cols; k += lanes * EACH) {
      x.load(a, row, k, true);
      store_codes<Q>(a, row, k, x, inverse);
    }
  }
}

/* `warp_most` is the CTA's: it may be given again. */
template <class X, class Q, int WARPS>
DEVICE void quantize_range(const quantize_args &a, row_range rows, float (&warp_most)[WARPS])
{
  if (a.format.mode == ROWS_GROUP)
    quantize_groups<X, Q, WARPS * 2>(a, rows);
  else
    quantize_rows<X, Q, WARPS>(a, rows, warp_most);
}

#endif
