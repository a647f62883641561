#include "cases_codes.h"
#include "cases.h"
#include "cases_format.h"

#include <math.h>

/* Runs on a context; results in `to`. */
enum { RESULTS = 4 };
typedef cumoe_status work(cumoe_context context, const void *what, tensor *to);

static void compare(cumoe_context context, work *run, const void *what, const char *call)
{
  tensor want[RESULTS] = {0}, got[RESULTS] = {0};
  cumoe_context cpu = NULL;
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &cpu));
  CHECK_OK(run(cpu, what, want));
  if (case_served(context, run(context, what, got), call)) {
    for (int i = 0; i < RESULTS; i++)
      if (want[i].data) check_same("result", &got[i], &want[i]);
    case_end();
  }
  case_begin("close");
  CHECK_OK(cumoe_context_destroy(cpu));
  case_end();
}

static void take(cumoe_context context, cumoe_view_mut v, tensor *to)
{
  check_guards(context, "output", v);
  *to = device_get(context, cumoe_const(v));
}

/* ---- encode ---- */

enum { EXPERTS = 3, OUT = 80, IN = 160 };

typedef struct encode_case {
  cumoe_format format;
  int32_t dtype;
} encode_case;

static cumoe_status encode(cumoe_context context, const void *what, tensor *to)
{
  const encode_case *c = what;
  rng r = {(uint64_t)c->format.element};
  const tensor weights = tensor_normal(&r, c->dtype, EXPERTS * OUT, IN, 0, 1);
  cumoe_quantize_args q = {.size = sizeof q, .experts = EXPERTS, .format = c->format};
  q.weights = device_put(context, &weights, 16);
  CHECK_OK(cumoe_quantize_shapes(&q));
  cumoe_view_mut *views[RESULTS] = {&q.codes, &q.scale, &q.zero, &q.global};
  for (int i = 0; i < RESULTS; i++)
    if (views[i]->rows)
      *views[i] = device_new(context, views[i]->dtype, views[i]->rows, views[i]->cols, i == 0 ? 16 : 3);
  const cumoe_status status = cumoe_quantize_weights(context, &q, NULL);
  for (int i = 0; i < RESULTS && status == CUMOE_OK; i++)
    if (views[i]->rows) take(context, *views[i], &to[i]);
  return status;
}

static void encode_cases(cumoe_context context, const cumoe_format *formats, int count)
{
  for (int i = 0; i < count; i++)
    for (int type = 0; type < 3; type++) {
      const encode_case c = {formats[i], case_dtypes[type]};
      if (!case_wanted(c.dtype)) continue;
      case_begin("encode element %d from %s", (int)c.format.element, cumoe_dtype_name((cumoe_dtype)c.dtype));
      compare(context, encode, &c, "cumoe_quantize_weights");
    }
}

void cases_encode(cumoe_context context)
{
  cumoe_format formats[] = {cumoe_format_fp8_block(CUMOE_F32), cumoe_format_int8(CUMOE_BF16), cumoe_format_mxfp4(),
                            cumoe_format_nvfp4(CUMOE_GLOBAL_OVER), cumoe_format_int4(32, CUMOE_F16)};
  formats[4].zero = CUMOE_ZERO_CODES_OUT;
  encode_cases(context, formats, 5);
}

void cases_encode_scales(cumoe_context context)
{
  const cumoe_format formats[] = {cumoe_format_fp8_tensor(CUMOE_ROWS_TOKEN), cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES)};
  encode_cases(context, formats, 2);
}

/* ---- scan ---- */

/* A scale that is NaN, or a weight, is found by both. */
static cumoe_status scan(cumoe_context context, const void *what, tensor *to)
{
  const encode_case *c = what;
  rng r = {5};
  layer_spec s = layer_spec_new(c->dtype, 1, 96, 160);
  s.form.up = s.form.down = c->format;
  s.form.gate_order = CUMOE_GATE_UP_CONCAT;
  host_weights w = random_weights(&r, &s.desc, EXPERTS, s.desc.inter, s.form);
  tensor *odd = format_is_dense(&c->format) ? &w.down.data : &w.down.scale;
  if (cumoe_dtype_bytes((cumoe_dtype)odd->dtype) > 1) tensor_set(odd, odd->rows / 2, 0, (double)NAN);
  const cumoe_weights weights = weights_put(context, &w, s.form);
  const cumoe_view_mut report = device_new(context, CUMOE_I64, EXPERTS, CUMOE_SCAN_FIELDS, 3);
  const cumoe_status status = cumoe_weights_scan(context, weights, report, NULL);
  if (status == CUMOE_OK) take(context, report, to);
  CHECK_OK(cumoe_weights_destroy(weights));
  return status;
}

void cases_scan(cumoe_context context)
{
  cumoe_format f = {0};
  for (int i = -1; i < 0 || format_name(i, &f); i++) {
    const encode_case c = {f, i % 2 ? CUMOE_BF16 : CUMOE_F16};
    if (c.format.joined) continue;
    case_begin("scan format %d", i);
    compare(context, scan, &c, "cumoe_weights_scan");
  }
}

/* ---- repack ---- */

typedef struct repack_case {
  const char *name;
  cumoe_format format;
  int32_t major, dtype;
  int64_t rows, cols; /* of an expert's codes */
} repack_case;

enum { REPACK_OUT = 48, REPACK_IN = 256 };

/* Bytes that are no NaN wherever a scale of 16 bits lies. */
static tensor random_bytes(rng *r, int32_t dtype, int64_t rows, int64_t cols)
{
  const tensor t = tensor_new(dtype, rows, cols);
  for (int64_t i = 0; i < rows * cols * (int64_t)cumoe_dtype_bytes((cumoe_dtype)dtype); i++)
    t.data[i] = (unsigned char)rng_below(r, 256) & 0xfb;
  return t;
}

static cumoe_status repack(cumoe_context context, const void *what, tensor *to)
{
  const repack_case *c = what;
  const bool ggml = c->format.ggml != 0, in_out = c->major == CUMOE_IN_OUT;
  const int64_t groups = REPACK_IN / 32;
  rng r = {9};
  const tensor codes = random_bytes(&r, c->dtype, EXPERTS * c->rows, c->cols),
               scale = tensor_normal(&r, CUMOE_F16, EXPERTS * (in_out ? groups : REPACK_OUT),
                                     in_out ? REPACK_OUT : groups, 0, 1),
               zero = random_bytes(&r, CUMOE_I32, EXPERTS * groups, REPACK_OUT / 8);
  cumoe_repack_args a = {.size = sizeof a, .experts = EXPERTS, .major = c->major, .out = REPACK_OUT, .in = REPACK_IN};
  a.format = c->format;
  a.codes = device_put(context, &codes, 3);
  if (!ggml) a.scale = device_put(context, &scale, 1);
  if (c->format.zero) a.zero = device_put(context, &zero, 1);
  size_t bytes = 0;
  cumoe_projection projection;
  cumoe_format format;
  CHECK_OK(cumoe_weights_repack_size(&a, &bytes));
  const cumoe_view_mut room = device_new(context, CUMOE_U8, 1, (int64_t)bytes, (int64_t)(-bytes % 256));
  const cumoe_status status = cumoe_weights_repack(context, &a, room, &projection, &format, NULL);
  if (status == CUMOE_OK) take(context, room, to);
  return status;
}

void cases_repack(cumoe_context context)
{
  enum { O = REPACK_OUT, I = REPACK_IN };
  const repack_case all[] = {
      {"GPTQ", cumoe_format_gptq(32, 1), CUMOE_IN_OUT, CUMOE_I32, I / 8, O},
      {"AWQ", cumoe_format_awq(32), CUMOE_IN_OUT, CUMOE_I32, I, O / 8},
      {"ModelOpt", cumoe_format_modelopt_int4(32, CUMOE_F16), CUMOE_OUT_IN, CUMOE_U8, O / 2, I},
      {"Q8_0", cumoe_format_ggml(CUMOE_GGML_Q8_0), CUMOE_OUT_IN, CUMOE_U8, O, I / 32 * 34},
      {"Q4_0", cumoe_format_ggml(CUMOE_GGML_Q4_0), CUMOE_OUT_IN, CUMOE_U8, O, I / 32 * 18},
      {"MXFP4", cumoe_format_ggml(CUMOE_GGML_MXFP4), CUMOE_OUT_IN, CUMOE_U8, O, I / 32 * 17},
      {"Q4_K", cumoe_format_ggml(CUMOE_GGML_Q4_K), CUMOE_OUT_IN, CUMOE_U8, O, I / 256 * 144},
      {"Q6_K", cumoe_format_ggml(CUMOE_GGML_Q6_K), CUMOE_OUT_IN, CUMOE_U8, O, I / 256 * 210},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    case_begin("repack %s", all[i].name);
    compare(context, repack, &all[i], "cumoe_weights_repack");
  }
}
