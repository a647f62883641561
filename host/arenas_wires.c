/* Memory that ranks reach: of this process, a file in memory, CUDA's handles between processes. See arenas.h. */
#include "arenas.h"
#include "context.h"
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const letter *letter_of(const arenas *a, int32_t rank)
{
  return &a->letters[rank];
}

static bool in_this_process(const arenas *a, int32_t rank)
{
  return same_process(letter_of(a, rank), letter_of(a, a->config.rank));
}

/* ---- in one process, on the CPU device ---- */

static cumoe_status heap_make(arenas *a, arena_offer *mine)
{
  a->own = memory_of_host(a->bytes);
  REQUIRE(a->own, CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %llu bytes", (unsigned long long)a->bytes);
  memset(a->own, 0, a->bytes);
  mine->address = a->own;
  return CUMOE_OK;
}

static cumoe_status heap_open(arenas *a)
{
  for (int32_t r = 0; r < a->config.ranks; r++) a->at[r] = letter_of(a, r)->offer.address;
  return CUMOE_OK;
}

static void heap_close(arenas *a, cumoe_status *first)
{
  (void)a, (void)first;
}

static void heap_drop(arenas *a, cumoe_status *first)
{
  (void)first;
  free(a->own);
}

const arena_wire heap_wire = {"one process", CUMOE_WIRE_SHARED, heap_make, heap_open, heap_close, heap_drop};

/* ---- a file in memory: it ends with the last process that has it ---- */

static cumoe_status fail_os(cumoe_status status, const char *call)
{
  const int code = errno;
  char text[128] = "";
  return fail(code == ENOMEM || code == ENOSPC ? CUMOE_ERR_OUT_OF_MEMORY : status, "%s: %s (%d)", call,
              strerror_r(code, text, sizeof text), code);
}
#define TRY_OS(condition, status, call)                                                                                \
  do {                                                                                                                 \
    if (!(condition)) return fail_os(status, call);                                                                    \
  } while (0)

static cumoe_status map_file(const arenas *a, int descriptor, void **at)
{
  void *mapped = mmap(NULL, a->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  TRY_OS(mapped != MAP_FAILED, CUMOE_ERR_NOT_SUPPORTED, "mmap");
  *at = mapped;
  return CUMOE_OK;
}

/* Its pages are taken now: a write to one that the machine has not would end the process. Nobody may shorten it. */
static cumoe_status file_make(arenas *a, arena_offer *mine)
{
  struct stat facts;
  int full;
  a->descriptor = memfd_create("cumoe_arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  TRY_OS(a->descriptor >= 0, CUMOE_ERR_NOT_SUPPORTED, "memfd_create");
  do full = fallocate(a->descriptor, 0, 0, (off_t)a->bytes);
  while (full != 0 && errno == EINTR);
  TRY_OS(full == 0, CUMOE_ERR_NOT_SUPPORTED, "fallocate");
  TRY_OS(fcntl(a->descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0, CUMOE_ERR_NOT_SUPPORTED,
         "fcntl of F_ADD_SEALS");
  TRY_OS(fstat(a->descriptor, &facts) == 0, CUMOE_ERR_NOT_SUPPORTED, "fstat");
  TRY(map_file(a, a->descriptor, &a->own));
  mine->address = a->own;
  mine->descriptor = a->descriptor;
  mine->file = facts.st_ino;
  mine->file_device = facts.st_dev;
  return CUMOE_OK;
}

/* A rank that ended has left its number to others: this is the file that was meant, or none. */
static cumoe_status map_checked(arenas *a, int32_t rank, int descriptor)
{
  const arena_offer *theirs = &letter_of(a, rank)->offer;
  struct stat facts;
  TRY_OS(fstat(descriptor, &facts) == 0, CUMOE_ERR_NOT_SUPPORTED, "fstat");
  REQUIRE(facts.st_ino == theirs->file && facts.st_dev == theirs->file_device && (uint64_t)facts.st_size == a->bytes,
          CUMOE_ERR_PEER, "rank %d has ended: its file is another one now", (int)rank);
  TRY(map_file(a, descriptor, &a->at[rank]));
  a->opened[rank] = true;
  return CUMOE_OK;
}

static cumoe_status open_file(arenas *a, int32_t rank)
{
  const letter *l = letter_of(a, rank);
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)l->facts[FACT_PROCESS],
                 (long long)l->offer.descriptor);
  const int descriptor = open(path, O_RDWR | O_CLOEXEC);
  REQUIRE(descriptor >= 0 || (errno != ENOENT && errno != ESRCH && errno != EISDIR), CUMOE_ERR_PEER,
          "rank %d has ended: no %s", (int)rank, path);
  TRY_OS(descriptor >= 0, CUMOE_ERR_NOT_SUPPORTED, path);
  const cumoe_status status = map_checked(a, rank, descriptor);
  (void)close(descriptor);
  return status;
}

static cumoe_status file_open(arenas *a)
{
  for (int32_t r = 0; r < a->config.ranks; r++)
    if (in_this_process(a, r))
      a->at[r] = letter_of(a, r)->offer.address;
    else
      TRY(open_file(a, r));
  return CUMOE_OK;
}

static void file_close(arenas *a, cumoe_status *first)
{
  (void)first;
  for (int32_t r = 0; r < a->config.ranks; r++) {
    if (a->opened[r]) (void)munmap(a->at[r], a->bytes);
    a->opened[r] = false;
  }
}

static void file_drop(arenas *a, cumoe_status *first)
{
  (void)first;
  if (a->own) (void)munmap(a->own, a->bytes);
  if (a->descriptor >= 0) (void)close(a->descriptor);
}

const arena_wire file_wire = {"a file in memory", CUMOE_WIRE_SHARED, file_make, file_open, file_close, file_drop};

/* ---- GPUs: addresses within a process, handles between processes ---- */

/* CUDA shares whole pages of this size: nothing else is to lie in them. */
static const uint64_t CUDA_PAGE = UINT64_C(2) << 20;

cumoe_status fill_with_zeros(void *data, uint64_t bytes)
{
  cudaStream_t stream;
  cumoe_status status = CUMOE_OK;
  TRY_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  DROP_CUDA(&status, cudaMemsetAsync(data, 0, bytes, stream));
  DROP_CUDA(&status, cudaStreamSynchronize(stream));
  DROP_CUDA(&status, cudaStreamDestroy(stream));
  return status;
}

static cumoe_status allocate(arenas *a)
{
  const uint64_t page = a->alone ? 1 : CUDA_PAGE, bytes = (a->bytes + page - 1) / page * page;
  const cudaError_t error = cudaMalloc(&a->own, bytes);
  if (error == cudaSuccess) return CUMOE_OK;
  a->own = NULL;
  return fail_cuda(error, "cudaMalloc");
}

static cumoe_status ipc_make(arenas *a, arena_offer *mine)
{
  TRY(allocate(a));
  TRY(fill_with_zeros(a->own, a->bytes));
  TRY_CUDA(cudaDeviceGetPCIBusId(mine->bus, (int)sizeof mine->bus, a->context->device));
  if (!a->alone) TRY_CUDA(cudaIpcGetMemHandle(&mine->handle, a->own));
  mine->address = a->own;
  return CUMOE_OK;
}

static cumoe_status find_device(const arenas *a, int32_t rank, int *device)
{
  char bus[sizeof letter_of(a, rank)->offer.bus + 1] = "";
  memcpy(bus, letter_of(a, rank)->offer.bus, sizeof bus - 1);
  const cudaError_t error = cudaDeviceGetByPCIBusId(device, bus);
  if (error != cudaErrorInvalidDevice && error != cudaErrorInvalidValue)
    return cuda_status(error, "cudaDeviceGetByPCIBusId");
  clear_cuda_error();
  return fail(CUMOE_ERR_NOT_SUPPORTED, "rank %d is on the GPU %s, which the process of rank %d does not see", (int)rank,
              bus, (int)a->config.rank);
}

/* This process sees the rank's GPU, and this rank's own reaches it. */
static cumoe_status check_reach(const arenas *a, int32_t rank)
{
  int device = -1, can = 0;
  TRY(find_device(a, rank, &device));
  if (device == a->context->device) return CUMOE_OK;
  TRY_CUDA(cudaDeviceCanAccessPeer(&can, a->context->device, device));
  REQUIRE(can, CUMOE_ERR_NOT_SUPPORTED, "rank %d is on CUDA device %d, which device %d of rank %d cannot reach",
          (int)rank, device, (int)a->context->device, (int)a->config.rank);
  return CUMOE_OK;
}

/* A process cannot open its own handles, and needs not. */
static cumoe_status ipc_open(arenas *a)
{
  for (int32_t r = 0; r < a->config.ranks; r++) {
    const arena_offer *theirs = &letter_of(a, r)->offer;
    a->at[r] = theirs->address;
    if (r == a->config.rank) continue;
    TRY(check_reach(a, r));
    if (in_this_process(a, r)) continue;
    TRY_CUDA(cudaIpcOpenMemHandle(&a->at[r], theirs->handle, cudaIpcMemLazyEnablePeerAccess));
    a->opened[r] = true;
  }
  return CUMOE_OK;
}

static void ipc_close(arenas *a, cumoe_status *first)
{
  for (int32_t r = 0; r < a->config.ranks; r++) {
    if (a->opened[r]) DROP_CUDA(first, cudaIpcCloseMemHandle(a->at[r]));
    a->opened[r] = false;
  }
}

static void ipc_drop(arenas *a, cumoe_status *first)
{
  if (a->own) DROP_CUDA(first, cudaFree(a->own));
}

const arena_wire ipc_wire = {"CUDA's handles", CUMOE_WIRE_SHARED, ipc_make, ipc_open, ipc_close, ipc_drop};
