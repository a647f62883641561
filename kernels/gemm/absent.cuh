/* Scales that products of the tensor cores lack: any number, of the few weights that are beyond what a model trains.
 * Forms that decode mx4 and nv4 in registers leave their weights out, and add them here, one by one. */
#ifndef CUMOE_ABSENT_CUH
#define CUMOE_ABSENT_CUH

#include "gemm/weight_factors.cuh"

/* Of a weight row's codes, whose scales are `step` bytes apart, and one row of A, in f32: of the scales that
 * lacks(code) says are left out; element(k) is A's. */
template <class W, class LACKS, class ELEMENT>
DEVICE float absent_sum(const char *codes, const uint8_t *scales, int64_t step, int count, LACKS lacks, ELEMENT element)
{
  constexpr int RUN = operand<W>::K_PER_SCALE;
  float sum = 0.f;
#pragma unroll 1
  for (int k0 = 0; k0 < count; k0 += RUN) {
    const int code = scales[k0 / RUN * step];
    if (!lacks(code)) continue;
    float part = 0.f;
#pragma unroll 1
    for (int k = k0; k < k0 + RUN; k++) part += e2m1_to_f32((uint32_t)codes[k / 2] >> k % 2 * 4 & 15) * element(k);
    sum += part * (same_type<W, nv4> ? e4m3_to_f32(code) : e8m0_to_f32(code));
  }
  return sum;
}

/* acc += part(octet, token): a thread's sums are of its weight row in each octet and of tokens 8 j + 2 (lane % 4) + t.
 * As registers have no index, each is compared with all places. */
template <class S, class PART>
DEVICE void add_absent_parts(int rows, float (&acc)[S::BLOCKS][S::ACCUMULATORS], PART part)
{
#pragma unroll 1
  for (int i = 0; i < ceil_div(rows, 8) * 2 * S::OCTETS; i++) {
    const int octet = i % S::OCTETS, t = i / S::OCTETS % 2, j = i / S::OCTETS / 2,
              token = j * 8 + (int)(tid_x() % WARP_SIZE) % 4 * 2 + t;
    const float own = part(octet, token);
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
      for (int a = 0; a < S::ACCUMULATORS; a++)
        if (octet == block + a / 2 % 2 * S::BLOCKS && j == a / 4 && t == a % 2) acc[block][a] += own;
  }
}

#endif
