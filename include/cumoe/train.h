/*
 * cumoe/train.h: what a decoder is trained with besides its layers: embedding, backward of norms, softmax and
 * elementwise operations, cross-entropy with its gradient, AdamW, the norm of all gradients. Attention is
 * cumoe/attention.h.
 *
 * Kernels of a CUDA context are loaded by the first call that needs them, a few milliseconds, also in a capture; a
 * program that calls none of these links none of them.
 *
 * Contract as in cumoe/cumoe.h: ordered on `stream`, nothing allocated, nothing waits, bitwise repeatable, and no
 * number that a later call needs passes through the host: the loss, the norm, the step stay on the device. Element
 * types: f32, f16 and bf16. Sums run in double in a fixed order, and what is stored is rounded once; on CUDA functions
 * of 16-bit elements, and sums over a row that end in 16 bits, begin in f32 (4 elements). Views: any ld, any size (on
 * CUDA rows times ceil(cols / 4096) below 2^31), aligned to one element (to 4 of them, and ld a multiple of 4: faster);
 * a vector of n is [1, n]. 0 rows are legal. What is written may overlap nothing else but where the text says "may be".
 * Before a name, d is the gradient with respect to it.
 *
 * Bad device data (ids, targets) never leads outside; it is recorded (cumoe_fault_read) and counts for nothing.
 *
 * Errors: INVALID_ARGUMENT (null, shape, overlap, number), STALE_HANDLE, WRONG_DEVICE, WRONG_DTYPE, OUT_OF_BOUNDS,
 * MISALIGNED, WORKSPACE (too small), NOT_SUPPORTED.
 */
#ifndef CUMOE_TRAIN_H
#define CUMOE_TRAIN_H

#include "buffer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gradients of parameters are added to what is there, and rounded once with it. Without it they replace it. */
enum { CUMOE_TRAIN_ACCUMULATE = 1u << 0 };

/* ---- embedding -------------------------------------------------------------------------------------- */

/*
 * y[t] = table[ids[t]]. table [V, H], V below 2^31; ids [1, T] i32 or i64, T below 2^31; y [T, H] of table's type. A
 * negative id is no token: its row is 0. One of V or more is recorded (TOKEN_ID), and its row is 0.
 */
CUMOE_CHECKED cumoe_status cumoe_embedding(cumoe_context context, cumoe_view table, cumoe_view ids, cumoe_view_mut y,
                                           cumoe_stream stream);

typedef struct cumoe_embedding_backward_args {
  uint32_t size;            /* sizeof(cumoe_embedding_backward_args) */
  uint32_t flags;           /* CUMOE_TRAIN_ACCUMULATE */
  cumoe_view dy;            /* [T, H] */
  cumoe_view ids;           /* [1, T] i32 or i64, as above */
  cumoe_view_mut dtable;    /* [V, H], f32 or dy's type */
  cumoe_view_mut workspace; /* [1, bytes] u8, 256-byte aligned, bytes from the query */
} cumoe_embedding_backward_args;

/* dtable[v] = sum of dy[t] over the tokens with ids[t] == v, in their order: exactly 0 for an id that no token has, or
 * as it was when accumulating. */
CUMOE_CHECKED cumoe_status cumoe_embedding_backward(cumoe_context context, const cumoe_embedding_backward_args *args,
                                                    cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_embedding_backward_workspace(cumoe_context context, int64_t tokens, int64_t vocabulary,
                                                              size_t *bytes);

/* ---- norms ------------------------------------------------------------------------------------------ */

/* dx and the parameters' gradients are each optional; weight and eps are forward's. */
typedef struct cumoe_norm_backward_args {
  uint32_t size;            /* sizeof(cumoe_norm_backward_args) */
  uint32_t flags;           /* CUMOE_TRAIN_ACCUMULATE: dweight and dbias */
  float eps;                /* as cumoe_rmsnorm */
  int32_t reserved;         /* 0 */
  cumoe_view x;             /* [rows, cols], cols below 2^31: forward's */
  cumoe_view weight;        /* optional [1, cols], f32 or x's type */
  cumoe_view dy;            /* [rows, cols] of x's type */
  cumoe_view_mut dx;        /* [rows, cols] of x's type; may be dy itself */
  cumoe_view_mut dweight;   /* [1, cols], f32 or x's type */
  cumoe_view_mut dbias;     /* likewise; layernorm's alone */
  cumoe_view_mut workspace; /* [1, bytes] u8, 256-byte aligned, bytes from the query */
} cumoe_norm_backward_args;

/*
 * With h = (x - mean) s, s = 1 / sqrt(variance + eps) and g = dy weight, of each row:
 *   dx = s (g - mean(g) - h mean(g h))       dweight = sum of dy h over the rows       dbias = sum of dy
 * rmsnorm is the same with both means of x and g left out: h = x s.
 * A NaN of dy or x stays in its row of dx; in dweight and dbias it reaches what it is summed into.
 */
CUMOE_CHECKED cumoe_status cumoe_layernorm_backward(cumoe_context context, const cumoe_norm_backward_args *args,
                                                    cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_rmsnorm_backward(cumoe_context context, const cumoe_norm_backward_args *args,
                                                  cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_norm_backward_workspace(cumoe_context context, int64_t rows, int64_t cols,
                                                         size_t *bytes);

/* ---- elementwise, softmax --------------------------------------------------------------------------- */

/*
 * dx = dy times the derivative of cumoe_relu, _sigmoid ... at x; relu's at 0 is 0. All [rows, cols] of one type; dx may
 * be x or dy itself. Of cumoe_add the gradients are dy, of cumoe_mul they are cumoe_mul of dy and the other operand, of
 * cumoe_scale it is cumoe_scale of dy.
 */
CUMOE_CHECKED cumoe_status cumoe_relu_backward(cumoe_context context, cumoe_view x, cumoe_view dy, cumoe_view_mut dx,
                                               cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_sigmoid_backward(cumoe_context context, cumoe_view x, cumoe_view dy, cumoe_view_mut dx,
                                                  cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_silu_backward(cumoe_context context, cumoe_view x, cumoe_view dy, cumoe_view_mut dx,
                                               cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_gelu_backward(cumoe_context context, cumoe_view x, cumoe_view dy, cumoe_view_mut dx,
                                               cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_gelu_tanh_backward(cumoe_context context, cumoe_view x, cumoe_view dy,
                                                    cumoe_view_mut dx, cumoe_stream stream);

/* dx = y (dy - sum of y dy over the row), y what cumoe_softmax wrote. [rows, cols] of one type, cols below 2^31; dx may
 * be y or dy itself. */
CUMOE_CHECKED cumoe_status cumoe_softmax_backward(cumoe_context context, cumoe_view y, cumoe_view dy, cumoe_view_mut dx,
                                                  cumoe_stream stream);

/* ---- loss ------------------------------------------------------------------------------------------- */

enum { CUMOE_LOSS_IGNORE = 1u << 0 }; /* targets equal to args.ignore are not counted */

typedef struct cumoe_cross_entropy_args {
  uint32_t size;          /* sizeof(cumoe_cross_entropy_args) */
  uint32_t flags;         /* CUMOE_LOSS_IGNORE */
  float scale;            /* of dlogits, for a loss that is scaled or one of several; 0 = 1 */
  int32_t reserved;       /* 0 */
  int64_t ignore;         /* 0 without the flag */
  cumoe_view logits;      /* [T, V], T and V below 2^31 */
  cumoe_view targets;     /* [1, T] i32 or i64 */
  cumoe_view_mut loss;    /* [1, 1] f32: mean over the counted tokens; 0 if none is */
  cumoe_view_mut losses;  /* [1, T] f32: each token's; 0 where it is not counted */
  cumoe_view_mut counted; /* [1, 1] i64: how many are */
  cumoe_view_mut dlogits; /* optional [T, V] of logits' type; may be logits itself */
} cumoe_cross_entropy_args;

/*
 * losses[t] = log(sum over v of exp(logits[t, v])) - logits[t, targets[t]], without overflow;
 * dlogits[t, v] = scale / counted * (softmax(logits[t])[v] - (v == targets[t])), and 0 where t is not counted.
 * A negative target is not counted; nor is one of V or more, which is recorded (TOKEN_ID). A NaN in a counted token's
 * logits makes that row of dlogits and the loss NaN.
 */
CUMOE_CHECKED cumoe_status cumoe_cross_entropy(cumoe_context context, const cumoe_cross_entropy_args *args,
                                               cumoe_stream stream);

/* ---- optimiser -------------------------------------------------------------------------------------- */

typedef struct cumoe_global_norm_args {
  uint32_t size;               /* sizeof(cumoe_global_norm_args) */
  float max_norm;              /* 0: nothing is clipped */
  float scale;                 /* gradients count as scale times what is there: of a loss that was scaled; 0 = 1 */
  int32_t reserved;            /* 0 */
  const cumoe_view *gradients; /* count of them, of any shapes and types; on the host, read during the call */
  int64_t count;               /* 0 .. 2^20 */
  cumoe_view_mut norm;         /* [1, 1] f32: of all gradients as one vector, scaled */
  cumoe_view_mut factor;       /* [1, 1] f32: scale * min(1, max_norm / norm), what the step multiplies gradients by */
  cumoe_view_mut step;         /* optional [1, 1] i64: one more */
  cumoe_view_mut workspace;    /* [1, bytes] u8, 256-byte aligned, bytes from the query */
} cumoe_global_norm_args;

/*
 * The Euclidean norm of all gradients and what clipping makes of it (Pascanu, Mikolov, Bengio, arXiv 1211.5063). If it
 * is not finite, factor becomes NaN and step stays, and cumoe_adamw with this factor changes nothing: a step that
 * overflowed is left out, without the host looking.
 */
CUMOE_CHECKED cumoe_status cumoe_global_norm(cumoe_context context, const cumoe_global_norm_args *args,
                                             cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_global_norm_workspace(cumoe_context context, const cumoe_view *gradients,
                                                       int64_t count, size_t *bytes);

typedef struct cumoe_adamw_args {
  uint32_t size;          /* sizeof(cumoe_adamw_args) */
  uint32_t flags;         /* 0 */
  float rate;             /* learning rate, >= 0 */
  float beta1, beta2;     /* below 1; 0 = .9 and .999 */
  float eps;              /* 0 = 1e-8 */
  float decay;            /* weight decay, >= 0 */
  int32_t reserved;       /* 0 */
  cumoe_view gradient;    /* [rows, cols] */
  cumoe_view step;        /* [1, 1] i64: 1 for the first step (below 1 counts as 1); cumoe_global_norm advances it */
  cumoe_view factor;      /* optional [1, 1] f32: of the gradient; not finite: nothing is changed */
  cumoe_view schedule;    /* optional [1, 1] f32: of the rate; taken as it is, finite or not */
  cumoe_view_mut master;  /* [rows, cols] f32 */
  cumoe_view_mut first;   /* [rows, cols] f32: moments, 0 before the first step */
  cumoe_view_mut second;  /* [rows, cols] f32 */
  cumoe_view_mut weights; /* optional [rows, cols]: receives master, rounded to its type */
} cumoe_adamw_args;

/*
 * AdamW with decoupled decay (Loshchilov and Hutter, arXiv 1711.05101), of each element, t the step:
 *   g = factor gradient     m = beta1 m + (1 - beta1) g     v = beta2 v + (1 - beta2) g^2     r = schedule rate
 *   w = w - r decay w - r (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
 * in double; master, first and second are rounded once each, and the next step reads what they were rounded to. weights
 * is rounded from master as it is stored.
 */
CUMOE_CHECKED cumoe_status cumoe_adamw(cumoe_context context, const cumoe_adamw_args *args, cumoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
