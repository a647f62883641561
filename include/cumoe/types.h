/*
 * cumoe/types.h: version, status codes, element types, matrix views, error text, log.
 *
 * Everything here is plain C with no dependency: a program that only includes cumoe headers needs no CUDA
 * header. The stream type is CUDA's own: a cudaStream_t can be passed wherever a cumoe_stream is expected.
 */
#ifndef CUMOE_TYPES_H
#define CUMOE_TYPES_H

#if defined(__SIZEOF_POINTER__) && __SIZEOF_POINTER__ != 8
#error "cumoe is for machines of 64 bits, as CUDA is"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "cumoe is for little-endian machines, as the GPU is"
#endif

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUMOE_VERSION_MAJOR 0 /* breaking changes */
#define CUMOE_VERSION_MINOR 2 /* additions; while MAJOR is 0, breaking changes too */
#define CUMOE_VERSION_PATCH 0 /* repairs */
#define CUMOE_VERSION       (CUMOE_VERSION_MAJOR * 10000 + CUMOE_VERSION_MINOR * 100 + CUMOE_VERSION_PATCH)

#if defined(__GNUC__)
#define CUMOE_API __attribute__((visibility("default")))
#else
#define CUMOE_API
#endif

/* Of a call whose status is to be looked at, the compiler warns where it is not. CUMOE_IGNORE(call); says that this is
 * meant; from C23 and C++17 on, (void)call; does as well (gcc takes no cast for an answer before). */
#if (defined(__cplusplus) && __cplusplus >= 201703L) || (defined(__STDC_VERSION__) && __STDC_VERSION__ > 201710L)
#define CUMOE_NODISCARD [[nodiscard]]
#elif defined(__GNUC__)
#define CUMOE_NODISCARD __attribute__((warn_unused_result))
#else
#define CUMOE_NODISCARD
#endif
#define CUMOE_CHECKED CUMOE_NODISCARD CUMOE_API
#define CUMOE_IGNORE(call)                                                                                             \
  do {                                                                                                                 \
    const cumoe_status cumoe_ignored_ = (call);                                                                        \
    (void)cumoe_ignored_;                                                                                              \
  } while (0)

/* ---- status ---------------------------------------------------------------------------------------- */

/* One list makes the codes, the names and the texts. Numbers are stable: new ones are only appended. */
#define CUMOE_STATUS_LIST(X)                                                                                           \
  X(OK, 0, "success")                                                                                                  \
  X(ERR_INVALID_ARGUMENT, 1, "an argument is null, out of its range, or contradicts another one")                      \
  X(ERR_OUT_OF_BOUNDS, 2, "a slice or copy reaches past the end of its view or buffer")                                \
  X(ERR_STALE_HANDLE, 3, "a handle or view refers to an object that was freed")                                        \
  X(ERR_WRONG_DEVICE, 4, "an operand lives on another device than the context")                                        \
  X(ERR_WRONG_DTYPE, 5, "an operand has another element type than required")                                           \
  X(ERR_LAYOUT, 6, "a layout is unset or does not fit the shape")                                                      \
  X(ERR_MISALIGNED, 7, "a pointer or leading dimension is not aligned as documented")                                  \
  X(ERR_WORKSPACE, 8, "the workspace is smaller than the query says")                                                  \
  X(ERR_NOT_SUPPORTED, 9, "this combination is not supported")                                                         \
  X(ERR_NO_KERNEL_IMAGE, 10, "the library holds no machine code for this GPU")                                         \
  X(ERR_DRIVER_TOO_OLD, 11, "the CUDA driver is older than the CUDA runtime needs")                                    \
  X(ERR_NO_DEVICE, 12, "there is no usable CUDA device")                                                               \
  X(ERR_OUT_OF_MEMORY, 13, "an allocation failed")                                                                     \
  X(ERR_CAPTURE_UNSAFE, 14, "this call is not allowed while the stream is being captured")                             \
  X(ERR_LIBRARY_MISSING, 15, "a shared library needed by this call could not be opened")                               \
  X(ERR_CUDA, 16, "a CUDA call failed")                                                                                \
  X(ERR_CUDA_STICKY, 17, "the CUDA context is lost; only a new process can use the device again")                      \
  X(ERR_INTERNAL, 18, "the library contradicts itself; please report it")                                              \
  X(ERR_PEER, 19, "a rank of the group did not answer in time, or gave up")

typedef enum cumoe_status {
#define CUMOE_STATUS_ENUM(name, value, text) CUMOE_##name = value,
  CUMOE_STATUS_LIST(CUMOE_STATUS_ENUM)
#undef CUMOE_STATUS_ENUM
} cumoe_status;

/* "CUMOE_ERR_NO_DEVICE"; "CUMOE_ERR_UNKNOWN" for a number outside the list. */
CUMOE_API const char *cumoe_status_name(cumoe_status status);

/* The sentence of the list above. Never NULL. */
CUMOE_API const char *cumoe_status_text(cumoe_status status);

/*
 * Text of the last failure on the calling thread, such as "cumoe_moe_forward: args.x.cols is 63, must be 64". It is ""
 * before the first failure. A successful call leaves it alone. Valid until the thread's next failing call.
 */
CUMOE_API const char *cumoe_last_error(void);

/* Version of the linked library, as CUMOE_VERSION; compare with the macro to detect a header mismatch. */
CUMOE_API int cumoe_version(void);

/* Architectures with machine code in this build, such as "80 90a +ptx80". */
CUMOE_API const char *cumoe_architectures(void);

/* ---- log ------------------------------------------------------------------------------------------- */

typedef enum cumoe_log_level {
  CUMOE_LOG_ERROR = 1,
  CUMOE_LOG_WARNING = 2,
  CUMOE_LOG_INFO = 3,
  CUMOE_LOG_TRACE = 4
} cumoe_log_level;

typedef void (*cumoe_log_fn)(void *user, cumoe_log_level level, const char *message);

/*
 * Sends messages up to `level` to `fn`; NULL (the default) drops them: the library itself prints nothing.
 * Process-wide, any thread; `fn` may be called from any thread and must not call cumoe.
 */
CUMOE_API void cumoe_set_log(cumoe_log_fn fn, void *user, cumoe_log_level level);

/* ---- streams and devices --------------------------------------------------------------------------- */

struct CUstream_st;
typedef struct CUstream_st *cumoe_stream; /* == cudaStream_t; NULL is CUDA's legacy default stream */

#define CUMOE_DEVICE_AUTO (-1) /* the first usable CUDA device, else the CPU */
#define CUMOE_DEVICE_CPU  (-2) /* kernels in plain C on all cores; streams are ignored, calls return when done */
#define CUMOE_DEVICE_ANY  (-3) /* in a view: device not stated, the caller vouches for it */

/* ---- element types --------------------------------------------------------------------------------- */

/* name, value, bytes */
#define CUMOE_DTYPE_LIST(X)                                                                                            \
  X(F32, 1, 4) X(F16, 2, 2) X(BF16, 3, 2) X(U8, 4, 1) X(I32, 5, 4) X(I64, 6, 8) X(E4M3, 7, 1) X(E8M0, 8, 1) X(I8, 9, 1)

typedef enum cumoe_dtype {
#define CUMOE_DTYPE_ENUM(name, value, bytes) CUMOE_##name = value,
  CUMOE_DTYPE_LIST(CUMOE_DTYPE_ENUM)
#undef CUMOE_DTYPE_ENUM
} cumoe_dtype;

/* Bytes of one element; 0 for a value outside the list. */
CUMOE_API size_t cumoe_dtype_bytes(cumoe_dtype dtype);

/* "bf16"; "?" for a value outside the list. */
CUMOE_API const char *cumoe_dtype_name(cumoe_dtype dtype);

/* ---- views ----------------------------------------------------------------------------------------- */

/*
 * A view is a row-major matrix by value: element (r, c) lies at data + (r * ld + c) elements. It owns nothing.
 * It is the only way to hand memory to cumoe: shape and type are checked where it is used. A view that is all zero is
 * absent; for an optional operand so is any with data NULL, rows and cols 0 and no owner. data may also be NULL where
 * rows or cols is 0. A view that is filled in by hand says CUMOE_DEVICE_ANY or a device: 0 is the first GPU.
 *
 * Views of owned buffers (cumoe/buffer.h) carry the owner's handle, so that use after free is a status and
 * not a crash. Views of foreign memory are made with the inline constructors below, at no cost.
 */
typedef struct cumoe_view {
  const void *data;
  int64_t rows, cols; /* elements */
  int64_t ld;         /* elements between the starts of consecutive rows, >= cols */
  uint64_t owner;     /* cumoe_buffer.id, 0 for foreign memory */
  int32_t device;     /* CUDA ordinal, CUMOE_DEVICE_CPU or CUMOE_DEVICE_ANY */
  int32_t dtype;      /* cumoe_dtype */
} cumoe_view;

typedef struct cumoe_view_mut {
  void *data;
  int64_t rows, cols;
  int64_t ld;
  uint64_t owner;
  int32_t device;
  int32_t dtype;
} cumoe_view_mut;

/* A [rows, cols] matrix in foreign memory; ld in elements. */
static inline cumoe_view cumoe_matrix(const void *data, cumoe_dtype dtype, int64_t rows, int64_t cols, int64_t ld)
{
  cumoe_view v = {data, rows, cols, ld, 0, CUMOE_DEVICE_ANY, (int32_t)dtype};
  return v;
}

static inline cumoe_view_mut cumoe_matrix_mut(void *data, cumoe_dtype dtype, int64_t rows, int64_t cols, int64_t ld)
{
  cumoe_view_mut v = {data, rows, cols, ld, 0, CUMOE_DEVICE_ANY, (int32_t)dtype};
  return v;
}

/* n contiguous elements, as a [1, n] matrix. */
static inline cumoe_view cumoe_vector(const void *data, cumoe_dtype dtype, int64_t n)
{
  return cumoe_matrix(data, dtype, 1, n, n);
}

static inline cumoe_view_mut cumoe_vector_mut(void *data, cumoe_dtype dtype, int64_t n)
{
  return cumoe_matrix_mut(data, dtype, 1, n, n);
}

/* A mutable view may be read. */
static inline cumoe_view cumoe_const(cumoe_view_mut m)
{
  cumoe_view v = {m.data, m.rows, m.cols, m.ld, m.owner, m.device, m.dtype};
  return v;
}

#ifdef __cplusplus
}
#endif
#endif
