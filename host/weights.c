/* Binding weights: every documented layout becomes one normal form (expert_matrix in kernels/args.h). */
#include "check.h"

#include <stdlib.h>

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
  expert_matrix m = {.format = dense_format((element_type)v->dtype)};
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
static cumoe_status upload_tables(cumoe_context context, cumoe_weights w, const half *up, int up_count,
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

static cumoe_status bind(cumoe_context context, const cumoe_weights_desc *d, cumoe_weights w)
{
  half up[2] = {{0}}, down = {&d->down, 0, 0};
  const int halves = locate_halves(d, up);
  const bool interleaved = d->gate_order == CUMOE_GATE_UP_INTERLEAVED || d->gate_order == CUMOE_UP_GATE_INTERLEAVED;
  *w = (struct cumoe_weights_s){.magic = WEIGHTS_MAGIC,
                                .context = context,
                                .experts = d->experts,
                                .hidden = d->hidden,
                                .inter = d->inter,
                                .dtype = d->down.data.dtype,
                                .gated = halves == 2};
  w->up = normal_form(up, halves, d->up_major, interleaved ? 2 : 1);
  w->down = normal_form(&down, 1, d->down_major, 1);
  return upload_tables(context, w, up, halves, &down);
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

cumoe_status cumoe_weights_bind(cumoe_context context, const cumoe_weights_desc *desc, cumoe_weights *weights)
{
  begin_call(__func__);
  cumoe_weights_desc d;
  if (!weights) return fail(CUMOE_ERR_INVALID_ARGUMENT, "weights is null");
  *weights = NULL;
  TRY(check_context(context));
  TRY(take_struct("desc", desc, &d, sizeof d));
  unstack_all(&d);
  TRY(check_weights_desc(context, &d));
  cumoe_weights w = malloc(sizeof *w);
  if (!w) return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", sizeof *w);
  device_scope scope;
  cumoe_status status = enter_device(context, &scope);
  if (status == CUMOE_OK) {
    status = bind(context, &d, w);
    if (status != CUMOE_OK && w->tables) (void)pool_free(context, w->tables, w->table_bytes, NULL);
    leave_device(&scope);
  }
  if (status != CUMOE_OK) {
    free(w);
    return status;
  }
  *weights = w;
  return CUMOE_OK;
}

cumoe_status cumoe_weights_destroy(cumoe_weights w)
{
  begin_call(__func__);
  if (!w) return CUMOE_OK;
  if (w->magic != WEIGHTS_MAGIC) return fail(CUMOE_ERR_STALE_HANDLE, "weights is not a live weights object");
  const cumoe_status status = pool_free(w->context, w->tables, w->table_bytes, NULL);
  w->magic = 0;
  free(w);
  return status;
}
