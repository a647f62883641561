/*
 * logits -> ids and weights of each token, the reference for every other gate: choices are made in float in the
 * order of the public manual (cumoe_routing), so that ids can be compared exactly. One unit is one token.
 */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include "../score.h"
#include "cpu.h"
#include "element.h"
#include "fault.h"

enum { MAX_GROUPS = 64 }; /* cumoe_routing */

typedef struct token_scores {
  float logit[MAX_EXPERTS];  /* +Inf already the largest finite float; soft cap applied */
  float score[MAX_EXPERTS];  /* what a chosen expert weighs, before renormalisation */
  float choice[MAX_EXPERTS]; /* what the experts are ranked by */
} token_scores;

/* Numbers in order, NaN below all; equal values leave the first comer, which has the lower id. */
static bool ranks_above(float a, float b)
{
  return a > b || (b != b && a == a);
}

static float unary_score(int score, float l)
{
  if (score == SCORE_SIGMOID) return 1.f / (1.f + expf(-l));
  if (score == SCORE_SQRT_SOFTPLUS) return sqrtf(l > 20.f ? l + log1pf(expf(-l)) : log1pf(expf(l)));
  return l;
}

/* In place over `count` logits. NaN neither sets the maximum nor enters the sum, and comes out as 0. */
static void softmax(float *l, int count)
{
  float max = -INFINITY;
  double sum = 0;
  for (int i = 0; i < count; i++) max = l[i] > max ? l[i] : max;
  for (int i = 0; i < count; i++) {
    l[i] = l[i] > -INFINITY ? expf(l[i] - max) : 0.f;
    sum += l[i];
  }
  for (int i = 0; i < count; i++) l[i] = sum > 0 ? l[i] / (float)sum : 0.f;
}

static void load_logits(const gate_args *a, int64_t token, token_scores *s)
{
  int32_t first_nan = -1;
  for (int32_t e = a->experts + a->always - 1; e >= 0; e--) {
    float l = load_element(a->logits, token * a->logits_ld + e, a->logits_dtype);
    if (l != l) first_nan = e;
    s->logit[e] = l > FLT_MAX ? FLT_MAX : l;
  }
  if (first_nan >= 0) record_fault(a->fault, FAULT_NAN_LOGIT, first_nan, token);
}

/* In place over all experts' capped logits, in the order of sums that score.h names. */
static void exact_softmax(float *l, int count)
{
  enum { PARTS = 32 };
  float max = -INFINITY, sum[PARTS] = {0};
  for (int i = 0; i < count; i++) max = l[i] > max ? l[i] : max;
  for (int i = 0; i < count; i++) sum[i % PARTS] += l[i] = exact_softmax_term(l[i], max);
  for (int distance = PARTS / 2; distance > 0; distance /= 2)
    for (int i = 0; i < distance; i++) sum[i] += sum[i + distance];
  for (int i = 0; i < count; i++) l[i] = sum[0] > 0 ? l[i] / sum[0] : 0.f;
}

static float soft_cap(float softcap, float l)
{
  return softcap > 0 && l > -INFINITY ? softcap * tanhf(l / softcap) : l;
}

/* Without bias and groups the raw logits rank the experts: every score keeps their order, but may round. */
static void rank_experts(const gate_args *a, token_scores *s)
{
  const bool by_logit = GATE_BY_LOGIT(*a), softmax_over_all = GATE_SOFTMAX_OVER_ALL(*a);
  for (int32_t e = 0; e < a->experts; e++) {
    s->choice[e] = by_logit ? s->logit[e] : exact_cap(a->softcap, s->logit[e]);
    s->logit[e] = soft_cap(a->softcap, s->logit[e]);
    s->score[e] = unary_score(a->weigh, s->logit[e]);
  }
  for (int32_t e = a->experts; e < a->experts + a->always; e++) {
    s->logit[e] = soft_cap(a->softcap, s->logit[e]);
    s->score[e] = unary_score(a->weigh, s->logit[e]);
  }
  if (softmax_over_all) softmax(s->score, a->experts);
  if (by_logit) return;
  if (softmax_over_all) exact_softmax(s->choice, a->experts);
  for (int32_t e = 0; e < a->experts; e++) {
    if (s->logit[e] != s->logit[e])
      s->choice[e] = NAN;
    else if (!softmax_over_all)
      s->choice[e] = exact_score(a->score, s->choice[e]);
    if (a->select_bias) s->choice[e] += a->select_bias[e];
  }
}

/* Index of the best of `count` values that is not yet taken; marks it. */
static int take_best(const float *value, bool *taken, int count)
{
  int best = -1;
  for (int i = 0; i < count; i++) /* NOLINTNEXTLINE: the analyser cannot see that all `count` values were written */
    if (!taken[i] && (best < 0 || ranks_above(value[i], value[best]))) best = i;
  if (best >= 0) taken[best] = true;
  return best;
}

/* Marks the experts of all but the topk_group best groups as taken. */
static void close_groups(const gate_args *a, const float *choice, bool *taken)
{
  int size = a->experts / a->n_group;
  float value[MAX_GROUPS] = {0};
  bool open[MAX_GROUPS] = {false};
  for (int g = 0; g < a->n_group; g++) {
    bool used[MAX_EXPERTS] = {false};
    const float *in_group = choice + (size_t)g * (size_t)size;
    for (int i = 0; i < (a->group_score == GROUP_BEST_TWO && size > 1 ? 2 : 1); i++) {
      const int best = take_best(in_group, used, size);
      if (best >= 0) value[g] += in_group[best]; /* NOLINT: as above */
    }
  }
  for (int i = 0; i < a->topk_group; i++) take_best(value, open, a->n_group);
  for (int e = 0; e < a->n_group * size; e++) taken[e] = !open[e / size];
}

/* A sum that is not positive leaves nothing to divide by: the weights are 0 then, never Inf or NaN. */
static void renormalize(const gate_args *a, float *weight)
{
  const float scale = RENORM_SCALE(*a);
  double sum = 0;
  for (int j = 0; j < a->top_k; j++) sum += weight[j] *= scale;
  float divisor = fmaxf((float)(sum + (double)a->renorm_eps * (double)scale), a->renorm_min * scale);
  for (int j = 0; j < a->top_k; j++) weight[j] = divisor > 0 ? weight[j] / divisor : 0.f;
}

/* SCORE_SPARSEMIXER: 1 / the sum over what slots before have left near the expert's logit. */
static float mixed_weight(const gate_args *a, const token_scores *s, int32_t id)
{
  const float raw = s->choice[id], top = exact_cap(a->softcap, raw);
  double sum = 0;
  for (int32_t e = 0; e < a->experts; e++) {
    const float other = s->choice[e], capped = exact_cap(a->softcap, other);
    const bool left = other < raw || (other == raw && e >= id);
    if (left && mixes(a->mixer_eps, top, capped)) sum += capped > -INFINITY ? exp((double)capped - (double)top) : 0;
  }
  return (float)(1 / sum);
}

/* Before renormalisation; NaN for a softmax over the chosen to leave out. */
static float slot_weight(const gate_args *a, const token_scores *s, int32_t id)
{
  const float logit = id < 0 ? NAN : s->logit[id];
  if (a->flags & ROUTE_SCORE_AFTER_TOPK) return logit;
  if (!(logit > -INFINITY)) return 0;
  return a->weigh == SCORE_SPARSEMIXER ? mixed_weight(a, s, id) : s->score[id];
}

/* -1 where it names no expert: what of that is a fault, the map says. */
static int32_t given_id(const gate_args *a, int64_t at)
{
  const int64_t id = a->ids_dtype == DT_I64 ? ((const int64_t *)a->given)[at] : ((const int32_t *)a->given)[at];
  return id >= 0 && id < a->experts + a->always ? (int32_t)id : -1;
}

static void choose_slots(const gate_args *a, const token_scores *s, int32_t *id)
{
  bool taken[MAX_EXPERTS] = {false};
  const int32_t chosen = a->top_k - a->always;
  if (a->n_group > 0) close_groups(a, s->choice, taken);
  for (int j = 0; j < a->top_k; j++)
    id[j] = j < chosen ? take_best(s->choice, taken, a->experts) : a->experts + j - chosen;
}

static void store_ids(const gate_args *a, int64_t at, const int32_t *id)
{
  for (int j = 0; j < a->top_k; j++)
    if (a->ids_dtype == DT_I64)
      ((int64_t *)a->ids)[at + j] = id[j];
    else
      ((int32_t *)a->ids)[at + j] = id[j];
}

static void gate_token(const gate_args *a, int64_t token)
{
  token_scores s;
  float weight[MAX_TOP_K];
  int32_t id[MAX_TOP_K];
  load_logits(a, token, &s);
  rank_experts(a, &s);
  if (a->given)
    for (int j = 0; j < a->top_k; j++) id[j] = given_id(a, token * a->ids_ld + j);
  else
    choose_slots(a, &s, id), store_ids(a, token * a->ids_ld, id);
  for (int j = 0; j < a->top_k; j++) weight[j] = slot_weight(a, &s, id[j]);
  if (a->flags & ROUTE_SCORE_AFTER_TOPK) softmax(weight, a->top_k);
  if (a->flags & ROUTE_RENORMALIZE) renormalize(a, weight);
  for (int j = 0; j < a->top_k; j++) {
    weight[j] *= a->routed_scale;
    if (a->expert_scale && weight[j] != 0) weight[j] *= a->expert_scale[id[j]];
    a->weights[token * a->weights_ld + j] = weight[j];
  }
}

void cpu_gate(const void *args, int64_t begin, int64_t end)
{
  const gate_args *a = args;
  int64_t tokens = tokens_present(a->tokens);
  check_token_count(a->tokens, a->fault);
  for (int64_t token = begin; token < end && token < tokens; token++) gate_token(a, token);
}
