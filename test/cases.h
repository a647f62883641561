/*
 * The cases of the stages and the layer, run through the public calls on any context: the same ones for the CPU
 * device, for CUDA, and for each forced kernel. All device outputs and scratch memory are poisoned, each case runs
 * with two poisons, and both results must be equal bit for bit. Here: router, gate, map, combine.
 */
#ifndef TEST_CASES_H
#define TEST_CASES_H

#include "test.h"

/* With a forced kernel NOT_SUPPORTED is an answer: such cases count as nothing. The others are counted here. */
extern bool cases_forced;
extern int64_t cases_served;
/* Only cases with activations of this type, 0: all. A kernel of one type need not be offered the others. */
extern int32_t cases_dtype;
bool case_wanted(int32_t dtype);

/* False: the case is over (dropped or failed). */
bool case_served(cumoe_context context, cumoe_status status, const char *call);

enum { PASSES = 2 };
void set_poison(int pass);

void cases_router(cumoe_context context);
void cases_gate(cumoe_context context);
void cases_map(cumoe_context context);
void cases_combine(cumoe_context context);

extern const int32_t case_experts[10]; /* 1 .. 1024 */
extern const int32_t case_tokens[12];  /* 0 .. 33 */

#endif
