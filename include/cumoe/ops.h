/*
 * cumoe/ops.h: matrix product, elementwise operations, softmax, norms.
 *
 * Contract of all of them, as in cumoe/cumoe.h: work is ordered on `stream`, nothing is allocated, nothing waits
 * (cumoe_matmul's very first call excepted), calls may be captured into graphs and replayed after the data changed;
 * results are bitwise repeatable; 0 rows or columns are legal, but a first operand that is all zero is not: it was
 * forgotten. On the CPU device sums run in double and are rounded once.
 *
 * Element types: f32, f16 and bf16. Arithmetic is in f32; a result is rounded once. Results smaller than 2^-119 may
 * become 0.
 *
 * Views: any ld, any size, aligned to one element. Fastest with bases and lds of 16 bytes; the alignment does not
 * change a bit of any result. An output may be one of its inputs itself (same data, same ld) where it says so; any
 * other overlap of output and input is refused. Column ranges of one matrix (one ld) overlap where elements do; views
 * of unlike lds wherever their extents, gaps included, do.
 *
 * Errors: INVALID_ARGUMENT (null, shape, overlap), STALE_HANDLE, WRONG_DEVICE, WRONG_DTYPE, OUT_OF_BOUNDS, MISALIGNED,
 * CUDA.
 */
#ifndef CUMOE_OPS_H
#define CUMOE_OPS_H

#include "buffer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- elementwise ------------------------------------------------------------------------------------ */

/*
 * All operands [rows, cols] of one type. y may be an input itself. A NaN goes through, in its own element only.
 *   add      a + b
 *   mul      a * b
 *   scale    factor * x
 *   relu     max(x, 0)
 *   sigmoid  1 / (1 + exp(-x))
 *   silu     x / (1 + exp(-x))
 *   gelu     x/2 (1 + erf(x / sqrt 2))                                          Hendrycks and Gimpel, arXiv 1606.08415
 *   gelu_tanh  x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))                  the same paper's approximation
 * silu and both gelus of -infinity are NaN, as the formulas have it.
 */
CUMOE_CHECKED cumoe_status cumoe_add(cumoe_context context, cumoe_view a, cumoe_view b, cumoe_view_mut y,
                                     cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_mul(cumoe_context context, cumoe_view a, cumoe_view b, cumoe_view_mut y,
                                     cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_scale(cumoe_context context, float factor, cumoe_view x, cumoe_view_mut y,
                                       cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_relu(cumoe_context context, cumoe_view x, cumoe_view_mut y, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_sigmoid(cumoe_context context, cumoe_view x, cumoe_view_mut y, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_silu(cumoe_context context, cumoe_view x, cumoe_view_mut y, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_gelu(cumoe_context context, cumoe_view x, cumoe_view_mut y, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_gelu_tanh(cumoe_context context, cumoe_view x, cumoe_view_mut y, cumoe_stream stream);

/* ---- rows ------------------------------------------------------------------------------------------- */

/*
 * x and y [rows, cols] of one type, cols below 2^31; y may be x itself. A row depends on itself only: a NaN in it, or a
 * row of softmax with +infinity or with nothing but -infinity, makes that whole row NaN and touches no other.
 *
 * y[r, c] = exp(x[r, c] - max of the row) / sum over the row of the same.
 */
CUMOE_CHECKED cumoe_status cumoe_softmax(cumoe_context context, cumoe_view x, cumoe_view_mut y, cumoe_stream stream);

/*
 * y[r, c] = (x[r, c] - mean) / sqrt(variance + eps) * weight[c] + bias[c]        Ba, Kiros, Hinton, arXiv 1607.06450
 * mean and variance (sum of squares / cols) are of the row, the variance from differences to the mean: no cancellation.
 * weight, bias: optional, [1, cols] of x's type or f32, each; absent: 1 and 0. eps >= 0, finite. The sum of squared
 * differences has to fit into f32; with eps 0 it has to be a normal number, too.
 */
CUMOE_CHECKED cumoe_status cumoe_layernorm(cumoe_context context, cumoe_view x, cumoe_view weight, cumoe_view bias,
                                           float eps, cumoe_view_mut y, cumoe_stream stream);

/*
 * y[r, c] = x[r, c] / sqrt(sum of x[r, i]^2 / cols + eps) * weight[c].          Zhang and Sennrich, arXiv 1910.07467
 * weight, eps as above. The sum of squares has to fit into f32, likewise.
 */
CUMOE_CHECKED cumoe_status cumoe_rmsnorm(cumoe_context context, cumoe_view x, cumoe_view weight, float eps,
                                         cumoe_view_mut y, cumoe_stream stream);

/* ---- matrix product --------------------------------------------------------------------------------- */

enum {
  CUMOE_MATMUL_TRANSPOSE_A = 1u << 0, /* a is stored [K, M] */
  CUMOE_MATMUL_TRANSPOSE_B = 1u << 1, /* b is stored [N, K], as the weight of a linear layer is */
  CUMOE_MATMUL_TF32 = 1u << 2         /* f32 operands may be cut to 11 significant bits; without it never */
};

/* Zero means default in every field. The views are the first matrices of a batch. */
typedef struct cumoe_matmul_args {
  uint32_t size;                        /* sizeof(cumoe_matmul_args) */
  uint32_t flags;                       /* CUMOE_MATMUL_* */
  float alpha;                          /* 0 = 1 */
  float beta;                           /* 0: c is not read */
  int64_t batch;                        /* 0 = 1 */
  int64_t a_stride, b_stride, c_stride; /* elements between a batch's matrices; a, b: 0 = the same for all */
  cumoe_view a;                         /* [M, K] */
  cumoe_view b;                         /* [K, N], type of a */
  cumoe_view_mut c;                     /* [M, N], type of a, or f32 */
  cumoe_view_mut workspace;             /* [1, bytes] u8, 256-byte aligned, bytes from cumoe_matmul_workspace */
} cumoe_matmul_args;

/*
 * c = alpha a b + beta c, row-major, for every matrix of the batch. Sums and alpha, beta are in f32 and rounded once
 * (with beta and a 16-bit c, cuBLAS may round the product as well, before it adds c); the order of a sum is cuBLAS's
 * choice, the same for the same call on the same GPU model and cuBLAS version. c may overlap neither a nor b, each
 * taken with the gaps between its matrices, nor, within the batch, itself: its matrices lie behind each other, or side
 * by side in the columns of one (heads of an attention). The workspace may serve any number of calls of one stream;
 * calls that can run at the same time need one each.
 *
 * On CUDA this is cuBLAS (libcublas.so.13 or .12, or the file that CUMOE_CUBLAS_PATH names), opened by the first call,
 * which may allocate and wait. While `stream` is being captured, a first call is CAPTURE_UNSAFE: call
 * cumoe_matmul_prepare before. Calls of several threads on one context take turns while they launch. Errors also:
 * LIBRARY_MISSING (text has the names tried), WORKSPACE (too small), NOT_SUPPORTED (cuBLAS has no kernel).
 */
CUMOE_CHECKED cumoe_status cumoe_matmul(cumoe_context context, const cumoe_matmul_args *args, cumoe_stream stream);

/* Bytes that cumoe_matmul needs on this context: 32 MiB from compute capability 9.0 up, 4 MiB below, 0 on the CPU
 * device. */
CUMOE_CHECKED cumoe_status cumoe_matmul_workspace(cumoe_context context, size_t *bytes);

/*
 * Opens cuBLAS for this context, so that cumoe_matmul can be captured. It keeps some device memory of its own until the
 * context is destroyed. Does nothing when done before, or on the CPU device. Not from a thread that captures in CUDA's
 * global mode. Destroying a context that used cuBLAS ends captures under way on its device. Errors: LIBRARY_MISSING,
 * OUT_OF_MEMORY, CUDA.
 */
CUMOE_CHECKED cumoe_status cumoe_matmul_prepare(cumoe_context context);

#ifdef __cplusplus
}
#endif
#endif
