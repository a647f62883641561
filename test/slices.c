/*
 * Parts of weights where they lie: a rank's slice of an expert, read in place with its origin, gives the whole's bits;
 * ranks' shares of inter add up to the whole layer; a scale of a matrix or channel gives the bits of blocks that all
 * have it; and nothing is read past the end of codes, scales, zero points, orders or activations.
 */
#include <math.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cases_format.h"

enum { EXPERTS = 2, TOKENS = 14, HIDDEN = 288, INTER = 96 };

/* ---- slices ---------------------------------------------------------------------------------------- */

/* Channels and k of an expert's matrix. */
typedef struct slice {
  int32_t n, width, k, depth;
} slice;

static cumoe_view part_of(cumoe_view v, int64_t row, int64_t rows, int64_t col, int64_t cols)
{
  CHECK_OK(cumoe_view_rows(v, row, rows, &v));
  CHECK_OK(cumoe_view_cols(v, col, cols, &v));
  return v;
}

/* Of a stack of EXPERTS matrices, the same part of each: strided. */
static cumoe_array parts_of(cumoe_view stack, int64_t row, int64_t rows, int64_t col, int64_t cols)
{
  return (cumoe_array){.data = part_of(stack, row, rows, col, cols), .expert_stride = stack.rows / EXPERTS * stack.ld};
}

/* Of the whole's projection and format those of the slice. */
static cumoe_projection slice_of(const cumoe_projection *p, cumoe_format *f, slice s)
{
  const int64_t unit = format_unit(f), n0 = format_block(f->block[0], f->origin[0], s.n),
                n1 = format_block(f->block[0], f->origin[0], s.n + s.width - 1),
                k0 = format_block(f->block[1], f->origin[1], s.k),
                k1 = format_block(f->block[1], f->origin[1], s.k + s.depth - 1);
  const cumoe_array data = parts_of(p->data, s.n, s.width, s.k / unit, s.depth / unit);
  cumoe_projection part = *p;
  part.data = data.data;
  part.expert_stride = data.expert_stride;
  part.scale = parts_of(p->scale.data, n0, n1 - n0 + 1, k0, k1 - k0 + 1);
  if (f->zero == CUMOE_ZERO_CODES_OUT) part.zero = parts_of(p->zero.data, s.n / 8, s.width / 8, k0, k1 - k0 + 1);
  if (f->zero == CUMOE_ZERO_VALUES) part.zero = parts_of(p->zero.data, n0, n1 - n0 + 1, k0, k1 - k0 + 1);
  if (f->block[0]) f->origin[0] = (f->origin[0] + s.n) % f->block[0];
  if (f->block[1]) f->origin[1] = (f->origin[1] + s.k) % f->block[1];
  return part;
}

/* What a layer of these weights answers for tokens that the caller has routed. */
static tensor layer_by(cumoe_context context, const cumoe_moe_desc *desc, const cumoe_weights_desc *d, cumoe_view x,
                       const tensor *ids, const tensor *weights)
{
  cumoe_weights bound = NULL;
  cumoe_plan plan = NULL;
  size_t bytes = 0;
  CHECK_OK(cumoe_weights_bind(context, d, &bound));
  CHECK_OK(cumoe_plan_create(context, desc, &plan));
  CHECK_OK(cumoe_plan_workspace(plan, x.rows, &bytes));
  const int32_t out = desc->out_dtype ? desc->out_dtype : desc->dtype;
  const cumoe_moe_args a = {.size = sizeof a,
                            .x = x,
                            .ids = device_put(context, ids, 0),
                            .weights = device_put(context, weights, 0),
                            .out = device_new(context, out, x.rows, desc->hidden, 0),
                            .workspace = device_new(context, CUMOE_U8, 1, (int64_t)bytes, 0)};
  CHECK_OK(cumoe_moe_forward(plan, bound, &a, NULL));
  CHECK_OK(cumoe_weights_destroy(bound));
  CHECK_OK(cumoe_plan_destroy(plan));
  return device_get(context, cumoe_const(a.out));
}

/* Down hands h on: column n of out is channel n of h. */
static tensor layer_of(cumoe_context context, const cumoe_projection *up, cumoe_format f, slice s, const tensor *x)
{
  const cumoe_moe_desc desc = {.size = sizeof desc,
                               .num_experts = EXPERTS,
                               .hidden = s.depth,
                               .inter = s.width,
                               .dtype = CUMOE_BF16,
                               .act = CUMOE_ACT_IDENTITY,
                               .flags = CUMOE_MOE_UNGATED,
                               .routing = cumoe_routing_make(CUMOE_SCORE_SOFTMAX, 1, 0),
                               .up_format = f};
  cumoe_weights_desc d = {.size = sizeof d, .experts = EXPERTS, .hidden = s.depth, .inter = s.width};
  tensor down = tensor_new(CUMOE_BF16, (int64_t)EXPERTS * s.depth, s.width), ids = tensor_new(CUMOE_I32, TOKENS, 1),
         weights = tensor_new(CUMOE_F32, TOKENS, 1);
  for (int64_t i = 0; i < down.rows; i++)
    if (i % s.depth < s.width) tensor_set(&down, i, i % s.depth, 1);
  for (int t = 0; t < TOKENS; t++) tensor_set(&ids, t, 0, t % EXPERTS), tensor_set(&weights, t, 0, 1);
  d.dtype = CUMOE_BF16;
  d.gate_order = CUMOE_UNGATED;
  d.up_major = d.down_major = CUMOE_OUT_IN;
  d.up_format = f;
  d.up = *up;
  d.down.data = device_put(context, &down, 0);
  return layer_by(context, &desc, &d, part_of(device_put(context, x, 0), 0, TOKENS, s.k, s.depth), &ids, &weights);
}

/* Channels of the slice alone, and of x what it multiplies alone. */
static void check_slice(cumoe_context context, const cumoe_projection *p, const cumoe_format *f, slice s)
{
  const slice all = {0, INTER, 0, HIDDEN};
  rng r = {31};
  const tensor x = tensor_normal(&r, CUMOE_BF16, TOKENS, HIDDEN, 0, 1);
  for (int64_t i = 0; i < TOKENS * HIDDEN; i++)
    if (i % HIDDEN < s.k || i % HIDDEN >= s.k + s.depth) tensor_set(&x, i / HIDDEN, i % HIDDEN, 0);
  cumoe_format of = *f;
  const cumoe_projection part = slice_of(p, &of, s);
  const tensor whole = layer_of(context, p, *f, all, &x), got = layer_of(context, &part, of, s, &x);
  for (int64_t i = 0; i < TOKENS * s.width; i++) {
    const int64_t t = i / s.width, n = i % s.width;
    const double want = tensor_get(&whole, t, s.n + n), is = tensor_get(&got, t, n);
    if (!CHECK_MSG(want == is, "channels from %d, k from %d: token %d, channel %d: %g, the whole has %g", s.n, s.k,
                   (int)t, (int)n, is, want))
      break;
  }
}

static host_projection random_projection(const cumoe_format *f, rng *r)
{
  cumoe_moe_desc d = {.num_experts = EXPERTS, .hidden = HIDDEN, .inter = INTER, .dtype = CUMOE_BF16};
  const weights_form form = {
      .gate_order = CUMOE_UNGATED, .up_major = CUMOE_OUT_IN, .down_major = CUMOE_OUT_IN, .up = *f};
  return random_weights(r, &d, EXPERTS, INTER, form).up;
}

static cumoe_projection put(cumoe_context context, const host_projection *p)
{
  cumoe_projection result = {.data = device_put(context, &p->data, 0), .scale.data = device_put(context, &p->scale, 0)};
  if (p->zero.data) result.zero.data = device_put(context, &p->zero, 0);
  if (p->global.data) result.global = device_put(context, &p->global, 0);
  if (p->input_scale.data) result.input_scale = device_put(context, &p->input_scale, 0);
  return result;
}

/* On a GPU sums are f32, of runs of k with one scale, at most 128 from a row's begin: those of a slice are the whole's
 * where its runs are. Kernels of sm_90a for e4m3 take runs of 128; those for u4, whose rounded weights make no exact
 * sums, add up 128 k in an order of their own. */
static bool same_sums(const cumoe_format *f, slice s)
{
  if (f->element == CUMOE_ELEMENT_U4 && s.k % 128) return false;
  const bool aligned = (f->origin[1] % 128 == 0) == ((f->origin[1] + s.k) % 128 == 0);
  return f->block[1] == 0 ? s.k % 128 == 0 : f->element != CUMOE_ELEMENT_E4M3 || aligned;
}

static void test_slices(cumoe_context context)
{
  static const slice slices[] = {{32, 64, 0, HIDDEN}, {0, 40, 0, HIDDEN},   {56, 40, 0, HIDDEN},
                                 {0, INTER, 96, 192}, {0, INTER, 128, 160}, {24, 48, 32, 96}};
  cumoe_format f;
  const char *name;
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++) {
    rng r = {(uint64_t)i + 5};
    if (f.act_order) continue; /* a slice of k has no order of its own */
    if (f.rows == CUMOE_ROWS_TOKEN) f.rows = CUMOE_ROWS_AS_THEY_ARE;
    f.joined = 0;
    case_begin("slices: %s", name);
    const host_projection host = random_projection(&f, &r);
    const cumoe_projection p = put(context, &host);
    for (size_t s = 0; s < sizeof slices / sizeof *slices; s++)
      if (!on_device(context) || same_sums(&f, slices[s])) check_slice(context, &p, &f, slices[s]);
    case_end();
  }
}

/* ---- shares ---------------------------------------------------------------------------------------- */

/* A layer of few tokens, whose experts' channels are dealt to ranks, each with all of hidden: a share of down begins
 * anywhere in its blocks along in. */
enum { FEW = 12 };
static const int64_t few_tokens[] = {1, 2, 3, 8, FEW};
enum { COUNTS = sizeof few_tokens / sizeof *few_tokens };

typedef struct split_layer {
  cumoe_moe_desc desc;
  host_weights host;
  cumoe_projection gate, up, down;
  tensor x, ids, weights; /* of FEW tokens, an expert each */
} split_layer;

/* The ranks' sums, and how far they may be off. */
typedef struct split_sums {
  bounded *of[COUNTS]; /* [tokens, hidden] */
} split_sums;

static split_layer split_new(cumoe_context context, rng *r, cumoe_format f, int32_t dtype, int32_t hidden,
                             int32_t inter)
{
  split_layer w = {.desc = {.size = sizeof w.desc,
                            .num_experts = EXPERTS,
                            .local_experts = EXPERTS,
                            .hidden = hidden,
                            .inter = inter,
                            .dtype = dtype,
                            .out_dtype = CUMOE_F32,
                            .routing = cumoe_routing_make(CUMOE_SCORE_SOFTMAX, 1, 0),
                            .up_format = f,
                            .down_format = f}};
  const weights_form form = {CUMOE_GATE_UP_SEPARATE, CUMOE_OUT_IN, CUMOE_OUT_IN, .up = f, .down = f};
  w.host = random_weights(r, &w.desc, EXPERTS, inter, form);
  w.gate = put(context, &w.host.gate);
  w.up = put(context, &w.host.up);
  w.up.input_scale = w.gate.input_scale;
  w.down = put(context, &w.host.down);
  w.x = tensor_normal(r, dtype, FEW, hidden, 0, 1);
  w.ids = tensor_new(CUMOE_I32, FEW, 1);
  w.weights = tensor_normal(r, CUMOE_F32, FEW, 1, 0, 1);
  for (int t = 0; t < FEW; t++) tensor_set(&w.ids, t, 0, t % EXPERTS);
  return w;
}

/* What the channels from `first` on add, of all tokens, by the oracle: [FEW, hidden]. */
static bounded *share_answers(const split_layer *w, const cumoe_moe_desc *desc, int32_t first)
{
  const int32_t hidden = desc->hidden, width = desc->inter;
  bounded *want = scratch((size_t)FEW * (size_t)hidden, sizeof *want);
  host_weights share = w->host;
  const layer_case c = {
      .desc = desc, .weights = &share, .x = &w->x, .ids = &w->ids, .id_weights = &w->weights, .out_scale = 1};
  share.inter = width;
  share.up_format = desc->up_format;
  share.down_format = desc->down_format;
  for (int part = 0; part < 3; part++) { /* rows of inter channels; of down, columns */
    const int64_t rows = part == PLAIN_DOWN ? EXPERTS * hidden : EXPERTS, run = part == PLAIN_DOWN ? 1 : hidden;
    double *to = share.plain[part] = scratch((size_t)(rows * width * run), sizeof *to);
    for (int64_t i = 0; i < rows; i++)
      memcpy(to + i * width * run, w->host.plain[part] + (i * w->desc.inter + first) * run,
             (size_t)(width * run) * sizeof *to);
  }
  for (int64_t t = 0; t < FEW; t++) memcpy(want + t * hidden, oracle_layer(&c, t).out, (size_t)hidden * sizeof *want);
  return want;
}

/* A rank's answers for each number of tokens, onto the sums. */
static void run_share(cumoe_context context, const split_layer *w, int32_t first, int32_t width, split_sums *sums)
{
  const int32_t hidden = w->desc.hidden;
  const slice up = {first, width, 0, hidden}, down = {0, hidden, first, width};
  cumoe_moe_desc desc = w->desc;
  cumoe_weights_desc d = weights_desc(&w->host);
  cumoe_format again = desc.up_format;
  desc.inter = d.inter = width;
  d.gate = slice_of(&w->gate, &again, up);
  d.up = slice_of(&w->up, &desc.up_format, up);
  d.down = slice_of(&w->down, &desc.down_format, down);
  d.up_format = desc.up_format;
  d.down_format = desc.down_format;
  const bounded *want = share_answers(w, &desc, first);
  const cumoe_view x = device_put(context, &w->x, 0);
  for (int i = 0; i < COUNTS; i++) {
    tensor ids = w->ids, weights = w->weights;
    ids.rows = weights.rows = few_tokens[i];
    const tensor got = layer_by(context, &desc, &d, part_of(x, 0, few_tokens[i], 0, hidden), &ids, &weights);
    check_bounded("a share", &got, want);
    for (int64_t at = 0; at < few_tokens[i] * hidden; at++) {
      sums->of[i][at].value += tensor_get(&got, 0, at);
      sums->of[i][at].bound += want[at].bound + unit_roundoff(desc.dtype) * fabs(want[at].value);
    }
  }
}

/* Each share was right by itself, and what is rounded is each share, not the whole. */
static void check_split_sums(const split_layer *w, const split_sums *sums)
{
  const bounded *want = share_answers(w, &w->desc, 0);
  for (int i = 0; i < COUNTS; i++)
    for (int64_t at = 0; at < few_tokens[i] * w->desc.hidden; at++) {
      const bounded is = sums->of[i][at];
      const double off = is.bound + want[at].bound + unit_roundoff(w->desc.dtype) * fabs(want[at].value);
      if (!CHECK_MSG(fabs(is.value - want[at].value) <= off, "%d tokens, element %d: the shares' sum is %g, want %g",
                     (int)few_tokens[i], (int)at, is.value, want[at].value))
        return;
    }
}

static void run_shares(cumoe_context context, const split_layer *w, int32_t width)
{
  split_sums sums;
  for (int i = 0; i < COUNTS; i++) sums.of[i] = scratch((size_t)(few_tokens[i] * w->desc.hidden), sizeof *sums.of[i]);
  for (int32_t first = 0; first < w->desc.inter; first += width) run_share(context, w, first, width, &sums);
  const int32_t rows = w->desc.down_format.rows; /* a group's or token's scale is each share's own */
  if (rows != CUMOE_ROWS_GROUP && rows != CUMOE_ROWS_TOKEN) check_split_sums(w, &sums);
}

/* As models are split: 768 channels on four ranks, 1408 on two. */
static void test_shares(cumoe_context context)
{
  static const int32_t inters[] = {768, 1408}, widths[] = {192, 704};
  cumoe_format f;
  const char *name;
  oracle_device = on_device(context) ? DEVICE_ANY : 0;
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++)
    for (int which = 0; which < 2; which++) {
      rng r = {(uint64_t)(2 * i + which) + 3};
      if (f.act_order || (!on_device(context) && which != i % 2)) continue; /* an order is of all of k */
      f.joined = 0;
      case_begin("shares: %s, %d of %d", name, widths[which], inters[which]);
      const split_layer w =
          split_new(context, &r, f, i / 2 % 2 ? CUMOE_F16 : CUMOE_BF16, on_device(context) ? 160 : 64, inters[which]);
      run_shares(context, &w, widths[which]);
      case_end();
    }
  oracle_device = 0;
}

/* ---- equal scales ---------------------------------------------------------------------------------- */

/* The same scale for every block, a power of two: sums of a few products are exact in f32, so nothing may differ. */
static void check_equal_scales(cumoe_context context, const cumoe_format *coarse, const cumoe_format *fine)
{
  const slice all = {0, INTER, 0, HIDDEN};
  rng r = {37};
  const tensor x = tensor_new(CUMOE_BF16, TOKENS, HIDDEN);
  for (int64_t t = 0; t < TOKENS; t++)
    for (int64_t k = t * 7; k < HIDDEN; k += 97) tensor_set(&x, t, k, k % 2 ? 2 : -1);
  host_projection one = random_projection(coarse, &r), many = one;
  const int64_t rows = fine->block[0] ? (INTER + fine->block[0] - 1) / fine->block[0] : 1,
                groups = (HIDDEN + fine->block[1] - 1) / fine->block[1], given = one.scale.rows / EXPERTS;
  many.scale = tensor_new(fine->scale, EXPERTS * rows, groups);
  for (int64_t i = 0; i < EXPERTS * given; i++) tensor_set(&one.scale, i, 0, ldexp(1, -(int)(i % 5)));
  for (int64_t i = 0; i < EXPERTS * rows * groups; i++) {
    const int64_t row = i / groups, channel = given == 1 ? 0 : row % rows;
    tensor_set(&many.scale, row, i % groups, tensor_get(&one.scale, row / rows * given + channel, 0));
  }
  const cumoe_projection a = put(context, &one), b = put(context, &many);
  const tensor want = layer_of(context, &a, *coarse, all, &x), got = layer_of(context, &b, *fine, all, &x);
  check_same("blocks of equal scales", &got, &want);
}

static void test_equal_scales(cumoe_context context)
{
  enum { PAIRS = 3 };
  static const char *const names[PAIRS] = {"fp8, a matrix and blocks", "int8, a channel and 32",
                                           "int4, a channel and 32"};
  cumoe_format coarse[PAIRS] = {cumoe_format_fp8_tensor(CUMOE_ROWS_AS_THEY_ARE), cumoe_format_int8(CUMOE_F32),
                                cumoe_format_int4(0, CUMOE_F16)},
               fine[PAIRS] = {cumoe_format_fp8_block(CUMOE_F32), cumoe_format_int8(CUMOE_F32),
                              cumoe_format_int4(32, CUMOE_F16)};
  fine[1].block[1] = 32;
  for (int i = 0; i < PAIRS; i++) {
    coarse[i].rows = fine[i].rows = CUMOE_ROWS_AS_THEY_ARE;
    fine[i].row_group = 0;
    case_begin("equal scales: %s", names[i]);
    check_equal_scales(context, &coarse[i], &fine[i]);
    case_end();
  }
}

/* ---- ends ------------------------------------------------------------------------------------------ */

enum { MAX_PAGES = 32 };
static struct {
  void *at[MAX_PAGES];
  size_t bytes[MAX_PAGES];
  int count;
} pages;

/* A copy in memory of its own that ends where a page does; the next one may not be touched. */
static cumoe_view paged(const tensor *t)
{
  const size_t page = (size_t)sysconf(_SC_PAGESIZE),
               bytes = (size_t)(t->rows * t->cols) * cumoe_dtype_bytes((cumoe_dtype)t->dtype),
               all = (bytes + page - 1) / page * page + page;
  if (!t->data) return no_view();
  unsigned char *at = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (!CHECK(at != MAP_FAILED && pages.count < MAX_PAGES)) return no_view();
  CHECK(mprotect(at + all - page, page, PROT_NONE) == 0);
  memcpy(at + all - page - bytes, t->data, bytes);
  pages.at[pages.count] = at;
  pages.bytes[pages.count++] = all;
  return cumoe_matrix(at + all - page - bytes, (cumoe_dtype)t->dtype, t->rows, t->cols, t->cols);
}

static cumoe_projection paged_projection(const host_projection *p)
{
  return (cumoe_projection){.data = paged(&p->data),
                            .scale.data = paged(&p->scale),
                            .zero.data = paged(&p->zero),
                            .order.data = paged(&p->order),
                            .global = paged(&p->global),
                            .input_scale = paged(&p->input_scale)};
}

static void run_paged(cumoe_context context, const layer_spec *s)
{
  const layer_inputs in = layer_inputs_new(s);
  const layer_outputs want = run_layer(context, s, &in);
  session run;
  session_open(&run, context, s, &in);
  CHECK_OK(cumoe_weights_destroy(run.routed));
  cumoe_weights_desc d = weights_desc(&in.routed);
  d.gate_up = paged_projection(&in.routed.gate_up);
  d.down = paged_projection(&in.routed.down);
  CHECK_OK(cumoe_weights_bind(context, &d, &run.routed));
  run.args.x = paged(&in.x);
  CHECK_OK(session_forward(&run));
  const layer_outputs got = session_collect(&run);
  check_outputs_same(&want, &got);
  session_close(&run);
  for (; pages.count > 0; pages.count--) CHECK(munmap(pages.at[pages.count - 1], pages.bytes[pages.count - 1]) == 0);
}

static void test_ends(cumoe_context context)
{
  cumoe_format f;
  const char *name;
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++) {
    layer_spec s = layer_spec_new(CUMOE_BF16, 9, 160, 96);
    s.desc.num_experts = 3;
    s.desc.up_format = s.desc.down_format = f;
    s.desc.down_format.joined = 0;
    s.seed = (uint64_t)i + 1;
    case_begin("ends: %s", name);
    run_paged(context, &s);
    case_end();
  }
}

static const test_group groups[] = {GROUP("slices", test_slices, ANYWHERE), GROUP("shares", test_shares, ANYWHERE),
                                    GROUP("equal scales", test_equal_scales, ANYWHERE),
                                    GROUP("ends", test_ends, ON_CPU)};
TEST_MAIN(groups)
