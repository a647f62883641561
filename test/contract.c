/*
 * What cumoe promises about bad data on the device: never a crash, a sticky record, nobody else's bits. And T = 0,
 * threads, several contexts. Bad arguments are badargs.c.
 */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cases_format.h"
#include "session.h"

/* A layer with everything optional that the input allows, and a part of the experts, so that the map is required. */
static layer_spec spec_without_tokens(routing_input input)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 6, 32, 16);
  s.desc.local_experts = 5;
  s.optional_outputs = true;
  s.input = input;
  s.select_bias = input != INPUT_IDS;
  s.router_bias = true;
  s.device_count = true;
  s.device_tokens = 6;
  if (input == INPUT_LOGITS) {
    s.desc.flags = CUMOE_MOE_UNREDUCED;
    return s;
  }
  s.desc.shared_inter = 24;
  s.shared_gate = true;
  s.residual = RESIDUAL_SEPARATE;
  return s;
}

/* Everything that has a row a token is empty and null; no workspace. */
static void no_tokens_forward(cumoe_context context, routing_input input)
{
  session s;
  const layer_spec spec = spec_without_tokens(input);
  case_begin("forward, input %d", (int)input);
  const layer_inputs in = layer_inputs_new(&spec);
  session_open(&s, context, &spec, &in);
  CHECK_OK(cumoe_fill(context, s.args.load, test_poison, NULL));
  cumoe_moe_args a = s.args, nothing = {.size = sizeof a, .shared = s.shared, .expert_map = a.expert_map};
  a.x = nothing.x = cumoe_matrix(NULL, CUMOE_BF16, 0, 32, 32);
  a.out = cumoe_matrix_mut(NULL, CUMOE_BF16, 0, 32, 32);
  a.logits = a.ids = a.weights = a.residual = no_view();
  a.ids_out = a.weights_out = a.workspace = no_view_mut();
  if (input == INPUT_IDS) {
    a.ids = cumoe_matrix(NULL, CUMOE_I32, 0, 2, 2);
    a.weights = cumoe_matrix(NULL, CUMOE_F32, 0, 2, 2);
  }
  CHECK_OK(cumoe_moe_forward(s.plan, s.routed, &a, NULL));
  CHECK_OK(cumoe_moe_forward(s.plan, s.routed, &nothing, NULL));
  check_untouched(context, "counts_out", s.args.counts_out, 0);
  check_untouched(context, "load", s.args.load, 0);
  check_fault(context, NULL, CUMOE_FAULT_NONE);
  session_close(&s);
  case_end();
}

static void no_tokens_stages(cumoe_context context)
{
  session s;
  const layer_spec spec = spec_without_tokens(INPUT_ROUTER);
  case_begin("stages");
  const layer_inputs in = layer_inputs_new(&spec);
  session_open(&s, context, &spec, &in);
  const cumoe_view none = no_view(), x = cumoe_matrix(NULL, CUMOE_BF16, 0, 32, 32),
                   h = cumoe_matrix(NULL, CUMOE_BF16, 0, 16, 16);
  const cumoe_route route = {.size = sizeof route,
                             .counts = device_new(context, CUMOE_I32, 1, 5, 0),
                             .offsets = device_new(context, CUMOE_I32, 1, 6, 0),
                             .row_pair = cumoe_matrix_mut(NULL, CUMOE_I32, 1, 0, 0),
                             .slot_row = cumoe_matrix_mut(NULL, CUMOE_I32, 0, 2, 2)};
  size_t bytes = 1;
  CHECK_OK(cumoe_router(context, x, s.args.router_weight, none, cumoe_matrix_mut(NULL, CUMOE_F32, 0, 8, 8), NULL));
  CHECK_OK(cumoe_gate(context, &spec.desc.routing, cumoe_matrix(NULL, CUMOE_F32, 0, 8, 8), none,
                      cumoe_matrix_mut(NULL, CUMOE_I32, 0, 2, 2), cumoe_matrix_mut(NULL, CUMOE_F32, 0, 2, 2), NULL));
  CHECK_OK(cumoe_map_workspace(s.plan, 0, &bytes));
  CHECK(bytes == 0);
  for (int64_t tokens = 1, least = 0; tokens < INT32_MAX / 4; tokens += tokens / 2 + 1, least = (int64_t)bytes) {
    CHECK_OK(cumoe_map_workspace(s.plan, tokens, &bytes)); /* room for more is room for fewer */
    CHECK((int64_t)bytes >= least);
  }
  CHECK_OK(cumoe_plan_workspace(s.plan, CUMOE_MAX_PAIRS / 2, &bytes));
  CHECK_OK(cumoe_plan_workspace(s.plan, 0, &bytes));
  CHECK(bytes == 0);
  CHECK_OK(cumoe_map(s.plan, cumoe_matrix(NULL, CUMOE_I32, 0, 2, 2), s.args.expert_map, &route, no_view_mut(), NULL));
  CHECK_OK(cumoe_up(s.plan, s.routed, x, &route, none, as_mut(h), NULL));
  CHECK_OK(cumoe_down(s.plan, s.routed, h, &route, as_mut(x), NULL));
  const cumoe_combine_args c = {
      .size = sizeof c, .y = x, .pair_weights = cumoe_matrix(NULL, CUMOE_F32, 0, 2, 2), .out = as_mut(x)};
  CHECK_OK(cumoe_combine(s.plan, &route, &c, NULL));
  check_untouched(context, "counts", route.counts, 0);
  session_close(&s);
  case_end();
}

static void test_no_tokens(cumoe_context context)
{
  no_tokens_forward(context, INPUT_ROUTER);
  no_tokens_forward(context, INPUT_IDS);
  no_tokens_forward(context, INPUT_LOGITS);
  no_tokens_stages(context);
}

static layer_outputs run_expecting(cumoe_context context, const layer_spec *s, const layer_inputs *in, cumoe_fault want)
{
  session run;
  cumoe_fault fault = {.size = sizeof fault};
  session_open(&run, context, s, in);
  CHECK_OK(session_forward(&run));
  const layer_outputs o = session_collect(&run);
  session_close(&run);
  CHECK_OK(cumoe_fault_read(context, NULL, &fault));
  CHECK_MSG(fault.code == want.code && fault.token == want.token && fault.slot == want.slot,
            "fault %d token %" PRId64 " slot %d, want %d %" PRId64 " %d", fault.code, fault.token, fault.slot,
            want.code, want.token, want.slot);
  CHECK(cumoe_fault_pending(context) == (want.code != 0));
  return o;
}

/* One id of one token is wild: that slot adds nothing, the token's others stay, nobody else changes. */
static void wild_id(cumoe_context context, int32_t ids_dtype, double id, int32_t code)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 70, 72, 40);
  s.ids_dtype = ids_dtype;
  s.optional_outputs = true;
  case_begin("id %g, %s", id, cumoe_dtype_name((cumoe_dtype)ids_dtype));
  const layer_inputs in = layer_inputs_new(&s);
  layer_inputs bad = in, dropped = in;
  bad.ids = tensor_copy(&in.ids);
  dropped.ids = tensor_copy(&in.ids);
  tensor_set(&bad.ids, 33, 1, id);
  tensor_set(&dropped.ids, 33, 1, -1);
  const layer_outputs want = run_expecting(context, &s, &dropped, (cumoe_fault){0});
  const layer_outputs got =
      run_expecting(context, &s, &bad, (cumoe_fault){.code = code, .slot = code ? 1 : 0, .token = code ? 33 : 0});
  check_outputs_same(&want, &got);
  const layer_outputs clean = run_layer(context, &s, &in); /* does not hide the record */
  for (int64_t t = 0; t < s.tokens; t++)
    CHECK_MSG(t == 33 || tensor_row_equal(&clean.out, &got.out, t), "token %" PRId64 " changed with token 33's id", t);
  check_fault(context, NULL, code);
  check_fault(context, NULL, CUMOE_FAULT_NONE);
  case_end();
}

static void nan_logits(cumoe_context context)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 70, 72, 40);
  s.input = INPUT_LOGITS;
  s.optional_outputs = true;
  case_begin("NaN logits");
  const layer_inputs in = layer_inputs_new(&s);
  layer_inputs bad = in;
  bad.logits = tensor_copy(&in.logits);
  tensor_set(&bad.logits, 12, 3, NAN);
  for (int64_t e = 0; e < 8; e++) tensor_set(&bad.logits, 40, e, NAN);
  const layer_outputs clean = run_expecting(context, &s, &in, (cumoe_fault){0});
  session run;
  cumoe_fault fault = {.size = sizeof fault};
  session_open(&run, context, &s, &bad);
  CHECK_OK(session_forward(&run));
  const layer_outputs got = session_collect(&run);
  session_close(&run);
  CHECK_OK(cumoe_fault_read(context, NULL, &fault));
  CHECK_MSG(fault.code == CUMOE_FAULT_NAN_LOGIT && (fault.token == 12 || fault.token == 40), "fault %d, token %" PRId64,
            fault.code, fault.token);
  check_layer(&s, &bad, &got);
  for (int64_t t = 0; t < s.tokens; t++)
    CHECK_MSG(t == 12 || t == 40 || tensor_row_equal(&clean.out, &got.out, t), "token %" PRId64 " changed", t);
  for (int64_t i = 0; i < 72; i++)
    CHECK_MSG(tensor_get(&got.out, 40, i) == 0, "a token without a number among its logits has output");
  CHECK_OK(cumoe_fault_clear(context, NULL));
  case_end();
}

static void bad_expert_map(cumoe_context context, int32_t entry)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 70, 72, 40);
  s.desc.local_experts = 6;
  s.optional_outputs = true;
  case_begin("expert map entry %d", entry);
  const layer_inputs in = layer_inputs_new(&s);
  layer_inputs bad = in, dropped = in;
  bad.expert_map = tensor_copy(&in.expert_map);
  dropped.expert_map = tensor_copy(&in.expert_map);
  tensor_set(&bad.expert_map, 0, 2, entry);
  tensor_set(&dropped.expert_map, 0, 2, -1);
  const layer_outputs want = run_layer(context, &s, &dropped), got = run_layer(context, &s, &bad);
  check_outputs_same(&want, &got);
  check_fault(context, NULL, CUMOE_FAULT_EXPERT_MAP);
  case_end();
}

/* A count out of range and data of the tokens that is wrong as well, seen by many threads at once: the count is what is
 * told. */
static void count_before_data(cumoe_context context, routing_input input)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 700, 72, 40);
  session run;
  s.input = input;
  s.device_count = true;
  s.device_tokens = 701;
  case_begin("a count before data of the tokens, input %d", (int)input);
  layer_inputs in = layer_inputs_new(&s);
  tensor *data = input == INPUT_LOGITS ? &in.logits : &in.ids;
  for (int64_t t = 0; t < s.tokens; t++) tensor_set(data, t, 0, input == INPUT_LOGITS ? NAN : 1000);
  session_open(&run, context, &s, &in);
  for (int i = 0; i < 50; i++) {
    CHECK_OK(session_forward(&run));
    check_fault(context, NULL, CUMOE_FAULT_TOKEN_COUNT);
  }
  session_close(&run);
  case_end();
}

static void test_count_before_data(cumoe_context context)
{
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = 16};
  cumoe_context many = NULL;
  case_begin("threads");
  CHECK_OK(cumoe_context_create(on_device(context) ? 0 : CUMOE_DEVICE_CPU, &config, &many));
  case_end();
  count_before_data(many, INPUT_LOGITS);
  count_before_data(many, INPUT_IDS);
  case_begin("close");
  CHECK_OK(cumoe_context_destroy(many));
  case_end();
}

/* The first of two faults is the one kept; a clear takes it away, and the next one is recorded again. */
static void sticky_record(cumoe_context context)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 9, 32, 16);
  case_begin("sticky");
  const layer_inputs in = layer_inputs_new(&s);
  layer_inputs first = in, second = in;
  first.ids = tensor_copy(&in.ids);
  second.ids = tensor_copy(&in.ids);
  tensor_set(&first.ids, 4, 0, 100);
  tensor_set(&second.ids, 7, 1, -5);
  run_expecting(context, &s, &first, (cumoe_fault){.code = CUMOE_FAULT_EXPERT_ID, .slot = 0, .token = 4});
  run_expecting(context, &s, &second, (cumoe_fault){.code = CUMOE_FAULT_EXPERT_ID, .slot = 0, .token = 4});
  run_expecting(context, &s, &in, (cumoe_fault){.code = CUMOE_FAULT_EXPERT_ID, .slot = 0, .token = 4});
  CHECK_OK(cumoe_fault_clear(context, NULL));
  run_expecting(context, &s, &second, (cumoe_fault){.code = CUMOE_FAULT_EXPERT_ID, .slot = 1, .token = 7});
  CHECK_OK(cumoe_fault_clear(context, NULL));
  run_expecting(context, &s, &in, (cumoe_fault){0});
  case_end();
}

enum { SPOIL_COUNTS, SPOIL_OFFSETS, SPOIL_ROW_PAIR, SPOIL_SLOT_ROW, SPOIL_KINDS };

/* One number of the route is wild; nothing outside h, y, out may be written and the fault is told. */
static void bad_route(cumoe_context context, int kind, int32_t value)
{
  static const char *const names[] = {"counts", "offsets", "row_pair", "slot_row"};
  const layer_spec s = layer_spec_new(CUMOE_BF16, 70, 72, 40);
  case_begin("route.%s has %d", names[kind], value);
  const layer_inputs in = layer_inputs_new(&s);
  staged g;
  staged_open(&g, context, &s, &in, NULL);
  CHECK_OK(run_stage(&g, STAGE_MAP));
  cumoe_view_mut all[] = {g.route.counts, g.route.offsets, g.route.row_pair, g.route.slot_row};
  tensor t = device_get(context, cumoe_const(all[kind]));
  tensor_set(&t, 0, kind == SPOIL_SLOT_ROW ? 5 : 3, value);
  device_set(context, all[kind], &t);
  for (stage which = STAGE_UP; which < STAGE_COUNT; which++) CHECK_OK(run_stage(&g, which));
  CHECK_OK(cumoe_synchronize(context, NULL));
  check_guards(context, "h", g.h);
  check_guards(context, "y", g.y);
  check_guards(context, "out", g.out);
  check_fault(context, NULL, CUMOE_FAULT_ROUTE);
  session_close(&g.s);
  const layer_outputs after = run_layer(context, &s, &in); /* the context stays usable */
  check_layer(&s, &in, &after);
  check_fault(context, NULL, CUMOE_FAULT_NONE);
  case_end();
}

static void test_device_data(cumoe_context context)
{
  static const double ids[] = {-2, 8, 9, 1000, 1 << 30, INT32_MIN, INT32_MAX},
                      wide[] = {4294967296.0, 4294967297.0, -4294967296.0, 0x1p40, -0x1p62};
  static const int32_t counts[] = {-1, INT32_MIN, 1000, INT32_MAX}, offsets[] = {-1, INT32_MIN, 100000, INT32_MAX};
  static const int32_t pairs[] = {-1, INT32_MIN, 140, INT32_MAX}, rows[] = {-3, INT32_MIN, 140, INT32_MAX};
  for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
    wild_id(context, CUMOE_I32, ids[i], CUMOE_FAULT_EXPERT_ID);
    wild_id(context, CUMOE_I64, ids[i], CUMOE_FAULT_EXPERT_ID);
  }
  for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) wild_id(context, CUMOE_I64, wide[i], CUMOE_FAULT_EXPERT_ID);
  wild_id(context, CUMOE_I32, -1, CUMOE_FAULT_NONE);
  wild_id(context, CUMOE_I64, -1, CUMOE_FAULT_NONE);
  nan_logits(context);
  bad_expert_map(context, 6);
  bad_expert_map(context, -2);
  bad_expert_map(context, INT32_MAX);
  bad_expert_map(context, INT32_MIN);
  sticky_record(context);
  for (int i = 0; i < 4; i++) {
    bad_route(context, SPOIL_COUNTS, counts[i]);
    bad_route(context, SPOIL_OFFSETS, offsets[i]);
    bad_route(context, SPOIL_ROW_PAIR, pairs[i]);
    bad_route(context, SPOIL_SLOT_ROW, rows[i]);
  }
}

/* Checks are the main thread's: a worker only calls and counts what went wrong. */
typedef struct worker {
  session s;
  int calls;
  int failures;
  cumoe_status last;
} worker;

static void *call_often(void *argument)
{
  worker *w = argument;
  for (int i = 0; i < w->calls; i++) {
    w->last = session_forward(&w->s);
    if (w->last != CUMOE_OK) w->failures++;
    if (i % 8 == 7 && cumoe_synchronize(w->s.context, w->s.stream) != CUMOE_OK) w->failures++;
  }
  return NULL;
}

/* Threads share the plan and the weights; each has its own memory. */
static void test_threads(cumoe_context context)
{
  enum { THREADS = 2 };
  layer_spec s = layer_spec_new(CUMOE_BF16, 40, 72, 40);
  s.input = INPUT_ROUTER;
  s.desc.shared_inter = 24;
  worker w[THREADS];
  pthread_t threads[THREADS];
  case_begin("60 calls each");
  const layer_inputs in = layer_inputs_new(&s);
  const layer_outputs want = run_layer(context, &s, &in);
  for (int i = 0; i < THREADS; i++) {
    w[i] = (worker){.calls = 60};
    session_open(&w[i].s, context, &s, &in);
  }
  const session own = w[1].s;
  w[1].s.plan = w[0].s.plan;
  w[1].s.routed = w[0].s.routed;
  w[1].s.args.shared = w[0].s.shared;
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, call_often, &w[i]) == 0);
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < THREADS; i++) {
    CHECK_MSG(w[i].failures == 0, "%d of %d calls failed: %s", w[i].failures, w[i].calls, cumoe_status_name(w[i].last));
    const layer_outputs got = session_collect(&w[i].s);
    check_outputs_same(&want, &got);
  }
  session_close(&w[0].s);
  w[1].s = own;
  session_close(&w[1].s);
  case_end();
}

/* A failure's text belongs to its thread. */
static void *fail_elsewhere(void *argument)
{
  (void)cumoe_plan_destroy(NULL);
  char *text = argument;
  size_t bytes;
  if (cumoe_plan_workspace(NULL, 1, &bytes) != CUMOE_OK) snprintf(text, 200, "%s", cumoe_last_error());
  return NULL;
}

static void test_error_text(void)
{
  char other[200] = "";
  pthread_t thread;
  case_begin("of each thread");
  CHECK(cumoe_status_name((cumoe_status)12345) != NULL && cumoe_status_text((cumoe_status)-1) != NULL);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_context_create(-77, NULL, &(cumoe_context){0}));
  CHECK(strstr(cumoe_last_error(), "cumoe_context_create") == cumoe_last_error());
  CHECK(pthread_create(&thread, NULL, fail_elsewhere, other) == 0 && pthread_join(thread, NULL) == 0);
  CHECK_MSG(strstr(other, "cumoe_plan_workspace") == other, "the other thread's text is %s", other);
  CHECK_MSG(strstr(cumoe_last_error(), "cumoe_context_create") == cumoe_last_error(), "this thread's text is %s",
            cumoe_last_error());
  case_end();
}

static void test_two_contexts(cumoe_context context)
{
  cumoe_context other = NULL;
  const int32_t device = on_device(context) ? 0 : CUMOE_DEVICE_CPU;
  case_begin("same bits, own faults");
  CHECK_OK(cumoe_context_create(device, NULL, &other));
  layer_spec s = layer_spec_new(CUMOE_BF16, 40, 72, 40);
  const layer_inputs in = layer_inputs_new(&s);
  const layer_outputs a = run_layer(context, &s, &in), b = run_layer(other, &s, &in);
  check_outputs_same(&a, &b);
  s.pattern = PATTERN_HOSTILE;
  const layer_inputs bad = layer_inputs_new(&s);
  (void)run_layer(other, &s, &bad);
  CHECK(cumoe_fault_pending(context) == 0);
  check_fault(other, NULL, CUMOE_FAULT_EXPERT_ID);
  session x, y;
  session_open(&x, context, &s, &in);
  session_open(&y, other, &s, &in);
  CHECK_STATUS(CUMOE_ERR_WRONG_DEVICE, cumoe_moe_forward(x.plan, y.routed, &x.args, NULL));
  session_close(&x);
  session_close(&y);
  case_end();
  case_begin("close the second");
  CHECK_OK(cumoe_context_destroy(other));
  case_end();
}

/* An optional output is the same without the others. */
static void test_outputs_alone(cumoe_context context)
{
  layer_spec spec = layer_spec_new(CUMOE_BF16, 9, 72, 40);
  spec.input = INPUT_ROUTER;
  spec.optional_outputs = true;
  case_begin("ids, weights, counts, load");
  const layer_inputs in = layer_inputs_new(&spec);
  const layer_outputs all = run_layer(context, &spec, &in);
  for (int kept = 0; kept < 4; kept++) {
    session s;
    session_open(&s, context, &spec, &in);
    cumoe_view_mut *optional[] = {&s.args.ids_out, &s.args.weights_out, &s.args.counts_out, &s.args.load};
    for (int i = 0; i < 4; i++)
      if (i != kept) *optional[i] = no_view_mut();
    CHECK_OK(session_forward(&s));
    const layer_outputs got = session_collect(&s);
    check_outputs_same(&got, &all);
    session_close(&s);
  }
  case_end();
}

/* ---- formats ---- */

static layer_spec spec_with_formats(void)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 5, 256, 128);
  s.desc.up_format = cumoe_format_fp8_block(CUMOE_F32);
  s.desc.down_format = cumoe_format_int8(CUMOE_F32);
  s.desc.shared_inter = 64;
  s.desc.shared_down_format = cumoe_format_fp8_channel(CUMOE_F32);
  return s;
}

/* Weights and plan say the same of formats; the routed experts' and the shared one's. */
static void other_formats(cumoe_context context)
{
  layer_spec spec = spec_with_formats(), other = spec;
  session s, t;
  other.desc.up_format.scale = CUMOE_BF16;
  other.desc.shared_up_format = cumoe_format_mxfp4();
  const layer_inputs in = layer_inputs_new(&spec), wrong = layer_inputs_new(&other);
  case_begin("formats that differ");
  session_open(&s, context, &spec, &in);
  session_open(&t, context, &other, &wrong);
  CHECK_STATUS(CUMOE_ERR_LAYOUT, cumoe_moe_forward(s.plan, t.routed, &s.args, NULL));
  CHECK_TEXT("weights have other formats than the plan's");
  s.args.shared = t.shared;
  CHECK_STATUS(CUMOE_ERR_LAYOUT, cumoe_moe_forward(s.plan, s.routed, &s.args, NULL));
  CHECK_TEXT("args.shared have other formats than the plan's");
  session_close(&s);
  session_close(&t);
  case_end();
}

/* A workspace of one byte less than `bytes` is refused before anything is written; the session's own serves. */
static void check_exact(cumoe_context context, session *s, const layer_spec *spec, const layer_inputs *in, size_t bytes)
{
  cumoe_moe_args a = s->args;
  a.workspace.cols = a.workspace.ld = (int64_t)bytes - 1;
  CHECK_STATUS(CUMOE_ERR_WORKSPACE, cumoe_moe_forward(s->plan, s->routed, &a, NULL));
  check_untouched(context, "out", s->args.out, 0);
  check_untouched(context, "workspace", s->args.workspace, 0);
  CHECK_OK(session_forward(s));
  const layer_outputs got = session_collect(s);
  check_layer(spec, in, &got);
}

/* The workspace has room for codes, and no byte more is touched (session_collect); one less is refused. */
static void format_workspace(cumoe_context context)
{
  const layer_spec spec = spec_with_formats();
  const layer_inputs in = layer_inputs_new(&spec);
  layer_spec as_is = spec; /* activations of the same weights */
  cumoe_plan plan = NULL;
  size_t bytes = 0, least = 0;
  session s;
  case_begin("workspace");
  session_open(&s, context, &spec, &in);
  cumoe_format *formats[] = {&as_is.desc.up_format, &as_is.desc.down_format, &as_is.desc.shared_down_format};
  for (int i = 0; i < 3; i++) formats[i]->rows = CUMOE_ROWS_AS_THEY_ARE, formats[i]->row_group = 0;
  CHECK_OK(cumoe_plan_create(context, &as_is.desc, &plan));
  CHECK_OK(cumoe_plan_workspace(s.plan, spec.tokens, &bytes));
  CHECK_OK(cumoe_plan_workspace(plan, spec.tokens, &least));
  CHECK_MSG(bytes > least, "%zu bytes with codes, %zu without", bytes, least);
  check_exact(context, &s, &spec, &in, bytes);
  CHECK_OK(cumoe_plan_destroy(plan));
  session_close(&s);
  case_end();
}

/* With every format, alone, the same of the exact size: one byte less is refused, and that is all that is touched. */
static void workspace_of_each(cumoe_context context)
{
  cumoe_format f;
  const char *name;
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++) {
    layer_spec spec = layer_spec_new(CUMOE_BF16, 5, 160, 96);
    session s;
    size_t bytes = 0;
    spec.desc.up_format = spec.desc.down_format = f;
    spec.desc.down_format.joined = 0;
    case_begin("workspace: %s", name);
    const layer_inputs in = layer_inputs_new(&spec);
    session_open(&s, context, &spec, &in);
    CHECK_OK(cumoe_plan_workspace(s.plan, spec.tokens, &bytes));
    CHECK(s.args.workspace.cols == (int64_t)bytes); /* behind it lies a guard, session_collect looks */
    check_exact(context, &s, &spec, &in, bytes);
    session_close(&s);
    case_end();
  }
}

/* The stages have no place for codes of activations. */
static void format_stages(cumoe_context context)
{
  layer_spec spec = spec_with_formats();
  spec.desc.shared_inter = 0;
  spec.desc.shared_down_format = (cumoe_format){0};
  const layer_inputs in = layer_inputs_new(&spec);
  staged g;
  case_begin("stages");
  staged_open(&g, context, &spec, &in, NULL);
  CHECK_OK(run_stage(&g, STAGE_MAP));
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, run_stage(&g, STAGE_UP));
  CHECK_TEXT("desc.up_format.rows is 3: activations become codes in cumoe_moe_forward and");
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, run_stage(&g, STAGE_DOWN));
  CHECK_TEXT("desc.down_format.rows is 2:");
  check_untouched(context, "h", g.h, 0);
  session_close(&g.s);
  case_end();
}

static void test_formats(cumoe_context context)
{
  oracle_device = on_device(context) ? DEVICE_ANY : 0;
  other_formats(context);
  format_workspace(context);
  workspace_of_each(context);
  format_stages(context);
}

static const test_group groups[] = {
    ALONE("error text", test_error_text, ONCE),
    GROUP("no tokens", test_no_tokens, ANYWHERE),
    GROUP("optional outputs alone", test_outputs_alone, ANYWHERE),
    GROUP("bad device data", test_device_data, ANYWHERE),
    GROUP("a count before data", test_count_before_data, ANYWHERE),
    GROUP("two threads on one plan", test_threads, ANYWHERE),
    GROUP("two contexts", test_two_contexts, ANYWHERE),
    GROUP("formats", test_formats, ANYWHERE),
};
TEST_MAIN(groups)
