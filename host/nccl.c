/* See nccl.h. */
#include "nccl.h"
#include "dl.h"
#include "../kernels/cpu/clock.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static const struct {
  const char *name;
  size_t at; /* of the pointer in nccl */
  int since; /* the version that has to have it; 0: any */
} functions[] = {
    {"ncclGetVersion", offsetof(nccl, get_version), 0},
    {"ncclGetErrorString", offsetof(nccl, error_string), 0},
    {"ncclCommCount", offsetof(nccl, comm_count), 0},
    {"ncclCommUserRank", offsetof(nccl, comm_user_rank), 0},
    {"ncclCommCuDevice", offsetof(nccl, comm_cu_device), 0},
    {"ncclCommGetAsyncError", offsetof(nccl, comm_async_error), 0},
    {"ncclAllGather", offsetof(nccl, all_gather), 0},
    {"ncclGroupStart", offsetof(nccl, group_start), NCCL_SENDS_SINCE},
    {"ncclGroupEnd", offsetof(nccl, group_end), NCCL_SENDS_SINCE},
    {"ncclSend", offsetof(nccl, send), NCCL_SENDS_SINCE},
    {"ncclRecv", offsetof(nccl, receive), NCCL_SENDS_SINCE},
    {"ncclMemAlloc", offsetof(nccl, mem_alloc), NCCL_WINDOWS_SINCE},
    {"ncclMemFree", offsetof(nccl, mem_free), NCCL_WINDOWS_SINCE},
    {"ncclCommWindowRegister", offsetof(nccl, window_register), NCCL_WINDOWS_SINCE},
    {"ncclCommWindowDeregister", offsetof(nccl, window_deregister), NCCL_WINDOWS_SINCE},
    {"ncclGetPeerDevicePointer", offsetof(nccl, peer_pointer), NCCL_WINDOWS_SINCE},
};

nccl_words say_nccl(int version)
{
  const int major = version < 10000 ? 1000 : 10000; /* 2.8.4 was 2804, 2.9.6 is 20906 */
  nccl_words words;
  (void)snprintf(words.text, sizeof words.text, "%d.%d.%d", version / major % 1000, version % major / 100,
                 version % 100);
  return words;
}

static cumoe_status find_functions(nccl *n, void *library)
{
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    if (functions[i].since > n->version) continue;
    void *found = dlsym(library, functions[i].name);
    REQUIRE(found, CUMOE_ERR_LIBRARY_MISSING, "NCCL %s has no function %s", say_nccl(n->version).text,
            functions[i].name);
    memcpy((char *)n + functions[i].at, &found, sizeof found);
  }
  return CUMOE_OK;
}

cumoe_status nccl_open(nccl *n, void *library, void *comm)
{
  static const char *const names[] = {"libnccl.so.2", "libnccl.so", NULL};
  static const shared_library wanted = {.title = "NCCL", .probe = "ncclGetVersion", .names = names};
  if (!library) TRY(find_loaded_library(&wanted, &library));
  *n = (nccl){.comm = comm};
  TRY(find_functions(n, library));
  TRY(nccl_status(n, "ncclGetVersion", n->get_version(&n->version)));
  return find_functions(n, library);
}

cumoe_status nccl_status(const nccl *n, const char *call, int result)
{
  enum { REMOTE_ERROR = 6 };
  if (result == 0) return CUMOE_OK;
  clear_cuda_error();
  REQUIRE(result != NCCL_IN_PROGRESS, CUMOE_ERR_NOT_SUPPORTED,
          "%s: ncclInProgress: config.comm is a communicator that does not block", call);
  return fail(result == REMOTE_ERROR ? CUMOE_ERR_PEER : CUMOE_ERR_CUDA, "%s: %d: %s", call, result,
              n->error_string(result));
}

cumoe_status nccl_check(const nccl *n, int32_t rank, int32_t ranks, int32_t device)
{
  int count = -1, own = -1, gpu = -1;
  TRY(nccl_status(n, "ncclCommCount", n->comm_count(n->comm, &count)));
  TRY(nccl_status(n, "ncclCommUserRank", n->comm_user_rank(n->comm, &own)));
  TRY(nccl_status(n, "ncclCommCuDevice", n->comm_cu_device(n->comm, &gpu)));
  REQUIRE(count == ranks, CUMOE_ERR_INVALID_ARGUMENT, "config.comm has %d ranks, config.ranks is %d", count,
          (int)ranks);
  REQUIRE(own == rank, CUMOE_ERR_INVALID_ARGUMENT, "config.comm is of rank %d, config.rank is %d", own, (int)rank);
  REQUIRE(gpu == device, CUMOE_ERR_WRONG_DEVICE, "config.comm is of CUDA device %d, context of %d", gpu, (int)device);
  return CUMOE_OK;
}

cumoe_status nccl_await(const nccl *n, const char *call, cudaStream_t stream, int64_t timeout_ns, bool *stuck)
{
  const struct timespec nap = {.tv_nsec = 50000};
  const int64_t begin = now_ns();
  cudaError_t error;
  while ((error = cudaStreamQuery(stream)) == cudaErrorNotReady) {
    int result = 0;
    clear_cuda_error();
    const cumoe_status asked = nccl_status(n, "ncclCommGetAsyncError", n->comm_async_error(n->comm, &result));
    const cumoe_status met = asked == CUMOE_OK ? nccl_status(n, call, result) : asked;
    *stuck = met != CUMOE_OK || now_ns() - begin > timeout_ns;
    TRY(met);
    REQUIRE(!*stuck, CUMOE_ERR_PEER,
            "%s has not ended within %g s: a rank has not come. End the communicator before the context", call,
            (double)timeout_ns * 1e-9);
    nanosleep(&nap, NULL);
  }
  return cuda_status(error, "cudaStreamQuery");
}
