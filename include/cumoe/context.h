/*
 * cumoe/context.h: a context is one device, its facts, its kernels.
 *
 * Threads: any number of threads may use one context at once; create and destroy exclude all other calls on
 * it. Any number of contexts and devices per process. No call changes the thread's current CUDA device.
 *
 * After fork(), the child cannot use its parent's contexts (NOT_SUPPORTED); it may make its own on the CPU
 * device.
 */
#ifndef CUMOE_CONTEXT_H
#define CUMOE_CONTEXT_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Contexts, plans and weights are handles: of a pointer's type, so that NULL means none, but never an address. One that
 * was destroyed, or never was one, is refused with STALE_HANDLE by every call, whatever took its place since; so is a
 * second destroy. That holds between calls: a destroy must not run while another thread still uses the object.
 */
typedef struct cumoe_context_s *cumoe_context;

/*
 * Zero means default in every field.
 *
 * The pool is the context's own (cumoe/pool.h); the three sizes are in bytes. Without an allocator, memory of
 * freed buffers stays in the pool until cumoe_pool_trim, or, above pool_keep, until the next wait of the device.
 *
 * The CPU device computes in the default floating-point environment whatever a calling thread has set, which that
 * thread keeps, and takes less than 64 KiB of its stack (forwards of the layer on one rank: less than 32).
 */
typedef struct cumoe_context_config {
  uint32_t size;         /* sizeof(cumoe_context_config) */
  int32_t cpu_threads;   /* CPU device: threads that compute, the caller's among them; 0 = one a core; at most 1024 */
  int32_t debug;         /* 0 .. 2, see cumoe/debug.h; the environment's CUMOE_DEBUG may raise it */
  int32_t reserved;      /* 0 */
  uint64_t pool_initial; /* taken from the GPU at once, at most pool_max and pool_keep; CPU device: ignored */
  uint64_t pool_max;     /* limit of bytes in use, in steps of 256 a buffer; 0 = none */
  uint64_t pool_keep;    /* CUDA's release threshold; 0 = keep everything */
  const struct cumoe_allocator *allocator; /* instead of the pool; copied; see cumoe/pool.h */
} cumoe_context_config;

/*
 * Opens `device`: a CUDA ordinal, CUMOE_DEVICE_AUTO or CUMOE_DEVICE_CPU. Loads kernels and sets their attributes now,
 * so that the first launch may already be captured into a graph; those of weights with a format when the first of it
 * are bound, those of attention, training and backward by the first call. `config` may be NULL.
 * AUTO falls back to the CPU device when there is no usable GPU and says why through the log (WARNING) and in
 * cumoe_device_info.fallback.
 * Errors: NO_DEVICE (no driver, no GPU, ordinal too large), NO_KERNEL_IMAGE (text names the GPU and the
 * architectures built), DRIVER_TOO_OLD, OUT_OF_MEMORY (also for pool_initial), CUDA. On failure *context is NULL.
 */
CUMOE_CHECKED cumoe_status cumoe_context_create(int32_t device, const cumoe_context_config *config,
                                                cumoe_context *context);

/*
 * Waits for all work of the device, frees what the context owns, closes it. Its plans, weights, buffers, modules and
 * functions need not be destroyed before: they end with it, and are STALE_HANDLE from then on. Graphs that hold its
 * kernels must be; other captures under way are not disturbed. NULL is allowed. A failure, such as a lost device, is
 * reported after closing it all the same.
 */
CUMOE_API cumoe_status cumoe_context_destroy(cumoe_context context);

typedef struct cumoe_device_info {
  uint32_t size;              /* sizeof(cumoe_device_info), set by the caller */
  int32_t device;             /* CUDA ordinal or CUMOE_DEVICE_CPU */
  int32_t cc_major, cc_minor; /* compute capability; 0.0 on the CPU device */
  int32_t multiprocessors;    /* SMs; threads on the CPU device */
  int32_t l2_bytes, smem_per_block_optin, smem_per_sm;
  int64_t total_memory; /* bytes */
  char name[128];
  char fallback[256]; /* why CUMOE_DEVICE_AUTO took the CPU device; "" on the device that was asked for */
} cumoe_device_info;

/* Facts read once at creation; no CUDA call. */
CUMOE_CHECKED cumoe_status cumoe_context_info(cumoe_context context, cumoe_device_info *info);

/* Waits until all work on `stream` is done. Not during capture (CAPTURE_UNSAFE). */
CUMOE_CHECKED cumoe_status cumoe_synchronize(cumoe_context context, cumoe_stream stream);

/* ---- the device status word ------------------------------------------------------------------------ */

/*
 * Bad device data never faults a kernel: the slot concerned contributes exactly 0, the first such event since the last
 * clear is recorded here (first one wins; of one stage's, the token count before what is wrong with tokens), and the
 * context stays usable. Numbers that are only multiplied (weights, expert_scale, x) are what they are: a NaN there is a
 * NaN in the token's output, and no fault.
 */
typedef enum cumoe_fault_code {
  CUMOE_FAULT_NONE = 0,
  CUMOE_FAULT_EXPERT_ID = 1,   /* an expert id other than -1 lies outside the experts */
  CUMOE_FAULT_NAN_LOGIT = 2,   /* a router logit is NaN (ranked last; its slot, if chosen, weighs 0) */
  CUMOE_FAULT_TOKEN_COUNT = 3, /* the device token count lies outside 0 .. x.rows (clamped) */
  CUMOE_FAULT_EXPERT_MAP = 4,  /* an expert map entry other than -1 lies outside the local experts */
  CUMOE_FAULT_ROUTE = 5,       /* counts, offsets or rows of a caller's map are inconsistent (clamped) */
  CUMOE_FAULT_TOKEN_ID = 6,    /* a token's id or target lies outside the vocabulary (cumoe/train.h) */
  CUMOE_FAULT_SEQUENCE = 7     /* offsets, lengths, pages or positions of sequences are inconsistent (attention.h) */
} cumoe_fault_code;

typedef struct cumoe_fault {
  uint32_t size;    /* sizeof(cumoe_fault), set by the caller */
  int32_t code;     /* cumoe_fault_code */
  int32_t slot;     /* slot of the token, or expert, or 0 */
  int32_t reserved; /* 0 */
  int64_t token;    /* token index, or 0 */
} cumoe_fault;

/* 1 if a fault was recorded and has reached host memory; never waits, may lag behind the stream. */
CUMOE_API int cumoe_fault_pending(cumoe_context context);

/* Waits for `stream` and reads the record. Not during capture. */
CUMOE_CHECKED cumoe_status cumoe_fault_read(cumoe_context context, cumoe_stream stream, cumoe_fault *fault);

/* Stream-ordered; may be captured. */
CUMOE_CHECKED cumoe_status cumoe_fault_clear(cumoe_context context, cumoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
