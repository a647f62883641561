/* Events, and what streams and graphs can do besides taking work. Work is done when it is launched: nothing is
 * ever pending. */
#include "core.h"

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT, "flags %u priority %d", flags, priority);
  if (error == cudaSuccess) {
    *out = (cudaStream_t)object_new(STREAM, sizeof **out);
    (*out)->flags = flags;
  }
  return shim_end(error);
}

/* Asking a stream under capture breaks the capture. */
cudaError_t cudaStreamQuery(cudaStream_t stream)
{
  cudaError_t error = BEGIN(SHIM_QUERY | SHIM_CONTEXT | SHIM_UNSAFE, "%s", "");
  if (error == cudaSuccess) error = stream_takes_work(stream);
  if (error == cudaSuccess && stream_of(stream)->graph != NULL) {
    stream_of(stream)->invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  if (error == cudaSuccess && stream_of(stream)->stuck) error = cudaErrorNotReady;
  return shim_end(error);
}

static cudaError_t event_error(cudaEvent_t event)
{
  return object_find(EVENT, event) != NULL ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT, "flags %u", flags);
  if (error == cudaSuccess) *out = (cudaEvent_t)object_new(EVENT, sizeof **out);
  return shim_end(error);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
  cudaError_t error = BEGIN(SHIM_ALLOC, "%s", "");
  if (object_find(EVENT, event) != NULL)
    object_end(&event->object);
  else if (error == cudaSuccess)
    error = cudaErrorInvalidResourceHandle;
  return shim_end(error);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
  cudaError_t error = BEGIN(SHIM_CONTEXT, "%s", "");
  if (error == cudaSuccess) error = event_error(event);
  if (error == cudaSuccess) error = stream_takes_work(stream);
  if (error == cudaSuccess) event->recorded = true, event->on = stream_of(stream)->graph ? stream_of(stream) : NULL;
  return shim_end(error);
}

/* A stream that waits for one under capture is captured as well, until it has been waited for itself. */
static void wait_in_capture(struct CUstream_st *s, struct CUstream_st *on)
{
  if (on == NULL || on->graph == NULL || on == s) return;
  on->loose = false;
  if (s->graph != NULL) return;
  s->graph = on->graph;
  s->mode = on->mode;
  s->thread = on->thread;
  s->forked = s->loose = true;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
  cudaError_t error = BEGIN(SHIM_CONTEXT, "flags %u", flags);
  if (error == cudaSuccess) error = event_error(event);
  if (error == cudaSuccess && stream_of(stream) == NULL) error = cudaErrorInvalidResourceHandle;
  if (error == cudaSuccess) wait_in_capture(stream_of(stream), event->on);
  return shim_end(error);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
  cudaError_t error = BEGIN(SHIM_QUERY | SHIM_CONTEXT | SHIM_UNSAFE, "%s", "");
  if (error == cudaSuccess) error = event_error(event);
  return shim_end(error);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
  cudaError_t error = BEGIN(SHIM_SYNC | SHIM_CONTEXT | SHIM_UNSAFE, "%s", "");
  if (error == cudaSuccess) error = event_error(event);
  return shim_end(error);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last)
{
  cudaError_t error = BEGIN(SHIM_QUERY | SHIM_CONTEXT, "%s", "");
  if (error == cudaSuccess) error = event_error(first);
  if (error == cudaSuccess) error = event_error(last);
  if (error == cudaSuccess && !(first->recorded && last->recorded)) error = cudaErrorInvalidResourceHandle;
  if (error == cudaSuccess) *milliseconds = 0.5f;
  return shim_end(error);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT, "%s", "");
  if (error == cudaSuccess && object_find(GRAPH_EXEC, exec) == NULL) error = cudaErrorInvalidValue;
  if (error == cudaSuccess) error = stream_takes_work(stream);
  return shim_end(error);
}
