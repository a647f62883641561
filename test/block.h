/* A golden file as a layer: what cumoe is told about it, and its numbers in one plain form for the oracle. */
#ifndef BLOCK_H
#define BLOCK_H

#include "safetensors.h"
#include "test.h"

/* The projections of `count` experts as f32, whatever the file's layout: [count, inter, hidden] and [count,
 * hidden, inter]. */
typedef struct block_experts {
  int32_t count, inter;
  float *gate, *up, *down;
  float *gate_bias, *up_bias, *down_bias; /* [count, inter] twice, [count, hidden]; NULL: none */
} block_experts;

typedef struct block {
  const char *name;
  safetensors file;
  cumoe_moe_desc desc; /* dtype unset */
  int32_t gate_order, major;
  int64_t tokens;
  bool ordered; /* ids and weights are in order of decreasing score */
  /* native tensors; NULL: the architecture has none */
  const file_tensor *gate_up, *gate_up_bias, *down, *down_bias, *router, *router_bias, *select_bias;
  const file_tensor *shared_gate, *shared_up, *shared_down;
  const file_tensor *input, *output, *logits, *weights, *ids;
  /* as f32; NULL likewise */
  float *x, *router_f, *router_bias_f, *select_bias_f;
  block_experts routed, shared;
} block;

enum { BLOCK_COUNT = 5 };

/* Opens block `index` in folder. False with a text in error. */
bool block_open(int index, const char *folder, block *b, char *error, size_t error_bytes);
void block_close(block *b);

/*
 * One token's output in exact arithmetic, with these ids and weights, from the plain form alone. bound: the
 * largest change, in units of roundoff, that storing the intermediates in a shorter type can make (without
 * out's own).
 */
void block_exact(const block *b, int64_t token, const int32_t *ids, const double *weights, bounded *out);

#endif
