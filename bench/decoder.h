/*
 * The demo's decoder as something to train: parameters, one pass forward and backward, one step of AdamW, all by public
 * calls on one context. Parameters, moments and gradients are f32; activations and the weights that they meet are of
 * the config's type.
 */
#ifndef DECODER_H
#define DECODER_H

#include <stdbool.h>
#include <stdint.h>

#include "../include/cumoe/cumoe.h"

typedef struct decoder_config {
  int32_t layers, hidden, vocab;
  int32_t heads, kv_heads, head_dim;
  int32_t experts, top_k, inter;
  int32_t batch, length; /* sequences of a step, tokens of each */
  double norm_eps, rope_base;
  float balance;     /* weight of the loss that spreads tokens over experts */
  float clip;        /* largest norm of all gradients */
  float decay;       /* of matrices; norms do not decay */
  cumoe_dtype dtype; /* CUMOE_F32 or CUMOE_BF16 */
} decoder_config;

typedef struct decoder decoder;

/* Parameters without values: decoder_start or decoder_write. NULL with a text in error. */
decoder *decoder_create(cumoe_context context, const decoder_config *config, char *error, size_t error_bytes);
void decoder_destroy(decoder *model);
const char *decoder_error(const decoder *model); /* text of the first call that answered false */

/* Random weights by a seed, moments of 0, no step done. */
bool decoder_start(decoder *model, uint64_t seed);

/* Forward and, if asked for, backward over batch * length tokens: the mean loss of the targets (negative: none). */
bool decoder_run(decoder *model, const int32_t *tokens, const int32_t *targets, bool backward, float *loss);

/* One step of the optimiser on such a batch; on a GPU it is only put on its stream, and no number of it is looked at.
 * The losses of DECODER_LOSSES steps may wait to be read. */
enum { DECODER_LOSSES = 256 };
bool decoder_train(decoder *model, const int32_t *tokens, const int32_t *targets, float rate);

/* Waits; the losses of the steps since the last call, oldest first: how many, or -1. */
int32_t decoder_losses(decoder *model, float *to);

/* Each is decoder_numbers floats; a checkpoint has to hold the first DECODER_STATES. */
typedef enum decoder_state {
  DECODER_WEIGHTS,
  DECODER_FIRST,
  DECODER_SECOND,
  DECODER_STATES,
  DECODER_GRADIENTS = DECODER_STATES /* of the last run backward */
} decoder_state;
int64_t decoder_numbers(const decoder *model);
bool decoder_read(decoder *model, decoder_state which, float *to);
bool decoder_write(decoder *model, decoder_state which, const float *from);
bool decoder_set_step(decoder *model, int64_t step); /* how many are done */

/* The parameters, in the order of their numbers. One of several experts is `pieces` matrices, and its name has a %d. */
typedef struct decoder_parameter {
  char name[96];
  int32_t pieces;
  int64_t rows, cols, at; /* of a piece (cols 0: a vector); first number */
  bool decays;
  double deviation; /* of random weights; 0: all are 1 */
} decoder_parameter;
int32_t decoder_parameters(const decoder *model, const decoder_parameter **list);

#endif
