/* The plan of a layer, as an object. */
#ifndef CUMOE_HOST_MOE_H
#define CUMOE_HOST_MOE_H

#include "status.h"
#include "../include/cumoe/moe.h"
#include "../kernels/args.h"

struct weights;

struct plan {
  struct context *context;
  cumoe_moe_desc desc; /* defaults filled in: local_experts, out_dtype, act_alpha, routed_scale */
  float gate_limit;    /* gemm_args */
};

cumoe_status find_plan(cumoe_plan handle, const struct plan **plan);
cumoe_status drop_plan(cumoe_plan handle); /* cumoe_plan_destroy, by a call of another name; NULL: nothing */

/* What a call of cumoe_moe_forward works with. */
typedef struct layer_operands {
  const struct plan *plan;
  const struct weights *weights, *shared; /* shared: NULL without */
} layer_operands;

/* All arguments but the workspace; then, where that is one, that nothing lies over anything else. */
cumoe_status check_layer_operands(const struct plan *plan, cumoe_weights weights, const cumoe_moe_args *a,
                                  layer_operands *with);
cumoe_status check_layer_workspace(const struct plan *plan, const cumoe_moe_args *a);
cumoe_status check_layer_overlaps(const cumoe_moe_args *a, const layer_operands *with);

/* As named_view: what a call writes, and what it reads, but for the residual, which may be out. */
#define READ(a, field)    ((named_view){"args." #field, (a)->field})
#define WRITTEN(a, field) ((named_view){"args." #field, cumoe_const((a)->field)})
#define LAYER_OUTPUTS(a)                                                                                               \
  WRITTEN(a, out), WRITTEN(a, ids_out), WRITTEN(a, weights_out), WRITTEN(a, counts_out), WRITTEN(a, load),             \
      WRITTEN(a, workspace)
enum { LAYER_OUTPUT_COUNT = 6 };
#define LAYER_INPUTS(a)                                                                                                \
  READ(a, x), READ(a, device_tokens), READ(a, router_weight), READ(a, router_bias), READ(a, logits), READ(a, ids),     \
      READ(a, weights), READ(a, select_bias), READ(a, expert_map), READ(a, shared_gate), READ(a, router_x),            \
      READ(a, expert_scale)

/* Parts of a layer by ids, in a call each, between which others run; all but `spared` and `columns` is the same. Of x
 * the map knows nothing. */
enum { LAYER_MAP = 1, LAYER_UP = 2, LAYER_DOWN = 4 };

/* Of a layer by ids whose caller has grids ahead and behind (ep.c). */
typedef struct layer_ends {
  bool checked;           /* the arguments follow from what the caller's call has checked */
  uint32_t parts;         /* LAYER_*; 0: all */
  int32_t spared;         /* SMs that its products leave to other grids */
  int32_t first, columns; /* of down's outputs; 0 columns: all of them */
  bool cuts;              /* out: weights can be cut so; else this call has made all of them */
  int64_t rank_tokens;    /* as layer_call has it */
  bool filled;            /* what find_fill finds, if anything, is all ones */
  bool returns;           /* the caller does what combine would */
  bool combines;          /* out, if it returns: the layer has a combine, with these arguments */
  combine_args combine;   /* out */
  int32_t few_row;        /* variant + 1: if one grid does all and is of this row, the caller launches it; 0: none */
  bool fews;              /* out: the caller has to, with these arguments and so many CTAs */
  few_args *few;          /* where they are put, with few_row */
  int64_t few_grid;
} layer_ends;
cumoe_status forward_between(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args, cumoe_stream stream,
                             layer_ends *ends);
/* Memory of args.workspace that a grid ahead may fill with ones, which spares the layer a grid; 0 vectors: none. */
cumoe_status find_fill(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args, const layer_ends *ends,
                       void **fill, int32_t *vectors);

/* The caller has chosen, and the gate weighs; the caller has done both. */
bool is_chosen(const cumoe_moe_args *a);
bool is_routed(const cumoe_moe_args *a);

#endif
