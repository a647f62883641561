/* From accumulators to output elements: pair weight, bias, activation, one rounding. */
#ifndef CUMOE_EPILOGUE_CUH
#define CUMOE_EPILOGUE_CUH

#include "act.cuh"
#include "dtype.cuh"
#include "schedule.cuh"

/* How accumulator columns name channels. */
enum columns {
  COLUMNS_plain,    /* column = channel */
  COLUMNS_blocks,   /* 8 gate channels, the same 8 up channels, the next 8 gate ... */
  COLUMNS_gate_up,  /* gate and up element by element */
  COLUMNS_up_gate
};

DEVICE columns columns_of(const gemm_args &args, bool up, bool n_major)
{
  if (!up || !args.gated) return COLUMNS_plain;
  if (!n_major || args.b.n_stride == 1) return COLUMNS_blocks;
  const char *gate = expert_base<char>(args.b, 0, 0), *above = expert_base<char>(args.b, 1, 0);
  return gate < above ? COLUMNS_gate_up : COLUMNS_up_gate;
}

/* Accumulators of CHANNELS consecutive channels, from `channel` of the tile on, out of a staged row. */
template <int CHANNELS>
DEVICE void take_columns(columns order, const float *row, int channel, float (&g)[CHANNELS], float (&u)[CHANNELS])
{
#pragma unroll
  for (int i = 0; i < CHANNELS; i++) u[i] = 0.f;
  switch (order) {
  case COLUMNS_plain:
    load_f32<CHANNELS>(row + channel, g);
    break;
  case COLUMNS_blocks:
    load_f32<CHANNELS>(row + channel / 8 * 16 + channel % 8, g);
    load_f32<CHANNELS>(row + channel / 8 * 16 + channel % 8 + 8, u);
    break;
  default:
    float pair[2 * CHANNELS];
    load_f32<2 * CHANNELS>(row + 2 * channel, pair);
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
      g[i] = order == COLUMNS_gate_up ? pair[2 * i] : pair[2 * i + 1];
      u[i] = order == COLUMNS_gate_up ? pair[2 * i + 1] : pair[2 * i];
    }
  }
}

DEVICE float bias_of(const expert_matrix &b, int half, int expert, int channel)
{
  if (!b.bias[half]) return 0.f;
  return load_any(b.bias[half], expert * b.bias_expert_stride + channel * b.bias_n_stride, b.bias_dtype);
}

/* UP: with activation. `weight` is the row's. */
template <bool UP> DEVICE float finish(const gemm_args &args, int expert, int channel, float weight, float g, float u)
{
  g = g * weight + bias_of(args.b, 0, expert, channel);
  if (!UP) return g;
  if (args.gated) u = u * weight + bias_of(args.b, 1, expert, channel);
  return activate(args, g, u);
}

/*
 * Writes a unit whose accumulators are staged in shared memory, `ld` floats a row: stores of 16 bytes, rolled over
 * the tile so that the activations are in the program once. Channels come in eights (n is a multiple of 8).
 */
template <class T, bool UP, int THREADS>
DEVICE void store_unit(const gemm_args &args, const tile_unit &unit, const float *staged, int ld, columns order,
                       int tile_channels)
{
  constexpr int EIGHT = 8;
  const int first = unit.n * tile_channels, eights = tile_channels / EIGHT;
#pragma unroll 1
  for (int i = threadIdx.x; i < unit.rows * eights; i += THREADS) {
    int row = i / eights, channel = i % eights * EIGHT;
    if (first + channel >= args.n) continue;
    float g[EIGHT], u[EIGHT], out[EIGHT];
    take_columns<EIGHT>(order, staged + row * ld, channel, g, u);
    float weight = row_weight(args, unit.row + row);
#pragma unroll
    for (int j = 0; j < EIGHT; j++) out[j] = finish<UP>(args, unit.expert, first + channel + j, weight, g[j], u[j]);
    store_f32<EIGHT>(static_cast<T *>(args.c) + (int64_t)(unit.row + row) * args.c_ld + first + channel, out);
  }
}

#endif
