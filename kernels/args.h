/*
 * Argument structs of all kernels: plain C, read by the host, by CUDA and by the CPU kernels alike.
 *
 * A CUDA kernel takes one of these by value; a CPU kernel takes a pointer to one and a range of work units.
 * Letters as in the public manual: T tokens, H hidden, I inter, E experts, k slots; a pair is token * k + slot.
 * Leading dimensions and strides are in elements. All offsets are computed in 64 bits.
 */
#ifndef CUMOE_ARGS_H
#define CUMOE_ARGS_H

#include <stdint.h>

#include "formats.h"

#include "protocol.h"

enum { SCORE_SOFTMAX = 0, SCORE_SIGMOID = 1, SCORE_SQRT_SOFTPLUS = 2, SCORE_IDENTITY = 3, SCORE_SPARSEMIXER = 4 };
enum { GROUP_BEST = 0, GROUP_BEST_TWO = 1 };
enum { ROUTE_RENORMALIZE = 1, ROUTE_SCORE_AFTER_TOPK = 2, ROUTE_WEIGHT_ON_INPUT = 4, ROUTE_CHOOSE_BY_LOGIT = 8 };
enum { ACT_SILU = 0, ACT_GELU_ERF, ACT_GELU_TANH, ACT_RELU, ACT_RELU2, ACT_IDENTITY, ACT_SWIGLU_OAI };
enum { FAULT_NONE = 0, FAULT_EXPERT_ID, FAULT_NAN_LOGIT, FAULT_TOKEN_COUNT, FAULT_EXPERT_MAP, FAULT_ROUTE };

enum { MAX_EXPERTS = 1024, MAX_TOP_K = 32 };
enum { ROW_DROPPED = -1, ROW_IDENTITY = -2 }; /* in slot_row */

/* Where a kernel reports bad device data. record = code << 56 | slot << 44 | token, written by compare-and-swap
 * on 0 (first wins); then mirror = 1 by a plain store (host memory mapped into the device). */
typedef struct fault_sink {
  uint64_t *record;
  uint32_t *mirror;
} fault_sink;

#define FAULT_RECORD(code, slot, token)                                                                                \
  ((uint64_t)(code) << 56 | ((uint64_t)(slot)&0xfff) << 44 | ((uint64_t)(token)&0xfffffffffffULL))

/* T = min(max(*device, 0), count) if device is set, else count. */
typedef struct token_count {
  int64_t count;
  const int32_t *device;
} token_count;

/* logits[t, e] = scale * round(x[t] . w[e] + bias[e]), to round_dtype. Grid: see the variant's form. CPU unit: one
 * token. */
typedef struct router_args {
  const void *x, *w, *bias; /* [T, H]; [E, H]; [E] or NULL */
  float *logits;            /* [T, E] */
  int64_t x_ld, w_ld, logits_ld;
  token_count tokens;
  int32_t experts, hidden;
  int32_t x_dtype, w_dtype, bias_dtype;
  int32_t round_dtype; /* DT_F32: not rounded */
  float scale;
  router_protocol protocol;
} router_args;

/* The wgmma form: the same, and tensor maps. x: (k, token), boxes of WGMMA_BK x BM. w: (k, expert), boxes of WGMMA_BK x
 * half of `columns`: BN, or the experts there are rounded up to 16, as rows outside a tensor cost more than those
 * inside. */
typedef struct router_sm90_args {
  router_args r;
  unsigned char x[128] __attribute__((aligned(64)));
  unsigned char w[128] __attribute__((aligned(64)));
  int32_t columns;
} router_sm90_args;

/*
 * The k slots: the k - always best of `experts`, then experts .. experts + always - 1; or the `given` ids.
 * CPU unit: one token.
 */
typedef struct gate_args {
  const void *logits;        /* [T, E] */
  const float *select_bias;  /* [E] or NULL */
  const float *expert_scale; /* [E] or NULL: of weights, last */
  const void *given;         /* [T, k] of ids_dtype, ld ids_ld, or NULL; `ids` is not written then */
  void *ids;                 /* [T, k] i32 or i64 */
  float *weights;            /* [T, k] */
  int64_t logits_ld, ids_ld, weights_ld;
  token_count tokens;
  int32_t experts, logits_dtype, ids_dtype;
  int32_t score, weigh; /* SCORE_* of the choice, of the weights: ROUTE_CHOOSE_BY_LOGIT */
  int32_t top_k, always;
  int32_t n_group, topk_group, group_score;            /* n_group 0: no groups */
  uint32_t flags;                                      /* ROUTE_* */
  float routed_scale, softcap, renorm_eps, renorm_min; /* routed_scale already 1 when unset */
  float mixer_eps;
  fault_sink fault;
} gate_args;

/* How the CUDA gate works. By logit: nothing but the logit ranks an expert, as every score keeps the order. In
 * registers: a token's keys fit a warp's registers. */
#define GATE_BY_LOGIT(a) (!(a).select_bias && (a).n_group == 0)
#define GATE_IN_REGISTERS(a)                                                                                           \
  ((a).experts <= 256 && ((a).n_group == 0 || (a).experts / (a).n_group % 32 == 0) &&                                  \
   !(GATE_BY_LOGIT(a) && GATE_SOFTMAX_OVER_ALL(a) && (a).softcap > 0))
/* Logits as weights may be as large as floats get, and MAX_TOP_K of them are summed. */
#define RENORM_SCALE(a)          ((a).weigh == SCORE_IDENTITY ? 0x1p-6f : 1.f)
#define GATE_SOFTMAX_OVER_ALL(a) ((a).weigh == SCORE_SOFTMAX && !((a).flags & ROUTE_SCORE_AFTER_TOPK))
/* What few models want is a kernel's of its own, so that the others do not pay for it. */
#define GATE_HAS_RULES(a) ((a).expert_scale || (a).given || (a).always || (a).weigh == SCORE_SPARSEMIXER)

/*
 * ids -> counts, offsets, row_pair, slot_row by counting. Pairs are cut into `chunks` of `chunk_pairs`, a multiple of
 * 1024. With several chunks map_count fills hist first; with one, map counts by itself. Grid of both: chunks. CPU: one
 * unit does all.
 */
typedef struct map_args {
  const void *ids; /* [T, k] */
  int64_t ids_ld;
  const int32_t *expert_map; /* [num_experts] or NULL: identity */
  int32_t *counts;           /* [local_experts] */
  int32_t *offsets;          /* [local_experts + 1] */
  int32_t *row_pair;         /* [T k] */
  int32_t *slot_row;         /* [T, k], ld = k */
  int32_t *counts_out;       /* NULL, or a second place for counts */
  int64_t *load;             /* NULL, or [local_experts], += counts */
  int32_t *hist;             /* [chunks, local_experts]; unused with one chunk */
  token_count tokens;
  int32_t ids_dtype, top_k;
  int32_t num_experts, zero_experts, identity_experts, local_experts;
  int32_t chunks, chunk_pairs;
  fault_sink fault;
  map_protocol protocol;
} map_args;

/* rows[slot_row[t, j]] = x[t] for every slot that has a row. Grid: tokens * ceil(hidden * element / COLUMNS). CPU unit:
 * one token. */
typedef struct permute_args {
  const void *x; /* [T, H] */
  void *rows;    /* [rows_cap, H]; 16-byte aligned like x, base and leading dimension */
  int64_t x_ld, rows_ld;
  const int32_t *slot_row; /* [T, k], ld = k */
  token_count tokens;
  int64_t rows_cap;
  int32_t top_k, hidden, element; /* bytes of an element */
  fault_sink fault;
} permute_args;

/*
 * Scales of weights in normal form, whatever their format: of element (n, k) of half h of expert e
 *   p[(n + n_origin[h]) / block_n * n_stride + (k + k_origin) / block_k * k_stride],
 *   p = table[h] ? table[h][e] : base[h] + e * expert_stride
 * block_n and block_k are never 0 where there are scales; one that covers its axis has stride 0: a tensor's scale has
 * two of these, a channel's one. The origin is the place of a slice's first weight in its first block; of gate and up
 * that lie in one matrix with common blocks each has its own.
 * Zero points: nibble n % 8 of the 32-bit word
 *   z[n / 8 * n_stride + (k + k_origin) / block_k * k_stride],  z as p, of zero_matrix
 * Values of FORMAT_af4: of the type and at the index of scales, but for the strides and the base.
 */
typedef struct scale_matrix {
  const void *base[2];
  const void *const *table[2]; /* device arrays, or NULL */
  int64_t expert_stride, n_stride, k_stride;
  int32_t block_n, block_k, n_origin[2], k_origin;
  int32_t dtype; /* F32, F16, BF16, E8M0, E4M3; DT_NONE: no scales */
} scale_matrix;

typedef struct zero_matrix {
  const uint32_t *base[2];
  const uint32_t *const *table[2];
  int64_t expert_stride, n_stride, k_stride;
  int32_t add; /* to every stored zero point; values: 0 */
} zero_matrix;

/*
 * The weights of one projection in normal form, whatever their layout: element (n, k) of half h of expert e is
 *   p[n * n_stride + k * k_stride],  p = table[h] ? table[h][e] : base[h] + e * expert_stride
 * h 0 is the only half of an ungated or down projection, or the gate; h 1 is up. One of the strides is 1:
 * k_stride == 1 is "K major" (n_stride = ld, or 2 ld interleaved); else "N major" with n_stride 1, or 2 interleaved.
 * Weights with scales are K major; rows begin at 16 bytes and have a multiple of 16 bytes. The weight is
 *   (code - offset - zero point) * scale * (global_over ? 1 / global : global); af4: (code - offset) * scale + value
 * with global[h] + e * global_stride, all of it an exact real number.
 * Bias element (e, n) of half h: bias[h] + e * bias_expert_stride + n * bias_n_stride.
 */
typedef struct expert_matrix {
  const void *base[2];
  const void *const *table[2]; /* device arrays, or NULL */
  int64_t expert_stride, n_stride, k_stride;
  const void *bias[2]; /* NULL: no bias */
  int64_t bias_expert_stride, bias_n_stride;
  int32_t bias_dtype;
  int32_t format; /* weight_format */
  scale_matrix scale;
  zero_matrix zero;       /* base and table NULL: none */
  const float *global[2]; /* NULL: 1 */
  int64_t global_stride;
  int32_t global_over;
  int32_t offset; /* s8, u4 */
} expert_matrix;

/*
 * What becomes of activations before they are multiplied, x as well as h:
 *   AS_THEY_ARE  nothing
 *   STATIC       one scale, given, for all
 *   TOKEN        a row has a scale
 *   GROUP        `group` elements of a row have one: element k is in group (origin + k) / group
 * scale = max(amax, ROWS_FLOOR) / largest code, in f32; power_of_two: rounded up to one. code = x * (1 / scale), both
 * in f32, rounded to nearest even, saturated. A NaN is the code NaN (s8: 0, and the scale is NaN).
 *   FIXED        fixed point by aligned groups of FIXED_GROUP, two bytes an element, for the form fixed alone
 *                (device/fixed_point.cuh): what that makes of activations as they are, made by a launch ahead
 */
enum { ROWS_AS_THEY_ARE = 0, ROWS_STATIC, ROWS_TOKEN, ROWS_GROUP, ROWS_FIXED };
#define ROWS_FLOOR 1e-10f
typedef struct row_format {
  int32_t mode, element; /* ROWS_*; DT_E4M3, DT_I8 */
  int32_t group, origin; /* TOKEN, STATIC: group 2^30, origin 0; the origin is a multiple of 8 */
  int32_t power_of_two;
  const float *static_scale; /* device */
} row_format;

enum { ROWS_ONE_GROUP = 1 << 30, FIXED_GROUP = 128 };
/* Groups of a row of k elements. */
#define ROW_GROUPS(format, k) (((format).origin % (format).group + (k) + (format).group - 1) / (format).group)

/*
 * codes[r, k]; scale[g * scale_ld + r] of group g of row r, counted from the row's first. Grid: see the variant's form.
 * CPU unit: one row.
 * by_expert: row r is an expert's, the last one with offsets[e] <= r (offsets NULL: expert 0's), and row row_pair[r] /
 * top_k of x (row_pair NULL: row r). STATIC: its scale is static_scale[e * static_stride]. AS_THEY_ARE: codes are x's
 * elements, element k that of order[k], order as p of scale_matrix, I32.
 * FIXED: codes is [rows, cols] of two bytes, codes_ld in elements, and may be x itself.
 */
typedef struct quantize_args {
  const void *x; /* [rows, cols]; 16-byte aligned, as codes are, bases and leading dimensions */
  void *codes;   /* [rows, cols] of a byte */
  float *scale;
  int64_t x_ld, codes_ld, scale_ld;
  token_count rows;
  int32_t cols, dtype;
  row_format format;
  int32_t by_expert, experts, top_k;
  int32_t early_inputs;              /* protocol.h */
  const int32_t *offsets, *row_pair; /* [experts + 1]; [rows] */
  int64_t x_rows, static_stride, order_stride;
  const int32_t *order;
  const int32_t *const *order_table;
} quantize_args;

/*
 * Weights become codes: of `experts` matrices one below the other, channel n of expert e is w[(e * out + n) * w_ld ..],
 * `in` elements. Blocks are counted in each of `parts` (gate and up, one below the other, or 1) by itself:
 *   scale[row * scale_ld + (k + k_origin) / block_k],
 *   row = (e * parts + part) * n_blocks + (channel of the part + n_origin) / block_n
 * block_n, block_k ROWS_ONE_GROUP: all of that axis. With zero points or a global, block_n is 1.
 *   zero[(e * ceil(out / 8) + n / 8) * zero_ld + block of k], nibble n % 8
 *   global[e * global_ld + half of n]: of `halves`, interleaved or not; up_first: the first in memory is half 1
 * kernels/encode.h has the definition. encode_scales: all of `global`, and scales of blocks of all channels; encode:
 * the rest. Units: encode_scales: one of what it makes; encode: tasks, of `lanes` threads each on CUDA.
 */
typedef struct encode_args {
  const void *w;
  void *codes;
  void *scale;
  uint32_t *zero;                                       /* NULL: none */
  float *global;                                        /* NULL: none */
  int64_t w_ld, codes_ld, scale_ld, zero_ld, global_ld; /* codes_ld: bytes */
  int64_t units;                                        /* of the operation */
  int32_t experts, out, in, parts;
  int32_t block_n, block_k, n_origin, k_origin;
  int32_t n_blocks, k_blocks; /* of a part; of a row */
  int32_t halves, interleaved, up_first;
  int32_t dtype, format, scale_dtype; /* of w; weight_format */
  int32_t offset, zero_add, global_over;
  int32_t lanes; /* threads a block: a power of two, at most 32 */
} encode_args;

/* Scales of blocks that run over all channels are made before the codes. */
#define ENCODE_SCALES_FIRST(a) ((a)->block_n == ROWS_ONE_GROUP)
/* Channels of a task of encode: of a word of zero points; of a block; one. */
#define ENCODE_CHANNELS(a) ((a)->zero ? 8 : ENCODE_SCALES_FIRST(a) ? 1 : (a)->block_n)
/* Its tasks: so many of an expert, each for every block of k. */
#define ENCODE_ROWS(a) ((a)->zero ? ((a)->out + 7) / 8 : ENCODE_SCALES_FIRST(a) ? (a)->out : (a)->parts * (a)->n_blocks)

/*
 * Counts of what is odd about weights (kernels/scan.h), added to report[e * report_ld + SCAN_*]. Unit: a channel n of a
 * half of an expert, n fastest.
 */
enum {
  SCAN_CODES = 0, /* NaN; of dense weights also infinite */
  SCAN_SCALE_NOT_FINITE,
  SCAN_SCALE_NEGATIVE,
  SCAN_SCALE_ZERO,
  SCAN_SCALE_SUBNORMAL,
  SCAN_SCALE_LARGE, /* E8M0 past 128 */
  SCAN_ZERO_POINT,  /* outside 0 .. 15 */
  SCAN_PAST_F16,    /* weights that round to infinity */
  SCAN_PAST_BF16,
  SCAN_LARGEST, /* not a count: the bits of the largest finite |weight| as f32 */
  SCAN_FIELDS
};
typedef struct scan_args {
  expert_matrix b;
  int64_t *report;
  int64_t report_ld;
  int32_t experts, n, k, halves;
} scan_args;

/*
 * Codes, scales and zero points of `experts` matrices [out, in], moved to where kernels read them (kernels/repack.h):
 * all of an expert behind one another at to + e * to_stride: codes [out, in], scales [scale_rows, groups], zero points
 * [ceil(out / 8), groups] or values like scales, at to_scale and to_zero, and the order [in] at to_order: element k of
 * a row is order[k] of what is read. All lds and strides in bytes. Unit: REPACK_BYTES of an expert's codes, n fastest.
 */
enum { REPACK_BYTES = 16 };
typedef struct repack_args {
  const uint8_t *codes, *scale, *zero; /* zero NULL: none */
  const int32_t *order;                /* NULL: 0, 1, ... */
  uint8_t *to;
  int64_t codes_ld, scale_ld, zero_ld, codes_stride, scale_stride, zero_stride;
  int64_t order_stride; /* elements; 0: one for all experts */
  int64_t to_stride, to_scale, to_zero, to_order;
  int32_t experts, out, in, groups, scale_rows;
  int32_t block_k, k_origin;
  int32_t bits, word, in_out, packed_out; /* word: codes in one */
  uint32_t places;                        /* hex digit i from below: where in its word code i is, from below */
  int32_t flip;                           /* of every code: 8 makes two's complement unsigned */
  int32_t zero_add, scale_bytes;
  int32_t ggml; /* GGML_* or 0 */
} repack_args;
enum { GGML_Q4_0 = 2, GGML_Q4_1 = 3, GGML_Q8_0 = 8, GGML_Q4_K = 12, GGML_Q6_K = 14, GGML_MXFP4 = 39 };
#define REPACK_CELL(a) (REPACK_BYTES * 8 / (a)->bits)

/*
 * Grouped GEMM, up and down. For each expert e < experts and each row r of offsets[e] .. offsets[e] + counts[e] - 1:
 *   a(r) = row_pair && !packed ? a[row_pair[r] / top_k] : a[r]      (by way of protocol.x_copy, if there is one)
 *   acc_h[n] = sum_k a(r)[k] * b(h, e, n, k)    (f32 accumulation; codes times codes of I8: s32)
 * where a has codes (a_scale), a(r)[k] is code * a_scale[group of k * a_scale_ld + the row of a].
 *   acc_h[n] *= pair_weights[token, slot] if pair_weights (weight on input: linear, so applied to the sum)
 *   acc_h[n] += bias_h[e, n]
 *   up:   c[r, n] = gated ? act(acc_0, acc_1) : act(acc_0);     down: c[r, n] = acc_0;  rounded once to dtype
 * Dense (shared expert): counts NULL: one expert, rows 0 .. T-1 with T from `tokens`.
 * Rows are clamped to [0, rows_cap): a caller's inconsistent route never leads outside (FAULT_ROUTE).
 * CPU unit: (expert, block of CPU_N_BLOCK output channels), n fastest.
 */
typedef struct gemm_args {
  const void *a; /* [T, K] or [rows_cap, K] */
  void *c;       /* [rows_cap, N] */
  int64_t a_ld, c_ld;
  expert_matrix b;
  const int32_t *counts, *offsets, *row_pair;
  const float *pair_weights; /* [T, k] or NULL */
  int64_t pair_weights_ld;
  token_count tokens;
  int64_t rows_cap; /* T k; T when dense */
  int32_t experts, top_k, n, k;
  int32_t dtype, act, gated;   /* of c; act: ACT_*; down: ACT_IDENTITY, not gated */
  float act_alpha;             /* already 1.702 when unset */
  float act_limit, gate_limit; /* gated: bounds of u, and of g before the activation; infinite: none */
  int32_t packed;              /* rows of a lie in row order although row_pair names their pairs */
  row_format rows;             /* what activations are multiplied as; few: and become, as it reads them */
  const float *a_scale;        /* a has codes of rows.element; else NULL, and a is of dtype */
  int64_t a_scale_ld;
  fault_sink fault;
  gemm_protocol protocol;
} gemm_args;

enum { CPU_N_BLOCK = 32 };

/*
 * The wgmma form of up and down: the same, and the tensor maps that it reads through (host/tmap.c encodes them).
 *   weights: (k, 8 channels, half, channel / 8, expert); a box is WGMMA_BK x half the weight rows of a tile, for a
 *            gated up 8 of one half, 8 of the other, and so on; up_first: the half that lies first in memory is up
 *            N-major: (channel, k, half, expert), of gate and up element by element (what lies there, k, 1, expert); a
 *            box is 64 x WGMMA_BK
 *   rows:    of rows of a in row order: (k, row); a box is a line of k x ROWS_OF_BOX
 * up_keep besides writes gate and up as the activation gets them, rounded, to z[0] and z[1]: [rows_cap, N], ld z_ld. Of
 * gated SILU and SWIGLU_OAI, without pair_weights; gate and up do not lie element by element.
 * down_drawn is down, whose clusters draw their units (PROGRESS_DOWN_TICKETS of protocol.progress, 0 before).
 * down_activated is down_drawn of rows in their order or, with row_pair, anywhere: row_pair[r] is then a's row, -1 of
 * one that is zeros. Its sums, rounded, are d h, and it writes what `activation` makes of them: h to c and d z to d_z
 * (as z, [rows_cap, N] each, ld z_ld), both times row_weight, or zeros where that is 0; and zeros to the rows behind an
 * expert's last, up to a multiple of ROW_STEP (kernels/backward.h). Row i of expert e has its z at z_offsets[e] + i,
 * below z_rows. along[r]: what to add up for scale <d h, h>, h as rounded, before the weight. g.act (SILU, SWIGLU_OAI)
 * and its bounds are gemm_args's; the matrix is not gated all the same.
 */
typedef struct gemm_sm90_args {
  gemm_args g;
  unsigned char weights[128] __attribute__((aligned(64)));
  unsigned char rows[128] __attribute__((aligned(64)));
  int32_t up_first;
  void *z[2]; /* up_keep; read: down_activated */
  int64_t z_ld;
  float *c_scale;     /* up with dtype E4M3: c has codes, what quantize makes of its rows by a row_format like this, */
  int64_t c_scale_ld; /* with these scales (tokens as rows alone: token_tile.cuh) */
  const float *c_static_scale;
  int32_t c_mode, c_power_of_two;
} gemm_sm90_args;

enum { ALONG_PART = 32 }; /* channels */
#define ALONG_PARTS(n) (((n) + 4 * ALONG_PART - 1) / (4 * ALONG_PART) * 4)

/* Boxes of its tensor map: channels, tokens. */
enum { KEPT_WIDE = 64, KEPT_TOKENS = 48 };

typedef struct down_activated_args {
  gemm_sm90_args gemm;
  void *d_z[2];
  const int32_t *z_offsets;
  const float *row_weight;
  float *along; /* [rows, ALONG_PARTS(n)] */
  int64_t z_rows;
  float scale;
  unsigned char kept[128] __attribute__((aligned(64))); /* tensor map of z: (column of both halves, row) */
} down_activated_args;

enum { WGMMA_BK = 64, WGMMA_STEP = 16 };
/* Each copy has its price. Codes of more rows than a tile has are a byte an element. */
#define ROWS_OF_BOX(bits) ((bits) == 8 ? 64 : (int)WGMMA_STEP)

/*
 * reduce:   out[t] = residual[t] + out_scale * (sum_j w[t,j] y(t,j) + s[t] shared[t]);  s = sigmoid(shared_logit) or 1
 * else:     out[t * k + j] = y(t,j)
 * y(t,j) = y[slot_row[t,j]]; 0 if dropped; x[t] if identity. A slot of weight 0 counts as dropped.
 * Sums are f32: one past the largest float is infinite.
 * slot_row entries >= rows_cap count as dropped (FAULT_ROUTE). CPU unit: one token.
 */
typedef struct combine_args {
  const void *y, *x, *shared, *residual;
  void *out;
  int64_t y_ld, x_ld, shared_ld, residual_ld, out_ld;
  const int32_t *slot_row;   /* [T, k], ld = k */
  const float *pair_weights; /* [T, k] or NULL: 1 */
  int64_t pair_weights_ld;
  const float *shared_logit; /* [T] (ld below) or NULL: s = 1 */
  int64_t shared_logit_ld;
  token_count tokens;
  int64_t rows_cap;
  int32_t top_k, hidden, dtype, out_dtype, reduce;
  float out_scale;
  int32_t on_input; /* y has been weighed already: pair_weights only tell which slots weigh 0 */
  fault_sink fault;
  combine_protocol protocol;
} combine_args;

/*
 * The experts of few tokens, without a map: at most BM (of the row; FEW_TOKENS) tokens and FEW_PAIRS(BM) pairs. Whoever
 * needs to know where a pair goes works it out from the ids; the row of a pair in h is the pair itself.
 *   few_up:   `up`, c[pair]; and of `map` counts_out, load and the faults
 *   few_down: `down`, then `out` as combine: out[t] = residual[t] + out_scale * (sum over experts ... + shared)
 * Of `map` the ids, the numbers of experts, expert_map and tokens are read; of up and down no counts, offsets, row_pair
 * or pair_weights. With protocol.tickets few_up does what few_down would; with protocol.weights the gate's work as
 * well.
 */
typedef struct few_args {
  gemm_args up, down;
  map_args map;
  combine_args out;
  gate_args gate; /* with protocol.weights: few_up writes ids and weights as the gate would */
  few_protocol protocol;
} few_args;

/* What few_up does of gates: a score that is an expert's own is worked out by a thread of its own. */
#define GATE_IN_FEW_UP(a)                                                                                              \
  (GATE_IN_REGISTERS(a) && (GATE_BY_LOGIT(a) || !GATE_SOFTMAX_OVER_ALL(a)) && !GATE_HAS_RULES(a))

enum { FEW_TOKENS = 32, FEW_COLUMNS = 8 /* pairs of an expert that are multiplied at once */ };
/* At most, of up to BM tokens. */
#define FEW_PAIRS(BM) ((BM) == 1 ? (int)MAX_TOP_K : 8 * (BM))

/* Of weights with scales few has x and all of h in shared memory: bytes of a row of k elements, and of the room. */
#define FEW_ROW_BYTES(k) (((k) + 255) / 256 * 544)
#define FEW_ROOM         (128 * 544)

/* Tokens a CTA of the gathering combine takes at once, so that a thread has about eight rows in flight. */
#define COMBINE_TOKENS(top_k) ((top_k) == 1 ? 8 : (top_k) == 2 ? 4 : (top_k) <= 4 ? 2 : 1)

/* ---- operations of ops.h ---- */

enum { EW_ADD = 0, EW_MUL, EW_SCALE, EW_RELU, EW_SIGMOID, EW_SILU, EW_GELU, EW_GELU_TANH };

/* y = function(a, b). A unit is 16 bytes of a row: UNIT_ELEMENTS(dtype), at the row's end perhaps fewer. */
typedef struct elementwise_args {
  const void *a, *b; /* b: add, mul */
  void *y;
  int64_t a_ld, b_ld, y_ld, rows, cols;
  float factor; /* scale */
  int32_t function, dtype;
  int32_t aligned; /* all bases, and all lds if there are several rows, to 16 bytes */
} elementwise_args;

#define UNIT_ELEMENTS(dtype) (128 / format_bits(dense_format(dtype))) /* the host's */

/* y[r] = exp(x[r] - max) / sum. CPU unit: one row; the same for norm. */
typedef struct softmax_args {
  const void *x;
  void *y;
  int64_t x_ld, y_ld, rows;
  int32_t cols, dtype, aligned;
} softmax_args;

/* y[r] = (x[r] - mean) / sqrt(mean of the squares of x[r] - mean, + eps) * weight + bias; mean 0 unless `centered`. */
typedef struct norm_args {
  const void *x, *weight, *bias; /* weight, bias: [cols] or NULL */
  void *y;
  int64_t x_ld, y_ld, rows;
  int32_t cols, dtype, weight_dtype, bias_dtype, aligned, centered;
  float eps;
} norm_args;

/* c = alpha op(a) op(b) + beta c, `batch` times. On the CPU only; its unit: MATMUL_ROWS rows of one c. */
typedef struct matmul_args {
  const void *a, *b;
  void *c;
  int64_t a_ld, b_ld, c_ld, a_stride, b_stride, c_stride, batch;
  int64_t m, n, k;
  int32_t dtype, c_dtype, transpose_a, transpose_b;
  float alpha, beta; /* beta 0: c is not read */
} matmul_args;

enum { MATMUL_ROWS = 8 };

#endif
