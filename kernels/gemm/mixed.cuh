/*
 * mixed: grouped GEMM of sm_90a with weights of 4 bits and activations of 16. K-major weights, any layout.
 *
 * A CTA has a warpgroup of producers and two or four of consumers around a pipeline. Weights pass through shared memory
 * as codes, with their scales; a warp unpacks its 32 rows of them into the registers that mma.sync takes them from, and
 * multiplies them by all rows (tokens) of the tile. Instructions are the limit, so a warp has many weights for each
 * instruction that unpacks none. With four warpgroups two warps share 32 weight rows: each has every other slab of k,
 * and they add up at the end.
 *
 * Order of k. In a slab of 128 k a lane takes the 16 bytes that hold 32 neighbouring codes of a row, which have one
 * scale in mx4: lane q of four has k = 32 q + 8 w + 4 t + j (w, j < 4, t < 2), in bits 4 (4 t + j) of its word w. Two
 * codes 16 bits apart, t = 0 and 1, become a register of an mma, and so do the same two of a row of A, which lies in
 * shared memory as in memory but for the order of its vectors: 4 w + q of a slab has k = 32 q + 8 w.
 */
#ifndef CUMOE_MIXED_CUH
#define CUMOE_MIXED_CUH

#include "gemm/stream.cuh"

template <class PRODUCT, int CLUSTER_, int BM_, int BN, int BK_, int STAGES_, int WARPS> struct mixed_shape : PRODUCT {
  static constexpr int BM = BM_, BK = BK_, STAGES = STAGES_, CLUSTER = CLUSTER_;
  static constexpr bool SCALED = false;                /* rows have no scales */
  static constexpr int COLUMNS = PRODUCT::HALVES * BN; /* weight rows of a tile */
  static constexpr int GROUP = 128, THREADS = WARPS * WARP_SIZE, CONSUMERS = WARPS * WARP_SIZE / GROUP - 1;
  static constexpr int ROWS = 32,
                       SPLIT = CONSUMERS * GROUP / COLUMNS; /* weight rows of a warp; warps that share them */
  /* A warp's outputs, as warpgroup_tile.cuh has them: no less than it stores at once. */
  static constexpr int BLOCKS = 2 / SPLIT, OCTETS = 2 * BLOCKS, ACCUMULATORS = BM > 16 * SPLIT ? BM / 2 : 8 * SPLIT;
  static constexpr int GRANULE = 16, GRANULES = COLUMNS / GRANULE;
  static constexpr int SLAB = 128, SLABS = BK / SLAB, BITS = operand<typename PRODUCT::W>::BITS;
  static constexpr int ROW_BYTES = BK * BITS / 8; /* codes of a stage */
  /* Where memory is the limit, weights are read once. */
  static constexpr bool MEMORY_BOUND = BM <= 64;
  /* Producers fill two stages at once: a thread has 16 bytes of every PASS-th row. */
  static constexpr int LANES = 2 * ROW_BYTES / 16, PASS = GROUP / LANES;
  /* What a thread starts with, and what becomes of it. */
  static constexpr int REGISTERS = SPLIT == 2 ? 96 : 168, PRODUCER_REGISTERS = SPLIT == 2 ? 128 : 136;
  static constexpr int CONSUMER_REGISTERS = (REGISTERS * (CONSUMERS + 1) - PRODUCER_REGISTERS) / CONSUMERS;
  static_assert(CLUSTER == 1 && (SPLIT == 1 || SPLIT == 2) && CONSUMERS * GROUP == SPLIT * COLUMNS, "two or four");
  static constexpr int UNIT_SLOTS = UNITS_AHEAD / 2; /* producers are no more than STAGES + 1 units ahead */
  /* Bytes of a weight row's scales in a stage, at most: one each 32 or 16 k, or four each 32. */
  static constexpr int SCALE_BYTES =
      BK / (operand<typename PRODUCT::W>::K_PER_SCALE > 0 ? operand<typename PRODUCT::W>::K_PER_SCALE : 8);
  static constexpr int SCALE_WORDS = SCALE_BYTES / 4 + 2;
  static constexpr int ZERO_OCTETS = same_type<typename PRODUCT::W, u4> ? COLUMNS / 8 : 1;
  static_assert(STAGES + 2 <= UNIT_SLOTS, "see there");
  static_assert(BITS == 4 && (BK == 128 || BK == 256), "16 bytes of a row a lane and slab");
};

#include "gemm/lane_weights.cuh"

enum { PRODUCERS_BARRIER = 5, PAIR_BARRIER }; /* warpgroups of consumers have 1 to 4 */

template <class S> struct mixed_smem {
  typename S::X rows[S::STAGES][S::SLABS][S::BM][S::SLAB];
  uint8_t codes[S::STAGES][S::COLUMNS * S::ROW_BYTES];
  scale_stage<S> scales[S::STAGES];
  wgmma_staging<S> staging;
  uint64_t full[S::STAGES], empty[S::STAGES];
  tile_unit units[UNITS_AHEAD];            /* and the one after each */
  uint8_t skew[S::UNIT_SLOTS][S::COLUMNS]; /* of units: of each weight row's scales, see scale_stage */
  int32_t sources[2][S::BM];               /* of a unit's rows in A; the producers' */
  stream_run<S> run;                       /* of one thread */
  tile_table table;
  row_range ranges[MAX_EXPERTS];
};

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
      origin[h] = code_base(args.b, gated ? h : 0, unit.expert, S::BITS) + (channel + (gated ? 0 : 8 * h)) * stride +
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

/* source_row, which reports nothing: no call, for which all that lives would have to make room. */
DEVICE int32_t known_source(const gemm_args &args, int32_t row)
{
  if (!args.row_pair || args.packed) return row;
  const int64_t pair = args.row_pair[row];
  return pair >= 0 && pair < token_total(args.tokens) * args.top_k ? (int32_t)((uint32_t)pair / (uint32_t)args.top_k)
                                                                   : -1;
}

/* Rows of A; -1: zeros. A warp copies a row of a stage at once. */
template <class S> struct mixed_rows {
  static constexpr int WARPS = S::GROUP / WARP_SIZE, EACH = S::BM / WARPS, VECTORS = S::BK / 8;

  /* Of a unit: producers see them behind their next barrier. */
  DEVICE static void look_up(const gemm_args &args, mixed_smem<S> &smem, int slot)
  {
    const tile_unit unit = smem.units[slot];
    const int r = threadIdx.x;
    if (r >= unit.rows) return;
    const int32_t source = known_source(args, unit.row + r);
    smem.sources[slot % 2][r] = source;
    if (source < 0) report_fault_inline(args.fault, FAULT_ROUTE, 0, args.row_pair[unit.row + r]);
  }

  /* Of k0 and on. Rows past the last are what they were: nobody stores what comes of them. */
  DEVICE static void copy(const gemm_args &args, mixed_smem<S> &smem, int slot, int rows, int stage, int k0)
  {
    const int vector = lane_id() % VECTORS, k = k0 + vector * 8;
    const typename S::X *base = static_cast<const typename S::X *>(args.a) + k;
    const uint32_t to = shared_address(smem.rows[stage][vector / 16]);
#pragma unroll 2
    for (int r = warp_id(); r < rows; r += WARPS) {
      const int32_t source = smem.sources[slot % 2][r];
      if (lane_id() < VECTORS) /* at 0 bytes nothing is read */
        cp_async_cg_16(to + row_offset(r, vector % 16), base + source * args.a_ld, source >= 0 && k < args.k ? 16 : 0);
    }
  }

  /* Where vector 4 q + w of a row's slab lies, so that the lanes that read two rows meet in no bank. */
  DEVICE static int row_offset(int row, int vector)
  {
    return row * 256 + ((vector % 4 * 4 + vector / 4) ^ (row & 1) << 2) * 16;
  }
};

/* ---- producers ---- */

/* What a stage has besides codes. A thread arrives twice: for what it has stored, and for what it has copied. */
template <class S>
DEVICE void produce_rest(const gemm_args &args, mixed_smem<S> &smem, const stage_scales<S> &scales, int slot, int rows,
                         int stage, int k0)
{
  mixed_rows<S>::copy(args, smem, slot, rows, stage, k0);
  scales.copy(args, smem.scales[stage], k0);
  cp_async_mbarrier_arrive_noinc(&smem.full[stage]);
  mbarrier_arrive(&smem.full[stage]);
}

/* The run's next unit, for all; consumers see it behind the barrier of a later stage. All producers. */
template <class S> DEVICE void post_next_unit(const gemm_args &args, mixed_smem<S> &smem, int slot)
{
  slot %= UNITS_AHEAD;
  if (threadIdx.x == 0) smem.units[slot] = smem.run.next(args, smem);
  bar_sync(PRODUCERS_BARRIER, S::GROUP);
}

/* All of a tile's stages, by twos; the second may not be there at the end of k. The weights of k < before are on their
 * way. */
template <class S>
DEVICE void produce_tile(const gemm_args &args, mixed_smem<S> &smem, int slot, const mixed_weights<S> &weights,
                         int before, pipeline_state<S::STAGES> &at)
{
  const int rows = smem.units[slot].rows;
  mixed_rows<S>::look_up(args, smem, slot);
  stage_scales<S> scales;
  scales.set_unit(args, smem, slot);
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += 2 * S::BK) {
    const bool two = k0 + S::BK < args.k, second = mixed_weights<S>::lane() >= S::LANES / 2;
    pipeline_state<S::STAGES> next = at;
    next.advance();
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (two) wait_for(&smem.empty[next.stage], next.phase ^ 1);
    if (k0 >= before && (two || !second)) weights.copy(args, smem, second ? next.stage : at.stage, k0);
    if (k0 == 0) post_next_unit<S>(args, smem, slot + 1); /* its barrier is that of look_up, too */
    produce_rest<S>(args, smem, scales, slot, rows, at.stage, k0);
    if (two) produce_rest<S>(args, smem, scales, slot, rows, next.stage, k0 + S::BK);
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

/* Of the consumers'. Worked out where it is used: registers are few. */
template <class S> DEVICE int consumer_warp()
{
  return (int)(tid_x() / WARP_SIZE) - S::GROUP / WARP_SIZE;
}

/* The first of a lane's weight rows in a tile; the others are 8, 16, 24 on. */
template <class S> DEVICE int lane_row()
{
  return consumer_warp<S>() / S::SPLIT * S::ROWS + tid_x() % WARP_SIZE / 4;
}

/* Where a lane reads a slab, as shared addresses: its weight rows' codes, and the first of its rows of A. */
template <class S> struct slab_places {
  uint32_t codes, rows;

  /* Of stage 0 the warp's first slab. */
  DEVICE slab_places(const mixed_smem<S> &smem)
  {
    const int lane = tid_x() % WARP_SIZE, slab = consumer_warp<S>() % S::SPLIT;
    codes = shared_address(smem.codes[0]) + code_offset<S>(lane_row<S>(), slab * 4 + lane % 4);
    rows = shared_address(smem.rows[0][slab][lane / 4]) + lane % 4 * 16 + lane / 4 % 2 * 64;
  }

  DEVICE void add_stages(const mixed_smem<S> &smem, int stages)
  {
    codes += stages * (uint32_t)sizeof(smem.codes[0]);
    rows += stages * (uint32_t)sizeof(smem.rows[0]);
  }

  DEVICE void next_slab(const mixed_smem<S> &smem)
  {
    codes ^= 64;
    rows += (uint32_t)sizeof(smem.rows[0][0]);
  }

  DEVICE uint4 codes_of(int r) const { return lds_128(codes + r * 8 * S::ROW_BYTES); }

  /* 8 k of w, as codes are paired. */
  DEVICE void row_pairs(int w, int octet, uint32_t (&b)[2][2]) const
  {
    const uint4 v = lds_128((rows ^ w % 2 * 64) + w / 2 * 128 + octet * 8 * 256);
    b[0][0] = __byte_perm(v.x, v.z, 0x5410);
    b[0][1] = __byte_perm(v.x, v.z, 0x7632);
    b[1][0] = __byte_perm(v.y, v.w, 0x5410);
    b[1][1] = __byte_perm(v.y, v.w, 0x7632);
  }
};

template <class S> using warp_sums = float[2][S::BM / 8][4];

/* sums += 32 weight rows x N rows of A, of a slab. Octet r of weight rows is the half r / 2 of block r % 2. */
template <class S, int N>
DEVICE void multiply_slab(const slab_places<S> &from, const weight_factors<typename S::X, typename S::W> &factors,
                          warp_sums<S> &sums)
{
  uint4 raw[4];
#pragma unroll
  for (int r = 0; r < 4; r++) raw[r] = from.codes_of(r);
#pragma unroll
  for (int w = 0; w < 4; w++) {
    uint32_t a[2][2][4]; /* of 16 k each, blocks */
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t words[4], pairs[4][2];
#pragma unroll
      for (int r = 0; r < 4; r++)
        words[r] = (w == 0 ? raw[r].x : w == 1 ? raw[r].y : w == 2 ? raw[r].z : raw[r].w) >> i * 8;
      factors.unpack(words, w, pairs);
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int j = 0; j < 2; j++) a[i][r % 2][j * 2 + r / 2] = pairs[r][j];
    }
#pragma unroll
    for (int octet = 0; octet < N / 8; octet++) {
      uint32_t b[2][2];
      from.row_pairs(w, octet, b);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int block = 0; block < 2; block++) mma_m16n8k16<typename S::X>(sums[block][octet], a[i][block], b[i]);
    }
  }
}

/* sums = the warp's weight rows x rows of one unit, N wide, over its slabs. */
template <class S, int N>
DEVICE void multiply_n(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at,
                       lane_scales<S> &scales, warp_sums<S> &sums)
{
  const slab_places<S> first(smem);
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    slab_places<S> places = first;
    places.add_stages(smem, at.stage);
    wait_for(&smem.full[at.stage], at.phase);
#pragma unroll 1
    for (int slab = consumer_warp<S>() % S::SPLIT; slab < S::SLABS && k0 + slab * S::SLAB < args.k; slab += S::SPLIT) {
      multiply_slab<S, N>(places, scales.factors(args, smem, at.stage, slab, k0 + slab * S::SLAB), sums);
      if (S::SPLIT == 1) places.next_slab(smem);
    }
    release<S>(smem, at.stage);
  }
}

/* In two or four widths. */
template <class S, int N>
DEVICE void multiply(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int rows,
                     lane_scales<S> &scales, warp_sums<S> &sums)
{
  constexpr int STEP = S::BM <= 32 ? 8 : 16;
  if constexpr (N > STEP) {
    if (rows <= N - STEP) return multiply<S, N - STEP>(args, smem, at, rows, scales, sums);
  }
  multiply_n<S, N>(args, smem, at, scales, sums);
}

/* ---- from sums to outputs ---- */

/* A warp's outputs, as warpgroup_tile.cuh has them: 16 * BLOCKS weight rows. */
template <class S> using outputs = float[S::BLOCKS][S::ACCUMULATORS];

/* Of the warps that share weight rows each ends with an octet of either block: it gives its sums of the others. */
template <class S> DEVICE void add_halves(mixed_smem<S> &smem, int rows, const warp_sums<S> &sums, outputs<S> &acc)
{
  const int warp = consumer_warp<S>(), half = warp % 2;
  uint4 *own_place = smem.staging.staged[warp / 4][warp % 4],
        *other_place = smem.staging.staged[warp / 4][warp % 4 ^ 1];
#pragma unroll
  for (int j = 0; j < S::BM / 8; j++) {
    if (j * 8 >= rows) break;
    float own[4], given[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float low = sums[i / 2][j][i % 2], high = sums[i / 2][j][2 + i % 2];
      own[i] = half ? high : low;
      given[i] = half ? low : high;
    }
    bar_sync(PAIR_BARRIER + warp / 2, 2 * WARP_SIZE); /* what was there is read */
    own_place[lane_id()] = make_uint4(__float_as_uint(given[0]), __float_as_uint(given[1]), __float_as_uint(given[2]),
                                      __float_as_uint(given[3]));
    bar_sync(PAIR_BARRIER + warp / 2, 2 * WARP_SIZE);
    const uint4 other = other_place[lane_id()];
    acc[0][4 * j] = own[0] + __uint_as_float(other.x);
    acc[0][4 * j + 1] = own[1] + __uint_as_float(other.y);
    acc[0][4 * j + 2] = own[2] + __uint_as_float(other.z);
    acc[0][4 * j + 3] = own[3] + __uint_as_float(other.w);
  }
  bar_sync(PAIR_BARRIER + warp / 2, 2 * WARP_SIZE);
}

template <class S> DEVICE void collect(mixed_smem<S> &smem, int rows, const warp_sums<S> &sums, outputs<S> &acc)
{
  if constexpr (S::SPLIT == 2) {
    add_halves<S>(smem, rows, sums, acc);
  } else {
#pragma unroll
    for (int block = 0; block < 2; block++)
#pragma unroll
      for (int i = 0; i < S::BM / 2; i++) acc[block][i] = sums[block][i / 4][i % 4];
  }
}

/* ---- scales that products lack: any number, of the few weights that are beyond what a model trains ---- */

/* Whether a scale of the warp's weight rows was absent; what comes is of the next tile. */
template <class S> DEVICE bool any_absent(lane_scales<S> &scales)
{
  if constexpr (same_type<typename S::W, u4>) {
    return false;
  } else {
    const bool own = scales.absent;
    scales.absent = false;
    return S::SPLIT == 1 ? __any_sync(ALL_LANES, own)
                         : bar_red_or(PAIR_BARRIER + consumer_warp<S>() / 2, 2 * WARP_SIZE, own);
  }
}

/* The first of a lane's weight rows in a tile, of those that its warp has outputs of. */
template <class S> DEVICE int output_row()
{
  return consumer_warp<S>() * S::OCTETS * 8 + tid_x() % WARP_SIZE / 4;
}

/* Of weight row `row` of a tile and one row of A, in f32. */
template <class S> DEVICE float absent_products(const gemm_args &args, const tile_unit &unit, int row, int32_t source)
{
  const bool gated = S::gated(args);
  const int channel = gated ? (unit.n + row / 16) * 8 + row % 8 : unit.n * 16 + row;
  const char *codes = code_base(args.b, gated ? row / 8 % 2 : 0, unit.expert, S::BITS) +
                      min(channel, args.n - 1) * args.b.n_stride * S::BITS / 8;
  const typename S::X *x = static_cast<const typename S::X *>(args.a) + source * args.a_ld;
  const uint8_t *scales = scales_of_row<S>(args, unit, row);
  constexpr int RUN = operand<typename S::W>::K_PER_SCALE;
  float sum = 0.f;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k && source >= 0; k0 += RUN) {
    const int code = scales[k0 / RUN * args.b.scale.k_stride];
    if (!scale_is_absent<typename S::X, typename S::W>(code)) continue;
    float part = 0.f;
#pragma unroll 1
    for (int k = k0; k < k0 + RUN; k++) part += e2m1_to_f32((uint32_t)codes[k / 2] >> k % 2 * 4 & 15) * to_f32(x[k]);
    sum += part * (same_type<typename S::W, nv4> ? e4m3_to_f32(code) : e8m0_to_f32(code));
  }
  return sum;
}

/* A thread's outputs are of its row in each octet and of tokens 8 j + 2 (lane % 4) + t. */
template <class S> DEVICE void add_absent(const gemm_args &args, const tile_unit &unit, outputs<S> &acc)
{
#pragma unroll 1
  for (int i = 0; i < ceil_div(unit.rows, 8) * 2 * S::OCTETS; i++) {
    const int octet = i % S::OCTETS, t = i / S::OCTETS % 2, j = i / S::OCTETS / 2,
              token = j * 8 + lane_id() % 4 * 2 + t;
    const float part = absent_products<S>(args, unit, output_row<S>() + octet * 8,
                                          token < unit.rows ? known_source(args, unit.row + token) : -1);
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
      for (int a = 0; a < S::ACCUMULATORS; a++)
        if (octet == block + a / 2 % 2 * S::BLOCKS && j == a / 4 && t == a % 2) acc[block][a] += part;
  }
}

/* What is left of the weights' scale multiplies sums. In a gated tile even octets are of one half, odd ones of the
 * other. */
template <class S> DEVICE void scale_sums(const gemm_args &args, int expert, outputs<S> &acc)
{
  constexpr float REST = weight_factors<typename S::X, typename S::W>::REST;
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

template <class S> DEVICE void consume(const gemm_args &args, mixed_smem<S> &smem)
{
  const int group = threadIdx.x / S::GROUP - 1, width = granule_channels<S>(args),
            granules = S::GRANULES / S::CONSUMERS;
  pipeline_state<S::STAGES> at;
  wait_for(&smem.full[0], 0); /* the first unit is there, and with every unit the one after it */
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD) {
    if (smem.units[slot].expert < 0) break;
    wait_for(&smem.full[at.stage], at.phase);
    if (smem.units[slot].n + group * granules >= smem.units[slot].end) {
      skip<S>(args, smem, at);
      continue;
    }
    lane_scales<S> scales;
    scales.set_unit(args, smem, slot, lane_row<S>());
    warp_sums<S> sums = {};
    multiply<S, S::BM>(args, smem, at, smem.units[slot].rows, scales, sums);
    const tile_unit unit = smem.units[slot]; /* read again: registers are few */
    const int first = unit.n + group * granules, end = min(unit.end, first + granules);
    outputs<S> acc = {};
    collect<S>(smem, unit.rows, sums, acc);
    if (any_absent<S>(scales)) add_absent<S>(args, unit, acc);
    scale_sums<S>(args, unit.expert, acc);
    store_tile<S>(args, false, smem.staging, unit, group, {first * width, min(end * width, args.n)}, acc);
  }
}

template <int FROM, int TO> DEVICE void change_registers()
{
  if constexpr (TO > FROM)
    setmaxnreg_inc<TO>();
  else
    setmaxnreg_dec<TO>();
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
    change_registers<S::REGISTERS, S::PRODUCER_REGISTERS>();
    produce<S>(args, smem);
  } else {
    change_registers<S::REGISTERS, S::CONSUMER_REGISTERS>();
    consume<S>(args, smem);
  }
}

#endif
