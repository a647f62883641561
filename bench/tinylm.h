/*
 * A small Qwen3-MoE language model of cumoe's calls: what an engine does, in its smallest form, on whichever device the
 * context has. On a GPU a token that is generated is one graph, which chooses it and runs it.
 */
#ifndef TINYLM_H
#define TINYLM_H

#include <stdbool.h>
#include <stdint.h>

#include "../include/cumoe/cumoe.h"

typedef struct tinylm_config {
  int32_t layers, hidden, vocab, context; /* context: positions of the key/value cache */
  int32_t heads, kv_heads, head_dim;
  int32_t experts, top_k, inter;
  double norm_eps, rope_base;
  bool renormalize;
} tinylm_config;

typedef struct tinylm tinylm;

/*
 * Loads folder/config.json and folder/model.safetensors. dtype: of activations and weights,
 * CUMOE_F32 (bf16 weights widened, exactly) or CUMOE_BF16. NULL with a text in error.
 */
tinylm *tinylm_create(cumoe_context context, const char *folder, cumoe_dtype dtype, char *error, size_t error_bytes);

/* The same with the experts' weights quantised as `format` says when they are loaded; dtype CUMOE_BF16. All zero: as
 * tinylm_create. */
tinylm *tinylm_create_quantised(cumoe_context context, const char *folder, cumoe_dtype dtype,
                                const cumoe_format *format, char *error, size_t error_bytes);
void tinylm_destroy(tinylm *model);

const tinylm_config *tinylm_get_config(const tinylm *model);
int64_t tinylm_expert_bytes(const tinylm *model); /* of the experts' weights in memory, scales included */
const char *tinylm_error(const tinylm *model);    /* text of the last call that answered false */

/* Appends `count` tokens at the current position; logits [rows, vocab] of the last `rows` of them. */
bool tinylm_forward(tinylm *model, const int32_t *tokens, int32_t count, int32_t rows, float *logits);
int32_t tinylm_likeliest(const float *logits, int32_t vocab);

/*
 * `count` tokens more, after the last one that was run: each is drawn from the logits over the temperature (0: the
 * likeliest), and run. At most TINYLM_NOISE, and no more than the context has room for. state: of the random numbers,
 * moves on. tell, unless NULL, is called with each token as soon as it is known; the device is a few ahead.
 */
enum { TINYLM_NOISE = 512 };
bool tinylm_generate(tinylm *model, int32_t count, double temperature, uint64_t *state, int32_t *tokens,
                     void (*tell)(void *user, int32_t token), void *user);

int32_t tinylm_position(const tinylm *model);
void tinylm_rewind(tinylm *model); /* to position 0 */

/* One MoE layer alone, as tinylm_forward runs it: in, out [count, hidden]; ids, weights [count, top_k] or
 * NULL. */
bool tinylm_moe(tinylm *model, int32_t layer, const float *in, int32_t count, float *out, int32_t *ids, float *weights);

/* Rows that each expert has had since creation, [layers, experts]. */
bool tinylm_load(tinylm *model, int64_t *load);

/* Called after each MoE layer of tinylm_forward; for tests. */
typedef struct tinylm_seen {
  int32_t layer, count;
  const float *in, *out; /* [count, hidden] */
  const int32_t *ids;    /* [count, top_k] */
  const float *weights;  /* [count, top_k] */
} tinylm_seen;
void tinylm_observe(tinylm *model, void (*observer)(void *user, const tinylm_seen *seen), void *user);

#endif
