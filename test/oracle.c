#include "oracle.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double ulp = 0x1p-24; /* unit roundoff of f32 */

int oracle_device;

static double product_factor(int64_t depth)
{
  return (2 * ceil((double)depth / 16) + 8) * ulp;
}

/* Largest distance from b.value to the stored form of its neighbours at both ends of the bound. */
bounded oracle_stored(bounded b, int32_t dtype)
{
  if (!isfinite(b.value)) return b;
  double low = b.value - round_to(b.value - b.bound, dtype), high = round_to(b.value + b.bound, dtype) - b.value;
  return (bounded){b.value, fmax(fabs(low), fabs(high))};
}

bounded oracle_rounded(bounded b, int32_t dtype)
{
  double value = round_to(b.value, dtype);
  if (!isfinite(value)) return (bounded){value, 0};
  double low = value - round_to(b.value - b.bound, dtype), high = round_to(b.value + b.bound, dtype) - value;
  return (bounded){value, fmax(low, high)};
}

/* ---- weights --------------------------------------------------------------------------------------- */

cumoe_weights_desc weights_desc(const host_weights *w)
{
  const bool dense = format_is_dense(&w->up_format) && format_is_dense(&w->down_format);
  return (cumoe_weights_desc){.size = sizeof(cumoe_weights_desc),
                              .up_format = w->up_format,
                              .down_format = w->down_format,
                              .dtype = dense ? 0 : w->dtype,
                              .experts = w->experts,
                              .hidden = w->hidden,
                              .inter = w->inter,
                              .gate_order = w->gate_order,
                              .up_major = w->up_major,
                              .down_major = w->down_major};
}

static int64_t up_channel(const host_weights *w, int part, int64_t out)
{
  bool gate = part == PLAIN_GATE;
  switch (w->gate_order) {
  case CUMOE_GATE_UP_CONCAT: return gate ? out : w->inter + out;
  case CUMOE_UP_GATE_CONCAT: return gate ? w->inter + out : out;
  case CUMOE_GATE_UP_INTERLEAVED: return gate ? 2 * out : 2 * out + 1;
  case CUMOE_UP_GATE_INTERLEAVED: return gate ? 2 * out + 1 : 2 * out;
  default: return out;
  }
}

static const host_projection *projection_of(const host_weights *w, int part)
{
  if (part == PLAIN_DOWN) return &w->down;
  if (w->gate_order == CUMOE_UNGATED) return &w->up;
  if (w->gate_order == CUMOE_GATE_UP_SEPARATE) return part == PLAIN_GATE ? &w->gate : &w->up;
  return &w->gate_up;
}

place oracle_place(const host_weights *w, int part, int64_t expert, int64_t out, int64_t in)
{
  const host_projection *p = projection_of(w, part);
  int64_t channel = part == PLAIN_DOWN ? out : up_channel(w, part, out), rows = p->data.rows / w->experts;
  int32_t major = part == PLAIN_DOWN ? w->down_major : w->up_major;
  if (major == CUMOE_OUT_IN) return (place){p, expert * rows + channel, in, channel};
  return (place){p, expert * rows + in, channel, channel};
}

channel_place oracle_channel(const host_weights *w, int part, int64_t expert, int64_t out)
{
  const bool down = part == PLAIN_DOWN, fused = !down && w->gate_order < CUMOE_GATE_UP_SEPARATE;
  const int64_t outs = down ? w->hidden : w->inter;
  return (channel_place){.projection = projection_of(w, part),
                         .format = down ? &w->down_format : &w->up_format,
                         .expert = expert,
                         .experts = w->experts,
                         .channel = down ? out : up_channel(w, part, out),
                         .outs = fused ? 2 * outs : outs,
                         .ins = down ? w->inter : w->hidden,
                         .half = part == PLAIN_UP,
                         .halves = fused ? 2 : 1,
                         .interleaved =
                             w->gate_order == CUMOE_GATE_UP_INTERLEAVED || w->gate_order == CUMOE_UP_GATE_INTERLEAVED};
}

static void read_channel(const host_weights *w, int part, int64_t expert, int64_t out, int64_t ins, double *to)
{
  const channel_place channel = oracle_channel(w, part, expert, out);
  if (!format_is_dense(channel.format)) {
    decode_channel(&channel, to);
    return;
  }
  const place at = oracle_place(w, part, expert, out, 0), next = oracle_place(w, part, expert, out, 1);
  const tensor *t = &at.projection->data;
  tensor_get_run(t, at.row * t->cols + at.col, (next.row - at.row) * t->cols + next.col - at.col, ins, to);
}

void oracle_prepare(host_weights *w)
{
  for (int part = 0; part < 3; part++) {
    int64_t outs = part == PLAIN_DOWN ? w->hidden : w->inter, ins = part == PLAIN_DOWN ? w->inter : w->hidden;
    if (part == PLAIN_GATE && w->gate_order == CUMOE_UNGATED) continue;
    double *to = w->plain[part] = scratch((size_t)(w->experts * outs * ins), sizeof *to);
    for (int64_t e = 0; e < w->experts; e++)
      for (int64_t out = 0; out < outs; out++, to += ins) read_channel(w, part, e, out, ins, to);
  }
}

static double bias_at(const host_weights *w, int part, int64_t expert, int64_t out)
{
  const channel_place at = oracle_channel(w, part, expert, out);
  return at.projection->bias.data ? tensor_get(&at.projection->bias, expert, at.channel) : 0;
}

/* ---- router and gate ------------------------------------------------------------------------------- */

/* Eight sums side by side: most of the tests' time is spent here, and one after the other they wait for each other. */
typedef double two __attribute__((vector_size(2 * sizeof(double))));
typedef int64_t two_bits __attribute__((vector_size(2 * sizeof(int64_t))));

static two two_at(const double *from)
{
  two value;
  memcpy(&value, from, sizeof value);
  return value;
}

static two magnitudes(two of)
{
  return (two)((two_bits)of & INT64_MAX);
}

static double sum_of(two a, two b, two c, two d)
{
  const two sum = (a + b) + (c + d);
  return sum[0] + sum[1];
}

/* sum and size: of the products and of their magnitudes. */
static void add_products(const double *w, const double *a, int64_t depth, double *sum, double *size)
{
  two s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, m0 = {0}, m1 = {0}, m2 = {0}, m3 = {0};
  int64_t k = 0;
  for (; k + 8 <= depth; k += 8) {
    const two p0 = two_at(a + k) * two_at(w + k), p1 = two_at(a + k + 2) * two_at(w + k + 2),
              p2 = two_at(a + k + 4) * two_at(w + k + 4), p3 = two_at(a + k + 6) * two_at(w + k + 6);
    s0 += p0, s1 += p1, s2 += p2, s3 += p3;
    m0 += magnitudes(p0), m1 += magnitudes(p1), m2 += magnitudes(p2), m3 += magnitudes(p3);
  }
  *sum = sum_of(s0, s1, s2, s3), *size = sum_of(m0, m1, m2, m3);
  for (; k < depth; k++) *sum += a[k] * w[k], *size += fabs(a[k] * w[k]);
}

void oracle_router(const tensor *x, int64_t token, const tensor *weight, const tensor *bias, bounded *logits)
{
  const int mark = scratch_mark();
  double *row = scratch((size_t)x->cols, sizeof *row), *w = scratch((size_t)x->cols, sizeof *w);
  tensor_get_run(x, token * x->cols, 1, x->cols, row);
  for (int64_t e = 0; e < weight->rows; e++) {
    double sum, size;
    tensor_get_run(weight, e * weight->cols, 1, x->cols, w);
    add_products(w, row, x->cols, &sum, &size);
    double b = bias && bias->data ? tensor_get(bias, 0, e) : 0;
    logits[e] = (bounded){sum + b, product_factor(x->cols) * size + 2 * ulp * fabs(sum + b)};
  }
  scratch_release(mark);
}

void oracle_finish_logits(int32_t experts, int32_t dtype, float scale, bounded *logits)
{
  for (int32_t e = 0; e < experts; e++) {
    if (dtype) logits[e] = oracle_rounded(logits[e], dtype);
    if (scale == 0 || scale == 1) continue;
    const double scaled = (float)(logits[e].value * scale);
    logits[e] = (bounded){scaled, logits[e].bound * scale + (logits[e].bound > 0 ? 2 * ulp * fabs(scaled) : 0)};
  }
}

typedef struct candidate {
  int32_t id;
  bool open;            /* its group stays */
  bounded logit, score; /* capped logit; what it weighs */
  double raw;           /* the logit as given: equal raw values are equal in every implementation */
  double choice, slack; /* what it is ranked by, and how exactly that is known */
  double bias;
} candidate;

/* Decreasing choice; NaN last; then the lower id. */
static int compare_candidates(const void *a, const void *b)
{
  const candidate *x = a, *y = b;
  if (x->open != y->open) return x->open ? -1 : 1;
  if (isnan(x->choice) != isnan(y->choice)) return isnan(x->choice) ? 1 : -1;
  if (x->choice > y->choice) return -1;
  if (x->choice < y->choice) return 1;
  return x->id < y->id ? -1 : 1;
}

/* Whether a ranks above b whatever the rounding. The same inputs tie everywhere. */
static bool decided(const candidate *a, const candidate *b)
{
  if (isnan(a->choice) || isnan(b->choice)) return isnan(a->choice) == isnan(b->choice) || isnan(b->choice);
  if (a->raw == b->raw && a->logit.bound == 0 && b->logit.bound == 0 && a->bias == b->bias) return true;
  if (isinf(a->choice) || isinf(b->choice)) return true;
  return a->choice - b->choice > a->slack + b->slack || (a->slack == 0 && b->slack == 0);
}

/* Relative error of a gate weight in f32: 8 ulps, and what an absolute error of the logit makes of it. */
static bounded with_error(double value, double logit_error)
{
  return (bounded){value, fabs(value) * (16 * ulp + logit_error) + FLT_MIN};
}

static bounded unary_score(int32_t score, bounded l)
{
  switch (score) {
  case CUMOE_SCORE_SIGMOID: return with_error(1 / (1 + exp(-l.value)), l.bound);
  case CUMOE_SCORE_SQRT_SOFTPLUS: return with_error(sqrt(l.value > 30 ? l.value : log1p(exp(l.value))), l.bound);
  default: return l;
  }
}

/* exp(l - max) is computed from a rounded difference: 2^-24 |l - max| of its own value. The sum is off by the mean of
 * all bounds, each as its part of the sum: logits that may be rounded either way have larger ones than the rest. */
static void softmax(bounded *l, int32_t count)
{
  double max = -INFINITY, max_bound = 0, sum = 0, off = 0;
  for (int32_t i = 0; i < count; i++)
    if (l[i].value > max) max = l[i].value, max_bound = l[i].bound;
  for (int32_t i = 0; i < count; i++)
    if (l[i].value > -INFINITY) sum += exp(l[i].value - max), off += exp(l[i].value - max) * l[i].bound;
  max_bound = fmax(max_bound, off / sum);
  for (int32_t i = 0; i < count; i++) {
    if (!(l[i].value > -INFINITY))
      l[i] = (bounded){0, 0};
    else
      l[i] = with_error(exp(l[i].value - max) / sum, 2 * (l[i].bound + max_bound) + 2 * ulp * (max - l[i].value));
  }
}

static void load_candidates(const cumoe_routing *r, int32_t experts, const bounded *logits, candidate *c)
{
  for (int32_t e = 0; e < experts; e++) {
    double l = logits[e].value > FLT_MAX ? FLT_MAX : logits[e].value;
    c[e] = (candidate){.id = e, .open = true, .raw = l, .logit = {l, logits[e].bound}};
    if (r->softcap > 0 && l > -INFINITY) {
      double capped = r->softcap * tanh(l / r->softcap);
      c[e].logit = (bounded){capped, logits[e].bound + 8 * ulp * fabs(capped)};
    }
    c[e].score = unary_score(r->score, c[e].logit);
  }
  if (r->score != CUMOE_SCORE_SOFTMAX || r->flags & CUMOE_ROUTE_SCORE_AFTER_TOPK) return;
  bounded *s = scratch((size_t)experts, sizeof *s);
  for (int32_t e = 0; e < experts; e++) s[e] = c[e].score;
  softmax(s, experts);
  for (int32_t e = 0; e < experts; e++) c[e].score = s[e];
}

static void set_choices(const cumoe_routing *r, int32_t experts, const bounded *logits, const double *bias,
                        candidate *c)
{
  for (int32_t e = 0; e < experts; e++) {
    bool by_logit = bias == NULL && r->n_group == 0;
    c[e].bias = bias ? bias[e] : 0;
    const bounded ranked = r->flags & CUMOE_ROUTE_CHOOSE_BY_LOGIT ? c[e].logit : c[e].score;
    c[e].choice = by_logit ? c[e].raw : ranked.value + c[e].bias;
    c[e].slack = by_logit ? logits[e].bound : ranked.bound + 4 * ulp * fabs(c[e].choice);
    if (isnan(c[e].raw)) c[e].choice = NAN;
  }
}

/* Leaves the best groups open; false if it is not decided which. */
static bool choose_groups(const cumoe_routing *r, int32_t experts, candidate *c)
{
  int32_t size = experts / r->n_group;
  candidate *groups = scratch((size_t)r->n_group, sizeof *groups), *members = scratch((size_t)size, sizeof *members);
  for (int32_t g = 0; g < r->n_group; g++) {
    memcpy(members, c + g * size, (size_t)size * sizeof *members);
    qsort(members, (size_t)size, sizeof *members, compare_candidates);
    groups[g] = (candidate){.id = g,
                            .open = true,
                            .raw = members[0].raw,
                            .bias = members[0].bias,
                            .choice = members[0].choice,
                            .slack = members[0].slack};
    if (r->group_score == CUMOE_GROUP_BEST || size == 1) continue;
    groups[g].choice += members[1].choice;
    groups[g].slack += members[1].slack + 2 * ulp * fabs(groups[g].choice);
    groups[g].raw = NAN; /* two logits: ties are only as sure as the sums */
  }
  qsort(groups, (size_t)r->n_group, sizeof *groups, compare_candidates);
  for (int32_t e = 0; e < experts; e++) c[e].open = false;
  for (int32_t i = 0; i < r->topk_group; i++)
    for (int32_t e = 0; e < size; e++) c[groups[i].id * size + e].open = true;
  return r->topk_group == r->n_group || decided(&groups[r->topk_group - 1], &groups[r->topk_group]);
}

static void renormalize(const cumoe_routing *r, bounded *w)
{
  double sum = 0, size = 0, bound = 0;
  for (int32_t j = 0; j < r->top_k; j++) {
    sum += w[j].value;
    size += fabs(w[j].value);
    bound += w[j].bound;
  }
  double divisor = fmax(sum + (double)r->renorm_eps, (double)r->renorm_min);
  bound += (r->top_k + 2) * ulp * size;
  for (int32_t j = 0; j < r->top_k; j++) {
    if (divisor > 0) {
      double value = w[j].value / divisor;
      w[j] = (bounded){value, (w[j].bound + fabs(value) * bound) / divisor + 2 * ulp * fabs(value)};
    } else
      w[j] = (bounded){0, 0};
  }
}

/* Of SCORE_SPARSEMIXER: slot j's logit against those that slots before it have left, near enough to it. False: how near
 * an expert is is open. */
static bool mixed_weight(const cumoe_routing *r, int32_t experts, const candidate *c, int32_t j, bounded *weight)
{
  const double top = c[j].logit.value, eps = 2 * (double)r->mixer_eps;
  double sum = 0, error = 0;
  bool sure = true;
  for (int32_t e = j; e < experts; e++) {
    const double l = c[e].logit.value, size = fmax(fabs(l), top), distance = (top - l) / size;
    const double slack = 8 * ulp * (1 + fabs(distance)) + 4 * (c[e].logit.bound + c[j].logit.bound) / fabs(size);
    if (isnan(c[e].raw)) continue;
    if (fabs(distance - eps) <= slack && exp(l - top) > 1e-9) sure = false;
    if (distance > eps || !(l > -INFINITY)) continue;
    sum += exp(l - top);
    error += exp(l - top) * (2 * (c[e].logit.bound + c[j].logit.bound) + 2 * ulp * (top - l));
  }
  *weight = (bounded){1 / sum, (error / sum + 64 * ulp) / sum};
  return sure;
}

/* In the order of their slots. False: open. */
static bool rank_candidates(const cumoe_routing *r, int32_t experts, candidate *c)
{
  const int32_t chosen = r->top_k - r->always_experts;
  bool sure = true;
  if (r->n_group > 0) sure = choose_groups(r, experts, c);
  qsort(c, (size_t)experts, sizeof *c, compare_candidates);
  for (int32_t j = 0; j < chosen; j++)
    if (j + 1 < experts && c[j + 1].open) sure &= decided(&c[j], &c[j + 1]);
  return sure;
}

/* Slot j's expert; NULL: none. */
static const candidate *slot_expert(const cumoe_routing *r, int32_t experts, const candidate *c, gate_operands with,
                                    int32_t j)
{
  const int32_t chosen = r->top_k - r->always_experts, open = experts - r->always_experts;
  if (!with.chosen) return j < chosen ? &c[j] : &c[open + j - chosen];
  for (int32_t e = 0; e < experts; e++)
    if (c[e].id == with.chosen[j]) return &c[e];
  return NULL;
}

bool oracle_gate(const cumoe_routing *r, int32_t experts, const bounded *logits, gate_operands with, int32_t *ids,
                 bounded *weights)
{
  candidate *c = scratch((size_t)experts, sizeof *c);
  const bool after = r->flags & CUMOE_ROUTE_SCORE_AFTER_TOPK;
  const double scale = r->routed_scale == 0 ? 1 : r->routed_scale;
  load_candidates(r, experts, logits, c);
  set_choices(r, experts - r->always_experts, logits, with.select_bias, c);
  bool sure = rank_candidates(r, experts - r->always_experts, c) || with.chosen;
  for (int32_t j = 0; j < r->top_k; j++) {
    const candidate *e = slot_expert(r, experts, c, with, j);
    const double raw = e ? e->raw : NAN;
    ids[j] = with.chosen ? with.chosen[j] : e->id;
    weights[j] = !e ? (bounded){0, 0} : after ? e->logit : e->score;
    if (!(raw > -INFINITY) && !after)
      weights[j] = (bounded){0, 0};
    else if (isnan(raw) && after)
      weights[j] = (bounded){NAN, 0};
    else if (r->score == CUMOE_SCORE_SPARSEMIXER)
      sure &= mixed_weight(r, experts, c, (int32_t)(e - c), &weights[j]);
  }
  if (after) softmax(weights, r->top_k);
  if (r->flags & CUMOE_ROUTE_RENORMALIZE) renormalize(r, weights);
  for (int32_t j = 0; j < r->top_k; j++) {
    const bool there = ids[j] >= 0 && ids[j] < experts;
    const double factor = scale * (with.expert_scale && there ? with.expert_scale[ids[j]] : 1);
    weights[j].value *= factor;
    weights[j].bound = weights[j].bound * fabs(factor) + 2 * ulp * fabs(weights[j].value);
  }
  return sure;
}

/* ---- up and down ----------------------------------------------------------------------------------- */

/*
 * What is multiplied. Of codes that were made from values with bounds: `bound` is what can happen to an element at
 * worst; `drift`, by what part its group's scale may be off, which moves all of the group; `chance`, that it becomes
 * another code, a `step` away.
 */
typedef struct operand_row {
  const double *a, *bound;             /* bound: NULL if all are 0 */
  const double *drift, *chance, *step; /* NULL: bounds alone */
} operand_row;

/* What the bounds of codes bring: at worst, or, where many elements may have become other codes, what a sum of so many
 * independent steps stays below (Bernstein, some 1e-8). */
static double carried_codes(const double *w, int64_t depth, operand_row x)
{
  double worst = 0, moved = 0, variance = 0, largest = 0, group = 0;
  for (int64_t k = 0; k < depth; k++) {
    worst += x.bound[k] * fabs(w[k]);
    if (k > 0 && x.drift[k] != x.drift[k - 1]) moved += fabs(group), group = 0;
    group += x.drift[k] * x.a[k] * w[k];
    variance += x.chance[k] * x.step[k] * x.step[k] * w[k] * w[k];
    if (x.chance[k] > 0) largest = fmax(largest, x.step[k] * fabs(w[k]));
  }
  const double likely = moved + fabs(group) + 7 * sqrt(variance) + 12 * largest;
  return fmin(worst, likely);
}

/* What becomes of activations in fixed point: they are off by half of 2^-14 of the largest of 128. */
static double fixed_point_error(const double *w, const double *a, int64_t depth)
{
  double error = 0;
  for (int64_t at = 0; at < depth; at += 128) {
    double most = 0, weights = 0;
    for (int64_t k = at; k < depth && k < at + 128; k++) most = fmax(most, fabs(a[k])), weights += fabs(w[k]);
    error += 0x1p-15 * most * weights;
  }
  return error;
}

/* What Hopper's adder makes of products of 32 k, each time anew. */
static double adder_error(const double *w, const double *a, int64_t depth)
{
  double squares = 0;
  for (int64_t at = 0; at < depth; at += 32) {
    double sum, size;
    add_products(w + at, a + at, depth - at < 32 ? depth - at : 32, &sum, &size);
    squares += size * size;
  }
  return 24 * 0x1p-14 * sqrt(squares);
}

/* Of a sum: what rounding weights to 16 bits brings, at worst or, as they are rounded each by itself, what that stays
 * below (Hoeffding, some 1e-14); and what a device may do. small: sum of |a| of weights below 2^-14, where f16 has
 * steps of 2^-24. */
static double format_error(const cumoe_format *f, int32_t dtype, const double *w, const double *a, int64_t depth,
                           double size, double chunks)
{
  double error = 4 * ulp * size;
  if (f->element == CUMOE_ELEMENT_U4) {
    const double u = unit_roundoff(dtype);
    double squares = 0, small = 0;
    for (int64_t k = 0; k < depth; k++) {
      squares += a[k] * w[k] * (a[k] * w[k]);
      if (fabs(w[k]) < 0x1p-14) small += fabs(a[k]);
    }
    if (dtype == CUMOE_F16) error += 0x1p-25 * small;
    error += fmin(u * size, 8 * u * sqrt(squares)) + 32 * ulp * size; /* the offset in the sums, and taken off them */
  }
  const bool mx4 = f->element == CUMOE_ELEMENT_E2M1 && f->scale == CUMOE_E8M0;
  if ((mx4 || f->element == CUMOE_ELEMENT_U4) && oracle_device & (DEVICE_FIXED_POINT | DEVICE_TWIN_CODES))
    error += fixed_point_error(w, a, depth);
  if (mx4 && dtype == CUMOE_BF16 && oracle_device & DEVICE_TWIN_CODES) error += adder_error(w, a, depth);
  const bool fp8 = f->element == CUMOE_ELEMENT_E4M3 && format_has_codes(f);
  return fp8 && oracle_device & DEVICE_FP8_ADDER ? error + 24 * 0x1p-14 * sqrt(chunks) : error;
}

/* Of |w|, what the bounds bring at worst. */
static double carried_bounds(const double *w, const double *bound, int64_t depth)
{
  two c0 = {0}, c1 = {0}, c2 = {0}, c3 = {0};
  int64_t k = 0;
  for (; k + 8 <= depth; k += 8) {
    c0 += two_at(bound + k) * magnitudes(two_at(w + k));
    c1 += two_at(bound + k + 2) * magnitudes(two_at(w + k + 2));
    c2 += two_at(bound + k + 4) * magnitudes(two_at(w + k + 4));
    c3 += two_at(bound + k + 6) * magnitudes(two_at(w + k + 6));
  }
  double sum = sum_of(c0, c1, c2, c3);
  for (; k < depth; k++) sum += bound[k] * fabs(w[k]);
  return sum;
}

/* sum_k a[k] w[out, k], with the bounds of a carried along. */
static bounded product_sum(const double *w, int64_t depth, operand_row x, const cumoe_format *f, int32_t dtype)
{
  double sum = 0, size = 0, chunks = 0;
  for (int64_t at = 0; at < depth; at += 128) { /* Hopper's adder */
    double part, chunk;
    add_products(w + at, x.a + at, depth - at < 128 ? depth - at : 128, &part, &chunk);
    sum += part, size += chunk, chunks += chunk * chunk;
  }
  double carried = x.bound ? carried_bounds(w, x.bound, depth) : 0;
  if (x.drift && carried > 0) carried = carried_codes(w, depth, x);
  const double error = product_factor(depth) * size + carried;
  return (bounded){sum, format_is_dense(f) ? error : error + format_error(f, dtype, w, x.a, depth, size, chunks)};
}

/* ---- activations become codes ---- */

/* A group of `count` from x on: its scale, between what the smallest and the largest values make of it. */
static void quantise_group(const cumoe_format *f, float given, const bounded *x, int64_t count, bounded *to,
                           double *drift, double *chance, double *step)
{
  float most = 0, high = 0, low = 0;
  for (int64_t k = 0; k < count; k++) {
    const float v = (float)fabs(x[k].value);
    if (isnan(v) && f->element == CUMOE_ELEMENT_E4M3) continue;
    most = isnan(most) || isnan(v) ? NAN : fmaxf(most, v);
    high = fmaxf(high, (float)(v + x[k].bound));
    low = fmaxf(low, (float)(v - x[k].bound));
  }
  const float scale = group_scale(f, most, given), top = group_scale(f, high, given),
              bottom = group_scale(f, low, given);
  const double off = top == bottom || isnan(scale) ? 0 : fmax(top / scale - 1, 1 - bottom / scale);
  for (int64_t k = 0; k < count; k++) {
    const quantised q = quantise(f, (float)x[k].value, scale);
    const double up = quantise(f, (float)(x[k].value + x[k].bound), scale).value,
                 down = quantise(f, (float)(x[k].value - x[k].bound), scale).value;
    const double near = fmax(up - q.value, q.value - down);
    const double any = x[k].bound + q.step + fabs(q.value - x[k].value) + off * fabs(x[k].value);
    const bool sure = off == 0 && !(near > 0);
    to[k] = (bounded){q.value, sure || isnan(q.value) ? 0 : off == 0 ? near : any};
    drift[k] = off;
    step[k] = sure ? 0 : fmax(q.step, off == 0 ? near : 0);
    chance[k] = sure ? 0 : fmin(1, (x[k].bound + off * fabs(x[k].value)) / q.step);
  }
}

static operand_row as_bounds(const bounded *x, int64_t cols)
{
  double *a = scratch((size_t)cols, sizeof *a), *bound = scratch((size_t)cols, sizeof *bound);
  bool any = false;
  for (int64_t k = 0; k < cols; k++) a[k] = x[k].value, bound[k] = x[k].bound, any |= !(x[k].bound == 0);
  return (operand_row){.a = a, .bound = any ? bound : NULL};
}

static operand_row as_codes(const cumoe_format *f, float given, int64_t cols, const bounded *x)
{
  bounded *to = scratch((size_t)cols, sizeof *to);
  double *more = scratch((size_t)cols * 3, sizeof *more);
  const bool groups = f->rows == CUMOE_ROWS_GROUP;
  for (int64_t at = 0, count; at < cols; at += count) {
    count = groups ? f->row_group - (f->origin[1] + at) % f->row_group : cols;
    if (count > cols - at) count = cols - at;
    quantise_group(f, given, x + at, count, to + at, more + at, more + cols + at, more + 2 * cols + at);
  }
  operand_row row = as_bounds(to, cols);
  row.drift = more, row.chance = more + cols, row.step = more + 2 * cols;
  return row;
}

static operand_row operand_of(const host_weights *w, int part, int64_t expert, const bounded *x)
{
  const channel_place at = oracle_channel(w, part, 0, 0);
  const tensor *given = &at.projection->input_scale;
  if (!format_has_codes(at.format)) return as_bounds(x, at.ins);
  const double scale = given->data ? tensor_get(given, given->rows > 1 ? expert : 0, 0) : 0;
  return as_codes(at.format, (float)scale, at.ins, x);
}

/* act(g) with its slope and the error of evaluating it in f32. */
typedef struct activation {
  double value, slope, error;
} activation;

static activation activate(int32_t act, double alpha, bounded gate)
{
  double g = gate.value, v;
  switch (act) {
  case CUMOE_ACT_SILU: v = g / (1 + exp(-g)); return (activation){v, 1.1, 4 * ulp * fabs(v)};
  case CUMOE_ACT_SWIGLU_OAI: v = g / (1 + exp(-alpha * g)); return (activation){v, 1.1, 4 * ulp * fabs(v)};
  /* 1 + erf and 1 + tanh cancel for negative g: the error is absolute */
  case CUMOE_ACT_GELU_ERF: v = g / 2 * (1 + erf(g / sqrt(2.0))); return (activation){v, 1.13, 4 * ulp * fabs(g)};
  case CUMOE_ACT_GELU_TANH:
    v = g / 2 * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g)));
    return (activation){v, 1.13, 4 * ulp * fabs(g)};
  case CUMOE_ACT_RELU: return (activation){g > 0 || isnan(g) ? g : 0, 1, 0};
  case CUMOE_ACT_RELU2: v = g > 0 || isnan(g) ? g * g : 0; return (activation){v, 2 * (fabs(g) + gate.bound), ulp * v};
  default: return (activation){g, 1, 0};
  }
}

static bounded clamped(bounded b, double low, double high)
{
  if (b.value < low) return (bounded){low, fmax(0, b.value + b.bound - low)};
  if (b.value > high) return (bounded){high, fmax(0, high - (b.value - b.bound))};
  return b;
}

static bounded gated(const cumoe_moe_desc *d, bounded gate, bounded up)
{
  double limit = d->act_limit, alpha = d->act_alpha == 0 ? (double)1.702f : (double)d->act_alpha;
  const bool behind = d->flags & CUMOE_MOE_LIMIT_AFTER;
  if (limit > 0) {
    if (!behind) gate = clamped(gate, -INFINITY, limit);
    up = clamped(up, -limit, limit);
  }
  if (d->act == CUMOE_ACT_SWIGLU_OAI) up = (bounded){up.value + 1, up.bound + ulp * (1 + fabs(up.value))};
  activation a = activate(d->act, alpha, gate);
  double act_bound = a.slope * gate.bound + a.error;
  if (limit > 0 && behind) {
    const bounded least = clamped((bounded){a.value, act_bound + 4 * ulp * fabs(a.value)}, -INFINITY, limit);
    a.value = least.value, act_bound = least.bound + 4 * ulp * limit;
  }
  double value = a.value * up.value;
  return (bounded){value, act_bound * (fabs(up.value) + up.bound) + fabs(a.value) * up.bound + 2 * ulp * fabs(value)};
}

static bounded projected(const host_weights *w, int part, int64_t expert, int64_t out, operand_row a, bounded weight)
{
  const cumoe_format *f = part == PLAIN_DOWN ? &w->down_format : &w->up_format;
  int64_t outs = part == PLAIN_DOWN ? w->hidden : w->inter, ins = part == PLAIN_DOWN ? w->inter : w->hidden;
  bounded sum = product_sum(w->plain[part] + (expert * outs + out) * ins, ins, a, f, w->dtype);
  double bias = bias_at(w, part, expert, out), value = sum.value * weight.value;
  double bound = sum.bound * (fabs(weight.value) + weight.bound) + weight.bound * fabs(sum.value);
  if (weight.value != 1 || weight.bound != 0) bound += ulp * fabs(value);
  if (bias != 0) bound += ulp * (fabs(value) + fabs(value + bias));
  return (bounded){value + bias, bound};
}

void oracle_up(const cumoe_moe_desc *d, const host_weights *w, int64_t expert, const double *x, bounded weight,
               bounded *h)
{
  bounded *plain = scratch((size_t)w->hidden, sizeof *plain);
  for (int64_t k = 0; k < w->hidden; k++) plain[k] = (bounded){x[k], 0};
  const operand_row a = operand_of(w, PLAIN_UP, expert, plain);
  for (int64_t n = 0; n < w->inter; n++) {
    bounded up = projected(w, PLAIN_UP, expert, n, a, weight);
    if (w->gate_order != CUMOE_UNGATED) {
      h[n] = gated(d, projected(w, PLAIN_GATE, expert, n, a, weight), up);
    } else {
      activation v = activate(d->act, 0, up);
      h[n] = (bounded){v.value, v.slope * up.bound + v.error};
    }
  }
}

void oracle_down(const host_weights *w, int64_t expert, const bounded *h, bounded *y)
{
  const operand_row a = operand_of(w, PLAIN_DOWN, expert, h);
  for (int64_t n = 0; n < w->hidden; n++) y[n] = projected(w, PLAIN_DOWN, expert, n, a, (bounded){1, 0});
}

/* ---- combine --------------------------------------------------------------------------------------- */

static void add_term(bounded *sum, double *size, bounded w, bounded y)
{
  if (w.value == 0 && w.bound == 0) return;
  double term = w.value * y.value;
  sum->value += term;
  sum->bound += fabs(w.value) * y.bound + w.bound * (fabs(y.value) + y.bound);
  *size += fabs(term);
  if (fabs(sum->value) >= 0x1.ffffffp127) sum->value = copysign(INFINITY, sum->value); /* summed in f32 */
}

void oracle_combine(const combine_terms *t, bounded *out)
{
  bounded one = {1, 0}, shared_weight = one;
  if (t->shared_logit) shared_weight = unary_score(CUMOE_SCORE_SIGMOID, *t->shared_logit);
  for (int32_t i = 0; i < t->hidden; i++) {
    bounded sum = {0, 0};
    double size = 0, residual = t->residual ? t->residual[i] : 0;
    for (int32_t j = 0; j < t->slots; j++)
      if (t->y[j]) add_term(&sum, &size, t->weights[j], t->y[j][i]);
    if (t->shared) add_term(&sum, &size, shared_weight, t->shared[i]);
    sum.bound += (t->slots + 1) * ulp * size;
    double scaled = sum.value * t->out_scale;
    out[i] = (bounded){scaled + residual, fabs(t->out_scale) * sum.bound};
    if (t->out_scale != 1) out[i].bound += ulp * fabs(scaled);
    if (t->residual) out[i].bound += ulp * fabs(scaled + residual);
  }
}

/* ---- the layer ------------------------------------------------------------------------------------- */

int32_t oracle_destination(const cumoe_moe_desc *d, const tensor *expert_map, double id)
{
  int32_t experts = d->num_experts, zero_end = experts + d->routing.zero_experts;
  if (id < 0 || id >= zero_end + d->routing.identity_experts) return -1;
  if (id >= zero_end) return -2;
  if (id >= experts) return -1;
  double local = expert_map ? tensor_get(expert_map, 0, (int64_t)id) : id;
  return local >= 0 && local < d->local_experts ? (int32_t)local : -1;
}

static const double *row_or_null(const tensor *t, int64_t cols)
{
  double *row = t ? scratch((size_t)cols, sizeof *row) : NULL;
  for (int64_t i = 0; row && i < cols; i++) row[i] = tensor_get(t, 0, i);
  return row;
}

/* As the gate reads them. */
static bounded *logits_of(const layer_case *c, int64_t token, int32_t experts)
{
  const cumoe_routing *r = &c->desc->routing;
  bounded *logits = scratch((size_t)experts, sizeof *logits);
  for (int32_t e = 0; c->logits && e < experts; e++) logits[e] = (bounded){tensor_get(c->logits, token, e), 0};
  if (c->logits) return logits;
  oracle_router(c->router_x ? c->router_x : c->x, token, c->router_weight, c->router_bias, logits);
  oracle_finish_logits(experts, r->logits_dtype, r->logit_scale, logits);
  return logits;
}

static bool route_token(const layer_case *c, int64_t token, int32_t *ids, bounded *weights)
{
  const cumoe_routing *r = &c->desc->routing;
  const int32_t experts = c->desc->num_experts + r->zero_experts + r->identity_experts;
  int32_t *chosen = scratch((size_t)r->top_k, sizeof *chosen);
  for (int32_t j = 0; c->ids && j < r->top_k; j++) ids[j] = chosen[j] = (int32_t)tensor_get(c->ids, token, j);
  for (int32_t j = 0; c->id_weights && j < r->top_k; j++)
    weights[j] = (bounded){tensor_get(c->id_weights, token, j), 0};
  if (c->id_weights) return true;
  const gate_operands with = {row_or_null(c->select_bias, experts - r->always_experts),
                              row_or_null(c->expert_scale, experts), c->ids ? chosen : NULL};
  return oracle_gate(r, experts, logits_of(c, token, experts), with, ids, weights);
}

/* An expert's output as stored: h and y rounded to the type of the layer. */
static bounded *expert_output(const layer_case *c, const host_weights *w, int64_t expert, const double *x,
                              bounded weight)
{
  bounded *h = scratch((size_t)w->inter, sizeof *h), *y = scratch((size_t)w->hidden, sizeof *y);
  oracle_up(c->desc, w, expert, x, weight, h);
  for (int64_t i = 0; i < w->inter; i++) h[i] = oracle_rounded(h[i], c->desc->dtype);
  oracle_down(w, expert, h, y);
  for (int64_t i = 0; i < w->hidden; i++) y[i] = oracle_rounded(y[i], c->desc->dtype);
  return y;
}

static bounded *slot_output(const layer_case *c, double id, const double *x, bounded weight)
{
  int32_t to = oracle_destination(c->desc, c->expert_map, id);
  if (to == -1) return NULL;
  if (to >= 0) return expert_output(c, c->weights, to, x, weight);
  bounded *y = scratch((size_t)c->desc->hidden, sizeof *y);
  for (int32_t i = 0; i < c->desc->hidden; i++) y[i] = (bounded){x[i], 0};
  return y;
}

static void reduce_layer(const layer_case *c, int64_t token, const double *x, combine_terms *terms, bounded *out)
{
  int32_t hidden = c->desc->hidden;
  bounded gate;
  double *residual = c->residual ? scratch((size_t)hidden, sizeof *residual) : NULL;
  for (int32_t i = 0; residual && i < hidden; i++)
    residual[i] = tensor_get(c->residual, c->residual->rows == 1 ? 0 : token, i);
  terms->residual = residual;
  terms->shared = c->shared ? expert_output(c, c->shared, 0, x, (bounded){1, 0}) : NULL;
  if (c->shared_gate) {
    oracle_router(c->x, token, c->shared_gate, NULL, &gate);
    terms->shared_logit = &gate;
  }
  oracle_combine(terms, out);
}

layer_result oracle_layer(const layer_case *c, int64_t token)
{
  const cumoe_moe_desc *d = c->desc;
  int32_t k = d->routing.top_k, hidden = d->hidden;
  bool unreduced = d->flags & CUMOE_MOE_UNREDUCED, on_input = d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
  layer_result r = {.ids = scratch((size_t)k, sizeof *r.ids),
                    .weights = scratch((size_t)k, sizeof *r.weights),
                    .out = scratch((size_t)k * (size_t)hidden, sizeof *r.out)};
  double *x = scratch((size_t)hidden, sizeof *x);
  const bounded **y = scratch((size_t)k, sizeof *y);
  bounded *combine_weights = scratch((size_t)k, sizeof *combine_weights);
  for (int32_t i = 0; i < hidden; i++) x[i] = tensor_get(c->x, token, i);
  r.decided = route_token(c, token, r.ids, r.weights);
  for (int32_t j = 0; j < k; j++) {
    y[j] = slot_output(c, r.ids[j], x, on_input ? r.weights[j] : (bounded){1, 0});
    if (on_input && r.weights[j].value == 0 && r.weights[j].bound == 0) y[j] = NULL;
    combine_weights[j] = on_input ? (bounded){1, 0} : r.weights[j];
    for (int32_t i = 0; unreduced && i < hidden; i++) r.out[j * hidden + i] = y[j] ? y[j][i] : (bounded){0, 0};
  }
  combine_terms terms = {.hidden = hidden, .slots = k, .y = y, .weights = combine_weights, .out_scale = c->out_scale};
  if (!unreduced) reduce_layer(c, token, x, &terms, r.out);
  for (int32_t i = 0; i < (unreduced ? k : 1) * hidden; i++) r.out[i] = oracle_stored(r.out[i], d->out_dtype);
  return r;
}
