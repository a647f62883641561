/*
 * cumoe/kernel.h: your own kernels: modules, functions, launches that are checked.
 *
 *   cumoe_module_load or _load_file or _compile    device code: fatbin, cubin, PTX, or CUDA C++ source
 *   cumoe_module_function                          one kernel of it, with its facts
 *   cumoe_launch_kernel                            grid, block, stream, arguments
 *
 * Modules and functions are generation-checked handles, as buffers are: one that ended is CUMOE_ERR_STALE_HANDLE.
 * Zero is the null handle. They belong to a context and end with it. Any thread may use them; unloading a module
 * while another thread looks up or launches its functions is the caller's to prevent.
 *
 * On the CPU device there is no CUDA code to run: after the checks of its arguments every call here is NOT_SUPPORTED,
 * but for cumoe_compile, which needs no device. cumoe_launch_kernel may be captured; no other call here waits for a
 * stream.
 */
#ifndef CUMOE_KERNEL_H
#define CUMOE_KERNEL_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cumoe_module {
  uint64_t id;
} cumoe_module;

typedef struct cumoe_function {
  uint64_t id;
} cumoe_function;

/* ---- device code ----------------------------------------------------------------------------------- */

/*
 * Loads device code from memory, which may go when the call returns: a fatbin, a cubin, or PTX (with or without its
 * final NUL in `bytes`). The driver compiles PTX now, which takes its time. The bytes are copied first, then inspected,
 * and CUDA reads the copy: those whose headers are inconsistent are refused before CUDA sees them. Errors:
 * INVALID_ARGUMENT (not device code; the text says what is wrong), NO_KERNEL_IMAGE (no code for this GPU, or PTX that
 * does not compile: the text has the log), DRIVER_TOO_OLD (PTX of a newer toolkit), OUT_OF_MEMORY, CUDA. On failure
 * *module is the null handle.
 */
CUMOE_CHECKED cumoe_status cumoe_module_load(cumoe_context context, const void *image, size_t bytes,
                                             cumoe_module *module);

/* The same from a regular file. INVALID_ARGUMENT when it is none (nothing is waited for) or cannot be read. */
CUMOE_CHECKED cumoe_status cumoe_module_load_file(cumoe_context context, const char *path, cumoe_module *module);

/*
 * Compiles CUDA C++ for the context's GPU through NVRTC and loads it. options: NVRTC's own, such as "-lineinfo" or
 * "-I/usr/local/cuda/include" (NVRTC finds no header by itself); one that begins with "-arch" or "--gpu-architecture"
 * takes the place of the GPU's. Kernels are found by name if they are extern "C". The compiler's messages, warnings
 * too, go to log[0 .. log_bytes - 1], cut off if need be; log may be NULL with log_bytes 0. Errors: as
 * cumoe_module_load and cumoe_compile.
 */
CUMOE_CHECKED cumoe_status cumoe_module_compile(cumoe_context context, const char *source, const char *const *options,
                                                int32_t option_count, char *log, size_t log_bytes,
                                                cumoe_module *module);

/* What a compilation gave: machine code, or PTX with its final NUL. cumoe_image_free ends it. */
typedef struct cumoe_image {
  void *data;
  size_t bytes;
} cumoe_image;

/*
 * Compiles for `target` without loading; needs no GPU. "sm_90a" gives machine code, "compute_90" PTX. Errors:
 * LIBRARY_MISSING (NVRTC is opened when it is first needed: the file that CUMOE_NVRTC_PATH names, else what the
 * process has loaded, else libnvrtc.so.13 or .12), INVALID_ARGUMENT (the source does not compile, or an option is
 * unknown: the text has the beginning of the log), OUT_OF_MEMORY, NOT_SUPPORTED (NVRTC failed in another way). On
 * failure *image is empty.
 */
CUMOE_CHECKED cumoe_status cumoe_compile(const char *source, const char *target, const char *const *options,
                                         int32_t option_count, char *log, size_t log_bytes, cumoe_image *image);
CUMOE_API void cumoe_image_free(cumoe_image *image); /* NULL and empty are allowed */

/*
 * Ends the module and all its functions and sets *module to null. Launches must be over, graphs that hold its kernels
 * destroyed. A null handle is allowed.
 */
CUMOE_API cumoe_status cumoe_module_unload(cumoe_module *module);

/*
 * A __device__ or __constant__ variable as a [1, n] view; its bytes must be a multiple of the element's. The view is
 * of foreign memory: that the module is still there is not checked. INVALID_ARGUMENT when there is no such variable.
 */
CUMOE_CHECKED cumoe_status cumoe_module_global(cumoe_module module, const char *name, cumoe_dtype dtype,
                                               cumoe_view_mut *global);

/* ---- functions ------------------------------------------------------------------------------------- */

/*
 * A kernel by name, loaded and with all its attributes set, so that its first launch may be captured.
 * max_dynamic_smem: the most bytes of dynamic shared memory that a launch will ask for; up to 48 KiB less the static
 * ones need not be stated. Each handle allows what it was looked up with. Errors: INVALID_ARGUMENT (no such
 * kernel, more shared memory than the GPU has), NOT_SUPPORTED (more than 64 parameters), NO_KERNEL_IMAGE, CUDA.
 */
CUMOE_CHECKED cumoe_status cumoe_module_function(cumoe_module module, const char *name, uint32_t max_dynamic_smem,
                                                 cumoe_function *function);

enum { CUMOE_MAX_PARAMETERS = 64 };

typedef struct cumoe_function_info {
  uint32_t size; /* sizeof(cumoe_function_info), set by the caller */
  int32_t registers;
  int32_t static_smem, max_dynamic_smem; /* bytes a block */
  int32_t local_bytes;                   /* a thread: spills and arrays */
  int32_t constant_bytes;
  int32_t max_threads;                 /* a block */
  int32_t ptx_version, binary_version; /* 80: compute_80; 90: machine code for sm_90 */
  int32_t parameters;
  uint32_t parameter_bytes[CUMOE_MAX_PARAMETERS];
} cumoe_function_info;

CUMOE_CHECKED cumoe_status cumoe_function_get_info(cumoe_function function, cumoe_function_info *info);

/* ---- launches -------------------------------------------------------------------------------------- */

/*
 * EARLY: may start before the grid ahead of it ends (programmatic dependent launch): its kernel waits by itself, with
 * griddepcontrol.wait. Nothing special before compute capability 9.0. COOPERATIVE: all blocks run at once and may
 * wait for each other; a grid that is too large for that is refused by CUDA.
 */
enum { CUMOE_LAUNCH_EARLY = 1, CUMOE_LAUNCH_COOPERATIVE = 2 };

typedef struct cumoe_launch {
  uint32_t size;         /* sizeof(cumoe_launch) */
  uint32_t flags;        /* a sum of CUMOE_LAUNCH_*, or 0 */
  uint32_t grid[3];      /* blocks: x, y, z; x may be 0: nothing is launched. y, z: 1 at least */
  uint32_t block[3];     /* threads; y and z: 0 counts as 1 */
  uint32_t cluster[3];   /* blocks; all 0: none. Divides the grid, 8 blocks at most, compute capability 9.0 on */
  uint32_t dynamic_smem; /* bytes a block */
  cumoe_stream stream;   /* of the context's device */
} cumoe_launch;

/* For n elements, one a thread: blocks of 256 threads. The kernel must check its index: the last block reaches
 * past n. */
static inline cumoe_launch cumoe_launch_elements(int64_t n, cumoe_stream stream)
{
  cumoe_launch l = {(uint32_t)sizeof(cumoe_launch), 0, {0, 1, 1}, {256, 1, 1}, {0, 0, 0}, 0, stream};
  int64_t blocks = n < 0 ? -1 : n / 256 + (n % 256 != 0);
  l.grid[0] = blocks < 0 || blocks > INT32_MAX ? UINT32_MAX : (uint32_t)blocks; /* too many: the launch is refused */
  return l;
}

typedef enum cumoe_arg_kind {
  CUMOE_ARG_I32 = 1,
  CUMOE_ARG_U32 = 2,
  CUMOE_ARG_I64 = 3,
  CUMOE_ARG_U64 = 4,
  CUMOE_ARG_F32 = 5,
  CUMOE_ARG_F64 = 6,
  CUMOE_ARG_VIEW = 7,     /* the kernel gets the view's data pointer */
  CUMOE_ARG_VIEW_MUT = 8, /* likewise */
  CUMOE_ARG_BYTES = 9     /* any other type, by address and size */
} cumoe_arg_kind;

/* One argument, made by the constructors below. */
typedef struct cumoe_arg {
  uint32_t kind;  /* cumoe_arg_kind */
  uint32_t bytes; /* BYTES only */
  union {
    int64_t i64;
    uint64_t u64;
    int32_t i32;
    uint32_t u32;
    float f32;
    double f64;
    cumoe_view view;
    cumoe_view_mut view_mut;
    const void *blob;
  } value;
} cumoe_arg;

#define CUMOE_ARG_CONSTRUCTOR(name, type, KIND)                                                                        \
  static inline cumoe_arg cumoe_arg_##name(type value)                                                                 \
  {                                                                                                                    \
    cumoe_arg a;                                                                                                       \
    a.kind = CUMOE_ARG_##KIND;                                                                                         \
    a.bytes = 0;                                                                                                       \
    a.value.name = value;                                                                                              \
    return a;                                                                                                          \
  }
CUMOE_ARG_CONSTRUCTOR(i32, int32_t, I32)
CUMOE_ARG_CONSTRUCTOR(u32, uint32_t, U32)
CUMOE_ARG_CONSTRUCTOR(i64, int64_t, I64)
CUMOE_ARG_CONSTRUCTOR(u64, uint64_t, U64)
CUMOE_ARG_CONSTRUCTOR(f32, float, F32)
CUMOE_ARG_CONSTRUCTOR(f64, double, F64)
CUMOE_ARG_CONSTRUCTOR(view, cumoe_view, VIEW)
CUMOE_ARG_CONSTRUCTOR(view_mut, cumoe_view_mut, VIEW_MUT)
#undef CUMOE_ARG_CONSTRUCTOR

/* A struct, a half, a bool ...: `bytes` bytes at `blob`, read during the launch. */
static inline cumoe_arg cumoe_arg_bytes(const void *blob, size_t bytes)
{
  cumoe_arg a;
  a.kind = CUMOE_ARG_BYTES;
  a.bytes = bytes > UINT32_MAX ? UINT32_MAX : (uint32_t)bytes;
  a.value.blob = blob;
  return a;
}

/*
 * Launches. Before any CUDA call: the handle, the shape against the kernel's and the GPU's limits, and the arguments
 * against the kernel's own parameter table: their count, the size of each; views also for staleness, device, bounds and
 * alignment. What a kernel does with a pointer cannot be checked: a null pointer passes, and so does foreign memory.
 * Stream-ordered; may be captured. Errors: STALE_HANDLE, INVALID_ARGUMENT, WRONG_DEVICE, OUT_OF_BOUNDS, MISALIGNED,
 * NOT_SUPPORTED (clusters before compute capability 9.0), CUDA.
 */
CUMOE_CHECKED cumoe_status cumoe_launch_kernel(cumoe_function function, const cumoe_launch *launch,
                                               const cumoe_arg *args, int32_t arg_count);

/* ---- occupancy ------------------------------------------------------------------------------------- */

typedef struct cumoe_occupancy {
  uint32_t size;           /* sizeof(cumoe_occupancy), set by the caller */
  int32_t blocks_per_sm;   /* that run at once; 0: the launch would fail */
  int32_t clusters;        /* that run at once on the whole GPU; 0 without a cluster */
  int32_t largest_cluster; /* blocks; 0 before compute capability 9.0 */
  uint64_t spare_smem;     /* dynamic bytes that a block may have with as many blocks an SM */
} cumoe_occupancy;

/* Of launches of this shape (their grid does not matter; its x may be 0). */
CUMOE_CHECKED cumoe_status cumoe_function_occupancy(cumoe_function function, const cumoe_launch *launch,
                                                    cumoe_occupancy *occupancy);

/* The number of threads, a multiple of 32, that keeps most threads of an SM busy, given the bytes of dynamic
 * shared memory of a block; of equals the largest. */
CUMOE_CHECKED cumoe_status cumoe_function_block(cumoe_function function, uint32_t dynamic_smem, uint32_t *threads);

#ifdef __cplusplus
}
#endif
#endif
