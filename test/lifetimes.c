/* What a handle of the API names once its object has gone: nothing. Plans, weights and contexts destroyed twice,
 * forged, reused, outlived by what they own; weights whose buffers were freed, and outputs laid over weights. */
#include <stdio.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "test.h"

#define CHECK_STALE(expression, word)                                                                                  \
  do {                                                                                                                 \
    if (CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, expression)) CHECK_TEXT(word);                                            \
  } while (0)

enum { EXPERTS = 4, HIDDEN = 16, INTER = 8, TOP_K = 2, TOKENS = 3 };

/* ---- a layer of which every operand is a buffer of its own ------------------------------------------------------ */

enum { GATE, UP, DOWN, GATE_BIAS, UP_BIAS, DOWN_BIAS, BOUND, X = BOUND, LOGITS, OUT, WORKSPACE, UNUSED, BUFFERS };
static const char *const bound_names[BOUND] = {"gate", "up", "down", "gate.bias", "up.bias", "down.bias"};

typedef struct layer {
  cumoe_context context;
  cumoe_plan plan;
  cumoe_weights weights;
  cumoe_weights_desc bound;
  cumoe_moe_args args;
  cumoe_buffer buffers[BUFFERS];
} layer;

static const cumoe_moe_desc layer_desc = {.size = sizeof layer_desc,
                                          .num_experts = EXPERTS,
                                          .hidden = HIDDEN,
                                          .inter = INTER,
                                          .dtype = CUMOE_F32,
                                          .routing = {.top_k = TOP_K}};

static cumoe_view_mut give(layer *l, int which, int64_t rows, int64_t cols)
{
  const cumoe_dtype dtype = which == WORKSPACE ? CUMOE_U8 : CUMOE_F32;
  CHECK_OK(cumoe_buffer_alloc_with(l->context, dtype, rows, cols, CUMOE_ALLOC_ZERO, NULL, &l->buffers[which]));
  return cumoe_buffer_view_mut(l->buffers[which]);
}

static cumoe_projection project(layer *l, int which, int64_t outs, int64_t ins)
{
  cumoe_projection p = {.data = cumoe_const(give(l, which, EXPERTS * outs, ins))};
  p.bias = cumoe_const(give(l, which + GATE_BIAS, EXPERTS, outs));
  return p;
}

static layer layer_new(cumoe_context context)
{
  layer l = {.context = context};
  size_t bytes = 0;
  CHECK_OK(cumoe_plan_create(context, &layer_desc, &l.plan));
  l.bound = (cumoe_weights_desc){.size = sizeof l.bound,
                                 .experts = EXPERTS,
                                 .hidden = HIDDEN,
                                 .inter = INTER,
                                 .gate_order = CUMOE_GATE_UP_SEPARATE,
                                 .up_major = CUMOE_OUT_IN,
                                 .down_major = CUMOE_OUT_IN};
  l.bound.gate = project(&l, GATE, INTER, HIDDEN);
  l.bound.up = project(&l, UP, INTER, HIDDEN);
  l.bound.down = project(&l, DOWN, HIDDEN, INTER);
  CHECK_OK(cumoe_weights_bind(context, &l.bound, &l.weights));
  CHECK_OK(cumoe_plan_workspace(l.plan, TOKENS, &bytes));
  l.args = (cumoe_moe_args){.size = sizeof l.args};
  l.args.x = cumoe_const(give(&l, X, TOKENS, HIDDEN));
  l.args.logits = cumoe_const(give(&l, LOGITS, TOKENS, EXPERTS));
  l.args.out = give(&l, OUT, TOKENS, HIDDEN);
  l.args.workspace = give(&l, WORKSPACE, 1, (int64_t)bytes);
  return l;
}

static cumoe_status forward(const layer *l)
{
  const cumoe_status status = cumoe_moe_forward(l->plan, l->weights, &l->args, NULL);
  return status != CUMOE_OK ? status : cumoe_synchronize(l->context, NULL);
}

static void layer_free(layer *l)
{
  CHECK_OK(cumoe_weights_destroy(l->weights));
  CHECK_OK(cumoe_plan_destroy(l->plan));
  for (int i = 0; i < BUFFERS; i++) CHECK_OK(cumoe_buffer_free(&l->buffers[i]));
}

static cumoe_context open_at(cumoe_context like, int32_t debug)
{
  const cumoe_context_config config = {.size = sizeof config, .debug = debug, .cpu_threads = 1};
  cumoe_context context = NULL;
  CHECK_OK(cumoe_context_create(on_device(like) ? 0 : CUMOE_DEVICE_CPU, &config, &context));
  return context;
}

/* ---- destroyed, forged, reused ---------------------------------------------------------------------------------- */

static void check_dead(const layer *l, cumoe_plan plan, cumoe_weights weights)
{
  layer with = *l;
  size_t bytes = 7;
  with.plan = plan;
  CHECK_STALE(forward(&with), "plan");
  CHECK_STALE(cumoe_plan_workspace(plan, 1, &bytes), "plan");
  CHECK_STALE(cumoe_plan_destroy(plan), "plan");
  with = *l;
  with.weights = weights;
  CHECK_STALE(forward(&with), "weights");
  CHECK_STALE(cumoe_weights_destroy(weights), "weights");
}

static void test_destroyed(cumoe_context context)
{
  if (!group_begin("%s: plans and weights that are gone", context_name(context))) return;
  case_begin("destroyed");
  layer l = layer_new(context);
  cumoe_plan plan = NULL, next = NULL;
  cumoe_weights weights = NULL, later = NULL;
  CHECK_OK(cumoe_plan_create(context, &layer_desc, &plan));
  CHECK_OK(cumoe_weights_bind(context, &l.bound, &weights));
  CHECK_OK(cumoe_plan_destroy(plan));
  CHECK_OK(cumoe_weights_destroy(weights));
  check_dead(&l, plan, weights);
  case_end();
  case_begin("their places taken again"); /* and neither is what the old handles name */
  CHECK_OK(cumoe_plan_create(context, &layer_desc, &next));
  CHECK_OK(cumoe_weights_bind(context, &l.bound, &later));
  check_dead(&l, plan, weights);
  CHECK_OK(cumoe_plan_destroy(next));
  CHECK_OK(cumoe_weights_destroy(later));
  case_end();
  case_begin("forged");
  const uint64_t live = (uint64_t)(uintptr_t)l.plan;
  const uint64_t forged[] = {1,
                             4096,
                             1ull << 32,
                             0xffffffff,
                             live + 1000,
                             live + (1ull << 32),
                             live + (2ull << 32),
                             UINT64_MAX,
                             (uint64_t)(uintptr_t)&l,
                             (uint64_t)(uintptr_t)l.context};
  for (size_t i = 0; i < sizeof forged / sizeof forged[0]; i++)
    check_dead(&l, (cumoe_plan)(uintptr_t)forged[i], (cumoe_weights)(uintptr_t)forged[i]);
  check_dead(&l, (cumoe_plan)(void *)l.weights, (cumoe_weights)(void *)l.plan);
  CHECK_STALE(cumoe_context_destroy((cumoe_context)(void *)l.plan), "context");
  CHECK_STALE(cumoe_synchronize((cumoe_context)(uintptr_t)4096, NULL), "context");
  CHECK_OK(forward(&l));
  layer_free(&l);
  case_end();
  group_end();
}

/* ---- the context goes first ------------------------------------------------------------------------------------- */

static char heard[4][300];
static int heard_count;

static void hear(void *unused, cumoe_log_level level, const char *message)
{
  (void)unused;
  (void)level;
  if (heard_count < 4) (void)snprintf(heard[heard_count++], sizeof heard[0], "%s", message);
}

/* Its contexts take each other's memory: an old handle must not be found again by its address. */
static void test_context_first(cumoe_context like)
{
  if (!group_begin("%s: a context that goes before what it made", context_name(like))) return;
  for (int32_t debug = 0; debug < 2; debug++) {
    case_begin("debug level %d", (int)debug);
    cumoe_context context = open_at(like, debug), next = NULL;
    layer l = layer_new(context);
    cumoe_plan spare = NULL;
    const void *table[EXPERTS];
    cumoe_weights_desc by_pointers = l.bound;
    cumoe_weights pointers = NULL;
    for (int e = 0; e < EXPERTS; e++) table[e] = (const float *)l.bound.down.data.data + (size_t)e * HIDDEN * INTER;
    by_pointers.down.per_expert = table;
    by_pointers.down.data.data = NULL;
    by_pointers.down.data.rows = HIDDEN;
    by_pointers.down.data.owner = 0;
    CHECK_OK(cumoe_weights_bind(context, &by_pointers, &pointers));
    CHECK_OK(cumoe_plan_create(context, &layer_desc, &spare));
    CHECK_OK(forward(&l));
    heard_count = 0;
    cumoe_set_log(hear, NULL, CUMOE_LOG_WARNING);
    CHECK_OK(cumoe_context_destroy(context));
    cumoe_set_log(NULL, NULL, CUMOE_LOG_WARNING);
    CHECK(heard_count == (debug ? 3 : 0));
    if (debug) CHECK_MSG(strstr(heard[0], "2 plans, 2 weights") != NULL, "heard \"%s\"", heard[0]);
    for (int again = 0; again < 2; again++) {
      CHECK_STALE(cumoe_synchronize(context, NULL), "context");
      CHECK_STALE(cumoe_context_destroy(context), "context");
      CHECK_STALE(forward(&l), "plan");
      CHECK_STALE(cumoe_plan_destroy(l.plan), "plan");
      CHECK_STALE(cumoe_plan_destroy(spare), "plan");
      CHECK_STALE(cumoe_weights_destroy(l.weights), "weights");
      CHECK_STALE(cumoe_weights_destroy(pointers), "weights");
      CHECK_STALE(cumoe_buffer_free(&(cumoe_buffer){l.buffers[OUT].id}), "buffer");
      if (!again) next = open_at(like, debug);
    }
    CHECK_OK(cumoe_synchronize(next, NULL));
    CHECK_OK(cumoe_context_destroy(next));
    case_end();
  }
  group_end();
}

/* ---- weights on buffers that were freed ------------------------------------------------------------------------- */

static void test_freed_buffers(cumoe_context context)
{
  if (!group_begin("%s: weights on buffers that were freed", context_name(context))) return;
  for (int which = 0; which < BOUND; which++) {
    case_begin("%s", bound_names[which]);
    layer l = layer_new(context);
    cumoe_buffer another = {0};
    char name[40];
    (void)snprintf(name, sizeof name, "weights: %s is", bound_names[which]);
    CHECK_OK(forward(&l));
    if (which % 2) CHECK_OK(cumoe_buffer_retain(l.buffers[which], &another)); /* the view names the other handle */
    CHECK_OK(cumoe_buffer_free(&l.buffers[which]));
    CHECK_STALE(forward(&l), name);
    cumoe_buffer reused = {0};
    CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, EXPERTS * INTER, HIDDEN, NULL, &reused));
    CHECK_STALE(forward(&l), name);
    CHECK_OK(cumoe_buffer_free(&reused));
    CHECK_OK(cumoe_buffer_free(&another));
    layer_free(&l);
    case_end();
  }
  group_end();
}

/* ---- outputs over weights --------------------------------------------------------------------------------------- */

enum { MATRIX = HIDDEN * INTER, GAP = 1024 /* elements before each expert of down, and behind the last */ };

/* An output of `bytes` that ends where expert e's matrix begins, and one that begins where it ends, are legal; `step`
 * bytes further in, neither is. */
static void check_around(const layer *l, cumoe_view_mut *output, int64_t bytes, int64_t step, const char *name)
{
  const struct {
    int64_t at;
    cumoe_status want;
  } places[] = {{-bytes, CUMOE_OK},
                {step - bytes, CUMOE_ERR_INVALID_ARGUMENT},
                {4 * MATRIX - step, CUMOE_ERR_INVALID_ARGUMENT},
                {4 * MATRIX, CUMOE_OK}};
  const cumoe_view_mut before = *output;
  char *room = (char *)cumoe_buffer_view_mut(l->buffers[DOWN]).data + 4 * GAP;
  for (int e = 0; e < EXPERTS; e++)
    for (int i = 0; i < 4; i++) {
      output->data = room + 4 * e * (MATRIX + GAP) + places[i].at;
      output->owner = 0;
      if (!CHECK_STATUS(places[i].want, forward(l)) || places[i].want == CUMOE_OK) continue;
      CHECK_TEXT(name);
      CHECK_TEXT("down");
    }
  *output = before;
}

static void refuse(const layer *l, cumoe_view_mut *output, const void *data, const char *text)
{
  const cumoe_view_mut before = *output;
  output->data = (void *)(uintptr_t)data;
  output->owner = 0;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, forward(l));
  CHECK_TEXT(text);
  *output = before;
}

/* Down in strided form, or by pointers in another order. */
static layer layer_with_gaps(cumoe_context context, bool pointers)
{
  static const int order[EXPERTS] = {2, 0, 3, 1};
  const void *table[EXPERTS];
  layer l = layer_new(context);
  CHECK_OK(cumoe_weights_destroy(l.weights));
  CHECK_OK(cumoe_buffer_free(&l.buffers[DOWN]));
  const float *room = give(&l, DOWN, 1, EXPERTS * (MATRIX + GAP) + GAP).data;
  for (int e = 0; e < EXPERTS; e++) table[e] = room + GAP + order[e] * (MATRIX + GAP);
  l.bound.down.data = cumoe_matrix(pointers ? NULL : room + GAP, CUMOE_F32, HIDDEN, INTER, INTER);
  l.bound.down.expert_stride = pointers ? 0 : MATRIX + GAP;
  l.bound.down.per_expert = pointers ? table : NULL;
  CHECK_OK(cumoe_weights_bind(context, &l.bound, &l.weights));
  l.bound.down.per_expert = NULL;
  return l;
}

static void test_over_weights(cumoe_context context)
{
  if (!group_begin("%s: outputs over weights", context_name(context))) return;
  for (int pointers = 0; pointers < 2; pointers++) {
    case_begin("%s", pointers ? "by pointers" : "strided");
    layer l = layer_with_gaps(context, pointers);
    CHECK(l.args.workspace.cols <= 4 * GAP);
    check_around(&l, &l.args.out, 4 * TOKENS * HIDDEN, 16, "args.out");
    check_around(&l, &l.args.workspace, l.args.workspace.cols, 256, "args.workspace");
    layer_free(&l);
    case_end();
  }
  case_begin("every output, every projection");
  layer l = layer_new(context);
  const cumoe_projection *const parts[] = {&l.bound.gate, &l.bound.up, &l.bound.down};
  l.args.ids_out = cumoe_matrix_mut(NULL, CUMOE_I32, TOKENS, TOP_K, TOP_K);
  l.args.weights_out = cumoe_matrix_mut(NULL, CUMOE_F32, TOKENS, TOP_K, TOP_K);
  l.args.counts_out = cumoe_vector_mut(NULL, CUMOE_I32, EXPERTS);
  l.args.load = cumoe_vector_mut(NULL, CUMOE_I64, EXPERTS);
  for (int p = 0; p < 3; p++)
    for (int bias = 0; bias < 2; bias++) {
      char text[60];
      const void *data = bias ? parts[p]->bias.data : parts[p]->data.data;
      (void)snprintf(text, sizeof text, " overlaps weights: %s", bound_names[p + bias * GATE_BIAS]);
      cumoe_view_mut spare = give(&l, UNUSED, 4, 1024);
      l.args.ids_out.data = spare.data;
      l.args.weights_out.data = (float *)spare.data + 1024;
      l.args.counts_out.data = (float *)spare.data + 2048;
      l.args.load.data = (float *)spare.data + 3072;
      CHECK_OK(forward(&l));
      cumoe_view_mut *const outputs[] = {&l.args.out, &l.args.ids_out, &l.args.weights_out, &l.args.counts_out,
                                         &l.args.load};
      for (int i = 0; i < 5; i++) refuse(&l, outputs[i], data, text);
      refuse(&l, &l.args.workspace, data, "args.workspace overlaps weights: "); /* and what lies behind */
      CHECK_OK(cumoe_buffer_free(&l.buffers[UNUSED]));
    }
  case_end();
  case_begin("the shared expert's");
  cumoe_moe_desc with_shared = layer_desc;
  cumoe_weights_desc one = l.bound;
  cumoe_plan plain = l.plan;
  with_shared.shared_inter = INTER;
  one.experts = 1;
  one.gate.data.rows = one.up.data.rows = INTER;
  one.down.data.rows = HIDDEN;
  one.gate.bias.rows = one.up.bias.rows = one.down.bias.rows = 1;
  one.down.data = l.args.x; /* in memory of its own */
  one.down.data.data = give(&l, UNUSED, 64, 1024).data;
  one.down.data.rows = HIDDEN;
  one.down.data.cols = one.down.data.ld = INTER;
  one.down.data.owner = 0;
  size_t bytes = 0;
  CHECK_OK(cumoe_plan_create(context, &with_shared, &l.plan));
  CHECK_OK(cumoe_plan_workspace(l.plan, TOKENS, &bytes));
  CHECK_OK(cumoe_buffer_free(&l.buffers[WORKSPACE]));
  l.args.workspace = give(&l, WORKSPACE, 1, (int64_t)bytes);
  l.args.ids_out = l.args.weights_out = l.args.counts_out = l.args.load = (cumoe_view_mut){0};
  CHECK_OK(cumoe_weights_bind(context, &one, &l.args.shared));
  CHECK_OK(forward(&l));
  refuse(&l, &l.args.out, one.down.data.data, "args.out overlaps args.shared: down");
  CHECK_OK(cumoe_moe_kept(l.plan, TOKENS, &bytes));
  const cumoe_view_mut kept = cumoe_vector_mut((void *)(uintptr_t)one.down.data.data, CUMOE_U8, (int64_t)bytes);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_moe_forward_keep(l.plan, l.weights, &l.args, kept, NULL));
  CHECK_TEXT("kept overlaps args.shared: down");
  CHECK_OK(cumoe_buffer_free(&l.buffers[UP])); /* both are bound to it: the first is named */
  CHECK_STALE(forward(&l), "weights: up is");
  CHECK_OK(cumoe_weights_destroy(l.args.shared));
  CHECK_OK(cumoe_plan_destroy(plain));
  layer_free(&l);
  case_end();
  group_end();
}

/* ---- the caller's errors ---------------------------------------------------------------------------------------- */

/* CUDA keeps one error a thread until it is asked for: this one is the caller's, whatever cumoe does that works. */
static void test_pending_error(cumoe_context like)
{
  if (!on_device(like) || !group_begin("cuda: an error that was pending")) return;
  case_begin("every call leaves it");
  CHECK(cudaSetDevice(9999) == cudaErrorInvalidDevice);
#define CHECK_PENDING(call)                                                                                            \
  CHECK_MSG(cudaPeekAtLastError() == cudaErrorInvalidDevice, "after %s it is %s", call,                                \
            cudaGetErrorName(cudaPeekAtLastError()))
  cumoe_context own = open_at(like, 0);
  CHECK_PENDING("cumoe_context_create");
  layer l = layer_new(own);
  CHECK_PENDING("allocating and binding");
  CHECK_OK(forward(&l));
  CHECK_PENDING("cumoe_moe_forward");
  layer_free(&l);
  CHECK_PENDING("freeing");
  CHECK_OK(cumoe_context_destroy(own));
  CHECK_PENDING("cumoe_context_destroy");
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
  case_end();
  group_end();
}

int main(int argc, char **argv)
{
  cumoe_context contexts[2];
  test_begin(argc, argv);
  const int count = open_contexts(contexts);
  for (int i = 0; i < count; i++) {
    test_destroyed(contexts[i]);
    test_context_first(contexts[i]);
    test_freed_buffers(contexts[i]);
    test_over_weights(contexts[i]);
    test_pending_error(contexts[i]);
    close_context(contexts[i]);
  }
  return test_end();
}
