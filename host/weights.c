/* Binding weights: every documented layout becomes one normal form (expert_matrix in kernels/args.h). */
#include "weights.h"
#include "buffer.h"
#include "context.h"
#include "debug.h"
#include "memory.h"
#include "objects.h"
#include "pool.h"
#include "status.h"
#include "tmap.h"

#include <stdlib.h>

/* ---- checks of a description ---- */

typedef struct projection_shape {
  const char *name, *data, *bias; /* in texts */
  int64_t out, in;
  int32_t major;
} projection_shape;

static cumoe_status check_table(const cumoe_projection *p, const projection_shape *s, int32_t experts)
{
  for (int32_t e = 0; e < experts; ++e) {
    REQUIRE(p->per_expert[e], CUMOE_ERR_INVALID_ARGUMENT, "%s.per_expert[%d] is null", s->name, (int)e);
    REQUIRE((uintptr_t)p->per_expert[e] % 16 == 0, CUMOE_ERR_MISALIGNED,
            "%s.per_expert[%d] is %p, must be aligned to 16 bytes", s->name, (int)e, p->per_expert[e]);
  }
  return CUMOE_OK;
}

/* Shape and type of one expert's matrix. Where a stack was meant, its rows are what the text is about. */
static cumoe_status check_matrix(struct context *context, const cumoe_projection *p, cumoe_view v,
                                 const projection_shape *s, int32_t experts, int32_t dtype)
{
  const bool out_in = s->major == CUMOE_OUT_IN, stack = !p->per_expert && p->expert_stride == 0 && experts > 1;
  const int64_t rows = out_in ? s->out : s->in;
  const operand want = {s->data, stack && !absent(&v) ? v.rows : rows, out_in ? s->in : s->out, DTYPE_BIT(dtype), 16};
  TRY(check_operand(context, &want, v));
  REQUIRE(v.rows == rows, CUMOE_ERR_INVALID_ARGUMENT,
          "%s.rows is %lld, must be %lld (%lld for each of %d experts), or %lld (expert 0's)", s->data,
          (long long)v.rows, (long long)(experts * rows), (long long)rows, (int)experts, (long long)rows);
  return CUMOE_OK;
}

static cumoe_status check_projection(struct context *context, const cumoe_projection *p, const projection_shape *s,
                                     int32_t experts, int32_t dtype)
{
  cumoe_view v = p->data;
  REQUIRE(!(p->per_expert && v.data), CUMOE_ERR_INVALID_ARGUMENT, "%s has both data and per_expert", s->name);
  if (p->per_expert) { /* the shape describes each expert's matrix; borrow the first one's pointer for the checks */
    TRY(check_table(p, s, experts));
    v.data = p->per_expert[0];
  }
  TRY(check_matrix(context, p, v, s, experts, dtype));
  const int64_t matrix = (v.rows - 1) * v.ld + v.cols, stride = p->expert_stride ? p->expert_stride : v.rows * v.ld;
  REQUIRE(p->expert_stride == 0 || p->expert_stride >= matrix, CUMOE_ERR_LAYOUT,
          "%s.expert_stride is %lld, must be at least one matrix, %lld", s->name, (long long)p->expert_stride,
          (long long)matrix);
  REQUIRE((uint64_t)stride * cumoe_dtype_bytes((cumoe_dtype)dtype) % 16 == 0, CUMOE_ERR_MISALIGNED,
          "%s.expert_stride is %lld elements, must be a multiple of 16 bytes", s->name, (long long)stride);
  if (!p->per_expert) { /* the whole stack must lie in its buffer, not only expert 0 */
    cumoe_view all = cumoe_vector(v.data, (cumoe_dtype)dtype, 0);
    REQUIRE(!__builtin_mul_overflow((int64_t)experts - 1, stride, &all.cols) &&
                !__builtin_add_overflow(all.cols, matrix, &all.cols),
            CUMOE_ERR_INVALID_ARGUMENT, "%s.expert_stride is %lld, too large", s->name, (long long)stride);
    all.ld = all.cols;
    all.rows = 1;
    all.owner = v.owner;
    TRY(check_extent(s->data, &all, 16));
    TRY(check_owner(context, s->data, &all));
  }
  const operand bias = {s->bias, experts, s->out, DTYPE_BIT(CUMOE_F32) | DTYPE_BIT(dtype), 0};
  return check_optional(context, &bias, p->bias);
}

static cumoe_status check_reserves(const cumoe_weights_desc *d)
{
  TRY(check_reserve("desc.gate_up", d->gate_up.reserved));
  TRY(check_reserve("desc.gate", d->gate.reserved));
  TRY(check_reserve("desc.up", d->up.reserved));
  return check_reserve("desc.down", d->down.reserved);
}

/* Its reserve is checked by itself. */
static bool projection_absent(const cumoe_projection *p)
{
  return absent(&p->data) && !p->per_expert && p->expert_stride == 0 && absent(&p->bias);
}

static cumoe_status check_major(const char *name, int32_t major)
{
  REQUIRE(major == CUMOE_OUT_IN || major == CUMOE_IN_OUT, CUMOE_ERR_LAYOUT,
          "%s is %d, must be CUMOE_OUT_IN or CUMOE_IN_OUT", name, (int)major);
  return CUMOE_OK;
}

#define NAMES(field) "desc." #field, "desc." #field ".data", "desc." #field ".bias"

static cumoe_status check_weights_desc(struct context *context, const cumoe_weights_desc *d)
{
  const bool separate = d->gate_order == CUMOE_GATE_UP_SEPARATE, ungated = d->gate_order == CUMOE_UNGATED;
  const bool fused = !separate && !ungated;
  const int32_t dtype = d->down.data.dtype;
  REQUIRE(d->gate_order >= CUMOE_GATE_UP_CONCAT && d->gate_order <= CUMOE_UNGATED, CUMOE_ERR_LAYOUT,
          "desc.gate_order is %d: it must be set, no order is guessed", (int)d->gate_order);
  TRY(check_major("desc.up_major", d->up_major));
  TRY(check_major("desc.down_major", d->down_major));
  REQUIRE(d->reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "desc.reserved is %d, must be 0", (int)d->reserved);
  TRY(check_reserves(d));
  REQUIRE(d->experts >= 1 && d->experts <= CUMOE_MAX_EXPERTS, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.experts is %d, must be 1 .. %d", (int)d->experts, CUMOE_MAX_EXPERTS);
  REQUIRE(d->hidden >= 8 && d->hidden % 8 == 0 && d->inter >= 8 && d->inter % 8 == 0, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.hidden is %d, desc.inter is %d: must be positive multiples of 8", (int)d->hidden, (int)d->inter);
  TRY(check_dense("desc.down.data.dtype", dtype, CUMOE_ERR_WRONG_DTYPE));
  REQUIRE(fused || projection_absent(&d->gate_up), CUMOE_ERR_LAYOUT,
          "desc.gate_up must be absent with this gate_order");
  REQUIRE(separate || projection_absent(&d->gate), CUMOE_ERR_LAYOUT, "desc.gate must be absent with this gate_order");
  REQUIRE(!fused || projection_absent(&d->up), CUMOE_ERR_LAYOUT, "desc.up must be absent with this gate_order");
  const projection_shape gate_up = {NAMES(gate_up), 2 * (int64_t)d->inter, d->hidden, d->up_major};
  const projection_shape gate = {NAMES(gate), d->inter, d->hidden, d->up_major},
                         up = {NAMES(up), d->inter, d->hidden, d->up_major};
  const projection_shape down = {NAMES(down), d->hidden, d->inter, d->down_major};
  if (fused) TRY(check_projection(context, &d->gate_up, &gate_up, d->experts, dtype));
  if (separate) TRY(check_projection(context, &d->gate, &gate, d->experts, dtype));
  if (!fused) TRY(check_projection(context, &d->up, &up, d->experts, dtype));
  if (separate) {
    const bool same = d->gate.data.ld == d->up.data.ld && d->gate.expert_stride == d->up.expert_stride &&
                      !d->gate.per_expert == !d->up.per_expert && absent(&d->gate.bias) == absent(&d->up.bias) &&
                      d->gate.bias.ld == d->up.bias.ld && d->gate.bias.dtype == d->up.bias.dtype;
    REQUIRE(same, CUMOE_ERR_LAYOUT, "desc.gate and desc.up must have the same ld, expert_stride, form and bias form");
  }
  return check_projection(context, &d->down, &down, d->experts, dtype);
}

/* ---- the normal form ---- */

/* Where one half (gate or up) of a projection lies: elements from the expert's start, and from its bias row's start. */
typedef struct half {
  const cumoe_projection *projection;
  int64_t offset, bias_offset;
} half;

/* The halves of the first projection in the order gate, up; returns their number. */
static int locate_halves(const cumoe_weights_desc *d, half halves[2])
{
  if (d->gate_order == CUMOE_UNGATED) {
    halves[0] = (half){&d->up, 0, 0};
    return 1;
  }
  if (d->gate_order == CUMOE_GATE_UP_SEPARATE) {
    halves[0] = (half){&d->gate, 0, 0};
    halves[1] = (half){&d->up, 0, 0};
    return 2;
  }
  const bool interleaved = d->gate_order == CUMOE_GATE_UP_INTERLEAVED || d->gate_order == CUMOE_UP_GATE_INTERLEAVED;
  const int gate = d->gate_order == CUMOE_GATE_UP_CONCAT || d->gate_order == CUMOE_GATE_UP_INTERLEAVED ? 0 : 1;
  const int64_t channel_stride = d->up_major == CUMOE_OUT_IN ? d->gate_up.data.ld : 1;
  const int64_t step = interleaved ? 1 : d->inter; /* channels between a gate and its up */
  halves[gate ? 1 : 0] = (half){&d->gate_up, 0, 0};
  halves[gate ? 0 : 1] = (half){&d->gate_up, step * channel_stride, step};
  return 2;
}

static const void *element_at(const void *base, int64_t index, size_t bytes)
{
  return base ? (const char *)base + index * (int64_t)bytes : NULL;
}

static expert_matrix normal_form(const half *halves, int count, int32_t major, int64_t channel_step)
{
  const cumoe_projection *first = halves[0].projection;
  const cumoe_view *v = &first->data, *bias = &first->bias;
  expert_matrix m = {.format = dense_format(v->dtype)};
  m.expert_stride = first->expert_stride ? first->expert_stride : v->rows * v->ld;
  m.n_stride = channel_step * (major == CUMOE_OUT_IN ? v->ld : 1);
  m.k_stride = major == CUMOE_OUT_IN ? 1 : v->ld;
  m.bias_expert_stride = bias->ld;
  m.bias_n_stride = channel_step;
  m.bias_dtype = bias->data ? bias->dtype : DT_NONE;
  for (int h = 0; h < count; ++h) {
    const cumoe_projection *p = halves[h].projection;
    m.base[h] = element_at(p->data.data, halves[h].offset, cumoe_dtype_bytes((cumoe_dtype)p->data.dtype));
    m.bias[h] = element_at(p->bias.data, halves[h].bias_offset, cumoe_dtype_bytes((cumoe_dtype)p->bias.dtype));
  }
  return m;
}

/* Fills host rows of the pointer table; table[h] becomes its device address. Returns the rows used. */
static size_t fill_tables(const half *halves, int count, size_t experts, const void **host, const void **device,
                          expert_matrix *m)
{
  size_t rows = 0;
  for (int h = 0; h < count; ++h) {
    const cumoe_projection *p = halves[h].projection;
    if (!p->per_expert) continue;
    for (size_t e = 0; e < experts; ++e)
      host[rows * experts + e] =
          element_at(p->per_expert[e], halves[h].offset, cumoe_dtype_bytes((cumoe_dtype)p->data.dtype));
    m->table[h] = (const void *const *)(device + rows * experts);
    ++rows;
  }
  return rows;
}

/* Pointer tables travel to the device once, here: three rows at most (gate, up, down). */
static cumoe_status upload_tables(struct context *context, struct weights *w, const half *up, int up_count,
                                  const half *down)
{
  if (!up[0].projection->per_expert && !down->projection->per_expert) return CUMOE_OK;
  const size_t bytes = 3 * (size_t)w->experts * sizeof(void *);
  const void **host = malloc(bytes);
  if (!host) return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", bytes);
  w->table_bytes = bytes;
  cumoe_status status = pool_alloc(context, bytes, NULL, &w->tables);
  if (status == CUMOE_OK) {
    const void **device = w->tables;
    const size_t experts = (size_t)w->experts;
    size_t rows = fill_tables(up, up_count, experts, host, device, &w->up);
    rows += fill_tables(down, 1, experts, host + rows * experts, device + rows * experts, &w->down);
    const size_t used = rows * experts * sizeof(void *);
    status = memory_copy(context, w->tables, used, host, used, used, 1, cudaMemcpyHostToDevice, NULL);
    if (status == CUMOE_OK) status = memory_wait(context, NULL);
  }
  free(host);
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
static void note_projection(struct weights *w, const char *name, const char *bias, const cumoe_projection *p,
                            uintptr_t *begins)
{
  const size_t experts = (size_t)w->experts, element = cumoe_dtype_bytes((cumoe_dtype)p->data.dtype);
  cumoe_view one = p->data;
  bound_part part = {.name = name, .owner = one.owner, .count = w->experts};
  if (p->per_expert) {
    for (size_t e = 0; e < experts; ++e) begins[e] = (uintptr_t)p->per_expert[e];
    qsort(begins, experts, sizeof *begins, by_address);
    one.data = (const void *)begins[0];
    part.begins = begins;
  }
  part.first = span_of(&one);
  part.stride = (uintptr_t)(p->expert_stride ? p->expert_stride : one.rows * one.ld) * element;
  add_part(w, part);
  if (p->bias.data) add_part(w, (bound_part){bias, p->bias.owner, span_of(&p->bias), 0, NULL, 1});
}

static void note_parts(const cumoe_weights_desc *d, struct weights *w)
{
  uintptr_t *const begins = w->begins;
  const size_t experts = (size_t)w->experts;
  if (d->gate_order == CUMOE_GATE_UP_SEPARATE) note_projection(w, "gate", "gate.bias", &d->gate, begins);
  if (d->gate_order == CUMOE_GATE_UP_SEPARATE || d->gate_order == CUMOE_UNGATED)
    note_projection(w, "up", "up.bias", &d->up, begins + experts);
  else
    note_projection(w, "gate_up", "gate_up.bias", &d->gate_up, begins + experts);
  note_projection(w, "down", "down.bias", &d->down, begins + 2 * experts);
}

static uintptr_t begin_of(const bound_part *p, int32_t index)
{
  return p->begins ? p->begins[index] : p->first.begin + (uintptr_t)index * p->stride;
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
    const uintptr_t begin = begin_of(p, i);
    const span matrix = {begin, begin + extent, p->first.width, p->first.pitch};
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

/* ---- binding ---- */

static weight_major major_of(const expert_matrix *b)
{
  return b->k_stride == 1 ? MAJOR_K : MAJOR_N;
}

static cumoe_status bind(struct context *context, const cumoe_weights_desc *d, struct weights *w)
{
  half up[2] = {{0}}, down = {&d->down, 0, 0};
  const int halves = locate_halves(d, up);
  const bool interleaved = d->gate_order == CUMOE_GATE_UP_INTERLEAVED || d->gate_order == CUMOE_UP_GATE_INTERLEAVED;
  *w = (struct weights){.context = context,
                        .experts = d->experts,
                        .hidden = d->hidden,
                        .inter = d->inter,
                        .dtype = d->down.data.dtype,
                        .gated = halves == 2};
  note_parts(d, w);
  w->up = normal_form(up, halves, d->up_major, interleaved ? 2 : 1);
  w->down = normal_form(&down, 1, d->down_major, 1);
  TRY(upload_tables(context, w, up, halves, &down));
  w->up_facts = (bound_matrix){major_of(&w->up), tmap_serves(&w->up, w->inter, w->experts, w->gated)};
  w->down_facts = (bound_matrix){major_of(&w->down), tmap_serves(&w->down, w->hidden, w->experts, false)};
  return CUMOE_OK;
}

/* A stack [experts * rows, cols] becomes expert 0's matrix; the packed stride is the default. */
static void unstack(cumoe_projection *p, int32_t experts, int64_t rows)
{
  if (!p->per_expert && p->expert_stride == 0 && experts > 0 && p->data.rows == experts * rows) p->data.rows = rows;
}

static void unstack_all(cumoe_weights_desc *d)
{
  const bool up_out_in = d->up_major == CUMOE_OUT_IN, down_out_in = d->down_major == CUMOE_OUT_IN;
  const int64_t inter = d->inter;
  unstack(&d->gate_up, d->experts, up_out_in ? 2 * inter : d->hidden);
  unstack(&d->gate, d->experts, up_out_in ? inter : d->hidden);
  unstack(&d->up, d->experts, up_out_in ? inter : d->hidden);
  unstack(&d->down, d->experts, down_out_in ? d->hidden : inter);
}

/* ---- as objects ---- */

static cumoe_status check_owners(const char *name, const struct weights *w)
{
  for (int32_t i = 0; i < w->part_count; ++i)
    REQUIRE(w->parts[i].owner == 0 || buffer_lives(w->parts[i].owner), CUMOE_ERR_STALE_HANDLE,
            "%s: %s is bound to a buffer that was freed", name, w->parts[i].name);
  return CUMOE_OK;
}

cumoe_status find_weights(const char *name, cumoe_weights handle, const struct plan *plan, int32_t experts,
                          int32_t inter, const struct weights **weights)
{
  void *found;
  const cumoe_moe_desc *d = &plan->desc;
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
  return check_owners(name, w);
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
static cumoe_status bind_and_publish(struct context *context, const cumoe_weights_desc *d, struct weights *w,
                                     cumoe_weights *weights)
{
  device_scope scope;
  TRY(enter_device(context, &scope));
  cumoe_status status = bind(context, d, w);
  on_close(context, CLOSE_WEIGHTS, drop_all);
  watch_leaks(context);
  if (status == CUMOE_OK) *weights = publish_object(OBJECT_WEIGHTS, context, w);
  if (status == CUMOE_OK && !*weights) status = fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for more weights");
  if (status != CUMOE_OK && w->tables) (void)pool_free(context, w->tables, w->table_bytes, NULL);
  leave_device(&scope);
  return status;
}

static bool points(const cumoe_weights_desc *d)
{
  return d->gate_up.per_expert || d->gate.per_expert || d->up.per_expert || d->down.per_expert;
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
  unstack_all(&d);
  TRY(check_weights_desc(context, &d));
  const size_t host_bytes = sizeof(struct weights) + (points(&d) ? 3 * (size_t)d.experts * sizeof(uintptr_t) : 0);
  struct weights *w = malloc(host_bytes);
  if (!w) return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", host_bytes);
  const cumoe_status status = bind_and_publish(context, &d, w, weights);
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
