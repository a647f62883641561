/* The backward of the layer: what the forward keeps, and a straight line from d out to every gradient. */
#include "backward.h"
#include "arguments.h"
#include "carve.h"
#include "dispatch.h"

#include <math.h>

/* ---- where everything lies ---- */

static int64_t halves_of(const cumoe_moe_desc *d)
{
  return d->flags & CUMOE_MOE_UNGATED ? 1 : 2;
}

static cumoe_status check_carved(const char *name, const carver *c, int64_t tokens)
{
  REQUIRE(!c->overflow, CUMOE_ERR_INVALID_ARGUMENT, "%s is %lld: the workspace would exceed 2^62 bytes", name,
          (long long)tokens);
  return CUMOE_OK;
}

cumoe_status lay_out_kept(const char *name, const struct plan *plan, int64_t tokens, kept_layout *at)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t k = d->routing.top_k, pairs = tokens * k, halves = halves_of(d);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)d->dtype);
  carver c = {0, false};
  *at = (kept_layout){0};
  if (tokens == 0) return CUMOE_OK;
  at->logits = carve(&c, tokens, router_experts(d), 4);
  at->ids = carve(&c, pairs, 1, 4);
  at->weights = carve(&c, pairs, 1, 4);
  at->counts = carve(&c, 1, d->local_experts, 4);
  at->offsets = carve(&c, 1, d->local_experts + 1, 4);
  at->row_pair = carve(&c, pairs, 1, 4);
  at->slot_row = carve(&c, pairs, 1, 4);
  at->z = carve(&c, pairs, halves * d->inter, element);
  at->shared_z = carve(&c, tokens, halves * d->shared_inter, element);
  at->shared_logit = carve(&c, d->shared_inter ? tokens : 0, 1, 4);
  at->bytes = c.at;
  return check_carved(name, &c, tokens);
}

/* What reads rows in vectors and through tensor maps has them in their order, so on CUDA x and d out are copied. */
static rows_layout carve_rows(carver *c, const struct plan *plan, int64_t pairs, int64_t experts, int64_t inter)
{
  const cumoe_moe_desc *d = &plan->desc;
  const bool copies = !on_cpu(plan->context);
  const int64_t rows = PADDED_ROWS(pairs, experts);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)d->dtype);
  rows_layout at = {.rows = rows};
  at.d_h = carve(c, rows, inter, copies ? element : 4);
  at.h = carve(c, rows, inter, element);
  at.d_z = carve(c, rows, halves_of(d) * inter, element);
  at.along = carve(c, rows, 1, 8);
  at.d_rows = carve(c, rows, d->hidden, element);
  at.d_out = carve(c, copies ? rows : 0, d->hidden, element);
  return at;
}

/* Runs of tokens that sums over all of them are made of: enough for all SMs. */
static int32_t runs_of(const struct plan *plan, int64_t tokens)
{
  enum { MOST = 8, RUN = 512 };
  return on_cpu(plan->context) ? 1 : (int32_t)min64(ceil_div(tokens, RUN), MOST);
}

/* By the finest chunking, so that more tokens never need less. */
static size_t carve_hist(carver *c, const cumoe_moe_desc *d, int64_t pairs)
{
  const int64_t chunks = pairs > MAP_UNIT ? min64(ceil_div(pairs, MAP_UNIT), MAP_MOST_CHUNKS) : 0;
  return carve(c, chunks, d->local_experts, 4);
}

cumoe_status lay_out_scratch(const char *name, const struct plan *plan, int64_t tokens, bool kept, scratch_layout *at)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t pairs = tokens * d->routing.top_k, experts = router_experts(d);
  const int64_t rows = PADDED_ROWS(pairs, (int64_t)d->local_experts);
  kept_layout keeps;
  carver c = {0, false};
  *at = (scratch_layout){0};
  if (tokens == 0) return CUMOE_OK;
  REQUIRE(rows <= INT32_MAX, CUMOE_ERR_INVALID_ARGUMENT, "%s is %lld: with what fills them up there would be 2^31 rows",
          name, (long long)tokens);
  TRY(lay_out_kept(name, plan, tokens, &keeps));
  at->routed = carve_rows(&c, plan, pairs, d->local_experts, d->inter);
  if (d->shared_inter) at->shared = carve_rows(&c, plan, tokens, 1, d->shared_inter);
  at->d_weights = carve(&c, pairs, 1, 4);
  at->d_logits = carve(&c, tokens, experts, 4);
  at->d_router = carve(&c, tokens, d->hidden, 4);
  at->shared_weight = carve(&c, d->shared_inter ? tokens : 0, 1, 4);
  at->d_shared_weight = carve(&c, d->shared_inter ? tokens : 0, 1, 4);
  at->count = carve(&c, 1, experts, 8);
  at->token_loss = carve(&c, tokens, 2, 8);
  at->pair_scale = carve(&c, pairs, 1, 8);
  at->counts = carve(&c, 1, d->local_experts, 4);
  at->offsets = carve(&c, 1, d->local_experts + 1, 4);
  at->row_pair = carve(&c, rows, 1, 4);
  at->slot_row = carve(&c, pairs, 1, 4);
  const int32_t runs = runs_of(plan, tokens);
  at->runs_counts = carve(&c, 1, runs, 4);
  at->runs_offsets = carve(&c, 1, runs + 1, 4);
  at->runs_sums = carve(&c, runs > 1 ? runs : 0, experts * d->hidden, 4);
  if (!kept) at->hist = carve_hist(&c, d, pairs);
  at->kept = carve(&c, 1, kept ? 0 : (int64_t)keeps.bytes, 1);
  at->bytes = c.at;
  return check_carved(name, &c, tokens);
}

static cumoe_status begin_query(cumoe_plan handle, int64_t tokens, const size_t *bytes, const struct plan **plan)
{
  TRY(find_plan(handle, plan));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  TRY(check_without_formats(*plan));
  return check_tokens("tokens", tokens, 0, (*plan)->desc.routing.top_k);
}

cumoe_status cumoe_moe_kept(cumoe_plan handle, int64_t tokens, size_t *bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  kept_layout at;
  TRY(begin_query(handle, tokens, bytes, &plan));
  TRY(lay_out_kept("tokens", plan, tokens, &at));
  *bytes = at.bytes;
  return CUMOE_OK;
}

cumoe_status cumoe_moe_backward_workspace(cumoe_plan handle, int64_t tokens, int32_t kept, size_t *bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  scratch_layout at;
  TRY(begin_query(handle, tokens, bytes, &plan));
  TRY(lay_out_scratch("tokens", plan, tokens, kept != 0, &at));
  *bytes = at.bytes;
  return CUMOE_OK;
}

/* ---- a call under way ---- */

typedef struct pass {
  struct context *context;
  const struct plan *plan;
  const struct weights *weights, *shared; /* shared: NULL without */
  const cumoe_moe_args *args;
  token_count tokens;
  kept_layout at;
  char *kept;
  void *hist, *rows;            /* of the map; room for x in the order of rows, where it is copied */
  cumoe_view ids, pair_weights; /* of the routing, wherever they come from */
  route_pointers route;
  cumoe_stream stream;
} pass;

static void *region(char *base, size_t offset)
{
  return base + offset;
}

static cumoe_view small_region(char *base, size_t offset, cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  return cumoe_matrix(region(base, offset), dtype, rows, cols, cols);
}

static pass pass_of(const layer_operands *with, const cumoe_moe_args *a, char *kept, cumoe_stream stream)
{
  pass p = {.context = with->plan->context,
            .plan = with->plan,
            .weights = with->weights,
            .shared = with->shared,
            .args = a,
            .tokens = {a->x.rows, a->device_tokens.data},
            .kept = kept,
            .stream = stream};
  const int64_t tokens = a->x.rows, k = p.plan->desc.routing.top_k;
  CUMOE_IGNORE(lay_out_kept("", p.plan, tokens, &p.at)); /* its size was checked */
  p.ids = a->ids.data ? a->ids : small_region(kept, p.at.ids, CUMOE_I32, tokens, k);
  p.pair_weights = is_routed(a) ? a->weights : small_region(kept, p.at.weights, CUMOE_F32, tokens, k);
  p.route = (route_pointers){region(kept, p.at.counts), region(kept, p.at.offsets), region(kept, p.at.row_pair),
                             region(kept, p.at.slot_row)};
  return p;
}

static cumoe_view router_input(const cumoe_moe_args *a)
{
  return a->router_x.data ? a->router_x : a->x;
}

static cumoe_view logits_of(const pass *p)
{
  const int64_t experts = router_experts(&p->plan->desc);
  if (!p->args->router_weight.data) return p->args->logits;
  return small_region(p->kept, p->at.logits, CUMOE_F32, p->tokens.count, experts);
}

static bool weighs_input(const pass *p)
{
  return p->plan->desc.routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
}

static bool is_unreduced(const pass *p)
{
  return p->plan->desc.flags & CUMOE_MOE_UNREDUCED;
}

/* ---- what the forward keeps ---- */

static cumoe_status run_router(const pass *p, cumoe_view x, cumoe_view weight, cumoe_view bias, size_t to,
                               const cumoe_routing *r)
{
  router_args l = router_arguments(x, weight, bias, p->tokens, region(p->kept, to), weight.rows);
  if (r && r->logits_dtype) l.round_dtype = r->logits_dtype;
  if (r && r->logit_scale > 0) l.scale = r->logit_scale;
  return dispatch(p->context, OP_router, &l, p->stream);
}

static gate_args gate_of(const pass *p, cumoe_view ids, cumoe_view weights)
{
  const cumoe_moe_args *a = p->args;
  const gate_inputs inputs = {a->select_bias, a->expert_scale, is_chosen(a) ? a->ids : (cumoe_view){0}};
  gate_args g = gate_arguments(p->context, &p->plan->desc.routing, logits_of(p), &inputs, ids, weights);
  g.tokens = p->tokens;
  return g;
}

static cumoe_status keep_routing(const pass *p, int32_t *counts_out, int64_t *load)
{
  const cumoe_moe_args *a = p->args;
  const cumoe_routing *r = &p->plan->desc.routing;
  const cumoe_view none = {0};
  if (a->router_weight.data) TRY(run_router(p, router_input(a), a->router_weight, a->router_bias, p->at.logits, r));
  if (a->shared_gate.data) TRY(run_router(p, a->x, a->shared_gate, none, p->at.shared_logit, NULL));
  if (!is_routed(a)) {
    const gate_args g = gate_of(p, p->ids, p->pair_weights);
    TRY(dispatch(p->context, OP_gate, &g, p->stream));
  }
  map_args m = map_arguments(p->plan, p->ids, a->expert_map, p->route, p->hist);
  m.tokens = p->tokens;
  m.counts_out = counts_out;
  m.load = load;
  if (m.chunks > 1 && !on_cpu(p->context)) TRY(dispatch(p->context, OP_map_count, &m, p->stream));
  return dispatch(p->context, OP_map, &m, p->stream);
}

/* Half h of a projection by itself. */
static expert_matrix half_of(const expert_matrix *b, int64_t h)
{
  expert_matrix half = *b;
  half.base[0] = b->base[h];
  half.table[0] = b->table[h];
  half.bias[0] = b->bias[h];
  return half;
}

static row_map route_rows(const pass *p)
{
  const int32_t k = p->plan->desc.routing.top_k;
  return (row_map){.counts = p->route.counts,
                   .offsets = p->route.offsets,
                   .row_pair = p->route.row_pair,
                   .slot_row = p->route.slot_row,
                   .tokens = p->tokens,
                   .rows_cap = p->tokens.count * k,
                   .experts = p->weights->experts,
                   .top_k = k,
                   .fault = p->context->fault};
}

/* Of many rows a copy in their order costs less than that every tile of channels gathers them. */
static bool copies_x(const pass *p)
{
  enum { MANY = 4096 };
  return !on_cpu(p->context) && p->plan->desc.dtype != CUMOE_F32 &&
         p->tokens.count * p->plan->desc.routing.top_k >= MANY;
}

/* Gate and up before the activation, of routed experts or (route NULL) the shared one: by one product where they are
 * one matrix. */
static cumoe_status keep_rows(const pass *p, const struct weights *w, const route_pointers *route, size_t to)
{
  const cumoe_moe_desc *d = &p->plan->desc;
  const cumoe_view none = {0}, weights = route && weighs_input(p) ? p->pair_weights : none;
  const int64_t halves = halves_of(d), element = (int64_t)cumoe_dtype_bytes((cumoe_dtype)d->dtype);
  gemm_args g = up_arguments(p->plan, w, p->args->x, route, weights);
  int32_t order;
  g.tokens = p->tokens;
  g.act = ACT_IDENTITY;
  g.gated = 0;
  g.c = region(p->kept, to);
  g.c_ld = halves * w->inter;
  if (route && copies_x(p)) {
    const copy_rows_args c = {.map = route_rows(p),
                              .a = {p->args->x.data, p->args->x.ld, d->dtype, OF_TOKEN},
                              .to = p->rows,
                              .to_ld = d->hidden,
                              .cols = d->hidden,
                              .dtype = d->dtype};
    g.a = p->rows;
    g.a_ld = d->hidden;
    g.packed = 1;
    TRY(dispatch(p->context, OP_copy_rows, &c, p->stream));
  }
  if (join_halves(w, &g.b, &order)) {
    g.n *= 2;
    return dispatch(p->context, OP_up, &g, p->stream);
  }
  for (int64_t h = 0; h < halves; ++h) {
    g.b = half_of(&w->up, h);
    g.c = (char *)region(p->kept, to) + h * w->inter * element;
    TRY(dispatch(p->context, OP_up, &g, p->stream));
  }
  return CUMOE_OK;
}

static cumoe_status keep(const pass *p, int32_t *counts_out, int64_t *load)
{
  TRY(keep_routing(p, counts_out, load));
  TRY(keep_rows(p, p->weights, &p->route, p->at.z));
  return p->shared ? keep_rows(p, p->shared, NULL, p->at.shared_z) : CUMOE_OK;
}

/* ---- kernels ---- */

static row_map token_rows(const pass *p)
{
  return (row_map){
      .tokens = p->tokens, .rows_cap = p->tokens.count, .experts = 1, .top_k = 1, .fault = p->context->fault};
}

static row_matrix matrix_of(cumoe_view v, int32_t of)
{
  return (row_matrix){v.data, v.ld, v.dtype, of};
}

static row_matrix rows_of(const void *base, int64_t cols, int32_t dtype)
{
  return (row_matrix){base, cols, dtype, OF_ROW};
}

/* A matrix of the caller's, as the weights of one expert. */
static expert_matrix one_matrix(cumoe_view v)
{
  return (expert_matrix){.base = {v.data}, .n_stride = v.ld, .k_stride = 1, .format = dense_format(v.dtype)};
}

/* Of gate and up in z and d z: that of the weights, where these are one matrix. */
static int32_t order_of(const struct weights *w)
{
  expert_matrix joined;
  int32_t order;
  return join_halves(w, &joined, &order) ? order : GATE_FIRST;
}

static activation_args activation_of(const pass *p, const struct weights *w, const row_map *map)
{
  const cumoe_moe_desc *d = &p->plan->desc;
  return (activation_args){.map = *map,
                           .inter = w->inter,
                           .dtype = d->dtype,
                           .act = d->act,
                           .gated = w->gated,
                           .order = order_of(w),
                           .act_alpha = d->act_alpha,
                           .act_limit = d->act_limit > 0 ? d->act_limit : INFINITY,
                           .gate_limit = p->plan->gate_limit};
}

/* ---- forward, which keeps ---- */

typedef struct experts_out {
  void *h, *y;
} experts_out;

static cumoe_status run_experts(const pass *p, const struct weights *w, const route_pointers *route, void *z,
                                experts_out to)
{
  const row_map map = route ? route_rows(p) : token_rows(p); /* the combine drops */
  activation_args act = activation_of(p, w, &map);
  act.z = z;
  act.h = to.h;
  TRY(dispatch(p->context, OP_activation, &act, p->stream));
  const cumoe_view h = cumoe_matrix(to.h, (cumoe_dtype)act.dtype, map.rows_cap, w->inter, w->inter);
  gemm_args down = down_arguments(p->plan, w, h, route, p->tokens.count);
  down.tokens = p->tokens;
  down.c = to.y;
  down.c_ld = w->hidden;
  return dispatch(p->context, OP_down, &down, p->stream);
}

static cumoe_status combine(const pass *p, char *workspace, const workspace_layout *at)
{
  const cumoe_moe_args *a = p->args;
  const cumoe_moe_desc *d = &p->plan->desc;
  const cumoe_dtype dtype = (cumoe_dtype)d->dtype;
  const int64_t tokens = p->tokens.count;
  cumoe_combine_args c = {
      .out_scale = a->out_scale, .x = a->x, .residual = a->residual, .device_tokens = a->device_tokens, .out = a->out};
  c.y = small_region(workspace, at->y, dtype, tokens * d->routing.top_k, d->hidden);
  if (!is_unreduced(p) || weighs_input(p)) c.pair_weights = p->pair_weights;
  if (p->shared) c.shared = small_region(workspace, at->shared_y, dtype, tokens, d->hidden);
  if (a->shared_gate.data) c.shared_logit = small_region(p->kept, p->at.shared_logit, CUMOE_F32, tokens, 1);
  const combine_args args = combine_arguments(p->plan, p->route.slot_row, &c, tokens);
  return dispatch(p->context, OP_combine, &args, p->stream);
}

/* The gate once more, to where the caller wants what it says; the other output goes where it is already. */
static cumoe_status give_routing(const pass *p)
{
  const cumoe_moe_args *a = p->args;
  if (!a->ids_out.data && !a->weights_out.data) return CUMOE_OK;
  const gate_args g = gate_of(p, a->ids_out.data ? cumoe_const(a->ids_out) : p->ids,
                              a->weights_out.data ? cumoe_const(a->weights_out) : p->pair_weights);
  return dispatch(p->context, OP_gate, &g, p->stream);
}

static cumoe_status run_forward(pass *p)
{
  const cumoe_moe_args *a = p->args;
  char *workspace = a->workspace.data;
  workspace_layout at;
  TRY(check_layout("args.x.rows", p->plan, p->tokens.count, &at));
  p->hist = region(workspace, at.hist);
  p->rows = region(workspace, at.y); /* nothing is there until down */
  const experts_out routed = {region(workspace, at.h), region(workspace, at.y)},
                    shared = {region(workspace, at.shared_h), region(workspace, at.shared_y)};
  TRY(keep(p, a->counts_out.data, a->load.data));
  TRY(give_routing(p));
  TRY(run_experts(p, p->weights, &p->route, region(p->kept, p->at.z), routed));
  if (p->shared) TRY(run_experts(p, p->shared, NULL, region(p->kept, p->at.shared_z), shared));
  return combine(p, workspace, &at);
}

cumoe_status cumoe_moe_forward_keep(cumoe_plan handle, cumoe_weights weights, const cumoe_moe_args *args,
                                    cumoe_view_mut kept, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  cumoe_moe_args a;
  layer_operands with;
  TRY(take_struct("args", args, &a));
  TRY(find_plan(handle, &plan));
  TRY(check_layer_operands(plan, weights, &a, &with));
  TRY(check_without_formats(plan));
  TRY(check_layer_workspace(plan, &a));
  TRY(check_layer_overlaps(&a, &with));
  TRY(check_keep(plan, &with, &a, kept));
  if (a.x.rows == 0) return CUMOE_OK;
  pass p = pass_of(&with, &a, kept.data, stream);
  ON_DEVICE(p.context, run_forward(&p));
}

/* ---- backward ---- */

typedef struct backward {
  pass p;
  const cumoe_moe_grads *grads;
  const struct weights *d_weights, *d_shared;
  scratch_layout at;
  char *scratch;
  float scale; /* of d out */
} backward;

/* One weights object: the routed experts, or the shared one. */
typedef struct expert_rows {
  const struct weights *w, *d;
  row_map map;
  row_matrix d_out, x;
  const void *z;
  const int32_t *z_row; /* of pairs; NULL: z is in the order of the map */
  rows_layout at;
  float *d_pairs;
  int64_t d_pairs_ld;
  bool weighs_h, weighs_x; /* where the pair's weight comes in */
  bool sigmoid;            /* it is one of a logit, whose gradient d_pairs is */
} expert_rows;

static bool accumulates(const backward *b)
{
  return b->grads->flags & CUMOE_BACKWARD_ACCUMULATE;
}

/* The route's rows, padded. */
static row_map padded_rows(const backward *b)
{
  const pass *p = &b->p;
  const bool drops = !is_unreduced(p) || weighs_input(p); /* pairs of weight 0 */
  row_map map = route_rows(p);
  map.counts = region(b->scratch, b->at.counts);
  map.offsets = region(b->scratch, b->at.offsets);
  map.row_pair = region(b->scratch, b->at.row_pair);
  map.slot_row = region(b->scratch, b->at.slot_row);
  map.rows_cap = b->at.routed.rows;
  map.pair_weights = drops ? p->pair_weights.data : NULL;
  map.pair_weights_ld = p->pair_weights.ld;
  return map;
}

static cumoe_status pad(const backward *b)
{
  const pad_args a = {.map = route_rows(&b->p),
                      .counts = region(b->scratch, b->at.counts),
                      .offsets = region(b->scratch, b->at.offsets),
                      .row_pair = region(b->scratch, b->at.row_pair),
                      .slot_row = region(b->scratch, b->at.slot_row),
                      .rows_cap = b->at.routed.rows};
  return dispatch(b->p.context, OP_pad, &a, b->p.stream);
}

/* A matrix of tokens or pairs in the order of rows: on CUDA a copy, on the CPU itself. */
static cumoe_status in_row_order(const backward *b, const expert_rows *e, row_matrix *m, size_t to, bool weighs)
{
  const cumoe_moe_desc *d = &b->p.plan->desc;
  const copy_rows_args c = {.map = e->map,
                            .a = *m,
                            .to = region(b->scratch, to),
                            .to_ld = d->hidden,
                            .cols = d->hidden,
                            .dtype = d->dtype,
                            .weighs = weighs};
  if (on_cpu(b->p.context)) return CUMOE_OK;
  *m = rows_of(c.to, c.to_ld, c.dtype);
  return dispatch(b->p.context, OP_copy_rows, &c, b->p.stream);
}

static cumoe_status backward_activation(const backward *b, const expert_rows *e, const row_matrix *d_out)
{
  const bool cpu = on_cpu(b->p.context);
  activation_args act = activation_of(&b->p, e->w, &e->map);
  const rows_product_args d_h = {.map = e->map,
                                 .a = *d_out,
                                 .b = transposed(e->w->down),
                                 .c = region(b->scratch, e->at.d_h),
                                 .c_ld = e->w->inter,
                                 .c_dtype = cpu ? DT_F32 : act.dtype,
                                 .halves = 1,
                                 .n = e->w->inter,
                                 .k = e->w->hidden,
                                 .scale = 1};
  act.z = e->z;
  act.z_row = e->z_row;
  act.d_h = d_h.c;
  act.d_h_dtype = d_h.c_dtype;
  act.h = region(b->scratch, e->at.h);
  act.d_z = region(b->scratch, e->at.d_z);
  act.along = region(b->scratch, e->at.along);
  act.weighs = e->weighs_h;
  act.weighs_h = e->weighs_h && !cpu;
  act.scale = b->scale;
  TRY(multiply_rows(b->p.context, &d_h, b->p.stream));
  return dispatch(b->p.context, OP_activation, &act, b->p.stream);
}

/* d z as the gradients of gate and up read it: as one matrix, where these are one and in its order. */
static void split_halves(weight_gradient_args *g, const struct weights *w, const struct weights *d)
{
  expert_matrix joined;
  int32_t order;
  const int32_t own = order_of(w), inter = w->inter;
  if (join_halves(d, &joined, &order) && order == own) {
    g->d = joined;
    g->n = 2 * inter;
    g->halves = 1;
    return;
  }
  g->a_n = own >= GATE_UP_PAIRS ? 2 : 1;
  g->a_half[own % 2 ? 0 : 1] = own >= GATE_UP_PAIRS ? 1 : inter;
}

static cumoe_status backward_weights(const backward *b, const expert_rows *e, const row_matrix *d_out)
{
  const int32_t halves = e->w->gated ? 2 : 1, dtype = b->p.plan->desc.dtype;
  const bool cpu = on_cpu(b->p.context);
  row_matrix x = e->x;
  weight_gradient_args up = {.map = e->map,
                             .a = rows_of(region(b->scratch, e->at.d_z), (int64_t)halves * e->w->inter, dtype),
                             .d = e->d->up,
                             .d_dtype = e->d->dtype,
                             .a_n = 1,
                             .halves = halves,
                             .n = e->w->inter,
                             .k = e->w->hidden,
                             .weighs = e->weighs_x && cpu ? WEIGHS_B : WEIGHS_NONE,
                             .accumulates = accumulates(b),
                             .padded = !cpu,
                             .scale = 1};
  weight_gradient_args down = {.map = e->map,
                               .a = *d_out,
                               .b = rows_of(region(b->scratch, e->at.h), e->w->inter, dtype),
                               .d = e->d->down,
                               .d_dtype = e->d->dtype,
                               .a_n = 1,
                               .halves = 1,
                               .n = e->w->hidden,
                               .k = e->w->inter,
                               .weighs = e->weighs_h && cpu ? WEIGHS_A : WEIGHS_NONE,
                               .accumulates = accumulates(b),
                               .padded = !cpu,
                               .scale = b->scale};
  weight_gradient_args bias = down; /* of d out alone, so its weight is not in h */
  bias.d.base[0] = bias.d.table[0] = NULL;
  bias.weighs = e->weighs_h ? WEIGHS_A : WEIGHS_NONE;
  bias.padded = 0;
  down.d.bias[0] = NULL;
  split_halves(&up, e->w, e->d);
  TRY(in_row_order(b, e, &x, e->at.d_rows, e->weighs_x));
  up.b = x;
  TRY(add_up_rows(b->p.context, &down, b->p.stream));
  TRY(add_up_rows(b->p.context, &bias, b->p.stream));
  return add_up_rows(b->p.context, &up, b->p.stream);
}

static cumoe_status backward_rows(const backward *b, const expert_rows *e)
{
  const int32_t halves = e->w->gated ? 2 : 1, dtype = b->p.plan->desc.dtype;
  expert_matrix joined;
  int32_t order;
  rows_product_args d_rows = {.map = e->map,
                              .a = rows_of(region(b->scratch, e->at.d_z), (int64_t)halves * e->w->inter, dtype),
                              .b = transposed(e->w->up),
                              .c = region(b->scratch, e->at.d_rows),
                              .c_ld = e->w->hidden,
                              .c_dtype = dtype,
                              .halves = halves,
                              .n = e->w->hidden,
                              .k = e->w->inter,
                              .scale = 1};
  const pair_gradient_args pairs = {.map = e->map,
                                    .d_out = e->d_out,
                                    .x = e->x,
                                    .along = region(b->scratch, e->at.along),
                                    .d_rows = d_rows.c,
                                    .down = e->w->down,
                                    .d_weights = e->d_pairs,
                                    .d_weights_ld = e->d_pairs_ld,
                                    .hidden = e->w->hidden,
                                    .dtype = dtype,
                                    .on_input = e->weighs_x,
                                    .unweighed = !e->weighs_h && !e->weighs_x,
                                    .sigmoid = e->sigmoid,
                                    .scale = b->scale};
  if (join_halves(e->w, &joined, &order)) {
    d_rows.b = transposed(joined);
    d_rows.k *= 2;
    d_rows.halves = 1;
  }
  TRY(multiply_rows(b->p.context, &d_rows, b->p.stream));
  return dispatch(b->p.context, OP_pair_gradient, &pairs, b->p.stream);
}

static cumoe_status backward_experts(const backward *b, const expert_rows *e)
{
  row_matrix d_out = e->d_out;
  TRY(in_row_order(b, e, &d_out, e->at.d_out, false));
  TRY(backward_activation(b, e, &d_out));
  if (e->d) TRY(backward_weights(b, e, &d_out));
  return backward_rows(b, e);
}

static cumoe_view d_pairs_of(const backward *b)
{
  const cumoe_view_mut own = b->grads->d_pair_weights;
  const int64_t tokens = b->p.tokens.count, k = b->p.plan->desc.routing.top_k;
  return own.data ? cumoe_const(own) : small_region(b->scratch, b->at.d_weights, CUMOE_F32, tokens, k);
}

static cumoe_status backward_routed(const backward *b)
{
  const pass *p = &b->p;
  const cumoe_view d_pairs = d_pairs_of(b);
  const expert_rows e = {.w = p->weights,
                         .d = b->d_weights,
                         .map = padded_rows(b),
                         .d_out = matrix_of(b->grads->d_out, is_unreduced(p) ? OF_PAIR : OF_TOKEN),
                         .x = matrix_of(p->args->x, OF_TOKEN),
                         .z = region(p->kept, p->at.z),
                         .z_row = p->route.slot_row,
                         .at = b->at.routed,
                         .d_pairs = (float *)(uintptr_t)d_pairs.data,
                         .d_pairs_ld = d_pairs.ld,
                         .weighs_h = !weighs_input(p) && !is_unreduced(p),
                         .weighs_x = weighs_input(p)};
  TRY(pad(b));
  return backward_experts(b, &e);
}

/* Every token is a pair of the only expert; its gate is that pair's weight. */
static cumoe_status backward_shared(const backward *b)
{
  const pass *p = &b->p;
  const bool gated = p->args->shared_gate.data != NULL;
  expert_rows e = {.w = p->shared,
                   .d = b->d_shared,
                   .map = token_rows(p),
                   .d_out = matrix_of(b->grads->d_out, OF_TOKEN),
                   .x = matrix_of(p->args->x, OF_TOKEN),
                   .z = region(p->kept, p->at.shared_z),
                   .at = b->at.shared,
                   .d_pairs = region(b->scratch, b->at.d_shared_weight),
                   .d_pairs_ld = 1,
                   .weighs_h = true,
                   .sigmoid = gated};
  e.map.rows_cap = b->at.shared.rows;
  if (gated) {
    const sigmoid_args s = {region(p->kept, p->at.shared_logit), region(b->scratch, b->at.shared_weight), p->tokens};
    TRY(dispatch(p->context, OP_sigmoid, &s, p->stream));
    e.map.pair_weights = s.y;
    e.map.pair_weights_ld = 1;
  }
  return backward_experts(b, &e);
}

/* ---- gate and router ---- */

static bool wants_router_part(const backward *b)
{
  return b->p.args->router_weight.data && !b->p.args->router_x.data && b->grads->d_x.data;
}

static bool wants_gate(const backward *b)
{
  const cumoe_moe_grads *g = b->grads;
  return !is_routed(b->p.args) &&
         (g->d_logits.data || g->d_router_weight.data || g->d_router_bias.data || g->d_router_x.data ||
          g->d_expert_scale.data || g->losses.data || wants_router_part(b));
}

static cumoe_view d_logits_of(const backward *b)
{
  const cumoe_view_mut own = b->grads->d_logits;
  const int64_t experts = router_experts(&b->p.plan->desc);
  return own.data ? cumoe_const(own) : small_region(b->scratch, b->at.d_logits, CUMOE_F32, b->p.tokens.count, experts);
}

static cumoe_status backward_gate(const backward *b)
{
  const pass *p = &b->p;
  const cumoe_moe_grads *g = b->grads;
  const cumoe_view d_pairs = d_pairs_of(b), d_logits = d_logits_of(b);
  gate_backward_args a = {.g = gate_of(p, p->ids, p->pair_weights),
                          .d_weights = is_unreduced(p) && !weighs_input(p) ? NULL : d_pairs.data,
                          .d_logits = (float *)(uintptr_t)d_logits.data,
                          .d_weights_ld = d_pairs.ld,
                          .d_logits_ld = d_logits.ld,
                          .balance = g->balance,
                          .z = g->z,
                          .count = region(b->scratch, b->at.count),
                          .token_loss = region(b->scratch, b->at.token_loss),
                          .pair_scale = region(b->scratch, b->at.pair_scale),
                          .d_expert_scale = g->d_expert_scale.data,
                          .losses = g->losses.data,
                          .accumulates = accumulates(b)};
  a.g.given = p->ids.data;
  a.g.ids_ld = p->ids.ld;
  a.g.ids_dtype = p->ids.dtype;
  return run_gate_backward(p->context, &a, p->stream);
}

/* The matrix of sums over all tokens, by runs of them. */
static cumoe_status add_runs(const backward *b, const weight_gradient_args *g, cumoe_view_mut d)
{
  const pass *p = &b->p;
  const int32_t runs = runs_of(p->plan, p->tokens.count);
  const cut_args cut = {p->tokens, region(b->scratch, b->at.runs_counts), region(b->scratch, b->at.runs_offsets), runs};
  weight_gradient_args each = *g;
  const add_runs_args sum = {.sums = region(b->scratch, b->at.runs_sums),
                             .d = d.data,
                             .d_ld = d.ld,
                             .rows = g->n,
                             .cols = g->k,
                             .tokens = p->tokens,
                             .runs = runs,
                             .d_dtype = d.dtype,
                             .accumulates = g->accumulates,
                             .scale = g->scale};
  each.map.counts = cut.counts;
  each.map.offsets = cut.offsets;
  each.map.experts = runs;
  each.d = (expert_matrix){
      .base = {sum.sums}, .expert_stride = (int64_t)g->n * g->k, .n_stride = g->k, .k_stride = 1, .format = FORMAT_f32};
  each.d_dtype = DT_F32;
  each.accumulates = 0;
  each.scale = 1;
  TRY(dispatch(p->context, OP_cut, &cut, p->stream));
  TRY(dispatch(p->context, OP_weight_gradient, &each, p->stream));
  return dispatch(p->context, OP_add_runs, &sum, p->stream);
}

/* Sums over all tokens: the outer product of `a` and `with`, and the sum of `a`, scaled. */
static cumoe_status add_tokens(const backward *b, row_matrix a, int64_t n, cumoe_view with, cumoe_view_mut d,
                               cumoe_view_mut d_bias, float scale)
{
  const struct plan *plan = b->p.plan;
  const bool fits = n * with.cols <= (int64_t)router_experts(&plan->desc) * plan->desc.hidden;
  weight_gradient_args g = {.map = token_rows(&b->p),
                            .a = a,
                            .b = matrix_of(with, OF_ROW),
                            .d = one_matrix(cumoe_const(d)),
                            .d_dtype = d.dtype,
                            .a_n = 1,
                            .halves = 1,
                            .n = (int32_t)n,
                            .k = (int32_t)with.cols,
                            .accumulates = accumulates(b),
                            .scale = scale};
  if (d.data && fits && runs_of(plan, b->p.tokens.count) > 1) {
    TRY(add_runs(b, &g, d));
    g.d.base[0] = NULL;
  }
  g.d.bias[0] = d_bias.data;
  g.d.bias_n_stride = 1;
  g.d.bias_dtype = d_bias.dtype;
  return add_up_rows(b->p.context, &g, b->p.stream);
}

static cumoe_status backward_router(const backward *b)
{
  const pass *p = &b->p;
  const cumoe_moe_grads *g = b->grads;
  const cumoe_view x = router_input(p->args), d_logits = d_logits_of(b);
  const float given = p->plan->desc.routing.logit_scale, scale = given > 0 ? given : 1;
  const row_matrix a = matrix_of(d_logits, OF_ROW);
  TRY(add_tokens(b, a, d_logits.cols, x, g->d_router_weight, g->d_router_bias, scale));
  rows_product_args d_x = {.map = token_rows(p),
                           .a = a,
                           .b = transposed(one_matrix(p->args->router_weight)),
                           .c = region(b->scratch, b->at.d_router),
                           .c_ld = x.cols,
                           .c_dtype = DT_F32,
                           .halves = 1,
                           .n = (int32_t)x.cols,
                           .k = (int32_t)d_logits.cols,
                           .scale = scale};
  if (g->d_router_x.data) {
    d_x.c = g->d_router_x.data;
    d_x.c_ld = g->d_router_x.ld;
    d_x.c_dtype = g->d_router_x.dtype;
  }
  return g->d_router_x.data || wants_router_part(b) ? multiply_rows(p->context, &d_x, p->stream) : CUMOE_OK;
}

/* ---- d x ---- */

static cumoe_status gather(const backward *b)
{
  const pass *p = &b->p;
  const cumoe_moe_grads *g = b->grads;
  const cumoe_moe_desc *d = &p->plan->desc;
  gather_args a = {.map = padded_rows(b),
                   .d_out = matrix_of(g->d_out, is_unreduced(p) ? OF_PAIR : OF_TOKEN),
                   .gate = matrix_of(p->args->shared_gate, OF_ROW),
                   .d_rows = region(b->scratch, b->at.routed.d_rows),
                   .weights = is_unreduced(p) ? NULL : p->pair_weights.data,
                   .weights_ld = p->pair_weights.ld,
                   .d_x = g->d_x.data,
                   .d_x_ld = g->d_x.ld,
                   .d_x_dtype = g->d_x.dtype,
                   .hidden = d->hidden,
                   .dtype = d->dtype,
                   .on_input = weighs_input(p),
                   .scale = b->scale};
  if (p->shared) a.d_shared = region(b->scratch, b->at.shared.d_rows);
  if (p->args->shared_gate.data) a.d_gate = region(b->scratch, b->at.d_shared_weight);
  if (wants_router_part(b)) a.d_router = region(b->scratch, b->at.d_router);
  return dispatch(p->context, OP_gather, &a, p->stream);
}

static cumoe_status run_backward(const backward *b)
{
  const pass *p = &b->p;
  const cumoe_moe_grads *g = b->grads;
  const cumoe_view none = {0};
  const cumoe_view_mut nothing = {0};
  if (absent(&g->kept)) TRY(keep(p, NULL, NULL));
  TRY(backward_routed(b));
  if (p->shared) TRY(backward_shared(b));
  if (wants_gate(b)) TRY(backward_gate(b));
  if (wants_gate(b) && p->args->router_weight.data) TRY(backward_router(b));
  if (g->d_shared_gate.data)
    TRY(add_tokens(b, rows_of(region(b->scratch, b->at.d_shared_weight), 1, DT_F32), 1, p->args->x, g->d_shared_gate,
                   nothing, 1));
  if (g->d_residual.data)
    TRY(add_tokens(b, matrix_of(g->d_out, OF_ROW), p->plan->desc.hidden, none, nothing, g->d_residual, 1));
  return g->d_x.data ? gather(b) : CUMOE_OK;
}

cumoe_status cumoe_moe_backward(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args,
                                const cumoe_moe_grads *grads, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  cumoe_moe_args a;
  cumoe_moe_grads g;
  backward_operands with;
  TRY(take_struct("args", args, &a));
  TRY(take_struct("grads", grads, &g));
  TRY(check_backward(plan, weights, &a, &g, &with));
  if (a.x.rows == 0) return CUMOE_OK;
  backward b = {.grads = &g, .d_weights = with.d_weights, .d_shared = with.d_shared, .scratch = g.workspace.data};
  TRY(lay_out_scratch("args.x.rows", with.layer.plan, a.x.rows, !absent(&g.kept), &b.at));
  char *kept = absent(&g.kept) ? region(b.scratch, b.at.kept) : (char *)(uintptr_t)g.kept.data;
  b.p = pass_of(&with.layer, &a, kept, stream);
  b.p.hist = region(b.scratch, b.at.hist);
  b.p.rows = region(b.scratch, b.at.routed.d_rows);
  b.scale = is_unreduced(&b.p) || a.out_scale == 0 ? 1 : a.out_scale;
  ON_DEVICE(b.p.context, run_backward(&b));
}
