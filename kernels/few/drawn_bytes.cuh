/* drawn, weights of 8 bits: columns as codes, and products of a slice. */
#ifndef CUMOE_DRAWN_BYTES_CUH
#define CUMOE_DRAWN_BYTES_CUH

#include "few/drawn_products.cuh"
#include "few/scaled.cuh"

/* ---- the largest size of rows that have one scale ---- */

enum { DRAWN_CHUNK = 4 * FEW_CHUNK }; /* elements: a warp's, all asked for at once */

/* H: as soon as it is written; x may have anything in it. */
template <class L, bool H> DEVICE uint32_t largest_of_chunk(const typename L::Y *row, int first, int end)
{
  uint4 v[DRAWN_CHUNK / FEW_CHUNK];
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < DRAWN_CHUNK / FEW_CHUNK; i++) {
    const int k = first + i * FEW_CHUNK + lane_id() * 8;
    v[i] = k < end ? load_relaxed_vector(row + k) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < DRAWN_CHUNK / FEW_CHUNK; i++) {
    while (H && is_unwritten(v[i])) {
      __nanosleep(FEW_POLL);
      v[i] = load_relaxed_vector(row + first + i * FEW_CHUNK + lane_id() * 8);
    }
    most = max(most, largest_of<1>(v[i]));
  }
  return __reduce_max_sync(ALL_LANES, most);
}

/* By all threads. */
template <class L> DEVICE void measure_x(const few_args &args, drawn_smem<L> &smem)
{
  const gemm_args &g = args.up;
  if (!has_one_scale<L>(g)) return;
  const int chunks = ceil_div(g.k, (int)DRAWN_CHUNK),
            items = min((int)token_total(args.map.tokens), (int)L::TOKENS) * chunks;
#pragma unroll 1
  for (int item = warp_id(); item < items; item += L::THREADS / WARP_SIZE) {
    const int token = item / chunks;
    const typename L::Y *row = static_cast<const typename L::Y *>(g.a) + token * g.a_ld;
    const uint32_t most = largest_of_chunk<L, false>(row, item % chunks * DRAWN_CHUNK, g.k);
    if (lane_id() == 0) atomicMax(&smem.rows.of_x[token], most);
  }
}

template <class L> DEVICE void prepare_rows_of_codes(const few_args &args, drawn_smem<L> &smem, bool early)
{
  drawn_rows<L> &rows = smem.rows;
  if (threadIdx.x < L::TOKENS) rows.of_x[threadIdx.x] = 0;
  if (threadIdx.x < L::PAIRS) rows.of_h[threadIdx.x] = 0, rows.taken[threadIdx.x] = rows.measured[threadIdx.x] = 0;
  __syncthreads();
  if (early) measure_x<L>(args, smem);
}

/* All rows of h of a unit's expert, as soon as they are written, once a CTA: by warps that want to multiply them. */
template <class L> DEVICE void measure_h(const few_args &args, drawn_smem<L> &smem, const drawn_unit &unit)
{
  const gemm_args &g = args.down;
  const int chunks = ceil_div(g.k, (int)DRAWN_CHUNK), items = unit.columns * chunks;
  volatile int32_t *measured = &smem.rows.measured[unit.active];
#pragma unroll 1
  while (__any_sync(ALL_LANES, *measured < items)) {
    const int item = __shfl_sync(ALL_LANES, lane_id() == 0 ? atomicAdd(&smem.rows.taken[unit.active], 1) : 0, 0);
    if (item >= items) break;
    const int pair = column_pair(smem.table.column[unit.active][item / chunks]);
    const typename L::Y *row = static_cast<const typename L::Y *>(g.a) + pair * g.a_ld;
    const uint32_t most = largest_of_chunk<L, true>(row, item % chunks * DRAWN_CHUNK, g.k);
    if (lane_id() == 0) {
      atomicMax(&smem.rows.of_h[pair], most);
      __threadfence_block();
      atomicAdd(&smem.rows.measured[unit.active], 1);
    }
    __syncwarp();
  }
  while (*measured < items) __nanosleep(FEW_POLL);
  __threadfence_block();
  __syncwarp();
}

/* ---- columns ---- */

/* Bits of the largest size of a column's row. */
template <class L> DEVICE uint32_t largest_of_row(const drawn_rows<L> &rows, bool down, few_column column)
{
  return down ? rows.of_h[column_pair(column)] : rows.of_x[column_token(column)];
}

/* A slice's columns into codes: of e4m3 their values, which take as much room, each vector in its place; of s8 the
 * first 256 bytes of each column, vectors of 16. By a warp: lane l has elements 8 l to 8 l + 7, 16 lanes have a run. */
template <class L>
DEVICE void arrange_bytes(const few_args &args, drawn_smem<L> &smem, const drawn_slice<L> &at, drawn_stage<L> &stage,
                          float (&worth)[L::COLUMNS][L::RUNS])
{
  using X = typename L::X;
  using Y = typename L::Y;
  const gemm_args &g = at.unit.down ? args.down : args.up;
  const few_column *columns = smem.table.column[at.unit.active];
  const bool one = has_one_scale<L>(g);
  const int lane = lane_id();
  if (one && at.unit.down) measure_h<L>(args, smem, at.unit);
  uint4 *row = stage.columns[0];
#pragma unroll 1
  for (int c = 0; c < at.unit.columns; c++, row += L::VECTORS) {
    uint4 &place = row[drawn_column_vector(c, lane)], v = place;
    if (at.unit.down) v = await_written<Y>(g, columns[c], at.slice * L::BK + lane * 8, v);
    const uint32_t most = one ? largest_of_row<L>(smem.rows, at.unit.down, columns[c]) : largest_of<16>(v);
    const float scale = row_scale<X>(g.rows, unpack_pair<Y>(most).x);
    const uint2 codes = codes_of<L>(v, scale);
    if constexpr (same_type<X, e4m3>) {
      place = values_of(codes);
    } else {
      __syncwarp();
      reinterpret_cast<uint2 *>(&row[lane / 2 ^ c])[lane % 2] = codes;
    }
    if (lane % 16 == 0) worth[c][lane / 16] = scale;
  }
  __syncwarp();
}

/* ---- products ---- */

/* Word q = l % 4 of a vector of 16 codes is a lane's in rows l / 4 and l / 4 + 8, and the same four elements of column
 * l / 4, a token of which there are two columns. So lane l has the sums of token l % 4 in those rows, twice. */
template <class L> struct drawn_bytes_reader : drawn_words<L> {
  const unsigned char *columns;
  uint32_t elements;
  bool there;

  DEVICE drawn_bytes_reader(const drawn_stage<L> &stage, const drawn_lane<L> &own, int count)
      : columns(reinterpret_cast<const unsigned char *>(stage.columns)), elements(own.elements),
        there(lane_id() / 8 < count)
  {
    this->codes = shared_address(&stage) + own.codes;
  }
  /* Elements that go with vector v of the slice's weight rows. */
  DEVICE uint32_t load_codes(int v) const
  {
    return there ? *reinterpret_cast<const uint32_t *>(columns + (elements ^ v * 16)) : 0;
  }
  DEVICE uint2 load_values(int v) const
  {
    return there ? *reinterpret_cast<const uint2 *>(columns + (elements ^ v * 32)) : make_uint2(0, 0);
  }
};

/* Vectors v and v + 1. */
template <class L, int TILES>
DEVICE void multiply_vectors(const drawn_bytes_reader<L> &from, int v, uint32_t flip, int32_t (&part)[TILES][4])
{
  const uint32_t first = from.load_codes(v), second = from.load_codes(v + 1);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    uint32_t words[4];
    from.load_words(t, v / 4, v / 2 % 2, words);
    mma_m16n8k32_s8(part[t], {words[0] ^ flip, words[1] ^ flip, words[2] ^ flip, words[3] ^ flip}, {first, second});
  }
}
template <class L, int TILES>
DEVICE void multiply_vectors(const drawn_bytes_reader<L> &from, int v, uint32_t bias, float (&part)[TILES][4])
{
  using W = typename L::W;
  using M = typename L::CODE::M;
  const uint2 x[2] = {from.load_values(v), from.load_values(v + 1)};
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    uint32_t words[4];
    from.load_words(t, v / 4, v / 2 % 2, words);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint2 a = decode_four<W, M>(words[2 * i], bias), b = decode_four<W, M>(words[2 * i + 1], bias);
      multiply_four<M>(part[t], a.x, a.y, b.x, b.y, x[i].x, x[i].y);
    }
  }
}

/* Of the first tiles. */
template <class L, int TILES>
DEVICE void multiply_tiles(const drawn_bytes_reader<L> &from, const float (&worth)[L::COLUMNS][L::RUNS],
                           const drawn_slice<L> &at, const expert_matrix &b, float (&sum)[L::TILES][2])
{
  const uint32_t bias = bias_of_codes<L>(b.offset);
  float own[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) own[t] = scale_value(at.scales[t][0], b.scale.dtype);
#pragma unroll
  for (int run = 0; run < L::RUNS; run++) {
    typename L::CODE::SUM part[TILES][4] = {};
#pragma unroll
    for (int v = 0; v < 8; v += 2) multiply_vectors<L, TILES>(from, run * 8 + v, bias, part);
    const float factor = worth[lane_id() % 4][run];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int o = 0; o < 2; o++)
        sum[t][o] = fmaf((float)part[t][2 * o],
                         __shfl_sync(ALL_LANES, own[t], run * 16 + o * 8 + lane_id() / 4) * factor, sum[t][o]);
  }
}

template <class L>
DEVICE void multiply_bytes(const drawn_stage<L> &stage, const drawn_lane<L> &lane,
                           const float (&worth)[L::COLUMNS][L::RUNS], const drawn_slice<L> &at, const expert_matrix &b,
                           float (&sum)[L::TILES][2])
{
  const drawn_bytes_reader<L> from(stage, lane, at.unit.columns);
  if (at.unit.tiles < L::TILES) /* down, where a CTA has few channels */
    multiply_tiles<L, 1>(from, worth, at, b, sum);
  else
    multiply_tiles<L, L::TILES>(from, worth, at, b, sum);
}

#endif
