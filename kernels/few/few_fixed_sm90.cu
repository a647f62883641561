/* The experts of one token on sm_90a, weights of u4, activations in fixed point. */
#define ROWS_few_fixed_sm90
#include "few/few_sm90.cuh"
