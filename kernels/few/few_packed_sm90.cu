/* The experts of few tokens on sm_90a, of weights of e2m1 with scales. */
#define ROWS_few_packed_sm90
#include "few/few_sm90.cuh"
