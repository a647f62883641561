/*
 * What expert parallelism costs: ranks on the GPUs of this host, a thread each, tokens and weights random. For each
 * shape, way of returning and T tokens a rank, medians of graph replays, of the slowest rank:
 *
 *   layer    cumoe_ep_forward
 *   gate     router and gate of a rank's own T tokens
 *   experts  cumoe_moe_forward by ids of exactly the rows that a rank has received
 *   tax      layer - gate - experts
 *   wire     bytes that leave the busiest rank, tokens and results, and those over layer - gate - experts
 *
 *   lib/bench/ep [ranks [shape]]    more ranks than GPUs share them, which only shows that it runs; one rank: what
 *                                   its launches cost
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "../include/cumoe/cumoe.h"

enum { MOST_RANKS = 8, SAMPLES = 7, MOST_TOKENS = 2048, NOISE = 1 << 24 };

typedef struct shape {
  const char *name;
  int32_t experts, top_k, hidden, inter;
} shape;

static const shape shapes[] = {{"qwen3-30b-a3b", 128, 8, 2048, 768}, {"mixtral-8x7b", 8, 2, 4096, 14336}};
static const int64_t token_counts[] = {1, 8, 32, 128, 512, 2048};

static int32_t ranks, gpus;
static pthread_barrier_t together;
static uint16_t noise[NOISE]; /* bf16, deviation about 0.03 */

typedef struct rank {
  int32_t number;
  cumoe_context context;
  cumoe_stream stream;
  cumoe_plan plan;
  cumoe_weights weights;
  cumoe_view router, x, map;
  cumoe_view_mut out, logits;
  int32_t *ids; /* [T, k] on the host */
  double layer, gate, experts;
  int64_t wire; /* bytes out */
} rank;

static rank all[MOST_RANKS];

static void check(cumoe_status status)
{
  if (status == CUMOE_OK) return;
  fprintf(stderr, "%s: %s\n", cumoe_status_name(status), cumoe_last_error());
  exit(1);
}

static void check_cuda(cudaError_t error)
{
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s\n", cudaGetErrorString(error));
  exit(1);
}

static void make_noise(void)
{
  uint32_t seed = 1;
  for (int i = 0; i < NOISE; i++) {
    float sum = 0;
    for (int j = 0; j < 3; j++) {
      seed = seed * 1664525u + 1013904223u;
      sum += (float)(seed >> 8) / 8388608.f - 1.f;
    }
    sum *= 0.03f;
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    noise[i] = (uint16_t)(bits >> 16);
  }
}

/* Freed with its context; filled with noise from some point of it. */
static cumoe_view_mut matrix(const rank *r, cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  cumoe_buffer buffer;
  check(cumoe_buffer_alloc(r->context, dtype, rows, cols, NULL, &buffer));
  const cumoe_view_mut view = cumoe_buffer_view_mut(buffer);
  const size_t bytes = (size_t)(rows * cols) * cumoe_dtype_bytes(dtype);
  for (size_t at = 0; at < bytes && dtype == CUMOE_BF16; at += sizeof noise) {
    const size_t part = bytes - at < sizeof noise ? bytes - at : sizeof noise;
    const void *from = at ? view.data : (const void *)noise;
    check_cuda(cudaMemcpy((char *)view.data + at, from, part, cudaMemcpyDefault));
  }
  return view;
}

static cumoe_view upload(const rank *r, cumoe_dtype dtype, int64_t rows, int64_t cols, const void *values)
{
  const cumoe_view_mut view = matrix(r, dtype, rows, cols);
  check_cuda(cudaMemcpy(view.data, values, (size_t)(rows * cols) * cumoe_dtype_bytes(dtype), cudaMemcpyDefault));
  return cumoe_const(view);
}

/* Experts in blocks. */
static int32_t rank_of(const shape *s, int32_t expert)
{
  return expert * ranks / s->experts;
}

static void open_shape(rank *r, const shape *s)
{
  int32_t map[CUMOE_MAX_EXPERTS], local = 0;
  check(cumoe_context_create(r->number % gpus, NULL, &r->context));
  check(cumoe_stream_create(r->context, 0, &r->stream));
  for (int32_t e = 0; e < s->experts; e++) map[e] = rank_of(s, e) == r->number ? local++ : -1;
  const cumoe_moe_desc desc = {.size = sizeof desc,
                               .num_experts = s->experts,
                               .local_experts = local,
                               .hidden = s->hidden,
                               .inter = s->inter,
                               .dtype = CUMOE_BF16,
                               .routing = cumoe_routing_qwen3(s->top_k)};
  check(cumoe_plan_create(r->context, &desc, &r->plan));
  cumoe_weights_desc w = {.size = sizeof w,
                          .experts = local,
                          .hidden = s->hidden,
                          .inter = s->inter,
                          .gate_order = CUMOE_GATE_UP_CONCAT,
                          .up_major = CUMOE_OUT_IN,
                          .down_major = CUMOE_OUT_IN};
  w.gate_up.data = cumoe_const(matrix(r, CUMOE_BF16, (int64_t)local * 2 * s->inter, s->hidden));
  w.down.data = cumoe_const(matrix(r, CUMOE_BF16, (int64_t)local * s->hidden, s->inter));
  check(cumoe_weights_bind(r->context, &w, &r->weights));
  r->router = cumoe_const(matrix(r, CUMOE_BF16, s->experts, s->hidden));
  /* Other tokens on each rank. */
  r->x = upload(r, CUMOE_BF16, MOST_TOKENS, s->hidden, noise + 1001 * (r->number + 1));
  r->out = matrix(r, CUMOE_BF16, (int64_t)MOST_TOKENS * ranks, s->hidden);
  r->logits = matrix(r, CUMOE_F32, MOST_TOKENS, s->experts);
  r->map = upload(r, CUMOE_I32, 1, s->experts, map);
  r->ids = malloc((size_t)MOST_TOKENS * (size_t)s->top_k * sizeof *r->ids);
}

/* ---- what is timed ---- */

static int compare(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Microseconds a replay; all ranks begin together. */
static double time_graph(const rank *r, cumoe_graph graph, int replays)
{
  double samples[SAMPLES];
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin));
  check_cuda(cudaEventCreate(&end));
  for (int i = 0; i < SAMPLES; i++) {
    float ms = 0;
    pthread_barrier_wait(&together);
    check(cumoe_graph_launch(r->context, graph, r->stream)); /* ranks that come late are waited for here */
    check_cuda(cudaEventRecord(begin, r->stream));
    for (int j = 0; j < replays; j++) check(cumoe_graph_launch(r->context, graph, r->stream));
    check_cuda(cudaEventRecord(end, r->stream));
    check_cuda(cudaEventSynchronize(end));
    check_cuda(cudaEventElapsedTime(&ms, begin, end));
    samples[i] = 1e3 * (double)ms / replays;
  }
  check_cuda(cudaEventDestroy(begin));
  check_cuda(cudaEventDestroy(end));
  check(cumoe_graph_destroy(r->context, graph));
  qsort(samples, SAMPLES, sizeof *samples, compare);
  return samples[SAMPLES / 2];
}

static cumoe_graph end_graph(const rank *r)
{
  cumoe_graph graph;
  check(cumoe_graph_end(r->context, r->stream, &graph));
  return graph;
}

typedef struct cell {
  const shape *shape;
  int64_t tokens;
  uint32_t flags;
  void *arenas[MOST_RANKS];
} cell;

static int replays_of(const cell *c)
{
  return c->tokens <= 128 ? 40 : 10;
}

static cumoe_group_config config_of(const rank *r, const cell *c)
{
  return (cumoe_group_config){.size = sizeof(cumoe_group_config),
                              .flags = c->flags,
                              .rank = r->number,
                              .ranks = ranks,
                              .max_tokens = c->tokens,
                              .timeout_ns = INT64_C(2000000000),
                              .arenas = c->arenas};
}

static void time_layer(rank *r, const cell *c, size_t arena_bytes)
{
  const shape *s = c->shape;
  int32_t places[CUMOE_MAX_EXPERTS], next[MOST_RANKS] = {0};
  cumoe_group group;
  cumoe_buffer ids, memory;
  size_t bytes;
  cumoe_group_fault fault = {.size = sizeof fault};
  const cumoe_group_config config = config_of(r, c);
  for (int32_t e = 0; e < s->experts; e++) places[e] = cumoe_ep_place(rank_of(s, e), next[rank_of(s, e)]++);
  check(cumoe_group_create(r->context, r->plan, &config,
                           cumoe_vector_mut(c->arenas[r->number], CUMOE_U8, (int64_t)arena_bytes), &group));
  check(cumoe_ep_workspace(group, &bytes));
  check(cumoe_buffer_alloc(r->context, CUMOE_U8, 1, (int64_t)bytes, NULL, &memory));
  check(cumoe_buffer_alloc(r->context, CUMOE_I32, c->tokens, s->top_k, NULL, &ids));
  check(cumoe_synchronize(r->context, NULL));
  const cumoe_moe_args layer = {.size = sizeof layer,
                                .x = cumoe_matrix(r->x.data, CUMOE_BF16, c->tokens, s->hidden, s->hidden),
                                .router_weight = r->router,
                                .out = cumoe_matrix_mut(r->out.data, CUMOE_BF16, c->tokens, s->hidden, s->hidden),
                                .ids_out = cumoe_buffer_view_mut(ids),
                                .workspace = cumoe_buffer_view_mut(memory)};
  const cumoe_ep_args args = {
      .size = sizeof args, .placement = upload(r, CUMOE_I32, s->experts, 1, places), .layer = &layer};
  check(cumoe_graph_begin(r->context, r->stream));
  check(cumoe_ep_forward(group, r->weights, &args, r->stream));
  r->layer = time_graph(r, end_graph(r), replays_of(c));
  check_cuda(cudaMemcpy(r->ids, cumoe_buffer_view(ids).data, (size_t)(c->tokens * s->top_k) * sizeof *r->ids,
                        cudaMemcpyDefault));
  check(cumoe_group_fault_read(group, &fault));
  if (fault.cause)
    printf("# rank %d: cause %d phase %d about %d by %d\n", (int)r->number, (int)fault.cause, (int)fault.phase,
           (int)fault.about, (int)fault.by);
  check(cumoe_group_destroy(group));
  check(cumoe_buffer_free(&ids));
  check(cumoe_buffer_free(&memory));
}

static void time_gate(rank *r, const cell *c)
{
  const shape *s = c->shape;
  const cumoe_routing routing = cumoe_routing_qwen3(s->top_k);
  const cumoe_view x = cumoe_matrix(r->x.data, CUMOE_BF16, c->tokens, s->hidden, s->hidden), none = {0};
  const cumoe_view_mut logits = cumoe_matrix_mut(r->logits.data, CUMOE_F32, c->tokens, s->experts, s->experts);
  cumoe_buffer ids, weights;
  check(cumoe_buffer_alloc(r->context, CUMOE_I32, c->tokens, s->top_k, NULL, &ids));
  check(cumoe_buffer_alloc(r->context, CUMOE_F32, c->tokens, s->top_k, NULL, &weights));
  check(cumoe_synchronize(r->context, NULL));
  check(cumoe_graph_begin(r->context, r->stream));
  check(cumoe_router(r->context, x, r->router, none, logits, r->stream));
  check(cumoe_gate(r->context, &routing, cumoe_const(logits), none, cumoe_buffer_view_mut(ids),
                   cumoe_buffer_view_mut(weights), r->stream));
  r->gate = time_graph(r, end_graph(r), replays_of(c));
  check(cumoe_buffer_free(&ids));
  check(cumoe_buffer_free(&weights));
}

/* The rows that came here: tokens of all ranks that chose any expert of this one. Counts what this rank sends, too. */
static int64_t received(rank *r, const cell *c, int32_t *ids)
{
  const int32_t k = c->shape->top_k;
  int64_t rows = 0, answers = 0;
  for (int32_t from = 0; from < ranks; from++)
    for (int64_t t = 0; t < c->tokens; t++) {
      int32_t here = 0;
      for (int32_t j = 0; j < k; j++) here += rank_of(c->shape, all[from].ids[t * k + j]) == r->number;
      if (!here) continue;
      memcpy(ids + rows * k, all[from].ids + t * k, (size_t)k * sizeof *ids);
      rows++;
      if (from != r->number) answers += c->flags & CUMOE_GROUP_EXACT ? here : 1;
    }
  r->wire = (ranks - 1) * c->tokens * (2 * c->shape->hidden + 8 * k) + answers * 2 * c->shape->hidden;
  return rows;
}

static void time_experts(rank *r, const cell *c)
{
  const shape *s = c->shape;
  int32_t *ids = malloc((size_t)(ranks * c->tokens * s->top_k) * sizeof *ids);
  const int64_t rows = received(r, c, ids);
  cumoe_buffer workspace, some, x;
  size_t bytes;
  check(cumoe_plan_workspace(r->plan, rows > 0 ? rows : 1, &bytes));
  check(cumoe_buffer_alloc(r->context, CUMOE_U8, 1, (int64_t)bytes, NULL, &workspace));
  check(cumoe_buffer_alloc(r->context, CUMOE_F32, rows > 0 ? rows : 1, s->top_k, NULL, &some));
  check(cumoe_buffer_alloc(r->context, CUMOE_BF16, rows > 0 ? rows : 1, s->hidden, NULL, &x));
  check(cumoe_fill(r->context, cumoe_buffer_view_mut(some), 0x3e, NULL));
  check(cumoe_fill(r->context, cumoe_buffer_view_mut(x), 0x3e, NULL));
  check(cumoe_synchronize(r->context, NULL));
  const cumoe_moe_args a = {.size = sizeof a,
                            .x = cumoe_matrix(cumoe_buffer_view(x).data, CUMOE_BF16, rows, s->hidden, s->hidden),
                            .ids = upload(r, CUMOE_I32, rows > 0 ? rows : 1, s->top_k, ids),
                            .weights = cumoe_matrix(cumoe_buffer_view(some).data, CUMOE_F32, rows, s->top_k, s->top_k),
                            .expert_map = r->map,
                            .out = cumoe_matrix_mut(r->out.data, CUMOE_BF16, rows, s->hidden, s->hidden),
                            .workspace = cumoe_buffer_view_mut(workspace)};
  check(cumoe_graph_begin(r->context, r->stream));
  if (rows) check(cumoe_moe_forward(r->plan, r->weights, &a, r->stream));
  r->experts = time_graph(r, end_graph(r), replays_of(c));
  check(cumoe_buffer_free(&workspace));
  check(cumoe_buffer_free(&some));
  check(cumoe_buffer_free(&x));
  free(ids);
}

/* ---- cells ---- */

static cell now;
static size_t arena_bytes;

static void *run_cell(void *argument)
{
  rank *r = argument;
  check_cuda(cudaSetDevice(r->number % gpus));
  time_layer(r, &now, arena_bytes);
  time_gate(r, &now);
  pthread_barrier_wait(&together);
  time_experts(r, &now);
  return NULL;
}

static void print_cell(void)
{
  /* Ranks end together: the slowest is the one that has most to do. */
  const rank *slow = &all[0];
  int64_t wire = 0;
  for (int32_t i = 0; i < ranks; i++) {
    if (all[i].gate + all[i].experts > slow->gate + slow->experts) slow = &all[i];
    if (all[i].wire > wire) wire = all[i].wire;
  }
  const double tax = slow->layer - slow->gate - slow->experts;
  printf("%-14s %-5s %5d %9.1f %8.1f %9.1f %8.1f %10.3f %8.1f\n", now.shape->name,
         now.flags & CUMOE_GROUP_EXACT ? "exact" : "sums", (int)now.tokens, slow->layer, slow->gate, slow->experts, tax,
         (double)wire * 1e-6, (double)wire * 1e-3 / tax);
  fflush(stdout);
}

static void measure_cell(const shape *s, int64_t tokens, uint32_t flags)
{
  pthread_t threads[MOST_RANKS];
  now = (cell){.shape = s, .tokens = tokens, .flags = flags};
  for (int32_t i = 0; i < ranks; i++) {
    const cumoe_group_config config = config_of(&all[i], &now);
    check(cumoe_ep_arena(all[i].plan, &config, &arena_bytes));
    check_cuda(cudaSetDevice(i % gpus));
    check_cuda(cudaMalloc(&now.arenas[i], arena_bytes));
    check_cuda(cudaMemset(now.arenas[i], 0, arena_bytes));
    check_cuda(cudaDeviceSynchronize());
  }
  for (int32_t i = 0; i < ranks; i++)
    if (pthread_create(&threads[i], NULL, run_cell, &all[i])) exit(1);
  for (int32_t i = 0; i < ranks; i++) pthread_join(threads[i], NULL);
  for (int32_t i = 0; i < ranks; i++) check_cuda(cudaFree(now.arenas[i]));
  print_cell();
}

int main(int argc, char **argv)
{
  check_cuda(cudaGetDeviceCount(&gpus));
  ranks = argc > 1 ? atoi(argv[1]) : gpus > 1 ? gpus : 2;
  if (ranks < 1 || ranks > MOST_RANKS) return 1;
  pthread_barrier_init(&together, NULL, (unsigned)ranks);
  make_noise();
  printf("%d ranks on %d GPUs; microseconds, MB, GB/s\n", (int)ranks, (int)gpus);
  printf("%-14s %-5s %5s %9s %8s %9s %8s %10s %8s\n", "shape", "back", "T", "layer", "gate", "experts", "tax", "wire",
         "over tax");
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    if (argc > 2 && strcmp(argv[2], shapes[i].name)) continue;
    for (int32_t r = 0; r < ranks; r++) {
      all[r] = (rank){.number = r};
      check_cuda(cudaSetDevice(r % gpus));
      open_shape(&all[r], &shapes[i]);
    }
    for (size_t t = 0; t < sizeof token_counts / sizeof *token_counts; t++)
      for (uint32_t exact = 0; exact < 2; exact++) measure_cell(&shapes[i], token_counts[t], exact);
    for (int32_t r = 0; r < ranks; r++) {
      check(cumoe_context_destroy(all[r].context));
      free(all[r].ids);
    }
  }
  return 0;
}
