/* See dispatch.h. */
#include "dispatch.h"
#include "context.h"
#include "format.h"
#include "status.h"
#include "tmap.h"
#include "../kernels/attention.h"
#include "../kernels/backward.h"

#include <string.h>

/* ---- shapes, as the argument structs say: shape_of_<column of operations.def> ---- */
static op_shape shape_of_router(operation op, const void *args)
{
  const router_args *a = args;
  return (op_shape){.op = op,
                    .in = a->x_dtype,
                    .out = DT_F32,
                    .format = dense_format(a->w_dtype),
                    .scale_run = SCALE_RUN_ALL,
                    .tokens = a->tokens.count,
                    .rows = a->tokens.count,
                    .experts = a->experts,
                    .n = a->experts,
                    .k = a->hidden,
                    .tmap = tmap_serves_router(a)};
}

static op_shape shape_of_map(operation op, const void *args)
{
  const map_args *a = args;
  return (op_shape){.op = op,
                    .tokens = a->tokens.count,
                    .rows = a->tokens.count * a->top_k,
                    .experts = a->local_experts,
                    .top_k = a->top_k};
}

/* As scale_run of host/format.h, from what a kernel is told. */
static int32_t run_of(const gemm_args *a)
{
  const scale_matrix *s = &a->b.scale;
  const int32_t k = s->k_stride ? s->block_k | s->k_origin : 0,
                rows = a->rows.mode == ROWS_GROUP ? a->rows.group | a->rows.origin : 0;
  return aligned_run(k | rows);
}

static op_shape shape_of_gemm(operation op, const void *args)
{
  const gemm_args *a = args;
  const bool in_order = !a->row_pair || a->packed || a->protocol.x_copy;
  return (op_shape){.op = op,
                    .in = a->rows.mode == ROWS_AS_THEY_ARE ? a->dtype : a->rows.element,
                    .out = a->dtype,
                    .format = (weight_format)a->b.format,
                    .rows_mode = a->rows.mode,
                    .scale_run = run_of(a),
                    .scale_type = a->b.scale.dtype,
                    .scale_block = a->b.scale.k_stride ? a->b.scale.block_k : 0,
                    .symmetric = a->b.offset == 8 && !a->b.zero.base[0] && !a->b.zero.table[0],
                    .major = a->b.k_stride == 1 ? MAJOR_K : MAJOR_N,
                    .tokens = a->tokens.count,
                    .rows = a->rows_cap,
                    .experts = a->experts,
                    .n = a->n,
                    .k = a->k,
                    .top_k = a->top_k,
                    .tmap = tmap_serves(&a->b, a->n, a->experts, a->gated),
                    .gathered = !in_order};
}

static op_shape shape_of_permute(operation op, const void *args)
{
  const permute_args *a = args;
  return (op_shape){
      .op = op, .tokens = a->tokens.count, .rows = a->rows_cap, .n = a->hidden * a->element, .top_k = a->top_k};
}

static op_shape shape_of_quantize(operation op, const void *args)
{
  const quantize_args *a = args;
  return (op_shape){
      .op = op, .in = a->dtype, .out = a->format.element, .tokens = a->rows.count, .n = a->cols, .k = a->format.group};
}

static op_shape shape_of_quantize_masked(operation op, const void *args)
{
  const quantize_args *a = &((const quantize_masked_args *)args)->rows;
  op_shape s = shape_of_quantize(op, a);
  s.by_expert = a->by_expert;
  if (a->format.mode == ROWS_AS_THEY_ARE) s.out = a->dtype;
  return s;
}

static op_shape shape_of_encode(operation op, const void *args)
{
  const encode_args *a = args;
  return (op_shape){.op = op, .in = a->dtype, .tokens = a->units};
}

static op_shape shape_of_scan(operation op, const void *args)
{
  const scan_args *a = args;
  return (op_shape){.op = op, .tokens = (int64_t)a->experts * a->halves * a->n};
}

static op_shape shape_of_repack(operation op, const void *args)
{
  const repack_args *a = args;
  return (op_shape){.op = op, .tokens = (int64_t)a->experts * a->out * (a->in / REPACK_CELL(a))};
}

/* Of the operations of ops.h, `tokens` counts what grids are made of: units, rows, or blocks of rows. */
static op_shape shape_of_elementwise(operation op, const void *args)
{
  const elementwise_args *a = args;
  const int64_t unit = UNIT_ELEMENTS(a->dtype);
  return (op_shape){
      .op = op, .in = a->dtype, .out = a->dtype, .tokens = a->rows * ((a->cols + unit - 1) / unit), .n = a->function};
}

static op_shape shape_of_softmax(operation op, const void *args)
{
  const softmax_args *a = args;
  return (op_shape){.op = op, .in = a->dtype, .out = a->dtype, .tokens = a->rows, .n = a->cols};
}

static op_shape shape_of_norm(operation op, const void *args)
{
  const norm_args *a = args;
  return (op_shape){.op = op, .in = a->dtype, .out = a->dtype, .tokens = a->rows, .n = a->cols};
}

static op_shape shape_of_matmul(operation op, const void *args)
{
  const matmul_args *a = args;
  const int64_t blocks = (a->m + MATMUL_ROWS - 1) / MATMUL_ROWS;
  return (op_shape){.op = op, .in = a->dtype, .out = a->dtype, .tokens = a->batch * blocks};
}

static op_shape shape_of_gate(operation op, const void *args)
{
  const gate_args *a = args;
  return (op_shape){
      .op = op, .tokens = a->tokens.count, .experts = a->experts, .top_k = a->top_k, .rules = GATE_HAS_RULES(*a)};
}

static op_shape shape_of_combine(operation op, const void *args)
{
  const combine_args *a = args;
  return (op_shape){
      .op = op, .in = a->dtype, .out = a->out_dtype, .tokens = a->tokens.count, .n = a->hidden, .top_k = a->top_k};
}

/* rules: sequences by offsets, k of them. */
static op_shape shape_of_attention(operation op, const void *args)
{
  const attention_args *a = args;
  return (op_shape){.op = op,
                    .in = a->q.dtype,
                    .out = a->q.dtype,
                    .tokens = a->units,
                    .rows = a->queries,
                    .experts = a->kv_heads,
                    .n = a->head_dim,
                    .k = (int32_t)a->sequences,
                    .top_k = a->heads / a->kv_heads,
                    .rules = a->q_offsets != NULL};
}

/* The structs of kernels/train.h begin with how many there are. */
static op_shape shape_of_units(operation op, const void *args)
{
  return (op_shape){.op = op, .tokens = *(const int64_t *)args};
}

/* ---- the backward of the layer: `tokens` counts the units ---- */

static op_shape shape_of_pad(operation op, const void *args)
{
  const pad_args *a = args;
  const int64_t pairs = a->map.tokens.count * a->map.top_k;
  return (op_shape){.op = op, .tokens = pairs > a->rows_cap ? pairs : a->rows_cap};
}

static op_shape shape_of_copy_rows(operation op, const void *args)
{
  const copy_rows_args *a = args;
  const int64_t blocks = ceil_div(a->map.rows_cap, ROW_STEP);
  return (op_shape){.op = op, .tokens = COPIES_BY_TOKEN(a) ? a->map.tokens.count + blocks : a->map.rows_cap};
}

bool in_vectors(const void *base, int64_t ld, int32_t dtype)
{
  return ((uintptr_t)base | (uintptr_t)(ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)dtype))) % 16 == 0;
}

bool matrix_in_vectors(const expert_matrix *b, int32_t halves, int32_t experts, int32_t dtype)
{
  const int64_t along = b->k_stride == 1 ? b->n_stride : b->k_stride;
  if (b->k_stride != 1 && b->n_stride != 1) return false;
  if (experts > 1 && !b->table[0] && !in_vectors(NULL, b->expert_stride, dtype)) return false;
  return in_vectors(b->base[0], along, dtype) && (halves == 1 || in_vectors(b->base[1], along, dtype));
}

static int32_t dense_type(int32_t format)
{
  return format == FORMAT_f32 ? DT_F32 : format == FORMAT_f16 ? DT_F16 : DT_BF16;
}

/* rules: not for what reads vectors. */
static op_shape shape_of_rows_product(operation op, const void *args)
{
  const rows_product_args *a = args;
  const bool vectors = in_vectors(a->a.base, a->a.ld, a->a.dtype) && in_vectors(a->c, a->c_ld, a->c_dtype) &&
                       matrix_in_vectors(&a->b, a->halves, a->map.experts, dense_type(a->b.format)) && a->n % 8 == 0 &&
                       a->k % 8 == 0;
  return (op_shape){.op = op,
                    .in = a->a.dtype,
                    .out = a->c_dtype,
                    .format = (weight_format)a->b.format,
                    .scale_run = SCALE_RUN_ALL,
                    .major = a->b.k_stride == 1 ? MAJOR_K : MAJOR_N,
                    .tokens = a->map.tokens.count,
                    .rows = a->map.rows_cap,
                    .experts = a->map.experts,
                    .n = a->n,
                    .k = a->k,
                    .top_k = a->map.top_k,
                    .rules = !vectors};
}

/* Of gate and up that are not one matrix elements may lie by twos: those are stored one by one. */
static op_shape shape_of_weight_gradient(operation op, const void *args)
{
  const weight_gradient_args *a = args;
  const expert_matrix *d = &a->d;
  const bool by_twos = d->k_stride != 1 && d->n_stride == 2;
  const bool vectors = in_vectors(a->a.base, a->a.ld, a->a.dtype) && in_vectors(a->b.base, a->b.ld, a->b.dtype) &&
                       (by_twos || matrix_in_vectors(d, a->halves, a->map.experts, a->d_dtype)) && a->a_n == 1 &&
                       a->n % 8 == 0 && a->k % 8 == 0;
  return (op_shape){.op = op,
                    .in = a->a.dtype,
                    .out = a->d_dtype,
                    .format = dense_format(a->b.dtype),
                    .scale_run = SCALE_RUN_ALL,
                    .tokens = a->map.tokens.count,
                    .rows = a->map.rows_cap,
                    .experts = a->map.experts * a->halves,
                    .n = a->n,
                    .k = a->k,
                    .top_k = a->map.top_k,
                    .tmap = tmap_serves_gradient(a),
                    .rules = !vectors};
}

static op_shape shape_of_add_runs(operation op, const void *args)
{
  const add_runs_args *a = args;
  return (op_shape){.op = op, .tokens = a->rows * a->cols};
}

static op_shape shape_of_bias_gradient(operation op, const void *args)
{
  const weight_gradient_args *a = args;
  return (op_shape){.op = op,
                    .tokens = (int64_t)a->map.experts * a->halves * GRADIENT_BLOCKS(a->n),
                    .experts = a->map.experts * a->halves,
                    .n = a->n};
}

static op_shape shape_of_activation(operation op, const void *args)
{
  const activation_args *a = args;
  return (op_shape){.op = op, .tokens = a->map.rows_cap};
}

static op_shape shape_of_pair_gradient(operation op, const void *args)
{
  const pair_gradient_args *a = args;
  return (op_shape){.op = op, .tokens = a->map.tokens.count, .top_k = a->map.top_k};
}

static op_shape shape_of_sigmoid(operation op, const void *args)
{
  const sigmoid_args *a = args;
  return (op_shape){.op = op, .tokens = a->tokens.count};
}

static op_shape shape_of_gather(operation op, const void *args)
{
  const gather_args *a = args;
  return (op_shape){.op = op, .tokens = a->map.tokens.count};
}

static op_shape shape_of_gate_columns(operation op, const void *args)
{
  const gate_backward_args *a = args;
  return (op_shape){.op = op, .tokens = (int64_t)a->g.experts + a->g.always};
}

static op_shape shape_of_gate_tokens(operation op, const void *args)
{
  const gate_backward_args *a = args;
  return (op_shape){.op = op, .tokens = a->g.tokens.count, .n = a->g.experts + a->g.always};
}

static op_shape shape_of_one(operation op, const void *args)
{
  return (void)args, (op_shape){.op = op, .tokens = 1};
}

static op_shape shape_of_few_up(operation op, const void *args)
{
  return shape_of_gemm(op, &((const few_args *)args)->up);
}

static op_shape shape_of_few_down(operation op, const void *args)
{
  return shape_of_gemm(op, &((const few_args *)args)->down);
}

static op_shape shape_of(operation op, const void *args)
{
#define OPERATION(name, arguments, shape, grid, units) [OP_##name] = shape_of_##shape,
  static op_shape (*const shapes[OP_COUNT])(operation, const void *) = {
#include "operations.def"
  };
  return shapes[op](op, args);
}

/* ---- refusals ---- */

/* The error of a step that plan_step refused; `what`: the stage, for the text. */
static cumoe_status refuse_step(struct context *context, const char *what, const launch_step *refused, operation op,
                                step_refusal why)
{
  if (why == STEP_GRID_TOO_LARGE)
    return fail(CUMOE_ERR_NOT_SUPPORTED, "%s: %s would need %lld CTAs, the limit is 2^31 - 1", what,
                variants[refused->row].name, (long long)refused->grid);
  return fail(CUMOE_ERR_NOT_SUPPORTED, "no kernel%s serves %s with these types and layout",
              context->machine.forced[op] ? " (one is forced)" : "", what);
}

cumoe_status check_layer_plan(struct context *context, const layer_plan *lp)
{
  const stage s = lp->refused;
  if (s == STAGE_COUNT) return CUMOE_OK;
  return refuse_step(context, stage_name(s), &lp->steps[s], stage_operation(s), lp->why);
}

/* ---- tensor maps ---- */

/* Of a step that reads through some. */
static const variant *row_with_maps(const launch_step *s)
{
  return s->row >= 0 && takes_tensor_maps(&variants[s->row]) ? &variants[s->row] : NULL;
}

static cumoe_status encoded(const variant *v, bool done)
{
  return done ? CUMOE_OK : fail(CUMOE_ERR_INTERNAL, "%s: the driver made no tensor map of the operands", v->name);
}

/* Encoded anew each time: host work only, and nothing to keep. */
cumoe_status encode_maps(struct context *context, const launch_step *s, mapped_args *args)
{
  const variant *v = row_with_maps(s);
  if (!v) return CUMOE_OK;
  const bool done = v->op == OP_router            ? tmap_encode_router(context->encode_tiled, v, &args->router)
                    : v->op == OP_weight_gradient ? tmap_encode_gradient(context->encode_tiled, v, &args->gradient)
                    : v->op == OP_down_activated  ? tmap_encode_activated(context->encode_tiled, v, &args->activated)
                                                  : tmap_encode(context->encode_tiled, v, &args->gemm);
  return encoded(v, done);
}

cumoe_status encode_few_maps(struct context *context, const launch_step *s, few_sm90_args *args)
{
  const variant *v = row_with_maps(s);
  return v ? encoded(v, tmap_encode_few(context->encode_tiled, args)) : CUMOE_OK;
}

/* ---- one operation ---- */

cumoe_status choose_step(struct context *context, operation op, const void *args, const choice_hint *hint,
                         launch_step *result)
{
  op_shape s = shape_of(op, args);
  if (hint) s.invariant = hint->invariant;
  if (hint && hint->rows) s.rows = hint->rows;
  if (operation_is_late(op)) TRY(load_for_operation(context, op));
  const step_refusal why = plan_step(&context->machine, &s, result);
  return why == STEP_SERVED ? CUMOE_OK : refuse_step(context, operation_name(op), result, op, why);
}

cumoe_status dispatch_by(struct context *context, operation op, const void *args, const choice_hint *hint,
                         cumoe_stream stream)
{
  launch_step s;
  mapped_args mapped;
  TRY(choose_step(context, op, args, hint, &s));
  if (!takes_tensor_maps(&variants[s.row])) return launch(context, &s, args, stream);
  memcpy(&mapped, args, (size_t)operation_arg_bytes(op));
  TRY(encode_maps(context, &s, &mapped));
  return launch(context, &s, &mapped, stream);
}

cumoe_status dispatch(struct context *context, operation op, const void *args, cumoe_stream stream)
{
  return dispatch_by(context, op, args, NULL, stream);
}
