/*
 * What cumoe promises about bad input. Bad arguments: the right status, a text that names the argument, no byte
 * of any output written. Bad device data: never a crash, a sticky record, nobody else's bits. And T = 0, threads,
 * several contexts, handles that are gone.
 */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "session.h"

#define BIT(dtype) (1u << (dtype))
enum {
  I32 = BIT(CUMOE_I32),
  I64 = BIT(CUMOE_I64),
  U8 = BIT(CUMOE_U8),
  F32 = BIT(CUMOE_F32),
  BF16 = BIT(CUMOE_BF16),
  FLOATS = BIT(CUMOE_F32) | BIT(CUMOE_F16) | BIT(CUMOE_BF16)
};

static cumoe_view_mut as_mut(cumoe_view v)
{
  return (cumoe_view_mut){(void *)(uintptr_t)v.data, v.rows, v.cols, v.ld, v.owner, v.device, v.dtype};
}

/* As an engine would hand over its own memory. */
static cumoe_view foreign(cumoe_view v)
{
  v.owner = 0;
  v.device = CUMOE_DEVICE_ANY;
  return v;
}

/* ---- what is called -------------------------------------------------------------------------------- */

enum {
  DEFINES_ROWS = 1,
  DEFINES_COLS = 2,
  AT_LEAST_ROWS = 4,
  AT_LEAST_COLS = 8,
  OPTIONAL = 16,
  OUTPUT = 32,
  NO_ABSENCE = 64,
  PACKED = 128,
  WORKSPACE = 256,
  CALL_OPERANDS = 20
};

typedef struct operand_rule {
  const char *name; /* as texts must have it */
  uint32_t dtypes;
  uint32_t align; /* bytes; 0: of the element */
  int flags;
} operand_rule;

/* A public call whose operands lie in an array, so that one matrix of mistakes fits all calls. */
typedef struct target {
  const char *name;
  const operand_rule *rules;
  int count;
  cumoe_view base[CALL_OPERANDS];
  cumoe_status (*call)(const struct target *t, const cumoe_view *v);
  session *s;
} target;

static const operand_rule router_rules[] = {{"x", FLOATS, 16, DEFINES_ROWS},
                                            {"weight", BF16 | F32, 16, DEFINES_ROWS | DEFINES_COLS},
                                            {"bias", BF16 | F32, 0, OPTIONAL},
                                            {"logits", F32, 0, OUTPUT}};
static cumoe_status call_router(const target *t, const cumoe_view *v)
{
  return cumoe_router(t->s->context, v[0], v[1], v[2], as_mut(v[3]), NULL);
}

static const operand_rule gate_rules[] = {{"logits", FLOATS, 0, DEFINES_ROWS | DEFINES_COLS},
                                          {"select_bias", F32, 0, OPTIONAL},
                                          {"ids", I32 | I64, 0, OUTPUT},
                                          {"weights", F32, 0, OUTPUT}};
static cumoe_status call_gate(const target *t, const cumoe_view *v)
{
  return cumoe_gate(t->s->context, &t->s->spec->desc.routing, v[0], v[1], as_mut(v[2]), as_mut(v[3]), NULL);
}

#define ROUTE_RULES(flags)                                                                                             \
  {"route.counts", I32, 0, (flags)&OUTPUT}, {"route.offsets", I32, 0, (flags)&OUTPUT},                                 \
      {"route.row_pair", I32, 0, (flags)&OUTPUT},                                                                      \
  {                                                                                                                    \
    "route.slot_row", I32, 0, PACKED | (flags)                                                                         \
  }

static cumoe_route route_of(const cumoe_view *v)
{
  return (cumoe_route){sizeof(cumoe_route), 0, as_mut(v[0]), as_mut(v[1]), as_mut(v[2]), as_mut(v[3])};
}

static const operand_rule map_rules[] = {{"ids", I32 | I64, 0, DEFINES_ROWS},
                                         {"expert_map", I32, 0, 0},
                                         ROUTE_RULES(OUTPUT),
                                         {"workspace", U8, 16, OUTPUT | AT_LEAST_COLS | WORKSPACE}};
static cumoe_status call_map(const target *t, const cumoe_view *v)
{
  const cumoe_route route = route_of(v + 2);
  return cumoe_map(t->s->plan, v[0], v[1], &route, as_mut(v[6]), NULL);
}

static const operand_rule up_rules[] = {
    {"x", BF16, 16, DEFINES_ROWS}, ROUTE_RULES(0), {"h", BF16, 16, OUTPUT | AT_LEAST_ROWS}};
static cumoe_status call_up(const target *t, const cumoe_view *v)
{
  const cumoe_route route = route_of(v + 1);
  return cumoe_up(t->s->plan, t->s->routed, v[0], &route, no_view(), as_mut(v[5]), NULL);
}

static const operand_rule down_rules[] = {
    {"h", BF16, 16, AT_LEAST_ROWS}, ROUTE_RULES(DEFINES_ROWS | NO_ABSENCE), {"y", BF16, 16, OUTPUT | AT_LEAST_ROWS}};
static cumoe_status call_down(const target *t, const cumoe_view *v)
{
  const cumoe_route route = route_of(v + 1);
  return cumoe_down(t->s->plan, t->s->routed, v[0], &route, as_mut(v[5]), NULL);
}

static const operand_rule combine_rules[] = {
    {"args.y", BF16, 16, DEFINES_ROWS},       {"args.pair_weights", F32, 0, 0},
    {"args.x", BF16, 16, OPTIONAL},           {"args.shared", BF16, 16, OPTIONAL},
    {"args.shared_logit", F32, 0, OPTIONAL},  {"args.residual", BF16, 16, OPTIONAL},
    {"args.device_tokens", I32, 0, OPTIONAL}, {"args.out", BF16, 16, OUTPUT},
    ROUTE_RULES(DEFINES_ROWS | NO_ABSENCE)};
static cumoe_status call_combine(const target *t, const cumoe_view *v)
{
  const cumoe_route route = route_of(v + 8);
  const cumoe_combine_args a = {.size = sizeof a,
                                .y = v[0],
                                .pair_weights = v[1],
                                .x = v[2],
                                .shared = v[3],
                                .shared_logit = v[4],
                                .residual = v[5],
                                .device_tokens = v[6],
                                .out = as_mut(v[7])};
  return cumoe_combine(t->s->plan, &route, &a, NULL);
}

/* The fields of cumoe_moe_args in this order; absent ones stay absent. */
static const operand_rule forward_rules[] = {{"args.x", BF16, 16, DEFINES_ROWS},
                                             {"args.device_tokens", I32, 0, OPTIONAL},
                                             {"args.router_weight", BF16 | F32, 16, 0},
                                             {"args.router_bias", BF16 | F32, 0, OPTIONAL},
                                             {"args.logits", FLOATS, 0, 0},
                                             {"args.ids", I32 | I64, 0, 0},
                                             {"args.weights", F32, 0, 0},
                                             {"args.select_bias", F32, 0, OPTIONAL},
                                             {"args.expert_map", I32, 0, 0},
                                             {"args.shared_gate", BF16 | F32, 16, OPTIONAL},
                                             {"args.residual", BF16, 16, OPTIONAL},
                                             {"args.out", BF16, 16, OUTPUT},
                                             {"args.ids_out", I32 | I64, 0, OPTIONAL | OUTPUT},
                                             {"args.weights_out", F32, 0, OPTIONAL | OUTPUT},
                                             {"args.counts_out", I32, 0, OPTIONAL | OUTPUT},
                                             {"args.load", I64, 0, OPTIONAL | OUTPUT},
                                             {"args.workspace", U8, 256, OUTPUT | AT_LEAST_COLS | WORKSPACE}};

static void views_of(const cumoe_moe_args *a, cumoe_view *v)
{
  const cumoe_view all[] = {a->x,
                            a->device_tokens,
                            a->router_weight,
                            a->router_bias,
                            a->logits,
                            a->ids,
                            a->weights,
                            a->select_bias,
                            a->expert_map,
                            a->shared_gate,
                            a->residual,
                            cumoe_const(a->out),
                            cumoe_const(a->ids_out),
                            cumoe_const(a->weights_out),
                            cumoe_const(a->counts_out),
                            cumoe_const(a->load),
                            cumoe_const(a->workspace)};
  memcpy(v, all, sizeof all);
}

static cumoe_moe_args args_of(const session *s, const cumoe_view *v)
{
  return (cumoe_moe_args){.size = sizeof(cumoe_moe_args),
                          .x = v[0],
                          .device_tokens = v[1],
                          .router_weight = v[2],
                          .router_bias = v[3],
                          .logits = v[4],
                          .ids = v[5],
                          .weights = v[6],
                          .select_bias = v[7],
                          .expert_map = v[8],
                          .shared = s->shared,
                          .shared_gate = v[9],
                          .residual = v[10],
                          .out = as_mut(v[11]),
                          .ids_out = as_mut(v[12]),
                          .weights_out = as_mut(v[13]),
                          .counts_out = as_mut(v[14]),
                          .load = as_mut(v[15]),
                          .workspace = as_mut(v[16])};
}

static cumoe_status call_forward(const target *t, const cumoe_view *v)
{
  const cumoe_moe_args a = args_of(t->s, v);
  return cumoe_moe_forward(t->s->plan, t->s->routed, &a, NULL);
}

/* ---- the matrix of mistakes ------------------------------------------------------------------------ */

static bool absent(const cumoe_view *v)
{
  return v->data == NULL && v->rows == 0 && v->cols == 0;
}

static void check_outputs_untouched(const target *t, const cumoe_view *owned)
{
  for (int i = 0; i < t->count; i++)
    if (t->rules[i].flags & OUTPUT && !absent(&owned[i]))
      check_untouched(t->s->context, t->rules[i].name, as_mut(owned[i]), 0);
}

/* Status, text, and nothing written. */
static void refused(const target *t, const char *how, cumoe_status got, cumoe_status want, const char *text)
{
  CHECK_MSG(got == want, "%s: %s is %s, want %s (%s)", how, text, cumoe_status_name(got), cumoe_status_name(want),
            cumoe_last_error());
  CHECK_MSG(strstr(cumoe_last_error(), text) != NULL, "%s: the text does not name %s: %s", how, text,
            cumoe_last_error());
  if (t)
    CHECK_MSG(strstr(cumoe_last_error(), t->name) == cumoe_last_error(), "the text does not begin with %s: %s", t->name,
              cumoe_last_error());
}

typedef struct mistake {
  const target *t;
  const cumoe_view *owned; /* the same operands with their owners, to look at the outputs */
  int operand;
} mistake;

static void expect_refusal(const mistake *m, cumoe_view bad, cumoe_status want, const char *how)
{
  cumoe_view v[CALL_OPERANDS];
  const target *t = m->t;
  memcpy(v, t->base, sizeof v);
  v[m->operand] = bad;
  case_begin("%s: %s %s", t->name, t->rules[m->operand].name, how);
  refused(t, how, t->call(t, v), want, t->rules[m->operand].name);
  check_outputs_untouched(t, m->owned);
  case_end();
}

#define MISTAKE(want, how, change)                                                                                     \
  do {                                                                                                                 \
    cumoe_view v = m->t->base[m->operand];                                                                             \
    change;                                                                                                            \
    expect_refusal(m, v, want, how);                                                                                   \
  } while (0)

static void wrong_extents(const mistake *m, int flags)
{
  MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "without data", v.data = NULL);
  MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with -1 rows", v.rows = -1);
  MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with INT64_MIN rows", v.rows = INT64_MIN);
  if (!(flags & WORKSPACE)) MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with -1 columns", v.cols = -1);
  if (!(flags & DEFINES_ROWS)) MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with a row less", v.rows--);
  if (!(flags & (DEFINES_ROWS | AT_LEAST_ROWS))) MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with a row more", v.rows++);
  if (!(flags & (DEFINES_ROWS | AT_LEAST_ROWS)))
    MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with INT64_MAX rows", v.rows = INT64_MAX);
  if (flags & WORKSPACE) MISTAKE(CUMOE_ERR_WORKSPACE, "one byte short", v.cols--; v.ld--);
  if (!(flags & (DEFINES_COLS | AT_LEAST_COLS))) {
    MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with a column less", v.cols--);
    MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with 8 columns more", v.cols += 8; v.ld += 8);
  }
  MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with ld below cols", v.ld = v.cols - 1);
  MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with ld -1", v.ld = -1);
  MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with ld 2^62", v.ld = (int64_t)1 << 62);
  MISTAKE(CUMOE_ERR_INVALID_ARGUMENT, "with ld 2^47", v.ld = (int64_t)1 << 47);
}

static void wrong_types(const mistake *m, uint32_t dtypes)
{
  static const int32_t all[] = {0, CUMOE_F32, CUMOE_F16, CUMOE_BF16, CUMOE_U8, CUMOE_I32, CUMOE_I64,
                                7, 31,        32,        33,         99,       -1,        INT32_MIN};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
    if (all[i] < 1 || all[i] > 6 || !(dtypes & BIT(all[i]))) {
      char how[40];
      snprintf(how, sizeof how, "with dtype %d", all[i]);
      MISTAKE(CUMOE_ERR_WRONG_DTYPE, how, v.dtype = all[i]);
    }
}

static void wrong_alignment(const mistake *m, const operand_rule *rule)
{
  const cumoe_view *base = &m->t->base[m->operand];
  const uint32_t element = (uint32_t)cumoe_dtype_bytes((cumoe_dtype)base->dtype),
                 align = rule->align > element ? rule->align : element;
  for (uint32_t by = 1; by < align; by *= 2) {
    char how[40];
    snprintf(how, sizeof how, "%u bytes off", by);
    MISTAKE(CUMOE_ERR_MISALIGNED, how, v.data = (const char *)v.data + by);
  }
  if (base->rows > 1 && align > element) MISTAKE(CUMOE_ERR_MISALIGNED, "with an odd ld", v.ld++);
  if (base->rows > 1 && rule->flags & PACKED) MISTAKE(CUMOE_ERR_LAYOUT, "with a gap", v.ld++);
}

static void wrong_places(const mistake *m, const operand_rule *rule, uint64_t stale)
{
  const int32_t other = on_device(m->t->s->context) ? CUMOE_DEVICE_CPU : 0;
  MISTAKE(CUMOE_ERR_WRONG_DEVICE, "on another device", v.device = other);
  MISTAKE(CUMOE_ERR_WRONG_DEVICE, "on device 5", v.device = 5);
  MISTAKE(CUMOE_ERR_STALE_HANDLE, "of a freed buffer", v.owner = stale);
  MISTAKE(CUMOE_ERR_STALE_HANDLE, "of a freed buffer, empty", v = (cumoe_view){.owner = stale}); /* as its view is */
  MISTAKE(CUMOE_ERR_STALE_HANDLE, "of no buffer", v.owner = 0xffffffffffffffffu);
  if (!(rule->flags & (OPTIONAL | DEFINES_ROWS | NO_ABSENCE)))
    MISTAKE(rule->flags & WORKSPACE ? CUMOE_ERR_WORKSPACE : CUMOE_ERR_INVALID_ARGUMENT, "left out", v = no_view());
}

/* What a call writes lies on something else that it reads or writes. */
static void overlaps(const target *t, const cumoe_view *owned)
{
  for (int i = 0; i < t->count; i++)
    for (int j = 0; j < t->count && t->rules[i].flags & OUTPUT; j++) {
      cumoe_view v[CALL_OPERANDS];
      const bool in_place = strcmp(t->rules[j].name, "args.residual") == 0;
      if (i == j || in_place || absent(&t->base[i]) || absent(&t->base[j])) continue;
      memcpy(v, t->base, sizeof v);
      v[i].data = v[j].data;
      if ((uintptr_t)v[i].data % 16 != 0) continue;
      case_begin("%s: %s over %s", t->name, t->rules[i].name, t->rules[j].name);
      refused(t, "an overlap", t->call(t, v), CUMOE_ERR_INVALID_ARGUMENT, t->rules[i].name);
      CHECK_MSG(strstr(cumoe_last_error(), " overlaps ") != NULL, "%s", cumoe_last_error());
      check_outputs_untouched(t, owned);
      case_end();
    }
}

static void all_mistakes(target *t, uint64_t stale)
{
  cumoe_view owned[CALL_OPERANDS];
  memcpy(owned, t->base, sizeof owned);
  for (int i = 0; i < t->count; i++) t->base[i] = foreign(t->base[i]);
  for (int i = 0; i < t->count; i++) {
    const mistake m = {t, owned, i};
    if (absent(&t->base[i])) continue;
    wrong_extents(&m, t->rules[i].flags);
    wrong_types(&m, t->rules[i].dtypes);
    wrong_alignment(&m, &t->rules[i]);
    wrong_places(&m, &t->rules[i], stale);
  }
  overlaps(t, owned);
}

/* ---- the layers ------------------------------------------------------------------------------------ */

typedef enum base_kind { BASE_ROUTER, BASE_IDS, BASE_UNREDUCED, BASE_COUNT } base_kind;

/* Few tokens and everything optional; with a part of the experts only, so that the map is required. */
static layer_spec base_spec(base_kind kind)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 6, 32, 16);
  s.pad = 1;
  s.desc.local_experts = 5;
  s.optional_outputs = true;
  s.input = kind == BASE_IDS ? INPUT_IDS : kind == BASE_ROUTER ? INPUT_ROUTER : INPUT_LOGITS;
  s.select_bias = kind != BASE_IDS;
  s.router_bias = true;
  s.device_count = true;
  s.device_tokens = 6;
  if (kind == BASE_UNREDUCED) {
    s.desc.flags = CUMOE_MOE_UNREDUCED;
    return s;
  }
  s.desc.shared_inter = 24;
  s.shared_gate = true;
  s.residual = RESIDUAL_SEPARATE;
  return s;
}

/* Objects outlive the cases here: device memory belongs to a case, so each group is one that never ends between
 * its calls; its own cases are counted by hand. */
typedef struct bench {
  cumoe_context context;
  layer_spec spec;
  layer_inputs inputs;
  session s;
  cumoe_buffer memory[64];
  int count;
} bench;

static cumoe_view_mut keep(bench *b, int32_t dtype, int64_t rows, int64_t cols)
{
  cumoe_buffer *buffer = &b->memory[b->count++];
  CHECK_OK(cumoe_buffer_alloc(b->context, (cumoe_dtype)dtype, rows, cols, NULL, buffer));
  CHECK_OK(cumoe_fill(b->context, cumoe_buffer_view_mut(*buffer), test_poison, NULL));
  return cumoe_buffer_view_mut(*buffer);
}

static cumoe_view kept_copy(bench *b, cumoe_view from)
{
  if (from.owner == 0) return no_view();
  cumoe_view_mut to = keep(b, from.dtype, from.rows, from.cols);
  CHECK_OK(cumoe_copy(b->context, to, from, NULL));
  return cumoe_const(to);
}

static cumoe_projection kept_projection(bench *b, const host_projection *p, int32_t experts)
{
  cumoe_projection out = {0};
  if (p->data.data == NULL) return out;
  out.data = kept_copy(b, device_put(b->context, &p->data, 0));
  out.data.rows /= experts;
  if (p->bias.data) out.bias = kept_copy(b, device_put(b->context, &p->bias, 0));
  return out;
}

static cumoe_weights_desc kept_weights(bench *b, const host_weights *w)
{
  cumoe_weights_desc d = weights_desc(w);
  d.gate_up = kept_projection(b, &w->gate_up, w->experts);
  d.gate = kept_projection(b, &w->gate, w->experts);
  d.up = kept_projection(b, &w->up, w->experts);
  d.down = kept_projection(b, &w->down, w->experts);
  return d;
}

/* A layer whose device memory lives until bench_close. Its outputs hold poison. */
static void bench_open(bench *b, cumoe_context context, const layer_spec *spec)
{
  cumoe_view v[CALL_OPERANDS] = {{0}};
  session made;
  *b = (bench){.context = context, .spec = *spec};
  case_begin("set up");
  b->inputs = layer_inputs_new(spec);
  session_open(&made, context, spec, &b->inputs);
  if (made.args.load.data) CHECK_OK(cumoe_fill(context, made.args.load, test_poison, NULL));
  views_of(&made.args, v);
  for (int i = 0; i < CALL_OPERANDS; i++) v[i] = kept_copy(b, v[i]);
  cumoe_weights_desc routed = kept_weights(b, &b->inputs.routed), shared = {0};
  b->s = (session){.context = context, .spec = &b->spec, .plan = made.plan};
  made.plan = NULL;
  CHECK_OK(cumoe_weights_bind(context, &routed, &b->s.routed));
  if (spec->desc.shared_inter) {
    shared = kept_weights(b, &b->inputs.shared);
    CHECK_OK(cumoe_weights_bind(context, &shared, &b->s.shared));
  }
  b->s.args = args_of(&b->s, v);
  session_close(&made);
  CHECK_OK(cumoe_synchronize(context, NULL));
  case_end();
}

static void bench_close(bench *b)
{
  case_begin("tear down");
  session_close(&b->s);
  while (b->count > 0) CHECK_OK(cumoe_buffer_free(&b->memory[--b->count]));
  case_end();
}

static uint64_t stale_owner(cumoe_context context)
{
  cumoe_buffer buffer = {0};
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 4, 4, NULL, &buffer));
  const uint64_t owner = buffer.id;
  CHECK_OK(cumoe_buffer_free(&buffer));
  return owner;
}

/* ---- bad operands ---------------------------------------------------------------------------------- */

static void set_route(bench *b, cumoe_view *v)
{
  const int64_t pairs = b->spec.tokens * b->spec.desc.routing.top_k;
  v[0] = cumoe_const(keep(b, CUMOE_I32, 1, b->spec.desc.local_experts));
  v[1] = cumoe_const(keep(b, CUMOE_I32, 1, b->spec.desc.local_experts + 1));
  v[2] = cumoe_const(keep(b, CUMOE_I32, 1, pairs));
  v[3] = cumoe_const(keep(b, CUMOE_I32, b->spec.tokens, b->spec.desc.routing.top_k));
}

#define TARGET(function, b)                                                                                            \
  {                                                                                                                    \
    .name = "cumoe_" #function, .rules = function##_rules,                                                             \
    .count = (int)(sizeof function##_rules / sizeof function##_rules[0]), .call = call_##function, .s = &(b)->s        \
  }

static void test_stage_operands(cumoe_context context)
{
  bench b;
  const layer_spec spec = base_spec(BASE_ROUTER);
  if (!group_begin("%s: bad operands of the stages", context_name(context))) return;
  bench_open(&b, context, &spec);
  const cumoe_moe_args *a = &b.s.args;
  const int64_t t = spec.tokens, k = spec.desc.routing.top_k, h = spec.desc.hidden, pairs = t * k;
  const uint64_t stale = stale_owner(context);
  size_t bytes = 0;
  CHECK_OK(cumoe_map_workspace(b.s.plan, 5000, &bytes));
  const cumoe_view logits = cumoe_const(keep(&b, CUMOE_F32, t, 8)), ids = cumoe_const(keep(&b, CUMOE_I32, t, k));
  const cumoe_view weights = cumoe_const(keep(&b, CUMOE_F32, t, k)),
                   h_rows = cumoe_const(keep(&b, CUMOE_BF16, pairs, spec.desc.inter));
  const cumoe_view y = cumoe_const(keep(&b, CUMOE_BF16, pairs, h)), shared = cumoe_const(keep(&b, CUMOE_BF16, t, h));
  const cumoe_view logit = cumoe_const(keep(&b, CUMOE_F32, t, 1)), many = cumoe_const(keep(&b, CUMOE_I32, 5000, k));
  target router = TARGET(router, &b), gate = TARGET(gate, &b), map = TARGET(map, &b), up = TARGET(up, &b),
         down = TARGET(down, &b), combine = TARGET(combine, &b);
  memcpy(router.base, (cumoe_view[]){a->x, a->router_weight, a->router_bias, logits}, 4 * sizeof(cumoe_view));
  all_mistakes(&router, stale);
  memcpy(gate.base, (cumoe_view[]){logits, a->select_bias, ids, weights}, 4 * sizeof(cumoe_view));
  all_mistakes(&gate, stale);
  set_route(&b, up.base + 1);
  memcpy(down.base + 1, up.base + 1, 4 * sizeof(cumoe_view));
  memcpy(combine.base + 8, up.base + 1, 4 * sizeof(cumoe_view));
  up.base[0] = a->x;
  up.base[5] = h_rows;
  all_mistakes(&up, stale);
  down.base[0] = h_rows;
  down.base[5] = y;
  all_mistakes(&down, stale);
  memcpy(combine.base,
         (cumoe_view[]){y, weights, a->x, shared, logit, a->residual, a->device_tokens, cumoe_const(a->out)},
         8 * sizeof(cumoe_view));
  all_mistakes(&combine, stale);
  /* so many tokens that the map needs a workspace */
  layer_spec *spec_now = &b.spec;
  spec_now->tokens = 5000;
  set_route(&b, map.base + 2);
  spec_now->tokens = t;
  map.base[0] = many;
  map.base[1] = a->expert_map;
  map.base[6] = cumoe_const(keep(&b, CUMOE_U8, 1, (int64_t)bytes));
  CHECK_MSG(bytes > 0, "a map of 10000 pairs needs no workspace");
  all_mistakes(&map, stale);
  bench_close(&b);
  group_end();
}

static void test_forward_operands(cumoe_context context)
{
  static const char *const names[] = {"router weight", "ids", "logits, unreduced"};
  for (base_kind kind = 0; kind < BASE_COUNT; kind++) {
    bench b;
    const layer_spec spec = base_spec(kind);
    if (!group_begin("%s: bad operands of forward, %s", context_name(context), names[kind])) continue;
    bench_open(&b, context, &spec);
    target forward = TARGET(forward, &b);
    forward.name = "cumoe_moe_forward";
    views_of(&b.s.args, forward.base);
    all_mistakes(&forward, stale_owner(context));
    bench_close(&b);
    group_end();
  }
}

/* ---- bad calls of forward -------------------------------------------------------------------------- */

typedef struct forward_call {
  cumoe_plan plan;
  cumoe_weights weights;
  const cumoe_moe_args *args;
  cumoe_moe_args a; /* what args points to unless a case says otherwise */
} forward_call;

/* Other objects that do not fit the layer. */
typedef struct misfits {
  cumoe_weights shape, dtype, ungated, context;
  cumoe_view logits, ids, weights;
  struct {
    cumoe_moe_args args;
    uint64_t more;
  } longer;
} misfits;

#define OVERLAP(a, b) ((a).data = (void *)(uintptr_t)(b).data)

/* status, text, change of c (the call); x: misfits. */
#define BAD_CALLS(X)                                                                                                   \
  X(INVALID_ARGUMENT, "args", c->args = NULL)                                                                          \
  X(INVALID_ARGUMENT, "args.size", c->a.size = 0)                                                                      \
  X(INVALID_ARGUMENT, "args.size", c->a.size = 7)                                                                      \
  X(INVALID_ARGUMENT, "args.size", c->a.size = 1u << 31)                                                               \
  X(INVALID_ARGUMENT, "args.size", c->a.size -= 4) /* ends inside a pointer */                                         \
  X(NOT_SUPPORTED, "args",                                                                                             \
    (x->longer.args = c->a, x->longer.args.size = sizeof x->longer, x->longer.more = 1, c->args = &x->longer.args))    \
  X(INVALID_ARGUMENT, "plan", c->plan = NULL)                                                                          \
  X(INVALID_ARGUMENT, "weights", c->weights = NULL)                                                                    \
  X(INVALID_ARGUMENT, "weights", c->weights = x->shape)                                                                \
  X(WRONG_DTYPE, "weights", c->weights = x->dtype)                                                                     \
  X(LAYOUT, "weights", c->weights = x->ungated)                                                                        \
  X(WRONG_DEVICE, "weights", c->weights = x->context)                                                                  \
  X(INVALID_ARGUMENT, "args.flags", c->a.flags = 1)                                                                    \
  X(INVALID_ARGUMENT, "args.reserved", c->a.reserved = 1)                                                              \
  X(INVALID_ARGUMENT, "args.x.rows", c->a.x.rows = INT32_MAX / 2 + 1)                                                  \
  X(INVALID_ARGUMENT, "args.x.rows", c->a.x.rows = INT64_MAX)                                                          \
  X(INVALID_ARGUMENT, "args.logits", c->a.logits = x->logits)                                                          \
  X(INVALID_ARGUMENT, "args.ids", (c->a.ids = x->ids, c->a.weights = x->weights))                                      \
  X(INVALID_ARGUMENT, "args.ids", c->a.ids = x->ids)                                                                   \
  X(INVALID_ARGUMENT, "args.weights", c->a.weights = x->weights)                                                       \
  X(INVALID_ARGUMENT, "args.router_weight", c->a.router_weight = no_view())                                            \
  X(INVALID_ARGUMENT, "args.router_bias", (c->a.router_weight = no_view(), c->a.logits = x->logits))                   \
  X(INVALID_ARGUMENT, "args.select_bias",                                                                              \
    (c->a.router_weight = no_view(), c->a.router_bias = no_view(), c->a.ids = x->ids, c->a.weights = x->weights))      \
  X(INVALID_ARGUMENT, "args.ids_out",                                                                                  \
    (c->a.router_weight = no_view(), c->a.router_bias = no_view(), c->a.select_bias = no_view(), c->a.ids = x->ids,    \
     c->a.weights = x->weights))                                                                                       \
  X(INVALID_ARGUMENT, "args.weights_out",                                                                              \
    (c->a.router_weight = no_view(), c->a.router_bias = no_view(), c->a.select_bias = no_view(),                       \
     c->a.ids_out = no_view_mut(), c->a.ids = x->ids, c->a.weights = x->weights))                                      \
  X(INVALID_ARGUMENT, "args.expert_map", c->a.expert_map = no_view())                                                  \
  X(INVALID_ARGUMENT, "args.shared", c->a.shared = NULL)                                                               \
  X(INVALID_ARGUMENT, "args.shared", c->a.shared = c->weights)                                                         \
  X(WRONG_DEVICE, "args.shared", c->a.shared = x->context)                                                             \
  X(WORKSPACE, "args.workspace", c->a.workspace = no_view_mut())                                                       \
  X(WORKSPACE, "args.workspace", (c->a.workspace.cols = 0, c->a.workspace.ld = 0))                                     \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.out, c->a.x))                                                            \
  X(INVALID_ARGUMENT, "overlap", c->a.out.data = (char *)(uintptr_t)c->a.x.data + 16)                                  \
  X(INVALID_ARGUMENT, "overlap", c->a.out.data = (char *)(uintptr_t)c->a.residual.data + 16)                           \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.out, c->a.router_weight))                                                \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.out, c->a.workspace))                                                    \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.out, c->a.expert_map))                                                   \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.out, c->a.shared_gate))                                                  \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.ids_out, c->a.x))                                                        \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.weights_out, c->a.residual))                                             \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.counts_out, c->a.expert_map))                                            \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.load, c->a.router_weight))                                               \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.out, c->a.ids_out))                                                      \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.ids_out, c->a.weights_out))                                              \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.workspace, c->a.router_weight))                                          \
  X(INVALID_ARGUMENT, "overlap", OVERLAP(c->a.counts_out, c->a.workspace))

typedef struct expectation {
  cumoe_status status;
  const char *text, *how;
} expectation;

static int spoil_call(int which, forward_call *c, misfits *x, expectation *e)
{
  int n = 0;
#define BAD_CALL(want, named, change)                                                                                  \
  if (which == n++) *e = (expectation){CUMOE_ERR_##want, named, #change}, (void)(change);
  BAD_CALLS(BAD_CALL)
#undef BAD_CALL
  return n;
}

/* The rows of out reach into what lies behind it: the layer's own views must be far enough apart for OVERLAP. */
static cumoe_weights bind_other(bench *b, cumoe_context context, int32_t dtype, int32_t inter, bool ungated)
{
  cumoe_weights w = NULL;
  const int64_t h = b->spec.desc.hidden, halves = ungated ? 1 : 2;
  const int32_t e = b->spec.desc.local_experts;
  cumoe_weights_desc d = {.size = sizeof d,
                          .experts = e,
                          .hidden = (int32_t)h,
                          .inter = inter,
                          .gate_order = ungated ? CUMOE_UNGATED : CUMOE_GATE_UP_CONCAT,
                          .up_major = CUMOE_OUT_IN,
                          .down_major = CUMOE_OUT_IN};
  cumoe_projection *up = ungated ? &d.up : &d.gate_up;
  up->data = foreign(cumoe_const(keep(b, dtype, e * halves * inter, h)));
  up->data.rows = halves * inter;
  d.down.data = foreign(cumoe_const(keep(b, dtype, e * h, inter)));
  d.down.data.rows = h;
  CHECK_OK(cumoe_weights_bind(context, &d, &w));
  return w;
}

static void test_bad_calls(cumoe_context context)
{
  bench b;
  misfits x = {0};
  const layer_spec spec = base_spec(BASE_ROUTER);
  cumoe_context second = NULL;
  if (!group_begin("%s: bad calls of forward", context_name(context))) return;
  bench_open(&b, context, &spec);
  CHECK_OK(cumoe_context_create(on_device(context) ? 0 : CUMOE_DEVICE_CPU, NULL, &second));
  x.shape = bind_other(&b, context, CUMOE_BF16, 24, false);
  x.dtype = bind_other(&b, context, CUMOE_F16, 16, false);
  x.ungated = bind_other(&b, context, CUMOE_BF16, 16, true);
  x.context = bind_other(&b, second, CUMOE_BF16, 16, false);
  x.logits = foreign(cumoe_const(keep(&b, CUMOE_F32, 6, 8)));
  x.ids = foreign(cumoe_const(keep(&b, CUMOE_I32, 6, 2)));
  x.weights = foreign(cumoe_const(keep(&b, CUMOE_F32, 6, 2)));
  target t = TARGET(forward, &b);
  t.name = "cumoe_moe_forward";
  views_of(&b.s.args, t.base);
  cumoe_view plain[CALL_OPERANDS];
  for (int i = 0; i < CALL_OPERANDS; i++) plain[i] = foreign(t.base[i]);
  expectation e = {0};
  const int count = spoil_call(-1, NULL, NULL, NULL);
  for (int i = 0; i < count; i++) {
    forward_call c = {b.s.plan, b.s.routed, &c.a, args_of(&b.s, plain)};
    spoil_call(i, &c, &x, &e);
    case_begin("%s", e.how);
    refused(&t, e.how, cumoe_moe_forward(c.plan, c.weights, c.args, NULL), e.status, e.text);
    check_outputs_untouched(&t, t.base);
    case_end();
  }
  CHECK_OK(cumoe_weights_destroy(x.shape));
  CHECK_OK(cumoe_weights_destroy(x.dtype));
  CHECK_OK(cumoe_weights_destroy(x.ungated));
  CHECK_OK(cumoe_weights_destroy(x.context));
  CHECK_OK(cumoe_context_destroy(second));
  bench_close(&b);
  group_end();
}

/* ---- bad descriptions of a layer ------------------------------------------------------------------- */

#define BAD_LAYERS(X)                                                                                                  \
  X(INVALID_ARGUMENT, "desc.size", d->size = 0)                                                                        \
  X(INVALID_ARGUMENT, "desc.num_experts", d->num_experts = 0)                                                          \
  X(INVALID_ARGUMENT, "desc.num_experts", d->num_experts = -1)                                                         \
  X(INVALID_ARGUMENT, "desc.num_experts", d->num_experts = 1025)                                                       \
  X(INVALID_ARGUMENT, "desc.num_experts", d->num_experts = INT32_MIN)                                                  \
  X(INVALID_ARGUMENT, "desc.local_experts", d->local_experts = 17)                                                     \
  X(INVALID_ARGUMENT, "desc.local_experts", d->local_experts = -1)                                                     \
  X(INVALID_ARGUMENT, "desc.hidden", d->hidden = 0)                                                                    \
  X(INVALID_ARGUMENT, "desc.hidden", d->hidden = 4)                                                                    \
  X(INVALID_ARGUMENT, "desc.hidden", d->hidden = 68)                                                                   \
  X(INVALID_ARGUMENT, "desc.hidden", d->hidden = -8)                                                                   \
  X(INVALID_ARGUMENT, "desc.hidden", d->hidden = (1 << 24) + 8)                                                        \
  X(INVALID_ARGUMENT, "desc.inter", d->inter = 0)                                                                      \
  X(INVALID_ARGUMENT, "desc.inter", d->inter = 12)                                                                     \
  X(INVALID_ARGUMENT, "desc.inter", d->inter = INT32_MIN)                                                              \
  X(INVALID_ARGUMENT, "desc.shared_inter", d->shared_inter = 9)                                                        \
  X(INVALID_ARGUMENT, "desc.shared_inter", d->shared_inter = -8)                                                       \
  X(NOT_SUPPORTED, "desc.dtype", d->dtype = 0)                                                                         \
  X(NOT_SUPPORTED, "desc.dtype", d->dtype = CUMOE_U8)                                                                  \
  X(NOT_SUPPORTED, "desc.dtype", d->dtype = 99)                                                                        \
  X(NOT_SUPPORTED, "desc.out_dtype", d->out_dtype = CUMOE_F16)                                                         \
  X(NOT_SUPPORTED, "desc.out_dtype", d->out_dtype = CUMOE_I32)                                                         \
  X(INVALID_ARGUMENT, "desc.act", d->act = -1)                                                                         \
  X(INVALID_ARGUMENT, "desc.act", d->act = 7)                                                                          \
  X(INVALID_ARGUMENT, "desc.flags", d->flags = 4)                                                                      \
  X(INVALID_ARGUMENT, "desc.act", (d->act = CUMOE_ACT_SWIGLU_OAI, d->flags = CUMOE_MOE_UNGATED))                       \
  X(INVALID_ARGUMENT, "act_limit", d->act_limit = -1)                                                                  \
  X(INVALID_ARGUMENT, "act_limit", d->act_limit = NAN)                                                                 \
  X(INVALID_ARGUMENT, "act_alpha", d->act_alpha = NAN)                                                                 \
  X(NOT_SUPPORTED, "desc.act_limit", (d->act_limit = 1, d->flags = CUMOE_MOE_UNGATED))                                 \
  X(NOT_SUPPORTED, "desc.shared_inter", (d->shared_inter = 8, d->flags = CUMOE_MOE_UNREDUCED))                         \
  X(NOT_SUPPORTED, "routing.reserved[9]", r->reserved[9] = 1)                                                          \
  X(INVALID_ARGUMENT, "routing.score", r->score = -1)                                                                  \
  X(INVALID_ARGUMENT, "routing.score", r->score = 4)                                                                   \
  X(INVALID_ARGUMENT, "routing.top_k", r->top_k = 0)                                                                   \
  X(INVALID_ARGUMENT, "routing.top_k", r->top_k = -1)                                                                  \
  X(INVALID_ARGUMENT, "routing.top_k", r->top_k = 17)                                                                  \
  X(INVALID_ARGUMENT, "routing.top_k", (d->num_experts = 64, r->top_k = 33))                                           \
  X(INVALID_ARGUMENT, "routing.n_group", (r->n_group = 3, r->topk_group = 1))                                          \
  X(INVALID_ARGUMENT, "routing.n_group", (r->n_group = -1, r->topk_group = 1))                                         \
  X(INVALID_ARGUMENT, "routing.n_group", (d->num_experts = 256, r->n_group = 128, r->topk_group = 1))                  \
  X(INVALID_ARGUMENT, "routing.topk_group", (r->n_group = 4, r->topk_group = 0))                                       \
  X(INVALID_ARGUMENT, "routing.topk_group", (r->n_group = 4, r->topk_group = 5))                                       \
  X(INVALID_ARGUMENT, "routing.topk_group", r->topk_group = 1)                                                         \
  X(INVALID_ARGUMENT, "routing.group_score", (r->n_group = 4, r->topk_group = 2, r->group_score = 2))                  \
  X(INVALID_ARGUMENT, "routing.top_k", (r->n_group = 8, r->topk_group = 1, r->top_k = 3))                              \
  X(INVALID_ARGUMENT, "routing.flags", r->flags = 8)                                                                   \
  X(INVALID_ARGUMENT, "SCORE_AFTER_TOPK", (r->flags = CUMOE_ROUTE_SCORE_AFTER_TOPK, r->score = CUMOE_SCORE_SIGMOID))   \
  X(INVALID_ARGUMENT, "routed_scale", r->routed_scale = -1)                                                            \
  X(INVALID_ARGUMENT, "routed_scale", r->routed_scale = NAN)                                                           \
  X(INVALID_ARGUMENT, "softcap", r->softcap = -1)                                                                      \
  X(INVALID_ARGUMENT, "renorm_eps", r->renorm_eps = NAN)                                                               \
  X(INVALID_ARGUMENT, "renorm_min", r->renorm_min = -0.5f)                                                             \
  X(INVALID_ARGUMENT, "zero_experts", r->zero_experts = -1)                                                            \
  X(INVALID_ARGUMENT, "zero_experts", r->zero_experts = 1009)                                                          \
  X(INVALID_ARGUMENT, "zero_experts", r->zero_experts = INT32_MAX)                                                     \
  X(INVALID_ARGUMENT, "identity_experts", r->identity_experts = -1)                                                    \
  X(INVALID_ARGUMENT, "identity_experts", r->identity_experts = INT32_MAX)                                             \
  X(NOT_SUPPORTED, "identity_experts", (r->identity_experts = 1, r->flags = CUMOE_ROUTE_WEIGHT_ON_INPUT))

static int spoil_layer(int which, cumoe_moe_desc *d, expectation *e)
{
  cumoe_routing *r = d ? &d->routing : NULL;
  int n = 0;
#define BAD_LAYER(want, named, change)                                                                                 \
  if (which == n++) *e = (expectation){CUMOE_ERR_##want, named, #change}, (void)(change);
  BAD_LAYERS(BAD_LAYER)
#undef BAD_LAYER
  return n;
}

static void check_bad_layer(cumoe_context context, const cumoe_moe_desc *d, const expectation *e)
{
  cumoe_plan plan = (cumoe_plan)(uintptr_t)16;
  char why[300];
  refused(NULL, e->how, cumoe_plan_create(context, d, &plan), e->status, e->text);
  CHECK_MSG(plan == NULL, "%s: the plan is not null", e->how);
  refused(NULL, e->how, cumoe_moe_supports(CUMOE_DEVICE_CPU, d, why, sizeof why), e->status, e->text);
  CHECK_MSG(strstr(why, e->text) != NULL, "%s: why does not name %s: %s", e->how, e->text, why);
  memset(why, 'x', sizeof why);
  CHECK_MSG(cumoe_moe_supports(CUMOE_DEVICE_CPU, d, why, 5) == e->status && why[4] == 0 && why[5] == 'x',
            "%s: why is not cut at 5 bytes", e->how);
  CHECK_MSG(cumoe_moe_supports(CUMOE_DEVICE_CPU, d, NULL, 0) == e->status, "%s: without why", e->how);
}

static void test_bad_layers(cumoe_context context)
{
  expectation e = {0};
  if (!group_begin("%s: bad descriptions", context_name(context))) return;
  const int count = spoil_layer(-1, NULL, NULL);
  for (int i = -1; i < count; i++) {
    layer_spec s = layer_spec_new(CUMOE_BF16, 1, 64, 64);
    s.desc.num_experts = 16;
    spoil_layer(i, &s.desc, &e);
    case_begin("%s", i < 0 ? "good" : e.how);
    if (i >= 0)
      check_bad_layer(context, &s.desc, &e);
    else
      CHECK_OK(cumoe_moe_supports(CUMOE_DEVICE_CPU, &s.desc, NULL, 0));
    case_end();
  }
  case_begin("null");
  const layer_spec s = layer_spec_new(CUMOE_BF16, 1, 64, 64);
  cumoe_plan plan = NULL;
  size_t bytes = 77;
  refused(NULL, "no desc", cumoe_plan_create(context, NULL, &plan), CUMOE_ERR_INVALID_ARGUMENT, "desc");
  refused(NULL, "no plan", cumoe_plan_create(context, &s.desc, NULL), CUMOE_ERR_INVALID_ARGUMENT, "plan");
  refused(NULL, "no context", cumoe_plan_create(NULL, &s.desc, &plan), CUMOE_ERR_INVALID_ARGUMENT, "context");
  refused(NULL, "no desc", cumoe_moe_supports(CUMOE_DEVICE_CPU, NULL, NULL, 0), CUMOE_ERR_INVALID_ARGUMENT, "desc");
  refused(NULL, "device -9", cumoe_moe_supports(-9, &s.desc, NULL, 0), CUMOE_ERR_INVALID_ARGUMENT, "device");
  CHECK_OK(cumoe_plan_create(context, &s.desc, &plan));
  refused(NULL, "-1 tokens", cumoe_plan_workspace(plan, -1, &bytes), CUMOE_ERR_INVALID_ARGUMENT, "tokens");
  refused(NULL, "too many tokens", cumoe_plan_workspace(plan, INT32_MAX / 2 + 1, &bytes), CUMOE_ERR_INVALID_ARGUMENT,
          "tokens");
  refused(NULL, "no bytes", cumoe_plan_workspace(plan, 1, NULL), CUMOE_ERR_INVALID_ARGUMENT, "bytes");
  refused(NULL, "no plan", cumoe_plan_workspace(NULL, 1, &bytes), CUMOE_ERR_INVALID_ARGUMENT, "plan");
  refused(NULL, "-1 tokens", cumoe_map_workspace(plan, -1, &bytes), CUMOE_ERR_INVALID_ARGUMENT, "tokens");
  refused(NULL, "no bytes", cumoe_map_workspace(plan, 1, NULL), CUMOE_ERR_INVALID_ARGUMENT, "bytes");
  CHECK_MSG(bytes == 77, "a failing query wrote its answer");
  CHECK_OK(cumoe_plan_workspace(plan, 0, &bytes));
  CHECK_MSG(bytes == 0, "no tokens need %zu bytes", bytes);
  CHECK_OK(cumoe_plan_workspace(plan, INT32_MAX / 2, &bytes));
  CHECK_OK(cumoe_plan_destroy(plan));
  CHECK_OK(cumoe_plan_destroy(NULL));
  case_end();
  group_end();
}

/* ---- bad weights ----------------------------------------------------------------------------------- */

/* A description of 4 experts, H 32, I 24, concatenated; `list` holds 4 good pointers. */
#define BAD_WEIGHTS(X)                                                                                                 \
  X(INVALID_ARGUMENT, "desc.size", d->size = 0)                                                                        \
  X(LAYOUT, "desc.gate_order", d->gate_order = CUMOE_GATE_ORDER_UNSET)                                                 \
  X(LAYOUT, "desc.gate_order", d->gate_order = 7)                                                                      \
  X(LAYOUT, "desc.gate_order", d->gate_order = -1)                                                                     \
  X(LAYOUT, "desc.up_major", d->up_major = CUMOE_MAJOR_UNSET)                                                          \
  X(LAYOUT, "desc.up_major", d->up_major = 3)                                                                          \
  X(LAYOUT, "desc.down_major", d->down_major = CUMOE_MAJOR_UNSET)                                                      \
  X(INVALID_ARGUMENT, "desc.gate_up", d->up_major = CUMOE_IN_OUT)                                                      \
  X(INVALID_ARGUMENT, "desc.down", d->down_major = CUMOE_IN_OUT)                                                       \
  X(INVALID_ARGUMENT, "desc.experts", d->experts = 0)                                                                  \
  X(INVALID_ARGUMENT, "desc.experts", d->experts = 1025)                                                               \
  X(INVALID_ARGUMENT, "desc.hidden", d->hidden = 0)                                                                    \
  X(INVALID_ARGUMENT, "desc.hidden", d->hidden = 31)                                                                   \
  X(INVALID_ARGUMENT, "desc.inter", d->inter = -16)                                                                    \
  X(INVALID_ARGUMENT, "desc.gate_up", d->inter = 16)                                                                   \
  X(INVALID_ARGUMENT, "desc.gate_up", d->hidden = 40)                                                                  \
  X(INVALID_ARGUMENT, "desc.gate_up", d->gate_up.data.data = NULL)                                                     \
  X(INVALID_ARGUMENT, "desc.gate_up", d->gate_up.data = no_view())                                                     \
  X(INVALID_ARGUMENT, "desc.gate_up", d->gate_up.data.ld = 31)                                                         \
  X(MISALIGNED, "desc.gate_up", d->gate_up.data.ld = 33)                                                               \
  X(MISALIGNED, "desc.gate_up", d->gate_up.data.data = (const char *)d->gate_up.data.data + 8)                         \
  X(WRONG_DTYPE, "desc.gate_up", d->gate_up.data.dtype = CUMOE_F16)                                                    \
  X(WRONG_DEVICE, "desc.gate_up", d->gate_up.data.device = 5)                                                          \
  X(STALE_HANDLE, "desc.gate_up", d->gate_up.data.owner = stale)                                                       \
  X(WRONG_DTYPE, "desc.down", d->down.data.dtype = CUMOE_I32)                                                          \
  X(WRONG_DTYPE, "desc.down", d->down.data.dtype = 0)                                                                  \
  X(INVALID_ARGUMENT, "desc.down", d->down.data.rows = 33)                                                             \
  X(INVALID_ARGUMENT, "desc.down", d->down.data.cols = 8)                                                              \
  X(MISALIGNED, "desc.down", d->down.data.data = (const char *)d->down.data.data + 2)                                  \
  X(LAYOUT, "desc.gate_up.expert_stride", d->gate_up.expert_stride = 48 * 32 - 1)                                      \
  X(LAYOUT, "desc.gate_up.expert_stride", d->gate_up.expert_stride = -1024)                                            \
  X(MISALIGNED, "desc.gate_up.expert_stride", d->gate_up.expert_stride = 48 * 32 + 1)                                  \
  X(INVALID_ARGUMENT, "desc.gate_up", d->gate_up.expert_stride = INT64_MAX / 8 * 8)                                    \
  X(INVALID_ARGUMENT, "desc.down", d->down.expert_stride = (int64_t)1 << 60)                                           \
  X(LAYOUT, "desc.gate ", d->gate = d->gate_up)                                                                        \
  X(LAYOUT, "desc.up ", d->up = d->gate_up)                                                                            \
  X(LAYOUT, "desc.up ", d->up.per_expert = list)                                                                       \
  X(LAYOUT, "desc.gate_up", d->gate_order = CUMOE_UNGATED)                                                             \
  X(LAYOUT, "desc.gate_up", d->gate_order = CUMOE_GATE_UP_SEPARATE)                                                    \
  X(INVALID_ARGUMENT, "desc.gate_up", d->gate_up.per_expert = list)                                                    \
  X(MISALIGNED, "desc.gate_up.per_expert[2]",                                                                          \
    (d->gate_up.data.data = NULL, d->gate_up.per_expert = list, list[2] = NULL))                                       \
  X(MISALIGNED, "desc.gate_up.per_expert[3]",                                                                          \
    (d->gate_up.data.data = NULL, d->gate_up.per_expert = list, list[3] = (const char *)list[3] + 8))                  \
  X(INVALID_ARGUMENT, "bias", (d->gate_up.bias = bias, d->gate_up.bias.cols = 16))                                     \
  X(INVALID_ARGUMENT, "bias", (d->gate_up.bias = bias, d->gate_up.bias.rows = 3))                                      \
  X(WRONG_DTYPE, "bias", (d->gate_up.bias = bias, d->gate_up.bias.dtype = CUMOE_F16))                                  \
  X(MISALIGNED, "bias",                                                                                                \
    (d->down.bias = bias, d->down.bias.cols = 32, d->down.bias.data = (const char *)bias.data + 1))                    \
  X(INVALID_ARGUMENT, "bias", (d->down.bias = bias, d->down.bias.cols = 32, d->down.bias.data = NULL))                 \
  X(INVALID_ARGUMENT, "desc.reserved", d->reserved = 1)                                                                \
  X(LAYOUT, "desc.up ", d->up.expert_stride = 1024)                                                                    \
  X(NOT_SUPPORTED, "desc.gate.reserved[0]", d->gate.reserved[0] = 1)                                                   \
  X(NOT_SUPPORTED, "desc.down.reserved[49]", d->down.reserved[49] = 1)

static int spoil_weights(int which, cumoe_weights_desc *d, const void **list, cumoe_view bias, uint64_t stale,
                         expectation *e)
{
  int n = 0;
#define BAD_WEIGHT(want, named, change)                                                                                \
  if (which == n++) *e = (expectation){CUMOE_ERR_##want, named, #change}, (void)(change);
  BAD_WEIGHTS(BAD_WEIGHT)
#undef BAD_WEIGHT
  return n;
}

static void test_bad_weights(cumoe_context context)
{
  bench b = {.context = context};
  expectation e = {0};
  if (!group_begin("%s: bad weights", context_name(context))) return;
  const uint64_t stale = stale_owner(context);
  const cumoe_view gate_up = foreign(cumoe_const(keep(&b, CUMOE_BF16, 4 * 48, 32))),
                   down = foreign(cumoe_const(keep(&b, CUMOE_BF16, 4 * 32, 24)));
  const cumoe_view bias = foreign(cumoe_const(keep(&b, CUMOE_F32, 4, 48)));
  const int count = spoil_weights(-1, NULL, NULL, no_view(), 0, NULL);
  for (int i = -1; i < count; i++) {
    const void *list[4] = {gate_up.data, gate_up.data, gate_up.data, gate_up.data};
    cumoe_weights_desc d = {.size = sizeof d,
                            .experts = 4,
                            .hidden = 32,
                            .inter = 24,
                            .gate_order = CUMOE_GATE_UP_CONCAT,
                            .up_major = CUMOE_OUT_IN,
                            .down_major = CUMOE_OUT_IN,
                            .gate_up.data = gate_up,
                            .down.data = down};
    cumoe_weights w = i < 0 ? NULL : (cumoe_weights)(uintptr_t)16;
    d.gate_up.data.rows = 48;
    d.down.data.rows = 32;
    spoil_weights(i, &d, list, bias, stale, &e);
    case_begin("%s", i < 0 ? "good" : e.how);
    if (i < 0)
      CHECK_OK(cumoe_weights_bind(context, &d, &w));
    else
      refused(NULL, e.how, cumoe_weights_bind(context, &d, &w), e.status, e.text);
    if (i >= 0) CHECK_MSG(w == NULL, "%s: the handle is not null", e.how);
    CHECK_OK(cumoe_weights_destroy(w));
    if (i < 0) {
      refused(NULL, "no weights", cumoe_weights_bind(context, &d, NULL), CUMOE_ERR_INVALID_ARGUMENT, "weights");
      refused(NULL, "no context", cumoe_weights_bind(NULL, &d, &w), CUMOE_ERR_INVALID_ARGUMENT, "context");
      refused(NULL, "no desc", cumoe_weights_bind(context, NULL, &w), CUMOE_ERR_INVALID_ARGUMENT, "desc");
    }
    case_end();
  }
  case_begin("tear down");
  while (b.count > 0) CHECK_OK(cumoe_buffer_free(&b.memory[--b.count]));
  case_end();
  group_end();
}

/* ---- no tokens ------------------------------------------------------------------------------------- */

/* Everything that has a row a token is empty and null; no workspace. */
static void no_tokens_forward(cumoe_context context, base_kind kind)
{
  bench b;
  const layer_spec spec = base_spec(kind);
  bench_open(&b, context, &spec);
  case_begin("forward, kind %d", kind);
  cumoe_moe_args a = b.s.args, nothing = {.size = sizeof a, .shared = b.s.shared};
  a.x = cumoe_matrix(NULL, CUMOE_BF16, 0, 32, 32);
  a.out = cumoe_matrix_mut(NULL, CUMOE_BF16, 0, 32, 32);
  a.logits = a.ids = a.weights = a.residual = no_view();
  a.ids_out = a.weights_out = a.workspace = no_view_mut();
  if (kind == BASE_IDS) {
    a.ids = cumoe_matrix(NULL, CUMOE_I32, 0, 2, 2);
    a.weights = cumoe_matrix(NULL, CUMOE_F32, 0, 2, 2);
  }
  CHECK_OK(cumoe_moe_forward(b.s.plan, b.s.routed, &a, NULL));
  nothing.expert_map = a.expert_map;
  CHECK_OK(cumoe_moe_forward(b.s.plan, b.s.routed, &nothing, NULL));
  check_untouched(context, "counts_out", b.s.args.counts_out, 0);
  check_untouched(context, "load", b.s.args.load, 0);
  check_fault(context, NULL, CUMOE_FAULT_NONE);
  case_end();
  bench_close(&b);
}

static void no_tokens_stages(cumoe_context context)
{
  bench b;
  const layer_spec spec = base_spec(BASE_ROUTER);
  bench_open(&b, context, &spec);
  case_begin("stages");
  const cumoe_view none = no_view();
  cumoe_view_mut none_mut = no_view_mut();
  const cumoe_moe_args *a = &b.s.args;
  cumoe_view r[4];
  set_route(&b, r);
  r[2].rows = 1, r[2].cols = r[2].ld = 0, r[2].data = NULL;
  r[3].rows = 0, r[3].data = NULL;
  const cumoe_route route = route_of(r);
  const cumoe_view x = cumoe_matrix(NULL, CUMOE_BF16, 0, 32, 32), h = cumoe_matrix(NULL, CUMOE_BF16, 0, 16, 16);
  size_t bytes = 1;
  CHECK_OK(cumoe_router(context, x, a->router_weight, none, cumoe_matrix_mut(NULL, CUMOE_F32, 0, 8, 8), NULL));
  CHECK_OK(cumoe_gate(context, &spec.desc.routing, cumoe_matrix(NULL, CUMOE_F32, 0, 8, 8), none,
                      cumoe_matrix_mut(NULL, CUMOE_I32, 0, 2, 2), cumoe_matrix_mut(NULL, CUMOE_F32, 0, 2, 2), NULL));
  CHECK_OK(cumoe_map_workspace(b.s.plan, 0, &bytes));
  CHECK(bytes == 0);
  CHECK_OK(cumoe_map(b.s.plan, cumoe_matrix(NULL, CUMOE_I32, 0, 2, 2), a->expert_map, &route, none_mut, NULL));
  CHECK_OK(cumoe_up(b.s.plan, b.s.routed, x, &route, none, as_mut(h), NULL));
  CHECK_OK(cumoe_down(b.s.plan, b.s.routed, h, &route, as_mut(x), NULL));
  const cumoe_combine_args c = {
      .size = sizeof c, .y = x, .pair_weights = cumoe_matrix(NULL, CUMOE_F32, 0, 2, 2), .out = as_mut(x)};
  CHECK_OK(cumoe_combine(b.s.plan, &route, &c, NULL));
  check_untouched(context, "counts", as_mut(r[0]), 0);
  case_end();
  bench_close(&b);
}

static void test_no_tokens(cumoe_context context)
{
  if (!group_begin("%s: no tokens", context_name(context))) return;
  for (base_kind kind = 0; kind < BASE_COUNT; kind++) no_tokens_forward(context, kind);
  no_tokens_stages(context);
  group_end();
}

/* ---- bad device data ------------------------------------------------------------------------------- */

static bool row_equal(const tensor *a, const tensor *b, int64_t row)
{
  const size_t bytes = (size_t)a->cols * cumoe_dtype_bytes((cumoe_dtype)a->dtype);
  return !memcmp(a->data + (size_t)row * bytes, b->data + (size_t)row * bytes, bytes);
}

static tensor copy_of(const tensor *t)
{
  tensor c = tensor_new(t->dtype, t->rows, t->cols);
  memcpy(c.data, t->data, (size_t)(t->rows * t->cols) * cumoe_dtype_bytes((cumoe_dtype)t->dtype));
  return c;
}

static layer_outputs run_expecting(cumoe_context context, const layer_spec *s, const layer_inputs *in, cumoe_fault want)
{
  session run;
  cumoe_fault fault = {.size = sizeof fault};
  session_open(&run, context, s, in);
  CHECK_OK(session_forward(&run));
  const layer_outputs o = session_collect(&run);
  session_close(&run);
  CHECK_OK(cumoe_fault_read(context, NULL, &fault));
  CHECK_MSG(fault.code == want.code && fault.token == want.token && fault.slot == want.slot,
            "fault %d token %" PRId64 " slot %d, want %d %" PRId64 " %d", fault.code, fault.token, fault.slot,
            want.code, want.token, want.slot);
  CHECK(cumoe_fault_pending(context) == (want.code != 0));
  return o;
}

/* One id of one token is wild: that slot adds nothing, the token's others stay, nobody else changes. */
static void wild_id(cumoe_context context, int32_t ids_dtype, double id, int32_t code)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 70, 72, 40);
  s.ids_dtype = ids_dtype;
  s.optional_outputs = true;
  case_begin("id %g, %s", id, cumoe_dtype_name((cumoe_dtype)ids_dtype));
  const layer_inputs in = layer_inputs_new(&s);
  layer_inputs bad = in, dropped = in;
  bad.ids = copy_of(&in.ids);
  dropped.ids = copy_of(&in.ids);
  tensor_set(&bad.ids, 33, 1, id);
  tensor_set(&dropped.ids, 33, 1, -1);
  const layer_outputs want = run_expecting(context, &s, &dropped, (cumoe_fault){0});
  const layer_outputs got =
      run_expecting(context, &s, &bad, (cumoe_fault){.code = code, .slot = code ? 1 : 0, .token = code ? 33 : 0});
  check_outputs_same(&want, &got);
  const layer_outputs clean = run_layer(context, &s, &in); /* does not hide the record */
  for (int64_t t = 0; t < s.tokens; t++)
    CHECK_MSG(t == 33 || row_equal(&clean.out, &got.out, t), "token %" PRId64 " changed with token 33's id", t);
  check_fault(context, NULL, code);
  check_fault(context, NULL, CUMOE_FAULT_NONE);
  case_end();
}

static void nan_logits(cumoe_context context)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 70, 72, 40);
  s.input = INPUT_LOGITS;
  s.optional_outputs = true;
  case_begin("NaN logits");
  const layer_inputs in = layer_inputs_new(&s);
  layer_inputs bad = in;
  bad.logits = copy_of(&in.logits);
  tensor_set(&bad.logits, 12, 3, NAN);
  for (int64_t e = 0; e < 8; e++) tensor_set(&bad.logits, 40, e, NAN);
  const layer_outputs clean = run_expecting(context, &s, &in, (cumoe_fault){0});
  session run;
  cumoe_fault fault = {.size = sizeof fault};
  session_open(&run, context, &s, &bad);
  CHECK_OK(session_forward(&run));
  const layer_outputs got = session_collect(&run);
  session_close(&run);
  CHECK_OK(cumoe_fault_read(context, NULL, &fault));
  CHECK_MSG(fault.code == CUMOE_FAULT_NAN_LOGIT && (fault.token == 12 || fault.token == 40), "fault %d, token %" PRId64,
            fault.code, fault.token);
  check_layer(&s, &bad, &got);
  for (int64_t t = 0; t < s.tokens; t++)
    CHECK_MSG(t == 12 || t == 40 || row_equal(&clean.out, &got.out, t), "token %" PRId64 " changed", t);
  for (int64_t i = 0; i < 72; i++)
    CHECK_MSG(tensor_get(&got.out, 40, i) == 0, "a token without a number among its logits has output");
  CHECK_OK(cumoe_fault_clear(context, NULL));
  case_end();
}

static void bad_expert_map(cumoe_context context, int32_t entry)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 70, 72, 40);
  s.desc.local_experts = 6;
  s.optional_outputs = true;
  case_begin("expert map entry %d", entry);
  const layer_inputs in = layer_inputs_new(&s);
  layer_inputs bad = in, dropped = in;
  bad.expert_map = copy_of(&in.expert_map);
  dropped.expert_map = copy_of(&in.expert_map);
  tensor_set(&bad.expert_map, 0, 2, entry);
  tensor_set(&dropped.expert_map, 0, 2, -1);
  const layer_outputs want = run_layer(context, &s, &dropped), got = run_layer(context, &s, &bad);
  check_outputs_same(&want, &got);
  check_fault(context, NULL, CUMOE_FAULT_EXPERT_MAP);
  case_end();
}

/* A count out of range and data of the tokens that is wrong as well, seen by many threads at once: the count is what is told. */
static void count_before_data(cumoe_context context, routing_input input)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 700, 72, 40);
  session run;
  s.input = input;
  s.device_count = true;
  s.device_tokens = 701;
  case_begin("a count before data of the tokens, input %d", (int)input);
  layer_inputs in = layer_inputs_new(&s);
  tensor *data = input == INPUT_LOGITS ? &in.logits : &in.ids;
  for (int64_t t = 0; t < s.tokens; t++) tensor_set(data, t, 0, input == INPUT_LOGITS ? NAN : 1000);
  session_open(&run, context, &s, &in);
  for (int i = 0; i < 50; i++) {
    CHECK_OK(session_forward(&run));
    check_fault(context, NULL, CUMOE_FAULT_TOKEN_COUNT);
  }
  session_close(&run);
  case_end();
}

static void test_count_before_data(cumoe_context context)
{
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = 16};
  cumoe_context many = NULL;
  if (!group_begin("%s: a count before data", context_name(context))) return;
  case_begin("threads");
  CHECK_OK(cumoe_context_create(on_device(context) ? 0 : CUMOE_DEVICE_CPU, &config, &many));
  case_end();
  count_before_data(many, INPUT_LOGITS);
  count_before_data(many, INPUT_IDS);
  case_begin("close");
  CHECK_OK(cumoe_context_destroy(many));
  case_end();
  group_end();
}

/* The first of two faults is the one kept; a clear takes it away, and the next one is recorded again. */
static void sticky_record(cumoe_context context)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, 9, 32, 16);
  case_begin("sticky");
  const layer_inputs in = layer_inputs_new(&s);
  layer_inputs first = in, second = in;
  first.ids = copy_of(&in.ids);
  second.ids = copy_of(&in.ids);
  tensor_set(&first.ids, 4, 0, 100);
  tensor_set(&second.ids, 7, 1, -5);
  run_expecting(context, &s, &first, (cumoe_fault){.code = CUMOE_FAULT_EXPERT_ID, .slot = 0, .token = 4});
  run_expecting(context, &s, &second, (cumoe_fault){.code = CUMOE_FAULT_EXPERT_ID, .slot = 0, .token = 4});
  run_expecting(context, &s, &in, (cumoe_fault){.code = CUMOE_FAULT_EXPERT_ID, .slot = 0, .token = 4});
  CHECK_OK(cumoe_fault_clear(context, NULL));
  run_expecting(context, &s, &second, (cumoe_fault){.code = CUMOE_FAULT_EXPERT_ID, .slot = 1, .token = 7});
  CHECK_OK(cumoe_fault_clear(context, NULL));
  run_expecting(context, &s, &in, (cumoe_fault){0});
  case_end();
}

/* ---- bad routes ------------------------------------------------------------------------------------ */

typedef struct staged {
  cumoe_context context;
  session s;
  cumoe_route route;
  cumoe_view_mut h, y, out;
} staged;

static void staged_open(staged *g, cumoe_context context, const layer_spec *spec, const layer_inputs *in)
{
  const int64_t k = spec->desc.routing.top_k, pairs = spec->tokens * k;
  *g = (staged){.context = context};
  session_open(&g->s, context, spec, in);
  g->route = (cumoe_route){sizeof g->route,
                           0,
                           device_new(context, CUMOE_I32, 1, 8, 0),
                           device_new(context, CUMOE_I32, 1, 9, 0),
                           device_new(context, CUMOE_I32, 1, pairs, 0),
                           device_new(context, CUMOE_I32, spec->tokens, k, 0)};
  g->h = device_new(context, CUMOE_BF16, pairs, spec->desc.inter, 8);
  g->y = device_new(context, CUMOE_BF16, pairs, spec->desc.hidden, 8);
  g->out = device_new(context, CUMOE_BF16, spec->tokens, spec->desc.hidden, 8);
  CHECK_OK(cumoe_map(g->s.plan, g->s.args.ids, no_view(), &g->route, no_view_mut(), NULL));
}

static void staged_run(staged *g)
{
  const cumoe_combine_args c = {
      .size = sizeof c, .y = cumoe_const(g->y), .pair_weights = g->s.args.weights, .out = g->out};
  CHECK_OK(cumoe_up(g->s.plan, g->s.routed, g->s.args.x, &g->route, no_view(), g->h, NULL));
  CHECK_OK(cumoe_down(g->s.plan, g->s.routed, cumoe_const(g->h), &g->route, g->y, NULL));
  CHECK_OK(cumoe_combine(g->s.plan, &g->route, &c, NULL));
  CHECK_OK(cumoe_synchronize(g->context, NULL));
  check_guards(g->context, "h", g->h);
  check_guards(g->context, "y", g->y);
  check_guards(g->context, "out", g->out);
}

enum { SPOIL_COUNTS, SPOIL_OFFSETS, SPOIL_ROW_PAIR, SPOIL_SLOT_ROW, SPOIL_KINDS };

/* One number of the route is wild; nothing outside h, y, out may be written and the fault is told. */
static void bad_route(cumoe_context context, int kind, int32_t value)
{
  static const char *const names[] = {"counts", "offsets", "row_pair", "slot_row"};
  const layer_spec s = layer_spec_new(CUMOE_BF16, 70, 72, 40);
  case_begin("route.%s has %d", names[kind], value);
  const layer_inputs in = layer_inputs_new(&s);
  staged g;
  staged_open(&g, context, &s, &in);
  cumoe_view_mut all[] = {g.route.counts, g.route.offsets, g.route.row_pair, g.route.slot_row};
  tensor t = device_get(context, cumoe_const(all[kind]));
  tensor_set(&t, 0, kind == SPOIL_SLOT_ROW ? 5 : 3, value);
  device_set(context, all[kind], &t);
  staged_run(&g);
  check_fault(context, NULL, CUMOE_FAULT_ROUTE);
  session_close(&g.s);
  const layer_outputs after = run_layer(context, &s, &in); /* the context stays usable */
  check_layer(&s, &in, &after);
  check_fault(context, NULL, CUMOE_FAULT_NONE);
  case_end();
}

static void test_device_data(cumoe_context context)
{
  static const double ids[] = {-2, 8, 9, 1000, 1 << 30, INT32_MIN, INT32_MAX},
                      wide[] = {4294967296.0, 4294967297.0, -4294967296.0, 0x1p40, -0x1p62};
  static const int32_t counts[] = {-1, INT32_MIN, 1000, INT32_MAX}, offsets[] = {-1, INT32_MIN, 100000, INT32_MAX};
  static const int32_t pairs[] = {-1, INT32_MIN, 140, INT32_MAX}, rows[] = {-3, INT32_MIN, 140, INT32_MAX};
  if (!group_begin("%s: bad device data", context_name(context))) return;
  for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
    wild_id(context, CUMOE_I32, ids[i], CUMOE_FAULT_EXPERT_ID);
    wild_id(context, CUMOE_I64, ids[i], CUMOE_FAULT_EXPERT_ID);
  }
  for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) wild_id(context, CUMOE_I64, wide[i], CUMOE_FAULT_EXPERT_ID);
  wild_id(context, CUMOE_I32, -1, CUMOE_FAULT_NONE);
  wild_id(context, CUMOE_I64, -1, CUMOE_FAULT_NONE);
  nan_logits(context);
  bad_expert_map(context, 6);
  bad_expert_map(context, -2);
  bad_expert_map(context, INT32_MAX);
  bad_expert_map(context, INT32_MIN);
  sticky_record(context);
  for (int i = 0; i < 4; i++) {
    bad_route(context, SPOIL_COUNTS, counts[i]);
    bad_route(context, SPOIL_OFFSETS, offsets[i]);
    bad_route(context, SPOIL_ROW_PAIR, pairs[i]);
    bad_route(context, SPOIL_SLOT_ROW, rows[i]);
  }
  group_end();
}

/* ---- threads --------------------------------------------------------------------------------------- */

/* Checks are the main thread's: a worker only calls and counts what went wrong. */
typedef struct worker {
  session s;
  int calls;
  int failures;
  cumoe_status last;
} worker;

static void *call_often(void *argument)
{
  worker *w = argument;
  for (int i = 0; i < w->calls; i++) {
    w->last = session_forward(&w->s);
    if (w->last != CUMOE_OK) w->failures++;
    if (i % 8 == 7 && cumoe_synchronize(w->s.context, w->s.stream) != CUMOE_OK) w->failures++;
  }
  return NULL;
}

/* Threads share the plan and the weights; each has its own memory. */
static void test_threads(cumoe_context context)
{
  enum { THREADS = 2 };
  if (!group_begin("%s: two threads on one plan", context_name(context))) return;
  layer_spec s = layer_spec_new(CUMOE_BF16, 40, 72, 40);
  s.input = INPUT_ROUTER;
  s.desc.shared_inter = 24;
  worker w[THREADS];
  pthread_t threads[THREADS];
  case_begin("60 calls each");
  const layer_inputs in = layer_inputs_new(&s);
  const layer_outputs want = run_layer(context, &s, &in);
  for (int i = 0; i < THREADS; i++) {
    w[i] = (worker){.calls = 60};
    session_open(&w[i].s, context, &s, &in);
  }
  const session own = w[1].s;
  w[1].s.plan = w[0].s.plan;
  w[1].s.routed = w[0].s.routed;
  w[1].s.args.shared = w[0].s.shared;
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, call_often, &w[i]) == 0);
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < THREADS; i++) {
    CHECK_MSG(w[i].failures == 0, "%d of %d calls failed: %s", w[i].failures, w[i].calls, cumoe_status_name(w[i].last));
    const layer_outputs got = session_collect(&w[i].s);
    check_outputs_same(&want, &got);
  }
  session_close(&w[0].s);
  w[1].s = own;
  session_close(&w[1].s);
  case_end();
  group_end();
}

/* A failure's text belongs to its thread. */
static void *fail_elsewhere(void *argument)
{
  (void)cumoe_plan_destroy(NULL);
  char *text = argument;
  size_t bytes;
  if (cumoe_plan_workspace(NULL, 1, &bytes) != CUMOE_OK) snprintf(text, 200, "%s", cumoe_last_error());
  return NULL;
}

static void test_error_text(void)
{
  char other[200] = "";
  pthread_t thread;
  if (!group_begin("error text")) return;
  case_begin("of each thread");
  CHECK(cumoe_status_name((cumoe_status)12345) != NULL && cumoe_status_text((cumoe_status)-1) != NULL);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_context_create(-77, NULL, &(cumoe_context){0}));
  CHECK(strstr(cumoe_last_error(), "cumoe_context_create") == cumoe_last_error());
  CHECK(pthread_create(&thread, NULL, fail_elsewhere, other) == 0 && pthread_join(thread, NULL) == 0);
  CHECK_MSG(strstr(other, "cumoe_plan_workspace") == other, "the other thread's text is %s", other);
  CHECK_MSG(strstr(cumoe_last_error(), "cumoe_context_create") == cumoe_last_error(), "this thread's text is %s",
            cumoe_last_error());
  case_end();
  group_end();
}

/* ---- contexts and handles -------------------------------------------------------------------------- */

static void test_two_contexts(cumoe_context context)
{
  cumoe_context other = NULL;
  const int32_t device = on_device(context) ? 0 : CUMOE_DEVICE_CPU;
  if (!group_begin("%s: two contexts", context_name(context))) return;
  case_begin("same bits, own faults");
  CHECK_OK(cumoe_context_create(device, NULL, &other));
  layer_spec s = layer_spec_new(CUMOE_BF16, 40, 72, 40);
  const layer_inputs in = layer_inputs_new(&s);
  const layer_outputs a = run_layer(context, &s, &in), b = run_layer(other, &s, &in);
  check_outputs_same(&a, &b);
  s.pattern = PATTERN_HOSTILE;
  const layer_inputs bad = layer_inputs_new(&s);
  (void)run_layer(other, &s, &bad);
  CHECK(cumoe_fault_pending(context) == 0);
  check_fault(other, NULL, CUMOE_FAULT_EXPERT_ID);
  session x, y;
  session_open(&x, context, &s, &in);
  session_open(&y, other, &s, &in);
  CHECK_STATUS(CUMOE_ERR_WRONG_DEVICE, cumoe_moe_forward(x.plan, y.routed, &x.args, NULL));
  session_close(&x);
  session_close(&y);
  case_end();
  case_begin("close the second");
  CHECK_OK(cumoe_context_destroy(other));
  case_end();
  group_end();
}

static void test_handles(cumoe_context context)
{
  cumoe_context other = NULL;
  cumoe_buffer mine = {0}, orphan = {0}, copy;
  if (!group_begin("%s: handles that are gone", context_name(context))) return;
  case_begin("buffers and null handles");
  CHECK_OK(cumoe_context_create(on_device(context) ? 0 : CUMOE_DEVICE_CPU, NULL, &other));
  CHECK_OK(cumoe_buffer_alloc(other, CUMOE_F32, 8, 8, NULL, &orphan));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 8, 8, NULL, &mine));
  const cumoe_view lost = cumoe_buffer_view(orphan), gone = cumoe_buffer_view(mine);
  const cumoe_routing routing = cumoe_routing_mixtral(2);
  cumoe_view_mut ids = device_new(context, CUMOE_I32, 8, 2, 0), weights = device_new(context, CUMOE_F32, 8, 2, 0);
  CHECK_OK(cumoe_context_destroy(other)); /* frees the orphan */
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_gate(context, &routing, lost, no_view(), ids, weights, NULL));
  copy = mine;
  CHECK_OK(cumoe_buffer_free(&mine));
  CHECK(mine.id == 0);
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_gate(context, &routing, gone, no_view(), ids, weights, NULL));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE,
               cumoe_gate(context, &routing, cumoe_buffer_view(copy), no_view(), ids, weights, NULL));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_free(&copy));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_free(&orphan));
  check_untouched(context, "ids", ids, 0);
  CHECK_OK(cumoe_buffer_free(&mine));
  CHECK_OK(cumoe_context_destroy(NULL));
  CHECK_OK(cumoe_plan_destroy(NULL));
  CHECK_OK(cumoe_weights_destroy(NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_gate(NULL, &routing, gone, no_view(), ids, weights, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_gate(context, NULL, gone, no_view(), ids, weights, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_fault_clear(NULL, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_fault_read(context, NULL, NULL));
  CHECK(cumoe_fault_pending(NULL) == 0);
  case_end();
  group_end();
}

/* A view that reaches past its buffer is refused, however it was made. */
static void test_out_of_bounds(cumoe_context context)
{
  if (!group_begin("%s: views past their buffer", context_name(context))) return;
  const cumoe_routing routing = cumoe_routing_mixtral(2);
  case_begin("rows, columns, pointer");
  cumoe_view_mut ids = device_new(context, CUMOE_I32, 9, 2, 0), weights = device_new(context, CUMOE_F32, 9, 2, 0);
  cumoe_buffer buffer = {0};
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 8, 8, NULL, &buffer));
  cumoe_view rows = cumoe_buffer_view(buffer), moved = rows, wide = rows;
  rows.rows = 9;
  moved.data = (const char *)moved.data + 4;
  wide.ld = 9;
  CHECK_STATUS(CUMOE_ERR_OUT_OF_BOUNDS, cumoe_gate(context, &routing, rows, no_view(), ids, weights, NULL));
  ids.rows = weights.rows = 8;
  CHECK_STATUS(CUMOE_ERR_OUT_OF_BOUNDS, cumoe_gate(context, &routing, moved, no_view(), ids, weights, NULL));
  CHECK_STATUS(CUMOE_ERR_OUT_OF_BOUNDS, cumoe_gate(context, &routing, wide, no_view(), ids, weights, NULL));
  check_untouched(context, "ids", ids, 0);
  CHECK_OK(cumoe_buffer_free(&buffer));
  case_end();
  group_end();
}

int main(int argc, char **argv)
{
  cumoe_context contexts[2];
  test_begin(argc, argv);
  const int count = open_contexts(contexts);
  test_error_text();
  for (int i = 0; i < count; i++) {
    test_bad_layers(contexts[i]);
    test_bad_weights(contexts[i]);
    test_stage_operands(contexts[i]);
    test_forward_operands(contexts[i]);
    test_bad_calls(contexts[i]);
    test_out_of_bounds(contexts[i]);
    test_no_tokens(contexts[i]);
    test_device_data(contexts[i]);
    test_count_before_data(contexts[i]);
    test_threads(contexts[i]);
    test_two_contexts(contexts[i]);
    test_handles(contexts[i]);
    close_context(contexts[i]);
  }
  return test_end();
}
