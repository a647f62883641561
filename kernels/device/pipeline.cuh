/* Stages in shared memory that go round between those who fill them and those who use them, each with a barrier of either. */
#ifndef CUMOE_RING_CUH
#define CUMOE_RING_CUH

#include "device/ptx_sm90.cuh"

/* A place in the ring; consumers wait for its phase, producers for the other. */
template <int STAGES> struct ring_place {
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
