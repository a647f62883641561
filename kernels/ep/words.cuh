/* Words that other GPUs read and write: single PTX instructions at system scope. */
#ifndef CUMOE_EP_WORDS_CUH
#define CUMOE_EP_WORDS_CUH

#include "device/common.cuh"

/* As wait_for_earlier_grids (device/ptx.cuh), in two: while a grid waits for other ranks the next one does not start,
 * for it would take the room of a rank that is waited for. */
DEVICE void wait_for_earlier_grids_alone()
{
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_grid_start()
{
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

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

DEVICE uint64_t now_ns()
{
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

#endif
