/*
 * Groups of CPU contexts, a thread a rank: what they answer has the bits of one rank with all experts (EXACT), or of
 * the ranks' rounded sums; any number of tokens a rank, in rounds; experts anywhere, in any number, several times; two
 * lanes; in one call or in parts; ranks that disagree, stop, fail or give up, and those that go on without them; where
 * everything lies, for up to 1,024 ranks.
 */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "../host/ep.h"
#include "cases_format.h"

enum { MOST_RANKS = 70, MOST_LANES = 2, MOST_EXPERTS = 256, CALLS = 3 };
enum { SHARED_INTER = 24, SHARED_CODED = 32, ROUTER_WIDTH = 16, POISON = 0xff };
enum { SPARE = 1 << 20 }; /* bytes behind an arena: what is laid into it on purpose ends before other memory begins */

static int32_t gpus; /* 0: the CPU device */
static bool gave_up; /* a world, there */
static void **comms; /* a communicator of each rank, which staged.c has made; NULL: ranks share memory */

/* ---- a layer, its tokens, and where its experts are ---- */

typedef enum spread { BLOCKS, SCATTERED, ALL_ON_LAST, TWICE } spread;

typedef struct world {
  const char *name;
  int32_t ranks, lanes, experts, top_k, dtype, hidden, inter;
  int64_t capacity, tokens_max, tokens[MOST_RANKS]; /* of each rank */
  spread spread;
  bool replays, parts, counted, loses, dedup, exact, shared, residual, weigh_input, odd_ids, bias_row;
  bool routed, chosen, from_logits; /* ids and weights; ids; neither, and logits: else the router's */
  bool shortens;                    /* after its first call a rank waits for half a second only */
  bool misplaces;                   /* the first expert's place names none of its rank */
  bool moves;                       /* every second call, experts in two places are in the second alone */
  bool apart, keeps, ungated;       /* router_x; ids_out and weights_out; a shared expert without a gate */
  bool by_few;                      /* the experts, on a GPU: by the kernels of so many rows */
  bool aside, own;      /* rows aside, and own tokens a layer of their own, however few; of one rank a GPU */
  bool ruled;           /* by a router's bias, rounded and scaled logits, experts' scales */
  bool out_f32;         /* out, and what is added to it */
  bool varies;          /* calls say in turn tokens_max, the group's room, three times tokens_max */
  const uint64_t *says; /* of each rank: its mask, 0: makes no call of it */
  int32_t aborts;       /* so many say it; the first of them aborts at once when it has been told, */
  int64_t meanwhile;    /* or meanwhile, by another thread, after so many ns; 0: not */
  cumoe_format format, shared_format; /* of the experts' weights and of the shared expert's, or zeros */
  int32_t zero, identity, groups;     /* of experts, which are ranked by their sigmoids and a bias */
  /* made */
  cumoe_moe_desc desc;
  int64_t all; /* tokens of all ranks */
  tensor x, router, shared_gate, residual_rows, ids, weights, placement;
  tensor logits, router_apart, x_apart, ids_kept, weights_kept, bias, router_bias, expert_scale;
  host_projection experts_of[2], shared_of[2];      /* gate_up, down */
  int32_t local[MOST_RANKS], (*held)[MOST_EXPERTS]; /* experts of each rank, by their local number */
} world;

static int32_t places_of(const world *w)
{
  return w->spread == TWICE ? 3 : 1;
}

static void hold(world *w, int32_t expert, int32_t replica, int32_t rank)
{
  const int32_t local = w->local[rank]++;
  w->held[rank][local] = expert;
  tensor_set(&w->placement, expert, replica, cumoe_ep_place(rank, local));
}

/* Of every second call: behind the first, [experts, places] each. */
static void move_experts(world *w)
{
  for (int32_t e = 0; e < w->experts; e++) {
    const int32_t second = places_of(w) > 1 ? (int32_t)tensor_get(&w->placement, e, 1) : -1;
    const bool moved = w->moves && second >= 0;
    for (int32_t p = 0; p < places_of(w); p++)
      tensor_set(&w->placement, w->experts + e, p, moved ? (p ? -1 : second) : tensor_get(&w->placement, e, p));
  }
}

static int64_t placement_row(const world *w, int64_t call)
{
  return call % 2 * w->experts;
}

static void place_experts(world *w)
{
  w->placement = tensor_new(CUMOE_I32, 2 * w->experts, places_of(w));
  w->held = scratch(MOST_RANKS, sizeof *w->held);
  for (int32_t e = 0; e < w->experts; e++) {
    for (int32_t p = 0; p < places_of(w); p++) tensor_set(&w->placement, e, p, -1);
    const int32_t scattered = (e * 5 + 1) % w->ranks, block = e * w->ranks / w->experts;
    hold(w, e, 0, w->spread == ALL_ON_LAST ? w->ranks - 1 : w->spread == SCATTERED ? scattered : block);
    if (w->spread == TWICE && e % 3 == 0) hold(w, e, 1, (block + 1) % w->ranks);
  }
  move_experts(w);
  /* A rank without any holds one that nobody asks it for: a layer has at least one expert. */
  for (int32_t r = 0; r < w->ranks; r++)
    if (w->local[r] == 0) w->held[r][w->local[r]++] = 0;
}

static void misplace(world *w)
{
  const int32_t rank = (int32_t)tensor_get(&w->placement, 0, 0) >> 16;
  for (int32_t call = 0; call < 2; call++)
    tensor_set(&w->placement, call * w->experts, 0, cumoe_ep_place(rank, w->local[rank]));
}

static void make_coded(const world *w, rng *r, cumoe_format f, int32_t experts, int32_t inter, host_projection of[2])
{
  const weights_form form = {CUMOE_GATE_UP_CONCAT, CUMOE_OUT_IN, CUMOE_OUT_IN, .up = f, .down = f};
  if (format_is_dense(&f)) return;
  const host_weights all = random_weights(r, &w->desc, experts, inter, form);
  of[0] = all.gate_up;
  of[1] = all.down;
}

static void make_kept(world *w)
{
  w->ids_kept = tensor_new(CUMOE_I32, w->x.rows, w->top_k);
  w->weights_kept = tensor_new(CUMOE_F32, w->x.rows, w->top_k);
}

static void make_world(world *w)
{
  rng r = {(uint64_t)w->ranks * 131 + (uint64_t)w->top_k};
  const int64_t rows = w->lanes ? CALLS * w->lanes : CALLS, ids = w->experts + w->zero + w->identity;
  const int32_t shared_inter = format_is_dense(&w->shared_format) ? SHARED_INTER : SHARED_CODED;
  if (w->lanes == 0) w->lanes = 1;
  if (w->hidden == 0) w->hidden = 32, w->inter = 16;
  for (int32_t i = 0; i < w->ranks; i++) w->all += w->tokens[i];
  w->desc = (cumoe_moe_desc){.size = sizeof w->desc,
                             .num_experts = w->experts,
                             .hidden = w->hidden,
                             .inter = w->inter,
                             .shared_inter = w->shared ? shared_inter : 0,
                             .dtype = w->dtype,
                             .out_dtype = w->out_f32 ? CUMOE_F32 : w->dtype,
                             .flags = gpus && !w->by_few ? CUMOE_MOE_BATCH_INVARIANT
                                                         : 0, /* the same kernels for any tokens */
                             .routing = cumoe_routing_mixtral(w->top_k),
                             .up_format = w->format,
                             .down_format = w->format,
                             .shared_up_format = w->shared_format,
                             .shared_down_format = w->shared_format};
  if (w->groups) w->desc.routing = cumoe_routing_deepseek_v3(w->top_k, w->groups, w->groups / 2, 2.5f);
  w->desc.routing.zero_experts = w->zero;
  w->desc.routing.identity_experts = w->identity;
  if (w->ruled) w->desc.routing.logits_dtype = CUMOE_F16, w->desc.routing.logit_scale = .5f;
  if (w->weigh_input) w->desc.routing.flags |= CUMOE_ROUTE_WEIGHT_ON_INPUT;
  w->x = tensor_normal(&r, w->dtype, rows * w->all, w->hidden, 0, 1);
  w->router = tensor_normal(&r, w->dtype, ids, w->hidden, 0, .4);
  w->experts_of[0].data = tensor_normal(&r, w->dtype, w->experts * 2 * w->inter, w->hidden, 0, .3);
  w->experts_of[1].data = tensor_normal(&r, w->dtype, w->experts * w->hidden, w->inter, 0, .3);
  w->shared_of[0].data = tensor_normal(&r, w->dtype, 2 * shared_inter, w->hidden, 0, .3);
  w->shared_of[1].data = tensor_normal(&r, w->dtype, w->hidden, shared_inter, 0, .3);
  w->shared_gate = tensor_normal(&r, w->dtype, 1, w->hidden, 0, .3);
  w->residual_rows = tensor_normal(&r, w->desc.out_dtype, w->bias_row ? 1 : rows * w->all, w->hidden, 0, 1);
  w->ids = route_tokens(&r, w->odd_ids ? PATTERN_HOSTILE : PATTERN_UNIFORM, CUMOE_I64, rows * w->all, w->top_k,
                        (int32_t)ids);
  w->weights = tensor_normal(&r, CUMOE_F32, rows * w->all, w->top_k, 0, .5);
  w->logits = tensor_normal(&r, CUMOE_F32, rows * w->all, ids, 0, 1);
  w->bias = tensor_normal(&r, CUMOE_F32, 1, ids, 0, .1);
  w->router_bias = tensor_normal(&r, CUMOE_F32, 1, ids, 0, 1);
  w->expert_scale = tensor_normal(&r, CUMOE_F32, 1, ids, 1, .3);
  w->router_apart = tensor_normal(&r, w->dtype, ids, ROUTER_WIDTH, 0, .4);
  w->x_apart = tensor_normal(&r, w->dtype, rows * w->all, ROUTER_WIDTH, 0, 1);
  make_kept(w);
  make_coded(w, &r, w->format, w->experts, w->inter, w->experts_of);
  make_coded(w, &r, w->shared_format, 1, shared_inter, w->shared_of);
  if (w->weights.rows) tensor_set(&w->weights, 0, 0, 0);
  place_experts(w);
  if (w->misplaces) misplace(w);
}

/* Rows first .. of a tensor. */
static cumoe_view rows_of(const tensor *t, int64_t first, int64_t rows)
{
  const size_t row = (size_t)t->cols * cumoe_dtype_bytes((cumoe_dtype)t->dtype);
  return cumoe_matrix(t->data + (size_t)first * row, (cumoe_dtype)t->dtype, rows, t->cols, t->cols);
}

/* Of these experts. */
static cumoe_array array_of(const tensor *t, int32_t experts, const int32_t *held, int32_t count, const void **pointers)
{
  if (!t->data) return (cumoe_array){0};
  const int64_t rows = t->rows / experts;
  for (int32_t i = 0; i < count; i++) pointers[i] = rows_of(t, held[i] * rows, 1).data;
  return (cumoe_array){.data = cumoe_matrix(NULL, (cumoe_dtype)t->dtype, rows, t->cols, t->cols),
                       .per_expert = pointers};
}

static cumoe_projection projection_of(const host_projection *p, int32_t experts, const int32_t *held, int32_t count,
                                      const void *pointers[3][MOST_EXPERTS])
{
  const cumoe_array data = array_of(&p->data, experts, held, count, pointers[0]);
  return (cumoe_projection){.data = data.data,
                            .per_expert = data.per_expert,
                            .scale = array_of(&p->scale, experts, held, count, pointers[1]),
                            .zero = array_of(&p->zero, experts, held, count, pointers[2])};
}

/* So many experts, where they lie among all. */
static cumoe_status bind_experts(const world *w, cumoe_context context, const host_projection of[2], cumoe_format f,
                                 int32_t experts, int32_t inter, const int32_t *held, int32_t count,
                                 cumoe_weights *weights)
{
  const void *pointers[2][3][MOST_EXPERTS];
  const cumoe_weights_desc d = {.size = sizeof d,
                                .experts = count,
                                .hidden = w->hidden,
                                .inter = inter,
                                .gate_order = CUMOE_GATE_UP_CONCAT,
                                .up_major = CUMOE_OUT_IN,
                                .down_major = CUMOE_OUT_IN,
                                .gate_up = projection_of(&of[0], experts, held, count, pointers[0]),
                                .down = projection_of(&of[1], experts, held, count, pointers[1]),
                                .up_format = f,
                                .down_format = f,
                                .dtype = w->dtype};
  return cumoe_weights_bind(context, &d, weights);
}

static cumoe_status bind(const world *w, cumoe_context context, const int32_t *held, int32_t count,
                         cumoe_weights *weights)
{
  return bind_experts(w, context, w->experts_of, w->format, w->experts, w->inter, held, count, weights);
}

static cumoe_status bind_shared(const world *w, cumoe_context context, cumoe_weights *weights)
{
  static const int32_t first = 0;
  *weights = NULL;
  if (!w->shared) return CUMOE_OK;
  return bind_experts(w, context, w->shared_of, w->shared_format, 1, w->desc.shared_inter, &first, 1, weights);
}

/* What is said of tokens first .. of the world. */
static cumoe_moe_args tokens_args(const world *w, int64_t first, int64_t tokens, cumoe_weights shared)
{
  cumoe_moe_args a = {.size = sizeof a, .x = rows_of(&w->x, first, tokens), .out_scale = 1.5f, .shared = shared};
  if (w->routed || w->chosen) a.ids = rows_of(&w->ids, first, tokens);
  if (w->routed)
    a.weights = rows_of(&w->weights, first, tokens);
  else if (w->from_logits)
    a.logits = rows_of(&w->logits, first, tokens);
  else
    a.router_weight = w->apart ? rows_of(&w->router_apart, 0, w->router.rows) : rows_of(&w->router, 0, w->router.rows);
  if (w->groups) a.select_bias = rows_of(&w->bias, 0, 1);
  if (w->ruled) a.router_bias = rows_of(&w->router_bias, 0, 1), a.expert_scale = rows_of(&w->expert_scale, 0, 1);
  if (w->apart) a.router_x = rows_of(&w->x_apart, first, tokens);
  if (w->keeps && !w->chosen) a.ids_out = as_mut(rows_of(&w->ids_kept, first, tokens));
  if (w->keeps) a.weights_out = as_mut(rows_of(&w->weights_kept, first, tokens));
  if (w->shared && !w->ungated) a.shared_gate = rows_of(&w->shared_gate, 0, 1);
  if (w->residual) a.residual = rows_of(&w->residual_rows, w->bias_row ? 0 : first, w->bias_row ? 1 : tokens);
  return a;
}

/* ---- devices: the CPU, or GPUs, dealt to the ranks in turn ---- */

/* Of GPUs they are kept for the next world: each loads all kernels. */
static cumoe_context opened[MOST_RANKS];

static cumoe_context open_rank(int32_t rank)
{
  const cumoe_context_config one = {.size = sizeof one, .cpu_threads = 1};
  cumoe_context context = gpus ? opened[rank] : NULL;
  if (!context) CHECK_OK(cumoe_context_create(gpus ? rank % gpus : CUMOE_DEVICE_CPU, &one, &context));
  if (gpus) opened[rank] = context;
  return context;
}

/* The lanes' streams are kept as well, and made in one go: a GPU's queues are dealt to streams as these are made, and a
 * lane that shares its queue with another rank's would stand behind what waits for it. */
enum { RANKS_OF_A_GPU = 8 };
static cumoe_stream lanes[MOST_RANKS][MOST_LANES];

static void make_lanes(int32_t first, int32_t end)
{
  for (int32_t i = first; i < end; i++) open_rank(i);
  for (int32_t i = first; i < end; i++)
    for (int lane = 0; lane < MOST_LANES; lane++) CHECK_OK(cumoe_stream_create(opened[i], 0, &lanes[i][lane]));
}

static cumoe_stream lane_of(int32_t rank, int32_t lane)
{
  if (!gpus) return NULL;
  if (!lanes[rank][0]) make_lanes(rank, rank + 1);
  return lanes[rank][lane];
}

static void close_rank(cumoe_context context)
{
  if (!gpus) CHECK_OK(cumoe_context_destroy(context));
}

static void close_opened(void)
{
  for (int32_t i = 0; i < MOST_RANKS; i++) {
    for (int lane = 0; lane < MOST_LANES && lanes[i][lane]; lane++) {
      CHECK_OK(cumoe_stream_destroy(opened[i], lanes[i][lane]));
      lanes[i][lane] = NULL;
    }
    CHECK_OK(cumoe_context_destroy(opened[i]));
    opened[i] = NULL;
  }
}

/* The same where the context's device reads it; freed with the context. */
static void upload(cumoe_context context, tensor *t)
{
  cumoe_buffer buffer;
  if (!gpus || t->rows == 0) return;
  const size_t bytes = (size_t)(t->rows * t->cols) * cumoe_dtype_bytes((cumoe_dtype)t->dtype);
  CHECK_OK(cumoe_buffer_alloc(context, (cumoe_dtype)t->dtype, t->rows, t->cols, NULL, &buffer));
  CHECK_OK(cumoe_copy_from_host(context, cumoe_buffer_view_mut(buffer), t->data, bytes, NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  t->data = cumoe_buffer_view_mut(buffer).data;
}

static void upload_world(cumoe_context context, world *w)
{
  tensor *const all[] = {&w->x,       &w->router,      &w->shared_gate, &w->residual_rows, &w->ids,
                         &w->weights, &w->placement,   &w->logits,      &w->router_apart,  &w->x_apart,
                         &w->bias,    &w->router_bias, &w->expert_scale};
  host_projection *const of[] = {&w->experts_of[0], &w->experts_of[1], &w->shared_of[0], &w->shared_of[1]};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) upload(context, all[i]);
  for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
    upload(context, &of[i]->data);
    upload(context, &of[i]->scale);
    upload(context, &of[i]->zero);
  }
}

/* Rows first .. of `from`, which the device has, into the host's. */
static void download(cumoe_context context, const tensor *to, const tensor *from, int64_t first, int64_t rows)
{
  const size_t row = (size_t)to->cols * cumoe_dtype_bytes((cumoe_dtype)to->dtype);
  if (from->data == to->data || rows == 0) return;
  CHECK_OK(cumoe_copy_to_host(context, to->data + (size_t)first * row, (size_t)rows * row, rows_of(from, first, rows),
                              NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
}

/* By test/emulate/: slower, but any number of ranks waits side by side. */
static bool emulated(void)
{
  return gpus && getenv("CUMOE_EMULATED_GPUS") != NULL;
}

static void *aligned(size_t bytes)
{
  void *p = aligned_alloc(256, (bytes + 511) / 256 * 256);
  if (p) memset(p, 0, (bytes + 511) / 256 * 256);
  return p;
}

/* Memory of the context's device, zeros; freed with it. */
static void *device_bytes(cumoe_context context, size_t bytes)
{
  cumoe_buffer buffer;
  if (cumoe_buffer_alloc(context, CUMOE_U8, 1, (int64_t)bytes, NULL, &buffer) != CUMOE_OK) return NULL;
  const cumoe_view_mut view = cumoe_buffer_view_mut(buffer);
  if (cumoe_fill(context, view, 0, NULL) != CUMOE_OK || cumoe_synchronize(context, NULL) != CUMOE_OK) return NULL;
  return view.data;
}

/* ---- one rank with all experts, or with those of one rank, or of those that are left ---- */

enum { LOST = 1 }; /* where a rank is */

static bool lost(const world *w, int32_t rank)
{
  return w->loses && rank == LOST;
}

/* Of a token that a lost rank had. */
static bool lost_row(const world *w, int64_t row)
{
  int64_t at = row % w->all;
  for (int32_t r = 0; r < LOST; r++) at -= w->tokens[r];
  return w->loses && at >= 0 && at < w->tokens[LOST];
}

/* Of a layer: all; what its experts add, rounded; what its shared expert adds, in f32. */
typedef enum layer_part { WHOLE, ROUTED, SHARED } layer_part;

static tensor whole_layer(const world *w, const int32_t *held, int32_t count, layer_part of)
{
  const int64_t rows = w->x.rows;
  const tensor out = tensor_new(of == SHARED   ? CUMOE_F32
                                : of == ROUTED ? w->dtype
                                               : w->desc.out_dtype,
                                rows, w->hidden);
  tensor map = tensor_new(CUMOE_I32, 1, w->experts), here = out;
  cumoe_plan plan = NULL;
  cumoe_weights weights = NULL, shared = NULL;
  size_t bytes = 0;
  const cumoe_context context = open_rank(0);
  world v = *w;
  v.desc.local_experts = count;
  make_kept(&v);
  if (of != WHOLE) v.residual = false;
  if (of == ROUTED) {
    v.shared = false, v.desc.shared_inter = 0;
    v.desc.shared_up_format = v.desc.shared_down_format = (cumoe_format){0};
  }
  v.desc.out_dtype = out.dtype;
  for (int32_t e = 0; e < w->experts; e++) tensor_set(&map, 0, e, -1);
  for (int32_t i = 0; i < count && of != SHARED; i++) tensor_set(&map, 0, held[i], i);
  if (w->misplaces) tensor_set(&map, 0, 0, -1);
  upload_world(context, &v);
  upload(context, &map);
  upload(context, &here);
  CHECK_OK(cumoe_plan_create(context, &v.desc, &plan));
  CHECK_OK(bind(&v, context, held, count, &weights));
  CHECK_OK(bind_shared(&v, context, &shared));
  CHECK_OK(cumoe_plan_workspace(plan, rows, &bytes));
  cumoe_moe_args a = tokens_args(&v, 0, rows, shared);
  if (of != WHOLE) a.out_scale = 1;
  a.expert_map = rows_of(&map, 0, 1);
  a.out = as_mut(rows_of(&here, 0, rows));
  a.workspace = cumoe_vector_mut(device_bytes(context, bytes), CUMOE_U8, (int64_t)bytes);
  CHECK_OK(cumoe_moe_forward(plan, weights, &a, NULL));
  download(context, &out, &here, 0, rows);
  close_rank(context);
  if (w->keeps) check_same("ids_out", &w->ids_kept, &v.ids_kept);
  if (w->keeps) check_same("weights_out", &w->weights_kept, &v.weights_kept);
  return out;
}

static bool has_place(const world *w, int32_t expert)
{
  bool any = false;
  for (int32_t p = 0; p < places_of(w); p++) {
    const int32_t where = (int32_t)tensor_get(&w->placement, expert, p);
    any |= where >= 0 && !lost(w, where >> 16);
  }
  return any;
}

/* The layer, in its own bits. */
static void check_exact(const world *w, const tensor *out)
{
  int32_t every[MOST_EXPERTS], count = 0;
  for (int32_t e = 0; e < w->experts; e++)
    if (has_place(w, e)) every[count++] = e;
  const tensor want = whole_layer(w, every, count, WHOLE);
  for (int64_t row = 0; row < want.rows; row++)
    for (int64_t col = 0; lost_row(w, row) && col < want.cols; col++)
      tensor_set(&want, row, col, tensor_get(out, row, col));
  check_same("out", out, &want);
}

/* It may have no expert but one that nobody asks it for. */
static bool serves(const world *w, int32_t rank)
{
  bool any = false;
  for (int64_t i = 0; i < w->placement.rows * w->placement.cols; i++) {
    const int32_t where = (int32_t)tensor_get(&w->placement, i / w->placement.cols, i % w->placement.cols);
    any |= where >= 0 && where >> 16 == rank;
  }
  return any;
}

/* What sums are made of, and how far these may be off: in units of 2^-24 of each term. */
static void add_terms(const tensor *part, double units, double *sum, double *error)
{
  for (int64_t i = 0; i < part->rows * part->cols; i++) {
    const double term = tensor_get(part, i / part->cols, i % part->cols);
    sum[i] += term;
    error[i] += 1.5 * units * ldexp(fabs(term), -24);
  }
}

/* The ranks' sums, each rounded, added up in their order, and what the shared expert adds: on a GPU in f32, on the CPU
 * to the bit, but for the product with the shared expert's gate. */
static void check_sums(const world *w, const tensor *out)
{
  const int64_t count = w->x.rows * w->hidden;
  const double units = gpus ? w->ranks + w->shared + 2 : 0;
  double *sum = scratch((size_t)count, sizeof *sum), *error = scratch((size_t)count, sizeof *error);
  int64_t outside = 0;
  for (int32_t r = 0; r < w->ranks + w->shared; r++) {
    const bool shared = r == w->ranks;
    if (!shared && (lost(w, r) || !serves(w, r))) continue;
    const tensor part =
        shared ? whole_layer(w, w->held[0], 1, SHARED) : whole_layer(w, w->held[r], w->local[r], ROUTED);
    add_terms(&part, units + (shared && !w->ungated), sum, error);
  }
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = i / w->hidden, col = i % w->hidden;
    const double residual = w->residual ? tensor_get(&w->residual_rows, w->bias_row ? 0 : row, col) : 0;
    const double want = residual + 1.5 * sum[i], off = error[i] + (gpus ? ldexp(fabs(residual), -24) : 0);
    const double got = tensor_get(out, row, col);
    outside +=
        !lost_row(w, row) && !(got >= round_to(want - off, out->dtype) && got <= round_to(want + off, out->dtype));
  }
  CHECK_MSG(outside == 0, "%d of %d elements are not the ranks' sum", (int)outside, (int)count);
}

/* ---- ranks as threads ---- */

/* How a rank misbehaves. */
typedef enum trouble {
  NONE,
  STOPS_BEFORE, /* makes one call fewer */
  NEVER_JOINS,
  ABORTS,     /* after its first call */
  OTHER_SIZE, /* of max_tokens */
  OTHER_FLAGS,
  OTHER_SHAPE, /* of the description */
  SWAPPED,     /* two arenas in its list */
  USED_ARENA,  /* not filled with zeros */
  BAD_CALL,    /* corrected afterwards */
  ENDLESS      /* calls again and again, until one fails */
} trouble;

/* How those that are left and one that is left out come together. */
typedef struct meeting {
  _Atomic int joined, started, looked, left, haunted;
  bool haunts; /* it is alive */
} meeting;

typedef struct rank {
  const world *w;
  struct rank *all;
  const tensor *out;
  int32_t number;
  trouble trouble;
  int64_t timeout_ns;
  meeting *meeting;
  /* made */
  world here; /* as the device reads it */
  tensor out_here, counts_here;
  cumoe_context context;
  cumoe_stream streams[MOST_LANES]; /* NULL on the CPU device */
  void *workspaces[MOST_LANES];
  size_t workspace_bytes; /* of each */
  cumoe_plan plan;
  cumoe_weights weights, shared;
  cumoe_group group;
  void *arena;
  size_t bytes;
  int64_t first;  /* of its tokens in a call */
  tensor present; /* [1, 1] tokens, on the device */
  tensor fewer;   /* what a replay of the second call answered for half of the tokens */
  tensor others;  /* what one of the first answered for the second's tokens and this placement */
  tensor turned;
  tensor counts;                      /* [calls, local experts] */
  cumoe_status status, ended, before; /* the last: of what a lost rank took part in */
  char text[300];
  cumoe_group_fault fault, seen; /* at the end; by those that go on without a rank, before */
  cumoe_fault found;
  int64_t arrived[MOST_RANKS]; /* tokens of each rank in the last exchange of lane 0 */
  struct {
    const char *doing;
    int number;
  } step[MOST_LANES]; /* where a lane has come to, told if the group gives up */
} rank;

static cumoe_group_config config_of(const rank *r, void **arenas)
{
  const world *w = r->w;
  for (int32_t i = 0; i < w->ranks; i++) arenas[i] = r->all[i].arena;
  return (cumoe_group_config){.size = sizeof(cumoe_group_config),
                              .flags = (w->exact ? CUMOE_GROUP_EXACT : 0) | (w->dedup ? CUMOE_GROUP_DEDUP : 0) |
                                       (comms ? CUMOE_GROUP_NCCL : 0),
                              .rank = r->number,
                              .ranks = w->ranks,
                              .lanes = w->lanes,
                              .max_tokens = w->capacity,
                              .timeout_ns = r->timeout_ns,
                              .arenas = comms ? NULL : arenas,
                              .comm = comms ? comms[r->number] : NULL};
}

/* Not a pool's: every rank writes to it. */
static void *shared_bytes(rank *r, size_t bytes)
{
  void *data = NULL;
  if (!gpus) return aligned(bytes);
  CHECK(cudaSetDevice(r->number % gpus) == cudaSuccess && cudaMalloc(&data, bytes) == cudaSuccess);
  CHECK_OK(cumoe_fill(r->context, cumoe_vector_mut(data, CUMOE_U8, (int64_t)bytes), 0, NULL));
  CHECK_OK(cumoe_synchronize(r->context, NULL));
  return data;
}

static void free_shared(void *data)
{
  if (gpus)
    CHECK(cudaFree(data) == cudaSuccess);
  else
    free(data);
}

/* The same experts, in another order of their replicas: a layer that is exact has the same bits. */
static tensor turned_placement(const world *w)
{
  const tensor turned = tensor_copy(&w->placement);
  for (int32_t e = 0; e < w->experts && w->exact && places_of(w) > 1; e++) {
    if (tensor_get(&turned, e, 1) < 0) continue;
    tensor_set(&turned, e, 0, tensor_get(&w->placement, e, 1));
    tensor_set(&turned, e, 1, tensor_get(&w->placement, e, 0));
  }
  return turned;
}

/* Before any rank is told where it lies. */
static void make_arena(rank *r)
{
  void *arenas[MOST_RANKS];
  cumoe_moe_desc d = r->w->desc;
  d.local_experts = r->w->local[r->number];
  if (r->trouble == OTHER_SHAPE) d.act = CUMOE_ACT_RELU;
  r->context = open_rank(r->number);
  if (gpus) CHECK_OK(cumoe_fault_clear(r->context, NULL));
  r->here = *r->w;
  r->counts = r->counts_here = tensor_new(CUMOE_I32, CALLS * r->w->lanes, d.local_experts);
  r->out_here = *r->out;
  r->present = tensor_new(CUMOE_I32, 1, 1);
  tensor_set(&r->present, 0, 0, (double)r->w->tokens[r->number]);
  upload(r->context, &r->present);
  r->fewer = tensor_new(r->out->dtype, r->w->tokens[r->number], r->w->hidden);
  r->others = tensor_new(r->out->dtype, r->w->tokens[r->number], r->w->hidden);
  r->turned = turned_placement(r->w);
  upload_world(r->context, &r->here);
  upload(r->context, &r->counts_here);
  upload(r->context, &r->out_here);
  CHECK_OK(cumoe_plan_create(r->context, &d, &r->plan));
  CHECK_OK(bind(&r->here, r->context, r->w->held[r->number], d.local_experts, &r->weights));
  CHECK_OK(bind_shared(&r->here, r->context, &r->shared));
  const cumoe_group_config c = config_of(r, arenas);
  CHECK_OK(cumoe_ep_arena(r->plan, &c, &r->bytes));
  r->arena = shared_bytes(r, r->bytes + SPARE);
  for (int lane = 0; lane < r->w->lanes; lane++) r->streams[lane] = lane_of(r->number, lane);
  for (int32_t i = 0; i < r->number; i++) r->first += r->w->tokens[i];
}

static cumoe_status join(rank *r)
{
  void *arenas[MOST_RANKS];
  cumoe_group_config c = config_of(r, arenas);
  if (r->trouble == OTHER_SIZE) c.max_tokens--;
  if (r->trouble == OTHER_FLAGS) c.flags |= CUMOE_GROUP_DEDUP;
  if (r->trouble == SWAPPED) {
    const int32_t i = (r->number + 1) % r->w->ranks, j = (r->number + 2) % r->w->ranks;
    void *kept = arenas[i];
    arenas[i] = arenas[j], arenas[j] = kept;
  }
  if (r->trouble == USED_ARENA) {
    CHECK_OK(
        cumoe_fill(r->context, cumoe_vector_mut((char *)r->arena + 768, CUMOE_U8, (int64_t)r->bytes - 768), 1, NULL));
    CHECK_OK(cumoe_synchronize(r->context, NULL));
  }
  return cumoe_group_create(r->context, r->plan, &c, cumoe_vector_mut(r->arena, CUMOE_U8, (int64_t)r->bytes),
                            &r->group);
}

typedef struct ep_call {
  cumoe_moe_args layer;
  cumoe_ep_args args;
} ep_call;

static int64_t most_of_call(const world *w, int number)
{
  if (!w->varies || number % 3 == 0) return w->tokens_max;
  return number % 3 == 1 || w->capacity < 3 * w->tokens_max ? 0 : 3 * w->tokens_max;
}

/* With a count of tokens the rows behind are the next rank's. */
static void fill_call(const rank *r, int32_t lane, int number, ep_call *c)
{
  const world *w = &r->here;
  const int64_t index = lane * CALLS + number, tokens = w->tokens[r->number], first = index * w->all + r->first;
  const int64_t most = w->counted ? w->tokens_max : tokens, left = w->x.rows - first, rows = most < left ? most : left;
  c->layer = tokens_args(w, first, rows, r->shared);
  c->layer.out = as_mut(rows_of(&r->out_here, first, rows));
  if (w->counted) c->layer.device_tokens = rows_of(&r->present, 0, 1);
  c->layer.workspace = cumoe_vector_mut(r->workspaces[lane], CUMOE_U8, (int64_t)r->workspace_bytes);
  c->layer.counts_out = as_mut(rows_of(&r->counts_here, index, 1));
  c->args = (cumoe_ep_args){.size = sizeof c->args,
                            .lane = lane,
                            .tokens_max = most_of_call(w, number),
                            .placement = rows_of(&w->placement, placement_row(w, index), w->experts),
                            .layer = &c->layer};
}

static void at_step(rank *r, int32_t lane, const char *doing, int number)
{
  r->step[lane].doing = doing;
  r->step[lane].number = number;
}

static cumoe_status one_call(rank *r, int32_t lane, int number)
{
  ep_call c;
  fill_call(r, lane, number, &c);
  if (r->trouble == BAD_CALL) {
    c.layer.out_scale = INFINITY;
    if (cumoe_ep_forward(r->group, r->weights, &c.args, r->streams[lane]) != CUMOE_ERR_INVALID_ARGUMENT)
      return CUMOE_ERR_INTERNAL;
    c.layer.out_scale = 1.5f;
  }
  return cumoe_ep_forward(r->group, r->weights, &c.args, r->streams[lane]);
}

typedef cumoe_status ep_function(cumoe_group group, cumoe_weights weights, const cumoe_ep_args *args,
                                 cumoe_stream stream);
static ep_function *const parts[] = {cumoe_ep_dispatch, cumoe_ep_experts, cumoe_ep_combine};

/* A call of each lane, part by part; every second rank makes one of the other kind where there is but one lane. */
static cumoe_status interleave(rank *r, int number)
{
  const world *w = r->w;
  ep_call c[MOST_LANES];
  cumoe_status status = CUMOE_OK;
  const int64_t rounds = w->tokens_max ? (w->tokens_max + w->capacity - 1) / w->capacity : 1;
  if (w->lanes == 1 && (r->number + number) % 2) return one_call(r, 0, number);
  for (int32_t lane = 0; lane < w->lanes; lane++) fill_call(r, lane, number, &c[lane]);
  for (int32_t round = 0; round < rounds; round++)
    for (int part = 0; part < 3; part++)
      for (int32_t lane = 0; status == CUMOE_OK && lane < w->lanes; lane++) {
        c[lane].args.round = round;
        status = parts[part](r->group, r->weights, &c[lane].args, r->streams[lane]);
      }
  return status;
}

static cumoe_status all_interleaved(rank *r)
{
  cumoe_status status = CUMOE_OK;
  for (int i = 0; status == CUMOE_OK && i < CALLS; i++) status = interleave(r, i);
  for (int32_t lane = 0; status == CUMOE_OK && lane < r->w->lanes; lane++)
    status = cumoe_synchronize(r->context, r->streams[lane]);
  return status;
}

/* While a rank waits for others on a GPU that they share, they do nothing that may wait for the GPU: they make neither
 * memory and streams nor graphs, and copy nothing from memory that is not pinned. */
static pthread_barrier_t ready, recording, recorded, settled;

/* All have done such things, and may begin. */
static cumoe_status settle(rank *r, int32_t lane, cumoe_status status)
{
  if (status == CUMOE_OK) status = cumoe_synchronize(r->context, r->streams[lane]);
  pthread_barrier_wait(&settled);
  return status;
}

static cumoe_status record(rank *r, int32_t lane, int number, cumoe_graph *graph)
{
  cumoe_status status = cumoe_graph_begin(r->context, r->streams[lane]);
  if (status == CUMOE_OK) status = one_call(r, lane, number);
  const cumoe_status ended = cumoe_graph_end(r->context, r->streams[lane], graph);
  if (status == CUMOE_OK) status = ended;
  if (status == CUMOE_OK) status = cumoe_graph_upload(r->context, *graph, r->streams[lane]);
  return status == CUMOE_OK ? cumoe_synchronize(r->context, r->streams[lane]) : status;
}

/* What the calls answered is gone. */
static cumoe_status poison(rank *r, int32_t lane)
{
  for (int i = 0; i < CALLS; i++) {
    const int64_t first = (lane * CALLS + i) * r->w->all + r->first, rows = r->w->tokens[r->number];
    const cumoe_status status =
        rows ? cumoe_fill(r->context, as_mut(rows_of(&r->out_here, first, rows)), POISON, r->streams[lane]) : CUMOE_OK;
    if (status != CUMOE_OK) return status;
  }
  return CUMOE_OK;
}

static cumoe_status count_tokens(rank *r, int32_t lane, int64_t tokens)
{
  const int32_t count = (int32_t)tokens;
  const cumoe_status status =
      cumoe_copy_from_host(r->context, as_mut(rows_of(&r->present, 0, 1)), &count, sizeof count, r->streams[lane]);
  return status == CUMOE_OK ? cumoe_synchronize(r->context, r->streams[lane]) : status;
}

/* The device says that half of the tokens are there. */
static cumoe_status replay_fewer(rank *r, int32_t lane, cumoe_status status, cumoe_graph graph)
{
  const int64_t tokens = r->w->tokens[r->number];
  at_step(r, lane, "a replay of fewer", 1);
  if (status == CUMOE_OK) status = count_tokens(r, lane, tokens / 2);
  status = settle(r, lane, status);
  if (status == CUMOE_OK) status = cumoe_graph_launch(r->context, graph, r->streams[lane]);
  if (status == CUMOE_OK) status = cumoe_synchronize(r->context, r->streams[lane]);
  const size_t row = (size_t)r->w->hidden * cumoe_dtype_bytes((cumoe_dtype)r->out->dtype);
  if (status == CUMOE_OK && tokens)
    status =
        cumoe_copy_to_host(r->context, r->fewer.data, (size_t)tokens * row,
                           rows_of(&r->out_here, (lane * CALLS + 1) * r->w->all + r->first, tokens), r->streams[lane]);
  return status == CUMOE_OK ? count_tokens(r, lane, tokens) : status;
}

/* What the device reads of the first call's tokens becomes that of another's. */
static cumoe_status refill(rank *r, int number)
{
  const world *from = r->w, *to = &r->here;
  const tensor *const pairs[][2] = {
      {&from->x, &to->x},           {&from->ids, &to->ids},         {&from->weights, &to->weights},
      {&from->logits, &to->logits}, {&from->x_apart, &to->x_apart}, {&from->residual_rows, &to->residual_rows}};
  const int64_t tokens = from->tokens[r->number], first = number * from->all + r->first;
  cumoe_status status = CUMOE_OK;
  for (size_t i = 0; status == CUMOE_OK && tokens && i < sizeof pairs / sizeof *pairs - (from->bias_row ? 1 : 0); i++) {
    const cumoe_view rows = rows_of(pairs[i][0], first, tokens);
    const size_t bytes = (size_t)(tokens * rows.ld) * cumoe_dtype_bytes((cumoe_dtype)rows.dtype);
    status = cumoe_copy_from_host(r->context, as_mut(rows_of(pairs[i][1], r->first, tokens)), rows.data, bytes,
                                  r->streams[0]);
  }
  return status;
}

static cumoe_status move_to(rank *r, const tensor *placement)
{
  return cumoe_copy_from_host(r->context, as_mut(rows_of(&r->here.placement, 0, placement->rows)), placement->data,
                              (size_t)(placement->rows * placement->cols) * sizeof(int32_t), r->streams[0]);
}

/* The first call's graph, with the second's tokens and their routing, and experts placed otherwise. */
static cumoe_status replay_others(rank *r, cumoe_status status, cumoe_graph graph)
{
  const int64_t tokens = r->w->tokens[r->number];
  at_step(r, 0, "a replay of others", 0);
  if (status == CUMOE_OK) status = refill(r, 1);
  if (status == CUMOE_OK) status = move_to(r, &r->turned);
  status = settle(r, 0, status);
  if (status == CUMOE_OK) status = cumoe_graph_launch(r->context, graph, r->streams[0]);
  if (status == CUMOE_OK) status = cumoe_synchronize(r->context, r->streams[0]);
  const size_t row = (size_t)r->w->hidden * cumoe_dtype_bytes((cumoe_dtype)r->out->dtype);
  if (status == CUMOE_OK && tokens)
    status = cumoe_copy_to_host(r->context, r->others.data, (size_t)tokens * row,
                                rows_of(&r->out_here, r->first, tokens), r->streams[0]);
  if (status == CUMOE_OK) status = refill(r, 0);
  return status == CUMOE_OK ? move_to(r, &r->w->placement) : status;
}

/* Every rank comes to the same barriers, whatever has failed. */
static cumoe_status replay_all(rank *r, int32_t lane, cumoe_status status, const cumoe_graph graphs[CALLS])
{
  static const int order[] = {2, 0, 1, 0};
  if (status == CUMOE_OK) status = poison(r, lane);
  if (r->w->counted) status = replay_fewer(r, lane, status, graphs[1]);
  if (r->w->lanes == 1) status = replay_others(r, status, graphs[0]);
  if (r->w->lanes == 1 && status == CUMOE_OK) status = poison(r, lane);
  status = settle(r, lane, status);
  at_step(r, lane, "replays", (int)(sizeof order / sizeof *order));
  for (size_t i = 0; status == CUMOE_OK && i < sizeof order / sizeof *order; i++)
    status = cumoe_graph_launch(r->context, graphs[order[i]], r->streams[lane]);
  return status == CUMOE_OK ? cumoe_synchronize(r->context, r->streams[lane]) : status;
}

/* The calls as graphs, in another order. */
static cumoe_status replay(rank *r, int32_t lane)
{
  cumoe_graph graphs[CALLS] = {0};
  cumoe_status status = CUMOE_OK;
  pthread_barrier_wait(&recording);
  for (int i = 0; status == CUMOE_OK && i < CALLS; i++) status = record(r, lane, i, &graphs[i]);
  pthread_barrier_wait(&recorded);
  status = replay_all(r, lane, status, graphs);
  pthread_barrier_wait(&recorded); /* destroying one may wait for a GPU, where others spin */
  for (int i = 0; i < CALLS; i++) CUMOE_IGNORE(cumoe_graph_destroy(r->context, graphs[i]));
  return status;
}

static void keep(rank *r, cumoe_status status)
{
  if (status == CUMOE_OK || r->status != CUMOE_OK) return;
  r->status = status;
  snprintf(r->text, sizeof r->text, "%s", cumoe_last_error());
}

static cumoe_status calls_of_lane(rank *r, int32_t lane)
{
  cumoe_status status = CUMOE_OK;
  const int calls = r->trouble == STOPS_BEFORE ? CALLS - 1 : r->trouble == ENDLESS ? INT32_MAX : CALLS;
  for (int i = 0; status == CUMOE_OK && i < calls; i++) {
    at_step(r, lane, "call", i);
    status = one_call(r, lane, i % CALLS);
    if (i == 0 && r->trouble == ABORTS && status == CUMOE_OK) status = cumoe_group_abort(r->group);
    if (i == 0 && r->w->shortens && status == CUMOE_OK) status = cumoe_group_set_timeout(r->group, 500000000);
  }
  at_step(r, lane, "their end", calls);
  if (status == CUMOE_OK) status = cumoe_synchronize(r->context, r->streams[lane]);
  const cumoe_status replayed = r->w->replays ? replay(r, lane) : CUMOE_OK;
  return status != CUMOE_OK ? status : replayed;
}

static void *second_lane(void *argument)
{
  keep(argument, calls_of_lane(argument, 1));
  return NULL;
}

static void send_aside(cumoe_group handle, bool own)
{
  group *g;
  CHECK_OK(find_group(handle, &g));
  if (g->side[0]) g->aside_tokens = 1, g->own_rows = own ? 0 : INT64_MAX;
}

static void enter(rank *r)
{
  keep(r, join(r));
  if (r->group && r->w->aside) send_aside(r->group, r->w->own);
  if (r->group) keep(r, cumoe_ep_workspace(r->group, &r->workspace_bytes));
  for (int lane = 0; r->workspace_bytes && lane < r->w->lanes; lane++)
    r->workspaces[lane] = device_bytes(r->context, r->workspace_bytes);
  if (r->workspace_bytes) atomic_fetch_add(&r->meeting->joined, 1);
  if (gpus) pthread_barrier_wait(&ready);
}

/* A flag of each rank: the exchange that it has come to. */
static void say_flags(const group *g, const char *name, uint64_t flags)
{
  printf(" %s", name);
  for (int32_t i = 0; i < g->shape.ranks; i++) {
    uint64_t flag = 0;
    const cumoe_view from = cumoe_vector(g->arena + flags + (uint64_t)i * EP_LINE, CUMOE_U8, sizeof flag);
    CHECK_OK(cumoe_copy_to_host(g->handle, &flag, sizeof flag, from, NULL));
    CHECK_OK(cumoe_synchronize(g->handle, NULL));
    printf(" %d", (int)(flag >> 32));
  }
}

/* Of a group that has given up although nobody should. */
static void say_steps(const rank *r, const group *g)
{
  for (int32_t lane = 0; lane < r->w->lanes; lane++) {
    const uint64_t base = g->at.lane + (uint64_t)lane * g->at.lane_bytes;
    printf("# rank %d, lane %d: %s %d;", (int)r->number, (int)lane, r->step[lane].doing, r->step[lane].number);
    say_flags(g, "told", base + g->at.in);
    say_flags(g, "answered", base + g->at.back);
    printf("\n");
  }
}

static void leave(rank *r)
{
  group *g;
  CHECK_OK(find_group(r->group, &g));
  for (int32_t i = 0; !gpus && i < r->w->ranks; i++)
    r->arrived[i] = (uint32_t)cpu_ep_load(g->arena + g->at.lane + g->at.in + i * EP_LINE);
  r->fault.size = sizeof r->fault;
  keep(r, cumoe_group_fault_read(r->group, &r->fault));
  if (gpus && r->w->replays && r->fault.cause == CUMOE_GROUP_TIMEOUT) say_steps(r, g);
  r->ended = cumoe_group_destroy(r->group);
  r->found.size = sizeof r->found;
  keep(r, cumoe_fault_read(r->context, NULL, &r->found));
}

static void *live(void *argument)
{
  rank *r = argument;
  pthread_t other;
  if (r->trouble == NEVER_JOINS) {
    if (gpus) pthread_barrier_wait(&ready);
    return NULL;
  }
  enter(r);
  if (!r->group || (gpus && atomic_load(&r->meeting->joined) < r->w->ranks)) return NULL;
  const bool two = r->w->lanes > 1 && !r->w->parts && pthread_create(&other, NULL, second_lane, r) == 0;
  const cumoe_status status = r->w->parts ? all_interleaved(r) : calls_of_lane(r, 0);
  if (two) pthread_join(other, NULL);
  keep(r, status);
  leave(r);
  return NULL;
}

static void meet(const _Atomic int *count, int all)
{
  for (int i = 0; i < 20000 && atomic_load(count) < all; i++) usleep(1000);
}

static void call_all_lanes(rank *r)
{
  for (int32_t lane = 0; lane < r->w->lanes; lane++)
    for (int i = 0; r->status == CUMOE_OK && i < CALLS; i++) keep(r, one_call(r, lane, i));
  for (int32_t lane = 0; lane < r->w->lanes; lane++) keep(r, cumoe_synchronize(r->context, r->streams[lane]));
}

/* The first rank has come one exchange further than the others, which do not follow. */
static cumoe_status go_ahead(rank *r)
{
  ep_call c;
  fill_call(r, 0, CALLS - 1, &c);
  if (r->number != 0 || r->before != CUMOE_OK) return CUMOE_OK;
  const cumoe_status status = cumoe_ep_dispatch(r->group, r->weights, &c.args, r->streams[0]);
  return status == CUMOE_OK ? cumoe_synchronize(r->context, r->streams[0]) : status;
}

/* Some calls of all ranks; then without LOST, which runs on for a while. */
static void *outlive(void *argument)
{
  rank *r = argument;
  uint64_t rest[2] = {0};
  for (int32_t i = 0; i < r->w->ranks; i++) rest[i / 64] |= (uint64_t)(i != LOST) << i % 64;
  enter(r);
  atomic_fetch_add(&r->meeting->started, 1);
  if (!r->group) return NULL;
  r->before = calls_of_lane(r, 0);
  if (r->before != CUMOE_OK) snprintf(r->text, sizeof r->text, "%s", cumoe_last_error());
  r->seen.size = sizeof r->seen;
  keep(r, cumoe_group_fault_read(r->group, &r->seen));
  if (r->number == LOST) {
    meet(&r->meeting->left, r->w->ranks - 1);
    CUMOE_IGNORE(cumoe_group_abort(r->group));
    atomic_fetch_add(&r->meeting->haunted, 1);
  } else {
    keep(r, go_ahead(r));
    atomic_fetch_add(&r->meeting->looked, 1);
    meet(&r->meeting->looked, r->w->ranks - 1);
    if (r->number == !LOST) keep(r, cumoe_group_abort(r->group)); /* nothing of it is left without LOST */
    keep(r, cumoe_group_set_active(r->group, rest));
    rest[0] |= (uint64_t)1 << LOST;
    if (cumoe_group_set_active(r->group, rest) != CUMOE_ERR_INVALID_ARGUMENT ||
        !strstr(cumoe_last_error(), "which was left out before"))
      keep(r, CUMOE_ERR_INTERNAL);
    atomic_fetch_add(&r->meeting->left, 1);
    meet(&r->meeting->haunted, r->meeting->haunts);
    call_all_lanes(r);
  }
  leave(r);
  return NULL;
}

static void *abort_meanwhile(void *argument)
{
  const rank *r = argument;
  struct timespec begin, now;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  do clock_gettime(CLOCK_MONOTONIC, &now);
  while ((now.tv_sec - begin.tv_sec) * 1000000000 + now.tv_nsec - begin.tv_nsec < r->w->meanwhile);
  return (void *)(uintptr_t)cumoe_group_abort(r->group);
}

/* Nothing but a mask. */
static void *say(void *argument)
{
  rank *r = argument;
  pthread_t other;
  enter(r);
  if (!r->group) return NULL;
  const bool meanwhile = r->w->meanwhile && r->number == 0;
  if (meanwhile && pthread_create(&other, NULL, abort_meanwhile, r) != 0) abort();
  if (r->w->says[r->number]) keep(r, cumoe_group_set_active(r->group, &r->w->says[r->number]));
  if (meanwhile) CHECK(pthread_join(other, NULL) == 0);
  if (r->w->aborts && !r->w->meanwhile && r->number == 0 && r->status == CUMOE_OK) keep(r, cumoe_group_abort(r->group));
  if (r->w->says[r->number]) atomic_fetch_add(&r->meeting->left, 1);
  if (r->w->aborts) meet(&r->meeting->left, r->w->aborts);
  leave(r);
  return NULL;
}

enum { NOBODY = -1, ALL = -2 };

/* All ranks, from the arenas on; `ranks` is theirs afterwards. */
static void run_ranks(const world *w, const tensor *out, rank *ranks, int32_t troubled, trouble which,
                      int64_t timeout_ns)
{
  pthread_t threads[MOST_RANKS];
  meeting together = {.haunts = true};
  void *(*const life)(void *) = w->says ? say : w->loses ? outlive : live;
  for (int32_t i = 0; i < w->ranks; i++) {
    ranks[i] = (rank){.w = w, .all = ranks, .out = out, .number = i, .timeout_ns = timeout_ns, .meeting = &together};
    if (i == troubled || troubled == ALL) ranks[i].trouble = which;
    make_arena(&ranks[i]);
  }
  pthread_barrier_init(&ready, NULL, (unsigned)w->ranks);
  pthread_barrier_init(&recording, NULL, (unsigned)(w->ranks * w->lanes));
  pthread_barrier_init(&recorded, NULL, (unsigned)(w->ranks * w->lanes));
  pthread_barrier_init(&settled, NULL, (unsigned)(w->ranks * w->lanes));
  for (int32_t i = 0; i < w->ranks; i++) CHECK(pthread_create(&threads[i], NULL, life, &ranks[i]) == 0);
  for (int32_t i = 0; i < w->ranks; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int32_t i = 0; i < w->ranks; i++) {
    rank *r = &ranks[i];
    for (int64_t call = 0; call < CALLS * w->lanes; call++)
      download(r->context, out, &r->out_here, call * w->all + r->first, w->tokens[i]);
    download(r->context, &r->counts, &r->counts_here, 0, r->counts.rows);
    close_rank(r->context);
    free_shared(r->arena);
  }
}

/* ---- what they answer ---- */

/* Of a rank's token t in a call: where the expert of a slot serves it, or -1. */
static int32_t place_of(const world *w, const rank *r, int64_t call, int64_t t, int64_t slot)
{
  const double id = tensor_get(&w->ids, call * w->all + r->first + t, slot);
  if (id < 0 || id >= w->experts) return -1;
  const int64_t row = placement_row(w, call) + (int64_t)id;
  int32_t count = 0;
  while (count < places_of(w) && tensor_get(&w->placement, row, count) >= 0) count++;
  return (int32_t)tensor_get(&w->placement, row, t % count);
}

/* Rows of each expert in a call: of all tokens, by where the placement sends them. */
static void check_counts(const world *w, const rank *ranks)
{
  if (!w->routed) return;
  for (int64_t call = 0; call < w->x.rows / w->all; call++) {
    int64_t want[MOST_RANKS][MOST_EXPERTS] = {{0}};
    for (int32_t r = 0; r < w->ranks; r++)
      for (int64_t i = 0; i < w->tokens[r] * w->top_k; i++) {
        const int32_t where = place_of(w, &ranks[r], call, i / w->top_k, i % w->top_k);
        if (where >= 0) want[where >> 16][where & 0xffff]++;
      }
    for (int32_t r = 0; r < w->ranks; r++)
      for (int32_t e = 0; e < w->local[r]; e++) CHECK((int64_t)tensor_get(&ranks[r].counts, call, e) == want[r][e]);
  }
}

/* Tokens that a rank sends in the last round of the last call: all, or those that have an expert there. */
static int64_t sent(const world *w, const rank *from, int32_t to)
{
  const int64_t most = w->tokens_max ? w->tokens_max : w->capacity;
  int64_t count = 0;
  for (int64_t t = (most - 1) / w->capacity * w->capacity; t < w->tokens[from->number]; t++) {
    bool goes = !w->dedup;
    for (int32_t slot = 0; slot < w->top_k; slot++) {
      const int32_t where = place_of(w, from, CALLS - 1, t, slot);
      goes |= where >= 0 && where >> 16 == to;
    }
    count += goes;
  }
  return count;
}

static void check_arrived(const world *w, const rank *ranks)
{
  for (int32_t to = 0; !gpus && w->routed && to < w->ranks; to++)
    for (int32_t from = 0; from < w->ranks; from++) CHECK(ranks[to].arrived[from] == sent(w, &ranks[from], to));
}

/* Of a replay with half of the tokens: the same answers, and nothing behind. */
static void check_fewer(const world *w, const rank *ranks, const tensor *out)
{
  for (int32_t r = 0; r < w->ranks; r++)
    for (int64_t t = 0; w->replays && w->counted && t < w->tokens[r]; t++) {
      const size_t row = (size_t)w->hidden * cumoe_dtype_bytes((cumoe_dtype)out->dtype);
      const unsigned char *got = ranks[r].fewer.data + (size_t)t * row;
      const unsigned char *all = rows_of(out, w->all + ranks[r].first + t, 1).data;
      bool untouched = true;
      for (size_t i = 0; i < row; i++) untouched &= got[i] == POISON;
      CHECK_MSG(t < w->tokens[r] / 2 ? memcmp(got, all, row) == 0 : untouched, "rank %d, token %d", (int)r, (int)t);
    }
}

/* Of a replay with the second call's tokens: its answers. */
static void check_others(const world *w, const rank *ranks, const tensor *out)
{
  for (int32_t r = 0; w->replays && w->lanes == 1 && r < w->ranks; r++) {
    const cumoe_view want = rows_of(out, w->all + ranks[r].first, w->tokens[r]);
    const size_t bytes = (size_t)(w->tokens[r] * want.ld) * cumoe_dtype_bytes((cumoe_dtype)want.dtype);
    CHECK_MSG(bytes == 0 || memcmp(ranks[r].others.data, want.data, bytes) == 0, "rank %d", (int)r);
  }
}

/* Where nobody stops, the limit only has to end what would last for ever: ranks that share a GPU and a host's cores may
 * be kept from working for longer than a second without that anything is wrong. So it is long, and a world that took
 * what was the limit once says so: a deadlock takes all of it. */
static const int64_t PATIENT = INT64_C(20000000000);
enum { LONG_MS = 2000 };

static void say_long(const world *w, int64_t begin)
{
  const int64_t took = now_ms() - begin;
  if (gpus && !emulated() && took > LONG_MS) printf("# %s: %d ms\n", w->name, (int)took);
}

/* By the rank whose expert it would be. */
static void check_misplaced(const world *w, const rank *ranks)
{
  const int32_t at = (int32_t)tensor_get(&w->placement, 0, 0) >> 16;
  for (int32_t r = 0; w->misplaces && r < w->ranks; r++)
    CHECK_MSG((ranks[r].found.code == CUMOE_FAULT_EXPERT_ID) == (r == at), "rank %d has fault %d", (int)r,
              (int)ranks[r].found.code);
}

static void run_world(const world *given, bool dedup)
{
  rank ranks[MOST_RANKS];
  world w = *given;
  w.dedup = dedup;
  case_begin("%s%s", w.name, dedup ? ", dedup" : "");
  make_world(&w);
  w.keeps &= !gpus;
  w.replays = gpus && !w.parts && !comms;
  const tensor out = tensor_new(w.desc.out_dtype, w.x.rows, w.hidden);
  const int64_t begin = now_ms();
  run_ranks(&w, &out, ranks, NOBODY, NONE, gpus ? PATIENT : 0);
  say_long(&w, begin);
  for (int32_t i = 0; i < w.ranks; i++) {
    gave_up |= ranks[i].status != CUMOE_OK || ranks[i].fault.cause != CUMOE_GROUP_ALIVE;
    CHECK_MSG(ranks[i].status == CUMOE_OK, "rank %d: %s", (int)i, ranks[i].text);
    const cumoe_group_fault *f = &ranks[i].fault;
    CHECK_MSG(ranks[i].ended == CUMOE_OK && f->cause == CUMOE_GROUP_ALIVE,
              "rank %d ended with %d; cause %d, phase %d, about rank %d, by rank %d", (int)i, (int)ranks[i].ended,
              (int)f->cause, (int)f->phase, (int)f->about, (int)f->by);
  }
  if (w.exact)
    check_exact(&w, &out);
  else
    check_sums(&w, &out);
  check_counts(&w, ranks);
  check_arrived(&w, ranks);
  check_fewer(&w, ranks, &out);
  check_others(&w, ranks, &out);
  check_misplaced(&w, ranks);
  case_end();
}

static const world worlds[] = {
    {.name = "one rank",
     .ranks = 1,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 5,
     .tokens = {5},
     .exact = true,
     .shared = true},
    {.name = "two ranks",
     .ranks = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 4,
     .tokens = {4, 3},
     .exact = true},
    {.name = "two ranks, sums",
     .ranks = 2,
     .experts = 8,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 4,
     .tokens = {4, 3}},
    {.name = "sums of top 1",
     .ranks = 3,
     .experts = 8,
     .top_k = 1,
     .dtype = CUMOE_F16,
     .capacity = 4,
     .tokens = {4, 3, 1}},
    {.name = "exact top 1",
     .ranks = 3,
     .experts = 8,
     .top_k = 1,
     .dtype = CUMOE_F16,
     .capacity = 4,
     .tokens = {4, 3, 1},
     .exact = true},
    {.name = "four ranks, shared expert, residual",
     .ranks = 4,
     .experts = 10,
     .top_k = 4,
     .dtype = CUMOE_F16,
     .capacity = 6,
     .tokens = {6, 1, 0, 5},
     .spread = SCATTERED,
     .exact = true,
     .shared = true,
     .residual = true},
    {.name = "residual of sums",
     .ranks = 3,
     .experts = 6,
     .top_k = 4,
     .dtype = CUMOE_F32,
     .capacity = 6,
     .tokens = {6, 1, 2},
     .spread = SCATTERED,
     .residual = true},
    {.name = "one bias for all",
     .ranks = 2,
     .experts = 6,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 3,
     .tokens = {7, 4},
     .tokens_max = 7,
     .exact = true,
     .residual = true,
     .bias_row = true},
    {.name = "rounds",
     .ranks = 3,
     .experts = 9,
     .top_k = 2,
     .dtype = CUMOE_F32,
     .capacity = 4,
     .tokens_max = 13,
     .tokens = {12, 0, 5},
     .exact = true,
     .shared = true,
     .residual = true},
    {.name = "one token past a round",
     .ranks = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 4,
     .tokens_max = 5,
     .tokens = {5, 4},
     .exact = true,
     .routed = true},
    {.name = "uneven experts",
     .ranks = 3,
     .experts = 7,
     .top_k = 5,
     .dtype = CUMOE_BF16,
     .capacity = 4,
     .tokens = {1, 4, 2},
     .spread = SCATTERED,
     .exact = true,
     .routed = true},
    {.name = "all on one rank",
     .ranks = 4,
     .experts = 5,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 3,
     .tokens = {3, 3, 3, 3},
     .spread = ALL_ON_LAST,
     .exact = true,
     .routed = true},
    {.name = "experts twice",
     .ranks = 3,
     .experts = 9,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 5,
     .tokens_max = 9,
     .tokens = {9, 2, 7},
     .spread = TWICE,
     .exact = true,
     .routed = true},
    {.name = "experts twice, counted",
     .ranks = 3,
     .experts = 9,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 5,
     .tokens = {5, 2, 4},
     .spread = TWICE,
     .exact = true,
     .routed = true},
    {.name = "experts that move between calls",
     .ranks = 3,
     .experts = 9,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 5,
     .tokens_max = 9,
     .tokens = {9, 2, 7},
     .spread = TWICE,
     .exact = true,
     .routed = true,
     .moves = true},
    {.name = "seven ranks, sums",
     .ranks = 7,
     .experts = 15,
     .top_k = 5,
     .dtype = CUMOE_BF16,
     .capacity = 3,
     .tokens_max = 9,
     .tokens = {9, 2, 0, 3, 4, 1, 8},
     .spread = SCATTERED},
    {.name = "bad ids",
     .ranks = 2,
     .experts = 8,
     .top_k = 4,
     .dtype = CUMOE_F32,
     .capacity = 6,
     .tokens = {6, 5},
     .exact = true,
     .routed = true,
     .odd_ids = true},
    {.name = "zero and identity experts",
     .ranks = 2,
     .experts = 6,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 6,
     .tokens = {6, 5},
     .exact = true,
     .zero = 2,
     .identity = 2},
    {.name = "weight on the input",
     .ranks = 2,
     .experts = 6,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 6,
     .tokens = {6, 5},
     .exact = true,
     .routed = true,
     .weigh_input = true},
    {.name = "two lanes",
     .ranks = 3,
     .lanes = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 3,
     .tokens_max = 6,
     .tokens = {6, 3, 2},
     .exact = true,
     .shared = true},
    {.name = "in parts",
     .ranks = 3,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 4,
     .tokens = {4, 0, 3},
     .parts = true,
     .exact = true,
     .shared = true},
    {.name = "sums in parts and rounds",
     .ranks = 3,
     .experts = 8,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 4,
     .tokens_max = 9,
     .tokens = {9, 0, 5},
     .parts = true},
    {.name = "two lanes in parts and rounds",
     .ranks = 3,
     .lanes = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_F32,
     .capacity = 3,
     .tokens_max = 8,
     .tokens = {8, 3, 2},
     .parts = true,
     .exact = true,
     .routed = true,
     .shared = true,
     .residual = true},
    {.name = "tokens counted on the device",
     .ranks = 3,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_F32,
     .capacity = 4,
     .tokens_max = 10,
     .tokens = {6, 0, 3},
     .counted = true,
     .exact = true,
     .routed = true,
     .shared = true,
     .residual = true},
    {.name = "tokens counted on the device, in parts",
     .ranks = 2,
     .experts = 8,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 4,
     .tokens_max = 6,
     .tokens = {5, 2},
     .spread = TWICE,
     .parts = true,
     .counted = true,
     .exact = true,
     .routed = true},
    {.name = "from logits, in rounds, what is chosen is kept",
     .ranks = 3,
     .experts = 8,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 2,
     .tokens_max = 5,
     .tokens = {5, 1, 4},
     .exact = true,
     .from_logits = true,
     .keeps = true,
     .shared = true,
     .ungated = true},
    {.name = "ids of the caller, weighed by a router of another x",
     .ranks = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_F32,
     .capacity = 2,
     .tokens_max = 4,
     .tokens = {3, 4},
     .exact = true,
     .chosen = true,
     .apart = true,
     .keeps = true},
    {.name = "eight ranks",
     .ranks = 8,
     .experts = 16,
     .top_k = 4,
     .dtype = CUMOE_BF16,
     .capacity = 2,
     .tokens = {2, 1, 0, 2, 2, 1, 2, 0},
     .exact = true},
    {.name = "eight ranks, two lanes in rounds, experts twice",
     .ranks = 8,
     .lanes = 2,
     .experts = 16,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 2,
     .tokens_max = 5,
     .tokens = {5, 1, 0, 2, 4, 0, 3, 2},
     .spread = TWICE,
     .exact = true,
     .routed = true,
     .shared = true},
    {.name = "few tokens of a group for many, in turn",
     .ranks = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 40,
     .tokens_max = 3,
     .tokens = {3, 1},
     .varies = true,
     .exact = true,
     .routed = true},
    {.name = "sums of few tokens of a group for many, in turn",
     .ranks = 3,
     .experts = 9,
     .top_k = 3,
     .dtype = CUMOE_F32,
     .capacity = 11,
     .tokens_max = 10,
     .tokens = {10, 0, 7},
     .spread = SCATTERED,
     .varies = true,
     .residual = true},
    {.name = "few tokens of three tiers, in turn",
     .ranks = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 150,
     .tokens_max = 12,
     .tokens = {12, 5},
     .varies = true,
     .exact = true,
     .shared = true},
    {.name = "sums of three tiers, in turn",
     .ranks = 3,
     .experts = 9,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .hidden = 264,
     .inter = 16,
     .capacity = 70,
     .tokens_max = 9,
     .tokens = {9, 0, 7},
     .spread = SCATTERED,
     .varies = true},
    {.name = "few tokens in a last round, in parts",
     .ranks = 2,
     .lanes = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 20,
     .tokens_max = 43,
     .tokens = {43, 21},
     .parts = true,
     .exact = true,
     .shared = true},
    {.name = "few tokens that the device counts, of a group for many",
     .ranks = 2,
     .experts = 8,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 24,
     .tokens_max = 26,
     .tokens = {25, 2},
     .counted = true,
     .exact = true,
     .routed = true},
    {.name = "a gate of 128 experts",
     .ranks = 2,
     .experts = 128,
     .top_k = 8,
     .dtype = CUMOE_BF16,
     .capacity = 9,
     .tokens = {9, 5},
     .exact = true},
    {.name = "a gate of 256 experts in groups, with a bias",
     .ranks = 2,
     .experts = 256,
     .top_k = 8,
     .groups = 8,
     .dtype = CUMOE_BF16,
     .capacity = 9,
     .tokens = {9, 5},
     .exact = true},
    {.name = "sums as lines, of two slices",
     .ranks = 3,
     .experts = 9,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .hidden = 1024,
     .inter = 64,
     .capacity = 13,
     .tokens = {13, 0, 7},
     .spread = SCATTERED,
     .residual = true},
    {.name = "sums as lines, then as packets, in parts and rounds",
     .ranks = 2,
     .lanes = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_F32,
     .hidden = 264,
     .inter = 16,
     .capacity = 18,
     .tokens_max = 30,
     .tokens = {30, 19},
     .parts = true},
    {.name = "sums as lines of six ranks, counted",
     .ranks = 6,
     .experts = 10,
     .top_k = 1,
     .dtype = CUMOE_F16,
     .hidden = 240,
     .inter = 16,
     .capacity = 8,
     .tokens_max = 8,
     .tokens = {8, 1, 0, 5, 3, 2},
     .spread = SCATTERED,
     .counted = true,
     .routed = true},
    {.name = "sums as lines, as packets and as rows, in turn",
     .ranks = 2,
     .experts = 8,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .hidden = 328,
     .inter = 24,
     .capacity = 40,
     .tokens_max = 39,
     .tokens = {39, 20},
     .varies = true},
    {.name = "own tokens apart, and few in turn",
     .ranks = 2,
     .experts = 8,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .hidden = 264,
     .inter = 24,
     .capacity = 35,
     .tokens_max = 34,
     .tokens = {34, 20},
     .varies = true,
     .aside = true,
     .own = true},
    {.name = "rows aside, counted, in rounds, few of one rank",
     .ranks = 3,
     .experts = 8,
     .top_k = 3,
     .dtype = CUMOE_F16,
     .capacity = 34,
     .tokens_max = 40,
     .tokens = {5, 37, 0},
     .spread = SCATTERED,
     .counted = true,
     .routed = true,
     .aside = true},
    {.name = "sums and a shared expert as packets, one bias for all",
     .ranks = 3,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_F16,
     .capacity = 6,
     .tokens = {6, 0, 1},
     .shared = true,
     .ungated = true,
     .residual = true,
     .bias_row = true},
    {.name = "sums and a gated shared expert as lines, zero experts",
     .ranks = 3,
     .experts = 9,
     .top_k = 3,
     .zero = 3,
     .dtype = CUMOE_BF16,
     .hidden = 264,
     .inter = 24,
     .capacity = 13,
     .tokens = {7, 13, 0},
     .spread = SCATTERED,
     .shared = true,
     .residual = true},
    {.name = "sums and a gated shared expert as rows, weight on the input, counted, in rounds",
     .ranks = 2,
     .experts = 7,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 35,
     .tokens_max = 41,
     .tokens = {4, 40},
     .counted = true,
     .routed = true,
     .odd_ids = true,
     .weigh_input = true,
     .shared = true},
    {.name = "sums and a gated shared expert in parts and two lanes, what is chosen is kept",
     .ranks = 2,
     .lanes = 2,
     .experts = 8,
     .top_k = 3,
     .zero = 1,
     .dtype = CUMOE_F32,
     .capacity = 5,
     .tokens_max = 8,
     .tokens = {8, 3},
     .from_logits = true,
     .keeps = true,
     .parts = true,
     .shared = true},
    {.name = "out in f32, residual",
     .ranks = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 4,
     .tokens_max = 6,
     .tokens = {6, 1},
     .exact = true,
     .out_f32 = true,
     .residual = true},
    {.name = "sums as packets and lines in f32, residual",
     .ranks = 2,
     .experts = 8,
     .top_k = 3,
     .dtype = CUMOE_F16,
     .hidden = 264,
     .inter = 16,
     .capacity = 20,
     .tokens_max = 6,
     .tokens = {5, 6},
     .varies = true,
     .out_f32 = true,
     .residual = true},
    {.name = "sums in f32 as rows, a gated shared expert, in rounds",
     .ranks = 2,
     .experts = 6,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 34,
     .tokens_max = 40,
     .tokens = {40, 33},
     .out_f32 = true,
     .shared = true},
    {.name = "a router's bias, rounded and scaled logits, experts' scales",
     .ranks = 2,
     .experts = 8,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 5,
     .tokens_max = 7,
     .tokens = {7, 4},
     .ruled = true,
     .keeps = true,
     .exact = true},
    {.name = "sums of eight ranks, counted, in rounds",
     .ranks = 8,
     .experts = 16,
     .top_k = 4,
     .dtype = CUMOE_BF16,
     .capacity = 3,
     .tokens_max = 4,
     .tokens = {4, 1, 0, 2, 3, 0, 3, 2},
     .spread = SCATTERED,
     .counted = true,
     .routed = true},
};

/* Tokens past a CTA of slots; more ranks than the arguments of a kernel hold the arenas of, and than a warp has lanes,
 * and than share GPUs. */
static const world crowds[] = {
    {.name = "many tokens",
     .ranks = 2,
     .experts = 6,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 1100,
     .tokens = {1050, 20},
     .exact = true},
    {.name = "seventeen ranks",
     .ranks = 17,
     .lanes = 2,
     .experts = 16,
     .top_k = 3,
     .dtype = CUMOE_BF16,
     .capacity = 2,
     .tokens_max = 3,
     .tokens = {3, 1, [15] = 2, [16] = 3},
     .spread = SCATTERED,
     .exact = true,
     .routed = true},
    {.name = "sums of thirty-two ranks",
     .ranks = 32,
     .experts = 32,
     .top_k = 4,
     .dtype = CUMOE_BF16,
     .capacity = 2,
     .tokens = {2, 1, [15] = 2, [16] = 1, [31] = 2},
     .routed = true},
    {.name = "thirty-five ranks",
     .ranks = 35,
     .experts = 16,
     .top_k = 4,
     .dtype = CUMOE_F32,
     .capacity = 2,
     .tokens = {2, 1, [31] = 2, [32] = 1, [34] = 2},
     .spread = TWICE,
     .exact = true,
     .routed = true},
};

/* Who waits for what a rank does not have still gets an answer, and adds up nothing that an earlier call has left. */
static void answer_misplaced(void)
{
  for (int i = 0; i < 16 && !gave_up; i++) {
    const bool many = i / 2 % 2;
    const world w = {.name = many ? "an expert that its rank does not have, many tokens"
                                  : "an expert that its rank does not have",
                     .ranks = 3,
                     .experts = 4,
                     .top_k = i / 8 ? 2 : 1,
                     .dtype = CUMOE_BF16,
                     .capacity = many ? 40 : 13,
                     .tokens = {many ? 40 : 13, 0, many && i / 8 ? 0 : 7}, /* own: no other rank's say so */
                     .exact = i / 4 % 2,
                     .routed = true,
                     .misplaces = true,
                     .aside = many,
                     .own = i / 8};
    run_world(&w, i % 2);
  }
}

static void answers(void)
{
  for (size_t i = 0; i < sizeof worlds / sizeof *worlds * 2; i++) run_world(&worlds[i / 2], i % 2);
  for (size_t i = 0; i < sizeof crowds / sizeof *crowds * 2; i++) run_world(&crowds[i / 2], i % 2);
  answer_misplaced();
}

/* ---- trouble ---- */

typedef struct fate {
  const char *name;
  trouble trouble;
  int64_t timeout_ms;
  cumoe_status own, others; /* what the troubled rank and the others answer */
  const char *words;        /* in one of the others' texts */
  int32_t cause, phase;     /* that the others read; 0: they have no group */
} fate;

static const fate fates[] = {
    {"a rank that stops", STOPS_BEFORE, 2000, CUMOE_OK, CUMOE_ERR_PEER,
     "rank 1 has not sent its tokens (dispatch) within 2 s", CUMOE_GROUP_TIMEOUT, CUMOE_PHASE_DISPATCH},
    {"a rank that never joins", NEVER_JOINS, 500, CUMOE_OK, CUMOE_ERR_PEER,
     "rank 1 has not joined (create) within 0.5 s", 0, 0},
    {"a rank that aborts", ABORTS, 20000, CUMOE_ERR_PEER, CUMOE_ERR_PEER, "rank 1 has aborted the group",
     CUMOE_GROUP_ABORTED, CUMOE_PHASE_NONE},
    {"another max_tokens", OTHER_SIZE, 20000, CUMOE_ERR_INVALID_ARGUMENT, CUMOE_ERR_INVALID_ARGUMENT,
     "config.max_tokens is 4 on rank", 0, 0},
    {"another way to send", OTHER_FLAGS, 20000, CUMOE_ERR_INVALID_ARGUMENT, CUMOE_ERR_INVALID_ARGUMENT,
     "config.flags is 1 on rank", 0, 0},
    {"another description", OTHER_SHAPE, 20000, CUMOE_ERR_INVALID_ARGUMENT, CUMOE_ERR_INVALID_ARGUMENT,
     "the hash of the rest of desc", 0, 0},
    {"two arenas swapped", SWAPPED, 20000, CUMOE_OK, CUMOE_ERR_INVALID_ARGUMENT, "config.arenas: in rank", 0, 0},
    {"an arena that was used", USED_ARENA, 20000, CUMOE_ERR_INVALID_ARGUMENT, CUMOE_ERR_PEER,
     "rank 1 gave up: a call of its own failed before it had joined (create)", 0, 0},
    {"a call that is corrected", BAD_CALL, 20000, CUMOE_OK, CUMOE_OK, "", 0, 0},
};

static void run_fate(const fate *f, bool shortens)
{
  rank ranks[MOST_RANKS];
  world w = {.name = f->name,
             .ranks = 3,
             .experts = 6,
             .top_k = 2,
             .dtype = CUMOE_F32,
             .capacity = 4,
             .tokens = {4, 2, 3},
             .exact = true,
             .shortens = shortens};
  const bool launched = gpus && f->cause; /* a launch says nothing of the group */
  bool found = launched;
  case_begin("%s", f->name);
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  run_ranks(&w, &out, ranks, 1, f->trouble, f->timeout_ms * 1000000);
  for (int32_t i = 0; i < w.ranks; i++) {
    const rank *r = &ranks[i];
    if (i == 1 && f->trouble == SWAPPED) continue; /* it may see what it did, or be told */
    const cumoe_status want = launched ? CUMOE_OK : i == 1 ? f->own : f->others;
    CHECK_MSG(r->status == want, "rank %d: %s: %s", (int)i, cumoe_status_name(r->status), r->text);
    if (i != 1) found |= strstr(r->text, f->words) != NULL;
    if (i != 1 && f->cause)
      CHECK_MSG(r->fault.cause == f->cause && r->fault.phase == f->phase && r->fault.about == 1, "rank %d: %d %d %d",
                (int)i, (int)r->fault.cause, (int)r->fault.phase, (int)r->fault.about);
  }
  CHECK_MSG(found, "no text has \"%s\": \"%s\", \"%s\"", f->words, ranks[0].text, ranks[2].text);
  case_end();
}

static void *only_join(void *argument)
{
  keep(argument, join(argument));
  return NULL;
}

static void *only_call(void *argument)
{
  rank *r = argument;
  keep(r, one_call(r, 0, 0));
  return NULL;
}

/* The first rank waits for the second, which does not come. */
static void shorten_under_way(void)
{
  world w = {.ranks = 2, .experts = 6, .top_k = 2, .dtype = CUMOE_F32, .capacity = 4, .tokens = {1, 1}, .exact = true};
  rank r[2] = {{.w = &w, .all = r}, {.w = &w, .all = r, .number = 1}};
  pthread_t threads[2], waits;
  case_begin("a wait that is made shorter while it waits");
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  for (int i = 0; i < 2; i++) r[i].out = &out, r[i].timeout_ns = 20000000000, make_arena(&r[i]);
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, only_join, &r[i]) == 0);
  for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < 2; i++) CHECK_MSG(r[i].status == CUMOE_OK, "rank %d: %s", i, r[i].text);
  CHECK_OK(cumoe_ep_workspace(r[0].group, &r[0].workspace_bytes));
  r[0].workspaces[0] = device_bytes(r[0].context, r[0].workspace_bytes);
  CHECK(pthread_create(&waits, NULL, only_call, &r[0]) == 0);
  usleep(50000);
  const time_t then = time(NULL);
  CHECK_OK(cumoe_group_set_timeout(r[0].group, 1000000));
  CHECK(pthread_join(waits, NULL) == 0);
  CHECK(time(NULL) - then < 15);
  CHECK(r[0].status == CUMOE_ERR_PEER);
  CHECK_MSG(strstr(r[0].text, "rank 1 has not sent its tokens (dispatch) within 0.001 s"), "%s", r[0].text);
  CHECK_STATUS(CUMOE_ERR_PEER, cumoe_group_destroy(r[0].group));
  CHECK_TEXT("rank 1 has not left (destroy) within 0.001 s");
  CHECK_OK(cumoe_group_destroy(r[1].group));
  for (int i = 0; i < 2; i++) {
    CHECK_OK(cumoe_context_destroy(r[i].context));
    free(r[i].arena);
  }
  case_end();
}

static void troubles(void)
{
  static const fate with_less = {"a rank that stops when the others wait for less",
                                 STOPS_BEFORE,
                                 20000,
                                 CUMOE_OK,
                                 CUMOE_ERR_PEER,
                                 "rank 1 has not sent its tokens (dispatch) within 0.5 s",
                                 CUMOE_GROUP_TIMEOUT,
                                 CUMOE_PHASE_DISPATCH};
  for (size_t i = 0; i < sizeof fates / sizeof *fates; i++) run_fate(&fates[i], false);
  run_fate(&with_less, true);
  if (!gpus) shorten_under_way();
}

/* ---- ranks that are left out ---- */

static void check_survivor(const rank *r, cumoe_status before)
{
  CHECK_MSG(r->before == (gpus ? CUMOE_OK : before), "rank %d: %s", (int)r->number, r->text);
  CHECK(r->seen.cause == CUMOE_GROUP_ALIVE || before != CUMOE_OK);
  CHECK(before == CUMOE_OK || (r->seen.cause == CUMOE_GROUP_TIMEOUT && r->seen.about == LOST));
  CHECK_MSG(r->status == CUMOE_OK, "rank %d: %s", (int)r->number, r->text);
  CHECK(r->ended == CUMOE_OK && r->fault.cause == CUMOE_GROUP_ALIVE);
  if (r->before != CUMOE_OK) CHECK_MSG(strstr(r->text, "rank 1 ha") != NULL, "rank %d: %s", (int)r->number, r->text);
}

/* `troubled` stop before the last call; all: they leave a rank out before anybody waits for it in vain. */
static void run_without(world w, int32_t troubled)
{
  rank ranks[MOST_RANKS];
  case_begin("%s", w.name);
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  run_ranks(&w, &out, ranks, troubled, STOPS_BEFORE, emulated() && troubled == ALL ? 20000000000 : 1000000000);
  for (int32_t i = 0; i < w.ranks; i++)
    if (i != LOST) check_survivor(&ranks[i], troubled == ALL ? CUMOE_OK : CUMOE_ERR_PEER);
  CHECK(ranks[0].found.code == CUMOE_FAULT_EXPERT_MAP); /* it chose an expert that was on LOST alone */
  if (w.exact)
    check_exact(&w, &out);
  else
    check_sums(&w, &out);
  case_end();
}

static void without(void)
{
  const world lost_in_a_call = {.name = "lost in a call",
                                .ranks = 4,
                                .lanes = 2,
                                .experts = 12,
                                .top_k = 3,
                                .dtype = CUMOE_BF16,
                                .capacity = 3,
                                .tokens_max = 5,
                                .tokens = {5, 3, 0, 4},
                                .spread = TWICE,
                                .loses = true,
                                .exact = true,
                                .routed = true,
                                .shared = true};
  const world left_out = {.name = "left out",
                          .ranks = 3,
                          .experts = 9,
                          .top_k = 3,
                          .dtype = CUMOE_F32,
                          .capacity = 4,
                          .tokens = {4, 3, 2},
                          .loses = true,
                          .dedup = true};
  const world many = {.name = "one of seventy",
                      .ranks = MOST_RANKS,
                      .experts = 14,
                      .top_k = 2,
                      .dtype = CUMOE_F32,
                      .capacity = 1,
                      .tokens = {1, 1, [62] = 1, [63] = 1, [64] = 1, [65] = 1},
                      .spread = SCATTERED,
                      .loses = true,
                      .exact = true};
  const world one_of_eight = {.name = "one of eight",
                              .ranks = 8,
                              .lanes = 2,
                              .experts = 16,
                              .top_k = 4,
                              .dtype = CUMOE_BF16,
                              .capacity = 2,
                              .tokens_max = 3,
                              .tokens = {3, 2, 0, 1, 3, 0, 2, 1},
                              .spread = TWICE,
                              .loses = true,
                              .dedup = true,
                              .exact = true,
                              .routed = true};
  run_without(lost_in_a_call, LOST);
  run_without(left_out, ALL);
  run_without(one_of_eight, LOST);
  if (!gpus || emulated()) run_without(many, ALL);
}

/* What ranks 0 and 2 of four are answered. */
static void masks(void)
{
  static const struct {
    const char *name;
    uint64_t says[4];
    int64_t timeout_ns;
    cumoe_status status;
    const char *words;
    int32_t cause;
  } cases[] = {
      {"masks that differ",
       {0xd, 0, 0x7, 0},
       20000000000,
       CUMOE_ERR_INVALID_ARGUMENT,
       "active is not what rank",
       CUMOE_GROUP_FAILED},
      {"a rank that tells no mask",
       {0xb, 0, 0, 0},
       1000000000,
       CUMOE_ERR_PEER,
       "rank 1 has not told where it is (set_active) within 1 s",
       CUMOE_GROUP_TIMEOUT},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rank ranks[MOST_RANKS];
    world w = {
        .ranks = 4, .experts = 4, .top_k = 2, .dtype = CUMOE_F32, .capacity = 1, .exact = true, .says = cases[i].says};
    case_begin("%s", cases[i].name);
    make_world(&w);
    const tensor out = tensor_new(w.dtype, 0, w.hidden);
    run_ranks(&w, &out, ranks, NOBODY, NONE, cases[i].timeout_ns);
    for (int32_t r = 0; r < 4; r++) {
      const rank *k = &ranks[r];
      CHECK_MSG(k->status == (w.says[r] ? cases[i].status : CUMOE_OK), "rank %d: %s", (int)r, k->text);
      if (!w.says[r]) continue;
      CHECK_MSG(strstr(k->text, cases[i].words) != NULL, "rank %d: %s", (int)r, k->text);
      CHECK(k->fault.cause == cases[i].cause && k->fault.phase == CUMOE_PHASE_SET_ACTIVE);
    }
    case_end();
  }
}

/* The first of three takes itself for one of two. The third comes first: what it writes lies in the others' way. */
typedef struct miscounted {
  int32_t number;
  void **arenas;
  cumoe_status status;
  char text[400];
} miscounted;

static void *join_miscounted(void *argument)
{
  miscounted *m = argument;
  const cumoe_moe_desc desc = {.size = sizeof desc,
                               .num_experts = 3,
                               .local_experts = 1,
                               .hidden = 8,
                               .inter = 8,
                               .dtype = CUMOE_F32,
                               .routing = cumoe_routing_qwen3(1)};
  const cumoe_group_config config = {.size = sizeof config,
                                     .rank = m->number,
                                     .ranks = m->number == 0 ? 2 : 3,
                                     .max_tokens = 1,
                                     .timeout_ns = 700000000,
                                     .arenas = m->arenas};
  cumoe_context context;
  cumoe_plan plan;
  cumoe_group made = NULL;
  size_t bytes;
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &context));
  CHECK_OK(cumoe_plan_create(context, &desc, &plan));
  CHECK_OK(cumoe_ep_arena(plan, &config, &bytes));
  unsigned char *arena = m->arenas[m->number];
  usleep(m->number == 2 ? 0 : 100000 + 150000 * (unsigned)m->number);
  m->status = cumoe_group_create(context, plan, &config, cumoe_vector_mut(arena, CUMOE_U8, (int64_t)bytes), &made);
  snprintf(m->text, sizeof m->text, "%s", cumoe_last_error());
  CHECK_OK(cumoe_context_destroy(context));
  return NULL;
}

static void miscount(void)
{
  enum { RANKS = 3, ROOM = 1 << 20 };
  static const char *const words[RANKS] = {"config.ranks is 2 on rank 0 and 3 on rank 1",
                                           "config.ranks is 3 on rank 1 and 2 on rank 0", "has not joined (create)"};
  miscounted m[RANKS];
  pthread_t threads[RANKS];
  void *arenas[RANKS];
  case_begin("ranks that say different numbers of ranks");
  for (int32_t r = 0; r < RANKS; r++) arenas[r] = aligned(ROOM);
  for (int32_t r = 0; r < RANKS; r++) {
    memset(arenas[r], 0, ROOM);
    m[r] = (miscounted){.number = r, .arenas = arenas};
  }
  for (int32_t r = 0; r < RANKS; r++) CHECK(pthread_create(&threads[r], NULL, join_miscounted, &m[r]) == 0);
  for (int32_t r = 0; r < RANKS; r++) CHECK(pthread_join(threads[r], NULL) == 0);
  for (int32_t r = 0; r < RANKS; r++) {
    CHECK_MSG(m[r].status == (r < 2 ? CUMOE_ERR_INVALID_ARGUMENT : CUMOE_ERR_PEER), "rank %d: %s", (int)r, m[r].text);
    CHECK_MSG(strstr(m[r].text, words[r]) != NULL, "rank %d: %s", (int)r, m[r].text);
    free(arenas[r]);
  }
  case_end();
}

/* Whoever goes on may abort while another one has just been told: that one must not lose it. Of one meanwhile all know,
 * or none. */
static void aborted_at_once(void)
{
  enum { STAY = 5, RUNS = 80 };
  static const uint64_t says[STAY + 1] = {0x1f, 0x1f, 0x1f, 0x1f, 0x1f, 0};
  int lost = 0;
  case_begin("an abort behind a mask");
  for (int i = 0; i < RUNS; i++) {
    int seen = 0;
    rank ranks[MOST_RANKS];
    world w = {.ranks = STAY + 1,
               .experts = STAY + 1,
               .top_k = 2,
               .dtype = CUMOE_F32,
               .capacity = 1,
               .exact = true,
               .says = says,
               .aborts = STAY,
               .meanwhile = i % 2 * (1 + i * 2000)};
    make_world(&w);
    const tensor out = tensor_new(w.dtype, 0, w.hidden);
    run_ranks(&w, &out, ranks, NOBODY, NONE, 20000000000);
    for (int32_t r = 0; r < STAY; r++) {
      CHECK_MSG(ranks[r].status == CUMOE_OK || ranks[r].status == CUMOE_ERR_PEER, "rank %d: %s", (int)r, ranks[r].text);
      seen += ranks[r].fault.cause == CUMOE_GROUP_ABORTED;
    }
    if (seen < STAY && !(w.meanwhile && seen == 0)) lost++;
  }
  CHECK_MSG(lost == 0, "in %d of %d runs some have not seen it", lost, RUNS);
  case_end();
}

/* ---- ranks as processes ---- */

/* What a process leaves behind. */
typedef struct outcome {
  rank rank;
  meeting meeting; /* of the first: all ranks' */
} outcome;

static void *map_shared(size_t bytes)
{
  void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return CHECK(data != MAP_FAILED) ? data : NULL;
}

static pid_t start_process(rank *r, outcome *left)
{
  void *arena = r->arena;
  fflush(stdout);
  const pid_t child = fork();
  if (child != 0) return child;
  make_arena(r);
  free(r->arena);
  r->arena = arena;
  if (r->w->loses)
    outlive(r);
  else
    live(r);
  left->rank = *r;
  _exit(0);
}

static size_t arena_bytes(rank *r)
{
  make_arena(r);
  free(r->arena);
  CHECK_OK(cumoe_context_destroy(r->context));
  return r->bytes;
}

/* LOST is killed, or stopped for a while, by a signal, wherever it then is; 0: is not. */
static void run_processes(const char *name, int signal, useconds_t after)
{
  world w = {.ranks = 3,
             .experts = 6,
             .top_k = 2,
             .dtype = CUMOE_F32,
             .capacity = 4,
             .tokens = {4, 2, 3},
             .exact = true,
             .loses = signal != 0};
  rank ranks[3];
  pid_t children[3];
  int end = 0;
  case_begin("%s", name);
  make_world(&w);
  tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  const size_t out_bytes = (size_t)(w.x.rows * w.hidden) * sizeof(float);
  out.data = map_shared(out_bytes);
  outcome *left = map_shared(sizeof *left * 3);
  left->meeting.haunts = signal == SIGSTOP;
  for (int32_t i = 0; i < 3; i++) {
    ranks[i] = (rank){.w = &w, .all = ranks, .out = &out, .number = i, .meeting = &left->meeting};
    if (signal) ranks[i].timeout_ns = 1000000000, ranks[i].trouble = ENDLESS;
    left[i].rank.status = CUMOE_ERR_INTERNAL;
    const size_t bytes = arena_bytes(&ranks[i]);
    ranks[i].arena = map_shared(bytes);
    ranks[i].first = 0, ranks[i].bytes = bytes;
  }
  for (int32_t i = 0; i < 3; i++) children[i] = start_process(&ranks[i], &left[i]);
  if (signal) meet(&left->meeting.started, 3);
  if (signal) CHECK(usleep(after) == 0 && kill(children[LOST], signal) == 0);
  if (signal == SIGSTOP) meet(&left->meeting.left, 2);
  if (signal == SIGSTOP) CHECK(kill(children[LOST], SIGCONT) == 0);
  for (int32_t i = 0; i < 3; i++) CHECK(waitpid(children[i], &end, 0) == children[i]);
  for (int32_t i = 0; i < 3; i++) {
    const rank *r = &left[i].rank;
    if (signal && i != LOST) check_survivor(r, CUMOE_ERR_PEER);
    if (!signal) CHECK_MSG(r->status == CUMOE_OK && r->ended == CUMOE_OK, "rank %d: %s", (int)i, r->text);
  }
  if (signal == SIGSTOP) CHECK(left[LOST].rank.before == CUMOE_ERR_PEER);
  check_exact(&w, &out);
  for (int32_t i = 0; i < 3; i++) CHECK(munmap(ranks[i].arena, ranks[i].bytes) == 0);
  CHECK(munmap(out.data, out_bytes) == 0 && munmap(left, sizeof *left * 3) == 0);
  case_end();
}

static void processes(void)
{
  run_processes("processes that share their arenas", 0, 0);
  run_processes("a process that is killed", SIGKILL, 0);
  run_processes("a process that is killed later", SIGKILL, 3000);
  run_processes("a process that is stopped, and goes on", SIGSTOP, 1000);
}

/* Ranks that share a GPU wait for each other: no two streams in one queue. */
__attribute__((constructor)) static void have_queues(void)
{
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
}

/* Each wait on a GPU has its limit; this is for the host's. */
enum { SECONDS_ON_GPUS = 100, SECONDS_EMULATED = 1500 };
static void stop_waiting(int signal)
{
  static const char words[] = "not ok - ranks on GPUs: they have not ended\n";
  (void)signal;
  _exit(write(STDOUT_FILENO, words, sizeof words - 1) < 0 ? 2 : 1);
}

/* Kernels that the CPU runs would take minutes for these. */
static const world asides[] = {
    {.name = "own tokens apart, residual, two lanes",
     .ranks = 2,
     .lanes = 2,
     .experts = 9,
     .top_k = 4,
     .dtype = CUMOE_F16,
     .hidden = 64,
     .inter = 40,
     .capacity = 70,
     .tokens = {70, 33},
     .spread = SCATTERED,
     .residual = true,
     .aside = true,
     .own = true},
    {.name = "own tokens of one rank of two apart, routed by the caller",
     .ranks = 2,
     .experts = 6,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 64,
     .tokens = {50, 0},
     .spread = SCATTERED,
     .odd_ids = true,
     .routed = true,
     .aside = true,
     .own = true},
    {.name = "own tokens apart, counted, in rounds",
     .ranks = 2,
     .experts = 8,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .capacity = 40,
     .tokens_max = 100,
     .tokens = {90, 57},
     .counted = true,
     .aside = true,
     .own = true},
    {.name = "own tokens of four ranks apart",
     .ranks = 4,
     .experts = 8,
     .top_k = 4,
     .dtype = CUMOE_BF16,
     .capacity = 48,
     .tokens = {48, 40, 34, 47},
     .aside = true,
     .own = true},
    {.name = "rows aside, wide",
     .ranks = 2,
     .experts = 4,
     .top_k = 2,
     .dtype = CUMOE_BF16,
     .hidden = 520,
     .inter = 16,
     .capacity = 40,
     .tokens = {40, 35},
     .aside = true},
};

/* By kernels of many rows, of which down draws its units. */
static void many_on_gpus(bool own)
{
  const world w = {.name = own ? "own tokens apart, by products of many rows" : "rows aside, by products of many rows",
                   .ranks = own ? 3 : 2,
                   .experts = 8,
                   .top_k = 2,
                   .dtype = CUMOE_BF16,
                   .hidden = 1024,
                   .inter = 256,
                   .capacity = 1100,
                   .tokens = {1050, 730, 901},
                   .by_few = true,
                   .aside = true,
                   .own = own};
  if (!emulated()) run_world(&w, false);
}

/* Of sums no identity expert, and one place of each expert, by which check_sums goes. */
static void randomise_features(rng *r, world *w)
{
  w->shared = rng_below(r, 2), w->ungated = w->shared && rng_below(r, 2);
  w->keeps = !w->routed && rng_below(r, 3) == 0;
  w->bias_row = w->residual && rng_below(r, 3) == 0;
  w->spread = (spread)rng_below(r, w->ranks > 1 && w->exact ? 4 : 3);
  w->moves = w->spread == TWICE && w->routed && rng_below(r, 2);
  w->odd_ids = w->routed && rng_below(r, 3) == 0;
  w->ruled = !w->routed && !w->from_logits && rng_below(r, 3) == 0;
  w->zero = (int32_t)(rng_below(r, 4) == 0 ? rng_below(r, 4) : 0);
  w->identity = (int32_t)(w->exact && rng_below(r, 4) == 0 ? rng_below(r, 4) : 0);
  w->weigh_input = !w->identity && rng_below(r, 4) == 0;
}

/* Formats whose scales lie beside their experts. */
static void randomise_format(rng *r, world *w)
{
  const cumoe_format formats[] = {cumoe_format_fp8_block(CUMOE_F32),
                                  cumoe_format_fp8_channel(CUMOE_F32),
                                  cumoe_format_int8(CUMOE_BF16),
                                  cumoe_format_int4(32, CUMOE_BF16),
                                  cumoe_format_mxfp4(),
                                  cumoe_format_nvfp4(CUMOE_GLOBAL_NONE)};
  if (w->dtype == CUMOE_F32 || rng_below(r, 3) == 0) return;
  if (rng_below(r, 3)) w->format = formats[rng_below(r, 6)];
  if (w->shared && rng_below(r, 3)) w->shared_format = formats[rng_below(r, 6)];
  w->hidden = 64 * (1 + (int32_t)rng_below(r, 6)), w->inter = 32 * (1 + (int32_t)rng_below(r, 6));
}

/* All that the worlds above are about, in any combination. */
static world random_world(rng *r)
{
  world w = {.ranks = 1 + (int32_t)rng_below(r, 8)};
  w.lanes = 1 + (int32_t)rng_below(r, 2);
  w.experts = 1 + (int32_t)rng_below(r, 24);
  w.top_k = 1 + (int32_t)rng_below(r, w.experts < 6 ? w.experts : 6);
  w.dtype = case_dtypes[rng_below(r, 3)];
  if (rng_below(r, 2)) w.hidden = 8 * (1 + (int32_t)rng_below(r, 70)), w.inter = 8 * (1 + (int32_t)rng_below(r, 8));
  w.capacity = 1 + rng_below(r, rng_below(r, 3) ? 12 : 80);
  if (rng_below(r, 2)) w.tokens_max = 1 + rng_below(r, 3 * w.capacity);
  const int64_t most = w.tokens_max ? w.tokens_max : w.capacity;
  for (int32_t i = 0; i < w.ranks; i++) w.tokens[i] = rng_below(r, 5) ? rng_below(r, most + 1) : 0;
  w.tokens[rng_below(r, w.ranks)] = most;
  w.parts = rng_below(r, 4) == 0;
  w.counted = w.lanes == 1 && w.tokens_max && rng_below(r, 2); /* lanes would share the count */
  w.exact = rng_below(r, 2);
  w.residual = rng_below(r, 2);
  w.out_f32 = rng_below(r, 3) == 0;
  bool *const routes[] = {&w.routed, &w.chosen, &w.from_logits, &w.apart};
  const int64_t route = rng_below(r, 5);
  if (route < 4) *routes[route] = true;
  w.varies = w.tokens_max && w.tokens_max <= w.capacity && rng_below(r, 2);
  w.aside = gpus && !emulated() && rng_below(r, 2), w.own = w.aside && rng_below(r, 2);
  randomise_features(r, &w);
  randomise_format(r, &w);
  return w;
}

static void name_world(const world *w, int seed, size_t room, char *name)
{
  const struct {
    bool is;
    const char *text;
  } words[] = {{w->parts, " parts"},   {w->counted, " counted"}, {w->exact, " exact"}, {w->routed, " routed"},
               {w->varies, " varies"}, {w->aside, " aside"},     {w->own, " own"}};
  int end = snprintf(name, room, "random %d: R %d L %d E %d k %d H %d C %d most %d spread %d format %d, %d", seed,
                     (int)w->ranks, (int)w->lanes, (int)w->experts, (int)w->top_k, (int)w->hidden, (int)w->capacity,
                     (int)w->tokens_max, (int)w->spread, (int)w->format.element, (int)w->shared_format.element);
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    end += snprintf(name + end, room - (size_t)end, "%s", words[i].is ? words[i].text : "");
}

static void at_random(void)
{
  const seed_range seeds = test_seeds(emulated() ? 10 : 40);
  for (int i = seeds.first; i < seeds.end && !gave_up; i++) {
    rng r = {(uint64_t)i + 77};
    char name[160];
    world w = random_world(&r);
    name_world(&w, i, sizeof name, name);
    w.name = name;
    run_world(&w, rng_below(&r, 2));
  }
}

/* After one that gave up the others would cost their timeouts. */
static void answers_on_gpus(void)
{
  for (size_t i = 0; i < sizeof worlds / sizeof *worlds * 2 && !gave_up; i++) run_world(&worlds[i / 2], i % 2);
  for (size_t i = 0; i < sizeof asides / sizeof *asides * 2 && !emulated() && !gave_up; i++)
    run_world(&asides[i / 2], i % 2);
  for (int i = 0; i < 2 && !gave_up; i++) many_on_gpus(i == 1);
  for (size_t i = 0; i < sizeof crowds / sizeof *crowds * 2 && emulated() && !gave_up; i++)
    run_world(&crowds[i / 2], i % 2);
  for (int i = 0; i < 4 && !gave_up; i++) { /* several CTAs a move, parts of a row, tokens past a CTA of slots */
    static const char *const names[] = {"wider rows", "wider rows", "wider rows, sums", "sums past what a CTA lists"};
    const world w = {.name = names[i],
                     .ranks = 2,
                     .experts = i < 3 ? 6 : 24,
                     .top_k = i < 3 ? 3 : 20,
                     .dtype = CUMOE_BF16,
                     .capacity = emulated() ? 40 : 1100,
                     .tokens = {emulated() ? 36 : 1050, 20},
                     .hidden = 2056,
                     .inter = 16,
                     .exact = i < 2};
    run_world(&w, i == 1 || i == 2);
  }
  at_random();
  answer_misplaced();
}

static void begin_on_gpus(void)
{
  CHECK(cudaGetDeviceCount(&gpus) == cudaSuccess);
  printf("# on %d GPUs\n", (int)gpus);
  signal(SIGALRM, stop_waiting);
  alarm(emulated() ? SECONDS_EMULATED : SECONDS_ON_GPUS);
  make_lanes(0, RANKS_OF_A_GPU);
  gave_up = false;
}

static void end_on_gpus(void)
{
  alarm(0);
  close_opened();
  gpus = 0;
}

/* On all GPUs; more ranks than GPUs share them. */
static void on_gpus(cumoe_context context)
{
  (void)context;
  begin_on_gpus();
  answers_on_gpus();
  if (!gave_up) {
    troubles();
    without();
    masks();
  }
  end_on_gpus();
}

/* The last row of few_up that serves bf16 and takes whatever few takes; false: the GPU has none. */
static bool force_few(cumoe_context context, int32_t dtype)
{
  int32_t found = -1;
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    cumoe_variant_info info = {.size = sizeof info};
    if (!CHECK_OK(cumoe_variant_get(context, i, &info))) return false;
    if (info.usable && !strcmp(info.op, "few_up") && info.w == dtype && strstr(info.name, "_K_32x")) found = i;
  }
  return found >= 0 && CHECK_OK(cumoe_variant_force(context, found));
}

/* few leaves rows of y that another grid answers, and begins with what put has filled. */
static void run_few(int i)
{
  const int32_t dtype = i == 3 ? CUMOE_F16 : CUMOE_BF16;
  const world w = {.name = "few tokens",
                   .ranks = 2,
                   .experts = 6,
                   .top_k = 3,
                   .dtype = dtype,
                   .hidden = 256,
                   .inter = 128,
                   .capacity = i == 3   ? 8
                               : i == 4 ? 40
                                        : 2,
                   .tokens_max = i == 4 ? 2 : 0,
                   .tokens = {i == 3 ? 8 : 2, i == 1 ? 0 : 1},
                   .residual = i % 2,
                   .by_few = true,
                   .parts = i == 2,
                   .from_logits = i == 4,
                   .routed = i == 5};
  for (int32_t r = 0; r < w.ranks; r++) CHECK(force_few(open_rank(r), dtype));
  for (int dedup = 0; dedup < 2; dedup++) run_world(&w, dedup);
  for (int32_t r = 0; r < w.ranks; r++) CHECK_OK(cumoe_variant_force(open_rank(r), -1));
}

static void few_on_gpus(cumoe_context context)
{
  begin_on_gpus();
  const bool there = force_few(context, CUMOE_BF16);
  if (there) CHECK_OK(cumoe_variant_force(context, -1));
  for (int i = 0; i < 6 && there && !gave_up; i++) run_few(i);
  end_on_gpus();
}

/* ---- where everything lies ---- */

typedef struct regions {
  uint64_t end;
  bool right; /* in their order, none over another, all aligned */
} regions;

static void region(regions *r, uint64_t at, uint64_t bytes)
{
  r->right &= at >= r->end && at % EP_ALIGN == 0;
  r->end = at + bytes;
}

static void segments(regions *r, const ep_shape *s, const ep_layout *l, int64_t tokens)
{
  const uint64_t slots = (uint64_t)s->ranks * (uint64_t)tokens, k = (uint64_t)s->top_k;
  const uint64_t row = (uint64_t)s->hidden * (uint64_t)s->element;
  region(r, l->lane + l->x, slots * row);
  region(r, l->lane + l->ids, slots * k * 4);
  region(r, l->lane + l->weights, slots * k * 4);
  region(r, l->lane + l->y, slots * row * (s->exact ? k : 1));
}

static void check_layout(const ep_shape *s)
{
  const ep_layout l = ep_lay_out(s);
  const ep_tiers tiers = ep_lay_out_tiers(s);
  const uint64_t ranks = (uint64_t)s->ranks, packets = ranks * (uint64_t)s->packets;
  regions r = {.right = true};
  region(&r, l.hello, ranks * EP_LINE);
  region(&r, l.abort, 8);
  region(&r, l.bases, ranks * 8);
  region(&r, l.every_expert, (uint64_t)s->experts * 4);
  region(&r, l.first_expert, (uint64_t)s->capacity * 4);
  region(&r, l.active, EP_MAX_RANKS / 8);
  region(&r, l.timeout, 8);
  region(&r, l.lane + l.exchange, 8);
  region(&r, l.lane + l.in, ranks * EP_LINE);
  region(&r, l.lane + l.back, ranks * EP_LINE);
  segments(&r, s, &l, s->capacity);
  region(&r, l.lane + l.slots, packets * (uint64_t)s->top_k * EP_PACKET);
  region(&r, l.lane + l.sums, packets * (uint64_t)ep_packet_row(s));
  region(&r, l.lane + l.lines, packets * (uint64_t)ep_line_row(s));
  for (int32_t i = 0; i < tiers.count; i++) {
    const ep_layout tier = ep_in_tier(l, &tiers.of[i]);
    ep_layout others = tier;
    if (i > 0) segments(&r, s, &tier, tiers.of[i].tokens);
    others.x = l.x, others.ids = l.ids, others.weights = l.weights, others.y = l.y;
    CHECK(memcmp(&others, &l, sizeof l) == 0 && (i > 0 || memcmp(&tier, &l, sizeof l) == 0));
  }
  CHECK(r.right);
  CHECK(r.end <= l.lane + l.lane_bytes && l.lane_bytes % EP_ALIGN == 0);
  CHECK(l.bytes == l.lane + (uint64_t)s->lanes * l.lane_bytes && l.bytes < (uint64_t)1 << 62);
  CHECK(l.bytes - r.end < EP_ALIGN + (uint64_t)(s->lanes - 1) * l.lane_bytes);
}

/* Fewer and fewer tokens, by four at most but for the last ones; what few serves is the last one; together a third of
 * the room, and what decoding's sizes add. Each exchange has the least that holds it. */
static void check_tiers(const ep_shape *s)
{
  const ep_tiers t = ep_lay_out_tiers(s);
  const int64_t few = FEW_TOKENS / s->ranks;
  int64_t all = 0;
  CHECK(t.count >= 1 && t.count <= EP_TIERS && t.of[0].tokens == s->capacity);
  for (int32_t i = 0; i < t.count; i++) {
    const int64_t tokens = t.of[i].tokens, below = i + 1 < t.count ? t.of[i + 1].tokens : 0;
    CHECK(tokens > below);
    CHECK(tokens < 64 || tokens / 4 <= below);
    CHECK(ep_tier_for(&t, tokens) == i && ep_tier_for(&t, below + 1) == i);
    if (i > 0) all += tokens;
  }
  CHECK(ep_tier_for(&t, 1) == t.count - 1);
  CHECK(few == 0 || (few < s->capacity ? t.of[t.count - 1].tokens == few : t.count == 1));
  CHECK(all <= s->capacity / 3 + 72);
}

static void layouts(void)
{
  for (int32_t ranks = 1; ranks <= EP_MAX_RANKS; ranks = ranks < 9 ? ranks + 1 : ranks * 2 - ranks % 2)
    for (int32_t k = 1; k <= MAX_TOP_K; k *= 2)
      for (int i = 0; i < 16; i++) {
        const int64_t most = INT32_MAX / k / ranks;
        const ep_shape s = {.ranks = ranks,
                            .lanes = 1 + i % 2,
                            .experts = i & 2 ? MAX_EXPERTS : 1,
                            .top_k = k,
                            .hidden = i & 4 ? 1 << 24 : 8,
                            .element = i & 8 ? 4 : 2,
                            .exact = i % 3 == 0,
                            .packets = i % 3 == 1,
                            .capacity = i % 5 ? 1 + i * 7 % most : most};
        case_begin("%d ranks, top %d, %d", (int)ranks, (int)k, i);
        check_layout(&s);
        check_tiers(&s);
        case_end();
      }
}

/* ---- wrong arguments ---- */

static cumoe_status arena_with(rank *r, void (*change)(cumoe_group_config *c), cumoe_group *made)
{
  void *arenas[MOST_RANKS];
  cumoe_group_config c = config_of(r, arenas);
  change(&c);
  return cumoe_group_create(r->context, r->plan, &c, cumoe_vector_mut(r->arena, CUMOE_U8, (int64_t)r->bytes), made);
}

static void bad_size(cumoe_group_config *c)
{
  c->size = 4;
}
static void bad_flags(cumoe_group_config *c)
{
  c->flags = 8;
}
static void bad_rank(cumoe_group_config *c)
{
  c->rank = 1;
}
static void bad_ranks(cumoe_group_config *c)
{
  c->ranks = 1025;
}
static void no_ranks(cumoe_group_config *c)
{
  c->ranks = 0;
}
static void bad_lanes(cumoe_group_config *c)
{
  c->lanes = 3;
}
static void bad_reserved(cumoe_group_config *c)
{
  c->reserved = 1;
}
static void bad_tokens(cumoe_group_config *c)
{
  c->max_tokens = (int64_t)1 << 30; /* of two slots each */
}
static void no_tokens(cumoe_group_config *c)
{
  c->max_tokens = 0;
}
static void bad_timeout(cumoe_group_config *c)
{
  c->timeout_ns = -1;
}
static void no_arenas(cumoe_group_config *c)
{
  c->arenas = NULL;
}
static void more_tokens(cumoe_group_config *c)
{
  c->max_tokens *= 4;
}
static void other_arena(cumoe_group_config *c)
{
  static _Alignas(256) char elsewhere[256];
  static void *arenas[] = {elsewhere};
  c->arenas = arenas;
}
static void no_comm(cumoe_group_config *c)
{
  c->flags = CUMOE_GROUP_NCCL;
}
static void odd_comm(cumoe_group_config *c)
{
  c->comm = c;
}
static void odd_library(cumoe_group_config *c)
{
  c->nccl = c;
}
static void comm_of_lanes(cumoe_group_config *c)
{
  c->flags = CUMOE_GROUP_NCCL;
  c->comm = c;
  c->lanes = 2;
}
static void odd_arena(cumoe_group_config *c)
{
  static void *arenas[] = {(void *)0x101};
  c->arenas = arenas;
}

static void odd_other_arena(cumoe_group_config *c)
{
  static void *arenas[2];
  arenas[0] = c->arenas[0], arenas[1] = (char *)arenas[0] + 128;
  c->arenas = arenas;
  c->ranks = 2, c->max_tokens = 1;
}

static const struct {
  void (*change)(cumoe_group_config *c);
  cumoe_status status;
  const char *words;
} bad_configs[] = {
    {bad_size, CUMOE_ERR_INVALID_ARGUMENT, "config.size is 4"},
    {bad_flags, CUMOE_ERR_INVALID_ARGUMENT, "config.flags is 0x8, known are 0x7"},
    {no_comm, CUMOE_ERR_INVALID_ARGUMENT, "config.comm is null, config.flags has CUMOE_GROUP_NCCL"},
    {odd_comm, CUMOE_ERR_INVALID_ARGUMENT, "config.comm or config.nccl is given, config.flags has no"},
    {odd_library, CUMOE_ERR_INVALID_ARGUMENT, "config.comm or config.nccl is given, config.flags has no"},
    {comm_of_lanes, CUMOE_ERR_NOT_SUPPORTED, "config.lanes is 2, must be 1 with CUMOE_GROUP_NCCL"},
    {bad_rank, CUMOE_ERR_INVALID_ARGUMENT, "config.rank is 1, must be 0 .. ranks - 1 = 0"},
    {bad_ranks, CUMOE_ERR_INVALID_ARGUMENT, "config.ranks is 1025, must be 1 .. 1024"},
    {no_ranks, CUMOE_ERR_INVALID_ARGUMENT, "config.ranks is 0"},
    {bad_lanes, CUMOE_ERR_INVALID_ARGUMENT, "config.lanes is 3"},
    {bad_reserved, CUMOE_ERR_INVALID_ARGUMENT, "config.reserved is 1"},
    {bad_tokens, CUMOE_ERR_INVALID_ARGUMENT, "config.max_tokens is 1073741824, must be 1 .. 1073741312"},
    {no_tokens, CUMOE_ERR_INVALID_ARGUMENT, "config.max_tokens is 0"},
    {bad_timeout, CUMOE_ERR_INVALID_ARGUMENT, "config.timeout_ns is -1"},
    {no_arenas, CUMOE_ERR_INVALID_ARGUMENT, "config.arenas is null"},
    {odd_arena, CUMOE_ERR_INVALID_ARGUMENT, "config.arenas[0] is 0x101, must be an address aligned to 256"},
    {odd_other_arena, CUMOE_ERR_INVALID_ARGUMENT, "config.arenas[1] is 0x"},
    {other_arena, CUMOE_ERR_INVALID_ARGUMENT, "the rank's own"},
    {more_tokens, CUMOE_ERR_WORKSPACE, "bytes, "},
};

/* Each part in its turn, and refused out of it. */
static void bad_order(rank *r, cumoe_ep_args *e)
{
  static const char *const words[] = {"must be cumoe_ep_dispatch or cumoe_ep_forward", "must be cumoe_ep_experts",
                                      "must be cumoe_ep_combine"};
  for (int turn = 0; turn < 3; turn++) {
    for (int part = 0; part < 3; part++) {
      if (part == turn) continue;
      CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, parts[part](r->group, r->weights, e, NULL));
      CHECK_TEXT(words[turn]);
    }
    if (turn) CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_ep_forward(r->group, r->weights, e, NULL));
    e->round = 1;
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, parts[turn](r->group, r->weights, e, NULL));
    CHECK_TEXT("args.round is 1, must be 0 .. 0");
    e->round = 0;
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, parts[turn](NULL, r->weights, e, NULL));
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, parts[turn](r->group, r->weights, NULL, NULL));
    CHECK_OK(parts[turn](r->group, r->weights, e, NULL));
  }
  CHECK_OK(cumoe_ep_forward(r->group, r->weights, e, NULL));
  CHECK_OK(cumoe_ep_dispatch(r->group, r->weights, e, NULL));
}

/* Operands in the arena, which other ranks write at any time. */
#define IN_ARENA(field, view)                                                                                          \
  static void place_##field(const world *w, char *at, cumoe_moe_args *a, cumoe_ep_args *e)                             \
  {                                                                                                                    \
    (void)w, (void)a, (void)e;                                                                                         \
    view;                                                                                                              \
  }
IN_ARENA(x, a->x.data = at)
IN_ARENA(router_x, a->router_x = cumoe_matrix(at, (cumoe_dtype)w->dtype, a->x.rows, w->hidden, w->hidden))
IN_ARENA(router_weight, a->router_weight.data = at)
IN_ARENA(router_bias, a->router_bias = cumoe_vector(at, CUMOE_F32, w->experts))
IN_ARENA(logits, a->router_weight = no_view();
         a->logits = cumoe_matrix(at, CUMOE_F32, a->x.rows, w->experts, w->experts))
IN_ARENA(ids, a->ids = cumoe_matrix(at, CUMOE_I32, a->x.rows, w->top_k, w->top_k))
IN_ARENA(weights, a->router_weight = no_view(); a->ids = rows_of(&w->ids, 0, a->x.rows);
         a->weights = cumoe_matrix(at, CUMOE_F32, a->x.rows, w->top_k, w->top_k))
IN_ARENA(select_bias, a->select_bias = cumoe_vector(at, CUMOE_F32, w->experts))
IN_ARENA(expert_scale, a->expert_scale = cumoe_vector(at, CUMOE_F32, w->experts))
IN_ARENA(residual, a->residual = cumoe_vector(at, (cumoe_dtype)w->dtype, w->hidden))
IN_ARENA(device_tokens, a->device_tokens = cumoe_vector(at, CUMOE_I32, 1))
IN_ARENA(out, a->out.data = at)
IN_ARENA(ids_out, a->ids_out = cumoe_matrix_mut(at, CUMOE_I32, a->x.rows, w->top_k, w->top_k))
IN_ARENA(weights_out, a->weights_out = cumoe_matrix_mut(at, CUMOE_F32, a->x.rows, w->top_k, w->top_k))
IN_ARENA(counts_out, a->counts_out = cumoe_vector_mut(at, CUMOE_I32, w->experts))
IN_ARENA(load, a->load = cumoe_vector_mut(at, CUMOE_I64, w->experts))
IN_ARENA(workspace, a->workspace.data = at)
IN_ARENA(placement, e->placement.data = at)

#define PLACED(field)                                                                                                  \
  {                                                                                                                    \
    place_##field, #field                                                                                              \
  }
static const struct {
  void (*place)(const world *w, char *at, cumoe_moe_args *a, cumoe_ep_args *e);
  const char *name;
} misplaced[] = {PLACED(x),    PLACED(router_x),  PLACED(router_weight), PLACED(router_bias),   PLACED(logits),
                 PLACED(ids),  PLACED(weights),   PLACED(select_bias),   PLACED(expert_scale),  PLACED(residual),
                 PLACED(out),  PLACED(ids_out),   PLACED(weights_out),   PLACED(device_tokens), PLACED(counts_out),
                 PLACED(load), PLACED(workspace), PLACED(placement)};

/* And weights: down's of all experts. */
static void bad_weights(const rank *r, const cumoe_ep_args *e)
{
  int32_t held[MOST_EXPERTS];
  cumoe_weights inside = NULL;
  world w = *r->w;
  for (int32_t i = 0; i < w.experts; i++) held[i] = i;
  w.experts_of[1].data.data = (unsigned char *)r->arena + 1024;
  CHECK_OK(bind(&w, r->context, held, w.experts, &inside));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_ep_forward(r->group, inside, e, NULL));
  CHECK_TEXT("the group's arena overlaps weights: down");
  CHECK_OK(cumoe_weights_destroy(inside));
  cumoe_moe_args a = *e->layer;
  cumoe_ep_args with = *e;
  w.shared_of[1].data.data = (unsigned char *)r->arena + 1024;
  CHECK_OK(bind_shared(&w, r->context, &inside));
  a.shared = inside, with.layer = &a;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_ep_forward(r->group, r->weights, &with, NULL));
  CHECK_TEXT("the group's arena overlaps args.shared: down");
  CHECK_OK(cumoe_weights_destroy(inside));
}

static void bad_forward(rank *r)
{
  const world *w = r->w;
  size_t bytes = 0;
  CHECK_OK(cumoe_ep_workspace(r->group, &bytes));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_ep_workspace(r->group, NULL));
  void *workspace = aligned(bytes);
  const tensor map = tensor_new(CUMOE_I32, 1, w->experts), wide = tensor_new(CUMOE_I32, w->experts, 65);
  cumoe_moe_args right = tokens_args(w, 0, w->tokens[0], r->shared);
  right.out = as_mut(rows_of(r->out, 0, w->tokens[0]));
  right.workspace = cumoe_vector_mut(workspace, CUMOE_U8, (int64_t)bytes);
  cumoe_moe_args a = right;
  cumoe_ep_args e = {.size = sizeof e, .placement = rows_of(&w->placement, 0, w->experts), .layer = &a};
  const cumoe_ep_args right_e = e;
#define REFUSED(status, words, ...)                                                                                    \
  a = right, e = right_e;                                                                                              \
  __VA_ARGS__;                                                                                                         \
  CHECK_STATUS(CUMOE_ERR_##status, cumoe_ep_forward(r->group, r->weights, &e, NULL));                                  \
  CHECK_TEXT(words)
  REFUSED(INVALID_ARGUMENT, "args.size is 4", e.size = 4);
  REFUSED(INVALID_ARGUMENT, "args.layer is null", e.layer = NULL);
  REFUSED(INVALID_ARGUMENT, "args.lane is 1, must be 0 .. lanes - 1 = 0", e.lane = 1);
  REFUSED(INVALID_ARGUMENT, "args.tokens_max is -1", e.tokens_max = -1);
  REFUSED(INVALID_ARGUMENT, "args.x.rows is 5, must be at most args.tokens_max = 4", e.tokens_max = 4);
  REFUSED(INVALID_ARGUMENT, "args.placement", e.placement = no_view());
  REFUSED(INVALID_ARGUMENT, "args.placement", e.placement.rows--);
  REFUSED(INVALID_ARGUMENT, "args.placement.cols is 65, must be 1 .. 64", e.placement = rows_of(&wide, 0, w->experts));
  REFUSED(INVALID_ARGUMENT, "args.placement.cols is 0, must be 1 .. 64", e.placement.cols = 0);
  REFUSED(WRONG_DTYPE, "args.placement", e.placement.dtype = CUMOE_F32);
  REFUSED(INVALID_ARGUMENT, "args.expert_map", a.expert_map = rows_of(&map, 0, 1));
  REFUSED(INVALID_ARGUMENT, "args.device_tokens", a.device_tokens = rows_of(&map, 0, 1));
  REFUSED(WORKSPACE, "args.workspace has", a.workspace.cols--);
  REFUSED(WORKSPACE, "args.workspace is absent", a.workspace = no_view_mut());
  REFUSED(INVALID_ARGUMENT, "args.x.cols is 31", a.x.cols--);
  REFUSED(INVALID_ARGUMENT, "args.round is 1, must be 0: this call makes all", e.tokens_max = 6, e.round = 1);
  REFUSED(INVALID_ARGUMENT, "args.reserved is 1, must be 0", e.reserved = 1);
  for (size_t i = 0; i < sizeof misplaced / sizeof *misplaced; i++) {
    a = right, e = right_e;
    misplaced[i].place(w, (char *)r->arena + 1024, &a, &e);
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_ep_forward(r->group, r->weights, &e, NULL));
    CHECK_TEXT("the group's arena overlaps args.");
    CHECK_TEXT(misplaced[i].name);
  }
  REFUSED(INVALID_ARGUMENT, "args.out overlaps args.placement", e.placement.data = a.out.data);
  REFUSED(INVALID_ARGUMENT, "args.workspace overlaps args.placement", e.placement.data = a.workspace.data);
  a = right, e = right_e;
  bad_weights(r, &e);
  CHECK_OK(cumoe_ep_forward(r->group, r->weights, &e, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_ep_forward(NULL, r->weights, &e, NULL));
  bad_order(r, &e);
  CHECK_OK(cumoe_group_abort(r->group));
  CHECK_STATUS(CUMOE_ERR_PEER,
               cumoe_ep_experts(r->group, r->weights, &e, NULL)); /* the next one, and nobody to wait for */
  CHECK_STATUS(CUMOE_ERR_PEER, cumoe_ep_combine(r->group, r->weights, &e, NULL));
  CHECK_TEXT("rank 0 has aborted the group");
  free(workspace);
}

/* Of a group of one. */
static void bad_masks(cumoe_group of)
{
  static const struct {
    uint64_t mask;
    const char *words;
  } masks[] = {{0, "leaves out rank 0, which makes the call"},
               {1, "leaves out no rank"},
               {3, "active[0] is 0x3, has a rank past config.ranks = 1"}};
  for (int i = 0; i < 3; i++) {
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_set_active(of, &masks[i].mask));
    CHECK_TEXT(masks[i].words);
  }
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_set_active(of, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_set_active(NULL, &masks[1].mask));
}

static void arguments(void)
{
  world w = {.ranks = 1,
             .experts = 6,
             .top_k = 2,
             .dtype = CUMOE_BF16,
             .capacity = 5,
             .tokens = {5},
             .exact = true,
             .shared = true};
  rank r = {.w = &w, .all = &r};
  size_t bytes = 0;
  void *arenas[1];
  case_begin("of a group of one rank");
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  r.out = &out;
  make_arena(&r);
  for (size_t i = 0; i < sizeof bad_configs / sizeof *bad_configs; i++) {
    r.group = (cumoe_group)(void *)&w;
    CHECK_STATUS(bad_configs[i].status, arena_with(&r, bad_configs[i].change, &r.group));
    CHECK_TEXT(bad_configs[i].words);
    CHECK(r.group == NULL);
  }
  const cumoe_group_config c = config_of(&r, arenas);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_ep_arena(NULL, &c, &bytes));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_ep_arena(r.plan, NULL, &bytes));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_ep_arena(r.plan, &c, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT,
               cumoe_group_create(r.context, r.plan, &c, cumoe_vector_mut(r.arena, CUMOE_U8, 1 << 20), NULL));
  CHECK_STATUS(
      CUMOE_ERR_WORKSPACE,
      cumoe_group_create(r.context, r.plan, &c, cumoe_vector_mut(r.arena, CUMOE_U8, (int64_t)r.bytes - 1), &r.group));
  cumoe_context other = NULL;
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &other));
  CHECK_STATUS(CUMOE_ERR_WRONG_DEVICE,
               cumoe_group_create(other, r.plan, &c, cumoe_vector_mut(r.arena, CUMOE_U8, (int64_t)r.bytes), &r.group));
  CHECK_TEXT("plan belongs to another context");
  CHECK_OK(cumoe_context_destroy(other));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_abort(NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_set_timeout(NULL, 1));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_fault_read(NULL, &r.fault));
  CHECK_OK(join(&r));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_fault_read(r.group, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_set_timeout(r.group, -1));
  CHECK_TEXT("timeout_ns is -1, must be 0 (30 s) or more");
  CHECK_OK(cumoe_group_set_timeout(r.group, 0));
  bad_masks(r.group);
  bad_forward(&r);
  CHECK_OK(cumoe_group_destroy(r.group));
  CHECK_OK(cumoe_group_destroy(NULL));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_group_destroy(r.group));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_group_abort(r.group));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_group_set_timeout(r.group, 1));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_ep_workspace(r.group, &bytes));
  memset(r.arena, 0, r.bytes);
  CHECK_OK(join(&r)); /* ends with its context */
  CHECK_OK(cumoe_context_destroy(r.context));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_ep_workspace(r.group, &bytes));
  CHECK_TEXT("never was a group"); /* and not only its plan has ended */
  free(r.arena);
  case_end();
}

/* The second arena begins where the first has not ended: one array's first bytes lie on another's. */
static void overlap(void)
{
  world w = {.ranks = 2, .experts = 6, .top_k = 2, .dtype = CUMOE_F32, .capacity = 64, .tokens = {1, 1}};
  rank r[2] = {{.w = &w, .all = r, .timeout_ns = 2000000000},
               {.w = &w, .all = r, .number = 1, .timeout_ns = 2000000000}};
  pthread_t threads[2];
  case_begin("arenas that overlap");
#ifdef __SANITIZE_THREAD__
  case_skip("a race, and meant");
  return;
#endif
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  for (int i = 0; i < 2; i++) r[i].out = &out, make_arena(&r[i]);
  const ep_shape s = {
      .ranks = 2, .lanes = 1, .experts = 6, .top_k = 2, .hidden = w.hidden, .element = 4, .capacity = 64};
  const ep_layout at = ep_lay_out(&s);
  char *both = aligned(2 * r[0].bytes);
  for (int i = 0; i < 2; i++) free(r[i].arena);
  r[0].arena = both;
  r[1].arena = both + at.y + 64 * (uint64_t)w.hidden * 4 - at.x; /* y from rank 1 on x from rank 0 */
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, only_join, &r[i]) == 0);
  for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  bool seen = false;
  for (int i = 0; i < 2; i++) {
    CHECK_MSG(r[i].status == CUMOE_ERR_INVALID_ARGUMENT || r[i].status == CUMOE_ERR_PEER, "rank %d: %s", i, r[i].text);
    seen |= strstr(r[i].text, "is not in its arena: they overlap") != NULL;
    CHECK_OK(cumoe_context_destroy(r[i].context));
  }
  CHECK_MSG(seen, "the texts are \"%s\", \"%s\"", r[0].text, r[1].text);
  free(both);
  case_end();
}

/* What a peer says is not trusted: more tokens than there is room for, and ids that name no expert here, of tokens that
 * it has sent and of those behind. */
static void forge(const group *g)
{
  static const int32_t ids[] = {6, INT32_MIN, [6] = 1 << 30, -2, -1, INT32_MAX};
  char *lane = g->arena + g->at.lane, *flag = lane + g->at.in;
  for (int i = 0; i < 10; i++)
    if (ids[i]) memcpy(lane + g->at.ids + 4 * i, &ids[i], sizeof *ids);
  cpu_ep_store(flag, cpu_ep_load(flag) | UINT32_MAX);
}

static void run_forged(bool exact)
{
  world w = {.ranks = 1, .experts = 6, .top_k = 2, .dtype = CUMOE_F32, .capacity = 5, .tokens = {3}, .routed = true};
  meeting together = {0};
  rank r = {.w = &w, .all = &r, .meeting = &together};
  ep_call c;
  group *g;
  int64_t want[6] = {0};
  case_begin("counts and ids of a peer, %s", exact ? "slot by slot" : "sums");
  w.exact = exact;
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden), right = tensor_new(w.dtype, 3, w.hidden);
  r.out = &out;
  make_arena(&r);
  enter(&r);
  CHECK_OK(find_group(r.group, &g));
  CHECK_OK(one_call(&r, 0, 0));
  memcpy(right.data, out.data, 3 * (size_t)w.hidden * sizeof(float));
  fill_call(&r, 0, 0, &c);
  CHECK_OK(cumoe_ep_dispatch(r.group, r.weights, &c.args, NULL));
  forge(g);
  CHECK_OK(cumoe_ep_experts(r.group, r.weights, &c.args, NULL));
  CHECK_OK(cumoe_ep_combine(r.group, r.weights, &c.args, NULL));
  r.found.size = sizeof r.found;
  CHECK_OK(cumoe_fault_read(r.context, NULL, &r.found));
  CHECK(r.found.code == CUMOE_FAULT_EXPERT_ID);
  for (int i = 2; i < 6; i++) want[(int)tensor_get(&w.ids, i / 2, i % 2)]++;
  for (int e = 0; e < 6; e++) CHECK((int64_t)tensor_get(&r.counts, 0, e) == want[e]);
  CHECK(memcmp(right.data + w.hidden * 4, out.data + w.hidden * 4, 2 * (size_t)w.hidden * sizeof(float)) == 0);
  leave(&r);
  CHECK_OK(r.ended);
  CHECK_OK(cumoe_context_destroy(r.context));
  free(r.arena);
  case_end();
}

static void forged(void)
{
  run_forged(true);
  run_forged(false);
}

/* What groups do not serve. */
static void refusals(void)
{
  world w = {.ranks = 1, .experts = 6, .top_k = 2, .dtype = CUMOE_BF16, .capacity = 5, .tokens = {5}};
  const cumoe_group_config c = {.size = sizeof c, .ranks = 33, .max_tokens = 8},
                           one = {sizeof one, .ranks = 1, .max_tokens = 8};
  cumoe_context context = NULL;
  cumoe_plan plain = NULL, unreduced = NULL, identity = NULL, many = NULL;
  size_t bytes = 0;
  case_begin("plans");
  make_world(&w);
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &context));
  CHECK_OK(cumoe_plan_create(context, &w.desc, &plain));
  w.desc.flags = CUMOE_MOE_UNREDUCED;
  CHECK_OK(cumoe_plan_create(context, &w.desc, &unreduced));
  w.desc.flags = 0;
  w.desc.routing.identity_experts = 3;
  CHECK_OK(cumoe_plan_create(context, &w.desc, &identity));
  w.desc.routing.top_k = 7;
  CHECK_OK(cumoe_plan_create(context, &w.desc, &many));
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_ep_arena(plain, &c, &bytes));
  CHECK_TEXT("config.ranks is 33");
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_ep_arena(unreduced, &one, &bytes));
  CHECK_TEXT("UNREDUCED");
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_ep_arena(identity, &one, &bytes));
  CHECK_TEXT("identity_experts of the plan is 3");
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_ep_arena(many, &one, &bytes));
  CHECK_TEXT("top_k of the plan is 7");
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

static const test_group groups[] = {
    GROUP("ranks on GPUs", on_gpus, ON_CUDA),
    GROUP("few tokens on GPUs", few_on_gpus, ON_CUDA),
    ALONE("answers", answers, ONCE),
    ALONE("at random", at_random, ONCE),
    ALONE("trouble", troubles, ONCE),
    ALONE("without a rank", without, ONCE),
    ALONE("masks", masks, ONCE),
    ALONE("an abort at once", aborted_at_once, ONCE),
    ALONE("numbers of ranks", miscount, ONCE),
    ALONE("processes", processes, ONCE),
    ALONE("layouts", layouts, ONCE),
    ALONE("arguments", arguments, ONCE),
    ALONE("overlap", overlap, ONCE),
    ALONE("refusals", refusals, ONCE),
    ALONE("forged", forged, ONCE),
};
#ifndef TEST_STAGED
TEST_MAIN(groups)
#endif
