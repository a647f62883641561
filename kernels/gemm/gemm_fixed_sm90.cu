/* Grouped GEMM of sm_90a, weights of u4, activations in fixed point. */
#define ROWS_gemm_fixed_sm90
#include "gemm/gemm_mixed_sm90.cuh"
