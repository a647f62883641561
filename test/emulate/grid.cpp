/*
 * Runs a kernel of kernels/ on the CPU: clusters one after the other, the threads of a CTA as fibers that take turns at
 * barriers and at what a warp does together. The CTAs of a cluster are host threads, of which one runs at a time: until
 * all of its fibers wait. Grids that several host threads launch run side by side, and CTAs that wait for each other
 * have a host thread each. Shared memory begins as 0xff; launches take the threads in ascending and in descending order
 * by turns, and what is asynchronous at once or late, so that what depends on the order shows as results that differ.
 */
#include "cuda.h"

#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <ctime>
#include <mutex>
#include <sched.h>
#include <semaphore.h>
#include <thread>
#include <ucontext.h>
#include <vector>

thread_local emulated_index threadIdx, blockIdx, blockDim, gridDim;

namespace grid
{

enum {
  MAX_THREADS = 1024,
  WARPS = MAX_THREADS / 32,
  STACK = 1 << 18,
  SHARED = 232448,
  COPIES = 512,
  NAMED = 16,
  MAX_CLUSTER = 8,
  MOST_ARGUMENTS = 1 << 14,
  POLLS = 256 /* of a fiber, between two turns of others */
};

alignas(BEST_ALIGNMENT) thread_local unsigned char dynamic_shared[BEST_ALIGNMENT + SHARED];

namespace
{

enum state { READY, POLLING, AT_BARRIER, AT_NAMED, AT_MBARRIER, AT_CLUSTER, WITH_WARP, ENDED };

struct copy {
  void *to;
  const void *from;
  int bytes, room, group;

  void arrive() const
  {
    memcpy(to, from, (size_t)bytes);
    memset(static_cast<char *>(to) + bytes, 0, (size_t)(room - bytes));
  }
};

struct groups {
  struct item {
    int group;
    std::function<void()> work;
  };
  std::vector<item> items;
  int committed = 0;

  void await(int left)
  {
    size_t done = 0;
    while (done < items.size() && items[done].group < committed - left) items[done++].work();
    items.erase(items.begin(), items.begin() + (long)done);
  }
};

struct fiber {
  jmp_buf at;
  bool begun; /* `at` is in first_step, or in what that called */
  state is;
  copy copies[COPIES];
  int copy_count, committed, polls;
  bool landing;      /* some of its copies are */
  uint64_t *barrier; /* AT_MBARRIER */
  uint32_t parity;
  int number; /* AT_NAMED: the barrier's; AT_CLUSTER: of the barriers before */
  groups later;
};

struct warp {
  unsigned live = 0, came = 0, mask = 0;
  void *of_lane[32] = {};
  void (*work)(void **) = nullptr;
  groups later;
};

/* Whoever has the turn runs. */
struct cluster {
  int size, at_barrier, ended_threads, ended, generation, idle;
  unsigned char *shared[MAX_CLUSTER];
  bool absent[MAX_CLUSTER];
  sem_t turn[MAX_CLUSTER];

  explicit cluster(unsigned ctas)
      : size((int)ctas), at_barrier(), ended_threads(), ended(), generation(), idle(), shared()
  {
    for (bool &a : absent) a = true;
    for (sem_t &t : turn) sem_init(&t, 0, 0);
  }
  ~cluster()
  {
    for (sem_t &t : turn) sem_destroy(&t);
  }
};

/* Whoever runs CTAs has one; kept for the next, for pages that were touched are half of a small launch's time. */
struct memory {
  fiber *fibers = new fiber[MAX_THREADS];
  unsigned char *stacks = new unsigned char[(size_t)MAX_THREADS * STACK];
};
std::mutex spare_lock;
std::vector<memory> spare;

struct owned_memory : memory {
  owned_memory() : memory(taken())
  {
    for (int t = 0; t < MAX_THREADS; t++) fibers[t].begun = false; /* its stack knows another host thread */
  }
  ~owned_memory()
  {
    const std::lock_guard<std::mutex> hold(spare_lock);
    spare.push_back(*this);
  }
  static memory taken()
  {
    const std::lock_guard<std::mutex> hold(spare_lock);
    if (spare.empty()) return memory();
    const memory last = spare.back();
    spare.pop_back();
    return last;
  }
};

thread_local owned_memory own;
thread_local fiber *fibers;
thread_local warp warps[WARPS];
thread_local jmp_buf scheduler;
thread_local int threads, live, at_barrier, counted, last_count, current;
thread_local int named_count[NAMED];
thread_local std::vector<std::function<void()>> landing;
thread_local bool descending;
thread_local void (*body)(const void *);
thread_local const void *arguments;
thread_local cluster *team;
thread_local int rank;

/* CTAs, of all host threads, that do not wait for other GPUs. */
std::atomic<int> working;
thread_local bool waits = true;

void work()
{
  if (waits) working++;
  waits = false;
}

void rest()
{
  if (!waits) working--;
  waits = true;
}

void wake(state from, int number = 0)
{
  for (int t = 0; t < threads; t++)
    if (fibers[t].is == from && (from != AT_NAMED || fibers[t].number == number)) fibers[t].is = READY;
}

void finish_warp(warp &w)
{
  w.work(w.of_lane);
  const int first = (int)(&w - warps) * 32;
  for (int l = 0; l < 32; l++)
    if (w.of_lane[l]) fibers[first + l].is = READY;
  memset(w.of_lane, 0, sizeof w.of_lane);
  w.came = 0;
}

void finish_barrier()
{
  last_count = counted;
  at_barrier = counted = 0;
  wake(AT_BARRIER);
}

void pause(state why)
{
  fiber &f = fibers[current];
  f.is = why;
  if (_setjmp(f.at) == 0) _longjmp(scheduler, 1);
}

bool cluster_has_come()
{
  return team->at_barrier + team->ended_threads == team->size * threads;
}

void finish_cluster_barrier()
{
  team->at_barrier = 0;
  team->generation++;
}

void end_thread()
{
  warp &w = warps[current / 32];
  fibers[current].is = ENDED;
  await_copies(ALL_COPIES);
  fibers[current].later.committed++;
  fibers[current].later.await(0);
  w.live &= ~(1u << current % 32);
  live--;
  team->ended_threads++;
  if (w.came && w.came == (w.mask & w.live)) finish_warp(w);
  if (at_barrier && at_barrier == live) finish_barrier();
  if (team->at_barrier && cluster_has_come()) finish_cluster_barrier();
  if (_setjmp(fibers[current].at) == 0) _longjmp(scheduler, 1);
}

/* Arguments lie on the stack of a thread, and stay there when it has ended: on a GPU they are the grid's, and others
 * may have their address. */
__attribute__((noinline)) void end_behind_arguments()
{
  volatile char room[MOST_ARGUMENTS];
  room[0] = 0;
  end_thread();
  room[0] = 0; /* not a tail call, which would give the room away */
}

/* A thread of one CTA after the other. */
void first_step()
{
  for (;;) {
    body(arguments);
    end_behind_arguments();
  }
}

void begin_fiber(int t)
{
  ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = own.stacks + (size_t)t * STACK;
  first.uc_stack.ss_size = STACK;
  first.uc_link = nullptr;
  makecontext(&first, first_step, 0);
  fibers[t].begun = true;
  setcontext(&first);
}

void set_up(int t)
{
  fiber &f = fibers[t];
  f.is = READY;
  f.copy_count = f.committed = f.polls = 0;
  f.landing = false;
  f.barrier = nullptr;
  f.later = groups();
  if (t % 32 == 0) warps[t / 32] = warp();
  warps[t / 32].live |= 1u << t % 32;
}

bool may_run(const fiber &f)
{
  switch (f.is) {
  case READY:
  case POLLING: return true;
  case AT_MBARRIER: return barrier_at(f.barrier).phase != f.parity;
  case AT_CLUSTER: return team->generation != f.number;
  default: return false;
  }
}

/* Each fiber that may run, once. Returns whether one did that does not only poll. */
bool run_fibers(bool &polling)
{
  volatile bool any = false, polled = false;
  for (volatile int i = 0; i < threads; i = i + 1) {
    const int t = descending ? threads - 1 - i : i;
    if (!may_run(fibers[t])) continue;
    (fibers[t].is == POLLING ? polled : any) = true;
    fibers[t].is = READY;
    current = t;
    threadIdx.x = (unsigned)t;
    if (_setjmp(scheduler) == 0) {
      if (fibers[t].begun) _longjmp(fibers[t].at, 1);
      begin_fiber(t);
    }
  }
  polling = polled;
  return any;
}

bool land()
{
  std::vector<std::function<void()>> now;
  now.swap(landing);
  for (const auto &work : now) work();
  return !now.empty();
}

void give_turn()
{
  sem_post(&team->turn[(rank + (descending ? team->size - 1 : 1)) % team->size]);
}

void take_turn()
{
  while (sem_wait(&team->turn[rank]) != 0) {
  }
}

void print_waiting()
{
  static const char *const names[] = {"ready", "polling", "barrier", "named barrier", "mbarrier", "cluster", "warp"};
  for (int t = 0; t < threads; t++) {
    const fiber &f = fibers[t];
    if (f.is == ENDED || (t > 0 && fibers[t - 1].is == f.is && fibers[t - 1].barrier == f.barrier)) continue;
    fprintf(stderr, "emulated kernel: CTA %u thread %d on: %s", blockIdx.x, t, names[f.is]);
    if (f.is == AT_MBARRIER) {
      const mbarrier &b = barrier_at(f.barrier);
      fprintf(stderr, " at shared %#x, for the end of phase %u, in phase %u, %u of %u missing, %d bytes missing",
              (unsigned)(reinterpret_cast<unsigned char *>(f.barrier) - dynamic_shared), f.parity, b.phase, b.missing,
              b.count, b.bytes);
    }
    if (f.is == AT_NAMED) fprintf(stderr, " %d with %d", f.number, named_count[f.number]);
    fprintf(stderr, "\n");
  }
}

/* All of this CTA wait. */
void let_cluster_run(bool polling)
{
  if (polling)
    team->idle = 0;
  else if (++team->idle > 2 * team->size) {
    print_waiting();
    fail("threads wait for each other");
  }
  if (team->size == 1) return;
  give_turn();
  take_turn();
}

void run_cta()
{
  memset(dynamic_shared, 0xff, sizeof dynamic_shared);
  memset(named_count, 0, sizeof named_count);
  live = threads;
  at_barrier = counted = 0;
  team->shared[rank] = dynamic_shared;
  team->absent[rank] = false;
  for (int t = 0; t < threads; t++) set_up(t);
  while (live > 0) {
    bool polling;
    if (run_fibers(polling) || land())
      team->idle = 0;
    else if (live > 0)
      let_cluster_run(polling);
  }
  land();
  team->absent[rank] = true;
}

/* CTAs first .. end - 1, of which this is one of each cluster. None ends before the last of its cluster, so that none
 * of the next one begins. */
void run_clusters(unsigned first, unsigned end)
{
  const unsigned size = (unsigned)team->size;
  fibers = own.fibers;
  for (int last = team->size; first < end; first += size, last += team->size) {
    const unsigned cta = first + (unsigned)rank;
    blockIdx = {cta % gridDim.x, cta / gridDim.x, 0};
    run_cta();
    if (++team->ended == last) team->ended_threads = 0;
    while (team->ended < last) let_cluster_run(false);
  }
}

} // namespace

void fail(const char *what)
{
  fprintf(stderr, "emulated kernel: %s (CTA %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  abort();
}

bool late()
{
  return descending;
}

int block_barrier(int value)
{
  work();
  counted += value;
  if (++at_barrier == live) {
    finish_barrier();
    return last_count;
  }
  pause(AT_BARRIER);
  return last_count;
}

void named_barrier(int barrier, int count)
{
  if (++named_count[barrier] == count) {
    named_count[barrier] = 0;
    return wake(AT_NAMED, barrier);
  }
  fibers[current].number = barrier;
  pause(AT_NAMED);
}

void warp_together(unsigned mask, void *mine, void (*work)(void **))
{
  warp &w = warps[current / 32];
  if (w.came && (w.mask != mask || w.work != work)) fail("lanes of a warp do different things together");
  w.mask = mask;
  w.work = work;
  w.of_lane[current % 32] = mine;
  w.came |= 1u << current % 32;
  if (w.came == (mask & w.live)) return finish_warp(w);
  pause(WITH_WARP);
}

void let_others_run()
{
  pause(POLLING);
}

void polled()
{
  if (++fibers[current].polls % POLLS == 0) pause(POLLING);
}

void let_other_gpus_run()
{
  static thread_local int turns;
  const timespec nap = {0, 50000};
  if (!waits) turns = 0;
  rest();
  if (++turns < 16)
    sched_yield();
  else
    nanosleep(&nap, nullptr);
  pause(POLLING);
}

/* Of what passed since somebody looked at the clock a part counts, lest a busy machine make it late. */
uint64_t now_ns()
{
  static std::atomic<uint64_t> last, passed;
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  const uint64_t now = (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec, before = last.exchange(now);
  if (working == 0 && now > before) passed += std::min(now - before, (uint64_t)1000000);
  return passed;
}

/* ---- copies of a thread ---- */

void copy_later(void *to, const void *from, int bytes, int room)
{
  fiber &f = fibers[current];
  if (f.copy_count == COPIES) fail("more copies under way than there is room for");
  f.copies[f.copy_count++] = copy{to, from, bytes, room, f.committed};
}

void commit_copies()
{
  fibers[current].committed++;
}

void await_copies(int groups_left)
{
  fiber &f = fibers[current];
  if (f.landing) (void)land();
  f.landing = false;
  int kept = 0;
  for (int i = 0; i < f.copy_count; i++) {
    const copy &c = f.copies[i];
    if (c.group >= f.committed - groups_left)
      f.copies[kept++] = c;
    else
      c.arrive();
  }
  f.copy_count = kept;
}

void arrive_behind_copies(uint64_t *word)
{
  fiber &f = fibers[current];
  std::vector<copy> copies(f.copies, f.copies + f.copy_count);
  f.copy_count = 0;
  f.landing = true;
  land_later([=] {
    for (const copy &c : copies) c.arrive();
    arrive(word, 1, 0);
  });
}

/* ---- sm_90 ---- */

mbarrier &barrier_at(uint64_t *word)
{
  require_aligned(word, 8);
  mbarrier &b = *reinterpret_cast<mbarrier *>(word);
  if (b.count == 0x7fff) fail("an mbarrier that was not initialised");
  return b;
}

void arrive(uint64_t *word, int threads_come, int64_t bytes)
{
  mbarrier &b = barrier_at(word);
  if (threads_come > b.missing) fail("more arrive at an mbarrier than its count");
  b.missing -= (uint16_t)threads_come;
  b.bytes += (int32_t)bytes;
  if (b.missing || b.bytes) return;
  b.missing = b.count;
  b.phase ^= 1;
}

void wait_for_phase(uint64_t *word, uint32_t parity)
{
  if (barrier_at(word).phase != parity) return;
  fibers[current].barrier = word;
  fibers[current].parity = parity;
  pause(AT_MBARRIER);
}

void land_later(std::function<void()> work)
{
  if (!late()) return work();
  landing.push_back(std::move(work));
}

static groups &groups_of(bool of_warp)
{
  return of_warp ? warps[current / 32].later : fibers[current].later;
}

void group_later(std::function<void()> work, bool of_warp)
{
  if (!late()) return work();
  groups_of(of_warp).items.push_back({groups_of(of_warp).committed, std::move(work)});
}

void commit_group(bool of_warp)
{
  groups_of(of_warp).committed++;
}

void await_groups(int groups_left, bool of_warp)
{
  groups_of(of_warp).await(groups_left);
}

unsigned cluster_rank()
{
  return (unsigned)rank;
}

unsigned char *in_cluster(const void *mine, unsigned of)
{
  if (of >= (unsigned)team->size) fail("a CTA that the cluster has not");
  if (team->absent[of]) fail("shared memory of a CTA that has not begun or has ended");
  return team->shared[of] + (static_cast<const unsigned char *>(mine) - dynamic_shared);
}

void cluster_barrier()
{
  fibers[current].number = team->generation;
  team->at_barrier++;
  if (cluster_has_come()) return finish_cluster_barrier();
  pause(AT_CLUSTER);
}

/* ---- launches ---- */

namespace
{

struct launch {
  emulated_index grid;
  unsigned block;
  void (*kernel)(const void *);
  const void *args;
  bool descends;
};

/* By this host thread, as one CTA of each cluster. */
void run_ctas(const launch &l, cluster &here, unsigned own_rank, unsigned first, unsigned end)
{
  threads = (int)l.block;
  body = l.kernel;
  arguments = l.args;
  descending = l.descends;
  gridDim = l.grid;
  blockDim = {l.block, 1, 1};
  team = &here;
  rank = (int)own_rank;
  work();
  if (here.size > 1) take_turn();
  run_clusters(first, end);
  if (here.size > 1) give_turn();
  rest();
}

void run_alone(const launch &l, unsigned first, unsigned end)
{
  cluster alone(1);
  run_ctas(l, alone, 0, first, end);
}

} // namespace

void run(emulated_index grid, unsigned cluster_size, unsigned block, void (*kernel)(const void *), const void *args,
         bool together)
{
  static thread_local bool last_descended;
  const char *order = getenv("ORDER"); /* for whoever looks for the reason: always one of the two */
  const launch l = {grid, block, kernel, args, order ? *order == 'l' : last_descended};
  const unsigned ctas = grid.x * grid.y;
  if (block > MAX_THREADS) fail("more threads than a CTA has");
  if (cluster_size > MAX_CLUSTER || ctas % cluster_size) fail("a grid that is not whole clusters");
  last_descended = !l.descends;
  if (cluster_size == 1 && !together) return run_alone(l, 0, ctas);
  cluster here(cluster_size);
  std::vector<std::thread> running;
  if (together)
    for (unsigned cta = 0; cta < ctas; cta++) running.emplace_back(run_alone, std::cref(l), cta, cta + 1);
  else
    for (unsigned r = 0; r < cluster_size; r++)
      running.emplace_back(run_ctas, std::cref(l), std::ref(here), r, 0, ctas);
  sem_post(&here.turn[l.descends ? cluster_size - 1 : 0]);
  for (std::thread &t : running) t.join();
}

} // namespace grid
