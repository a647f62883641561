#include "cases_format.h"
#include "cases.h"
#include "cases_layer.h"

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
  FORMAT_CASE("mxfp4", *f = cumoe_format_mxfp4())
  FORMAT_CASE("mxfp4, origin 96", *f = cumoe_format_mxfp4(), ORIGIN(f, 0, 96))
  FORMAT_CASE("mxfp4 in words, block 2 x 32", *f = cumoe_format_mxfp4(), f->word = 4, f->block[0] = 2)
  FORMAT_CASE("nvfp4", *f = cumoe_format_nvfp4(CUMOE_GLOBAL_NONE))
  FORMAT_CASE("nvfp4 times", *f = cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES))
  FORMAT_CASE("nvfp4 over, origin 48", *f = cumoe_format_nvfp4(CUMOE_GLOBAL_OVER), ORIGIN(f, 0, 48))
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
  case CUMOE_ELEMENT_S4: return "u4";
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
  static const char *const classes[] = {"e4m3", "s8", "u4", "mx4", "nv4"};
  for (int i = 0; i < 5; i++)
    if (row->bm > 0 && has_class(row, classes[i])) return true;
  return false;
}

/* ---- layers ---------------------------------------------------------------------------------------- */

static int64_t unit_of(const cumoe_format *f)
{
  return format_is_dense(f) ? 8 : 128 / format_code_bits(f);
}

/* Whether gate and up may be interleaved. */
static bool takes_interleaved(const cumoe_format *f)
{
  const bool even = f->block[0] <= 1 || (f->block[0] % 2 == 0 && f->origin[0] % 2 == 0);
  return even && !f->joined && !f->zero;
}

void format_random_form(rng *r, layer_spec *s)
{
  const cumoe_format *f = &s->desc.up_format;
  layer_random_form(r, s);
  do s->form.gate_order = (int32_t)(CUMOE_GATE_UP_CONCAT + rng_below(r, 6));
  while ((f->joined && s->form.gate_order > CUMOE_UP_GATE_CONCAT) ||
         (!takes_interleaved(f) &&
          (s->form.gate_order == CUMOE_GATE_UP_INTERLEAVED || s->form.gate_order == CUMOE_UP_GATE_INTERLEAVED)));
  if (s->form.gate_order == CUMOE_UNGATED) s->desc.flags |= CUMOE_MOE_UNGATED;
  if (!format_is_dense(f)) s->form.up_major = CUMOE_OUT_IN;
  if (!format_is_dense(&s->desc.down_format)) s->form.down_major = CUMOE_OUT_IN;
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

static layer_spec spec_with(rng *r, cumoe_format f, int parts, int32_t dtype, int64_t tokens, int64_t hidden,
                            int64_t inter)
{
  layer_spec s = layer_spec_new(dtype, tokens, 0, 0);
  set_formats(&s, f, parts);
  s.desc.hidden = rounded_up(hidden, &s.desc.up_format);
  s.desc.inter = rounded_up(inter, &s.desc.down_format);
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
  static const int32_t hiddens[] = {64, 160, 96, 32, 320, 192}, inters[] = {32, 96, 80, 192, 64, 320},
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
                               large ? deep[rng_below(&r, 4)] : inters[rng_below(&r, 6)]);
      s.desc.num_experts = 1 + (int32_t)rng_below(&r, 9);
      s.desc.routing.top_k = s.desc.num_experts > 2 ? 3 : 1;
      s.pattern = (pattern)rng_below(&r, PATTERN_COUNT);
      s.optional_outputs = rng_below(&r, 2);
      run_format(context, name, parts, &s);
    }
}

/* ---- a row of the table ---------------------------------------------------------------------------- */

static int parts_of(const cumoe_variant_info *row)
{
  return !strcmp(row->op, "up") ? FORMAT_OF_UP : !strcmp(row->op, "down") ? FORMAT_OF_DOWN : FORMAT_OF_BOTH;
}

static bool may_serve(const cumoe_variant_info *row, const cumoe_format *f, int32_t dtype)
{
  const int32_t codes = f->element == CUMOE_ELEMENT_E4M3 ? CUMOE_E4M3 : CUMOE_I8;
  const bool becomes = format_has_codes(f);
  if (!strcmp(row->op, "quantize")) return becomes && row->y == codes && row->x == dtype;
  if (!has_class(row, class_of_format(f))) return false;
  if (row->x == CUMOE_F16 || row->x == CUMOE_BF16) return row->x == dtype; /* few makes codes of what it reads */
  return becomes && row->x == codes && (row->y == 0 || row->y == dtype || row->y == CUMOE_F32);
}

/* Around the row's tile: a row more or less on one expert, few on many, none at all; K that ends inside a block. */
static layer_spec spec_around(rng *r, const cumoe_variant_info *row, cumoe_format f, int32_t dtype, int size)
{
  static const int32_t widths[] = {32, 96, 160, 288, 416, 704, 64, 1504};
  const bool few = !strncmp(row->op, "few", 3), quantize = !strcmp(row->op, "quantize");
  const int32_t bm = quantize ? 16 : row->bm, bn = quantize ? 64 : row->bn;
  const int64_t tokens[] = {bm, bm + 1, bm - 1, 2 * bm + 5, 7, 1}, few_tokens[] = {bm, 1, bm / 2, bm - 1, 3, 1};
  const int64_t other = size % 2 ? widths[rng_below(r, 8)] : bn * (1 + rng_below(r, 2)) + 16 * (rng_below(r, 3) - 1),
                reduced = widths[(size + rng_below(r, 3)) % 8];
  const int64_t t = few ? few_tokens[size] : tokens[size];
  const bool up = parts_of(row) != FORMAT_OF_DOWN;
  layer_spec s = spec_with(r, f, parts_of(row), dtype, t, up ? reduced : other, up ? other : reduced);
  s.desc.num_experts = 5;
  s.desc.routing.top_k = size % 3 == 2 ? 3 : 1;
  s.pattern = size < 3 ? PATTERN_LAST : size == 3 ? PATTERN_ZIPF : size == 4 ? PATTERN_HOSTILE : PATTERN_UNIFORM;
  s.distinct = t > 19 ? 19 : 0;
  return s;
}

void cases_format_row(cumoe_context context, const cumoe_variant_info *row)
{
  enum { SIZES = 6 };
  cumoe_format f;
  const char *name;
  const bool fp8_adder = oracle_fp8_adder;
  oracle_fp8_adder = !strcmp(row->form, "wgmma") || !strcmp(row->form, "stream");
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++)
    for (int type = 0; type < 2; type++)
      for (int size = 0; size < SIZES; size++) {
        rng r = {(uint64_t)(i * 100 + type * 10 + size) + 1};
        const int32_t dtype = type ? CUMOE_F16 : CUMOE_BF16;
        if (!may_serve(row, &f, dtype)) continue;
        const layer_spec s = spec_around(&r, row, f, dtype, size);
        run_format(context, name, parts_of(row), &s);
      }
  oracle_fp8_adder = fp8_adder;
}
