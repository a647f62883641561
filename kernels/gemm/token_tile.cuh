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

#include "device/wgmma_registers.cuh"
#include "gemm/scaled_tile.cuh"

/* A piece: a block of tokens x weight rows, of gate and up by octets in turn, as columns. Each consumer has a block and
 * all pieces of a stage; of a unit of one block each has a piece. */
template <class S> struct token_tile {
  static constexpr bool SERVED = same_type<typename S::X, e4m3>;
  static constexpr int TOKENS = 64, COLUMNS = 128, PIECES = S::COLUMNS / COLUMNS;
  static constexpr int OCTETS = COLUMNS / 8, ACCUMULATORS = COLUMNS / 2;
  static constexpr int HALVES = S::EPILOGUE == EPILOGUE_activation ? 2 : 1;
  static constexpr int CHANNELS = COLUMNS / HALVES;
  static_assert(!SERVED || HALVES == 1 || (CHANNELS == CODES_CHANNELS && CHANNELS * PIECES == CODES_GROUP),
                "what the host tells codes of h by");
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

template <class S> DEVICE bool tokens_are_rows(const gemm_args &args)
{
  if (S::EPILOGUE == EPILOGUE_activation && finish_kind_of(args) == FINISH_any) return false;
  return scales_of_blocks(&args.b.scale, args.gated, S::BK, token_tile<S>::CHANNELS);
}

/* Of each stage, scales of weights that change along k: of each piece's gate and up. All others are the epilogue's. */
template <class S, bool SERVED = token_tile<S>::SERVED> struct token_scale_stages {
};
template <class S> struct token_scale_stages<S, true> {
  static constexpr int EACH = token_tile<S>::PIECES * token_tile<S>::HALVES;
  alignas(16) float weight_scales[S::STAGES][4];
};

/* Puts them there, the producing warp: its lanes have those of LANES stages, and of the next as many. */
template <class S> struct token_weight_scales {
  using stages = token_scale_stages<S>;
  static constexpr int LANES = WARP_SIZE / stages::EACH;
  const char *from; /* NULL: none */
  uint32_t bits, ahead;

  DEVICE token_weight_scales(const gemm_args &args, bool up_first, const tile_unit &unit)
      : from(nullptr), bits(0), ahead(0)
  {
    using tile = token_tile<S>;
    const scale_matrix &s = args.b.scale;
    if (s.dtype == DT_NONE || s.k_stride == 0 || unit.rows <= tile::TOKENS || !tokens_are_rows<S>(args)) return;
    const int i = lane_id() % stages::EACH, half = tile::HALVES == 2 ? i % 2 ^ (int)up_first : 0;
    const int channel = (unit.n * tile::PIECES + i / tile::HALVES) * tile::CHANNELS;
    from = scale_at(&s, half, unit.expert, min(channel, args.n - 1), 0);
    ahead = of_stage(args, lane_id() / stages::EACH);
  }

  DEVICE uint32_t of_stage(const gemm_args &args, int stage) const
  {
    const scale_matrix &s = args.b.scale;
    return load_scale_bits(from, min(stage, ceil_div(args.k, S::BK) - 1) * s.k_stride, s.dtype);
  }

  /* Of stage number `number` of the unit. */
  DEVICE void put(const gemm_args &args, stages &smem, int stage, int number)
  {
    if (number % LANES == 0) {
      bits = ahead;
      if (from) ahead = of_stage(args, number + LANES + lane_id() / stages::EACH);
    }
    if (lane_id() / stages::EACH == number % LANES)
      smem.weight_scales[stage][lane_id() % stages::EACH] = from ? scale_value(bits, args.b.scale.dtype) : 1.f;
    __syncwarp();
  }
};

/* Scales of a consumer's weights that change along k, where producers put none: lane l has that of piece l / 2 and
 * octets l % 2, which are gate or up. Read while a stage is multiplied: those of the next 31 lie in the same line. All
 * others are the epilogue's. */
template <class S> struct token_weight_scale {
  const char *next; /* NULL: none */

  DEVICE token_weight_scale(const gemm_args &args, bool up_first, int expert, int channel) : next(nullptr)
  {
    using tile = token_tile<S>;
    const scale_matrix &s = args.b.scale;
    if (s.dtype == DT_NONE || s.k_stride == 0) return;
    const int half = tile::HALVES == 2 ? lane_id() % 2 ^ (int)up_first : 0;
    const int own = min(channel + lane_id() / 2 % tile::PIECES * tile::CHANNELS, args.n - 1);
    next = scale_at(&s, half, expert, own, 0);
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
  for (int k = 0; k < S::BK / 32; k++)
    wgmma_step<S, tile::COLUMNS>::run(part, upper | (a + k * 2), upper | (b + k * 2), k > 0);
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
  await_tokens<S>(args, smem, at, place, x);
#pragma unroll 1
  for (int left = args.k; left > 0; left -= S::BK, at.advance()) {
    const token_share own = share_of<S>(PIECES);
    float part[tile::ACCUMULATORS];
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      begin_piece<S>(smem, at.stage, own.block, own.piece + piece, part);
      float factor[2][tile::HALVES]; /* of the token, of even and odd octets */
#pragma unroll
      for (int half = 0; half < tile::HALVES; half++) {
        const float w = __shfl_sync(ALL_LANES, weights, 2 * piece + half);
        factor[0][half] = x[0] * w;
        factor[1][half] = x[1] * w;
      }
      if (piece == 0 && left > S::BK) ahead = of_weights.draw(args);
      if (piece + 1 == PIECES && left > S::BK) {
        pipeline_state<S::STAGES> next = at;
        next.advance();
        await_tokens<S>(args, smem, next, place, x);
        weights = ahead;
      }
      wgmma_wait_group<0>();
      if (piece + 1 == PIECES) release_stage<S>(smem, at.stage);
      hold(part);
#pragma unroll
      for (int v = 0; v < tile::ACCUMULATORS; v++)
        acc[piece][v] = fmaf(part[v], factor[v / 2 % 2][v / 4 % tile::HALVES], acc[piece][v]);
    }
  }
}

/* Of stage 0: where a lane's tokens lie as ldmatrix reads them, weights (lower words of operands) and their scales; the
 * scale of its first token. */
template <class S> struct held_operands {
  uint32_t rows, weights, weight_scales;
  int scale;

  DEVICE held_operands(const gemm_args &args, const pipeline_smem<S> &smem, const token_scale_stages<S> &scales,
                       const tile_unit &unit, token_share own)
  {
    using tile = token_tile<S>;
    const unsigned thread = tid_x() % S::GROUP, l = thread % WARP_SIZE;
    const unsigned row = own.block * tile::TOKENS + thread / WARP_SIZE * 16 + l % 16;
    rows = shared_address(smem.rows[0]) + row * 128 + ((l / 16) ^ (l % 8)) * 16;
    weights = (uint32_t)wgmma_operand(smem.weights[0]) + own.piece * (tile::COLUMNS * 8);
    weight_scales = shared_address(scales.weight_scales[0] + own.piece * tile::HALVES);
    scale = token_scale_place<S>(args, unit, own.block);
  }
};

template <class S>
DEVICE void begin_held_piece(const uint32_t (&a)[S::BK / 32][4], uint32_t b, float (&part)[token_tile<S>::ACCUMULATORS])
{
  using tile = token_tile<S>;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < S::BK / 32; k++)
    wgmma_registers_m64k32_e4m3<tile::COLUMNS>::template run<1024>(part, a[k], b + k * 2, k > 0);
  wgmma_commit_group();
}

template <class S> DEVICE void load_tokens(uint32_t address, uint32_t (&a)[S::BK / 32][4])
{
#pragma unroll
  for (int k = 0; k < S::BK / 32; k++) ldmatrix_x4(a[k], address ^ k * 32);
}

/*
 * The same of two pieces where rows come in order: a consumer's tokens of a stage go to registers, from which both
 * pieces take them. So shared memory gives 128 KB a stage instead of 144.
 */
template <class S>
DEVICE void multiply_held_tokens(const gemm_args &args, pipeline_smem<S> &smem, const token_scale_stages<S> &scales,
                                 pipeline_state<S::STAGES> &at, const tile_unit &unit,
                                 typename token_tile<S>::sums &acc)
{
  using tile = token_tile<S>;
  const token_share own = share_of<S>(tile::PIECES);
  const held_operands<S> first(args, smem, scales, unit, own);
  wait_for(&smem.full[at.stage], at.phase);
  uint32_t a[S::BK / 32][4];
  load_tokens<S>(first.rows + at.stage * (S::BM * S::BK), a);
#pragma unroll 1
  for (int left = args.k; left > 0; left -= S::BK) {
    float part[tile::ACCUMULATORS];
#pragma unroll
    for (int piece = 0; piece < tile::PIECES; piece++) {
      begin_held_piece<S>(a, first.weights + at.stage * (S::COLUMNS * 8) + piece * (tile::COLUMNS * 8), part);
      const float *x = row_scales_of<S>(smem, at) + first.scale;
      const uint32_t scale = first.weight_scales + (at.stage * 4 + piece * tile::HALVES) * (int)sizeof(float);
      float factor[2][tile::HALVES]; /* of the token, of even and odd octets */
#pragma unroll
      for (int half = 0; half < tile::HALVES; half++) {
        const float w = __uint_as_float(lds_32(scale + half * (int)sizeof(float)));
        factor[0][half] = x[0] * w;
        factor[1][half] = x[8] * w;
      }
      pipeline_state<S::STAGES> next = at;
      next.advance();
      if (piece + 1 == tile::PIECES && left > S::BK) wait_for(&smem.full[next.stage], next.phase);
      wgmma_wait_group<0>();
      if (piece + 1 == tile::PIECES) {
        release_stage<S>(smem, at.stage);
        at = next;
        if (left > S::BK) load_tokens<S>(first.rows + at.stage * (S::BM * S::BK), a);
      }
      hold(part);
#pragma unroll
      for (int v = 0; v < tile::ACCUMULATORS; v++)
        acc[piece][v] = fmaf(part[v], factor[v / 2 % 2][v / 4 % tile::HALVES], acc[piece][v]);
    }
  }
}

/* acc = rows x weights of a consumer's share of a unit, whose channels begin there. */
template <class S>
DEVICE void multiply_tokens(const gemm_args &args, bool up_first, pipeline_smem<S> &smem,
                            const token_scale_stages<S> &scales, pipeline_state<S::STAGES> &at, const tile_unit &unit,
                            int channel, typename token_tile<S>::sums &acc)
{
  using tile = token_tile<S>;
  const int pieces = pieces_of<S>(unit);
  if (pieces > 1 && !S::gathers(args)) return multiply_held_tokens<S>(args, smem, scales, at, unit, acc);
  const token_weight_scale<S> weights(args, up_first, unit.expert,
                                      channel + share_of<S>(pieces).piece * tile::CHANNELS);
  const int place = token_scale_place<S>(args, unit, share_of<S>(pieces).block);
  if (pieces == 1)
    multiply_token_pieces<S, 1>(args, smem, at, place, weights, acc);
  else
    multiply_token_pieces<S, tile::PIECES>(args, smem, at, place, weights, acc);
}

#endif
