/* Grouped GEMM, f32. */
#define ROWS_gemm_f32
#include "gemm/gemm_any.cuh"
