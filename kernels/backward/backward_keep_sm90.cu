/* Up of sm_90a whose gate and up before the activation are kept, bf16 and f16. */
#define ROWS_backward_keep_sm90
#include "gemm/gemm_sm90.cuh"
