/*
 * few_up of the form dealt: its arguments, the tensor maps through which it reads the weights (host/tmap.c encodes
 * them), and what its CTAs tell each other besides few_protocol (protocol.h).
 *   up, down  (channel, of gate and up element by element what lies there; k; half; expert); a box is 64 x FEW_PART_K.
 *             up_first: the half that lies first in memory is up
 *   cut       sums of up, of down: all ones, by the router, until written; in the place of y, and behind
 *   items     tickets drawn, less one: likewise
 */
#ifndef CUMOE_DEALT_KERNELS_H
#define CUMOE_DEALT_KERNELS_H

#include "args.h"

/* A part has a multiple of FEW_PART_K of k. A unit has FEW_PART_N channels, of gate and up half of them each. */
enum { FEW_PART_K = 64, FEW_PART_N = 128, FEW_PARTS_MOST = 16 };

/* Of a product: how its units are cut. The last `last` ones have parts[1], the others parts[0]. */
typedef struct dealt_cut {
  float *parts, *small; /* [part][pair][channel]; of the last ones [unit][part][column][channel of the unit] */
  int32_t part_k[2];    /* k of a part */
  int32_t last;
} dealt_cut;

typedef struct few_sm90_args {
  few_args f;
  unsigned char up[128] __attribute__((aligned(64)));
  unsigned char down[128] __attribute__((aligned(64)));
  dealt_cut cut[2]; /* up, down */
  int32_t *items;
  int32_t columns; /* the most rows of an active expert */
  int32_t up_first;
} few_sm90_args;

#endif
