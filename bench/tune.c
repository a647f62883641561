/*
 * Writes host/tune/h200.def: times every row of the kernel table that can serve a stage, forced through the public call,
 * over layers and token counts, and cuts the scale (rows an active expert; router: T E / 256) where another row becomes
 * the better one. The library itself never times anything.
 *
 * A switch has to pay for itself, so that noise makes no thresholds; rows of sm_90a stand only behind the portable ones,
 * so that other GPUs, which skip them, find the portable thresholds in order.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_ROWS = 160, MAX_POINTS = 64, MAX_CHOICES = 24, ANY_ROWS = INT32_MAX };
enum { SMALL_SMEM = 101376 }; /* bytes a block of the smallest GPUs served */

/* The kernel table, as text and numbers: what the public call does not tell. */
typedef struct kernel {
  const char *name, *op, *form;
  bool portable;
  int32_t bm, bn, smem;
} kernel;

static const kernel kernels[] = {
#define ROWS_ALL
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  {"cumoe_" #op "_" #arch "_" #form "_" #X "_" #W "_" #Y "_" #SCALE "_" #MAJOR "_" #BM "x" #BN "x" #BK,                \
   #op,                                                                                                                \
   #form,                                                                                                              \
   #arch[0] == 'a',                                                                                                    \
   BM,                                                                                                                 \
   BN,                                                                                                                 \
   SMEM},
#include "../kernels/variants.def"
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

/* ---- what is measured ------------------------------------------------------------------------------ */

/* A stage with the types and the layout that other kernels serve. */
typedef struct family {
  const char *title, *op;
  const char *models;
  item item;
  cumoe_dtype dtype, router;
  bool in_out;
} family;

#define LARGE "mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b gpt-oss-120b deepseek-v3"
static const family families[] = {
    {"16-bit weights", "router", LARGE, ITEM_router, CUMOE_BF16, CUMOE_BF16, false},
    {"f32 weights", "router", "qwen3-30b-a3b mixtral-8x7b", ITEM_router, CUMOE_BF16, CUMOE_F32, false},
    {"K-major, 16-bit", "up", LARGE, ITEM_up, CUMOE_BF16, CUMOE_BF16, false},
    {"N-major, 16-bit", "up", "qwen3-235b-a22b mixtral-8x7b", ITEM_up, CUMOE_BF16, CUMOE_BF16, true},
    {"f32", "up", "qwen3-30b-a3b", ITEM_up, CUMOE_F32, CUMOE_F32, false},
    {"K-major, 16-bit", "down", LARGE, ITEM_down, CUMOE_BF16, CUMOE_BF16, false},
    {"N-major, 16-bit", "down", "qwen3-235b-a22b mixtral-8x7b", ITEM_down, CUMOE_BF16, CUMOE_BF16, true},
    {"f32", "down", "qwen3-30b-a3b", ITEM_down, CUMOE_F32, CUMOE_F32, false},
};
enum { FAMILIES = sizeof families / sizeof *families };

/* What the kernels cost at one place of the scale: sums over the layers of log(time / the least time). */
typedef struct point {
  int64_t rows;
  int32_t layers;
  double cost[MAX_CHOICES];
} point;

typedef struct samples {
  int32_t choice[MAX_CHOICES], choices; /* indices into kernels */
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

/* The scale of the table, as in host/plan.c. */
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
    for (int32_t v = 0; v < cumoe_variant_count(); ++v) {
      cumoe_variant_info info = {.size = sizeof info};
      TRY(cumoe_variant_get(b->context, v, &info));
      if (strcmp(info.name, kernels[s->choice[i]].name) == 0) TRY(cumoe_variant_force(b->context, v));
    }
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
  for (int32_t v = 0; v < cumoe_variant_count(); ++v) {
    cumoe_variant_info info = {.size = sizeof info};
    TRY(cumoe_variant_get(b->context, v, &info));
    for (int32_t k = 0; k < KERNELS && info.usable && s->choices < MAX_CHOICES; ++k) {
      const bool turned = strcmp(info.major, "N") == 0;
      const int32_t w = f->item == ITEM_router ? (int32_t)f->router : (int32_t)f->dtype;
      if (strcmp(info.name, kernels[k].name) != 0 || strcmp(info.op, f->op) != 0) continue;
      if (info.x == (int32_t)f->dtype && info.w == w && turned == f->in_out) s->choice[s->choices++] = k;
    }
  }
  return CUMOE_OK;
}

static cumoe_status time_family(bench *b, const family *f, const char *only, samples *s)
{
  b->o.dtype = f->dtype;
  b->o.router = f->router;
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

/* The cheapest choices for the points from `first` on, of those allowed; a switch costs SWITCH a layer. */
static thresholds cut(const samples *s, int32_t first, const bool *allowed)
{
  static double least[MAX_POINTS][MAX_CHOICES];
  static int32_t next[MAX_POINTS][MAX_CHOICES];
  thresholds t = {.cost = 0};
  const int32_t last = s->count - 1;
  for (int32_t i = last; i >= first; --i)
    for (int32_t c = 0; c < s->choices; ++c) {
      double rest = i < last ? HUGE_VAL : 0;
      next[i][c] = c;
      for (int32_t d = 0; d < s->choices && i < last; ++d) {
        const double cost = least[i + 1][d] + (c == d ? 0 : SWITCH * s->points[i].layers);
        if (allowed[d] && (cost < rest || (cost <= rest && d == c))) rest = cost, next[i][c] = d;
      }
      least[i][c] = rest + s->points[i].cost[c];
    }
  int32_t at = -1;
  for (int32_t c = 0; c < s->choices && first <= last; ++c)
    if (allowed[c] && (at < 0 || least[first][c] < least[first][at])) at = c;
  if (at < 0) return (thresholds){.cost = first <= last ? HUGE_VAL : 0};
  t.cost = least[first][at];
  for (int32_t i = first; i <= last; at = next[i][at], ++i)
    if (i == last)
      t.lines[t.count++] = (threshold){ANY_ROWS, at};
    else if (next[i][at] != at)
      t.lines[t.count++] = (threshold){between(s, i), at};
  return t;
}

static double cost_before(const samples *s, const thresholds *t, int32_t end)
{
  double cost = 0;
  for (int32_t i = 0, line = 0; i < end; ++i) {
    while (s->points[i].rows > t->lines[line].up_to) ++line;
    cost += s->points[i].cost[t->lines[line].choice];
  }
  return cost;
}

/* ---- the table ------------------------------------------------------------------------------------- */

static void print_line(const family *f, const samples *s, const threshold *t, const char *remark)
{
  const kernel *k = &kernels[s->choice[t->choice]];
  char up_to[16] = "ANY_ROWS";
  if (t->up_to != ANY_ROWS) snprintf(up_to, sizeof up_to, "%d", (int)t->up_to);
  printf("TUNE(%s, %s, %s, %d, %d)%s\n", f->op, up_to, k->form, (int)k->bm, (int)k->bn, remark);
}

/* Lines of t that reach past `from`. */
static void print_from(const family *f, const samples *s, const thresholds *t, int32_t from, const char *remark)
{
  for (int32_t i = 0; i < t->count; ++i)
    if (t->lines[i].up_to > from) print_line(f, s, &t->lines[i], remark);
}

static void allow(const samples *s, bool portable, int32_t smem, bool *allowed)
{
  for (int32_t i = 0; i < s->choices; ++i) {
    const kernel *k = &kernels[s->choice[i]];
    allowed[i] = k->portable == portable && k->smem <= smem;
  }
}

/* The point from which on kernels of sm_90a are the better ones; s->count: from none. */
static int32_t first_of_sm90(const samples *s, const thresholds *portable, thresholds *sm90)
{
  bool allowed[MAX_CHOICES];
  int32_t best = s->count;
  double least = portable->cost;
  allow(s, false, INT32_MAX, allowed);
  for (int32_t i = 0; i < s->count; ++i) {
    const thresholds t = cut(s, i, allowed);
    const double cost = t.cost + cost_before(s, portable, i) + SWITCH * s->points[i].layers;
    if (cost < least) least = cost, best = i, *sm90 = t;
  }
  return best;
}

/* Portable lines up to where sm_90a takes over, its lines, the portable ones again for other GPUs. */
static void print_family(const family *f, samples *s)
{
  bool allowed[MAX_CHOICES];
  thresholds sm90 = {.count = 0};
  qsort(s->points, (size_t)s->count, sizeof *s->points, by_rows);
  allow(s, true, INT32_MAX, allowed);
  const thresholds portable = cut(s, 0, allowed);
  const int32_t first = first_of_sm90(s, &portable, &sm90);
  const int32_t from = first == s->count ? ANY_ROWS : first == 0 ? 0 : between(s, first - 1);
  printf("/* %s */\n", f->title);
  for (int32_t i = 0; i < portable.count; ++i) {
    const int32_t before = i == 0 ? 0 : portable.lines[i - 1].up_to;
    if (before >= from) break;
    threshold line = portable.lines[i];
    if (line.up_to > from) line.up_to = from;
    print_line(f, s, &line, "");
  }
  if (sm90.count) {
    printf("#ifdef CUMOE_SM90\n");
    print_from(f, s, &sm90, 0, "");
    printf("#endif\n");
    print_from(f, s, &portable, from, "");
  }
  allow(s, true, SMALL_SMEM, allowed);
  for (int32_t i = 0; i < portable.count; ++i)
    if (!allowed[portable.lines[i].choice]) {
      const thresholds small = cut(s, 0, allowed);
      print_from(f, s, &small, i == 0 ? 0 : portable.lines[i - 1].up_to,
                 " /* GPUs with 99 KiB of shared memory a block */");
      break;
    }
}

static void print_head(const bench *b)
{
  char date[32];
  const time_t now = time(NULL);
  strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
  printf(
      "/*\n"
      " * Which kernel serves which regime: TUNE(op, up_to, form, BM, BN). The first row whose `up_to` is not below "
      "the "
      "expected\n"
      " * rows per active expert (router: T * E / 256; up, down: 0 for fewer than two tiles of 128 channels an SM), "
      "and whose kernel\n"
      " * can serve the types and layout, is taken.\n"
      " * Ordered by up_to within an operation and architecture; ANY_ROWS ends a list. Rows for a form that a GPU, a "
      "dtype or a layout\n"
      " * lacks are skipped.\n"
      " *\n"
      " * Written by `make tune` on %s, %s.\n"
      " */\n",
      b->device.name, date);
}

/* ---- main ------------------------------------------------------------------------------------------ */

static bool tune(bench *b, const char *ops, const char *models)
{
  static samples s;
  print_head(b);
  for (int32_t i = 0; i < FAMILIES; ++i) {
    const family *f = &families[i];
    if (ops && !strstr(ops, f->op)) continue;
    memset(&s, 0, sizeof s);
    if (time_family(b, f, models, &s) != CUMOE_OK) {
      fprintf(stderr, "tune: %s\n", failure_text(b));
      return false;
    }
    if (i == 0 || strcmp(f->op, families[i - 1].op) != 0) printf("\n");
    if (s.count) print_family(f, &s);
    fflush(stdout);
  }
  return true;
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
    fprintf(stderr, "usage: tune [--op router,up,down] [--model A,B]\n");
    return 2;
  }
  bool good = bench_open(&b) == CUMOE_OK && make_noise(&b) == CUMOE_OK;
  if (!good) fprintf(stderr, "tune: %s\n", failure_text(&b));
  if (good && b.device.device == CUMOE_DEVICE_CPU) {
    fprintf(stderr, "tune: needs a GPU\n");
    good = false;
  }
  good = good && tune(&b, ops, models);
  bench_close(&b);
  return good ? 0 : 1;
}
