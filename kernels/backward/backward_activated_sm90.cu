/* d h of sm_90a with the gradient of the activation behind it, bf16 and f16. */
#define ROWS_backward_activated_sm90
#define GEMM_SM90_TAKES down_activated_args
#include "gemm/gemm_sm90.cuh"
