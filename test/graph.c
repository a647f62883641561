/*
 * CUDA graphs: captured as the very first call in every mode, replayed with other data, without an allocation; the same
 * bits a thousand times, eager and by replay. Needs a GPU. What launches leave alone besides is trace.c.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "cuda.h"
#include "session.h"

static cudaStream_t stream_new(void)
{
  cudaStream_t stream = NULL;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

/* A session on a stream of its own. */
static void streamed_open(session *s, cumoe_context context, const layer_spec *spec, const layer_inputs *inputs)
{
  session_open(s, context, spec, inputs);
  s->stream = stream_new();
}

static void streamed_close(session *s)
{
  CHECK_CUDA(cudaStreamDestroy(s->stream));
  session_close(s);
}

/* Reaches every stage, in sizes of decoding and of prefill. */
static layer_spec graph_spec(int32_t dtype, int64_t tokens, routing_input input)
{
  layer_spec s = layer_spec_new(dtype, tokens, 264, 136);
  s.desc.num_experts = 16;
  s.desc.routing = cumoe_routing_qwen3(4);
  s.desc.shared_inter = 72;
  s.shared_gate = true;
  s.residual = RESIDUAL_SEPARATE;
  s.input = input;
  s.optional_outputs = true;
  s.device_count = true;
  s.device_tokens = (int32_t)tokens;
  s.distinct = tokens > 61 ? 61 : 0;
  return s;
}

typedef struct captured {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
} captured;

static bool capture_begin(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
  return CHECK_CUDA(cudaStreamBeginCapture(stream, mode));
}

static captured capture_end(cudaStream_t stream)
{
  captured c = {NULL, NULL};
  if (CHECK_CUDA(cudaStreamEndCapture(stream, &c.graph))) CHECK_CUDA(cudaGraphInstantiate(&c.exec, c.graph, 0));
  return c;
}

static void captured_free(captured *c)
{
  if (c->exec) CHECK_CUDA(cudaGraphExecDestroy(c->exec));
  if (c->graph) CHECK_CUDA(cudaGraphDestroy(c->graph));
}

static captured capture_forward(session *s, enum cudaStreamCaptureMode mode)
{
  if (!capture_begin(s->stream, mode)) return (captured){NULL, NULL};
  CHECK_OK(session_forward(s));
  s->launches = 0; /* nothing has run yet */
  return capture_end(s->stream);
}

static void replay(session *s, const captured *c)
{
  s->launches++;
  if (c->exec) CHECK_CUDA(cudaGraphLaunch(c->exec, s->stream));
}

static void first_call_case(int32_t dtype, int64_t tokens, enum cudaStreamCaptureMode mode)
{
  cumoe_context context = NULL;
  session s;
  if (!CHECK_OK(cumoe_context_create(0, NULL, &context))) return;
  const layer_spec spec = graph_spec(dtype, tokens, INPUT_ROUTER);
  const layer_inputs in = layer_inputs_new(&spec);
  cudaStream_t stream = stream_new();
  session_open(&s, context, &spec, &in);
  s.stream = stream;
  captured c = capture_forward(&s, mode);
  replay(&s, &c);
  const layer_outputs first = session_collect(&s);
  check_layer(&spec, &in, &first);
  session_reset(&s);
  CHECK_OK(session_forward(&s));
  const layer_outputs eager = session_collect(&s);
  check_outputs_same(&eager, &first);
  check_fault(context, stream, CUMOE_FAULT_NONE);
  captured_free(&c);
  session_close(&s);
  CHECK_CUDA(cudaStreamDestroy(stream));
  case_end(); /* frees the device memory, which the context outlives */
  case_begin("close");
  CHECK_OK(cumoe_context_destroy(context));
}

static void test_first_call(void)
{
  static const enum cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                                     cudaStreamCaptureModeRelaxed};
  for (int mode = 0; mode < 3; mode++)
    for (int type = 0; type < 3; type++)
      for (int64_t tokens = 3; tokens < 3000; tokens *= 30) { /* 3, 90, 2700 */
        case_begin("mode %d, %s, T %" PRId64, mode, cumoe_dtype_name((cumoe_dtype)case_dtypes[type]), tokens);
        first_call_case(case_dtypes[type], tokens, modes[mode]);
        case_end();
      }
}

static tensor all_ids(const layer_spec *s, double id)
{
  tensor ids = tensor_new(s->ids_dtype, s->tokens, s->desc.routing.top_k);
  for (int64_t i = 0; i < ids.rows * ids.cols; i++) tensor_set(&ids, 0, i, id);
  return ids;
}

/* One replay, one eager call, the oracle. */
static void compare_replay(session *s, const captured *c, const layer_inputs *in, const layer_spec *spec)
{
  s->inputs = in;
  s->spec = spec;
  CHECK_CUDA(cudaDeviceSynchronize());
  session_reset(s);
  replay(s, c);
  const layer_outputs graph = session_collect(s);
  check_fault(s->context, s->stream, expected_fault(spec, in));
  session_reset(s);
  CHECK_OK(session_forward(s));
  const layer_outputs eager = session_collect(s);
  check_fault(s->context, s->stream, expected_fault(spec, in));
  check_outputs_same(&eager, &graph);
  check_layer(spec, in, &graph);
}

static void set_device_tokens(session *s, int32_t count)
{
  tensor t = tensor_new(CUMOE_I32, 1, 1);
  tensor_set(&t, 0, 0, count);
  device_set(s->context, as_mut(s->args.device_tokens), &t);
}

static void replay_ids(session *s, const captured *c, layer_inputs in, const layer_spec *spec)
{
  rng r = {5};
  const double same[] = {0, 15, 7, -1, 16};
  for (int i = 0; i < 5; i++) {
    in.ids = all_ids(spec, same[i]);
    device_set(s->context, as_mut(s->args.ids), &in.ids);
    compare_replay(s, c, &in, spec);
  }
  for (pattern p = 0; p < PATTERN_COUNT; p++) {
    in.ids = route_tokens(&r, p, spec->ids_dtype, spec->tokens, spec->desc.routing.top_k, spec->desc.num_experts);
    for (int64_t i = spec->distinct * in.ids.cols; spec->distinct && i < in.ids.rows * in.ids.cols; i++)
      tensor_set(&in.ids, 0, i, tensor_get(&in.ids, 0, i % (spec->distinct * in.ids.cols)));
    device_set(s->context, as_mut(s->args.ids), &in.ids);
    compare_replay(s, c, &in, spec);
  }
}

/* Logits that send every token to the same experts. */
static void replay_logits(session *s, const captured *c, layer_inputs in, const layer_spec *spec)
{
  const int32_t experts = spec_router_experts(spec);
  for (int first = 0; first <= experts - 4; first += experts - 4) {
    in.logits = tensor_new(spec->logits_dtype, spec->tokens, experts);
    for (int64_t t = 0; t < spec->tokens; t++)
      for (int32_t e = 0; e < experts; e++)
        tensor_set(&in.logits, t, e, e >= first && e < first + 4 ? 5 - e * 0.25 : -3 + e * 0.125);
    device_set(s->context, as_mut(s->args.logits), &in.logits);
    compare_replay(s, c, &in, spec);
  }
}

static void replay_x_and_weights(session *s, const captured *c, layer_inputs in, const layer_spec *spec)
{
  layer_spec other = *spec;
  other.seed = 99;
  const layer_inputs fresh = layer_inputs_new(&other);
  if (in.ids.data) device_set(s->context, as_mut(s->args.ids), &in.ids); /* back to what `in` says */
  if (in.logits.data) device_set(s->context, as_mut(s->args.logits), &in.logits);
  in.x = fresh.x;
  device_set(s->context, as_mut(s->args.x), &in.x);
  compare_replay(s, c, &in, spec);
  if (in.router_weight.data) {
    in.router_weight = fresh.router_weight;
    device_set(s->context, as_mut(s->args.router_weight), &in.router_weight);
    compare_replay(s, c, &in, spec);
  }
}

static void replay_counts(session *s, const captured *c, const layer_inputs *in, const layer_spec *spec)
{
  const int64_t counts[] = {0, 1, spec->tokens / 2, spec->tokens, spec->tokens + 1, -1};
  for (int i = 0; i < 6; i++) {
    layer_spec some = *spec;
    some.device_tokens = (int32_t)counts[i];
    set_device_tokens(s, some.device_tokens);
    compare_replay(s, c, in, &some);
  }
  set_device_tokens(s, spec->device_tokens);
}

static void replay_case(cumoe_context context, int32_t dtype, int64_t tokens, routing_input input)
{
  const layer_spec spec = graph_spec(dtype, tokens, input);
  const layer_inputs in = layer_inputs_new(&spec);
  session s;
  streamed_open(&s, context, &spec, &in);
  captured c = capture_forward(&s, cudaStreamCaptureModeGlobal);
  replay_counts(&s, &c, &in, &spec);
  if (input == INPUT_IDS) replay_ids(&s, &c, in, &spec);
  if (input == INPUT_LOGITS) replay_logits(&s, &c, in, &spec);
  replay_x_and_weights(&s, &c, in, &spec);
  captured_free(&c);
  streamed_close(&s);
}

static void test_replays(cumoe_context context)
{
  static const int32_t types[] = {CUMOE_BF16, CUMOE_F32};
  for (int type = 0; type < 2; type++)
    for (routing_input input = INPUT_IDS; input <= INPUT_ROUTER; input++)
      for (int64_t tokens = 3; tokens < 3000; tokens *= 30) {
        case_begin("%s, T %" PRId64 ", input %d", cumoe_dtype_name((cumoe_dtype)types[type]), tokens, input);
        replay_case(context, types[type], tokens, input);
        case_end();
      }
}

static const char *const stage_names[] = {"router", "gate", "map", "up", "down", "combine"};

static cumoe_view output_of(const staged *g, int which)
{
  const cumoe_view_mut all[] = {g->logits, g->ids, g->route.slot_row, g->h, g->y, g->out};
  return cumoe_const(all[which]);
}

/* Each stage is captured before any of them has run; then graphs and eager calls must write the same. */
static void stages_case(cumoe_context context, int32_t dtype, int64_t tokens)
{
  layer_spec spec = graph_spec(dtype, tokens, INPUT_ROUTER);
  spec.device_count = false;
  spec.desc.shared_inter = 0;
  spec.shared_gate = false;
  spec.residual = RESIDUAL_NONE;
  const layer_inputs in = layer_inputs_new(&spec);
  staged g;
  captured c[STAGE_COUNT];
  tensor eager[STAGE_COUNT];
  staged_open(&g, context, &spec, &in, stream_new());
  CHECK_CUDA(cudaDeviceSynchronize()); /* filled on another stream than the stages run on */
  for (int i = 0; i < STAGE_COUNT; i++) {
    if (!capture_begin(g.s.stream, cudaStreamCaptureModeGlobal)) return;
    CHECK_OK(run_stage(&g, i));
    c[i] = capture_end(g.s.stream);
  }
  for (int i = 0; i < STAGE_COUNT; i++) {
    CHECK_OK(run_stage(&g, i));
    CHECK_OK(cumoe_synchronize(context, g.s.stream));
    eager[i] = device_get(context, output_of(&g, i));
    CHECK_OK(cumoe_fill(context, as_mut(output_of(&g, i)), test_poison, g.s.stream));
    if (c[i].exec) CHECK_CUDA(cudaGraphLaunch(c[i].exec, g.s.stream));
    CHECK_OK(cumoe_synchronize(context, g.s.stream));
    const tensor graph = device_get(context, output_of(&g, i));
    check_same(stage_names[i], &eager[i], &graph);
    captured_free(&c[i]);
  }
  layer_outputs whole = {.out = eager[STAGE_COMBINE]};
  check_layer(&spec, &in, &whole);
  streamed_close(&g.s);
}

static void test_stages(cumoe_context context)
{
  for (int type = 0; type < 3; type++)
    for (int64_t tokens = 3; tokens < 3000; tokens *= 30) {
      case_begin("%s, T %" PRId64, cumoe_dtype_name((cumoe_dtype)case_dtypes[type]), tokens);
      stages_case(context, case_dtypes[type], tokens);
      case_end();
    }
}

/* A fault in one replay is sticky in the next, until a clear that is part of the graph. */
static void test_faults_in_graphs(cumoe_context context)
{
  case_begin("recorded and cleared by replays");
  layer_spec spec = graph_spec(CUMOE_BF16, 20, INPUT_IDS);
  const layer_inputs good = layer_inputs_new(&spec);
  layer_inputs bad = good;
  session s;
  cumoe_fault fault = {.size = sizeof fault};
  streamed_open(&s, context, &spec, &good);
  captured c = capture_forward(&s, cudaStreamCaptureModeGlobal);
  capture_begin(s.stream, cudaStreamCaptureModeGlobal);
  CHECK_OK(cumoe_fault_clear(context, s.stream));
  captured clear = capture_end(s.stream);
  bad.ids = all_ids(&spec, 77);
  device_set(context, as_mut(s.args.ids), &bad.ids);
  CHECK_CUDA(cudaDeviceSynchronize());
  replay(&s, &c);
  CHECK_OK(cumoe_synchronize(context, s.stream));
  device_set(context, as_mut(s.args.ids), &good.ids);
  CHECK_CUDA(cudaDeviceSynchronize());
  replay(&s, &c);
  CHECK_OK(cumoe_fault_read(context, s.stream, &fault));
  CHECK_MSG(fault.code == CUMOE_FAULT_EXPERT_ID, "fault %d", fault.code);
  CHECK(cumoe_fault_pending(context) == 1);
  if (clear.exec) CHECK_CUDA(cudaGraphLaunch(clear.exec, s.stream));
  CHECK_OK(cumoe_fault_read(context, s.stream, &fault));
  CHECK_MSG(fault.code == CUMOE_FAULT_NONE, "fault %d after the clear", fault.code);
  CHECK(cumoe_fault_pending(context) == 0);
  captured_free(&clear);
  captured_free(&c);
  streamed_close(&s);
  case_end();
}

static size_t free_memory(void)
{
  size_t available = 0, total = 0;
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaMemGetInfo(&available, &total));
  return available;
}

static void test_no_allocation(cumoe_context context)
{
  for (int64_t tokens = 3; tokens < 3000; tokens *= 30) {
    case_begin("1000 launches, T %" PRId64, tokens);
    const layer_spec spec = graph_spec(CUMOE_BF16, tokens, INPUT_ROUTER);
    const layer_inputs in = layer_inputs_new(&spec);
    session s;
    streamed_open(&s, context, &spec, &in);
    captured c = capture_forward(&s, cudaStreamCaptureModeGlobal);
    replay(&s, &c);
    const size_t before = free_memory();
    const int64_t live = cumoe_buffer_live(context, NULL);
    for (int i = 0; i < 1000; i++) {
      if (i % 4 == 3)
        replay(&s, &c);
      else if (!CHECK_OK(session_forward(&s)))
        break;
    }
    CHECK_MSG(free_memory() == before, "free memory was %zu, is %zu bytes", before, free_memory());
    CHECK(cumoe_buffer_live(context, NULL) == live);
    const layer_outputs o = session_collect(&s);
    check_layer(&spec, &in, &o);
    captured_free(&c);
    streamed_close(&s);
    case_end();
  }
}

typedef struct worker {
  session s;
  bool captures; /* captures and replays instead of launching */
  int calls, failures;
} worker;

static void capture_often(worker *w)
{
  for (int i = 0; i < w->calls; i++) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    bool ok = cudaStreamBeginCapture(w->s.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    ok = ok && session_forward(&w->s) == CUMOE_OK;
    ok = cudaStreamEndCapture(w->s.stream, &graph) == cudaSuccess && ok;
    ok =
        ok && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess && cudaGraphLaunch(exec, w->s.stream) == cudaSuccess;
    ok = cudaStreamSynchronize(w->s.stream) == cudaSuccess && ok;
    if (exec) (void)cudaGraphExecDestroy(exec);
    if (graph) (void)cudaGraphDestroy(graph);
    if (!ok) w->failures++;
  }
}

static void *work(void *argument)
{
  worker *w = argument;
  if (w->captures) capture_often(w);
  for (int i = 0; i < w->calls && !w->captures; i++)
    if (session_forward(&w->s) != CUMOE_OK) w->failures++;
  if (cudaStreamSynchronize(w->s.stream) != cudaSuccess) w->failures++;
  return NULL;
}

/* Two threads, two streams, one plan, one weights object. */
static void threads_case(cumoe_context context, bool captures)
{
  worker w[2];
  pthread_t threads[2];
  const layer_spec spec = graph_spec(CUMOE_BF16, 90, INPUT_ROUTER);
  const layer_inputs in = layer_inputs_new(&spec);
  const layer_outputs want = run_layer(context, &spec, &in);
  for (int i = 0; i < 2; i++) {
    w[i] = (worker){.captures = captures && i == 1, .calls = captures && i == 1 ? 50 : 300};
    streamed_open(&w[i].s, context, &spec, &in);
  }
  const session own = w[1].s;
  w[1].s.plan = w[0].s.plan;
  w[1].s.routed = w[0].s.routed;
  w[1].s.args.shared = w[0].s.shared;
  CHECK_CUDA(cudaDeviceSynchronize());
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, work, &w[i]) == 0);
  for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < 2; i++) {
    CHECK_MSG(w[i].failures == 0, "thread %d: %d failures", i, w[i].failures);
    const layer_outputs got = session_collect(&w[i].s);
    check_outputs_same(&want, &got);
  }
  w[1].s.plan = own.plan;
  w[1].s.routed = own.routed;
  for (int i = 0; i < 2; i++) streamed_close(&w[i].s);
}

static void test_threads(cumoe_context context)
{
  case_begin("both launch");
  threads_case(context, false);
  case_end();
  case_begin("one launches, one captures");
  threads_case(context, true);
  case_end();
}

enum { REPEATS = 1000, WRITTEN = 4 };

/* What a call writes, as host bytes: of the first call, and of the one just made. */
typedef struct snapshot {
  cumoe_view_mut view[WRITTEN];
  size_t bytes[WRITTEN];
  void *first[WRITTEN], *now[WRITTEN];
} snapshot;

static snapshot snapshot_of(const session *s)
{
  snapshot n = {.view = {s->args.out, s->args.ids_out, s->args.weights_out, s->args.counts_out}};
  for (int i = 0; i < WRITTEN; i++) {
    n.bytes[i] = (size_t)(n.view[i].rows * n.view[i].cols) * cumoe_dtype_bytes((cumoe_dtype)n.view[i].dtype);
    n.first[i] = scratch(1, n.bytes[i]);
    n.now[i] = scratch(1, n.bytes[i]);
  }
  return n;
}

static bool fetch(const session *s, const snapshot *n, void *const to[WRITTEN])
{
  bool ok = true;
  for (int i = 0; i < WRITTEN; i++)
    ok = ok && CHECK_OK(cumoe_copy_to_host(s->context, to[i], n->bytes[i], cumoe_const(n->view[i]), s->stream));
  return ok && CHECK_OK(cumoe_synchronize(s->context, s->stream));
}

/* A call into differently poisoned memory; c: by replay, else eager. */
static bool repeat(session *s, const captured *c, const snapshot *n, int round)
{
  const uint8_t byte = round % 2 ? 0x7b : 0xff;
  bool ok = CHECK_OK(cumoe_fill(s->context, s->args.workspace, byte, s->stream));
  for (int i = 0; i < WRITTEN; i++) ok = ok && CHECK_OK(cumoe_fill(s->context, n->view[i], byte, s->stream));
  if (c)
    replay(s, c);
  else
    ok = ok && CHECK_OK(session_forward(s));
  return ok;
}

static void repeat_often(session *s, const captured *c, const snapshot *n)
{
  static const char *const names[WRITTEN] = {"out", "ids_out", "weights_out", "counts_out"};
  for (int round = 0; round < REPEATS; round++) {
    if (!repeat(s, c, n, round) || !fetch(s, n, n->now)) return;
    for (int i = 0; i < WRITTEN; i++)
      if (!CHECK_MSG(memcmp(n->first[i], n->now[i], n->bytes[i]) == 0, "%s: other bits in %s %d", names[i],
                     c ? "replay" : "call", round))
        return;
  }
}

/* Another stream's work while the repeats run: a layer of other sizes, again and again. */
typedef struct load {
  session s;
  captured c;
  atomic_bool stop;
  pthread_t thread;
  bool failed;
} load;

static void *keep_busy(void *argument)
{
  load *l = argument;
  while (!atomic_load(&l->stop) && !l->failed) {
    for (int i = 0; i < 16 && !l->failed; i++) l->failed = cudaGraphLaunch(l->c.exec, l->s.stream) != cudaSuccess;
    l->failed = l->failed || cudaStreamSynchronize(l->s.stream) != cudaSuccess;
  }
  return NULL;
}

static void repeats_case(cumoe_context context, int32_t dtype, int64_t tokens, bool loaded)
{
  const layer_spec spec = graph_spec(dtype, tokens, INPUT_ROUTER), other = graph_spec(dtype, 1900, INPUT_ROUTER);
  const layer_inputs in = layer_inputs_new(&spec), others = layer_inputs_new(&other);
  session s;
  static load l;
  memset(&l, 0, sizeof l);
  streamed_open(&s, context, &spec, &in);
  streamed_open(&l.s, context, &other, &others);
  captured c = capture_forward(&s, cudaStreamCaptureModeGlobal);
  l.c = capture_forward(&l.s, cudaStreamCaptureModeGlobal);
  const snapshot n = snapshot_of(&s);
  loaded = loaded && CHECK(l.c.exec && pthread_create(&l.thread, NULL, keep_busy, &l) == 0);
  if (repeat(&s, NULL, &n, 0) && fetch(&s, &n, n.first)) {
    repeat_often(&s, NULL, &n);
    repeat_often(&s, &c, &n);
  }
  atomic_store(&l.stop, true);
  if (loaded) CHECK(pthread_join(l.thread, NULL) == 0);
  CHECK(!l.failed);
  const layer_outputs o = session_collect(&s);
  check_layer(&spec, &in, &o);
  captured_free(&c);
  captured_free(&l.c);
  streamed_close(&s);
  streamed_close(&l.s);
}

/* 1, 2, 7, 22, 175, 250 and 675 rows an expert: every regime of the table of thresholds. */
static void test_repeats(cumoe_context context)
{
  static const int32_t types[] = {CUMOE_BF16, CUMOE_F16};
  static const int64_t tokens[] = {1, 8, 30, 90, 700, 1000, 2700};
  for (int type = 0; type < 2; type++)
    for (int t = 0; t < 7; t++)
      for (int loaded = 0; loaded < 2; loaded++) {
        case_begin("%s, T %" PRId64 "%s", cumoe_dtype_name((cumoe_dtype)types[type]), tokens[t],
                   loaded ? ", GPU shared with other work" : "");
        repeats_case(context, types[type], tokens[t], loaded);
        case_end();
      }
}

static const test_group groups[] = {
    ALONE("captured as the first call", test_first_call, ON_CUDA),
    GROUP("replayed with other data", test_replays, ON_CUDA),
    GROUP("every stage captured", test_stages, ON_CUDA),
    GROUP("faults in graphs", test_faults_in_graphs, ON_CUDA),
    GROUP("no allocation", test_no_allocation, ON_CUDA),
    GROUP("two threads, two streams", test_threads, ON_CUDA),
    GROUP("a thousand repeats", test_repeats, ON_CUDA),
};

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  cumoe_context context = open_context(0);
  if (context != NULL) {
    run_groups(context, groups, sizeof groups / sizeof groups[0]);
    close_context(context);
  }
  return test_end();
}
