/* The doors that all calls share, before any CUDA call. Below them, code trusts. */
#ifndef CUMOE_CHECK_H
#define CUMOE_CHECK_H

#include "status.h"
#include "../include/cumoe/stages.h"

struct context;
struct plan;
struct weights;

/* What an operand has to be. dtypes: bit mask of 1 << CUMOE_*; align: bytes, for the base and for ld. */
typedef struct operand {
  const char *name;
  int64_t rows, cols;
  uint32_t dtypes;
  uint32_t align;
} operand;

#define DTYPE_BIT(dtype) (1u << (dtype))
#define INDEX_BITS       (DTYPE_BIT(CUMOE_I32) | DTYPE_BIT(CUMOE_I64))
enum {
  FLOAT_BITS = 0 /* the dense formats */
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)
#define DENSE(name, DTYPE, BITS) | DTYPE_BIT(CUMOE_##DTYPE)
#include "../kernels/formats.def"
};

bool absent(const cumoe_view *view);
cumoe_status check_operand(struct context *context, const operand *want, cumoe_view view);
cumoe_status check_with_more(struct context *context, const operand *want, cumoe_view view); /* rows, or more of them */
/* The operand that says how many rows a call has: without any, too, its cols and dtype count. */
cumoe_status check_counted(struct context *context, const operand *want, cumoe_view view);
cumoe_status check_optional(struct context *context, const operand *want, cumoe_view view); /* absent is fine */
/* How many tokens there are, [1, 1] i32, or absent. */
cumoe_status check_device_tokens(struct context *context, const char *name, cumoe_view tokens);
cumoe_status check_rows_or_one(struct context *context, const operand *want, cumoe_view view); /* absent is fine */
/* [1, bytes] u8, 256-byte aligned, with room for `need`; of 0 none is looked at. */
cumoe_status check_workspace_view(struct context *context, const char *name, cumoe_view view, size_t need);
/* args.workspace likewise, which is looked at in any case where it is given. */
cumoe_status check_scratch(struct context *context, cumoe_view workspace, size_t need);
cumoe_status check_absent(const char *name, cumoe_view view, const char *why);
cumoe_status check_disjoint(const char *output, cumoe_view_mut out, const char *input, cumoe_view in);
/* Of operations whose operands all have one shape and type: the first one, the others, and an output that may be one of
 * them itself. */
cumoe_status check_input(struct context *context, const char *name, cumoe_view x);
cumoe_status check_same_shape(struct context *context, const char *name, cumoe_view v, cumoe_view x);
cumoe_status check_in_place(const char *output, cumoe_view_mut y, const char *input, cumoe_view x);
/* Of these views, the first `outputs` are written: they may overlap neither each other nor any other. */
typedef struct named_view {
  const char *name;
  cumoe_view view;
} named_view;
enum { MAX_NAMED_VIEWS = 28 };
/* clang-format off */
#define ROUTE_VIEWS(route)                                                                                             \
  {"route.counts", cumoe_const((route)->counts)}, {"route.offsets", cumoe_const((route)->offsets)},                    \
  {"route.row_pair", cumoe_const((route)->row_pair)}, {"route.slot_row", cumoe_const((route)->slot_row)}
/* clang-format on */
cumoe_status check_overlaps(const named_view *views, int outputs, int all);
/* A type that x, h and weights without scales have. */
cumoe_status check_dense(const char *name, int32_t dtype, cumoe_status otherwise);
/* The bytes of a view: `rows` runs of `width`, one every `pitch`. */
typedef struct span {
  uintptr_t begin, end; /* of all; equal when there are none */
  uintptr_t width, pitch;
} span;
span span_of(const cumoe_view *view);
bool spans_overlap(const span *a, const span *b);

cumoe_status check_device(const char *name, const cumoe_view *view, int32_t device);
cumoe_status check_finite(const char *name, float value);
cumoe_status check_not_negative(const char *name, float value);
/* ld < cols, overflowing extents, alignment: shape sanity of any view. */
cumoe_status check_extent(const char *name, const cumoe_view *view, uint32_t align);

/* A caller's struct is not null and has a size that some version of it can have: none that ends inside a pointer. */
#define check_struct(name, given) check_size(name, given, sizeof *(given), _Alignof(__typeof__(*(given))))
cumoe_status check_size(const char *name, const void *given, size_t size, size_t align);

/* check_struct, then copies it by its size: a shorter one is padded with zeros, a longer one must end in zeros. */
#define take_struct(name, from, to) take_bytes(name, from, to, sizeof *(to), _Alignof(__typeof__(*(to))))
cumoe_status take_bytes(const char *name, const void *from, void *to, size_t size, size_t align);

/* Fills a caller's struct, which check_struct has passed: as much of `from` as there is room for, then zeros. */
#define give_struct(from, to) give_bytes(1 ? (from) : (to), to, sizeof *(from)) /* both of one type */
void give_bytes(const void *from, void *to, size_t size);

/* What is kept for later versions in a struct that lies in others by value. */
#define check_reserve(name, words) check_words(name, words, sizeof(words) / sizeof *(words))
cumoe_status check_words(const char *name, const uint64_t *words, size_t count);

/* Tokens of a call, `least` or more, of top_k rows each. */
cumoe_status check_tokens(const char *name, int64_t tokens, int64_t least, int32_t top_k);
struct workspace_layout;
/* The workspace of so many tokens of a plan, which is below 2^62 bytes. */
cumoe_status check_layout(const char *name, const struct plan *plan, int64_t tokens, struct workspace_layout *layout);

cumoe_status check_routing(const cumoe_routing *routing, int32_t router_experts);
/* Checks and fills in defaults. */
cumoe_status check_moe_desc(const cumoe_moe_desc *from, cumoe_moe_desc *to);
/* Nothing where accumulating in place is meant: the one overlap that is legal. */
cumoe_view unless_in_place(cumoe_view residual, cumoe_view_mut out);

/* How long a rank waits for another; 0 becomes the default. */
cumoe_status check_timeout(const char *name, int64_t *timeout_ns);

#endif
