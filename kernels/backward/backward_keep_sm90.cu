/* Up of sm_90a whose gate and up before the activation are kept, bf16 and f16. */
#define ROWS_backward_keep_sm90
#define GEMM_SM90_TAKES up_keep_args
#include "gemm/gemm_sm90.cuh"
