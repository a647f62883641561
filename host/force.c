/* The kernel table in public (experimental): for tests, tuning and the curious. */
#define CUMOE_EXPERIMENTAL
#include "../include/cumoe/stages.h"
#include "check.h"
#include "context.h"
#include "status.h"
#include "variants.h"

int32_t cumoe_variant_count(void)
{
  return variant_count;
}

static cumoe_variant_info info_of(const variant *v)
{
  static const char *const scales[] = {[SCALE_none] = "none", [SCALE_out] = "out", [SCALE_block] = "block"};
  static const char *const majors[] = {[MAJOR_any] = "any", [MAJOR_K] = "K", [MAJOR_N] = "N"};
  return (cumoe_variant_info){.op = v->op_name,
                              .name = v->name,
                              .arch = v->arch_name,
                              .form = v->form_name,
                              .x = v->x,
                              .w = v->w,
                              .y = v->y,
                              .scale = v->bm ? scales[v->scale] : "",
                              .major = v->bm ? majors[v->major] : "",
                              .bm = v->bm,
                              .bn = v->bn,
                              .bk = v->bk,
                              .stages = v->stages,
                              .units = v->units,
                              .columns = v->columns,
                              .lanes = v->lanes,
                              .ahead = v->ahead,
                              .cluster = v->cluster,
                              .warps = v->threads / 32,
                              .ctas = v->ctas,
                              .smem = v->smem};
}

cumoe_status cumoe_variant_get(cumoe_context handle, int32_t index, cumoe_variant_info *info)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (index < 0 || index >= variant_count)
    return fail(CUMOE_ERR_INVALID_ARGUMENT, "index is %d, must be 0 .. %d", (int)index, (int)variant_count - 1);
  TRY(check_struct("info", info));
  cumoe_variant_info row = info_of(&variants[index]);
  TRY(load_for_row(context, index));
  row.usable = variants[index].cpu ? on_cpu(context) : context->kernels[index] != NULL;
  give_struct(&row, info);
  return CUMOE_OK;
}

cumoe_status cumoe_variant_force(cumoe_context handle, int32_t index)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (index < -1 || index >= variant_count)
    return fail(CUMOE_ERR_INVALID_ARGUMENT, "index is %d, must be -1 .. %d", (int)index, (int)variant_count - 1);
  if (index == -1) {
    for (int i = 0; i < OP_COUNT; ++i) context->machine.forced[i] = 0;
    return CUMOE_OK;
  }
  const variant *v = &variants[index];
  TRY(load_for_row(context, index));
  if (v->cpu ? !on_cpu(context) : context->kernels[index] == NULL)
    return fail(CUMOE_ERR_NOT_SUPPORTED, "%s does not run on this context's device", v->name);
  context->machine.forced[v->op] = index + 1;
  return CUMOE_OK;
}

/* ---- limits of the tune file ---- */

int32_t cumoe_limit_count(void)
{
  return LIMIT_COUNT;
}

static cumoe_status check_limit(int32_t index)
{
  REQUIRE(index >= 0 && index < (int32_t)LIMIT_COUNT, CUMOE_ERR_INVALID_ARGUMENT, "index is %d, must be 0 .. %d",
          (int)index, (int)LIMIT_COUNT - 1);
  return CUMOE_OK;
}

cumoe_status cumoe_limit_get(cumoe_context handle, int32_t index, cumoe_limit_info *info)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_limit(index));
  TRY(check_struct("info", info));
  const double *value = context->machine.limits[index];
  const limit_words words = words_of_limit((limit_name)index);
  cumoe_limit_info limit = {
      .name = words.name,
      .unit = words.unit,
      .text = words.text,
      .value = {value[WEIGHTS_w16], value[WEIGHTS_f32], value[WEIGHTS_f8], value[WEIGHTS_s8], value[WEIGHTS_w4]}};
  give_struct(&limit, info);
  return CUMOE_OK;
}

cumoe_status cumoe_limit_set(cumoe_context handle, int32_t index, int32_t weights, double value)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_limit(index));
  REQUIRE(weights >= 0 && weights < (int32_t)WEIGHTS_CLASSES, CUMOE_ERR_INVALID_ARGUMENT,
          "weights is %d, must be 0 .. %d", (int)weights, (int)WEIGHTS_CLASSES - 1);
  REQUIRE(value == value, CUMOE_ERR_INVALID_ARGUMENT, "value is NaN");
  context->machine.limits[index][weights] = value;
  return CUMOE_OK;
}
