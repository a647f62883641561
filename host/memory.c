/* How bytes are allocated, freed and moved: the one place that tells the CUDA device from the CPU device. */
#include <cuda.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { ALIGNMENT = 256 };
static const size_t MAX_PITCH = INT32_MAX; /* of CUDA's 2-D copies */

/* ---- waiting ---- */

static cumoe_status refuse_capture_cuda(cumoe_stream stream)
{
  enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  TRY_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture == cudaStreamCaptureStatusNone) return CUMOE_OK;
  return fail(CUMOE_ERR_CAPTURE_UNSAFE, "the stream is being captured into a graph");
}

cumoe_status refuse_capture(cumoe_context context, cumoe_stream stream)
{
  if (on_cpu(context)) return CUMOE_OK;
  ON_DEVICE(context, refuse_capture_cuda(stream));
}

static cumoe_status wait_cuda(cumoe_stream stream)
{
  TRY(refuse_capture_cuda(stream));
  TRY_CUDA(cudaStreamSynchronize(stream));
  return CUMOE_OK;
}

cumoe_status memory_wait(cumoe_context context, cumoe_stream stream)
{
  if (on_cpu(context)) return CUMOE_OK;
  ON_DEVICE_RELAXED(context, wait_cuda(stream));
}

/* ---- allocation ---- */

static cumoe_status alloc_cpu(size_t bytes, void **data)
{
  size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (rounded >= bytes && rounded <= PTRDIFF_MAX) *data = aligned_alloc(ALIGNMENT, rounded);
  if (*data != NULL) return CUMOE_OK;
  return fail(CUMOE_ERR_OUT_OF_MEMORY, "%zu bytes of host memory could not be allocated", bytes);
}

/* Memory freed on other streams, and a fragmented pool, become usable when the stream has passed and the pool
 * has given its idle memory back. That costs a wait, which is cheaper than failing. */
static cumoe_status alloc_cuda(cumoe_context context, size_t bytes, cumoe_stream stream, void **data)
{
  cudaError_t error = cudaMallocFromPoolAsync(data, bytes, context->pool, stream);
  if (error == cudaErrorMemoryAllocation) {
    clear_cuda_error();
    TRY_CUDA(cudaStreamSynchronize(stream));
    TRY_CUDA(cudaMemPoolTrimTo(context->pool, 0));
    error = cudaMallocFromPoolAsync(data, bytes, context->pool, stream);
  }
  if (error == cudaSuccess) return CUMOE_OK;
  *data = NULL;
  if (error != cudaErrorMemoryAllocation) return fail_cuda(error, "cudaMallocFromPoolAsync");
  clear_cuda_error();
  size_t available = 0, total = 0;
  if (cudaMemGetInfo(&available, &total) != cudaSuccess) clear_cuda_error();
  return fail(CUMOE_ERR_OUT_OF_MEMORY,
              "cudaMallocFromPoolAsync: %s: %zu bytes asked, %zu of %zu bytes free on device %d",
              cudaGetErrorName(error), bytes, available, total, context->device);
}

static cumoe_status alloc_cuda_uncaptured(cumoe_context context, size_t bytes, cumoe_stream stream, void **data)
{
  TRY(refuse_capture_cuda(stream)); /* it would become a node of the graph, and so would the free */
  return alloc_cuda(context, bytes, stream, data);
}

cumoe_status memory_alloc(cumoe_context context, size_t bytes, cumoe_stream stream, void **data)
{
  *data = NULL;
  if (bytes == 0) return CUMOE_OK;
  if (on_cpu(context)) return alloc_cpu(bytes, data);
  ON_DEVICE_RELAXED(context, alloc_cuda_uncaptured(context, bytes, stream, data));
}

/* The handle is gone already: memory is given back even where the device cannot be entered, or is lost. */
static cumoe_status free_cuda(cumoe_context context, void *data, cumoe_stream stream, bool ordered)
{
  device_scope scope;
  cumoe_status status = enter_lost_device(context, &scope);
  enum cudaStreamCaptureMode mode = relax_capture();
  cudaError_t error = ordered ? cudaFreeAsync(data, stream) : cudaFree(data);
  if (error != cudaSuccess) {
    cumoe_status failed = fail_cuda(error, ordered ? "cudaFreeAsync" : "cudaFree");
    if (status == CUMOE_OK) status = failed;
  }
  restore_capture(mode);
  leave_device(&scope);
  TRY(check_alive(context));
  return status;
}

cumoe_status memory_free(cumoe_context context, void *data, cumoe_stream stream)
{
  if (data == NULL) return CUMOE_OK;
  if (!on_cpu(context)) return free_cuda(context, data, stream, true);
  free(data);
  return CUMOE_OK;
}

/* cudaFree is legal for pool memory too, once nothing uses it. */
cumoe_status memory_drop(cumoe_context context, void *data)
{
  if (data == NULL) return CUMOE_OK;
  if (!on_cpu(context)) return free_cuda(context, data, NULL, false);
  free(data);
  return CUMOE_OK;
}

/* ---- foreign memory ---- */

typedef CUresult pointer_attribute(void *value, CUpointer_attribute attribute, CUdeviceptr data);

/* The runtime has no call that tells pool memory from other memory, or where an allocation begins: the driver
 * has. */
static cumoe_status inspect_range(const void *data, size_t bytes, bool *pooled)
{
  driver_function *function = NULL;
  TRY(find_driver_function("cuPointerGetAttribute", &function));
  pointer_attribute *query = (pointer_attribute *)function;
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)data;
  CUdeviceptr start = 0;
  size_t size = 0;
  CUmemoryPool pool = NULL;
  CUresult result = query(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at);
  if (result == CUDA_SUCCESS) result = query(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at);
  if (result == CUDA_ERROR_INVALID_VALUE)
    return fail(CUMOE_ERR_INVALID_ARGUMENT, "data %p is in no allocation that the CUDA driver knows", data);
  if (result == CUDA_SUCCESS) result = query(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, at);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_VALUE)
    return fail_cuda((cudaError_t)result, "cuPointerGetAttribute");
  if (start != at)
    return fail(CUMOE_ERR_INVALID_ARGUMENT, "data %p lies inside the allocation that begins at %p", data,
                (void *)(uintptr_t)start);
  if (size < bytes)
    return fail(CUMOE_ERR_OUT_OF_BOUNDS, "the allocation at %p has %zu bytes, the buffer %zu", data, size, bytes);
  *pooled = pool != NULL;
  return CUMOE_OK;
}

static cumoe_status inspect_cuda(cumoe_context context, const void *data, size_t bytes, bool *pooled)
{
  struct cudaPointerAttributes facts;
  TRY_CUDA(cudaPointerGetAttributes(&facts, data));
  if (facts.type != cudaMemoryTypeDevice) return fail(CUMOE_ERR_WRONG_DEVICE, "data %p is not device memory", data);
  if (facts.device != context->device)
    return fail(CUMOE_ERR_WRONG_DEVICE, "data %p lies on device %d, the context is on device %d", data, facts.device,
                context->device);
  return inspect_range(data, bytes, pooled);
}

cumoe_status memory_inspect(cumoe_context context, const void *data, size_t bytes, bool *pooled)
{
  *pooled = false;
  if (data == NULL || on_cpu(context)) return CUMOE_OK;
  ON_DEVICE(context, inspect_cuda(context, data, bytes, pooled));
}

/* ---- moving bytes ---- */

static void copy_rows(char *dst, size_t dst_pitch, const char *src, size_t src_pitch, size_t width, size_t rows)
{
  for (size_t r = 0; r < rows; r++) memcpy(dst + r * dst_pitch, src + r * src_pitch, width);
}

static cumoe_status copy_cuda(char *dst, size_t dst_pitch, const char *src, size_t src_pitch, size_t width, size_t rows,
                              enum cudaMemcpyKind kind, cumoe_stream stream)
{
  if (dst_pitch <= MAX_PITCH && src_pitch <= MAX_PITCH) {
    TRY_CUDA(cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, rows, kind, stream));
    return CUMOE_OK;
  }
  for (size_t r = 0; r < rows; r++) /* rows of 2 GiB: few */
    TRY_CUDA(cudaMemcpyAsync(dst + r * dst_pitch, src + r * src_pitch, width, kind, stream));
  return CUMOE_OK;
}

cumoe_status memory_copy(cumoe_context context, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                         size_t width, size_t rows, enum cudaMemcpyKind kind, cumoe_stream stream)
{
  if (width == 0 || rows == 0) return CUMOE_OK;
  if (rows == 1 || (dst_pitch == width && src_pitch == width)) { /* one run of bytes */
    width *= rows;
    rows = 1;
    dst_pitch = src_pitch = width;
  }
  if (on_cpu(context)) {
    copy_rows(dst, dst_pitch, src, src_pitch, width, rows);
    return CUMOE_OK;
  }
  if (rows == 1) dst_pitch = src_pitch = SIZE_MAX; /* the 1-D call has no limit on the width */
  ON_DEVICE(context, copy_cuda(dst, dst_pitch, src, src_pitch, width, rows, kind, stream));
}

static cumoe_status fill_cuda(char *dst, size_t pitch, uint8_t byte, size_t width, size_t rows, cumoe_stream stream)
{
  if (pitch <= MAX_PITCH) {
    TRY_CUDA(cudaMemset2DAsync(dst, pitch, byte, width, rows, stream));
    return CUMOE_OK;
  }
  for (size_t r = 0; r < rows; r++) TRY_CUDA(cudaMemsetAsync(dst + r * pitch, byte, width, stream));
  return CUMOE_OK;
}

cumoe_status memory_fill(cumoe_context context, void *dst, size_t pitch, uint8_t byte, size_t width, size_t rows,
                         cumoe_stream stream)
{
  if (width == 0 || rows == 0) return CUMOE_OK;
  if (rows == 1 || pitch == width) {
    width *= rows;
    rows = 1;
    pitch = width;
  }
  if (on_cpu(context)) {
    for (size_t r = 0; r < rows; r++) memset((char *)dst + r * pitch, byte, width);
    return CUMOE_OK;
  }
  if (rows == 1) pitch = SIZE_MAX;
  ON_DEVICE(context, fill_cuda(dst, pitch, byte, width, rows, stream));
}
