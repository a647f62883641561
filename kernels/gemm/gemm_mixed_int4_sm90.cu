/* Grouped GEMM of sm_90a, weights of u4 and activations of 16 bits. */
#define ROWS_gemm_mixed_int4_sm90
#include "gemm/gemm_mixed_sm90.cuh"
