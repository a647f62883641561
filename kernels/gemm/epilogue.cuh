/* From accumulators to output elements: pair weight, bias, activation, one rounding. */
#ifndef CUMOE_EPILOGUE_CUH
#define CUMOE_EPILOGUE_CUH

#include "gemm/activation.cuh"
#include "gemm/product.cuh"
#include "gemm/schedule.cuh"

/* How accumulator columns name channels. */
enum columns {
  COLUMNS_plain,   /* column = channel */
  COLUMNS_blocks,  /* 8 gate channels, the same 8 up channels, the next 8 gate ... */
  COLUMNS_gate_up, /* gate and up element by element */
  COLUMNS_up_gate
};

/* The channel of a K-major tile's column. */
struct tile_column {
  int half, channel;

  DEVICE tile_column(const tile_unit &unit, columns order, int count, int column)
  {
    const bool plain = order == COLUMNS_plain;
    half = plain ? 0 : column / 8 % 2;
    channel = plain ? unit.n * count + column : unit.n * (count / 2) + column / 16 * 8 + column % 8;
  }
};

template <class S> DEVICE columns columns_of(const gemm_args &args)
{
  if (!S::gated(args)) return COLUMNS_plain;
  if (!S::N_MAJOR || args.b.n_stride == 1) return COLUMNS_blocks;
  const char *gate = expert_base<char>(args.b, 0, 0), *above = expert_base<char>(args.b, 1, 0);
  return gate < above ? COLUMNS_gate_up : COLUMNS_up_gate;
}

/* Staged accumulators: rows of f32, padded by 4 floats after every 32 and 8 at the end, so that neither the rows of a
 * fragment nor the blocks of 16 that neighbouring threads read meet in a bank. */
DEVICE constexpr int staged_offset(int column)
{
  return column + column / 32 * 4;
}
template <int COLUMNS> constexpr int STAGED_LD = COLUMNS + COLUMNS / 32 * 4 + 8;

/* Accumulators of 8 consecutive channels, from `channel` of the tile on, out of a staged row. */
DEVICE void take_channels(columns order, const float *row, int channel, float (&g)[8], float (&u)[8])
{
  if (order == COLUMNS_plain) {
    load_f32<8>(row + staged_offset(channel), g);
    return;
  }
  float both[16];
  load_f32<16>(row + staged_offset(2 * channel), both);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    g[i] = order == COLUMNS_blocks ? both[i] : order == COLUMNS_gate_up ? both[2 * i] : both[2 * i + 1];
    u[i] = order == COLUMNS_blocks ? both[8 + i] : order == COLUMNS_gate_up ? both[2 * i + 1] : both[2 * i];
  }
}

/* ---- the arithmetic of all forms: sum x weight of the row x scale of the weights + bias, then the activation ---- */

/* Biases of N channels of a half, `step` apart; 0 where there are none. */
template <int N>
DEVICE void load_bias(const expert_matrix &b, int half, int expert, int64_t channel, float (&bias)[N], int step = 1)
{
#pragma unroll
  for (int i = 0; i < N; i++) bias[i] = 0.f;
  if (!b.bias[half]) return;
  const int64_t first = expert * b.bias_expert_stride + channel * b.bias_n_stride;
#pragma unroll
  for (int i = 0; i < N; i++) bias[i] = load_any(b.bias[half], first + i * step * b.bias_n_stride, b.bias_dtype);
}

/* A sum as the activation sees it. out_scale: of the channel's weights where the case is SCALE_out, else 1. */
DEVICE float weighted(float sum, float row_weight, float out_scale, float bias)
{
  return sum * (row_weight * out_scale) + bias;
}

/* g becomes the result, in f32, of N sums, or of N of gate and N of up. */
template <epilogue EPILOGUE, bool FAST, int N>
DEVICE void finish(const gemm_args &args, const float (&row_weight)[N], const float (&g_bias)[N],
                   const float (&u_bias)[N], float (&g)[N], float (&u)[N])
{
#pragma unroll
  for (int i = 0; i < N; i++) {
    g[i] = weighted(g[i], row_weight[i], 1.f, g_bias[i]);
    u[i] = weighted(u[i], row_weight[i], 1.f, u_bias[i]);
  }
  if (EPILOGUE == EPILOGUE_activation) activate<N, FAST>(args, g, u);
}

/* The same of N channels of one row from `channel` on. */
template <class S, int N>
DEVICE void finish_channels(const gemm_args &args, int expert, int channel, float weight, float (&g)[N], float (&u)[N])
{
  float weights[N], g_bias[N], u_bias[N] = {};
#pragma unroll
  for (int i = 0; i < N; i++) weights[i] = weight;
  load_bias<N>(args.b, 0, expert, channel, g_bias);
  if (S::gated(args)) load_bias<N>(args.b, 1, expert, channel, u_bias);
  finish<S::EPILOGUE, false>(args, weights, g_bias, u_bias, g, u);
}

/* Eight channels of c from element `at` on; Y void: of its type at run time. */
template <class Y> DEVICE void store_channels(const gemm_args &args, int64_t at, const float (&value)[8])
{
  if constexpr (!same_type<Y, void>)
    store_f32<8>(static_cast<Y *>(args.c) + at, value);
  else if (args.dtype == DT_BF16)
    store_f32<8>(static_cast<bf16 *>(args.c) + at, value);
  else if (args.dtype == DT_F16)
    store_f32<8>(static_cast<f16 *>(args.c) + at, value);
  else
    store_f32<8>(static_cast<f32 *>(args.c) + at, value);
}

/* Writes a unit whose accumulators are staged in shared memory: stores of 16 bytes, rolled over the tile so that the
 * activations are in the program once. Channels come in octets (n is a multiple of 8). */
template <class S>
DEVICE void store_unit(const gemm_args &args, const tile_unit &unit, const float *staged, columns order)
{
  const int channels = order == COLUMNS_plain ? S::COLUMNS : S::COLUMNS / 2, first = unit.n * channels;
#pragma unroll 1
  for (int i = threadIdx.x * 8; i < unit.rows * channels; i += S::THREADS * 8) {
    const int row = order == COLUMNS_plain ? i / S::COLUMNS : i / (S::COLUMNS / 2), channel = i % channels;
    if (first + channel >= args.n) continue;
    float g[8], u[8];
    take_channels(order, staged + row * STAGED_LD<S::COLUMNS>, channel, g, u);
    finish_channels<S, 8>(args, unit.expert, first + channel, row_weight(args, unit.row + row), g, u);
    store_channels<typename S::Y>(args, (int64_t)(unit.row + row) * args.c_ld + first + channel, g);
  }
}

#endif
