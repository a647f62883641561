/* The first program: one Mixture-of-Experts layer, on the GPU if there is one, else on the CPU. */
#include <cumoe/cumoe.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 4, HIDDEN = 64, INTER = 128, EXPERTS = 8, TOP_K = 2 };

static void check(cumoe_status status)
{
  if (status == CUMOE_OK) return;
  fprintf(stderr, "%s: %s\n", cumoe_status_name(status), cumoe_last_error());
  exit(1);
}

/* A matrix on the device, filled with small numbers. */
static cumoe_view_mut matrix(cumoe_context context, int64_t rows, int64_t cols)
{
  size_t count = (size_t)(rows * cols);
  float *values = malloc(count * sizeof *values);
  if (!values) exit(1);
  for (size_t i = 0; i < count; i++) values[i] = (float)(int)(i * 2654435761u % 1999) / 9995.f - 0.1f;
  cumoe_buffer buffer; /* freed with its context */
  check(cumoe_buffer_alloc(context, CUMOE_F32, rows, cols, NULL, &buffer));
  cumoe_view_mut view = cumoe_buffer_view_mut(buffer);
  check(cumoe_copy_from_host(context, view, values, count * sizeof *values, NULL));
  free(values);
  return view;
}

int main(void)
{
  cumoe_context context;
  check(cumoe_context_create(CUMOE_DEVICE_AUTO, NULL, &context));

  /* What the layer is. */
  cumoe_moe_desc desc = {.size = sizeof desc,
                         .num_experts = EXPERTS,
                         .hidden = HIDDEN,
                         .inter = INTER,
                         .dtype = CUMOE_F32,
                         .routing = cumoe_routing_mixtral(TOP_K)};
  cumoe_plan plan;
  check(cumoe_plan_create(context, &desc, &plan));

  /* Where its weights lie: of each expert, gate and up as one [2 * INTER, HIDDEN] matrix, down as [HIDDEN,
   * INTER]. */
  cumoe_weights_desc where = {.size = sizeof where,
                              .experts = EXPERTS,
                              .hidden = HIDDEN,
                              .inter = INTER,
                              .gate_order = CUMOE_GATE_UP_CONCAT,
                              .up_major = CUMOE_OUT_IN,
                              .down_major = CUMOE_OUT_IN};
  where.gate_up.data = cumoe_const(matrix(context, EXPERTS * 2 * INTER, HIDDEN));
  where.down.data = cumoe_const(matrix(context, EXPERTS * HIDDEN, INTER));
  cumoe_weights weights;
  check(cumoe_weights_bind(context, &where, &weights));

  /* One call: its tokens, the router's weight, scratch memory, the place of the result. */
  size_t bytes;
  check(cumoe_plan_workspace(plan, TOKENS, &bytes));
  cumoe_buffer workspace;
  check(cumoe_buffer_alloc(context, CUMOE_U8, 1, (int64_t)bytes, NULL, &workspace));
  cumoe_moe_args args = {.size = sizeof args,
                         .x = cumoe_const(matrix(context, TOKENS, HIDDEN)),
                         .router_weight = cumoe_const(matrix(context, EXPERTS, HIDDEN)),
                         .out = matrix(context, TOKENS, HIDDEN),
                         .workspace = cumoe_buffer_view_mut(workspace)};
  check(cumoe_moe_forward(plan, weights, &args, NULL));

  float out[TOKENS][HIDDEN];
  check(cumoe_copy_to_host(context, out, sizeof out, cumoe_const(args.out), NULL));
  check(cumoe_synchronize(context, NULL));
  for (int t = 0; t < TOKENS; t++) printf("token %d: %9.6f %9.6f %9.6f ...\n", t, out[t][0], out[t][1], out[t][2]);

  check(cumoe_weights_destroy(weights));
  check(cumoe_plan_destroy(plan));
  check(cumoe_context_destroy(context));
  return 0;
}
