/*
 * What token_tile.cuh has summed, from accumulators to memory, every warp for itself: scaled by what does not change
 * along k, activated and rounded. Where down multiplies codes of h, up makes them here (args.h: c_scale), the same to
 * the bit as a launch between the two would: a consumer has the 128 channels of a token that share a scale, or, of a
 * unit of 64 tokens or less, half of them.
 */
#ifndef CUMOE_TOKEN_STORE_CUH
#define CUMOE_TOKEN_STORE_CUH

#include "gemm/token_tile.cuh"

/* Of a piece's octet and of one of a thread's two tokens, two outputs: rounded, where two of their sums were. */
template <class S> DEVICE float &outputs_of(float (&acc)[token_tile<S>::ACCUMULATORS], int octet, int h)
{
  return acc[token_tile<S>::HALVES * 4 * octet + h];
}
template <class S> DEVICE uint32_t outputs_of(const float (&acc)[token_tile<S>::ACCUMULATORS], int octet, int h)
{
  return __float_as_uint(acc[token_tile<S>::HALVES * 4 * octet + h]);
}

/* ---- outputs ---- */

/* apply(sum, of(half, channel)) to every sum of pieces whose channels begin there. Registers are full, so a warp puts a
 * piece's values where outputs will be staged. */
template <class S, class OF, class APPLY>
DEVICE void each_column(bool up_first, uint4 *staged, int pieces, int channel0, typename token_tile<S>::sums &acc,
                        OF of, APPLY apply)
{
  using tile = token_tile<S>;
  static_assert(tile::COLUMNS * sizeof(float) == WARP_SIZE * sizeof(uint4), "a float each");
  float *values = reinterpret_cast<float *>(staged);
#pragma unroll
  for (int piece = 0; piece < tile::PIECES; piece++) {
    if (piece >= pieces) continue;
    __syncwarp(); /* what was there is read */
#pragma unroll 1
    for (int i = (int)tid_x() % WARP_SIZE; i < tile::COLUMNS; i += WARP_SIZE)
      values[i] = of(tile::HALVES == 2 ? i / 8 % 2 ^ (int)up_first : 0,
                     channel0 + piece * tile::CHANNELS + i / 8 / tile::HALVES * 8 + i % 8);
    __syncwarp();
    const float2 *own = reinterpret_cast<const float2 *>(values) + tid_x() % 4;
#pragma unroll
    for (int octet = 0; octet < tile::OCTETS; octet++) {
      const float2 value = own[octet * 4];
#pragma unroll
      for (int v = 0; v < 4; v++) apply(acc[piece][octet * 4 + v], v % 2 ? value.y : value.x);
    }
  }
}

/* Scales that do not change along k, and biases. */
template <class S>
DEVICE void finish_sums(const gemm_args &args, bool up_first, uint4 *staged, int expert, int pieces, int channel0,
                        typename token_tile<S>::sums &acc)
{
  const scale_matrix &s = args.b.scale;
  const bool by_channel = s.dtype != DT_NONE && s.k_stride == 0;
  if (by_channel || args.b.global[0] || args.b.global[1])
    each_column<S>(
        up_first, staged, pieces, channel0, acc,
        [&](int half, int channel) {
          const float global = global_scale(args.b, half, expert);
          if (!by_channel) return global;
          return global *
                 load_scale(scale_base(s, half, expert), scale_row(s, half, min(channel, args.n - 1)), s.dtype);
        },
        [](float &sum, float scale) { sum = __fmul_rn(sum, scale); });
  if (args.b.bias[0] || args.b.bias[1])
    each_column<S>(
        up_first, staged, pieces, channel0, acc,
        [&](int half, int channel) {
          float bias[1];
          load_bias(args.b, half, expert, min(channel, args.n - 1), bias);
          return bias[0];
        },
        [](float &sum, float bias) { sum = __fadd_rn(sum, bias); });
}

/* What two neighbouring channels of a piece's `octet`, of half h of the tokens, become. */
template <class S, finish_kind KIND>
DEVICE uint32_t finish_tokens(const swiglu &act, const float *acc, int octet, int h)
{
  float value[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (token_tile<S>::HALVES == 2) {
      const float low = acc[8 * octet + 2 * h + i], high = acc[8 * octet + 4 + 2 * h + i];
      value[i] = act.of_biased<KIND, true>(act.up_first ? high : low, act.up_first ? low : high);
    } else {
      value[i] = acc[4 * octet + 2 * h + i];
    }
  }
  return pack_pair<typename S::Y>(value[0], value[1]);
}

/* A warp's 8 tokens of half h of a block: this lane's, in the tile. (tid_x(): what follows from a thread's number is
 * not kept in registers while stages are multiplied.) */
template <class S> DEVICE int stored_token(int thread, int block, int h)
{
  return block * token_tile<S>::TOKENS + thread / WARP_SIZE % 4 * 16 + h * 8 + thread % WARP_SIZE / 4;
}

/* take(first, h, out) of a piece: of one token two outputs in each of four octets from `first` on. Four at a time, as
 * registers are full; of tokens that none of a warp's are there none. taken(h): all of them. */
template <class S, finish_kind KIND, class F, class G>
DEVICE void finish_piece(const gemm_args &args, bool up_first, const tile_unit &unit, int thread, int block,
                         const float *acc, const F &take, const G &taken)
{
  const swiglu act(args, up_first);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (stored_token<S>(thread, block, h) - thread % WARP_SIZE / 4 >= unit.rows) continue;
#pragma unroll
    for (int first = 0; first < token_tile<S>::CHANNELS / 8; first += 4) {
      uint32_t out[4];
#pragma unroll
      for (int i = 0; i < 4; i++) out[i] = finish_tokens<S, KIND>(act, acc, first + i, h);
      take(first, h, out);
    }
    taken(h);
  }
}

/* A warp's own, by 512 bytes: of 8 tokens 64 bytes of channels, so that those are stored together, four vectors, which
 * are rotated, so that no lanes meet in a bank. */
template <class S> DEVICE uint4 *staged_of_warp(wgmma_staging<S> &smem, int thread)
{
  const int warp = thread / WARP_SIZE - S::GROUP / WARP_SIZE;
  return smem.staged[warp / 4][warp % 4];
}
DEVICE uint4 *staged_vector(uint4 *staged, int thread, int vector)
{
  const int token = thread % WARP_SIZE / 4;
  return staged + token * 4 + (vector ^ token / 2);
}

/* ---- to memory, as they are ---- */

/* A consumer's share of a tile, as are store_codes_as and what they are given: pieces whose channels begin there. Of a
 * piece all channels of 8 tokens are staged, then stored. */
template <class S, finish_kind KIND>
DEVICE void store_rounded_as(const gemm_sm90_args &args, wgmma_staging<S> &smem, const tile_unit &unit, token_share own,
                             int pieces, int channel0, const typename token_tile<S>::sums &acc)
{
  using tile = token_tile<S>;
  static_assert(S::STAGED * 4 == tile::CHANNELS / 8, "octets of a piece");
  const int thread = (int)tid_x(), part = thread % 4;
  uint4 *staged = staged_of_warp<S>(smem, thread);
#pragma unroll
  for (int piece = 0; piece < tile::PIECES; piece++) {
    if (piece >= pieces) continue;
    __syncwarp(); /* what was there is read */
    finish_piece<S, KIND>(
        args.g, args.up_first, unit, thread, own.block, acc[piece],
        [&](int first, int, const uint32_t(&out)[4]) {
#pragma unroll
          for (int i = 0; i < 4; i++)
            reinterpret_cast<uint32_t *>(staged_vector(staged + first / 4 * WARP_SIZE, thread, i))[part] = out[i];
        },
        [&](int h) {
          const int row = stored_token<S>(thread, own.block, h);
          const int channel = channel0 + piece * tile::CHANNELS + part * 8;
          typename S::Y *to =
              static_cast<typename S::Y *>(args.g.c) + ((int64_t)unit.row + row) * args.g.c_ld + channel;
          __syncwarp();
#pragma unroll
          for (int i = 0; i < S::STAGED; i++)
            if (row < unit.rows && channel + i * 32 < args.g.n)
              st_global_16(to + i * 32, *staged_vector(staged + i * WARP_SIZE, thread, part),
                           args.g.protocol.evict_last);
          __syncwarp();
        });
  }
}

/* ---- to memory, as codes ---- */

enum { BAR_CONSUMERS = 3 }; /* bar_sync: 1 and 2 are a consumer's */

/* Of a thread's two tokens, the largest |output| among the channels that share a scale. */
template <class S>
DEVICE void largest_outputs(uint4 (*staged)[S::STAGED * WARP_SIZE] /* of all consumers' warps */, int pieces,
                            const typename token_tile<S>::sums &acc, float (&most)[2])
{
  using tile = token_tile<S>;
  const int thread = (int)tid_x(), other = 1 - (thread / S::GROUP - 1), warp = thread / WARP_SIZE % 4,
            token = thread % WARP_SIZE / 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    uint32_t pair = 0;
#pragma unroll
    for (int piece = 0; piece < tile::PIECES; piece++)
      if (piece < pieces)
#pragma unroll
        for (int octet = 0; octet < tile::CHANNELS / 8; octet++)
          pair = larger_pair<typename S::Y>(pair, outputs_of<S>(acc[piece], octet, h));
    const float2 both = unpack_pair<typename S::Y>(pair);
    most[h] = fmaxf(both.x, both.y);
    most[h] = fmaxf(most[h], __shfl_xor_sync(ALL_LANES, most[h], 1));
    most[h] = fmaxf(most[h], __shfl_xor_sync(ALL_LANES, most[h], 2));
  }
  if (pieces > 1) return;
  float *exchanged = reinterpret_cast<float *>(staged[(1 - other) * 4 + warp]);
  __syncwarp(); /* what was there is read */
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (thread % 4 == 0) exchanged[h * 8 + token] = most[h];
  bar_sync(BAR_CONSUMERS, S::CONSUMERS * S::GROUP);
  exchanged = reinterpret_cast<float *>(staged[other * 4 + warp]);
#pragma unroll
  for (int h = 0; h < 2; h++) most[h] = fmaxf(most[h], exchanged[h * 8 + token]);
  bar_sync(BAR_CONSUMERS, S::CONSUMERS * S::GROUP);
}

/* Of one of a thread's two tokens. */
template <class S>
DEVICE void store_codes(const gemm_args &args, uint4 *staged, int thread, int64_t row, int channel0, int h,
                        float inverse, const float (&acc)[token_tile<S>::ACCUMULATORS], bool there)
{
  constexpr int OCTETS = token_tile<S>::CHANNELS / 8;
  static_assert(S::EPILOGUE != EPILOGUE_activation || OCTETS == 8, "64 bytes of a token");
  const int part = thread % 4;
  __syncwarp(); /* what was there is read */
#pragma unroll
  for (int octet = 0; octet < OCTETS; octet++) {
    const float2 value = unpack_pair<typename S::Y>(outputs_of<S>(acc, octet, h));
    reinterpret_cast<uint16_t *>(staged_vector(staged, thread, octet / 2))[octet % 2 * 4 + part] =
        (uint16_t)cvt_e4m3x2(value.x * inverse, value.y * inverse);
  }
  __syncwarp();
  if (there)
    st_global_16(static_cast<e4m3 *>(args.c) + row * args.c_ld + channel0 + part * 16,
                 *staged_vector(staged, thread, part), args.protocol.evict_last);
}

/* Channels, a multiple of 128, are there in whole pieces. */
template <class S>
DEVICE void store_share_codes(const gemm_sm90_args &args, wgmma_staging<S> &smem, const tile_unit &unit,
                              token_share own, int pieces, int channel0, const typename token_tile<S>::sums &acc)
{
  float most[2];
  largest_outputs<S>(smem.staged[0], pieces, acc, most);
  const int thread = (int)tid_x();
  uint4 *staged = staged_of_warp<S>(smem, thread);
  const row_format format = {
      .mode = args.c_mode, .power_of_two = args.c_power_of_two, .static_scale = args.c_static_scale};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int token = stored_token<S>(thread, own.block, h);
    const int64_t row = (int64_t)unit.row + token;
    const float scale = row_scale<e4m3>(format, most[h]), inverse = __frcp_rn(scale);
    const bool there = token < unit.rows, by_group = args.c_mode == ROWS_GROUP;
    if (there && own.piece == 0 && thread % 4 == 0 && (by_group || channel0 == 0))
      args.c_scale[(by_group ? channel0 / CODES_GROUP : 0) * args.c_scale_ld + row] = scale;
#pragma unroll
    for (int piece = 0; piece < token_tile<S>::PIECES; piece++)
      if (piece < pieces)
        store_codes<S>(args.g, staged, thread, row, channel0 + piece * token_tile<S>::CHANNELS, h, inverse, acc[piece],
                       there);
  }
}

/* Outputs stay where their sums were until the largest is known. */
template <class S, finish_kind KIND>
DEVICE void store_codes_as(const gemm_sm90_args &args, wgmma_staging<S> &smem, const tile_unit &unit, token_share own,
                           int pieces, int channel0, typename token_tile<S>::sums &acc)
{
  using tile = token_tile<S>;
  const int thread = (int)tid_x();
#pragma unroll
  for (int piece = 0; piece < tile::PIECES; piece++) {
    if (piece >= pieces) continue;
    finish_piece<S, KIND>(
        args.g, args.up_first, unit, thread, own.block, acc[piece],
        [&](int first, int h, const uint32_t(&out)[4]) {
#pragma unroll
          for (int i = 0; i < 4; i++) outputs_of<S>(acc[piece], first + i, h) = __uint_as_float(out[i]);
          __syncwarp();
        },
        [](int) {});
  }
  store_share_codes<S>(args, smem, unit, own, pieces, channel0, acc);
}

/* ---- both ---- */

template <class S, finish_kind KIND>
DEVICE void store_share(const gemm_sm90_args &args, wgmma_staging<S> &smem, const tile_unit &unit, token_share own,
                        int pieces, int channel0, typename token_tile<S>::sums &acc)
{
  if (token_tile<S>::HALVES == 2 && args.g.dtype == DT_E4M3)
    store_codes_as<S, KIND>(args, smem, unit, own, pieces, channel0, acc);
  else
    store_rounded_as<S, KIND>(args, smem, unit, own, pieces, channel0, acc);
}

/* A consumer's share of a tile whose channels begin there. */
template <class S>
DEVICE void store_tokens(const gemm_sm90_args &args, wgmma_staging<S> &smem, const tile_unit &unit, int channel,
                         typename token_tile<S>::sums &acc)
{
  const int pieces = pieces_of<S>(unit);
  const token_share own = share_of<S>(pieces);
  const int channel0 = channel + own.piece * token_tile<S>::CHANNELS;
  finish_sums<S>(args.g, args.up_first, staged_of_warp<S>(smem, (int)tid_x()), unit.expert, pieces, channel0, acc);
  if (token_tile<S>::HALVES == 2 && finish_kind_of(args.g) == FINISH_silu)
    store_share<S, FINISH_silu>(args, smem, unit, own, pieces, channel0, acc);
  else
    store_share<S, FINISH_swiglu>(args, smem, unit, own, pieces, channel0, acc);
}

#endif
