#include "cases_format.h"
#include "cases.h"
#include "cases_layer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- formats --------------------------------------------------------------------------------------- */

#define FORMAT_CASE(name, ...)                                                                                         \
  if (which == n++) {                                                                                                  \
    (void)(__VA_ARGS__);                                                                                               \
    return name;                                                                                                       \
  }
#define AS_THEY_ARE(f)     ((f)->rows = 0, (f)->row_group = 0, (f)->row_scale = 0)
#define ORIGIN(f, out, in) ((f)->origin[0] = (out), (f)->origin[1] = (in))
#define BLOCK(f, out, in)  ((f)->block[0] = (out), (f)->block[1] = (in))

const char *format_name(int which, cumoe_format *f)
{
  int n = 0;
  FORMAT_CASE("fp8 block f32", *f = cumoe_format_fp8_block(CUMOE_F32))
  FORMAT_CASE("fp8 block bf16", *f = cumoe_format_fp8_block(CUMOE_BF16))
  FORMAT_CASE("fp8 block e8m0", *f = cumoe_format_fp8_block(CUMOE_E8M0))
  FORMAT_CASE("fp8 block f16, origin 96 32", *f = cumoe_format_fp8_block(CUMOE_F16), ORIGIN(f, 96, 32))
  FORMAT_CASE("fp8 block, joined, origin 32 64", *f = cumoe_format_fp8_block(CUMOE_F32), f->joined = 1,
              ORIGIN(f, 32, 64))
  FORMAT_CASE("fp8 block, tokens' scales", *f = cumoe_format_fp8_block(CUMOE_F32), f->rows = CUMOE_ROWS_TOKEN,
              f->row_group = 0)
  FORMAT_CASE("fp8 block 64 x 256, tokens' groups", *f = cumoe_format_fp8_block(CUMOE_F32), BLOCK(f, 64, 256))
  FORMAT_CASE("fp8 block a16", *f = cumoe_format_fp8_block(CUMOE_BF16), AS_THEY_ARE(f))
  FORMAT_CASE("fp8 block a16, origin 32 96", *f = cumoe_format_fp8_block(CUMOE_F32), AS_THEY_ARE(f), ORIGIN(f, 32, 96))
  FORMAT_CASE("fp8 block 48 x 16 a16, origin 20 48", *f = cumoe_format_fp8_block(CUMOE_F16), AS_THEY_ARE(f),
              BLOCK(f, 48, 16), ORIGIN(f, 20, 48))
  FORMAT_CASE("fp8 block e8m0 a16", *f = cumoe_format_fp8_block(CUMOE_E8M0), AS_THEY_ARE(f))
  FORMAT_CASE("fp8 tensor, static", *f = cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC))
  FORMAT_CASE("fp8 tensor, tokens' scales", *f = cumoe_format_fp8_tensor(CUMOE_ROWS_TOKEN))
  FORMAT_CASE("fp8 tensor a16", *f = cumoe_format_fp8_tensor(CUMOE_ROWS_AS_THEY_ARE))
  FORMAT_CASE("fp8 tensor a16, joined", *f = cumoe_format_fp8_tensor(CUMOE_ROWS_AS_THEY_ARE), f->joined = 1)
  FORMAT_CASE("fp8 channel", *f = cumoe_format_fp8_channel(CUMOE_BF16))
  FORMAT_CASE("fp8 channel a16", *f = cumoe_format_fp8_channel(CUMOE_F32), AS_THEY_ARE(f))
  FORMAT_CASE("int8", *f = cumoe_format_int8(CUMOE_F32))
  FORMAT_CASE("int8 bf16", *f = cumoe_format_int8(CUMOE_BF16))
  FORMAT_CASE("int8, static", *f = cumoe_format_int8(CUMOE_F32), f->rows = CUMOE_ROWS_STATIC)
  FORMAT_CASE("int8, groups", *f = cumoe_format_int8(CUMOE_F32), BLOCK(f, 1, 128), f->rows = CUMOE_ROWS_GROUP,
              f->row_group = 128)
  FORMAT_CASE("int8 a16", *f = cumoe_format_int8(CUMOE_F16), AS_THEY_ARE(f))
  FORMAT_CASE("int8 a16, groups of 32", *f = cumoe_format_int8(CUMOE_BF16), AS_THEY_ARE(f), BLOCK(f, 1, 32))
  FORMAT_CASE("u8 a16 in words", *f = cumoe_format_int8(CUMOE_F32), AS_THEY_ARE(f), f->element = CUMOE_ELEMENT_U8,
              f->offset = 128, f->word = 4)
  FORMAT_CASE("u8 a16, groups of 128, origin 64", *f = cumoe_format_int8(CUMOE_F16), AS_THEY_ARE(f),
              f->element = CUMOE_ELEMENT_U8, f->offset = 128, BLOCK(f, 1, 128), ORIGIN(f, 0, 64))
  FORMAT_CASE("int4 g 32", *f = cumoe_format_int4(32, CUMOE_BF16))
  FORMAT_CASE("int4 g 64 f16, origin 32", *f = cumoe_format_int4(64, CUMOE_F16), ORIGIN(f, 0, 32))
  FORMAT_CASE("int4 g 128", *f = cumoe_format_int4(128, CUMOE_BF16))
  FORMAT_CASE("int4 g 128 f32 in bytes, origin 96", *f = cumoe_format_int4(128, CUMOE_F32), f->word = 1,
              ORIGIN(f, 0, 96))
  FORMAT_CASE("int4 g 16 x 64 in bytes, joined", *f = cumoe_format_int4(64, CUMOE_F16), f->word = 0, f->block[0] = 16,
              f->joined = 1)
  FORMAT_CASE("int4, a scale a channel", *f = cumoe_format_int4(0, CUMOE_F16))
  FORMAT_CASE("int4 unsigned", *f = cumoe_format_int4(128, CUMOE_F16), f->offset = 0)
  FORMAT_CASE("int4 zeros g 32", *f = cumoe_format_int4(32, CUMOE_F16), f->offset = 0, f->zero = CUMOE_ZERO_CODES_OUT)
  FORMAT_CASE("int4 zeros + 1 g 128, origin 64", *f = cumoe_format_int4(128, CUMOE_F16), f->offset = 0,
              f->zero = CUMOE_ZERO_CODES_OUT, f->zero_add = 1, ORIGIN(f, 0, 64))
  FORMAT_CASE("int4 zeros a channel", *f = cumoe_format_int4(0, CUMOE_BF16), f->offset = 8,
              f->zero = CUMOE_ZERO_CODES_OUT, f->zero_add = -8)
  FORMAT_CASE("int4 values g 64", *f = cumoe_format_affine4(64, CUMOE_BF16))
  FORMAT_CASE("int4 values g 32 f32 in bytes, origin 32", *f = cumoe_format_affine4(32, CUMOE_F32), f->word = 1,
              ORIGIN(f, 0, 32))
  FORMAT_CASE("int4 values 16 x 128, offset 8, joined", *f = cumoe_format_affine4(128, CUMOE_F16), f->offset = 8,
              f->block[0] = 16, f->joined = 1)
  FORMAT_CASE("int4 values a channel", *f = cumoe_format_affine4(0, CUMOE_F16))
  FORMAT_CASE("fp8 tensor, static of experts", *f = cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC_EXPERT))
  FORMAT_CASE("int8, static of experts", *f = cumoe_format_int8(CUMOE_F32), f->rows = CUMOE_ROWS_STATIC_EXPERT)
  FORMAT_CASE("int4 g 32 in another order", *f = cumoe_format_int4(32, CUMOE_BF16), f->act_order = 1)
  FORMAT_CASE("int4 zeros g 128 in another order", *f = cumoe_format_int4(128, CUMOE_F16), f->offset = 0,
              f->zero = CUMOE_ZERO_CODES_OUT, f->act_order = 1)
  FORMAT_CASE("u8 a16 g 64 in another order", *f = cumoe_format_int8(CUMOE_F16), AS_THEY_ARE(f),
              f->element = CUMOE_ELEMENT_U8, f->offset = 128, BLOCK(f, 1, 64), f->act_order = 1)
  FORMAT_CASE("mxfp4", *f = cumoe_format_mxfp4())
  FORMAT_CASE("mxfp4, origin 96", *f = cumoe_format_mxfp4(), ORIGIN(f, 0, 96))
  FORMAT_CASE("mxfp4 in words, block 2 x 32", *f = cumoe_format_mxfp4(), f->word = 4, f->block[0] = 2)
  FORMAT_CASE("nvfp4", *f = cumoe_format_nvfp4(CUMOE_GLOBAL_NONE))
  FORMAT_CASE("nvfp4 times", *f = cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES))
  FORMAT_CASE("nvfp4 over, origin 48", *f = cumoe_format_nvfp4(CUMOE_GLOBAL_OVER), ORIGIN(f, 0, 48))
  FORMAT_CASE("int4 zeros - 1 g 64", *f = cumoe_format_int4(64, CUMOE_F16), f->offset = 0,
              f->zero = CUMOE_ZERO_CODES_OUT, f->zero_add = -1)
  FORMAT_CASE("int4 g 64 f32", *f = cumoe_format_int4(64, CUMOE_F32))
  FORMAT_CASE("int4 g 96 bf16", *f = cumoe_format_int4(96, CUMOE_BF16))
  FORMAT_CASE("int8, origin 3", *f = cumoe_format_int8(CUMOE_F32), ORIGIN(f, 3, 0))
  FORMAT_CASE("int4 g 64 f16, origin 1 32", *f = cumoe_format_int4(64, CUMOE_F16), ORIGIN(f, 1, 32))
  FORMAT_CASE("int4 values g 64, origin 2", *f = cumoe_format_affine4(64, CUMOE_BF16), ORIGIN(f, 2, 0))
  return NULL;
}

/* Column W of the table. */
static const char *class_of_format(const cumoe_format *f)
{
  switch ((cumoe_element)f->element) {
  case CUMOE_ELEMENT_E4M3: return "e4m3";
  case CUMOE_ELEMENT_E2M1: return f->scale == CUMOE_E4M3 ? "nv4" : "mx4";
  case CUMOE_ELEMENT_S8:
  case CUMOE_ELEMENT_U8: return "s8";
  case CUMOE_ELEMENT_U4:
  case CUMOE_ELEMENT_S4: return f->zero == CUMOE_ZERO_VALUES ? "af4" : "u4";
  case CUMOE_ELEMENT_DENSE: break;
  }
  return "";
}

static bool has_class(const cumoe_variant_info *row, const char *class)
{
  char part[16];
  snprintf(part, sizeof part, "_%s_", class);
  const char *w = row->name; /* op, arch, form, X, W */
  for (int i = 0; w && i < (strncmp(row->op, "few", 3) ? 5 : 6); i++) w = strchr(w + 1, '_');
  return w && strncmp(w, part, strlen(part)) == 0;
}

bool row_has_format(const cumoe_variant_info *row)
{
  static const char *const classes[] = {"e4m3", "s8", "u4", "af4", "mx4", "nv4"};
  for (int i = 0; i < 6; i++)
    if (row->bm > 0 && has_class(row, classes[i])) return true;
  return false;
}

/* ---- layers ---------------------------------------------------------------------------------------- */

static int64_t unit_of(const cumoe_format *f)
{
  return format_is_dense(f) ? 8 : 128 / format_code_bits(f);
}

/* Of gate and up. */
static bool takes_order(const cumoe_format *f, int32_t order)
{
  const bool even = f->block[0] <= 1 || (f->block[0] % 2 == 0 && f->origin[0] % 2 == 0);
  if (f->joined) return order <= CUMOE_UP_GATE_CONCAT;
  if (order != CUMOE_GATE_UP_INTERLEAVED && order != CUMOE_UP_GATE_INTERLEAVED) return true;
  return even && f->zero != CUMOE_ZERO_CODES_OUT;
}

void format_random_form(rng *r, layer_spec *s)
{
  const cumoe_moe_desc *d = &s->desc;
  layer_random_form(r, s);
  do s->form.gate_order = (int32_t)(CUMOE_GATE_UP_CONCAT + rng_below(r, 6));
  while (!takes_order(&d->up_format, s->form.gate_order) || !takes_order(&d->shared_up_format, s->form.gate_order));
  if (s->form.gate_order == CUMOE_UNGATED) s->desc.flags |= CUMOE_MOE_UNGATED;
  if (!format_is_dense(&d->up_format) || !format_is_dense(&d->shared_up_format)) s->form.up_major = CUMOE_OUT_IN;
  if (!format_is_dense(&d->down_format) || !format_is_dense(&d->shared_down_format)) s->form.down_major = CUMOE_OUT_IN;
  s->form.per_expert = rng_below(r, 2);
  s->form.gap = (int32_t)rng_below(r, 4);
  s->form.one_global = rng_below(r, 2);
}

/* With the format where `parts` says; a joined one, which down cannot be, is not joined there. */
static void set_formats(layer_spec *s, cumoe_format f, int parts)
{
  cumoe_format plain = f;
  plain.joined = 0;
  s->desc.up_format = parts & FORMAT_OF_UP ? f : (cumoe_format){0};
  s->desc.down_format = parts & FORMAT_OF_DOWN ? plain : (cumoe_format){0};
}

static int32_t rounded_up(int64_t width, const cumoe_format *f)
{
  const int64_t unit = unit_of(f);
  return (int32_t)((width + unit - 1) / unit * unit);
}

/* Units are powers of two. */
void format_widths(layer_spec *s)
{
  cumoe_moe_desc *d = &s->desc;
  d->hidden = rounded_up(rounded_up(d->hidden, &d->up_format), &d->shared_up_format);
  d->inter = rounded_up(d->inter, &d->down_format);
  d->shared_inter = rounded_up(d->shared_inter, &d->shared_down_format);
}

void format_layer(layer_spec *s, cumoe_format f, int parts)
{
  set_formats(s, f, parts);
  format_widths(s);
}

static layer_spec spec_with(rng *r, cumoe_format f, int parts, int32_t dtype, int64_t tokens, int64_t hidden,
                            int64_t inter)
{
  layer_spec s = layer_spec_new(dtype, tokens, (int32_t)hidden, (int32_t)inter);
  format_layer(&s, f, parts);
  s.seed = rng_next(r);
  s.pad = rng_below(r, 3);
  format_random_form(r, &s);
  return s;
}

static void run_format(cumoe_context context, const char *name, int parts, const layer_spec *s)
{
  static const char *const of[] = {"", "up", "down", "up and down"};
  char text[160];
  snprintf(text, sizeof text, "%s, %s%s", name, of[parts], s->form.per_expert ? ", pointers" : "");
  run_layer_case(context, text, s);
}

void cases_format(cumoe_context context)
{
  static const int32_t hiddens[] = {64, 160, 96, 32, 320, 192}, inters[] = {32, 96, 80, 192, 64, 320, 16},
                       deep[] = {704, 1504, 2880, 512};
  cumoe_format f;
  const char *name;
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++)
    for (int which = 0; which < (on_device(context) ? 10 : 6); which++) {
      rng r = {(uint64_t)(i * 16 + which) + 3};
      const int parts = which % 3 + 1;
      const bool large = which > 7;
      layer_spec s = spec_with(&r, f, parts, which / 3 % 2 ? CUMOE_F16 : CUMOE_BF16, case_tokens[rng_below(&r, 12)],
                               large ? deep[rng_below(&r, 4)] : hiddens[rng_below(&r, 6)],
                               large ? deep[rng_below(&r, 4)] : inters[rng_below(&r, 7)]);
      s.desc.num_experts = 1 + (int32_t)rng_below(&r, 9);
      s.desc.routing.top_k = s.desc.num_experts > 2 ? 3 : 1;
      s.pattern = (pattern)rng_below(&r, PATTERN_COUNT);
      s.optional_outputs = rng_below(&r, 2);
      run_format(context, name, parts, &s);
    }
}

/* ---- exact layers: one weight a result ------------------------------------------------------------- */

/*
 * Tokens have one element that is not 0, the other projection hands it on: every result is a weight, or a gate's times
 * an up's, times a number that codes of activations hit exactly. No tolerance.
 *   CODES   every code at every place of a word, zero points that change from group to group and channel to channel;
 *           scales 1
 *   SCALES  the code of 1; another scale for every block, its neighbours and the transposed place
 *   E8M0    the ends of the range: 2^-127 to 2^127
 */
typedef enum exact_content { EXACT_CODES, EXACT_SCALES, EXACT_E8M0 } exact_content;

static const int exact_e8m0[] = {127, 0, 129, 254, 1, 128};

/* Of a scale, in its own terms. */
static double exact_scale(const channel_place *at, exact_content content, int64_t in)
{
  const cumoe_format *f = at->format;
  const int64_t n = format_block(f->block[0], f->origin[0], at->channel),
                k = format_block(f->block[1], f->origin[1], in);
  const int64_t mixed = 17 * at->expert + 101 * at->half + 31 * n + 58 * k;
  if (content == EXACT_E8M0) return exact_e8m0[mixed % 6];
  if (f->scale == CUMOE_E8M0) return content == EXACT_SCALES ? 121 + (double)(mixed % 13) : 127;
  if (f->scale == CUMOE_E4M3) return content == EXACT_SCALES ? 0x20 + (double)(mixed % 0x31) : 0x38;
  return content == EXACT_SCALES ? 1 + (double)(mixed % 251) : 1;
}

/* Of 1, after what is taken off. */
static unsigned code_of_one(const cumoe_format *f, int taken)
{
  unsigned code = 0;
  while (element_value(f->element, code) - taken != 1) code++;
  return code;
}

static unsigned exact_code(const channel_place *at, exact_content content, int64_t in, int taken)
{
  const cumoe_format *f = at->format;
  unsigned code =
      (unsigned)((at->expert * 5 + at->half * 3 + at->channel * 7 + in * 11 + in / 16) % element_codes(f->element));
  if (content != EXACT_CODES) return code_of_one(f, taken);
  return isnan(element_value(f->element, code)) ? 0x80 : code;
}

static void set_exact_channel(const channel_place *at, exact_content content)
{
  const cumoe_format *f = at->format;
  for (int64_t in = 0; in < at->ins; in++) {
    const int64_t group = format_block(f->block[1], f->origin[1], in);
    const int64_t most = content == EXACT_CODES ? 16 : 8;
    const unsigned zero = f->zero ? (unsigned)((at->channel * 3 + group * 5 + at->half * 7 + at->expert) % most) : 0;
    const int32_t add = f->zero ? f->zero_add : 0;
    const double scale = exact_scale(at, content, in);
    if (f->zero == CUMOE_ZERO_CODES_OUT) zero_set(at, in, zero);
    if (f->zero == CUMOE_ZERO_VALUES) value_set(at, in, -scale * zero);
    scale_set(at, in, scale);
    code_set(at, in, exact_code(at, content, in, f->offset + add + (int)zero));
  }
}

/* Which codes of activations meet exactly: the largest one times a power of two. */
static double exact_number(const cumoe_format *f)
{
  return f->element == CUMOE_ELEMENT_S8 || f->element == CUMOE_ELEMENT_U8 ? 127 * 0x1p-10 : 448 * 0x1p-12;
}

static void set_exact_projection(host_projection *p, const cumoe_format *f)
{
  if (format_is_dense(f) && p->data.data)
    memset(p->data.data, 0, (size_t)(p->data.rows * p->data.cols) * cumoe_dtype_bytes((cumoe_dtype)p->data.dtype));
  for (int64_t i = 0; i < p->global.rows * p->global.cols; i++) tensor_set(&p->global, 0, i, i % 3 == 1 ? 2 : 0.5);
  for (int64_t e = 0; e < p->input_scale.rows; e++)
    tensor_set(&p->input_scale, e, 0, f->element == CUMOE_ELEMENT_S8 ? 0x1p-10 : e % 2 ? 0x1p-11 : 0x1p-12);
}

static void set_exact_weights(host_weights *w, exact_content content)
{
  host_projection *all[] = {&w->gate_up, &w->gate, &w->up, &w->down};
  const double number = exact_number(&w->down_format);
  for (int i = 0; i < 4; i++) set_exact_projection(all[i], i == 3 ? &w->down_format : &w->up_format);
  for (int part = 0; part < 3; part++)
    for (int64_t e = 0; e < w->experts; e++)
      for (int64_t out = 0; out < (part == PLAIN_DOWN ? w->hidden : w->inter); out++) {
        if (part == PLAIN_GATE && w->gate_order == CUMOE_UNGATED) continue;
        const channel_place at = oracle_channel(w, part, e, out);
        const double passed = part == PLAIN_UP && format_is_dense(&w->up_format) ? number : 1;
        if (!format_is_dense(at.format))
          set_exact_channel(&at, content);
        else if (out < at.ins)
          weights_set(w, part, e, out, out, passed);
      }
  oracle_prepare(w);
}

/* Tokens: for every k and expert one that is not 0 there. */
static layer_inputs exact_inputs(const layer_spec *s, exact_content content)
{
  layer_inputs in = layer_inputs_new(s);
  const bool up = !format_is_dense(&s->desc.up_format);
  memset(in.x.data, 0, (size_t)(in.x.rows * in.x.cols) * cumoe_dtype_bytes((cumoe_dtype)in.x.dtype));
  set_exact_weights(&in.routed, content);
  for (int64_t t = 0; t < s->tokens; t++) {
    const int64_t e = t % s->desc.num_experts, k = t / s->desc.num_experts;
    const channel_place at = oracle_channel(&in.routed, up ? PLAIN_UP : PLAIN_DOWN, e, 0);
    const double scale = content == EXACT_E8M0 ? exact_scale(&at, content, k) : 127;
    tensor_set(&in.x, t, k, (up ? exact_number(at.format) : 1) * (scale < 64 ? 0x1p60 : scale > 200 ? 0x1p-60 : 1));
    tensor_set(&in.ids, t, 0, (double)e);
    tensor_set(&in.id_weights, t, 0, 1);
  }
  return in;
}

static bool check_exactly(const layer_spec *s, const layer_inputs *in, const layer_outputs *got, bool tell)
{
  cumoe_moe_desc desc;
  const layer_case c = layer_case_of(s, in, &desc);
  bool good = true;
  for (int64_t t = 0; t < s->tokens && good; t++) {
    const int mark = scratch_mark();
    layer_result want = oracle_layer(&c, t);
    for (int32_t i = 0; i < desc.hidden && good; i++) {
      const double value = round_to(want.out[i].value, desc.out_dtype), is = tensor_get(&got->out, t, i);
      good = value == is || (isnan(value) && isnan(is));
      if (tell) CHECK_MSG(good, "token %d, channel %d: %g, want %g", (int)t, i, is, value);
    }
    scratch_release(mark);
  }
  return good;
}

/* At most `limit` tokens a call. */
static void run_exact(cumoe_context context, const char *name, const layer_spec *s, exact_content content,
                      int64_t limit)
{
  static const char *const contents[] = {"codes", "scales", "e8m0"};
  case_begin("exact %s: %s, %s H %d I %d order %d", contents[content], name,
             cumoe_dtype_name((cumoe_dtype)s->desc.dtype), s->desc.hidden, s->desc.inter, s->form.gate_order);
  const layer_inputs all = exact_inputs(s, content);
  int64_t *order = scratch((size_t)s->tokens, sizeof *order);
  for (int64_t t = 0; t < s->tokens; t++) order[t] = t;
  for (int64_t t = 0; t < s->tokens; t += limit) {
    layer_spec some = *s;
    layer_outputs got;
    session run;
    some.tokens = limit < s->tokens - t ? limit : s->tokens - t;
    const layer_inputs in = take_tokens(&all, order + t, some.tokens);
    session_open(&run, context, &some, &in);
    const cumoe_status status = session_forward(&run);
    if (status == CUMOE_OK) got = session_collect(&run);
    session_close(&run);
    if (!case_served(context, status, "cumoe_moe_forward")) return;
    if (!check_exactly(&some, &in, &got, true)) break;
  }
  case_end();
}

static layer_spec exact_spec(rng *r, cumoe_format f, int parts, int32_t dtype, exact_content content)
{
  static const int32_t longer[] = {96, 160, 288, 128}, shorter[] = {64, 96, 32, 80};
  layer_spec s = spec_with(r, f, parts, dtype, 0, longer[rng_below(r, 4)], shorter[rng_below(r, 4)]);
  s.desc.act = CUMOE_ACT_IDENTITY;
  s.form.bias = 0;
  s.desc.num_experts = 2;
  s.desc.routing.top_k = 1;
  if (content == EXACT_E8M0) s.form.gate_order = CUMOE_UNGATED, s.desc.flags |= CUMOE_MOE_UNGATED;
  s.tokens = 2 * (parts == FORMAT_OF_UP ? s.desc.hidden : s.desc.inter);
  return s;
}

/* limit: of tokens a call. */
static void exact_cases(cumoe_context context, int which, const char *name, cumoe_format f, int parts, int32_t dtype,
                        int64_t limit)
{
  rng r = {(uint64_t)(which * 8 + parts * 2) + 77};
  for (exact_content content = EXACT_CODES; content <= EXACT_E8M0; content++) {
    if (content == EXACT_E8M0 && (f.scale != CUMOE_E8M0 || dtype != CUMOE_BF16)) continue;
    const layer_spec s = exact_spec(&r, f, parts, dtype, content);
    run_exact(context, name, &s, content, limit);
  }
}

void cases_format_exact(cumoe_context context)
{
  cumoe_format f;
  const char *name;
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++)
    for (int which = 0; which < 4; which++) {
      cumoe_format one = f;
      const int parts = which % 2 ? FORMAT_OF_DOWN : FORMAT_OF_UP;
      if (parts == FORMAT_OF_DOWN) one.joined = 0;
      /* The CPU decodes codes for both types by the same lines: a format's up in one, its down in the other. */
      if (!on_device(context) && (which / 2 + which + i) % 2) continue;
      exact_cases(context, i, name, one, parts, which / 2 ? CUMOE_F16 : CUMOE_BF16, 1 << 20);
    }
}

/* ---- wrong formats are seen ------------------------------------------------------------------------ */

/* One member that a preset may have wrong; false: it means nothing to this format. */
static bool set_wrong(cumoe_format *f, int which)
{
  const bool u4 = f->element == CUMOE_ELEMENT_U4, s8 = f->element == CUMOE_ELEMENT_S8 || f->element == CUMOE_ELEMENT_U8;
  switch (which) {
  case 0: return u4 && (f->offset = f->offset ? f->offset - 1 : 1, true);
  case 1: return f->zero == CUMOE_ZERO_CODES_OUT && (f->zero_add += 1, true);
  case 2: return f->global && (f->global = CUMOE_GLOBAL_TIMES + CUMOE_GLOBAL_OVER - f->global, true);
  case 3: return f->origin[1] && (f->origin[1] = 0, true);
  case 4: return f->origin[0] && (f->origin[0] = 0, true);
  case 5:
    return s8 && (f->element = CUMOE_ELEMENT_S8 + CUMOE_ELEMENT_U8 - f->element, f->offset = 128 - f->offset, true);
  case 6: return u4 && !f->zero && f->offset == 8 && (f->element = CUMOE_ELEMENT_S4, f->offset = 0, true);
  case 7: return f->joined && f->block[0] && (f->joined = 0, true);
  case 8: return f->act_order && (f->act_order = 0, true);
  default:
    return f->block[1] > 32 && f->block[1] <= 128 && (f->block[1] *= 2, true); /* group 64 read with a literal 128 */
  }
}
enum { WRONG_FORMATS = 10 };

/* The order of nibbles, which no member tells: they are exchanged in memory. */
static void swap_nibbles(tensor *t)
{
  const size_t bytes = (size_t)(t->rows * t->cols) * cumoe_dtype_bytes((cumoe_dtype)t->dtype);
  *t = tensor_copy(t);
  for (size_t i = 0; i < bytes; i++) t->data[i] = (unsigned char)(t->data[i] << 4 | t->data[i] >> 4);
}

/* Scales of the transposed place. */
static void transpose_scales(host_projection *p, int64_t experts)
{
  const tensor from = p->scale;
  const int64_t rows = from.rows / experts, size = rows < from.cols ? rows : from.cols;
  p->scale = tensor_copy(&from);
  for (int64_t e = 0; e < experts; e++)
    for (int64_t n = 0; n < size; n++)
      for (int64_t k = 0; k < size; k++) tensor_set(&p->scale, e * rows + n, k, tensor_get(&from, e * rows + k, n));
}

/* The right answer of either content is not that of weights that are read wrongly. */
static void check_seen(const char *name, const layer_spec *s, const layer_outputs *right, const layer_inputs *in,
                       const host_weights *wrong, const char *how, int which)
{
  bool seen = false;
  for (exact_content content = EXACT_CODES; content <= EXACT_SCALES; content++) {
    layer_inputs other = in[content];
    other.routed = wrong[content];
    oracle_prepare(&other.routed);
    seen |= !check_exactly(s, &other, &right[content], false);
  }
  CHECK_MSG(seen, "%s: %s %d gives the same results", name, how, which);
}

static void run_control(cumoe_context context, const char *name, const layer_spec *s)
{
  layer_inputs in[2];
  layer_outputs right[2];
  host_weights wrong[2];
  for (exact_content content = EXACT_CODES; content <= EXACT_SCALES; content++) {
    in[content] = exact_inputs(s, content);
    right[content] = run_layer(context, s, &in[content]);
  }
  for (int i = 0; i < WRONG_FORMATS; i++) {
    cumoe_format f = s->desc.down_format;
    if (!set_wrong(&f, i)) continue;
    for (int c = 0; c < 2; c++) wrong[c] = in[c].routed, wrong[c].down_format = f;
    check_seen(name, s, right, in, wrong, "wrong member", i);
  }
  for (int c = 0; c < 2; c++) wrong[c] = in[c].routed;
  if (format_code_bits(&s->desc.down_format) == 4) {
    for (int c = 0; c < 2; c++) swap_nibbles(&wrong[c].down.data);
    check_seen(name, s, right, in, wrong, "exchanged nibbles", 0);
    for (int c = 0; c < 2; c++) wrong[c] = in[c].routed;
  }
  if (wrong[0].down.scale.cols < 2 || wrong[0].down.scale.rows < 2 * wrong[0].experts) return;
  for (int c = 0; c < 2; c++) transpose_scales(&wrong[c].down, wrong[c].experts);
  check_seen(name, s, right, in, wrong, "transposed scales", 0);
}

void cases_format_controls(cumoe_context context)
{
  cumoe_format f;
  const char *name;
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++) {
    rng r = {(uint64_t)i};
    f.joined = 0;
    layer_spec s = spec_with(&r, f, FORMAT_OF_DOWN, CUMOE_BF16, 2 * 160, 160, 160);
    s.desc.act = CUMOE_ACT_IDENTITY;
    s.form.bias = 0;
    s.desc.num_experts = 2;
    s.desc.routing.top_k = 1;
    case_begin("wrong formats: %s", name);
    run_control(context, name, &s);
    case_end();
  }
}

/* ---- odd values ------------------------------------------------------------------------------------ */

/* What is changed of a random layer. */
typedef enum odd_value {
  ODD_NAN_CODE,  /* one weight of expert 1 is NaN */
  ODD_NAN_SCALE, /* one scale of expert 1 */
  ODD_DEAD,      /* all scales of expert 1 are tiny: nothing of it may become NaN */
  ODD_ZERO,      /* its codes are 0, as are its scales where a scale can be */
  ODD_TOKENS,    /* tokens of zeros, of tiny and of huge numbers, a NaN */
  ODD_COUNT
} odd_value;

static double odd_scale(const cumoe_format *f, odd_value odd)
{
  switch ((cumoe_dtype)f->scale) {
  case CUMOE_E8M0: return odd == ODD_NAN_SCALE ? 255 : 4;
  case CUMOE_E4M3: return odd == ODD_NAN_SCALE ? 0x7f : odd == ODD_ZERO ? 0 : 1;
  default: return odd == ODD_NAN_SCALE ? NAN : odd == ODD_ZERO ? 0 : f->scale == CUMOE_F16 ? 6e-8 : 1e-30;
  }
}

static void set_odd_channel(const channel_place *at, odd_value odd)
{
  const cumoe_format *f = at->format;
  const bool one = at->channel == at->outs / 3;
  if (odd == ODD_NAN_CODE && one) code_set(at, at->ins / 2, 0xff);
  if (odd == ODD_NAN_SCALE && one) scale_set(at, at->ins / 2, odd_scale(f, odd));
  for (int64_t in = 0; in < at->ins && (odd == ODD_DEAD || odd == ODD_ZERO); in++) {
    scale_set(at, in, odd_scale(f, odd));
    if (odd == ODD_ZERO) code_set(at, in, 0);
  }
}

static void set_odd_weights(host_weights *w, odd_value odd)
{
  for (int part = 0; part < 3; part++)
    for (int64_t out = 0; out < (part == PLAIN_DOWN ? w->hidden : w->inter); out++) {
      if (part == PLAIN_GATE && w->gate_order == CUMOE_UNGATED) continue;
      const channel_place at = oracle_channel(w, part, 1, out);
      if (!format_is_dense(at.format)) set_odd_channel(&at, odd);
    }
  oracle_prepare(w);
}

/* Rows whose largest magnitude is at an end of what makes a scale. In f16 1e-10 is 0. */
static void set_odd_tokens(const layer_spec *s, tensor *x)
{
  const bool half = s->desc.dtype == CUMOE_F16;
  const double most[] = {0, 1e-38, 1e-10, 448 * (1 + 0x1p-7), 448, 448 * (1 - 0x1p-8), half ? 6e4 : 1e30, NAN};
  for (int64_t t = 0; t < x->rows; t++)
    for (int64_t i = 0; i < x->cols; i++) {
      const double value = most[t % 8], is = tensor_get(x, t, i);
      if (t % 8 == 7)
        tensor_set(x, t, i, i == x->cols / 2 ? NAN : is);
      else if (t % 8 == 6)
        tensor_set(x, t, i, i == x->cols / 3 ? value : is); /* one alone: sums stay finite */
      else
        tensor_set(x, t, i, i % 7 == 3 ? -value : value * is / 8);
    }
}

static void run_odd(cumoe_context context, const char *name, const layer_spec *s, odd_value odd)
{
  static const char *const odds[] = {"NaN code", "NaN scale", "dead expert", "zeros", "odd tokens"};
  layer_outputs got[PASSES];
  case_begin("%s: %s, %s T %d H %d I %d order %d", odds[odd], name, cumoe_dtype_name((cumoe_dtype)s->desc.dtype),
             (int)s->tokens, s->desc.hidden, s->desc.inter, s->form.gate_order);
  layer_inputs in = layer_inputs_new(s);
  if (odd == ODD_TOKENS)
    set_odd_tokens(s, &in.x);
  else
    set_odd_weights(&in.routed, odd);
  for (int pass = 0; pass < PASSES; pass++) {
    session run;
    set_poison(pass);
    session_open(&run, context, s, &in);
    const cumoe_status status = session_forward(&run);
    if (status == CUMOE_OK) got[pass] = session_collect(&run);
    session_close(&run);
    if (!case_served(context, status, "cumoe_moe_forward")) return;
  }
  check_outputs_same(&got[0], &got[1]);
  check_layer(s, &in, &got[0]);
  case_end();
}

static void odd_cases(cumoe_context context, int which, const char *name, cumoe_format f, int parts, int32_t dtype,
                      int64_t tokens)
{
  f.joined = 0; /* gate and up are not there */
  for (odd_value odd = 0; odd < ODD_COUNT; odd++) {
    rng r = {(uint64_t)(which * 5 + (int)odd) + 11};
    if (odd == ODD_NAN_CODE && f.element != CUMOE_ELEMENT_E4M3) continue;
    layer_spec s = spec_with(&r, f, parts, dtype, tokens, 160, 96);
    s.desc.num_experts = 4;
    s.desc.routing.top_k = 1;
    s.desc.act = CUMOE_ACT_IDENTITY;
    s.form.gate_order = CUMOE_UNGATED;
    s.desc.flags |= CUMOE_MOE_UNGATED;
    s.pattern = PATTERN_ROUND_ROBIN;
    run_odd(context, name, &s, odd);
  }
}

void cases_format_odd(cumoe_context context)
{
  cumoe_format f;
  const char *name;
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++)
    odd_cases(context, i, name, f, i % 3 + 1, i % 2 ? CUMOE_F16 : CUMOE_BF16, 19);
}

/* ---- a row of the table ---------------------------------------------------------------------------- */

static int parts_of(const cumoe_variant_info *row, int size)
{
  if (!strcmp(row->op, "quantize")) return size % 2 ? FORMAT_OF_UP : FORMAT_OF_DOWN; /* x; h */
  return !strcmp(row->op, "up") ? FORMAT_OF_UP : !strcmp(row->op, "down") ? FORMAT_OF_DOWN : FORMAT_OF_BOTH;
}

static bool may_serve(const cumoe_variant_info *row, const cumoe_format *f, int32_t dtype)
{
  const int32_t codes = f->element == CUMOE_ELEMENT_E4M3 ? CUMOE_E4M3 : CUMOE_I8;
  const bool becomes = format_has_codes(f);
  const bool own = f->act_order || f->rows == CUMOE_ROWS_STATIC_EXPERT, takes_own = !strcmp(row->form, "expert");
  const bool fixed = !f->zero && f->offset == 8 && (f->block[1] | f->origin[1]) % 128 == 0;
  const bool mx4 = !strcmp(class_of_format(f), "mx4");
  if (!strcmp(row->op, "quantize") && !strcmp(row->form, "fixed") && row->y == CUMOE_E4M3)
    return mx4 && !becomes && !own && row->x == dtype;
  if (!strcmp(row->op, "quantize") && !strcmp(row->form, "fixed"))
    return !strcmp(class_of_format(f), "u4") && fixed && !becomes && !own && row->x == dtype;
  if (!strcmp(row->op, "quantize"))
    return own == takes_own && (becomes || own) && row->y == (becomes ? codes : dtype) && row->x == dtype;
  const bool e2m1 = !strcmp(row->form, "unpack") && f->element == CUMOE_ELEMENT_E2M1; /* with scales of either type */
  if (!has_class(row, e2m1 ? "mx4" : class_of_format(f))) return false;
  if (!strncmp(row->op, "few", 3) && own) return false;
  if (!strcmp(row->form, "wgmma") && has_class(row, "u4") && f->scale != dtype) return false;
  const bool whole = has_class(row, "u4") && (!strcmp(row->form, "fixed") || !strcmp(row->form, "drawn"));
  if (whole && !fixed) return false;
  if (row->x == CUMOE_F16 || row->x == CUMOE_BF16) return !becomes && row->x == dtype;
  return becomes && row->x == codes && (row->y == 0 || row->y == dtype || row->y == CUMOE_F32);
}

/* Few tokens and portable rows multiply e4m3 in f16. */
static int sums_of_row(const cumoe_variant_info *row)
{
  const bool few = !strncmp(row->op, "few", 3), quantize = !strcmp(row->op, "quantize");
  if (!strcmp(row->form, "fixed") && !few && (quantize ? row->y == CUMOE_E4M3 : has_class(row, "mx4")))
    return DEVICE_TWIN_CODES;
  if (!strcmp(row->form, "fixed") || (few && (has_class(row, "u4") || has_class(row, "mx4"))))
    return DEVICE_FIXED_POINT;
  return strcmp(row->form, "unpack") && !few ? DEVICE_FP8_ADDER : 0;
}

bool format_for_row(const cumoe_variant_info *row, layer_spec *s)
{
  cumoe_format f;
  for (int i = 0; format_name(i, &f) != NULL; i++)
    for (int type = 0; type < 2; type++) {
      s->desc.dtype = type ? CUMOE_F16 : CUMOE_BF16;
      if (!may_serve(row, &f, s->desc.dtype)) continue;
      set_formats(s, f, parts_of(row, 1));
      s->desc.hidden = (s->desc.hidden + 31) / 32 * 32;
      s->desc.inter = (s->desc.inter + 31) / 32 * 32;
      s->router_dtype = s->desc.dtype;
      oracle_device = sums_of_row(row);
      return true;
    }
  return false;
}

/* Around the row's tile: a row more or less on one expert, few on many, none at all; K that ends inside a block. */
static layer_spec spec_around(rng *r, const cumoe_variant_info *row, cumoe_format f, int32_t dtype, int size)
{
  static const int32_t widths[] = {32, 96, 160, 288, 416, 704, 64, 1504};
  const bool few = !strncmp(row->op, "few", 3), quantize = !strcmp(row->op, "quantize");
  const int32_t bm = quantize ? 16 : row->bm, bn = quantize ? 64 : row->bn;
  const int64_t tokens[] = {bm, bm + 1, bm - 1, 2 * bm + 5, 7, 1},
                few_tokens[] = {bm, 1, bm / 2, bm - 1, bm < 3 ? 1 : 3, 1};
  const int64_t around = bn * (1 + rng_below(r, 2)) + 16 * (rng_below(r, 3) - 1),
                other = size % 2 || around < 32 ? widths[rng_below(r, 8)] : around,
                reduced = widths[(size + rng_below(r, 3)) % 8];
  const int64_t t = few ? few_tokens[size] : tokens[size];
  const bool up = parts_of(row, size) != FORMAT_OF_DOWN;
  layer_spec s = spec_with(r, f, parts_of(row, size), dtype, t, up ? reduced : other, up ? other : reduced);
  s.desc.num_experts = 5;
  s.desc.routing.top_k = size % 3 == 2 ? 3 : 1;
  s.pattern = size < 3 ? PATTERN_LAST : size == 3 ? PATTERN_ZIPF : size == 4 ? PATTERN_HOSTILE : PATTERN_UNIFORM;
  s.distinct = t > 19 ? 19 : 0;
  return s;
}

/* More draws by each of an H200's CTAs than it knows at a time, of units of one part; one token's are of one unit. */
static void many_draws(cumoe_context context, const cumoe_variant_info *row, const char *name, cumoe_format f,
                       int32_t dtype)
{
  const int64_t tokens[] = {row->bm, 1};
  rng r = {7};
  for (int i = 0; i < 2; i++) {
    layer_spec s = spec_with(&r, f, FORMAT_OF_BOTH, dtype, tokens[i], 96, 16384);
    s.desc.num_experts = 5;
    s.desc.routing.top_k = 3;
    s.pattern = PATTERN_UNIFORM;
    run_format(context, name, FORMAT_OF_BOTH, &s);
  }
}

/* A down that is read otherwise than up. A row for both need not serve it; what does is right, however it sums. */
static void unlike_down(cumoe_context context, const cumoe_variant_info *row, const char *name, cumoe_format f,
                        int32_t dtype)
{
  rng r = {9};
  const int64_t tokens = row->bm < 3 ? row->bm : 3;
  const int device = oracle_device;
  layer_spec s = spec_with(&r, f, FORMAT_OF_BOTH, dtype, tokens, 160, 288);
  if (f.block[1] >= 64)
    s.desc.down_format.origin[1] = (f.origin[1] + f.block[1] / 2) % f.block[1];
  else if (f.rows)
    s.desc.down_format.rows = s.desc.down_format.row_group = s.desc.down_format.row_scale = 0;
  else
    return;
  oracle_device = on_device(context) ? DEVICE_ANY : 0;
  run_format(context, name, FORMAT_OF_BOTH, &s);
  oracle_device = device;
}

static void exact_row(cumoe_context context, const cumoe_variant_info *row, int which, const char *name, cumoe_format f,
                      int32_t dtype)
{
  const bool few = !strncmp(row->op, "few", 3);
  const bool quantize = !strcmp(row->op, "quantize");
  const int parts = quantize ? FORMAT_OF_BOTH : parts_of(row, 0);
  odd_cases(context, which, name, f, quantize ? parts_of(row, which) : parts, dtype,
            few && row->bm < 19 ? row->bm : 19);
  if (parts & FORMAT_OF_UP) exact_cases(context, which, name, f, FORMAT_OF_UP, dtype, few ? row->bm : 1 << 20);
  f.joined = 0;
  if (parts & FORMAT_OF_DOWN) exact_cases(context, which, name, f, FORMAT_OF_DOWN, dtype, few ? row->bm : 1 << 20);
}

void cases_format_row(cumoe_context context, const cumoe_variant_info *row)
{
  enum { SIZES = 6 };
  cumoe_format f;
  const char *name;
  const int device = oracle_device;
  const bool drawn = !strcmp(row->form, "drawn");
  bool many = drawn; /* once */
  oracle_device = on_device(context) ? sums_of_row(row) : 0;
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++)
    for (int type = 0; type < 2; type++) {
      const int32_t dtype = type ? CUMOE_F16 : CUMOE_BF16;
      if (!may_serve(row, &f, dtype)) continue;
      for (int size = 0; size < SIZES; size++) {
        rng r = {(uint64_t)(i * 100 + type * 10 + size) + 1};
        const layer_spec s = spec_around(&r, row, f, dtype, size);
        run_format(context, name, parts_of(row, size), &s);
      }
      exact_row(context, row, i, name, f, dtype);
      if (drawn) unlike_down(context, row, name, f, dtype);
      if (many) many_draws(context, row, name, f, dtype);
      many = false;
    }
  oracle_device = device;
}
