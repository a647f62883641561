/*
 * Everything that may fail does: call n of the CUDA runtime, of the heap and of thread creation, for n = 1, 2, 3 ...
 * to the last, once and from there on. Each time: a right status and a text, nothing leaked, destroying works, the
 * thread's device and last error are as before, and the same again works and does the same.
 *
 * In the middle of a long run (a context's kernels are some 800 calls in a loop) the errors of a channel have a call
 * each in turn, once or for ever, so that together they have all; with FAULTS_ALL set each has each, in four times the
 * time.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shim/layer.h"

enum {
  AGAIN = 1, /* act may run twice in one world, whatever became of the first */
  LAX = 2,   /* may succeed although something failed, as documented */
  FAILS = 4  /* calls that have to fail are a part of it */
};

typedef struct scenario {
  const char *name;
  void (*prepare)(world *w);
  cumoe_status (*act)(world *w);
  unsigned traits;
} scenario;

static void nothing(world *w)
{
  (void)w;
}

static void on_device_0(world *w)
{
  (void)w;
  OWN(cudaSetDevice(0));
}

/* Destroyed, whatever it says. */
static cumoe_status close_context_of(world *w)
{
  const cumoe_context closed = w->context;
  w->context = NULL;
  return cumoe_context_destroy(closed);
}

/* The test's own calls on device 1, between begin and end: they neither fail nor count. */
static void own_begin(void)
{
  shim_pause(true);
  OWN(cudaSetDevice(1));
}
static void own_end(void)
{
  shim_drop_context();
  shim_pause(false);
}

/* Frees memory that is the test's; a lost device may refuse. */
static void own_free(void *data, cudaStream_t stream, bool pooled)
{
  own_begin();
  if ((pooled ? cudaFreeAsync(data, stream) : cudaFree(data)) != cudaSuccess) CHECK(shim_sticky(shim_last_error()));
  own_end();
}

static cumoe_status open_close(world *w)
{
  cumoe_device_info info = {.size = sizeof info};
  STEP(cumoe_context_create(1, NULL, &w->context));
  STEP(cumoe_context_info(w->context, &info));
  CHECK(info.device == 1 && info.multiprocessors == 132);
  return close_context_of(w);
}

static cumoe_status open_any(world *w)
{
  STEP(cumoe_context_create(CUMOE_DEVICE_AUTO, NULL, &w->context));
  STEP(cumoe_synchronize(w->context, NULL));
  return close_context_of(w);
}

static cumoe_status close_with_buffers(world *w)
{
  cumoe_buffer left[3] = {{0}};
  STEP(cumoe_context_create(1, NULL, &w->context));
  for (int i = 0; i < 3; i++) STEP(cumoe_buffer_alloc(w->context, CUMOE_F32, i, 100, NULL, &left[i]));
  const cumoe_status status = close_context_of(w);
  for (int i = 0; i < 3; i++) CHECK(cumoe_buffer_free(&left[i]) == CUMOE_ERR_STALE_HANDLE);
  return status;
}

static cumoe_status allocate(world *w)
{
  cumoe_buffer_info info = {.size = sizeof info};
  STEP(cumoe_buffer_alloc(w->context, CUMOE_BF16, 7, 64, w->stream, &w->buffers[0]));
  STEP(cumoe_buffer_alloc(w->context, CUMOE_F32, 0, 64, w->stream, &w->buffers[1]));
  STEP(cumoe_buffer_get_info(w->buffers[0], &info));
  CHECK(info.bytes == 7 * 64 * 2 && info.stream == w->stream);
  STEP(cumoe_buffer_free(&w->buffers[1]));
  return cumoe_buffer_free(&w->buffers[0]);
}

static cumoe_status hand_over(world *w)
{
  void *data = NULL;
  STEP(cumoe_buffer_alloc(w->context, CUMOE_BF16, 7, 64, w->stream, &w->buffers[0]));
  STEP(cumoe_buffer_release(&w->buffers[0], &data));
  const cumoe_status taken = cumoe_buffer_adopt(w->context, data, CUMOE_U8, 1, 896, w->stream, &w->buffers[1]);
  if (taken == CUMOE_OK) return cumoe_buffer_free(&w->buffers[1]);
  own_free(data, w->stream, true); /* it is still ours */
  return taken;
}

/* Memory of cudaMalloc. */
static cumoe_status adopt_plain(world *w)
{
  void *data = NULL;
  own_begin();
  OWN(cudaMalloc(&data, 4096));
  own_end();
  const cumoe_status taken = cumoe_buffer_adopt(w->context, data, CUMOE_F32, 16, 64, w->stream, &w->buffers[0]);
  if (taken == CUMOE_OK) return cumoe_buffer_free(&w->buffers[0]);
  own_free(data, NULL, false);
  return taken;
}

static void two_buffers(world *w)
{
  open_one(w);
  CHECK_OK(cumoe_buffer_alloc(w->context, CUMOE_I32, 6, 32, w->stream, &w->buffers[0]));
  CHECK_OK(cumoe_buffer_alloc(w->context, CUMOE_I32, 6, 40, w->stream, &w->buffers[1]));
}

static cumoe_status move_bytes(world *w)
{
  int32_t in[6 * 8], out[6 * 8] = {0};
  cumoe_view_mut left, right;
  for (int i = 0; i < 48; i++) in[i] = i * 77;
  STEP(cumoe_view_cols_mut(cumoe_buffer_view_mut(w->buffers[0]), 8, 8, &left));
  STEP(cumoe_view_cols_mut(cumoe_buffer_view_mut(w->buffers[1]), 16, 8, &right));
  STEP(cumoe_fill(w->context, cumoe_buffer_view_mut(w->buffers[0]), 0x11, w->stream));
  STEP(cumoe_fill(w->context, right, 0x22, w->stream));
  STEP(cumoe_copy_from_host(w->context, left, in, sizeof in, w->stream));
  STEP(cumoe_copy(w->context, right, cumoe_const(left), w->stream));
  STEP(cumoe_copy_to_host(w->context, out, sizeof out, cumoe_const(right), w->stream));
  STEP(cumoe_synchronize(w->context, w->stream));
  CHECK(memcmp(in, out, sizeof in) == 0);
  return CUMOE_OK;
}

static cumoe_status fault_word(world *w)
{
  cumoe_fault fault = {sizeof fault, 7, 7, 7, 7};
  STEP(cumoe_fault_clear(w->context, w->stream));
  STEP(cumoe_fault_read(w->context, w->stream, &fault));
  CHECK(fault.code == CUMOE_FAULT_NONE && fault.slot == 0 && fault.token == 0 && !cumoe_fault_pending(w->context));
  return CUMOE_OK;
}

/* Every row of the table that serves bf16, one after the other. */
static cumoe_status run_forced(world *w)
{
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    cumoe_variant_info info = {.size = sizeof info};
    STEP(cumoe_variant_get(w->context, i, &info));
    const bool bf16 = info.x == CUMOE_BF16 && (info.w ? info.w : info.y) == CUMOE_BF16;
    if (!info.usable || !bf16 || strcmp(info.major, "N") == 0) continue;
    STEP(cumoe_variant_force(w->context, -1));
    STEP(cumoe_variant_force(w->context, i));
    STEP(run_routed(w));
  }
  return cumoe_variant_force(w->context, -1);
}

static cumoe_status bind_table(world *w, cumoe_weights *bound)
{
  const void *matrices[EXPERTS];
  cumoe_weights_desc d = describe_weights(w, CUMOE_BF16, EXPERTS, INTER, CUMOE_GATE_UP_SEPARATE);
  for (int e = 0; e < EXPERTS; e++) matrices[e] = lend_in(w, CUMOE_BF16, INTER, HIDDEN).data;
  cumoe_projection *const parts[3] = {&d.gate, &d.up, &d.down};
  for (int p = 0; p < 3; p++) {
    parts[p]->data.data = NULL;
    parts[p]->data.rows /= EXPERTS;
    parts[p]->per_expert = matrices;
  }
  return cumoe_weights_bind(w->context, &d, bound);
}

static cumoe_status bind_pointers(world *w)
{
  cumoe_weights bound = NULL;
  STEP(bind_table(w, &bound));
  return cumoe_weights_destroy(bound);
}

/* Tables of codes, scales and zero points. */
static cumoe_status bind_formats(world *w)
{
  static const void *tables[3][EXPERTS];
  const cumoe_format zeros = {
      .element = CUMOE_ELEMENT_U4, .block = {1, 32}, .scale = CUMOE_F16, .zero = CUMOE_ZERO_CODES_OUT};
  cumoe_weights bound = NULL;
  cumoe_weights_desc d = describe_weights(w, CUMOE_U8, EXPERTS, INTER, CUMOE_UNGATED);
  cumoe_projection p = {.data = cumoe_matrix(NULL, CUMOE_U8, INTER, HIDDEN / 2, HIDDEN / 2),
                        .scale.data = cumoe_matrix(NULL, CUMOE_F16, INTER, HIDDEN / 32, HIDDEN / 32),
                        .zero.data = cumoe_matrix(NULL, CUMOE_I32, INTER / 8, HIDDEN / 32, HIDDEN / 32)};
  for (int e = 0; e < EXPERTS; e++) {
    tables[0][e] = lend_in(w, CUMOE_U8, INTER, HIDDEN / 2).data;
    tables[1][e] = lend_in(w, CUMOE_F16, INTER, HIDDEN / 32).data;
    tables[2][e] = lend_in(w, CUMOE_I32, INTER / 8, HIDDEN / 32).data;
  }
  p.per_expert = tables[0];
  p.scale.per_expert = tables[1];
  p.zero.per_expert = tables[2];
  d.dtype = CUMOE_BF16;
  d.up_format = zeros;
  d.up = p;
  d.down.data.dtype = CUMOE_BF16;
  STEP(cumoe_weights_bind(w->context, &d, &bound));
  return cumoe_weights_destroy(bound);
}

/* Weights to codes and looked at, rows to codes, GPTQ's words to ours. */
static cumoe_status make_codes(world *w)
{
  const cumoe_format fp8 = cumoe_format_fp8_channel(CUMOE_F32);
  cumoe_quantize_args q = {.size = sizeof q, .experts = EXPERTS, .format = cumoe_format_int4(32, CUMOE_BF16)};
  cumoe_repack_args r = {.size = sizeof r, .experts = EXPERTS, .major = CUMOE_IN_OUT, .out = INTER, .in = HIDDEN};
  cumoe_projection projection;
  cumoe_format format;
  size_t bytes = 0;
  q.weights = lend_in(w, CUMOE_BF16, EXPERTS * INTER, HIDDEN);
  q.codes = lend(w, CUMOE_I32, EXPERTS * INTER, HIDDEN / 8);
  q.scale = lend(w, CUMOE_BF16, EXPERTS * INTER, HIDDEN / 32);
  STEP(cumoe_quantize_weights(w->context, &q, w->stream));
  STEP(cumoe_quantize_rows(w->context, &fp8, lend_in(w, CUMOE_BF16, 3, HIDDEN), (cumoe_view){0},
                           lend(w, CUMOE_E4M3, 3, HIDDEN), lend(w, CUMOE_F32, 1, 3), w->stream));
  r.format = cumoe_format_gptq(32, 1);
  r.codes = lend_in(w, CUMOE_I32, EXPERTS * HIDDEN / 8, INTER);
  r.scale = lend_in(w, CUMOE_F16, EXPERTS * HIDDEN / 32, INTER);
  r.zero = lend_in(w, CUMOE_I32, EXPERTS * HIDDEN / 32, INTER / 8);
  STEP(cumoe_weights_repack_size(&r, &bytes));
  STEP(cumoe_weights_repack(w->context, &r, lend(w, CUMOE_U8, 1, (int64_t)bytes), &projection, &format, w->stream));
  return cumoe_weights_scan(w->context, w->weights, cumoe_buffer_view_mut(w->buffers[0]), w->stream);
}

static void layer_and_report(world *w)
{
  formats_layer(w);
  CHECK_OK(cumoe_buffer_alloc(w->context, CUMOE_I64, EXPERTS, CUMOE_SCAN_FIELDS, w->stream, &w->buffers[0]));
}

/* Kernels of formats are there once they were asked for. */
static void formats_loaded(world *w)
{
  formats_layer(w);
  CHECK_OK(bind_formats(w));
}

static void rows_loaded(world *w)
{
  cumoe_variant_info info = {.size = sizeof info};
  small_layer(w);
  for (int32_t i = 0; i < cumoe_variant_count(); i++) CHECK_OK(cumoe_variant_get(w->context, i, &info));
}

/* The context ends what is left. */
static cumoe_status close_with_weights(world *w)
{
  cumoe_weights left = NULL;
  STEP(cumoe_context_create(1, NULL, &w->context));
  STEP(bind_table(w, &left));
  return close_context_of(w);
}

/* A graph of one forward call: captured with the test's calls, replayed once. */
static cumoe_status capture(world *w)
{
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  own_begin();
  OWN(cudaStreamBeginCapture(w->stream, cudaStreamCaptureModeGlobal));
  shim_pause(false);
  cumoe_status status = run_routed(w);
  if (status == CUMOE_OK) status = cumoe_fault_clear(w->context, w->stream);
  const bool before = shim_failed() != NULL;
  const cumoe_status refused = cumoe_synchronize(w->context, w->stream);
  CHECK(refused != CUMOE_OK);
  if (!before && shim_failed() != NULL) status = refused;
  if (shim_failed() == NULL) CHECK(refused == CUMOE_ERR_CAPTURE_UNSAFE);
  shim_pause(true);
  const cudaError_t ended = cudaStreamEndCapture(w->stream, &graph);
  if (shim_failed() == NULL) CHECK(ended == cudaSuccess && graph != NULL);
  if (graph != NULL) {
    OWN(cudaGraphInstantiate(&exec, graph, 0));
    OWN(cudaGraphLaunch(exec, w->stream));
    OWN(cudaGraphExecDestroy(exec));
    OWN(cudaGraphDestroy(graph));
  }
  own_end();
  return status;
}

/* Another thread's capture, in CUDA's strictest mode, is not disturbed by what allocates and waits. */
static cumoe_status beside_a_capture(world *w)
{
  cudaStream_t busy = NULL;
  cudaGraph_t graph = NULL;
  own_begin();
  OWN(cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking));
  OWN(cudaStreamBeginCapture(busy, cudaStreamCaptureModeGlobal));
  own_end();
  cumoe_status status = cumoe_buffer_alloc(w->context, CUMOE_F32, 5, 5, w->stream, &w->buffers[0]);
  if (status == CUMOE_OK) status = cumoe_synchronize(w->context, w->stream);
  if (status == CUMOE_OK) status = cumoe_buffer_free(&w->buffers[0]);
  if (status == CUMOE_OK) status = open_close(&(world){0});
  own_begin();
  const cudaError_t ended = cudaStreamEndCapture(busy, &graph);
  if (shim_failed() == NULL) CHECK(ended == cudaSuccess);
  if (ended != cudaSuccess) (void)cudaGetLastError();
  if (graph != NULL) OWN(cudaGraphDestroy(graph));
  (void)cudaStreamDestroy(busy);
  own_end();
  return status;
}

static cumoe_status two_devices(world *w)
{
  cumoe_buffer there = {0};
  STEP(cumoe_buffer_alloc(w->other, CUMOE_F32, 4, 4, NULL, &there));
  cumoe_status status = cumoe_fill(w->other, cumoe_buffer_view_mut(there), 1, NULL);
  if (status == CUMOE_OK) status = run_everything(w);
  if (status == CUMOE_OK) {
    const cumoe_status wrong = cumoe_fill(w->context, cumoe_buffer_view_mut(there), 1, NULL);
    CHECK(wrong == CUMOE_ERR_WRONG_DEVICE);
  }
  const cumoe_status freed = cumoe_buffer_free(&there);
  if (freed != CUMOE_OK) w->buffers[BUFFERS - 1] = there; /* it may live on */
  return status != CUMOE_OK ? status : freed;
}

static cumoe_status open_with_pool(world *w)
{
  const cumoe_context_config config = {.size = sizeof config, .pool_initial = 1 << 20, .pool_keep = 1 << 21};
  STEP(cumoe_context_create(1, &config, &w->context));
  STEP(cumoe_buffer_alloc_with(w->context, CUMOE_F32, 9, 9, CUMOE_ALLOC_ZERO, NULL, &w->buffers[0]));
  w->buffers[0].id = 0;
  return close_context_of(w);
}

/* Two owners, a use on another stream. */
static cumoe_status share_and_use(world *w)
{
  STEP(cumoe_buffer_alloc(w->context, CUMOE_F32, 5, 6, w->stream, &w->buffers[2]));
  STEP(cumoe_buffer_retain(w->buffers[2], &w->buffers[3]));
  STEP(cumoe_fill(w->context, cumoe_buffer_view_mut(w->buffers[3]), 1, NULL));
  STEP(cumoe_buffer_record_use(w->buffers[3], NULL));
  STEP(cumoe_buffer_record_use(w->buffers[2], NULL));
  STEP(cumoe_buffer_free(&w->buffers[2]));
  return cumoe_buffer_free(&w->buffers[3]);
}

static cumoe_status fill_patterns(world *w)
{
  const int32_t value = 0x01020304, same = -1;
  int32_t out[6 * 40] = {0};
  STEP(cumoe_fill_value(w->context, cumoe_buffer_view_mut(w->buffers[1]), &same, w->stream));
  STEP(cumoe_fill_value(w->context, cumoe_buffer_view_mut(w->buffers[1]), &value, w->stream));
  STEP(cumoe_copy_to_host(w->context, out, sizeof out, cumoe_buffer_view(w->buffers[1]), w->stream));
  STEP(cumoe_synchronize(w->context, w->stream));
  CHECK(out[0] == value && out[6 * 40 - 1] == value);
  return CUMOE_OK;
}

/* Memory that is freed whatever happens, so that only what cumoe does is on trial. */
static cumoe_status pinned(world *w)
{
  void *data = NULL;
  STEP(cumoe_pinned_alloc(w->context, 960, 0, &data));
  cumoe_status status = cumoe_copy_to_host(w->context, data, 960, cumoe_buffer_view(w->buffers[1]), w->stream);
  if (status == CUMOE_OK) status = cumoe_synchronize(w->context, w->stream);
  const cumoe_status freed = cumoe_pinned_free(w->context, data);
  return status != CUMOE_OK ? status : freed;
}

static cumoe_status pinned_left(world *w)
{
  void *data = NULL;
  STEP(cumoe_context_create(1, NULL, &w->context));
  STEP(cumoe_pinned_alloc(w->context, 960, CUMOE_PINNED_WRITE_COMBINED, &data));
  return close_context_of(w);
}

static void two_contexts(world *w)
{
  two_buffers(w);
  CHECK_OK(cumoe_context_create(0, NULL, &w->other));
  CHECK_OK(cumoe_buffer_alloc(w->other, CUMOE_I32, 6, 40, NULL, &w->buffers[4]));
}

/* Packed, with gaps, back, and by way of the CPU device's kind of memory. */
static cumoe_status copy_between(world *w)
{
  const cumoe_view_mut here = cumoe_buffer_view_mut(w->buffers[1]), there = cumoe_buffer_view_mut(w->buffers[4]);
  int32_t in[6 * 40], out[6 * 40] = {0};
  cumoe_view_mut here_part, there_part;
  for (int i = 0; i < 240; i++) in[i] = i + 1;
  STEP(cumoe_copy_from_host(w->context, here, in, sizeof in, w->stream));
  STEP(cumoe_copy_between(w->other, there, NULL, w->context, cumoe_const(here), w->stream));
  STEP(cumoe_fill(w->context, here, 0, w->stream));
  STEP(cumoe_view_cols_mut(here, 1, 30, &here_part));
  STEP(cumoe_view_cols_mut(there, 1, 30, &there_part));
  STEP(cumoe_copy_between(w->context, here_part, w->stream, w->other, cumoe_const(there_part), NULL));
  STEP(cumoe_copy_to_host(w->context, out, sizeof out, cumoe_const(here), w->stream));
  STEP(cumoe_synchronize(w->context, w->stream));
  CHECK(out[0] == 0 && out[1] == in[1] && out[30] == in[30] && out[31] == 0 && out[6 * 40 - 10] == in[6 * 40 - 10]);
  return CUMOE_OK;
}

static cumoe_status grant_and_ask(world *w)
{
  cumoe_pool_stats stats = {.size = sizeof stats};
  STEP(cumoe_pool_allow_peer(w->context, 0));
  STEP(cumoe_pool_allow_peer(w->context, 0)); /* known by now */
  STEP(cumoe_pool_get_stats(w->context, &stats));
  CHECK(stats.live == 2 && stats.used == 768 + 1024);
  STEP(cumoe_pool_reset_highs(w->context));
  return cumoe_pool_trim(w->context, 0);
}

/* A stream of device 1, and no context yet. */
static void open_stream(world *w)
{
  OWN(cudaSetDevice(1));
  OWN(cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking));
  shim_drop_context();
}

/* Whatever release says, what it hands out is the caller's. */
static cumoe_status release_and_free(cumoe_buffer *buffer)
{
  void *data = NULL;
  const cumoe_status status = cumoe_buffer_release(buffer, &data);
  CHECK(status != CUMOE_OK || data != NULL);
  if (data != NULL) own_free(data, NULL, false);
  return status;
}

/* Everything that level 2 adds, and a buffer and pinned memory that are left. */
static cumoe_status at_level_two(world *w)
{
  const cumoe_context_config config = {.size = sizeof config, .debug = 2};
  void *data = NULL;
  STEP(cumoe_context_create(1, &config, &w->context));
  STEP(cumoe_buffer_alloc(w->context, CUMOE_F32, 5, 6, NULL, &w->buffers[0]));
  STEP(cumoe_buffer_alloc(w->context, CUMOE_F32, 5, 6, w->stream, &w->buffers[1]));
  STEP(cumoe_buffer_alloc(w->context, CUMOE_F32, 5, 6, w->stream, &w->buffers[2]));
  STEP(cumoe_pinned_alloc(w->context, 100, 0, &data));
  STEP(cumoe_copy(w->context, cumoe_buffer_view_mut(w->buffers[0]), cumoe_buffer_view(w->buffers[1]), NULL));
  STEP(cumoe_buffer_record_use(w->buffers[1], NULL));
  STEP(cumoe_debug_check(w->context, w->stream, NULL));
  STEP(cumoe_buffer_free(&w->buffers[1]));
  STEP(release_and_free(&w->buffers[0]));
  w->buffers[2].id = 0;
  return close_context_of(w);
}

/* An allocator whose own calls always work. */
static int lend_memory(void *user, void **data, size_t bytes, size_t alignment, cumoe_stream stream)
{
  (void)user, (void)alignment, (void)stream;
  shim_pause(true);
  const cudaError_t error = cudaMalloc(data, bytes);
  shim_pause(false);
  return error != cudaSuccess;
}

static void take_memory_back(void *user, void *data, size_t bytes, cumoe_stream stream)
{
  (void)user, (void)bytes, (void)stream;
  shim_pause(true);
  if (cudaFree(data) != cudaSuccess) (void)cudaGetLastError();
  shim_pause(false);
}

static cumoe_status by_allocator(world *w)
{
  const cumoe_allocator allocator = {.size = sizeof allocator, .alloc = lend_memory, .free = take_memory_back};
  const cumoe_context_config config = {.size = sizeof config, .allocator = &allocator};
  STEP(cumoe_context_create(1, &config, &w->context));
  STEP(cumoe_buffer_alloc(w->context, CUMOE_F32, 5, 6, w->stream, &w->buffers[0]));
  STEP(cumoe_buffer_alloc(w->context, CUMOE_F32, 5, 6, NULL, &w->buffers[1]));
  STEP(cumoe_fill(w->context, cumoe_buffer_view_mut(w->buffers[0]), 7, w->stream));
  STEP(cumoe_buffer_free(&w->buffers[0]));
  w->buffers[1].id = 0;
  return close_context_of(w);
}

/* The status of a call that ends *object; what is live still is left to finish(). */
static cumoe_status ended(cumoe_status status, void *object)
{
  void **at = object;
  if (status == CUMOE_OK || !shim_has(*at)) *at = NULL;
  return status;
}

static cumoe_status use_events(world *w)
{
  cumoe_progress progress;
  float milliseconds;
  STEP(cumoe_event_create(w->context, CUMOE_EVENT_TIMING, &w->events[0]));
  STEP(cumoe_event_create(w->context, CUMOE_EVENT_TIMING | CUMOE_EVENT_SLEEP, &w->events[1]));
  STEP(cumoe_event_record(w->context, w->events[0], w->stream));
  STEP(cumoe_event_wait(w->context, w->events[0], w->made));
  STEP(cumoe_event_record(w->context, w->events[1], w->made));
  STEP(cumoe_event_synchronize(w->context, w->events[1]));
  STEP(cumoe_event_query(w->context, w->events[1], &progress));
  CHECK(progress == CUMOE_DONE);
  STEP(cumoe_event_elapsed(w->context, w->events[0], w->events[1], &milliseconds));
  STEP(ended(cumoe_event_destroy(w->context, w->events[0]), &w->events[0]));
  return ended(cumoe_event_destroy(w->context, w->events[1]), &w->events[1]);
}

static cumoe_status use_streams(world *w)
{
  cumoe_progress progress;
  STEP(cumoe_stream_create(w->context, -1, &w->made));
  STEP(use_events(w));
  STEP(cumoe_stream_join(w->context, w->made, w->stream));
  STEP(cumoe_stream_query(w->context, w->made, &progress));
  CHECK(progress == CUMOE_DONE);
  return ended(cumoe_stream_destroy(w->context, w->made), &w->made);
}

static cumoe_status use_graphs(world *w)
{
  cumoe_capture state;
  STEP(cumoe_graph_begin(w->context, w->stream));
  STEP(cumoe_graph_status(w->context, w->stream, &state));
  CHECK(state == CUMOE_CAPTURE_ACTIVE);
  STEP(run_routed(w));
  STEP(cumoe_graph_end(w->context, w->stream, &w->captured));
  STEP(cumoe_graph_upload(w->context, w->captured, w->stream));
  STEP(cumoe_graph_launch(w->context, w->captured, w->stream));
  return ended(cumoe_graph_destroy(w->context, w->captured), &w->captured);
}

static cumoe_status use_module(world *w)
{
  static const char ptx[] = ".version 8.0\n.target sm_80\n.address_size 64\n";
  cumoe_module module = {0};
  cumoe_function add = {0};
  cumoe_function_info info = {.size = sizeof info};
  cumoe_occupancy occupancy = {.size = sizeof occupancy};
  cumoe_view_mut global;
  uint32_t threads = 0;
  cumoe_launch l = cumoe_launch_elements(1000, w->stream);
  const cumoe_arg args[4] = {cumoe_arg_view(lend_in(w, CUMOE_F32, 1, 1000)),
                             cumoe_arg_view(lend_in(w, CUMOE_F32, 1, 1000)),
                             cumoe_arg_view_mut(lend(w, CUMOE_F32, 1, 1000)), cumoe_arg_i32(1000)};
  STEP(cumoe_module_load(w->context, ptx, sizeof ptx, &module));
  STEP(cumoe_module_function(module, "add", 100 * 1024, &add));
  STEP(cumoe_function_get_info(add, &info));
  STEP(cumoe_function_block(add, 1024, &threads));
  STEP(cumoe_module_global(module, "counter", CUMOE_U8, &global));
  STEP(cumoe_launch_kernel(add, &l, args, 4));
  l.flags = CUMOE_LAUNCH_EARLY | CUMOE_LAUNCH_COOPERATIVE;
  l.grid[0] = 8;
  l.cluster[0] = 2;
  l.cluster[1] = l.cluster[2] = 1;
  STEP(cumoe_function_occupancy(add, &l, &occupancy));
  STEP(cumoe_launch_kernel(add, &l, args, 4));
  return cumoe_module_unload(&module);
}

static const char source[] = "extern \"C\" __global__ void add() {}";

static cumoe_status use_compiler(world *w)
{
  static const char *const options[] = {"-lineinfo"};
  char log[100];
  cumoe_module module = {0};
  cumoe_image image = {0};
  STEP(cumoe_module_compile(w->context, source, options, 1, log, sizeof log, &module));
  CHECK(strcmp(log, "a remark") == 0);
  const cumoe_status status = cumoe_compile(source, "compute_90", NULL, 0, NULL, 0, &image);
  CHECK((status == CUMOE_OK) == (image.data != NULL));
  cumoe_image_free(&image);
  const cumoe_status unloaded = cumoe_module_unload(&module);
  return status != CUMOE_OK ? status : unloaded;
}

static cumoe_status use_blas(world *w)
{
  size_t bytes = 0;
  STEP(cumoe_matmul_workspace(w->context, &bytes));
  cumoe_matmul_args m = {.size = sizeof m,
                         .batch = 2,
                         .a = lend_in(w, CUMOE_BF16, 8, 16),
                         .b = lend_in(w, CUMOE_BF16, 16, 8),
                         .c = lend(w, CUMOE_F32, 16, 8),
                         .workspace = lend(w, CUMOE_U8, 1, (int64_t)bytes)};
  m.c.rows = 8;
  m.c_stride = 64;
  STEP(cumoe_matmul(w->context, &m, w->stream));
  m.flags = CUMOE_MATMUL_TRANSPOSE_A | CUMOE_MATMUL_TRANSPOSE_B | CUMOE_MATMUL_TF32;
  m.a = lend_in(w, CUMOE_F32, 16, 8);
  m.b = lend_in(w, CUMOE_F32, 8, 16);
  return cumoe_matmul(w->context, &m, w->stream);
}

static cumoe_status prepare_blas(world *w)
{
  return cumoe_matmul_prepare(w->context);
}

static cumoe_status use_operations(world *w)
{
  const cumoe_view x = lend_in(w, CUMOE_BF16, 7, 512), weight = lend_in(w, CUMOE_BF16, 1, 512);
  const cumoe_view_mut y = lend(w, CUMOE_BF16, 7, 512);
  const cumoe_view none = {0};
  STEP(cumoe_layernorm(w->context, x, weight, none, 1e-5f, y, w->stream));
  return cumoe_rmsnorm(w->context, x, weight, 1e-5f, y, w->stream);
}

static cumoe_status use_attention(world *w)
{
  const cumoe_view q = lend_in(w, CUMOE_BF16, 70, 32), k = lend_in(w, CUMOE_BF16, 70, 16);
  const cumoe_view angles = lend_in(w, CUMOE_F32, 70, 8);
  const cumoe_view_mut of_heads = lend(w, CUMOE_F32, 70, 2), d_q = lend(w, CUMOE_BF16, 70, 32);
  const cumoe_attention_args a = {.size = sizeof a,
                                  .flags = CUMOE_ATTENTION_CAUSAL,
                                  .heads = 2,
                                  .kv_heads = 1,
                                  .head_dim = 16,
                                  .q = q,
                                  .k = k,
                                  .v = lend_in(w, CUMOE_BF16, 70, 16),
                                  .sinks = lend_in(w, CUMOE_F32, 1, 2),
                                  .out = lend(w, CUMOE_BF16, 70, 32),
                                  .lse = of_heads};
  const cumoe_attention_backward_args b = {.size = sizeof b,
                                           .forward = &a,
                                           .dout = q,
                                           .dq = d_q,
                                           .dk = lend(w, CUMOE_BF16, 70, 16),
                                           .dv = lend(w, CUMOE_BF16, 70, 16),
                                           .dsinks = lend(w, CUMOE_F32, 1, 2),
                                           .delta = lend(w, CUMOE_F32, 70, 2)};
  const cumoe_rope_args r = {
      .size = sizeof r, .heads = 2, .head_dim = 16, .x = q, .cosine = angles, .sine = angles, .y = d_q};
  STEP(cumoe_rope(w->context, &r, w->stream));
  STEP(cumoe_attention(w->context, &a, w->stream));
  return cumoe_attention_backward(w->context, &b, w->stream);
}

static cumoe_status use_optimiser(world *w, cumoe_view gradient)
{
  const cumoe_view_mut step = lend(w, CUMOE_I64, 1, 1), factor = lend(w, CUMOE_F32, 1, 1);
  const cumoe_global_norm_args n = {.size = sizeof n,
                                    .max_norm = 1,
                                    .gradients = &gradient,
                                    .count = 1,
                                    .norm = lend(w, CUMOE_F32, 1, 1),
                                    .factor = factor,
                                    .step = step,
                                    .workspace = lend(w, CUMOE_U8, 1, 1 << 16)};
  const cumoe_adamw_args a = {.size = sizeof a,
                              .rate = .1f,
                              .gradient = gradient,
                              .step = cumoe_const(step),
                              .factor = cumoe_const(factor),
                              .master = lend(w, CUMOE_F32, gradient.rows, gradient.cols),
                              .first = lend(w, CUMOE_F32, gradient.rows, gradient.cols),
                              .second = lend(w, CUMOE_F32, gradient.rows, gradient.cols)};
  STEP(cumoe_global_norm(w->context, &n, w->stream));
  return cumoe_adamw(w->context, &a, w->stream);
}

/* A decoder's step, but for its layers. */
static cumoe_status use_training(world *w)
{
  const cumoe_view x = lend_in(w, CUMOE_BF16, 7, 512), ids = lend_in(w, CUMOE_I32, 1, 7);
  const cumoe_view_mut y = lend(w, CUMOE_BF16, 7, 512), workspace = lend(w, CUMOE_U8, 1, 1 << 16);
  const cumoe_view_mut table = lend(w, CUMOE_F32, 9, 512);
  const cumoe_norm_backward_args n = {
      .size = sizeof n, .x = x, .dy = x, .dx = y, .dweight = lend(w, CUMOE_F32, 1, 512), .workspace = workspace};
  const cumoe_embedding_backward_args e = {
      .size = sizeof e, .dy = x, .ids = ids, .dtable = table, .workspace = workspace};
  const cumoe_cross_entropy_args c = {.size = sizeof c,
                                      .logits = x,
                                      .targets = ids,
                                      .loss = lend(w, CUMOE_F32, 1, 1),
                                      .losses = lend(w, CUMOE_F32, 1, 7),
                                      .counted = lend(w, CUMOE_I64, 1, 1),
                                      .dlogits = y};
  STEP(cumoe_embedding(w->context, cumoe_const(lend(w, CUMOE_BF16, 9, 512)), ids, y, w->stream));
  STEP(cumoe_silu_backward(w->context, x, x, y, w->stream));
  STEP(cumoe_softmax_backward(w->context, x, x, y, w->stream));
  STEP(cumoe_rmsnorm_backward(w->context, &n, w->stream));
  STEP(cumoe_layernorm_backward(w->context, &n, w->stream));
  STEP(cumoe_embedding_backward(w->context, &e, w->stream));
  STEP(cumoe_cross_entropy(w->context, &c, w->stream));
  STEP(use_attention(w));
  return use_optimiser(w, cumoe_const(table));
}

static cumoe_status whole_cpu(world *w)
{
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = 3};
  const cumoe_moe_desc d = describe(CUMOE_F32);
  static float memory[1 << 20], row[8];
  cumoe_fault fault = {.size = sizeof fault};
  w->next = (uintptr_t)memory / 4096 * 4096 + 4096;
  STEP(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &w->context));
  STEP(cumoe_buffer_alloc(w->context, CUMOE_F32, 5, 5, NULL, &w->buffers[0]));
  STEP(cumoe_plan_create(w->context, &d, &w->plan));
  STEP(bind_pointers(w));
  cumoe_weights_desc weights = describe_weights(w, CUMOE_F32, 1, 16, CUMOE_UP_GATE_CONCAT);
  STEP(cumoe_weights_bind(w->context, &weights, &w->weights));
  STEP(cumoe_fault_clear(w->context, NULL));
  STEP(cumoe_fault_read(w->context, NULL, &fault));
  STEP(cumoe_synchronize(w->context, NULL));
  const cumoe_view x = cumoe_vector(row, CUMOE_F32, 8);
  STEP(cumoe_softmax_backward(w->context, x, x, cumoe_vector_mut(row, CUMOE_F32, 8), NULL));
  return cumoe_buffer_free(&w->buffers[0]);
}

static const scenario scenarios[] = {
    {"open and close", nothing, open_close, AGAIN},
    {"open on another device", on_device_0, open_close, AGAIN},
    {"open any device", nothing, open_any, LAX},
    {"close with live buffers", nothing, close_with_buffers, FAILS},
    {"close with live weights", nothing, close_with_weights, 0},
    {"buffers", open_one, allocate, 0},
    {"release and adopt", open_one, hand_over, 0},
    {"adopt from cudaMalloc", open_one, adopt_plain, 0},
    {"copies and fills", two_buffers, move_bytes, AGAIN},
    {"fault word", open_one, fault_word, AGAIN},
    {"weights by pointers", open_one, bind_pointers, AGAIN},
    {"forward from ids", small_layer, run_routed, AGAIN},
    {"forward from logits", small_layer, run_logits, AGAIN},
    {"forward of one token", wide_layer, run_wide, AGAIN},
    {"forward of one token from the router", wide_layer, run_wide_routed, AGAIN},
    {"forward with everything", shared_layer, run_everything, AGAIN},
    {"forward, unreduced", unreduced_layer, run_unreduced, AGAIN},
    {"forward with formats", formats_layer, run_formats, AGAIN},
    {"first weights of a format", formats_layer, bind_formats, 0},
    {"weights with formats", formats_loaded, bind_formats, AGAIN},
    {"codes", layer_and_report, make_codes, AGAIN},
    {"router of many tokens", small_layer, run_router, AGAIN},
    {"stages", small_layer, run_stages, AGAIN},
    {"forced rows", rows_loaded, run_forced, AGAIN},
    {"capture", small_layer, capture, AGAIN | FAILS},
    {"beside a capture", open_one, beside_a_capture, 0},
    {"two devices", shared_layer, two_devices, FAILS},
    {"a pool of a size", nothing, open_with_pool, 0},
    {"shared and used elsewhere", open_one, share_and_use, 0},
    {"fill patterns", two_buffers, fill_patterns, AGAIN},
    {"pinned memory", two_buffers, pinned, 0},
    {"pinned memory left", nothing, pinned_left, 0},
    {"between devices", two_contexts, copy_between, AGAIN},
    {"peers and figures", two_buffers, grant_and_ask, 0},
    {"debug level 2", open_stream, at_level_two, 0},
    {"an engine's allocator", open_stream, by_allocator, 0},
    {"CPU device", nothing, whole_cpu, 0},
    {"streams and events", open_one, use_streams, 0},
    {"graphs", small_layer, use_graphs, 0},
    {"modules and launches", open_one, use_module, AGAIN},
    {"compiler", open_one, use_compiler, 0},
    {"matrix product", open_one, use_blas, 0},
    {"matrix product prepared", open_one, prepare_blas, 0},
    {"operations", open_one, use_operations, AGAIN},
    {"training", open_one, use_training, 0},
    {"backward of the layer", small_layer, run_both_ways, 0},
};

static const cudaError_t errors[] = {cudaErrorMemoryAllocation, cudaErrorInvalidValue, cudaErrorIllegalAddress,
                                     cudaErrorStreamCaptureUnsupported};
enum { ERRORS = sizeof errors / sizeof errors[0] };

static cumoe_status plain_status(cudaError_t error)
{
  return error == cudaErrorMemoryAllocation           ? CUMOE_ERR_OUT_OF_MEMORY
         : error == cudaErrorStreamCaptureUnsupported ? CUMOE_ERR_CAPTURE_UNSAFE
         : shim_sticky(error)                         ? CUMOE_ERR_CUDA_STICKY
                                                      : CUMOE_ERR_CUDA;
}

/* Calls whose failure has another status than the plain one, with the reason. */
static const struct {
  const char *call;
  cudaError_t error; /* cudaSuccess: any */
  bool forever;      /* false: only when it fails once */
  cumoe_status status;
} exceptions[] = {
    {"cudaMallocFromPoolAsync", cudaErrorMemoryAllocation, false, CUMOE_OK}, /* tried again after trimming */
    {"cudaThreadExchangeStreamCaptureMode", cudaSuccess, true, CUMOE_OK},    /* matters beside a capture only */
    {"cudaThreadExchangeStreamCaptureMode", cudaSuccess, true, CUMOE_ERR_CAPTURE_UNSAFE}, /* there */
    {"cudaThreadExchangeStreamCaptureMode", cudaSuccess, true, CUMOE_ERR_INTERNAL},       /* a tensor map was next */
    {"cuCtxPopCurrent", cudaSuccess, true, CUMOE_OK},                                     /* cannot fail after a push */
    {"cuTensorMapEncodeTiled", cudaSuccess, true, CUMOE_ERR_INTERNAL}, /* fails for bad operands only */
    {"cuPointerGetAttribute", cudaErrorInvalidValue, true, CUMOE_ERR_INVALID_ARGUMENT}, /* it means "unknown" ... */
    {"cuPointerGetAttribute", cudaErrorInvalidValue, false, CUMOE_OK},                  /* ... or "in no pool" */
    {"cuKernelGetParamInfo", cudaErrorInvalidValue, false, CUMOE_OK},                   /* its way to say "no more" */
    {"pthread_create", cudaSuccess, true, CUMOE_OK},                                    /* fewer threads */
};

static bool status_is_right(const scenario *s, cumoe_status status, cudaError_t error, bool forever)
{
  if (status == plain_status(error)) return true;
  if (s->traits & LAX && status == CUMOE_OK) return true; /* to the CPU device */
  for (size_t i = 0; i < sizeof exceptions / sizeof exceptions[0]; i++)
    if (!strcmp(exceptions[i].call, shim_failed()) && status == exceptions[i].status &&
        (exceptions[i].error == error || exceptions[i].error == cudaSuccess) && (exceptions[i].forever || !forever))
      return true;
  return false;
}

/* What is the caller's, and what a lost device did not let the library give back. */
static void end_own(world *w)
{
  cudaGraph_t graph = NULL;
  if (w->stream != NULL && cudaStreamEndCapture(w->stream, &graph) == cudaSuccess) (void)cudaGraphDestroy(graph);
  if (w->stream != NULL) OWN(cudaStreamDestroy(w->stream));
  if (shim_has(w->made)) OWN(cudaStreamDestroy(w->made));
  for (int i = 0; i < 2; i++)
    if (shim_has(w->events[i])) OWN(cudaEventDestroy(w->events[i]));
  if (shim_has(w->captured)) OWN(cudaGraphExecDestroy(w->captured));
}

/* Ends everything of the world. With `must`, each end has to succeed. */
static void finish(world *w, bool must)
{
  cumoe_status worst = CUMOE_OK, status;
  if (w->captured && (status = cumoe_graph_destroy(w->context, w->captured)) != CUMOE_OK) worst = status;
  for (int i = 0; i < 2; i++)
    if (w->events[i] && (status = cumoe_event_destroy(w->context, w->events[i])) != CUMOE_OK) worst = status;
  if (w->pinned && (status = cumoe_pinned_free(w->context, w->pinned)) != CUMOE_OK) worst = status;
  for (int i = 0; i < BUFFERS; i++)
    if ((status = cumoe_buffer_free(&w->buffers[i])) != CUMOE_OK) worst = status;
  if ((status = cumoe_weights_destroy(w->weights)) != CUMOE_OK) worst = status;
  if ((status = cumoe_weights_destroy(w->shared)) != CUMOE_OK) worst = status;
  if ((status = cumoe_plan_destroy(w->plan)) != CUMOE_OK) worst = status;
  if (w->made && (status = cumoe_stream_destroy(w->context, w->made)) != CUMOE_OK) worst = status;
  if ((status = cumoe_context_destroy(w->other)) != CUMOE_OK) worst = status;
  if ((status = cumoe_context_destroy(w->context)) != CUMOE_OK) worst = status;
  if (must) CHECK_MSG(worst == CUMOE_OK, "ending: %s: %s", cumoe_status_name(worst), cumoe_last_error());
  shim_pause(true);
  end_own(w);
  shim_pause(false);
}

static void begin_world(const scenario *s, world *w)
{
  shim_heal();
  shim_drop_context();
  *w = (world){.next = SHIM_LENT};
  s->prepare(w);
  shim_mark();
}

/* Nothing is left, of CUDA or of the heap. */
static void check_nothing_left(int64_t live, int64_t heap)
{
  CHECK_MSG(shim_live() == live, "%lld CUDA objects are left", (long long)(shim_live() - live));
  if (shim_live() != live) shim_print_live();
  CHECK_MSG(shim_heap() == heap, "%lld blocks of the heap are left", (long long)(shim_heap() - heap));
}

/* An error that the caller left pending stays so, and is nobody else's, unless CUDA fails in the call itself. */
static void run_pending(const scenario *s)
{
  world w;
  begin_world(s, &w);
  shim_pause(true);
  CHECK(cudaSetDevice(99) == cudaErrorInvalidDevice);
  shim_pause(false);
  CHECK_OK(s->act(&w));
  CHECK_MSG(shim_last_error() == cudaErrorInvalidDevice || s->traits & FAILS, "it is %s",
            cudaGetErrorName(shim_last_error()));
  shim_heal();
  finish(&w, true);
}

/* A run without a fault; its trace, to be freed. */
static char *run_whole(const scenario *s)
{
  world w;
  begin_world(s, &w);
  const int64_t implicit = shim_implicit();
  const int before = shim_current_device();
  CHECK_OK(s->act(&w));
  CHECK(shim_current_device() == before && shim_implicit() == implicit && shim_last_error() == cudaSuccess);
  shim_pause(true);
  char *trace = strdup(shim_trace());
  shim_pause(false);
  finish(&w, true);
  return trace;
}

typedef struct plan {
  shim_channel channel;
  int64_t nth;
  bool forever;
  cudaError_t error;
} plan;

/* A device that cannot be entered or left is not left as it was: that call fails, or all from an earlier one on. */
static bool breaks_device(const plan *p, const char *failed)
{
  return strncmp(failed, "cuCtx", 5) == 0 || (p->forever && strcmp(failed, "cudaThreadExchangeStreamCaptureMode") == 0);
}

/* The status, the text, the thread's device and its last error, after act has met the fault. */
static void check_failure(const scenario *s, const plan *p, cumoe_status status, int device, bool lost,
                          const char *text_before)
{
  const char *const failed = shim_failed(), *const text = cumoe_last_error();
  CHECK_MSG(status_is_right(s, status, p->error, p->forever), "%s failed: %s: %s", failed, cumoe_status_name(status),
            text);
  if (status != CUMOE_OK) CHECK_MSG(strncmp(text, "cumoe_", 6) == 0, "the text is \"%s\"", text);
  if (status == CUMOE_OK && !(s->traits & FAILS))
    CHECK_MSG(strcmp(text, text_before) == 0, "a success changed the text: %s", text);
  if (!breaks_device(p, failed)) CHECK(shim_current_device() == device);
  if (!p->forever && strcmp(failed, "cudaThreadExchangeStreamCaptureMode") != 0)
    CHECK(shim_capture_mode() == cudaStreamCaptureModeGlobal);
  if (!lost) CHECK_MSG(shim_last_error() == cudaSuccess, "%s left its error behind", failed);
}

static void check_same_trace(const char *want, const char *got)
{
  size_t same = 0, line = 0;
  while (want[same] != 0 && want[same] == got[same]) same++;
  for (line = same; line > 0 && want[line - 1] != '\n'; line--) {
  }
  CHECK_MSG(want[same] == got[same], "done again, it does something else: %.60s instead of %.60s", got + line,
            want + line);
}

/* One run with one fault. False: the fault was not reached; then *calls is how many calls there are. */
static bool run_once(const scenario *s, const plan *p, const char *trace, int64_t *calls)
{
  const int64_t live = shim_live(), heap = shim_heap();
  world w;
  begin_world(s, &w);
  const int device = shim_current_device();
  char text[1024];
  snprintf(text, sizeof text, "%s", cumoe_last_error());
  shim_fail(p->channel, p->nth, p->forever, p->error);
  const cumoe_status status = s->act(&w);
  const bool met = shim_failed() != NULL, lost = met && p->channel == SHIM_CUDA && shim_sticky(p->error);
  if (met)
    check_failure(s, p, status, device, lost, text);
  else
    CHECK_OK(status), *calls = shim_seen(p->channel);
  const bool again = met && !lost && s->traits & AGAIN;
  if (again || !met) shim_heal();
  if (again) {
    if (device < 0) shim_drop_context();
    shim_mark();
    CHECK_OK(s->act(&w));
    check_same_trace(trace, shim_trace());
  }
  finish(&w, !lost && (again || !met || !p->forever));
  shim_heal();
  check_nothing_left(live, heap);
  return met;
}

/* Whether call n of `calls` is left to another of the ways of failing, of which this is number `way`. */
static bool is_left_out(int64_t n, int64_t calls, int way, int ways)
{
  enum { EDGE = 64 };
  return n > EDGE && n <= calls - EDGE && n % ways != way && !getenv("FAULTS_ALL");
}

/* One fault after the other, behind a run that meets none. */
static void run_channel(const scenario *s, shim_channel channel, cudaError_t error, bool forever, int way, int ways)
{
  static const char *const names[SHIM_CHANNELS] = {"cuda", "heap", "thread"};
  char *trace = run_whole(s);
  int64_t calls = 0;
  for (int64_t n = 0; n <= calls; n++) {
    if (is_left_out(n, calls, way, ways)) continue;
    const plan p = {channel, n > 0 ? n : INT64_MAX, forever, error};
    case_begin("%s: %s call %lld of %lld, %s, %s", s->name, names[channel], (long long)n, (long long)calls,
               cudaGetErrorName(error), forever ? "for ever" : "once");
    const bool met = run_once(s, &p, trace, &calls);
    CHECK(met == (n > 0));
    case_end();
  }
  char *after = run_whole(s);
  case_begin("%s: as before the faults", s->name);
  check_same_trace(trace, after);
  case_end();
  free(trace);
  free(after);
}

/* Each call of the other libraries with each of their codes. */
static const struct {
  const char *scenario;
  int code;
  cumoe_status status;
} codes[] = {
    {"compiler", 1, CUMOE_ERR_OUT_OF_MEMORY},        {"compiler", 5, CUMOE_ERR_INVALID_ARGUMENT},
    {"compiler", 6, CUMOE_ERR_INVALID_ARGUMENT},     {"compiler", 7, CUMOE_ERR_LIBRARY_MISSING},
    {"compiler", 11, CUMOE_ERR_NOT_SUPPORTED},       {"matrix product", 3, CUMOE_ERR_OUT_OF_MEMORY},
    {"matrix product", 15, CUMOE_ERR_NOT_SUPPORTED}, {"matrix product", 13, CUMOE_ERR_CUDA},
    {"matrix product", 2, CUMOE_ERR_CUDA},           {"matrix product prepared", 3, CUMOE_ERR_OUT_OF_MEMORY},
};

static void run_code(const scenario *s, int code, cumoe_status want)
{
  bool more = true;
  for (int64_t n = 1; more; n++) {
    const int64_t live = shim_live(), heap = shim_heap();
    world w;
    case_begin("%s: library call %lld answers %d", s->name, (long long)n, code);
    begin_world(s, &w);
    shim_fail(SHIM_LIBRARY, n, false, (cudaError_t)code);
    const cumoe_status status = s->act(&w);
    more = shim_failed() != NULL;
    if (more && strstr(shim_failed(), "Destroy") == NULL) CHECK_STATUS(want, status);
    shim_heal();
    finish(&w, true);
    check_nothing_left(live, heap);
    case_end();
  }
}

static void run_libraries(void)
{
  if (!group_begin("codes of other libraries")) return;
  for (int round = 0; round < 2; round++)
    for (size_t c = 0; c < sizeof codes / sizeof codes[0]; c++)
      for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        shim.ptx_only = round == 1;
        if (!strcmp(scenarios[i].name, codes[c].scenario)) run_code(&scenarios[i], codes[c].code, codes[c].status);
      }
  shim_reset();
  group_end();
}

static void run_scenario(const scenario *s)
{
  if (!group_begin("%s", s->name)) return;
  case_begin("with an error pending");
  run_pending(s);
  case_end();
  for (int forever = 0; forever < 2; forever++) {
    for (int e = 0; e < ERRORS; e++) run_channel(s, SHIM_CUDA, errors[e], forever, 2 * e + forever, 2 * ERRORS);
    run_channel(s, SHIM_HEAP, cudaErrorMemoryAllocation, forever, forever, 2);
    run_channel(s, SHIM_THREAD, cudaErrorMemoryAllocation, forever, forever, 2);
  }
  group_end();
}

void __gcov_dump(void) __attribute__((weak)); /* _exit writes no counts of branches */

/* What is done once a process is done in a new one for each fault. */
static void first_calls(void)
{
  if (!group_begin("first calls of a process")) return;
  const scenario *first[] = {&scenarios[0], &scenarios[5], &scenarios[8]};
  for (int i = 0; i < 3; i++)
    for (int n = 1; n <= 12; n++)
      for (int channel = 0; channel < 2; channel++) {
        const plan p = {(shim_channel)channel, n, false, cudaErrorMemoryAllocation};
        case_begin("%s: call %d", first[i]->name, n);
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
          world w;
          const int64_t live = shim_live();
          shim_fail(p.channel, p.nth, false, p.error);
          w = (world){.next = SHIM_LENT};
          cumoe_status status = cumoe_context_create(1, NULL, &w.context);
          if (status == CUMOE_OK) status = allocate(&w);
          const bool right = shim_failed() == NULL || status_is_right(first[i], status, p.error, false);
          if (!right) printf("# %s failed: %s: %s\n", shim_failed(), cumoe_status_name(status), cumoe_last_error());
          finish(&w, false);
          shim_heal();
          w = (world){.next = SHIM_LENT};
          first[i]->prepare(&w);
          const bool works = first[i]->act(&w) == CUMOE_OK;
          if (!works) printf("# no second try: %s\n", cumoe_last_error());
          finish(&w, true);
          fflush(stdout);
          if (__gcov_dump) __gcov_dump();
          _exit((right ? 0 : 1) | (works ? 0 : 2) | (shim_live() == live ? 0 : 4));
        }
        int end = 0;
        CHECK(waitpid(child, &end, 0) == child);
        CHECK_MSG(WIFEXITED(end) && WEXITSTATUS(end) == 0, "1 wrong status, 2 no second try, 4 leaks: %d",
                  WEXITSTATUS(end));
        case_end();
      }
  group_end();
}

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  shim_reset();
  first_calls();
  free(run_whole(&scenarios[0]));
  for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) run_scenario(&scenarios[i]);
  run_libraries();
  if (group_begin("the shim")) {
    case_begin("it knew everything that was asked for");
    CHECK(shim_unknown() == 0);
    case_end();
    group_end();
  }
  printf("# %lld faults injected\n", (long long)shim_faults());
  return test_end();
}
