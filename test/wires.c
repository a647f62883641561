/*
 * Arenas on GPUs, over the shim: threads stand for processes. The order of CUDA's calls; a group over CUDA's handles;
 * every call failing in turn: all ranks answer, nothing is left, and nothing is freed that another has open.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shim/shim.h"
#include "test.h"

enum { RANKS = 3, STEPS = 16, DEVICES = 2, BYTES = 3000 };

typedef struct world {
  int32_t process[RANKS]; /* equal: of one process */
  bool group;
  atomic_int arrived[STEPS];
  unsigned char letters[STEPS][RANKS][1024];
} world;

typedef struct rank {
  world *w;
  int32_t number, calls;
  cumoe_context context;
  cumoe_status status, destroyed;
  char text[512];
} rank;

static void meet(world *w, int32_t step)
{
  atomic_fetch_add(&w->arrived[step], 1);
  while (atomic_load(&w->arrived[step]) < RANKS) sched_yield();
}

static int all_gather(void *user, const void *mine, void *all, size_t bytes)
{
  rank *r = user;
  const int32_t step = r->calls++;
  if (step >= STEPS || bytes > 1024) return 1;
  memcpy(r->w->letters[step][r->number], mine, bytes);
  meet(r->w, step);
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
  cumoe_arenas_config config = {
      .size = sizeof config, .rank = r->number, .ranks = RANKS, .all_gather = all_gather, .user = r};
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
  shim_process = 1000 + r->w->process[r->number];
  if (r->w->group) CHECK_OK(cumoe_plan_create(r->context, &desc, &plan));
  if (r->w->group) CHECK_OK(cumoe_ep_arena(plan, &of_group, &bytes));
  r->status = cumoe_arenas_create(r->context, bytes, &config, &made);
  snprintf(r->text, sizeof r->text, "%s", cumoe_last_error());
  if (r->status != CUMOE_OK) return NULL;
  if (cumoe_arenas_get_info(made, &info) != CUMOE_OK || info.arena.device != r->number % DEVICES) abort();
  if (r->w->group) r->status = join_group(r, plan, &of_group, &info);
  if (r->status != CUMOE_OK) printf("# rank %d: %s\n", (int)r->number, cumoe_last_error());
  r->destroyed = cumoe_arenas_destroy(made);
  return NULL;
}

/* Contexts are the test's own: they neither fail nor count. */
static void open_ranks(rank *ranks, world *w)
{
  memset(w->arrived, 0, sizeof w->arrived);
  shim_pause(true);
  for (int32_t i = 0; i < RANKS; i++) {
    ranks[i] = (rank){.w = w, .number = i};
    CHECK_OK(cumoe_context_create(i % DEVICES, NULL, &ranks[i].context));
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
  for (int32_t i = 0; i < RANKS; i++) CUMOE_IGNORE(cumoe_context_destroy(ranks[i].context));
  shim_pause(false);
}

/* ---- what is called ---- */

/* The names of calls on a device, in their order. */
static void names_on(const char *device, char *to, size_t room)
{
  char line[512];
  size_t used = 0;
  for (const char *at = shim_trace(); *at; at += strlen(line) + 1) {
    snprintf(line, sizeof line, "%.*s", (int)strcspn(at, "\n"), at);
    const char *end = strrchr(line, '@');
    if (end && strcmp(end, device) == 0 && strncmp(line, "cuda", 4) == 0)
      used += (size_t)snprintf(to + used, room - used, "%.*s ", (int)strcspn(line + 4, " "), line + 4);
    if (used >= room) abort();
  }
}

/* Rank 1, alone on device 1: of a process of its own, or of that of all. */
static void order(void)
{
  static const char own[] =
      "Malloc StreamCreateWithFlags MemsetAsync StreamSynchronize StreamDestroy DeviceGetPCIBusId",
                    reach[] = "DeviceGetByPCIBusId DeviceCanAccessPeer", open[] = "IpcOpenMemHandle";
  static world w;
  rank ranks[RANKS];
  char got[4096], want[1024];
  for (int apart = 0; apart < 2; apart++) {
    case_begin("%s", apart ? "processes" : "threads");
    for (int32_t i = 0; i < RANKS; i++) w.process[i] = apart ? i : 0;
    open_ranks(ranks, &w);
    shim_mark();
    run_ranks(ranks);
    names_on("@1", got, sizeof got);
    if (apart)
      snprintf(want, sizeof want, "%s IpcGetMemHandle %s %s %s %s IpcCloseMemHandle IpcCloseMemHandle Free", own, reach,
               open, reach, open);
    else
      snprintf(want, sizeof want, "%s %s %s Free", own, reach, reach);
    /* What is current, and how captures are taken, is looked at between them. */
    const char *at = got;
    for (char *name = strtok(want, " "); name; name = strtok(NULL, " ")) {
      const char *found = strstr(at, name);
      if (!CHECK_MSG(found != NULL, "no %s in: %s", name, at)) break;
      at = found + strlen(name);
    }
    CHECK_MSG(!strstr(at, "Ipc") && !strstr(at, "Free"), "more than that: %s", at);
    for (int32_t i = 0; i < RANKS; i++)
      CHECK_MSG(ranks[i].status == CUMOE_OK && ranks[i].destroyed == CUMOE_OK, "rank %d: %s", (int)i, ranks[i].text);
    close_ranks(ranks);
    case_end();
  }
}

static void groups_over_handles(void)
{
  static const int32_t processes[][RANKS] = {{0, 1, 2}, {0, 1, 0}, {0, 0, 0}};
  static world w = {.group = true};
  rank ranks[RANKS];
  for (size_t i = 0; i < sizeof processes / sizeof *processes; i++) {
    case_begin("processes %d %d %d", (int)processes[i][0], (int)processes[i][1], (int)processes[i][2]);
    const int64_t live = shim_live();
    memcpy(w.process, processes[i], sizeof w.process);
    open_ranks(ranks, &w);
    run_ranks(ranks);
    for (int32_t r = 0; r < RANKS; r++)
      CHECK_MSG(ranks[r].status == CUMOE_OK && ranks[r].destroyed == CUMOE_OK, "rank %d: %s", (int)r, ranks[r].text);
    close_ranks(ranks);
    CHECK(shim_live() == live);
    case_end();
  }
}

/* ---- what may fail ---- */

/* One rank at least answers with what failed, and all others with its words. */
static void check_answers(const rank *ranks, cudaError_t error)
{
  int own = 0, told = 0;
  for (int32_t i = 0; i < RANKS; i++) {
    const bool peer = ranks[i].status == CUMOE_ERR_PEER;
    own += ranks[i].status != CUMOE_OK && !peer;
    told += peer && strstr(ranks[i].text, ": CUMOE_ERR_") != NULL;
    CHECK_MSG(ranks[i].status == CUMOE_OK || peer || strstr(ranks[i].text, "cuda") != NULL ||
                  (error == cudaErrorInvalidValue && strstr(ranks[i].text, "does not see") != NULL),
              "rank %d: %s", (int)i, ranks[i].text);
  }
  CHECK_MSG(own == 0 ? told == 0 : own + told == RANKS, "%d: %d fail, %d are told", (int)error, own, told);
}

/* Call n and, forever, all after it; false: there was none. */
static bool fail_at(int64_t n, bool forever, cudaError_t error)
{
  static world w = {.process = {0, 1, 0}};
  rank ranks[RANKS];
  const int64_t live = shim_live(), heap = shim_heap();
  case_begin("call %lld%s, %s", (long long)n, forever ? " and all after it" : "", cudaGetErrorName(error));
  open_ranks(ranks, &w);
  shim_mark();
  shim_fail(SHIM_CUDA, n, forever, error);
  run_ranks(ranks);
  const char *failed = shim_failed();
  const bool torn = strstr(shim_trace(), "freed while another") != NULL;
  check_answers(ranks, error);
  CHECK_MSG(!torn || shim_sticky(error), "%s", shim_trace());
  shim_heal();
  close_ranks(ranks);
  CHECK_MSG(shim_live() == live && shim_heap() == heap, "%s failed: %lld objects, %lld blocks are left",
            failed ? failed : "nothing", (long long)(shim_live() - live), (long long)(shim_heap() - heap));
  case_end();
  return failed != NULL;
}

static void faults(void)
{
  static const cudaError_t errors[] = {cudaErrorMemoryAllocation, cudaErrorInvalidValue, cudaErrorIllegalAddress};
  static world w = {.group = false};
  rank ranks[RANKS];
  open_ranks(ranks, &w); /* what is made once */
  run_ranks(ranks);
  close_ranks(ranks);
  for (size_t e = 0; e < sizeof errors / sizeof *errors; e++)
    for (int forever = 0; forever <= (e == 0); forever++)
      for (int64_t n = 1; fail_at(n, forever, errors[e]); n++) continue;
}

static void unreachable(void)
{
  static const char *const words[] = {"which the process of rank", "cannot reach"};
  for (int i = 0; i < 2; i++) {
    static world w = {.process = {0, 1, 2}};
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
    ALONE("groups over handles", groups_over_handles, ONCE),
    ALONE("unreachable GPUs", unreachable, ONCE),
    ALONE("every call fails", faults, ONCE),
};

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  shim_reset();
  run_groups(NULL, groups, sizeof groups / sizeof *groups);
  return test_end();
}
