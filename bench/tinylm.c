#include "tinylm.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"

typedef struct layer {
  cumoe_view_mut input_norm, q, k, v, o, q_norm, k_norm, post_norm; /* [out, in] row-major */
  cumoe_view_mut keys, values;                                      /* [context, kv_heads * head_dim] */
  cumoe_view router;                                                /* [experts, hidden] */
  cumoe_weights experts;
} layer;

/* What the device is told of the tokens of a pass, in one piece: the tokens, how many positions there are with them,
 * how many tokens there are, the row of noise that the next one is drawn by, and the tokens' positions. */
typedef struct pass {
  cumoe_view_mut all, tokens, length, count, row, positions;
} pass;

enum { AHEAD = 4, TOLD = 3 }; /* tokens that may wait for the device; numbers between tokens and positions */

/* Host memory and device buffers are freed from two lists: whatever step of loading fails, nothing is lost.
 */
struct tinylm {
  tinylm_config config;
  cumoe_context context;
  cumoe_dtype dtype;
  cumoe_format format; /* of the experts' weights */
  int64_t expert_bytes;
  cumoe_stream stream;    /* NULL on the CPU device, as the graph is */
  cumoe_plan plan, alone; /* alone: of tinylm_moe, whose result is f32 */
  cumoe_plan cache;       /* of no layer: puts rows where their positions are */
  safetensors file;       /* open while loading */
  layer *layers;
  cumoe_view_mut embed, norm, head;
  cumoe_view_mut cosine, sine;                           /* [context, head_dim / 2] f32 */
  cumoe_view_mut x, middle, n, q, k, v, mix, last, room; /* activations of a pass; last: [1, hidden], of its end */
  cumoe_view_mut one_map;                                /* what the cache's plan asks for besides positions */
  cumoe_view_mut logits;                                 /* [context, vocab] f32 */
  cumoe_view_mut noise, noise_row, chosen_weight;        /* noise: [TINYLM_NOISE, vocab] f32 */
  pass many, one;                                        /* of a prompt; of the graph */
  cumoe_graph graph;                                     /* chooses a token and runs it */
  cumoe_event taken[AHEAD], made[AHEAD];
  int32_t *waiting[AHEAD], *result[AHEAD]; /* pinned: what `one` is told; the token that was chosen */
  float *host_x, *host_out, *host_weights;
  int32_t *ids, *told;
  uint16_t *narrow;            /* bf16 staging of one activation matrix or weight */
  cumoe_view_mut dense_expert; /* one expert's matrix before it is quantised */
  cumoe_view_mut dev_x, dev_out, dev_ids, dev_weights, dev_load, workspace;
  int32_t position;
  void (*observer)(void *, const tinylm_seen *);
  void *user;
  void **memory;
  cumoe_buffer *buffers;
  int32_t memory_count, buffer_count;
  char error[512];
};

/* ---- failures and ownership ------------------------------------------------------------------------ */

static bool failed(tinylm *m, const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool failed(tinylm *m, const char *format, ...)
{
  va_list list;
  va_start(list, format);
  vsnprintf(m->error, sizeof m->error, format, list);
  va_end(list);
  return false;
}

static bool ok(tinylm *m, cumoe_status status)
{
  return status == CUMOE_OK || failed(m, "%s: %s", cumoe_status_name(status), cumoe_last_error());
}

static bool grow(tinylm *m, void **list, int32_t count, size_t element)
{
  if (count & (count - 1)) return true; /* the capacity is the next power of two */
  void *larger = realloc(*list, (count ? 2 * (size_t)count : 1) * element);
  if (!larger) return failed(m, "out of memory");
  *list = larger;
  return true;
}

static void *owned(tinylm *m, int64_t count, size_t element)
{
  void *list = m->memory;
  if (!grow(m, &list, m->memory_count, sizeof *m->memory)) return NULL;
  m->memory = list;
  void *block = calloc((size_t)count, element);
  if (!block) {
    failed(m, "out of memory: %lld elements", (long long)count);
    return NULL;
  }
  return m->memory[m->memory_count++] = block;
}

static float *floats(tinylm *m, int64_t count)
{
  return owned(m, count, sizeof(float));
}

static bool device_matrix(tinylm *m, cumoe_dtype dtype, int64_t rows, int64_t cols, cumoe_view_mut *view)
{
  void *list = m->buffers;
  if (!grow(m, &list, m->buffer_count, sizeof *m->buffers)) return false;
  m->buffers = list;
  cumoe_buffer buffer;
  if (!ok(m, cumoe_buffer_alloc_with(m->context, dtype, rows, cols, CUMOE_ALLOC_ZERO, m->stream, &buffer)))
    return false;
  m->buffers[m->buffer_count++] = buffer;
  *view = cumoe_buffer_view_mut(buffer);
  return true;
}

/* Host f32 to a device matrix of the model's type; the staging block is large enough for every matrix. */
static bool upload(tinylm *m, cumoe_view_mut to, const float *from)
{
  int64_t count = to.rows * to.cols;
  if (to.dtype == CUMOE_F32)
    return ok(m, cumoe_copy_from_host(m->context, to, from, (size_t)count * sizeof *from, m->stream));
  for (int64_t i = 0; i < count; i++) m->narrow[i] = float_bf16(from[i]);
  return ok(m, cumoe_copy_from_host(m->context, to, m->narrow, (size_t)count * sizeof *m->narrow, m->stream));
}

static bool download(tinylm *m, void *to, cumoe_view_mut from)
{
  size_t bytes = (size_t)(from.rows * from.cols) * cumoe_dtype_bytes((cumoe_dtype)from.dtype);
  return ok(m, cumoe_copy_to_host(m->context, to, bytes, cumoe_const(from), m->stream)) &&
         ok(m, cumoe_synchronize(m->context, m->stream));
}

/* ---- config.json ----------------------------------------------------------------------------------- */

static bool config_int(tinylm *m, json config, const char *key, int64_t limit, int32_t *value)
{
  int64_t n;
  json found = json_find(config, key);
  if (!found.begin) return failed(m, "config.json: %s is missing", key);
  if (!json_int(found, &n) || n < 1 || n > limit)
    return failed(m, "config.json: %s is not a whole number in 1 .. %lld", key, (long long)limit);
  *value = (int32_t)n;
  return true;
}

static bool config_number(tinylm *m, json config, const char *key, double *value)
{
  if (json_number(json_find(config, key), value) && *value > 0) return true;
  return failed(m, "config.json: %s is missing or not positive", key);
}

/* Both spellings of the expert count and of the rotary base are in use. */
static bool read_fields(tinylm *m, json root)
{
  tinylm_config *c = &m->config;
  json rope = json_find(root, "rope_parameters");
  const char *experts = json_find(root, "num_experts").begin ? "num_experts" : "num_local_experts";
  bool all = config_int(m, root, "num_hidden_layers", 1024, &c->layers) &&
             config_int(m, root, "hidden_size", 1 << 16, &c->hidden) &&
             config_int(m, root, "vocab_size", CUMOE_MAX_EXPERTS, &c->vocab) &&
             config_int(m, root, "max_position_embeddings", 1 << 16, &c->context) &&
             config_int(m, root, "num_attention_heads", 1024, &c->heads) &&
             config_int(m, root, "num_key_value_heads", 1024, &c->kv_heads) &&
             config_int(m, root, "head_dim", 1024, &c->head_dim) &&
             config_int(m, root, experts, CUMOE_MAX_EXPERTS, &c->experts) &&
             config_int(m, root, "num_experts_per_tok", CUMOE_MAX_TOP_K, &c->top_k) &&
             config_int(m, root, "moe_intermediate_size", 1 << 16, &c->inter) &&
             config_number(m, root, "rms_norm_eps", &c->norm_eps) &&
             config_number(m, rope.begin ? rope : root, "rope_theta", &c->rope_base);
  if (!all) return false;
  if (!json_bool(json_find(root, "norm_topk_prob"), &c->renormalize))
    return failed(m, "config.json: norm_topk_prob is missing");
  if (c->heads % c->kv_heads != 0 || c->head_dim % 2 != 0)
    return failed(m, "config.json: %d heads do not share %d key/value heads of even size evenly", (int)c->heads,
                  (int)c->kv_heads);
  return true;
}

static bool read_config(tinylm *m, const char *path)
{
  size_t size;
  unsigned char *text = file_read(path, &size, m->error, sizeof m->error);
  if (!text) return false;
  json root = json_parse((const char *)text, size);
  char type[32];
  bool good = root.begin ? true : failed(m, "%s: not JSON", path);
  if (good && !(json_string(json_find(root, "model_type"), type, sizeof type) && strcmp(type, "qwen3_moe") == 0))
    good = failed(m, "%s: model_type is not qwen3_moe", path);
  good = good && read_fields(m, root);
  free(text);
  return good;
}

/* ---- weights --------------------------------------------------------------------------------------- */

static bool read_tensor(tinylm *m, const char *name, int64_t rows, int64_t cols, float *to)
{
  const file_tensor *t = safetensors_find(&m->file, name);
  if (!t) return failed(m, "tensor %s is missing", name);
  bool fits =
      cols == 0 ? t->dims == 1 && t->shape[0] == rows : t->dims == 2 && t->shape[0] == rows && t->shape[1] == cols;
  if (!fits) return failed(m, "tensor %s does not have the shape that config.json says", name);
  return file_floats(t, 0, t->count, to) || failed(m, "tensor %s is not of a floating type", name);
}

/* One matrix of the checkpoint, in a buffer of its own. */
static bool load_matrix(tinylm *m, const char *name, int64_t rows, int64_t cols, float *staging, cumoe_view_mut *view)
{
  return read_tensor(m, name, rows, cols, staging) && device_matrix(m, m->dtype, rows, cols, view) &&
         upload(m, *view, staging);
}

/* cols 0: a vector. index -1: of no layer. */
static bool dense(tinylm *m, int32_t index, const char *suffix, int64_t rows, int64_t cols, float *staging,
                  cumoe_view_mut *view)
{
  char name[TENSOR_NAME];
  if (index < 0)
    snprintf(name, sizeof name, "%s", suffix);
  else
    snprintf(name, sizeof name, "model.layers.%d.%s", (int)index, suffix);
  return read_tensor(m, name, rows, cols, staging) &&
         device_matrix(m, m->dtype, cols ? rows : 1, cols ? cols : rows, view) && upload(m, *view, staging);
}

static bool load_attention(tinylm *m, int32_t index, layer *l, float *staging)
{
  const tinylm_config *c = &m->config;
  int64_t h = c->hidden, d = c->head_dim, q = d * c->heads, kv = d * c->kv_heads;
  return dense(m, index, "input_layernorm.weight", h, 0, staging, &l->input_norm) &&
         dense(m, index, "self_attn.q_proj.weight", q, h, staging, &l->q) &&
         dense(m, index, "self_attn.k_proj.weight", kv, h, staging, &l->k) &&
         dense(m, index, "self_attn.v_proj.weight", kv, h, staging, &l->v) &&
         dense(m, index, "self_attn.o_proj.weight", h, q, staging, &l->o) &&
         dense(m, index, "self_attn.q_norm.weight", d, 0, staging, &l->q_norm) &&
         dense(m, index, "self_attn.k_norm.weight", d, 0, staging, &l->k_norm) &&
         dense(m, index, "post_attention_layernorm.weight", h, 0, staging, &l->post_norm) &&
         device_matrix(m, m->dtype, c->context, kv, &l->keys) && device_matrix(m, m->dtype, c->context, kv, &l->values);
}

enum { GATE, UP, DOWN, PROJECTIONS };

/* One projection of a layer's experts: a matrix each, behind tables of pointers. */
typedef struct expert_table {
  int64_t out, in;
  cumoe_projection *projection;
  const void **codes, **scales;
  cumoe_view_mut global; /* [experts, 1] */
} expert_table;

static int64_t bytes_of(cumoe_view_mut v)
{
  return v.rows * v.cols * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
}

/* Memory for what a call of cumoe_quantize_weights writes; its shapes are known. */
static bool device_codes(tinylm *m, const expert_table *t, int32_t expert, cumoe_quantize_args *a)
{
  const cumoe_view_mut codes = a->codes, scale = a->scale;
  if (!device_matrix(m, (cumoe_dtype)codes.dtype, codes.rows, codes.cols, &a->codes) ||
      !device_matrix(m, (cumoe_dtype)scale.dtype, scale.rows, scale.cols, &a->scale))
    return false;
  if (m->format.global && !ok(m, cumoe_view_rows_mut(t->global, expert, 1, &a->global))) return false;
  m->expert_bytes += bytes_of(a->codes) + bytes_of(a->scale) + (m->format.global ? bytes_of(a->global) : 0);
  return true;
}

/* `from` is on the device; what it becomes goes into the tables. */
static bool quantise_expert(tinylm *m, const expert_table *t, int32_t expert, cumoe_view from)
{
  cumoe_quantize_args a = {.size = sizeof a, .experts = 1, .format = m->format, .weights = from};
  if (!ok(m, cumoe_quantize_shapes(&a)) || !device_codes(m, t, expert, &a) ||
      !ok(m, cumoe_quantize_weights(m->context, &a, m->stream)))
    return false;
  t->codes[expert] = a.codes.data;
  t->scales[expert] = a.scale.data;
  t->projection->data = cumoe_const(a.codes);
  t->projection->scale.data = cumoe_const(a.scale);
  return true;
}

static bool load_expert(tinylm *m, const char *name, const expert_table *t, int32_t expert, float *staging)
{
  cumoe_view_mut dense;
  if (m->format.element != CUMOE_ELEMENT_DENSE) {
    dense = m->dense_expert;
    dense.rows = t->out;
    dense.cols = dense.ld = t->in;
    return read_tensor(m, name, t->out, t->in, staging) && upload(m, dense, staging) &&
           quantise_expert(m, t, expert, cumoe_const(dense)) && ok(m, cumoe_synchronize(m->context, m->stream));
  }
  if (!load_matrix(m, name, t->out, t->in, staging, &dense)) return false;
  m->expert_bytes += bytes_of(dense);
  t->codes[expert] = dense.data;
  t->projection->data = cumoe_const(dense);
  return true;
}

/* A view that states the shape of each matrix of a table. */
static cumoe_view shape_alone(cumoe_view v)
{
  return cumoe_matrix(NULL, (cumoe_dtype)v.dtype, v.rows, v.cols, v.ld);
}

static bool load_projection(tinylm *m, int32_t index, const char *which, const expert_table *t, float *staging)
{
  char name[TENSOR_NAME];
  for (int32_t e = 0; e < m->config.experts; e++) {
    snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s.weight", (int)index, (int)e, which);
    if (!load_expert(m, name, t, e, staging)) return false;
  }
  t->projection->data = shape_alone(t->projection->data);
  t->projection->per_expert = t->codes;
  if (m->format.element == CUMOE_ELEMENT_DENSE) return true;
  t->projection->scale.data = shape_alone(t->projection->scale.data);
  t->projection->scale.per_expert = t->scales;
  if (m->format.global) t->projection->global = cumoe_const(t->global);
  return true;
}

static bool load_experts(tinylm *m, int32_t index, layer *l, const void **pointers, float *staging)
{
  static const char *const projection[PROJECTIONS] = {"gate_proj", "up_proj", "down_proj"};
  const tinylm_config *c = &m->config;
  char name[TENSOR_NAME];
  cumoe_view_mut view;
  cumoe_projection parts[PROJECTIONS] = {0};
  for (int p = 0; p < PROJECTIONS; p++) {
    const void **tables = pointers + (int64_t)2 * p * c->experts;
    expert_table t = {.out = p == DOWN ? c->hidden : c->inter,
                      .in = p == DOWN ? c->inter : c->hidden,
                      .projection = &parts[p],
                      .codes = tables,
                      .scales = tables + c->experts};
    if (m->format.global && !device_matrix(m, CUMOE_F32, c->experts, 1, &t.global)) return false;
    if (!load_projection(m, index, projection[p], &t, staging)) return false;
  }
  snprintf(name, sizeof name, "model.layers.%d.mlp.gate.weight", (int)index);
  if (!load_matrix(m, name, c->experts, c->hidden, staging, &view)) return false;
  l->router = cumoe_const(view);
  cumoe_weights_desc desc = {.size = sizeof desc,
                             .experts = c->experts,
                             .hidden = c->hidden,
                             .inter = c->inter,
                             .gate_order = CUMOE_GATE_UP_SEPARATE,
                             .up_major = CUMOE_OUT_IN,
                             .down_major = CUMOE_OUT_IN,
                             .gate = parts[GATE],
                             .up = parts[UP],
                             .down = parts[DOWN],
                             .up_format = m->format,
                             .down_format = m->format,
                             .dtype = m->dtype};
  return ok(m, cumoe_weights_bind(m->context, &desc, &l->experts));
}

/* Elements of the largest matrix that is ever staged for the device. */
static int64_t staging_elements(const tinylm_config *c)
{
  const int64_t rows[] = {c->inter, c->experts, c->context, c->vocab, (int64_t)c->heads * c->head_dim};
  int64_t most = 0;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) most = rows[i] > most ? rows[i] : most;
  return most * (int64_t)c->hidden;
}

static bool load_weights(tinylm *m)
{
  const tinylm_config *c = &m->config;
  m->narrow = owned(m, staging_elements(c), sizeof *m->narrow);
  m->layers = owned(m, c->layers, sizeof *m->layers);
  const void **pointers = owned(m, (int64_t)2 * PROJECTIONS * c->experts, sizeof *pointers);
  float *staging = floats(m, staging_elements(c));
  if (!m->narrow || !m->layers || !pointers || !staging) return false;
  if (!device_matrix(m, m->dtype, c->inter, c->hidden, &m->dense_expert)) return false;
  for (int32_t i = 0; i < c->layers; i++)
    if (!load_attention(m, i, &m->layers[i], staging) || !load_experts(m, i, &m->layers[i], pointers, staging))
      return false;
  return dense(m, -1, "model.embed_tokens.weight", c->vocab, c->hidden, staging, &m->embed) &&
         dense(m, -1, "model.norm.weight", c->hidden, 0, staging, &m->norm) &&
         dense(m, -1, "lm_head.weight", c->vocab, c->hidden, staging, &m->head);
}

static bool make_plans(tinylm *m)
{
  const tinylm_config *c = &m->config;
  cumoe_moe_desc desc = {.size = sizeof desc,
                         .num_experts = c->experts,
                         .hidden = c->hidden,
                         .inter = c->inter,
                         .dtype = m->dtype,
                         .out_dtype = m->dtype,
                         .act = CUMOE_ACT_SILU,
                         .up_format = m->format,
                         .down_format = m->format,
                         .routing = c->renormalize ? cumoe_routing_qwen3(c->top_k) : cumoe_routing_qwen2(c->top_k)};
  const cumoe_moe_desc cache = {.size = sizeof cache,
                                .num_experts = 1,
                                .hidden = c->kv_heads * c->head_dim,
                                .inter = 8,
                                .dtype = m->dtype,
                                .routing = cumoe_routing_qwen3(1)};
  size_t bytes, more;
  if (!ok(m, cumoe_plan_create(m->context, &desc, &m->plan)) ||
      !ok(m, cumoe_plan_create(m->context, &cache, &m->cache)))
    return false;
  desc.out_dtype = CUMOE_F32;
  return ok(m, cumoe_plan_create(m->context, &desc, &m->alone)) &&
         ok(m, cumoe_plan_workspace(m->plan, c->context, &bytes)) &&
         ok(m, cumoe_plan_workspace(m->alone, c->context, &more)) &&
         device_matrix(m, CUMOE_U8, 1, (int64_t)(bytes > more ? bytes : more), &m->workspace);
}

static bool make_tables(tinylm *m)
{
  const int64_t t = m->config.context, half = m->config.head_dim / 2;
  float *cosine = floats(m, t * half), *sine = floats(m, t * half);
  if (!cosine || !sine) return false;
  for (int64_t p = 0; p < t; p++)
    for (int64_t i = 0; i < half; i++) {
      double angle = (double)p * pow(m->config.rope_base, -(double)i / (double)half);
      cosine[p * half + i] = (float)cos(angle);
      sine[p * half + i] = (float)sin(angle);
    }
  return device_matrix(m, CUMOE_F32, t, half, &m->cosine) && upload(m, m->cosine, cosine) &&
         device_matrix(m, CUMOE_F32, t, half, &m->sine) && upload(m, m->sine, sine);
}

static cumoe_view_mut integers(cumoe_view_mut of, int64_t at, int64_t count)
{
  return cumoe_vector_mut((int32_t *)of.data + at, CUMOE_I32, count);
}

/* Room for so many tokens; positions are as many as the cache has, of which the first ones are looked at. */
static bool make_pass(tinylm *m, int64_t tokens, pass *p)
{
  if (!device_matrix(m, CUMOE_I32, 1, tokens + TOLD + m->config.context, &p->all)) return false;
  p->tokens = integers(p->all, 0, tokens);
  p->length = integers(p->all, tokens, 1);
  p->count = integers(p->all, tokens + 1, 1);
  p->row = integers(p->all, tokens + 2, 1);
  p->positions = integers(p->all, tokens + TOLD, m->config.context);
  return true;
}

static bool pinned(tinylm *m, int64_t count, int32_t **to)
{
  void *data = NULL;
  const bool good = ok(m, cumoe_pinned_alloc(m->context, (size_t)count * sizeof **to, 0, &data));
  *to = data;
  return good;
}

/* What generating takes: noise by which tokens are drawn, and what goes to and fro meanwhile. */
static bool make_chooser(tinylm *m)
{
  for (int i = 0; i < AHEAD; i++)
    if (!ok(m, cumoe_event_create(m->context, 0, &m->taken[i])) ||
        !ok(m, cumoe_event_create(m->context, 0, &m->made[i])) || !pinned(m, 1 + TOLD + 1, &m->waiting[i]) ||
        !pinned(m, 1, &m->result[i]))
      return false;
  return device_matrix(m, CUMOE_F32, TINYLM_NOISE, m->config.vocab, &m->noise) &&
         device_matrix(m, CUMOE_F32, 1, m->config.vocab, &m->noise_row) &&
         device_matrix(m, CUMOE_F32, 1, 1, &m->chosen_weight);
}

static bool make_scratch(tinylm *m)
{
  const tinylm_config *c = &m->config;
  int64_t t = c->context, h = c->hidden, q = (int64_t)c->heads * c->head_dim, kv = (int64_t)c->kv_heads * c->head_dim;
  size_t room;
  if (!(m->host_x = floats(m, t * h)) || !(m->host_out = floats(m, t * h)) ||
      !(m->host_weights = floats(m, t * c->top_k)) || !(m->ids = owned(m, t * c->top_k, sizeof *m->ids)) ||
      !(m->told = owned(m, 2 * t + TOLD, sizeof *m->told)))
    return false;
  return ok(m, cumoe_matmul_prepare(m->context)) && ok(m, cumoe_matmul_workspace(m->context, &room)) &&
         device_matrix(m, CUMOE_U8, 1, (int64_t)room, &m->room) && device_matrix(m, m->dtype, t, h, &m->x) &&
         device_matrix(m, m->dtype, t, h, &m->middle) && device_matrix(m, m->dtype, t, h, &m->n) &&
         device_matrix(m, m->dtype, t, q, &m->q) && device_matrix(m, m->dtype, t, kv, &m->k) &&
         device_matrix(m, m->dtype, t, kv, &m->v) && device_matrix(m, m->dtype, t, q, &m->mix) &&
         device_matrix(m, m->dtype, 1, h, &m->last) && device_matrix(m, CUMOE_F32, t, c->vocab, &m->logits) &&
         device_matrix(m, CUMOE_I32, 1, 4 + t, &m->one_map) && make_pass(m, t, &m->many) && make_pass(m, 1, &m->one) &&
         device_matrix(m, m->dtype, t, h, &m->dev_x) && device_matrix(m, CUMOE_F32, t, h, &m->dev_out) &&
         device_matrix(m, CUMOE_I32, t, c->top_k, &m->dev_ids) &&
         device_matrix(m, CUMOE_F32, t, c->top_k, &m->dev_weights) &&
         device_matrix(m, CUMOE_I64, c->layers, c->experts, &m->dev_load) && make_tables(m) && make_chooser(m);
}

static bool load_model(tinylm *m, const char *folder)
{
  char path[1024];
  if (m->dtype != CUMOE_F32 && m->dtype != CUMOE_BF16) return failed(m, "dtype is neither f32 nor bf16");
  if (snprintf(path, sizeof path, "%s/config.json", folder) >= (int)sizeof path) return failed(m, "path too long");
  if (!read_config(m, path)) return false;
  if (snprintf(path, sizeof path, "%s/model.safetensors", folder) >= (int)sizeof path)
    return failed(m, "path too long");
  return safetensors_open(path, &m->file, m->error, sizeof m->error) && load_weights(m) && make_plans(m) &&
         make_scratch(m);
}

tinylm *tinylm_create(cumoe_context context, const char *folder, cumoe_dtype dtype, char *error, size_t error_bytes)
{
  const cumoe_format dense = {0};
  return tinylm_create_quantised(context, folder, dtype, &dense, error, error_bytes);
}

tinylm *tinylm_create_quantised(cumoe_context context, const char *folder, cumoe_dtype dtype,
                                const cumoe_format *format, char *error, size_t error_bytes)
{
  tinylm *m = calloc(1, sizeof *m);
  if (!m) {
    snprintf(error, error_bytes, "out of memory");
    return NULL;
  }
  m->context = context;
  m->dtype = dtype;
  m->format = *format;
  bool good = ok(m, cumoe_stream_create(context, 0, &m->stream)) && load_model(m, folder);
  safetensors_close(&m->file);
  if (good) return m;
  snprintf(error, error_bytes, "%s", m->error);
  tinylm_destroy(m);
  return NULL;
}

void tinylm_destroy(tinylm *m)
{
  if (!m) return;
  CUMOE_IGNORE(cumoe_synchronize(m->context, m->stream));
  cumoe_graph_destroy(m->context, m->graph);
  for (int i = 0; i < AHEAD; i++) {
    cumoe_event_destroy(m->context, m->taken[i]);
    cumoe_event_destroy(m->context, m->made[i]);
    cumoe_pinned_free(m->context, m->waiting[i]);
    cumoe_pinned_free(m->context, m->result[i]);
  }
  for (int32_t i = 0; m->layers && i < m->config.layers; i++) cumoe_weights_destroy(m->layers[i].experts);
  cumoe_plan_destroy(m->plan);
  cumoe_plan_destroy(m->alone);
  cumoe_plan_destroy(m->cache);
  for (int32_t i = 0; i < m->buffer_count; i++) cumoe_buffer_free(&m->buffers[i]);
  for (int32_t i = 0; i < m->memory_count; i++) free(m->memory[i]);
  cumoe_stream_destroy(m->context, m->stream);
  free(m->buffers);
  free(m->memory);
  free(m);
}

/* ---- the dense parts: of the first `count` rows ----------------------------------------------------- */

static cumoe_view_mut first_rows(cumoe_view_mut v, int64_t count)
{
  v.rows = count;
  return v;
}

/* y = x w^T */
static bool linear(tinylm *m, cumoe_view_mut x, cumoe_view_mut w, cumoe_view_mut y)
{
  const cumoe_matmul_args args = {.size = sizeof args,
                                  .flags = CUMOE_MATMUL_TRANSPOSE_B,
                                  .a = cumoe_const(x),
                                  .b = cumoe_const(w),
                                  .c = y,
                                  .workspace = m->room};
  return ok(m, cumoe_matmul(m->context, &args, m->stream));
}

static bool norm(tinylm *m, cumoe_view_mut x, cumoe_view_mut w, cumoe_view_mut y)
{
  return ok(m, cumoe_rmsnorm(m->context, cumoe_const(x), cumoe_const(w), (float)m->config.norm_eps, y, m->stream));
}

static cumoe_view_mut heads_of(const tinylm *m, cumoe_view_mut v)
{
  v.rows *= v.cols / m->config.head_dim;
  v.cols = v.ld = m->config.head_dim;
  return v;
}

/* Norm of each head, then its position's angles. */
static bool turn(tinylm *m, const pass *p, cumoe_view_mut x, cumoe_view_mut weight)
{
  const cumoe_rope_args args = {.size = sizeof args,
                                .heads = (int32_t)(x.cols / m->config.head_dim),
                                .head_dim = m->config.head_dim,
                                .x = cumoe_const(x),
                                .positions = cumoe_const(integers(p->positions, 0, x.rows)),
                                .cosine = cumoe_const(m->cosine),
                                .sine = cumoe_const(m->sine),
                                .y = x};
  return norm(m, heads_of(m, x), weight, heads_of(m, x)) && ok(m, cumoe_rope(m->context, &args, m->stream));
}

/* Row i of `rows` to the row of the cache that is its position, which the device knows: a permutation. */
static bool put_in_cache(tinylm *m, const pass *p, cumoe_view_mut rows, cumoe_view_mut cache)
{
  const int64_t t = m->config.context;
  const cumoe_route route = {.size = sizeof route,
                             .counts = integers(m->one_map, 0, 1),
                             .offsets = integers(m->one_map, 1, 2),
                             .row_pair = integers(m->one_map, 4, t),
                             .slot_row = cumoe_matrix_mut(p->positions.data, CUMOE_I32, t, 1, 1),
                             .device_tokens = cumoe_const(p->count)};
  return ok(m, cumoe_permute(m->cache, cumoe_const(rows), &route, cache, m->stream));
}

/* x becomes middle. */
static bool attention(tinylm *m, const layer *l, const pass *p, int64_t count)
{
  const cumoe_view_mut n = first_rows(m->n, count), q = first_rows(m->q, count), mix = first_rows(m->mix, count),
                       x = first_rows(m->x, count), middle = first_rows(m->middle, count);
  const cumoe_attention_args args = {.size = sizeof args,
                                     .flags = CUMOE_ATTENTION_CAUSAL,
                                     .heads = m->config.heads,
                                     .kv_heads = m->config.kv_heads,
                                     .head_dim = m->config.head_dim,
                                     .q = cumoe_const(q),
                                     .k = cumoe_const(l->keys),
                                     .v = cumoe_const(l->values),
                                     .k_lengths = cumoe_const(p->length),
                                     .out = mix};
  return norm(m, x, l->input_norm, n) && linear(m, n, l->q, q) && linear(m, n, l->k, first_rows(m->k, count)) &&
         linear(m, n, l->v, first_rows(m->v, count)) && turn(m, p, q, l->q_norm) &&
         turn(m, p, first_rows(m->k, count), l->k_norm) && put_in_cache(m, p, m->k, l->keys) &&
         put_in_cache(m, p, m->v, l->values) && ok(m, cumoe_attention(m->context, &args, m->stream)) &&
         linear(m, mix, l->o, middle) &&
         ok(m, cumoe_add(m->context, cumoe_const(middle), cumoe_const(x), middle, m->stream));
}

/* ---- the MoE layer --------------------------------------------------------------------------------- */

bool tinylm_moe(tinylm *m, int32_t index, const float *in, int32_t count, float *out, int32_t *ids, float *weights)
{
  cumoe_view_mut x, y, dev_ids, dev_weights, load;
  if (index < 0 || index >= m->config.layers) return failed(m, "there is no layer %d", (int)index);
  if (!ok(m, cumoe_view_rows_mut(m->dev_x, 0, count, &x)) || !ok(m, cumoe_view_rows_mut(m->dev_out, 0, count, &y)) ||
      !ok(m, cumoe_view_rows_mut(m->dev_ids, 0, count, &dev_ids)) ||
      !ok(m, cumoe_view_rows_mut(m->dev_weights, 0, count, &dev_weights)) ||
      !ok(m, cumoe_view_rows_mut(m->dev_load, index, 1, &load)) || !upload(m, x, in))
    return false;
  cumoe_moe_args args = {.size = sizeof args,
                         .x = cumoe_const(x),
                         .router_weight = m->layers[index].router,
                         .out = y,
                         .load = load,
                         .workspace = m->workspace};
  if (ids) args.ids_out = dev_ids;
  if (weights) args.weights_out = dev_weights;
  return ok(m, cumoe_moe_forward(m->alone, m->layers[index].experts, &args, m->stream)) && download(m, out, y) &&
         (!ids || download(m, ids, dev_ids)) && (!weights || download(m, weights, dev_weights));
}

/* To the host, widened. */
static bool read_floats(tinylm *m, cumoe_view_mut from, float *to)
{
  const int64_t count = from.rows * from.cols;
  if (m->dtype == CUMOE_F32) return download(m, to, from);
  if (!download(m, m->narrow, from)) return false;
  for (int64_t i = 0; i < count; i++) to[i] = bf16_float(m->narrow[i]);
  return true;
}

/* Runs the layer alone, for who watches. */
static bool show(tinylm *m, int32_t index, int32_t count)
{
  if (!read_floats(m, first_rows(m->n, count), m->host_x) ||
      !tinylm_moe(m, index, m->host_x, count, m->host_out, m->ids, m->host_weights))
    return false;
  const tinylm_seen seen = {index, count, m->host_x, m->host_out, m->ids, m->host_weights};
  m->observer(m->user, &seen);
  return true;
}

/* middle becomes x. A layer that was shown has counted its tokens. */
static bool moe(tinylm *m, int32_t index, int32_t count)
{
  const cumoe_view_mut middle = first_rows(m->middle, count), n = first_rows(m->n, count);
  cumoe_moe_args args = {.size = sizeof args,
                         .x = cumoe_const(n),
                         .router_weight = m->layers[index].router,
                         .residual = cumoe_const(middle),
                         .out = first_rows(m->x, count),
                         .workspace = m->workspace};
  if (!m->observer && !ok(m, cumoe_view_rows_mut(m->dev_load, index, 1, &args.load))) return false;
  return norm(m, middle, m->layers[index].post_norm, n) && (!m->observer || show(m, index, count)) &&
         ok(m, cumoe_moe_forward(m->plan, m->layers[index].experts, &args, m->stream));
}

/* ---- the model ------------------------------------------------------------------------------------- */

static bool run_layers(tinylm *m, const pass *p, int32_t count)
{
  if (!ok(m, cumoe_embedding(m->context, cumoe_const(m->embed), cumoe_const(integers(p->tokens, 0, count)),
                             first_rows(m->x, count), m->stream)))
    return false;
  for (int32_t i = 0; i < m->config.layers; i++)
    if (!attention(m, &m->layers[i], p, count) || !moe(m, i, count)) return false;
  return true;
}

/* Logits, in f32: those that a router would have, of as many experts as there are tokens. */
static bool make_logits(tinylm *m, cumoe_view_mut x, cumoe_view bias, cumoe_view_mut to)
{
  return ok(m, cumoe_router(m->context, cumoe_const(x), cumoe_const(m->head), bias, to, m->stream));
}

bool tinylm_forward(tinylm *m, const int32_t *tokens, int32_t count, int32_t rows, float *logits)
{
  const tinylm_config *c = &m->config;
  int32_t *told = m->told;
  cumoe_view_mut end;
  if (count < 1 || count > c->context - m->position)
    return failed(m, "%d tokens do not fit after position %d of %d", (int)count, (int)m->position, (int)c->context);
  if (rows < 0 || rows > count) return failed(m, "logits of %d of %d tokens", (int)rows, (int)count);
  for (int32_t t = 0; t < count; t++) {
    if (tokens[t] < 0 || tokens[t] >= c->vocab) return failed(m, "token %d is outside the vocabulary", (int)tokens[t]);
    told[t] = tokens[t];
    told[c->context + TOLD + t] = m->position + t;
  }
  told[c->context] = m->position + count;
  told[c->context + 1] = count;
  if (!ok(m, cumoe_copy_from_host(m->context, m->many.all, told, (size_t)m->many.all.cols * sizeof *told, m->stream)) ||
      !run_layers(m, &m->many, count) || !ok(m, cumoe_view_rows_mut(m->x, count - 1, 1, &end)) ||
      !norm(m, end, m->norm, m->last))
    return false;
  m->position += count;
  if (rows == 0) return ok(m, cumoe_synchronize(m->context, m->stream));
  const cumoe_view none = {0};
  const cumoe_view_mut last = first_rows(m->n, rows), to = first_rows(m->logits, rows);
  return ok(m, cumoe_view_rows_mut(m->x, count - rows, rows, &end)) && norm(m, end, m->norm, last) &&
         make_logits(m, last, none, to) && download(m, logits, to);
}

int32_t tinylm_likeliest(const float *logits, int32_t vocab)
{
  int32_t best = 0;
  for (int32_t i = 1; i < vocab; i++)
    if (logits[i] > logits[best]) best = i;
  return best;
}

/* ---- generation: tokens are chosen on the device, one graph each ------------------------------------- */

/* The largest logit, noise added, is a token drawn with its probability.    Maddison and others, arXiv 1411.0030 */
static bool choose_and_run(tinylm *m)
{
  const cumoe_routing best = {.score = CUMOE_SCORE_IDENTITY, .top_k = 1};
  const cumoe_view none = {0};
  return ok(m, cumoe_embedding(m->context, cumoe_const(m->noise), cumoe_const(m->one.row), m->noise_row, m->stream)) &&
         make_logits(m, m->last, cumoe_const(m->noise_row), first_rows(m->logits, 1)) &&
         ok(m, cumoe_gate(m->context, &best, cumoe_const(first_rows(m->logits, 1)), none, m->one.tokens,
                          m->chosen_weight, m->stream)) &&
         run_layers(m, &m->one, 1) && norm(m, first_rows(m->x, 1), m->norm, m->last);
}

static bool capture(tinylm *m)
{
  if (!m->stream || m->graph) return true;
  if (!ok(m, cumoe_graph_begin(m->context, m->stream))) return false;
  const bool good = choose_and_run(m), ended = ok(m, cumoe_graph_end(m->context, m->stream, &m->graph));
  if (!good && ended) { /* a part of it */
    CUMOE_IGNORE(cumoe_graph_destroy(m->context, m->graph));
    m->graph = NULL;
  }
  return good && ended;
}

static bool make_noise(tinylm *m, int32_t rows, double temperature, uint64_t *state)
{
  const int64_t count = (int64_t)rows * m->config.vocab;
  float *noise = malloc((size_t)count * sizeof *noise);
  if (!noise) return failed(m, "out of memory");
  for (int64_t i = 0; i < count; i++) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    const double u = ((double)((z ^ z >> 31) >> 11) + .5) * 0x1p-53;
    noise[i] = (float)(-temperature * log(-log(u)));
  }
  const bool good = upload(m, first_rows(m->noise, rows), noise) && ok(m, cumoe_synchronize(m->context, m->stream));
  free(noise);
  return good;
}

/* Token i of a generation is on its way. */
static bool begin_token(tinylm *m, int32_t i)
{
  const int slot = i % AHEAD;
  int32_t *told = m->waiting[slot];
  if (!ok(m, cumoe_event_synchronize(m->context, m->taken[slot]))) return false;
  const int32_t numbers[] = {0, m->position + 1, 1, i, m->position}; /* as struct pass has them */
  memcpy(told, numbers, sizeof numbers);
  if (!ok(m,
          cumoe_copy_from_host(m->context, integers(m->one.all, 0, 1 + TOLD + 1), told, sizeof numbers, m->stream)) ||
      !ok(m, cumoe_event_record(m->context, m->taken[slot], m->stream)))
    return false;
  const bool good = m->graph ? ok(m, cumoe_graph_launch(m->context, m->graph, m->stream)) : choose_and_run(m);
  m->position++;
  return good &&
         ok(m,
            cumoe_copy_to_host(m->context, m->result[slot], sizeof(int32_t), cumoe_const(m->one.tokens), m->stream)) &&
         ok(m, cumoe_event_record(m->context, m->made[slot], m->stream));
}

bool tinylm_generate(tinylm *m, int32_t count, double temperature, uint64_t *state, int32_t *tokens,
                     void (*tell)(void *user, int32_t token), void *user)
{
  if (count < 0 || count > TINYLM_NOISE || m->position == 0 || count > m->config.context - m->position)
    return failed(m, "%d tokens cannot be generated after position %d of %d", (int)count, (int)m->position,
                  (int)m->config.context);
  if (!make_noise(m, count, temperature, state) || !capture(m)) return false;
  for (int32_t begun = 0, ended = 0; ended < count; ended++) {
    for (; begun < count && begun < ended + AHEAD; begun++)
      if (!begin_token(m, begun)) return false;
    if (!ok(m, cumoe_event_synchronize(m->context, m->made[ended % AHEAD]))) return false;
    tokens[ended] = *m->result[ended % AHEAD];
    if (tell) tell(user, tokens[ended]);
  }
  return true;
}

bool tinylm_load(tinylm *m, int64_t *load)
{
  return download(m, load, m->dev_load);
}

void tinylm_observe(tinylm *m, void (*observer)(void *, const tinylm_seen *), void *user)
{
  m->observer = observer;
  m->user = user;
}

const tinylm_config *tinylm_get_config(const tinylm *m)
{
  return &m->config;
}
int64_t tinylm_expert_bytes(const tinylm *m)
{
  return m->expert_bytes;
}
const char *tinylm_error(const tinylm *m)
{
  return m->error;
}
int32_t tinylm_position(const tinylm *m)
{
  return m->position;
}
void tinylm_rewind(tinylm *m)
{
  m->position = 0;
}
