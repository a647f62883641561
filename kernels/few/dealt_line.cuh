/* dealt: its shape, how weights are dealt out, and what a CTA has in shared memory. */
#ifndef CUMOE_DEALT_LINE_CUH
#define CUMOE_DEALT_LINE_CUH

#include "dealt.h"
#include "device/pipeline.cuh"
#include "few/layout.cuh"

/* ---- shape ---- */

/* A stage is BK of k by 2 BN channels: of a gated layer BN of gate and the same of up. Of one token (ONE) those that
 * bring columns make h of up's sums. */
template <class PRODUCT, int TOKENS_, int BN, int BK_, int STAGES_, int WARPS> struct dealt_layout {
  using layout = dealt_layout;
  using X = typename PRODUCT::X;
  using W = typename PRODUCT::W;
  using Y = typename PRODUCT::Y;
  static_assert(same_type<X, W> && same_type<X, Y> && operand<W>::BITS == 16, "multiplied as they are");
  static constexpr bool UP = true; /* the table has both */
  static constexpr int TOKENS = TOKENS_, PAIRS = FEW_PAIRS(TOKENS), COLUMNS = TOKENS == 1 ? 1 : (int)FEW_COLUMNS;
  static constexpr int BK = BK_, STAGES = STAGES_, QUEUE = 16;
  /* Stages that are on their way at a time: 64 KiB an SM are as quick as more, and what waits behind more of them, h
   * and draws, comes late. The others are there, and wait for h. */
  static constexpr int WINDOW = 4;
  static constexpr bool ONE = TOKENS == 1;
  /* Warps: consumers; one that copies weights; those that bring columns; one that routes; one that makes h. */
  static constexpr int CONSUMERS = 8, COPIER = CONSUMERS, FEEDERS = ONE ? STAGES : 6, ROUTING = COPIER + 1 + FEEDERS,
                       FINISHER = ROUTING + 1, WRITERS = ROUTING, THREADS = WARPS * WARP_SIZE;
  static constexpr int VECTORS = BK / 8, COLUMN = BK + 8; /* of a stage's column: 16 bytes; elements, with a gap */
  static_assert(BN == 64 && BK == (int)FEW_PART_K && 2 * BN == (int)FEW_PART_N, "boxes; an octet of each a consumer");
  static_assert(WARPS > FINISHER - ONE && THREADS >= PAIRS && STAGES % FEEDERS == 0);
  static_assert(COLUMNS * VECTORS <= WARP_SIZE || COLUMNS * VECTORS % WARP_SIZE == 0);
};

/* ---- the line ---- */

/* A part of k of a unit: chunks first to end - 1. */
struct dealt_item {
  int active, block, part, first, end;
};

/* A unit's parts of k: how many, and chunks of each. */
struct dealt_parts {
  int count, each;
};

/*
 * All items of a product, up or down: expert after expert, of each part after part, of a part all channels, as rows of
 * memory have them. The last units of all are cut into smaller parts than the others, so that CTAs end together.
 */
struct dealt_line {
  int chunks, blocks, octets, step; /* of k; units of an expert; of h or y, of a unit */
  int pairs, gated;                 /* gate and up element by element */
  dealt_parts parts[2];             /* of the first units; of the last ones */
  int last;                         /* units cut small */
  int small, whole;                 /* the first of them; experts that have none */

  DEVICE static dealt_parts cut(int chunks, int part_k)
  {
    const int each = max(part_k / (int)FEW_PART_K, 1);
    return {ceil_div(chunks, each), each};
  }
  DEVICE void set(const gemm_args &g, bool has_gate, const dealt_cut &of)
  {
    gated = has_gate, pairs = has_gate && g.b.n_stride == 2;
    chunks = ceil_div(g.k, (int)FEW_PART_K), last = of.last;
    parts[0] = cut(chunks, of.part_k[0]), parts[1] = cut(chunks, of.part_k[1]);
    octets = g.n / 8, step = (int)FEW_PART_N / 8 / (has_gate ? 2 : 1), blocks = ceil_div(octets, step);
  }
  DEVICE void deal(int experts) { small = max(experts * blocks - last, 0), whole = last ? small / blocks : experts; }
  DEVICE const dealt_parts &parts_of(int unit) const { return parts[unit >= small]; }
  DEVICE int items(int experts) const { return small * parts[0].count + (experts * blocks - small) * parts[1].count; }
  DEVICE dealt_item item(int active, int first, int width, int index, int kind) const
  {
    const int part = index / width, each = parts[kind].each;
    return {active, first + index - part * width, part, part * each, min(part * each + each, chunks)};
  }
  DEVICE dealt_item find(int index) const
  {
    const int rest = small - whole * blocks; /* units of the next one */
    int of = blocks * parts[0].count;
    if (index < whole * of) return item(index / of, 0, blocks, index % of, 0);
    index -= whole * of;
    if (index < rest * parts[0].count) return item(whole, 0, rest, index, 0);
    index -= rest * parts[0].count;
    of = (blocks - rest) * parts[1].count;
    if (index < of) return item(whole, rest, blocks - rest, index, 1);
    index -= of, of = blocks * parts[1].count;
    return item(whole + 1 + index / of, 0, blocks, index % of, 1);
  }
};

/* ---- shared memory ---- */

enum { DEALT_END, DEALT_UP, DEALT_DOWN };

/* What a stage has. */
struct alignas(16) dealt_run {
  int16_t kind, last; /* last: of the item */
  int16_t active, part;
  int32_t block, chunk;
};

struct dealt_unit {
  int32_t active, block; /* active < 0: no more */
};

template <class S> struct dealt_stage {
  typename S::W boxes[2][S::BK][64]; /* in the 128-byte swizzle */
};

template <class PRODUCT, int TOKENS, int BN, int BK, int STAGES, int WARPS>
struct few_memory<dealt_layout<PRODUCT, TOKENS, BN, BK, STAGES, WARPS>> {
  using S = dealt_layout<PRODUCT, TOKENS, BN, BK, STAGES, WARPS>;
  dealt_stage<S> stages[STAGES];
  typename S::X columns[STAGES][S::COLUMNS][S::COLUMN];
  dealt_run run[STAGES];
  uint64_t told[STAGES], full[STAGES], there[STAGES], empty[STAGES]; /* full of weights; the columns are there */
  dealt_unit unit[S::QUEUE];
  uint64_t unit_full[S::QUEUE], unit_empty[S::QUEUE];
  uint64_t weights_ready;  /* the table's `weight` */
  dealt_line line[2];      /* of up, of down */
  int16_t place[S::PAIRS]; /* of a pair: its active expert, times FEW_COLUMNS, and its column */
  few_table<S::PAIRS> table;
};
template <class S> using dealt_smem = few_memory<typename S::layout>;

/* ---- parts, in memory ---- */

/* Those of a pair in a unit: the first one's, and the distance to the next one's. Channels of a unit are neighbours. */
struct dealt_sums {
  float *first;
  int64_t step;
};

/* column: the pair's, of the active expert's. */
template <class S>
DEVICE dealt_sums sums_of(const few_sm90_args &all, const dealt_smem<S> &smem, bool down, int active, int block,
                          int column)
{
  const dealt_line &line = smem.line[down];
  const int unit = active * line.blocks + block, behind = unit - line.small,
            columns = S::COLUMNS == 1 ? 1 : all.columns;
  if (behind >= 0)
    return {all.cut[down].small + ((int64_t)behind * line.parts[1].count * columns + column) * (int)FEW_PART_N,
            columns * (int)FEW_PART_N};
  const int row = line.blocks * (int)FEW_PART_N, pair = column_pair(smem.table.column[active][column]);
  return {all.cut[down].parts + (int64_t)pair * row + block * (int)FEW_PART_N, (int64_t)(int)all.f.up.rows_cap * row};
}

/* No sum is all ones: a NaN that is computed has a sign of 0. */
DEVICE bool is_unwritten_sum(uint64_t two)
{
  return (uint32_t)two == ~0u || (uint32_t)(two >> 32) == ~0u;
}
DEVICE bool is_unwritten_quad(const uint4 &four)
{
  return four.x == ~0u || four.y == ~0u || four.z == ~0u || four.w == ~0u;
}

#endif
