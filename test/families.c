/*
 * The MoE blocks of transformers, each in one forward, router and all: what their own code answered
 * (test/data/families/make.py, which has the format of families.txt and the formula of the numbers) is what cumoe
 * answers from the same numbers, in f32, on every device. Every line of the header's table of families is there.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 6, COLUMNS = 16, MAX_K = 16 };
#define FILE_NAME "test/data/families/families.txt"

/* In the order of make.py. */
typedef enum stream {
  S_x,
  S_router_weight,
  S_router_bias,
  S_select_bias,
  S_expert_scale,
  S_router_x,
  S_gate_up,
  S_down,
  S_gate_up_bias,
  S_down_bias,
  S_out_bias,
  S_logits
} stream;

typedef struct family {
  char name[64], operands[16];
  cumoe_moe_desc desc;
  int32_t gate_order, router_hidden;
  int32_t ids[TOKENS][MAX_K];
  double weights[TOKENS][MAX_K], out[TOKENS][COLUMNS];
  bool has_out;
} family;

static bool has(const family *f, char operand)
{
  return strchr(f->operands, operand) != NULL;
}

/* ---- numbers ---- */

static tensor numbers(stream s, int64_t rows, int64_t cols)
{
  static const double sizes[] = {[S_x] = 1, [S_router_x] = 1, [S_router_weight] = .5, [S_logits] = 2, [S_out_bias] = 1};
  const double size = s < sizeof sizes / sizeof *sizes && sizes[s] != 0 ? sizes[s] : .25;
  const tensor t = tensor_new(CUMOE_F32, rows, cols);
  for (uint32_t i = 0; i < (uint32_t)(rows * cols); i++) {
    uint32_t h = (i + (uint32_t)s * 0x1000193u) * 2654435761u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    tensor_set(&t, i / cols, i % cols, ((double)(h >> 8) / (1 << 23) - 1) * size);
  }
  return t;
}

/* ---- the file ---- */

static bool read_description(FILE *in, family *f)
{
  cumoe_moe_desc *d = &f->desc;
  cumoe_routing *r = &d->routing;
  *f = (family){.desc = {.size = sizeof *d, .dtype = CUMOE_F32}};
  if (fscanf(in, "%63s %15s", f->name, f->operands) != 2) return false;
  const int read = fscanf(in, "%d %f %f %u %d %d %d %d %d %d", &d->act, &d->act_alpha, &d->act_limit, &d->flags,
                          &f->gate_order, &d->num_experts, &d->hidden, &d->inter, &r->top_k, &f->router_hidden) +
                   fscanf(in, "%d %u %d %d %d %d %d %d", &r->score, &r->flags, &r->n_group, &r->topk_group,
                          &r->group_score, &r->zero_experts, &r->identity_experts, &r->always_experts) +
                   fscanf(in, "%f %f %f %f %f %f", &r->routed_scale, &r->softcap, &r->renorm_eps, &r->renorm_min,
                          &r->mixer_eps, &r->logit_scale);
  return CHECK_MSG(read == 24 && r->top_k <= MAX_K, "%s: %d of 24 fields", f->name, read);
}

static bool read_tokens(FILE *in, family *f)
{
  const int32_t k = f->desc.routing.top_k;
  bool good = true;
  for (int t = 0; t < TOKENS; t++) {
    for (int32_t j = 0; j < k; j++) good = good && fscanf(in, "%d", &f->ids[t][j]) == 1;
    for (int32_t j = 0; j < k; j++) good = good && fscanf(in, "%lf", &f->weights[t][j]) == 1;
    char first[32] = "";
    good = good && fscanf(in, "%31s", first) == 1;
    f->has_out = strcmp(first, "-") != 0;
    f->out[t][0] = strtod(first, NULL);
    for (int i = 1; f->has_out && i < COLUMNS; i++) good = good && fscanf(in, "%lf", &f->out[t][i]) == 1;
  }
  return CHECK_MSG(good, "%s: a token's numbers", f->name);
}

/* ---- one family ---- */

/* The numbers of gate and up, in the order that the block has them. */
static cumoe_weights bind_weights(cumoe_context context, const family *f)
{
  const cumoe_moe_desc *d = &f->desc;
  const bool gated = !(d->flags & CUMOE_MOE_UNGATED);
  const int64_t experts = d->num_experts, up_rows = (gated ? 2 : 1) * d->inter;
  const tensor up = numbers(S_gate_up, experts * up_rows, d->hidden),
               down = numbers(S_down, experts * d->hidden, d->inter),
               up_bias = numbers(S_gate_up_bias, experts, up_rows),
               down_bias = numbers(S_down_bias, experts, d->hidden);
  cumoe_weights_desc w = {.size = sizeof w,
                          .experts = d->num_experts,
                          .hidden = d->hidden,
                          .inter = d->inter,
                          .gate_order = f->gate_order,
                          .up_major = CUMOE_OUT_IN,
                          .down_major = CUMOE_OUT_IN,
                          .down.data = device_put(context, &down, 0)};
  cumoe_projection *first = gated ? &w.gate_up : &w.up;
  first->data = device_put(context, &up, 0);
  if (has(f, 'p')) first->bias = device_put(context, &up_bias, 0);
  if (has(f, 'p')) w.down.bias = device_put(context, &down_bias, 0);
  cumoe_weights weights = NULL;
  CHECK_OK(cumoe_weights_bind(context, &w, &weights));
  return weights;
}

static cumoe_view put(cumoe_context context, stream s, int64_t rows, int64_t cols)
{
  const tensor t = numbers(s, rows, cols);
  return device_put(context, &t, 0);
}

/* As make.py has the caller choose. */
static cumoe_view chosen_ids(cumoe_context context, const family *f)
{
  const int32_t k = f->desc.routing.top_k;
  const tensor t = tensor_new(CUMOE_I64, TOKENS, k);
  for (int64_t i = 0; i < TOKENS; i++)
    for (int64_t j = 0; j < k; j++) tensor_set(&t, i, j, (double)((i * 3 + j) % f->desc.num_experts));
  return device_put(context, &t, 0);
}

static cumoe_moe_args arguments(cumoe_context context, const family *f)
{
  const cumoe_moe_desc *d = &f->desc;
  const cumoe_routing *r = &d->routing;
  const int64_t experts = d->num_experts + r->zero_experts + r->identity_experts,
                router_hidden = has(f, 'x') ? f->router_hidden : d->hidden;
  cumoe_moe_args a = {.size = sizeof a, .x = put(context, S_x, TOKENS, d->hidden)};
  if (has(f, 'r')) a.router_weight = put(context, S_router_weight, experts, router_hidden);
  if (has(f, 'l')) a.logits = put(context, S_logits, TOKENS, experts);
  if (has(f, 'c')) a.ids = chosen_ids(context, f);
  if (has(f, 'b')) a.router_bias = put(context, S_router_bias, 1, experts);
  if (has(f, 's')) a.select_bias = put(context, S_select_bias, 1, experts - r->always_experts);
  if (has(f, 'e')) a.expert_scale = put(context, S_expert_scale, 1, experts);
  if (has(f, 'x')) a.router_x = put(context, S_router_x, TOKENS, router_hidden);
  if (has(f, 'o')) a.residual = put(context, S_out_bias, 1, d->hidden);
  if (!has(f, 'c')) a.ids_out = device_new(context, CUMOE_I32, TOKENS, r->top_k, 0);
  a.weights_out = device_new(context, CUMOE_F32, TOKENS, r->top_k, 0);
  a.out = device_new(context, CUMOE_F32, TOKENS, d->hidden, 0);
  return a;
}

/* The blocks' slots come in any order. */
static void check_token(const family *f, int t, const tensor *ids, const tensor *weights)
{
  const int32_t k = f->desc.routing.top_k;
  for (int32_t j = 0; j < k; j++) {
    int32_t at = -1;
    for (int32_t i = 0; i < k && at < 0; i++)
      if (f->ids[t][i] == (ids ? (int32_t)tensor_get(ids, t, j) : f->ids[t][j])) at = i;
    if (!CHECK_MSG(at >= 0, "token %d slot %d: not one of the block's experts", t, (int)j)) continue;
    const double got = tensor_get(weights, t, j), want = f->weights[t][at];
    CHECK_MSG(fabs(got - want) <= 4e-6 * fabs(want) + 1e-7, "token %d expert %d: weight %.9g, want %.9g", t,
              f->ids[t][at], got, want);
  }
}

static void check_out(const family *f, const tensor *out)
{
  double most = 0;
  for (int t = 0; t < TOKENS; t++)
    for (int i = 0; i < COLUMNS; i++) most = fmax(most, fabs(f->out[t][i]));
  for (int t = 0; t < TOKENS; t++)
    for (int i = 0; i < COLUMNS; i++)
      CHECK_MSG(fabs(tensor_get(out, t, i) - f->out[t][i]) <= 4e-6 * most, "out[%d, %d] is %.9g, want %.9g", t, i,
                tensor_get(out, t, i), f->out[t][i]);
}

/* The preset that the header has the family under, as its config changes it. */
static bool has_preset(const family *f)
{
  const cumoe_routing *r = &f->desc.routing;
  const int32_t k = r->top_k, always = r->always_experts;
  const float scale = r->routed_scale;
  const cumoe_routing presets[] = {
      cumoe_routing_mixtral(k),
      cumoe_routing_qwen3(k),
      cumoe_routing_qwen2(k),
      cumoe_routing_gpt_oss(k),
      cumoe_routing_deepseek_v2(k, r->n_group, r->topk_group, scale),
      cumoe_routing_deepseek_v3(k, r->n_group, r->topk_group, scale),
      cumoe_routing_deepseek_v4(k, scale),
      cumoe_routing_kolibri1(k),
      cumoe_routing_inkling(k - always, always, scale),
      cumoe_routing_phimoe(k, r->mixer_eps),
      cumoe_routing_llama4(k),
      cumoe_routing_longcat_flash(k, r->identity_experts, scale),
      cumoe_routing_zaya(k),
  };
  for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
    const cumoe_routing *p = &presets[i];
    const uint32_t by_config = CUMOE_ROUTE_RENORMALIZE;
    if (p->score == r->score && !((p->flags ^ r->flags) & ~by_config) && p->always_experts == r->always_experts &&
        p->zero_experts == r->zero_experts && p->identity_experts == r->identity_experts)
      return true;
  }
  return false;
}

/* Its name without what make.py puts behind it. */
static bool in_header(const family *f)
{
  static char header[1 << 16];
  if (!header[0]) {
    FILE *in = fopen("include/cumoe/moe.h", "r");
    if (in) header[fread(header, 1, sizeof header - 1, in)] = 0, fclose(in);
  }
  char name[64];
  snprintf(name, sizeof name, "%s", f->name);
  char *more = strstr(name, "_hash") ? strstr(name, "_hash") : strstr(name, "_latent");
  if (more) *more = 0;
  const char *table = strstr(header, "Presets, and the MoE blocks"), *end = table ? strstr(table, "*/") : NULL;
  for (const char *at = table; at && (at = strstr(at, name)) && at < end; at++)
    if (strchr(" ", at[-1]) && strchr(" :;,\n(", at[strlen(name)])) return true;
  return false;
}

static void run_family(cumoe_context context, const family *f)
{
  cumoe_plan plan = NULL;
  size_t bytes = 0;
  case_begin("%s", f->name);
  CHECK_MSG(in_header(f), "the header's table has no %s", f->name);
  CHECK_MSG(has_preset(f), "no preset is %s's", f->name);
  CHECK_OK(cumoe_plan_create(context, &f->desc, &plan));
  const cumoe_weights weights = bind_weights(context, f);
  cumoe_moe_args a = arguments(context, f);
  CHECK_OK(cumoe_plan_workspace(plan, TOKENS, &bytes));
  a.workspace = device_new(context, CUMOE_U8, 1, (int64_t)bytes, 0);
  CHECK_OK(cumoe_moe_forward(plan, weights, &a, NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  const tensor weights_out = device_get(context, cumoe_const(a.weights_out)),
               out = device_get(context, cumoe_const(a.out));
  tensor ids_out = {0};
  if (a.ids_out.data) ids_out = device_get(context, cumoe_const(a.ids_out));
  for (int t = 0; t < TOKENS; t++) check_token(f, t, a.ids_out.data ? &ids_out : NULL, &weights_out);
  if (f->has_out) check_out(f, &out);
  CHECK_OK(cumoe_weights_destroy(weights));
  CHECK_OK(cumoe_plan_destroy(plan));
  case_end();
}

static void run_families(cumoe_context context)
{
  family f;
  FILE *in = fopen(FILE_NAME, "r");
  int count = 0;
  case_begin("the file");
  CHECK_MSG(in != NULL, "%s is not there", FILE_NAME);
  case_end();
  if (!in) return;
  for (; read_description(in, &f) && read_tokens(in, &f); count++) run_family(context, &f);
  case_begin("families");
  CHECK_MSG(count == 71 && feof(in), "%d families", count);
  case_end();
  fclose(in);
}

static const test_group groups[] = {GROUP("transformers", run_families, ANYWHERE)};
TEST_MAIN(groups)
