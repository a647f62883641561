/*
 * From d weights to d logits, what the gate chose being a constant. All in double, from the logits: scores that the
 * forward rounds to f32 are not read. A logit that is not finite has no slope, and a slot whose weight is 0 for it has
 * no part in anything.
 */
#include <float.h>
#include <stdbool.h>
#include "../score.h"
#include "backward.h"
#include "backward_pairs.h"

/* One token: what was, and what is summed up. */
typedef struct gate_token {
  double logit[MAX_EXPERTS];   /* capped; -Inf: none */
  double slope[MAX_EXPERTS];   /* of the capped logit, in the logit */
  double score[MAX_EXPERTS];   /* of one expert alone, or of all */
  double d_logit[MAX_EXPERTS]; /* of the capped ones */
  float raw[MAX_EXPERTS];
  int32_t id[MAX_TOP_K]; /* -1: the slot weighs 0 */
} gate_token;

static int32_t columns_of(const gate_args *g)
{
  return g->experts + g->always;
}

static int32_t given_id(const gate_args *g, int64_t at)
{
  const int64_t id = g->ids_dtype == DT_I64 ? ((const int64_t *)g->given)[at] : ((const int32_t *)g->given)[at];
  return id >= 0 && id < columns_of(g) ? (int32_t)id : -1;
}

static void load_token(const gate_args *g, int64_t token, gate_token *t)
{
  const double cap = g->softcap;
  for (int32_t e = 0; e < columns_of(g); e++) {
    const float given = load_element(g->logits, token * g->logits_ld + e, g->logits_dtype);
    const float l = t->raw[e] = given > FLT_MAX ? FLT_MAX : given;
    const double bent = cap > 0 ? tanh(l / cap) : 0;
    t->logit[e] = !(l > -INFINITY) ? -INFINITY : cap > 0 ? cap * bent : l;
    t->slope[e] = !(l > -INFINITY) || given > FLT_MAX ? 0 : 1 - bent * bent;
    t->d_logit[e] = 0;
  }
  for (int32_t j = 0; j < g->top_k; j++) {
    const int32_t id = given_id(g, token * g->ids_ld + j);
    t->id[j] = id >= 0 && t->logit[id] > -INFINITY ? id : -1;
  }
}

/* p = softmax of l; log of the sum of exp(l). -Inf: nothing is finite, p is 0. */
static double softmax(const double *l, int32_t count, double *p)
{
  double max = -INFINITY, sum = 0;
  for (int32_t i = 0; i < count; i++) max = l[i] > max ? l[i] : max;
  for (int32_t i = 0; i < count; i++) sum += p[i] = l[i] > -INFINITY ? exp(l[i] - max) : 0;
  for (int32_t i = 0; i < count && sum > 0; i++) p[i] /= sum;
  return max + log(sum);
}

/* A score of one expert alone, and its slope. */
typedef struct scored {
  double value, slope;
} scored;

static scored score_alone(int score, double l)
{
  const double s = 1 / (1 + exp(-l));
  if (score == SCORE_SIGMOID) return (scored){s, s * (1 - s)};
  if (score != SCORE_SQRT_SOFTPLUS) return (scored){l, 1};
  const double root = sqrt(l > 0 ? l + log1p(exp(-l)) : log1p(exp(l)));
  return (scored){root, root > 0 ? s / (2 * root) : 0};
}

static bool is_alone(int score)
{
  return score == SCORE_SIGMOID || score == SCORE_SQRT_SOFTPLUS || score == SCORE_IDENTITY;
}

/* ---- the scores of the slots, and back ---- */

/* SCORE_SPARSEMIXER: whether expert e is weighed against what slot's id has. */
static bool is_mixed(const gate_args *g, const gate_token *t, int32_t id, int32_t e)
{
  const float raw = t->raw[id], other = t->raw[e];
  const bool left = other < raw || (other == raw && e >= id);
  return left && t->logit[e] > -INFINITY &&
         mixes(g->mixer_eps, exact_cap(g->softcap, raw), exact_cap(g->softcap, other));
}

static double mixed_weight(const gate_args *g, const gate_token *t, int32_t id)
{
  double sum = 0;
  for (int32_t e = 0; e < g->experts; e++)
    if (is_mixed(g, t, id, e)) sum += exp(t->logit[e] - t->logit[id]);
  return 1 / sum;
}

static void mixed_gradient(const gate_args *g, gate_token *t, int32_t id, double w, double d)
{
  for (int32_t e = 0; e < g->experts; e++)
    if (is_mixed(g, t, id, e)) t->d_logit[e] -= d * w * w * exp(t->logit[e] - t->logit[id]);
  t->d_logit[id] += d * w;
}

static void slot_scores(const gate_args *g, gate_token *t, double *s)
{
  const bool after = g->flags & ROUTE_SCORE_AFTER_TOPK;
  if (GATE_SOFTMAX_OVER_ALL(*g)) (void)softmax(t->logit, g->experts, t->score);
  for (int32_t j = 0; j < g->top_k; j++) {
    const int32_t id = t->id[j];
    s[j] = after ? -INFINITY : 0;
    if (id < 0) continue;
    if (after)
      s[j] = t->logit[id];
    else if (g->weigh == SCORE_SPARSEMIXER)
      s[j] = mixed_weight(g, t, id);
    else
      s[j] = is_alone(g->weigh) ? score_alone(g->weigh, t->logit[id]).value : t->score[id];
  }
  if (after) (void)softmax(s, g->top_k, s);
}

/* d: of the slots' scores; 0 of one that weighs 0. */
static void scores_gradient(const gate_args *g, gate_token *t, const double *s, const double *d)
{
  const bool over_all = GATE_SOFTMAX_OVER_ALL(*g), after = g->flags & ROUTE_SCORE_AFTER_TOPK;
  double mean = 0; /* of d, weighed by the softmax */
  for (int32_t j = 0; j < g->top_k; j++) mean += d[j] * s[j];
  for (int32_t j = 0; j < g->top_k; j++) {
    const int32_t id = t->id[j];
    if (id < 0) continue;
    if (after)
      t->d_logit[id] += s[j] * (d[j] - mean);
    else if (over_all)
      t->d_logit[id] += s[j] * d[j];
    else if (g->weigh == SCORE_SPARSEMIXER)
      mixed_gradient(g, t, id, s[j], d[j]);
    else
      t->d_logit[id] += d[j] * score_alone(g->weigh, t->logit[id]).slope;
  }
  for (int32_t e = 0; e < g->experts && over_all; e++) t->d_logit[e] -= t->score[e] * mean;
}

/* ---- what becomes of the scores ---- */

/* weights w of scores s, and d s of d w (both in place of the latter). */
static void renormalize(const gate_args *g, const double *s, double *w, double *d)
{
  double sum = 0, inner = 0;
  for (int32_t j = 0; j < g->top_k; j++) sum += s[j];
  const bool by_sum = sum + (double)g->renorm_eps >= (double)g->renorm_min;
  const double divisor = by_sum ? sum + (double)g->renorm_eps : g->renorm_min;
  for (int32_t j = 0; j < g->top_k; j++) w[j] = divisor > 0 ? s[j] / divisor : 0;
  for (int32_t j = 0; j < g->top_k && by_sum; j++) inner += d[j] * w[j];
  for (int32_t j = 0; j < g->top_k; j++) d[j] = divisor > 0 ? (d[j] - inner) / divisor : 0;
}

static void weights_gradient(const gate_backward_args *a, int64_t token, gate_token *t)
{
  const gate_args *g = &a->g;
  double s[MAX_TOP_K], w[MAX_TOP_K], d[MAX_TOP_K], given[MAX_TOP_K];
  slot_scores(g, t, s);
  for (int32_t j = 0; j < g->top_k; j++) {
    const int32_t id = t->id[j];
    const double scale = id >= 0 && g->expert_scale ? (double)g->expert_scale[id] * g->routed_scale : g->routed_scale;
    w[j] = s[j];
    given[j] = id < 0 ? 0 : a->d_weights[token * a->d_weights_ld + j];
    d[j] = id < 0 ? 0 : given[j] * scale;
  }
  if (g->flags & ROUTE_RENORMALIZE) renormalize(g, s, w, d);
  for (int32_t j = 0; j < g->top_k && a->pair_scale; j++)
    a->pair_scale[token * g->top_k + j] = given[j] * g->routed_scale * w[j];
  for (int32_t j = 0; j < g->top_k; j++)
    if (t->id[j] < 0) d[j] = 0;
  scores_gradient(g, t, s, d);
}

/* ---- losses ---- */

static double counted(const gate_backward_args *a, double *part)
{
  double all = 0;
  for (int32_t e = 0; e < a->g.experts; e++) all += (double)a->count[e];
  for (int32_t e = 0; e < a->g.experts; e++) part[e] = all > 0 ? (double)a->count[e] / all : 0;
  return all;
}

/* p of the experts that are chosen among: the softmax, or the scores divided by their sum. */
static double balance_gradient(const gate_backward_args *a, gate_token *t, double tokens)
{
  const gate_args *g = &a->g;
  const bool alone = is_alone(g->weigh) && g->weigh != SCORE_IDENTITY;
  double part[MAX_EXPERTS], sum = 1, mean = 0;
  if (!alone) (void)softmax(t->logit, g->experts, t->score);
  if (alone) {
    sum = 0;
    for (int32_t e = 0; e < g->experts; e++)
      sum += t->score[e] = t->logit[e] > -INFINITY ? score_alone(g->weigh, t->logit[e]).value : 0;
    for (int32_t e = 0; e < g->experts; e++) t->score[e] = sum > 0 ? t->score[e] / sum : 0;
  }
  (void)counted(a, part);
  for (int32_t e = 0; e < g->experts; e++) mean += part[e] * t->score[e];
  const double factor = (double)a->balance * g->experts / tokens;
  for (int32_t e = 0; e < g->experts; e++) {
    if (!(t->logit[e] > -INFINITY) || !(sum > 0)) continue;
    const double slope = alone ? score_alone(g->weigh, t->logit[e]).slope / sum : t->score[e];
    t->d_logit[e] += factor * slope * (part[e] - mean);
  }
  return factor * mean;
}

static double z_gradient(const gate_backward_args *a, gate_token *t, double tokens)
{
  const int32_t columns = columns_of(&a->g);
  const double log_sum = softmax(t->logit, columns, t->score), factor = (double)a->z / tokens;
  if (!(log_sum > -INFINITY)) return 0;
  for (int32_t e = 0; e < columns; e++) t->d_logit[e] += 2 * factor * log_sum * t->score[e];
  return factor * log_sum * log_sum;
}

/* ---- kernels ---- */

static int64_t pairs_with(const gate_args *g, int32_t expert)
{
  const int64_t tokens = tokens_present(g->tokens);
  int64_t count = 0;
  for (int64_t token = 0; token < tokens; token++)
    for (int32_t j = 0; j < g->top_k; j++) count += given_id(g, token * g->ids_ld + j) == expert;
  return count;
}

void cpu_gate_count(const void *args, int64_t begin, int64_t end)
{
  const gate_backward_args *a = args;
  for (int64_t e = begin; e < end && e < columns_of(&a->g); e++) a->count[e] = pairs_with(&a->g, (int32_t)e);
}

void cpu_gate_backward(const void *args, int64_t begin, int64_t end)
{
  const gate_backward_args *a = args;
  const int64_t tokens = tokens_present(a->g.tokens);
  gate_token t;
  check_token_count(a->g.tokens, a->g.fault);
  for (int64_t token = begin; token < end && token < tokens; token++) {
    double loss[2] = {0, 0};
    load_token(&a->g, token, &t);
    if (a->d_weights) weights_gradient(a, token, &t);
    if (a->balance != 0) loss[0] = balance_gradient(a, &t, (double)tokens);
    if (a->z != 0) loss[1] = z_gradient(a, &t, (double)tokens);
    for (int i = 0; i < 2 && a->token_loss; i++) a->token_loss[2 * token + i] = loss[i];
    for (int32_t e = 0; e < columns_of(&a->g); e++)
      a->d_logits[token * a->d_logits_ld + e] = t.slope[e] == 0 ? 0 : (float)f32_range(t.d_logit[e] * t.slope[e]);
  }
}

void cpu_gate_scale(const void *args, int64_t begin, int64_t end)
{
  const gate_backward_args *a = args;
  const int64_t tokens = tokens_present(a->g.tokens);
  const int32_t k = a->g.top_k;
  for (int64_t e = begin; e < end && e < columns_of(&a->g); e++) {
    double sum = 0;
    int64_t count = 0;
    for (int64_t token = 0; token < tokens; token++)
      for (int32_t j = 0; j < k; j++)
        if (given_id(&a->g, token * a->g.ids_ld + j) == e) sum += a->pair_scale[token * k + j], count++;
    if (a->accumulates && count == 0) continue;
    a->d_expert_scale[e] = (float)f32_range((a->accumulates ? a->d_expert_scale[e] : 0) + sum);
  }
}

void cpu_gate_loss(const void *args, int64_t begin, int64_t end)
{
  const gate_backward_args *a = args;
  const int64_t tokens = tokens_present(a->g.tokens);
  double sum[2] = {0, 0};
  if (begin != 0 || end <= 0) return;
  for (int64_t token = 0; token < tokens; token++)
    for (int i = 0; i < 2; i++) sum[i] += a->token_loss[2 * token + i];
  for (int i = 0; i < 2; i++) a->losses[i] = (float)f32_range(sum[i]);
}
