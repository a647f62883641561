/*
 * Expert parallelism by hand: each of two GPUs holds half of a layer's experts, one thread drives each, and the sum of
 * their outputs is the layer's. With one GPU both halves are on it, with none on the CPU. Compared with the whole layer
 * on the CPU.
 */
#include <cumoe/cumoe.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 32, HIDDEN = 64, INTER = 48, EXPERTS = 8, TOP_K = 3, ROW = 2 * INTER * HIDDEN, DOWN = HIDDEN * INTER };

static float x[TOKENS * HIDDEN], router[EXPERTS * HIDDEN], gate_up[EXPERTS * ROW], down[EXPERTS * DOWN];

/* Some of the layer's experts, on one device. */
typedef struct shard {
  cumoe_context context;
  int32_t first, experts;
  cumoe_view_mut out; /* [TOKENS, HIDDEN]: what these experts add */
} shard;

static void check(cumoe_status status)
{
  if (status == CUMOE_OK) return;
  fprintf(stderr, "%s: %s\n", cumoe_status_name(status), cumoe_last_error());
  exit(1);
}

static void fill(float *to, size_t count, float limit, uint32_t seed)
{
  for (size_t i = 0; i < count; i++) {
    seed = seed * 1664525u + 1013904223u;
    to[i] = ((float)(seed >> 8) / 8388608.f - 1.f) * limit;
  }
}

/* Freed with its context. */
static cumoe_view_mut matrix(cumoe_context context, cumoe_dtype dtype, int64_t rows, int64_t cols, const void *values)
{
  cumoe_buffer buffer;
  check(cumoe_buffer_alloc(context, dtype, rows, cols, NULL, &buffer));
  cumoe_view_mut view = cumoe_buffer_view_mut(buffer);
  if (values)
    check(cumoe_copy_from_host(context, view, values, (size_t)(rows * cols) * cumoe_dtype_bytes(dtype), NULL));
  return view;
}

static cumoe_weights bind(const shard *s)
{
  cumoe_weights weights;
  cumoe_weights_desc where = {.size = sizeof where,
                              .experts = s->experts,
                              .hidden = HIDDEN,
                              .inter = INTER,
                              .gate_order = CUMOE_GATE_UP_CONCAT,
                              .up_major = CUMOE_OUT_IN,
                              .down_major = CUMOE_OUT_IN};
  const int64_t rows = s->experts;
  where.gate_up.data = cumoe_const(matrix(s->context, CUMOE_F32, rows * 2 * INTER, HIDDEN, gate_up + s->first * ROW));
  where.down.data = cumoe_const(matrix(s->context, CUMOE_F32, rows * HIDDEN, INTER, down + s->first * DOWN));
  check(cumoe_weights_bind(s->context, &where, &weights));
  return weights;
}

/* Every shard routes for itself, and drops what belongs to others: the map says -1 there. */
static void *run(void *argument)
{
  shard *s = argument;
  cumoe_moe_desc desc = {.size = sizeof desc,
                         .num_experts = EXPERTS,
                         .local_experts = s->experts,
                         .hidden = HIDDEN,
                         .inter = INTER,
                         .dtype = CUMOE_F32,
                         .routing = cumoe_routing_qwen3(TOP_K)};
  int32_t local[EXPERTS];
  cumoe_plan plan;
  size_t bytes;
  for (int32_t e = 0; e < EXPERTS; e++) local[e] = e >= s->first && e < s->first + s->experts ? e - s->first : -1;
  check(cumoe_plan_create(s->context, &desc, &plan));
  check(cumoe_plan_workspace(plan, TOKENS, &bytes));
  cumoe_weights weights = bind(s);
  s->out = matrix(s->context, CUMOE_F32, TOKENS, HIDDEN, NULL);
  cumoe_moe_args args = {.size = sizeof args,
                         .x = cumoe_const(matrix(s->context, CUMOE_F32, TOKENS, HIDDEN, x)),
                         .router_weight = cumoe_const(matrix(s->context, CUMOE_F32, EXPERTS, HIDDEN, router)),
                         .expert_map = cumoe_const(matrix(s->context, CUMOE_I32, 1, EXPERTS, local)),
                         .out = s->out,
                         .workspace = matrix(s->context, CUMOE_U8, 1, (int64_t)bytes, NULL)};
  check(cumoe_moe_forward(plan, weights, &args, NULL));
  check(cumoe_synchronize(s->context, NULL));
  check(cumoe_weights_destroy(weights));
  check(cumoe_plan_destroy(plan));
  return NULL;
}

static void read_out(const shard *s, float *to)
{
  check(cumoe_copy_to_host(s->context, to, TOKENS * HIDDEN * sizeof *to, cumoe_const(s->out), NULL));
  check(cumoe_synchronize(s->context, NULL));
}

/* The second of two GPUs, else what `first` is on. */
static cumoe_context open_second(cumoe_context first)
{
  cumoe_device_info info = {.size = sizeof info};
  cumoe_context second;
  check(cumoe_context_info(first, &info));
  if (info.device != CUMOE_DEVICE_CPU && cumoe_context_create(info.device + 1, NULL, &second) == CUMOE_OK)
    return second;
  check(cumoe_context_create(info.device, NULL, &second));
  return second;
}

int main(void)
{
  static float got[TOKENS * HIDDEN], want[TOKENS * HIDDEN];
  shard half[2] = {{.first = 0, .experts = EXPERTS / 2}, {.first = EXPERTS / 2, .experts = EXPERTS / 2}};
  shard whole = {.first = 0, .experts = EXPERTS};
  pthread_t threads[2];
  fill(x, TOKENS * HIDDEN, 1, 1);
  fill(router, EXPERTS * HIDDEN, 0.3f, 2);
  fill(gate_up, EXPERTS * ROW, 0.3f, 3);
  fill(down, EXPERTS * DOWN, 0.3f, 4);
  check(cumoe_context_create(CUMOE_DEVICE_AUTO, NULL, &half[0].context));
  half[1].context = open_second(half[0].context);
  check(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &whole.context));
  for (int i = 0; i < 2; i++)
    if (pthread_create(&threads[i], NULL, run, &half[i]) != 0) return 1;
  for (int i = 0; i < 2; i++) (void)pthread_join(threads[i], NULL);

  /* The second half's output goes to the first GPU and is added there. */
  const cumoe_view_mut other = matrix(half[0].context, CUMOE_F32, TOKENS, HIDDEN, NULL), out = half[0].out;
  check(cumoe_copy_between(half[0].context, other, NULL, half[1].context, cumoe_const(half[1].out), NULL));
  check(cumoe_add(half[0].context, cumoe_const(out), cumoe_const(other), out, NULL));
  read_out(&half[0], got);
  (void)run(&whole);
  read_out(&whole, want);

  double worst = 0, largest = 0;
  for (int i = 0; i < TOKENS * HIDDEN; i++) {
    worst = fmax(worst, fabs((double)got[i] - (double)want[i]));
    largest = fmax(largest, fabs((double)want[i]));
  }
  cumoe_device_info info[2] = {{.size = sizeof info[0]}, {.size = sizeof info[1]}};
  for (int i = 0; i < 2; i++) check(cumoe_context_info(half[i].context, &info[i]));
  printf("halves on %s (%d) and %s (%d): largest difference %.1e of %.1f\n", info[0].name, (int)info[0].device,
         info[1].name, (int)info[1].device, worst, largest);
  for (int i = 0; i < 2; i++) check(cumoe_context_destroy(half[i].context));
  check(cumoe_context_destroy(whole.context));
  return worst < 1e-5 * largest ? 0 : 1;
}
