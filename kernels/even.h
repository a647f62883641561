/*
 * few_up of the form even: its arguments, and the tensor maps through which it reads the weights (host/tmap.c encodes
 * them).
 *   up, down  (channel, of gate and up element by element what lies there; k; half; expert); a box is 64 x EVEN_GRANULE.
 *             up_first: the half that lies first in memory is up
 */
#ifndef CUMOE_EVEN_KERNELS_H
#define CUMOE_EVEN_KERNELS_H

#include "args.h"

enum { EVEN_GRANULE = 16 };

typedef struct few_sm90_args {
  few_args f;
  unsigned char up[128] __attribute__((aligned(64)));
  unsigned char down[128] __attribute__((aligned(64)));
  int32_t up_first;
} few_sm90_args;

#endif
