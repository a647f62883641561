/* The context: one device, its kernels, what it keeps; how that device is entered and left. */
#ifndef CUMOE_HOST_CONTEXT_H
#define CUMOE_HOST_CONTEXT_H

#include "choice.h"
#include "pool.h"
#include "status.h"
#include "threads.h"
#include "../include/cumoe/context.h"
#include "../kernels/args.h"
#include "../kernels/masked.h"

enum { MAX_IMAGES = 64 };

/* What modules keep for a context and give back when it closes, in this order. Its work is done; its device may be
 * lost. */
typedef enum close_step {
  CLOSE_REPORT, /* of leaks: while all is there */
  CLOSE_BLAS,
  CLOSE_GROUPS,
  CLOSE_ARENAS, /* groups use them */
  CLOSE_PLANS,
  CLOSE_WEIGHTS,
  CLOSE_BUFFERS,
  CLOSE_MODULES,
  CLOSE_STEPS
} close_step;
typedef cumoe_status close_function(struct context *context);

struct context {
  int32_t device; /* CUDA ordinal or CUMOE_DEVICE_CPU */
  cumoe_device_info info;
  void (*encode_tiled)(void); /* the driver's cuTensorMapEncodeTiled, where kernels take tensor maps; else NULL */
  thread_pool *threads;       /* CPU device only */
  cudaLibrary_t libraries[MAX_IMAGES];
  const unsigned char *images[MAX_IMAGES]; /* of libraries */
  int32_t library_count;
  cudaKernel_t kernels[MAX_VARIANTS]; /* by variant index; NULL: not for this device, or not yet */
  bool waits[MAX_VARIANTS];           /* the loaded code waits for earlier grids itself, so it may start early */
  _Atomic bool loaded[OP_COUNT];      /* of late operations: all rows */
  struct CUctx_st *primary;           /* the CUDA context that the runtime uses on this device */
  memory_pool pool;
  int32_t debug;                 /* level: cumoe/debug.h */
  struct block *blocks, *pinned; /* what is live (block.h), the newest first; lock_blocks guards both */
  uint64_t serials;              /* blocks so far; likewise */
  machine machine;               /* what kernels are chosen by */
  bool reads_pages;              /* the GPU reads and writes pageable host memory itself, as on GH200 */
  struct blas *_Atomic blas;     /* cuBLAS, once a product needed it (matmul.c) */
  fault_sink fault;              /* record in device memory, mirror in pinned host memory */
  uint64_t cpu_fault_record;     /* what `fault` points to on the CPU device */
  uint32_t cpu_fault_mirror;
  close_function *_Atomic closers[CLOSE_STEPS]; /* NULL: there is nothing */
  uint32_t forks;                               /* of the process when it was made: a child cannot use it */
  _Atomic int64_t live_buffers;
  _Atomic size_t live_bytes;
  _Atomic int32_t lost;  /* 2: a sticky error has ended the device for this process, 1: its text is being written */
  error_text lost_cause; /* of the first one */
};

/* Kernels that need weights of a format are loaded when the first of these are bound, on the current device, or when a
 * row is asked for by its index. Any thread, again and again. */
cumoe_status load_for_weights(struct context *context, weight_format format);
cumoe_status load_for_row(struct context *context, int32_t index);

/* Those of an operation that is late are loaded when it is first launched, on the current device. */
cumoe_status load_for_operation(struct context *context, operation op);

/* From now on `close` is that step of closing the context. Again and again, and on any thread. */
void on_close(struct context *context, close_step step, close_function *close);

cumoe_status find_context(cumoe_context handle, struct context **context);
uint32_t count_forks(void);                                /* of which this process is the child of ... */
cumoe_status check_forks(uint32_t before);                 /* NOT_SUPPORTED if there were others since */
cumoe_status check_process(const struct context *context); /* NOT_SUPPORTED in a child of the process that made it */

static inline bool on_cpu(struct context *context)
{
  return context->device == CUMOE_DEVICE_CPU;
}

/* Makes the context's device current and remembers what was; leave_device restores it. No-ops on the CPU. May be
 * nested. CUDA_STICKY if the device is lost; enter_lost_device is for giving back what can be given back all the
 * same. */
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

/* A function of the driver, by the ABI of a version of CUDA (12000: 12.0), for what the runtime has no call for, or
 * none that leaves its last error alone. DRIVER_TOO_OLD if it is not there. */
typedef void driver_function(void);
cumoe_status find_driver_function(const char *name, unsigned version, driver_function **function);

/*
 * What the driver does better than the runtime. The runtime's calls for the first two reset the error that it keeps for
 * the thread, which may be the caller's, although they succeed. Its launch takes the host half a microsecond more: on
 * an H200 2 launches 6.1 us, by the driver 4.9; 7 launches 20.5, 17.1. A kernel's handle is the same for both.
 */
cudaError_t driver_kernel_parameter(cudaKernel_t kernel, size_t index, size_t *offset, size_t *bytes);
cumoe_status driver_allow_smem(const struct context *context, cudaKernel_t kernel, int bytes); /* dynamic, a block */
cudaError_t driver_launch(const cudaLaunchConfig_t *config, cudaKernel_t kernel, void **parameters);

#endif
