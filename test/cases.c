#include "cases.h"
#include "parts.h"

#include <math.h>
#include <string.h>

bool cases_forced;
int64_t cases_served;
int32_t cases_dtype;

bool case_wanted(int32_t dtype)
{
  return cases_dtype == 0 || cases_dtype == dtype;
}

const int32_t case_experts[10] = {1, 8, 60, 128, 160, 256, 384, 512, 1000, 1024};
const int32_t case_tokens[12] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33};

bool case_served(cumoe_context context, cumoe_status status, const char *call)
{
  if (status == CUMOE_ERR_NOT_SUPPORTED && cases_forced) {
    CHECK_OK(cumoe_fault_clear(context, NULL)); /* stages before the refused one may have run */
    case_drop();
    return false;
  }
  if (CHECK_MSG(status == CUMOE_OK, "%s: %s: %s", call, cumoe_status_name(status), cumoe_last_error())) {
    cases_served++;
    return true;
  }
  case_end();
  return false;
}

void set_poison(int pass)
{
  test_poison = pass == 0 ? 0xff : 0x3c;
}

static int32_t least(int32_t a, int32_t b)
{
  return a < b ? a : b;
}

/* ---- router ---------------------------------------------------------------------------------------- */

typedef struct router_case {
  int32_t tokens, experts, hidden, dtype, w_dtype, bias_dtype; /* bias_dtype 0: none */
  bool integers;                                               /* exact: every order of summation gives the same */
  int32_t nan_token;                                           /* -1: none */
  int32_t logits_dtype;                                        /* 0: not rounded */
  float scale;                                                 /* 0: none */
} router_case;

static tensor random_matrix(rng *r, int32_t dtype, int64_t rows, int64_t cols, bool integers)
{
  return integers ? tensor_integers(r, dtype, rows, cols, 3) : tensor_normal(r, dtype, rows, cols, 0, 1);
}

static void check_logits(const router_case *c, const tensor *x, const tensor *w, const tensor *bias,
                         const tensor *logits)
{
  bounded *want = scratch((size_t)c->experts, sizeof *want);
  for (int32_t t = 0; t < c->tokens; t++) {
    oracle_router(x, t, w, bias, want);
    for (int32_t e = 0; c->integers && e < c->experts; e++) want[e].bound = 0;
    oracle_finish_logits(c->experts, c->logits_dtype, c->scale, want);
    check_bounded_row("logits", logits, t, want);
  }
}

static void run_router(cumoe_context context, const router_case *c)
{
  if (!case_wanted(c->dtype)) return;
  rng r = {(uint64_t)c->experts * 77 + (uint64_t)c->tokens};
  case_begin("router T %d E %d H %d %s x %s bias %s to %s times %g%s%s", c->tokens, c->experts, c->hidden,
             cumoe_dtype_name((cumoe_dtype)c->dtype), cumoe_dtype_name((cumoe_dtype)c->w_dtype),
             cumoe_dtype_name((cumoe_dtype)c->bias_dtype), cumoe_dtype_name((cumoe_dtype)c->logits_dtype),
             (double)c->scale, c->integers ? " exact" : "", c->nan_token >= 0 ? " nan" : "");
  tensor x = random_matrix(&r, c->dtype, c->tokens, c->hidden, c->integers), bias = {0}, logits[PASSES];
  tensor w = random_matrix(&r, c->w_dtype, c->experts, c->hidden, c->integers);
  if (c->bias_dtype) bias = random_matrix(&r, c->bias_dtype, 1, c->experts, c->integers);
  if (c->nan_token >= 0 && c->nan_token < c->tokens) tensor_set(&x, c->nan_token, c->hidden - 1, NAN);
  for (int pass = 0; pass < PASSES; pass++) {
    set_poison(pass);
    cumoe_view_mut out = device_new(context, CUMOE_F32, c->tokens, c->experts, 3);
    cumoe_view xv = device_put(context, &x, 8), wv = device_put(context, &w, 16);
    cumoe_view bv = c->bias_dtype ? device_put(context, &bias, 1) : no_view();
    const cumoe_router_args args = {.size = sizeof args,
                                    .logits_dtype = c->logits_dtype,
                                    .logit_scale = c->scale,
                                    .x = xv,
                                    .weight = wv,
                                    .bias = bv,
                                    .logits = out};
    const bool plain = !c->logits_dtype && c->scale == 0;
    const cumoe_status status =
        plain ? cumoe_router(context, xv, wv, bv, out, NULL) : cumoe_router_with(context, &args, NULL);
    if (!case_served(context, status, "cumoe_router")) return;
    logits[pass] = device_get(context, cumoe_const(out));
    check_guards(context, "logits", out);
  }
  check_same("two poisons", &logits[0], &logits[1]);
  check_logits(c, &x, &w, &bias, &logits[0]);
  case_end();
}

void cases_router(cumoe_context context)
{
  static const int32_t hiddens[] = {8, 24, 64, 136, 264, 520}, roundings[] = {0, CUMOE_BF16, CUMOE_F16, CUMOE_F32};
  static const float scales[] = {0, 0.7f, 1};
  for (int i = 0; i < 120; i++) {
    int32_t dtype = case_dtypes[i % 3], biases[] = {0, CUMOE_F32, dtype};
    router_case c = {case_tokens[i % 12],
                     case_experts[i / 12],
                     hiddens[(i + i / 12) % 6],
                     dtype,
                     i % 2 ? CUMOE_F32 : dtype,
                     biases[i / 3 % 3],
                     i % 5 == 0,
                     i % 7 == 0 ? 1 : -1,
                     roundings[i / 2 % 4],
                     scales[i / 4 % 3]};
    while (c.tokens * c.experts * c.hidden > 2000000) c.hidden = c.hidden / 16 * 8;
    run_router(context, &c);
  }
  if (!on_device(context)) return;
  static const int32_t experts[] = {64, 33, 101, 300};
  for (int i = 0; i < 12; i++) { /* real depths, and enough tokens and experts for tiles */
    router_case c = {i % 2 ? 5 : 130,
                     experts[i / 3],
                     i % 2 ? 7168 : 2880,
                     case_dtypes[i % 3],
                     case_dtypes[i % 3],
                     i < 6 ? 0 : CUMOE_F32,
                     false,
                     -1,
                     roundings[i / 3],
                     scales[i % 2]};
    run_router(context, &c);
  }
}

/* ---- gate ------------------------------------------------------------------------------------------ */

typedef enum logit_kind {
  LOGITS_NORMAL,
  LOGITS_TIES,      /* 0 or 1 */
  LOGITS_NEGATIVE,  /* far below 0: exp without the maximum is 0 */
  LOGITS_LAST_BEST, /* rising with the id: winners are the last experts */
  LOGITS_HOSTILE,   /* NaN, infinities and largest values among numbers; some rows nothing else */
  LOGIT_KINDS
} logit_kind;

typedef struct gate_case {
  const char *name;
  cumoe_routing routing;
  bool bias;
} gate_case;

/* Scores without a maximum to subtract get logits that they can still tell apart in f32. */
static tensor make_logits(rng *r, logit_kind kind, int32_t score, int32_t dtype, int64_t tokens, int32_t experts)
{
  const double odd[] = {NAN, INFINITY, -INFINITY, -NAN, 3.0e38};
  tensor t = tensor_new(dtype, tokens, experts);
  for (int64_t token = 0; token < tokens; token++)
    for (int32_t e = 0; e < experts; e++) {
      double v = 2 * rng_normal(r);
      if (kind == LOGITS_TIES) v = (double)rng_below(r, 2);
      if (kind == LOGITS_NEGATIVE) v = (score == CUMOE_SCORE_SOFTMAX ? -160 : -60) + rng_uniform(r);
      if (kind == LOGITS_LAST_BEST) v = (double)e / 64 - (double)(token % 3);
      if (kind == LOGITS_HOSTILE && rng_below(r, 4) == 0) v = odd[rng_below(r, 5)];
      if (kind == LOGITS_HOSTILE && token % 8 < 5)
        v = token % 8 == 4 ? odd[rng_below(r, 5)] : token % 8 == 3 ? v : odd[token % 8];
      tensor_set(&t, token, e, v);
    }
  return t;
}

/* Tokens whose ids the bounds leave open, over all gate cases of a group. */
static int64_t open_tokens, gate_tokens;

static void check_gated(const gate_case *c, const tensor *logits, const double *bias, const tensor *ids,
                        const tensor *weights)
{
  int32_t experts = (int32_t)logits->cols, k = c->routing.top_k, want_ids[CUMOE_MAX_TOP_K];
  bounded *l = scratch((size_t)experts, sizeof *l), want[CUMOE_MAX_TOP_K];
  for (int64_t t = 0; t < logits->rows; t++) {
    for (int32_t e = 0; e < experts; e++) l[e] = (bounded){tensor_get(logits, t, e), 0};
    gate_tokens++;
    if (!oracle_gate(&c->routing, experts, l, (gate_operands){.select_bias = bias}, want_ids, want)) {
      open_tokens++;
      continue;
    }
    bool same = true;
    for (int32_t j = 0; j < k && same; j++)
      same = CHECK_MSG(tensor_get(ids, t, j) == want_ids[j], "token %d slot %d: id %g, want %d", (int)t, j,
                       tensor_get(ids, t, j), want_ids[j]);
    if (same) check_bounded_row("weights", weights, t, want);
  }
}

static bool any_nan(const tensor *t)
{
  for (int64_t i = 0; i < t->rows * t->cols; i++)
    if (isnan(tensor_get(t, 0, i))) return true;
  return false;
}

static void run_gate(cumoe_context context, const gate_case *c, logit_kind kind, int32_t tokens, int32_t experts,
                     int32_t dtype, int32_t ids_dtype)
{
  rng r = {(uint64_t)experts * 131 + (uint64_t)tokens * 7 + (uint64_t)kind};
  case_begin("gate %s k %d T %d E %d logits %d %s ids %s", c->name, c->routing.top_k, tokens, experts, kind,
             cumoe_dtype_name((cumoe_dtype)dtype), cumoe_dtype_name((cumoe_dtype)ids_dtype));
  tensor logits = make_logits(&r, kind, c->routing.score, dtype, tokens, experts), ids[PASSES], weights[PASSES];
  const int32_t choosable = experts - c->routing.always_experts;
  tensor bias = tensor_normal(&r, CUMOE_F32, 1, choosable, 0, 0.2);
  double *plain_bias = scratch((size_t)experts, sizeof *plain_bias);
  for (int32_t e = 0; e < choosable; e++) plain_bias[e] = tensor_get(&bias, 0, e);
  for (int pass = 0; pass < PASSES; pass++) {
    set_poison(pass);
    cumoe_view_mut out_ids = device_new(context, ids_dtype, tokens, c->routing.top_k, 1);
    cumoe_view_mut out_weights = device_new(context, CUMOE_F32, tokens, c->routing.top_k, 5);
    cumoe_view in = device_put(context, &logits, 3), bias_in = c->bias ? device_put(context, &bias, 1) : no_view();
    if (!case_served(context, cumoe_gate(context, &c->routing, in, bias_in, out_ids, out_weights, NULL), "cumoe_gate"))
      return;
    ids[pass] = device_get(context, cumoe_const(out_ids));
    weights[pass] = device_get(context, cumoe_const(out_weights));
    check_guards(context, "ids", out_ids);
    check_guards(context, "weights", out_weights);
    check_fault(context, NULL, any_nan(&logits) ? CUMOE_FAULT_NAN_LOGIT : CUMOE_FAULT_NONE);
  }
  check_same("ids, two poisons", &ids[0], &ids[1]);
  check_same("weights, two poisons", &weights[0], &weights[1]);
  check_gated(c, &logits, c->bias ? plain_bias : NULL, &ids[0], &weights[0]);
  case_end();
}

static gate_case with(const char *name, cumoe_routing routing, bool bias)
{
  return (gate_case){name, routing, bias};
}

enum { GATE_CASES = 21 };

static void make_gate_cases(gate_case *c, int32_t k, int32_t experts)
{
  int32_t groups = experts % 8 == 0 ? 8 : experts % 4 == 0 ? 4 : 1, stay = (groups + 1) / 2;
  while (stay < groups && experts / groups * stay < k) stay++;
  c[0] = with("mixtral", cumoe_routing_mixtral(k), false);
  c[1] = with("qwen2", cumoe_routing_qwen2(k), false);
  c[2] = with("gpt-oss", cumoe_routing_gpt_oss(k), false);
  c[3] = with("llama4", cumoe_routing_llama4(k), false);
  c[4] = with("deepseek-v3", cumoe_routing_deepseek_v3(k, groups, stay, 2.5f), true);
  c[5] = with("sigmoid with bias", cumoe_routing_make(CUMOE_SCORE_SIGMOID, k, CUMOE_ROUTE_RENORMALIZE), true);
  c[6] = with("sqrt softplus", cumoe_routing_make(CUMOE_SCORE_SQRT_SOFTPLUS, k, CUMOE_ROUTE_RENORMALIZE), false);
  c[7] = with("sqrt softplus with bias", cumoe_routing_make(CUMOE_SCORE_SQRT_SOFTPLUS, k, 0), true);
  c[8] = with("identity", cumoe_routing_make(CUMOE_SCORE_IDENTITY, k, 0), false);
  c[9] = with("softmax in groups", cumoe_routing_mixtral(k), false);
  c[9].routing.n_group = groups;
  c[9].routing.topk_group = stay;
  c[10] = with("soft cap", cumoe_routing_mixtral(k), false);
  c[10].routing.softcap = 5;
  c[11] = with("scale and renorm_min", cumoe_routing_make(CUMOE_SCORE_SIGMOID, k, CUMOE_ROUTE_RENORMALIZE), false);
  c[11].routing.routed_scale = 1.5f;
  c[11].routing.renorm_min = 100;
  c[12] = with("softmax with bias", cumoe_routing_mixtral(k), true);
  c[13] = with("after top-k with bias and cap", cumoe_routing_gpt_oss(k), true);
  c[13].routing.softcap = 7;
  c[14] = with("renorm_eps", cumoe_routing_make(CUMOE_SCORE_SIGMOID, k, CUMOE_ROUTE_RENORMALIZE), false);
  c[14].routing.renorm_eps = 0.25f;
  c[15] = with("identity with cap", cumoe_routing_make(CUMOE_SCORE_IDENTITY, k, 0), true);
  c[15].routing.softcap = 3;
  c[16] = with("identity renormalised", cumoe_routing_make(CUMOE_SCORE_IDENTITY, k, CUMOE_ROUTE_RENORMALIZE), false);
  c[16].routing.renorm_min = 1e30f; /* sums near 0 would decide nothing */
  c[17] =
      with("sigmoid by logit with bias", cumoe_routing_make(CUMOE_SCORE_SIGMOID, k, CUMOE_ROUTE_CHOOSE_BY_LOGIT), true);
  c[18] = with("softplus by logit in groups",
               cumoe_routing_make(CUMOE_SCORE_SQRT_SOFTPLUS, k, CUMOE_ROUTE_CHOOSE_BY_LOGIT | CUMOE_ROUTE_RENORMALIZE),
               true);
  c[18].routing.n_group = groups;
  c[18].routing.topk_group = stay;
  c[19] = with("sparsemixer", cumoe_routing_make(CUMOE_SCORE_SPARSEMIXER, k, 0), false);
  c[19].routing.mixer_eps = .1f;
  c[20] = with("sigmoid, some always", cumoe_routing_make(CUMOE_SCORE_SIGMOID, k, CUMOE_ROUTE_RENORMALIZE), true);
  c[20].routing.always_experts = least(2, k - 1);
}

void cases_gate(cumoe_context context)
{
  static const int32_t ks[] = {1, 2, 3, 4, 6, 8, 9, 10, 16, 17, 31, 32};
  gate_case c[GATE_CASES];
  open_tokens = gate_tokens = 0;
  for (int i = 0; i < 10 * GATE_CASES * LOGIT_KINDS; i++) {
    int32_t experts = case_experts[i / (GATE_CASES * LOGIT_KINDS)], tokens = case_tokens[(i * 7 + i / 12) % 12];
    int32_t k = least(ks[(i + i / 75) % 12], experts);
    int which = i % GATE_CASES;
    logit_kind kind = (logit_kind)(i / GATE_CASES % LOGIT_KINDS);
    make_gate_cases(c, k, experts);
    run_gate(context, &c[which], kind, tokens, experts, case_dtypes[(i / 5 + i) % 3], i % 2 ? CUMOE_I64 : CUMOE_I32);
  }
  case_begin("gate: ids left open by rounding");
  CHECK_MSG(open_tokens * 50 <= gate_tokens, "%d of %d tokens", (int)open_tokens, (int)gate_tokens);
  case_end();
}

/* ---- map ------------------------------------------------------------------------------------------- */

typedef struct map_case {
  int32_t tokens, top_k, experts, local, zero, identity, ids_dtype;
  pattern pattern;
  bool broken_map; /* an expert map entry out of range */
} map_case;

static tensor make_expert_map(rng *r, const map_case *c)
{
  tensor map = tensor_new(CUMOE_I32, 1, c->experts);
  for (int32_t e = 0; e < c->experts; e++) tensor_set(&map, 0, e, -1);
  for (int32_t local = 0; local < c->local; local++) { /* shuffled: local order is not global order */
    int64_t e = rng_below(r, c->experts);
    while (tensor_get(&map, 0, e) != -1) e = (e + 1) % c->experts;
    tensor_set(&map, 0, e, local);
  }
  if (c->broken_map) tensor_set(&map, 0, c->experts / 2, c->local);
  return map;
}

static int32_t expected_fault(const map_case *c, const tensor *ids)
{
  int32_t all = c->experts + c->zero + c->identity;
  for (int64_t i = 0; i < ids->rows * ids->cols; i++) {
    double id = tensor_get(ids, 0, i);
    if (id < -1 || id >= all) return CUMOE_FAULT_EXPERT_ID;
    if (c->broken_map && id == c->experts / 2) return CUMOE_FAULT_EXPERT_MAP;
  }
  return CUMOE_FAULT_NONE;
}

typedef struct got_route {
  tensor counts, offsets, row_pair, slot_row;
} got_route;

/* The contract of cumoe_route, pair by pair. */
static void check_route_contract(const cumoe_moe_desc *d, const tensor *ids, const tensor *map, const got_route *got)
{
  int64_t *next = scratch((size_t)d->local_experts + 1, sizeof *next);
  bool good = true;
  for (int32_t e = 0; e < d->local_experts; e++) next[e] = (int64_t)tensor_get(&got->offsets, 0, e);
  for (int64_t pair = 0; pair < ids->rows * ids->cols && good; pair++) {
    int32_t to = oracle_destination(d, map, tensor_get(ids, 0, pair));
    int64_t row = (int64_t)tensor_get(&got->slot_row, 0, pair), want = to < 0 ? to : next[to];
    good = CHECK_MSG(row == want, "pair %d: row %d, want %d", (int)pair, (int)row, (int)want);
    if (to < 0 || !good) continue;
    next[to]++;
    good = CHECK_MSG(tensor_get(&got->row_pair, 0, row) == (double)pair, "row %d: pair %g, want %d", (int)row,
                     tensor_get(&got->row_pair, 0, row), (int)pair);
  }
  for (int32_t e = 0; e < d->local_experts && good; e++) {
    int64_t first = (int64_t)tensor_get(&got->offsets, 0, e), count = (int64_t)tensor_get(&got->counts, 0, e);
    good = CHECK_MSG(count == next[e] - first && tensor_get(&got->offsets, 0, e + 1) >= (double)(first + count),
                     "expert %d: %d rows from %d, want %d", e, (int)count, (int)first, (int)(next[e] - first));
  }
}

static cumoe_moe_desc map_desc(const map_case *c)
{
  cumoe_moe_desc d = {.size = sizeof d,
                      .num_experts = c->experts,
                      .local_experts = c->local,
                      .hidden = 8,
                      .inter = 8,
                      .dtype = CUMOE_BF16,
                      .out_dtype = CUMOE_BF16,
                      .routing = cumoe_routing_qwen2(c->top_k)};
  d.routing.zero_experts = c->zero;
  d.routing.identity_experts = c->identity;
  return d;
}

static cumoe_status map_on(cumoe_context context, cumoe_plan plan, const tensor *ids, const tensor *map,
                           const host_route *shape, got_route *got)
{
  size_t bytes = 0;
  cumoe_route route = route_put(context, shape);
  CHECK_OK(cumoe_map_workspace(plan, ids->rows, &bytes));
  cumoe_view_mut workspace =
      bytes ? device_new(context, CUMOE_U8, 1, (int64_t)bytes, 256 - (int64_t)(bytes % 256)) : no_view_mut();
  cumoe_view map_view = map ? device_put(context, map, 1) : no_view();
  CHECK_OK(cumoe_fill(context, route.slot_row, test_poison, NULL));
  CHECK_OK(cumoe_fill(context, route.counts, test_poison, NULL));
  CHECK_OK(cumoe_fill(context, route.offsets, test_poison, NULL));
  cumoe_status status = cumoe_map(plan, device_put(context, ids, 3), map_view, &route, workspace, NULL);
  *got =
      (got_route){device_get(context, cumoe_const(route.counts)), device_get(context, cumoe_const(route.offsets)),
                  device_get(context, cumoe_const(route.row_pair)), device_get(context, cumoe_const(route.slot_row))};
  check_guards(context, "counts", route.counts);
  check_guards(context, "offsets", route.offsets);
  check_guards(context, "row_pair", route.row_pair);
  check_guards(context, "slot_row", route.slot_row);
  return status;
}

static void run_map(cumoe_context context, const map_case *c)
{
  rng r = {(uint64_t)c->experts * 31 + (uint64_t)c->tokens};
  case_begin("map T %d k %d E %d local %d zero %d identity %d ids %s %s", c->tokens, c->top_k, c->experts, c->local,
             c->zero, c->identity, cumoe_dtype_name((cumoe_dtype)c->ids_dtype), pattern_name(c->pattern));
  cumoe_moe_desc d = map_desc(c);
  cumoe_plan plan = NULL;
  tensor ids = route_tokens(&r, c->pattern, c->ids_dtype, c->tokens, c->top_k, c->experts + c->zero + c->identity);
  tensor map = make_expert_map(&r, c), none = tensor_new(CUMOE_I32, c->tokens, c->top_k);
  for (int64_t i = 0; i < none.rows * none.cols; i++) tensor_set(&none, 0, i, -1);
  host_route shape = route_new(&none, c->local);
  got_route got[PASSES];
  bool mapped = c->local < c->experts || c->broken_map;
  CHECK_OK(cumoe_plan_create(context, &d, &plan));
  for (int pass = 0; pass < PASSES; pass++) {
    set_poison(pass);
    cumoe_status status = map_on(context, plan, &ids, mapped ? &map : NULL, &shape, &got[pass]);
    if (status != CUMOE_OK) CHECK_OK(cumoe_plan_destroy(plan));
    if (!case_served(context, status, "cumoe_map")) return;
    check_fault(context, NULL, expected_fault(c, &ids));
  }
  if (c->tokens > 0) {
    check_same("slot_row, two poisons", &got[0].slot_row, &got[1].slot_row);
    check_same("offsets, two poisons", &got[0].offsets, &got[1].offsets);
    check_route_contract(&d, &ids, mapped ? &map : NULL, &got[0]);
  }
  CHECK_OK(cumoe_plan_destroy(plan));
  case_end();
}

void cases_map(cumoe_context context)
{
  static const int32_t ks[] = {1, 2, 4, 8, 9, 32};
  for (int i = 0; i < 240; i++) {
    int32_t experts = case_experts[i / 24];
    map_case c = {case_tokens[i % 12],           least(ks[i % 6], experts),        experts, experts, 0, 0,
                  i % 2 ? CUMOE_I64 : CUMOE_I32, (pattern)(i / 3 % PATTERN_COUNT), false};
    if (i % 4 == 1 && experts > 1) c.local = experts / 2;
    if (i % 4 == 2 && experts < 1000) c.zero = 5, c.identity = 3;
    if (i % 16 == 3) c.broken_map = true;
    run_map(context, &c);
  }
  static const int32_t many[] = {1023, 1024, 1025, 2047, 4096, 8191};
  for (int i = 0; i < 24; i++) { /* chunks of pairs: every remainder class of 1024 */
    map_case c = {many[i % 6], i % 3 + 1, case_experts[i * 5 % 10],     0,    0,
                  0,           CUMOE_I32, (pattern)(i % PATTERN_COUNT), false};
    c.local = c.experts;
    c.top_k = least(c.top_k, c.experts);
    run_map(context, &c);
  }
}

/* ---- combine --------------------------------------------------------------------------------------- */

typedef struct combine_case {
  int32_t tokens, top_k, hidden, dtype, out_dtype;
  bool unreduced, shared, shared_logit, residual, in_place, identity, nan_behind_zero, bad_rows, on_input, huge;
  int32_t present; /* device token count; -1: not given */
  float out_scale;
} combine_case;

static cumoe_moe_desc combine_desc(const combine_case *c)
{
  cumoe_moe_desc d = {.size = sizeof d,
                      .num_experts = 32,
                      .local_experts = 32,
                      .hidden = c->hidden,
                      .inter = 8,
                      .dtype = c->dtype,
                      .out_dtype = c->out_dtype,
                      .routing = cumoe_routing_qwen2(c->top_k)};
  d.flags = c->unreduced ? CUMOE_MOE_UNREDUCED : 0;
  d.routing.identity_experts = c->identity ? 1 : 0;
  d.routing.flags |= c->on_input ? CUMOE_ROUTE_WEIGHT_ON_INPUT : 0;
  return d;
}

typedef struct combine_data {
  tensor slot_row, y, weights, x, shared, shared_logit, residual;
} combine_data;

static combine_data make_combine(rng *r, const combine_case *c)
{
  int64_t pairs = (int64_t)c->tokens * c->top_k;
  combine_data d = {.slot_row = tensor_new(CUMOE_I32, c->tokens, c->top_k)};
  d.y = tensor_normal(r, c->dtype, pairs, c->hidden, 0, 1);
  d.weights = tensor_normal(r, CUMOE_F32, c->tokens, c->top_k, 0.3, 0.2);
  d.x = tensor_normal(r, c->dtype, c->tokens, c->hidden, 0, 1);
  d.shared = tensor_normal(r, c->dtype, c->tokens, c->hidden, 0, 1);
  d.shared_logit = tensor_normal(r, CUMOE_F32, c->tokens, 1, 0, 2);
  d.residual = tensor_normal(r, c->out_dtype, c->tokens, c->hidden, 0, 4);
  for (int64_t pair = 0; pair < pairs; pair++) {
    int64_t row = pairs % 5 == 0 ? (pair + pairs / 2) % pairs : (pair * 5 + 3) % pairs;
    bool dropped = rng_below(r, 5) == 0, identity = c->identity && rng_below(r, 4) == 0;
    tensor_set(&d.slot_row, 0, pair, identity ? -2 : dropped ? -1 : (double)row);
    if (c->nan_behind_zero && pair % 3 == 0 && row >= 0) {
      tensor_set(&d.weights, 0, pair, 0);
      for (int32_t i = 0; i < c->hidden; i++) tensor_set(&d.y, row, i, i % 2 ? NAN : INFINITY);
    } else if (c->huge) { /* some sums pass the largest float and would come back */
      tensor_set(&d.weights, 0, pair, 3e38);
      for (int32_t i = 0; i < c->hidden; i++) tensor_set(&d.y, pair, i, (i % 2 ? 2 : .125) * (pair % 2 ? 1 : -1));
    }
    if (c->bad_rows && pair % 4 == 1) tensor_set(&d.slot_row, 0, pair, pair % 8 == 1 ? (double)pairs : INT32_MAX);
  }
  return d;
}

static void want_combined(const combine_case *c, const combine_data *d, int64_t token, bounded *out)
{
  const bounded *y[CUMOE_MAX_TOP_K];
  bounded weights[CUMOE_MAX_TOP_K], *shared = scratch((size_t)c->hidden, sizeof *shared), logit;
  double *residual = scratch((size_t)c->hidden, sizeof *residual);
  for (int32_t j = 0; j < c->top_k; j++) {
    double row = tensor_get(&d->slot_row, token, j);
    bounded *at = scratch((size_t)c->hidden, sizeof *at);
    bool there = row == -2 || (row >= 0 && row < (double)d->y.rows);
    for (int32_t i = 0; there && i < c->hidden; i++)
      at[i] = (bounded){row == -2 ? tensor_get(&d->x, token, i) : tensor_get(&d->y, (int64_t)row, i), 0};
    y[j] = there ? at : NULL;
    weights[j] = (bounded){tensor_get(&d->weights, token, j), 0};
    if (c->on_input && weights[j].value == 0) memset(at, 0, (size_t)c->hidden * sizeof *at), y[j] = NULL;
    if (c->on_input) weights[j].value = 1;
    for (int32_t i = 0; c->unreduced && i < c->hidden; i++) out[j * c->hidden + i] = at[i];
  }
  if (c->unreduced) return;
  logit = (bounded){tensor_get(&d->shared_logit, token, 0), 0};
  for (int32_t i = 0; i < c->hidden; i++) {
    shared[i] = (bounded){tensor_get(&d->shared, token, i), 0};
    residual[i] = tensor_get(&d->residual, token, i);
  }
  combine_terms terms = {c->hidden,
                         c->top_k,
                         y,
                         weights,
                         c->shared ? shared : NULL,
                         c->shared && c->shared_logit ? &logit : NULL,
                         c->residual ? residual : NULL,
                         c->out_scale == 0 ? 1 : c->out_scale};
  oracle_combine(&terms, out);
  for (int32_t i = 0; i < c->hidden; i++) out[i] = oracle_stored(out[i], c->out_dtype);
}

static void check_combined(const combine_case *c, const combine_data *d, const tensor *out)
{
  int64_t rows = c->unreduced ? c->top_k : 1,
          present = c->present >= 0 && c->present < c->tokens ? c->present : c->tokens;
  bounded *want = scratch((size_t)(rows * c->hidden), sizeof *want);
  for (int64_t t = 0; t < present; t++) {
    want_combined(c, d, t, want);
    for (int64_t row = 0; row < rows; row++) check_bounded_row("out", out, t * rows + row, want + row * c->hidden);
  }
}

static cumoe_status combine_on(cumoe_context context, cumoe_plan plan, const combine_case *c, const combine_data *d,
                               cumoe_view_mut *out)
{
  cumoe_moe_desc desc = combine_desc(c);
  tensor none = tensor_new(CUMOE_I32, c->tokens, c->top_k), present = tensor_new(CUMOE_I32, 1, 1);
  for (int64_t i = 0; i < none.rows * none.cols; i++) tensor_set(&none, 0, i, -1);
  host_route shape = route_new(&none, desc.local_experts);
  cumoe_route route = route_put(context, &shape);
  device_set(context, route.slot_row, &d->slot_row);
  tensor_set(&present, 0, 0, c->present);
  *out = device_new(context, c->out_dtype, c->unreduced ? (int64_t)c->tokens * c->top_k : c->tokens, c->hidden, 8);
  cumoe_combine_args a = {
      .size = sizeof a, .out_scale = c->out_scale, .y = device_put(context, &d->y, 16), .out = *out};
  if (!c->unreduced || c->on_input) a.pair_weights = device_put(context, &d->weights, 1);
  if (c->identity) a.x = device_put(context, &d->x, 24);
  if (c->shared) a.shared = device_put(context, &d->shared, 8);
  if (c->shared && c->shared_logit) a.shared_logit = device_put(context, &d->shared_logit, 2);
  if (c->residual && c->in_place) device_set(context, *out, &d->residual);
  if (c->residual) a.residual = c->in_place ? cumoe_const(*out) : device_put(context, &d->residual, 8);
  if (c->present >= 0) a.device_tokens = device_put(context, &present, 0);
  return cumoe_combine(plan, &route, &a, NULL);
}

static void run_combine(cumoe_context context, const combine_case *c)
{
  if (!case_wanted(c->dtype)) return;
  rng r = {(uint64_t)c->tokens * 17 + (uint64_t)c->top_k};
  case_begin("combine T %d k %d H %d %s -> %s%s%s%s%s%s%s%s%s%s%s present %d", c->tokens, c->top_k, c->hidden,
             cumoe_dtype_name((cumoe_dtype)c->dtype), cumoe_dtype_name((cumoe_dtype)c->out_dtype),
             c->unreduced ? " unreduced" : "", c->shared ? " shared" : "", c->shared_logit ? " gated" : "",
             c->residual ? " residual" : "", c->in_place ? " in place" : "", c->identity ? " identity" : "",
             c->nan_behind_zero ? " nan behind 0" : "", c->bad_rows ? " bad rows" : "", c->on_input ? " on input" : "",
             c->huge ? " huge" : "", c->present);
  cumoe_moe_desc desc = combine_desc(c);
  cumoe_plan plan = NULL;
  combine_data d = make_combine(&r, c);
  tensor got[PASSES];
  CHECK_OK(cumoe_plan_create(context, &desc, &plan));
  for (int pass = 0; pass < PASSES; pass++) {
    cumoe_view_mut out;
    set_poison(pass);
    cumoe_status status = combine_on(context, plan, c, &d, &out);
    if (status != CUMOE_OK) CHECK_OK(cumoe_plan_destroy(plan));
    if (!case_served(context, status, "cumoe_combine")) return;
    int64_t rows = c->unreduced ? c->top_k : 1;
    bool fewer = c->present >= 0 && c->present < c->tokens;
    if (fewer && !c->in_place) check_untouched(context, "out", out, c->present * rows);
    got[pass] = device_get(context, cumoe_const(out));
    if (fewer) got[pass].rows = c->present * rows;
    check_guards(context, "out", out);
    bool any_bad = c->bad_rows && (fewer ? c->present : c->tokens) * c->top_k > 1;
    check_fault(context, NULL,
                c->tokens == 0           ? CUMOE_FAULT_NONE
                : c->present > c->tokens ? CUMOE_FAULT_TOKEN_COUNT
                : any_bad                ? CUMOE_FAULT_ROUTE
                                         : CUMOE_FAULT_NONE);
  }
  check_same("two poisons", &got[0], &got[1]);
  check_combined(c, &d, &got[0]);
  CHECK_OK(cumoe_plan_destroy(plan));
  case_end();
}

void cases_combine(cumoe_context context)
{
  static const int32_t hiddens[] = {8, 24, 64, 136, 264, 1032}, ks[] = {1, 2, 3, 4, 6, 8, 9, 16, 31, 32};
  for (int i = 0; i < 120; i++) {
    int32_t dtype = case_dtypes[i % 3];
    combine_case c = {
        .tokens = case_tokens[(i + i / 12) % 12], .top_k = ks[i % 10], .hidden = hiddens[i % 6], .dtype = dtype};
    c.out_dtype = i % 4 == 1 ? CUMOE_F32 : dtype;
    c.unreduced = i % 8 == 7;
    c.shared = !c.unreduced && i % 3 == 1;
    c.shared_logit = c.shared && i % 2;
    c.residual = !c.unreduced && i % 5 < 2;
    c.in_place = c.residual && i % 5 == 1;
    c.identity = i % 7 == 2;
    c.on_input = !c.identity && i % 12 > 8;
    c.nan_behind_zero = (!c.unreduced || c.on_input) && i % 6 > 2;
    c.huge = !c.unreduced && i % 5 == 3;
    c.bad_rows = i % 11 == 4;
    c.present = i % 9 == 5 ? c.tokens / 2 : i % 27 == 8 && !c.bad_rows ? c.tokens + 3 : -1;
    c.out_scale = i % 4 == 2 ? 0.75f : 0;
    run_combine(context, &c);
  }
}
