/* Formats of weights (cumoe/format.h), from what a caller describes to what kernels know. */
#ifndef CUMOE_HOST_FORMAT_H
#define CUMOE_HOST_FORMAT_H

#include <stdbool.h>

#include "../include/cumoe/moe.h"
#include "../kernels/args.h"
#include "check.h"
#include "status.h"

static inline bool is_dense(const cumoe_format *f)
{
  return f->element == CUMOE_ELEMENT_DENSE;
}

/* Of a matrix [out, in] whose activations are of `dtype`. REPACK: also what only cumoe_weights_repack reads. */
typedef enum format_use { FORMAT_IN_PLACE, FORMAT_REPACK } format_use;
cumoe_status check_format(const char *name, const cumoe_format *f, int64_t in, int32_t dtype, format_use use);

bool same_format(const cumoe_format *a, const cumoe_format *b);

/* The class of kernels that serves it. */
weight_format class_of(const cumoe_format *f, int32_t dtype);

/* What an element of a view of its codes is, and how many codes that holds. */
cumoe_dtype storage_dtype(const cumoe_format *f, int32_t dtype);
int32_t storage_codes(const cumoe_format *f);

enum { ROW_GROUP = 128 }; /* cumoe_format.row_group */

/* Of origins, and of widths where few's kernels divide them with an origin: few_quotient (kernels/few/feed.cuh) is for
 * places below 2^21. */
enum { MOST_PLACE = 1 << 20 };

/* The largest power of two such that an aligned run of so many k has one scale, of weights and of activations;
 * SCALE_RUN_ALL: no scale changes along k, or there is none. */
enum { SCALE_RUN_ALL = 1 << 30 };
int32_t scale_run(const cumoe_format *f);

/* Of blocks of these sizes with these origins, all or-ed together. */
static inline int32_t aligned_run(int32_t steps)
{
  const int32_t all = (int32_t)SCALE_RUN_ALL | steps;
  return all & -all;
}

/* What is multiplied with the weights: `dtype`, or codes. */
int32_t row_element(const cumoe_format *f, int32_t dtype);
row_format rows_of(const cumoe_format *f, const float *static_scale);

/* Whether activations become another row for each expert: so many rows as there are pairs. */
static inline bool by_expert(const cumoe_format *f)
{
  return f->rows == CUMOE_ROWS_STATIC_EXPERT || f->act_order;
}

/* Whether they become anything. */
static inline bool changes_rows(const cumoe_format *f)
{
  return f->rows != CUMOE_ROWS_AS_THEY_ARE || f->act_order;
}

static inline bool has_values(const cumoe_format *f)
{
  return f->zero == CUMOE_ZERO_VALUES;
}

static inline bool is_symmetric(const cumoe_format *f)
{
  return f->element == CUMOE_ELEMENT_U4 && f->zero == CUMOE_ZERO_NONE && f->offset == 8;
}

/* Whether a launch ahead may make rows ready for products of form fixed. */
static inline bool takes_fixed_rows(const cumoe_format *f, int32_t dtype)
{
  if (changes_rows(f)) return false;
  if (is_symmetric(f)) return scale_run(f) >= FIXED_GROUP;
  return f->element == CUMOE_ELEMENT_E2M1 && f->scale == CUMOE_E8M0 && dtype == CUMOE_BF16;
}

static inline bool is_interleaved(int32_t gate_order)
{
  return gate_order == CUMOE_GATE_UP_INTERLEAVED || gate_order == CUMOE_UP_GATE_INTERLEAVED;
}

/* Of gate and up in one matrix, in either order: whether the blocks suit it. */
cumoe_status check_halves(const char *name, const cumoe_format *f, bool concatenated, bool interleaved);

/* What views of scales may be; checkpoints call E8M0 uint8. */
static inline uint32_t scale_bits(const cumoe_format *f)
{
  return DTYPE_BIT(f->scale & 31) | (f->scale == CUMOE_E8M0 ? DTYPE_BIT(CUMOE_U8) : 0);
}

/* Blocks that `count` elements of an axis have, the first of them at `origin` of its block; 1 for block 0. */
static inline int64_t blocks_of(int32_t block, int32_t origin, int64_t count)
{
  return block ? (origin + count + block - 1) / block : 1;
}

/* Matrices in one whose blocks are counted apart: gate and up, one below the other, unless joined. */
static inline int32_t scale_parts(const cumoe_format *f, int32_t halves, bool interleaved)
{
  return halves == 2 && !interleaved && !f->joined ? 2 : 1;
}

/* Rows of the scales of `out` channels. */
static inline int64_t scale_rows(const cumoe_format *f, int64_t out, int32_t halves, bool interleaved)
{
  const int32_t parts = scale_parts(f, halves, interleaved);
  return parts * blocks_of(f->block[0], f->origin[0], out / parts);
}

#endif
