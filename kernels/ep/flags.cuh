/* Flags between ranks: told when all CTAs have come, waited for with a limit of time, and how a group gives up. */
#ifndef CUMOE_EP_FLAGS_CUH
#define CUMOE_EP_FLAGS_CUH

#include "ep/arena.cuh"

/* Every CTA calls this at its end. The last one to come stores this rank's flag at all ranks, after everything that any
 * CTA has stored, and gets true. A flag carries a number of tokens: sent[r], or (sent NULL) `tokens` to all. A grid of
 * one CTA needs no fence: flags are stored with release, which covers all its threads' stores before the barrier. */
DEVICE bool tell_when_all_have_come(const ep_args &a, uint64_t words, const uint32_t *sent, uint32_t tokens,
                                    unsigned *came, uint32_t exchange)
{
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = true;
    if (ctas_of_grid() > 1) {
      __threadfence_system();
      last = atomicAdd(came, 1) == ctas_of_grid() - 1;
      __threadfence();
    }
    if (last) *came = 0;
    if (last) counters_of(a)->exchanges = exchange;
  }
  __syncthreads();
  if (!last) return false;
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x)
    if (is_active(a, r))
      store_release_system(lane_of(a, r) + words + (uint64_t)a.rank * EP_LINE,
                           ep_flag(exchange, sent ? sent[r] : tokens));
  return true;
}

/* The word says that the group has given up. What ranks that were left out have written does not count. */
DEVICE bool is_heeded(const ep_args &a, uint64_t word)
{
  const int by = (int)(word & 0xffff);
  return word != 0 && (by >= EP_MAX_RANKS || is_active(a, by));
}

DEVICE bool has_given_up(const ep_args &a)
{
  return is_heeded(a, load_acquire_system(a.arena + a.at.abort));
}

DEVICE void give_up(const ep_args &a, int phase, int about)
{
  const unsigned long long word = ep_abort_word(EP_TIMEOUT, phase, about, a.rank);
  unsigned long long *own = reinterpret_cast<unsigned long long *>(a.arena + a.at.abort), was = 0, found;
  while ((found = atomicCAS(own, was, word)) != was && !is_heeded(a, found)) was = found;
  for (int r = 0; r < a.shape.ranks; r++)
    if (r != a.rank && is_active(a, r)) store_release_system(arena_of(a, r) + a.at.abort, word);
}

/* The host may change it while this waits, and graphs outlive what they were made with. */
DEVICE uint64_t timeout_ns(const ep_args &a)
{
  return *reinterpret_cast<const volatile uint64_t *>(a.arena + a.at.timeout);
}

/* Waits until the rank's flag is of this exchange; *tokens: the number it carries. False: the group has given up. */
DEVICE bool wait_for_rank(const ep_args &a, const char *flag, uint32_t exchange, int phase, int rank, uint32_t *tokens)
{
  const uint64_t begin = now_ns();
  for (unsigned turn = 0;; turn++) {
    const uint64_t word = load_acquire_system(flag);
    *tokens = (uint32_t)word;
    if ((int32_t)((uint32_t)(word >> 32) - exchange) >= 0) return true;
    if (turn % 8) continue;
    if (has_given_up(a)) return false;
    if (now_ns() - begin > timeout_ns(a)) give_up(a, phase, rank);
  }
}

/* One CTA; a thread polls the flags of its ranks. False: the group has given up. arrived NULL, or out: tokens of each
 * rank, at most what there is room for; 0 of one that was left out. */
DEVICE bool wait_for_all(const ep_args &a, uint64_t words, int phase, int32_t *arrived)
{
  const uint32_t exchange = (uint32_t) * (volatile unsigned long long *)&counters_of(a)->exchanges;
  const char *own = lane_of(a, a.rank) + words;
  /* A thread of its own looks whether the group has given up before. */
  bool all = threadIdx.x != blockDim.x - 1 || !has_given_up(a);
  for (int r = threadIdx.x; r < a.shape.ranks && all; r += blockDim.x) {
    uint32_t tokens = 0;
    if (is_active(a, r)) all = wait_for_rank(a, own + (uint64_t)r * EP_LINE, exchange, phase, r, &tokens);
    if (arrived) arrived[r] = (int32_t)min((int64_t)tokens, a.shape.capacity);
  }
  return __syncthreads_and(all);
}

#endif
