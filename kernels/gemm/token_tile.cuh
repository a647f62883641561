/*
 * wgmma's products of e4m3 with tokens as the 64-row operand. Sums of each stage are scaled before they are added to
 * others (scaled_tile.cuh). Where tokens are columns, a thread has scales of 32 of them to load and to multiply by the
 * weights', which takes longer than the products. Where they are rows, it has two tokens of a block of 64, and its gate
 * or up columns have one scale: an FMA a value remains. The price is that tokens come in blocks of 64.
 *
 * Left to tokens as columns: scales of weights that change along k and inside a consumer's channels, blocks of more
 * than a stage of k, an up that is not gated, and activations that nearly no model has.
 */
#ifndef CUMOE_TOKEN_TILE_CUH
#define CUMOE_TOKEN_TILE_CUH

#include "gemm/scaled_tile.cuh"

/* A piece: a block of tokens x weight rows, of gate and up by octets in turn, as columns. Each consumer has a block and
 * all pieces of a stage; of a unit of one block each has a piece. */
template <class S> struct token_tile {
  static constexpr bool SERVED = same_type<typename S::X, e4m3>;
  static constexpr int TOKENS = 64, COLUMNS = 128, PIECES = S::COLUMNS / COLUMNS;
  static constexpr int OCTETS = COLUMNS / 8, ACCUMULATORS = COLUMNS / 2;
  static constexpr int HALVES = S::EPILOGUE == EPILOGUE_activation ? 2 : 1;
  static constexpr int CHANNELS = COLUMNS / HALVES;
  static_assert(!SERVED || (PIECES == S::CONSUMERS && S::BM == S::CONSUMERS * TOKENS), "a block or a piece each");
  using sums = float[PIECES][ACCUMULATORS]; /* [][4j + 2h + i] of lane l: token l / 4 + 8h, column 8j + 2 (l % 4) + i */
};

/* What a consumer has of a unit. Registers are full: asked for anew wherever it is needed. */
struct token_share {
  int block, piece;
};
template <class S> DEVICE token_share share_of(int pieces)
{
  const int group = (int)(tid_x() / S::GROUP) - 1;
  return pieces == 1 ? token_share{0, group} : token_share{group, 0};
}
template <class S> DEVICE int pieces_of(const tile_unit &unit)
{
  return unit.rows > token_tile<S>::TOKENS ? token_tile<S>::PIECES : 1;
}

/* Whether scales of weights change with each stage, and not inside `channels` channels from a multiple of that on; or
 * not along k. */
template <class S> DEVICE bool scale_suits(const scale_matrix &s, int half, int channels)
{
  if (s.dtype == DT_NONE || s.k_stride == 0) return true;
  return s.block_k == S::BK && (s.n_stride == 0 || (s.block_n | s.n_origin[half]) % channels == 0);
}

template <class S> DEVICE bool tokens_are_rows(const gemm_args &args)
{
  if (S::EPILOGUE == EPILOGUE_activation && finish_kind_of(args) == FINISH_any) return false;
  const int channels = token_tile<S>::CHANNELS;
  return scale_suits<S>(args.b.scale, 0, channels) && (!args.gated || scale_suits<S>(args.b.scale, 1, channels));
}

/* Scales of a consumer's weights that change along k: lane l has that of piece l / 2 and octets l % 2, which are gate
 * or up. Read while a stage is multiplied: those of the next 31 lie in the same line. All others are the epilogue's. */
template <class S> struct token_weight_scale {
  const char *next; /* NULL: none */

  DEVICE token_weight_scale(const gemm_args &args, bool up_first, int expert, int channel) : next(nullptr)
  {
    using tile = token_tile<S>;
    const scale_matrix &s = args.b.scale;
    if (s.dtype == DT_NONE || s.k_stride == 0) return;
    const int half = tile::HALVES == 2 ? lane_id() % 2 ^ (int)up_first : 0;
    const int own = min(channel + lane_id() / 2 % tile::PIECES * tile::CHANNELS, args.n - 1);
    next = static_cast<const char *>(scale_base(s, half, expert)) +
           (scale_row(s, half, own) + scale_step(s, 0)) * scale_bytes(s.dtype);
  }

  DEVICE float draw(const gemm_args &args)
  {
    const scale_matrix &s = args.b.scale;
    if (!next) return 1.f;
    const float value = s.dtype == DT_F32 ? *reinterpret_cast<const float *>(next) : load_scale(next, 0, s.dtype);
    next += s.k_stride * scale_bytes(s.dtype);
    return value;
  }
};

#ifndef TURNS
#define TURNS 0
#endif
/* Consumers multiply in turn, so that one scales while the other multiplies. If both had products under way, the tensor
 * cores would take them step by step in turn, both would end at once, and nothing be multiplied while they are scaled:
 * a state that lasts, as both wait for the same stages. */
enum { TURN_BARRIER = 4 };
template <class S> DEVICE void take_turn(int group)
{
  if (TURNS) bar_sync(TURN_BARRIER + group, S::CONSUMERS * S::GROUP);
}
template <class S> DEVICE void pass_turn(int group)
{
  if (TURNS) bar_arrive(TURN_BARRIER + (group ^ 1), S::CONSUMERS * S::GROUP);
}

template <class S>
DEVICE void begin_piece(pipeline_smem<S> &smem, uint32_t stage, int block, int piece,
                        float (&part)[token_tile<S>::ACCUMULATORS])
{
  using tile = token_tile<S>;
  const uint64_t rows = wgmma_operand(smem.rows[stage]), upper = rows >> 32 << 32; /* the same for all */
  const uint32_t a = (uint32_t)rows + block * (tile::TOKENS * 8);
  const uint32_t b = (uint32_t)wgmma_operand(smem.weights[stage]) + piece * (tile::COLUMNS * 8);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < S::BK / 32; k++) {
    if ((TURNS == 3 && k == S::BK / 32 - 1) || (TURNS == 4 && k == S::BK / 64)) wgmma_commit_group();
    wgmma_step<S, tile::COLUMNS>::run(part, upper | (a + k * 2), upper | (b + k * 2), k > 0);
  }
  wgmma_commit_group();
}

/* Of a thread's two tokens of a block, where a stage has the scale of the first. */
template <class S> DEVICE int token_scale_place(const gemm_args &args, const tile_unit &unit, int block)
{
  const unsigned thread = tid_x() % S::GROUP;
  return scales_before<S>(args, unit) + block * token_tile<S>::TOKENS + thread / WARP_SIZE * 16 +
         thread % WARP_SIZE / 4;
}

/* Waits for a stage. Of a thread's two tokens, the scales. */
template <class S>
DEVICE void await_tokens(const gemm_args &args, pipeline_smem<S> &smem, const pipeline_state<S::STAGES> &at, int place,
                         float (&x)[2])
{
  wait_for(&smem.full[at.stage], at.phase);
  if (S::gathers(args)) fence_proxy_async_shared(); /* by cp.async */
  const float *first = row_scales_of<S>(smem, at) + place;
  x[0] = first[0], x[1] = first[8];
}

/*
 * Stage by stage, piece by piece. While a consumer scales and adds a piece, the other's is multiplied: registers hold
 * no second one. What the next stage needs is looked up while pieces are multiplied, a part with each: a consumer has
 * some 500 clocks a stage in which the tensor cores need not wait for it, and the sums take 360.
 */
template <class S, int PIECES>
DEVICE void multiply_token_pieces(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                                  int place, token_weight_scale<S> of_weights, typename token_tile<S>::sums &acc)
{
  using tile = token_tile<S>;
  float x[2], weights = of_weights.draw(args), ahead = 1.f;
  const int group = (int)(tid_x() / S::GROUP) - 1;
  await_tokens<S>(args, smem, at, place, x);
#pragma unroll 1
  for (int left = args.k; left > 0; left -= S::BK, at.advance()) {
    float part[tile::ACCUMULATORS];
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      take_turn<S>(group);
      begin_piece<S>(smem, at.stage, PIECES == 1 ? 0 : group, PIECES == 1 ? group : piece, part);
      if (TURNS == 1) pass_turn<S>(group);
      float factor[2][tile::HALVES]; /* of the token, of even and odd octets */
#pragma unroll
      for (int half = 0; half < tile::HALVES; half++) {
        const float w = __shfl_sync(ALL_LANES, weights, 2 * piece + half);
        factor[0][half] = x[0] * w;
        factor[1][half] = x[1] * w;
      }
      if (piece == 0 && left > S::BK) ahead = of_weights.draw(args);
      if (TURNS >= 3) {
        wgmma_wait_group<1>();
        pass_turn<S>(group);
      }
      if (piece + 1 == PIECES && left > S::BK) {
        pipeline_state<S::STAGES> next = at;
        next.advance();
        await_tokens<S>(args, smem, next, place, x);
        weights = ahead;
      }
      wgmma_wait_group<0>();
      if (TURNS == 2) pass_turn<S>(group);
      if (piece + 1 == PIECES) release_stage<S>(smem, at.stage);
      hold(part);
#pragma unroll
      for (int v = 0; v < tile::ACCUMULATORS; v++)
        acc[piece][v] = fmaf(part[v], factor[v / 2 % 2][v / 4 % tile::HALVES], acc[piece][v]);
    }
  }
}

/* acc = rows x weights of a consumer's share of a unit, whose channels begin there. */
template <class S>
DEVICE void multiply_tokens(const gemm_args &args, bool up_first, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                            const tile_unit &unit, int channel, typename token_tile<S>::sums &acc)
{
  using tile = token_tile<S>;
  const int pieces = pieces_of<S>(unit);
  const token_weight_scale<S> weights(args, up_first, unit.expert,
                                      channel + share_of<S>(pieces).piece * tile::CHANNELS);
  const int place = token_scale_place<S>(args, unit, share_of<S>(pieces).block);
  if (pieces == 1)
    multiply_token_pieces<S, 1>(args, smem, at, place, weights, acc);
  else
    multiply_token_pieces<S, tile::PIECES>(args, smem, at, place, weights, acc);
}

/* ---- from accumulators to memory: every warp for itself ---- */

/* Four octets of channels of 8 tokens, gathered in a warp's 512 bytes, so that 64 bytes of a token are stored together.
 * packed[i]: of this lane's token two channels of octet i. Rotated, so that no lanes meet in a bank. */
template <class S>
DEVICE void store_token_octets(const gemm_args &args, uint4 *staged, int lane, const uint32_t (&packed)[4], int64_t row,
                               int channel, bool there)
{
  const int token = lane / 4, part = lane % 4;
  __syncwarp(); /* what was there is read */
#pragma unroll
  for (int i = 0; i < 4; i++) reinterpret_cast<uint32_t *>(staged + token * 4 + (i ^ token / 2))[part] = packed[i];
  __syncwarp();
  if (there)
    st_global_16(static_cast<typename S::Y *>(args.c) + row * args.c_ld + channel,
                 staged[token * 4 + (part ^ token / 2)], args.protocol.evict_last);
}

/* Scales that do not change along k. Registers are full: an octet of columns after the other. */
template <class S>
DEVICE void scale_sums(const gemm_args &args, bool up_first, int expert, int channel0,
                       typename token_tile<S>::sums &acc)
{
  using tile = token_tile<S>;
  const scale_matrix &s = args.b.scale;
  const bool by_channel = s.dtype != DT_NONE && s.k_stride == 0;
  if (!by_channel && !args.b.global[0] && !args.b.global[1]) return;
#pragma unroll
  for (int octet = 0; octet < tile::PIECES * tile::OCTETS; octet++) {
    const int half = tile::HALVES == 2 ? octet % 2 ^ (int)up_first : 0;
    const int channel = channel0 + octet / tile::HALVES * 8 + lane_id() % 4 * 2;
    const float global = global_scale(args.b, half, expert);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float scale = global;
      if (by_channel)
        scale *= load_scale(scale_base(s, half, expert), scale_row(s, half, min(channel + i, args.n - 1)), s.dtype);
#pragma unroll
      for (int h = 0; h < 2; h++) acc[octet / tile::OCTETS][octet % tile::OCTETS * 4 + 2 * h + i] *= scale;
    }
    __syncwarp(); /* the compiler would load for all octets at once */
  }
}

/* Biases of a lane's two channels of an octet: gate's, up's. */
template <class S> struct token_bias {
  float of[2][2];

  DEVICE token_bias(const gemm_args &args, int expert, int channel)
  {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int half = 0; half < token_tile<S>::HALVES; half++) {
        float bias[1];
        load_bias(args.b, half, expert, min(channel + i, args.n - 1), bias);
        of[i][half] = bias[0];
      }
  }
};

/* What two neighbouring channels of a piece's `octet`, of half h of the tokens, become. */
template <class S, finish_kind KIND>
DEVICE uint32_t finish_tokens(const swiglu &act, const float *acc, int octet, int h, const token_bias<S> &bias)
{
  float value[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (token_tile<S>::HALVES == 2)
      value[i] = act.of<KIND>(acc[8 * octet + 2 * h + i], acc[8 * octet + 4 + 2 * h + i], bias.of[i]);
    else
      value[i] = weighted(acc[4 * octet + 2 * h + i], 1.f, 1.f, bias.of[i][0]);
  }
  return pack_pair<typename S::Y>(value[0], value[1]);
}

/* Four octets of channels at a time. Registers are full: what follows from the thread's number is worked out anew. */
template <class S, finish_kind KIND>
DEVICE void store_piece(const gemm_args &args, bool up_first, wgmma_staging<S> &smem, const tile_unit &unit, int block,
                        int channel0, const float (&acc)[token_tile<S>::ACCUMULATORS])
{
  using tile = token_tile<S>;
  const swiglu act(args, up_first);
  const int warp = (int)tid_x() / WARP_SIZE - S::GROUP / WARP_SIZE, lane = (int)tid_x() % WARP_SIZE;
  uint4 *staged = smem.staged[warp / 4][warp % 4];
#pragma unroll
  for (int first = 0; first < tile::CHANNELS / 8; first += 4) {
    const int begin = channel0 + first * 8, pair = begin + lane % 4 * 2, channel = begin + lane % 4 * 8;
    const token_bias<S> bias[4] = {{args, unit.expert, pair},
                                   {args, unit.expert, pair + 8},
                                   {args, unit.expert, pair + 16},
                                   {args, unit.expert, pair + 24}};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int token = block * tile::TOKENS + warp % 4 * 16 + half * 8, row = token + lane / 4;
      if (token >= unit.rows) continue;
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; i++) packed[i] = finish_tokens<S, KIND>(act, acc, first + i, half, bias[i]);
      store_token_octets<S>(args, staged, lane, packed, (int64_t)unit.row + row, channel,
                            row < unit.rows && channel < args.n);
    }
  }
}

template <class S, finish_kind KIND>
DEVICE void store_tokens_as(const gemm_args &args, bool up_first, wgmma_staging<S> &smem, const tile_unit &unit,
                            int channel0, const typename token_tile<S>::sums &acc)
{
  const int pieces = pieces_of<S>(unit);
#pragma unroll
  for (int piece = 0; piece < token_tile<S>::PIECES; piece++)
    if (piece < pieces)
      store_piece<S, KIND>(args, up_first, smem, unit, share_of<S>(pieces).block,
                           channel0 + piece * token_tile<S>::CHANNELS, acc[piece]);
}

/* A consumer's share of a tile whose channels begin there. */
template <class S>
DEVICE void store_tokens(const gemm_args &args, bool up_first, wgmma_staging<S> &smem, const tile_unit &unit,
                         int channel, typename token_tile<S>::sums &acc)
{
  const int channel0 = channel + share_of<S>(pieces_of<S>(unit)).piece * token_tile<S>::CHANNELS;
  scale_sums<S>(args, up_first, unit.expert, channel0, acc);
  if (token_tile<S>::HALVES == 2 && finish_kind_of(args) == FINISH_silu)
    store_tokens_as<S, FINISH_silu>(args, up_first, smem, unit, channel0, acc);
  else
    store_tokens_as<S, FINISH_swiglu>(args, up_first, smem, unit, channel0, acc);
}

#endif
