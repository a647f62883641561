/*
 * Ranks as processes of their own, over arenas that they make for each other (on GPUs by CUDA's handles, one rank a
 * GPU; else by files in memory): the bits of one rank with all experts, also from graphs; a rank that is killed or
 * stopped wherever it then is: the others name it and the phase, in bounded time, and can go on without it or end.
 *
 * By NCCL, where LD_LIBRARY_PATH has libnccl.so.2: as between hosts, over sockets, each rank with a NCCL_HOSTID. The
 * one that is lost NCCL waits for without a limit: the others' watch ends the communicator. On the CPU by a library of
 * one's own, test/tool/sends.c.
 *
 * The program's own process never touches a GPU, so that it may fork.
 */
#include <dlfcn.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "test.h"

enum { MOST_RANKS = 4, EXPERTS = 12, TOP_K = 3, STEPS = 8, LETTER = 1024 };
enum { MOST_HIDDEN = 1024, MOST_INTER = 512, MOST_TOKENS = 24, MOST_ROWS = MOST_TOKENS * MOST_HIDDEN };
enum { TIMEOUT_MS = 1000, PATIENCE_MS = 2000, CALLS = 6, ENDLESS = 1 << 30 };
enum { NOBODY = -1 };

/* Of the layer at hand: set before processes part. */
static struct {
  int32_t hidden, inter, tokens;
  uint32_t flags; /* of the plan */
} layer = {256, 128, 24, CUMOE_MOE_BATCH_INVARIANT /* the same kernels for any tokens */};

/* ---- what all processes share, made before they part ---- */

typedef struct result {
  cumoe_status status, left, ended, closed; /* calls; of the group, the arenas, the context when they were destroyed */
  cumoe_group_fault fault;                  /* before it was left */
  cumoe_status masked;                      /* of set_active */
  int64_t gave_up_ms, leave_ms;             /* from the signal, and what leaving took */
  char text[300];
} result;

typedef struct world {
  int32_t ranks, devices; /* devices 0: the CPU */
  uint32_t flags;
  bool shrinks; /* those that stay go on without the lost one */
  bool aborts;  /* by NCCL: who ends the communicator gives the group up first */
  int32_t lost;
  int calls;
  atomic_int arrived[STEPS], running, out;
  _Atomic int64_t signalled_ms;
  unsigned char letters[STEPS][MOST_RANKS][LETTER];
  result results[MOST_RANKS];
  uint16_t got[MOST_RANKS][MOST_ROWS], alone[MOST_RANKS][MOST_ROWS];
} world;

static uint16_t x[MOST_RANKS * MOST_ROWS], router[EXPERTS * MOST_HIDDEN],
    gate_up[EXPERTS * 2 * MOST_INTER * MOST_HIDDEN], down[EXPERTS * MOST_HIDDEN * MOST_INTER];

static void fill(uint16_t *to, size_t count, float limit, uint32_t seed)
{
  for (size_t i = 0; i < count; i++) {
    seed = seed * 1664525u + 1013904223u;
    const float value = ((float)(seed >> 8) / 8388608.f - 1.f) * limit;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    to[i] = (uint16_t)(bits >> 16);
  }
}

static void make_values(void)
{
  fill(x, sizeof x / 2, 1, 1);
  fill(router, sizeof router / 2, .3f, 2);
  fill(gate_up, sizeof gate_up / 2, .2f, 3);
  fill(down, sizeof down / 2, .2f, 4);
}

static void nap(void)
{
  const struct timespec t = {.tv_nsec = 200000};
  nanosleep(&t, NULL);
}

/* Of a process that the test started: what it finds wrong ends it. */
static void must(cumoe_status status, int line)
{
  if (status == CUMOE_OK) return;
  printf("# test/ranks.c:%d: %s: %s\n", line, cumoe_status_name(status), cumoe_last_error());
  fflush(stdout);
  _exit(1);
}
#define MUST(expression) must((expression), __LINE__)

/* ---- communicators ---- */

typedef struct unique_id {
  char bytes[128];
} unique_id;

static struct {
  void *library;
  int (*new_id)(unique_id *id);
  int (*init)(void **comm, int count, unique_id id, int rank);
  int (*end)(void *comm);
  int (*abort)(void *comm);
  int (*async_error)(void *comm, int *code);
} nccl;

static bool load_nccl(bool on_gpus)
{
  char path[512] = "libnccl.so.2";
  const char *lib = getenv("LIB");
  if (!on_gpus) snprintf(path, sizeof path, "%s/test/sends.so", lib && lib[0] ? lib : "lib");
  nccl.library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (!nccl.library) return false;
  *(void **)&nccl.new_id = dlsym(nccl.library, "ncclGetUniqueId");
  *(void **)&nccl.init = dlsym(nccl.library, "ncclCommInitRank");
  *(void **)&nccl.end = dlsym(nccl.library, "ncclCommDestroy");
  *(void **)&nccl.abort = dlsym(nccl.library, "ncclCommAbort");
  *(void **)&nccl.async_error = dlsym(nccl.library, "ncclCommGetAsyncError");
  return nccl.new_id && nccl.init && nccl.end && nccl.abort && nccl.async_error;
}

/* No path between the GPUs but sockets: NCCL takes the ranks for hosts of their own. */
static void part_hosts(int32_t number)
{
  char host[16];
  snprintf(host, sizeof host, "rank%d", (int)number);
  setenv("NCCL_HOSTID", host, 1);
  setenv("NCCL_P2P_DISABLE", "1", 1);
  setenv("NCCL_SHM_DISABLE", "1", 1);
}

static void must_nccl(int code, int line)
{
  if (code == 0) return;
  printf("# test/ranks.c:%d: NCCL says %d\n", line, code);
  fflush(stdout);
  _exit(1);
}
#define MUST_NCCL(expression) must_nccl((expression), __LINE__)

/* ---- a rank ---- */

typedef struct rank {
  world *w;
  int32_t number, step;
  cumoe_context context;
  cumoe_stream stream;
  cumoe_plan plan;
  cumoe_weights weights;
  cumoe_arenas arenas;
  cumoe_group group;
  cumoe_view_mut out, workspace;
  cumoe_view x, router, placement;
  cumoe_graph graph;
  void *comm; /* of a group by NCCL */
} rank;

/* 62 (ETIME) when one has not come. */
static int all_gather(void *user, const void *mine, void *all, size_t bytes)
{
  rank *r = user;
  world *w = r->w;
  const int32_t step = r->step++;
  const int64_t begin = now_ms();
  if (step >= STEPS || bytes > LETTER) return 1;
  memcpy(w->letters[step][r->number], mine, bytes);
  atomic_fetch_add(&w->arrived[step], 1);
  /* Until the group stands a GPU's context may take seconds. */
  const int64_t patience = r->group || atomic_load(&w->running) ? PATIENCE_MS : 60000;
  while (atomic_load(&w->arrived[step]) < w->ranks) {
    if (now_ms() - begin > patience) return 62;
    nap();
  }
  for (int32_t i = 0; i < w->ranks; i++) memcpy((char *)all + (size_t)i * bytes, w->letters[step][i], bytes);
  return 0;
}

static cumoe_view put(rank *r, cumoe_dtype dtype, int64_t rows, int64_t cols, const void *values)
{
  cumoe_buffer buffer = {0};
  MUST(cumoe_buffer_alloc(r->context, dtype, rows, cols, NULL, &buffer));
  const cumoe_view_mut view = cumoe_buffer_view_mut(buffer);
  if (values)
    MUST(cumoe_copy_from_host(r->context, view, values, (size_t)(rows * cols) * cumoe_dtype_bytes(dtype), NULL));
  else
    MUST(cumoe_fill(r->context, view, 0xff, NULL));
  MUST(cumoe_synchronize(r->context, NULL));
  return cumoe_const(view);
}

static cumoe_view_mut room(rank *r, cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  const cumoe_view v = put(r, dtype, rows, cols, NULL);
  return cumoe_matrix_mut((void *)(uintptr_t)v.data, dtype, rows, cols, cols);
}

static int32_t first_of(const world *w, int32_t number)
{
  return number * EXPERTS / w->ranks;
}

static cumoe_plan plan_of(cumoe_context context, int32_t local)
{
  cumoe_plan plan = NULL;
  const cumoe_moe_desc d = {.size = sizeof d,
                            .num_experts = EXPERTS,
                            .local_experts = local,
                            .hidden = layer.hidden,
                            .inter = layer.inter,
                            .dtype = CUMOE_BF16,
                            .flags = layer.flags,
                            .routing = cumoe_routing_qwen3(TOP_K)};
  MUST(cumoe_plan_create(context, &d, &plan));
  return plan;
}

static cumoe_weights bind(rank *r, int32_t first, int32_t count)
{
  cumoe_weights weights = NULL;
  cumoe_weights_desc d = {.size = sizeof d,
                          .experts = count,
                          .hidden = layer.hidden,
                          .inter = layer.inter,
                          .gate_order = CUMOE_GATE_UP_CONCAT,
                          .up_major = CUMOE_OUT_IN,
                          .down_major = CUMOE_OUT_IN};
  d.gate_up.data =
      put(r, CUMOE_BF16, count * 2 * layer.inter, layer.hidden, gate_up + first * 2 * layer.inter * layer.hidden);
  d.down.data = put(r, CUMOE_BF16, count * layer.hidden, layer.inter, down + first * layer.hidden * layer.inter);
  MUST(cumoe_weights_bind(r->context, &d, &weights));
  return weights;
}

static void meet_by_nccl(rank *r)
{
  world *w = r->w;
  unique_id mine = {{0}}, all[MOST_RANKS];
  if (!load_nccl(w->devices)) _exit(1);
  if (r->number == 0) MUST_NCCL(nccl.new_id(&mine));
  if (all_gather(r, &mine, all, sizeof mine)) _exit(1);
  /* A communicator is of the thread's GPU. */
  if (w->devices && cudaSetDevice(r->number % w->devices) != cudaSuccess) _exit(1);
  MUST_NCCL(nccl.init(&r->comm, w->ranks, all[0], r->number));
}

/* Of its own memory alone. */
static cumoe_status arena_by_nccl(rank *r, size_t bytes, cumoe_group_config *config, cumoe_arenas_info *info)
{
  meet_by_nccl(r);
  config->comm = r->comm;
  config->nccl = nccl.library;
  info->arena = room(r, CUMOE_U8, 1, (int64_t)bytes);
  const cumoe_status status = cumoe_fill(r->context, info->arena, 0, NULL);
  return status == CUMOE_OK ? cumoe_synchronize(r->context, NULL) : status;
}

static cumoe_status join(rank *r)
{
  world *w = r->w;
  size_t bytes = 0;
  cumoe_group_config config = {.size = sizeof config,
                               .flags = w->flags,
                               .rank = r->number,
                               .ranks = w->ranks,
                               .max_tokens = layer.tokens,
                               .timeout_ns = w->lost == NOBODY ? 0 : TIMEOUT_MS * INT64_C(1000000)};
  const cumoe_arenas_config where = {
      .size = sizeof where, .rank = r->number, .ranks = w->ranks, .all_gather = all_gather, .user = r};
  cumoe_arenas_info info = {.size = sizeof info};
  cumoe_status status = cumoe_ep_arena(r->plan, &config, &bytes);
  if (w->flags & CUMOE_GROUP_NCCL) {
    if (status == CUMOE_OK) status = arena_by_nccl(r, bytes, &config, &info);
  } else {
    if (status == CUMOE_OK) status = cumoe_arenas_create(r->context, bytes, &where, &r->arenas);
    if (status == CUMOE_OK) status = cumoe_arenas_get_info(r->arenas, &info);
    config.arenas = info.arenas;
  }
  if (status == CUMOE_OK) status = cumoe_group_create(r->context, r->plan, &config, info.arena, &r->group);
  if (status == CUMOE_OK) status = cumoe_ep_workspace(r->group, &bytes);
  if (status == CUMOE_OK) r->workspace = room(r, CUMOE_U8, 1, (int64_t)bytes);
  return status;
}

static cumoe_status forward(rank *r)
{
  const cumoe_moe_args args = {
      .size = sizeof args, .x = r->x, .router_weight = r->router, .out = r->out, .workspace = r->workspace};
  const cumoe_ep_args call = {.size = sizeof call, .placement = r->placement, .layer = &args};
  return cumoe_ep_forward(r->group, r->weights, &call, r->stream);
}

static void open_rank(rank *r)
{
  world *w = r->w;
  int32_t places[EXPERTS];
  const cumoe_context_config one = {.size = sizeof one, .cpu_threads = 1};
  const int32_t first = first_of(w, r->number), count = first_of(w, r->number + 1) - first;
  for (int32_t i = 0; i < w->ranks; i++)
    for (int32_t e = first_of(w, i); e < first_of(w, i + 1); e++) places[e] = cumoe_ep_place(i, e - first_of(w, i));
  MUST(cumoe_context_create(w->devices ? r->number % w->devices : CUMOE_DEVICE_CPU, &one, &r->context));
  MUST(cumoe_stream_create(r->context, 0, &r->stream));
  r->plan = plan_of(r->context, count);
  r->weights = bind(r, first, count);
  r->x = put(r, CUMOE_BF16, layer.tokens, layer.hidden, x + r->number * layer.tokens * layer.hidden);
  r->router = put(r, CUMOE_BF16, EXPERTS, layer.hidden, router);
  r->placement = put(r, CUMOE_I32, EXPERTS, 1, places);
  r->out = room(r, CUMOE_BF16, layer.tokens, layer.hidden);
}

/* On a GPU a graph, as engines have it; nothing that waits for the device while others may wait for this rank. */
static cumoe_status record(rank *r)
{
  if (!r->w->devices) return CUMOE_OK;
  cumoe_status status = cumoe_graph_begin(r->context, r->stream);
  if (status == CUMOE_OK) status = forward(r);
  const cumoe_status ended = cumoe_graph_end(r->context, r->stream, &r->graph);
  if (status == CUMOE_OK) status = ended;
  return status == CUMOE_OK ? cumoe_graph_upload(r->context, r->graph, r->stream) : status;
}

/* NCCL itself waits for graphs that hold the communicator; those under way CUDA frees when they have ended. */
static void end_comm(rank *r)
{
  if (r->graph) MUST(cumoe_graph_destroy(r->context, r->graph));
  r->graph = NULL;
  if (r->w->aborts) MUST(cumoe_group_abort(r->group));
  MUST_NCCL(nccl.abort(r->comm));
  r->comm = NULL;
}

/* As an engine has to: NCCL says what it has noticed, but ends nothing. */
static void watch(rank *r)
{
  int code = 0;
  cudaError_t work;
  const int64_t begin = now_ms();
  while ((work = cudaStreamQuery(r->stream)) == cudaErrorNotReady && code == 0 && now_ms() - begin < PATIENCE_MS) {
    MUST_NCCL(nccl.async_error(r->comm, &code));
    nap();
  }
  if (work != cudaErrorNotReady) return;
  printf("# rank %d: NCCL says %d after %d ms\n", (int)r->number, code, (int)(now_ms() - begin));
  end_comm(r);
}

static cumoe_status call(rank *r, int number)
{
  cumoe_status status = r->graph && number % 3 ? cumoe_graph_launch(r->context, r->graph, r->stream) : forward(r);
  cumoe_group_fault fault = {.size = sizeof fault};
  if (status == CUMOE_OK && r->comm && r->w->devices && r->w->lost != NOBODY) watch(r);
  if (status == CUMOE_OK) status = cumoe_synchronize(r->context, r->stream);
  if (status == CUMOE_OK && r->w->devices) status = cumoe_group_fault_read(r->group, &fault);
  return status == CUMOE_OK && fault.cause ? CUMOE_ERR_PEER : status;
}

static cumoe_status read_out(rank *r, uint16_t *to)
{
  cumoe_status status = cumoe_copy_to_host(r->context, to, sizeof(uint16_t) * (size_t)(layer.tokens * layer.hidden),
                                           cumoe_const(r->out), r->stream);
  return status == CUMOE_OK ? cumoe_synchronize(r->context, r->stream) : status;
}

/* Without the lost rank: all that are left say so, and make a call. */
static cumoe_status go_on(rank *r)
{
  uint64_t rest = 0;
  for (int32_t i = 0; i < r->w->ranks; i++) rest |= (uint64_t)(i != r->w->lost) << i;
  cumoe_status status = cumoe_group_set_active(r->group, &rest);
  if (status == CUMOE_OK) status = call(r, 0);
  return status == CUMOE_OK ? read_out(r, r->w->alone[r->number]) : status;
}

static void leave(rank *r, result *to)
{
  const int64_t begin = now_ms();
  to->fault.size = sizeof to->fault;
  if (r->comm && r->w->lost != NOBODY) end_comm(r);
  if (r->group) CUMOE_IGNORE(cumoe_group_fault_read(r->group, &to->fault));
  if (r->w->shrinks && r->number != r->w->lost) to->masked = go_on(r);
  if (r->graph) MUST(cumoe_graph_destroy(r->context, r->graph));
  to->left = cumoe_group_destroy(r->group);
  to->ended = cumoe_arenas_destroy(r->arenas);
  if (r->comm) MUST_NCCL(nccl.end(r->comm));
  MUST(cumoe_stream_destroy(r->context, r->stream));
  to->closed = cumoe_context_destroy(r->context);
  to->leave_ms = now_ms() - begin;
}

static void live(world *w, int32_t number)
{
  rank r = {.w = w, .number = number};
  result *to = &w->results[number];
  open_rank(&r);
  to->status = join(&r);
  if (to->status == CUMOE_OK) to->status = record(&r);
  snprintf(to->text, sizeof to->text, "%s", cumoe_last_error());
  atomic_fetch_add(&w->running, 1);
  while (atomic_load(&w->running) < w->ranks) nap();
  for (int i = 0; to->status == CUMOE_OK && i < w->calls; i++) {
    to->status = call(&r, i);
    if (to->status != CUMOE_OK) snprintf(to->text, sizeof to->text, "%s", cumoe_last_error());
  }
  to->gave_up_ms = now_ms() - atomic_load(&w->signalled_ms);
  if (to->status == CUMOE_OK) to->status = read_out(&r, w->got[number]);
  atomic_fetch_add(&w->out, 1);
  leave(&r, to);
}

/* ---- processes ---- */

static pid_t start(world *w, int32_t number)
{
  fflush(stdout);
  const pid_t child = fork();
  if (child) return child;
  alarm(100);
  if (w->flags & CUMOE_GROUP_NCCL) part_hosts(number);
  live(w, number);
  fflush(stdout);
  _exit(0);
}

static int32_t count_gpus(void)
{
  int end = 0;
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    int32_t count = 0;
    cumoe_context context;
    while (count < MOST_RANKS && cumoe_context_create(count, NULL, &context) == CUMOE_OK) {
      CUMOE_IGNORE(cumoe_context_destroy(context));
      count++;
    }
    _exit(count);
  }
  CHECK(waitpid(child, &end, 0) == child && WIFEXITED(end));
  return WEXITSTATUS(end);
}

static world *new_world(const world *from)
{
  world *w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (w == MAP_FAILED) abort();
  *w = *from;
  return w;
}

/* The lost one gets `signal` after some of its calls. */
static void run(world *w, int signal, int64_t after_ms)
{
  pid_t children[MOST_RANKS];
  int end = 0;
  for (int32_t i = 0; i < w->ranks; i++) children[i] = start(w, i);
  if (signal) {
    while (atomic_load(&w->running) < w->ranks) nap();
    usleep((useconds_t)after_ms * 1000);
    atomic_store(&w->signalled_ms, now_ms());
    CHECK(kill(children[w->lost], signal) == 0);
  }
  if (signal == SIGSTOP) {
    for (int64_t begin = now_ms(); atomic_load(&w->out) < w->ranks - 1 && now_ms() - begin < 30000;) nap();
    usleep(PATIENCE_MS * 1000 / 2);
    CHECK(kill(children[w->lost], SIGCONT) == 0);
  }
  for (int32_t i = 0; i < w->ranks; i++) {
    const bool dies = signal == SIGKILL && i == w->lost;
    CHECK(waitpid(children[i], &end, 0) == children[i]);
    CHECK_MSG(dies ? WIFSIGNALED(end) : WIFEXITED(end) && WEXITSTATUS(end) == 0, "rank %d ended with %#x", (int)i,
              (unsigned)end);
  }
}

/* Of one rank with all experts, on the same device, in a process of its own; without those of a lost rank. */
static void whole_layer(const world *w, uint16_t *want, bool without)
{
  rank r = {.w = (world *)(uintptr_t)w};
  int32_t map[EXPERTS];
  size_t bytes = 0;
  MUST(cumoe_context_create(w->devices ? 0 : CUMOE_DEVICE_CPU, NULL, &r.context));
  r.plan = plan_of(r.context, EXPERTS);
  for (int32_t e = 0; e < EXPERTS; e++)
    map[e] = without && e >= first_of(w, w->lost) && e < first_of(w, w->lost + 1) ? -1 : e;
  const int64_t all = w->ranks * layer.tokens;
  MUST(cumoe_plan_workspace(r.plan, all, &bytes));
  r.out = room(&r, CUMOE_BF16, all, layer.hidden);
  const cumoe_moe_args a = {.size = sizeof a,
                            .x = put(&r, CUMOE_BF16, all, layer.hidden, x),
                            .router_weight = put(&r, CUMOE_BF16, EXPERTS, layer.hidden, router),
                            .expert_map = put(&r, CUMOE_I32, 1, EXPERTS, map),
                            .out = r.out,
                            .workspace = room(&r, CUMOE_U8, 1, (int64_t)bytes)};
  MUST(cumoe_moe_forward(r.plan, bind(&r, 0, EXPERTS), &a, NULL));
  MUST(cumoe_copy_to_host(r.context, want, sizeof *want * (size_t)(all * layer.hidden), cumoe_const(r.out), NULL));
  MUST(cumoe_synchronize(r.context, NULL));
  MUST(cumoe_context_destroy(r.context));
}

static uint16_t *whole_layer_apart(const world *w, bool without)
{
  int end = 0;
  uint16_t *want = mmap(NULL, sizeof x, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (want == MAP_FAILED) abort();
  memset(want, 0xff, sizeof x);
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    whole_layer(w, want, without);
    fflush(stdout);
    _exit(0);
  }
  CHECK(waitpid(child, &end, 0) == child && WIFEXITED(end) && WEXITSTATUS(end) == 0);
  return want;
}

static float value_of(uint16_t bits)
{
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

/* EXACT by the same kernels: to the bit. Else ranks round their sums, and other kernels may serve them: near it, by the
 * largest value. A NaN is what was never written. */
static bool same(const world *w, uint16_t got, uint16_t want, float largest)
{
  if (w->flags & CUMOE_GROUP_EXACT && layer.flags & CUMOE_MOE_BATCH_INVARIANT) return got == want;
  return fabsf(value_of(got) - value_of(want)) <= .02f * largest;
}

static void check_rows(const world *w, uint16_t (*got)[MOST_ROWS], bool without)
{
  uint16_t *want = whole_layer_apart(w, without);
  for (int32_t i = 0; i < w->ranks; i++) {
    const uint16_t *own = want + i * layer.tokens * layer.hidden;
    float largest = 0;
    int wrong = 0;
    if (without && i == w->lost) continue;
    for (int e = 0; e < layer.tokens * layer.hidden; e++) largest = fmaxf(largest, fabsf(value_of(own[e])));
    for (int e = 0; e < layer.tokens * layer.hidden; e++) wrong += !same(w, got[i][e], own[e], largest);
    CHECK_MSG(wrong == 0, "rank %d: %d of %d elements differ", (int)i, wrong, layer.tokens * layer.hidden);
  }
  munmap(want, sizeof x);
}

/* ---- cases ---- */

static void agree(int32_t ranks, int32_t devices, uint32_t flags, const char *name)
{
  case_begin("%s", name);
  world *w = new_world(&(world){.ranks = ranks, .devices = devices, .flags = flags, .calls = CALLS});
  w->lost = NOBODY;
  run(w, 0, 0);
  for (int32_t i = 0; i < ranks; i++) {
    const result *r = &w->results[i];
    CHECK_MSG(r->status == CUMOE_OK, "rank %d: %s: %s", (int)i, cumoe_status_name(r->status), r->text);
    CHECK_MSG(r->left == CUMOE_OK && r->ended == CUMOE_OK && r->closed == CUMOE_OK, "rank %d: %d %d %d", (int)i,
              (int)r->left, (int)r->ended, (int)r->closed);
  }
  check_rows(w, w->got, false);
  munmap(w, sizeof *w);
  case_end();
}

/* What those say that another has left alone. */
static void check_told(const world *w, int32_t i, int signal)
{
  const result *r = &w->results[i];
  const int phase = r->fault.phase;
  CHECK_MSG(r->status == CUMOE_ERR_PEER, "rank %d: %s: %s", (int)i, cumoe_status_name(r->status), r->text);
  CHECK_MSG(r->fault.cause == CUMOE_GROUP_TIMEOUT && r->fault.about == w->lost &&
                (phase == CUMOE_PHASE_DISPATCH || phase == CUMOE_PHASE_RETURN),
            "rank %d: cause %d, phase %d, about %d", (int)i, (int)r->fault.cause, phase, (int)r->fault.about);
  CHECK_MSG(r->gave_up_ms < TIMEOUT_MS + 2000, "rank %d gave up after %d ms", (int)i, (int)r->gave_up_ms);
  CHECK_MSG(r->leave_ms < TIMEOUT_MS + PATIENCE_MS + 4000, "rank %d took %d ms to leave", (int)i, (int)r->leave_ms);
  CHECK_MSG(r->left == (w->shrinks ? CUMOE_OK : CUMOE_ERR_PEER) || signal == SIGSTOP, "rank %d left with %d", (int)i,
            (int)r->left);
  CHECK_MSG(r->closed == CUMOE_OK, "rank %d: its context ended with %d", (int)i, (int)r->closed);
  printf("# rank %d: rank %d, phase %d, after %d ms; left in %d ms with %d, %d\n", (int)i, (int)r->fault.about, phase,
         (int)r->gave_up_ms, (int)r->leave_ms, (int)r->left, (int)r->ended);
}

static void lose(int32_t ranks, int32_t devices, int signal, int64_t after_ms, bool shrinks)
{
  case_begin("%s after %d ms%s", signal == SIGKILL ? "killed" : "stopped", (int)after_ms, shrinks ? ", goes on" : "");
  world *w = new_world(&(world){
      .ranks = ranks, .devices = devices, .flags = CUMOE_GROUP_EXACT, .calls = ENDLESS, .shrinks = shrinks, .lost = 1});
  run(w, signal, after_ms);
  for (int32_t i = 0; i < ranks; i++)
    if (i != w->lost) check_told(w, i, signal);
  if (signal == SIGSTOP) CHECK_MSG(w->results[1].status == CUMOE_ERR_PEER, "%s", w->results[1].text);
  for (int32_t i = 0; shrinks && i < ranks; i++)
    if (i != w->lost) CHECK_MSG(w->results[i].masked == CUMOE_OK, "rank %d: %d", (int)i, (int)w->results[i].masked);
  if (shrinks) check_rows(w, w->alone, true);
  munmap(w, sizeof *w);
  case_end();
}

/* By NCCL the call is refused in its words; or its kernel waited, the communicator was ended, and the wait behind it
 * was up, if the group had not been given up before. Which messages had come by then nobody knows, this rank's own to
 * itself among them: of two ranks a wait has named the lost one so far, of four any. */
static void check_told_by_nccl(const world *w, int32_t i)
{
  const result *r = &w->results[i];
  const cumoe_group_fault *f = &r->fault;
  const bool refused = f->cause == CUMOE_GROUP_FAILED && f->by == i && strstr(r->text, "nccl");
  const bool given_up = f->cause == CUMOE_GROUP_ABORTED && f->by == i;
  const bool named = w->ranks == 2 ? f->about == w->lost : f->about >= 0 && f->about < w->ranks;
  const bool late = f->cause == CUMOE_GROUP_TIMEOUT && f->by == i && named &&
                    (f->phase == CUMOE_PHASE_DISPATCH || f->phase == CUMOE_PHASE_RETURN);
  CHECK_MSG(r->status == CUMOE_ERR_PEER || (refused && r->status == CUMOE_ERR_CUDA), "rank %d: %s: %s", (int)i,
            cumoe_status_name(r->status), r->text);
  CHECK_MSG(refused || (w->aborts ? given_up : late), "rank %d: cause %d, phase %d, about %d, by %d: %s", (int)i,
            (int)f->cause, (int)f->phase, (int)f->about, (int)f->by, r->text);
  CHECK_MSG(r->gave_up_ms < PATIENCE_MS + TIMEOUT_MS + 5000, "rank %d gave up after %d ms", (int)i, (int)r->gave_up_ms);
  CHECK_MSG(r->leave_ms < 5000, "rank %d took %d ms to leave", (int)i, (int)r->leave_ms);
  CHECK_MSG(r->left == CUMOE_OK && r->closed == CUMOE_OK, "rank %d left with %d, its context ended with %d", (int)i,
            (int)r->left, (int)r->closed);
  printf("# rank %d: cause %d, rank %d, phase %d, after %d ms; left in %d ms: %s\n", (int)i, (int)f->cause,
         (int)f->about, (int)f->phase, (int)r->gave_up_ms, (int)r->leave_ms, r->text);
}

static void lose_by_nccl(int32_t ranks, int32_t devices, int signal, int64_t after_ms, bool aborts)
{
  case_begin("by NCCL, %s after %d ms%s", signal == SIGKILL ? "killed" : "stopped", (int)after_ms,
             aborts ? ", given up" : "");
  world *w = new_world(&(world){.ranks = ranks,
                                .devices = devices,
                                .flags = CUMOE_GROUP_NCCL | CUMOE_GROUP_EXACT,
                                .calls = ENDLESS,
                                .aborts = aborts,
                                .lost = 1});
  run(w, signal, after_ms);
  for (int32_t i = 0; i < ranks; i++)
    if (i != w->lost) check_told_by_nccl(w, i);
  if (signal == SIGSTOP) CHECK_MSG(w->results[1].status != CUMOE_OK, "the one that was stopped has ended its calls");
  munmap(w, sizeof *w);
  case_end();
}

static void run_on(int32_t ranks, int32_t devices)
{
  agree(ranks, devices, CUMOE_GROUP_EXACT, "the bits of one rank");
  agree(ranks, devices, CUMOE_GROUP_EXACT | CUMOE_GROUP_DEDUP, "the bits of one rank, dedup");
  agree(ranks, devices, 0, "sums");
  lose(ranks, devices, SIGKILL, 0, false);
  lose(ranks, devices, SIGKILL, 37, true);
  lose(ranks, devices, SIGSTOP, 20, false);
  lose(ranks, devices, SIGSTOP, 5, true);
}

/* Whose experts run in one grid, and whose results come back in another. */
static void run_few(int32_t ranks, int32_t devices)
{
  layer.hidden = MOST_HIDDEN;
  layer.inter = MOST_INTER;
  layer.flags = 0;
  for (layer.tokens = 1; layer.tokens <= 4; layer.tokens += 3) {
    agree(ranks, devices, 0, "sums of few tokens");
    agree(ranks, devices, CUMOE_GROUP_DEDUP, "sums of few tokens, dedup");
    agree(ranks, devices, CUMOE_GROUP_EXACT, "few tokens, exact");
  }
  layer.tokens = MOST_TOKENS;
  agree(ranks, devices, 0, "sums of more tokens");
}

static void on_cpu(void)
{
  make_values();
  run_on(3, 0);
}

static void on_gpus(void)
{
  const int32_t gpus = count_gpus();
  make_values();
  if (gpus > 1) {
    run_on(gpus, gpus);
    run_few(gpus, gpus);
  } else {
    case_begin("on GPUs");
    case_skip("%d GPU%s: processes that share one take turns", (int)gpus, gpus == 1 ? "" : "s");
  }
}

static bool has_nccl(bool on_gpus)
{
  int end = 0;
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) _exit(load_nccl(on_gpus) ? 0 : 1);
  return waitpid(child, &end, 0) == child && WIFEXITED(end) && WEXITSTATUS(end) == 0;
}

static void run_by_nccl(int32_t ranks, int32_t devices)
{
  agree(ranks, devices, CUMOE_GROUP_NCCL | CUMOE_GROUP_EXACT, "by NCCL, the bits of one rank");
  agree(ranks, devices, CUMOE_GROUP_NCCL | CUMOE_GROUP_EXACT | CUMOE_GROUP_DEDUP, "by NCCL, the bits, dedup");
  agree(ranks, devices, CUMOE_GROUP_NCCL, "by NCCL, sums");
  lose_by_nccl(ranks, devices, SIGKILL, 0, false);
  lose_by_nccl(ranks, devices, SIGKILL, 37, true);
  lose_by_nccl(ranks, devices, SIGKILL, 11, false);
  lose_by_nccl(ranks, devices, SIGSTOP, 20, false);
  lose_by_nccl(ranks, devices, SIGSTOP, 5, true);
}

static void by_nccl(void)
{
  const int32_t gpus = count_gpus();
  make_values();
  CHECK(has_nccl(false));
  run_by_nccl(3, 0);
  if (gpus < 2 || !has_nccl(true)) {
    case_begin("by NCCL on GPUs");
    case_skip("%d GPU%s, or no libnccl.so.2", (int)gpus, gpus == 1 ? "" : "s");
    return;
  }
  run_by_nccl(gpus, gpus);
  layer.hidden = MOST_HIDDEN;
  layer.inter = MOST_INTER;
  layer.flags = 0;
  layer.tokens = 1;
  agree(gpus, gpus, CUMOE_GROUP_NCCL, "by NCCL, sums of one token");
}

static const test_group groups[] = {
    ALONE("processes on GPUs", on_gpus, ONCE),
    ALONE("processes on the CPU", on_cpu, ONCE),
    ALONE("processes by NCCL", by_nccl, ONCE),
};

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  run_groups(NULL, groups, sizeof groups / sizeof *groups);
  return test_end();
}
