/* The backward of the layer (kernels/backward.h), for every type: all but the products on tensor cores. */
#include "backward/gate.cuh"
#include "backward/products.cuh"
#include "backward/tokens.cuh"

/* Whether a kernel begins beside the grid ahead. One of its CTAs waits for that in the end, as others count on it. */
template <class A> DEVICE bool begins_beside(const A &)
{
  return false;
}
DEVICE bool begins_beside(const gate_backward_args &a)
{
  return a.beside;
}

#define ROWS_backward
#define BODY(op, UNITS, COLUMNS, THREADS)         any_##op<THREADS>(a)
#define BODY_UNITS(op, UNITS, COLUMNS, THREADS)   any_##op<THREADS, UNITS>(a)
#define BODY_COLUMNS(op, UNITS, COLUMNS, THREADS) any_##op<THREADS, COLUMNS>(a)
#define BODY_pad                                  BODY
#define BODY_copy_rows                            BODY
#define BODY_rows_product                         BODY
#define BODY_weight_gradient                      BODY
#define BODY_cut                                  BODY
#define BODY_add_runs                             BODY
#define BODY_bias_gradient                        BODY
#define BODY_activation                           BODY
#define BODY_pair_gradient                        BODY_UNITS
#define BODY_sigmoid                              BODY
#define BODY_gather                               BODY
#define BODY_gate_count                           BODY
#define BODY_gate_backward                        BODY_COLUMNS
#define BODY_gate_scale                           BODY
#define BODY_gate_loss                            BODY
#define ARGUMENTS_pad                             pad_args
#define ARGUMENTS_copy_rows                       copy_rows_args
#define ARGUMENTS_rows_product                    rows_product_args
#define ARGUMENTS_weight_gradient                 weight_gradient_args
#define ARGUMENTS_cut                             cut_args
#define ARGUMENTS_add_runs                        add_runs_args
#define ARGUMENTS_bias_gradient                   weight_gradient_args
#define ARGUMENTS_activation                      activation_args
#define ARGUMENTS_pair_gradient                   pair_gradient_args
#define ARGUMENTS_sigmoid                         sigmoid_args
#define ARGUMENTS_gather                          gather_args
#define ARGUMENTS_gate_count                      gate_backward_args
#define ARGUMENTS_gate_backward                   gate_backward_args
#define ARGUMENTS_gate_scale                      gate_backward_args
#define ARGUMENTS_gate_loss                       gate_backward_args
#define KERNEL(op, arch, form, X, Y, UNITS, COLUMNS, LANES, WARPS, CTAS, body)                                         \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ ARGUMENTS_##op a)              \
  {                                                                                                                    \
    const bool beside = begins_beside(a);                                                                              \
    if (!beside) wait_for_earlier_grids();                                                                             \
    body(op, UNITS, COLUMNS, (WARPS)*WARP_SIZE);                                                                       \
    if (beside && blockIdx.x == 0) wait_for_earlier_grids();                                                           \
  }
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  KERNEL(op, arch, form, X, Y, UNITS, COLUMNS, LANES, WARPS, CTAS, BODY_##op)
#include "variants.def"
