/* Grouped GEMM of sm_90a for few rows an expert, weights of 4 bits and activations of 16. */
#define ROWS_gemm_woven_sm90
#include "gemm/gemm_sm90.cuh"
