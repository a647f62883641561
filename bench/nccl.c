/* See nccl.h. */
#include "nccl.h"

#include <dlfcn.h>

nccl_functions peer;

static bool find(void *library, const char *name, void *function)
{
  return (*(void **)function = dlsym(library, name)) != NULL;
}

bool nccl_load(void)
{
  void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  return library && find(library, "ncclGetVersion", &peer.get_version) &&
         find(library, "ncclGetErrorString", &peer.error_string) &&
         find(library, "ncclCommInitAll", &peer.comm_init_all) && find(library, "ncclGroupStart", &peer.group_start) &&
         find(library, "ncclGroupEnd", &peer.group_end) && find(library, "ncclAllGather", &peer.all_gather) &&
         find(library, "ncclAllReduce", &peer.all_reduce) && find(library, "ncclReduceScatter", &peer.reduce_scatter) &&
         find(library, "ncclSend", &peer.send) && find(library, "ncclRecv", &peer.receive);
}
