/* The layers of shapes.def. */
#ifndef BENCH_SHAPES_H
#define BENCH_SHAPES_H

#include "../include/cumoe/cumoe.h"

typedef enum shape_when { SHAPE_always, SHAPE_request, SHAPE_cpu } shape_when;

typedef struct shape {
  const char *name;
  int32_t experts, top_k, hidden, inter;
  cumoe_routing routing;
  shape_when when;
} shape;

int32_t shape_count(void);
shape shape_at(int32_t index);

#endif
