/*
 * An engine that owns everything: one arena of device memory, one stream, one CUDA graph. It only lends pointers to
 * cumoe. The layer is captured once, as its first call, and replayed for batches of other sizes; each batch is
 * compared with a naive layer. Without a GPU the arena comes from malloc and every batch is a call.
 */
#include <cuda_runtime_api.h>
#include <cumoe/cumoe.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 24, HIDDEN = 64, INTER = 96, EXPERTS = 8, TOP_K = 2, ARENA = 4 << 20 };

typedef struct engine {
  int cuda;
  cudaStream_t stream; /* NULL on the CPU */
  cudaGraphExec_t step;
  char *arena;
  size_t used;
  void *x, *tokens, *out; /* of a batch: its rows, their number, the layer's result */
} engine;

/* What the layer reads, in the engine's own memory on the host; bf16 as bits. */
typedef struct model {
  uint16_t x[TOKENS][HIDDEN], router[EXPERTS][HIDDEN];
  uint16_t gate_up[EXPERTS][2 * INTER][HIDDEN], down[EXPERTS][HIDDEN][INTER];
} model;

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

/* ---- the engine's memory ---------------------------------------------------------------------------- */

static engine engine_open(int device)
{
  engine e = {.cuda = device != CUMOE_DEVICE_CPU};
  if (e.cuda) {
    check_cuda(cudaSetDevice(device));
    check_cuda(cudaMalloc((void **)&e.arena, ARENA));
    check_cuda(cudaStreamCreateWithFlags(&e.stream, cudaStreamNonBlocking));
  } else if ((e.arena = aligned_alloc(256, ARENA)) == NULL) {
    exit(1);
  }
  return e;
}

static void engine_close(engine *e)
{
  if (!e->cuda) {
    free(e->arena);
    return;
  }
  if (e->step) check_cuda(cudaGraphExecDestroy(e->step));
  check_cuda(cudaStreamDestroy(e->stream));
  check_cuda(cudaFree(e->arena));
}

static void *engine_take(engine *e, size_t bytes)
{
  void *taken = e->arena + e->used;
  e->used += (bytes + 255) / 256 * 256;
  if (e->used > ARENA) exit(1);
  return taken;
}

static void engine_copy(const engine *e, void *to, const void *from, size_t bytes)
{
  if (e->cuda) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, e->stream));
    check_cuda(cudaStreamSynchronize(e->stream)); /* `from` may be pageable memory that changes next */
  } else {
    memcpy(to, from, bytes);
  }
}

static void *engine_put(engine *e, const void *from, size_t bytes)
{
  void *at = engine_take(e, bytes);
  engine_copy(e, at, from, bytes);
  return at;
}

/* ---- numbers ---------------------------------------------------------------------------------------- */

static double value(uint16_t bf16)
{
  uint32_t bits = (uint32_t)bf16 << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

/* bf16 between -limit and limit. */
static void fill(uint16_t *to, size_t count, float limit, uint32_t seed)
{
  for (size_t i = 0; i < count; i++) {
    seed = seed * 1664525u + 1013904223u;
    float f = ((float)(seed >> 8) / 8388608.f - 1.f) * limit;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    to[i] = (uint16_t)(bits >> 16);
  }
}

/* ---- the naive layer -------------------------------------------------------------------------------- */

static double dot(const uint16_t *a, const uint16_t *b, int count)
{
  double sum = 0;
  for (int i = 0; i < count; i++) sum += value(a[i]) * value(b[i]);
  return sum;
}

/* out += weight * expert(x) */
static void naive_expert(const model *m, int expert, const uint16_t *x, double weight, double *out)
{
  double h[INTER];
  for (int i = 0; i < INTER; i++) {
    double gate = dot(m->gate_up[expert][i], x, HIDDEN), up = dot(m->gate_up[expert][INTER + i], x, HIDDEN);
    h[i] = gate / (1 + exp(-gate)) * up;
  }
  for (int o = 0; o < HIDDEN; o++)
    for (int i = 0; i < INTER; i++) out[o] += weight * h[i] * value(m->down[expert][o][i]);
}

/* Softmax, the best TOP_K experts, their weights made to sum to 1. */
static void naive_token(const model *m, const uint16_t *x, double *out)
{
  double score[EXPERTS], weight[TOP_K], sum = 0;
  int chosen[TOP_K];
  for (int e = 0; e < EXPERTS; e++) score[e] = exp(dot(m->router[e], x, HIDDEN));
  for (int slot = 0; slot < TOP_K; slot++) {
    int best = 0;
    for (int e = 1; e < EXPERTS; e++)
      if (score[e] > score[best]) best = e;
    chosen[slot] = best;
    sum += weight[slot] = score[best];
    score[best] = -1;
  }
  memset(out, 0, HIDDEN * sizeof *out);
  for (int slot = 0; slot < TOP_K; slot++) naive_expert(m, chosen[slot], x, weight[slot] / sum, out);
}

/* Rows of the batch within the rounding of two bf16 intermediates; rows past it as they were. */
static void compare(const model *m, const uint16_t out[][HIDDEN], int tokens, uint16_t untouched)
{
  double want[HIDDEN], worst = 0;
  for (int t = 0; t < TOKENS; t++) {
    double largest = 0;
    naive_token(m, m->x[t], want);
    for (int i = 0; i < HIDDEN; i++) largest = fmax(largest, fabs(want[i]));
    for (int i = 0; i < HIDDEN; i++) {
      if (t < tokens) worst = fmax(worst, fabs(value(out[t][i]) - want[i]) / largest);
      if (t >= tokens && out[t][i] != untouched) {
        fprintf(stderr, "row %d was written, the batch has %d\n", t, tokens);
        exit(1);
      }
    }
  }
  printf("batch of %2d: largest difference %.4f of a row's largest value\n", tokens, worst);
  if (!(worst < 0.02)) exit(1);
}

/* ---- cumoe on lent memory --------------------------------------------------------------------------- */

static cumoe_view weight_view(engine *e, const uint16_t *from, int64_t rows, int64_t cols)
{
  return cumoe_matrix(engine_put(e, from, (size_t)(rows * cols) * 2), CUMOE_BF16, rows, cols, cols);
}

static cumoe_weights bind(cumoe_context context, engine *e, const model *m)
{
  cumoe_weights weights;
  cumoe_weights_desc desc = {.size = sizeof desc,
                             .experts = EXPERTS,
                             .hidden = HIDDEN,
                             .inter = INTER,
                             .gate_order = CUMOE_GATE_UP_CONCAT,
                             .up_major = CUMOE_OUT_IN,
                             .down_major = CUMOE_OUT_IN};
  desc.gate_up.data = weight_view(e, m->gate_up[0][0], EXPERTS * 2 * INTER, HIDDEN);
  desc.down.data = weight_view(e, m->down[0][0], EXPERTS * HIDDEN, INTER);
  check(cumoe_weights_bind(context, &desc, &weights));
  return weights;
}

/* The graph holds pointers, not sizes: how many tokens a batch has, the kernels read from device memory. */
static void capture(engine *e, cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args)
{
  cudaGraph_t graph;
  check_cuda(cudaStreamBeginCapture(e->stream, cudaStreamCaptureModeGlobal));
  check(cumoe_moe_forward(plan, weights, args, e->stream));
  check_cuda(cudaStreamEndCapture(e->stream, &graph));
  check_cuda(cudaGraphInstantiate(&e->step, graph, 0));
  check_cuda(cudaGraphDestroy(graph));
}

static void run_batch(engine *e, model *m, cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args,
                      int32_t tokens)
{
  static uint16_t out[TOKENS][HIDDEN], before[TOKENS][HIDDEN];
  fill(m->x[0], TOKENS * HIDDEN, 1, (uint32_t)tokens);
  memset(before, 0x5a, sizeof before);
  engine_copy(e, e->x, m->x, sizeof m->x);
  engine_copy(e, e->tokens, &tokens, sizeof tokens);
  engine_copy(e, e->out, before, sizeof before);
  if (e->step)
    check_cuda(cudaGraphLaunch(e->step, e->stream));
  else
    check(cumoe_moe_forward(plan, weights, args, e->stream));
  engine_copy(e, out, e->out, sizeof out);
  compare(m, (const uint16_t(*)[HIDDEN])out, tokens, before[0][0]);
}

static void serve(cumoe_context context, engine *e, model *m)
{
  cumoe_moe_desc desc = {.size = sizeof desc,
                         .num_experts = EXPERTS,
                         .hidden = HIDDEN,
                         .inter = INTER,
                         .dtype = CUMOE_BF16,
                         .routing = cumoe_routing_mixtral(TOP_K)};
  cumoe_plan plan;
  size_t bytes;
  check(cumoe_plan_create(context, &desc, &plan));
  check(cumoe_plan_workspace(plan, TOKENS, &bytes));
  cumoe_weights weights = bind(context, e, m);
  e->x = engine_take(e, sizeof m->x);
  e->tokens = engine_take(e, sizeof(int32_t));
  e->out = engine_take(e, sizeof m->x);
  cumoe_moe_args args = {.size = sizeof args,
                         .x = cumoe_matrix(e->x, CUMOE_BF16, TOKENS, HIDDEN, HIDDEN),
                         .device_tokens = cumoe_vector(e->tokens, CUMOE_I32, 1),
                         .router_weight = weight_view(e, m->router[0], EXPERTS, HIDDEN),
                         .out = cumoe_matrix_mut(e->out, CUMOE_BF16, TOKENS, HIDDEN, HIDDEN),
                         .workspace = cumoe_vector_mut(engine_take(e, bytes), CUMOE_U8, (int64_t)bytes)};
  if (e->cuda) capture(e, plan, weights, &args);
  for (int32_t tokens = TOKENS; tokens > 0; tokens /= 3) run_batch(e, m, plan, weights, &args, tokens);
  check(cumoe_weights_destroy(weights));
  check(cumoe_plan_destroy(plan));
}

int main(void)
{
  static model m;
  cumoe_context context;
  cumoe_device_info info = {.size = sizeof info};
  check(cumoe_context_create(CUMOE_DEVICE_AUTO, NULL, &context));
  check(cumoe_context_info(context, &info));
  engine e = engine_open(info.device);
  fill(m.router[0], sizeof m.router / 2, 0.3f, 2);
  fill(m.gate_up[0][0], sizeof m.gate_up / 2, 0.3f, 3);
  fill(m.down[0][0], sizeof m.down / 2, 0.3f, 4);
  serve(context, &e, &m);
  size_t owned = 0;
  printf("%s: %zu bytes lent, %lld buffers of cumoe\n", info.name, e.used,
         (long long)cumoe_buffer_live(context, &owned));
  if (owned != 0) return 1;
  engine_close(&e);
  check(cumoe_context_destroy(context));
  return 0;
}
