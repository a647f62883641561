/*
 * A tripwire, not a test: a number is only worth printing if the layer that took the time also computed the
 * layer. Looks at the first input: every output finite, the same bits twice from differently poisoned memory,
 * one random token routed as its logits say, and four elements of it within the error bound of the same sums
 * in double, of weights and activations as their format says.
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

static sum dot(const double *a, const double *b, int64_t n)
{
  double value[4] = {0}, size[4] = {0};
  for (int64_t i = 0; i < n; i += 4)
    for (int64_t j = 0; j < 4; ++j) {
      const double term = a[i + j] * b[i + j];
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

/* ---- weights and activations as their format says ---- */

/* Some rows of one expert's projection, on the host. */
typedef struct matrix {
  uint8_t *codes, *scales;
  float globals[2];
  int64_t rows, cols, scale_cols; /* weights; scales of a row */
  int64_t block_rows, half_rows;  /* rows that share scales, begun anew in each half */
} matrix;

typedef struct decoder {
  const kind *kind;
  cumoe_dtype dtype;
  int bits;
  double values[256];
} decoder;

static decoder decoder_of(const cell *c)
{
  decoder d = {.kind = c->model->kind, .dtype = c->bench->o.dtype};
  d.bits = format_bits(kind_class(d.kind, d.dtype));
  for (int i = 0; d.bits <= 8 && i < 1 << d.bits; ++i) d.values[i] = code_value(d.kind, (uint8_t)i);
  return d;
}

static void decode_codes(const decoder *d, const uint8_t *row, int64_t first, int64_t end, double scale, double *to)
{
  if (d->bits == 8)
    for (int64_t i = first; i < end; ++i) to[i] = scale * d->values[row[i]];
  else
    for (int64_t i = first; i < end; ++i) to[i] = scale * d->values[row[i / 2] >> i % 2 * 4 & 15];
}

static void decode_row(const decoder *d, const matrix *m, int64_t row, double *to)
{
  const int64_t half = row / m->half_rows, blocks = (m->half_rows + m->block_rows - 1) / m->block_rows;
  const int64_t first = (half * blocks + row % m->half_rows / m->block_rows) * m->scale_cols;
  const int64_t block = d->kind->format.block[1] ? d->kind->format.block[1] : m->cols;
  const uint8_t *codes = m->codes + row * m->cols * d->bits / 8;
  if (kind_is_dense(d->kind)) {
    for (int64_t i = 0; i < m->cols; ++i) to[i] = widen(((const uint16_t *)(const void *)codes)[i], d->dtype);
    return;
  }
  for (int64_t g = 0; g < m->scale_cols; ++g) {
    const int64_t end = (g + 1) * block < m->cols ? (g + 1) * block : m->cols;
    const double scale = scale_value(d->kind, m->scales, first + g) * (double)m->globals[half];
    decode_codes(d, codes, g * block, end, scale, to);
  }
}

/* The largest code of activations, and the distance of two around v. */
static double most_of(const kind *k)
{
  return k->format.element == CUMOE_ELEMENT_E4M3 ? 448 : 127;
}

static double step_of(const kind *k, double v)
{
  int exponent = -5;
  if (k->format.element != CUMOE_ELEMENT_E4M3) return 1;
  if (v != 0) (void)frexp(v, &exponent);
  return ldexp(1, (exponent < -5 ? -5 : exponent) - 4);
}

/* Activations as their codes say them; `steps`, which may be NULL, are the distances of neighbours there. */
static void quantise(const kind *k, double *values, double *steps, int64_t count)
{
  const int64_t group = k->format.rows == CUMOE_ROWS_GROUP ? k->format.row_group : count;
  for (int64_t first = 0; first < count; first += group) {
    const int64_t end = first + group < count ? first + group : count;
    double most = 1e-10;
    for (int64_t i = first; i < end; ++i) most = fmax(most, fabs(values[i]));
    const float scale = (float)most / (float)most_of(k), inverse = 1 / scale;
    for (int64_t i = first; i < end; ++i) {
      const double v = (double)((float)values[i] * inverse), step = step_of(k, v);
      values[i] = (double)scale * fmax(-most_of(k), fmin(most_of(k), nearbyint(v / step) * step));
      if (steps) steps[i] = (double)scale * step;
    }
  }
}

/*
 * What products of a format may lose besides, all at random: six deviations of what n terms of zero mean give, some
 * multiple of size / sqrt(n). The fp8 tensor core keeps 14 bits below the largest of 32 products. A kernel may round a
 * weight once to 16 bits, and may leave the offset of u4 in its sums.
 */
static double format_bound(const decoder *d, const sum *s, int64_t n)
{
  const cumoe_format *f = &d->kind->format;
  const double typical = s->size / sqrt((double)n);
  if (kind_is_dense(d->kind)) return 0;
  if (kind_has_codes_of_rows(d->kind))
    return f->element == CUMOE_ELEMENT_E4M3 ? 0x1p-14 * (45 * typical + s->size / 4) : 0;
  return (f->scale == CUMOE_E8M0 ? 0 : ldexp(2.7 * typical, -bits_of(d->dtype))) +
         (f->offset ? 4 : 0) * dot_bound(s, n);
}

/* ---- one expert on one token ---- */

/* One slot's share of the four elements: y before its rounding, with what may be lost, and what may at random. */
typedef struct slot {
  const decoder *decoder;
  const double *x;
  matrix gate_up, down; /* [2I, H]; [ELEMENTS, I]: the rows of the wanted columns */
  double y[ELEMENTS], bound[ELEMENTS], random[ELEMENTS];
  pthread_t thread;
  bool running, out_of_memory;
} slot;

/* h of all channels, rounded to the type. lost: before it was rounded. slack: a quantum where the rounding is too close
 * to call. step: of neighbours, of the type or of codes. */
typedef struct activated {
  double *value, *lost, *slack, *step;
} activated;

static void activate(const slot *s, int64_t i, double *row, activated *h)
{
  const int64_t hidden = s->gate_up.cols, inter = s->down.cols;
  const cumoe_dtype dtype = s->decoder->dtype;
  decode_row(s->decoder, &s->gate_up, i, row);
  const sum g = dot(s->x, row, hidden);
  decode_row(s->decoder, &s->gate_up, i + inter, row);
  const sum u = dot(s->x, row, hidden);
  const double silu = g.value / (1 + exp(-g.value)), v = silu * u.value;
  const double lost_g = dot_bound(&g, hidden) + format_bound(s->decoder, &g, hidden),
               lost_u = dot_bound(&u, hidden) + format_bound(s->decoder, &u, hidden);
  const double lost = 1.1 * fabs(u.value) * lost_g + fabs(silu) * lost_u + 0x1p-22 * fabs(v);
  const double step = quantum(v, dtype), rounded = nearbyint(v / step) * step;
  const bool close = step / 2 - fabs(v - rounded) <= lost;
  h->value[i] = rounded;
  h->lost[i] = lost;
  h->slack[i] = close ? step + lost : 0;
  h->step[i] = step;
}

/* The scale of a group is one of its values over a constant: where that value is too close to call, so are all. */
static void quantise_activated(const slot *s, activated *h)
{
  const kind *k = s->decoder->kind;
  const int64_t count = s->down.cols, group = k->format.rows == CUMOE_ROWS_GROUP ? k->format.row_group : count;
  for (int64_t first = 0; first < count; first += group) {
    const int64_t end = first + group < count ? first + group : count;
    int64_t most = first;
    for (int64_t i = first; i < end; ++i)
      if (fabs(h->value[i]) > fabs(h->value[most])) most = i;
    const double part = h->value[most] != 0 ? h->slack[most] / fabs(h->value[most]) : 0;
    for (int64_t i = first; i < end; ++i) h->lost[i] += part * fabs(h->value[i]);
  }
  quantise(k, h->value, h->step, count);
}

/*
 * One element. Slacks of weights that are not quantised add up, for they are few; of formats nearly every rounding is a
 * little uncertain. An error before a rounding of step q comes out as q or nothing, on average as large as before; what
 * may be lost is six deviations of it.
 */
static void multiply_down(slot *s, int32_t e, double *row, const activated *h)
{
  const int64_t inter = s->down.cols;
  double slack = 0, variance = 0;
  decode_row(s->decoder, &s->down, e, row);
  const sum y = dot(h->value, row, inter);
  for (int64_t i = 0; i < inter; ++i) {
    slack += h->slack[i] * fabs(row[i]);
    variance += h->lost[i] * (h->lost[i] + 6 * h->step[i]) * row[i] * row[i];
  }
  const bool dense = kind_is_dense(s->decoder->kind);
  s->y[e] = y.value;
  s->bound[e] = rounded_bound(y.value, dot_bound(&y, inter) + (dense ? slack : 0), s->decoder->dtype);
  s->random[e] = dense ? 0 : sqrt(variance) + format_bound(s->decoder, &y, inter);
}

static void *compute_slot(void *user)
{
  slot *s = user;
  const int64_t inter = s->down.cols, hidden = s->gate_up.cols, longest = hidden > inter ? hidden : inter;
  double *all = malloc((size_t)(4 * inter + longest) * sizeof *all);
  s->out_of_memory = !all;
  if (!all) return NULL;
  activated h = {all, all + inter, all + 2 * inter, all + 3 * inter};
  double *row = all + 4 * inter;
  for (int64_t i = 0; i < inter; ++i) activate(s, i, row, &h);
  if (kind_has_codes_of_rows(s->decoder->kind)) quantise_activated(s, &h);
  for (int32_t e = 0; e < ELEMENTS; ++e) multiply_down(s, e, row, &h);
  free(all);
  return NULL;
}

/* ---- one token ---- */

typedef struct token {
  int64_t index;
  int32_t columns[ELEMENTS];
  int32_t ids[CUMOE_MAX_TOP_K];
  float weights[CUMOE_MAX_TOP_K];
  double *x, *row; /* [H]; staging */
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
  cumoe_view down_of, column;
  TRY(fetch(c, c->model->gate_up.data, expert * 2 * inter, 2 * inter, gate_up));
  TRY(cumoe_synchronize(c->bench->context, c->bench->stream));
  TRY(transpose(gate_up, hidden, 2 * inter));
  TRY(cumoe_view_rows(c->model->down.data, expert * hidden, hidden, &down_of));
  down_of.rows = inter;
  down_of.cols = down_of.ld = hidden;
  for (int32_t e = 0; e < ELEMENTS; ++e) {
    TRY(cumoe_view_cols(down_of, t->columns[e], 1, &column));
    TRY(cumoe_copy_to_host(c->bench->context, down + e * inter, (size_t)inter * 2, column, c->bench->stream));
  }
  return cumoe_synchronize(c->bench->context, c->bench->stream);
}

/* Room for `rows` rows of an expert's projection; of an expert's scales there is room for all. */
static bool matrix_create(const cell *c, const projection *p, int64_t rows, bool rows_alone, matrix *m)
{
  const kind *k = c->model->kind;
  int64_t scale_rows;
  *m = (matrix){.rows = rows, .cols = p->in, .globals = {1, 1}};
  kind_blocks(k, p, &scale_rows, &m->scale_cols);
  m->half_rows = rows_alone ? rows : p->out / p->halves;
  m->block_rows = rows_alone ? 1 : k->format.block[0] ? k->format.block[0] : m->half_rows;
  if (rows_alone) scale_rows = rows;
  m->codes = malloc((size_t)format_bytes(kind_class(k, c->bench->o.dtype), rows * p->in));
  m->scales = calloc((size_t)(scale_rows * m->scale_cols), sizeof(float));
  return m->codes && m->scales;
}

static void matrix_free(matrix *m)
{
  free(m->codes);
  free(m->scales);
}

static cumoe_status fetch_globals(cell *c, const projection *p, int64_t expert, matrix *m)
{
  return p->global.data ? fetch(c, p->global, expert, 1, m->globals) : CUMOE_OK;
}

static cumoe_status fetch_gate_up(cell *c, int64_t expert, matrix *m)
{
  const projection *p = &c->model->gate_up;
  int64_t rows, cols;
  if (!matrix_create(c, p, p->out, false, m)) return CUMOE_ERR_OUT_OF_MEMORY;
  kind_blocks(c->model->kind, p, &rows, &cols);
  if (!c->bench->o.in_out) TRY(fetch(c, p->data, expert * p->out, p->out, m->codes));
  if (p->scale.data) TRY(fetch(c, p->scale, expert * rows, rows, m->scales));
  return fetch_globals(c, p, expert, m);
}

/* The wanted columns' rows, and of each its scales. */
static cumoe_status fetch_down(cell *c, const token *t, int64_t expert, matrix *m)
{
  const projection *p = &c->model->down;
  const kind *k = c->model->kind;
  const size_t scale = cumoe_dtype_bytes((cumoe_dtype)k->format.scale);
  const int32_t block = k->format.block[0] ? k->format.block[0] : c->model->shape->hidden;
  int64_t rows, cols;
  if (!matrix_create(c, p, ELEMENTS, true, m)) return CUMOE_ERR_OUT_OF_MEMORY;
  kind_blocks(k, p, &rows, &cols);
  const int64_t bytes = format_bytes(kind_class(k, c->bench->o.dtype), p->in);
  for (int32_t e = 0; e < ELEMENTS && !c->bench->o.in_out; ++e) {
    TRY(fetch(c, p->data, expert * p->out + t->columns[e], 1, m->codes + e * bytes));
    if (p->scale.data)
      TRY(fetch(c, p->scale, expert * rows + t->columns[e] / block, 1, m->scales + (size_t)(e * cols) * scale));
  }
  return fetch_globals(c, p, expert, m);
}

static cumoe_status fetch_slot(cell *c, const token *t, const decoder *d, int32_t j, slot *s)
{
  const int64_t expert = t->ids[j];
  *s = (slot){.decoder = d, .x = t->x};
  TRY(fetch_gate_up(c, expert, &s->gate_up));
  TRY(fetch_down(c, t, expert, &s->down));
  if (c->bench->o.in_out)
    TRY(fetch_turned(c, t, expert, (uint16_t *)(void *)s->gate_up.codes, (uint16_t *)(void *)s->down.codes));
  return cumoe_synchronize(c->bench->context, c->bench->stream);
}

static void compare(const cell *c, const token *t, const slot *slots, const uint16_t *out, verdict *v)
{
  const cumoe_dtype dtype = c->bench->o.dtype;
  const int32_t k = c->model->shape->top_k;
  for (int32_t e = 0; e < ELEMENTS; ++e) {
    double value = 0, size = 0, bound = 0, variance = 0;
    for (int32_t j = 0; j < k; ++j) {
      const double w = (double)t->weights[j], term = w * slots[j].y[e];
      value += term;
      size += fabs(term);
      bound += fabs(w) * slots[j].bound[e];
      variance += w * w * slots[j].random[e] * slots[j].random[e];
    }
    bound = rounded_bound(value, bound + sqrt(variance) + k * 0x1p-24 * size, dtype);
    const double error = fabs(widen(out[t->index * c->model->shape->hidden + t->columns[e]], dtype) - value);
    const double part = isfinite(error) ? error / bound : (double)INFINITY;
    if (part > v->worst) v->worst = part;
  }
}

static cumoe_status check_elements(cell *c, token *t, const uint16_t *out, verdict *v)
{
  const int32_t k = c->model->shape->top_k;
  const decoder d = decoder_of(c);
  slot slots[CUMOE_MAX_TOP_K] = {{0}};
  cumoe_status status = CUMOE_OK;
  if (kind_has_codes_of_rows(d.kind)) quantise(d.kind, t->x, NULL, c->model->shape->hidden);
  for (int32_t j = 0; j < k && status == CUMOE_OK; ++j) {
    slot *s = &slots[j];
    status = fetch_slot(c, t, &d, j, s);
    s->running = status == CUMOE_OK && pthread_create(&s->thread, NULL, compute_slot, s) == 0;
    if (status == CUMOE_OK && !s->running) compute_slot(s);
  }
  for (int32_t j = 0; j < k; ++j) {
    if (slots[j].running) pthread_join(slots[j].thread, NULL);
    if (slots[j].out_of_memory) status = CUMOE_ERR_OUT_OF_MEMORY;
  }
  if (status == CUMOE_OK) compare(c, t, slots, out, v);
  for (int32_t j = 0; j < k; ++j) {
    matrix_free(&slots[j].gate_up);
    matrix_free(&slots[j].down);
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
    for (int32_t i = 0; i < p->hidden; ++i) t->row[i] = widen(t->bytes[i], c->bench->o.dtype);
    const sum l = dot(t->x, t->row, p->hidden);
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
  token t = {.x = malloc(2 * hidden * sizeof *t.x), .bytes = malloc(hidden * sizeof *t.bytes)};
  t.row = t.x ? t.x + hidden : NULL;
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

/* Keeps the outputs of weights that are not quantised; others' error against them. */
static void compare_with_dense(cell *c, const uint16_t *out, int64_t count, verdict *v)
{
  reference *r = c->dense;
  const cumoe_dtype dtype = c->bench->o.dtype;
  double wrong = 0, size = 0;
  if (!r || !r->out || !v->finite) return;
  if (kind_is_dense(c->model->kind)) {
    r->count = count < REFERENCE ? count : REFERENCE;
    memcpy(r->out, out, (size_t)r->count * sizeof *out);
    return;
  }
  for (int64_t i = 0; i < r->count; ++i) {
    const double want = widen(r->out[i], dtype), error = widen(out[i], dtype) - want;
    wrong += error * error;
    size += want * want;
  }
  v->error = size > 0 ? sqrt(wrong / size) : 0;
}

static cumoe_status verify_outputs(cell *c, uint16_t *first, uint16_t *second, verdict *v)
{
  const int64_t count = c->tokens * c->model->shape->hidden;
  TRY(run_poisoned(c, 0xff, first));
  TRY(run_poisoned(c, 0x7b, second));
  v->repeatable = memcmp(first, second, (size_t)count * sizeof *first) == 0;
  v->finite = all_finite(first, count, c->bench->o.dtype);
  compare_with_dense(c, first, count, v);
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
