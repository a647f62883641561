/*
 * From d weights to d logits (kernels/cpu/backward_gate.c), in double. A CTA has a token: thread e % THREADS has column
 * e of its logits, and lane j has slot j, in every warp alike: all warps compute the same of slots. Of few columns the
 * CTA is a warp: one step of a token waits for another, so many tokens have to be under way.
 */
#ifndef CUMOE_BACKWARD_GATE_CUH
#define CUMOE_BACKWARD_GATE_CUH

#include <float.h>

#include "backward/tokens.cuh"
#include "score.h"
#include "train/sums.cuh"

struct gate_token {
  double *logit;   /* capped; -Inf: none */
  double *score;   /* softmax over all, or each logit's own score */
  double *d_logit; /* of the capped logits */
  float *raw;      /* as given, at most FLT_MAX */
};
template <int COLUMNS> struct gate_room {
  double logit[COLUMNS], score[COLUMNS], d_logit[COLUMNS];
  float raw[COLUMNS];
};

/* Of slot lane_id(). */
struct gate_slot {
  int id; /* -1: it weighs 0 */
  double score, d;
};

DEVICE int columns_of(const gate_args &g)
{
  return g.experts + g.always;
}

DEVICE int id_of_slot(const gate_args &g, int64_t at)
{
  const int64_t id =
      g.ids_dtype == DT_I64 ? static_cast<const int64_t *>(g.given)[at] : static_cast<const int32_t *>(g.given)[at];
  return id >= 0 && id < columns_of(g) ? (int)id : -1;
}

template <int THREADS> DEVICE void load_token(const gate_args &g, int64_t token, gate_token &t, gate_slot &slot)
{
  const double cap = (double)g.softcap;
  for (int e = threadIdx.x; e < columns_of(g); e += THREADS) {
    const float l = fminf(load_any(g.logits, token * g.logits_ld + e, g.logits_dtype), FLT_MAX);
    const float raw = load_any(g.logits, token * g.logits_ld + e, g.logits_dtype);
    t.raw[e] = raw == raw ? l : raw;
    t.logit[e] = !(raw > -INFINITY) ? (double)-INFINITY : cap > 0 ? cap * tanh((double)l / cap) : (double)l;
    t.d_logit[e] = 0;
  }
  __syncthreads();
  const int id = lane_id() < g.top_k ? id_of_slot(g, token * g.ids_ld + lane_id()) : -1;
  slot.id = id >= 0 && t.logit[id] > (double)-INFINITY ? id : -1;
}

/* Of the soft cap, at the logit that was given: 0 where that is -Inf, NaN or more than FLT_MAX. */
DEVICE double slope_of_cap(const gate_args &g, int64_t token, int e)
{
  const float given = load_any(g.logits, token * g.logits_ld + e, g.logits_dtype);
  const double cap = (double)g.softcap;
  if (!(given > -INFINITY) || given > FLT_MAX) return 0;
  const double bent = cap > 0 ? tanh((double)given / cap) : 0.;
  return 1 - bent * bent;
}

/* t.score becomes the softmax of the first `count` logits. Returns log(sum of exp(logit)): -Inf where no logit is
 * finite, and then all scores are 0. */
template <int THREADS> DEVICE double softmax_of_token(gate_token &t, int count)
{
  double most = -INFINITY, sum = 0;
  for (int e = threadIdx.x; e < count; e += THREADS) most = fmax(most, t.logit[e]);
  most = cta_max<THREADS>(most);
  for (int e = threadIdx.x; e < count; e += THREADS) {
    t.score[e] = t.logit[e] > (double)-INFINITY ? exp(t.logit[e] - most) : 0.;
    sum += t.score[e];
  }
  sum = cta_sum<THREADS>(sum);
  for (int e = threadIdx.x; e < count && sum > 0; e += THREADS) t.score[e] /= sum;
  __syncthreads();
  return most + log(sum);
}

struct scored {
  double value, slope;
};

DEVICE scored score_alone(int score, double l)
{
  const double s = 1 / (1 + exp(-l));
  if (score == SCORE_SIGMOID) return {s, s * (1 - s)};
  if (score != SCORE_SQRT_SOFTPLUS) return {l, 1};
  const double root = sqrt(l > 0 ? l + log1p(exp(-l)) : log1p(exp(l)));
  return {root, root > 0 ? s / (2 * root) : 0.};
}

DEVICE bool is_alone(int score)
{
  return score == SCORE_SIGMOID || score == SCORE_SQRT_SOFTPLUS || score == SCORE_IDENTITY;
}

/* ---- the scores of the slots, and back ---- */

/* SCORE_SPARSEMIXER: whether expert e is in the softmax that weighs a slot's expert `id`. */
DEVICE bool is_mixed(const gate_args &g, const gate_token &t, int id, int e)
{
  const float raw = t.raw[id], other = t.raw[e];
  const bool left = other < raw || (other == raw && e >= id);
  return left && t.logit[e] > (double)-INFINITY &&
         mixes(g.mixer_eps, exact_cap(g.softcap, raw), exact_cap(g.softcap, other));
}

/* That softmax, at id. Every warp computes it. */
DEVICE double mixed_weight(const gate_args &g, const gate_token &t, int id)
{
  double sum = 0;
  for (int e = lane_id(); e < g.experts; e += WARP_SIZE)
    if (is_mixed(g, t, id, e)) sum += exp(t.logit[e] - t.logit[id]);
  return 1 / warp_sum(sum);
}

DEVICE double softmax_of_slots(double logit)
{
  double most = logit;
  for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) most = fmax(most, __shfl_xor_sync(ALL_LANES, most, mask));
  const double part = logit > (double)-INFINITY ? exp(logit - most) : 0., sum = warp_sum(part);
  return sum > 0 ? part / sum : 0.;
}

template <int THREADS> DEVICE void score_slots(const gate_args &g, gate_token &t, gate_slot &s)
{
  if (GATE_SOFTMAX_OVER_ALL(g)) (void)softmax_of_token<THREADS>(t, g.experts);
  s.score = 0;
  if (g.flags & ROUTE_SCORE_AFTER_TOPK) {
    s.score = softmax_of_slots(s.id < 0 ? (double)-INFINITY : t.logit[s.id]);
  } else if (g.weigh == SCORE_SPARSEMIXER) {
    for (int j = 0; j < g.top_k; j++) {
      const int id = __shfl_sync(ALL_LANES, s.id, j);
      const double weight = id < 0 ? 0. : mixed_weight(g, t, id);
      if (j == lane_id()) s.score = weight;
    }
  } else if (s.id >= 0) {
    s.score = is_alone(g.weigh) ? score_alone(g.weigh, t.logit[s.id]).value : t.score[s.id];
  }
}

DEVICE bool mixes_slots(const gate_args &g)
{
  return g.weigh == SCORE_SPARSEMIXER && !(g.flags & ROUTE_SCORE_AFTER_TOPK);
}

/* What a slot adds to t.d_logit in its expert's column. mean: sum of w d over slots, which the slope of a softmax
 * needs. */
DEVICE double own_gradient(const gate_args &g, const gate_token &t, const gate_slot &s, double mean)
{
  if (g.flags & ROUTE_SCORE_AFTER_TOPK) return s.score * (s.d - mean);
  if (GATE_SOFTMAX_OVER_ALL(g) || mixes_slots(g)) return s.score * s.d;
  return s.d * score_alone(g.weigh, t.logit[s.id]).slope;
}

/* mixes_slots: slot by slot, each thread in its columns, for a slot's softmax has others. */
template <int THREADS> DEVICE void add_mixed_slots(const gate_args &g, gate_token &t, const gate_slot &s, double own)
{
  for (int j = 0; j < g.top_k; j++) {
    const int id = __shfl_sync(ALL_LANES, s.id, j);
    const double w = __shfl_sync(ALL_LANES, s.score, j), d = __shfl_sync(ALL_LANES, s.d, j),
                 sum = __shfl_sync(ALL_LANES, own, j);
    if (id < 0) continue;
    for (int e = threadIdx.x; e < g.experts; e += THREADS)
      if (is_mixed(g, t, id, e)) t.d_logit[e] -= d * w * w * exp(t.logit[e] - t.logit[id]);
    if (id % THREADS == (int)threadIdx.x) t.d_logit[id] += sum;
  }
}

/* All slots at once; those of one expert in their order. By one warp. */
DEVICE void add_own(gate_token &t, int id, double own)
{
  const unsigned same = __match_any_sync(ALL_LANES, id);
  const int before = id < 0 ? -1 : __popc(same & ((1u << lane_id()) - 1));
  for (int turn = 0; __any_sync(ALL_LANES, before >= turn); turn++) {
    if (before == turn) t.d_logit[id] += own;
    __syncwarp();
  }
}

template <int THREADS> DEVICE void gradient_of_scores(const gate_args &g, gate_token &t, const gate_slot &s)
{
  const double mean = warp_sum(s.d * s.score); /* weighed by the softmax */
  const double own = s.id < 0 ? 0. : own_gradient(g, t, s, mean);
  if (mixes_slots(g)) return add_mixed_slots<THREADS>(g, t, s, own);
  if (warp_id() == 0) add_own(t, s.id, own);
  __syncthreads();
  for (int e = threadIdx.x; e < g.experts && GATE_SOFTMAX_OVER_ALL(g); e += THREADS) t.d_logit[e] -= t.score[e] * mean;
}

/* ---- what becomes of the scores ---- */

/* Returns the weight, score / divisor; s.d, of the weight, becomes that of the score. */
DEVICE double renormalize(const gate_args &g, gate_slot &s)
{
  const double sum = warp_sum(s.score);
  const bool by_sum = sum + (double)g.renorm_eps >= (double)g.renorm_min;
  const double divisor = by_sum ? sum + (double)g.renorm_eps : (double)g.renorm_min;
  const double weight = divisor > 0 ? s.score / divisor : 0., inner = by_sum ? warp_sum(s.d * weight) : 0.;
  s.d = divisor > 0 ? (s.d - inner) / divisor : 0.;
  return weight;
}

template <int THREADS>
DEVICE void gradient_of_weights(const gate_backward_args &a, int64_t token, gate_token &t, gate_slot &s)
{
  const gate_args &g = a.g;
  const bool there = lane_id() < g.top_k;
  score_slots<THREADS>(g, t, s);
  const double scale = (double)g.routed_scale * (s.id >= 0 && g.expert_scale ? (double)g.expert_scale[s.id] : 1.);
  const double given = s.id < 0 ? 0. : (double)a.d_weights[token * a.d_weights_ld + lane_id()];
  s.d = given * scale;
  const double weight = g.flags & ROUTE_RENORMALIZE ? renormalize(g, s) : s.score;
  if (a.pair_scale && there && warp_id() == 0)
    a.pair_scale[token * g.top_k + lane_id()] = given * (double)g.routed_scale * weight;
  if (s.id < 0) s.d = 0;
  gradient_of_scores<THREADS>(g, t, s);
}

/* ---- losses ---- */

/* The balance loss is of p over the experts that are chosen among: the softmax, or each one's score over the sum of
 * all. Returns the token's part of the loss. */
template <int THREADS> DEVICE double gradient_of_balance(const gate_backward_args &a, gate_token &t, double tokens)
{
  const gate_args &g = a.g;
  const bool alone = is_alone(g.weigh) && g.weigh != SCORE_IDENTITY;
  double all = 0, sum = 0, mean = 0;
  __syncthreads();
  if (!alone) (void)softmax_of_token<THREADS>(t, g.experts);
  for (int e = threadIdx.x; e < g.experts; e += THREADS) {
    all += (double)a.count[e];
    if (!alone) continue;
    t.score[e] = t.logit[e] > (double)-INFINITY ? score_alone(g.weigh, t.logit[e]).value : 0.;
    sum += t.score[e];
  }
  all = cta_sum<THREADS>(all);
  sum = alone ? cta_sum<THREADS>(sum) : 1.;
  for (int e = threadIdx.x; e < g.experts; e += THREADS) {
    if (alone) t.score[e] = sum > 0 ? t.score[e] / sum : 0.;
    mean += (all > 0 ? (double)a.count[e] / all : 0.) * t.score[e];
  }
  mean = cta_sum<THREADS>(mean);
  const double factor = (double)a.balance * g.experts / tokens;
  for (int e = threadIdx.x; e < g.experts; e += THREADS) {
    if (!(t.logit[e] > (double)-INFINITY) || !(sum > 0)) continue;
    const double slope = alone ? score_alone(g.weigh, t.logit[e]).slope / sum : t.score[e];
    t.d_logit[e] += factor * slope * ((all > 0 ? (double)a.count[e] / all : 0.) - mean);
  }
  return factor * mean;
}

template <int THREADS> DEVICE double gradient_of_z(const gate_backward_args &a, gate_token &t, double tokens)
{
  const int columns = columns_of(a.g);
  __syncthreads();
  const double log_sum = softmax_of_token<THREADS>(t, columns), factor = (double)a.z / tokens;
  if (!(log_sum > (double)-INFINITY)) return 0;
  for (int e = threadIdx.x; e < columns; e += THREADS) t.d_logit[e] += 2 * factor * log_sum * t.score[e];
  return factor * log_sum * log_sum;
}

/* ---- kernels ---- */

template <int THREADS> DEVICE void any_gate_count(const gate_backward_args &a)
{
  const int64_t pairs = token_total(a.g.tokens) * a.g.top_k;
  double count = 0;
  for (int64_t i = threadIdx.x; i < pairs; i += THREADS)
    count += id_of_slot(a.g, i / a.g.top_k * a.g.ids_ld + i % a.g.top_k) == (int)blockIdx.x;
  count = cta_sum<THREADS>(count);
  if (threadIdx.x == 0) a.count[blockIdx.x] = (int64_t)count;
}

DEVICE void store_parts(const gate_backward_args &a, int64_t token, int e, float d_logit)
{
  const int columns = columns_of(a.g);
  bf16 *to = static_cast<bf16 *>(a.parts) + token * 2 * columns + e;
  const float scaled = a.parts_scale * d_logit;
  to[0] = from_f32<bf16>(scaled);
  to[columns] = from_f32<bf16>(scaled - to_f32(to[0]));
}

template <int THREADS, int COLUMNS> DEVICE void any_gate_backward(const gate_backward_args &a)
{
  __shared__ gate_room<COLUMNS ? COLUMNS : MAX_EXPERTS> room;
  gate_token t = {room.logit, room.score, room.d_logit, room.raw};
  const int64_t token = blockIdx.x, tokens = token_total(a.g.tokens);
  gate_slot slot = {-1, 0, 0};
  double loss[2] = {0, 0};
  check_token_count(a.g.tokens, a.g.fault);
  if (token >= tokens) return;
  if (a.has_pairs && warp_id() == 0) gradient_of_pairs(a.pairs, token * a.g.top_k + lane_id(), lane_id() < a.g.top_k);
  load_token<THREADS>(a.g, token, t, slot); /* a barrier */
  if (a.d_weights) gradient_of_weights<THREADS>(a, token, t, slot);
  if (a.balance != 0) loss[0] = gradient_of_balance<THREADS>(a, t, (double)tokens);
  if (a.z != 0) loss[1] = gradient_of_z<THREADS>(a, t, (double)tokens);
  if (a.token_loss && threadIdx.x < 2) a.token_loss[2 * token + threadIdx.x] = threadIdx.x ? loss[1] : loss[0];
  for (int e = threadIdx.x; e < columns_of(a.g); e += THREADS) {
    const double slope = slope_of_cap(a.g, token, e);
    const float d_logit = slope == 0 ? 0.f : (float)(t.d_logit[e] * slope);
    a.d_logits[token * a.d_logits_ld + e] = d_logit;
    if (a.parts) store_parts(a, token, e, d_logit);
  }
}

template <int THREADS> DEVICE void any_gate_scale(const gate_backward_args &a)
{
  const int64_t pairs = token_total(a.g.tokens) * a.g.top_k;
  double sum = 0, count = 0;
  for (int64_t i = threadIdx.x; i < pairs; i += THREADS) {
    if (id_of_slot(a.g, i / a.g.top_k * a.g.ids_ld + i % a.g.top_k) != (int)blockIdx.x) continue;
    sum += a.pair_scale[i];
    count++;
  }
  sum = cta_sum<THREADS>(sum);
  count = cta_sum<THREADS>(count);
  if (threadIdx.x != 0 || (a.accumulates && count == 0)) return;
  float *to = a.d_expert_scale + blockIdx.x;
  *to = (float)((a.accumulates ? (double)*to : 0.) + sum);
}

template <int THREADS> DEVICE void any_gate_loss(const gate_backward_args &a)
{
  const int64_t tokens = token_total(a.g.tokens);
  for (int i = 0; i < 2; i++) {
    double sum = 0;
    for (int64_t token = threadIdx.x; token < tokens; token += THREADS) sum += a.token_loss[2 * token + i];
    sum = cta_sum<THREADS>(sum);
    if (threadIdx.x == 0) a.losses[i] = (float)sum;
  }
}

#endif
