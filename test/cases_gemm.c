#include "cases_gemm.h"
#include "cases.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What the operands hold. CODES: rows of a are one-hot and weights carry a code of their address, so that every
 * result is one weight and a wrong one tells which was read. */
typedef enum content { CONTENT_NORMAL, CONTENT_SAME_SIGN, CONTENT_INTEGERS, CONTENT_CODES } content;

/* What is wrong with the last expert of a route; the pairs of its rows are nonsense as well. */
typedef enum bad_route { ROUTE_GOOD, HUGE_COUNT, HUGE_OFFSET, LONG_COUNT, NEGATIVE_OFFSET } bad_route;

typedef struct gemm_case {
  int32_t dtype, tokens, experts, top_k, hidden, inter;
  weights_form form;
  int32_t act;
  float alpha, limit;
  pattern pattern;
  content content;
  bool on_input;
  bool nan_token;      /* token 1 holds a NaN */
  bad_route bad_route; /* of the last expert */
} gemm_case;

static const char *order_name(int32_t order)
{
  static const char *names[] = {"?",        "gate-up", "up-gate", "gate-up-interleaved", "up-gate-interleaved",
                                "separate", "ungated"};
  return names[order];
}

static void name_case(const char *op, const gemm_case *c)
{
  static const char *contents[] = {"", " same sign", " integers", " codes"};
  case_begin("%s %s T %d E %d k %d H %d I %d %s %s/%s%s gap %d bias %s act %d limit %g %s%s%s%s%s", op,
             cumoe_dtype_name((cumoe_dtype)c->dtype), c->tokens, c->experts, c->top_k, c->hidden, c->inter,
             order_name(c->form.gate_order), c->form.up_major == CUMOE_OUT_IN ? "oi" : "io",
             c->form.down_major == CUMOE_OUT_IN ? "oi" : "io", c->form.per_expert ? " per expert" : "", c->form.gap,
             cumoe_dtype_name((cumoe_dtype)c->form.bias), c->act, (double)c->limit, pattern_name(c->pattern),
             contents[c->content], c->on_input ? " weight on input" : "", c->nan_token ? " nan" : "",
             c->bad_route ? " bad route" : "");
}

static cumoe_moe_desc gemm_desc(const gemm_case *c)
{
  cumoe_moe_desc d = {
      .size = sizeof d,
      .num_experts = c->experts,
      .local_experts = c->experts,
      .hidden = c->hidden,
      .inter = c->inter,
      .dtype = c->dtype,
      .out_dtype = c->dtype,
      .act = c->act,
      .act_alpha = c->alpha,
      .act_limit = c->limit,
      .routing = cumoe_routing_make(CUMOE_SCORE_SIGMOID, c->top_k, c->on_input ? CUMOE_ROUTE_WEIGHT_ON_INPUT : 0)};
  d.flags = c->form.gate_order == CUMOE_UNGATED ? CUMOE_MOE_UNGATED : 0;
  return d;
}

/* ---- operands -------------------------------------------------------------------------------------- */

/* Small enough that a product of two codes is exact in 8 bits. */
static double code_of(int part, int64_t e, int64_t out, int64_t in)
{
  if (part == PLAIN_GATE) return (double)((e * 5 + out * 3 + in * 7) % 15 + 1);
  return (double)((e * 3 + out * 5 + in * 11) % 13 - 6);
}

static void fill_codes(host_weights *w)
{
  for (int part = 0; part < 3; part++) {
    if (part == PLAIN_GATE && w->gate_order == CUMOE_UNGATED) continue;
    int64_t outs = part == PLAIN_DOWN ? w->hidden : w->inter, ins = part == PLAIN_DOWN ? w->inter : w->hidden;
    for (int64_t e = 0; e < w->experts; e++)
      for (int64_t out = 0; out < outs; out++)
        for (int64_t in = 0; in < ins; in++) weights_set(w, part, e, out, in, code_of(part, e, out, in));
  }
}

static host_weights make_weights(rng *r, const gemm_case *c)
{
  static const fill fills[] = {FILL_NORMAL, FILL_SAME_SIGN, FILL_INTEGERS};
  cumoe_moe_desc d = gemm_desc(c);
  host_weights w = weights_new(&d, c->experts, c->inter, c->form);
  if (c->content == CONTENT_CODES)
    fill_codes(&w);
  else
    weights_fill(r, &w, fills[c->content]);
  oracle_prepare(&w);
  return w;
}

/* Rows of x or h. Integers are sparse, so that sums and products stay exact in f32 and finite in f16; what is stored
 * is their nearest, and often a tie. */
static tensor make_rows(rng *r, const gemm_case *c, int64_t rows, int64_t cols)
{
  if (c->content == CONTENT_NORMAL) return tensor_normal(r, c->dtype, rows, cols, 0, 1);
  if (c->content == CONTENT_SAME_SIGN) return tensor_normal(r, c->dtype, rows, cols, 2, 0.25);
  tensor t = tensor_new(c->dtype, rows, cols);
  for (int64_t row = 0; row < rows; row++) {
    if (c->content == CONTENT_CODES) tensor_set(&t, row, row % cols, 1);
    for (int i = 0; c->content == CONTENT_INTEGERS && i < 12; i++)
      tensor_set(&t, row, rng_below(r, cols), (double)rng_below(r, 41) - 20);
  }
  return t;
}

/* ---- one case -------------------------------------------------------------------------------------- */

typedef struct gemm_run {
  cumoe_moe_desc desc;
  host_weights host;
  host_route route;
  tensor input, pair_weights, got[PASSES];
  bool up, permuted;
} gemm_run;

/* x in row order through cumoe_permute, then the product of that. */
static cumoe_status permuted_up(cumoe_context context, const gemm_case *c, cumoe_plan plan, cumoe_weights weights,
                                cumoe_view x, const cumoe_route *route, cumoe_view pair_weights, cumoe_view_mut out)
{
  cumoe_view_mut rows = device_new(context, c->dtype, (int64_t)c->tokens * c->top_k, c->hidden, 16);
  const cumoe_status status = cumoe_permute(plan, x, route, rows, NULL);
  if (status != CUMOE_OK) return status;
  check_guards(context, "permuted rows", rows);
  return cumoe_up_permuted(plan, weights, cumoe_const(rows), route, pair_weights, out, NULL);
}

static cumoe_status gemm_on(cumoe_context context, const gemm_case *c, const gemm_run *run, tensor *got)
{
  cumoe_plan plan = NULL;
  CHECK_OK(cumoe_plan_create(context, &run->desc, &plan));
  cumoe_weights weights = weights_put(context, &run->host, c->form);
  cumoe_route route = route_put(context, &run->route);
  int64_t rows = (int64_t)c->tokens * c->top_k;
  cumoe_view_mut out = device_new(context, c->dtype, rows, run->up ? c->inter : c->hidden, 8);
  cumoe_view in = device_put(context, &run->input, 24);
  cumoe_view pair_weights = c->on_input && run->up ? device_put(context, &run->pair_weights, 1) : no_view();
  cumoe_status status = run->permuted ? permuted_up(context, c, plan, weights, in, &route, pair_weights, out)
                        : run->up     ? cumoe_up(plan, weights, in, &route, pair_weights, out, NULL)
                                      : cumoe_down(plan, weights, in, &route, out, NULL);
  *got = device_get(context, cumoe_const(out));
  check_guards(context, "rows", out);
  if (status == CUMOE_OK) check_fault(context, NULL, c->bad_route ? CUMOE_FAULT_ROUTE : CUMOE_FAULT_NONE);
  CHECK_OK(cumoe_weights_destroy(weights));
  CHECK_OK(cumoe_plan_destroy(plan));
  return status;
}

static void want_row(const gemm_case *c, const gemm_run *run, int64_t row, int32_t expert, bounded *want)
{
  int64_t pair = (int64_t)tensor_get(&run->route.row_pair, 0, row), from = run->up ? pair / c->top_k : row;
  int32_t outs = run->up ? c->inter : c->hidden, ins = run->up ? c->hidden : c->inter;
  double *a = scratch((size_t)ins, sizeof *a);
  bounded *h = scratch((size_t)ins, sizeof *h);
  for (int32_t i = 0; i < ins; i++) h[i] = (bounded){a[i] = tensor_get(&run->input, from, i), 0};
  bounded weight = {c->on_input ? tensor_get(&run->pair_weights, 0, pair) : 1, 0};
  if (run->up)
    oracle_up(&run->desc, &run->host, expert, a, weight, want);
  else
    oracle_down(&run->host, expert, h, want);
  bool exact = c->content == CONTENT_INTEGERS || c->content == CONTENT_CODES;
  for (int32_t n = 0; n < outs; n++)
    want[n] = exact ? (bounded){round_to(want[n].value, c->dtype), 0} : oracle_stored(want[n], c->dtype);
}

static bool row_is_poison(const tensor *t, int64_t row)
{
  size_t bytes = (size_t)t->cols * cumoe_dtype_bytes((cumoe_dtype)t->dtype);
  for (size_t i = 0; i < bytes; i++)
    if (t->data[(size_t)row * bytes + i] != test_poison) return false;
  return true;
}

static void check_rows(const gemm_case *c, const gemm_run *run)
{
  bounded *want = scratch((size_t)(c->inter + c->hidden), sizeof *want);
  bool good = true;
  for (int64_t row = 0; row < run->got[1].rows && good; row++)
    if (!row_used(&run->route, row) && !c->bad_route)
      good = CHECK_MSG(row_is_poison(&run->got[1], row), "row %d of no expert was written", (int)row);
  for (int32_t e = 0; e < c->experts - (c->bad_route != ROUTE_GOOD) && good; e++) {
    int64_t first = (int64_t)tensor_get(&run->route.offsets, 0, e),
            count = (int64_t)tensor_get(&run->route.counts, 0, e);
    for (int64_t row = first; row < first + count && good; row++) {
      char what[64];
      snprintf(what, sizeof what, "row %d, expert %d", (int)row, e);
      want_row(c, run, row, e, want);
      good = check_bounded_row(what, &run->got[1], row, want);
    }
  }
}

/* What a bad expert computes in the rows that it claims is nobody's. */
static void break_route(host_route *r, bad_route kind)
{
  int32_t last = (int32_t)r->counts.cols - 1;
  const int32_t bad_pairs[] = {INT32_MAX, INT32_MIN, -1};
  for (int64_t row = (int64_t)tensor_get(&r->offsets, 0, last); row < r->row_pair.cols; row++)
    tensor_set(&r->row_pair, 0, row, kind == HUGE_OFFSET ? -1 : bad_pairs[row % 3]);
  tensor_set(&r->counts, 0, last, kind == HUGE_COUNT ? INT32_MAX : (double)(r->row_pair.cols + 1));
  if (kind == HUGE_OFFSET) tensor_set(&r->offsets, 0, last, INT32_MAX);
  if (kind == NEGATIVE_OFFSET) tensor_set(&r->offsets, 0, last, -1e9);
}

/* The rows of no expert keep each pass's poison: they cannot be equal. */
static void check_passes(const gemm_run *run, tensor *a, const tensor *b)
{
  size_t bytes = (size_t)a->cols * cumoe_dtype_bytes((cumoe_dtype)a->dtype);
  for (int64_t row = 0; row < a->rows; row++)
    if (!row_used(&run->route, row)) memcpy(a->data + (size_t)row * bytes, b->data + (size_t)row * bytes, bytes);
  check_same("two poisons", a, b);
}

static void run_product(cumoe_context context, const gemm_case *c, bool up, bool permuted)
{
  rng r = {(uint64_t)c->experts * 1009 + (uint64_t)c->tokens * 31 + (uint64_t)c->hidden + (up ? 0 : 5)};
  name_case(permuted ? "permute, up" : up ? "up" : "down", c);
  gemm_run run = {.desc = gemm_desc(c), .host = make_weights(&r, c), .up = up, .permuted = permuted};
  tensor ids = route_tokens(&r, c->pattern, CUMOE_I32, c->tokens, c->top_k, c->experts);
  for (int64_t i = 0; i < ids.rows * ids.cols; i++)
    if (tensor_get(&ids, 0, i) < 0 || tensor_get(&ids, 0, i) >= c->experts) tensor_set(&ids, 0, i, -1);
  run.route = route_new(&ids, c->experts);
  run.input = make_rows(&r, c, up ? c->tokens : (int64_t)c->tokens * c->top_k, up ? c->hidden : c->inter);
  run.pair_weights = tensor_normal(&r, CUMOE_F32, c->tokens, c->top_k, 0.5, 0.2);
  if (c->bad_route) break_route(&run.route, c->bad_route);
  if (c->nan_token && run.input.rows > 1) tensor_set(&run.input, 1, 3, NAN);
  for (int pass = 0; pass < PASSES; pass++) {
    set_poison(pass);
    if (!case_served(context, gemm_on(context, c, &run, &run.got[pass]), up ? "cumoe_up" : "cumoe_down")) return;
  }
  if (c->bad_route != NEGATIVE_OFFSET) { /* there two experts write the same rows: only the guards count */
    check_passes(&run, &run.got[0], &run.got[1]);
    check_rows(c, &run);
  }
  case_end();
}

/* Rows in order mean the same as gathered ones, so they share the cases, a third of them. A bad route's row_pair is not
 * read for them. */
static void run_gemm(cumoe_context context, const gemm_case *c, bool up)
{
  if (!case_wanted(c->dtype)) return;
  run_product(context, c, up, false);
  if (up && !c->bad_route && (c->tokens + c->hidden / 8 + c->inter / 8) % 3 == 0) run_product(context, c, true, true);
}

/* ---- the table ------------------------------------------------------------------------------------- */

static const int32_t majors[2] = {CUMOE_OUT_IN, CUMOE_IN_OUT};

static int32_t pick(rng *r, const int32_t *list, int64_t count)
{
  return list[rng_below(r, count)];
}

/* Every layout with every dtype; the rest is drawn beside them. */
static gemm_case layout_case(int i)
{
  static const int32_t hiddens[] = {8, 24, 64, 72, 136, 200, 264}, inters[] = {16, 8, 40, 64, 104, 136},
                       ks[] = {1, 2, 3, 4, 6, 8, 9, 10};
  rng r = {(uint64_t)i};
  gemm_case c = {.dtype = case_dtypes[i / 24 % 3],
                 .tokens = pick(&r, case_tokens, 12),
                 .experts = pick(&r, case_experts, 3),
                 .top_k = pick(&r, ks, 8),
                 .hidden = pick(&r, hiddens, 7),
                 .inter = pick(&r, inters, 6),
                 .act = (int32_t)rng_below(&r, 7),
                 .pattern = (pattern)rng_below(&r, PATTERN_COUNT),
                 .content = rng_below(&r, 4) ? CONTENT_NORMAL : CONTENT_SAME_SIGN};
  int32_t biases[] = {0, CUMOE_F32, c.dtype};
  c.form = (weights_form){.gate_order = i % 24 / 4 + 1,
                          .up_major = majors[i % 2],
                          .down_major = pick(&r, majors, 2),
                          .bias = pick(&r, biases, 3),
                          .gap = (int32_t)rng_below(&r, 3),
                          .per_expert = i / 2 % 2};
  bool ungated = c.form.gate_order == CUMOE_UNGATED;
  if (ungated && c.act == CUMOE_ACT_SWIGLU_OAI) c.act = CUMOE_ACT_SILU;
  if (!ungated && rng_below(&r, 2)) c.limit = rng_below(&r, 2) ? 0.5f : 2;
  if (c.act == CUMOE_ACT_SWIGLU_OAI && rng_below(&r, 2)) c.alpha = 1;
  if (c.top_k > c.experts) c.top_k = c.experts;
  c.on_input = rng_below(&r, 4) == 0;
  c.nan_token = rng_below(&r, 6) == 0;
  return c;
}

static void run_layouts(cumoe_context context, bool up)
{
  for (int i = 0; i < 24 * 3 * 5; i++) {
    gemm_case c = layout_case(i);
    run_gemm(context, &c, up);
  }
}

static void run_expert_counts(cumoe_context context, bool up)
{
  static const int32_t ks[] = {1, 2, 8, 16, 17, 31, 32};
  for (int i = 0; i < 60; i++) {
    gemm_case c = {.dtype = case_dtypes[i % 3],
                   .tokens = case_tokens[i * 5 % 12],
                   .experts = case_experts[i / 6],
                   .top_k = ks[i % 7],
                   .hidden = 16,
                   .inter = 8,
                   .form = {i % 6 + 1, majors[i / 2 % 2], majors[i / 3 % 2], 0, 0, i % 4 == 3},
                   .pattern = (pattern)(i % PATTERN_COUNT)};
    if (c.top_k > c.experts) c.top_k = c.experts;
    if (c.form.gate_order == CUMOE_UNGATED) c.act = CUMOE_ACT_RELU2;
    run_gemm(context, &c, up);
  }
}

/* No tolerance: small integers, and address codes over every k of a tile. */
static void run_exact(cumoe_context context, bool up)
{
  for (int i = 0; i < 24 * 3; i++) {
    content kind = i / 12 % 2 ? CONTENT_INTEGERS : CONTENT_CODES;
    gemm_case c = {.dtype = case_dtypes[i / 24],
                   .tokens = 150,
                   .experts = 3,
                   .top_k = i % 2 + 1,
                   .hidden = i % 2 ? 136 : 72,
                   .inter = i % 3 ? 72 : 136,
                   .act = CUMOE_ACT_IDENTITY,
                   .content = kind,
                   .pattern = kind == CONTENT_CODES ? PATTERN_ROUND_ROBIN : PATTERN_ZIPF};
    c.form = (weights_form){.gate_order = i % 6 + 1,
                            .up_major = majors[i / 6 % 2],
                            .down_major = majors[i / 3 % 2],
                            .bias = kind == CONTENT_INTEGERS && i % 2 ? CUMOE_F32 : 0,
                            .gap = i % 2,
                            .per_expert = i / 2 % 2};
    if (c.form.gate_order == CUMOE_UNGATED) c.act = i % 4 ? CUMOE_ACT_RELU : CUMOE_ACT_IDENTITY;
    run_gemm(context, &c, up);
  }
}

static void run_bad_routes(cumoe_context context, bool up)
{
  for (int i = 0; i < 48; i++) {
    gemm_case c = {.dtype = case_dtypes[i % 3],
                   .tokens = 3 + i,
                   .experts = i % 2 ? 5 : 40,
                   .top_k = 3,
                   .hidden = 64,
                   .inter = 40,
                   .form = {i % 6 + 1, majors[i % 2], majors[i / 2 % 2], 0, 0, i % 4 == 1},
                   .pattern = PATTERN_ROUND_ROBIN,
                   .bad_route = (bad_route)(i / 3 % 4 + 1)};
    run_gemm(context, &c, up);
  }
}

/* Shapes of real layers, narrow in experts: deep sums, many tiles, rows of an expert past a tile. */
static void run_deep(cumoe_context context, bool up)
{
  static const int32_t tokens[] = {1, 5, 16, 33, 70, 140};
  for (int i = 0; i < 36; i++) {
    gemm_case c = {.dtype = case_dtypes[i % 3],
                   .tokens = tokens[i / 6],
                   .experts = i % 2 ? 2 : 5,
                   .top_k = 1,
                   .hidden = i % 2 ? 2048 : 1000,
                   .inter = i % 4 == 1 ? 1408 : 768,
                   .form = {i % 6 + 1, majors[i / 2 % 2], majors[i % 2], i % 3 ? 0 : CUMOE_F32, i % 2, i % 5 == 0},
                   .content = i % 4 == 3 ? CONTENT_SAME_SIGN : CONTENT_NORMAL,
                   .pattern = i % 2 ? PATTERN_ZIPF : PATTERN_UNIFORM};
    if (c.tokens > 33) c.inter = 264;
    run_gemm(context, &c, up);
  }
}

static void cases_gemm(cumoe_context context, bool up)
{
  run_layouts(context, up);
  run_expert_counts(context, up);
  run_exact(context, up);
  run_bad_routes(context, up);
  if (on_device(context)) run_deep(context, up);
}

void cases_up(cumoe_context context)
{
  cases_gemm(context, true);
}
void cases_down(cumoe_context context)
{
  cases_gemm(context, false);
}
