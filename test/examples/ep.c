/*
 * Expert parallelism: four ranks hold a quarter of a layer's experts each and have tokens of their own, and one call
 * answers as a rank with all experts would. Ranks are processes on the CPU, which share their arenas, or threads, which
 * share the GPUs, where there are several. Compared with the whole layer on the CPU.
 */
#include <cumoe/cumoe.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 4, TOKENS = 8, ALL = RANKS * TOKENS, HIDDEN = 64, INTER = 48, EXPERTS = 8, TOP_K = 3 };
enum { SHARE = EXPERTS / RANKS, UP = 2 * INTER * HIDDEN, DOWN = HIDDEN * INTER };

static float x[ALL * HIDDEN], router[EXPERTS * HIDDEN], gate_up[EXPERTS * UP], down[EXPERTS * DOWN];
static float want[ALL * HIDDEN];

/* Where ranks meet: threads or processes. An engine has MPI for it, a store, or a communicator. */
enum { MEETINGS = 16, LETTER = 1024 };
typedef struct meeting {
  atomic_int arrived[MEETINGS];
  unsigned char letters[MEETINGS][RANKS][LETTER];
  float got[ALL * HIDDEN];
} meeting;
static meeting *shared;

typedef struct rank {
  int32_t number, device;
  int meetings;
} rank;

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

/* Whoever waits half a minute for another gives up. */
static int all_gather(void *user, const void *mine, void *all, size_t bytes)
{
  rank *r = user;
  const int at = r->meetings++;
  const struct timespec nap = {.tv_nsec = 1000000};
  if (at == MEETINGS || bytes > LETTER) return 1;
  memcpy(shared->letters[at][r->number], mine, bytes);
  atomic_fetch_add(&shared->arrived[at], 1);
  for (int ms = 0; atomic_load(&shared->arrived[at]) < RANKS; ms++) {
    if (ms == 30000) return 2;
    nanosleep(&nap, NULL);
  }
  for (int i = 0; i < RANKS; i++) memcpy((char *)all + (size_t)i * bytes, shared->letters[at][i], bytes);
  return 0;
}

/* Arenas of all ranks, then the group of them. */
static cumoe_group join(rank *r, cumoe_context context, cumoe_plan plan, cumoe_arenas *arenas)
{
  size_t bytes;
  cumoe_group group;
  cumoe_group_config config = {.size = sizeof config, .rank = r->number, .ranks = RANKS, .max_tokens = TOKENS};
  const cumoe_arenas_config where = {
      .size = sizeof where, .rank = r->number, .ranks = RANKS, .all_gather = all_gather, .user = r};
  cumoe_arenas_info info = {.size = sizeof info};
  check(cumoe_ep_arena(plan, &config, &bytes));
  check(cumoe_arenas_create(context, bytes, &where, arenas));
  check(cumoe_arenas_get_info(*arenas, &info));
  config.arenas = info.arenas;
  check(cumoe_group_create(context, plan, &config, info.arena, &group));
  return group;
}

static void *run(void *argument)
{
  rank *r = argument;
  int32_t places[EXPERTS];
  cumoe_context context;
  cumoe_arenas arenas;
  cumoe_group_fault fault = {.size = sizeof fault};
  cumoe_stream stream;
  size_t bytes;
  for (int32_t e = 0; e < EXPERTS; e++) places[e] = cumoe_ep_place(e / SHARE, e % SHARE);
  check(cumoe_context_create(r->device, NULL, &context));
  const cumoe_plan plan = plan_of(context, SHARE);
  const cumoe_weights weights = bind(context, r->number * SHARE, SHARE);
  const cumoe_group group = join(r, context, plan, &arenas);
  check(cumoe_stream_create(context, 0, &stream));
  check(cumoe_ep_workspace(group, &bytes));
  const cumoe_view_mut out = matrix(context, CUMOE_F32, TOKENS, HIDDEN, NULL);
  const cumoe_moe_args layer = {
      .size = sizeof layer,
      .x = cumoe_const(matrix(context, CUMOE_F32, TOKENS, HIDDEN, x + r->number * TOKENS * HIDDEN)),
      .router_weight = cumoe_const(matrix(context, CUMOE_F32, EXPERTS, HIDDEN, router)),
      .out = out,
      .workspace = matrix(context, CUMOE_U8, 1, (int64_t)bytes, NULL)};
  const cumoe_ep_args args = {
      .size = sizeof args, .placement = cumoe_const(matrix(context, CUMOE_I32, EXPERTS, 1, places)), .layer = &layer};
  float *const mine = shared->got + r->number * TOKENS * HIDDEN;
  /* A rank waits for the others on its GPU: ranks that share one make their memory before any of them begins, and copy
   * when it has ended. */
  char here = 1, all[RANKS];
  check(all_gather(r, &here, all, sizeof here) ? CUMOE_ERR_PEER : CUMOE_OK);
  check(cumoe_ep_forward(group, weights, &args, stream));
  check(cumoe_synchronize(context, stream));
  check(cumoe_copy_to_host(context, mine, TOKENS * HIDDEN * sizeof *mine, cumoe_const(out), stream));
  check(cumoe_synchronize(context, stream));
  check(cumoe_group_fault_read(group, &fault));
  if (fault.cause != CUMOE_GROUP_ALIVE) fprintf(stderr, "rank %d: rank %d gave up\n", (int)r->number, (int)fault.by);
  check(cumoe_group_destroy(group));
  check(cumoe_arenas_destroy(arenas));
  check(cumoe_stream_destroy(context, stream));
  check(cumoe_context_destroy(context));
  return NULL;
}

/* Whether all came to their end. */
static int run_threads(rank *ranks)
{
  pthread_t threads[RANKS];
  for (int i = 0; i < RANKS; i++)
    if (pthread_create(&threads[i], NULL, run, &ranks[i]) != 0) return 0;
  for (int i = 0; i < RANKS; i++) (void)pthread_join(threads[i], NULL);
  return 1;
}

static int run_processes(rank *ranks)
{
  pid_t children[RANKS];
  int good = 1, end;
  for (int i = 0; i < RANKS; i++) {
    children[i] = fork();
    if (children[i] < 0) return 0;
    if (children[i] == 0) {
      run(&ranks[i]);
      exit(0);
    }
  }
  for (int i = 0; i < RANKS; i++) good &= waitpid(children[i], &end, 0) == children[i] && end == 0;
  return good;
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
  rank ranks[RANKS];
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* ranks that share a GPU wait for each other: a queue each */
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  const int32_t devices = count_devices();
  fill(x, ALL * HIDDEN, 1, 1);
  fill(router, EXPERTS * HIDDEN, 0.3f, 2);
  fill(gate_up, EXPERTS * UP, 0.3f, 3);
  fill(down, EXPERTS * DOWN, 0.3f, 4);
  for (int32_t i = 0; i < RANKS; i++) ranks[i] = (rank){i, devices ? i % devices : CUMOE_DEVICE_CPU, 0};
  if (!(devices ? run_threads(ranks) : run_processes(ranks))) return 1;
  whole_layer();

  double worst = 0, largest = 0;
  for (int i = 0; i < ALL * HIDDEN; i++) {
    worst = fmax(worst, fabs((double)shared->got[i] - (double)want[i]));
    largest = fmax(largest, fabs((double)want[i]));
  }
  printf("%d ranks on %d GPUs: largest difference %.1e of %.1f\n", (int)RANKS, (int)devices, worst, largest);
  return worst < 1e-5 * largest ? 0 : 1;
}
