#include "tinylm.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"

typedef struct layer {
  float *input_norm, *q, *k, *v, *o, *q_norm, *k_norm, *post_norm; /* [out, in] row-major */
  float *keys, *values;                                            /* [context, kv_heads * head_dim] */
  cumoe_view router;                                               /* [experts, hidden] on the device */
  cumoe_weights experts;
} layer;

/* Host memory and device buffers are freed from two lists: whatever step of loading fails, nothing is lost.
 */
struct tinylm {
  tinylm_config config;
  cumoe_context context;
  cumoe_dtype dtype;
  cumoe_format format; /* of the experts' weights */
  int64_t expert_bytes;
  cumoe_plan plan;
  safetensors file; /* open while loading */
  layer *layers;
  float *embed, *norm, *head;
  float *cosine, *sine; /* [context, head_dim / 2] */
  float *x, *n, *q, *mix, *out, *scores, *weights;
  int32_t *ids;
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
  if (!ok(m, cumoe_buffer_alloc(m->context, dtype, rows, cols, NULL, &buffer))) return false;
  m->buffers[m->buffer_count++] = buffer;
  *view = cumoe_buffer_view_mut(buffer);
  return true;
}

/* Host f32 to a device matrix of the model's type; the staging block is large enough for every matrix. */
static bool upload(tinylm *m, cumoe_view_mut to, const float *from)
{
  int64_t count = to.rows * to.cols;
  if (to.dtype == CUMOE_F32)
    return ok(m, cumoe_copy_from_host(m->context, to, from, (size_t)count * sizeof *from, NULL));
  for (int64_t i = 0; i < count; i++) m->narrow[i] = float_bf16(from[i]);
  return ok(m, cumoe_copy_from_host(m->context, to, m->narrow, (size_t)count * sizeof *m->narrow, NULL));
}

static bool download(tinylm *m, void *to, cumoe_view_mut from)
{
  size_t bytes = (size_t)(from.rows * from.cols) * cumoe_dtype_bytes((cumoe_dtype)from.dtype);
  return ok(m, cumoe_copy_to_host(m->context, to, bytes, cumoe_const(from), NULL));
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
             config_int(m, root, "vocab_size", 1 << 20, &c->vocab) &&
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

/* cols 0: a vector */
static float *dense(tinylm *m, int32_t index, const char *suffix, int64_t rows, int64_t cols)
{
  char name[TENSOR_NAME];
  if (index < 0)
    snprintf(name, sizeof name, "%s", suffix);
  else
    snprintf(name, sizeof name, "model.layers.%d.%s", (int)index, suffix);
  float *block = floats(m, cols ? rows * cols : rows);
  return block && read_tensor(m, name, rows, cols, block) ? block : NULL;
}

static bool load_attention(tinylm *m, int32_t index, layer *l)
{
  const tinylm_config *c = &m->config;
  int64_t h = c->hidden, d = c->head_dim, q = d * c->heads, kv = d * c->kv_heads;
  return (l->input_norm = dense(m, index, "input_layernorm.weight", h, 0)) &&
         (l->q = dense(m, index, "self_attn.q_proj.weight", q, h)) &&
         (l->k = dense(m, index, "self_attn.k_proj.weight", kv, h)) &&
         (l->v = dense(m, index, "self_attn.v_proj.weight", kv, h)) &&
         (l->o = dense(m, index, "self_attn.o_proj.weight", h, q)) &&
         (l->q_norm = dense(m, index, "self_attn.q_norm.weight", d, 0)) &&
         (l->k_norm = dense(m, index, "self_attn.k_norm.weight", d, 0)) &&
         (l->post_norm = dense(m, index, "post_attention_layernorm.weight", h, 0)) &&
         (l->keys = floats(m, c->context * kv)) && (l->values = floats(m, c->context * kv));
}

/* One matrix of the checkpoint, in a buffer of its own. */
static bool load_matrix(tinylm *m, const char *name, int64_t rows, int64_t cols, float *staging, cumoe_view_mut *view)
{
  return read_tensor(m, name, rows, cols, staging) && device_matrix(m, m->dtype, rows, cols, view) &&
         upload(m, *view, staging);
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
      !ok(m, cumoe_quantize_weights(m->context, &a, NULL)))
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
           quantise_expert(m, t, expert, cumoe_const(dense)) && ok(m, cumoe_synchronize(m->context, NULL));
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
  int64_t wide = c->inter > c->experts ? c->inter : c->experts;
  return (wide > c->context ? wide : c->context) * (int64_t)c->hidden;
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
    if (!load_attention(m, i, &m->layers[i]) || !load_experts(m, i, &m->layers[i], pointers, staging)) return false;
  return (m->embed = dense(m, -1, "model.embed_tokens.weight", c->vocab, c->hidden)) &&
         (m->norm = dense(m, -1, "model.norm.weight", c->hidden, 0)) &&
         (m->head = dense(m, -1, "lm_head.weight", c->vocab, c->hidden));
}

static bool make_plan(tinylm *m)
{
  const tinylm_config *c = &m->config;
  cumoe_moe_desc desc = {.size = sizeof desc,
                         .num_experts = c->experts,
                         .hidden = c->hidden,
                         .inter = c->inter,
                         .dtype = m->dtype,
                         .out_dtype = CUMOE_F32, /* the residual stream is f32 on the host: no need to round here */
                         .act = CUMOE_ACT_SILU,
                         .up_format = m->format,
                         .down_format = m->format,
                         .routing = c->renormalize ? cumoe_routing_qwen3(c->top_k) : cumoe_routing_qwen2(c->top_k)};
  size_t bytes;
  return ok(m, cumoe_plan_create(m->context, &desc, &m->plan)) &&
         ok(m, cumoe_plan_workspace(m->plan, c->context, &bytes)) &&
         device_matrix(m, CUMOE_U8, 1, (int64_t)bytes, &m->workspace);
}

static bool make_scratch(tinylm *m)
{
  const tinylm_config *c = &m->config;
  int64_t t = c->context, h = c->hidden, q = (int64_t)c->heads * c->head_dim, half = c->head_dim / 2;
  if (!(m->x = floats(m, t * h)) || !(m->n = floats(m, t * h)) || !(m->q = floats(m, t * q)) ||
      !(m->mix = floats(m, t * q)) || !(m->out = floats(m, t * h)) || !(m->scores = floats(m, t)) ||
      !(m->weights = floats(m, t * c->top_k)) || !(m->ids = owned(m, t * c->top_k, sizeof *m->ids)) ||
      !(m->cosine = floats(m, t * half)) || !(m->sine = floats(m, t * half)))
    return false;
  for (int64_t p = 0; p < t; p++)
    for (int64_t i = 0; i < half; i++) {
      double angle = (double)p * pow(c->rope_base, -(double)i / (double)half);
      m->cosine[p * half + i] = (float)cos(angle);
      m->sine[p * half + i] = (float)sin(angle);
    }
  return device_matrix(m, m->dtype, t, h, &m->dev_x) && device_matrix(m, CUMOE_F32, t, h, &m->dev_out) &&
         device_matrix(m, CUMOE_I32, t, c->top_k, &m->dev_ids) &&
         device_matrix(m, CUMOE_F32, t, c->top_k, &m->dev_weights) &&
         device_matrix(m, CUMOE_I64, c->layers, c->experts, &m->dev_load) &&
         ok(m, cumoe_fill(m->context, m->dev_load, 0, NULL));
}

static bool load_model(tinylm *m, const char *folder)
{
  char path[1024];
  if (m->dtype != CUMOE_F32 && m->dtype != CUMOE_BF16) return failed(m, "dtype is neither f32 nor bf16");
  if (snprintf(path, sizeof path, "%s/config.json", folder) >= (int)sizeof path) return failed(m, "path too long");
  if (!read_config(m, path)) return false;
  if (snprintf(path, sizeof path, "%s/model.safetensors", folder) >= (int)sizeof path)
    return failed(m, "path too long");
  return safetensors_open(path, &m->file, m->error, sizeof m->error) && load_weights(m) && make_plan(m) &&
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
  bool good = load_model(m, folder);
  safetensors_close(&m->file);
  if (good) return m;
  snprintf(error, error_bytes, "%s", m->error);
  tinylm_destroy(m);
  return NULL;
}

void tinylm_destroy(tinylm *m)
{
  if (!m) return;
  for (int32_t i = 0; m->layers && i < m->config.layers; i++) cumoe_weights_destroy(m->layers[i].experts);
  cumoe_plan_destroy(m->plan);
  for (int32_t i = 0; i < m->buffer_count; i++) cumoe_buffer_free(&m->buffers[i]);
  for (int32_t i = 0; i < m->memory_count; i++) free(m->memory[i]);
  free(m->buffers);
  free(m->memory);
  free(m);
}

/* ---- the dense parts ------------------------------------------------------------------------------- */

/* Four chains: a single one would wait for the latency of every addition. */
static float dot(const float *a, const float *b, int64_t n)
{
  double sum[4] = {0};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int c = 0; c < 4; c++) sum[c] += (double)a[i + c] * (double)b[i + c];
  for (; i < n; i++) sum[0] += (double)a[i] * (double)b[i];
  return (float)(sum[0] + sum[1] + (sum[2] + sum[3]));
}

/* out[r] = w in[r], w [n, k] */
static void linear(const float *in, const float *w, int64_t rows, int64_t n, int64_t k, float *out)
{
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < n; i++) out[r * n + i] = dot(in + r * k, w + i * k, k);
}

static void rms_norm(const float *in, const float *w, int64_t rows, int64_t n, double eps, float *out)
{
  for (int64_t r = 0; r < rows; r++) {
    const float *row = in + r * n;
    double scale = 1 / sqrt((double)dot(row, row, n) / (double)n + eps);
    for (int64_t i = 0; i < n; i++) out[r * n + i] = (float)((double)row[i] * scale * (double)w[i]);
  }
}

static void add(float *to, const float *from, int64_t n)
{
  for (int64_t i = 0; i < n; i++) to[i] += from[i];
}

/* Turns the pairs (i, i + half) of each head by the position's angles. */
static void rotate(const tinylm *m, float *rows, int64_t count, int64_t heads)
{
  int64_t d = m->config.head_dim, half = d / 2;
  for (int64_t t = 0; t < count; t++) {
    const float *cosine = m->cosine + (m->position + t) * half, *sine = m->sine + (m->position + t) * half;
    for (int64_t h = 0; h < heads; h++) {
      float *v = rows + (t * heads + h) * d;
      for (int64_t i = 0; i < half; i++) {
        float a = v[i], b = v[i + half];
        v[i] = a * cosine[i] - b * sine[i];
        v[i + half] = b * cosine[i] + a * sine[i];
      }
    }
  }
}

/* One head of one query against the first `length` cached positions: softmax(q k / sqrt d) v. */
static void attend(const tinylm *m, const layer *l, const float *q, int64_t kv_head, int64_t length, float *out)
{
  const tinylm_config *c = &m->config;
  int64_t d = c->head_dim, ld = d * c->kv_heads;
  float *scores = m->scores, most = -INFINITY;
  double total = 0, scale = 1 / sqrt((double)d);
  for (int64_t p = 0; p < length; p++) {
    scores[p] = (float)(scale * (double)dot(q, l->keys + p * ld + kv_head * d, d));
    most = fmaxf(most, scores[p]);
  }
  for (int64_t p = 0; p < length; p++) total += (double)(scores[p] = expf(scores[p] - most));
  for (int64_t i = 0; i < d; i++) out[i] = 0;
  for (int64_t p = 0; p < length; p++)
    for (int64_t i = 0; i < d; i++) out[i] += scores[p] * l->values[p * ld + kv_head * d + i];
  for (int64_t i = 0; i < d; i++) out[i] = (float)((double)out[i] / total);
}

static void attention(tinylm *m, const layer *l, int64_t count)
{
  const tinylm_config *c = &m->config;
  int64_t h = c->hidden, d = c->head_dim, kv = d * c->kv_heads, shared_by = c->heads / c->kv_heads;
  float *keys = l->keys + m->position * kv, *values = l->values + m->position * kv;
  rms_norm(m->x, l->input_norm, count, h, c->norm_eps, m->n);
  linear(m->n, l->q, count, d * c->heads, h, m->q);
  linear(m->n, l->k, count, kv, h, keys);
  linear(m->n, l->v, count, kv, h, values);
  rms_norm(m->q, l->q_norm, count * c->heads, d, c->norm_eps, m->q);
  rms_norm(keys, l->k_norm, count * c->kv_heads, d, c->norm_eps, keys);
  rotate(m, m->q, count, c->heads);
  rotate(m, keys, count, c->kv_heads);
  for (int64_t t = 0; t < count; t++)
    for (int64_t head = 0; head < c->heads; head++) {
      int64_t at = (t * c->heads + head) * d;
      attend(m, l, m->q + at, head / shared_by, m->position + t + 1, m->mix + at);
    }
  linear(m->mix, l->o, count, h, d * c->heads, m->out);
  add(m->x, m->out, count * h);
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
  return ok(m, cumoe_moe_forward(m->plan, m->layers[index].experts, &args, NULL)) && download(m, out, y) &&
         (!ids || download(m, ids, dev_ids)) && (!weights || download(m, weights, dev_weights));
}

static bool moe(tinylm *m, int32_t index, int32_t count)
{
  int64_t h = m->config.hidden;
  bool watched = m->observer != NULL;
  rms_norm(m->x, m->layers[index].post_norm, count, h, m->config.norm_eps, m->n);
  if (!tinylm_moe(m, index, m->n, count, m->out, watched ? m->ids : NULL, watched ? m->weights : NULL)) return false;
  if (watched) {
    tinylm_seen seen = {index, count, m->n, m->out, m->ids, m->weights};
    m->observer(m->user, &seen);
  }
  add(m->x, m->out, count * h);
  return true;
}

/* ---- the model ------------------------------------------------------------------------------------- */

bool tinylm_forward(tinylm *m, const int32_t *tokens, int32_t count, int32_t rows, float *logits)
{
  const tinylm_config *c = &m->config;
  int64_t h = c->hidden;
  if (count < 1 || count > c->context - m->position)
    return failed(m, "%d tokens do not fit after position %d of %d", (int)count, (int)m->position, (int)c->context);
  if (rows < 0 || rows > count) return failed(m, "logits of %d of %d tokens", (int)rows, (int)count);
  for (int32_t t = 0; t < count; t++) {
    if (tokens[t] < 0 || tokens[t] >= c->vocab) return failed(m, "token %d is outside the vocabulary", (int)tokens[t]);
    memcpy(m->x + t * h, m->embed + tokens[t] * h, (size_t)h * sizeof *m->x);
  }
  for (int32_t i = 0; i < c->layers; i++) {
    attention(m, &m->layers[i], count);
    if (!moe(m, i, count)) return false;
  }
  m->position += count;
  rms_norm(m->x + (count - rows) * h, m->norm, rows, h, c->norm_eps, m->n);
  linear(m->n, m->head, rows, c->vocab, h, logits);
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
