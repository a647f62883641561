/*
 * cumoe/quantize.h: weights and activations into codes and scales. Codes are read back by the words of the manual alone
 * (format.h, moe.h), and each must be the nearest there is; the layer reads the same weights. The CPU device is checked
 * so; CUDA must give its bits.
 */
#include <math.h>
#include <string.h>

#include "codes.h"
#include "cuda.h"

/* ---- codes and scales ---- */

static double code_value(const cumoe_format *f, int code)
{
  const bool has_offset = f->element == CUMOE_ELEMENT_U8 || f->element == CUMOE_ELEMENT_U4;
  return element_value(f->element, (unsigned)code) - (has_offset ? f->offset : 0);
}

static bool has_four_bits(const cumoe_format *f)
{
  return format_code_bits(f) == 4;
}

/* Whether weights ever become it. */
static bool is_used(const cumoe_format *f, int code)
{
  if (f->element == CUMOE_ELEMENT_E4M3) return (code & 127) != 127;
  if (f->element == CUMOE_ELEMENT_S8) return code != 128;
  return f->element != CUMOE_ELEMENT_U8 || code != 0;
}

static double scale_at(const tensor *t, int64_t row, int64_t col)
{
  const bool coded = t->dtype == CUMOE_E8M0 || t->dtype == CUMOE_E4M3;
  return coded ? scale_value(t->dtype, t->data[row * t->cols + col]) : tensor_get(t, row, col);
}

/* ---- quantised weights ---- */

typedef struct sample {
  cumoe_format format;
  int32_t gate_order, experts, out, in;
  tensor weights, codes, scale, zero, global; /* on the host */
  cumoe_quantize_args on_device;
} sample;

static bool interleaved(const sample *s)
{
  return s->gate_order == CUMOE_GATE_UP_INTERLEAVED || s->gate_order == CUMOE_UP_GATE_INTERLEAVED;
}
static bool concatenated(const sample *s)
{
  return s->gate_order == CUMOE_GATE_UP_CONCAT || s->gate_order == CUMOE_UP_GATE_CONCAT;
}

/* 0 gate, 1 up. */
static int half_of(const sample *s, int n)
{
  const int place = interleaved(s) ? n % 2 : n / (s->out / 2);
  return s->gate_order == CUMOE_UP_GATE_CONCAT || s->gate_order == CUMOE_UP_GATE_INTERLEAVED ? 1 - place : place;
}

/* Row of an expert's scales. */
static int scale_row(const sample *s, int n)
{
  const cumoe_format *f = &s->format;
  const bool apart = concatenated(s) && !f->joined;
  const int part = apart ? n / (s->out / 2) : 0, each = s->out / (apart ? 2 : 1);
  return part * (int)format_blocks(f->block[0], f->origin[0], each) +
         (int)format_block(f->block[0], f->origin[0], n % each);
}

typedef struct scaled {
  int code, zero;
  double scale;
} scaled;

static scaled scaled_at(const sample *s, int e, int n, int k)
{
  const cumoe_format *f = &s->format;
  const int64_t row = (int64_t)e * s->out + n;
  const int64_t group = format_block(f->block[1], f->origin[1], k);
  const unsigned char *codes = s->codes.data + row * s->in / (has_four_bits(f) ? 2 : 1);
  scaled r = {has_four_bits(f) ? codes[k / 2] >> k % 2 * 4 & 15 : codes[k], 0, 0};
  r.scale = scale_at(&s->scale, e * (s->scale.rows / s->experts) + scale_row(s, n), group);
  if (f->global) {
    const double global = tensor_get(&s->global, e, s->global.cols == 2 ? half_of(s, n) : 0);
    r.scale = f->global == CUMOE_GLOBAL_OVER ? r.scale / global : r.scale * global;
  }
  if (f->zero) {
    const uint32_t word = (uint32_t)(int64_t)tensor_get(&s->zero, e * ((s->out + 7) / 8) + n / 8, group);
    r.zero = (int)(word >> n % 8 * 4 & 15) + f->zero_add;
  }
  return r;
}

static double weight_at(const sample *s, int e, int n, int k)
{
  const scaled c = scaled_at(s, e, n, k);
  return (code_value(&s->format, c.code) - c.zero) * c.scale;
}

/* Blocks of every size of weights, and some of zeros. */
static sample sample_new(cumoe_context context, rng *r, cumoe_format format, int32_t order, int32_t dtype)
{
  sample s = {.format = format, .gate_order = order, .experts = 3, .out = order ? 80 : 43, .in = 160};
  s.weights = tensor_new(dtype, s.experts * s.out, s.in);
  for (int64_t row = 0; row < s.weights.rows; row++)
    for (int k = 0; k < s.in; k++) {
      const int64_t block = row / 16 + k / 32;
      tensor_set(&s.weights, row, k, block % 7 == 3 ? 0 : rng_normal(r) * ldexp(1, (int)(block * 5 % 23) - 14));
    }
  s.on_device =
      (cumoe_quantize_args){.size = sizeof s.on_device, .experts = s.experts, .gate_order = order, .format = format};
  s.on_device.weights = device_put(context, &s.weights, 16);
  return s;
}

static void take(cumoe_context context, cumoe_view_mut v, tensor *t)
{
  if (!v.data) return;
  check_guards(context, "output", v);
  *t = device_get(context, cumoe_const(v));
}

static void quantize(cumoe_context context, sample *s, bool one_global)
{
  cumoe_quantize_args *q = &s->on_device;
  CHECK_OK(cumoe_quantize_shapes(q));
  if (one_global && q->global.cols) q->global.cols = 1;
  cumoe_view_mut *views[] = {&q->codes, &q->scale, &q->zero, &q->global};
  for (int i = 0; i < 4; i++)
    if (views[i]->rows) {
      const int pad = i ? 3 : 16 / (int)cumoe_dtype_bytes((cumoe_dtype)views[i]->dtype);
      *views[i] = device_new(context, views[i]->dtype, views[i]->rows, views[i]->cols, pad);
    }
  CHECK_OK(cumoe_quantize_weights(context, q, NULL));
  take(context, q->codes, &s->codes);
  take(context, q->scale, &s->scale);
  take(context, q->zero, &s->zero);
  take(context, q->global, &s->global);
}

/* No code is nearer, but for what the scale's own rounding and the quotient's may do. */
static void check_nearest(const sample *s)
{
  const int step = has_four_bits(&s->format) ? 1 : 5;
  for (int e = 0; e < s->experts; e++)
    for (int n = 0; n < s->out; n++)
      for (int k = n % step; k < s->in; k += step) {
        const double w = tensor_get(&s->weights, e * s->out + n, k);
        const scaled c = scaled_at(s, e, n, k);
        const double off = fabs(weight_at(s, e, n, k) - w);
        double best = INFINITY;
        for (int code = 0; code < (has_four_bits(&s->format) ? 16 : 256); code++)
          if (is_used(&s->format, code)) best = fmin(best, fabs((code_value(&s->format, code) - c.zero) * c.scale - w));
        if (!CHECK_MSG(off <= best + 1e-6 * (fabs(w) + c.scale), "e %d n %d k %d: %g is code %d, off by %g, not %g", e,
                       n, k, w, c.code, off, best))
          return;
      }
}

/* The scale that the manual's words give for the block of channel n, element k, before it is rounded. */
static double wanted_scale(const sample *s, int e, int n, int k, double *global)
{
  const cumoe_format *f = &s->format;
  double low = 0, high = 0, most = 0;
  for (int m = 0; m < s->out; m++)
    for (int i = 0; i < s->in; i++) {
      const double w = tensor_get(&s->weights, e * s->out + m, i);
      if (s->global.cols == 1 || !s->gate_order || half_of(s, m) == half_of(s, n)) most = fmax(most, fabs(w));
      if (scale_row(s, m) != scale_row(s, n)) continue;
      if (f->block[1] && (i + f->origin[1]) / f->block[1] != (k + f->origin[1]) / f->block[1]) continue;
      low = fmin(low, w);
      high = fmax(high, w);
    }
  const double amax = fmax(high, -low);
  *global = !f->global || most == 0 ? 1 : most / 2688;
  if (amax == 0) return 1;
  switch ((cumoe_element)f->element) {
  case CUMOE_ELEMENT_E4M3: return f->scale == CUMOE_E8M0 ? exp2(ceil(log2(amax / 448) - 1e-12)) : amax / 448;
  case CUMOE_ELEMENT_E2M1: return f->scale == CUMOE_E8M0 ? exp2(floor(log2(amax)) - 2) : amax / 6 / *global;
  case CUMOE_ELEMENT_U4: return f->zero ? (high - low) / 15 : amax / fmin(f->offset, 15 - f->offset);
  default: return amax / 127;
  }
}

static void check_scales(const sample *s)
{
  static const double steps[] = {
      [CUMOE_F32] = 0x1p-22, [CUMOE_F16] = 0x1p-10, [CUMOE_BF16] = 0x1p-7, [CUMOE_E4M3] = 0x1p-3, [CUMOE_E8M0] = 0};
  const cumoe_format *f = &s->format;
  for (int e = 0; e < s->experts; e++)
    for (int n = 0; n < s->out; n += 13)
      for (int k = 0; k < s->in; k += 48) {
        double global;
        const int64_t group = format_block(f->block[1], f->origin[1], k);
        const double want = wanted_scale(s, e, n, k, &global);
        const double got = scale_at(&s->scale, e * (s->scale.rows / s->experts) + scale_row(s, n), group);
        if (!CHECK_MSG(fabs(got - want) <= steps[f->scale] * want * .51 + (f->scale == CUMOE_E4M3 ? 0x1p-9 : 0x1p-14),
                       "e %d n %d k %d: scale %g, must be %g", e, n, k, got, want))
          return;
        if (!f->global) continue;
        const double has = tensor_get(&s->global, e, s->global.cols == 2 ? half_of(s, n) : 0);
        CHECK(fabs(has - (f->global == CUMOE_GLOBAL_OVER ? 1 / global : global)) <= 1e-6 * has);
      }
}

/* Scales and zero points of blocks before the slice's first one along in are another slice's. */
static void check_others(const sample *s)
{
  const cumoe_format *f = &s->format;
  const int64_t before = f->block[1] ? f->origin[1] / f->block[1] : 0;
  const tensor *both[] = {&s->scale, &s->zero};
  for (int i = 0; i < (f->zero ? 2 : 1); i++) {
    const int64_t element = (int64_t)cumoe_dtype_bytes((cumoe_dtype)both[i]->dtype), row = both[i]->cols * element;
    const uint8_t *bytes = both[i]->data;
    for (int64_t at = 0; at < both[i]->rows * row; at++)
      if (at % row < before * element && !CHECK_MSG(bytes[at] == test_poison, "byte %d is written", (int)at)) return;
  }
}

/* ---- the layer reads what was written ---- */

/* cumoe_up multiplies activations as they are. */
static cumoe_format plain_rows(cumoe_format f)
{
  f.rows = f.row_group = f.row_scale = 0;
  return f;
}

static cumoe_weights bind(cumoe_context context, const sample *s, int32_t dtype)
{
  const bool gated = s->gate_order != 0;
  const int32_t inter = gated ? s->out / 2 : s->out;
  const cumoe_quantize_args *q = &s->on_device;
  cumoe_projection p = {.data = cumoe_const(q->codes), .global = cumoe_const(q->global)};
  p.scale.data = cumoe_const(q->scale);
  p.zero.data = cumoe_const(q->zero);
  cumoe_weights_desc d = {.size = sizeof d, .experts = s->experts, .hidden = s->in, .inter = inter, .dtype = dtype};
  d.gate_order = gated ? s->gate_order : CUMOE_UNGATED;
  d.up_major = CUMOE_OUT_IN;
  d.down_major = CUMOE_OUT_IN;
  d.up_format = plain_rows(s->format);
  *(gated ? &d.gate_up : &d.up) = p;
  const tensor down = tensor_new(dtype, s->experts * s->in, inter);
  d.down.data = device_put(context, &down, 0);
  cumoe_weights weights = NULL;
  CHECK_OK(cumoe_weights_bind(context, &d, &weights));
  return weights;
}

/* One token a (expert, k), a one at k: h is gate * up of column k. */
static void check_layer(cumoe_context context, const sample *s)
{
  const int32_t experts = s->experts, in = s->in, inter = s->gate_order ? s->out / 2 : s->out, rows = experts * in;
  if (inter % 8) return;
  cumoe_moe_desc desc = {
      .size = sizeof desc, .num_experts = experts, .hidden = in, .inter = inter, .dtype = CUMOE_BF16};
  desc.act = CUMOE_ACT_IDENTITY;
  desc.flags = s->gate_order ? 0 : CUMOE_MOE_UNGATED;
  desc.routing.top_k = 1;
  desc.up_format = plain_rows(s->format);
  if (on_device(context) && cumoe_moe_supports(device_of(context), &desc, NULL, 0) != CUMOE_OK) return;
  cumoe_plan plan = NULL;
  const cumoe_weights weights = bind(context, s, CUMOE_BF16);
  CHECK_OK(cumoe_plan_create(context, &desc, &plan));
  tensor x = tensor_new(CUMOE_BF16, rows, in), counts = tensor_new(CUMOE_I32, 1, experts),
         offsets = tensor_new(CUMOE_I32, 1, experts + 1), order = tensor_new(CUMOE_I32, 1, rows);
  for (int i = 0; i < rows; i++) tensor_set(&x, i, i % in, 1), tensor_set(&order, 0, i, i);
  for (int e = 0; e <= experts; e++) {
    if (e < experts) tensor_set(&counts, 0, e, in);
    tensor_set(&offsets, 0, e, e * in);
  }
  tensor slots = {CUMOE_I32, rows, 1, order.data};
  const cumoe_route route = {.size = sizeof route,
                             .counts = as_mut(device_put(context, &counts, 0)),
                             .offsets = as_mut(device_put(context, &offsets, 0)),
                             .row_pair = as_mut(device_put(context, &order, 0)),
                             .slot_row = as_mut(device_put(context, &slots, 0))};
  const cumoe_view_mut h = device_new(context, CUMOE_BF16, rows, inter, 8);
  CHECK_OK(cumoe_up(plan, weights, device_put(context, &x, 0), &route, no_view(), h, NULL));
  const tensor got = device_get(context, cumoe_const(h));
  for (int i = 0; i < rows; i++)
    for (int n = 0; n < inter; n++) {
      const int first = interleaved(s) ? 2 * n : n, second = interleaved(s) ? 2 * n + 1 : n + inter;
      const double w = weight_at(s, i / in, first, i % in) * (s->gate_order ? weight_at(s, i / in, second, i % in) : 1);
      const double off = fabs(tensor_get(&got, i, n) - w);
      if (!CHECK_MSG(off <= 0x1p-6 * fabs(w), "e %d n %d k %d: %g, must be %g", i / in, n, i % in,
                     tensor_get(&got, i, n), w))
        i = rows, n = inter;
    }
  CHECK_OK(cumoe_plan_destroy(plan));
  CHECK_OK(cumoe_weights_destroy(weights));
}

/* ---- cases ---- */

typedef struct form {
  const char *name;
  cumoe_format format;
} form;

static cumoe_format blocked(cumoe_format f, int out, int in, int origin_out, int origin_in, bool joined)
{
  f.block[0] = out;
  f.block[1] = in;
  f.origin[0] = origin_out;
  f.origin[1] = origin_in;
  f.joined = joined;
  return f;
}

static cumoe_format with_zeros(int32_t group, cumoe_dtype scale, int32_t offset, int32_t add)
{
  cumoe_format f = cumoe_format_int4(group, scale);
  f.zero = CUMOE_ZERO_CODES_OUT;
  f.offset = offset;
  f.zero_add = add;
  return f;
}

static int forms(form *list)
{
  const cumoe_format e4m3_ = cumoe_format_fp8_block(CUMOE_F32), int8 = cumoe_format_int8(CUMOE_F32);
  cumoe_format u8 = int8, group8 = blocked(int8, 1, 32, 0, 0, false);
  u8.element = CUMOE_ELEMENT_U8;
  u8.offset = 128;
  u8.rows = group8.rows = 0;
  group8.scale = CUMOE_F16;
  const form all[] = {
      {"fp8 blocks", e4m3_},
      {"fp8 blocks of 32 x 48, origin 16, 32", blocked(e4m3_, 32, 48, 16, 32, false)},
      {"fp8 blocks e8m0", cumoe_format_fp8_block(CUMOE_E8M0)},
      {"fp8 tensor", cumoe_format_fp8_tensor(CUMOE_ROWS_TOKEN)},
      {"fp8 channel bf16", cumoe_format_fp8_channel(CUMOE_BF16)},
      {"fp8 groups of all channels", blocked(e4m3_, 0, 32, 0, 0, false)},
      {"int8", int8},
      {"int8 groups f16", group8},
      {"uint8", u8},
      {"int4 g32 bf16", cumoe_format_int4(32, CUMOE_BF16)},
      {"int4 g48, origin 16", blocked(cumoe_format_int4(48, CUMOE_F16), 1, 48, 0, 16, false)},
      {"int4 channel, offset 5", cumoe_format_int4(0, CUMOE_F32)},
      {"int4 zeros", with_zeros(32, CUMOE_BF16, 0, 0)},
      {"int4 zeros - 1", with_zeros(64, CUMOE_F16, 0, 1)},
      {"int4 zeros + 8", with_zeros(0, CUMOE_F32, 8, -8)},
      {"mxfp4", cumoe_format_mxfp4()},
      {"nvfp4 times", cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES)},
      {"nvfp4 over", cumoe_format_nvfp4(CUMOE_GLOBAL_OVER)},
      {"joined fp8 blocks of 32", blocked(e4m3_, 32, 128, 8, 0, true)},
      {"joined fp8 tensor", blocked(e4m3_, 0, 0, 0, 0, true)},
      {"fp8 blocks of 16 x 32, origin 32, 64", blocked(e4m3_, 16, 32, 32, 64, false)},
      {"fp8 groups of all channels, origin 0, 80", blocked(e4m3_, 0, 32, 0, 80, false)},
      {"int4 g32, origin 64", blocked(cumoe_format_int4(32, CUMOE_F16), 1, 32, 0, 64, false)},
  };
  memcpy(list, all, sizeof all);
  list[11].format.offset = 5;
  return sizeof all / sizeof *all;
}
enum { MOST_FORMS = 32 };

/* What a format is not for. */
static bool fits(const cumoe_format *f, int32_t order)
{
  const bool both = order == CUMOE_GATE_UP_INTERLEAVED || order == CUMOE_UP_GATE_INTERLEAVED;
  return !(f->joined && (both || !order)) && !(f->zero && both);
}

static void test_weights(cumoe_context context)
{
  static const int32_t orders[] = {0, CUMOE_GATE_UP_CONCAT, CUMOE_UP_GATE_INTERLEAVED, CUMOE_UP_GATE_CONCAT};
  form list[MOST_FORMS];
  const int count = forms(list);
  for (int i = 0; i < count; i++)
    for (int o = 0; o < 4; o++) {
      const int32_t dtype = case_dtypes[(i + o) % 3];
      rng r = {(uint64_t)(i * 4 + o)};
      if (!fits(&list[i].format, orders[o])) continue;
      case_begin("%s, order %d, %s", list[i].name, (int)orders[o], cumoe_dtype_name((cumoe_dtype)dtype));
      sample s = sample_new(context, &r, list[i].format, orders[o], dtype);
      quantize(context, &s, o == 3);
      check_nearest(&s);
      check_scales(&s);
      check_others(&s);
      check_layer(context, &s);
      case_end();
    }
}

/* Bits of the CPU device; also NaN, infinities, and weights that scales hardly reach. */
static void test_same(cumoe_context context)
{
  static const double odd[] = {NAN, INFINITY, -INFINITY, 1e-40, -3e38, 65000, 1e-7, 0};
  form list[MOST_FORMS];
  const int count = forms(list);
  cumoe_context cpu = open_context(CUMOE_DEVICE_CPU);
  for (int i = 0; cpu && i < count; i++) {
    case_begin("%s", list[i].name);
    const int32_t order = list[i].format.joined ? CUMOE_GATE_UP_CONCAT : 0;
    sample s[2];
    for (int device = 0; device < 2; device++) {
      const cumoe_context c = device ? context : cpu;
      rng r = {(uint64_t)i};
      s[device] = sample_new(c, &r, list[i].format, order, case_dtypes[i % 3]);
      for (int k = 0; k < 64; k++)
        tensor_set(&s[device].weights, rng_below(&r, s->weights.rows), rng_below(&r, s->in), odd[k % 8]);
      device_set(c, as_mut(s[device].on_device.weights), &s[device].weights);
      quantize(c, &s[device], false);
    }
    check_same("codes", &s[0].codes, &s[1].codes);
    check_same("scale", &s[0].scale, &s[1].scale);
    if (s->zero.data) check_same("zero", &s[0].zero, &s[1].zero);
    if (s->global.data) check_same("global", &s[0].global, &s[1].global);
    case_end();
  }
  if (cpu) close_context(cpu);
}

static void test_nan(cumoe_context context)
{
  form list[MOST_FORMS];
  const int count = forms(list);
  for (int i = 0; i < count; i++) {
    rng r = {7};
    if (list[i].format.joined) continue;
    case_begin("%s", list[i].name);
    sample s = sample_new(context, &r, list[i].format, 0, CUMOE_F32);
    tensor_set(&s.weights, s.out + 2, 37, NAN); /* expert 1 */
    tensor_set(&s.weights, 2 * s.out + 2, 37, INFINITY);
    device_set(context, as_mut(s.on_device.weights), &s.weights);
    quantize(context, &s, false);
    CHECK(isnan(weight_at(&s, 1, 2, 37)));
    CHECK(!isnan(weight_at(&s, 0, 2, 37)));
    CHECK(weight_at(&s, 2, 2, 37) > 1000); /* what an f16 scale holds of it */
    if (list[i].format.block[0] == 1) CHECK(!isnan(weight_at(&s, 1, 3, 37)));
    case_end();
  }
}

/* Halfway between two codes the even one; of scale 1, as the first weight is the largest code. */
static void test_ties(cumoe_context context)
{
  static const struct {
    const char *name;
    double weights[8], become[8];
  } rows[] = {{"e2m1", {6, 5, -3.5, 2.5, 1.75, 1.25, .75, -.25}, {6, 4, -4, 2, 2, 1, 1, 0}},
              {"e4m3",
               {448, 1.0625, 1.1875, 432, -.5 * 0x1p-9, 1.5 * 0x1p-9, 36, 15.5},
               {448, 1, 1.25, 448, 0, 0x1p-8, 36, 16}},
              {"u4", {-7, .5, 1.5, -.5, -1.5, 6.5, 3.5, -2.5}, {-7, 0, 2, 0, -2, 6, 4, -2}},
              {"s8", {127, .5, 1.5, -.5, -1.5, 126.5, 3.5, -2.5}, {127, 0, 2, 0, -2, 126, 4, -2}}};
  for (int i = 0; i < 4; i++) {
    sample s = {.format = i == 0   ? cumoe_format_mxfp4()
                          : i == 1 ? cumoe_format_fp8_channel(CUMOE_F32)
                          : i == 2 ? cumoe_format_int4(32, CUMOE_F16)
                                   : cumoe_format_int8(CUMOE_BF16),
                .experts = 1,
                .out = 1,
                .in = 32};
    case_begin("%s", rows[i].name);
    s.weights = tensor_new(CUMOE_F32, 1, 32);
    for (int k = 0; k < 8; k++) tensor_set(&s.weights, 0, k, rows[i].weights[k]);
    s.on_device = (cumoe_quantize_args){.size = sizeof s.on_device, .experts = 1, .format = s.format};
    s.on_device.weights = device_put(context, &s.weights, 0);
    quantize(context, &s, false);
    for (int k = 0; k < 8; k++)
      CHECK_MSG(weight_at(&s, 0, 0, k) == rows[i].become[k], "%g became %g", rows[i].weights[k],
                weight_at(&s, 0, 0, k));
    case_end();
  }
}

/* ---- activations ---- */

static int nearest_code(const cumoe_format *f, double q)
{
  int best = 0;
  for (int code = 0; code < 256; code++) {
    const double off = fabs(code_value(f, code) - q) - fabs(code_value(f, best) - q);
    if (off < 0 || (off == 0 && code % 2 == 0)) best = code; /* -0 is not told from 0 */
  }
  return best;
}

static void check_row(const cumoe_format *f, const tensor *x, const tensor *codes, const tensor *scales, float fixed,
                      int64_t row)
{
  const bool fp8 = f->element == CUMOE_ELEMENT_E4M3;
  const int origin = f->rows == CUMOE_ROWS_GROUP ? f->origin[1] % 128 : 0;
  for (int64_t g = 0; g < scales->rows; g++) {
    const int64_t begin = f->rows == CUMOE_ROWS_GROUP ? g * 128 - origin : 0,
                  end = scales->rows > 1 ? begin + 128 : x->cols;
    float most = 1e-10f, scale;
    for (int64_t k = begin < 0 ? 0 : begin; k < end && k < x->cols; k++)
      most = fmaxf(most, (float)fabs(tensor_get(x, row, k)));
    scale = f->rows == CUMOE_ROWS_STATIC ? fixed : most / (fp8 ? 448.f : 127.f);
    if (f->row_scale == CUMOE_E8M0) scale = (float)exp2(ceil(log2(scale)));
    CHECK_MSG((float)tensor_get(scales, g, row) == scale, "row %d group %d: scale %g, must be %g", (int)row, (int)g,
              tensor_get(scales, g, row), (double)scale);
    const float inverse = 1 / scale;
    for (int64_t k = begin < 0 ? 0 : begin; k < end && k < x->cols; k++) {
      const float q = (float)tensor_get(x, row, k) * inverse;
      const int code = codes->data[row * codes->cols + k], want = nearest_code(f, q);
      if (!CHECK_MSG(code_value(f, code) == code_value(f, want), "row %d k %d: code %d, must be %d", (int)row, (int)k,
                     code, want))
        return;
    }
  }
}

static void test_rows(cumoe_context context)
{
  const int32_t modes[] = {CUMOE_ROWS_GROUP, CUMOE_ROWS_TOKEN, CUMOE_ROWS_STATIC};
  for (int i = 0; i < 18; i++) {
    cumoe_format f = i % 2 ? cumoe_format_int8(CUMOE_F32) : cumoe_format_fp8_block(CUMOE_F32);
    rng r = {(uint64_t)i};
    f.rows = modes[i / 2 % 3];
    f.row_group = f.rows == CUMOE_ROWS_GROUP ? 128 : 0;
    f.origin[1] = i % 5 * 32;
    f.row_scale = i % 4 == 3 && f.rows != CUMOE_ROWS_STATIC ? CUMOE_E8M0 : 0;
    case_begin("%s, rows %d, %d", i % 2 ? "s8" : "e4m3", (int)f.rows, i);
    tensor x = tensor_normal(&r, case_dtypes[i % 3], 5, i % 4 * 128 + 48, 0, 3), fixed = tensor_new(CUMOE_F32, 1, 1);
    for (int64_t k = 0; k < x.cols; k++) tensor_set(&x, 3, k, k == 5 ? 1e-12 : 0);
    tensor_set(&fixed, 0, 0, 0.01);
    const int64_t groups = f.rows == CUMOE_ROWS_GROUP ? (f.origin[1] % 128 + x.cols + 127) / 128 : 1;
    const bool is_static = f.rows == CUMOE_ROWS_STATIC;
    const cumoe_view_mut codes = device_new(context, i % 2 ? CUMOE_I8 : CUMOE_E4M3, x.rows, x.cols, 16);
    const cumoe_view_mut scales = device_new(context, CUMOE_F32, groups, x.rows, 3);
    CHECK_OK(cumoe_quantize_rows(context, &f, device_put(context, &x, 8),
                                 is_static ? device_put(context, &fixed, 0) : no_view(), codes, scales, NULL));
    tensor c = {0}, s = {0};
    take(context, codes, &c);
    take(context, scales, &s);
    for (int64_t row = 0; row < x.rows; row++) check_row(&f, &x, &c, &s, (float)tensor_get(&fixed, 0, 0), row);
    case_end();
  }
}

/* ---- scans ---- */

/* What a fault in the codes, the scales or the zero points of `at` is called. */
typedef struct planted {
  const char *name;
  int form; /* of forms */
  enum { CODES, SCALE, ZERO, GLOBAL } where;
  double value;
  int field;
} planted;

static void check_scan(cumoe_context context, const sample *s, const planted *p)
{
  const cumoe_view_mut report = device_new(context, CUMOE_I64, s->experts, CUMOE_SCAN_FIELDS, 3);
  const cumoe_weights weights = bind(context, s, CUMOE_BF16);
  CHECK_OK(cumoe_weights_scan(context, weights, report, NULL));
  check_guards(context, "report", report);
  const tensor got = device_get(context, cumoe_const(report));
  for (int e = 0; e < s->experts; e++) {
    double most = 0;
    for (int n = 0; n < s->out; n++)
      for (int k = 0; k < s->in; k++) {
        const double w = fabs(weight_at(s, e, n, k));
        if (isfinite((float)w)) most = fmax(most, w);
      }
    const double largest =
        (double)cumoe_scan_largest(((const int64_t *)(const void *)got.data)[e * CUMOE_SCAN_FIELDS + 9]);
    CHECK_MSG(fabs(largest - most) <= 1e-6 * most, "expert %d: largest %g, must be %g", e, largest, most);
    for (int f = 0; f < CUMOE_SCAN_LARGEST; f++) {
      const bool weights_past = f == CUMOE_SCAN_PAST_F16 || f == CUMOE_SCAN_PAST_BF16;
      const double found = tensor_get(&got, e, f), want = p && e == 1 && f == p->field;
      if (p && e == 1 && weights_past && f != p->field) continue;
      CHECK_MSG(weights_past && want ? found > 0 : found == want, "expert %d field %d: %g, must be %g", e, f, found,
                want);
    }
  }
  CHECK_OK(cumoe_weights_destroy(weights));
}

static void test_scan(cumoe_context context)
{
  static const planted faults[] = {
      {"NaN code", 0, CODES, 0x7f, CUMOE_SCAN_CODES},
      {"scale NaN", 0, SCALE, NAN, CUMOE_SCAN_SCALE_NOT_FINITE},
      {"tensor's scale infinite", 3, SCALE, INFINITY, CUMOE_SCAN_SCALE_NOT_FINITE},
      {"e8m0 255", 15, SCALE, 255, CUMOE_SCAN_SCALE_NOT_FINITE},
      {"e8m0 129", 15, SCALE, 129, CUMOE_SCAN_SCALE_LARGE},
      {"e8m0 0", 15, SCALE, 0, CUMOE_SCAN_SCALE_SUBNORMAL},
      {"scale < 0", 18, SCALE, -2, CUMOE_SCAN_SCALE_NEGATIVE},
      {"scale 0", 9, SCALE, 0, CUMOE_SCAN_SCALE_ZERO},
      {"joined tensor's scale 0", 19, SCALE, 0, CUMOE_SCAN_SCALE_ZERO},
      {"f16 subnormal", 7, SCALE, 1e-6, CUMOE_SCAN_SCALE_SUBNORMAL},
      {"zero point 16", 13, ZERO, 15, CUMOE_SCAN_ZERO_POINT},
      {"global infinite", 16, GLOBAL, INFINITY, CUMOE_SCAN_SCALE_NOT_FINITE},
      {"past f16", 1, SCALE, 1e6, CUMOE_SCAN_PAST_F16},
      {"past bf16", 4, SCALE, 3e38, CUMOE_SCAN_PAST_BF16},
  };
  form list[MOST_FORMS];
  (void)forms(list);
  for (int i = -20; i < (int)(sizeof faults / sizeof *faults); i++) {
    const planted *p = i < 0 ? NULL : &faults[i];
    const form *f = &list[p ? p->form : -i - 1];
    const int32_t order = !fits(&f->format, 0)      ? CUMOE_UP_GATE_CONCAT
                          : i % 2 || f->format.zero ? CUMOE_GATE_UP_CONCAT
                                                    : CUMOE_GATE_UP_INTERLEAVED;
    rng r = {3};
    case_begin("%s, %s", f->name, p ? p->name : "good");
    sample s = sample_new(context, &r, f->format, order, CUMOE_F32);
    for (int64_t k = 0; k < s.weights.rows * s.in; k++) /* no scale of 4 */
      tensor_set(&s.weights, 0, k, tensor_get(&s.weights, 0, k) * 0x1p-9);
    device_set(context, as_mut(s.on_device.weights), &s.weights);
    quantize(context, &s, false);
    if (p) {
      tensor *t[] = {&s.codes, &s.scale, &s.zero, &s.global};
      const cumoe_view_mut v[] = {s.on_device.codes, s.on_device.scale, s.on_device.zero, s.on_device.global};
      const int64_t each = t[p->where]->rows / s.experts;
      for (int64_t k = 0; p->where == CODES && k < s.in; k++) /* no other fault of theirs */
        if (s.codes.data[each * s.in + k] % 128 == 127) s.codes.data[each * s.in + k] = 0;
      tensor_set(t[p->where], each + (p->where == SCALE && each > 1), t[p->where]->cols - 1, p->value);
      device_set(context, v[p->where], t[p->where]);
    }
    check_scan(context, &s, p);
    case_end();
  }
}

/* ---- captured ---- */

/* Into a graph that is run twice. */
static void test_capture(cumoe_context context)
{
  case_begin("quantize, scan");
  rng r = {11};
  cudaStream_t stream = NULL;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  sample s = sample_new(context, &r, cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES), CUMOE_GATE_UP_CONCAT, CUMOE_BF16);
  quantize(context, &s, false);
  const tensor codes = s.codes, global = s.global;
  const cumoe_view_mut report = device_new(context, CUMOE_I64, s.experts, CUMOE_SCAN_FIELDS, 0);
  const cumoe_weights weights = bind(context, &s, CUMOE_BF16);
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK_OK(cumoe_quantize_weights(context, &s.on_device, stream));
  CHECK_OK(cumoe_weights_scan(context, weights, report, stream));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_OK(cumoe_fill(context, s.on_device.codes, 0x77, NULL));
  CHECK_OK(cumoe_fill(context, s.on_device.global, 0x77, NULL));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 2; i++) CHECK_CUDA(cudaGraphLaunch(exec, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  take(context, s.on_device.codes, &s.codes);
  take(context, s.on_device.global, &s.global);
  check_same("codes", &s.codes, &codes);
  check_same("global", &s.global, &global);
  const tensor found = device_get(context, cumoe_const(report));
  for (int f = 0; f < CUMOE_SCAN_LARGEST; f++) CHECK(tensor_get(&found, 1, f) == 0);
  CHECK(tensor_get(&found, 1, CUMOE_SCAN_LARGEST) > 0);
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
  CHECK_OK(cumoe_weights_destroy(weights));
  case_end();
}

/* ---- refusals ---- */

static void test_refusals(cumoe_context context)
{
  case_begin("weights");
  rng r = {1};
  sample s = sample_new(context, &r, with_zeros(32, CUMOE_F32, 0, 0), 0, CUMOE_BF16);
  quantize(context, &s, false);
  const cumoe_quantize_args good = s.on_device;
#define REFUSED(status, words, change)                                                                                 \
  do {                                                                                                                 \
    cumoe_quantize_args a = good;                                                                                      \
    change;                                                                                                            \
    CHECK_STATUS(status, cumoe_quantize_weights(context, &a, NULL));                                                   \
    CHECK_TEXT(words);                                                                                                 \
  } while (0)
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "experts", a.experts = 0);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "[2 * out, in]", a.experts = 2);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "reserved", a.reserved = 1);
  REFUSED(CUMOE_ERR_LAYOUT, "gate_order", a.gate_order = 7);
  REFUSED(CUMOE_ERR_LAYOUT, "joined", a.format.joined = 1);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "dense", a.format = (cumoe_format){0});
  REFUSED(CUMOE_ERR_NOT_SUPPORTED, "block[0]", a.format.block[0] = 2);
  REFUSED(CUMOE_ERR_NOT_SUPPORTED, "offset", a.format.zero = 0);
  REFUSED(CUMOE_ERR_NOT_SUPPORTED, "offset 0 + zero_add -16, must be", a.format.zero_add = -16);
  REFUSED(CUMOE_ERR_NOT_SUPPORTED, "offset 15 + zero_add 1, must be", (a.format.offset = 15, a.format.zero_add = 1));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "args.zero is absent", a.zero = no_view_mut());
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "args.global must be absent", a.global = a.scale);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "args.scale.cols", a.scale.cols--);
  REFUSED(CUMOE_ERR_WRONG_DTYPE, "args.codes.dtype", a.codes.dtype = CUMOE_F32);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "overlaps",
          (a.scale.data = a.weights.data ? as_mut(a.weights).data : NULL, a.scale.owner = 0));
#undef REFUSED
  case_end();
  case_begin("rows");
  tensor x = tensor_new(CUMOE_BF16, 2, 32);
  const cumoe_view on = device_put(context, &x, 0);
  const cumoe_view_mut codes = device_new(context, CUMOE_E4M3, 2, 32, 0),
                       scales = device_new(context, CUMOE_F32, 1, 2, 0);
  const cumoe_format token = cumoe_format_fp8_tensor(CUMOE_ROWS_TOKEN), as_is = cumoe_format_mxfp4(),
                     fixed = cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC);
  CHECK_OK(cumoe_quantize_rows(context, &token, on, no_view(), codes, scales, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_quantize_rows(context, &as_is, on, no_view(), codes, scales, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_quantize_rows(context, &fixed, on, no_view(), codes, scales, NULL));
  CHECK_TEXT("static_scale");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_quantize_rows(context, NULL, on, no_view(), codes, scales, NULL));
  CHECK_STATUS(CUMOE_ERR_WRONG_DTYPE, cumoe_quantize_rows(context, &token, on, no_view(), as_mut(on), scales, NULL));
  case_end();
}

static const test_group groups[] = {GROUP("weights", test_weights, ANYWHERE), GROUP("nan", test_nan, ANYWHERE),
                                    GROUP("ties", test_ties, ANYWHERE),       GROUP("same bits", test_same, ON_CUDA),
                                    GROUP("rows", test_rows, ANYWHERE),       GROUP("scan", test_scan, ANYWHERE),
                                    GROUP("capture", test_capture, ON_CUDA),  GROUP("refusals", test_refusals, ON_CPU)};
TEST_MAIN(groups)
