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

DEVICE void store_release_system(void *word, uint64_t value)
{
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
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
