/* Where the backward has everything: what the forward keeps, and what a call of its own needs besides. */
#include "backward.h"
#include "carve.h"

static cumoe_status check_carved(const char *name, const carver *c, int64_t tokens)
{
  REQUIRE(!c->overflow, CUMOE_ERR_INVALID_ARGUMENT, "%s is %lld: the workspace would exceed 2^62 bytes", name,
          (long long)tokens);
  return CUMOE_OK;
}

cumoe_status lay_out_kept(const char *name, const struct plan *plan, int64_t tokens, kept_layout *at)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t k = d->routing.top_k, pairs = tokens * k, halves = halves_of(d);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)d->dtype);
  carver c = {0, false};
  *at = (kept_layout){0};
  if (tokens == 0) return CUMOE_OK;
  at->logits = carve(&c, tokens, router_experts(d), 4);
  at->ids = carve(&c, pairs, 1, 4);
  at->weights = carve(&c, pairs, 1, 4);
  at->route = carve_route(&c, d, pairs, pairs);
  at->z = carve(&c, pairs, halves * d->inter, element);
  at->shared_z = carve(&c, tokens, halves * d->shared_inter, element);
  at->shared_logit = carve(&c, d->shared_inter ? tokens : 0, 1, 4);
  at->bytes = c.at;
  return check_carved(name, &c, tokens);
}

/* On CUDA x and d out are copied into the order of rows: tensor maps cannot gather. */
static rows_layout carve_rows(carver *c, const struct plan *plan, int64_t pairs, int64_t experts, int64_t inter)
{
  const cumoe_moe_desc *d = &plan->desc;
  const bool copies = !on_cpu(plan->context);
  const int64_t rows = PADDED_ROWS(pairs, experts);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)d->dtype);
  rows_layout at = {.rows = rows};
  at.d_h = carve(c, rows, inter, copies ? element : 4);
  at.h = carve(c, rows, inter, element);
  at.d_z = carve(c, rows, halves_of(d) * inter, element);
  at.along = carve(c, rows, 1, 8);
  at.d_rows = carve(c, rows, d->hidden, element);
  at.d_out = carve(c, copies ? rows : 0, d->hidden, element);
  return at;
}

int32_t runs_of(const struct plan *plan, int64_t tokens)
{
  enum { MOST = 8, RUN = 512 };
  return on_cpu(plan->context) ? 1 : (int32_t)min64(ceil_div(tokens, RUN), MOST);
}

bool parts_logits(const struct plan *plan)
{
  const cumoe_moe_desc *d = &plan->desc;
  return !on_cpu(plan->context) && d->dtype == CUMOE_BF16 && router_experts(d) % 8 == 0;
}

/* Units of `weight_gradient` by clusters: two tiles of 256 x 192. */
int32_t part_runs_of(const struct plan *plan, int64_t tokens)
{
  enum { MOST = 16, RUN = 256 };
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t units = ceil_div(2 * (int64_t)router_experts(d), 256) * ceil_div(ceil_div((int64_t)d->hidden, 192), 2);
  const int64_t fill = plan->context->machine.sms / 2 / units;
  return (int32_t)min64(min64(ceil_div(tokens, RUN), fill > 1 ? fill : 1), MOST);
}

cumoe_status lay_out_scratch(const char *name, const struct plan *plan, int64_t tokens, bool kept, scratch_layout *at)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t pairs = tokens * d->routing.top_k, experts = router_experts(d);
  const int64_t rows = PADDED_ROWS(pairs, (int64_t)d->local_experts);
  kept_layout keeps;
  carver c = {0, false};
  *at = (scratch_layout){0};
  if (tokens == 0) return CUMOE_OK;
  REQUIRE(rows <= CUMOE_MAX_PAIRS, CUMOE_ERR_INVALID_ARGUMENT,
          "%s is %lld: with what fills them up there would be %lld rows, the limit is %d", name, (long long)tokens,
          (long long)rows, CUMOE_MAX_PAIRS);
  TRY(lay_out_kept(name, plan, tokens, &keeps));
  at->routed = carve_rows(&c, plan, pairs, d->local_experts, d->inter);
  if (d->shared_inter) at->shared = carve_rows(&c, plan, tokens, 1, d->shared_inter);
  at->d_weights = carve(&c, pairs, 1, 4);
  at->d_logits = carve(&c, tokens, experts, 4);
  at->d_router = carve(&c, tokens, d->hidden, 4);
  at->shared_weight = carve(&c, d->shared_inter ? tokens : 0, 1, 4);
  at->d_shared_weight = carve(&c, d->shared_inter ? tokens : 0, 1, 4);
  at->count = carve(&c, 1, experts, 8);
  at->token_loss = carve(&c, tokens, 2, 8);
  at->pair_scale = carve(&c, pairs, 1, 8);
  at->padded = carve_route(&c, d, pairs, rows);
  at->row_token = carve(&c, on_cpu(plan->context) ? 0 : rows, 1, 4);
  at->tickets = carve(&c, on_cpu(plan->context) ? 0 : TICKET_WORDS(d->local_experts), 1, 4);
  const bool parts = parts_logits(plan);
  const int32_t part_runs = parts ? part_runs_of(plan, tokens) : 0, whole_runs = runs_of(plan, tokens),
                runs = part_runs > whole_runs ? part_runs : whole_runs;
  at->runs_counts = carve(&c, 1, runs, 4);
  at->runs_offsets = carve(&c, 1, runs + 1, 4);
  at->runs_sums = carve(&c, max64(whole_runs > 1 ? whole_runs : 0, 2 * (int64_t)part_runs), experts * d->hidden, 4);
  at->parts = carve(&c, parts ? tokens : 0, 2 * experts, 2);
  if (!kept) at->hist = carve(&c, map_room(pairs), d->local_experts, 4);
  at->kept = carve(&c, 1, kept ? 0 : (int64_t)keeps.bytes, 1);
  at->bytes = c.at;
  return check_carved(name, &c, tokens);
}

static cumoe_status begin_query(cumoe_plan handle, int64_t tokens, const size_t *bytes, const struct plan **plan)
{
  TRY(find_plan(handle, plan));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  TRY(check_without_formats(*plan));
  return check_tokens("tokens", tokens, 0, (*plan)->desc.routing.top_k);
}

cumoe_status cumoe_moe_kept(cumoe_plan handle, int64_t tokens, size_t *bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  kept_layout at;
  TRY(begin_query(handle, tokens, bytes, &plan));
  TRY(lay_out_kept("tokens", plan, tokens, &at));
  *bytes = at.bytes;
  return CUMOE_OK;
}

cumoe_status cumoe_moe_backward_workspace(cumoe_plan handle, int64_t tokens, int32_t kept, size_t *bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  scratch_layout at;
  TRY(begin_query(handle, tokens, bytes, &plan));
  TRY(lay_out_scratch("tokens", plan, tokens, kept != 0, &at));
  *bytes = at.bytes;
  return CUMOE_OK;
}
