/* The backward of the layer: a straight line from d out to every gradient. */
#include "backward_pass.h"
#include "dispatch.h"

/* A region of the scratch, in the order of rows. */
static row_matrix rows_of(const void *base, int64_t cols, int32_t dtype)
{
  return (row_matrix){base, cols, dtype, OF_ROW};
}

/* A matrix of the caller's, as the weights of one expert. */
static expert_matrix one_matrix(cumoe_view v)
{
  return (expert_matrix){.base = {v.data}, .n_stride = v.ld, .k_stride = 1, .format = dense_format(v.dtype)};
}

/* A call of cumoe_moe_backward. */
typedef struct backward {
  pass p;
  const cumoe_moe_grads *grads;
  const struct weights *d_weights, *d_shared; /* NULL: not wanted */
  scratch_layout at;
  char *scratch;
  float scale; /* of d out */
} backward;

/* What is the same work for the routed experts and for the shared one. Each has a weights object, and rows: row r of an
 * expert is of one pair of a token and a slot. */
typedef struct expert_rows {
  const struct weights *w, *d; /* d: of the gradients, or NULL */
  row_map map;
  bool padded; /* the map is what pad made, and tickets with it */
  row_matrix d_out, x;
  const void *z;        /* gate and up before the activation, as kept */
  const int32_t *z_row; /* z's row of a pair; NULL: z is in the order of the map */
  rows_layout at;
  float *d_pairs; /* out: gradients of the pairs' weights */
  int64_t d_pairs_ld;
  bool weighs_h, weighs_x;   /* the pair's weight multiplies h, or x, or (neither) nothing */
  bool sigmoid;              /* the weight is sigmoid(logit): d_pairs are gradients of the logits */
  pair_gradient_args *later; /* NULL, or where the arguments go instead: the gate's kernel has d_pairs made */
} expert_rows;

static bool accumulates(const backward *b)
{
  return b->grads->flags & CUMOE_BACKWARD_ACCUMULATE;
}

/* The route's rows, each expert's filled up to whole blocks (kernels/backward.h): what pad makes. */
static row_map padded_rows(const backward *b)
{
  const pass *p = &b->p;
  const bool drops = !is_unreduced(p) || weighs_input(p); /* pairs of weight 0 */
  row_map map = route_rows(p, route_in(b->scratch, &b->at.padded));
  map.rows_cap = b->at.routed.rows;
  map.pair_weights = drops ? p->pair_weights.data : NULL;
  map.pair_weights_ld = p->pair_weights.ld;
  return map;
}

static int32_t *tickets_of(const backward *b, int32_t first)
{
  return on_cpu(b->p.context) ? NULL : (int32_t *)region(b->scratch, b->at.tickets) + first;
}

/* Weights of padded rows lie where `along` does: down_activated, which wants them, leaves parts of it where d h would
 * have been. */
static float *row_weight_of(const backward *b)
{
  return on_cpu(b->p.context) ? NULL : (float *)region(b->scratch, b->at.routed.along);
}

/* Tokens of padded rows, for kernels that bring rows of tokens by themselves. */
static int32_t *row_token_of(const backward *b)
{
  return on_cpu(b->p.context) ? NULL : (int32_t *)region(b->scratch, b->at.row_token);
}

static cumoe_status pad(const backward *b, const row_map *map)
{
  const route_pointers padded = route_in(b->scratch, &b->at.padded);
  pad_args a = {.map = route_rows(&b->p, b->p.route),
                .counts = padded.counts,
                .offsets = padded.offsets,
                .row_pair = padded.row_pair,
                .slot_row = padded.slot_row,
                .row_weight = row_weight_of(b),
                .row_token = row_token_of(b),
                .tickets = tickets_of(b, 0),
                .rows_cap = b->at.routed.rows};
  a.map.pair_weights = map->pair_weights;
  a.map.pair_weights_ld = map->pair_weights_ld;
  return dispatch(b->p.context, OP_pad, &a, b->p.stream);
}

/* On CUDA *m, a matrix of tokens or pairs, becomes its copy at `to`, in the order of rows; on the CPU it stays. */
static cumoe_status in_row_order(const backward *b, const expert_rows *e, row_matrix *m, size_t to, bool weighs)
{
  const cumoe_moe_desc *d = &b->p.plan->desc;
  if (on_cpu(b->p.context)) return CUMOE_OK;
  const copy_rows_args copy = {.map = e->map,
                               .a = *m,
                               .to = region(b->scratch, to),
                               .to_ld = d->hidden,
                               .cols = d->hidden,
                               .dtype = d->dtype,
                               .weighs = weighs};
  *m = rows_of(copy.to, copy.to_ld, copy.dtype);
  return dispatch(b->p.context, OP_copy_rows, &copy, b->p.stream);
}

/* Rows an expert, if all have as many. */
static int64_t rows_an_expert(const backward *b, const expert_rows *e)
{
  return b->p.tokens.count * b->p.plan->desc.routing.top_k / e->map.experts;
}

/* Of few rows gradients of weights are bound by writing them. From here on they begin beside the grids ahead: of fewer,
 * clusters that did not begin together write what lies together at different times (of 64 rows gpt-oss-120b's backward
 * took 5 % longer, of 128 qwen3-235b-a22b's 2 %). */
enum { ROWS_FOR_OVERLAP = 192 };

static bool overlaps_gradients(const backward *b, const expert_rows *e)
{
  return e->d && e->padded && rows_an_expert(b, e) >= ROWS_FOR_OVERLAP;
}

/* Whether d h and gradients of weights bring a matrix's rows of tokens by themselves. That costs gradients an eighth of
 * their products' time, which of few rows nobody waits for, and which up to this inter is about what a copy costs. */
enum { INTER_FOR_COPY = 4096 };

static bool gathers(const backward *b, const expert_rows *e, const row_matrix *m, bool weighs)
{
  const bool pays = rows_an_expert(b, e) < ROWS_FOR_OVERLAP || e->w->inter <= INTER_FOR_COPY;
  return !on_cpu(b->p.context) && e->padded && m->form == OF_TOKEN && !weighs && pays;
}

/* d h = d out times down's weights. */
static rows_product_args d_h_of(const backward *b, const expert_rows *e, const row_matrix *d_out)
{
  return (rows_product_args){.map = e->map,
                             .a = *d_out,
                             .b = transposed(e->w->down),
                             .c = region(b->scratch, e->at.d_h),
                             .c_ld = e->w->inter,
                             .c_dtype = on_cpu(b->p.context) ? DT_F32 : b->p.plan->desc.dtype,
                             .halves = 1,
                             .n = e->w->inter,
                             .k = e->w->hidden,
                             .scale = 1};
}

/* The activation once more, and its gradient: h, d z, and <d h, h> of each row, from which pairs' gradients come. */
static activation_args activation_again(const backward *b, const expert_rows *e, const rows_product_args *d_h)
{
  activation_args act = activation_of(&b->p, e->w, &e->map);
  act.z = e->z;
  act.z_row = e->z_row;
  act.d_h = d_h->c;
  act.d_h_dtype = d_h->c_dtype;
  act.h = region(b->scratch, e->at.h);
  act.d_z = region(b->scratch, e->at.d_z);
  act.along = region(b->scratch, e->at.along);
  act.weighs = e->weighs_h;
  act.weighs_h = e->weighs_h && !on_cpu(b->p.context);
  act.scale = b->scale;
  return act;
}

/* Both by one kernel, where it serves: *activated, and d h's place has parts of <d h, h>. Else by two, of rows in their
 * order. *d_out: as d h has read it. */
static cumoe_status backward_activation(const backward *b, const expert_rows *e, bool counts, row_matrix *d_out,
                                        bool *activated)
{
  rows_product_args d_h = d_h_of(b, e, d_out);
  const activation_args act = activation_again(b, e, &d_h);
  const activated_work at_once = {.tickets = tickets_of(b, TICKETS_OF_D_H),
                                  .act = &act,
                                  .row_token = row_token_of(b),
                                  .z_offsets = b->p.route.offsets,
                                  .row_weight = row_weight_of(b),
                                  .z_rows = b->p.tokens.count * b->p.plan->desc.routing.top_k,
                                  .parts = d_h.c,
                                  .counts = counts};
  const drawn_work alone = {.tickets = at_once.tickets};
  *activated = false;
  if (e->padded) TRY(multiply_activated(b->p.context, &d_h, &at_once, b->p.stream, activated));
  if (*activated) return CUMOE_OK;
  if (d_out->form != OF_ROW) TRY(in_row_order(b, e, d_out, e->at.d_out, false));
  d_h.a = *d_out;
  TRY(multiply_rows(b->p.context, &d_h, e->padded ? &alone : NULL, b->p.stream));
  return dispatch(b->p.context, OP_activation, &act, b->p.stream);
}

/* How the gradients of gate and up read d z: as one matrix of 2 I columns, where they are one matrix in the same order;
 * else each half by itself, g->a_half its first column and g->a_n the step to its next. */
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

/* Gradients of down, of its biases, and of gate and up. On CUDA the rows of x and h carry the pair's weight already, so
 * the products there need none (weighs: on the CPU alone). counted: d h counts what is there. */
static cumoe_status backward_weights(const backward *b, const expert_rows *e, const row_matrix *d_out,
                                     const row_matrix *x, bool counted)
{
  const int32_t halves = e->w->gated ? 2 : 1, dtype = b->p.plan->desc.dtype;
  const bool cpu = on_cpu(b->p.context);
  weight_gradient_args up = {.map = e->map,
                             .a = rows_of(region(b->scratch, e->at.d_z), (int64_t)halves * e->w->inter, dtype),
                             .b = *x,
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
  weight_gradient_args bias = down; /* reads d out without h, so the weight has to come in here */
  bias.d.base[0] = bias.d.table[0] = NULL;
  bias.weighs = e->weighs_h ? WEIGHS_A : WEIGHS_NONE;
  bias.padded = 0;
  down.d.bias[0] = NULL;
  split_halves(&up, e->w, e->d);
  if (e->padded) {
    up.tickets = tickets_of(b, TICKETS_OF_UP);
    down.tickets = tickets_of(b, TICKETS_OF_DOWN);
  }
  up.row_token = x->form == OF_TOKEN ? row_token_of(b) : NULL;
  down.row_token = d_out->form == OF_TOKEN ? row_token_of(b) : NULL;
  /* The first units of up's gradient may run beside the last ones of d h, which says when rows are there; those of
   * down's beside the last ones of up's, which it has no need of. */
  if (counted) {
    up.beside = down.beside = 1;
    up.d_h = tickets_of(b, TICKETS_OF_D_H);
    up.d_h_octets = e->w->inter / 8;
  }
  TRY(add_up_rows(b->p.context, &bias, b->p.stream));
  TRY(add_up_rows(b->p.context, &up, b->p.stream));
  return add_up_rows(b->p.context, &down, b->p.stream); /* the last: see backward_rows */
}

/* d x of each row = d z times the weights of gate and up; then the gradients of the pairs' weights. */
static cumoe_status backward_rows(const backward *b, const expert_rows *e, bool activated)
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
                                    .parts = activated ? region(b->scratch, e->at.d_h) : NULL,
                                    .parts_of = e->w->inter,
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
  /* The gradient of down, the grid ahead, has waited for those before it, and touches neither d z nor the place of d x,
   * where x's copy is: its last units and the first ones of d x may run side by side. */
  const drawn_work work = {.tickets = tickets_of(b, TICKETS_OF_D_ROWS), .beside = e->d != NULL};
  TRY(multiply_rows(b->p.context, &d_rows, e->padded ? &work : NULL, b->p.stream));
  if (e->later) {
    *e->later = pairs;
    return CUMOE_OK;
  }
  return dispatch(b->p.context, OP_pair_gradient, &pairs, b->p.stream);
}

/* Copies come before d h, which the gradients of weights may then follow at once. */
static cumoe_status backward_experts(const backward *b, const expert_rows *e)
{
  const bool overlaps = overlaps_gradients(b, e);
  row_matrix d_out = e->d_out, x = e->x;
  bool activated;
  if (e->d && !gathers(b, e, &x, e->weighs_x)) TRY(in_row_order(b, e, &x, e->at.d_rows, e->weighs_x));
  if (!gathers(b, e, &d_out, false)) TRY(in_row_order(b, e, &d_out, e->at.d_out, false));
  TRY(backward_activation(b, e, overlaps, &d_out, &activated));
  if (e->d) TRY(backward_weights(b, e, &d_out, &x, activated && overlaps));
  return backward_rows(b, e, activated);
}

static cumoe_view d_pairs_of(const backward *b)
{
  const cumoe_view_mut own = b->grads->d_pair_weights;
  const int64_t tokens = b->p.tokens.count, k = b->p.plan->desc.routing.top_k;
  return own.data ? cumoe_const(own) : small_region(b->scratch, b->at.d_weights, CUMOE_F32, tokens, k);
}

static cumoe_status backward_routed(const backward *b, pair_gradient_args *later)
{
  const pass *p = &b->p;
  const cumoe_view d_pairs = d_pairs_of(b);
  const expert_rows e = {.w = p->weights,
                         .d = b->d_weights,
                         .map = padded_rows(b),
                         .padded = true,
                         .d_out = rows_of_view(b->grads->d_out, is_unreduced(p) ? OF_PAIR : OF_TOKEN),
                         .x = rows_of_view(p->args->x, OF_TOKEN),
                         .z = region(p->kept, p->at.z),
                         .z_row = p->route.slot_row,
                         .at = b->at.routed,
                         .d_pairs = (float *)(uintptr_t)d_pairs.data,
                         .d_pairs_ld = d_pairs.ld,
                         .weighs_h = !weighs_input(p) && !is_unreduced(p),
                         .weighs_x = weighs_input(p),
                         .later = later};
  TRY(pad(b, &e.map));
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
                   .d_out = rows_of_view(b->grads->d_out, OF_TOKEN),
                   .x = rows_of_view(p->args->x, OF_TOKEN),
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

/* On CUDA it is rounded as the experts' parts of d x are: it is written and read once each. */
static int32_t router_part_dtype(const backward *b)
{
  return on_cpu(b->p.context) ? DT_F32 : b->p.plan->desc.dtype;
}

static bool wants_gate(const backward *b)
{
  const cumoe_moe_grads *g = b->grads;
  return !is_routed(b->p.args) &&
         (g->d_logits.data || g->d_router_weight.data || g->d_router_bias.data || g->d_router_x.data ||
          g->d_expert_scale.data || g->losses.data || wants_router_part(b));
}

/* The router's products by the layer's kernels, whose rows are of one type. */
static bool has_parts(const backward *b)
{
  const cumoe_moe_args *a = b->p.args;
  return parts_logits(b->p.plan) && a->router_weight.data && a->router_weight.dtype == CUMOE_BF16 &&
         router_input(a).dtype == CUMOE_BF16;
}

static float scale_of_logits(const backward *b)
{
  const float given = b->p.plan->desc.routing.logit_scale;
  return given > 0 ? given : 1;
}

/* parts_logits: [T, 2 E]; of the first of them alone E columns are read. */
static row_matrix parts_of(const backward *b)
{
  return rows_of(region(b->scratch, b->at.parts), 2 * (int64_t)router_experts(&b->p.plan->desc), DT_BF16);
}

static cumoe_view d_logits_of(const backward *b)
{
  const cumoe_view_mut own = b->grads->d_logits;
  const int64_t experts = router_experts(&b->p.plan->desc);
  return own.data ? cumoe_const(own) : small_region(b->scratch, b->at.d_logits, CUMOE_F32, b->p.tokens.count, experts);
}

static cumoe_status backward_gate(const backward *b, const pair_gradient_args *pairs)
{
  const pass *p = &b->p;
  const cumoe_moe_grads *g = b->grads;
  const cumoe_view d_pairs = d_pairs_of(b), d_logits = d_logits_of(b);
  gate_backward_args a = {.g = gate_of(p, p->ids, p->pair_weights),
                          .d_weights = is_unreduced(p) && !weighs_input(p) ? NULL : d_pairs.data,
                          .d_logits = (float *)(uintptr_t)d_logits.data,
                          .d_weights_ld = d_pairs.ld,
                          .d_logits_ld = d_logits.ld,
                          .parts = has_parts(b) ? region(b->scratch, b->at.parts) : NULL,
                          .parts_scale = scale_of_logits(b),
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
  if (pairs) {
    a.pairs = *pairs;
    a.has_pairs = 1;
    a.beside = !pairs->on_input;
  }
  return run_gate_backward(p->context, &a, p->stream);
}

/* A sum over all tokens, cut into runs of tokens that SMs work on side by side; the runs' sums are added in order.
 * `parts` of n / parts rows each are added as well. */
static cumoe_status add_runs(const backward *b, const weight_gradient_args *g, cumoe_view_mut d, int32_t runs,
                             int32_t parts)
{
  const pass *p = &b->p;
  const cut_args cut = {p->tokens, region(b->scratch, b->at.runs_counts), region(b->scratch, b->at.runs_offsets), runs};
  weight_gradient_args each = *g;
  const add_runs_args sum = {.sums = region(b->scratch, b->at.runs_sums),
                             .d = d.data,
                             .d_ld = d.ld,
                             .rows = g->n / parts,
                             .cols = g->k,
                             .tokens = p->tokens,
                             .runs = runs * parts,
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
                            .b = rows_of_view(with, OF_ROW),
                            .d = one_matrix(cumoe_const(d)),
                            .d_dtype = d.dtype,
                            .a_n = 1,
                            .halves = 1,
                            .n = (int32_t)n,
                            .k = (int32_t)with.cols,
                            .accumulates = accumulates(b),
                            .scale = scale};
  if (d.data && fits && runs_of(plan, b->p.tokens.count) > 1) {
    TRY(add_runs(b, &g, d, runs_of(plan, b->p.tokens.count), 1));
    g.d.base[0] = NULL;
  }
  g.d.bias[0] = d_bias.data;
  g.d.bias_n_stride = 1;
  g.d.bias_dtype = d_bias.dtype;
  return add_up_rows(b->p.context, &g, b->p.stream);
}

/* The router's weights. Past the last token tensor maps read zeros; a device's count may end before that. */
static cumoe_status add_parts(const backward *b, cumoe_view x, cumoe_view_mut d)
{
  const pass *p = &b->p;
  const weight_gradient_args g = {.map = token_rows(p),
                                  .a = parts_of(b),
                                  .b = rows_of_view(x, OF_ROW),
                                  .a_n = 1,
                                  .halves = 1,
                                  .n = (int32_t)(2 * d.rows),
                                  .k = (int32_t)x.cols,
                                  .accumulates = accumulates(b),
                                  .padded = !p->tokens.device,
                                  .scale = 1};
  return add_runs(b, &g, d, part_runs_of(p->plan, p->tokens.count), 2);
}

static cumoe_status backward_router(const backward *b)
{
  const pass *p = &b->p;
  const cumoe_moe_grads *g = b->grads;
  const cumoe_view x = router_input(p->args), d_logits = d_logits_of(b);
  const bool parts = has_parts(b);
  const float scale = scale_of_logits(b);
  const row_matrix a = rows_of_view(d_logits, OF_ROW);
  cumoe_view_mut d_weight = g->d_router_weight;
  if (parts && d_weight.data && x.cols <= p->plan->desc.hidden) {
    TRY(add_parts(b, x, d_weight));
    d_weight = (cumoe_view_mut){0};
  }
  TRY(add_tokens(b, a, d_logits.cols, x, d_weight, g->d_router_bias, scale));
  rows_product_args d_x = {.map = token_rows(p),
                           .a = a,
                           .b = transposed(one_matrix(p->args->router_weight)),
                           .c = region(b->scratch, b->at.d_router),
                           .c_ld = x.cols,
                           .c_dtype = router_part_dtype(b),
                           .halves = 1,
                           .n = (int32_t)x.cols,
                           .k = (int32_t)d_logits.cols,
                           .scale = scale};
  if (g->d_router_x.data) {
    d_x.c = g->d_router_x.data;
    d_x.c_ld = g->d_router_x.ld;
    d_x.c_dtype = g->d_router_x.dtype;
  } else if (parts) { /* as precise as the experts' d z */
    d_x.a = parts_of(b);
    d_x.scale = 1;
  }
  return g->d_router_x.data || wants_router_part(b) ? multiply_rows(p->context, &d_x, NULL, p->stream) : CUMOE_OK;
}

/* ---- d x ---- */

static cumoe_status gather(const backward *b)
{
  const pass *p = &b->p;
  const cumoe_moe_grads *g = b->grads;
  const cumoe_moe_desc *d = &p->plan->desc;
  gather_args a = {.map = padded_rows(b),
                   .d_out = rows_of_view(g->d_out, is_unreduced(p) ? OF_PAIR : OF_TOKEN),
                   .gate = rows_of_view(p->args->shared_gate, OF_ROW),
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
  a.d_router_dtype = router_part_dtype(b);
  return dispatch(p->context, OP_gather, &a, p->stream);
}

static cumoe_status run_backward(const backward *b)
{
  const pass *p = &b->p;
  const cumoe_moe_grads *g = b->grads;
  const cumoe_view none = {0};
  const cumoe_view_mut nothing = {0};
  pair_gradient_args pairs, *later = wants_gate(b) && !on_cpu(p->context) ? &pairs : NULL;
  if (absent(&g->kept)) TRY(keep_forward(p));
  TRY(backward_routed(b, later));
  if (p->shared) TRY(backward_shared(b));
  if (wants_gate(b)) TRY(backward_gate(b, later));
  if (wants_gate(b) && p->args->router_weight.data) TRY(backward_router(b));
  if (g->d_shared_gate.data)
    TRY(add_tokens(b, rows_of(region(b->scratch, b->at.d_shared_weight), 1, DT_F32), 1, p->args->x, g->d_shared_gate,
                   nothing, 1));
  if (g->d_residual.data)
    TRY(add_tokens(b, rows_of_view(g->d_out, OF_ROW), p->plan->desc.hidden, none, nothing, g->d_residual, 1));
  return g->d_x.data ? gather(b) : CUMOE_OK;
}

/* Of no tokens: sums over them are zeros, or have nothing added. */
static cumoe_status clear_sums(const cumoe_moe_grads *g, const backward_operands *with, cumoe_stream stream)
{
  struct context *context = with->layer.plan->context;
  const cumoe_view_mut sums[] = {g->d_router_weight, g->d_router_bias, g->d_expert_scale, g->d_shared_gate,
                                 g->d_residual};
  TRY(clear_gradient(context, g->losses, stream));
  if (g->flags & CUMOE_BACKWARD_ACCUMULATE) return CUMOE_OK;
  for (size_t i = 0; i < sizeof sums / sizeof *sums; ++i) TRY(clear_gradient(context, sums[i], stream));
  if (with->d_weights) TRY(clear_weights(context, with->d_weights, stream));
  return with->d_shared ? clear_weights(context, with->d_shared, stream) : CUMOE_OK;
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
  if (a.x.rows == 0) return clear_sums(&g, &with, stream);
  backward b = {.grads = &g, .d_weights = with.d_weights, .d_shared = with.d_shared, .scratch = g.workspace.data};
  TRY(lay_out_scratch("args.x.rows", with.layer.plan, a.x.rows, !absent(&g.kept), &b.at));
  char *kept = absent(&g.kept) ? region(b.scratch, b.at.kept) : (char *)(uintptr_t)g.kept.data;
  b.p = pass_of(&with.layer, &a, kept, stream);
  b.p.hist = region(b.scratch, b.at.hist);
  b.p.rows = region(b.scratch, b.at.routed.d_rows);
  b.scale = is_unreduced(&b.p) || a.out_scale == 0 ? 1 : a.out_scale;
  ON_DEVICE(b.p.context, run_backward(&b));
}
