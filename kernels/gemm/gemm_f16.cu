/* Grouped GEMM, f16. */
#define ROWS_gemm_f16
#include "gemm/gemm_any.cuh"
