/*
 * mixed: grouped GEMM of sm_90a with weights of 4 bits and activations of 16. K-major weights, any layout.
 *
 * A CTA has a warpgroup of producers and two of consumers around a pipeline. Weights pass through shared memory as
 * codes, with their scales; a warp unpacks its 32 rows of them into the registers that mma.sync and wgmma take them
 * from, and multiplies them by all rows (tokens) of the tile: by mma.sync where they are few, whose results are there
 * sooner, by wgmma where they are more, which reads them from shared memory once for four warps.
 *
 * Order of k. In a slab of 128 k a lane takes the 16 bytes that hold 32 neighbouring codes of a row, which have one
 * scale in mx4: lane q of four has k = 32 q + 8 w + 4 t + j (w, j < 4, t < 2), in bits 4 (4 t + j) of its word w. Two
 * codes 16 bits apart, t = 0 and 1, become a register of a fragment. Rows of A lie in shared memory in the order of
 * fragments, where that k is at 32 w + 8 j + 2 q + t: producers load and store them, once for all consumers.
 */
#ifndef CUMOE_MIXED_CUH
#define CUMOE_MIXED_CUH

#include "gemm/stream.cuh"

template <class S, class W> struct format_scales;

template <class PRODUCT, int CLUSTER_, int BM_, int BN, int BK_, int STAGES_, int WARPS> struct mixed_shape : PRODUCT {
  static constexpr int STAGED = 1; /* as pipeline_shape's */
  using SCALES = format_scales<mixed_shape, typename PRODUCT::W>;
  static constexpr int BM = BM_, BK = BK_, STAGES = STAGES_, CLUSTER = CLUSTER_;
  static constexpr bool SCALED = false;                /* rows have no scales */
  static constexpr bool FIXED = false;                 /* rows are stored in fixed point (gemm/fixed.cuh) */
  static constexpr bool TWIN = false;                  /* as two codes an element (gemm/twin.cuh) */
  static constexpr int COLUMNS = PRODUCT::HALVES * BN; /* weight rows of a tile */
  static constexpr bool N_MAJOR = false;
  /* Warpgroups: two of consumers; producers of weights, and of rows if there are four, else of both. */
  static constexpr int GROUP = 128, THREADS = WARPS * WARP_SIZE, CONSUMERS = 2, PRODUCERS = THREADS / GROUP - CONSUMERS;
  static constexpr bool APART = PRODUCERS == 2;
  static constexpr int ROWS = COLUMNS * WARP_SIZE / (CONSUMERS * GROUP); /* weight rows of a warp */
  /* A warp's outputs, as warpgroup_tile.cuh has them: no less than it stores at once. */
  static constexpr int BLOCKS = ROWS / 16, OCTETS = 2 * BLOCKS, ACCUMULATORS = BM > 16 ? BM / 2 : 16 / BLOCKS;
  static constexpr int GRANULE = 16, GRANULES = COLUMNS / GRANULE;
  static constexpr int SLAB = 128, SLABS = BK / SLAB, BITS = operand<typename PRODUCT::W>::BITS;
  static constexpr int ROW_BYTES = BK * BITS / 8; /* codes of a stage */
  /* Producers fill two stages at once: a thread has 16 bytes of every PASS-th row. */
  static constexpr int LANES = 2 * ROW_BYTES / 16, PASS = GROUP / LANES;
  static constexpr bool U4 = same_type<typename PRODUCT::W, u4>;
  /* What a thread starts with, and what becomes of it. */
  static constexpr int OF_BOTH = U4 ? 152 : 136;
  static constexpr int REGISTERS = APART ? 128 : 168, PRODUCER_REGISTERS = APART ? 96 : OF_BOTH,
                       ROW_REGISTERS = APART ? 80 : 0;
  static constexpr int CONSUMER_REGISTERS =
      (REGISTERS * THREADS / GROUP - PRODUCER_REGISTERS - ROW_REGISTERS) / CONSUMERS;
  static constexpr int PLANE = 64, PLANES = BK / PLANE; /* rows of A: as wgmma reads them, 128 bytes of k at a time */
  static constexpr int WGMMA_FROM = 32;                 /* tokens: fewer are quicker by mma.sync */
  static_assert(CLUSTER == 1 && (ROWS == 16 || ROWS == 32) && (PRODUCERS == 1 || APART), "whole blocks");
  /* Experts whose rows are looked up once: what a fourth stage leaves room for. */
  static constexpr int RANGES = U4 ? MAX_EXPERTS / 2 : MAX_EXPERTS;
  static constexpr int UNIT_SLOTS = UNITS_AHEAD / 2; /* producers are no more than STAGES + 1 units ahead */
  /* Bytes of a weight row's scales in a stage, at most: one each 32 or 16 k, or two each 32. */
  static constexpr int SCALE_BYTES =
      BK / (operand<typename PRODUCT::W>::K_PER_SCALE > 0 ? operand<typename PRODUCT::W>::K_PER_SCALE : 16);
  static constexpr int SCALE_WORDS = U4 ? SCALE_BYTES / 4 : round_up(SCALE_BYTES / 4 + 1, 4);
  static constexpr bool ZEROS = U4;
  static constexpr int ZERO_OCTETS = ZEROS ? COLUMNS / 8 : 1;
  static_assert(STAGES + 2 <= UNIT_SLOTS, "see there");
  static_assert(BITS == 4 && (BK == 128 || BK == 256), "16 bytes of a row a lane and slab");
};

#include "gemm/lane_weights.cuh"

enum { WEIGHTS_BARRIER = 5, ROWS_BARRIER = 6 }; /* of a warpgroup of producers each; those of consumers have 1 to 4 */

/* gemm/fixed.cuh */
template <class S> struct mixed_smem;
template <class S> struct fixed_rows;
template <class S>
DEVICE void store_fixed(mixed_smem<S> &smem, int stage, int slab, int row, int word, const uint4 (&v)[4]);
/* gemm/twin.cuh */
template <class S> DEVICE void produce_twins(const gemm_args &args, mixed_smem<S> &smem);
template <class S, class SCALES>
DEVICE void multiply_twins(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int slot,
                           SCALES &scales, float (&sums)[S::BLOCKS][S::ACCUMULATORS]);
template <class S> DEVICE bool twin_scale_is_absent(int code);
template <class S> DEVICE float twin_element(const gemm_args &args, int32_t source, int k);

template <class S, int N, class SCALES>
DEVICE void multiply_fixed(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int rows,
                           SCALES &scales, float (&sums)[S::BLOCKS][S::ACCUMULATORS]);

template <class S> struct mixed_smem {
  typename S::X rows[S::STAGES][S::PLANES][S::BM * S::PLANE];
  uint8_t codes[S::STAGES][S::COLUMNS * S::ROW_BYTES];
  scale_stage<S> scales[S::STAGES];
  wgmma_staging<S> staging;
  uint64_t full[S::STAGES], empty[S::STAGES];
  uint64_t posted[S::APART || S::TWIN ? UNITS_AHEAD : 1]; /* a unit is there: for producers of rows of their own */
  tile_unit units[UNITS_AHEAD];                           /* and the one after each */
  uint8_t skew[S::UNIT_SLOTS][S::COLUMNS];                /* of units: of each weight row's scales, see scale_stage */
  int32_t sources[2][S::BM];                              /* of a unit's rows in A; the producers' */
  stream_run<S> run;                                      /* of one thread */
  tile_table table;
  row_range ranges[S::RANGES];
};

/* ---- producers: codes ---- */

/* Where 16 bytes of codes lie in a row of a stage, so that lanes meet in no bank: those that read 64 bytes of two rows
 * each, and those that read 16 bytes of eight. */
template <class S> DEVICE int code_offset(int row, int vector)
{
  const int swizzle = S::ROW_BYTES == 128 ? (row & 1) << 2 | (row >> 1 & 3) : row >> 1 & 3;
  return row * S::ROW_BYTES + (vector ^ swizzle) * 16;
}

static constexpr uint64_t EVICT_FIRST = 0x12f0000000000000; /* as createpolicy makes it */

/* A thread's weight rows of a tile. */
template <class S> struct tile_codes {
  const char *origin[2]; /* of its first rows in the first and second eight of a granule */
  int64_t step;          /* bytes from a granule to the next */
  int left;              /* weight rows of the tile */

  /* row: the first one's in its eight; lane: which 16 bytes of it. */
  DEVICE void set_unit(const gemm_args &args, const tile_unit &unit, bool gated, int row, int lane)
  {
    const int64_t stride = args.b.n_stride * S::BITS / 8;
    const int channel = unit.n * granule_channels<S>(args) + row;
#pragma unroll
    for (int h = 0; h < 2; h++)
      origin[h] =
          code_base(args.b, gated ? h : 0, unit.expert, S::BITS) + (channel + (gated ? 0 : 8 * h)) * stride + lane * 16;
    step = (gated ? 8 : 16) * stride;
    left = (unit.end - unit.n) * S::GRANULE;
    if (!gated) left = min(left, args.n - unit.n * S::GRANULE);
  }
};

template <class S> struct mixed_weights : tile_codes<S> {
  using tile_codes<S>::origin, tile_codes<S>::step, tile_codes<S>::left;

  DEVICE static int lane() { return (int)tid_x() % S::LANES; }
  DEVICE static int row() { return (int)tid_x() / S::LANES; }

  DEVICE void set_unit(const gemm_args &args, const tile_unit &unit)
  {
    tile_codes<S>::set_unit(args, unit, S::gated(args), row() % 8, lane());
  }

  /* Of k0 and on; channels come in octets. PASS 8: a thread's rows are of both eights in turn; 16: of one. */
  DEVICE void copy(const gemm_args &args, mixed_smem<S> &smem, int stage, int k0) const
  {
    constexpr int EACH = 16 / S::PASS;
    if (k0 + lane() * (128 / S::BITS) >= args.k) return copy_nothing(smem, stage);
    const int own = S::PASS == 16 ? row() / 8 : 0, rows = left - own * 8;
    const int64_t at = (int64_t)k0 * S::BITS / 8;
    const char *from[2] = {(own ? origin[1] : origin[0]) + at, origin[1] + at};
    uint32_t to = first_place(smem, stage);
    int there = rows;
#pragma unroll 1
    for (; there >= 64; there -= 64, to += 64 * S::ROW_BYTES) {
#pragma unroll
      for (int i = 0; i < 4 * EACH; i++) {
        cp_async_cg_16(to + (i / EACH * 16 + i % EACH * 8) * S::ROW_BYTES, from[i % EACH], 16, EVICT_FIRST);
        from[i % EACH] += step;
      }
    }
#pragma unroll 1
    for (; there > 0; there -= 16, to += 16 * S::ROW_BYTES) {
#pragma unroll
      for (int h = 0; h < EACH; h++) {
        if (h * 8 < there) cp_async_cg_16(to + h * 8 * S::ROW_BYTES, from[h], 16, EVICT_FIRST);
        from[h] += step;
      }
    }
  }

  /* Past the end of k there are zeros. */
  DEVICE void copy_nothing(mixed_smem<S> &smem, int stage) const
  {
    const uint32_t to = first_place(smem, stage);
#pragma unroll 1
    for (int r = row(); r < left; r += S::PASS) sts_128(to + (r - row()) * S::ROW_BYTES, make_uint4(0, 0, 0, 0));
  }

  DEVICE static uint32_t first_place(const mixed_smem<S> &smem, int stage)
  {
    return shared_address(smem.codes[stage]) + code_offset<S>(row(), lane() % (S::LANES / 2));
  }
};

/* ---- producers: tokens ---- */

/* source_row, which reports nothing: no call, for which all that lives would have to make room. */
DEVICE int32_t known_source(const gemm_args &args, int32_t row)
{
  if (!args.row_pair || args.packed) return row;
  const int64_t pair = args.row_pair[row];
  return pair >= 0 && pair < token_total(args.tokens) * args.top_k ? (int32_t)((uint32_t)pair / (uint32_t)args.top_k)
                                                                   : -1;
}

/* Of a unit's row r; -1: zeros. */
DEVICE int32_t reported_source(const gemm_args &args, const tile_unit &unit, int r)
{
  if (r >= unit.rows) return -1;
  const int32_t source = known_source(args, unit.row + r);
  if (source < 0) report_fault_inline(args.fault, FAULT_ROUTE, 0, args.row_pair[unit.row + r]);
  return source;
}

/* Rows of A, -1: zeros, in the order of fragments. A warp has a slab of two stages, or half of its octets of rows; a
 * lane a row of the octet and 8 k of each 32 of the slab. */
template <class S> struct mixed_rows {
  static constexpr int SLABS = 2 * S::SLABS, SHARE = S::GROUP / WARP_SIZE / SLABS; /* warps that share a slab */
  static constexpr int AHEAD = S::BM > 32 && !S::FIXED ? 2 : 1;                    /* octets asked for early */
  uint4 early[AHEAD][4];

  DEVICE static int warp() { return (int)(tid_x() / WARP_SIZE) - (S::APART ? S::GROUP / WARP_SIZE : 0); }
  DEVICE static int slab() { return warp() % SLABS; }
  DEVICE static int octet(int i) { return warp() / SLABS + i * SHARE; }

  /* Of a unit: producers see them behind their next barrier. */
  DEVICE static void look_up(const gemm_args &args, mixed_smem<S> &smem, int slot)
  {
    const tile_unit unit = smem.units[slot];
    const int r = (int)tid_x() - (S::APART ? S::GROUP : 0);
    if (r < unit.rows) smem.sources[slot % 2][r] = reported_source(args, unit, r);
  }

  DEVICE static void load(const gemm_args &args, const mixed_smem<S> &smem, int slot, int rows, int octet, int k0,
                          uint4 (&v)[4])
  {
    const int r = octet * 8 + (int)(tid_x() % WARP_SIZE) % 8,
              k = k0 + slab() * S::SLAB + (int)(tid_x() % WARP_SIZE) / 8 * 8;
    const int32_t source = r < rows ? smem.sources[slot % 2][r] : -1;
    const typename S::X *from = static_cast<const typename S::X *>(args.a) + source * args.a_ld + k;
#pragma unroll
    for (int q = 0; q < 4; q++) v[q] = ld_global(from + q * 32, source >= 0 && k + q * 32 < args.k);
  }

  /* Of lane q, k = 8 w + 4 t + j goes to 8 j + 2 q + t. */
  DEVICE static void store(mixed_smem<S> &smem, int stage, int octet, const uint4 (&v)[4])
  {
    const int r = (int)(tid_x() % WARP_SIZE) % 8, w = (int)(tid_x() % WARP_SIZE) / 8;
    if constexpr (S::FIXED) return store_fixed<S>(smem, stage, slab() % S::SLABS, octet * 8 + r, w, v);
    const uint32_t to = shared_address(smem.rows[stage][slab() % S::SLABS * 2 + w / 2]) + octet * 1024 + r * 128;
    const uint32_t first = (w % 2 * 4 ^ r) * 16;
    sts_128(to + first, joined(v[0].x, v[0].z, v[1].x, v[1].z, v[2].x, v[2].z, v[3].x, v[3].z, 0x5410));
    sts_128(to + (first ^ 16), joined(v[0].x, v[0].z, v[1].x, v[1].z, v[2].x, v[2].z, v[3].x, v[3].z, 0x7632));
    sts_128(to + (first ^ 32), joined(v[0].y, v[0].w, v[1].y, v[1].w, v[2].y, v[2].w, v[3].y, v[3].w, 0x5410));
    sts_128(to + (first ^ 48), joined(v[0].y, v[0].w, v[1].y, v[1].w, v[2].y, v[2].w, v[3].y, v[3].w, 0x7632));
  }

  DEVICE static uint4 joined(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e, uint32_t f, uint32_t g,
                             uint32_t h, uint32_t halves)
  {
    return make_uint4(__byte_perm(a, b, halves), __byte_perm(c, d, halves), __byte_perm(e, f, halves),
                      __byte_perm(g, h, halves));
  }

  DEVICE void load_early(const gemm_args &args, const mixed_smem<S> &smem, int slot, int rows, int k0)
  {
    if (k0 >= args.k) return;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (octet(i) * 8 < rows) load(args, smem, slot, rows, octet(i), k0, early[i]);
  }

  /* Of k0 and on, of which the early ones are here; stage is that of the slab. */
  DEVICE void store_all(const gemm_args &args, mixed_smem<S> &smem, int slot, int rows, int stage, int k0)
  {
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (octet(i) * 8 < rows) store(smem, stage, octet(i), early[i]);
#pragma unroll 1
    for (int first = AHEAD; octet(first) * 8 < rows; first += AHEAD) {
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (octet(first + i) * 8 < rows) load(args, smem, slot, rows, octet(first + i), k0, early[i]);
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (octet(first + i) * 8 < rows) store(smem, stage, octet(first + i), early[i]);
    }
    fence_proxy_async_shared();
  }
};

/* ---- producers ---- */

/* The run's next unit, for all; consumers see it behind the barrier of a later stage. All producers of weights. */
template <class S> DEVICE void post_next_unit(const gemm_args &args, mixed_smem<S> &smem, int slot)
{
  slot %= UNITS_AHEAD;
  if (tid_x() == 0) {
    smem.units[slot] = smem.run.next(args, smem);
    if (S::APART) mbarrier_arrive(&smem.posted[slot]);
  }
  bar_sync(WEIGHTS_BARRIER, S::GROUP);
}

/* Rows of a stage and the next one (two), of which the early ones are here, and the early ones of the next two. A warp
 * arrives for what it has stored. */
template <class S>
DEVICE void store_rows(const gemm_args &args, mixed_smem<S> &smem, mixed_rows<S> &tokens, int slot, int rows, int k0,
                       int stage, int next, bool two)
{
  const bool late = tokens.slab() >= S::SLABS;
  if (two || !late) tokens.store_all(args, smem, slot, rows, late ? next : stage, k0);
  __syncwarp();
  if ((int)(tid_x() % WARP_SIZE) == 0) {
    mbarrier_arrive(&smem.full[stage]);
    if (two) mbarrier_arrive(&smem.full[next]);
  }
  tokens.load_early(args, smem, slot, rows, k0 + 2 * S::BK);
}

/* All of a tile's stages, by twos; the second may not be there at the end of k. The weights of k < before are on their
 * way. A thread arrives for what it has copied. */
template <class S>
DEVICE void produce_tile(const gemm_args &args, mixed_smem<S> &smem, int slot, const mixed_weights<S> &weights,
                         int before, pipeline_state<S::STAGES> &at)
{
  const int rows = smem.units[slot].rows;
  stage_scales<S> scales;
  scales.set_unit(args, smem, slot);
  mixed_rows<S> tokens;
  if (!S::APART) mixed_rows<S>::look_up(args, smem, slot);
  /* The next unit takes a while to find: by then as much is on its way as there is room for. */
  constexpr int STEP = 2 * S::BK;
  const int post_at = S::APART ? (min(S::STAGES / 2, ceil_div(args.k, STEP)) - 1) * STEP : 0;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += STEP) {
    const bool two = k0 + S::BK < args.k, second = mixed_weights<S>::lane() >= S::LANES / 2;
    pipeline_state<S::STAGES> next = at;
    next.advance();
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (two) wait_for(&smem.empty[next.stage], next.phase ^ 1);
    if (k0 >= before && (two || !second)) weights.copy(args, smem, second ? next.stage : at.stage, k0);
    scales.copy(args, smem.scales[at.stage], k0);
    cp_async_mbarrier_arrive_noinc(&smem.full[at.stage]);
    if (two) {
      scales.copy(args, smem.scales[next.stage], k0 + S::BK);
      cp_async_mbarrier_arrive_noinc(&smem.full[next.stage]);
    }
    if (k0 == post_at) post_next_unit<S>(args, smem, slot + 1); /* its barrier is that of look_up, too */
    if (!S::APART && k0 == 0) tokens.load_early(args, smem, slot, rows, 0);
    if (!S::APART) store_rows<S>(args, smem, tokens, slot, rows, k0, at.stage, next.stage, two);
    at = next;
    if (two) at.advance();
  }
}

/* Consumers find the first unit behind the first stage's barrier. */
template <class S> DEVICE void produce_nothing(mixed_smem<S> &smem)
{
  mbarrier_arrive(&smem.full[0]);
  __syncwarp();
  if (!S::APART && (int)(tid_x() % WARP_SIZE) == 0) mbarrier_arrive(&smem.full[0]);
}

/* With early inputs the stages fill with the first tile's weights before the grid ahead, which makes the rows, has
 * ended. */
template <class S> DEVICE void produce(const gemm_args &args, mixed_smem<S> &smem)
{
  if (tid_x() == 0) smem.run = stream_run<S>(args, smem.table.before[args.experts]);
  post_next_unit<S>(args, smem, 0);
  if (smem.units[0].expert < 0) produce_nothing<S>(smem);
  pipeline_state<S::STAGES> at;
  bool waited = !args.protocol.early_inputs;
#pragma unroll 1
  for (int slot = 0; smem.units[slot].expert >= 0; slot = (slot + 1) % UNITS_AHEAD) {
    mixed_weights<S> weights;
    weights.set_unit(args, smem.units[slot]);
    int before = 0;
    if (!waited) {
#pragma unroll 1
      for (; before + 2 * S::BK <= min(args.k, S::STAGES * S::BK); before += 2 * S::BK)
        weights.copy(args, smem, before / S::BK + mixed_weights<S>::lane() / (S::LANES / 2), before);
      wait_for_earlier_grids();
      waited = true;
    }
    produce_tile<S>(args, smem, slot, weights, before, at);
  }
  if (!waited) wait_for_earlier_grids();
}

/* Rows alone, by producers of their own: unit by unit and stage by stage as the others. What they arrive for tells
 * consumers of the next unit, too, so it has to be there. */
template <class S> DEVICE void produce_rows(const gemm_args &args, mixed_smem<S> &smem)
{
  pipeline_state<S::STAGES> at;
  pipeline_state<UNITS_AHEAD> unit;
  mixed_rows<S> tokens;
  wait_for(&smem.posted[0], 0);
  if (smem.units[0].expert < 0 && (int)(tid_x() % WARP_SIZE) == 0) mbarrier_arrive(&smem.full[0]);
#pragma unroll 1
  while (smem.units[unit.stage].expert >= 0) {
    const int slot = unit.stage, rows = smem.units[slot].rows;
    mixed_rows<S>::look_up(args, smem, slot);
    bar_sync(ROWS_BARRIER, S::GROUP);
    tokens.load_early(args, smem, slot, rows, 0);
    unit.advance();
#pragma unroll 1
    for (int k0 = 0; k0 < args.k; k0 += 2 * S::BK) {
      const bool two = k0 + S::BK < args.k;
      if (k0 + 2 * S::BK >= args.k) wait_for(&smem.posted[unit.stage], unit.phase);
      pipeline_state<S::STAGES> next = at;
      next.advance();
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      if (two) wait_for(&smem.empty[next.stage], next.phase ^ 1);
      store_rows<S>(args, smem, tokens, slot, rows, k0, at.stage, next.stage, two);
      at = next;
      if (two) at.advance();
    }
  }
}

/* The same of another part of what stages hold, a stage at once. post(the stage's k, the next unit's slot) may post
 * that unit. */
template <class S, class PART, class POST>
DEVICE void produce_part(const gemm_args &args, mixed_smem<S> &smem, POST post)
{
  pipeline_state<S::STAGES> at;
  pipeline_state<UNITS_AHEAD> unit;
  wait_for(&smem.posted[0], 0);
  if (smem.units[0].expert < 0) mbarrier_arrive(&smem.full[0]);
#pragma unroll 1
  while (smem.units[unit.stage].expert >= 0) {
    PART part;
    part.set_unit(args, smem, unit.stage);
    unit.advance();
#pragma unroll 1
    for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      part.copy(args, smem, at.stage, k0);
      post(k0, unit.stage);
      if (k0 + S::BK >= args.k) wait_for(&smem.posted[unit.stage], unit.phase);
      part.arrive(&smem.full[at.stage]);
    }
  }
}

/* ---- consumers ---- */

template <class S> DEVICE void release(mixed_smem<S> &smem, int stage)
{
  __syncwarp();
  if (tid_x() % WARP_SIZE == 0) mbarrier_arrive(&smem.empty[stage]);
}

/* Of the consumers'. Worked out where it is used: registers are few. */
template <class S> DEVICE int consumer_warp()
{
  return (int)(tid_x() / WARP_SIZE) - S::PRODUCERS * S::GROUP / WARP_SIZE;
}

template <class S> DEVICE int consumer_group()
{
  return consumer_warp<S>() / (S::GROUP / WARP_SIZE);
}

/* The first of a lane's weight rows in a tile; the others are 8, 16, 24 on. */
template <class S> DEVICE int lane_row()
{
  return consumer_warp<S>() * S::ROWS + tid_x() % WARP_SIZE / 4;
}

/* Where a lane reads a slab, as shared addresses: its weight rows' codes, and its row of ldmatrix of A. */
template <class S> struct slab_places {
  uint32_t codes, rows;

  /* Of stage 0 the first slab. */
  DEVICE slab_places(const mixed_smem<S> &smem)
  {
    const int lane = tid_x() % WARP_SIZE;
    codes = shared_address(smem.codes[0]) + code_offset<S>(lane_row<S>(), lane % 4);
    rows = shared_address(smem.rows[0]) + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
  }

  DEVICE void add_stages(const mixed_smem<S> &smem, int stages)
  {
    codes += stages * (uint32_t)sizeof(smem.codes[0]);
    rows += stages * (uint32_t)sizeof(smem.rows[0]);
  }

  DEVICE void next_slab(const mixed_smem<S> &smem)
  {
    codes ^= 64;
    rows += 2 * (uint32_t)sizeof(smem.rows[0][0]);
  }

  DEVICE uint4 codes_of(int r) const { return lds_128(codes + r * 8 * S::ROW_BYTES); }

  /* 32 k of w: two of 16. */
  DEVICE void row_pairs(int w, int octet, uint32_t (&b)[4]) const
  {
    ldmatrix_x4(b, (rows ^ w % 2 * 64) + w / 2 * S::BM * 128 + octet * 1024);
  }
};

/* As warpgroup_tile.cuh has outputs: block 1 is 8 weight rows behind block 0, a block's second eight 16 behind its
 * first. */
template <class S> using warp_sums = float[S::BLOCKS][S::ACCUMULATORS];

/* A lane's codes of 32 k as fragments of 16 k each, and blocks. Octet r of weight rows is half r / 2 of block r % 2. */
template <class FACTORS>
DEVICE void unpack_32(const uint4 (&raw)[4], int w, const FACTORS &factors, uint32_t (&a)[2][2][4])
{
  uint32_t words[4], pairs[4][4];
#pragma unroll
  for (int r = 0; r < 4; r++) words[r] = w == 0 ? raw[r].x : w == 1 ? raw[r].y : w == 2 ? raw[r].z : raw[r].w;
  unpack_words(factors, words, w, pairs);
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int j = 0; j < 4; j++) a[j / 2][r % 2][j % 2 * 2 + r / 2] = pairs[r][j];
}

/* sums += a times 32 k of N rows of A, by mma.sync. */
template <class S, int N>
DEVICE void multiply_here(const uint32_t (&a)[2][2][4], const slab_places<S> &from, int w, warp_sums<S> &sums)
{
#pragma unroll
  for (int octet = 0; octet < N / 8; octet++) {
    uint32_t b[4];
    from.row_pairs(w, octet, b);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t own[2] = {b[2 * i], b[2 * i + 1]};
#pragma unroll
      for (int block = 0; block < 2; block++)
        mma_m16n8k16<typename S::X>(reinterpret_cast<float(&)[4]>(sums[block][octet * 4]), a[i][block], own);
    }
  }
}

/* The same by wgmma, in the width by 16 that `rows` rows take; it is under way, and the one before it is over. */
template <class S, int N>
DEVICE void multiply_wide(const uint32_t (&a)[2][4], uint32_t tokens, int rows, warp_sums<S> &sums)
{
  if constexpr (N > S::WGMMA_FROM) {
    if (rows <= N - 16) return multiply_wide<S, N - 16>(a, tokens, rows, sums);
  }
  wgmma_fence();
#pragma unroll
  for (int block = 0; block < 2; block++) wgmma_registers_m64k16<typename S::X, N>::run(sums[block], a[block], tokens);
  wgmma_commit_group();
}

/* sums += 32 weight rows x N rows of A, of a slab of k and on; tokens: operand of its rows. */
template <class S, int N, class SCALES>
DEVICE void multiply_slab(const gemm_args &args, const mixed_smem<S> &smem, const slab_places<S> &from, uint32_t tokens,
                          int rows, SCALES &scales, int stage, int slab, int k, warp_sums<S> &sums)
{
  uint4 raw[4];
#pragma unroll
  for (int r = 0; r < 4; r++) raw[r] = from.codes_of(r);
  const auto factors = scales.factors(args, smem, stage, slab, k);
#pragma unroll
  for (int w = 0; w < 4; w++) {
    uint32_t a[2][2][4];
    unpack_32(raw, w, factors, a);
    if constexpr (N < S::WGMMA_FROM) {
      multiply_here<S, N>(a, from, w, sums);
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        multiply_wide<S, N>(a[i], tokens + w / 2 * S::BM * 8 + w % 2 * 4 + i * 2, rows, sums);
        wgmma_wait_group<1>();
      }
    }
  }
}

/* sums = the warp's weight rows x rows of one unit, at most N, over its slabs. */
template <class S, int N, class SCALES>
DEVICE void multiply_n(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int rows,
                       SCALES &scales, warp_sums<S> &sums)
{
  const slab_places<S> first(smem);
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    slab_places<S> places = first;
    places.add_stages(smem, at.stage);
    wait_for(&smem.full[at.stage], at.phase);
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS && k0 + slab * S::SLAB < args.k; slab++, places.next_slab(smem)) {
      const uint32_t tokens = (uint32_t)wgmma_operand(smem.rows[at.stage][slab * 2]);
      multiply_slab<S, N>(args, smem, places, tokens, rows, scales, at.stage, slab, k0 + slab * S::SLAB, sums);
    }
    if constexpr (N >= S::WGMMA_FROM) wgmma_wait_group<0>();
    release<S>(smem, at.stage);
  }
  if constexpr (N >= S::WGMMA_FROM) {
#pragma unroll
    for (int block = 0; block < 2; block++) hold(sums[block]);
  }
}

/* In a few widths: by mma.sync, which few rows take, multiples of 8 or 16; by wgmma one loop. */
template <class S, int N, class SCALES>
DEVICE void multiply(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int rows,
                     SCALES &scales, warp_sums<S> &sums)
{
  constexpr int LESS = N > 16 ? 16 : S::BM <= 32 ? N - 8 : 0;
  if constexpr (LESS > 0) {
    if (rows <= LESS) return multiply<S, LESS>(args, smem, at, rows, scales, sums);
  }
  multiply_n<S, N>(args, smem, at, rows, scales, sums);
}

/* ---- scales that products lack ---- */

/* Whether products of the form leave a weight's scale out. */
template <class S> DEVICE bool lacks_scale(int code)
{
  if constexpr (S::TWIN)
    return twin_scale_is_absent<S>(code);
  else
    return scale_is_absent<typename S::X, typename S::W>(code);
}

template <class S> DEVICE float element_of_row(const gemm_args &args, int32_t source, int k)
{
  if constexpr (S::TWIN)
    if (args.a_scale) return twin_element<S>(args, source, k);
  return to_f32(static_cast<const typename S::X *>(args.a)[source * args.a_ld + k]);
}

/* Of weight row `row` of a tile and one row of A, in f32. */
template <class S> DEVICE float absent_products(const gemm_args &args, const tile_unit &unit, int row, int32_t source)
{
  const bool gated = S::gated(args);
  const int channel = gated ? (unit.n + row / 16) * 8 + row % 8 : unit.n * 16 + row;
  const char *codes = code_base(args.b, gated ? row / 8 % 2 : 0, unit.expert, S::BITS) +
                      min(channel, args.n - 1) * args.b.n_stride * S::BITS / 8;
  if (source < 0) return 0.f;
  return absent_sum<typename S::W>(
      codes, scales_of_row<S>(args, unit, row), args.b.scale.k_stride, args.k,
      [](int code) { return lacks_scale<S>(code); }, [&](int k) { return element_of_row<S>(args, source, k); });
}

template <class S> DEVICE void add_absent(const gemm_args &args, const tile_unit &unit, warp_sums<S> &acc)
{
  add_absent_parts<S>(unit.rows, acc, [&](int octet, int token) {
    return absent_products<S>(args, unit, lane_row<S>() + octet * 8,
                              token < unit.rows ? known_source(args, unit.row + token) : -1);
  });
}

/* What is left of the weights' scale multiplies sums. In a gated tile even octets are of one half, odd ones of the
 * other. */
template <class S> DEVICE void scale_sums(const gemm_args &args, int expert, warp_sums<S> &acc)
{
  constexpr float REST = S::TWIN ? 1.f : weight_factors<typename S::X, typename S::W>::REST;
  if (REST == 1.f && !args.b.global[0]) return;
  float rest[2];
#pragma unroll
  for (int half = 0; half < 2; half++) rest[half] = global_scale(args.b, S::gated(args) ? half : 0, expert) * REST;
#pragma unroll
  for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
    for (int a = 0; a < S::ACCUMULATORS; a++) acc[block][a] *= rest[(block + a / 2 % 2 * S::BLOCKS) % 2];
}

template <class S> DEVICE void skip(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at)
{
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    release<S>(smem, at.stage);
  }
}

/* sums = the warp's part of the unit at `slot`; whether products lack scales. */
template <class S, class SCALES>
DEVICE bool multiply_unit(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int slot,
                          warp_sums<S> &sums)
{
  SCALES scales;
  scales.set_unit(args, smem, slot, lane_row<S>());
  if constexpr (S::TWIN)
    multiply_twins<S>(args, smem, at, slot, scales, sums);
  else if constexpr (S::FIXED)
    multiply_fixed<S, S::BM>(args, smem, at, smem.units[slot].rows, scales, sums);
  else
    multiply<S, S::BM>(args, smem, at, smem.units[slot].rows, scales, sums);
  if constexpr (operand<typename S::W>::K_PER_SCALE > 0) return __any_sync(ALL_LANES, scales.absent);
  return false;
}

/* Whether scales have another type than activations, for which u4 has products of its own. */
template <class S> DEVICE bool scales_are_wide(const gemm_args &args)
{
  return S::U4 && !S::FIXED && args.b.scale.dtype != (same_type<typename S::X, bf16> ? DT_BF16 : DT_F16);
}

/* WIDE: by which products scales of another type are taken, where others come at all. */
template <class S, class SCALES, class WIDE> DEVICE void consume(const gemm_args &args, mixed_smem<S> &smem)
{
  constexpr int GRANULES = S::GRANULES / S::CONSUMERS; /* of a warpgroup's outputs */
  pipeline_state<S::STAGES> at;
  wait_for(&smem.full[0], 0); /* the first unit is there, and with every unit the one after it */
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD) {
    if (smem.units[slot].expert < 0) break;
    wait_for(&smem.full[at.stage], at.phase);
    if (smem.units[slot].n + consumer_group<S>() * GRANULES >= smem.units[slot].end) {
      skip<S>(args, smem, at);
      continue;
    }
    warp_sums<S> sums = {};
    bool absent;
    if (!same_type<SCALES, WIDE> && scales_are_wide<S>(args))
      absent = multiply_unit<S, WIDE>(args, smem, at, slot, sums);
    else
      absent = multiply_unit<S, SCALES>(args, smem, at, slot, sums);
    const tile_unit unit = smem.units[slot]; /* read again: registers are few */
    int gated = S::gated(args);
    if (S::HALVES == 2) hold(gated);
    const int group = consumer_group<S>(), width = gated ? S::GRANULE / 2 : S::GRANULE,
              first = unit.n + group * GRANULES, end = min(unit.end, first + GRANULES);
    if constexpr (operand<typename S::W>::K_PER_SCALE > 0)
      if (absent) add_absent<S>(args, unit, sums);
    scale_sums<S>(args, unit.expert, sums);
    store_tile<S>(args, false, smem.staging, unit, group, {first * width, min(end * width, args.n)}, sums);
  }
}

template <int FROM, int TO> DEVICE void change_registers()
{
  if constexpr (TO > FROM)
    setmaxnreg_inc<TO>();
  else
    setmaxnreg_dec<TO>();
}

/* Whether a launch ahead has brought rows into fixed point: then each thread arrives for those it copies, else a lane
 * for what its warp has stored. */
template <class S> DEVICE bool rows_are_fixed(const gemm_args &args)
{
  return S::FIXED && args.a_scale;
}

template <class S> DEVICE void mixed_gemm(const gemm_args &args, mixed_smem<S> &smem)
{
  if (threadIdx.x == 0) {
    const int arrivals = S::TWIN ? 0 : rows_are_fixed<S>(args) ? S::GROUP : S::GROUP / WARP_SIZE;
    for (int s = 0; s < S::STAGES; s++) {
      mbarrier_init(&smem.full[s], S::GROUP + arrivals);
      mbarrier_init(&smem.empty[s], S::CONSUMERS * S::GROUP / WARP_SIZE);
    }
    for (int u = 0; (S::APART || S::TWIN) && u < UNITS_AHEAD; u++) mbarrier_init(&smem.posted[u], 1);
    fence_mbarrier_init();
  }
  if (!args.protocol.early_inputs) wait_for_earlier_grids();
  const bool all = args.experts <= S::RANGES;
  for (int e = threadIdx.x; !all && e < S::RANGES; e += S::THREADS) smem.ranges[e] = expert_rows(args, e);
  const int tiles = build_tile_table<S::BM, S::THREADS>(args, smem.table, all ? smem.ranges : nullptr);
  if (tiles == 0) return wait_for_earlier_grids();
  if (threadIdx.x < S::GROUP) {
    change_registers<S::REGISTERS, S::PRODUCER_REGISTERS>();
    if constexpr (S::TWIN)
      produce_twins<S>(args, smem);
    else
      produce<S>(args, smem);
  } else if (S::APART && threadIdx.x < 2 * S::GROUP) {
    if constexpr (S::APART) {
      change_registers<S::REGISTERS, S::ROW_REGISTERS>();
      if (args.protocol.early_inputs) wait_for_earlier_grids();
      if constexpr (S::FIXED)
        if (rows_are_fixed<S>(args)) return produce_part<S, fixed_rows<S>>(args, smem, [](int, int) {});
      produce_rows<S>(args, smem);
    }
  } else {
    change_registers<S::REGISTERS, S::CONSUMER_REGISTERS>();
    using scales = typename S::SCALES;
    if constexpr (!S::U4 || S::FIXED) {
      consume<S, scales, scales>(args, smem);
    } else if constexpr (S::BM <= 32) {
      consume<S, scales, wide_scales<S>>(args, smem);
    } else { /* registers are full: units of either kind in a loop of their own */
      if (scales_are_wide<S>(args)) return consume<S, wide_scales<S>, wide_scales<S>>(args, smem);
      consume<S, scales, scales>(args, smem);
    }
  }
}

#endif
