/*
 * Writes the tune file of this GPU (host/tune/). Every row of the kernel table that can serve a stage is timed, forced
 * through the public call, over layers and token counts; the scale (rows an active expert; router: T E / 256) is cut
 * where another row becomes the better one. Then the layer is timed on both sides of each limit. The library itself
 * never times anything.
 *
 * A switch has to pay for itself, so that noise makes no thresholds.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_POINTS = 64, MAX_CHOICES = 24, ANY_ROWS = INT32_MAX };
/* ---- what is measured ------------------------------------------------------------------------------ */

/* A stage with the types and the layout that other kernels serve. */
typedef struct family {
  const char *title, *op, *models;
  item item;
  cumoe_dtype dtype, weights;
  bool in_out, no_maps; /* no_maps: weights that tensor maps cannot describe */
} family;

#define LARGE "mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b gpt-oss-120b deepseek-v3"
#define TWO   "qwen3-235b-a22b mixtral-8x7b"
static const family families[] = {
    {"", "router", LARGE, ITEM_router, CUMOE_BF16, CUMOE_BF16, false, false},
    {"not by tensor maps", "router", LARGE, ITEM_router, CUMOE_BF16, CUMOE_BF16, false, true},
    {"", "router", "qwen3-30b-a3b mixtral-8x7b", ITEM_router, CUMOE_BF16, CUMOE_F32, false, false},
    {"K-major", "up", LARGE, ITEM_up, CUMOE_BF16, CUMOE_BF16, false, false},
    {"K-major, not by tensor maps", "up", TWO, ITEM_up, CUMOE_BF16, CUMOE_BF16, false, true},
    {"N-major", "up", TWO, ITEM_up, CUMOE_BF16, CUMOE_BF16, true, false},
    {"", "up", "qwen3-30b-a3b", ITEM_up, CUMOE_F32, CUMOE_F32, false, false},
    {"K-major", "down", LARGE, ITEM_down, CUMOE_BF16, CUMOE_BF16, false, false},
    {"K-major, not by tensor maps", "down", TWO, ITEM_down, CUMOE_BF16, CUMOE_BF16, false, true},
    {"N-major", "down", TWO, ITEM_down, CUMOE_BF16, CUMOE_BF16, true, false},
    {"", "down", "qwen3-30b-a3b", ITEM_down, CUMOE_F32, CUMOE_F32, false, false},
};
enum { FAMILIES = sizeof families / sizeof *families };

/* What the kernels cost at one place of the scale: sums over the layers of log(time / the least time). */
typedef struct point {
  int64_t rows;
  int32_t layers;
  double cost[MAX_CHOICES];
} point;

typedef struct samples {
  int32_t choice[MAX_CHOICES], choices; /* rows of the kernel table */
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

static void add_times(samples *s, int64_t rows, const double *us)
{
  double least = HUGE_VAL;
  point *p = point_at(s, rows);
  for (int32_t i = 0; i < s->choices; ++i)
    if (us[i] > 0 && us[i] < least) least = us[i];
  if (!p || !isfinite(least)) return;
  p->layers++;
  for (int32_t i = 0; i < s->choices; ++i) p->cost[i] += us[i] > 0 ? log(us[i] / least) : UNABLE;
}

/* The scale of the table, as in host/choice.c. */
static int64_t rows_of(const bench *b, const family *f, const shape *s, int64_t tokens)
{
  if (f->item == ITEM_router) return (tokens * s->experts + 255) / 256;
  const int64_t pairs = tokens * s->top_k, active = pairs < s->experts ? pairs : s->experts;
  const int64_t channels = f->item == ITEM_up ? s->inter : s->hidden;
  if (pairs <= s->experts && pairs * ((channels + 127) / 128) < 2 * b->device.multiprocessors) return 0;
  return (pairs + active - 1) / active;
}

static int64_t tokens_of(const family *f, const shape *s, int64_t rows)
{
  if (f->item == ITEM_router) return rows * 256 / s->experts;
  return rows > 0 ? rows * s->experts / s->top_k : 1;
}

static cumoe_status time_choices(bench *b, const family *f, cell *c, samples *s)
{
  work works[ITEM_COUNT] = {{0}};
  double us[MAX_CHOICES] = {0};
  timing t;
  cell_works(c, works);
  for (item i = ITEM_router; i <= (f->item == ITEM_router ? ITEM_router : ITEM_down); ++i) /* what the stage reads */
    for (int32_t input = 0; input < c->inputs; ++input) TRY(works[i].call(c, input, b->stream));
  work stage = works[f->item];
  stage.optional = true; /* a row that cannot serve the layer */
  for (int32_t i = 0; i < s->choices; ++i) {
    TRY(cumoe_variant_force(b->context, s->choice[i]));
    TRY(measure(b, &stage, 1, c->inputs, &t, NULL));
    us[i] = t.median;
    TRY(cumoe_variant_force(b->context, -1));
  }
  add_times(s, rows_of(b, f, c->model->shape, c->tokens), us);
  return CUMOE_OK;
}

static cumoe_status time_model(bench *b, const family *f, model *m, samples *s)
{
  static const int64_t gemm[] = {0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 176, 256, 352, 512, 1024};
  static const int64_t router[] = {1, 4, 8, 16, 32, 64, 128, 256, 400, 800, 1600, 2048, 3200, 5000, 8192};
  const int64_t *rows = f->item == ITEM_router ? router : gemm, most = 8192;
  const int32_t count = (int32_t)(f->item == ITEM_router ? sizeof router / 8 : sizeof gemm / 8);
  for (int32_t i = 0; i < count; ++i) {
    const int64_t tokens = tokens_of(f, m->shape, rows[i]);
    cell c;
    if (tokens < 1 || tokens > most || (f->dtype == CUMOE_F32 && rows[i] > 64)) continue;
    cumoe_status status = cell_create(b, m, tokens, SPREAD_router, &c);
    if (status == CUMOE_OK) status = time_choices(b, f, &c, s);
    cell_destroy(&c);
    TRY(status);
  }
  return CUMOE_OK;
}

/* The family's kernels that this GPU has. */
static cumoe_status find_choices(bench *b, const family *f, samples *s)
{
  for (int32_t v = 0; v < cumoe_variant_count() && s->choices < MAX_CHOICES; ++v) {
    cumoe_variant_info i = {.size = sizeof i};
    TRY(cumoe_variant_get(b->context, v, &i));
    const bool major = strcmp(i.major, "any") == 0 || (strcmp(i.major, "N") == 0) == f->in_out;
    const bool types = i.x == (int32_t)f->dtype && i.w == (int32_t)f->weights;
    const bool maps = strcmp(i.form, "wgmma") == 0;
    if (i.usable && strcmp(i.op, f->op) == 0 && major && types && !(maps && f->no_maps)) s->choice[s->choices++] = v;
  }
  return CUMOE_OK;
}

static cumoe_status time_family(bench *b, const family *f, const char *only, samples *s)
{
  b->o.dtype = f->dtype;
  b->o.router = f->item == ITEM_router ? f->weights : f->dtype;
  b->o.in_out = f->in_out;
  TRY(find_choices(b, f, s));
  for (int32_t i = 0; i < shape_count(); ++i) {
    const shape layer = shape_at(i);
    model m;
    if (!strstr(f->models, layer.name) || (only && !strstr(only, layer.name))) continue;
    fprintf(stderr, "tune: %s, %s, %s\n", f->op, f->title, layer.name);
    cumoe_status status = model_create(b, &layer, &m);
    if (status == CUMOE_OK) status = time_model(b, f, &m, s);
    model_destroy(&m);
    TRY(status);
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

static cumoe_status print_family(bench *b, const family *f, samples *s)
{
  qsort(s->points, (size_t)s->count, sizeof *s->points, by_rows);
  const thresholds t = cut(s);
  for (int32_t i = 0; i < t.count; ++i) {
    cumoe_variant_info k = {.size = sizeof k};
    char up_to[16] = "ANY_ROWS";
    TRY(cumoe_variant_get(b->context, s->choice[t.lines[i].choice], &k));
    if (t.lines[i].up_to != ANY_ROWS) snprintf(up_to, sizeof up_to, "%d", (int)t.lines[i].up_to);
    printf("TUNE(%s, %s, %s, %s, %d, %d)%s%s%s\n", f->op, f->weights == CUMOE_F32 ? "f32" : "w16", up_to, k.form,
           (int)k.bm, (int)k.bn, *f->title ? " /* " : "", f->title, *f->title ? " */" : "");
  }
  return CUMOE_OK;
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
} trial;

static const trial trials[] = {
    {"few_bytes", LARGE, {1, 48e6, 67e6, 95e6, 134e6, 190e6}, {4, 8, 12, 16, 20, 24, 32}},
    {"few_many_rows", "mixtral-8x7b olmoe", {1, 2, 3, 4, 6, 8}, {12, 16, 20, 24, 32}},
    {"copy_rows", "mixtral-8x7b gpt-oss-120b", {33, 65, 97, 129, 193, 257}, {512, 1024, 2048, 4096}},
    {"narrow_copy_rows", "qwen3-30b-a3b qwen3-235b-a22b", {65, 97, 129, 161, 225, 289}, {1024, 2048, 4096}},
    {"discard", "qwen3-30b-a3b gpt-oss-120b", {1, 20 << 20, 40 << 20, 80 << 20, 160 << 20}, {128, 512, 1024, 2048}},
    {"combine_early", "qwen3-30b-a3b", {1, 16, 32, 64, 128, 256}, {16, 32, 64, 128, 256}},
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
static cumoe_status try_values(bench *b, const trial *t, int32_t limit, cell *c, double *cost)
{
  static char text[VALUES][4096];
  work works[ITEM_COUNT] = {{0}};
  double us[VALUES] = {0}, least = HUGE_VAL;
  cell_works(c, works);
  for (int v = 0; v < VALUES && t->values[v] > 0; ++v) {
    timing time = {0};
    TRY(cumoe_limit_set(b->context, limit, 0, t->values[v]));
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

static cumoe_status try_model(bench *b, const trial *t, int32_t limit, const shape *s, double *cost)
{
  model m;
  cumoe_status status = model_create(b, s, &m);
  for (int i = 0; i < 8 && t->tokens[i] > 0 && status == CUMOE_OK; ++i) {
    cell c;
    status = cell_create(b, &m, t->tokens[i], SPREAD_router, &c);
    if (status == CUMOE_OK) status = try_values(b, t, limit, &c, cost);
    cell_destroy(&c);
  }
  model_destroy(&m);
  return status;
}

/* Stays at what it is unless another value is better by SWITCH. */
static cumoe_status tune_limit(bench *b, const trial *t, const char *only)
{
  double cost[VALUES] = {0};
  int32_t limit;
  cumoe_limit_info info = {.size = sizeof info};
  TRY(find_limit(b, t->name, &limit, &info));
  fprintf(stderr, "tune: %s\n", t->name);
  for (int32_t i = 0; i < shape_count(); ++i) {
    const shape layer = shape_at(i);
    if (!strstr(t->models, layer.name) || (only && !strstr(only, layer.name))) continue;
    TRY(try_model(b, t, limit, &layer, cost));
  }
  int best = 0, now = -1;
  for (int v = 0; v < VALUES && t->values[v] > 0; ++v) {
    fprintf(stderr, "tune:   %g: %.4f\n", t->values[v], cost[v]);
    if (cost[v] < cost[best]) best = v;
    if (t->values[v] >= info.value[0] && t->values[v] <= info.value[0]) now = v;
  }
  const bool stays = now >= 0 && cost[now] - cost[best] < SWITCH;
  return cumoe_limit_set(b->context, limit, 0, stays ? info.value[0] : t->values[best]);
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

static cumoe_status tune(bench *b, const char *ops, const char *models)
{
  static samples s;
  print_head(b);
  for (int32_t i = 0; i < FAMILIES; ++i) {
    const family *f = &families[i];
    if (ops && !strstr(ops, f->op)) continue;
    memset(&s, 0, sizeof s);
    TRY(time_family(b, f, models, &s));
    if (i == 0 || strcmp(f->op, families[i - 1].op) != 0) printf("\n");
    if (s.count) TRY(print_family(b, f, &s));
    fflush(stdout);
  }
  b->o.dtype = b->o.router = CUMOE_BF16;
  b->o.in_out = false;
  for (int32_t i = 0; i < TRIALS; ++i)
    if (!ops || strstr(ops, "limits")) TRY(tune_limit(b, &trials[i], models));
  return print_limits(b);
}

int main(int argc, char **argv)
{
  bench b = {.o = {.device = CUMOE_DEVICE_AUTO, .dtype = CUMOE_BF16, .coarse = true}, .seed = 1};
  const char *ops = NULL, *models = NULL;
  for (int i = 1; i + 1 < argc; i += 2)
    if (strcmp(argv[i], "--op") == 0)
      ops = argv[i + 1];
    else if (strcmp(argv[i], "--model") == 0)
      models = argv[i + 1];
    else
      argc = 0;
  if (argc % 2 == 0) {
    fprintf(stderr, "usage: tune [--op router,up,down,limits] [--model A,B]\n");
    return 2;
  }
  bool good = bench_open(&b) == CUMOE_OK && make_noise(&b) == CUMOE_OK;
  if (!good) fprintf(stderr, "tune: %s\n", failure_text(&b));
  if (good && b.device.device == CUMOE_DEVICE_CPU) {
    fprintf(stderr, "tune: needs a GPU\n");
    good = false;
  }
  if (good && tune(&b, ops, models) != CUMOE_OK) {
    fprintf(stderr, "tune: %s\n", failure_text(&b));
    good = false;
  }
  bench_close(&b);
  return good ? 0 : 1;
}
