/* The experts of several tokens on sm_90a, weights of 4 bits with scales. */
#include "few/drawn.cuh"

#define ROWS_few_drawn_sm90
#include "few/drawn_or_dealt_sm90.cuh"
