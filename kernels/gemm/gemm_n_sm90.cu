/* Grouped GEMM of sm_90a, bf16 and f16, N-major weights. */
#define ROWS_gemm_n_sm90
#include "gemm/gemm_sm90.cuh"
