/*
 * cumoe/attention.h: attention and rotary embedding, forward and backward. The contract is that of cumoe/train.h, but
 * for attention's sums on a GPU: they are in f32, in an order that the shapes fix. f16 and bf16 are on tensor cores,
 * backward for heads of up to 128: weights, and gradients of scores, are rounded to the type of the values. f32 and
 * backward of larger heads go key by key, right but slow, and so do rows that see a value which is not finite.
 *
 * Letters: D head_dim, Hq heads, Hk kv_heads, S sequences. A token's heads lie side by side: columns h D .. h D + D - 1
 * of its row are head h. Memory is linear in tokens: scores are never stored.
 */
#ifndef CUMOE_ATTENTION_H
#define CUMOE_ATTENTION_H

#include "train.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUMOE_ATTENTION_CAUSAL = 1u << 0 };

typedef struct cumoe_attention_args {
  uint32_t size;           /* sizeof(cumoe_attention_args) */
  uint32_t flags;          /* CUMOE_ATTENTION_CAUSAL */
  int32_t heads, kv_heads; /* Hq a multiple of Hk, up to 2^20: head h reads key/value head h / (Hq / Hk) */
  int32_t head_dim;        /* a multiple of 8, 8 .. 256 */
  int32_t page;            /* keys of a page; 0: a sequence's keys lie in one piece */
  int32_t window;       /* 0: no limit; w: a query sees w keys back, itself included, and w - 1 ahead if not causal */
  int32_t reserved;     /* 0 */
  float scale;          /* of q k; 0 = 1 / sqrt(D) */
  float softcap;        /* c > 0: scores become c tanh(score / c), on CUDA to c 2^-22; from 2^60 on there is no cap */
  cumoe_view q;         /* [Tq, Hq D], Tq below 2^31 */
  cumoe_view k, v;      /* [Tk, Hk D] of q's type, Tk below 2^31 */
  cumoe_view q_offsets; /* optional [1, S + 1] i32: sequence s has queries q_offsets[s] .. q_offsets[s + 1] - 1 */
  cumoe_view k_offsets; /* optional [1, S + 1] i32: its keys begin at row k_offsets[s], and end before the next ... */
  cumoe_view k_lengths; /* ... or, optional [1, S] i32, there are so many */
  cumoe_view pages;     /* with page: [S, n] i32, key j of sequence s is row pages[s, j / page] page + j % page */
  cumoe_view sinks;     /* optional [1, Hq], f32 or q's type: of each head a score more, of no key */
  cumoe_view_mut out;   /* [Tq, Hq D] of q's type */
  cumoe_view_mut lse;   /* optional [Tq, Hq] f32: log of the sum of exp(scores); backward reads it */
} cumoe_attention_args;

/*
 * out = softmax(scale q k^T) v of each query and head, over the keys that the query sees.   Dao, arXiv 2307.08691
 *
 * Sequences: without q_offsets there is one, of all queries; without k_offsets the keys are divided as the queries are,
 * or, without q_offsets, are all rows of k. With page there are k_lengths and pages, and no k_offsets. A sequence may
 * have no queries or no keys; several may have keys in common. Of n queries and m keys of a sequence, query i stands at
 * position m - n + i, as in a cache whose last keys are the queries' own: causal, it sees keys 0 .. m - n + i.
 *
 * A query that sees no key, or is in no sequence, gives exactly 0 (lse: -infinity; of one in a sequence, the sink if
 * there is one). A score of -infinity is that of a key that is not seen. A NaN in a query reaches its head alone, one
 * in a key or value the queries that see it. Sequences whose offsets or lengths are inconsistent (decreasing, outside q
 * or k, more than the pages hold, past 2^31 - 4097 keys) have no queries or no keys, and a page outside k is not seen;
 * both are recorded (CUMOE_FAULT_SEQUENCE) by a call with queries. A query of several sequences, as such offsets may
 * have them, is the first one's; gradients of keys that another of these has are undefined then.
 */
CUMOE_CHECKED cumoe_status cumoe_attention(cumoe_context context, const cumoe_attention_args *args,
                                           cumoe_stream stream);

typedef struct cumoe_attention_backward_args {
  uint32_t size;                       /* sizeof(cumoe_attention_backward_args) */
  uint32_t flags;                      /* CUMOE_TRAIN_ACCUMULATE: dsinks alone */
  const cumoe_attention_args *forward; /* of cumoe_attention, with lse; out and lse as it left them; no pages */
  cumoe_view dout;                     /* [Tq, Hq D] of q's type */
  cumoe_view_mut dq;                   /* [Tq, Hq D] of q's type */
  cumoe_view_mut dk, dv;               /* [Tk, Hk D] of q's type; keys of no sequence get 0, those of several the sum */
  cumoe_view_mut dsinks;               /* optional [1, Hq] f32, with sinks */
  cumoe_view_mut delta;                /* [Tq, Hq] f32, receives the sum of dout out of a head */
} cumoe_attention_backward_args;

/*
 * With s the score before the cap, p = exp(score - lse) and g = p (dout v - delta), times the cap's derivative:
 *   dq = scale sum of g k     dk = scale sum of g q     dv = sum of p dout     dsinks = -sum of exp(sink - lse) delta
 * over the keys that a query sees, the queries that see a key, the heads that share it. Paged keys: NOT_SUPPORTED. A
 * key or query that is not finite may make gradients NaN where its score is -infinity, too (0 times infinity).
 */
CUMOE_CHECKED cumoe_status cumoe_attention_backward(cumoe_context context, const cumoe_attention_backward_args *args,
                                                    cumoe_stream stream);

enum {
  CUMOE_ROPE_INTERLEAVED = 1u << 0, /* pairs are (2 i, 2 i + 1); without it (i, i + R / 2) */
  CUMOE_ROPE_BACKWARD = 1u << 1     /* turns the other way: of dy it makes dx */
};

typedef struct cumoe_rope_args {
  uint32_t size;           /* sizeof(cumoe_rope_args) */
  uint32_t flags;          /* CUMOE_ROPE_* */
  int32_t heads, head_dim; /* Hq or Hk; D, of which the first R are turned, R even */
  cumoe_view x;            /* [T, heads D] */
  cumoe_view positions;    /* optional [1, T] i32 or i64: rows of the tables; without it token t has row t */
  cumoe_view cosine, sine; /* [P, R / 2] f32 of the angles, usually position * base^(-2 i / R) */
  cumoe_view_mut y;        /* [T, heads D] of x's type; may be x itself */
} cumoe_rope_args;

/*
 * Turns the pairs (a, b) of each head by its token's angles:   Su and others, arXiv 2104.09864
 *   (a, b) -> (a cosine - b sine, b cosine + a sine)
 * The tables are the caller's, so that scaled frequencies need nothing more. A position outside the tables gives 0 and
 * is recorded (CUMOE_FAULT_SEQUENCE).
 */
CUMOE_CHECKED cumoe_status cumoe_rope(cumoe_context context, const cumoe_rope_args *args, cumoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
