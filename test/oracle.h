/*
 * The oracle: every stage in double by naive loops, from host copies of the tensors, reading weights by the layout
 * enums of the public manual. Each result is a value and how far from it a correct implementation may lie, carried
 * along as a running error bound:
 *   product sum      (2 ceil(K / 16) + 8) 2^-24 sum |a b|  + what the inputs bring
 *     weights with scales   + 4 2^-24 sum |a b|; u4 in f16 or bf16 are rounded once more, by themselves
 *     e4m3 times e4m3  of a kernel that sums in Hopper's fp8 adder: 24 2^-14 of the root of the chunks' squares
 *     codes of h       one step where h or its scale lies near a boundary, as independent errors if there are many
 *   activation       slope * bound + 4 2^-24 |value|
 *   stored in a type the largest distance to anything that a value within the bound rounds to
 */
#ifndef TEST_ORACLE_H
#define TEST_ORACLE_H

#include "codes.h"

/* Host copy of what cumoe_weights_desc describes. */
typedef struct host_weights {
  int32_t experts, hidden, inter, dtype;
  int32_t gate_order, up_major, down_major;
  host_projection gate_up, gate, up, down;
  cumoe_format up_format, down_format;
  double *plain[3]; /* gate [E, I, H], up [E, I, H], down [E, H, I], by oracle_prepare */
} host_weights;

enum { PLAIN_GATE, PLAIN_UP, PLAIN_DOWN };

/* What the device may do: sum e4m3 products in Hopper's fp8 adder, which keeps 14 bits; take activations in fixed point
 * where weights are of u4; in bf16 take those of mx4 as two codes of e4m3 each, through the same adder. */
enum {
  DEVICE_FP8_ADDER = 1,
  DEVICE_FIXED_POINT = 2,
  DEVICE_TWIN_CODES = 4,
  DEVICE_ANY = DEVICE_FP8_ADDER | DEVICE_FIXED_POINT | DEVICE_TWIN_CODES
};
extern int oracle_device;

/* Shapes and layout; the projections are the caller's to fill in. */
cumoe_weights_desc weights_desc(const host_weights *w);

/* Where element (out, in) of a projection part lies: the documented meaning of gate_order and major. */
typedef struct place {
  const host_projection *projection;
  int64_t row, col, channel; /* channel: column of the bias */
} place;
channel_place oracle_channel(const host_weights *w, int part, int64_t expert, int64_t out);
place oracle_place(const host_weights *w, int part, int64_t expert, int64_t out, int64_t in);

/* Reads all weights once. */
void oracle_prepare(host_weights *w);

/* Smallest and largest result of storing something within the bound: value kept, bound widened to them. */
bounded oracle_stored(bounded b, int32_t dtype);
/* What an intermediate holds after it was stored: rounded, and 0 bound unless near a rounding boundary. */
bounded oracle_rounded(bounded b, int32_t dtype);

/* logits [E] of row `token` of x; bias may have data NULL. */
void oracle_router(const tensor *x, int64_t token, const tensor *weight, const tensor *bias, bounded *logits);
/* Rounded to dtype, if it is not 0, then scaled; 0: not at all. */
void oracle_finish_logits(int32_t experts, int32_t dtype, float scale, bounded *logits);

/* Besides logits, each NULL or [E]; chosen: [k]. */
typedef struct gate_operands {
  const double *select_bias, *expert_scale;
  const int32_t *chosen;
} gate_operands;

/* ids[k], weights[k] of one token. False: the bounds leave open which ids are right (scores within rounding of
 * each other), so that they cannot be compared. */
bool oracle_gate(const cumoe_routing *routing, int32_t experts, const bounded *logits, gate_operands with, int32_t *ids,
                 bounded *weights);

/* h[I] before rounding to its type, of one row; weight: the pair's weight on the input, or 1. */
void oracle_up(const cumoe_moe_desc *desc, const host_weights *w, int64_t expert, const double *x, bounded weight,
               bounded *h);

/* y[H] before rounding to its type. */
void oracle_down(const host_weights *w, int64_t expert, const bounded *h, bounded *y);

/* One token's sum before rounding to the type of out. y[j]: [H], or NULL for a slot that adds nothing. */
typedef struct combine_terms {
  int32_t hidden, slots;
  const bounded *const *y;
  const bounded *weights;      /* [slots] */
  const bounded *shared;       /* [H] or NULL */
  const bounded *shared_logit; /* or NULL: 1 */
  const double *residual;      /* [H] or NULL */
  double out_scale;
} combine_terms;
void oracle_combine(const combine_terms *terms, bounded *out);

/* The whole layer for one token. */
typedef struct layer_case {
  const cumoe_moe_desc *desc; /* local_experts set; out_dtype set */
  const host_weights *weights, *shared;
  const tensor *x, *router_weight, *router_bias, *logits, *ids, *id_weights; /* one routing form, or ids
                                                                                   that are weighed by another */
  const tensor *select_bias, *expert_map, *shared_gate, *residual; /* NULL: absent; residual may be of 1 row */
  const tensor *router_x, *expert_scale;                           /* likewise */
  double out_scale;
} layer_case;

typedef struct layer_result {
  bool decided;     /* ids and out can be compared */
  int32_t *ids;     /* [k] */
  bounded *weights; /* [k] */
  bounded *out;     /* [H], or [k, H] unreduced */
} layer_result;

/* Results live in scratch memory. */
layer_result oracle_layer(const layer_case *c, int64_t token);

/* Local expert of an id; -1: dropped; -2: identity expert. */
int32_t oracle_destination(const cumoe_moe_desc *desc, const tensor *expert_map, double id);

#endif
