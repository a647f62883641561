/* Grouped GEMM of sm_90a for few rows an expert, bf16 and f16. */
#define ROWS_gemm_stream_n_sm90
#include "gemm/gemm_stream_sm90.cuh"
