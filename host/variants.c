/* Expands kernels/variants.def into the dispatch table. */
#include "../include/cumoe/quantize.h"
#include "variants.h"
#include "context.h"
#include "../kernels/attention.h"
#include "../kernels/backward.h"
#include "../kernels/dealt.h"

/* kernels/args.h, which includes nothing public, has these values too. */
#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #ours " is not " #theirs);
#define SAME_TYPE(name)    SAME(DT_##name, CUMOE_##name)
#define SAME_NAME(name)    SAME(name, CUMOE_##name)
#define EACH_TYPE(F)       F(F32) F(F16) F(BF16) F(U8) F(I32) F(I64) F(E4M3) F(E8M0) F(I8)
#define EACH_NAME(F)                                                                                                   \
  F(SCORE_SOFTMAX)                                                                                                     \
  F(SCORE_SIGMOID)                                                                                                     \
  F(SCORE_SQRT_SOFTPLUS)                                                                                               \
  F(SCORE_IDENTITY)                                                                                                    \
  F(SCORE_SPARSEMIXER)                                                                                                 \
  F(GROUP_BEST)                                                                                                        \
  F(GROUP_BEST_TWO)                                                                                                    \
  F(ROUTE_RENORMALIZE)                                                                                                 \
  F(ROUTE_SCORE_AFTER_TOPK)                                                                                            \
  F(ROUTE_WEIGHT_ON_INPUT)                                                                                             \
  F(ROUTE_CHOOSE_BY_LOGIT)                                                                                             \
  F(ACT_SILU)                                                                                                          \
  F(ACT_GELU_ERF)                                                                                                      \
  F(ACT_GELU_TANH)                                                                                                     \
  F(ACT_RELU)                                                                                                          \
  F(ACT_RELU2)                                                                                                         \
  F(ACT_IDENTITY)                                                                                                      \
  F(ACT_SWIGLU_OAI)                                                                                                    \
  F(FAULT_NONE)                                                                                                        \
  F(FAULT_EXPERT_ID)                                                                                                   \
  F(SCAN_CODES)                                                                                                        \
  F(SCAN_SCALE_NOT_FINITE)                                                                                             \
  F(SCAN_SCALE_NEGATIVE)                                                                                               \
  F(SCAN_SCALE_ZERO)                                                                                                   \
  F(SCAN_SCALE_SUBNORMAL)                                                                                              \
  F(SCAN_SCALE_LARGE)                                                                                                  \
  F(SCAN_ZERO_POINT)                                                                                                   \
  F(SCAN_PAST_F16)                                                                                                     \
  F(SCAN_PAST_BF16)                                                                                                    \
  F(SCAN_LARGEST)                                                                                                      \
  F(SCAN_FIELDS)                                                                                                       \
  F(GGML_Q4_0)                                                                                                         \
  F(GGML_Q4_1)                                                                                                         \
  F(GGML_Q8_0)                                                                                                         \
  F(GGML_Q4_K)                                                                                                         \
  F(GGML_Q6_K)                                                                                                         \
  F(GGML_MXFP4)                                                                                                        \
  F(FAULT_NAN_LOGIT)                                                                                                   \
  F(FAULT_TOKEN_COUNT)                                                                                                 \
  F(FAULT_EXPERT_MAP)                                                                                                  \
  F(FAULT_ROUTE)                                                                                                       \
  F(MAX_EXPERTS)                                                                                                       \
  F(MAX_TOP_K)
EACH_TYPE(SAME_TYPE)
EACH_NAME(SAME_NAME)

enum { DT_x = DT_NONE };
enum {
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR) DT_##name = DT_##DTYPE,
#include "../kernels/formats.def"
};

/* Of the archive's member train, which not every program links: hidden, so that none of theirs is meant. */
#define LATE_SYMBOL __attribute__((weak, visibility("hidden")))
extern const unsigned char cumoe_image_attention[] LATE_SYMBOL, cumoe_image_attention_sm90[] LATE_SYMBOL;
extern const unsigned char cumoe_image_attention_rows[] LATE_SYMBOL, cumoe_image_training[] LATE_SYMBOL;
extern const unsigned char cumoe_image_attention_backward[] LATE_SYMBOL;
extern const unsigned char cumoe_image_attention_backward_sm90[] LATE_SYMBOL;
extern const unsigned char cumoe_image_backward[] LATE_SYMBOL, cumoe_image_backward_tile[] LATE_SYMBOL;
extern const unsigned char cumoe_image_backward_gradient_sm90[] LATE_SYMBOL;
extern const unsigned char cumoe_image_backward_keep_sm90[] LATE_SYMBOL, cumoe_image_backward_drawn_sm90[] LATE_SYMBOL;
extern const unsigned char cumoe_image_backward_activated_sm90[] LATE_SYMBOL;
LATE_SYMBOL train_kernel cpu_attention, cpu_attention_dq, cpu_attention_dkv, cpu_attention_dsinks, cpu_rope;
LATE_SYMBOL train_kernel cpu_embed, cpu_embedding_sort, cpu_embedding_backward, cpu_norm_stats, cpu_norm_dparameters;
LATE_SYMBOL train_kernel cpu_norm_dx, cpu_elementwise_backward, cpu_softmax_backward, cpu_cross_entropy_count;
LATE_SYMBOL train_kernel cpu_cross_entropy_rows, cpu_cross_entropy_mean, cpu_squares, cpu_total, cpu_adamw;
LATE_SYMBOL cpu_kernel cpu_pad, cpu_copy_rows, cpu_rows_product, cpu_weight_gradient, cpu_bias_gradient;
LATE_SYMBOL cpu_kernel cpu_activation, cpu_pair_gradient, cpu_sigmoid, cpu_gather;
LATE_SYMBOL cpu_kernel cpu_gate_count, cpu_gate_backward, cpu_gate_scale, cpu_gate_loss;

#define ROWS_ALL
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern const unsigned char cumoe_image_##file[];
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern const unsigned char cumoe_image_##file[];
#include "../kernels/variants.def"

/* What tiled and untiled rows have alike. */
#define KERNEL_OF(op_, arch_, file, form_, X, Y)                                                                       \
  .op_name = #op_, .arch_name = #arch_, .form_name = #form_, .image = cumoe_image_##file, .op = OP_##op_,              \
  .arch = ARCH_##arch_, .form = FORM_##form_, .x = DT_##X, .y = DT_##Y
#define LAUNCH_OF(CLUSTER, WARPS, CTAS, SMEM) .cluster = CLUSTER, .threads = (WARPS)*32, .ctas = CTAS, .smem = SMEM
#define TILED_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)                                                  \
  "cumoe_" #op "_" #arch "_" #form "_" #X "_" #W "_" #Y "_" #SCALE "_" #MAJOR "_" #BM "x" #BN "x" #BK
#define TILED(op, UP, UP_BN, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)  \
  {.name = TILED_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK),                                              \
   .kernel = TILED_NAME(UP, arch, form, X, W, Y, SCALE, MAJOR, BM, UP_BN, BK),                                         \
   KERNEL_OF(op, arch, file, form, X, Y),                                                                              \
   .w = DT_##W,                                                                                                        \
   .format = FORMAT_##W,                                                                                               \
   .scale = SCALE_##SCALE,                                                                                             \
   .major = MAJOR_##MAJOR,                                                                                             \
   .bm = BM,                                                                                                           \
   .bn = BN,                                                                                                           \
   .bk = BK,                                                                                                           \
   .stages = STAGES,                                                                                                   \
   LAUNCH_OF(CLUSTER, WARPS, CTAS, SMEM)},
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  TILED(op, op, BN, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)
#define DOWN_BY_UP(UP_BN, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)     \
  TILED(down, up, UP_BN, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  {.name = "cumoe_" #op "_" #arch "_" #form "_" #X "_" #Y "_" #UNITS "x" #COLUMNS "x" #LANES,                          \
   .kernel = "cumoe_" #op "_" #arch "_" #form "_" #X "_" #Y "_" #UNITS "x" #COLUMNS "x" #LANES,                        \
   KERNEL_OF(op, arch, file, form, X, Y),                                                                              \
   .units = UNITS,                                                                                                     \
   .columns = COLUMNS,                                                                                                 \
   .lanes = LANES,                                                                                                     \
   .ahead = AHEAD,                                                                                                     \
   LAUNCH_OF(CLUSTER, WARPS, CTAS, SMEM)},
#define CPU_VARIANT(op_, function)                                                                                     \
  {.name = "cumoe_" #op_ "_cpu",                                                                                       \
   .op_name = #op_,                                                                                                    \
   .arch_name = "cpu",                                                                                                 \
   .form_name = "ref",                                                                                                 \
   .cpu = function,                                                                                                    \
   .op = OP_##op_,                                                                                                     \
   .arch = ARCH_cpu,                                                                                                   \
   .form = FORM_ref},

const variant variants[] = {
#include "../kernels/variants.def"
};
const int32_t variant_count = sizeof variants / sizeof variants[0];
_Static_assert(sizeof variants / sizeof variants[0] <= MAX_VARIANTS, "raise MAX_VARIANTS");

const char *operation_name(operation op)
{
#define OPERATION(name, arguments, shape, grid, units) [OP_##name] = #name,
  static const char *const names[OP_COUNT] = {
#include "operations.def"
  };
  return names[op];
}

bool operation_is_late(operation op)
{
#define OPERATION(name, arguments, shape, grid, units)
#define LATE(name, arguments, shape, grid, units) [OP_##name] = true,
  static const bool late[OP_COUNT] = {
#include "operations.def"
  };
  return late[op];
}

int32_t operation_arg_bytes(operation op)
{
#define OPERATION(name, arguments, shape, grid, units) [OP_##name] = sizeof(arguments),
  static const int32_t bytes[OP_COUNT] = {
#include "operations.def"
  };
  return bytes[op];
}

int32_t variant_arg_bytes(const variant *v)
{
  if (v->form == FORM_dealt) return sizeof(few_sm90_args);
  if (v->form != FORM_wgmma) return operation_arg_bytes((operation)v->op);
  switch (v->op) { /* with tensor maps; other operations have them always */
  case OP_router: return sizeof(router_sm90_args);
  case OP_weight_gradient: return sizeof(weight_gradient_sm90_args);
  case OP_up:
  case OP_down: return sizeof(gemm_sm90_args);
  default: return operation_arg_bytes((operation)v->op);
  }
}
