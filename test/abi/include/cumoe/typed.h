#ifndef CUMOE_TYPED_H
#define CUMOE_TYPED_H 
#include "buffer.h"
#ifdef __cplusplus
extern "C" {
#endif
typedef struct cumoe_f16 {
  uint16_t bits;
} cumoe_f16;
typedef struct cumoe_bf16 {
  uint16_t bits;
} cumoe_bf16;
#if defined(__GNUC__)
#define CUMOE_INLINE CUMOE_NODISCARD static inline __attribute__((unused))
#else
#define CUMOE_INLINE static inline
#endif
#define CUMOE_TYPED(NAME,ELEMENT,DTYPE) \
  typedef struct cumoe_buffer_##NAME { \
    cumoe_buffer any; \
  } cumoe_buffer_##NAME; \
  typedef struct cumoe_view_##NAME { \
    cumoe_view any; \
  } cumoe_view_##NAME; \
  typedef struct cumoe_view_mut_##NAME { \
    cumoe_view_mut any; \
  } cumoe_view_mut_##NAME; \
                                                                                                                       \
                                                                                                                       \
  CUMOE_INLINE cumoe_status cumoe_buffer_alloc_at_##NAME(cumoe_context context, int64_t rows, int64_t cols, \
                                                         cumoe_stream stream, const char *file, int line, \
                                                         cumoe_buffer_##NAME *buffer) \
  { \
    return cumoe_buffer_alloc_at(context, DTYPE, rows, cols, stream, file, line, buffer ? &buffer->any : NULL); \
  } \
  static inline cumoe_status cumoe_buffer_free_##NAME(cumoe_buffer_##NAME *buffer) \
  { \
    return cumoe_buffer_free(buffer ? &buffer->any : NULL); \
  } \
  CUMOE_INLINE cumoe_status cumoe_buffer_retain_##NAME(cumoe_buffer_##NAME buffer, cumoe_buffer_##NAME *another) \
  { \
    return cumoe_buffer_retain(buffer.any, another ? &another->any : NULL); \
  } \
  CUMOE_INLINE cumoe_view_##NAME cumoe_buffer_view_##NAME(cumoe_buffer_##NAME buffer) \
  { \
    cumoe_view_##NAME view = {cumoe_buffer_view(buffer.any)}; \
    return view; \
  } \
  CUMOE_INLINE cumoe_view_mut_##NAME cumoe_buffer_view_mut_##NAME(cumoe_buffer_##NAME buffer) \
  { \
    cumoe_view_mut_##NAME view = {cumoe_buffer_view_mut(buffer.any)}; \
    return view; \
  } \
                                                                                                                       \
                                                                                                                       \
  CUMOE_INLINE cumoe_view_##NAME cumoe_matrix_##NAME(const ELEMENT *data, int64_t rows, int64_t cols, int64_t ld) \
  { \
    cumoe_view_##NAME view = {cumoe_matrix(data, DTYPE, rows, cols, ld)}; \
    return view; \
  } \
  CUMOE_INLINE cumoe_view_mut_##NAME cumoe_matrix_mut_##NAME(ELEMENT *data, int64_t rows, int64_t cols, int64_t ld) \
  { \
    cumoe_view_mut_##NAME view = {cumoe_matrix_mut(data, DTYPE, rows, cols, ld)}; \
    return view; \
  } \
  CUMOE_INLINE cumoe_view_##NAME cumoe_const_##NAME(cumoe_view_mut_##NAME m) \
  { \
    cumoe_view_##NAME view = {cumoe_const(m.any)}; \
    return view; \
  } \
                                                                                                                       \
  CUMOE_INLINE cumoe_status cumoe_view_cast_##NAME(cumoe_view view, cumoe_view_##NAME *as) \
  { \
    return cumoe_view_cast(view, DTYPE, as ? &as->any : NULL); \
  } \
  CUMOE_INLINE cumoe_status cumoe_view_cast_mut_##NAME(cumoe_view_mut view, cumoe_view_mut_##NAME *as) \
  { \
    return cumoe_view_cast_mut(view, DTYPE, as ? &as->any : NULL); \
  } \
  CUMOE_INLINE cumoe_status cumoe_view_rows_##NAME(cumoe_view_##NAME view, int64_t first, int64_t count, \
                                                   cumoe_view_##NAME *slice) \
  { \
    return cumoe_view_rows(view.any, first, count, slice ? &slice->any : NULL); \
  } \
  CUMOE_INLINE cumoe_status cumoe_view_cols_##NAME(cumoe_view_##NAME view, int64_t first, int64_t count, \
                                                   cumoe_view_##NAME *slice) \
  { \
    return cumoe_view_cols(view.any, first, count, slice ? &slice->any : NULL); \
  } \
  CUMOE_INLINE cumoe_status cumoe_view_rows_mut_##NAME(cumoe_view_mut_##NAME view, int64_t first, int64_t count, \
                                                       cumoe_view_mut_##NAME *slice) \
  { \
    return cumoe_view_rows_mut(view.any, first, count, slice ? &slice->any : NULL); \
  } \
  CUMOE_INLINE cumoe_status cumoe_view_cols_mut_##NAME(cumoe_view_mut_##NAME view, int64_t first, int64_t count, \
                                                       cumoe_view_mut_##NAME *slice) \
  { \
    return cumoe_view_cols_mut(view.any, first, count, slice ? &slice->any : NULL); \
  } \
                                                                                                                       \
  CUMOE_INLINE cumoe_status cumoe_copy_##NAME(cumoe_context context, cumoe_view_mut_##NAME dst, cumoe_view_##NAME src, \
                                              cumoe_stream stream) \
  { \
    return cumoe_copy(context, dst.any, src.any, stream); \
  } \
  CUMOE_INLINE cumoe_status cumoe_copy_from_host_##NAME(cumoe_context context, cumoe_view_mut_##NAME dst, \
                                                        const ELEMENT *src, size_t count, cumoe_stream stream) \
  { \
    return cumoe_copy_from_host(context, dst.any, src, CUMOE_BYTES_OF(count, ELEMENT), stream); \
  } \
  CUMOE_INLINE cumoe_status cumoe_copy_to_host_##NAME(cumoe_context context, ELEMENT *dst, size_t count, \
                                                      cumoe_view_##NAME src, cumoe_stream stream) \
  { \
    return cumoe_copy_to_host(context, dst, CUMOE_BYTES_OF(count, ELEMENT), src.any, stream); \
  } \
                                                                                                                       \
  CUMOE_INLINE cumoe_status cumoe_fill_##NAME(cumoe_context context, cumoe_view_mut_##NAME dst, ELEMENT value, \
                                              cumoe_stream stream) \
  { \
    return cumoe_fill_value(context, dst.any, &value, stream); \
  }
#define CUMOE_BYTES_OF(count,ELEMENT) ((count) > SIZE_MAX / sizeof(ELEMENT) ? SIZE_MAX : (count) * sizeof(ELEMENT))
CUMOE_TYPED(f32, float, CUMOE_F32)
CUMOE_TYPED(f16, cumoe_f16, CUMOE_F16)
CUMOE_TYPED(bf16, cumoe_bf16, CUMOE_BF16)
CUMOE_TYPED(u8, uint8_t, CUMOE_U8)
CUMOE_TYPED(i32, int32_t, CUMOE_I32)
CUMOE_TYPED(i64, int64_t, CUMOE_I64)
#define cumoe_buffer_alloc_f32(context,rows,cols,stream,buffer) \
  cumoe_buffer_alloc_at_f32(context, rows, cols, stream, __FILE__, __LINE__, buffer)
#define cumoe_buffer_alloc_f16(context,rows,cols,stream,buffer) \
  cumoe_buffer_alloc_at_f16(context, rows, cols, stream, __FILE__, __LINE__, buffer)
#define cumoe_buffer_alloc_bf16(context,rows,cols,stream,buffer) \
  cumoe_buffer_alloc_at_bf16(context, rows, cols, stream, __FILE__, __LINE__, buffer)
#define cumoe_buffer_alloc_u8(context,rows,cols,stream,buffer) \
  cumoe_buffer_alloc_at_u8(context, rows, cols, stream, __FILE__, __LINE__, buffer)
#define cumoe_buffer_alloc_i32(context,rows,cols,stream,buffer) \
  cumoe_buffer_alloc_at_i32(context, rows, cols, stream, __FILE__, __LINE__, buffer)
#define cumoe_buffer_alloc_i64(context,rows,cols,stream,buffer) \
  cumoe_buffer_alloc_at_i64(context, rows, cols, stream, __FILE__, __LINE__, buffer)
#undef CUMOE_TYPED
#ifdef __cplusplus
}
#endif
#endif
