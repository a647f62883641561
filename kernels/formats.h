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
  DT_I64 = 6,
  DT_E4M3 = 7,
  DT_E8M0 = 8, /* 2^(code - 127), 255 NaN */
  DT_I8 = 9
} element_type;

typedef enum weight_format {
  FORMAT_none,
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR) FORMAT_##name,
#include "formats.def"
} weight_format;

/* How many element types x, h and weights without scales may have: for code that names each. */
enum {
  DENSE_FORMATS = 0
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)
#define DENSE(name, DTYPE, BITS) +1
#include "formats.def"
};

/* Columns of variants.def. */
typedef enum scale_case { SCALE_none, SCALE_out, SCALE_block } scale_case;
typedef enum weight_major { MAJOR_none, MAJOR_K, MAJOR_N, MAJOR_any = MAJOR_none } weight_major;

/* Of an element. */
static inline int32_t format_bits(weight_format format)
{
  static const int32_t bits[] = {
      0,
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR) BITS,
#include "formats.def"
  };
  return bits[format];
}

/* Of n elements that lie one after another: whole bytes. */
static inline int64_t format_bytes(weight_format format, int64_t n)
{
  return n * format_bits(format) / 8;
}

#ifndef __cplusplus
/* Whether weights of it have scales. */
static inline int format_is_scaled(weight_format format)
{
  return format > (weight_format)DENSE_FORMATS;
}

/* Of weights without scales; FORMAT_none: weights are never of this type. */
static inline weight_format dense_format(int32_t dtype)
{
  static const weight_format formats[] = {
      [DT_NONE] = FORMAT_none,
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)
#define DENSE(name, DTYPE, BITS) [DT_##DTYPE] = FORMAT_##name,
#include "formats.def"
  };
  return (uint32_t)dtype < sizeof formats / sizeof *formats ? formats[dtype] : FORMAT_none;
}
#endif

#endif
