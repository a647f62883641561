/* The matrix product: cuBLAS on CUDA, kernels/cpu/ops.c on the CPU device. */
#include <library_types.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "buffer.h"
#include "check.h"
#include "context.h"
#include "dispatch.h"
#include "dl.h"
#include "memory.h"
#include "status.h"
#include "../include/cumoe/ops.h"

/* ---- checks ---- */

/* The memory of all matrices of a batch as one view: side by side in the columns of one, one below the other in its
 * rows, or else everything from the first element to the last. */
static cumoe_status whole_batch(const char *name, cumoe_view first, int64_t batch, int64_t stride, cumoe_view *whole)
{
  const int64_t limit = (int64_t)1 << 46;
  int64_t reach;
  *whole = first;
  REQUIRE(stride >= 0, CUMOE_ERR_INVALID_ARGUMENT, "%s_stride is %lld, must not be negative", name, (long long)stride);
  REQUIRE(!__builtin_mul_overflow(batch - 1, stride, &reach) && reach <= limit, CUMOE_ERR_INVALID_ARGUMENT,
          "%s_stride is %lld, too large for a batch of %lld", name, (long long)stride, (long long)batch);
  if (reach == 0 || first.rows == 0 || first.cols == 0) return CUMOE_OK;
  if (first.rows > 1 && reach + first.cols <= first.ld) {
    whole->cols += reach;
    return CUMOE_OK;
  }
  if (stride % first.ld == 0 && stride / first.ld >= first.rows) {
    whole->rows += reach / first.ld;
    return CUMOE_OK;
  }
  whole->cols = whole->ld = reach + (first.rows - 1) * first.ld + first.cols;
  whole->rows = 1;
  return CUMOE_OK;
}

/* The first matrix, then all of them. */
static cumoe_status check_batch(struct context *context, const operand *want, cumoe_view first, int64_t batch,
                                int64_t stride, cumoe_view *whole)
{
  TRY(check_counted(context, want, first));
  TRY(whole_batch(want->name, first, batch, stride, whole));
  TRY(check_owner(context, want->name, whole));
  return check_extent(want->name, whole, (uint32_t)cumoe_dtype_bytes((cumoe_dtype)first.dtype));
}

static cumoe_status check_apart(const cumoe_matmul_args *m, int64_t batch)
{
  const cumoe_view c = cumoe_const(m->c);
  if (batch == 1 || c.rows == 0 || c.cols == 0) return CUMOE_OK;
  const bool behind = m->c_stride >= (c.rows - 1) * c.ld + c.cols,
             beside = m->c_stride >= c.cols && (batch - 1) * m->c_stride + c.cols <= c.ld;
  REQUIRE(behind || beside, CUMOE_ERR_INVALID_ARGUMENT,
          "args.c_stride is %lld: the matrices of c, [%lld, %lld] with ld %lld, overlap", (long long)m->c_stride,
          (long long)c.rows, (long long)c.cols, (long long)c.ld);
  return CUMOE_OK;
}

static size_t workspace_bytes(struct context *context)
{
  if (on_cpu(context)) return 0;
  return (size_t)(context->info.cc_major >= 9 ? 32 : 4) << 20; /* what cuBLAS's manual asks for */
}

static cumoe_status check_matmul(struct context *context, const cumoe_matmul_args *m)
{
  const uint32_t known = CUMOE_MATMUL_TRANSPOSE_A | CUMOE_MATMUL_TRANSPOSE_B | CUMOE_MATMUL_TF32;
  const bool ta = m->flags & CUMOE_MATMUL_TRANSPOSE_A, tb = m->flags & CUMOE_MATMUL_TRANSPOSE_B;
  const int64_t batch = m->batch == 0 ? 1 : m->batch;
  const cumoe_view first_c = cumoe_const(m->c);
  cumoe_view a, b, c;
  REQUIRE(!(m->flags & ~known), CUMOE_ERR_INVALID_ARGUMENT, "args.flags is 0x%x, known are 0x%x", m->flags, known);
  REQUIRE(batch >= 1, CUMOE_ERR_INVALID_ARGUMENT, "args.batch is %lld, must not be negative", (long long)batch);
  TRY(check_owner(context, "args.a", &m->a)); /* shapes mean nothing once they are freed */
  TRY(check_owner(context, "args.c", &first_c));
  REQUIRE(m->c.dtype || !absent(&first_c), CUMOE_ERR_INVALID_ARGUMENT, "args.c is absent");
  const int64_t rows = m->c.rows, cols = m->c.cols, depth = ta ? m->a.rows : m->a.cols;
  const uint32_t type = DTYPE_BIT(m->a.dtype & 31);
  const operand a_want = {"args.a", ta ? depth : rows, ta ? rows : depth, FLOAT_BITS, 0},
                b_want = {"args.b", tb ? cols : depth, tb ? depth : cols, type, 0},
                c_want = {"args.c", rows, cols, type | DTYPE_BIT(CUMOE_F32), 0};
  TRY(check_batch(context, &a_want, m->a, batch, m->a_stride, &a));
  TRY(check_batch(context, &b_want, m->b, batch, m->b_stride, &b));
  TRY(check_batch(context, &c_want, first_c, batch, m->c_stride, &c));
  TRY(check_apart(m, batch));
  TRY(check_scratch(context, cumoe_const(m->workspace), workspace_bytes(context)));
  const named_view all[] = {{"args.c", c}, {"args.workspace", cumoe_const(m->workspace)}, {"args.a", a}, {"args.b", b}};
  return check_overlaps(all, 2, 4);
}

static matmul_args matmul_arguments(const cumoe_matmul_args *m)
{
  const bool ta = m->flags & CUMOE_MATMUL_TRANSPOSE_A, tb = m->flags & CUMOE_MATMUL_TRANSPOSE_B;
  return (matmul_args){.a = m->a.data,
                       .b = m->b.data,
                       .c = m->c.data,
                       .a_ld = m->a.ld,
                       .b_ld = m->b.ld,
                       .c_ld = m->c.ld,
                       .a_stride = m->a_stride,
                       .b_stride = m->b_stride,
                       .c_stride = m->c_stride,
                       .batch = m->batch == 0 ? 1 : m->batch,
                       .m = m->c.rows,
                       .n = m->c.cols,
                       .k = ta ? m->a.rows : m->a.cols,
                       .dtype = m->a.dtype,
                       .c_dtype = m->c.dtype,
                       .transpose_a = ta,
                       .transpose_b = tb,
                       .alpha = m->alpha == 0 ? 1 : m->alpha,
                       .beta = m->beta};
}

/* ---- cuBLAS: the handful of functions used, declared here, for its header need not be installed ---- */

enum { OP_N = 0, OP_T = 1, COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77, GEMM_DEFAULT = -1 };
enum { NO_REDUCED_PRECISION_REDUCTION = 16 }; /* sums of 16-bit products stay in f32 when they are split, too */
enum { STATUS_ALLOC_FAILED = 3, STATUS_NOT_SUPPORTED = 15 };

struct blas {
  pthread_mutex_t lock; /* stream and workspace belong to the handle: set and used by one thread at a time */
  void *handle;
  int (*create)(void **handle);
  int (*destroy)(void *handle);
  int (*set_math_mode)(void *handle, int mode);
  int (*set_stream)(void *handle, cudaStream_t stream);
  int (*set_workspace)(void *handle, void *workspace, size_t bytes);
  int (*multiply)(void *handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k, const void *alpha, const void *a,
                  cudaDataType a_type, int64_t a_ld, long long a_stride, const void *b, cudaDataType b_type,
                  int64_t b_ld, long long b_stride, const void *beta, void *c, cudaDataType c_type, int64_t c_ld,
                  long long c_stride, int64_t batch, int compute, int algorithm);
};

static const char *const cublas_names[] = {LIBRARY_NAMES("libcublas")};
static shared_library cublas = {.title = "cuBLAS",
                                .variable = "CUMOE_CUBLAS_PATH",
                                .probe = "cublasGemmStridedBatchedEx_64",
                                .names = cublas_names};
static shared_symbol create_symbol = {.name = "cublasCreate_v2"}, destroy_symbol = {.name = "cublasDestroy_v2"},
                     math_symbol = {.name = "cublasSetMathMode"}, stream_symbol = {.name = "cublasSetStream_v2"},
                     workspace_symbol = {.name = "cublasSetWorkspace_v2"},
                     multiply_symbol = {.name = "cublasGemmStridedBatchedEx_64"};
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

static cumoe_status find_functions(struct blas *b)
{
  any_function *found;
#define FIND(member, symbol)                                                                                           \
  TRY(find_shared(&cublas, &(symbol), &found));                                                                        \
  b->member = (__typeof__(b->member))found
  FIND(create, create_symbol);
  FIND(destroy, destroy_symbol);
  FIND(set_math_mode, math_symbol);
  FIND(set_stream, stream_symbol);
  FIND(set_workspace, workspace_symbol);
  FIND(multiply, multiply_symbol);
#undef FIND
  return CUMOE_OK;
}

static cumoe_status blas_status(const char *call, int status)
{
  static const char *const names[] = {[1] = "NOT_INITIALIZED", [3] = "ALLOC_FAILED",   [7] = "INVALID_VALUE",
                                      [8] = "ARCH_MISMATCH",   [11] = "MAPPING_ERROR", [13] = "EXECUTION_FAILED",
                                      [14] = "INTERNAL_ERROR", [15] = "NOT_SUPPORTED", [16] = "LICENSE_ERROR"};
  if (status == 0) return CUMOE_OK;
  const bool known = status > 0 && status < (int)(sizeof names / sizeof *names) && names[status];
  const cumoe_status ours = status == STATUS_ALLOC_FAILED    ? CUMOE_ERR_OUT_OF_MEMORY
                            : status == STATUS_NOT_SUPPORTED ? CUMOE_ERR_NOT_SUPPORTED
                                                             : CUMOE_ERR_CUDA;
  return fail(ours, "%s: CUBLAS_STATUS_%s (%d)", call, known ? names[status] : "?", status);
}

static void drop(struct blas *b)
{
  if (b->handle) (void)b->destroy(b->handle);
  pthread_mutex_destroy(&b->lock);
  free(b);
}

static cumoe_status start(struct blas *b)
{
  TRY(find_functions(b));
  const enum cudaStreamCaptureMode before = relax_capture();
  cumoe_status status = blas_status("cublasCreate", b->create(&b->handle));
  restore_capture(before);
  if (status != CUMOE_OK) b->handle = NULL;
  if (status == CUMOE_OK)
    status = blas_status("cublasSetMathMode", b->set_math_mode(b->handle, NO_REDUCED_PRECISION_REDUCTION));
  return status;
}

static cumoe_status close_blas(struct context *context)
{
  drop(atomic_load_explicit(&context->blas, memory_order_acquire));
  return CUMOE_OK;
}

static cumoe_status make_blas(struct context *context)
{
  struct blas *b = calloc(1, sizeof *b);
  REQUIRE(b, CUMOE_ERR_OUT_OF_MEMORY, "%zu bytes of host memory", sizeof *b);
  pthread_mutex_init(&b->lock, NULL);
  const cumoe_status status = start(b);
  if (status != CUMOE_OK) {
    drop(b);
    return status;
  }
  on_close(context, CLOSE_BLAS, close_blas);
  atomic_store_explicit(&context->blas, b, memory_order_release);
  return CUMOE_OK;
}

static cumoe_status prepare(struct context *context)
{
  cumoe_status status = CUMOE_OK;
  if (atomic_load_explicit(&context->blas, memory_order_acquire)) return CUMOE_OK;
  pthread_mutex_lock(&making);
  if (!atomic_load_explicit(&context->blas, memory_order_relaxed)) status = make_blas(context);
  pthread_mutex_unlock(&making);
  return status;
}

/* ---- the product ---- */

static cudaDataType type_of(int32_t dtype)
{
  switch ((element_type)dtype) {
  case DT_F32: return CUDA_R_32F;
  case DT_F16: return CUDA_R_16F;
  case DT_BF16: return CUDA_R_16BF;
  case DT_NONE: /* the checks let none of these pass */
  case DT_U8:
  case DT_E4M3:
  case DT_E8M0:
  case DT_I8:
  case DT_I32:
  case DT_I64: break;
  }
  return (cudaDataType)-1; /* cuBLAS refuses it */
}

/* Of an operand without elements: cuBLAS wants a pointer and a positive ld all the same. */
static const void *some(const void *data, const matmul_args *m)
{
  return m->k > 0 ? data : m->c;
}

/* Row-major c = a b is, to column-major cuBLAS, c^T = b^T a^T, with the same memory. */
static cumoe_status call_blas(const struct blas *b, const matmul_args *m, bool tf32)
{
  const cudaDataType type = type_of(m->dtype);
  const int64_t a_ld = m->a_ld > 0 ? m->a_ld : 1, b_ld = m->b_ld > 0 ? m->b_ld : 1;
  return blas_status("cublasGemmStridedBatchedEx_64",
                     b->multiply(b->handle, m->transpose_b ? OP_T : OP_N, m->transpose_a ? OP_T : OP_N, m->n, m->m,
                                 m->k, &m->alpha, some(m->b, m), type, b_ld, m->b_stride, some(m->a, m), type, a_ld,
                                 m->a_stride, &m->beta, m->c, type_of(m->c_dtype), m->c_ld, m->c_stride, m->batch,
                                 tf32 && m->dtype == DT_F32 ? COMPUTE_32F_FAST_TF32 : COMPUTE_32F, GEMM_DEFAULT));
}

/* cuBLAS says that it failed, and not that the device was lost before: CUDA does. */
static cumoe_status reason_of(cumoe_status status, cumoe_stream stream)
{
  enum cudaStreamCaptureStatus capture;
  TRY_CUDA(cudaStreamIsCapturing(stream, &capture));
  return status;
}

/* Setting the stream forgets the workspace. Relaxed, for cuBLAS loads a kernel when it first needs it. */
static cumoe_status launch_blas(struct blas *b, const matmul_args *m, bool tf32, cumoe_view_mut workspace,
                                cumoe_stream stream)
{
  pthread_mutex_lock(&b->lock);
  const enum cudaStreamCaptureMode before = relax_capture();
  cumoe_status status = blas_status("cublasSetStream", b->set_stream(b->handle, stream));
  if (status == CUMOE_OK)
    status = blas_status("cublasSetWorkspace", b->set_workspace(b->handle, workspace.data, (size_t)workspace.cols));
  if (status == CUMOE_OK) status = call_blas(b, m, tf32);
  restore_capture(before);
  pthread_mutex_unlock(&b->lock);
  return status == CUMOE_ERR_CUDA ? reason_of(status, stream) : status;
}

static cumoe_status multiply(struct context *context, const matmul_args *m, bool tf32, cumoe_view_mut workspace,
                             cumoe_stream stream)
{
  if (!atomic_load_explicit(&context->blas, memory_order_acquire)) {
    const cumoe_status status = refuse_capture(context, stream);
    if (status == CUMOE_ERR_CAPTURE_UNSAFE)
      return fail(status, "the stream is being captured, and this would be the context's first product: call "
                          "cumoe_matmul_prepare before");
    TRY(status);
    TRY(prepare(context));
  }
  return launch_blas(atomic_load_explicit(&context->blas, memory_order_acquire), m, tf32, workspace, stream);
}

cumoe_status cumoe_matmul(cumoe_context handle, const cumoe_matmul_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_matmul_args m;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &m));
  TRY(check_matmul(context, &m));
  const matmul_args raw = matmul_arguments(&m);
  if (raw.m == 0 || raw.n == 0) return CUMOE_OK;
  if (on_cpu(context)) return dispatch(context, OP_matmul, &raw, stream);
  ON_DEVICE(context, multiply(context, &raw, m.flags & CUMOE_MATMUL_TF32, m.workspace, stream));
}

cumoe_status cumoe_matmul_workspace(cumoe_context handle, size_t *bytes)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  *bytes = workspace_bytes(context);
  return CUMOE_OK;
}

cumoe_status cumoe_matmul_prepare(cumoe_context handle)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (on_cpu(context)) return CUMOE_OK;
  ON_DEVICE(context, prepare(context));
}
