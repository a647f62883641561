/* Threads that stand for processes, and what CUDA has between processes. */
#include "core.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

pid_t __real_getpid(void);
pid_t __wrap_getpid(void);

_Thread_local int shim_process;

pid_t __wrap_getpid(void)
{
  return shim_process ? shim_process : __real_getpid();
}

/* ---- devices by their place on the bus ---- */

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device)
{
  cudaError_t error = BEGIN(SHIM_QUERY, "%d", device);
  if (error == cudaSuccess && (bytes < 13 || device < 0 || device >= shim.devices)) error = cudaErrorInvalidValue;
  if (error == cudaSuccess) snprintf(text, (size_t)bytes, "0000:%02X:00.0", device + 16);
  return shim_end(error);
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text)
{
  unsigned bus = 0;
  cudaError_t error = BEGIN(SHIM_QUERY, "%s", text);
  if (error == cudaSuccess && (sscanf(text, "0000:%02X:00.0", &bus) != 1 || bus < 16 || (int)bus >= shim.devices + 16 ||
                               (shim.alone && (int)bus - 16 != current_device())))
    error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) *device = (int)bus - 16;
  return shim_end(error);
}

/* ---- handles of memory ---- */

typedef struct handle {
  block *of;
  uintptr_t at;
  int64_t process;
} handle;

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *at)
{
  cudaError_t error = BEGIN(SHIM_QUERY | SHIM_CONTEXT, "%s", "");
  block *b = block_at(at);
  if (error == cudaSuccess && (b == NULL || b->pool != NULL || b->alias)) error = cudaErrorInvalidValue;
  if (error == cudaSuccess) {
    const handle h = {b, b->at, __wrap_getpid()};
    memset(out, 0, sizeof *out);
    memcpy(out->reserved, &h, sizeof h);
  }
  return shim_end(error);
}

/* Not in the process that it is of. */
cudaError_t cudaIpcOpenMemHandle(void **at, cudaIpcMemHandle_t from, unsigned flags)
{
  handle h;
  memcpy(&h, from.reserved, sizeof h);
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT | SHIM_UNSAFE, "flags %u", flags);
  if (error == cudaSuccess && (h.of == NULL || block_at((void *)h.at) != h.of || h.process == __wrap_getpid()))
    error = cudaErrorInvalidValue;
  if (error == cudaSuccess) *at = (void *)alias_of(h.of)->at;
  return shim_end(error);
}

cudaError_t cudaIpcCloseMemHandle(void *at)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_SYNC | SHIM_CONTEXT | SHIM_UNSAFE, "%s", "");
  block *b = block_at(at);
  if (b != NULL && b->alias)
    end_block(b);
  else if (error == cudaSuccess)
    error = cudaErrorInvalidValue;
  return shim_end(error);
}
