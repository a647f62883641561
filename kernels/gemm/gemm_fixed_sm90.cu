/* Grouped GEMM of sm_90a, weights of u4, activations in fixed point. */
#include "device/ptx.cuh"
/* Asked for anew each time: registers are few. */
#define lane_id() ((int)(tid_x() % WARP_SIZE))
#define warp_id() ((int)(tid_x() / WARP_SIZE))
#define ROWS_gemm_fixed_sm90
#include "gemm/gemm_mixed_sm90.cuh"
