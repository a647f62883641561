/* Grouped GEMM, codes of 8 bits times the same. */
#define ROWS_unpack_codes
#include "gemm/gemm_any.cuh"
