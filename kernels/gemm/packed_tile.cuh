/*
 * The products of form wgmma with weights of 4 bits and rows (tokens) of 16, for shapes that are PACKED
 * (gemm/packed.cuh).
 *
 * Codes reach shared memory as they lie in memory. A consumer's warp reads those of its own 32 rows and 32 k, unpacks
 * them in registers, wgmma's 64-row operand, and multiplies; it unpacks 16 k while the tensor cores work on the 16
 * before. k keeps its order, as rows come by tensor copies: of the 16 bytes of a row that four lanes read, lane q takes
 * byte q of each word, the weights of k 2 q, 2 q + 1 of every eight.
 *
 * Two producer warps store a word of factors beside each row and 32 k of a stage (gemm/weight_factors.cuh), of scales
 * that they have asked for two stages ahead.
 */
#ifndef CUMOE_PACKED_TILE_CUH
#define CUMOE_PACKED_TILE_CUH

#include "gemm/absent.cuh"
#include "gemm/warpgroup_tile.cuh"

template <class S> struct wgmma_smem;

enum { SCALES_AHEAD = 2 /* stages */, FACTOR_WARPS = 2 };

/* Of a weight row and stage; of u4, whose blocks may be longer, at most. */
template <class S> constexpr int scale_bytes_of()
{
  constexpr int RUN = operand<typename S::CODE>::K_PER_SCALE;
  return RUN > 0 ? S::BK / (RUN > 0 ? RUN : 1) : S::BK / 32 * 2;
}

/* Zero points of octets of weight rows, on their way. */
template <class S, bool STORED> struct zero_stages {
};
template <class S> struct zero_stages<S, true> {
  uint32_t zeros[FACTOR_WARPS][SCALES_AHEAD][S::BK / 32][S::COLUMNS / 8];
};

/* What a stage has besides, and what producers have of the unit that they are at. */
template <class S, bool PACKED> struct factor_stages {
};
template <class S> struct factor_stages<S, true> : zero_stages<S, same_type<typename S::CODE, u4>> {
  static constexpr int SCALE_BYTES = scale_bytes_of<S>();
  uint4 factors[S::STAGES][S::COLUMNS];
  uint64_t posted[UNITS_AHEAD];          /* which unit it is, for the warp that makes factors */
  const uint8_t *scale_rows[S::COLUMNS]; /* where those of each weight row begin */
  uint32_t scale_words[SCALES_AHEAD][SCALE_BYTES / 4 + 1][S::COLUMNS]; /* on their way */
  int32_t absent[UNITS_AHEAD]; /* whether some of a unit's scales are not in its products */
  float rest[UNITS_AHEAD][2];  /* what is left of the weights' scale, of halves: multiplies sums */
};

/* Half and channel of a weight row of a tile; of one that is there, whatever the tile. */
struct weight_row {
  int32_t half, channel;
};
template <class S> DEVICE weight_row weight_row_of(const gemm_sm90_args &args, const tile_unit &tile, int row)
{
  const bool gated = S::gated(args.g);
  const int channel = gated ? tile.n * (S::COLUMNS / 2) + row / 16 * 8 + row % 8 : tile.n * S::COLUMNS + row;
  return {gated ? row / 8 % 2 ^ args.up_first : 0, min(channel, args.g.n - 1)};
}

DEVICE const uint8_t *scales_of(const scale_matrix &s, int expert, const weight_row &row)
{
  return reinterpret_cast<const uint8_t *>(scale_at(&s, row.half, expert, row.channel, 0));
}

/* ---- producers ---- */

/* What all formats share. By FACTOR_WARPS, of which each has 32 rows in turn: `load` asks for what `store` makes a
 * stage's factors of, SCALES_AHEAD stages later. They have some 2000 clocks a stage: rows are without branches, so that
 * they overlap. */
template <class S> struct scales_ahead {
  using FACTORS = weight_factors<typename S::X, typename S::CODE>;
  static constexpr int ROWS = S::COLUMNS / WARP_SIZE / FACTOR_WARPS, SLICES = S::BK / 32, AT_ONCE = 4;
  static constexpr int APART = FACTOR_WARPS * WARP_SIZE; /* a lane's rows */
  static constexpr int BYTES = factor_stages<S, true>::SCALE_BYTES, EACH = BYTES / SLICES, WORDS = BYTES / 4;
  using words = uint32_t[WORDS + 1][S::COLUMNS];

  DEVICE static int factor_warp() { return warp_id() - 1; }
  DEVICE static int row(int i) { return factor_warp() * WARP_SIZE + lane_id() + i * APART; }
  DEVICE static words &words_of(wgmma_smem<S> &smem, int k0) { return smem.scale_words[k0 / S::BK % SCALES_AHEAD]; }

  DEVICE static void find_rows(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile, int slot)
  {
    if (factor_warp() == 0 && lane_id() < (S::gated(args.g) ? 2 : 1))
      smem.rest[slot][lane_id()] = global_scale(args.g.b, lane_id(), tile.expert) * FACTORS::REST;
#pragma unroll 1
    for (int i = 0; i < ROWS; i++)
      smem.scale_rows[row(i)] = scales_of(args.g.b.scale, tile.expert, weight_row_of<S>(args, tile, row(i)));
    __syncwarp();
  }

  /* Of a stage and of each row the words that `bytes` from `first` on lie in, none without a scale of the row. */
  DEVICE static void load_words(wgmma_smem<S> &smem, int k0, int first, int bytes)
  {
    words &to = words_of(smem, k0);
#pragma unroll 1
    for (int i0 = 0; i0 < ROWS; i0 += AT_ONCE) {
      const uint8_t *from[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) from[i] = smem.scale_rows[row(i0 + i)] + first;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int before = (int)((uintptr_t)from[i] & 3);
#pragma unroll
        for (int w = 0; w <= WORDS; w++)
          if (w * 4 < before + bytes) cp_async_ca_4(shared_address(to[w] + row(i0 + i)), from[i] - before + w * 4, 4);
      }
    }
  }
};

template <class S, class CODE> struct factors_ahead : scales_ahead<S> {
  using X = typename S::X;
  using factors = weight_factors<X, CODE>;
  using typename scales_ahead<S>::words;
  using scales_ahead<S>::ROWS, scales_ahead<S>::SLICES, scales_ahead<S>::AT_ONCE, scales_ahead<S>::BYTES,
      scales_ahead<S>::WORDS, scales_ahead<S>::EACH, scales_ahead<S>::row, scales_ahead<S>::words_of;

  uint32_t skews; /* of each row two bits: how many bytes into a word its scales begin; a stage's are whole words */

  DEVICE factors_ahead(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile, int slot)
  {
    this->find_rows(args, smem, tile, slot);
    skews = 0;
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) skews |= ((uint32_t)(uintptr_t)smem.scale_rows[row(i)] & 3) << 2 * i;
#pragma unroll 1
    for (int i = 0; i < SCALES_AHEAD; i++) load(args.g, smem, i * S::BK);
  }

  DEVICE uint32_t skew(int i) const
  {
    return skews >> 2 * i & 3;
  }

  /* A group of copies, even if none. No word without a scale of the row. */
  DEVICE void load(const gemm_args &args, wgmma_smem<S> &smem, int k0)
  {
    const int first = k0 / 32 * EACH, bytes = min((args.k - k0) / 32 * EACH, BYTES);
    const uint32_t to = shared_address(words_of(smem, k0)[0] + row(0));
    if (k0 < args.k && args.b.scale.k_stride == 1)
#pragma unroll 2
      for (int i = 0; i < ROWS; i++) {
        const uint8_t *from = smem.scale_rows[row(i)] + first - skew(i);
#pragma unroll
        for (int w = 0; w <= WORDS; w++)
          if (w * 4 < (int)skew(i) + bytes) cp_async_ca_4(to + word_offset(w, i), from + w * 4, 4);
      }
    cp_async_commit_group();
  }

  DEVICE static int word_offset(int w, int i)
  {
    return (w * S::COLUMNS + i * scales_ahead<S>::APART) * 4;
  }

  /* Scales of slices of 32 k, EACH bytes of a word. */
  DEVICE void part(int i, const uint32_t (&word)[WORDS + 1], uint32_t (&codes)[SLICES]) const
  {
#pragma unroll
    for (int j = 0; j < SLICES; j++) {
      const int w = j * EACH / 4;
      codes[j] = __funnelshift_r(word[w], word[w + 1], skew(i) * 8) >> j * EACH % 4 * 8 & ((1u << EACH * 8) - 1);
    }
  }

  DEVICE void loaded(const words &from, int i, uint32_t (&codes)[SLICES]) const
  {
    uint32_t word[WORDS + 1];
#pragma unroll
    for (int w = 0; w <= WORDS; w++) word[w] = from[w][row(i)];
    part(i, word, codes);
  }

  /* The same where they do not lie one after another. */
  DEVICE void gathered(const gemm_args &args, const wgmma_smem<S> &smem, int i, int k0, uint32_t (&codes)[SLICES]) const
  {
#pragma unroll
    for (int j = 0; j < SLICES; j++) {
      codes[j] = 0;
      for (int b = 0; b < EACH && k0 + j * 32 < args.k; b++)
        codes[j] |= (uint32_t)__ldg(smem.scale_rows[row(i)] + ((k0 / 32 + j) * EACH + b) * args.b.scale.k_stride)
                    << b * 8;
    }
  }

  /* Whether any of them is absent, with what lies behind the last. */
  DEVICE static bool make(uint4 &to, const uint32_t (&codes)[SLICES])
  {
    bool any = false;
#pragma unroll
    for (int j = 0; j < SLICES; j++) any |= factors::any_absent(codes[j]);
    to = make_uint4(factors::prepared(codes[0]), factors::prepared(codes[1]), factors::prepared(codes[2]),
                    factors::prepared(codes[3]));
    return any;
  }

  /* AT_ONCE rows are read before one is stored, so that they overlap. */
  DEVICE bool store_rows(wgmma_smem<S> &smem, int stage, int k0) const
  {
    const uint32_t from = shared_address(words_of(smem, k0)[0] + row(0)),
                   to = shared_address(smem.factors[stage] + row(0));
    bool any = false;
#pragma unroll
    for (int i0 = 0; i0 < ROWS; i0 += AT_ONCE) {
      uint32_t word[AT_ONCE][WORDS + 1];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int w = 0; w <= WORDS; w++) word[i][w] = lds_32(from + word_offset(w, i0 + i));
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        uint32_t codes[SLICES];
        uint4 made;
        part(i0 + i, word[i], codes);
        any |= make(made, codes);
        sts_128(to + (i0 + i) * scales_ahead<S>::APART * 16, made);
      }
    }
    return any;
  }

  DEVICE void store(const gemm_args &args, wgmma_smem<S> &smem, int stage, int k0, int slot)
  {
    cp_async_wait_group<SCALES_AHEAD - 1>();
    if (args.b.scale.k_stride != 1 || store_rows(smem, stage, k0)) store_without_absent(args, smem, stage, k0, slot);
    __syncwarp(); /* behind it one lane arrives for all */
  }

  /* By any lane. */
  DEVICE void store_without_absent(const gemm_args &args, wgmma_smem<S> &smem, int stage, int k0, int slot)
  {
    bool absent = false;
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
      uint32_t codes[SLICES];
      if (args.b.scale.k_stride == 1)
        loaded(words_of(smem, k0), i, codes);
      else
        gathered(args, smem, i, k0, codes);
#pragma unroll
      for (int j = 0; j < SLICES; j++) absent |= leave_out(codes[j]) && k0 + j * 32 < args.k;
      make(smem.factors[stage][row(i)], codes);
    }
    if (absent) smem.absent[slot] = true;
  }

  /* Whether there are such. */
  DEVICE static bool leave_out(uint32_t &codes)
  {
    bool any = false;
#pragma unroll
    for (int b = 0; b < EACH; b++) {
      const uint32_t code = codes >> b * 8 & 255;
      if (!scale_is_absent<X, CODE>(code)) continue;
      any = true;
      codes = (codes & ~(255u << b * 8)) | factors::ABSENT << b * 8;
    }
    return any;
  }
};

/* Words of a scale and a bias. A row has 16 bits a block, in any half of a word. */
template <class S> struct factors_ahead<S, u4> : scales_ahead<S> {
  using X = typename S::X;
  using typename scales_ahead<S>::words;
  using scales_ahead<S>::ROWS, scales_ahead<S>::SLICES, scales_ahead<S>::AT_ONCE, scales_ahead<S>::WORDS,
      scales_ahead<S>::row, scales_ahead<S>::words_of;
  const uint32_t *zeros; /* of an octet of rows a lane; NULL: there are none */
  uint32_t odd;          /* a bit a row: its scales begin in the upper half of a word */

  DEVICE factors_ahead(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile, int slot)
  {
    static_assert(S::COLUMNS / 8 == WARP_SIZE && WORDS == 2 && SLICES == 4, "an octet a lane; see loaded");
    this->find_rows(args, smem, tile, slot);
    odd = 0;
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) odd |= (uint32_t)((uintptr_t)smem.scale_rows[row(i)] >> 1 & 1) << i;
    const weight_row first = weight_row_of<S>(args, tile, lane_id() * 8);
    zeros = zero_words(&args.g.b, first.half, tile.expert);
    if (zeros)
      zeros += first.channel / 8 * args.g.b.zero.n_stride +
               args.g.b.scale.k_origin / args.g.b.scale.block_k * args.g.b.zero.k_stride;
#pragma unroll 1
    for (int i = 0; i < SCALES_AHEAD; i++) load(args.g, smem, i * S::BK);
  }

  /* Blocks of k between a row's first and that of element k. */
  DEVICE static int block(const gemm_args &args, int k)
  {
    const int shift = 31 - __clz(args.b.scale.block_k);
    return (k + args.b.scale.k_origin >> shift) - (args.b.scale.k_origin >> shift);
  }

  /* A group of copies, even if none. */
  DEVICE void load(const gemm_args &args, wgmma_smem<S> &smem, int k0)
  {
    const int first = block(args, k0), count = block(args, min(k0 + S::BK, args.k) - 1) - first + 1;
    if (k0 < args.k) {
      this->load_words(smem, k0, first * 2, count * 2);
#pragma unroll 1
      for (int b = 0; zeros && b < count; b++)
        cp_async_ca_4(shared_address(&smem.zeros[this->factor_warp()][k0 / S::BK % SCALES_AHEAD][b][lane_id()]),
                      zeros + (first + b) * args.b.zero.k_stride, 4);
    }
    cp_async_commit_group();
  }

  /* Slices behind the last block have its factors. */
  DEVICE void store(const gemm_args &args, wgmma_smem<S> &smem, int stage, int k0, int)
  {
    cp_async_wait_group<SCALES_AHEAD - 1>();
    __syncwarp(); /* zero points are other lanes' */
    if (zeros)
      store_rows<true, 1>(args, smem, stage, k0);
    else
      store_rows<false, AT_ONCE>(args, smem, stage, k0);
    __syncwarp(); /* behind it one lane arrives for all */
  }

  /* EACH rows are read before one is stored, so that they overlap. */
  template <bool STORED, int EACH>
  DEVICE void store_rows(const gemm_args &args, wgmma_smem<S> &smem, int stage, int k0) const
  {
    const int first = block(args, k0);
    const uint32_t offset = decoder<u4, X>::bias(args.b.offset);
    int slice[SLICES]; /* which block it is of */
#pragma unroll
    for (int j = 0; j < SLICES; j++) slice[j] = block(args, min(k0 + j * 32, args.k - 32)) - first;
#pragma unroll 1
    for (int i0 = 0; i0 < ROWS; i0 += EACH) {
      uint32_t scale[EACH][WORDS];
#pragma unroll
      for (int i = 0; i < EACH; i++) loaded(words_of(smem, k0), i0 + i, first, scale[i]);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        uint32_t word[SLICES];
#pragma unroll
        for (int j = 0; j < SLICES; j++)
          word[j] = weight_factors<X, u4>::prepared(__byte_perm(scale[i][0], scale[i][1], slice[j] * 0x22 + 0x10),
                                                    STORED ? bias(args, smem, k0, i0 + i, slice[j]) : offset);
        smem.factors[stage][row(i0 + i)] = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }

  /* Scales of a stage's blocks, that of block `first` in the lowest half. */
  DEVICE void loaded(const words &from, int i, int first, uint32_t (&scale)[WORDS]) const
  {
    const uint32_t shift = ((odd >> i) + first & 1) * 16;
#pragma unroll
    for (int w = 0; w < WORDS; w++) scale[w] = __funnelshift_r(from[w][row(i)], from[w + 1][row(i)], shift);
  }

  /* Of block b of a stage, where zero points are stored. */
  DEVICE static uint32_t bias(const gemm_args &args, const wgmma_smem<S> &smem, int k0, int i, int b)
  {
    const uint32_t octet = smem.zeros[scales_ahead<S>::factor_warp()][k0 / S::BK % SCALES_AHEAD][b][row(i) / 8];
    return decoder<u4, X>::bias(args.b.offset + (int)(octet >> row(i) % 8 * 4 & 15) + args.b.zero.add);
  }
};

/* What HELPERS warps of producers do: unit by unit as those are posted, help(unit, its slot, stage) goes through its
 * stages and arrives at each one's `full`. Behind the last unit they arrive once more. */
template <class S, class HELP> DEVICE void follow_units(wgmma_smem<S> &smem, HELP help)
{
  pipeline_state<S::STAGES> at;
  pipeline_state<UNITS_AHEAD> slot;
#pragma unroll 1
  for (;; slot.advance()) {
    wait_for(&smem.posted[slot.stage], slot.phase);
    const tile_unit tile = smem.units[slot.stage];
    if (tile.expert < 0) break;
    help(tile, slot.stage, at);
  }
  if (lane_id() == 0) mbarrier_arrive(&smem.full[at.stage]);
}

/* Factors; rows come by tensor copies. */
template <class S> DEVICE void produce_factors(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  follow_units<S>(smem, [&](const tile_unit &tile, int slot, pipeline_state<S::STAGES> &at) {
    factors_ahead<S, typename S::CODE> factors(args, smem, tile, slot);
#pragma unroll 1
    for (int k0 = 0; k0 < args.g.k; k0 += S::BK, at.advance()) {
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      factors.store(args.g, smem, at.stage, k0, slot);
      if (lane_id() == 0) mbarrier_arrive(&smem.full[at.stage]);
      factors.load(args.g, smem, k0 + SCALES_AHEAD * S::BK);
    }
  });
}

/* ---- consumers ---- */

/* Asked for anew each time: registers are full. */
DEVICE int consumer_lane()
{
  return (int)(tid_x() % WARP_SIZE);
}

/* A lane's bytes of 32 k of a row: of its 8 codes those of k 0 .. 15 are in bytes 0 and 2. */
DEVICE uint32_t codes_of_lane(const uint4 &row, uint32_t byte)
{
  return __byte_perm(__byte_perm(row.x, row.z, byte), __byte_perm(row.y, row.w, byte), 0x5410);
}

/* The first of a lane's weight rows in a tile; the others are 8, 16, 24 on. */
template <class S> DEVICE int lane_weight_row()
{
  return ((int)(tid_x() / WARP_SIZE) - S::GROUP / WARP_SIZE) * S::OCTETS * 8 + consumer_lane() / 4;
}

/* Of 32 k what a lane has of its rows, as it lies in a stage. */
template <class S> struct slice_of_lane {
  uint4 codes[4];
  uint32_t factors[4];

  DEVICE void load(uint32_t from, uint32_t scales)
  {
#pragma unroll
    for (int r = 0; r < 4; r++) codes[r] = lds_128(from + r * 8 * S::WEIGHT_LINE);
#pragma unroll
    for (int r = 0; r < 4; r++) factors[r] = lds_32(scales + r * 8 * 16);
  }
};

/* As operands: of each 16 k and block. Octet r of weight rows is half r / 2 of block r % 2. */
template <class S> DEVICE void unpack_slice(const slice_of_lane<S> &slice, uint32_t (&a)[2][S::BLOCKS][4])
{
  const uint32_t byte = consumer_lane() % 4 * 0x11 + 0x40;
  weight_factors<typename S::X, typename S::CODE> factors;
  uint32_t word[4];
#pragma unroll
  for (int r = 0; r < 4; r++) {
    word[r] = codes_of_lane(slice.codes[r], byte);
    factors.restore(r, slice.factors[r]);
  }
#pragma unroll
  for (int part = 0; part < 2; part++) {
    uint32_t pair[4][2];
    unpack_words(factors, word, part * 2, pair);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      a[part][r % 2][r / 2] = __byte_perm(pair[r][0], pair[r][1], 0x5410);
      a[part][r % 2][r / 2 + 2] = __byte_perm(pair[r][0], pair[r][1], 0x7632);
      word[r] >>= 8;
    }
  }
}

/* acc += a times 32 k of `rows` tokens, rounded up: the widths that many rows take by 16. */
template <class S, int N>
DEVICE void multiply_wide(const uint32_t (&a)[2][S::BLOCKS][4], uint32_t tokens, int rows,
                          float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int LESS = N > 64 ? N - WGMMA_STEP : N - 32;
  if constexpr (LESS > 0) {
    if (rows <= LESS) {
      multiply_wide<S, LESS>(a, tokens, rows, acc);
      return;
    }
  }
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < 2; part++)
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
      wgmma_registers_m64k16<typename S::X, N>::run(acc[block], a[part][block], tokens + part * 2);
  wgmma_commit_group();
}

template <int STAGES> DEVICE int stage_before(const pipeline_state<STAGES> &at)
{
  return at.stage == 0 ? STAGES - 1 : at.stage - 1;
}

/* acc = weights x rows of one unit. A lane has row lane / 4 of each octet of its warp's 32 weight rows. While 32 k are
 * multiplied the next are unpacked, and those after them on their way. A stage is released when the next is under way.
 * Past the end of k there are zeros, in rows and in codes. */
template <class S>
DEVICE void multiply_packed_rows(const gemm_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at, int rows,
                                 float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
#pragma unroll 1
  for (int left = args.k; left > 0; left -= S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    const int row = lane_weight_row<S>();
    const uint32_t codes = shared_address(smem.weights[at.stage]) + row * S::WEIGHT_LINE + row / 2 % 4 * 16;
    const uint32_t scales = shared_address(smem.factors) + (at.stage * S::COLUMNS + row) * 16;
    const uint32_t tokens = (uint32_t)wgmma_operand(smem.rows[at.stage]);
    slice_of_lane<S> slice;
    slice.load(codes, scales);
#pragma unroll
    for (int i = 0; i < S::BK / 32; i++) {
      uint32_t a[2][S::BLOCKS][4];
      unpack_slice<S>(slice, a);
      if (i + 1 < S::BK / 32) slice.load(codes ^ (i + 1) * 16, scales + (i + 1) * 4);
      multiply_wide<S, S::BM>(a, tokens + i / 2 * (S::BM * 8) + i % 2 * 4, rows, acc);
      wgmma_wait_group<1>();
      if (i == 0 && left < args.k) release_stage<S>(smem, stage_before(at)); /* its last products are over */
    }
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  release_stage<S>(smem, stage_before(at));
}

/* ---- scales that products lack ---- */

/* Of a weight row and one row of A, in f32. */
template <class S>
DEVICE float absent_products(const gemm_args &args, int expert, const weight_row &row, int32_t source)
{
  using W = typename S::CODE;
  const char *codes =
      code_base(args.b, row.half, expert, operand<W>::BITS) + row.channel * args.b.n_stride * operand<W>::BITS / 8;
  const typename S::X *a = static_cast<const typename S::X *>(args.a) + source * args.a_ld;
  if (source < 0) return 0.f;
  return absent_sum<W>(
      codes, scales_of(args.b.scale, expert, row), args.b.scale.k_stride, args.k,
      [](int code) { return scale_is_absent<typename S::X, W>(code); }, [&](int k) { return to_f32(a[k]); });
}

template <class S>
DEVICE void add_absent(const gemm_sm90_args &args, const tile_unit &tile, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  add_absent_parts<S>(tile.rows, acc, [&](int octet, int token) {
    return absent_products<S>(args.g, tile.expert, weight_row_of<S>(args, tile, lane_weight_row<S>() + octet * 8),
                              token < tile.rows ? source_row(args.g, tile.row + token) : -1);
  });
}

/* acc of one unit. In a gated tile the blocks are the halves. */
template <class S>
DEVICE void multiply_packed(const gemm_sm90_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at, int slot,
                            float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  multiply_packed_rows<S>(args.g, smem, at, __shfl_sync(ALL_LANES, smem.units[slot].rows, 0), acc);
  if constexpr (operand<typename S::CODE>::K_PER_SCALE > 0)
    if (smem.absent[slot]) add_absent<S>(args, smem.units[slot], acc);
  const int first = S::gated(args.g) ? args.up_first : 0;
  const float rest[2] = {smem.rest[slot][first], smem.rest[slot][S::gated(args.g) ? 1 - first : 0]};
  if (rest[0] == 1.f && rest[1] == 1.f) return; /* where none ever are, ptxas spills without that branch */
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++)
#pragma unroll
    for (int j = 0; j < S::ACCUMULATORS; j++) acc[i][j] *= rest[i];
}

#endif
