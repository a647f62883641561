/*
 * The planner's promises over random shapes and every threshold: a kernel for every layer that is accepted, a
 * grid that covers the work and that CUDA takes, a workspace whose regions are disjoint, and sizes that only grow.
 * White box; nothing is launched. What the planner should answer is worked out here in another way, in 128 bits.
 */
#include "test.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../host/check.h"
#include "../host/plan.h"

__extension__ typedef __int128 wide;

static wide wide_ceil(wide a, wide b)
{
  return (a + b - 1) / b;
}
static int64_t smaller(int64_t a, int64_t b)
{
  return a < b ? a : b;
}
static int64_t larger(int64_t a, int64_t b)
{
  return a > b ? a : b;
}

/* ---- machines and shapes --------------------------------------------------------------------------- */

typedef struct gpu {
  int32_t cc, sms, smem; /* smem: bytes of shared memory a block may ask for */
} gpu;

/* CPU, A100, RTX 3090, L4, H200, B200, RTX 5090 */
enum { HOPPER_SMS = 132 };
static const gpu gpus[] = {{0, 8, 0},         {80, 108, 166912},        {86, 82, 101376},
                           {89, 58, 101376},  {90, HOPPER_SMS, 232448}, {100, 148, 232448},
                           {120, 170, 101376}};
enum { GPU_COUNT = sizeof gpus / sizeof gpus[0] };

static machine gpu_machine(const gpu *g, const int32_t *forced)
{
  return (machine){g->cc, g->sms, forced, g->smem};
}

/* Mostly small, sometimes huge: uniform in the number of bits. */
static int64_t log_uniform(rng *r, int64_t most)
{
  int bits = 0;
  while (bits < 62 && (int64_t)1 << bits <= most) bits++;
  int64_t limit = smaller((int64_t)1 << (1 + rng_below(r, bits)), most);
  return 1 + rng_below(r, limit);
}

static int32_t one_of(rng *r, const int32_t *list, int count)
{
  return list[rng_below(r, count)];
}

/* A description that check_moe_desc accepts, from the whole of what the manual allows. */
static cumoe_moe_desc random_desc(rng *r)
{
  const int32_t types[] = {CUMOE_BF16, CUMOE_F16, CUMOE_F32};
  cumoe_moe_desc d = {.size = sizeof d};
  d.num_experts = (int32_t)log_uniform(r, CUMOE_MAX_EXPERTS);
  d.local_experts = rng_below(r, 2) ? 0 : (int32_t)log_uniform(r, d.num_experts);
  d.hidden = 8 * (int32_t)log_uniform(r, 1 << 21);
  d.inter = 8 * (int32_t)log_uniform(r, 1 << 21);
  d.shared_inter = rng_below(r, 2) ? 0 : 8 * (int32_t)log_uniform(r, 1 << 21);
  d.dtype = one_of(r, types, 3);
  d.out_dtype = rng_below(r, 2) ? 0 : CUMOE_F32;
  d.act = (int32_t)rng_below(r, 7);
  d.flags = rng_below(r, 4) || d.act == CUMOE_ACT_SWIGLU_OAI ? 0 : CUMOE_MOE_UNGATED;
  if (!d.shared_inter && rng_below(r, 4) == 0) d.flags |= CUMOE_MOE_UNREDUCED;
  d.routing = cumoe_routing_make(CUMOE_SCORE_SOFTMAX, 0, (uint32_t)rng_below(r, 8));
  if (rng_below(r, 3) == 0) d.routing.zero_experts = (int32_t)rng_below(r, CUMOE_MAX_EXPERTS - d.num_experts + 1);
  if (!(d.routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT) && rng_below(r, 3) == 0)
    d.routing.identity_experts = (int32_t)rng_below(r, CUMOE_MAX_EXPERTS - d.num_experts - d.routing.zero_experts + 1);
  d.routing.top_k = (int32_t)log_uniform(r, smaller(CUMOE_MAX_TOP_K, router_experts(&d)));
  return d;
}

static int64_t random_tokens(rng *r, const cumoe_moe_desc *d)
{
  int64_t most = INT32_MAX / d->routing.top_k;
  return rng_below(r, 50) == 0 ? most - rng_below(r, 3) : log_uniform(r, most);
}

/* The shapes that a forward pass dispatches, as many as fit in `out`; w_f32: a router in f32. */
static int shapes_of(const cumoe_moe_desc *d, int64_t tokens, weight_major up, weight_major down, bool w_f32,
                     shape *out)
{
  const int32_t k = d->routing.top_k, experts = router_experts(d);
  int n = 0;
  out[n++] = (shape){.op = OP_router,
                     .in = d->dtype,
                     .w = w_f32 ? DT_F32 : d->dtype,
                     .tokens = tokens,
                     .rows = tokens,
                     .experts = experts,
                     .n = experts,
                     .k = d->hidden};
  out[n++] = (shape){.op = OP_gate, .tokens = tokens, .experts = experts, .top_k = k};
  out[n++] = (shape){.op = OP_map_count, .tokens = tokens, .rows = tokens * k, .experts = d->local_experts, .top_k = k};
  out[n] = out[n - 1];
  out[n++].op = OP_map;
  out[n++] = (shape){.op = OP_permute,
                     .tokens = tokens,
                     .rows = tokens * k,
                     .n = d->hidden * (d->dtype == CUMOE_F32 ? 4 : 2),
                     .top_k = k};
  shape gemm = {
      .in = d->dtype, .w = d->dtype, .tokens = tokens, .rows = tokens * k, .experts = d->local_experts, .top_k = k};
  for (int dense = 0; dense <= (d->shared_inter != 0); dense++) {
    const int32_t inter = dense ? d->shared_inter : d->inter;
    gemm.rows = dense ? tokens : tokens * k;
    gemm.experts = dense ? 1 : d->local_experts;
    gemm.op = OP_up, gemm.major = up, gemm.n = inter, gemm.k = d->hidden;
    out[n++] = gemm;
    gemm.op = OP_down, gemm.major = down, gemm.n = d->hidden, gemm.k = inter;
    out[n++] = gemm;
  }
  out[n++] = (shape){.op = OP_combine, .in = d->dtype, .w = d->out_dtype, .tokens = tokens, .n = d->hidden, .top_k = k};
  return n;
}
enum { MAX_SHAPES = 10 };

static const char *shape_name(const gpu *g, const shape *s)
{
  static char text[200];
  snprintf(text, sizeof text, "cc %d op %d in %d w %d major %d T %lld rows %lld E %d n %d k %d", g->cc, (int)s->op,
           s->in, s->w, (int)s->major, (long long)s->tokens, (long long)s->rows, s->experts, s->n, s->k);
  return text;
}

/* ---- choice ---------------------------------------------------------------------------------------- */

static bool arch_fits(const variant *v, int32_t cc)
{
  if (v->arch == ARCH_cpu) return cc == 0;
  if (v->arch == ARCH_sm90) return cc == 90;
  return cc >= 80;
}

/* What the manual of the table says a row can do. */
static bool row_can(const variant *v, const gpu *g, const shape *s)
{
  const int other = v->w ? v->w : v->y;
  bool type = (v->x == 0 || v->x == s->in) && (other == 0 || other == s->w);
  if (v->form == FORM_row && s->n > v->columns) return false;
  if (s->op == OP_elementwise && v->arch != ARCH_cpu && (s->n == EW_GELU) != (v->form == FORM_gelu)) return false;
  bool layout = s->major == MAJOR_none || v->form == FORM_fma || v->form == FORM_ref ||
                (s->major == MAJOR_N) == (v->form == FORM_ntile);
  return v->op == (int8_t)s->op && arch_fits(v, g->cc) && v->smem <= g->smem && type && layout;
}

static bool check_choice(const gpu *g, const shape *s, bool *chosen)
{
  const machine m = gpu_machine(g, NULL);
  if (g->cc == 0 && s->op == OP_map_count) return true; /* the CPU map counts by itself */
  int32_t row = choose(&m, s);
  if (!CHECK_MSG(row >= 0 && row < variant_count, "no row for %s", shape_name(g, s))) return false;
  chosen[row] = true;
  CHECK_MSG(row_can(&variants[row], g, s), "%s does not serve %s", variants[row].name, shape_name(g, s));
  CHECK_MSG(choose(&m, s) == row, "two answers for %s", shape_name(g, s));
  return CHECK_MSG(variants[row].smem <= g->smem, "%s needs %d bytes of shared memory, %s has %d", variants[row].name,
                   variants[row].smem, shape_name(g, s), g->smem);
}

static bool chosen[MAX_VARIANTS];

static void test_every_layer_has_kernels(rng *r)
{
  static const weight_major majors[] = {MAJOR_K, MAJOR_N};
  if (!group_begin("a row for every layer")) return;
  for (int i = 0; i < GPU_COUNT; i++) {
    case_begin("cc %d", gpus[i].cc);
    for (int n = 0; n < 8000; n++) {
      cumoe_moe_desc given = random_desc(r), d;
      shape s[MAX_SHAPES];
      if (!CHECK_OK(check_moe_desc(&given, &d))) break;
      int count = shapes_of(&d, random_tokens(r, &d), majors[n & 1], majors[n >> 1 & 1], n >> 2 & 1, s);
      for (int j = 0; j < count; j++)
        if (!check_choice(&gpus[i], &s[j], chosen)) break;
    }
    case_end();
  }
  group_end();
}

/* A row that no shape ever gets is dead weight in every program that links the library: told, not failed. */
static void report_unchosen_rows(void)
{
  for (int32_t i = 0; i < variant_count; i++)
    if (!chosen[i]) printf("# never chosen: %s\n", variants[i].name);
}

static void test_forced_rows(rng *r)
{
  if (!group_begin("forced rows")) return;
  for (int32_t row = 0; row < variant_count; row++) {
    case_begin("%s", variants[row].name);
    int32_t forced[OP_COUNT] = {0};
    forced[variants[row].op] = row + 1;
    for (int n = 0; n < 500; n++) {
      const gpu *g = &gpus[n % GPU_COUNT];
      const machine free_choice = gpu_machine(g, NULL), m = gpu_machine(g, forced);
      cumoe_moe_desc given = random_desc(r), d;
      shape s[MAX_SHAPES];
      if (!CHECK_OK(check_moe_desc(&given, &d))) break;
      int count = shapes_of(&d, random_tokens(r, &d), n & 1 ? MAJOR_K : MAJOR_N, MAJOR_K, n & 2, s);
      for (int j = 0; j < count; j++) {
        int32_t want = (int)s[j].op != variants[row].op    ? choose(&free_choice, &s[j])
                       : row_can(&variants[row], g, &s[j]) ? row
                                                           : -1;
        CHECK_MSG(choose(&m, &s[j]) == want, "row %d, not %d, for %s", choose(&m, &s[j]), want, shape_name(g, &s[j]));
      }
    }
    case_end();
  }
  group_end();
}

/* ---- thresholds ------------------------------------------------------------------------------------ */

typedef struct threshold {
  int op, form;
  int32_t up_to, bm, bn;
} threshold;

#define ANY_ROWS INT32_MAX
static const threshold thresholds[] = {
#define TUNE(op, up_to, form, BM, BN) {OP_##op, FORM_##form, up_to, BM, BN},
#include "../host/tune_any.def"
#undef TUNE
    {-1, 0, 0, 0, 0}};

static bool is_row(const threshold *t, const variant *v)
{
  return v->op == t->op && v->form == t->form && v->bm == t->bm && v->bn == t->bn;
}

/* The first line that reaches `rows` and has a kernel for the shape, and that kernel; -1: none. */
static int line_by_table(const gpu *g, const shape *s, int64_t rows, int32_t *row)
{
  *row = -1;
  for (const threshold *t = thresholds; t->op >= 0; t++)
    for (int32_t i = 0; i < variant_count && t->op == (int)s->op && rows <= t->up_to; i++)
      if (is_row(t, &variants[i]) && row_can(&variants[i], g, s)) {
        *row = i;
        return (int)(t - thresholds);
      }
  return -1;
}

/* A shape of the line's operation with exactly `per_expert` rows for each expert. bits: layout, and f32 for the
 * second type. */
static shape threshold_shape(const threshold *t, int64_t per_expert, int32_t experts, int32_t type, int bits)
{
  const int32_t other = bits & 2 ? DT_F32 : type;
  shape s = {.op = (operation)t->op,
             .in = type,
             .w = type,
             .tokens = per_expert,
             .rows = per_expert * experts,
             .experts = experts,
             .n = 512,
             .k = 512,
             .top_k = 1};
  if (s.op == OP_up || s.op == OP_down) s.major = bits & 1 ? MAJOR_N : MAJOR_K;
  if (s.op == OP_router) s.w = other, s.rows = s.tokens, s.experts = s.n = 256; /* a token counts as one */
  if (s.op == OP_combine) s.w = other;
  if (s.op == OP_gate || s.op == OP_map || s.op == OP_map_count) s.in = s.w = 0;
  return s;
}

static const int32_t float_types[] = {DT_BF16, DT_F16, DT_F32};

/* Whether the line is the answer for any type and layout on any GPU. */
static bool line_decides(const threshold *t)
{
  for (int i = 1; i < GPU_COUNT; i++)
    for (int n = 0; n < 3 * 4; n++) {
      const int64_t rows = t->up_to == ANY_ROWS ? 1000000 : t->up_to;
      const shape s = threshold_shape(t, rows, 1, float_types[n % 3], n / 3);
      int32_t row;
      if (line_by_table(&gpus[i], &s, rows, &row) == (int)(t - thresholds)) return true;
    }
  return false;
}

/* Every line names a kernel that exists; a line that is never reached is told. */
static void test_threshold_table(void)
{
  if (!group_begin("table of thresholds")) return;
  for (const threshold *t = thresholds; t->op >= 0; t++) {
    bool found = false;
    case_begin("line %d", (int)(t - thresholds) + 1);
    for (int32_t i = 0; i < variant_count; i++) found = found || is_row(t, &variants[i]);
    CHECK_MSG(found, "op %d up to %d: no kernel of form %d, %dx%d", t->op, t->up_to, t->form, t->bm, t->bn);
    case_end();
    if (!line_decides(t))
      printf("# never decides: line %d, op %d up to %d, form %d, %dx%d\n", (int)(t - thresholds) + 1, t->op, t->up_to,
             t->form, t->bm, t->bn);
  }
  group_end();
}

/* Of the table: with one row an expert, 0 for fewer than two tiles of 128 channels an SM. */
static int64_t scale_of(const gpu *g, const shape *s, int64_t per_expert)
{
  const bool gemm = s->op == OP_up || s->op == OP_down;
  return gemm && per_expert == 1 && s->rows * wide_ceil(s->n, 128) < 2 * g->sms ? 0 : per_expert;
}

/* At the threshold and one row an expert past it: rows = per_expert * experts, so the expectation is exact. */
static void check_threshold(const gpu *g, const threshold *t, int64_t per_expert, int32_t experts, int32_t type,
                            int bits)
{
  int32_t want;
  if (per_expert < 1 || per_expert * experts > INT32_MAX) return;
  const shape s = threshold_shape(t, per_expert, experts, type, bits);
  const machine m = gpu_machine(g, NULL);
  const int32_t got = choose(&m, &s);
  line_by_table(g, &s, scale_of(g, &s, per_expert), &want);
  if (got >= 0) chosen[got] = true;
  CHECK_MSG(want < 0 || got == want, "%lld rows an expert: row %d, the table says %d, for %s", (long long)per_expert,
            got, want, shape_name(g, &s));
  CHECK_MSG(got >= 0, "no row for %s", shape_name(g, &s));
}

/* Around two tiles an SM. */
static void check_scant(const threshold *t, const gpu *g)
{
  if (t->op != OP_up && t->op != OP_down) return;
  for (int i = 0; i < 3 * 5 * 2; i++) {
    const int32_t tiles = i / 3 % 5, rows = 2 * g->sms / (tiles + 1) + i % 3 - 1, n = 128 * tiles + (i / 15 ? 8 : 128);
    shape s = threshold_shape(t, 1, rows, DT_BF16, 0);
    int32_t want;
    s.n = n;
    const machine m = gpu_machine(g, NULL);
    line_by_table(g, &s, scale_of(g, &s, 1), &want);
    CHECK_MSG(choose(&m, &s) == want, "%d rows, %d channels", rows, n);
    s.experts--; /* two rows an expert */
    line_by_table(g, &s, 2, &want);
    CHECK_MSG(choose(&m, &s) == want, "%d rows, %d channels, an expert fewer", rows, n);
  }
}

static void test_thresholds(void)
{
  static const int32_t counts[] = {1, 8, 128, 1024};
  if (!group_begin("thresholds +-1")) return;
  for (const threshold *t = thresholds; t->op >= 0; t++) {
    case_begin("op %d up to %d", t->op, t->up_to);
    for (int i = 1; i < GPU_COUNT; i++)
      for (int n = 0; n < 3 * 4 * 4; n++)
        for (int64_t at = -1; at <= 1; at++)
          check_threshold(&gpus[i], t, (t->up_to == ANY_ROWS ? 100000 : t->up_to) + at, counts[n / 12],
                          float_types[n % 3], n / 3 % 4);
    for (int i = 1; i < GPU_COUNT; i++) check_scant(t, &gpus[i]);
    case_end();
  }
  group_end();
}

/* ---- grids ----------------------------------------------------------------------------------------- */

/* Rows of each expert: all to one, evenly, one each, or at random; sums to `rows`. */
static void distribute(rng *r, int kind, int64_t rows, int32_t experts, int64_t *count)
{
  memset(count, 0, (size_t)experts * sizeof *count);
  for (int32_t e = 0; e < experts; e++) count[e] = kind == 0 ? (e ? 0 : rows) : rows / experts + (e < rows % experts);
  for (int32_t e = 0; kind >= 2 && e + 1 < experts; e++) { /* move rows to the neighbour, often to just past a tile */
    int64_t moved = kind == 2 ? larger(0, count[e] - 1) : rng_below(r, count[e] + 1);
    count[e] -= moved;
    count[e + 1] += moved;
  }
}

static int64_t tiles_of(const int64_t *count, int32_t experts, const variant *v, int32_t n)
{
  int64_t tiles = 0;
  for (int32_t e = 0; e < experts; e++) tiles += (count[e] + v->bm - 1) / v->bm;
  return tiles * ((n + v->bn - 1) / v->bn);
}

/* A persistent grid may be smaller than the work only when it fills the GPU. */
static void check_gemm_grid(rng *r, const gpu *g, const variant *v, const shape *s, int64_t grid)
{
  static int64_t count[CUMOE_MAX_EXPERTS];
  const int64_t full = (int64_t)g->sms * v->ctas;
  CHECK_MSG(grid >= 1 && grid <= full, "%s: grid %lld of %lld for %s", v->name, (long long)grid, (long long)full,
            shape_name(g, s));
  for (int kind = 0; kind < 4; kind++) {
    distribute(r, kind, s->rows, s->experts, count);
    int64_t tiles = tiles_of(count, s->experts, v, s->n);
    CHECK_MSG(grid == full || grid >= tiles, "%s: grid %lld, %lld tiles for %s", v->name, (long long)grid,
              (long long)tiles, shape_name(g, s));
  }
}

/* Token ranges, times column ranges where a row has them; few_up may meet an expert a pair, and no more CTAs than SMs. */
static wide simple_grid(const variant *v, const shape *s)
{
  if (s->op == OP_few_up || s->op == OP_few_down)
    return smaller((s->op == OP_few_up ? s->rows : 1) * (int64_t)wide_ceil(s->n, v->bn), HOPPER_SMS);
  const int64_t tokens = s->op == OP_combine ? COMBINE_TOKENS(s->top_k) : larger(v->bm, v->units);
  if (v->form == FORM_row) return wide_ceil(s->tokens, tokens) * larger(1, v->lanes / v->threads);
  if (v->form == FORM_wgmma) return 2 * wide_ceil(s->tokens, 2 * tokens) * wide_ceil(s->n, v->bn); /* clusters of two */
  const int32_t columns = s->op == OP_router ? v->bn : v->columns;
  return wide_ceil(s->tokens, tokens) * (columns > 0 ? wide_ceil(s->n, columns) : 1);
}

static wide cpu_grid(const shape *s)
{
  if (s->op == OP_map) return 1;
  if (s->op == OP_up || s->op == OP_down) return (wide)s->experts * wide_ceil(s->n, CPU_N_BLOCK);
  return s->tokens;
}

static void check_grid(rng *r, const gpu *g, const shape *s)
{
  const machine m = gpu_machine(g, NULL);
  int32_t row = choose(&m, s);
  if (row < 0) return; /* told elsewhere */
  const variant *v = &variants[row];
  const int64_t grid = grid_size(&m, v, s);
  if (g->cc == 0) {
    CHECK_MSG(grid == (int64_t)cpu_grid(s), "%s: %lld units for %s", v->name, (long long)grid, shape_name(g, s));
    return;
  }
  CHECK_MSG(grid > 0 && grid <= INT32_MAX, "%s: grid %lld for %s", v->name, (long long)grid, shape_name(g, s));
  if (s->op == OP_up || s->op == OP_down)
    check_gemm_grid(r, g, v, s, grid);
  else if (s->op != OP_map && s->op != OP_map_count)
    CHECK_MSG(grid == (int64_t)simple_grid(v, s), "%s: grid %lld for %s", v->name, (long long)grid, shape_name(g, s));
  else
    CHECK_MSG(grid == map_chunking(s->rows).chunks, "%s: grid %lld for %s", v->name, (long long)grid, shape_name(g, s));
}

static void test_grids(rng *r)
{
  if (!group_begin("grids")) return;
  for (int i = 0; i < GPU_COUNT; i++) {
    case_begin("cc %d", gpus[i].cc);
    for (int n = 0; n < 4000; n++) {
      cumoe_moe_desc given = random_desc(r), d;
      shape s[MAX_SHAPES];
      if (!CHECK_OK(check_moe_desc(&given, &d))) break;
      int64_t tokens = random_tokens(r, &d);
      while ((wide)tokens * d.hidden * 2 > (wide)1 << 40)
        tokens = (tokens + 1) / 2; /* x in a TiB: more than any GPU has */
      int count = shapes_of(&d, tokens, n & 1 ? MAJOR_K : MAJOR_N, n & 2 ? MAJOR_K : MAJOR_N, n & 4, s);
      for (int j = 0; j < count; j++) check_grid(r, &gpus[i], &s[j]);
    }
    case_end();
  }
  group_end();
}

/* Every CUDA row, also those not chosen now, over every token count around its tile. */
static void test_grids_around_tiles(rng *r)
{
  if (!group_begin("grids of all rows around tile edges")) return;
  for (int32_t row = 0; row < variant_count; row++) {
    const variant *v = &variants[row];
    if (v->arch == ARCH_cpu || v->op == OP_map || v->op == OP_map_count) continue;
    case_begin("%s", v->name);
    const gpu g = {90, HOPPER_SMS, 232448};
    const machine m = gpu_machine(&g, NULL);
    const int32_t tile = (int32_t)larger(1, larger(v->bn, v->columns));
    for (int64_t tokens = 1; tokens <= 4 * larger(v->bm, v->units) + 1; tokens++)
      for (int32_t n = tile < 8 ? tile : 8; n <= 3 * tile; n += (int32_t)larger(8, (tile / 4) & ~7)) {
        shape s = {.op = (operation)v->op,
                   .tokens = tokens,
                   .rows = tokens,
                   .experts = 1 + (int32_t)rng_below(r, 16),
                   .n = n,
                   .k = 64,
                   .top_k = 1};
        const int64_t grid = grid_size(&m, v, &s);
        if (v->op == OP_up || v->op == OP_down)
          check_gemm_grid(r, &g, v, &s, grid);
        else
          CHECK_MSG(grid == (int64_t)simple_grid(v, &s), "grid %lld for %s", (long long)grid, shape_name(&g, &s));
      }
    case_end();
  }
  group_end();
}

/* ---- rows of softmax and norms --------------------------------------------------------------------- */

/* The shortest that holds it, of those that the GPU can run; else one that reads it twice. */
static int32_t shortest_row(const gpu *g, const shape *s)
{
  int32_t best = -1;
  for (int32_t i = 0; i < variant_count; i++) {
    const variant *v = &variants[i];
    if (!row_can(v, g, s)) continue;
    const bool first = best < 0 || variants[best].form == FORM_sweep;
    if (first || (v->form == FORM_row && v->columns < variants[best].columns)) best = i;
  }
  return best;
}

/* Around what each row of the table holds. */
static void test_row_lengths(void)
{
  if (!group_begin("rows of softmax and norms")) return;
  for (int32_t row = 0; row < variant_count; row++) {
    const variant *v = &variants[row];
    if (v->arch == ARCH_cpu || (v->op != OP_softmax && v->op != OP_norm)) continue;
    case_begin("%s", v->name);
    for (int i = 0; i < GPU_COUNT; i++)
      for (int32_t n = v->columns > 1 ? v->columns - 1 : 1; n <= v->columns + 1; n++) {
        const shape s = {.op = (operation)v->op, .in = v->x, .w = v->y, .tokens = 1000, .n = n};
        const machine m = gpu_machine(&gpus[i], NULL);
        const int32_t got = choose(&m, &s), want = shortest_row(&gpus[i], &s);
        CHECK_MSG(got >= 0 && got == want, "row %d, not %d, for %s", got, want, shape_name(&gpus[i], &s));
        if (got >= 0) chosen[got] = true;
      }
    case_end();
  }
  group_end();
}

/* gelu has kernels of its own. */
static void test_functions(void)
{
  if (!group_begin("elementwise functions")) return;
  for (int i = 1; i < GPU_COUNT; i++)
    for (int f = EW_ADD; f <= EW_GELU_TANH; f++)
      for (int type = 0; type < 3; type++) {
        const int32_t dtype = float_types[type];
        const shape s = {.op = OP_elementwise, .in = dtype, .w = dtype, .tokens = 1000, .n = f};
        const machine m = gpu_machine(&gpus[i], NULL);
        case_begin("cc %d function %d type %d", gpus[i].cc, f, dtype);
        const int32_t got = choose(&m, &s);
        if (CHECK(got >= 0)) {
          CHECK(row_can(&variants[got], &gpus[i], &s));
          chosen[got] = true;
        }
        case_end();
      }
  group_end();
}

/* ---- the map's chunks ------------------------------------------------------------------------------ */

static void check_chunking(int64_t pairs)
{
  const map_chunks c = map_chunking(pairs);
  CHECK_MSG(c.chunks >= 1 && c.chunks <= 256 && c.chunk_pairs >= 1024 && c.chunk_pairs % 1024 == 0,
            "%lld pairs: %d chunks of %d", (long long)pairs, c.chunks, c.chunk_pairs);
  CHECK_MSG((int64_t)c.chunks * c.chunk_pairs >= pairs, "%lld pairs: %d chunks of %d do not cover them",
            (long long)pairs, c.chunks, c.chunk_pairs);
  CHECK_MSG(c.chunks == 1 || (int64_t)(c.chunks - 1) * c.chunk_pairs < pairs,
            "%lld pairs: the last of %d chunks of %d is empty", (long long)pairs, c.chunks, c.chunk_pairs);
}

static void test_chunking(rng *r)
{
  if (!group_begin("chunks of the map")) return;
  case_begin("small");
  for (int64_t pairs = 1; pairs <= 300000; pairs++) check_chunking(pairs);
  case_end();
  case_begin("steps");
  for (int64_t at = 256 * 1024; at < INT32_MAX - 1; at += 256 * 1024)
    for (int64_t i = -1; i <= 1; i++) check_chunking(at + i);
  check_chunking(INT32_MAX);
  case_end();
  case_begin("random");
  for (int i = 0; i < 200000; i++) check_chunking(log_uniform(r, INT32_MAX));
  case_end();
  group_end();
}

/* ---- workspace ------------------------------------------------------------------------------------- */

typedef struct region {
  const char *name;
  size_t at;
  wide bytes;
} region;
enum { MAX_REGIONS = 15 };

static int regions_of(const cumoe_moe_desc *d, int64_t tokens, const workspace_layout *w, region *out)
{
  const wide k = d->routing.top_k, t = tokens, element = d->dtype == CUMOE_F32 ? 4 : 2, local = d->local_experts;
  const map_chunks c = map_chunking(smaller(tokens, INT32_MAX / (int64_t)k) * (int64_t)k);
  const region all[MAX_REGIONS] = {{"logits", w->logits, t * router_experts(d) * 4},
                                   {"ids", w->ids, t * k * 4},
                                   {"weights", w->weights, t * k * 4},
                                   {"counts", w->counts, local * 4},
                                   {"offsets", w->offsets, (local + 1) * 4},
                                   {"row_pair", w->row_pair, t * k * 4},
                                   {"slot_row", w->slot_row, t * k * 4},
                                   {"hist", w->hist, c.chunks > 1 ? (wide)c.chunks * local * 4 : 0},
                                   {"progress", w->progress, PROGRESS_WORDS(t * k, local) * 4},
                                   {"h", w->h, t * k * d->inter * element},
                                   {"few_words", w->few_words, FEW_BYTES(t * k < FEW_PAIRS(FEW_TOKENS) ? t * k : FEW_PAIRS(FEW_TOKENS))},
                                   {"y", w->y, t * k * d->hidden * element},
                                   {"shared_h", w->shared_h, t * d->shared_inter * element},
                                   {"shared_y", w->shared_y, d->shared_inter ? t * d->hidden * element : 0},
                                   {"shared_logit", w->shared_logit, d->shared_inter ? t * 4 : 0}};
  memcpy(out, all, sizeof all);
  return MAX_REGIONS;
}

static int by_offset(const void *a, const void *b)
{
  const region *x = a, *y = b;
  return x->at < y->at ? -1 : x->at > y->at;
}

static void check_layout(const cumoe_moe_desc *d, int64_t tokens)
{
  workspace_layout w;
  region all[MAX_REGIONS];
  wide end = 0;
  if (!CHECK_MSG(plan_workspace_layout(d, tokens, &w), "%lld tokens refused", (long long)tokens)) return;
  const int count = regions_of(d, tokens, &w, all);
  qsort(all, (size_t)count, sizeof all[0], by_offset);
  for (int i = 0; i < count; i++) {
    if (all[i].bytes == 0) continue;
    CHECK_MSG(all[i].at % 256 == 0, "%s lies at %zu", all[i].name, all[i].at);
    CHECK_MSG((wide)all[i].at >= end, "%s at %zu overlaps the region before it", all[i].name, all[i].at);
    end = (wide)all[i].at + all[i].bytes;
  }
  CHECK_MSG(end <= (wide)w.bytes && w.bytes % 256 == 0, "%zu bytes end before the last region", w.bytes);
  const wide most = end + 256 + (wide)1024 * 256 * 4 + 256;
  CHECK_MSG((wide)w.bytes <= most, "%zu bytes are more than needed", w.bytes);
}

static void test_layout(rng *r)
{
  if (!group_begin("workspace regions")) return;
  case_begin("random");
  for (int i = 0; i < 60000; i++) {
    cumoe_moe_desc given = random_desc(r), d;
    if (!CHECK_OK(check_moe_desc(&given, &d))) break;
    check_layout(&d, random_tokens(r, &d));
  }
  case_end();
  case_begin("no tokens");
  cumoe_moe_desc given = random_desc(r), d;
  workspace_layout w;
  CHECK_OK(check_moe_desc(&given, &d));
  CHECK(plan_workspace_layout(&d, 0, &w) && w.bytes == 0);
  case_end();
  group_end();
}

static size_t bytes_for(const cumoe_moe_desc *d, int64_t tokens)
{
  workspace_layout w;
  return plan_workspace_layout(d, tokens, &w) ? w.bytes : SIZE_MAX;
}

static void check_growth(const cumoe_moe_desc *d, int64_t from, int64_t to)
{
  CHECK_MSG(bytes_for(d, from) <= bytes_for(d, to),
            "%lld tokens need %zu bytes, %lld need %zu (k %d, %d local experts)", (long long)from, bytes_for(d, from),
            (long long)to, bytes_for(d, to), d->routing.top_k, d->local_experts);
}

static void check_growth_by_dimension(rng *r, const cumoe_moe_desc *d, int64_t tokens)
{
  for (int i = 0; i < 6; i++) {
    cumoe_moe_desc more = *d;
    int32_t *field[] = {&more.num_experts, &more.local_experts, &more.hidden,
                        &more.inter,       &more.shared_inter,  &more.routing.top_k};
    *field[i] += i >= 2 && i <= 4 ? 8 * (int32_t)log_uniform(r, 100) : (int32_t)log_uniform(r, 4);
    CHECK_MSG(bytes_for(d, tokens) <= bytes_for(&more, tokens), "dimension %d: more of it needs less (%lld tokens)", i,
              (long long)tokens);
  }
}

/* Tokens whose pairs cross from one chunking to the next. */
static void check_growth_at_steps(const cumoe_moe_desc *d)
{
  static const int64_t steps[] = {1024, 4096, 5120, 8192, 262144, 524288, 786432, 1048576, 268435456, INT32_MAX};
  const int64_t k = d->routing.top_k;
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++)
    for (int64_t t = larger(1, steps[i] / k - 2); t <= steps[i] / k + 1; t++) check_growth(d, t, t + 1);
}

static void test_growth(rng *r)
{
  if (!group_begin("workspace grows")) return;
  case_begin("random");
  for (int i = 0; i < 20000; i++) {
    cumoe_moe_desc given = random_desc(r), d;
    if (!CHECK_OK(check_moe_desc(&given, &d))) break;
    const int64_t tokens = random_tokens(r, &d);
    check_growth(&d, tokens, tokens + 1);
    check_growth(&d, tokens, tokens + log_uniform(r, tokens));
    check_growth_by_dimension(r, &d, tokens);
    check_growth_at_steps(&d);
  }
  case_end();
  case_begin("every token count up to 9000");
  cumoe_moe_desc d = {.num_experts = 1024, .local_experts = 1024, .hidden = 8, .inter = 8, .dtype = CUMOE_BF16};
  for (d.routing.top_k = 1; d.routing.top_k <= 32; d.routing.top_k += 1 + d.routing.top_k / 4)
    for (int64_t t = 1; t < 9000; t++) check_growth(&d, t, t + 1);
  case_end();
  group_end();
}

/* Sizes far past every memory are refused exactly where they would pass 2^62 bytes. */
static void test_overflow(rng *r)
{
  if (!group_begin("workspace overflow")) return;
  case_begin("random");
  int refused = 0, taken = 0;
  for (int i = 0; i < 60000; i++) {
    cumoe_moe_desc given = random_desc(r), d;
    workspace_layout w;
    region all[MAX_REGIONS];
    if (!CHECK_OK(check_moe_desc(&given, &d))) break;
    const int64_t tokens = (int64_t)1 << (20 + rng_below(r, 34));
    const bool fits = plan_workspace_layout(&d, tokens, &w);
    wide sum = 0;
    const int count = regions_of(&d, tokens, &w, all);
    for (int j = 0; j < count; j++)
      sum += ((j == 7 ? 256 * (wide)d.local_experts * 4 : all[j].bytes) + 255) & ~(wide)255;
    CHECK_MSG(fits == (sum < (wide)1 << 62), "%lld tokens: %s", (long long)tokens, fits ? "accepted" : "refused");
    CHECK_MSG(!fits || (wide)w.bytes == sum, "%lld tokens: %zu bytes", (long long)tokens, w.bytes);
    fits ? taken++ : refused++;
  }
  CHECK_MSG(refused > 1000 && taken > 1000, "%d refused, %d accepted: the test does not reach the limit", refused,
            taken);
  case_end();
  group_end();
}

/* ---- early starts ---------------------------------------------------------------------------------- */

/* The layers that decided the limit, on both sides of it, in up and down alike. */
static void test_early_starts(void)
{
  static const struct {
    const char *name;
    int32_t experts, top_k, hidden, inter, tokens;
    bool early;
  } layers[] = {
      {"qwen3-235b T 16", 128, 8, 4096, 1536, 16, true},   {"qwen3-235b T 17", 128, 8, 4096, 1536, 17, false},
      {"gpt-oss T 8", 128, 4, 2880, 2880, 8, true},        {"gpt-oss T 32", 128, 4, 2880, 2880, 32, false},
      {"gpt-oss T 128", 128, 4, 2880, 2880, 128, false},   {"deepseek-v3 T 8", 256, 8, 7168, 2048, 8, true},
      {"deepseek-v3 T 32", 256, 8, 7168, 2048, 32, false}, {"deepseek-v3 T 128", 256, 8, 7168, 2048, 128, false},
      {"mixtral-8x7b T 2", 8, 2, 4096, 14336, 2, true},
  };
  const variant thin = {.form = FORM_thin}, tile = {.form = FORM_tile};
  if (!group_begin("early starts")) return;
  for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
    const int64_t rows = (int64_t)layers[i].tokens * layers[i].top_k;
    const shape up = {.op = OP_up,
                      .in = DT_BF16,
                      .w = DT_BF16,
                      .tokens = layers[i].tokens,
                      .rows = rows,
                      .experts = layers[i].experts,
                      .n = layers[i].inter,
                      .k = layers[i].hidden};
    shape down = up;
    down.op = OP_down, down.n = up.k, down.k = up.n;
    case_begin("%s", layers[i].name);
    CHECK(starts_early(&thin, &up) == layers[i].early);
    CHECK(starts_early(&thin, &down) == layers[i].early);
    CHECK(starts_early(&tile, &up));
    case_end();
  }
  group_end();
}

/* Up to 80 MiB of h and y, in whole lines. */
static void test_discarded_rows(void)
{
  static const struct {
    int32_t dtype, top_k, hidden, inter;
    int64_t tokens;
    bool discarded;
  } layers[] = {{CUMOE_BF16, 8, 2048, 768, 1, true},     {CUMOE_BF16, 8, 2048, 768, 1861, true},
                {CUMOE_BF16, 8, 2048, 768, 1862, false}, {CUMOE_F32, 8, 2048, 768, 930, true},
                {CUMOE_F32, 8, 2048, 768, 931, false},   {CUMOE_F16, 4, 2880, 2880, 1, true},
                {CUMOE_F16, 1, 2880, 2880, 7281, true},  {CUMOE_F16, 1, 2880, 2880, 7282, false},
                {CUMOE_F16, 1, 2888, 2880, 1, false},    {CUMOE_F16, 1, 2880, 2848, 1, false},
                {CUMOE_F32, 1, 2880, 2848, 1, true},     {CUMOE_BF16, 32, 1 << 20, 1 << 20, INT32_MAX / 32, false}};
  if (!group_begin("discarded rows")) return;
  for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
    const cumoe_moe_desc d = {.dtype = layers[i].dtype,
                              .hidden = layers[i].hidden,
                              .inter = layers[i].inter,
                              .routing.top_k = layers[i].top_k};
    case_begin("line %d", (int)i + 1);
    CHECK(discards_rows(&d, layers[i].tokens) == layers[i].discarded);
    case_end();
  }
  group_end();
}

/* ---- copied rows ----------------------------------------------------------------------------------- */

/* From 97 rows an expert up (of fewer than 2048 channels 161), and only where bulk copies will fetch them. */
static void test_copied_rows(void)
{
  bool built = false;
  for (int32_t i = 0; i < variant_count; i++) built = built || variants[i].arch == ARCH_sm90;
  if (!group_begin("copied rows")) return;
  for (int n = 0; n < 2 * 2 * 3; n++) {
    const int64_t from = n / 6 ? 161 : 97, per_expert = from - 1 + n % 3;
    const threshold up = {OP_up, 0, 0, 0, 0};
    case_begin("%lld rows an expert, %s", (long long)per_expert, n / 3 % 2 ? "f16" : "bf16");
    shape s = threshold_shape(&up, per_expert, 128, n / 3 % 2 ? DT_F16 : DT_BF16, 0);
    s.n = n / 6 ? 2040 : 2048;
    for (int i = 0; i < GPU_COUNT; i++) {
      const machine m = gpu_machine(&gpus[i], NULL);
      CHECK_MSG(wants_copy(&m, &s) == (built && gpus[i].cc == 90 && per_expert >= from), "cc %d", gpus[i].cc);
      shape other = s;
      other.no_tmap = true;
      CHECK(!wants_copy(&m, &other));
      other = threshold_shape(&up, per_expert, 128, s.in, 1);
      CHECK(!wants_copy(&m, &other));
    }
    case_end();
  }
  group_end();
}

/* ---- down after up by expert ----------------------------------------------------------------------- */

static int32_t row_of_form(operation op, int wanted, int32_t dtype)
{
  for (int32_t i = 0; i < variant_count; i++)
    if (variants[i].op == (int)op && variants[i].form == wanted && variants[i].x == dtype) return i;
  return -1;
}

/* Where both are FORM_wgmma: from 49 rows an expert up, of weights and rows that tensor maps can describe. */
static void test_by_expert(void)
{
  const bool built = row_of_form(OP_up, FORM_wgmma, DT_BF16) >= 0;
  const threshold op_up = {OP_up, 0, 0, 0, 0}, op_down = {OP_down, 0, 0, 0, 0};
  if (!group_begin("down after up by expert")) return;
  for (int64_t per_expert = 48; per_expert <= 50; per_expert++) {
    case_begin("%lld rows an expert", (long long)per_expert);
    const shape up = threshold_shape(&op_up, per_expert, 128, DT_BF16, 0),
                down = threshold_shape(&op_down, per_expert, 128, DT_BF16, 0);
    shape bare_up = up, bare_down = down;
    bare_up.no_tmap = bare_down.no_tmap = true;
    int32_t forced[16] = {0};
    forced[OP_down] = row_of_form(OP_down, FORM_tile, DT_BF16) + 1;
    for (int i = 0; i < GPU_COUNT; i++) {
      const machine m = gpu_machine(&gpus[i], NULL), other = gpu_machine(&gpus[i], forced);
      CHECK_MSG(goes_by_expert(&m, &up, &down) == (built && gpus[i].cc == 90 && per_expert > 48), "cc %d", gpus[i].cc);
      CHECK(!goes_by_expert(&m, &bare_up, &down) && !goes_by_expert(&m, &up, &bare_down));
      CHECK(!goes_by_expert(&other, &up, &down));
    }
    case_end();
  }
  group_end();
}

/* ---- few tokens ------------------------------------------------------------------------------------ */

typedef struct few_shapes {
  shape up, down;
} few_shapes;

static few_shapes few_layer(int64_t tokens, int32_t top_k, int32_t hidden, int32_t inter)
{
  const shape up = {.op = OP_few_up,
                    .in = DT_BF16,
                    .w = DT_BF16,
                    .major = MAJOR_K,
                    .tokens = tokens,
                    .rows = tokens * top_k,
                    .experts = 128,
                    .n = inter,
                    .k = hidden,
                    .top_k = top_k,
                    .no_tmap = true}; /* they take none */
  few_shapes s = {up, up};
  s.down.op = OP_few_down, s.down.n = hidden, s.down.k = inter;
  return s;
}

static bool few_on(const gpu *g, const int32_t *forced, few_shapes s)
{
  const machine m = gpu_machine(g, forced);
  return wants_few(&m, &s.up, &s.down);
}

/* By sizes: layers on both sides of each limit, of HOPPER_SMS runs of 8 channels. */
static void check_few_sizes(const gpu *hopper)
{
  static const struct {
    int64_t tokens;
    int32_t top_k, hidden, inter, experts;
    bool wanted;
  } layers[] = {
      {1, 8, 2048, 192, 128, true},    {1, 8, 2048, 184, 128, false},  {8, 8, 2048, 192, 128, true},
      {8, 8, 2048, 184, 128, false},   {9, 8, 2048, 512, 128, true},   {9, 8, 2048, 504, 128, false},
      {8, 8, 2048, 504, 128, true},    {9, 4, 2048, 768, 128, true},   {1, 32, 64, 768, 128, true},
      {8, 32, 2048, 768, 128, true},   {8, 33, 2048, 768, 128, false}, {32, 8, 2048, 768, 128, true},
      {33, 7, 2048, 768, 128, false},  {1, 4, 2880, 2880, 128, true},  {18, 4, 2880, 2880, 128, true},
      {19, 4, 2880, 2880, 128, false}, {1, 8, 7168, 2048, 256, true},  {8, 8, 7168, 2048, 256, true},
      {9, 8, 7168, 2048, 256, false},  {11, 8, 7168, 2048, 128, true}, {12, 8, 7168, 2048, 128, false},
      {2, 8, 952, 768, 128, true},     {2, 8, 944, 768, 128, false},   {2, 8, 1056, 768, 128, true},
      {2, 8, 1064, 768, 128, false},   {2, 8, 1904, 768, 128, true},   {2, 8, 1896, 768, 128, false},
      {2, 8, 2112, 768, 128, true},    {2, 8, 2120, 768, 128, false},  {2, 8, 3808, 768, 128, true},
      {2, 8, 3800, 768, 128, false},   {2, 8, 64, 14336, 128, false},  {16, 8, 2048, 1024, 64, true},
      {32, 8, 2048, 1024, 64, true},   {8, 2, 4096, 14336, 8, true},   {8, 4, 2048, 768, 4, true},
      {16, 2, 4096, 14336, 8, true},   {17, 2, 4096, 14336, 8, false}, {32, 8, 2048, 1024, 63, false},
  };
  for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
    case_begin("T %d k %d H %d I %d E %d", (int)layers[i].tokens, layers[i].top_k, layers[i].hidden, layers[i].inter,
               layers[i].experts);
    few_shapes s = few_layer(layers[i].tokens, layers[i].top_k, layers[i].hidden, layers[i].inter);
    s.up.experts = s.down.experts = layers[i].experts;
    CHECK(few_on(hopper, NULL, s) == layers[i].wanted);
    case_end();
  }
}

/* By machine, layout and type. */
static void check_few_kinds(bool built)
{
  case_begin("machines, layouts, types");
  for (int i = 0; i < GPU_COUNT; i++) {
    few_shapes s = few_layer(1, 8, 2048, 768);
    CHECK_MSG(few_on(&gpus[i], NULL, s) == (built && gpus[i].cc == 90), "cc %d", gpus[i].cc);
    s.up.major = MAJOR_N;
    CHECK(!few_on(&gpus[i], NULL, s));
    s = few_layer(1, 8, 2048, 768);
    s.down.major = MAJOR_N;
    CHECK(!few_on(&gpus[i], NULL, s));
    s = few_layer(1, 8, 2048, 768);
    s.up.in = s.up.w = s.down.in = s.down.w = DT_F32;
    CHECK(!few_on(&gpus[i], NULL, s));
  }
  case_end();
}

/* By what is forced: one of theirs takes whatever both can serve with rows alike, one of the stages' keeps them out. */
static void check_few_forced(const gpu *hopper)
{
  for (int32_t i = 0; i < variant_count; i++) {
    const variant *v = &variants[i];
    if (v->arch == ARCH_cpu || v->x == DT_F16 || v->x == DT_F32) continue;
    const bool few = v->op == OP_few_up || v->op == OP_few_down;
    const bool stage = v->op >= OP_map_count && v->op <= OP_combine && v->op != OP_permute;
    int32_t forced[OP_COUNT] = {0};
    forced[v->op] = i + 1;
    case_begin("%s", v->name);
    CHECK(few_on(hopper, forced, few_layer(1, 8, 2048, 768)) == (few || !stage));
    CHECK(few_on(hopper, forced, few_layer(2, 8, 2048, 768)) == (few ? v->bm > 1 : !stage));
    CHECK(few_on(hopper, forced, few_layer(9, 8, 2048, 768)) == (few ? v->bm > 1 : !stage));
    CHECK(few_on(hopper, forced, few_layer(2, 8, 64, 64)) == (few && v->bm > 1));
    CHECK(few_on(hopper, forced, few_layer(32, 8, 64, 64)) == (few && v->bm > 1));
    CHECK(!few_on(hopper, forced, few_layer(33, 7, 2048, 768)));
    CHECK(!few_on(hopper, forced, few_layer(32, 9, 2048, 768)));
    case_end();
  }
}

/* What up can do of gates, unless one is forced. */
static void check_few_gates(const gpu *hopper)
{
  static const struct {
    int32_t experts, groups, score;
    bool bias;
    uint32_t flags;
    float softcap;
    bool wanted;
  } gates[] = {
      {256, 0, SCORE_SOFTMAX, false, 0, 0, true},
      {257, 0, SCORE_SOFTMAX, false, 0, 0, false},
      {256, 8, SCORE_SIGMOID, true, 0, 0, true},
      {256, 16, SCORE_SIGMOID, true, 0, 0, false}, /* groups of 16 */
      {64, 2, SCORE_SIGMOID, false, 0, 0, true},
      {128, 0, SCORE_SOFTMAX, false, 0, 1, false},
      {128, 0, SCORE_SOFTMAX, false, ROUTE_SCORE_AFTER_TOPK, 1, true},
      {128, 0, SCORE_SIGMOID, false, 0, 1, true},
      {128, 0, SCORE_SOFTMAX, true, 0, 0, false},
      {128, 4, SCORE_SOFTMAX, false, 0, 0, false},
      {128, 0, SCORE_SOFTMAX, true, ROUTE_SCORE_AFTER_TOPK, 0, true},
  };
  static const float bias = 0;
  for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
    const gate_args a = {.experts = gates[i].experts,
                         .n_group = gates[i].groups,
                         .score = gates[i].score,
                         .select_bias = gates[i].bias ? &bias : NULL,
                         .flags = gates[i].flags,
                         .softcap = gates[i].softcap};
    int32_t forced[OP_COUNT] = {0};
    const machine m = gpu_machine(hopper, NULL), forcing = gpu_machine(hopper, forced);
    case_begin("gate %d", (int)i);
    CHECK(few_up_gates(&m, &a) == gates[i].wanted && few_up_gates(&forcing, &a) == gates[i].wanted);
    forced[OP_gate] = 1;
    CHECK(!few_up_gates(&forcing, &a));
    case_end();
  }
}

/* One grid or two: rows of few_down are asked for by name. */
static void check_few_grids(const gpu *hopper)
{
  int32_t forced[OP_COUNT] = {0};
  const machine m = gpu_machine(hopper, NULL), forcing = gpu_machine(hopper, forced);
  case_begin("grids");
  CHECK(few_in_one(&m) && few_in_one(&forcing));
  forced[OP_few_up] = 1;
  CHECK(few_in_one(&forcing));
  forced[OP_few_down] = 1;
  CHECK(!few_in_one(&forcing));
  case_end();
}

static void test_few(void)
{
  static const gpu hopper = {90, HOPPER_SMS, 232448};
  bool built = false;
  for (int32_t i = 0; i < variant_count; i++) built = built || variants[i].op == OP_few_up;
  if (!group_begin("few tokens")) return;
  check_few_kinds(built);
  if (built) check_few_sizes(&hopper);
  if (built) check_few_forced(&hopper);
  check_few_gates(&hopper);
  check_few_grids(&hopper);
  group_end();
}

int main(int argc, char **argv)
{
  rng r = {20240917};
  test_begin(argc, argv);
  test_every_layer_has_kernels(&r);
  test_forced_rows(&r);
  test_threshold_table();
  test_thresholds();
  test_grids(&r);
  test_grids_around_tiles(&r);
  test_row_lengths();
  test_functions();
  test_early_starts();
  test_discarded_rows();
  test_copied_rows();
  test_by_expert();
  test_few();
  test_chunking(&r);
  test_layout(&r);
  test_growth(&r);
  test_overflow(&r);
  report_unchosen_rows();
  return test_end();
}
