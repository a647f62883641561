/*
 * Times elementwise operations, softmax and norms on 256 MiB, and some matrix products, by graph replay beside a device
 * copy of the same 256 MiB. TB/s: bytes that have to be read and written, over the time.
 */
#include "bench.h"

enum { MIB = 256, PLACES = 2 }; /* two of each operand in turn: nothing is found in L2 */

typedef enum op { COPY, ADD, MUL, SCALE, RELU, SIGMOID, SILU, GELU, GELU_TANH, SOFTMAX, LAYERNORM, RMSNORM, MATMUL } op;
static const char *const op_names[] = {"copy", "add",       "mul",     "scale",     "relu",    "sigmoid", "silu",
                                       "gelu", "gelu_tanh", "softmax", "layernorm", "rmsnorm", "matmul"};

typedef struct timed_item {
  op op;
  cumoe_dtype dtype;
  int64_t cols; /* matmul: of all three matrices */
} timed_item;

#define ROWS_OF(op_, dtype_)                                                                                           \
  {op_, dtype_, 64}, {op_, dtype_, 200}, {op_, dtype_, 1024}, {op_, dtype_, 2880}, {op_, dtype_, 4096},                \
      {op_, dtype_, 8192}, {op_, dtype_, 16384}, {op_, dtype_, 32768}, {op_, dtype_, 65536},                           \
  {                                                                                                                    \
    op_, dtype_, 131072                                                                                                \
  }
#define ALL_OF(dtype_)                                                                                                 \
  {COPY, dtype_, 4096}, {ADD, dtype_, 4096}, {MUL, dtype_, 4096}, {SCALE, dtype_, 4096}, {RELU, dtype_, 4096},         \
      {SIGMOID, dtype_, 4096}, {SILU, dtype_, 4096}, {GELU, dtype_, 4096}, {GELU_TANH, dtype_, 4096},                  \
      ROWS_OF(SOFTMAX, dtype_), ROWS_OF(LAYERNORM, dtype_), ROWS_OF(RMSNORM, dtype_), {MATMUL, dtype_, 1024},          \
  {                                                                                                                    \
    MATMUL, dtype_, 8192                                                                                               \
  }

static const timed_item items[] = {ALL_OF(CUMOE_BF16), ALL_OF(CUMOE_F16), ALL_OF(CUMOE_F32)};
enum { ITEMS = sizeof items / sizeof *items, EACH_TYPE = ITEMS / 3 };

typedef struct memory {
  cumoe_view_mut x[PLACES], other[PLACES], y[PLACES], parameters, workspace;
} memory;

typedef struct job {
  bench *bench;
  memory *memory;
  timed_item item;
} job;

static int64_t rows_of(const bench *b, const timed_item *i)
{
  const int64_t bytes = (int64_t)(b->device.device == CUMOE_DEVICE_CPU ? 1 : MIB) << 20;
  return bytes / (i->cols * (int64_t)cumoe_dtype_bytes(i->dtype));
}

/* The memory in the item's shape and type. */
static cumoe_view_mut shaped(const job *j, cumoe_view_mut m)
{
  return cumoe_matrix_mut(m.data, j->item.dtype, rows_of(j->bench, &j->item), j->item.cols, j->item.cols);
}

static cumoe_status multiply(const job *j, int32_t input, cumoe_stream stream)
{
  const int64_t n = j->item.cols;
  const memory *m = j->memory;
  cumoe_matmul_args a = {.size = sizeof a, .flags = CUMOE_MATMUL_TRANSPOSE_B, .workspace = m->workspace};
  a.a = cumoe_matrix(m->x[input].data, j->item.dtype, n, n, n);
  a.b = cumoe_matrix(m->other[input].data, j->item.dtype, n, n, n);
  a.c = cumoe_matrix_mut(m->y[input].data, j->item.dtype, n, n, n);
  return cumoe_matmul(j->bench->context, &a, stream);
}

static cumoe_status call(void *user, int32_t input, cumoe_stream stream)
{
  const job *j = user;
  const cumoe_context c = j->bench->context;
  const cumoe_view x = cumoe_const(shaped(j, j->memory->x[input])),
                   other = cumoe_const(shaped(j, j->memory->other[input])),
                   weight = cumoe_vector(j->memory->parameters.data, j->item.dtype, j->item.cols);
  const cumoe_view_mut y = shaped(j, j->memory->y[input]);
  switch (j->item.op) {
  case COPY: return cumoe_copy(c, y, x, stream);
  case ADD: return cumoe_add(c, x, other, y, stream);
  case MUL: return cumoe_mul(c, x, other, y, stream);
  case SCALE: return cumoe_scale(c, 3, x, y, stream);
  case RELU: return cumoe_relu(c, x, y, stream);
  case SIGMOID: return cumoe_sigmoid(c, x, y, stream);
  case SILU: return cumoe_silu(c, x, y, stream);
  case GELU: return cumoe_gelu(c, x, y, stream);
  case GELU_TANH: return cumoe_gelu_tanh(c, x, y, stream);
  case SOFTMAX: return cumoe_softmax(c, x, y, stream);
  case LAYERNORM: return cumoe_layernorm(c, x, weight, weight, 1e-5f, y, stream);
  case RMSNORM: return cumoe_rmsnorm(c, x, weight, 1e-5f, y, stream);
  default: return multiply(j, input, stream);
  }
}

static void print_item(const bench *b, const timed_item *i, const timing *t, double copy_us)
{
  const double bytes = (double)rows_of(b, i) * (double)i->cols * (double)cumoe_dtype_bytes(i->dtype),
               moved = (i->op == ADD || i->op == MUL ? 3 : 2) * bytes;
  if (t->median <= 0) return;
  printf("%-10s %-5s %8lld %10.1f", op_names[i->op], cumoe_dtype_name(i->dtype), (long long)i->cols, t->median);
  if (i->op == MATMUL)
    printf(" %8.1f TFLOPS\n", 2e-6 * (double)i->cols * (double)i->cols * (double)i->cols / t->median);
  else
    printf(" %8.3f TB/s %7.1f %%\n", 1e-6 * moved / t->median, 100 * moved / (2 * bytes) * copy_us / t->median);
}

/* On the CPU device only what is quickly done. */
static bool wanted(const bench *b, const timed_item *i)
{
  if (b->device.device == CUMOE_DEVICE_CPU) return i->op != MATMUL || i->cols <= 1024;
  return i->op != MATMUL || cumoe_matmul_prepare(b->context) == CUMOE_OK;
}

static cumoe_status run_type(bench *b, memory *m, const timed_item *first)
{
  job jobs[EACH_TYPE];
  work works[EACH_TYPE] = {{0}};
  timing timings[EACH_TYPE];
  clock_state clocks = {0};
  char text[160];
  for (int32_t i = 0; i < EACH_TYPE; ++i) {
    jobs[i] = (job){b, m, first[i]};
    if (wanted(b, &first[i])) works[i] = (work){call, &jobs[i], false};
  }
  TRY(measure(b, works, EACH_TYPE, PLACES, timings, &clocks));
  for (int32_t i = 0; i < EACH_TYPE; ++i) print_item(b, &first[i], &timings[i], timings[0].median);
  if (b->nvml) {
    clocks_text(&clocks, text, sizeof text);
    printf("# while copying: %s\n", text);
  }
  return CUMOE_OK;
}

static cumoe_status run(bench *b)
{
  memory m;
  size_t bytes;
  const int64_t size = (int64_t)MIB << 19; /* of two bytes */
  TRY(make_noise(b));
  for (int32_t i = 0; i < PLACES; ++i) {
    TRY(take(b, &b->store, CUMOE_BF16, 1, size, &m.x[i]));
    TRY(take(b, &b->store, CUMOE_BF16, 1, size, &m.other[i]));
    TRY(take(b, &b->store, CUMOE_BF16, 1, size, &m.y[i]));
    TRY(fill_noise(b, m.x[i], &b->unit));
    TRY(fill_noise(b, m.other[i], &b->unit));
  }
  TRY(take(b, &b->store, CUMOE_BF16, 1, 1 << 19, &m.parameters));
  TRY(fill_noise(b, m.parameters, &b->unit));
  TRY(cumoe_matmul_workspace(b->context, &bytes));
  TRY(take(b, &b->store, CUMOE_U8, 1, (int64_t)bytes, &m.workspace));
  printf("%s: medians of replays, 256 MiB of x; %% of the copy in the same run\n", b->device.name);
  printf("%-10s %-5s %8s %10s\n", "operation", "type", "columns", "us");
  for (int32_t i = 0; i < ITEMS; i += EACH_TYPE) TRY(run_type(b, &m, items + i));
  return CUMOE_OK;
}

int main(int argc, char **argv)
{
  return bench_main(argc, argv, "ops", CUMOE_DEVICE_AUTO, run);
}
