/* Argument structs of attention (cumoe/attention.h), and its kernels on the CPU device. See train.h. */
#ifndef CUMOE_KERNELS_ATTENTION_H
#define CUMOE_KERNELS_ATTENTION_H

#include "train.h"

enum { ATTENTION_MAX_HEAD = 256 };
enum { ATTENTION_MOST_KEYS = INT32_MAX - 4096 }; /* of a sequence: kernels look ahead of them in 32 bits */

/* Units: a query's head (forward, dq), a key's head (dkv), a head (dsinks). */
typedef struct attention_args {
  int64_t units;
  matrix q, k, v, out, lse, sinks, pages; /* lse, sinks, pages may be absent */
  const int32_t *q_offsets, *k_offsets, *k_lengths;
  int64_t queries, keys, sequences;
  int32_t heads, kv_heads, head_dim;
  int32_t page, page_count; /* of keys in a page, of pages in a row of `pages` */
  int32_t window, causal;
  double scale, softcap; /* softcap 0: none */
  matrix dout, dq, dk, dv, dsinks, delta;
  int32_t accumulate;
  fault_sink fault;
} attention_args;
/* Tiles of `rows` rows (a query and one of `group` heads) there may be, as sequences of unknown lengths have up to one
 * more each, and so have the queries before and after them all: piece i, from offset o on, has those from
 * o * group / rows + i + 1 on (attention/sequence.cuh). */
#define ATTENTION_SLOTS(queries, group, rows, sequences, by_offsets)                                                   \
  ((by_offsets) ? (queries) * (group) / (rows) + (sequences) + 2 : ((queries) * (group) + (rows)-1) / (rows))

train_kernel cpu_attention, cpu_attention_dq, cpu_attention_dkv, cpu_attention_dsinks;

/* A unit is a token. */
typedef struct rope_args {
  int64_t units;
  matrix x, y, positions, cosine, sine;
  int64_t places;                /* rows of the tables */
  int32_t heads, head_dim, half; /* half of what is turned */
  int32_t interleaved, backward;
  fault_sink fault;
} rope_args;
train_kernel cpu_rope;

#endif
