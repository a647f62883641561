/* The gate: groups of experts. Only experts of the topk_group best groups stay. */
#ifndef CUMOE_GROUPS_CUH
#define CUMOE_GROUPS_CUH

#include "route/scores.cuh"

struct best_two {
  uint32_t first, second;
};

DEVICE best_two better(best_two a, best_two b)
{
  return {max(a.first, b.first), max(min(a.first, b.first), max(a.second, b.second))};
}

/* The key of a group's score, known to the `lanes` lanes that share the group. Each starts at another step,
 * so that groups whose size is a multiple of 32 words do not meet in one bank. */
DEVICE uint32_t group_key(const gate_args &a, const uint32_t *choice, int group, int lanes)
{
  const int size = a.experts / a.n_group, steps = ceil_div(size, lanes);
  best_two best = {KEY_NONE, KEY_NONE};
  int step = group % steps;
  for (int i = 0; i < steps; i++) {
    int at = step * lanes + lane_id() % lanes;
    if (group < a.n_group && at < size) best = better(best, {choice[group * size + at], KEY_NONE});
    step = step + 1 == steps ? 0 : step + 1;
  }
  for (int mask = lanes / 2; mask > 0; mask /= 2)
    best = better(best, {__shfl_xor_sync(ALL_LANES, best.first, mask), __shfl_xor_sync(ALL_LANES, best.second, mask)});
  if (group >= a.n_group) return KEY_NONE;
  return a.group_score == GROUP_BEST || size == 1 ? best.first
                                                  : key_of(float_of_key(best.first) + float_of_key(best.second));
}

/* Bit g: group g stays. */
DEVICE uint64_t open_groups(const gate_args &a, const uint32_t *choice)
{
  int lanes = WARP_SIZE;
  while (lanes > 1 && lanes * a.n_group > WARP_SIZE) lanes /= 2;
  uint32_t low = group_key(a, choice, lane_id() / lanes, lanes);
  low = __shfl_sync(ALL_LANES, low, lane_id() * lanes % WARP_SIZE);
  if (lane_id() >= a.n_group) low = KEY_NONE;
  uint32_t high = a.n_group > WARP_SIZE ? group_key(a, choice, lane_id() + WARP_SIZE, 1) : KEY_NONE;
  uint64_t open = 0;
  for (int i = 0; i < a.topk_group; i++) {
    uint32_t best = __reduce_max_sync(ALL_LANES, max(low, high));
    if (best == KEY_NONE) break;
    unsigned mine = low == best ? lane_id() : high == best ? lane_id() + WARP_SIZE : ~0u;
    unsigned group = __reduce_min_sync(ALL_LANES, mine);
    open |= 1ull << group;
    if (group == lane_id()) low = KEY_NONE;
    if (group == lane_id() + WARP_SIZE) high = KEY_NONE;
  }
  return open;
}

/* Experts of closed groups lose their keys. expert / size by a product: exact below 1024. */
DEVICE void close_groups(const gate_args &a, uint32_t *choice)
{
  const unsigned inverse = ceil_div(1u << 21, (unsigned)(a.experts / a.n_group));
  const uint64_t open = open_groups(a, choice);
  __syncwarp();
  for (unsigned e = lane_id(); e < a.experts; e += WARP_SIZE)
    if (!(open >> (e * inverse >> 21) & 1)) choice[e] = KEY_NONE;
}

/* close_groups, for keys in registers and groups of whole rows of 32 lanes: their best two by reductions that do not
 * wait for each other, then lane g ranks group g. */
template <int N> DEVICE void close_groups_of_rows(const gate_args &a, uint32_t (&key)[N])
{
  const int rows = a.experts / a.n_group / WARP_SIZE;
  best_two group = {KEY_NONE, KEY_NONE};
#pragma unroll
  for (int i = 0; i < N; i++) {
    const uint32_t first = __reduce_max_sync(ALL_LANES, key[i]);
    const int winner = __ffs(__ballot_sync(ALL_LANES, key[i] == first)) - 1;
    const uint32_t second = __reduce_max_sync(ALL_LANES, lane_id() == winner ? KEY_NONE : key[i]);
    if (i / rows == lane_id()) group = better(group, {first, second});
  }
  const uint32_t mine = lane_id() >= a.n_group        ? KEY_NONE
                        : a.group_score == GROUP_BEST ? group.first
                                                      : key_of(float_of_key(group.first) + float_of_key(group.second));
  int above = 0;
#pragma unroll
  for (int g = 0; g < N; g++) {
    const uint32_t other = __shfl_sync(ALL_LANES, mine, g);
    above += other > mine || (other == mine && g < lane_id());
  }
  const unsigned open = __ballot_sync(ALL_LANES, mine != KEY_NONE && above < a.topk_group);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (!(open >> i / rows & 1)) key[i] = KEY_NONE;
}

#endif
