/*
 * mixed: grouped GEMM of sm_90a with weights of 4 bits and activations of 16. K-major weights, any layout.
 *
 * A CTA has a producer warpgroup and two consumer warpgroups around a pipeline. Weights pass through shared memory as
 * codes; a consumer unpacks its 128 rows of them into registers, wgmma's 64-row operand, and multiplies them by the
 * rows (tokens), which wgmma reads from shared memory in the 128-byte swizzle.
 *
 * Order of k. In a slab of 128 k a lane takes the 16 bytes that hold 32 neighbouring codes of a row, which have one
 * scale in mx4: lane q of four has k = 32 q + 8 w + 4 t + j (w, j < 4, t < 2), in bits 4 (4 t + j) of its word w. Two
 * codes 16 bits apart, t = 0 and 1, become a register of wgmma's. So position 32 w + 8 j + 2 q + t of a slab of tokens
 * has that k: its bits rotated by two. Producers bring rows into this fragment order in registers, or copy rows that
 * have it already (ROWS_FRAGMENTS, a_ld of whole slabs), which many rows an expert want.
 *
 * Scales go from memory to the registers of the lanes that need them, a window ahead of use and over the ends of tiles.
 */
#ifndef CUMOE_MIXED_CUH
#define CUMOE_MIXED_CUH

#include "device/quant.cuh"
#include "device/wgmma_registers.cuh"
#include "gemm/stream.cuh"

template <class PRODUCT, int CLUSTER_, int BM_, int BN, int BK_, int STAGES_, int WARPS> struct mixed_shape : PRODUCT {
  static constexpr int BM = BM_, BK = BK_, STAGES = STAGES_, CLUSTER = CLUSTER_;
  static constexpr int COLUMNS = PRODUCT::HALVES * BN; /* weight rows of a tile */
  static constexpr bool N_MAJOR = false;
  static constexpr int GROUP = 128, BLOCK = 64, CONSUMERS = 2, THREADS = WARPS * WARP_SIZE;
  static constexpr int BLOCKS = 2, OCTETS = 4, ACCUMULATORS = BM / 2; /* as warpgroup_tile.cuh has them */
  static constexpr int GRANULE = 16, GRANULES = COLUMNS / GRANULE;
  static constexpr int SLAB = 128, SLABS = BK / SLAB, BITS = operand<typename PRODUCT::W>::BITS;
  static constexpr int ROW_BYTES = BK * BITS / 8; /* codes of a stage */
  /* Where memory is the limit, weights are read once. */
  static constexpr bool MEMORY_BOUND = BM <= 64;
  /* Producers fill two stages at once: a thread has 16 bytes of every PASS-th row. */
  static constexpr int LANES = 2 * ROW_BYTES / 16, PASS = GROUP / LANES;
  static constexpr int STEPS = 1;                                 /* of 16 k at once: registers */
  static constexpr int PRODUCER_REGISTERS = BM <= 64 ? 152 : 104; /* 384 threads start with 168 each */
  static constexpr int CONSUMER_REGISTERS = (3 * 168 - PRODUCER_REGISTERS) / 2;
  static_assert(CLUSTER == 1 && COLUMNS == CONSUMERS * BLOCKS * BLOCK && THREADS == (CONSUMERS + 1) * GROUP,
                "three warpgroups, of which two have two blocks each");
  static constexpr int SCALE_SLOTS = UNITS_AHEAD / 2; /* producers are no more than STAGES + 1 units ahead */
  static constexpr int ZERO_OCTETS = same_type<typename PRODUCT::W, u4> ? COLUMNS / 8 : 1;
  static_assert(STAGES + 2 <= SCALE_SLOTS, "see there");
  static_assert(BITS == 4 && (BK == 128 || BK == 256), "16 bytes of a row a lane and slab");
};

enum { PRODUCERS_BARRIER = 3 }; /* consumers' are 1 and 2 */

template <class S> struct mixed_smem {
  typename S::X rows[S::STAGES][S::BM * S::BK]; /* 64 k of all rows, the next 64 k, ... */
  uint8_t codes[S::STAGES][S::COLUMNS * S::ROW_BYTES];
  wgmma_staging<S> staging;
  uint64_t full[S::STAGES], empty[S::STAGES];
  tile_unit units[UNITS_AHEAD];                          /* and the one after each */
  const uint8_t *scales[S::SCALE_SLOTS][S::COLUMNS];     /* of units: where those of each weight row begin */
  const uint32_t *zeros[S::SCALE_SLOTS][S::ZERO_OCTETS]; /* the same of zero points, of each octet */
  stream_run<S> run;                                     /* of one thread */
  tile_table table;
  row_range ranges[MAX_EXPERTS];
};

#include "gemm/lane_weights.cuh"

/* ---- producers: codes ---- */

/* Where 16 bytes of codes lie in a row of a stage, so that the lanes that read two rows meet in no bank. */
template <class S> DEVICE int code_offset(int row, int vector)
{
  return row * S::ROW_BYTES + (S::ROW_BYTES == 128 ? vector ^ (row & 1) << 2 : vector) * 16;
}

/* A thread's weight rows of a tile. */
template <class S> struct mixed_weights {
  const char *origin[2]; /* of its first rows in the first and second eight of a granule */
  int64_t step;          /* bytes from a granule to the next */
  int left;              /* weight rows of the tile */
  uint64_t policy = evict_first_policy();

  DEVICE static int lane() { return threadIdx.x % S::LANES; }
  DEVICE static int row() { return threadIdx.x / S::LANES; }

  DEVICE void set_unit(const gemm_args &args, const tile_unit &unit)
  {
    const bool gated = S::gated(args);
    const int64_t stride = args.b.n_stride * S::BITS / 8;
    const int channel = unit.n * granule_channels<S>(args) + row() % 8;
#pragma unroll
    for (int h = 0; h < 2; h++)
      origin[h] = code_base<S::BITS>(args.b, gated ? h : 0, unit.expert) + (channel + (gated ? 0 : 8 * h)) * stride +
                  lane() * 16;
    step = (gated ? 8 : 16) * stride;
    left = (unit.end - unit.n) * S::GRANULE;
    if (!gated) left = min(left, args.n - unit.n * S::GRANULE);
  }

  /* Of k0 and on; channels come in octets. PASS 8: a thread's rows are of both eights in turn; 16: of one. */
  DEVICE void copy(const gemm_args &args, mixed_smem<S> &smem, int stage, int k0) const
  {
    constexpr int EACH = 16 / S::PASS;
    const int bytes = k0 + lane() * (128 / S::BITS) < args.k ? 16 : 0, own = S::PASS == 16 ? row() / 8 : 0;
    const int64_t at = (int64_t)k0 * S::BITS / 8;
    const char *from[2] = {(own ? origin[1] : origin[0]) + at, origin[1] + at};
    uint32_t to = shared_address(smem.codes[stage]) + code_offset<S>(row(), lane() % (S::LANES / 2));
#pragma unroll 4
    for (int granule = 0; granule * 16 + own * 8 < left; granule++, to += 16 * S::ROW_BYTES) {
#pragma unroll
      for (int h = 0; h < EACH; h++) {
        const int there = h == 0 || granule * 16 + 8 < left ? bytes : 0; /* at 0 bytes nothing is read */
        if (S::MEMORY_BOUND)
          cp_async_cg_16(to + h * 8 * S::ROW_BYTES, from[h], there, policy);
        else
          cp_async_cg_16(to + h * 8 * S::ROW_BYTES, from[h], there);
        from[h] += step;
      }
    }
  }
};

/* ---- producers: tokens ---- */

/* Rows of A; -1: zeros. As they are: a thread has 32 k of a row, 8 w .. 8 w + 7 of each quarter of a slab, which become
 * four vectors. Prepared: a vector of every 16th row. */
template <class S> struct mixed_rows {
  static constexpr int OCTETS_AT_ONCE = 4 / S::SLABS, TASKS = ceil_div(S::BM / 8, OCTETS_AT_ONCE), SOURCES = S::BM / 16,
                       EACH = TASKS > SOURCES ? TASKS : SOURCES;
  int32_t source[EACH];
  bool prepared;

  DEVICE static int slab() { return warp_id() % S::SLABS; }
  DEVICE static int octet(int i) { return warp_id() / S::SLABS + i * OCTETS_AT_ONCE; }
  DEVICE static int part() { return lane_id() / 8; }
  DEVICE int row(int i) const { return prepared ? (int)threadIdx.x / 8 + i * 16 : octet(i) * 8 + lane_id() % 8; }

  DEVICE void set_unit(const gemm_args &args, const tile_unit &unit)
  {
    const bool in_order = !args.row_pair || args.packed;
    const int64_t pairs = token_total(args.tokens) * args.top_k;
    constexpr int64_t NONE = INT64_MIN; /* -1 is a bad pair too */
    int64_t bad = NONE;
    prepared = args.rows.mode == ROWS_FRAGMENTS;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int r = row(i);
      source[i] = -1;
      if (r >= unit.rows) continue;
      const int32_t pair = in_order ? 0 : args.row_pair[unit.row + r];
      if (pair < 0 || pair >= pairs)
        bad = pair;
      else
        source[i] = in_order ? unit.row + r : (int32_t)((uint32_t)pair / (uint32_t)args.top_k);
    }
    if (bad != NONE) report_fault_inline(args.fault, FAULT_ROUTE, 0, bad);
  }

  DEVICE void copy(const gemm_args &args, mixed_smem<S> &smem, int rows, int stage, int k0) const
  {
    const int vector = threadIdx.x % 8, first = threadIdx.x / 8, end = round_up(args.k, (int)S::SLAB);
    const uint32_t to = shared_address(smem.rows[stage]) + first * 128 + (vector ^ first % 8) * 16;
    const int k = k0 + vector * 8;
    const typename S::X *base = static_cast<const typename S::X *>(args.a) + k;
#pragma unroll
    for (int i = 0; i < SOURCES; i++) {
      if (i * 16 >= rows) break;
      const typename S::X *from = base + source[i] * args.a_ld;
#pragma unroll
      for (int b = 0; b < S::BK / 64; b++) /* at 0 bytes nothing is read */
        cp_async_cg_16(to + b * S::BM * 128 + i * 16 * 128, from + b * 64, source[i] >= 0 && k + b * 64 < end ? 16 : 0);
    }
  }

  DEVICE void load(const gemm_args &args, int k0, int i, uint4 (&value)[4]) const
  {
    const int k = k0 + slab() * S::SLAB + part() * 8;
    const typename S::X *from = static_cast<const typename S::X *>(args.a) + source[i] * args.a_ld + k;
#pragma unroll
    for (int q = 0; q < 4; q++) value[q] = ld_global(from + 32 * q, source[i] >= 0 && k + 32 * q < args.k);
  }

  DEVICE void store(mixed_smem<S> &smem, int stage, int i, const uint4 (&value)[4]) const
  {
    const int r = octet(i) * 8 + lane_id() % 8;
    char *to = reinterpret_cast<char *>(smem.rows[stage]) + (slab() * 2 + part() / 2) * S::BM * 128 + r * 128;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint4 v;
      v.x = fragment_pair(value[0], j);
      v.y = fragment_pair(value[1], j);
      v.z = fragment_pair(value[2], j);
      v.w = fragment_pair(value[3], j);
      *reinterpret_cast<uint4 *>(to + ((part() % 2 * 4 + j) ^ r % 8) * 16) = v;
    }
  }

  /* Elements j and j + 4 of eight. */
  DEVICE static uint32_t fragment_pair(const uint4 &v, int j)
  {
    return __byte_perm(j < 2 ? v.x : v.y, j < 2 ? v.z : v.w, j % 2 ? 0x7632 : 0x5410);
  }

  DEVICE bool has(int rows, int i) const
  {
    return octet(i) * 8 < rows;
  }
};

/* Rows that are on their way through registers: of a stage, or of none where registers are few. */
template <class S> struct rows_ahead {
  using rows = mixed_rows<S>;
  static constexpr bool AHEAD = rows::TASKS <= 2;
  static constexpr int TASKS = AHEAD ? rows::TASKS : S::MEMORY_BOUND ? 2 : 1;
  uint4 value[TASKS][4];

  DEVICE void load(const gemm_args &args, const rows &from, int count, int k0)
  {
    if (AHEAD && k0 < args.k) load_tasks(args, from, count, k0, 0);
  }

  DEVICE void load_tasks(const gemm_args &args, const rows &from, int count, int k0, int first)
  {
#pragma unroll
    for (int i = 0; i < TASKS; i++)
      if (from.has(count, first + i)) from.load(args, k0, first + i, value[i]);
  }

  DEVICE void store(const gemm_args &args, mixed_smem<S> &smem, const rows &from, int count, int stage, int k0)
  {
#pragma unroll
    for (int i = 0; i < rows::TASKS; i += TASKS) {
      if (!AHEAD) load_tasks(args, from, count, k0, i);
#pragma unroll
      for (int j = 0; j < TASKS; j++)
        if (from.has(count, i + j)) from.store(smem, stage, i + j, value[j]);
      if (!AHEAD) __syncwarp(); /* no loads of the next before: registers */
    }
    fence_proxy_async_shared();
  }
};

/* ---- producers ---- */

/* The rows of one stage. A thread arrives twice: for what it has stored, and for what it has copied. */
template <class S>
DEVICE void produce_rows(const gemm_args &args, mixed_smem<S> &smem, const mixed_rows<S> &rows, rows_ahead<S> &ahead,
                         int count, int stage, int k0)
{
  if (rows.prepared)
    rows.copy(args, smem, count, stage, k0);
  else
    ahead.store(args, smem, rows, count, stage, k0);
  cp_async_mbarrier_arrive_noinc(&smem.full[stage]);
  mbarrier_arrive(&smem.full[stage]);
  if (!rows.prepared) ahead.load(args, rows, count, k0 + S::BK);
}

/* The run's next unit, for all; consumers see it behind the barrier of a later stage. All producers. */
template <class S> DEVICE void post_next_unit(const gemm_args &args, mixed_smem<S> &smem, int slot)
{
  slot %= UNITS_AHEAD;
  if (threadIdx.x == 0) smem.units[slot] = smem.run.next(args, smem);
  bar_sync(PRODUCERS_BARRIER, S::GROUP);
  const tile_unit unit = smem.units[slot];
  if (unit.expert < 0) return;
#pragma unroll 1
  for (int row = threadIdx.x; row < S::COLUMNS; row += S::GROUP)
    smem.scales[slot % S::SCALE_SLOTS][row] = scales_of_row<S>(args, unit, row);
  if (same_type<typename S::W, u4> && (args.b.zero.base[0] || args.b.zero.table[0]) && threadIdx.x < S::ZERO_OCTETS)
    smem.zeros[slot % S::SCALE_SLOTS][threadIdx.x] = zeros_of_octet<S>(args, unit, threadIdx.x);
}

/* All of a tile's stages, by twos; the second may not be there at the end of k. The weights of k < before are on their
 * way. */
template <class S>
DEVICE void produce_tile(const gemm_args &args, mixed_smem<S> &smem, int slot, const mixed_weights<S> &weights,
                         int before, pipeline_state<S::STAGES> &at)
{
  const int count = smem.units[slot].rows;
  mixed_rows<S> rows;
  rows.set_unit(args, smem.units[slot]);
  rows_ahead<S> ahead;
  if (!rows.prepared) ahead.load(args, rows, count, 0);
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += 2 * S::BK) {
    const bool two = k0 + S::BK < args.k, second = mixed_weights<S>::lane() >= S::LANES / 2;
    pipeline_state<S::STAGES> next = at;
    next.advance();
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (two) wait_for(&smem.empty[next.stage], next.phase ^ 1);
    if (k0 >= before && (two || !second)) weights.copy(args, smem, second ? next.stage : at.stage, k0);
    if (k0 == 0) post_next_unit<S>(args, smem, slot + 1);
    produce_rows<S>(args, smem, rows, ahead, count, at.stage, k0);
    if (two) produce_rows<S>(args, smem, rows, ahead, count, next.stage, k0 + S::BK);
    at = next;
    if (two) at.advance();
  }
}

/* Consumers find the first unit behind the first stage's barrier. */
template <class S> DEVICE void produce_nothing(mixed_smem<S> &smem)
{
  mbarrier_arrive(&smem.full[0]);
  mbarrier_arrive(&smem.full[0]);
}

/* With early inputs the stages fill with the first tile's weights before the grid ahead, which makes the rows, has
 * ended. */
template <class S> DEVICE void produce(const gemm_args &args, mixed_smem<S> &smem)
{
  if (threadIdx.x == 0) smem.run = stream_run<S>(args, smem.table.before[args.experts]);
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

/* ---- consumers ---- */

template <class S> DEVICE void release(mixed_smem<S> &smem, int stage)
{
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(&smem.empty[stage]);
}

/* Step i and those after it of word `w` of every row of a lane: 16 k of each block a step. */
template <class S, int N>
DEVICE void multiply_steps(const uint4 (&raw)[4], int w, int i,
                           const weight_factors<typename S::X, typename S::W> &factors, uint32_t b,
                           float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  uint32_t a[S::STEPS][S::BLOCKS][4];
#pragma unroll
  for (int step = 0; step < S::STEPS; step++) {
    uint32_t words[4], pairs[4][2];
#pragma unroll
    for (int r = 0; r < 4; r++)
      words[r] = (w == 0 ? raw[r].x : w == 1 ? raw[r].y : w == 2 ? raw[r].z : raw[r].w) >> (i + step) * 8;
    factors.unpack(words, w, pairs);
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int j = 0; j < 2; j++) a[step][r % 2][j * 2 + r / 2] = pairs[r][j];
  }
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < S::STEPS; step++)
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
      wgmma_registers_m64k16<typename S::X, N>::run(acc[block], a[step][block], b + (i + step) * 2);
  wgmma_commit_group();
}

/* acc = weights x rows of one unit, N tokens wide. A lane has row lane / 4 of each octet of its warp's 32 weight rows;
 * octet r is the half r / 2 of block r % 2. */
template <class S, int N>
DEVICE void multiply_n(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int group, int slot,
                       lane_scales<S> &scales, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const int row = group * S::BLOCKS * S::BLOCK + warp_id() % 4 * S::OCTETS * 8 + lane_id() / 4;
  const int slabs = ceil_div(args.k, (int)S::SLAB);
  uint32_t codes = 0, tokens = 0;
#pragma unroll 1
  for (int slab = 0; slab < slabs; slab++) { /* one slab's program: instructions come from a small cache */
    if (slab % S::SLABS == 0) {
      wait_for(&smem.full[at.stage], at.phase);
      fence_proxy_async_shared(); /* rows by cp.async */
      codes = shared_address(smem.codes[at.stage]) + code_offset<S>(row, lane_id() % 4);
      tokens = (uint32_t)wgmma_operand(smem.rows[at.stage]);
    } else {
      codes ^= 64;
      tokens += 2 * S::BM * 128 >> 4;
    }
    scales.step(args, smem, slot, slab);
    uint4 raw[4];
#pragma unroll
    for (int r = 0; r < 4; r++) raw[r] = lds_128(codes + r * 8 * S::ROW_BYTES);
    const weight_factors<typename S::X, typename S::W> factors = scales.factors(slab);
#pragma unroll
    for (int w = 0; w < 4; w++) {
#pragma unroll
      for (int i = 0; i < 2; i += S::STEPS) {
        multiply_steps<S, N>(raw, w, i, factors, tokens + (w / 2 * S::BM * 128 >> 4) + w % 2 * 4, acc);
        wgmma_wait_group<1>();
      }
    }
    if ((slab + 1) % S::SLABS != 0 && slab + 1 < slabs) continue;
    wgmma_wait_group<0>();
    release<S>(smem, at.stage);
    at.advance();
  }
  wgmma_wait_group<0>(); /* again, for the assembler */
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
}

/* Widths are the multiples of 16 up to BM; for few rows 8 as well. */
template <class S, int N>
DEVICE void multiply(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int group, int slot,
                     int rows, lane_scales<S> &scales, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int LESS = N == 16 && S::BM <= 32 ? 8 : N - 16;
  if constexpr (LESS > 0) {
    if (rows <= LESS) {
      multiply<S, LESS>(args, smem, at, group, slot, rows, scales, acc);
      return;
    }
  }
  multiply_n<S, N>(args, smem, at, group, slot, scales, acc);
}

/* ---- scales that products lack: any number, of the few weights that are beyond what a model trains ---- */

/* Element k of a row of A, wherever it lies in the row. */
template <class S> DEVICE float element_of_row(const gemm_args &args, int32_t source, int k)
{
  if (source < 0) return 0.f;
  const int place = k & ~127 | (k >> 3 & 3) << 5 | (k & 3) << 3 | (k >> 5 & 3) << 1 | (k >> 2 & 1);
  const int64_t at = source * args.a_ld + (args.rows.mode == ROWS_FRAGMENTS ? place : k);
  return to_f32(static_cast<const typename S::X *>(args.a)[at]);
}

/* Of weight row `row` of a tile and one row of A, in f32. */
template <class S>
DEVICE float absent_products(const gemm_args &args, const mixed_smem<S> &smem, int slot, int row, int32_t source)
{
  const tile_unit unit = smem.units[slot];
  const bool gated = S::gated(args);
  const int channel = gated ? (unit.n + row / 16) * 8 + row % 8 : unit.n * 16 + row;
  const char *codes = code_base<S::BITS>(args.b, gated ? row / 8 % 2 : 0, unit.expert) +
                      min(channel, args.n - 1) * args.b.n_stride * S::BITS / 8;
  const uint8_t *scales = smem.scales[slot % S::SCALE_SLOTS][row];
  constexpr int RUN = operand<typename S::W>::K_PER_SCALE;
  float sum = 0.f;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += RUN) {
    const int code = scales[k0 / RUN * args.b.scale.k_stride];
    if (!scale_is_absent<typename S::X, typename S::W>(code)) continue;
    float part = 0.f;
#pragma unroll 1
    for (int k = k0; k < k0 + RUN; k++)
      part += e2m1_to_f32((uint32_t)codes[k / 2] >> k % 2 * 4 & 15) * element_of_row<S>(args, source, k);
    sum += part * (same_type<typename S::W, nv4> ? e4m3_to_f32(code) : e8m0_to_f32(code));
  }
  return sum;
}

/* A thread's sums are of its row in each octet and of tokens 8 j + 2 (lane % 4) + t. */
template <class S>
DEVICE void add_absent(const gemm_args &args, const mixed_smem<S> &smem, int slot,
                       float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const int first = smem.units[slot].row, rows = smem.units[slot].rows;
#pragma unroll 1
  for (int i = 0; i < ceil_div(rows, 8) * 8; i++) {
    const int octet = i % 4, j = i / 8, token = j * 8 + lane_id() % 4 * 2 + i / 4 % 2;
    const float part = absent_products<S>(args, smem, slot, row_of_lane<S>(octet),
                                          token < rows ? source_row(args, first + token) : -1);
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
      for (int a = 0; a < S::ACCUMULATORS; a++)
        if (octet == block + a / 2 % 2 * 2 && i / 4 == a / 4 * 2 + a % 2) acc[block][a] += part;
  }
}

/* What is left of the weights' scale multiplies sums. In a gated tile the blocks are gate and up. */
template <class S> DEVICE void scale_sums(const gemm_args &args, int expert, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr float REST = weight_factors<typename S::X, typename S::W>::REST;
  if (REST == 1.f && !args.b.global[0]) return;
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) {
    const float rest = global_scale(args.b, S::gated(args) ? i : 0, expert) * REST;
#pragma unroll
    for (int j = 0; j < S::ACCUMULATORS; j++) acc[i][j] *= rest;
  }
}

template <class S> DEVICE void skip(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at)
{
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    release<S>(smem, at.stage);
  }
}

template <class S> DEVICE void consume(const gemm_args &args, mixed_smem<S> &smem)
{
  const int group = threadIdx.x / S::GROUP - 1, width = granule_channels<S>(args),
            granules = S::GRANULES / S::CONSUMERS;
  pipeline_state<S::STAGES> at;
  lane_scales<S> scales;
  wait_for(&smem.full[0], 0); /* the first unit is there, and with every unit the one after it */
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD) {
    if (smem.units[slot].expert < 0) break;
    scales.begin(args, smem, slot);
    wait_for(&smem.full[at.stage], at.phase);
    if (smem.units[slot].n + group * granules >= smem.units[slot].end) {
      scales.skip(args, smem, slot);
      skip<S>(args, smem, at);
      continue;
    }
    float acc[S::BLOCKS][S::ACCUMULATORS] = {};
    multiply<S, S::BM>(args, smem, at, group, slot, smem.units[slot].rows, scales, acc);
    const tile_unit unit = smem.units[slot]; /* read again: registers are few */
    const int first = unit.n + group * granules, end = min(unit.end, first + granules);
    if constexpr (!same_type<typename S::W, u4>)
      if (scales.any_absent()) add_absent<S>(args, smem, slot, acc);
    scale_sums<S>(args, unit.expert, acc);
    store_tile<S>(args, false, smem.staging, unit, group, {first * width, min(end * width, args.n)}, acc);
  }
}

template <class S> DEVICE void mixed_gemm(const gemm_args &args, mixed_smem<S> &smem)
{
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::STAGES; s++) {
      mbarrier_init(&smem.full[s], 2 * S::GROUP);
      mbarrier_init(&smem.empty[s], S::CONSUMERS * S::GROUP / WARP_SIZE);
    }
    fence_mbarrier_init();
  }
  if (!args.protocol.early_inputs) wait_for_earlier_grids();
  const int tiles = build_tile_table<S::BM, S::THREADS>(args, smem.table, smem.ranges);
  if (tiles == 0) return wait_for_earlier_grids();
  if (threadIdx.x < S::GROUP) {
    setmaxnreg_dec<S::PRODUCER_REGISTERS>();
    produce<S>(args, smem);
  } else {
    setmaxnreg_inc<S::CONSUMER_REGISTERS>();
    consume<S>(args, smem);
  }
}

#endif
