/* The pool of a context: allocation, accounting, the limit, what is done when the GPU is full, peers. */
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"
#include "check.h"
#include "context.h"
#include "memory.h"
#include "status.h"

enum { MAX_PEERS = 64, PEER_TEST_BYTES = 1 << 20 };

/* ---- opening and closing ---- */

static cumoe_status take_allocator(const cumoe_allocator *from, cumoe_allocator *to)
{
  if (from == NULL) return CUMOE_OK;
  TRY(take_struct("config.allocator", from, to));
  REQUIRE(to->alloc != NULL && to->free != NULL, CUMOE_ERR_INVALID_ARGUMENT, "config.allocator.%s is null",
          to->alloc == NULL ? "alloc" : "free");
  REQUIRE(to->reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "config.allocator.reserved is %u, must be 0", to->reserved);
  if (to->name == NULL) to->name = "unnamed";
  return CUMOE_OK;
}

cumoe_status pool_configure(memory_pool *pool, const cumoe_context_config *config)
{
  TRY(take_allocator(config->allocator, &pool->allocator));
  pool->initial = config->pool_initial;
  pool->limit = config->pool_max != 0 ? config->pool_max : UINT64_MAX;
  pool->keep = config->pool_keep != 0 ? config->pool_keep : UINT64_MAX;
  REQUIRE(pool->initial <= pool->limit && pool->initial <= pool->keep, CUMOE_ERR_INVALID_ARGUMENT,
          "config.pool_initial is %llu, must be at most pool_max and pool_keep", (unsigned long long)pool->initial);
  return CUMOE_OK;
}

/* What is freed stays in the pool: the release threshold is at least as high. */
static cumoe_status reserve_on(const memory_pool *pool, cudaStream_t stream)
{
  void *data = NULL;
  TRY_CUDA(cudaMallocFromPoolAsync(&data, pool->initial, pool->cuda, stream));
  TRY_CUDA(cudaFreeAsync(data, stream));
  TRY_CUDA(cudaStreamSynchronize(stream));
  return CUMOE_OK;
}

static cumoe_status reserve(const memory_pool *pool)
{
  cudaStream_t stream = NULL;
  TRY_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cumoe_status status = reserve_on(pool, stream);
  if (status == CUMOE_ERR_OUT_OF_MEMORY)
    (void)fail(status, "config.pool_initial: the GPU has no %llu bytes", (unsigned long long)pool->initial);
  DROP_CUDA(&status, cudaStreamDestroy(stream));
  return status;
}

cumoe_status pool_open(struct context *context)
{
  memory_pool *pool = &context->pool;
  struct cudaMemPoolProps wanted = {.allocType = cudaMemAllocationTypePinned,
                                    .location = {.type = cudaMemLocationTypeDevice, .id = context->device}};
  if (pool->allocator.alloc != NULL) return CUMOE_OK;
  TRY_CUDA(cudaMemPoolCreate(&pool->cuda, &wanted));
  TRY_CUDA(cudaMemPoolSetAttribute(pool->cuda, cudaMemPoolAttrReleaseThreshold, &pool->keep));
  return pool->initial != 0 ? reserve(pool) : CUMOE_OK;
}

cumoe_status pool_close(struct context *context)
{
  cumoe_status status = CUMOE_OK;
  if (context->pool.cuda != NULL) DROP_CUDA(&status, cudaMemPoolDestroy(context->pool.cuda));
  return status;
}

/* ---- accounting ---- */

static size_t counted(size_t bytes)
{
  return (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
}

static cumoe_status count_in(memory_pool *pool, size_t bytes)
{
  uint64_t used = atomic_load(&pool->used);
  do {
    REQUIRE(used <= pool->limit && bytes <= pool->limit - used, CUMOE_ERR_OUT_OF_MEMORY,
            "%zu bytes asked, %llu are in use, config.pool_max is %llu", bytes, (unsigned long long)used,
            (unsigned long long)pool->limit);
  } while (!atomic_compare_exchange_weak(&pool->used, &used, used + bytes));
  return CUMOE_OK;
}

static void count_allocated(memory_pool *pool)
{
  const uint64_t used = atomic_load(&pool->used);
  uint64_t high = atomic_load(&pool->used_high);
  while (used > high && !atomic_compare_exchange_weak(&pool->used_high, &high, used)) continue;
  atomic_fetch_add(&pool->live, 1);
  atomic_fetch_add(&pool->allocs, 1);
}

static void count_gone(memory_pool *pool, size_t bytes)
{
  atomic_fetch_sub(&pool->used, counted(bytes));
  atomic_fetch_sub(&pool->live, 1);
}

/* ---- allocation ---- */

static cumoe_status alloc_cpu(size_t bytes, void **data)
{
  *data = memory_of_host(bytes);
  if (*data != NULL) return CUMOE_OK;
  return fail(CUMOE_ERR_OUT_OF_MEMORY, "%zu bytes of host memory could not be allocated", bytes);
}

static cumoe_status alloc_custom(struct context *context, size_t bytes, cumoe_stream stream, void **data)
{
  const cumoe_allocator *a = &context->pool.allocator;
  int code = a->alloc(a->user, data, bytes, MEMORY_ALIGNMENT, stream);
  if (code != 0) {
    *data = NULL;
    TRY(memory_wait(context, stream));
    atomic_fetch_add(&context->pool.retries, 1);
    code = a->alloc(a->user, data, bytes, MEMORY_ALIGNMENT, stream);
  }
  void *given = code == 0 ? *data : NULL;
  if (given != NULL && (uintptr_t)given % MEMORY_ALIGNMENT == 0) return CUMOE_OK;
  *data = NULL;
  if (code != 0) return fail(CUMOE_ERR_OUT_OF_MEMORY, "allocator %s: %d for %zu bytes", a->name, code, bytes);
  if (given != NULL) a->free(a->user, given, bytes, stream);
  return fail(CUMOE_ERR_MISALIGNED, "allocator %s gave %p, must be memory aligned to %d bytes", a->name, given,
              (int)MEMORY_ALIGNMENT);
}

/* Memory freed on other streams, and a fragmented pool, become usable when the stream has passed and the pool
 * has given its idle memory back. That costs a wait, which is cheaper than failing. */
static cumoe_status alloc_cuda(struct context *context, size_t bytes, cumoe_stream stream, void **data)
{
  memory_pool *pool = &context->pool;
  cudaError_t error = cudaMallocFromPoolAsync(data, bytes, pool->cuda, stream);
  if (error == cudaErrorMemoryAllocation) {
    *data = NULL;
    clear_cuda_error();
    atomic_fetch_add(&pool->retries, 1);
    TRY_CUDA(cudaStreamSynchronize(stream));
    TRY_CUDA(cudaMemPoolTrimTo(pool->cuda, 0));
    error = cudaMallocFromPoolAsync(data, bytes, pool->cuda, stream);
  }
  if (error == cudaSuccess) return CUMOE_OK;
  *data = NULL;
  if (error != cudaErrorMemoryAllocation) return fail_cuda(error, "cudaMallocFromPoolAsync");
  clear_cuda_error();
  size_t available = 0, total = 0;
  if (cudaMemGetInfo(&available, &total) != cudaSuccess) clear_cuda_error();
  return fail(CUMOE_ERR_OUT_OF_MEMORY,
              "cudaMallocFromPoolAsync: %s: %zu bytes asked, %llu in use by this context, %zu of %zu bytes free on "
              "device %d",
              cudaGetErrorName(error), bytes, (unsigned long long)(atomic_load(&pool->used) - counted(bytes)),
              available, total, context->device);
}

static cumoe_status alloc_entered(struct context *context, size_t bytes, cumoe_stream stream, void **data)
{
  TRY(refuse_capture(context, stream)); /* it would become a node of the graph, and so would the free */
  if (context->pool.allocator.alloc != NULL) return alloc_custom(context, bytes, stream, data);
  return alloc_cuda(context, bytes, stream, data);
}

static cumoe_status alloc_uncounted(struct context *context, size_t bytes, cumoe_stream stream, void **data)
{
  if (!on_cpu(context)) ON_DEVICE_RELAXED(context, alloc_entered(context, bytes, stream, data));
  if (context->pool.allocator.alloc != NULL) return alloc_custom(context, bytes, stream, data);
  return alloc_cpu(bytes, data);
}

cumoe_status pool_alloc(struct context *context, size_t bytes, cumoe_stream stream, void **data)
{
  memory_pool *pool = &context->pool;
  *data = NULL;
  if (bytes == 0) return CUMOE_OK;
  TRY(count_in(pool, counted(bytes)));
  const cumoe_status status = alloc_uncounted(context, bytes, stream, data);
  if (status == CUMOE_OK)
    count_allocated(pool);
  else
    atomic_fetch_sub(&pool->used, counted(bytes));
  return status;
}

/* ---- freeing ---- */

/* Whatever CUDA says on the way: the handle is gone already. */
static cumoe_status free_custom(struct context *context, void *data, size_t bytes, cumoe_stream stream)
{
  const cumoe_allocator *a = &context->pool.allocator;
  const bool relaxes = !on_cpu(context);
  device_scope scope;
  const cumoe_status status = enter_lost_device(context, &scope);
  const enum cudaStreamCaptureMode mode = relaxes ? relax_capture() : cudaStreamCaptureModeRelaxed;
  a->free(a->user, data, bytes, stream);
  restore_capture(mode); /* nothing, of one that is relaxed */
  leave_device(&scope);
  return status;
}

cumoe_status pool_free(struct context *context, void *data, size_t bytes, cumoe_stream stream)
{
  if (data == NULL) return CUMOE_OK;
  const bool custom = context->pool.allocator.free != NULL;
  const cumoe_status status = custom ? free_custom(context, data, bytes, stream) : memory_free(context, data, stream);
  atomic_fetch_add(&context->pool.frees, 1);
  count_gone(&context->pool, bytes);
  return status;
}

void pool_forget(struct context *context, size_t bytes)
{
  if (bytes != 0) count_gone(&context->pool, bytes);
}

cumoe_status pool_drop(struct context *context, void *data, size_t bytes)
{
  if (data == NULL) return CUMOE_OK;
  const bool custom = context->pool.allocator.free != NULL;
  const cumoe_status status = custom ? free_custom(context, data, bytes, NULL) : memory_drop(context, data);
  count_gone(&context->pool, bytes);
  return status;
}

/* ---- figures ---- */

static cumoe_status read_reserved(const memory_pool *pool, cumoe_pool_stats *stats)
{
  TRY_CUDA(cudaMemPoolGetAttribute(pool->cuda, cudaMemPoolAttrReservedMemCurrent, &stats->reserved));
  TRY_CUDA(cudaMemPoolGetAttribute(pool->cuda, cudaMemPoolAttrReservedMemHigh, &stats->reserved_high));
  return CUMOE_OK;
}

static cumoe_status add_reserved(struct context *context, cumoe_pool_stats *stats)
{
  if (context->pool.cuda == NULL) return CUMOE_OK;
  ON_DEVICE(context, read_reserved(&context->pool, stats));
}

cumoe_status cumoe_pool_get_stats(cumoe_context handle, cumoe_pool_stats *stats)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_struct("stats", stats));
  memory_pool *pool = &context->pool;
  cumoe_pool_stats now = {.live = atomic_load(&pool->live),
                          .used = atomic_load(&pool->used),
                          .used_high = atomic_load(&pool->used_high),
                          .allocs = atomic_load(&pool->allocs),
                          .frees = atomic_load(&pool->frees),
                          .oom_retries = atomic_load(&pool->retries),
                          .pinned = atomic_load(&pool->pinned)};
  now.reserved = now.used;
  now.reserved_high = now.used_high;
  TRY(add_reserved(context, &now));
  if (now.reserved_high < now.reserved) now.reserved_high = now.reserved; /* CUDA resets it to zero */
  give_struct(&now, stats);
  return CUMOE_OK;
}

static cumoe_status reset_cuda(const memory_pool *pool)
{
  uint64_t zero = 0;
  TRY_CUDA(cudaMemPoolSetAttribute(pool->cuda, cudaMemPoolAttrReservedMemHigh, &zero));
  return CUMOE_OK;
}

cumoe_status cumoe_pool_reset_highs(cumoe_context handle)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  atomic_store(&context->pool.used_high, atomic_load(&context->pool.used));
  if (context->pool.cuda == NULL) return CUMOE_OK;
  ON_DEVICE(context, reset_cuda(&context->pool));
}

static cumoe_status trim_cuda(const memory_pool *pool, uint64_t keep)
{
  TRY_CUDA(cudaMemPoolTrimTo(pool->cuda, keep));
  return CUMOE_OK;
}

cumoe_status cumoe_pool_trim(cumoe_context handle, uint64_t keep)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (context->pool.cuda == NULL) return CUMOE_OK;
  ON_DEVICE_RELAXED(context, trim_cuda(&context->pool, keep));
}

/* ---- peers ---- */

/* A pattern goes from our pool to the peer and back. */
typedef struct peer_test {
  cudaStream_t stream;
  cudaMemPool_t pool; /* of the peer */
  char *ours, *theirs;
  unsigned char *host; /* what is sent, and what comes back */
} peer_test;

static cumoe_status make_peer_test(struct context *context, int32_t peer, peer_test *t)
{
  struct cudaMemPoolProps wanted = {.allocType = cudaMemAllocationTypePinned,
                                    .location = {.type = cudaMemLocationTypeDevice, .id = peer}};
  t->host = calloc(2, PEER_TEST_BYTES);
  REQUIRE(t->host != NULL, CUMOE_ERR_OUT_OF_MEMORY, "%d bytes of host memory", 2 * PEER_TEST_BYTES);
  for (int i = 0; i < PEER_TEST_BYTES; i++) t->host[i] = (unsigned char)(i % 251 + 1);
  TRY_CUDA(cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking));
  TRY_CUDA(cudaMemPoolCreate(&t->pool, &wanted));
  TRY_CUDA(cudaMallocFromPoolAsync((void **)&t->theirs, PEER_TEST_BYTES, t->pool, t->stream));
  TRY_CUDA(cudaMallocFromPoolAsync((void **)&t->ours, (size_t)2 * PEER_TEST_BYTES, context->pool.cuda, t->stream));
  return CUMOE_OK;
}

static cumoe_status run_peer_test(struct context *context, int32_t peer, const peer_test *t)
{
  const size_t bytes = PEER_TEST_BYTES;
  TRY_CUDA(cudaMemcpyAsync(t->ours, t->host, bytes, cudaMemcpyHostToDevice, t->stream));
  TRY_CUDA(cudaMemcpyPeerAsync(t->theirs, peer, t->ours, context->device, bytes, t->stream));
  TRY_CUDA(cudaMemcpyPeerAsync(t->ours + bytes, context->device, t->theirs, peer, bytes, t->stream));
  TRY_CUDA(cudaMemcpyAsync(t->host + bytes, t->ours + bytes, bytes, cudaMemcpyDeviceToHost, t->stream));
  TRY_CUDA(cudaStreamSynchronize(t->stream));
  REQUIRE(memcmp(t->host, t->host + bytes, bytes) == 0, CUMOE_ERR_NOT_SUPPORTED,
          "with access granted, what device %d sends to device %d comes back changed: the driver's fault",
          (int)context->device, (int)peer);
  return CUMOE_OK;
}

static void end_peer_test(const peer_test *t, cumoe_status *status)
{
  if (t->ours != NULL) DROP_CUDA(status, cudaFreeAsync(t->ours, t->stream));
  if (t->theirs != NULL) DROP_CUDA(status, cudaFreeAsync(t->theirs, t->stream));
  if (t->stream != NULL) DROP_CUDA(status, cudaStreamSynchronize(t->stream));
  if (t->pool != NULL) DROP_CUDA(status, cudaMemPoolDestroy(t->pool));
  if (t->stream != NULL) DROP_CUDA(status, cudaStreamDestroy(t->stream));
  free(t->host);
}

static cumoe_status test_peer(struct context *context, int32_t peer)
{
  peer_test t = {0};
  cumoe_status status = make_peer_test(context, peer, &t);
  if (status == CUMOE_OK) status = run_peer_test(context, peer, &t);
  end_peer_test(&t, &status);
  return status;
}

static cumoe_status set_access(struct context *context, int32_t peer, enum cudaMemAccessFlags flags)
{
  const struct cudaMemAccessDesc access = {.location = {.type = cudaMemLocationTypeDevice, .id = peer}, .flags = flags};
  TRY_CUDA(cudaMemPoolSetAccess(context->pool.cuda, &access, 1));
  return CUMOE_OK;
}

static cumoe_status grant_peer(struct context *context, int32_t peer)
{
  int count = 0, possible = 0;
  TRY_CUDA(cudaGetDeviceCount(&count));
  REQUIRE(peer < count, CUMOE_ERR_INVALID_ARGUMENT, "peer is %d: CUDA devices here are numbered 0 to %d", (int)peer,
          count - 1);
  TRY_CUDA(cudaDeviceCanAccessPeer(&possible, peer, context->device));
  REQUIRE(possible, CUMOE_ERR_NOT_SUPPORTED, "device %d cannot reach memory of device %d", (int)peer,
          (int)context->device);
  TRY(set_access(context, peer, cudaMemAccessFlagsProtReadWrite));
  cumoe_status status = test_peer(context, peer);
  if (status == CUMOE_OK)
    atomic_fetch_or(&context->pool.peers, (uint64_t)1 << peer);
  else
    AND_THEN(status, set_access(context, peer, cudaMemAccessFlagsProtNone));
  return status;
}

/* One after the other: one that fails takes back what another has granted. */
static pthread_mutex_t peers_lock = PTHREAD_MUTEX_INITIALIZER;

static cumoe_status allow_peer(struct context *context, int32_t peer)
{
  cumoe_status status = CUMOE_OK;
  pthread_mutex_lock(&peers_lock);
  if (!(atomic_load(&context->pool.peers) >> peer & 1)) status = grant_peer(context, peer);
  pthread_mutex_unlock(&peers_lock);
  return status;
}

cumoe_status cumoe_pool_allow_peer(cumoe_context handle, int32_t peer)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  REQUIRE(peer >= 0 && peer < MAX_PEERS, CUMOE_ERR_INVALID_ARGUMENT, "peer is %d, must be 0 .. %d", (int)peer,
          MAX_PEERS - 1);
  REQUIRE(!on_cpu(context), CUMOE_ERR_NOT_SUPPORTED, "memory of the CPU device cannot be granted to a GPU");
  if (peer == context->device) return CUMOE_OK;
  REQUIRE(context->pool.cuda != NULL, CUMOE_ERR_NOT_SUPPORTED, "the memory is allocator %s's to grant",
          context->pool.allocator.name);
  if (atomic_load(&context->pool.peers) >> peer & 1) return CUMOE_OK;
  ON_DEVICE_RELAXED(context, allow_peer(context, peer));
}
