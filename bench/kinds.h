/* The formats of weights that the benchmark and the demo know by a name. */
#ifndef BENCH_KINDS_H
#define BENCH_KINDS_H

#include "../include/cumoe/cumoe.h"

static inline cumoe_format as_they_are(cumoe_format f)
{
  f.rows = CUMOE_ROWS_AS_THEY_ARE;
  f.row_group = 0;
  return f;
}

/* X(name, text, goal, format). Formats are function calls, so they cannot stand in the table. */
#define KIND_LIST(X)                                                                                                   \
  X("fp8", "e4m3, f32 scales of 128 x 128, activations e4m3 by 128", "f8", cumoe_format_fp8_block(CUMOE_F32))          \
  X("fp8-a16", "e4m3, f32 scales of 128 x 128", "", as_they_are(cumoe_format_fp8_block(CUMOE_F32)))                    \
  X("fp8-channel", "e4m3, an f32 scale a channel, activations e4m3 by token", "f8",                                    \
    cumoe_format_fp8_channel(CUMOE_F32))                                                                               \
  X("int8", "s8, an f32 scale a channel, activations s8 by token", "f8", cumoe_format_int8(CUMOE_F32))                 \
  X("int4", "u4 - 8, bf16 scales of 128", "w4", cumoe_format_int4(128, CUMOE_BF16))                                    \
  X("int4-32", "u4 - 8, bf16 scales of 32", "w4", cumoe_format_int4(32, CUMOE_BF16))                                   \
  X("mxfp4", "e2m1, e8m0 scales of 32", "w4", cumoe_format_mxfp4())                                                    \
  X("nvfp4", "e2m1, e4m3 scales of 16, an f32 a matrix", "w4", cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES))

#endif
