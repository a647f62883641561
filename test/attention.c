/*
 * cumoe/attention.h: values against double, gradients against differences in double, the adjoint of v, every mask and
 * form of sequences, bad offsets and pages, NaN, the same bits from any number of threads; rotary embedding.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <cuda_runtime_api.h>

#include "gradient.h"
#include "parts.h"

/* ---- cases ------------------------------------------------------------------------------------------ */

/* What the sequences are made of: none, offsets alone, other offsets for keys, a cache with gaps, keys in common,
 * pages, pages some of which are nowhere. */
typedef enum form { ONE, SELF, CROSS, CACHE, SHARED, PAGED, BAD_PAGES, FORMS } form;
static const char *const form_names[] = {"one", "self", "cross", "cache", "shared", "paged", "bad pages"};

enum { SEQUENCES = 4, PAGE = 3, PAGES = 3, QUERIES = 10 }; /* the last query is in no sequence */
static const int32_t q_offsets[] = {0, 3, 3, 8, 9};
static const struct {
  int32_t keys, offsets[SEQUENCES + 1], lengths[SEQUENCES];
} forms[] = {[ONE] = {13, {0}, {13}},
             [SELF] = {QUERIES, {0, 3, 3, 8, 9}, {3, 0, 5, 1}},
             [CROSS] = {14, {0, 4, 6, 6, 13}, {4, 2, 0, 7}},
             [CACHE] = {21, {0, 5, 10, 15, 20}, {4, 0, 5, 2}},
             [SHARED] = {9, {0, 0, 1, 0, 0}, {6, 3, 8, 3}},
             [PAGED] = {30, {0}, {4, 0, 9, 2}},
             [BAD_PAGES] = {30, {0}, {4, 0, 9, 2}}};
static const int32_t tables[2][SEQUENCES * PAGES] = {{7, 2, 0, 0, 0, 0, 1, 9, 4, 3, 0, 0},
                                                     {7, -1, 0, 0, 0, 0, 1, INT32_MAX, 4, INT32_MIN, 0, 0}};

typedef struct attention_case {
  form form;
  int32_t causal, heads, kv_heads, head_dim, window;
  float scale, softcap;
  int32_t sinks, dtype; /* sinks: their dtype, 0: none */
} attention_case;

typedef struct problem {
  const attention_case *c;
  int64_t queries, keys;
  tensor tq, tk, tv, tsinks, tdout;
  double *q, *k, *v, *sinks, *dout;
} problem;

static problem make_problem(rng *r, const attention_case *c)
{
  problem p = {.c = c, .queries = QUERIES, .keys = forms[c->form].keys};
  const int64_t q_cols = c->heads * c->head_dim, k_cols = c->kv_heads * c->head_dim;
  p.tq = tensor_normal(r, c->dtype, p.queries, q_cols, 0, 1);
  p.tk = tensor_normal(r, c->dtype, p.keys, k_cols, 0, 1);
  p.tv = tensor_normal(r, c->dtype, p.keys, k_cols, 0, 1);
  p.tdout = tensor_normal(r, c->dtype, p.queries, q_cols, 0, 1);
  p.tsinks = tensor_normal(r, c->sinks ? c->sinks : CUMOE_F32, 1, c->heads, 0, 1);
  p.q = doubles_of(&p.tq);
  p.k = doubles_of(&p.tk);
  p.v = doubles_of(&p.tv);
  p.dout = doubles_of(&p.tdout);
  p.sinks = doubles_of(&p.tsinks);
  return p;
}

/* ---- in double, by the definition ------------------------------------------------------------------- */

/* The row of key j of a sequence; -1: none. */
static int64_t row_of(const attention_case *c, int s, int64_t j)
{
  if (c->form < PAGED) return forms[c->form].offsets[s] + j;
  const int32_t page = tables[c->form == BAD_PAGES][s * PAGES + j / PAGE];
  return page < 0 || page >= 30 / PAGE ? -1 : (int64_t)page * PAGE + j % PAGE;
}

/* The rows that a query sees. */
static int list_seen(const problem *p, int64_t query, int64_t *rows)
{
  const attention_case *c = p->c;
  int s = 0, count = 0;
  int64_t n = p->queries, first = 0;
  if (c->form != ONE) {
    while (s < SEQUENCES && !(query >= q_offsets[s] && query < q_offsets[s + 1])) s++;
    if (s == SEQUENCES) return -1;
    first = q_offsets[s];
    n = q_offsets[s + 1] - first;
  }
  const int64_t m = forms[c->form].lengths[s], at = m - n + query - first;
  for (int64_t j = 0; j < m; j++) {
    const bool behind = !c->causal || j <= at, near = !c->window || (j > at - c->window && j < at + c->window);
    if (behind && near && row_of(c, s, j) >= 0) rows[count++] = row_of(c, s, j);
  }
  return count;
}

/* out [D] of a head, and the log of its sum. */
static double attend(const problem *p, int64_t query, int32_t head, double *out)
{
  const attention_case *c = p->c;
  const int32_t d = c->head_dim, ld = c->kv_heads * d, from = head / (c->heads / c->kv_heads) * d;
  const double scale = c->scale == 0 ? 1 / sqrt(d) : (double)c->scale, cap = (double)c->softcap;
  int64_t rows[64];
  double weights[64], sum = 0;
  const int count = list_seen(p, query, rows);
  for (int i = 0; i < count; i++) {
    const double s = scale * dot_of(p->q + query * c->heads * d + head * d, p->k + rows[i] * ld + from, d);
    sum += weights[i] = exp(cap > 0 ? cap * tanh(s / cap) : s);
  }
  if (c->sinks && count >= 0) sum += exp(p->sinks[head]);
  memset(out, 0, (size_t)d * sizeof *out);
  for (int i = 0; i < count; i++)
    for (int32_t x = 0; x < d; x++) out[x] += weights[i] / sum * p->v[rows[i] * ld + from + x];
  return log(sum);
}

/*
 * What f32 and the tensor cores may be off. A score is a sum of D products, so its error is below (D + 8) 2^-22 |q| |k|
 * scale, and 2^-21 of the cap; weights are off by twice that, are rounded to the values' type and have errors of 2^-22
 * of their own, like each of the sums over the keys.
 */
typedef struct device_error {
  double score, weight; /* of any score; of any weight and sum, relative */
} device_error;

static double longest(const double *x, int64_t count, int32_t d)
{
  double most = 0;
  for (int64_t i = 0; i < count; i += d) most = fmax(most, dot_of(x + i, x + i, d));
  return sqrt(most);
}

static device_error error_of(const problem *p, double keys)
{
  const attention_case *c = p->c;
  const double scale = c->scale == 0 ? 1 / sqrt(c->head_dim) : fabs((double)c->scale);
  const double size =
      scale * longest(p->q, p->tq.rows * p->tq.cols, c->head_dim) * longest(p->k, p->tk.rows * p->tk.cols, c->head_dim);
  const double score = ldexp((c->head_dim + 8) * size + 2 * fabs((double)c->softcap), -22);
  return (device_error){score,
                        2 * score + ldexp(keys + 8, -22) + (c->dtype == CUMOE_F32 ? 0 : unit_roundoff(c->dtype))};
}

static double loss_of(const void *user)
{
  const problem *p = user;
  const int32_t d = p->c->head_dim;
  double out[256], loss = 0;
  for (int64_t query = 0; query < p->queries; query++)
    for (int32_t head = 0; head < p->c->heads; head++) {
      attend(p, query, head, out);
      loss += dot_of(out, p->dout + (query * p->c->heads + head) * d, d);
    }
  return loss;
}

/* ---- calls ------------------------------------------------------------------------------------------ */

static cumoe_view put_indices(cumoe_context context, const int32_t *from, int64_t rows, int64_t cols)
{
  tensor t = tensor_new(CUMOE_I32, rows, cols);
  memcpy(t.data, from, (size_t)(rows * cols) * sizeof *from);
  return device_put(context, &t, rows > 1 ? 2 : 0);
}

/* All but the operands. */
static cumoe_attention_args args_of(const attention_case *c)
{
  return (cumoe_attention_args){.size = sizeof(cumoe_attention_args),
                                .flags = c->causal ? CUMOE_ATTENTION_CAUSAL : 0,
                                .heads = c->heads,
                                .kv_heads = c->kv_heads,
                                .head_dim = c->head_dim,
                                .window = c->window,
                                .scale = c->scale,
                                .softcap = c->softcap};
}

static cumoe_attention_args put_problem(cumoe_context context, const problem *p, int pad)
{
  const attention_case *c = p->c;
  cumoe_attention_args a = args_of(c);
  a.q = device_put(context, &p->tq, pad);
  a.k = device_put(context, &p->tk, 2 * pad);
  a.v = device_put(context, &p->tv, pad);
  if (c->sinks) a.sinks = device_put(context, &p->tsinks, 0);
  if (c->form != ONE) a.q_offsets = put_indices(context, q_offsets, 1, SEQUENCES + 1);
  if (c->form > SELF && c->form < PAGED) a.k_offsets = put_indices(context, forms[c->form].offsets, 1, SEQUENCES + 1);
  if (c->form > CROSS) a.k_lengths = put_indices(context, forms[c->form].lengths, 1, SEQUENCES);
  if (c->form >= PAGED) {
    a.page = PAGE;
    a.pages = put_indices(context, tables[c->form == BAD_PAGES], SEQUENCES, PAGES);
  }
  a.out = device_new(context, c->dtype, p->queries, p->tq.cols, pad);
  a.lse = device_new(context, CUMOE_F32, p->queries, c->heads, pad);
  return a;
}

static void check_forward(cumoe_context context, const problem *p, const cumoe_attention_args *a)
{
  const int32_t heads = p->c->heads, d = p->c->head_dim;
  const tensor out = device_get(context, cumoe_const(a->out)), lse = device_get(context, cumoe_const(a->lse));
  bounded *want = scratch((size_t)(p->queries * heads * d), sizeof *want);
  bounded *logs = scratch((size_t)(p->queries * heads), sizeof *logs);
  const device_error e = error_of(p, (double)p->keys);
  double row[256], most = 0;
  for (int64_t i = 0; i < p->keys * p->tv.cols; i++) most = fmax(most, fabs(p->v[i]));
  const double of_sum = on_device(context) ? e.weight * most : 0, of_score = on_device(context) ? e.score + 0x1p-20 : 0;
  for (int64_t i = 0; i < p->queries * heads; i++) {
    const double log = attend(p, i / heads, (int32_t)(i % heads), row);
    logs[i] = (bounded){log, isfinite(log) ? 0x1p-24 * fabs(log) + 1e-12 + of_score : 0};
    for (int32_t x = 0; x < d; x++)
      want[i * d + x] =
          (bounded){row[x], row[x] == 0 ? 0 : unit_roundoff(p->c->dtype) * fabs(row[x]) + 0x1p-25 + of_sum};
  }
  check_bounded("out", &out, want);
  check_bounded("lse", &lse, logs);
  check_guards(context, "out", a->out);
  check_guards(context, "lse", a->lse);
}

typedef struct gradients {
  tensor dq, dk, dv, dsinks;
} gradients;

static gradients run_backward(cumoe_context context, const problem *p, const cumoe_attention_args *a, int pad)
{
  gradients g = {.dq = {0}};
  cumoe_attention_backward_args b = {.size = sizeof b, .forward = a, .dout = device_put(context, &p->tdout, pad)};
  b.dq = device_new(context, p->c->dtype, p->queries, p->tq.cols, pad);
  b.dk = device_new(context, p->c->dtype, p->keys, p->tk.cols, 0);
  b.dv = device_new(context, p->c->dtype, p->keys, p->tk.cols, pad);
  b.delta = device_new(context, CUMOE_F32, p->queries, p->c->heads, pad);
  if (p->c->sinks) b.dsinks = device_new(context, CUMOE_F32, 1, p->c->heads, 0);
  CHECK_OK(cumoe_attention_backward(context, &b, NULL));
  check_guards(context, "dq", b.dq);
  check_guards(context, "dk", b.dk);
  check_guards(context, "dv", b.dv);
  check_guards(context, "delta", b.delta);
  g.dq = device_get(context, cumoe_const(b.dq));
  g.dk = device_get(context, cumoe_const(b.dk));
  g.dv = device_get(context, cumoe_const(b.dv));
  if (!p->c->sinks) return g;
  g.dsinks = device_get(context, cumoe_const(b.dsinks));
  b.flags = CUMOE_TRAIN_ACCUMULATE;
  CHECK_OK(cumoe_attention_backward(context, &b, NULL));
  const tensor twice = device_get(context, cumoe_const(b.dsinks));
  for (int64_t i = 0; i < twice.cols; i++)
    CHECK(fabs(tensor_get(&twice, 0, i) - 2 * tensor_get(&g.dsinks, 0, i)) <= 1e-6 * fabs(tensor_get(&twice, 0, i)));
  return g;
}

static void begin_case(const attention_case *c)
{
  case_begin("%s%s, heads %d of %d, D %d, window %d, scale %g, cap %g, sinks %d, %s", form_names[c->form],
             c->causal ? ", causal" : "", (int)c->heads, (int)c->kv_heads, (int)c->head_dim, (int)c->window,
             (double)c->scale, (double)c->softcap, (int)c->sinks, cumoe_dtype_name((cumoe_dtype)c->dtype));
}

/* ---- groups ----------------------------------------------------------------------------------------- */

static void run_case(cumoe_context context, const attention_case *c, bool differences)
{
  rng r = {(uint64_t)c->head_dim + c->form};
  begin_case(c);
  problem p = make_problem(&r, c);
  const cumoe_attention_args a = put_problem(context, &p, 3);
  CHECK_OK(cumoe_attention(context, &a, NULL));
  check_forward(context, &p, &a);
  check_fault(context, NULL, c->form == BAD_PAGES ? CUMOE_FAULT_SEQUENCE : CUMOE_FAULT_NONE);
  if (c->form < PAGED) {
    const gradients g = run_backward(context, &p, &a, 5);
    /* In f32: dot products, weights and their sums over what a query or key sees. */
    const double in_f32 = on_device(context) ? error_of(&p, 64).score + ldexp(c->head_dim + 64, -22) : 0;
    const double u = unit_roundoff(c->dtype), slack = 8 * u + in_f32;
    /* out is linear in v: <dout, out> = <dv, v>, both rounded as they were stored */
    const double *dv = doubles_of(&g.dv), of_v = dot_of(dv, p.v, p.keys * p.tv.cols), of_out = loss_of(&p);
    double size = 0;
    for (int64_t i = 0; i < p.keys * p.tv.cols; i++) size += fabs(dv[i] * p.v[i]);
    CHECK_MSG(fabs(of_v - of_out) <= slack * size, "<dv, v> is %.9g, <dout, out> %.9g", of_v, of_out);
    if (differences) {
      check_gradient("dq", loss_of, &p, p.q, &g.dq, slack);
      check_gradient("dk", loss_of, &p, p.k, &g.dk, slack);
      check_gradient("dv", loss_of, &p, p.v, &g.dv, slack);
      if (c->sinks) check_gradient("dsinks", loss_of, &p, p.sinks, &g.dsinks, slack);
    }
  }
  case_end();
}

/* Every form with and without causal mask and window, other options dealt; then sizes and types. */
static void test_masks(cumoe_context context)
{
  static const int32_t types[] = {CUMOE_F32, CUMOE_BF16, CUMOE_F32, CUMOE_F16};
  for (int i = 0; i < FORMS * 4; i++) {
    const attention_case c = {.form = (form)(i / 4),
                              .causal = i % 2,
                              .heads = i % 3 == 2 ? 3 : 4,
                              .kv_heads = i % 3 == 0   ? 1
                                          : i % 3 == 1 ? 2
                                                       : 3,
                              .head_dim = 8,
                              .window = i % 4 < 2 ? 0 : 3,
                              .scale = i % 5 == 0 ? .7f : 0,
                              .softcap = i % 7 < 3 ? 1.5f : 0,
                              .sinks = i % 3 == 0   ? CUMOE_F32
                                       : i % 6 == 1 ? types[i % 4]
                                                    : 0,
                              .dtype = types[i % 4]};
    run_case(context, &c, true);
  }
}

static void test_sizes(cumoe_context context)
{
  static const int32_t dims[] = {16, 32, 64, 80, 96, 128, 192, 256};
  for (int i = 0; i < 8; i++) {
    const attention_case c = {.form = i % 2 ? SELF : SHARED,
                              .causal = 1,
                              .heads = 4,
                              .kv_heads = i % 3 + 1 == 3 ? 4 : i % 3 + 1,
                              .head_dim = dims[i],
                              .dtype = case_dtypes[i % 3]};
    run_case(context, &c, false);
  }
}

static void test_nan(cumoe_context context)
{
  const attention_case c = {ONE, 1, 4, 2, 8, 0, 0, 0, 0, CUMOE_F32};
  rng r = {6};
  case_begin("in a query: its head; in a key or value: who sees it");
  problem p = make_problem(&r, &c);
  tensor_set(&p.tq, 2, 9, NAN);  /* head 1 */
  tensor_set(&p.tk, 11, 1, NAN); /* head 0: of heads 0, 1; keys 11, 12 are seen by queries 8, 9 on */
  tensor_set(&p.tv, 12, 8, NAN); /* head 1: of heads 2, 3 */
  const cumoe_attention_args a = put_problem(context, &p, 0);
  CHECK_OK(cumoe_attention(context, &a, NULL));
  const tensor out = device_get(context, cumoe_const(a.out));
  for (int64_t query = 0; query < QUERIES; query++)
    for (int64_t col = 0; col < 32; col++) {
      const int64_t head = col / 8;
      const bool want =
          (query == 2 && head == 1) || (query >= 8 && head < 2) || (query == 9 && head >= 2 && col % 8 == 0);
      CHECK_MSG(isnan(tensor_get(&out, query, col)) == want, "query %d column %d", (int)query, (int)col);
    }
  case_end();
  case_begin("scores of -infinity are not seen, and of nothing else nothing is left");
  p = make_problem(&r, &c);
  for (int64_t key = 0; key < 4; key++)
    for (int64_t x = 0; x < 8; x++) tensor_set(&p.tk, key, x, x == 0 ? -INFINITY : 0);
  for (int64_t query = 0; query < QUERIES; query++)
    for (int64_t head = 0; head < 2; head++) tensor_set(&p.tq, query, head * 8, 1);
  const cumoe_attention_args b = put_problem(context, &p, 0);
  CHECK_OK(cumoe_attention(context, &b, NULL));
  const tensor left = device_get(context, cumoe_const(b.out)), lse = device_get(context, cumoe_const(b.lse));
  for (int64_t x = 0; x < 16; x++) CHECK(tensor_get(&left, 0, x) == 0 && isfinite(tensor_get(&left, 5, x)));
  CHECK(tensor_get(&lse, 0, 0) == -INFINITY && isfinite(tensor_get(&lse, 1, 0)));
  case_end();
}

/* Nothing leads outside, whatever stands in the indices; forward and backward. */
static void test_hostile(cumoe_context context)
{
  static const int32_t bad[] = {INT32_MIN, -1, 0, 3, 5, 10, 11, 13, 100, INT32_MAX};
  for (int i = 0; i < 60; i++) {
    rng r = {(uint64_t)i};
    const attention_case c = {(form)(i % 6), i % 2, 2, 1, 8, i % 3, 0, 0, 0, CUMOE_BF16};
    case_begin("%s %d", form_names[c.form], i);
    problem p = make_problem(&r, &c);
    cumoe_attention_args a = put_problem(context, &p, 0);
    cumoe_view indices[] = {a.q_offsets, a.k_offsets, a.k_lengths, a.pages};
    for (int j = 0; j < 4; j++) {
      if (!indices[j].data) continue;
      tensor t = tensor_new(CUMOE_I32, indices[j].rows, indices[j].cols);
      for (int64_t x = 0; x < t.rows * t.cols; x++) tensor_set(&t, 0, x, bad[rng_below(&r, 10)]);
      device_set(context, as_mut(indices[j]), &t);
    }
    CHECK_OK(cumoe_attention(context, &a, NULL));
    const tensor out = device_get(context, cumoe_const(a.out));
    for (int64_t x = 0; x < out.rows * out.cols; x++) CHECK(isfinite(tensor_get(&out, 0, x)));
    check_guards(context, "out", a.out);
    if (c.form < PAGED) (void)run_backward(context, &p, &a, 0);
    CHECK_OK(cumoe_fault_clear(context, NULL));
    case_end();
  }
}

static void check_recorded(cumoe_context context, const cumoe_attention_args *a)
{
  cumoe_fault fault = {.size = sizeof fault};
  CHECK_OK(cumoe_attention(context, a, NULL));
  CHECK_OK(cumoe_fault_read(context, NULL, &fault));
  CHECK_MSG(fault.code == CUMOE_FAULT_SEQUENCE, "%d", (int)fault.code);
  CHECK_OK(cumoe_fault_clear(context, NULL));
  const tensor out = device_get(context, cumoe_const(a->out));
  for (int64_t x = 0; x < out.rows * out.cols; x++) CHECK(tensor_get(&out, 0, x) == 0);
}

/* Also of sequences that no query is in; and more keys than a kernel can count, of pages that repeat. */
static void test_recorded(cumoe_context context)
{
  static const int32_t outside[SEQUENCES + 1] = {0, 100, 100, 100, 100}, most[] = {INT32_MAX};
  enum { LONG_PAGE = 1 << 20, LONG_PAGES = 1 << 11 };
  static const int32_t pages[LONG_PAGES];
  for (int i = 0; i < 2; i++) {
    rng r = {7};
    const attention_case c = {SELF, 0, 2, 1, 8, 0, 0, 0, 0, i ? CUMOE_BF16 : CUMOE_F32};
    case_begin("offsets outside, %s", cumoe_dtype_name((cumoe_dtype)c.dtype));
    problem p = make_problem(&r, &c);
    cumoe_attention_args a = put_problem(context, &p, 0);
    a.q_offsets = put_indices(context, outside, 1, SEQUENCES + 1);
    check_recorded(context, &a);
    case_end();
    case_begin("2^31 - 1 keys, %s", cumoe_dtype_name((cumoe_dtype)c.dtype));
    const cumoe_view k = cumoe_const(device_new(context, c.dtype, LONG_PAGE, 8, 0));
    const tensor q = tensor_normal(&r, c.dtype, 2, 16, 0, 1);
    const cumoe_attention_args far = {.size = sizeof far,
                                      .heads = 2,
                                      .kv_heads = 1,
                                      .head_dim = 8,
                                      .page = LONG_PAGE,
                                      .window = 16,
                                      .q = device_put(context, &q, 0),
                                      .k = k,
                                      .v = k,
                                      .k_lengths = put_indices(context, most, 1, 1),
                                      .pages = put_indices(context, pages, 1, LONG_PAGES),
                                      .out = device_new(context, c.dtype, 2, 16, 0)};
    check_recorded(context, &far);
    case_end();
  }
}

/* A table without columns has nowhere to lie. */
static void test_no_pages(cumoe_context context)
{
  static const int32_t lengths[][2] = {{0, 0}, {5, 0}}, offsets[] = {0, 2, 4};
  for (int i = 0; i < 4; i++) {
    rng r = {5};
    const int32_t dtype = i / 2 ? CUMOE_BF16 : CUMOE_F32;
    cumoe_fault fault = {.size = sizeof fault};
    case_begin("no pages, %d keys, %s", (int)lengths[i % 2][0], cumoe_dtype_name((cumoe_dtype)dtype));
    const tensor q = tensor_normal(&r, dtype, 4, 8, 0, 1), k = tensor_normal(&r, dtype, 16, 8, 1, 1);
    const cumoe_attention_args a = {.size = sizeof a,
                                    .heads = 1,
                                    .kv_heads = 1,
                                    .head_dim = 8,
                                    .page = 4,
                                    .q = device_put(context, &q, 0),
                                    .k = device_put(context, &k, 0),
                                    .v = device_put(context, &k, 0),
                                    .q_offsets = put_indices(context, offsets, 1, 3),
                                    .k_lengths = put_indices(context, lengths[i % 2], 1, 2),
                                    .pages = {.rows = 2, .device = CUMOE_DEVICE_ANY, .dtype = CUMOE_I32},
                                    .out = device_new(context, dtype, 4, 8, 0)};
    CHECK_OK(cumoe_fault_clear(context, NULL));
    CHECK_OK(cumoe_attention(context, &a, NULL));
    CHECK_OK(cumoe_fault_read(context, NULL, &fault));
    CHECK_MSG(fault.code == (i % 2 ? CUMOE_FAULT_SEQUENCE : CUMOE_FAULT_NONE), "code %d", (int)fault.code);
    const tensor out = device_get(context, cumoe_const(a.out));
    for (int64_t x = 0; x < 4 * 8; x++) CHECK(tensor_get(&out, 0, x) == 0);
    CHECK_OK(cumoe_fault_clear(context, NULL));
    case_end();
  }
}

static void test_wide_cap(cumoe_context context)
{
  rng r = {3};
  const attention_case c = {SELF, 1, 2, 1, 8, 0, 0, 0, 0, CUMOE_BF16};
  case_begin("a cap past all scores");
  problem p = make_problem(&r, &c);
  cumoe_attention_args a = put_problem(context, &p, 0);
  CHECK_OK(cumoe_attention(context, &a, NULL));
  const tensor without = device_get(context, cumoe_const(a.out));
  a.softcap = FLT_MAX;
  a.out = device_new(context, c.dtype, p.queries, p.tq.cols, 0);
  CHECK_OK(cumoe_attention(context, &a, NULL));
  const tensor with = device_get(context, cumoe_const(a.out));
  check_same("out", &with, &without);
  case_end();
}

/* One token a sequence against a cache is the last row of the whole. */
static void test_decode(cumoe_context context)
{
  const attention_case c = {ONE, 1, 4, 2, 16, 0, 0, 0, CUMOE_F32, CUMOE_BF16};
  rng r = {9};
  case_begin("as prefill's last query, on the CPU by the same bits; no queries, no keys");
  problem p = make_problem(&r, &c);
  cumoe_attention_args a = put_problem(context, &p, 0);
  CHECK_OK(cumoe_attention(context, &a, NULL));
  const tensor whole = device_get(context, cumoe_const(a.out));
  CHECK_OK(cumoe_view_rows(a.q, QUERIES - 1, 1, &a.q));
  a.out = device_new(context, CUMOE_BF16, 1, 64, 0);
  a.lse = no_view_mut();
  CHECK_OK(cumoe_attention(context, &a, NULL));
  const tensor last = device_get(context, cumoe_const(a.out));
  double most = 0;
  for (int64_t i = 0; i < p.keys * p.tv.cols; i++) most = fmax(most, fabs(p.v[i]));
  for (int64_t i = 0; i < 64; i++) {
    const double want = tensor_get(&whole, QUERIES - 1, i),
                 bound = on_device(context) ? 0x1p-8 * (2 * most + fabs(want)) : 0;
    CHECK(fabs(tensor_get(&last, 0, i) - want) <= bound);
  }
  a.q.rows = a.out.rows = 0;
  CHECK_OK(cumoe_attention(context, &a, NULL));
  a.q.rows = a.out.rows = 1;
  a.k.rows = a.v.rows = 0;
  CHECK_OK(cumoe_attention(context, &a, NULL));
  case_end();
}

/* ---- CUDA against the CPU device: tiles, parts, pages ----------------------------------------------- */

typedef struct shape_case {
  int32_t queries, keys, sequences; /* sequences 0: one, without offsets; else of lengths by chance */
  int32_t page, pad;                /* pad: of every view, so that rows are not aligned */
  int32_t irregular;                /* offsets that do not ascend */
  attention_case c;
} shape_case;

static const shape_case shapes[] = {
    {300, 300, 0, 0, 0, 0, {ONE, 1, 4, 4, 128, 0, 0, 0, 0, CUMOE_BF16}},
    {131, 517, 0, 0, 8, 0, {ONE, 1, 8, 2, 128, 0, 0, 0, CUMOE_F32, CUMOE_F16}},
    {200, 90, 0, 0, 3, 0, {ONE, 0, 4, 1, 64, 0, 0, 0, CUMOE_BF16, CUMOE_BF16}},
    {200, 90, 0, 0, 0, 0, {ONE, 1, 4, 1, 64, 0, -.3f, 0, 0, CUMOE_BF16}},
    {150, 400, 0, 0, 0, 0, {ONE, 1, 4, 2, 256, 70, 0, 0, 0, CUMOE_BF16}},
    {150, 400, 0, 0, 8, 0, {ONE, 0, 4, 2, 72, 45, 0, 20, CUMOE_F32, CUMOE_F16}},
    {90, 200, 0, 0, 1, 0, {ONE, 1, 6, 2, 200, 0, 0, 5, 0, CUMOE_F16}},
    {64, 64, 0, 0, 0, 0, {ONE, 1, 32, 2, 8, 0, 0, 0, 0, CUMOE_BF16}},
    {257, 600, 7, 0, 0, 0, {CROSS, 1, 4, 2, 128, 0, 0, 0, 0, CUMOE_BF16}},
    {257, 600, 7, 16, 0, 0, {PAGED, 1, 4, 2, 128, 0, 0, 0, CUMOE_F32, CUMOE_BF16}},
    {257, 600, 7, 5, 3, 0, {BAD_PAGES, 1, 4, 2, 64, 33, 0, 0, 0, CUMOE_F16}},
    {120, 300, 9, 0, 0, 1, {CROSS, 1, 4, 1, 64, 0, 0, 0, CUMOE_F32, CUMOE_BF16}},
    {1, 3000, 0, 0, 0, 0, {ONE, 1, 8, 2, 128, 0, 0, 0, 0, CUMOE_BF16}},
    {4, 1000, 0, 0, 0, 0, {ONE, 1, 8, 2, 256, 0, 0, 0, CUMOE_F32, CUMOE_F16}},
    {3, 777, 0, 0, 1, 0, {ONE, 1, 2, 1, 64, 300, 0, 30, 0, CUMOE_BF16}},
    {5, 3000, 5, 16, 0, 0, {PAGED, 1, 8, 2, 128, 0, 0, 0, CUMOE_BF16, CUMOE_BF16}},
    {70, 2000, 70, 0, 0, 0, {CROSS, 1, 16, 2, 64, 0, 0, 0, 0, CUMOE_F16}},
    {40, 900, 40, 7, 0, 1, {BAD_PAGES, 1, 8, 8, 80, 0, 0, 0, CUMOE_F32, CUMOE_BF16}},
    {90, 120, 3, 0, 0, 0, {CROSS, 1, 4, 2, 48, 0, 0, 0, CUMOE_F32, CUMOE_F32}},
    {200, 130, 0, 0, 0, 0, {ONE, 0, 2, 2, 128, 40, 0, 3, 0, CUMOE_BF16}},
    {33, 310, 2, 0, 0, 0, {CROSS, 0, 6, 2, 128, 0, 0, 0, 0, CUMOE_F16}},
};

/* Ascending, of `total` in all, some of them empty; irregular: one is moved. */
static tensor make_offsets(rng *r, int32_t sequences, int32_t total, bool irregular)
{
  tensor t = tensor_new(CUMOE_I32, 1, sequences + 1);
  for (int32_t i = 0; i <= sequences; i++) tensor_set(&t, 0, i, (double)((int64_t)total * i / sequences));
  for (int32_t i = 1; i < sequences && total > 2 * sequences; i++)
    tensor_set(&t, 0, i, (double)((int64_t)total * i / sequences - rng_below(r, total / sequences + 1)));
  if (total > 4 * sequences) tensor_set(&t, 0, 0, 3); /* queries that are in no sequence */
  if (irregular) tensor_set(&t, 0, sequences / 2, total - 2.);
  return t;
}

static cumoe_attention_args put_shape(cumoe_context context, const shape_case *s, const problem *p, const tensor *v)
{
  const attention_case *c = &s->c;
  rng r = {(uint64_t)s->queries};
  cumoe_attention_args a = args_of(c);
  a.page = s->page;
  a.q = device_put(context, &p->tq, s->pad);
  a.k = device_put(context, &p->tk, s->pad);
  a.v = device_put(context, v, s->pad);
  if (c->sinks) a.sinks = device_put(context, &p->tsinks, 0);
  a.out = device_new(context, c->dtype, p->queries, p->tq.cols, s->pad);
  a.lse = device_new(context, CUMOE_F32, p->queries, c->heads, s->pad);
  if (!s->sequences) return a;
  const tensor firsts = make_offsets(&r, s->sequences, s->queries, s->irregular);
  tensor k_offsets = make_offsets(&r, s->sequences, s->keys, false);
  tensor_set(&k_offsets, 0, 0, 0);
  a.q_offsets = device_put(context, &firsts, 0);
  if (!s->page) {
    a.k_offsets = device_put(context, &k_offsets, 0);
    return a;
  }
  const int64_t each = s->keys / s->sequences / s->page + 2, pages = s->keys / s->page;
  tensor lengths = tensor_new(CUMOE_I32, 1, s->sequences), table = tensor_new(CUMOE_I32, s->sequences, each);
  for (int32_t i = 0; i < s->sequences; i++) tensor_set(&lengths, 0, i, (double)rng_below(&r, each * s->page));
  for (int64_t i = 0; i < s->sequences * each; i++)
    tensor_set(&table, 0, i, c->form == BAD_PAGES && i % 5 == 1 ? -1. : (double)rng_below(&r, pages));
  a.k_lengths = device_put(context, &lengths, 0);
  a.pages = device_put(context, &table, 1);
  return a;
}

/* ---- backward: CUDA against the CPU device ---------------------------------------------------------- */

/* What gradients may be off; before they are rounded, when it is of what the CPU device computed. */
typedef struct backward_bounds {
  double *q, *k, *v;
} backward_bounds;

typedef struct pair_sizes {
  double weight, g; /* of the weight's error; of that of the score's gradient */
} pair_sizes;

/*
 * A weight is off by e = 2 score error (and what its logarithm is rounded by), and is rounded to the values' type; g =
 * p (dp - delta) by that, by the sums of D products that dp and delta are, by the cap's derivative, and by a rounding.
 */
static pair_sizes sizes_of(const problem *p, const device_error *e, const double *out, int64_t query, int32_t head,
                           int64_t key, double lse)
{
  const attention_case *c = p->c;
  const int32_t d = c->head_dim, from = head / (c->heads / c->kv_heads) * d;
  const int64_t at = (query * c->heads + head) * d, row = key * c->kv_heads * d + from;
  const double scale = c->scale == 0 ? 1 / sqrt(d) : (double)c->scale, cap = (double)c->softcap;
  double s = scale * dot_of(p->q + at, p->k + row, d), dp = 0, delta = 0, size = 0;
  for (int32_t x = 0; x < d; x++) {
    const double along = p->dout[at + x] * p->v[row + x], own = p->dout[at + x] * out[at + x];
    dp += along;
    delta += own;
    size += fabs(along) + fabs(own);
  }
  s = cap > 0 ? cap * tanh(s / cap) : s;
  const double weight = isfinite(lse) ? exp(s - lse) : 0, u = c->dtype == CUMOE_F32 ? 0 : unit_roundoff(c->dtype);
  const double relative = 2 * e->score + ldexp(16 + fabs(lse), -22),
               of_cap = cap > 0 ? 2 * e->score / cap + 0x1p-20 : 0;
  return (pair_sizes){weight * (relative + u) + 0x1p-25,
                      weight * (fabs(dp - delta) * (relative + of_cap + u) + size * ldexp(d + 16, -22)) + 0x1p-25};
}

static void add_bounds(const problem *p, backward_bounds *b, const pair_sizes *sizes, int64_t query, int32_t head,
                       int64_t key)
{
  const attention_case *c = p->c;
  const int32_t d = c->head_dim, from = head / (c->heads / c->kv_heads) * d;
  const int64_t at = (query * c->heads + head) * d, row = key * c->kv_heads * d + from;
  const double scale = c->scale == 0 ? 1 / sqrt(d) : fabs((double)c->scale);
  for (int32_t x = 0; x < d; x++) {
    b->q[at + x] += scale * sizes->g * fabs(p->k[row + x]);
    b->k[row + x] += scale * sizes->g * fabs(p->q[at + x]);
    b->v[row + x] += sizes->weight * fabs(p->dout[at + x]);
  }
}

/* Of every pair of a query and a key that it may see; sequences of offsets that are inconsistent count for nothing. */
static backward_bounds bound_backward(const problem *p, const double *out, const double *lse, const tensor *firsts,
                                      const tensor *keys)
{
  const attention_case *c = p->c;
  const device_error e = error_of(p, (double)p->keys);
  backward_bounds b = {scratch((size_t)(p->tq.rows * p->tq.cols), sizeof(double)),
                       scratch((size_t)(p->tk.rows * p->tk.cols), sizeof(double)),
                       scratch((size_t)(p->tk.rows * p->tk.cols), sizeof(double))};
  const int64_t sequences = firsts ? firsts->cols - 1 : 1;
  for (int64_t i = 0; i < sequences; i++) {
    const int64_t first = firsts ? (int64_t)tensor_get(firsts, 0, i) : 0,
                  key = keys ? (int64_t)tensor_get(keys, 0, i) : 0;
    const int64_t n = firsts ? (int64_t)tensor_get(firsts, 0, i + 1) - first : p->queries;
    const int64_t m = keys ? (int64_t)tensor_get(keys, 0, i + 1) - key : p->keys;
    for (int64_t q = 0; q < n; q++)
      for (int64_t j = 0; j < m; j++) {
        const int64_t at = m - n + q;
        if ((c->causal && j > at) || (c->window && (j <= at - c->window || j >= at + c->window))) continue;
        for (int32_t h = 0; h < c->heads; h++) {
          const pair_sizes sizes = sizes_of(p, &e, out, first + q, h, key + j, lse[(first + q) * c->heads + h]);
          add_bounds(p, &b, &sizes, first + q, h, key + j);
        }
      }
  }
  return b;
}

static cumoe_attention_backward_args put_backward(cumoe_context context, const problem *p,
                                                  const cumoe_attention_args *a, int pad)
{
  cumoe_attention_backward_args b = {.size = sizeof b, .forward = a, .dout = device_put(context, &p->tdout, pad)};
  b.dq = device_new(context, p->c->dtype, p->queries, p->tq.cols, pad);
  b.dk = device_new(context, p->c->dtype, p->keys, p->tk.cols, pad);
  b.dv = device_new(context, p->c->dtype, p->keys, p->tk.cols, pad);
  b.delta = device_new(context, CUMOE_F32, p->queries, p->c->heads, pad);
  if (p->c->sinks) b.dsinks = device_new(context, CUMOE_F32, 1, p->c->heads, 0);
  return b;
}

static void check_against(cumoe_context context, cumoe_context cpu, const char *what, cumoe_view_mut got,
                          cumoe_view_mut want, const double *bound)
{
  const tensor ours = device_get(context, cumoe_const(got)), theirs = device_get(cpu, cumoe_const(want));
  bounded *all = scratch((size_t)(ours.rows * ours.cols), sizeof *all);
  for (int64_t i = 0; i < ours.rows * ours.cols; i++) {
    const double value = tensor_get(&theirs, 0, i);
    all[i] = (bounded){value, bound[i] * (1 + 0x1p-10) + 2 * unit_roundoff(ours.dtype) * fabs(value) + 0x1p-24};
  }
  check_bounded(what, &ours, all);
  check_guards(context, what, got);
}

/* One call, with whichever rows are forced; what they cannot serve is left out. */
static void check_gradients(cumoe_context context, cumoe_context cpu, const problem *p, const cumoe_attention_args *a,
                            const cumoe_attention_backward_args *want, const backward_bounds *e, int pad)
{
  const cumoe_attention_backward_args ours = put_backward(context, p, a, pad);
  const cumoe_status status = cumoe_attention_backward(context, &ours, NULL);
  if (status == CUMOE_ERR_NOT_SUPPORTED) return;
  if (!CHECK_OK(status)) return;
  check_against(context, cpu, "dq", ours.dq, want->dq, e->q);
  check_against(context, cpu, "dk", ours.dk, want->dk, e->k);
  check_against(context, cpu, "dv", ours.dv, want->dv, e->v);
  const cumoe_attention_backward_args again = put_backward(context, p, a, 0);
  CHECK_OK(cumoe_attention_backward(context, &again, NULL));
  const cumoe_view_mut first[] = {ours.dq, ours.dk, ours.dv, ours.delta},
                       second[] = {again.dq, again.dk, again.dv, again.delta};
  for (int i = 0; i < 4; i++) {
    const tensor x = device_get(context, cumoe_const(first[i])), y = device_get(context, cumoe_const(second[i]));
    check_same("again", &x, &y);
  }
}

/* Every row of the two large kernels in turn. Both devices are given what the CPU device's forward left. */
static void check_backward(cumoe_context context, cumoe_context cpu, const shape_case *s, problem *p,
                           const cumoe_attention_args *a, const cumoe_attention_args *b)
{
  rng r = {(uint64_t)(s->queries + s->keys)};
  const tensor out = device_get(cpu, cumoe_const(b->out)), lse = device_get(cpu, cumoe_const(b->lse));
  tensor firsts, keys;
  p->tdout = tensor_normal(&r, s->c.dtype, p->queries, p->tq.cols, 0, 1);
  p->v = doubles_of(&p->tv);
  p->dout = doubles_of(&p->tdout);
  device_set(context, a->out, &out);
  device_set(context, a->lse, &lse);
  if (s->sequences) {
    firsts = device_get(cpu, b->q_offsets);
    keys = device_get(cpu, b->k_offsets);
  }
  const cumoe_attention_backward_args theirs = put_backward(cpu, p, b, 0);
  CHECK_OK(cumoe_attention_backward(cpu, &theirs, NULL));
  const backward_bounds e =
      bound_backward(p, doubles_of(&out), doubles_of(&lse), s->sequences ? &firsts : NULL, s->sequences ? &keys : NULL);
  check_gradients(context, cpu, p, a, &theirs, &e, s->pad);
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    cumoe_variant_info info = {.size = sizeof info};
    if (!CHECK_OK(cumoe_variant_get(context, i, &info)) || !info.usable) continue;
    if (strcmp(info.op, "attention_dq") != 0 && strcmp(info.op, "attention_dkv") != 0) continue;
    CHECK_OK(cumoe_variant_force(context, i));
    check_gradients(context, cpu, p, a, &theirs, &e, 0);
    CHECK_OK(cumoe_variant_force(context, -1));
  }
}

/* The bound is by what the CPU device makes of |v|, the sum of weight |v|. */
static void check_shape(cumoe_context context, cumoe_context cpu, const shape_case *s)
{
  rng r = {(uint64_t)(s->queries * 7 + s->keys)};
  problem p = {.c = &s->c, .queries = s->queries, .keys = s->keys};
  p.tq = tensor_normal(&r, s->c.dtype, p.queries, s->c.heads * s->c.head_dim, 0, 1);
  p.tk = tensor_normal(&r, s->c.dtype, p.keys, s->c.kv_heads * s->c.head_dim, 0, 1);
  p.tv = tensor_normal(&r, s->c.dtype, p.keys, s->c.kv_heads * s->c.head_dim, 0, 1);
  p.tsinks = tensor_normal(&r, s->c.sinks ? s->c.sinks : CUMOE_F32, 1, s->c.heads, 0, 1);
  p.q = doubles_of(&p.tq);
  p.k = doubles_of(&p.tk);
  const tensor size = tensor_copy(&p.tv);
  for (int64_t i = 0; i < size.rows * size.cols; i++) tensor_set(&size, 0, i, fabs(tensor_get(&p.tv, 0, i)));
  const cumoe_attention_args a = put_shape(context, s, &p, &p.tv), b = put_shape(cpu, s, &p, &p.tv),
                             sizes = put_shape(cpu, s, &p, &size);
  CHECK_OK(cumoe_attention(context, &a, NULL));
  CHECK_OK(cumoe_attention(cpu, &b, NULL));
  CHECK_OK(cumoe_attention(cpu, &sizes, NULL));
  const tensor out = device_get(context, cumoe_const(a.out)), lse = device_get(context, cumoe_const(a.lse));
  const tensor want_out = device_get(cpu, cumoe_const(b.out)), want_lse = device_get(cpu, cumoe_const(b.lse)),
               weighed = device_get(cpu, cumoe_const(sizes.out));
  const device_error e = error_of(&p, s->keys);
  bounded *want = scratch((size_t)(out.rows * out.cols), sizeof *want),
          *logs = scratch((size_t)(lse.rows * lse.cols), sizeof *logs);
  for (int64_t i = 0; i < out.rows * out.cols; i++) {
    const double value = tensor_get(&want_out, 0, i);
    want[i] = (bounded){value, 2 * unit_roundoff(s->c.dtype) * fabs(value) + 2 * e.weight * tensor_get(&weighed, 0, i) +
                                   0x1p-24};
  }
  for (int64_t i = 0; i < lse.rows * lse.cols; i++) {
    const double value = tensor_get(&want_lse, 0, i);
    logs[i] = (bounded){value, isfinite(value) ? e.score + ldexp(s->keys + 16 + 8 * fabs(value), -22) : 0};
  }
  check_bounded("out", &out, want);
  check_bounded("lse", &lse, logs);
  check_guards(context, "out", a.out);
  check_guards(context, "lse", a.lse);
  cumoe_attention_args again = a;
  again.out = device_new(context, s->c.dtype, p.queries, p.tq.cols, 0);
  CHECK_OK(cumoe_attention(context, &again, NULL));
  const tensor twice = device_get(context, cumoe_const(again.out));
  check_same("again", &twice, &out);
  if (!s->page) check_backward(context, cpu, s, &p, &a, &b);
  CHECK_OK(cumoe_fault_clear(context, NULL));
}

/* The CPU device beside itself has small ones alone: what it computes is compared with a definition above. So have
 * kernels that the CPU runs (SMALL in the environment), which take a minute for each of the others. */
static bool shape_is_asked_for(cumoe_context context, const shape_case *s)
{
  const int64_t pairs = (int64_t)s->queries * s->keys / (s->sequences ? s->sequences : 1);
  const bool all = on_device(context) && getenv("SMALL") == NULL;
  return all || pairs * s->c.heads * s->c.head_dim < 12000000;
}

static void test_shapes(cumoe_context context)
{
  cumoe_context cpu = NULL;
  if (!CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &cpu))) return;
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    const shape_case *s = &shapes[i];
    if (!shape_is_asked_for(context, s)) continue;
    case_begin("%d of %d queries, %d keys, %d sequences, page %d, pad %d, D %d, %s", (int)i, (int)s->queries,
               (int)s->keys, (int)s->sequences, (int)s->page, (int)s->pad, (int)s->c.head_dim,
               cumoe_dtype_name((cumoe_dtype)s->c.dtype));
    check_shape(context, cpu, s);
    case_end();
  }
  CHECK_OK(cumoe_context_destroy(cpu));
}

static attention_case random_attention(rng *r, int32_t keys)
{
  static const int32_t dims[] = {64, 80, 96, 128, 192, 256};
  attention_case c = {.form = ONE, .causal = (int32_t)rng_below(r, 2), .kv_heads = 1 + (int32_t)rng_below(r, 3)};
  c.heads = c.kv_heads * (1 + (int32_t)rng_below(r, 6));
  c.head_dim = rng_below(r, 3) ? dims[rng_below(r, 6)] : 8 * (1 + (int32_t)rng_below(r, 32));
  if (rng_below(r, 3) == 0) c.window = 1 + (int32_t)rng_below(r, keys);
  if (rng_below(r, 4) == 0) c.scale = (float)(rng_uniform(r) - .5);
  if (rng_below(r, 4) == 0) c.softcap = (float)(1 + 40 * rng_uniform(r));
  c.dtype = case_dtypes[rng_below(r, 3)];
  const int32_t sinks[] = {0, CUMOE_F32, c.dtype};
  c.sinks = sinks[rng_below(r, 3)];
  return c;
}

/* Any mask, heads, lengths and pages together. */
static shape_case random_shape(rng *r)
{
  static const int32_t pads[] = {0, 0, 1, 3, 8};
  shape_case s = {.queries = 1 + (int32_t)rng_below(r, rng_below(r, 3) ? 200 : 6)};
  s.keys = 1 + (int32_t)rng_below(r, rng_below(r, 3) ? 300 : 2000);
  s.pad = pads[rng_below(r, 5)];
  s.c = random_attention(r, s.keys);
  if (rng_below(r, 2)) return s;
  s.c.form = CROSS;
  s.sequences = 1 + (int32_t)rng_below(r, 9);
  if (rng_below(r, 2)) {
    s.page = 1 + (int32_t)rng_below(r, s.keys < 20 ? s.keys : 20);
    s.c.form = rng_below(r, 2) ? PAGED : BAD_PAGES;
  } else {
    s.irregular = s.sequences > 1 && s.queries > 2 && rng_below(r, 4) == 0;
  }
  return s;
}

static void test_random(cumoe_context context)
{
  const seed_range seeds = test_seeds(getenv("SMALL") ? 4 : 40);
  cumoe_context cpu = NULL;
  if (!CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &cpu))) return;
  for (int i = seeds.first; i < seeds.end; i++) {
    rng r = {(uint64_t)i * 11 + 5};
    const shape_case s = random_shape(&r);
    case_begin("seed %d: %d queries, %d keys, %d sequences, page %d, pad %d, heads %d of %d, D %d, window %d, %s", i,
               (int)s.queries, (int)s.keys, (int)s.sequences, (int)s.page, (int)s.pad, (int)s.c.heads,
               (int)s.c.kv_heads, (int)s.c.head_dim, (int)s.c.window, cumoe_dtype_name((cumoe_dtype)s.c.dtype));
    check_shape(context, cpu, &s);
    case_end();
  }
  CHECK_OK(cumoe_context_destroy(cpu));
}

/* What is not seen has no part in a result, even where it is NaN or infinite; tiles leave such rows to another path. */
static void test_nan_in_tiles(cumoe_context context)
{
  static const int32_t queries[] = {100, 2};
  for (int i = 0; i < 4; i++) {
    const shape_case s = {
        queries[i % 2], 130, 0, 0, 0, 0, {ONE, 1, 4, 2, 64, 0, 0, 0, 0, i < 2 ? CUMOE_BF16 : CUMOE_F16}};
    const int64_t n = queries[i % 2], bad = n == 2 ? 129 : 75;
    rng r = {5};
    case_begin("%d queries, %s", (int)n, cumoe_dtype_name((cumoe_dtype)s.c.dtype));
    problem p = {.c = &s.c, .queries = n, .keys = 130};
    p.tq = tensor_normal(&r, s.c.dtype, n, 256, 0, 1);
    p.tk = tensor_normal(&r, s.c.dtype, 130, 128, 0, 1);
    p.tv = tensor_normal(&r, s.c.dtype, 130, 128, 0, 1);
    p.tsinks = tensor_normal(&r, CUMOE_F32, 1, 4, 0, 1);
    const cumoe_attention_args clean = put_shape(context, &s, &p, &p.tv);
    CHECK_OK(cumoe_attention(context, &clean, NULL));
    tensor_set(&p.tv, bad, 5, NAN);       /* of heads 0, 1 */
    tensor_set(&p.tv, bad, 70, INFINITY); /* of heads 2, 3 */
    tensor_set(&p.tk, bad, 70, NAN);
    const cumoe_attention_args a = put_shape(context, &s, &p, &p.tv);
    CHECK_OK(cumoe_attention(context, &a, NULL));
    const tensor out = device_get(context, cumoe_const(a.out)), want = device_get(context, cumoe_const(clean.out));
    for (int64_t q = 0; q < n; q++)
      for (int64_t c = 0; c < 256; c++) {
        const bool sees = 130 - n + q >= bad, is_nan = sees && (c >= 128 || c % 64 == 5);
        const double value = tensor_get(&out, q, c), before = tensor_get(&want, q, c);
        CHECK_MSG(isnan(value) == is_nan, "query %d column %d", (int)q, (int)c);
        if (!is_nan) CHECK_MSG(fabs(value - before) <= .02 * (1 + fabs(before)), "query %d column %d", (int)q, (int)c);
      }
    case_end();
  }
}

/* Backward: NaN where the CPU device has it, and nowhere else; tiles leave such rows to another path. */
static void test_nan_backward(cumoe_context context)
{
  cumoe_context cpu = NULL;
  if (!CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &cpu))) return;
  for (int i = 0; i < 8; i++) {
    const attention_case c = {
        ONE, 1, 4, 2, i % 2 ? 128 : 64, i / 4 ? 30 : 0, 0, 0, 0, i % 4 / 2 ? CUMOE_F16 : CUMOE_BF16};
    const shape_case s = {100, 130, 0, 0, 0, 0, c};
    rng r = {(uint64_t)i};
    case_begin("D %d, window %d, %s", (int)c.head_dim, (int)c.window, cumoe_dtype_name((cumoe_dtype)c.dtype));
    problem p = {.c = &s.c, .queries = 100, .keys = 130};
    p.tq = tensor_normal(&r, c.dtype, 100, 4 * c.head_dim, 0, 1);
    p.tk = tensor_normal(&r, c.dtype, 130, 2 * c.head_dim, 0, 1);
    p.tv = tensor_normal(&r, c.dtype, 130, 2 * c.head_dim, 0, 1);
    p.tdout = tensor_normal(&r, c.dtype, 100, 4 * c.head_dim, 0, 1);
    p.tsinks = tensor_normal(&r, CUMOE_F32, 1, 4, 0, 1);
    tensor_set(&p.tdout, 40, 5, NAN);               /* of head 0 */
    tensor_set(&p.tq, 20, 3 * c.head_dim + 1, NAN); /* of head 3 */
    tensor_set(&p.tv, 95, 7, INFINITY);             /* of heads 0, 1 */
    tensor_set(&p.tk, 100, c.head_dim + 9, NAN);    /* of heads 2, 3 */
    const cumoe_attention_args a = put_shape(context, &s, &p, &p.tv), b = put_shape(cpu, &s, &p, &p.tv);
    CHECK_OK(cumoe_attention(cpu, &b, NULL));
    const tensor out = device_get(cpu, cumoe_const(b.out)), lse = device_get(cpu, cumoe_const(b.lse));
    device_set(context, a.out, &out);
    device_set(context, a.lse, &lse);
    const cumoe_attention_backward_args ours = put_backward(context, &p, &a, 0), theirs = put_backward(cpu, &p, &b, 0);
    CHECK_OK(cumoe_attention_backward(context, &ours, NULL));
    CHECK_OK(cumoe_attention_backward(cpu, &theirs, NULL));
    const cumoe_view_mut got[] = {ours.dq, ours.dk, ours.dv}, want[] = {theirs.dq, theirs.dk, theirs.dv};
    for (int j = 0; j < 3; j++) {
      const tensor x = device_get(context, cumoe_const(got[j])), y = device_get(cpu, cumoe_const(want[j]));
      for (int64_t at = 0; at < x.rows * x.cols; at++) {
        const double value = tensor_get(&x, 0, at), right = tensor_get(&y, 0, at);
        CHECK_MSG(isfinite(value) == isfinite(right), "%d: %g at %d, not %g", j, value, (int)at, right);
        if (isfinite(right))
          CHECK_MSG(fabs(value - right) <= .05 * (1 + fabs(right)), "%d: %g, not %g", j, value, right);
      }
    }
    case_end();
  }
  CHECK_OK(cumoe_context_destroy(cpu));
}

static tensor all_gradients(cumoe_context context)
{
  const attention_case c = {SHARED, 1, 4, 2, 64, 0, 0, 20, 0, CUMOE_F32};
  rng r = {3};
  const problem p = make_problem(&r, &c);
  const cumoe_attention_args a = put_problem(context, &p, 0);
  CHECK_OK(cumoe_attention(context, &a, NULL));
  const gradients g = run_backward(context, &p, &a, 0);
  tensor all = tensor_new(CUMOE_F32, g.dq.rows + g.dk.rows + g.dv.rows, 256);
  for (int64_t i = 0; i < g.dq.rows * 256; i++) tensor_set(&all, 0, i, tensor_get(&g.dq, 0, i));
  for (int64_t i = 0; i < g.dk.rows * 128; i++) tensor_set(&all, g.dq.rows, i, tensor_get(&g.dk, 0, i));
  for (int64_t i = 0; i < g.dv.rows * 128; i++) tensor_set(&all, g.dq.rows + g.dk.rows, i, tensor_get(&g.dv, 0, i));
  return all;
}

static void test_threads(void)
{
  check_threads("gradients", all_gradients);
}

/* The first calls of a context, in a capture: kernels are loaded under way. Replayed, they write what eager ones do. */
static void test_capture(void)
{
  const shape_case s = {90, 200, 0, 0, 0, 0, {ONE, 1, 4, 2, 64, 0, 0, 0, 0, CUMOE_BF16}};
  cumoe_context context = NULL;
  cudaStream_t stream;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  rng r = {11};
  case_begin("forward, backward, an embedding's gradient");
  CHECK_OK(cumoe_context_create(0, NULL, &context));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  problem p = {.c = &s.c, .queries = s.queries, .keys = s.keys};
  p.tq = tensor_normal(&r, CUMOE_BF16, s.queries, 256, 0, 1);
  p.tk = tensor_normal(&r, CUMOE_BF16, s.keys, 128, 0, 1);
  p.tv = tensor_normal(&r, CUMOE_BF16, s.keys, 128, 0, 1);
  tensor ids = tensor_new(CUMOE_I32, 1, s.queries);
  for (int32_t i = 0; i < s.queries; i++) tensor_set(&ids, 0, i, (double)rng_below(&r, 7));
  const cumoe_attention_args a = put_shape(context, &s, &p, &p.tv);
  cumoe_attention_backward_args b = {.size = sizeof b, .forward = &a, .dout = a.q};
  b.dq = device_new(context, CUMOE_BF16, s.queries, 256, 0);
  b.dk = device_new(context, CUMOE_BF16, s.keys, 128, 0);
  b.dv = device_new(context, CUMOE_BF16, s.keys, 128, 0);
  b.delta = device_new(context, CUMOE_F32, s.queries, 4, 0);
  cumoe_embedding_backward_args e = {.size = sizeof e, .dy = cumoe_const(b.dq), .ids = device_put(context, &ids, 0)};
  e.dtable = device_new(context, CUMOE_F32, 7, 256, 0);
  e.workspace = device_new(context, CUMOE_U8, 1, 1024, 0);
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  CHECK_OK(cumoe_attention(context, &a, stream));
  CHECK_OK(cumoe_attention_backward(context, &b, stream));
  CHECK_OK(cumoe_embedding_backward(context, &e, stream));
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  for (int round = 0; round < 2; round++)
    CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess && cudaStreamSynchronize(stream) == cudaSuccess);
  const cumoe_view written[] = {cumoe_const(a.out), cumoe_const(a.lse), cumoe_const(b.dq),
                                cumoe_const(b.dk),  cumoe_const(b.dv),  cumoe_const(e.dtable)};
  tensor replayed[6];
  for (int i = 0; i < 6; i++) replayed[i] = device_get(context, written[i]);
  CHECK_OK(cumoe_attention(context, &a, NULL));
  CHECK_OK(cumoe_attention_backward(context, &b, NULL));
  CHECK_OK(cumoe_embedding_backward(context, &e, NULL));
  for (int i = 0; i < 6; i++) {
    const tensor eager = device_get(context, written[i]);
    check_same("replayed", &replayed[i], &eager);
  }
  CHECK(cudaGraphExecDestroy(exec) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  case_end();
  CHECK_OK(cumoe_context_destroy(context));
}

/* ---- rotary embedding ------------------------------------------------------------------------------- */

enum { PLACES = 20, ROPE_HEADS = 3, ROPE_DIM = 16 };

static void run_rope(cumoe_context context, int32_t dtype, int64_t half, bool interleaved, bool in_place)
{
  rng r = {(uint64_t)half};
  case_begin("%s, %d of %d turned%s%s", cumoe_dtype_name((cumoe_dtype)dtype), (int)(2 * half), ROPE_DIM,
             interleaved ? ", interleaved" : "", in_place ? ", in place" : "");
  static const double places[] = {0, 19, 3, -1, 20, 7};
  const tensor x = tensor_normal(&r, dtype, 6, ROPE_HEADS * ROPE_DIM, 0, 1);
  tensor cosine = tensor_new(CUMOE_F32, PLACES, half), sine = tensor_new(CUMOE_F32, PLACES, half);
  tensor positions = tensor_new(interleaved ? CUMOE_I64 : CUMOE_I32, 1, 6);
  for (int64_t i = 0; i < PLACES * half; i++) {
    const double angle = (double)(i / half) * pow(100, -(double)(i % half) / (double)half);
    tensor_set(&cosine, 0, i, cos(angle));
    tensor_set(&sine, 0, i, sin(angle));
  }
  for (int i = 0; i < 6; i++) tensor_set(&positions, 0, i, places[i]);
  cumoe_rope_args a = {.size = sizeof a, .heads = ROPE_HEADS, .head_dim = ROPE_DIM, .x = device_put(context, &x, 3)};
  a.flags = interleaved ? CUMOE_ROPE_INTERLEAVED : 0;
  a.positions = device_put(context, &positions, 0);
  a.cosine = device_put(context, &cosine, 1);
  a.sine = device_put(context, &sine, 2);
  a.y = in_place ? as_mut(a.x) : device_new(context, dtype, 6, x.cols, 1);
  CHECK_OK(cumoe_rope(context, &a, NULL));
  check_guards(context, "y", a.y);
  check_fault(context, NULL, CUMOE_FAULT_SEQUENCE);
  bounded *want = scratch((size_t)(6 * x.cols), sizeof *want), *back = scratch((size_t)(6 * x.cols), sizeof *back);
  for (int64_t i = 0; i < 6 * x.cols; i++) {
    const int64_t t = i / x.cols, at = i % ROPE_DIM, at_place = (int64_t)places[t];
    const bool inside = at_place >= 0 && at_place < PLACES, turned = at < 2 * half;
    const int64_t pair = interleaved ? at / 2 : at % (half ? half : 1), other = interleaved ? i ^ 1
                                                                                : at < half ? i + half
                                                                                            : i - half;
    const bool second = interleaved ? at % 2 : at >= half;
    double y = tensor_get(&x, 0, i);
    if (turned && inside)
      y = y * tensor_get(&cosine, at_place, pair) +
          (second ? 1 : -1) * tensor_get(&x, 0, other) * tensor_get(&sine, at_place, pair);
    want[i] = (bounded){inside ? y : 0, inside ? unit_roundoff(dtype) * fabs(y) + 1e-9 : 0};
    back[i] = (bounded){inside ? tensor_get(&x, 0, i) : 0, inside ? 4 * unit_roundoff(dtype) * 4 : 0};
  }
  const tensor y = device_get(context, cumoe_const(a.y));
  check_bounded("y", &y, want);
  a.flags |= CUMOE_ROPE_BACKWARD;
  a.x = cumoe_const(a.y);
  CHECK_OK(cumoe_rope(context, &a, NULL));
  const tensor x_again = device_get(context, cumoe_const(a.y));
  check_bounded("turned back", &x_again, back);
  CHECK_OK(cumoe_fault_clear(context, NULL));
  case_end();
}

static void test_rope(cumoe_context context)
{
  for (int i = 0; i < 12; i++) run_rope(context, case_dtypes[i % 3], i < 6 ? 8 : i == 6 ? 0 : 3, i % 2, i % 4 > 1);
}

/* What test/badargs.c does not vary: numbers that only fit together. */
static void test_refusals(cumoe_context context)
{
  cumoe_rope_args r = {.size = sizeof r,
                       .heads = 4,
                       .head_dim = 16,
                       .x = cumoe_const(device_new(context, CUMOE_F32, 3, 64, 0)),
                       .cosine = cumoe_const(device_new(context, CUMOE_F32, 7, 9, 0)),
                       .sine = cumoe_const(device_new(context, CUMOE_F32, 7, 9, 0)),
                       .y = device_new(context, CUMOE_F32, 3, 64, 0)};
  case_begin("rotary embedding");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_rope(context, &r, NULL));
  CHECK_TEXT("args.cosine.cols is 9, must be at most head_dim / 2 = 8");
  r.heads = -4, r.head_dim = -16;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_rope(context, &r, NULL));
  CHECK_TEXT("args.heads is -4 and args.head_dim -16, must be at least 1 and 2");
  case_end();
  case_begin("no sequence ends");
  const attention_case c = {SELF, 1, 4, 2, 8, 0, 0, 0, 0, CUMOE_F32};
  rng random = {8};
  problem p = make_problem(&random, &c);
  cumoe_attention_args a = put_problem(context, &p, 0);
  a.q_offsets.cols = 0;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_attention(context, &a, NULL));
  CHECK_TEXT("q_offsets.cols is 0, must be 1 .. 2^31");
  case_end();
}

static const test_group groups[] = {
    ALONE("threads", test_threads, ONCE),
    ALONE("captured", test_capture, ON_CUDA),
    GROUP("masks and sequences", test_masks, ANYWHERE),
    GROUP("sizes of heads", test_sizes, ANYWHERE),
    GROUP("NaN and infinity", test_nan, ANYWHERE),
    GROUP("hostile indices", test_hostile, ANYWHERE),
    GROUP("what is recorded", test_recorded, ANYWHERE),
    GROUP("no pages", test_no_pages, ANYWHERE),
    GROUP("a wide cap", test_wide_cap, ANYWHERE),
    GROUP("decode", test_decode, ANYWHERE),
    GROUP("rotary embedding", test_rope, ANYWHERE),
    GROUP("shapes", test_shapes, ANYWHERE),
    GROUP("at random", test_random, ON_CUDA),
    GROUP("refusals", test_refusals, ANYWHERE),
    GROUP("NaN in tiles", test_nan_in_tiles, ANYWHERE),
    GROUP("NaN in tiles, backward", test_nan_backward, ANYWHERE),
};
TEST_MAIN(groups)
