/* See nccl.h. */
#include "nccl.h"

#include <dlfcn.h>

nccl_functions bench_nccl;

static bool find(void *library, const char *name, void *function)
{
  return (*(void **)function = dlsym(library, name)) != NULL;
}

bool nccl_load(void)
{
  void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  return library && find(library, "ncclGetVersion", &bench_nccl.get_version) &&
         find(library, "ncclGetErrorString", &bench_nccl.error_string) &&
         find(library, "ncclCommInitAll", &bench_nccl.comm_init_all) &&
         find(library, "ncclGroupStart", &bench_nccl.group_start) &&
         find(library, "ncclGroupEnd", &bench_nccl.group_end) &&
         find(library, "ncclAllGather", &bench_nccl.all_gather) &&
         find(library, "ncclAllReduce", &bench_nccl.all_reduce) &&
         find(library, "ncclReduceScatter", &bench_nccl.reduce_scatter) &&
         find(library, "ncclSend", &bench_nccl.send) && find(library, "ncclRecv", &bench_nccl.receive);
}
