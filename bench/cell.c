/* A layer and its tokens in device memory, and the calls on them that are timed. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>

const char *const item_names[ITEM_COUNT] = {"layer", "router",  "gate",  "map",    "up",
                                            "down",  "combine", "dense", "grouped"};

/* ---- memory ---- */

cumoe_status take(bench *b, store *s, cumoe_dtype dtype, int64_t rows, int64_t cols, cumoe_view_mut *view)
{
  if (s->count == MAX_BUFFERS) return CUMOE_ERR_OUT_OF_MEMORY;
  TRY(cumoe_buffer_alloc(b->context, dtype, rows, cols, b->stream, &s->buffers[s->count]));
  *view = cumoe_buffer_view_mut(s->buffers[s->count++]);
  return CUMOE_OK;
}

void store_free(store *s)
{
  while (s->count > 0) (void)cumoe_buffer_free(&s->buffers[--s->count]);
}

/* ---- random data ---- */

uint64_t random_bits(uint64_t *state) /* splitmix64 */
{
  uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
  return z ^ z >> 31;
}

static double random_unit(uint64_t *state) /* in (0, 1) */
{
  return ((double)(random_bits(state) >> 12) + 0.5) * 0x1p-52;
}

double random_normal(uint64_t *state)
{
  return sqrt(-2 * log(random_unit(state))) * cos(6.283185307179586 * random_unit(state));
}

/* Of which data of a type are made: an f32 is filled with two bf16, of which the upper one is nearly its value. */
static cumoe_dtype noise_type(cumoe_dtype dtype)
{
  return dtype == CUMOE_F16 ? CUMOE_F16 : CUMOE_BF16;
}

/* Truncated to the 16-bit type: these are data, only their distribution matters. */
static uint16_t narrow(float f, cumoe_dtype dtype)
{
  union {
    float f;
    uint32_t u;
  } v = {f};
  if (dtype == CUMOE_BF16) return (uint16_t)(v.u >> 16);
  const uint32_t sign = v.u >> 16 & 0x8000, exponent = v.u >> 23 & 0xff;
  if (exponent < 113) return (uint16_t)sign; /* below 2^-14: zero */
  return (uint16_t)(sign | (exponent - 112) << 10 | (v.u >> 13 & 0x3ff));
}

enum { TABLE = 1 << 16 };

/* Drawing from a table of normal numbers fills 256 MiB in a fraction of a second. */
static cumoe_status upload_noise(bench *b, uint16_t *host, int64_t count, double deviation, noise *n)
{
  static uint16_t table[TABLE];
  const cumoe_dtype dtype = noise_type(b->o.dtype);
  cumoe_view_mut block;
  for (int32_t i = 0; i < TABLE; ++i) table[i] = narrow((float)(deviation * random_normal(&b->seed)), dtype);
  for (int64_t i = 0; i + 4 <= count; i += 4) {
    const uint64_t bits = random_bits(&b->seed);
    for (int32_t j = 0; j < 4; ++j) host[i + j] = table[bits >> 16 * j & (TABLE - 1)];
  }
  TRY(take(b, &b->store, CUMOE_U8, 1, count * 2, &block));
  TRY(cumoe_copy_from_host(b->context, block, host, (size_t)count * 2, b->stream));
  *n = (noise){cumoe_const(block), 0};
  return cumoe_synchronize(b->context, b->stream);
}

/*
 * The blocks' lengths are 8 times a prime: pieces stay aligned to 16 bytes, and no stride of a weight divides
 * them, so that no two experts get the same numbers.
 */
cumoe_status make_noise(bench *b)
{
  const bool cpu = b->device.device == CUMOE_DEVICE_CPU;
  const int64_t small = cpu ? 8 * 131071LL : 8 * 16777213LL, unit = cpu ? 8 * 65521LL : 8 * 8388593LL;
  uint16_t *host = malloc((size_t)small * 2);
  if (!host) return CUMOE_ERR_OUT_OF_MEMORY;
  cumoe_status status = upload_noise(b, host, small, 0.02, &b->small);
  if (status == CUMOE_OK) status = upload_noise(b, host, unit, 1, &b->unit);
  free(host);
  return status;
}

cumoe_status fill_noise(bench *b, cumoe_view_mut dst, noise *from)
{
  const int64_t count = dst.rows * dst.cols * (int64_t)cumoe_dtype_bytes((cumoe_dtype)dst.dtype);
  const int64_t length = from->block.cols;
  cumoe_view_mut flat = dst;
  flat.dtype = CUMOE_U8;
  flat.rows = 1;
  flat.cols = flat.ld = count;
  for (int64_t done = 0; done < count;) {
    const int64_t left = length - from->at, piece = count - done < left ? count - done : left;
    cumoe_view source;
    cumoe_view_mut target;
    TRY(cumoe_view_cols(from->block, from->at, piece, &source));
    TRY(cumoe_view_cols_mut(flat, done, piece, &target));
    TRY(cumoe_copy(b->context, target, source, b->stream));
    done += piece;
    from->at = (from->at + piece) % length;
  }
  return CUMOE_OK;
}

/* Noisy popularity: the k best of log(p) + Gumbel noise is a draw of k experts by p, p ~ 1 / rank^exponent. */
static cumoe_status upload_logits(bench *b, cumoe_view_mut logits, double exponent)
{
  const int64_t count = logits.rows * logits.cols;
  float *host = malloc((size_t)count * sizeof *host);
  if (!host) return CUMOE_ERR_OUT_OF_MEMORY;
  for (int64_t i = 0; i < count; ++i)
    host[i] = (float)(-exponent * log((double)(i % logits.cols + 1)) - log(-log(random_unit(&b->seed))));
  cumoe_status status = cumoe_copy_from_host(b->context, logits, host, (size_t)count * sizeof *host, b->stream);
  if (status == CUMOE_OK) status = cumoe_synchronize(b->context, b->stream);
  free(host);
  return status;
}

/* All pairs to one expert, another one for each input. */
static cumoe_status upload_one(cell *c, int32_t input)
{
  bench *b = c->bench;
  const int32_t expert = input * (c->model->shape->experts / c->inputs);
  int32_t *ids = malloc((size_t)c->rows * sizeof *ids);
  float *weights = malloc((size_t)c->rows * sizeof *weights);
  cumoe_status status = ids && weights ? CUMOE_OK : CUMOE_ERR_OUT_OF_MEMORY;
  for (int64_t i = 0; i < c->rows && status == CUMOE_OK; ++i) {
    ids[i] = expert;
    weights[i] = 1 / (float)c->model->shape->top_k;
  }
  const size_t bytes = (size_t)c->rows * 4;
  if (status == CUMOE_OK) status = cumoe_copy_from_host(b->context, c->ids[input], ids, bytes, b->stream);
  if (status == CUMOE_OK) status = cumoe_copy_from_host(b->context, c->weights[input], weights, bytes, b->stream);
  if (status == CUMOE_OK) status = cumoe_synchronize(b->context, b->stream);
  free(ids);
  free(weights);
  return status;
}

/* ---- layer ---- */

static cumoe_status upload_select_bias(bench *b, model *m)
{
  float host[CUMOE_MAX_EXPERTS];
  cumoe_view_mut bias;
  for (int32_t e = 0; e < m->shape->experts; ++e) host[e] = (float)(0.01 * random_normal(&b->seed));
  TRY(take(b, &m->store, CUMOE_F32, 1, m->shape->experts, &bias));
  TRY(cumoe_copy_from_host(b->context, bias, host, (size_t)m->shape->experts * sizeof *host, b->stream));
  m->select_bias = cumoe_const(bias);
  return cumoe_synchronize(b->context, b->stream);
}

/* The same bytes as a matrix of the other shape. */
static void turn(cumoe_view *v)
{
  const int64_t rows = v->rows;
  v->rows = v->cols;
  v->cols = v->ld = rows;
}

static cumoe_status bind_weights(bench *b, model *m)
{
  const shape *s = m->shape;
  cumoe_weights_desc d = {.size = sizeof d, .experts = s->experts, .hidden = s->hidden, .inter = s->inter};
  d.gate_order = CUMOE_GATE_UP_CONCAT;
  d.up_major = d.down_major = b->o.in_out ? CUMOE_IN_OUT : CUMOE_OUT_IN;
  d.up_format = d.down_format = m->kind->format;
  d.dtype = b->o.dtype;
  TRY(projection_describe(m, &m->gate_up, &d.gate_up));
  TRY(projection_describe(m, &m->down, &d.down));
  if (b->o.in_out) {
    turn(&d.gate_up.data);
    turn(&d.down.data);
  }
  return cumoe_weights_bind(b->context, &d, &m->weights);
}

/* Random numbers begin anew: tokens go to the same experts whatever the weights are. */
static void begin_random(bench *b)
{
  b->small.at = b->unit.at = 0;
  b->seed = 1;
}

cumoe_status model_create(bench *b, const shape *s, const kind *k, model *m)
{
  const int64_t inter = s->inter, hidden = s->hidden;
  cumoe_view_mut router;
  *m = (model){.shape = s, .kind = k};
  m->desc = (cumoe_moe_desc){.size = sizeof m->desc,
                             .num_experts = s->experts,
                             .hidden = s->hidden,
                             .inter = s->inter,
                             .dtype = b->o.dtype,
                             .flags = b->o.invariant ? CUMOE_MOE_BATCH_INVARIANT : 0,
                             .routing = s->routing,
                             .up_format = m->kind->format,
                             .down_format = m->kind->format};
  m->gate_up = (projection){.out = 2 * inter, .in = hidden, .halves = 2};
  m->down = (projection){.out = hidden, .in = inter, .halves = 1};
  begin_random(b);
  TRY(cumoe_plan_create(b->context, &m->desc, &m->plan));
  TRY(take(b, &m->store, b->o.router ? b->o.router : b->o.dtype, s->experts, hidden, &router));
  TRY(fill_noise(b, router, &b->small));
  m->router = cumoe_const(router);
  if (s->routing.score == CUMOE_SCORE_SIGMOID && b->o.zipf <= 0 && !b->o.one) TRY(upload_select_bias(b, m));
  TRY(projection_create(b, m, &m->gate_up));
  TRY(projection_create(b, m, &m->down));
  return bind_weights(b, m);
}

void model_destroy(model *m)
{
  (void)cumoe_weights_destroy(m->weights);
  (void)cumoe_plan_destroy(m->plan);
  store_free(&m->store);
}

/* ---- cell ---- */

static cumoe_status create_input(cell *c, int32_t i)
{
  bench *b = c->bench;
  const shape *s = c->model->shape;
  cumoe_route *r = &c->route[i];
  cumoe_view_mut x;
  r->size = sizeof *r;
  TRY(take(b, &c->store, b->o.dtype, c->tokens, s->hidden, &x));
  TRY(take(b, &c->store, CUMOE_F32, c->tokens, s->experts, &c->logits[i]));
  TRY(take(b, &c->store, CUMOE_I32, c->tokens, s->top_k, &c->ids[i]));
  TRY(take(b, &c->store, CUMOE_F32, c->tokens, s->top_k, &c->weights[i]));
  TRY(take(b, &c->store, CUMOE_I32, 1, s->experts, &c->counts[i]));
  TRY(take(b, &c->store, CUMOE_I32, 1, s->experts, &r->counts));
  TRY(take(b, &c->store, CUMOE_I32, 1, s->experts + 1, &r->offsets));
  TRY(take(b, &c->store, CUMOE_I32, 1, c->rows, &r->row_pair));
  TRY(take(b, &c->store, CUMOE_I32, c->tokens, s->top_k, &r->slot_row));
  TRY(fill_noise(b, x, &b->unit));
  c->x[i] = cumoe_const(x);
  switch (c->spread) {
  case SPREAD_even: return upload_logits(b, c->logits[i], 0);
  case SPREAD_zipf: return upload_logits(b, c->logits[i], b->o.zipf);
  case SPREAD_one: return upload_one(c, i);
  default: return CUMOE_OK;
  }
}

/* Rows spread evenly; other inputs begin with other experts. */
static cumoe_status upload_masked_counts(cell *c, int32_t input)
{
  bench *b = c->bench;
  const int64_t experts = c->model->shape->experts;
  int32_t counts[CUMOE_MAX_EXPERTS];
  cumoe_view_mut to;
  for (int64_t e = 0; e < experts; ++e)
    counts[(e + input * c->rows) % experts] = (int32_t)(c->rows / experts + (e < c->rows % experts));
  TRY(take(b, &c->store, CUMOE_I32, 1, experts, &to));
  c->masked_counts[input] = cumoe_const(to);
  TRY(cumoe_copy_from_host(b->context, to, counts, (size_t)experts * sizeof *counts, b->stream));
  return cumoe_synchronize(b->context, b->stream);
}

static cumoe_status create_masked(cell *c)
{
  enum { ROOM = 4 };
  bench *b = c->bench;
  const shape *s = c->model->shape;
  const int64_t each = (c->rows + s->experts - 1) / s->experts, capacity = ROOM * each;
  int32_t host[CUMOE_MAX_EXPERTS + 1];
  cumoe_view_mut x, offsets;
  size_t bytes;
  for (int32_t e = 0; e <= s->experts; ++e) host[e] = (int32_t)(e * capacity);
  c->masked = (cumoe_masked_args){.size = sizeof c->masked, .capacity = capacity, .expected_rows = each};
  TRY(cumoe_masked_workspace(c->model->plan, capacity, &bytes));
  TRY(take(b, &c->store, b->o.dtype, s->experts * capacity, s->hidden, &x));
  TRY(take(b, &c->store, b->o.dtype, s->experts * capacity, s->hidden, &c->masked.out));
  TRY(take(b, &c->store, CUMOE_I32, 1, s->experts + 1, &offsets));
  TRY(take(b, &c->store, CUMOE_U8, 1, (int64_t)bytes, &c->masked.workspace));
  TRY(fill_noise(b, x, &b->unit));
  c->masked.x = cumoe_const(x);
  c->masked.offsets = cumoe_const(offsets);
  TRY(cumoe_copy_from_host(b->context, offsets, host, (size_t)(s->experts + 1) * sizeof *host, b->stream));
  for (int32_t i = 0; i < c->inputs; ++i) TRY(upload_masked_counts(c, i));
  return cumoe_synchronize(b->context, b->stream);
}

/* Weights of up to 512 tokens may stay in L2 from one call to the next if all have the same routing; more
 * tokens reach all experts, whose weights do not fit. */
static int32_t inputs_for(int64_t tokens)
{
  return tokens <= 512 ? MAX_INPUTS : 2;
}

cumoe_status cell_create(bench *b, model *m, int64_t tokens, spread how, cell *c)
{
  const shape *s = m->shape;
  size_t bytes, map_bytes;
  begin_random(b);
  *c = (cell){
      .bench = b, .model = m, .spread = how, .tokens = tokens, .rows = tokens * s->top_k, .inputs = inputs_for(tokens)};
  c->host_counts = calloc((size_t)c->inputs * (size_t)s->experts, sizeof *c->host_counts);
  if (!c->host_counts) return CUMOE_ERR_OUT_OF_MEMORY;
  TRY(cumoe_plan_workspace(m->plan, tokens, &bytes));
  TRY(cumoe_map_workspace(m->plan, tokens, &map_bytes));
  TRY(take(b, &c->store, CUMOE_U8, 1, (int64_t)bytes, &c->workspace));
  TRY(take(b, &c->store, CUMOE_U8, 1, (int64_t)map_bytes, &c->map_workspace));
  TRY(take(b, &c->store, b->o.dtype, c->rows, s->inter, &c->h));
  TRY(take(b, &c->store, b->o.dtype, c->rows, s->hidden, &c->y));
  TRY(take(b, &c->store, b->o.dtype, tokens, s->hidden, &c->out));
  for (int32_t i = 0; i < c->inputs; ++i) TRY(create_input(c, i));
  if (b->o.masked) TRY(create_masked(c));
  return CUMOE_OK;
}

void cell_destroy(cell *c)
{
  store_free(&c->store);
  free(c->host_counts);
}

/* ---- calls ---- */

cumoe_status cell_forward(cell *c, int32_t i, bool report, cumoe_stream stream)
{
  const model *m = c->model;
  cumoe_moe_args a = {
      .size = sizeof a, .x = c->x[i], .select_bias = m->select_bias, .out = c->out, .workspace = c->workspace};
  if (c->spread == SPREAD_one) {
    a.ids = cumoe_const(c->ids[i]);
    a.weights = cumoe_const(c->weights[i]);
  } else if (c->spread == SPREAD_router) {
    a.router_weight = m->router;
  } else {
    a.logits = cumoe_const(c->logits[i]);
  }
  if (report && c->spread != SPREAD_one) {
    a.ids_out = c->ids[i];
    a.weights_out = c->weights[i];
  }
  if (report) a.counts_out = c->counts[i];
  return cumoe_moe_forward(m->plan, m->weights, &a, stream);
}

static cumoe_status call_layer(void *user, int32_t i, cumoe_stream stream)
{
  return cell_forward(user, i, false, stream);
}

static cumoe_status call_masked(void *user, int32_t i, cumoe_stream stream)
{
  cell *c = user;
  cumoe_masked_args a = c->masked;
  a.counts = c->masked_counts[i];
  return cumoe_masked_forward(c->model->plan, c->model->weights, &a, stream);
}

static cumoe_status call_router(void *user, int32_t i, cumoe_stream stream)
{
  cell *c = user;
  return cumoe_router(c->bench->context, c->x[i], c->model->router, (cumoe_view){0}, c->logits[i], stream);
}

static cumoe_status call_gate(void *user, int32_t i, cumoe_stream stream)
{
  cell *c = user;
  return cumoe_gate(c->bench->context, &c->model->shape->routing, cumoe_const(c->logits[i]), c->model->select_bias,
                    c->ids[i], c->weights[i], stream);
}

static cumoe_status call_map(void *user, int32_t i, cumoe_stream stream)
{
  cell *c = user;
  return cumoe_map(c->model->plan, cumoe_const(c->ids[i]), (cumoe_view){0}, &c->route[i], c->map_workspace, stream);
}

static cumoe_status call_up(void *user, int32_t i, cumoe_stream stream)
{
  cell *c = user;
  return cumoe_up(c->model->plan, c->model->weights, c->x[i], &c->route[i], (cumoe_view){0}, c->h, stream);
}

static cumoe_status call_down(void *user, int32_t i, cumoe_stream stream)
{
  cell *c = user;
  return cumoe_down(c->model->plan, c->model->weights, cumoe_const(c->h), &c->route[i], c->y, stream);
}

static cumoe_status call_combine(void *user, int32_t i, cumoe_stream stream)
{
  cell *c = user;
  const cumoe_combine_args a = {
      .size = sizeof a, .y = cumoe_const(c->y), .pair_weights = cumoe_const(c->weights[i]), .out = c->out};
  return cumoe_combine(c->model->plan, &c->route[i], &a, stream);
}

/* In the order of the data: timing a stage leaves what the next one reads. Up and down alone make no codes of what they
 * read. */
void cell_works(cell *c, work works[ITEM_COUNT])
{
  const bool alone = !kind_has_codes_of_rows(c->model->kind);
  works[ITEM_layer] = (work){c->bench->o.masked ? call_masked : call_layer, c, false};
  if (c->spread == SPREAD_router) works[ITEM_router] = (work){call_router, c, false};
  if (c->spread != SPREAD_one) works[ITEM_gate] = (work){call_gate, c, false};
  works[ITEM_map] = (work){call_map, c, false};
  if (alone) works[ITEM_up] = (work){call_up, c, false};
  if (alone) works[ITEM_down] = (work){call_down, c, false};
  works[ITEM_combine] = (work){call_combine, c, false};
}
