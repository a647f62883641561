/* What every host file shares: the context, how failures are reported, how device memory is reached. */
#ifndef CUMOE_INTERNAL_H
#define CUMOE_INTERNAL_H

#include <stdint.h>
#include <stddef.h>
#include <stdbool.h>
#include <cuda_runtime_api.h>

#include "choice.h"
#include "range.h"
#include "../include/cumoe/buffer.h"
#include "../include/cumoe/pool.h"
#include "../kernels/args.h"

/* ---- errors (status.c) ---- */

/* Names the public call that runs on this thread, for error texts. Every public function starts with it. */
void begin_call(const char *name);

/* The same, and the stream that its operands will be used on: at debug level 1, check_owner compares that with their
 * home stream. Profilers see a range until the call returns. running_call tells the call's name, and false if it has no stream. */
void name_call_on(const char *name, cumoe_stream stream);
#define begin_call_on(name, stream)                                                                                    \
  name_call_on(name, stream);                                                                                          \
  const bool range_pushed_ __attribute__((cleanup(range_pop), unused)) = range_push(name)
bool running_call(const char **name, cumoe_stream *stream);

/* Records "<call>: <text>" for cumoe_last_error and returns status. */
cumoe_status fail(cumoe_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* CUDA's own name and text; classifies out of memory, no device, old driver, sticky errors, capture. Takes back the
 * last error that CUDA keeps for the thread, unless the caller had one pending when the device was entered. */
cumoe_status fail_cuda(cudaError_t error, const char *expression);

/* Before the first CUDA call of a public call that enters no device (enter_device does it): what is pending now is
 * the caller's. clear_cuda_error takes back one of ours that is no failure. */
void note_cuda_error(void);
void clear_cuda_error(void);

/* Whose device this thread's CUDA calls are for, from now on; returns whose they were for. A sticky error makes that context
 * lost: no later call reaches the device, each answers CUDA_STICKY with the first cause (check_alive). */
struct context *run_for(struct context *context);
cumoe_status check_alive(struct context *context);

/* For a call that may succeed after a failure inside it: a success leaves cumoe_last_error alone. */
typedef struct error_text {
  char text[1024];
} error_text;
void save_error(error_text *saved);
void restore_error(const error_text *saved);

/* An element type for texts: "bf16", "unset", "77 (no cumoe_dtype)". */
typedef struct dtype_words {
  char text[32];
} dtype_words;
dtype_words say_dtype(int32_t dtype);

void log_message(cumoe_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define TRY(expression)                                                                                                \
  do {                                                                                                                 \
    cumoe_status try_status_ = (expression);                                                                           \
    if (try_status_ != CUMOE_OK) return try_status_;                                                                   \
  } while (0)

#define REQUIRE(condition, status, ...)                                                                                \
  do {                                                                                                                 \
    if (!(condition)) return fail(status, __VA_ARGS__);                                                                \
  } while (0)

#define TRY_CUDA(expression)                                                                                           \
  do {                                                                                                                 \
    cudaError_t try_error_ = (expression);                                                                             \
    if (try_error_ != cudaSuccess) return fail_cuda(try_error_, #expression);                                          \
  } while (0)

/* One CUDA call where a status is wanted, as ON_DEVICE does. */
cumoe_status cuda_status(cudaError_t error, const char *expression);
#define CUDA_STATUS(call) cuda_status((call), #call)

/* For what is given back whatever happens: the first failure is the one to report. */
void note_failure(cumoe_status *first, cudaError_t error, const char *call);
#define DROP_CUDA(first, call) note_failure((first), (call), #call)

/* ---- threads of the CPU device (threads.c) ---- */

typedef struct thread_pool thread_pool;
thread_pool *threads_create(int threads); /* 0 = one per core; NULL when out of memory */
void threads_destroy(thread_pool *pool);
int threads_count(const thread_pool *pool);
/* Runs kernel(args, begin, end) over disjoint ranges that cover 0 .. units - 1; returns when all are done. Safe
 * from several threads at once (one job at a time). */
void threads_run(thread_pool *pool, void (*kernel)(const void *, int64_t, int64_t), const void *args, int64_t units);

/* ---- context (context.c) ---- */

enum { MAX_IMAGES = 32 };

/* Where memory comes from (pool.c). The counts are of all devices. */
typedef struct memory_pool {
  cudaMemPool_t cuda;        /* private, stream-ordered; NULL on the CPU device and with an allocator */
  cumoe_allocator allocator; /* the caller's; alloc is NULL without one */
  uint64_t initial, limit, keep;
  _Atomic uint64_t peers; /* bit by ordinal: may reach the pool, tested */
  _Atomic uint64_t used, used_high, allocs, frees, retries, pinned;
  _Atomic int64_t live;
} memory_pool;

struct context {
  int32_t device; /* CUDA ordinal or CUMOE_DEVICE_CPU */
  cumoe_device_info info;
  void (*encode_tiled)(void); /* the driver's cuTensorMapEncodeTiled, where kernels take tensor maps; else NULL */
  thread_pool *threads;       /* CPU device only */
  cudaLibrary_t libraries[MAX_IMAGES];
  int32_t library_count;
  cudaKernel_t kernels[MAX_VARIANTS]; /* by variant index; NULL: not for this device */
  bool waits[MAX_VARIANTS];           /* the loaded code waits for earlier grids itself, so it may start early */
  struct CUctx_st *primary;           /* the CUDA context that the runtime uses on this device */
  memory_pool pool;
  int32_t debug;                 /* level: cumoe/debug.h */
  struct block *blocks, *pinned; /* what is live (block.h), the newest first; lock_blocks guards both */
  uint64_t serials;              /* blocks so far; likewise */
  machine machine;               /* what kernels are chosen by */
  struct blas *_Atomic blas;     /* cuBLAS, once a product needed it (matmul.c) */
  fault_sink fault;              /* record in device memory, mirror in pinned host memory */
  uint64_t cpu_fault_record;     /* what `fault` points to on the CPU device */
  uint32_t cpu_fault_mirror;
  uint32_t forks; /* of the process when it was made: a child cannot use it */
  _Atomic int64_t live_buffers;
  _Atomic size_t live_bytes;
  _Atomic int32_t lost;  /* 2: a sticky error has ended the device for this process, 1: its text is being written */
  error_text lost_cause; /* of the first one */
};

cumoe_status find_context(cumoe_context handle, struct context **context);
cumoe_status check_process(const struct context *context); /* NOT_SUPPORTED in a child of the process that made it */

static inline bool on_cpu(struct context *context)
{
  return context->device == CUMOE_DEVICE_CPU;
}

/* Makes the context's device current and remembers what was; leave_device restores it. No-ops on the CPU. May be
 * nested. CUDA_STICKY if the device is lost; enter_lost_device is for giving back what can be given back all the same. */
typedef struct device_scope {
  bool pushed;
  struct context *outer; /* whose device the thread's calls were for */
} device_scope;
cumoe_status enter_device(struct context *context, device_scope *scope);
cumoe_status enter_lost_device(struct context *context, device_scope *scope);
void leave_device(device_scope *scope);

/* Runs `expression` with the context's device current. */
#define ON_DEVICE(context, expression)                                                                                 \
  do {                                                                                                                 \
    device_scope scope_;                                                                                               \
    TRY(enter_device(context, &scope_));                                                                               \
    cumoe_status status_ = (expression);                                                                               \
    leave_device(&scope_);                                                                                             \
    return status_;                                                                                                    \
  } while (0)

/* ON_DEVICE while other threads capture. */
#define ON_DEVICE_RELAXED(context, expression)                                                                         \
  do {                                                                                                                 \
    device_scope scope_;                                                                                               \
    TRY(enter_device(context, &scope_));                                                                               \
    enum cudaStreamCaptureMode mode_ = relax_capture();                                                                \
    cumoe_status status_ = (expression);                                                                               \
    restore_capture(mode_);                                                                                            \
    leave_device(&scope_);                                                                                             \
    return status_;                                                                                                    \
  } while (0)

/* The same for giving something back, which is done even where the device is lost or cannot be entered. */
#define GIVE_BACK_RELAXED(context, expression)                                                                         \
  do {                                                                                                                 \
    device_scope scope_;                                                                                               \
    cumoe_status entered_ = enter_lost_device(context, &scope_);                                                       \
    enum cudaStreamCaptureMode mode_ = relax_capture();                                                                \
    cumoe_status status_ = (expression);                                                                               \
    restore_capture(mode_);                                                                                            \
    leave_device(&scope_);                                                                                             \
    return entered_ != CUMOE_OK ? entered_ : status_;                                                                  \
  } while (0)

/* While another thread captures in CUDA's default mode, this one may neither allocate nor wait, not even in streams of
 * its own, unless it says that it knows what it does: until restore_capture. Never a capture of this very stream. */
enum cudaStreamCaptureMode relax_capture(void);
void restore_capture(enum cudaStreamCaptureMode before);

/* A function of the driver, by the ABI of a version of CUDA (12000: 12.0), for what the runtime has no call for, or none that
 * leaves its last error alone. DRIVER_TOO_OLD if it is not there. */
typedef void driver_function(void);
cumoe_status find_driver_function(const char *name, unsigned version, driver_function **function);

/* ---- the pool (pool.c) ---- */

enum { MEMORY_ALIGNMENT = 256 };

cumoe_status pool_configure(memory_pool *pool, const cumoe_context_config *config); /* checks, no CUDA call */
cumoe_status pool_open(struct context *context);                                    /* CUDA, with the device entered */
cumoe_status pool_close(struct context *context);                                   /* whatever pool_open answered */

/* Each of these enters the device by itself. `bytes` of a free are those of its allocation. */
cumoe_status pool_alloc(struct context *context, size_t bytes, cumoe_stream stream, void **data);
cumoe_status pool_free(struct context *context, void *data, size_t bytes, cumoe_stream stream);
void pool_forget(struct context *context, size_t bytes);                   /* the memory is the caller's now */
cumoe_status pool_drop(struct context *context, void *data, size_t bytes); /* the device is idle: in no stream */

/* ---- memory (memory.c): the only place that knows how bytes move on either device ---- */

/* Memory of a pool of CUDA's, in the stream's order; free() on the CPU device. */
cumoe_status memory_free(struct context *context, void *data, cumoe_stream stream);
/* rows of `width` bytes with pitches in bytes; kind as in CUDA, ignored on the CPU */
cumoe_status memory_copy(struct context *context, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                         size_t width, size_t rows, enum cudaMemcpyKind kind, cumoe_stream stream);
cumoe_status memory_fill(struct context *context, void *dst, size_t pitch, uint8_t byte, size_t width, size_t rows,
                         cumoe_stream stream);
/* From another GPU's memory to that of the context; on a stream of the context's. */
cumoe_status memory_copy_peer(struct context *context, void *dst, size_t dst_pitch, int32_t src_device, const void *src,
                              size_t src_pitch, size_t width, size_t rows, cumoe_stream stream);
cumoe_status refuse_capture(struct context *context, cumoe_stream stream); /* CAPTURE_UNSAFE while capturing */
cumoe_status memory_wait(struct context *context, cumoe_stream stream);    /* refuse_capture, then waits */

/* What is on `stream` now, as an event that other streams can wait for; refuses capture. NULL on the CPU device. */
cumoe_status memory_mark(struct context *context, cumoe_stream stream, cudaEvent_t *event);
cumoe_status memory_follow(struct context *context, cumoe_stream stream, cudaEvent_t event); /* NULL: nothing */
cumoe_status memory_unmark(struct context *context, cudaEvent_t event);                      /* NULL: nothing */

/* Pinned host memory; malloc on the CPU device. */
cumoe_status memory_pin(struct context *context, size_t bytes, bool write_combined, void **data);
cumoe_status memory_unpin(struct context *context, void *data);

/* Host memory of the CPU device, aligned; NULL without. */
void *memory_of_host(size_t bytes);

/* Memory that cumoe did not allocate: whether it can be owned, and whether it is a pool's: then memory_free frees it. */
cumoe_status memory_inspect(struct context *context, const void *data, size_t bytes, bool *pooled);

/* Frees memory of any kind, in no stream: what uses it has been waited for. */
cumoe_status memory_drop(struct context *context, void *data);

/* ---- cuBLAS (matmul.c) ---- */

void blas_close(struct context *context); /* does nothing where it was not opened */

/* ---- owners of views (buffer.c) ---- */

/* STALE_HANDLE, WRONG_DEVICE or OUT_OF_BOUNDS if the view has an owner and it is gone, elsewhere, or too small. */
cumoe_status check_owner(struct context *context, const char *what, const cumoe_view *view);
bool buffer_lives(uint64_t id);                            /* not null, forged or freed */
cumoe_status check_live(const char *what, uint64_t owner); /* STALE_HANDLE if there is an owner and it is gone */
cumoe_status buffers_abandon(struct context *context);     /* frees what is live of the context's; the device is idle */
cumoe_status modules_abandon(struct context *context);     /* unloads its modules likewise (module.c) */

/* ---- debug levels (debug.c) ---- */

cumoe_status choose_debug_level(int32_t configured, int32_t *level);
void report_leaks(struct context *context); /* to the log, at level 1 and up */

#endif
