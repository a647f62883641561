#ifndef CUMOE_MOE_H
#define CUMOE_MOE_H 
#include "context.h"
#ifdef __cplusplus
extern "C" {
#endif
#define CUMOE_MAX_EXPERTS 1024
#define CUMOE_MAX_PAIRS 2147482624
#define CUMOE_MAX_TOP_K 32
typedef enum cumoe_score {
  CUMOE_SCORE_SOFTMAX = 0,
  CUMOE_SCORE_SIGMOID = 1,
  CUMOE_SCORE_SQRT_SOFTPLUS = 2,
  CUMOE_SCORE_IDENTITY = 3
} cumoe_score;
typedef enum cumoe_group_score {
  CUMOE_GROUP_BEST = 0,
  CUMOE_GROUP_BEST_TWO = 1
} cumoe_group_score;
enum {
  CUMOE_ROUTE_RENORMALIZE = 1u << 0,
  CUMOE_ROUTE_SCORE_AFTER_TOPK = 1u << 1,
  CUMOE_ROUTE_WEIGHT_ON_INPUT = 1u << 2
};
typedef struct cumoe_routing {
  int32_t score;
  int32_t top_k;
  int32_t n_group, topk_group;
  int32_t group_score;
  uint32_t flags;
  float routed_scale;
  float softcap;
  float renorm_eps, renorm_min;
  int32_t zero_experts;
  int32_t identity_experts;
  uint64_t reserved[10];
} cumoe_routing;
static inline cumoe_routing cumoe_routing_make(cumoe_score score, int32_t top_k, uint32_t flags)
{
  cumoe_routing r = {(int32_t)score, top_k, 0, 0, 0, flags, 0.f, 0.f, 0.f, 0.f, 0, 0, {0}};
  return r;
}
static inline cumoe_routing cumoe_routing_mixtral(int32_t top_k)
{
  return cumoe_routing_make(CUMOE_SCORE_SOFTMAX, top_k, CUMOE_ROUTE_RENORMALIZE);
}
static inline cumoe_routing cumoe_routing_qwen3(int32_t top_k)
{
  return cumoe_routing_make(CUMOE_SCORE_SOFTMAX, top_k, CUMOE_ROUTE_RENORMALIZE);
}
static inline cumoe_routing cumoe_routing_qwen2(int32_t top_k)
{
  return cumoe_routing_make(CUMOE_SCORE_SOFTMAX, top_k, 0);
}
static inline cumoe_routing cumoe_routing_gpt_oss(int32_t top_k)
{
  return cumoe_routing_make(CUMOE_SCORE_SOFTMAX, top_k, CUMOE_ROUTE_SCORE_AFTER_TOPK);
}
static inline cumoe_routing cumoe_routing_llama4(int32_t top_k)
{
  return cumoe_routing_make(CUMOE_SCORE_SIGMOID, top_k, CUMOE_ROUTE_WEIGHT_ON_INPUT);
}
static inline cumoe_routing cumoe_routing_deepseek_v3(int32_t top_k, int32_t n_group, int32_t topk_group,
                                                      float routed_scale)
{
  cumoe_routing r = cumoe_routing_make(CUMOE_SCORE_SIGMOID, top_k, CUMOE_ROUTE_RENORMALIZE);
  r.n_group = n_group;
  r.topk_group = topk_group;
  r.group_score = CUMOE_GROUP_BEST_TWO;
  r.routed_scale = routed_scale;
  r.renorm_eps = 1e-20f;
  return r;
}
typedef enum cumoe_act {
  CUMOE_ACT_SILU = 0,
  CUMOE_ACT_GELU_ERF = 1,
  CUMOE_ACT_GELU_TANH = 2,
  CUMOE_ACT_RELU = 3,
  CUMOE_ACT_RELU2 = 4,
  CUMOE_ACT_IDENTITY = 5,
  CUMOE_ACT_SWIGLU_OAI = 6
} cumoe_act;
enum {
  CUMOE_MOE_UNGATED = 1u << 0,
  CUMOE_MOE_UNREDUCED = 1u << 1
};
typedef struct cumoe_moe_desc {
  uint32_t size;
  int32_t num_experts;
  int32_t local_experts;
  int32_t hidden;
  int32_t inter;
  int32_t shared_inter;
  int32_t dtype;
  int32_t out_dtype;
  int32_t act;
  float act_alpha;
  float act_limit;
  uint32_t flags;
  cumoe_routing routing;
} cumoe_moe_desc;
typedef struct cumoe_plan_s *cumoe_plan;
CUMOE_CHECKED cumoe_status cumoe_moe_supports(int32_t device, const cumoe_moe_desc *desc, char *why, size_t why_bytes);
CUMOE_CHECKED cumoe_status cumoe_plan_create(cumoe_context context, const cumoe_moe_desc *desc, cumoe_plan *plan);
CUMOE_API cumoe_status cumoe_plan_destroy(cumoe_plan plan);
CUMOE_CHECKED cumoe_status cumoe_plan_workspace(cumoe_plan plan, int64_t tokens, size_t *bytes);
typedef enum cumoe_gate_order {
  CUMOE_GATE_ORDER_UNSET = 0,
  CUMOE_GATE_UP_CONCAT = 1,
  CUMOE_UP_GATE_CONCAT = 2,
  CUMOE_GATE_UP_INTERLEAVED = 3,
  CUMOE_UP_GATE_INTERLEAVED = 4,
  CUMOE_GATE_UP_SEPARATE = 5,
  CUMOE_UNGATED = 6
} cumoe_gate_order;
typedef enum cumoe_major {
  CUMOE_MAJOR_UNSET = 0,
  CUMOE_OUT_IN = 1,
  CUMOE_IN_OUT = 2
} cumoe_major;
typedef struct cumoe_projection {
  cumoe_view data;
  const void *const *per_expert;
  int64_t expert_stride;
  cumoe_view bias;
  uint64_t reserved[50];
} cumoe_projection;
typedef struct cumoe_weights_desc {
  uint32_t size;
  int32_t experts;
  int32_t hidden, inter;
  int32_t gate_order;
  int32_t up_major;
  int32_t down_major;
  int32_t reserved;
  cumoe_projection gate_up;
  cumoe_projection gate;
  cumoe_projection up;
  cumoe_projection down;
} cumoe_weights_desc;
typedef struct cumoe_weights_s *cumoe_weights;
CUMOE_CHECKED cumoe_status cumoe_weights_bind(cumoe_context context, const cumoe_weights_desc *desc,
                                              cumoe_weights *weights);
CUMOE_API cumoe_status cumoe_weights_destroy(cumoe_weights weights);
typedef struct cumoe_moe_args {
  uint32_t size;
  uint32_t flags;
  cumoe_view x;
  cumoe_view device_tokens;
  cumoe_view router_weight;
  cumoe_view router_bias;
  cumoe_view logits;
  cumoe_view ids;
  cumoe_view weights;
  cumoe_view select_bias;
  cumoe_view expert_map;
  cumoe_weights shared;
  cumoe_view shared_gate;
  cumoe_view residual;
  float out_scale;
  int32_t reserved;
  cumoe_view_mut out;
  cumoe_view_mut ids_out;
  cumoe_view_mut weights_out;
  cumoe_view_mut counts_out;
  cumoe_view_mut load;
  cumoe_view_mut workspace;
} cumoe_moe_args;
CUMOE_CHECKED cumoe_status cumoe_moe_forward(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args,
                                             cumoe_stream stream);
#ifdef __cplusplus
}
#endif
#endif
