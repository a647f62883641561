/* The exchange of kernels/ep/ep.h on the CPU device: the caller's thread does it and waits, yielding its core. */
#ifndef CUMOE_CPU_EXCHANGE_H
#define CUMOE_CPU_EXCHANGE_H

#include <stdbool.h>
#include "../ep/ep.h"

/* Tokens that are there, by a count that may lie on the device. */
int64_t cpu_ep_tokens(token_count tokens, fault_sink fault);

/* How a group sends, and to whom. CUDA kernels read it in their arguments and their arena. */
typedef struct ep_ways {
  uint64_t active[EP_MAX_RANKS / 64]; /* a bit a rank: it has not been left out */
  bool dedup;                         /* a token goes to the ranks that have an expert of it, not to all */
} ep_ways;

static inline bool ep_is_active(const ep_ways *w, int32_t rank)
{
  return __atomic_load_n(&w->active[rank / 64], __ATOMIC_RELAXED) >> rank % 64 & 1;
}

/* The abort word, if it is of a rank that takes part; else 0. */
static inline uint64_t ep_heeded(const ep_ways *w, uint64_t word)
{
  const int32_t by = (int32_t)(word & 0xffff);
  return by < EP_MAX_RANKS && !ep_is_active(w, by) ? 0 : word;
}

void cpu_ep_put(const ep_args *a, const ep_ways *ways);
void cpu_ep_answer(const ep_args *a, const ep_ways *ways);
/* 0, or the abort word that ended the wait; after a timeout it is this rank's own, and all ranks have been told. The
 * first leaves the ids that have arrived, checked, in ids_here. */
uint64_t cpu_ep_wait_tokens(const ep_args *a, const ep_ways *ways);
uint64_t cpu_ep_wait_answers(const ep_args *a, const ep_ways *ways);

/* Stores the abort word in every arena, in its own where none is yet. */
void cpu_ep_give_up(char *const *arenas, const ep_layout *at, const ep_shape *shape, const ep_ways *ways, int32_t self,
                    uint64_t word);

/* Words that ranks tell each other through: release, acquire. */
void cpu_ep_store(void *word, uint64_t value);
uint64_t cpu_ep_load(const void *word);

enum { EP_LATE = 1 }; /* in place of an abort word: the time was up */

#endif
