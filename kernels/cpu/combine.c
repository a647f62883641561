/* out[t] = residual[t] + out_scale * (slots in order + shared), summed in double, rounded once; or the rows of
 * the slots unreduced. One unit is one token. */
#include <math.h>
#include <stddef.h>
#include "cpu.h"
#include "element.h"
#include "fault.h"

/* Where y(t, j) begins: a row of y, the token's own x, or nowhere (dropped). */
typedef struct source {
  const void *base;
  int64_t first;
} source;

static source slot_source(const combine_args *a, int64_t token, int32_t slot)
{
  int32_t row = a->slot_row[token * a->top_k + slot];
  if (row >= 0 && row < a->rows_cap) return (source){a->y, row * a->y_ld};
  if (row == ROW_IDENTITY && a->x != NULL) return (source){a->x, token * a->x_ld};
  if (row != ROW_DROPPED) record_fault(a->fault, FAULT_ROUTE, slot, token);
  return (source){NULL, 0};
}

static double slot_weight(const combine_args *a, int64_t token, int32_t slot)
{
  return a->pair_weights ? a->pair_weights[token * a->pair_weights_ld + slot] : 1;
}

static void copy_slots(const combine_args *a, int64_t token)
{
  for (int32_t slot = 0; slot < a->top_k; slot++) {
    source y = slot_source(a, token, slot);
    if (slot_weight(a, token, slot) == 0) y.base = NULL;
    int64_t to = (token * a->top_k + slot) * a->out_ld;
    for (int32_t i = 0; i < a->hidden; i++)
      store_element(a->out, to + i, a->out_dtype, y.base ? load_element(y.base, y.first + i, a->dtype) : 0);
  }
}

static void reduce_slots(const combine_args *a, int64_t token)
{
  source y[MAX_TOP_K];
  double weight[MAX_TOP_K], shared_weight = 1;
  for (int32_t slot = 0; slot < a->top_k; slot++) {
    y[slot] = slot_source(a, token, slot);
    weight[slot] = slot_weight(a, token, slot);
    if (weight[slot] == 0) y[slot].base = NULL; /* never multiplied: 0 * NaN would not be 0 */
    if (a->on_input) weight[slot] = 1;
  }
  if (a->shared_logit) shared_weight = 1 / (1 + exp(-(double)a->shared_logit[token * a->shared_logit_ld]));
  for (int32_t i = 0; i < a->hidden; i++) {
    double sum = 0;
    for (int32_t slot = 0; slot < a->top_k; slot++)
      if (y[slot].base) sum = f32_range(sum + weight[slot] * load_element(y[slot].base, y[slot].first + i, a->dtype));
    if (a->shared) sum = f32_range(sum + shared_weight * load_element(a->shared, token * a->shared_ld + i, a->dtype));
    double residual = a->residual ? load_element(a->residual, token * a->residual_ld + i, a->out_dtype) : 0;
    store_element(a->out, token * a->out_ld + i, a->out_dtype, residual + a->out_scale * sum);
  }
}

void cpu_combine(const void *args, int64_t begin, int64_t end)
{
  const combine_args *a = args;
  int64_t tokens = tokens_present(a->tokens);
  check_token_count(a->tokens, a->fault);
  for (int64_t token = begin; token < end && token < tokens; token++) {
    if (a->reduce)
      reduce_slots(a, token);
    else
      copy_slots(a, token);
  }
}
