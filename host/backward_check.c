/* The checks of cumoe_moe_forward_keep and cumoe_moe_backward, before anything happens. */
#include "backward.h"
#include "format.h"
#include "status.h"

cumoe_status check_without_formats(const struct plan *plan)
{
  const cumoe_moe_desc *d = &plan->desc;
  const struct {
    const char *name;
    const cumoe_format *format;
  } formats[] = {{"desc.up_format", &d->up_format},
                 {"desc.down_format", &d->down_format},
                 {"desc.shared_up_format", &d->shared_up_format},
                 {"desc.shared_down_format", &d->shared_down_format}};
  for (size_t i = 0; i < sizeof formats / sizeof *formats; ++i)
    REQUIRE(is_dense(formats[i].format), CUMOE_ERR_NOT_SUPPORTED, "%s is set: weights with a format have no backward",
            formats[i].name);
  return CUMOE_OK;
}

cumoe_status check_keep(const struct plan *plan, const layer_operands *layer, const cumoe_moe_args *a,
                        cumoe_view_mut kept)
{
  kept_layout at;
  TRY(lay_out_kept("args.x.rows", plan, a->x.rows, &at));
  TRY(check_workspace_view(plan->context, "kept", cumoe_const(kept), at.bytes));
  if (at.bytes == 0) return CUMOE_OK;
  const named_view views[] = {
      {"kept", cumoe_const(kept)}, LAYER_OUTPUTS(a), LAYER_INPUTS(a), {"args.residual", a->residual}};
  TRY(check_off_weights(views, 1, "weights", layer->weights));
  if (layer->shared) TRY(check_off_weights(views, 1, "args.shared", layer->shared));
  return check_overlaps(views, 1, sizeof views / sizeof *views);
}

/* ---- backward ---- */

cumoe_status find_gradient(const char *name, cumoe_weights handle, const struct plan *plan, bool shared,
                           const struct weights **found)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int32_t experts = shared ? 1 : d->local_experts, inter = shared ? d->shared_inter : d->inter;
  *found = NULL;
  if (!handle) return CUMOE_OK;
  REQUIRE(inter, CUMOE_ERR_INVALID_ARGUMENT, "%s is given, there is no shared expert", name);
  TRY(find_any_weights(name, handle, found));
  const struct weights *w = *found;
  REQUIRE(w->context == plan->context, CUMOE_ERR_WRONG_DEVICE, "%s belongs to another context than the plan", name);
  REQUIRE(is_dense(&w->up_format) && is_dense(&w->down_format), CUMOE_ERR_NOT_SUPPORTED,
          "%s has a format: gradients have none", name);
  REQUIRE(w->dtype == d->dtype || w->dtype == CUMOE_F32, CUMOE_ERR_WRONG_DTYPE, "%s is %s, must be %s or f32", name,
          cumoe_dtype_name((cumoe_dtype)w->dtype), cumoe_dtype_name((cumoe_dtype)d->dtype));
  REQUIRE(w->experts == experts && w->hidden == d->hidden && w->inter == inter, CUMOE_ERR_INVALID_ARGUMENT,
          "%s has experts %d, hidden %d, inter %d; the plan needs %d, %d, %d", name, (int)w->experts, (int)w->hidden,
          (int)w->inter, (int)experts, (int)d->hidden, (int)inter);
  REQUIRE(w->gated == !(d->flags & CUMOE_MOE_UNGATED), CUMOE_ERR_LAYOUT, "%s is %s, the plan is %s", name,
          w->gated ? "gated" : "ungated", w->gated ? "ungated" : "gated");
  return check_apart(name, w, name, w);
}

/* An output that is there only where something else is. */
typedef struct wanted {
  operand want;
  cumoe_view_mut view;
  const char *missing; /* NULL, or why it must be absent */
} wanted;

static cumoe_status check_wanted(const struct plan *plan, const cumoe_moe_args *a, const cumoe_moe_grads *g)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t tokens = a->x.rows, experts = router_experts(d), k = d->routing.top_k;
  const int64_t router_hidden = absent(&a->router_x) ? d->hidden : a->router_x.cols;
  const uint32_t f32 = DTYPE_BIT(CUMOE_F32), either = f32 | DTYPE_BIT(d->dtype);
  const char *routed = is_routed(a) ? "the caller has routed" : NULL;
  const char *from_x = absent(&a->router_weight) ? "there is no router_weight" : NULL;
  const wanted all[] = {{{"grads.d_x", tokens, d->hidden, either, 16}, g->d_x, NULL},
                        {{"grads.d_pair_weights", tokens, k, f32, 0}, g->d_pair_weights, NULL},
                        {{"grads.d_logits", tokens, experts, f32, 0}, g->d_logits, routed},
                        {{"grads.losses", 1, 2, f32, 0}, g->losses, routed},
                        {{"grads.d_router_weight", experts, router_hidden, either, 0}, g->d_router_weight, from_x},
                        {{"grads.d_router_bias", 1, experts, either, 0}, g->d_router_bias, from_x},
                        {{"grads.d_router_x", tokens, router_hidden, either, 16},
                         g->d_router_x,
                         absent(&a->router_x) ? "there is no router_x" : NULL},
                        {{"grads.d_expert_scale", 1, experts, f32, 0},
                         g->d_expert_scale,
                         absent(&a->expert_scale) ? "there is no expert_scale" : NULL},
                        {{"grads.d_shared_gate", 1, d->hidden, either, 0},
                         g->d_shared_gate,
                         absent(&a->shared_gate) ? "there is no shared_gate" : NULL},
                        {{"grads.d_residual", 1, d->hidden, either, 0},
                         g->d_residual,
                         a->residual.rows == 1 ? NULL : "args.residual has not one row"}};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) {
    const cumoe_view view = cumoe_const(all[i].view);
    if (all[i].missing) TRY(check_absent(all[i].want.name, view, all[i].missing));
    TRY(check_optional(plan->context, &all[i].want, view));
  }
  return CUMOE_OK;
}

static cumoe_status check_grads_overlaps(const cumoe_moe_args *a, const cumoe_moe_grads *g,
                                         const backward_operands *with)
{
  const named_view views[] = {{"grads.d_x", cumoe_const(g->d_x)},
                              {"grads.d_router_x", cumoe_const(g->d_router_x)},
                              {"grads.d_router_weight", cumoe_const(g->d_router_weight)},
                              {"grads.d_router_bias", cumoe_const(g->d_router_bias)},
                              {"grads.d_logits", cumoe_const(g->d_logits)},
                              {"grads.d_pair_weights", cumoe_const(g->d_pair_weights)},
                              {"grads.d_expert_scale", cumoe_const(g->d_expert_scale)},
                              {"grads.d_shared_gate", cumoe_const(g->d_shared_gate)},
                              {"grads.d_residual", cumoe_const(g->d_residual)},
                              {"grads.losses", cumoe_const(g->losses)},
                              {"grads.workspace", cumoe_const(g->workspace)},
                              {"grads.d_out", g->d_out},
                              {"grads.kept", g->kept},
                              LAYER_INPUTS(a)};
  const int outputs = 11, all = sizeof views / sizeof *views;
  const struct {
    const char *name;
    const struct weights *weights;
    bool written;
  } bound[] = {{"grads.d_weights", with->d_weights, true},
               {"grads.d_shared", with->d_shared, true},
               {"weights", with->layer.weights, false},
               {"args.shared", with->layer.shared, false}};
  for (int i = 0; i < 4; ++i) {
    if (!bound[i].weights) continue;
    TRY(check_off_weights(views, bound[i].written ? all : outputs, bound[i].name, bound[i].weights));
    for (int j = i + 1; j < 4 && bound[i].written; ++j) {
      if (!bound[j].weights) continue;
      REQUIRE(bound[i].weights != bound[j].weights, CUMOE_ERR_INVALID_ARGUMENT, "%s is %s itself", bound[i].name,
              bound[j].name);
      TRY(check_apart(bound[i].name, bound[i].weights, bound[j].name, bound[j].weights));
    }
  }
  return check_overlaps(views, outputs, all);
}

/* The forward's outputs are d_out's shape, or nothing. */
static void forget_outputs(cumoe_moe_args *a, const cumoe_moe_grads *g)
{
  const cumoe_view_mut nothing = {0};
  const cumoe_view o = g->d_out;
  a->out = (cumoe_view_mut){(void *)(uintptr_t)o.data, o.rows, o.cols, o.ld, o.owner, o.device, o.dtype};
  a->ids_out = a->weights_out = a->counts_out = a->load = a->workspace = nothing;
}

static cumoe_status check_flags(const cumoe_moe_args *a, const cumoe_moe_grads *g)
{
  const bool losses = g->balance != 0 || g->z != 0;
  REQUIRE(!(g->flags & ~(uint32_t)CUMOE_BACKWARD_ACCUMULATE), CUMOE_ERR_INVALID_ARGUMENT,
          "grads.flags is 0x%x, known are 0x%x", g->flags, (unsigned)CUMOE_BACKWARD_ACCUMULATE);
  TRY(check_finite("grads.balance", g->balance));
  TRY(check_finite("grads.z", g->z));
  REQUIRE(!losses || !is_routed(a), CUMOE_ERR_INVALID_ARGUMENT,
          "grads.balance is %g, grads.z %g, must be 0: the caller has routed", (double)g->balance, (double)g->z);
  return CUMOE_OK;
}

static cumoe_status check_backward_room(const struct plan *plan, const cumoe_moe_args *a, const cumoe_moe_grads *g)
{
  kept_layout kept;
  scratch_layout scratch;
  const bool has_kept = !absent(&g->kept);
  TRY(lay_out_kept("args.x.rows", plan, a->x.rows, &kept));
  TRY(lay_out_scratch("args.x.rows", plan, a->x.rows, has_kept, &scratch));
  if (has_kept) TRY(check_workspace_view(plan->context, "grads.kept", g->kept, kept.bytes));
  return check_workspace_view(plan->context, "grads.workspace", cumoe_const(g->workspace), scratch.bytes);
}

cumoe_status check_backward(cumoe_plan handle, cumoe_weights weights, cumoe_moe_args *a, const cumoe_moe_grads *g,
                            backward_operands *with)
{
  const struct plan *plan;
  TRY(find_plan(handle, &plan));
  const cumoe_moe_desc *d = &plan->desc;
  TRY(check_tokens("args.x.rows", a->x.rows, 0, d->routing.top_k));
  const bool unreduced = d->flags & CUMOE_MOE_UNREDUCED;
  const operand x = {"args.x", a->x.rows, d->hidden, DTYPE_BIT(d->dtype), 16};
  TRY(check_counted(plan->context, &x, a->x));
  const operand d_out = {"grads.d_out", unreduced ? a->x.rows * d->routing.top_k : a->x.rows, d->hidden,
                         DTYPE_BIT(d->out_dtype), 16};
  TRY(check_operand(plan->context, &d_out, g->d_out));
  forget_outputs(a, g);
  TRY(check_layer_operands(plan, weights, a, &with->layer));
  TRY(check_without_formats(plan));
  TRY(check_flags(a, g));
  TRY(find_gradient("grads.d_weights", g->d_weights, plan, false, &with->d_weights));
  TRY(find_gradient("grads.d_shared", g->d_shared, plan, true, &with->d_shared));
  TRY(check_wanted(plan, a, g));
  TRY(check_backward_room(plan, a, g));
  return check_grads_overlaps(a, g, with);
}
