/* Grouped GEMM of sm_90a for many rows an expert, weights of u4 and activations of 16 bits. */
#define ROWS_gemm_packed_int4_sm90
#include "gemm/gemm_sm90.cuh"
