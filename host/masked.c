/* The masked form: every expert has room for so many rows, and the device knows how many there are. */
#include "arguments.h"
#include "buffer.h"
#include "check.h"
#include "context.h"
#include "dispatch.h"
#include "status.h"

static cumoe_status check_capacity(const struct plan *plan, const char *name, int64_t capacity)
{
  const int64_t most = INT32_MAX / plan->desc.local_experts;
  REQUIRE(capacity >= 0 && capacity <= most, CUMOE_ERR_INVALID_ARGUMENT, "%s is %lld, must be 0 .. %lld", name,
          (long long)capacity, (long long)most);
  return CUMOE_OK;
}

/* h [rows, I], in whole units of its alignment. */
static int64_t h_bytes(const struct plan *plan, int64_t capacity)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t bytes = capacity * d->local_experts * d->inter * (int64_t)cumoe_dtype_bytes((cumoe_dtype)d->dtype);
  return (bytes + 255) / 256 * 256;
}

cumoe_status cumoe_masked_workspace(cumoe_plan handle, int64_t capacity, size_t *bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  TRY(find_plan(handle, &plan));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  TRY(check_capacity(plan, "capacity", capacity));
  *bytes = (size_t)h_bytes(plan, capacity);
  return CUMOE_OK;
}

static cumoe_status check_plan(const struct plan *plan)
{
  const cumoe_moe_desc *d = &plan->desc;
  REQUIRE(d->up_format.rows == CUMOE_ROWS_AS_THEY_ARE && d->down_format.rows == CUMOE_ROWS_AS_THEY_ARE,
          CUMOE_ERR_NOT_SUPPORTED,
          "desc.up_format.rows is %d, desc.down_format.rows %d: activations are quantised by "
          "cumoe_moe_forward only",
          (int)d->up_format.rows, (int)d->down_format.rows);
  REQUIRE(!(d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT), CUMOE_ERR_NOT_SUPPORTED,
          "routing.flags has WEIGHT_ON_INPUT: masked rows have no weights");
  return CUMOE_OK;
}

static cumoe_status check_masked(const struct plan *plan, const struct weights *weights, const cumoe_masked_args *a)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t rows = a->capacity * d->local_experts, need = h_bytes(plan, a->capacity);
  const uint32_t own = DTYPE_BIT(d->dtype), i32 = DTYPE_BIT(CUMOE_I32);
  const operand x = {"args.x", rows, d->hidden, own, 16}, out = {"args.out", rows, d->hidden, own, 16},
                counts = {"args.counts", 1, d->local_experts, i32, 0},
                offsets = {"args.offsets", 1, (int64_t)d->local_experts + 1, i32, 0},
                workspace = {"args.workspace", 1, a->workspace.cols, DTYPE_BIT(CUMOE_U8), 256};
  TRY(check_counted(plan->context, &x, a->x));
  TRY(check_operand(plan->context, &counts, a->counts));
  TRY(check_operand(plan->context, &offsets, a->offsets));
  TRY(check_operand(plan->context, &out, cumoe_const(a->out)));
  if (need) TRY(check_operand(plan->context, &workspace, cumoe_const(a->workspace)));
  REQUIRE(!need || a->workspace.cols >= need, CUMOE_ERR_WORKSPACE, "args.workspace has %lld bytes, %lld are needed",
          (long long)a->workspace.cols, (long long)need);
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

/* Both products or neither. */
static cumoe_status run_masked(const struct plan *plan, const struct weights *weights, const cumoe_masked_args *a,
                               cumoe_stream stream)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t rows = a->x.rows, expected = a->expected_rows ? a->expected_rows : a->capacity;
  const route_pointers route = {(int32_t *)(uintptr_t)a->counts.data, (int32_t *)(uintptr_t)a->offsets.data, NULL,
                                NULL};
  const choice_hint hint = {expected * d->local_experts, is_invariant(d)};
  const cumoe_view none = {0};
  mapped_args up = {.gemm.g = up_arguments(plan, weights, a->x, &route, none)};
  up.gemm.g.rows_cap = rows;
  up.gemm.g.c = a->workspace.data;
  up.gemm.g.c_ld = d->inter;
  const cumoe_view h = cumoe_matrix(a->workspace.data, (cumoe_dtype)d->dtype, rows, d->inter, d->inter);
  mapped_args down = {.gemm.g = down_arguments(plan, weights, h, &route, rows)};
  down.gemm.g.rows_cap = rows;
  down.gemm.g.c = a->out.data;
  down.gemm.g.c_ld = a->out.ld;
  launch_step first, second;
  TRY(choose_step(plan->context, OP_up, &up, &hint, &first));
  TRY(choose_step(plan->context, OP_down, &down, &hint, &second));
  TRY(encode_maps(plan->context, &first, &up));
  TRY(encode_maps(plan->context, &second, &down));
  TRY(launch(plan->context, &first, &up, stream));
  return launch(plan->context, &second, &down, stream);
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
  TRY(check_capacity(plan, "args.capacity", a.capacity));
  TRY(check_plan(plan));
  TRY(check_masked(plan, weights, &a));
  if (a.capacity == 0) return CUMOE_OK;
  ON_DEVICE(plan->context, run_masked(plan, weights, &a, stream));
}
