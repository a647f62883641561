/*
 * cumoe/stages.h: the stages of the layer, each usable alone. Contract as in cumoe/cumoe.h. What a stage writes may
 * overlap neither what it reads nor anything else it writes (INVALID_ARGUMENT), except combine's residual == out.
 *
 * Alignment: matrices of hidden or inter columns, and weights, to 16 bytes, base and ld; everything else to its element
 * where nothing is said. Errors of every function here: as in cumoe/moe.h.
 */
#ifndef CUMOE_STAGES_H
#define CUMOE_STAGES_H

#include "moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * logits[t, e] = x[t] . weight[e] + bias[e], accumulated in f32.
 * x [T, H] bf16, f16 or f32; weight [E, H] of x's dtype or f32; bias optional [1, E] f32 or x's dtype;
 * logits [T, E] f32. H a multiple of 8, x and weight aligned to 16 bytes (base and ld); E 1 .. CUMOE_MAX_EXPERTS.
 */
CUMOE_CHECKED cumoe_status cumoe_router(cumoe_context context, cumoe_view x, cumoe_view weight, cumoe_view bias,
                                        cumoe_view_mut logits, cumoe_stream stream);

/* The same; logits = logit_scale * round(x Wr^T + br), round: to logits_dtype, as in cumoe_routing. */
typedef struct cumoe_router_args {
  uint32_t size;
  int32_t logits_dtype;
  float logit_scale;
  uint32_t flags; /* 0 or CUMOE_MOE_BATCH_INVARIANT */
  cumoe_view x, weight, bias;
  cumoe_view device_tokens; /* optional [1, 1] i32: tokens really there, <= T; rows past it are not touched. One out of
                               range is clamped; the stages behind the router record it */
  cumoe_view_mut logits;
} cumoe_router_args;

CUMOE_CHECKED cumoe_status cumoe_router_with(cumoe_context context, const cumoe_router_args *args, cumoe_stream stream);

/*
 * ids and weights of every token from its logits, as described at cumoe_routing.
 * logits [T, E] f32, bf16 or f16, E including zero and identity experts; select_bias optional [1, E] f32;
 * ids [T, k] i32 or i64; weights [T, k] f32. Records NAN_LOGIT.
 */
CUMOE_CHECKED cumoe_status cumoe_gate(cumoe_context context, const cumoe_routing *routing, cumoe_view logits,
                                      cumoe_view select_bias, cumoe_view_mut ids, cumoe_view_mut weights,
                                      cumoe_stream stream);

/* The same, and what it has no argument for. */
typedef struct cumoe_gate_args {
  uint32_t size;
  int32_t reserved; /* 0 */
  cumoe_routing routing;
  cumoe_view logits;
  cumoe_view select_bias;  /* optional [1, E - always_experts] f32 */
  cumoe_view expert_scale; /* optional [1, E] f32 */
  cumoe_view chosen; /* optional [T, k] i32 or i64: ids that the caller chose, for their weights. Without select_bias
                               and ids; one that is no expert weighs 0 */
  cumoe_view device_tokens; /* optional [1, 1] i32: tokens really there, <= T; rows past it are not touched */
  cumoe_view_mut ids, weights;
} cumoe_gate_args;

CUMOE_CHECKED cumoe_status cumoe_gate_with(cumoe_context context, const cumoe_gate_args *args, cumoe_stream stream);

/*
 * The map: where each pair's row lies. Rows of one expert are consecutive and ordered by pair; expert e's rows
 * are offsets[e] .. offsets[e] + counts[e] - 1; offsets[e + 1] >= offsets[e] + counts[e].
 */
typedef struct cumoe_route {
  uint32_t size;
  int32_t reserved;         /* 0 */
  cumoe_view_mut counts;    /* [1, local_experts] i32 */
  cumoe_view_mut offsets;   /* [1, local_experts + 1] i32; the last one is the number of rows */
  cumoe_view_mut row_pair;  /* [1, T * k] i32: row -> pair (token * k + slot); entries past the last row undefined */
  cumoe_view_mut slot_row;  /* [T, k] i32, ld = k: pair -> row; -1 dropped, -2 identity expert */
  cumoe_view device_tokens; /* optional [1, 1] i32: tokens really there, <= T, for all stages that take the route; rows
                               past it are not touched, but for those of slot_row, which are -1 */
} cumoe_route;

/*
 * Builds `route` from ids [T, k] (i32 or i64) by counting, without sorting; deterministic. Uses the plan's expert
 * counts; expert_map as in cumoe_moe_args. Ids out of range and bad map entries drop the slot and are recorded.
 * workspace [1, bytes] u8, 16-byte aligned, bytes from cumoe_map_workspace, which are monotone in the tokens; absent
 * where these are 0 (few tokens).
 */
CUMOE_CHECKED cumoe_status cumoe_map(cumoe_plan plan, cumoe_view ids, cumoe_view expert_map, const cumoe_route *route,
                                     cumoe_view_mut workspace, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_map_workspace(cumoe_plan plan, int64_t tokens, size_t *bytes);

/*
 * h[r] = act(x[token(r)] Wgate^T + bgate) * (x[token(r)] Wup^T + bup) for every row r of the route: a grouped GEMM
 * that gathers the rows of x: no copy of it. x [T, H], h [>= T * k, I], both dtype. pair_weights is [T, k] f32
 * if the plan's routing has WEIGHT_ON_INPUT, else absent. Rows of h past the last row are not touched. Of formats
 * whose activations become codes or get another order (rows, act_order), here, in cumoe_up_permuted and in cumoe_down:
 * NOT_SUPPORTED, as a stage has no room for them; cumoe_moe_forward and cumoe_masked_forward serve these.
 */
CUMOE_CHECKED cumoe_status cumoe_up(cumoe_plan plan, cumoe_weights weights, cumoe_view x, const cumoe_route *route,
                                    cumoe_view pair_weights, cumoe_view_mut h, cumoe_stream stream);

/*
 * The permutation: rows[r] = x[token(r)] for every row r of the route, by route.slot_row. x [T, H], rows [>= T * k, H],
 * both dtype and aligned to 16 bytes, without overlap. Rows past the last one are not touched. For cumoe_up_permuted:
 * experts of about 100 rows and more multiply rows in order so much faster on GPUs of compute capability 9.0 that the
 * copy pays (in cumoe_moe_forward up makes one of its own in the workspace as it goes); elsewhere cumoe_up is as fast.
 */
CUMOE_CHECKED cumoe_status cumoe_permute(cumoe_plan plan, cumoe_view x, const cumoe_route *route, cumoe_view_mut rows,
                                         cumoe_stream stream);

/* cumoe_up with the rows of x in order, as cumoe_permute leaves them: rows [>= T * k, H], h as there. */
CUMOE_CHECKED cumoe_status cumoe_up_permuted(cumoe_plan plan, cumoe_weights weights, cumoe_view rows,
                                             const cumoe_route *route, cumoe_view pair_weights, cumoe_view_mut h,
                                             cumoe_stream stream);

/* y[r] = h[r] Wdown^T + bdown. h [>= T * k, I], y [>= T * k, H], both dtype. */
CUMOE_CHECKED cumoe_status cumoe_down(cumoe_plan plan, cumoe_weights weights, cumoe_view h, const cumoe_route *route,
                                      cumoe_view_mut y, cumoe_stream stream);

/*
 * out[t] = residual[t] + out_scale * (sum_j w[t,j] * y[slot_row[t,j]] + sigmoid(shared_logit[t]) * shared[t])
 * in f32, in slot order, rounded once. With CUMOE_MOE_UNREDUCED: out[t*k+j] = y[slot_row[t,j]], 0 if dropped. A slot
 * of weight 0 counts as dropped. With WEIGHT_ON_INPUT that is all that the weights say, also with UNREDUCED: other
 * slots weigh 1, and so do all without pair_weights.
 *
 * shared: what the shared expert makes of x, if there is one (a plan with shared_inter does not ask for it). By stages
 * that takes a plan of its own with one expert of shared_inter channels and top_k 1: map of ids [T, 1] which are all 0,
 * up, down, and y is in the order of tokens; shared_logit is the router's with shared_gate as weight
 * (test/examples/stages.c).
 */
typedef struct cumoe_combine_args {
  uint32_t size;
  float out_scale;          /* finite; 0 = 1 */
  cumoe_view y;             /* [>= T * k, H] dtype */
  cumoe_view pair_weights;  /* [T, k] f32; absent with UNREDUCED, optional with WEIGHT_ON_INPUT: see above */
  cumoe_view x;             /* [T, H] dtype: only for identity experts (required if the plan has any) */
  cumoe_view shared;        /* optional [T, H] dtype; not with UNREDUCED */
  cumoe_view shared_logit;  /* optional [T, 1] f32; with shared alone */
  cumoe_view residual;      /* optional [T, H] dtype of out; may be out itself. Or [1, H], to every token. Not with
                               UNREDUCED */
  cumoe_view device_tokens; /* optional [1, 1] i32; absent: the route's */
  cumoe_view_mut out;       /* [T, H] or [T * k, H] */
} cumoe_combine_args;

CUMOE_CHECKED cumoe_status cumoe_combine(cumoe_plan plan, const cumoe_route *route, const cumoe_combine_args *args,
                                         cumoe_stream stream);

/* ---- the masked form ------------------------------------------------------------------------------- */

/*
 * Rows as DeepEP's low-latency dispatch leaves them and DeepGEMM's masked kernels take them: [E, capacity, H], with the
 * counts on the device. For every local expert e and i < counts[e]
 *   out[e * capacity + i] = down(act(up(x[e * capacity + i])))
 * unweighted; other rows are neither read nor written. The launches are those of cumoe_up_permuted and cumoe_down, two
 * grids, chosen for `expected_rows`, and one more before each whose activations become codes or get another order; what
 * is slower for a bad guess is not wrong. Weights of any format. Of the plan counts what the experts are, not its
 * routing (WEIGHT_ON_INPUT: NOT_SUPPORTED). A count above capacity is the caller's fault: it leaves the next experts'
 * rows undefined, but no memory outside; one past all rows is cut, and recorded (ROUTE).
 */
typedef struct cumoe_masked_args {
  uint32_t size;
  int32_t reserved;         /* 0 */
  int64_t capacity;         /* rows that an expert has room for; local_experts * capacity <= CUMOE_MAX_PAIRS */
  int64_t expected_rows;    /* rows that an expert has on average, for the choice of kernels; 0, or past it: capacity */
  cumoe_view x;             /* [local_experts * capacity, H] dtype, aligned to 16 bytes */
  cumoe_view counts;        /* [1, local_experts] i32 */
  cumoe_view offsets;       /* [1, local_experts + 1] i32: e * capacity, which the caller writes once */
  cumoe_view_mut out;       /* [local_experts * capacity, H] dtype, aligned to 16 bytes */
  cumoe_view_mut workspace; /* [1, bytes] u8, 256-byte aligned, bytes from cumoe_masked_workspace */
} cumoe_masked_args;

CUMOE_CHECKED cumoe_status cumoe_masked_forward(cumoe_plan plan, cumoe_weights weights, const cumoe_masked_args *args,
                                                cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_masked_workspace(cumoe_plan plan, int64_t capacity, size_t *bytes);

/* ---- experimental: kernels as data ----------------------------------------------------------------- */
#ifdef CUMOE_EXPERIMENTAL

typedef struct cumoe_variant_info {
  uint32_t size;
  const char *op;   /* "router", "gate", "map_count", "map", "permute", "up", "down", "combine", "few_up", "few_down"
                       (inside cumoe_moe_forward alone), "quantize", "quantize_masked" (inside cumoe_masked_forward),
                       "encode_scales", "encode", "scan", "repack", "elementwise", "softmax", "norm"; the CPU device's
                       "matmul"; and those of attention, training and backward */
  const char *name; /* the kernel's name, as profilers show it */
  int32_t usable;   /* 1 if this context can run it */

  /* The row's columns, as kernels/variants.def explains them. Of what a row does not have: 0, or "" */
  const char *arch, *form;              /* "cpu", "any", "sm90"; the algorithm */
  int32_t x, w, y;                      /* cumoe_dtype of activations, weights, result; 0: chosen at run time */
  const char *scale;                    /* where scales of weights come in: "none", "out", "block" */
  const char *major;                    /* of the weights: "K", "N", "any" */
  int32_t bm, bn, bk, stages;           /* operations with tiles */
  int32_t units, columns, lanes, ahead; /* the others */
  int32_t cluster, warps, ctas, smem;
} cumoe_variant_info;

/* Rows of the kernel table, 0 .. count - 1. */
CUMOE_API int32_t cumoe_variant_count(void);
CUMOE_CHECKED cumoe_status cumoe_variant_get(cumoe_context context, int32_t index, cumoe_variant_info *info);

/*
 * From now on, calls on this context use this row wherever it can serve the operation, dtype and layout; other
 * operations choose as usual. Forcing one row of each operation is possible. A call that a forced row cannot serve
 * answers NOT_SUPPORTED: cumoe_moe_forward and a stage before anything is launched; a training call of several kernels
 * (cumoe_moe_forward_keep, cumoe_moe_backward, ...) chooses one after the other, so what comes before the refused one
 * has run: outputs are half done, and sums that it adds to (load, gradients) may hold its share. index -1 clears all. A
 * forced row of map, up, down or combine keeps cumoe_moe_forward from few_up and few_down, which stand for all four;
 * one of gate keeps few_up from doing what the gate does. Not to be changed while other threads launch.
 */
CUMOE_CHECKED cumoe_status cumoe_variant_force(cumoe_context context, int32_t index);

/* Limits of the context's tune file (host/tune/): where the layer's plan changes. */
typedef struct cumoe_limit_info {
  uint32_t size;
  const char *name, *unit, *text; /* "copy_rows", "rows an expert", what it decides */
  double value[5];                /* by class of weights: 16 bits, f32, e4m3, s8, 4 bits */
} cumoe_limit_info;

CUMOE_API int32_t cumoe_limit_count(void);
CUMOE_CHECKED cumoe_status cumoe_limit_get(cumoe_context context, int32_t index, cumoe_limit_info *info);

/* From now on, `value` on this context, for weights of a class, in the order above; not NaN. Not to be changed while
 * other threads launch. */
CUMOE_CHECKED cumoe_status cumoe_limit_set(cumoe_context context, int32_t index, int32_t weights, double value);

#endif

#ifdef __cplusplus
}
#endif
#endif
