/* Buffers: owned memory behind generation-checked handles. */
#include "check.h"
#include "handles.h"

#include <stdatomic.h>
#include <string.h>

typedef struct record {
  cumoe_context context;
  void *data;
  int64_t rows, cols;
  size_t bytes;
  cumoe_stream stream;
  const char *file;
  int32_t dtype, line, device;
  bool foreign, pooled; /* adopted; and from a pool */
} record;

HANDLE_TABLE(buffers, record);

/* What a handle names; false if it is null, forged or stale. */
static bool find(uint64_t id, record *r)
{
  return handle_find(&buffers, id, r);
}

static cumoe_status publish(const record *r, cumoe_buffer *buffer)
{
  atomic_fetch_add(&r->context->live_buffers, 1); /* before another thread can end it */
  atomic_fetch_add(&r->context->live_bytes, r->bytes);
  buffer->id = handle_publish(&buffers, r);
  if (buffer->id) return CUMOE_OK;
  atomic_fetch_sub(&r->context->live_buffers, 1);
  atomic_fetch_sub(&r->context->live_bytes, r->bytes);
  return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for another buffer handle");
}

/* Ends the buffer that `id` names and hands out what it was: only one of several racing callers succeeds. */
static bool retire(uint64_t id, record *was)
{
  if (!handle_retire(&buffers, id, was)) return false;
  atomic_fetch_sub(&was->context->live_buffers, 1);
  atomic_fetch_sub(&was->context->live_bytes, was->bytes);
  return true;
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

cumoe_status cumoe_buffer_alloc_at(cumoe_context context, cumoe_dtype dtype, int64_t rows, int64_t cols,
                                   cumoe_stream stream, const char *file, int line, cumoe_buffer *buffer)
{
  begin_call("cumoe_buffer_alloc");
  REQUIRE(buffer, CUMOE_ERR_INVALID_ARGUMENT, "buffer is null");
  buffer->id = 0;
  TRY(check_context(context));
  record r = {.context = context,
              .rows = rows,
              .cols = cols,
              .stream = stream,
              .file = file,
              .line = line,
              .dtype = (int32_t)dtype,
              .device = context->device};
  TRY(matrix_bytes(dtype, rows, cols, &r.bytes));
  TRY(memory_alloc(context, r.bytes, stream, &r.data));
  const cumoe_status status = publish(&r, buffer);
  if (status != CUMOE_OK) (void)memory_free(context, r.data, stream);
  return status;
}

cumoe_status cumoe_buffer_adopt(cumoe_context context, void *data, cumoe_dtype dtype, int64_t rows, int64_t cols,
                                cumoe_stream stream, cumoe_buffer *buffer)
{
  begin_call(__func__);
  REQUIRE(buffer, CUMOE_ERR_INVALID_ARGUMENT, "buffer is null");
  buffer->id = 0;
  TRY(check_context(context));
  record r = {.context = context,
              .data = data,
              .rows = rows,
              .cols = cols,
              .stream = stream,
              .file = "(adopted)",
              .dtype = (int32_t)dtype,
              .device = context->device,
              .foreign = true};
  TRY(matrix_bytes(dtype, rows, cols, &r.bytes));
  REQUIRE(data || r.bytes == 0, CUMOE_ERR_INVALID_ARGUMENT, "data is null");
  TRY(memory_inspect(context, data, r.bytes, &r.pooled));
  return publish(&r, buffer);
}

cumoe_status cumoe_buffer_free(cumoe_buffer *buffer)
{
  begin_call(__func__);
  record r;
  REQUIRE(buffer, CUMOE_ERR_INVALID_ARGUMENT, "buffer is null");
  if (buffer->id == 0) return CUMOE_OK;
  if (!find(buffer->id, &r)) return stale("buffer", buffer->id);
  TRY(check_context(r.context));
  const bool plain = r.foreign && !r.pooled; /* cudaFree looks at no stream: the home stream has to be passed first */
  if (r.data && plain) TRY(memory_wait(r.context, r.stream));
  if (r.data && !plain) TRY(refuse_capture(r.context, r.stream)); /* a graph may not free what it did not allocate */
  if (!retire(buffer->id, &r)) return stale("buffer", buffer->id);
  buffer->id = 0;
  return plain ? memory_drop(r.context, r.data) : memory_free(r.context, r.data, r.stream);
}

cumoe_status cumoe_buffer_release(cumoe_buffer *buffer, void **data)
{
  begin_call(__func__);
  record r;
  REQUIRE(buffer && data, CUMOE_ERR_INVALID_ARGUMENT, "%s is null", buffer ? "data" : "buffer");
  *data = NULL;
  if (!retire(buffer->id, &r)) return stale("buffer", buffer->id);
  buffer->id = 0;
  *data = r.data;
  return CUMOE_OK;
}

cumoe_status buffers_abandon(cumoe_context context)
{
  uint64_t id;
  record r;
  cumoe_status first = CUMOE_OK;
  for (uint32_t i = 0; atomic_load(&context->live_buffers) > 0 && handle_at(&buffers, i, &id, &r); ++i) {
    if (!id || r.context != context || !retire(id, &r)) continue;
    const cumoe_status status = memory_drop(context, r.data);
    if (first == CUMOE_OK) first = status;
  }
  return first;
}

/* ---- facts and views ---- */

cumoe_status cumoe_buffer_get_info(cumoe_buffer buffer, cumoe_buffer_info *info)
{
  begin_call(__func__);
  record r;
  REQUIRE(info, CUMOE_ERR_INVALID_ARGUMENT, "info is null");
  REQUIRE(info->size == sizeof *info, CUMOE_ERR_INVALID_ARGUMENT, "info.size is %u, must be %zu", info->size,
          sizeof *info);
  if (!find(buffer.id, &r)) return stale("buffer", buffer.id);
  *info = (cumoe_buffer_info){.size = sizeof *info,
                              .device = r.device,
                              .dtype = r.dtype,
                              .line = r.line,
                              .rows = r.rows,
                              .cols = r.cols,
                              .bytes = r.bytes,
                              .data = r.data,
                              .stream = r.stream,
                              .file = r.file};
  return CUMOE_OK;
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

cumoe_status check_owner(cumoe_context context, const char *what, const cumoe_view *v)
{
  record r;
  if (v->owner == 0) return CUMOE_OK;
  REQUIRE(find(v->owner, &r), CUMOE_ERR_STALE_HANDLE, "%s is a view of a buffer that was freed", what);
  REQUIRE(r.context == context, CUMOE_ERR_WRONG_DEVICE, "%s is a view of a buffer of another context (device %d)", what,
          (int)r.device);
  REQUIRE(cumoe_dtype_bytes((cumoe_dtype)v->dtype), CUMOE_ERR_WRONG_DTYPE, "%s.dtype is %d, not a cumoe_dtype", what,
          (int)v->dtype);
  REQUIRE(v->rows >= 0 && v->cols >= 0 && v->ld >= v->cols, CUMOE_ERR_INVALID_ARGUMENT,
          "%s is [%lld, %lld] with ld %lld", what, (long long)v->rows, (long long)v->cols, (long long)v->ld);
  REQUIRE(v->rows == 0 || v->cols == 0 || within(v, &r), CUMOE_ERR_OUT_OF_BOUNDS,
          "%s [%lld, %lld] with ld %lld is not within its buffer of %zu bytes", what, (long long)v->rows,
          (long long)v->cols, (long long)v->ld, r.bytes);
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
          "%s %lld .. %lld + %lld are not all within 0 .. %lld", what, (long long)first, (long long)first,
          (long long)count, (long long)extent);
  return CUMOE_OK;
}

/* An empty slice keeps the view's own pointer: the row it would begin at need not exist. */
static cumoe_status slice_view(cumoe_view_mut v, int64_t first_row, int64_t rows, int64_t first_col, int64_t cols,
                               cumoe_view_mut *out)
{
  record r;
  int64_t skip = 0;
  REQUIRE(out, CUMOE_ERR_INVALID_ARGUMENT, "slice is null");
  if (v.owner && !find(v.owner, &r)) return stale("view of buffer", v.owner);
  const int64_t element = (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  REQUIRE(element, CUMOE_ERR_WRONG_DTYPE, "view.dtype is %d, not a cumoe_dtype", (int)v.dtype);
  TRY(slice("rows", first_row, rows, v.rows));
  TRY(slice("cols", first_col, cols, v.cols));
  if (v.data && rows > 0 && cols > 0)
    REQUIRE(!__builtin_mul_overflow(first_row, v.ld, &skip) && !__builtin_add_overflow(skip, first_col, &skip) &&
                !__builtin_mul_overflow(skip, element, &skip),
            CUMOE_ERR_INVALID_ARGUMENT, "view.ld is %lld: the slice would begin past the address space",
            (long long)v.ld);
  *out = v;
  out->data =
      (void *)((uintptr_t)v.data + (uintptr_t)skip); /* may be anywhere: views are checked where they are used */
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
  REQUIRE(v->device == CUMOE_DEVICE_ANY || v->device == context->device, CUMOE_ERR_WRONG_DEVICE,
          "%s is on device %d, the context is on %d", what, (int)v->device, (int)context->device);
  REQUIRE(element, CUMOE_ERR_WRONG_DTYPE, "%s.dtype is %d, not a cumoe_dtype", what, (int)v->dtype);
  return check_extent(what, v, (uint32_t)element);
}

static cumoe_status check_host_copy(cumoe_context context, const char *what, const cumoe_view *v, const void *host,
                                    size_t bytes, cumoe_stream stream)
{
  TRY(check_context(context));
  TRY(check_view(context, what, v));
  const size_t need = (size_t)(v->rows * v->cols) * cumoe_dtype_bytes((cumoe_dtype)v->dtype);
  REQUIRE(bytes == need, CUMOE_ERR_OUT_OF_BOUNDS, "bytes is %zu, %s [%lld, %lld] has %zu", bytes, what,
          (long long)v->rows, (long long)v->cols, need);
  REQUIRE(host || need == 0, CUMOE_ERR_INVALID_ARGUMENT, "the host pointer is null");
  return need ? refuse_capture(context, stream) : CUMOE_OK; /* a graph would read the host memory at every replay */
}

cumoe_status cumoe_copy_from_host(cumoe_context context, cumoe_view_mut dst, const void *src, size_t bytes,
                                  cumoe_stream stream)
{
  begin_call(__func__);
  const cumoe_view v = cumoe_const(dst);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  TRY(check_host_copy(context, "dst", &v, src, bytes, stream));
  if (bytes == 0) return CUMOE_OK;
  return memory_copy(context, dst.data, (size_t)v.ld * element, src, (size_t)v.cols * element, (size_t)v.cols * element,
                     (size_t)v.rows, cudaMemcpyHostToDevice, stream);
}

cumoe_status cumoe_copy_to_host(cumoe_context context, void *dst, size_t bytes, cumoe_view src, cumoe_stream stream)
{
  begin_call(__func__);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)src.dtype);
  TRY(check_host_copy(context, "src", &src, dst, bytes, stream));
  if (bytes == 0) return CUMOE_OK;
  return memory_copy(context, dst, (size_t)src.cols * element, src.data, (size_t)src.ld * element,
                     (size_t)src.cols * element, (size_t)src.rows, cudaMemcpyDeviceToHost, stream);
}

cumoe_status cumoe_copy(cumoe_context context, cumoe_view_mut dst, cumoe_view src, cumoe_stream stream)
{
  begin_call(__func__);
  const cumoe_view d = cumoe_const(dst);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)src.dtype);
  TRY(check_context(context));
  TRY(check_view(context, "dst", &d));
  TRY(check_view(context, "src", &src));
  REQUIRE(dst.dtype == src.dtype, CUMOE_ERR_WRONG_DTYPE, "dst is %s, src is %s",
          cumoe_dtype_name((cumoe_dtype)dst.dtype), cumoe_dtype_name((cumoe_dtype)src.dtype));
  REQUIRE(dst.rows == src.rows && dst.cols == src.cols, CUMOE_ERR_INVALID_ARGUMENT,
          "dst is [%lld, %lld], src is [%lld, %lld]", (long long)dst.rows, (long long)dst.cols, (long long)src.rows,
          (long long)src.cols);
  if (src.rows == 0 || src.cols == 0) return CUMOE_OK;
  TRY(check_disjoint("dst", dst, "src", src));
  return memory_copy(context, dst.data, (size_t)dst.ld * element, src.data, (size_t)src.ld * element,
                     (size_t)src.cols * element, (size_t)src.rows, cudaMemcpyDeviceToDevice, stream);
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
