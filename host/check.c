/* Checks of every host-visible argument. Texts name the argument, its value and what it must be. */
#include "weights.h"
#include "plan.h"

#include <stdio.h>
#include <string.h>

/* ---- views ---- */

bool absent(const cumoe_view *v)
{
  return !v->data && !v->owner && v->rows == 0 && v->cols == 0;
}

static void list_dtypes(uint32_t mask, char *text, size_t bytes)
{
  text[0] = 0;
  for (int d = 1; d < 32; ++d)
    if (mask & 1u << d) {
      size_t used = strlen(text);
      snprintf(text + used, bytes - used, "%s%s", used ? " or " : "", cumoe_dtype_name((cumoe_dtype)d));
    }
}

cumoe_status check_dense(const char *name, int32_t dtype, cumoe_status otherwise)
{
  char names[96];
  if (dense_format(dtype) != FORMAT_none) return CUMOE_OK;
  list_dtypes(FLOAT_BITS, names, sizeof names);
  return fail(otherwise, "%s is %s, must be %s", name, say_dtype(dtype).text, names);
}

cumoe_status check_extent(const char *name, const cumoe_view *v, uint32_t align)
{
  const int64_t limit = (int64_t)1 << 46; /* bytes: the end of every device address space */
  REQUIRE(v->rows >= 0 && v->cols >= 0, CUMOE_ERR_INVALID_ARGUMENT, "%s is [%lld, %lld], must not be negative", name,
          (long long)v->rows, (long long)v->cols);
  REQUIRE(v->ld >= v->cols, CUMOE_ERR_INVALID_ARGUMENT, "%s.ld is %lld, must be at least cols = %lld", name,
          (long long)v->ld, (long long)v->cols);
  if (v->rows == 0 || v->cols == 0) return CUMOE_OK;
  REQUIRE(v->data, CUMOE_ERR_INVALID_ARGUMENT, "%s.data is null", name);
  const int64_t element = (int64_t)cumoe_dtype_bytes((cumoe_dtype)v->dtype);
  int64_t elements, bytes;
  REQUIRE(!__builtin_mul_overflow(v->rows, v->ld, &elements) && !__builtin_mul_overflow(elements, element, &bytes) &&
              bytes <= limit,
          CUMOE_ERR_INVALID_ARGUMENT, "%s [%lld, %lld] with ld %lld is larger than an address space", name,
          (long long)v->rows, (long long)v->cols, (long long)v->ld);
  REQUIRE((uintptr_t)v->data % align == 0, CUMOE_ERR_MISALIGNED, "%s.data is %p, must be aligned to %u bytes", name,
          v->data, align);
  REQUIRE(v->rows == 1 || v->ld * element % align == 0, CUMOE_ERR_MISALIGNED,
          "%s.ld is %lld elements, must be a multiple of %u bytes", name, (long long)v->ld, align);
  return CUMOE_OK;
}

/* A view that was filled in by hand names GPU 0 unless something else is said. */
cumoe_status check_device(const char *name, const cumoe_view *v, int32_t device)
{
  const char *hint = v->device == 0 && v->owner == 0 ? " (0 where nothing is said: CUMOE_DEVICE_ANY, -3, is any)" : "";
  REQUIRE(v->device == CUMOE_DEVICE_ANY || v->device == device, CUMOE_ERR_WRONG_DEVICE,
          "%s is on device %d, the context is on %d%s", name, (int)v->device, (int)device, hint);
  return CUMOE_OK;
}

static cumoe_status check_any(struct context *context, const operand *want, cumoe_view v, bool counted)
{
  const bool nothing = absent(&v);
  TRY(check_owner(context, want->name, &v));
  REQUIRE(!nothing || want->rows == 0, CUMOE_ERR_INVALID_ARGUMENT, "%s is absent, must be [%lld, %lld]", want->name,
          (long long)want->rows, (long long)want->cols);
  REQUIRE(!nothing || !counted || v.dtype, CUMOE_ERR_INVALID_ARGUMENT,
          "%s is absent: without rows, too, it has its cols and dtype", want->name);
  if (!nothing) TRY(check_device(want->name, &v, context->device));
  REQUIRE(v.rows == want->rows, CUMOE_ERR_INVALID_ARGUMENT, "%s.rows is %lld, must be %lld", want->name,
          (long long)v.rows, (long long)want->rows);
  if (v.rows == 0 && !v.data && !counted) return CUMOE_OK; /* nothing there, nothing needed */
  REQUIRE(v.cols == want->cols, CUMOE_ERR_INVALID_ARGUMENT, "%s.cols is %lld, must be %lld", want->name,
          (long long)v.cols, (long long)want->cols);
  if (v.dtype < 1 || v.dtype > 31 || !(want->dtypes & DTYPE_BIT(v.dtype))) {
    char names[64];
    list_dtypes(want->dtypes, names, sizeof names);
    return fail(CUMOE_ERR_WRONG_DTYPE, "%s.dtype is %s, must be %s", want->name, say_dtype(v.dtype).text, names);
  }
  const uint32_t element = (uint32_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  return check_extent(want->name, &v, want->align > element ? want->align : element);
}

cumoe_status check_operand(struct context *context, const operand *want, cumoe_view view)
{
  return check_any(context, want, view, false);
}

cumoe_status check_counted(struct context *context, const operand *want, cumoe_view view)
{
  return check_any(context, want, view, true);
}

cumoe_status check_optional(struct context *context, const operand *want, cumoe_view view)
{
  return absent(&view) ? CUMOE_OK : check_operand(context, want, view);
}

cumoe_status check_absent(const char *name, cumoe_view view, const char *why)
{
  REQUIRE(absent(&view), CUMOE_ERR_INVALID_ARGUMENT, "%s must be absent: %s", name, why);
  return CUMOE_OK;
}

span span_of(const cumoe_view *v)
{
  const uintptr_t element = cumoe_dtype_bytes((cumoe_dtype)v->dtype), begin = (uintptr_t)v->data;
  if (!v->data || v->rows == 0 || v->cols == 0) return (span){begin, begin, 0, 0};
  return (span){begin, begin + (uintptr_t)((v->rows - 1) * v->ld + v->cols) * element, (uintptr_t)v->cols * element,
                (uintptr_t)v->ld * element};
}

/* Column ranges of one matrix interleave without touching each other: an engine may keep x and out side by side. */
bool spans_overlap(const span *a, const span *b)
{
  if (a->begin == a->end || b->begin == b->end || a->end <= b->begin || b->end <= a->begin) return false;
  if (a->pitch != b->pitch) return true;
  const uintptr_t from_a =
      a->begin < b->begin ? (b->begin - a->begin) % a->pitch : a->pitch - 1 - (a->begin - b->begin - 1) % a->pitch;
  return from_a < a->width || from_a + b->width > a->pitch;
}

cumoe_status check_overlaps(const named_view *views, int outputs, int all)
{
  span spans[MAX_NAMED_VIEWS];
  for (int i = 0; i < all; ++i) spans[i] = span_of(&views[i].view);
  for (int i = 0; i < outputs; ++i)
    for (int j = i + 1; j < all; ++j)
      REQUIRE(!spans_overlap(&spans[i], &spans[j]), CUMOE_ERR_INVALID_ARGUMENT, "%s overlaps %s", views[i].name,
              views[j].name);
  return CUMOE_OK;
}

cumoe_status check_disjoint(const char *output, cumoe_view_mut out, const char *input, cumoe_view in)
{
  const named_view views[] = {{output, cumoe_const(out)}, {input, in}};
  return check_overlaps(views, 1, 2);
}

static uint32_t size_of(const void *given)
{
  uint32_t size;
  memcpy(&size, given, sizeof size);
  return size;
}

cumoe_status check_size(const char *name, const void *given, size_t size, size_t align)
{
  REQUIRE(given, CUMOE_ERR_INVALID_ARGUMENT, "%s is null", name);
  const uint32_t bytes = size_of(given);
  REQUIRE(bytes >= 8 && bytes <= 4096 && bytes % align == 0, CUMOE_ERR_INVALID_ARGUMENT,
          "%s.size is %u, must be sizeof the struct (%zu)", name, bytes, size);
  return CUMOE_OK;
}

cumoe_status take_bytes(const char *name, const void *from, void *to, size_t size, size_t align)
{
  TRY(check_size(name, from, size, align));
  const uint32_t given = size_of(from);
  for (size_t i = size; i < given; ++i)
    REQUIRE(((const unsigned char *)from)[i] == 0, CUMOE_ERR_NOT_SUPPORTED,
            "%s has fields that this version of the library does not know", name);
  memset(to, 0, size);
  memcpy(to, from, given < size ? given : size);
  return CUMOE_OK;
}

void give_bytes(const void *from, void *to, size_t size)
{
  const uint32_t given = size_of(to);
  memset(to, 0, given);
  memcpy(to, from, given < size ? given : size);
  memcpy(to, &given, sizeof given);
}

cumoe_status check_words(const char *name, const uint64_t *words, size_t count)
{
  for (size_t i = 0; i < count; ++i)
    REQUIRE(words[i] == 0, CUMOE_ERR_NOT_SUPPORTED,
            "%s.reserved[%zu] is 0x%llx, must be 0: this version of the library knows no field there", name, i,
            (unsigned long long)words[i]);
  return CUMOE_OK;
}

/* ---- numbers ---- */

cumoe_status check_finite(const char *name, float value)
{
  REQUIRE(value - value == 0, CUMOE_ERR_INVALID_ARGUMENT, "%s is %g, must be finite", name, (double)value);
  return CUMOE_OK;
}

cumoe_status check_not_negative(const char *name, float value)
{
  REQUIRE(value >= 0 && value - value == 0, CUMOE_ERR_INVALID_ARGUMENT, "%s is %g, must be finite and not negative",
          name, (double)value);
  return CUMOE_OK;
}

/* ---- routing and layer ---- */

static cumoe_status check_groups(const cumoe_routing *r, int32_t experts)
{
  if (r->n_group == 0) {
    REQUIRE(r->topk_group == 0, CUMOE_ERR_INVALID_ARGUMENT, "routing.topk_group is %d, must be 0 without groups",
            (int)r->topk_group);
    return CUMOE_OK;
  }
  REQUIRE(r->n_group >= 1 && r->n_group <= 64 && experts % r->n_group == 0, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.n_group is %d, must be 1 .. 64 and divide the %d experts", (int)r->n_group, (int)experts);
  REQUIRE(r->topk_group >= 1 && r->topk_group <= r->n_group, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.topk_group is %d, must be 1 .. n_group = %d", (int)r->topk_group, (int)r->n_group);
  REQUIRE(r->group_score == CUMOE_GROUP_BEST || r->group_score == CUMOE_GROUP_BEST_TWO, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.group_score is %d, not a cumoe_group_score", (int)r->group_score);
  REQUIRE(r->top_k <= experts / r->n_group * r->topk_group, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.top_k is %d, must be at most the %d experts of topk_group groups", (int)r->top_k,
          (int)(experts / r->n_group * r->topk_group));
  return CUMOE_OK;
}

cumoe_status check_routing(const cumoe_routing *r, int32_t experts)
{
  const uint32_t known = CUMOE_ROUTE_RENORMALIZE | CUMOE_ROUTE_SCORE_AFTER_TOPK | CUMOE_ROUTE_WEIGHT_ON_INPUT;
  TRY(check_reserve("routing", r->reserved));
  REQUIRE(r->score >= CUMOE_SCORE_SOFTMAX && r->score <= CUMOE_SCORE_IDENTITY, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.score is %d, not a cumoe_score", (int)r->score);
  REQUIRE(r->top_k >= 1 && r->top_k <= CUMOE_MAX_TOP_K && r->top_k <= experts, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.top_k is %d, must be 1 .. %d and at most the %d experts", (int)r->top_k, CUMOE_MAX_TOP_K,
          (int)experts);
  REQUIRE(!(r->flags & ~known), CUMOE_ERR_INVALID_ARGUMENT, "routing.flags is 0x%x, known are 0x%x", r->flags, known);
  TRY(check_not_negative("routing.routed_scale", r->routed_scale));
  TRY(check_not_negative("routing.softcap", r->softcap));
  TRY(check_not_negative("routing.renorm_eps", r->renorm_eps));
  TRY(check_not_negative("routing.renorm_min", r->renorm_min));
  REQUIRE(!(r->flags & CUMOE_ROUTE_SCORE_AFTER_TOPK) || r->score == CUMOE_SCORE_SOFTMAX, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.flags has SCORE_AFTER_TOPK, which is for SCORE_SOFTMAX only");
  return check_groups(r, experts);
}

static cumoe_status check_shape(const cumoe_moe_desc *d)
{
  const int32_t limit = 1 << 24;
  REQUIRE(d->num_experts >= 1 && d->num_experts <= CUMOE_MAX_EXPERTS, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.num_experts is %d, must be 1 .. %d", (int)d->num_experts, CUMOE_MAX_EXPERTS);
  REQUIRE(d->local_experts >= 1 && d->local_experts <= d->num_experts, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.local_experts is %d, must be 0 (all) .. num_experts = %d", (int)d->local_experts, (int)d->num_experts);
  REQUIRE(d->hidden >= 8 && d->hidden % 8 == 0 && d->hidden <= limit, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.hidden is %d, must be a multiple of 8, 8 .. %d", (int)d->hidden, (int)limit);
  REQUIRE(d->inter >= 8 && d->inter % 8 == 0 && d->inter <= limit, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.inter is %d, must be a multiple of 8, 8 .. %d", (int)d->inter, (int)limit);
  REQUIRE(d->shared_inter >= 0 && d->shared_inter % 8 == 0 && d->shared_inter <= limit, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.shared_inter is %d, must be a multiple of 8, 0 .. %d", (int)d->shared_inter, (int)limit);
  REQUIRE(d->routing.zero_experts >= 0 && d->routing.zero_experts <= CUMOE_MAX_EXPERTS &&
              d->routing.identity_experts >= 0 && d->routing.identity_experts <= CUMOE_MAX_EXPERTS &&
              router_experts(d) <= CUMOE_MAX_EXPERTS,
          CUMOE_ERR_INVALID_ARGUMENT, "desc: num_experts + zero_experts %d + identity_experts %d, must be at most %d",
          (int)d->routing.zero_experts, (int)d->routing.identity_experts, CUMOE_MAX_EXPERTS);
  return CUMOE_OK;
}

static cumoe_status check_types(const cumoe_moe_desc *d)
{
  TRY(check_dense("desc.dtype", d->dtype, CUMOE_ERR_NOT_SUPPORTED));
  REQUIRE(d->out_dtype == d->dtype || d->out_dtype == CUMOE_F32, CUMOE_ERR_NOT_SUPPORTED,
          "desc.out_dtype is %s, must be %s (or 0: dtype)%s", say_dtype(d->out_dtype).text, say_dtype(d->dtype).text,
          d->dtype == CUMOE_F32 ? "" : " or f32");
  REQUIRE(d->act >= CUMOE_ACT_SILU && d->act <= CUMOE_ACT_SWIGLU_OAI, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.act is %d, not a cumoe_act", (int)d->act);
  REQUIRE(!(d->flags & ~(uint32_t)(CUMOE_MOE_UNGATED | CUMOE_MOE_UNREDUCED)), CUMOE_ERR_INVALID_ARGUMENT,
          "desc.flags is 0x%x, known are UNGATED and UNREDUCED", d->flags);
  REQUIRE(!(d->act == CUMOE_ACT_SWIGLU_OAI && d->flags & CUMOE_MOE_UNGATED), CUMOE_ERR_INVALID_ARGUMENT,
          "desc.act SWIGLU_OAI is gated, desc.flags says UNGATED");
  TRY(check_not_negative("desc.act_limit", d->act_limit));
  TRY(check_finite("desc.act_alpha", d->act_alpha));
  REQUIRE(!(d->act_limit > 0 && d->flags & CUMOE_MOE_UNGATED), CUMOE_ERR_NOT_SUPPORTED,
          "desc.act_limit is %g, must be 0 for an ungated layer", (double)d->act_limit);
  return CUMOE_OK;
}

cumoe_status check_moe_desc(const cumoe_moe_desc *from, cumoe_moe_desc *d)
{
  TRY(take_struct("desc", from, d));
  if (d->local_experts == 0) d->local_experts = d->num_experts;
  if (d->out_dtype == 0) d->out_dtype = d->dtype;
  if (d->act == CUMOE_ACT_SWIGLU_OAI && d->act_alpha == 0) d->act_alpha = 1.702f;
  if (d->routing.routed_scale == 0) d->routing.routed_scale = 1;
  TRY(check_shape(d));
  TRY(check_types(d));
  TRY(check_routing(&d->routing, router_experts(d)));
  REQUIRE(!(d->flags & CUMOE_MOE_UNREDUCED && d->shared_inter), CUMOE_ERR_NOT_SUPPORTED,
          "desc.shared_inter is %d, must be 0 with UNREDUCED: a shared expert has no slot", (int)d->shared_inter);
  REQUIRE(!(d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT && d->routing.identity_experts), CUMOE_ERR_NOT_SUPPORTED,
          "routing.identity_experts is %d, must be 0 with WEIGHT_ON_INPUT", (int)d->routing.identity_experts);
  return CUMOE_OK;
}

/* ---- route ---- */

cumoe_status take_route(const cumoe_route **route, cumoe_route *copy)
{
  TRY(take_struct("route", *route, copy));
  *route = copy;
  return CUMOE_OK;
}

cumoe_status check_route(const struct plan *plan, const cumoe_route *route, int64_t tokens)
{
  const cumoe_moe_desc *d = &plan->desc;
  const uint32_t i32 = DTYPE_BIT(CUMOE_I32);
  REQUIRE(route->reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "route.reserved is %d, must be 0", (int)route->reserved);
  const operand counts = {"route.counts", 1, d->local_experts, i32, 4},
                offsets = {"route.offsets", 1, (int64_t)d->local_experts + 1, i32, 4};
  const operand row_pair = {"route.row_pair", 1, tokens * d->routing.top_k, i32, 4};
  const operand slot_row = {"route.slot_row", tokens, d->routing.top_k, i32, 4};
  TRY(check_operand(plan->context, &counts, cumoe_const(route->counts)));
  TRY(check_operand(plan->context, &offsets, cumoe_const(route->offsets)));
  TRY(check_operand(plan->context, &row_pair, cumoe_const(route->row_pair)));
  TRY(check_operand(plan->context, &slot_row, cumoe_const(route->slot_row)));
  REQUIRE(tokens <= 1 || route->slot_row.ld == route->slot_row.cols, CUMOE_ERR_LAYOUT,
          "route.slot_row.ld is %lld, must be top_k = %lld", (long long)route->slot_row.ld,
          (long long)route->slot_row.cols);
  return CUMOE_OK;
}

/* ---- forward ---- */

static cumoe_status check_routing_inputs(const struct plan *plan, const cumoe_moe_args *a)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t tokens = a->x.rows, experts = router_experts(d), k = d->routing.top_k;
  const uint32_t own = DTYPE_BIT(d->dtype), f32 = DTYPE_BIT(CUMOE_F32), i32 = DTYPE_BIT(CUMOE_I32);
  const operand router_weight = {"args.router_weight", experts, d->hidden, own | f32, 16},
                router_bias = {"args.router_bias", 1, experts, own | f32, 0};
  const operand logits = {"args.logits", tokens, experts, FLOAT_BITS, 0}, ids = {"args.ids", tokens, k, INDEX_BITS, 0};
  const operand weights = {"args.weights", tokens, k, f32, 0}, select_bias = {"args.select_bias", 1, experts, f32, 0};
  const operand expert_map = {"args.expert_map", 1, d->num_experts, i32, 0};
  const bool from_x = !absent(&a->router_weight), from_ids = !absent(&a->ids) || !absent(&a->weights);
  const bool from_logits = !absent(&a->logits) || (!from_x && !from_ids && tokens == 0);
  REQUIRE(from_x + from_logits + from_ids == 1, CUMOE_ERR_INVALID_ARGUMENT,
          "exactly one of args.router_weight, args.logits and args.ids + args.weights must be given");
  if (from_x) TRY(check_operand(plan->context, &router_weight, a->router_weight));
  if (from_x) TRY(check_optional(plan->context, &router_bias, a->router_bias));
  if (!from_x) TRY(check_absent("args.router_bias", a->router_bias, "there is no router_weight"));
  if (from_logits) TRY(check_optional(plan->context, &logits, a->logits));
  if (from_ids) {
    TRY(check_operand(plan->context, &ids, a->ids));
    TRY(check_operand(plan->context, &weights, a->weights));
    TRY(check_absent("args.select_bias", a->select_bias, "the caller has routed"));
    TRY(check_absent("args.ids_out", cumoe_const(a->ids_out), "the caller has routed"));
    TRY(check_absent("args.weights_out", cumoe_const(a->weights_out), "the caller has routed"));
  }
  TRY(check_optional(plan->context, &select_bias, a->select_bias));
  REQUIRE(d->local_experts == d->num_experts || !absent(&a->expert_map), CUMOE_ERR_INVALID_ARGUMENT,
          "args.expert_map is absent, but only %d of %d experts are local", (int)d->local_experts, (int)d->num_experts);
  return check_optional(plan->context, &expert_map, a->expert_map);
}

static cumoe_status check_shared(const struct plan *plan, const cumoe_moe_args *a, const struct weights **shared)
{
  const cumoe_moe_desc *d = &plan->desc;
  if (d->shared_inter == 0) {
    REQUIRE(!a->shared, CUMOE_ERR_INVALID_ARGUMENT, "args.shared is given, desc.shared_inter is 0");
    return check_absent("args.shared_gate", a->shared_gate, "there is no shared expert");
  }
  const operand gate = {"args.shared_gate", 1, d->hidden, DTYPE_BIT(d->dtype) | DTYPE_BIT(CUMOE_F32), 16};
  TRY(find_weights("args.shared", a->shared, plan, 1, d->shared_inter, shared));
  return check_optional(plan->context, &gate, a->shared_gate);
}

static cumoe_status check_outputs(const struct plan *plan, const cumoe_moe_args *a)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t tokens = a->x.rows, k = d->routing.top_k;
  const bool unreduced = d->flags & CUMOE_MOE_UNREDUCED;
  const uint32_t out_type = DTYPE_BIT(d->out_dtype);
  const operand out = {"args.out", unreduced ? tokens * k : tokens, d->hidden, out_type, 16},
                residual = {"args.residual", tokens, d->hidden, out_type, 16};
  const operand ids_out = {"args.ids_out", tokens, k, INDEX_BITS, 0},
                weights_out = {"args.weights_out", tokens, k, DTYPE_BIT(CUMOE_F32), 0};
  const operand counts_out = {"args.counts_out", 1, d->local_experts, DTYPE_BIT(CUMOE_I32), 0},
                load = {"args.load", 1, d->local_experts, DTYPE_BIT(CUMOE_I64), 0};
  TRY(check_operand(plan->context, &out, cumoe_const(a->out)));
  TRY(check_optional(plan->context, &residual, a->residual));
  if (unreduced) TRY(check_absent("args.residual", a->residual, "the plan is UNREDUCED"));
  TRY(check_optional(plan->context, &ids_out, cumoe_const(a->ids_out)));
  TRY(check_optional(plan->context, &weights_out, cumoe_const(a->weights_out)));
  TRY(check_optional(plan->context, &counts_out, cumoe_const(a->counts_out)));
  TRY(check_optional(plan->context, &load, cumoe_const(a->load)));
  return CUMOE_OK;
}

/* Accumulating in place is the one overlap that is meant. */
static cumoe_view unless_in_place(cumoe_view residual, cumoe_view_mut out)
{
  const cumoe_view nothing = {0};
  return residual.data == out.data && residual.ld == out.ld ? nothing : residual;
}

static cumoe_status check_forward_overlaps(const cumoe_moe_args *a, const layer *with)
{
  const named_view views[] = {{"args.out", cumoe_const(a->out)},
                              {"args.ids_out", cumoe_const(a->ids_out)},
                              {"args.weights_out", cumoe_const(a->weights_out)},
                              {"args.counts_out", cumoe_const(a->counts_out)},
                              {"args.load", cumoe_const(a->load)},
                              {"args.workspace", cumoe_const(a->workspace)},
                              {"args.x", a->x},
                              {"args.device_tokens", a->device_tokens},
                              {"args.router_weight", a->router_weight},
                              {"args.router_bias", a->router_bias},
                              {"args.logits", a->logits},
                              {"args.ids", a->ids},
                              {"args.weights", a->weights},
                              {"args.select_bias", a->select_bias},
                              {"args.expert_map", a->expert_map},
                              {"args.shared_gate", a->shared_gate},
                              {"args.residual", unless_in_place(a->residual, a->out)}};
  const int outputs = 6;
  TRY(check_off_weights(views, outputs, "weights", with->weights));
  if (with->shared) TRY(check_off_weights(views, outputs, "args.shared", with->shared));
  return check_overlaps(views, outputs, sizeof views / sizeof *views);
}

static cumoe_status check_workspace(const struct plan *plan, const cumoe_moe_args *a)
{
  workspace_layout layout;
  REQUIRE(plan_workspace_layout(&plan->desc, a->x.rows, &layout), CUMOE_ERR_INVALID_ARGUMENT,
          "args.x.rows is %lld: the workspace would exceed 2^62 bytes", (long long)a->x.rows);
  const size_t need = layout.bytes;
  if (need == 0) return CUMOE_OK;
  const cumoe_view w = cumoe_const(a->workspace);
  REQUIRE(!absent(&w), CUMOE_ERR_WORKSPACE, "args.workspace is absent, %zu bytes are needed", need);
  const operand workspace = {"args.workspace", 1, w.cols, DTYPE_BIT(CUMOE_U8), 256};
  TRY(check_operand(plan->context, &workspace, w));
  REQUIRE((size_t)w.cols >= need, CUMOE_ERR_WORKSPACE, "args.workspace has %lld bytes, %zu are needed",
          (long long)w.cols, need);
  return CUMOE_OK;
}

cumoe_status check_forward(cumoe_plan plan_handle, cumoe_weights weights, const cumoe_moe_args *a, layer *with)
{
  *with = (layer){0};
  TRY(find_plan(plan_handle, &with->plan));
  const struct plan *plan = with->plan;
  const cumoe_moe_desc *d = &plan->desc;
  TRY(find_weights("weights", weights, plan, d->local_experts, d->inter, &with->weights));
  REQUIRE(a->flags == 0 && a->reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.flags and args.reserved must be 0");
  REQUIRE(a->x.rows >= 0 && a->x.rows <= INT32_MAX / d->routing.top_k, CUMOE_ERR_INVALID_ARGUMENT,
          "args.x.rows is %lld, must be 0 .. %d (2^31 / top_k)", (long long)a->x.rows,
          (int)(INT32_MAX / d->routing.top_k));
  const operand x = {"args.x", a->x.rows, d->hidden, DTYPE_BIT(d->dtype), 16},
                device_tokens = {"args.device_tokens", 1, 1, DTYPE_BIT(CUMOE_I32), 0};
  TRY(check_finite("args.out_scale", a->out_scale));
  TRY(check_counted(plan->context, &x, a->x));
  TRY(check_optional(plan->context, &device_tokens, a->device_tokens));
  TRY(check_routing_inputs(plan, a));
  TRY(check_shared(plan, a, &with->shared));
  TRY(check_outputs(plan, a));
  TRY(check_workspace(plan, a));
  return check_forward_overlaps(a, with);
}

cumoe_status check_combine(const struct plan *plan, const cumoe_route *route, const cumoe_combine_args *a,
                           int64_t tokens)
{
  TRY(check_route(plan, route, tokens));
  const cumoe_moe_desc *d = &plan->desc;
  const bool unreduced = d->flags & CUMOE_MOE_UNREDUCED, on_input = d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
  const uint32_t own = DTYPE_BIT(d->dtype), f32 = DTYPE_BIT(CUMOE_F32), out_type = DTYPE_BIT(d->out_dtype);
  const operand y = {"args.y", a->y.rows, d->hidden, own, 16}, x = {"args.x", tokens, d->hidden, own, 16};
  const operand pair_weights = {"args.pair_weights", tokens, d->routing.top_k, f32, 0};
  const operand shared = {"args.shared", tokens, d->hidden, own, 16},
                shared_logit = {"args.shared_logit", tokens, 1, f32, 0};
  const operand residual = {"args.residual", tokens, d->hidden, out_type, 16},
                device_tokens = {"args.device_tokens", 1, 1, DTYPE_BIT(CUMOE_I32), 0};
  TRY(check_finite("args.out_scale", a->out_scale));
  TRY(check_operand(plan->context, &y, a->y));
  if (on_input)
    TRY(check_optional(plan->context, &pair_weights, a->pair_weights));
  else if (unreduced)
    TRY(check_absent("args.pair_weights", a->pair_weights, "the plan is UNREDUCED"));
  else
    TRY(check_operand(plan->context, &pair_weights, a->pair_weights));
  if (d->routing.identity_experts)
    TRY(check_operand(plan->context, &x, a->x));
  else
    TRY(check_optional(plan->context, &x, a->x));
  TRY(check_optional(plan->context, &shared, a->shared));
  TRY(check_optional(plan->context, &shared_logit, a->shared_logit));
  TRY(check_optional(plan->context, &residual, a->residual));
  TRY(check_optional(plan->context, &device_tokens, a->device_tokens));
  if (unreduced) TRY(check_absent("args.shared", a->shared, "the plan is UNREDUCED"));
  if (unreduced) TRY(check_absent("args.residual", a->residual, "the plan is UNREDUCED"));
  const named_view views[] = {{"args.out", cumoe_const(a->out)},
                              {"args.y", a->y},
                              {"args.x", a->x},
                              {"args.pair_weights", a->pair_weights},
                              {"args.residual", unless_in_place(a->residual, a->out)},
                              {"args.shared", a->shared},
                              {"args.shared_logit", a->shared_logit},
                              {"args.device_tokens", a->device_tokens},
                              ROUTE_VIEWS(route)};
  return check_overlaps(views, 1, sizeof views / sizeof *views);
}
