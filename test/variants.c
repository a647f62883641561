/*
 * Every CUDA kernel of the table, forced through the public calls, against the oracle: the cases that the CPU device
 * passes in cpu.c. First the library's own choice, then row by row; a row that serves no case has failed. Rows
 * can be run side by side on a machine with many cores: --only TEXT takes a part of a kernel's name.
 */
#include "cases.h"
#include "cases_codes.h"
#include "cases_format.h"
#include "cases_gemm.h"
#include "cases_layer.h"
#include "cases_masked.h"
#include "cases_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct operation_cases {
  const char *op;
  void (*cases[3])(cumoe_context); /* dense GEMMs (shared experts) are only reached through the layer */
} operation_cases;

static const operation_cases operations[] = {
    {"router", {cases_router, NULL}},
    {"gate", {cases_gate, NULL}},
    {"map_count", {cases_map, NULL}},
    {"map", {cases_map, cases_layer}},
    {"permute", {cases_layer, NULL}},
    {"up", {cases_up, cases_layer}},
    {"down", {cases_down, cases_layer}},
    {"combine", {cases_combine, cases_layer}},
    {"few_up", {cases_layer, NULL}},
    {"few_down", {cases_layer, NULL}},
    {"elementwise", {cases_elementwise, NULL}},
    {"softmax", {cases_softmax, NULL}},
    {"norm", {cases_norm, NULL}},
    {"quantize", {cases_format, cases_format_exact, cases_format_odd}},
    {"quantize_masked", {cases_masked_formats, NULL}},
    {"encode_scales", {cases_encode_scales, NULL}},
    {"encode", {cases_encode, NULL}},
    {"scan", {cases_scan, NULL}},
    {"repack", {cases_repack, NULL}},
};
enum { OPERATIONS = sizeof operations / sizeof operations[0] };

/* What training adds: attention.c, train.c and backward.c have their cases, and force what has several rows. */
static const char elsewhere[] =
    " attention attention_dq attention_dkv attention_dsinks rope embed embedding_clear embedding_count embedding_scan "
    "embedding_place embedding_backward norm_stats norm_partials norm_dparameters norm_dx elementwise_backward "
    "softmax_backward cross_entropy_count cross_entropy_rows cross_entropy_mean squares total adamw pad copy_rows "
    "up_keep down_drawn down_activated rows_product weight_gradient cut add_runs bias_gradient activation "
    "pair_gradient sigmoid gather gate_count gate_backward gate_scale gate_loss ";

static bool is_elsewhere(const char *op)
{
  char word[64];
  snprintf(word, sizeof word, " %s ", op);
  return strstr(elsewhere, word) != NULL;
}

static void run_cases(const operation_cases *o, cumoe_context context)
{
  for (int i = 0; i < 3; i++)
    if (o->cases[i]) o->cases[i](context);
}

static void run_variant(cumoe_context context, int32_t index)
{
  cumoe_variant_info info = {.size = sizeof info};
  if (!CHECK_OK(cumoe_variant_get(context, index, &info))) return;
  if (!strcmp(info.arch, "cpu") || is_elsewhere(info.op)) return;
  if (!group_begin("%s", info.name)) return;
  case_begin("force %s", info.name);
  if (!info.usable) {
    case_skip("this GPU cannot run it");
    group_end();
    return;
  }
  CHECK_OK(cumoe_variant_force(context, -1));
  CHECK_OK(cumoe_variant_force(context, index));
  case_end();
  cases_forced = true;
  cases_served = 0;
  const bool scaled = row_has_format(&info) || !strcmp(info.op, "quantize");
  cases_dtype = scaled ? 0 : info.x;
  if (scaled) cases_format_row(context, &info);
  for (int i = 0; i < OPERATIONS && !scaled; i++)
    if (!strcmp(operations[i].op, info.op)) run_cases(&operations[i], context);
  cases_forced = false;
  cases_dtype = 0;
  case_begin("%s serves cases", info.name);
  const bool reached = strcmp(info.op, "quantize") || info.x != CUMOE_F32; /* layers with formats are of 16 bits */
  CHECK_MSG(cases_served > 0 || !reached, "no case was served");
  CHECK_OK(cumoe_variant_force(context, -1));
  case_end();
  group_end();
}

/* ---- the gate's ids are the CPU device's, over many tokens ----------------------------------------- */

static tensor gate_ids(cumoe_context context, const cumoe_routing *routing, const tensor *logits, const tensor *bias)
{
  cumoe_view_mut ids = device_new(context, CUMOE_I32, logits->rows, routing->top_k, 1);
  cumoe_view_mut weights = device_new(context, CUMOE_F32, logits->rows, routing->top_k, 1);
  CHECK_OK(cumoe_gate(context, routing, device_put(context, logits, 3), bias ? device_put(context, bias, 1) : no_view(),
                      ids, weights, NULL));
  CHECK_OK(cumoe_fault_clear(context, NULL));
  return device_get(context, cumoe_const(ids));
}

/* The last six are ranked by scores, with a bias, in groups, or both. */
enum { ROUTINGS = 9, BIASED = 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 };

static cumoe_routing routing_of(int which, int32_t experts)
{
  const cumoe_routing all[ROUTINGS] = {
      cumoe_routing_mixtral(8),
      cumoe_routing_llama4(32),
      cumoe_routing_gpt_oss(4),
      cumoe_routing_mixtral(8),
      cumoe_routing_gpt_oss(4),
      cumoe_routing_mixtral(8),
      cumoe_routing_deepseek_v3(8, 4, 2, 1),
      cumoe_routing_make(CUMOE_SCORE_SQRT_SOFTPLUS, 6, 0),
      cumoe_routing_deepseek_v3(8, 8, 4, 1),
  };
  cumoe_routing r = all[which];
  if (which == 4 || which == 5) r.softcap = 3;
  if (which == 5 || which == 7) {
    r.n_group = experts == 128 ? 4 : 8;
    r.topk_group = 2;
    r.group_score = CUMOE_GROUP_BEST_TWO;
  }
  return r;
}

static void compare_gates(cumoe_context cuda)
{
  cumoe_context cpu = NULL;
  if (!group_begin("gate: ids of the CPU device")) return;
  for (int i = 0; i < ROUTINGS * 6; i++) {
    rng r = {(uint64_t)i};
    const int which = i % ROUTINGS, dtype = case_dtypes[i / ROUTINGS % 3], experts = i / ROUTINGS % 2 ? 128 : 384;
    const cumoe_routing routing = routing_of(which, experts);
    case_begin("gate routing %d E %d %s logits", which, experts, cumoe_dtype_name((cumoe_dtype)dtype));
    CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &cpu));
    tensor logits = tensor_normal(&r, dtype, 5000, experts, 0, 2); /* 16-bit logits tie all the time */
    tensor bias = tensor_normal(&r, CUMOE_F32, 1, experts, 0, .01), *biased = BIASED >> which & 1 ? &bias : NULL;
    tensor want = gate_ids(cpu, &routing, &logits, biased), got = gate_ids(cuda, &routing, &logits, biased);
    check_same("ids", &got, &want);
    case_end();
    case_begin("close");
    CHECK_OK(cumoe_context_destroy(cpu));
    case_end();
  }
  group_end();
}

/* ---- layers whose router, up and down are all wgmma's ---------------------------------------------- */

/* Types, format, major and rows of the tile: what the two products of a layer have in common in their names. */
static bool pairs_with(const cumoe_variant_info *up, const cumoe_variant_info *down)
{
  const char *const of_up = strstr(up->name, "_sm90_wgmma_"), *const of_down = strstr(down->name, "_sm90_wgmma_");
  if (!of_up || !of_down || strcmp(down->op, "down") || down->bm != up->bm) return false;
  const size_t length = (size_t)(strrchr(of_up, '_') - of_up);
  return strncmp(of_up, of_down, length) == 0 && of_down[length] == '_';
}

static bool routes_for(const cumoe_variant_info *router, int32_t dtype)
{
  return !strcmp(router->op, "router") && !strcmp(router->form, "wgmma") && router->x == dtype;
}

/* Up by itself, with the others that go with it. */
static void force_layer(cumoe_context context, int32_t index, const cumoe_variant_info *up)
{
  int forced = 0;
  CHECK_OK(cumoe_variant_force(context, index));
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    cumoe_variant_info row = {.size = sizeof row};
    CHECK_OK(cumoe_variant_get(context, i, &row));
    if (!pairs_with(up, &row) && !routes_for(&row, up->y)) continue;
    CHECK_OK(cumoe_variant_force(context, i));
    forced++;
  }
  CHECK_MSG(forced == 2, "%d rows go with %s", forced, up->name);
}

/* From so many rows an expert on, whatever the weights and the width. */
static void copy_rows_from(cumoe_context context, double rows)
{
  int found = 0;
  for (int32_t i = 0; i < cumoe_limit_count(); i++) {
    cumoe_limit_info limit = {.size = sizeof limit};
    CHECK_OK(cumoe_limit_get(context, i, &limit));
    if (!strstr(limit.name, "copy_rows")) continue;
    for (int32_t w = 0; w < (int32_t)(sizeof limit.value / sizeof *limit.value); w++)
      CHECK_OK(cumoe_limit_set(context, i, w, rows));
    found++;
  }
  CHECK(found == 2);
}

/* A feature of a layer that tensor maps can describe, with the row's format everywhere. Experts of one tile and of
 * several, channels that end inside one. SMALL in the environment: of one, for kernels that the CPU runs. */
static bool wgmma_spec(const cumoe_variant_info *up, int feature, layer_spec *s)
{
  const bool small = getenv("SMALL");
  const int64_t tokens = small ? 45 : (const int64_t[]){45, 200, 1100}[feature % 3];
  *s = feature_spec(feature, up->y, tokens, (uint64_t)feature + 1);
  if (s->form.per_expert || s->router_dtype == CUMOE_F32) return false;
  s->distinct = 19;
  s->desc.hidden = small ? 72 : 264, s->desc.inter = feature % 2 ? 128 : 136;
  if (s->desc.num_experts > 100) s->desc.hidden = 64, s->desc.inter = 32;
  if (s->input == INPUT_LOGITS && !s->chosen) s->input = INPUT_ROUTER;
  s->form.up_major = s->form.down_major = !strcmp(up->major, "N") ? CUMOE_IN_OUT : CUMOE_OUT_IN;
  if (!row_has_format(up)) return true;
  CHECK(format_for_row(up, s) && s->desc.dtype == up->y);
  s->desc.down_format = s->desc.up_format;
  if (!s->desc.shared_inter) return true;
  s->desc.shared_inter = (s->desc.shared_inter + 31) / 32 * 32;
  s->desc.shared_up_format = s->desc.shared_down_format = s->desc.up_format;
  return true;
}

static void run_layers(cumoe_context context, int32_t index, const cumoe_variant_info *up)
{
  const char *name;
  case_begin("force %s and what goes with it", up->name);
  force_layer(context, index, up);
  case_end();
  for (int copies = 0; copies < 2; copies++) {
    copy_rows_from(context, copies ? 0 : 1e9);
    for (int i = 0; (name = feature_name(i)) != NULL; i++) {
      layer_spec s;
      if (!wgmma_spec(up, i, &s)) continue;
      run_layer_case(context, name, &s);
      oracle_device = 0;
    }
  }
  case_begin("force nothing");
  CHECK_OK(cumoe_variant_force(context, -1));
  case_end();
}

/* The products hand rows to one another only where both are of this form, and with a copy of x where it is made. */
static void layers_of_wgmma(void)
{
  cumoe_context context = NULL;
  CHECK_OK(cumoe_context_create(0, NULL, &context)); /* whose limits are set */
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    cumoe_variant_info up = {.size = sizeof up};
    CHECK_OK(cumoe_variant_get(context, i, &up));
    if (strcmp(up.op, "up") || strcmp(up.form, "wgmma") || !up.usable) continue;
    if (!group_begin("layers of wgmma: %s", up.name)) continue;
    run_layers(context, i, &up);
    group_end();
  }
  CHECK_OK(cumoe_context_destroy(context));
}

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  cumoe_context context = open_context(0);
  if (context) {
    compare_gates(context);
    oracle_device = DEVICE_ANY;
    for (int i = 0; i < OPERATIONS * 3; i++) { /* a group each: so long that shards would end apart */
      void (*const cases)(cumoe_context) = operations[i / 3].cases[i % 3];
      if (!cases || !group_begin("library's choice: %s %d", operations[i / 3].op, i % 3)) continue;
      cases(context);
      group_end();
    }
    oracle_device = 0;
    layers_of_wgmma();
    for (int32_t i = 0; i < cumoe_variant_count(); i++) run_variant(context, i);
    close_context(context);
  }
  return test_end();
}
