/*
 * cumoe/quantize.h: activations and weights into the codes and scales of a cumoe_format, and weights looked at before
 * they serve. Contract as in cumoe/cumoe.h: work is ordered on `stream`, nothing is allocated, nothing waits, calls may
 * be captured. What a call writes may overlap neither what it reads nor anything else that it writes
 * (INVALID_ARGUMENT).
 *
 * Numbers are defined by operations that IEEE 754 rounds in one way only: the CPU device and every GPU give the same
 * bits.
 *
 * Errors of all: INVALID_ARGUMENT (null, shape, overlap, a format that contradicts itself), NOT_SUPPORTED (a format
 * that kernels do not take), LAYOUT, STALE_HANDLE, WRONG_DEVICE, WRONG_DTYPE, OUT_OF_BOUNDS, MISALIGNED, CUDA.
 */
#ifndef CUMOE_QUANTIZE_H
#define CUMOE_QUANTIZE_H

#include "moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * x as a layer whose weights have `format` multiplies it: format->rows, row_scale, row_group and origin[1] say how
 * (cumoe/format.h, cumoe_rows); ROWS_AS_THEY_ARE has no codes and is refused (INVALID_ARGUMENT).
 *
 *   x             [rows, cols] bf16, f16 or f32; cols a multiple of 16, up to 2^24
 *   static_scale  [1, 1] f32 with ROWS_STATIC, else absent
 *   codes         [rows, cols] E4M3 or I8, as the weights' element
 *   scales        [groups, rows] f32; groups: ceil((origin[1] mod row_group + cols) / row_group) with ROWS_GROUP,
 *                 else 1
 *
 * x and codes are aligned to 16 bytes (base and ld), scales to its element.
 */
CUMOE_CHECKED cumoe_status cumoe_quantize_rows(cumoe_context context, const cumoe_format *format, cumoe_view x,
                                               cumoe_view static_scale, cumoe_view_mut codes, cumoe_view_mut scales,
                                               cumoe_stream stream);

/*
 * Weights of one projection, rounded to nearest: for tests, benchmarks, and checkpoints that nobody quantised. What
 * bind takes in place, but for what is refused below, in the same memory layout (cumoe_projection; an OUT_IN stack).
 * `views` of what is written:
 *
 *   codes    [experts * out, in] E4M3, I8, U8; of 4 bits U8 [.., in / 2], or I32 [.., in / 8] with word 4
 *   scale    [experts * blocks along out, blocks along in] of the format's scale type (E8M0 also as U8)
 *   zero     [experts * ceil(out / 8), blocks along in] I32, with the format's zero
 *   global   [experts, halves] f32, or [experts, 1] for gate and up together, with the format's global
 *
 * Absent where the format has none. weights: aligned to 16 bytes (base and ld), codes likewise.
 *
 * scale = amax / largest code (448; 127; 6), rounded to nearest in its type; code = weight / scale, to nearest even,
 * saturated. amax is of the block; of all zeros the scale is 1. Besides:
 *   U4          with offset o, amax / min(o, 15 - o): offset 8: amax / 7, code 0 does not occur
 *               with zero points: (max - min) / 15, both taken with 0; zero point = -min / scale, to nearest
 *   E8M0        E2M1: as OCP MX v1.0, 6.3: (the largest power of two up to amax) / 4; what lies past 6 becomes 6
 *               E4M3: rounded up, nothing saturates
 *   E2M1, E4M3  global = amax / (6 * 448) of an expert's half, GLOBAL_OVER: its reciprocal; scale = amax / 6 / global
 * No scale is 0 or, but for E4M3 and E8M0, subnormal: blocks that small have the smallest one. Infinities count as the
 * largest float. A NaN weight is a NaN code of E4M3; of others its block's scale is NaN.
 *
 * Refused (NOT_SUPPORTED): ZERO_VALUES; zero points of interleaved channels; zero points or a global with block[0]
 * other than 1; U4 with offset 0 or 15 and no zero points. format.rows does not matter.
 */
typedef struct cumoe_quantize_args {
  uint32_t size;      /* sizeof(cumoe_quantize_args) */
  int32_t experts;    /* matrices of the stack, 1 or more */
  int32_t gate_order; /* gate and up in one matrix: their cumoe_gate_order; 0, SEPARATE, UNGATED: one projection */
  int32_t reserved;   /* 0 */
  cumoe_format format;
  cumoe_view weights; /* [experts * out, in] bf16, f16 or f32 */
  cumoe_view_mut codes, scale, zero, global;
} cumoe_quantize_args;

CUMOE_CHECKED cumoe_status cumoe_quantize_weights(cumoe_context context, const cumoe_quantize_args *args,
                                                  cumoe_stream stream);

/* Sets rows, cols, ld (packed), dtype and device (ANY) of codes, scale, zero and global to what the other fields ask
 * for; those that have to be absent become so. Their data stays as it is. Of weights, rows and cols are read. */
CUMOE_CHECKED cumoe_status cumoe_quantize_shapes(cumoe_quantize_args *args);

/*
 * Weights that lie as kernels do not read them (GPTQ, AWQ, ModelOpt int4, GGUF; presets at the end of cumoe/format.h)
 * become codes that bind takes in place, with the same values, exactly. One projection of one expert, as it arrives, or
 * of a stack:
 *
 *   codes  OUT_IN [experts * out, in], IN_OUT [experts * in, out] codes, of which words hold several along the axis
 *          that the format says: GPTQ I32 [in / 8, out], AWQ I32 [in, out / 8], ModelOpt U8 [out / 2, in]; GGUF U8
 *          [experts * out, bytes of a row]
 *   scale  OUT_IN [experts * blocks along out, groups], IN_OUT [experts * groups, out] of the format's scale type; GGUF
 *          absent
 *   zero   with the format's zero: IN_OUT I32 [experts * groups, out / 8], nibbles in the order of codes; OUT_IN
 *          [experts * ceil(out / 8), groups]. A zero point is (stored + zero_add) mod 16
 *   order  absent, or I32 [experts, in] or, for all, [1, in]: code k of the result is the source's code order[k]. For
 *          g_idx that is not k / group (GPTQ's desc_act, compressed-tensors' actorder group): cumoe_order_of_groups.
 *          Groups are counted in the new order; format->act_order is 1, projection->order says where the order lies
 *
 * aligned to their elements alone. out is a multiple of 8, in of 32 (8 bits: 16).
 *
 * `to` [1, bytes] u8, aligned to 256 bytes, gets codes, scales, zero points and order; bytes are
 * cumoe_weights_repack_size's, exactly a multiple of `experts`, so that experts may come one by one, to + e * bytes of
 * one. *projection and *format say what lies there, in the strided form: the first expert's serve for all of them in
 * cumoe_weights_bind.
 *
 *   GPTQ, AWQ, ModelOpt   U4, packed along in; zero_add 0
 *   Q8_0, Q4_0, MXFP4     S8 and U4 with F16 scales, E2M1 with E8M0, of 32; E8M0 of 255 is NaN then, ggml has 2^127
 *   Q6_K                  S8 with F32 scales of 16: 10 bits a weight, where the file has 6.6
 *   Q4_1                  U4 with F16 scales of 32 and ZERO_VALUES
 *   Q4_K                  U4 with F32 scales of 32 and ZERO_VALUES: 6 bits a weight, where the file has 4.5
 *
 * Q2_K, Q3_K, Q5_0, Q5_1, Q5_K have codes of other sizes: NOT_SUPPORTED, and so is what bind reads in place.
 */
typedef struct cumoe_repack_args {
  uint32_t size;       /* sizeof(cumoe_repack_args) */
  int32_t experts;     /* of the stack; 1 or more */
  int32_t major;       /* cumoe_major of codes, scale and zero */
  int32_t out, in;     /* of a matrix */
  int32_t reserved;    /* 0 */
  cumoe_format format; /* of what is read */
  cumoe_view codes, scale, zero;
  cumoe_view order;
} cumoe_repack_args;

/*
 * The order that makes groups of g_idx [in] neighbours, each in the order of k; host memory, of one matrix. gate and up
 * of an expert are one projection's input: their g_idx are the same in files, and must be. NOT_SUPPORTED if a group has
 * not `group` members, as in a slice of k; what is refused leaves order undefined. (A rank's share of down is then a
 * run of the order, and its share of up the channels that the run names.)
 */
CUMOE_CHECKED cumoe_status cumoe_order_of_groups(const int32_t *g_idx, int32_t in, int32_t group, int32_t *order);

/* Of codes, scale and zero only shapes count, of order whether it is there. No CUDA call. */
CUMOE_CHECKED cumoe_status cumoe_weights_repack_size(const cumoe_repack_args *args, size_t *bytes);
/* Errors also: WORKSPACE (`to` is too small). */
CUMOE_CHECKED cumoe_status cumoe_weights_repack(cumoe_context context, const cumoe_repack_args *args, cumoe_view_mut to,
                                                cumoe_projection *projection, cumoe_format *format,
                                                cumoe_stream stream);

/* Columns of a report. */
typedef enum cumoe_scan_field {
  CUMOE_SCAN_CODES = 0,            /* NaN codes of E4M3; NaN and infinities of weights without a format */
  CUMOE_SCAN_SCALE_NOT_FINITE = 1, /* NaN, E8M0's 255 among them, or infinite; of scales all, global ones too */
  CUMOE_SCAN_SCALE_NEGATIVE = 2,
  CUMOE_SCAN_SCALE_ZERO = 3,
  CUMOE_SCAN_SCALE_SUBNORMAL = 4, /* of F32, F16, BF16; E8M0's 0 */
  CUMOE_SCAN_SCALE_LARGE = 5,     /* E8M0 past 128, a scale of 4 or more: mostly bytes that are no scales */
  CUMOE_SCAN_ZERO_POINT = 6,      /* offset and zero_add included, outside 0 .. 15: of another version of GPTQ's? */
  CUMOE_SCAN_PAST_F16 = 7,        /* weights that round to infinity in f16 */
  CUMOE_SCAN_PAST_BF16 = 8,
  CUMOE_SCAN_LARGEST = 9, /* not a count: the largest finite |weight|, see cumoe_scan_largest */
  CUMOE_SCAN_FIELDS = 10
} cumoe_scan_field;

/*
 * What is odd about weights, before they serve: no call of the layer looks. report [experts, CUMOE_SCAN_FIELDS] i64, on
 * the device: of every expert, all its projections together, how many codes, scales (each once) or weights are what the
 * column says. Good weights have 0 in all columns but the last; but GGUF's scales may be negative, 0 or subnormal.
 */
CUMOE_CHECKED cumoe_status cumoe_weights_scan(cumoe_context context, cumoe_weights weights, cumoe_view_mut report,
                                              cumoe_stream stream);

/* The last column's number. */
static inline float cumoe_scan_largest(int64_t field)
{
  union {
    uint32_t bits;
    float value;
  } largest;
  largest.bits = (uint32_t)field;
  return largest.value;
}

#ifdef __cplusplus
}
#endif
#endif
