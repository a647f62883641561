/* Grouped GEMM of sm_90a, codes of a byte. */
#define ROWS_gemm_fp8_sm90
#include "gemm/gemm_sm90.cuh"
