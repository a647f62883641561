/* Grouped GEMM, bf16. */
#define ROWS_gemm_bf16
#include "gemm/gemm_any.cuh"
