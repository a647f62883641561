/*
 * Buffers: owned memory behind generation-checked handles.
 *
 * One table of slots for the process, grown in chunks that never move or go away, so a lookup is two loads and a
 * compare and needs no lock, and a stale handle finds a slot whose generation has moved on. handle = generation << 32 | slot + 1;
 * a slot is live while its generation is odd. Making and ending buffers takes the table's mutex.
 */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { CHUNK_SLOTS = 1024, MAX_CHUNKS = 4096 };

typedef struct slot {
  _Atomic uint32_t generation; /* odd: live */
  int32_t next_free;           /* slot + 1 */
  bool foreign, pooled;        /* adopted; and from a pool */
  cumoe_context context;
  void *data;
  int64_t rows, cols;
  size_t bytes;
  cumoe_stream stream;
  const char *file;
  int32_t dtype, line, device;
} slot;

static _Atomic(slot *) chunks[MAX_CHUNKS];
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t slot_count;
static int32_t first_free; /* slot + 1 */

/* ---- the table ---- */

/* The slot a handle names, or NULL if it is null, forged or stale. */
static slot *find(uint64_t id)
{
  const uint32_t index = (uint32_t)id - 1, generation = (uint32_t)(id >> 32);
  if ((uint32_t)id == 0 || !(generation & 1) || index / CHUNK_SLOTS >= MAX_CHUNKS) return NULL;
  slot *chunk = atomic_load_explicit(&chunks[index / CHUNK_SLOTS], memory_order_acquire);
  if (!chunk) return NULL;
  slot *s = &chunk[index % CHUNK_SLOTS];
  return atomic_load_explicit(&s->generation, memory_order_acquire) == generation ? s : NULL;
}

static slot *slot_at(uint32_t index)
{
  return &atomic_load_explicit(&chunks[index / CHUNK_SLOTS], memory_order_relaxed)[index % CHUNK_SLOTS];
}

/* With the lock held: a dead slot's index + 1, or 0 when there is no memory. */
static uint32_t take_slot(void)
{
  if (first_free) {
    const uint32_t taken = (uint32_t)first_free;
    first_free = slot_at(taken - 1)->next_free;
    return taken;
  }
  if (slot_count == (uint32_t)CHUNK_SLOTS * MAX_CHUNKS) return 0;
  if (slot_count % CHUNK_SLOTS == 0) {
    slot *chunk = calloc(CHUNK_SLOTS, sizeof *chunk);
    if (!chunk) return 0;
    atomic_store_explicit(&chunks[slot_count / CHUNK_SLOTS], chunk, memory_order_release);
  }
  return ++slot_count;
}

/* Fills a slot and makes it live; `like` has everything but the bookkeeping. */
static cumoe_status publish(const slot *like, cumoe_buffer *buffer)
{
  pthread_mutex_lock(&table_lock);
  const uint32_t name = take_slot();
  if (name) {
    slot *s = slot_at(name - 1);
    const uint32_t generation = (atomic_load_explicit(&s->generation, memory_order_relaxed) + 1) | 1;
    s->foreign = like->foreign;
    s->pooled = like->pooled;
    s->context = like->context;
    s->data = like->data;
    s->rows = like->rows;
    s->cols = like->cols;
    s->bytes = like->bytes;
    s->stream = like->stream;
    s->file = like->file;
    s->dtype = like->dtype;
    s->line = like->line;
    s->device = like->context->device;
    atomic_store_explicit(&s->generation, generation, memory_order_release);
    buffer->id = (uint64_t)generation << 32 | name;
    atomic_fetch_add(&like->context->live_buffers, 1);
    atomic_fetch_add(&like->context->live_bytes, like->bytes);
  }
  pthread_mutex_unlock(&table_lock);
  return name ? CUMOE_OK : fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for another buffer handle");
}

/* Ends the buffer that `id` names and hands out what it was: only one of several racing callers succeeds. */
static bool retire(uint64_t id, slot *was)
{
  pthread_mutex_lock(&table_lock);
  slot *s = find(id);
  if (s) {
    was->foreign = s->foreign;
    was->pooled = s->pooled;
    was->context = s->context;
    was->data = s->data;
    was->bytes = s->bytes;
    was->stream = s->stream;
    atomic_fetch_add_explicit(&s->generation, 1, memory_order_release);
    s->next_free = first_free;
    first_free = (int32_t)(uint32_t)id;
    atomic_fetch_sub(&was->context->live_buffers, 1);
    atomic_fetch_sub(&was->context->live_bytes, was->bytes);
  }
  pthread_mutex_unlock(&table_lock);
  return s != NULL;
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
  REQUIRE(rows >= 0 && cols >= 0, CUMOE_ERR_INVALID_ARGUMENT, "rows is %lld, cols is %lld: must not be negative", (long long)rows, (long long)cols);
  REQUIRE(!__builtin_mul_overflow(rows, cols, &count) && !__builtin_mul_overflow(count, (int64_t)element, &total) && total < (int64_t)1 << 46,
          CUMOE_ERR_INVALID_ARGUMENT, "%lld x %lld elements of %zu bytes are more than an address space", (long long)rows, (long long)cols, element);
  *bytes = (size_t)total;
  return CUMOE_OK;
}

cumoe_status cumoe_buffer_alloc_at(cumoe_context context, cumoe_dtype dtype, int64_t rows, int64_t cols, cumoe_stream stream, const char *file,
                                   int line, cumoe_buffer *buffer)
{
  begin_call("cumoe_buffer_alloc");
  REQUIRE(buffer, CUMOE_ERR_INVALID_ARGUMENT, "buffer is null");
  buffer->id = 0;
  slot s = {.context = context, .rows = rows, .cols = cols, .stream = stream, .file = file, .line = line, .dtype = (int32_t)dtype};
  TRY(check_context(context));
  TRY(matrix_bytes(dtype, rows, cols, &s.bytes));
  if (s.bytes) TRY(memory_alloc(context, s.bytes, stream, &s.data));
  const cumoe_status status = publish(&s, buffer);
  if (status != CUMOE_OK && s.data) (void)memory_free(context, s.data, stream);
  return status;
}

cumoe_status cumoe_buffer_adopt(cumoe_context context, void *data, cumoe_dtype dtype, int64_t rows, int64_t cols, cumoe_stream stream,
                                cumoe_buffer *buffer)
{
  begin_call(__func__);
  REQUIRE(buffer, CUMOE_ERR_INVALID_ARGUMENT, "buffer is null");
  buffer->id = 0;
  slot s = {.context = context, .data = data, .rows = rows, .cols = cols, .stream = stream, .file = "(adopted)", .dtype = (int32_t)dtype, .foreign = true};
  TRY(check_context(context));
  TRY(matrix_bytes(dtype, rows, cols, &s.bytes));
  REQUIRE(data || s.bytes == 0, CUMOE_ERR_INVALID_ARGUMENT, "data is null");
  TRY(memory_inspect(context, data, &s.pooled));
  return publish(&s, buffer);
}

cumoe_status cumoe_buffer_free(cumoe_buffer *buffer)
{
  begin_call(__func__);
  slot was;
  if (!buffer || buffer->id == 0) return CUMOE_OK;
  if (!retire(buffer->id, &was)) return stale("buffer", buffer->id);
  buffer->id = 0;
  if (was.foreign) return memory_free_foreign(was.context, was.data, was.pooled, was.stream);
  return memory_free(was.context, was.data, was.stream);
}

cumoe_status cumoe_buffer_release(cumoe_buffer *buffer, void **data)
{
  begin_call(__func__);
  slot was;
  REQUIRE(buffer && data, CUMOE_ERR_INVALID_ARGUMENT, "%s is null", buffer ? "data" : "buffer");
  *data = NULL;
  if (!retire(buffer->id, &was)) return stale("buffer", buffer->id);
  buffer->id = 0;
  *data = was.data;
  return CUMOE_OK;
}

void buffers_abandon(cumoe_context context)
{
  for (uint32_t i = 0;; ++i) {
    slot was = {0};
    uint64_t id = 0;
    pthread_mutex_lock(&table_lock);
    const bool more = i < slot_count;
    if (more) {
      const slot *s = slot_at(i);
      const uint32_t generation = atomic_load_explicit(&s->generation, memory_order_relaxed);
      if (generation & 1 && s->context == context) id = (uint64_t)generation << 32 | (i + 1);
    }
    pthread_mutex_unlock(&table_lock);
    if (!more) return;
    if (id && retire(id, &was) && was.data) memory_drop(context, was.data);
  }
}

/* ---- facts and views ---- */

cumoe_status cumoe_buffer_get_info(cumoe_buffer buffer, cumoe_buffer_info *info)
{
  begin_call(__func__);
  REQUIRE(info, CUMOE_ERR_INVALID_ARGUMENT, "info is null");
  REQUIRE(info->size == sizeof *info, CUMOE_ERR_INVALID_ARGUMENT, "info.size is %u, must be %zu", info->size, sizeof *info);
  const slot *s = find(buffer.id);
  if (!s) return stale("buffer", buffer.id);
  *info = (cumoe_buffer_info){.size = sizeof *info, .device = s->device, .dtype = s->dtype, .line = s->line, .rows = s->rows, .cols = s->cols,
                              .bytes = s->bytes, .data = s->data, .stream = s->stream, .file = s->file};
  return CUMOE_OK;
}

cumoe_view_mut cumoe_buffer_view_mut(cumoe_buffer buffer)
{
  const slot *s = find(buffer.id);
  if (!s) return (cumoe_view_mut){.owner = buffer.id, .device = CUMOE_DEVICE_ANY};
  return (cumoe_view_mut){s->data, s->rows, s->cols, s->cols, buffer.id, s->device, s->dtype};
}

cumoe_view cumoe_buffer_view(cumoe_buffer buffer) { return cumoe_const(cumoe_buffer_view_mut(buffer)); }

cumoe_status check_owner(cumoe_context context, const char *what, const cumoe_view *v)
{
  if (v->owner == 0) return CUMOE_OK;
  const slot *s = find(v->owner);
  if (!s) return fail(CUMOE_ERR_STALE_HANDLE, "%s is a view of a buffer that was freed", what);
  REQUIRE(s->context == context, CUMOE_ERR_WRONG_DEVICE, "%s is a view of a buffer of another context (device %d)", what, (int)s->device);
  if (v->rows <= 0 || v->cols <= 0) return CUMOE_OK;
  const uint64_t element = cumoe_dtype_bytes((cumoe_dtype)v->dtype);
  uint64_t last, elements, bytes;
  const uintptr_t begin = (uintptr_t)v->data, base = (uintptr_t)s->data;
  const bool fits = v->ld >= 0 && element && begin >= base && !__builtin_mul_overflow((uint64_t)v->rows - 1, (uint64_t)v->ld, &last) &&
                    !__builtin_add_overflow(last, (uint64_t)v->cols, &elements) && !__builtin_mul_overflow(elements, element, &bytes) &&
                    begin - base <= s->bytes && bytes <= s->bytes - (begin - base);
  REQUIRE(fits, CUMOE_ERR_OUT_OF_BOUNDS, "%s [%lld, %lld] with ld %lld reaches past its buffer of %zu bytes", what, (long long)v->rows,
          (long long)v->cols, (long long)v->ld, s->bytes);
  return CUMOE_OK;
}

int64_t cumoe_buffer_live(cumoe_context context, size_t *bytes)
{
  begin_call(__func__);
  if (bytes) *bytes = 0;
  if (check_context(context) != CUMOE_OK) return 0;
  if (bytes) *bytes = atomic_load(&context->live_bytes);
  return atomic_load(&context->live_buffers);
}

/* ---- slices ---- */

static cumoe_status slice(const char *what, int64_t first, int64_t count, int64_t extent)
{
  REQUIRE(first >= 0 && count >= 0 && first <= extent && count <= extent - first, CUMOE_ERR_OUT_OF_BOUNDS,
          "%s %lld .. %lld + %lld are not all within 0 .. %lld", what, (long long)first, (long long)first, (long long)count, (long long)extent);
  return CUMOE_OK;
}

static cumoe_status slice_view(cumoe_view_mut v, int64_t first_row, int64_t rows, int64_t first_col, int64_t cols, cumoe_view_mut *out)
{
  REQUIRE(out, CUMOE_ERR_INVALID_ARGUMENT, "slice is null");
  if (v.owner && !find(v.owner)) return stale("view of buffer", v.owner);
  const int64_t element = (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  REQUIRE(element, CUMOE_ERR_WRONG_DTYPE, "view.dtype is %d, not a cumoe_dtype", (int)v.dtype);
  TRY(slice("rows", first_row, rows, v.rows));
  TRY(slice("cols", first_col, cols, v.cols));
  *out = v;
  if (v.data) out->data = (char *)v.data + (first_row * v.ld + first_col) * element;
  out->rows = rows;
  out->cols = cols;
  return CUMOE_OK;
}

static cumoe_view_mut as_mut(cumoe_view v)
{
  return (cumoe_view_mut){(void *)(uintptr_t)v.data, v.rows, v.cols, v.ld, v.owner, v.device, v.dtype};
}

cumoe_status cumoe_view_rows_mut(cumoe_view_mut view, int64_t first, int64_t count, cumoe_view_mut *out)
{
  begin_call(__func__);
  return slice_view(view, first, count, 0, view.cols, out);
}

cumoe_status cumoe_view_cols_mut(cumoe_view_mut view, int64_t first, int64_t count, cumoe_view_mut *out)
{
  begin_call(__func__);
  return slice_view(view, 0, view.rows, first, count, out);
}

cumoe_status cumoe_view_rows(cumoe_view view, int64_t first, int64_t count, cumoe_view *out)
{
  begin_call(__func__);
  cumoe_view_mut m;
  REQUIRE(out, CUMOE_ERR_INVALID_ARGUMENT, "slice is null");
  TRY(slice_view(as_mut(view), first, count, 0, view.cols, &m));
  *out = cumoe_const(m);
  return CUMOE_OK;
}

cumoe_status cumoe_view_cols(cumoe_view view, int64_t first, int64_t count, cumoe_view *out)
{
  begin_call(__func__);
  cumoe_view_mut m;
  REQUIRE(out, CUMOE_ERR_INVALID_ARGUMENT, "slice is null");
  TRY(slice_view(as_mut(view), 0, view.rows, first, count, &m));
  *out = cumoe_const(m);
  return CUMOE_OK;
}

/* ---- moving bytes ---- */

/* A view that a copy or fill may touch: alive, here, in bounds. */
static cumoe_status check_view(cumoe_context context, const char *what, const cumoe_view *v)
{
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)v->dtype);
  TRY(check_owner(context, what, v));
  REQUIRE(v->device == CUMOE_DEVICE_ANY || v->device == context->device, CUMOE_ERR_WRONG_DEVICE, "%s is on device %d, the context is on %d", what,
          (int)v->device, (int)context->device);
  REQUIRE(element, CUMOE_ERR_WRONG_DTYPE, "%s.dtype is %d, not a cumoe_dtype", what, (int)v->dtype);
  return check_extent(what, v, (uint32_t)element);
}

static cumoe_status check_host_copy(cumoe_context context, const char *what, const cumoe_view *v, const void *host, size_t bytes)
{
  TRY(check_context(context));
  TRY(check_view(context, what, v));
  const size_t need = (size_t)(v->rows * v->cols) * cumoe_dtype_bytes((cumoe_dtype)v->dtype);
  REQUIRE(bytes == need, CUMOE_ERR_OUT_OF_BOUNDS, "bytes is %zu, %s [%lld, %lld] has %zu", bytes, what, (long long)v->rows, (long long)v->cols, need);
  REQUIRE(host || need == 0, CUMOE_ERR_INVALID_ARGUMENT, "the host pointer is null");
  return CUMOE_OK;
}

cumoe_status cumoe_copy_from_host(cumoe_context context, cumoe_view_mut dst, const void *src, size_t bytes, cumoe_stream stream)
{
  begin_call(__func__);
  const cumoe_view v = cumoe_const(dst);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  TRY(check_host_copy(context, "dst", &v, src, bytes));
  if (bytes == 0) return CUMOE_OK;
  return memory_copy(context, dst.data, (size_t)v.ld * element, src, (size_t)v.cols * element, (size_t)v.cols * element, (size_t)v.rows,
                     cudaMemcpyHostToDevice, stream);
}

cumoe_status cumoe_copy_to_host(cumoe_context context, void *dst, size_t bytes, cumoe_view src, cumoe_stream stream)
{
  begin_call(__func__);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)src.dtype);
  TRY(check_host_copy(context, "src", &src, dst, bytes));
  if (bytes == 0) return CUMOE_OK;
  return memory_copy(context, dst, (size_t)src.cols * element, src.data, (size_t)src.ld * element, (size_t)src.cols * element, (size_t)src.rows,
                     cudaMemcpyDeviceToHost, stream);
}

cumoe_status cumoe_copy(cumoe_context context, cumoe_view_mut dst, cumoe_view src, cumoe_stream stream)
{
  begin_call(__func__);
  const cumoe_view d = cumoe_const(dst);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)src.dtype);
  TRY(check_context(context));
  TRY(check_view(context, "dst", &d));
  TRY(check_view(context, "src", &src));
  REQUIRE(dst.dtype == src.dtype, CUMOE_ERR_WRONG_DTYPE, "dst is %s, src is %s", cumoe_dtype_name((cumoe_dtype)dst.dtype), cumoe_dtype_name((cumoe_dtype)src.dtype));
  REQUIRE(dst.rows == src.rows && dst.cols == src.cols, CUMOE_ERR_INVALID_ARGUMENT, "dst is [%lld, %lld], src is [%lld, %lld]", (long long)dst.rows,
          (long long)dst.cols, (long long)src.rows, (long long)src.cols);
  if (src.rows == 0 || src.cols == 0) return CUMOE_OK;
  TRY(check_disjoint("dst", dst, "src", src));
  return memory_copy(context, dst.data, (size_t)dst.ld * element, src.data, (size_t)src.ld * element, (size_t)src.cols * element, (size_t)src.rows,
                     cudaMemcpyDeviceToDevice, stream);
}

cumoe_status cumoe_fill(cumoe_context context, cumoe_view_mut dst, uint8_t byte, cumoe_stream stream)
{
  begin_call(__func__);
  const cumoe_view d = cumoe_const(dst);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)d.dtype);
  TRY(check_context(context));
  TRY(check_view(context, "dst", &d));
  if (d.rows == 0 || d.cols == 0) return CUMOE_OK;
  return memory_fill(context, dst.data, (size_t)d.ld * element, byte, (size_t)d.cols * element, (size_t)d.rows, stream);
}
