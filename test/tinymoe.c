/*
 * A trained model, computed elsewhere in float64: its routing is uneven and its activations are real. Each
 * MoE layer alone against its recorded input and output, then the whole model: logits, and the text it goes
 * on with.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../bench/safetensors.h"
#include "../bench/tinylm.h"
#include "oracle.h"

#define FOLDER "test/data/tinymoe"

enum { TOKENS = 128, START = 48, CASE_TOKENS = 32 };

typedef struct subject {
  cumoe_context context;
  cumoe_dtype dtype;
  tinylm *model;
  const tinylm_config *config;
  const safetensors *stored, *expected; /* the model's weights; what they give */
} subject;

/* NULL, and a failed check, unless it has rows * cols elements. */
static const file_tensor *find(const safetensors *file, const char *name, int64_t rows, int64_t cols)
{
  const file_tensor *t = safetensors_find(file, name);
  return CHECK_MSG(t && t->count == rows * cols, "%s: missing, or of another size", name) ? t : NULL;
}

static tensor read_matrix(const safetensors *file, const char *name, int32_t dtype, int64_t rows, int64_t cols)
{
  tensor out = tensor_new(dtype, rows, cols);
  const file_tensor *t = find(file, name, rows, cols);
  for (int64_t i = 0; t && i < t->count; i++) {
    float value = 0;
    file_floats(t, i, 1, &value);
    tensor_set(&out, 0, i, (double)value);
  }
  return out;
}

static tensor read_ids(const safetensors *file, const char *name, int64_t rows, int64_t cols)
{
  tensor out = tensor_new(CUMOE_I32, rows, cols);
  const file_tensor *t = find(file, name, rows, cols);
  if (t && CHECK(t->dtype == CUMOE_I32)) memcpy(out.data, t->data, t->bytes);
  return out;
}

static tensor layer_matrix(const subject *s, int32_t layer, const char *what, int64_t cols)
{
  char name[TENSOR_NAME];
  snprintf(name, sizeof name, "layer%d.%s", (int)layer, what);
  return read_matrix(s->expected, name, CUMOE_F32, TOKENS, cols);
}

static tensor layer_ids(const subject *s, int32_t layer)
{
  char name[TENSOR_NAME];
  snprintf(name, sizeof name, "layer%d.topk_ids", (int)layer);
  return read_ids(s->expected, name, TOKENS, s->config->top_k);
}

/* All experts' matrices of one projection below one another. */
static host_projection expert_stack(const subject *s, int32_t layer, const char *part, int64_t rows, int64_t cols)
{
  char name[TENSOR_NAME];
  host_projection p = {.data = tensor_new(s->dtype, s->config->experts * rows, cols)};
  size_t bytes = (size_t)(rows * cols) * cumoe_dtype_bytes(s->dtype);
  for (int32_t e = 0; e < s->config->experts; e++) {
    snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s.weight", (int)layer, (int)e, part);
    tensor one = read_matrix(s->stored, name, s->dtype, rows, cols);
    memcpy(p.data.data + (size_t)e * bytes, one.data, bytes);
  }
  return p;
}

typedef struct layer_run {
  tensor in, ids, weights, out; /* in: as the layer sees it, in its type */
} layer_run;

static layer_run run_layer(const subject *s, int32_t layer, const tensor *in, int64_t first)
{
  int64_t h = s->config->hidden, k = s->config->top_k;
  layer_run r = {tensor_new(s->dtype, CASE_TOKENS, h), tensor_new(CUMOE_I32, CASE_TOKENS, k),
                 tensor_new(CUMOE_F32, CASE_TOKENS, k), tensor_new(CUMOE_F32, CASE_TOKENS, h)};
  const float *x = (const float *)(const void *)in->data + first * h;
  for (int64_t i = 0; i < CASE_TOKENS * h; i++) tensor_set(&r.in, 0, i, (double)x[i]);
  CHECK_MSG(tinylm_moe(s->model, layer, x, CASE_TOKENS, (float *)(void *)r.out.data, (int32_t *)(void *)r.ids.data,
                       (float *)(void *)r.weights.data),
            "%s", tinylm_error(s->model));
  return r;
}

/* Another row of the file's than the oracle's: the file's float64 input was rounded to f32 on the way. That
 * moves every product sum by less than its own bound allows, so the file's value lies within the bound of the
 * oracle's. */
static void check_file_row(const char *what, const tensor *got, int64_t row, const bounded *want, const tensor *file,
                           int64_t file_row)
{
  bounded *moved = scratch((size_t)file->cols, sizeof *moved);
  for (int64_t i = 0; i < file->cols; i++)
    moved[i] = (bounded){tensor_get(file, file_row, i), 2 * want[i].bound + 0x1p-24 * fabs(want[i].value)};
  check_bounded_row(what, got, row, moved);
}

/* In bf16 the oracle gets the rounded input, and the file's numbers are of another problem. */
static void test_layer_part(const subject *s, int32_t layer, const layer_case *base, int64_t first)
{
  const tinylm_config *c = s->config;
  layer_case lc = *base;
  tensor in = layer_matrix(s, layer, "moe_in", c->hidden), out = layer_matrix(s, layer, "moe_out", c->hidden);
  tensor weights = layer_matrix(s, layer, "topk_weights", c->top_k), ids = layer_ids(s, layer);
  layer_run r = run_layer(s, layer, &in, first);
  lc.x = &r.in;
  for (int64_t t = 0; t < CASE_TOKENS; t++) {
    layer_result want = oracle_layer(&lc, t);
    CHECK_MSG(want.decided, "token %d: the scores do not decide the ids", (int)(first + t));
    for (int32_t j = 0; j < c->top_k; j++) {
      int32_t id = (int32_t)tensor_get(&r.ids, t, j), stored = (int32_t)tensor_get(&ids, first + t, j);
      CHECK_MSG(id == want.ids[j] && (s->dtype != CUMOE_F32 || id == stored),
                "token %d slot %d: id %d, oracle %d, file %d", (int)(first + t), (int)j, (int)id, (int)want.ids[j],
                (int)stored);
    }
    check_bounded_row("weights, oracle", &r.weights, t, want.weights);
    check_bounded_row("moe_out, oracle", &r.out, t, want.out);
    if (s->dtype != CUMOE_F32) continue;
    check_file_row("weights, file", &r.weights, t, want.weights, &weights, first + t);
    check_file_row("moe_out, file", &r.out, t, want.out, &out, first + t);
  }
}

static void test_layer(const subject *s, int32_t layer)
{
  const tinylm_config *c = s->config;
  char name[TENSOR_NAME];
  snprintf(name, sizeof name, "model.layers.%d.mlp.gate.weight", (int)layer);
  cumoe_moe_desc desc = {.size = sizeof desc,
                         .num_experts = c->experts,
                         .local_experts = c->experts,
                         .hidden = c->hidden,
                         .inter = c->inter,
                         .dtype = s->dtype,
                         .out_dtype = CUMOE_F32,
                         .routing = cumoe_routing_qwen3(c->top_k)};
  for (int64_t first = 0; first < TOKENS; first += CASE_TOKENS) {
    case_begin("%s %s layer %d, tokens %d ..", context_name(s->context), cumoe_dtype_name(s->dtype), (int)layer,
               (int)first);
    host_weights w = {.experts = c->experts,
                      .hidden = c->hidden,
                      .inter = c->inter,
                      .dtype = s->dtype,
                      .gate_order = CUMOE_GATE_UP_SEPARATE,
                      .up_major = CUMOE_OUT_IN,
                      .down_major = CUMOE_OUT_IN};
    w.gate = expert_stack(s, layer, "gate_proj", c->inter, c->hidden);
    w.up = expert_stack(s, layer, "up_proj", c->inter, c->hidden);
    w.down = expert_stack(s, layer, "down_proj", c->hidden, c->inter);
    oracle_prepare(&w);
    tensor router = read_matrix(s->stored, name, s->dtype, c->experts, c->hidden);
    layer_case lc = {.desc = &desc, .weights = &w, .router_weight = &router, .out_scale = 1};
    test_layer_part(s, layer, &lc, first);
    case_end();
  }
}

typedef struct routing_watch {
  const subject *s;
  int64_t different; /* of TOKENS * top_k * layers ids */
} routing_watch;

static void watch_routing(void *user, const tinylm_seen *seen)
{
  routing_watch *w = user;
  tensor ids = layer_ids(w->s, seen->layer);
  for (int64_t i = 0; i < (int64_t)seen->count * ids.cols; i++)
    w->different += seen->ids[i] != (int32_t)tensor_get(&ids, 0, i);
}

static double largest_difference(const tensor *a, const tensor *b)
{
  double most = 0;
  for (int64_t i = 0; i < a->rows * a->cols; i++) most = fmax(most, fabs(tensor_get(a, 0, i) - tensor_get(b, 0, i)));
  return most;
}

/* Four layers of f32 rounding are around 1e-5. */
static void test_logits(const subject *s)
{
  int32_t vocab = s->config->vocab;
  case_begin("%s %s logits", context_name(s->context), cumoe_dtype_name(s->dtype));
  tensor want = read_matrix(s->expected, "logits", CUMOE_F32, TOKENS, vocab),
         got = tensor_new(CUMOE_F32, TOKENS, vocab);
  tensor prompt = read_ids(s->expected, "prompt", 1, TOKENS);
  routing_watch watch = {s, 0};
  tinylm_observe(s->model, watch_routing, &watch);
  tinylm_rewind(s->model);
  CHECK_MSG(
      tinylm_forward(s->model, (const int32_t *)(const void *)prompt.data, TOKENS, TOKENS, (float *)(void *)got.data),
      "%s", tinylm_error(s->model));
  tinylm_observe(s->model, NULL, NULL);
  double most = largest_difference(&got, &want);
  printf("# %s %s: logits differ by %.2g at most; %d of %d expert ids differ\n", context_name(s->context),
         cumoe_dtype_name(s->dtype), most, (int)watch.different, (int)(TOKENS * s->config->top_k * s->config->layers));
  if (s->dtype == CUMOE_F32) {
    CHECK_MSG(most <= 1e-4, "logits differ by %g", most);
    CHECK_MSG(watch.different == 0, "%d expert ids differ", (int)watch.different);
  }
  case_end();
}

/* The prompt at once, then one token a step. */
static bool greedy(const subject *s, int32_t *text)
{
  float *logits = scratch((size_t)s->config->vocab, sizeof *logits);
  tinylm_rewind(s->model);
  bool good = tinylm_forward(s->model, text, START, 1, logits);
  for (int32_t i = START; good && i < TOKENS; i++) {
    text[i] = tinylm_likeliest(logits, s->config->vocab);
    good = tinylm_forward(s->model, text + i, 1, 1, logits);
  }
  return CHECK_MSG(good, "%s", tinylm_error(s->model));
}

/* f32 must find the very text; in bf16 two bytes may be equally likely within rounding, so the place is only
 * told. */
static void test_greedy(const subject *s)
{
  case_begin("%s %s greedy text", context_name(s->context), cumoe_dtype_name(s->dtype));
  tensor want = read_ids(s->expected, "greedy", 1, TOKENS), got = tensor_new(CUMOE_I32, 1, TOKENS);
  memcpy(got.data, want.data, START * sizeof(int32_t));
  int32_t same = 0;
  if (greedy(s, (int32_t *)(void *)got.data))
    while (same < TOKENS && tensor_get(&got, 0, same) == tensor_get(&want, 0, same)) same++;
  if (s->dtype == CUMOE_F32)
    CHECK_MSG(same == TOKENS, "the text differs first at byte %d", (int)same);
  else if (same < TOKENS)
    printf("# %s %s: the text differs first at byte %d\n", context_name(s->context), cumoe_dtype_name(s->dtype),
           (int)same);
  else
    printf("# %s %s: the same text\n", context_name(s->context), cumoe_dtype_name(s->dtype));
  case_end();
}

/* Tokens that the device chooses are those that the host would, and with a temperature the same from one state. */
static void test_generated(const subject *s)
{
  enum { MADE = 60, AT_ONCE = 7 };
  int32_t text[TOKENS], one[MADE], drawn[2][MADE];
  uint64_t state = 1;
  case_begin("%s %s generated text", context_name(s->context), cumoe_dtype_name(s->dtype));
  tensor want = read_ids(s->expected, "greedy", 1, TOKENS);
  memcpy(text, want.data, sizeof text);
  CHECK(!tinylm_generate(s->model, s->config->context, 0, &state, one, NULL, NULL));
  CHECK(greedy(s, text));
  tinylm_rewind(s->model);
  CHECK(tinylm_forward(s->model, text, START, 0, NULL));
  for (int32_t at = 0; at < MADE;) {
    const int32_t count = MADE - at < AT_ONCE ? MADE - at : AT_ONCE;
    if (!CHECK_MSG(tinylm_generate(s->model, count, 0, &state, one + at, NULL, NULL), "%s", tinylm_error(s->model)))
      break;
    at += count;
  }
  CHECK(tinylm_position(s->model) == START + MADE);
  for (int32_t i = 0; i < MADE && s->dtype == CUMOE_F32; i++)
    CHECK_MSG(one[i] == text[START + i], "byte %d is %d, not %d", (int)i, (int)one[i], (int)text[START + i]);
  for (int i = 0; i < 2; i++) {
    state = 5;
    tinylm_rewind(s->model);
    CHECK(tinylm_forward(s->model, text, START, 0, NULL));
    CHECK(tinylm_generate(s->model, MADE, 1.5, &state, drawn[i], NULL, NULL));
  }
  CHECK(memcmp(drawn[0], drawn[1], sizeof drawn[0]) == 0 && memcmp(drawn[0], one, sizeof one) != 0);
  case_end();
}

/* Every token that was ever run went to top_k experts of each layer. */
static void test_load(const subject *s, int64_t tokens)
{
  const tinylm_config *c = s->config;
  case_begin("%s %s load", context_name(s->context), cumoe_dtype_name(s->dtype));
  int64_t *load = scratch((size_t)c->layers * (size_t)c->experts, sizeof *load);
  CHECK_MSG(tinylm_load(s->model, load), "%s", tinylm_error(s->model));
  for (int32_t layer = 0; layer < c->layers; layer++) {
    int64_t rows = 0;
    for (int32_t e = 0; e < c->experts; e++) rows += load[layer * c->experts + e];
    CHECK_MSG(rows == tokens * c->top_k, "layer %d: %d rows, not %d", (int)layer, (int)rows, (int)(tokens * c->top_k));
  }
  case_end();
}

static void test_model(cumoe_context context, cumoe_dtype dtype, const safetensors *stored, const safetensors *expected)
{
  char error[600] = "";
  if (!group_begin("%s %s", context_name(context), cumoe_dtype_name(dtype))) return;
  case_begin("load");
  subject s = {context, dtype, tinylm_create(context, FOLDER, dtype, error, sizeof error), NULL, stored, expected};
  CHECK_MSG(s.model != NULL, "%s", error);
  case_end();
  if (s.model) {
    s.config = tinylm_get_config(s.model);
    for (int32_t layer = 0; layer < s.config->layers; layer++) test_layer(&s, layer);
    test_logits(&s);
    test_greedy(&s);
    test_load(&s, 3 * TOKENS); /* each layer alone, the prompt, the text */
    test_generated(&s);
    tinylm_destroy(s.model);
  }
  group_end();
}

/* ---- quantised when it is loaded ---- */

typedef struct quantised_case {
  const char *name;
  cumoe_format format;
  int64_t bytes; /* of all experts */
  double error;  /* of the logits: root mean squares, over those of float64 */
} quantised_case;

enum { MATRICES = 4 * 16 * 3, WEIGHTS = MATRICES * 128 * 128 }; /* each 128 x 128 */

static void test_quantised(cumoe_context context, const safetensors *expected, const quantised_case *q)
{
  char error[600] = "";
  case_begin("%s %s", context_name(context), q->name);
  tensor prompt = read_ids(expected, "prompt", 1, TOKENS),
         want = read_matrix(expected, "logits", CUMOE_F32, TOKENS, 256);
  float *got = scratch(TOKENS * 256, sizeof *got);
  double wrong = 0, size = 0;
  tinylm *model = tinylm_create_quantised(context, FOLDER, CUMOE_BF16, &q->format, error, sizeof error);
  if (CHECK_MSG(model != NULL, "%s", error)) {
    const int64_t bytes = tinylm_expert_bytes(model);
    CHECK_MSG(bytes == q->bytes, "%lld bytes, not %lld", (long long)bytes, (long long)q->bytes);
    CHECK_MSG(tinylm_forward(model, (const int32_t *)(const void *)prompt.data, TOKENS, TOKENS, got), "%s",
              tinylm_error(model));
  }
  for (int64_t i = 0; i < TOKENS * 256; i++) {
    const double exact = tensor_get(&want, 0, i), difference = (double)got[i] - exact;
    wrong += difference * difference;
    size += exact * exact;
  }
  CHECK_MSG(wrong <= q->error * q->error * size, "the logits differ by %.4f, more than %.4f", sqrt(wrong / size),
            q->error);
  tinylm_destroy(model);
  case_end();
}

static void test_formats(cumoe_context context, const safetensors *expected)
{
  const cumoe_format fp8 = cumoe_format_fp8_block(CUMOE_F32);
  cumoe_format as_they_are = fp8;
  as_they_are.rows = as_they_are.row_group = 0;
  const quantised_case all[] = {
      {"fp8", fp8, WEIGHTS + 4 * MATRICES, .03},
      {"fp8, activations as they are", as_they_are, WEIGHTS + 4 * MATRICES, .03},
      {"fp8 by channel", cumoe_format_fp8_channel(CUMOE_F32), WEIGHTS + 4 * 128 * MATRICES, .04},
      {"int8", cumoe_format_int8(CUMOE_F32), WEIGHTS + 4 * 128 * MATRICES, .02},
      {"int4", cumoe_format_int4(128, CUMOE_BF16), WEIGHTS / 2 + 2 * 128 * MATRICES, .08},
      {"int4 by 32", cumoe_format_int4(32, CUMOE_BF16), WEIGHTS / 2 + 2 * 512 * MATRICES, .08},
      {"mxfp4", cumoe_format_mxfp4(), WEIGHTS / 2 + 512 * MATRICES, .08},
      {"nvfp4", cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES), WEIGHTS / 2 + (1024 + 4) * MATRICES, .08}};
  if (!group_begin("%s formats", context_name(context))) return;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_quantised(context, expected, &all[i]);
  group_end();
}

static void test_refusals(cumoe_context context)
{
  char error[600] = "";
  if (!group_begin("%s refusals", context_name(context))) return;
  case_begin("no such folder");
  CHECK(tinylm_create(context, FOLDER "/none", CUMOE_F32, error, sizeof error) == NULL);
  CHECK_MSG(strstr(error, "config.json") != NULL, "%s", error);
  case_end();
  case_begin("no floating type");
  CHECK(tinylm_create(context, FOLDER, CUMOE_I32, error, sizeof error) == NULL && strstr(error, "dtype"));
  case_end();
  case_begin("tokens");
  tinylm *model = tinylm_create(context, FOLDER, CUMOE_BF16, error, sizeof error);
  float *logits = scratch(256, sizeof *logits);
  int32_t *tokens = scratch(1024, sizeof *tokens);
  if (CHECK_MSG(model != NULL, "%s", error)) {
    CHECK(!tinylm_forward(model, tokens, 513, 0, logits) && strstr(tinylm_error(model), "513"));
    CHECK(!tinylm_forward(model, tokens, 0, 0, logits));
    tokens[0] = 256;
    CHECK(!tinylm_forward(model, tokens, 1, 1, logits) && strstr(tinylm_error(model), "256"));
    CHECK(!tinylm_moe(model, 4, logits, 1, logits, NULL, NULL));
  }
  tinylm_destroy(model);
  case_end();
  group_end();
}

int main(int argc, char **argv)
{
  char error[600] = "";
  safetensors stored, expected;
  cumoe_context contexts[2];
  test_begin(argc, argv);
  case_begin("open");
  bool good = CHECK_MSG(safetensors_open(FOLDER "/model.safetensors", &stored, error, sizeof error), "%s", error) &
              CHECK_MSG(safetensors_open(FOLDER "/expected.safetensors", &expected, error, sizeof error), "%s", error);
  case_end();
  int count = good ? open_contexts(contexts) : 0;
  for (int i = 0; i < count; i++) {
    test_refusals(contexts[i]);
    test_model(contexts[i], CUMOE_F32, &stored, &expected);
    test_model(contexts[i], CUMOE_BF16, &stored, &expected);
    test_formats(contexts[i], &expected);
    close_context(contexts[i]);
  }
  safetensors_close(&stored);
  safetensors_close(&expected);
  return test_end();
}
