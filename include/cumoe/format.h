/*
 * cumoe/format.h: formats of quantised weights, as checkpoints hold them. A format is data: the struct says what lies
 * in memory and what becomes of activations; a family of checkpoints is a preset (at the end, with tensors' names).
 *
 *   weight = (code - offset - zero point) * scale * global        an exact real number, "global" or 1 / "global"
 *   weight = (code - offset) * scale + value                      with CUMOE_ZERO_VALUES
 *
 * A kernel may round a weight once to the activations' type. Scales always multiply, also where a checkpoint calls
 * them weight_scale_inv. Sums are f32; of s8 codes times s8 codes exact.
 */
#ifndef CUMOE_FORMAT_H
#define CUMOE_FORMAT_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cumoe_element {
  CUMOE_ELEMENT_DENSE = 0, /* not quantised: the plan's dtype */
  CUMOE_ELEMENT_E4M3 = 1,  /* fp8: 1.4.3, bias 7, largest 448, no infinity, NaN 0x7f and 0xff (e4m3fn) */
  CUMOE_ELEMENT_E2M1 = 2,  /* fp4: 0 .5 1 1.5 2 3 4 6, bit 3 the sign */
  CUMOE_ELEMENT_S8 = 3,    /* -128 .. 127 */
  CUMOE_ELEMENT_U8 = 4,    /* 0 .. 255 */
  CUMOE_ELEMENT_U4 = 5,    /* 0 .. 15 */
  CUMOE_ELEMENT_S4 = 6     /* -8 .. 7, two's complement */
} cumoe_element;

typedef enum cumoe_packing {
  CUMOE_PACKED_IN = 0, /* codes of a byte or word are neighbours along the reduction index */
  CUMOE_PACKED_OUT = 1 /* ... along the output channels */
} cumoe_packing;

typedef enum cumoe_zero {
  CUMOE_ZERO_NONE = 0,      /* `offset` alone */
  CUMOE_ZERO_CODES_OUT = 1, /* I32 words of eight 4-bit zero points, neighbours along out: [ceil(out / 8), groups] */
  CUMOE_ZERO_VALUES = 2     /* U4: numbers that are added, as many and of the type as scales; portable kernels alone */
} cumoe_zero;

typedef enum cumoe_global {
  CUMOE_GLOBAL_NONE = 0,
  CUMOE_GLOBAL_TIMES = 1, /* multiplies (ModelOpt's weight_scale_2) */
  CUMOE_GLOBAL_OVER = 2   /* divides (compressed-tensors' weight_global_scale) */
} cumoe_global;

/*
 * What becomes of activations, x and the activated intermediate h alike, before they are multiplied. h is rounded to
 * the plan's dtype first. scale = max(amax, 1e-10) / largest code (448; 127), code = x * (1 / scale), both in f32,
 * rounded to nearest even, saturated. NaN stays in its token.
 */
typedef enum cumoe_rows {
  CUMOE_ROWS_AS_THEY_ARE = 0,  /* w8a16, w4a16: 16-bit activations */
  CUMOE_ROWS_STATIC = 1,       /* one given scale: cumoe_projection.input_scale */
  CUMOE_ROWS_TOKEN = 2,        /* a scale a token */
  CUMOE_ROWS_GROUP = 3,        /* a scale for each row_group channels of a token, counted from origin[1] */
  CUMOE_ROWS_STATIC_EXPERT = 4 /* a given scale an expert: x becomes codes once a slot instead of once a token */
} cumoe_rows;

/*
 * Nested in descriptions, so it has a reserve and no size: all zero is "not quantised". Bind takes, in place and
 * without a copy: OUT_IN matrices of E4M3, S8, U8, E2M1 and U4 codes that are packed along in, in order, with scales of
 * blocks of a multiple of 16 (E2M1 with an E8M0 scale: 32; with an E4M3 scale: 16) along in. hidden and inter are
 * multiples of 32 where codes have 4 bits, of 16 where they have 8. From one row of codes, scales or zero points to the
 * next it is at most 2^26 bytes.
 */
typedef struct cumoe_format {
  int32_t element;   /* cumoe_element */
  int32_t offset;    /* taken off every code: U4 0 .. 15 (8: symmetric), U8 128; others 0 */
  int32_t word;      /* bytes of the unit that 4-bit codes lie in, low bits first: 1 (0 means 1; views U8) or 4 (I32) */
  int32_t packed;    /* cumoe_packing */
  uint32_t order;    /* hex digit i from below: which code the i-th of a word is; 0: in order. AWQ 0x75316420 */
  int32_t split;     /* codes i and i + split share a byte; 0 or 1: neighbours */
  int32_t block[2];  /* weights that share a scale along out, along in; 0: all of that axis */
  int32_t origin[2]; /* place of a slice's first weight in its first block; up to 2^20 */
  int32_t joined;    /* 1: blocks of a concatenated gate_up run on from one half into the other */
  int32_t scale;     /* cumoe_dtype of scales: F32, F16, BF16, E8M0 or E4M3; 0 with DENSE */
  int32_t zero;      /* cumoe_zero */
  int32_t zero_add;  /* added to every stored zero point: 1 for GPTQ's first version */
  int32_t global;    /* cumoe_global */
  int32_t rows;      /* cumoe_rows */
  int32_t row_element; /* E4M3 weights: E4M3; S8 weights: S8; 0: as the weights */
  int32_t row_group;   /* ROWS_GROUP: 128 */
  int32_t row_scale;   /* F32 (0 means F32), or E8M0: rounded up to a power of two */
  int32_t ggml;      /* read after cumoe_weights_repack only: a ggml_type, blocks of codes with their scales; 0: none */
  int32_t act_order; /* 1: code j of a row multiplies activation order[j] (cumoe_projection.order), an expert's own
                        order; ROWS_AS_THEY_ARE. Costs a pass over the rows of every expert */
  int32_t reserved[11]; /* 0 */
} cumoe_format;

static inline cumoe_format cumoe_format_make(cumoe_element element, int32_t block_out, int32_t block_in,
                                             cumoe_dtype scale, cumoe_rows rows)
{
  cumoe_format f = {(int32_t)element,
                    0,
                    0,
                    0,
                    0,
                    0,
                    {block_out, block_in},
                    {0, 0},
                    0,
                    (int32_t)scale,
                    0,
                    0,
                    0,
                    (int32_t)rows,
                    0,
                    0,
                    0,
                    0,
                    0,
                    {0}};
  return f;
}

/* ---- which preset for which checkpoint ---------------------------------------------------------------------- */

/*
 * Tensors of expert E of a layer; P: mlp.experts.E.{gate,up,down}_proj (SEPARATE), W: {w1 gate, w3 up, w2 down} below
 * block_sparse_moe.experts.E. What scales are (F32, BF16) stands in the file's header: families differ. Llama-4 has
 * feed_forward.experts.E for mlp.experts.E.
 *
 *   DeepSeek-V3, R1, V3.1; Kimi-K2-Instruct   fp8_block   P.weight, P.weight_scale_inv
 *   DeepSeek-V4 (ffn.experts.E.w1, w3, w2)    mxfp4       .weight, .scale; fp8_block(E8M0) for what is not routed
 *   Qwen3-30B-A3B-FP8, Qwen3-235B-A22B-FP8, Qwen3-Next-80B-A3B-FP8, Qwen3-Coder-480B-A35B-FP8
 *                                             fp8_block   P.weight, P.weight_scale_inv (BF16)
 *   MiniMax-M2                                fp8_block   W.weight, W.weight_scale_inv
 *   GLM-4.5-FP8, GLM-4.5-Air-FP8, llm-compressor's *-FP8-dynamic (Qwen3-30B-A3B, Llama-4)
 *                                             fp8_channel P.weight, P.weight_scale
 *   Mixtral-8x7B-FP8, Mixtral-8x22B-FP8; ModelOpt's *-FP8
 *                                             fp8_tensor  W or P .weight, .weight_scale, .input_scale (an expert's own:
 *                                                         ROWS_STATIC_EXPERT; w1's and w3's are one: take the larger)
 *   llm-compressor's *-quantized.w8a8         int8        P.weight, P.weight_scale
 *   llm-compressor's *-quantized.w8a16        int8        P.weight_packed I32, P.weight_scale: element = U8, offset =
 *                                                         128, word = 4, rows = 0
 *   llm-compressor's *-quantized.w4a16        int4(128)   P.weight_packed, P.weight_scale
 *   Kimi-K2-Thinking, K2.5                    int4(32)    P.weight_packed, P.weight_scale (BF16)
 *   gpt-oss-20b, gpt-oss-120b                 mxfp4       mlp.experts.gate_up_proj_blocks, _scales; down_proj_*
 *   llm-compressor's *-MXFP4                  mxfp4       P.weight_packed, P.weight_scale U8 (written before 2026: with
 *                                                         bias 125, so add 2 to every byte)
 *   DeepSeek-R1-NVFP4, Qwen3-30B-A3B-NVFP4    nvfp4       P.weight, P.weight_scale, P.weight_scale_2 (ModelOpt)
 *   llm-compressor's *-NVFP4                  nvfp4       P.weight_packed, P.weight_scale, P.weight_global_scale
 *   Qwen3-30B-A3B-GPTQ-Int4, Mixtral GPTQ     gptq        P or W .qweight, .scales, .qzeros; repack
 *   DeepSeek-V3-AWQ, R1-AWQ, Mixtral AWQ      awq         P or W .qweight, .scales, .qzeros; repack
 *   the same with desc_act true               gptq        .g_idx as well: cumoe_order_of_groups, repack
 *   ModelOpt's W4A16_AWQ                      modelopt_int4  P.weight, P.weight_scale, P.pre_quant_scale; repack
 *   mlx-community's *-4bit                    affine4(64) mlp.switch_mlp.{gate,up,down}_proj.weight, .scales, .biases
 *   GGUF: Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, MXFP4 ggml        blk.L.ffn_{gate,up,down}_exps.weight; repack
 */

/* fp8 in blocks of 128 x 128 (DeepSeek-V3, R1, Qwen3-FP8, MiniMax-M2): mlp.experts.E.{gate,up,down}_proj
 * .weight F8_E4M3, .weight_scale_inv F32 (`scale` CUMOE_F32) or BF16 (Qwen3); DeepSeek-V4's trunk .scale F8_E8M0. */
static inline cumoe_format cumoe_format_fp8_block(cumoe_dtype scale)
{
  cumoe_format f = cumoe_format_make(CUMOE_ELEMENT_E4M3, 128, 128, scale, CUMOE_ROWS_GROUP);
  f.row_group = 128;
  if (scale == CUMOE_E8M0) f.row_scale = CUMOE_E8M0;
  return f;
}

/* fp8 with a scale a matrix (ModelOpt FP8, Mixtral-FP8: .weight, .weight_scale [1], .input_scale for ROWS_STATIC). */
static inline cumoe_format cumoe_format_fp8_tensor(cumoe_rows rows)
{
  return cumoe_format_make(CUMOE_ELEMENT_E4M3, 0, 0, CUMOE_F32, rows);
}

/* fp8 with a scale a channel, dynamic activations (compressed-tensors FP8_DYNAMIC: .weight, .weight_scale [N, 1]). */
static inline cumoe_format cumoe_format_fp8_channel(cumoe_dtype scale)
{
  return cumoe_format_make(CUMOE_ELEMENT_E4M3, 1, 0, scale, CUMOE_ROWS_TOKEN);
}

/* int8, w8a8 (SmoothQuant, compressed-tensors W8A8: .weight I8, .weight_scale [N, 1]). rows = 0 makes it w8a16. */
static inline cumoe_format cumoe_format_int8(cumoe_dtype scale)
{
  return cumoe_format_make(CUMOE_ELEMENT_S8, 1, 0, scale, CUMOE_ROWS_TOKEN);
}

/* int4 in groups along in, symmetric (compressed-tensors pack-quantized, Kimi-K2-Thinking with group 32:
 * .weight_packed I32 [N, K/8], .weight_scale BF16 [N, K/group]). With .weight_zero_point: zero = ZERO_CODES_OUT,
 * offset = 0. */
static inline cumoe_format cumoe_format_int4(int32_t group, cumoe_dtype scale)
{
  cumoe_format f = cumoe_format_make(CUMOE_ELEMENT_U4, 1, group, scale, CUMOE_ROWS_AS_THEY_ARE);
  f.offset = 8;
  f.word = 4;
  return f;
}

/* mxfp4 (gpt-oss: mlp.experts.gate_up_proj_blocks U8 as [E * 2I, H/2], gate_up_proj_scales U8 as [E * 2I, H/32] E8M0,
 * GATE_UP_INTERLEAVED, gate_up_proj_bias; down_proj_*. DeepSeek-V4: ffn.experts.E.w1, w3, w2 .weight, .scale). */
static inline cumoe_format cumoe_format_mxfp4(void)
{
  return cumoe_format_make(CUMOE_ELEMENT_E2M1, 1, 32, CUMOE_E8M0, CUMOE_ROWS_AS_THEY_ARE);
}

/* 4 bits, a scale and a value a group (MLX: .weight U32 [N, K/8] as I32, .scales and .biases [N, K/group]). */
static inline cumoe_format cumoe_format_affine4(int32_t group, cumoe_dtype scale)
{
  cumoe_format f = cumoe_format_int4(group, scale);
  f.offset = 0;
  f.zero = CUMOE_ZERO_VALUES;
  return f;
}

/* nvfp4: ModelOpt (.weight U8, .weight_scale F8_E4M3 [N, K/16], .weight_scale_2: GLOBAL_TIMES), compressed-tensors
 * (.weight_packed, .weight_scale, .weight_global_scale: GLOBAL_OVER). Activations stay as they are. */
static inline cumoe_format cumoe_format_nvfp4(cumoe_global global)
{
  cumoe_format f = cumoe_format_make(CUMOE_ELEMENT_E2M1, 1, 16, CUMOE_E4M3, CUMOE_ROWS_AS_THEY_ARE);
  f.global = (int32_t)global;
  return f;
}

/* ---- presets of what cumoe_weights_repack (cumoe/quantize.h) reads ---- */

/* GPTQ, 4 bits, IN_OUT (*-GPTQ-Int4; quant_method gptq): .qweight I32 [K/8, N], .scales F16
 * [K/group, N], .qzeros I32 [K/group, N/8]; group -1 in the file is 0 here. version 1 stores zero points less 1, 2
 * (checkpoint_format gptq_v2) as they are. Symmetric ones may do without qzeros: zero = 0, zero_add = 0, offset = 8.
 * desc_act true: .g_idx by way of cumoe_order_of_groups. 8 bits (*-GPTQ-Int8), symmetric: .qweight I32 [K/4, N];
 * element = U8, offset = 128, zero = 0, zero_add = 0, and .qzeros (all 127, or 128 in version 2) is not read. */
static inline cumoe_format cumoe_format_gptq(int32_t group, int32_t version)
{
  cumoe_format f = cumoe_format_int4(group, CUMOE_F16);
  f.offset = 0;
  f.zero = CUMOE_ZERO_CODES_OUT;
  f.zero_add = version == 1 ? 1 : 0;
  return f;
}

/* AWQ, 4 bits, gemm, IN_OUT (*-AWQ; quant_method awq, version gemm): .qweight I32 [K, N/8], .scales F16 [K/group, N],
 * .qzeros I32 [K/group, N/8]. */
static inline cumoe_format cumoe_format_awq(int32_t group)
{
  cumoe_format f = cumoe_format_gptq(group, 2);
  f.packed = CUMOE_PACKED_OUT;
  f.order = 0x75316420;
  return f;
}

/* ModelOpt int4 AWQ, OUT_IN (quant_algo W4A16_AWQ): .weight U8 [N/2, K], .weight_scale [N, K/group]; .pre_quant_scale
 * multiplies activations: fold it into what makes them. */
static inline cumoe_format cumoe_format_modelopt_int4(int32_t group, cumoe_dtype scale)
{
  cumoe_format f = cumoe_format_int4(group, scale);
  f.element = CUMOE_ELEMENT_S4;
  f.offset = 0;
  f.word = 1;
  f.packed = CUMOE_PACKED_OUT;
  return f;
}

enum {
  CUMOE_GGML_Q4_0 = 2,
  CUMOE_GGML_Q4_1 = 3,
  CUMOE_GGML_Q8_0 = 8,
  CUMOE_GGML_Q4_K = 12,
  CUMOE_GGML_Q6_K = 14,
  CUMOE_GGML_MXFP4 = 39
};

/* GGUF, OUT_IN: blk.L.ffn_{gate,up,down}_exps.weight, U8 [E * N, bytes of a row], scales inside. */
static inline cumoe_format cumoe_format_ggml(int32_t type)
{
  cumoe_format f = cumoe_format_make(CUMOE_ELEMENT_DENSE, 0, 0, (cumoe_dtype)0, CUMOE_ROWS_AS_THEY_ARE);
  f.ggml = type;
  return f;
}

#ifdef __cplusplus
}
#endif
#endif
