/*
 * The plan of a forward pass, as a value: every kernel that will be launched, its grid, how the kernels work together,
 * and where everything lies in the workspace. A pure function of the description, the device and what the call brings:
 * no CUDA call, no globals. All that can be refused is refused here; host/moe.c only runs it.
 */
#ifndef CUMOE_PLAN_H
#define CUMOE_PLAN_H

#include "../include/cumoe/moe.h"
#include "carve.h"
#include "choice.h"

/* The launches of a layer, in their order. A layer has either few_up (and few_down), or map, up, down and combine. */
#define STAGE_LIST(X)                                                                                                  \
  X(router, router)                                                                                                    \
  X(quantize_x, quantize)                                                                                              \
  X(shared_quantize_x, quantize)                                                                                       \
  X(gate, gate)                                                                                                        \
  X(map_count, map_count)                                                                                              \
  X(map, map)                                                                                                          \
  X(shared_up, up)                                                                                                     \
  X(shared_quantize_h, quantize)                                                                                       \
  X(shared_down, down)                                                                                                 \
  X(shared_gate, router)                                                                                               \
  X(arrange_x, quantize)                                                                                               \
  X(up, up)                                                                                                            \
  X(quantize_h, quantize)                                                                                              \
  X(down, down)                                                                                                        \
  X(combine, combine)                                                                                                  \
  X(few_up, few_up)                                                                                                    \
  X(few_down, few_down)

typedef enum stage {
#define STAGE(name, operation) STAGE_##name,
  STAGE_LIST(STAGE)
#undef STAGE
      STAGE_COUNT
} stage;

operation stage_operation(stage s);
const char *stage_name(stage s);

/* One launch. */
typedef struct launch_step {
  int32_t row;  /* of the kernel table; -1: nothing is launched */
  int64_t grid; /* CTAs, at most INT32_MAX; work units of a CPU row */
  bool early;   /* may start before the grid ahead has ended, where the kernel waits by itself (host/launch.c) */
} launch_step;

typedef enum step_refusal { STEP_SERVED, STEP_NO_KERNEL, STEP_GRID_TOO_LARGE } step_refusal;

/* One launch of a stage by itself. */
step_refusal plan_step(const machine *m, const op_shape *s, launch_step *result);

/* How dealt's units of a product are cut, and where their sums are: kernels/dealt.h. */
typedef struct cut_layout {
  size_t parts, small;
  int32_t part_k[2], last;
} cut_layout;

/* Offsets of a route's arrays; rows: of row_pair, a pair each or more. */
typedef struct route_layout {
  size_t counts, offsets, row_pair, slot_row;
} route_layout;
route_layout carve_route(carver *c, const cumoe_moe_desc *desc, int64_t pairs, int64_t rows);

/* Byte offsets of the forward pass's regions in the workspace, each 256-byte aligned. */
typedef struct workspace_layout {
  size_t logits, ids, weights;
  route_layout route;
  size_t hist, progress, h, few_words, y, shared_h, shared_y, shared_logit;
  size_t x_codes, x_scale, h_codes, h_scale; /* where activations are quantised, or have another order */
  size_t x_copy;                             /* of codes; other rows are copied to y */
  size_t shared_x_codes, shared_x_scale, shared_h_codes, shared_h_scale;
  cut_layout cut[2];            /* kernels/dealt.h: of up, of down */
  size_t few_items, dealt_fill; /* likewise; bytes from h to their end */
  int32_t dealt_columns;
  size_t few_fill; /* bytes from h that the router fills with ones for few_up: h and few_words (kernels/protocol.h) */
  size_t bytes;
} workspace_layout;

/* False if a size overflows 2^62 bytes. */
bool plan_workspace_layout(const cumoe_moe_desc *desc, int64_t tokens, workspace_layout *layout);

/* The masked form: what lies between its two products. */
typedef struct masked_layout {
  size_t h, x_codes, x_scale, h_codes, h_scale, bytes;
} masked_layout;

/* Of all rows that experts have room for. False if a size overflows 2^62 bytes. */
bool plan_masked_layout(const cumoe_moe_desc *desc, int64_t rows, masked_layout *layout);

/* What a choice of kernels depends on of weights in memory, besides their format: see op_shape. */
typedef struct bound_matrix {
  weight_major major;
  bool tmap;        /* tensor maps can describe it */
  bool suits_codes; /* scales_suit_codes */
} bound_matrix;

/* Whether gate's and up's scales are those of a kernel that makes codes of h: constant along k or in its stages, and
 * for its channels that lie beside one another. */
bool scales_suit_codes(const expert_matrix *up, bool two);

/* What a forward brings besides the description. */
typedef struct layer_call {
  int64_t tokens;        /* > 0 */
  int64_t rank_tokens;   /* of these, what all ranks have sent: tokens routed to any rank's experts; 0: all have come */
  bool has_map;          /* some experts may be elsewhere */
  bound_matrix up, down; /* of the routed experts */
  bool has_router;       /* the logits are made from x */
  bool filled;           /* a grid of the caller's has done what the router does for few_up */
  int32_t router_dtype;  /* DT_* of its weights */
  bool router_tmap;      /* tensor maps can describe x and them */
  int32_t router_hidden; /* columns of its weights */
  bool has_ids;          /* routed by the caller: no gate */
  bool has_chosen;       /* the caller gives ids, and the gate weighs them */
  bool logits_f32;       /* what the gate reads: the router's, or such of the caller's */
  bool has_select_bias;  /* the gate adds it */
  bool has_expert_scale; /* the gate multiplies by it */
  bool has_shared;       /* shared expert */
  bound_matrix shared_up, shared_down;
  bool has_shared_gate;
  int32_t shared_gate_dtype;
  bool shared_gate_tmap;
} layer_call;

/* Of a routed layer (few false) the flags behind `copies_rows` tell how its kernels work together
 * (kernels/protocol.h). */
typedef struct layer_plan {
  launch_step steps[STAGE_COUNT];
  bool few;                 /* few_up does what map, up, down and combine do */
  bool few_in_one;          /* and what few_down does: the router clears the words for it */
  bool few_fills;           /* words for it are filled by a memset, as there is no router */
  bool few_gates;           /* and what the gate does, of logits in f32 */
  bool copies_rows;         /* up puts its rows in order in a copy, for the bulk copies that feed its products */
  bool codes_h;             /* up makes the codes of h that down multiplies: no quantize between them */
  bool by_expert;           /* down waits for the h of an expert instead of for the end of up */
  bool discards_rows;       /* combine discards h and y from L2, so that they are not written to memory */
  bool combine_looks_ahead; /* combine reads slots and weights before it waits for down */
  workspace_layout at;
  stage refused;    /* STAGE_COUNT, or the first stage that cannot be launched, */
  step_refusal why; /* and why */
} layer_plan;

/* `desc` with its defaults filled in (check_moe_desc). */
layer_plan plan_layer(const machine *m, const cumoe_moe_desc *desc, const layer_call *call);

/* How rows of up and down work together, as layer_plan's flags say; of dense weights. */
bool copies_rows(const machine *m, const variant *row, const op_shape *up);
bool hands_over(const variant *up, const variant *down);

/* Of gate and up, or of down. */
const cumoe_format *format_of(const cumoe_moe_desc *desc, bool up, bool shared);

/* Kernels are chosen without T. */
bool is_invariant(const cumoe_moe_desc *desc);

/* Columns of the logits: routed, zero and identity experts. */
int32_t router_experts(const cumoe_moe_desc *desc);

#endif
