/* See nccl.h. */
#include "nccl.h"

#include <dlfcn.h>

nccl_functions nccl;

static bool find(void *library, const char *name, void *function)
{
  return (*(void **)function = dlsym(library, name)) != NULL;
}

bool nccl_load(void)
{
  void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  return library && find(library, "ncclGetVersion", &nccl.get_version) &&
         find(library, "ncclGetErrorString", &nccl.error_string) &&
         find(library, "ncclCommInitAll", &nccl.comm_init_all) && find(library, "ncclGroupStart", &nccl.group_start) &&
         find(library, "ncclGroupEnd", &nccl.group_end) && find(library, "ncclAllGather", &nccl.all_gather) &&
         find(library, "ncclAllReduce", &nccl.all_reduce) && find(library, "ncclReduceScatter", &nccl.reduce_scatter) &&
         find(library, "ncclSend", &nccl.send) && find(library, "ncclRecv", &nccl.receive);
}
