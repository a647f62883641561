/* Expert parallelism's decode step as DeepEP leaves it: [E, capacity, H], and how many rows each expert has stays on
 * the device. Rows go through the experts and come back in their places, unweighted. */
#include <cumoe/cumoe.h>
#include <stdio.h>
#include <stdlib.h>

enum { CAPACITY = 16, HIDDEN = 64, INTER = 128, EXPERTS = 4 };

static void check(cumoe_status status)
{
  if (status == CUMOE_OK) return;
  fprintf(stderr, "%s: %s\n", cumoe_status_name(status), cumoe_last_error());
  exit(1);
}

static cumoe_view_mut matrix(cumoe_context context, cumoe_dtype dtype, int64_t rows, int64_t cols, const void *values)
{
  cumoe_buffer buffer; /* freed with its context */
  check(cumoe_buffer_alloc(context, dtype, rows, cols, NULL, &buffer));
  cumoe_view_mut view = cumoe_buffer_view_mut(buffer);
  const size_t bytes = (size_t)(rows * cols) * cumoe_dtype_bytes(dtype);
  if (values) check(cumoe_copy_from_host(context, view, values, bytes, NULL));
  return view;
}

static cumoe_view_mut numbers(cumoe_context context, int64_t rows, int64_t cols)
{
  float *values = malloc((size_t)(rows * cols) * sizeof *values);
  if (!values) exit(1);
  for (int64_t i = 0; i < rows * cols; i++) values[i] = (float)(int)((uint64_t)i * 2654435761u % 1999) / 9995.f - 0.1f;
  const cumoe_view_mut view = matrix(context, CUMOE_F32, rows, cols, values);
  free(values);
  return view;
}

int main(void)
{
  cumoe_context context;
  cumoe_plan plan;
  cumoe_weights weights;
  size_t bytes;
  check(cumoe_context_create(CUMOE_DEVICE_AUTO, NULL, &context));
  const cumoe_moe_desc desc = {.size = sizeof desc,
                               .num_experts = EXPERTS, /* this rank's */
                               .hidden = HIDDEN,
                               .inter = INTER,
                               .dtype = CUMOE_F32,
                               .routing = cumoe_routing_mixtral(1)}; /* not used: the ranks' routers have done it */
  const cumoe_weights_desc where = {.size = sizeof where,
                                    .experts = EXPERTS,
                                    .hidden = HIDDEN,
                                    .inter = INTER,
                                    .gate_order = CUMOE_GATE_UP_CONCAT,
                                    .up_major = CUMOE_OUT_IN,
                                    .down_major = CUMOE_OUT_IN,
                                    .gate_up.data = cumoe_const(numbers(context, EXPERTS * 2 * INTER, HIDDEN)),
                                    .down.data = cumoe_const(numbers(context, EXPERTS * HIDDEN, INTER))};
  check(cumoe_plan_create(context, &desc, &plan));
  check(cumoe_weights_bind(context, &where, &weights));

  /* Once: where each expert's rows begin. */
  int32_t offsets[EXPERTS + 1];
  for (int e = 0; e <= EXPERTS; e++) offsets[e] = e * CAPACITY;
  check(cumoe_masked_workspace(plan, CAPACITY, &bytes));
  cumoe_masked_args args = {.size = sizeof args,
                            .capacity = CAPACITY,
                            .expected_rows = 4,
                            .x = cumoe_const(numbers(context, EXPERTS * CAPACITY, HIDDEN)),
                            .offsets = cumoe_const(matrix(context, CUMOE_I32, 1, EXPERTS + 1, offsets)),
                            .out = matrix(context, CUMOE_F32, EXPERTS * CAPACITY, HIDDEN, NULL),
                            .workspace = matrix(context, CUMOE_U8, 1, (int64_t)bytes, NULL)};

  /* Each step: what the dispatch counted. */
  const int32_t counts[EXPERTS] = {3, 0, 16, 1};
  args.counts = cumoe_const(matrix(context, CUMOE_I32, 1, EXPERTS, counts));
  check(cumoe_masked_forward(plan, weights, &args, NULL));

  static float out[EXPERTS][CAPACITY][HIDDEN];
  check(cumoe_copy_to_host(context, out, sizeof out, cumoe_const(args.out), NULL));
  check(cumoe_synchronize(context, NULL));
  for (int e = 0; e < EXPERTS; e++)
    if (counts[e]) printf("expert %d: %2d rows, the first %9.6f %9.6f ...\n", e, counts[e], out[e][0][0], out[e][0][1]);

  check(cumoe_weights_destroy(weights));
  check(cumoe_plan_destroy(plan));
  check(cumoe_context_destroy(context));
  return 0;
}
