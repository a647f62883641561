/* Binding weights: what a description says becomes an object, and the device gets its tables of pointers. */
#include "weights_desc.h"
#include "buffer.h"
#include "context.h"
#include "debug.h"
#include "memory.h"
#include "objects.h"
#include "pool.h"
#include "status.h"
#include "tmap.h"

#include <stdlib.h>

/* ---- pointer tables: they travel to the device once, here ---- */

enum { MAX_TABLES = 11 /* gate, up, down; codes, scales, zero points of each; orders of up and down */ };

typedef struct tables {
  const void **host, **device; /* MAX_TABLES rows of `experts` */
  size_t experts, rows;        /* rows used */
} tables;

/* Fills a row from an array of pointers, each `offset` bytes further; returns where it will lie on the device. */
static const void *const *add_table(tables *t, const cumoe_array *a, int64_t offset)
{
  if (!a->per_expert) return NULL;
  const size_t at = t->rows++ * t->experts;
  for (size_t e = 0; e < t->experts; ++e) t->host[at + e] = bytes_at(a->per_expert[e], offset);
  return (const void *const *)(t->device + at);
}

static void fill_tables(const halves *h, tables *t, expert_matrix *m)
{
  for (int i = 0; i < h->count; ++i) {
    const cumoe_projection *p = h->of[i].projection;
    const cumoe_array data = data_of(p);
    m->table[i] = add_table(t, &data, code_offset(h, i));
    m->scale.table[i] = add_table(t, &p->scale, scale_offset(h, i));
    m->zero.table[i] = (const uint32_t *const *)add_table(t, &p->zero, zero_offset(h, i));
  }
}

static bool points(const cumoe_projection *p)
{
  return p->per_expert || p->scale.per_expert || p->zero.per_expert || p->order.per_expert;
}

static cumoe_status upload_tables(struct context *context, struct weights *w, const halves *up, const halves *down)
{
  const cumoe_projection *last = up->of[up->count - 1].projection;
  if (!points(up->of[0].projection) && !points(last) && !points(down->of[0].projection)) return CUMOE_OK;
  const size_t bytes = MAX_TABLES * (size_t)w->experts * sizeof(void *);
  tables t = {.host = malloc(bytes), .experts = (size_t)w->experts};
  if (!t.host) return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", bytes);
  w->table_bytes = bytes;
  cumoe_status status = pool_alloc(context, bytes, NULL, &w->tables);
  if (status == CUMOE_OK) {
    t.device = w->tables;
    fill_tables(up, &t, &w->up);
    fill_tables(down, &t, &w->down);
    w->up_order.table = (const int32_t *const *)add_table(&t, &last->order, 0);
    w->down_order.table = (const int32_t *const *)add_table(&t, &down->of[0].projection->order, 0);
    const size_t used = t.rows * t.experts * sizeof(void *);
    status = memory_copy(context, w->tables, used, t.host, used, used, 1, cudaMemcpyHostToDevice, NULL);
    if (status == CUMOE_OK) status = memory_wait(context, NULL);
  }
  free(t.host);
  return status;
}

/* ---- what is bound ---- */

static int by_address(const void *a, const void *b)
{
  const uintptr_t x = *(const uintptr_t *)a, y = *(const uintptr_t *)b;
  return (x > y) - (x < y);
}

static void add_part(struct weights *w, bound_part part)
{
  w->parts[w->part_count++] = part;
}

/* The addresses of pointers go to `begins`; the part reads them there. */
static void note_array(struct weights *w, const char *name, const cumoe_array *a, uintptr_t *begins)
{
  const size_t experts = (size_t)w->experts, element = cumoe_dtype_bytes((cumoe_dtype)a->data.dtype);
  cumoe_view one = a->data;
  bound_part part = {.name = name, .owner = one.owner, .count = w->experts};
  if (array_absent(a)) return;
  if (a->per_expert) {
    for (size_t e = 0; e < experts; ++e) begins[e] = (uintptr_t)a->per_expert[e];
    qsort(begins, experts, sizeof *begins, by_address);
    one.data = (const void *)begins[0];
    part.begins = begins;
  }
  part.first = span_of(&one);
  part.stride = (uintptr_t)expert_stride_of(a) * element;
  add_part(w, part);
}

static void note_view(struct weights *w, const char *name, const cumoe_view *v)
{
  if (v->data) add_part(w, (bound_part){name, v->owner, span_of(v), 0, NULL, 1});
}

/* `begins`: room for four tables. */
static void note_projection(struct weights *w, const char *const *names, const cumoe_projection *p, uintptr_t *begins)
{
  const size_t experts = (size_t)w->experts;
  const cumoe_array data = data_of(p);
  note_array(w, names[0], &data, begins);
  note_array(w, names[1], &p->scale, begins + experts);
  note_array(w, names[2], &p->zero, begins + 2 * experts);
  note_array(w, names[3], &p->order, begins + 3 * experts);
  note_view(w, names[4], &p->bias);
  note_view(w, names[5], &p->global);
  note_view(w, names[6], &p->input_scale);
}

static void note_parts(const cumoe_weights_desc *d, struct weights *w)
{
#define PARTS(name)                                                                                                    \
  {                                                                                                                    \
#name, #name ".scale", #name ".zero", #name ".order", #name ".bias", #name ".global", #name ".input_scale"         \
  }
  static const char *const names[][7] = {PARTS(gate), PARTS(up), PARTS(gate_up), PARTS(down)};
#undef PARTS
  uintptr_t *const begins = w->begins;
  const size_t room = 4 * (size_t)w->experts;
  const bool separate = d->gate_order == CUMOE_GATE_UP_SEPARATE, ungated = d->gate_order == CUMOE_UNGATED;
  if (separate) note_projection(w, names[0], &d->gate, begins);
  if (separate || ungated)
    note_projection(w, names[1], &d->up, begins + room);
  else
    note_projection(w, names[2], &d->gate_up, begins + room);
  note_projection(w, names[3], &d->down, begins + 2 * room);
}

static uintptr_t begin_of(const bound_part *p, int32_t index)
{
  return p->begins ? p->begins[index] : p->first.begin + (uintptr_t)index * p->stride;
}

static span matrix_of(const bound_part *p, int32_t index)
{
  const uintptr_t begin = begin_of(p, index);
  return (span){begin, begin + (p->first.end - p->first.begin), p->first.width, p->first.pitch};
}

/* The first matrix that ends behind `address`; `count` without. */
static int32_t first_behind(const bound_part *p, uintptr_t address)
{
  const uintptr_t extent = p->first.end - p->first.begin;
  int32_t low = 0, high = p->count;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (begin_of(p, middle) + extent > address)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/* Looks at those matrices alone that the output may touch: most often none, for it lies elsewhere. */
static bool lies_over(const span *output, const bound_part *p)
{
  const uintptr_t extent = p->first.end - p->first.begin;
  if (output->begin == output->end || output->end <= p->first.begin) return false;
  if (output->begin >= begin_of(p, p->count - 1) + extent) return false;
  for (int32_t i = first_behind(p, output->begin); i < p->count && begin_of(p, i) < output->end; ++i) {
    const span matrix = matrix_of(p, i);
    if (spans_overlap(output, &matrix)) return true;
  }
  return false;
}

cumoe_status check_off_weights(const named_view *outputs, int count, const char *name, const struct weights *w)
{
  for (int i = 0; i < count; ++i) {
    const span output = span_of(&outputs[i].view);
    for (int32_t p = 0; p < w->part_count; ++p)
      REQUIRE(!lies_over(&output, &w->parts[p]), CUMOE_ERR_INVALID_ARGUMENT, "%s overlaps %s: %s", outputs[i].name,
              name, w->parts[p].name);
  }
  return CUMOE_OK;
}

/* Its matrices are in order: of most only the next one begins before they end, if that. */
static bool lies_over_itself(const bound_part *p)
{
  for (int32_t i = 0; i < p->count; ++i) {
    const span matrix = matrix_of(p, i);
    for (int32_t j = i + 1; j < p->count && begin_of(p, j) < matrix.end; ++j) {
      const span later = matrix_of(p, j);
      if (spans_overlap(&matrix, &later)) return true;
    }
  }
  return false;
}

static bool part_lies_over(const bound_part *p, const bound_part *other)
{
  if (p == other) return lies_over_itself(p);
  for (int32_t i = 0; i < p->count; ++i) {
    const span matrix = matrix_of(p, i);
    if (lies_over(&matrix, other)) return true;
  }
  return false;
}

cumoe_status check_apart(const char *name, const struct weights *w, const char *other_name, const struct weights *other)
{
  for (int32_t i = 0; i < w->part_count; ++i)
    for (int32_t j = 0; j < other->part_count; ++j)
      REQUIRE(!part_lies_over(&w->parts[i], &other->parts[j]), CUMOE_ERR_INVALID_ARGUMENT, "%s: %s overlaps %s: %s",
              name, w->parts[i].name, other_name, other->parts[j].name);
  return CUMOE_OK;
}

cumoe_status clear_weights(struct context *context, const struct weights *w, cumoe_stream stream)
{
  for (int32_t p = 0; p < w->part_count; ++p)
    for (int32_t i = 0; i < w->parts[p].count; ++i) {
      const span m = matrix_of(&w->parts[p], i);
      const uintptr_t rows = m.pitch ? (m.end - m.begin - m.width) / m.pitch + 1 : 1;
      TRY(memory_fill(context, (void *)m.begin, m.pitch, 0, m.width, rows, stream));
    }
  return CUMOE_OK;
}

/* ---- binding ---- */

/* What of an expert's own activations become. */
static row_order order_of(const halves *h)
{
  const cumoe_format *f = h->format;
  const cumoe_projection *p = h->of[h->count - 1].projection;
  row_order o = {.by_expert = by_expert(f)};
  if (f->rows == CUMOE_ROWS_STATIC_EXPERT) o.static_stride = p->input_scale.ld;
  if (!f->act_order) return o;
  o.base = p->order.data.data;
  o.stride = expert_stride_of(&p->order);
  return o;
}

static weight_major major_of(const expert_matrix *b)
{
  return b->k_stride == 1 ? MAJOR_K : MAJOR_N;
}

static bound_matrix facts_of(const halves *h, const expert_matrix *m, int32_t experts)
{
  const bool two = h->count == 2;
  return (bound_matrix){major_of(m), tmap_serves(m, (int32_t)h->channels, experts, two), scales_suit_codes(m, two)};
}

static cumoe_status bind(struct context *context, const cumoe_weights_desc *d, int32_t dtype, struct weights *w)
{
  const halves up = halves_of_up(d, dtype), down = halves_of_down(d, dtype);
  *w = (struct weights){.context = context,
                        .experts = d->experts,
                        .hidden = d->hidden,
                        .inter = d->inter,
                        .dtype = dtype,
                        .gated = up.count == 2,
                        .gate_order = d->gate_order,
                        .up_format = d->up_format,
                        .down_format = d->down_format};
  note_parts(d, w);
  w->up = normal_form(&up);
  w->down = normal_form(&down);
  w->up_rows = rows_of(up.format, up.of[0].projection->input_scale.data);
  w->down_rows = rows_of(down.format, d->down.input_scale.data);
  w->up_order = order_of(&up);
  w->down_order = order_of(&down);
  TRY(load_for_weights(context, up.class));
  TRY(load_for_weights(context, down.class));
  TRY(upload_tables(context, w, &up, &down));
  w->up_facts = facts_of(&up, &w->up, w->experts);
  w->down_facts = facts_of(&down, &w->down, w->experts);
  return CUMOE_OK;
}

/* ---- as objects ---- */

static cumoe_status check_owners(const char *name, const struct weights *w)
{
  for (int32_t i = 0; i < w->part_count; ++i)
    REQUIRE(w->parts[i].owner == 0 || buffer_lives(w->parts[i].owner), CUMOE_ERR_STALE_HANDLE,
            "%s: %s is bound to a buffer that was freed", name, w->parts[i].name);
  return CUMOE_OK;
}

cumoe_status find_weights(const char *name, cumoe_weights handle, const struct plan *plan, bool shared,
                          const struct weights **weights)
{
  void *found;
  const cumoe_moe_desc *d = &plan->desc;
  const int32_t experts = shared ? 1 : d->local_experts, inter = shared ? d->shared_inter : d->inter;
  TRY(find_object(OBJECT_WEIGHTS, name, handle, &found));
  const struct weights *w = *weights = found;
  REQUIRE(w->context == plan->context, CUMOE_ERR_WRONG_DEVICE, "%s belongs to another context than the plan", name);
  REQUIRE(w->dtype == d->dtype, CUMOE_ERR_WRONG_DTYPE, "%s are %s, desc.dtype is %s", name,
          cumoe_dtype_name((cumoe_dtype)w->dtype), cumoe_dtype_name((cumoe_dtype)d->dtype));
  REQUIRE(w->experts == experts && w->hidden == d->hidden && w->inter == inter, CUMOE_ERR_INVALID_ARGUMENT,
          "%s have experts %d, hidden %d, inter %d; the plan needs %d, %d, %d", name, (int)w->experts, (int)w->hidden,
          (int)w->inter, (int)experts, (int)d->hidden, (int)inter);
  REQUIRE(w->gated == !(d->flags & CUMOE_MOE_UNGATED), CUMOE_ERR_LAYOUT, "%s are %s, the plan is %s", name,
          w->gated ? "gated" : "ungated", w->gated ? "ungated" : "gated");
  REQUIRE(same_format(&w->up_format, format_of(d, true, shared)) &&
              same_format(&w->down_format, format_of(d, false, shared)),
          CUMOE_ERR_LAYOUT, "%s have other formats than the plan's %s", name,
          shared ? "shared_up_format and shared_down_format" : "up_format and down_format");
  return check_owners(name, w);
}

cumoe_status find_any_weights(const char *name, cumoe_weights handle, const struct weights **weights)
{
  void *found;
  TRY(find_object(OBJECT_WEIGHTS, name, handle, &found));
  *weights = found;
  return check_owners(name, *weights);
}

static cumoe_status drop(void *object)
{
  struct weights *w = object;
  const cumoe_status status = pool_drop(w->context, w->tables, w->table_bytes);
  free(w);
  return status;
}

static cumoe_status drop_all(struct context *context)
{
  return retire_objects(OBJECT_WEIGHTS, context, drop);
}

/* `w` is on the host's heap; what it becomes when it fails is the caller's. */
static cumoe_status bind_and_publish(struct context *context, const cumoe_weights_desc *d, int32_t dtype,
                                     struct weights *w, cumoe_weights *weights)
{
  device_scope scope;
  TRY(enter_device(context, &scope));
  cumoe_status status = bind(context, d, dtype, w);
  on_close(context, CLOSE_WEIGHTS, drop_all);
  watch_leaks(context);
  if (status == CUMOE_OK) *weights = publish_object(OBJECT_WEIGHTS, context, w);
  if (status == CUMOE_OK && !*weights) status = fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for more weights");
  if (status != CUMOE_OK && w->tables) AND_THEN(status, pool_free(context, w->tables, w->table_bytes, NULL));
  leave_device(&scope);
  return status;
}

static bool any_points(const cumoe_weights_desc *d)
{
  return points(&d->gate_up) || points(&d->gate) || points(&d->up) || points(&d->down);
}

cumoe_status cumoe_weights_bind(cumoe_context handle, const cumoe_weights_desc *desc, cumoe_weights *weights)
{
  begin_call(__func__);
  struct context *context;
  cumoe_weights_desc d;
  if (!weights) return fail(CUMOE_ERR_INVALID_ARGUMENT, "weights is null");
  *weights = NULL;
  TRY(find_context(handle, &context));
  TRY(take_struct("desc", desc, &d));
  int32_t dtype = DT_NONE;
  unstack_all(&d);
  TRY(check_weights_desc(context, &d, &dtype));
  const size_t host_bytes = sizeof(struct weights) + (any_points(&d) ? 12 * (size_t)d.experts * sizeof(uintptr_t) : 0);
  struct weights *w = malloc(host_bytes);
  if (!w) return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", host_bytes);
  const cumoe_status status = bind_and_publish(context, &d, dtype, w, weights);
  if (status != CUMOE_OK) free(w);
  return status;
}

cumoe_status cumoe_weights_destroy(cumoe_weights handle)
{
  begin_call(__func__);
  void *found;
  if (!handle) return CUMOE_OK;
  TRY(find_object(OBJECT_WEIGHTS, "weights", handle, &found));
  if (!retire_object(handle)) return find_object(OBJECT_WEIGHTS, "weights", handle, &found);
  struct weights *w = found;
  const cumoe_status status = pool_free(w->context, w->tables, w->table_bytes, NULL);
  free(w);
  return status;
}
