/* Attention in double: keys in their order, one pass over them forward; backward makes the scores again. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include "../attention.h"
#include "fault.h"
#include "matrix.h"

/* ---- who sees what ---- */

typedef struct sequence {
  int64_t index, first, queries; /* first: of its queries */
  int64_t key, keys;             /* key: row of the first one, unless they are paged */
} sequence;

static int64_t bad_sequence(const attention_args *a, int64_t index)
{
  record_fault(a->fault, FAULT_SEQUENCE, 0, index);
  return 0;
}

/* Its keys; 0 of them if what is said of them is inconsistent. */
static void find_keys(const attention_args *a, sequence *s)
{
  const int32_t *offsets = a->k_offsets ? a->k_offsets : a->pages.data ? NULL : a->q_offsets;
  const int64_t room = a->pages.data ? (int64_t)a->page_count * a->page : a->keys;
  s->key = offsets ? offsets[s->index] : 0;
  s->keys = a->k_lengths ? a->k_lengths[s->index] : offsets ? offsets[s->index + 1] - s->key : a->keys;
  if (s->key < 0 || s->keys < 0 || s->key > room - s->keys || s->keys > ATTENTION_MOST_KEYS)
    s->keys = bad_sequence(a, s->index);
}

/* Without queries if what is said of them is inconsistent. */
static sequence sequence_of(const attention_args *a, int64_t index)
{
  sequence s = {.index = index, .queries = a->queries};
  if (a->q_offsets) {
    s.first = a->q_offsets[index];
    s.queries = a->q_offsets[index + 1] - s.first;
  }
  if (s.first < 0 || s.queries < 0 || s.first > a->queries - s.queries) s.queries = bad_sequence(a, index);
  find_keys(a, &s);
  return s;
}

/* The first one that has the query; without keys if none has. */
static sequence sequence_with(const attention_args *a, int64_t query)
{
  for (int64_t i = 0; i < a->sequences; i++) {
    const sequence s = sequence_of(a, i);
    if (query >= s.first && query < s.first + s.queries) return s;
  }
  return (sequence){.index = -1};
}

/* Keys begin .. end - 1 of the sequence. */
typedef struct range {
  int64_t begin, end;
} range;

static range keys_seen(const attention_args *a, const sequence *s, int64_t query)
{
  const int64_t at = s->keys - s->queries + (query - s->first);
  const int64_t back = a->window ? at - a->window + 1 : 0;
  const int64_t ahead = a->causal ? at + 1 : a->window ? at + a->window : s->keys;
  return (range){back > 0 ? back : 0, least(ahead, s->keys)};
}

/* Queries begin .. end - 1 (rows) that see key j of the sequence. */
static range queries_seeing(const attention_args *a, const sequence *s, int64_t j)
{
  const int64_t row = s->first + j - (s->keys - s->queries), end = s->first + s->queries; /* row: whose own key it is */
  const int64_t begin = a->causal ? row : a->window ? row - a->window + 1 : s->first;
  return (range){begin > s->first ? begin : s->first, a->window ? least(row + a->window, end) : end};
}

/* -1: there is none. */
static int64_t row_of_key(const attention_args *a, const sequence *s, int64_t j)
{
  if (!a->pages.data) return s->key + j;
  const int64_t page = ((const int32_t *)a->pages.data)[s->index * a->pages.ld + j / a->page];
  const int64_t row = page * a->page + j % a->page;
  if (page >= 0 && row < a->keys) return row;
  (void)bad_sequence(a, s->index);
  return -1;
}

/* ---- scores ---- */

static double dot(const double *a, const double *b, int32_t count)
{
  double sum = 0;
  for (int32_t i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

static void add_scaled(double *to, double factor, const double *from, int32_t count)
{
  for (int32_t i = 0; i < count; i++) to[i] += factor * from[i];
}

static double score(const attention_args *a, const double *q, const double *k)
{
  const double plain = a->scale * dot(q, k, a->head_dim);
  return a->softcap > 0 ? a->softcap * tanh(plain / a->softcap) : plain;
}

/* Of the score, by the one before the cap. */
static double slope(const attention_args *a, double capped)
{
  const double t = a->softcap > 0 ? capped / a->softcap : 0;
  return 1 - t * t;
}

static int32_t kv_head(const attention_args *a, int64_t head)
{
  return (int32_t)(head / (a->heads / a->kv_heads));
}

/* ---- forward ---- */

typedef struct attended {
  double most, sum, out[ATTENTION_MAX_HEAD]; /* sum and out: times exp(-most) */
} attended;

/* A key more; what was there shrinks if its score is the largest yet. */
static void attend(attended *to, double s, const matrix *v, int64_t row, int64_t first, int32_t count)
{
  double value[ATTENTION_MAX_HEAD];
  if (s == -INFINITY) return;
  if (s > to->most) {
    const double smaller = exp(to->most - s);
    to->sum *= smaller;
    for (int32_t i = 0; i < count; i++) to->out[i] *= smaller;
    to->most = s;
  }
  const double weight = exp(s - to->most);
  to->sum += weight;
  get_run(value, v, row, first, count);
  add_scaled(to->out, weight, value, count);
}

static void attend_head(const attention_args *a, int64_t query, int64_t head)
{
  const sequence s = sequence_with(a, query);
  const range seen = keys_seen(a, &s, query);
  const int32_t d = a->head_dim, from = kv_head(a, head) * d;
  const double sink = a->sinks.data && s.index >= 0 ? get(&a->sinks, 0, head) : -INFINITY;
  attended to = {.most = sink, .sum = sink != -INFINITY};
  double q[ATTENTION_MAX_HEAD], k[ATTENTION_MAX_HEAD];
  get_run(q, &a->q, query, head * d, d);
  for (int64_t j = seen.begin; j < seen.end; j++) {
    const int64_t row = row_of_key(a, &s, j);
    if (row < 0) continue;
    get_run(k, &a->k, row, from, d);
    attend(&to, score(a, q, k), &a->v, row, from, d);
  }
  for (int32_t i = 0; i < d; i++) put(&a->out, query, head * d + i, to.sum == 0 ? 0 : to.out[i] / to.sum);
  if (a->lse.data) put(&a->lse, query, head, to.sum == 0 ? -INFINITY : to.most + log(to.sum));
}

void cpu_attention(const void *args, int64_t begin, int64_t end)
{
  const attention_args *a = args;
  for (int64_t i = 0; begin == 0 && i < a->sequences; i++) (void)sequence_of(a, i); /* also those without queries */
  for (int64_t unit = begin; unit < end; unit++) attend_head(a, unit / a->heads, unit % a->heads);
}

/* ---- backward ---- */

/* What a pair of query and key gives: its weight, and the gradient of the score before the cap. */
typedef struct pair_gradient {
  double weight, score;
} pair_gradient;

typedef struct query_head {
  double q[ATTENTION_MAX_HEAD], dout[ATTENTION_MAX_HEAD], lse, delta;
} query_head;

static void load_query(const attention_args *a, query_head *to, int64_t query, int64_t head)
{
  const int32_t d = a->head_dim;
  get_run(to->q, &a->q, query, head * d, d);
  get_run(to->dout, &a->dout, query, head * d, d);
  to->lse = get(&a->lse, query, head);
  to->delta = get(&a->delta, query, head);
}

static pair_gradient gradient_of(const attention_args *a, const query_head *q, const double *k, const double *v)
{
  const double s = score(a, q->q, k), weight = s == -INFINITY || q->lse == -INFINITY ? 0 : exp(s - q->lse);
  if (weight == 0) return (pair_gradient){0, 0};
  return (pair_gradient){weight, weight * (dot(q->dout, v, a->head_dim) - q->delta) * slope(a, s) * a->scale};
}

static void store_delta(const attention_args *a, int64_t query, int64_t head)
{
  double out[ATTENTION_MAX_HEAD], dout[ATTENTION_MAX_HEAD];
  get_run(out, &a->out, query, head * a->head_dim, a->head_dim);
  get_run(dout, &a->dout, query, head * a->head_dim, a->head_dim);
  put(&a->delta, query, head, dot(out, dout, a->head_dim));
}

static void dq_of_head(const attention_args *a, int64_t query, int64_t head)
{
  const sequence s = sequence_with(a, query);
  const range seen = keys_seen(a, &s, query);
  const int32_t d = a->head_dim, from = kv_head(a, head) * d;
  double dq[ATTENTION_MAX_HEAD] = {0}, k[ATTENTION_MAX_HEAD], v[ATTENTION_MAX_HEAD];
  query_head q;
  store_delta(a, query, head);
  load_query(a, &q, query, head);
  for (int64_t j = seen.begin; j < seen.end; j++) {
    get_run(k, &a->k, s.key + j, from, d);
    get_run(v, &a->v, s.key + j, from, d);
    add_scaled(dq, gradient_of(a, &q, k, v).score, k, d);
  }
  put_run(&a->dq, query, head * d, d, dq);
}

void cpu_attention_dq(const void *args, int64_t begin, int64_t end)
{
  const attention_args *a = args;
  for (int64_t unit = begin; unit < end; unit++) dq_of_head(a, unit / a->heads, unit % a->heads);
}

typedef struct key_head {
  double k[ATTENTION_MAX_HEAD], v[ATTENTION_MAX_HEAD], dk[ATTENTION_MAX_HEAD], dv[ATTENTION_MAX_HEAD];
} key_head;

static void add_query(const attention_args *a, key_head *to, int64_t query, int64_t head)
{
  query_head q;
  load_query(a, &q, query, head);
  const pair_gradient g = gradient_of(a, &q, to->k, to->v);
  add_scaled(to->dk, g.score, q.q, a->head_dim);
  add_scaled(to->dv, g.weight, q.dout, a->head_dim);
}

static void dkv_of_head(const attention_args *a, int64_t row, int64_t head)
{
  const int32_t d = a->head_dim, shared_by = a->heads / a->kv_heads;
  key_head to = {.dk = {0}};
  get_run(to.k, &a->k, row, head * d, d);
  get_run(to.v, &a->v, row, head * d, d);
  for (int64_t i = 0; i < a->sequences; i++) {
    const sequence s = sequence_of(a, i);
    if (row < s.key || row >= s.key + s.keys) continue;
    const range by = queries_seeing(a, &s, row - s.key);
    for (int64_t query = by.begin; query < by.end; query++)
      for (int32_t h = 0; h < shared_by; h++) add_query(a, &to, query, head * shared_by + h);
  }
  put_run(&a->dk, row, head * d, d, to.dk);
  put_run(&a->dv, row, head * d, d, to.dv);
}

void cpu_attention_dkv(const void *args, int64_t begin, int64_t end)
{
  const attention_args *a = args;
  for (int64_t unit = begin; unit < end; unit++) dkv_of_head(a, unit / a->kv_heads, unit % a->kv_heads);
}

void cpu_attention_dsinks(const void *args, int64_t begin, int64_t end)
{
  const attention_args *a = args;
  for (int64_t head = begin; head < end; head++) {
    double sum = a->accumulate ? get(&a->dsinks, 0, head) : 0;
    for (int64_t query = 0; query < a->queries; query++) {
      const double lse = get(&a->lse, query, head);
      if (lse != -INFINITY) sum -= exp(get(&a->sinks, 0, head) - lse) * get(&a->delta, query, head);
    }
    put(&a->dsinks, 0, head, sum);
  }
}

/* ---- rotary embedding ---- */

static void turn_head(const rope_args *r, int64_t token, int64_t place, int32_t head)
{
  const int64_t begin = (int64_t)head * r->head_dim, step = r->interleaved ? 2 : 1;
  for (int32_t i = 0; i < r->half; i++) {
    const int64_t at = begin + i * step, other = r->interleaved ? at + 1 : at + r->half;
    const double a = get(&r->x, token, at), b = get(&r->x, token, other), cosine = get(&r->cosine, place, i);
    const double sine = r->backward ? -get(&r->sine, place, i) : get(&r->sine, place, i);
    put(&r->y, token, at, a * cosine - b * sine);
    put(&r->y, token, other, b * cosine + a * sine);
  }
  for (int32_t i = 2 * r->half; i < r->head_dim; i++) put(&r->y, token, begin + i, get(&r->x, token, begin + i));
}

void cpu_rope(const void *args, int64_t begin, int64_t end)
{
  const rope_args *r = args;
  for (int64_t token = begin; token < end; token++) {
    const int64_t place = r->positions.data ? id_at(&r->positions, token) : token;
    const bool inside = place >= 0 && place < r->places;
    if (!inside) record_fault(r->fault, FAULT_SEQUENCE, 0, token);
    for (int32_t head = 0; head < r->heads && inside; head++) turn_head(r, token, place, head);
    for (int64_t c = 0; c < (int64_t)r->heads * r->head_dim && !inside; c++) put(&r->y, token, c, 0);
  }
}
