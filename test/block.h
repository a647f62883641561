/* A golden file as a layer: what cumoe is told about it, and where its numbers are. */
#ifndef BLOCK_H
#define BLOCK_H

#include "../bench/safetensors.h"
#include "test.h"

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
} block;

enum { BLOCK_COUNT = 5 };

/* Opens block `index` in folder. False with a text in error. */
bool block_open(int index, const char *folder, block *b, char *error, size_t error_bytes);
void block_close(block *b);

#endif
