/* Grouped GEMM, weights of e4m3 with scales, activations of 16 bits or e4m3. */
#define ROWS_unpack_e4m3
#include "gemm/gemm_any.cuh"
