/* See format.h. */
#include "format.h"

#include <string.h>

weight_format class_of(const cumoe_format *f, int32_t dtype)
{
  switch ((cumoe_element)f->element) {
  case CUMOE_ELEMENT_DENSE: return dense_format(dtype);
  case CUMOE_ELEMENT_E4M3: return FORMAT_e4m3;
  case CUMOE_ELEMENT_E2M1: return f->scale == CUMOE_E4M3 ? FORMAT_nv4 : FORMAT_mx4;
  case CUMOE_ELEMENT_S8:
  case CUMOE_ELEMENT_U8: return FORMAT_s8;
  case CUMOE_ELEMENT_U4: return f->zero == CUMOE_ZERO_VALUES ? FORMAT_af4 : FORMAT_u4;
  case CUMOE_ELEMENT_S4: return FORMAT_u4;
  }
  return FORMAT_none;
}

cumoe_dtype storage_dtype(const cumoe_format *f, int32_t dtype)
{
  if (is_dense(f)) return (cumoe_dtype)dtype;
  if (f->word == 4) return CUMOE_I32;
  if (f->element == CUMOE_ELEMENT_E4M3) return CUMOE_E4M3;
  return f->element == CUMOE_ELEMENT_S8 ? CUMOE_I8 : CUMOE_U8;
}

int32_t storage_codes(const cumoe_format *f)
{
  if (is_dense(f)) return 1;
  return (f->word ? f->word : 1) * 8 / format_bits(class_of(f, 0));
}

int32_t scale_run(const cumoe_format *f)
{
  if (is_dense(f)) return SCALE_RUN_ALL;
  const int32_t groups = f->rows == CUMOE_ROWS_GROUP ? f->row_group : 0;
  return aligned_run(f->block[1] | groups | (f->block[1] || groups ? f->origin[1] : 0));
}

int32_t row_element(const cumoe_format *f, int32_t dtype)
{
  if (f->rows == CUMOE_ROWS_AS_THEY_ARE) return dtype;
  return f->element == CUMOE_ELEMENT_E4M3 ? DT_E4M3 : DT_I8;
}

row_format rows_of(const cumoe_format *f, const float *static_scale)
{
  const bool groups = f->rows == CUMOE_ROWS_GROUP;
  return (row_format){.mode = f->rows == CUMOE_ROWS_STATIC_EXPERT ? (int32_t)ROWS_STATIC : f->rows,
                      .element = f->rows == CUMOE_ROWS_AS_THEY_ARE ? DT_NONE : row_element(f, DT_NONE),
                      .group = groups ? f->row_group : (int32_t)ROWS_ONE_GROUP,
                      .origin = groups ? f->origin[1] % f->row_group : 0,
                      .power_of_two = f->row_scale == CUMOE_E8M0,
                      .static_scale = static_scale};
}

bool same_format(const cumoe_format *a, const cumoe_format *b)
{
  return memcmp(a, b, sizeof *a) == 0;
}

/* ---- checks ---- */

static cumoe_status check_reserved(const char *name, const cumoe_format *f)
{
  for (size_t i = 0; i < sizeof f->reserved / sizeof *f->reserved; ++i)
    REQUIRE(f->reserved[i] == 0, CUMOE_ERR_NOT_SUPPORTED, "%s.reserved[%zu] is %d, must be 0", name, i,
            (int)f->reserved[i]);
  return CUMOE_OK;
}

static cumoe_status check_dense_format(const char *name, const cumoe_format *f)
{
  static const cumoe_format dense;
  REQUIRE(same_format(f, &dense), CUMOE_ERR_INVALID_ARGUMENT, "%s.element is 0 (dense), all of %s must be 0", name,
          name);
  return CUMOE_OK;
}

/* How the codes lie. */
static cumoe_status check_codes(const char *name, const cumoe_format *f, format_use use)
{
  const bool four = format_bits(class_of(f, 0)) == 4;
  const int32_t most = f->element == CUMOE_ELEMENT_U4 ? 15 : 0;
  REQUIRE(f->word == 0 || f->word == 1 || (f->word == 4 && (four || f->element == CUMOE_ELEMENT_U8)),
          CUMOE_ERR_INVALID_ARGUMENT, "%s.word is %d, must be 0, 1, or 4 for codes of 4 bits and U8", name,
          (int)f->word);
  if (f->element == CUMOE_ELEMENT_U8)
    REQUIRE(f->offset == 128, CUMOE_ERR_NOT_SUPPORTED, "%s.offset is %d, must be 128 for U8", name, (int)f->offset);
  else
    REQUIRE(f->offset >= 0 && f->offset <= most, CUMOE_ERR_INVALID_ARGUMENT, "%s.offset is %d, must be 0 .. %d", name,
            (int)f->offset, (int)most);
  REQUIRE(f->packed == CUMOE_PACKED_IN || f->packed == CUMOE_PACKED_OUT, CUMOE_ERR_INVALID_ARGUMENT,
          "%s.packed is %d, not a cumoe_packing", name, (int)f->packed);
  REQUIRE(f->split >= 0, CUMOE_ERR_INVALID_ARGUMENT, "%s.split is %d, must not be negative", name, (int)f->split);
  REQUIRE(use == FORMAT_REPACK ||
              (f->packed == CUMOE_PACKED_IN && f->order == 0 && f->split <= 1 && f->element != CUMOE_ELEMENT_S4),
          CUMOE_ERR_LAYOUT, "%s: packed %d, order 0x%x, split %d, element %d is read after cumoe_weights_repack only",
          name, (int)f->packed, f->order, (int)f->split, (int)f->element);
  return CUMOE_OK;
}

static bool scale_type_fits(const cumoe_format *f)
{
  if (f->element == CUMOE_ELEMENT_E2M1) return f->scale == CUMOE_E8M0 || f->scale == CUMOE_E4M3;
  if (f->scale == CUMOE_E8M0) return f->element == CUMOE_ELEMENT_E4M3;
  return f->scale == CUMOE_F32 || f->scale == CUMOE_F16 || f->scale == CUMOE_BF16;
}

static cumoe_status check_scales(const char *name, const cumoe_format *f)
{
  const int32_t fixed = f->element == CUMOE_ELEMENT_E2M1 ? (f->scale == CUMOE_E4M3 ? 16 : 32) : 0;
  REQUIRE(scale_type_fits(f), CUMOE_ERR_NOT_SUPPORTED, "%s.scale is %s, which scales of element %d are not", name,
          say_dtype(f->scale).text, (int)f->element);
  REQUIRE(f->block[0] >= 0 && f->block[1] >= 0 && f->block[1] % 16 == 0, CUMOE_ERR_NOT_SUPPORTED,
          "%s.block is {%d, %d}, must be 0 or positive, and the second a multiple of 16", name, (int)f->block[0],
          (int)f->block[1]);
  REQUIRE(!fixed || f->block[1] == fixed, CUMOE_ERR_NOT_SUPPORTED, "%s.block[1] is %d, must be %d with scales of %s",
          name, (int)f->block[1], (int)fixed, say_dtype(f->scale).text);
  REQUIRE(f->origin[0] <= MOST_PLACE && f->origin[1] <= MOST_PLACE, CUMOE_ERR_NOT_SUPPORTED,
          "%s.origin is {%d, %d}, must be at most {%d, %d}", name, (int)f->origin[0], (int)f->origin[1], MOST_PLACE,
          MOST_PLACE);
  REQUIRE(f->origin[0] >= 0 && f->origin[1] >= 0 && f->origin[1] % (fixed ? fixed : 16) == 0, CUMOE_ERR_NOT_SUPPORTED,
          "%s.origin is {%d, %d}, must not be negative, and the second a multiple of %d", name, (int)f->origin[0],
          (int)f->origin[1], (int)(fixed ? fixed : 16));
  REQUIRE(f->block[0] || f->origin[0] == 0, CUMOE_ERR_INVALID_ARGUMENT, "%s.origin[0] is %d, must be 0 with block[0] 0",
          name, (int)f->origin[0]);
  REQUIRE(f->joined == 0 || f->joined == 1, CUMOE_ERR_INVALID_ARGUMENT, "%s.joined is %d, must be 0 or 1", name,
          (int)f->joined);
  return CUMOE_OK;
}

static cumoe_status check_extras(const char *name, const cumoe_format *f)
{
  const bool codes = f->zero == CUMOE_ZERO_CODES_OUT, values = f->zero == CUMOE_ZERO_VALUES;
  REQUIRE(f->zero == CUMOE_ZERO_NONE || ((codes || values) && f->element == CUMOE_ELEMENT_U4), CUMOE_ERR_NOT_SUPPORTED,
          "%s.zero is %d, must be ZERO_NONE, or a cumoe_zero with element U4", name, (int)f->zero);
  REQUIRE(f->zero_add == 0 || (codes && f->zero_add >= -16 && f->zero_add <= 16), CUMOE_ERR_INVALID_ARGUMENT,
          "%s.zero_add is %d, must be -16 .. 16, and 0 without ZERO_CODES_OUT", name, (int)f->zero_add);
  REQUIRE(f->global == CUMOE_GLOBAL_NONE ||
              ((f->global == CUMOE_GLOBAL_TIMES || f->global == CUMOE_GLOBAL_OVER) && f->element == CUMOE_ELEMENT_E2M1),
          CUMOE_ERR_NOT_SUPPORTED, "%s.global is %d, must be GLOBAL_NONE, or a cumoe_global with element E2M1", name,
          (int)f->global);
  return CUMOE_OK;
}

static cumoe_status check_rows(const char *name, const cumoe_format *f)
{
  const bool any = f->rows != CUMOE_ROWS_AS_THEY_ARE, s8 = f->element == CUMOE_ELEMENT_S8;
  REQUIRE(f->rows >= CUMOE_ROWS_AS_THEY_ARE && f->rows <= CUMOE_ROWS_STATIC_EXPERT, CUMOE_ERR_INVALID_ARGUMENT,
          "%s.rows is %d, not a cumoe_rows", name, (int)f->rows);
  REQUIRE(!any || s8 || f->element == CUMOE_ELEMENT_E4M3, CUMOE_ERR_NOT_SUPPORTED,
          "%s.rows is %d, must be ROWS_AS_THEY_ARE with element %d", name, (int)f->rows, (int)f->element);
  REQUIRE(f->row_element == 0 || (any && f->row_element == f->element), CUMOE_ERR_NOT_SUPPORTED,
          "%s.row_element is %d, must be 0, or %d as the weights", name, (int)f->row_element, (int)f->element);
  REQUIRE(f->row_group == (f->rows == CUMOE_ROWS_GROUP ? ROW_GROUP : 0), CUMOE_ERR_NOT_SUPPORTED,
          "%s.row_group is %d, must be %d with ROWS_GROUP, else 0", name, (int)f->row_group, ROW_GROUP);
  REQUIRE(f->row_scale == 0 || f->row_scale == CUMOE_F32 || (f->row_scale == CUMOE_E8M0 && any),
          CUMOE_ERR_NOT_SUPPORTED, "%s.row_scale is %s, must be f32, or e8m0 where activations are quantised", name,
          say_dtype(f->row_scale).text);
  REQUIRE(f->act_order == 0 || (f->act_order == 1 && !any), CUMOE_ERR_NOT_SUPPORTED,
          "%s.act_order is %d, must be 0, or 1 with ROWS_AS_THEY_ARE", name, (int)f->act_order);
  return CUMOE_OK;
}

/* An interleaved channel's gate and up are neighbours, in one block. */
cumoe_status check_halves(const char *name, const cumoe_format *f, bool concatenated, bool interleaved)
{
  REQUIRE(!interleaved || f->block[0] <= 1 || (f->block[0] % 2 == 0 && f->origin[0] % 2 == 0), CUMOE_ERR_LAYOUT,
          "%s: block[0] %d, origin[0] %d, must be even (or 1, 0) where gate and up are interleaved", name,
          (int)f->block[0], (int)f->origin[0]);
  REQUIRE(!f->joined || concatenated, CUMOE_ERR_LAYOUT, "%s.joined is 1, which is for a concatenated gate_up", name);
  return CUMOE_OK;
}

cumoe_status check_format(const char *name, const cumoe_format *f, int64_t in, int32_t dtype, format_use use)
{
  TRY(check_reserved(name, f));
  REQUIRE(f->ggml == 0, CUMOE_ERR_LAYOUT, "%s.ggml is %d: blocks of GGUF are read after cumoe_weights_repack only",
          name, (int)f->ggml);
  if (is_dense(f)) return check_dense_format(name, f);
  REQUIRE(f->element >= CUMOE_ELEMENT_DENSE && f->element <= CUMOE_ELEMENT_S4, CUMOE_ERR_INVALID_ARGUMENT,
          "%s.element is %d, not a cumoe_element", name, (int)f->element);
  REQUIRE(dtype == CUMOE_BF16 || dtype == CUMOE_F16, CUMOE_ERR_NOT_SUPPORTED,
          "%s.element is %d: activations are %s, must be bf16 or f16", name, (int)f->element, say_dtype(dtype).text);
  TRY(check_codes(name, f, use));
  TRY(check_scales(name, f));
  TRY(check_extras(name, f));
  TRY(check_rows(name, f));
  const int64_t unit = 128 / format_bits(class_of(f, dtype));
  REQUIRE(in % unit == 0, CUMOE_ERR_NOT_SUPPORTED, "%s: rows have %lld codes, must be a multiple of %lld (16 bytes)",
          name, (long long)in, (long long)unit);
  return CUMOE_OK;
}
