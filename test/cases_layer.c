#include "cases_layer.h"
#include "cases.h"

#include <stdio.h>

/* ---- features one by one --------------------------------------------------------------------------- */

#define FEATURE(name, ...)                                                                                             \
  if (feature == n++) return (void)(__VA_ARGS__), name;

/* Each line changes `s`; the layer has 16 experts, 4 slots, routes from logits in f32; device counts are of 45
 * tokens. */
static const char *set_feature(layer_spec *s, int feature)
{
  cumoe_moe_desc *d = &s->desc;
  cumoe_routing *r = &d->routing;
  int n = 0;
  FEATURE("router weight", s->input = INPUT_ROUTER)
  FEATURE("router weight in f32", s->input = INPUT_ROUTER, s->router_dtype = CUMOE_F32)
  FEATURE("router weight and bias", s->input = INPUT_ROUTER, s->router_bias = true)
  FEATURE("logits f32", s->logits_dtype = CUMOE_F32)
  FEATURE("logits bf16", s->logits_dtype = CUMOE_BF16)
  FEATURE("logits f16", s->logits_dtype = CUMOE_F16)
  FEATURE("ids i32", s->input = INPUT_IDS)
  FEATURE("ids i64", s->input = INPUT_IDS, s->ids_dtype = CUMOE_I64)
  FEATURE("mixtral", r->flags = CUMOE_ROUTE_RENORMALIZE)
  FEATURE("qwen3", *r = cumoe_routing_qwen3(4))
  FEATURE("qwen2", *r = cumoe_routing_qwen2(4))
  FEATURE("gpt-oss", *r = cumoe_routing_gpt_oss(4), d->act = CUMOE_ACT_SWIGLU_OAI, d->act_limit = 1.5f,
          s->form.gate_order = CUMOE_GATE_UP_INTERLEAVED, s->form.bias = CUMOE_F32, s->input = INPUT_ROUTER,
          s->router_bias = true)
  FEATURE("llama4", *r = cumoe_routing_llama4(1), d->shared_inter = 40)
  FEATURE("llama4 with more slots", *r = cumoe_routing_llama4(3))
  FEATURE("deepseek-v3", *r = cumoe_routing_deepseek_v3(4, 8, 4, 2.5f), s->select_bias = true, d->shared_inter = 24)
  FEATURE("groups by best", r->n_group = 4, r->topk_group = 2)
  FEATURE("groups by best two", r->n_group = 4, r->topk_group = 2, r->group_score = CUMOE_GROUP_BEST_TWO)
  FEATURE("groups of one", r->n_group = 16, r->topk_group = 5, r->group_score = CUMOE_GROUP_BEST_TWO)
  FEATURE("sigmoid", r->score = CUMOE_SCORE_SIGMOID)
  FEATURE("square root of softplus", r->score = CUMOE_SCORE_SQRT_SOFTPLUS)
  FEATURE("identity score", r->score = CUMOE_SCORE_IDENTITY)
  FEATURE("sigmoid renormalised with eps", r->score = CUMOE_SCORE_SIGMOID, r->flags = CUMOE_ROUTE_RENORMALIZE,
          r->renorm_eps = 0.5f)
  FEATURE("renormalised with minimum", r->flags = CUMOE_ROUTE_RENORMALIZE, r->renorm_min = 3.f)
  FEATURE("selection bias", s->select_bias = true, r->score = CUMOE_SCORE_SIGMOID)
  FEATURE("softcap", r->softcap = 1.5f)
  FEATURE("routed scale", r->routed_scale = 2.446f)
  FEATURE("weight on input", r->flags |= CUMOE_ROUTE_WEIGHT_ON_INPUT)
  FEATURE("kolibri1",
          *r = cumoe_routing_make(CUMOE_SCORE_SIGMOID, 4, CUMOE_ROUTE_CHOOSE_BY_LOGIT | CUMOE_ROUTE_RENORMALIZE),
          s->select_bias = true, s->input = INPUT_ROUTER)
  FEATURE("gemma4", s->expert_scale = true, s->router_hidden = 40, s->input = INPUT_ROUTER,
          r->flags = CUMOE_ROUTE_RENORMALIZE)
  FEATURE("phimoe", *r = cumoe_routing_make(CUMOE_SCORE_SPARSEMIXER, 2, 0), r->mixer_eps = .2f)
  FEATURE("sparsemixer from x", *r = cumoe_routing_make(CUMOE_SCORE_SPARSEMIXER, 3, 0), r->mixer_eps = .1f,
          r->softcap = 4, s->input = INPUT_ROUTER)
  FEATURE("inkling", *r = cumoe_routing_make(CUMOE_SCORE_SIGMOID, 5, CUMOE_ROUTE_RENORMALIZE), r->always_experts = 2,
          r->routed_scale = 2, s->select_bias = true, s->expert_scale = true, s->input = INPUT_ROUTER)
  FEATURE("always, after top-k", *r = cumoe_routing_gpt_oss(5), r->always_experts = 4)
  FEATURE("chosen by the caller", *r = cumoe_routing_make(CUMOE_SCORE_SQRT_SOFTPLUS, 4, CUMOE_ROUTE_RENORMALIZE),
          s->chosen = true, s->input = INPUT_ROUTER)
  FEATURE("chosen by the caller, softmax", s->chosen = true, s->ids_dtype = CUMOE_I64)
  FEATURE("chosen by the caller, hostile", s->chosen = true, s->pattern = PATTERN_HOSTILE, s->expert_scale = true)
  FEATURE("logits rounded to bf16", s->input = INPUT_ROUTER, r->logits_dtype = CUMOE_BF16, s->router_bias = true)
  FEATURE("logits rounded to f16, scaled", s->input = INPUT_ROUTER, r->logits_dtype = CUMOE_F16, r->logit_scale = .3f)
  FEATURE("bias of the output", s->residual = RESIDUAL_BIAS)
  FEATURE("bias of the output, scaled", s->residual = RESIDUAL_BIAS, s->out_scale = .5f, d->out_dtype = CUMOE_F32)
  FEATURE("step3p7", d->act_limit = .4f, d->flags = CUMOE_MOE_LIMIT_AFTER)
  FEATURE("geglu limited after", d->act = CUMOE_ACT_GELU_TANH, d->act_limit = .4f, d->flags = CUMOE_MOE_LIMIT_AFTER)
  FEATURE("relu2 limited after", d->act = CUMOE_ACT_RELU2, d->act_limit = .3f, d->flags = CUMOE_MOE_LIMIT_AFTER)
  FEATURE("zero experts", r->zero_experts = 5)
  FEATURE("identity experts", r->identity_experts = 6)
  FEATURE("zero and identity experts", r->zero_experts = 3, r->identity_experts = 4, s->input = INPUT_ROUTER)
  FEATURE("zero and identity experts from ids", r->zero_experts = 9, r->identity_experts = 8, s->input = INPUT_IDS)
  FEATURE("shuffled expert map", s->expert_map = true)
  FEATURE("a third of the experts", d->local_experts = 5)
  FEATURE("one expert of 16", d->local_experts = 1)
  FEATURE("shared expert", d->shared_inter = 56)
  FEATURE("gated shared expert", d->shared_inter = 56, s->shared_gate = true)
  FEATURE("gated shared expert, gate in f32", d->shared_inter = 8, s->shared_gate = true, s->router_dtype = CUMOE_F32)
  FEATURE("shared expert with bias", d->shared_inter = 56, s->form.bias = CUMOE_F32)
  FEATURE("residual", s->residual = RESIDUAL_SEPARATE)
  FEATURE("residual in place", s->residual = RESIDUAL_IN_PLACE)
  FEATURE("out_scale", s->out_scale = 0.37f)
  FEATURE("everything scaled", s->out_scale = -1.7f, d->shared_inter = 24, s->shared_gate = true,
          s->residual = RESIDUAL_IN_PLACE)
  FEATURE("out in f32", d->out_dtype = CUMOE_F32)
  FEATURE("out in f32 with residual in place", d->out_dtype = CUMOE_F32, s->residual = RESIDUAL_IN_PLACE)
  FEATURE("pointers to each expert", s->form.per_expert = true)
  FEATURE("pointers to each half", s->form.per_expert = true, s->form.gate_order = CUMOE_GATE_UP_SEPARATE,
          s->input = INPUT_ROUTER)
  FEATURE("many experts", d->num_experts = 512, *r = cumoe_routing_qwen3(10), s->input = INPUT_ROUTER)
  FEATURE("one expert", d->num_experts = 1, r->top_k = 1)
  FEATURE("unreduced", d->flags = CUMOE_MOE_UNREDUCED)
  FEATURE("unreduced in f32", d->flags = CUMOE_MOE_UNREDUCED, d->out_dtype = CUMOE_F32)
  FEATURE("unreduced, hostile ids", d->flags = CUMOE_MOE_UNREDUCED, s->input = INPUT_IDS, s->pattern = PATTERN_HOSTILE)
  FEATURE("unreduced, identity experts", d->flags = CUMOE_MOE_UNREDUCED, r->identity_experts = 9)
  FEATURE("ungated", d->flags = CUMOE_MOE_UNGATED, s->form.gate_order = CUMOE_UNGATED)
  FEATURE("ungated relu2 with bias", d->flags = CUMOE_MOE_UNGATED, s->form.gate_order = CUMOE_UNGATED,
          d->act = CUMOE_ACT_RELU2, s->form.bias = CUMOE_F32)
  FEATURE("geglu erf", d->act = CUMOE_ACT_GELU_ERF)
  FEATURE("geglu tanh", d->act = CUMOE_ACT_GELU_TANH)
  FEATURE("relu", d->act = CUMOE_ACT_RELU)
  FEATURE("relu2", d->act = CUMOE_ACT_RELU2)
  FEATURE("bilinear", d->act = CUMOE_ACT_IDENTITY)
  FEATURE("clamped swiglu", d->act_limit = 0.6f)
  FEATURE("gpt-oss act, other alpha", d->act = CUMOE_ACT_SWIGLU_OAI, d->act_alpha = 1.f)
  FEATURE("all tokens by device count", s->device_count = true, s->device_tokens = 45)
  FEATURE("some tokens by device count", s->device_count = true, s->device_tokens = 17)
  FEATURE("no token by device count", s->device_count = true, s->device_tokens = 0)
  FEATURE("negative device count", s->device_count = true, s->device_tokens = -3)
  FEATURE("device count too large", s->device_count = true, s->device_tokens = 46)
  FEATURE("device count, shared, in place", s->device_count = true, s->device_tokens = 33, d->shared_inter = 40,
          s->shared_gate = true, s->residual = RESIDUAL_IN_PLACE, s->input = INPUT_ROUTER)
  FEATURE("device count, unreduced, ids", s->device_count = true, s->device_tokens = 7, d->flags = CUMOE_MOE_UNREDUCED,
          s->input = INPUT_IDS)
  return NULL;
}

const char *feature_name(int feature)
{
  return set_feature(&(layer_spec){0}, feature);
}

layer_spec feature_spec(int feature, int32_t dtype, int64_t tokens, uint64_t seed)
{
  enum { COUNTED = 45 };
  layer_spec s = layer_spec_new(dtype, tokens, 72, 56);
  s.desc.num_experts = 16;
  s.desc.routing = cumoe_routing_qwen2(4);
  s.input = INPUT_LOGITS;
  s.optional_outputs = true;
  s.pad = 1;
  s.seed = seed;
  (void)set_feature(&s, feature);
  if (s.device_tokens > COUNTED)
    s.device_tokens = (int32_t)tokens + 1;
  else if (s.device_tokens > 0)
    s.device_tokens = (int32_t)((s.device_tokens * tokens + COUNTED - 1) / COUNTED);
  return s;
}

void layer_random_form(rng *r, layer_spec *s)
{
  const bool ungated = s->desc.flags & CUMOE_MOE_UNGATED;
  s->form.gate_order = ungated ? CUMOE_UNGATED : (int32_t)(CUMOE_GATE_UP_CONCAT + rng_below(r, 5));
  s->form.up_major = (int32_t)(CUMOE_OUT_IN + rng_below(r, 2));
  s->form.down_major = (int32_t)(CUMOE_OUT_IN + rng_below(r, 2));
  s->form.bias = rng_below(r, 3) ? 0 : rng_below(r, 2) ? CUMOE_F32 : s->desc.dtype;
}

/* ---- on one context, or with a forced kernel ------------------------------------------------------- */

/* False: the case is over. */
static bool run_once(cumoe_context context, const layer_spec *s, const layer_inputs *in, layer_outputs *o)
{
  session run;
  session_open(&run, context, s, in);
  const cumoe_status status = session_forward(&run);
  if (status == CUMOE_OK) *o = session_collect(&run);
  session_close(&run);
  return case_served(context, status, "cumoe_moe_forward");
}

/* With two poisons, against the oracle; tokens in reverse order give the same outputs in reverse order. */
void run_layer_case(cumoe_context context, const char *name, const layer_spec *s)
{
  if (!case_wanted(s->desc.dtype)) return;
  case_begin("layer: %s, %s T %d E %d k %d H %d I %d order %d major %d %d seed %d", name,
             cumoe_dtype_name((cumoe_dtype)s->desc.dtype), (int)s->tokens, s->desc.num_experts, s->desc.routing.top_k,
             s->desc.hidden, s->desc.inter, s->form.gate_order, s->form.up_major, s->form.down_major, (int)s->seed);
  const layer_inputs in = layer_inputs_new(s);
  const int32_t fault = expected_fault(s, &in);
  layer_outputs got[PASSES], turned;
  for (int pass = 0; pass < PASSES; pass++) {
    set_poison(pass);
    if (!run_once(context, s, &in, &got[pass])) return;
    check_fault(context, NULL, fault);
  }
  check_outputs_same(&got[0], &got[1]);
  check_layer(s, &in, &got[0]);
  if (!s->device_count) {
    int64_t *order = scratch((size_t)s->tokens, sizeof *order);
    for (int64_t t = 0; t < s->tokens; t++) order[t] = s->tokens - 1 - t;
    const layer_inputs reversed = take_tokens(&in, order, s->tokens);
    if (!run_once(context, s, &reversed, &turned)) return;
    const layer_outputs want = permuted_outputs(s, &got[0], order);
    check_outputs_same(&want, &turned);
    check_fault(context, NULL, fault);
  }
  case_end();
}

void cases_layer(cumoe_context context)
{
  static const int32_t many[] = {65, 200, 97, 177, 360, 700}; /* past the tiles of every kernel */
  const bool large = on_device(context);
  const char *name;
  for (int i = 0; (name = feature_name(i)) != NULL; i++)
    for (int type = 0; type < 3; type++)
      for (int size = 0; size < (large ? 2 : 1); size++) {
        rng r = {(uint64_t)(i * 3 + type)};
        const int64_t tokens = size ? many[rng_below(&r, 6)] : case_tokens[rng_below(&r, 12)];
        layer_spec s = feature_spec(i, case_dtypes[type], tokens, (uint64_t)(i * 6 + type * 2 + size + 1));
        s.desc.hidden = (size ? 256 : 0) + 8 * (int32_t)(1 + rng_below(&r, 12));
        s.desc.inter = 8 * (int32_t)(1 + rng_below(&r, 12));
        if (s.desc.num_experts > 100) s.desc.hidden = 24, s.desc.inter = 16;
        if (size && i % 3 == type) continue; /* the large ones in two types */
        if (rng_below(&r, 2) && s.form.gate_order == CUMOE_GATE_UP_CONCAT) layer_random_form(&r, &s);
        run_layer_case(context, name, &s);
      }
}
