#include "parts.h"

#include <math.h>
#include <string.h>

/* ---- weights --------------------------------------------------------------------------------------- */

/* The matrix that a part is in; of codes, with what their format has besides. */
static host_projection projection_new(const host_weights *w, int part, weights_form form)
{
  const channel_place at = oracle_channel(w, part, 0, 0);
  const cumoe_format *f = at.format;
  const bool out_in = (part == PLAIN_DOWN ? form.down_major : form.up_major) == CUMOE_OUT_IN;
  const int64_t groups = format_blocks(f->block[1], f->origin[1], at.ins), e = w->experts;
  host_projection p = {0};
  if (form.bias) p.bias = tensor_new(form.bias, e, at.outs);
  if (format_is_dense(f)) {
    p.data = tensor_new(w->dtype, e * (out_in ? at.outs : at.ins), out_in ? at.ins : at.outs);
    return p;
  }
  p.data = tensor_new(format_storage(f), e * at.outs, at.ins / format_unit(f));
  p.scale = tensor_new(f->scale, e * format_scale_rows(f, at.outs, at.halves, at.interleaved), groups);
  if (f->zero == CUMOE_ZERO_CODES_OUT) p.zero = tensor_new(CUMOE_I32, e * ((at.outs + 7) / 8), groups);
  if (f->zero == CUMOE_ZERO_VALUES) p.zero = tensor_new(f->scale, p.scale.rows, groups);
  if (f->global) p.global = tensor_new(CUMOE_F32, e, form.one_global ? 1 : at.halves);
  if (f->rows == CUMOE_ROWS_STATIC) p.input_scale = tensor_new(CUMOE_F32, 1, 1);
  if (f->rows == CUMOE_ROWS_STATIC_EXPERT) p.input_scale = tensor_new(CUMOE_F32, e, 1);
  if (f->act_order) p.order = tensor_new(CUMOE_I32, e, at.ins);
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
                    .down_major = form.down_major,
                    .up_format = form.up,
                    .down_format = form.down};
  bool separate = form.gate_order == CUMOE_GATE_UP_SEPARATE, ungated = form.gate_order == CUMOE_UNGATED;
  if (!separate && !ungated) w.gate_up = projection_new(&w, PLAIN_UP, form);
  if (separate) w.gate = projection_new(&w, PLAIN_GATE, form);
  if (separate || ungated) w.up = projection_new(&w, PLAIN_UP, form);
  w.down = projection_new(&w, PLAIN_DOWN, form);
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

/* Every code but NaN, all alike often. */
static void fill_codes(rng *r, const tensor *t, const cumoe_format *f)
{
  const size_t bytes = (size_t)(t->rows * t->cols) * cumoe_dtype_bytes((cumoe_dtype)t->dtype);
  for (size_t i = 0; i < bytes; i++) {
    do t->data[i] = (unsigned char)(rng_next(r) >> 32);
    while (f->element == CUMOE_ELEMENT_E4M3 && (t->data[i] & 0x7f) == 0x7f);
  }
}

/* Root of the mean of the squares of all values. */
static double spread_of(const cumoe_format *f)
{
  const double middle = f->offset + (f->zero ? 7.5 + f->zero_add : 0);
  double sum = 0;
  const unsigned count = element_codes(f->element);
  for (unsigned c = 0; c < count; c++) {
    const double v = element_value(f->element, c) - middle;
    if (!isnan(v)) sum += v * v;
  }
  return sqrt(sum / count);
}

/* Each within a factor of two of what makes weights of the deviation; those of e4m3 by what their global says. */
static void fill_scales(rng *r, const host_projection *p, const cumoe_format *f, double deviation)
{
  const double middle = f->global ? 60 : deviation / spread_of(f);
  for (int64_t i = 0; i < p->scale.rows * p->scale.cols; i++) {
    const double value = middle * (0.6 + rng_uniform(r));
    tensor_set(&p->scale, 0, i,
               f->scale == CUMOE_E8M0   ? 127 + floor(log2(middle)) + (double)rng_below(r, 3)
               : f->scale == CUMOE_E4M3 ? e4m3_nearest(value)
                                        : value);
  }
  for (int64_t i = 0; i < p->global.rows * p->global.cols; i++) {
    const double value = deviation / spread_of(f) / 60 * (0.6 + rng_uniform(r));
    tensor_set(&p->global, 0, i, f->global == CUMOE_GLOBAL_OVER ? 1 / value : value);
  }
  if (f->zero == CUMOE_ZERO_CODES_OUT) fill_codes(r, &p->zero, f);
  for (int64_t i = 0; f->zero == CUMOE_ZERO_VALUES && i < p->zero.rows * p->zero.cols; i++)
    tensor_set(&p->zero, 0, i, -(5 + 5 * rng_uniform(r)) * tensor_get(&p->scale, 0, i));
  for (int64_t e = 0; e < p->input_scale.rows; e++)
    tensor_set(&p->input_scale, e, 0, (3.1 + (double)e) / (f->element == CUMOE_ELEMENT_E4M3 ? 448 : 127));
}

/* Each of 0 .. in - 1 once, by chance. */
static void fill_order(rng *r, const tensor *order)
{
  for (int64_t e = 0; e < order->rows; e++)
    for (int64_t k = 0; k < order->cols; k++) {
      const int64_t other = rng_below(r, k + 1);
      tensor_set(order, e, k, tensor_get(order, e, other));
      tensor_set(order, e, other, (double)k);
    }
}

void weights_fill(rng *r, host_weights *w, fill kind)
{
  host_projection *all[] = {&w->gate_up, &w->gate, &w->up, &w->down};
  for (int i = 0; i < 4; i++) {
    const cumoe_format *f = i == 3 ? &w->down_format : &w->up_format;
    const double depth = i == 3 ? w->inter : w->hidden;
    if (all[i]->data.data == NULL) continue;
    if (all[i]->bias.data) fill_tensor(r, &all[i]->bias, kind, 4);
    if (format_is_dense(f)) {
      fill_tensor(r, &all[i]->data, kind, depth);
    } else {
      fill_codes(r, &all[i]->data, f);
      fill_scales(r, all[i], f, 1 / sqrt(depth));
      fill_order(r, &all[i]->order);
    }
  }
  if (w->gate.input_scale.data) w->gate.input_scale = w->up.input_scale; /* both multiply the same x */
  if (w->gate.order.data) w->gate.order = w->up.order;
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

/* Expert e's matrix lies at place (e * step) mod E of the stack: with pointers, out of order. */
static cumoe_array array_put(cumoe_context context, const tensor *t, int32_t experts, int64_t gap, int64_t pad,
                             bool by_pointers)
{
  cumoe_array a = {0};
  if (t->data == NULL) return a;
  int64_t rows = t->rows / experts, pitch = rows + gap, bytes = (int64_t)cumoe_dtype_bytes((cumoe_dtype)t->dtype);
  cumoe_view_mut stack = device_new(context, t->dtype, experts * pitch, t->cols, pad);
  const void **pointers = scratch((size_t)experts, sizeof *pointers);
  for (int64_t e = 0; e < experts; e++) {
    int64_t at = by_pointers ? experts - 1 - e : e;
    tensor one = {t->dtype, rows, t->cols, t->data + e * rows * t->cols * bytes};
    cumoe_view_mut slice;
    CHECK_OK(cumoe_view_rows_mut(stack, at * pitch, rows, &slice));
    device_set(context, slice, &one);
    pointers[e] = slice.data;
  }
  CHECK_OK(cumoe_view_rows(cumoe_const(stack), 0, rows, &a.data));
  a.expert_stride = gap ? pitch * stack.ld : 0;
  if (by_pointers) {
    a.per_expert = pointers;
    a.data.data = NULL;
    a.data.owner = 0;
    a.expert_stride = 0;
  }
  return a;
}

/* Rows of weights lie 16 bytes apart; scales and zero points may lie anywhere. */
static cumoe_projection projection_put(cumoe_context context, const host_projection *p, int32_t experts,
                                       weights_form form)
{
  cumoe_projection result = {0};
  if (p->data.data == NULL) return result;
  const int64_t pad = form.gap ? 48 / (int64_t)cumoe_dtype_bytes((cumoe_dtype)p->data.dtype) : 0;
  const cumoe_array data = array_put(context, &p->data, experts, form.gap, pad, form.per_expert);
  result.data = data.data;
  result.per_expert = data.per_expert;
  result.expert_stride = data.expert_stride;
  result.scale = array_put(context, &p->scale, experts, form.gap / 2, form.gap, form.per_expert);
  if (p->scale.dtype == CUMOE_E8M0 && form.gap % 2) result.scale.data.dtype = CUMOE_U8; /* as checkpoints call it */
  result.zero = array_put(context, &p->zero, experts, form.gap % 2, form.gap / 2, form.per_expert && form.gap % 2 == 0);
  if (p->global.data) result.global = device_put(context, &p->global, form.gap);
  if (p->input_scale.data) result.input_scale = device_put(context, &p->input_scale, form.gap);
  result.order = array_put(context, &p->order, experts, form.gap % 2, form.gap, form.per_expert && form.gap < 2);
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
  if (d.gate.data.dtype) d.up.input_scale = d.gate.input_scale, d.up.order = d.gate.order;
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
