/* The experts of few tokens on sm_90a, of weights of 8 bits with scales. */
#define ROWS_few_quant_sm90
#include "few/few_sm90.cuh"
