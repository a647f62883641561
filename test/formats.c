/*
 * Weights as checkpoints have them, written and decoded by their producers' own code (test/data/formats/make.py): what
 * lies in memory, after cumoe_weights_repack where kernels do not read it in place, has the producers' values, and the
 * layer multiplies them.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "../bench/safetensors.h"
#include "codes.h"

static safetensors file;

static tensor part_of(const char *name, const char *part)
{
  char key[64];
  snprintf(key, sizeof key, "%s.%s", name, part);
  const file_tensor *t = safetensors_find(&file, key);
  if (!t) return (tensor){0};
  tensor part_ = tensor_new(t->dtype, t->dims > 1 ? t->shape[0] : 1, t->shape[t->dims - 1]);
  memcpy(part_.data, t->data, t->bytes);
  return part_;
}

typedef struct source {
  const char *name;
  cumoe_format format;
  int32_t major; /* 0: read in place */
  int32_t scale; /* what the file calls U8 */
  double ulps;   /* of f32, between the exact value and the producer's arithmetic */
} source;

enum { SOURCES = 23 };

static void list_sources(source *list)
{
  cumoe_format zeros = cumoe_format_int4(32, CUMOE_F16), block = cumoe_format_fp8_block(CUMOE_F32);
  zeros.zero = CUMOE_ZERO_CODES_OUT;
  zeros.offset = 0;
  block.block[0] = 16;
  block.block[1] = 64;
  cumoe_format gptq8 = cumoe_format_gptq(32, 1);
  gptq8.element = CUMOE_ELEMENT_U8;
  gptq8.offset = 128;
  gptq8.zero = CUMOE_ZERO_NONE;
  gptq8.zero_add = 0;
  const source all[SOURCES] = {
      {"ct_int4_zeros", zeros, 0, 0, 0},
      {"gptq_v1", cumoe_format_gptq(32, 1), CUMOE_IN_OUT, 0, 0},
      {"gptq_v2", cumoe_format_gptq(32, 2), CUMOE_IN_OUT, 0, 0},
      {"awq", cumoe_format_awq(32), CUMOE_IN_OUT, 0, 0},
      {"ct_int4", cumoe_format_int4(32, CUMOE_BF16), 0, 0, 0},
      {"ct_fp8_channel", cumoe_format_fp8_channel(CUMOE_F32), 0, 0, .5},
      {"ct_fp8_block", block, 0, 0, .5},
      {"ct_int8", cumoe_format_int8(CUMOE_F32), 0, 0, .5},
      {"ct_nvfp4", cumoe_format_nvfp4(CUMOE_GLOBAL_OVER), 0, 0, 2},
      {"gpt_oss", cumoe_format_mxfp4(), 0, CUMOE_E8M0, 0},
      {"ggml_q8_0", cumoe_format_ggml(CUMOE_GGML_Q8_0), CUMOE_OUT_IN, 0, 0},
      {"ggml_q4_0", cumoe_format_ggml(CUMOE_GGML_Q4_0), CUMOE_OUT_IN, 0, 0},
      {"ggml_q6_k", cumoe_format_ggml(CUMOE_GGML_Q6_K), CUMOE_OUT_IN, 0, .5},
      {"ggml_mxfp4", cumoe_format_ggml(CUMOE_GGML_MXFP4), CUMOE_OUT_IN, 0, 0},
      {"ggml_q4_1", cumoe_format_ggml(CUMOE_GGML_Q4_1), CUMOE_OUT_IN, 0, .5},
      {"ggml_q4_k", cumoe_format_ggml(CUMOE_GGML_Q4_K), CUMOE_OUT_IN, 0, 2},
      {"gptq_order", cumoe_format_gptq(32, 1), CUMOE_IN_OUT, 0, 0},
      {"all_e4m3", cumoe_format_fp8_channel(CUMOE_F32), 0, 0, 0},
      {"all_e2m1_e8m0", cumoe_format_mxfp4(), 0, CUMOE_E8M0, 0},
      {"gptq8", gptq8, CUMOE_IN_OUT, 0, 0},
      {"gptq8_order", gptq8, CUMOE_IN_OUT, 0, 0},
      {"modelopt_int4", cumoe_format_modelopt_int4(32, CUMOE_F32), CUMOE_OUT_IN, 0, 1.5},
      {"modelopt_nvfp4", cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES), 0, 0, 1},
  };
  memcpy(list, all, sizeof all);
}

/* On a device, as bind takes it; of `experts`, expert 1's codes are those of expert 0 with all bits changed. */
typedef struct placed {
  int32_t experts, out, in;
  cumoe_format format;
  cumoe_projection projection;
  host_projection host;
  tensor weights; /* of expert 0, by the producer */
} placed;

/* A stack of `experts`. */
static tensor stacked(tensor t, int32_t experts, bool change)
{
  tensor all = tensor_new(t.dtype, t.rows * experts, t.cols);
  const size_t bytes = (size_t)(t.rows * t.cols) * cumoe_dtype_bytes((cumoe_dtype)t.dtype);
  for (size_t i = 0; i < bytes * (size_t)experts; i++)
    all.data[i] = t.data[i % bytes] ^ (i >= bytes && change ? 0xff : 0);
  return all;
}

static tensor gather(cumoe_context context, cumoe_view v, int64_t stride, int32_t experts)
{
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  tensor all = tensor_new(v.dtype, v.rows * experts, v.cols);
  for (int32_t e = 0; e < experts; e++) {
    cumoe_view one = v;
    one.data = (const char *)v.data + (size_t)(e * stride) * element;
    one.owner = 0;
    const tensor got = device_get(context, one);
    memcpy(all.data + (size_t)e * (size_t)(v.rows * v.cols) * element, got.data, (size_t)(v.rows * v.cols) * element);
  }
  return all;
}

static cumoe_repack_args repack_of(cumoe_context context, const source *s, const placed *p, int32_t first,
                                   int32_t count)
{
  cumoe_repack_args a = {.size = sizeof a, .experts = count, .major = s->major, .out = p->out, .in = p->in};
  const char *parts[] = {"codes", "scale", "zero"};
  cumoe_view *views[] = {&a.codes, &a.scale, &a.zero};
  a.format = s->format;
  for (int i = 0; i < 3; i++) {
    const tensor t = part_of(s->name, parts[i]);
    if (!t.data || (i == 2 && !s->format.zero)) continue;
    tensor all = stacked(t, first + count, i == 0 && !s->format.ggml);
    const size_t skip = (size_t)(t.rows * first * t.cols) * cumoe_dtype_bytes((cumoe_dtype)t.dtype);
    const tensor some = {all.dtype, t.rows * count, t.cols, all.data + skip};
    *views[i] = device_put(context, &some, 1 + i); /* no alignment */
  }
  const tensor g_idx = part_of(s->name, "g_idx");
  if (!g_idx.data) return a;
  tensor order = tensor_new(CUMOE_I32, 1, p->in);
  CHECK_OK(cumoe_order_of_groups((const int32_t *)(const void *)g_idx.data, p->in, s->format.block[1],
                                 (int32_t *)(void *)order.data));
  a.order = device_put(context, &order, 0);
  return a;
}

static void place_repacked(cumoe_context context, const source *s, placed *p)
{
  size_t one = 0, all = 0;
  const cumoe_repack_args a = repack_of(context, s, p, 0, 1), b = repack_of(context, s, p, 1, p->experts - 1),
                          both = repack_of(context, s, p, 0, p->experts);
  CHECK_OK(cumoe_weights_repack_size(&a, &one));
  CHECK_OK(cumoe_weights_repack_size(&both, &all));
  CHECK(all == one * (size_t)p->experts);
  const cumoe_view_mut to = device_new(context, CUMOE_U8, 1, (int64_t)all, 256 - (int64_t)(all % 256)),
                       again = device_new(context, CUMOE_U8, 1, (int64_t)all, 256 - (int64_t)(all % 256));
  cumoe_view_mut part, less;
  cumoe_projection other;
  cumoe_format format;
  CHECK_OK(cumoe_view_cols_mut(to, (int64_t)one, (int64_t)(all - one), &part));
  CHECK_OK(cumoe_view_cols_mut(to, 0, (int64_t)one - 1, &less));
  CHECK_STATUS(CUMOE_ERR_WORKSPACE, cumoe_weights_repack(context, &a, less, &other, &format, NULL));
  CHECK_OK(cumoe_weights_repack(context, &a, to, &p->projection, &p->format, NULL));
  CHECK_OK(cumoe_weights_repack(context, &b, part, &other, &format, NULL));
  CHECK_OK(cumoe_weights_repack(context, &both, again, &other, &format, NULL));
  check_guards(context, "to", again);
  const cumoe_projection *first = &p->projection;
  const cumoe_view views[2][4] = {{first->data, first->scale.data, first->zero.data, first->order.data},
                                  {other.data, other.scale.data, other.zero.data, other.order.data}};
  tensor *const parts[] = {&p->host.data, &p->host.scale, &p->host.zero, &p->host.order};
  for (int i = 0; i < 4; i++) {
    const int64_t strides[] = {other.expert_stride, other.scale.expert_stride, other.zero.expert_stride,
                               other.order.expert_stride};
    if (!views[0][i].data) continue;
    *parts[i] = gather(context, views[0][i], strides[i], p->experts);
    const tensor stack = gather(context, views[1][i], strides[i], p->experts);
    check_same("one by one, and as a stack", parts[i], &stack);
  }
}

static void place_as_it_lies(cumoe_context context, const source *s, placed *p)
{
  p->format = s->format;
  p->experts = 1;
  p->host = (host_projection){.data = part_of(s->name, "codes"),
                              .scale = part_of(s->name, "scale"),
                              .zero = part_of(s->name, "zero"),
                              .global = part_of(s->name, "global")};
  if (s->scale) p->host.scale.dtype = s->scale;
  p->projection.data = device_put(context, &p->host.data, 0);
  p->projection.scale.data = device_put(context, &p->host.scale, 1);
  if (p->host.zero.data) p->projection.zero.data = device_put(context, &p->host.zero, 1);
  if (p->host.global.data) p->projection.global = device_put(context, &p->host.global, 0);
}

static placed place(cumoe_context context, const source *s)
{
  placed p = {.experts = 2, .weights = part_of(s->name, "weights")};
  p.out = (int32_t)p.weights.rows;
  p.in = (int32_t)p.weights.cols;
  if (s->major)
    place_repacked(context, s, &p);
  else
    place_as_it_lies(context, s, &p);
  p.format.rows = p.format.row_group = p.format.row_scale = 0; /* weights alone are looked at */
  return p;
}

static double *decoded(const placed *p)
{
  double *w = scratch((size_t)(p->experts * p->out * p->in), sizeof *w);
  for (int64_t row = 0; row < p->experts * p->out; row++) {
    const channel_place at = {.projection = &p->host,
                              .format = &p->format,
                              .expert = row / p->out,
                              .experts = p->experts,
                              .channel = row % p->out,
                              .outs = p->out,
                              .ins = p->in,
                              .halves = 1};
    decode_channel(&at, w + row * p->in);
  }
  return w;
}

/* Within the producer's rounding; ulps 0: bitwise. */
static bool is_value(const source *s, double w, double want, double size)
{
  if (isnan(want)) return isnan(w);
  return s->ulps > 0 ? fabs(w - want) <= s->ulps * 0x1p-23 * size : w == want;
}

/* With values a producer's difference may be smaller than what it is of. */
static void check_values(const source *s, const placed *p, const double *w)
{
  double most = 0;
  for (int64_t i = 0; i < (int64_t)p->out * p->in && p->format.zero == CUMOE_ZERO_VALUES; i++)
    most = fmax(most, fabs(w[i]));
  for (int64_t i = 0; i < (int64_t)p->out * p->in; i++) {
    const double want = tensor_get(&p->weights, 0, i);
    if (!CHECK_MSG(is_value(s, w[i], want, fmax(most, fabs(want))), "n %d k %d: %.9g, %s has %.9g", (int)(i / p->in),
                   (int)(i % p->in), w[i], s->name, want))
      return;
  }
}

static tensor one_hot(int64_t rows, int64_t cols)
{
  const tensor t = tensor_new(CUMOE_BF16, rows, cols);
  for (int64_t i = 0; i < rows; i++) tensor_set(&t, i, i % cols, 1);
  return t;
}

/* The whole layer, which alone gives activations another order; down hands h on: out's first columns are column k. */
static void check_forward(cumoe_context context, const placed *p, const double *w, const cumoe_moe_desc *desc,
                          cumoe_weights_desc d)
{
  const int64_t rows = (int64_t)p->experts * p->in;
  const tensor x = one_hot(rows, p->in);
  tensor down = tensor_new(CUMOE_BF16, rows, p->out), ids = tensor_new(CUMOE_I32, rows, 1),
         weights = tensor_new(CUMOE_F32, rows, 1);
  for (int64_t i = 0; i < rows; i++) {
    if (i % p->in < p->out) tensor_set(&down, i, i % p->in, 1);
    tensor_set(&ids, i, 0, (double)(i / p->in));
    tensor_set(&weights, i, 0, 1);
  }
  d.down.data = device_put(context, &down, 0);
  cumoe_weights bound = NULL;
  cumoe_plan plan = NULL;
  size_t bytes = 0;
  CHECK_OK(cumoe_weights_bind(context, &d, &bound));
  CHECK_OK(cumoe_plan_create(context, desc, &plan));
  CHECK_OK(cumoe_plan_workspace(plan, rows, &bytes));
  const cumoe_moe_args a = {.size = sizeof a,
                            .x = device_put(context, &x, 8),
                            .ids = device_put(context, &ids, 0),
                            .weights = device_put(context, &weights, 0),
                            .out = device_new(context, CUMOE_BF16, rows, p->in, 8),
                            .workspace = device_new(context, CUMOE_U8, 1, (int64_t)bytes, 0)};
  CHECK_OK(cumoe_moe_forward(plan, bound, &a, NULL));
  const tensor got = device_get(context, cumoe_const(a.out));
  for (int64_t i = 0; i < rows * p->out; i++) {
    const int64_t row = i / p->out, n = i % p->out;
    const double want = round_to(w[(row / p->in * p->out + n) * p->in + row % p->in], CUMOE_BF16);
    if (!CHECK_MSG(tensor_get(&got, row, n) == want, "token %d n %d: %g, must be %g", (int)row, (int)n,
                   tensor_get(&got, row, n), want))
      break;
  }
  check_guards(context, "workspace", a.workspace);
  CHECK_OK(cumoe_plan_destroy(plan));
  CHECK_OK(cumoe_weights_destroy(bound));
}

/* A token for each expert and k, a one at k: h is column k. */
static void check_layer(cumoe_context context, const placed *p, const double *w)
{
  const int32_t rows = p->experts * p->in;
  cumoe_moe_desc desc = {.size = sizeof desc, .num_experts = p->experts, .hidden = p->in, .inter = p->out};
  desc.dtype = CUMOE_BF16;
  desc.act = CUMOE_ACT_IDENTITY;
  desc.flags = CUMOE_MOE_UNGATED;
  desc.routing.top_k = 1;
  desc.up_format = p->format;
  if (on_device(context) && cumoe_moe_supports(device_of(context), &desc, NULL, 0) != CUMOE_OK) return;
  cumoe_weights_desc d = {.size = sizeof d, .experts = p->experts, .hidden = p->in, .inter = p->out};
  d.dtype = CUMOE_BF16;
  d.gate_order = CUMOE_UNGATED;
  d.up_major = d.down_major = CUMOE_OUT_IN;
  d.up_format = p->format;
  d.up = p->projection;
  if (p->format.act_order) {
    check_forward(context, p, w, &desc, d);
    return;
  }
  d.down.data = cumoe_const(device_new(context, CUMOE_BF16, p->experts * p->in, p->out, 0));
  cumoe_weights weights = NULL;
  cumoe_plan plan = NULL;
  CHECK_OK(cumoe_weights_bind(context, &d, &weights));
  CHECK_OK(cumoe_plan_create(context, &desc, &plan));
  tensor x = one_hot(rows, p->in), counts = tensor_new(CUMOE_I32, 1, p->experts),
         offsets = tensor_new(CUMOE_I32, 1, p->experts + 1), order = tensor_new(CUMOE_I32, 1, rows);
  for (int i = 0; i < rows; i++) tensor_set(&order, 0, i, i);
  for (int e = 0; e <= p->experts; e++) {
    if (e < p->experts) tensor_set(&counts, 0, e, p->in);
    tensor_set(&offsets, 0, e, e * p->in);
  }
  const tensor slots = {CUMOE_I32, rows, 1, order.data};
  const cumoe_route route = {.size = sizeof route,
                             .counts = as_mut(device_put(context, &counts, 0)),
                             .offsets = as_mut(device_put(context, &offsets, 0)),
                             .row_pair = as_mut(device_put(context, &order, 0)),
                             .slot_row = as_mut(device_put(context, &slots, 0))};
  const cumoe_view_mut h = device_new(context, CUMOE_BF16, rows, p->out, 8);
  CHECK_OK(cumoe_up(plan, weights, device_put(context, &x, 0), &route, no_view(), h, NULL));
  const tensor got = device_get(context, cumoe_const(h));
  for (int64_t i = 0; i < (int64_t)rows * p->out; i++) {
    const int64_t row = i / p->out, e = row / p->in, k = row % p->in, n = i % p->out;
    double most = 0, want = round_to(w[(e * p->out + n) * p->in + k], CUMOE_BF16);
    for (int64_t j = 0; j < p->in; j++) most += fabs(w[(e * p->out + n) * p->in + j]);
    if (!(most < 1e37)) continue; /* 0 * NaN; past f32 */
    if (!CHECK_MSG(tensor_get(&got, row, n) == want, "expert %d n %d k %d: %g, must be %g", (int)e, (int)n, (int)k,
                   tensor_get(&got, row, n), want))
      break;
  }
  CHECK_OK(cumoe_plan_destroy(plan));
  CHECK_OK(cumoe_weights_destroy(weights));
}

static void test_producers(cumoe_context context)
{
  source list[SOURCES];
  list_sources(list);
  for (int i = 0; i < SOURCES; i++) {
    case_begin("%s", list[i].name);
    if (CHECK(part_of(list[i].name, "weights").data)) {
      const placed p = place(context, &list[i]);
      const double *w = decoded(&p);
      check_values(&list[i], &p, w);
      check_layer(context, &p, w);
    }
    case_end();
  }
}

/* The same weights by four producers become the same bytes; expert 1's codes with all bits changed. */
static void test_equal(cumoe_context context)
{
  source list[SOURCES];
  list_sources(list);
  for (int i = 1; i <= 3; i++) {
    case_begin("%s is %s", list[i].name, list[0].name);
    const placed a = place(context, &list[0]), b = place(context, &list[i]);
    const tensor codes = {a.host.data.dtype, a.host.data.rows, a.host.data.cols, b.host.data.data};
    const tensor scale = {a.host.scale.dtype, a.host.scale.rows, a.host.scale.cols, b.host.scale.data};
    const tensor zero = {a.host.zero.dtype, a.host.zero.rows, a.host.zero.cols, b.host.zero.data};
    check_same("codes", &codes, &a.host.data);
    check_same("scales", &scale, &a.host.scale);
    check_same("zero points", &zero, &a.host.zero);
    const size_t bytes = (size_t)a.out * (size_t)a.in / 2, scales = (size_t)(scale.rows * scale.cols) * 2,
                 zeros = (size_t)(zero.rows * zero.cols) * 4;
    for (size_t k = 0; k < bytes; k++)
      if (!CHECK((b.host.data.data[k] ^ b.host.data.data[bytes + k]) == 0xff)) break;
    CHECK(!memcmp(b.host.scale.data, b.host.scale.data + scales, scales));
    CHECK(!memcmp(b.host.zero.data, b.host.zero.data + zeros, zeros));
    case_end();
  }
}

/* One member that a preset may have wrong; false: it means nothing to this one. */
static bool set_wrong(source *s, int which)
{
  cumoe_format *f = &s->format;
  const bool words = f->word == 4 && !f->order, eight = f->element == CUMOE_ELEMENT_U8;
  switch (which) {
  case 0: return f->zero && (f->zero_add = !f->zero_add, true); /* GPTQ's versions */
  case 1: return f->order && (f->order = 0, true);
  case 2: return f->order && (f->order = 0x73625140, true);                   /* AWQ's, upside down */
  case 3: return words && (f->order = eight ? 0x2031 : 0x75316420, true);     /* GPTQ as AWQ has it */
  case 4: return f->zero && (f->zero = f->zero_add = 0, f->offset = 8, true); /* zero points never read */
  case 5: return f->zero && (f->element = CUMOE_ELEMENT_S4, f->zero = 0, f->zero_add = 0, true);
  case 6: return f->element == CUMOE_ELEMENT_S4 && (f->element = CUMOE_ELEMENT_U4, f->offset = 8, true);
  default: return f->global && (f->global = CUMOE_GLOBAL_TIMES + CUMOE_GLOBAL_OVER - f->global, true);
  }
}
enum { WRONG_PRESETS = 8 };

/* How many of the producer's values are there. */
static int64_t values_of(const source *s, const placed *p)
{
  const double *w = decoded(p);
  int64_t same = 0;
  for (int64_t i = 0; i < (int64_t)p->out * p->in; i++) {
    const double want = tensor_get(&p->weights, 0, i);
    same += is_value(s, w[i], want, fabs(want));
  }
  return same;
}

/* Read by a preset that is not theirs, weights are not the producer's; by theirs they are. */
static void test_wrong(cumoe_context context)
{
  source list[SOURCES];
  list_sources(list);
  for (int i = 0; i < SOURCES; i++) {
    if (list[i].format.ggml || !(list[i].major || list[i].format.global)) continue;
    case_begin("wrong presets: %s", list[i].name);
    const placed right = place(context, &list[i]);
    const int64_t all = (int64_t)right.out * right.in;
    CHECK(values_of(&list[i], &right) == all);
    for (int which = 0; which < WRONG_PRESETS; which++) {
      source wrong = list[i];
      if (!set_wrong(&wrong, which)) continue;
      const placed p = place(context, &wrong);
      const int64_t same = values_of(&wrong, &p);
      CHECK_MSG(same < all / 2, "wrong preset %d: %d of %d values are the same", which, (int)same, (int)all);
    }
    case_end();
  }
}

/* One matrix. */
static placed repacked(cumoe_context context, const cumoe_repack_args *a)
{
  placed p = {.experts = 1, .out = a->out, .in = a->in};
  size_t bytes = 0;
  CHECK_OK(cumoe_weights_repack_size(a, &bytes));
  const cumoe_view_mut to = device_new(context, CUMOE_U8, 1, (int64_t)bytes, 256 - (int64_t)(bytes % 256));
  CHECK_OK(cumoe_weights_repack(context, a, to, &p.projection, &p.format, NULL));
  p.host.data = gather(context, p.projection.data, 0, 1);
  p.host.scale = gather(context, p.projection.scale.data, 0, 1);
  return p;
}

/* Signed codes, two channels a byte, all of them: ModelOpt's file above has no -8. By the words of the manual. */
static void test_modelopt(cumoe_context context)
{
  enum { OUT = 16, IN = 64 };
  case_begin("modelopt int4");
  rng r = {5};
  tensor codes = tensor_new(CUMOE_U8, OUT / 2, IN), scale = tensor_normal(&r, CUMOE_F32, OUT, 2, 1, .1);
  for (int i = 0; i < OUT / 2 * IN; i++) codes.data[i] = (uint8_t)rng_below(&r, 256);
  cumoe_repack_args a = {.size = sizeof a, .experts = 1, .major = CUMOE_OUT_IN, .out = OUT, .in = IN};
  a.format = cumoe_format_modelopt_int4(32, CUMOE_F32);
  a.codes = device_put(context, &codes, 3);
  a.scale = device_put(context, &scale, 0);
  const placed p = repacked(context, &a);
  const double *w = decoded(&p);
  for (int n = 0; n < OUT; n++)
    for (int k = 0; k < IN; k++) {
      const int nibble = codes.data[n / 2 * IN + k] >> n % 2 * 4 & 15, value = nibble < 8 ? nibble : nibble - 16;
      CHECK(w[n * IN + k] == value * tensor_get(&scale, n, k / 32));
    }
  case_end();
}

/* 8 bits: four codes a word along in, symmetric; in order, and in another one, which no producer has; also channels of
 * a larger matrix, whose scales begin ahead of theirs. */
static void run_gptq8(cumoe_context context, uint32_t order, int32_t origin)
{
  enum { OUT = 16, IN = 64 };
  case_begin("gptq, 8 bits, order 0x%x, from channel %d on", order, (int)origin);
  rng r = {6};
  tensor codes = tensor_new(CUMOE_I32, IN / 4, OUT), scale = tensor_normal(&r, CUMOE_F16, 2, OUT + origin, 1, .1);
  for (int i = 0; i < OUT * IN; i++) codes.data[i] = (uint8_t)rng_below(&r, 256);
  cumoe_repack_args a = {.size = sizeof a, .experts = 1, .major = CUMOE_IN_OUT, .out = OUT, .in = IN};
  a.format = cumoe_format_gptq(32, 2);
  a.format.element = CUMOE_ELEMENT_U8;
  a.format.offset = 128;
  a.format.order = order;
  a.format.origin[0] = origin;
  a.format.zero = CUMOE_ZERO_NONE;
  a.codes = device_put(context, &codes, 3);
  a.scale = device_put(context, &scale, 1);
  const placed p = repacked(context, &a);
  const double *w = decoded(&p);
  for (int n = 0; n < OUT; n++)
    for (int i = 0; i < IN; i++) { /* byte i % 4 of a word holds the code that the order's digit says */
      const int k = order ? i / 4 * 4 + (int)(order >> i % 4 * 4 & 15) : i;
      CHECK(w[n * IN + k] ==
            (codes.data[(i / 4 * OUT + n) * 4 + i % 4] - 128) * tensor_get(&scale, k / 32, origin + n));
    }
  check_layer(context, &p, w);
  case_end();
}

/* What the manual says of qzeros, which are not read: 127 in a file of version 1. */
static void check_zeros_of_gptq8(const char *name)
{
  case_begin("%s: zero points", name);
  const tensor zeros = part_of(name, "zero");
  CHECK(zeros.data);
  for (int64_t i = 0; i < zeros.rows * zeros.cols * 4; i++)
    if (!CHECK(zeros.data[i] == 127)) break;
  case_end();
}

static void test_gptq8(cumoe_context context)
{
  check_zeros_of_gptq8("gptq8");
  check_zeros_of_gptq8("gptq8_order");
  run_gptq8(context, 0, 0);
  run_gptq8(context, 0x2031, 0);
  run_gptq8(context, 0, 20);
}

static void test_refusals(cumoe_context context)
{
  case_begin("repack");
  source list[SOURCES];
  list_sources(list);
  placed p = {.experts = 1, .out = 32, .in = 128};
  const cumoe_repack_args good = repack_of(context, &list[3], &p, 0, 1),
                          blocks = repack_of(context, &list[10], &p, 0, 1);
  size_t bytes = 0;
  CHECK_OK(cumoe_weights_repack_size(&good, &bytes));
  const cumoe_view_mut to = device_new(context, CUMOE_U8, 1, (int64_t)bytes, 256 - (int64_t)(bytes % 256));
  const cumoe_view order = cumoe_const(device_new(context, CUMOE_I32, 1, p.in, 0));
  cumoe_projection projection;
  cumoe_format format;
#define REFUSED(status, words, from, change)                                                                           \
  do {                                                                                                                 \
    cumoe_repack_args a = from;                                                                                        \
    change;                                                                                                            \
    CHECK_STATUS(status, cumoe_weights_repack(context, &a, to, &projection, &format, NULL));                           \
    CHECK_TEXT(words);                                                                                                 \
  } while (0)
  REFUSED(CUMOE_ERR_NOT_SUPPORTED, "read in place", good,
          (a.major = CUMOE_OUT_IN, a.format.packed = 0, a.format.order = 0));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "order", good, a.format.order = 0x75316422);
  REFUSED(CUMOE_ERR_NOT_SUPPORTED, "words need 8 codes", good, (a.format.word = 1, a.format.order = 0x01));
  REFUSED(CUMOE_ERR_NOT_SUPPORTED, "split", good, a.format.split = 16);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "args.zero is absent", good, a.zero = no_view());
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "args.codes.rows", good, a.codes.rows--);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "multiple of 8", good, a.out = 36);
  REFUSED(CUMOE_ERR_LAYOUT, "args.major", good, a.major = 0);
  REFUSED(CUMOE_ERR_NOT_SUPPORTED, "other sizes", blocks, a.format.ggml = 13);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "multiple of 256", blocks, a.format.ggml = CUMOE_GGML_Q4_K);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "GGUF has none", blocks, a.order = order);
  REFUSED(CUMOE_ERR_WRONG_DTYPE, "args.order", good, (a.order = order, a.order.dtype = CUMOE_F32));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "args.order.cols", good, (a.order = order, a.order.cols--));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "args.order.rows", good, (a.order = order, a.order.rows = 2));
  REFUSED(CUMOE_ERR_NOT_SUPPORTED, "begin with the order", good, (a.order = order, a.format.origin[1] = 32));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "args.order says it", good, a.format.act_order = 1);
  REFUSED(CUMOE_ERR_NOT_SUPPORTED, "ZERO_VALUES are read in place", good,
          (a.format.zero = CUMOE_ZERO_VALUES, a.format.zero_add = 0));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "all else", blocks, a.format.block[1] = 32);
  REFUSED(CUMOE_ERR_LAYOUT, "GGUF", blocks, a.major = CUMOE_IN_OUT);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "inside", blocks, a.scale = good.scale);
#undef REFUSED
  case_end();
}

/* The order of groups: a stable sort; what is none is refused. */
static void test_order(void)
{
  enum { IN = 96, GROUP = 32 };
  int32_t g_idx[IN], order[IN], seen[IN] = {0};
  case_begin("order of groups");
  for (int32_t k = 0; k < IN; k++) g_idx[k] = k * 7 % IN / GROUP;
  CHECK_OK(cumoe_order_of_groups(g_idx, IN, GROUP, order));
  for (int32_t k = 0; k < IN; k++) {
    CHECK(g_idx[order[k]] == k / GROUP && !seen[order[k]]++);
    CHECK(k % GROUP == 0 || order[k - 1] < order[k]);
  }
  g_idx[5] = IN / GROUP;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_order_of_groups(g_idx, IN, GROUP, order));
  CHECK_TEXT("g_idx[5] is 3, must be 0 .. 2");
  g_idx[5] = (g_idx[6] + 1) % 3;
  for (int32_t k = 0; k < IN; k++) g_idx[k] = k == 0;
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_order_of_groups(g_idx, IN, GROUP, order));
  CHECK_TEXT("g_idx has group 0 95 times, must have it 32 times");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_order_of_groups(g_idx, IN, GROUP, g_idx + 1));
  CHECK_TEXT("order overlaps g_idx");
  CHECK(g_idx[0] == 1 && g_idx[1] == 0);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_order_of_groups(g_idx, IN, 36, order));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_order_of_groups(NULL, IN, GROUP, order));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_order_of_groups(g_idx, IN, GROUP, NULL));
  case_end();
}

int main(int argc, char **argv)
{
  char error[256] = "";
  static const test_group groups[] = {GROUP("producers", test_producers, ANYWHERE),
                                      GROUP("equal", test_equal, ANYWHERE),
                                      GROUP("wrong", test_wrong, ANYWHERE),
                                      GROUP("modelopt", test_modelopt, ANYWHERE),
                                      GROUP("gptq8", test_gptq8, ANYWHERE),
                                      GROUP("refusals", test_refusals, ON_CPU),
                                      ALONE("order", test_order, ONCE)};
  if (!safetensors_open("test/data/formats/formats.safetensors", &file, error, sizeof error)) {
    printf("%s\n0 passed, 1 failed, 0 skipped\n", error);
    return 1;
  }
  const int status = test_main(argc, argv, groups, sizeof groups / sizeof groups[0]);
  safetensors_close(&file);
  return status;
}
