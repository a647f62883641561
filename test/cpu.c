/* The CPU device against the oracle: every stage and the layer. The same cases run on CUDA in variants.c. White box
 * where the order of the threads is what matters. */
#include "cases.h"
#include "cases_codes.h"
#include "cases_format.h"
#include "cases_gemm.h"
#include "cases_layer.h"
#include "cases_ops.h"
#include "session.h"

#include "../kernels/cpu/cpu.h"
#include "../kernels/cpu/element.h"
#include "../kernels/score.h"

#include <fenv.h>
#include <math.h>
#include <pthread.h>
#if defined __SSE2__
#include <immintrin.h>
#endif

static void run_group(const char *name, void (*cases)(cumoe_context), cumoe_context context)
{
  if (!group_begin("cpu %s", name)) return;
  cases(context);
  group_end();
}

/* A thread may be done with the last tokens before another one begins with the first. */
static void test_count_before_data(void)
{
  enum { T = 16, E = 8, K = 2 };
  float logits[T * E], weights[T * K];
  int32_t ids[T * K], present = T + 1;
  uint64_t record = 0;
  uint32_t mirror = 0;
  if (!group_begin("cpu: a count before data of the tokens")) return;
  case_begin("the last tokens first");
  for (int i = 0; i < T * E; i++) logits[i] = NAN;
  const gate_args a = {.logits = logits,
                       .ids = ids,
                       .weights = weights,
                       .logits_ld = E,
                       .ids_ld = K,
                       .weights_ld = K,
                       .tokens = {T, &present},
                       .experts = E,
                       .logits_dtype = DT_F32,
                       .ids_dtype = DT_I32,
                       .top_k = K,
                       .routed_scale = 1,
                       .fault = {&record, &mirror}};
  cpu_gate(&a, T / 2, T);
  cpu_gate(&a, 0, T / 2);
  CHECK_MSG(record >> 56 == FAULT_TOKEN_COUNT && mirror == 1, "fault %d", (int)(record >> 56));
  case_end();
  group_end();
}

/* Doubles beside the midpoints of 16-bit values, nearer than a float can tell: rounded once, not twice. */
static void test_rounded_once(void)
{
  static const int32_t dtypes[] = {CUMOE_BF16, CUMOE_F16};
  rng r = {11};
  if (!group_begin("cpu: sums are rounded once")) return;
  for (int d = 0; d < 2; d++) {
    const int bits = dtypes[d] == CUMOE_BF16 ? 8 : 11, low = d ? -26 : -130, high = d ? 16 : 128;
    case_begin("%s", cumoe_dtype_name((cumoe_dtype)dtypes[d]));
    for (int i = 0; i < 4000; i++) {
      tensor got = tensor_new(dtypes[d], 1, 1);
      const int exponent = low + (int)rng_below(&r, high - low);
      const double middle = (double)(rng_below(&r, 1 << bits) * 2 + 1) / (1 << bits),
                   nudge = (int)(i % 3 - 1) * 0x1p-45;
      const double value = ldexp((i & 1 ? -1 : 1) * (middle + nudge), exponent);
      store_element(got.data, 0, dtypes[d], value);
      CHECK_MSG(tensor_get(&got, 0, 0) == round_to(value, dtypes[d]), "%a became %a", value, tensor_get(&got, 0, 0));
    }
    case_end();
  }
  group_end();
}

/* What experts are ranked by: near the formula, and the same bits whatever compiled it. */
static void test_exact_scores(void)
{
  static const char *const names[] = {"exp", "sigmoid", "sqrt softplus", "tanh"};
  static const uint32_t digests[] = {0xb82829f5, 0x2744f6df, 0xada7afc8, 0x5c1b1b8c};
  if (!group_begin("cpu: scores that rank experts")) return;
  for (int f = 0; f < 4; f++) {
    double worst = 0;
    uint32_t digest = 0;
    case_begin("%s", names[f]);
    for (int i = -43000; i <= 43000; i++) {
      const float x = (float)i / 500.f + 1e-3f;
      const double d = x, plus = fmax(d, 0) + log1p(exp(-fabs(d)));
      const float got = f == 0   ? exact_exp(x)
                        : f == 3 ? exact_tanh(x)
                                 : exact_score(f == 1 ? SCORE_SIGMOID : SCORE_SQRT_SOFTPLUS, x);
      const double want = f == 0 ? exp(d) : f == 1 ? 1 / (1 + exp(-d)) : f == 2 ? sqrt(plus) : tanh(d);
      worst = fmax(worst, fabs(got - want) / (want * want > 0 ? fabs(want) : 1));
      digest = digest * 16777619 ^ float_bits(got);
    }
    CHECK_MSG(worst < 3 * 0x1p-23, "%g of the value off", worst);
    CHECK_MSG(digest == digests[f], "bits changed: %#x", digest);
    case_end();
  }
  case_begin("ends");
  CHECK(exact_exp(-INFINITY) == 0 && exact_exp(INFINITY) == INFINITY && exact_exp(0) == 1 &&
        exact_exp(88.7f) < INFINITY);
  CHECK(exact_tanh(INFINITY) == 1 && exact_tanh(-3e38f) == -1 && exact_tanh(0) == 0);
  CHECK(exact_score(SCORE_SIGMOID, -INFINITY) == 0 && exact_score(SCORE_SQRT_SOFTPLUS, -INFINITY) == 0);
  CHECK(exact_cap(2, -INFINITY) == -INFINITY && exact_cap(2, 3e38f) == 2 && exact_cap(0, 5) == 5);
  case_end();
  group_end();
}

/* ---- the caller's thread ---- */

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
enum { SANITIZER_STACK = 192 }; /* frames are larger */
#else
enum { SANITIZER_STACK = 0 };
#endif

typedef struct odd_caller {
  session *session;
  bool kept;
} odd_caller;

/* Rounds upwards, and reads subnormal numbers as 0 where that can be had. */
static void *call_oddly(void *argument)
{
  odd_caller *c = argument;
  fesetround(FE_UPWARD);
#if defined __SSE2__
  _mm_setcsr(_mm_getcsr() | 0x8040);
  const unsigned before = _mm_getcsr();
#endif
  CHECK_OK(session_forward(c->session));
  c->kept = fegetround() == FE_UPWARD;
#if defined __SSE2__
  c->kept &= _mm_getcsr() == before;
#endif
  return NULL;
}

/* From a thread with a small stack and another floating-point environment: the same bits, and the caller keeps it. */
static void test_odd_callers(void)
{
  const size_t stack = (48 + SANITIZER_STACK) * 1024; /* 16 KiB are the C library's */
  pthread_attr_t small;
  if (!group_begin("cpu: callers with small stacks and another rounding")) return;
  pthread_attr_init(&small);
  CHECK(pthread_attr_setstacksize(&small, stack) == 0);
  for (int threads = 1; threads <= 3; threads += 2) {
    const cumoe_context_config config = {.size = sizeof config, .cpu_threads = threads};
    cumoe_context context;
    layer_spec s = layer_spec_new(CUMOE_BF16, 40, 264, 136);
    session odd;
    odd_caller caller = {&odd, false};
    pthread_t thread;
    case_begin("%d threads", threads);
    s.desc.num_experts = 16;
    s.desc.routing = cumoe_routing_deepseek_v3(4, 4, 2, 1.5f);
    s.desc.shared_inter = 48;
    s.input = INPUT_ROUTER;
    s.shared_gate = s.select_bias = s.optional_outputs = true;
    s.form.bias = CUMOE_F32;
    s.residual = RESIDUAL_SEPARATE;
    const layer_inputs in = layer_inputs_new(&s);
    fesetround(FE_UPWARD); /* the workers do not take it over */
    CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &context));
    fesetround(FE_TONEAREST);
    const layer_outputs want = run_layer(context, &s, &in);
    session_open(&odd, context, &s, &in);
    CHECK(pthread_create(&thread, &small, call_oddly, &caller) == 0 && pthread_join(thread, NULL) == 0);
    const layer_outputs got = session_collect(&odd);
    check_outputs_same(&want, &got);
    CHECK(caller.kept);
    session_close(&odd);
    case_end();
    CHECK_OK(cumoe_context_destroy(context));
  }
  pthread_attr_destroy(&small);
  group_end();
}

typedef struct small_caller {
  cumoe_context context;
  cumoe_gate_backward_args args;
  cumoe_status status;
} small_caller;

static void *call_backward(void *argument)
{
  small_caller *c = argument;
  c->status = cumoe_gate_backward(c->context, &c->args, NULL);
  return NULL;
}

/* The deepest of all calls. */
static void test_small_stack(void)
{
  enum { TOKENS = 3, EXPERTS = 40, TOP_K = 4 };
  static float logits[TOKENS * EXPERTS], d_logits[TOKENS * EXPERTS], d_weights[TOKENS * TOP_K];
  static int32_t ids[TOKENS * TOP_K];
  pthread_attr_t small;
  pthread_t thread;
  size_t bytes = 0;
  if (!group_begin("cpu: a backward with a small stack")) return;
  case_begin("64 KiB");
  for (int i = 0; i < TOKENS * EXPERTS; i++) logits[i] = (float)(i * 7 % 11);
  for (int i = 0; i < TOKENS * TOP_K; i++) ids[i] = i, d_weights[i] = 1.f + (float)i;
  small_caller c = {.status = CUMOE_ERR_INTERNAL};
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, &(cumoe_context_config){.size = sizeof(cumoe_context_config)},
                                &c.context));
  CHECK_OK(cumoe_gate_backward_workspace(c.context, TOKENS, EXPERTS, TOP_K, &bytes));
  void *workspace = aligned_alloc(256, (bytes + 255) / 256 * 256);
  c.args = (cumoe_gate_backward_args){.size = sizeof c.args,
                                      .routing = cumoe_routing_deepseek_v3(TOP_K, 4, 2, 1.5f),
                                      .balance = .1f,
                                      .logits = cumoe_matrix(logits, CUMOE_F32, TOKENS, EXPERTS, EXPERTS),
                                      .ids = cumoe_matrix(ids, CUMOE_I32, TOKENS, TOP_K, TOP_K),
                                      .d_weights = cumoe_matrix(d_weights, CUMOE_F32, TOKENS, TOP_K, TOP_K),
                                      .d_logits = cumoe_matrix_mut(d_logits, CUMOE_F32, TOKENS, EXPERTS, EXPERTS),
                                      .workspace = cumoe_vector_mut(workspace, CUMOE_U8, (int64_t)bytes)};
  pthread_attr_init(&small);
  CHECK(pthread_attr_setstacksize(&small, (80 + SANITIZER_STACK) * 1024) == 0); /* 16 KiB are the C library's */
  CHECK(pthread_create(&thread, &small, call_backward, &c) == 0 && pthread_join(thread, NULL) == 0);
  CHECK_OK(c.status);
  CHECK(d_logits[0] != 0);
  CHECK_OK(cumoe_context_destroy(c.context));
  free(workspace);
  pthread_attr_destroy(&small);
  case_end();
  group_end();
}

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  test_count_before_data();
  test_rounded_once();
  test_exact_scores();
  test_odd_callers();
  test_small_stack();
  cumoe_context context = open_context(CUMOE_DEVICE_CPU);
  if (context) {
    run_group("router", cases_router, context);
    run_group("gate", cases_gate, context);
    run_group("map", cases_map, context);
    run_group("up", cases_up, context);
    run_group("down", cases_down, context);
    run_group("combine", cases_combine, context);
    run_group("layer", cases_layer, context);
    run_group("formats", cases_format, context);
    run_group("exact formats", cases_format_exact, context);
    run_group("wrong formats", cases_format_controls, context);
    run_group("odd formats", cases_format_odd, context);
    run_group("encode", cases_encode, context);
    run_group("scales first", cases_encode_scales, context);
    run_group("scan", cases_scan, context);
    run_group("repack", cases_repack, context);
    run_group("elementwise", cases_elementwise, context);
    run_group("softmax", cases_softmax, context);
    run_group("norm", cases_norm, context);
    close_context(context);
  }
  return test_end();
}
