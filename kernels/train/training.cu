/*
 * What training adds around the layer (cumoe/train.h). Bound by memory, so types are known at run time. Functions of
 * 16-bit elements are computed in f32, all else in double as on the CPU device; where a sum ends in 16 bits, the
 * products of a vector are added in f32. Each sum has the order of its shape: a thread's vectors, the lanes
 * of a warp, the warps of a CTA.
 */
#include "train/embedding.cuh"
#include "train/elementwise.cuh"
#include "train/loss.cuh"
#include "train/norms.cuh"
#include "train/optimiser.cuh"

#define ROWS_training
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ ARGUMENTS_##op a)              \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    any_##op<(WARPS)*WARP_SIZE>(a);                                                                                    \
  }
#define ARGUMENTS_embed                embedding_args
#define ARGUMENTS_embedding_clear      embedding_args
#define ARGUMENTS_embedding_count      embedding_args
#define ARGUMENTS_embedding_scan       embedding_args
#define ARGUMENTS_embedding_place      embedding_args
#define ARGUMENTS_embedding_backward   embedding_args
#define ARGUMENTS_norm_stats           norm_backward_args
#define ARGUMENTS_norm_partials        norm_backward_args
#define ARGUMENTS_norm_dparameters     norm_backward_args
#define ARGUMENTS_norm_dx              norm_backward_args
#define ARGUMENTS_elementwise_backward elementwise_backward_args
#define ARGUMENTS_softmax_backward     elementwise_backward_args
#define ARGUMENTS_cross_entropy_count  cross_entropy_args
#define ARGUMENTS_cross_entropy_rows   cross_entropy_args
#define ARGUMENTS_cross_entropy_mean   cross_entropy_args
#define ARGUMENTS_squares              global_norm_args
#define ARGUMENTS_total                global_norm_args
#define ARGUMENTS_adamw                adamw_args
#include "variants.def"
