/* The shim's memory: allocations, pools, copies and fills. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { GAP = 1 << 16 };

/* Device addresses: reserved, never backed. */
static const size_t ARENA = (size_t)1 << 34;
static uintptr_t arenas[MAX_DEVICES], tops[MAX_DEVICES];

static uintptr_t take_addresses(int device, size_t bytes)
{
  if (arenas[device] == 0) {
    void *made = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return 0;
    arenas[device] = tops[device] = ((uintptr_t)made + GAP) / GAP * GAP;
  }
  const size_t step = (bytes + 2 * GAP) / GAP * GAP;
  if (tops[device] + step > arenas[device] + ARENA - GAP) tops[device] = arenas[device];
  const uintptr_t at = tops[device];
  tops[device] += step;
  return at;
}

/* Pages of the block alone: what is beside them stays out of reach. */
static unsigned char *touchable(uintptr_t at, size_t bytes)
{
  return mprotect((void *)at, bytes, PROT_READ | PROT_WRITE) == 0 ? (unsigned char *)at : NULL;
}

static void untouchable(uintptr_t at, size_t bytes)
{
  (void)madvise((void *)at, bytes, MADV_DONTNEED);
  (void)mprotect((void *)at, bytes, PROT_NONE);
}

static cudaError_t device_block(void **out, size_t bytes, struct CUmemPoolHandle_st *pool)
{
  const int device = pool != NULL ? pool->object.device : current_device();
  *out = NULL;
  if (bytes == 0) return pool != NULL ? cudaErrorInvalidValue : cudaSuccess;
  if (bytes > shim.memory || shim_device_bytes(device) + bytes > shim.memory) return cudaErrorMemoryAllocation;
  block *b = (block *)object_new(DEVICE_BLOCK, sizeof *b);
  b->object.device = device;
  b->at = take_addresses(device, bytes);
  b->bytes = bytes;
  b->backing = shim.emulates ? touchable(b->at, bytes) : __real_calloc(1, bytes);
  b->users = __real_calloc(1, sizeof *b->users);
  *b->users = 1;
  if (bytes < 1 << 20) memset(b->backing, 0xcd, bytes); /* larger ones would cost real memory */
  b->pool = pool;
  if (pool != NULL) {
    pool->blocks++;
    pool->used += bytes;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
  }
  *out = (void *)b->at;
  return cudaSuccess;
}

block *alias_of(const block *of)
{
  block *b = (block *)object_new(DEVICE_BLOCK, sizeof *b);
  b->object.device = of->object.device;
  b->at = take_addresses(b->object.device, of->bytes);
  b->bytes = of->bytes;
  b->backing = of->backing;
  b->users = of->users;
  b->alias = true;
  ++*b->users;
  return b;
}

void end_block(block *b)
{
  struct CUmemPoolHandle_st *pool = b->pool;
  if (!b->alias && *b->users > 1) note_text("  freed while another process has it open");
  if (pool != NULL) {
    pool->blocks--;
    pool->used -= b->bytes;
    if (pool->ended && pool->blocks == 0) object_end(&pool->object);
  }
  if (--*b->users == 0) {
    if ((uintptr_t)b->backing == b->at)
      untouchable(b->at, b->bytes);
    else
      __real_free(b->backing);
    __real_free(b->users);
  }
  object_end(&b->object);
}

block *block_at(const void *at)
{
  block *b = block_holding(at, 0);
  return b != NULL && b->at == (uintptr_t)at ? b : NULL;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT | SHIM_UNSAFE, "%zu", bytes);
  if (error == cudaSuccess) error = device_block(out, bytes, NULL);
  return shim_end(error);
}

cudaError_t cudaFree(void *at)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_SYNC | SHIM_CONTEXT | SHIM_UNSAFE, "%s", at ? "memory" : "nothing");
  block *b = at != NULL ? block_at(at) : NULL;
  if (b != NULL && !b->alias)
    end_block(b);
  else if (at != NULL && error == cudaSuccess)
    error = cudaErrorInvalidValue;
  return shim_end(error);
}

/* ---- pinned host memory ---- */

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT | SHIM_UNSAFE, "%zu flags %u", bytes, flags);
  if (error == cudaSuccess) {
    block *b = (block *)object_new(HOST_BLOCK, sizeof *b);
    b->bytes = bytes;
    b->backing = __real_malloc(bytes + 2 * GUARD);
    memset(b->backing, GUARD_BYTE, bytes + 2 * GUARD);
    b->at = (uintptr_t)b->backing + GUARD;
    *out = (void *)b->at;
  }
  return shim_end(error);
}

static block *host_block_at(const void *at)
{
  const uintptr_t guarded = (uintptr_t)at - GUARD;
  for (object *o = shim_objects(); o != NULL; o = o->next)
    if (o->kind == HOST_BLOCK && (uintptr_t)((block *)o)->backing == guarded) return (block *)o;
  return NULL;
}

cudaError_t cudaFreeHost(void *at)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_SYNC | SHIM_CONTEXT | SHIM_UNSAFE, "%s", at ? "memory" : "nothing");
  block *b = at != NULL ? host_block_at(at) : NULL;
  if (b != NULL) {
    if (!shim_guards_whole()) note_text("  guards broken");
    __real_free(b->backing);
    object_end(&b->object);
  } else if (at != NULL && error == cudaSuccess) {
    error = cudaErrorInvalidValue;
  }
  return shim_end(error);
}

/* ---- pools ---- */

cudaError_t cudaMemPoolCreate(cudaMemPool_t *out, const struct cudaMemPoolProps *wanted)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT, "device %d", wanted->location.id);
  if (error == cudaSuccess && (wanted->location.id < 0 || wanted->location.id >= shim.devices))
    error = cudaErrorInvalidValue;
  if (error == cudaSuccess) {
    *out = (cudaMemPool_t)object_new(POOL, sizeof **out);
    (*out)->object.device = wanted->location.id;
  }
  return shim_end(error);
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool)
{
  cudaError_t error = BEGIN(SHIM_ALLOC, "%s", "");
  if (object_find(POOL, pool) == NULL || pool->ended)
    error = error ? error : cudaErrorInvalidValue;
  else if (pool->blocks == 0)
    object_end(&pool->object);
  else
    pool->ended = true;
  return shim_end(error);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
  cudaError_t error = BEGIN(0, "%d", (int)attribute);
  if (error == cudaSuccess && object_find(POOL, pool) == NULL) error = cudaErrorInvalidValue;
  if (error == cudaSuccess && attribute == cudaMemPoolAttrReleaseThreshold) memcpy(&pool->threshold, value, 8);
  return shim_end(error);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep)
{
  cudaError_t error = BEGIN(SHIM_ALLOC, "%zu", keep);
  if (error == cudaSuccess && object_find(POOL, pool) == NULL) error = cudaErrorInvalidValue;
  return shim_end(error);
}

cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, cudaMemPool_t pool, cudaStream_t stream)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT, "%zu", bytes);
  if (error == cudaSuccess) error = stream_takes_work(stream);
  if (error == cudaSuccess && object_find(POOL, pool) == NULL) error = cudaErrorInvalidValue;
  if (error == cudaSuccess) error = device_block(out, bytes, pool);
  return shim_end(error);
}

cudaError_t cudaFreeAsync(void *at, cudaStream_t stream)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT, "%s", "memory");
  block *b = block_at(at);
  if (error == cudaSuccess) error = stream_takes_work(stream);
  if (error == cudaSuccess && stream_of(stream)->graph != NULL)
    error = cudaErrorInvalidValue; /* not from the graph */
  else if (b != NULL)
    end_block(b);
  else if (error == cudaSuccess)
    error = cudaErrorInvalidValue;
  return shim_end(error);
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
  cudaError_t error = BEGIN(SHIM_QUERY | SHIM_CONTEXT, "%s", "");
  if (error == cudaSuccess) {
    *total = shim.memory;
    *available = shim.memory - shim_device_bytes(current_device());
  }
  return shim_end(error);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *facts, const void *at)
{
  cudaError_t error = BEGIN(SHIM_QUERY | SHIM_CONTEXT, "%s", "");
  if (error == cudaSuccess) {
    block *b = block_holding(at, 1), *h = host_block_at(at);
    memset(facts, 0, sizeof *facts);
    facts->type = b != NULL ? cudaMemoryTypeDevice : h != NULL ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    facts->device = b != NULL ? b->object.device : h != NULL ? h->object.device : -2;
  }
  return shim_end(error);
}

/* ---- copies and fills ---- */

/* Where the bytes of a row really are; NULL: device memory that is not there. Host memory is taken as it is. */
static unsigned char *bytes_at(const void *at, size_t bytes, bool device)
{
  if (!device) return (unsigned char *)(uintptr_t)at;
  block *b = block_holding(at, bytes);
  return b != NULL ? b->backing + ((uintptr_t)at - b->at) : NULL;
}

static bool in_arenas(const void *at)
{
  for (int d = 0; d < MAX_DEVICES; d++)
    if (arenas[d] && (uintptr_t)at >= arenas[d] && (uintptr_t)at < arenas[d] + ARENA - GAP) return true;
  return false;
}

static bool is_lent(const void *at)
{
  return (uintptr_t)at >= SHIM_LENT && (uintptr_t)at < SHIM_LENT_END;
}

static bool can_fill(const void *at)
{
  return in_arenas(at) || is_lent(at) || host_block_at(at) != NULL;
}

cudaError_t shim_move(const node *n)
{
  if (n->src == NULL && is_lent(n->dst)) return cudaSuccess;
  const bool to_device = in_arenas(n->dst), from_device = n->src != NULL && in_arenas(n->src);
  for (size_t r = 0; r < n->rows; r++) {
    unsigned char *to = bytes_at((char *)n->dst + r * n->dst_pitch, n->width, to_device);
    const unsigned char *from =
        n->src == NULL ? to : bytes_at((const char *)n->src + r * n->src_pitch, n->width, from_device);
    if (to == NULL || from == NULL) return cudaErrorInvalidValue;
    if (n->src == NULL)
      memset(to, n->byte, n->width);
    else
      memmove(to, from, n->width);
  }
  return cudaSuccess;
}

/* The kind has to tell the truth. */
static cudaError_t kind_fits(const node *n, enum cudaMemcpyKind kind)
{
  const bool to = in_arenas(n->dst), from = in_arenas(n->src);
  if (kind == cudaMemcpyHostToDevice) return to && !from ? cudaSuccess : cudaErrorInvalidValue;
  if (kind == cudaMemcpyDeviceToHost) return !to && from ? cudaSuccess : cudaErrorInvalidValue;
  if (kind == cudaMemcpyDeviceToDevice) return to && from ? cudaSuccess : cudaErrorInvalidValue;
  return cudaSuccess;
}

/* Now, or as a node of the graph that the stream is captured into. */
static cudaError_t put(const node *n, cudaStream_t stream)
{
  cudaError_t error = stream_takes_work(stream);
  if (error != cudaSuccess) return error;
  struct CUstream_st *s = stream_of(stream);
  if (s->graph == NULL) return shim_move(n);
  graph_add(s->graph, n);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t rows,
                              enum cudaMemcpyKind kind, cudaStream_t stream)
{
  const node n = {.dst = dst, .src = src, .dst_pitch = dst_pitch, .src_pitch = src_pitch, .width = width, .rows = rows};
  cudaError_t error = BEGIN(SHIM_MOVE | SHIM_CONTEXT, "%zu x %zu, pitches %zu, %zu, kind %d", rows, width, dst_pitch,
                            src_pitch, (int)kind);
  if (error == cudaSuccess &&
      (dst_pitch < width || src_pitch < width || dst_pitch > INT32_MAX || src_pitch > INT32_MAX))
    error = cudaErrorInvalidPitchValue;
  if (error == cudaSuccess) error = kind_fits(&n, kind);
  if (error == cudaSuccess) error = put(&n, stream);
  return shim_end(error);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
  const node n = {.dst = dst, .src = src, .dst_pitch = bytes, .src_pitch = bytes, .width = bytes, .rows = 1};
  cudaError_t error = BEGIN(SHIM_MOVE | SHIM_CONTEXT, "%zu, kind %d", bytes, (int)kind);
  if (error == cudaSuccess) error = kind_fits(&n, kind);
  if (error == cudaSuccess) error = put(&n, stream);
  return shim_end(error);
}

/* A fill also reaches pinned memory, through its device address. */
cudaError_t cudaMemset2DAsync(void *dst, size_t pitch, int byte, size_t width, size_t rows, cudaStream_t stream)
{
  const node n = {.dst = dst, .dst_pitch = pitch, .src_pitch = pitch, .width = width, .rows = rows, .byte = byte};
  cudaError_t error = BEGIN(SHIM_MOVE | SHIM_CONTEXT, "%zu x %zu, pitch %zu, byte %d", rows, width, pitch, byte);
  if (error == cudaSuccess && (pitch < width || pitch > INT32_MAX)) error = cudaErrorInvalidPitchValue;
  if (error == cudaSuccess && !can_fill(dst)) error = cudaErrorInvalidValue;
  if (error == cudaSuccess) error = put(&n, stream);
  return shim_end(error);
}

cudaError_t cudaMemsetAsync(void *dst, int byte, size_t bytes, cudaStream_t stream)
{
  const node n = {.dst = dst, .dst_pitch = bytes, .src_pitch = bytes, .width = bytes, .rows = 1, .byte = byte};
  cudaError_t error = BEGIN(SHIM_MOVE | SHIM_CONTEXT, "%zu, byte %d", bytes, byte);
  if (error == cudaSuccess && !can_fill(dst)) error = cudaErrorInvalidValue;
  if (error == cudaSuccess) error = put(&n, stream);
  return shim_end(error);
}
