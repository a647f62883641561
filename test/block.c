#include "block.h"

#include <stdio.h>
#include <string.h>

/* What an architecture calls things and where they lie. */
typedef struct architecture {
  const char *name, *experts_key, *inter_key;
  const char *router, *router_bias, *select_bias, *shared;
  const char *logits, *weights, *ids;
  int32_t gate_order, major, act;
  float act_limit;
  bool ordered;
  cumoe_routing (*routing)(int32_t top_k);
} architecture;

/* What most routers return, in this order. */
#define ROUTER_OUTPUTS .logits = "router_out0", .weights = "router_out1", .ids = "router_out2"
#define CONCAT         .gate_order = CUMOE_GATE_UP_CONCAT
#define ARCHITECTURE(name_, experts, inter, router_, ...)                                                              \
  {                                                                                                                    \
    .name = name_, .experts_key = experts, .inter_key = inter, .router = router_, __VA_ARGS__                          \
  }
static const architecture architectures[BLOCK_COUNT] = {
    ARCHITECTURE("mixtral", "num_local_experts", "intermediate_size", "gate.weight", ROUTER_OUTPUTS, CONCAT,
                 .major = CUMOE_OUT_IN, .ordered = true, .routing = cumoe_routing_mixtral),
    ARCHITECTURE("qwen3_moe", "num_local_experts", "moe_intermediate_size", "gate.weight", ROUTER_OUTPUTS, CONCAT,
                 .major = CUMOE_OUT_IN, .ordered = true, .routing = cumoe_routing_qwen3),
    ARCHITECTURE("deepseek_v3", "n_routed_experts", "moe_intermediate_size", "gate.weight", ROUTER_OUTPUTS, CONCAT,
                 .select_bias = "gate.e_score_correction_bias", .shared = "shared_experts", .major = CUMOE_OUT_IN),
    ARCHITECTURE("gpt_oss", "num_local_experts", "intermediate_size", "router.weight", ROUTER_OUTPUTS,
                 .router_bias = "router.bias", .gate_order = CUMOE_GATE_UP_INTERLEAVED, .major = CUMOE_IN_OUT,
                 .act = CUMOE_ACT_SWIGLU_OAI, .act_limit = 7, .ordered = true, .routing = cumoe_routing_gpt_oss),
    ARCHITECTURE("llama4", "num_local_experts", "intermediate_size", "router.weight", CONCAT, .shared = "shared_expert",
                 .logits = "router_out1", .major = CUMOE_IN_OUT, .ordered = true, .routing = cumoe_routing_llama4),
};

typedef struct opening {
  block *block;
  json config;
  char *error;
  size_t error_bytes;
} opening;

static bool complain(opening *o, const char *what, const char *name)
{
  snprintf(o->error, o->error_bytes, "%s: %s: %s", o->block->name, name, what);
  return false;
}

static bool config_int(opening *o, const char *key, int32_t *value)
{
  int64_t n;
  if (!json_int(json_find(o->config, key), &n) || n < 1 || n > 1 << 16)
    return complain(o, "missing in the configuration, or out of range", key);
  *value = (int32_t)n;
  return true;
}

/* name NULL: the architecture does not have it, which is no error. */
static bool take(opening *o, const char *name, const file_tensor **t)
{
  *t = name ? safetensors_find(&o->block->file, name) : NULL;
  return !name || *t || complain(o, "no such tensor", name);
}

static bool take_shaped(opening *o, const char *name, int64_t d0, int64_t d1, int64_t d2, const file_tensor **t)
{
  const int64_t want[] = {d0, d1, d2};
  int32_t dims = d2 ? 3 : d1 ? 2 : 1;
  if (!take(o, name, t)) return false;
  if (!*t) return true;
  bool same = (*t)->dims == dims;
  for (int32_t i = 0; same && i < dims; i++) same = (*t)->shape[i] == want[i];
  return same || complain(o, "another shape than the configuration says", name);
}

static bool deepseek_routing(opening *o, int32_t top_k, cumoe_routing *routing)
{
  int32_t groups, chosen;
  double scale;
  bool renormalize;
  if (!config_int(o, "n_group", &groups) || !config_int(o, "topk_group", &chosen)) return false;
  if (!json_number(json_find(o->config, "routed_scaling_factor"), &scale))
    return complain(o, "missing", "routed_scaling_factor");
  if (!json_bool(json_find(o->config, "norm_topk_prob"), &renormalize) || !renormalize)
    return complain(o, "not true", "norm_topk_prob");
  *routing = cumoe_routing_deepseek_v3(top_k, groups, chosen, (float)scale);
  return true;
}

static bool describe(opening *o, const architecture *a)
{
  cumoe_moe_desc *d = &o->block->desc;
  int32_t top_k, shared = 1;
  *d = (cumoe_moe_desc){.size = sizeof *d, .act = a->act, .act_limit = a->act_limit};
  if (!config_int(o, a->experts_key, &d->num_experts) || !config_int(o, "hidden_size", &d->hidden) ||
      !config_int(o, a->inter_key, &d->inter) || !config_int(o, "num_experts_per_tok", &top_k))
    return false;
  if (json_find(o->config, "n_shared_experts").begin && !config_int(o, "n_shared_experts", &shared)) return false;
  d->shared_inter = a->shared ? shared * d->inter : 0;
  if (!a->routing) return deepseek_routing(o, top_k, &d->routing);
  d->routing = a->routing(top_k);
  return true;
}

static bool take_shared(opening *o, const char *prefix)
{
  block *b = o->block;
  static const char *const part[] = {"gate_proj", "up_proj", "down_proj"};
  const file_tensor **to[] = {&b->shared_gate, &b->shared_up, &b->shared_down};
  int64_t h = b->desc.hidden, n = b->desc.shared_inter;
  char name[TENSOR_NAME];
  for (int i = 0; prefix && i < 3; i++) {
    snprintf(name, sizeof name, "%s.%s.weight", prefix, part[i]);
    if (!take_shaped(o, name, i < 2 ? n : h, i < 2 ? h : n, 0, to[i])) return false;
  }
  return true;
}

static bool take_tensors(opening *o, const architecture *a)
{
  block *b = o->block;
  int64_t e = b->desc.num_experts, h = b->desc.hidden, n = b->desc.inter, k = b->desc.routing.top_k, t;
  bool out_in = a->major == CUMOE_OUT_IN, bias = a->router_bias != NULL;
  if (!take(o, "input", &b->input)) return false;
  b->tokens = t = b->input->shape[0];
  return take_shaped(o, "input", t, h, 0, &b->input) && take_shaped(o, "output", t, h, 0, &b->output) &&
         take_shaped(o, a->logits, t, e, 0, &b->logits) && take_shaped(o, a->weights, t, k, 0, &b->weights) &&
         take_shaped(o, a->ids, t, k, 0, &b->ids) &&
         take_shaped(o, "experts.gate_up_proj", e, out_in ? 2 * n : h, out_in ? h : 2 * n, &b->gate_up) &&
         take_shaped(o, "experts.down_proj", e, out_in ? h : n, out_in ? n : h, &b->down) &&
         take_shaped(o, bias ? "experts.gate_up_proj_bias" : NULL, e, 2 * n, 0, &b->gate_up_bias) &&
         take_shaped(o, bias ? "experts.down_proj_bias" : NULL, e, h, 0, &b->down_bias) &&
         take_shaped(o, a->router, e, h, 0, &b->router) && take_shaped(o, a->router_bias, e, 0, 0, &b->router_bias) &&
         take_shaped(o, a->select_bias, e, 0, 0, &b->select_bias) && take_shared(o, a->shared);
}

bool block_open(int index, const char *folder, block *b, char *error, size_t error_bytes)
{
  const architecture *a = &architectures[index];
  char path[512], text[4096];
  *b = (block){.name = a->name, .gate_order = a->gate_order, .major = a->major, .ordered = a->ordered};
  opening o = {b, {NULL, NULL}, error, error_bytes};
  snprintf(path, sizeof path, "%s/%s.safetensors", folder, a->name);
  if (!safetensors_open(path, &b->file, error, error_bytes)) return false;
  if (json_string(json_find(b->file.metadata, "config"), text, sizeof text)) o.config = json_parse(text, strlen(text));
  bool good = o.config.begin ? describe(&o, a) && take_tensors(&o, a)
                             : complain(&o, "missing, or not JSON", "__metadata__.config");
  if (!good) block_close(b);
  return good;
}

void block_close(block *b)
{
  safetensors_close(&b->file);
  *b = (block){0};
}
