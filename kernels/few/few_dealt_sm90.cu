/* The experts of few tokens on sm_90a, bf16 and f16, N-major weights, behind a router. */
#include "few/dealt.cuh"

#define ROWS_few_dealt_sm90
#define FEW_SM90_TAKES few_sm90_args
#include "few/drawn_or_dealt_sm90.cuh"
