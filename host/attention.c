/* Attention and rotary embedding: check, fill the kernels' argument structs, dispatch. */
#include "train.h"
#include "buffer.h"
#include "dispatch.h"
#include "../include/cumoe/attention.h"
#include "../kernels/attention.h"

#include <math.h>

/* ---- attention: what forward and backward are told ---- */

static cumoe_status check_heads(const cumoe_attention_args *a)
{
  TRY(check_flags("flags", a->flags, CUMOE_ATTENTION_CAUSAL));
  REQUIRE(a->kv_heads >= 1 && a->heads >= 1 && a->heads % a->kv_heads == 0 && a->heads <= 1 << 20,
          CUMOE_ERR_INVALID_ARGUMENT, "heads is %d, must be a multiple of kv_heads = %d, both 1 .. 2^20", (int)a->heads,
          (int)a->kv_heads);
  REQUIRE(a->head_dim >= 8 && a->head_dim <= ATTENTION_MAX_HEAD && a->head_dim % 8 == 0, CUMOE_ERR_INVALID_ARGUMENT,
          "head_dim is %d, must be a multiple of 8, 8 .. %d", (int)a->head_dim, ATTENTION_MAX_HEAD);
  REQUIRE(a->page >= 0, CUMOE_ERR_INVALID_ARGUMENT, "page is %d, must not be negative", (int)a->page);
  REQUIRE(a->window >= 0, CUMOE_ERR_INVALID_ARGUMENT, "window is %d, must not be negative", (int)a->window);
  TRY(check_zero("reserved", a->reserved));
  TRY(check_finite("scale", a->scale));
  return check_not_negative("softcap", a->softcap);
}

/* One of them without offsets; -1: there cannot be so many. */
static int64_t sequences_of(const cumoe_attention_args *a)
{
  if (absent(&a->q_offsets)) return a->page ? a->pages.rows : 1;
  return a->q_offsets.cols > 0 ? a->q_offsets.cols - 1 : -1;
}

static cumoe_status check_indices(struct context *context, const char *name, cumoe_view v, int64_t rows, int64_t cols)
{
  const operand want = {name, rows, cols, DTYPE_BIT(CUMOE_I32), 0};
  return check_optional(context, &want, v);
}

static cumoe_status check_sequences(struct context *context, const cumoe_attention_args *a)
{
  const int64_t sequences = sequences_of(a);
  TRY(check_owner(context, "q_offsets", &a->q_offsets));
  TRY(check_owner(context, "pages", &a->pages));
  REQUIRE(a->page == 0 || !absent(&a->pages) || !absent(&a->q_offsets), CUMOE_ERR_INVALID_ARGUMENT,
          "pages is absent, and page is %d", (int)a->page);
  REQUIRE(sequences >= 0 && sequences <= INT32_MAX, CUMOE_ERR_INVALID_ARGUMENT,
          "q_offsets.cols is %lld, must be 1 .. 2^31: one more than there are sequences", (long long)a->q_offsets.cols);
  REQUIRE(!absent(&a->q_offsets) || sequences == 1, CUMOE_ERR_INVALID_ARGUMENT,
          "q_offsets is absent, and pages has %lld sequences", (long long)sequences);
  TRY(check_indices(context, "q_offsets", a->q_offsets, 1, sequences + 1));
  TRY(check_indices(context, "k_offsets", a->k_offsets, 1, sequences + 1));
  TRY(check_indices(context, "k_lengths", a->k_lengths, 1, sequences));
  if (a->page == 0) return check_absent("pages", a->pages, "page is 0");
  TRY(check_absent("k_offsets", a->k_offsets, "keys are paged"));
  const operand lengths = {"k_lengths", 1, sequences, DTYPE_BIT(CUMOE_I32), 0};
  const operand pages = {"pages", sequences, a->pages.cols, DTYPE_BIT(CUMOE_I32), 0};
  TRY(check_operand(context, &lengths, a->k_lengths));
  TRY(check_count("pages.cols", a->pages.cols));
  return check_operand(context, &pages, a->pages);
}

static cumoe_status check_attention(struct context *context, const cumoe_attention_args *a)
{
  TRY(check_heads(a));
  const int64_t q_cols = (int64_t)a->heads * a->head_dim, k_cols = (int64_t)a->kv_heads * a->head_dim;
  TRY(check_owner(context, "q", &a->q));
  TRY(check_owner(context, "k", &a->k));
  const operand q = {"q", a->q.rows, q_cols, FLOAT_BITS, 0};
  TRY(check_counted(context, &q, a->q));
  const uint32_t type = DTYPE_BIT(a->q.dtype & 31);
  const operand k = {"k", a->k.rows, k_cols, type, 0}, v = {"v", a->k.rows, k_cols, type, 0};
  const operand out = {"out", a->q.rows, q_cols, type, 0};
  const operand lse = {"lse", a->q.rows, a->heads, DTYPE_BIT(CUMOE_F32), 0};
  const operand sinks = {"sinks", 1, a->heads, type | DTYPE_BIT(CUMOE_F32), 0};
  TRY(check_counted(context, &k, a->k));
  TRY(check_operand(context, &v, a->v));
  TRY(check_count("q.rows", a->q.rows));
  TRY(check_count("k.rows", a->k.rows));
  TRY(check_sequences(context, a));
  TRY(check_optional(context, &sinks, a->sinks));
  TRY(check_operand(context, &out, cumoe_const(a->out)));
  return check_optional(context, &lse, cumoe_const(a->lse));
}

enum { ATTENTION_OUTPUTS = 2, ATTENTION_VIEWS = 10 };

static void list_views(const cumoe_attention_args *a, named_view *to)
{
  const named_view views[ATTENTION_VIEWS] = {{"out", cumoe_const(a->out)},
                                             {"lse", cumoe_const(a->lse)},
                                             {"q", a->q},
                                             {"k", a->k},
                                             {"v", a->v},
                                             {"q_offsets", a->q_offsets},
                                             {"k_offsets", a->k_offsets},
                                             {"k_lengths", a->k_lengths},
                                             {"pages", a->pages},
                                             {"sinks", a->sinks}};
  for (int i = 0; i < ATTENTION_VIEWS; i++) to[i] = views[i];
}

/* From here on a cap changes no score that it does not dwarf, and kernels, which multiply it in f32, would overflow. */
#define MOST_SOFTCAP 0x1p60f

/* Kernels ask the table whether keys are in pages: one without columns, of which nobody reads, needs an address. */
static matrix pages_of(const cumoe_attention_args *a)
{
  cumoe_view pages = a->pages;
  if (a->page && !pages.data) pages.data = a->k_lengths.data;
  return matrix_of(pages);
}

static attention_args attention_arguments(const struct context *context, const cumoe_attention_args *a)
{
  return (attention_args){.units = a->q.rows * a->heads,
                          .q = matrix_of(a->q),
                          .k = matrix_of(a->k),
                          .v = matrix_of(a->v),
                          .out = matrix_mut(a->out),
                          .lse = matrix_mut(a->lse),
                          .sinks = matrix_of(a->sinks),
                          .pages = pages_of(a),
                          .q_offsets = a->q_offsets.data,
                          .k_offsets = a->k_offsets.data,
                          .k_lengths = a->k_lengths.data,
                          .queries = a->q.rows,
                          .keys = a->k.rows,
                          .sequences = sequences_of(a),
                          .heads = a->heads,
                          .kv_heads = a->kv_heads,
                          .head_dim = a->head_dim,
                          .page = a->page,
                          .page_count = (int32_t)a->pages.cols,
                          .window = a->window,
                          .causal = (a->flags & CUMOE_ATTENTION_CAUSAL) != 0,
                          .scale = a->scale == 0 ? 1 / sqrt((double)a->head_dim) : (double)a->scale,
                          .softcap = a->softcap < MOST_SOFTCAP ? (double)a->softcap : 0,
                          .fault = context->fault};
}

/* ---- forward ---- */

cumoe_status cumoe_attention(cumoe_context handle, const cumoe_attention_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_attention_args a;
  named_view views[ATTENTION_VIEWS];
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &a));
  TRY(check_attention(context, &a));
  list_views(&a, views);
  TRY(check_overlaps(views, ATTENTION_OUTPUTS, ATTENTION_VIEWS));
  const attention_args raw = attention_arguments(context, &a);
  ON_DEVICE(context, dispatch(context, OP_attention, &raw, stream));
}

/* ---- backward ---- */

static cumoe_status check_backward_operands(struct context *context, const cumoe_attention_backward_args *b,
                                            const cumoe_attention_args *a)
{
  const uint32_t type = DTYPE_BIT(a->q.dtype & 31);
  const struct {
    operand want;
    cumoe_view view;
  } all[] = {{{"args.dout", a->q.rows, a->q.cols, type, 0}, b->dout},
             {{"args.dq", a->q.rows, a->q.cols, type, 0}, cumoe_const(b->dq)},
             {{"args.dk", a->k.rows, a->k.cols, type, 0}, cumoe_const(b->dk)},
             {{"args.dv", a->k.rows, a->k.cols, type, 0}, cumoe_const(b->dv)},
             {{"args.delta", a->q.rows, a->heads, DTYPE_BIT(CUMOE_F32), 0}, cumoe_const(b->delta)},
             {{"lse", a->q.rows, a->heads, DTYPE_BIT(CUMOE_F32), 0}, cumoe_const(a->lse)}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) TRY(check_operand(context, &all[i].want, all[i].view));
  const operand dsinks = {"args.dsinks", 1, a->heads, DTYPE_BIT(CUMOE_F32), 0};
  if (absent(&a->sinks)) TRY(check_absent("args.dsinks", cumoe_const(b->dsinks), "there are no sinks"));
  return check_optional(context, &dsinks, cumoe_const(b->dsinks));
}

static cumoe_status check_backward(struct context *context, const cumoe_attention_backward_args *b,
                                   const cumoe_attention_args *a)
{
  enum { OUTPUTS = 5 };
  TRY(check_flags("args.flags", b->flags, CUMOE_TRAIN_ACCUMULATE));
  TRY(check_attention(context, a));
  REQUIRE(a->page == 0, CUMOE_ERR_NOT_SUPPORTED, "page is %d, must be 0: paged keys have no backward", (int)a->page);
  TRY(check_backward_operands(context, b, a));
  named_view views[OUTPUTS + 1 + ATTENTION_VIEWS] = {
      {"args.dq", cumoe_const(b->dq)},         {"args.dk", cumoe_const(b->dk)},       {"args.dv", cumoe_const(b->dv)},
      {"args.dsinks", cumoe_const(b->dsinks)}, {"args.delta", cumoe_const(b->delta)}, {"args.dout", b->dout}};
  list_views(a, views + OUTPUTS + 1);
  return check_overlaps(views, OUTPUTS, OUTPUTS + 1 + ATTENTION_VIEWS);
}

static cumoe_status run_backward(struct context *context, attention_args *raw, cumoe_stream stream)
{
  TRY(dispatch(context, OP_attention_dq, raw, stream));
  raw->units = raw->keys * raw->kv_heads;
  TRY(dispatch(context, OP_attention_dkv, raw, stream));
  raw->units = raw->dsinks.data ? raw->heads : 0;
  return dispatch(context, OP_attention_dsinks, raw, stream);
}

cumoe_status cumoe_attention_backward(cumoe_context handle, const cumoe_attention_backward_args *args,
                                      cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_attention_backward_args b;
  cumoe_attention_args a;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &b));
  TRY(take_struct("args.forward", b.forward, &a));
  TRY(check_backward(context, &b, &a));
  attention_args raw = attention_arguments(context, &a);
  raw.dout = matrix_of(b.dout);
  raw.dq = matrix_mut(b.dq);
  raw.dk = matrix_mut(b.dk);
  raw.dv = matrix_mut(b.dv);
  raw.dsinks = matrix_mut(b.dsinks);
  raw.delta = matrix_mut(b.delta);
  raw.accumulate = (b.flags & CUMOE_TRAIN_ACCUMULATE) != 0;
  ON_DEVICE(context, run_backward(context, &raw, stream));
}

/* ---- rotary embedding ---- */

static cumoe_status check_rope(struct context *context, const cumoe_rope_args *a)
{
  TRY(check_flags("args.flags", a->flags, CUMOE_ROPE_INTERLEAVED | CUMOE_ROPE_BACKWARD));
  REQUIRE(a->heads >= 1 && a->head_dim >= 2, CUMOE_ERR_INVALID_ARGUMENT,
          "args.heads is %d and args.head_dim %d, must be at least 1 and 2", (int)a->heads, (int)a->head_dim);
  TRY(check_owner(context, "args.x", &a->x));
  TRY(check_owner(context, "args.cosine", &a->cosine));
  const operand x = {"args.x", a->x.rows, (int64_t)a->heads * a->head_dim, FLOAT_BITS, 0};
  const operand cosine = {"args.cosine", a->cosine.rows, a->cosine.cols, DTYPE_BIT(CUMOE_F32), 0};
  const operand sine = {"args.sine", a->cosine.rows, a->cosine.cols, DTYPE_BIT(CUMOE_F32), 0};
  const operand positions = {"args.positions", 1, a->x.rows, INDEX_BITS, 0};
  TRY(check_counted(context, &x, a->x));
  TRY(check_same_shape(context, "args.y", cumoe_const(a->y), a->x));
  TRY(check_counted(context, &cosine, a->cosine));
  REQUIRE(a->cosine.cols >= 0 && a->cosine.cols <= a->head_dim / 2, CUMOE_ERR_INVALID_ARGUMENT,
          "args.cosine.cols is %lld, must be at most head_dim / 2 = %d", (long long)a->cosine.cols,
          (int)a->head_dim / 2);
  TRY(check_operand(context, &sine, a->sine));
  TRY(check_optional(context, &positions, a->positions));
  TRY(check_in_place("args.y", a->y, "args.x", a->x));
  const named_view views[] = {{"args.y", cumoe_const(a->y)},
                              {"args.cosine", a->cosine},
                              {"args.sine", a->sine},
                              {"args.positions", a->positions}};
  return check_overlaps(views, 1, 4);
}

cumoe_status cumoe_rope(cumoe_context handle, const cumoe_rope_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_rope_args a;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &a));
  TRY(check_rope(context, &a));
  const rope_args raw = {.units = a.x.rows,
                         .x = matrix_of(a.x),
                         .y = matrix_mut(a.y),
                         .positions = matrix_of(a.positions),
                         .cosine = matrix_of(a.cosine),
                         .sine = matrix_of(a.sine),
                         .places = a.cosine.rows,
                         .heads = a.heads,
                         .head_dim = a.head_dim,
                         .half = (int32_t)a.cosine.cols,
                         .interleaved = (a.flags & CUMOE_ROPE_INTERLEAVED) != 0,
                         .backward = (a.flags & CUMOE_ROPE_BACKWARD) != 0,
                         .fault = context->fault};
  ON_DEVICE(context, dispatch(context, OP_rope, &raw, stream));
}
