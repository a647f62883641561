/*
 * What expert parallelism costs: ranks on the GPUs of this host, a thread each, tokens and weights random. For each
 * shape, way of returning and T tokens a rank, medians of graph replays; all of the rank that has most to do, as ranks
 * end together:
 *
 *   layer     cumoe_ep_forward
 *   gate      router and gate of a rank's own T tokens
 *   experts   cumoe_moe_forward by ids of exactly the rows that a rank has received
 *   tax       layer - gate - experts
 *   MB        that leave the busiest rank, tokens and results, headers included
 *   disp, ret what moves tokens and results, by itself and back to back: GB/s out of a rank, and its part of what
 *             plain stores reach in this run, both ways at once
 *   lanes     the layer as two lanes of T / 2 tokens on streams of their own, and its part of max(experts, link)
 *   ag+rs     by NCCL: router and gate, all-gather of tokens, ids and weights, the same experts over all ranks' tokens,
 *             reduce-scatter of their sums
 *   a2a       likewise, with sends and receives both ways and the sum by cumoe_add
 *   sliced    every expert cut along its inner dimension instead, all ranks' tokens: one GPU's share, without gate
 *   allred    what slicing needs besides: NCCL's all-reduce of all ranks' outputs
 *
 *   lib/bench/ep [--ranks N] [--model NAME] [--most T] [--tokens T,T] [--plain] [--sums] [--staged] [--room C]
 *                [--each] [--hashes] [--aside T] [--own R]
 *   --most: T up to that; --tokens: these alone; --plain: no NCCL, slices or lanes; --sums: not EXACT; --staged:
 *   groups by NCCL as well; --room: groups for at least C tokens, whose calls say that they have T; --each: every
 *   rank's times, and those of gate and experts in one graph, where the experts' weights have driven the router's and
 *   the code out of L2 as they do in a layer; --hashes: of every rank's outputs, to compare ways with. More ranks than
 *   GPUs share them, which only shows that it runs; one rank: what its launches cost. --aside, --own: rows go aside
 *   from T tokens on, own tokens are apart from R rows an expert on, instead of the library's choice. NCCL is opened
 *   where LD_LIBRARY_PATH has libnccl.so.2
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "../include/cumoe/cumoe.h"

#include "../host/context.h"
#include "../host/ep.h"
#include "nccl.h"
#include "shapes.h"

enum { MOST_RANKS = 8, SAMPLES = 5, MOST_TOKENS = 8192, NOISE = 1 << 24, STORED = 64 << 20 };

static const int64_t token_counts[] = {1, 8, 32, 128, 512, 2048, 8192};

static int32_t ranks, gpus;
static bool plain, sums_alone, staged, each, hashes;
static const char *only_tokens; /* "T,T" */
static int64_t most_room, aside_tokens = -1, own_rows = -1;
static pthread_barrier_t together;
static uint16_t noise[NOISE]; /* bf16, deviation about 0.03 */
static double stores;         /* bytes a second out of a rank, all ranks at once */

/* Microseconds, of a cell. */
typedef struct times {
  double layer, gate, experts, serial, dispatch, answer, lanes, gather, exchange, sliced, reduce;
} times;

typedef struct rank {
  int32_t number;
  cumoe_context context;
  cumoe_stream stream, second;
  cumoe_plan plan, slice;
  cumoe_weights weights, sliced;
  cumoe_view router, x, map;
  cumoe_view_mut out, logits;
  int32_t *ids; /* [T, k] on the host */
  void *peer;   /* STORED bytes that others store to */
  cumoe_function store;
  void *comm;
  times us;
  int64_t tokens_out, answers_out; /* bytes */
  uint64_t hash;                   /* of the layer's outputs */
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

/* Freed with its context. bf16: filled with noise from element `skip` on, again and again. */
static cumoe_view_mut matrix_from(const rank *r, cumoe_dtype dtype, int64_t rows, int64_t cols, size_t skip)
{
  cumoe_buffer buffer;
  check(cumoe_buffer_alloc(r->context, dtype, rows, cols, NULL, &buffer));
  const cumoe_view_mut view = cumoe_buffer_view_mut(buffer);
  const size_t bytes = (size_t)(rows * cols) * cumoe_dtype_bytes(dtype), most = (NOISE - skip) * sizeof *noise;
  check(cumoe_synchronize(r->context, NULL));
  for (size_t at = 0; at < bytes && dtype == CUMOE_BF16; at += most) {
    const size_t part = bytes - at < most ? bytes - at : most;
    const void *from = at ? view.data : (const void *)(noise + skip);
    check_cuda(cudaMemcpy((char *)view.data + at, from, part, cudaMemcpyDefault));
  }
  return view;
}

static cumoe_view_mut matrix(const rank *r, cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  return matrix_from(r, dtype, rows, cols, 0);
}

static cumoe_view upload(const rank *r, cumoe_dtype dtype, int64_t rows, int64_t cols, const void *values)
{
  const cumoe_view_mut view = matrix(r, dtype, rows, cols);
  check_cuda(cudaMemcpy(view.data, values, (size_t)(rows * cols) * cumoe_dtype_bytes(dtype), cudaMemcpyDefault));
  return cumoe_const(view);
}

/* Experts in blocks. */
static int32_t rank_of(const shape *m, int32_t expert)
{
  return expert * ranks / m->experts;
}

static cumoe_moe_desc describe(const shape *m, int32_t local, int32_t inter)
{
  return (cumoe_moe_desc){.size = sizeof(cumoe_moe_desc),
                          .num_experts = m->experts,
                          .local_experts = local,
                          .hidden = m->hidden,
                          .inter = inter,
                          .dtype = CUMOE_BF16,
                          .routing = m->routing};
}

static void bind(rank *r, const shape *m, int32_t local, int32_t inter, cumoe_view up, cumoe_view down,
                 cumoe_weights *weights)
{
  const int64_t rows = local;
  const cumoe_weights_desc w = {.size = sizeof w,
                                .experts = local,
                                .hidden = m->hidden,
                                .inter = inter,
                                .gate_order = CUMOE_GATE_UP_CONCAT,
                                .up_major = CUMOE_OUT_IN,
                                .down_major = CUMOE_OUT_IN,
                                .gate_up.data =
                                    cumoe_matrix(up.data, CUMOE_BF16, rows * 2 * inter, m->hidden, m->hidden),
                                .down.data = cumoe_matrix(down.data, CUMOE_BF16, rows * m->hidden, inter, inter)};
  check(cumoe_weights_bind(r->context, &w, weights));
}

static void open_model(rank *r, const shape *m)
{
  int32_t map[CUMOE_MAX_EXPERTS], local = 0;
  const int64_t most = MOST_TOKENS * (int64_t)ranks;
  for (int32_t e = 0; e < m->experts; e++) map[e] = rank_of(m, e) == r->number ? local++ : -1;
  const cumoe_moe_desc desc = describe(m, local, m->inter), slice = describe(m, m->experts, m->inter / ranks);
  check(cumoe_plan_create(r->context, &desc, &r->plan));
  check(cumoe_plan_create(r->context, &slice, &r->slice));
  const cumoe_view up = cumoe_const(matrix(r, CUMOE_BF16, (int64_t)local * 2 * m->inter, m->hidden));
  const cumoe_view down = cumoe_const(matrix(r, CUMOE_BF16, (int64_t)local * m->hidden, m->inter));
  bind(r, m, local, m->inter, up, down, &r->weights);
  bind(r, m, m->experts, m->inter / ranks, up, down, &r->sliced); /* as many bytes, the same ones */
  r->router = cumoe_const(matrix(r, CUMOE_BF16, m->experts, m->hidden));
  r->x = cumoe_const(matrix_from(r, CUMOE_BF16, MOST_TOKENS, m->hidden, 1001 * ((size_t)r->number + 1)));
  r->out = matrix(r, CUMOE_BF16, most, m->hidden);
  r->logits = matrix(r, CUMOE_F32, MOST_TOKENS, m->experts);
  r->map = upload(r, CUMOE_I32, 1, m->experts, map);
  r->ids = malloc((size_t)(MOST_TOKENS * m->top_k) * sizeof *r->ids);
}

/* ---- graphs ---- */

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
  const shape *model;
  int64_t tokens;
  uint32_t flags;
  int32_t lanes;
  size_t arena_bytes;
  void *arenas[MOST_RANKS]; /* where there is no communicator to make them by */
} cell;

static cell now;

static int replays_of(const cell *c)
{
  return c->tokens <= 128 ? 30 : c->tokens <= 512 ? 10 : c->tokens <= 2048 ? 6 : 3;
}

/* ---- stores: what the link gives ---- */

static const char store_ptx[] = ".version 7.0\n.target sm_80\n.address_size 64\n"
                                ".visible .entry store(.param .u64 to, .param .u64 bytes)\n{\n"
                                ".reg .pred %p; .reg .b32 %r<6>; .reg .b64 %d<4>;\n"
                                "ld.param.u64 %d0, [to]; ld.param.u64 %d1, [bytes]; add.u64 %d1, %d0, %d1;\n"
                                "mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x;\n"
                                "mov.u32 %r3, %nctaid.x; mad.lo.u32 %r4, %r0, %r1, %r2; mul.lo.u32 %r5, %r3, %r1;\n"
                                "mul.wide.u32 %d2, %r4, 16; add.u64 %d0, %d0, %d2; mul.wide.u32 %d3, %r5, 16;\n"
                                "L: setp.ge.u64 %p, %d0, %d1; @%p bra E;\n"
                                "st.global.v4.u32 [%d0], {%r4, %r4, %r4, %r4}; add.u64 %d0, %d0, %d3; bra L;\n"
                                "E: ret;\n}\n";

/* To all other ranks, one after the other. */
static double time_stores(const rank *r, uint32_t ctas)
{
  check(cumoe_graph_begin(r->context, r->stream));
  for (int32_t i = 1; i < ranks; i++) {
    const cumoe_launch l = {.size = sizeof l, .grid = {ctas, 1, 1}, .block = {512, 1, 1}, .stream = r->stream};
    const cumoe_arg args[] = {cumoe_arg_u64((uint64_t)(uintptr_t)all[(r->number + i) % ranks].peer),
                              cumoe_arg_u64(STORED)};
    check(cumoe_launch_kernel(r->store, &l, args, 2));
  }
  return time_graph(r, end_graph(r), 5);
}

static void reach_others(void)
{
  for (int32_t d = 0; d < gpus; d++) {
    const cudaError_t error = cudaDeviceEnablePeerAccess(d, 0);
    if (error != cudaSuccess) (void)cudaGetLastError(); /* its own device, or enabled before */
  }
}

static void *run_stores(void *argument)
{
  static const uint32_t ctas[] = {8, 16, 32, 64, 132};
  rank *r = argument;
  cumoe_module module;
  check_cuda(cudaSetDevice(r->number % gpus));
  reach_others();
  check(cumoe_module_load(r->context, store_ptx, sizeof store_ptx, &module));
  check(cumoe_module_function(module, "store", 0, &r->store));
  for (size_t i = 0; i < sizeof ctas / sizeof *ctas; i++) {
    const double us = time_stores(r, ctas[i]), rate = (ranks - 1) * (double)STORED / us * 1e6;
    if (r->number != 0) continue;
    if (rate > stores) stores = rate;
    printf("%s%u CTAs %.0f", i ? ", " : "# stores to the others, all at once, GB/s out of a rank: ", ctas[i],
           rate * 1e-9);
  }
  if (r->number == 0) printf("\n");
  return NULL;
}

/* ---- the layer ---- */

static cumoe_group_config config_of(const rank *r, const cell *c)
{
  return (cumoe_group_config){.size = sizeof(cumoe_group_config),
                              .flags = c->flags,
                              .rank = r->number,
                              .ranks = ranks,
                              .lanes = c->lanes,
                              .max_tokens = c->tokens / c->lanes > most_room ? c->tokens / c->lanes : most_room,
                              .timeout_ns = INT64_C(2000000000),
                              .arenas = c->arenas};
}

/* A rank's membership, and what its calls need. */
typedef struct member {
  cumoe_arenas arenas;
  cumoe_group group;
  cumoe_buffer ids, memory[CUMOE_MAX_LANES];
  cumoe_view placement;
} member;

static cumoe_view_mut make_arena(const rank *r, const cell *c, cumoe_group_config *config, member *one)
{
  const cumoe_arenas_config where = {.size = sizeof where, .rank = r->number, .ranks = ranks, .comm = r->comm};
  cumoe_arenas_info info = {.size = sizeof info};
  const bool by_nccl = c->flags & CUMOE_GROUP_NCCL;
  if (by_nccl) config->arenas = NULL, config->comm = r->comm;
  if (!r->comm || by_nccl) return cumoe_vector_mut(c->arenas[r->number], CUMOE_U8, (int64_t)c->arena_bytes);
  check(cumoe_arenas_create(r->context, c->arena_bytes, &where, &one->arenas));
  check(cumoe_arenas_get_info(one->arenas, &info));
  config->arenas = info.arenas;
  return info.arena;
}

static void change_limits(cumoe_group handle)
{
  group *g;
  check(find_group(handle, &g));
  if (!g->side[0]) return;
  if (aside_tokens >= 0) g->aside_tokens = aside_tokens;
  if (own_rows >= 0) g->own_rows = own_rows;
}

static member join(rank *r, const cell *c)
{
  const shape *m = c->model;
  cumoe_group_config config = config_of(r, c);
  int32_t places[CUMOE_MAX_EXPERTS], next[MOST_RANKS] = {0};
  member one = {0};
  size_t bytes;
  for (int32_t e = 0; e < m->experts; e++) places[e] = cumoe_ep_place(rank_of(m, e), next[rank_of(m, e)]++);
  const cumoe_view_mut arena = make_arena(r, c, &config, &one);
  check(cumoe_group_create(r->context, r->plan, &config, arena, &one.group));
  change_limits(one.group);
  check(cumoe_ep_workspace(one.group, &bytes));
  for (int32_t l = 0; l < c->lanes; l++)
    check(cumoe_buffer_alloc(r->context, CUMOE_U8, 1, (int64_t)bytes, NULL, &one.memory[l]));
  check(cumoe_buffer_alloc(r->context, CUMOE_I32, c->tokens, m->top_k, NULL, &one.ids));
  one.placement = upload(r, CUMOE_I32, m->experts, 1, places);
  check(cumoe_synchronize(r->context, NULL));
  return one;
}

static void leave(const rank *r, member *one)
{
  cumoe_group_fault fault = {.size = sizeof fault};
  check(cumoe_group_fault_read(one->group, &fault));
  if (fault.cause)
    printf("# rank %d: cause %d phase %d about %d by %d\n", (int)r->number, (int)fault.cause, (int)fault.phase,
           (int)fault.about, (int)fault.by);
  check(cumoe_group_destroy(one->group));
  check(cumoe_arenas_destroy(one->arenas));
  check(cumoe_buffer_free(&one->ids));
  for (int i = 0; i < CUMOE_MAX_LANES; i++) check(cumoe_buffer_free(&one->memory[i]));
}

static void launch_layer(const rank *r, const cell *c, const member *one, int32_t lane, cumoe_stream stream)
{
  const shape *m = c->model;
  const int64_t tokens = c->tokens / c->lanes, first = lane * tokens * m->hidden;
  cumoe_view_mut ids = cumoe_buffer_view_mut(one->ids);
  ids.data = (int32_t *)ids.data + lane * tokens * m->top_k;
  ids.rows = tokens;
  const cumoe_moe_args layer = {
      .size = sizeof layer,
      .x = cumoe_matrix((const uint16_t *)r->x.data + first, CUMOE_BF16, tokens, m->hidden, m->hidden),
      .router_weight = r->router,
      .out = cumoe_matrix_mut((uint16_t *)r->out.data + first, CUMOE_BF16, tokens, m->hidden, m->hidden),
      .ids_out = cumoe_matrix_mut(ids.data, CUMOE_I32, tokens, m->top_k, m->top_k),
      .workspace = cumoe_buffer_view_mut(one->memory[lane])};
  const cumoe_ep_args args = {
      .size = sizeof args, .lane = lane, .tokens_max = tokens, .placement = one->placement, .layer = &layer};
  check(cumoe_ep_forward(one->group, r->weights, &args, stream));
}

/* Equal for whatever computes the same. */
static uint64_t hash_outputs(const rank *r, const cell *c)
{
  const size_t count = (size_t)(c->tokens * c->model->hidden);
  uint16_t *out = malloc(count * sizeof *out);
  uint64_t hash = 14695981039346656037u;
  check_cuda(cudaMemcpy(out, r->out.data, count * sizeof *out, cudaMemcpyDefault));
  for (size_t i = 0; i < count; i++) hash = (hash ^ out[i]) * 1099511628211u;
  free(out);
  return hash;
}

static void time_layer(rank *r, const cell *c, member *one)
{
  check(cumoe_graph_begin(r->context, r->stream));
  launch_layer(r, c, one, 0, r->stream);
  r->us.layer = time_graph(r, end_graph(r), replays_of(c));
  if (hashes) r->hash = hash_outputs(r, c);
  check_cuda(cudaMemcpy(r->ids, cumoe_buffer_view(one->ids).data,
                        (size_t)(c->tokens * c->model->top_k) * sizeof *r->ids, cudaMemcpyDefault));
}

static void time_lanes(rank *r, const cell *c, member *one)
{
  check(cumoe_graph_begin(r->context, r->stream));
  check(cumoe_stream_join(r->context, r->second, r->stream));
  launch_layer(r, c, one, 0, r->stream);
  launch_layer(r, c, one, 1, r->second);
  check(cumoe_stream_join(r->context, r->stream, r->second));
  r->us.lanes = time_graph(r, end_graph(r), replays_of(c));
}

static void launch_gate(const rank *r, const cell *c, cumoe_view_mut ids, cumoe_view_mut weights)
{
  const shape *m = c->model;
  const cumoe_view x = cumoe_matrix(r->x.data, CUMOE_BF16, c->tokens, m->hidden, m->hidden), none = {0};
  const cumoe_view_mut logits = cumoe_matrix_mut(r->logits.data, CUMOE_F32, c->tokens, m->experts, m->experts);
  check(cumoe_router(r->context, x, r->router, none, logits, r->stream));
  check(cumoe_gate(r->context, &m->routing, cumoe_const(logits), none, ids, weights, r->stream));
}

static void time_gate(rank *r, const cell *c)
{
  cumoe_buffer ids, weights;
  check(cumoe_buffer_alloc(r->context, CUMOE_I32, c->tokens, c->model->top_k, NULL, &ids));
  check(cumoe_buffer_alloc(r->context, CUMOE_F32, c->tokens, c->model->top_k, NULL, &weights));
  check(cumoe_synchronize(r->context, NULL));
  check(cumoe_graph_begin(r->context, r->stream));
  launch_gate(r, c, cumoe_buffer_view_mut(ids), cumoe_buffer_view_mut(weights));
  r->us.gate = time_graph(r, end_graph(r), replays_of(c));
  check(cumoe_buffer_free(&ids));
  check(cumoe_buffer_free(&weights));
}

/* ---- experts ---- */

/* Some rows by ids on the host, x and weights of each the same: by the plan of a shard, or of a slice. gated: behind
 * router and gate of this rank's tokens, whose weights the experts' have driven out of L2, as in a layer. */
static double time_rows(rank *r, const cell *c, cumoe_plan plan, cumoe_weights weights, cumoe_view map,
                        const int32_t *ids, int64_t rows, bool gated)
{
  const shape *m = c->model;
  const int64_t there = rows > 0 ? rows : 1;
  cumoe_buffer workspace, some, x, chosen, gate_ids, gate_weights;
  size_t bytes;
  check(cumoe_plan_workspace(plan, there, &bytes));
  check(cumoe_buffer_alloc(r->context, CUMOE_U8, 1, (int64_t)bytes, NULL, &workspace));
  check(cumoe_buffer_alloc(r->context, CUMOE_F32, there, m->top_k, NULL, &some));
  check(cumoe_buffer_alloc(r->context, CUMOE_BF16, there, m->hidden, NULL, &x));
  check(cumoe_buffer_alloc(r->context, CUMOE_I32, there, m->top_k, NULL, &chosen));
  check(cumoe_buffer_alloc(r->context, CUMOE_I32, c->tokens, m->top_k, NULL, &gate_ids));
  check(cumoe_buffer_alloc(r->context, CUMOE_F32, c->tokens, m->top_k, NULL, &gate_weights));
  check(cumoe_fill(r->context, cumoe_buffer_view_mut(some), 0x3e, NULL));
  check(cumoe_synchronize(r->context, NULL));
  check_cuda(
      cudaMemcpy(cumoe_buffer_view_mut(chosen).data, ids, (size_t)(rows * m->top_k) * sizeof *ids, cudaMemcpyDefault));
  for (int64_t at = 0; at < rows; at += MOST_TOKENS) /* no constant: what is multiplied decides the clock */
    check_cuda(cudaMemcpy((uint16_t *)cumoe_buffer_view_mut(x).data + at * m->hidden, r->x.data,
                          (size_t)((rows - at < MOST_TOKENS ? rows - at : MOST_TOKENS) * m->hidden) * sizeof(uint16_t),
                          cudaMemcpyDefault));
  const cumoe_moe_args a = {.size = sizeof a,
                            .x = cumoe_matrix(cumoe_buffer_view(x).data, CUMOE_BF16, rows, m->hidden, m->hidden),
                            .ids = cumoe_matrix(cumoe_buffer_view(chosen).data, CUMOE_I32, rows, m->top_k, m->top_k),
                            .weights = cumoe_matrix(cumoe_buffer_view(some).data, CUMOE_F32, rows, m->top_k, m->top_k),
                            .expert_map = map,
                            .out = cumoe_matrix_mut(r->out.data, CUMOE_BF16, rows, m->hidden, m->hidden),
                            .workspace = cumoe_buffer_view_mut(workspace)};
  check(cumoe_graph_begin(r->context, r->stream));
  if (gated) launch_gate(r, c, cumoe_buffer_view_mut(gate_ids), cumoe_buffer_view_mut(gate_weights));
  if (rows) check(cumoe_moe_forward(plan, weights, &a, r->stream));
  const double us = time_graph(r, end_graph(r), replays_of(c));
  check(cumoe_buffer_free(&workspace));
  check(cumoe_buffer_free(&some));
  check(cumoe_buffer_free(&x));
  check(cumoe_buffer_free(&chosen));
  check(cumoe_buffer_free(&gate_ids));
  check(cumoe_buffer_free(&gate_weights));
  return us;
}

/* The rows that came here: tokens of all ranks that chose any expert of this one. Counts what this rank sends, too. */
static int64_t received(rank *r, const cell *c, int32_t *ids)
{
  const int32_t k = c->model->top_k;
  const int64_t row = 2 * (int64_t)c->model->hidden;
  int64_t rows = 0, answers = 0;
  for (int32_t from = 0; from < ranks; from++)
    for (int64_t t = 0; t < c->tokens; t++) {
      int32_t here = 0;
      for (int32_t j = 0; j < k; j++) here += rank_of(c->model, all[from].ids[t * k + j]) == r->number;
      if (!here) continue;
      memcpy(ids + rows * k, all[from].ids + t * k, (size_t)k * sizeof *ids);
      rows++;
      if (from != r->number) answers += c->flags & CUMOE_GROUP_EXACT ? here : 1;
    }
  r->tokens_out = (ranks - 1) * c->tokens * (row + 8 * k);
  r->answers_out = answers * row;
  return rows;
}

static void time_experts(rank *r, const cell *c)
{
  const int32_t k = c->model->top_k;
  int32_t *ids = malloc((size_t)(ranks * c->tokens * k) * sizeof *ids);
  const int64_t rows = received(r, c, ids);
  r->us.experts = time_rows(r, c, r->plan, r->weights, r->map, ids, rows, false);
  if (each) r->us.serial = time_rows(r, c, r->plan, r->weights, r->map, ids, rows, true);
  for (int32_t i = 0; i < ranks; i++)
    memcpy(ids + i * c->tokens * k, all[i].ids, (size_t)(c->tokens * k) * sizeof *ids);
  const cumoe_view none = {0};
  if (!plain && !c->flags) r->us.sliced = time_rows(r, c, r->slice, r->sliced, none, ids, ranks * c->tokens, false);
  free(ids);
}

/* ---- what moves, by itself ---- */

static void *take(char **at, int64_t words)
{
  void *here = *at;
  *at += (words + 63) / 64 * 256;
  return here;
}

/* The arguments of a move, as host/ep.c has them; what is written in between lies in `memory`. */
static ep_args move_args(const rank *r, const cell *c, const member *one, const group *g, char *memory)
{
  const int64_t k = c->model->top_k, slots = c->tokens * k;
  ep_args a = {.arena = g->arena,
               .shape = g->shape,
               .at = g->at,
               .rank = g->rank,
               .local_experts = g->plan.desc.local_experts,
               .x = r->x.data,
               .x_ld = c->model->hidden,
               .ids = take(&memory, slots),
               .ids_ld = k,
               .ids_dtype = CUMOE_I32,
               .weights = take(&memory, slots),
               .weights_ld = k,
               .placement = one->placement.data,
               .placement_ld = 1,
               .replicas = 1,
               .tokens = {c->tokens, NULL},
               .rows = take(&memory, slots + c->tokens * ranks),
               .arrived = take(&memory, ranks),
               .ids_here = take(&memory, ranks * slots),
               .y_here = r->out.data,
               .fault = g->context->fault};
  for (int32_t i = 0; i < EP_NEAR_RANKS && i < ranks; i++) a.near[i] = g->arenas[i];
  return a;
}

enum { REPEATED = 8 };

static double time_move(const rank *r, const cell *c, const group *g, move which, const ep_args *a, const void *of)
{
  check(cumoe_graph_begin(r->context, r->stream));
  for (int i = 0; i < REPEATED; i++) check(wire_move(g, which, a, of, r->stream));
  return time_graph(r, end_graph(r), replays_of(c)) / REPEATED;
}

/* The shard's layer over what has arrived, as host/ep.c has it. */
static cumoe_moe_args shard_args(const rank *r, const cell *c, const member *one, const group *g, const ep_args *a)
{
  const shape *m = c->model;
  const int64_t rows = ranks * c->tokens;
  const char *lane = g->arena + g->at.lane;
  return (cumoe_moe_args){.size = sizeof(cumoe_moe_args),
                          .x = cumoe_matrix(lane + g->at.x, CUMOE_BF16, rows, m->hidden, m->hidden),
                          .ids = cumoe_matrix(a->ids_here, CUMOE_I32, rows, m->top_k, m->top_k),
                          .weights = cumoe_matrix(lane + g->at.weights, CUMOE_F32, rows, m->top_k, m->top_k),
                          .expert_map = cumoe_vector(g->arena + g->at.every_expert, CUMOE_I32, m->experts),
                          .out = cumoe_matrix_mut(r->out.data, CUMOE_BF16, rows, m->hidden, m->hidden),
                          .workspace = cumoe_buffer_view_mut(one->memory[0])};
}

/* Sums alone; the results move in what makes them. */
static void time_moves(rank *r, const cell *c, const member *one)
{
  group *g;
  cumoe_buffer memory;
  const int64_t k = c->model->top_k, words = (2 * ranks + 3) * (c->tokens * k + 64) + 1024;
  check(find_group(one->group, &g));
  check(cumoe_buffer_alloc(r->context, CUMOE_I32, 1, words, NULL, &memory));
  check(cumoe_fill(r->context, cumoe_buffer_view_mut(memory), 0, NULL));
  check(cumoe_synchronize(r->context, NULL));
  ep_args a = move_args(r, c, one, g, cumoe_buffer_view_mut(memory).data);
  check_cuda(cudaMemcpy((void *)(uintptr_t)a.ids, r->ids, (size_t)(c->tokens * k) * sizeof *r->ids, cudaMemcpyDefault));
  r->us.dispatch = time_move(r, c, g, MOVE_PUT, &a, NULL);
  check(wire_move(g, MOVE_WAIT_TOKENS, &a, NULL, r->stream));
  layer_ends ends = {.returns = true};
  const cumoe_moe_args shard = shard_args(r, c, one, g, &a);
  check(forward_between(g->shard, r->weights, &shard, r->stream, &ends));
  r->us.answer =
      ends.combines ? time_move(r, c, g, MOVE_RETURN, &a, &ends.combine) : time_move(r, c, g, MOVE_ANSWER, &a, NULL);
  check(cumoe_buffer_free(&memory));
}

/* ---- NCCL around the same experts ---- */

static void check_nccl(int code)
{
  if (code == 0) return;
  fprintf(stderr, "NCCL: %s\n", bench_nccl.error_string(code));
  exit(1);
}

typedef struct gathered {
  cumoe_view_mut x, ids, weights, y;
  cumoe_buffer own_ids, own_weights, all_ids, all_weights, x_all, y_all, workspace;
} gathered;

static cumoe_view_mut room(const rank *r, cumoe_dtype dtype, int64_t rows, int64_t cols, cumoe_buffer *buffer)
{
  check(cumoe_buffer_alloc(r->context, dtype, rows, cols, NULL, buffer));
  return cumoe_buffer_view_mut(*buffer);
}

/* bytes of `mine` to every rank's `to`, at this rank's place. */
static void all_gather(const rank *r, const void *mine, void *to, int64_t bytes)
{
  check_nccl(bench_nccl.all_gather(mine, to, (size_t)bytes, NCCL_BYTES, r->comm, r->stream));
}

/* each NULL: `mine` to all, as a gather; else part i of it to rank i. */
static void exchange(const rank *r, const char *mine, int64_t step, char *to, int64_t bytes)
{
  for (int32_t i = 0; i < ranks; i++) {
    check_nccl(bench_nccl.send(mine + i * step, (size_t)bytes, NCCL_BYTES, i, r->comm, r->stream));
    check_nccl(bench_nccl.receive(to + i * bytes, (size_t)bytes, NCCL_BYTES, i, r->comm, r->stream));
  }
}

static void launch_peer(const rank *r, const cell *c, gathered *g, bool by_exchange)
{
  const shape *m = c->model;
  const int64_t rows = ranks * c->tokens, row = 2 * (int64_t)m->hidden, slots = c->tokens * m->top_k;
  const cumoe_view_mut ids = cumoe_buffer_view_mut(g->own_ids), weights = cumoe_buffer_view_mut(g->own_weights);
  launch_gate(r, c, ids, weights);
  check_nccl(bench_nccl.group_start());
  if (by_exchange) {
    exchange(r, r->x.data, 0, g->x.data, c->tokens * row);
    exchange(r, ids.data, 0, g->ids.data, slots * 4);
    exchange(r, weights.data, 0, g->weights.data, slots * 4);
  } else {
    all_gather(r, r->x.data, g->x.data, c->tokens * row);
    all_gather(r, ids.data, g->ids.data, slots * 4);
    all_gather(r, weights.data, g->weights.data, slots * 4);
  }
  check_nccl(bench_nccl.group_end());
  const cumoe_moe_args a = {.size = sizeof a,
                            .x = cumoe_const(g->x),
                            .ids = cumoe_const(g->ids),
                            .weights = cumoe_const(g->weights),
                            .expert_map = r->map,
                            .out = cumoe_matrix_mut(r->out.data, CUMOE_BF16, rows, m->hidden, m->hidden),
                            .workspace = cumoe_buffer_view_mut(g->workspace)};
  check(cumoe_moe_forward(r->plan, r->weights, &a, r->stream));
  if (!by_exchange) {
    check_nccl(bench_nccl.reduce_scatter(r->out.data, g->y.data, (size_t)(c->tokens * m->hidden), NCCL_BF16, NCCL_SUM,
                                         r->comm, r->stream));
    return;
  }
  check_nccl(bench_nccl.group_start());
  exchange(r, r->out.data, c->tokens * row, g->y.data, c->tokens * row);
  check_nccl(bench_nccl.group_end());
  cumoe_view_mut sum = cumoe_matrix_mut(g->y.data, CUMOE_BF16, c->tokens, m->hidden, m->hidden);
  for (int32_t i = 1; i < ranks; i++) {
    const cumoe_view other =
        cumoe_matrix((char *)g->y.data + i * c->tokens * row, CUMOE_BF16, c->tokens, m->hidden, m->hidden);
    check(cumoe_add(r->context, cumoe_const(sum), other, sum, r->stream));
  }
}

/* The first call of its kind outside of a capture: NCCL connects then. */
static double time_peer(rank *r, const cell *c, gathered *g, bool by_exchange)
{
  pthread_barrier_wait(&together);
  launch_peer(r, c, g, by_exchange);
  check(cumoe_synchronize(r->context, r->stream));
  pthread_barrier_wait(&together);
  check(cumoe_graph_begin(r->context, r->stream));
  launch_peer(r, c, g, by_exchange);
  return time_graph(r, end_graph(r), replays_of(c));
}

static double time_reduce(rank *r, const cell *c)
{
  const size_t count = (size_t)(ranks * c->tokens * c->model->hidden);
  for (int captured = 0; captured < 2; captured++) {
    if (captured) check(cumoe_graph_begin(r->context, r->stream));
    check_nccl(bench_nccl.all_reduce(r->out.data, r->out.data, count, NCCL_BF16, NCCL_SUM, r->comm, r->stream));
    if (!captured) check(cumoe_synchronize(r->context, r->stream));
    pthread_barrier_wait(&together);
  }
  return time_graph(r, end_graph(r), replays_of(c));
}

/* Element by element, the layer's output beside NCCL's: the largest difference over the largest value. */
static double difference(const uint16_t *a, const uint16_t *b, size_t count)
{
  double largest = 0, worst = 0;
  for (size_t i = 0; i < count; i++) {
    const uint32_t bits[2] = {(uint32_t)a[i] << 16, (uint32_t)b[i] << 16};
    float x, y;
    memcpy(&x, &bits[0], sizeof x);
    memcpy(&y, &bits[1], sizeof y);
    worst = fmax(worst, fabs((double)x - (double)y));
    largest = fmax(largest, fabs((double)x));
  }
  return worst / largest;
}

static void compare_outputs(const rank *r, const cell *c, const uint16_t *want, const gathered *g)
{
  const size_t count = (size_t)(c->tokens * c->model->hidden);
  uint16_t *got = malloc(count * sizeof *got);
  check_cuda(cudaMemcpy(got, g->y.data, count * sizeof *got, cudaMemcpyDefault));
  const double off = difference(want, got, count);
  if (!(off < 0.02)) printf("# rank %d: NCCL's output differs by %g of the largest\n", (int)r->number, off);
  free(got);
}

static void time_peers(rank *r, const cell *c, const uint16_t *want)
{
  const shape *m = c->model;
  const int64_t rows = ranks * c->tokens;
  gathered g = {0};
  size_t bytes;
  g.x = room(r, CUMOE_BF16, rows, m->hidden, &g.x_all);
  g.y = room(r, CUMOE_BF16, rows, m->hidden, &g.y_all);
  g.ids = room(r, CUMOE_I32, rows, m->top_k, &g.all_ids);
  g.weights = room(r, CUMOE_F32, rows, m->top_k, &g.all_weights);
  (void)room(r, CUMOE_I32, c->tokens, m->top_k, &g.own_ids);
  (void)room(r, CUMOE_F32, c->tokens, m->top_k, &g.own_weights);
  check(cumoe_plan_workspace(r->plan, rows, &bytes));
  (void)room(r, CUMOE_U8, 1, (int64_t)bytes, &g.workspace);
  check(cumoe_synchronize(r->context, NULL));
  r->us.gather = time_peer(r, c, &g, false);
  compare_outputs(r, c, want, &g);
  r->us.exchange = time_peer(r, c, &g, true);
  compare_outputs(r, c, want, &g);
  r->us.reduce = time_reduce(r, c);
  cumoe_buffer *const buffers[] = {&g.own_ids, &g.own_weights, &g.all_ids,  &g.all_weights,
                                   &g.x_all,   &g.y_all,       &g.workspace};
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) check(cumoe_buffer_free(buffers[i]));
}

/* ---- cells ---- */

static void *run_cell(void *argument)
{
  rank *r = argument;
  check_cuda(cudaSetDevice(r->number % gpus));
  member one = join(r, &now);
  if (now.lanes == 2) {
    time_lanes(r, &now, &one);
    leave(r, &one);
    return NULL;
  }
  const size_t count = (size_t)(now.tokens * now.model->hidden);
  uint16_t *out = malloc(count * sizeof *out);
  time_layer(r, &now, &one);
  check_cuda(cudaMemcpy(out, r->out.data, count * sizeof *out, cudaMemcpyDefault));
  if (now.flags == 0 && ranks > 1 && !most_room) time_moves(r, &now, &one);
  leave(r, &one);
  time_gate(r, &now);
  pthread_barrier_wait(&together);
  time_experts(r, &now);
  if (r->comm && now.flags == 0) time_peers(r, &now, out);
  free(out);
  return NULL;
}

static void on_all(void *(*run)(void *))
{
  pthread_t threads[MOST_RANKS];
  for (int32_t i = 0; i < ranks; i++)
    if (pthread_create(&threads[i], NULL, run, &all[i])) exit(1);
  for (int32_t i = 0; i < ranks; i++) pthread_join(threads[i], NULL);
}

static void run_lanes(const shape *m, int64_t tokens, uint32_t flags, int32_t lanes)
{
  now = (cell){.model = m, .tokens = tokens, .flags = flags, .lanes = lanes};
  for (int32_t i = 0; i < ranks; i++) {
    const cumoe_group_config config = config_of(&all[i], &now);
    check(cumoe_ep_arena(all[i].plan, &config, &now.arena_bytes));
    if (all[i].comm && !(flags & CUMOE_GROUP_NCCL)) continue;
    check_cuda(cudaSetDevice(i % gpus));
    check_cuda(cudaMalloc(&now.arenas[i], now.arena_bytes));
    check_cuda(cudaMemset(now.arenas[i], 0, now.arena_bytes));
    check_cuda(cudaDeviceSynchronize());
  }
  on_all(run_cell);
  for (int32_t i = 0; i < ranks; i++)
    if (now.arenas[i]) check_cuda(cudaFree(now.arenas[i]));
}

/* "-" where nothing was measured. */
static void print_number(const char *format, int width, double value)
{
  if (value > 0)
    printf(format, width, value);
  else
    printf(" %*s", width, "-");
}

static void print_rate(int64_t bytes, double us)
{
  const double rate = us > 0 ? (double)bytes / us * 1e6 : 0;
  print_number(" %*.0f", 5, rate * 1e-9);
  print_number(" %*.2f", 5, rate / stores);
}

static void print_cell(void)
{
  const rank *slow = &all[0];
  int64_t tokens_out = 0, answers_out = 0;
  for (int32_t i = 0; i < ranks; i++) {
    if (all[i].us.gate + all[i].us.experts > slow->us.gate + slow->us.experts) slow = &all[i];
    if (all[i].tokens_out > tokens_out) tokens_out = all[i].tokens_out;
    if (all[i].answers_out > answers_out) answers_out = all[i].answers_out;
  }
  const times *t = &slow->us;
  const double link = ranks > 1 ? (double)(tokens_out + answers_out) / stores * 1e6 : 0;
  const double least = t->experts > link ? t->experts : link;
  printf("%-15s %-5s %5d %8.1f %7.1f %8.1f %7.1f %8.2f", now.model->name,
         now.flags & CUMOE_GROUP_EXACT  ? "exact"
         : now.flags & CUMOE_GROUP_NCCL ? "nccl"
                                        : "sums",
         (int)now.tokens, t->layer, t->gate, t->experts, t->layer - t->gate - t->experts,
         (double)(tokens_out + answers_out) * 1e-6);
  print_number(" %*.2f", 5, t->layer / least);
  print_rate(tokens_out, t->dispatch);
  print_rate(answers_out, t->answer);
  print_number(" %*.1f", 8, t->lanes);
  print_number(" %*.2f", 5, t->lanes / least);
  print_number(" %*.1f", 8, t->gather);
  print_number(" %*.1f", 8, t->exchange);
  print_number(" %*.1f", 8, t->sliced);
  print_number(" %*.1f", 7, t->reduce);
  printf("\n");
  for (int32_t i = 0; hashes && i < ranks; i++)
    printf("%s%016llx%s", i ? " " : "# outputs: ", (unsigned long long)all[i].hash, i + 1 < ranks ? "" : "\n");
  for (int32_t i = 0; each && i < ranks; i++)
    printf("# rank %d: layer %.1f, gate %.1f, experts %.1f, both in one graph %.1f\n", (int)i, all[i].us.layer,
           all[i].us.gate, all[i].us.experts, all[i].us.serial);
  fflush(stdout);
}

static void measure(const shape *m, int64_t tokens)
{
  static const uint32_t returns[] = {0, CUMOE_GROUP_EXACT, CUMOE_GROUP_NCCL};
  for (size_t i = 0; i < sizeof returns / sizeof *returns; i++) {
    const uint32_t flags = returns[i];
    if ((flags == CUMOE_GROUP_EXACT && sums_alone) || (flags == CUMOE_GROUP_NCCL && !(staged && all[0].comm))) continue;
    for (int32_t r = 0; r < ranks; r++) all[r].us = (times){0};
    if (!plain && flags == 0 && tokens >= 128 && ranks > 1) run_lanes(m, tokens, flags, 2);
    run_lanes(m, tokens, flags, 1);
    print_cell();
  }
}

static bool is_wanted(int64_t tokens, int64_t most)
{
  char *at = (char *)(uintptr_t)only_tokens;
  if (!at) return tokens <= most;
  for (;; at++) {
    if (strtoll(at, &at, 10) == tokens) return true;
    if (*at != ',') return false;
  }
}

static void open_rank(rank *r)
{
  check_cuda(cudaSetDevice(r->number % gpus));
  check(cumoe_context_create(r->number % gpus, NULL, &r->context));
  check(cumoe_stream_create(r->context, 0, &r->stream));
  check(cumoe_stream_create(r->context, 0, &r->second));
  check_cuda(cudaMalloc(&r->peer, STORED));
}

static void open_comms(void)
{
  void *comms[MOST_RANKS];
  int devices[MOST_RANKS], version = 0;
  for (int32_t i = 0; i < ranks; i++) devices[i] = i;
  if (plain || ranks < 2 || ranks > gpus) return;
  if (!nccl_load()) {
    printf("# no libnccl.so.2\n");
    return;
  }
  check_nccl(bench_nccl.get_version(&version));
  check_nccl(bench_nccl.comm_init_all(comms, ranks, devices));
  for (int32_t i = 0; i < ranks; i++) all[i].comm = comms[i];
  printf("# NCCL %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
}

static void run_model(const shape *m, int64_t most)
{
  for (int32_t i = 0; i < ranks; i++) {
    open_rank(&all[i]);
    open_model(&all[i], m);
  }
  if (stores == 0 && ranks > 1) on_all(run_stores);
  for (size_t t = 0; t < sizeof token_counts / sizeof *token_counts; t++)
    if (is_wanted(token_counts[t], most)) measure(m, token_counts[t]);
  for (int32_t i = 0; i < ranks; i++) {
    check_cuda(cudaSetDevice(i % gpus));
    check_cuda(cudaFree(all[i].peer));
    check(cumoe_context_destroy(all[i].context));
    free(all[i].ids);
  }
}

int main(int argc, char **argv)
{
  const char *named = NULL;
  int64_t most = MOST_TOKENS;
  check_cuda(cudaGetDeviceCount(&gpus));
  ranks = gpus > 1 ? gpus : 2;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--plain")) plain = true;
    if (!strcmp(argv[i], "--sums")) sums_alone = true;
    if (!strcmp(argv[i], "--staged")) staged = true;
    if (!strcmp(argv[i], "--each")) each = true;
    if (!strcmp(argv[i], "--hashes")) hashes = true;
    if (!strcmp(argv[i], "--tokens") && i + 1 < argc) only_tokens = argv[++i];
    if (!strcmp(argv[i], "--ranks") && i + 1 < argc) ranks = atoi(argv[++i]);
    if (!strcmp(argv[i], "--model") && i + 1 < argc) named = argv[++i];
    if (!strcmp(argv[i], "--most") && i + 1 < argc) most = atoll(argv[++i]);
    if (!strcmp(argv[i], "--room") && i + 1 < argc) most_room = atoll(argv[++i]);
    if (!strcmp(argv[i], "--aside") && i + 1 < argc) aside_tokens = atoll(argv[++i]);
    if (!strcmp(argv[i], "--own") && i + 1 < argc) own_rows = atoll(argv[++i]);
  }
  if (ranks < 1 || ranks > MOST_RANKS) return 1;
  for (int32_t i = 0; i < ranks; i++) all[i].number = i;
  pthread_barrier_init(&together, NULL, (unsigned)ranks);
  make_noise();
  printf("%d ranks on %d GPUs; microseconds, MB, GB/s; of: part of max(experts, link), or of stores\n", (int)ranks,
         (int)gpus);
  open_comms();
  printf("%-15s %-5s %5s %8s %7s %8s %7s %8s %5s %5s %5s %5s %5s %8s %5s %8s %8s %8s %7s\n", "shape", "back", "T",
         "layer", "gate", "experts", "tax", "MB", "of", "disp", "of", "ret", "of", "lanes", "of", "ag+rs", "a2a",
         "sliced", "allred");
  for (int32_t i = 0; i < shape_count(); i++) {
    const shape s = shape_at(i);
    if (named ? !strcmp(named, s.name) : s.when == SHAPE_always) run_model(&s, most);
  }
  return 0;
}
