/*
 * A library of one's own for groups by NCCL on the CPU device (cumoe/ep.h), as far as cumoe calls it: sends between
 * processes of one host, through memory that they share. A rank that does not come is waited for PATIENCE_MS, for its
 * first group of calls, before which it may still make a context, PATIENCE_AT_FIRST_MS; then the communicator has lost
 * it, for all. Nothing is left when ranks are killed.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 4, MOST_TRANSFERS = 256, BOX = 1 << 20, PATIENCE_MS = 500, PATIENCE_AT_FIRST_MS = 30000 };
enum { SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6, VERSION = 22809, CPU = -2 /* CUMOE_DEVICE_CPU */ };

/* A box for each pair: what one sends to another in a group of calls. */
typedef struct box {
  atomic_int sent, taken; /* groups */
  unsigned char bytes[BOX];
} box;

typedef struct team {
  atomic_int lost; /* a rank, for good */
  box boxes[MOST_RANKS][MOST_RANKS];
} team;

typedef struct unique_id {
  int pid, file;
  char rest[120];
} unique_id;

typedef struct comm {
  team *team;
  int ranks, rank;
} comm;

typedef struct transfer {
  void *at;
  size_t bytes;
  int rank;
  bool sends;
} transfer;

static _Thread_local struct {
  comm *comm;
  int count, failed;
  transfer transfers[MOST_TRANSFERS];
} group;

/* ---- communicators ---- */

int ncclGetVersion(int *version)
{
  *version = VERSION;
  return 0;
}

const char *ncclGetErrorString(int code)
{
  return code == REMOTE_ERROR ? "a rank has been lost" : "an error of the test's library";
}

int ncclGetUniqueId(unique_id *id)
{
  memset(id, 0, sizeof *id);
  id->pid = getpid();
  id->file = memfd_create("sends", MFD_CLOEXEC);
  return id->file >= 0 && ftruncate(id->file, sizeof(team)) == 0 ? 0 : SYSTEM_ERROR;
}

int ncclCommInitRank(comm **made, int ranks, unique_id id, int rank)
{
  char path[64];
  if (ranks > MOST_RANKS) return INVALID_ARGUMENT;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", id.pid, id.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return SYSTEM_ERROR;
  team *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED || !(*made = malloc(sizeof **made))) return SYSTEM_ERROR;
  **made = (comm){shared, ranks, rank};
  return 0;
}

static int end(comm *c)
{
  munmap(c->team, sizeof *c->team);
  free(c);
  return 0;
}

int ncclCommDestroy(comm *c)
{
  return end(c);
}

int ncclCommAbort(comm *c)
{
  atomic_store(&c->team->lost, 1);
  return end(c);
}

int ncclCommCount(const comm *c, int *count)
{
  *count = c->ranks;
  return 0;
}

int ncclCommUserRank(const comm *c, int *rank)
{
  *rank = c->rank;
  return 0;
}

int ncclCommCuDevice(const comm *c, int *device)
{
  (void)c;
  *device = CPU;
  return 0;
}

int ncclCommGetAsyncError(comm *c, int *result)
{
  *result = atomic_load(&c->team->lost) ? REMOTE_ERROR : 0;
  return 0;
}

int ncclAllGather(const void *mine, void *all, size_t count, int type, comm *c, void *stream)
{
  (void)mine, (void)all, (void)count, (void)type, (void)c, (void)stream;
  return INVALID_ARGUMENT; /* groups do not */
}

/* ---- sends ---- */

static int64_t now_ms(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static bool await(comm *c, const atomic_int *count, int least)
{
  const struct timespec nap = {.tv_nsec = 50000};
  const int64_t patience = least > 1 ? PATIENCE_MS : PATIENCE_AT_FIRST_MS;
  for (const int64_t begin = now_ms(); atomic_load(count) < least; nanosleep(&nap, NULL)) {
    if (now_ms() - begin > patience) atomic_store(&c->team->lost, 1);
    if (atomic_load(&c->team->lost)) return false;
  }
  return true;
}

/* All of the group's sends to a rank, or receives from it, in their order. */
static int move(box *b, int rank, bool sends)
{
  size_t at = 0;
  for (int i = 0; i < group.count; i++) {
    const transfer *t = &group.transfers[i];
    if (t->rank != rank || t->sends != sends) continue;
    if (t->bytes > BOX - at) return INVALID_ARGUMENT;
    if (sends)
      memcpy(b->bytes + at, t->at, t->bytes);
    else
      memcpy(t->at, b->bytes + at, t->bytes);
    at += t->bytes;
  }
  return 0;
}

static int exchange(comm *c)
{
  int code = 0;
  for (int r = 0; r < c->ranks && code == 0; r++) {
    box *b = &c->team->boxes[c->rank][r];
    if (!await(c, &b->taken, atomic_load(&b->sent))) return REMOTE_ERROR;
    code = move(b, r, true);
    atomic_fetch_add(&b->sent, 1);
  }
  for (int r = 0; r < c->ranks && code == 0; r++) {
    box *b = &c->team->boxes[r][c->rank];
    if (!await(c, &b->sent, atomic_load(&b->taken) + 1)) return REMOTE_ERROR;
    code = move(b, r, false);
    atomic_fetch_add(&b->taken, 1);
  }
  return code;
}

int ncclGroupStart(void)
{
  group.count = group.failed = 0;
  group.comm = NULL;
  return 0;
}

static int add(transfer t, int type, comm *c)
{
  const bool fits = type == 1 && group.count < MOST_TRANSFERS && t.rank >= 0 && t.rank < c->ranks;
  if (!fits) return group.failed = INVALID_ARGUMENT;
  group.comm = c;
  group.transfers[group.count++] = t;
  return 0;
}

int ncclSend(const void *from, size_t count, int type, int rank, comm *c, void *stream)
{
  (void)stream;
  return add((transfer){(void *)(uintptr_t)from, count, rank, true}, type, c);
}

int ncclRecv(void *to, size_t count, int type, int rank, comm *c, void *stream)
{
  (void)stream;
  return add((transfer){to, count, rank, false}, type, c);
}

int ncclGroupEnd(void)
{
  return group.failed || !group.comm ? group.failed : exchange(group.comm);
}
