/* The stages of the backward, each alone: the gate's, and the grouped products. */
#include "backward.h"
#include "arguments.h"
#include "buffer.h"
#include "carve.h"
#include "dispatch.h"
#include "memory.h"
#include "route.h"

static cumoe_status check_backward_flags(uint32_t flags)
{
  REQUIRE(!(flags & ~(uint32_t)CUMOE_BACKWARD_ACCUMULATE), CUMOE_ERR_INVALID_ARGUMENT,
          "args.flags is 0x%x, known are 0x%x", flags, (unsigned)CUMOE_BACKWARD_ACCUMULATE);
  return CUMOE_OK;
}

/* ---- gate ---- */

typedef struct gate_layout {
  size_t count, token_loss, pair_scale, bytes;
} gate_layout;

static gate_layout lay_out_gate(int64_t tokens, int64_t experts, int64_t top_k)
{
  gate_layout at = {0};
  carver c = {0, false}; /* of 2^31 pairs at most */
  if (tokens == 0) return at;
  at.count = carve(&c, 1, experts, 8);
  at.token_loss = carve(&c, tokens, 2, 8);
  at.pair_scale = carve(&c, tokens, top_k, 8);
  at.bytes = c.at;
  return at;
}

cumoe_status cumoe_gate_backward_workspace(cumoe_context handle, int64_t tokens, int32_t experts, int32_t top_k,
                                           size_t *bytes)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  REQUIRE(experts >= 1 && experts <= CUMOE_MAX_EXPERTS, CUMOE_ERR_INVALID_ARGUMENT, "experts is %d, must be 1 .. %d",
          (int)experts, CUMOE_MAX_EXPERTS);
  REQUIRE(top_k >= 1 && top_k <= CUMOE_MAX_TOP_K, CUMOE_ERR_INVALID_ARGUMENT, "top_k is %d, must be 1 .. %d",
          (int)top_k, CUMOE_MAX_TOP_K);
  TRY(check_tokens("tokens", tokens, 0, top_k));
  *bytes = lay_out_gate(tokens, experts, top_k).bytes;
  return CUMOE_OK;
}

static cumoe_status check_gate_overlaps(const cumoe_gate_backward_args *a)
{
  const named_view views[] = {{"args.d_logits", cumoe_const(a->d_logits)},
                              {"args.d_expert_scale", cumoe_const(a->d_expert_scale)},
                              {"args.losses", cumoe_const(a->losses)},
                              {"args.workspace", cumoe_const(a->workspace)},
                              {"args.logits", a->logits},
                              {"args.ids", a->ids},
                              {"args.expert_scale", a->expert_scale},
                              {"args.d_weights", a->d_weights},
                              {"args.device_tokens", a->device_tokens}};
  return check_overlaps(views, 4, sizeof views / sizeof *views);
}

static cumoe_status check_gate_backward(struct context *context, const cumoe_gate_backward_args *a)
{
  const int64_t tokens = a->logits.rows, experts = a->logits.cols, k = a->routing.top_k;
  const uint32_t f32 = DTYPE_BIT(CUMOE_F32);
  const operand logits = {"args.logits", tokens, experts, FLOAT_BITS, 0}, ids = {"args.ids", tokens, k, INDEX_BITS, 0},
                scale = {"args.expert_scale", 1, experts, f32, 0}, weights = {"args.d_weights", tokens, k, f32, 0},
                d_logits = {"args.d_logits", tokens, experts, f32, 0},
                d_scale = {"args.d_expert_scale", 1, experts, f32, 0}, losses = {"args.losses", 1, 2, f32, 0};
  TRY(check_backward_flags(a->flags));
  TRY(check_finite("args.balance", a->balance));
  TRY(check_finite("args.z", a->z));
  TRY(check_operand(context, &logits, a->logits));
  TRY(check_operand(context, &ids, a->ids));
  TRY(check_optional(context, &scale, a->expert_scale));
  TRY(check_optional(context, &weights, a->d_weights));
  TRY(check_device_tokens(context, "args.device_tokens", a->device_tokens));
  TRY(check_operand(context, &d_logits, cumoe_const(a->d_logits)));
  if (absent(&a->expert_scale))
    TRY(check_absent("args.d_expert_scale", cumoe_const(a->d_expert_scale), "there is no expert_scale"));
  TRY(check_optional(context, &d_scale, cumoe_const(a->d_expert_scale)));
  TRY(check_optional(context, &losses, cumoe_const(a->losses)));
  TRY(check_workspace_view(context, "args.workspace", cumoe_const(a->workspace),
                           lay_out_gate(tokens, experts, k).bytes));
  return check_gate_overlaps(a);
}

cumoe_status clear_gradient(struct context *context, cumoe_view_mut d, cumoe_stream stream)
{
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)d.dtype);
  if (!d.data) return CUMOE_OK;
  return memory_fill(context, d.data, (size_t)d.ld * element, 0, (size_t)d.cols * element, (size_t)d.rows, stream);
}

/* Sums of what d_weights have left of each pair: without them nothing has come from the experts. */
static cumoe_status run_gate_scale(struct context *context, const gate_backward_args *a, cumoe_stream stream)
{
  const size_t bytes = (size_t)(a->g.experts + a->g.always) * sizeof *a->d_expert_scale;
  if (!a->d_expert_scale) return CUMOE_OK;
  if (a->d_weights) return dispatch(context, OP_gate_scale, a, stream);
  return a->accumulates ? CUMOE_OK : memory_fill(context, a->d_expert_scale, bytes, 0, bytes, 1, stream);
}

cumoe_status run_gate_backward(struct context *context, const gate_backward_args *a, cumoe_stream stream)
{
  gate_backward_args rest = *a;
  rest.beside = 0;
  if (a->balance != 0) TRY(dispatch(context, OP_gate_count, &rest, stream));
  TRY(dispatch(context, OP_gate_backward, a->balance != 0 ? &rest : a, stream));
  TRY(run_gate_scale(context, &rest, stream));
  return a->losses ? dispatch(context, OP_gate_loss, &rest, stream) : CUMOE_OK;
}

cumoe_status cumoe_gate_backward(cumoe_context handle, const cumoe_gate_backward_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_gate_backward_args a;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &a));
  TRY(check_owner(context, "args.logits", &a.logits));
  REQUIRE(a.logits.cols >= 1 && a.logits.cols <= CUMOE_MAX_EXPERTS, CUMOE_ERR_INVALID_ARGUMENT,
          "args.logits.cols is %lld, must be 1 .. %d", (long long)a.logits.cols, CUMOE_MAX_EXPERTS);
  TRY(check_routing(&a.routing, (int32_t)a.logits.cols));
  TRY(check_tokens("args.logits.rows", a.logits.rows, 0, a.routing.top_k));
  TRY(check_gate_backward(context, &a));
  if (a.logits.rows == 0) {
    TRY(clear_gradient(context, a.losses, stream));
    return a.flags & CUMOE_BACKWARD_ACCUMULATE ? CUMOE_OK : clear_gradient(context, a.d_expert_scale, stream);
  }
  const gate_layout at = lay_out_gate(a.logits.rows, a.logits.cols, a.routing.top_k);
  const gate_inputs inputs = {.expert_scale = a.expert_scale, .given = a.ids};
  const cumoe_view none = {0};
  char *workspace = a.workspace.data;
  gate_backward_args g = {.g = gate_arguments(context, &a.routing, a.logits, &inputs, none, none),
                          .d_weights = a.d_weights.data,
                          .d_logits = a.d_logits.data,
                          .d_weights_ld = a.d_weights.ld,
                          .d_logits_ld = a.d_logits.ld,
                          .balance = a.balance,
                          .z = a.z,
                          .count = (void *)(workspace + at.count),
                          .token_loss = (void *)(workspace + at.token_loss),
                          .pair_scale = (void *)(workspace + at.pair_scale),
                          .d_expert_scale = a.d_expert_scale.data,
                          .losses = a.losses.data,
                          .accumulates = a.flags & CUMOE_BACKWARD_ACCUMULATE};
  g.g.tokens.device = a.device_tokens.data;
  ON_DEVICE(context, run_gate_backward(context, &g, stream));
}

/* ---- rows times transposed weights ---- */

static int64_t element_of(const expert_matrix *b)
{
  return format_bits((weight_format)b->format) / 8;
}

bool join_halves(const struct weights *w, expert_matrix *joined, int32_t *order)
{
  const bool interleaved = w->gate_order == CUMOE_GATE_UP_INTERLEAVED || w->gate_order == CUMOE_UP_GATE_INTERLEAVED;
  const int first = w->gate_order == CUMOE_UP_GATE_CONCAT || w->gate_order == CUMOE_UP_GATE_INTERLEAVED;
  *joined = w->up;
  *order = GATE_FIRST;
  if (!w->gated || w->gate_order == CUMOE_GATE_UP_SEPARATE) return false;
  *order = first + (interleaved ? GATE_UP_PAIRS : GATE_FIRST);
  joined->base[0] = w->up.base[first];
  joined->table[0] = w->up.table[first];
  joined->bias[0] = w->up.bias[first];
  joined->base[1] = joined->bias[1] = NULL;
  joined->table[1] = NULL;
  joined->n_stride /= interleaved ? 2 : 1;
  joined->bias_n_stride = 1;
  return true;
}

/* The product as the forward's `down`, if it is one: one type, one matrix. Which rows of a it reads is the caller's. */
static bool as_down(const rows_product_args *a, gemm_args *g)
{
  const expert_matrix *b = &a->b;
  const int64_t element = element_of(b);
  const bool same = a->a.dtype == a->c_dtype && dense_format(a->c_dtype) == (weight_format)b->format;
  if (!same || a->scale != 1 || a->halves != 1) return false;
  if (a->n * element % 16 || a->k * element % 16 || !in_vectors(a->a.base, a->a.ld, a->a.dtype)) return false;
  if (!in_vectors(a->c, a->c_ld, a->c_dtype) || !matrix_in_vectors(b, 1, a->map.experts, a->c_dtype)) return false;
  *g = (gemm_args){.a = a->a.base,
                   .c = a->c,
                   .a_ld = a->a.ld,
                   .c_ld = a->c_ld,
                   .b = *b,
                   .counts = a->map.counts,
                   .offsets = a->map.offsets,
                   .tokens = a->map.tokens,
                   .rows_cap = a->map.rows_cap,
                   .experts = a->map.experts,
                   .top_k = a->map.top_k,
                   .n = a->n,
                   .k = a->k,
                   .dtype = a->c_dtype,
                   .act = ACT_IDENTITY,
                   .rows = {.mode = ROWS_AS_THEY_ARE},
                   .fault = a->map.fault};
  g->b.bias[0] = g->b.bias[1] = NULL;
  return true;
}

cumoe_status multiply_rows(struct context *context, const rows_product_args *a, const drawn_work *work,
                           cumoe_stream stream)
{
  mapped_args mapped = {0};
  gemm_args *g = &mapped.gemm.g;
  launch_step s;
  const choice_hint hint = {.rows = a->map.tokens.count * a->map.top_k};
  if (on_cpu(context) || a->a.form != OF_ROW || !as_down(a, g)) return dispatch(context, OP_rows_product, a, stream);
  TRY(choose_step(context, OP_down, g, &hint, &s));
  if (!work || variants[s.row].form != FORM_wgmma) return dispatch_by(context, OP_down, g, &hint, stream);
  g->protocol.progress = work->tickets;
  g->protocol.early_inputs = work->beside;
  return dispatch_by(context, OP_down_drawn, &mapped.gemm, &hint, stream);
}

/* Parts of <d h, h> need room where d h would have been: 4 bytes for ALONG_PART channels, of whole 4 parts. */
enum { LEAST_ACTIVATED = 64 };

/* Whether down_activated makes what `activation` would: the weight of a row that has one multiplies both h and d z. */
static bool activates(const activation_args *act)
{
  const bool weighs = act->map.pair_weights != NULL;
  return act->gated && (act->act == ACT_SILU || act->act == ACT_SWIGLU_OAI) && act->order < GATE_UP_PAIRS &&
         act->weighs == weighs && act->weighs_h == weighs && act->inter >= LEAST_ACTIVATED;
}

/* From d h's arguments. */
static void activate(down_activated_args *d, const activated_work *work)
{
  const activation_args *act = work->act;
  gemm_sm90_args *gemm = &d->gemm;
  const int64_t half = act->inter * (int64_t)cumoe_dtype_bytes((cumoe_dtype)act->dtype);
  const int up_first = act->order == UP_FIRST;
  gemm->g.c = act->h;
  gemm->g.c_ld = act->inter;
  gemm->g.act = act->act;
  gemm->g.act_alpha = act->act_alpha;
  gemm->g.act_limit = act->act_limit;
  gemm->g.gate_limit = act->gate_limit;
  gemm->z[up_first] = (char *)(uintptr_t)act->z;
  gemm->z[!up_first] = (char *)(uintptr_t)act->z + half;
  d->d_z[up_first] = act->d_z;
  d->d_z[!up_first] = (char *)act->d_z + half;
  gemm->z_ld = 2 * (int64_t)act->inter;
  gemm->g.protocol.progress = work->tickets;
  gemm->g.protocol.by_expert = work->counts;
  d->z_offsets = work->z_offsets;
  d->row_weight = work->row_weight;
  d->along = work->parts;
  d->z_rows = work->z_rows;
  d->scale = act->scale;
}

cumoe_status multiply_activated(struct context *context, const rows_product_args *a, const activated_work *work,
                                cumoe_stream stream, bool *served)
{
  mapped_args mapped = {0};
  gemm_args *g = &mapped.gemm.g;
  launch_step s;
  const choice_hint hint = {.rows = a->map.tokens.count * a->map.top_k};
  *served = false;
  if (on_cpu(context) || a->a.form == OF_PAIR || !activates(work->act) || !as_down(a, g)) return CUMOE_OK;
  TRY(choose_step(context, OP_down, g, &hint, &s));
  if (variants[s.row].form != FORM_wgmma) return CUMOE_OK;
  g->row_pair = a->a.form == OF_TOKEN ? work->row_token : NULL;
  activate(&mapped.activated, work);
  *served = true;
  return dispatch_by(context, OP_down_activated, &mapped.activated, &hint, stream);
}

cumoe_status add_up_rows(struct context *context, const weight_gradient_args *a, cumoe_stream stream)
{
  if (a->d.base[0] || a->d.table[0]) TRY(dispatch(context, OP_weight_gradient, a, stream));
  return a->d.bias[0] || a->d.bias[1] ? dispatch(context, OP_bias_gradient, a, stream) : CUMOE_OK;
}

static row_map map_of(const struct plan *plan, const cumoe_route *route, int64_t tokens)
{
  return (row_map){.counts = route->counts.data,
                   .offsets = route->offsets.data,
                   .row_pair = route->row_pair.data,
                   .slot_row = route->slot_row.data,
                   .tokens = tokens_of_route(route, tokens),
                   .rows_cap = tokens * plan->desc.routing.top_k,
                   .experts = plan->desc.local_experts,
                   .top_k = plan->desc.routing.top_k,
                   .fault = plan->context->fault};
}

/* A product of one or two halves: `in` [rows, halves * k] becomes `out` [rows, n]. */
typedef struct stage_product {
  named_view in, out;
  int32_t halves, n, k;
  const expert_matrix *b;
} stage_product;

static cumoe_status multiply_stage(const struct plan *plan, const struct weights *weights, const cumoe_route *route,
                                   const stage_product *s, cumoe_stream stream)
{
  int64_t tokens = 0;
  cumoe_route copy;
  TRY(take_route(&route, &copy));
  TRY(tokens_of(plan, route, &tokens));
  TRY(check_route(plan, route, tokens));
  const operand in = rows_operand(plan, s->in.name, tokens, s->halves * s->k);
  operand out = rows_operand(plan, s->out.name, tokens, s->n);
  out.dtypes |= DTYPE_BIT(CUMOE_F32);
  TRY(check_with_more(plan->context, &in, s->in.view));
  TRY(check_with_more(plan->context, &out, s->out.view));
  const named_view views[] = {s->out, s->in, ROUTE_VIEWS(route), {"route.device_tokens", route->device_tokens}};
  TRY(check_off_weights(views, 1, "weights", weights));
  TRY(check_overlaps(views, 1, sizeof views / sizeof *views));
  TRY(check_without_formats(plan));
  if (tokens == 0) return CUMOE_OK;
  rows_product_args p = {.map = map_of(plan, route, tokens),
                         .a = rows_of_view(s->in.view, OF_ROW),
                         .b = transposed(*s->b),
                         .c = (void *)(uintptr_t)s->out.view.data,
                         .c_ld = s->out.view.ld,
                         .c_dtype = s->out.view.dtype,
                         .halves = s->halves,
                         .n = s->n,
                         .k = s->k,
                         .scale = 1};
  expert_matrix joined;
  int32_t order;
  if (p.halves == 2 && join_halves(weights, &joined, &order) && order == GATE_FIRST) {
    p.b = transposed(joined);
    p.k *= 2;
    p.halves = 1;
  }
  ON_DEVICE(plan->context, multiply_rows(plan->context, &p, NULL, stream));
}

cumoe_status cumoe_down_backward(cumoe_plan plan_handle, cumoe_weights weights_handle, cumoe_view d_y,
                                 const cumoe_route *route, cumoe_view_mut d_h, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  const struct weights *weights;
  TRY(find_plan(plan_handle, &plan));
  TRY(find_weights("weights", weights_handle, plan, false, &weights));
  const stage_product s = {{"d_y", d_y}, {"d_h", cumoe_const(d_h)}, 1, weights->inter, weights->hidden, &weights->down};
  return multiply_stage(plan, weights, route, &s, stream);
}

cumoe_status cumoe_up_backward(cumoe_plan plan_handle, cumoe_weights weights_handle, cumoe_view d_z,
                               const cumoe_route *route, cumoe_view_mut d_rows, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  const struct weights *weights;
  TRY(find_plan(plan_handle, &plan));
  TRY(find_weights("weights", weights_handle, plan, false, &weights));
  const stage_product s = {{"d_z", d_z},           {"d_rows", cumoe_const(d_rows)},
                           weights->gated ? 2 : 1, weights->hidden,
                           weights->inter,         &weights->up};
  return multiply_stage(plan, weights, route, &s, stream);
}

/* ---- rows times rows ---- */

static cumoe_status check_weights_backward(const struct plan *plan, const struct weights *d, const cumoe_route *route,
                                           const cumoe_weights_backward_args *a)
{
  const cumoe_moe_desc *desc = &plan->desc;
  const int64_t tokens = a->x.rows;
  const operand x = {"args.x", tokens, desc->hidden, DTYPE_BIT(desc->dtype), 16},
                weights = {"args.pair_weights", tokens, desc->routing.top_k, DTYPE_BIT(CUMOE_F32), 0};
  const operand d_z = rows_operand(plan, "args.d_z", tokens, (d->gated ? 2 : 1) * desc->inter),
                h = rows_operand(plan, "args.h", tokens, desc->inter),
                d_y = rows_operand(plan, "args.d_y", tokens, desc->hidden);
  TRY(check_backward_flags(a->flags));
  TRY(check_counted(plan->context, &x, a->x));
  TRY(check_route(plan, route, tokens));
  TRY(check_with_more(plan->context, &d_z, a->d_z));
  TRY(check_with_more(plan->context, &h, a->h));
  TRY(check_with_more(plan->context, &d_y, a->d_y));
  TRY(desc->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT
          ? check_operand(plan->context, &weights, a->pair_weights)
          : check_absent("args.pair_weights", a->pair_weights, "the plan does not weigh the input"));
  const named_view views[] = {{"args.x", a->x},
                              {"args.d_z", a->d_z},
                              {"args.h", a->h},
                              {"args.d_y", a->d_y},
                              {"args.pair_weights", a->pair_weights},
                              ROUTE_VIEWS(route),
                              {"route.device_tokens", route->device_tokens}};
  TRY(check_off_weights(views, sizeof views / sizeof *views, "d_weights", d));
  return check_without_formats(plan);
}

static cumoe_status run_weights_backward(const struct plan *plan, const struct weights *d, const cumoe_route *route,
                                         const cumoe_weights_backward_args *a, cumoe_stream stream)
{
  const int32_t halves = d->gated ? 2 : 1;
  weight_gradient_args g = {.map = map_of(plan, route, a->x.rows),
                            .a = rows_of_view(a->d_y, OF_ROW),
                            .b = rows_of_view(a->h, OF_ROW),
                            .d = d->down,
                            .d_dtype = d->dtype,
                            .halves = 1,
                            .n = d->hidden,
                            .k = d->inter,
                            .a_n = 1,
                            .accumulates = a->flags & CUMOE_BACKWARD_ACCUMULATE,
                            .scale = 1};
  g.map.pair_weights = a->pair_weights.data;
  g.map.pair_weights_ld = a->pair_weights.ld;
  TRY(add_up_rows(plan->context, &g, stream));
  g.a = rows_of_view(a->d_z, OF_ROW);
  g.b = rows_of_view(a->x, OF_TOKEN);
  g.d = d->up;
  g.halves = halves;
  g.a_half[1] = d->inter;
  g.n = d->inter;
  g.k = d->hidden;
  g.weighs = a->pair_weights.data ? WEIGHS_B : WEIGHS_NONE;
  return add_up_rows(plan->context, &g, stream);
}

cumoe_status cumoe_weights_backward(cumoe_plan plan_handle, cumoe_weights d_weights, const cumoe_route *route,
                                    const cumoe_weights_backward_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  const struct weights *d;
  cumoe_route copy;
  cumoe_weights_backward_args a;
  TRY(find_plan(plan_handle, &plan));
  TRY(take_route(&route, &copy));
  TRY(take_struct("args", args, &a));
  REQUIRE(d_weights, CUMOE_ERR_INVALID_ARGUMENT, "d_weights is null");
  TRY(find_gradient("d_weights", d_weights, plan, false, &d));
  TRY(check_tokens("args.x.rows", a.x.rows, 0, plan->desc.routing.top_k));
  TRY(check_weights_backward(plan, d, route, &a));
  if (a.x.rows == 0) return a.flags & CUMOE_BACKWARD_ACCUMULATE ? CUMOE_OK : clear_weights(plan->context, d, stream);
  ON_DEVICE(plan->context, run_weights_backward(plan, d, route, &a, stream));
}
