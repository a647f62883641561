/* The forward that keeps what the backward needs (cumoe_moe_forward_keep). */
#include "backward_pass.h"
#include "dispatch.h"
#include "route.h"

#include <math.h>

pass pass_of(const layer_operands *with, const cumoe_moe_args *a, char *kept, cumoe_stream stream)
{
  pass p = {.context = with->plan->context,
            .plan = with->plan,
            .weights = with->weights,
            .shared = with->shared,
            .args = a,
            .tokens = tokens_of_layer(a),
            .kept = kept,
            .stream = stream};
  const int64_t tokens = a->x.rows, k = p.plan->desc.routing.top_k;
  CUMOE_IGNORE(lay_out_kept("", p.plan, tokens, &p.at)); /* its size was checked */
  p.ids = a->ids.data ? a->ids : small_region(kept, p.at.ids, CUMOE_I32, tokens, k);
  p.pair_weights = is_routed(a) ? a->weights : small_region(kept, p.at.weights, CUMOE_F32, tokens, k);
  p.route = route_in(kept, &p.at.route);
  return p;
}

/* ---- what is kept ---- */

gate_args gate_of(const pass *p, cumoe_view ids, cumoe_view weights)
{
  return layer_gate(p->plan, p->args, region(p->kept, p->at.logits), ids, weights);
}

static cumoe_status keep_routing(const pass *p)
{
  const cumoe_moe_args *a = p->args;
  const cumoe_view none = {0};
  if (a->router_weight.data) {
    const router_args r = layer_router(p->plan, a, region(p->kept, p->at.logits));
    TRY(dispatch(p->context, OP_router, &r, p->stream));
  }
  if (a->shared_gate.data) {
    const router_args r =
        router_arguments(a->x, a->shared_gate, none, p->tokens, region(p->kept, p->at.shared_logit), 1);
    TRY(dispatch(p->context, OP_router, &r, p->stream));
  }
  if (!is_routed(a)) {
    const gate_args g = gate_of(p, p->ids, p->pair_weights);
    TRY(dispatch(p->context, OP_gate, &g, p->stream));
  }
  map_args m = layer_map(p->plan, a, p->ids, p->route, p->hist);
  m.protocol.progress = p->progress;
  return run_map(p->context, &m, p->stream);
}

/* Gate (h 0) or up (h 1) as a projection of its own. */
static expert_matrix half_of(const expert_matrix *b, int64_t h)
{
  expert_matrix half = *b;
  half.base[0] = b->base[h];
  half.table[0] = b->table[h];
  half.bias[0] = b->bias[h];
  return half;
}

row_map route_rows(const pass *p, route_pointers route)
{
  const int32_t k = p->plan->desc.routing.top_k;
  return (row_map){.counts = route.counts,
                   .offsets = route.offsets,
                   .row_pair = route.row_pair,
                   .slot_row = route.slot_row,
                   .tokens = p->tokens,
                   .rows_cap = p->tokens.count * k,
                   .experts = p->weights->experts,
                   .top_k = k,
                   .fault = p->context->fault};
}

row_map token_rows(const pass *p)
{
  return (row_map){
      .tokens = p->tokens, .rows_cap = p->tokens.count, .experts = 1, .top_k = 1, .fault = p->context->fault};
}

/* Every tile of channels reads all of an expert's rows of x. Where these are many, copying x into the order of rows
 * once costs less than gathering them in every tile. */
static bool copies_x(const pass *p)
{
  enum { MANY = 4096 };
  return !on_cpu(p->context) && p->plan->desc.dtype != CUMOE_F32 &&
         p->tokens.count * p->plan->desc.routing.top_k >= MANY;
}

/* Gate and up before the activation, of the routed experts or (route NULL) of the shared one. One product, where gate
 * and up are one matrix; else two. */
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
    const copy_rows_args c = {.map = route_rows(p, *route),
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

cumoe_status keep_forward(const pass *p)
{
  TRY(keep_routing(p));
  TRY(keep_rows(p, p->weights, &p->route, p->at.z));
  return p->shared ? keep_rows(p, p->shared, NULL, p->at.shared_z) : CUMOE_OK;
}

/* ---- from there on ---- */

int32_t order_of(const struct weights *w)
{
  expert_matrix joined;
  int32_t order;
  return join_halves(w, &joined, &order) ? order : GATE_FIRST;
}

activation_args activation_of(const pass *p, const struct weights *w, const row_map *map)
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

typedef struct experts_out {
  void *h, *y;
} experts_out;

/* Up and down, what they are launched as, and where z lies. */
typedef struct linked_experts {
  mapped_args up, down;
  launch_step up_step, down_step;
} linked_experts;

/* up_keep writes gate and up where they lie one behind the other in z, and has no other activations. */
static bool serves_keep(const gemm_args *up, const struct weights *w)
{
  return up->gated && (up->act == ACT_SILU || up->act == ACT_SWIGLU_OAI) && !up->pair_weights &&
         order_of(w) < GATE_UP_PAIRS;
}

/* Where the forward's up would be wgmma, it is the row that keeps; *keeps. The others have no such row. */
static cumoe_status choose_keep(const pass *p, const struct weights *w, linked_experts *l, bool *keeps)
{
  const gemm_args *up = &l->up.gemm.g;
  *keeps = false;
  if (on_cpu(p->context) || !serves_keep(up, w)) return CUMOE_OK;
  TRY(choose_step(p->context, OP_up, up, NULL, &l->up_step));
  *keeps = variants[l->up_step.row].form == FORM_wgmma;
  if (*keeps) TRY(choose_step(p->context, OP_up_keep, &l->up.gemm, NULL, &l->up_step));
  return CUMOE_OK;
}

/* As in cumoe_moe_forward: a copy of x ahead of the products, and a down that follows up by expert. */
static void link_experts(const pass *p, linked_experts *l)
{
  gemm_args *up = &l->up.gemm.g, *down = &l->down.gemm.g;
  const variant *up_row = &variants[l->up_step.row], *down_row = &variants[l->down_step.row];
  const op_shape shape = {
      .op = OP_up, .format = (weight_format)up->b.format, .rows = up->rows_cap, .experts = up->experts, .n = up->n};
  down->protocol.early_inputs = true;
  up->protocol.progress = down->protocol.progress = p->progress;
  up->protocol.by_expert = down->protocol.by_expert = hands_over(up_row, down_row);
  if (copies_rows(&p->context->machine, up_row, &shape)) up->protocol.x_copy = down->c;
}

/* Down's launch reads nothing of up's that its kernel does not wait for. */
static cumoe_status launch_linked(const pass *p, linked_experts *l)
{
  TRY(encode_maps(p->context, &l->up_step, &l->up));
  TRY(encode_maps(p->context, &l->down_step, &l->down));
  TRY(launch(p->context, &l->up_step, &l->up, p->stream));
  return launch(p->context, &l->down_step, &l->down, p->stream);
}

static cumoe_status activate_kept(const pass *p, const struct weights *w, const row_map *map, void *z, void *h)
{
  activation_args act = activation_of(p, w, map);
  act.z = z;
  act.h = h;
  return dispatch(p->context, OP_activation, &act, p->stream);
}

/* From x to y, and z on the way: in one kernel with up, where that has a row for it, else by two. */
static cumoe_status run_experts(const pass *p, const struct weights *w, const route_pointers *route, size_t z_at,
                                experts_out to)
{
  const row_map map = route ? route_rows(p, *route) : token_rows(p); /* the combine drops */
  const cumoe_dtype dtype = (cumoe_dtype)p->plan->desc.dtype;
  const cumoe_view none = {0}, h = cumoe_matrix(to.h, dtype, map.rows_cap, w->inter, w->inter);
  const int up_first = order_of(w) == UP_FIRST;
  char *z = region(p->kept, z_at);
  linked_experts l = {0};
  bool keeps;
  l.up.gemm.g = up_arguments(p->plan, w, p->args->x, route, route && weighs_input(p) ? p->pair_weights : none);
  l.down.gemm.g = down_arguments(p->plan, w, h, route, p->tokens.count);
  l.up.gemm.g.tokens = l.down.gemm.g.tokens = p->tokens;
  l.up.gemm.g.c = to.h;
  l.up.gemm.g.c_ld = w->inter;
  l.up.gemm.z[up_first] = z;
  l.up.gemm.z[!up_first] = z + w->inter * (int64_t)cumoe_dtype_bytes(dtype);
  l.up.gemm.z_ld = 2 * (int64_t)w->inter;
  l.down.gemm.g.c = to.y;
  l.down.gemm.g.c_ld = w->hidden;
  TRY(choose_keep(p, w, &l, &keeps));
  if (!keeps) {
    TRY(keep_rows(p, w, route, z_at));
    TRY(activate_kept(p, w, &map, z, to.h));
    return dispatch(p->context, OP_down, &l.down.gemm.g, p->stream);
  }
  TRY(choose_step(p->context, OP_down, &l.down.gemm.g, NULL, &l.down_step));
  if (route) link_experts(p, &l);
  return launch_linked(p, &l);
}

static cumoe_status combine(const pass *p, const workspace_layout *at)
{
  const combine_args args =
      layer_combine(p->plan, p->args, at, p->route.slot_row, p->pair_weights, region(p->kept, p->at.shared_logit));
  return dispatch(p->context, OP_combine, &args, p->stream);
}

/* Ids and weights for the caller, by running the gate once more: what is not asked for is written where it lies
 * already. */
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
  p->progress = on_cpu(p->context) ? NULL : region(workspace, at.progress);
  TRY(keep_routing(p));
  TRY(give_routing(p));
  TRY(run_experts(p, p->weights, &p->route, p->at.z, routed));
  if (p->shared) TRY(run_experts(p, p->shared, NULL, p->at.shared_z, shared));
  return combine(p, &at);
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
