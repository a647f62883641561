/*
 * The masked form [E, capacity, H] against the oracle, rows that are not there untouched; stages whose number of tokens
 * the device knows; and layers whose tokens have the same bits whatever the batch (CUMOE_MOE_BATCH_INVARIANT).
 */
#include "cases_format.h"

#include <math.h>

/* ---- [E, capacity, H] ---- */

static void fill_counts(rng *r, const tensor *counts, int64_t capacity, int which)
{
  for (int64_t e = 0; e < counts->cols; e++) {
    const int64_t some = rng_below(r, capacity + 1);
    tensor_set(counts, 0, e, (double)(which == 0 ? some : which == 1 ? (e % 3 ? 0 : capacity) : e == 1 ? capacity : 0));
  }
}

/* Rows past the counts hold NaN, and must not be written. */
static void run_masked(cumoe_context context, layer_spec s, const char *name, int64_t capacity, int which)
{
  rng r = {(uint64_t)capacity * 7 + (uint64_t)which};
  const int32_t experts = s.desc.num_experts, dtype = s.desc.dtype;
  s.form.up = s.desc.up_format, s.form.down = s.desc.down_format;
  case_begin("masked %s, %s capacity %d counts %d", name, cumoe_dtype_name((cumoe_dtype)dtype), (int)capacity, which);
  host_weights w = random_weights(&r, &s.desc, experts, s.desc.inter, s.form);
  const tensor counts = tensor_new(CUMOE_I32, 1, experts), offsets = tensor_new(CUMOE_I32, 1, experts + 1),
               x = tensor_normal(&r, dtype, experts * capacity, s.desc.hidden, 0, 1);
  fill_counts(&r, &counts, capacity, which);
  for (int64_t e = 0; e <= experts; e++) tensor_set(&offsets, 0, e, (double)(e * capacity));
  for (int64_t e = 0; e < experts; e++)
    for (int64_t i = (int64_t)tensor_get(&counts, 0, e); i < capacity; i++)
      for (int64_t k = 0; k < s.desc.hidden; k++) tensor_set(&x, e * capacity + i, k, NAN);
  cumoe_plan plan = NULL;
  size_t bytes = 0;
  CHECK_OK(cumoe_plan_create(context, &s.desc, &plan));
  CHECK_OK(cumoe_masked_workspace(plan, capacity, &bytes));
  const cumoe_weights weights = weights_put(context, &w, s.form);
  const cumoe_view_mut out = device_new(context, dtype, experts * capacity, s.desc.hidden, 8),
                       workspace = device_new(context, CUMOE_U8, 1, (int64_t)bytes, 0);
  const cumoe_masked_args a = {.size = sizeof a,
                               .capacity = capacity,
                               .expected_rows = which == 1 ? 3 : 0,
                               .x = device_put(context, &x, 8),
                               .counts = device_put(context, &counts, 0),
                               .offsets = device_put(context, &offsets, 0),
                               .out = out,
                               .workspace = workspace};
  CHECK_OK(cumoe_masked_forward(plan, weights, &a, NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  const tensor got = device_get(context, cumoe_const(out));
  check_guards(context, "out", out);
  check_guards(context, "workspace", workspace);
  oracle_prepare(&w);
  double *row = scratch((size_t)s.desc.hidden, sizeof *row);
  bounded *h = scratch((size_t)s.desc.inter, sizeof *h), *y = scratch((size_t)s.desc.hidden, sizeof *y);
  for (int64_t e = 0; e < experts; e++)
    for (int64_t i = 0; i < capacity; i++) {
      const int64_t at = e * capacity + i;
      if (i >= (int64_t)tensor_get(&counts, 0, e)) {
        const size_t size = (size_t)got.cols * cumoe_dtype_bytes((cumoe_dtype)dtype);
        for (size_t b = 0; b < size; b++)
          if (!CHECK_MSG(got.data[(size_t)at * size + b] == test_poison, "row %d of expert %d was written", (int)i,
                         (int)e))
            break;
        continue;
      }
      for (int64_t k = 0; k < s.desc.hidden; k++) row[k] = tensor_get(&x, at, k);
      oracle_up(&s.desc, &w, e, row, (bounded){1, 0}, h);
      for (int64_t k = 0; k < s.desc.inter; k++) h[k] = oracle_rounded(h[k], dtype);
      oracle_down(&w, e, h, y);
      for (int64_t k = 0; k < s.desc.hidden; k++) y[k] = oracle_stored(y[k], dtype);
      check_bounded_row("out", &got, at, y);
    }
  CHECK_OK(cumoe_weights_destroy(weights));
  CHECK_OK(cumoe_plan_destroy(plan));
  case_end();
}

static void run_capacities(cumoe_context context)
{
  static const int64_t capacities[] = {1, 3, 16, 17, 64, 129, 200};
  for (int type = 0; type < 3; type++)
    for (int i = 0; i < (on_device(context) ? 7 : 4); i++)
      for (int which = 0; which < 3; which++) {
        layer_spec s = layer_spec_new(case_dtypes[type], 1, 72, 56);
        s.desc.num_experts = 5;
        if (which == 2) s.form.up_major = s.form.down_major = CUMOE_IN_OUT;
        run_masked(context, s, "dense", capacities[i], which);
      }
}

/* Rows that are there become codes, or their experts' own rows. */
static void run_formats(cumoe_context context)
{
  static const int64_t capacities[] = {5, 19, 150};
  cumoe_format f;
  const char *name;
  oracle_fp8_adder = on_device(context);
  for (int i = 0; (name = format_name(i, &f)) != NULL; i++)
    for (int which = 0; which < (on_device(context) ? 3 : 2); which++) {
      rng r = {(uint64_t)i * 3 + (uint64_t)which};
      layer_spec s = layer_spec_new((i + which) % 2 ? CUMOE_F16 : CUMOE_BF16, 1, which ? 288 : 96, 160);
      s.desc.num_experts = 5;
      s.desc.up_format = s.desc.down_format = f;
      s.desc.down_format.joined = 0;
      format_random_form(&r, &s);
      run_masked(context, s, name, capacities[which], (i + which) % 3);
    }
  oracle_fp8_adder = false;
}

/* ---- stages with a count on the device ---- */

/* As with that many tokens; what lies behind is not touched. */
static void run_counted(cumoe_context context, int32_t dtype, int32_t present)
{
  enum { TOKENS = 37, K = 3 };
  case_begin("stages, %s, %d of %d tokens", cumoe_dtype_name((cumoe_dtype)dtype), present, TOKENS);
  layer_spec s = layer_spec_new(dtype, TOKENS, 64, 40);
  s.desc.routing = cumoe_routing_mixtral(K);
  s.input = INPUT_ROUTER;
  const layer_inputs in = layer_inputs_new(&s);
  staged g;
  staged_open(&g, context, &s, &in, NULL);
  const tensor count = tensor_new(CUMOE_I32, 1, 1);
  tensor_set(&count, 0, 0, present);
  g.route.device_tokens = device_put(context, &count, 0);
  const cumoe_router_args router = {.size = sizeof router,
                                    .x = g.s.args.x,
                                    .weight = g.s.args.router_weight,
                                    .device_tokens = g.route.device_tokens,
                                    .logits = g.logits};
  const cumoe_gate_args gate = {.size = sizeof gate,
                                .routing = s.desc.routing,
                                .logits = cumoe_const(g.logits),
                                .device_tokens = g.route.device_tokens,
                                .ids = g.ids,
                                .weights = g.weights};
  CHECK_OK(cumoe_router_with(context, &router, NULL));
  CHECK_OK(cumoe_gate_with(context, &gate, NULL));
  for (stage which = STAGE_MAP; which < STAGE_COUNT; which++) CHECK_OK(run_stage(&g, which));
  CHECK_OK(cumoe_synchronize(context, NULL));
  check_fault(context, NULL, CUMOE_FAULT_NONE);
  check_untouched(context, "logits", g.logits, present);
  check_untouched(context, "ids", g.ids, present);
  check_untouched(context, "weights", g.weights, present);
  check_untouched(context, "out", g.out, present);
  check_untouched(context, "slot_row", g.route.slot_row, present);
  check_untouched(context, "h", g.h, present * K);
  check_untouched(context, "y", g.y, present * K);
  layer_outputs got = {.out = device_get(context, cumoe_const(g.out))};
  session_close(&g.s);
  s.device_count = true, s.device_tokens = present;
  check_layer(&s, &in, &got);
  case_end();
}

static void run_counts(cumoe_context context)
{
  static const int32_t present[] = {0, 1, 20, 37};
  for (int type = 0; type < 3; type++)
    for (int i = 0; i < 4; i++) run_counted(context, case_dtypes[type], present[i]);
}

/* ---- the same bits in any batch ---- */

enum { MOST = 700 };

static void run_batches(cumoe_context context, layer_spec *s, const char *name)
{
  static const int64_t batches[] = {1, 2, 5, 8, 17, 33, 100, 300};
  const int64_t most = on_device(context) ? MOST : 40;
  int64_t order[MOST];
  case_begin("%s, %s", name, cumoe_dtype_name((cumoe_dtype)s->desc.dtype));
  s->tokens = most;
  s->desc.flags |= CUMOE_MOE_BATCH_INVARIANT;
  s->optional_outputs = true;
  const layer_inputs in = layer_inputs_new(s);
  const layer_outputs whole = run_layer(context, s, &in);
  for (int i = 0; i < 8 && batches[i] <= most; i++) {
    const int64_t first = most - batches[i] * (most / batches[i]) + (i % 3) * (most / batches[i] / 2) * batches[i];
    if (first + batches[i] > most) continue;
    for (int64_t t = 0; t < batches[i]; t++) order[t] = first + t;
    const layer_inputs part = take_tokens(&in, order, batches[i]);
    s->tokens = batches[i];
    const layer_outputs got = run_layer(context, s, &part);
    const int64_t width = s->desc.hidden * (int64_t)cumoe_dtype_bytes((cumoe_dtype)whole.out.dtype);
    int64_t other = 0;
    for (int64_t t = 0; t < batches[i]; t++)
      other += memcmp(got.out.data + t * width, whole.out.data + (first + t) * width, (size_t)width) != 0;
    CHECK_MSG(other == 0, "%d of %d tokens have other bits than among %d", (int)other, (int)batches[i], (int)most);
  }
  case_end();
}

static void run_invariance(cumoe_context context)
{
  for (int type = 0; type < 3; type++)
    for (int form = 0; form < 4; form++) {
      layer_spec s = layer_spec_new(case_dtypes[type], 1, on_device(context) ? 512 : 64, on_device(context) ? 384 : 40);
      s.desc.num_experts = 16;
      s.desc.routing = cumoe_routing_mixtral(4);
      s.input = INPUT_ROUTER;
      if (form == 1) s.form.up_major = s.form.down_major = CUMOE_IN_OUT;
      if (form == 2) s.desc.shared_inter = 64, s.shared_gate = true;
      if (form == 3) s.form.bias = CUMOE_F32, s.desc.act = CUMOE_ACT_SWIGLU_OAI, s.desc.act_limit = 7;
      static const char *const names[] = {"plain", "[E, in, out]", "shared expert", "gpt-oss"};
      run_batches(context, &s, names[form]);
    }
  static const char *const formats[] = {"fp8", "int4", "mxfp4"};
  for (int i = 0; i < 3; i++) {
    layer_spec s = layer_spec_new(CUMOE_BF16, 1, 512, 384);
    s.desc.routing = cumoe_routing_mixtral(2);
    s.input = INPUT_ROUTER;
    s.desc.up_format = s.desc.down_format = i == 0   ? cumoe_format_fp8_block(CUMOE_F32)
                                            : i == 1 ? cumoe_format_int4(128, CUMOE_BF16)
                                                     : cumoe_format_mxfp4();
    if (on_device(context)) run_batches(context, &s, formats[i]);
  }
}

static const test_group groups[] = {
    GROUP("masked", run_capacities, ANYWHERE), GROUP("masked formats", run_formats, ANYWHERE),
    GROUP("counted", run_counts, ANYWHERE), GROUP("any batch", run_invariance, ANYWHERE)};
TEST_MAIN(groups)
