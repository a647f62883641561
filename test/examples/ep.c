/*
 * Expert parallelism: four ranks hold a quarter of a layer's experts each and have tokens of their own, a thread drives
 * each, and one call answers as a rank with all experts would. Ranks share the GPUs, if there are several, or are on
 * the CPU. Compared with the whole layer on the CPU.
 */
#include <cumoe/cumoe.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 4, TOKENS = 8, ALL = RANKS * TOKENS, HIDDEN = 64, INTER = 48, EXPERTS = 8, TOP_K = 3 };
enum { SHARE = EXPERTS / RANKS, UP = 2 * INTER * HIDDEN, DOWN = HIDDEN * INTER };

static float x[ALL * HIDDEN], router[EXPERTS * HIDDEN], gate_up[EXPERTS * UP], down[EXPERTS * DOWN];
static float got[ALL * HIDDEN], want[ALL * HIDDEN];

typedef struct rank {
  int32_t number;
  cumoe_context context;
  cumoe_plan plan;
  cumoe_view_mut arena;
} rank;

static rank ranks[RANKS];

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
  else
    check(cumoe_fill(context, view, 0, NULL));
  check(cumoe_synchronize(context, NULL));
  return view;
}

static cumoe_plan plan_of(cumoe_context context, int32_t experts)
{
  cumoe_plan plan;
  const cumoe_moe_desc desc = {.size = sizeof desc,
                               .num_experts = EXPERTS,
                               .local_experts = experts,
                               .hidden = HIDDEN,
                               .inter = INTER,
                               .dtype = CUMOE_F32,
                               .routing = cumoe_routing_qwen3(TOP_K)};
  check(cumoe_plan_create(context, &desc, &plan));
  return plan;
}

static cumoe_weights bind(cumoe_context context, int32_t first, int32_t experts)
{
  cumoe_weights weights;
  cumoe_weights_desc where = {.size = sizeof where,
                              .experts = experts,
                              .hidden = HIDDEN,
                              .inter = INTER,
                              .gate_order = CUMOE_GATE_UP_CONCAT,
                              .up_major = CUMOE_OUT_IN,
                              .down_major = CUMOE_OUT_IN};
  where.gate_up.data = cumoe_const(matrix(context, CUMOE_F32, experts * 2 * INTER, HIDDEN, gate_up + first * UP));
  where.down.data = cumoe_const(matrix(context, CUMOE_F32, experts * HIDDEN, INTER, down + first * DOWN));
  check(cumoe_weights_bind(context, &where, &weights));
  return weights;
}

static cumoe_group_config config_of(int32_t number, void *const *arenas)
{
  return (cumoe_group_config){
      .size = sizeof(cumoe_group_config), .rank = number, .ranks = RANKS, .max_tokens = TOKENS, .arenas = arenas};
}

/* All arenas are there, and zero, before any rank joins. */
static void open_rank(rank *r, int32_t number, int32_t devices)
{
  size_t bytes;
  r->number = number;
  check(cumoe_context_create(devices ? number % devices : CUMOE_DEVICE_CPU, NULL, &r->context));
  r->plan = plan_of(r->context, SHARE);
  for (int32_t peer = 0; peer < devices; peer++)
    if (peer != number % devices) check(cumoe_pool_allow_peer(r->context, peer));
  const cumoe_group_config config = config_of(number, NULL);
  check(cumoe_ep_arena(r->plan, &config, &bytes));
  r->arena = matrix(r->context, CUMOE_U8, 1, (int64_t)bytes, NULL);
}

static void *run(void *argument)
{
  rank *r = argument;
  void *arenas[RANKS];
  int32_t places[EXPERTS];
  cumoe_group group;
  cumoe_group_fault fault = {.size = sizeof fault};
  cumoe_stream stream;
  size_t bytes;
  for (int32_t i = 0; i < RANKS; i++) arenas[i] = ranks[i].arena.data;
  for (int32_t e = 0; e < EXPERTS; e++) places[e] = cumoe_ep_place(e / SHARE, e % SHARE);
  const cumoe_group_config config = config_of(r->number, arenas);
  const cumoe_weights weights = bind(r->context, r->number * SHARE, SHARE);
  check(cumoe_stream_create(r->context, 0, &stream));
  check(cumoe_group_create(r->context, r->plan, &config, r->arena, &group));
  check(cumoe_ep_workspace(group, &bytes));
  const cumoe_view_mut out = matrix(r->context, CUMOE_F32, TOKENS, HIDDEN, NULL);
  float *const mine = got + r->number * TOKENS * HIDDEN;
  const cumoe_moe_args layer = {
      .size = sizeof layer,
      .x = cumoe_const(matrix(r->context, CUMOE_F32, TOKENS, HIDDEN, x + r->number * TOKENS * HIDDEN)),
      .router_weight = cumoe_const(matrix(r->context, CUMOE_F32, EXPERTS, HIDDEN, router)),
      .out = out,
      .workspace = matrix(r->context, CUMOE_U8, 1, (int64_t)bytes, NULL)};
  const cumoe_ep_args args = {.size = sizeof args,
                              .placement = cumoe_const(matrix(r->context, CUMOE_I32, EXPERTS, 1, places)),
                              .layer = &layer};
  check(cumoe_ep_forward(group, weights, &args, stream));
  check(cumoe_copy_to_host(r->context, mine, TOKENS * HIDDEN * sizeof *mine, cumoe_const(out), stream));
  check(cumoe_synchronize(r->context, stream));
  check(cumoe_group_fault_read(group, &fault));
  if (fault.cause != CUMOE_GROUP_ALIVE) fprintf(stderr, "rank %d: rank %d gave up\n", (int)r->number, (int)fault.by);
  check(cumoe_group_destroy(group));
  check(cumoe_stream_destroy(r->context, stream));
  return NULL;
}

static void whole_layer(void)
{
  cumoe_context context;
  size_t bytes;
  check(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &context));
  const cumoe_plan plan = plan_of(context, EXPERTS);
  check(cumoe_plan_workspace(plan, ALL, &bytes));
  const cumoe_moe_args args = {.size = sizeof args,
                               .x = cumoe_matrix(x, CUMOE_F32, ALL, HIDDEN, HIDDEN),
                               .router_weight = cumoe_matrix(router, CUMOE_F32, EXPERTS, HIDDEN, HIDDEN),
                               .out = cumoe_matrix_mut(want, CUMOE_F32, ALL, HIDDEN, HIDDEN),
                               .workspace = matrix(context, CUMOE_U8, 1, (int64_t)bytes, NULL)};
  check(cumoe_moe_forward(plan, bind(context, 0, EXPERTS), &args, NULL));
  check(cumoe_context_destroy(context));
}

/* GPUs that can be opened; 0: only one. Ranks on one GPU wait in turns for what others on it have to send. */
static int32_t count_devices(void)
{
  int32_t count = 0;
  cumoe_context context;
  while (count < RANKS && cumoe_context_create(count, NULL, &context) == CUMOE_OK) {
    check(cumoe_context_destroy(context));
    count++;
  }
  return count > 1 ? count : 0;
}

int main(void)
{
  pthread_t threads[RANKS];
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* ranks that share a GPU wait for each other: a queue each */
  const int32_t devices = count_devices();
  fill(x, ALL * HIDDEN, 1, 1);
  fill(router, EXPERTS * HIDDEN, 0.3f, 2);
  fill(gate_up, EXPERTS * UP, 0.3f, 3);
  fill(down, EXPERTS * DOWN, 0.3f, 4);
  for (int32_t i = 0; i < RANKS; i++) open_rank(&ranks[i], i, devices);
  for (int i = 0; i < RANKS; i++)
    if (pthread_create(&threads[i], NULL, run, &ranks[i]) != 0) return 1;
  for (int i = 0; i < RANKS; i++) (void)pthread_join(threads[i], NULL);
  whole_layer();

  double worst = 0, largest = 0;
  for (int i = 0; i < ALL * HIDDEN; i++) {
    worst = fmax(worst, fabs((double)got[i] - (double)want[i]));
    largest = fmax(largest, fabs((double)want[i]));
  }
  printf("%d ranks on %d GPUs: largest difference %.1e of %.1f\n", (int)RANKS, (int)devices, worst, largest);
  for (int i = 0; i < RANKS; i++) check(cumoe_context_destroy(ranks[i].context));
  return worst < 1e-5 * largest ? 0 : 1;
}
