/* Streams, events and graphs: what the CPU device answers, and on a GPU order, states, times and captures. */
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

static void test_cpu(cumoe_context context)
{
  cumoe_stream stream = CUMOE_STREAM_PER_THREAD;
  cumoe_event event = (cumoe_event)(void *)&stream;
  cumoe_graph graph = (cumoe_graph)(void *)&stream;
  cumoe_progress progress = CUMOE_PENDING;
  cumoe_capture capture = CUMOE_CAPTURE_ACTIVE;
  float milliseconds = 1;
  case_begin("streams");
  CHECK_OK(cumoe_stream_create(context, -1, &stream));
  CHECK(stream == NULL);
  CHECK_OK(cumoe_stream_query(context, stream, &progress));
  CHECK(progress == CUMOE_DONE);
  CHECK_OK(cumoe_stream_join(context, stream, NULL));
  CHECK_OK(cumoe_stream_destroy(context, stream));
  case_end();
  case_begin("events");
  CHECK_OK(cumoe_event_create(context, CUMOE_EVENT_TIMING | CUMOE_EVENT_SLEEP, &event));
  CHECK(event == NULL);
  CHECK_OK(cumoe_event_record(context, event, stream));
  CHECK_OK(cumoe_event_wait(context, event, stream));
  CHECK_OK(cumoe_event_synchronize(context, event));
  progress = CUMOE_PENDING;
  CHECK_OK(cumoe_event_query(context, event, &progress));
  CHECK(progress == CUMOE_DONE);
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_event_elapsed(context, event, event, &milliseconds));
  CHECK(milliseconds == 0);
  CHECK_OK(cumoe_event_destroy(context, event));
  case_end();
  case_begin("graphs");
  CHECK_OK(cumoe_graph_status(context, stream, &capture));
  CHECK(capture == CUMOE_CAPTURE_NONE);
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_graph_begin(context, stream));
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_graph_end(context, stream, &graph));
  CHECK(graph == NULL);
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_graph_launch(context, graph, stream));
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_graph_upload(context, graph, stream));
  CHECK_OK(cumoe_graph_destroy(context, NULL));
  case_end();
  case_begin("a failed question leaves FAILED");
  progress = CUMOE_PENDING;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_stream_query(NULL, NULL, &progress));
  CHECK(progress == CUMOE_FAILED);
  progress = CUMOE_PENDING;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_event_query(NULL, NULL, &progress));
  CHECK(progress == CUMOE_FAILED);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_event_create(context, 4, &event));
  case_end();
}

static void CUDART_CB wait_for_gate(void *gate)
{
  while (!atomic_load((atomic_int *)gate)) usleep(100);
}

/* Keeps the stream busy until the gate is set. */
static void hold(cumoe_stream stream, atomic_int *gate)
{
  atomic_store(gate, 0);
  CHECK_CUDA(cudaLaunchHostFunc(stream, wait_for_gate, gate));
}

static cumoe_stream stream_new(cumoe_context context, int32_t priority)
{
  cumoe_stream stream = NULL;
  CHECK_OK(cumoe_stream_create(context, priority, &stream));
  CHECK(stream != NULL);
  return stream;
}

static cumoe_progress progress_of(cumoe_context context, cumoe_stream stream)
{
  cumoe_progress progress = CUMOE_FAILED;
  CHECK_OK(cumoe_stream_query(context, stream, &progress));
  return progress;
}

/* Filled on the default stream, which other streams do not wait for. */
static cumoe_view_mut fresh_bytes(cumoe_context context)
{
  const cumoe_view_mut v = device_new(context, CUMOE_U8, 1, 4096, 0);
  CHECK_OK(cumoe_synchronize(context, NULL));
  return v;
}

static bool bytes_are(cumoe_context context, cumoe_view_mut v, int want)
{
  const tensor got = device_get(context, cumoe_const(v));
  for (int64_t i = 0; i < got.cols; i++)
    if (tensor_get(&got, 0, i) != want) return false;
  return true;
}

static void test_streams(cumoe_context context)
{
  static const int32_t priorities[] = {0, -1, 100, -100};
  int least = 0, most = 0;
  case_begin("priorities");
  CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&least, &most));
  for (int i = 0; i < 4; i++) {
    const int32_t p = priorities[i];
    const int want = p > least ? least : p < most ? most : p;
    int got = 77;
    unsigned flags = 0;
    cumoe_stream stream = stream_new(context, p);
    CHECK_CUDA(cudaStreamGetPriority(stream, &got));
    CHECK_CUDA(cudaStreamGetFlags(stream, &flags));
    CHECK_MSG(got == want && flags == cudaStreamNonBlocking, "priority %d became %d, flags %u", (int)p, got, flags);
    CHECK_OK(cumoe_stream_destroy(context, stream));
  }
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_stream_destroy(context, CUMOE_STREAM_PER_THREAD));
  case_end();
  case_begin("pending, then done");
  atomic_int gate;
  cumoe_stream stream = stream_new(context, 0);
  CHECK(progress_of(context, stream) == CUMOE_DONE);
  hold(stream, &gate);
  CHECK(progress_of(context, stream) == CUMOE_PENDING);
  CHECK(cudaPeekAtLastError() == cudaSuccess); /* "not ready" is no error of the thread's */
  atomic_store(&gate, 1);
  CHECK_OK(cumoe_synchronize(context, stream));
  CHECK(progress_of(context, stream) == CUMOE_DONE);
  CHECK_OK(cumoe_stream_destroy(context, stream));
  case_end();
}

static void test_join(cumoe_context context)
{
  atomic_int gate;
  case_begin("the waiter's work comes after");
  cumoe_stream a = stream_new(context, 0), b = stream_new(context, 0);
  const cumoe_view_mut v = fresh_bytes(context);
  hold(a, &gate);
  CHECK_OK(cumoe_fill(context, v, 1, a));
  CHECK_OK(cumoe_stream_join(context, b, a));
  CHECK_OK(cumoe_fill(context, v, 2, b));
  usleep(20000);
  CHECK(progress_of(context, b) == CUMOE_PENDING);
  atomic_store(&gate, 1);
  CHECK_OK(cumoe_synchronize(context, b));
  CHECK(bytes_are(context, v, 2));
  CHECK_OK(cumoe_stream_join(context, a, a));
  case_end();
  case_begin("by an event");
  cumoe_event event = NULL;
  cumoe_progress progress = CUMOE_FAILED;
  CHECK_OK(cumoe_event_create(context, CUMOE_EVENT_SLEEP, &event));
  hold(a, &gate);
  CHECK_OK(cumoe_event_record(context, event, a));
  CHECK_OK(cumoe_event_wait(context, event, b));
  CHECK_OK(cumoe_event_query(context, event, &progress));
  CHECK(progress == CUMOE_PENDING && progress_of(context, b) == CUMOE_PENDING);
  atomic_store(&gate, 1);
  CHECK_OK(cumoe_event_synchronize(context, event));
  CHECK_OK(cumoe_event_query(context, event, &progress));
  CHECK(progress == CUMOE_DONE);
  CHECK_OK(cumoe_synchronize(context, b));
  CHECK_OK(cumoe_event_destroy(context, event));
  CHECK_OK(cumoe_stream_destroy(context, a));
  CHECK_OK(cumoe_stream_destroy(context, b));
  case_end();
}

static void CUDART_CB sleep_20ms(void *unused)
{
  (void)unused;
  usleep(20000);
}

static void test_times(cumoe_context context)
{
  cumoe_event first = NULL, last = NULL, plain = NULL;
  float milliseconds = 0;
  atomic_int gate;
  case_begin("20 ms");
  cumoe_stream stream = stream_new(context, 0);
  CHECK_OK(cumoe_event_create(context, CUMOE_EVENT_TIMING, &first));
  CHECK_OK(cumoe_event_create(context, CUMOE_EVENT_TIMING, &last));
  CHECK_OK(cumoe_event_create(context, 0, &plain));
  CHECK_OK(cumoe_event_record(context, first, stream));
  CHECK_CUDA(cudaLaunchHostFunc(stream, sleep_20ms, NULL));
  CHECK_OK(cumoe_event_record(context, last, stream));
  CHECK_OK(cumoe_event_synchronize(context, last));
  CHECK_OK(cumoe_event_elapsed(context, first, last, &milliseconds));
  CHECK_MSG(milliseconds >= 15 && milliseconds < 5000, "%g ms", (double)milliseconds);
  case_end();
  case_begin("none yet, and none ever");
  hold(stream, &gate);
  CHECK_OK(cumoe_event_record(context, last, stream));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_event_elapsed(context, first, last, &milliseconds));
  CHECK(milliseconds == 0 && strstr(cumoe_last_error(), "pending") != NULL);
  atomic_store(&gate, 1);
  CHECK_OK(cumoe_event_record(context, plain, stream));
  CHECK_OK(cumoe_synchronize(context, stream));
  CHECK_STATUS(CUMOE_ERR_CUDA, cumoe_event_elapsed(context, first, plain, &milliseconds));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK_OK(cumoe_event_destroy(context, first));
  CHECK_OK(cumoe_event_destroy(context, last));
  CHECK_OK(cumoe_event_destroy(context, plain));
  CHECK_OK(cumoe_stream_destroy(context, stream));
  case_end();
}

static cumoe_capture capture_of(cumoe_context context, cumoe_stream stream)
{
  cumoe_capture capture = CUMOE_CAPTURE_INVALIDATED;
  CHECK_OK(cumoe_graph_status(context, stream, &capture));
  return capture;
}

static void test_capture(cumoe_context context)
{
  cumoe_graph graph = NULL, other = NULL;
  cumoe_progress progress;
  case_begin("recorded, not run; refusals do not break it; launched");
  cumoe_stream stream = stream_new(context, 0);
  const cumoe_view_mut v = fresh_bytes(context);
  CHECK_OK(cumoe_fill(context, v, 1, stream));
  CHECK_OK(cumoe_synchronize(context, stream));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_graph_begin(context, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_graph_end(context, stream, &graph));
  CHECK(capture_of(context, stream) == CUMOE_CAPTURE_NONE);
  CHECK_OK(cumoe_graph_begin(context, stream));
  CHECK(capture_of(context, stream) == CUMOE_CAPTURE_ACTIVE);
  CHECK_OK(cumoe_fill(context, v, 2, stream));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_graph_begin(context, stream));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_stream_query(context, stream, &progress));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_stream_destroy(context, stream));
  CHECK(capture_of(context, stream) == CUMOE_CAPTURE_ACTIVE);
  CHECK_OK(cumoe_graph_end(context, stream, &graph));
  CHECK(graph != NULL && capture_of(context, stream) == CUMOE_CAPTURE_NONE && bytes_are(context, v, 1));
  CHECK_OK(cumoe_graph_upload(context, graph, stream));
  CHECK_OK(cumoe_graph_launch(context, graph, stream));
  CHECK_OK(cumoe_synchronize(context, stream));
  CHECK(bytes_are(context, v, 2));
  CHECK_OK(cumoe_graph_begin(context, stream));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_graph_launch(context, graph, stream));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_graph_upload(context, graph, stream));
  CHECK_OK(cumoe_graph_end(context, stream, &other));
  CHECK_OK(cumoe_graph_destroy(context, other));
  CHECK_OK(cumoe_graph_destroy(context, graph));
  CHECK_OK(cumoe_stream_destroy(context, stream));
  case_end();
}

static void test_forks(cumoe_context context)
{
  cumoe_graph graph = NULL;
  cumoe_stream a = stream_new(context, 0), b = stream_new(context, 0);
  case_begin("forked and joined");
  const cumoe_view_mut v = fresh_bytes(context);
  CHECK_OK(cumoe_fill(context, v, 1, a));
  CHECK_OK(cumoe_synchronize(context, a));
  CHECK_OK(cumoe_graph_begin(context, a));
  CHECK_OK(cumoe_stream_join(context, b, a));
  CHECK(capture_of(context, b) == CUMOE_CAPTURE_ACTIVE);
  CHECK_OK(cumoe_fill(context, v, 3, b));
  CHECK_OK(cumoe_stream_join(context, a, b));
  CHECK_OK(cumoe_graph_end(context, a, &graph));
  CHECK_OK(cumoe_graph_launch(context, graph, a));
  CHECK_OK(cumoe_synchronize(context, a));
  CHECK(bytes_are(context, v, 3));
  CHECK_OK(cumoe_graph_destroy(context, graph));
  case_end();
  case_begin("not joined");
  const cumoe_view_mut alone = fresh_bytes(context);
  CHECK_OK(cumoe_graph_begin(context, a));
  CHECK_OK(cumoe_stream_join(context, b, a));
  CHECK_OK(cumoe_fill(context, alone, 4, b));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_graph_end(context, a, &graph));
  CHECK(graph == NULL && capture_of(context, a) == CUMOE_CAPTURE_NONE);
  case_end();
  case_begin("broken by a call of the caller's");
  CHECK_OK(cumoe_graph_begin(context, a));
  CHECK(cudaStreamQuery(a) != cudaSuccess);
  (void)cudaGetLastError();
  CHECK(capture_of(context, a) == CUMOE_CAPTURE_INVALIDATED);
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_graph_end(context, a, &graph));
  CHECK(graph == NULL && capture_of(context, a) == CUMOE_CAPTURE_NONE && cudaPeekAtLastError() == cudaSuccess);
  case_end();
  case_begin("close");
  CHECK_OK(cumoe_stream_destroy(context, a));
  CHECK_OK(cumoe_stream_destroy(context, b));
  case_end();
}

static const test_group groups[] = {
    GROUP("one stream, always done", test_cpu, ON_CPU),
    GROUP("streams", test_streams, ON_CUDA),
    GROUP("joins", test_join, ON_CUDA),
    GROUP("times", test_times, ON_CUDA),
    GROUP("captures", test_capture, ON_CUDA),
    GROUP("captures over two streams", test_forks, ON_CUDA),
};
TEST_MAIN(groups)
