#ifndef CUMOE_BUFFER_H
#define CUMOE_BUFFER_H 
#include "context.h"
#ifdef __cplusplus
extern "C" {
#endif
typedef struct cumoe_buffer {
  uint64_t id;
} cumoe_buffer;
#define cumoe_buffer_alloc(context,dtype,rows,cols,stream,buffer) \
  cumoe_buffer_alloc_at(context, dtype, rows, cols, stream, __FILE__, __LINE__, buffer)
CUMOE_CHECKED cumoe_status cumoe_buffer_alloc_at(cumoe_context context, cumoe_dtype dtype, int64_t rows, int64_t cols,
                                                 cumoe_stream stream, const char *file, int line, cumoe_buffer *buffer);
enum {
  CUMOE_ALLOC_ZERO = 1,
  CUMOE_ALLOC_POISON = 2
};
#define cumoe_buffer_alloc_with(context,dtype,rows,cols,flags,stream,buffer) \
  cumoe_buffer_alloc_with_at(context, dtype, rows, cols, flags, stream, __FILE__, __LINE__, buffer)
CUMOE_CHECKED cumoe_status cumoe_buffer_alloc_with_at(cumoe_context context, cumoe_dtype dtype, int64_t rows,
                                                      int64_t cols, uint32_t flags, cumoe_stream stream,
                                                      const char *file, int line, cumoe_buffer *buffer);
CUMOE_API cumoe_status cumoe_buffer_free(cumoe_buffer *buffer);
CUMOE_CHECKED cumoe_status cumoe_buffer_retain(cumoe_buffer buffer, cumoe_buffer *another);
CUMOE_CHECKED cumoe_status cumoe_buffer_record_use(cumoe_buffer buffer, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_buffer_adopt(cumoe_context context, void *data, cumoe_dtype dtype, int64_t rows,
                                              int64_t cols, cumoe_stream stream, cumoe_buffer *buffer);
CUMOE_CHECKED cumoe_status cumoe_buffer_release(cumoe_buffer *buffer, void **data);
typedef struct cumoe_buffer_info {
  uint32_t size;
  int32_t device, dtype, line;
  int64_t rows, cols;
  size_t bytes;
  void *data;
  cumoe_stream stream;
  const char *file;
  uint64_t serial;
  int32_t handles;
  int32_t pinned;
} cumoe_buffer_info;
CUMOE_CHECKED cumoe_status cumoe_buffer_get_info(cumoe_buffer buffer, cumoe_buffer_info *info);
CUMOE_API cumoe_view cumoe_buffer_view(cumoe_buffer buffer);
CUMOE_API cumoe_view_mut cumoe_buffer_view_mut(cumoe_buffer buffer);
CUMOE_CHECKED cumoe_status cumoe_view_rows(cumoe_view view, int64_t first, int64_t count, cumoe_view *slice);
CUMOE_CHECKED cumoe_status cumoe_view_cols(cumoe_view view, int64_t first, int64_t count, cumoe_view *slice);
CUMOE_CHECKED cumoe_status cumoe_view_rows_mut(cumoe_view_mut view, int64_t first, int64_t count,
                                               cumoe_view_mut *slice);
CUMOE_CHECKED cumoe_status cumoe_view_cols_mut(cumoe_view_mut view, int64_t first, int64_t count,
                                               cumoe_view_mut *slice);
CUMOE_CHECKED cumoe_status cumoe_view_split(cumoe_view view, int64_t at, cumoe_view *head, cumoe_view *tail);
CUMOE_CHECKED cumoe_status cumoe_view_split_mut(cumoe_view_mut view, int64_t at, cumoe_view_mut *head,
                                                cumoe_view_mut *tail);
CUMOE_CHECKED cumoe_status cumoe_view_cast(cumoe_view view, cumoe_dtype dtype, cumoe_view *as);
CUMOE_CHECKED cumoe_status cumoe_view_cast_mut(cumoe_view_mut view, cumoe_dtype dtype, cumoe_view_mut *as);
CUMOE_CHECKED cumoe_status cumoe_copy_from_host(cumoe_context context, cumoe_view_mut dst, const void *src,
                                                size_t bytes, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_copy_to_host(cumoe_context context, void *dst, size_t bytes, cumoe_view src,
                                              cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_copy(cumoe_context context, cumoe_view_mut dst, cumoe_view src, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_fill(cumoe_context context, cumoe_view_mut dst, uint8_t byte, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_fill_value(cumoe_context context, cumoe_view_mut dst, const void *value,
                                            cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_copy_between(cumoe_context dst_context, cumoe_view_mut dst, cumoe_stream dst_stream,
                                              cumoe_context src_context, cumoe_view src, cumoe_stream src_stream);
enum { CUMOE_PINNED_WRITE_COMBINED = 1 };
#define cumoe_pinned_alloc(context,bytes,flags,data) \
  cumoe_pinned_alloc_at(context, bytes, flags, __FILE__, __LINE__, data)
CUMOE_CHECKED cumoe_status cumoe_pinned_alloc_at(cumoe_context context, size_t bytes, uint32_t flags, const char *file,
                                                 int line, void **data);
CUMOE_API cumoe_status cumoe_pinned_free(cumoe_context context, void *data);
CUMOE_API int64_t cumoe_buffer_live(cumoe_context context, size_t *bytes);
#if defined(__GNUC__)
static inline void cumoe_buffer_cleanup(cumoe_buffer *buffer)
{
  (void)cumoe_buffer_free(buffer);
}
#define CUMOE_AUTO_BUFFER __attribute__((cleanup(cumoe_buffer_cleanup), unused)) cumoe_buffer
static inline cumoe_buffer cumoe_buffer_take(cumoe_buffer *buffer)
{
  cumoe_buffer taken = *buffer;
  buffer->id = 0;
  return taken;
}
#endif
#ifdef __cplusplus
}
#endif
#endif
