/* See runtime.h. */
#include "runtime.h"

#if CUDART_VERSION < 12080
#include <stdint.h>
#include <string.h>

/* The driver's codes are the runtime's. */
#define DRIVER(name, signature, ...)                                                                                   \
  do {                                                                                                                 \
    CUresult(*call) signature;                                                                                         \
    void *entry = NULL;                                                                                                \
    enum cudaDriverEntryPointQueryResult found;                                                                        \
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &entry, 12040, cudaEnableDefault, &found);        \
    if (error != cudaSuccess) return error;                                                                            \
    if (found != cudaDriverEntryPointSuccess) return cudaErrorCallRequiresNewerDriver;                                 \
    memcpy(&call, &entry, sizeof call);                                                                                \
    return (cudaError_t)call(__VA_ARGS__);                                                                             \
  } while (0)

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jit_values,
                                unsigned jit_count, enum cudaLibraryOption *options, void **values, unsigned count)
{
  DRIVER("cuLibraryLoadData",
         (CUlibrary *, const void *, CUjit_option *, void **, unsigned, CUlibraryOption *, void **, unsigned), library,
         code, jit, jit_values, jit_count, options, values, count);
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
  DRIVER("cuLibraryUnload", (CUlibrary), library);
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
  DRIVER("cuLibraryGetKernel", (CUkernel *, CUlibrary, const char *), (CUkernel *)kernel, library, name);
}

cudaError_t cudaLibraryGetKernelCount(unsigned *count, cudaLibrary_t library)
{
  DRIVER("cuLibraryGetKernelCount", (unsigned *, CUlibrary), count, library);
}

cudaError_t cudaLibraryEnumerateKernels(cudaKernel_t *kernels, unsigned count, cudaLibrary_t library)
{
  DRIVER("cuLibraryEnumerateKernels", (CUkernel *, unsigned, CUlibrary), (CUkernel *)kernels, count, library);
}

static cudaError_t global_at(CUdeviceptr *at, size_t *bytes, CUlibrary library, const char *name)
{
  DRIVER("cuLibraryGetGlobal", (CUdeviceptr *, size_t *, CUlibrary, const char *), at, bytes, library, name);
}

cudaError_t cudaLibraryGetGlobal(void **data, size_t *bytes, cudaLibrary_t library, const char *name)
{
  CUdeviceptr at = 0;
  const cudaError_t error = global_at(&at, bytes, library, name);
  *data = (void *)(uintptr_t)at;
  return error;
}
#endif
