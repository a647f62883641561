/* The shim's machine as one whose kernels are run: one small GPU without rows of its own. */
#include "../shim/shim.h"

__attribute__((constructor)) static void emulate(void)
{
  shim_reset();
  shim.devices = 1;
  shim.major = 8;
  shim.minor = 0;
  shim.emulates = true;
}
