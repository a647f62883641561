/*
 * Runs a kernel of kernels/ on the CPU: CTAs one after the other, the threads of a CTA as fibers that take turns at
 * barriers and at what a warp does together. All on the host thread that launches; grids of several run side by side.
 * CTAs that wait for each other have a host thread each. Shared memory begins as 0xff; launches take the threads in ascending and
 * in descending order by turns, so that what depends on the order shows as results that differ.
 */
#include "cuda.h"

#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <ctime>
#include <functional>
#include <sched.h>
#include <thread>
#include <ucontext.h>
#include <vector>

thread_local emulated_index threadIdx, blockIdx, blockDim, gridDim;

namespace grid
{

enum { MAX_THREADS = 1024, WARPS = MAX_THREADS / 32, STACK = 1 << 18, SHARED = 232448, COPIES = 512 };

alignas(1024) thread_local unsigned char dynamic_shared[SHARED];

namespace
{

enum state { READY, AT_BARRIER, WITH_WARP, ENDED };

struct copy {
  void *to;
  const void *from;
  int bytes, room, group;
};

struct fiber {
  jmp_buf at;
  ucontext_t first;
  state is;
  copy copies[COPIES];
  int copy_count, groups;
};

struct warp {
  unsigned live, came, mask;
  void *of_lane[32];
  void (*work)(void **);
};

/* Of a host thread, until it ends. */
struct cta_memory {
  fiber *fibers = nullptr;
  unsigned char *stacks = nullptr;
  int room = 0;
  void make(int threads)
  {
    if (threads <= room) return;
    free();
    fibers = new fiber[threads];
    stacks = new unsigned char[(size_t)threads * STACK];
    room = threads;
  }
  void free()
  {
    delete[] fibers;
    delete[] stacks;
  }
  ~cta_memory() { free(); }
};

thread_local fiber *fibers;
thread_local unsigned char *stacks;
thread_local warp warps[WARPS];
thread_local jmp_buf scheduler;
thread_local int threads, live, at_barrier, counted, last_count, current;
thread_local bool descending;
thread_local void (*body)(const void *);
thread_local const void *arguments;

/* Grids, of all host threads, that do not wait for other GPUs. */
std::atomic<int> working;
thread_local bool waits;

void work()
{
  if (waits) working++;
  waits = false;
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
  for (int t = 0; t < threads; t++)
    if (fibers[t].is == AT_BARRIER) fibers[t].is = READY;
}

void pause(state why)
{
  fiber &f = fibers[current];
  f.is = why;
  if (_setjmp(f.at) == 0) _longjmp(scheduler, 1);
}

void end_thread()
{
  warp &w = warps[current / 32];
  fibers[current].is = ENDED;
  await_copies(ALL_COPIES);
  w.live &= ~(1u << current % 32);
  live--;
  if (w.came && w.came == (w.mask & w.live)) finish_warp(w);
  if (at_barrier && at_barrier == live) finish_barrier();
  _longjmp(scheduler, 1);
}

void first_step()
{
  body(arguments);
  end_thread();
}

void set_up(int t)
{
  fiber &f = fibers[t];
  f.is = READY;
  f.copy_count = f.groups = 0;
  getcontext(&f.first);
  f.first.uc_stack.ss_sp = stacks + (size_t)t * STACK;
  f.first.uc_stack.ss_size = STACK;
  f.first.uc_link = nullptr;
  makecontext(&f.first, first_step, 0);
  if (t % 32 == 0) warps[t / 32] = warp();
  warps[t / 32].live |= 1u << t % 32;
}

void run_cta()
{
  static thread_local bool started[MAX_THREADS];
  memset(started, 0, sizeof started);
  memset(dynamic_shared, 0xff, sizeof dynamic_shared);
  live = threads;
  at_barrier = counted = 0;
  for (int t = 0; t < threads; t++) set_up(t);
  while (live > 0) {
    volatile bool any = false;
    for (volatile int i = 0; i < threads; i = i + 1) {
      const int t = descending ? threads - 1 - i : i;
      if (fibers[t].is != READY) continue;
      any = true;
      current = t;
      threadIdx.x = (unsigned)t;
      if (_setjmp(scheduler) == 0) {
        if (started[t]) _longjmp(fibers[t].at, 1);
        started[t] = true;
        setcontext(&fibers[t].first);
      }
    }
    if (!any && live > 0) fail("threads wait for each other");
  }
}

} // namespace

void fail(const char *what)
{
  fprintf(stderr, "emulated kernel: %s (CTA %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  abort();
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
  pause(READY);
}

void let_other_gpus_run()
{
  static thread_local int turns;
  const timespec nap = {0, 50000};
  if (!waits) working--, turns = 0;
  waits = true;
  if (++turns < 16)
    sched_yield();
  else
    nanosleep(&nap, nullptr);
  pause(READY);
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

void copy_later(void *to, const void *from, int bytes, int room)
{
  fiber &f = fibers[current];
  if (f.copy_count == COPIES) fail("more copies under way than there is room for");
  f.copies[f.copy_count++] = copy{to, from, bytes, room, f.groups};
}

void commit_copies()
{
  fibers[current].groups++;
}

void await_copies(int groups_left)
{
  fiber &f = fibers[current];
  int kept = 0;
  for (int i = 0; i < f.copy_count; i++) {
    const copy &c = f.copies[i];
    if (c.group >= f.groups - groups_left) {
      f.copies[kept++] = c;
      continue;
    }
    memcpy(c.to, c.from, (size_t)c.bytes);
    memset(static_cast<char *>(c.to) + c.bytes, 0, (size_t)(c.room - c.bytes));
  }
  f.copy_count = kept;
}

namespace
{

struct launch {
  emulated_index grid;
  unsigned block;
  void (*kernel)(const void *);
  const void *args;
  bool descending;
};

void run_ctas(const launch &l, unsigned first, unsigned end)
{
  static thread_local cta_memory memory;
  memory.make((int)l.block);
  fibers = memory.fibers;
  stacks = memory.stacks;
  threads = (int)l.block;
  body = l.kernel;
  arguments = l.args;
  descending = l.descending;
  waits = true;
  work();
  gridDim = l.grid;
  blockDim = {l.block, 1, 1};
  for (unsigned cta = first; cta < end; cta++) {
    blockIdx = {cta % l.grid.x, cta / l.grid.x, 0};
    run_cta();
  }
  if (!waits) working--;
}

} // namespace

void run(emulated_index grid, unsigned block, void (*kernel)(const void *), const void *args, bool together)
{
  static thread_local bool descends;
  const launch l = {grid, block, kernel, args, descends};
  const unsigned ctas = grid.x * grid.y;
  if (block > MAX_THREADS) fail("more threads than a CTA has");
  descends = !descends;
  if (!together || ctas == 1) return run_ctas(l, 0, ctas);
  std::vector<std::thread> running;
  for (unsigned cta = 0; cta < ctas; cta++) running.emplace_back(run_ctas, std::cref(l), cta, cta + 1);
  for (std::thread &t : running) t.join();
}

} // namespace grid
