/*
 * Arenas on GPUs, over the shim: threads stand for processes. The order of the calls of CUDA and NCCL; groups over
 * CUDA's handles and over windows, with NCCL 2.27 to 2.31; every call failing in turn: all ranks answer, nothing is
 * left, and nothing is freed that another has open; a rank that does not come.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "shim/shim.h"
#include "test.h"

enum { RANKS = 3, STEPS = 16, BYTES = 3000, NOBODY = -1 };

static int gpus = 2; /* dealt to the ranks in turn */

typedef struct world {
  int32_t process[RANKS];          /* equal: of one process */
  bool group, by_comm, comm_alone; /* a communicator; letters by it, too */
  int32_t wire, absent;            /* a rank that does not call; none: NOBODY */
  int64_t timeout_ns;
  void *handle, *comms[RANKS];
  atomic_int arrived[STEPS];
  unsigned char letters[STEPS][RANKS][1024];
} world;

typedef struct rank {
  world *w;
  int32_t number, calls;
  cumoe_context context;
  cumoe_status status, destroyed;
  int32_t wire;     /* the one that was found */
  cudaError_t left; /* CUDA's last error of the thread */
  char text[512];
} rank;

/* A minute is for ever. */
static int meet(world *w, int32_t step)
{
  const struct timespec nap = {.tv_nsec = 50000};
  atomic_fetch_add(&w->arrived[step], 1);
  for (int i = 0; atomic_load(&w->arrived[step]) < RANKS; i++) {
    if (i == 400000) return 1;
    nanosleep(&nap, NULL);
  }
  return 0;
}

static int all_gather(void *user, const void *mine, void *all, size_t bytes)
{
  rank *r = user;
  const int32_t step = r->calls++;
  if (step >= STEPS || bytes > 1024) return 1;
  memcpy(r->w->letters[step][r->number], mine, bytes);
  if (meet(r->w, step) != 0) return 1;
  for (int32_t i = 0; i < RANKS; i++) memcpy((char *)all + (size_t)i * bytes, r->w->letters[step][i], bytes);
  return 0;
}

static cumoe_status join_group(const rank *r, cumoe_plan plan, cumoe_group_config *config,
                               const cumoe_arenas_info *info)
{
  cumoe_group group;
  config->arenas = info->arenas;
  const cumoe_status status = cumoe_group_create(r->context, plan, config, info->arena, &group);
  return status == CUMOE_OK ? cumoe_group_destroy(group) : status;
}

static void *run_rank(void *argument)
{
  rank *r = argument;
  const world *w = r->w;
  const cumoe_arenas_config config = {.size = sizeof config,
                                      .wire = w->wire,
                                      .rank = r->number,
                                      .ranks = RANKS,
                                      .all_gather = w->comm_alone ? NULL : all_gather,
                                      .user = r,
                                      .comm = w->comms[r->number],
                                      .nccl = w->handle,
                                      .timeout_ns = w->timeout_ns};
  const cumoe_moe_desc desc = {.size = sizeof desc,
                               .num_experts = RANKS,
                               .local_experts = 1,
                               .hidden = 64,
                               .inter = 64,
                               .dtype = CUMOE_BF16,
                               .routing = cumoe_routing_mixtral(1)};
  cumoe_group_config of_group = {.size = sizeof of_group, .rank = r->number, .ranks = RANKS, .max_tokens = 4};
  cumoe_arenas_info info = {.size = sizeof info};
  cumoe_arenas made;
  cumoe_plan plan = NULL;
  size_t bytes = BYTES;
  shim_process = 1000 + w->process[r->number];
  if (w->absent == r->number) return NULL;
  if (w->group) CHECK_OK(cumoe_plan_create(r->context, &desc, &plan));
  if (w->group) CHECK_OK(cumoe_ep_arena(plan, &of_group, &bytes));
  r->status = cumoe_arenas_create(r->context, bytes, &config, &made);
  snprintf(r->text, sizeof r->text, "%s", cumoe_last_error());
  r->left = shim_last_error();
  if (r->status != CUMOE_OK) return NULL;
  if (cumoe_arenas_get_info(made, &info) != CUMOE_OK || info.arena.device != r->number % gpus) abort();
  r->wire = info.wire;
  if (w->group) r->status = join_group(r, plan, &of_group, &info);
  if (r->status != CUMOE_OK) printf("# rank %d: %s\n", (int)r->number, cumoe_last_error());
  r->destroyed = cumoe_arenas_destroy(made);
  return NULL;
}

/* Contexts are the test's own: they neither fail nor count. */
static void open_ranks(rank *ranks, world *w)
{
  int devices[RANKS];
  for (int i = 0; i < RANKS; i++) devices[i] = i % gpus;
  memset(w->arrived, 0, sizeof w->arrived);
  memset(w->comms, 0, sizeof w->comms);
  if (w->by_comm) shim_comms_open(w->comms, RANKS, devices);
  shim_pause(true);
  for (int32_t i = 0; i < RANKS; i++) {
    ranks[i] = (rank){.w = w, .number = i};
    CHECK_OK(cumoe_context_create(i % gpus, NULL, &ranks[i].context));
  }
  shim_pause(false);
}

static void run_ranks(rank *ranks)
{
  pthread_t threads[RANKS];
  for (int32_t i = 0; i < RANKS; i++)
    if (pthread_create(&threads[i], NULL, run_rank, &ranks[i]) != 0) abort();
  for (int32_t i = 0; i < RANKS; i++) pthread_join(threads[i], NULL);
}

static void close_ranks(const rank *ranks)
{
  shim_pause(true);
  if (ranks[0].w->by_comm) shim_comms_close(ranks[0].w->comms);
  for (int32_t i = 0; i < RANKS; i++) CUMOE_IGNORE(cumoe_context_destroy(ranks[i].context));
  shim_pause(false);
}

/* ---- what is called ---- */

/* Whatever makes a device current, and asks for errors and captures, is left out. */
static bool is_noise(const char *name)
{
  static const char *const noise[] = {"cuCtx", "cudaPeek", "cudaGetLast", "cudaThread", "cudaStreamQuery", "  "};
  for (size_t i = 0; i < sizeof noise / sizeof *noise; i++)
    if (strncmp(name, noise[i], strlen(noise[i])) == 0) return true;
  return false;
}

/* The names of calls on a device, in their order; without "cuda". */
static void names_on(const char *device, char *to, size_t room)
{
  char line[512];
  size_t used = 0;
  to[0] = 0;
  for (const char *at = shim_trace(); *at; at += strcspn(at, "\n") + 1) {
    snprintf(line, sizeof line, "%.*s", (int)strcspn(at, "\n"), at);
    const char *end = strrchr(line, '@'), *name = strncmp(line, "cuda", 4) == 0 ? line + 4 : line;
    if (end && strcmp(end, device) == 0 && !is_noise(line))
      used += (size_t)snprintf(to + used, room - used, "%s%.*s", used ? " " : "", (int)strcspn(name, " "), name);
    if (used >= room) abort();
  }
}

#define ZEROS  "StreamCreateWithFlags MemsetAsync StreamSynchronize StreamDestroy "
#define REACH  "DeviceGetByPCIBusId DeviceCanAccessPeer "
#define LETTER "MemcpyAsync ncclAllGather MemcpyAsync StreamSynchronize "

/* Rank 1, alone on device 1. */
static const struct {
  const char *name;
  world w;
  const char *calls;
} orders[] = {
    {"threads", {.absent = NOBODY}, "DriverGetVersion Malloc " ZEROS "DeviceGetPCIBusId " REACH REACH "Free"},
    {"processes",
     {.process = {0, 1, 2}, .absent = NOBODY},
     "DriverGetVersion Malloc " ZEROS "DeviceGetPCIBusId IpcGetMemHandle " REACH "IpcOpenMemHandle " REACH
     "IpcOpenMemHandle IpcCloseMemHandle IpcCloseMemHandle Free"},
    {"letters by NCCL",
     {.process = {0, 1, 2}, .by_comm = true, .comm_alone = true, .wire = CUMOE_WIRE_SHARED, .absent = NOBODY},
     "StreamCreateWithFlags Malloc DriverGetVersion " LETTER "Malloc " ZEROS
     "DeviceGetPCIBusId IpcGetMemHandle " LETTER REACH "IpcOpenMemHandle " REACH "IpcOpenMemHandle " LETTER
     "IpcCloseMemHandle IpcCloseMemHandle " LETTER "Free Free StreamDestroy"},
    {"windows",
     {.by_comm = true, .absent = NOBODY},
     "DriverGetVersion ncclMemAlloc Malloc " ZEROS "ncclCommWindowRegister ncclGetPeerDevicePointer "
     "ncclGetPeerDevicePointer ncclCommWindowDeregister ncclMemFree Free"},
};

static void order(void)
{
  static world w;
  rank ranks[RANKS];
  char got[4096];
  for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
    case_begin("%s", orders[i].name);
    w = orders[i].w;
    open_ranks(ranks, &w);
    shim_mark();
    run_ranks(ranks);
    names_on("@1", got, sizeof got);
    CHECK_MSG(strcmp(got, orders[i].calls) == 0, "%s", got);
    if (strstr(got, "IpcGetMemHandle")) CHECK(strstr(shim_trace(), "cudaMalloc 2097152 @1")); /* nothing lies beside */
    CHECK_MSG(!strstr(shim_trace(), "freed while") && !strstr(shim_trace(), "waits for ever"), "%s", shim_trace());
    for (int32_t r = 0; r < RANKS; r++)
      CHECK_MSG(ranks[r].status == CUMOE_OK && ranks[r].destroyed == CUMOE_OK, "rank %d: %s", (int)r, ranks[r].text);
    close_ranks(ranks);
    case_end();
  }
}

/* ---- groups, by version of NCCL ---- */

/* status OK: a group over that wire. */
static const struct {
  const char *name;
  int nccl;
  bool null_windows, far_windows, handle;
  world w;
  const char *hidden;
  int32_t wire;
  cumoe_status status;
  const char *words;
} forms[] = {
    {"three processes", 0, 0, 0, 0, {.process = {0, 1, 2}}, NULL, CUMOE_WIRE_SHARED, CUMOE_OK, ""},
    {"two processes", 0, 0, 0, 0, {.process = {0, 1, 0}}, NULL, CUMOE_WIRE_SHARED, CUMOE_OK, ""},
    {"one process", 0, 0, 0, 0, {.wire = CUMOE_WIRE_SHARED}, NULL, CUMOE_WIRE_SHARED, CUMOE_OK, ""},
    {"no NCCL", 0, 0, 0, 0, {.by_comm = true}, NULL, 0, CUMOE_ERR_LIBRARY_MISSING, "has not loaded libnccl.so.2"},
    {"2.27", 22707, 0, 0, 0, {.by_comm = true, .comm_alone = true}, NULL, CUMOE_WIRE_SHARED, CUMOE_OK, ""},
    {"2.27.3",
     22703,
     0,
     0,
     0,
     {.process = {0, 1, 2}, .by_comm = true, .comm_alone = true},
     NULL,
     CUMOE_WIRE_SHARED,
     CUMOE_OK,
     ""},
    {"2.28.3",
     22803,
     0,
     0,
     0,
     {.process = {0, 1, 2}, .by_comm = true, .comm_alone = true},
     NULL,
     CUMOE_WIRE_SHARED,
     CUMOE_OK,
     ""},
    {"2.29.1, windows by name",
     22901,
     0,
     0,
     0,
     {.process = {0, 1, 2}, .by_comm = true, .comm_alone = true, .wire = CUMOE_WIRE_WINDOW},
     NULL,
     0,
     CUMOE_ERR_NOT_SUPPORTED,
     "which needs NCCL 2.29.2: this is 2.29.1"},
    {"2.29.2",
     22902,
     0,
     0,
     0,
     {.process = {0, 1, 2}, .by_comm = true, .comm_alone = true},
     NULL,
     CUMOE_WIRE_WINDOW,
     CUMOE_OK,
     ""},
    {"2.30.7",
     23007,
     0,
     0,
     0,
     {.process = {0, 1, 2}, .by_comm = true, .comm_alone = true},
     NULL,
     CUMOE_WIRE_WINDOW,
     CUMOE_OK,
     ""},
    {"2.31.1",
     23101,
     0,
     0,
     0,
     {.process = {0, 1, 2}, .by_comm = true, .comm_alone = true},
     NULL,
     CUMOE_WIRE_WINDOW,
     CUMOE_OK,
     ""},
    {"2.28.9",
     22809,
     0,
     0,
     0,
     {.process = {0, 1, 2}, .by_comm = true, .comm_alone = true},
     NULL,
     CUMOE_WIRE_SHARED,
     CUMOE_OK,
     ""},
    {"2.28.9, windows by name",
     22809,
     0,
     0,
     0,
     {.by_comm = true, .wire = CUMOE_WIRE_WINDOW},
     NULL,
     0,
     CUMOE_ERR_NOT_SUPPORTED,
     "which needs NCCL 2.29.2: this is 2.28.9"},
    {"2.29.7",
     22907,
     0,
     0,
     0,
     {.process = {0, 1, 2}, .by_comm = true, .comm_alone = true},
     NULL,
     CUMOE_WIRE_WINDOW,
     CUMOE_OK,
     ""},
    {"2.29.7, one process, the engine's handle",
     22907,
     0,
     0,
     1,
     {.by_comm = true, .wire = CUMOE_WIRE_WINDOW},
     NULL,
     CUMOE_WIRE_WINDOW,
     CUMOE_OK,
     ""},
    {"2.29.7, CUDA's handles by name",
     22907,
     0,
     0,
     0,
     {.process = {0, 1, 2}, .by_comm = true, .wire = CUMOE_WIRE_SHARED},
     NULL,
     CUMOE_WIRE_SHARED,
     CUMOE_OK,
     ""},
    {"no window, with success",
     22907,
     1,
     0,
     0,
     {.process = {0, 1, 2}, .by_comm = true},
     NULL,
     CUMOE_WIRE_SHARED,
     CUMOE_OK,
     ""},
    {"no window, by name",
     22907,
     1,
     0,
     0,
     {.by_comm = true, .wire = CUMOE_WIRE_WINDOW},
     NULL,
     0,
     CUMOE_ERR_NOT_SUPPORTED,
     "gave no window: config.comm has no symmetric memory"},
    {"far windows",
     22907,
     0,
     1,
     0,
     {.process = {0, 1, 2}, .by_comm = true, .comm_alone = true},
     NULL,
     CUMOE_WIRE_SHARED,
     CUMOE_OK,
     ""},
    {"far windows, by name",
     22907,
     0,
     1,
     0,
     {.by_comm = true, .wire = CUMOE_WIRE_WINDOW},
     NULL,
     0,
     CUMOE_ERR_NOT_SUPPORTED,
     "window is not memory that rank"},
    {"without its getter",
     22907,
     0,
     0,
     0,
     {.by_comm = true},
     "ncclGetPeerDevicePointer",
     0,
     CUMOE_ERR_LIBRARY_MISSING,
     "NCCL 2.29.7 has no function ncclGetPeerDevicePointer"},
    {"without a count",
     22809,
     0,
     0,
     0,
     {.by_comm = true},
     "ncclCommCount",
     0,
     CUMOE_ERR_LIBRARY_MISSING,
     "has no function ncclCommCount"},
};

static void form_groups(void)
{
  static world w;
  rank ranks[RANKS];
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
    const int64_t live = shim_live();
    case_begin("%s", forms[i].name);
    w = forms[i].w;
    w.group = true;
    w.absent = NOBODY;
    if (forms[i].handle) w.handle = shim_nccl_handle();
    shim.nccl = forms[i].nccl;
    shim.null_windows = forms[i].null_windows;
    shim.far_windows = forms[i].far_windows;
    shim.hidden = forms[i].hidden;
    open_ranks(ranks, &w);
    shim_mark();
    run_ranks(ranks);
    for (int32_t r = 0; r < RANKS; r++) {
      CHECK_MSG(ranks[r].status == forms[i].status && strstr(ranks[r].text, forms[i].words) != NULL, "rank %d: %d, %s",
                (int)r, (int)ranks[r].status, ranks[r].text);
      CHECK_MSG(ranks[r].status != CUMOE_OK || !ranks[r].text[0], "a success changed the text: %s", ranks[r].text);
      CHECK_MSG(ranks[r].destroyed == CUMOE_OK && ranks[r].wire == forms[i].wire, "rank %d: %d, wire %d", (int)r,
                (int)ranks[r].destroyed, (int)ranks[r].wire);
    }
    CHECK_MSG(!strstr(shim_trace(), "freed while") && !strstr(shim_trace(), "waits for ever"), "%s", shim_trace());
    close_ranks(ranks);
    CHECK(shim_live() == live);
    shim_reset();
    case_end();
  }
}

/* A communicator of other ranks, or of another device: refused before anything happens. */
static void other_communicators(void)
{
  static const int devices[4] = {0, 1, 0, 1};
  static const struct {
    int size, of;
    cumoe_status status;
    const char *words;
  } wrong[] = {{2, 0, CUMOE_ERR_INVALID_ARGUMENT, "config.comm has 2 ranks, config.ranks is 3"},
               {4, 0, CUMOE_ERR_INVALID_ARGUMENT, "config.comm has 4 ranks, config.ranks is 3"},
               {3, 2, CUMOE_ERR_INVALID_ARGUMENT, "config.comm is of rank 2, config.rank is 0"},
               {3, -1, CUMOE_ERR_WRONG_DEVICE, "config.comm is of CUDA device 1, context of 0"}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    void *comms[4];
    cumoe_context context;
    cumoe_arenas made;
    case_begin("%s", wrong[i].words);
    CHECK_OK(cumoe_context_create(0, NULL, &context));
    shim_comms_open(comms, wrong[i].size, wrong[i].of < 0 ? devices + 1 : devices);
    const cumoe_arenas_config config = {
        .size = sizeof config, .ranks = RANKS, .comm = comms[wrong[i].of < 0 ? 0 : wrong[i].of]};
    shim_mark();
    CHECK_STATUS(wrong[i].status, cumoe_arenas_create(context, BYTES, &config, &made));
    CHECK_TEXT(wrong[i].words);
    CHECK_MSG(shim_calls(SHIM_ALL) == 0 && !strstr(shim_trace(), "nccl"), "%s", shim_trace());
    shim_comms_close(comms);
    CHECK_OK(cumoe_context_destroy(context));
    case_end();
  }
}

/* ---- what may fail ---- */

/* Where one rank fails it answers with that, and all others with its words, or that it has not come. */
static void check_answers(const rank *ranks, bool lost)
{
  static const char *const heard[] = {": CUMOE_ERR_", "ncclCommWindowRegister: 6", "has not ended within"};
  int own = 0, told = 0;
  for (int32_t i = 0; i < RANKS; i++) {
    const bool peer = ranks[i].status == CUMOE_ERR_PEER;
    own += ranks[i].status != CUMOE_OK && !peer;
    for (size_t h = 0; peer && h < sizeof heard / sizeof *heard; h++) told += strstr(ranks[i].text, heard[h]) != NULL;
    CHECK_MSG(ranks[i].status == CUMOE_OK || peer || strstr(ranks[i].text, "cuda") || strstr(ranks[i].text, "nccl") ||
                  strstr(ranks[i].text, "does not see"),
              "rank %d: %s", (int)i, ranks[i].text);
    CHECK_MSG(ranks[i].wire == ranks[0].wire, "rank %d: wire %d", (int)i, (int)ranks[i].wire);
    CHECK_MSG(lost || ranks[i].left == cudaSuccess, "rank %d leaves %s", (int)i, cudaGetErrorName(ranks[i].left));
  }
  CHECK_MSG(own + told == 0 || own + told == RANKS, "%d fail, %d are told", own, told);
}

/* Call n and, forever, all after it; false: there was none. */
static bool fail_at(const world *of, shim_channel channel, int64_t n, bool forever, cudaError_t error)
{
  static world w;
  rank ranks[RANKS];
  const int64_t live = shim_live(), heap = shim_heap();
  case_begin("call %lld%s, %d", (long long)n, forever ? " and all after it" : "", (int)error);
  w = *of;
  open_ranks(ranks, &w);
  shim_mark();
  shim_fail(channel, n, forever, error);
  run_ranks(ranks);
  const char *failed = shim_failed();
  const bool torn = strstr(shim_trace(), "freed while another") != NULL,
             lost = channel == SHIM_CUDA && shim_sticky(error);
  check_answers(ranks, lost);
  /* With a gather that failed nobody knows who has what open. */
  CHECK_MSG((!torn || lost || w.comm_alone) && !strstr(shim_trace(), "waits for ever"), "%s", shim_trace());
  shim_heal();
  close_ranks(ranks);
  CHECK_MSG(shim_live() == live && shim_heap() == heap, "%s failed: %lld objects, %lld blocks are left",
            failed ? failed : "nothing", (long long)(shim_live() - live), (long long)(shim_heap() - heap));
  case_end();
  return failed != NULL;
}

static void fail_each(const world *w, shim_channel channel, bool forever, cudaError_t error)
{
  for (int64_t n = 1; fail_at(w, channel, n, forever, error); n++) continue;
}

static const world by_handles = {.process = {0, 1, 0}, .absent = NOBODY},
                   by_windows = {.by_comm = true, .wire = CUMOE_WIRE_WINDOW, .absent = NOBODY},
                   by_either = {.process = {0, 1, 2}, .by_comm = true, .absent = NOBODY};

/* What is made once in a process is made now. */
static void warm_up(void)
{
  static world w;
  rank ranks[RANKS];
  w = by_either;
  open_ranks(ranks, &w);
  run_ranks(ranks);
  close_ranks(ranks);
}

static void faults(void)
{
  warm_up();
  fail_each(&by_handles, SHIM_CUDA, false, cudaErrorMemoryAllocation);
  fail_each(&by_handles, SHIM_CUDA, true, cudaErrorMemoryAllocation);
  fail_each(&by_handles, SHIM_CUDA, false, cudaErrorInvalidValue);
  fail_each(&by_handles, SHIM_CUDA, false, cudaErrorIllegalAddress);
  shim.patience_ms = 50; /* a device that is lost before a collective call leaves the others in it */
  fail_each(&by_windows, SHIM_CUDA, false, cudaErrorMemoryAllocation);
  fail_each(&by_either, SHIM_CUDA, false, cudaErrorMemoryAllocation);
  shim.patience_ms = 60000;
  for (int code = 1; code <= 5; code += 2) {
    fail_each(&by_windows, SHIM_LIBRARY, false, (cudaError_t)code);
    fail_each(&by_windows, SHIM_LIBRARY, true, (cudaError_t)code);
    fail_each(&by_either, SHIM_LIBRARY, false, (cudaError_t)code);
  }
}

/* Rank 2 does not come; the others' kernels stay on their devices, which nobody waits for, until the engine has ended
 * the communicator. */
static void absent(void)
{
  static world w;
  rank ranks[RANKS];
  shim.devices = gpus = RANKS; /* a GPU with a kernel that does not end is of no use to a second rank */
  warm_up();
  const int64_t live = shim_live(), heap = shim_heap();
  case_begin("one of three");
  w = (world){.by_comm = true, .comm_alone = true, .absent = 2, .timeout_ns = 50000000};
  shim.patience_ms = 20;
  open_ranks(ranks, &w);
  shim_mark();
  run_ranks(ranks);
  for (int32_t r = 0; r < 2; r++)
    CHECK_MSG(ranks[r].status == CUMOE_ERR_PEER && strstr(ranks[r].text, "has not ended within 0.05 s") != NULL,
              "rank %d: %s", (int)r, ranks[r].text);
  CHECK_MSG(!strstr(shim_trace(), "waits for ever"), "%s", shim_trace());
  close_ranks(ranks);
  CHECK_MSG(shim_live() == live && shim_heap() == heap, "%lld objects, %lld blocks are left",
            (long long)(shim_live() - live), (long long)(shim_heap() - heap));
  case_end();
  /* Later: in the middle of create, and of destroy. */
  w = (world){.process = {0, 1, 2}, .by_comm = true, .comm_alone = true, .absent = NOBODY, .timeout_ns = 50000000};
  for (w.wire = CUMOE_WIRE_SHARED; w.wire <= CUMOE_WIRE_WINDOW; w.wire++)
    fail_each(&w, SHIM_LIBRARY, false, (cudaError_t)2);
  gpus = 2;
  shim_reset();
}

static void unreachable(void)
{
  static const char *const words[] = {"which the process of rank", "cannot reach"};
  for (int i = 0; i < 2; i++) {
    static world w = {.process = {0, 1, 2}, .absent = NOBODY};
    rank ranks[RANKS];
    case_begin("%s", i == 0 ? "a GPU that a process does not see" : "GPUs without a path");
    open_ranks(ranks, &w);
    shim.alone = i == 0;
    shim.no_peers = i == 1;
    run_ranks(ranks);
    shim.alone = shim.no_peers = false;
    for (int32_t r = 0; r < RANKS; r++)
      CHECK_MSG(ranks[r].status == CUMOE_ERR_NOT_SUPPORTED && strstr(ranks[r].text, words[i]) != NULL, "rank %d: %s",
                (int)r, ranks[r].text);
    close_ranks(ranks);
    case_end();
  }
}

static const test_group groups[] = {
    ALONE("order of calls", order, ONCE),
    ALONE("groups, by version of NCCL", form_groups, ONCE),
    ALONE("other communicators", other_communicators, ONCE),
    ALONE("unreachable GPUs", unreachable, ONCE),
    ALONE("every call fails", faults, ONCE),
    ALONE("a rank that does not come", absent, ONCE),
};

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  shim_reset();
  run_groups(NULL, groups, sizeof groups / sizeof *groups);
  return test_end();
}
