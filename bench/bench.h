/*
 * The benchmark of the layer: a table of shapes (shapes.def), a table of things to time (layer, stages,
 * peers), one driver. A cell is a shape with a number of tokens; it is one row of the printed table and of
 * the CSV file.
 */
#ifndef BENCH_H
#define BENCH_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <cuda_runtime_api.h>
#include <library_types.h>

#define CUMOE_EXPERIMENTAL
#include "../include/cumoe/cumoe.h"
#include "../kernels/formats.h"
#include "shapes.h"

enum { MAX_INPUTS = 8, MAX_TOKENS = 32, MAX_FORCED = 16, MAX_BUFFERS = 160, MAX_KINDS = 16 };

/* Of n elements of weights, or of activations, of a layer of this type. */
static inline int64_t format_size(cumoe_dtype dtype, int64_t n)
{
  return format_bytes(dense_format((int32_t)dtype), n);
}

/* What weights are, by the name that --format has for it (formats.c). */
typedef struct kind {
  const char *name, *text;
  const char *goal;    /* class of targets.def that it is measured by; "": none */
  cumoe_format format; /* of gate, up and down; all zero: not quantised */
} kind;

typedef struct options {
  const char *models; /* comma-separated names, "all", or NULL: those that always run */
  const char *csv, *ids, *cublas, *commit;
  const char *forced[MAX_FORCED]; /* rows of the kernel table, by name or index */
  int64_t tokens[MAX_TOKENS];
  const kind *kinds[MAX_KINDS];
  int32_t forced_count, tokens_count, kinds_count;
  int32_t device;
  cumoe_dtype dtype, router;         /* router: of its weights; 0: dtype */
  double zipf;                       /* exponent of the experts' popularity; 0: the router decides */
  bool one;                          /* every slot of every token to one expert */
  bool in_out;                       /* weights [E, in, out] */
  bool invariant;                    /* plans of BATCH_INVARIANT */
  bool masked;                       /* the layer is cumoe_masked_forward */
  bool formats;                      /* kinds were asked for: a line has what one compares them by */
  bool plan;                         /* print what a cell launches */
  bool check;                        /* look at results only, time nothing */
  bool quick, coarse, grouped, list; /* quick: short samples; coarse: shorter still, for bench/tune */
  bool apart;                        /* a replay of one call at a time, waited for, as peer_time.py has it */
} options;

/* What the floor is made of: reading, and products of 16 bits and of 8. */
typedef struct rates {
  double bytes_per_second, flops16, flops8;
} rates;

typedef struct gpu_rates {
  const char *name; /* part of the device's name */
  rates datasheet, measured;
} gpu_rates;

/* A block of random numbers on the device, handed out piece by piece. */
typedef struct noise {
  cumoe_view block;
  int64_t at; /* bytes */
} noise;

typedef struct store {
  cumoe_buffer buffers[MAX_BUFFERS];
  int32_t count;
} store;

/* A kind's cells in a line: sums of logarithms. */
typedef struct tally {
  int32_t cells, goals, met, dense, wrong;
  double part, over, gain;
} tally;

typedef struct cublas cublas;
typedef struct nvml nvml;

typedef struct bench {
  options o;
  cumoe_context context;
  cumoe_device_info device;
  const gpu_rates *rates; /* NULL: not known, no floor */
  cudaStream_t stream;    /* NULL on the CPU device */
  store store;
  noise unit, small; /* standard deviation 1 and 0.02 */
  uint64_t seed;
  tally tallies[MAX_KINDS];
  cublas *blas; /* NULL: not there */
  nvml *nvml;   /* NULL: not there */
  FILE *csv, *ids;
  char error[512]; /* text of a failure that is not the library's */
} bench;

/* A layer in memory. */
/* Of all experts, one below the other, [E * out, in], in units of storage. */
typedef struct projection {
  cumoe_view data, scale, global;
  int64_t out, in; /* of an expert, in weights */
  int32_t halves;
} projection;

typedef struct model {
  const shape *shape;
  const kind *kind;
  store store;
  cumoe_moe_desc desc;
  cumoe_plan plan;
  cumoe_weights weights;
  projection gate_up, down; /* out: 2I; H */
  cumoe_view router, select_bias;
} model;

/* Who decides which experts a token goes to: the layer's router, or the caller by logits or by ids. */
typedef enum spread {
  SPREAD_router,
  SPREAD_even, /* logits, all experts alike */
  SPREAD_zipf, /* logits */
  SPREAD_one   /* ids, all of them the same */
} spread;

/* What a cell of weights that are not quantised took and gave: others are held against it. */
typedef struct reference {
  double us;     /* 0: not timed */
  int64_t count; /* elements of `out` from its start */
  uint16_t *out; /* room for REFERENCE */
} reference;
enum { REFERENCE = 1 << 18 };

/* One layer and T tokens: everything that the timed calls read and write. */
typedef struct cell {
  bench *bench;
  model *model;
  store store;
  spread spread;
  int64_t tokens, rows;
  int32_t inputs; /* inputs that the calls rotate over, so that no call finds its weights in L2 */
  cumoe_view x[MAX_INPUTS];
  cumoe_view_mut logits[MAX_INPUTS], ids[MAX_INPUTS], weights[MAX_INPUTS], counts[MAX_INPUTS];
  cumoe_route route[MAX_INPUTS];
  cumoe_view_mut h, y, out, workspace, map_workspace;
  cumoe_masked_args masked; /* with --masked; its counts by input: */
  cumoe_view masked_counts[MAX_INPUTS];
  int32_t *host_counts; /* [inputs, E] */
  reference *dense;     /* to be written, or to be compared with */
} cell;

/* ---- opening and closing (setup.c) ---- */

/* Context, stream, rates and clocks of b->o.device; bench_close after a failure too. */
cumoe_status bench_open(bench *b);
void bench_close(bench *b);
/* A program whose only option is --quick; its exit status. */
int bench_main(int argc, char **argv, const char *name, int32_t device, cumoe_status (*run)(bench *b));

/* ---- what is timed (timing.c) ---- */

/* One thing to time: a call on one of the inputs, capturable into a graph. */
typedef struct work {
  cumoe_status (*call)(void *user, int32_t input, cumoe_stream stream);
  void *user;    /* NULL: not to be timed */
  bool optional; /* a failure leaves it untimed */
} work;

typedef struct timing {
  double median, least, most; /* microseconds a call; 0: not timed */
} timing;
timing summary(double *samples, int32_t count); /* sorts them */

/* Times all works, their samples taken in turn, so that a drifting clock or a power limit meets all alike. `clocks`,
 * read while the first work runs, may be NULL. */
typedef struct clock_state clock_state;
cumoe_status measure(bench *b, const work *works, int32_t count, int32_t inputs, timing *timings, clock_state *clocks);
/* CUDA: median microseconds of the host for an eager call. */
cumoe_status measure_host(bench *b, const work *w, int32_t inputs, double *us);

/* ---- clocks (clocks.c) ---- */

/* The GPU's own word on its state; 0: not known. */
struct clock_state {
  unsigned sm_mhz, sm_most_mhz, memory_mhz, watts, limit_watts;
  unsigned long long reasons; /* NVML's bits for what holds the clock down */
};

nvml *nvml_open(bench *b); /* NULL: not there */
void nvml_close(nvml *n);
clock_state clocks_now(const nvml *n);
void clocks_text(const clock_state *c, char *text, size_t bytes);

/* ---- a cell (cell.c) ---- */

typedef enum item {
  ITEM_layer,
  ITEM_router,
  ITEM_gate,
  ITEM_map,
  ITEM_up,
  ITEM_down,
  ITEM_combine,
  ITEM_dense,
  ITEM_grouped,
  ITEM_COUNT
} item;
extern const char *const item_names[ITEM_COUNT];

cumoe_status make_noise(bench *b);
cumoe_status model_create(bench *b, const shape *s, const kind *k, model *m);
void model_destroy(model *m);
cumoe_status cell_create(bench *b, model *m, int64_t tokens, spread how, cell *c);
void cell_destroy(cell *c);
cumoe_status cell_forward(cell *c, int32_t input, bool report,
                          cumoe_stream stream); /* report: also ids, weights, counts */

/* The works of a cell, by item: layer and stages. */
void cell_works(cell *c, work works[ITEM_COUNT]);

/* Device memory that lives as long as the store; filled with pieces of a noise, each piece another one. */
cumoe_status take(bench *b, store *s, cumoe_dtype dtype, int64_t rows, int64_t cols, cumoe_view_mut *view);
cumoe_status fill_noise(bench *b, cumoe_view_mut dst, noise *from);
void store_free(store *s);

uint64_t random_bits(uint64_t *state);
double random_normal(uint64_t *state);

/* ---- formats of weights (formats.c) ---- */

extern const kind not_quantised;
/* Adds the kinds of a list of names to o.kinds, "all" for each; those that are not quantised come first. False:
 * `bad` is a name that is none. */
bool kinds_parse(const char *list, options *o, char *bad, size_t bad_bytes);
const char *kind_name(const kind *k, cumoe_dtype dtype);
bool kind_is_dense(const kind *k);
bool kind_has_codes_of_rows(const kind *k); /* activations become codes as well */
weight_format kind_class(const kind *k, cumoe_dtype dtype);
/* Bytes of one expert's weights, scales included. */
double kind_bytes(const kind *k, const shape *s, cumoe_dtype dtype);
/* Blocks of scales of one projection of an expert, along out and along in. */
void kind_blocks(const kind *k, const projection *p, int64_t *rows, int64_t *cols);
/* Allocates and fills the weights of all experts: of each kind they are the same, rounded to its codes. */
cumoe_status projection_create(bench *b, model *m, projection *p);
/* Expert 0's, as bind takes a stack. */
cumoe_status projection_describe(const model *m, const projection *p, cumoe_projection *d);

/* What a code stands for, offset taken off, and what a scale is, by their definitions. */
double code_value(const kind *k, uint8_t code);
double scale_value(const kind *k, const void *scales, int64_t at);

/* What the layer has to reach: false, if no one says. */
typedef struct goal {
  double us, target, peer; /* us: the smaller of target and peer */
  const char *peer_name;
} goal;
bool goal_of(const kind *k, const char *layer, int64_t tokens, goal *g);

/* ---- peers (dense.c) ---- */

/* Opens cuBLAS; NULL with a text in b->error when it is not there. */
cublas *cublas_open(bench *b);
void cublas_close(cublas *blas);
int cublas_version(const cublas *blas);

/* c [m, n] = a b of the bench's dtype, row-major without gaps: a [m, k] or, transposed, [k, m]; b [k, n] or [n, k]. */
typedef struct dense_product {
  const void *a, *b;
  void *c;
  int64_t m, n, k;
  bool a_transposed, b_transposed;
} dense_product;
cumoe_status cublas_multiply(bench *b, const dense_product *p);

typedef struct peers peers;
/* Adds the cuBLAS works of a cell: dense from 2048 rows up, grouped when asked for. Needs the cell's counts.
 */
cumoe_status peers_create(cell *c, peers **p, work works[ITEM_COUNT]);
void peers_destroy(peers *p);

/* ---- correctness (check.c) ---- */

typedef struct verdict {
  bool finite, repeatable, routed, faultless;
  double worst; /* largest error / bound of the elements computed again in double */
  double error; /* of the outputs against those of weights that are not quantised, root mean squares; 0: not known */
} verdict;

/* Runs the layer on every input, fills c->host_counts, and looks at the results of the first input. */
cumoe_status check_cell(cell *c, verdict *v);
bool verdict_good(const verdict *v);

/* ---- what is printed (report.c) ---- */

typedef struct result {
  const cell *cell;
  verdict verdict;
  timing timings[ITEM_COUNT];
  clock_state clocks;
  double active, weight_bytes, flops, floor_us; /* means over the inputs */
  double host_us;                               /* of the host for an eager call of the layer; 0: not timed */
  double needed_us; /* floor at the part of it that evenly spread tokens reach; 0: not a skewed cell */
} result;

void print_header(const bench *b);
void print_shape(const bench *b, const model *m);
void print_row(const bench *b, const result *r);

void tally_add(tally *t, const result *r);
void print_tallies(const bench *b, const tally *tallies);
rates rates_of(const bench *b); /* those of the floor */
bool csv_open(bench *b);
void csv_row(const bench *b, const result *r);

/* The experts that a cell's tokens went to, for peers.py: "model tokens top_k inputs" on a line, then the ids of one
 * input after the other, [tokens, top_k] little-endian i32. */
bool ids_open(bench *b);
cumoe_status ids_write(const bench *b, const cell *c);
const char *failure_text(const bench *b);

#define TRY(expression)                                                                                                \
  do {                                                                                                                 \
    cumoe_status try_status_ = (expression);                                                                           \
    if (try_status_ != CUMOE_OK) return try_status_;                                                                   \
  } while (0)

#define TRY_CUDA(b, expression)                                                                                        \
  do {                                                                                                                 \
    cudaError_t try_error_ = (expression);                                                                             \
    if (try_error_ != cudaSuccess) {                                                                                   \
      snprintf((b)->error, sizeof(b)->error, "%s: %s", #expression, cudaGetErrorString(try_error_));                   \
      return CUMOE_ERR_CUDA;                                                                                           \
    }                                                                                                                  \
  } while (0)

#endif
