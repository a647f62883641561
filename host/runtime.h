/*
 * The CUDA runtime, as CUDA 12.8 and newer have it. What older ones, down to 12.4, lack is made of the driver's calls
 * (runtime.c). Such a call fails without an error that the runtime keeps for the thread, and takes a look-up: none of
 * them is on the way of a launch.
 */
#ifndef CUMOE_HOST_RUNTIME_H
#define CUMOE_HOST_RUNTIME_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>

#if CUDART_VERSION < 12040
#error "cumoe needs the CUDA Toolkit 12.4 or newer"
#endif

#if CUDART_VERSION < 12080
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

/* Those of older runtimes know the kernels that are linked into a program, not those of a library. */
#define cudaFuncGetAttributes                         kernel_attributes
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor kernel_blocks
#define cudaOccupancyAvailableDynamicSMemPerBlock     kernel_spare_smem
#define cudaOccupancyMaxActiveClusters                kernel_clusters
#define cudaOccupancyMaxPotentialClusterSize          kernel_cluster_size
cudaError_t kernel_attributes(struct cudaFuncAttributes *facts, const void *kernel);
cudaError_t kernel_blocks(int *blocks, const void *kernel, int threads, size_t smem);
cudaError_t kernel_spare_smem(size_t *bytes, const void *kernel, int blocks, int threads);
cudaError_t kernel_clusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config);
cudaError_t kernel_cluster_size(int *blocks, const void *kernel, const cudaLaunchConfig_t *config);
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

_Static_assert(sizeof(CUlaunchAttribute) == sizeof(cudaLaunchAttribute) &&
                   offsetof(CUlaunchAttribute, value) == offsetof(cudaLaunchAttribute, val),
               "the driver's attributes are the runtime's");

static inline CUlaunchConfig driver_config(const cudaLaunchConfig_t *c)
{
  return (CUlaunchConfig){.gridDimX = c->gridDim.x,
                          .gridDimY = c->gridDim.y,
                          .gridDimZ = c->gridDim.z,
                          .blockDimX = c->blockDim.x,
                          .blockDimY = c->blockDim.y,
                          .blockDimZ = c->blockDim.z,
                          .sharedMemBytes = (unsigned)c->dynamicSmemBytes,
                          .hStream = c->stream,
                          .attrs = (CUlaunchAttribute *)(void *)c->attrs,
                          .numAttrs = c->numAttrs};
}

#endif
