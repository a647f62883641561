/* Views: slices and casts of both kinds, and what moves the bytes that they show. */
#include "buffer.h"
#include "check.h"
#include "context.h"
#include "memory.h"
#include "status.h"

#include <string.h>

/* Both kinds have one layout, so that each function is written once; which kind comes out is what went in. */
_Static_assert(sizeof(cumoe_view) == sizeof(cumoe_view_mut) &&
                   offsetof(cumoe_view, dtype) == offsetof(cumoe_view_mut, dtype) &&
                   offsetof(cumoe_view, owner) == offsetof(cumoe_view_mut, owner),
               "the two kinds of view differ");

static cumoe_view_mut either(const void *view)
{
  cumoe_view_mut v;
  memcpy(&v, view, sizeof v);
  return v;
}

static cumoe_status check_element(const char *what, int32_t dtype, int64_t *bytes)
{
  *bytes = (int64_t)cumoe_dtype_bytes((cumoe_dtype)dtype);
  REQUIRE(*bytes, CUMOE_ERR_WRONG_DTYPE, "%s is %d, not a cumoe_dtype", what, (int)dtype);
  return CUMOE_OK;
}

/* ---- slices ---- */

static cumoe_status check_range(const char *what, int64_t first, int64_t count, int64_t extent)
{
  REQUIRE(first >= 0 && count >= 0 && first <= extent && count <= extent - first, CUMOE_ERR_OUT_OF_BOUNDS,
          "%s %lld .. %lld + %lld are not all within 0 .. %lld", what, (long long)first, (long long)first,
          (long long)count, (long long)extent);
  return CUMOE_OK;
}

typedef struct part {
  int64_t first_row, rows, first_col, cols;
} part;

/* An empty slice keeps the view's own pointer: the row it would begin at need not exist. */
static cumoe_status slice(const void *view, part p, cumoe_view_mut *out)
{
  int64_t element, skip = 0;
  const cumoe_view_mut v = either(view);
  TRY(check_live("view of buffer", v.owner));
  TRY(check_element("view.dtype", v.dtype, &element));
  TRY(check_range("rows", p.first_row, p.rows, v.rows));
  TRY(check_range("cols", p.first_col, p.cols, v.cols));
  if (v.data && p.rows > 0 && p.cols > 0)
    REQUIRE(!__builtin_mul_overflow(p.first_row, v.ld, &skip) && !__builtin_add_overflow(skip, p.first_col, &skip) &&
                !__builtin_mul_overflow(skip, element, &skip),
            CUMOE_ERR_INVALID_ARGUMENT, "view.ld is %lld: the slice would begin past the address space",
            (long long)v.ld);
  *out = v;
  out->data = (void *)((uintptr_t)v.data + (uintptr_t)skip); /* anywhere: views are checked where they are used */
  out->rows = p.rows;
  out->cols = p.cols;
  return CUMOE_OK;
}

static cumoe_status slice_rows(const void *view, int64_t first, int64_t count, void *out)
{
  cumoe_view_mut made;
  REQUIRE(out, CUMOE_ERR_INVALID_ARGUMENT, "slice is null");
  TRY(slice(view, (part){first, count, 0, either(view).cols}, &made));
  memcpy(out, &made, sizeof made);
  return CUMOE_OK;
}

static cumoe_status slice_cols(const void *view, int64_t first, int64_t count, void *out)
{
  cumoe_view_mut made;
  REQUIRE(out, CUMOE_ERR_INVALID_ARGUMENT, "slice is null");
  TRY(slice(view, (part){0, either(view).rows, first, count}, &made));
  memcpy(out, &made, sizeof made);
  return CUMOE_OK;
}

static cumoe_status split(const void *view, int64_t at, void *head, void *tail)
{
  cumoe_view_mut first, second;
  const cumoe_view_mut v = either(view);
  REQUIRE(head && tail, CUMOE_ERR_INVALID_ARGUMENT, "%s is null", head ? "tail" : "head");
  TRY(slice(view, (part){0, at, 0, v.cols}, &first));
  TRY(slice(view, (part){at, v.rows - at, 0, v.cols}, &second));
  memcpy(head, &first, sizeof first);
  memcpy(tail, &second, sizeof second);
  return CUMOE_OK;
}

cumoe_status cumoe_view_rows(cumoe_view view, int64_t first, int64_t count, cumoe_view *out)
{
  begin_call(__func__);
  return slice_rows(&view, first, count, out);
}

cumoe_status cumoe_view_rows_mut(cumoe_view_mut view, int64_t first, int64_t count, cumoe_view_mut *out)
{
  begin_call(__func__);
  return slice_rows(&view, first, count, out);
}

cumoe_status cumoe_view_cols(cumoe_view view, int64_t first, int64_t count, cumoe_view *out)
{
  begin_call(__func__);
  return slice_cols(&view, first, count, out);
}

cumoe_status cumoe_view_cols_mut(cumoe_view_mut view, int64_t first, int64_t count, cumoe_view_mut *out)
{
  begin_call(__func__);
  return slice_cols(&view, first, count, out);
}

cumoe_status cumoe_view_split(cumoe_view view, int64_t at, cumoe_view *head, cumoe_view *tail)
{
  begin_call(__func__);
  return split(&view, at, head, tail);
}

cumoe_status cumoe_view_split_mut(cumoe_view_mut view, int64_t at, cumoe_view_mut *head, cumoe_view_mut *tail)
{
  begin_call(__func__);
  return split(&view, at, head, tail);
}

/* ---- casts ---- */

/* `count` elements of `from` bytes, as elements of `to` bytes. */
static cumoe_status recount(const char *what, int64_t count, int64_t from, int64_t to, int64_t *out)
{
  int64_t bytes;
  REQUIRE(count >= 0 && !__builtin_mul_overflow(count, from, &bytes), CUMOE_ERR_INVALID_ARGUMENT, "%s is %lld", what,
          (long long)count);
  REQUIRE(bytes % to == 0, CUMOE_ERR_LAYOUT, "%s is %lld elements of %lld bytes, no whole number of %lld bytes", what,
          (long long)count, (long long)from, (long long)to);
  *out = bytes / to;
  return CUMOE_OK;
}

static cumoe_status cast(const void *view, cumoe_dtype dtype, void *as)
{
  int64_t from, to;
  const cumoe_view_mut v = either(view);
  cumoe_view_mut made = v;
  REQUIRE(as, CUMOE_ERR_INVALID_ARGUMENT, "as is null");
  TRY(check_live("view of buffer", v.owner));
  TRY(check_element("view.dtype", v.dtype, &from));
  TRY(check_element("dtype", (int32_t)dtype, &to));
  TRY(recount("view.cols", v.cols, from, to, &made.cols));
  if (v.rows > 1)
    TRY(recount("view.ld", v.ld, from, to, &made.ld));
  else
    made.ld = made.cols; /* there is no second row for it to lead to */
  REQUIRE((uintptr_t)v.data % (uintptr_t)to == 0, CUMOE_ERR_MISALIGNED,
          "view.data is %p, must be aligned to %lld bytes", v.data, (long long)to);
  made.dtype = (int32_t)dtype;
  memcpy(as, &made, sizeof made);
  return CUMOE_OK;
}

cumoe_status cumoe_view_cast(cumoe_view view, cumoe_dtype dtype, cumoe_view *as)
{
  begin_call(__func__);
  return cast(&view, dtype, as);
}

cumoe_status cumoe_view_cast_mut(cumoe_view_mut view, cumoe_dtype dtype, cumoe_view_mut *as)
{
  begin_call(__func__);
  return cast(&view, dtype, as);
}

/* ---- moving bytes ---- */

/* A view that a copy or fill may touch: alive, here, in bounds. */
static cumoe_status check_view(struct context *context, const char *what, const cumoe_view *v)
{
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)v->dtype);
  TRY(check_owner(context, what, v));
  REQUIRE(v->dtype || !absent(v), CUMOE_ERR_INVALID_ARGUMENT, "%s is absent", what);
  TRY(check_device(what, v, context->device));
  REQUIRE(element, CUMOE_ERR_WRONG_DTYPE, "%s.dtype is %d, not a cumoe_dtype", what, (int)v->dtype);
  return check_extent(what, v, (uint32_t)element);
}

static cumoe_status check_host_copy(struct context *context, const char *what, const cumoe_view *v, const void *host,
                                    size_t bytes, cumoe_stream stream)
{
  TRY(check_view(context, what, v));
  const size_t need = (size_t)(v->rows * v->cols) * cumoe_dtype_bytes((cumoe_dtype)v->dtype);
  REQUIRE(bytes == need, CUMOE_ERR_OUT_OF_BOUNDS, "bytes is %zu, %s [%lld, %lld] has %zu", bytes, what,
          (long long)v->rows, (long long)v->cols, need);
  REQUIRE(host || need == 0, CUMOE_ERR_INVALID_ARGUMENT, "the host pointer is null");
  return need ? refuse_capture(context, stream) : CUMOE_OK; /* a graph would read the host memory at every replay */
}

cumoe_status cumoe_copy_from_host(cumoe_context handle, cumoe_view_mut dst, const void *src, size_t bytes,
                                  cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  const cumoe_view v = cumoe_const(dst);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  TRY(find_context(handle, &context));
  TRY(check_host_copy(context, "dst", &v, src, bytes, stream));
  if (bytes == 0) return CUMOE_OK;
  return memory_copy(context, dst.data, (size_t)v.ld * element, src, (size_t)v.cols * element, (size_t)v.cols * element,
                     (size_t)v.rows, cudaMemcpyHostToDevice, stream);
}

cumoe_status cumoe_copy_to_host(cumoe_context handle, void *dst, size_t bytes, cumoe_view src, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)src.dtype);
  TRY(find_context(handle, &context));
  TRY(check_host_copy(context, "src", &src, dst, bytes, stream));
  if (bytes == 0) return CUMOE_OK;
  return memory_copy(context, dst, (size_t)src.cols * element, src.data, (size_t)src.ld * element,
                     (size_t)src.cols * element, (size_t)src.rows, cudaMemcpyDeviceToHost, stream);
}

static cumoe_status check_same_matrix(const cumoe_view *dst, const cumoe_view *src)
{
  REQUIRE(dst->dtype == src->dtype, CUMOE_ERR_WRONG_DTYPE, "dst is %s, src is %s",
          cumoe_dtype_name((cumoe_dtype)dst->dtype), cumoe_dtype_name((cumoe_dtype)src->dtype));
  REQUIRE(dst->rows == src->rows && dst->cols == src->cols, CUMOE_ERR_INVALID_ARGUMENT,
          "dst is [%lld, %lld], src is [%lld, %lld]", (long long)dst->rows, (long long)dst->cols, (long long)src->rows,
          (long long)src->cols);
  return CUMOE_OK;
}

cumoe_status cumoe_copy(cumoe_context handle, cumoe_view_mut dst, cumoe_view src, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  const cumoe_view d = cumoe_const(dst);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)src.dtype);
  TRY(find_context(handle, &context));
  TRY(check_view(context, "dst", &d));
  TRY(check_view(context, "src", &src));
  TRY(check_same_matrix(&d, &src));
  if (src.rows == 0 || src.cols == 0) return CUMOE_OK;
  TRY(check_disjoint("dst", dst, "src", src));
  return memory_copy(context, dst.data, (size_t)dst.ld * element, src.data, (size_t)src.ld * element,
                     (size_t)src.cols * element, (size_t)src.rows, cudaMemcpyDeviceToDevice, stream);
}

cumoe_status cumoe_fill(cumoe_context handle, cumoe_view_mut dst, uint8_t byte, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  const cumoe_view d = cumoe_const(dst);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)d.dtype);
  TRY(find_context(handle, &context));
  TRY(check_view(context, "dst", &d));
  if (d.rows == 0 || d.cols == 0) return CUMOE_OK;
  return memory_fill(context, dst.data, (size_t)d.ld * element, byte, (size_t)d.cols * element, (size_t)d.rows, stream);
}

/* The first element byte by byte; then what is there is copied behind itself, until the row is full, and the rows
 * likewise: the copies need no kernel and can be captured. */
static cumoe_status spread(struct context *context, cumoe_view_mut dst, const unsigned char *value, size_t element,
                           cumoe_stream stream)
{
  char *data = dst.data;
  const size_t width = (size_t)dst.cols * element, pitch = (size_t)dst.ld * element, rows = (size_t)dst.rows;
  for (size_t i = 0; i < element; i++) TRY(memory_fill(context, data + i, 1, value[i], 1, 1, stream));
  for (size_t done = element, next; done < width; done += next) {
    next = done < width - done ? done : width - done;
    TRY(memory_copy(context, data + done, next, data, next, next, 1, cudaMemcpyDeviceToDevice, stream));
  }
  for (size_t done = 1, next; done < rows; done += next) {
    next = done < rows - done ? done : rows - done;
    TRY(memory_copy(context, data + done * pitch, pitch, data, pitch, width, next, cudaMemcpyDeviceToDevice, stream));
  }
  return CUMOE_OK;
}

static bool all_the_same(const unsigned char *bytes, size_t count)
{
  return memcmp(bytes, bytes + 1, count - 1) == 0;
}

cumoe_status cumoe_fill_value(cumoe_context handle, cumoe_view_mut dst, const void *value, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  const cumoe_view d = cumoe_const(dst);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)d.dtype);
  TRY(find_context(handle, &context));
  TRY(check_view(context, "dst", &d));
  REQUIRE(value, CUMOE_ERR_INVALID_ARGUMENT, "value is null");
  if (d.rows == 0 || d.cols == 0) return CUMOE_OK;
  const unsigned char *bytes = value;
  if (!all_the_same(bytes, element)) return spread(context, dst, bytes, element, stream);
  return memory_fill(context, dst.data, (size_t)d.ld * element, bytes[0], (size_t)d.cols * element, (size_t)d.rows,
                     stream);
}

/* ---- between contexts ---- */

/* One end of a copy. */
typedef struct place {
  struct context *context;
  cumoe_stream stream;
} place;

/* `later` goes on after everything that is on `earlier` now. Events belong to the device of the stream that they
 * are recorded on; waiting for one works from any device. */
static cumoe_status order(place later, place earlier)
{
  cudaEvent_t event = NULL;
  if (on_cpu(later.context) || on_cpu(earlier.context)) return CUMOE_OK;
  if (later.stream == earlier.stream && later.context->device == earlier.context->device) return CUMOE_OK;
  TRY(refuse_capture(later.context, later.stream));
  TRY(memory_mark(earlier.context, earlier.stream, &event));
  cumoe_status status = memory_follow(later.context, later.stream, event);
  AND_THEN(status, memory_unmark(earlier.context, event));
  return status;
}

/* Runs on the stream of the GPU that there is, of the destination if there are two. */
static cumoe_status copy_across(place to, cumoe_view_mut dst, place from, const cumoe_view *src)
{
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)src->dtype);
  const size_t dst_pitch = (size_t)dst.ld * element, src_pitch = (size_t)src->ld * element;
  const size_t width = (size_t)src->cols * element, rows = (size_t)src->rows;
  const bool to_cpu = on_cpu(to.context), from_cpu = on_cpu(from.context);
  if (!to_cpu && !from_cpu && to.context->device != from.context->device)
    return memory_copy_peer(to.context, dst.data, dst_pitch, from.context->device, src->data, src_pitch, width, rows,
                            to.stream);
  const place on = to_cpu ? from : to;
  const enum cudaMemcpyKind kind = to_cpu     ? cudaMemcpyDeviceToHost
                                   : from_cpu ? cudaMemcpyHostToDevice
                                              : cudaMemcpyDeviceToDevice;
  TRY(refuse_capture(on.context, on.stream));
  TRY(memory_copy(on.context, dst.data, dst_pitch, src->data, src_pitch, width, rows, kind, on.stream));
  return to_cpu || from_cpu ? memory_wait(on.context, on.stream) : CUMOE_OK;
}

cumoe_status cumoe_copy_between(cumoe_context dst_handle, cumoe_view_mut dst, cumoe_stream dst_stream,
                                cumoe_context src_handle, cumoe_view src, cumoe_stream src_stream)
{
  begin_call_on(__func__, dst_stream);
  const cumoe_view d = cumoe_const(dst);
  place to = {.stream = dst_stream}, from = {.stream = src_stream};
  TRY(find_context(dst_handle, &to.context));
  TRY(find_context(src_handle, &from.context));
  TRY(check_view(to.context, "dst", &d));
  name_call_on(__func__, src_stream);
  TRY(check_view(from.context, "src", &src));
  TRY(check_same_matrix(&d, &src));
  if (src.rows == 0 || src.cols == 0) return CUMOE_OK;
  if (to.context->device == from.context->device) TRY(check_disjoint("dst", dst, "src", src));
  TRY(order(to, from));
  TRY(copy_across(to, dst, from, &src));
  return order(from, to);
}
