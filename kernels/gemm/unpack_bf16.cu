/* Grouped GEMM, weights with scales, bf16. */
#define ROWS_unpack_bf16
#include "gemm/gemm_any.cuh"
