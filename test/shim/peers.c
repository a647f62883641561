/* What reaches across the shim's devices: copies between peers, and the access to pools. */
#include "core.h"

#include <stdint.h>

static bool on_device(const void *at, size_t bytes, int device)
{
  const block *b = block_holding(at, bytes);
  return b != NULL && b->object.device == device;
}

static bool granted; /* some pool to some peer */

static cudaError_t move_peer(const node *n, int dst_device, int src_device, cudaStream_t stream)
{
  const size_t dst_bytes = n->dst_pitch * (n->rows - 1) + n->width, src_bytes = n->src_pitch * (n->rows - 1) + n->width;
  cudaError_t error = stream_takes_work(stream);
  if (error == cudaSuccess && (!on_device(n->dst, dst_bytes, dst_device) || !on_device(n->src, src_bytes, src_device)))
    error = cudaErrorInvalidValue;
  if (error != cudaSuccess) return error;
  if (shim.broken_peers && granted) {
    const node nothing = {
        .dst = n->dst, .dst_pitch = n->dst_pitch, .src_pitch = n->dst_pitch, .width = n->width, .rows = n->rows};
    return shim_move(&nothing);
  }
  if (stream_of(stream)->graph == NULL) return shim_move(n);
  graph_add(stream_of(stream)->graph, n);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device, size_t bytes,
                                cudaStream_t stream)
{
  const node n = {.dst = dst, .src = src, .dst_pitch = bytes, .src_pitch = bytes, .width = bytes, .rows = 1};
  cudaError_t error = BEGIN(SHIM_MOVE | SHIM_CONTEXT, "%zu, from %d to %d", bytes, src_device, dst_device);
  if (error == cudaSuccess) error = move_peer(&n, dst_device, src_device, stream);
  return shim_end(error);
}

cudaError_t cudaMemcpy3DPeerAsync(const struct cudaMemcpy3DPeerParms *p, cudaStream_t stream)
{
  const node n = {.dst = p->dstPtr.ptr,
                  .src = p->srcPtr.ptr,
                  .dst_pitch = p->dstPtr.pitch,
                  .src_pitch = p->srcPtr.pitch,
                  .width = p->extent.width,
                  .rows = p->extent.height};
  cudaError_t error =
      BEGIN(SHIM_MOVE | SHIM_CONTEXT, "%zu x %zu, from %d to %d", n.rows, n.width, p->srcDevice, p->dstDevice);
  if (error == cudaSuccess && (p->extent.depth != 1 || n.dst_pitch < n.width || n.src_pitch < n.width))
    error = cudaErrorInvalidValue;
  if (error == cudaSuccess) error = move_peer(&n, p->dstDevice, p->srcDevice, stream);
  return shim_end(error);
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
  cudaError_t error = BEGIN(SHIM_QUERY, "%d from %d", peer, device);
  if (error == cudaSuccess && (device < 0 || device >= shim.devices || peer < 0 || peer >= shim.devices))
    error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) *can = device != peer && !shim.no_peers;
  return shim_end(error);
}

/* Memory of cudaMalloc is reached by copies alone here. */
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
  cudaError_t error = BEGIN(SHIM_MOVE | SHIM_CONTEXT, "%d, %u", peer, flags);
  if (error == cudaSuccess && (peer < 0 || peer >= shim.devices || flags || shim.no_peers))
    error = cudaErrorInvalidDevice;
  return shim_end(error);
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count)
{
  cudaError_t error = BEGIN(0, "%zu, device %d, flags %d", count, access->location.id, (int)access->flags);
  if (error == cudaSuccess && (object_find(POOL, pool) == NULL || access->location.id == pool->object.device))
    error = cudaErrorInvalidValue;
  if (error == cudaSuccess) granted = access->flags != cudaMemAccessFlagsProtNone;
  return shim_end(error);
}

/* What is reserved is what is used: the shim keeps nothing. */
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
  cudaError_t error = BEGIN(SHIM_QUERY, "%d", (int)attribute);
  if (error == cudaSuccess && object_find(POOL, pool) == NULL) error = cudaErrorInvalidValue;
  if (error != cudaSuccess) return shim_end(error);
  switch (attribute) {
  case cudaMemPoolAttrReservedMemCurrent:
  case cudaMemPoolAttrUsedMemCurrent: *(uint64_t *)value = pool->used; break;
  case cudaMemPoolAttrReservedMemHigh:
  case cudaMemPoolAttrUsedMemHigh: *(uint64_t *)value = pool->used_high; break;
  case cudaMemPoolAttrReleaseThreshold: *(uint64_t *)value = pool->threshold; break;
  default: error = cudaErrorInvalidValue;
  }
  return shim_end(error);
}
