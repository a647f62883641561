/* The CPU device's threads: one job at a time, handed out in small ranges to the caller and the workers. */
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "threads.h"

typedef void range_kernel(const void *args, int64_t begin, int64_t end);

typedef struct job {
  range_kernel *kernel;
  const void *args;
  int64_t units, grain;
} job;

struct thread_pool {
  pthread_mutex_t callers; /* held for a whole job */
  pthread_mutex_t lock;    /* guards all below but next */
  pthread_cond_t posted, finished;
  job job;
  uint64_t serial; /* of the job */
  bool open;       /* workers may still join the job: late risers find it closed and sleep on */
  bool stop;
  int working;
  int workers;
  atomic_llong next; /* first unit nobody has taken */
  pthread_t threads[];
};

/* Ranges an average thread takes of one job: enough to even out unequal units, few enough to be cheap. */
enum { RANGES_PER_THREAD = 8, MAX_THREADS = 1024 };

static void work(thread_pool *pool, const job *j)
{
  for (;;) {
    int64_t begin = atomic_fetch_add_explicit(&pool->next, j->grain, memory_order_relaxed);
    if (begin >= j->units) return;
    int64_t end = j->units - begin > j->grain ? begin + j->grain : j->units;
    j->kernel(j->args, begin, end);
  }
}

static void *worker(void *argument)
{
  thread_pool *pool = argument;
  uint64_t seen = 0;
  fesetenv(FE_DFL_ENV); /* not its creator's */
  pthread_mutex_lock(&pool->lock);
  for (;;) {
    while (!pool->stop && (!pool->open || pool->serial == seen)) pthread_cond_wait(&pool->posted, &pool->lock);
    if (pool->stop) break;
    seen = pool->serial;
    pool->working++;
    job mine = pool->job;
    pthread_mutex_unlock(&pool->lock);
    work(pool, &mine);
    pthread_mutex_lock(&pool->lock);
    if (--pool->working == 0) pthread_cond_signal(&pool->finished);
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

/* Cores this process may run on, which in a container are fewer than the machine has. */
static int usable_cores(void)
{
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return cores < 1 ? 1 : cores;
}

/* The engine's signals stay with the engine's threads. Fewer workers than asked for is slower, not wrong. */
static void start_workers(thread_pool *pool, int workers)
{
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (pool->workers < workers && pthread_create(&pool->threads[pool->workers], NULL, worker, pool) == 0)
    pool->workers++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

thread_pool *threads_create(int threads)
{
  if (threads <= 0) threads = usable_cores();
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  thread_pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof pool->threads[0]);
  if (pool == NULL) return NULL;
  pthread_mutex_init(&pool->callers, NULL);
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->posted, NULL);
  pthread_cond_init(&pool->finished, NULL);
  start_workers(pool, threads - 1);
  return pool;
}

void threads_destroy(thread_pool *pool)
{
  if (pool == NULL) return;
  pthread_mutex_lock(&pool->lock);
  pool->stop = true;
  pthread_cond_broadcast(&pool->posted);
  pthread_mutex_unlock(&pool->lock);
  for (int i = 0; i < pool->workers; i++) pthread_join(pool->threads[i], NULL);
  pthread_cond_destroy(&pool->finished);
  pthread_cond_destroy(&pool->posted);
  pthread_mutex_destroy(&pool->lock);
  pthread_mutex_destroy(&pool->callers);
  free(pool);
}

int threads_count(const thread_pool *pool)
{
  return pool->workers + 1;
}

static void share_out(thread_pool *pool, range_kernel *kernel, const void *args, int64_t units)
{
  int64_t grain = units / ((int64_t)threads_count(pool) * RANGES_PER_THREAD);
  job mine = {kernel, args, units, grain > 0 ? grain : 1};

  pthread_mutex_lock(&pool->callers);
  pthread_mutex_lock(&pool->lock);
  pool->job = mine;
  pool->serial++;
  pool->open = true;
  atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
  pthread_cond_broadcast(&pool->posted);
  pthread_mutex_unlock(&pool->lock);

  work(pool, &mine);

  pthread_mutex_lock(&pool->lock);
  pool->open = false;
  while (pool->working > 0) pthread_cond_wait(&pool->finished, &pool->lock);
  pthread_mutex_unlock(&pool->lock);
  pthread_mutex_unlock(&pool->callers);
}

/* Every thread computes in the default floating-point environment; the caller keeps what it has set. */
void threads_run(thread_pool *pool, range_kernel *kernel, const void *args, int64_t units)
{
  if (units <= 0) return;
  fenv_t callers;
  fegetenv(&callers);
  fesetenv(FE_DFL_ENV);
  if (units == 1 || pool->workers == 0)
    kernel(args, 0, units);
  else
    share_out(pool, kernel, args, units);
  fesetenv(&callers);
}
