/*
 * The same arithmetic by cuBLAS. Dense: one expert's two matrices with T k rows: what the products cost with
 * no routing at all. Grouped: one product an active expert, rows already permuted. Neither routes, gathers,
 * activates or combines.
 */
#include "bench.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { OP_N = 0, OP_T = 1, COMPUTE_32F = 68, GEMM_DEFAULT = -1, MOST_GROUPS = CUMOE_MAX_EXPERTS };
enum { DENSE_ROWS = 2048 }; /* fewer rows read the weights more than they compute: no measure of arithmetic */

/* The handful of functions used, declared here: cuBLAS and its header need not be installed to build. */
struct cublas {
  void *library, *handle;
  int (*create)(void **handle);
  int (*destroy)(void *handle);
  int (*version)(void *handle, int *version);
  int (*set_stream)(void *handle, cudaStream_t stream);
  int (*set_workspace)(void *handle, void *workspace, size_t bytes);
  int (*gemm)(void *handle, int opa, int opb, int m, int n, int k, const void *alpha, const void *a,
              cudaDataType type_a, int lda, const void *b, cudaDataType type_b, int ldb, const void *beta, void *c,
              cudaDataType type_c, int ldc, int compute, int algorithm);
  int (*grouped)(void *handle, const int *opa, const int *opb, const int *m, const int *n, const int *k,
                 const void *alpha, const void *const *a, cudaDataType type_a, const int *lda, const void *const *b,
                 cudaDataType type_b, const int *ldb, const void *beta, void *const *c, cudaDataType type_c,
                 const int *ldc, int groups, const int *group_size, int compute);
};

/* ---- library ---- */

static bool find(cublas *blas, const char *name, void *function)
{
  void *found = dlsym(blas->library, name);
  memcpy(function, &found, sizeof found); /* ISO C has no cast from object to function pointer */
  return found != NULL;
}

static bool find_all(cublas *blas)
{
  (void)find(blas, "cublasGemmGroupedBatchedEx", &blas->grouped); /* since CUDA 12.5 */
  return find(blas, "cublasCreate_v2", &blas->create) && find(blas, "cublasDestroy_v2", &blas->destroy) &&
         find(blas, "cublasGetVersion_v2", &blas->version) && find(blas, "cublasSetStream_v2", &blas->set_stream) &&
         find(blas, "cublasSetWorkspace_v2", &blas->set_workspace) && find(blas, "cublasGemmEx", &blas->gemm);
}

static void *open_library(const bench *b)
{
  static const char *const names[] = {"libcublas.so.13", "/usr/local/cuda/lib64/libcublas.so.13"};
  if (b->o.cublas) return dlopen(b->o.cublas, RTLD_NOW | RTLD_LOCAL);
  void *library = NULL;
  for (size_t i = 0; i < sizeof names / sizeof *names && !library; ++i)
    library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
  return library;
}

/* A workspace of our own: captured calls may not allocate. 32 MiB is what cuBLAS asks for on Hopper. */
static bool start(bench *b, cublas *blas)
{
  const int64_t bytes = 32 << 20;
  cumoe_view_mut workspace;
  return find_all(blas) && blas->create(&blas->handle) == 0 && blas->set_stream(blas->handle, b->stream) == 0 &&
         take(b, &b->store, CUMOE_U8, 1, bytes, &workspace) == CUMOE_OK &&
         blas->set_workspace(blas->handle, workspace.data, (size_t)bytes) == 0;
}

cublas *cublas_open(bench *b)
{
  cublas *blas = calloc(1, sizeof *blas);
  if (!blas) return NULL;
  blas->library = open_library(b);
  if (!blas->library) {
    const char *why = dlerror();
    snprintf(b->error, sizeof b->error, "%s", why ? why : "libcublas.so.13 cannot be opened");
  } else if (start(b, blas)) {
    return blas;
  } else {
    snprintf(b->error, sizeof b->error, "libcublas does not start");
  }
  cublas_close(blas);
  return NULL;
}

void cublas_close(cublas *blas)
{
  if (!blas) return;
  if (blas->handle) blas->destroy(blas->handle);
  if (blas->library) dlclose(blas->library);
  free(blas);
}

int cublas_version(const cublas *blas)
{
  int version = 0;
  return blas && blas->version(blas->handle, &version) == 0 ? version : 0;
}

/* ---- the two products ---- */

/* One of the layer's two grouped products: c [rows, n] = a [rows, k] w[e]^T, w [E, n, k]. */
typedef struct product {
  const char *a, *w;
  char *c;
  int32_t n, k;
} product;

/* Arguments of a grouped call; the pointer arrays lie on the device, all else on the host. */
typedef struct groups {
  int32_t count;
  int op_t[MOST_GROUPS], op_n[MOST_GROUPS], m[MOST_GROUPS], n[MOST_GROUPS], k[MOST_GROUPS], size[MOST_GROUPS];
  float one[MOST_GROUPS], zero[MOST_GROUPS];
  const void *a, *b, *c;
} groups;

struct peers {
  cell *cell;
  product products[2];
  groups *grouped[MAX_INPUTS][2];
};

static cudaDataType type_of(const bench *b)
{
  return b->o.dtype == CUMOE_F16 ? CUDA_R_16F : b->o.dtype == CUMOE_F32 ? CUDA_R_32F : CUDA_R_16BF;
}

/* The n-th element of an operand. */
static const char *element(const bench *b, const char *data, int64_t n)
{
  return data + format_size(b->o.dtype, n);
}

static cumoe_status failed(bench *b, const char *name, int status)
{
  if (status == 0) return CUMOE_OK;
  snprintf(b->error, sizeof b->error, "%s: cuBLAS status %d", name, status);
  return CUMOE_ERR_CUDA;
}

/* Row-major c = a b is, to column-major cuBLAS, c^T = b^T a^T. */
cumoe_status cublas_multiply(bench *b, const dense_product *p)
{
  const cudaDataType type = type_of(b);
  const float one = 1, zero = 0;
  return failed(b, "cublasGemmEx",
                b->blas->gemm(b->blas->handle, p->b_transposed ? OP_T : OP_N, p->a_transposed ? OP_T : OP_N, (int)p->n,
                              (int)p->m, (int)p->k, &one, p->b, type, (int)(p->b_transposed ? p->k : p->n), p->a, type,
                              (int)(p->a_transposed ? p->m : p->k), &zero, p->c, type, (int)p->n, COMPUTE_32F,
                              GEMM_DEFAULT));
}

static cumoe_status call_dense(void *user, int32_t input, cumoe_stream stream)
{
  (void)stream; /* the handle's */
  const peers *p = user;
  bench *b = p->cell->bench;
  const int64_t expert = input % p->cell->model->shape->experts;
  for (int32_t i = 0; i < 2; ++i) {
    const product *q = &p->products[i];
    const char *w = element(b, q->w, expert * q->n * q->k);
    TRY(cublas_multiply(b, &(dense_product){q->a, w, q->c, p->cell->rows, q->n, q->k, false, true}));
  }
  return CUMOE_OK;
}

static cumoe_status call_grouped(void *user, int32_t input, cumoe_stream stream)
{
  (void)stream;
  const peers *p = user;
  bench *b = p->cell->bench;
  const cudaDataType type = type_of(b);
  for (int32_t i = 0; i < 2; ++i) {
    const groups *g = p->grouped[input][i];
    TRY(failed(b, "cublasGemmGroupedBatchedEx",
               b->blas->grouped(b->blas->handle, g->op_t, g->op_n, g->m, g->n, g->k, g->one, g->a, type, g->k, g->b,
                                type, g->k, g->zero, (void *const *)g->c, type, g->m, g->count, g->size, COMPUTE_32F)));
  }
  return CUMOE_OK;
}

/* ---- grouped arguments ---- */

static cumoe_status upload_pointers(cell *c, const void *const *host, int32_t count, const void **device)
{
  bench *b = c->bench;
  cumoe_view_mut view;
  TRY(take(b, &c->store, CUMOE_I64, 1, count, &view));
  TRY(cumoe_copy_from_host(b->context, view, host, (size_t)count * sizeof *host, b->stream));
  *device = view.data;
  return cumoe_synchronize(b->context, b->stream);
}

static cumoe_status create_groups(cell *c, int32_t input, const product *q, groups *g)
{
  const void *a[MOST_GROUPS], *b[MOST_GROUPS], *out[MOST_GROUPS];
  const int32_t experts = c->model->shape->experts, *counts = c->host_counts + (int64_t)input * experts;
  int64_t row = 0;
  for (int32_t e = 0; e < experts; ++e) {
    if (counts[e] == 0) continue;
    const int32_t i = g->count++;
    g->op_t[i] = OP_T;
    g->op_n[i] = OP_N;
    g->m[i] = q->n;
    g->n[i] = counts[e];
    g->k[i] = q->k;
    g->size[i] = 1;
    g->one[i] = 1;
    a[i] = element(c->bench, q->w, (int64_t)e * q->n * q->k);
    b[i] = element(c->bench, q->a, row * q->k);
    out[i] = element(c->bench, q->c, row * q->n);
    row += counts[e];
  }
  TRY(upload_pointers(c, a, g->count, &g->a));
  TRY(upload_pointers(c, b, g->count, &g->b));
  return upload_pointers(c, out, g->count, &g->c);
}

static cumoe_status create_grouped(peers *p)
{
  for (int32_t i = 0; i < p->cell->inputs; ++i)
    for (int32_t j = 0; j < 2; ++j) {
      p->grouped[i][j] = calloc(1, sizeof(groups));
      if (!p->grouped[i][j]) return CUMOE_ERR_OUT_OF_MEMORY;
      TRY(create_groups(p->cell, i, &p->products[j], p->grouped[i][j]));
    }
  return CUMOE_OK;
}

/* ---- peers of a cell ---- */

/* Operands of their own, filled with random numbers: the power a product draws, and so its speed, depends on
 * them. */
static cumoe_status create_products(cell *c, product products[2])
{
  bench *b = c->bench;
  const shape *s = c->model->shape;
  const cumoe_dtype dtype = b->o.dtype;
  cumoe_view_mut in, up, h, out;
  TRY(take(b, &c->store, dtype, c->rows, s->hidden, &in));
  TRY(take(b, &c->store, dtype, c->rows, 2 * (int64_t)s->inter, &up));
  TRY(take(b, &c->store, dtype, c->rows, s->inter, &h));
  TRY(take(b, &c->store, dtype, c->rows, s->hidden, &out));
  TRY(fill_noise(b, in, &b->unit));
  TRY(fill_noise(b, h, &b->unit));
  products[0] = (product){in.data, c->model->gate_up.data.data, up.data, 2 * s->inter, s->hidden};
  products[1] = (product){h.data, c->model->down.data.data, out.data, s->hidden, s->inter};
  return CUMOE_OK;
}

cumoe_status peers_create(cell *c, peers **peers_of_cell, work works[ITEM_COUNT])
{
  const bench *b = c->bench;
  const bool dense = b->blas && c->rows >= DENSE_ROWS, grouped = b->blas && b->o.grouped && b->blas->grouped;
  peers *p = *peers_of_cell = NULL;
  if ((!dense && !grouped) || !kind_is_dense(c->model->kind)) return CUMOE_OK;
  p = *peers_of_cell = calloc(1, sizeof *p);
  if (!p) return CUMOE_ERR_OUT_OF_MEMORY;
  p->cell = c;
  TRY(create_products(c, p->products));
  if (dense) works[ITEM_dense] = (work){call_dense, p, false};
  if (!grouped) return CUMOE_OK;
  TRY(create_grouped(p));
  works[ITEM_grouped] = (work){call_grouped, p, true};
  return CUMOE_OK;
}

void peers_destroy(peers *p)
{
  for (int32_t i = 0; p && i < MAX_INPUTS; ++i)
    for (int32_t j = 0; j < 2; ++j) free(p->grouped[i][j]);
  free(p);
}
