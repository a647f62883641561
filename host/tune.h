/* The tune files (host/tune/): for a GPU model, which kernel serves which regime, and at which limits the layer's plan
 * changes. */
#ifndef CUMOE_TUNE_H
#define CUMOE_TUNE_H

#include "variants.h"

/* Classes of weights that regimes and limits are measured for: a column of the tune files. */
typedef enum weights_class {
  WEIGHTS_w16,
  WEIGHTS_f32,
  WEIGHTS_f8,
  WEIGHTS_s8,
  WEIGHTS_w4,
  WEIGHTS_CLASSES
} weights_class;

weights_class weights_class_of(weight_format format);

typedef enum limit_name {
#define LIMIT(name, unit, text) LIMIT_##name,
#include "tune/limits.def"
  LIMIT_COUNT
} limit_name;

enum { ANY_ROWS = INT32_MAX };

typedef struct tune_line {
  int8_t op, weights, form;
  int32_t up_to, bm, bn;
} tune_line;

typedef struct tune_file {
  const char *name;       /* host/tune/<name>.def */
  const char *model;      /* what the names of such GPUs have in them */
  int32_t cc;             /* that it is measured for; 0: any */
  const tune_line *lines; /* those of an operation stand together */
  int32_t line_count;
  double limits[LIMIT_COUNT][WEIGHTS_CLASSES];
} tune_file;

/* That of the GPU's model, else the first one of its compute capability, else any.def. */
const tune_file *find_tune_file(const char *gpu, int32_t cc);

typedef struct limit_words {
  const char *name, *unit, *text; /* as host/tune/limits.def has them */
} limit_words;
limit_words words_of_limit(limit_name limit);

#endif
