/* Streams, events and graphs: CUDA's own, on the context's device. */
#include "context.h"
#include "memory.h"
#include "status.h"

#include "../include/cumoe/stream.h"

#define REQUIRE_POINTER(pointer) REQUIRE((pointer) != NULL, CUMOE_ERR_INVALID_ARGUMENT, "%s is null", #pointer)

/* ---- streams ---- */

static cumoe_status create_stream(int32_t priority, cumoe_stream *stream)
{
  const cudaError_t error = cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, priority);
  if (error == cudaSuccess) return CUMOE_OK;
  *stream = NULL;
  return fail_cuda(error, "cudaStreamCreateWithPriority");
}

cumoe_status cumoe_stream_create(cumoe_context handle, int32_t priority, cumoe_stream *stream)
{
  begin_call(__func__);
  struct context *context;
  REQUIRE_POINTER(stream);
  *stream = NULL;
  TRY(find_context(handle, &context));
  if (on_cpu(context)) return CUMOE_OK;
  ON_DEVICE_RELAXED(context, create_stream(priority, stream));
}

static cumoe_status capture_state(cumoe_stream stream, cumoe_capture *capture)
{
  enum cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  TRY_CUDA(cudaStreamIsCapturing(stream, &state));
  *capture = state == cudaStreamCaptureStatusNone     ? CUMOE_CAPTURE_NONE
             : state == cudaStreamCaptureStatusActive ? CUMOE_CAPTURE_ACTIVE
                                                      : CUMOE_CAPTURE_INVALIDATED;
  return CUMOE_OK;
}

/* Only a capture that is known keeps a stream alive: when CUDA does not even answer that, it goes. */
static cumoe_status destroy_stream(cumoe_stream stream)
{
  cumoe_capture state = CUMOE_CAPTURE_NONE;
  const cumoe_status asked = capture_state(stream, &state);
  if (asked == CUMOE_OK && state != CUMOE_CAPTURE_NONE)
    return fail(CUMOE_ERR_CAPTURE_UNSAFE, "the stream is being captured into a graph");
  TRY_CUDA(cudaStreamDestroy(stream));
  return asked;
}

cumoe_status cumoe_stream_destroy(cumoe_context handle, cumoe_stream stream)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (stream == NULL || on_cpu(context)) return CUMOE_OK;
  REQUIRE(stream != CUMOE_STREAM_PER_THREAD, CUMOE_ERR_INVALID_ARGUMENT, "stream is CUDA's own, of every thread");
  GIVE_BACK_RELAXED(context, destroy_stream(stream));
}

/* CUDA reports "not ready" as an error; it is none. */
static cumoe_status progress_of(cudaError_t error, const char *call, cumoe_progress *progress)
{
  *progress = error == cudaSuccess ? CUMOE_DONE : error == cudaErrorNotReady ? CUMOE_PENDING : CUMOE_FAILED;
  if (*progress == CUMOE_PENDING) clear_cuda_error();
  return *progress == CUMOE_FAILED ? fail_cuda(error, call) : CUMOE_OK;
}

cumoe_status cumoe_stream_query(cumoe_context handle, cumoe_stream stream, cumoe_progress *progress)
{
  begin_call(__func__);
  struct context *context;
  REQUIRE_POINTER(progress);
  *progress = CUMOE_FAILED;
  TRY(find_context(handle, &context));
  TRY(refuse_capture(context, stream));
  if (!on_cpu(context)) ON_DEVICE_RELAXED(context, progress_of(cudaStreamQuery(stream), "cudaStreamQuery", progress));
  *progress = CUMOE_DONE;
  return CUMOE_OK;
}

/* The waiter keeps what it needs of the event, which may go at once. */
static cumoe_status join(cumoe_stream waiter, cumoe_stream on)
{
  cudaEvent_t event = NULL;
  TRY_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  cudaError_t error = cudaEventRecord(event, on);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(waiter, event, 0);
  const cudaError_t last = cudaEventDestroy(event);
  if (error == cudaSuccess) error = last;
  return error == cudaSuccess ? CUMOE_OK : fail_cuda(error, "cudaEventRecord, cudaStreamWaitEvent");
}

cumoe_status cumoe_stream_join(cumoe_context handle, cumoe_stream waiter, cumoe_stream on)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (waiter == on || on_cpu(context)) return CUMOE_OK;
  ON_DEVICE_RELAXED(context, join(waiter, on));
}

/* ---- events ---- */

static cumoe_status create_event(uint32_t flags, cumoe_event *event)
{
  const unsigned cuda = (flags & CUMOE_EVENT_TIMING ? cudaEventDefault : cudaEventDisableTiming) |
                        (flags & CUMOE_EVENT_SLEEP ? cudaEventBlockingSync : cudaEventDefault);
  const cudaError_t error = cudaEventCreateWithFlags(event, cuda);
  if (error == cudaSuccess) return CUMOE_OK;
  *event = NULL;
  return fail_cuda(error, "cudaEventCreateWithFlags");
}

cumoe_status cumoe_event_create(cumoe_context handle, uint32_t flags, cumoe_event *event)
{
  begin_call(__func__);
  struct context *context;
  const uint32_t known = CUMOE_EVENT_TIMING | CUMOE_EVENT_SLEEP;
  REQUIRE_POINTER(event);
  *event = NULL;
  TRY(find_context(handle, &context));
  REQUIRE((flags & ~known) == 0, CUMOE_ERR_INVALID_ARGUMENT, "flags is 0x%x, known are 0x%x", flags, known);
  if (on_cpu(context)) return CUMOE_OK;
  ON_DEVICE_RELAXED(context, create_event(flags, event));
}

cumoe_status cumoe_event_destroy(cumoe_context handle, cumoe_event event)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (event == NULL || on_cpu(context)) return CUMOE_OK;
  GIVE_BACK_RELAXED(context, CUDA_STATUS(cudaEventDestroy(event)));
}

cumoe_status cumoe_event_record(cumoe_context handle, cumoe_event event, cumoe_stream stream)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (on_cpu(context)) return CUMOE_OK;
  REQUIRE_POINTER(event);
  ON_DEVICE(context, CUDA_STATUS(cudaEventRecord(event, stream)));
}

cumoe_status cumoe_event_wait(cumoe_context handle, cumoe_event event, cumoe_stream stream)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (on_cpu(context)) return CUMOE_OK;
  REQUIRE_POINTER(event);
  ON_DEVICE(context, CUDA_STATUS(cudaStreamWaitEvent(stream, event, 0)));
}

cumoe_status cumoe_event_synchronize(cumoe_context handle, cumoe_event event)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (on_cpu(context)) return CUMOE_OK;
  REQUIRE_POINTER(event);
  ON_DEVICE_RELAXED(context, CUDA_STATUS(cudaEventSynchronize(event)));
}

cumoe_status cumoe_event_query(cumoe_context handle, cumoe_event event, cumoe_progress *progress)
{
  begin_call(__func__);
  struct context *context;
  REQUIRE_POINTER(progress);
  *progress = CUMOE_FAILED;
  TRY(find_context(handle, &context));
  REQUIRE(event != NULL || on_cpu(context), CUMOE_ERR_INVALID_ARGUMENT, "event is null");
  if (!on_cpu(context)) ON_DEVICE_RELAXED(context, progress_of(cudaEventQuery(event), "cudaEventQuery", progress));
  *progress = CUMOE_DONE;
  return CUMOE_OK;
}

static cumoe_status elapsed(cumoe_event first, cumoe_event last, float *milliseconds)
{
  const cudaError_t error = cudaEventElapsedTime(milliseconds, first, last);
  if (error == cudaSuccess) return CUMOE_OK;
  *milliseconds = 0;
  if (error != cudaErrorNotReady) return fail_cuda(error, "cudaEventElapsedTime of CUMOE_EVENT_TIMING events");
  clear_cuda_error();
  return fail(CUMOE_ERR_INVALID_ARGUMENT, "first or last is pending: wait for it, there is no time yet");
}

cumoe_status cumoe_event_elapsed(cumoe_context handle, cumoe_event first, cumoe_event last, float *milliseconds)
{
  begin_call(__func__);
  struct context *context;
  REQUIRE_POINTER(milliseconds);
  *milliseconds = 0;
  TRY(find_context(handle, &context));
  REQUIRE(!on_cpu(context), CUMOE_ERR_NOT_SUPPORTED, "the CPU device's events have no times");
  REQUIRE_POINTER(first);
  REQUIRE_POINTER(last);
  ON_DEVICE_RELAXED(context, elapsed(first, last, milliseconds));
}

/* ---- graphs ---- */

static cumoe_status no_graphs(void)
{
  return fail(CUMOE_ERR_NOT_SUPPORTED, "the CPU device has no graphs");
}

cumoe_status cumoe_graph_status(cumoe_context handle, cumoe_stream stream, cumoe_capture *capture)
{
  begin_call(__func__);
  struct context *context;
  REQUIRE_POINTER(capture);
  *capture = CUMOE_CAPTURE_NONE;
  TRY(find_context(handle, &context));
  if (on_cpu(context)) return CUMOE_OK;
  ON_DEVICE(context, capture_state(stream, capture));
}

cumoe_status cumoe_graph_begin(cumoe_context handle, cumoe_stream stream)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (on_cpu(context)) return no_graphs();
  REQUIRE(stream != NULL, CUMOE_ERR_INVALID_ARGUMENT, "stream is NULL: CUDA's legacy stream cannot be captured");
  TRY(refuse_capture(context, stream));
  ON_DEVICE(context, CUDA_STATUS(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)));
}

/* Asks nothing before it ends the capture: that is over in any case. */
static cumoe_status end_capture(cumoe_stream stream, cumoe_graph *graph)
{
  cudaGraph_t recorded = NULL;
  cudaError_t error = cudaStreamEndCapture(stream, &recorded);
  if (error == cudaErrorIllegalState) {
    clear_cuda_error();
    return fail(CUMOE_ERR_INVALID_ARGUMENT, "stream is not being captured");
  }
  if (error != cudaSuccess) return fail_cuda(error, "cudaStreamEndCapture");
  error = cudaGraphInstantiate(graph, recorded, 0);
  if (error != cudaSuccess) *graph = NULL;
  const cudaError_t last = cudaGraphDestroy(recorded); /* the graph that runs is a copy */
  if (error != cudaSuccess) return fail_cuda(error, "cudaGraphInstantiate");
  return last == cudaSuccess ? CUMOE_OK : fail_cuda(last, "cudaGraphDestroy");
}

static cumoe_status end_on_device(struct context *context, cumoe_stream stream, cumoe_graph *graph)
{
  GIVE_BACK_RELAXED(context, end_capture(stream, graph));
}

cumoe_status cumoe_graph_end(cumoe_context handle, cumoe_stream stream, cumoe_graph *graph)
{
  begin_call(__func__);
  struct context *context;
  REQUIRE_POINTER(graph);
  *graph = NULL;
  TRY(find_context(handle, &context));
  if (on_cpu(context)) return no_graphs();
  REQUIRE(stream != NULL, CUMOE_ERR_INVALID_ARGUMENT, "stream is NULL: CUDA's legacy stream cannot be captured");
  const cumoe_status status = end_on_device(context, stream, graph);
  if (status == CUMOE_OK || *graph == NULL) return status;
  if (cudaGraphExecDestroy(*graph) != cudaSuccess) clear_cuda_error();
  *graph = NULL;
  return status;
}

/* Launching or uploading into a capture would break it. */
static cumoe_status check_graph(struct context *context, cumoe_graph graph, cumoe_stream stream)
{
  if (on_cpu(context)) return no_graphs();
  REQUIRE_POINTER(graph);
  return refuse_capture(context, stream);
}

cumoe_status cumoe_graph_launch(cumoe_context handle, cumoe_graph graph, cumoe_stream stream)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_graph(context, graph, stream));
  ON_DEVICE(context, CUDA_STATUS(cudaGraphLaunch(graph, stream)));
}

cumoe_status cumoe_graph_upload(cumoe_context handle, cumoe_graph graph, cumoe_stream stream)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_graph(context, graph, stream));
  ON_DEVICE_RELAXED(context, CUDA_STATUS(cudaGraphUpload(graph, stream)));
}

cumoe_status cumoe_graph_destroy(cumoe_context handle, cumoe_graph graph)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (graph == NULL) return CUMOE_OK;
  if (on_cpu(context)) return no_graphs();
  GIVE_BACK_RELAXED(context, CUDA_STATUS(cudaGraphExecDestroy(graph)));
}
