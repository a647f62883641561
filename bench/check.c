/*
 * A tripwire, not a test: a number is only worth printing if the layer that took the time also computed the
 * layer. Looks at the first input: every output finite, the same bits twice from differently poisoned memory,
 * one random token routed as its logits say, and four elements of it within the error bound of the same sums
 * in double.
 */
#include "bench.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { ELEMENTS = 4 };

bool verdict_good(const verdict *v)
{
  return v->finite && v->repeatable && v->routed && v->faultless && v->worst <= 1;
}

/* ---- numbers ---- */

/* Of finite numbers: others are found before. */
static double widen(uint16_t bits, cumoe_dtype dtype)
{
  union {
    uint32_t u;
    float f;
  } v = {(uint32_t)bits << 16};
  if (dtype == CUMOE_BF16) return (double)v.f;
  v.u = (uint32_t)(bits & 0x8000) << 16 | (uint32_t)(bits & 0x7fff) << 13;
  return (double)v.f * 0x1p112; /* the exponents' biases differ by 112 */
}

static int bits_of(cumoe_dtype dtype)
{
  return dtype == CUMOE_BF16 ? 8 : 11;
}

/* Distance of two neighbours of the type around v. */
static double quantum(double v, cumoe_dtype dtype)
{
  const int least = dtype == CUMOE_BF16 ? -126 : -14;
  int exponent = least + 1;
  if (v != 0) (void)frexp(v, &exponent);
  if (exponent < least + 1) exponent = least + 1;
  return ldexp(1, exponent - bits_of(dtype));
}

/* A dot product and the sum of its absolute terms; n is a multiple of 4. */
typedef struct sum {
  double value, size;
} sum;

static sum dot(const double *a, const uint16_t *b, int64_t n, cumoe_dtype dtype)
{
  double value[4] = {0}, size[4] = {0};
  for (int64_t i = 0; i < n; i += 4)
    for (int64_t j = 0; j < 4; ++j) {
      const double term = a[i + j] * widen(b[i + j], dtype);
      value[j] += term;
      size[j] += fabs(term);
    }
  return (sum){value[0] + value[1] + value[2] + value[3], size[0] + size[1] + size[2] + size[3]};
}

/* What f32 accumulation of n terms of zero mean may lose: it grows with the root of the number of additions.
 */
static double dot_bound(const sum *s, int64_t n)
{
  return (sqrt((double)n / 16) + 4) * 0x1p-24 * s->size;
}

/* What may be lost of v, `lost` before it is rounded to the type included. */
static double rounded_bound(double v, double lost, cumoe_dtype dtype)
{
  return lost + quantum(fabs(v) + lost, dtype) / 2;
}

/* ---- one expert on one token ---- */

/* One slot's share of the four elements: y before and after its rounding, with what may be lost. */
typedef struct slot {
  const double *x;
  const uint16_t *gate_up, *down; /* [2I, H]; [ELEMENTS, I]: the rows of the wanted columns */
  int32_t hidden, inter;
  cumoe_dtype dtype;
  double y[ELEMENTS], bound[ELEMENTS];
  pthread_t thread;
} slot;

typedef struct activated {
  double value, slack; /* rounded to the type; slack: a quantum where the rounding is too close to call */
} activated;

static activated activate(const slot *s, int64_t i)
{
  const int64_t hidden = s->hidden;
  const sum g = dot(s->x, s->gate_up + i * hidden, hidden, s->dtype);
  const sum u = dot(s->x, s->gate_up + (i + s->inter) * hidden, hidden, s->dtype);
  const double silu = g.value / (1 + exp(-g.value)), h = silu * u.value;
  const double lost =
      1.1 * fabs(u.value) * dot_bound(&g, hidden) + fabs(silu) * dot_bound(&u, hidden) + 0x1p-22 * fabs(h);
  const double step = quantum(h, s->dtype), rounded = nearbyint(h / step) * step;
  const bool close = step / 2 - fabs(h - rounded) <= lost;
  return (activated){rounded, close ? step + lost : 0};
}

static void *compute_slot(void *user)
{
  slot *s = user;
  sum y[ELEMENTS] = {{0, 0}};
  double slack[ELEMENTS] = {0};
  for (int64_t i = 0; i < s->inter; ++i) {
    const activated h = activate(s, i);
    for (int32_t e = 0; e < ELEMENTS; ++e) {
      const double w = widen(s->down[e * (int64_t)s->inter + i], s->dtype);
      y[e].value += h.value * w;
      y[e].size += fabs(h.value * w);
      slack[e] += h.slack * fabs(w);
    }
  }
  for (int32_t e = 0; e < ELEMENTS; ++e) {
    s->y[e] = y[e].value;
    s->bound[e] = rounded_bound(y[e].value, slack[e] + dot_bound(&y[e], s->inter), s->dtype);
  }
  return NULL;
}

/* ---- one token ---- */

typedef struct token {
  int64_t index;
  int32_t columns[ELEMENTS];
  int32_t ids[CUMOE_MAX_TOP_K];
  float weights[CUMOE_MAX_TOP_K];
  double *x;       /* [H] */
  uint16_t *bytes; /* staging */
} token;

static cumoe_status fetch(cell *c, cumoe_view view, int64_t first, int64_t rows, void *host)
{
  cumoe_view part;
  TRY(cumoe_view_rows(view, first, rows, &part));
  const size_t bytes = (size_t)(rows * view.cols) * cumoe_dtype_bytes((cumoe_dtype)view.dtype);
  return cumoe_copy_to_host(c->bench->context, host, bytes, part, c->bench->stream);
}

/* [rows, cols] -> [cols, rows] */
static cumoe_status transpose(uint16_t *m, int64_t rows, int64_t cols)
{
  uint16_t *from = malloc((size_t)(rows * cols) * 2);
  if (!from) return CUMOE_ERR_OUT_OF_MEMORY;
  memcpy(from, m, (size_t)(rows * cols) * 2);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < cols; ++k) m[k * rows + r] = from[r * cols + k];
  free(from);
  return CUMOE_OK;
}

/* Weights [E, in, out] lie in the same bytes: expert by expert [H, 2I] and [I, H]. */
static cumoe_status fetch_turned(cell *c, const token *t, int64_t expert, uint16_t *gate_up, uint16_t *down)
{
  const int64_t inter = c->model->shape->inter, hidden = c->model->shape->hidden;
  cumoe_view matrix, column;
  TRY(fetch(c, c->model->gate_up, expert * 2 * inter, 2 * inter, gate_up));
  TRY(cumoe_synchronize(c->bench->context, c->bench->stream));
  TRY(transpose(gate_up, hidden, 2 * inter));
  TRY(cumoe_view_rows(c->model->down, expert * hidden, hidden, &matrix));
  matrix.rows = inter;
  matrix.cols = matrix.ld = hidden;
  for (int32_t e = 0; e < ELEMENTS; ++e) {
    TRY(cumoe_view_cols(matrix, t->columns[e], 1, &column));
    TRY(cumoe_copy_to_host(c->bench->context, down + e * inter, (size_t)inter * 2, column, c->bench->stream));
  }
  return cumoe_synchronize(c->bench->context, c->bench->stream);
}

static cumoe_status fetch_slot(cell *c, const token *t, int32_t j, slot *s)
{
  const shape *p = c->model->shape;
  const int64_t expert = t->ids[j], inter = p->inter, hidden = p->hidden;
  uint16_t *gate_up = malloc((size_t)(2 * inter * hidden) * 2), *down = malloc((size_t)(ELEMENTS * inter) * 2);
  *s = (slot){
      .x = t->x, .gate_up = gate_up, .down = down, .hidden = p->hidden, .inter = p->inter, .dtype = c->bench->o.dtype};
  if (!gate_up || !down) return CUMOE_ERR_OUT_OF_MEMORY;
  if (c->bench->o.in_out) return fetch_turned(c, t, expert, gate_up, down);
  TRY(fetch(c, c->model->gate_up, expert * 2 * inter, 2 * inter, gate_up));
  for (int32_t e = 0; e < ELEMENTS; ++e)
    TRY(fetch(c, c->model->down, expert * hidden + t->columns[e], 1, down + e * inter));
  return cumoe_synchronize(c->bench->context, c->bench->stream);
}

static void compare(const cell *c, const token *t, const slot *slots, const uint16_t *out, verdict *v)
{
  const cumoe_dtype dtype = c->bench->o.dtype;
  const int32_t k = c->model->shape->top_k;
  for (int32_t e = 0; e < ELEMENTS; ++e) {
    double value = 0, size = 0, bound = 0;
    for (int32_t j = 0; j < k; ++j) {
      const double w = (double)t->weights[j], term = w * slots[j].y[e];
      value += term;
      size += fabs(term);
      bound += fabs(w) * slots[j].bound[e];
    }
    bound = rounded_bound(value, bound + k * 0x1p-24 * size, dtype);
    const double error = fabs(widen(out[t->index * c->model->shape->hidden + t->columns[e]], dtype) - value);
    const double part = isfinite(error) ? error / bound : (double)INFINITY;
    if (part > v->worst) v->worst = part;
  }
}

static cumoe_status check_elements(cell *c, const token *t, const uint16_t *out, verdict *v)
{
  const int32_t k = c->model->shape->top_k;
  slot slots[CUMOE_MAX_TOP_K] = {{0}};
  bool running[CUMOE_MAX_TOP_K] = {false};
  cumoe_status status = CUMOE_OK;
  for (int32_t j = 0; j < k && status == CUMOE_OK; ++j) {
    status = fetch_slot(c, t, j, &slots[j]);
    running[j] = status == CUMOE_OK && pthread_create(&slots[j].thread, NULL, compute_slot, &slots[j]) == 0;
    if (status == CUMOE_OK && !running[j]) compute_slot(&slots[j]);
  }
  for (int32_t j = 0; j < k; ++j)
    if (running[j]) pthread_join(slots[j].thread, NULL);
  if (status == CUMOE_OK) compare(c, t, slots, out, v);
  for (int32_t j = 0; j < k; ++j) {
    free((void *)(uintptr_t)slots[j].gate_up);
    free((void *)(uintptr_t)slots[j].down);
  }
  return status;
}

/* ---- routing of the token ---- */

typedef struct scores {
  double logit[CUMOE_MAX_EXPERTS], score[CUMOE_MAX_EXPERTS], choice[CUMOE_MAX_EXPERTS];
  float bias[CUMOE_MAX_EXPERTS];
  double lost; /* of any logit */
} scores;

static cumoe_status fetch_logits(cell *c, const token *t, scores *s)
{
  const shape *p = c->model->shape;
  if (c->spread != SPREAD_router) {
    float row[CUMOE_MAX_EXPERTS];
    TRY(fetch(c, cumoe_const(c->logits[0]), t->index, 1, row));
    TRY(cumoe_synchronize(c->bench->context, c->bench->stream));
    for (int32_t e = 0; e < p->experts; ++e) s->logit[e] = (double)row[e];
    return CUMOE_OK;
  }
  for (int32_t e = 0; e < p->experts; ++e) {
    TRY(fetch(c, c->model->router, e, 1, t->bytes));
    TRY(cumoe_synchronize(c->bench->context, c->bench->stream));
    const sum l = dot(t->x, t->bytes, p->hidden, c->bench->o.dtype);
    s->logit[e] = l.value;
    s->lost = fmax(s->lost, dot_bound(&l, p->hidden));
  }
  return CUMOE_OK;
}

static void score(const shape *p, scores *s)
{
  double most = s->logit[0], total = 0;
  for (int32_t e = 0; e < p->experts; ++e) most = fmax(most, s->logit[e]);
  for (int32_t e = 0; e < p->experts; ++e) total += exp(s->logit[e] - most);
  for (int32_t e = 0; e < p->experts; ++e) {
    const bool sigmoid = p->routing.score == CUMOE_SCORE_SIGMOID;
    s->score[e] = sigmoid ? 1 / (1 + exp(-s->logit[e])) : exp(s->logit[e] - most) / total;
    s->choice[e] = sigmoid ? s->score[e] + (double)s->bias[e] : s->logit[e];
  }
}

/* No expert left out beats a chosen one; with groups, among the groups that were chosen at all. */
static bool chosen_well(const shape *p, const token *t, const scores *s)
{
  const int32_t groups = p->routing.n_group ? p->routing.n_group : 1, per_group = p->experts / groups;
  bool chosen[CUMOE_MAX_EXPERTS] = {false}, open[CUMOE_MAX_EXPERTS] = {false};
  double least = (double)INFINITY;
  for (int32_t j = 0; j < p->top_k; ++j) {
    const int32_t id = t->ids[j];
    if (id < 0 || id >= p->experts || chosen[id]) return false;
    chosen[id] = open[id / per_group] = true;
    least = fmin(least, s->choice[id]);
  }
  for (int32_t e = 0; e < p->experts; ++e)
    if (!chosen[e] && open[e / per_group] && s->choice[e] > least + 2 * s->lost + 1e-6) return false;
  return true;
}

/* RENORMALIZE and the softmax over the chosen are the same division for a softmax. */
static bool weighted_well(const shape *p, const token *t, const scores *s)
{
  const bool divide = p->routing.flags & (CUMOE_ROUTE_RENORMALIZE | CUMOE_ROUTE_SCORE_AFTER_TOPK);
  const double scale = p->routing.routed_scale > 0 ? (double)p->routing.routed_scale : 1;
  double total = 0;
  for (int32_t j = 0; j < p->top_k; ++j) total += s->score[t->ids[j]];
  for (int32_t j = 0; j < p->top_k; ++j) {
    const double want = scale * s->score[t->ids[j]] / (divide ? total : 1);
    if (!(fabs((double)t->weights[j] - want) <= (4 * s->lost + 1e-5) * want)) return false;
  }
  return true;
}

static cumoe_status verify_routing(cell *c, const token *t, verdict *v)
{
  v->routed = c->spread == SPREAD_one; /* by the caller */
  if (v->routed) return CUMOE_OK;
  scores *s = calloc(1, sizeof *s);
  if (!s) return CUMOE_ERR_OUT_OF_MEMORY;
  cumoe_status status = CUMOE_OK;
  if (c->model->select_bias.data) status = fetch(c, c->model->select_bias, 0, 1, s->bias);
  if (status == CUMOE_OK) status = fetch_logits(c, t, s);
  if (status == CUMOE_OK) {
    score(c->model->shape, s);
    v->routed = chosen_well(c->model->shape, t, s) && weighted_well(c->model->shape, t, s);
  }
  free(s);
  return status;
}

static cumoe_status fetch_token(cell *c, token *t)
{
  const shape *p = c->model->shape;
  bench *b = c->bench;
  t->index = (int64_t)(random_bits(&b->seed) % (uint64_t)c->tokens);
  for (int32_t e = 0; e < ELEMENTS; ++e) t->columns[e] = (int32_t)(random_bits(&b->seed) % (uint64_t)p->hidden);
  TRY(fetch(c, c->x[0], t->index, 1, t->bytes));
  TRY(fetch(c, cumoe_const(c->ids[0]), t->index, 1, t->ids));
  TRY(fetch(c, cumoe_const(c->weights[0]), t->index, 1, t->weights));
  TRY(cumoe_synchronize(b->context, b->stream));
  for (int32_t i = 0; i < p->hidden; ++i) t->x[i] = widen(t->bytes[i], b->o.dtype);
  return CUMOE_OK;
}

static cumoe_status check_token(cell *c, const uint16_t *out, verdict *v)
{
  const size_t hidden = (size_t)c->model->shape->hidden;
  token t = {.x = malloc(hidden * sizeof *t.x), .bytes = malloc(hidden * sizeof *t.bytes)};
  cumoe_status status = t.x && t.bytes ? fetch_token(c, &t) : CUMOE_ERR_OUT_OF_MEMORY;
  if (status == CUMOE_OK) status = verify_routing(c, &t, v);
  if (status == CUMOE_OK && v->routed && v->finite) status = check_elements(c, &t, out, v);
  free(t.x);
  free(t.bytes);
  return status;
}

/* ---- all outputs ---- */

static cumoe_status run_poisoned(cell *c, uint8_t poison, uint16_t *out)
{
  bench *b = c->bench;
  TRY(cumoe_fill(b->context, c->workspace, poison, b->stream));
  TRY(cumoe_fill(b->context, c->out, poison, b->stream));
  TRY(cell_forward(c, 0, true, b->stream));
  TRY(fetch(c, cumoe_const(c->out), 0, c->tokens, out));
  return cumoe_synchronize(b->context, b->stream);
}

static bool all_finite(const uint16_t *out, int64_t count, cumoe_dtype dtype)
{
  const uint16_t mask = dtype == CUMOE_BF16 ? 0x7f80 : 0x7c00;
  int64_t bad = 0;
  for (int64_t i = 0; i < count; ++i) bad += (out[i] & mask) == mask;
  return bad == 0;
}

static cumoe_status verify_outputs(cell *c, uint16_t *first, uint16_t *second, verdict *v)
{
  const int64_t count = c->tokens * c->model->shape->hidden;
  TRY(run_poisoned(c, 0xff, first));
  TRY(run_poisoned(c, 0x7b, second));
  v->repeatable = memcmp(first, second, (size_t)count * sizeof *first) == 0;
  v->finite = all_finite(first, count, c->bench->o.dtype);
  return check_token(c, first, v);
}

/* Counts of every input: how many experts were active, and so the floor. */
static cumoe_status count_inputs(cell *c)
{
  bench *b = c->bench;
  const int32_t experts = c->model->shape->experts;
  for (int32_t i = 0; i < c->inputs; ++i) {
    TRY(cell_forward(c, i, true, b->stream));
    TRY(fetch(c, cumoe_const(c->counts[i]), 0, 1, c->host_counts + (int64_t)i * experts));
  }
  return cumoe_synchronize(b->context, b->stream);
}

cumoe_status check_cell(cell *c, verdict *v)
{
  cumoe_fault fault = {.size = sizeof fault};
  bench *b = c->bench;
  const size_t bytes = (size_t)(c->tokens * c->model->shape->hidden) * sizeof(uint16_t);
  uint16_t *first = malloc(bytes), *second = malloc(bytes);
  *v = (verdict){0};
  TRY(cumoe_fault_clear(b->context, b->stream));
  cumoe_status status = first && second ? count_inputs(c) : CUMOE_ERR_OUT_OF_MEMORY;
  if (status == CUMOE_OK) status = verify_outputs(c, first, second, v);
  if (status == CUMOE_OK) status = cumoe_fault_read(b->context, b->stream, &fault);
  v->faultless = status == CUMOE_OK && fault.code == CUMOE_FAULT_NONE;
  free(first);
  free(second);
  return status;
}
