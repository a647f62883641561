/* Buffers: owned memory behind generation-checked handles, which may share it. */
#include "buffer.h"
#include "block.h"
#include "check.h"
#include "context.h"
#include "handles.h"
#include "memory.h"
#include "pool.h"
#include "status.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct record {
  struct context *context;
  block *block; /* to be followed with block_lock held only, and only after find() under it */
  void *data;
  int64_t rows, cols;
  size_t bytes;
  cumoe_stream stream;
  int32_t dtype, device;
} record;

HANDLE_TABLE(buffers, record);

/* Guards blocks: what handles share, and the lists of what is live. Handles are made and ended with it held. */
static pthread_mutex_t block_lock = PTHREAD_MUTEX_INITIALIZER;

void lock_blocks(void)
{
  pthread_mutex_lock(&block_lock);
}

void unlock_blocks(void)
{
  pthread_mutex_unlock(&block_lock);
}

void hold_buffers(bool hold)
{
  if (hold) lock_blocks();
  handles_hold(&buffers, hold);
  if (!hold) unlock_blocks();
}

/* What a handle names; false if it is null, forged or stale. */
static bool find(uint64_t id, record *r)
{
  return handle_find(&buffers, id, r);
}

/* With the lock held: a handle for the block; the first one puts it on its context's list. */
static bool publish_locked(block *b, cumoe_buffer *buffer)
{
  const record r = {.context = b->context,
                    .block = b,
                    .data = b->data,
                    .rows = b->rows,
                    .cols = b->cols,
                    .bytes = b->bytes,
                    .stream = b->stream,
                    .dtype = b->dtype,
                    .device = b->context->device};
  buffer->id = handle_publish(&buffers, &r);
  if (buffer->id && b->handles++ == 0) block_link(b);
  return buffer->id != 0;
}

static cumoe_status no_handle(void)
{
  return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for another buffer handle");
}

/* `stated` is copied; when that fails its memory is still the caller's. */
static cumoe_status publish(const block *stated, cumoe_buffer *buffer)
{
  block *b = block_keep(stated);
  if (!b) return no_handle();
  lock_blocks();
  const bool done = publish_locked(b, buffer);
  unlock_blocks();
  if (done) return CUMOE_OK;
  free(b);
  return no_handle();
}

/* Ends the handle `id`: only one of several racing callers succeeds. *last is the block if that was its last
 * handle, taken off its list, else NULL. */
static bool retire_locked(uint64_t id, block **last)
{
  record was;
  *last = NULL;
  if (!handle_retire(&buffers, id, &was)) return false;
  if (--was.block->handles > 0) return true;
  block_unlink(was.block);
  *last = was.block;
  return true;
}

static bool retire(uint64_t id, block **last)
{
  lock_blocks();
  const bool live = retire_locked(id, last);
  unlock_blocks();
  return live;
}

static cumoe_status stale(const char *what, uint64_t id)
{
  return fail(CUMOE_ERR_STALE_HANDLE, "%s 0x%llx was freed, or never was a buffer", what, (unsigned long long)id);
}

/* ---- making and ending buffers ---- */

static cumoe_status matrix_bytes(cumoe_dtype dtype, int64_t rows, int64_t cols, size_t *bytes)
{
  const size_t element = cumoe_dtype_bytes(dtype);
  int64_t count, total;
  REQUIRE(element, CUMOE_ERR_WRONG_DTYPE, "dtype is %d, not a cumoe_dtype", (int)dtype);
  REQUIRE(rows >= 0 && cols >= 0, CUMOE_ERR_INVALID_ARGUMENT, "rows is %lld, cols is %lld: must not be negative",
          (long long)rows, (long long)cols);
  REQUIRE(!__builtin_mul_overflow(rows, cols, &count) && !__builtin_mul_overflow(count, (int64_t)element, &total) &&
              total < (int64_t)1 << 46,
          CUMOE_ERR_INVALID_ARGUMENT, "rows %lld x cols %lld elements of %zu bytes are more than an address space",
          (long long)rows, (long long)cols, element);
  *bytes = (size_t)total;
  return CUMOE_OK;
}

/* A block that states what the caller asked for. */
static cumoe_status state(cumoe_context handle, cumoe_dtype dtype, int64_t rows, int64_t cols, cumoe_stream stream,
                          cumoe_buffer *buffer, block *b)
{
  struct context *context;
  REQUIRE(buffer, CUMOE_ERR_INVALID_ARGUMENT, "buffer is null");
  buffer->id = 0;
  TRY(find_context(handle, &context));
  *b = (block){.context = context, .rows = rows, .cols = cols, .stream = stream, .dtype = (int32_t)dtype};
  return matrix_bytes(dtype, rows, cols, &b->bytes);
}

/* `b` states everything but where it lies. */
static cumoe_status alloc(block *b, uint32_t flags, cumoe_buffer *buffer)
{
  REQUIRE(flags == 0 || flags == CUMOE_ALLOC_ZERO || flags == CUMOE_ALLOC_POISON, CUMOE_ERR_INVALID_ARGUMENT,
          "flags is 0x%x, must be 0, ZERO or POISON", flags);
  if (!b->file) b->file = "?";
  TRY(block_alloc(b, flags, false));
  cumoe_status status = publish(b, buffer);
  if (status != CUMOE_OK) AND_THEN(status, pool_free(b->context, b->memory, b->taken, b->stream));
  return status;
}

cumoe_status cumoe_buffer_alloc_with_at(cumoe_context handle, cumoe_dtype dtype, int64_t rows, int64_t cols,
                                        uint32_t flags, cumoe_stream stream, const char *file, int line,
                                        cumoe_buffer *buffer)
{
  begin_call("cumoe_buffer_alloc_with");
  block b;
  TRY(state(handle, dtype, rows, cols, stream, buffer, &b));
  b.file = file;
  b.line = line;
  return alloc(&b, flags, buffer);
}

cumoe_status cumoe_buffer_alloc_at(cumoe_context handle, cumoe_dtype dtype, int64_t rows, int64_t cols,
                                   cumoe_stream stream, const char *file, int line, cumoe_buffer *buffer)
{
  begin_call("cumoe_buffer_alloc");
  block b;
  TRY(state(handle, dtype, rows, cols, stream, buffer, &b));
  b.file = file;
  b.line = line;
  return alloc(&b, 0, buffer);
}

cumoe_status cumoe_buffer_adopt(cumoe_context handle, void *data, cumoe_dtype dtype, int64_t rows, int64_t cols,
                                cumoe_stream stream, cumoe_buffer *buffer)
{
  begin_call(__func__);
  block b = {0};
  bool pooled = false;
  TRY(state(handle, dtype, rows, cols, stream, buffer, &b));
  REQUIRE(data || b.bytes == 0, CUMOE_ERR_INVALID_ARGUMENT, "data is null");
  TRY(memory_inspect(b.context, data, b.bytes, &pooled));
  b.kind = pooled ? BLOCK_FOREIGN_POOLED : BLOCK_FOREIGN;
  b.memory = b.data = data;
  b.file = "(adopted)";
  return publish(&b, buffer);
}

/* Memory of cudaMalloc: cudaFree looks at no stream, so the home stream has to be passed first. */
static bool needs_wait(uint64_t id)
{
  record r;
  lock_blocks();
  const bool plain = find(id, &r) && r.block->kind == BLOCK_FOREIGN;
  unlock_blocks();
  return plain;
}

cumoe_status cumoe_buffer_free(cumoe_buffer *buffer)
{
  begin_call(__func__);
  record r;
  block *last;
  REQUIRE(buffer, CUMOE_ERR_INVALID_ARGUMENT, "buffer is null");
  if (buffer->id == 0) return CUMOE_OK;
  if (!find(buffer->id, &r)) return stale("buffer", buffer->id);
  TRY(check_process(r.context));
  if (r.data && needs_wait(buffer->id))
    TRY(memory_wait(r.context, r.stream));
  else if (r.data)
    TRY(refuse_capture(r.context, r.stream)); /* a graph may not free what it did not allocate */
  if (!retire(buffer->id, &last)) return stale("buffer", buffer->id);
  buffer->id = 0;
  return last ? block_end(last) : CUMOE_OK;
}

cumoe_status cumoe_buffer_retain(cumoe_buffer buffer, cumoe_buffer *another)
{
  begin_call(__func__);
  record r;
  REQUIRE(another, CUMOE_ERR_INVALID_ARGUMENT, "another is null");
  another->id = 0;
  if (!find(buffer.id, &r)) return stale("buffer", buffer.id);
  TRY(check_process(r.context));
  lock_blocks();
  const bool live = find(buffer.id, &r), done = live && publish_locked(r.block, another);
  unlock_blocks();
  if (!live) return stale("buffer", buffer.id);
  return done ? CUMOE_OK : no_handle();
}

/* The event takes the place of an earlier one of the same stream. */
static cumoe_status declare_use(uint64_t id, cumoe_stream stream, cudaEvent_t *event)
{
  record r;
  block_use *use = NULL;
  lock_blocks();
  const bool live = find(id, &r);
  if (live) use = block_use_on(r.block, stream, true);
  if (use) {
    const cudaEvent_t earlier = use->event;
    use->event = *event;
    use->call = NULL;
    *event = earlier;
  }
  unlock_blocks();
  if (!live) return stale("buffer", id);
  return use ? CUMOE_OK : fail(CUMOE_ERR_OUT_OF_MEMORY, "%zu bytes of host memory", sizeof *use);
}

cumoe_status cumoe_buffer_record_use(cumoe_buffer buffer, cumoe_stream stream)
{
  begin_call(__func__);
  record r;
  cudaEvent_t event = NULL;
  if (!find(buffer.id, &r)) return stale("buffer", buffer.id);
  TRY(check_process(r.context));
  if (stream == r.stream || !r.data) return CUMOE_OK;
  TRY(memory_mark(r.context, stream, &event));
  cumoe_status status = declare_use(buffer.id, stream, &event);
  AND_THEN(status, memory_unmark(r.context, event));
  return status;
}

/* Its home stream comes behind what its recorded uses may still write. */
static cumoe_status follow_uses(uint64_t id)
{
  record r;
  lock_blocks();
  const cumoe_status status = find(id, &r) ? block_follow(r.block) : CUMOE_OK;
  unlock_blocks();
  return status;
}

/* What the caller gets of memory between red zones: a copy without them. */
static cumoe_status copy_out(uint64_t id, const record *r, void **data)
{
  TRY(pool_alloc(r->context, r->bytes, r->stream, data));
  cumoe_status status = follow_uses(id);
  if (status == CUMOE_OK)
    status =
        memory_copy(r->context, *data, r->bytes, r->data, r->bytes, r->bytes, 1, cudaMemcpyDeviceToDevice, r->stream);
  if (status != CUMOE_OK) AND_THEN(status, pool_free(r->context, *data, r->bytes, r->stream));
  return status;
}

/* Ends a handle that shares its memory with no other. */
static cumoe_status retire_alone(uint64_t id, block **last)
{
  record r;
  lock_blocks();
  const bool live = find(id, &r), shared = live && r.block->handles > 1;
  if (live && !shared) (void)retire_locked(id, last);
  unlock_blocks();
  if (!live) return stale("buffer", id);
  REQUIRE(!shared, CUMOE_ERR_INVALID_ARGUMENT, "other handles share the memory of buffer 0x%llx",
          (unsigned long long)id);
  return CUMOE_OK;
}

static bool between_zones(uint64_t id)
{
  record r;
  lock_blocks();
  const bool zones = find(id, &r) && r.block->data != r.block->memory;
  unlock_blocks();
  return zones;
}

cumoe_status cumoe_buffer_release(cumoe_buffer *buffer, void **data)
{
  begin_call(__func__);
  record r;
  block *last = NULL;
  void *copy = NULL;
  REQUIRE(buffer && data, CUMOE_ERR_INVALID_ARGUMENT, "%s is null", buffer ? "data" : "buffer");
  *data = NULL;
  if (!find(buffer->id, &r)) return stale("buffer", buffer->id);
  TRY(check_process(r.context));
  if (between_zones(buffer->id)) TRY(copy_out(buffer->id, &r, &copy));
  cumoe_status status = retire_alone(buffer->id, &last);
  if (status != CUMOE_OK) {
    AND_THEN(status, pool_free(r.context, copy, r.bytes, r.stream));
    return status;
  }
  buffer->id = 0;
  *data = copy ? copy : r.data;
  if (copy) pool_forget(r.context, r.bytes);
  return copy ? block_end(last) : block_forget(last);
}

static cumoe_status pinned_abandon(struct context *context)
{
  cumoe_status first = CUMOE_OK;
  lock_blocks();
  while (context->pinned) {
    block *b = context->pinned;
    block_unlink(b);
    AND_THEN(first, block_drop(b));
  }
  unlock_blocks();
  return first;
}

cumoe_status buffers_abandon(struct context *context)
{
  uint64_t id;
  record r;
  block *last;
  cumoe_status first = CUMOE_OK;
  for (uint32_t i = 0; atomic_load(&context->live_buffers) > 0 && handle_at(&buffers, i, &id, &r); ++i) {
    if (!id || r.context != context || !retire(id, &last) || !last) continue;
    AND_THEN(first, block_drop(last));
  }
  AND_THEN(first, pinned_abandon(context));
  return first;
}

/* ---- facts and views ---- */

cumoe_status cumoe_buffer_get_info(cumoe_buffer buffer, cumoe_buffer_info *info)
{
  begin_call(__func__);
  record r;
  TRY(check_struct("info", info));
  cumoe_buffer_info now;
  lock_blocks();
  const bool live = find(buffer.id, &r);
  if (live) now = block_info(r.block);
  unlock_blocks();
  if (live) give_struct(&now, info);
  return live ? CUMOE_OK : stale("buffer", buffer.id);
}

cumoe_view_mut cumoe_buffer_view_mut(cumoe_buffer buffer)
{
  record r;
  if (!find(buffer.id, &r)) return (cumoe_view_mut){.owner = buffer.id, .device = CUMOE_DEVICE_ANY};
  return (cumoe_view_mut){r.data, r.rows, r.cols, r.cols, buffer.id, r.device, r.dtype};
}

cumoe_view cumoe_buffer_view(cumoe_buffer buffer)
{
  return cumoe_const(cumoe_buffer_view_mut(buffer));
}

/* First to last element within the buffer, without an overflow on the way. */
static bool within(const cumoe_view *v, const record *r)
{
  const uint64_t element = cumoe_dtype_bytes((cumoe_dtype)v->dtype);
  const uintptr_t begin = (uintptr_t)v->data, base = (uintptr_t)r->data;
  uint64_t elements, bytes;
  if (begin < base || begin - base > r->bytes) return false;
  if (__builtin_mul_overflow((uint64_t)v->rows - 1, (uint64_t)v->ld, &elements)) return false;
  if (__builtin_add_overflow(elements, (uint64_t)v->cols, &elements)) return false;
  return !__builtin_mul_overflow(elements, element, &bytes) && bytes <= r->bytes - (begin - base);
}

/* At debug level 1: a use on another stream than the home stream, to be declared before the buffer is freed. */
static void note_use(uint64_t id)
{
  const char *call;
  cumoe_stream stream;
  record r;
  if (!running_call(&call, &stream)) return;
  lock_blocks();
  if (find(id, &r) && r.stream != stream && r.bytes != 0) {
    block_use *use = block_use_on(r.block, stream, false);
    if (use && !use->call) use->call = call;
  }
  unlock_blocks();
}

cumoe_status check_owner(struct context *context, const char *what, const cumoe_view *v)
{
  record r;
  if (v->owner == 0) return CUMOE_OK;
  REQUIRE(find(v->owner, &r), CUMOE_ERR_STALE_HANDLE, "%s is a view of a buffer that was freed", what);
  REQUIRE(r.context == context, CUMOE_ERR_WRONG_DEVICE, "%s is a view of a buffer of another context (device %d)", what,
          (int)r.device);
  REQUIRE(cumoe_dtype_bytes((cumoe_dtype)v->dtype), CUMOE_ERR_WRONG_DTYPE, "%s.dtype is %d, not a cumoe_dtype", what,
          (int)v->dtype);
  REQUIRE(v->rows >= 0 && v->cols >= 0 && v->ld >= v->cols, CUMOE_ERR_INVALID_ARGUMENT,
          "%s is [%lld, %lld] with ld %lld: none may be negative, nor ld less than the columns", what,
          (long long)v->rows, (long long)v->cols, (long long)v->ld);
  REQUIRE(v->rows == 0 || v->cols == 0 || within(v, &r), CUMOE_ERR_OUT_OF_BOUNDS,
          "%s [%lld, %lld] with ld %lld is not within its buffer of %zu bytes", what, (long long)v->rows,
          (long long)v->cols, (long long)v->ld, r.bytes);
  if (context->debug >= 1) note_use(v->owner);
  return CUMOE_OK;
}

bool buffer_lives(uint64_t id)
{
  return handle_lives(&buffers, id);
}

cumoe_status check_live(const char *what, uint64_t id)
{
  return id == 0 || buffer_lives(id) ? CUMOE_OK : stale(what, id);
}

int64_t cumoe_buffer_live(cumoe_context handle, size_t *bytes)
{
  begin_call(__func__);
  struct context *context;
  if (bytes) *bytes = 0;
  if (find_context(handle, &context) != CUMOE_OK) return 0;
  if (bytes) *bytes = atomic_load(&context->live_bytes);
  return atomic_load(&context->live_buffers);
}
