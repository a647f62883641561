#include "cases_layer.h"
#include "cases.h"

#include <math.h>
#include <string.h>

typedef enum routing_form { FROM_ROUTER, FROM_LOGITS, FROM_IDS } routing_form;

typedef struct forward_case {
  const char *name;
  cumoe_moe_desc desc;
  weights_form form;
  int32_t tokens, present; /* present -1: no device token count */
  routing_form from;
  int32_t logits_dtype, ids_dtype, router_dtype;
  pattern pattern; /* of the caller's ids */
  bool router_bias, select_bias, shared_gate, residual, in_place, zero_weights, nan_token;
  float out_scale;
} forward_case;

/* Everything a call reads, on the host. */
typedef struct forward_data {
  host_weights weights, shared;
  tensor x, router_weight, router_bias, logits, ids, id_weights, select_bias, expert_map, shared_gate, residual;
} forward_data;

typedef struct forward_result {
  tensor out, ids, weights, counts, load;
} forward_result;

static int32_t logit_count(const cumoe_moe_desc *d)
{
  return d->num_experts + d->routing.zero_experts + d->routing.identity_experts;
}
static int32_t local_count(const cumoe_moe_desc *d)
{
  return d->local_experts ? d->local_experts : d->num_experts;
}
static bool unreduced(const cumoe_moe_desc *d)
{
  return d->flags & CUMOE_MOE_UNREDUCED;
}
static bool mapped(const forward_case *c)
{
  return local_count(&c->desc) < c->desc.num_experts;
}

static forward_data make_data(rng *r, const forward_case *c)
{
  const cumoe_moe_desc *d = &c->desc;
  int32_t experts = logit_count(d), local = local_count(d);
  forward_data a = {.weights = weights_new(d, local, d->inter, c->form)};
  weights_fill(r, &a.weights, FILL_NORMAL);
  oracle_prepare(&a.weights);
  if (d->shared_inter) {
    a.shared = weights_new(d, 1, d->shared_inter, c->form);
    weights_fill(r, &a.shared, FILL_NORMAL);
    oracle_prepare(&a.shared);
  }
  a.x = tensor_normal(r, d->dtype, c->tokens, d->hidden, 0, 1);
  a.router_weight = tensor_normal(r, c->router_dtype, experts, d->hidden, 0, 2 / sqrt(d->hidden));
  a.router_bias = tensor_normal(r, CUMOE_F32, 1, experts, 0, 0.3);
  a.logits = tensor_normal(r, c->logits_dtype, c->tokens, experts, 0, 2);
  a.ids = route_tokens(r, c->pattern, c->ids_dtype, c->tokens, d->routing.top_k, experts);
  a.id_weights = tensor_normal(r, CUMOE_F32, c->tokens, d->routing.top_k, 0.4, 0.2);
  a.select_bias = tensor_normal(r, CUMOE_F32, 1, experts, 0, 0.1);
  a.shared_gate = tensor_normal(r, d->dtype, 1, d->hidden, 0, 1 / sqrt(d->hidden));
  a.residual = tensor_normal(r, d->out_dtype, c->tokens, d->hidden, 0, 3);
  a.expert_map = tensor_new(CUMOE_I32, 1, d->num_experts);
  for (int32_t e = 0; e < d->num_experts; e++) /* every other expert, in reverse */
    tensor_set(&a.expert_map, 0, e, e % 2 && e / 2 < local ? local - 1 - e / 2 : -1);
  for (int64_t i = 0; c->zero_weights && i < a.id_weights.rows * a.id_weights.cols; i += 2)
    tensor_set(&a.id_weights, 0, i, 0);
  if (c->nan_token && c->tokens > 1) tensor_set(&a.x, 1, 5, NAN);
  return a;
}

static void set_routing(cumoe_context context, const forward_case *c, const forward_data *a, cumoe_moe_args *args)
{
  if (c->from == FROM_ROUTER) {
    args->router_weight = device_put(context, &a->router_weight, 8);
    if (c->router_bias) args->router_bias = device_put(context, &a->router_bias, 1);
  } else if (c->from == FROM_LOGITS) {
    args->logits = device_put(context, &a->logits, 3);
  } else {
    args->ids = device_put(context, &a->ids, 1);
    args->weights = device_put(context, &a->id_weights, 2);
  }
  if (c->select_bias && c->from != FROM_IDS) args->select_bias = device_put(context, &a->select_bias, 0);
  if (mapped(c)) args->expert_map = device_put(context, &a->expert_map, 0);
}

static void set_outputs(cumoe_context context, const forward_case *c, const forward_data *a, cumoe_moe_args *args)
{
  const cumoe_moe_desc *d = &c->desc;
  int64_t k = d->routing.top_k, local = local_count(d);
  tensor load = tensor_new(CUMOE_I64, 1, local);
  for (int64_t e = 0; e < local; e++) tensor_set(&load, 0, e, 1000 + (double)e);
  args->out = device_new(context, d->out_dtype, c->tokens * (unreduced(d) ? k : 1), d->hidden, 8);
  if (c->residual && c->in_place) device_set(context, args->out, &a->residual);
  if (c->residual) args->residual = c->in_place ? cumoe_const(args->out) : device_put(context, &a->residual, 8);
  if (c->from != FROM_IDS) args->ids_out = device_new(context, c->ids_dtype, c->tokens, k, 1);
  if (c->from != FROM_IDS) args->weights_out = device_new(context, CUMOE_F32, c->tokens, k, 3);
  args->counts_out = device_new(context, CUMOE_I32, 1, local, 1);
  args->load = device_new(context, CUMOE_I64, 1, local, 1);
  device_set(context, args->load, &load);
}

static cumoe_view_mut make_workspace(cumoe_context context, cumoe_plan plan, int64_t tokens)
{
  size_t bytes = 0;
  CHECK_OK(cumoe_plan_workspace(plan, tokens, &bytes));
  return bytes ? device_new(context, CUMOE_U8, 1, (int64_t)bytes, 256 - (int64_t)(bytes % 256)) : no_view_mut();
}

static forward_result take_results(cumoe_context context, const cumoe_moe_args *args)
{
  forward_result r = {.out = device_get(context, cumoe_const(args->out)),
                      .counts = device_get(context, cumoe_const(args->counts_out)),
                      .load = device_get(context, cumoe_const(args->load))};
  check_guards(context, "out", args->out);
  check_guards(context, "counts_out", args->counts_out);
  check_guards(context, "load", args->load);
  if (args->workspace.data) check_guards(context, "workspace", args->workspace);
  if (!args->ids_out.owner) return r;
  r.ids = device_get(context, cumoe_const(args->ids_out));
  r.weights = device_get(context, cumoe_const(args->weights_out));
  check_guards(context, "ids_out", args->ids_out);
  check_guards(context, "weights_out", args->weights_out);
  return r;
}

static cumoe_status forward_on(cumoe_context context, const forward_case *c, const forward_data *a,
                               forward_result *result)
{
  cumoe_plan plan = NULL;
  cumoe_weights shared = NULL;
  tensor present = tensor_new(CUMOE_I32, 1, 1);
  tensor_set(&present, 0, 0, c->present);
  CHECK_OK(cumoe_plan_create(context, &c->desc, &plan));
  cumoe_weights weights = weights_put(context, &a->weights, c->form);
  if (c->desc.shared_inter) shared = weights_put(context, &a->shared, c->form);
  cumoe_moe_args args = {.size = sizeof args,
                         .x = device_put(context, &a->x, 16),
                         .shared = shared,
                         .out_scale = c->out_scale,
                         .workspace = make_workspace(context, plan, c->tokens)};
  if (c->shared_gate) args.shared_gate = device_put(context, &a->shared_gate, 0);
  if (c->present >= 0) args.device_tokens = device_put(context, &present, 0);
  set_routing(context, c, a, &args);
  set_outputs(context, c, a, &args);
  cumoe_status status = cumoe_moe_forward(plan, weights, &args, NULL);
  *result = take_results(context, &args);
  int64_t rows = c->tokens ? args.out.rows / c->tokens : 0;
  if (c->present >= 0 && c->present < c->tokens && !c->in_place)
    check_untouched(context, "out", args.out, c->present * rows);
  CHECK_OK(cumoe_weights_destroy(weights));
  CHECK_OK(cumoe_weights_destroy(shared));
  CHECK_OK(cumoe_plan_destroy(plan));
  return status;
}

/* ---- what is expected ------------------------------------------------------------------------------ */

static int64_t tokens_present(const forward_case *c)
{
  return c->present >= 0 && c->present < c->tokens ? c->present : c->tokens;
}

static layer_case oracle_case(const forward_case *c, const forward_data *a)
{
  layer_case l = {
      .desc = &c->desc, .weights = &a->weights, .x = &a->x, .out_scale = c->out_scale == 0 ? 1 : c->out_scale};
  if (c->desc.shared_inter) l.shared = &a->shared;
  if (c->shared_gate) l.shared_gate = &a->shared_gate;
  if (c->from == FROM_ROUTER)
    l.router_weight = &a->router_weight, l.router_bias = c->router_bias ? &a->router_bias : NULL;
  if (c->from == FROM_LOGITS) l.logits = &a->logits;
  if (c->from == FROM_IDS) l.ids = &a->ids, l.id_weights = &a->id_weights;
  if (c->select_bias && c->from != FROM_IDS) l.select_bias = &a->select_bias;
  if (mapped(c)) l.expert_map = &a->expert_map;
  if (c->residual) l.residual = &a->residual;
  return l;
}

static void check_counts(const forward_case *c, const forward_data *a, const forward_result *r)
{
  const cumoe_moe_desc *d = &c->desc;
  const tensor *ids = c->from == FROM_IDS ? &a->ids : &r->ids;
  int64_t *counts = scratch((size_t)local_count(d), sizeof *counts);
  for (int64_t i = 0; i < tokens_present(c) * d->routing.top_k; i++) {
    int32_t to = oracle_destination(d, mapped(c) ? &a->expert_map : NULL, tensor_get(ids, 0, i));
    if (to >= 0) counts[to]++;
  }
  bool good = c->tokens > 0;
  for (int32_t e = 0; e < local_count(d) && good; e++) {
    good = CHECK_MSG(tensor_get(&r->counts, 0, e) == (double)counts[e], "counts_out[%d] is %g, want %d", e,
                     tensor_get(&r->counts, 0, e), (int)counts[e]) &&
           CHECK_MSG(tensor_get(&r->load, 0, e) == (double)(1000 + e + counts[e]), "load[%d] is %g", e,
                     tensor_get(&r->load, 0, e));
  }
}

static int64_t open_tokens, layer_tokens;

static void check_forward(const forward_case *c, const forward_data *a, const forward_result *r)
{
  layer_case l = oracle_case(c, a);
  int64_t k = c->desc.routing.top_k, rows = unreduced(&c->desc) ? k : 1;
  for (int64_t t = 0; t < tokens_present(c); t++) {
    if (c->nan_token && t == 1 && c->from == FROM_ROUTER)
      continue; /* its ids are those of NaN logits; others must not care */
    layer_result want = oracle_layer(&l, t);
    layer_tokens++;
    open_tokens += !want.decided;
    if (!want.decided) continue;
    for (int64_t j = 0; r->ids.data && j < k; j++)
      CHECK_MSG(tensor_get(&r->ids, t, j) == want.ids[j], "ids_out[%d, %d] is %g, want %d", (int)t, (int)j,
                tensor_get(&r->ids, t, j), want.ids[j]);
    if (r->weights.data) check_bounded_row("weights_out", &r->weights, t, want.weights);
    for (int64_t row = 0; row < rows; row++)
      check_bounded_row("out", &r->out, t * rows + row, want.out + row * c->desc.hidden);
  }
  check_counts(c, a, r);
}

static int32_t expected_fault(const forward_case *c, const forward_data *a)
{
  int32_t experts = logit_count(&c->desc);
  if (c->tokens == 0) return CUMOE_FAULT_NONE;
  if (c->present > c->tokens) return CUMOE_FAULT_TOKEN_COUNT;
  if (c->nan_token && c->from == FROM_ROUTER && tokens_present(c) > 1) return CUMOE_FAULT_NAN_LOGIT;
  for (int64_t i = 0; c->from == FROM_IDS && i < tokens_present(c) * c->desc.routing.top_k; i++)
    if (tensor_get(&a->ids, 0, i) < -1 || tensor_get(&a->ids, 0, i) >= experts) return CUMOE_FAULT_EXPERT_ID;
  return CUMOE_FAULT_NONE;
}

/* ---- relations between calls ----------------------------------------------------------------------- */

static tensor reversed(const tensor *t, int64_t group)
{
  tensor r = tensor_new(t->dtype, t->rows, t->cols);
  size_t bytes = (size_t)(group * t->cols) * cumoe_dtype_bytes((cumoe_dtype)t->dtype);
  for (int64_t i = 0, n = t->rows / (group ? group : 1); i < n; i++)
    memcpy(r.data + (size_t)(n - 1 - i) * bytes, t->data + (size_t)i * bytes, bytes);
  return r;
}

/* Tokens in reverse order give the same outputs in reverse order, bit for bit. */
static void check_reversed(cumoe_context context, const forward_case *c, const forward_data *a, const forward_result *r)
{
  forward_data b = *a;
  forward_result other;
  if (c->present >= 0) return;
  b.x = reversed(&a->x, 1);
  b.logits = reversed(&a->logits, 1);
  b.ids = reversed(&a->ids, 1);
  b.id_weights = reversed(&a->id_weights, 1);
  b.residual = reversed(&a->residual, 1);
  if (!CHECK_OK(forward_on(context, c, &b, &other))) return;
  tensor out = reversed(&other.out, unreduced(&c->desc) ? c->desc.routing.top_k : 1);
  check_same("tokens reversed", &r->out, &out);
  CHECK_OK(cumoe_fault_clear(context, NULL));
}

static void run_forward(cumoe_context context, const forward_case *c)
{
  if (!case_wanted(c->desc.dtype)) return;
  static const char *forms[] = {"router", "logits", "ids"};
  const cumoe_moe_desc *d = &c->desc;
  rng r = {(uint64_t)d->num_experts * 13 + (uint64_t)c->tokens * 7 + (uint64_t)d->hidden};
  case_begin("layer %s %s T %d E %d/%d k %d H %d I %d shared %d order %d up %d down %d act %d from %s%s%s%s%s", c->name,
             cumoe_dtype_name((cumoe_dtype)d->dtype), c->tokens, local_count(d), d->num_experts, d->routing.top_k,
             d->hidden, d->inter, d->shared_inter, c->form.gate_order, c->form.up_major, c->form.down_major, d->act,
             forms[c->from], c->residual ? " residual" : "", unreduced(d) ? " unreduced" : "",
             c->nan_token ? " nan" : "", c->present >= 0 ? " device tokens" : "");
  forward_data a = make_data(&r, c);
  forward_result got[PASSES];
  for (int pass = 0; pass < PASSES; pass++) {
    set_poison(pass);
    if (!case_served(context, forward_on(context, c, &a, &got[pass]), "cumoe_moe_forward")) return;
    expect_fault(context, expected_fault(c, &a));
    if (c->present >= 0) got[pass].out.rows = tokens_present(c) * (unreduced(d) ? d->routing.top_k : 1);
  }
  check_same("out, two poisons", &got[0].out, &got[1].out);
  check_reversed(context, c, &a, &got[0]);
  check_forward(c, &a, &got[0]);
  case_end();
}

/* ---- the table ------------------------------------------------------------------------------------- */

static forward_case named(const char *name, int32_t experts, int32_t hidden, int32_t inter, cumoe_routing routing)
{
  forward_case c = {.name = name, .present = -1, .logits_dtype = CUMOE_F32, .ids_dtype = CUMOE_I32};
  c.desc = (cumoe_moe_desc){
      .size = sizeof c.desc, .num_experts = experts, .hidden = hidden, .inter = inter, .routing = routing};
  c.form = (weights_form){CUMOE_GATE_UP_CONCAT, CUMOE_OUT_IN, CUMOE_OUT_IN, 0, 0, false};
  return c;
}

enum { FAMILIES = 14 };

static forward_case family(int i)
{
  forward_case c;
  switch (i) {
  case 0: return named("mixtral", 8, 64, 104, cumoe_routing_mixtral(2));
  case 1: return named("qwen3", 128, 72, 24, cumoe_routing_qwen3(8));
  case 2: /* interleaved, biased, clamped */
    c = named("gpt-oss", 32, 72, 72, cumoe_routing_gpt_oss(4));
    c.desc.act = CUMOE_ACT_SWIGLU_OAI;
    c.desc.act_limit = 7;
    c.form = (weights_form){CUMOE_GATE_UP_INTERLEAVED, CUMOE_IN_OUT, CUMOE_IN_OUT, CUMOE_F32, 0, false};
    c.router_bias = true;
    return c;
  case 3:
    c = named("deepseek-v3", 64, 56, 32, cumoe_routing_deepseek_v3(8, 8, 4, 2.5f));
    c.desc.shared_inter = 32;
    c.select_bias = true;
    return c;
  case 4:
    c = named("qwen2", 60, 64, 40, cumoe_routing_qwen2(4));
    c.desc.shared_inter = 88;
    c.shared_gate = true;
    return c;
  case 5:
    c = named("llama4", 16, 64, 48, cumoe_routing_llama4(1));
    c.desc.shared_inter = 48;
    return c;
  case 6:
    c = named("zero and identity experts", 12, 40, 24, cumoe_routing_qwen2(4));
    c.desc.routing.zero_experts = 3;
    c.desc.routing.identity_experts = 2;
    return c;
  case 7: /* one shard of a split layer */
    c = named("local experts", 24, 48, 32, cumoe_routing_mixtral(4));
    c.desc.local_experts = 10;
    return c;
  case 8:
    c = named("unreduced", 10, 64, 40, cumoe_routing_mixtral(3));
    c.desc.flags = CUMOE_MOE_UNREDUCED;
    return c;
  case 9:
    c = named("ungated relu^2", 16, 64, 72, cumoe_routing_mixtral(2));
    c.desc.flags = CUMOE_MOE_UNGATED;
    c.desc.act = CUMOE_ACT_RELU2;
    c.form.gate_order = CUMOE_UNGATED;
    return c;
  case 10:
    c = named("geglu, separate, per expert", 8, 40, 64, cumoe_routing_mixtral(2));
    c.desc.act = CUMOE_ACT_GELU_TANH;
    c.form = (weights_form){CUMOE_GATE_UP_SEPARATE, CUMOE_OUT_IN, CUMOE_IN_OUT, 0, 2, true};
    return c;
  case 11: /* on the input, more than one slot */
    c = named("weight on input, f32 router", 9, 64, 24, cumoe_routing_llama4(3));
    c.form.gate_order = CUMOE_UP_GATE_CONCAT;
    c.router_dtype = CUMOE_F32;
    return c;
  case 12:
    c = named("many experts", 512, 32, 16, cumoe_routing_mixtral(10));
    c.desc.routing.softcap = 30;
    return c;
  default: return named("one expert", 1, 24, 8, cumoe_routing_qwen2(1));
  }
}

/* Every family in every dtype from every form of routing; the rest is drawn beside them. */
static forward_case layer_case_of(int i)
{
  forward_case c = family(i % FAMILIES);
  int round = i / FAMILIES;
  rng r = {(uint64_t)i};
  c.desc.dtype = case_dtypes[round % 3];
  c.desc.out_dtype = rng_below(&r, 3) ? c.desc.dtype : CUMOE_F32;
  c.desc.local_experts = local_count(&c.desc);
  c.tokens = case_tokens[rng_below(&r, 12)];
  c.from = (routing_form)(round / 3 % 3);
  c.logits_dtype = case_dtypes[rng_below(&r, 3)];
  c.ids_dtype = rng_below(&r, 2) ? CUMOE_I64 : CUMOE_I32;
  if (c.router_dtype == 0) c.router_dtype = c.desc.dtype;
  c.pattern = (pattern)rng_below(&r, PATTERN_COUNT);
  c.residual = rng_below(&r, 2) && !unreduced(&c.desc);
  c.in_place = c.residual && rng_below(&r, 2);
  c.out_scale = rng_below(&r, 3) ? 0 : 0.5f;
  c.zero_weights = rng_below(&r, 4) == 0;
  c.nan_token = rng_below(&r, 6) == 0;
  if (rng_below(&r, 6) == 0) c.present = rng_below(&r, 2) ? c.tokens / 2 : c.tokens + 1;
  return c;
}

/* Experts of one to three tiles of wgmma, where rows are copied in order for the products. */
static void many_rows_case(cumoe_context context, int i)
{
  static const int32_t rows_each[] = {97, 125, 177, 250, 360};
  forward_case c = layer_case_of(i);
  const int32_t tokens = rows_each[i % 5] * c.desc.num_experts / c.desc.routing.top_k;
  c.desc.dtype = i / 2 % 2 ? CUMOE_F16 : CUMOE_BF16;
  if (c.desc.out_dtype != CUMOE_F32) c.desc.out_dtype = c.desc.dtype;
  if (c.router_dtype != CUMOE_F32) c.router_dtype = c.desc.dtype;
  c.tokens = tokens > 700 ? 700 : tokens;
  c.present = i % 4 == 3 ? c.tokens - 7 : -1;
  run_forward(context, &c);
}

void cases_layer(cumoe_context context)
{
  open_tokens = layer_tokens = 0;
  for (int i = 0; i < FAMILIES * 9 * 2; i++) {
    forward_case c = layer_case_of(i);
    run_forward(context, &c);
  }
  case_begin("layer: ids left open by rounding");
  CHECK_MSG(open_tokens * 50 <= layer_tokens, "%d of %d tokens", (int)open_tokens, (int)layer_tokens);
  case_end();
  if (!on_device(context)) return;
  for (int i = 0; i < 2 * FAMILIES; i++) { /* past the tiles of every kernel */
    forward_case c = layer_case_of(i);
    c.tokens = i % 2 ? 200 : 65;
    c.desc.hidden = 256 + c.desc.hidden;
    c.present = -1;
    run_forward(context, &c);
  }
  for (int i = 0; i < FAMILIES; i++) many_rows_case(context, i);
}
