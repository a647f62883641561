/* Rows times transposed weights of sm_90a, whose units are drawn, bf16 and f16. */
#define ROWS_backward_drawn_sm90
#include "gemm/gemm_sm90.cuh"
