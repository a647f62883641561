/* The gate: the best k of a token's keys, best first; of equals the lower expert. */
#ifndef CUMOE_TOPK_CUH
#define CUMOE_TOPK_CUH

#include "route/scores.cuh"

/* A lane's candidates: N keys in registers, each the best of `each` consecutive experts of the lane; if that
 * is more than one, the keys of all are in shared memory, and `sub` holds two bits a key: which of them it
 * is. */
template <int N> struct candidates {
  uint32_t key[N];
  int each = 1;
  unsigned sub = 0;

  DEVICE void refresh(const gate_args &a, const uint32_t *choice, int i, uint32_t &best, unsigned &which) const
  {
    best = KEY_NONE, which = 0;
    for (int g = 0; g < each; g++) {
      int e = (i * each + g) * WARP_SIZE + lane_id();
      uint32_t other = e < a.experts ? choice[e] : KEY_NONE;
      if (other > best) best = other, which = g;
    }
  }

  DEVICE void load(const gate_args &a, const uint32_t *choice)
  {
    each = ceil_div(a.experts, N * WARP_SIZE);
#pragma unroll
    for (int i = 0; i < N; i++) {
      unsigned which;
      refresh(a, choice, i, key[i], which);
      sub |= which << 2 * i;
    }
  }

  /* A tree; of equals the lower. */
  DEVICE uint32_t best(int &where) const
  {
    uint32_t k[N];
    int w[N];
#pragma unroll
    for (int i = 0; i < N; i++) k[i] = key[i], w[i] = i;
#pragma unroll
    for (int width = N / 2; width > 0; width /= 2)
#pragma unroll
      for (int i = 0; i < width; i++) {
        const bool right = k[2 * i + 1] > k[2 * i];
        k[i] = right ? k[2 * i + 1] : k[2 * i], w[i] = right ? w[2 * i + 1] : w[2 * i];
      }
    where = w[0];
    return k[0];
  }

  DEVICE unsigned expert(int where) const
  {
    return (where * each + (sub >> 2 * where & 3)) * WARP_SIZE + lane_id();
  }

  DEVICE void remove(const gate_args &a, uint32_t *choice, int where)
  {
    uint32_t next = KEY_NONE;
    if (each > 1) {
      unsigned which;
      choice[expert(where)] = KEY_NONE;
      refresh(a, choice, where, next, which);
      sub = (sub & ~(3u << 2 * where)) | which << 2 * where;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
      if (i == where) key[i] = next;
  }
};

struct chosen_expert {
  int id; /* -1: there are fewer */
  uint32_t key;
};

/* A warp's shared memory. */
struct gate_scratch {
  uint4 best[WARP_SIZE / 4];        /* of each lane */
  chosen_expert found[WARP_SIZE];   /* in any order */
  chosen_expert ordered[WARP_SIZE]; /* best first */
};

/* The k-th best of the lanes' best keys, which at least k keys reach; KEY_NONE if fewer lanes have one. */
DEVICE uint32_t kth_of_lanes(uint32_t best, int k, gate_scratch &s)
{
  reinterpret_cast<uint32_t *>(s.best)[lane_id()] = best;
  __syncwarp();
  int above = 0;
#pragma unroll
  for (int i = 0; i < WARP_SIZE / 4; i++) {
    const uint4 other = s.best[i];
    above += (other.x > best) + (other.y > best) + (other.z > best) + (other.w > best);
  }
  return __reduce_min_sync(ALL_LANES, above < k ? best : ~0u);
}

/* Collects the keys that reach the threshold, if the lane's key does; returns how many there are by now. */
DEVICE int collect_key(uint32_t key, int id, uint32_t threshold, int found, gate_scratch &s)
{
  const bool reaches = key >= threshold;
  const unsigned lanes = __ballot_sync(ALL_LANES, reaches);
  const int at = found + __popc(lanes & ((1u << lane_id()) - 1));
  if (reaches && at < WARP_SIZE) s.found[at] = {id, key};
  return found + __popc(lanes);
}

template <int N>
DEVICE int collect_keys(const gate_args &a, const candidates<N> &c, const uint32_t *choice, uint32_t threshold,
                        gate_scratch &s)
{
  int found = 0;
  if (c.each == 1) {
#pragma unroll
    for (int i = 0; i < N; i++) found = collect_key(c.key[i], i * WARP_SIZE + lane_id(), threshold, found, s);
  } else {
    for (int first = 0; first < a.experts; first += WARP_SIZE) {
      const int e = first + lane_id();
      found = collect_key(e < a.experts ? choice[e] : KEY_NONE, e, threshold, found, s);
    }
  }
  return found;
}

/* The quick way: where a threshold leaves at most a warp of candidates, each counts those that rank above it. */
template <int N>
DEVICE bool take_by_threshold(const gate_args &a, int k, const candidates<N> &c, const uint32_t *choice,
                              gate_scratch &s, chosen_expert &chosen)
{
  int where;
  const uint32_t threshold = kth_of_lanes(c.best(where), k, s);
  if (threshold == KEY_NONE) return false;
  const int found = collect_keys(a, c, choice, threshold, s);
  if (found > WARP_SIZE) return false;
  __syncwarp();
  const chosen_expert own = lane_id() < found ? s.found[lane_id()] : chosen_expert{-1, KEY_NONE};
  int above = 0;
#pragma unroll 4
  for (int i = 0; i < found; i++) {
    const chosen_expert other = s.found[i];
    above += other.key > own.key || (other.key == own.key && other.id < own.id);
  }
  if (lane_id() < found) s.ordered[above] = own;
  __syncwarp();
  if (lane_id() < k) chosen = s.ordered[lane_id()];
  return true;
}

/* One after the other, for many ties and much of a row. */
template <int N>
DEVICE void take_in_turn(const gate_args &a, int k, candidates<N> &c, uint32_t *choice, chosen_expert &chosen)
{
#pragma unroll 1
  for (int j = 0; j < k; j++) {
    int where;
    const uint32_t best = c.best(where), winner = __reduce_max_sync(ALL_LANES, best);
    if (winner == KEY_NONE) break;
    const unsigned id = __reduce_min_sync(ALL_LANES, best == winner ? c.expert(where) : ~0u);
    if (lane_id() == j) chosen = {(int)id, winner};
    if (id % WARP_SIZE == lane_id()) c.remove(a, choice, where);
  }
}

/* Lane j gets the j-th best of k experts. */
template <int N>
DEVICE chosen_expert take_best(const gate_args &a, int k, candidates<N> &c, uint32_t *choice, gate_scratch &s)
{
  chosen_expert chosen = {-1, KEY_NAN};
  if (!take_by_threshold(a, k, c, choice, s, chosen)) take_in_turn(a, k, c, choice, chosen);
  return chosen;
}

#endif
