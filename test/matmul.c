/*
 * The matrix product against double: transposes, types, alpha, beta, leading dimensions, batches; on CUDA also cuBLAS's
 * coming and going, captures, threads. An element may be off by (K + 8) 2^-24 sum |alpha a b| + 4 2^-24 |beta c|, and
 * the rounding to its type; with beta and a 16-bit c, cuBLAS may also have rounded the product first. Products of small
 * integers have to be exact.
 */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "cases.h"
#include "oracle.h"

static const double u = 0x1p-24;

typedef struct product {
  int64_t m, n, k, batch;
  int32_t dtype, c_dtype;
  uint32_t flags;
  float alpha, beta;
  bool integers, beside, shared_a; /* beside: the matrices of the batch lie in the columns of one */
  int64_t pad;
} product;

/* The matrices of a batch as one tensor: behind each other, or side by side. */
typedef struct matrices {
  tensor all;
  int64_t rows, cols, count;
  bool beside;
} matrices;

static matrices make_matrices(rng *r, const product *p, int32_t dtype, int64_t rows, int64_t cols, int64_t count)
{
  matrices s = {{0}, rows, cols, count, p->beside};
  const int64_t all_rows = p->beside ? rows : rows * count, all_cols = p->beside ? cols * count : cols;
  s.all = p->integers ? tensor_integers(r, dtype, all_rows, all_cols, 3)
                      : tensor_normal(r, dtype, all_rows, all_cols, 0, 1);
  return s;
}

static double element(const matrices *s, int64_t i, int64_t row, int64_t col)
{
  i %= s->count;
  return s->beside ? tensor_get(&s->all, row, i * s->cols + col) : tensor_get(&s->all, i * s->rows + row, col);
}

/* The first matrix as a view of all, and how far the next one is. */
static cumoe_view first_of(const matrices *s, cumoe_view all, int64_t *stride)
{
  *stride = s->count == 1 ? 0 : s->beside ? s->cols : s->rows * all.ld;
  all.rows = s->rows;
  all.cols = s->cols;
  return all;
}

static cumoe_view_mut workspace_for(cumoe_context context)
{
  size_t bytes = 0;
  CHECK_OK(cumoe_matmul_workspace(context, &bytes));
  cumoe_view_mut w = device_new(context, CUMOE_U8, 1, (int64_t)bytes, 256 - (int64_t)bytes % 256);
  return bytes ? w : no_view_mut();
}

static bounded expected(const product *p, const matrices *a, const matrices *b, const matrices *c, int64_t i,
                        int64_t row, int64_t col)
{
  const bool ta = p->flags & CUMOE_MATMUL_TRANSPOSE_A, tb = p->flags & CUMOE_MATMUL_TRANSPOSE_B;
  const double alpha = p->alpha == 0 ? 1 : (double)p->alpha, beta = (double)p->beta;
  double sum = 0, size = 0;
  for (int64_t k = 0; k < p->k; k++) {
    const double x = ta ? element(a, i, k, row) : element(a, i, row, k),
                 y = tb ? element(b, i, col, k) : element(b, i, k, col);
    sum += x * y;
    size += fabs(x * y);
  }
  const double before = beta != 0 ? beta * element(c, i, row, col) : 0;
  const double error = p->integers ? 0 : ((double)p->k + 8) * u * fabs(alpha) * size + 4 * u * fabs(before);
  const double first = before != 0 && !p->integers ? 2 * unit_roundoff(p->c_dtype) * fabs(alpha * sum) : 0;
  return oracle_stored((bounded){alpha * sum + before, error + first}, p->c_dtype);
}

static bounded *expect_all(const product *p, const matrices *a, const matrices *b, const matrices *c)
{
  bounded *want = scratch((size_t)(p->batch * p->m * p->n) + 1, sizeof *want);
  for (int64_t i = 0; i < p->batch; i++)
    for (int64_t row = 0; row < p->m; row++)
      for (int64_t col = 0; col < p->n; col++) {
        const int64_t at = p->beside ? row * p->n * p->batch + i * p->n + col : (i * p->m + row) * p->n + col;
        want[at] = expected(p, a, b, c, i, row, col);
      }
  return want;
}

static cumoe_matmul_args arguments_for(cumoe_context context, const product *p, const matrices *a, const matrices *b,
                                       const matrices *c, cumoe_view_mut all_c)
{
  cumoe_matmul_args m = {.size = sizeof m, .flags = p->flags, .alpha = p->alpha, .beta = p->beta, .batch = p->batch};
  m.a = first_of(a, device_put(context, &a->all, p->pad), &m.a_stride);
  m.b = first_of(b, device_put(context, &b->all, 2 * p->pad), &m.b_stride);
  m.c = as_mut(first_of(c, cumoe_const(all_c), &m.c_stride));
  if (p->batch > 1 && m.c_stride == 0) m.c_stride = p->m * all_c.ld; /* no elements */
  m.workspace = workspace_for(context);
  return m;
}

static void run_product(cumoe_context context, const product *p)
{
  const bool ta = p->flags & CUMOE_MATMUL_TRANSPOSE_A, tb = p->flags & CUMOE_MATMUL_TRANSPOSE_B;
  rng r = {(uint64_t)(p->m * 10000 + p->n * 100 + p->k)};
  case_begin("[%d x %d x %d] %d times %s -> %s flags %u alpha %g beta %g pad %d%s%s%s", (int)p->m, (int)p->n, (int)p->k,
             (int)p->batch, cumoe_dtype_name((cumoe_dtype)p->dtype), cumoe_dtype_name((cumoe_dtype)p->c_dtype),
             p->flags, (double)p->alpha, (double)p->beta, (int)p->pad, p->integers ? " exact" : "",
             p->beside ? " beside" : "", p->shared_a ? " one a" : "");
  const matrices a = make_matrices(&r, p, p->dtype, ta ? p->k : p->m, ta ? p->m : p->k, p->shared_a ? 1 : p->batch),
                 b = make_matrices(&r, p, p->dtype, tb ? p->n : p->k, tb ? p->k : p->n, p->batch),
                 c = make_matrices(&r, p, p->c_dtype, p->m, p->n, p->batch);
  const bounded *want = expect_all(p, &a, &b, &c);
  tensor first = {0};
  for (int pass = 0; pass < PASSES; pass++) {
    set_poison(pass); /* without beta, c is NaN the first time */
    cumoe_view_mut out = device_new(context, p->c_dtype, c.all.rows, c.all.cols, 3 * p->pad);
    if (p->beta != 0) device_set(context, out, &c.all);
    const cumoe_matmul_args m = arguments_for(context, p, &a, &b, &c, out);
    if (!case_served(context, cumoe_matmul(context, &m, NULL), "cumoe_matmul")) return;
    tensor got = device_get(context, cumoe_const(out));
    check_guards(context, "c", out);
    if (got.rows * got.cols == 0) continue;
    if (pass == 0) check_bounded("c", &got, want), first = got;
    if (pass == 1) check_same("another time", &got, &first);
  }
  case_end();
}

static void test_products(cumoe_context context)
{
  static const int32_t sizes[][3] = {{2, 2, 2},    {1, 1, 1},   {1, 7, 9},    {8, 64, 64},  {9, 65, 63}, {7, 63, 65},
                                     {16, 128, 1}, {33, 1, 70}, {64, 129, 8}, {130, 70, 3}, {5, 8, 300}, {1, 256, 128}};
  static const int32_t types[][2] = {{CUMOE_F32, CUMOE_F32},
                                     {CUMOE_BF16, CUMOE_BF16},
                                     {CUMOE_F16, CUMOE_F16},
                                     {CUMOE_BF16, CUMOE_F32},
                                     {CUMOE_F16, CUMOE_F32}};
  static const float alphas[] = {0, 1, -.5f}, betas[] = {0, 1, 2};
  if (!group_begin("%s products", context_name(context))) return;
  for (int i = 0; i < 12 * 4 * 5; i++) {
    const int32_t *size = sizes[i % 12], *type = types[i / 48];
    const product p = {.m = size[0],
                       .n = size[1],
                       .k = size[2],
                       .batch = 1,
                       .dtype = type[0],
                       .c_dtype = type[1],
                       .flags = (uint32_t)(i / 12 % 4),
                       .alpha = alphas[i % 3],
                       .beta = betas[i / 3 % 3],
                       .integers = i % 7 == 0,
                       .pad = i % 5 == 0   ? 0
                              : i % 5 == 1 ? 8
                                           : i % 3};
    run_product(context, &p);
  }
  group_end();
}

static void test_batches(cumoe_context context)
{
  if (!group_begin("%s batches", context_name(context))) return;
  for (int i = 0; i < 96; i++) {
    const product p = {.m = 1 + i % 17,
                       .n = 3 + i % 30,
                       .k = 2 + i % 41,
                       .batch = 1 + i % 5,
                       .dtype = case_dtypes[i % 3],
                       .c_dtype = i % 4 ? case_dtypes[i % 3] : CUMOE_F32,
                       .flags = (uint32_t)(i / 3 % 4),
                       .beta = i % 5 == 0,
                       .integers = i % 2,
                       .beside = i / 12 % 2,
                       .shared_a = i % 7 == 0,
                       .pad = i % 3};
    run_product(context, &p);
  }
  group_end();
}

static void test_empty(cumoe_context context)
{
  static const int32_t sizes[][3] = {{0, 4, 4}, {4, 0, 4}, {4, 5, 0}, {0, 0, 0}, {1, 1, 0}};
  if (!group_begin("%s nothing to add up, or nowhere to put it", context_name(context))) return;
  for (int i = 0; i < 5 * 3 * 3; i++)
    run_product(context, &(product){.m = sizes[i % 5][0],
                                    .n = sizes[i % 5][1],
                                    .k = sizes[i % 5][2],
                                    .batch = 1 + i / 5 % 2,
                                    .dtype = case_dtypes[i % 3],
                                    .c_dtype = case_dtypes[i % 3],
                                    .beta = i / 15 == 0   ? 0
                                            : i / 15 == 1 ? 1
                                                          : .5f,
                                    .pad = 1});
  group_end();
}

/* A batch that lies one below the other in some columns of a matrix touches none of the others. */
static void test_columns(cumoe_context context)
{
  enum { ROWS = 4, WIDE = 24, SIDE = 8 };
  if (!group_begin("%s batches in columns", context_name(context))) return;
  case_begin("a and c");
  rng r = {3};
  const tensor in = tensor_integers(&r, CUMOE_F32, 2 * ROWS, WIDE, 3),
               b = tensor_integers(&r, CUMOE_F32, SIDE, SIDE, 3);
  const cumoe_view x = device_put(context, &in, 0);
  cumoe_matmul_args m = {.size = sizeof m,
                         .alpha = 1,
                         .batch = 2,
                         .a = cumoe_matrix(x.data, CUMOE_F32, ROWS, SIDE, WIDE),
                         .b = device_put(context, &b, 0),
                         .c = cumoe_matrix_mut((float *)(uintptr_t)x.data + 2 * SIDE, CUMOE_F32, ROWS, SIDE, WIDE),
                         .a_stride = ROWS * WIDE,
                         .c_stride = ROWS * WIDE,
                         .workspace = workspace_for(context)};
  const tensor before = tensor_copy(&in);
  CHECK_OK(cumoe_matmul(context, &m, NULL));
  const tensor got = device_get(context, x);
  for (int64_t row = 0; row < 2 * ROWS; row++)
    for (int64_t col = 0; col < SIDE; col++) {
      double want = 0;
      for (int64_t k = 0; k < SIDE; k++) want += tensor_get(&before, row, k) * tensor_get(&b, k, col);
      CHECK(tensor_get(&got, row, 2 * SIDE + col) == want);
    }
  m.c.data = (float *)(uintptr_t)x.data + SIDE / 2;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_matmul(context, &m, NULL));
  CHECK_TEXT("args.c overlaps args.a");
  case_end();
  group_end();
}

/* f32 without TF32: a product that 11 bits would get wrong. */
static void test_precision(cumoe_context context)
{
  if (!group_begin("%s f32 is f32", context_name(context))) return;
  case_begin("512 x 512 x 512");
  rng r = {5};
  const product p = {.m = 512, .n = 512, .k = 512, .batch = 1, .dtype = CUMOE_F32, .c_dtype = CUMOE_F32};
  const matrices a = make_matrices(&r, &p, CUMOE_F32, 512, 512, 1), b = make_matrices(&r, &p, CUMOE_F32, 512, 512, 1);
  cumoe_view_mut out = device_new(context, CUMOE_F32, 512, 512, 0);
  cumoe_matmul_args m = arguments_for(context, &p, &a, &b, &a, out);
  CHECK_OK(cumoe_matmul(context, &m, NULL));
  tensor got = device_get(context, cumoe_const(out));
  for (int64_t row = 0; row < 512; row += 37)
    for (int64_t col = 0; col < 512; col += 31) {
      const bounded want = expected(&p, &a, &b, &a, 0, row, col);
      const double near = 64 * u * sqrt(512.); /* TF32 would be off by 2^-11 sqrt(512) */
      CHECK_MSG(fabs(tensor_get(&got, row, col) - want.value) < near, "off by %g",
                tensor_get(&got, row, col) - want.value);
    }
  m.flags |= CUMOE_MATMUL_TF32;
  CHECK_OK(cumoe_matmul(context, &m, NULL));
  case_end();
  group_end();
}

/* Has to run before anything else opens cuBLAS. */
static void test_missing_library(cumoe_context context)
{
  if (!group_begin("cuda without cuBLAS")) return;
  case_begin("a path that leads nowhere");
  setenv("CUMOE_CUBLAS_PATH", "/nowhere/libcublas.so", 1);
  CHECK_STATUS(CUMOE_ERR_LIBRARY_MISSING, cumoe_matmul_prepare(context));
  CHECK_TEXT("/nowhere/libcublas.so");
  unsetenv("CUMOE_CUBLAS_PATH");
  case_end();
  group_end();
}

typedef struct pair {
  cumoe_matmul_args args;
  tensor a, b;
} pair;

/* A product of f32 matrices of small integers: whatever the order of its sums, it has one right result. */
static pair make_pair(cumoe_context context, uint64_t seed, int64_t size)
{
  rng r = {seed};
  pair p = {.args = {.size = sizeof p.args}};
  p.a = tensor_integers(&r, CUMOE_F32, size, size, 3);
  p.b = tensor_integers(&r, CUMOE_F32, size, size, 3);
  p.args.a = device_put(context, &p.a, 0);
  p.args.b = device_put(context, &p.b, 0);
  p.args.c = device_new(context, CUMOE_F32, size, size, 0);
  p.args.workspace = workspace_for(context);
  return p;
}

static bool pair_right(cumoe_context context, const pair *p)
{
  tensor got = device_get(context, cumoe_const(p->args.c));
  for (int64_t row = 0; row < got.rows; row++)
    for (int64_t col = 0; col < got.cols; col++) {
      double sum = 0;
      for (int64_t k = 0; k < p->a.cols; k++) sum += tensor_get(&p->a, row, k) * tensor_get(&p->b, k, col);
      if (tensor_get(&got, row, col) != sum) return false;
    }
  return true;
}

/* The first product of a context in a capture is refused; after cumoe_matmul_prepare it is not, though cuBLAS never
 * ran. */
static void test_capture(void)
{
  cumoe_context context = NULL;
  cudaStream_t stream;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  if (!group_begin("cuda captured")) return;
  case_begin("first product in a capture");
  CHECK_OK(cumoe_context_create(0, NULL, &context));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  pair p = make_pair(context, 11, 96);
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_matmul(context, &p.args, stream));
  CHECK_TEXT("cumoe_matmul_prepare");
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK_OK(cumoe_matmul_prepare(context));
  CHECK_OK(cumoe_matmul_prepare(context));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  CHECK_OK(cumoe_matmul(context, &p.args, stream));
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  for (uint64_t seed = 0; seed < 3; seed++) { /* replayed with other data */
    rng r = {seed};
    p.a = tensor_integers(&r, CUMOE_F32, 96, 96, 3);
    device_set(
        context,
        (cumoe_view_mut){(void *)(uintptr_t)p.args.a.data, 96, 96, 96, p.args.a.owner, p.args.a.device, p.args.a.dtype},
        &p.a);
    CHECK_OK(cumoe_synchronize(context, NULL));
    CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(pair_right(context, &p));
  }
  CHECK(cudaGraphExecDestroy(exec) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  case_end();
  close_context(context);
  group_end();
}

enum { THREADS = 8, ROUNDS = 50 };

typedef struct worker {
  cumoe_context context;
  cumoe_matmul_args args;
  cumoe_stream stream;
  cumoe_status status;
  pthread_t thread;
} worker;

static void *work(void *user)
{
  worker *w = user;
  for (int i = 0; i < ROUNDS && w->status == CUMOE_OK; i++) w->status = cumoe_matmul(w->context, &w->args, w->stream);
  return NULL;
}

static void test_threads(cumoe_context context)
{
  worker w[THREADS];
  pair p[THREADS];
  const bool cuda = on_device(context);
  if (!group_begin("%s %d threads", context_name(context), THREADS)) return;
  case_begin("threads");
  for (int i = 0; i < THREADS; i++) {
    p[i] = make_pair(context, (uint64_t)i, 40 + 8 * i);
    w[i] = (worker){.context = context, .args = p[i].args};
    if (cuda) CHECK(cudaStreamCreateWithFlags(&w[i].stream, cudaStreamNonBlocking) == cudaSuccess);
  }
  CHECK_OK(cumoe_synchronize(context, NULL));
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&w[i].thread, NULL, work, &w[i]) == 0);
  for (int i = 0; i < THREADS; i++) {
    CHECK(pthread_join(w[i].thread, NULL) == 0);
    CHECK_OK(w[i].status);
    if (cuda) CHECK(cudaStreamSynchronize(w[i].stream) == cudaSuccess && cudaStreamDestroy(w[i].stream) == cudaSuccess);
    CHECK_MSG(pair_right(context, &p[i]), "thread %d", i);
  }
  case_end();
  group_end();
}

static void run_device(cumoe_context context)
{
  if (on_device(context)) {
    test_missing_library(context);
    if (cumoe_matmul_prepare(context) == CUMOE_ERR_LIBRARY_MISSING) {
      if (group_begin("cuda products")) {
        case_begin("cuBLAS");
        case_skip("%s", cumoe_last_error());
        group_end();
      }
      return;
    }
    test_capture();
  }
  test_products(context);
  test_batches(context);
  test_columns(context);
  test_empty(context);
  test_precision(context);
  test_threads(context);
}

int main(int argc, char **argv)
{
  cumoe_context contexts[2];
  test_begin(argc, argv);
  const int count = open_contexts(contexts);
  for (int i = 0; i < count; i++) {
    run_device(contexts[i]);
    close_context(contexts[i]);
  }
  return test_end();
}
