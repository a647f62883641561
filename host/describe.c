/* The plan of a layer in words: cumoe_plan_describe. */
#include "check.h"
#include "context.h"
#include "dispatch.h"
#include "moe.h"
#include "weights.h"

#include <stdarg.h>
#include <stdio.h>

/* A text that grows, cut at what the caller has room for. */
typedef struct text {
  char *at;
  size_t room, length;
} text;

static void add(text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(text *t, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  const int more = vsnprintf(t->length < t->room ? t->at + t->length : NULL,
                             t->length < t->room ? t->room - t->length : 0, format, args);
  va_end(args);
  if (more > 0) t->length += (size_t)more;
}

/* What a stage does besides its own work, and how it meets the grid ahead. */
static void add_remarks(text *t, const layer_plan *p, stage s)
{
  if (s == STAGE_few_up)
    add(t, "; does map, up%s%s", p->few_in_one ? ", down, combine" : "", p->few_gates ? ", gate" : "");
  if (s == STAGE_few_up && p->few_fills) add(t, "; a memset fills its words first");
  if (s == STAGE_few_down) add(t, "; does down, combine");
  if (s == STAGE_router && p->few_in_one) add(t, "; fills few_up's words");
  if (s == STAGE_up && p->copies_rows) add(t, "; puts its rows in order first");
  if (s == STAGE_up && p->codes_h) add(t, "; makes the codes of h");
  if (s == STAGE_down && p->by_expert) add(t, "; waits for h expert by expert");
  if (s == STAGE_combine && p->discards_rows) add(t, "; discards h and y from L2");
  if (s == STAGE_combine && p->combine_looks_ahead) add(t, "; looks its slots up first");
  if (!p->steps[s].early) add(t, "; starts when the grid ahead has ended");
}

static void add_workspace(text *t, const layer_plan *p, bool shared)
{
  const workspace_layout *w = &p->at;
  add(t,
      "workspace    %zu bytes: logits %zu, ids %zu, weights %zu, counts %zu, offsets %zu, row_pair %zu, slot_row "
      "%zu,\n",
      w->bytes, w->logits, w->ids, w->weights, w->route.counts, w->route.offsets, w->route.row_pair, w->route.slot_row);
  add(t, "             hist %zu, progress %zu, h %zu, few_words %zu, y %zu", w->hist, w->progress, w->h, w->few_words,
      w->y);
  if (shared) add(t, ", shared_h %zu, shared_y %zu, shared_logit %zu", w->shared_h, w->shared_y, w->shared_logit);
  add(t, "\n");
}

static void describe(text *t, struct context *context, const layer_call *call, const layer_plan *p)
{
  const bool cpu = on_cpu(context);
  add(t, "%lld tokens on %s", (long long)call->tokens, context->info.name);
  if (!cpu) add(t, " (%s), tune file %s", kernels_in_words(&context->machine), context->machine.tune->name);
  add(t, "\n");
  for (stage s = 0; s < STAGE_COUNT; ++s) {
    const launch_step *step = &p->steps[s];
    if (step->row < 0) continue;
    add(t, "%-12s %s, %s %lld", stage_name(s), variants[step->row].name, cpu ? "units" : "grid", (long long)step->grid);
    if (!cpu) add_remarks(t, p, s);
    add(t, "\n");
  }
  add_workspace(t, p, call->has_shared);
}

/* A forward that brings x and a router, and weights that kernels like best unless `weights` say otherwise. */
static layer_call usual_call(const cumoe_moe_desc *d, const struct weights *w, int64_t tokens)
{
  const bound_matrix best = {MAJOR_K, true, true};
  return (layer_call){.tokens = tokens,
                      .up = w ? w->up_facts : best,
                      .down = w ? w->down_facts : best,
                      .has_router = true,
                      .logits_f32 = true,
                      .router_hidden = d->hidden,
                      .router_dtype = d->dtype,
                      .router_tmap = d->dtype != DT_F32,
                      .has_shared = d->shared_inter != 0,
                      .shared_up = best,
                      .shared_down = best};
}

cumoe_status cumoe_plan_describe(cumoe_plan handle, cumoe_weights weights, int64_t tokens, char *words, size_t bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  const struct weights *w = NULL;
  workspace_layout layout;
  text t = {words, bytes, 0};
  TRY(find_plan(handle, &plan));
  const cumoe_moe_desc *d = &plan->desc;
  struct context *context = plan->context;
  if (weights) TRY(find_weights("weights", weights, plan, false, &w));
  REQUIRE(words && bytes, CUMOE_ERR_INVALID_ARGUMENT, "%s", words ? "bytes is 0" : "text is null");
  TRY(check_tokens("tokens", tokens, 1, d->routing.top_k));
  TRY(check_layout("tokens", plan, tokens, &layout));
  const layer_call call = usual_call(d, w, tokens);
  const layer_plan p = plan_layer(&context->machine, d, &call);
  TRY(check_layer_plan(context, &p));
  describe(&t, context, &call, &p);
  return CUMOE_OK;
}
