/*
 * Writes the tune file of this GPU (host/tune/). Every row of the kernel table that can serve a stage is timed, forced
 * through the public call, over layers and token counts; the scale (rows an active expert; router: T E / 256) is cut
 * where another row becomes the better one. Then the layer is timed on both sides of each limit. The library itself
 * never times anything. What is not asked for stays as the file has it.
 *
 * Weights with scales are timed by the whole layer: a stage alone makes no codes of activations. A switch has to pay
 * for itself, so that noise makes no thresholds.
 */
#include "bench.h"
#include "../host/choice.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_POINTS = 64, MAX_CHOICES = 24 };

/* ---- what is measured ------------------------------------------------------------------------------ */

/* An operation with a class of weights, and the layout that other kernels serve. Of a class with scales, each kind of
 * --format that kind_names has. */
typedef struct family {
  const char *title, *models;
  operation op;
  weights_class weights;
  bool in_out, no_maps; /* no_maps: weights that tensor maps cannot describe */
} family;

#define LARGE "mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b gpt-oss-120b deepseek-v3"
#define TWO   "qwen3-235b-a22b mixtral-8x7b"
#define GEMMS(OP)                                                                                                      \
  {"K-major", LARGE, OP, WEIGHTS_w16, false, false},                                                                   \
      {"K-major, not by tensor maps", TWO, OP, WEIGHTS_w16, false, true},                                              \
      {"N-major", LARGE, OP, WEIGHTS_w16, true, false},                                                                \
      {"N-major, not by tensor maps", TWO, OP, WEIGHTS_w16, true, true},                                               \
      {"", "qwen3-30b-a3b", OP, WEIGHTS_f32, false, false}, {"", LARGE, OP, WEIGHTS_f8, false, false},                 \
      {"", LARGE, OP, WEIGHTS_s8, false, false},                                                                       \
  {                                                                                                                    \
    "", LARGE, OP, WEIGHTS_w4, false, false                                                                            \
  }
static const family families[] = {
    {"", LARGE, OP_router, WEIGHTS_w16, false, false},
    {"not by tensor maps", LARGE, OP_router, WEIGHTS_w16, false, true},
    {"", "qwen3-30b-a3b mixtral-8x7b", OP_router, WEIGHTS_f32, false, false},
    GEMMS(OP_up),
    GEMMS(OP_down),
};
enum { FAMILIES = sizeof families / sizeof *families };

static const char *const class_names[WEIGHTS_CLASSES] = {"w16", "f32", "f8", "s8", "w4"};
static const char kind_names[] = "bf16,fp8,int8,int4,mxfp4";

static bool has_scales(weights_class weights)
{
  return weights != WEIGHTS_w16 && weights != WEIGHTS_f32;
}

/* Of activations; router: its weights' class is their own. */
static cumoe_dtype dtype_of(const family *f)
{
  return f->weights == WEIGHTS_f32 && f->op != OP_router ? CUMOE_F32 : CUMOE_BF16;
}

static item item_of(const family *f)
{
  return f->op == OP_router ? ITEM_router : f->op == OP_up ? ITEM_up : ITEM_down;
}

/* A line to be: what a tune file calls a kernel. */
typedef struct choice {
  int32_t form, bm, bn;
} choice;

/* What the kernels cost at one place of the scale: sums over the layers of log(time / the least time). */
typedef struct point {
  int64_t rows;
  int32_t layers;
  double cost[MAX_CHOICES];
} point;

/* behind: of the layer that is timed, what more rows only leave further behind. */
typedef struct samples {
  choice choice[MAX_CHOICES];
  bool behind[MAX_CHOICES];
  int32_t choices;
  point points[MAX_POINTS];
  int32_t count;
} samples;

static const double UNABLE = 1e6, SWITCH = 0.02;

static point *point_at(samples *s, int64_t rows)
{
  for (int32_t i = 0; i < s->count; ++i)
    if (s->points[i].rows == rows) return &s->points[i];
  if (s->count == MAX_POINTS) return NULL;
  s->points[s->count] = (point){.rows = rows};
  return &s->points[s->count++];
}

/* A kernel of a grouped product that takes more than twice the least time, its tiles lower than an expert has rows,
 * will not be the best of more rows: thin reads weights anew for each 8 rows. */
static void add_times(samples *s, operation op, int64_t rows, const double *us)
{
  double least = HUGE_VAL;
  for (int32_t i = 0; i < s->choices; ++i)
    if (us[i] > 0 && us[i] < least) least = us[i];
  point *p = isfinite(least) ? point_at(s, rows) : NULL;
  if (!p) return;
  p->layers++;
  for (int32_t i = 0; i < s->choices; ++i) {
    p->cost[i] += us[i] > 0 ? log(us[i] / least) : UNABLE;
    s->behind[i] = s->behind[i] || (op != OP_router && us[i] > 2 * least && s->choice[i].bm < rows);
  }
}

/* The place on the table's scale. */
static int64_t rows_of(const machine *m, const family *f, const shape *s, int64_t tokens)
{
  const op_shape o = {.op = f->op,
                      .tokens = tokens,
                      .rows = tokens * s->top_k,
                      .experts = s->experts,
                      .n = f->op == OP_up ? s->inter : s->hidden};
  return tune_scale(m, &o);
}

static int64_t tokens_of(const family *f, const shape *s, int64_t rows)
{
  if (f->op == OP_router) return rows * 256 / s->experts;
  return rows > 0 ? rows * s->experts / s->top_k : 1;
}

/* Whether a row of the table is of the family, for weights of this format (FORMAT_none: any of the class). */
static bool belongs(const variant *v, const family *f, weight_format format)
{
  const bool major = v->major == MAJOR_any || (v->major == MAJOR_N) == f->in_out;
  const int32_t x = (int32_t)dtype_of(f);
  if (v->op != (int)f->op || !major || (takes_tensor_maps(v) && f->no_maps)) return false;
  if (has_scales(f->weights))
    return format_is_scaled((weight_format)v->format) && v->y == x &&
           (format ? v->format == (int)format : weights_class_of((weight_format)v->format) == f->weights);
  return v->x == x && !format_is_scaled((weight_format)v->format) &&
         weights_class_of((weight_format)v->format) == f->weights;
}

static bool is_choice(const variant *v, const choice *c)
{
  return v->form == c->form && v->bm == c->bm && v->bn == c->bn;
}

/* What rows of the table have for weights of this kind; the router's are its own. */
static weight_format format_of(const bench *b, const family *f, const kind *k)
{
  return f->op == OP_router ? FORMAT_none : kind_class(k, b->o.dtype);
}

/* 0: no row of the choice serves the layer. */
static cumoe_status time_choice(bench *b, const machine *m, const family *f, cell *c, const choice *which, double *us)
{
  work works[ITEM_COUNT] = {{0}};
  timing t = {0};
  cell_works(c, works);
  work timed = works[has_scales(f->weights) ? ITEM_layer : item_of(f)];
  timed.optional = true;
  for (int32_t v = 0; v < variant_count && t.median <= 0; ++v) {
    if (!runs_on(m, &variants[v]) || !belongs(&variants[v], f, format_of(b, f, c->model->kind)) ||
        !is_choice(&variants[v], which))
      continue;
    TRY(cumoe_variant_force(b->context, v));
    TRY(measure(b, &timed, 1, c->inputs, &t, NULL));
    TRY(cumoe_variant_force(b->context, -1));
  }
  *us = t.median;
  return CUMOE_OK;
}

static cumoe_status time_choices(bench *b, const machine *m, const family *f, cell *c, samples *s)
{
  work works[ITEM_COUNT] = {{0}};
  double us[MAX_CHOICES] = {0};
  cell_works(c, works);
  for (item i = ITEM_router; i <= (f->op == OP_router ? ITEM_router : ITEM_down); ++i) /* what the stage reads */
    for (int32_t input = 0; input < c->inputs && works[i].user; ++input) TRY(works[i].call(c, input, b->stream));
  for (int32_t i = 0; i < s->choices; ++i)
    if (!s->behind[i]) TRY(time_choice(b, m, f, c, &s->choice[i], &us[i]));
  add_times(s, f->op, rows_of(m, f, c->model->shape, c->tokens), us);
  return CUMOE_OK;
}

static cumoe_status time_model(bench *b, const machine *gpu, const family *f, model *m, samples *s)
{
  static const int64_t gemm[] = {0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 176, 256, 352, 512, 1024};
  static const int64_t router[] = {1, 4, 8, 16, 32, 64, 128, 256, 400, 800, 1600, 2048, 3200, 5000, 8192};
  const int64_t *rows = f->op == OP_router ? router : gemm, most = 8192;
  const int32_t count = (int32_t)(f->op == OP_router ? sizeof router / 8 : sizeof gemm / 8);
  for (int32_t i = 0; i < count; ++i) {
    const int64_t tokens = tokens_of(f, m->shape, rows[i]);
    cell c;
    if (tokens < 1 || tokens > most || (dtype_of(f) == CUMOE_F32 && rows[i] > 64)) continue;
    cumoe_status status = cell_create(b, m, tokens, SPREAD_router, &c);
    if (status == CUMOE_OK) status = time_choices(b, gpu, f, &c, s);
    cell_destroy(&c);
    TRY(status);
  }
  return CUMOE_OK;
}

/* The family's kernels that this GPU has, for weights of this format. */
static void find_choices(const machine *m, const family *f, weight_format format, samples *s)
{
  for (int32_t v = 0; v < variant_count && s->choices < MAX_CHOICES; ++v) {
    bool known = false;
    for (int32_t i = 0; i < s->choices; ++i) known = known || is_choice(&variants[v], &s->choice[i]);
    if (known || !runs_on(m, &variants[v]) || !belongs(&variants[v], f, format)) continue;
    s->choice[s->choices++] = (choice){variants[v].form, variants[v].bm, variants[v].bn};
  }
}

static cumoe_status time_layer(bench *b, const machine *gpu, const family *f, int32_t index, const shape *layer,
                               samples *s)
{
  model m;
  fprintf(stderr, "tune: %s, %s, %s, %s\n", operation_name(f->op), b->o.kinds[index]->name, f->title, layer->name);
  cumoe_status status = model_create(b, layer, b->o.kinds[index], &m);
  memset(s->behind, 0, sizeof s->behind);
  if (status == CUMOE_OK) status = time_model(b, gpu, f, &m, s);
  model_destroy(&m);
  return status;
}

static void set_types(bench *b, const family *f)
{
  b->o.dtype = dtype_of(f);
  b->o.router = f->op == OP_router && f->weights == WEIGHTS_f32 ? CUMOE_F32 : b->o.dtype;
  b->o.in_out = f->in_out;
}

/* The router's weights are their own. */
static bool is_of(const kind *k, const family *f)
{
  return f->op == OP_router ? kind_is_dense(k) : weights_class_of(kind_class(k, dtype_of(f))) == f->weights;
}

/* Of one of the kinds of weights that are its class's. */
static cumoe_status time_kind(bench *b, const machine *gpu, const family *f, int32_t index, const char *only,
                              samples *s)
{
  memset(s, 0, sizeof *s);
  find_choices(gpu, f, format_of(b, f, b->o.kinds[index]), s);
  for (int32_t i = 0; i < shape_count(); ++i) {
    const shape layer = shape_at(i);
    if (!strstr(f->models, layer.name) || (only && !strstr(only, layer.name))) continue;
    TRY(time_layer(b, gpu, f, index, &layer, s));
  }
  return CUMOE_OK;
}

/* ---- thresholds ------------------------------------------------------------------------------------ */

typedef struct threshold {
  int32_t up_to, choice;
} threshold;

typedef struct thresholds {
  threshold lines[MAX_POINTS];
  int32_t count;
  double cost;
} thresholds;

static int by_rows(const void *a, const void *b)
{
  const point *p = a, *q = b;
  return (p->rows > q->rows) - (p->rows < q->rows);
}

/* Halfway between two points of the scale, in factors. */
static int32_t between(const samples *s, int32_t i)
{
  return (int32_t)sqrt((double)s->points[i].rows * (double)s->points[i + 1].rows);
}

/* The cheapest choices; a switch costs SWITCH a layer. */
static thresholds cut(const samples *s)
{
  static double least[MAX_POINTS][MAX_CHOICES];
  static int32_t next[MAX_POINTS][MAX_CHOICES];
  thresholds t = {.count = 0};
  const int32_t last = s->count - 1;
  for (int32_t i = last; i >= 0; --i)
    for (int32_t c = 0; c < s->choices; ++c) {
      double rest = i < last ? HUGE_VAL : 0;
      next[i][c] = c;
      for (int32_t d = 0; d < s->choices && i < last; ++d) {
        const double cost = least[i + 1][d] + (c == d ? 0 : SWITCH * s->points[i].layers);
        if (cost < rest || (cost <= rest && d == c)) rest = cost, next[i][c] = d;
      }
      least[i][c] = rest + s->points[i].cost[c];
    }
  int32_t at = 0;
  for (int32_t c = 1; c < s->choices; ++c)
    if (least[0][c] < least[0][at]) at = c;
  for (int32_t i = 0; i <= last; at = next[i][at], ++i)
    if (i == last)
      t.lines[t.count++] = (threshold){ANY_ROWS, at};
    else if (next[i][at] != at)
      t.lines[t.count++] = (threshold){between(s, i), at};
  return t;
}

/* ---- the table ------------------------------------------------------------------------------------- */

static const char *name_of_form(int number)
{
  for (int32_t v = 0; v < variant_count; ++v)
    if (variants[v].form == number) return variants[v].form_name;
  return "?";
}

static void print_line(const family *f, const char *title, int32_t up_to, int number, int32_t bm, int32_t bn)
{
  char rows[16] = "ANY_ROWS";
  if (up_to != ANY_ROWS) snprintf(rows, sizeof rows, "%d", (int)up_to);
  printf("TUNE(%s, %s, %s, %s, %d, %d)%s%s%s\n", operation_name(f->op), class_names[f->weights], rows,
         name_of_form(number), (int)bm, (int)bn, *title ? " /* " : "", title, *title ? " */" : "");
}

static void print_kind(const family *f, const kind *k, samples *s)
{
  qsort(s->points, (size_t)s->count, sizeof *s->points, by_rows);
  const thresholds t = cut(s);
  for (int32_t i = 0; i < t.count; ++i) {
    const choice *c = &s->choice[t.lines[i].choice];
    print_line(f, has_scales(f->weights) ? k->name : f->title, t.lines[i].up_to, c->form, c->bm, c->bn);
  }
}

/* Lines that are not measured anew, of all layouts of the operation and class. */
static void print_kept(const machine *m, const family *f)
{
  const family any = {.op = f->op, .weights = f->weights};
  for (int32_t i = 0; i < m->tune->line_count; ++i) {
    const tune_line *l = &m->tune->lines[i];
    if (l->op == (int8_t)f->op && l->weights == (int8_t)f->weights)
      print_line(&any, "", l->up_to, l->form, l->bm, l->bn);
  }
}

static void print_head(const bench *b)
{
  char date[32];
  const time_t now = time(NULL);
  strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
  printf("/*\n"
         " * Which kernel serves which regime on this GPU, and its limits: see h200.def.\n"
         " * Written by `make tune` on %s, %s.\n"
         " */\n",
         b->device.name, date);
}

/* ---- limits ---------------------------------------------------------------------------------------- */

/* Values to try, and the layers and tokens that they decide for. A value that changes no plan is not timed again. */
typedef struct trial {
  const char *name, *models;
  double values[8]; /* 0 ends them */
  int64_t tokens[8];
  const char *weights; /* classes that it is for; NULL: all */
} trial;

static const trial trials[] = {
    {"few_bytes", LARGE, {1, 24e6, 48e6, 67e6, 95e6, 134e6, 190e6, 270e6}, {1, 4, 8, 12, 16, 20, 24, 32}, NULL},
    {"few_drawn_rows", LARGE, {1, 2, 3, 4}, {4, 6, 8, 12, 16}, "w4"},
    {"few_drawn", LARGE, {1, 2, 4, 8, 12, 16}, {2, 3, 4, 6, 8, 10, 12, 16}, "w4"},
    {"few_drawn_e2m1", LARGE, {1, 1e8, 2e8, 320e6, 5e8, 8e8, 2e9}, {2, 3, 4, 5, 6, 8}, "w4"},
    {"twin_weights", LARGE, {1, 150e6, 300e6, 600e6, 1e9, 1e12}, {24, 32, 96, 128, 192, 256}, "w4"},
    {"few_many_rows", "mixtral-8x7b olmoe", {1, 2, 3, 4, 6, 8}, {12, 16, 20, 24, 32}, NULL},
    {"copy_rows", "mixtral-8x7b gpt-oss-120b", {33, 65, 97, 129, 193, 257}, {512, 1024, 2048, 4096}, NULL},
    {"narrow_copy_rows", "qwen3-30b-a3b qwen3-235b-a22b", {65, 97, 129, 161, 225, 289}, {1024, 2048, 4096}, NULL},
    {"discard",
     "qwen3-30b-a3b gpt-oss-120b",
     {1, 20 << 20, 40 << 20, 80 << 20, 160 << 20},
     {128, 512, 1024, 2048},
     NULL},
    {"combine_early", "qwen3-30b-a3b", {1, 16, 32, 64, 128, 256}, {16, 32, 64, 128, 256}, NULL},
};
enum { TRIALS = sizeof trials / sizeof *trials, VALUES = sizeof trials[0].values / sizeof(double) };

static cumoe_status find_limit(bench *b, const char *name, int32_t *index, cumoe_limit_info *info)
{
  for (*index = 0; *index < cumoe_limit_count(); ++*index) {
    TRY(cumoe_limit_get(b->context, *index, info));
    if (strcmp(info->name, name) == 0) return CUMOE_OK;
  }
  return CUMOE_ERR_INTERNAL;
}

/* Adds to cost[v] what value v costs this cell: the log of its time over the least. */
static cumoe_status try_values(bench *b, const trial *t, int32_t limit, weights_class weights, cell *c, double *cost)
{
  static char text[VALUES][4096];
  work works[ITEM_COUNT] = {{0}};
  double us[VALUES] = {0}, least = HUGE_VAL;
  cell_works(c, works);
  for (int v = 0; v < VALUES && t->values[v] > 0; ++v) {
    timing time = {0};
    TRY(cumoe_limit_set(b->context, limit, (int32_t)weights, t->values[v]));
    TRY(cumoe_plan_describe(c->model->plan, c->model->weights, c->tokens, text[v], sizeof text[v]));
    for (int earlier = 0; earlier < v; ++earlier)
      if (strcmp(text[earlier], text[v]) == 0) us[v] = us[earlier];
    if (us[v] <= 0) {
      TRY(measure(b, &works[ITEM_layer], 1, c->inputs, &time, NULL));
      us[v] = time.median;
    }
    if (us[v] < least) least = us[v];
  }
  for (int v = 0; v < VALUES && t->values[v] > 0; ++v) cost[v] += log(us[v] / least);
  return CUMOE_OK;
}

static cumoe_status try_model(bench *b, const trial *t, int32_t limit, int32_t index, const shape *s, double *cost)
{
  model m;
  const weights_class weights = weights_class_of(kind_class(b->o.kinds[index], b->o.dtype));
  cumoe_status status = model_create(b, s, b->o.kinds[index], &m);
  for (int i = 0; i < 8 && t->tokens[i] > 0 && status == CUMOE_OK; ++i) {
    cell c;
    status = cell_create(b, &m, t->tokens[i], SPREAD_router, &c);
    if (status == CUMOE_OK) status = try_values(b, t, limit, weights, &c, cost);
    cell_destroy(&c);
  }
  model_destroy(&m);
  return status;
}

/* Stays at what it is unless another value is better by SWITCH. */
static cumoe_status set_limit(bench *b, const trial *t, int32_t limit, weights_class weights, double is,
                              const double *cost)
{
  int best = 0, worst = 0, now = -1;
  for (int v = 0; v < VALUES && t->values[v] > 0; ++v) {
    fprintf(stderr, "tune:   %g: %.4f\n", t->values[v], cost[v]);
    if (cost[v] < cost[best]) best = v;
    if (cost[v] > cost[worst]) worst = v;
    if (t->values[v] >= is && t->values[v] <= is) now = v;
  }
  const bool stays = cost[now < 0 ? worst : now] - cost[best] < SWITCH;
  return cumoe_limit_set(b->context, limit, (int32_t)weights, stays ? is : t->values[best]);
}

static cumoe_status tune_limit(bench *b, const trial *t, weights_class weights, const char *only)
{
  double cost[VALUES] = {0};
  int32_t limit;
  cumoe_limit_info info = {.size = sizeof info};
  TRY(find_limit(b, t->name, &limit, &info));
  fprintf(stderr, "tune: %s, %s\n", t->name, class_names[weights]);
  for (int32_t k = 0; k < b->o.kinds_count; ++k)
    for (int32_t i = 0; i < shape_count(); ++i) {
      const shape layer = shape_at(i);
      if (weights_class_of(kind_class(b->o.kinds[k], b->o.dtype)) != weights) continue;
      if (!strstr(t->models, layer.name) || (only && !strstr(only, layer.name))) continue;
      TRY(try_model(b, t, limit, k, &layer, cost));
    }
  return set_limit(b, t, limit, weights, info.value[weights], cost);
}

/* All of them, those that are not tried as they are. */
static cumoe_status print_limits(bench *b)
{
  printf("#undef TUNE\n\n/* What limits.def names, for each class of weights: w16, f32, f8, s8, w4. */\n");
  for (int32_t i = 0; i < cumoe_limit_count(); ++i) {
    cumoe_limit_info info = {.size = sizeof info};
    TRY(cumoe_limit_get(b->context, i, &info));
    printf("LIMIT(%s", info.name);
    for (size_t w = 0; w < sizeof info.value / sizeof *info.value; ++w) printf(", %.9g", info.value[w]);
    printf(")\n");
  }
  printf("#undef LIMIT\n");
  return CUMOE_OK;
}

/* ---- main ------------------------------------------------------------------------------------------ */

/* Lists of names; NULL: all. */
typedef struct wishes {
  const char *ops, *models, *weights;
} wishes;

static bool wished(const char *list, const char *name)
{
  return !list || strstr(list, name);
}

/* Kind by kind: a kernel may serve one of them alone. */
static cumoe_status tune_family(bench *b, const machine *m, const family *f, const char *only, int32_t *timed)
{
  static samples s;
  set_types(b, f);
  for (int32_t k = 0; k < b->o.kinds_count; ++k) {
    if (!is_of(b->o.kinds[k], f)) continue;
    TRY(time_kind(b, m, f, k, only, &s));
    if (s.count) print_kind(f, b->o.kinds[k], &s);
    *timed += s.count;
  }
  return CUMOE_OK;
}

static cumoe_status tune_families(bench *b, const machine *m, const wishes *w)
{
  for (int32_t i = 0; i < FAMILIES; ++i) {
    const family *f = &families[i], *last = i ? &families[i - 1] : NULL;
    const bool first = !last || last->op != f->op || last->weights != f->weights;
    int32_t timed = 0;
    if (!last || last->op != f->op) printf("\n");
    if (!wished(w->ops, operation_name(f->op)) || !wished(w->weights, class_names[f->weights])) {
      if (first) print_kept(m, f);
      continue;
    }
    TRY(tune_family(b, m, f, w->models, &timed));
    if (!timed && first) print_kept(m, f);
    fflush(stdout);
  }
  return CUMOE_OK;
}

static cumoe_status tune_limits(bench *b, const wishes *w)
{
  const family dense = {.op = OP_up, .weights = WEIGHTS_w16};
  set_types(b, &dense);
  for (int c = 0; c < WEIGHTS_CLASSES && wished(w->ops, "limits"); ++c)
    for (int32_t i = 0; i < TRIALS && c != WEIGHTS_f32 && wished(w->weights, class_names[c]); ++i)
      if (wished(trials[i].weights, class_names[c])) TRY(tune_limit(b, &trials[i], (weights_class)c, w->models));
  return print_limits(b);
}

static cumoe_status tune(bench *b, const wishes *w)
{
  machine m;
  machine_init(&m, b->device.name, b->device.cc_major * 10 + b->device.cc_minor, b->device.multiprocessors,
               b->device.smem_per_block_optin);
  print_head(b);
  TRY(tune_families(b, &m, w));
  return tune_limits(b, w);
}

static bool parse(int argc, char **argv, wishes *w)
{
  for (int i = 1; i < argc; i += 2) {
    const char **value = strcmp(argv[i], "--op") == 0        ? &w->ops
                         : strcmp(argv[i], "--model") == 0   ? &w->models
                         : strcmp(argv[i], "--weights") == 0 ? &w->weights
                                                             : NULL;
    if (!value || i + 1 == argc) return false;
    *value = argv[i + 1];
  }
  return true;
}

int main(int argc, char **argv)
{
  bench b = {.o = {.device = CUMOE_DEVICE_AUTO, .dtype = CUMOE_BF16, .coarse = true}, .seed = 1};
  wishes w = {0};
  char bad[64];
  if (!parse(argc, argv, &w)) {
    fprintf(stderr, "usage: tune [--op router,up,down,limits] [--weights w16,f32,f8,s8,w4] [--model A,B]\n");
    return 2;
  }
  bool good =
      kinds_parse(kind_names, &b.o, bad, sizeof bad) && bench_open(&b) == CUMOE_OK && make_noise(&b) == CUMOE_OK;
  if (!good) fprintf(stderr, "tune: %s\n", failure_text(&b));
  if (good && b.device.device == CUMOE_DEVICE_CPU) {
    fprintf(stderr, "tune: needs a GPU\n");
    good = false;
  }
  if (good && tune(&b, &w) != CUMOE_OK) {
    fprintf(stderr, "tune: %s\n", failure_text(&b));
    good = false;
  }
  bench_close(&b);
  return good ? 0 : 1;
}
