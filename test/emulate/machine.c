/* The shim's machine as one whose kernels are run: small GPUs, CUMOE_EMULATED_GPUS of them, else one. GPU=sm_90 in the
 * environment: of Hopper. */
#include "../shim/shim.h"

#include <stdlib.h>
#include <string.h>

__attribute__((constructor)) static void emulate(void)
{
  const char *gpus = getenv("CUMOE_EMULATED_GPUS"), *gpu = getenv("GPU");
  const bool hopper = gpu != NULL && strcmp(gpu, "sm_90") == 0;
  shim_reset();
  shim.devices = gpus ? atoi(gpus) : 1;
  shim.major = hopper ? 9 : 8;
  shim.minor = 0;
  shim.emulates = true;
  if (hopper) shim.processors = 4; /* grids that fill the GPU are small, and their CTAs have several tiles each */
}
