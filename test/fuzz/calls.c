/*
 * The structs that callers fill. An input names a call and a layer, then changes the call's structs: bytes, words and
 * 64-bit words anywhere in them, sizes, layouts, shapes, types, owners, pointers. A pointer is kept to what a caller
 * may rightly give: null, memory that holds all that its view describes, or a view of an owned buffer, which may say
 * anything, for the library knows the buffer. Then every call on the CPU device must
 *   answer with a status of the list and, unless it is OK, a text;
 *   change no memory when it refuses;
 *   stay within the memory it was given (the sanitizers' part).
 *
 * Input: call, layer, then changes (change.h).
 */
#include "change.h"

#define CUMOE_EXPERIMENTAL
#include <cumoe/cumoe.h>
#include <cumoe/quantize.h>
#include <stdalign.h>
#include <stdbool.h>
#include <string.h>

enum {
  ARENAS = 32,
  ARENA = 1 << 15,
  HIDDEN = 16,
  INTER = 24,
  TOKENS = 6,
  LAYERS = 8,
  ROOM = 8192,
  FIRST_GRADIENT = 24
};

/* Too much memory is a status, not the end. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
  return "allocator_may_return_null=1";
}

/* ---- memory ----------------------------------------------------------------------------------------- */

static unsigned char *arenas[ARENAS];
static unsigned char *untouched; /* what the arenas hold before a call */
static uint32_t lent;            /* the arenas that the call has pointers to: a bit each */

static void reset_arenas(void)
{
  for (int i = 0; i < ARENAS; i++)
    if (lent >> i & 1) memcpy(arenas[i], untouched + (size_t)i * ARENA, ARENA);
  lent = 0;
}

/* Even arenas hold small numbers, good as ids and counts, odd ones anything. */
static void make_arenas(void)
{
  uint64_t state = 7;
  untouched = malloc((size_t)ARENAS * ARENA);
  PROMISE(untouched, "no memory");
  for (size_t i = 0; i < (size_t)ARENAS * ARENA; i += 4) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint32_t any = (uint32_t)(state >> 32), small = any % 10 - 1;
    memcpy(untouched + i, i / ARENA % 2 ? &any : &small, 4);
  }
  for (int i = 0; i < ARENAS; i++) {
    arenas[i] = malloc(ARENA);
    PROMISE(arenas[i], "no memory");
  }
  lent = UINT32_MAX;
  reset_arenas();
}

static bool arenas_untouched(void)
{
  for (int i = 0; i < ARENAS; i++)
    if (lent >> i & 1 && memcmp(arenas[i], untouched + (size_t)i * ARENA, ARENA) != 0) return false;
  return true;
}

/* ---- where a view may point -------------------------------------------------------------------------- */

/* Before a call, `data` of a view is a wish: an arena, how it is aligned. 0 is null. */
static void *wish(int arena)
{
  return (void *)(uintptr_t)(0x10000u | (uint32_t)arena);
}

__extension__ typedef __int128 wide;

/* More than an arena holds is as good as any more. */
static wide clamped(wide value)
{
  return value > ARENA ? ARENA + 1 : value < -ARENA ? -ARENA - 1 : value;
}

static wide bytes_of(const cumoe_view *v, wide more_elements)
{
  const wide element = (wide)cumoe_dtype_bytes((cumoe_dtype)v->dtype);
  if (v->rows <= 0 || v->cols <= 0 || element == 0) return 0;
  return clamped(clamped(((wide)v->rows - 1) * v->ld) + v->cols + more_elements) * element;
}

/* The end of what is described is the end of the arena, so that one element more is seen. Null if it does not fit. */
static void *place(uintptr_t wished, wide bytes)
{
  const size_t align = wished >> 8 & 1 ? (size_t)1 << (wished >> 9 & 7) : 256;
  if (wished == 0 || bytes > ARENA) return NULL;
  lent |= 1u << wished % ARENAS;
  unsigned char *end = arenas[wished % ARENAS] + ARENA;
  unsigned char *at = end - (bytes < 0 ? 0 : (size_t)bytes);
  return at - (uintptr_t)at % align < arenas[wished % ARENAS] ? NULL : at - (uintptr_t)at % align;
}

static cumoe_context context;
static cumoe_buffer live, freed;

/* Owner, as wished: none, a live buffer (then the pointer may be anything), a freed one, or any handle. */
static void settle(cumoe_view *v, wide more_elements)
{
  if (v->owner == 0) {
    v->data = place((uintptr_t)v->data, bytes_of(v, more_elements));
    return;
  }
  if (v->owner % 4 == 1) {
    const uintptr_t wished = (uintptr_t)v->data;
    v->owner = live.id;
    if (wished >> 16 == 1) v->data = (const char *)cumoe_buffer_view(live).data + (wished & 0xff) * 16;
  } else if (v->owner % 4 == 2) {
    v->owner = freed.id;
  } else if (v->owner == live.id) {
    v->owner ^= 1ull << 40;
  }
}

static void settle_mut(cumoe_view_mut *v)
{
  cumoe_view same = cumoe_const(*v);
  settle(&same, 0);
  memcpy(v, &same, sizeof same);
}

/* Scales or zero points: as if each expert had a matrix of that shape. */
static void settle_array(cumoe_array *a, wide experts, const void **table)
{
  const wide step = clamped(a->expert_stride ? a->expert_stride : (wide)a->data.rows * a->data.ld);
  if (a->per_expert) {
    cumoe_view each = a->data;
    each.data = each.data ? each.data : wish(1);
    const void *at = place((uintptr_t)each.data, bytes_of(&each, 0));
    for (int e = 0; e < CUMOE_MAX_EXPERTS; e++) table[e] = at;
    a->per_expert = table;
    if (!((uintptr_t)a->data.data >> 17)) a->data.data = NULL;
  }
  settle(&a->data, step < 0 ? 0 : (experts - 1) * step);
}

/* All that the manual lets bind read, whichever of the three forms it is. */
static void settle_projection(cumoe_projection *p, const cumoe_weights_desc *d, const void **table)
{
  const wide experts = d->experts >= 1 && d->experts <= CUMOE_MAX_EXPERTS ? d->experts : 1;
  const wide step = clamped(p->expert_stride ? p->expert_stride : (wide)p->data.rows * p->data.ld);
  const bool stack = p->expert_stride == 0 && p->data.rows % experts == 0 &&
                     (p->data.rows / experts == d->hidden || p->data.rows / experts == d->inter ||
                      p->data.rows / experts == 2 * (int64_t)d->inter);
  settle(&p->bias, 0);
  settle(&p->global, 0);
  settle(&p->input_scale, 0);
  settle_array(&p->scale, experts, table + CUMOE_MAX_EXPERTS);
  settle_array(&p->zero, experts, table + 2 * CUMOE_MAX_EXPERTS);
  settle_array(&p->order, experts, table + 3 * CUMOE_MAX_EXPERTS);
  if (p->per_expert) {
    cumoe_view each = p->data;
    each.data = each.data ? each.data : wish(1);
    const void *at = place((uintptr_t)each.data, bytes_of(&each, 0));
    for (int e = 0; e < CUMOE_MAX_EXPERTS; e++) table[e] = at;
    p->per_expert = table;
    if (!((uintptr_t)p->data.data >> 17)) p->data.data = NULL;
  }
  settle(&p->data, stack || step < 0 ? 0 : (experts - 1) * step);
}

/* ---- layers ------------------------------------------------------------------------------------------ */

typedef struct layer {
  cumoe_moe_desc desc;
  cumoe_weights_desc where;
  cumoe_plan plan;
  cumoe_weights weights, shared, gradient; /* gradient: NULL of formats */
} layer;
static layer layers[LAYERS];

static cumoe_view wished_view(int arena, int32_t dtype, int64_t rows, int64_t cols)
{
  return cumoe_matrix(wish(arena), (cumoe_dtype)dtype, rows, cols, cols);
}

static cumoe_view_mut wished_mut(int arena, int32_t dtype, int64_t rows, int64_t cols)
{
  return cumoe_matrix_mut(wish(arena), (cumoe_dtype)dtype, rows, cols, cols);
}

static cumoe_weights_desc where_of(const cumoe_moe_desc *d, int32_t experts, int32_t inter, int32_t order)
{
  const int32_t major = order % 2 ? CUMOE_OUT_IN : CUMOE_IN_OUT;
  const int64_t e = experts, h = d->hidden, i = inter;
  cumoe_weights_desc w = {.size = sizeof w, .experts = experts, .hidden = d->hidden, .inter = inter};
  w.gate_order = order;
  w.up_major = w.down_major = major;
  const cumoe_view half =
      major == CUMOE_OUT_IN ? wished_view(1, d->dtype, e * i, h) : wished_view(1, d->dtype, e * h, i);
  w.down.data = major == CUMOE_OUT_IN ? wished_view(2, d->dtype, e * h, i) : wished_view(2, d->dtype, e * i, h);
  w.down.bias = wished_view(4, CUMOE_F32, e, h);
  if (order == CUMOE_GATE_UP_SEPARATE) w.gate.data = half;
  if (order >= CUMOE_GATE_UP_SEPARATE)
    w.up.data = half;
  else
    w.gate_up.data =
        major == CUMOE_OUT_IN ? wished_view(1, d->dtype, e * 2 * i, h) : wished_view(1, d->dtype, e * h, 2 * i);
  return w;
}

/* Codes of the layer's formats: e4m3 and s8 with a scale for each expert's activations, or of 4 bits, those of down in
 * an order. `w` has stacks, OUT_IN. */
static void set_formats(cumoe_weights_desc *w, const cumoe_moe_desc *d)
{
  const int64_t e = w->experts, h = d->hidden, i = w->inter;
  const bool four = d->up_format.element == CUMOE_ELEMENT_E2M1;
  w->dtype = d->dtype;
  w->up_format = d->up_format;
  w->down_format = d->down_format;
  if (!four) {
    w->gate_up.data = wished_view(1, CUMOE_E4M3, e * 2 * i, h);
    w->gate_up.scale.data = wished_view(3, CUMOE_F32, e * 2, 1);
    w->down.data = wished_view(2, CUMOE_I8, e * h, i);
    w->down.scale.data = wished_view(5, CUMOE_F32, e * h, 1);
    w->down.input_scale = wished_view(7, CUMOE_F32, e, 1);
    return;
  }
  w->gate.data = wished_view(1, CUMOE_U8, e * i, h / 2);
  w->gate.scale.data = wished_view(3, CUMOE_E4M3, e * i, h / 16);
  w->gate.global = wished_view(7, CUMOE_F32, e, 1);
  w->up = w->gate;
  w->down.data = wished_view(2, CUMOE_I32, e * h, i / 8);
  w->down.scale.data = wished_view(5, CUMOE_F16, e * h, 1);
  w->down.zero.data = wished_view(9, CUMOE_I32, e * h / 8, 1);
  w->down.order.data = wished_view(3, CUMOE_I32, e, i);
}

static void settle_weights(cumoe_weights_desc *w)
{
  static const void *tables[4][4 * CUMOE_MAX_EXPERTS];
  settle_projection(&w->gate_up, w, tables[0]);
  settle_projection(&w->gate, w, tables[1]);
  settle_projection(&w->up, w, tables[2]);
  settle_projection(&w->down, w, tables[3]);
}

static cumoe_weights bound(cumoe_weights_desc w)
{
  cumoe_weights made = NULL;
  settle_weights(&w);
  PROMISE(cumoe_weights_bind(context, &w, &made) == CUMOE_OK, "%s", cumoe_last_error());
  return made;
}

/* The same shapes elsewhere, to be written: every part by itself. */
static cumoe_weights bound_gradient(const layer *l)
{
  cumoe_weights_desc w = l->where;
  cumoe_view *const parts[] = {&w.gate_up.data, &w.gate.data, &w.up.data, &w.down.data, &w.down.bias};
  for (int i = 0; i < 5; i++)
    if (parts[i]->rows) parts[i]->data = wish(FIRST_GRADIENT + i);
  return bound(w);
}

static void make_layer(int index)
{
  static const int32_t types[] = {CUMOE_F32, CUMOE_BF16, CUMOE_F16};
  layer *l = &layers[index];
  l->desc = (cumoe_moe_desc){.size = sizeof l->desc,
                             .num_experts = 8,
                             .hidden = HIDDEN,
                             .inter = INTER,
                             .dtype = types[index % 3],
                             .routing = cumoe_routing_qwen3(2)};
  const int32_t order = index < 6    ? index + 1 /* every gate order */
                        : index == 6 ? CUMOE_GATE_UP_CONCAT
                                     : CUMOE_GATE_UP_SEPARATE;
  if (index >= 6) l->desc.dtype = CUMOE_BF16, l->desc.hidden = l->desc.inter = 32;
  if (index == 6) l->desc.up_format = cumoe_format_fp8_block(CUMOE_F32);
  if (index == 6) l->desc.down_format = cumoe_format_int8(CUMOE_F32);
  if (index == 6) l->desc.down_format.rows = CUMOE_ROWS_STATIC_EXPERT;
  if (index == 7) l->desc.up_format = cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES);
  if (index == 7) l->desc.down_format = cumoe_format_int4(32, CUMOE_F16), l->desc.down_format.zero = 1;
  if (index == 7) l->desc.down_format.act_order = 1;
  if (order == CUMOE_UNGATED) l->desc.flags = CUMOE_MOE_UNGATED | CUMOE_MOE_UNREDUCED;
  if (index == 1) l->desc.shared_inter = 8;
  if (index == 2) l->desc.routing = cumoe_routing_deepseek_v3(2, 4, 2, 2.5f);
  if (index == 3) l->desc.routing = cumoe_routing_llama4(2);
  if (index == 4) l->desc.local_experts = 3;
  if (index == 4) l->desc.routing.zero_experts = l->desc.routing.identity_experts = 1;
  l->where = where_of(&l->desc, index == 4 ? 3 : 8, l->desc.inter, order);
  if (index >= 6) set_formats(&l->where, &l->desc);
  PROMISE(cumoe_plan_create(context, &l->desc, &l->plan) == CUMOE_OK, "%s", cumoe_last_error());
  l->weights = bound(l->where);
  if (index < 6) l->gradient = bound_gradient(l);
  if (l->desc.shared_inter) l->shared = bound(where_of(&l->desc, 1, l->desc.shared_inter, order));
}

static int32_t router_columns(const layer *l)
{
  return l->desc.num_experts + l->desc.routing.zero_experts + l->desc.routing.identity_experts;
}

static int32_t local_experts(const layer *l)
{
  return l->desc.local_experts ? l->desc.local_experts : l->desc.num_experts;
}

/* Which of `count` things a byte means; those after the `first` are of the highest bytes, so that kept inputs of the
 * time when there were no others mean what they meant. */
static int chosen(uint8_t byte, int first, int count)
{
  return byte < 192 ? byte % first : first + byte % (count - first);
}

/* ---- calls ---------------------------------------------------------------------------------------- */

/* In memory that ends as the manual allows: a struct may say that it is longer, up to 4096 bytes, if zeros follow. */
static const void *with_room(const void *object, size_t size)
{
  static alignas(16) unsigned char room[4][ROOM];
  static int turn;
  unsigned char *at = room[turn++ % 4];
  memset(at, 0, ROOM);
  memcpy(at, object, size);
  return at;
}

/* An engine's allocator that does what the manual asks for. */
static int lend(void *user, void **data, size_t bytes, size_t alignment, cumoe_stream stream)
{
  (void)user;
  (void)stream;
  *data = bytes <= 1 << 16 ? aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment) : NULL;
  return *data == NULL;
}

static void take_back(void *user, void *data, size_t bytes, cumoe_stream stream)
{
  (void)user;
  (void)bytes;
  (void)stream;
  free(data);
}

typedef struct context_input {
  cumoe_context_config config;
  cumoe_allocator allocator;
} context_input;

static void use_context(cumoe_context made)
{
  cumoe_buffer buffer = {0};
  cumoe_pool_stats stats = {.size = sizeof stats};
  if (cumoe_buffer_alloc(made, CUMOE_F32, 3, 5, NULL, &buffer) == CUMOE_OK) {
    PROMISE(cumoe_fill(made, cumoe_buffer_view_mut(buffer), 1, NULL) == CUMOE_OK, "%s", cumoe_last_error());
    PROMISE(cumoe_pool_get_stats(made, &stats) == CUMOE_OK && stats.live == 1, "%lld live", (long long)stats.live);
    PROMISE(cumoe_buffer_free(&buffer) == CUMOE_OK, "%s", cumoe_last_error());
  }
  PROMISE(cumoe_context_destroy(made) == CUMOE_OK, "%s", cumoe_last_error());
}

static cumoe_status call_context(input *in, const layer *l)
{
  cumoe_context made = NULL;
  context_input p = {{.size = sizeof p.config, .cpu_threads = 1},
                     {.size = sizeof p.allocator, .alloc = lend, .free = take_back}};
  (void)l;
  change(in, &p, sizeof p);
  if (p.config.cpu_threads > 4 || p.config.cpu_threads == 0) p.config.cpu_threads = 2;
  if (p.allocator.alloc != lend) p.allocator.alloc = NULL;
  if (p.allocator.free != take_back) p.allocator.free = NULL;
  if (p.allocator.name) p.allocator.name = "an engine's";
  if (p.config.allocator) p.config.allocator = with_room(&p.allocator, sizeof p.allocator);
  const cumoe_status status = cumoe_context_create(CUMOE_DEVICE_CPU, with_room(&p.config, sizeof p.config), &made);
  PROMISE((made != NULL) == (status == CUMOE_OK), "context %p, status %d", (void *)made, (int)status);
  if (made) use_context(made);
  return status;
}

typedef struct plan_input {
  cumoe_moe_desc desc;
  int64_t tokens;
} plan_input;

static cumoe_status call_plan(input *in, const layer *l)
{
  plan_input p = {l->desc, TOKENS};
  cumoe_plan plan = NULL;
  size_t bytes = 0, more = 0;
  char why[16];
  change(in, &p, sizeof p);
  const cumoe_moe_desc *desc = with_room(&p.desc, sizeof p.desc);
  const cumoe_status status = cumoe_plan_create(context, desc, &plan);
  PROMISE((plan != NULL) == (status == CUMOE_OK), "plan %p, status %d", (void *)plan, (int)status);
  PROMISE(cumoe_moe_supports(CUMOE_DEVICE_CPU, desc, why, sizeof why) == status, "supports differs from create");
  PROMISE(memchr(why, 0, sizeof why), "the reason has no end");
  if (!plan) return status;
  if (cumoe_plan_workspace(plan, p.tokens, &bytes) == CUMOE_OK && p.tokens > 0 &&
      cumoe_plan_workspace(plan, p.tokens - 1, &more) == CUMOE_OK)
    PROMISE(more <= bytes, "%zu bytes for %lld tokens, %zu for one less", bytes, (long long)p.tokens, more);
  PROMISE(cumoe_map_workspace(plan, p.tokens, &bytes) != CUMOE_ERR_INTERNAL, "%s", cumoe_last_error());
  PROMISE(cumoe_plan_destroy(plan) == CUMOE_OK, "%s", cumoe_last_error());
  return status;
}

/* What a call wants, in the form that the layer's number and a byte of the input choose. */
static cumoe_moe_args args_of(const layer *l, uint8_t form)
{
  const int64_t h = l->desc.hidden, k = l->desc.routing.top_k, columns = router_columns(l), dtype = l->desc.dtype;
  const bool reduced = !(l->desc.flags & CUMOE_MOE_UNREDUCED);
  size_t bytes = 0;
  cumoe_moe_args a = {.size = sizeof a, .shared = l->shared};
  PROMISE(cumoe_plan_workspace(l->plan, TOKENS, &bytes) == CUMOE_OK, "%s", cumoe_last_error());
  a.x = wished_view(3, (int32_t)dtype, TOKENS, h);
  if (form % 3 == 0) a.router_weight = wished_view(5, (int32_t)dtype, columns, h);
  if (form % 3 == 1) a.logits = wished_view(7, CUMOE_F32, TOKENS, columns);
  if (form % 3 == 2) {
    a.ids = wished_view(6, form & 16 ? CUMOE_I64 : CUMOE_I32, TOKENS, k);
    a.weights = wished_view(8, CUMOE_F32, TOKENS, k);
  } else if (form & 32) {
    a.ids_out = wished_mut(9, CUMOE_I32, TOKENS, k);
    a.weights_out = wished_mut(10, CUMOE_F32, TOKENS, k);
    a.select_bias = wished_view(11, CUMOE_F32, 1, columns);
  }
  if (local_experts(l) < l->desc.num_experts || form & 64)
    a.expert_map = wished_view(12, CUMOE_I32, 1, l->desc.num_experts);
  if (form & 128) a.counts_out = wished_mut(13, CUMOE_I32, 1, local_experts(l));
  if (form & 128) a.load = wished_mut(14, CUMOE_I64, 1, local_experts(l));
  if (form & 64) a.device_tokens = wished_view(16, CUMOE_I32, 1, 1);
  if (l->shared && form & 32) a.shared_gate = wished_view(18, (int32_t)dtype, 1, h);
  if (reduced && form & 16) a.residual = wished_view(20, (int32_t)dtype, TOKENS, h);
  a.out = wished_mut(22, (int32_t)dtype, reduced ? TOKENS : TOKENS * k, h);
  a.workspace = wished_mut(23, CUMOE_U8, 1, (int64_t)bytes);
  return a;
}

static void settle_args(cumoe_moe_args *a, const layer *l)
{
  cumoe_view *in[] = {&a->x,        &a->device_tokens, &a->router_weight, &a->router_bias, &a->logits,
                      &a->ids,      &a->weights,       &a->select_bias,   &a->expert_map,  &a->shared_gate,
                      &a->residual, &a->router_x,      &a->expert_scale};
  cumoe_view_mut *out[] = {&a->out, &a->ids_out, &a->weights_out, &a->counts_out, &a->load, &a->workspace};
  for (size_t i = 0; i < sizeof in / sizeof *in; i++) settle(in[i], 0);
  for (size_t i = 0; i < sizeof out / sizeof *out; i++) settle_mut(out[i]);
  const uintptr_t shared = (uintptr_t)a->shared;
  if (a->shared != l->shared) a->shared = shared % 2 ? l->weights : NULL;
}

static cumoe_status call_forward(input *in, const layer *l)
{
  cumoe_moe_args a = args_of(l, next_byte(in));
  change(in, &a, sizeof a);
  settle_args(&a, l);
  return cumoe_moe_forward(l->plan, l->weights, with_room(&a, sizeof a), NULL);
}

/* Whatever is bound serves the layer, or is refused there. */
static cumoe_status call_weights(input *in, const layer *l)
{
  cumoe_weights_desc w = l->where;
  cumoe_weights made = NULL;
  if (next_byte(in) % 2) w.down.per_expert = (const void *const *)&w;
  if (w.down.per_expert) w.down.data.rows /= w.experts;
  change(in, &w, sizeof w);
  settle_weights(&w);
  const cumoe_status status = cumoe_weights_bind(context, with_room(&w, sizeof w), &made);
  PROMISE((made != NULL) == (status == CUMOE_OK), "weights %p, status %d", (void *)made, (int)status);
  if (!made) return status;
  cumoe_moe_args a = args_of(l, 2);
  settle_args(&a, l);
  PROMISE(cumoe_moe_forward(l->plan, made, &a, NULL) != CUMOE_ERR_INTERNAL, "%s", cumoe_last_error());
  PROMISE(cumoe_weights_destroy(made) == CUMOE_OK, "%s", cumoe_last_error());
  return status;
}

/* Arguments of the stages, in one struct so that one change can reach any of them. */
typedef struct stage_input {
  cumoe_routing routing;
  cumoe_route route;
  cumoe_combine_args combine;
  cumoe_view x, weight, bias, logits, select_bias, ids, expert_map, pair_weights, h;
  cumoe_view_mut logits_out, ids_out, weights_out, h_out, y_out, workspace;
  cumoe_router_args router;
  cumoe_gate_args gate;
} stage_input;

static stage_input stage_of(const layer *l)
{
  const int64_t k = l->desc.routing.top_k, pairs = TOKENS * k, local = local_experts(l), columns = router_columns(l);
  const int32_t dtype = l->desc.dtype;
  const bool on_input = l->desc.routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
  const bool reduced = !(l->desc.flags & CUMOE_MOE_UNREDUCED);
  size_t bytes = 0;
  PROMISE(cumoe_map_workspace(l->plan, TOKENS, &bytes) == CUMOE_OK, "%s", cumoe_last_error());
  stage_input s = {.routing = l->desc.routing};
  s.route = (cumoe_route){sizeof s.route,
                          0,
                          wished_mut(0, CUMOE_I32, 1, local),
                          wished_mut(2, CUMOE_I32, 1, local + 1),
                          wished_mut(4, CUMOE_I32, 1, pairs),
                          wished_mut(6, CUMOE_I32, TOKENS, k)};
  s.x = wished_view(3, dtype, TOKENS, l->desc.hidden);
  s.weight = wished_view(5, dtype, columns, l->desc.hidden);
  s.logits = wished_view(7, CUMOE_F32, TOKENS, columns);
  s.ids = wished_view(8, CUMOE_I32, TOKENS, k);
  if (local < l->desc.num_experts) s.expert_map = wished_view(10, CUMOE_I32, 1, l->desc.num_experts);
  if (on_input) s.pair_weights = wished_view(9, CUMOE_F32, TOKENS, k);
  s.h = wished_view(11, dtype, pairs, l->desc.inter);
  s.logits_out = wished_mut(12, CUMOE_F32, TOKENS, columns);
  s.ids_out = wished_mut(13, CUMOE_I64, TOKENS, k);
  s.weights_out = wished_mut(14, CUMOE_F32, TOKENS, k);
  s.h_out = wished_mut(15, dtype, pairs, l->desc.inter);
  s.y_out = wished_mut(16, dtype, pairs, l->desc.hidden);
  s.workspace = wished_mut(17, CUMOE_U8, 1, (int64_t)bytes + 16 - (int64_t)bytes % 16);
  s.combine = (cumoe_combine_args){.size = sizeof s.combine, .y = wished_view(19, dtype, pairs, l->desc.hidden)};
  if (reduced && !on_input) s.combine.pair_weights = wished_view(9, CUMOE_F32, TOKENS, k);
  if (l->desc.routing.identity_experts) s.combine.x = s.x;
  s.combine.out = wished_mut(21, dtype, reduced ? TOKENS : pairs, l->desc.hidden);
  s.router = (cumoe_router_args){.size = sizeof s.router,
                                 .x = s.x,
                                 .weight = s.weight,
                                 .device_tokens = wished_view(18, CUMOE_I32, 1, 1),
                                 .logits = s.logits_out};
  s.gate = (cumoe_gate_args){.size = sizeof s.gate,
                             .routing = s.routing,
                             .logits = s.logits,
                             .expert_scale = wished_view(23, CUMOE_F32, 1, columns),
                             .chosen = s.ids,
                             .device_tokens = wished_view(18, CUMOE_I32, 1, 1),
                             .weights = s.weights_out};
  return s;
}

static void settle_stage(stage_input *s)
{
  cumoe_combine_args *c = &s->combine;
  cumoe_view *in[] = {&s->x,
                      &s->weight,
                      &s->bias,
                      &s->logits,
                      &s->select_bias,
                      &s->ids,
                      &s->expert_map,
                      &s->pair_weights,
                      &s->h,
                      &c->y,
                      &c->pair_weights,
                      &c->x,
                      &c->shared,
                      &c->shared_logit,
                      &c->residual,
                      &c->device_tokens,
                      &s->route.device_tokens,
                      &s->router.x,
                      &s->router.weight,
                      &s->router.bias,
                      &s->router.device_tokens,
                      &s->gate.logits,
                      &s->gate.select_bias,
                      &s->gate.expert_scale,
                      &s->gate.chosen,
                      &s->gate.device_tokens};
  cumoe_view_mut *out[] = {&s->logits_out, &s->ids_out,       &s->weights_out,   &s->h_out,          &s->y_out,
                           &s->workspace,  &s->route.counts,  &s->route.offsets, &s->route.row_pair, &s->route.slot_row,
                           &c->out,        &s->router.logits, &s->gate.ids,      &s->gate.weights};
  for (size_t i = 0; i < sizeof in / sizeof *in; i++) settle(in[i], 0);
  for (size_t i = 0; i < sizeof out / sizeof *out; i++) settle_mut(out[i]);
}

static cumoe_status call_stage(input *in, const layer *l)
{
  stage_input s = stage_of(l);
  const uint8_t stage = next_byte(in);
  change(in, &s, sizeof s);
  settle_stage(&s);
  const cumoe_route *route = with_room(&s.route, sizeof s.route);
  switch (chosen(stage, 6, 10)) {
  case 0: return cumoe_router(context, s.x, s.weight, s.bias, s.logits_out, NULL);
  case 1:
    return cumoe_gate(context, with_room(&s.routing, sizeof s.routing), s.logits, s.select_bias, s.ids_out,
                      s.weights_out, NULL);
  case 2: return cumoe_map(l->plan, s.ids, s.expert_map, route, s.workspace, NULL);
  case 3: return cumoe_up(l->plan, l->weights, s.x, route, s.pair_weights, s.h_out, NULL);
  case 4: return cumoe_down(l->plan, l->weights, s.h, route, s.y_out, NULL);
  case 5: return cumoe_combine(l->plan, route, with_room(&s.combine, sizeof s.combine), NULL);
  case 6: return cumoe_router_with(context, with_room(&s.router, sizeof s.router), NULL);
  case 7: return cumoe_gate_with(context, with_room(&s.gate, sizeof s.gate), NULL);
  case 8: return cumoe_permute(l->plan, s.x, route, s.y_out, NULL);
  default: return cumoe_up_permuted(l->plan, l->weights, s.combine.y, route, s.pair_weights, s.h_out, NULL);
  }
}

/* Rows that experts have room for: counts and offsets are anything. */
static cumoe_status call_masked(input *in, const layer *l)
{
  enum { CAPACITY = 4 };
  const int32_t dtype = l->desc.dtype, local = local_experts(l), rows = local * CAPACITY;
  size_t bytes = 0;
  PROMISE(cumoe_masked_workspace(l->plan, CAPACITY, &bytes) == CUMOE_OK, "%s", cumoe_last_error());
  cumoe_masked_args a = {.size = sizeof a,
                         .capacity = CAPACITY,
                         .x = wished_view(3, dtype, rows, l->desc.hidden),
                         .counts = wished_view(4, CUMOE_I32, 1, local),
                         .offsets = wished_view(6, CUMOE_I32, 1, local + 1),
                         .out = wished_mut(9, dtype, rows, l->desc.hidden),
                         .workspace = wished_mut(11, CUMOE_U8, 1, (int64_t)bytes)};
  change(in, &a, sizeof a);
  PROMISE(cumoe_masked_workspace(l->plan, a.capacity, &bytes) != CUMOE_ERR_INTERNAL, "%s", cumoe_last_error());
  settle(&a.x, 0);
  settle(&a.counts, 0);
  settle(&a.offsets, 0);
  settle_mut(&a.out);
  settle_mut(&a.workspace);
  return cumoe_masked_forward(l->plan, l->weights, with_room(&a, sizeof a), NULL);
}

/* ---- formats ----------------------------------------------------------------------------------------- */

/* Activations and weights into codes, and weights from one layout into another. */
typedef struct format_input {
  cumoe_format format;
  cumoe_view x, static_scale;
  cumoe_view_mut codes, scales, report, to;
  cumoe_quantize_args weights;
  cumoe_repack_args repack;
} format_input;

static cumoe_format format_by(uint8_t form)
{
  switch (form % 6) {
  case 0: return cumoe_format_fp8_block(CUMOE_F32);
  case 1: return cumoe_format_int8(CUMOE_BF16);
  case 2: return cumoe_format_mxfp4();
  case 3: return cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES);
  case 4: return cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC);
  default: {
    cumoe_format f = cumoe_format_int4(32, CUMOE_F16);
    f.zero = CUMOE_ZERO_CODES_OUT;
    return f;
  }
  }
}

/* Two experts of [16, 32], by GPTQ, AWQ, ModelOpt, or as blocks of GGUF. */
static cumoe_repack_args repack_of(uint8_t form)
{
  enum { EXPERTS = 2, OUT = 16, IN = 32 };
  static const int ggml[] = {CUMOE_GGML_Q4_0, CUMOE_GGML_Q4_1, CUMOE_GGML_Q8_0,
                             CUMOE_GGML_Q4_K, CUMOE_GGML_Q6_K, CUMOE_GGML_MXFP4},
                   row_bytes[] = {18, 20, 34, 144, 210, 17};
  const int which = form / 4 % 6;
  cumoe_repack_args r = {.size = sizeof r, .experts = EXPERTS, .major = CUMOE_IN_OUT, .out = OUT, .in = IN};
  r.scale = wished_view(3, CUMOE_F16, EXPERTS, OUT);
  r.zero = wished_view(5, CUMOE_I32, EXPERTS, OUT / 8);
  if (form & 128) r.order = wished_view(8, CUMOE_I32, 1, IN), r.format.act_order = 1;
  switch (form % 4) {
  case 0:
    r.format = cumoe_format_gptq(32, 1);
    r.codes = wished_view(1, CUMOE_I32, EXPERTS * IN / 8, OUT);
    break;
  case 1:
    r.format = cumoe_format_awq(32);
    r.codes = wished_view(1, CUMOE_I32, EXPERTS * IN, OUT / 8);
    break;
  case 2:
    r.format = cumoe_format_modelopt_int4(32, CUMOE_F16);
    r.major = CUMOE_OUT_IN;
    r.codes = wished_view(1, CUMOE_U8, EXPERTS * OUT / 2, IN);
    r.scale = wished_view(3, CUMOE_F16, EXPERTS * OUT, 1);
    r.zero = (cumoe_view){0};
    break;
  default:
    r.format = cumoe_format_ggml(ggml[which]);
    r.major = CUMOE_OUT_IN;
    if (which == 3 || which == 4) r.in = 256;
    r.codes = wished_view(1, CUMOE_U8, EXPERTS * OUT, row_bytes[which]);
    r.scale = r.zero = (cumoe_view){0};
  }
  r.format.act_order = form & 128 ? 1 : 0;
  return r;
}

static format_input format_of(const layer *l, uint8_t form)
{
  const int32_t dtype = l->desc.dtype;
  format_input p = {.format = format_by(form), .repack = repack_of(form)};
  size_t bytes = 0;
  p.x = wished_view(11, dtype, TOKENS, 48);
  if (p.format.rows == CUMOE_ROWS_STATIC) p.static_scale = wished_view(13, CUMOE_F32, 1, 1);
  p.codes = wished_mut(15, p.format.element == CUMOE_ELEMENT_E4M3 ? CUMOE_E4M3 : CUMOE_I8, TOKENS, 48);
  p.scales = wished_mut(17, CUMOE_F32, 1, TOKENS);
  p.report = wished_mut(19, CUMOE_I64, local_experts(l), CUMOE_SCAN_FIELDS);
  p.weights = (cumoe_quantize_args){.size = sizeof p.weights,
                                    .experts = 2,
                                    .gate_order = form / 6 % 3 ? CUMOE_GATE_UP_CONCAT : 0,
                                    .format = p.format,
                                    .weights = wished_view(21, dtype, 32, 64),
                                    .codes.data = wish(23),
                                    .scale.data = wish(25),
                                    .zero.data = wish(27),
                                    .global.data = wish(29)};
  PROMISE(cumoe_quantize_shapes(&p.weights) == CUMOE_OK, "%s", cumoe_last_error());
  (void)cumoe_weights_repack_size(&p.repack, &bytes);
  p.to = wished_mut(31, CUMOE_U8, 1, (int64_t)bytes);
  return p;
}

static void settle_format(format_input *p)
{
  cumoe_quantize_args *w = &p->weights;
  cumoe_repack_args *r = &p->repack;
  cumoe_view *in[] = {&p->x, &p->static_scale, &w->weights, &r->codes, &r->scale, &r->zero, &r->order};
  cumoe_view_mut *out[] = {&p->codes, &p->scales, &p->report, &p->to, &w->codes, &w->scale, &w->zero, &w->global};
  for (size_t i = 0; i < sizeof in / sizeof *in; i++) settle(in[i], 0);
  for (size_t i = 0; i < sizeof out / sizeof *out; i++) settle_mut(out[i]);
}

static cumoe_status call_repack(const format_input *p)
{
  const cumoe_repack_args *args = with_room(&p->repack, sizeof p->repack);
  cumoe_projection projection;
  cumoe_format format;
  size_t bytes = 0;
  const cumoe_status sized = cumoe_weights_repack_size(args, &bytes);
  if (sized != CUMOE_OK) return sized;
  PROMISE(bytes % (size_t)p->repack.experts == 0, "%zu bytes, %d experts", bytes, (int)p->repack.experts);
  return cumoe_weights_repack(context, args, p->to, &projection, &format, NULL);
}

static cumoe_status call_format(input *in, const layer *l)
{
  const uint8_t which = next_byte(in);
  format_input p = format_of(l, next_byte(in));
  change(in, &p, sizeof p);
  settle_format(&p);
  switch (which % 4) {
  case 0: return cumoe_quantize_rows(context, &p.format, p.x, p.static_scale, p.codes, p.scales, NULL);
  case 1: return cumoe_quantize_weights(context, with_room(&p.weights, sizeof p.weights), NULL);
  case 2: return call_repack(&p);
  default: return cumoe_weights_scan(context, l->weights, p.report, NULL);
  }
}

/* Buffers and views: shapes, slices, copies, handles that never were. */
typedef struct buffer_input {
  cumoe_view a;
  cumoe_view_mut b;
  int64_t rows, cols, first, count;
  uint64_t bytes, handle;
  int32_t dtype;
  uint32_t flags;
} buffer_input;

static cumoe_status call_buffer(input *in, const layer *l)
{
  static unsigned char host[ARENA];
  const uint8_t which = next_byte(in);
  buffer_input p = {wished_view(1, CUMOE_F32, 4, 8), wished_mut(2, CUMOE_F32, 4, 8), 4, 8, 1, 2, 128, 5, CUMOE_F32, 0};
  cumoe_buffer made = {0};
  cumoe_view slice;
  cumoe_view_mut slice_mut;
  cumoe_buffer_info info = {.size = sizeof info};
  (void)l;
  change(in, &p, sizeof p);
  settle(&p.a, 0);
  settle_mut(&p.b);
  switch (which % 15) {
  case 0: return cumoe_view_rows(p.a, p.first, p.count, &slice);
  case 1: return cumoe_view_cols(p.a, p.first, p.count, &slice);
  case 2: return cumoe_view_rows_mut(p.b, p.first, p.count, &slice_mut);
  case 3: return cumoe_view_cols_mut(p.b, p.first, p.count, &slice_mut);
  case 4:
    return p.bytes > ARENA && p.bytes <= 1 << 20 ? CUMOE_OK : cumoe_copy_from_host(context, p.b, host, p.bytes, NULL);
  case 5:
    return p.bytes > ARENA && p.bytes <= 1 << 20 ? CUMOE_OK : cumoe_copy_to_host(context, host, p.bytes, p.a, NULL);
  case 6: return cumoe_copy(context, p.b, p.a, NULL);
  case 7: return cumoe_fill(context, p.b, (uint8_t)p.first, NULL);
  case 8:
    if (p.handle == live.id) return CUMOE_OK;
    made.id = p.handle;
    PROMISE(cumoe_buffer_get_info(made, &info) != CUMOE_OK, "0x%llx is a buffer", (unsigned long long)p.handle);
    return cumoe_buffer_free(&made);
  case 9: return cumoe_view_split(p.a, p.first, &slice, &p.a);
  case 10: return cumoe_view_split_mut(p.b, p.first, &slice_mut, &p.b);
  case 11: return cumoe_view_cast(p.a, (cumoe_dtype)p.dtype, &slice);
  case 12: return cumoe_view_cast_mut(p.b, (cumoe_dtype)p.dtype, &slice_mut);
  case 13: return cumoe_fill_value(context, p.b, &p.bytes, NULL);
  default: {
    if (p.rows > 1 << 10 && p.rows < 1ll << 40 && p.cols > 0) p.rows = 1 << 10;
    if (p.cols > 1 << 10 && p.cols < 1ll << 40) p.cols = 1 << 10;
    const cumoe_status status =
        cumoe_buffer_alloc_with(context, (cumoe_dtype)p.dtype, p.rows, p.cols, p.flags, NULL, &made);
    PROMISE((made.id != 0) == (status == CUMOE_OK), "handle 0x%llx, status %d", (unsigned long long)made.id,
            (int)status);
    return cumoe_buffer_free(&made) == CUMOE_OK ? status : CUMOE_ERR_INTERNAL;
  }
  }
}

/* Operations: shapes, strides, batches. */
typedef struct op_input {
  cumoe_matmul_args matmul;
  cumoe_view a, b, c;
  cumoe_view_mut y;
  float value, unused;
} op_input;

static wide steps_of(int64_t batch, int64_t stride)
{
  return batch > 1 ? clamped(((wide)batch - 1) * stride) : 0;
}

/* Null instead of hours of work. */
static void settle_matmul(cumoe_matmul_args *m)
{
  const double inner = (double)(m->flags & CUMOE_MATMUL_TRANSPOSE_A ? m->a.rows : m->a.cols),
               work = (double)(m->batch > 1 ? m->batch : 1) * (double)m->c.rows * (double)m->c.cols * inner;
  cumoe_view c = cumoe_const(m->c);
  settle(&m->a, steps_of(m->batch, m->a_stride));
  settle(&m->b, steps_of(m->batch, m->b_stride));
  settle(&c, steps_of(m->batch, m->c_stride));
  memcpy(&m->c, &c, sizeof c);
  settle_mut(&m->workspace);
  if (work > 1 << 22) m->batch = -1;
}

static cumoe_status call_op(input *in, const layer *l)
{
  const int32_t type = l->desc.dtype;
  const uint8_t which = next_byte(in);
  op_input p = {.matmul = {.size = sizeof p.matmul, .batch = 2, .a_stride = 40, .c_stride = 48},
                .a = wished_view(1, type, 4, 8),
                .b = wished_view(3, type, 4, 8),
                .c = wished_view(5, type, 1, 8),
                .y = wished_mut(7, type, 4, 8),
                .value = 0.5f};
  p.matmul.a = wished_view(9, type, 5, 8);
  p.matmul.b = wished_view(11, type, 8, 6);
  p.matmul.c = wished_mut(13, type, 5, 6);
  p.matmul.workspace = wished_mut(15, CUMOE_U8, 1, 256);
  change(in, &p, sizeof p);
  settle_matmul(&p.matmul);
  settle(&p.a, 0);
  settle(&p.b, 0);
  settle(&p.c, 0);
  settle_mut(&p.y);
  switch (which % 12) {
  case 0: return cumoe_add(context, p.a, p.b, p.y, NULL);
  case 1: return cumoe_mul(context, p.a, p.b, p.y, NULL);
  case 2: return cumoe_scale(context, p.value, p.a, p.y, NULL);
  case 3: return cumoe_relu(context, p.a, p.y, NULL);
  case 4: return cumoe_sigmoid(context, p.a, p.y, NULL);
  case 5: return cumoe_silu(context, p.a, p.y, NULL);
  case 6: return cumoe_gelu(context, p.a, p.y, NULL);
  case 7: return cumoe_gelu_tanh(context, p.a, p.y, NULL);
  case 8: return cumoe_softmax(context, p.a, p.y, NULL);
  case 9: return cumoe_layernorm(context, p.a, p.c, p.c, p.value, p.y, NULL);
  case 10: return cumoe_rmsnorm(context, p.a, p.c, p.value, p.y, NULL);
  default: return cumoe_matmul(context, with_room(&p.matmul, sizeof p.matmul), NULL);
  }
}

/* Training: shapes, vectors of ids and offsets, lists. */
typedef struct train_input {
  cumoe_embedding_backward_args embedding;
  cumoe_norm_backward_args norm;
  cumoe_cross_entropy_args loss;
  cumoe_global_norm_args global;
  cumoe_adamw_args adamw;
  cumoe_rope_args rope;
  cumoe_view gradients[2], x, dy;
  cumoe_view_mut dx;
} train_input;

static train_input make_train(int32_t type)
{
  train_input t = {.x = wished_view(1, type, 5, 8), .dy = wished_view(3, type, 5, 8), .dx = wished_mut(5, type, 5, 8)};
  const cumoe_view ids = wished_view(0, CUMOE_I32, 1, 5), one = wished_view(7, CUMOE_F32, 1, 1);
  const cumoe_view_mut room = wished_mut(9, CUMOE_U8, 1, 512), counted = wished_mut(11, CUMOE_I64, 1, 1);
  t.embedding = (cumoe_embedding_backward_args){.size = sizeof t.embedding, .dy = t.dy, .ids = ids, .workspace = room};
  t.embedding.dtable = wished_mut(13, CUMOE_F32, 7, 8);
  t.norm = (cumoe_norm_backward_args){.size = sizeof t.norm, .x = t.x, .dy = t.dy, .dx = t.dx, .workspace = room};
  t.norm.weight = wished_view(15, type, 1, 8);
  t.norm.dweight = wished_mut(17, CUMOE_F32, 1, 8);
  t.loss = (cumoe_cross_entropy_args){.size = sizeof t.loss, .logits = t.x, .targets = ids, .counted = counted};
  t.loss.loss = wished_mut(19, CUMOE_F32, 1, 1);
  t.loss.losses = wished_mut(21, CUMOE_F32, 1, 5);
  t.loss.dlogits = t.dx;
  t.gradients[0] = t.x;
  t.gradients[1] = t.dy;
  t.global = (cumoe_global_norm_args){.size = sizeof t.global, .max_norm = 1, .count = 2, .workspace = room};
  t.global.norm = t.loss.loss;
  t.global.factor = wished_mut(23, CUMOE_F32, 1, 1);
  t.global.step = counted;
  t.adamw = (cumoe_adamw_args){.size = sizeof t.adamw, .rate = 1, .gradient = t.x, .factor = one};
  t.adamw.step = wished_view(2, CUMOE_I64, 1, 1);
  t.adamw.master = wished_mut(25, CUMOE_F32, 5, 8);
  t.adamw.first = wished_mut(27, CUMOE_F32, 5, 8);
  t.adamw.second = wished_mut(29, CUMOE_F32, 5, 8);
  t.rope = (cumoe_rope_args){.size = sizeof t.rope, .heads = 2, .head_dim = 4, .x = t.x, .positions = ids, .y = t.dx};
  t.rope.cosine = wished_view(4, CUMOE_F32, 6, 2);
  t.rope.sine = wished_view(6, CUMOE_F32, 6, 2);
  return t;
}

static void settle_train(train_input *t)
{
  cumoe_view *in[] = {&t->embedding.dy,
                      &t->embedding.ids,
                      &t->norm.x,
                      &t->norm.dy,
                      &t->norm.weight,
                      &t->loss.logits,
                      &t->loss.targets,
                      &t->gradients[0],
                      &t->gradients[1],
                      &t->adamw.gradient,
                      &t->adamw.step,
                      &t->adamw.factor,
                      &t->adamw.schedule,
                      &t->rope.x,
                      &t->rope.positions,
                      &t->rope.cosine,
                      &t->rope.sine,
                      &t->x,
                      &t->dy};
  cumoe_view_mut *out[] = {&t->embedding.dtable, &t->embedding.workspace, &t->norm.dx,      &t->norm.dweight,
                           &t->norm.dbias,       &t->norm.workspace,      &t->loss.loss,    &t->loss.losses,
                           &t->loss.counted,     &t->loss.dlogits,        &t->global.norm,  &t->global.factor,
                           &t->global.step,      &t->global.workspace,    &t->adamw.master, &t->adamw.first,
                           &t->adamw.second,     &t->adamw.weights,       &t->rope.y,       &t->dx};
  for (size_t i = 0; i < sizeof in / sizeof *in; i++) settle(in[i], 0);
  for (size_t i = 0; i < sizeof out / sizeof *out; i++) settle_mut(out[i]);
  if (t->global.count > 2) t->global.count = 2;
  t->global.gradients = t->gradients;
}

static cumoe_status call_train(input *in, const layer *l)
{
  const uint8_t which = next_byte(in);
  train_input t = make_train(l->desc.dtype);
  change(in, &t, sizeof t);
  settle_train(&t);
  switch (which % 9) {
  case 0: return cumoe_embedding(context, t.x, t.embedding.ids, t.dx, NULL);
  case 1: return cumoe_embedding_backward(context, with_room(&t.embedding, sizeof t.embedding), NULL);
  case 2: return cumoe_layernorm_backward(context, with_room(&t.norm, sizeof t.norm), NULL);
  case 3: return cumoe_rmsnorm_backward(context, with_room(&t.norm, sizeof t.norm), NULL);
  case 4: return cumoe_cross_entropy(context, with_room(&t.loss, sizeof t.loss), NULL);
  case 5: return cumoe_global_norm(context, with_room(&t.global, sizeof t.global), NULL);
  case 6: return cumoe_adamw(context, with_room(&t.adamw, sizeof t.adamw), NULL);
  case 7: return cumoe_rope(context, with_room(&t.rope, sizeof t.rope), NULL);
  default: return cumoe_gelu_backward(context, t.x, t.dy, t.dx, NULL);
  }
}

/* Attention: the indices lie in arenas of any numbers, or small ones. */
typedef struct attention_input {
  cumoe_attention_args forward;
  cumoe_attention_backward_args backward;
} attention_input;

static cumoe_status call_attention(input *in, const layer *l)
{
  const uint8_t which = next_byte(in);
  const int32_t type = l->desc.dtype;
  attention_input t = {.forward = {.size = sizeof t.forward, .heads = 2, .kv_heads = 1, .head_dim = 8},
                       .backward = {.size = sizeof t.backward}};
  cumoe_attention_args *f = &t.forward;
  cumoe_attention_backward_args *b = &t.backward;
  const int indices = which >> 4 & 1; /* small numbers, or any */
  f->q = wished_view(1, type, 6, 16);
  f->k = wished_view(3, type, 9, 8);
  f->v = wished_view(5, type, 9, 8);
  f->q_offsets = wished_view(2 + indices, CUMOE_I32, 1, 3);
  f->k_lengths = wished_view(4 + indices, CUMOE_I32, 1, 2);
  if (which >> 5 & 1) f->page = 3;
  if (f->page)
    f->pages = wished_view(6 + indices, CUMOE_I32, 2, 3);
  else
    f->k_offsets = wished_view(8 + indices, CUMOE_I32, 1, 3);
  f->out = wished_mut(11, type, 6, 16);
  f->lse = wished_mut(13, CUMOE_F32, 6, 2);
  b->dout = wished_view(15, type, 6, 16);
  b->dq = wished_mut(17, type, 6, 16);
  b->dk = wished_mut(19, type, 9, 8);
  b->dv = wished_mut(21, type, 9, 8);
  b->delta = wished_mut(23, CUMOE_F32, 6, 2);
  change(in, &t, sizeof t);
  cumoe_view *read[] = {&f->q,         &f->k,     &f->v,     &f->q_offsets, &f->k_offsets,
                        &f->k_lengths, &f->pages, &f->sinks, &b->dout};
  cumoe_view_mut *written[] = {&f->out, &f->lse, &b->dq, &b->dk, &b->dv, &b->dsinks, &b->delta};
  for (size_t i = 0; i < sizeof read / sizeof *read; i++) settle(read[i], 0);
  for (size_t i = 0; i < sizeof written / sizeof *written; i++) settle_mut(written[i]);
  b->forward = with_room(f, sizeof *f);
  return which % 2 ? cumoe_attention(context, b->forward, NULL)
                   : cumoe_attention_backward(context, with_room(b, sizeof *b), NULL);
}

/* ---- the layer's backward ----------------------------------------------------------------------------- */

static void settle_grads(cumoe_moe_grads *g, const layer *l)
{
  cumoe_view_mut *out[] = {&g->d_x,        &g->d_router_x,     &g->d_router_weight, &g->d_router_bias,
                           &g->d_logits,   &g->d_pair_weights, &g->d_expert_scale,  &g->d_shared_gate,
                           &g->d_residual, &g->losses,         &g->workspace};
  settle(&g->d_out, 0);
  settle(&g->kept, 0);
  for (size_t i = 0; i < sizeof out / sizeof *out; i++) settle_mut(out[i]);
  if (g->d_weights != l->gradient) g->d_weights = (uintptr_t)g->d_weights % 2 ? l->weights : NULL;
  if (g->d_shared) g->d_shared = l->gradient;
  lent |= 31u << FIRST_GRADIENT;
}

/* What was kept is anything. */
static cumoe_status call_backward(input *in, const layer *l)
{
  const uint8_t form = next_byte(in);
  const int64_t h = l->desc.hidden, k = l->desc.routing.top_k, columns = router_columns(l);
  const int32_t dtype = l->desc.dtype;
  const bool unreduced = l->desc.flags & CUMOE_MOE_UNREDUCED, keeps = form & 8;
  size_t kept = 0, bytes = 0;
  const cumoe_status found = cumoe_moe_kept(l->plan, TOKENS, &kept),
                     laid_out = cumoe_moe_backward_workspace(l->plan, TOKENS, keeps, &bytes);
  PROMISE(found == laid_out && (found == CUMOE_OK) == (l->gradient != NULL), "%s", cumoe_last_error());
  cumoe_moe_args a = args_of(l, form);
  cumoe_moe_grads g = {.size = sizeof g,
                       .d_out = wished_view(22, dtype, unreduced ? TOKENS * k : TOKENS, h),
                       .d_weights = l->gradient,
                       .d_x = wished_mut(9, dtype, TOKENS, h),
                       .d_pair_weights = wished_mut(10, CUMOE_F32, TOKENS, k),
                       .workspace = wished_mut(29, CUMOE_U8, 1, (int64_t)bytes)};
  if (keeps) g.kept = wished_view(30 + form % 2, CUMOE_U8, 1, (int64_t)kept);
  if (form % 3 != 2) g.d_logits = wished_mut(13, CUMOE_F32, TOKENS, columns), g.balance = g.z = 1;
  if (form % 3 == 0) g.d_router_weight = wished_mut(14, CUMOE_F32, columns, h);
  change(in, &a, sizeof a);
  change(in, &g, sizeof g);
  settle_args(&a, l);
  settle_grads(&g, l);
  if (form & 4) return cumoe_moe_forward_keep(l->plan, l->weights, with_room(&a, sizeof a), g.workspace, NULL);
  return cumoe_moe_backward(l->plan, l->weights, with_room(&a, sizeof a), with_room(&g, sizeof g), NULL);
}

/* ---- one input --------------------------------------------------------------------------------------- */

typedef cumoe_status call(input *in, const layer *l);
static call *const calls[] = {call_context, call_plan,   call_weights, call_forward, call_stage,     call_buffer,
                              call_op,      call_masked, call_format,  call_train,   call_attention, call_backward};

static void set_up(void)
{
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = 1};
  make_arenas();
  PROMISE(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &context) == CUMOE_OK, "%s", cumoe_last_error());
  PROMISE(cumoe_buffer_alloc(context, CUMOE_U8, 1, ARENA, NULL, &live) == CUMOE_OK, "%s", cumoe_last_error());
  PROMISE(cumoe_buffer_alloc(context, CUMOE_U8, 1, 1, NULL, &freed) == CUMOE_OK, "%s", cumoe_last_error());
  cumoe_buffer last = freed;
  PROMISE(cumoe_buffer_free(&last) == CUMOE_OK, "%s", cumoe_last_error());
  for (int i = 0; i < LAYERS; i++) make_layer(i);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  input in = {data, data + (size < 256 ? size : 256)};
  if (!context) set_up();
  const int which = chosen(next_byte(&in), 7, (int)(sizeof calls / sizeof *calls));
  const layer *l = &layers[next_byte(&in) % LAYERS];
  reset_arenas();
  const cumoe_status status = calls[which](&in, l);
  PROMISE(strcmp(cumoe_status_name(status), "CUMOE_ERR_UNKNOWN") != 0 && status != CUMOE_ERR_INTERNAL, "status %d",
          (int)status);
  if (status == CUMOE_OK) return 0;
  PROMISE(strncmp(cumoe_last_error(), "cumoe_", 6) == 0, "status %d, text \"%s\"", (int)status, cumoe_last_error());
  PROMISE(which == 2 || arenas_untouched(), "%s, and memory was changed", cumoe_last_error());
  return 0;
}
