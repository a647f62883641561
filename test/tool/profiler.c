/* A profiler for test/ranges.c: what NVTX opens when its environment variable names this. Writes down what is opened
 * and closed as one line of text, which the test finds by symbol. */
#define NVTX_SUPPORT_STATIC_INJECTION_LIBRARY 0
#include <nvtx3/nvToolsExt.h>

#include <string.h>

char profiler_text[4096];

static void note(const char *mark, const char *name)
{
  strncat(profiler_text, mark, sizeof profiler_text - strlen(profiler_text) - 1);
  strncat(profiler_text, name, sizeof profiler_text - strlen(profiler_text) - 1);
}

static nvtxDomainHandle_t NVTX_API create(const char *name)
{
  note("domain ", name);
  return (nvtxDomainHandle_t)(void *)profiler_text;
}

static int NVTX_API push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *range)
{
  note(" <", (void *)domain == (void *)profiler_text ? range->message.ascii : "another domain");
  return 0;
}

static int NVTX_API pop(nvtxDomainHandle_t domain)
{
  note(">", (void *)domain == (void *)profiler_text ? "" : "another domain");
  return 0;
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t table);
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t table)
{
  const NvtxExportTableCallbacks *callbacks = table(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable functions = NULL;
  unsigned count = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &count)) return 0;
  if (count <= NVTX_CBID_CORE2_DomainCreateA) return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
  *functions[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
  return 1;
}
