/* What kernels/ep/words.cuh has, between host threads that stand for GPUs: see there. */
#ifndef CUMOE_EP_WORDS_CUH
#define CUMOE_EP_WORDS_CUH

#include "device/common.cuh"
#include "device/ptx.cuh"

/* Whoever loads a word may be waiting for it. */
DEVICE uint64_t load_acquire_system(const void *word)
{
  grid::require_aligned(word, 8);
  grid::let_other_gpus_run();
  return __atomic_load_n(static_cast<const uint64_t *>(word), __ATOMIC_ACQUIRE);
}

DEVICE uint64_t load_relaxed_system(const void *word)
{
  grid::require_aligned(word, 8);
  grid::let_other_gpus_run();
  return __atomic_load_n(static_cast<const uint64_t *>(word), __ATOMIC_RELAXED);
}

DEVICE void store_release_system(void *word, uint64_t value)
{
  grid::require_aligned(word, 8);
  __atomic_store_n(static_cast<uint64_t *>(word), value, __ATOMIC_RELEASE);
}

DEVICE void store_relaxed_system(void *word, uint64_t value)
{
  grid::require_aligned(word, 8);
  __atomic_store_n(static_cast<uint64_t *>(word), value, __ATOMIC_RELAXED);
}

DEVICE void store_words_system(void *at, ulonglong2 words)
{
  grid::require_aligned(at, 16);
  store_relaxed_system(at, words.x);
  store_relaxed_system(static_cast<uint64_t *>(at) + 1, words.y);
}

DEVICE ulonglong2 load_words_system(const void *at)
{
  grid::require_aligned(at, 16);
  grid::let_other_gpus_run();
  const uint64_t *words = static_cast<const uint64_t *>(at);
  return {__atomic_load_n(words, __ATOMIC_RELAXED), __atomic_load_n(words + 1, __ATOMIC_RELAXED)};
}

/* Lines: here the flag is stored last and looked at first. */
struct line_words {
  ulonglong2 words;
  uint64_t flag;
};

DEVICE void store_line_system(void *at, ulonglong2 words)
{
  grid::require_aligned(static_cast<char *>(at) - grid::lane() % 8 * 16, 128);
  const bool last = grid::lane() % 8 == 7;
  store_relaxed_system(at, words.x);
  if (!last) store_relaxed_system(static_cast<uint64_t *>(at) + 1, words.y);
  __syncwarp();
  if (last) store_release_system(static_cast<uint64_t *>(at) + 1, words.y);
}

DEVICE line_words load_line_system(const void *at)
{
  const uint64_t *first = static_cast<const uint64_t *>(at) - grid::lane() % 8 * 2;
  grid::require_aligned(first, 128);
  const uint64_t flag = load_acquire_system(first + 15);
  return {load_words_system(at), flag};
}

DEVICE bool are_whole(const line_words &line, uint64_t flag)
{
  return __all_sync(ALL_LANES, line.flag == flag);
}

DEVICE void barrier_of_first(int threads)
{
  grid::named_barrier(1, threads);
}
DEVICE void barrier_of_last(int threads)
{
  grid::named_barrier(2, threads);
}

DEVICE void prefetch(const void *) {}

DEVICE uint64_t now_ns()
{
  return grid::now_ns();
}

#endif
