/* Flags between ranks: told when what they stand for was stored, waited for with a limit of time, and how a group gives
 * up. */
#ifndef CUMOE_EP_FLAGS_CUH
#define CUMOE_EP_FLAGS_CUH

#include "ep/arena.cuh"

/* ---- telling ---- */

/* One CTA's share of the words of this rank's flag at each rank, by `threads` threads of it that have met at a barrier
 * since their stores: a release covers them all. A flag carries a number of tokens: sent[r], or (NULL) `tokens`.
 * RELEASES: there are such stores. */
template <bool RELEASES = true>
DEVICE void tell(const ep_args &a, uint64_t words, const uint32_t *sent, uint32_t tokens, uint32_t exchange,
                 unsigned cta, unsigned ctas, int threads)
{
#pragma unroll 1
  for (int i = threadIdx.x; i < a.shape.ranks * EP_FLAG_WORDS; i += threads) {
    const int r = i / EP_FLAG_WORDS, word = i % EP_FLAG_WORDS;
    if (word % ctas != cta || !is_active(a, r)) continue;
    char *at = lane_of(a, r) + words + (uint64_t)a.rank * EP_LINE + word * sizeof(uint64_t);
    const uint64_t flag = ep_flag(exchange, sent ? sent[r] : tokens);
    if (RELEASES)
      store_release_system(at, flag);
    else
      store_relaxed_system(at, flag);
  }
}

/* The last CTA to come tells for all of them, behind all that they have stored; true there. A CTA by itself needs no
 * fence. Of a put that is two grids neither knows whether the other has read the number of exchanges: who waits for
 * both changes it. */
DEVICE bool tell_when_all_have_come(const ep_args &a, uint64_t words, const uint32_t *sent, uint32_t tokens,
                                    unsigned *came, uint32_t exchange)
{
  __shared__ bool last;
  if (threadIdx.x == 0) {
    last = true;
    if (ctas_of_grid(a) > 1) {
      __threadfence_system();
      last = atomicAdd(came, 1) == ctas_of_grid(a) - 1;
      __threadfence();
    }
    if (last) *came = 0;
    if (last && a.puts == EP_PUTS_ALL) counters_of(a)->exchanges = exchange;
  }
  __syncthreads();
  if (last) tell(a, words, sent, tokens, exchange, a.puts == EP_PUTS_SLOTS, a.puts == EP_PUTS_ALL ? 1 : 2, blockDim.x);
  return last;
}

/* CTAs tell each for itself. Whoever waits for all ranks, this one included, has then heard of all CTAs of the grid;
 * if nobody in it waits, the last CTA has to know that it is. */
DEVICE bool tells_for_itself(const ep_args &a)
{
  return a.then_waits && ctas_of_grid(a) <= EP_FLAG_WORDS;
}

/* Every CTA calls this at its end. True in one of them, which waits for the others if anybody does. */
DEVICE bool tell_all(const ep_args &a, uint64_t words, const uint32_t *sent, uint32_t tokens, unsigned *came,
                     uint32_t exchange)
{
  __syncthreads();
  if (!tells_for_itself(a)) return tell_when_all_have_come(a, words, sent, tokens, came, exchange);
  tell(a, words, sent, tokens, exchange, cta_of_grid(a), ctas_of_grid(a), blockDim.x);
  return cta_of_grid(a) == 0;
}

/* ---- giving up ---- */

/* The word says that the group has given up. What ranks that were left out have written does not count. */
DEVICE bool is_heeded(const ep_args &a, uint64_t word)
{
  const int by = (int)(word & 0xffff);
  return word != 0 && (by >= EP_MAX_RANKS || is_active(a, by));
}

DEVICE bool has_given_up(const ep_args &a)
{
  return is_heeded(a, load_relaxed_system(a.arena + a.at.abort)); /* nothing else is read that it speaks of */
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

/* Of a thread that waits. */
struct patience {
  uint64_t begin = now_ns();
  unsigned turns = 0;

  /* Asked after each look in vain: the group has given up, which is heeded at once or when the time is over; or this
   * gives it up. */
  DEVICE bool ends(const ep_args &a, int phase, int rank, bool at_once)
  {
    if (++turns % 8) return false;
    const bool late = now_ns() - begin > timeout_ns(a);
    if ((at_once || late) && has_given_up(a)) return true;
    if (late) give_up(a, phase, rank);
    return false;
  }
};

/* ---- waiting ---- */

DEVICE uint32_t exchange_now(const ep_args &a)
{
  return (uint32_t) * (volatile unsigned long long *)&counters_of(a)->exchanges;
}

/* Waits until a word of the rank's flag is of this exchange; *tokens: what else it says. False: the group has given up.
 * This rank's own CTAs come whatever the others do, and may still have to read how many exchanges there were. QUIETLY:
 * other warps of the SM work meanwhile, and each load that acquires empties their L1. */
template <bool QUIETLY>
DEVICE bool wait_for_word(const ep_args &a, const char *word, uint32_t exchange, int phase, int rank, uint32_t *tokens)
{
  for (patience p;;) {
    uint64_t value = QUIETLY ? load_relaxed_system(word) : load_acquire_system(word);
    if ((int32_t)((uint32_t)(value >> 32) - exchange) >= 0) {
      if (QUIETLY) value = load_acquire_system(word);
      *tokens = (uint32_t)value;
      return true;
    }
    if (p.ends(a, phase, rank, rank != a.rank)) return false;
  }
}

/* Who waits together: a CTA, or whole warps of it, its first FIRST threads, while the others do something else. */
constexpr int WHOLE_CTA = 0;
template <int FIRST> DEVICE int waiting_threads()
{
  return FIRST == WHOLE_CTA ? blockDim.x : FIRST;
}
template <int FIRST> DEVICE void meet()
{
  if (FIRST == WHOLE_CTA)
    __syncthreads();
  else
    barrier_of_first(FIRST);
}

/* By all of them; a thread polls a word. False: the group has given up. arrived NULL, or out: what each rank's flag
 * carries; 0 of one that was left out. */
template <int FIRST>
DEVICE bool wait_for_all(const ep_args &a, uint64_t words, int phase, uint32_t exchange, uint32_t *arrived)
{
  __shared__ bool in_vain;
  const char *own = lane_of(a, a.rank) + words;
  const int threads = waiting_threads<FIRST>();
  if (threadIdx.x == 0) in_vain = false;
  meet<FIRST>();
  /* A thread of its own looks whether the group has given up before. */
  bool all = threadIdx.x != threads - 1 || !has_given_up(a);
#pragma unroll 1
  for (int i = threadIdx.x; i < a.shape.ranks * EP_FLAG_WORDS; i += threads) {
    const int r = i / EP_FLAG_WORDS, word = i % EP_FLAG_WORDS;
    uint32_t tokens = 0;
    if (!ep_is_word_of(a.puts, word)) continue;
    if (is_active(a, r) && (all || r == a.rank))
      all &= wait_for_word<FIRST != WHOLE_CTA>(a, own + (uint64_t)r * EP_LINE + word * sizeof(uint64_t), exchange,
                                               phase, r, &tokens);
    if (arrived && word == (a.puts == EP_PUTS_SLOTS)) arrived[r] = tokens;
  }
  if (!all) in_vain = true;
  meet<FIRST>();
  return !in_vain;
}

#endif
