/*
 * The backward of the layer. In f32, with everything that a forward may have (the features of cases_layer.c): every
 * gradient against central differences of a forward in double, made of the oracle's stages without a rounding; what was
 * kept and what is made again give the same bits, as do two poisons and any number of threads. In bf16 and f16 against
 * the same layer, of the same values, in f32. Products of whole numbers exactly.
 */
#include "cases_layer.h"
#include "cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 5, HIDDEN = 16, INTER = 8, PART = 16 /* of matrices one element in so many is held to a difference */ };

/* ---- a call ---------------------------------------------------------------------------------------- */

/* Gradients of one weights object, read back; laid out as `form` says, with biases. */
typedef struct weight_grads {
  host_weights host;
  cumoe_view_mut data[4], bias[4]; /* gate_up, gate, up, down */
  cumoe_weights bound;
} weight_grads;

typedef struct grads {
  weight_grads routed, shared;
  tensor x, router_x, router_weight, router_bias, logits, pair_weights, expert_scale, shared_gate, residual, losses;
  tensor ids; /* that the forward chose, or was given */
} grads;

/* What a case wants besides its layer. */
typedef struct wish {
  int32_t dtype;                             /* of gradients that may have one */
  bool kept, accumulate, pointers, own_form; /* own_form: gradients lie as the weights do */
  bool without_weights;                      /* no gradients of the routed experts' weights */
  float balance, z;
  const tensor *d_out;
} wish;

static host_projection *projection_of(host_weights *w, int i)
{
  host_projection *all[] = {&w->gate_up, &w->gate, &w->up, &w->down};
  return all[i];
}

/* What accumulating adds to; a -0 stays one only where nothing is added. */
static double before(int64_t i)
{
  return i % 7 == 3 ? -0. : (double)(i % 7) - 3;
}

static cumoe_view_mut grad_new(cumoe_context context, const wish *w, int32_t dtype, int64_t rows, int64_t cols)
{
  const cumoe_view_mut v = device_new(context, dtype, rows, cols, 8);
  if (!w->accumulate) return v;
  const tensor t = tensor_new(dtype, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) tensor_set(&t, 0, i, before(i));
  device_set(context, v, &t);
  return v;
}

static void point_at(cumoe_projection *p, int32_t experts)
{
  const void **table = scratch((size_t)experts, sizeof *table);
  p->data.rows /= experts;
  for (int64_t e = 0; e < experts; e++)
    table[e] = (const char *)p->data.data +
               e * p->data.rows * p->data.ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)p->data.dtype);
  p->per_expert = table;
  p->data.data = NULL;
  p->data.owner = 0;
}

static void weight_grads_open(weight_grads *g, cumoe_context context, const wish *w, const cumoe_moe_desc *desc,
                              int32_t experts, int32_t inter, weights_form form)
{
  cumoe_moe_desc d = *desc;
  d.dtype = w->dtype;
  form.bias = CUMOE_F32;
  g->host = weights_new(&d, experts, inter, form);
  cumoe_weights_desc wd = weights_desc(&g->host);
  cumoe_projection *to[] = {&wd.gate_up, &wd.gate, &wd.up, &wd.down};
  for (int i = 0; i < 4; i++) {
    const host_projection *p = projection_of(&g->host, i);
    if (!p->data.data) continue;
    g->data[i] = grad_new(context, w, w->dtype, p->data.rows, p->data.cols);
    g->bias[i] = grad_new(context, w, CUMOE_F32, p->bias.rows, p->bias.cols);
    to[i]->data = cumoe_const(g->data[i]);
    to[i]->bias = cumoe_const(g->bias[i]);
    if (w->pointers) point_at(to[i], experts);
  }
  CHECK_OK(cumoe_weights_bind(context, &wd, &g->bound));
}

static tensor take(cumoe_context context, cumoe_view_mut v)
{
  if (!v.data) return (tensor){0};
  check_guards(context, "a gradient", v);
  return device_get(context, cumoe_const(v));
}

static void weight_grads_take(weight_grads *g, cumoe_context context)
{
  for (int i = 0; i < 4 && g->bound; i++) {
    host_projection *p = projection_of(&g->host, i);
    if (!p->data.data) continue;
    p->data = take(context, g->data[i]);
    p->bias = take(context, g->bias[i]);
  }
}

static void weight_grads_close(const weight_grads *g)
{
  if (g->bound) CHECK_OK(cumoe_weights_destroy(g->bound));
}

static bool routed_by_caller(const layer_spec *s)
{
  return s->input == INPUT_IDS && !s->chosen;
}

static cumoe_view_mut workspace_new(cumoe_context context, size_t bytes)
{
  return device_new(context, CUMOE_U8, 1, (int64_t)bytes, 0);
}

/* A layout that has nothing to do with that of the weights. */
static weights_form other_form(const layer_spec *s)
{
  rng r = {s->seed + 77};
  layer_spec other = *s;
  layer_random_form(&r, &other);
  return (weights_form){
      .gate_order = other.form.gate_order, .up_major = other.form.up_major, .down_major = other.form.down_major};
}

static weights_form form_of_grads(const layer_spec *s, const wish *w)
{
  return w->own_form ? (weights_form){.gate_order = s->form.gate_order,
                                      .up_major = s->form.up_major,
                                      .down_major = s->form.down_major}
                     : other_form(s);
}

/* A forward and its backward, everything on the device. */
typedef struct both_ways {
  session run;
  grads g;
  cumoe_moe_grads to;
  cumoe_moe_args args; /* of the backward */
} both_ways;

static void want_all(both_ways *b, const layer_spec *s, const layer_inputs *in, const wish *w)
{
  const cumoe_context context = b->run.context;
  const cumoe_moe_desc *d = &s->desc;
  const int64_t t = s->tokens, k = d->routing.top_k, e = spec_router_experts(s);
  cumoe_moe_grads *to = &b->to;
  to->d_x = device_new(context, w->dtype, t, d->hidden, 8);
  to->d_pair_weights = device_new(context, CUMOE_F32, t, k, 1);
  if (!routed_by_caller(s)) to->d_logits = device_new(context, CUMOE_F32, t, e, 3);
  if (!routed_by_caller(s)) to->losses = device_new(context, CUMOE_F32, 1, 2, 0);
  if (s->input == INPUT_ROUTER)
    to->d_router_weight = grad_new(context, w, w->dtype, in->router_weight.rows, in->router_weight.cols);
  if (s->input == INPUT_ROUTER) to->d_router_bias = grad_new(context, w, CUMOE_F32, 1, e);
  if (in->router_x.data) to->d_router_x = device_new(context, w->dtype, t, in->router_x.cols, 8);
  if (in->expert_scale.data) to->d_expert_scale = grad_new(context, w, CUMOE_F32, 1, e);
  if (in->shared_gate.data) to->d_shared_gate = grad_new(context, w, w->dtype, 1, d->hidden);
  if (s->residual == RESIDUAL_BIAS) to->d_residual = grad_new(context, w, w->dtype, 1, d->hidden);
}

static void both_ways_open(both_ways *b, cumoe_context context, const layer_spec *s, const layer_inputs *in,
                           const wish *w)
{
  size_t bytes = 0, kept = 0;
  const cumoe_moe_desc *d = &s->desc;
  *b = (both_ways){0};
  session_open(&b->run, context, s, in);
  CHECK_OK(cumoe_moe_kept(b->run.plan, s->tokens, &kept));
  if (!w->without_weights)
    weight_grads_open(&b->g.routed, context, w, d, in->routed.experts, d->inter, form_of_grads(s, w));
  if (d->shared_inter) weight_grads_open(&b->g.shared, context, w, d, 1, d->shared_inter, form_of_grads(s, w));
  CHECK_OK(cumoe_moe_backward_workspace(b->run.plan, s->tokens, w->kept, &bytes));
  b->to = (cumoe_moe_grads){.size = sizeof b->to,
                            .flags = w->accumulate ? CUMOE_BACKWARD_ACCUMULATE : 0,
                            .balance = w->balance,
                            .z = w->z,
                            .d_out = device_put(context, w->d_out, 8),
                            .d_weights = b->g.routed.bound,
                            .d_shared = b->g.shared.bound,
                            .workspace = workspace_new(context, bytes)};
  if (w->kept) b->to.kept = cumoe_const(workspace_new(context, kept));
  want_all(b, s, in, w);
  b->args = b->run.args;
  b->args.workspace = b->args.out = no_view_mut();
  if (s->residual == RESIDUAL_IN_PLACE) b->args.residual = no_view();
}

static void both_ways_call(both_ways *b)
{
  session *run = &b->run;
  if (b->to.kept.data)
    CHECK_OK(cumoe_moe_forward_keep(run->plan, run->routed, &run->args, as_mut(b->to.kept), run->stream));
  else
    CHECK_OK(session_forward(run));
  CHECK_OK(cumoe_moe_backward(run->plan, run->routed, &b->args, &b->to, run->stream));
}

/* What was written, read back. */
static void both_ways_collect(both_ways *b)
{
  const cumoe_context context = b->run.context;
  const cumoe_moe_grads *to = &b->to;
  grads *g = &b->g;
  CHECK_OK(cumoe_synchronize(context, b->run.stream));
  check_guards(context, "workspace", to->workspace);
  if (to->kept.data) check_guards(context, "kept", as_mut(to->kept));
  g->x = take(context, to->d_x);
  g->pair_weights = take(context, to->d_pair_weights);
  g->logits = take(context, to->d_logits);
  g->losses = take(context, to->losses);
  g->router_weight = take(context, to->d_router_weight);
  g->router_bias = take(context, to->d_router_bias);
  g->router_x = take(context, to->d_router_x);
  g->expert_scale = take(context, to->d_expert_scale);
  g->shared_gate = take(context, to->d_shared_gate);
  g->residual = take(context, to->d_residual);
  g->ids = b->run.args.ids_out.data ? device_get(context, cumoe_const(b->run.args.ids_out)) : b->run.inputs->ids;
  weight_grads_take(&g->routed, context);
  weight_grads_take(&g->shared, context);
}

static void both_ways_close(both_ways *b)
{
  weight_grads_close(&b->g.routed);
  weight_grads_close(&b->g.shared);
  session_close(&b->run);
}

static grads run_backward(cumoe_context context, const layer_spec *s, const layer_inputs *in, const wish *w)
{
  both_ways b;
  both_ways_open(&b, context, s, in, w);
  both_ways_call(&b);
  both_ways_collect(&b);
  both_ways_close(&b);
  return b.g;
}

/* ---- a forward in double --------------------------------------------------------------------------- */

typedef struct smooth {
  const layer_spec *spec;
  layer_inputs *in;
  const tensor *ids, *d_out;
  double step; /* 2^-14: its square is below what f32 brings; 1 of whole numbers: of a parabola it is exact */
  cumoe_moe_desc desc;
} smooth;

static double get(const tensor *t, int64_t row, int64_t col)
{
  return tensor_get(t, row, col);
}

/* Of one token; from logits, without a rounding. */
static void smooth_weights(const smooth *f, int64_t t, double *w)
{
  const int32_t k = f->desc.routing.top_k, e = spec_router_experts(f->spec);
  const layer_inputs *in = f->in;
  bounded *logits = scratch((size_t)e, sizeof *logits), slots[CUMOE_MAX_TOP_K];
  double *scale = scratch((size_t)e, sizeof *scale);
  int32_t ids[CUMOE_MAX_TOP_K], out[CUMOE_MAX_TOP_K];
  for (int32_t j = 0; j < k; j++) ids[j] = (int32_t)get(f->ids, t, j);
  if (routed_by_caller(f->spec)) {
    for (int32_t j = 0; j < k; j++) w[j] = get(&in->id_weights, t, j);
    return;
  }
  if (in->router_weight.data)
    oracle_router(in->router_x.data ? &in->router_x : &in->x, t, &in->router_weight, &in->router_bias, logits);
  for (int32_t i = 0; i < e; i++) {
    const double given = f->desc.routing.logit_scale > 0 ? (double)f->desc.routing.logit_scale : 1;
    logits[i] = (bounded){in->logits.data ? get(&in->logits, t, i) : given * logits[i].value, 0};
    if (in->expert_scale.data) scale[i] = get(&in->expert_scale, 0, i);
  }
  const gate_operands with = {.expert_scale = in->expert_scale.data ? scale : NULL, .chosen = ids};
  (void)oracle_gate(&f->desc.routing, e, logits, with, out, slots);
  for (int32_t j = 0; j < k; j++) w[j] = slots[j].value;
}

/* y of one expert, from x of a token. */
static void smooth_expert(const smooth *f, const host_weights *w, int64_t expert, int64_t t, double on_input, double *y)
{
  const int64_t hidden = f->desc.hidden;
  double *x = scratch((size_t)hidden, sizeof *x);
  bounded *h = scratch((size_t)w->inter, sizeof *h), *out = scratch((size_t)hidden, sizeof *out);
  for (int64_t i = 0; i < hidden; i++) x[i] = get(&f->in->x, t, i);
  oracle_up(&f->desc, w, expert, x, (bounded){on_input, 0}, h);
  for (int64_t i = 0; i < w->inter; i++) h[i].bound = 0;
  oracle_down(w, expert, h, out);
  for (int64_t i = 0; i < hidden; i++) y[i] = out[i].value;
}

/* <d out, out> of one token. */
static double smooth_token(const smooth *f, int64_t t)
{
  const cumoe_moe_desc *d = &f->desc;
  const bool unreduced = d->flags & CUMOE_MOE_UNREDUCED, on_input = d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
  const int64_t k = d->routing.top_k, hidden = d->hidden;
  const double scale = unreduced || f->spec->out_scale == 0 ? 1 : (double)f->spec->out_scale;
  double w[CUMOE_MAX_TOP_K], *y = scratch((size_t)hidden, sizeof *y), sum = 0;
  smooth_weights(f, t, w);
  for (int64_t j = 0; j < k; j++) {
    const int32_t to = oracle_destination(d, f->in->expert_map.data ? &f->in->expert_map : NULL, get(f->ids, t, j));
    const double factor = unreduced || on_input ? 1 : w[j] * scale;
    if (to == -1 || (w[j] == 0 && (!unreduced || on_input))) continue;
    if (to >= 0) smooth_expert(f, &f->in->routed, to, t, on_input ? w[j] : 1, y);
    for (int64_t i = 0; i < hidden; i++)
      sum += get(f->d_out, unreduced ? t * k + j : t, i) * factor * (on_input && !unreduced ? scale : 1) *
             (to < 0 ? get(&f->in->x, t, i) : y[i]);
  }
  if (f->in->residual.data)
    for (int64_t i = 0; i < hidden; i++)
      sum += get(f->d_out, t, i) * get(&f->in->residual, f->in->residual.rows == 1 ? 0 : t, i);
  if (!d->shared_inter) return sum;
  double logit = 0;
  for (int64_t i = 0; i < hidden && f->in->shared_gate.data; i++)
    logit += get(&f->in->shared_gate, 0, i) * get(&f->in->x, t, i);
  const double gate = f->in->shared_gate.data ? 1 / (1 + exp(-logit)) : 1;
  smooth_expert(f, &f->in->shared, 0, t, 1, y);
  for (int64_t i = 0; i < hidden; i++) sum += scale * gate * get(f->d_out, t, i) * y[i];
  return sum;
}

/* Of all tokens, or (token >= 0) of one alone. */
static double smooth_loss(const smooth *f, int64_t token)
{
  const int64_t present = spec_present(f->spec);
  const int mark = scratch_mark();
  double sum = 0;
  for (int64_t t = 0; t < present; t++)
    if (token < 0 || token == t) sum += smooth_token(f, t);
  scratch_release(mark);
  return sum;
}

/* ---- against differences --------------------------------------------------------------------------- */

static double difference_of(const smooth *f, tensor *t, int64_t row, int64_t col, int64_t token)
{
  const double value = get(t, row, col);
  tensor_set(t, row, col, value + f->step);
  const double above = get(t, row, col), high = smooth_loss(f, token);
  tensor_set(t, row, col, value - f->step);
  const double below = get(t, row, col), low = smooth_loss(f, token);
  tensor_set(t, row, col, value);
  return (high - low) / (above - below);
}

static double difference_of_plain(const smooth *f, double *at)
{
  const double value = *at;
  *at = value + f->step;
  const double high = smooth_loss(f, -1);
  *at = value - f->step;
  const double low = smooth_loss(f, -1);
  *at = value;
  return (high - low) / (2 * f->step);
}

/* Roundings are relative to what is summed, so the largest of a gradient stands for it. */
typedef struct worst {
  double largest, error;
} worst;

static void note(worst *w, double got, double want)
{
  w->largest = fmax(w->largest, fabs(want));
  w->error = fmax(w->error, isfinite(got) && isfinite(want) ? fabs(got - want) : INFINITY);
}

static void check_worst(const char *what, worst w, double tolerance)
{
  CHECK_MSG(w.error <= tolerance * (w.largest + 1), "d %s is off by %g, the largest is %g", what, w.error, w.largest);
}

static void check_tensor(const smooth *f, const char *what, tensor *t, const tensor *got, bool a_row_a_token,
                         double tolerance)
{
  worst w = {0, 0};
  if (!got->data || !t->data) return;
  const int64_t rows = a_row_a_token ? spec_present(f->spec) : t->rows;
  rng some = {f->spec->seed + 3};
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < t->cols; c++)
      if (a_row_a_token || t->rows == 1 || rng_below(&some, PART) == 0)
        note(&w, get(got, r, c), difference_of(f, t, r, c, a_row_a_token ? r : -1));
  check_worst(what, w, tolerance);
}

/* Some of all elements, and the biases. */
static void check_weights(const smooth *f, const char *what, host_weights *w, const host_weights *got, double tolerance)
{
  static const char *const names[] = {"gate", "up", "down"};
  rng r = {f->spec->seed};
  for (int part = w->gate_order == CUMOE_UNGATED; part < 3; part++) {
    const int64_t outs = part == PLAIN_DOWN ? w->hidden : w->inter, ins = part == PLAIN_DOWN ? w->inter : w->hidden;
    worst all = {0, 0}, bias = {0, 0};
    for (int64_t e = 0; e < w->experts; e++)
      for (int64_t o = 0; o < outs; o++) {
        const channel_place mine = oracle_channel(w, part, e, o), its = oracle_channel(got, part, e, o);
        tensor own = mine.projection->bias;
        if (own.data && rng_below(&r, 2))
          note(&bias, get(&its.projection->bias, e, its.channel), difference_of(f, &own, e, mine.channel, -1));
        for (int64_t i = 0; i < ins; i++) {
          const place at = oracle_place(got, part, e, o, i);
          if (rng_below(&r, PART)) continue;
          note(&all, get(&at.projection->data, at.row, at.col),
               difference_of_plain(f, w->plain[part] + (e * outs + o) * ins + i));
        }
      }
    check_worst(names[part], all, tolerance);
    check_worst(what, bias, tolerance);
  }
}

static void check_against_differences(const layer_spec *s, layer_inputs *in, const tensor *d_out, const grads *g,
                                      bool whole)
{
  smooth f = {s, in, &g->ids, d_out, whole ? 1 : 0x1p-14, {0}};
  (void)layer_case_of(s, in, &f.desc);
  const int32_t rounded = s->desc.routing.logits_dtype; /* the differences are of logits that are not */
  const double tolerance = whole ? 0 : 0x1p-17 + (rounded ? 16 * unit_roundoff(rounded) : 0);
  check_tensor(&f, "x", &in->x, &g->x, true, tolerance);
  check_tensor(&f, "router_x", &in->router_x, &g->router_x, true, tolerance);
  check_tensor(&f, "logits", &in->logits, &g->logits, true, tolerance);
  check_tensor(&f, "weights of pairs", &in->id_weights, &g->pair_weights, true, tolerance);
  check_tensor(&f, "router_weight", &in->router_weight, &g->router_weight, false, tolerance);
  check_tensor(&f, "router_bias", &in->router_bias, &g->router_bias, false, tolerance);
  check_tensor(&f, "expert_scale", &in->expert_scale, &g->expert_scale, false, tolerance);
  check_tensor(&f, "shared_gate", &in->shared_gate, &g->shared_gate, false, tolerance);
  if (s->residual == RESIDUAL_BIAS) check_tensor(&f, "residual", &in->residual, &g->residual, false, tolerance);
  check_weights(&f, "biases", &in->routed, &g->routed.host, tolerance);
  if (s->desc.shared_inter) check_weights(&f, "biases of the shared expert", &in->shared, &g->shared.host, tolerance);
}

/* ---- two results ----------------------------------------------------------------------------------- */

enum { GRADS = 10 };
static const tensor *grad_of(const grads *g, int i)
{
  const tensor *all[GRADS] = {&g->x,        &g->router_x,     &g->router_weight, &g->router_bias,
                              &g->logits,   &g->pair_weights, &g->expert_scale,  &g->shared_gate,
                              &g->residual, &g->losses};
  return all[i];
}

static void check_equal(const char *what, const tensor *a, const tensor *b)
{
  if (a->data) CHECK_MSG(tensor_equal(a, b), "%s differs", what);
}

static void check_grads_equal(const layer_spec *s, const grads *a, const grads *b)
{
  for (int i = 0; i < GRADS; i++) {
    tensor x = *grad_of(a, i), y = *grad_of(b, i);
    if (x.rows == s->tokens) x.rows = y.rows = spec_present(s);
    check_equal("a gradient", &x, &y);
  }
  for (int i = 0; i < 4; i++) {
    check_equal("d weights", &projection_of((host_weights *)&a->routed.host, i)->data,
                &projection_of((host_weights *)&b->routed.host, i)->data);
    check_equal("d bias", &projection_of((host_weights *)&a->routed.host, i)->bias,
                &projection_of((host_weights *)&b->routed.host, i)->bias);
  }
}

/* ---- groups ---------------------------------------------------------------------------------------- */

static layer_spec small_spec(int feature, int32_t dtype)
{
  layer_spec s = feature_spec(feature, dtype, TOKENS, (uint64_t)feature + 1);
  rng r = {(uint64_t)feature};
  s.desc.hidden = HIDDEN;
  s.desc.inter = INTER;
  if (s.desc.shared_inter) s.desc.shared_inter = 8 + 8 * (feature % 2);
  if (s.desc.num_experts > 100) s.desc.num_experts = 24;
  if (s.router_hidden) s.router_hidden = 24;
  if (s.form.gate_order == CUMOE_GATE_UP_CONCAT) layer_random_form(&r, &s);
  if (feature % 3 == 0) s.form.bias = CUMOE_F32;
  if (s.desc.flags & CUMOE_MOE_UNREDUCED) s.out_scale = 2; /* which rows that are not summed up do not have */
  return s;
}

static tensor d_out_new(const layer_spec *s)
{
  rng r = {s->seed + 5};
  const int64_t width = s->desc.flags & CUMOE_MOE_UNREDUCED ? s->desc.routing.top_k : 1;
  return tensor_normal(&r, s->desc.out_dtype ? s->desc.out_dtype : s->desc.dtype, s->tokens * width, s->desc.hidden, 0,
                       1);
}

static void widen(tensor *t)
{
  if (!t->data || (t->dtype != CUMOE_F16 && t->dtype != CUMOE_BF16)) return;
  const tensor wide = tensor_new(CUMOE_F32, t->rows, t->cols);
  for (int64_t i = 0; i < t->rows * t->cols; i++) tensor_set(&wide, 0, i, tensor_get(t, 0, i));
  *t = wide;
}

static layer_inputs widened(layer_inputs in)
{
  tensor *const all[] = {&in.x,           &in.router_weight, &in.router_bias, &in.logits,
                         &in.shared_gate, &in.residual,      &in.router_x};
  host_weights *const weights[] = {&in.routed, &in.shared};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) widen(all[i]);
  for (int w = 0; w < 2; w++) {
    weights[w]->dtype = CUMOE_F32;
    for (int i = 0; i < 4; i++) widen(&projection_of(weights[w], i)->data), widen(&projection_of(weights[w], i)->bias);
  }
  return in;
}

static void test_differences(cumoe_context context)
{
  const char *name;
  for (int feature = 0; (name = feature_name(feature)) != NULL; feature++) {
    layer_spec s = small_spec(feature, CUMOE_F32);
    case_begin("differences: %s", name);
    layer_inputs in = layer_inputs_new(&s), wide = widened(in); /* a step is not lost in 16 bits of logits */
    const tensor d_out = d_out_new(&s);
    const int32_t fault = expected_fault(&s, &in);
    const wish kept = {.dtype = CUMOE_F32, .kept = true, .d_out = &d_out},
               again = {.dtype = CUMOE_F32, .d_out = &d_out};
    test_poison = 0xff;
    const grads a = run_backward(context, &s, &in, &kept);
    check_fault(context, NULL, fault);
    test_poison = 0x3c;
    const grads b = run_backward(context, &s, &in, &again);
    check_fault(context, NULL, fault);
    check_grads_equal(&s, &a, &b);
    check_against_differences(&s, &wide, &d_out, &a, false);
    case_end();
  }
}

/* ---- 16 bits: the same layer in f32 ---------------------------------------------------------------- */

static void check_near(const char *what, const tensor *got, const tensor *want, int64_t rows, double tolerance)
{
  worst w = {0, 0};
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < got->cols; c++) note(&w, get(got, r, c), get(want, r, c));
  check_worst(what, w, tolerance);
}

static void check_grads_near(const layer_spec *s, const grads *a, const grads *b, double tolerance)
{
  static const char *const names[GRADS] = {"x",       "router_x",     "router_weight", "router_bias", "logits",
                                           "weights", "expert_scale", "shared_gate",   "residual",    "losses"};
  for (int i = 0; i < GRADS; i++) {
    const tensor *got = grad_of(a, i), *want = grad_of(b, i);
    if (got->data) check_near(names[i], got, want, got->rows == s->tokens ? spec_present(s) : got->rows, tolerance);
  }
  for (int i = 0; i < 4; i++) {
    const host_projection *got = projection_of((host_weights *)&a->routed.host, i),
                          *want = projection_of((host_weights *)&b->routed.host, i);
    if (!got->data.data) continue;
    check_near("weights", &got->data, &want->data, got->data.rows, tolerance);
    check_near("biases", &got->bias, &want->bias, got->bias.rows, tolerance);
  }
}

static void test_types(cumoe_context context)
{
  static const int32_t types[] = {CUMOE_BF16, CUMOE_F16};
  const char *name;
  for (int feature = 0; (name = feature_name(feature)) != NULL; feature++) {
    layer_spec s = small_spec(feature, types[feature % 2]);
    case_begin("%s: %s", cumoe_dtype_name((cumoe_dtype)s.desc.dtype), name);
    const layer_inputs in = layer_inputs_new(&s), wide_in = widened(in);
    const tensor d_out = d_out_new(&s);
    tensor wide_out = d_out;
    widen(&wide_out);
    const wish own = {.dtype = feature % 3 ? s.desc.dtype : CUMOE_F32, .kept = true, .d_out = &d_out},
               in_f32 = {.dtype = CUMOE_F32, .d_out = &wide_out};
    const grads got = run_backward(context, &s, &in, &own);
    check_fault(context, NULL, expected_fault(&s, &in));
    layer_spec wide = s;
    wide.desc.dtype = wide.desc.out_dtype = CUMOE_F32;
    const grads want = run_backward(context, &wide, &wide_in, &in_f32);
    check_fault(context, NULL, expected_fault(&s, &in));
    check_grads_near(&s, &got, &want, 8 * unit_roundoff(s.desc.dtype));
    case_end();
  }
}

/* What the forward gives: its routing to the bit, its out but for the rounding of gate and up, which are kept. */
static void test_outputs(cumoe_context context)
{
  const char *name;
  for (int feature = 0; (name = feature_name(feature)) != NULL; feature++) {
    layer_spec s = small_spec(feature, CUMOE_F32);
    session run;
    size_t kept = 0;
    case_begin("%s", name);
    s.optional_outputs = true;
    const layer_inputs in = layer_inputs_new(&s);
    session_open(&run, context, &s, &in);
    CHECK_OK(session_forward(&run));
    const layer_outputs want = session_collect(&run);
    session_reset(&run);
    CHECK_OK(cumoe_moe_kept(run.plan, s.tokens, &kept));
    CHECK_OK(cumoe_moe_forward_keep(run.plan, run.routed, &run.args, workspace_new(context, kept), run.stream));
    run.launches++;
    const layer_outputs got = session_collect(&run);
    check_near("out", &got.out, &want.out, got.out.rows, 1e-5);
    const tensor *const same[][2] = {
        {&got.ids, &want.ids}, {&got.weights, &want.weights}, {&got.counts, &want.counts}, {&got.load, &want.load}};
    for (int i = 0; i < 4; i++)
      if (same[i][1]->data) check_equal("routing", same[i][0], same[i][1]);
    check_fault(context, NULL, expected_fault(&s, &in));
    session_close(&run);
    case_end();
  }
}

/* ---- whole numbers: exactly, wherever the rows are ------------------------------------------------- */

static layer_spec whole_spec(pattern p, int64_t tokens, int form)
{
  layer_spec s = layer_spec_new(CUMOE_F32, tokens, HIDDEN, 24);
  rng r = {(uint64_t)(form * 100 + (int)p)};
  s.input = INPUT_IDS;
  s.pattern = p;
  s.seed = (uint64_t)(tokens + form * 40) + 1;
  s.desc.act = CUMOE_ACT_IDENTITY;
  s.desc.routing.flags = form % 2 ? CUMOE_ROUTE_WEIGHT_ON_INPUT : 0;
  if (form >= 2) s.desc.flags = CUMOE_MOE_UNGATED;
  layer_random_form(&r, &s);
  s.form.bias = form == 2 ? 0 : CUMOE_F32;
  return s;
}

static layer_inputs whole_inputs(const layer_spec *s)
{
  static const double weights[] = {2, 3, -2, 4}; /* no step leads to 0, which drops */
  rng r = {s->seed};
  layer_inputs in = layer_inputs_new(s);
  in.x = tensor_integers(&r, s->desc.dtype, s->tokens, s->desc.hidden, 2);
  weights_fill(&r, &in.routed, FILL_INTEGERS);
  oracle_prepare(&in.routed);
  for (int64_t i = 0; i < in.id_weights.rows * in.id_weights.cols; i++)
    tensor_set(&in.id_weights, 0, i, weights[rng_below(&r, 4)]);
  return in;
}

static void check_added(const tensor *sum, const tensor *alone)
{
  for (int64_t i = 0; sum->data && i < sum->rows * sum->cols; i++)
    if (!CHECK_MSG(get(sum, 0, i) == before(i) + get(alone, 0, i), "%g, must be %g + %g", get(sum, 0, i), before(i),
                   get(alone, 0, i)))
      return;
}

/* Linear in x, without biases: <d out, layer(x)> = <d x, x>. */
static void check_adjoint(cumoe_context context, const layer_spec *s, const layer_inputs *in, const tensor *d_out,
                          const tensor *d_x)
{
  const layer_outputs o = run_layer(context, s, in);
  double out = 0, x = 0;
  for (int64_t i = 0; i < s->tokens * HIDDEN; i++) out += get(d_out, 0, i) * get(&o.out, 0, i);
  for (int64_t i = 0; i < s->tokens * HIDDEN; i++) x += get(d_x, 0, i) * get(&in->x, 0, i);
  CHECK_MSG(out == x, "<d out, out> is %g, <d x, x> %g", out, x);
}

static void run_whole(cumoe_context context, pattern p, int64_t tokens, int form)
{
  const layer_spec s = whole_spec(p, tokens, form);
  case_begin("whole numbers: %s, T %d, form %d", pattern_name(p), (int)tokens, form);
  layer_inputs in = whole_inputs(&s);
  rng r = {s.seed + 9};
  const tensor d_out = tensor_integers(&r, CUMOE_F32, s.tokens, HIDDEN, 2);
  const wish plain = {.dtype = CUMOE_F32, .d_out = &d_out, .pointers = form == 1},
             onto = {.dtype = CUMOE_F32, .d_out = &d_out, .accumulate = true, .kept = true};
  const grads a = run_backward(context, &s, &in, &plain), b = run_backward(context, &s, &in, &onto);
  check_fault(context, NULL, expected_fault(&s, &in));
  if (tokens > 0) check_against_differences(&s, &in, &d_out, &a, true);
  for (int i = 0; i < 4; i++) {
    const host_projection *sum = projection_of((host_weights *)&b.routed.host, i),
                          *alone = projection_of((host_weights *)&a.routed.host, i);
    check_added(&sum->data, &alone->data);
    check_added(&sum->bias, &alone->bias);
    if (sum->data.data && (p == PATTERN_LAST || p == PATTERN_NONE)) /* expert 0 has no rows */
      CHECK(signbit(get(&sum->data, 0, 3)) && signbit(get(&sum->bias, 0, 3)) && !signbit(get(&alone->data, 0, 3)));
  }
  if (form == 2 && tokens > 0) check_adjoint(context, &s, &in, &d_out, &a.x);
  case_end();
}

static void test_whole(cumoe_context context)
{
  static const int64_t tokens[] = {1, 6, 19, 0};
  for (int p = 0; p < PATTERN_COUNT; p++)
    for (int form = 0; form < 4; form++) run_whole(context, (pattern)p, tokens[(p + form) % 4], form);
}

/* ---- any number of threads; one token's NaN -------------------------------------------------------- */

static layer_spec wide_spec(void)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 37, 72, 40);
  s.input = INPUT_ROUTER;
  s.desc.shared_inter = 24;
  s.shared_gate = s.expert_scale = s.router_bias = true;
  s.residual = RESIDUAL_BIAS;
  s.form.bias = CUMOE_F32;
  s.optional_outputs = true;
  return s;
}

static void test_threads(void)
{
  static const int32_t threads[] = {1, 2, 5};
  const layer_spec s = wide_spec();
  case_begin("1, 2 and 5 threads");
  const layer_inputs in = layer_inputs_new(&s);
  const tensor d_out = d_out_new(&s);
  const wish w = {.dtype = CUMOE_BF16, .d_out = &d_out, .balance = .1f, .z = .01f};
  grads g[3];
  for (int i = 0; i < 3; i++) {
    cumoe_context context = NULL;
    const cumoe_context_config config = {.size = sizeof config, .cpu_threads = threads[i]};
    CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &context));
    g[i] = run_backward(context, &s, &in, &w);
    if (i > 0) check_grads_equal(&s, &g[0], &g[i]);
  }
  case_end();
}

static void check_sum_of_none(const tensor *sum, bool added)
{
  for (int64_t i = 0; sum->data && i < sum->rows * sum->cols; i++)
    if (!CHECK_MSG(get(sum, 0, i) == (added ? before(i) : 0), "%g at %d", get(sum, 0, i), (int)i)) return;
}

/* A rank without tokens: sums over them are zeros, or what they are added to. */
static void test_no_tokens(cumoe_context context)
{
  for (int added = 0; added < 2; added++) {
    layer_spec s = wide_spec();
    s.tokens = 0;
    case_begin("no tokens%s", added ? ", added" : "");
    const layer_inputs in = layer_inputs_new(&s);
    const tensor d_out = d_out_new(&s);
    const wish w = {.dtype = CUMOE_F32, .d_out = &d_out, .balance = .1f, .z = .01f, .accumulate = added};
    grads g = run_backward(context, &s, &in, &w);
    const tensor *sums[] = {&g.router_weight, &g.router_bias, &g.expert_scale, &g.shared_gate, &g.residual};
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) check_sum_of_none(sums[i], added);
    for (int i = 0; i < 4; i++) {
      const host_projection *routed = projection_of((host_weights *)&g.routed.host, i),
                            *shared = projection_of((host_weights *)&g.shared.host, i);
      const tensor *parts[] = {&routed->data, &routed->bias, &shared->data, &shared->bias};
      for (int j = 0; j < 4; j++) check_sum_of_none(parts[j], added);
    }
    CHECK(g.losses.data && get(&g.losses, 0, 0) == 0 && get(&g.losses, 0, 1) == 0);
    case_end();
  }
}

static void check_other_tokens(const tensor *a, const tensor *b, int64_t token)
{
  for (int64_t t = 0; t < a->rows; t++) CHECK_MSG((t == token) != tensor_row_equal(a, b, t), "token %d", (int)t);
}

static void test_nan(cumoe_context context)
{
  enum { TOKEN = 11 };
  const layer_spec s = wide_spec();
  const layer_inputs in = layer_inputs_new(&s);
  const tensor d_out = d_out_new(&s), bad_out = tensor_copy(&d_out);
  tensor_set(&bad_out, TOKEN, 3, NAN);
  const wish good = {.dtype = CUMOE_F32, .d_out = &d_out}, bad = {.dtype = CUMOE_F32, .d_out = &bad_out};
  case_begin("a NaN in one token's d out, or in its x");
  const grads a = run_backward(context, &s, &in, &good), b = run_backward(context, &s, &in, &bad);
  layer_inputs bad_in = in;
  bad_in.x = tensor_copy(&in.x);
  tensor_set(&bad_in.x, TOKEN, 5, NAN);
  const grads c = run_backward(context, &s, &bad_in, &good);
  check_fault(context, NULL, CUMOE_FAULT_NAN_LOGIT);
  check_other_tokens(&a.x, &b.x, TOKEN);
  check_other_tokens(&a.x, &c.x, TOKEN);
  check_other_tokens(&a.logits, &b.logits, TOKEN);
  for (int e = 0; e < s.desc.num_experts; e++) {
    bool chosen = false;
    for (int j = 0; j < s.desc.routing.top_k; j++) chosen |= get(&a.ids, TOKEN, j) == e;
    const place at = oracle_place(&b.routed.host, PLAIN_DOWN, e, 3, 0);
    CHECK_MSG(isnan(get(&at.projection->data, at.row, at.col)) == chosen, "expert %d", e);
  }
  case_end();
}

static bool gradient_is_finite(const layer_spec *s, const grads *g, int which, int64_t expert)
{
  const int64_t n = which == PLAIN_DOWN ? s->desc.hidden : s->desc.inter,
                k = which == PLAIN_DOWN ? s->desc.inter : s->desc.hidden;
  bool finite = true;
  for (int64_t i = 0; i < n * k; i++) {
    const place at = oracle_place(&g->routed.host, which, expert, i / k, i % k);
    finite &= isfinite(get(&at.projection->data, at.row, at.col)) != 0;
  }
  return finite;
}

/* Of a token that is not finite, the expert of a pair of weight 0 has no part. */
static void test_nan_dropped(cumoe_context context)
{
  enum { TOKEN = 11 };
  for (int i = 0; i < 3; i++) {
    layer_spec s = layer_spec_new(case_dtypes[i], 70, 264, 136);
    s.input = INPUT_IDS;
    s.desc.num_experts = 4;
    s.desc.routing.top_k = 2;
    case_begin("%s: a NaN in one token's x, Inf in its d out, one of its pairs of weight 0",
               cumoe_dtype_name((cumoe_dtype)s.desc.dtype));
    const layer_inputs in = layer_inputs_new(&s);
    const tensor d_out = d_out_new(&s);
    const wish w = {.dtype = s.desc.dtype, .d_out = &d_out};
    const int64_t kept = (int64_t)get(&in.ids, TOKEN, 0), dropped = (int64_t)get(&in.ids, TOKEN, 1);
    CHECK(kept >= 0 && dropped >= 0 && kept != dropped);
    tensor_set(&in.id_weights, TOKEN, 1, 0);
    tensor_set(&in.x, TOKEN, 5, NAN);
    tensor_set(&d_out, TOKEN, 3, INFINITY);
    const grads g = run_backward(context, &s, &in, &w);
    for (int which = PLAIN_UP; which <= PLAIN_DOWN; which++) {
      CHECK_MSG(!gradient_is_finite(&s, &g, which, kept), "projection %d", which);
      CHECK_MSG(gradient_is_finite(&s, &g, which, dropped), "projection %d", which);
    }
    case_end();
  }
}

/* ---- logits that are not finite; what was kept and is no longer ------------------------------------- */

static void test_not_finite(cumoe_context context)
{
  static const int32_t scores[] = {CUMOE_SCORE_SOFTMAX, CUMOE_SCORE_SIGMOID, CUMOE_SCORE_SQRT_SOFTPLUS,
                                   CUMOE_SCORE_SOFTMAX};
  for (int i = 0; i < 4; i++) {
    layer_spec s = layer_spec_new(CUMOE_F32, 4, HIDDEN, INTER);
    s.input = INPUT_LOGITS;
    s.optional_outputs = true;
    s.desc.routing.score = scores[i];
    s.desc.routing.top_k = 3;
    s.desc.routing.flags = i == 3 ? CUMOE_ROUTE_SCORE_AFTER_TOPK : CUMOE_ROUTE_RENORMALIZE;
    case_begin("logits that are not finite: score %d, flags %u", scores[i], s.desc.routing.flags);
    layer_inputs in = layer_inputs_new(&s);
    for (int e = 0; e < 6; e++) tensor_set(&in.logits, 0, e, -INFINITY); /* one of them is chosen */
    tensor_set(&in.logits, 1, 2, NAN);
    for (int e = 0; e < 6; e++) tensor_set(&in.logits, 2, e, NAN);
    if (scores[i] == CUMOE_SCORE_SIGMOID) tensor_set(&in.logits, 1, 4, INFINITY);
    const tensor d_out = d_out_new(&s);
    const wish w = {.dtype = CUMOE_F32, .d_out = &d_out, .z = .1f};
    const wish plain = {.dtype = CUMOE_F32, .d_out = &d_out};
    const grads g = run_backward(context, &s, &in, &plain), with_z = run_backward(context, &s, &in, &w);
    check_fault(context, NULL, CUMOE_FAULT_NAN_LOGIT);
    smooth f = {&s, &in, &g.ids, &d_out, 0x1p-14, {0}};
    (void)layer_case_of(&s, &in, &f.desc);
    worst d = {0, 0};
    for (int64_t t = 0; t < s.tokens; t++)
      for (int64_t e = 0; e < 8; e++) {
        const bool finite = isfinite(get(&in.logits, t, e));
        if (finite) note(&d, get(&g.logits, t, e), difference_of(&f, &in.logits, t, e, t));
        if (!finite) CHECK(get(&g.logits, t, e) == 0 && get(&with_z.logits, t, e) == 0);
        if (t != 1) CHECK(isfinite(get(&with_z.logits, t, e)));
      }
    check_worst("logits", d, 0x1p-17);
    case_end();
  }
}

/* Whatever lies there, nothing outside is reached, which the sanitizers see. */
static void test_hostile_kept(cumoe_context context)
{
  layer_spec s = wide_spec();
  case_begin("kept bytes that are none");
  const layer_inputs in = layer_inputs_new(&s);
  const tensor d_out = d_out_new(&s);
  session run;
  size_t kept = 0, bytes = 0;
  session_open(&run, context, &s, &in);
  CHECK_OK(cumoe_moe_kept(run.plan, s.tokens, &kept));
  CHECK_OK(cumoe_moe_backward_workspace(run.plan, s.tokens, 1, &bytes));
  const cumoe_view_mut room = workspace_new(context, kept);
  const wish w = {.dtype = CUMOE_BF16};
  weight_grads d = {0};
  weight_grads_open(&d, context, &w, &s.desc, s.desc.num_experts, s.desc.inter, other_form(&s));
  const cumoe_moe_grads to = {.size = sizeof to,
                              .balance = 1,
                              .d_out = device_put(context, &d_out, 8),
                              .kept = cumoe_const(room),
                              .d_weights = d.bound,
                              .d_x = device_new(context, CUMOE_BF16, s.tokens, s.desc.hidden, 8),
                              .workspace = workspace_new(context, bytes)};
  rng r = {7};
  const tensor noise = tensor_new(CUMOE_U8, 1, (int64_t)kept);
  for (int round = 0; round < 4; round++) {
    for (size_t i = 0; i < kept; i++)
      noise.data[i] = (unsigned char)(round == 0 ? 0x7f : round == 1 ? 0xff : rng_below(&r, round == 2 ? 256 : 2));
    device_set(context, room, &noise);
    CHECK_OK(cumoe_moe_backward(run.plan, run.routed, &run.args, &to, NULL));
    check_guards(context, "d x", to.d_x);
    check_guards(context, "workspace", to.workspace);
    CHECK_OK(cumoe_fault_clear(context, NULL));
  }
  weight_grads_take(&d, context);
  weight_grads_close(&d);
  session_close(&run);
  case_end();
}

/* ---- CUDA beside the CPU device -------------------------------------------------------------------- */

/* Few numbers of a row are not 0, so that what is rounded to 16 bits is a whole number that these have, or rounded once
 * on both devices. */
static tensor few_integers(rng *r, int32_t dtype, int64_t rows, int64_t cols)
{
  const tensor t = tensor_new(dtype, rows, cols);
  for (int64_t i = 0; i < rows; i++)
    for (int n = 0; n < 3; n++) tensor_set(&t, i, rng_below(r, cols), (double)rng_below(r, 5) - 2);
  return t;
}

static cumoe_context cpu_new(void)
{
  cumoe_context cpu = NULL;
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &cpu));
  return cpu;
}

static void run_whole_bits(cumoe_context context, cumoe_context cpu, pattern p, int64_t tokens, int form, int32_t dtype,
                           bool own_form)
{
  layer_spec s = whole_spec(p, tokens, form);
  s.desc.dtype = dtype;
  s.desc.hidden = 264;
  s.desc.inter = 136;
  s.desc.num_experts = form == 3 ? 40 : 8;
  s.form.per_expert = form == 1 && p == PATTERN_UNIFORM;
  s.device_count = p == PATTERN_ZIPF;
  s.device_tokens = (int32_t)(tokens * 3 / 4);
  case_begin("bit by bit: %s, %s, T %d, form %d", cumoe_dtype_name((cumoe_dtype)dtype), pattern_name(p), (int)tokens,
             form);
  layer_inputs in = whole_inputs(&s);
  rng r = {s.seed + 9};
  in.x = few_integers(&r, dtype, tokens, s.desc.hidden);
  const tensor d_out = few_integers(&r, dtype, tokens, s.desc.hidden);
  const wish w = {.dtype = form % 2 ? CUMOE_F32 : dtype,
                  .d_out = &d_out,
                  .kept = form < 2,
                  .accumulate = form == 2,
                  .own_form = own_form,
                  .pointers = form == 3 && p == PATTERN_ONE};
  const grads got = run_backward(context, &s, &in, &w), want = run_backward(cpu, &s, &in, &w);
  check_fault(context, NULL, expected_fault(&s, &in));
  CHECK_OK(cumoe_fault_clear(cpu, NULL));
  check_grads_equal(&s, &got, &want);
  case_end();
}

static void test_whole_bits(cumoe_context context)
{
  static const int32_t types[] = {CUMOE_BF16, CUMOE_F32, CUMOE_F16};
  static const int64_t tokens[] = {300, 1, 70, 130};
  cumoe_context cpu = cpu_new();
  for (int p = 0; p < PATTERN_COUNT; p++)
    for (int form = 0; form < 4; form++)
      run_whole_bits(context, cpu, (pattern)p, tokens[(p + form) % 4], form, types[(p + form) % 3], p % 2 == 0);
  CHECK_OK(cumoe_context_destroy(cpu));
}

/* Of rows times weights, where gate and up are two matrices; the router's has f32 beside bf16. */
static void run_product_row(cumoe_context context, cumoe_context cpu, const cumoe_variant_info *v, int i)
{
  layer_spec s = whole_spec(i % 2 ? PATTERN_ZIPF : PATTERN_UNIFORM, 70 + 130 * i, i % 2);
  s.desc.dtype = v->x ? v->x : case_dtypes[i % 3];
  s.desc.hidden = 264;
  s.desc.inter = 200;
  s.form.gate_order = CUMOE_GATE_UP_SEPARATE;
  s.form.up_major = !strcmp(v->major, "K") ? CUMOE_IN_OUT : !strcmp(v->major, "N") ? CUMOE_OUT_IN : 1 + i % 2;
  s.form.per_expert = i == 3;
  case_begin("%s: %d", v->name, i);
  layer_inputs in = whole_inputs(&s);
  rng r = {s.seed + 9};
  in.x = few_integers(&r, s.desc.dtype, s.tokens, s.desc.hidden);
  const tensor d_out = few_integers(&r, s.desc.dtype, s.tokens, s.desc.hidden);
  const wish w = {.dtype = s.desc.dtype, .d_out = &d_out, .kept = true};
  const grads got = run_backward(context, &s, &in, &w), want = run_backward(cpu, &s, &in, &w);
  check_grads_equal(&s, &got, &want);
  case_end();
}

static void test_product_rows(cumoe_context context)
{
  cumoe_context cpu = cpu_new();
  for (int32_t index = 0; index < cumoe_variant_count(); index++) {
    cumoe_variant_info v = {.size = sizeof v};
    CHECK_OK(cumoe_variant_get(context, index, &v));
    if (strcmp(v.op, "rows_product") || !v.usable || v.w != v.x) continue;
    CHECK_OK(cumoe_variant_force(context, index));
    for (int i = 0; i < 4; i++) run_product_row(context, cpu, &v, i);
    CHECK_OK(cumoe_variant_force(context, -1));
  }
  CHECK_OK(cumoe_context_destroy(cpu));
}

/* Tiles end inside, and every major and order of halves is there that all rows serve; last, more units than a GPU has
 * clusters. */
static void run_gradient_row(cumoe_context context, cumoe_context cpu, const cumoe_variant_info *v, int i)
{
  static const int32_t orders[] = {CUMOE_GATE_UP_CONCAT, CUMOE_GATE_UP_SEPARATE, CUMOE_UP_GATE_CONCAT,
                                   CUMOE_UP_GATE_INTERLEAVED};
  const pattern p = (pattern)(i % PATTERN_COUNT);
  layer_spec s = whole_spec(p, 140 + i * 7, i / 3 % 2);
  s.desc.dtype = v->x ? v->x : CUMOE_F16;
  s.desc.hidden = i < 8 ? 264 : 392;
  s.desc.inter = i < 8 ? 200 : 24;
  s.desc.num_experts = i < 8 ? 6 : 90;
  s.form = (weights_form){.gate_order = orders[i % 4], .up_major = 1 + i / 4 % 2, .down_major = 1 + i / 2 % 2};
  case_begin("%s: %s, %d", v->name, pattern_name(p), i);
  layer_inputs in = whole_inputs(&s);
  rng r = {s.seed + 9};
  in.x = few_integers(&r, s.desc.dtype, s.tokens, s.desc.hidden);
  const tensor d_out = few_integers(&r, s.desc.dtype, s.tokens, s.desc.hidden);
  const wish w = {.dtype = v->y    ? v->y
                           : i % 2 ? CUMOE_F32
                                   : s.desc.dtype,
                  .d_out = &d_out,
                  .kept = true,
                  .accumulate = i % 3 == 1,
                  .own_form = true};
  const grads got = run_backward(context, &s, &in, &w), want = run_backward(cpu, &s, &in, &w);
  CHECK_OK(cumoe_fault_clear(context, NULL));
  CHECK_OK(cumoe_fault_clear(cpu, NULL));
  check_grads_equal(&s, &got, &want);
  case_end();
}

/* Kernels for gradients of weights, forced one by one. */
static void test_gradient_rows(cumoe_context context)
{
  const seed_range seeds = test_seeds(10);
  cumoe_context cpu = cpu_new();
  for (int32_t index = 0; index < cumoe_variant_count(); index++) {
    cumoe_variant_info v = {.size = sizeof v};
    CHECK_OK(cumoe_variant_get(context, index, &v));
    if (strcmp(v.op, "weight_gradient") || !v.usable || v.w != v.x) continue;
    CHECK_OK(cumoe_variant_force(context, index));
    for (int i = seeds.first; i < seeds.end; i++) run_gradient_row(context, cpu, &v, i);
    CHECK_OK(cumoe_variant_force(context, -1));
  }
  CHECK_OK(cumoe_context_destroy(cpu));
}

/*
 * Both devices round h, w h, d h and d z to dtype, one after the other, at most four times from the operands to a
 * result that is itself rounded; each rounding is half an ulp of one term. Logits that differ in their last bits change
 * weights by less. So 4 u of the largest for the CPU's part, and 8 u for both; sums in f32 are far below in 16 bits,
 * and of f32 the depth (at most 264 + 136 terms in f32) takes their place.
 */
static double device_tolerance(int32_t dtype)
{
  return dtype == CUMOE_F32 ? 0x1p-16 : 8 * unit_roundoff(dtype);
}

/* The row of up that a row of up_keep stands for, or -1. */
static int32_t up_beside(cumoe_context context, const cumoe_variant_info *keep)
{
  for (int32_t index = 0; index < cumoe_variant_count(); index++) {
    cumoe_variant_info v = {.size = sizeof v};
    CHECK_OK(cumoe_variant_get(context, index, &v));
    if (!strcmp(v.op, "up") && !strcmp(v.form, keep->form) && v.x == keep->x && v.w == keep->w &&
        !strcmp(v.major, keep->major))
      return index;
  }
  return -1;
}

/* Tiles end inside; gate or up is the first in memory, or neither; an activation with bounds and biases. */
static layer_spec kept_spec(const cumoe_variant_info *v, int i)
{
  static const int32_t orders[] = {CUMOE_GATE_UP_CONCAT, CUMOE_UP_GATE_CONCAT, CUMOE_GATE_UP_SEPARATE,
                                   CUMOE_UP_GATE_CONCAT, CUMOE_GATE_UP_INTERLEAVED};
  const int32_t major = !strcmp(v->major, "K") ? CUMOE_OUT_IN : CUMOE_IN_OUT;
  layer_spec s = layer_spec_new(v->x, i == 1 ? 700 : 130 + 70 * i, 264, 136);
  s.input = INPUT_ROUTER;
  s.seed = (uint64_t)i + 1;
  s.desc.act = i % 2 ? CUMOE_ACT_SWIGLU_OAI : CUMOE_ACT_SILU;
  s.desc.act_limit = i == 1 ? 1 : 0;
  s.desc.routing.top_k = 1 + i % 3;
  s.desc.num_experts = i == 1 ? 3 : 8;
  s.desc.shared_inter = i == 2 ? 72 : 0;
  s.form = (weights_form){.gate_order = orders[i], .up_major = major, .down_major = CUMOE_OUT_IN};
  s.form.bias = i % 3 == 1 ? CUMOE_F32 : 0;
  s.optional_outputs = true;
  s.device_count = i == 3;
  s.device_tokens = 150;
  return s;
}

/* Two runs give the same bits, and the CPU device, given the same experts, what the first gives. */
static void check_beside_cpu(cumoe_context context, cumoe_context cpu, const layer_spec *s, const layer_inputs *in,
                             const wish *one, const wish *other)
{
  test_poison = 0xff;
  const grads got = run_backward(context, s, in, one);
  test_poison = 0x3c;
  const grads again = run_backward(context, s, in, other);
  check_grads_equal(s, &got, &again);
  layer_spec chosen = *s;
  layer_inputs given = *in;
  chosen.chosen = !routed_by_caller(s);
  if (chosen.chosen) given.ids = got.ids;
  const grads want = run_backward(cpu, &chosen, &given, one);
  check_grads_near(s, &got, &want, device_tolerance(s->desc.dtype));
}

/* The forward's bits, as up and down are the forward's. */
static void check_forward_out(cumoe_context context, const layer_spec *s, const layer_inputs *in)
{
  session run;
  size_t kept = 0;
  session_open(&run, context, s, in);
  CHECK_OK(session_forward(&run));
  const layer_outputs want = session_collect(&run);
  session_reset(&run);
  CHECK_OK(cumoe_moe_kept(run.plan, s->tokens, &kept));
  const cumoe_view_mut room = workspace_new(context, kept);
  CHECK_OK(cumoe_moe_forward_keep(run.plan, run.routed, &run.args, room, run.stream));
  run.launches++;
  const layer_outputs got = session_collect(&run);
  check_guards(context, "kept", room);
  check_equal("out", &got.out, &want.out);
  session_close(&run);
}

static void run_keep_row(cumoe_context context, cumoe_context cpu, const cumoe_variant_info *v, int i)
{
  const layer_spec s = kept_spec(v, i);
  case_begin("%s: %d", v->name, i);
  const layer_inputs in = layer_inputs_new(&s);
  const tensor d_out = d_out_new(&s);
  const wish kept = {.dtype = s.desc.dtype, .d_out = &d_out, .kept = true, .own_form = true},
             again = {.dtype = s.desc.dtype, .d_out = &d_out, .own_form = true};
  if (s.form.gate_order != CUMOE_GATE_UP_INTERLEAVED) check_forward_out(context, &s, &in);
  check_beside_cpu(context, cpu, &s, &in, &kept, &again);
  case_end();
}

/* The kernel is what forward_keep launches: one that does not serve is refused. */
static void check_keep_is_asked(cumoe_context context, const cumoe_variant_info *v)
{
  cumoe_variant_info other = *v;
  session run;
  size_t kept = 0;
  case_begin("%s is asked for", v->name);
  other.major = !strcmp(v->major, "K") ? "N" : "K";
  CHECK_OK(cumoe_variant_force(context, up_beside(context, &other)));
  const layer_spec s = kept_spec(&other, 0);
  const layer_inputs in = layer_inputs_new(&s);
  session_open(&run, context, &s, &in);
  CHECK_OK(cumoe_moe_kept(run.plan, s.tokens, &kept));
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED,
               cumoe_moe_forward_keep(run.plan, run.routed, &run.args, workspace_new(context, kept), run.stream));
  session_close(&run);
  case_end();
}

/* SMALL in the environment: as in test_near_cpu. */
static void test_keep_rows(cumoe_context context)
{
  cumoe_context cpu = cpu_new();
  for (int32_t index = 0; index < cumoe_variant_count(); index++) {
    cumoe_variant_info v = {.size = sizeof v};
    CHECK_OK(cumoe_variant_get(context, index, &v));
    if (strcmp(v.op, "up_keep") || !v.usable) continue;
    CHECK_OK(cumoe_variant_force(context, index));
    check_keep_is_asked(context, &v);
    CHECK_OK(cumoe_variant_force(context, up_beside(context, &v)));
    for (int i = 0; i < (getenv("SMALL") ? 3 : 5); i++) run_keep_row(context, cpu, &v, i);
    CHECK_OK(cumoe_variant_force(context, -1));
  }
  CHECK_OK(cumoe_context_destroy(cpu));
}

/* Experts of one row tile, of two, of three, and channel tiles of an odd and an even number, whose last ends inside;
 * the activation of d h alone, and by another kernel; one with bounds; up first. d out of tokens, and of pairs; weights
 * of pairs that multiply h, or nothing, or x, where d h's kernel does not serve. The last: experts so wide that
 * operands are copied, not gathered. */
enum { DRAWN_SPECS = 5 };

static layer_spec drawn_spec(const cumoe_variant_info *v, int i)
{
  const int32_t major = !strcmp(v->major, "N") ? CUMOE_OUT_IN : CUMOE_IN_OUT; /* the product's are transposed */
  const bool activated = !strcmp(v->op, "down_activated");
  layer_spec s = layer_spec_new(v->x, 200 + 250 * (i % 3), 264, i % 2 ? 264 : 136);
  s.desc.act = !activated ? CUMOE_ACT_GELU_TANH : i % 2 ? CUMOE_ACT_SWIGLU_OAI : CUMOE_ACT_SILU;
  s.desc.act_limit = activated && i % 2 ? 1 : 0;
  s.input = INPUT_ROUTER;
  s.seed = (uint64_t)i + 1;
  s.desc.routing.top_k = 2;
  s.desc.num_experts = 3;
  if (activated && i == 2) s.desc.flags |= CUMOE_MOE_UNREDUCED;
  if (activated && i == 3) s.desc.routing.flags |= CUMOE_ROUTE_WEIGHT_ON_INPUT;
  if (activated && i == 4) s.desc.inter = 4104;
  s.form = (weights_form){.gate_order = activated && i ? CUMOE_UP_GATE_CONCAT : CUMOE_GATE_UP_CONCAT,
                          .up_major = major,
                          .down_major = major};
  s.optional_outputs = true;
  s.device_count = i == 1;
  s.device_tokens = 401;
  return s;
}

static bool draws(const cumoe_variant_info *v)
{
  return v->usable && (!strcmp(v->op, "down_drawn") || !strcmp(v->op, "down_activated"));
}

/* SMALL in the environment: without the last, for kernels that the CPU runs. */
static void test_drawn_rows(cumoe_context context)
{
  const seed_range specs = test_seeds(getenv("SMALL") ? DRAWN_SPECS - 1 : DRAWN_SPECS);
  cumoe_context cpu = cpu_new();
  for (int32_t index = 0; index < cumoe_variant_count(); index++) {
    cumoe_variant_info v = {.size = sizeof v};
    CHECK_OK(cumoe_variant_get(context, index, &v));
    for (int i = specs.first; i < specs.end && draws(&v); i++) {
      const layer_spec s = drawn_spec(&v, i);
      case_begin("%s: %d", v.name, i);
      const layer_inputs in = layer_inputs_new(&s);
      const tensor d_out = d_out_new(&s);
      const wish kept = {
          .dtype = s.desc.dtype, .d_out = &d_out, .kept = true, .own_form = true, .without_weights = i == 3};
      check_beside_cpu(context, cpu, &s, &in, &kept, &kept);
      case_end();
    }
  }
  CHECK_OK(cumoe_context_destroy(cpu));
}

/* What training has: a router, shared experts with a gate, every activation. */
static layer_spec trained_spec(int i, int32_t dtype)
{
  layer_spec s = layer_spec_new(dtype, 200 + 90 * i, 264, 136);
  rng r = {(uint64_t)i};
  s.input = INPUT_ROUTER;
  s.seed = (uint64_t)i + 1;
  s.desc.act = i % 7;
  s.desc.routing.top_k = 1 + i % 5;
  s.desc.num_experts = i % 3 ? 8 : 24;
  s.desc.shared_inter = i % 2 ? 72 : 0;
  s.shared_gate = i % 4 == 1;
  if (s.desc.act == CUMOE_ACT_SWIGLU_OAI) s.desc.act_limit = 1;
  layer_random_form(&r, &s);
  s.form.bias = i % 3 == 1 ? CUMOE_F32 : 0;
  s.optional_outputs = true;
  s.device_count = i % 3 == 2;
  s.device_tokens = 150;
  return s;
}

/* SMALL in the environment: a third of them, for kernels that the CPU runs. */
static void test_near_cpu(cumoe_context context)
{
  cumoe_context cpu = cpu_new();
  for (int i = 0; i < (getenv("SMALL") ? 3 : 9); i++) {
    const layer_spec s = trained_spec(i, case_dtypes[i % 3]);
    case_begin("CUDA and CPU: %s, activation %d, k %d", cumoe_dtype_name((cumoe_dtype)s.desc.dtype), s.desc.act,
               s.desc.routing.top_k);
    const layer_inputs in = layer_inputs_new(&s);
    const tensor d_out = d_out_new(&s);
    const wish w = {.dtype = i % 2 ? CUMOE_F32 : s.desc.dtype,
                    .d_out = &d_out,
                    .balance = .01f,
                    .z = .001f,
                    .kept = i % 2,
                    .own_form = i % 4 < 2};
    check_beside_cpu(context, cpu, &s, &in, &w, &w);
    case_end();
  }
  CHECK_OK(cumoe_context_destroy(cpu));
}

/* ---- so many rows that x is copied into their order ------------------------------------------------- */

/* Each of what a forward may have, and from TOGETHER on all of it: of sums over slots, of slots, and of slots that no
 * weight is in. */
enum { TOGETHER = 5, MANY_SPECS = 8 };

static layer_spec many_spec(int i)
{
  const bool all = i >= TOGETHER;
  layer_spec s = layer_spec_new(CUMOE_BF16, 1100, HIDDEN, INTER);
  s.seed = (uint64_t)i + 1;
  s.input = INPUT_LOGITS;
  s.optional_outputs = true;
  s.pad = 1;
  s.desc.num_experts = 6;
  s.desc.routing.top_k = 4;
  if (all || i == 0) s.desc.routing.flags |= CUMOE_ROUTE_WEIGHT_ON_INPUT;
  if (all || i == 1) s.desc.act = CUMOE_ACT_SWIGLU_OAI, s.desc.act_limit = 7, s.form.bias = CUMOE_F32;
  if (all || i == 2) s.desc.local_experts = 2, s.expert_map = true;
  if (all || i == 3) s.device_count = true, s.device_tokens = 1037;
  if (all || i == 4) s.form.per_expert = true, s.form.gate_order = CUMOE_GATE_UP_SEPARATE;
  if (i > TOGETHER) s.desc.flags |= CUMOE_MOE_UNREDUCED;
  if (i > TOGETHER + 1) s.desc.routing.flags = 0;
  return s;
}

/* In 16 bits, beside the CPU device's in f32; and those, of few experts, against differences. */
static void run_many(cumoe_context context, cumoe_context cpu, int i)
{
  const layer_spec s = many_spec(i);
  layer_spec wide = s;
  wide.desc.dtype = wide.desc.out_dtype = CUMOE_F32;
  case_begin("%d pairs, feature %d", (int)s.tokens * s.desc.routing.top_k, i);
  const layer_inputs in = layer_inputs_new(&s);
  layer_inputs wide_in = widened(in);
  const tensor d_out = d_out_new(&s);
  tensor wide_out = d_out;
  widen(&wide_out);
  const wish in_f32 = {.dtype = CUMOE_F32, .d_out = &wide_out};
  const grads want = run_backward(cpu, &wide, &wide_in, &in_f32);
  for (int kept = 0; kept < 2; kept++) {
    const wish own = {.dtype = s.desc.dtype, .d_out = &d_out, .kept = kept};
    const grads got = run_backward(context, &s, &in, &own);
    check_grads_near(&s, &got, &want, 8 * unit_roundoff(s.desc.dtype));
  }
  if (!on_device(context) && i >= TOGETHER) check_against_differences(&wide, &wide_in, &wide_out, &want, false);
  case_end();
}

static void test_many_rows(cumoe_context context)
{
  cumoe_context cpu = cpu_new();
  const seed_range specs = test_seeds(MANY_SPECS);
  for (int i = specs.first; i < specs.end; i++) run_many(context, cpu, i);
  CHECK_OK(cumoe_context_destroy(cpu));
}

/* Where a rounding decides between two slopes, or two logits, the devices may differ. */
static void smooth_out(layer_spec *s)
{
  if (s->desc.act == CUMOE_ACT_RELU || s->desc.act == CUMOE_ACT_RELU2) s->desc.act = CUMOE_ACT_SILU;
  s->desc.act_limit = 0;
  s->desc.flags &= ~(uint32_t)CUMOE_MOE_LIMIT_AFTER;
  s->desc.routing.logits_dtype = 0;
}

/* Any feature, widths, form and wish together. */
static layer_spec random_spec(rng *r, int32_t dtype, wish *w)
{
  int features = 0;
  while (feature_name(features)) features++;
  layer_spec s = feature_spec((int)rng_below(r, features), dtype, 1 + rng_below(r, 300), rng_next(r));
  smooth_out(&s);
  s.desc.hidden = 8 * (1 + (int32_t)rng_below(r, rng_below(r, 3) ? 24 : 70));
  s.desc.inter = 8 * (1 + (int32_t)rng_below(r, rng_below(r, 3) ? 24 : 70));
  if (s.desc.num_experts > 100) s.desc.num_experts = 24;
  s.select_bias = false; /* not with ids that the CPU device is given */
  if (s.form.gate_order == CUMOE_GATE_UP_CONCAT) layer_random_form(r, &s);
  w->dtype = rng_below(r, 2) ? CUMOE_F32 : dtype;
  w->kept = rng_below(r, 2), w->accumulate = rng_below(r, 2), w->pointers = rng_below(r, 2);
  w->own_form = rng_below(r, 2);
  if (!routed_by_caller(&s)) w->balance = rng_below(r, 2) ? .01f : 0, w->z = rng_below(r, 2) ? .001f : 0;
  return s;
}

static void test_random(cumoe_context context)
{
  const seed_range seeds = test_seeds(getenv("SMALL") ? 6 : 60);
  cumoe_context cpu = cpu_new();
  for (int i = seeds.first; i < seeds.end; i++) {
    rng r = {(uint64_t)i * 7 + 13};
    wish w = {0};
    const layer_spec s = random_spec(&r, case_dtypes[i % 3], &w);
    case_begin("seed %d: %s, T %d E %d k %d H %d I %d, flags %u %u, kept %d", i,
               cumoe_dtype_name((cumoe_dtype)s.desc.dtype), (int)s.tokens, s.desc.num_experts, s.desc.routing.top_k,
               s.desc.hidden, s.desc.inter, s.desc.flags, s.desc.routing.flags, w.kept);
    const layer_inputs in = layer_inputs_new(&s);
    const tensor d_out = d_out_new(&s);
    w.d_out = &d_out;
    check_beside_cpu(context, cpu, &s, &in, &w, &w);
    case_end();
  }
  CHECK_OK(cumoe_context_destroy(cpu));
}

/* Captured as the first call of all, replayed with other x, router and so other routes and counts. */
static void test_graph(void)
{
  cumoe_context context = NULL;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  case_begin("captured and replayed");
  CHECK_OK(cumoe_context_create(0, NULL, &context));
  const layer_spec s = trained_spec(5, CUMOE_BF16);
  const tensor d_out = d_out_new(&s);
  const layer_inputs first = layer_inputs_new(&s);
  const wish w = {.dtype = CUMOE_BF16, .d_out = &d_out, .kept = true, .balance = .01f};
  both_ways b;
  both_ways_open(&b, context, &s, &first, &w);
  CHECK_CUDA(cudaStreamCreateWithFlags(&b.run.stream, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamBeginCapture(b.run.stream, cudaStreamCaptureModeGlobal));
  both_ways_call(&b);
  CHECK_CUDA(cudaStreamEndCapture(b.run.stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int round = 0; round < 3; round++) {
    layer_spec other = s;
    other.seed = (uint64_t)round + 50;
    const layer_inputs in = layer_inputs_new(&other);
    device_set(context, as_mut(b.run.args.x), &in.x);
    device_set(context, as_mut(b.run.args.router_weight), &in.router_weight);
    CHECK_OK(cumoe_synchronize(context, NULL)); /* the copies are of another stream */
    layer_inputs now = first;
    now.x = in.x;
    now.router_weight = in.router_weight;
    CHECK_CUDA(cudaGraphLaunch(exec, b.run.stream));
    both_ways_collect(&b);
    const grads eager = run_backward(context, &s, &now, &w);
    check_grads_equal(&s, &b.g, &eager);
  }
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(b.run.stream));
  both_ways_close(&b);
  case_end();
  case_begin("close");
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

/* ---- losses of the gate ---------------------------------------------------------------------------- */

/* Both in double, from the logits and from what was chosen. */
static double loss_of(const layer_spec *s, const tensor *logits, const tensor *ids, const wish *w, double losses[2])
{
  const cumoe_routing *r = &s->desc.routing;
  const int32_t all = spec_router_experts(s), experts = all - r->always_experts;
  const double cap = r->softcap;
  const bool alone = r->score == CUMOE_SCORE_SIGMOID || r->score == CUMOE_SCORE_SQRT_SOFTPLUS;
  double count = 0, part[64] = {0}, sum_p[64] = {0}, z = 0;
  for (int64_t t = 0; t < s->tokens; t++) {
    double p[64], of_p = 0, of_z = 0;
    for (int32_t j = 0; j < r->top_k; j++)
      if (get(ids, t, j) >= 0 && get(ids, t, j) < experts) part[(int)get(ids, t, j)]++, count++;
    for (int32_t e = 0; e < all; e++) {
      const double l = cap > 0 ? cap * tanh(get(logits, t, e) / cap) : get(logits, t, e);
      p[e] = r->score == CUMOE_SCORE_SIGMOID ? 1 / (1 + exp(-l)) : alone ? sqrt(log1p(exp(l))) : exp(l);
      if (e < experts) of_p += p[e];
      of_z += exp(l);
    }
    for (int32_t e = 0; e < experts; e++) sum_p[e] += p[e] / of_p;
    z += log(of_z) * log(of_z);
  }
  losses[0] = 0;
  for (int32_t e = 0; e < experts; e++)
    losses[0] += (double)w->balance * experts * part[e] / count * sum_p[e] / (double)s->tokens;
  losses[1] = (double)w->z * z / (double)s->tokens;
  return losses[0] + losses[1];
}

static void test_losses(cumoe_context context)
{
  static const int32_t scores[] = {CUMOE_SCORE_SOFTMAX, CUMOE_SCORE_SIGMOID, CUMOE_SCORE_SQRT_SOFTPLUS,
                                   CUMOE_SCORE_IDENTITY, CUMOE_SCORE_SPARSEMIXER};
  for (int i = 0; i < 10; i++) {
    layer_spec s = layer_spec_new(CUMOE_F32, 9, HIDDEN, INTER);
    s.input = INPUT_LOGITS;
    s.optional_outputs = true;
    s.desc.routing.score = scores[i % 5];
    s.desc.routing.softcap = i < 5 ? 0 : 3;
    if (scores[i % 5] == CUMOE_SCORE_SIGMOID) s.desc.routing.always_experts = 1;
    case_begin("losses: score %d, softcap %g", scores[i % 5], (double)s.desc.routing.softcap);
    layer_inputs in = layer_inputs_new(&s);
    const tensor d_out = tensor_new(CUMOE_F32, s.tokens, HIDDEN); /* zeros: nothing but the losses */
    const wish w = {.dtype = CUMOE_F32, .d_out = &d_out, .balance = .7f, .z = i % 2 ? .3f : 0};
    const grads g = run_backward(context, &s, &in, &w);
    double want[2], unused[2];
    worst d = {0, 0};
    (void)loss_of(&s, &in.logits, &g.ids, &w, want);
    for (int l = 0; l < 2; l++)
      CHECK_MSG(fabs(get(&g.losses, 0, l) - want[l]) <= 0x1p-22 * want[l], "loss %d is %g, want %g", l,
                get(&g.losses, 0, l), want[l]);
    for (int64_t at = 0; at < in.logits.rows * in.logits.cols; at++) {
      const double value = get(&in.logits, 0, at);
      tensor_set(&in.logits, 0, at, value + 0x1p-14);
      const double above = get(&in.logits, 0, at), high = loss_of(&s, &in.logits, &g.ids, &w, unused);
      tensor_set(&in.logits, 0, at, value - 0x1p-14);
      const double below = get(&in.logits, 0, at), low = loss_of(&s, &in.logits, &g.ids, &w, unused);
      tensor_set(&in.logits, 0, at, value);
      note(&d, get(&g.logits, 0, at), (high - low) / (above - below));
    }
    CHECK_MSG(d.error <= 0x1p-20 * d.largest, "off by %g of %g", d.error, d.largest);
    case_end();
  }
}

/* ---- stages ---------------------------------------------------------------------------------------- */

/* The gate's alone gives the layer's bits. */
static void test_gate_stage(cumoe_context context)
{
  const char *name;
  for (int feature = 0; (name = feature_name(feature)) != NULL; feature++) {
    layer_spec s = small_spec(feature, CUMOE_F32);
    s.tokens = 37; /* of fewer, regions of the workspace end long before they are rounded up */
    if (s.input != INPUT_LOGITS || s.device_count || s.desc.flags & CUMOE_MOE_UNREDUCED) continue;
    case_begin("the gate alone: %s", name);
    const layer_inputs in = layer_inputs_new(&s);
    const tensor d_out = d_out_new(&s);
    const wish w = {.dtype = CUMOE_F32, .kept = true, .d_out = &d_out, .balance = .1f, .z = .02f};
    const grads g = run_backward(context, &s, &in, &w);
    check_fault(context, NULL, expected_fault(&s, &in));
    size_t bytes = 0;
    CHECK_OK(cumoe_gate_backward_workspace(context, s.tokens, spec_router_experts(&s), s.desc.routing.top_k, &bytes));
    cumoe_gate_backward_args a = {.size = sizeof a,
                                  .routing = s.desc.routing,
                                  .balance = w.balance,
                                  .z = w.z,
                                  .logits = device_put(context, &in.logits, 3),
                                  .ids = device_put(context, &g.ids, 1),
                                  .d_weights = device_put(context, &g.pair_weights, 2),
                                  .d_logits = device_new(context, CUMOE_F32, s.tokens, g.logits.cols, 1),
                                  .losses = device_new(context, CUMOE_F32, 1, 2, 0),
                                  .workspace = workspace_new(context, bytes)};
    if (in.expert_scale.data) a.expert_scale = device_put(context, &in.expert_scale, 0);
    if (in.expert_scale.data) a.d_expert_scale = device_new(context, CUMOE_F32, 1, g.logits.cols, 0);
    CHECK_OK(cumoe_gate_backward(context, &a, NULL));
    const tensor logits = take(context, a.d_logits), scale = take(context, a.d_expert_scale),
                 losses = take(context, a.losses);
    check_guards(context, "workspace", a.workspace);
    check_same("d logits", &logits, &g.logits);
    check_same("losses", &losses, &g.losses);
    check_equal("d expert_scale", &scale, &g.expert_scale);
    case_end();
  }
}

/* Without d_weights nothing comes from the experts: zeros, or what is added to. */
static void run_unweighted(cumoe_context context, bool added, int32_t always)
{
  layer_spec s = layer_spec_new(CUMOE_F32, 5, HIDDEN, INTER);
  s.expert_scale = true;
  s.input = INPUT_LOGITS;
  s.desc.routing.always_experts = always;
  if (always) s.desc.routing.score = CUMOE_SCORE_SIGMOID;
  case_begin("the gate alone, of losses, expert_scale%s, %d always", added ? ", added" : "", (int)always);
  const layer_inputs in = layer_inputs_new(&s);
  const int64_t experts = in.logits.cols, k = s.desc.routing.top_k;
  const tensor ids = tensor_new(CUMOE_I32, s.tokens, k), before = tensor_new(CUMOE_F32, 1, experts);
  size_t bytes = 0;
  for (int64_t i = 0; i < s.tokens * k; i++) tensor_set(&ids, i / k, i % k, (double)(i % experts));
  for (int64_t e = 0; e < experts; e++) tensor_set(&before, 0, e, 3);
  CHECK_OK(cumoe_gate_backward_workspace(context, s.tokens, (int32_t)experts, (int32_t)k, &bytes));
  const cumoe_gate_backward_args a = {.size = sizeof a,
                                      .flags = added ? CUMOE_BACKWARD_ACCUMULATE : 0,
                                      .routing = s.desc.routing,
                                      .balance = .1f,
                                      .logits = device_put(context, &in.logits, 0),
                                      .ids = device_put(context, &ids, 0),
                                      .expert_scale = device_put(context, &in.expert_scale, 0),
                                      .d_logits = device_new(context, CUMOE_F32, s.tokens, experts, 0),
                                      .d_expert_scale = as_mut(device_put(context, &before, 0)),
                                      .workspace = workspace_new(context, bytes)};
  CHECK_OK(cumoe_gate_backward(context, &a, NULL));
  const tensor got = take(context, a.d_expert_scale);
  for (int64_t e = 0; e < experts; e++) CHECK(tensor_get(&got, 0, e) == (added ? 3 : 0));
  case_end();
}

static void test_gate_unweighted(cumoe_context context)
{
  for (int32_t always = 0; always < 2; always++) {
    run_unweighted(context, false, always);
    run_unweighted(context, true, always);
  }
}

/* Losses of no token are 0, and so is what comes from none. */
static void test_gate_of_no_tokens(cumoe_context context)
{
  enum { EXPERTS = 8, K = 2 };
  for (int added = 0; added < 2; added++) {
    case_begin("the gate alone, no tokens%s", added ? ", added" : "");
    const tensor three = tensor_new(CUMOE_F32, 1, EXPERTS), two = tensor_new(CUMOE_F32, 1, 2);
    for (int64_t e = 0; e < EXPERTS; e++) tensor_set(&three, 0, e, 3);
    tensor_set(&two, 0, 0, 3), tensor_set(&two, 0, 1, 3);
    const cumoe_gate_backward_args a = {.size = sizeof a,
                                        .flags = added ? CUMOE_BACKWARD_ACCUMULATE : 0,
                                        .routing = cumoe_routing_mixtral(K),
                                        .balance = .1f,
                                        .logits = cumoe_matrix(NULL, CUMOE_F32, 0, EXPERTS, EXPERTS),
                                        .ids = cumoe_matrix(NULL, CUMOE_I32, 0, K, K),
                                        .expert_scale = device_put(context, &three, 0),
                                        .d_logits = cumoe_matrix_mut(NULL, CUMOE_F32, 0, EXPERTS, EXPERTS),
                                        .d_expert_scale = as_mut(device_put(context, &three, 0)),
                                        .losses = as_mut(device_put(context, &two, 0))};
    CHECK_OK(cumoe_gate_backward(context, &a, NULL));
    const tensor losses = take(context, a.losses), sums = take(context, a.d_expert_scale);
    CHECK(tensor_get(&losses, 0, 0) == 0 && tensor_get(&losses, 0, 1) == 0);
    for (int64_t e = 0; e < EXPERTS; e++) CHECK(tensor_get(&sums, 0, e) == (added ? 3 : 0));
    case_end();
  }
}

typedef struct stage_rows {
  tensor d_z, h, d_y, pair, counts, offsets;
} stage_rows;

/* sum over channels of a row times a part of the weights, transposed. */
static double transposed_sum(const host_weights *w, int part, int64_t expert, const tensor *a, int64_t row,
                             int64_t first, int64_t in)
{
  const int64_t outs = part == PLAIN_DOWN ? w->hidden : w->inter, ins = part == PLAIN_DOWN ? w->inter : w->hidden;
  double sum = 0;
  for (int64_t o = 0; o < outs; o++) sum += get(a, row, first + o) * w->plain[part][(expert * outs + o) * ins + in];
  return sum;
}

static void check_row(const layer_spec *s, const host_weights *w, const stage_rows *r, int64_t expert, int64_t row,
                      const tensor *d_h, const tensor *d_rows)
{
  const bool gated = w->gate_order != CUMOE_UNGATED;
  for (int64_t i = 0; i < w->inter; i++)
    CHECK(get(d_h, row, i) == round_to(transposed_sum(w, PLAIN_DOWN, expert, &r->d_y, row, 0, i), d_h->dtype));
  for (int64_t i = 0; i < s->desc.hidden; i++) {
    double want = transposed_sum(w, PLAIN_UP, expert, &r->d_z, row, gated ? w->inter : 0, i);
    if (gated) want += transposed_sum(w, PLAIN_GATE, expert, &r->d_z, row, 0, i);
    CHECK_MSG(get(d_rows, row, i) == round_to(want, d_rows->dtype), "row %d, %d", (int)row, (int)i);
  }
}

/* d of one element of a part, and of its bias (in < 0), summed over the expert's rows. */
static double rows_sum(const layer_spec *s, const layer_inputs *in, const stage_rows *r, int part, int64_t expert,
                       int64_t out, int64_t at)
{
  const bool weighs = s->desc.routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
  const int64_t first = (int64_t)get(&r->offsets, 0, expert), k = s->desc.routing.top_k;
  double sum = 0;
  for (int64_t row = first; row < first + (int64_t)get(&r->counts, 0, expert); row++) {
    const int64_t pair = (int64_t)get(&r->pair, 0, row);
    const double weight = weighs ? get(&in->id_weights, pair / k, pair % k) : 1;
    const bool half = part == PLAIN_UP && in->routed.gate_order != CUMOE_UNGATED;
    const double a = part == PLAIN_DOWN ? get(&r->d_y, row, out) : get(&r->d_z, row, out + (half ? s->desc.inter : 0));
    const double b = part == PLAIN_DOWN ? get(&r->h, row, at) : weight * get(&in->x, pair / k, at);
    sum += a * b;
  }
  return sum;
}

/* out: of rows; the gradients of weights are of the other type. */
static void run_product_stages(cumoe_context context, pattern p, int form, int32_t dtype, int32_t out)
{
  layer_spec s = whole_spec(p, dtype == CUMOE_F32 ? 7 : 150, form);
  s.desc.dtype = dtype;
  if (dtype != CUMOE_F32) s.desc.hidden = 136, s.desc.inter = 72;
  if (p == PATTERN_ROUND_ROBIN) s.form.per_expert = true;
  case_begin("products alone: %s, form %d, %s to %s", pattern_name(p), form, cumoe_dtype_name((cumoe_dtype)dtype),
             cumoe_dtype_name((cumoe_dtype)out));
  const layer_inputs in = whole_inputs(&s);
  const bool gated = in.routed.gate_order != CUMOE_UNGATED;
  const int64_t pairs = s.tokens * s.desc.routing.top_k, wide = (gated ? 2 : 1) * s.desc.inter;
  rng r = {s.seed + 4};
  staged g;
  staged_open(&g, context, &s, &in, NULL);
  CHECK_OK(run_stage(&g, STAGE_MAP));
  stage_rows rows = {.d_z = tensor_integers(&r, dtype, pairs, wide, 3),
                     .h = tensor_integers(&r, dtype, pairs, s.desc.inter, 3),
                     .d_y = tensor_integers(&r, dtype, pairs, s.desc.hidden, 3),
                     .pair = device_get(context, cumoe_const(g.route.row_pair)),
                     .counts = device_get(context, cumoe_const(g.route.counts)),
                     .offsets = device_get(context, cumoe_const(g.route.offsets))};
  const cumoe_view d_z = device_put(context, &rows.d_z, 8), d_y = device_put(context, &rows.d_y, 8);
  const cumoe_view_mut d_h = device_new(context, out, pairs, s.desc.inter, 8),
                       d_rows = device_new(context, out, pairs, s.desc.hidden, 8);
  CHECK_OK(cumoe_down_backward(g.s.plan, g.s.routed, d_y, &g.route, d_h, NULL));
  CHECK_OK(cumoe_up_backward(g.s.plan, g.s.routed, d_z, &g.route, d_rows, NULL));
  const wish w = {.dtype = out == CUMOE_F32 ? dtype : CUMOE_F32, .pointers = form == 2};
  weight_grads d = {0};
  weight_grads_open(&d, context, &w, &s.desc, s.desc.num_experts, s.desc.inter, other_form(&s));
  cumoe_weights_backward_args a = {.size = sizeof a,
                                   .x = device_put(context, &in.x, 8),
                                   .d_z = d_z,
                                   .h = device_put(context, &rows.h, 8),
                                   .d_y = d_y};
  if (form % 2) a.pair_weights = device_put(context, &in.id_weights, 1);
  CHECK_OK(cumoe_weights_backward(g.s.plan, d.bound, &g.route, &a, NULL));
  weight_grads_take(&d, context);
  weight_grads_close(&d);
  const tensor got_h = take(context, d_h), got_rows = take(context, d_rows);
  int64_t end = 0;
  for (int64_t e = 0; e < s.desc.num_experts; e++) {
    end = (int64_t)(get(&rows.offsets, 0, e) + get(&rows.counts, 0, e));
    for (int64_t row = (int64_t)get(&rows.offsets, 0, e); row < end; row++)
      check_row(&s, &in.routed, &rows, e, row, &got_h, &got_rows);
    for (int part = !gated; part < 3; part++) {
      const int64_t channel = (part == PLAIN_DOWN ? s.desc.hidden : s.desc.inter) * e / s.desc.num_experts;
      for (int64_t i = 0; i < (part == PLAIN_DOWN ? s.desc.inter : s.desc.hidden); i++) {
        const place at = oracle_place(&d.host, part, e, channel, i);
        const double want = round_to(rows_sum(&s, &in, &rows, part, e, channel, i), w.dtype);
        CHECK(get(&at.projection->data, at.row, at.col) == want);
      }
    }
  }
  check_untouched(context, "rows past the last", d_h, end);
  check_untouched(context, "rows past the last", d_rows, end);
  session_close(&g.s);
  check_fault(context, NULL, expected_fault(&s, &in));
  case_end();
}

static void test_product_stages(cumoe_context context)
{
  for (int p = 0; p < PATTERN_COUNT; p++)
    for (int n = 0; n < 5; n++) {
      static const int32_t types[] = {CUMOE_F32, CUMOE_BF16, CUMOE_F16, CUMOE_BF16, CUMOE_F16};
      run_product_stages(context, (pattern)p, (p + n) % 4, types[n], n > 2 ? types[n] : CUMOE_F32);
    }
}

/* ---- sizes ----------------------------------------------------------------------------------------- */

/* Where the map has to cut its pairs in larger chunks, there are fewer of them. */
static void check_more(cumoe_plan plan, int64_t tokens)
{
  size_t less[3] = {0}, more[3] = {0};
  for (int i = 0; i < 2; i++) {
    size_t *bytes = i ? more : less;
    CHECK_OK(cumoe_moe_kept(plan, tokens + i, &bytes[0]));
    CHECK_OK(cumoe_moe_backward_workspace(plan, tokens + i, 0, &bytes[1]));
    CHECK_OK(cumoe_moe_backward_workspace(plan, tokens + i, 1, &bytes[2]));
    CHECK(bytes[1] >= bytes[2]);
  }
  for (int i = 0; i < 3; i++) CHECK_MSG(less[i] <= more[i] && (tokens || !less[i]), "%d, %d tokens", i, (int)tokens);
}

static void test_sizes(cumoe_context context)
{
  cumoe_moe_desc d = wide_spec().desc;
  cumoe_plan plan = NULL;
  case_begin("more tokens never need less");
  d.num_experts = d.local_experts = 512;
  CHECK_OK(cumoe_plan_create(context, &d, &plan));
  for (int64_t tokens = 0; tokens < 3000; tokens++) check_more(plan, tokens);
  size_t bytes = 0; /* pairs within the limit, and rows that are filled up above */
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT,
               cumoe_moe_backward_workspace(plan, CUMOE_MAX_PAIRS / d.routing.top_k, 1, &bytes));
  CHECK_TEXT("rows, the limit is 2147482624");
  for (int64_t tokens = 131072; tokens <= 4 * 131072; tokens += 131072) check_more(plan, tokens);
  CHECK_OK(cumoe_plan_destroy(plan));
  case_end();
}

/* ---- what is refused ------------------------------------------------------------------------------- */

static void refuse_one_place(cumoe_context context)
{
  const layer_spec s = layer_spec_new(CUMOE_F32, 3, HIDDEN, INTER);
  case_begin("two experts' gradients in one place");
  const layer_inputs in = layer_inputs_new(&s);
  const tensor d_out = d_out_new(&s);
  session run;
  cumoe_weights bound = NULL;
  size_t bytes = 0;
  session_open(&run, context, &s, &in);
  const host_weights like = weights_new(&s.desc, 8, INTER, s.form);
  cumoe_weights_desc d = weights_desc(&like);
  d.gate_up.data = device_put(context, &like.gate_up.data, 0);
  d.down.data = device_put(context, &like.down.data, 0);
  point_at(&d.down, 8);
  const void **down = (const void **)(uintptr_t)d.down.per_expert;
  CHECK_OK(cumoe_moe_backward_workspace(run.plan, 3, 0, &bytes));
  cumoe_moe_grads to = {
      .size = sizeof to, .d_out = device_put(context, &d_out, 0), .workspace = workspace_new(context, bytes)};
  for (int apart = 0; apart < 2; apart++) { /* expert 1's, or columns of another's between theirs */
    const cumoe_view_mut wide = device_new(context, CUMOE_F32, 10 * (int64_t)d.hidden, 3 * (int64_t)d.inter, 0);
    if (!apart) down[6] = down[1];
    if (apart) d.down.data.ld = wide.ld;
    for (int e = 0; apart && e < 8; e++) down[e] = (char *)wide.data + e * (d.hidden + 1) * wide.ld * 4;
    if (apart) down[6] = (const char *)down[1] + d.inter * 4, down[7] = (const char *)down[1] + wide.ld * 4;
    CHECK_OK(cumoe_weights_bind(context, &d, &bound));
    to.d_weights = bound;
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_moe_backward(run.plan, run.routed, &run.args, &to, NULL));
    CHECK_TEXT("grads.d_weights: down overlaps grads.d_weights: down");
    CHECK_OK(cumoe_weights_destroy(bound));
  }
  session_close(&run);
  case_end();
}

static cumoe_weights bind_codes(cumoe_context context, const cumoe_moe_desc *desc)
{
  const int64_t up_rows = desc->num_experts * 2 * desc->inter, down_rows = desc->num_experts * desc->hidden;
  cumoe_weights bound = NULL;
  cumoe_weights_desc codes = {.size = sizeof codes,
                              .experts = desc->num_experts,
                              .hidden = desc->hidden,
                              .inter = desc->inter,
                              .dtype = CUMOE_BF16,
                              .gate_order = CUMOE_GATE_UP_CONCAT,
                              .up_major = CUMOE_OUT_IN,
                              .down_major = CUMOE_OUT_IN,
                              .up_format = cumoe_format_fp8_channel(CUMOE_BF16),
                              .down_format = cumoe_format_fp8_channel(CUMOE_BF16)};
  codes.gate_up.data = cumoe_const(device_new(context, CUMOE_E4M3, up_rows, desc->hidden, 0));
  codes.gate_up.scale.data = cumoe_const(device_new(context, CUMOE_BF16, up_rows, 1, 0));
  codes.down.data = cumoe_const(device_new(context, CUMOE_E4M3, down_rows, desc->inter, 0));
  codes.down.scale.data = cumoe_const(device_new(context, CUMOE_BF16, down_rows, 1, 0));
  CHECK_OK(cumoe_weights_bind(context, &codes, &bound));
  return bound;
}

static void refuse_format_of_gradients(cumoe_context context)
{
  case_begin("gradients with a format");
  const layer_spec s = layer_spec_new(CUMOE_BF16, 3, 64, 64);
  const layer_inputs in = layer_inputs_new(&s);
  const tensor d_out = d_out_new(&s);
  session run;
  size_t bytes = 0;
  session_open(&run, context, &s, &in);
  const cumoe_weights bound = bind_codes(context, &s.desc);
  CHECK_OK(cumoe_moe_backward_workspace(run.plan, 3, 0, &bytes));
  const cumoe_moe_grads to = {.size = sizeof to,
                              .d_out = device_put(context, &d_out, 0),
                              .d_weights = bound,
                              .workspace = workspace_new(context, bytes)};
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_moe_backward(run.plan, run.routed, &run.args, &to, NULL));
  CHECK_TEXT("grads.d_weights has a format: gradients have none");
  CHECK_OK(cumoe_weights_destroy(bound));
  session_close(&run);
  case_end();
}

/* Of no tokens nobody looks at what would be needed: not even at its ld. */
static void refuse_same_memory(cumoe_context context)
{
  case_begin("no tokens, and one memory twice");
  const layer_spec s = layer_spec_new(CUMOE_F32, 3, HIDDEN, INTER);
  const layer_inputs in = layer_inputs_new(&s);
  session run;
  session_open(&run, context, &s, &in);
  cumoe_moe_args none = run.args;
  none.x.rows = none.out.rows = none.logits.rows = none.ids.rows = none.weights.rows = none.residual.rows = 0;
  cumoe_view_mut same = workspace_new(context, 1024);
  same.ld = 0;
  const cumoe_moe_grads to = {.size = sizeof to, .kept = cumoe_const(same), .workspace = same};
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_moe_backward(run.plan, run.routed, &none, &to, NULL));
  CHECK_TEXT("grads.workspace overlaps grads.kept");
  session_close(&run);
  case_end();
}

static void test_refusals(cumoe_context context)
{
  refuse_one_place(context);
  refuse_same_memory(context);
  case_begin("more columns than there are experts");
  cumoe_gate_backward_args gate = {.size = sizeof gate, .routing = cumoe_routing_mixtral(2)};
  gate.logits = cumoe_const(device_new(context, CUMOE_F32, 3, CUMOE_MAX_EXPERTS + 1, 0));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_gate_backward(context, &gate, NULL));
  CHECK_TEXT("args.logits.cols is 1025, must be 1 .. 1024");
  case_end();
  refuse_format_of_gradients(context);
  case_begin("weights with a format");
  cumoe_moe_desc with = layer_spec_new(CUMOE_BF16, 3, 64, 64).desc;
  cumoe_plan plan = NULL;
  size_t bytes = 0;
  with.down_format = cumoe_format_int4(32, CUMOE_BF16);
  CHECK_OK(cumoe_plan_create(context, &with, &plan));
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_moe_kept(plan, 3, &bytes));
  CHECK_TEXT("desc.down_format is set");
  CHECK_OK(cumoe_plan_destroy(plan));
  case_end();
}

static const test_group groups[] = {
    GROUP("differences", test_differences, ANYWHERE),
    GROUP("types", test_types, ANYWHERE),
    GROUP("outputs of the forward", test_outputs, ANYWHERE),
    GROUP("whole numbers", test_whole, ANYWHERE),
    ALONE("threads", test_threads, ONCE),
    ALONE("captured", test_graph, ON_CUDA),
    GROUP("no tokens", test_no_tokens, ANYWHERE),
    GROUP("nan", test_nan, ANYWHERE),
    GROUP("nan and weight 0", test_nan_dropped, ANYWHERE),
    GROUP("losses", test_losses, ANYWHERE),
    GROUP("gate alone", test_gate_stage, ANYWHERE),
    GROUP("gate without weights", test_gate_unweighted, ANYWHERE),
    GROUP("gate of no tokens", test_gate_of_no_tokens, ANYWHERE),
    GROUP("products alone", test_product_stages, ANYWHERE),
    GROUP("not finite", test_not_finite, ANYWHERE),
    GROUP("hostile", test_hostile_kept, ANYWHERE),
    GROUP("sizes", test_sizes, ANYWHERE),
    GROUP("refusals", test_refusals, ANYWHERE),
    GROUP("bit by bit as the CPU", test_whole_bits, ON_CUDA),
    GROUP("kernels of rows", test_product_rows, ON_CUDA),
    GROUP("near the CPU", test_near_cpu, ON_CUDA),
    GROUP("at random", test_random, ON_CUDA),
    GROUP("many rows", test_many_rows, ANYWHERE),
    GROUP("kernels of gradients", test_gradient_rows, ON_CUDA),
    GROUP("kernels that keep", test_keep_rows, ON_CUDA),
    GROUP("kernels that draw", test_drawn_rows, ON_CUDA),
};

TEST_MAIN(groups)
