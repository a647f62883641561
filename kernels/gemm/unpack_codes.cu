/* Grouped GEMM, codes of s8 times the same. */
#define ROWS_unpack_codes
#include "gemm/gemm_any.cuh"
