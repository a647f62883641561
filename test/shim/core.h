/* What the parts of the shim share. */
#ifndef SHIM_CORE_H
#define SHIM_CORE_H

#include "shim.h"

#include <cuda.h>
#include <pthread.h>

enum { MAX_DEVICES = 8, MAX_DEPTH = 16, GUARD = 64, GUARD_BYTE = 0xe7 };

typedef enum object_kind {
  DEVICE_BLOCK,
  HOST_BLOCK,
  POOL,
  STREAM,
  EVENT,
  LIBRARY,
  GRAPH,
  GRAPH_EXEC,
  FOREIGN,
  KINDS
} object_kind;

/* Every object begins with this and is in one list. */
typedef struct object {
  struct object *next;
  object_kind kind;
  int device;
} object;

typedef struct block {
  object object;
  uintptr_t at;
  size_t bytes;
  struct CUmemPoolHandle_st *pool; /* NULL: not from a pool */
  unsigned char *backing;          /* with guards, for a host block */
  int *users;                      /* of a device block's backing: itself, and where other processes opened it */
  bool alias;                      /* such a place */
} block;

struct CUmemPoolHandle_st {
  object object;
  uint64_t threshold, used, used_high;
  int blocks;
  bool ended; /* destroyed, but memory from it lives on */
};

typedef struct node {
  void *dst;
  const void *src; /* NULL: a fill */
  size_t dst_pitch, src_pitch, width, rows;
  int byte;
  char text[200]; /* of a kernel; "" otherwise */
  const char *kernel_name;
  unsigned grid[2], threads;
  _Alignas(64) unsigned char args[4096]; /* where kernels are run */
} node;

struct CUgraph_st {
  object object;
  node *nodes;
  int count;
};

struct CUgraphExec_st {
  object object;
  node *nodes;
  int count;
};

struct CUstream_st {
  object object;
  unsigned flags;
  struct CUgraph_st *graph; /* being captured into; not NULL: capturing */
  bool forked;              /* by an event of the stream whose capture that is */
  bool loose;               /* it has work that no other stream has waited for since */
  bool invalid;             /* that capture */
  enum cudaStreamCaptureMode mode;
  pthread_t thread;
  bool stuck; /* holds a kernel that waits for ever */
};

struct CUevent_st {
  object object;
  bool recorded;
  struct CUstream_st *on; /* where it was recorded in a capture, or NULL */
};

struct CUlib_st {
  object object;
  const void *image;
};

struct CUctx_st {
  int device;
};

typedef struct thread_state {
  cudaError_t last;
  struct CUctx_st *stack[MAX_DEPTH];
  int depth;
  enum cudaStreamCaptureMode mode;
} thread_state;

extern _Thread_local thread_state thread;
extern struct CUctx_st primaries[MAX_DEVICES];

/* The lock is held from begin to end. begin: cudaSuccess, or why the call fails. */
cudaError_t shim_begin(const char *name, unsigned kinds, const char *format, ...) __attribute__((format(printf, 3, 4)));
cudaError_t shim_end(cudaError_t error); /* also remembers it for the thread */
CUresult shim_end_driver(cudaError_t error);
void shim_unlock(void); /* between, for what takes long */
void shim_lock(void);
CUresult kernel_parameter(CUkernel kernel, size_t index, size_t *offset, size_t *bytes);
CUresult kernel_attribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device);
CUresult launch_kernel_ex(const CUlaunchConfig *config, CUfunction kernel, void **args, void **extra);
#define BEGIN(kinds, ...) shim_begin(__func__, (kinds), __VA_ARGS__)

object *shim_objects(void);  /* the list of all */
bool implicit_capture(void); /* a blocking stream is being captured: the legacy stream must stay out of it */
void graph_add(struct CUgraph_st *graph, const node *n);
cudaError_t shim_move(const node *n); /* a copy or a fill, now */
void count_unknown(void);

void note_text(const char *text); /* a line of the trace */
void shim_note(const char *name); /* the same for a call that is not CUDA's, without the lock */
bool is_stuck(int device);        /* some stream of it is */
void set_stuck(cudaStream_t stream, bool stuck);
void *nccl_function(const char *name);
int current_device(void); /* 0 if the thread has no context */
object *object_new(object_kind kind, size_t bytes);
void object_end(object *o);
object *object_find(object_kind kind, const void *o);
block *block_holding(const void *at, size_t bytes); /* wholly inside a live device block */
block *block_at(const void *at);                    /* that begins there */
block *alias_of(const block *of);                   /* the same bytes at another address; ends by end_block */
void end_block(block *b);
block *shim_alias(const void *at); /* both, without the lock; NULL: no block begins there */
void shim_alias_end(block *b);

/* The stream, or the device's default one; NULL if it is none. */
struct CUstream_st *stream_of(cudaStream_t stream);
/* For work put into a stream: cudaSuccess, or why not. */
cudaError_t stream_takes_work(cudaStream_t stream);
bool capture_forbids(void);
void invalidate_captures(void);

/* What --wrap leaves of the heap: the shim's own memory is not counted. */
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *block, size_t bytes);
void __real_free(void *block);
int shim_planned(shim_channel channel, const char *name); /* 0, or the error to fail with */
bool shim_heap_fails(shim_channel channel, const char *name);

#endif
