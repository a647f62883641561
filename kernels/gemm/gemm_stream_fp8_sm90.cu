/* Grouped GEMM of sm_90a for few rows an expert, codes of a byte. */
#define ROWS_gemm_stream_fp8_sm90
#include "gemm/gemm_stream_sm90.cuh"
