/* The few functions of NCCL that arenas and groups use: an engine's own copy, never linked, declared here. */
#ifndef CUMOE_HOST_NCCL_H
#define CUMOE_HOST_NCCL_H

#include "status.h"

enum { NCCL_UINT8 = 1, NCCL_WINDOW_DEFAULT = 0, NCCL_IN_PROGRESS = 7 };

/* From this version on a host function tells where the ranks' windows are. */
enum { NCCL_WINDOWS_SINCE = 22902 };

/* From this version on a rank sends to another. */
enum { NCCL_SENDS_SINCE = 2703 };

typedef struct nccl {
  void *comm; /* ncclComm_t, the engine's; NULL: none, and nothing else is set */
  int version;
  int (*get_version)(int *version);
  const char *(*error_string)(int result);
  int (*comm_count)(void *comm, int *count);
  int (*comm_user_rank)(void *comm, int *rank);
  int (*comm_cu_device)(void *comm, int *device);
  int (*comm_async_error)(void *comm, int *result);
  int (*all_gather)(const void *mine, void *all, size_t count, int type, void *comm, cudaStream_t stream);
  /* from NCCL_SENDS_SINCE on */
  int (*group_start)(void);
  int (*group_end)(void);
  int (*send)(const void *from, size_t count, int type, int rank, void *comm, cudaStream_t stream);
  int (*receive)(void *to, size_t count, int type, int rank, void *comm, cudaStream_t stream);
  /* from NCCL_WINDOWS_SINCE on */
  int (*mem_alloc)(void **data, size_t bytes);
  int (*mem_free)(void *data);
  int (*window_register)(void *comm, void *data, size_t bytes, void **window, int flags);
  int (*window_deregister)(void *comm, void *window);
  int (*peer_pointer)(void *window, size_t offset, int peer, void **data);
} nccl;

/* `library`: a handle of dlopen, or NULL for the copy that the process has loaded. LIBRARY_MISSING, naming what is. */
cumoe_status nccl_open(nccl *n, void *library, void *comm);

/* The communicator is the one that the configuration means. */
cumoe_status nccl_check(const nccl *n, int32_t rank, int32_t ranks, int32_t device);

static inline bool nccl_has_windows(const nccl *n)
{
  return n->comm && n->version >= NCCL_WINDOWS_SINCE;
}

static inline bool nccl_has_sends(const nccl *n)
{
  return n->version >= NCCL_SENDS_SINCE;
}

/* Until what `call` put on the stream has ended: at most timeout_ns, then PEER, and *stuck: NCCL's kernel ends when all
 * ranks have come, which one may never do, so that nothing that waits for the stream may be called. */
cumoe_status nccl_await(const nccl *n, const char *call, cudaStream_t stream, int64_t timeout_ns, bool *stuck);

/* What `call` answered: OK, PEER where another rank is the cause, else CUDA, as NCCL has it. */
cumoe_status nccl_status(const nccl *n, const char *call, int result);

/* "2.29.7" */
typedef struct nccl_words {
  char text[16];
} nccl_words;
nccl_words say_nccl(int version);

#endif
