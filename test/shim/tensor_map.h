/* What the shim's cuTensorMapEncodeTiled leaves in a tensor map, for kernels that are run (test/emulate/). */
#ifndef SHIM_TENSOR_MAP_H
#define SHIM_TENSOR_MAP_H

#include <stdint.h>

typedef struct shim_tensor_map {
  uint64_t base, stride[5]; /* bytes; stride[0]: of an element */
  uint32_t last[5];         /* the last coordinate that is inside */
  uint16_t box[5];
  uint8_t rank, swizzle; /* 16-byte vectors that change places: 8, 4; 1: none */
} shim_tensor_map;

#endif
