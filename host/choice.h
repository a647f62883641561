/* Pure functions of one operation's shape and the device: which kernel, which grid. No CUDA call, no globals. */
#ifndef CUMOE_CHOICE_H
#define CUMOE_CHOICE_H

#include <stdbool.h>
#include "../include/cumoe/context.h"
#include "tune.h"

enum { MIN_CC = 80 }; /* of the GPUs that the library serves */
enum { MAX_VARIANTS = 640 };

/* What a choice depends on besides the shape: facts of the device, and the rows of the table that run there. */
typedef struct machine {
  int32_t cc;   /* compute capability * 10 (90 = H200); 0 = CPU device */
  int32_t sms;  /* multiprocessors */
  int32_t smem; /* bytes of shared memory a block may ask for; a row that needs more was not loaded */
  const tune_file *tune;
  double limits[LIMIT_COUNT][WEIGHTS_CLASSES];                 /* the file's, unless one was set (cumoe_limit_set) */
  int32_t forced[OP_COUNT];                                    /* variant + 1; 0 = free */
  int16_t rows[MAX_VARIANTS];                                  /* by operation, in the order of the table */
  int16_t rows_begin[OP_COUNT + 1], lines_begin[OP_COUNT + 1]; /* of an operation, in `rows` and in the tune file */
} machine;

void machine_init(machine *m, const char *gpu, int32_t cc, int32_t sms, int32_t smem);

/* Whether the device can run the row: contexts load the kernels of these rows, and only these are chosen. */
bool runs_on(const machine *m, const variant *v);

/* Of a GPU: whether there are kernels for its architecture. */
const char *kernels_in_words(const machine *m);

/* One operation's shape. Fields that an operation does not have stay 0. */
typedef struct op_shape {
  operation op;
  int32_t in, out;      /* DT_* of activations as they are multiplied, and of the result */
  weight_format format; /* of weights */
  int32_t rows_mode;    /* ROWS_*: what becomes of activations */
  int32_t scale_run;    /* an aligned run of so many k has one scale (host/format.h); dense: SCALE_RUN_ALL */
  int32_t scale_type;   /* DT_* of scales of weights */
  int32_t scale_block;  /* weights along k that share one; 0: all */
  bool symmetric;       /* u4: codes less 8, without zero points */
  bool made_ahead;      /* a launch ahead makes rows ready for form fixed if it is chosen */
  weight_major major;   /* of the weights */
  bool tmap;            /* tensor maps can describe the operands */
  bool gathered;        /* up: rows of the activations are wherever the route says, and nobody copies them */
  bool by_expert;       /* activations are another row for each expert; quantize: makes those */
  int64_t tokens, rows; /* T; T k, or T when dense */
  int64_t expected;     /* of these rows, that come on average; 0: all */
  int32_t experts;      /* local experts; router, gate: logits a token */
  int32_t n, k;         /* output channels, reduction length; permute: n bytes a token;
                           quantize: elements of a row, of a group */
  int32_t top_k;
  bool in_one;    /* few_up: does few_down's work as well, of weights that lie alike; tmap: of both */
  bool rules;     /* gate: GATE_HAS_RULES */
  bool invariant; /* the row must not follow tokens and rows: CUMOE_MOE_BATCH_INVARIANT */
} op_shape;

/* The row to run: the forced one, else the best one for the shape; -1 if none can. */
int32_t choose(const machine *m, const op_shape *s);

/* CTAs (CUDA row) or work units (CPU row) for a chosen row. */
int64_t grid_size(const machine *m, const variant *v, const op_shape *s);

/* Whether a row of the table reads its operands through tensor maps (host/tmap.c). */
bool takes_tensor_maps(const variant *v);

/* Whether a row of up takes its rows in row order alone, as permute or the kernel itself copies them. */
bool takes_rows_in_order(const variant *v);

/* Whether a row reads weights of the format, or whatever weights are. */
bool takes_format(const variant *v, weight_format format);

/* Rows an active expert gets when pairs fall evenly (the host cannot know the true counts: graphs stay valid); router:
 * logits, in rows of 256. */
int64_t expected_rows(const op_shape *s);

/* The same on the scale of the tune files' lines (up_to). */
int64_t tune_scale(const machine *m, const op_shape *s);

/* Active experts, a little below the mean of even routing. */
double expected_active(const op_shape *s);

double limit_of(const machine *m, limit_name limit, weight_format weights);

/* How the map cuts its pairs: the same answer for kernel arguments, workspace and grid. */
typedef struct map_chunks {
  int32_t chunks, chunk_pairs;
} map_chunks;
enum { MAP_UNIT = 1024, MAP_MOST_CHUNKS = 256 };
map_chunks map_chunking(int64_t pairs);
int64_t map_room(int64_t pairs); /* chunks of the finest cut, 0 of one CTA: so more tokens never need less room */

static inline int64_t ceil_div(int64_t a, int64_t b)
{
  return (a + b - 1) / b;
}
static inline int64_t min64(int64_t a, int64_t b)
{
  return a < b ? a : b;
}

static inline int64_t max64(int64_t a, int64_t b)
{
  return a > b ? a : b;
}

#endif
