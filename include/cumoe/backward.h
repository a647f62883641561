/*
 * cumoe/backward.h: gradients of the layer. Contract as in cumoe/cumoe.h. A member of the archive of its own: a program
 * that only runs layers forward has nothing of it.
 *
 * On every device. Weights with a format (cumoe/format.h): NOT_SUPPORTED.
 *
 * What is differentiated is the layer as cumoe_moe_forward describes it, with roundings taken for exact and the choice
 * of experts for a constant. With g = d out * out_scale (UNREDUCED: d out), per pair (t, j) of row r with weight w:
 *
 *   z[r]       = gate and up before the activation, rounded to dtype: kept, or made again
 *   d h[r]     = g[t] Wdown                            f32; on CUDA rounded to dtype
 *   h[r]       = act(z[r])                             rounded to dtype
 *   d z[r]     = w act'(z[r]) d h[r]                   rounded to dtype; WEIGHT_ON_INPUT: without w
 *   d w[t, j]  = <d h[r], h[r]> + <g[t], bias of down> f32; WEIGHT_ON_INPUT: <d z[r] Wup, x[t]>
 *   d Wdown[e] = sum over rows of e of w g[t] h[r]^T   WEIGHT_ON_INPUT: without w
 *   d Wup[e]   = sum over rows of e of d z[r] x[t]^T   gate likewise; WEIGHT_ON_INPUT: of w d z[r] x[t]^T
 *   d x[t]     = sum over slots of d z[r] Wup          each rounded to dtype; WEIGHT_ON_INPUT: times w
 *              + what an identity expert (w g[t]), the shared expert, its gate and the router bring; rounded once
 *
 * At the bounds of a clamp the slope is that inside, at the kink of RELU and RELU2 it is 0. A pair that is dropped, and
 * one of weight 0, has no part in anything: its d w is exactly 0. A NaN or Inf in one token's x or d out reaches what
 * is that token's, and those gradients of weights that the token has a part in.
 *
 * On the CPU device sums run in double, in an order that depends on nothing but the operands, and are rounded once. On
 * CUDA they run in f32 (of the gate in double), in an order of the shape and the GPU's model: the same operands give
 * the same bits. Of 16 bits products run on tensor cores, and d out of another type, d h[r], w h[r] of d Wdown and w
 * x[t] of d Wup are rounded to dtype before they are multiplied; d logits, of a router of bf16, to two bf16, within
 * 2^-17 of them, for d_router_weight, and to one for d x. From the operands to a result there are four roundings to
 * dtype at most, each within half an ulp of one term, and f32 sums, which are far below: a test holds gradients within
 * 8 u of the CPU device's largest, 2^-16 of f32.
 */
#ifndef CUMOE_BACKWARD_H
#define CUMOE_BACKWARD_H

#include "stages.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CUMOE_BACKWARD_ACCUMULATE = 1u << 0 /* gradients that sum over tokens are added to what is there (micro-batches): of
                                         weights and biases, router_*, expert_scale, shared_gate, residual */
};

/*
 * What backward is told and asked for; what is absent is not computed. Shapes, and dtype of what has none stated, as in
 * cumoe_moe_args. Alignment: d_out, d_x and d_router_x to 16 bytes, base and ld; everything else to its element where
 * nothing is said. Errors as in cumoe/moe.h.
 *
 * d_weights and d_shared are weights bound (cumoe_weights_bind) to the memory of gradients, which is written: of the
 * plan's dtype or f32, in any order, major and form, whatever those of the weights are; with biases where those of
 * biases are wanted, also where the weights have none. No two experts may share memory there. The gradient of an expert
 * without rows is exactly 0, or untouched with ACCUMULATE.
 *
 * Where the caller routed (args.ids + args.weights) d_pair_weights is where gradients end, and d_logits, d_router_*,
 * d_expert_scale, balance, z and losses are refused. The gradient of a residual [T, H] is d_out itself.
 *
 * Losses of the gate, of which the gradient is added to d logits, E being the experts that are chosen among
 * (always_experts are not) and l the capped logits:
 *   balance * E * sum_e f_e P_e   f_e: the part of all slots on these experts that chose e, whatever its logit, a
 *                                 constant; P_e: the mean
 *                                 over tokens of softmax(l)_e, of SIGMOID and SQRT_SOFTPLUS of s_e / sum s
 *   z * mean over tokens of log(sum_e exp(l_e))^2, of all columns
 */
typedef struct cumoe_moe_grads {
  uint32_t size;
  uint32_t flags;                 /* 0 or CUMOE_BACKWARD_ACCUMULATE */
  float balance, z;               /* coefficients of the losses: finite; 0: none */
  cumoe_view d_out;               /* [T, H], or [T * k, H] with UNREDUCED, of out's dtype */
  cumoe_view kept;                /* optional [1, bytes] u8: what cumoe_moe_forward_keep left, of the same args */
  cumoe_weights d_weights;        /* NULL: not wanted */
  cumoe_weights d_shared;         /* likewise */
  cumoe_view_mut d_x;             /* [T, H] dtype or f32 */
  cumoe_view_mut d_router_x;      /* [T, Hr] dtype or f32, where args.router_x is given */
  cumoe_view_mut d_router_weight; /* [Er, H] or [Er, Hr] dtype or f32 */
  cumoe_view_mut d_router_bias;   /* [1, Er] dtype or f32 */
  cumoe_view_mut d_logits;        /* [T, Er] f32: of args.logits, or of those that were made from x, scaled */
  cumoe_view_mut d_pair_weights;  /* [T, k] f32: of the weights of the slots */
  cumoe_view_mut d_expert_scale;  /* [1, Er] f32, where args.expert_scale is given */
  cumoe_view_mut d_shared_gate;   /* [1, H] dtype or f32, where args.shared_gate is given */
  cumoe_view_mut d_residual;      /* [1, H] dtype or f32, where args.residual has one row: the sum over tokens */
  cumoe_view_mut losses;          /* [1, 2] f32: balance, z, coefficients included */
  cumoe_view_mut workspace;       /* [1, bytes] u8, 256-byte aligned, bytes from cumoe_moe_backward_workspace */
} cumoe_moe_grads;

/* Bytes of what cumoe_moe_forward_keep leaves of `tokens` tokens: routing and pre-activations. Exact, monotone, 0 for 0
 * tokens; no CUDA call. */
CUMOE_CHECKED cumoe_status cumoe_moe_kept(cumoe_plan plan, int64_t tokens, size_t *bytes);

/*
 * cumoe_moe_forward, which also leaves what backward needs in `kept` [1, bytes] u8, 256-byte aligned, of cumoe_moe_kept
 * bytes or more; it overlaps nothing else. Arguments and errors as there, and args.workspace of the same size. What is
 * kept of g and u is rounded to dtype; h is made of that or of the sums themselves, whichever the kernel has. So with
 * dtype bf16 or f16 `out` may differ from cumoe_moe_forward's by one rounding of g and u, and where one is beyond f16's
 * range what is kept of it is infinite, and `out` may be. BATCH_INVARIANT does not hold here: kernels are chosen with
 * T.
 */
CUMOE_CHECKED cumoe_status cumoe_moe_forward_keep(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args,
                                                  cumoe_view_mut kept, cumoe_stream stream);

/* Bytes of workspace of cumoe_moe_backward, with what was kept or (kept 0) without: then routing and pre-activations
 * are made again, the same bits. On CUDA there are copies of x and d out in the order of rows, each expert's filled up
 * to a multiple of 64. Exact, monotone, 0 for 0 tokens; no CUDA call. INVALID_ARGUMENT if those rows pass
 * CUMOE_MAX_PAIRS. */
CUMOE_CHECKED cumoe_status cumoe_moe_backward_workspace(cumoe_plan plan, int64_t tokens, int32_t kept, size_t *bytes);

/*
 * Gradients of one call of cumoe_moe_forward, whose `args` these are, with the operands as they were; its outputs
 * (out, ids_out, weights_out, counts_out, load) and its workspace are neither read nor written, and may be absent. With
 * args.device_tokens rows past the count are not touched and have no part in any sum. What is written may overlap
 * neither what is read nor anything else that is written. T = 0: sums over tokens are zeros, or have nothing added.
 */
CUMOE_CHECKED cumoe_status cumoe_moe_backward(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args,
                                              const cumoe_moe_grads *grads, cumoe_stream stream);

/* ---- stages ---------------------------------------------------------------------------------------- */

/*
 * From d weights to d logits: what cumoe_gate and cumoe_gate_with did, from the ids that they chose or were given. An
 * id that names no column, and a slot of a NaN or -Inf logit (but for f_e), has no part in anything; the d of a logit
 * that is not finite is 0. Without d_weights: of the losses alone.
 */
typedef struct cumoe_gate_backward_args {
  uint32_t size;
  uint32_t flags; /* 0 or CUMOE_BACKWARD_ACCUMULATE: onto d_expert_scale */
  cumoe_routing routing;
  float balance, z;              /* as in cumoe_moe_grads */
  cumoe_view logits;             /* [T, E] f32, bf16 or f16 */
  cumoe_view ids;                /* [T, k] i32 or i64 */
  cumoe_view expert_scale;       /* optional [1, E] f32 */
  cumoe_view d_weights;          /* optional [T, k] f32 */
  cumoe_view device_tokens;      /* optional [1, 1] i32: tokens really there, <= T; rows past it are not touched */
  cumoe_view_mut d_logits;       /* [T, E] f32 */
  cumoe_view_mut d_expert_scale; /* optional [1, E] f32, where expert_scale is given */
  cumoe_view_mut losses;         /* optional [1, 2] f32: balance, z */
  cumoe_view_mut workspace;      /* [1, bytes] u8, 256-byte aligned, bytes from cumoe_gate_backward_workspace */
} cumoe_gate_backward_args;

CUMOE_CHECKED cumoe_status cumoe_gate_backward(cumoe_context context, const cumoe_gate_backward_args *args,
                                               cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_gate_backward_workspace(cumoe_context context, int64_t tokens, int32_t experts,
                                                         int32_t top_k, size_t *bytes);

/*
 * Grouped products with transposed weights, for every row r of the route; rows past the last are not touched.
 *   down: d_h[r] = d_y[r] Wdown            d_y [>= T * k, H], d_h [>= T * k, I]
 *   up:   d_rows[r] = d_z[r] [Wgate; Wup]  d_z [>= T * k, 2 I], the gate first, or ungated [>= T * k, I]; d_rows
 *                                          [>= T * k, H]
 * What is read has the plan's dtype, what is written that or f32; all aligned to 16 bytes.
 */
CUMOE_CHECKED cumoe_status cumoe_down_backward(cumoe_plan plan, cumoe_weights weights, cumoe_view d_y,
                                               const cumoe_route *route, cumoe_view_mut d_h, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_up_backward(cumoe_plan plan, cumoe_weights weights, cumoe_view d_z,
                                             const cumoe_route *route, cumoe_view_mut d_rows, cumoe_stream stream);

/*
 * Grouped products whose reduction runs over an expert's rows, onto `d_weights`, bound as in cumoe_moe_grads:
 *   d Wgate, d Wup = sum over rows of d_z[r] x[token(r)]^T    d Wdown = sum over rows of d_y[r] h[r]^T
 * and biases, sums of d_z and d_y. With WEIGHT_ON_INPUT x is multiplied by the pair's weight, and pairs of weight 0
 * have no part. Matrices of the plan's dtype, aligned to 16 bytes.
 */
typedef struct cumoe_weights_backward_args {
  uint32_t size;
  uint32_t flags;          /* 0 or CUMOE_BACKWARD_ACCUMULATE */
  cumoe_view x;            /* [T, H] */
  cumoe_view d_z;          /* [>= T * k, 2 I] or, ungated, [>= T * k, I] */
  cumoe_view h;            /* [>= T * k, I] */
  cumoe_view d_y;          /* [>= T * k, H] */
  cumoe_view pair_weights; /* [T, k] f32 if the plan's routing has WEIGHT_ON_INPUT, else absent */
} cumoe_weights_backward_args;

CUMOE_CHECKED cumoe_status cumoe_weights_backward(cumoe_plan plan, cumoe_weights d_weights, const cumoe_route *route,
                                                  const cumoe_weights_backward_args *args, cumoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
