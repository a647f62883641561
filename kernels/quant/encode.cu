/*
 * Weights become codes with scales (kernels/encode.h). Memory is read twice, the second time out of a cache: a block
 * has `lanes` neighbouring threads, each with cells of 16 elements of a row; blocks that run over all channels have a
 * CTA.
 */
#include "device/dtype.cuh"
#include "device/ptx.cuh"
#include "encode.h"

/* Element (n, k) of the block's expert. */
template <class X> DEVICE const X *weights_at(const encode_args &a, const encode_block &b, int n, int k)
{
  return static_cast<const X *>(a.w) + ((int64_t)b.e * a.out + n) * a.w_ld + k;
}

/* Cells lane, lane + lanes, ... of channels n, n + step, ..., row by row. */
struct cell_walk {
  int n, cell;
  const int first_k, cells, n_step, n_carry, cell_step;
  DEVICE cell_walk(const encode_block &b, int n0, int step, int lane, int lanes)
      : first_k(b.k), cells((b.k_end - b.k) / ENCODE_CELL), n_step(lanes / cells * step), n_carry(step),
        cell_step(lanes % cells)
  {
    n = n0 + lane / cells * step;
    cell = lane % cells;
  }
  DEVICE int k() const { return first_k + cell * ENCODE_CELL; }
  DEVICE void next()
  {
    n += n_step;
    cell += cell_step;
    if (cell < cells) return;
    cell -= cells;
    n += n_carry;
  }
};

/* Those of cells lane, lane + lanes, ... of channels n, n + step, ... before n_end. */
template <class X>
DEVICE extremes extremes_of(const encode_args &a, const encode_block &b, int n, int n_end, int step, int lane,
                            int lanes)
{
  extremes e = extremes_none();
  for (cell_walk at(b, n, step, lane, lanes); at.n < n_end; at.next()) {
    float w[ENCODE_CELL];
    load_f32<ENCODE_CELL>(weights_at<X>(a, b, at.n, at.k()), w);
#pragma unroll
    for (int i = 0; i < ENCODE_CELL; i++) extremes_add(&e, w[i]);
  }
  return e;
}

DEVICE extremes extremes_of_two(const extremes &a, const extremes &b)
{
  const extremes both = {b.low < a.low ? b.low : a.low, b.high > a.high ? b.high : a.high, a.nan | b.nan};
  return both;
}

/* Of `lanes` neighbours; each of them gets it. All lanes of the warp. */
DEVICE extremes extremes_of_lanes(extremes e, int lanes)
{
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    const extremes other = {__shfl_xor_sync(ALL_LANES, e.low, mask), __shfl_xor_sync(ALL_LANES, e.high, mask),
                            __shfl_xor_sync(ALL_LANES, e.nan, mask)};
    e = extremes_of_two(e, other);
  }
  return e;
}

/* Codes of one cell: 8 or 16 bytes. */
template <int FORMAT> DEVICE void store_cell(uint8_t *codes, const float (&w)[ENCODE_CELL], float factor, int zero)
{
  constexpr int BITS = FORMAT == FORMAT_e4m3 || FORMAT == FORMAT_s8 ? 8 : 4, EACH = 32 / BITS;
  uint32_t word[ENCODE_CELL / EACH] = {};
#pragma unroll
  for (int i = 0; i < ENCODE_CELL; i++)
    word[i / EACH] |= (uint32_t)encode_weight(FORMAT, w[i], factor, zero) << i % EACH * BITS;
  if constexpr (BITS == 8)
    *reinterpret_cast<uint4 *>(codes) = make_uint4(word[0], word[1], word[2], word[3]);
  else
    *reinterpret_cast<uint2 *>(codes) = make_uint2(word[0], word[1]);
}

template <class X, int FORMAT>
DEVICE void store_format(const encode_args &a, const encode_block &b, int n, int n_end, int lane, float factor,
                         int zero)
{
  constexpr int PER_BYTE = FORMAT == FORMAT_e4m3 || FORMAT == FORMAT_s8 ? 1 : 2;
  for (cell_walk at(b, n, 1, lane, a.lanes); at.n < n_end; at.next()) {
    float w[ENCODE_CELL];
    load_f32<ENCODE_CELL>(weights_at<X>(a, b, at.n, at.k()), w);
    store_cell<FORMAT>(static_cast<uint8_t *>(a.codes) + ((int64_t)b.e * a.out + at.n) * a.codes_ld + at.k() / PER_BYTE,
                       w, factor, zero);
  }
}

template <class X>
DEVICE void store_codes(const encode_args &a, const encode_block &b, int n, int n_end, int lane, float factor, int zero)
{
  switch (a.format) {
  case FORMAT_e4m3: store_format<X, FORMAT_e4m3>(a, b, n, n_end, lane, factor, zero); break;
  case FORMAT_s8: store_format<X, FORMAT_s8>(a, b, n, n_end, lane, factor, zero); break;
  case FORMAT_u4: store_format<X, FORMAT_u4>(a, b, n, n_end, lane, factor, zero); break;
  default: store_format<X, FORMAT_mx4>(a, b, n, n_end, lane, factor, zero); break; /* and nv4: both e2m1 */
  }
}

/* Channels n .. n_end - 1 have one scale; none where n >= n_end. Returns their zero point. */
template <class X> DEVICE int encode_channels(const encode_args &a, const encode_block &b, int n, int n_end, int lane)
{
  const bool there = n < n_end, first = ENCODE_SCALES_FIRST(&a);
  const float global = a.global && there ? a.global[b.e * a.global_ld + encode_half(&a, n)] : 1.f;
  extremes e = extremes_none();
  float scale = 1.f;
  if (!first) {
    if (there) e = extremes_of<X>(a, b, n, n_end, 1, lane, a.lanes);
    e = extremes_of_lanes(e, a.lanes);
    const stored_scale s = encode_scale(&a, e, global);
    if (there && lane == 0) encode_store_scale(&a, &b, encode_scale_row(&a, b.e, n), s);
    scale = s.value;
  } else if (there) {
    scale = encode_read_scale(&a, &b);
  }
  const float factor = encode_factor(&a, scale, global);
  const int zero = encode_zero(&a, e, factor);
  if (there) store_codes<X>(a, b, n, n_end, lane, factor, zero);
  return zero;
}

template <class X, int THREADS> DEVICE void encode_blocks(const encode_args &a)
{
  wait_for_earlier_grids();
  const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  const int64_t task = at / a.lanes, tasks = (int64_t)a.experts * ENCODE_ROWS(&a) * a.k_blocks;
  const int lane = at % a.lanes;
  encode_block b = encode_task(&a, task < tasks ? task : 0);
  if (task >= tasks) b.n_end = b.n; /* its lanes go with their warp */
  if (!a.zero) {
    encode_channels<X>(a, b, b.n, b.n_end, lane);
    return;
  }
  uint32_t zeros = 0;
  for (int i = 0; i < 8; i++) {
    const int n = b.n + i, zero = encode_channels<X>(a, b, n, n < b.n_end ? n + 1 : n, lane);
    if (n < b.n_end) zeros |= (uint32_t)(zero - a.offset - a.zero_add) << i * 4;
  }
  if (b.n < b.n_end && lane == 0) a.zero[((int64_t)b.e * ((a.out + 7) / 8) + b.n / 8) * a.zero_ld + b.block] = zeros;
}

/* One scale a CTA. */
template <class X, int THREADS> DEVICE void encode_scales_blocks(const encode_args &a)
{
  __shared__ extremes of_warp[THREADS / WARP_SIZE];
  wait_for_earlier_grids();
  int step;
  const encode_block b = encode_scales_task(&a, blockIdx.x, &step);
  if (b.n >= b.n_end) return;
  const extremes e = extremes_of_lanes(extremes_of<X>(a, b, b.n, b.n_end, step, threadIdx.x, THREADS), WARP_SIZE);
  if (lane_id() == 0) of_warp[warp_id()] = e;
  __syncthreads();
  if (threadIdx.x > 0) return;
  extremes all = of_warp[0];
  for (int w = 1; w < THREADS / WARP_SIZE; w++) all = extremes_of_two(all, of_warp[w]);
  encode_store_scales(&a, &b, all);
}

#define ROWS_encode
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ encode_args a)                 \
  {                                                                                                                    \
    op##_##form<X, WARPS * WARP_SIZE>(a);                                                                              \
  }
#include "variants.def"
