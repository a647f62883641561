/* A pipeline of stages in shared memory between producers, who fill them, and consumers; a `full` and an `empty`
 * barrier each. */
#ifndef CUMOE_PIPELINE_CUH
#define CUMOE_PIPELINE_CUH

#include "device/ptx_sm90.cuh"

/* A stage and its phase: consumers wait for the phase of `full`, producers for the other one of `empty`. */
template <int STAGES> struct pipeline_state {
  uint32_t stage = 0, phase = 0;
  DEVICE void advance()
  {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};
DEVICE void wait_for(uint64_t *barrier, uint32_t parity)
{
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

#endif
