/*
 * Arenas on the CPU device, between threads, processes, and both: filled with zeros, each rank's writes where the
 * others see them, a group over them; ranks that disagree, fail, die at any step: all answer, nothing is left.
 */
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../host/arenas.h"
#include "test.h"

enum { MOST_RANKS = 6, STEPS = 16, TEXT = 512, NEVER = -1 };

/* ---- what all ranks share: the test's own memory, made before they part ---- */

typedef struct trouble {
  int32_t rank;                   /* whose; NEVER: nobody's */
  int32_t fails_at, dies_at;      /* its call of all_gather */
  int32_t files;                  /* it may open no more than these from then on; 0: any */
  void (*forge)(letter *of_rank); /* done to its letters on their way */
  int32_t deaf_at;                /* the call of whose letters it says that it has not got them; 0: none */
} trouble;

typedef struct world {
  const char *name;
  int32_t ranks, process[MOST_RANKS]; /* of each rank; equal: threads of one */
  bool group;
  size_t bytes[MOST_RANKS];
  int32_t wire[MOST_RANKS], said_rank[MOST_RANKS];
  trouble trouble;
  int64_t patience_ms;
  /* made */
  atomic_int arrived[STEPS];
  unsigned char letters[STEPS][MOST_RANKS][1024];
  int32_t status[MOST_RANKS], destroyed[MOST_RANKS], wrong[MOST_RANKS], files_left[MOST_RANKS];
  char text[MOST_RANKS][TEXT];
} world;

typedef struct rank {
  world *w;
  int32_t number, calls;
  bool failed; /* its all_gather: it is not called again */
} rank;

/* 0 when all have arrived, 62 (ETIME) when one has not in time. */
static int meet(world *w, int32_t step)
{
  const struct timespec nap = {.tv_nsec = 200000};
  const int64_t begin = now_ms();
  atomic_fetch_add(&w->arrived[step], 1);
  while (atomic_load(&w->arrived[step]) < w->ranks) {
    if (now_ms() - begin > w->patience_ms) return 62;
    nanosleep(&nap, NULL);
  }
  return 0;
}

static void limit_files(int32_t files)
{
  struct rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = (rlim_t)files;
  setrlimit(RLIMIT_NOFILE, &limit);
}

static int all_gather(void *user, const void *mine, void *all, size_t bytes)
{
  rank *r = user;
  world *w = r->w;
  const int32_t step = r->calls++;
  const bool troubled = w->trouble.rank == r->number;
  w->wrong[r->number] += r->failed;
  if (bytes > 1024 || step >= STEPS) return 1;
  r->failed = troubled && step == w->trouble.fails_at;
  if (r->failed) return 5;
  if (troubled && step == w->trouble.dies_at) kill(getpid(), SIGKILL);
  memcpy(w->letters[step][r->number], mine, bytes);
  if (troubled && w->trouble.files) limit_files(w->trouble.files);
  if (troubled && w->trouble.forge) w->trouble.forge((letter *)(void *)w->letters[step][r->number]);
  const int late = meet(w, step);
  r->failed = late != 0 || (troubled && w->trouble.deaf_at && step == w->trouble.deaf_at);
  for (int32_t i = 0; i < w->ranks; i++) memcpy((char *)all + (size_t)i * bytes, w->letters[step][i], bytes);
  return r->failed ? 62 : 0;
}

/* ---- a rank ---- */

/* Files of this process that are arenas, open or mapped. */
static int32_t count_files(void)
{
  int32_t found = 0;
  char line[1024];
  FILE *maps = fopen("/proc/self/maps", "r");
  while (maps && fgets(line, sizeof line, maps)) found += strstr(line, "cumoe_arena") != NULL;
  if (maps) fclose(maps);
  DIR *folder = opendir("/proc/self/fd");
  for (const struct dirent *e; folder && (e = readdir(folder));) {
    char path[300];
    snprintf(path, sizeof path, "/proc/self/fd/%s", e->d_name);
    const ssize_t length = readlink(path, line, sizeof line - 1);
    line[length > 0 ? length : 0] = 0;
    found += strstr(line, "cumoe_arena") != NULL;
  }
  if (folder) closedir(folder);
  return found;
}

static unsigned char mark(int32_t from, int32_t to)
{
  return (unsigned char)(1 + from * 16 + to);
}

/* Each writes a byte for every other, to both ends of its arena. */
static int32_t exchange(rank *r, const cumoe_arenas_info *info, size_t bytes)
{
  world *w = r->w;
  const unsigned char *own = info->arena.data;
  int32_t wrong = info->rank != r->number || info->ranks != w->ranks || info->wire != CUMOE_WIRE_SHARED ||
                  (size_t)info->arena.cols < bytes || info->arena.cols % 256 || (uintptr_t)own % 256 ||
                  info->arenas[r->number] != info->arena.data || info->arena.device != CUMOE_DEVICE_CPU;
  for (int64_t i = 0; i < info->arena.cols; i++) wrong += own[i] != 0;
  wrong += all_gather(r, "", w->text[r->number], 0) != 0; /* all have looked */
  for (int32_t to = 0; to < w->ranks; to++) {
    unsigned char *there = info->arenas[to];
    there[r->number] = mark(r->number, to);
    there[info->arena.cols - 1 - r->number] = mark(r->number, to);
  }
  wrong += all_gather(r, "", w->text[r->number], 0) != 0;
  for (int32_t from = 0; from < w->ranks; from++)
    wrong += own[from] != mark(from, r->number) || own[info->arena.cols - 1 - from] != mark(from, r->number);
  return wrong;
}

static int32_t join_group(const rank *r, cumoe_context context)
{
  const cumoe_moe_desc desc = {.size = sizeof desc,
                               .num_experts = MOST_RANKS,
                               .local_experts = 1,
                               .hidden = 16,
                               .inter = 16,
                               .dtype = CUMOE_F32,
                               .routing = cumoe_routing_mixtral(1)};
  cumoe_group_config config = {.size = sizeof config, .rank = r->number, .ranks = r->w->ranks, .max_tokens = 4};
  rank of_group = *r;
  const cumoe_arenas_config where = {
      .size = sizeof where, .rank = r->number, .ranks = r->w->ranks, .all_gather = all_gather, .user = &of_group};
  cumoe_arenas_info info = {.size = sizeof info};
  cumoe_plan plan;
  cumoe_arenas mine = NULL;
  cumoe_group group = NULL;
  size_t bytes;
  cumoe_status status = cumoe_plan_create(context, &desc, &plan);
  if (status == CUMOE_OK) status = cumoe_ep_arena(plan, &config, &bytes);
  if (status == CUMOE_OK) status = cumoe_arenas_create(context, bytes, &where, &mine);
  if (status == CUMOE_OK) status = cumoe_arenas_get_info(mine, &info);
  config.arenas = info.arenas;
  if (status == CUMOE_OK) status = cumoe_group_create(context, plan, &config, info.arena, &group);
  if (status != CUMOE_OK) printf("# rank %d: %s\n", (int)r->number, cumoe_last_error());
  const cumoe_status left = cumoe_group_destroy(group), ended = cumoe_arenas_destroy(mine);
  return (status != CUMOE_OK) + (left != CUMOE_OK) + (ended != CUMOE_OK);
}

static void *run_rank(void *argument)
{
  rank *r = argument;
  world *w = r->w;
  const int32_t n = r->number;
  const cumoe_context_config one = {.size = sizeof one, .cpu_threads = 1};
  const cumoe_arenas_config config = {.size = sizeof config,
                                      .wire = w->wire[n],
                                      .rank = w->said_rank[n],
                                      .ranks = w->ranks,
                                      .all_gather = all_gather,
                                      .user = r};
  cumoe_arenas_info info = {.size = sizeof info};
  cumoe_context context;
  cumoe_arenas mine;
  w->wrong[n] += cumoe_context_create(CUMOE_DEVICE_CPU, &one, &context) != CUMOE_OK;
  w->status[n] = cumoe_arenas_create(context, w->bytes[n], &config, &mine);
  if (w->status[n] != CUMOE_OK) {
    snprintf(w->text[n], TEXT, "%s", cumoe_last_error());
    w->wrong[n] += mine != NULL;
  } else {
    w->wrong[n] += cumoe_arenas_get_info(mine, &info) != CUMOE_OK;
    w->wrong[n] += exchange(r, &info, w->bytes[n]);
    w->destroyed[n] = cumoe_arenas_destroy(mine);
    w->wrong[n] += cumoe_arenas_destroy(mine) != CUMOE_ERR_STALE_HANDLE;
    if (w->group) w->wrong[n] += join_group(r, context);
  }
  w->wrong[n] += cumoe_context_destroy(context) != CUMOE_OK;
  return NULL;
}

/* The ranks of one process. */
static void run_process(world *w, int32_t process)
{
  pthread_t threads[MOST_RANKS];
  rank ranks[MOST_RANKS];
  for (int32_t r = 0; r < w->ranks; r++) {
    ranks[r] = (rank){.w = w, .number = r};
    if (w->process[r] == process && pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) abort();
  }
  for (int32_t r = 0; r < w->ranks; r++)
    if (w->process[r] == process) pthread_join(threads[r], NULL);
  for (int32_t r = 0; r < w->ranks; r++)
    if (w->process[r] == process) w->files_left[r] = count_files();
}

/* Of two in one process the first does not hear that both have succeeded: what it would have freed then, malloc would
 * give again, and the other one stores there. */
static void *run_deaf(void *argument)
{
  rank *r = argument;
  world *w = r->w;
  const int32_t n = r->number;
  const cumoe_context_config one = {.size = sizeof one, .cpu_threads = 1};
  const cumoe_arenas_config config = {
      .size = sizeof config, .rank = n, .ranks = w->ranks, .all_gather = all_gather, .user = r};
  cumoe_arenas_info info = {.size = sizeof info};
  cumoe_context context;
  cumoe_arenas mine;
  w->wrong[n] += cumoe_context_create(CUMOE_DEVICE_CPU, &one, &context) != CUMOE_OK;
  w->status[n] = cumoe_arenas_create(context, w->bytes[n], &config, &mine);
  unsigned char *again = n == 0 ? aligned_alloc(256, w->bytes[n]) : NULL;
  if (again) memset(again, 0x55, w->bytes[n]);
  w->wrong[n] += meet(w, STEPS - 2) != 0;
  if (w->status[n] == CUMOE_OK && cumoe_arenas_get_info(mine, &info) == CUMOE_OK)
    memset(info.arenas[0], 1, w->bytes[n]);
  w->wrong[n] += meet(w, STEPS - 1) != 0;
  for (size_t i = 0; again && i < w->bytes[n]; i++) w->wrong[n] += again[i] != 0x55;
  free(again);
  w->destroyed[n] = cumoe_arenas_destroy(mine);
  w->wrong[n] += cumoe_context_destroy(context) != CUMOE_OK;
  return NULL;
}

static world *make_world(const world *from)
{
  world *w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (w == MAP_FAILED) abort();
  *w = *from;
  if (w->patience_ms == 0) w->patience_ms = 60000;
  for (int32_t r = 0; r < w->ranks; r++) {
    if (w->bytes[r] == 0) w->bytes[r] = 5000;
    w->said_rank[r] += r;
    w->status[r] = w->destroyed[r] = NEVER;
  }
  return w;
}

static void deaf(void)
{
  const world from = {.ranks = 2,
                      .bytes = {1 << 18, 1 << 18},
                      .trouble = {.fails_at = NEVER, .dies_at = NEVER, .deaf_at = 2},
                      .patience_ms = 2000};
  world *w = make_world(&from);
  rank ranks[2];
  pthread_t threads[2];
  case_begin("memory that others may store to is kept");
  for (int32_t r = 0; r < 2; r++) {
    ranks[r] = (rank){.w = w, .number = r};
    if (pthread_create(&threads[r], NULL, run_deaf, &ranks[r]) != 0) abort();
  }
  for (int32_t r = 0; r < 2; r++) pthread_join(threads[r], NULL);
  CHECK(w->status[0] == CUMOE_ERR_PEER && w->status[1] == CUMOE_OK);
  CHECK_MSG(w->wrong[0] == 0 && w->wrong[1] == 0, "%d and %d things were wrong", (int)w->wrong[0], (int)w->wrong[1]);
  case_end();
  munmap(w, sizeof *w);
}

void __gcov_dump(void) __attribute__((weak)); /* _exit writes no counts of branches */

/* Every process is a child, so that one may die. */
static void run_world(world *w)
{
  pid_t children[MOST_RANKS];
  int end = 0;
  for (int32_t p = 0; p < w->ranks; p++) {
    fflush(stdout);
    children[p] = fork();
    if (children[p] == 0) {
      run_process(w, p);
      fflush(stdout);
      if (__gcov_dump) __gcov_dump();
      _exit(0);
    }
  }
  for (int32_t p = 0; p < w->ranks; p++) {
    const bool dies = w->trouble.dies_at != NEVER && w->trouble.rank != NEVER && w->process[w->trouble.rank] == p;
    CHECK(waitpid(children[p], &end, 0) == children[p]);
    CHECK_MSG(dies ? WIFSIGNALED(end) && WTERMSIG(end) == SIGKILL : WIFEXITED(end) && WEXITSTATUS(end) == 0,
              "process %d ended with %#x", (int)p, (unsigned)end);
  }
  for (int32_t r = 0; r < w->ranks; r++)
    CHECK_MSG(w->wrong[r] == 0 && w->files_left[r] == 0, "rank %d: %d wrong, %d files left", (int)r, (int)w->wrong[r],
              (int)w->files_left[r]);
}

#define NO_TROUBLE .trouble = {.rank = NEVER, .fails_at = NEVER, .dies_at = NEVER}

/* ---- those that succeed ---- */

static const world good[] = {
    {.name = "one rank", .ranks = 1, NO_TROUBLE},
    {.name = "two threads", .ranks = 2, .process = {0, 0}, .group = true, NO_TROUBLE},
    {.name = "two processes", .ranks = 2, .process = {0, 1}, .group = true, NO_TROUBLE},
    {.name = "a byte each", .ranks = 3, .process = {2, 1, 0}, .bytes = {1, 1, 1}, NO_TROUBLE},
    {.name = "a megabyte and a byte", .ranks = 2, .process = {1, 0}, .bytes = {1048577, 1048577}, NO_TROUBLE},
    {.name = "two processes of two and one of one", .ranks = 5, .process = {0, 1, 0, 2, 1}, .group = true, NO_TROUBLE},
    {.name = "six processes, the wire by name",
     .ranks = 6,
     .process = {0, 1, 2, 3, 4, 5},
     .wire = {1, 1, 1, 1, 1, 1},
     NO_TROUBLE},
};

static void succeed(void)
{
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    case_begin("%s", good[i].name);
    world *w = make_world(&good[i]);
    run_world(w);
    for (int32_t r = 0; r < w->ranks; r++)
      CHECK_MSG(w->status[r] == CUMOE_OK && w->destroyed[r] == CUMOE_OK, "rank %d: %d, %d, %s", (int)r,
                (int)w->status[r], (int)w->destroyed[r], w->text[r]);
    munmap(w, sizeof *w);
    case_end();
  }
}

/* ---- those that do not: every rank says why ---- */

static void other_host(letter *l)
{
  l->facts[FACT_HOST]++;
}
static void no_host(letter *l)
{
  l->facts[FACT_HOST] = 0;
}
static void other_pids(letter *l)
{
  l->facts[FACT_PIDS]++;
}
static void a_gpu(letter *l)
{
  l->facts[FACT_ON_GPU] = 1;
}
static void other_form(letter *l)
{
  l->form++;
}
static void other_file(letter *l)
{
  l->offer.file++;
}
static void no_file(letter *l)
{
  l->offer.descriptor = 1000;
}

#define FORGED(by, who) .trouble = {.rank = who, .fails_at = NEVER, .dies_at = NEVER, .forge = by}

static const struct {
  world w;
  int32_t culprit; /* NEVER: all have the same to say; else it says `own`, and all others PEER with the same words */
  cumoe_status status;
  const char *words;
} bad[] = {
    {{.name = "bytes", .ranks = 3, .process = {0, 1, 2}, .bytes = {5000, 5000, 6000}, NO_TROUBLE},
     NEVER,
     CUMOE_ERR_INVALID_ARGUMENT,
     "bytes is 5120 on rank 0 and 6144 on rank 2"},
    {{.name = "wire", .ranks = 2, .process = {0, 0}, .wire = {0, 1}, NO_TROUBLE},
     NEVER,
     CUMOE_ERR_INVALID_ARGUMENT,
     "config.wire is 0 on rank 0 and 1 on rank 1"},
    {{.name = "two are rank 0", .ranks = 2, .process = {0, 1}, .said_rank = {0, -1}, NO_TROUBLE},
     NEVER,
     CUMOE_ERR_INVALID_ARGUMENT,
     "config.rank is 0 on the rank that config.all_gather has at place 1"},
    {{.name = "hosts", .ranks = 3, .process = {0, 1, 2}, FORGED(other_host, 1)},
     NEVER,
     CUMOE_ERR_NOT_SUPPORTED,
     "rank 0 and rank 1 are on different hosts"},
    {{.name = "an unknown host", .ranks = 2, .process = {0, 1}, FORGED(no_host, 0)},
     NEVER,
     CUMOE_ERR_NOT_SUPPORTED,
     "rank 0 and rank 0 are on different hosts, or see no"},
    {{.name = "pid namespaces", .ranks = 3, .process = {0, 1, 2}, FORGED(other_pids, 2)},
     NEVER,
     CUMOE_ERR_NOT_SUPPORTED,
     "rank 0 and rank 2 do not see each other's processes"},
    {{.name = "devices", .ranks = 2, .process = {0, 1}, FORGED(a_gpu, 1)},
     NEVER,
     CUMOE_ERR_INVALID_ARGUMENT,
     "0 the CPU, 1 a GPU: is 0 on rank 0 and 1 on rank 1"},
    {{.name = "letters", .ranks = 2, .process = {0, 1}, FORGED(other_form, 1)},
     NEVER,
     CUMOE_ERR_INVALID_ARGUMENT,
     "of rank 1 is of another call, or another version of cumoe"},
    {{.name = "no more files", .ranks = 3, .process = {0, 1, 2}, .trouble = {1, NEVER, NEVER, 3, NULL}},
     1,
     CUMOE_ERR_NOT_SUPPORTED,
     "memfd_create: Too many open files"},
    {{.name = "a file that is another", .ranks = 2, .process = {0, 1}, FORGED(other_file, 1)},
     0,
     CUMOE_ERR_PEER,
     "rank 1 has ended: its file is another one now"},
    {{.name = "a file that is gone", .ranks = 2, .process = {0, 1}, FORGED(no_file, 0)},
     1,
     CUMOE_ERR_PEER,
     "rank 0 has ended: no /proc/"},
};

static void disagree(void)
{
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    case_begin("%s", bad[i].w.name);
    world *w = make_world(&bad[i].w);
    run_world(w);
    for (int32_t r = 0; r < w->ranks; r++) {
      const bool told = bad[i].culprit != NEVER && bad[i].culprit != r;
      CHECK_MSG(w->status[r] == (int32_t)(told ? CUMOE_ERR_PEER : bad[i].status) &&
                    strstr(w->text[r], bad[i].words) != NULL,
                "rank %d: %d, %s", (int)r, (int)w->status[r], w->text[r]);
    }
    munmap(w, sizeof *w);
    case_end();
  }
}

/* all_gather fails, or the rank dies, at its call `step`: the others' wait ends, and they say so. */
static void run_broken(int32_t step, bool dies)
{
  const world plain = {.ranks = 3,
                       .process = {0, 1, 2},
                       .patience_ms = 400,
                       .trouble = {.rank = 1, .fails_at = dies ? NEVER : step, .dies_at = dies ? step : NEVER}};
  enum { CREATE_STEPS = 3, OWN_STEPS = 2 }; /* of create; of exchange */
  world *w = make_world(&plain);
  const int64_t begin = now_ms();
  case_begin("%s at its call %d", dies ? "dies" : "fails", (int)step);
  run_world(w);
  CHECK_MSG(now_ms() - begin < 20000, "%lld ms", (long long)(now_ms() - begin));
  for (int32_t r = 0; r < w->ranks; r++) {
    const bool made = step >= CREATE_STEPS;
    if (dies && r == 1) continue;
    CHECK_MSG(w->status[r] == (int32_t)(made ? CUMOE_OK : CUMOE_ERR_PEER), "rank %d: %d, %s", (int)r, (int)w->status[r],
              w->text[r]);
    if (made)
      CHECK_MSG(w->destroyed[r] == (int32_t)CUMOE_ERR_PEER, "rank %d: %d", (int)r, (int)w->destroyed[r]);
    else
      CHECK_MSG(strstr(w->text[r], r == 1 ? "config.all_gather answers 5" : "config.all_gather answers 62") != NULL ||
                    (r != 1 && strstr(w->text[r], "rank 1 has ended") != NULL),
                "rank %d: %s", (int)r, w->text[r]);
  }
  munmap(w, sizeof *w);
  case_end();
}

static void broken(void)
{
  for (int dies = 0; dies < 2; dies++)
    for (int32_t step = 0; step < 6; step++)
      if (step != 3 && step != 4) run_broken(step, dies); /* the test's own two */
}

/* ---- in one process, by one thread ---- */

static void create_all(cumoe_context context)
{
  enum { RANKS = 3 };
  cumoe_context contexts[RANKS] = {context, NULL, NULL};
  cumoe_arenas made[RANKS];
  cumoe_arenas_info info[RANKS];
  const int32_t device = device_of(context);
  for (int r = 1; r < RANKS; r++) CHECK_OK(cumoe_context_create(device, NULL, &contexts[r]));
  for (int round = 0; round < 2; round++) {
    case_begin("%s", round ? "a context that is destroyed ends its own" : "addresses");
    CHECK_OK(cumoe_arenas_create_all(contexts, RANKS, 1000, made));
    for (int r = 0; r < RANKS; r++) {
      info[r] = (cumoe_arenas_info){.size = sizeof info[r]};
      CHECK_OK(cumoe_arenas_get_info(made[r], &info[r]));
      CHECK(info[r].rank == r && info[r].ranks == RANKS && info[r].arena.cols == 1024);
      CHECK(info[r].arena.device == device && info[r].wire == CUMOE_WIRE_SHARED);
    }
    for (int r = 0; r < RANKS; r++)
      for (int to = 0; to < RANKS; to++) CHECK(info[r].arenas[to] == info[to].arena.data);
    tensor zeros = tensor_new(CUMOE_U8, 1, 1024), got = device_get(context, cumoe_const(info[0].arena));
    CHECK(check_same("arena", &zeros, &got));
    if (round) CHECK_OK(cumoe_context_destroy(contexts[2]));
    for (int r = 0; r < RANKS; r++)
      CHECK_STATUS(round && r == 2 ? CUMOE_ERR_STALE_HANDLE : CUMOE_OK, cumoe_arenas_destroy(made[r]));
    case_end();
  }
  CHECK_OK(cumoe_context_destroy(contexts[1]));
}

/* ---- arguments ---- */

static int never(void *user, const void *mine, void *all, size_t bytes)
{
  (void)mine, (void)all, (void)bytes;
  ++*(int *)user;
  return 1;
}

static void arguments(cumoe_context context)
{
  int calls = 0;
  const cumoe_arenas_config right = {.size = sizeof right, .rank = 1, .ranks = 2, .all_gather = never, .user = &calls};
  cumoe_arenas made = (cumoe_arenas)&calls, few[2];
  cumoe_context contexts[2] = {context, (cumoe_context)&calls};
  cumoe_arenas_config c = right;
  case_begin("of create");
#define REFUSED(want, words, bytes, ...)                                                                               \
  do {                                                                                                                 \
    c = right, made = (cumoe_arenas)&calls;                                                                            \
    __VA_ARGS__;                                                                                                       \
    CHECK_STATUS(want, cumoe_arenas_create(context, bytes, &c, &made));                                                \
    CHECK_TEXT("cumoe_arenas_create: " words);                                                                         \
    CHECK(made == NULL);                                                                                               \
  } while (0)
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "bytes is 0, must be 1 .. 2^46", 0, (void)0);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "bytes is 70368744177665, must be", ((size_t)1 << 46) + 1, (void)0);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.size is 3", 1, c.size = 3);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.wire is 9, no cumoe_wire", 1, c.wire = 9);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.wire is -1, no cumoe_wire", 1, c.wire = -1);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.ranks is 0, must be 1 .. 1024", 1, c.ranks = 0);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.ranks is 1025, must be 1 .. 1024", 1, c.ranks = 1025);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.rank is 2, must be 0 .. ranks - 1 = 1", 1, c.rank = 2);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.rank is -1, must be", 1, c.rank = -1);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.all_gather is null", 1, c.all_gather = NULL);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.nccl is given, config.comm is null", 1, c.nccl = &calls);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.wire is CUMOE_WIRE_WINDOW, config.comm is null", 1,
          c.wire = CUMOE_WIRE_WINDOW);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "config.timeout_ns is -1, must be 0 (30 s) or more", 1, c.timeout_ns = -1);
  if (!on_device(context))
    REFUSED(CUMOE_ERR_NOT_SUPPORTED, "config.comm: the CPU device has no NCCL", 1, c.comm = &calls);
  CHECK(calls == 0);
  REFUSED(CUMOE_ERR_PEER, "config.all_gather answers 1", 1, (void)0);
  CHECK(calls == 1);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_arenas_create(context, 1, NULL, &made));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_arenas_create(context, 1, &right, NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_arenas_create(NULL, 1, &right, &made));
  case_end();
  case_begin("of create_all, get_info and destroy");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_arenas_create_all(NULL, 2, 1, few));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_arenas_create_all(contexts, 0, 1, few));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_arenas_create_all(contexts, 1025, 1, few));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_arenas_create_all(contexts, 1, 0, few));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_arenas_create_all(contexts, 1, 1, NULL));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_arenas_create_all(contexts, 2, 1, few));
  CHECK_OK(cumoe_arenas_create_all(contexts, 1, 1, few));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_arenas_get_info(few[0], NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_arenas_get_info(NULL, &(cumoe_arenas_info){.size = 0}));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_arenas_destroy((cumoe_arenas)context));
  CHECK_OK(cumoe_arenas_destroy(NULL));
  CHECK_OK(cumoe_arenas_destroy(few[0]));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_arenas_get_info(few[0], &(cumoe_arenas_info){.size = 0}));
  case_end();
}

static const test_group groups[] = {
    /* A context has threads; what one of these holds when a process forks, the child never gets. */
    ALONE("arenas", succeed, ONCE),
    ALONE("ranks that disagree", disagree, ONCE),
    ALONE("ranks that end", broken, ONCE),
    ALONE("a rank that does not hear", deaf, ONCE),
    GROUP("all ranks of a process", create_all, ANYWHERE),
    GROUP("arguments", arguments, ANYWHERE),
};
TEST_MAIN(groups)
