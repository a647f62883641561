/* The normal form of weights: every documented layout becomes one (expert_matrix in kernels/args.h). */
#include "weights_desc.h"

halves halves_of_up(const cumoe_weights_desc *d, int32_t dtype)
{
  halves h = {.channels = d->inter,
              .count = d->gate_order == CUMOE_UNGATED ? 1 : 2,
              .step = is_interleaved(d->gate_order) ? 2 : 1,
              .major = d->up_major,
              .format = &d->up_format,
              .class = class_of(&d->up_format, dtype)};
  if (d->gate_order == CUMOE_UNGATED || d->gate_order == CUMOE_GATE_UP_SEPARATE) {
    h.of[0] = (half){d->gate_order == CUMOE_UNGATED ? &d->up : &d->gate, 0};
    h.of[1] = (half){&d->up, 0};
    return h;
  }
  const int gate = d->gate_order == CUMOE_GATE_UP_CONCAT || d->gate_order == CUMOE_GATE_UP_INTERLEAVED ? 0 : 1;
  h.concatenated = h.step == 1;
  h.of[gate] = (half){&d->gate_up, 0};
  h.of[1 - gate] = (half){&d->gate_up, h.concatenated ? d->inter : 1};
  return h;
}

halves halves_of_down(const cumoe_weights_desc *d, int32_t dtype)
{
  return (halves){.of = {{&d->down, 0}},
                  .count = 1,
                  .channels = d->hidden,
                  .step = 1,
                  .major = d->down_major,
                  .format = &d->down_format,
                  .class = class_of(&d->down_format, dtype)};
}

int64_t code_offset(const halves *h, int i)
{
  const cumoe_view *v = &h->of[i].projection->data;
  const int64_t stride = h->major == CUMOE_OUT_IN ? v->ld : 1;
  return h->of[i].first * stride * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v->dtype);
}

/* The row of an expert's scales in which a half begins, and the place of its first channel in that block. Blocks that
 * run through both halves are counted from the first one's origin. */
static int64_t scale_row_of(const halves *h, int i, int32_t *origin)
{
  const cumoe_format *f = h->format;
  const int64_t first = h->of[i].first;
  const bool apart = first && h->concatenated && !f->joined;
  *origin = 0;
  if (f->block[0] == 0) return apart;
  if (f->block[0] == 1) return first + f->origin[0] * (apart ? 2 : 1); /* a row each, whatever the step */
  *origin = f->origin[0] / h->step;
  if (h->step == 2 || !h->concatenated || first == 0) return 0;
  if (apart) return blocks_of(f->block[0], f->origin[0], h->channels);
  *origin = (int32_t)((f->origin[0] + first) % f->block[0]);
  return (f->origin[0] + first) / f->block[0];
}

int64_t scale_offset(const halves *h, int i)
{
  int32_t origin;
  const cumoe_view *v = &h->of[i].projection->scale.data;
  if (is_dense(h->format)) return 0;
  return scale_row_of(h, i, &origin) * v->ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v->dtype);
}

int64_t zero_offset(const halves *h, int i)
{
  int32_t origin;
  const int64_t ld = h->of[i].projection->zero.data.ld;
  if (has_values(h->format))
    return scale_row_of(h, i, &origin) * ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)h->format->scale);
  return !h->format->zero ? 0 : h->of[i].first / 8 * ld * 4;
}

/* From one row of scales, or of values, to that of the next block of a half. */
static int64_t block_stride(const halves *h, const cumoe_array *a)
{
  const int32_t block = h->format->block[0];
  return block == 0 ? 0 : a->data.ld * (block == 1 ? h->step : 1);
}

static scale_matrix scale_form(const halves *h)
{
  const cumoe_format *f = h->format;
  const cumoe_array *first = &h->of[0].projection->scale;
  if (is_dense(f)) return (scale_matrix){.block_n = 1, .block_k = 1};
  scale_matrix s = {.expert_stride = expert_stride_of(first), .dtype = f->scale, .k_origin = f->origin[1]};
  s.block_n = f->block[0] == 0 ? (int32_t)ROWS_ONE_GROUP : f->block[0] > 1 ? f->block[0] / h->step : 1;
  s.n_stride = block_stride(h, first);
  s.block_k = f->block[1] ? f->block[1] : (int32_t)ROWS_ONE_GROUP;
  s.k_stride = f->block[1] ? 1 : 0;
  if (f->block[1] == 0) s.k_origin = 0;
  for (int i = 0; i < h->count; ++i) {
    (void)scale_row_of(h, i, &s.n_origin[i]);
    s.base[i] = bytes_at(h->of[i].projection->scale.data.data, scale_offset(h, i));
  }
  return s;
}

static zero_matrix zero_form(const halves *h)
{
  const cumoe_array *first = &h->of[0].projection->zero;
  if (!h->format->zero) return (zero_matrix){0};
  zero_matrix z = {.expert_stride = expert_stride_of(first),
                   .n_stride = has_values(h->format) ? block_stride(h, first) : first->data.ld,
                   .k_stride = h->format->block[1] ? 1 : 0,
                   .add = h->format->zero_add};
  for (int i = 0; i < h->count; ++i) z.base[i] = bytes_at(h->of[i].projection->zero.data.data, zero_offset(h, i));
  return z;
}

static void set_globals(const halves *h, expert_matrix *m)
{
  const cumoe_view *first = &h->of[0].projection->global;
  if (!h->format->global) return;
  m->global_over = h->format->global == CUMOE_GLOBAL_OVER;
  m->global_stride = first->ld;
  for (int i = 0; i < h->count; ++i) {
    const cumoe_view *v = &h->of[i].projection->global;
    m->global[i] = (const float *)v->data + (v->cols > 1 ? i : 0);
  }
}

/* Strides of one row or one expert may be any: nobody steps by them. */
static int64_t in_codes(int64_t stride, int64_t codes)
{
  return (int64_t)((uint64_t)stride * (uint64_t)codes);
}

expert_matrix normal_form(const halves *h)
{
  const cumoe_projection *first = h->of[0].projection;
  const cumoe_array data = data_of(first);
  const cumoe_view *v = &first->data, *bias = &first->bias;
  const int64_t codes = storage_codes(h->format);
  expert_matrix m = {.format = h->class, .offset = h->format->offset};
  m.expert_stride = in_codes(expert_stride_of(&data), codes);
  m.n_stride = in_codes(h->major == CUMOE_OUT_IN ? in_codes(v->ld, codes) : 1, h->step);
  m.k_stride = h->major == CUMOE_OUT_IN ? 1 : v->ld;
  m.bias_expert_stride = bias->ld;
  m.bias_n_stride = h->step;
  m.bias_dtype = bias->data ? bias->dtype : DT_NONE;
  for (int i = 0; i < h->count; ++i) {
    const cumoe_projection *p = h->of[i].projection;
    m.base[i] = bytes_at(p->data.data, code_offset(h, i));
    m.bias[i] = bytes_at(p->bias.data, h->of[i].first * (int64_t)cumoe_dtype_bytes((cumoe_dtype)p->bias.dtype));
  }
  m.scale = scale_form(h);
  m.zero = zero_form(h);
  set_globals(h, &m);
  return m;
}
