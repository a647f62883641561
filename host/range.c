/* See range.h. NVTX is headers alone, which open what a profiler names in the environment; a toolkit may lack them. */
#include "range.h"

#include <pthread.h>
#include <stddef.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#define NVTX_SUPPORT_STATIC_INJECTION_LIBRARY 0 /* would be a symbol of ours in the program */
#include <nvtx3/nvToolsExt.h>

static nvtxDomainHandle_t range_domain; /* NULL: no profiler */
static pthread_once_t range_once = PTHREAD_ONCE_INIT;

static void find_profiler(void)
{
  range_domain = nvtxDomainCreateA("cumoe");
}

void ranges_open(void)
{
  (void)pthread_once(&range_once, find_profiler);
}

bool range_push(const char *name)
{
  if (range_domain == NULL) return false;
  const nvtxEventAttributes_t range = {.version = NVTX_VERSION,
                                       .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE,
                                       .messageType = NVTX_MESSAGE_TYPE_ASCII,
                                       .message = {.ascii = name}};
  (void)nvtxDomainRangePushEx(range_domain, &range);
  return true;
}

void range_pop(const bool *pushed)
{
  if (*pushed) (void)nvtxDomainRangePop(range_domain);
}

#else

void ranges_open(void) {}

bool range_push(const char *name)
{
  (void)name;
  return false;
}

void range_pop(const bool *pushed)
{
  (void)pushed;
}

#endif
