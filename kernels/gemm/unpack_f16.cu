/* Grouped GEMM, weights with scales, f16. */
#define ROWS_unpack_f16
#include "gemm/gemm_any.cuh"
