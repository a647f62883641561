/*
 * cumoe/moe.h: the Mixture-of-Experts layer: routing, descriptors, plan, weights, forward.
 *
 * Three lifetimes: a plan (shapes and meaning; immutable, shared by threads), weights (bound once per layer;
 * immutable, shared by threads), arguments (per call). Contract of the launching functions: see cumoe/cumoe.h.
 *
 * Errors of every function here: INVALID_ARGUMENT (null, shape, number, overlap, fields that contradict each other),
 * NOT_SUPPORTED, LAYOUT, STALE_HANDLE, WRONG_DEVICE, WRONG_DTYPE, MISALIGNED, OUT_OF_BOUNDS (past the end of an owned
 * buffer), WORKSPACE (absent or too small), OUT_OF_MEMORY (create and bind), CUDA, CUDA_STICKY. On failure what would
 * have been made is NULL.
 */
#ifndef CUMOE_MOE_H
#define CUMOE_MOE_H

#include "context.h"
#include "format.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUMOE_MAX_EXPERTS 1024       /* routed + zero + identity experts, and local experts */
#define CUMOE_MAX_PAIRS   2147482624 /* 2^31 - 1024: tokens times top_k; local experts times capacity */
#define CUMOE_MAX_TOP_K   32

/* ---- routing --------------------------------------------------------------------------------------- */

typedef enum cumoe_score {
  CUMOE_SCORE_SOFTMAX = 0,
  CUMOE_SCORE_SIGMOID = 1,
  CUMOE_SCORE_SQRT_SOFTPLUS = 2, /* sqrt(log(1 + exp(l))) */
  CUMOE_SCORE_IDENTITY = 3,      /* the logit itself */
  CUMOE_SCORE_SPARSEMIXER = 4 /* phimoe's: the k best logits; slot j weighs 1 / sum of exp(l[e] - l[ids[j]]) over those
                                    e that do not rank above its expert, so are in no slot before, and have
                                    (l[ids[j]] - l[e]) / max(|l[e]|, l[ids[j]]) <= 2 mixer_eps. No bias, no groups */
} cumoe_score;

typedef enum cumoe_group_score {
  CUMOE_GROUP_BEST = 0,    /* a group's best choice score */
  CUMOE_GROUP_BEST_TWO = 1 /* the sum of its two best */
} cumoe_group_score;

enum {
  CUMOE_ROUTE_RENORMALIZE = 1u << 0,      /* divide the k weights by max(their sum + renorm_eps, renorm_min) */
  CUMOE_ROUTE_SCORE_AFTER_TOPK = 1u << 1, /* softmax over the k chosen logits only. With SOFTMAX alone */
  CUMOE_ROUTE_WEIGHT_ON_INPUT = 1u << 2,  /* experts see weight * x; the combine does not weigh. Not with
                                             identity_experts (NOT_SUPPORTED) */
  CUMOE_ROUTE_CHOOSE_BY_LOGIT = 1u << 3   /* choice = l + select_bias: the score only weighs. Not with SOFTMAX, which
                                             has SCORE_AFTER_TOPK, nor SPARSEMIXER */
};

/*
 * From logits l[0 .. E-1] of a token to its ids and weights:
 *   0. l = logit_scale * round(x Wr^T + br), round: to logits_dtype; of logits that the library makes
 *   1. l = softcap * tanh(l / softcap)                        if softcap > 0
 *   2. s = score(l)                                           softmax over all experts unless SCORE_AFTER_TOPK
 *   3. choice = s + select_bias                               if there is a selection bias, else s
 *   4. with groups: experts are split into n_group equal runs; the topk_group groups with the best group
 *      score (of choice) stay
 *   5. ids = the top_k best by choice, in order of decreasing choice. Ties: the lower id. NaN ranks below all.
 *      With always_experts steps 3 to 5 leave out the last so many experts, which then are the ids of the last slots.
 *      Where the caller gives ids (cumoe_moe_args), these
 *   6. weights = s[ids] (without bias); softmax over the chosen l if SCORE_AFTER_TOPK
 *   7. renormalise, then multiply by routed_scale, then by expert_scale[ids]
 * Where step 3 has no bias and there are no groups, the choice is made on the given logits (same order, no rounding).
 * Else choices and sums of two are f32, each operation rounded once, in an order that all devices share: from the
 * same logits the CPU and every GPU choose the same experts. Groups of the same score: the lower one. With
 * SCORE_AFTER_TOPK and a bias, choice = l + bias. A +Inf logit counts as the largest finite float. A -Inf logit is
 * not capped and has no part in a softmax. A chosen NaN or -Inf logit weighs exactly 0, whatever the score. If the
 * divisor of step 7 is not above 0, the weights are 0. Weights are f32: where routed_scale takes one past the
 * largest, it is infinite.
 *
 * The floats are finite and not negative. Nested in cumoe_moe_desc, so it has a reserve and no size, also where it is
 * passed alone: see "Structs" in cumoe.h.
 */
typedef struct cumoe_routing {
  int32_t score;                /* cumoe_score */
  int32_t top_k;                /* 1 .. CUMOE_MAX_TOP_K, <= number of experts that can be chosen */
  int32_t n_group, topk_group;  /* 0: no groups; n_group divides the expert count, 1 <= topk_group <= n_group <= 64 */
  int32_t group_score;          /* cumoe_group_score */
  uint32_t flags;               /* CUMOE_ROUTE_* */
  float routed_scale;           /* 0 = 1 */
  float softcap;                /* 0 = none */
  float renorm_eps, renorm_min; /* with RENORMALIZE */
  int32_t zero_experts;         /* ids E .. E+z-1 contribute nothing */
  int32_t identity_experts;     /* ids E+z .. E+z+i-1 contribute weight * x, in each slice of a layer's experts */
  int32_t always_experts; /* the last so many of E are in every token's last slots (inkling's shared experts): < top_k;
                                   not with zero or identity experts, nor with a softmax over all, nor SPARSEMIXER */
  int32_t logits_dtype;   /* 0 = F32; or F16, BF16: what engines that multiply in that type choose by. Of 4,000
                                   tokens of bf16 and 128 experts, 111 choose otherwise for it */
  float logit_scale;      /* 0 = 1 */
  float mixer_eps;        /* of SPARSEMIXER */
  uint64_t reserved[8];   /* 0 */
} cumoe_routing;

static inline cumoe_routing cumoe_routing_make(cumoe_score score, int32_t top_k, uint32_t flags)
{
  cumoe_routing r = {(int32_t)score, top_k, 0, 0, 0, flags, 0.f, 0.f, 0.f, 0.f, 0, 0, 0, 0, 0.f, 0.f, {0}};
  return r;
}

/*
 * Presets, and the MoE blocks of transformers 5.23 that they are for, by the model_type of their config; what the
 * config changes is said behind. test/families.c holds every name to what the block itself answers, router and all, in
 * one forward.
 *
 *   mixtral, qwen3   mixtral minimax mellum hunyuan_v1_moe dbrx qwen3_next qwen3_5_moe qwen3_omni_moe qwen3_vl_moe
 *                    qwen4_exp; gemma4 diffusion_gemma: router_x (1), expert_scale; ernie4_5_moe ernie4_5_vl_moe:
 *                    renorm_min, select_bias; mistral4 mistral_large4: groups by BEST_TWO, renorm_eps 1e-20
 *   qwen2            qwen2_moe qwen3_moe olmoe flex_olmo (RENORMALIZE if norm_topk_prob) jamba
 *   gpt_oss          gpt_oss: router_bias; openai_privacy_filter: router_bias, routed_scale 1 / k; granitemoe
 *                    granitemoe_swa granitemoehybrid granitemoeshared aria cohere2_moe; jetmoe: residual of one row
 *   deepseek_v2      deepseek_v2 deepseek_ocr2 unlimited_ocr
 *   deepseek_v3      all with select_bias: deepseek_v3 deepseek_v32 glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa
 *                    glm5_next dots1 dots3_note exaone_moe axk1 axk2 solar_open mimo_v2_flash kimi_linear hy_v3 hy_v4
 *                    bailing_hybrid afmoe beam (out_scale); renorm_eps 0: minimax_m2 minimax_m3_vl laguna (softcap)
 *                    step3p7 (LIMIT_AFTER, out_scale) flint (no bias); 1e-6: lfm2_moe; nemotron_h: router_x where it is
 *                    latent (2); muse_spark (3): logit_scale, renorm_eps 1e-15; inkling2 (4)
 *   deepseek_v4      deepseek_v4: select_bias, or in the layers that choose by a token's number ids (5)
 *   kolibri1         kolibri1: select_bias, RENORMALIZE if norm_topk_prob
 *   inkling          inkling: select_bias, expert_scale for its global_scale; weights by pointers, shared experts last
 *   phimoe           phimoe
 *   llama4           llama4
 *   longcat_flash    longcat_flash: select_bias
 *   zaya             zaya: select_bias, logits (6)
 *
 * What stays the engine's: (1) the norm that its router has of its own; (2) projections before and behind the experts:
 * x is the projected one, router_x the one before; (3) as (2), and the norm behind each expert: the stages
 * (cumoe/stages.h), with the norm between down and combine, over y [rows, H]; (4) the activation: bind gate and up
 * once more as UNGATED with 2 I channels, up with ACT_IDENTITY, then its own activation before down; (5) looking the
 * number up: ids [T, k] = table[number]; (6) a router that is an MLP. Experts that drop tokens past a capacity
 * (nllb_moe, switch_transformers): ids of -1. doge's experts are vectors: no such layer. No family has a softmax over
 * groups.
 */
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

static inline cumoe_routing cumoe_routing_deepseek_v2(int32_t top_k, int32_t n_group, int32_t topk_group,
                                                      float routed_scale)
{
  cumoe_routing r = cumoe_routing_make(CUMOE_SCORE_SOFTMAX, top_k, 0);
  r.n_group = n_group;
  r.topk_group = topk_group;
  r.routed_scale = routed_scale;
  return r;
}
static inline cumoe_routing cumoe_routing_deepseek_v4(int32_t top_k, float routed_scale)
{
  cumoe_routing r = cumoe_routing_make(CUMOE_SCORE_SQRT_SOFTPLUS, top_k, CUMOE_ROUTE_RENORMALIZE);
  r.routed_scale = routed_scale;
  r.renorm_eps = 1e-20f;
  return r;
}
static inline cumoe_routing cumoe_routing_kolibri1(int32_t top_k)
{
  return cumoe_routing_make(CUMOE_SCORE_SIGMOID, top_k, CUMOE_ROUTE_CHOOSE_BY_LOGIT);
}
/* top_k of the routed experts, and `shared` ones behind them. */
static inline cumoe_routing cumoe_routing_inkling(int32_t top_k, int32_t shared, float routed_scale)
{
  cumoe_routing r = cumoe_routing_make(CUMOE_SCORE_SIGMOID, top_k + shared, CUMOE_ROUTE_RENORMALIZE);
  r.always_experts = shared;
  r.routed_scale = routed_scale;
  return r;
}
/* router_jitter_noise of its config */
static inline cumoe_routing cumoe_routing_phimoe(int32_t top_k, float jitter)
{
  cumoe_routing r = cumoe_routing_make(CUMOE_SCORE_SPARSEMIXER, top_k, 0);
  r.mixer_eps = jitter;
  return r;
}
static inline cumoe_routing cumoe_routing_longcat_flash(int32_t top_k, int32_t identity_experts, float routed_scale)
{
  cumoe_routing r = cumoe_routing_make(CUMOE_SCORE_SOFTMAX, top_k, 0);
  r.identity_experts = identity_experts;
  r.routed_scale = routed_scale;
  return r;
}
static inline cumoe_routing cumoe_routing_zaya(int32_t top_k)
{
  cumoe_routing r = cumoe_routing_make(CUMOE_SCORE_SOFTMAX, top_k, 0);
  r.zero_experts = 1;
  return r;
}

/* ---- plan ------------------------------------------------------------------------------------------ */

typedef enum cumoe_act {
  CUMOE_ACT_SILU = 0,      /* g / (1 + exp(-g)) */
  CUMOE_ACT_GELU_ERF = 1,  /* g/2 (1 + erf(g / sqrt 2)) */
  CUMOE_ACT_GELU_TANH = 2, /* g/2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) */
  CUMOE_ACT_RELU = 3,      /* max(g, 0) */
  CUMOE_ACT_RELU2 = 4,     /* max(g, 0)^2 */
  CUMOE_ACT_IDENTITY = 5,  /* g */
  CUMOE_ACT_SWIGLU_OAI = 6 /* gpt-oss: g * sigmoid(alpha g) * (u + 1), gated only */
} cumoe_act;

enum {
  CUMOE_MOE_UNGATED = 1u << 0,        /* h = act(x Wup^T): no gate projection */
  CUMOE_MOE_UNREDUCED = 1u << 1,      /* out is [T * k, H]: row t*k+j = y of slot j, not weighted, 0 for a dropped
                                    slot and, with WEIGHT_ON_INPUT, for one of weight 0; x for an identity expert's.
                                    out_scale has no part in it. Not with a shared expert */
  CUMOE_MOE_LIMIT_AFTER = 1u << 2,    /* act_limit bounds act(g), not g: step3p7. Not with SWIGLU_OAI */
  CUMOE_MOE_BATCH_INVARIANT = 1u << 3 /* a token's results do not depend, bit for bit, on what else is in the batch:
                                         kernels are chosen without T. On an H200, bf16, T 1 takes 1.3 to 2.6 times as
                                         long, T 8 1.07 to 1.35 times, many tokens no longer. Of forward and of the
                                         stages that take the plan, not of forward_keep and backward; the router's:
                                         cumoe_router_with */
};

/*
 * Shapes and meaning of a layer. Gated: h = act(g) * u; with act_limit > 0, first g = min(g, act_limit) and
 * u = clamp(u, -act_limit, act_limit); with LIMIT_AFTER, h = min(act(g), act_limit) * u instead. Ungated: h = act(u),
 * without act_limit. Biases, where bound, are added before the activation.
 */
typedef struct cumoe_moe_desc {
  uint32_t size;
  int32_t num_experts;   /* E: routed experts of the model, 1 .. CUMOE_MAX_EXPERTS */
  int32_t local_experts; /* experts whose weights are here; 0 = all. Fewer need args.expert_map */
  int32_t hidden;        /* H, a multiple of 8, up to 2^24; with formats of 16 or 32 (format.h) */
  int32_t inter;         /* I, likewise */
  int32_t shared_inter;  /* intermediate columns of the shared expert (several: their sum); 0 = none */
  int32_t dtype;         /* of x, h and weights without a format: CUMOE_BF16, CUMOE_F16 or CUMOE_F32 */
  int32_t out_dtype;     /* 0 = dtype; or CUMOE_F32 */
  int32_t act;           /* cumoe_act */
  float act_alpha;       /* finite; SWIGLU_OAI: 0 = 1.702 */
  float act_limit;       /* clamp, see above: finite, >= 0; 0 = none. Gated alone */
  uint32_t flags;        /* CUMOE_MOE_* */
  cumoe_routing routing;
  cumoe_format up_format, down_format; /* of gate and up, of down; all zero: weights of dtype. dtype BF16 or F16 */
  cumoe_format shared_up_format, shared_down_format; /* of the shared expert */
} cumoe_moe_desc;

typedef struct cumoe_plan_s *cumoe_plan;

/*
 * Says whether the layer is supported on `device` (as for cumoe_context_create; the answer needs no GPU), and
 * if not, why, in `why` (NUL-terminated, cut at why_bytes; may be NULL). CUMOE_OK or the status that
 * cumoe_plan_create would give.
 */
CUMOE_CHECKED cumoe_status cumoe_moe_supports(int32_t device, const cumoe_moe_desc *desc, char *why, size_t why_bytes);

/* Checks and keeps a copy of the description. Host memory only; no CUDA call. */
CUMOE_CHECKED cumoe_status cumoe_plan_create(cumoe_context context, const cumoe_moe_desc *desc, cumoe_plan *plan);

/* NULL is allowed. STALE_HANDLE if it was destroyed already, by itself or with its context. */
CUMOE_API cumoe_status cumoe_plan_destroy(cumoe_plan plan);

/*
 * Bytes of workspace that cumoe_moe_forward needs for `tokens` tokens, tokens * top_k at most CUMOE_MAX_PAIRS,
 * whichever routing input is used. Exact, monotone in tokens, 0 for 0 tokens. The workspace must be 256-byte aligned;
 * its content is irrelevant before and undefined after. One workspace per stream at a time. No CUDA call.
 */
CUMOE_CHECKED cumoe_status cumoe_plan_workspace(cumoe_plan plan, int64_t tokens, size_t *bytes);

/* ---- weights --------------------------------------------------------------------------------------- */

typedef enum cumoe_gate_order {
  CUMOE_GATE_ORDER_UNSET = 0,    /* always an error */
  CUMOE_GATE_UP_CONCAT = 1,      /* gate_up: I gate channels, then I up channels */
  CUMOE_UP_GATE_CONCAT = 2,      /* gate_up: up first */
  CUMOE_GATE_UP_INTERLEAVED = 3, /* gate_up: g0 u0 g1 u1 ... */
  CUMOE_UP_GATE_INTERLEAVED = 4, /* gate_up: u0 g0 u1 g1 ... */
  CUMOE_GATE_UP_SEPARATE = 5,    /* gate in `gate`, up in `up` */
  CUMOE_UNGATED = 6              /* only `up` */
} cumoe_gate_order;

typedef enum cumoe_major {
  CUMOE_MAJOR_UNSET = 0, /* always an error */
  CUMOE_OUT_IN = 1,      /* [E, out, in]: the reduction index is contiguous (checkpoints of nn.Linear) */
  CUMOE_IN_OUT = 2       /* [E, in, out]: the output channel is contiguous (transformers: gpt-oss, Llama 4) */
} cumoe_major;

/*
 * One projection of all local experts, in one of three forms, each matrix [out, in] (OUT_IN) or [in, out] (IN_OUT):
 *   a stack    data is all experts' matrices one below the other, [experts * rows, cols], or says expert 0's alone;
 *   strided    data is expert 0's matrix, and expert e starts e * expert_stride elements further;
 *   pointers   per_expert is a host array of `experts` device pointers, none null (read during bind), and data, with
 *              data.data NULL, states the shape, ld and dtype of each.
 * Alignment: base, rows and expert_stride to 16 bytes. expert_stride is at least one matrix, or 0: of the other forms.
 * SEPARATE: gate and up are of one form, ld, dtype and expert_stride, and so are what they have of biases, scales and
 * zero points (LAYOUT). `bias` is [local_experts, out] (ld between experts), f32 or the activations' dtype, channel
 * order as the weights; 0 where it is absent.
 *
 * With a format (cumoe/format.h) data is in units of storage: E4M3, I8 or U8 [out, in]; codes of 4 bits U8
 * [out, in / 2] or, where the format's word is 4, I32 [out, in / 8]. `scale` is an array of the same kind, a stack,
 * strided or by pointers, of matrices [blocks along out, blocks along in] of the format's scale type:
 * ceil((origin + out) / block) x ceil((origin + in) / block), 1 where a block is 0 (all of the axis). gate_up
 * concatenates the rows of gate and of up, each with its own blocks, unless `joined`; interleaved, rows are those of
 * gate_up. `zero` likewise, I32 [ceil(out / 8), blocks along in], or with ZERO_VALUES like scale. `global` is
 * [experts, halves] f32, or [experts, 1] for both halves: gate, up. `input_scale` is f32 on the device, [1, 1], or
 * [experts, 1] with ROWS_STATIC_EXPERT. `order` is an array of I32 [1, in], the same for gate and up: each of
 * 0 .. in - 1 once; what lies outside counts as the nearest of these. Scales may be aligned to their element alone.
 */
typedef struct cumoe_array {
  cumoe_view data;
  const void *const *per_expert;
  int64_t expert_stride;
} cumoe_array;

typedef struct cumoe_projection {
  cumoe_view data;
  const void *const *per_expert;
  int64_t expert_stride; /* strided form: elements; 0 = a stack (or expert 0 of a packed one) */
  cumoe_view bias;
  cumoe_array scale;
  cumoe_array zero;       /* with the format's zero */
  cumoe_view global;      /* with the format's global */
  cumoe_view input_scale; /* with ROWS_STATIC, ROWS_STATIC_EXPERT */
  cumoe_array order;      /* with the format's act_order */
  uint64_t reserved[14];  /* 0 */
} cumoe_projection;

typedef struct cumoe_weights_desc {
  uint32_t size;
  int32_t experts;          /* local_experts of the plan; 1 for a shared expert */
  int32_t hidden, inter;    /* H; I or shared_inter */
  int32_t gate_order;       /* cumoe_gate_order */
  int32_t up_major;         /* cumoe_major of gate_up, gate, up */
  int32_t down_major;       /* cumoe_major of down */
  int32_t reserved;         /* 0 */
  cumoe_projection gate_up; /* [2I, H] or [H, 2I]: concatenated and interleaved orders */
  cumoe_projection gate;    /* [I, H] or [H, I]: SEPARATE */
  cumoe_projection up;      /* SEPARATE and UNGATED */
  cumoe_projection down;    /* [H, I] or [I, H] */
  cumoe_format up_format;   /* of gate and up; the plan's */
  cumoe_format down_format;
  int32_t dtype;        /* with formats: of the activations, BF16 or F16; else 0, or the weights' own */
  int32_t reserved_end; /* 0 */
} cumoe_weights_desc;

typedef struct cumoe_weights_s *cumoe_weights;

/*
 * Records where the weights lie; copies no weights. The first ones of a format load its kernels, which takes
 * milliseconds. With per_expert arrays the pointer tables are copied to the device, by CUDA's default stream, and the
 * call waits for that copy. Not a call for a thread that captures.
 * Projections that gate_order does not name must be absent (all zero).
 * Views of owned buffers (cumoe/buffer.h): once one of these was freed, released or had its handle ended in another
 * way, every call with the weights answers STALE_HANDLE and names the projection. Foreign memory is the caller's to
 * keep.
 */
CUMOE_CHECKED cumoe_status cumoe_weights_bind(cumoe_context context, const cumoe_weights_desc *desc,
                                              cumoe_weights *weights);

/* NULL is allowed. No launched work that uses the weights may be outstanding. STALE_HANDLE as for plans. */
CUMOE_API cumoe_status cumoe_weights_destroy(cumoe_weights weights);

/* ---- forward --------------------------------------------------------------------------------------- */

/*
 * Arguments of one call. T = x.rows, T * top_k at most CUMOE_MAX_PAIRS; x says its cols and dtype also where it has no
 * rows: an x that is all zero is refused, not taken for T = 0. What has a row a token may then be absent. Alignment: x,
 * router_x, router_weight, shared_gate, out and residual to 16 bytes, base and ld; the workspace to 256; everything
 * else to its element. Routing input in exactly one of three forms:
 *   router_weight (+ router_bias)  the library computes the logits from x
 *   logits                         given by the caller
 *   ids + weights                  routed by the caller; `select_bias` must be absent
 * or ids with one of the first two and without weights: chosen by the caller, weighed by the library (deepseek_v4's
 * layers that choose by a token's number). Without select_bias and ids_out.
 * ids: -1 drops the slot silently; any other id out of range drops it and records EXPERT_ID. Duplicates are legal.
 * Outputs and the workspace may not overlap inputs, each other or the bound weights and biases (INVALID_ARGUMENT),
 * except residual == out (accumulate in place); memory between the matrices of two experts is free. At T = 0 nothing is
 * written, counts_out included.
 */
typedef struct cumoe_moe_args {
  uint32_t size;
  uint32_t flags;             /* 0 */
  cumoe_view x;               /* [T, H] dtype */
  cumoe_view device_tokens;   /* optional [1, 1] i32: tokens really there, <= T; rows past it are not touched */
  cumoe_view router_weight;   /* [Er, H] dtype or f32; Er = num_experts + zero_experts + identity_experts */
  cumoe_view router_bias;     /* optional [1, Er] dtype or f32 */
  cumoe_view logits;          /* [T, Er] f32, bf16 or f16 */
  cumoe_view ids;             /* [T, k] i32 or i64 */
  cumoe_view weights;         /* [T, k] f32 */
  cumoe_view select_bias;     /* optional [1, Er - always_experts] f32: added to the score for the choice only */
  cumoe_view expert_map;      /* optional [1, E] i32: global expert -> local expert, -1 = not here */
  cumoe_weights shared;       /* shared expert; required if and only if the plan has shared_inter */
  cumoe_view shared_gate;     /* optional [1, H] dtype or f32: the shared expert is scaled by sigmoid(x . gate) */
  cumoe_view residual;        /* optional [T, H], dtype of out: added once, unscaled; not with UNREDUCED. Or [1, H], to
                                 every token: a bias of the output */
  float out_scale;            /* finite; 0 = 1: scales routed and shared experts, not the residual */
  int32_t reserved;           /* 0 */
  cumoe_view_mut out;         /* [T, H], or [T * k, H] with CUMOE_MOE_UNREDUCED */
  cumoe_view_mut ids_out;     /* optional [T, k] i32 or i64; -1 never occurs in the library's own routing */
  cumoe_view_mut weights_out; /* optional [T, k] f32 */
  cumoe_view_mut counts_out;  /* optional [1, local_experts] i32: rows of each local expert in this call */
  cumoe_view_mut load;        /* optional [1, local_experts] i64: counts are added to it */
  cumoe_view_mut workspace;   /* [1, bytes] u8 */
  cumoe_view router_x;     /* optional [T, Hr] dtype, as x: what router_weight, [Er, Hr] then, multiplies instead of x
                                 (a norm of the router's own, experts in a latent space). Hr a multiple of 8 */
  cumoe_view expert_scale; /* optional [1, Er] f32: of weights that the library makes */
} cumoe_moe_args;

/*
 * What a forward of `tokens` tokens launches, in words: a line a kernel with its name, its grid and how it works
 * together with the others, and where everything lies in the workspace, in bytes from its start. For reading: the words
 * may change. The first line tells the GPU and whether it has kernels made for its architecture or runs the portable
 * ones. A forward that makes its logits from x, with aligned operands and a router of the plan's dtype; `weights` says
 * how the weights lie, NULL: OUT_IN behind one base pointer, as the shared expert's in any case. `text` is
 * NUL-terminated and cut at `bytes`; 4096 hold all. tokens: 1 or more. NOT_SUPPORTED, as forward would answer, where a
 * forced kernel cannot serve. No CUDA call.
 */
CUMOE_CHECKED cumoe_status cumoe_plan_describe(cumoe_plan plan, cumoe_weights weights, int64_t tokens, char *text,
                                               size_t bytes);

/*
 * Accuracy. Every element lies within a bound of what exact arithmetic makes of the operands as they are stored. With
 * r = 2^-24, the roundoff of f32, and sums over k:
 *   product sum    (2 ceil(K / 16) + 8) r sum |a w|, and what a brings: sum (bound of a) |w|
 *                  weights with scales: + 4 r sum |a w|; of U4, which are rounded to f16 or bf16 (v = 2^-11, 2^-8):
 *                  + min(v sum |a w|, 8 v sqrt(sum (a w)^2)) + 32 r sum |a w|, in f16 + 2^-25 sum |a| of weights
 *                  below 2^-14. On compute capability 9.0 besides: E4M3 times E4M3, as the adder keeps 14 bits,
 *                  + 24 2^-14 sqrt(sum over runs of 128 k of (sum |a w|)^2), and in bf16 E2M1 with scales of E8M0,
 *                  which may go that way as well, the same of runs of 32 k; U4, and E2M1 with scales of E8M0, whose
 *                  activations may be multiplied in fixed point, + 2^-15 sum over runs of 128 k of (largest |a|)
 *                  (sum |w|)
 *   activation     slope (bound of g) |u| + 4 r |act(g)| (GELU: |g|) + |act(g)| (bound of u) + 2 r |h|; the slope is at
 *                  most 1.13, of RELU2 2 |g|
 *   h, y           rounded to dtype once, which adds nothing but half a step of it: 2^-8 of |h| in bf16, 2^-11 in f16
 *   gate weights   16 r of themselves, and what the error of a logit makes of them
 *   combine        (k + 1) r sum |w y|, and what w and y bring; rounded to out_dtype once
 * test/oracle.c carries these bounds along from the operands to out, and every element is held to them, of f32, f16,
 * bf16 and of all formats: by test/forward and test/formats, and for each kernel by test/variants and test/rows.
 *
 * The same bits. From the same operands: every call, whatever ran before or beside it, in a graph or not (test/graph);
 * tokens in another order have the same results in that order (test/forward). ids from the same logits: on every
 * device, CPU and GPU, and in every version (test/variants). A token's results in any batch: with BATCH_INVARIANT
 * (test/masked), of the same device and version. Not promised: across GPU models, versions, layouts and formats, nor
 * between the stages and forward.
 *
 * Logits are f32 and not rounded; engines whose router is a matmul in bf16 round them, and with them choose other
 * experts where two are near: 111 of 4,000 tokens of 128 experts, in one measurement. routing.logits_dtype does so too.
 *
 * The whole layer on `stream`:
 *   out[t] = residual[t] + out_scale * (sum_j weights[t,j] * expert(ids[t,j])(x[t]) + gate(x[t]) * shared(x[t]))
 * Products accumulate in f32; h is rounded to dtype; expert outputs are rounded to dtype; the sum over slots runs in
 * f32 in slot order and is rounded once. A slot of weight 0 contributes exactly 0. With WEIGHT_ON_INPUT the weight
 * multiplies the f32 sum of products of gate and up, before their biases: the product weight * x is never rounded
 * itself. What is summed or weighed in f32 is infinite past the largest float (3.4e38), also where later terms would
 * cancel it.
 */
CUMOE_CHECKED cumoe_status cumoe_moe_forward(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args,
                                             cumoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
