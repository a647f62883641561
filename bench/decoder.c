#include "decoder.h"
#include "safetensors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUT_NORM, Q, K, V, O, Q_NORM, K_NORM, POST_NORM, ROUTER, GATE, UP, DOWN, OF_LAYER };
enum { VECTORS = DECODER_GRADIENTS + 1 };

/* What a layer keeps from forward for backward. */
typedef struct layer {
  cumoe_weights experts, d_experts;
  cumoe_view_mut x, normed, q_plain, k_plain, q, k, v, mix, lse, middle, middle_normed, kept; /* plain: not normed */
} layer;

/* Steps whose inputs may wait for the device. */
enum { AHEAD = 4 };

struct decoder {
  decoder_config c;
  cumoe_context context;
  cumoe_stream stream; /* of all work; NULL on the CPU device, as the graph is */
  cumoe_graph graph;   /* a step of decoder_train, from `inputs` to `loss` */
  cumoe_event taken[AHEAD];
  int32_t *waiting[AHEAD]; /* pinned: the inputs of a step */
  int64_t begun;           /* steps that were put on the stream */
  int32_t kept;            /* losses in `history` */
  cumoe_plan plan;
  decoder_parameter *parameters;
  int32_t parameter_count;
  int64_t numbers;
  cumoe_view_mut vectors[VECTORS]; /* [1, numbers]: weights, moments, gradients */
  cumoe_dtype dtype;
  cumoe_view_mut rounded; /* [1, numbers]: the weights in dtype; f32: they themselves */
  layer *layers;
  cumoe_view_mut inputs, tokens, targets, rate, history; /* inputs: the next three, one after the other */
  cumoe_view_mut positions, offsets, cosine, sine;
  cumoe_view_mut last, last_normed, logits, loss, losses, counted, step, norm, factor;
  cumoe_view_mut d, d_other, d_normed, d_mix, d_q, d_k, d_v, d_q_plain, d_k_plain, delta;
  cumoe_view_mut forward_room, backward_room, room; /* workspaces: of the layer, of everything else */
  cumoe_buffer *buffers;
  int32_t buffer_count, buffer_room;
  bool failed;
  char error[512];
};

/* ---- the first failure is kept, and whatever follows it is empty ---- */

static bool check(decoder *m, cumoe_status status)
{
  if (status != CUMOE_OK && !m->failed) {
    m->failed = true;
    snprintf(m->error, sizeof m->error, "%s: %s", cumoe_status_name(status), cumoe_last_error());
  }
  return !m->failed;
}

static void *must(decoder *m, void *memory)
{
  if (!memory && !m->failed) snprintf(m->error, sizeof m->error, "out of memory");
  m->failed |= !memory;
  return memory;
}

static cumoe_view_mut matrix_new(decoder *m, cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  cumoe_buffer buffer;
  if (m->failed) return (cumoe_view_mut){0};
  if (m->buffer_count == m->buffer_room) {
    m->buffer_room = m->buffer_room ? 2 * m->buffer_room : 64;
    cumoe_buffer *larger = must(m, realloc(m->buffers, (size_t)m->buffer_room * sizeof *larger));
    if (!larger) return (cumoe_view_mut){0};
    m->buffers = larger;
  }
  if (!check(m, cumoe_buffer_alloc_with(m->context, dtype, rows, cols, CUMOE_ALLOC_ZERO, m->stream, &buffer)))
    return (cumoe_view_mut){0};
  m->buffers[m->buffer_count++] = buffer;
  return cumoe_buffer_view_mut(buffer);
}

static cumoe_view_mut floats(decoder *m, int64_t rows, int64_t cols)
{
  return matrix_new(m, CUMOE_F32, rows, cols);
}

/* Activations. */
static cumoe_view_mut matrix(decoder *m, int64_t rows, int64_t cols)
{
  return matrix_new(m, m->dtype, rows, cols);
}

static void upload(decoder *m, cumoe_view_mut to, const void *from)
{
  const size_t bytes = (size_t)(to.rows * to.cols) * cumoe_dtype_bytes((cumoe_dtype)to.dtype);
  if (!m->failed) check(m, cumoe_copy_from_host(m->context, to, from, bytes, m->stream));
}

static bool download(decoder *m, void *to, cumoe_view_mut from)
{
  const size_t bytes = (size_t)(from.rows * from.cols) * cumoe_dtype_bytes((cumoe_dtype)from.dtype);
  return !m->failed && check(m, cumoe_copy_to_host(m->context, to, bytes, cumoe_const(from), m->stream)) &&
         check(m, cumoe_synchronize(m->context, m->stream));
}

/* ---- parameters ---- */

static void add_parameter(decoder *m, const char *name, int32_t pieces, int64_t rows, int64_t cols, double deviation)
{
  decoder_parameter *p = &m->parameters[m->parameter_count++];
  *p = (decoder_parameter){
      .pieces = pieces, .rows = rows, .cols = cols, .at = m->numbers, .decays = cols > 0, .deviation = deviation};
  snprintf(p->name, sizeof p->name, "%s", name);
  m->numbers += (pieces * rows * (cols ? cols : 1) + 63) / 64 * 64; /* each begins aligned */
}

static void add_layer(decoder *m, int32_t index)
{
  const decoder_config *c = &m->c;
  const int64_t h = c->hidden, q = (int64_t)c->heads * c->head_dim, kv = (int64_t)c->kv_heads * c->head_dim;
  const double plain = .02, into = plain / sqrt(2. * c->layers); /* into the residual stream: a sum of all layers */
  const struct {
    const char *name;
    int32_t pieces;
    int64_t rows, cols;
    double deviation;
  } all[OF_LAYER] = {[INPUT_NORM] = {"input_layernorm", 1, h, 0, 0},
                     [Q] = {"self_attn.q_proj", 1, q, h, plain},
                     [K] = {"self_attn.k_proj", 1, kv, h, plain},
                     [V] = {"self_attn.v_proj", 1, kv, h, plain},
                     [O] = {"self_attn.o_proj", 1, h, q, into},
                     [Q_NORM] = {"self_attn.q_norm", 1, c->head_dim, 0, 0},
                     [K_NORM] = {"self_attn.k_norm", 1, c->head_dim, 0, 0},
                     [POST_NORM] = {"post_attention_layernorm", 1, h, 0, 0},
                     [ROUTER] = {"mlp.gate", 1, c->experts, h, plain},
                     [GATE] = {"mlp.experts.%d.gate_proj", c->experts, c->inter, h, plain},
                     [UP] = {"mlp.experts.%d.up_proj", c->experts, c->inter, h, plain},
                     [DOWN] = {"mlp.experts.%d.down_proj", c->experts, h, c->inter, into}};
  for (int i = 0; i < OF_LAYER; i++) {
    char name[96];
    snprintf(name, sizeof name, "model.layers.%d.%s.weight", (int)index, all[i].name);
    add_parameter(m, name, all[i].pieces, all[i].rows, all[i].cols, all[i].deviation);
  }
}

static void list_parameters(decoder *m)
{
  const decoder_config *c = &m->c;
  m->parameters = must(m, calloc((size_t)(3 + c->layers * OF_LAYER), sizeof *m->parameters));
  if (m->failed) return;
  add_parameter(m, "model.embed_tokens.weight", 1, c->vocab, c->hidden, .02);
  for (int32_t i = 0; i < c->layers; i++) add_layer(m, i);
  add_parameter(m, "model.norm.weight", 1, c->hidden, 0, 0);
  add_parameter(m, "lm_head.weight", 1, c->vocab, c->hidden, .02);
  for (int i = 0; i < VECTORS; i++) m->vectors[i] = floats(m, 1, m->numbers);
  m->rounded = m->dtype == CUMOE_F32 ? m->vectors[DECODER_WEIGHTS] : matrix(m, 1, m->numbers);
}

/* A parameter's part of a vector; experts lie one below the other. */
static cumoe_view_mut part_of(const decoder *m, cumoe_view_mut v, int32_t index)
{
  const decoder_parameter *p = &m->parameters[index];
  if (v.data) v.data = (char *)v.data + (size_t)p->at * cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  v.rows = p->cols ? p->pieces * p->rows : 1;
  v.cols = v.ld = p->cols ? p->cols : p->rows;
  return v;
}

static int32_t of_layer(int32_t at, int which)
{
  return 1 + at * OF_LAYER + which;
}

static int32_t final_norm(const decoder *m)
{
  return 1 + m->c.layers * OF_LAYER;
}

static cumoe_view weight(const decoder *m, int32_t index)
{
  return cumoe_const(part_of(m, m->rounded, index));
}

static cumoe_view_mut gradient(const decoder *m, int32_t index)
{
  return part_of(m, m->vectors[DECODER_GRADIENTS], index);
}

/* ---- creation ---- */

static void make_stream(decoder *m)
{
  const size_t bytes = (2 * (size_t)m->c.batch * (size_t)m->c.length + 1) * sizeof(int32_t);
  check(m, cumoe_stream_create(m->context, 0, &m->stream));
  if (!m->failed) check(m, cumoe_matmul_prepare(m->context));
  for (int i = 0; i < AHEAD && !m->failed; i++) {
    void *data = NULL;
    check(m, cumoe_event_create(m->context, 0, &m->taken[i]));
    if (!m->failed) check(m, cumoe_pinned_alloc(m->context, bytes, 0, &data));
    m->waiting[i] = data;
  }
}

static void free_stream(decoder *m)
{
  CUMOE_IGNORE(cumoe_synchronize(m->context, m->stream));
  for (int i = 0; i < AHEAD; i++) {
    cumoe_event_destroy(m->context, m->taken[i]);
    cumoe_pinned_free(m->context, m->waiting[i]);
  }
  cumoe_graph_destroy(m->context, m->graph);
}

static cumoe_weights bind_experts(decoder *m, cumoe_view_mut vector, int32_t index)
{
  const decoder_config *c = &m->c;
  cumoe_weights bound = NULL;
  cumoe_weights_desc d = {.size = sizeof d,
                          .experts = c->experts,
                          .hidden = c->hidden,
                          .inter = c->inter,
                          .gate_order = CUMOE_GATE_UP_SEPARATE,
                          .up_major = CUMOE_OUT_IN,
                          .down_major = CUMOE_OUT_IN};
  d.gate.data = cumoe_const(part_of(m, vector, of_layer(index, GATE)));
  d.up.data = cumoe_const(part_of(m, vector, of_layer(index, UP)));
  d.down.data = cumoe_const(part_of(m, vector, of_layer(index, DOWN)));
  if (!m->failed) check(m, cumoe_weights_bind(m->context, &d, &bound));
  return bound;
}

static void make_plan(decoder *m)
{
  const decoder_config *c = &m->c;
  const int64_t tokens = (int64_t)c->batch * c->length;
  const cumoe_moe_desc desc = {.size = sizeof desc,
                               .num_experts = c->experts,
                               .hidden = c->hidden,
                               .inter = c->inter,
                               .dtype = m->dtype,
                               .act = CUMOE_ACT_SILU,
                               .routing = cumoe_routing_qwen3(c->top_k)};
  size_t forward = 0, backward = 0;
  if (m->failed || !check(m, cumoe_plan_create(m->context, &desc, &m->plan)) ||
      !check(m, cumoe_plan_workspace(m->plan, tokens, &forward)) ||
      !check(m, cumoe_moe_backward_workspace(m->plan, tokens, 1, &backward)))
    return;
  m->forward_room = matrix_new(m, CUMOE_U8, 1, (int64_t)forward);
  m->backward_room = matrix_new(m, CUMOE_U8, 1, (int64_t)backward);
}

static void make_layer(decoder *m, int32_t index)
{
  const decoder_config *c = &m->c;
  const int64_t t = (int64_t)c->batch * c->length, h = c->hidden, d = c->head_dim;
  layer *l = &m->layers[index];
  size_t kept = 0;
  l->experts = bind_experts(m, m->rounded, index);
  l->d_experts = bind_experts(m, m->vectors[DECODER_GRADIENTS], index);
  l->x = matrix(m, t, h);
  l->normed = matrix(m, t, h);
  l->q_plain = matrix(m, t, c->heads * d);
  l->k_plain = matrix(m, t, c->kv_heads * d);
  l->q = matrix(m, t, c->heads * d);
  l->k = matrix(m, t, c->kv_heads * d);
  l->v = matrix(m, t, c->kv_heads * d);
  l->mix = matrix(m, t, c->heads * d);
  l->lse = floats(m, t, c->heads);
  l->middle = matrix(m, t, h);
  l->middle_normed = matrix(m, t, h);
  if (!m->failed) check(m, cumoe_moe_kept(m->plan, t, &kept));
  l->kept = matrix_new(m, CUMOE_U8, 1, (int64_t)kept);
}

/* Angles of the places in a sequence, and where each sequence begins. */
static void fill_tables(decoder *m)
{
  const decoder_config *c = &m->c;
  const int64_t half = c->head_dim / 2, tokens = (int64_t)c->batch * c->length;
  float *cosine = must(m, calloc((size_t)(c->length * half), sizeof *cosine));
  float *sine = must(m, calloc((size_t)(c->length * half), sizeof *sine));
  int32_t *places = must(m, calloc((size_t)tokens, sizeof *places));
  int32_t *offsets = must(m, calloc((size_t)c->batch + 1, sizeof *offsets));
  for (int64_t i = 0; i < c->length * half && !m->failed; i++) {
    const double angle = (double)(i / half) * pow(c->rope_base, -(double)(i % half) / (double)half);
    cosine[i] = (float)cos(angle);
    sine[i] = (float)sin(angle);
  }
  for (int64_t t = 0; t < tokens && !m->failed; t++) places[t] = (int32_t)(t % c->length);
  for (int32_t s = 0; s <= c->batch && !m->failed; s++) offsets[s] = s * c->length;
  upload(m, m->cosine = floats(m, c->length, half), cosine);
  upload(m, m->sine = floats(m, c->length, half), sine);
  upload(m, m->positions = matrix_new(m, CUMOE_I32, 1, tokens), places);
  upload(m, m->offsets = matrix_new(m, CUMOE_I32, 1, c->batch + 1), offsets);
  free(cosine);
  free(sine);
  free(places);
  free(offsets);
}

/* One for whichever call runs: the largest that any asks for. */
static void make_room(decoder *m)
{
  const decoder_config *c = &m->c;
  const int64_t t = (int64_t)c->batch * c->length;
  const cumoe_view all = cumoe_const(m->vectors[DECODER_GRADIENTS]);
  size_t bytes[4] = {0}, most = 0;
  if (m->failed) return;
  check(m, cumoe_norm_backward_workspace(m->context, t * c->heads, c->head_dim, &bytes[0]));
  check(m, cumoe_embedding_backward_workspace(m->context, t, c->vocab, &bytes[1]));
  check(m, cumoe_global_norm_workspace(m->context, &all, 1, &bytes[2]));
  check(m, cumoe_matmul_workspace(m->context, &bytes[3]));
  for (int i = 0; i < 4; i++) most = bytes[i] > most ? bytes[i] : most;
  m->room = matrix_new(m, CUMOE_U8, 1, (int64_t)most);
}

static cumoe_view_mut part_of_inputs(const decoder *m, cumoe_dtype dtype, int64_t at, int64_t count)
{
  return cumoe_vector_mut(m->inputs.data ? (int32_t *)m->inputs.data + at : NULL, dtype, count);
}

static void make_scratch(decoder *m)
{
  const decoder_config *c = &m->c;
  const int64_t t = (int64_t)c->batch * c->length, h = c->hidden, q = c->heads * (int64_t)c->head_dim,
                kv = c->kv_heads * (int64_t)c->head_dim;
  m->inputs = matrix_new(m, CUMOE_I32, 1, 2 * t + 1);
  m->tokens = part_of_inputs(m, CUMOE_I32, 0, t);
  m->targets = part_of_inputs(m, CUMOE_I32, t, t);
  m->rate = part_of_inputs(m, CUMOE_F32, 2 * t, 1);
  m->history = floats(m, 1, DECODER_LOSSES);
  m->last = matrix(m, t, h);
  m->last_normed = matrix(m, t, h);
  m->logits = matrix(m, t, c->vocab);
  m->loss = floats(m, 1, 1);
  m->losses = floats(m, 1, t);
  m->norm = floats(m, 1, 1);
  m->factor = floats(m, 1, 1);
  m->counted = matrix_new(m, CUMOE_I64, 1, 1);
  m->step = matrix_new(m, CUMOE_I64, 1, 1);
  m->d = matrix(m, t, h);
  m->d_other = matrix(m, t, h);
  m->d_normed = matrix(m, t, h);
  m->d_mix = matrix(m, t, q);
  m->d_q = matrix(m, t, q);
  m->d_q_plain = matrix(m, t, q);
  m->d_k = matrix(m, t, kv);
  m->d_k_plain = matrix(m, t, kv);
  m->d_v = matrix(m, t, kv);
  m->delta = floats(m, t, c->heads);
}

decoder *decoder_create(cumoe_context context, const decoder_config *config, char *error, size_t error_bytes)
{
  decoder *m = calloc(1, sizeof *m);
  if (!m) {
    snprintf(error, error_bytes, "out of memory");
    return NULL;
  }
  m->c = *config;
  m->dtype = config->dtype ? config->dtype : CUMOE_F32;
  m->context = context;
  make_stream(m);
  list_parameters(m);
  make_plan(m);
  m->layers = must(m, calloc((size_t)config->layers, sizeof *m->layers));
  for (int32_t i = 0; i < config->layers && !m->failed; i++) make_layer(m, i);
  fill_tables(m);
  make_scratch(m);
  make_room(m);
  if (!m->failed) return m;
  snprintf(error, error_bytes, "%s", m->error);
  decoder_destroy(m);
  return NULL;
}

void decoder_destroy(decoder *m)
{
  if (!m) return;
  free_stream(m);
  for (int32_t i = 0; m->layers && i < m->c.layers; i++) {
    cumoe_weights_destroy(m->layers[i].experts);
    cumoe_weights_destroy(m->layers[i].d_experts);
  }
  cumoe_plan_destroy(m->plan);
  for (int32_t i = 0; i < m->buffer_count; i++) cumoe_buffer_free(&m->buffers[i]);
  cumoe_stream_destroy(m->context, m->stream);
  free(m->buffers);
  free(m->layers);
  free(m->parameters);
  free(m);
}

/* ---- products: y = x w^T, w [out, in] ---- */

static void multiply(decoder *m, uint32_t flags, cumoe_view a, cumoe_view b, cumoe_view_mut c, float beta)
{
  const cumoe_matmul_args args = {
      .size = sizeof args, .flags = flags, .beta = beta, .a = a, .b = b, .c = c, .workspace = m->room};
  if (!m->failed) check(m, cumoe_matmul(m->context, &args, m->stream));
}

static void linear(decoder *m, cumoe_view_mut x, int32_t index, cumoe_view_mut y)
{
  multiply(m, CUMOE_MATMUL_TRANSPOSE_B, cumoe_const(x), weight(m, index), y, 0);
}

/* dx = beta dx + dy w, and w's gradient. */
static void linear_backward(decoder *m, cumoe_view_mut dy, cumoe_view_mut x, int32_t index, cumoe_view_mut dx,
                            float beta)
{
  multiply(m, 0, cumoe_const(dy), weight(m, index), dx, beta);
  multiply(m, CUMOE_MATMUL_TRANSPOSE_A, cumoe_const(dy), cumoe_const(x), gradient(m, index), 0);
}

/* ---- norms: of rows, or of the heads of rows ---- */

static cumoe_view_mut heads_of(const decoder *m, cumoe_view_mut v)
{
  v.rows *= v.cols / m->c.head_dim;
  v.cols = v.ld = m->c.head_dim;
  return v;
}

static void norm(decoder *m, cumoe_view_mut x, int32_t index, cumoe_view_mut y)
{
  if (!m->failed)
    check(m, cumoe_rmsnorm(m->context, cumoe_const(x), weight(m, index), (float)m->c.norm_eps, y, m->stream));
}

static void norm_backward(decoder *m, cumoe_view_mut x, cumoe_view_mut dy, int32_t index, cumoe_view_mut dx)
{
  const cumoe_norm_backward_args args = {.size = sizeof args,
                                         .eps = (float)m->c.norm_eps,
                                         .x = cumoe_const(x),
                                         .weight = weight(m, index),
                                         .dy = cumoe_const(dy),
                                         .dx = dx,
                                         .dweight = gradient(m, index),
                                         .workspace = m->room};
  if (!m->failed) check(m, cumoe_rmsnorm_backward(m->context, &args, m->stream));
}

static void add(decoder *m, cumoe_view_mut to, cumoe_view_mut what)
{
  if (!m->failed) check(m, cumoe_add(m->context, cumoe_const(to), cumoe_const(what), to, m->stream));
}

/* ---- attention ---- */

static void rope(decoder *m, cumoe_view_mut x, uint32_t flags)
{
  const cumoe_rope_args args = {.size = sizeof args,
                                .flags = flags,
                                .heads = (int32_t)(x.cols / m->c.head_dim),
                                .head_dim = m->c.head_dim,
                                .x = cumoe_const(x),
                                .positions = cumoe_const(m->positions),
                                .cosine = cumoe_const(m->cosine),
                                .sine = cumoe_const(m->sine),
                                .y = x};
  if (!m->failed) check(m, cumoe_rope(m->context, &args, m->stream));
}

static cumoe_attention_args attention_of(const decoder *m, const layer *l)
{
  return (cumoe_attention_args){.size = sizeof(cumoe_attention_args),
                                .flags = CUMOE_ATTENTION_CAUSAL,
                                .heads = m->c.heads,
                                .kv_heads = m->c.kv_heads,
                                .head_dim = m->c.head_dim,
                                .q = cumoe_const(l->q),
                                .k = cumoe_const(l->k),
                                .v = cumoe_const(l->v),
                                .q_offsets = cumoe_const(m->offsets),
                                .out = l->mix,
                                .lse = l->lse};
}

static void attention(decoder *m, int32_t index)
{
  layer *l = &m->layers[index];
  const cumoe_attention_args args = attention_of(m, l);
  norm(m, l->x, of_layer(index, INPUT_NORM), l->normed);
  linear(m, l->normed, of_layer(index, Q), l->q_plain);
  linear(m, l->normed, of_layer(index, K), l->k_plain);
  linear(m, l->normed, of_layer(index, V), l->v);
  norm(m, heads_of(m, l->q_plain), of_layer(index, Q_NORM), heads_of(m, l->q));
  norm(m, heads_of(m, l->k_plain), of_layer(index, K_NORM), heads_of(m, l->k));
  rope(m, l->q, 0);
  rope(m, l->k, 0);
  if (!m->failed) check(m, cumoe_attention(m->context, &args, m->stream));
  linear(m, l->mix, of_layer(index, O), l->middle);
  add(m, l->middle, l->x);
}

/* m->d: of the stream after attention, becomes that before it. */
static void attention_backward(decoder *m, int32_t index)
{
  layer *l = &m->layers[index];
  const cumoe_attention_args forward = attention_of(m, l);
  const cumoe_attention_backward_args args = {.size = sizeof args,
                                              .forward = &forward,
                                              .dout = cumoe_const(m->d_mix),
                                              .dq = m->d_q,
                                              .dk = m->d_k,
                                              .dv = m->d_v,
                                              .delta = m->delta};
  linear_backward(m, m->d, l->mix, of_layer(index, O), m->d_mix, 0);
  if (!m->failed) check(m, cumoe_attention_backward(m->context, &args, m->stream));
  rope(m, m->d_q, CUMOE_ROPE_BACKWARD);
  rope(m, m->d_k, CUMOE_ROPE_BACKWARD);
  norm_backward(m, heads_of(m, l->q_plain), heads_of(m, m->d_q), of_layer(index, Q_NORM), heads_of(m, m->d_q_plain));
  norm_backward(m, heads_of(m, l->k_plain), heads_of(m, m->d_k), of_layer(index, K_NORM), heads_of(m, m->d_k_plain));
  linear_backward(m, m->d_q_plain, l->normed, of_layer(index, Q), m->d_normed, 0);
  linear_backward(m, m->d_k_plain, l->normed, of_layer(index, K), m->d_normed, 1);
  linear_backward(m, m->d_v, l->normed, of_layer(index, V), m->d_normed, 1);
  norm_backward(m, l->x, m->d_normed, of_layer(index, INPUT_NORM), m->d_other);
  add(m, m->d, m->d_other);
}

/* ---- the MoE layer ---- */

static cumoe_moe_args moe_of(const decoder *m, int32_t index, cumoe_view_mut out)
{
  const layer *l = &m->layers[index];
  return (cumoe_moe_args){.size = sizeof(cumoe_moe_args),
                          .x = cumoe_const(l->middle_normed),
                          .router_weight = weight(m, of_layer(index, ROUTER)),
                          .residual = cumoe_const(l->middle),
                          .out = out,
                          .workspace = m->forward_room};
}

static void moe(decoder *m, int32_t index, cumoe_view_mut out)
{
  layer *l = &m->layers[index];
  const cumoe_moe_args args = moe_of(m, index, out);
  norm(m, l->middle, of_layer(index, POST_NORM), l->middle_normed);
  if (!m->failed) check(m, cumoe_moe_forward_keep(m->plan, l->experts, &args, l->kept, m->stream));
}

/* m->d: of the layer's output, becomes that of the stream before it. */
static void moe_backward(decoder *m, int32_t index)
{
  layer *l = &m->layers[index];
  const cumoe_moe_args args = moe_of(m, index, (cumoe_view_mut){0});
  const cumoe_moe_grads grads = {.size = sizeof grads,
                                 .balance = m->c.balance,
                                 .d_out = cumoe_const(m->d),
                                 .kept = cumoe_const(l->kept),
                                 .d_weights = l->d_experts,
                                 .d_x = m->d_normed,
                                 .d_router_weight = gradient(m, of_layer(index, ROUTER)),
                                 .workspace = m->backward_room};
  if (!m->failed) check(m, cumoe_moe_backward(m->plan, l->experts, &args, &grads, m->stream));
  norm_backward(m, l->middle, m->d_normed, of_layer(index, POST_NORM), m->d_other);
  add(m, m->d, m->d_other);
}

/* ---- a pass ---- */

static cumoe_view_mut stream_after(const decoder *m, int32_t layer_index)
{
  return layer_index + 1 < m->c.layers ? m->layers[layer_index + 1].x : m->last;
}

/* The loss, and its gradient in place of the logits. */
static void forward(decoder *m)
{
  const cumoe_cross_entropy_args args = {.size = sizeof args,
                                         .logits = cumoe_const(m->logits),
                                         .targets = cumoe_const(m->targets),
                                         .loss = m->loss,
                                         .losses = m->losses,
                                         .counted = m->counted,
                                         .dlogits = m->logits};
  check(m, cumoe_embedding(m->context, weight(m, 0), cumoe_const(m->tokens), m->layers[0].x, m->stream));
  for (int32_t i = 0; i < m->c.layers; i++) {
    attention(m, i);
    moe(m, i, stream_after(m, i));
  }
  norm(m, m->last, final_norm(m), m->last_normed);
  linear(m, m->last_normed, final_norm(m) + 1, m->logits);
  if (!m->failed) check(m, cumoe_cross_entropy(m->context, &args, m->stream));
}

static void run_backward(decoder *m)
{
  const cumoe_embedding_backward_args args = {.size = sizeof args,
                                              .dy = cumoe_const(m->d),
                                              .ids = cumoe_const(m->tokens),
                                              .dtable = gradient(m, 0),
                                              .workspace = m->room};
  linear_backward(m, m->logits, m->last_normed, final_norm(m) + 1, m->d_normed, 0);
  norm_backward(m, m->last, m->d_normed, final_norm(m), m->d);
  for (int32_t i = m->c.layers - 1; i >= 0; i--) {
    moe_backward(m, i);
    attention_backward(m, i);
  }
  if (!m->failed) check(m, cumoe_embedding_backward(m->context, &args, m->stream));
}

bool decoder_run(decoder *m, const int32_t *tokens, const int32_t *targets, bool backward, float *loss)
{
  upload(m, m->tokens, tokens);
  upload(m, m->targets, targets);
  if (!m->failed) forward(m);
  if (!m->failed && backward) run_backward(m);
  return download(m, loss, m->loss);
}

static void step_parameter(decoder *m, int32_t index)
{
  const cumoe_view_mut none = {0}, rounded = m->dtype == CUMOE_F32 ? none : part_of(m, m->rounded, index);
  const cumoe_adamw_args args = {.size = sizeof args,
                                 .rate = 1,
                                 .beta2 = .95f,
                                 .decay = m->parameters[index].decays ? m->c.decay : 0,
                                 .gradient = cumoe_const(gradient(m, index)),
                                 .step = cumoe_const(m->step),
                                 .factor = cumoe_const(m->factor),
                                 .schedule = cumoe_const(m->rate),
                                 .master = part_of(m, m->vectors[DECODER_WEIGHTS], index),
                                 .first = part_of(m, m->vectors[DECODER_FIRST], index),
                                 .second = part_of(m, m->vectors[DECODER_SECOND], index),
                                 .weights = rounded};
  if (!m->failed) check(m, cumoe_adamw(m->context, &args, m->stream));
}

static void optimise(decoder *m)
{
  const cumoe_view all = cumoe_const(m->vectors[DECODER_GRADIENTS]);
  const cumoe_global_norm_args args = {.size = sizeof args,
                                       .max_norm = m->c.clip,
                                       .gradients = &all,
                                       .count = 1,
                                       .norm = m->norm,
                                       .factor = m->factor,
                                       .step = m->step,
                                       .workspace = m->room};
  if (!m->failed) check(m, cumoe_global_norm(m->context, &args, m->stream));
  for (int32_t i = 0; i < m->parameter_count; i++) step_parameter(m, i);
}

static void whole_step(decoder *m)
{
  forward(m);
  run_backward(m);
  optimise(m);
}

/* ---- steps: none waits for the device, which is given a graph ---- */

static void capture_step(decoder *m)
{
  if (!check(m, cumoe_graph_begin(m->context, m->stream))) return;
  whole_step(m);
  check(m, cumoe_graph_end(m->context, m->stream, &m->graph));
}

/* The inputs of a step, in pinned memory that no earlier step needs any more. */
static void send_inputs(decoder *m, const int32_t *tokens, const int32_t *targets, float rate)
{
  const size_t count = (size_t)m->tokens.cols;
  const int slot = (int)(m->begun % AHEAD);
  int32_t *to = m->waiting[slot];
  if (m->failed || !check(m, cumoe_event_synchronize(m->context, m->taken[slot]))) return;
  memcpy(to, tokens, count * sizeof *to);
  memcpy(to + count, targets, count * sizeof *to);
  memcpy(to + 2 * count, &rate, sizeof rate);
  upload(m, m->inputs, to);
  if (!m->failed) check(m, cumoe_event_record(m->context, m->taken[slot], m->stream));
}

bool decoder_train(decoder *m, const int32_t *tokens, const int32_t *targets, float rate)
{
  cumoe_view_mut to = m->history;
  if (!m->failed && m->kept == DECODER_LOSSES) {
    m->failed = true;
    snprintf(m->error, sizeof m->error, "%d losses wait to be read", (int)DECODER_LOSSES);
  }
  if (!m->failed && m->stream && !m->graph) capture_step(m);
  send_inputs(m, tokens, targets, rate);
  if (!m->failed && m->graph)
    check(m, cumoe_graph_launch(m->context, m->graph, m->stream));
  else if (!m->failed)
    whole_step(m);
  if (m->failed) return false;
  to.data = (float *)to.data + m->kept++;
  to.cols = to.ld = 1;
  m->begun++;
  return check(m, cumoe_copy(m->context, to, cumoe_const(m->loss), m->stream));
}

int32_t decoder_losses(decoder *m, float *to)
{
  const int32_t count = m->kept;
  cumoe_view_mut from = m->history;
  from.cols = count;
  m->kept = 0;
  return count == 0 || download(m, to, from) ? count : -1;
}

/* ---- state ---- */

/* Of number i of a seed: a normal one, whatever came before. */
static double random_normal(uint64_t seed, uint64_t i)
{
  double sum = -6;
  for (uint64_t k = 0; k < 12; k++) {
    uint64_t z = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15) + (12 * i + k) * UINT64_C(0xd1342543de82ef95);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    sum += (double)((z ^ z >> 31) >> 11) * 0x1p-53;
  }
  return sum;
}

bool decoder_start(decoder *m, uint64_t seed)
{
  float *weights = must(m, calloc((size_t)m->numbers, sizeof *weights));
  for (int32_t i = 0; i < m->parameter_count && !m->failed; i++) {
    const decoder_parameter *p = &m->parameters[i];
    const int64_t count = p->pieces * p->rows * (p->cols ? p->cols : 1);
    for (int64_t j = 0; j < count; j++)
      weights[p->at + j] = p->deviation > 0 ? (float)(p->deviation * random_normal(seed, (uint64_t)(p->at + j))) : 1;
  }
  if (!m->failed) decoder_write(m, DECODER_WEIGHTS, weights);
  free(weights);
  for (int i = DECODER_FIRST; i <= DECODER_SECOND && !m->failed; i++)
    check(m, cumoe_fill(m->context, m->vectors[i], 0, m->stream));
  return decoder_set_step(m, 0);
}

bool decoder_set_step(decoder *m, int64_t step)
{
  upload(m, m->step, &step);
  return !m->failed;
}

bool decoder_read(decoder *m, decoder_state which, float *to)
{
  return download(m, to, m->vectors[which]);
}

/* As AdamW rounds them. */
static void upload_rounded(decoder *m, const float *from)
{
  uint16_t *to = must(m, malloc((size_t)m->numbers * sizeof *to));
  for (int64_t i = 0; i < m->numbers && !m->failed; i++) to[i] = float_bf16(from[i]);
  if (!m->failed) upload(m, m->rounded, to);
  free(to);
}

bool decoder_write(decoder *m, decoder_state which, const float *from)
{
  upload(m, m->vectors[which], from);
  if (which == DECODER_WEIGHTS && m->dtype != CUMOE_F32) upload_rounded(m, from);
  return !m->failed;
}

int64_t decoder_numbers(const decoder *m)
{
  return m->numbers;
}

int32_t decoder_parameters(const decoder *m, const decoder_parameter **list)
{
  *list = m->parameters;
  return m->parameter_count;
}

const char *decoder_error(const decoder *m)
{
  return m->error;
}
