/* Device code as bytes: what kind it is, and whether its headers hold what they promise. Pure: no CUDA, no memory. */
#ifndef CUMOE_IMAGE_H
#define CUMOE_IMAGE_H

#include <stdbool.h>
#include <stddef.h>

typedef enum image_kind { IMAGE_FATBIN = 1, IMAGE_CUBIN = 2, IMAGE_PTX = 3 } image_kind;

typedef struct image_facts {
  image_kind kind;
  char why[160]; /* why the bytes are refused */
} image_facts;

/* False, with why, for bytes that CUDA must not see: its own readers trust every offset and size of the headers. */
bool image_inspect(const void *image, size_t bytes, image_facts *facts);

#endif
