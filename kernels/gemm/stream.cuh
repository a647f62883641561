/*
 * stream: grouped GEMM of sm_90a for few rows an expert, where all that counts is to read each weight once at the speed
 * of memory. Any layout of weights: they need no tensor map.
 *
 * A CTA has a producer warpgroup and two consumer warpgroups around a pipeline of stages of 128 bytes of k. Producers
 * fill two stages at once: 16 lanes load 256 neighbouring bytes of a weight row, which memory delivers faster than 128;
 * of N-major weights, of one k, where a tile has as many side by side.
 * Weights and rows (tokens) both come by cp.async into the 128-byte swizzle that wgmma reads: weights are its 64-row
 * operand, rows the other. In a gated up tile 8 gate and the same 8 up rows alternate, so a thread finds both factors
 * of a channel in its own registers.
 *
 * Every CTA takes an equal number of whole tiles, over the ends of experts, and an equal part of those that are left
 * over, in granules of 16 weight rows; of N-major ones, in lines of L2, and CTAs take whole tiles in turn, so that what
 * lies side by side in memory is asked for at about the same time.
 */
#ifndef CUMOE_STREAM_CUH
#define CUMOE_STREAM_CUH

#include "gemm/scaled_tile.cuh"

template <class PRODUCT, int CLUSTER_, int BM, int BN, int BK, int STAGES, int WARPS>
struct stream_shape : pipeline_shape<PRODUCT, BM, BN, BK, STAGES, WARPS> {
  static constexpr int CLUSTER = CLUSTER_;
  static_assert(CLUSTER == 1, "every CTA fills its own stages");
  template <int> static constexpr bool RELEASE_AT_ONCE = true;
  static constexpr bool SCALES_BY_COPY = false;
  static constexpr int GRANULE = 16, GRANULES = stream_shape::COLUMNS / GRANULE;
  static constexpr int LINE = 128 / sizeof(typename PRODUCT::W); /* channels of a line of L2 */
  /* Producers fill two stages at once: a thread has 16 bytes of k of every 8th row. */
  static constexpr int LANES = 2 * BK / operand<typename PRODUCT::W>::PER_16, ROWS = stream_shape::GROUP / LANES;
  static_assert(ROWS == 8, "a thread's rows are swizzled alike");

  DEVICE static bool gathers(const gemm_args &) { return true; }
};

template <class S> struct stream_smem : pipeline_smem<S> {
  row_range ranges[MAX_EXPERTS];
};

/* ---- units: n counts granules here ---- */

/* What depends on the major: granules, and which whole tiles a CTA takes and when its piece comes. K-major: one tile
 * after another, the piece before another one for each CTA in turn. */
template <class S, bool N_MAJOR = S::N_MAJOR> struct stream_order {
  DEVICE static int granule_channels(const gemm_args &args) { return S::gated(args) ? S::GRANULE / 2 : S::GRANULE; }
  DEVICE static int granules_of(const gemm_args &) { return S::GRANULES; }

  template <class RUN> DEVICE static void begin(RUN &run)
  {
    if (run.whole == 0) return;
    run.take(run.share() * blockIdx.x, run.share());
    run.whole = 1 + (int32_t)(blockIdx.x % run.share());
  }
  template <class RUN> DEVICE static bool piece_is_due(RUN &run) { return run.whole-- == 0; }
  template <class RUN> DEVICE static void take_next(RUN &) {}
};

/* N-major: lines of L2; CTAs take tiles in turn, so that neighbours are asked for at about the same time. */
template <class S> struct stream_order<S, true> {
  DEVICE static int granule_channels(const gemm_args &) { return S::LINE; }
  DEVICE static int granules_of(const gemm_args &args) { return S::COLUMNS / (S::gated(args) ? 2 : 1) / S::LINE; }

  template <class RUN> DEVICE static void begin(RUN &) {}
  template <class RUN> DEVICE static bool piece_is_due(RUN &run)
  {
    return run.share() - run.whole == 2 + blockIdx.x % run.share();
  }
  template <class RUN> DEVICE static void take_next(RUN &run)
  {
    if (run.now.left == 0 && run.whole > 0) run.take(blockIdx.x + --run.whole * gridDim.x, 1), run.expert = -1;
  }
};

template <class S> DEVICE int granule_channels(const gemm_args &args)
{
  return stream_order<S>::granule_channels(args);
}

/* Granules of a whole tile. */
template <class S> DEVICE int granules_of(const gemm_args &args)
{
  return stream_order<S>::granules_of(args);
}

/* `left` granules from n of row tile `tile` on, one row tile after another. */
struct granule_range {
  int64_t left;
  int32_t tile, n;
};

/* Rows of an expert, of those that shared memory has. */
template <int KEPT> DEVICE row_range kept_rows(const gemm_args &args, const row_range (&ranges)[KEPT], int expert)
{
  return KEPT >= MAX_EXPERTS || expert < KEPT ? ranges[expert] : expert_rows(args, expert);
}

/*
 * What a CTA still has to do. A tile takes about the same time, wide or narrow, as fewer bytes are in flight where it
 * is narrow. So the number of tiles counts: every CTA takes the same number of whole tiles, one after another, and
 * those left over are cut into narrower pieces, one for each CTA. Pieces come at different times, so that other CTAs
 * keep memory busy.
 */
template <class S> struct stream_run {
  using order = stream_order<S>;
  granule_range now, later;
  int32_t tiles, granules, parts; /* row tiles; granules of each, and the whole tiles that it is cut into */
  int32_t whole;                  /* tiles until the piece; N-major: whole tiles that are still to come */
  int32_t expert = -1;            /* of now.tile or before; -1: not looked up yet */
  bool piece = true;              /* is still to come */

  stream_run() = default;
  /* All CTAs wait for this, and for their first unit. In 32 bits: a result of more tiles has no room. */
  DEVICE stream_run(const gemm_args &args, int32_t row_tiles)
      : tiles(row_tiles), granules(ceil_div(args.n, granule_channels<S>(args))),
        parts(ceil_div(granules, granules_of<S>(args)))
  {
    now.left = later.left = 0;
    whole = (int32_t)share();
    order::begin(*this);
  }

  /* Whole tiles of a CTA. */
  DEVICE uint32_t share() const { return (uint32_t)tiles * (uint32_t)parts / gridDim.x; }

  /* `count` whole tiles, `first` and on. */
  DEVICE void take(uint32_t first, uint32_t count)
  {
    const uint32_t begin = first / (uint32_t)parts, end = (first + count) / (uint32_t)parts;
    now.tile = (int32_t)begin;
    now.n = granule_of((int32_t)(first - begin * parts));
    now.left = (int64_t)(end - begin) * granules + granule_of((int32_t)(first + count - end * parts)) - now.n;
  }

  /* The first granule of a row tile's whole tile `part`. */
  DEVICE int32_t granule_of(int32_t part) const
  {
    if (part == 0) return 0;
    return (granules | parts) >> 15 ? (int32_t)((int64_t)granules * part / parts) : granules * part / parts;
  }

  /* Of the whole tiles that are left over, which may begin amid a row tile. Of the grid, a row tile gets the part that
   * it is of `all` their granules, at least one CTA, and is divided evenly among these: from CTA grid * c / all,
   * rounded, if c granules lie before it. */
  DEVICE granule_range own_piece() const
  {
    const int64_t grid = gridDim.x, even = (int64_t)tiles * parts / grid * grid;
    const int32_t tile = (int32_t)(even / parts), begin = granule_of((int32_t)(even - (int64_t)tile * parts));
    const int64_t all = (int64_t)(tiles - tile) * granules - begin;
    if (all <= 0) return {0, 0, 0};
    const int64_t row = ((2 * (int64_t)blockIdx.x + 1) * all + 2 * grid * begin - 1) / (2 * grid * granules);
    const int64_t from = row > 0 ? row * granules - begin : 0, to = (row + 1) * granules - begin;
    const int64_t first = (2 * grid * from + all) / (2 * all), ctas = (2 * grid * to + all) / (2 * all) - first,
                  own = blockIdx.x - first, n = (to - from) * own / ctas;
    return {(to - from) * (own + 1) / ctas - n, tile + (int32_t)row, (int32_t)(granules - (to - from) + n)};
  }

  /* The next tile: up to GRANULES of one row tile, `end` past its last. */
  template <class SMEM> DEVICE tile_unit next(const gemm_args &args, const SMEM &smem)
  {
    order::take_next(*this);
    if (piece && (now.left == 0 || order::piece_is_due(*this)))
      later = now, now = own_piece(), piece = false, expert = -1;
    if (now.left == 0) now = later, later.left = 0, expert = -1;
    if (now.left == 0) return {-1, 0, 0, 0, 0};
    if (expert < 0) expert = expert_of_tile(args, smem.table, now.tile);
    while (smem.table.before[expert + 1] <= now.tile) expert++;
    const int first = smem.table.before[expert], those = smem.table.before[expert + 1] - first;
    row_range own = kept_rows(args, smem.ranges, expert);
    if (those > 1 || own.count > S::BM) own = rows_of_tile<S>(own, now.tile - first, those);
    const int there = (int)min((int64_t)(granules - now.n), now.left),
              part = there <= granules_of<S>(args) ? there : ceil_div(there, ceil_div(there, granules_of<S>(args)));
    const tile_unit unit = {expert, own.begin, own.count, now.n, now.n + part};
    now.left -= part;
    now.n += part;
    if (now.n == granules) now.n = 0, now.tile++;
    return unit;
  }
};

/* ---- producers ---- */

/* 1: a producer's 16 bytes of k are in the second of two stages. */
template <class S> DEVICE int producer_half()
{
  return threadIdx.x % S::LANES / 8;
}

/* Where its first row of an operand goes. */
template <class S, class T> DEVICE uint32_t producer_address(const T *operand)
{
  const int row = threadIdx.x / S::LANES;
  return shared_address(operand) + row * 128 + (threadIdx.x % 8 ^ row) * 16;
}

template <class S> DEVICE int producer_k()
{
  return threadIdx.x % S::LANES * operand<typename S::X>::PER_16;
}

/* A thread's weight rows of a tile. */
template <class S, bool N_MAJOR = S::N_MAJOR> struct stream_weights {
  const typename S::W *origin[2]; /* of the rows of even and of odd number */
  int64_t step;                   /* elements from a row to the next of the same parity */
  int left;                       /* weight rows of the tile */
  uint64_t policy = evict_first_policy();

  DEVICE void set_unit(const gemm_args &args, const tile_unit &unit)
  {
    const bool gated = S::gated(args);
    const int channel = unit.n * granule_channels<S>(args) + threadIdx.x / S::LANES;
#pragma unroll
    for (int h = 0; h < 2; h++)
      origin[h] = expert_base<typename S::W>(args.b, gated ? h : 0, unit.expert) +
                  (channel + (gated ? 0 : 8 * h)) * args.b.n_stride + producer_k<S>();
    step = (gated ? 8 : 16) * args.b.n_stride;
    left = (unit.end - unit.n) * S::GRANULE;
    if (!gated) left = min(left, args.n - unit.n * S::GRANULE);
  }

  /* Channels come in octets, so the second octet of the last granule may not be there. */
  DEVICE void copy(const gemm_args &args, stream_smem<S> &smem, int stage, int k0) const
  {
    const bool there = k0 + producer_k<S>() < args.k;
    uint32_t to = producer_address<S>(smem.weights[stage]);
    int64_t at = k0;
#pragma unroll 4
    for (int row = 0; row < left; row += 2 * S::ROWS, at += step, to += 2 * S::ROWS * 128) {
      cp_async_cg_16(to, there ? origin[0] + at : origin[0], there ? 16 : 0, policy);
      const bool both = there && row + S::ROWS < left;
      cp_async_cg_16(to + S::ROWS * 128, both ? origin[1] + at : origin[0], both ? 16 : 0, policy);
    }
  }

  /* Of two stages, k0 and on, or the first alone: into that of the thread's half. */
  DEVICE void copy_pair(const gemm_args &args, stream_smem<S> &smem, int first, int second, bool two, int k0) const
  {
    if (two || producer_half<S>() == 0) copy(args, smem, producer_half<S>() ? second : first, k0);
  }
};

/* N-major: 16 bytes of every 8th k of both stages, in two of four blocks of 64 weight rows: such that 16 lanes load 256
 * neighbouring bytes where a tile has them. Octets lie where warpgroup_tile.cuh looks for them. */
template <class S> struct stream_weights<S, true> {
  static constexpr int OWN = 2;
  static_assert(S::BLOCKS == 2 && S::COLUMNS == 4 * S::BLOCK, "gate and up are apart, block by block");
  const typename S::W *origin[OWN];
  int block[OWN];
  uint32_t there; /* a bit each: its channels are the tile's */
  uint64_t policy = evict_first_policy();

  DEVICE void set_unit(const gemm_args &args, const tile_unit &unit)
  {
    const bool gated = S::gated(args), apart = gated && !in_pairs<S>(args);
    const int pairs = in_pairs<S>(args) ? 2 : 1, first = unit.n * granule_channels<S>(args),
              end = min(unit.end * granule_channels<S>(args), args.n), vector = threadIdx.x % 8,
              side = threadIdx.x % S::LANES / 8;
    const typename S::W *gate = expert_base<typename S::W>(args.b, 0, unit.expert),
                        *up = gated ? expert_base<typename S::W>(args.b, 1, unit.expert) : gate;
    there = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int b = block[i] = apart ? 2 * side + i : side + 2 * i;
      const int place = (apart ? first + b / 2 * S::BLOCK : pairs * first + b * S::BLOCK) + vector * 8;
      origin[i] = (apart ? b % 2 ? up : gate : up < gate ? up : gate) + place;
      there |= (uint32_t)(place < pairs * end) << i;
    }
  }

  DEVICE void copy(const gemm_args &args, stream_smem<S> &smem, int stage, int k0) const
  {
    int k = k0 + threadIdx.x / S::LANES;
    int64_t at = k * args.b.k_stride;
    uint32_t to = producer_address<S>(smem.weights[stage]);
#pragma unroll 4
    for (int i = 0; i < S::BK / S::ROWS; i++, k += S::ROWS, at += S::ROWS * args.b.k_stride, to += S::ROWS * 128) {
      const int bytes = k < args.k ? 16 : 0;
#pragma unroll
      for (int j = 0; j < OWN; j++)
        if (there >> j & 1)
          cp_async_cg_16(to + block[j] * S::BK * 128, bytes ? origin[j] + at : origin[j], bytes, policy);
    }
  }

  /* As above, but every thread into both. */
  DEVICE void copy_pair(const gemm_args &args, stream_smem<S> &smem, int first, int second, bool two, int k0) const
  {
    copy(args, smem, first, k0);
    if (two) copy(args, smem, second, k0 + S::BK);
  }
};

/* A thread's rows of A; -1: zeros. */
template <class S> struct stream_rows {
  int32_t source[S::BM / S::ROWS];

  DEVICE void set_unit(const gemm_args &args, const tile_unit &unit)
  {
#pragma unroll
    for (int i = 0; i < S::BM / S::ROWS; i++) {
      const int r = threadIdx.x / S::LANES + i * S::ROWS;
      source[i] = r < unit.rows ? source_row(args, unit.row + r) : -1;
    }
  }

  DEVICE void copy(const gemm_args &args, stream_smem<S> &smem, int rows, int stage, int k0) const
  {
    const int k = k0 + producer_k<S>();
    const typename S::X *from = static_cast<const typename S::X *>(args.a) + k;
    const uint32_t to = producer_address<S>(smem.rows[stage]);
#pragma unroll
    for (int i = 0; i < S::BM / S::ROWS; i++) {
      if (i * S::ROWS >= rows) break;
      const bool there = source[i] >= 0 && k < args.k;
      cp_async_cg_16(to + i * S::ROWS * 128, there ? from + source[i] * args.a_ld : args.a, there ? 16 : 0);
    }
  }
};

/* A thread's row of A whose scales it copies: those of a pair of stages, each by half of the threads. */
template <class S> struct stream_row_scales {
  static_assert(!S::SCALED || 2 * S::BM <= S::GROUP, "a thread has one row");
  int32_t source = -1;

  DEVICE static int half() { return threadIdx.x / (S::GROUP / 2); }
  DEVICE static int row() { return threadIdx.x % (S::GROUP / 2); }

  DEVICE void set_unit(const gemm_args &args, const tile_unit &unit)
  {
    source = row() < unit.rows ? source_row(args, unit.row + row()) : -1;
  }

  DEVICE void copy(const gemm_args &args, stream_smem<S> &smem, const pipeline_state<S::STAGES> &at, int k) const
  {
    const float *from = args.a_scale + row_group(args, k) * args.a_scale_ld + source;
    if (row() < S::BM)
      cp_async_ca_4(shared_address(row_scales_of<S>(smem, at) + row()), source >= 0 ? from : args.a_scale,
                    source >= 0 ? 4 : 0);
  }
};

/* Two stages at a time; the second may not be there at the end of k. */
template <class S> struct stage_pair {
  pipeline_state<S::STAGES> first, second;
  bool two;

  DEVICE stage_pair(const gemm_args &args, const pipeline_state<S::STAGES> &at, int k0)
      : first(at), second(at), two(k0 + S::BK < args.k)
  {
    second.advance();
  }

  DEVICE void wait(stream_smem<S> &smem) const
  {
    wait_for(&smem.empty[first.stage], first.phase ^ 1);
    if (two) wait_for(&smem.empty[second.stage], second.phase ^ 1);
  }

  /* By value: a reference to either would put both into local memory. */
  DEVICE pipeline_state<S::STAGES> of(int half) const
  {
    pipeline_state<S::STAGES> state;
    state.stage = half ? second.stage : first.stage;
    state.phase = half ? second.phase : first.phase;
    return state;
  }

  /* The one that this thread copies into; of two: k past the end is copied as zeros. */
  DEVICE int mine() const { return producer_half<S>() ? second.stage : first.stage; }
  DEVICE bool copies() const { return two || producer_half<S>() == 0; }

  DEVICE void arrive(stream_smem<S> &smem) const
  {
    cp_async_mbarrier_arrive_noinc(&smem.full[first.stage]);
    if (two) cp_async_mbarrier_arrive_noinc(&smem.full[second.stage]);
    if (threadIdx.x != 0) return;
    mbarrier_arrive(&smem.full[first.stage]);
    if (two) mbarrier_arrive(&smem.full[second.stage]);
  }
};

/* All of a tile's stages. The weights of k < ahead are on their way. */
template <class S>
DEVICE void produce_tile(const gemm_args &args, stream_smem<S> &smem, const tile_unit &unit, int slot,
                         const stream_weights<S> &weights, int ahead, pipeline_state<S::STAGES> &at)
{
  stream_rows<S> rows;
  stream_row_scales<S> scales;
  rows.set_unit(args, unit);
  if (S::SCALED) scales.set_unit(args, unit);
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += 2 * S::BK) {
    const stage_pair<S> pair(args, at, k0);
    pair.wait(smem);
    if (k0 == 0 && threadIdx.x == 0) smem.units[slot] = unit;
    if (k0 >= ahead) weights.copy_pair(args, smem, pair.first.stage, pair.second.stage, pair.two, k0);
    if (pair.copies()) rows.copy(args, smem, unit.rows, pair.mine(), k0);
    if constexpr (S::SCALED) {
      if (pair.two || scales.half() == 0) scales.copy(args, smem, pair.of(scales.half()), k0 + scales.half() * S::BK);
    }
    pair.arrive(smem);
    at.advance();
    if (pair.two) at.advance();
  }
}

/* With early inputs the stages fill with the first tile's weights before the grid ahead, which makes the rows, has
 * ended. */
template <class S> DEVICE void produce(const gemm_args &args, stream_smem<S> &smem)
{
  stream_run<S> run(args, smem.table.before[args.experts]);
  pipeline_state<S::STAGES> at;
  bool waited = !args.protocol.early_inputs;
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD) {
    const tile_unit unit = run.next(args, smem);
    int ahead = 0;
    stream_weights<S> weights;
    if (unit.expert >= 0) weights.set_unit(args, unit);
    if (!waited) {
#pragma unroll 1
      for (; unit.expert >= 0 && ahead + 2 * S::BK <= min(args.k, S::STAGES * S::BK); ahead += 2 * S::BK)
        weights.copy_pair(args, smem, ahead / S::BK, ahead / S::BK + 1, true, ahead);
      wait_for_earlier_grids();
      waited = true;
    }
    if (unit.expert < 0) return produce_end<S>(smem, unit, slot, true, at);
    produce_tile<S>(args, smem, unit, slot, weights, ahead, at);
  }
}

/* ---- consumers ---- */

template <class S> DEVICE void consume(const gemm_args &args, stream_smem<S> &smem)
{
  const int group = threadIdx.x / S::GROUP - 1, width = granule_channels<S>(args),
            granules = granules_of<S>(args) / S::CONSUMERS;
  pipeline_state<S::STAGES> at;
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD) {
    wait_for(&smem.full[at.stage], at.phase);
    const tile_unit unit = smem.units[slot];
    if (unit.expert < 0) break;
    const int first = unit.n + group * granules, end = min(unit.end, first + granules);
    if (first >= end) {
      skip<S>(args, smem, at);
      continue;
    }
    float acc[S::BLOCKS][S::ACCUMULATORS] = {};
    multiply_unit<S>(args, false, smem, at, group, unit, first * width, acc);
    const bool up_first =
        in_pairs<S>(args) && expert_base<char>(args.b, 1, unit.expert) < expert_base<char>(args.b, 0, unit.expert);
    store_tile<S>(args, up_first, smem.staging, unit, group, {first * width, min(end * width, args.n)}, acc);
  }
}

enum { LIKELY_BYTES = 192 * 1024 }; /* of a CTA: half of L2 in all */

/* Memory is idle while the grids ahead route. With two rows for every expert most experts have some, so L2 prefetches
 * the weight rows that a CTA begins with if all have, as many as there is room for: if not this CTA needs them, then
 * one close to it. (N-major it costs 2 % at 32 tokens, and brings nothing above.) */
template <class S> DEVICE void prefetch_likely_weights(const gemm_args &args)
{
  if (S::N_MAJOR || args.protocol.early_inputs || args.rows_cap < 2 * args.experts) return;
  if (threadIdx.x >= WARP_SIZE) return;
  const bool gated = S::gated(args);
  const stream_run<S> run(args, args.experts);
  if (run.now.left == 0) return;
  const int channel0 = run.now.n * granule_channels<S>(args), row_bytes = args.k * sizeof(typename S::W);
  for (int r = lane_id(); r < LIKELY_BYTES / row_bytes; r += WARP_SIZE) {
    const int half = gated ? r / 8 % 2 : 0, channel = channel0 + (gated ? r / 16 * 8 + r % 8 : r);
    if (channel < args.n)
      prefetch_l2(expert_base<typename S::W>(args.b, half, run.now.tile) + channel * args.b.n_stride, row_bytes);
  }
}

template <class S> DEVICE void stream_gemm(const gemm_args &args, stream_smem<S> &smem)
{
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::STAGES; s++) {
      mbarrier_init(&smem.full[s], 1 + S::GROUP);
      mbarrier_init(&smem.empty[s], S::CONSUMERS * S::GROUP / WARP_SIZE);
    }
    fence_mbarrier_init();
  }
  prefetch_likely_weights<S>(args);
  if (!args.protocol.early_inputs) wait_for_earlier_grids();
  build_tile_table<S::BM, S::THREADS>(args, smem.table, smem.ranges); /* its barriers show those above to all */
  if (threadIdx.x < S::GROUP)
    produce<S>(args, smem);
  else
    consume<S>(args, smem);
}

#endif
