#ifndef CUMOE_OPS_H
#define CUMOE_OPS_H 
#include "buffer.h"
#ifdef __cplusplus
extern "C" {
#endif
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
CUMOE_CHECKED cumoe_status cumoe_softmax(cumoe_context context, cumoe_view x, cumoe_view_mut y, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_layernorm(cumoe_context context, cumoe_view x, cumoe_view weight, cumoe_view bias,
                                           float eps, cumoe_view_mut y, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_rmsnorm(cumoe_context context, cumoe_view x, cumoe_view weight, float eps,
                                         cumoe_view_mut y, cumoe_stream stream);
enum {
  CUMOE_MATMUL_TRANSPOSE_A = 1u << 0,
  CUMOE_MATMUL_TRANSPOSE_B = 1u << 1,
  CUMOE_MATMUL_TF32 = 1u << 2
};
typedef struct cumoe_matmul_args {
  uint32_t size;
  uint32_t flags;
  float alpha;
  float beta;
  int64_t batch;
  int64_t a_stride, b_stride, c_stride;
  cumoe_view a;
  cumoe_view b;
  cumoe_view_mut c;
  cumoe_view_mut workspace;
} cumoe_matmul_args;
CUMOE_CHECKED cumoe_status cumoe_matmul(cumoe_context context, const cumoe_matmul_args *args, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_matmul_workspace(cumoe_context context, size_t *bytes);
CUMOE_CHECKED cumoe_status cumoe_matmul_prepare(cumoe_context context);
#ifdef __cplusplus
}
#endif
#endif
