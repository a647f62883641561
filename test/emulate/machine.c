/* The shim's machine as one whose kernels are run: small GPUs without rows of their own; CUMOE_EMULATED_GPUS
 * says how many, else 1. */
#include <stdlib.h>

#include "../shim/shim.h"

__attribute__((constructor)) static void emulate(void)
{
  const char *gpus = getenv("CUMOE_EMULATED_GPUS");
  shim_reset();
  shim.devices = gpus ? atoi(gpus) : 1;
  shim.major = 8;
  shim.minor = 0;
  shim.emulates = true;
}
