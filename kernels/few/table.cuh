/* few: which pairs are multiplied together. Every CTA builds the same table for itself. */
#ifndef CUMOE_FEW_TABLE_CUH
#define CUMOE_FEW_TABLE_CUH

#include "few/layout.cuh"
#include "gemm/schedule.cuh"
#include "route/pairs.cuh"

/* Experts whose first pair comes before `pair`. */
template <int PAIRS> DEVICE int active_before(const few_table<PAIRS> &t, int pair)
{
  int before = 0;
#pragma unroll
  for (int i = 0; i < PAIRS / WARP_SIZE; i++) {
    const int there = min(max(pair - i * WARP_SIZE, 0), (int)WARP_SIZE);
    before += __popc((uint32_t)(t.first[i] & ((1ull << there) - 1)));
  }
  return before;
}

/* Strides are in elements, of which two may be a byte. */
template <class W> DEVICE const void *few_base(const expert_matrix &b, int half, int expert)
{
  if (operand<W>::BITS >= 8 || b.table[half]) return expert_base<W>(b, half, expert);
  return static_cast<const W *>(b.base[half]) + expert * b.expert_stride / 2;
}

template <class S> DEVICE void enter_expert(const few_args &args, few_table<S::PAIRS> &t, int active, int expert)
{
  using W = typename S::W;
  const expert_matrix &up = args.up.b;
  t.expert[active] = (int16_t)expert;
  if (S::UP) t.weights[active] = {few_base<W>(up, 0, expert), few_base<W>(up, args.up.gated ? 1 : 0, expert)};
  if (!S::UP || args.protocol.tickets) t.down[active] = few_base<W>(args.down.b, 0, expert);
}

/* Of one token: every pair is an expert of its own, also where two name the same. */
template <class S> DEVICE void enter_pairs_of_one(const few_args &args, few_table<S::PAIRS> &t, int pair, int to)
{
  const uint32_t firsts = __ballot_sync(ALL_LANES, to >= 0);
  if (lane_id() == 0) t.first[0] = firsts;
  if (to < 0) return;
  const int active = __popc(firsts & ((1u << pair) - 1));
  enter_expert<S>(args, t, active, to);
  *reinterpret_cast<uint4 *>(t.column[active]) = make_uint4(0xffff0000u | few_column_of(pair, 0), ~0u, ~0u, ~0u);
}

/* Lies where stages will be. */
template <int PAIRS, int COLUMNS> struct few_counts {
  uint8_t in_warp[PAIRS / WARP_SIZE][MAX_EXPERTS]; /* pairs of a warp with that expert */
  uint8_t active[MAX_EXPERTS][PAIRS / COLUMNS];    /* of an expert's pairs, COLUMNS by COLUMNS */
};

/* Pairs before this one with the same expert. All threads; the first of them have a pair each. */
template <int PAIRS, int COLUMNS> DEVICE int count_alike(few_counts<PAIRS, COLUMNS> &s, int experts, int pair, int to)
{
  const int words = ceil_div(experts, 4), warp = warp_id();
  for (int i = threadIdx.x; i < PAIRS / WARP_SIZE * words; i += blockDim.x)
    reinterpret_cast<uint32_t *>(s.in_warp[i / words])[i % words] = 0;
  __syncthreads();
  const unsigned peers = __match_any_sync(ALL_LANES, to), earlier = peers & ((1u << lane_id()) - 1);
  if (pair < PAIRS && to >= 0 && earlier == 0) s.in_warp[warp][to] = (uint8_t)__popc(peers);
  __syncthreads();
  int before = __popc(earlier);
  for (int w = 0; w < min(warp, PAIRS / WARP_SIZE) && to >= 0; w++) before += s.in_warp[w][to];
  return before;
}

/* All threads. The first of them have a pair each, which goes to `to`. */
template <class S> DEVICE void enter_pairs(const few_args &args, few_smem<S> &smem, int pair, int to, int token)
{
  few_table<S::PAIRS> &t = smem.table;
  using counts = few_counts<S::PAIRS, S::COLUMNS>;
  counts &s = *reinterpret_cast<counts *>(&smem.stages);
  static_assert(sizeof s <= sizeof smem.stages, "room for it");
  const int before = count_alike(s, args.map.local_experts, pair, to);
  const bool first = to >= 0 && before % S::COLUMNS == 0;
  const uint32_t firsts = __ballot_sync(ALL_LANES, first);
  if (pair < S::PAIRS && lane_id() == 0) t.first[warp_id()] = firsts;
  __syncthreads();
  if (first) {
    const int active = active_before(t, pair);
    s.active[to][before / S::COLUMNS] = (uint8_t)active;
    enter_expert<S>(args, t, active, to);
  }
  __syncthreads();
  if (to >= 0) t.column[s.active[to][before / S::COLUMNS]][before % S::COLUMNS] = few_column_of(pair, token);
}

/* Local expert, ROW_DROPPED or ROW_IDENTITY. One CTA reports faults. */
template <class S> DEVICE int look_up_pair(const few_args &args, const few_table<S::PAIRS> &t, int token, int pair)
{
  const map_args &map = args.map;
  const bool report = S::UP && blockIdx.x == 0;
  if (S::UP && args.protocol.weights) {
    const int slot = pair - token * map.top_k;
    return report ? destination_of<true, l2_reader>(map, t.id[pair], token, slot)
                  : destination_of<false, l2_reader>(map, t.id[pair], token, slot);
  }
  return report ? destination<true, l2_reader>(map, pair) : destination<false, l2_reader>(map, pair);
}

/* All threads; returns the number of active experts. A grid of down alone does this before the grid ahead has ended: it
 * reads only what was complete when that one started. */
template <class S> DEVICE int build_few_table(const few_args &args, few_smem<S> &smem)
{
  few_table<S::PAIRS> &t = smem.table;
  const int top_k = args.map.top_k, pair = threadIdx.x, token = S::TOKENS == 1 ? 0 : pair / top_k;
  int to = ROW_DROPPED;
  if (pair < S::PAIRS) {
    if (pair < (int)token_total(args.map.tokens) * top_k) to = look_up_pair<S>(args, t, token, pair);
    t.to[pair] = to;
    if (S::TOKENS == 1)
      enter_pairs_of_one<S>(args, t, pair, to);
    else
      *reinterpret_cast<uint4 *>(t.column[pair]) = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  if constexpr (S::TOKENS > 1) enter_pairs<S>(args, smem, pair, to, token);
  __syncthreads();
  return active_before(t, S::PAIRS);
}

#endif
