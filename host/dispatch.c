/* See dispatch.h. */
#include "dispatch.h"
#include "launch.h"
#include "tmap.h"

static shape router_shape(const router_args *a)
{
  return (shape){.op = OP_router,
                 .in = a->x_dtype,
                 .w = a->w_dtype,
                 .tokens = a->tokens.count,
                 .rows = a->tokens.count,
                 .experts = a->experts,
                 .n = a->experts,
                 .k = a->hidden,
                 .no_tmap = !tmap_serves_router(a)};
}

static shape map_shape(operation op, const map_args *a)
{
  return (shape){.op = op,
                 .tokens = a->tokens.count,
                 .rows = a->tokens.count * a->top_k,
                 .experts = a->local_experts,
                 .top_k = a->top_k};
}

static shape gemm_shape(operation op, const gemm_args *a)
{
  return (shape){.op = op,
                 .in = a->dtype,
                 .w = a->dtype,
                 .major = a->b.k_stride == 1 ? MAJOR_K : MAJOR_N,
                 .tokens = a->tokens.count,
                 .rows = a->rows_cap,
                 .experts = a->experts,
                 .n = a->n,
                 .k = a->k,
                 .top_k = a->top_k,
                 .no_tmap = !tmap_serves(a)};
}

static shape permute_shape(const permute_args *a)
{
  return (shape){
      .op = OP_permute, .tokens = a->tokens.count, .rows = a->rows_cap, .n = a->hidden * a->element, .top_k = a->top_k};
}

/* Of the operations of ops.h, `tokens` counts what grids are made of: units, rows, or blocks of rows. */
static shape elementwise_shape(const elementwise_args *a)
{
  const int64_t unit = UNIT_ELEMENTS(a->dtype);
  return (shape){.op = OP_elementwise,
                 .in = a->dtype,
                 .w = a->dtype,
                 .tokens = a->rows * ((a->cols + unit - 1) / unit),
                 .n = a->function};
}

static shape row_shape(operation op, int32_t dtype, int64_t rows, int32_t cols)
{
  return (shape){.op = op, .in = dtype, .w = dtype, .tokens = rows, .n = cols};
}

static shape matmul_shape(const matmul_args *a)
{
  const int64_t blocks = (a->m + MATMUL_ROWS - 1) / MATMUL_ROWS;
  return (shape){.op = OP_matmul, .in = a->dtype, .w = a->dtype, .tokens = a->batch * blocks};
}

static shape shape_of(operation op, const void *args)
{
  const gate_args *gate = args;
  const combine_args *combine = args;
  const few_args *few = args;
  const softmax_args *softmax = args;
  const norm_args *norm = args;
  switch (op) {
  case OP_router: return router_shape(args);
  case OP_map_count:
  case OP_map: return map_shape(op, args);
  case OP_permute: return permute_shape(args);
  case OP_up:
  case OP_down: return gemm_shape(op, args);
  case OP_elementwise: return elementwise_shape(args);
  case OP_softmax: return row_shape(op, softmax->dtype, softmax->rows, softmax->cols);
  case OP_norm: return row_shape(op, norm->dtype, norm->rows, norm->cols);
  case OP_matmul: return matmul_shape(args);
  case OP_few_up: return gemm_shape(op, &few->up);
  case OP_few_down: return gemm_shape(op, &few->down);
  case OP_gate: return (shape){.op = op, .tokens = gate->tokens.count, .experts = gate->experts, .top_k = gate->top_k};
  default:
    return (shape){.op = op,
                   .in = combine->dtype,
                   .w = combine->out_dtype,
                   .tokens = combine->tokens.count,
                   .n = combine->hidden,
                   .top_k = combine->top_k};
  }
}

static cumoe_status refused(const variant *v)
{
  return fail(CUMOE_ERR_INTERNAL, "%s: the driver made no tensor map of the operands", v->name);
}

/* Kernels that read through tensor maps get them encoded here, anew each time: host work only, and nothing to keep. */
static cumoe_status launch_router(struct context *context, int32_t row, int64_t grid, bool early,
                                  const router_args *args, cumoe_stream stream)
{
  const variant *v = &variants[row];
  router_sm90_args mapped = {.r = *args};
  if (!tmap_encode_router(context->encode_tiled, v, &mapped)) return refused(v);
  return launch(context, row, grid, early, &mapped, stream);
}

static cumoe_status launch_gemm(struct context *context, int32_t row, int64_t grid, bool early, const gemm_args *args,
                                cumoe_stream stream)
{
  const variant *v = &variants[row];
  const int32_t columns = v->op == OP_up ? 2 * v->bn : v->bn; /* weight rows of a tile; a CTA loads its share for all */
  gemm_sm90_args mapped = {.g = *args};
  if (!tmap_encode(context->encode_tiled, columns / v->cluster, &mapped)) return refused(v);
  return launch(context, row, grid, early, &mapped, stream);
}

static cumoe_status launch_row(struct context *context, int32_t row, int64_t grid, bool early, const void *args,
                               cumoe_stream stream)
{
  if (!takes_tensor_maps(&variants[row])) return launch(context, row, grid, early, args, stream);
  if (variants[row].op == OP_router) return launch_router(context, row, grid, early, args, stream);
  return launch_gemm(context, row, grid, early, args, stream);
}

static shape shape_in(struct context *context, operation op, const void *args)
{
  shape s = shape_of(op, args);
  s.no_tmap |= context->encode_tiled == NULL;
  return s;
}

bool dispatch_wants_copy(struct context *context, const gemm_args *up)
{
  const machine m = machine_of(&context->info, context->forced);
  const shape s = shape_in(context, OP_up, up);
  return wants_copy(&m, &s);
}

bool dispatch_goes_by_expert(struct context *context, const gemm_args *up, const gemm_args *down)
{
  const machine m = machine_of(&context->info, context->forced);
  const shape u = shape_in(context, OP_up, up), d = shape_in(context, OP_down, down);
  return goes_by_expert(&m, &u, &d);
}

bool dispatch_wants_few(struct context *context, const few_args *few)
{
  const machine m = machine_of(&context->info, context->forced);
  const shape u = shape_in(context, OP_few_up, few), d = shape_in(context, OP_few_down, few);
  return wants_few(&m, &u, &d);
}

bool dispatch_few_in_one(struct context *context)
{
  const machine m = machine_of(&context->info, context->forced);
  return few_in_one(&m);
}

bool dispatch_few_up_gates(struct context *context, const gate_args *gate)
{
  const machine m = machine_of(&context->info, context->forced);
  return few_up_gates(&m, gate);
}

cumoe_status dispatch(struct context *context, operation op, const void *args, cumoe_stream stream)
{
  const machine m = machine_of(&context->info, context->forced);
  const shape s = shape_in(context, op, args);
  const int32_t row = choose(&m, &s);
  if (row < 0)
    return fail(CUMOE_ERR_NOT_SUPPORTED, "no kernel%s serves this operation (%s x %s, %s-major weights)",
                context->forced[op] ? " (one is forced)" : "", cumoe_dtype_name((cumoe_dtype)s.in),
                cumoe_dtype_name((cumoe_dtype)s.w), s.major == MAJOR_N ? "N" : "K");
  const variant *v = &variants[row];
  return launch_row(context, row, grid_size(&m, v, &s), starts_early(v, &s), args, stream);
}
