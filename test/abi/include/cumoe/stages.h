#ifndef CUMOE_STAGES_H
#define CUMOE_STAGES_H 
#include "moe.h"
#ifdef __cplusplus
extern "C" {
#endif
CUMOE_CHECKED cumoe_status cumoe_router(cumoe_context context, cumoe_view x, cumoe_view weight, cumoe_view bias,
                                        cumoe_view_mut logits, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_gate(cumoe_context context, const cumoe_routing *routing, cumoe_view logits,
                                      cumoe_view select_bias, cumoe_view_mut ids, cumoe_view_mut weights,
                                      cumoe_stream stream);
typedef struct cumoe_route {
  uint32_t size;
  int32_t reserved;
  cumoe_view_mut counts;
  cumoe_view_mut offsets;
  cumoe_view_mut row_pair;
  cumoe_view_mut slot_row;
} cumoe_route;
CUMOE_CHECKED cumoe_status cumoe_map(cumoe_plan plan, cumoe_view ids, cumoe_view expert_map, const cumoe_route *route,
                                     cumoe_view_mut workspace, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_map_workspace(cumoe_plan plan, int64_t tokens, size_t *bytes);
CUMOE_CHECKED cumoe_status cumoe_up(cumoe_plan plan, cumoe_weights weights, cumoe_view x, const cumoe_route *route,
                                    cumoe_view pair_weights, cumoe_view_mut h, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_permute(cumoe_plan plan, cumoe_view x, const cumoe_route *route, cumoe_view_mut rows,
                                         cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_up_permuted(cumoe_plan plan, cumoe_weights weights, cumoe_view rows,
                                             const cumoe_route *route, cumoe_view pair_weights, cumoe_view_mut h,
                                             cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_down(cumoe_plan plan, cumoe_weights weights, cumoe_view h, const cumoe_route *route,
                                      cumoe_view_mut y, cumoe_stream stream);
typedef struct cumoe_combine_args {
  uint32_t size;
  float out_scale;
  cumoe_view y;
  cumoe_view pair_weights;
  cumoe_view x;
  cumoe_view shared;
  cumoe_view shared_logit;
  cumoe_view residual;
  cumoe_view device_tokens;
  cumoe_view_mut out;
} cumoe_combine_args;
CUMOE_CHECKED cumoe_status cumoe_combine(cumoe_plan plan, const cumoe_route *route, const cumoe_combine_args *args,
                                         cumoe_stream stream);
#ifdef CUMOE_EXPERIMENTAL
typedef struct cumoe_variant_info {
  uint32_t size;
  const char *op;
  const char *name;
  int32_t usable;
  const char *arch, *form;
  int32_t x, w, y;
  const char *scale;
  const char *major;
  int32_t bm, bn, bk, stages;
  int32_t units, columns, lanes, ahead;
  int32_t cluster, warps, ctas, smem;
} cumoe_variant_info;
CUMOE_API int32_t cumoe_variant_count(void);
CUMOE_CHECKED cumoe_status cumoe_variant_get(cumoe_context context, int32_t index, cumoe_variant_info *info);
CUMOE_CHECKED cumoe_status cumoe_variant_force(cumoe_context context, int32_t index);
#endif
#ifdef __cplusplus
}
#endif
#endif
