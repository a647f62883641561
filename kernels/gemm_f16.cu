/* Grouped GEMM, f16. */
#define ROWS_gemm_f16
#include "gemm_rows.cuh"
