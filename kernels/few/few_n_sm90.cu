/* The experts of few tokens on sm_90a, bf16 and f16, N-major weights. */
#define ROWS_few_n_sm90
#define FEW_ATTRIBUTES __cluster_dims__(2, 1, 1)
#include "few/few_sm90.cuh"
