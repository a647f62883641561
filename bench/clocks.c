/* What the GPU says of its clocks and power, by NVML, opened at run time: times mean little without them. */
#include "bench.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { CLOCK_SM = 1, CLOCK_MEMORY = 2 };

/* The handful of functions used, declared here: NVML's header need not be installed to build. */
struct nvml {
  void *library, *device;
  bool started;
  int (*init)(void);
  int (*shutdown)(void);
  int (*by_bus)(const char *bus, void **device);
  int (*clock)(void *device, int type, unsigned *mhz);
  int (*most_clock)(void *device, int type, unsigned *mhz);
  int (*power)(void *device, unsigned *milliwatts);
  int (*limit)(void *device, unsigned *milliwatts);
  int (*reasons)(void *device, unsigned long long *bits);
};

static bool find(nvml *n, const char *name, void *function)
{
  void *found = dlsym(n->library, name);
  memcpy(function, &found, sizeof found); /* ISO C has no cast from object to function pointer */
  return found != NULL;
}

static bool find_all(nvml *n)
{
  return find(n, "nvmlInit_v2", &n->init) && find(n, "nvmlShutdown", &n->shutdown) &&
         find(n, "nvmlDeviceGetHandleByPciBusId_v2", &n->by_bus) && find(n, "nvmlDeviceGetClockInfo", &n->clock) &&
         find(n, "nvmlDeviceGetMaxClockInfo", &n->most_clock) && find(n, "nvmlDeviceGetPowerUsage", &n->power) &&
         find(n, "nvmlDeviceGetEnforcedPowerLimit", &n->limit) &&
         find(n, "nvmlDeviceGetCurrentClocksThrottleReasons", &n->reasons);
}

static bool start(nvml *n, const bench *b)
{
  char bus[32];
  if (!find_all(n) || cudaDeviceGetPCIBusId(bus, sizeof bus, b->device.device) != cudaSuccess) return false;
  n->started = n->init() == 0;
  return n->started && n->by_bus(bus, &n->device) == 0;
}

nvml *nvml_open(bench *b)
{
  nvml *n = calloc(1, sizeof *n);
  if (!n) return NULL;
  n->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (n->library && start(n, b)) return n;
  nvml_close(n);
  return NULL;
}

void nvml_close(nvml *n)
{
  if (!n) return;
  if (n->started) n->shutdown();
  if (n->library) dlclose(n->library);
  free(n);
}

clock_state clocks_now(const nvml *n)
{
  clock_state c = {0};
  if (!n) return c;
  (void)n->clock(n->device, CLOCK_SM, &c.sm_mhz);
  (void)n->most_clock(n->device, CLOCK_SM, &c.sm_most_mhz);
  (void)n->clock(n->device, CLOCK_MEMORY, &c.memory_mhz);
  if (n->power(n->device, &c.watts) == 0) c.watts /= 1000;
  if (n->limit(n->device, &c.limit_watts) == 0) c.limit_watts /= 1000;
  (void)n->reasons(n->device, &c.reasons);
  return c;
}

void clocks_text(const clock_state *c, char *text, size_t bytes)
{
  static const char *const names[] = {"idle",   "user's clocks", "power cap",      "slowdown",
                                      "synced", "warm",          "hardware: warm", "power brake"};
  size_t at = (size_t)snprintf(text, bytes, "SM %u of %u MHz, memory %u MHz, %u of %u W", c->sm_mhz, c->sm_most_mhz,
                               c->memory_mhz, c->watts, c->limit_watts);
  for (unsigned i = 0; i < sizeof names / sizeof *names && at < bytes; ++i)
    if (c->reasons >> i & 1) at += (size_t)snprintf(text + at, bytes - at, ", %s", names[i]);
}
