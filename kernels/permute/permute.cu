/*
 * The permutation: a copy of every token in each of its rows, for the GEMM forms that bulk copies feed. Tokens are read
 * once and written k times, whole lines each: at T 8192, k 8 the writes are the price, at the speed of memory.
 */
#include "device/ptx.cuh"

/* Elements do not matter, only bytes; a thread has 16 of a token. */
template <int BYTES> DEVICE void permute_scatter(const permute_args &a)
{
  wait_for_earlier_grids();
  const int64_t bytes = (int64_t)a.hidden * a.element;
  const unsigned slices = ceil_div(bytes, (int64_t)BYTES);
  const int64_t token = blockIdx.x / slices, at = (int64_t)(blockIdx.x % slices) * BYTES + threadIdx.x * 16;
  check_token_count(a.tokens, a.fault);
  if (token >= token_total(a.tokens) || at >= bytes) return;
  const uint4 value =
      __ldg(reinterpret_cast<const uint4 *>(static_cast<const char *>(a.x) + token * a.x_ld * a.element + at));
  const int32_t *slots = a.slot_row + token * a.top_k;
  char *rows = static_cast<char *>(a.rows) + at;
#pragma unroll 8
  for (int j = 0; j < a.top_k; j++) {
    const int row = slots[j];
    if (row >= 0 && row < a.rows_cap) *reinterpret_cast<uint4 *>(rows + row * a.rows_ld * a.element) = value;
  }
}

#define ROWS_permute
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ op##_args a)                   \
  {                                                                                                                    \
    static_assert(COLUMNS == LANES * 16 && LANES == WARPS * WARP_SIZE, "16 bytes a thread");                           \
    op##_##form<COLUMNS>(a);                                                                                           \
  }
#include "variants.def"
