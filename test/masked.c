/*
 * The masked form [E, capacity, H] against the oracle, rows that are not there untouched; stages whose number of tokens
 * the device knows; and layers whose tokens have the same bits whatever the batch (CUMOE_MOE_BATCH_INVARIANT).
 */
#include "cases_masked.h"

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
  const tensor slot_row = device_get(context, cumoe_const(g.route.slot_row));
  for (int64_t t = present; t < slot_row.rows; t++)
    for (int64_t slot = 0; slot < slot_row.cols; slot++) CHECK(tensor_get(&slot_row, t, slot) == -1);
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
  test_poison = 0x3c; /* of the other one, all ones, an untouched slot_row is -1 */
  for (int type = 0; type < 3; type++)
    for (int i = 0; i < 4; i++) run_counted(context, case_dtypes[type], present[i]);
  test_poison = 0xff;
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
    for (int form = 0; form < 5; form++) {
      layer_spec s = layer_spec_new(case_dtypes[type], 1, on_device(context) ? 512 : 64, on_device(context) ? 384 : 40);
      s.desc.num_experts = 16;
      s.desc.routing = cumoe_routing_mixtral(4);
      s.input = INPUT_ROUTER;
      if (form == 1) s.form.up_major = s.form.down_major = CUMOE_IN_OUT;
      if (form == 2) s.desc.shared_inter = 64, s.shared_gate = true;
      if (form == 3) s.form.bias = CUMOE_F32, s.desc.act = CUMOE_ACT_SWIGLU_OAI, s.desc.act_limit = 7;
      if (form == 4) s.desc.num_experts = 256, s.desc.inter = 40; /* the router has two tiles */
      static const char *const names[] = {"plain", "[E, in, out]", "shared expert", "gpt-oss", "256 experts"};
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
    GROUP("masked", cases_masked, ANYWHERE), GROUP("masked formats", cases_masked_formats, ANYWHERE),
    GROUP("masked halves", cases_masked_halves, ANYWHERE), GROUP("counted", run_counts, ANYWHERE),
    GROUP("any batch", run_invariance, ANYWHERE)};
TEST_MAIN(groups)
