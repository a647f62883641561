/*
 * A CUDA runtime without a GPU, linked instead of the real one: what the host layer calls is recorded, counted,
 * checked and, on demand, made to fail.
 *
 * Device memory has addresses that the host cannot touch (a host access is a crash in every build) and bytes kept
 * elsewhere, which only copies and fills reach; every access is checked against the live allocations. Work is done when
 * it is launched; kernels are recorded and, but where `emulates` is set, not run. Captures follow CUDA's rules, the
 * unsafe calls included. All objects are counted: what is live after the last destroy is a leak.
 *
 * A call that frees and fails has freed: that is what CUDA does for errors of earlier work.
 */
#ifndef SHIM_H
#define SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cuda_runtime_api.h>

/* ---- the machine: may be changed while nothing is live ---- */

typedef struct shim_machine {
  int devices, major, minor;      /* 2 of compute capability 9.0 by default */
  int driver;                     /* its CUDA version, 13000; 0: none installed */
  size_t memory;                  /* bytes of each device */
  int processors;                 /* SMs of each, 132 */
  int smem;                       /* bytes of shared memory a block may ask for */
  bool no_pools, no_image;        /* devices without memory pools; images without code for them */
  bool reads_pages;               /* devices read pageable host memory themselves */
  bool broken_peers, no_peers;    /* granted access breaks copies between devices; no path between them */
  bool alone;                     /* a process sees one device only, that of its context */
  const char *hidden;             /* a function that the driver, or another library, does not have */
  bool no_libraries, ptx_only;    /* neither NVRTC nor cuBLAS is installed; the compiler makes PTX only */
  int nccl;                       /* version of the NCCL that the process has loaded, 22907; 0: none */
  bool null_windows, far_windows; /* registering gives none, with success; windows of others have no address */
  int patience_ms;                /* NCCL's: when a rank has not come by then it never will */
  bool torn_sends;                /* NCCL's: rank 1 does not get the last byte of what is longer than a line */
  bool ends_comms;                /* once a call was made to fail, the engine ends the communicators at once */
  const char *missing;            /* a kernel that is not in its image */
  int max_threads;                /* of every kernel */
  size_t more_parameter;          /* bytes that the argument of every kernel of the library has too many */
  bool emulates;                  /* kernels of any GPU are run (test/emulate/); the host can touch device memory */
} shim_machine;

extern shim_machine shim;
void shim_reset(void); /* the default machine, whole and empty-handed; forgets the calling thread's error and device */

/* ---- faults ---- */

typedef enum shim_channel {
  SHIM_CUDA,    /* runtime and driver calls that can fail */
  SHIM_HEAP,    /* malloc, calloc, realloc, aligned_alloc of everything linked with --wrap */
  SHIM_THREAD,  /* pthread_create */
  SHIM_LIBRARY, /* NVRTC and cuBLAS: fails with their own code, given as the error */
  SHIM_CHANNELS
} shim_channel;

/* Call `nth` from now on (1: the next) fails, or it and all after it. An error that CUDA calls sticky loses the current
 * device. */
void shim_fail(shim_channel channel, int64_t nth, bool forever, cudaError_t error);
int64_t shim_seen(shim_channel channel); /* calls since shim_fail */
const char *shim_failed(void);           /* the first call that was made to fail, or NULL */
int64_t shim_faults(void);               /* calls made to fail since the program began */
void shim_pause(bool on);                /* the test's own calls neither fail nor count */
void shim_heal(void);                    /* no plan, devices whole, no error pending on this thread */
bool shim_sticky(cudaError_t error);

/* ---- what was called ---- */

enum {
  SHIM_ALLOC = 1,    /* allocates or frees, makes or ends an object */
  SHIM_SYNC = 2,     /* waits */
  SHIM_QUERY = 4,    /* asks for a state or an attribute */
  SHIM_LAUNCH = 8,   /* a kernel */
  SHIM_MOVE = 16,    /* a copy or a fill */
  SHIM_NEUTRAL = 32, /* the thread's error, names, the current context, encoding: cheap anywhere, also in a capture */
  SHIM_ALL = 63,
  /* what such a call needs; not for counting */
  SHIM_CONTEXT = 64,   /* a CUDA context: made on device 0 if the thread has none */
  SHIM_UNSAFE = 128,   /* "potentially unsafe" while something is captured */
  SHIM_FAULTLESS = 256 /* cannot fail */
};

void shim_mark(void); /* begins a new trace */
int64_t shim_calls(unsigned kinds);
const char *shim_trace(void); /* one line a call: name, what it was about, @device. Without addresses. */
int64_t shim_implicit(void);  /* contexts that the runtime made because a thread had none */
int64_t shim_unknown(void);   /* driver functions asked for that the shim does not have */

/* ---- what is live ---- */

int64_t shim_live(void); /* CUDA objects */
int64_t shim_heap(void); /* blocks of the heap */
size_t shim_device_bytes(int device);
bool shim_has(const void *it); /* a stream, event, graph ... that is live */
void shim_print_live(void);    /* to stdout, as "# ..." */
bool shim_guards_whole(void);  /* nothing was written around pinned host memory */

/* ---- processes: threads that say they are; 0: the real one. getpid() and CUDA's handles go by it ---- */

extern _Thread_local int shim_process;

/* ---- NCCL: communicators of threads ---- */

/* comms [ranks], of the ranks' devices: an ncclComm_t each. */
void shim_comms_open(void **comms, int ranks, const int *devices);
void shim_comms_close(void **comms); /* also aborts: what its gathers left on streams is gone */
void *shim_nccl_handle(void);        /* as of dlopen */

/* ---- for tests ---- */

/* Addresses of device memory that is not there, for operands that nobody reads: a fill of it does nothing. */
#define SHIM_LENT     ((uintptr_t)1 << 40)
#define SHIM_LENT_END ((uintptr_t)1 << 41)

void shim_write(void *device, const void *from, size_t bytes); /* device memory, no call recorded */
void shim_read(void *to, const void *device, size_t bytes);
cudaError_t shim_last_error(void); /* of the thread; no call recorded */
enum cudaStreamCaptureMode shim_capture_mode(void);
int shim_current_device(void);        /* -1: the thread has no context */
void shim_drop_context(void);         /* the thread has none */
void shim_engine_context(int device); /* it has one that is not the runtime's */
/* The arguments of the last launch of a kernel whose name contains `part`; NULL: there was none since the mark. */
const void *shim_last_args(const char *part);
const void *shim_last_image(void); /* the address that was loaded last */

#endif
