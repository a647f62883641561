/* The doors that all calls share: views, structs, numbers, the description of a layer. What one call alone checks
 * stands beside it. Texts name the argument, its value and what it must be. */
#include "buffer.h"
#include "context.h"
#include "format.h"
#include "plan.h"
#include "status.h"
#include "weights.h"

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

/* COUNTED: its rows say how many tokens there are; MORE: there may be more rows. */
typedef enum rows_rule { EXACT, COUNTED, MORE } rows_rule;

static cumoe_status check_any(struct context *context, const operand *want, cumoe_view v, rows_rule rule)
{
  const bool nothing = absent(&v), counted = rule == COUNTED;
  const char *least = rule == MORE ? ">= " : "";
  TRY(check_owner(context, want->name, &v));
  REQUIRE(!nothing || want->rows == 0 || want->cols, CUMOE_ERR_INVALID_ARGUMENT, "%s is absent", want->name);
  REQUIRE(!nothing || want->rows == 0, CUMOE_ERR_INVALID_ARGUMENT, "%s is absent, must be [%s%lld, %lld]", want->name,
          least, (long long)want->rows, (long long)want->cols);
  REQUIRE(!nothing || !counted || v.dtype, CUMOE_ERR_INVALID_ARGUMENT,
          "%s is absent: without rows, too, it has its cols and dtype", want->name);
  if (!nothing) TRY(check_device(want->name, &v, context->device));
  REQUIRE(v.rows == want->rows || (rule == MORE && v.rows > want->rows), CUMOE_ERR_INVALID_ARGUMENT,
          "%s.rows is %lld, must be %s%lld", want->name, (long long)v.rows, least, (long long)want->rows);
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
  return check_any(context, want, view, EXACT);
}

cumoe_status check_with_more(struct context *context, const operand *want, cumoe_view view)
{
  return check_any(context, want, view, MORE);
}

cumoe_status check_counted(struct context *context, const operand *want, cumoe_view view)
{
  return check_any(context, want, view, COUNTED);
}

cumoe_status check_optional(struct context *context, const operand *want, cumoe_view view)
{
  return absent(&view) ? CUMOE_OK : check_operand(context, want, view);
}

cumoe_status check_device_tokens(struct context *context, const char *name, cumoe_view tokens)
{
  const operand want = {name, 1, 1, DTYPE_BIT(CUMOE_I32), 0};
  return check_optional(context, &want, tokens);
}

cumoe_status check_rows_or_one(struct context *context, const operand *want, cumoe_view view)
{
  const operand one = {want->name, 1, want->cols, want->dtypes, want->align};
  if (absent(&view)) return CUMOE_OK;
  TRY(check_owner(context, want->name, &view));
  REQUIRE(view.rows == 1 || view.rows == want->rows, CUMOE_ERR_INVALID_ARGUMENT, "%s.rows is %lld, must be %lld, or 1",
          want->name, (long long)view.rows, (long long)want->rows);
  return check_operand(context, view.rows == 1 ? &one : want, view);
}

cumoe_status check_workspace_view(struct context *context, const char *name, cumoe_view view, size_t need)
{
  if (need == 0) return CUMOE_OK;
  REQUIRE(!absent(&view), CUMOE_ERR_WORKSPACE, "%s is absent, %zu bytes are needed", name, need);
  const operand want = {name, 1, view.cols, DTYPE_BIT(CUMOE_U8), 256};
  TRY(check_operand(context, &want, view));
  REQUIRE((size_t)view.cols >= need, CUMOE_ERR_WORKSPACE, "%s has %lld bytes, %zu are needed", name,
          (long long)view.cols, need);
  return CUMOE_OK;
}

cumoe_status check_scratch(struct context *context, cumoe_view workspace, size_t need)
{
  const operand want = {"args.workspace", 1, workspace.cols, DTYPE_BIT(CUMOE_U8), 256};
  return need ? check_workspace_view(context, want.name, workspace, need) : check_optional(context, &want, workspace);
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
  if (a->pitch != b->pitch || a->pitch == 0) return true; /* 0: of a view that nobody looked at */
  const uintptr_t from_a =
      a->begin <= b->begin ? (b->begin - a->begin) % a->pitch : a->pitch - 1 - (a->begin - b->begin - 1) % a->pitch;
  return from_a < a->width || from_a + b->width > a->pitch;
}

cumoe_status check_overlaps(const named_view *views, int outputs, int all)
{
  span spans[MAX_NAMED_VIEWS];
  for (int i = 0; i < all; ++i) spans[i] = span_of(&views[i].view);
  for (int i = 0; i < outputs; ++i)
    for (int j = i + 1; j < all && spans[i].begin != spans[i].end; ++j)
      REQUIRE(!spans_overlap(&spans[i], &spans[j]), CUMOE_ERR_INVALID_ARGUMENT, "%s overlaps %s", views[i].name,
              views[j].name);
  return CUMOE_OK;
}

cumoe_status check_disjoint(const char *output, cumoe_view_mut out, const char *input, cumoe_view in)
{
  const named_view views[] = {{output, cumoe_const(out)}, {input, in}};
  return check_overlaps(views, 1, 2);
}

/* Each element is read by the thread that writes it, before it does; rows of softmax and norms likewise. */
cumoe_status check_in_place(const char *output, cumoe_view_mut y, const char *input, cumoe_view x)
{
  if (y.data == x.data && (y.ld == x.ld || x.rows <= 1)) return CUMOE_OK;
  return check_disjoint(output, y, input, x);
}

cumoe_status check_input(struct context *context, const char *name, cumoe_view x)
{
  TRY(check_owner(context, name, &x)); /* its shape means nothing once it is freed */
  const operand want = {name, x.rows, x.cols, FLOAT_BITS, 0};
  return check_counted(context, &want, x);
}

/* Another operand of x's shape and type. */
cumoe_status check_same_shape(struct context *context, const char *name, cumoe_view v, cumoe_view x)
{
  const operand want = {name, x.rows, x.cols, DTYPE_BIT(x.dtype & 31), 0};
  return check_operand(context, &want, v);
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

cumoe_status check_tokens(const char *name, int64_t tokens, int64_t least, int32_t top_k)
{
  REQUIRE(tokens >= least && tokens <= CUMOE_MAX_PAIRS / top_k, CUMOE_ERR_INVALID_ARGUMENT,
          "%s is %lld, must be %lld .. %d (CUMOE_MAX_PAIRS / top_k)", name, (long long)tokens, (long long)least,
          (int)(CUMOE_MAX_PAIRS / top_k));
  return CUMOE_OK;
}

cumoe_status check_layout(const char *name, const struct plan *plan, int64_t tokens, workspace_layout *layout)
{
  REQUIRE(plan_workspace_layout(&plan->desc, tokens, layout), CUMOE_ERR_INVALID_ARGUMENT,
          "%s is %lld: the workspace would exceed 2^62 bytes", name, (long long)tokens);
  return CUMOE_OK;
}

/* ---- routing and layer ---- */

/* experts, top_k: of the choice. */
static cumoe_status check_groups(const cumoe_routing *r, int32_t experts, int32_t top_k)
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
  REQUIRE(top_k <= experts / r->n_group * r->topk_group, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.top_k is %d, must be at most the %d experts of topk_group groups", (int)r->top_k,
          (int)(experts / r->n_group * r->topk_group));
  return CUMOE_OK;
}

/* What goes with which score. */
static cumoe_status check_score(const cumoe_routing *r)
{
  const uint32_t own = CUMOE_ROUTE_SCORE_AFTER_TOPK | CUMOE_ROUTE_CHOOSE_BY_LOGIT;
  const bool after = r->flags & CUMOE_ROUTE_SCORE_AFTER_TOPK, mixes = r->score == CUMOE_SCORE_SPARSEMIXER;
  REQUIRE(r->score >= CUMOE_SCORE_SOFTMAX && r->score <= CUMOE_SCORE_SPARSEMIXER, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.score is %d, not a cumoe_score", (int)r->score);
  REQUIRE(!after || r->score == CUMOE_SCORE_SOFTMAX, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.flags has SCORE_AFTER_TOPK, which is for SCORE_SOFTMAX only");
  REQUIRE(!(r->flags & CUMOE_ROUTE_CHOOSE_BY_LOGIT && r->score == CUMOE_SCORE_SOFTMAX), CUMOE_ERR_NOT_SUPPORTED,
          "routing.flags has CHOOSE_BY_LOGIT, which SCORE_SOFTMAX has as SCORE_AFTER_TOPK only");
  REQUIRE(!mixes || (r->n_group == 0 && !(r->flags & own)), CUMOE_ERR_INVALID_ARGUMENT,
          "routing.score is SPARSEMIXER, which has neither groups nor SCORE_AFTER_TOPK or CHOOSE_BY_LOGIT");
  REQUIRE(r->always_experts == 0 || (!mixes && (after || r->score != CUMOE_SCORE_SOFTMAX)), CUMOE_ERR_NOT_SUPPORTED,
          "routing.always_experts is %d, must be 0 with SPARSEMIXER and with a softmax over all",
          (int)r->always_experts);
  return CUMOE_OK;
}

cumoe_status check_routing(const cumoe_routing *r, int32_t experts)
{
  const uint32_t known = CUMOE_ROUTE_RENORMALIZE | CUMOE_ROUTE_SCORE_AFTER_TOPK | CUMOE_ROUTE_WEIGHT_ON_INPUT |
                         CUMOE_ROUTE_CHOOSE_BY_LOGIT;
  TRY(check_reserve("routing", r->reserved));
  REQUIRE(r->top_k >= 1 && r->top_k <= CUMOE_MAX_TOP_K && r->top_k <= experts, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.top_k is %d, must be 1 .. %d and at most the %d experts", (int)r->top_k, CUMOE_MAX_TOP_K,
          (int)experts);
  REQUIRE(!(r->flags & ~known), CUMOE_ERR_INVALID_ARGUMENT, "routing.flags is 0x%x, known are 0x%x", r->flags, known);
  REQUIRE(r->always_experts >= 0 && r->always_experts < r->top_k, CUMOE_ERR_INVALID_ARGUMENT,
          "routing.always_experts is %d, must be 0 .. top_k - 1 = %d", (int)r->always_experts, (int)r->top_k - 1);
  REQUIRE(r->always_experts == 0 || (r->zero_experts == 0 && r->identity_experts == 0), CUMOE_ERR_NOT_SUPPORTED,
          "routing.always_experts is %d, must be 0 with zero or identity experts", (int)r->always_experts);
  if (r->logits_dtype) TRY(check_dense("routing.logits_dtype", r->logits_dtype, CUMOE_ERR_INVALID_ARGUMENT));
  TRY(check_not_negative("routing.routed_scale", r->routed_scale));
  TRY(check_not_negative("routing.softcap", r->softcap));
  TRY(check_not_negative("routing.renorm_eps", r->renorm_eps));
  TRY(check_not_negative("routing.renorm_min", r->renorm_min));
  TRY(check_not_negative("routing.logit_scale", r->logit_scale));
  TRY(check_not_negative("routing.mixer_eps", r->mixer_eps));
  TRY(check_score(r));
  return check_groups(r, experts - r->always_experts, r->top_k - r->always_experts);
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
          CUMOE_ERR_INVALID_ARGUMENT,
          "desc.routing: zero_experts is %d, identity_experts %d: must not be negative, with num_experts at most %d",
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
  const uint32_t known = CUMOE_MOE_UNGATED | CUMOE_MOE_UNREDUCED | CUMOE_MOE_LIMIT_AFTER | CUMOE_MOE_BATCH_INVARIANT;
  REQUIRE(!(d->flags & ~known), CUMOE_ERR_INVALID_ARGUMENT, "desc.flags is 0x%x, known are 0x%x", d->flags, known);
  REQUIRE(!(d->act == CUMOE_ACT_SWIGLU_OAI && d->flags & CUMOE_MOE_LIMIT_AFTER), CUMOE_ERR_NOT_SUPPORTED,
          "desc.act SWIGLU_OAI is limited before, desc.flags says LIMIT_AFTER");
  REQUIRE(!(d->act == CUMOE_ACT_SWIGLU_OAI && d->flags & CUMOE_MOE_UNGATED), CUMOE_ERR_INVALID_ARGUMENT,
          "desc.act SWIGLU_OAI is gated, desc.flags says UNGATED");
  TRY(check_not_negative("desc.act_limit", d->act_limit));
  TRY(check_finite("desc.act_alpha", d->act_alpha));
  REQUIRE(!(d->act_limit > 0 && d->flags & CUMOE_MOE_UNGATED), CUMOE_ERR_NOT_SUPPORTED,
          "desc.act_limit is %g, must be 0 for an ungated layer", (double)d->act_limit);
  return CUMOE_OK;
}

static cumoe_status check_formats(const cumoe_moe_desc *d)
{
  const bool shared = d->shared_inter != 0;
  const cumoe_format *f[] = {&d->up_format, &d->down_format, &d->shared_up_format, &d->shared_down_format};
  TRY(check_format("desc.up_format", f[0], d->hidden, d->dtype, FORMAT_IN_PLACE));
  TRY(check_format("desc.down_format", f[1], d->inter, d->dtype, FORMAT_IN_PLACE));
  REQUIRE(shared || (is_dense(f[2]) && is_dense(f[3])), CUMOE_ERR_INVALID_ARGUMENT,
          "desc.shared_up_format and desc.shared_down_format must be 0: there is no shared expert");
  TRY(check_format("desc.shared_up_format", f[2], d->hidden, d->dtype, FORMAT_IN_PLACE));
  return check_format("desc.shared_down_format", f[3], d->shared_inter, d->dtype, FORMAT_IN_PLACE);
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
  TRY(check_formats(d));
  TRY(check_routing(&d->routing, router_experts(d)));
  REQUIRE(!(d->flags & CUMOE_MOE_UNREDUCED && d->shared_inter), CUMOE_ERR_NOT_SUPPORTED,
          "desc.shared_inter is %d, must be 0 with UNREDUCED: a shared expert has no slot", (int)d->shared_inter);
  REQUIRE(!(d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT && d->routing.identity_experts), CUMOE_ERR_NOT_SUPPORTED,
          "routing.identity_experts is %d, must be 0 with WEIGHT_ON_INPUT", (int)d->routing.identity_experts);
  return CUMOE_OK;
}

/* Accumulating in place is the one overlap that is meant. */
cumoe_view unless_in_place(cumoe_view residual, cumoe_view_mut out)
{
  const cumoe_view nothing = {0};
  const bool same_ld = residual.ld == out.ld || out.rows <= 1;
  return residual.data == out.data && same_ld && residual.rows == out.rows ? nothing : residual;
}

cumoe_status check_timeout(const char *name, int64_t *timeout_ns)
{
  REQUIRE(*timeout_ns >= 0, CUMOE_ERR_INVALID_ARGUMENT, "%s is %lld, must be 0 (30 s) or more", name,
          (long long)*timeout_ns);
  if (*timeout_ns == 0) *timeout_ns = INT64_C(30000000000);
  return CUMOE_OK;
}
