/*
 * The CUDA runtime, as CUDA 12.8 and newer have it. What older ones, down to 12.4, lack is made of the driver's calls
 * (runtime.c). Such a call fails without an error that the runtime keeps for the thread, and takes a look-up: none of
 * them is on the way of a launch.
 */
#ifndef CUMOE_HOST_RUNTIME_H
#define CUMOE_HOST_RUNTIME_H

#include <cuda_runtime_api.h>

#if CUDART_VERSION < 12040
#error "cumoe needs the CUDA Toolkit 12.4 or newer"
#endif

#if CUDART_VERSION < 12080
#include <cuda.h>

#define cudaErrorTensorMemoryLeak      721
#define cudaLibrary_t                  CUlibrary
#define cudaJitOption                  CUjit_option_enum
#define cudaJitErrorLogBuffer          CU_JIT_ERROR_LOG_BUFFER
#define cudaJitErrorLogBufferSizeBytes CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
#define cudaLibraryOption              CUlibraryOption_enum
#define cudaLibraryBinaryIsPreserved   CU_LIBRARY_BINARY_IS_PRESERVED

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jit_values,
                                unsigned jit_count, enum cudaLibraryOption *options, void **values, unsigned count);
cudaError_t cudaLibraryUnload(cudaLibrary_t library);
cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name);
cudaError_t cudaLibraryGetKernelCount(unsigned *count, cudaLibrary_t library);
cudaError_t cudaLibraryEnumerateKernels(cudaKernel_t *kernels, unsigned count, cudaLibrary_t library);
cudaError_t cudaLibraryGetGlobal(void **data, size_t *bytes, cudaLibrary_t library, const char *name);
#endif

#if CUDART_VERSION < 12050
/* By the ABI of the runtime's own version, which is no older than any that cumoe asks for. */
static inline cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                           unsigned long long flags,
                                                           enum cudaDriverEntryPointQueryResult *found)
{
  (void)version;
  return cudaGetDriverEntryPoint(name, function, flags, found);
}
#endif

#endif
