/* The experts of few tokens on sm_90a, bf16 and f16, N-major weights. */
#define ROWS_few_n_sm90
#include "few/few_sm90.cuh"
