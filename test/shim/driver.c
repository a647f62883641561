/* The driver's functions that the host layer asks the runtime for. They set no last error. */
#include "core.h"
#include "tensor_map.h"

#include <string.h>

static CUresult get_current(CUcontext *context)
{
  cudaError_t error = shim_begin("cuCtxGetCurrent", SHIM_NEUTRAL, "%s", "");
  if (error == cudaSuccess) *context = thread.depth ? thread.stack[thread.depth - 1] : NULL;
  return shim_end_driver(error);
}

static CUresult push_current(CUcontext context)
{
  cudaError_t error = shim_begin("cuCtxPushCurrent", SHIM_NEUTRAL, "%d", context->device);
  if (error == cudaSuccess && thread.depth == MAX_DEPTH) error = cudaErrorMemoryAllocation;
  if (error == cudaSuccess) thread.stack[thread.depth++] = context;
  return shim_end_driver(error);
}

static CUresult pop_current(CUcontext *context)
{
  cudaError_t error = shim_begin("cuCtxPopCurrent", SHIM_NEUTRAL, "%s", "");
  if (thread.depth > 0)
    *context = thread.stack[--thread.depth];
  else if (error == cudaSuccess)
    error = (cudaError_t)CUDA_ERROR_INVALID_CONTEXT;
  return shim_end_driver(error);
}

static CUresult get_device(CUdevice *device)
{
  cudaError_t error = shim_begin("cuCtxGetDevice", SHIM_NEUTRAL, "%s", "");
  if (error == cudaSuccess && thread.depth == 0) error = (cudaError_t)CUDA_ERROR_INVALID_CONTEXT;
  if (error == cudaSuccess) *device = current_device();
  return shim_end_driver(error);
}

static CUresult retain_primary(CUcontext *context, CUdevice device)
{
  cudaError_t error = shim_begin("cuDevicePrimaryCtxRetain", 0, "%d", device);
  if (error == cudaSuccess) *context = &primaries[device];
  return shim_end_driver(error);
}

static CUresult pointer_attribute(void *value, CUpointer_attribute attribute, CUdeviceptr at)
{
  cudaError_t error = shim_begin("cuPointerGetAttribute", SHIM_QUERY, "%d", (int)attribute);
  block *b = block_holding((const void *)(uintptr_t)at, 1);
  if (error == cudaSuccess && b == NULL) error = cudaErrorInvalidValue;
  if (error == cudaSuccess && attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) memcpy(value, &b->at, sizeof b->at);
  if (error == cudaSuccess && attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE) memcpy(value, &b->bytes, sizeof b->bytes);
  if (error == cudaSuccess && attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE) memcpy(value, &b->pool, sizeof b->pool);
  return shim_end_driver(error);
}

static cuuint32_t element_bytes(CUtensorMapDataType type)
{
  switch ((int)type) {
  case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
  case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
  default: return 0;
  }
}

/* What the hardware documents for tiled maps whose lines are swizzled. */
static bool map_is_legal(CUtensorMapDataType type, cuuint32_t rank, const void *base, const cuuint64_t *size,
                         const cuuint64_t *stride, const cuuint32_t *box, CUtensorMapSwizzle swizzle)
{
  const cuuint32_t element = element_bytes(type), line = swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128;
  if (element == 0 || (swizzle != CU_TENSOR_MAP_SWIZZLE_64B && swizzle != CU_TENSOR_MAP_SWIZZLE_128B)) return false;
  if (rank < 1 || rank > 5 || (uintptr_t)base % 16 || (uintptr_t)base == 0 || box[0] * element > line) return false;
  for (cuuint32_t i = 0; i < rank; i++) {
    if (size[i] == 0 || size[i] > (cuuint64_t)1 << 32 || box[i] == 0 || box[i] > 256) return false;
    if (i + 1 < rank && (stride[i] % 16 || stride[i] >= (cuuint64_t)1 << 40)) return false;
  }
  return true;
}

static void fill_map(shim_tensor_map *map, CUtensorMapDataType type, cuuint32_t rank, const void *base,
                     const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                     CUtensorMapSwizzle swizzle)
{
  *map = (shim_tensor_map){
      .base = (uintptr_t)base, .rank = (uint8_t)rank, .swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 4 : 8};
  for (cuuint32_t i = 0; i < rank; i++) {
    map->stride[i] = i ? stride[i - 1] : element_bytes(type);
    map->last[i] = (uint32_t)(size[i] - 1);
    map->box[i] = (uint16_t)box[i];
  }
}

_Static_assert(sizeof(shim_tensor_map) <= sizeof(CUtensorMap), "a tensor map holds it");

static CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                             const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                             const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
  (void)steps, (void)interleave, (void)promotion, (void)fill;
  cudaError_t error = shim_begin("cuTensorMapEncodeTiled", SHIM_NEUTRAL, "rank %u", rank);
  if (error == cudaSuccess && !map_is_legal(type, rank, base, size, stride, box, swizzle))
    error = cudaErrorInvalidValue;
  if (error == cudaSuccess) memset(map, 0x3c, sizeof *map);
  if (error == cudaSuccess && shim.emulates)
    fill_map((shim_tensor_map *)map, type, rank, base, size, stride, box, swizzle);
  return shim_end_driver(error);
}

static const struct {
  const char *name;
  void (*function)(void);
} functions[] = {
    {"cuCtxGetCurrent", (void (*)(void))get_current},
    {"cuCtxPushCurrent", (void (*)(void))push_current},
    {"cuCtxPopCurrent", (void (*)(void))pop_current},
    {"cuCtxGetDevice", (void (*)(void))get_device},
    {"cuDevicePrimaryCtxRetain", (void (*)(void))retain_primary},
    {"cuPointerGetAttribute", (void (*)(void))pointer_attribute},
    {"cuKernelGetParamInfo", (void (*)(void))kernel_parameter},
    {"cuKernelSetAttribute", (void (*)(void))kernel_attribute},
    {"cuLaunchKernelEx", (void (*)(void))launch_kernel_ex},
    {"cuTensorMapEncodeTiled", (void (*)(void))encode_tiled},
};

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status)
{
  (void)version, (void)flags;
  cudaError_t error = BEGIN(SHIM_QUERY, "%s", symbol);
  bool known = false;
  *status = cudaDriverEntryPointSymbolNotFound;
  *out = NULL;
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    if (strcmp(symbol, functions[i].name) != 0) continue;
    known = true;
    if (error != cudaSuccess || (shim.hidden != NULL && strcmp(shim.hidden, symbol) == 0)) continue;
    memcpy(out, &functions[i].function, sizeof *out);
    *status = cudaDriverEntryPointSuccess;
  }
  if (!known) count_unknown();
  return shim_end(error);
}
