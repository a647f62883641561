/* The pool: figures, the limit, an engine's own allocator, what happens when memory is short, trimming, peers. */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

static cumoe_pool_stats stats_of(cumoe_context context)
{
  cumoe_pool_stats stats = {.size = sizeof stats};
  CHECK_OK(cumoe_pool_get_stats(context, &stats));
  return stats;
}

/* Sizes below are exact only where no red zones come on top of them. */
static bool has_zones(void)
{
  const char *level = getenv("CUMOE_DEBUG");
  return level != NULL && level[0] == '2';
}

static void test_figures(cumoe_context given)
{
  const int32_t device = device_of(given);
  cumoe_context context = NULL;
  cumoe_buffer a = {0}, b = {0}, empty = {0};
  void *memory = NULL;
  case_begin("exact");
  CHECK_OK(cumoe_context_create(device, NULL, &context));
  cumoe_pool_stats s = stats_of(context);
  CHECK(s.live == 0 && s.used == 0 && s.used_high == 0 && s.allocs == 0 && s.frees == 0 && s.oom_retries == 0);
  CHECK(s.pinned == 0);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 1000, NULL, &a));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 256, NULL, &b));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 0, NULL, &empty));
  s = stats_of(context);
  const uint64_t zones = has_zones() ? 512 : 0, both = 1024 + 256 + 2 * zones;
  CHECK_MSG(s.live == 2 && s.used == both && s.used_high == both && s.allocs == 2 && s.frees == 0,
            "live %" PRId64 ", used %" PRIu64 ", high %" PRIu64, s.live, s.used, s.used_high);
  CHECK(s.reserved >= s.used && s.reserved_high >= s.reserved);
  CHECK_OK(cumoe_buffer_free(&a));
  s = stats_of(context);
  CHECK(s.live == 1 && s.used == 256 + zones && s.used_high == both && s.allocs == 2 && s.frees == 1);
  CHECK_OK(cumoe_pool_reset_highs(context));
  s = stats_of(context);
  CHECK(s.used_high == 256 + zones && s.reserved_high >= s.reserved);
  CHECK_OK(cumoe_buffer_release(&b, &memory));
  s = stats_of(context);
  CHECK(s.live == 0 && s.used == 0);
  CHECK_OK(cumoe_buffer_adopt(context, memory, CUMOE_U8, 1, 256, NULL, &b));
  CHECK(stats_of(context).live == 0); /* not the pool's any more */
  CHECK_OK(cumoe_buffer_free(&b));
  CHECK_OK(cumoe_buffer_free(&empty));
  CHECK(stats_of(context).used == 0);
  CHECK_OK(cumoe_pool_trim(context, 0));
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

static void test_config(cumoe_context given)
{
  const int32_t device = device_of(given);
  cumoe_context context = NULL;
  case_begin("shorter and longer than this version's");
  struct {
    cumoe_context_config known;
    uint64_t later;
  } longer = {.known = {.size = sizeof longer, .cpu_threads = 1}};
  const uint32_t shorter[2] = {8, 1};
  CHECK_OK(cumoe_context_create(device, (const cumoe_context_config *)(const void *)shorter, &context));
  CHECK_OK(cumoe_context_destroy(context));
  CHECK_OK(cumoe_context_create(device, &longer.known, &context));
  CHECK_OK(cumoe_context_destroy(context));
  longer.later = 1;
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_context_create(device, &longer.known, &context));
  case_end();
}

static void test_limit(cumoe_context given)
{
  const int32_t device = device_of(given);
  const cumoe_context_config config = {.size = sizeof config, .pool_max = 10000};
  cumoe_context context = NULL;
  cumoe_buffer a = {0}, b = {0};
  case_begin("10000 bytes");
  CHECK_OK(cumoe_context_create(device, &config, &context));
  CHECK_STATUS(CUMOE_ERR_OUT_OF_MEMORY, cumoe_buffer_alloc(context, CUMOE_U8, 1, 10001, NULL, &a));
  CHECK_TEXT("config.pool_max is 10000");
  CHECK(a.id == 0);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 8000, NULL, &a));
  CHECK_STATUS(CUMOE_ERR_OUT_OF_MEMORY, cumoe_buffer_alloc(context, CUMOE_U8, 1, 2000, NULL, &b));
  CHECK(stats_of(context).live == 1 && stats_of(context).allocs == 1);
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 9000, NULL, &b));
  CHECK_OK(cumoe_buffer_free(&b));
  CHECK(stats_of(context).used == 0 && stats_of(context).used_high < 10000);
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

enum { SLOTS = 64, ARENA = 1 << 16 };

/* Hands out parts of one piece of memory; refuses `refusals` times. */
typedef struct engine {
  char *arena;
  size_t used;
  int refusals, asked, freed, misalign;
  size_t last_bytes, freed_bytes;
  cumoe_stream last_stream;
  void *last;
} engine;

static int engine_alloc(void *user, void **data, size_t bytes, size_t alignment, cumoe_stream stream)
{
  engine *e = user;
  e->asked++;
  e->last_bytes = bytes;
  e->last_stream = stream;
  if (e->refusals > 0) return e->refusals--, 2;
  const size_t at = (e->used + alignment - 1) / alignment * alignment;
  if (at + bytes > ARENA) return 3;
  e->used = at + bytes;
  *data = e->misalign < 0 ? NULL : e->arena + at + e->misalign;
  return 0;
}

static void engine_free(void *user, void *data, size_t bytes, cumoe_stream stream)
{
  engine *e = user;
  e->freed++;
  e->freed_bytes += bytes;
  e->last = data;
  e->last_stream = stream;
}

static void allocator_grants(cumoe_context context, engine *e)
{
  const size_t zones = has_zones() ? 512 : 0, granted = zones ? 1024 : 500;
  cumoe_buffer a = {0};
  unsigned char host[500];
  case_begin("allocates and frees");
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 5, 100, NULL, &a));
  CHECK(e->asked == 1 && e->last_bytes == granted);
  CHECK((char *)cumoe_buffer_view(a).data == e->arena + zones / 2);
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(a), 9, NULL));
  CHECK_OK(cumoe_copy_to_host(context, host, 500, cumoe_buffer_view(a), NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK(host[0] == 9 && host[499] == 9);
  cumoe_pool_stats s = stats_of(context);
  CHECK(s.used == 512 + zones && s.reserved == s.used && s.live == 1);
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK(e->freed == 1 && e->last == e->arena && e->freed_bytes == granted && stats_of(context).used == 0);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 0, 100, NULL, &a)); /* asks for nothing */
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK(e->asked == 1 && e->freed == 1);
  case_end();
}

static void allocator_refuses(cumoe_context context, engine *e)
{
  cumoe_buffer a = {0};
  case_begin("asked again after a wait");
  e->refusals = 1;
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 100, NULL, &a));
  CHECK(e->asked == 3 && stats_of(context).oom_retries == 1);
  CHECK_OK(cumoe_buffer_free(&a));
  e->refusals = 2;
  CHECK_STATUS(CUMOE_ERR_OUT_OF_MEMORY, cumoe_buffer_alloc(context, CUMOE_U8, 1, 100, NULL, &a));
  CHECK_TEXT("allocator engine: 2");
  CHECK(a.id == 0 && e->asked == 5 && stats_of(context).used == 0 && stats_of(context).live == 0);
  CHECK_STATUS(CUMOE_ERR_OUT_OF_MEMORY, cumoe_buffer_alloc(context, CUMOE_U8, ARENA, 2, NULL, &a));
  case_end();
}

static void allocator_errs(cumoe_context context, engine *e)
{
  const int freed = e->freed;
  cumoe_buffer a = {0};
  case_begin("gives what it must not");
  e->misalign = 1;
  CHECK_STATUS(CUMOE_ERR_MISALIGNED, cumoe_buffer_alloc(context, CUMOE_U8, 1, 100, NULL, &a));
  CHECK_TEXT("256 bytes");
  CHECK(e->freed == freed + 1);
  e->misalign = -1;
  CHECK_STATUS(CUMOE_ERR_MISALIGNED, cumoe_buffer_alloc(context, CUMOE_U8, 1, 100, NULL, &a));
  CHECK(e->freed == freed + 1 && stats_of(context).used == 0);
  e->misalign = 0;
  case_end();
}

/* Ends the context. */
static void allocator_ends(cumoe_context context, engine *e, int32_t device)
{
  const int freed = e->freed;
  cumoe_buffer a = {0}, b = {0};
  void *back = NULL;
  case_begin("released, granted, left over");
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 100, NULL, &a));
  CHECK_OK(cumoe_buffer_release(&a, &back));
  CHECK(e->freed == freed + (has_zones() ? 1 : 0) && (char *)back >= e->arena && (char *)back < e->arena + ARENA);
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_pool_allow_peer(context, device == 1 ? 0 : 1));
  CHECK_OK(cumoe_pool_trim(context, 0));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 100, NULL, &b));
  const int before = e->freed;
  CHECK_OK(cumoe_context_destroy(context));
  CHECK(e->freed == before + 1 && e->last_stream == NULL);
  case_end();
}

static void test_allocator(cumoe_context given)
{
  const int32_t device = device_of(given);
  engine e = {0};
  const cumoe_allocator allocator = {
      .size = sizeof allocator, .alloc = engine_alloc, .free = engine_free, .user = &e, .name = "engine"};
  const cumoe_context_config config = {.size = sizeof config, .allocator = &allocator};
  cumoe_context context = NULL;
  if (device == CUMOE_DEVICE_CPU)
    e.arena = aligned_alloc(4096, ARENA);
  else
    CHECK_CUDA(cudaMalloc((void **)&e.arena, ARENA));
  CHECK_OK(cumoe_context_create(device, &config, &context));
  allocator_grants(context, &e);
  allocator_refuses(context, &e);
  allocator_errs(context, &e);
  allocator_ends(context, &e, device);
  if (device == CUMOE_DEVICE_CPU)
    free(e.arena);
  else
    CHECK_CUDA(cudaFree(e.arena));
}

enum { THREADS = 8 };

typedef struct soak {
  cumoe_context context;
  cumoe_stream stream;
  uint64_t seed;
  int rounds, failures;
} soak;

static void *run_soak(void *argument)
{
  soak *k = argument;
  rng r = {k->seed};
  cumoe_buffer held[16] = {{0}};
  for (int i = 0; i < k->rounds; i++) {
    cumoe_buffer *one = &held[rng_below(&r, 16)];
    if (cumoe_buffer_free(one) != CUMOE_OK) k->failures++;
    const int64_t bytes = (int64_t)1 << rng_below(&r, 21);
    if (cumoe_buffer_alloc(k->context, CUMOE_U8, 1, bytes, k->stream, one) != CUMOE_OK) k->failures++;
  }
  for (int i = 0; i < 16; i++)
    if (cumoe_buffer_free(&held[i]) != CUMOE_OK) k->failures++;
  return NULL;
}

static void soak_with(cumoe_context context, cumoe_stream streams[THREADS], int rounds)
{
  pthread_t threads[THREADS];
  soak k[THREADS];
  for (int i = 0; i < THREADS; i++) {
    k[i] = (soak){context, streams[i], (uint64_t)i + 1, rounds, 0};
    CHECK(pthread_create(&threads[i], NULL, run_soak, &k[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_MSG(k[i].failures == 0, "thread %d: %d failures: %s", i, k[i].failures, cumoe_last_error());
  }
}

static void test_soak_cpu(cumoe_context context)
{
  cumoe_stream streams[THREADS] = {NULL};
  case_begin("%d threads", THREADS);
  const cumoe_pool_stats before = stats_of(context);
  soak_with(context, streams, 5000);
  const cumoe_pool_stats s = stats_of(context);
  CHECK(s.live == before.live && s.used == before.used && s.allocs - before.allocs == THREADS * 5000);
  CHECK(s.frees - before.frees == THREADS * 5000 && s.used_high > s.used);
  case_end();
}

/* A million allocations, mixed sizes, two streams: what the pool holds stops growing. */
static void test_soak_cuda(cumoe_context context)
{
  cudaStream_t two[2] = {NULL, NULL};
  cumoe_stream streams[THREADS];
  uint64_t held[4];
  case_begin("memory stays flat");
  for (int i = 0; i < 2; i++) CHECK_CUDA(cudaStreamCreateWithFlags(&two[i], cudaStreamNonBlocking));
  for (int i = 0; i < THREADS; i++) streams[i] = two[i % 2];
  for (int quarter = 0; quarter < 4; quarter++) {
    soak_with(context, streams, 1000000 / 4 / THREADS);
    for (int i = 0; i < 2; i++) CHECK_OK(cumoe_synchronize(context, two[i]));
    held[quarter] = stats_of(context).reserved;
  }
  CHECK_MSG(held[3] <= held[0] + held[0] / 2 + (64 << 20), "the pool held %" PRIu64 ", then %" PRIu64, held[0],
            held[3]);
  CHECK(stats_of(context).used == 0);
  CHECK_OK(cumoe_pool_trim(context, 0));
  CHECK_MSG(stats_of(context).reserved == 0, "%" PRIu64 " bytes are still reserved", stats_of(context).reserved);
  for (int i = 0; i < 2; i++) CHECK_CUDA(cudaStreamDestroy(two[i]));
  case_end();
}

static size_t free_memory(void)
{
  size_t available = 0, total = 0;
  CHECK_CUDA(cudaMemGetInfo(&available, &total));
  return available;
}

static void test_reserve_cuda(void)
{
  enum { MIB = 1 << 20 };
  const cumoe_context_config big = {.size = sizeof big, .pool_initial = (uint64_t)256 * MIB};
  const cumoe_context_config frugal = {.size = sizeof frugal, .pool_keep = 1};
  const cumoe_context_config absurd = {.size = sizeof absurd, .pool_initial = (uint64_t)1 << 44};
  cumoe_context context = NULL;
  cumoe_buffer buffer = {0};
  case_begin("taken at once, kept, trimmed");
  CHECK_OK(cumoe_context_create(0, &big, &context));
  const uint64_t reserved = stats_of(context).reserved;
  CHECK_MSG(reserved >= (uint64_t)256 * MIB && stats_of(context).used == 0, "reserved is %" PRIu64, reserved);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 200, MIB, NULL, &buffer));
  CHECK_MSG(stats_of(context).reserved == reserved, "it became %" PRIu64, stats_of(context).reserved);
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK(stats_of(context).reserved == reserved);
  const size_t before = free_memory();
  CHECK_OK(cumoe_pool_trim(context, 0));
  CHECK(stats_of(context).reserved == 0 && stats_of(context).reserved_high >= reserved);
  CHECK_MSG(free_memory() >= before + (size_t)200 * MIB, "%zu bytes came back", free_memory() - before);
  CHECK_OK(cumoe_pool_reset_highs(context));
  CHECK(stats_of(context).reserved_high == 0);
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
  case_begin("given back at the next wait");
  CHECK_OK(cumoe_context_create(0, &frugal, &context));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 200, MIB, NULL, &buffer));
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK_MSG(stats_of(context).reserved < (uint64_t)200 * MIB, "%" PRIu64 " are reserved", stats_of(context).reserved);
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
  case_begin("more than there is");
  CHECK_STATUS(CUMOE_ERR_OUT_OF_MEMORY, cumoe_context_create(0, &absurd, &context));
  CHECK_TEXT("pool_initial");
  CHECK(context == NULL);
  CHECK_CUDA(cudaGetLastError());
  case_end();
}

static void CUDART_CB sleep_a_while(void *unused)
{
  (void)unused;
  usleep(200000);
}

/* Most of the GPU, freed on a busy stream: another stream gets it only after waiting and trimming. */
static void test_full_cuda(void)
{
  cumoe_context context = NULL;
  cumoe_buffer a = {0}, b = {0}, c = {0};
  cudaStream_t stream = NULL;
  case_begin("waits, trims, tries again");
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_OK(cumoe_context_create(0, NULL, &context));
  const int64_t most = (int64_t)(free_memory() / 10 * 6);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, most / 2, stream, &a));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, most / 2, stream, &b));
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_CUDA(cudaLaunchHostFunc(stream, sleep_a_while, NULL));
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(b), 1, stream));
  CHECK_OK(cumoe_buffer_free(&b));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, most, stream, &c)); /* the halves are not one piece */
  CHECK_OK(cumoe_buffer_free(&c));
  const uint64_t retries = stats_of(context).oom_retries;
  CHECK_STATUS(CUMOE_ERR_OUT_OF_MEMORY, cumoe_buffer_alloc(context, CUMOE_U8, 1 << 20, 1 << 24, stream, &c));
  CHECK_TEXT("bytes free on device 0");
  CHECK(stats_of(context).oom_retries == retries + 1 && c.id == 0 && stats_of(context).used == 0);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 1000, stream, &c));
  CHECK_OK(cumoe_buffer_free(&c));
  CHECK_OK(cumoe_context_destroy(context));
  CHECK_CUDA(cudaStreamDestroy(stream));
  case_end();
}

static void test_peers(cumoe_context context)
{
  int count = 0;
  case_begin("refused, or nothing to do");
  if (!on_device(context)) {
    CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_pool_allow_peer(context, 0));
  } else {
    CHECK_OK(cumoe_pool_allow_peer(context, device_of(context)));
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_pool_allow_peer(context, 63));
  }
  case_end();
  if (on_device(context)) {
    case_begin("the other GPU");
    if (cudaGetDeviceCount(&count) != cudaSuccess || count < 2) {
      case_skip("one GPU only");
    } else {
      const cumoe_status status = cumoe_pool_allow_peer(context, 1);
      CHECK_MSG(status == CUMOE_OK || status == CUMOE_ERR_NOT_SUPPORTED, "%s", cumoe_last_error());
      CHECK_STATUS(status, cumoe_pool_allow_peer(context, 1));
      CHECK(stats_of(context).used == 0);
      CHECK_CUDA(cudaGetLastError());
      case_end();
    }
  }
}

static const test_group groups[] = {
    GROUP("figures", test_figures, ANYWHERE),
    GROUP("configuration", test_config, ANYWHERE),
    GROUP("the limit", test_limit, ANYWHERE),
    GROUP("an allocator of the engine's", test_allocator, ANYWHERE),
    GROUP("peers", test_peers, ANYWHERE),
    ALONE("what the pool holds", test_reserve_cuda, ON_CUDA),
    ALONE("a full GPU", test_full_cuda, ON_CUDA),
    GROUP("a million allocations", test_soak_cuda, ON_CUDA),
    GROUP("many allocations", test_soak_cpu, ON_CPU),
};
TEST_MAIN(groups)
