/* Grouped GEMM of sm_90a, weights of 4 bits and activations of 16. */
#define ROWS_gemm_mixed_sm90
#include "gemm/gemm_mixed_sm90.cuh"
