/* The experts of several tokens on sm_90a, weights of 4 bits with scales. */
#define ROWS_few_drawn_sm90
#include "few/drawn_sm90.cuh"
