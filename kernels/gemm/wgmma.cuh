/*
 * wgmma: grouped GEMM on the warpgroup tensor cores of sm_90a.
 *
 * Weights are the 64-row operand of wgmma, rows (tokens) the other, whose width is any multiple of 16. So an expert's
 * rows are cut evenly, and only the last few columns are padding. A CTA has one producer warpgroup and two consumer
 * warpgroups around a pipeline of stages of 128 bytes of k:
 *   weights  TMA boxes. K-major, through a tensor map that alternates 8 gate and the same 8 up rows (host/tmap.c): a
 *            thread finds both factors of a channel in its own registers. N-major, a box for each of wgmma's 64 rows:
 *            of gate, then of the same up channels, which is the same to a thread; or of what comes next in memory
 *   rows     TMA boxes of 16 rows where they are contiguous (down; up of permuted rows, or of the copy that idle
 *            warps make: copy_ahead.cuh), else gathered by cp.async into the same 128-byte swizzle
 * Each consumer has half of the weight rows of a tile. (Of e4m3 operands change places: token_tile.cuh.)
 *
 * CTAs come in clusters of two, and each loads half of what the two share, for both by multicast: the way from L2
 * bounds experts of a few hundred rows. The two take two row tiles of an expert and share the weights; of a row tile
 * that is left over they take neighbouring channels and share its rows.
 */
#ifndef CUMOE_WGMMA_CUH
#define CUMOE_WGMMA_CUH

#include "gemm/activated.cuh"
#include "gemm/copy_ahead.cuh"
#include "gemm/handover.cuh"
#include "gemm/keep.cuh"
#include "gemm/token_store.cuh"
#include "gemm/woven_tile.cuh"

template <class PRODUCT, int CLUSTER_, int BM, int BN, int BK, int STAGES, int WARPS>
struct wgmma_shape : pipeline_shape<PRODUCT, BM, BN, BK, STAGES, WARPS> {
  static constexpr bool GATHERED = PRODUCT::SOURCE == SOURCE_gathered;
  static constexpr int CLUSTER = CLUSTER_;
  static_assert(CLUSTER == 2, "CTAs share in halves");
  /* Loads are the limit; of codes that was not measured. But where few rows wait for N-major weights, short pieces of
   * long rows of memory, more of them on their way are slower. (Not in d h, which waits for what it stores.) */
  template <int N>
  static constexpr bool RELEASE_AT_ONCE =
      wgmma_shape::BITS == 16 && !(wgmma_shape::N_MAJOR && !PRODUCT::ACTIVATES && N <= 96);
  static constexpr bool SCALES_BY_COPY = true;
  /* Of codes of e4m3: a piece's channels of eight tokens (token_store.cuh). */
  static constexpr int STAGED =
      same_type<typename PRODUCT::X, e4m3> ? PRODUCT::EPILOGUE == EPILOGUE_activation ? 2 : 4 : 1;
  static constexpr bool WOVEN = false; /* rows are put into another order in their stages (gemm/packed.cuh) */
  static constexpr int HELPERS = 0;    /* warps of producers that arrive at a stage's `full`, too */
  /* A consumer counts a tile as stored while the next one's first products are under way: its release waits for what is
   * stored. */
  static constexpr bool TELLS_LATER = PRODUCT::ACTIVATES || PRODUCT::KEEPS;
  static constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56; /* 384 threads start with 168 each */

  /* Gathering: 8 threads copy the 128 bytes of a row. */
  static constexpr int GATHER_ROWS = wgmma_shape::GROUP / 8, GATHERS = BM / GATHER_ROWS;

  /* Whether rows of A are anywhere, as the route says, or one after another. */
  DEVICE static bool gathers(const gemm_args &args)
  {
    return GATHERED && args.row_pair && !args.packed && !args.protocol.x_copy;
  }
};

/* What codes of 4 bits have besides. */
template <class S, bool WOVEN = S::WOVEN> struct packed_stages : factor_stages<S, S::PACKED> {
};
template <class S> struct packed_stages<S, true> : woven_stages<S> {
};

/* A unit of a cluster as one of its CTAs sees it. */
struct cluster_unit {
  tile_unit tile; /* expert -1: past the last unit; end: see padded_end */
  bool paired;    /* the CTAs have two row tiles of the same channels; else neighbouring channels of one row tile */
  bool absent;    /* neither has channels: an odd number of channel tiles, paired */
};

/* The unit that comes next, found by a warp of its own; of packed weights warps have other things to do. */
template <class S, bool PACKED = S::PACKED> struct unit_found {
  cluster_unit found;
  uint64_t found_ready, found_taken;
};
template <class S> struct unit_found<S, true> {
};

template <class S> struct wgmma_smem : pipeline_smem<S>, packed_stages<S>, token_scale_stages<S>, unit_found<S> {
  int32_t drawn[UNITS_AHEAD];
  uint64_t drawn_ready[UNITS_AHEAD];
};

/* ---- units ---- */

template <class S>
constexpr uint32_t WEIGHT_BYTES = S::COLUMNS *S::WEIGHT_LINE * sizeof(typename S::W); /* of a stage */

template <class S> DEVICE int wgmma_channels(const gemm_args &args)
{
  return S::gated(args) ? S::COLUMNS / 2 : S::COLUMNS;
}

/* Of the tile that has an expert's last rows: where those end that fill them up (kernels/backward.h). Else 0. */
template <class S> DEVICE int32_t padded_end(row_range rows, row_range own)
{
  const int32_t end = rows.begin + rows.count;
  return S::ACTIVATES && own.begin + own.count == end ? round_up(end, (int)ROW_STEP) : 0;
}

/* Row tiles by twos, then one that is left over. Of the twos row tiles advance first, inside bands, then channels. Of
 * one that is left over an odd channel tile is shared by rows where units are drawn: half for each. */
template <class S> DEVICE cluster_unit wgmma_unit(const gemm_args &args, const tile_table &table, int64_t index)
{
  const int n_tiles = ceil_div(args.n, wgmma_channels<S>(args)), n_pairs = ceil_div(n_tiles, S::CLUSTER);
  const int rank = cluster_ctarank();
  cluster_unit unit = {{-1, 0, 0, 0, 0}, false, false};
  if (index >= (int64_t)table.before[args.experts] * n_pairs) return unit;
  const int expert = expert_of_tile(args, table, (int)(index / n_pairs));
  const row_range rows = expert_rows(args, expert);
  const int first = table.before[expert], tiles = table.before[expert + 1] - first;
  const int even = tiles / 2 * 2;
  int64_t local = index - (int64_t)first * n_pairs;
  unit.paired = local < (int64_t)even * n_pairs;
  if (!unit.paired) local -= (int64_t)even * n_pairs;
  const int tall = unit.paired ? 2 : 1, wide = S::CLUSTER / tall; /* tiles of the cluster */
  const int heights = unit.paired ? even / 2 : 1, widths = n_pairs * tall, most = 2304 / S::BM / tall;
  const int band = (int)(local / ((int64_t)most * widths)) * most, height = min(heights - band, most);
  const int in_band = (int)(local - (int64_t)band * widths);
  const int m = unit.paired ? (band + in_band % height) * 2 + rank : even;
  row_range own = rows_of_tile<S>(rows, m, tiles);
  if constexpr (token_tile<S>::SERVED)
    if (tokens_are_rows<S>(args)) own = {rows.begin + m * S::BM, min(rows.count - m * S::BM, S::BM)};
  if constexpr (S::DRAWS)
    if (!unit.paired && n_tiles % 2 && in_band == n_tiles / 2 && own.count > (int)WGMMA_STEP) {
      own = rows_of_tile<S>(own, rank, 2);
      unit.paired = true;
    }
  unit.tile = {expert, own.begin, own.count, in_band / height * wide + (unit.paired ? 0 : rank),
               padded_end<S>(rows, own)};
  unit.absent = unit.paired && unit.tile.n >= n_tiles;
  return unit;
}

template <class S> DEVICE bool copies(const gemm_args &args)
{
  return S::GATHERED && args.protocol.x_copy;
}

/* Clusters draw their units where they can: by tickets. Units that are under way at a time follow each other then, and
 * began in their order, so that what neighbours share is read at nearly the same time, and from L2: dealt in turn,
 * clusters drift apart, and up reads two to four times as much memory. Besides, who starts late, as in a down that does
 * not wait for up's end (follows), or has large units has fewer. The first CTA of a cluster draws and sends the unit to
 * both; it is never more than STAGES units ahead, as both fill each other's stages. */
template <class S> struct unit_scheduler {
  int32_t index = blockIdx.x / S::CLUSTER;
  pipeline_state<UNITS_AHEAD> slot;

  static constexpr int TICKETS = S::GATHERED ? PROGRESS_UP_TICKETS : PROGRESS_DOWN_TICKETS;

  DEVICE static bool follows(const gemm_args &args) { return !S::GATHERED && args.protocol.by_expert; }
  DEVICE static bool draws(const gemm_args &args) { return S::DRAWS || follows(args) || copies<S>(args); }

  /* Of the producers that go through units, where all gather: the one that does it for all. */
  DEVICE static bool first_warp(const gemm_args &args) { return !(S::DRAWS && S::gathers(args)) || warp_id() == 0; }

  /* The unit after `index`, by a whole warp. An absent one is skipped. */
  DEVICE void draw(const gemm_args &args, wgmma_smem<S> &smem)
  {
    if (!draws(args) || cluster_ctarank() != 0 || !first_warp(args)) return;
    int32_t next;
    do {
      int32_t ticket = 0;
      if (lane_id() == 0) ticket = atomicAdd(args.protocol.progress + TICKETS, 1);
      next = (int)gridDim.x / S::CLUSTER + __shfl_sync(ALL_LANES, ticket, 0);
    } while (wgmma_unit<S>(args, smem.table, next).absent);
    if (lane_id() < S::CLUSTER)
      st_async_cluster(&smem.drawn[slot.stage], lane_id(), next, &smem.drawn_ready[slot.stage]);
  }

  DEVICE void advance(const gemm_args &args, wgmma_smem<S> &smem)
  {
    if (!draws(args)) {
      index += gridDim.x / S::CLUSTER;
      return;
    }
    if (lane_id() == 0 && first_warp(args))
      mbarrier_arrive_expect_tx(&smem.drawn_ready[slot.stage], sizeof smem.drawn[0]);
    wait_for(&smem.drawn_ready[slot.stage], slot.phase);
    index = smem.drawn[slot.stage];
    slot.advance();
  }

  /* The unit at `index`, or the next one that is not absent; behind the last one that of no expert. */
  DEVICE cluster_unit present(const gemm_args &args, wgmma_smem<S> &smem)
  {
    const cluster_unit unit = wgmma_unit<S>(args, smem.table, index);
    return unit.absent ? take(args, smem) : unit;
  }

  DEVICE cluster_unit take(const gemm_args &args, wgmma_smem<S> &smem)
  {
    cluster_unit unit;
    do {
      draw(args, smem);
      advance(args, smem);
      unit = wgmma_unit<S>(args, smem.table, index);
    } while (unit.absent);
    return unit;
  }
};

/* ---- producers ---- */

/* Where a thread's rows are: their addresses, which would take a producer longer to work out anew for each stage than
 * few rows' products take. Of codes tokens, as they have scales besides. -1: zeros. */
template <class S, bool CODES = S::SCALED> struct row_sources {
  const typename S::X *from[S::GATHERS];
  uint32_t there; /* a bit each */

  DEVICE void set(const gemm_args &args, int i, int32_t token)
  {
    if (i == 0) there = 0;
    from[i] = static_cast<const typename S::X *>(args.a);
    if (token < 0) return;
    from[i] += token * args.a_ld;
    there |= 1u << i;
  }
  DEVICE bool has(int i) const { return there & 1u << i; }
  DEVICE const void *at(const gemm_args &, int i, int k) const { return from[i] + k; }
};
template <class S> struct row_sources<S, true> {
  int32_t source[S::GATHERS];

  DEVICE void set(const gemm_args &, int i, int32_t token) { source[i] = token; }
  DEVICE bool has(int i) const { return source[i] >= 0; }
  DEVICE const void *at(const gemm_args &args, int i, int k) const
  {
    return static_cast<const typename S::X *>(args.a) + (source[i] * args.a_ld + k);
  }
};

/* A thread gathers 16 bytes of k of each of these rows. */
template <class S> struct gather : row_sources<S> {
  DEVICE static int row_of(int i) { return threadIdx.x / 8 + i * S::GATHER_ROWS; }

  DEVICE void set_unit(const gemm_args &args, const tile_unit &unit)
  {
    const int64_t pairs = token_total(args.tokens) * args.top_k;
    constexpr int64_t NONE = INT64_MIN; /* -1 is a bad pair too */
    int64_t bad = NONE;
#pragma unroll
    for (int i = 0; i < S::GATHERS; i++) {
      const int r = row_of(i);
      int32_t token = -1;
      if (r < unit.rows) {
        const int32_t pair = __ldg(args.row_pair + unit.row + r);
        if (S::ACTIVATES)
          token = pair; /* all there is to know of it */
        else if (pair < 0 || pair >= pairs)
          bad = pair;
        else
          token = (int32_t)((uint32_t)pair / (uint32_t)args.top_k);
      }
      this->set(args, i, token);
    }
    if (bad != NONE) report_fault_inline(args.fault, FAULT_ROUTE, 0, bad);
  }

  /* Of the 8 threads that share rows, each copies the scales of every eighth. */
  DEVICE void copy_scales(const gemm_args &args, wgmma_smem<S> &smem, const pipeline_state<S::STAGES> &at, int k0) const
  {
    if constexpr (S::SCALED) {
      const float *from = args.a_scale + row_group(args, k0) * args.a_scale_ld;
#pragma unroll
      for (int i = 0; i < S::GATHERS; i++)
        if (this->has(i) && i % 8 == threadIdx.x % 8)
          cp_async_ca_4(shared_address(row_scales_of<S>(smem, at) + row_of(i)), from + this->source[i], 4);
    }
  }

  DEVICE void copy(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &unit,
                   const pipeline_state<S::STAGES> &at, int k0) const
  {
    const int row = threadIdx.x / 8, vector = threadIdx.x % 8, k = k0 + vector * operand<typename S::X>::PER_16;
    const uint32_t to = shared_address(smem.rows[at.stage]) + row * 128 + (vector ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < S::GATHERS; i++) {
      if (i * S::GATHER_ROWS >= unit.rows) break;
      const bool there = this->has(i) && k < args.g.k;
      cp_async_cg_16(to + i * S::GATHER_ROWS * 128, this->at(args.g, i, k), there ? 16 : 0);
    }
    copy_scales(args.g, smem, at, k0);
    cp_async_mbarrier_arrive_noinc(&smem.full[at.stage]);
  }
};

/* Scales of rows in row order: those of a stage by one copy, from the 16 bytes on that the first lies in. */
template <class S> struct ordered_scales {
  const float *next;
  int64_t step;
  uint32_t bytes;

  DEVICE ordered_scales(const gemm_args &args, const tile_unit &tile)
  {
    const bool copied = copies<S>(args), one = args.rows.group == ROWS_ONE_GROUP;
    const int32_t before = tile.row % SCALE_VECTOR;
    next = (copied ? copied_scales(args) : args.a_scale) + (tile.row - before);
    step = one ? 0 : copied ? SCALE_LD(args.rows_cap) : args.a_scale_ld;
    bytes = round_up(before + tile.rows, (int)SCALE_VECTOR) * (int)sizeof *next;
  }
};

/* Weights come by half a tile, for both CTAs (PAIRED), or by all of it, for this one: boxes of half a tile each, or,
 * N-major, of a block. */
template <class S, bool PAIRED>
constexpr int WEIGHT_BOXES = (S::N_MAJOR ? S::COLUMNS / S::BLOCK : S::CLUSTER) / (PAIRED ? S::CLUSTER : 1);

template <class S> constexpr uint16_t EVERY_CTA = (1 << S::CLUSTER) - 1; /* of the cluster */

/* Of N-major halves that lie apart, even blocks are of the first. */
template <class S, bool PAIRED>
DEVICE void copy_n_major(const gemm_sm90_args &args, typename S::W *weights, const tile_unit &tile, int box,
                         uint64_t *full, int k0)
{
  constexpr int ALL = S::COLUMNS / S::BLOCK;
  static_assert(S::BLOCKS == 2, "a consumer has a block of gate and one of up");
  const int apart = S::gated(args.g) && args.g.b.n_stride == 1, block = tile.n * ALL + box,
            place = (apart ? block / 2 : block) * S::BLOCK, half = apart ? block % 2 : 0;
  typename S::W *to = weights + box * S::BLOCK * S::BK;
  if constexpr (PAIRED)
    cp_async_bulk_tensor_4d_multicast(to, &args.weights, place, k0, half, tile.expert, full, EVERY_CTA<S>);
  else
    cp_async_bulk_tensor_4d(to, &args.weights, place, k0, half, tile.expert, full);
}

template <class S, bool PAIRED>
DEVICE void copy_k_major(const gemm_sm90_args &args, typename S::W *weights, const tile_unit &tile, int box,
                         uint64_t *full, int k0)
{
  constexpr int HALF = S::COLUMNS / S::CLUSTER; /* weight rows of a box */
  const int octets = wgmma_channels<S>(args.g) / 8,
            octet = tile.n * octets + box * (octets / S::CLUSTER), /* of channels */
      k = k0 / S::BK * S::WEIGHT_LINE;
  typename S::W *to = weights + box * HALF * S::WEIGHT_LINE;
  if constexpr (PAIRED)
    cp_async_bulk_tensor_5d_multicast(to, &args.weights, k, 0, 0, octet, tile.expert, full, EVERY_CTA<S>);
  else
    cp_async_bulk_tensor_5d(to, &args.weights, k, 0, 0, octet, tile.expert, full);
}

/* Of this CTA's boxes the one at i. */
template <class S, bool PAIRED>
DEVICE void copy_weights(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile, int i, int stage,
                         int k0)
{
  const int box = (PAIRED ? cluster_ctarank() * WEIGHT_BOXES<S, PAIRED> : 0) + i;
  if constexpr (S::N_MAJOR)
    copy_n_major<S, PAIRED>(args, smem.weights[stage], tile, box, &smem.full[stage], k0);
  else
    copy_k_major<S, PAIRED>(args, smem.weights[stage], tile, box, &smem.full[stage], k0);
}

/* By one lane: this CTA's half of what the cluster shares, for both; the rest for itself. `others`: bytes that come to
 * the stage besides. */
template <class S, bool PAIRED>
DEVICE void copy_boxes(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile, int boxes,
                       const pipeline_state<S::STAGES> &at, int k0, uint32_t others)
{
  constexpr int BOX = ROWS_OF_BOX(S::BITS);
  const int rank = cluster_ctarank();
  uint64_t *full = &smem.full[at.stage];
  typename S::X *rows = smem.rows[at.stage];
  const uint32_t row_bytes = boxes * BOX * sizeof(typename S::X) * S::BK;
  uint64_t *rows_full = full;
  if constexpr (S::WOVEN) {
    rows_full = &smem.rows_there[at.stage];
    mbarrier_arrive_expect_tx(rows_full, row_bytes);
    mbarrier_arrive_expect_tx(full, WEIGHT_BYTES<S>);
  } else {
    mbarrier_arrive_expect_tx(full, WEIGHT_BYTES<S> + row_bytes + others);
  }
#pragma unroll S::N_MAJOR ? 1 : 2
  for (int i = 0; i < WEIGHT_BOXES<S, PAIRED>; i++) copy_weights<S, PAIRED>(args, smem, tile, i, at.stage, k0);
  if constexpr (PAIRED) {
    for (int i = 0; i < boxes; i++)
#pragma unroll
      for (int line = 0; line < S::LINES; line++)
        cp_async_bulk_tensor_2d(rows + (line * S::BM + i * BOX) * S::LINE, &args.rows, k0 + line * S::LINE,
                                tile.row + i * BOX, rows_full);
  } else {
    for (int i = rank; i < boxes; i += S::CLUSTER)
#pragma unroll
      for (int line = 0; line < S::LINES; line++)
        cp_async_bulk_tensor_2d_multicast(rows + (line * S::BM + i * BOX) * S::LINE, &args.rows, k0 + line * S::LINE,
                                          tile.row + i * BOX, rows_full, EVERY_CTA<S>);
  }
}

/* Where tokens are the 64-row operand: scales of weights beside each stage. */
struct no_scales {
  DEVICE no_scales(const gemm_args &, bool, const tile_unit &) {}
  template <class... ARGS> DEVICE void put(const ARGS &...) const {}
};
template <class S, bool SERVED> struct producer_scales_of : no_scales {
  using no_scales::no_scales;
};
template <class S> struct producer_scales_of<S, true> : token_weight_scales<S> {
  using token_weight_scales<S>::token_weight_scales;
};
template <class S> using producer_scales = producer_scales_of<S, token_tile<S>::SERVED>;

template <class S> DEVICE void post_unit(wgmma_smem<S> &smem, const tile_unit &tile, int slot)
{
  smem.units[slot] = tile;
  if constexpr (S::PACKED && !S::WOVEN) smem.absent[slot] = false;
  if constexpr (S::PACKED) mbarrier_arrive(&smem.posted[slot]);
}

/* All of a unit's stages. Consumers read which unit it is behind the first `full` barrier. */
template <class S, bool PAIRED>
DEVICE void produce_ordered(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile, int slot,
                            pipeline_state<S::STAGES> &at)
{
  const int boxes = ceil_div(tile.rows, ROWS_OF_BOX(S::BITS));
  ordered_scales<S> scales(args.g, tile);
  producer_scales<S> weights(args.g, args.up_first, tile);
#pragma unroll 1
  for (int k0 = 0; k0 < args.g.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (tile.rows > token_tile<S>::TOKENS) /* of fewer, consumers find them sooner */
      weights.put(args.g, smem, at.stage, k0 / S::BK);
    if (elect_one()) {
      if (k0 == 0) post_unit(smem, tile, slot);
      copy_boxes<S, PAIRED>(args, smem, tile, boxes, at, k0, S::SCALED ? scales.bytes : 0);
      if constexpr (S::SCALED)
        cp_async_bulk(row_scales_of<S>(smem, at), scales.next, scales.bytes, &smem.full[at.stage]);
    }
    scales.next += scales.step;
    __syncwarp();
  }
  if constexpr (S::ACTIVATES) produce_kept<S, false>(activated_of<S>(args), smem, tile, at);
}

/* The same where all producers gather rows, and each warp asks for a box of weights at most: rows of one that asks for
 * four would come late. */
template <class S, bool PAIRED>
DEVICE void produce_gathered(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile, int slot,
                             const gather<S> &rows, pipeline_state<S::STAGES> &at)
{
#pragma unroll 1
  for (int k0 = 0; k0 < args.g.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (warp_id() < WEIGHT_BOXES<S, PAIRED> && elect_one()) {
      if (warp_id() == 0) {
        if (k0 == 0) post_unit(smem, tile, slot);
        mbarrier_arrive_expect_tx(&smem.full[at.stage], WEIGHT_BYTES<S>);
      }
      copy_weights<S, PAIRED>(args, smem, tile, warp_id(), at.stage, k0);
    }
    __syncwarp();
    rows.copy(args, smem, tile, at, k0);
  }
}

template <class S, bool PAIRED, bool GATHERING>
DEVICE void produce_unit(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile, int slot,
                         const gather<S> &rows, pipeline_state<S::STAGES> &at)
{
  if constexpr (GATHERING)
    produce_gathered<S, PAIRED>(args, smem, tile, slot, rows, at);
  else
    produce_ordered<S, PAIRED>(args, smem, tile, slot, at);
}

/* Until what a unit reads and this launch or the one ahead still writes is there, for bulk copies. */
template <class S>
DEVICE void wait_for_operands(const gemm_args &args, const tile_table &table, const tile_unit &tile, int32_t copied)
{
  if (copies<S>(args)) wait_for_rows(args, copied, tile.row, tile.rows);
  if (S::DRAWS || !unit_scheduler<S>::follows(args)) return;
  wait_for_h(args, table, tile.expert);
  fence_proxy_async_global();
}

template <class S, bool GATHERING> DEVICE void produce_units(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  const int32_t copied = !GATHERING && copies<S>(args.g) ? rows_to_copy(args.g) : 0;
  pipeline_state<S::STAGES> at;
  gather<S> rows;
  int slot = 0;
#pragma unroll 1
  for (unit_scheduler<S> scheduler;; scheduler.advance(args.g, smem)) {
    const cluster_unit unit = wgmma_unit<S>(args.g, smem.table, scheduler.index);
    if (unit.tile.expert < 0) {
      produce_end<S>(smem, unit.tile, slot, GATHERING, at);
      if (S::PACKED && threadIdx.x == 0) post_unit(smem, unit.tile, slot);
      return;
    }
    if (!S::ACTIVATES || unit.absent) scheduler.draw(args.g, smem);
    if (unit.absent) continue;
    if (GATHERING)
      rows.set_unit(args.g, unit.tile);
    else
      wait_for_operands<S>(args.g, smem.table, unit.tile, copied);
    if (unit.paired)
      produce_unit<S, true, GATHERING>(args, smem, unit.tile, slot, rows, at);
    else
      produce_unit<S, false, GATHERING>(args, smem, unit.tile, slot, rows, at);
    if constexpr (S::ACTIVATES) {
      scheduler.draw(args.g, smem); /* the later, the evener: consumers have stages to multiply meanwhile */
      produce_kept<S, true>(activated_of<S>(args), smem, unit.tile, at);
    }
    slot = (slot + 1) % UNITS_AHEAD;
  }
}

/* What a unit takes before its first copy can be asked for is longer than a stage: a search and divisions, rows that
 * are asked for, fences. So one warp finds units and waits for what they read, while another copies their stages. Never
 * more than one ahead: a cluster that has drawn more has units in hand when others are through, and what is not there
 * yet is asked for again and again. */
template <class S> DEVICE void find_units(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  const int32_t copied = copies<S>(args.g) ? rows_to_copy(args.g) : 0;
  unit_scheduler<S> scheduler;
  cluster_unit unit = scheduler.present(args.g, smem);
#pragma unroll 1
  for (uint32_t taken = 0;; taken ^= 1) {
    if (unit.tile.expert >= 0) wait_for_operands<S>(args.g, smem.table, unit.tile, copied);
    if (lane_id() == 0) {
      smem.found = unit;
      mbarrier_arrive(&smem.found_ready);
    }
    __syncwarp();
    if (unit.tile.expert < 0) return;
    wait_for(&smem.found_taken, taken);
    __syncwarp(); /* no lane still waits for the phase that the next unit ends */
    unit = scheduler.take(args.g, smem);
  }
}

template <class S> DEVICE void produce_found(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  pipeline_state<S::STAGES> at;
  int slot = 0;
#pragma unroll 1
  for (uint32_t ready = 0;; ready ^= 1) {
    wait_for(&smem.found_ready, ready);
    const cluster_unit unit = smem.found;
    mbarrier_arrive(&smem.found_taken); /* each lane for itself: what racecheck can follow */
    __syncwarp();
    if (unit.tile.expert < 0) return produce_end<S>(smem, unit.tile, slot, false, at);
    fence_proxy_async_global(); /* what the other warp has waited for */
    if (unit.paired)
      produce_ordered<S, true>(args, smem, unit.tile, slot, at);
    else
      produce_ordered<S, false>(args, smem, unit.tile, slot, at);
    slot = (slot + 1) % UNITS_AHEAD;
  }
}

/* Rows in order: a warp copies stages, the next ones do what that or consumers want besides, the rest copies rows. */
template <class S> DEVICE void produce(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  constexpr int BUSY = 1 + (S::PACKED ? S::HELPERS : 1);
  if (S::GATHERED && S::gathers(args.g)) return produce_units<S, S::GATHERED>(args, smem);
  if (warp_id() >= BUSY) {
    if (copies<S>(args.g)) return copy_rows<typename S::X>(args.g);
  } else if (warp_id() > 0) {
    if constexpr (S::WOVEN)
      weave<S>(args, smem);
    else if constexpr (S::PACKED)
      produce_factors<S>(args, smem);
    else
      find_units<S>(args, smem);
  } else if constexpr (S::PACKED) {
    produce_units<S, false>(args, smem);
  } else {
    produce_found<S>(args, smem);
  }
  wait_for_earlier_grids(); /* if not yet */
}

/* ---- consumers ---- */

/* Counts a consumer's part of a tile of h as stored: its channels, or, where all consumers have all of them, as many.
 * `tile` lies in shared memory, as registers are full. */
template <class S> DEVICE void add_tile_stored(const gemm_args &args, const tile_unit &tile, int group, bool all)
{
  const int channels = wgmma_channels<S>(args), each = channels / S::CONSUMERS, there = args.n - tile.n * channels;
  bar_sync(1 + group, S::GROUP);
  if (threadIdx.x % S::GROUP == 0)
    add_h_stored(args, tile.expert, min(each, all ? (there + group) / S::CONSUMERS : there - group * each));
}

/* A thread's word, from a unit's products to its end: among the weights of rows, which tokens as rows do not have. */
template <class S> DEVICE int &kept_word(wgmma_smem<S> &smem)
{
  static_assert(S::BM >= S::GROUP, "a word each");
  return reinterpret_cast<int *>(smem.staging.row_weights[tid_x() / S::GROUP - 1])[tid_x() % S::GROUP];
}

/* Of tokens as columns, which may have weights: another warp still reads the last unit's. While there are products,
 * nothing is staged. */
template <class S> DEVICE int &kept_word_of_columns(wgmma_smem<S> &smem)
{
  return reinterpret_cast<int *>(staged_of_warp<S>(smem.staging, tid_x()))[tid_x() % WARP_SIZE];
}

/* A consumer's part of the unit at `slot`, tokens as rows. Registers are full: the unit is read anew. */
template <class S>
DEVICE void consume_tokens(const gemm_sm90_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at, int &slot)
{
  typename token_tile<S>::sums acc = {};
  const tile_unit unit = smem.units[slot];
  const int channel = unit.n * wgmma_channels<S>(args.g);
  if (channel >= args.g.n) return skip<S>(args.g, smem, at);
  kept_word<S>(smem) = slot;
  multiply_tokens<S>(args.g, args.up_first, smem, smem, at, unit, channel, acc);
  const tile_unit stored = smem.units[kept_word<S>(smem)];
  store_tokens<S>(args, smem.staging, stored, stored.n * wgmma_channels<S>(args.g), acc);
  slot = kept_word<S>(smem);
  if (S::GATHERED && args.g.protocol.by_expert)
    add_tile_stored<S>(args.g, smem.units[slot], (int)tid_x() / S::GROUP - 1, true);
}

/* The same of the unit at `slot`, if there is one, by the group. */
template <class S> DEVICE void tell_stored(const gemm_args &args, const wgmma_smem<S> &smem, int slot, int group)
{
  if (slot < 0) return;
  if constexpr (S::ACTIVATES) {
    bar_sync(1 + group, S::GROUP);
    if (threadIdx.x % S::GROUP == 0) add_activated_stored<S>(args, smem.units[slot], group);
  } else {
    add_tile_stored<S>(args, smem.units[slot], group, false);
  }
}

/* What a consumer keeps from unit to unit. */
template <class S, bool WOVEN> struct scales_ahead_of {
};
template <class S> struct scales_ahead_of<S, true> : woven_scales<S> {
};

template <class S> DEVICE void consume(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  const int own = threadIdx.x / S::GROUP - 1;
  pipeline_state<S::STAGES> at;
  scales_ahead_of<S, S::WOVEN> scales;
  int stored = -1; /* TELLS_LATER: the unit that is not told of yet */
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD) {
    wait_for(&smem.full[at.stage], at.phase);
    const int group = S::PACKED ? (int)tid_x() / S::GROUP - 1 : own; /* there registers are full */
    const tile_unit unit = smem.units[slot];
    if (unit.expert < 0) break;
    if constexpr (token_tile<S>::SERVED) {
      __syncwarp(); /* what is staged of the last unit is read */
      if (tokens_are_rows<S>(args.g)) {
        consume_tokens<S>(args, smem, at, slot);
        continue;
      }
    }
    const int channels = wgmma_channels<S>(args.g), channel0 = unit.n * channels + group * (channels / S::CONSUMERS);
    if (channel0 >= args.g.n) {
      if constexpr (S::TELLS_LATER) tell_stored<S>(args.g, smem, stored, group), stored = -1;
      if constexpr (S::WOVEN) scales.skip_unit();
      skip<S>(args.g, smem, at);
      continue;
    }
    float acc[S::BLOCKS][S::ACCUMULATORS] = {}; /* anew: kept from tile to tile, ptxas would move them amid wgmmas */
    if constexpr (S::WOVEN)
      multiply_woven<S>(args, smem, at, slot, scales, acc);
    else if constexpr (S::PACKED)
      multiply_packed<S>(args, smem, at, slot, acc);
    else if constexpr (S::TELLS_LATER)
      multiply<S, S::BM>(args.g, smem, at, group, unit.rows, acc, [&] { tell_stored<S>(args.g, smem, stored, group); });
    else {
      if (token_tile<S>::SERVED) kept_word_of_columns<S>(smem) = slot;
      multiply_unit<S>(args.g, args.up_first, smem, at, group, unit, channel0, acc);
      if (token_tile<S>::SERVED) slot = kept_word_of_columns<S>(smem);
    }
    if constexpr (S::SCALED || S::PACKED) { /* registers are full: all of it anew */
      const tile_unit stored = smem.units[slot];
      const int consumer = (int)tid_x() / S::GROUP - 1, each = wgmma_channels<S>(args.g) / S::CONSUMERS;
      store_tile<S>(args.g, args.up_first, smem.staging, stored, consumer,
                    {(stored.n * S::CONSUMERS + consumer) * each, args.g.n}, acc);
    } else if constexpr (S::ACTIVATES) {
      const tile_unit stored = smem.units[slot]; /* as above */
      const int consumer = (int)tid_x() / S::GROUP - 1;
      store_activated<S>(activated_of<S>(args), smem, at, stored, consumer,
                         {(stored.n * S::CONSUMERS + consumer) * (S::COLUMNS / S::CONSUMERS), args.g.n}, acc);
    } else if constexpr (S::KEEPS) {
      store_kept<S>(args, smem.staging, unit, group, {channel0, args.g.n}, acc);
    } else {
      store_tile<S>(args.g, args.up_first, smem.staging, unit, group, {channel0, args.g.n}, acc);
    }
    if constexpr (S::TELLS_LATER)
      stored = args.g.protocol.by_expert ? slot : -1;
    else if (S::GATHERED && args.g.protocol.by_expert)
      add_tile_stored<S>(args.g, smem.units[slot], S::PACKED ? (int)tid_x() / S::GROUP - 1 : group, false);
  }
  if constexpr (S::TELLS_LATER) tell_stored<S>(args.g, smem, stored, own);
}

template <class S> DEVICE void wgmma_gemm(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  if (threadIdx.x == 0) {
    prefetch_tensormap(&args.weights);
    if (!S::gathers(args.g)) prefetch_tensormap(&args.rows);
    for (int s = 0; s < S::STAGES; s++) {
      mbarrier_init(&smem.full[s], S::gathers(args.g) ? 1 + S::GROUP : 1 + S::HELPERS);
      mbarrier_init(&smem.empty[s], S::CLUSTER * S::CONSUMERS * S::GROUP / WARP_SIZE);
      if constexpr (S::WOVEN) mbarrier_init(&smem.rows_there[s], 1);
    }
    for (int i = 0; i < UNITS_AHEAD; i++) mbarrier_init(&smem.drawn_ready[i], 1);
    if constexpr (S::PACKED) {
      for (int i = 0; i < UNITS_AHEAD; i++) mbarrier_init(&smem.posted[i], 1);
    } else {
      mbarrier_init(&smem.found_ready, 1);
      mbarrier_init(&smem.found_taken, WARP_SIZE);
    }
    fence_mbarrier_init();
  }
  if (S::DRAWS ? !args.g.protocol.early_inputs : !unit_scheduler<S>::follows(args.g)) wait_for_earlier_grids();
  fence_proxy_async_global(); /* they wrote the rows that the boxes bring */
  build_tile_table<S::BM, S::THREADS>(args.g, smem.table);
  barrier_cluster(); /* the other CTA's barriers are initialised */
  if (threadIdx.x < S::GROUP) {
    setmaxnreg_dec<S::PRODUCER_REGISTERS>();
    produce<S>(args, smem);
  } else {
    setmaxnreg_inc<S::CONSUMER_REGISTERS>();
    consume<S>(args, smem);
  }
  __syncwarp();
  barrier_cluster(); /* nobody writes to a CTA that has left */
}

template <class S> DEVICE void wgmma_gemm(const down_activated_args &args, wgmma_smem<S> &smem)
{
  wgmma_gemm<S>(args.gemm, smem);
}

#endif
