/*
 * A whole layer, made from a short description: random inputs on the host, the same on a device between guards,
 * one call of cumoe_moe_forward, and the check of everything it wrote against the oracle.
 */
#ifndef TEST_SESSION_H
#define TEST_SESSION_H

#include "parts.h"

typedef enum routing_input { INPUT_IDS, INPUT_LOGITS, INPUT_ROUTER } routing_input;
typedef enum residual_form { RESIDUAL_NONE, RESIDUAL_SEPARATE, RESIDUAL_IN_PLACE, RESIDUAL_BIAS } residual_form;

typedef struct layer_spec {
  cumoe_moe_desc desc;
  int64_t tokens;
  int64_t distinct; /* tokens repeat after so many, so that a large call can be checked everywhere; 0: never */
  routing_input input;
  pattern pattern; /* of INPUT_IDS */
  int32_t router_dtype, logits_dtype, ids_dtype;
  weights_form form;
  bool router_bias, select_bias, expert_map, shared_gate, optional_outputs;
  bool expert_scale, chosen; /* chosen: ids are given besides what input says */
  int32_t router_hidden;     /* 0: the router reads x */
  residual_form residual;
  float out_scale;
  int64_t pad;           /* added to leading dimensions: of x and out by 8 elements, of the others by 1 */
  bool device_count;     /* args.device_tokens is given ... */
  int32_t device_tokens; /* ... and holds this */
  uint64_t seed;
} layer_spec;

/* bf16, SwiGLU, top 2 of 8, from ids, nothing optional; change what the case is about. */
layer_spec layer_spec_new(int32_t dtype, int64_t tokens, int32_t hidden, int32_t inter);
int32_t spec_router_experts(const layer_spec *s); /* with zero and identity experts */
int64_t spec_present(const layer_spec *s);        /* tokens that the call works on */

/* Absent ones have data NULL. In scratch memory. */
typedef struct layer_inputs {
  host_weights routed, shared;
  tensor x, router_weight, router_bias, logits, ids, id_weights, select_bias, expert_map, shared_gate, residual;
  tensor router_x, expert_scale;
} layer_inputs;

layer_inputs layer_inputs_new(const layer_spec *spec);

/* ids, weights, counts and load only with optional outputs; ids and weights only where the library routes. */
typedef struct layer_outputs {
  tensor out, ids, weights, counts, load;
} layer_outputs;

typedef struct session {
  cumoe_context context;
  cumoe_stream stream;
  const layer_spec *spec;
  const layer_inputs *inputs;
  cumoe_plan plan;
  cumoe_weights routed, shared;
  cumoe_moe_args args;
  int launches; /* since session_reset */
} session;

/* Everything on the device, nothing launched. Device memory lives until case_end. */
void session_open(session *s, cumoe_context context, const layer_spec *spec, const layer_inputs *inputs);
void session_close(session *s);
void session_reset(session *s); /* outputs poisoned again, in-place residual and load set again */
cumoe_status session_forward(session *s);
/* Waits, checks that nothing but the outputs was written, and reads them: rows that are present only. */
layer_outputs session_collect(session *s);

/* open, forward, collect, close */
layer_outputs run_layer(cumoe_context context, const layer_spec *spec, const layer_inputs *inputs);

/* The stages one by one, from the router or, if the caller routes, from the map; with the session's stream. */
typedef enum stage { STAGE_ROUTER, STAGE_GATE, STAGE_MAP, STAGE_UP, STAGE_DOWN, STAGE_COMBINE, STAGE_COUNT } stage;
typedef struct staged {
  session s;
  cumoe_route route;
  cumoe_view_mut logits, ids, weights, h, y, out, map_workspace;
} staged;
void staged_open(staged *g, cumoe_context context, const layer_spec *spec, const layer_inputs *in, cumoe_stream stream);
cumoe_status run_stage(staged *g, stage which);

/* The inputs with tokens order[0], order[1], ...; `count` of them. And outputs in that order. */
layer_inputs take_tokens(const layer_inputs *in, const int64_t *order, int64_t count);
layer_outputs permuted_outputs(const layer_spec *spec, const layer_outputs *o, const int64_t *order);

/* Outputs of two calls, bitwise. */
void check_outputs_same(const layer_outputs *a, const layer_outputs *b);
/* Everything against the oracle. */
void check_layer(const layer_spec *spec, const layer_inputs *inputs, const layer_outputs *got);
/* The oracle's view of the inputs. */
layer_case layer_case_of(const layer_spec *spec, const layer_inputs *inputs, cumoe_moe_desc *desc);

/* What the inputs have to provoke. */
int32_t expected_fault(const layer_spec *spec, const layer_inputs *inputs);

#endif
