/* NCCL as versions 2.6 to 2.29 answer, between threads of one process: of the channel SHIM_LIBRARY. Ranks of the CPU
 * device have their sends copied between the host's memory. */
#include "core.h"
#include "../../include/cumoe/types.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  MOST_RANKS = 8,
  GATHERS = 64,
  GROUPS = 4096,
  MOST_SENDS = 256, /* and as many receives, of a group */
  SENDS_SINCE = 2703,
  GETTERS_SINCE = 22902,
  WINDOWS_SINCE = 22703,
  INVALID = 4,
  CUDA_ERROR = 1,
  REMOTE_ERROR = 6
};

typedef struct meeting {
  int here;
  bool ended; /* without some: who comes now comes too late */
  const void *from[MOST_RANKS];
  void *to[MOST_RANKS];
} meeting;

typedef struct team {
  int ranks;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  meeting gathers[GATHERS], registers[GATHERS], groups[GROUPS];
} team;

typedef struct window {
  const meeting *of;
  int ranks;
  block *open[MOST_RANKS];
} window;

typedef struct comm {
  team *team;
  int rank, device, gathered, registered, grouped;
  cudaStream_t stuck;
  window *windows[GATHERS]; /* those that are registered */
} comm;

static char handle;
static atomic_bool has_failed; /* a call, since communicators were opened */

void *shim_nccl_handle(void)
{
  return &handle;
}

void shim_comms_open(void **comms, int ranks, const int *devices)
{
  team *t = __real_calloc(1, sizeof *t);
  atomic_store(&has_failed, false);
  t->ranks = ranks;
  pthread_mutex_init(&t->lock, NULL);
  pthread_cond_init(&t->changed, NULL);
  for (int r = 0; r < ranks; r++) {
    comm *c = comms[r] = __real_calloc(1, sizeof *c);
    c->team = t;
    c->rank = r;
    c->device = devices[r];
  }
}

static void end_window(window *w)
{
  for (int r = 0; r < w->ranks; r++)
    if (w->open[r] != NULL) shim_alias_end(w->open[r]);
  __real_free(w);
}

void shim_comms_close(void **comms)
{
  team *t = ((comm *)comms[0])->team;
  for (int r = 0; r < t->ranks; r++) {
    comm *c = comms[r];
    if (c->stuck) set_stuck(c->stuck, false);
    for (int i = 0; i < GATHERS; i++)
      if (c->windows[i] != NULL) end_window(c->windows[i]);
    __real_free(c);
  }
  __real_free(t);
}

/* For a rank to come: not again after the patience, or once the communicator has been ended. */
static bool await_change(team *t, const struct timespec *until)
{
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (shim.ends_comms && atomic_load(&has_failed)) return false;
  if (!shim.ends_comms) return pthread_cond_timedwait(&t->changed, &t->lock, until) == 0;
  now.tv_nsec += 5000000;
  if (now.tv_nsec >= 1000000000L) now.tv_sec++, now.tv_nsec -= 1000000000L;
  (void)pthread_cond_timedwait(&t->changed, &t->lock, &now);
  return now.tv_sec <= until->tv_sec;
}

/* Whether all came. The last one does the work of all. */
static bool meet(comm *c, meeting *m, const void *from, void *to, void (*work)(const team *t, const meeting *m))
{
  team *t = c->team;
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += shim.patience_ms / 1000;
  until.tv_nsec += shim.patience_ms % 1000 * 1000000L;
  if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
  pthread_mutex_lock(&t->lock);
  m->from[c->rank] = from;
  m->to[c->rank] = to;
  if (!m->ended && ++m->here == t->ranks) {
    work(t, m);
    pthread_cond_broadcast(&t->changed);
  }
  while (m->here < t->ranks)
    if (m->ended || !await_change(t, &until)) break;
  const bool all = m->here == t->ranks;
  m->ended = !all;
  pthread_mutex_unlock(&t->lock);
  return all;
}

/* ---- functions ---- */

static int planned(const char *name)
{
  const int code = shim_planned(SHIM_LIBRARY, name);
  if (code != 0) atomic_store(&has_failed, true);
  return code;
}

static int begin(const char *name)
{
  shim_note(name);
  const int code = planned(name);
  if (code != 0) shim_note("  fails");
  return code;
}

static int get_version(int *version)
{
  *version = shim.nccl;
  return planned("ncclGetVersion");
}
static const char *error_text(int code)
{
  return code == 0 ? "no error" : "an error of the shim's NCCL";
}
static int comm_count(const comm *c, int *count)
{
  *count = c->team->ranks;
  return planned("ncclCommCount");
}
static int comm_user_rank(const comm *c, int *rank)
{
  *rank = c->rank;
  return planned("ncclCommUserRank");
}
static int comm_cu_device(const comm *c, int *device)
{
  *device = c->device;
  return planned("ncclCommCuDevice");
}
static int async_error(const comm *c, int *result)
{
  (void)c;
  *result = 0;
  return 0;
}

static size_t gathered_bytes;

static void gather(const team *t, const meeting *m)
{
  char *bytes = __real_malloc(gathered_bytes);
  for (int from = 0; from < t->ranks; from++) {
    shim_read(bytes, m->from[from], gathered_bytes);
    for (int to = 0; to < t->ranks; to++)
      shim_write((char *)m->to[to] + (size_t)from * gathered_bytes, bytes, gathered_bytes);
  }
  __real_free(bytes);
}

/* A rank that does not come leaves the others' kernels on their devices. */
static int all_gather(const void *from, void *to, size_t count, int type, comm *c, cudaStream_t stream)
{
  const int code = begin("ncclAllGather");
  if (code != 0) return code;
  if (type != 1 || c->gathered >= GATHERS || current_device() != c->device) return INVALID;
  gathered_bytes = count; /* the same on all ranks */
  if (!meet(c, &c->team->gathers[c->gathered++], from, to, gather)) set_stuck(c->stuck = stream, true);
  return 0;
}

/* ---- sends: of a thread's group, all at its end ---- */

typedef struct transfer {
  const char *from;
  char *to;
  size_t bytes;
  int rank; /* the other one */
} transfer;

typedef struct transfers {
  comm *comm;
  cudaStream_t stream;
  int depth, sends, receives, failed; /* the last: the first failure */
  transfer send[MOST_SENDS], receive[MOST_SENDS];
} transfers;

static _Thread_local transfers open_group;

static int group_start(void)
{
  const int code = begin("ncclGroupStart");
  if (code != 0) return code;
  if (open_group.depth++ == 0) open_group.sends = open_group.receives = open_group.failed = 0, open_group.comm = NULL;
  return 0;
}

static int add(transfer *list, int *count, transfer t, int type, comm *c, cudaStream_t stream)
{
  transfers *g = &open_group;
  const bool fits = g->depth == 1 && *count < MOST_SENDS && (g->comm == NULL || (g->comm == c && g->stream == stream));
  if (!fits || type != 1 || t.rank < 0 || t.rank >= c->team->ranks) return g->failed = INVALID;
  if (c->device != CUMOE_DEVICE_CPU && current_device() != c->device) return g->failed = INVALID;
  g->comm = c;
  g->stream = stream;
  list[(*count)++] = t;
  return 0;
}

static int send(const void *from, size_t count, int type, int rank, comm *c, cudaStream_t stream)
{
  const int code = begin("ncclSend");
  if (code != 0) return open_group.failed = code;
  return add(open_group.send, &open_group.sends, (transfer){from, NULL, count, rank}, type, c, stream);
}

static int receive(void *to, size_t count, int type, int rank, comm *c, cudaStream_t stream)
{
  const int code = begin("ncclRecv");
  if (code != 0) return open_group.failed = code;
  return add(open_group.receive, &open_group.receives, (transfer){NULL, to, count, rank}, type, c, stream);
}

static void copy_one(const transfer *from, const transfer *to, const comm *c)
{
  if (from->bytes != to->bytes) abort(); /* the real one hangs, or faults */
  const size_t bytes = to->bytes - (shim.torn_sends && c->rank == 1 && to->bytes > 128);
  if (c->device == CUMOE_DEVICE_CPU) {
    memcpy(to->to, from->from, bytes);
    return;
  }
  char *between = __real_malloc(bytes);
  shim_read(between, from->from, bytes);
  shim_write(to->to, between, bytes);
  __real_free(between);
}

/* A rank's receives from another take its sends in their order, and none is left. */
static void exchange(const team *t, const meeting *m)
{
  for (int r = 0; r < t->ranks; r++)
    for (int s = 0; s < t->ranks; s++) {
      const transfers *to = m->from[r], *from = m->from[s];
      int i = 0, j = 0;
      for (;; i++, j++) {
        while (i < to->receives && to->receive[i].rank != s) i++;
        while (j < from->sends && from->send[j].rank != r) j++;
        if (i == to->receives || j == from->sends) break;
        copy_one(&from->send[j], &to->receive[i], to->comm);
      }
      if (i < to->receives || j < from->sends) abort();
    }
}

/* A group that has failed is dropped. Captured, it is not run. */
static int group_end(void)
{
  transfers *g = &open_group;
  const int code = begin("ncclGroupEnd");
  if (--g->depth != 0) abort();
  if (g->failed != 0 || code != 0) return g->failed != 0 ? g->failed : code;
  comm *c = g->comm;
  if (c == NULL || (g->stream != NULL && g->stream->graph != NULL)) return 0;
  if (c->grouped >= GROUPS) return INVALID;
  if (meet(c, &c->team->groups[c->grouped++], g, NULL, exchange)) return 0;
  if (c->device == CUMOE_DEVICE_CPU) return REMOTE_ERROR; /* the engine has ended the communicator */
  set_stuck(c->stuck = g->stream, true);
  return 0;
}

static int mem_alloc(void **data, size_t bytes)
{
  const int code = begin("ncclMemAlloc");
  if (code != 0) return code;
  return cudaMalloc(data, bytes) == cudaSuccess ? 0 : CUDA_ERROR;
}
static int mem_free(void *data)
{
  const int code = begin("ncclMemFree");
  return cudaFree(data) == cudaSuccess ? code : CUDA_ERROR;
}

static void nothing(const team *t, const meeting *m)
{
  (void)t, (void)m;
}

/* The one that fails has come, too: the others do not hang. */
static int window_register(comm *c, void *data, size_t bytes, window **out, int flags)
{
  const int code = begin("ncclCommWindowRegister");
  *out = NULL;
  if (flags != 0 || bytes % 4096 != 0 || c->registered >= GATHERS) return INVALID;
  meeting *m = &c->team->registers[c->registered++];
  if (!meet(c, m, data, NULL, nothing)) return REMOTE_ERROR; /* the engine has ended the communicator */
  if (code != 0 || shim.null_windows) return code;
  *out = __real_calloc(1, sizeof **out);
  c->windows[c->registered - 1] = *out;
  (*out)->of = m;
  (*out)->ranks = c->team->ranks;
  return 0;
}

static int window_deregister(comm *c, window *w)
{
  const int code = begin("ncclCommWindowDeregister");
  for (int i = 0; i < GATHERS; i++)
    if (c->windows[i] == w) c->windows[i] = NULL;
  end_window(w);
  return code;
}

static int peer_pointer(window *w, size_t offset, int peer, void **out)
{
  const int code = begin("ncclGetPeerDevicePointer");
  *out = NULL;
  if (code != 0 || shim.far_windows) return code;
  if (peer < 0 || peer >= w->ranks || offset != 0) return INVALID;
  if (w->open[peer] == NULL) w->open[peer] = shim_alias(w->of->from[peer]);
  *out = w->open[peer] != NULL ? (void *)w->open[peer]->at : w; /* freed by now: an address all the same */
  return 0;
}

/* ---- the loader ---- */

#define FUNCTION(since, name, function)                                                                                \
  {                                                                                                                    \
    since, name, (void (*)(void))function                                                                              \
  }
static const struct {
  int since;
  const char *name;
  void (*function)(void);
} functions[] = {
    FUNCTION(0, "ncclGetVersion", get_version),
    FUNCTION(0, "ncclGetErrorString", error_text),
    FUNCTION(0, "ncclCommCount", comm_count),
    FUNCTION(0, "ncclCommUserRank", comm_user_rank),
    FUNCTION(0, "ncclCommCuDevice", comm_cu_device),
    FUNCTION(0, "ncclCommGetAsyncError", async_error),
    FUNCTION(0, "ncclAllGather", all_gather),
    FUNCTION(0, "ncclGroupStart", group_start),
    FUNCTION(0, "ncclGroupEnd", group_end),
    FUNCTION(SENDS_SINCE, "ncclSend", send),
    FUNCTION(SENDS_SINCE, "ncclRecv", receive),
    FUNCTION(0, "ncclMemAlloc", mem_alloc),
    FUNCTION(0, "ncclMemFree", mem_free),
    FUNCTION(WINDOWS_SINCE, "ncclCommWindowRegister", window_register),
    FUNCTION(WINDOWS_SINCE, "ncclCommWindowDeregister", window_deregister),
    FUNCTION(GETTERS_SINCE, "ncclGetPeerDevicePointer", peer_pointer),
};

void *nccl_function(const char *name)
{
  void *found = NULL;
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
    if (strcmp(functions[i].name, name) == 0 && functions[i].since <= shim.nccl &&
        (shim.hidden == NULL || strcmp(shim.hidden, name) != 0))
      memcpy(&found, &functions[i].function, sizeof found);
  return found;
}
