#include "parts.h"

#include <math.h>
#include <string.h>

/* ---- weights --------------------------------------------------------------------------------------- */

static host_projection projection_new(const host_weights *w, int64_t outs, int64_t ins, int32_t major, int32_t bias)
{
  host_projection p = {0};
  int64_t rows = major == CUMOE_OUT_IN ? outs : ins, cols = major == CUMOE_OUT_IN ? ins : outs;
  p.data = tensor_new(w->dtype, w->experts * rows, cols);
  if (bias) p.bias = tensor_new(bias, w->experts, outs);
  return p;
}

host_weights weights_new(const cumoe_moe_desc *d, int32_t experts, int32_t inter, weights_form form)
{
  host_weights w = {.experts = experts,
                    .hidden = d->hidden,
                    .inter = inter,
                    .dtype = d->dtype,
                    .gate_order = form.gate_order,
                    .up_major = form.up_major,
                    .down_major = form.down_major};
  bool separate = form.gate_order == CUMOE_GATE_UP_SEPARATE, ungated = form.gate_order == CUMOE_UNGATED;
  if (!separate && !ungated) w.gate_up = projection_new(&w, 2 * (int64_t)inter, d->hidden, form.up_major, form.bias);
  if (separate) w.gate = projection_new(&w, inter, d->hidden, form.up_major, form.bias);
  if (separate || ungated) w.up = projection_new(&w, inter, d->hidden, form.up_major, form.bias);
  w.down = projection_new(&w, d->hidden, inter, form.down_major, form.bias);
  return w;
}

/* Large tensors take runs of a few thousand random numbers, from other places of them each time. */
static void fill_normal(rng *r, const tensor *t, double deviation)
{
  enum { POOL = 8191 };
  const int64_t count = t->rows * t->cols, bytes = (int64_t)cumoe_dtype_bytes((cumoe_dtype)t->dtype);
  const tensor pool = tensor_normal(r, t->dtype, 1, count < POOL ? count : POOL, 0, deviation);
  for (int64_t at = 0; at < count;) {
    const int64_t from = count <= POOL ? 0 : rng_below(r, POOL), rest = pool.cols - from,
                  run = rest < count - at ? rest : count - at;
    memcpy(t->data + at * bytes, pool.data + from * bytes, (size_t)(run * bytes));
    at += run;
  }
}

tensor random_tensor(rng *r, int32_t dtype, int64_t rows, int64_t cols, double deviation)
{
  const tensor t = tensor_new(dtype, rows, cols);
  fill_normal(r, &t, deviation);
  return t;
}

static void fill_tensor(rng *r, const tensor *t, fill kind, double depth)
{
  if (kind == FILL_NORMAL) fill_normal(r, t, 1 / sqrt(depth));
  for (int64_t i = 0; i < t->rows * t->cols && kind != FILL_NORMAL; i++)
    tensor_set(t, 0, i, kind == FILL_SAME_SIGN ? (1 + 0.5 * rng_uniform(r)) / depth : (double)rng_below(r, 3) - 1);
}

void weights_fill(rng *r, host_weights *w, fill kind)
{
  host_projection *all[] = {&w->gate_up, &w->gate, &w->up, &w->down};
  for (int i = 0; i < 4; i++) {
    if (all[i]->data.data == NULL) continue;
    fill_tensor(r, &all[i]->data, kind, i == 3 ? w->inter : w->hidden);
    if (all[i]->bias.data) fill_tensor(r, &all[i]->bias, kind, 4);
  }
}

host_weights random_weights(rng *r, const cumoe_moe_desc *d, int32_t experts, int32_t inter, weights_form form)
{
  host_weights w = weights_new(d, experts, inter, form);
  weights_fill(r, &w, FILL_NORMAL);
  oracle_prepare(&w);
  return w;
}

void weights_set(host_weights *w, int part, int64_t expert, int64_t out, int64_t in, double value)
{
  place at = oracle_place(w, part, expert, out, in);
  tensor_set(&at.projection->data, at.row, at.col, value);
}

/* Expert e's matrix lies at place (e * step) mod E of the stack: with per_expert, out of order. */
static cumoe_projection projection_put(cumoe_context context, const host_projection *p, int32_t experts,
                                       weights_form form)
{
  cumoe_projection result = {0};
  if (p->data.data == NULL) return result;
  int64_t rows = p->data.rows / experts, pitch = rows + form.gap,
          bytes = (int64_t)cumoe_dtype_bytes((cumoe_dtype)p->data.dtype);
  cumoe_view_mut stack = device_new(context, p->data.dtype, experts * pitch, p->data.cols, form.gap ? 24 : 0);
  const void **pointers = scratch((size_t)experts, sizeof *pointers);
  for (int64_t e = 0; e < experts; e++) {
    int64_t at = form.per_expert ? experts - 1 - e : e;
    tensor one = {p->data.dtype, rows, p->data.cols, p->data.data + e * rows * p->data.cols * bytes};
    cumoe_view_mut slice;
    CHECK_OK(cumoe_view_rows_mut(stack, at * pitch, rows, &slice));
    device_set(context, slice, &one);
    pointers[e] = slice.data;
  }
  CHECK_OK(cumoe_view_rows(cumoe_const(stack), 0, rows, &result.data));
  result.expert_stride = form.gap ? pitch * stack.ld : 0;
  if (form.per_expert) {
    result.per_expert = pointers;
    result.data.data = NULL;
    result.data.owner = 0;
    result.expert_stride = 0;
  }
  if (p->bias.data) result.bias = device_put(context, &p->bias, form.gap);
  return result;
}

cumoe_weights weights_put(cumoe_context context, const host_weights *w, weights_form form)
{
  cumoe_weights weights = NULL;
  cumoe_weights_desc d = weights_desc(w);
  d.gate_up = projection_put(context, &w->gate_up, w->experts, form);
  d.gate = projection_put(context, &w->gate, w->experts, form);
  d.up = projection_put(context, &w->up, w->experts, form);
  d.down = projection_put(context, &w->down, w->experts, form);
  CHECK_OK(cumoe_weights_bind(context, &d, &weights));
  return weights;
}

/* ---- route ----------------------------------------------------------------------------------------- */

static void place_expert(const tensor *destinations, int32_t expert, int64_t first, host_route *r)
{
  int64_t row = first;
  for (int64_t pair = 0; pair < destinations->rows * destinations->cols; pair++) {
    if (tensor_get(destinations, 0, pair) != expert) continue;
    tensor_set(&r->slot_row, 0, pair, (double)row);
    tensor_set(&r->row_pair, 0, row++, (double)pair);
  }
  tensor_set(&r->counts, 0, expert, (double)(row - first));
  r->rows = row;
}

host_route route_new(const tensor *destinations, int32_t experts)
{
  int64_t pairs = destinations->rows * destinations->cols, spare = 0, next = 0;
  host_route r = {tensor_new(CUMOE_I32, 1, experts), tensor_new(CUMOE_I32, 1, experts + 1),
                  tensor_new(CUMOE_I32, 1, pairs), tensor_new(CUMOE_I32, destinations->rows, destinations->cols), 0};
  for (int64_t pair = 0; pair < pairs; pair++) {
    double to = tensor_get(destinations, 0, pair);
    tensor_set(&r.row_pair, 0, pair, -7);
    if (to >= 0) continue;
    tensor_set(&r.slot_row, 0, pair, to);
    spare++;
  }
  for (int32_t e = 0; e < experts; e++) {
    if (spare > 0 && e % 3 == 1) next++, spare--;
    tensor_set(&r.offsets, 0, e, (double)next);
    place_expert(destinations, e, next, &r);
    next = r.rows;
  }
  tensor_set(&r.offsets, 0, experts, (double)next);
  return r;
}

cumoe_route route_put(cumoe_context context, const host_route *r)
{
  cumoe_route route = {.size = sizeof route};
  route.counts = device_new(context, CUMOE_I32, 1, r->counts.cols, 1);
  route.offsets = device_new(context, CUMOE_I32, 1, r->offsets.cols, 1);
  route.row_pair = device_new(context, CUMOE_I32, 1, r->row_pair.cols, 1);
  route.slot_row = device_new(context, CUMOE_I32, r->slot_row.rows, r->slot_row.cols, 0);
  device_set(context, route.counts, &r->counts);
  device_set(context, route.offsets, &r->offsets);
  device_set(context, route.row_pair, &r->row_pair);
  device_set(context, route.slot_row, &r->slot_row);
  return route;
}

bool row_used(const host_route *r, int64_t row)
{
  return row < r->row_pair.cols && tensor_get(&r->row_pair, 0, row) >= 0;
}

void check_fault(cumoe_context context, cumoe_stream stream, int32_t code)
{
  cumoe_fault fault = {.size = sizeof fault};
  CHECK_OK(cumoe_fault_read(context, stream, &fault));
  CHECK_MSG(fault.code == code, "fault %d (token %lld, slot %d), want %d", fault.code, (long long)fault.token,
            fault.slot, code);
  CHECK_MSG(cumoe_fault_pending(context) == (code != CUMOE_FAULT_NONE), "fault_pending is %d",
            cumoe_fault_pending(context));
  CHECK_OK(cumoe_fault_clear(context, stream));
}
