/* The kernel table in public (experimental): for tests, tuning and the curious. */
#define CUMOE_EXPERIMENTAL
#include "../include/cumoe/stages.h"
#include "check.h"
#include "variants.h"

int32_t cumoe_variant_count(void)
{
  return variant_count;
}

cumoe_status cumoe_variant_get(cumoe_context handle, int32_t index, cumoe_variant_info *info)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (index < 0 || index >= variant_count)
    return fail(CUMOE_ERR_INVALID_ARGUMENT, "index is %d, must be 0 .. %d", (int)index, (int)variant_count - 1);
  TRY(check_struct("info", info));
  const variant *v = &variants[index];
  const cumoe_variant_info row = {
      .op = v->op_name, .name = v->name, .usable = v->cpu ? on_cpu(context) : context->kernels[index] != NULL};
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
  if (v->cpu ? !on_cpu(context) : context->kernels[index] == NULL)
    return fail(CUMOE_ERR_NOT_SUPPORTED, "%s does not run on this context's device", v->name);
  context->machine.forced[v->op] = index + 1;
  return CUMOE_OK;
}
