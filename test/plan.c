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
#include "../host/format.h"
#include "../host/plan.h"
#include "../host/tune.h"
#include "../kernels/attention.h"

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

/* Whether this build has kernels of sm_90a. */
static bool gpus_have_sm90(void)
{
  for (int32_t i = 0; i < variant_count; i++)
    if (variants[i].arch == ARCH_sm90) return true;
  return false;
}

/* Made once: it is asked for before every choice. */
static machine gpu_machine(const gpu *g)
{
  static struct {
    gpu of;
    machine m;
  } made[2 * GPU_COUNT];
  static int count;
  for (int i = 0; i < count; i++)
    if (memcmp(&made[i].of, g, sizeof *g) == 0) return made[i].m;
  const int at = count < 2 * GPU_COUNT ? count++ : 0;
  made[at].of = *g;
  machine_init(&made[at].m, g->cc == 90 ? "NVIDIA H200" : "a GPU", g->cc, g->sms, g->smem);
  return made[at].m;
}

static machine forcing(const gpu *g, int32_t row)
{
  machine m = gpu_machine(g);
  m.forced[variants[row].op] = row + 1;
  return m;
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

static cumoe_format random_format(rng *r)
{
  cumoe_format f;
  switch (rng_below(r, 11)) {
  case 0: f = cumoe_format_fp8_block(rng_below(r, 2) ? CUMOE_BF16 : CUMOE_E8M0); break;
  case 1: f = cumoe_format_fp8_tensor((cumoe_rows)rng_below(r, 3)); break;
  case 2: f = cumoe_format_fp8_channel(CUMOE_F32); break;
  case 3: f = cumoe_format_int8(CUMOE_F16), f.rows = (int32_t)rng_below(r, 2) * CUMOE_ROWS_TOKEN; break;
  case 4: f = cumoe_format_int4(rng_below(r, 4) ? 32 << rng_below(r, 3) : 96, CUMOE_BF16); break;
  case 5: f = cumoe_format_mxfp4(); break;
  case 6: f = cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES); break;
  case 7: f = cumoe_format_affine4(32 << rng_below(r, 3), CUMOE_BF16); break;
  case 8: f = cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC_EXPERT); break;
  case 9: f = cumoe_format_int4(32, CUMOE_F16), f.act_order = 1; break;
  default: f = (cumoe_format){0};
  }
  if (f.block[1]) f.origin[1] = 32 * (int32_t)rng_below(r, 8);
  return f;
}

/* Widths become whole rows of 16 bytes. */
static void set_formats(rng *r, cumoe_moe_desc *d)
{
  d->up_format = random_format(r);
  d->down_format = random_format(r);
  if (d->shared_inter) d->shared_up_format = random_format(r), d->shared_down_format = random_format(r);
  int32_t *const widths[] = {&d->hidden, &d->inter, &d->shared_inter};
  for (int i = 0; i < 3; i++) *widths[i] = (*widths[i] + 31) / 32 * 32;
}

/* A description that check_moe_desc accepts, from the whole of what the manual allows. */
static cumoe_moe_desc random_desc(rng *r)
{
  cumoe_moe_desc d = {.size = sizeof d};
  d.num_experts = (int32_t)log_uniform(r, CUMOE_MAX_EXPERTS);
  d.local_experts = rng_below(r, 2) ? 0 : (int32_t)log_uniform(r, d.num_experts);
  d.hidden = 8 * (int32_t)log_uniform(r, 1 << 21);
  d.inter = 8 * (int32_t)log_uniform(r, 1 << 21);
  d.shared_inter = rng_below(r, 2) ? 0 : 8 * (int32_t)log_uniform(r, 1 << 21);
  d.dtype = one_of(r, case_dtypes, 3);
  d.out_dtype = rng_below(r, 2) ? 0 : CUMOE_F32;
  d.act = (int32_t)rng_below(r, 7);
  d.flags = rng_below(r, 4) || d.act == CUMOE_ACT_SWIGLU_OAI ? 0 : CUMOE_MOE_UNGATED;
  if (!d.shared_inter && rng_below(r, 4) == 0) d.flags |= CUMOE_MOE_UNREDUCED;
  d.routing = cumoe_routing_make(CUMOE_SCORE_SOFTMAX, 0, (uint32_t)rng_below(r, 8));
  if (rng_below(r, 3) == 0) d.routing.zero_experts = (int32_t)rng_below(r, CUMOE_MAX_EXPERTS - d.num_experts + 1);
  if (!(d.routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT) && rng_below(r, 3) == 0)
    d.routing.identity_experts = (int32_t)rng_below(r, CUMOE_MAX_EXPERTS - d.num_experts - d.routing.zero_experts + 1);
  d.routing.top_k = (int32_t)log_uniform(r, smaller(CUMOE_MAX_TOP_K, router_experts(&d)));
  if (d.dtype != CUMOE_F32 && rng_below(r, 2)) set_formats(r, &d);
  return d;
}

static int64_t random_tokens(rng *r, const cumoe_moe_desc *d)
{
  int64_t most = INT32_MAX / d->routing.top_k;
  return rng_below(r, 50) == 0 ? most - rng_below(r, 3) : log_uniform(r, most);
}

/* Of weights with the format, which are K major if they have scales; activations may become codes first. */
static op_shape with_format(op_shape s, const cumoe_format *f)
{
  const bool four = f->element == CUMOE_ELEMENT_E2M1 || f->element == CUMOE_ELEMENT_U4;
  const bool codes = f->rows != CUMOE_ROWS_AS_THEY_ARE;
  s.in = !codes ? s.out : f->element == CUMOE_ELEMENT_E4M3 ? DT_E4M3 : DT_I8;
  s.format = f->element == CUMOE_ELEMENT_DENSE  ? dense_format(s.out)
             : f->element == CUMOE_ELEMENT_E4M3 ? FORMAT_e4m3
             : f->zero == CUMOE_ZERO_VALUES     ? FORMAT_af4
             : f->element == CUMOE_ELEMENT_U4   ? FORMAT_u4
             : !four                            ? FORMAT_s8
             : f->scale == CUMOE_E4M3           ? FORMAT_nv4
                                                : FORMAT_mx4;
  s.rows_mode = f->rows == CUMOE_ROWS_STATIC_EXPERT ? (int32_t)ROWS_STATIC : f->rows;
  s.by_expert = f->rows == CUMOE_ROWS_STATIC_EXPERT || f->act_order;
  s.scale_type = f->scale;
  s.scale_block = f->block[1];
  s.symmetric = f->element == CUMOE_ELEMENT_U4 && f->zero == CUMOE_ZERO_NONE && f->offset == 8;
  const int32_t steps = f->block[1] | (f->rows == CUMOE_ROWS_GROUP ? f->row_group : 0);
  for (s.scale_run = 1 << 30; steps && (steps | f->origin[1]) % s.scale_run; s.scale_run /= 2) continue;
  if (f->element) s.major = MAJOR_K;
  return s;
}

/* The shapes that a forward pass dispatches, as many as fit in `out`; w_f32: a router in f32. */
static int shapes_of(const cumoe_moe_desc *d, int64_t tokens, weight_major up, weight_major down, bool w_f32,
                     op_shape *out)
{
  const int32_t k = d->routing.top_k, experts = router_experts(d);
  int n = 0;
  out[n++] = (op_shape){.op = OP_router,
                        .in = d->dtype,
                        .out = DT_F32,
                        .format = dense_format(w_f32 ? DT_F32 : d->dtype),
                        .scale_run = SCALE_RUN_ALL,
                        .tokens = tokens,
                        .rows = tokens,
                        .experts = experts,
                        .n = experts,
                        .k = d->hidden};
  out[n++] = (op_shape){.op = OP_gate, .tokens = tokens, .experts = experts, .top_k = k};
  out[n++] =
      (op_shape){.op = OP_map_count, .tokens = tokens, .rows = tokens * k, .experts = d->local_experts, .top_k = k};
  out[n] = out[n - 1];
  out[n++].op = OP_map;
  out[n++] = (op_shape){.op = OP_permute,
                        .tokens = tokens,
                        .rows = tokens * k,
                        .n = d->hidden * (d->dtype == CUMOE_F32 ? 4 : 2),
                        .top_k = k};
  op_shape gemm = {
      .out = d->dtype, .tmap = true, .tokens = tokens, .rows = tokens * k, .experts = d->local_experts, .top_k = k};
  for (int dense = 0; dense <= (d->shared_inter != 0); dense++) {
    const int32_t inter = dense ? d->shared_inter : d->inter;
    gemm.rows = dense ? tokens : tokens * k;
    gemm.experts = dense ? 1 : d->local_experts;
    gemm.op = OP_up, gemm.major = up, gemm.n = inter, gemm.k = d->hidden;
    out[n++] = with_format(gemm, dense ? &d->shared_up_format : &d->up_format);
    gemm.op = OP_down, gemm.major = down, gemm.n = d->hidden, gemm.k = inter;
    out[n++] = with_format(gemm, dense ? &d->shared_down_format : &d->down_format);
  }
  out[n++] =
      (op_shape){.op = OP_combine, .in = d->dtype, .out = d->out_dtype, .tokens = tokens, .n = d->hidden, .top_k = k};
  return n;
}
enum { MAX_SHAPES = 10 };

static const char *shape_name(const gpu *g, const op_shape *s)
{
  static char text[200];
  snprintf(text, sizeof text, "cc %d op %d in %d out %d format %d major %d T %lld rows %lld E %d n %d k %d", g->cc,
           (int)s->op, s->in, s->out, (int)s->format, (int)s->major, (long long)s->tokens, (long long)s->rows,
           s->experts, s->n, s->k);
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
static bool row_can(const variant *v, const gpu *g, const op_shape *s)
{
  const bool e2m1 = v->form == FORM_unpack && v->format == FORMAT_mx4 && s->format == FORMAT_nv4;
  bool type = (v->x == 0 || v->x == s->in) && (v->y == 0 || v->y == s->out) &&
              (v->format == 0 || v->format == (int)s->format || e2m1);
  if (v->form == FORM_wgmma && !s->tmap) return false;
  if (v->form == FORM_row && s->n > v->columns) return false;
  if (s->op == OP_elementwise && v->arch != ARCH_cpu && (s->n == EW_GELU) != (v->form == FORM_gelu)) return false;
  bool layout = s->major == MAJOR_none || v->form == FORM_fma || v->form == FORM_ref || v->form == FORM_any ||
                (int8_t)s->major == v->major;
  if (s->op == OP_quantize && v->arch != ARCH_cpu && (v->form == FORM_fixed) != (s->rows_mode == ROWS_FIXED))
    return false;
  if (v->form == FORM_codes && s->k != v->columns && s->k != ROWS_ONE_GROUP) return false;
  const bool few = v->op == OP_few_up || v->op == OP_few_down;
  if (few && s->by_expert) return false;
  if (few && s->rows_mode != ROWS_AS_THEY_ARE && s->rows_mode != ROWS_GROUP) return false;
  const bool scaled = v->format > (int8_t)DENSE_FORMATS;
  if (v->x == DT_I8 && v->scale == SCALE_out && s->k >= 1 << 17) return false; /* sums of 32 bits */
  const bool whole = v->format == FORMAT_u4 && (v->form == FORM_fixed || v->form == FORM_drawn);
  if (v->form == FORM_drawn && !s->in_one) return false;
  const int32_t run = v->scale == SCALE_out                            ? 1 << 30
                      : !scaled                                        ? 0
                      : v->arch == ARCH_any || v->format == FORMAT_nv4 ? 16
                      : whole                                          ? 128
                      : v->w == DT_U8                                  ? 32
                                                                       : 128;
  if (whole && !s->symmetric) return false;
  if (v->format == FORMAT_u4 && (v->form == FORM_mixed || v->form == FORM_wgmma || whole)) {
    int32_t block = s->scale_block;
    while (block && block % 2 == 0) block /= 2;
    if (block > 1) return false;
    if (v->form == FORM_wgmma ? s->scale_type != v->x : s->scale_type == DT_F32 && s->scale_run < 64) return false;
  }
  return v->op == (int8_t)s->op && arch_fits(v, g->cc) && v->smem <= g->smem && type && layout && s->scale_run >= run;
}

static bool any_row(const gpu *g, const op_shape *s)
{
  for (int32_t i = 0; i < variant_count; i++)
    if (row_can(&variants[i], g, s)) return true;
  return false;
}

static bool check_choice(const gpu *g, const op_shape *s, bool *chosen)
{
  const machine m = gpu_machine(g);
  if (g->cc == 0 && s->op == OP_map_count) return true; /* the CPU map counts by itself */
  int32_t row = choose(&m, s);
  if (row < 0 && !any_row(g, s)) return format_is_scaled(s->format); /* of a GPU that has no kernels for the format */
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
      op_shape s[MAX_SHAPES];
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
    for (int n = 0; n < 500; n++) {
      const gpu *g = &gpus[n % GPU_COUNT];
      const machine free_choice = gpu_machine(g), m = forcing(g, row);
      cumoe_moe_desc given = random_desc(r), d;
      op_shape s[MAX_SHAPES];
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

static bool is_row(const tune_line *t, const variant *v)
{
  return v->op == t->op && v->form == t->form && v->bm == t->bm && v->bn == t->bn;
}

/* The row of the first line that reaches `rows` and has a kernel for the shape; -1: none. *line is its number. */
static int32_t row_by_table(const gpu *g, const op_shape *s, int64_t rows, int *line)
{
  const tune_file *f = find_tune_file("NVIDIA H200", g->cc);
  const int weights = s->format == FORMAT_f32 ? WEIGHTS_f32 : WEIGHTS_w16;
  for (*line = 0; *line < f->line_count; ++*line) {
    const tune_line *t = &f->lines[*line];
    for (int32_t i = 0; i < variant_count; i++)
      if (t->weights == weights && rows <= t->up_to && is_row(t, &variants[i]) && row_can(&variants[i], g, s)) return i;
  }
  return -1;
}

/* A shape of the line's operation with exactly `per_expert` rows for each expert. bits: layout, tensor maps, a type for
 * x that is not that of the weights. */
static op_shape threshold_shape(const tune_line *t, int64_t per_expert, int32_t experts, int bits)
{
  const int32_t w = t->weights == WEIGHTS_f32 ? DT_F32 : case_dtypes[bits & 1];
  op_shape s = {.op = (operation)t->op,
                .in = w,
                .out = t->op == OP_router ? DT_F32 : w,
                .format = dense_format(w),
                .scale_run = SCALE_RUN_ALL,
                .tmap = bits & 4,
                .tokens = per_expert,
                .rows = per_expert * experts,
                .experts = experts,
                .n = 512,
                .k = 512,
                .top_k = 1};
  if (s.op == OP_up || s.op == OP_down) s.major = bits & 2 ? MAJOR_N : MAJOR_K;
  if (s.op == OP_router) s.rows = s.tokens, s.experts = s.n = 256; /* a token counts as one */
  if (s.op == OP_router && w == DT_F32 && bits & 2) s.in = case_dtypes[bits & 1];
  return s;
}

/* Of the tables: with one row an expert, 0 for fewer than two tiles of 128 channels an SM. */
static int64_t scale_of(const gpu *g, const op_shape *s, int64_t per_expert)
{
  const bool gemm = s->op == OP_up || s->op == OP_down;
  return gemm && per_expert == 1 && s->rows * wide_ceil(s->n, 128) < 2 * g->sms ? 0 : per_expert;
}

/* rows = per_expert * experts, so the expectation is exact. */
static void check_threshold(const gpu *g, const op_shape *s, int64_t per_expert, bool *decides)
{
  int line;
  const machine m = gpu_machine(g);
  const int32_t got = choose(&m, s), want = row_by_table(g, s, scale_of(g, s, per_expert), &line);
  if (got >= 0) chosen[got] = true;
  if (want >= 0) decides[line] = true;
  CHECK_MSG(got >= 0 && (want < 0 || got == want), "%lld rows an expert: row %d, the table says %d, for %s",
            (long long)per_expert, got, want, shape_name(g, s));
}

/* Around two tiles an SM. */
static void check_scant(const tune_line *t, const gpu *g, bool *decides)
{
  if (t->op != OP_up && t->op != OP_down) return;
  for (int i = 0; i < 3 * 5 * 2; i++) {
    const int32_t tiles = i / 3 % 5, rows = 2 * g->sms / (tiles + 1) + i % 3 - 1;
    op_shape s = threshold_shape(t, 1, rows, 0);
    s.n = 128 * tiles + (i / 15 ? 8 : 128);
    check_threshold(g, &s, 1, decides);
    s.experts--; /* two rows an expert */
    check_threshold(g, &s, 2, decides);
  }
}

/* Every line names a kernel that exists; one that never decides is told. */
static void test_thresholds(void)
{
  static bool decided[2][100];
  static const int32_t counts[] = {1, 8, 128, 1024};
  for (int i = 1; i < GPU_COUNT; i++) {
    const gpu *g = &gpus[i];
    const tune_file *f = find_tune_file("NVIDIA H200", g->cc);
    bool *decides = decided[f->cc == 90];
    if (!group_begin("thresholds +-1, cc %d", g->cc)) continue;
    for (int l = 0; l < f->line_count; l++) {
      const tune_line *t = &f->lines[l];
      bool found = false;
      case_begin("line %d: %s up to %d", l + 1, operation_name((operation)t->op), t->up_to);
      for (int32_t v = 0; v < variant_count; v++) found = found || is_row(t, &variants[v]);
      CHECK_MSG(found, "no kernel of form %d, %dx%d", t->form, t->bm, t->bn);
      CHECK_MSG(l == 0 || f->lines[l - 1].op <= t->op, "the lines of an operation stand together");
      for (int n = 0; n < 4 * 8 * 3; n++) {
        const int64_t per_expert = (t->up_to == ANY_ROWS ? 100000 : t->up_to) + n % 3 - 1;
        if (per_expert < 1 || per_expert * counts[n / 24] > INT32_MAX) continue;
        const op_shape s = threshold_shape(t, per_expert, counts[n / 24], n / 3 % 8);
        check_threshold(g, &s, per_expert, decides);
      }
      check_scant(t, g, decides);
      case_end();
    }
    group_end();
  }
  for (int i = 0; i < 2; i++) {
    const tune_file *f = find_tune_file("", i ? 90 : 80);
    for (int l = 0; l < f->line_count; l++)
      if (!decided[i][l]) printf("# never decides: %s.def line %d\n", f->name, l + 1);
  }
}

/* Files go by the GPU's name, then by its compute capability. */
static void test_tune_files(void)
{
  if (!group_begin("tune files")) return;
  case_begin("by name");
  CHECK(strcmp(find_tune_file("NVIDIA H200", 90)->name, gpus_have_sm90() ? "h200" : "any") == 0);
#if __has_include("../host/tune/h100.def")
  CHECK(strcmp(find_tune_file("NVIDIA H100 80GB HBM3", 90)->name, gpus_have_sm90() ? "h100" : "any") == 0);
#else
  CHECK(find_tune_file("NVIDIA H100 80GB HBM3", 90) == find_tune_file("NVIDIA H200", 90));
#endif
  CHECK(find_tune_file("NVIDIA H20", 90) == find_tune_file("NVIDIA H200", 90)); /* the first of its capability */
  CHECK(strcmp(find_tune_file("NVIDIA A100", 80)->name, "any") == 0);
  CHECK(strcmp(find_tune_file("H200 of another kind", 100)->name, "any") == 0);
  for (limit_name l = 0; l < LIMIT_COUNT; l++) CHECK(*words_of_limit(l).name && *words_of_limit(l).unit);
  case_end();
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
static void check_gemm_grid(rng *r, const gpu *g, const variant *v, const op_shape *s, int64_t grid)
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

/* Token ranges, times column ranges where a row has them; few_up may meet an expert a pair, and no more CTAs than
 * SMs. */
static wide simple_grid(const variant *v, const op_shape *s)
{
  if (v->form == FORM_dealt || v->form == FORM_drawn) return HOPPER_SMS * v->ctas;
  if (s->op == OP_few_up || s->op == OP_few_down)
    return smaller((s->op == OP_few_up ? s->rows : 1) * (int64_t)wide_ceil(s->n, v->bn), HOPPER_SMS);
  if (s->op == OP_quantize || s->op == OP_quantize_masked)
    return smaller((int64_t)wide_ceil((wide)s->tokens * (wide_ceil(s->n, v->columns) + 1), v->units),
                   HOPPER_SMS * v->ctas);
  if (s->op == OP_rows_product || s->op == OP_weight_gradient) {
    const int32_t bm = v->bm ? v->bm : v->units, bn = v->bn ? v->bn : v->columns;
    const wide tiles = s->op == OP_rows_product
                           ? (wide)(s->rows / bm + smaller(s->rows, s->experts)) * wide_ceil(s->n, bn)
                           : (wide)s->experts * wide_ceil(s->n, bm) * v->cluster *
                                 wide_ceil((int64_t)wide_ceil(s->k, bn), v->cluster); /* one of a cluster may be none */
    return smaller(v->cluster * (int64_t)wide_ceil(tiles, v->cluster), HOPPER_SMS * v->ctas); /* a number of clusters */
  }
  if (s->op == OP_attention_dkv && v->form != FORM_any)
    return (wide)v->cluster * s->experts * wide_ceil(s->tokens / s->experts, v->units);
  if ((s->op == OP_attention && v->form != FORM_row) || (s->op == OP_attention_dq && v->form != FORM_any))
    return (wide)v->cluster * s->experts * ATTENTION_SLOTS(s->rows, s->top_k, v->units, s->k, s->rules);
  const int64_t tokens = s->op == OP_combine ? COMBINE_TOKENS(s->top_k) : larger(v->bm, v->units);
  if (v->form == FORM_row) return wide_ceil(s->tokens, tokens) * larger(1, v->lanes / v->threads);
  if (v->form == FORM_wgmma) return 2 * wide_ceil(s->tokens, 2 * tokens) * wide_ceil(s->n, v->bn); /* clusters of two */
  const int32_t columns = s->op == OP_router ? v->bn : v->columns;
  return wide_ceil(s->tokens, tokens) * (columns > 0 ? wide_ceil(s->n, columns) : 1);
}

static wide cpu_grid(const op_shape *s)
{
  if (s->op == OP_map) return 1;
  if (s->op == OP_up || s->op == OP_down) return (wide)s->experts * wide_ceil(s->n, CPU_N_BLOCK);
  return s->tokens;
}

static void check_grid(rng *r, const gpu *g, const op_shape *s)
{
  const machine m = gpu_machine(g);
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
      op_shape s[MAX_SHAPES];
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

static bool multiplies_rows(int op)
{
  return op == OP_up || op == OP_up_keep || op == OP_down || op == OP_down_drawn || op == OP_down_activated;
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
    const machine m = gpu_machine(&g);
    const int32_t tile = (int32_t)larger(1, larger(v->bn, v->columns));
    for (int64_t tokens = 1; tokens <= 4 * larger(v->bm, v->units) + 1; tokens++)
      for (int32_t n = tile < 8 ? tile : 8; n <= 3 * tile; n += (int32_t)larger(8, (tile / 4) & ~7)) {
        op_shape s = {.op = (operation)v->op,
                      .tokens = tokens,
                      .rows = tokens,
                      .experts = 1 + (int32_t)rng_below(r, 16),
                      .n = n,
                      .k = 64,
                      .top_k = 1};
        const int64_t grid = grid_size(&m, v, &s);
        if (multiplies_rows(v->op))
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
static int32_t shortest_row(const gpu *g, const op_shape *s)
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
        const op_shape s = {.op = (operation)v->op, .in = v->x, .out = v->y, .tokens = 1000, .n = n};
        const machine m = gpu_machine(&gpus[i]);
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
        const int32_t dtype = case_dtypes[type];
        const op_shape s = {.op = OP_elementwise, .in = dtype, .out = dtype, .tokens = 1000, .n = f};
        const machine m = gpu_machine(&gpus[i]);
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

/* Of attention: the fewest columns that hold a head; parts where a sequence has few rows, by clusters where there are
 * few sequences. Of what else is loaded late there is a row for everything. */
static void test_late_rows(void)
{
  if (!group_begin("attention and training")) return;
  for (int i = 1; i < GPU_COUNT; i++)
    for (int n = 0; n < 3 * 5 * 4 * 3; n++) {
      static const int32_t heads[] = {8, 64, 72, 128, 256}, sequences[] = {1, 3, 64, 300}, rows[] = {1, 4, 900};
      const op_shape s = {.op = OP_attention,
                          .in = case_dtypes[n % 3],
                          .out = case_dtypes[n % 3],
                          .n = heads[n / 3 % 5],
                          .k = sequences[n / 15 % 4],
                          .rows = (int64_t)sequences[n / 15 % 4] * rows[n / 60],
                          .experts = 2,
                          .top_k = 4,
                          .rules = true};
      const machine m = gpu_machine(&gpus[i]);
      const int32_t got = choose(&m, &s);
      case_begin("%s", shape_name(&gpus[i], &s));
      if (CHECK(got >= 0)) {
        const variant *v = &variants[got];
        const bool few = rows[n / 60] * 4 <= 16 && gpus[i].cc == 90 && s.in != DT_F32, fits = v->smem <= gpus[i].smem;
        chosen[got] = true;
        CHECK(fits && v->x == s.in && v->columns >= s.n && (v->form == FORM_split) == few);
        if (s.in == DT_F32) CHECK(v->form == FORM_row);
        if (v->form == FORM_split) CHECK((v->cluster > 1) == (s.k * s.experts <= 128));
        if (v->form != FORM_row) CHECK(v->columns == 64 || v->columns < 2 * s.n);
        CHECK(grid_size(&m, v, &s) == (int64_t)simple_grid(v, &s) || v->form == FORM_row);
      }
      case_end();
    }
  for (int op = OP_attention + 1; op < OP_COUNT; op++)
    for (int i = 1; i < GPU_COUNT && !multiplies_rows(op); i++) {
      const op_shape s = {.op = (operation)op, .tokens = 1000};
      const machine m = gpu_machine(&gpus[i]);
      const int32_t got = choose(&m, &s);
      case_begin("cc %d: %s", gpus[i].cc, operation_name((operation)op));
      CHECK(operation_is_late((operation)op) && (op == OP_embedding_sort) == (got < 0));
      if (got >= 0) chosen[got] = true;
      case_end();
    }
  group_end();
}

/* Where up is wgmma of 16 bits, up_keep has a row of the same tile; nowhere else. */
static void test_keep_rows(rng *r)
{
  if (!group_begin("up that keeps")) return;
  for (int i = 1; i < GPU_COUNT; i++)
    for (int n = 0; n < 3 * 2 * 3; n++) {
      op_shape s = {.op = OP_up,
                    .in = case_dtypes[n % 3],
                    .out = case_dtypes[n % 3],
                    .format = dense_format(case_dtypes[n % 3]),
                    .scale_run = SCALE_RUN_ALL,
                    .major = n / 3 % 2 ? MAJOR_N : MAJOR_K,
                    .tmap = true,
                    .tokens = 1 << n / 6 * 6,
                    .rows = 2 << n / 6 * 6,
                    .experts = 8,
                    .n = 768,
                    .k = 2048,
                    .top_k = 2};
      const machine m = gpu_machine(&gpus[i]);
      const int32_t up = choose(&m, &s);
      s.op = OP_up_keep;
      const int32_t got = choose(&m, &s);
      case_begin("%s", shape_name(&gpus[i], &s));
      if (CHECK(up >= 0) && variants[up].form == FORM_wgmma) {
        if (CHECK(got >= 0 && variants[got].bm == variants[up].bm && variants[got].bn == variants[up].bn)) {
          chosen[got] = true;
          check_gemm_grid(r, &gpus[i], &variants[got], &s, grid_size(&m, &variants[got], &s));
        }
      } else if (gpus[i].cc != 90 || s.in == DT_F32)
        CHECK(got < 0);
      case_end();
    }
  group_end();
}

/* Of eight experts of 16-bit weights that tensor maps can describe: what the backward's products are. */
static op_shape product_shape(operation op, int32_t dtype, int64_t tokens, int64_t rows)
{
  return (op_shape){.op = op,
                    .in = dtype,
                    .out = dtype,
                    .format = dense_format(dtype),
                    .scale_run = SCALE_RUN_ALL,
                    .tmap = true,
                    .tokens = tokens,
                    .rows = rows,
                    .experts = 8,
                    .n = 768,
                    .k = 2048,
                    .top_k = 2};
}

/* The same of down and what draws units, at enough rows. */
static void test_drawn_rows(rng *r)
{
  if (!group_begin("down whose units are drawn")) return;
  for (int n = 0; n < 2 * 2 * 2; n++) {
    const int32_t dtype = n % 2 ? DT_F16 : DT_BF16;
    op_shape s = product_shape(OP_down, dtype, 4096, 8192);
    s.major = n / 2 % 2 ? MAJOR_N : MAJOR_K;
    const gpu g = {90, HOPPER_SMS, 232448};
    const machine m = gpu_machine(&g);
    const int32_t down = choose(&m, &s);
    s.op = n / 4 ? OP_down_activated : OP_down_drawn;
    const int32_t got = choose(&m, &s);
    case_begin("%s", shape_name(&g, &s));
    if (CHECK(down >= 0 && got >= 0 && variants[down].form == FORM_wgmma)) {
      CHECK(variants[got].bm == variants[down].bm && variants[got].bn == variants[down].bn);
      chosen[got] = true;
      check_gemm_grid(r, &g, &variants[got], &s, grid_size(&m, &variants[got], &s));
    }
    case_end();
  }
  group_end();
}

/* A gradient's stages, by the rows that an expert has. */
static void test_gradient_stages(void)
{
  if (!group_begin("stages of gradients")) return;
  for (int n = 0; n < 2 * 2; n++) {
    const int32_t dtype = n % 2 ? DT_F16 : DT_BF16;
    const op_shape s = product_shape(OP_weight_gradient, dtype, 2048, n / 2 ? 8 * 129 : 8 * 128);
    const gpu g = {90, HOPPER_SMS, 232448};
    const machine m = gpu_machine(&g);
    const int32_t got = choose(&m, &s);
    case_begin("%s", shape_name(&g, &s));
    if (CHECK(got >= 0)) {
      CHECK(variants[got].form == FORM_wgmma && variants[got].bk == (n / 2 ? 32 : 64));
      chosen[got] = true;
    }
    case_end();
  }
  group_end();
}

/* Backward of attention: by tiles what is of 16 bits and has heads of up to 128, by clusters where they are few. */
static void test_attention_backward_rows(void)
{
  static const int32_t heads[] = {8, 64, 72, 128, 136, 256};
  if (!group_begin("backward of attention")) return;
  for (int i = 1; i < GPU_COUNT; i++)
    for (int n = 0; n < 72; n++) {
      const int32_t head = heads[n / 3 % 6];
      const bool few = n >= 36;
      const op_shape s = {.op = n / 18 % 2 ? OP_attention_dkv : OP_attention_dq,
                          .in = case_dtypes[n % 3],
                          .out = case_dtypes[n % 3],
                          .n = head,
                          .k = 3,
                          .tokens = few ? 4 * 4096 : 4 * 4097,
                          .rows = few ? 2048 : 2049,
                          .experts = 4,
                          .top_k = 2,
                          .rules = true};
      const machine m = gpu_machine(&gpus[i]);
      const int32_t got = choose(&m, &s);
      case_begin("%s", shape_name(&gpus[i], &s));
      if (CHECK(got >= 0)) {
        const variant *v = &variants[got];
        const bool tiles = s.in != DT_F32 && head <= 128;
        chosen[got] = true;
        CHECK(v->smem <= gpus[i].smem && (v->form != FORM_any) == tiles);
        CHECK((v->form == FORM_split) == (tiles && few && gpus[i].cc == 90));
        if (tiles) CHECK(v->x == s.in && v->columns == (head <= 64 ? 64 : 128));
        CHECK(grid_size(&m, v, &s) == (int64_t)simple_grid(v, &s));
      }
      case_end();
    }
  group_end();
}

/* The backward's products: on tensor cores what is of 16 bits and of one type, in vectors. */
static void test_backward_rows(void)
{
  if (!group_begin("products of the backward")) return;
  for (int i = 1; i < GPU_COUNT; i++)
    for (int n = 0; n < 2 * 3 * 3 * 2 * 2 * 2; n++) {
      const bool rows = n % 2;
      const op_shape s = {.op = rows ? OP_rows_product : OP_weight_gradient,
                          .in = case_dtypes[n / 2 % 3],
                          .out = n / 18 % 2 ? DT_F32 : case_dtypes[n / 2 % 3],
                          .format = dense_format(case_dtypes[n / 6 % 3]),
                          .scale_run = SCALE_RUN_ALL,
                          .tokens = 100,
                          .rows = 400,
                          .experts = 8,
                          .n = 264,
                          .k = 136,
                          .top_k = 4,
                          .major = !rows        ? MAJOR_none
                                   : n / 36 % 2 ? MAJOR_K
                                                : MAJOR_N,
                          .rules = n / 72};
      const machine m = gpu_machine(&gpus[i]);
      const int32_t got = choose(&m, &s);
      case_begin("%s", shape_name(&gpus[i], &s));
      if (CHECK(got >= 0)) {
        const variant *v = &variants[got];
        const bool router = s.in == DT_F32 && s.format == FORMAT_bf16 && s.major != MAJOR_K,
                   same = dense_format(s.in) == s.format;
        const bool vectors = !s.rules && (router || (same && s.in != DT_F32));
        chosen[got] = true;
        CHECK(row_can(v, &gpus[i], &s));
        CHECK((v->form == FORM_any) == !vectors);
      }
      case_end();
    }
  group_end();
}

/* Clusters are whole, and no more than fit: of an odd number of SMs one stays free. */
static void test_clusters(void)
{
  if (!group_begin("grids of clusters")) return;
  for (int32_t row = 0; row < variant_count; row++) {
    const variant *v = &variants[row];
    if (v->cluster < 2 || (v->op != OP_up && v->op != OP_down)) continue;
    case_begin("%s", v->name);
    const gpu odd = {90, 131, 232448};
    const machine m = gpu_machine(&odd);
    for (int32_t rows = 1; rows <= 100000; rows *= 10) {
      const op_shape s = {.op = (operation)v->op, .tokens = rows, .rows = rows, .experts = 3, .n = 4096, .k = 64};
      const int64_t grid = grid_size(&m, v, &s);
      CHECK_MSG(grid % v->cluster == 0 && grid >= v->cluster && grid <= 131, "%d rows: grid %lld", rows,
                (long long)grid);
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
enum { MAX_REGIONS = 26 };

/* Scales of a row of quantised activations. */
static wide groups_of(const cumoe_format *f, int64_t cols)
{
  if (f->rows != CUMOE_ROWS_GROUP) return f->rows != CUMOE_ROWS_AS_THEY_ARE;
  return wide_ceil(f->origin[1] % f->row_group + cols, f->row_group);
}

/* Scales of rows that are brought into fixed point: of at most 64 rows an expert. */
static wide fixed_scales(const cumoe_format *f, int32_t dtype, wide rows, int64_t cols)
{
  const bool u4 = f->element == CUMOE_ELEMENT_U4 && f->zero == CUMOE_ZERO_NONE && f->offset == 8 &&
                  (f->block[1] | f->origin[1]) % 128 == 0,
             mx4 = f->element == CUMOE_ELEMENT_E2M1 && f->scale == CUMOE_E8M0 && dtype == CUMOE_BF16;
  return (u4 || mx4) && !f->rows && !f->act_order ? (rows + 3) / 4 * 4 * wide_ceil(cols, 128) * 4 : 0;
}

/* Floats of few's parts of sums: each pair's channels in whole blocks once, and 128 channels of 2048 items of one
 * token, of 512 items of each of several; but not more often than k has runs of 512 (up), 256 (down; of one token
 * 128). */
static wide part_floats(const cumoe_moe_desc *d, wide t, bool down)
{
  const wide all = t * d->routing.top_k, pairs = all < FEW_PAIRS(32) ? all : FEW_PAIRS(32);
  const wide whole = pairs * wide_ceil(down ? d->hidden : 2 * (wide)d->inter, 128) * 128;
  const wide most = whole * wide_ceil(down ? d->inter : d->hidden, !down    ? 512
                                                                   : t == 1 ? 128
                                                                            : 256),
             some = whole + 128 * (t == 1 ? 2048 : t * 512);
  return most < some ? most : some;
}

/* y, or what few's parts may take in its place: of up and of down, for up to 32 tokens; besides, of several, 528 parts
 * of the last units of down. */
static wide y_bytes(const cumoe_moe_desc *d, wide tokens)
{
  const wide y = tokens * d->routing.top_k * d->hidden * (d->dtype == CUMOE_F32 ? 4 : 2);
  if (d->dtype == CUMOE_F32 || d->up_format.element != CUMOE_ELEMENT_DENSE) return y;
  const wide t = tokens < 32 ? tokens : 32, all = t * d->routing.top_k,
             pairs = all < FEW_PAIRS(32) ? all : FEW_PAIRS(32),
             active = pairs < d->local_experts ? pairs : d->local_experts,
             units = (active > d->routing.top_k ? active : d->routing.top_k) * wide_ceil(d->hidden, 128),
             all_small = units * wide_ceil(d->inter, 128),
             last = t == 1            ? 0
                    : all_small < 528 ? all_small
                                      : 528;
  wide room = 256 + 4 * last * 128 * smaller((int64_t)t * d->routing.top_k, 8); /* pairs that an expert may have */
  for (int down = 0; down < 2; down++) {
    const wide one = part_floats(d, 1, down), several = part_floats(d, t, down);
    room += (4 * (one > several ? one : several) + 255) / 256 * 256;
  }
  return room > y ? room : y;
}

/* Codes of x in row order, and their scales behind them; rows that are ordered already are not copied. */
static wide copied_codes(const cumoe_format *f, wide rows, int64_t cols)
{
  if (!f->rows || f->act_order || f->rows == CUMOE_ROWS_STATIC_EXPERT) return 0;
  return (rows * cols + 15) / 16 * 16 + (rows + 3) / 4 * 4 * groups_of(f, cols) * 4;
}

static int regions_of(const cumoe_moe_desc *d, int64_t tokens, const workspace_layout *w, region *out)
{
  const wide k = d->routing.top_k, t = tokens, element = d->dtype == CUMOE_F32 ? 4 : 2, local = d->local_experts;
  const map_chunks c = map_chunking(smaller(tokens, INT32_MAX / (int64_t)k) * (int64_t)k);
#define CODES(name, what, count, cols)                                                                                 \
  {#name "_codes", w->name##_codes, (wide)(count) * (cols) * ((what).act_order ? 2 : (what).rows ? 1 : 0)},            \
  {                                                                                                                    \
#name "_scale", w->name##_scale, ((wide)(count) + 3) / 4 * 4 * groups_of(&(what), cols) * 4                        \
  }
  const region all[MAX_REGIONS] = {
      {"logits", w->logits, t * router_experts(d) * 4},
      {"ids", w->ids, t * k * 4},
      {"weights", w->weights, t * k * 4},
      {"counts", w->route.counts, local * 4},
      {"offsets", w->route.offsets, (local + 1) * 4},
      {"row_pair", w->route.row_pair, t * k * 4},
      {"slot_row", w->route.slot_row, t * k * 4},
      {"hist", w->hist, c.chunks > 1 ? (wide)c.chunks * local * 4 : 0},
      {"progress", w->progress, PROGRESS_WORDS(t * k, local) * 4},
      {"h", w->h, t * k * d->inter * element},
      {"few_words", w->few_words, FEW_BYTES(t * k < FEW_PAIRS(FEW_TOKENS) ? t * k : FEW_PAIRS(FEW_TOKENS))},
      {"y", w->y, y_bytes(d, t)},
      {"shared_h", w->shared_h, t * d->shared_inter * element},
      {"shared_y", w->shared_y, d->shared_inter ? t * d->hidden * element : 0},
      {"shared_logit", w->shared_logit, d->shared_inter ? t * 4 : 0},
      CODES(x, d->up_format, d->up_format.act_order || d->up_format.rows == CUMOE_ROWS_STATIC_EXPERT ? t * k : t,
            d->hidden),
      CODES(h, d->down_format, t * k, d->inter),
      {"x_copy", w->x_copy, copied_codes(&d->up_format, t * k, d->hidden)},
      {"fixed_x", w->x_scale,
       fixed_scales(&d->up_format, d->dtype, t < local * 64 / k ? t : local * 64 / k, d->hidden)},
      {"fixed_h", w->h_scale,
       fixed_scales(&d->down_format, d->dtype, t * k < local * 64 ? t * k : local * 64, d->inter)},
      CODES(shared_x, d->shared_up_format, t, d->hidden),
      CODES(shared_h, d->shared_down_format, t, d->shared_inter)};
#undef CODES
  memcpy(out, all, sizeof all);
  return MAX_REGIONS;
}

/* few's parts of sums, as many as its plan says, end before y's region does, each before the next ones. */
static void check_parts(const cumoe_moe_desc *d, int64_t tokens, const workspace_layout *w)
{
  if (tokens > 32 || d->dtype == CUMOE_F32 || d->up_format.element != CUMOE_ELEMENT_DENSE) return;
  const wide pairs = smaller(tokens * d->routing.top_k, FEW_PAIRS(32));
  wide end = (wide)w->y + y_bytes(d, tokens);
  CHECK(w->dealt_columns == smaller((int64_t)pairs, 8)); /* ids may repeat an expert in a token */
  for (int down = 1; down >= 0; down--) {
    const cut_layout *c = &w->cut[down];
    const wide channels = wide_ceil(down ? d->hidden : 2 * (wide)d->inter, 128) * 128, k = down ? d->inter : d->hidden,
               parts = wide_ceil(k, c->part_k[0]), small = wide_ceil(k, c->part_k[1]);
    CHECK_MSG(c->part_k[0] % 64 == 0 && c->part_k[1] % 64 == 0 && small <= 16 && parts <= small, "parts of %d and %d k",
              c->part_k[0], c->part_k[1]);
    CHECK_MSG((wide)c->small + c->last * small * w->dealt_columns * 128 * 4 <= end,
              "%d last units in parts of %d k end past what follows", c->last, c->part_k[1]);
    const wide bytes = !down && tokens > 1 && parts == 1 ? 0 : parts * pairs * channels * 4;
    CHECK_MSG((wide)c->parts + bytes <= (wide)c->small, "parts of %d k overlap the last ones", c->part_k[0]);
    end = (wide)c->parts;
  }
  CHECK_MSG((wide)w->few_items + 4 <= end, "items drawn overlap parts of up");
}

static int by_offset(const void *a, const void *b)
{
  const region *x = a, *y = b;
  return x->at < y->at ? -1 : x->at > y->at;
}

static void check_regions(const cumoe_moe_desc *d, int64_t tokens)
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
  check_parts(d, tokens, &w);
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
    check_regions(&d, random_tokens(r, &d));
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

/* ---- the layer's plan ------------------------------------------------------------------------------ */

static const gpu hopper = {90, HOPPER_SMS, 232448};

/* What a forward brings: every operand as kernels like it best, unless `bits` say otherwise. */
static layer_call call_for(const cumoe_moe_desc *d, int64_t tokens, int bits)
{
  const bool tmap = !(bits & 2), suits_codes = !(bits & 16);
  const bound_matrix b = {bits & 1 ? MAJOR_N : MAJOR_K, tmap, suits_codes}, scaled = {MAJOR_K, tmap, suits_codes};
  return (layer_call){.tokens = tokens,
                      .up = d->up_format.element ? scaled : b,
                      .down = d->down_format.element ? scaled : b,
                      .has_router = !(bits & 4),
                      .router_dtype = bits & 8 ? DT_F32 : d->dtype,
                      .router_tmap = !(bits & 8),
                      .has_ids = bits & 4 && bits & 16,
                      .logits_f32 = !(bits & 128),
                      .has_select_bias = bits & 32,
                      .has_shared = d->shared_inter != 0,
                      .shared_up = d->shared_up_format.element ? scaled : b,
                      .shared_down = d->shared_down_format.element ? scaled : b,
                      .has_shared_gate = d->shared_inter && bits & 64,
                      .shared_gate_dtype = d->dtype};
}

static const variant *row_at(const layer_plan *p, stage s)
{
  return p->steps[s].row < 0 ? NULL : &variants[p->steps[s].row];
}

/* Activations become rows of an expert's own; become anything. */
static bool is_by_expert(const cumoe_format *f)
{
  return f->act_order || f->rows == CUMOE_ROWS_STATIC_EXPERT;
}
static bool is_changed(const cumoe_format *f)
{
  return f->act_order || f->rows;
}

/* Rows of the form fixed are brought into fixed point by a launch ahead where an expert has several, up to 64; those
 * that weights of mx4 multiply in any case. */
static bool is_fixed_ahead(const machine *m, const cumoe_moe_desc *d, const layer_call *c, const layer_plan *p, stage s)
{
  const variant *v = row_at(p, s);
  const int64_t pairs = c->tokens * d->routing.top_k, experts = d->local_experts, active = smaller(pairs, experts);
  if (!v || v->form != FORM_fixed || is_changed(s == STAGE_up ? &d->up_format : &d->down_format)) return false;
  if (pairs > 64 * experts) return false;
  return v->format == FORMAT_mx4 || (double)((pairs + active - 1) / active) >= m->limits[LIMIT_fixed_rows][WEIGHTS_w4];
}

/* Up of e4m3 by wgmma makes codes of h, in whole groups of 128 channels or by one scale for all. */
static bool makes_codes(const cumoe_moe_desc *d, const layer_call *c, const layer_plan *p)
{
  const variant *up = row_at(p, STAGE_up);
  const cumoe_format *f = &d->down_format;
  const bool plain = !(d->flags & CUMOE_MOE_UNGATED) && !(d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT) &&
                     (d->act == CUMOE_ACT_SILU || d->act == CUMOE_ACT_SWIGLU_OAI);
  const bool rows = f->element == CUMOE_ELEMENT_E4M3 && !f->act_order &&
                    (f->rows == CUMOE_ROWS_STATIC || (f->rows == CUMOE_ROWS_GROUP && f->origin[1] % 128 == 0));
  return up && up->form == FORM_wgmma && up->x == DT_E4M3 && c->up.suits_codes && plain && rows && d->inter % 128 == 0;
}

/* The router of few tokens fills what dealt needs, by a CTA an SM. */
static bool fills_for_dealt(const layer_plan *p)
{
  const int32_t few = p->steps[STAGE_few_up].row, router = p->steps[STAGE_router].row;
  return few >= 0 && router >= 0 && variants[few].form == FORM_dealt &&
         (variants[router].form == FORM_dot || variants[router].form == FORM_tile);
}

/* Which stages there are follows from what the call brings and from the plan's own flags; each is what `choose` and
 * `grid_size` say of the shape as this program works it out. */
static void check_plan_steps(const gpu *g, const cumoe_moe_desc *d, const layer_call *c, const layer_plan *p)
{
  const machine m = gpu_machine(g);
  const bool routed = !p->few, counts = routed && g->cc != 0 && map_chunking(c->tokens * d->routing.top_k).chunks > 1;
  const bool there[STAGE_COUNT] = {
      [STAGE_router] = c->has_router,
      [STAGE_gate] = !c->has_ids && !p->few_gates,
      [STAGE_map_count] = counts,
      [STAGE_map] = routed,
      [STAGE_shared_up] = c->has_shared,
      [STAGE_shared_down] = c->has_shared,
      [STAGE_shared_gate] = c->has_shared_gate,
      [STAGE_up] = routed,
      [STAGE_down] = routed,
      [STAGE_combine] = routed,
      [STAGE_arrange_x] = (routed && is_by_expert(&d->up_format)) || is_fixed_ahead(&m, d, c, p, STAGE_up),
      [STAGE_quantize_x] = routed && is_changed(&d->up_format) && !is_by_expert(&d->up_format),
      [STAGE_quantize_h] =
          (routed && is_changed(&d->down_format) && !makes_codes(d, c, p)) || is_fixed_ahead(&m, d, c, p, STAGE_down),
      [STAGE_shared_quantize_x] = c->has_shared && is_changed(&d->shared_up_format),
      [STAGE_shared_quantize_h] = c->has_shared && is_changed(&d->shared_down_format),
      [STAGE_few_up] = p->few,
      [STAGE_few_down] = p->few && !p->few_in_one};
  CHECK(p->few_fills == (p->few_in_one && !c->has_router && !c->filled));
  static const stage at[] = {STAGE_router, STAGE_gate, STAGE_map_count, STAGE_map, STAGE_COUNT, STAGE_up, STAGE_down};
  op_shape s[MAX_SHAPES];
  const int n = shapes_of(d, c->tokens, c->up.major, c->down.major, c->router_dtype == DT_F32, s);
  for (stage i = 0; i < STAGE_COUNT; i++)
    CHECK_MSG(there[i] == (p->steps[i].row >= 0), "%s is %s the plan", stage_name(i), there[i] ? "not in" : "in");
  for (int i = 0; i < n; i++) {
    const bool dense = s[i].op == OP_up && i > 5;
    const stage where = i < 7                   ? at[i]
                        : s[i].op == OP_combine ? STAGE_combine
                        : dense                 ? STAGE_shared_up
                                                : STAGE_shared_down;
    s[i].tmap = s[i].op == OP_router ? c->router_tmap : c->up.tmap;
    if (where == STAGE_shared_up || where == STAGE_shared_down)
      s[i].major = (dense ? &c->shared_up : &c->shared_down)->major;
    if (where == STAGE_COUNT || !there[where]) continue;
    s[i].made_ahead = (where == STAGE_up || where == STAGE_down) && s[i].rows <= 64 * (int64_t)d->local_experts &&
                      fixed_scales(where == STAGE_up ? &d->up_format : &d->down_format, d->dtype, 1, 1) > 0;
    CHECK_MSG(p->steps[where].row == choose(&m, &s[i]), "%s: row %d", stage_name(where), p->steps[where].row);
    int64_t grid = grid_size(&m, &variants[p->steps[where].row], &s[i]);
    if (where == STAGE_router && fills_for_dealt(p) && grid < HOPPER_SMS) grid = HOPPER_SMS;
    CHECK_MSG(p->steps[where].grid == grid, "%s: grid %lld", stage_name(where), (long long)p->steps[where].grid);
  }
}

/* No kernel of this GPU serves a format of the layer, whichever it is asked for. */
static bool formats_lack_rows(const gpu *g, const cumoe_moe_desc *d, const layer_call *c)
{
  op_shape s[MAX_SHAPES];
  const int n = shapes_of(d, c->tokens, c->up.major, c->down.major, false, s);
  for (int i = 0; i < n; i++) {
    if (s[i].op != OP_router) s[i].tmap = c->up.tmap;
    if (format_is_scaled(s[i].format) && !any_row(g, &s[i])) return true;
  }
  return false;
}

static void test_random_plans(rng *r)
{
  if (!group_begin("plans of random layers")) return;
  for (int i = 0; i < GPU_COUNT; i++) {
    const machine m = gpu_machine(&gpus[i]);
    case_begin("cc %d", gpus[i].cc);
    for (int n = 0; n < 3000; n++) {
      cumoe_moe_desc given = random_desc(r), d;
      if (!CHECK_OK(check_moe_desc(&given, &d))) break;
      int64_t tokens = n % 3 ? random_tokens(r, &d) : 1 + rng_below(r, 40);
      while ((wide)tokens * d.hidden * 2 > (wide)1 << 40) tokens = (tokens + 1) / 2;
      const layer_call c = call_for(&d, tokens, (int)rng_below(r, 256));
      const layer_plan p = plan_layer(&m, &d, &c);
      if (p.refused != STAGE_COUNT && formats_lack_rows(&gpus[i], &d, &c)) continue;
      if (!CHECK_MSG(p.refused == STAGE_COUNT, "%s is refused", stage_name(p.refused))) break;
      check_plan_steps(&gpus[i], &d, &c, &p);
      workspace_layout at;
      CHECK(plan_workspace_layout(&d, tokens, &at) && memcmp(&at, &p.at, sizeof at) == 0);
    }
    case_end();
  }
  group_end();
}

/* ---- how kernels work together: layers on both sides of each limit, on an H200 ---- */

typedef enum traits {
  FEW = 1,
  ONE = 2,   /* few in one grid */
  GATES = 4, /* which does the gate's work */
  ALONE = FEW | ONE | GATES,
  COPY = 8,
  BY_EXPERT = 16,
  DISCARD = 32,
  AHEAD = 64,     /* combine looks ahead */
  UP_EARLY = 128, /* up starts before the grid ahead has ended */
  DOWN_EARLY = 256,
  EARLY = UP_EARLY | DOWN_EARLY
} traits;

static int traits_of(const layer_plan *p)
{
  const stage up = p->few ? STAGE_few_up : STAGE_up;
  int t = 0;
  if (p->few) t |= FEW | (p->few_in_one ? ONE : 0) | (p->few_gates ? GATES : 0);
  t |= (p->copies_rows ? COPY : 0) | (p->by_expert ? BY_EXPERT : 0) | (p->discards_rows ? DISCARD : 0);
  t |= p->combine_looks_ahead ? AHEAD : 0;
  if (p->steps[up].early) t |= UP_EARLY;
  if (!p->few && p->steps[STAGE_down].early) t |= DOWN_EARLY;
  return t;
}

typedef struct layer_case {
  int32_t tokens, top_k, hidden, inter, experts, dtype;
  int bits; /* call_for */
  int mask, want;
} layer_case;

static layer_plan plan_of_formats(const machine *m, const layer_case *l, cumoe_format up, cumoe_format down)
{
  const cumoe_moe_desc given = {.size = sizeof given,
                                .num_experts = l->experts,
                                .hidden = l->hidden,
                                .inter = l->inter,
                                .dtype = l->dtype,
                                .up_format = up,
                                .down_format = down,
                                .routing = cumoe_routing_mixtral(l->top_k)};
  cumoe_moe_desc d;
  CHECK_OK(check_moe_desc(&given, &d));
  const layer_call c = call_for(&d, l->tokens, l->bits);
  return plan_layer(m, &d, &c);
}

static layer_plan plan_of(const machine *m, const layer_case *l)
{
  const cumoe_format dense = {0};
  return plan_of_formats(m, l, dense, dense);
}

enum { IDS = 4 | 16, LOGITS = 4, LOGITS_OF_16_BITS = 4 | 128, N_MAJOR = 1, NO_MAPS = 2, F32_ROUTER = 8 };

static const layer_case layer_cases[] = {
    /* few: inter from 192, many tokens from 512; SMs idle; rows an expert; bytes */
    {1, 8, 2048, 192, 128, DT_BF16, 0, ALONE, ALONE},
    {1, 8, 2048, 184, 128, DT_BF16, 0, ALONE, 0},
    {8, 8, 2048, 192, 128, DT_F16, 0, ALONE, ALONE},
    {8, 8, 2048, 184, 128, DT_BF16, 0, ALONE, 0},
    {9, 8, 2048, 512, 128, DT_BF16, 0, ALONE, ALONE},
    {9, 8, 2048, 504, 128, DT_BF16, 0, ALONE, 0},
    {8, 8, 2048, 504, 128, DT_BF16, 0, ALONE, ALONE},
    {9, 4, 2048, 768, 128, DT_BF16, 0, ALONE, ALONE},
    {1, 32, 64, 768, 128, DT_BF16, 0, ALONE, ALONE},
    {8, 32, 2048, 768, 128, DT_BF16, 0, ALONE, ALONE},
    {32, 8, 2048, 768, 128, DT_BF16, 0, ALONE, ALONE},
    {33, 7, 2048, 768, 128, DT_BF16, 0, ALONE, 0},
    {1, 4, 2880, 2880, 128, DT_BF16, 0, ALONE, ALONE},
    {18, 4, 2880, 2880, 128, DT_BF16, 0, ALONE, ALONE},
    {19, 4, 2880, 2880, 128, DT_BF16, 0, ALONE, 0},
    {1, 8, 7168, 2048, 256, DT_BF16, 0, ALONE, ALONE},
    {8, 8, 7168, 2048, 256, DT_BF16, 0, ALONE, ALONE},
    {9, 8, 7168, 2048, 256, DT_BF16, 0, ALONE, 0},
    {11, 8, 7168, 2048, 128, DT_BF16, 0, ALONE, ALONE},
    {12, 8, 7168, 2048, 128, DT_BF16, 0, ALONE, 0},
    {2, 8, 952, 768, 128, DT_BF16, 0, ALONE, ALONE},
    {2, 8, 944, 768, 128, DT_BF16, 0, ALONE, 0},
    {2, 8, 1056, 768, 128, DT_BF16, 0, ALONE, ALONE},
    {2, 8, 1064, 768, 128, DT_BF16, 0, ALONE, 0},
    {2, 8, 1904, 768, 128, DT_BF16, 0, ALONE, ALONE},
    {2, 8, 1896, 768, 128, DT_BF16, 0, ALONE, 0},
    {2, 8, 2112, 768, 128, DT_BF16, 0, ALONE, ALONE},
    {2, 8, 2120, 768, 128, DT_BF16, 0, ALONE, 0},
    {2, 8, 3808, 768, 128, DT_BF16, 0, ALONE, ALONE},
    {2, 8, 3800, 768, 128, DT_BF16, 0, ALONE, 0},
    {2, 8, 64, 14336, 128, DT_BF16, 0, ALONE, 0},
    {16, 8, 2048, 1024, 64, DT_BF16, 0, ALONE, ALONE},
    {32, 8, 2048, 1024, 64, DT_BF16, 0, ALONE, ALONE},
    {32, 8, 2048, 1024, 63, DT_BF16, 0, ALONE, 0},
    {8, 2, 4096, 14336, 8, DT_BF16, 0, ALONE, ALONE},
    {16, 2, 4096, 14336, 8, DT_BF16, 0, ALONE, ALONE},
    {17, 2, 4096, 14336, 8, DT_BF16, 0, ALONE, 0},
    /* few without a router ahead: a memset fills its words; it takes no tensor maps */
    {1, 8, 2048, 768, 128, DT_BF16, LOGITS, ALONE, ALONE},
    {1, 8, 2048, 768, 128, DT_F16, LOGITS, ALONE, ALONE},
    {2, 8, 2048, 768, 128, DT_F16, LOGITS, ALONE, ALONE},
    {2, 8, 2048, 768, 128, DT_BF16, LOGITS, ALONE, ALONE},
    {1, 8, 2048, 768, 128, DT_BF16, LOGITS_OF_16_BITS, ALONE, FEW | ONE},
    {1, 8, 2048, 768, 128, DT_BF16, IDS, ALONE, FEW | ONE},
    {1, 8, 2048, 768, 128, DT_BF16, F32_ROUTER, ALONE, ALONE},
    {1, 8, 2048, 768, 128, DT_BF16, NO_MAPS, ALONE, ALONE},
    {1, 8, 2048, 768, 128, DT_BF16, N_MAJOR, ALONE, ALONE},
    {2, 8, 2048, 768, 128, DT_F16, N_MAJOR, ALONE, ALONE}, /* dealt */
    {2, 8, 2048, 768, 128, DT_F16, N_MAJOR | LOGITS, ALONE, ALONE},
    {2, 8, 2048, 768, 128, DT_F16, N_MAJOR | NO_MAPS, ALONE, 0},
    {32, 8, 2048, 768, 128, DT_BF16, N_MAJOR, ALONE, ALONE},
    {33, 7, 2048, 768, 128, DT_BF16, N_MAJOR, ALONE, 0},
    {1, 4, 2880, 2880, 128, DT_BF16, N_MAJOR, ALONE, ALONE},
    {1, 8, 4096, 1536, 128, DT_BF16, N_MAJOR, ALONE, ALONE},
    {1, 2, 4096, 14336, 8, DT_BF16, N_MAJOR, ALONE, ALONE},
    {12, 2, 4096, 14336, 8, DT_BF16, N_MAJOR, ALONE, ALONE},
    {13, 2, 4096, 14336, 8, DT_BF16, N_MAJOR, ALONE, 0},
    {1, 8, 2048, 768, 128, DT_F32, 0, ALONE, 0},
    {1, 8, 2048, 768, 257, DT_BF16, 0, ALONE, FEW | ONE}, /* more experts than a warp's registers rank */
    /* thin (up here) starts early: not behind a router's tiles, nor where it streams for a millisecond */
    {33, 1, 2048, 768, 128, DT_BF16, 0, EARLY, DOWN_EARLY},
    {33, 1, 2048, 768, 128, DT_BF16, LOGITS, EARLY, EARLY},
    {33, 1, 2048, 768, 128, DT_BF16, F32_ROUTER, EARLY, EARLY},
    {1, 1, 1 << 17, 16384, 128, DT_BF16, LOGITS, EARLY, DOWN_EARLY},
    {128, 4, 2880, 2880, 128, DT_BF16, 0, EARLY, EARLY},
    /* copies from 97 rows an expert, narrow ones from 161; by expert from 49 */
    {96 * 16, 8, 2048, 2048, 128, DT_BF16, 0, COPY, 0},
    {97 * 16, 8, 2048, 2048, 128, DT_BF16, 0, COPY, COPY},
    {97 * 16, 8, 2048, 2048, 128, DT_F16, 0, COPY, COPY},
    {97 * 16, 8, 2048, 2040, 128, DT_BF16, 0, COPY, 0},
    {160 * 16, 8, 2048, 2040, 128, DT_BF16, 0, COPY, 0},
    {161 * 16, 8, 2048, 2040, 128, DT_BF16, 0, COPY, COPY},
    {161 * 16, 8, 2048, 2040, 128, DT_BF16, NO_MAPS, COPY | BY_EXPERT, 0},
    {161 * 16, 8, 2048, 2040, 128, DT_BF16, N_MAJOR, COPY | BY_EXPERT, COPY | BY_EXPERT},
    {161 * 16, 8, 2048, 2040, 128, DT_F32, 0, COPY | BY_EXPERT, 0},
    {48 * 16, 8, 2048, 2048, 128, DT_BF16, 0, BY_EXPERT, 0},
    {49 * 16, 8, 2048, 2048, 128, DT_BF16, 0, BY_EXPERT, BY_EXPERT},
    /* up to 80 MiB of h and y in whole lines */
    {1861, 8, 2048, 768, 128, DT_BF16, 0, DISCARD, DISCARD},
    {1862, 8, 2048, 768, 128, DT_BF16, 0, DISCARD, 0},
    {2048, 8, 2048, 512, 128, DT_BF16, 0, DISCARD, DISCARD}, /* the limit itself */
    {930, 8, 2048, 768, 128, DT_F32, 0, DISCARD, DISCARD},
    {931, 8, 2048, 768, 128, DT_F32, 0, DISCARD, 0},
    {7281, 1, 2880, 2880, 128, DT_F16, 0, DISCARD, DISCARD},
    {7282, 1, 2880, 2880, 128, DT_F16, 0, DISCARD, 0},
    {33, 1, 2888, 2880, 128, DT_F16, 0, DISCARD, 0},
    {33, 1, 2880, 2848, 128, DT_F16, 0, DISCARD, 0},
    {33, 1, 2880, 2848, 128, DT_F32, 0, DISCARD, DISCARD},
    /* combine looks ahead up to 64 tokens */
    {64, 8, 2048, 768, 128, DT_BF16, 0, AHEAD, AHEAD},
    {65, 8, 2048, 768, 128, DT_BF16, 0, AHEAD, 0},
};

static void test_layer_cases(void)
{
  const machine m = gpu_machine(&hopper);
  if (!group_begin("how kernels work together")) return;
  for (size_t i = 0; i < sizeof layer_cases / sizeof *layer_cases; i++) {
    const layer_case *l = &layer_cases[i];
    case_begin("T %d k %d H %d I %d E %d type %d bits %d", l->tokens, l->top_k, l->hidden, l->inter, l->experts,
               l->dtype, l->bits);
    const layer_plan p = plan_of(&m, l);
    for (stage at = 0; at < STAGE_COUNT; at++)
      if (p.steps[at].row >= 0) chosen[p.steps[at].row] = true;
    CHECK_MSG((traits_of(&p) & l->mask) == l->want, "0x%x, not 0x%x", (unsigned)(traits_of(&p) & l->mask),
              (unsigned)l->want);
    for (int g = 0; g < GPU_COUNT; g++) { /* all of it is an H200's but what needs no kernel of sm_90a */
      const machine other = gpu_machine(&gpus[g]);
      const layer_plan q = plan_of(&other, l);
      if (gpus[g].cc != 90) CHECK_MSG(!(traits_of(&q) & (ALONE | COPY | BY_EXPERT)), "cc %d", gpus[g].cc);
    }
    case_end();
  }
  group_end();
}

/* Weights with scales by the form drawn: tokens, rows an expert, and which formats. */
static void test_drawn_plans(void)
{
  enum { INT4, INT4_OF_32, MXFP4, NVFP4, FP8, FP8_CHANNEL, INT8, FP8_A16 };
  static const struct {
    int format;
    layer_case layer;
    bool drawn;
  } cases[] = {
      {INT4, {2, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, true},
      {INT4, {12, 8, 2048, 768, 128, DT_F16, 0, 0, 0}, true},
      {INT4, {13, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, false},
      {INT4, {4, 2, 4096, 14336, 8, DT_BF16, 0, 0, 0}, true},
      {INT4, {5, 2, 4096, 14336, 8, DT_BF16, 0, 0, 0}, false},
      {INT4, {1, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, true},
      {INT4_OF_32, {2, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, false},
      {MXFP4, {2, 8, 4096, 1536, 128, DT_BF16, 0, 0, 0}, true},
      {MXFP4, {2, 4, 2880, 2880, 128, DT_F16, 0, 0, 0}, true},
      {MXFP4, {3, 8, 4096, 1536, 128, DT_BF16, 0, 0, 0}, false},
      {MXFP4, {4, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, true},
      {MXFP4, {6, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, false},
      {MXFP4, {2, 8, 7168, 2048, 256, DT_BF16, 0, 0, 0}, false},
      {NVFP4, {2, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, false},
      {FP8, {2, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, true},
      {FP8, {8, 8, 2048, 768, 128, DT_F16, 0, 0, 0}, true},
      {FP8, {9, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, false},
      {FP8, {4, 2, 4096, 14336, 8, DT_BF16, 0, 0, 0}, true},
      {FP8, {5, 2, 4096, 14336, 8, DT_BF16, 0, 0, 0}, false},
      {FP8, {1, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, false},
      {FP8_CHANNEL, {8, 8, 7168, 2048, 256, DT_BF16, 0, 0, 0}, true},
      {FP8, {2, 2, 1 << 20, 768, 8, DT_BF16, 0, 0, 0}, true},
      {FP8, {2, 2, (1 << 20) + 128, 768, 8, DT_BF16, 0, 0, 0}, false},
      {FP8, {2, 2, 768, (1 << 20) + 128, 8, DT_BF16, 0, 0, 0}, false},
      {FP8_A16, {8, 8, 7168, 2048, 256, DT_BF16, 0, 0, 0}, false},
      {INT8, {8, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, true},
      {INT8, {4, 2, 4096, 14336, 8, DT_F16, 0, 0, 0}, true},
      {INT8, {9, 8, 2048, 768, 128, DT_BF16, 0, 0, 0}, false},
  };
  const machine m = gpu_machine(&hopper);
  if (!group_begin("which weights with scales are drawn")) return;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const layer_case *l = &cases[i].layer;
    cumoe_format a16 = cumoe_format_fp8_block(CUMOE_F32);
    a16.rows = CUMOE_ROWS_AS_THEY_ARE, a16.row_group = 0;
    const cumoe_format formats[] = {cumoe_format_int4(128, CUMOE_BF16),
                                    cumoe_format_int4(32, CUMOE_BF16),
                                    cumoe_format_mxfp4(),
                                    cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES),
                                    cumoe_format_fp8_block(CUMOE_F32),
                                    cumoe_format_fp8_channel(CUMOE_F32),
                                    cumoe_format_int8(CUMOE_F32),
                                    a16};
    case_begin("format %d T %d H %d", cases[i].format, l->tokens, l->hidden);
    const layer_plan p = plan_of_formats(&m, l, formats[cases[i].format], formats[cases[i].format]);
    const int32_t row = p.steps[STAGE_few_up].row;
    if (row >= 0) chosen[row] = true;
    CHECK((p.few && variants[row].form == FORM_drawn) == cases[i].drawn);
    CHECK(!cases[i].drawn || (p.few_in_one && p.few_gates));
    case_end();
  }
  group_end();
}

/* One grid for both reads both in one way: whatever a down has otherwise, it is not drawn with its up. */
static void test_unlike_plans(void)
{
  const cumoe_format int4 = cumoe_format_int4(128, CUMOE_BF16), fp8 = cumoe_format_fp8_block(CUMOE_F32);
  cumoe_format shifted = fp8, plain = fp8, plain8 = cumoe_format_int8(CUMOE_F32), asymmetric = int4, ordered = int4,
               zeros = int4, behind = int4, channels = fp8;
  shifted.origin[1] = 64, behind.origin[1] = 64, channels.origin[0] = 64;
  plain.rows = CUMOE_ROWS_AS_THEY_ARE, plain.row_group = 0;
  plain8.rows = CUMOE_ROWS_AS_THEY_ARE;
  asymmetric.offset = 7, ordered.act_order = 1, zeros.zero = CUMOE_ZERO_CODES_OUT, zeros.offset = 0;
  const struct {
    cumoe_format up, down;
    bool drawn;
  } cases[] = {{fp8, fp8, true},
               {channels, fp8, true},
               {fp8, shifted, false},
               {channels, shifted, false},
               {fp8, plain, false},
               {cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC), cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC_EXPERT), false},
               {cumoe_format_int8(CUMOE_F32), plain8, false},
               {int4, int4, true},
               {int4, behind, false},
               {int4, cumoe_format_int4(64, CUMOE_BF16), false},
               {int4, asymmetric, false},
               {int4, ordered, false},
               {int4, zeros, false}};
  const layer_case layer = {4, 8, 2048, 768, 128, DT_BF16, 0, 0, 0};
  const machine m = gpu_machine(&hopper);
  if (!group_begin("down otherwise than up")) return;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    case_begin("case %zu", i);
    const layer_plan p = plan_of_formats(&m, &layer, cases[i].up, cases[i].down);
    const int32_t row = p.steps[STAGE_few_up].row;
    CHECK((row >= 0 && variants[row].form == FORM_drawn) == cases[i].drawn);
    case_end();
  }
  group_end();
}

/* One of few's rows, forced, takes whatever both can serve; one of the stages' keeps few out; one of the gate keeps the
 * gate. */
static void test_forced_plans(void)
{
  if (!group_begin("forced rows and few")) return;
  for (int32_t i = 0; i < variant_count; i++) {
    const variant *v = &variants[i];
    if (v->arch == ARCH_cpu || v->x == DT_F16 || v->x == DT_F32 || v->w == DT_F32 || v->y == DT_F32) continue;
    if (operation_is_late((operation)v->op)) continue;
    if (format_is_scaled((weight_format)v->format)) continue; /* serves none of these layers */
    const bool few = v->op == OP_few_up || v->op == OP_few_down;
    const bool replaced = v->op >= OP_map_count && v->op <= OP_combine && v->op != OP_permute;
    const int bits = v->major == MAJOR_N ? N_MAJOR : 0;
    const layer_case one = {1, 8, 2048, 768, 128, DT_BF16, bits, 0, 0},
                     two = {2, 8, 2048, 768, 128, DT_BF16, bits, 0, 0},
                     small = {2, 8, 64, 64, 128, DT_BF16, bits, 0, 0}, most = {32, 8, 64, 64, 128, DT_BF16, bits, 0, 0},
                     over = {33, 7, 2048, 768, 128, DT_BF16, bits, 0, 0},
                     many = {784, 8, 2048, 2048, 128, DT_BF16, bits, 0, 0},
                     pairs = {32, 9, 2048, 768, 128, DT_BF16, bits, 0, 0};
    const machine m = forcing(&hopper, i);
    case_begin("%s", v->name);
    CHECK(plan_of(&m, &one).few == (few || !replaced));
    CHECK(plan_of(&m, &two).few == (few ? v->bm > 1 : !replaced));
    CHECK(plan_of(&m, &small).few == (few && v->bm > 1));
    CHECK(plan_of(&m, &most).few == (few && v->bm > 1));
    CHECK(!plan_of(&m, &over).few && !plan_of(&m, &pairs).few);
    CHECK(plan_of(&m, &one).few_in_one == (plan_of(&m, &one).few && v->op != OP_few_down));
    CHECK(plan_of(&m, &one).few_gates == (plan_of(&m, &one).few_in_one && v->op != OP_gate));
    if (v->op == OP_up || v->op == OP_down) CHECK(plan_of(&m, &many).by_expert == (v->form == FORM_wgmma));
    case_end();
  }
  group_end();
}

/* The first of the rows of that form that hopper runs. */
static int32_t row_of_form(operation op, form f)
{
  int32_t i = 0;
  while (i < variant_count && (variants[i].op != (int8_t)op || variants[i].form != (int8_t)f)) i++;
  return i;
}

/* Whether x and h are made ready for form fixed ahead, of 128 experts, 8 a token. */
static bool is_brought_ahead(const machine *m, cumoe_format f, int64_t tokens)
{
  const layer_case layer = {(int32_t)tokens, 8, 2048, 768, 128, DT_BF16, 0, 0, 0};
  const layer_plan p = plan_of_formats(m, &layer, f, f);
  const variant *x = row_at(&p, STAGE_arrange_x), *h = row_at(&p, STAGE_quantize_h);
  CHECK(!x == !h && (!x || (x->form == FORM_fixed && h->form == FORM_fixed)));
  return x != NULL;
}

/* From fixed_rows rows an expert up, and while there is room: 64 rows an expert. */
static void test_fixed_ahead(void)
{
  if (!group_begin("rows brought into fixed point ahead")) return;
  machine m = gpu_machine(&hopper);
  const cumoe_format int4 = cumoe_format_int4(128, CUMOE_BF16), mxfp4 = cumoe_format_mxfp4();
  case_begin("by rows");
  m.limits[LIMIT_fixed_rows][WEIGHTS_w4] = 3;
  CHECK(!is_brought_ahead(&m, int4, 32) && is_brought_ahead(&m, int4, 33) && is_brought_ahead(&m, int4, 48));
  case_end();
  case_begin("two codes each, by what serves");
  m.limits[LIMIT_twin_weights][WEIGHTS_w4] = 300e6;
  CHECK(is_brought_ahead(&m, mxfp4, 8) && is_brought_ahead(&m, mxfp4, 64) && !is_brought_ahead(&m, mxfp4, 65));
  m.limits[LIMIT_twin_weights][WEIGHTS_w4] = 1;
  CHECK(is_brought_ahead(&m, mxfp4, 128) && !is_brought_ahead(&m, mxfp4, 256));
  case_end();
  case_begin("by room");
  m.forced[OP_up] = row_of_form(OP_up, FORM_fixed) + 1, m.forced[OP_down] = row_of_form(OP_down, FORM_fixed) + 1;
  CHECK(is_brought_ahead(&m, int4, 1024) && !is_brought_ahead(&m, int4, 1025));
  case_end();
  group_end();
}

/* A rank's 32 of 128 experts, with room for so many tokens, where so many of all ranks' come; 0: all are room's. */
static layer_plan plan_of_rank(const machine *m, int64_t room, int64_t rank_tokens)
{
  const cumoe_moe_desc given = {.size = sizeof given,
                                .num_experts = 128,
                                .local_experts = 32,
                                .hidden = 2048,
                                .inter = 768,
                                .dtype = CUMOE_BF16,
                                .routing = cumoe_routing_mixtral(8)};
  cumoe_moe_desc d;
  CHECK_OK(check_moe_desc(&given, &d));
  layer_call c = call_for(&d, room, 0);
  c.has_ids = true, c.rank_tokens = rank_tokens;
  return plan_layer(m, &d, &c);
}

/* Kernels are chosen by the pairs that are expected, grids and memory are for the room. */
static void test_ranks_tokens(void)
{
  if (!group_begin("tokens of ranks")) return;
  const machine m = gpu_machine(&hopper);
  case_begin("few by what comes");
  CHECK(!plan_of_rank(&m, 32, 0).few && plan_of_rank(&m, 32, 32).few && plan_of_rank(&m, 32, 4).few);
  CHECK(!plan_of_rank(&m, 33, 4).few);
  case_end();
  case_begin("rows by what comes");
  const layer_plan few_pairs = plan_of_rank(&m, 4096, 80), alone = plan_of_rank(&m, 20, 0),
                   all = plan_of_rank(&m, 4096, 0), said = plan_of_rank(&m, 4096, 4 * 4096);
  CHECK(few_pairs.steps[STAGE_up].row == alone.steps[STAGE_up].row);
  CHECK(few_pairs.steps[STAGE_up].row != all.steps[STAGE_up].row);
  CHECK(said.steps[STAGE_up].row == all.steps[STAGE_up].row);
  CHECK(few_pairs.steps[STAGE_combine].grid == all.steps[STAGE_combine].grid);
  CHECK(few_pairs.at.bytes == all.at.bytes);
  case_end();
  group_end();
}

/* 1024 tokens of 128 experts of fp8 blocks, 8 a token, changed by `what`. */
enum {
  CODES_AS_THEY_ARE,
  CODES_STATIC,
  CODES_POWERS,
  CODES_MADE, /* up to here by up */
  CODES_NARROW = CODES_MADE,
  CODES_SHIFTED,
  CODES_BY_TOKEN,
  CODES_BY_EXPERT,
  CODES_UNGATED,
  CODES_WEIGHTED,
  CODES_GELU,
  CODES_SCALES,
  CODES_COUNT
};

static layer_plan plan_of_codes(const machine *m, int what)
{
  cumoe_moe_desc d, given = {.size = sizeof given,
                             .num_experts = 128,
                             .hidden = 2048,
                             .inter = what == CODES_NARROW ? 832 : 768,
                             .dtype = CUMOE_BF16,
                             .act = what == CODES_GELU ? CUMOE_ACT_GELU_ERF : CUMOE_ACT_SILU,
                             .flags = what == CODES_UNGATED ? CUMOE_MOE_UNGATED : 0,
                             .routing = cumoe_routing_mixtral(8),
                             .up_format = cumoe_format_fp8_block(CUMOE_F32),
                             .down_format = cumoe_format_fp8_block(CUMOE_F32)};
  if (what == CODES_STATIC) given.down_format = cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC);
  if (what == CODES_BY_EXPERT) given.down_format = cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC_EXPERT);
  if (what == CODES_BY_TOKEN) given.down_format = cumoe_format_fp8_channel(CUMOE_F32);
  if (what == CODES_POWERS) given.down_format.row_scale = CUMOE_E8M0;
  if (what == CODES_SHIFTED) given.down_format.origin[1] = 64;
  if (what == CODES_WEIGHTED) given.routing.flags |= CUMOE_ROUTE_WEIGHT_ON_INPUT;
  CHECK_OK(check_moe_desc(&given, &d));
  layer_call c = call_for(&d, 1024, 0);
  if (what == CODES_SCALES) c.up.suits_codes = false;
  return plan_layer(m, &d, &c);
}

/* Codes of h are up's or a quantize's; down waits expert by expert where nothing lies between. */
static void test_codes_of_h(void)
{
  if (!group_begin("codes of h")) return;
  machine m = gpu_machine(&hopper);
  for (int what = 0; what < CODES_COUNT; what++) {
    const layer_plan p = plan_of_codes(&m, what);
    const bool made = what < CODES_MADE;
    case_begin("layer %d", what);
    CHECK(p.refused == STAGE_COUNT && p.codes_h == made && p.by_expert == made);
    CHECK(made == (p.steps[STAGE_quantize_h].row < 0) && p.steps[STAGE_quantize_x].row >= 0);
    /* Down writes y while up reads its rows, codes and their scales, which lie behind it, in a place of their own. */
    const size_t pairs = 1024 * 2, copied = pairs * 2048 + pairs * 2048 / 128 * sizeof(float);
    CHECK(p.at.x_copy >= p.at.y + pairs * 2048 * 2 && p.at.x_copy + copied <= p.at.bytes);
    case_end();
  }
  case_begin("a forced quantize");
  m.forced[OP_quantize] = plan_of_codes(&m, CODES_NARROW).steps[STAGE_quantize_h].row + 1;
  CHECK(!plan_of_codes(&m, CODES_AS_THEY_ARE).codes_h);
  case_end();
  group_end();
}

/* A forced row that cannot serve the layer is refused by the plan, by name: nothing is launched. */
static void test_refused_plans(void)
{
  const layer_case l = {4096, 8, 2048, 768, 128, DT_F32, 0, 0, 0};
  if (!group_begin("refused plans")) return;
  for (int32_t i = 0; i < variant_count; i++) {
    const variant *v = &variants[i];
    if (v->arch == ARCH_cpu || v->x != DT_BF16 || v->op == OP_elementwise || v->op == OP_softmax || v->op == OP_norm ||
        v->form == FORM_blocks || operation_is_late((operation)v->op))
      continue;
    const machine m = forcing(&hopper, i);
    const layer_plan p = plan_of(&m, &l);
    case_begin("%s", v->name);
    const bool in_layer =
        v->op != OP_few_up && v->op != OP_few_down && v->op != OP_quantize && v->op != OP_quantize_masked;
    CHECK_MSG((p.refused != STAGE_COUNT) == in_layer, "refused: %d", (int)p.refused);
    if (in_layer) CHECK((int)stage_operation(p.refused) == v->op && p.why == STEP_NO_KERNEL);
    case_end();
  }
  case_begin("2^32 CTAs");
  const machine m = gpu_machine(&hopper);
  const cumoe_moe_desc d = {.local_experts = 8, .hidden = 1 << 24, .routing.top_k = 1};
  const op_shape s = {.op = OP_combine, .in = DT_BF16, .out = DT_BF16, .tokens = 1 << 30, .n = d.hidden, .top_k = 1};
  launch_step step;
  CHECK(plan_step(&m, &s, &step) == STEP_GRID_TOO_LARGE && step.grid > INT32_MAX);
  case_end();
  group_end();
}

/* What few_up can do of gates. */
static void test_few_gates(void)
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
  const machine m = gpu_machine(&hopper);
  if (!group_begin("gates in few")) return;
  for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
    cumoe_moe_desc d = {.num_experts = gates[i].experts,
                        .local_experts = gates[i].experts,
                        .hidden = 2048,
                        .inter = 768,
                        .dtype = DT_BF16,
                        .out_dtype = DT_BF16,
                        .routing = cumoe_routing_make((cumoe_score)gates[i].score, 8, gates[i].flags)};
    d.routing.n_group = gates[i].groups, d.routing.softcap = gates[i].softcap;
    const layer_call c = call_for(&d, 1, gates[i].bias ? 32 : 0);
    case_begin("gate %d", (int)i);
    const layer_plan p = plan_layer(&m, &d, &c);
    CHECK(p.few_in_one && p.few_gates == gates[i].wanted && (row_at(&p, STAGE_gate) == NULL) == gates[i].wanted);
    case_end();
  }
  group_end();
}

/* Rows of a router whose logits do not depend on the batch: tiles that split the reduction alike; or one for any T. */
static void test_routers_of_any_batch(void)
{
  static const struct {
    int32_t x, w;
    int32_t bm[3]; /* of 1, 1000 and 100000 tokens */
  } routers[] = {
      {DT_BF16, DT_BF16, {16, 32, 32}},
      {DT_F16, DT_F16, {16, 32, 32}},
      {DT_BF16, DT_F32, {128, 128, 128}},
      {DT_F32, DT_F32, {128, 128, 128}},
  };
  static const int64_t tokens[] = {1, 1000, 100000};
  if (!group_begin("routers of any batch")) return;
  for (size_t g = 1; g < sizeof gpus / sizeof *gpus; g++)
    for (size_t i = 0; i < sizeof routers / sizeof *routers; i++) {
      const machine m = gpu_machine(&gpus[g]);
      case_begin("gpu %d, router %d", (int)g, (int)i);
      for (int t = 0; t < 3; t++) {
        const op_shape s = {.op = OP_router,
                            .in = routers[i].x,
                            .out = DT_F32,
                            .format = dense_format(routers[i].w),
                            .scale_run = SCALE_RUN_ALL,
                            .tmap = true,
                            .tokens = tokens[t],
                            .rows = tokens[t],
                            .experts = 256,
                            .n = 256,
                            .k = 2048,
                            .invariant = true};
        const variant *v = &variants[choose(&m, &s)];
        CHECK_MSG(v->form == FORM_tile && v->bm == routers[i].bm[t], "%d tokens: %s", (int)tokens[t], v->name);
      }
      case_end();
    }
  group_end();
}

int main(int argc, char **argv)
{
  rng r = {20240917};
  test_begin(argc, argv);
  test_every_layer_has_kernels(&r);
  test_forced_rows(&r);
  test_tune_files();
  test_thresholds();
  test_grids(&r);
  test_grids_around_tiles(&r);
  test_clusters();
  test_row_lengths();
  test_functions();
  test_late_rows();
  test_keep_rows(&r);
  test_drawn_rows(&r);
  test_gradient_stages();
  test_attention_backward_rows();
  test_backward_rows();
  test_random_plans(&r);
  if (gpus_have_sm90()) test_layer_cases();
  if (gpus_have_sm90()) test_drawn_plans();
  if (gpus_have_sm90()) test_unlike_plans();
  if (gpus_have_sm90()) test_forced_plans();
  if (gpus_have_sm90()) test_few_gates();
  test_routers_of_any_batch();
  test_fixed_ahead();
  test_ranks_tokens();
  test_codes_of_h();
  test_refused_plans();
  test_chunking(&r);
  test_layout(&r);
  test_growth(&r);
  test_overflow(&r);
  report_unchosen_rows();
  return test_end();
}
