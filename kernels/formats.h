/* Formats of weights (formats.def) as C and CUDA see them. */
#ifndef CUMOE_FORMATS_H
#define CUMOE_FORMATS_H

#include <stdint.h>

/* Element types; the values are the public ones (checked in host/variants.c). */
typedef enum element_type {
  DT_NONE = 0,
  DT_F32 = 1,
  DT_F16 = 2,
  DT_BF16 = 3,
  DT_U8 = 4,
  DT_I32 = 5,
  DT_I64 = 6
} element_type;

typedef enum weight_format {
  FORMAT_none,
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR) FORMAT_##name,
#include "formats.def"
} weight_format;

/* Columns of variants.def. */
typedef enum scale_case { SCALE_none, SCALE_out, SCALE_block } scale_case;
typedef enum weight_major { MAJOR_none, MAJOR_K, MAJOR_N, MAJOR_any = MAJOR_none } weight_major;

/* Of an element. */
static inline int32_t format_bits(weight_format format)
{
  switch (format) {
  case FORMAT_none: return 0;
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)                                                     \
  case FORMAT_##name: return BITS;                                                                                     \
      #include "formats.def"
  }
  return 0;
}

/* Of n elements that lie one after another: whole bytes. */
static inline int64_t format_bytes(weight_format format, int64_t n)
{
  return n * format_bits(format) / 8;
}

/* Of weights without scales; FORMAT_none: weights are never of this type. */
static inline weight_format dense_format(element_type dtype)
{
  switch (dtype) {
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)
#define DENSE(name, DTYPE, BITS)                                                                                       \
  case DT_##DTYPE: return FORMAT_##name;                                                                               \
      #include "formats.def"
  case DT_NONE:
  case DT_U8:
  case DT_I32:
  case DT_I64: break;
  }
  return FORMAT_none;
}

#endif
