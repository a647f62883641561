/*
 * Real blocks of five architectures, computed elsewhere in float64: logits, routing and the whole block's
 * output, on every device, in f32 (weights widened) and in bf16 (weights as they lie in the file). And the
 * reader of the files: damaged ones are refused.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "block.h"
#include "session.h"

#define FOLDER "test/data/golden"

/* A block as a layer: what session.c runs. */
typedef struct setup {
  const block *b;
  cumoe_context context;
  layer_spec spec;
  layer_inputs in;
} setup;

/* The file's tensor as a packed [rows, cols] matrix; bf16 keeps the file's bytes. Absent stays absent. */
static tensor packed(const file_tensor *t, int32_t dtype, int64_t rows, int64_t cols)
{
  if (!t) return (tensor){0};
  tensor out = tensor_new(dtype, rows, cols);
  if (!CHECK(t->count == rows * cols)) return out;
  if (dtype == CUMOE_BF16 && CHECK(t->dtype == CUMOE_BF16))
    memcpy(out.data, t->data, t->bytes);
  else
    CHECK(file_floats(t, 0, t->count, (float *)(void *)out.data));
  return out;
}

/* A stack of matrices, one an expert, in the file's own layout. */
static host_projection take(const file_tensor *t, const file_tensor *bias, int32_t dtype, int64_t experts)
{
  if (!t) return (host_projection){0};
  const int64_t cols = t->shape[t->dims - 1];
  return (host_projection){.data = packed(t, dtype, t->count / cols, cols),
                           .bias = packed(bias, dtype, experts, bias ? bias->count / experts : 0)};
}

static setup set_up(const block *b, cumoe_context context, cumoe_dtype dtype)
{
  const cumoe_moe_desc *d = &b->desc;
  setup s = {.b = b, .context = context, .spec = layer_spec_new(dtype, b->tokens, d->hidden, d->inter)};
  s.spec.desc = *d;
  s.spec.desc.dtype = dtype;
  s.spec.input = INPUT_ROUTER;
  s.spec.optional_outputs = true;
  s.spec.pad = 1;
  host_weights routed = {.experts = d->num_experts,
                         .hidden = d->hidden,
                         .inter = d->inter,
                         .dtype = dtype,
                         .gate_order = b->gate_order,
                         .up_major = b->major,
                         .down_major = b->major},
               shared = routed;
  routed.gate_up = take(b->gate_up, b->gate_up_bias, dtype, d->num_experts);
  routed.down = take(b->down, b->down_bias, dtype, d->num_experts);
  oracle_prepare(&routed);
  shared.experts = 1;
  shared.inter = d->shared_inter;
  shared.gate_order = CUMOE_GATE_UP_SEPARATE;
  shared.up_major = shared.down_major = CUMOE_OUT_IN;
  shared.gate = take(b->shared_gate, NULL, dtype, 1);
  shared.up = take(b->shared_up, NULL, dtype, 1);
  shared.down = take(b->shared_down, NULL, dtype, 1);
  if (d->shared_inter) oracle_prepare(&shared);
  s.in = (layer_inputs){.routed = routed,
                        .shared = shared,
                        .x = packed(b->input, dtype, b->tokens, d->hidden),
                        .router_weight = packed(b->router, dtype, d->num_experts, d->hidden),
                        .router_bias = packed(b->router_bias, dtype, 1, d->num_experts),
                        .select_bias = packed(b->select_bias, CUMOE_F32, 1, d->num_experts)};
  return s;
}

static double file_value(const file_tensor *t, int64_t row, int64_t col)
{
  float value = NAN;
  CHECK(file_floats(t, row * t->shape[1] + col, 1, &value));
  return (double)value;
}

static int32_t file_id(const file_tensor *t, int64_t row, int64_t col)
{
  int32_t id;
  memcpy(&id, t->data + (row * t->shape[1] + col) * (int64_t)sizeof id, sizeof id);
  return id;
}

/* Where the file's token has the id; -1: it does not. */
static int32_t file_slot(const block *b, int64_t token, int32_t id)
{
  for (int32_t j = 0; j < b->desc.routing.top_k; j++)
    if (file_id(b->ids, token, j) == id) return j;
  return -1;
}

/* The file's routing of a token, in its own order. One expert a token has neither ids nor weights: its id is
 * that of the largest logit, its weight the sigmoid of it. */
static void file_route(const block *b, int64_t token, int32_t *ids, double *weights)
{
  int32_t k = b->desc.routing.top_k;
  for (int32_t j = 0; b->ids && j < k; j++) {
    ids[j] = file_id(b->ids, token, j);
    weights[j] = file_value(b->weights, token, j);
  }
  if (b->ids || !CHECK(k == 1)) return;
  ids[0] = 0;
  for (int32_t e = 1; e < b->desc.num_experts; e++)
    if (file_value(b->logits, token, e) > file_value(b->logits, token, ids[0])) ids[0] = e;
  weights[0] = 1 / (1 + exp(-file_value(b->logits, token, ids[0])));
}

static const double file_roundoff = 0x1p-24; /* the file's numbers are f32 */

static void check_logits(const setup *s, const cumoe_moe_args *args)
{
  int64_t e = s->spec.desc.num_experts;
  cumoe_view_mut out = device_new(s->context, CUMOE_F32, s->b->tokens, e, 3);
  bounded *want = scratch((size_t)e, sizeof *want);
  CHECK_OK(cumoe_router(s->context, args->x, args->router_weight, args->router_bias, out, NULL));
  tensor got = device_get(s->context, cumoe_const(out));
  check_guards(s->context, "logits", out);
  for (int64_t t = 0; t < s->b->tokens; t++) {
    oracle_router(&s->in.x, t, &s->in.router_weight, &s->in.router_bias, want);
    check_bounded_row("logits, oracle", &got, t, want);
    for (int64_t i = 0; i < e; i++) {
      want[i].value = file_value(s->b->logits, t, i);
      want[i].bound += file_roundoff * fabs(want[i].value);
    }
    check_bounded_row("logits, file", &got, t, want);
  }
}

static void check_token_routing(const setup *s, int64_t token, const tensor *ids, const tensor *weights,
                                const layer_result *want)
{
  int32_t k = s->spec.desc.routing.top_k, file_ids[CUMOE_MAX_TOP_K];
  double file_weights[CUMOE_MAX_TOP_K];
  bounded expected[CUMOE_MAX_TOP_K];
  file_route(s->b, token, file_ids, file_weights);
  CHECK_MSG(want->decided, "token %d: the scores do not decide the ids", (int)token);
  for (int32_t j = 0; j < k; j++) {
    int32_t id = (int32_t)tensor_get(ids, token, j), slot = s->b->ordered ? j : file_slot(s->b, token, id);
    CHECK_MSG(id == want->ids[j], "token %d slot %d: id %d, oracle %d", (int)token, (int)j, (int)id, (int)want->ids[j]);
    if (!CHECK_MSG(slot >= 0 && file_ids[slot] == id, "token %d slot %d: id %d is not the file's", (int)token, (int)j,
                   (int)id))
      return;
    expected[j] = want->weights[j];
    expected[j].value = file_weights[slot];
    expected[j].bound += 2 * file_roundoff * fabs(file_weights[slot]);
  }
  check_bounded_row("weights, oracle", weights, token, want->weights);
  check_bounded_row("weights, file", weights, token, expected);
}

/* In f32 the file's output lies within the bound of the oracle's: rounding its input to f32 moves every sum by less
 * than its own bound allows. In bf16 the oracle's numbers are rounded on the way, the file's are not. */
static void check_token_output(const setup *s, int64_t token, const tensor *out, const layer_result *want)
{
  int32_t hidden = s->spec.desc.hidden;
  bounded *file = scratch((size_t)hidden, sizeof *file);
  for (int32_t i = 0; i < hidden; i++) {
    const double value = file_value(s->b->output, token, i);
    file[i] = (bounded){value, 2 * want->out[i].bound + file_roundoff * fabs(value)};
  }
  check_bounded_row("output, oracle", out, token, want->out);
  if (s->spec.desc.dtype == CUMOE_F32) check_bounded_row("output, file", out, token, file);
}

static void check_block(const setup *s)
{
  cumoe_moe_desc desc;
  session run;
  session_open(&run, s->context, &s->spec, &s->in);
  check_logits(s, &run.args);
  CHECK_OK(session_forward(&run));
  const layer_outputs got = session_collect(&run);
  const layer_case c = layer_case_of(&s->spec, &s->in, &desc);
  for (int64_t token = 0; token < s->b->tokens; token++) {
    const layer_result want = oracle_layer(&c, token);
    check_token_routing(s, token, &got.ids, &got.weights, &want);
    check_token_output(s, token, &got.out, &want);
  }
  check_layer(&s->spec, &s->in, &got);
  check_fault(s->context, NULL, CUMOE_FAULT_NONE);
  session_close(&run);
}

static void test_block(int index, cumoe_context *contexts, int count)
{
  static const cumoe_dtype dtypes[] = {CUMOE_F32, CUMOE_BF16};
  char error[512] = "";
  block b;
  case_begin("open %d", index);
  bool good = CHECK_MSG(block_open(index, FOLDER, &b, error, sizeof error), "%s", error);
  case_end();
  for (int i = 0; good && i < 2 * count; i++) {
    cumoe_context context = contexts[i / 2];
    case_begin("%s %s %s", b.name, context_name(context), cumoe_dtype_name(dtypes[i % 2]));
    setup s = set_up(&b, context, dtypes[i % 2]);
    check_block(&s);
    case_end();
  }
  if (good) block_close(&b);
}

/* A copy without a byte to spare, so that a reader that goes too far is seen by a memory checker. */
static bool parses(const void *bytes, size_t size)
{
  char error[256] = "";
  safetensors file;
  unsigned char *copy = malloc(size ? size : 1);
  if (!CHECK(copy != NULL)) return false;
  memcpy(copy, bytes, size);
  bool good = safetensors_parse(copy, size, &file, error, sizeof error);
  CHECK(good == (error[0] == 0));
  for (int32_t i = 0; i < file.count; i++) {
    const file_tensor *t = &file.tensors[i];
    CHECK_MSG(t->data >= copy && t->bytes <= size - (size_t)(t->data - copy), "%s lies outside the file", t->name);
  }
  safetensors_close(&file);
  free(copy);
  return good;
}

/* header, then 16 bytes of data */
static bool parses_header(const char *header)
{
  size_t length = strlen(header);
  unsigned char *bytes = scratch(8 + length + 16, 1);
  for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(length >> 8 * i);
  memcpy(bytes + 8, header, length);
  return parses(bytes, 8 + length + 16);
}

static const char *const good_headers[] = {
    "{}",
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}   ",
    "{\"__metadata__\":{\"k\":\"v\"},\"a\":{\"data_offsets\":[16,16],\"shape\":[0,9],\"dtype\":\"BF16\"}}",
    "{\"\\u0061\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[8,16]}}",
};

static const char *const bad_headers[] = {
    "",
    " ",
    "[]",
    "1",
    "{",
    "}",
    "{\"a\"}",
    "{\"a\":}",
    "{\"a\":1,}",
    "{} x",
    "{\"a:1}",
    "{\"a\\\":1}",
    "{'a':1}",
    "{\"a\":tru}",
    "{\"a\":01}",
    "{\"a\":1.}",
    "{\"a\":-}",
    "{\"a\":\"\\u12g4\"}",
    "{\"a\":\"\n\"}",
    "{\"a\":[1,]}",
    "{\"a\":1}",                                                                              /* no tensor */
    "{\"a\":{\"dtype\":\"F33\",\"shape\":[4],\"data_offsets\":[0,16]}}",                      /* type */
    "{\"a\":{\"shape\":[4],\"data_offsets\":[0,16]}}",                                        /* none */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,17]}}",                      /* past the end */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[16,0]}}",                      /* backwards */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[-16,0]}}",                     /* before */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,16]}}",                      /* another size */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[-4],\"data_offsets\":[0,16]}}",                     /* negative */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[4.0],\"data_offsets\":[0,16]}}",                    /* not whole */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":4,\"data_offsets\":[0,16]}}",                        /* no list */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0]}}",                         /* one offset */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16,16]}}",                   /* three */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,99999999999999999999]}}",    /* too large */
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296,4],\"data_offsets\":[0,0]}}", /* product wraps
                                                                                                 to 0 */
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}",        /* 9 dimensions */
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],"
    "\"data_offsets\":[0,1]}}", /* twice */
};

static void test_headers(void)
{
  for (size_t i = 0; i < sizeof good_headers / sizeof good_headers[0]; i++) {
    case_begin("accept %s", good_headers[i]);
    CHECK(parses_header(good_headers[i]));
    case_end();
  }
  for (size_t i = 0; i < sizeof bad_headers / sizeof bad_headers[0]; i++) {
    case_begin("refuse %s", bad_headers[i]);
    CHECK(!parses_header(bad_headers[i]));
    case_end();
  }
  case_begin("refuse 100000 brackets");
  char *deep = scratch(100001, 1);
  memset(deep, '[', 100000);
  CHECK(!parses_header(deep));
  case_end();
}

static void test_strings(void)
{
  static const char text[] = "[\"a\\u00e9\\ud83d\\ude00\\n\\\"\\/\", \"\\u0000\", \"12345678\", 12, -7, 1e3, true, "
                             "\"\\ud83d\\ude00\"]";
  char out[16], fit[9];
  json key, v = {NULL, NULL}, root = json_parse(text, sizeof text - 1);
  int64_t n = 0;
  double d = 0;
  bool truth = false;
  case_begin("JSON values");
  CHECK(json_next(root, &key, &v) && json_string(v, out, sizeof out) && !strcmp(out, "a\xc3\xa9\xf0\x9f\x98\x80\n\"/"));
  CHECK(json_next(root, &key, &v) && !json_string(v, out, sizeof out));
  CHECK(json_next(root, &key, &v) && json_string(v, fit, 9) && !json_string(v, fit, 8) && !json_int(v, &n));
  CHECK(json_next(root, &key, &v) && json_int(v, &n) && n == 12 && !json_bool(v, &truth));
  CHECK(json_next(root, &key, &v) && json_int(v, &n) && n == -7 && !json_string(v, out, sizeof out));
  CHECK(json_next(root, &key, &v) && !json_int(v, &n) && json_number(v, &d) && d == 1000);
  CHECK(json_next(root, &key, &v) && json_bool(v, &truth) && truth && !json_number(v, &d));
  CHECK(json_next(root, &key, &v) && json_string(v, out, sizeof out) && !strcmp(out, "\xf0\x9f\x98\x80"));
  CHECK(!json_next(root, &key, &v) && !json_next(v, &key, &v) && !json_find(root, "a").begin);
  case_end();
}

int main(int argc, char **argv)
{
  static const char *const names[BLOCK_COUNT] = {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4"};
  cumoe_context contexts[2];
  test_begin(argc, argv);
  if (group_begin("reader")) {
    test_headers();
    test_strings();
    group_end();
  }
  int count = open_contexts(contexts);
  for (int i = 0; i < BLOCK_COUNT; i++)
    if (group_begin("%s", names[i])) {
      test_block(i, contexts, count);
      group_end();
    }
  for (int i = 0; i < count; i++) close_context(contexts[i]);
  return test_end();
}
