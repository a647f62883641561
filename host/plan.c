/* See plan.h. */
#include "plan.h"
#include "carve.h"
#include "arguments.h"
#include "format.h"
#include "../kernels/scales.h"
#include "../kernels/dealt.h"

/* ---- stages ---- */

operation stage_operation(stage s)
{
#define STAGE(name, operation) [STAGE_##name] = OP_##operation,
  static const operation operations[STAGE_COUNT] = {STAGE_LIST(STAGE)};
#undef STAGE
  return operations[s];
}

const char *stage_name(stage s)
{
#define STAGE(name, operation) [STAGE_##name] = #name,
  static const char *const names[STAGE_COUNT] = {STAGE_LIST(STAGE)};
#undef STAGE
  return s < STAGE_COUNT ? names[s] : "no stage";
}

int32_t router_experts(const cumoe_moe_desc *d)
{
  return d->num_experts + d->routing.zero_experts + d->routing.identity_experts;
}

bool is_invariant(const cumoe_moe_desc *d)
{
  return d->flags & CUMOE_MOE_BATCH_INVARIANT;
}

/* ---- shapes ---- */

/* What all shapes are made from. */
typedef struct layer {
  const machine *m;
  const cumoe_moe_desc *d;
  const layer_call *c;
} layer;

static op_shape router_shape(const layer *l, int32_t experts, int32_t hidden, int32_t w, bool tmap)
{
  return (op_shape){.op = OP_router,
                    .in = l->d->dtype,
                    .out = DT_F32,
                    .format = dense_format(w),
                    .scale_run = SCALE_RUN_ALL,
                    .tmap = tmap,
                    .tokens = l->c->tokens,
                    .rows = l->c->tokens,
                    .experts = experts,
                    .n = experts,
                    .k = hidden,
                    .invariant = is_invariant(l->d)};
}

/* What kinds of gates differ by; pointers say only whether something is there. */
static gate_args gate_kind(const layer *l)
{
  static const float there;
  const layer_call *c = l->c;
  gate_args a = gate_rule(&l->d->routing, router_experts(l->d));
  a.select_bias = c->has_select_bias ? &there : NULL;
  a.expert_scale = c->has_expert_scale ? &there : NULL;
  a.given = c->has_chosen ? &there : NULL;
  return a;
}

static op_shape gate_shape(const layer *l)
{
  const gate_args a = gate_kind(l);
  return (op_shape){
      .op = OP_gate, .tokens = l->c->tokens, .experts = a.experts, .top_k = a.top_k, .rules = GATE_HAS_RULES(a)};
}

static op_shape map_shape(const layer *l, operation op)
{
  const int32_t k = l->d->routing.top_k;
  return (op_shape){
      .op = op, .tokens = l->c->tokens, .rows = l->c->tokens * k, .experts = l->d->local_experts, .top_k = k};
}

const cumoe_format *format_of(const cumoe_moe_desc *d, bool up, bool shared)
{
  if (shared) return up ? &d->shared_up_format : &d->shared_down_format;
  return up ? &d->up_format : &d->down_format;
}

/* Tokens that come, and their pairs that are here: what decides which kernels pay. The rest is room. Who has chosen
 * among a call's tokens, as a group does not, has those with an expert here. Of more tokens kernels are chosen as if
 * all pairs were here: by the share alone two ranks' layers of 512 tokens each take up to 5 % longer. */
enum { SHARE_TOKENS = 128 };

static int64_t expected_tokens(const layer *l)
{
  return l->c->rank_tokens > 0 ? min64(l->c->rank_tokens, l->c->tokens) : l->c->tokens;
}

static int64_t expected_pairs(const layer *l)
{
  const cumoe_moe_desc *d = l->d;
  const int64_t tokens = expected_tokens(l), pairs = tokens * d->routing.top_k;
  const int64_t here = ceil_div(pairs * d->local_experts, d->num_experts);
  if (tokens > SHARE_TOKENS) return pairs;
  if (l->c->rank_tokens > 0) return min64(here, pairs);
  return l->c->has_map ? min64(max64(here, tokens), pairs) : pairs;
}

/* The most rows for which there is room for what fixed point needs besides them: a few an expert, as fixed serves. */
static int64_t fixed_most(const cumoe_moe_desc *d)
{
  enum { ROWS_AN_EXPERT = 64 };
  return (int64_t)d->local_experts * ROWS_AN_EXPERT;
}

static op_shape gemm_shape(const layer *l, operation op, const bound_matrix *b, bool shared)
{
  const cumoe_moe_desc *d = l->d;
  const int32_t inter = shared ? d->shared_inter : d->inter, k = d->routing.top_k;
  const bool up = op == OP_up || op == OP_few_up;
  const cumoe_format *f = format_of(d, up, shared);
  return (op_shape){.op = op,
                    .in = row_element(f, d->dtype),
                    .out = d->dtype,
                    .format = class_of(f, d->dtype),
                    .rows_mode = rows_of(f, NULL).mode,
                    .scale_run = scale_run(f),
                    .scale_type = f->scale,
                    .scale_block = f->block[1],
                    .symmetric = is_symmetric(f),
                    .made_ahead = !shared && takes_fixed_rows(f, d->dtype) && l->c->tokens * k <= fixed_most(d),
                    .by_expert = by_expert(f),
                    .major = b->major,
                    .tmap = b->tmap,
                    .tokens = l->c->tokens,
                    .rows = shared ? l->c->tokens : l->c->tokens * k,
                    .expected = shared ? 0 : expected_pairs(l),
                    .experts = shared ? 1 : d->local_experts,
                    .n = up ? inter : d->hidden,
                    .k = up ? d->hidden : inter,
                    .top_k = k,
                    .invariant = is_invariant(d)};
}

static op_shape combine_shape(const layer *l)
{
  const cumoe_moe_desc *d = l->d;
  return (op_shape){.op = OP_combine,
                    .in = d->dtype,
                    .out = d->out_dtype,
                    .tokens = l->c->tokens,
                    .n = d->hidden,
                    .top_k = d->routing.top_k};
}

static op_shape quantize_shape(const layer *l, const cumoe_format *f, int64_t rows, int32_t cols)
{
  return (op_shape){.op = OP_quantize,
                    .in = l->d->dtype,
                    .out = row_element(f, l->d->dtype),
                    .tokens = rows,
                    .n = cols,
                    .k = rows_of(f, NULL).group,
                    .by_expert = by_expert(f)};
}

/* ---- steps ---- */

step_refusal plan_step(const machine *m, const op_shape *s, launch_step *result)
{
  *result = (launch_step){.row = choose(m, s), .early = true};
  if (result->row < 0) return STEP_NO_KERNEL;
  const variant *v = &variants[result->row];
  result->grid = grid_size(m, v, s);
  return v->cpu || result->grid <= INT32_MAX ? STEP_SERVED : STEP_GRID_TOO_LARGE;
}

static void add(const layer *l, layer_plan *p, stage at, const op_shape *s)
{
  const step_refusal why = plan_step(l->m, s, &p->steps[at]);
  if (why == STEP_SERVED || p->refused != STAGE_COUNT) return;
  p->refused = at;
  p->why = why;
}

static const variant *row_of(const layer_plan *p, stage at)
{
  return p->steps[at].row < 0 ? NULL : &variants[p->steps[at].row];
}

static bool is_forced(const layer *l, operation op)
{
  return l->m->forced[op] != 0;
}

static double limit(const layer *l, limit_name name)
{
  return limit_of(l->m, name, class_of(&l->d->up_format, l->d->dtype));
}

/* ---- few tokens ---- */

/* few starts some 20 us sooner than router, gate, map, up, down and combine do; its weights come a little slower than
 * stream's, and those of down, a third of all, by what is idle when SMs take 8 channels at a time. So it pays up to
 * some size. */
enum { FEW_CHANNELS = 8 };

/* Bytes of weights that a layer reads. */
static double bytes_of_weights(const op_shape *up)
{
  return 3. * format_bits(up->format) / 8 * expected_active(up) * (double)up->n * (double)up->k;
}

static bool few_pays(const layer *l, const op_shape *up, const op_shape *down)
{
  const cumoe_moe_desc *d = l->d;
  const int64_t tokens = expected_tokens(l);
  const int64_t runs = ceil_div(d->hidden, FEW_CHANNELS), places = ceil_div(runs, l->m->sms) * l->m->sms;
  const double idle = (double)(places - runs) / (double)places;
  if (d->inter < limit(l, LIMIT_few_inter)) return false;
  if (tokens > 1 && idle > limit(l, LIMIT_few_idle)) return false;
  const bool many = (double)tokens >= limit(l, LIMIT_few_many);
  if (many && (d->inter < limit(l, LIMIT_few_many_inter) || (double)expected_rows(up) > limit(l, LIMIT_few_many_rows)))
    return false;
  const bool n_major = up->major == MAJOR_N || down->major == MAJOR_N;
  const double loss = limit(l, n_major ? LIMIT_few_loss_n_major : LIMIT_few_loss) + idle / 3;
  return bytes_of_weights(up) * loss <= limit(l, LIMIT_few_bytes);
}

/* Weights are read once for each FEW_COLUMNS rows of an expert. */
static bool dealt_pays(const layer *l, const op_shape *up)
{
  if (up->tokens > 12 && l->d->inter > limit(l, LIMIT_few_dealt_inter)) return false;
  if ((double)up->tokens > limit(l, LIMIT_few_dealt) || l->d->inter < limit(l, LIMIT_few_inter)) return false;
  return (double)up->tokens < limit(l, LIMIT_few_many) || (double)expected_rows(up) <= limit(l, LIMIT_few_many_rows);
}

/* Two launches instead of seven, and weights at their full rate; but rows become what is multiplied with every unit. Of
 * mx4 each weight takes twice the instructions, for every token: where both are few. */
static bool drawn_pays(const layer *l, const op_shape *up)
{
  const double tokens = (double)up->tokens;
  if (tokens > limit(l, LIMIT_few_drawn)) return false;
  if (up->format == FORMAT_mx4 && bytes_of_weights(up) * tokens > limit(l, LIMIT_few_drawn_e2m1)) return false;
  return l->d->inter >= limit(l, LIMIT_few_inter) && (double)expected_rows(up) <= limit(l, LIMIT_few_drawn_rows);
}

/* What a row is chosen by besides sizes. A row for both is chosen by up's. */
static bool read_alike(const op_shape *a, const op_shape *b)
{
  return a->format == b->format && a->major == b->major && a->in == b->in && a->rows_mode == b->rows_mode &&
         a->by_expert == b->by_expert && a->scale_run == b->scale_run && a->scale_block == b->scale_block &&
         a->scale_type == b->scale_type && a->symmetric == b->symmetric;
}

static op_shape few_up_shape(const layer *l, const op_shape *down)
{
  op_shape s = gemm_shape(l, OP_few_up, &l->c->up, false);
  s.tmap = l->c->up.tmap && l->c->down.tmap;
  s.in_one = !l->c->filled && !is_forced(l, OP_few_down) && read_alike(&s, down) &&
             (is_forced(l, OP_few_up) || (format_is_scaled(s.format) ? drawn_pays(l, &s) : dealt_pays(l, &s)));
  return s;
}

static bool is_dealt(int32_t row)
{
  return row >= 0 && variants[row].form == FORM_dealt;
}

/* In one grid, whatever down's row would be. */
static bool does_both(int32_t row)
{
  return is_dealt(row) || (row >= 0 && variants[row].form == FORM_drawn);
}

/* Rows for both serve, no row of what they stand for is forced, and it pays, or one of theirs is forced. */
static bool wants_few(const layer *l)
{
  static const operation replaced[] = {OP_map_count, OP_map, OP_up, OP_down, OP_combine};
  if (l->c->tokens > FEW_TOKENS) return false; /* first: most layers are decided here */
  if (l->d->flags & CUMOE_MOE_UNREDUCED || l->d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT) return false;
  if (is_invariant(l->d)) return false;
  const op_shape down = gemm_shape(l, OP_few_down, &l->c->down, false), up = few_up_shape(l, &down);
  const int32_t row = choose(l->m, &up);
  if (row < 0 || (!does_both(row) && choose(l->m, &down) < 0)) return false;
  if (is_forced(l, OP_few_up) || is_forced(l, OP_few_down)) return true;
  for (size_t i = 0; i < sizeof replaced / sizeof *replaced; ++i)
    if (is_forced(l, replaced[i])) return false;
  return does_both(row) || few_pays(l, &up, &down);
}

/* What few_up does of gates: GATE_IN_FEW_UP. */
static bool few_can_gate(const layer *l)
{
  const gate_args gate = gate_kind(l);
  return l->c->logits_f32 && GATE_IN_FEW_UP(gate);
}

/* One grid multiplies both, so that they have to be of the same types, and lie alike. */
static bool few_alike(const layer *l, const op_shape *up, const op_shape *down)
{
  const variant *a = &variants[choose(l->m, up)], *b = &variants[choose(l->m, down)];
  return a->form == b->form && a->x == b->x && a->format == b->format && a->y == b->y && a->major == b->major;
}

/* A router of few tokens has few CTAs, which fill with ones as well what dealt's CTAs tell each other through: those
 * behind the last tile do nothing else. */
static void widen_router(const layer *l, layer_plan *p)
{
  launch_step *s = &p->steps[STAGE_router];
  if (s->row < 0 || s->grid >= l->m->sms) return;
  if (variants[s->row].form == FORM_dot || variants[s->row].form == FORM_tile) s->grid = l->m->sms;
}

static void add_few(const layer *l, layer_plan *p)
{
  const op_shape down = gemm_shape(l, OP_few_down, &l->c->down, false), up = few_up_shape(l, &down);
  p->few_in_one = does_both(choose(l->m, &up)) || (!is_forced(l, OP_few_down) && few_alike(l, &up, &down));
  p->few_fills = p->few_in_one && !l->c->has_router && !l->c->filled;
  p->few_gates = p->few_in_one && !l->c->has_ids && !l->c->filled && !is_forced(l, OP_gate) && few_can_gate(l);
  add(l, p, STAGE_few_up, &up);
  if (is_dealt(p->steps[STAGE_few_up].row)) widen_router(l, p);
  if (!p->few_in_one) add(l, p, STAGE_few_down, &down);
}

/* ---- routed experts ---- */

/* The copy is made once and read by every channel tile. */
bool copies_rows(const machine *m, const variant *v, const op_shape *up)
{
  const bool narrow = up->n < limit_of(m, LIMIT_narrow_inter, up->format);
  const double from = limit_of(m, narrow ? LIMIT_narrow_copy_rows : LIMIT_copy_rows, up->format);
  op_shape all = *up; /* of a rank's share the copy pays sooner */
  all.expected = 0;
  if (v->form != FORM_wgmma || up->by_expert) return false;
  return takes_rows_in_order(v) || (double)expected_rows(&all) >= from;
}

bool hands_over(const variant *up, const variant *down)
{
  return up->form == FORM_wgmma && down->form == FORM_wgmma && up->bm == down->bm;
}

/* The rows must be whole lines. Where L2 has no room for most of them it takes longer than it saves. */
static bool discards_rows(const layer *l)
{
  enum { LINE = 128 }; /* bytes */
  const cumoe_moe_desc *d = l->d;
  const int64_t element = (int64_t)cumoe_dtype_bytes((cumoe_dtype)d->dtype);
  if (d->hidden * element % LINE || d->inter * element % LINE) return false;
  const int64_t bytes = l->c->tokens * d->routing.top_k * element * ((int64_t)d->hidden + d->inter);
  return (double)bytes <= limit(l, LIMIT_discard);
}

/*
 * A grid that starts early finds the SMs divided as the one ahead wanted. thin reads its tokens through L1, of which a
 * router's tiles leave 28 KiB; and where it streams for about a millisecond, starting 2 to 5 us sooner is not worth
 * that.
 */
static void start_thin_late(const layer *l, layer_plan *p, stage at, const op_shape *s)
{
  const variant *v = row_of(p, at), *router = row_of(p, STAGE_router);
  if (!v || v->form != FORM_thin) return;
  const double bytes = expected_active(s) * (double)s->n * (double)s->k * format_bits(s->format) / 8;
  p->steps[at].early = !(router && router->smem > 0) && bytes <= limit(l, LIMIT_thin_early); /* of one half */
}

/* What a grouped GEMM multiplies instead of its activations, if anything. */
static void add_quantize(const layer *l, layer_plan *p, stage at, const op_shape *gemm, bool shared, int64_t rows)
{
  const cumoe_format *f = format_of(l->d, gemm->op == OP_up, shared);
  if (!changes_rows(f)) return;
  const op_shape s = quantize_shape(l, f, rows, gemm->k);
  add(l, p, at, &s);
}

/* What brings the rows of a routed product of form fixed into fixed point, if there are enough that its producers would
 * take longer over them than a launch. */
static void add_fixed(const layer *l, layer_plan *p, stage at, const op_shape *gemm, int64_t rows)
{
  const variant *v = row_of(p, gemm->op == OP_up ? STAGE_up : STAGE_down);
  if (!v || v->form != FORM_fixed || !gemm->made_ahead || p->steps[at].row >= 0) return;
  const bool twins = v->format == FORMAT_mx4; /* whatever the rows are: its producers have no time for it */
  if (!twins && (double)expected_rows(gemm) < limit_of(l->m, LIMIT_fixed_rows, gemm->format)) return;
  const op_shape s = {.op = OP_quantize,
                      .in = gemm->in,
                      .out = twins ? DT_E4M3 : DT_I8,
                      .rows_mode = ROWS_FIXED,
                      .tokens = rows,
                      .n = gemm->k,
                      .k = FIXED_GROUP};
  add(l, p, at, &s);
}

bool scales_suit_codes(const expert_matrix *up, bool two)
{
  return scales_of_blocks(&up->scale, two, CODES_K, CODES_CHANNELS);
}

/* Whether up makes the codes of h that down multiplies. A unit has 128 channels of its rows: a group of them, or less
 * than one scale is for. What of weights' scales and of activations the kernel leaves to a quantize: token_tile.cuh. */
static bool codes_h(const layer *l, const layer_plan *p)
{
  const cumoe_moe_desc *d = l->d;
  const variant *up = row_of(p, STAGE_up);
  const row_format rows = rows_of(&d->down_format, NULL);
  if (!up || up->form != FORM_wgmma || up->x != DT_E4M3 || !l->c->up.suits_codes) return false;
  if (p->steps[STAGE_quantize_h].row < 0 || is_forced(l, OP_quantize) || by_expert(&d->down_format)) return false;
  if (rows.element != DT_E4M3 || d->inter % CODES_GROUP) return false;
  if (rows.mode != ROWS_STATIC && (rows.mode != ROWS_GROUP || rows.origin % CODES_GROUP)) return false;
  if (d->flags & CUMOE_MOE_UNGATED || d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT) return false;
  return d->act == CUMOE_ACT_SILU || d->act == CUMOE_ACT_SWIGLU_OAI;
}

static void add_quantize_x(const layer *l, layer_plan *p, const op_shape *up, bool shared)
{
  if (shared)
    add_quantize(l, p, STAGE_shared_quantize_x, up, true, l->c->tokens);
  else if (up->by_expert)
    add_quantize(l, p, STAGE_arrange_x, up, false, up->rows);
  else
    add_quantize(l, p, STAGE_quantize_x, up, false, l->c->tokens);
}

static void add_experts(const layer *l, layer_plan *p, stage at_up, stage at_down, bool shared)
{
  const op_shape up = gemm_shape(l, OP_up, shared ? &l->c->shared_up : &l->c->up, shared);
  const op_shape down = gemm_shape(l, OP_down, shared ? &l->c->shared_down : &l->c->down, shared);
  add_quantize_x(l, p, &up, shared);
  add(l, p, at_up, &up);
  add_quantize(l, p, shared ? STAGE_shared_quantize_h : STAGE_quantize_h, &down, shared, down.rows);
  add(l, p, at_down, &down);
  start_thin_late(l, p, at_up, &up);
  start_thin_late(l, p, at_down, &down);
  if (shared) return;
  add_fixed(l, p, STAGE_arrange_x, &up, l->c->tokens);
  add_fixed(l, p, STAGE_quantize_h, &down, down.rows);
  const variant *up_row = row_of(p, at_up), *down_row = row_of(p, at_down);
  p->copies_rows = up_row && copies_rows(l->m, up_row, &up);
  p->codes_h = codes_h(l, p);
  if (p->codes_h) p->steps[STAGE_quantize_h].row = -1;
  p->by_expert = up_row && down_row && hands_over(up_row, down_row) && p->steps[STAGE_quantize_h].row < 0;
  p->discards_rows = discards_rows(l);
}

static void add_routed(const layer *l, layer_plan *p)
{
  const op_shape count = map_shape(l, OP_map_count), map = map_shape(l, OP_map), combine = combine_shape(l);
  if (l->m->cc != 0 && map_chunking(count.rows).chunks > 1) add(l, p, STAGE_map_count, &count);
  add(l, p, STAGE_map, &map);
  add_experts(l, p, STAGE_up, STAGE_down, false);
  add(l, p, STAGE_combine, &combine);
  p->combine_looks_ahead = (double)l->c->tokens <= limit(l, LIMIT_combine_early);
}

/* ---- the layer ---- */

static void add_shared(const layer *l, layer_plan *p)
{
  add_experts(l, p, STAGE_shared_up, STAGE_shared_down, true);
  if (!l->c->has_shared_gate) return;
  const op_shape gate = router_shape(l, 1, l->d->hidden, l->c->shared_gate_dtype, l->c->shared_gate_tmap);
  add(l, p, STAGE_shared_gate, &gate);
}

layer_plan plan_layer(const machine *m, const cumoe_moe_desc *desc, const layer_call *call)
{
  const layer l = {m, desc, call};
  const op_shape router =
                     router_shape(&l, router_experts(desc), call->router_hidden, call->router_dtype, call->router_tmap),
                 gate = gate_shape(&l);
  layer_plan p = {.refused = STAGE_COUNT};
  for (int i = 0; i < STAGE_COUNT; ++i) p.steps[i].row = -1;
  (void)plan_workspace_layout(desc, call->tokens, &p.at); /* its size was checked */
  if (call->has_router) add(&l, &p, STAGE_router, &router);
  p.few = wants_few(&l);
  if (p.few)
    add_few(&l, &p);
  else
    add_routed(&l, &p);
  if (!call->has_ids && !p.few_gates) add(&l, &p, STAGE_gate, &gate);
  if (call->has_shared) add_shared(&l, &p);
  return p;
}

/* ---- workspace ---- */

/* Codes of rows, and their scales [groups][SCALE_LD(rows)]; or their elements in another order. */
static void carve_codes(carver *c, const cumoe_format *f, int64_t rows, int32_t cols, size_t *codes, size_t *scale)
{
  if (!changes_rows(f)) return;
  const row_format r = rows_of(f, NULL);
  *codes = carve(c, rows, cols, f->act_order ? sizeof(uint16_t) : 1);
  if (!f->act_order) *scale = carve(c, ROW_GROUPS(r, cols), SCALE_LD(rows), sizeof(float));
}

/* Codes of x in row order. They can't lie where y will, as other rows do: a row of y is as long as those of two, and
 * down writes an expert's as soon as its h is there, while up still reads the next experts'. */
static void carve_copy(carver *c, const cumoe_moe_desc *d, int64_t pairs, workspace_layout *w)
{
  size_t scale; /* right behind the codes: COPIED_SCALES */
  if (!by_expert(&d->up_format)) carve_codes(c, &d->up_format, pairs, d->hidden, &w->x_copy, &scale);
}

/* dealt: how units are cut. One token's into as many parts as CTAs end together by; of several the last units of down
 * alone into small ones, at most LAST_ITEMS parts, and that where parts have more than LONG_ITEM chunks. */
enum { DEALT_CTAS = 132, LAST_ITEMS = 4 * DEALT_CTAS, LONG_ITEM = 16 };

/* Items that up's and down's weights are wanted in. */
static int64_t wanted_items(int64_t tokens)
{
  return tokens == 1 ? 2048 : 512;
}

/* Chunks of k that a part has at least: of down few, as its last ones are the layer's end. */
static int64_t least_chunks(int64_t tokens, bool down)
{
  return down && tokens == 1 ? 2 : down ? 4 : 8;
}

static bool cuts_last(int64_t tokens, bool down)
{
  return down && tokens > 1;
}

static int64_t part_channels(const cumoe_moe_desc *d, bool down)
{
  return ceil_div(down ? d->hidden : 2 * (int64_t)d->inter, FEW_PART_N) * FEW_PART_N;
}

static int64_t chunks_of(const cumoe_moe_desc *d, bool down)
{
  return ceil_div(down ? d->inter : d->hidden, FEW_PART_K);
}

/* Parts of a unit, of part_k each. */
static int64_t parts_of(const cumoe_moe_desc *d, bool down, int32_t part_k)
{
  return ceil_div(chunks_of(d, down) * FEW_PART_K, part_k);
}

static int64_t dealt_pairs(const cumoe_moe_desc *d, int64_t tokens)
{
  return min64(tokens * d->routing.top_k, FEW_PAIRS(FEW_TOKENS));
}

/* The most pairs of an active expert: ids may repeat one in a token. */
static int64_t dealt_columns(const cumoe_moe_desc *d, int64_t tokens)
{
  return min64(dealt_pairs(d, tokens), FEW_COLUMNS);
}

/* Parts of one size, of about so many chunks. */
static int64_t even_chunks(int64_t chunks, int64_t about)
{
  const int64_t most = max64(about, ceil_div(chunks, FEW_PARTS_MOST));
  return ceil_div(chunks, ceil_div(chunks, min64(most, chunks)));
}

/* Units of all experts that may have rows. */
static int64_t dealt_units(const cumoe_moe_desc *d, int64_t tokens, bool down)
{
  const int64_t k = d->routing.top_k, active = max64(min64(dealt_pairs(d, tokens), d->local_experts), k);
  return active * (part_channels(d, down) / FEW_PART_N);
}

/* Such that there are some `items`; the last units, about as many as come to one part of the others for each CTA, into
 * quarters of that. */
static void cut_units(const cumoe_moe_desc *d, int64_t tokens, bool down, cut_layout *cut)
{
  const int64_t chunks = chunks_of(d, down), units = dealt_units(d, tokens, down), least = least_chunks(tokens, down);
  const int64_t each = even_chunks(chunks, max64(ceil_div(units * chunks, wanted_items(tokens)), least));
  const int64_t small = even_chunks(chunks, max64(ceil_div(each, 4), least / 2));
  int64_t last = min64(ceil_div(DEALT_CTAS * each, chunks), LAST_ITEMS / ceil_div(chunks, small));
  if (!cuts_last(tokens, down) || each <= LONG_ITEM || small >= each) last = 0;
  *cut = (cut_layout){0, 0, {(int32_t)each * FEW_PART_K, (int32_t)small * FEW_PART_K}, (int32_t)min64(last, units)};
}

/* Bytes of sums that units cut so have; and the most that is: no more parts than items / (active experts * units of an
 * expert) + 1, of which an expert has up to `tokens` rows; nor than have the least k. More of anything never needs
 * less. */
static int64_t parts_bytes(const cumoe_moe_desc *d, int64_t tokens, bool down, const cut_layout *cut)
{
  const int64_t parts = parts_of(d, down, cut->part_k[0]);
  if (!down && tokens > 1 && parts == 1) return 0; /* whole sums become h at once */
  return 4 * parts * dealt_pairs(d, tokens) * part_channels(d, down);
}

static int64_t parts_most(const cumoe_moe_desc *d, int64_t tokens, bool down)
{
  const int64_t whole = dealt_pairs(d, tokens) * part_channels(d, down),
                parts = ceil_div(chunks_of(d, down), least_chunks(tokens, down));
  return 4 * min64(parts * whole, whole + wanted_items(tokens) * FEW_PART_N * tokens);
}

static int64_t parts_room(const cumoe_moe_desc *d, int64_t tokens, bool down)
{
  return max64(parts_most(d, tokens, down), parts_most(d, 1, down));
}

/* Likewise of the last units. */
static int64_t last_bytes(const cumoe_moe_desc *d, int64_t tokens, bool down, const cut_layout *cut)
{
  return 4 * cut->last * parts_of(d, down, cut->part_k[1]) * dealt_columns(d, tokens) * FEW_PART_N;
}

static int64_t last_room(const cumoe_moe_desc *d, int64_t tokens, bool down)
{
  const int64_t most = dealt_units(d, tokens, down) * ceil_div(chunks_of(d, down), least_chunks(tokens, down) / 2);
  return !cuts_last(tokens, down) ? 0 : 4 * min64(most, LAST_ITEMS) * dealt_columns(d, tokens) * FEW_PART_N;
}

/* dealt's parts of sums, in the place of y, which it does not have, and behind. */
static void carve_parts(carver *c, const cumoe_moe_desc *d, int64_t tokens, workspace_layout *w)
{
  if (d->dtype == CUMOE_F32 || format_is_scaled(class_of(&d->up_format, d->dtype))) return;
  carver used = {w->y, c->overflow}, room = used;
  const int64_t few = min64(tokens, FEW_TOKENS);
  w->few_items = carve(&used, 1, 1, 4);
  (void)carve(&room, 1, 1, 4);
  for (int i = 0; i < 2; ++i) {
    cut_layout *cut = &w->cut[i];
    (void)carve(&room, 1, parts_room(d, few, i == 1), 1);
    (void)carve(&room, 1, last_room(d, few, i == 1), 1);
    if (tokens > FEW_TOKENS) continue;
    cut_units(d, tokens, i == 1, cut);
    cut->parts = carve(&used, 1, parts_bytes(d, tokens, i == 1, cut), 1);
    cut->small = carve(&used, 1, last_bytes(d, tokens, i == 1, cut), 1);
  }
  w->dealt_fill = used.at - w->h;
  w->dealt_columns = (int32_t)dealt_columns(d, tokens);
  if (room.at > c->at) c->at = room.at;
  c->overflow = c->overflow || room.overflow;
}

/* Scales of rows in fixed point, which lie where y will, or where they were. */
static void carve_fixed(carver *c, const cumoe_format *f, int32_t dtype, int64_t rows, int32_t cols, size_t *scale)
{
  if (!takes_fixed_rows(f, dtype)) return;
  *scale = carve(c, ceil_div(cols, FIXED_GROUP), SCALE_LD(rows), sizeof(float));
}

route_layout carve_route(carver *c, const cumoe_moe_desc *d, int64_t pairs, int64_t rows)
{
  route_layout at;
  at.counts = carve(c, 1, d->local_experts, 4);
  at.offsets = carve(c, 1, d->local_experts + 1, 4);
  at.row_pair = carve(c, rows, 1, 4);
  at.slot_row = carve(c, pairs, 1, 4);
  return at;
}

bool plan_workspace_layout(const cumoe_moe_desc *d, int64_t tokens, workspace_layout *w)
{
  carver c = {0, false};
  *w = (workspace_layout){0};
  if (tokens == 0) return true;
  const int64_t k = d->routing.top_k, pairs = tokens * k;
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)d->dtype);
  w->logits = carve(&c, tokens, router_experts(d), 4);
  w->ids = carve(&c, tokens, k, 4);
  w->weights = carve(&c, tokens, k, 4);
  w->route = carve_route(&c, d, pairs, pairs);
  w->hist = carve(&c, map_room(pairs), d->local_experts, 4);
  w->progress = carve(&c, 1, PROGRESS_WORDS(pairs, d->local_experts), 4);
  w->h = carve(&c, pairs, d->inter, element);
  w->few_words = carve(&c, 1, FEW_BYTES(min64(pairs, FEW_PAIRS(FEW_TOKENS))), 1);
  w->few_fill = c.at - w->h;
  w->y = carve(&c, pairs, d->hidden, element);
  carve_parts(&c, d, tokens, w);
  carve_codes(&c, &d->up_format, by_expert(&d->up_format) ? pairs : tokens, d->hidden, &w->x_codes, &w->x_scale);
  carve_codes(&c, &d->down_format, pairs, d->inter, &w->h_codes, &w->h_scale);
  carve_copy(&c, d, pairs, w);
  carve_fixed(&c, &d->up_format, d->dtype, min64(tokens, fixed_most(d) / k), d->hidden, &w->x_scale);
  carve_fixed(&c, &d->down_format, d->dtype, min64(pairs, fixed_most(d)), d->inter, &w->h_scale);
  if (d->shared_inter) {
    carve_codes(&c, &d->shared_up_format, tokens, d->hidden, &w->shared_x_codes, &w->shared_x_scale);
    carve_codes(&c, &d->shared_down_format, tokens, d->shared_inter, &w->shared_h_codes, &w->shared_h_scale);
    w->shared_h = carve(&c, tokens, d->shared_inter, element);
    w->shared_y = carve(&c, tokens, d->hidden, element);
    w->shared_logit = carve(&c, tokens, 1, 4);
  }
  w->bytes = c.at;
  return !c.overflow;
}

bool plan_masked_layout(const cumoe_moe_desc *d, int64_t rows, masked_layout *m)
{
  carver c = {0, false};
  *m = (masked_layout){0};
  m->h = carve(&c, rows, d->inter, cumoe_dtype_bytes((cumoe_dtype)d->dtype));
  carve_codes(&c, &d->up_format, rows, d->hidden, &m->x_codes, &m->x_scale);
  carve_codes(&c, &d->down_format, rows, d->inter, &m->h_codes, &m->h_scale);
  m->bytes = c.at;
  return !c.overflow;
}
