/* Words that other GPUs read and write: single PTX instructions at system scope. */
#ifndef CUMOE_EP_WORDS_CUH
#define CUMOE_EP_WORDS_CUH

#include "device/common.cuh"
#include "device/ptx.cuh"

DEVICE uint64_t load_acquire_system(const void *word)
{
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

DEVICE uint64_t load_relaxed_system(const void *word)
{
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

DEVICE void store_release_system(void *word, uint64_t value)
{
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

DEVICE void store_relaxed_system(void *word, uint64_t value)
{
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

/* Two words at once, each of them whole; nothing is said of the one by the other. */
DEVICE void store_words_system(void *at, ulonglong2 words)
{
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(words.x), "l"(words.y) : "memory");
}

DEVICE ulonglong2 load_words_system(const void *at)
{
  ulonglong2 words;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(words.x), "=l"(words.y) : "l"(at) : "memory");
  return words;
}

/* ---- lines ---- */

/* 128 bytes that eight lanes of a warp store, and load, by one instruction, 16 bytes each; the last 8 are their flag.
 * Whoever finds the flag has all of them: a GPU's memory and NVLink keep what such an instruction says together, which
 * NCCL's LL128 lives by as well; PTX says so of 16 bytes at most. All lanes of a warp come to these. */
struct line_words {
  ulonglong2 words;
};

DEVICE void store_line_system(void *at, ulonglong2 words)
{
  __syncwarp();
  store_words_system(at, words);
}

DEVICE line_words load_line_system(const void *at)
{
  return {load_words_system(at)};
}

/* All of a warp's lines have this flag. */
DEVICE bool are_whole(const line_words &line, uint64_t flag)
{
  constexpr unsigned LAST = 0x80808080u;
  return (__ballot_sync(ALL_LANES, line.words.y == flag) & LAST) == LAST;
}

/* Among the first `threads` threads of the CTA, or its last: whole warps, fewer than all. */
DEVICE void barrier_of_first(int threads)
{
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}
DEVICE void barrier_of_last(int threads)
{
  asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory");
}

/* Into L2, where it is the same for all. */
DEVICE void prefetch(const void *at)
{
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

DEVICE uint64_t now_ns()
{
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

#endif
