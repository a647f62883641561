/*
 * Weights in fp8 with a scale for each block of 128 x 128, as DeepSeek-V3's and Qwen3-FP8's checkpoints hold them, on
 * the GPU if there is one, else on the CPU. Here they are made from bf16 ones, which the same layer uses to compare;
 * of a checkpoint, the bytes of .weight and .weight_scale_inv take their place, as they lie in the file.
 */
#include <cumoe/cumoe.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 4, HIDDEN = 256, INTER = 256, EXPERTS = 8, TOP_K = 2 };

static void check(cumoe_status status)
{
  if (status == CUMOE_OK) return;
  fprintf(stderr, "%s: %s\n", cumoe_status_name(status), cumoe_last_error());
  exit(1);
}

static cumoe_view_mut matrix(cumoe_context context, cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  cumoe_buffer buffer; /* freed with its context */
  check(cumoe_buffer_alloc(context, dtype, rows, cols, NULL, &buffer));
  return cumoe_buffer_view_mut(buffer);
}

/* Small numbers in bf16: the upper half of a float. */
static cumoe_view small_numbers(cumoe_context context, int64_t rows, int64_t cols, uint32_t seed)
{
  size_t count = (size_t)(rows * cols);
  uint16_t *values = malloc(count * sizeof *values);
  if (!values) exit(1);
  for (size_t i = 0; i < count; i++) {
    seed = seed * 1664525u + 1013904223u;
    float value = (float)(seed >> 8) / 8388608.f - 1;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    values[i] = (uint16_t)(bits >> 16);
  }
  cumoe_view_mut view = matrix(context, CUMOE_BF16, rows, cols);
  check(cumoe_copy_from_host(context, view, values, count * sizeof *values, NULL));
  check(cumoe_synchronize(context, NULL));
  free(values);
  return cumoe_const(view);
}

/* A stack of matrices becomes codes and scales: what a checkpoint would bring. */
static cumoe_projection quantised(cumoe_context context, const cumoe_format *format, cumoe_view dense, int32_t order)
{
  cumoe_quantize_args q = {
      .size = sizeof q, .experts = EXPERTS, .gate_order = order, .format = *format, .weights = dense};
  check(cumoe_quantize_shapes(&q)); /* what memory it takes */
  q.codes = matrix(context, (cumoe_dtype)q.codes.dtype, q.codes.rows, q.codes.cols);
  q.scale = matrix(context, (cumoe_dtype)q.scale.dtype, q.scale.rows, q.scale.cols);
  check(cumoe_quantize_weights(context, &q, NULL));
  return (cumoe_projection){.data = cumoe_const(q.codes), .scale.data = cumoe_const(q.scale)};
}

/* The layer's output, whatever its weights are. */
static void run(cumoe_context context, const cumoe_format *format, const cumoe_projection *gate_up,
                const cumoe_projection *down, cumoe_moe_args *args, float *out)
{
  cumoe_moe_desc desc = {.size = sizeof desc,
                         .num_experts = EXPERTS,
                         .hidden = HIDDEN,
                         .inter = INTER,
                         .dtype = CUMOE_BF16,
                         .out_dtype = CUMOE_F32,
                         .routing = cumoe_routing_qwen3(TOP_K),
                         .up_format = *format,
                         .down_format = *format};
  cumoe_weights_desc where = {.size = sizeof where,
                              .experts = EXPERTS,
                              .hidden = HIDDEN,
                              .inter = INTER,
                              .gate_order = CUMOE_GATE_UP_CONCAT,
                              .up_major = CUMOE_OUT_IN,
                              .down_major = CUMOE_OUT_IN,
                              .gate_up = *gate_up,
                              .down = *down,
                              .up_format = *format,
                              .down_format = *format,
                              .dtype = CUMOE_BF16};
  cumoe_plan plan;
  cumoe_weights weights;
  size_t bytes;
  check(cumoe_plan_create(context, &desc, &plan));
  check(cumoe_weights_bind(context, &where, &weights));
  check(cumoe_plan_workspace(plan, TOKENS, &bytes)); /* with room for the activations' codes */
  args->workspace = matrix(context, CUMOE_U8, 1, (int64_t)bytes);
  check(cumoe_moe_forward(plan, weights, args, NULL));
  check(cumoe_copy_to_host(context, out, TOKENS * HIDDEN * sizeof *out, cumoe_const(args->out), NULL));
  check(cumoe_synchronize(context, NULL));
  check(cumoe_weights_destroy(weights));
  check(cumoe_plan_destroy(plan));
}

int main(void)
{
  static float exact[TOKENS * HIDDEN], fp8[TOKENS * HIDDEN];
  const cumoe_format dense = {0}, block = cumoe_format_fp8_block(CUMOE_F32);
  double wrong = 0, size = 0;
  cumoe_context context;
  check(cumoe_context_create(CUMOE_DEVICE_AUTO, NULL, &context));
  const cumoe_projection gate_up = {.data = small_numbers(context, (int64_t)EXPERTS * 2 * INTER, HIDDEN, 1)},
                         down = {.data = small_numbers(context, (int64_t)EXPERTS * HIDDEN, INTER, 2)};
  cumoe_moe_args args = {.size = sizeof args,
                         .x = small_numbers(context, TOKENS, HIDDEN, 3),
                         .router_weight = small_numbers(context, EXPERTS, HIDDEN, 4),
                         .out = matrix(context, CUMOE_F32, TOKENS, HIDDEN)};
  run(context, &dense, &gate_up, &down, &args, exact);
  const cumoe_projection codes_up = quantised(context, &block, gate_up.data, CUMOE_GATE_UP_CONCAT),
                         codes_down = quantised(context, &block, down.data, 0);
  run(context, &block, &codes_up, &codes_down, &args, fp8);
  for (int i = 0; i < TOKENS * HIDDEN; i++) {
    double difference = (double)fp8[i] - (double)exact[i];
    wrong += difference * difference;
    size += (double)exact[i] * (double)exact[i];
  }
  printf("fp8 in blocks of 128 x 128 differs from bf16 by %.2f %%\n", 100 * sqrt(wrong / size));
  check(cumoe_context_destroy(context));
  return wrong < .01 * size ? 0 : 1; /* 10 % */
}
