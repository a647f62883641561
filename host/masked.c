/* The masked form: every expert has room for so many rows, and the device knows how many there are. */
#include "arguments.h"
#include "buffer.h"
#include "check.h"
#include "context.h"
#include "dispatch.h"
#include "format.h"
#include "status.h"

static cumoe_status check_capacity(const struct plan *plan, const char *name, int64_t capacity)
{
  const int64_t most = CUMOE_MAX_PAIRS / plan->desc.local_experts;
  REQUIRE(capacity >= 0 && capacity <= most, CUMOE_ERR_INVALID_ARGUMENT, "%s is %lld, must be 0 .. %lld", name,
          (long long)capacity, (long long)most);
  return CUMOE_OK;
}

static cumoe_status check_room(const struct plan *plan, const char *name, int64_t capacity, masked_layout *at)
{
  TRY(check_capacity(plan, name, capacity));
  REQUIRE(plan_masked_layout(&plan->desc, capacity * plan->desc.local_experts, at), CUMOE_ERR_INVALID_ARGUMENT,
          "%s is %lld: the workspace would exceed 2^62 bytes", name, (long long)capacity);
  return CUMOE_OK;
}

cumoe_status cumoe_masked_workspace(cumoe_plan handle, int64_t capacity, size_t *bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  TRY(find_plan(handle, &plan));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  masked_layout at;
  TRY(check_room(plan, "capacity", capacity, &at));
  *bytes = at.bytes;
  return CUMOE_OK;
}

static cumoe_status check_plan(const struct plan *plan)
{
  REQUIRE(!(plan->desc.routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT), CUMOE_ERR_NOT_SUPPORTED,
          "routing.flags has WEIGHT_ON_INPUT: masked rows have no weights");
  return CUMOE_OK;
}

static cumoe_status check_masked(const struct plan *plan, const struct weights *weights, const cumoe_masked_args *a,
                                 size_t need)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t rows = a->capacity * d->local_experts;
  const uint32_t own = DTYPE_BIT(d->dtype), i32 = DTYPE_BIT(CUMOE_I32);
  const operand x = {"args.x", rows, d->hidden, own, 16}, out = {"args.out", rows, d->hidden, own, 16},
                counts = {"args.counts", 1, d->local_experts, i32, 0},
                offsets = {"args.offsets", 1, (int64_t)d->local_experts + 1, i32, 0};
  TRY(check_counted(plan->context, &x, a->x));
  TRY(check_operand(plan->context, &counts, a->counts));
  TRY(check_operand(plan->context, &offsets, a->offsets));
  TRY(check_operand(plan->context, &out, cumoe_const(a->out)));
  TRY(check_workspace_view(plan->context, "args.workspace", cumoe_const(a->workspace), need));
  REQUIRE(a->expected_rows >= 0, CUMOE_ERR_INVALID_ARGUMENT, "args.expected_rows is %lld, must not be negative",
          (long long)a->expected_rows);
  const named_view views[] = {{"args.out", cumoe_const(a->out)},
                              {"args.workspace", cumoe_const(a->workspace)},
                              {"args.x", a->x},
                              {"args.counts", a->counts},
                              {"args.offsets", a->offsets}};
  TRY(check_off_weights(views, 2, "weights", weights));
  return check_overlaps(views, 2, sizeof views / sizeof *views);
}

/* Arguments of the two products, and of what becomes of the activations of each. */
typedef struct masked_pass {
  quantize_masked_args x, h;
  mapped_args up, down;
} masked_pass;

static quantize_masked_args quantize_room(const struct plan *plan, const cumoe_masked_args *a, gemm_args *g,
                                          const row_order *order, size_t codes, size_t scale)
{
  char *workspace = a->workspace.data;
  const token_count rows = all_tokens(a->x.rows);
  return (quantize_masked_args){
      .rows = quantize_arguments(plan, g, rows, order, workspace + codes, (float *)(workspace + scale)),
      .counts = a->counts.data,
      .capacity = (int32_t)a->capacity};
}

static void fill_masked(const struct plan *plan, const struct weights *weights, const cumoe_masked_args *a,
                        const masked_layout *at, masked_pass *p)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t rows = a->x.rows;
  const route_pointers route = {(int32_t *)(uintptr_t)a->counts.data, (int32_t *)(uintptr_t)a->offsets.data, NULL,
                                NULL};
  const cumoe_view none = {0};
  gemm_args *up = &p->up.gemm.g, *down = &p->down.gemm.g;
  *up = up_arguments(plan, weights, a->x, &route, none);
  up->rows_cap = rows;
  up->c = (char *)a->workspace.data + at->h;
  up->c_ld = d->inter;
  const cumoe_view h = cumoe_matrix(up->c, (cumoe_dtype)d->dtype, rows, d->inter, d->inter);
  *down = down_arguments(plan, weights, h, &route, rows);
  down->rows_cap = rows;
  down->c = a->out.data;
  down->c_ld = a->out.ld;
  p->x = quantize_room(plan, a, up, &weights->up_order, at->x_codes, at->x_scale);
  p->h = quantize_room(plan, a, down, &weights->down_order, at->h_codes, at->h_scale);
}

/* All launches or none. */
static cumoe_status run_masked(const struct plan *plan, const struct weights *weights, const cumoe_masked_args *a,
                               const masked_layout *at, cumoe_stream stream)
{
  const cumoe_moe_desc *d = &plan->desc;
  struct context *context = plan->context;
  const int64_t most = a->capacity,
                expected = a->expected_rows > 0 && a->expected_rows < most ? a->expected_rows : most;
  const choice_hint hint = {expected * d->local_experts, is_invariant(d)};
  const bool changes_x = changes_rows(&d->up_format), changes_h = changes_rows(&d->down_format);
  masked_pass p;
  launch_step x, up, h, down;
  fill_masked(plan, weights, a, at, &p);
  if (changes_x) TRY(choose_step(context, OP_quantize_masked, &p.x, NULL, &x));
  TRY(choose_step(context, OP_up, &p.up, &hint, &up));
  if (changes_h) TRY(choose_step(context, OP_quantize_masked, &p.h, NULL, &h));
  TRY(choose_step(context, OP_down, &p.down, &hint, &down));
  TRY(encode_maps(context, &up, &p.up));
  TRY(encode_maps(context, &down, &p.down));
  if (changes_x) TRY(launch(context, &x, &p.x, stream));
  TRY(launch(context, &up, &p.up, stream));
  if (changes_h) TRY(launch(context, &h, &p.h, stream));
  return launch(context, &down, &p.down, stream);
}

cumoe_status cumoe_masked_forward(cumoe_plan plan_handle, cumoe_weights weights_handle, const cumoe_masked_args *args,
                                  cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  const struct weights *weights;
  cumoe_masked_args a;
  TRY(find_plan(plan_handle, &plan));
  TRY(take_struct("args", args, &a));
  TRY(find_weights("weights", weights_handle, plan, false, &weights));
  REQUIRE(a.reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.reserved is %d, must be 0", (int)a.reserved);
  masked_layout at;
  TRY(check_room(plan, "args.capacity", a.capacity, &at));
  TRY(check_plan(plan));
  TRY(check_masked(plan, weights, &a, at.bytes));
  if (a.capacity == 0) return CUMOE_OK;
  ON_DEVICE(plan->context, run_masked(plan, weights, &a, &at, stream));
}
