/* How bytes are freed, moved and waited for: the one place that tells the CUDA device from the CPU device. */
#include <cuda.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "context.h"
#include "pool.h"
#include "status.h"

static const size_t MAX_PITCH = INT32_MAX; /* of CUDA's 2-D copies */

/* ---- waiting ---- */

static cumoe_status refuse_capture_cuda(cumoe_stream stream)
{
  enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  TRY_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture == cudaStreamCaptureStatusNone) return CUMOE_OK;
  return fail(CUMOE_ERR_CAPTURE_UNSAFE, "the stream is being captured into a graph");
}

cumoe_status refuse_capture(struct context *context, cumoe_stream stream)
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

cumoe_status memory_wait(struct context *context, cumoe_stream stream)
{
  if (on_cpu(context)) return CUMOE_OK;
  ON_DEVICE_RELAXED(context, wait_cuda(stream));
}

/* ---- events: what one stream has done, for another to wait for ---- */

static cumoe_status mark_cuda(cumoe_stream stream, cudaEvent_t *event)
{
  TRY(refuse_capture_cuda(stream));
  TRY_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  cumoe_status status = CUMOE_OK;
  DROP_CUDA(&status, cudaEventRecord(*event, stream));
  if (status == CUMOE_OK) return CUMOE_OK;
  DROP_CUDA(&status, cudaEventDestroy(*event));
  *event = NULL;
  return status;
}

cumoe_status memory_mark(struct context *context, cumoe_stream stream, cudaEvent_t *event)
{
  *event = NULL;
  if (on_cpu(context)) return CUMOE_OK;
  ON_DEVICE_RELAXED(context, mark_cuda(stream, event));
}

static cumoe_status follow_cuda(cumoe_stream stream, cudaEvent_t event)
{
  TRY_CUDA(cudaStreamWaitEvent(stream, event, 0));
  return CUMOE_OK;
}

cumoe_status memory_follow(struct context *context, cumoe_stream stream, cudaEvent_t event)
{
  if (event == NULL) return CUMOE_OK;
  ON_DEVICE(context, follow_cuda(stream, event));
}

/* Whoever waits for it goes on waiting. */
cumoe_status memory_unmark(struct context *context, cudaEvent_t event)
{
  device_scope scope;
  if (event == NULL) return CUMOE_OK;
  cumoe_status status = enter_lost_device(context, &scope);
  DROP_CUDA(&status, cudaEventDestroy(event));
  leave_device(&scope);
  return status;
}

/* ---- host memory ---- */

/* Sizes are far below an address space: nobody gets here with more. */
void *memory_of_host(size_t bytes)
{
  return aligned_alloc(MEMORY_ALIGNMENT, (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT);
}

static cumoe_status pin_cuda(size_t bytes, bool write_combined, void **data)
{
  const unsigned combined = write_combined ? cudaHostAllocWriteCombined : 0;
  const cudaError_t error = cudaHostAlloc(data, bytes, cudaHostAllocPortable | cudaHostAllocMapped | combined);
  if (error == cudaSuccess) return CUMOE_OK;
  *data = NULL;
  if (error != cudaErrorMemoryAllocation) return fail_cuda(error, "cudaHostAlloc");
  clear_cuda_error();
  return fail(CUMOE_ERR_OUT_OF_MEMORY, "cudaHostAlloc: %s: %zu bytes of pinned memory", cudaGetErrorName(error), bytes);
}

cumoe_status memory_pin(struct context *context, size_t bytes, bool write_combined, void **data)
{
  *data = NULL;
  if (!on_cpu(context)) ON_DEVICE_RELAXED(context, pin_cuda(bytes, write_combined, data));
  *data = memory_of_host(bytes);
  if (*data != NULL) return CUMOE_OK;
  return fail(CUMOE_ERR_OUT_OF_MEMORY, "%zu bytes of host memory could not be allocated", bytes);
}

/* ---- freeing ---- */

typedef enum how_to_free { FREE_IN_ORDER, FREE_NOW, FREE_PINNED } how_to_free;

static void free_entered(void *data, cumoe_stream stream, how_to_free how, cumoe_status *status)
{
  switch (how) {
  case FREE_IN_ORDER: DROP_CUDA(status, cudaFreeAsync(data, stream)); break;
  case FREE_NOW: DROP_CUDA(status, cudaFree(data)); break;
  case FREE_PINNED: DROP_CUDA(status, cudaFreeHost(data)); break;
  }
}

/* The handle is gone already: memory is given back even where the device cannot be entered, or is lost. */
static cumoe_status free_cuda(struct context *context, void *data, cumoe_stream stream, how_to_free how)
{
  device_scope scope;
  cumoe_status status = enter_lost_device(context, &scope);
  enum cudaStreamCaptureMode mode = relax_capture();
  free_entered(data, stream, how, &status);
  restore_capture(mode);
  leave_device(&scope);
  TRY(check_alive(context));
  return status;
}

static cumoe_status free_any(struct context *context, void *data, cumoe_stream stream, how_to_free how)
{
  if (data == NULL) return CUMOE_OK;
  if (!on_cpu(context)) return free_cuda(context, data, stream, how);
  free(data);
  return CUMOE_OK;
}

cumoe_status memory_free(struct context *context, void *data, cumoe_stream stream)
{
  return free_any(context, data, stream, FREE_IN_ORDER);
}

/* cudaFree is legal for pool memory too, once nothing uses it. */
cumoe_status memory_drop(struct context *context, void *data)
{
  return free_any(context, data, NULL, FREE_NOW);
}

cumoe_status memory_unpin(struct context *context, void *data)
{
  return free_any(context, data, NULL, FREE_PINNED);
}

/* ---- foreign memory ---- */

typedef CUresult pointer_attribute(void *value, CUpointer_attribute attribute, CUdeviceptr data);

/* The runtime has no call that tells pool memory from other memory, or where an allocation begins: the driver
 * has. */
static cumoe_status inspect_range(const void *data, size_t bytes, bool *pooled)
{
  driver_function *function = NULL;
  TRY(find_driver_function("cuPointerGetAttribute", 12000, &function));
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

static cumoe_status inspect_cuda(struct context *context, const void *data, size_t bytes, bool *pooled)
{
  struct cudaPointerAttributes facts;
  TRY_CUDA(cudaPointerGetAttributes(&facts, data));
  if (facts.type != cudaMemoryTypeDevice) return fail(CUMOE_ERR_WRONG_DEVICE, "data %p is not device memory", data);
  if (facts.device != context->device)
    return fail(CUMOE_ERR_WRONG_DEVICE, "data %p lies on device %d, the context is on device %d", data, facts.device,
                context->device);
  return inspect_range(data, bytes, pooled);
}

cumoe_status memory_inspect(struct context *context, const void *data, size_t bytes, bool *pooled)
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

/* CUDA stages pageable memory before a copy returns, unless the GPU can read it where it is. */
static cumoe_status wait_for_pages(const struct context *context, const void *host, cumoe_stream stream)
{
  struct cudaPointerAttributes facts;
  if (!context->reads_pages) return CUMOE_OK;
  TRY_CUDA(cudaPointerGetAttributes(&facts, host));
  if (facts.type == cudaMemoryTypeUnregistered) TRY_CUDA(cudaStreamSynchronize(stream));
  return CUMOE_OK;
}

static cumoe_status copy_cuda(const struct context *context, char *dst, size_t dst_pitch, const char *src,
                              size_t src_pitch, size_t width, size_t rows, enum cudaMemcpyKind kind,
                              cumoe_stream stream)
{
  if (dst_pitch <= MAX_PITCH && src_pitch <= MAX_PITCH)
    TRY_CUDA(cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, rows, kind, stream));
  else
    for (size_t r = 0; r < rows; r++) /* rows of 2 GiB: few */
      TRY_CUDA(cudaMemcpyAsync(dst + r * dst_pitch, src + r * src_pitch, width, kind, stream));
  if (kind == cudaMemcpyDeviceToDevice) return CUMOE_OK;
  return wait_for_pages(context, kind == cudaMemcpyHostToDevice ? src : dst, stream);
}

cumoe_status memory_copy(struct context *context, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
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
  ON_DEVICE(context, copy_cuda(context, dst, dst_pitch, src, src_pitch, width, rows, kind, stream));
}

static cumoe_status copy_peer_rows(struct context *context, char *dst, size_t dst_pitch, int32_t src_device,
                                   const char *src, size_t src_pitch, size_t width, size_t rows, cumoe_stream stream)
{
  const struct cudaMemcpy3DPeerParms block = {
      .srcPtr = {(void *)(uintptr_t)src, src_pitch, width, rows},
      .srcDevice = src_device,
      .dstPtr = {dst, dst_pitch, width, rows},
      .dstDevice = context->device,
      .extent = {width, rows, 1},
  };
  if (rows > 1 && dst_pitch <= MAX_PITCH && src_pitch <= MAX_PITCH) {
    TRY_CUDA(cudaMemcpy3DPeerAsync(&block, stream));
    return CUMOE_OK;
  }
  for (size_t r = 0; r < rows; r++)
    TRY_CUDA(cudaMemcpyPeerAsync(dst + r * dst_pitch, context->device, src + r * src_pitch, src_device, width, stream));
  return CUMOE_OK;
}

cumoe_status memory_copy_peer(struct context *context, void *dst, size_t dst_pitch, int32_t src_device, const void *src,
                              size_t src_pitch, size_t width, size_t rows, cumoe_stream stream)
{
  if (width == 0 || rows == 0) return CUMOE_OK;
  if (dst_pitch == width && src_pitch == width) {
    width *= rows;
    rows = 1;
  }
  ON_DEVICE(context, copy_peer_rows(context, dst, dst_pitch, src_device, src, src_pitch, width, rows, stream));
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

cumoe_status memory_fill(struct context *context, void *dst, size_t pitch, uint8_t byte, size_t width, size_t rows,
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
