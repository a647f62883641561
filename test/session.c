#include "session.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* ---- the description ------------------------------------------------------------------------------- */

layer_spec layer_spec_new(int32_t dtype, int64_t tokens, int32_t hidden, int32_t inter)
{
  layer_spec s = {.tokens = tokens,
                  .router_dtype = dtype,
                  .logits_dtype = CUMOE_F32,
                  .ids_dtype = CUMOE_I32,
                  .form = {.gate_order = CUMOE_GATE_UP_CONCAT, .up_major = CUMOE_OUT_IN, .down_major = CUMOE_OUT_IN},
                  .seed = 1};
  s.desc = (cumoe_moe_desc){.size = sizeof s.desc,
                            .num_experts = 8,
                            .hidden = hidden,
                            .inter = inter,
                            .dtype = dtype,
                            .routing = cumoe_routing_mixtral(2)};
  return s;
}

int32_t spec_router_experts(const layer_spec *s)
{
  return s->desc.num_experts + s->desc.routing.zero_experts + s->desc.routing.identity_experts;
}

static int32_t local_experts(const layer_spec *s)
{
  return s->desc.local_experts ? s->desc.local_experts : s->desc.num_experts;
}

static bool is_unreduced(const layer_spec *s)
{
  return s->desc.flags & CUMOE_MOE_UNREDUCED;
}
static int32_t out_dtype(const layer_spec *s)
{
  return s->desc.out_dtype ? s->desc.out_dtype : s->desc.dtype;
}

static int64_t rows_of_out(const layer_spec *s, int64_t tokens)
{
  return is_unreduced(s) ? tokens * s->desc.routing.top_k : tokens;
}

int64_t spec_present(const layer_spec *s)
{
  if (!s->device_count || s->device_tokens > s->tokens) return s->tokens;
  return s->device_tokens < 0 ? 0 : s->device_tokens;
}

/* ---- inputs ---------------------------------------------------------------------------------------- */

/* Row t becomes row t % distinct. */
static void repeat_rows(const layer_spec *s, tensor *t)
{
  if (s->distinct == 0 || t->data == NULL || t->rows == 0) return;
  const size_t row = (size_t)t->cols * cumoe_dtype_bytes((cumoe_dtype)t->dtype);
  for (int64_t i = s->distinct; i < t->rows; i++)
    memcpy(t->data + (size_t)i * row, t->data + (size_t)(i % s->distinct) * row, row);
}

/* Global experts in random order onto the local ones; with fewer local experts the rest is -1. */
static tensor map_new(rng *r, const layer_spec *s)
{
  tensor map = tensor_new(CUMOE_I32, 1, s->desc.num_experts);
  int32_t *to = (int32_t *)(void *)map.data;
  for (int32_t e = 0; e < s->desc.num_experts; e++) to[e] = e < local_experts(s) ? e : -1;
  for (int32_t e = s->desc.num_experts - 1; e > 0; e--) {
    int64_t other = rng_below(r, e + 1);
    int32_t kept = to[e];
    to[e] = to[other];
    to[other] = kept;
  }
  return map;
}

static void make_routing(rng *r, const layer_spec *s, layer_inputs *in)
{
  const int32_t experts = spec_router_experts(s), k = s->desc.routing.top_k;
  const int32_t hidden = s->router_hidden ? s->router_hidden : s->desc.hidden;
  if (s->input == INPUT_IDS) {
    in->ids = route_tokens(r, s->pattern, s->ids_dtype, s->tokens, k, experts);
    in->id_weights = random_tensor(r, CUMOE_F32, s->tokens, k, 0.5);
  } else if (s->input == INPUT_LOGITS) {
    in->logits = tensor_normal(r, s->logits_dtype, s->tokens, experts, 0, 2);
  } else {
    in->router_weight = tensor_normal(r, s->router_dtype, experts, hidden, 0, 2 / sqrt((double)hidden));
    if (s->router_bias) in->router_bias = random_tensor(r, s->router_dtype, 1, experts, 0.5);
  }
  if (s->select_bias) in->select_bias = random_tensor(r, CUMOE_F32, 1, experts - s->desc.routing.always_experts, 0.3);
  if (s->chosen) in->ids = route_tokens(r, s->pattern, s->ids_dtype, s->tokens, k, experts);
  if (s->router_hidden) in->router_x = random_tensor(r, s->desc.dtype, s->tokens, hidden, 1);
  if (s->expert_scale) in->expert_scale = random_tensor(r, CUMOE_F32, 1, experts, 1.5);
  if (s->expert_map || local_experts(s) < s->desc.num_experts) in->expert_map = map_new(r, s);
}

static weights_form form_of(const layer_spec *s, bool shared)
{
  weights_form form = s->form;
  form.up = shared ? s->desc.shared_up_format : s->desc.up_format;
  form.down = shared ? s->desc.shared_down_format : s->desc.down_format;
  return form;
}

layer_inputs layer_inputs_new(const layer_spec *s)
{
  rng r = {s->seed * 7919};
  const int32_t hidden = s->desc.hidden;
  layer_inputs in = {.x = random_tensor(&r, s->desc.dtype, s->tokens, hidden, 1)};
  make_routing(&r, s, &in);
  in.routed = random_weights(&r, &s->desc, local_experts(s), s->desc.inter, form_of(s, false));
  if (s->desc.shared_inter) in.shared = random_weights(&r, &s->desc, 1, s->desc.shared_inter, form_of(s, true));
  if (s->shared_gate) in.shared_gate = random_tensor(&r, s->router_dtype, 1, hidden, 1 / sqrt((double)hidden));
  if (s->residual)
    in.residual = random_tensor(&r, out_dtype(s), s->residual == RESIDUAL_BIAS ? 1 : s->tokens, hidden, 1);
  tensor *const rows[] = {&in.x, &in.ids, &in.id_weights, &in.logits, &in.residual, &in.router_x};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) repeat_rows(s, rows[i]);
  return in;
}

/* ---- onto the device ------------------------------------------------------------------------------- */

static cumoe_view put(const session *s, const tensor *t, int64_t unit)
{
  return t->data ? device_put(s->context, t, s->spec->pad * unit) : no_view();
}

static void put_inputs(session *s)
{
  const layer_inputs *in = s->inputs;
  cumoe_moe_args *a = &s->args;
  a->x = put(s, &in->x, 8);
  a->router_weight = put(s, &in->router_weight, 8);
  a->router_bias = put(s, &in->router_bias, 1);
  a->logits = put(s, &in->logits, 1);
  a->ids = put(s, &in->ids, 1);
  a->weights = put(s, &in->id_weights, 1);
  a->select_bias = put(s, &in->select_bias, 1);
  a->expert_map = put(s, &in->expert_map, 1);
  a->shared_gate = put(s, &in->shared_gate, 8);
  a->router_x = put(s, &in->router_x, 8);
  a->expert_scale = put(s, &in->expert_scale, 1);
  if (s->spec->residual == RESIDUAL_SEPARATE || s->spec->residual == RESIDUAL_BIAS)
    a->residual = put(s, &in->residual, 8);
  if (!s->spec->device_count) return;
  tensor count = tensor_new(CUMOE_I32, 1, 1);
  tensor_set(&count, 0, 0, s->spec->device_tokens);
  a->device_tokens = put(s, &count, 1);
}

static void make_outputs(session *s)
{
  const layer_spec *p = s->spec;
  cumoe_moe_args *a = &s->args;
  const int32_t k = p->desc.routing.top_k;
  size_t bytes = 0;
  CHECK_OK(cumoe_plan_workspace(s->plan, p->tokens, &bytes));
  a->workspace = device_new(s->context, CUMOE_U8, 1, (int64_t)bytes, 0);
  a->out = device_new(s->context, out_dtype(p), rows_of_out(p, p->tokens), p->desc.hidden, p->pad * 8);
  if (!p->optional_outputs) return;
  if (p->input != INPUT_IDS && !p->chosen) a->ids_out = device_new(s->context, p->ids_dtype, p->tokens, k, p->pad);
  if (p->input != INPUT_IDS) a->weights_out = device_new(s->context, CUMOE_F32, p->tokens, k, p->pad);
  a->counts_out = device_new(s->context, CUMOE_I32, 1, local_experts(p), p->pad);
  a->load = device_new(s->context, CUMOE_I64, 1, local_experts(p), p->pad);
}

static int64_t load_before(int64_t expert)
{
  return 1000000007 * expert + 5;
}

static void poison(session *s, cumoe_view_mut view)
{
  if (view.rows * view.cols > 0) CHECK_OK(cumoe_fill(s->context, view, test_poison, s->stream));
}

void session_reset(session *s)
{
  cumoe_moe_args *a = &s->args;
  s->launches = 0;
  poison(s, a->out);
  poison(s, a->ids_out);
  poison(s, a->weights_out);
  poison(s, a->counts_out);
  poison(s, a->workspace);
  if (s->spec->residual == RESIDUAL_IN_PLACE) {
    CHECK_OK(cumoe_copy_from_host(s->context, a->out, s->inputs->residual.data,
                                  (size_t)(a->out.rows * a->out.cols) * cumoe_dtype_bytes((cumoe_dtype)a->out.dtype),
                                  s->stream));
    a->residual = cumoe_const(a->out);
  }
  if (a->load.data == NULL) return;
  int64_t *load = scratch((size_t)a->load.cols, sizeof *load);
  for (int64_t e = 0; e < a->load.cols; e++) load[e] = load_before(e);
  CHECK_OK(cumoe_copy_from_host(s->context, a->load, load, (size_t)a->load.cols * sizeof *load, s->stream));
}

void session_open(session *s, cumoe_context context, const layer_spec *spec, const layer_inputs *inputs)
{
  *s = (session){.context = context,
                 .spec = spec,
                 .inputs = inputs,
                 .args = {.size = sizeof s->args, .out_scale = spec->out_scale}};
  CHECK_OK(cumoe_plan_create(context, &spec->desc, &s->plan));
  weights_form form = spec->form;
  form.gap += (int32_t)spec->pad;
  s->routed = weights_put(context, &inputs->routed, form);
  if (spec->desc.shared_inter) s->shared = s->args.shared = weights_put(context, &inputs->shared, form);
  put_inputs(s);
  make_outputs(s);
  session_reset(s);
  CHECK_OK(cumoe_synchronize(context, NULL)); /* the tests' streams do not wait for the default one */
}

void session_close(session *s)
{
  CHECK_OK(cumoe_weights_destroy(s->routed));
  CHECK_OK(cumoe_weights_destroy(s->shared));
  CHECK_OK(cumoe_plan_destroy(s->plan));
}

cumoe_status session_forward(session *s)
{
  s->launches++;
  return cumoe_moe_forward(s->plan, s->routed, &s->args, s->stream);
}

/* The rows of what a call wrote; the rows after them and everything around must be as before. */
static tensor collect(session *s, const char *what, cumoe_view_mut view, int64_t rows)
{
  cumoe_view part = cumoe_const(view);
  if (view.owner == 0) return (tensor){0};
  check_guards(s->context, what, view);
  if (s->spec->residual != RESIDUAL_IN_PLACE || view.data != s->args.out.data)
    check_untouched(s->context, what, view, rows);
  part.rows = rows;
  return device_get(s->context, part);
}

layer_outputs session_collect(session *s)
{
  const cumoe_moe_args *a = &s->args;
  const int64_t present = spec_present(s->spec);
  layer_outputs o;
  CHECK_OK(cumoe_synchronize(s->context, s->stream));
  o.out = collect(s, "out", a->out, rows_of_out(s->spec, present));
  o.ids = collect(s, "ids_out", a->ids_out, present);
  o.weights = collect(s, "weights_out", a->weights_out, present);
  o.counts = collect(s, "counts_out", a->counts_out, s->spec->tokens > 0); /* no tokens: nothing is launched */
  o.load = collect(s, "load", a->load, 1);
  check_guards(s->context, "workspace", a->workspace);
  for (int64_t e = 0; o.load.data && e < o.load.cols; e++) { /* the sums of each call */
    int64_t *load = (int64_t *)(void *)o.load.data + e;
    *load -= load_before(e);
    CHECK_MSG(*load % s->launches == 0, "load[%" PRId64 "] grew by %" PRId64 " in %d calls", e, *load, s->launches);
    *load /= s->launches;
  }
  return o;
}

void staged_open(staged *g, cumoe_context context, const layer_spec *spec, const layer_inputs *in, cumoe_stream stream)
{
  const int64_t t = spec->tokens, k = spec->desc.routing.top_k, pairs = t * k, e = spec->desc.num_experts;
  size_t bytes = 0;
  session_open(&g->s, context, spec, in);
  g->s.stream = stream;
  CHECK_OK(cumoe_map_workspace(g->s.plan, t, &bytes));
  g->logits = device_new(context, CUMOE_F32, t, e, 1);
  g->ids = device_new(context, CUMOE_I64, t, k, 1);
  g->weights = device_new(context, CUMOE_F32, t, k, 1);
  g->route = (cumoe_route){.size = sizeof g->route,
                           .counts = device_new(context, CUMOE_I32, 1, e, 0),
                           .offsets = device_new(context, CUMOE_I32, 1, e + 1, 0),
                           .row_pair = device_new(context, CUMOE_I32, 1, pairs, 0),
                           .slot_row = device_new(context, CUMOE_I32, t, k, 0)};
  g->h = device_new(context, spec->desc.dtype, pairs, spec->desc.inter, 8);
  g->y = device_new(context, spec->desc.dtype, pairs, spec->desc.hidden, 8);
  g->out = device_new(context, spec->desc.dtype, t, spec->desc.hidden, 8);
  g->map_workspace =
      bytes ? device_new(context, CUMOE_U8, 1, (int64_t)bytes + 16 - (int64_t)bytes % 16, 0) : no_view_mut();
}

cumoe_status run_stage(staged *g, stage which)
{
  const session *s = &g->s;
  const cumoe_moe_args *a = &s->args;
  const bool routed = s->spec->input == INPUT_IDS;
  const cumoe_view ids = routed ? a->ids : cumoe_const(g->ids), weights = routed ? a->weights : cumoe_const(g->weights);
  const cumoe_combine_args c = {.size = sizeof c, .y = cumoe_const(g->y), .pair_weights = weights, .out = g->out};
  switch (which) {
  case STAGE_ROUTER: return cumoe_router(s->context, a->x, a->router_weight, no_view(), g->logits, s->stream);
  case STAGE_GATE:
    return cumoe_gate(s->context, &s->spec->desc.routing, cumoe_const(g->logits), no_view(), g->ids, g->weights,
                      s->stream);
  case STAGE_MAP: return cumoe_map(s->plan, ids, no_view(), &g->route, g->map_workspace, s->stream);
  case STAGE_UP: return cumoe_up(s->plan, s->routed, a->x, &g->route, no_view(), g->h, s->stream);
  case STAGE_DOWN: return cumoe_down(s->plan, s->routed, cumoe_const(g->h), &g->route, g->y, s->stream);
  default: return cumoe_combine(s->plan, &g->route, &c, s->stream);
  }
}

layer_outputs run_layer(cumoe_context context, const layer_spec *spec, const layer_inputs *inputs)
{
  session s;
  session_open(&s, context, spec, inputs);
  CHECK_OK(session_forward(&s));
  layer_outputs o = session_collect(&s);
  session_close(&s);
  return o;
}

static tensor permuted_rows(const tensor *t, const int64_t *order)
{
  if (t->data == NULL) return *t;
  tensor out = tensor_new(t->dtype, t->rows, t->cols);
  const size_t row = (size_t)t->cols * cumoe_dtype_bytes((cumoe_dtype)t->dtype);
  for (int64_t i = 0; i < t->rows; i++) memcpy(out.data + (size_t)i * row, t->data + (size_t)order[i] * row, row);
  return out;
}

layer_inputs take_tokens(const layer_inputs *in, const int64_t *order, int64_t count)
{
  layer_inputs out = *in;
  tensor *const per_token[] = {&out.x, &out.ids, &out.id_weights, &out.logits, &out.router_x, &out.residual};
  const tensor *const from[] = {&in->x, &in->ids, &in->id_weights, &in->logits, &in->router_x, &in->residual};
  for (size_t i = 0; i < sizeof per_token / sizeof per_token[0]; i++) {
    if (from[i]->rows != in->x.rows) continue; /* absent, or one for all */
    per_token[i]->rows = count;
    tensor part = *from[i];
    part.rows = per_token[i]->rows;
    *per_token[i] = permuted_rows(&part, order);
  }
  return out;
}

layer_outputs permuted_outputs(const layer_spec *spec, const layer_outputs *o, const int64_t *order)
{
  const int64_t width = is_unreduced(spec) ? spec->desc.routing.top_k : 1;
  tensor wide = {o->out.dtype, o->out.rows / width, o->out.cols * width, o->out.data};
  wide = permuted_rows(&wide, order);
  wide.rows = o->out.rows, wide.cols = o->out.cols;
  return (layer_outputs){wide, permuted_rows(&o->ids, order), permuted_rows(&o->weights, order), o->counts, o->load};
}

void check_outputs_same(const layer_outputs *a, const layer_outputs *b)
{
  check_same("out", &a->out, &b->out);
  if (a->ids.data) check_same("ids_out", &a->ids, &b->ids);
  if (a->weights.data) check_same("weights_out", &a->weights, &b->weights);
  if (a->counts.data) check_same("counts_out", &a->counts, &b->counts);
  if (a->load.data) check_same("load", &a->load, &b->load);
}

/* ---- the oracle ------------------------------------------------------------------------------------ */

static const tensor *given(const tensor *t)
{
  return t->data ? t : NULL;
}

layer_case layer_case_of(const layer_spec *spec, const layer_inputs *in, cumoe_moe_desc *desc)
{
  *desc = spec->desc;
  desc->local_experts = local_experts(spec);
  desc->out_dtype = out_dtype(spec);
  return (layer_case){.desc = desc,
                      .weights = &in->routed,
                      .shared = desc->shared_inter ? &in->shared : NULL,
                      .x = &in->x,
                      .router_weight = given(&in->router_weight),
                      .router_bias = given(&in->router_bias),
                      .logits = given(&in->logits),
                      .ids = given(&in->ids),
                      .id_weights = given(&in->id_weights),
                      .select_bias = given(&in->select_bias),
                      .expert_map = given(&in->expert_map),
                      .shared_gate = given(&in->shared_gate),
                      .residual = given(&in->residual),
                      .router_x = given(&in->router_x),
                      .expert_scale = given(&in->expert_scale),
                      .out_scale = spec->out_scale == 0 ? 1 : (double)spec->out_scale};
}

/* The library's choice where rounding decides it: any k different experts will do, and the rest follows from them. */
static void check_choice_valid(const layer_spec *s, const layer_outputs *got, int64_t token)
{
  const int32_t k = s->desc.routing.top_k, experts = spec_router_experts(s);
  for (int32_t j = 0; j < k; j++) {
    const double id = tensor_get(&got->ids, token, j);
    CHECK_MSG(id >= 0 && id < experts, "token %" PRId64 ": id %g of %d experts", token, id, experts);
    for (int32_t i = 0; i < j; i++)
      CHECK_MSG(tensor_get(&got->ids, token, i) != id, "token %" PRId64 ": expert %g twice", token, id);
  }
}

static void check_routing(const layer_spec *s, const layer_outputs *got, const layer_result *want, int64_t token)
{
  for (int32_t j = 0; j < s->desc.routing.top_k; j++)
    CHECK_MSG(tensor_get(&got->ids, token, j) == want->ids[j], "ids_out[%" PRId64 ", %d] is %g, want %d", token, j,
              tensor_get(&got->ids, token, j), want->ids[j]);
  check_bounded_row("weights_out", &got->weights, token, want->weights);
}

/* Token t and every one that repeats it. Returns whether the oracle alone could tell the answer. */
static bool check_token(const layer_spec *s, layer_case c, const layer_outputs *got, int64_t token)
{
  const int64_t step = s->distinct ? s->distinct : s->tokens, width = is_unreduced(s) ? s->desc.routing.top_k : 1;
  layer_result want = oracle_layer(&c, token);
  const bool decided = want.decided;
  if (!decided && got->ids.data == NULL) return false;
  if (!decided) {
    c.logits = c.router_weight = c.router_bias = c.select_bias = NULL;
    c.ids = &got->ids;
    c.id_weights = &got->weights;
    want = oracle_layer(&c, token);
  }
  for (int64_t t = token; t < spec_present(s); t += step) {
    if (got->ids.data) check_choice_valid(s, got, t);
    if (got->ids.data && decided) check_routing(s, got, &want, t);
    if (s->chosen && got->weights.data) check_bounded_row("weights_out", &got->weights, t, want.weights);
    for (int64_t j = 0; j < width; j++)
      check_bounded_row("out", &got->out, t * width + j, want.out + j * s->desc.hidden);
  }
  return decided;
}

static void check_counts(const layer_spec *s, const layer_inputs *in, const layer_outputs *got)
{
  const tensor *ids = in->ids.data ? &in->ids : &got->ids;
  cumoe_moe_desc desc;
  const layer_case c = layer_case_of(s, in, &desc);
  int64_t *want = scratch((size_t)desc.local_experts, sizeof *want);
  for (int64_t t = 0; t < spec_present(s); t++)
    for (int32_t j = 0; j < desc.routing.top_k; j++) {
      int32_t to = oracle_destination(&desc, c.expert_map, tensor_get(ids, t, j));
      if (to >= 0) want[to]++;
    }
  for (int32_t e = 0; e < desc.local_experts; e++) {
    CHECK_MSG(tensor_get(&got->counts, 0, e) == (double)want[e], "counts_out[%d] is %g, want %" PRId64, e,
              tensor_get(&got->counts, 0, e), want[e]);
    CHECK_MSG(tensor_get(&got->load, 0, e) == (double)want[e], "load[%d] grew by %g, want %" PRId64, e,
              tensor_get(&got->load, 0, e), want[e]);
  }
}

void check_layer(const layer_spec *spec, const layer_inputs *inputs, const layer_outputs *got)
{
  cumoe_moe_desc desc;
  const layer_case c = layer_case_of(spec, inputs, &desc);
  const int64_t present = spec_present(spec),
                distinct = spec->distinct && spec->distinct < present ? spec->distinct : present;
  int64_t open = 0;
  for (int64_t t = 0; t < distinct; t++) {
    const int mark = scratch_mark();
    if (!check_token(spec, c, got, t)) open++;
    scratch_release(mark);
  }
  CHECK_MSG(open * 3 <= distinct + 3, "%" PRId64 " of %" PRId64 " tokens cannot be decided: the case tests too little",
            open, distinct);
  if (got->counts.data && spec->tokens > 0) check_counts(spec, inputs, got);
}

/* ---- faults ---------------------------------------------------------------------------------------- */

int32_t expected_fault(const layer_spec *s, const layer_inputs *in)
{
  if (s->tokens == 0) return CUMOE_FAULT_NONE;
  if (s->device_count && spec_present(s) != s->device_tokens) return CUMOE_FAULT_TOKEN_COUNT;
  for (int64_t t = 0; in->ids.data && t < spec_present(s); t++)
    for (int32_t j = 0; j < s->desc.routing.top_k; j++) {
      const double id = tensor_get(&in->ids, t, j);
      if (id < -1 || id >= spec_router_experts(s)) return CUMOE_FAULT_EXPERT_ID;
    }
  return CUMOE_FAULT_NONE;
}
