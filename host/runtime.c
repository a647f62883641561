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

/* ---- facts of kernels ---- */

static cudaError_t function_of(CUfunction *function, const void *kernel)
{
  DRIVER("cuKernelGetFunction", (CUfunction *, CUkernel), function, (CUkernel)(uintptr_t)kernel);
}

static cudaError_t attribute_of(int *value, CUfunction_attribute attribute, CUfunction function)
{
  DRIVER("cuFuncGetAttribute", (int *, CUfunction_attribute, CUfunction), value, attribute, function);
}

cudaError_t kernel_attributes(struct cudaFuncAttributes *facts, const void *kernel)
{
  int v[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES + 1] = {0};
  CUfunction function = NULL;
  cudaError_t error = function_of(&function, kernel);
  for (int i = 0; error == cudaSuccess && i <= CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES; ++i)
    error = attribute_of(&v[i], (CUfunction_attribute)i, function);
  *facts = (struct cudaFuncAttributes){
      .maxThreadsPerBlock = v[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK],
      .sharedSizeBytes = (size_t)v[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES],
      .constSizeBytes = (size_t)v[CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES],
      .localSizeBytes = (size_t)v[CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES],
      .numRegs = v[CU_FUNC_ATTRIBUTE_NUM_REGS],
      .ptxVersion = v[CU_FUNC_ATTRIBUTE_PTX_VERSION],
      .binaryVersion = v[CU_FUNC_ATTRIBUTE_BINARY_VERSION],
      .maxDynamicSharedSizeBytes = v[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES],
  };
  return error;
}

/* DRIVER of a kernel's function in the current context. */
#define DRIVER_ON(kernel, name, signature, out, ...)                                                                   \
  do {                                                                                                                 \
    CUfunction function = NULL;                                                                                        \
    const cudaError_t found_it = function_of(&function, kernel);                                                       \
    if (found_it != cudaSuccess) return found_it;                                                                      \
    DRIVER(name, signature, out, function, __VA_ARGS__);                                                               \
  } while (0)

cudaError_t kernel_blocks(int *blocks, const void *kernel, int threads, size_t smem)
{
  DRIVER_ON(kernel, "cuOccupancyMaxActiveBlocksPerMultiprocessor", (int *, CUfunction, int, size_t), blocks, threads,
            smem);
}

cudaError_t kernel_spare_smem(size_t *bytes, const void *kernel, int blocks, int threads)
{
  DRIVER_ON(kernel, "cuOccupancyAvailableDynamicSMemPerBlock", (size_t *, CUfunction, int, int), bytes, blocks,
            threads);
}

cudaError_t kernel_clusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config)
{
  const CUlaunchConfig c = driver_config(config);
  DRIVER_ON(kernel, "cuOccupancyMaxActiveClusters", (int *, CUfunction, const CUlaunchConfig *), clusters, &c);
}

cudaError_t kernel_cluster_size(int *blocks, const void *kernel, const cudaLaunchConfig_t *config)
{
  const CUlaunchConfig c = driver_config(config);
  DRIVER_ON(kernel, "cuOccupancyMaxPotentialClusterSize", (int *, CUfunction, const CUlaunchConfig *), blocks, &c);
}
#endif
