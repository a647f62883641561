/* The exchange of kernels/ep/ep.h on the CPU device: the caller's thread does it and waits, yielding its core. */
#ifndef CUMOE_CPU_EXCHANGE_H
#define CUMOE_CPU_EXCHANGE_H

#include <stdbool.h>
#include "../ep/ep.h"

/* Tokens that are there, by a count that may lie on the device. */
int64_t cpu_ep_tokens(token_count tokens, fault_sink fault);

void cpu_ep_put(const ep_args *a);
void cpu_ep_answer(const ep_args *a);
/* 0, or the abort word that ended the wait; after a timeout it is this rank's own, and all ranks have been told. The
 * first leaves the ids that have arrived, checked, in ids_here. */
uint64_t cpu_ep_wait_tokens(const ep_args *a);
uint64_t cpu_ep_wait_answers(const ep_args *a);

/* Stores the abort word in every arena, in its own where none is yet. */
void cpu_ep_give_up(char *const *arenas, const ep_layout *at, int32_t ranks, int32_t self, uint64_t word);

/* Words that ranks tell each other through: release, acquire. */
void cpu_ep_store(void *word, uint64_t value);
uint64_t cpu_ep_load(const void *word);

/* Until the upper half of *word has reached `least`; or *abort, where there is one, is not 0: answers that; or the time
 * is up: EP_LATE. */
enum { EP_LATE = 1 };
uint64_t cpu_ep_wait(const void *word, uint32_t least, const void *abort, int64_t timeout_ns);

#endif
