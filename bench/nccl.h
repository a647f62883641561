/* The few functions of NCCL that benchmarks use, opened when they are wanted. */
#ifndef BENCH_NCCL_H
#define BENCH_NCCL_H

#include <stdbool.h>
#include <stddef.h>

#include <cuda_runtime_api.h>

enum { NCCL_BYTES = 0, NCCL_BF16 = 9, NCCL_SUM = 0 };

typedef struct nccl_functions {
  int (*get_version)(int *version);
  const char *(*error_string)(int code);
  int (*comm_init_all)(void **comms, int count, const int *devices);
  int (*group_start)(void);
  int (*group_end)(void);
  int (*all_gather)(const void *mine, void *to, size_t count, int type, void *comm, cudaStream_t stream);
  int (*all_reduce)(const void *from, void *to, size_t count, int type, int op, void *comm, cudaStream_t stream);
  int (*reduce_scatter)(const void *from, void *mine, size_t count, int type, int op, void *comm, cudaStream_t stream);
  int (*send)(const void *from, size_t count, int type, int rank, void *comm, cudaStream_t stream);
  int (*receive)(void *to, size_t count, int type, int rank, void *comm, cudaStream_t stream);
} nccl_functions;

extern nccl_functions bench_nccl; /* host/nccl.h has a type nccl */

bool nccl_load(void); /* false: there is none, or it lacks a function */

#endif
