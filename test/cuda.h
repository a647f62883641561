/* The runtime's own calls, checked: for programs that use CUDA beside cumoe. */
#ifndef TEST_CUDA_H
#define TEST_CUDA_H

#include <cuda_runtime_api.h>

#if CUDART_VERSION < 12050 /* as host/runtime.h says */
#define cudaGetDriverEntryPointByVersion(name, function, version, flags, found)                                        \
  cudaGetDriverEntryPoint(name, function, flags, found)
#endif

#include "test.h"

#define CHECK_CUDA(call) check_cuda((call), __FILE__, __LINE__, #call)
static inline bool check_cuda(cudaError_t error, const char *file, int line, const char *call)
{
  return error == cudaSuccess || test_failed(file, line, "%s: %s", call, cudaGetErrorName(error));
}

#endif
