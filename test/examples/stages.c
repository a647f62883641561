/* The layer of first.c stage by stage, with a shared expert; then the same by cumoe_moe_forward, to compare. For
 * engines that put work of their own between stages, or want one of them alone. */
#include <cumoe/cumoe.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 4, HIDDEN = 64, INTER = 128, SHARED = 96, EXPERTS = 8, TOP_K = 2 };

static cumoe_context context;
static const cumoe_view none;

static void check(cumoe_status status)
{
  if (status == CUMOE_OK) return;
  fprintf(stderr, "%s: %s\n", cumoe_status_name(status), cumoe_last_error());
  exit(1);
}

/* Of zeros; its buffer is freed with the context. */
static cumoe_view_mut device_matrix(cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  cumoe_buffer buffer;
  check(cumoe_buffer_alloc(context, dtype, rows, cols, NULL, &buffer));
  check(cumoe_fill(context, cumoe_buffer_view_mut(buffer), 0, NULL));
  return cumoe_buffer_view_mut(buffer);
}

static cumoe_view numbers(int64_t rows, int64_t cols)
{
  static uint32_t state = 1;
  const size_t count = (size_t)(rows * cols);
  const cumoe_view_mut view = device_matrix(CUMOE_F32, rows, cols);
  float *values = malloc(count * sizeof *values);
  if (!values) exit(1);
  for (size_t i = 0; i < count; i++) values[i] = (float)((state = state * 1664525u + 1013904223u) >> 8) / 0x1p26f - .1f;
  check(cumoe_copy_from_host(context, view, values, count * sizeof *values, NULL));
  free(values);
  return cumoe_const(view);
}

/* Experts and how they are described: the routed ones, or the shared one as a layer of one expert. */
typedef struct experts {
  cumoe_moe_desc desc;
  cumoe_plan plan;
  cumoe_weights weights;
} experts;

static experts make(int32_t count, int32_t inter, cumoe_routing routing, int32_t shared_inter)
{
  experts e = {.desc = {.size = sizeof e.desc,
                        .num_experts = count,
                        .hidden = HIDDEN,
                        .inter = inter,
                        .shared_inter = shared_inter,
                        .dtype = CUMOE_F32,
                        .routing = routing}};
  cumoe_weights_desc where = {.size = sizeof where,
                              .experts = count,
                              .hidden = HIDDEN,
                              .inter = inter,
                              .gate_order = CUMOE_GATE_UP_CONCAT,
                              .up_major = CUMOE_OUT_IN,
                              .down_major = CUMOE_OUT_IN};
  where.gate_up.data = numbers(count * 2 * inter, HIDDEN);
  where.down.data = numbers(count * HIDDEN, inter);
  check(cumoe_plan_create(context, &e.desc, &e.plan));
  check(cumoe_weights_bind(context, &where, &e.weights));
  return e;
}

/* Where each pair of a token and an expert has its row, and what the experts make of it: y, in the order of rows. */
static cumoe_view run_experts(const experts *e, cumoe_view x, cumoe_view ids, cumoe_route *route)
{
  const int64_t pairs = x.rows * ids.cols;
  size_t bytes;
  check(cumoe_map_workspace(e->plan, x.rows, &bytes)); /* 0 of few tokens */
  *route = (cumoe_route){.size = sizeof *route,
                         .counts = device_matrix(CUMOE_I32, 1, e->desc.num_experts),
                         .offsets = device_matrix(CUMOE_I32, 1, e->desc.num_experts + 1),
                         .row_pair = device_matrix(CUMOE_I32, 1, pairs),
                         .slot_row = device_matrix(CUMOE_I32, x.rows, ids.cols)};
  check(cumoe_map(e->plan, ids, none, route, device_matrix(CUMOE_U8, 1, (int64_t)bytes + 1), NULL));
  const cumoe_view_mut h = device_matrix(CUMOE_F32, pairs, e->desc.inter), y = device_matrix(CUMOE_F32, pairs, HIDDEN);
  check(cumoe_up(e->plan, e->weights, x, route, none, h, NULL));
  check(cumoe_down(e->plan, e->weights, cumoe_const(h), route, y, NULL));
  return cumoe_const(y);
}

static void run_stages(const experts *routed, const experts *shared, const cumoe_moe_args *a, cumoe_view_mut out)
{
  const cumoe_view_mut logits = device_matrix(CUMOE_F32, TOKENS, EXPERTS),
                       ids = device_matrix(CUMOE_I32, TOKENS, TOP_K), weights = device_matrix(CUMOE_F32, TOKENS, TOP_K),
                       gate = device_matrix(CUMOE_F32, TOKENS, 1);
  cumoe_route route, of_shared;
  check(cumoe_router(context, a->x, a->router_weight, none, logits, NULL));
  check(cumoe_gate(context, &routed->desc.routing, cumoe_const(logits), none, ids, weights, NULL));
  cumoe_combine_args combine = {.size = sizeof combine,
                                .y = run_experts(routed, a->x, cumoe_const(ids), &route),
                                .pair_weights = cumoe_const(weights),
                                .out = out};
  /* Every token has expert 0 of the shared layer: its rows are in the order of tokens. */
  combine.shared = run_experts(shared, a->x, cumoe_const(device_matrix(CUMOE_I32, TOKENS, 1)), &of_shared);
  check(cumoe_router(context, a->x, a->shared_gate, none, gate, NULL));
  combine.shared_logit = cumoe_const(gate);
  check(cumoe_combine(routed->plan, &route, &combine, NULL));
}

int main(void)
{
  check(cumoe_context_create(CUMOE_DEVICE_AUTO, NULL, &context));
  const experts routed = make(EXPERTS, INTER, cumoe_routing_mixtral(TOP_K), SHARED),
                shared = make(1, SHARED, cumoe_routing_mixtral(1), 0);
  size_t bytes;
  check(cumoe_plan_workspace(routed.plan, TOKENS, &bytes));
  const cumoe_moe_args args = {.size = sizeof args,
                               .x = numbers(TOKENS, HIDDEN),
                               .router_weight = numbers(EXPERTS, HIDDEN),
                               .shared = shared.weights,
                               .shared_gate = numbers(1, HIDDEN),
                               .out = device_matrix(CUMOE_F32, TOKENS, HIDDEN),
                               .workspace = device_matrix(CUMOE_U8, 1, (int64_t)bytes)};
  const cumoe_view_mut out = device_matrix(CUMOE_F32, TOKENS, HIDDEN);
  run_stages(&routed, &shared, &args, out);
  check(cumoe_moe_forward(routed.plan, routed.weights, &args, NULL));

  float by_stages[TOKENS * HIDDEN], at_once[TOKENS * HIDDEN], off = 0, most = 0;
  check(cumoe_copy_to_host(context, by_stages, sizeof by_stages, cumoe_const(out), NULL));
  check(cumoe_copy_to_host(context, at_once, sizeof at_once, cumoe_const(args.out), NULL));
  check(cumoe_synchronize(context, NULL));
  for (int i = 0; i < TOKENS * HIDDEN; i++)
    off = fmaxf(off, fabsf(by_stages[i] - at_once[i])), most = fmaxf(most, fabsf(at_once[i]));
  printf("by stages and at once: largest difference %.1e of %.2f\n", (double)off, (double)most);
  check(cumoe_context_destroy(context));
  return off > 1e-5f * most;
}
