/* The experts of few tokens on sm_90a, of weights of 4 bits with scales and zero points. */
#define ROWS_few_int4_sm90
#include "few/few_sm90.cuh"
