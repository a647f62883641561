/*
 * cumoe_moe_forward as a whole, on every usable device and in every type, against the oracle's bound for each
 * element; and relations that need no oracle: repeated, permuted, split and poisoned calls.
 *
 * Every case runs twice, over memory filled with two different bytes, and both results must have the same bits.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases_format.h"
#include "cases_layer.h"

static const uint8_t poisons[] = {0xff, 0x3b};

static int64_t least(int64_t a, int64_t b)
{
  return a < b ? a : b;
}

static layer_outputs run_twice(cumoe_context context, const layer_spec *spec, const layer_inputs *in)
{
  layer_outputs o[2];
  for (int i = 0; i < 2; i++) {
    test_poison = poisons[i];
    o[i] = run_layer(context, spec, in);
    check_fault(context, NULL, expected_fault(spec, in));
  }
  check_outputs_same(&o[0], &o[1]);
  return o[1];
}

static void run_case(cumoe_context context, const layer_spec *spec)
{
  const layer_inputs in = layer_inputs_new(spec);
  const layer_outputs o = run_twice(context, spec, &in);
  check_layer(spec, &in, &o);
}

static const int64_t token_counts[] = {0,  1,   2,   3,   7,   8,   15,  16,   17,   31,   32,   33,   63,  64,
                                       65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 2047, 4096, 8193};

static int64_t multiple_of_8(rng *r, int64_t most)
{
  return 8 * (1 + rng_below(r, most / 8));
}

/* Widths that are multiples of 8 and mostly of nothing more; smaller for many tokens on the CPU. */
static layer_spec sized_spec(rng *r, cumoe_context context, int32_t dtype, int64_t tokens)
{
  const int64_t most = on_device(context) ? 200 : tokens > 300 ? 24 : tokens > 100 ? 56 : 136;
  layer_spec s = layer_spec_new(dtype, tokens, (int32_t)multiple_of_8(r, most), (int32_t)multiple_of_8(r, most));
  s.distinct = tokens > 61 ? 61 : 0;
  s.pad = rng_below(r, 3);
  s.seed = rng_next(r);
  s.ids_dtype = rng_below(r, 2) ? CUMOE_I32 : CUMOE_I64;
  return s;
}

static void sweep_tokens(cumoe_context context, int32_t dtype, rng *r)
{
  if (!group_begin("%s: tokens x patterns, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype))) return;
  for (size_t i = 0; i < sizeof token_counts / sizeof token_counts[0]; i++)
    for (pattern p = 0; p < PATTERN_COUNT; p++) {
      if (!on_device(context) && token_counts[i] > 1025) continue;
      layer_spec s = sized_spec(r, context, dtype, token_counts[i]);
      s.desc.num_experts = 3 + (int32_t)rng_below(r, 20);
      s.desc.routing.top_k = 1 + (int32_t)rng_below(r, least(4, s.desc.num_experts));
      s.pattern = p;
      s.optional_outputs = p & 1;
      layer_random_form(r, &s);
      case_begin("T %" PRId64 " %s E %d k %d H %d I %d order %d major %d %d", s.tokens, pattern_name(p),
                 s.desc.num_experts, s.desc.routing.top_k, s.desc.hidden, s.desc.inter, s.form.gate_order,
                 s.form.up_major, s.form.down_major);
      run_case(context, &s);
      case_end();
    }
  group_end();
}

static void sweep_experts(cumoe_context context, int32_t dtype, rng *r)
{
  static const int32_t experts[] = {1, 8, 60, 128, 160, 255, 256, 257, 384, 512, 1000, 1023, 1024},
                       slots[] = {1, 2, 4, 8, 10, 17, 32};
  if (!group_begin("%s: experts x slots, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype))) return;
  for (size_t i = 0; i < sizeof experts / sizeof experts[0]; i++)
    for (size_t j = 0; j < sizeof slots / sizeof slots[0]; j++) {
      if (slots[j] > experts[i]) continue;
      if (!on_device(context) && (i + j + (size_t)dtype) % 3) continue; /* each pair once, in one of the types */
      layer_spec s = sized_spec(r, context, dtype, 37);
      s.desc.num_experts = experts[i];
      s.desc.routing.top_k = slots[j];
      if (experts[i] > 60) s.desc.hidden = 24, s.desc.inter = 8;
      s.input = (routing_input)(rng_below(r, 2) + 1);
      s.select_bias = rng_below(r, 2);
      s.optional_outputs = true;
      case_begin("E %d k %d %s", experts[i], slots[j], s.input == INPUT_LOGITS ? "logits" : "router");
      run_case(context, &s);
      case_end();
    }
  group_end();
}

/* For many tokens, and for one: on a GPU with an intermediate width for which that has kernels of its own. */
static void sweep_features(cumoe_context context, int32_t dtype)
{
  enum { MANY = 45, WIDE = 776 };
  if (!group_begin("%s: features, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype))) return;
  for (int i = 0; feature_name(i / 2) != NULL; i++) {
    const bool one = i % 2;
    layer_spec s = feature_spec(i / 2, dtype, one ? 1 : MANY, (uint64_t)i + 1);
    if (one && on_device(context)) s.desc.inter = WIDE;
    case_begin("%s, T %d", feature_name(i / 2), one ? 1 : MANY);
    run_case(context, &s);
    case_end();
  }
  group_end();
}

static void set_random_routing(rng *r, layer_spec *s)
{
  cumoe_routing *g = &s->desc.routing;
  *g = cumoe_routing_make((cumoe_score)rng_below(r, 4), 1,
                          (uint32_t)rng_below(r, 8) & ~(uint32_t)CUMOE_ROUTE_SCORE_AFTER_TOPK);
  if (g->score == CUMOE_SCORE_SOFTMAX && rng_below(r, 2)) g->flags |= CUMOE_ROUTE_SCORE_AFTER_TOPK;
  if (g->score == CUMOE_SCORE_IDENTITY) g->flags &= ~(uint32_t)CUMOE_ROUTE_RENORMALIZE; /* sums near 0 decide nothing */
  if (rng_below(r, 3) == 0) g->routed_scale = 1.3f;
  if (rng_below(r, 4) == 0) g->softcap = 4.f;
  if (rng_below(r, 3) == 0) g->zero_experts = (int32_t)rng_below(r, 5);
  if (!(g->flags & CUMOE_ROUTE_WEIGHT_ON_INPUT) && rng_below(r, 3) == 0) g->identity_experts = (int32_t)rng_below(r, 5);
  const int32_t experts = spec_router_experts(s);
  int32_t open = experts;
  if (rng_below(r, 3) == 0) {
    g->n_group = 1 + (int32_t)rng_below(r, least(8, experts));
    while (experts % g->n_group) g->n_group--;
    g->topk_group = 1 + (int32_t)rng_below(r, g->n_group);
    g->group_score = (int32_t)rng_below(r, 2);
    open = experts / g->n_group * g->topk_group;
  }
  g->top_k = 1 + (int32_t)rng_below(r, least(open, 9));
  s->input = (routing_input)rng_below(r, 3);
  s->select_bias = s->input != INPUT_IDS && rng_below(r, 2);
  s->router_bias = rng_below(r, 2);
  s->pattern = (pattern)rng_below(r, PATTERN_COUNT);
  s->logits_dtype = case_dtypes[rng_below(r, 3)];
  if (rng_below(r, 2)) s->router_dtype = CUMOE_F32;
}

static layer_spec random_spec(rng *r, cumoe_context context, int32_t dtype)
{
  static const int32_t acts[] = {CUMOE_ACT_SILU, CUMOE_ACT_GELU_ERF, CUMOE_ACT_GELU_TANH,
                                 CUMOE_ACT_RELU, CUMOE_ACT_RELU2,    CUMOE_ACT_IDENTITY};
  layer_spec s = sized_spec(r, context, dtype, rng_below(r, on_device(context) ? 400 : 90));
  s.desc.num_experts = 1 + (int32_t)rng_below(r, 40);
  s.desc.act = acts[rng_below(r, 6)];
  if (rng_below(r, 5) == 0)
    s.desc.flags |= CUMOE_MOE_UNGATED;
  else if (rng_below(r, 4) == 0)
    s.desc.act = CUMOE_ACT_SWIGLU_OAI, s.desc.act_alpha = (float)rng_below(r, 2) * 1.2f;
  if (!(s.desc.flags & CUMOE_MOE_UNGATED) && rng_below(r, 3) == 0) s.desc.act_limit = 0.9f;
  if (rng_below(r, 5) == 0) s.desc.flags |= CUMOE_MOE_UNREDUCED;
  if (rng_below(r, 3) == 0) s.desc.out_dtype = CUMOE_F32;
  if (rng_below(r, 3) == 0) s.desc.local_experts = 1 + (int32_t)rng_below(r, s.desc.num_experts);
  s.expert_map = rng_below(r, 2);
  if (!(s.desc.flags & CUMOE_MOE_UNREDUCED)) {
    s.residual = (residual_form)rng_below(r, 4);
    if (rng_below(r, 2)) s.desc.shared_inter = (int32_t)multiple_of_8(r, 100);
    s.shared_gate = s.desc.shared_inter && rng_below(r, 2);
    s.out_scale = rng_below(r, 2) ? 0.f : 0.75f;
  }
  s.optional_outputs = true;
  s.device_count = rng_below(r, 3) == 0;
  s.device_tokens = (int32_t)rng_below(r, s.tokens + 1);
  layer_random_form(r, &s);
  set_random_routing(r, &s);
  return s;
}

static void sweep_random(cumoe_context context, int32_t dtype)
{
  if (!group_begin("%s: random layers, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype))) return;
  const seed_range seeds = test_seeds(on_device(context) ? 250 : 120);
  for (int i = seeds.first; i < seeds.end; i++) {
    rng r = {(uint64_t)i * 3 + (uint64_t)dtype};
    layer_spec s = random_spec(&r, context, dtype);
    case_begin("seed %d: T %" PRId64 " E %d k %d H %d I %d input %d score %d flags %u", i, s.tokens, s.desc.num_experts,
               s.desc.routing.top_k, s.desc.hidden, s.desc.inter, s.input, s.desc.routing.score, s.desc.routing.flags);
    run_case(context, &s);
    case_end();
  }
  group_end();
}

static cumoe_format random_format(rng *r, bool joins, const char **name)
{
  int formats = 0;
  cumoe_format f;
  while (format_name(formats, &f)) formats++;
  do *name = format_name((int)rng_below(r, formats), &f);
  while (f.joined && !joins); /* halves that are one */
  return f;
}

/* Some as wide as a model's, of few tokens and of more; and some of many rows an expert. */
static void random_size(rng *r, layer_spec *s)
{
  static const int64_t tokens[] = {13, 100, 1200};
  const int64_t which = rng_below(r, 5), wide = which < 2 ? 24 : 6;
  if (which > 2) return;
  s->tokens = rng_below(r, tokens[which]);
  s->distinct = s->tokens > 61 && which == 2 ? 61 : 0;
  s->device_tokens = (int32_t)rng_below(r, s->tokens + 1);
  s->desc.hidden = 64 * (1 + (int32_t)rng_below(r, wide)), s->desc.inter = 64 * (1 + (int32_t)rng_below(r, wide));
}

/* Up and down of a format, or one of them; or each of another. So are those of the shared expert. */
static layer_spec random_format_spec(rng *r, cumoe_context context, int32_t dtype, const char **name)
{
  layer_spec s = random_spec(r, context, dtype);
  const bool ungated = s.desc.flags & CUMOE_MOE_UNGATED;
  const uint32_t flags = s.desc.flags;
  const char *other;
  const cumoe_format f = random_format(r, !ungated, name);
  if (on_device(context)) random_size(r, &s);
  format_layer(&s, f, 1 + (int)rng_below(r, 3));
  if (rng_below(r, 4) == 0) s.desc.down_format = random_format(r, false, &other);
  if (s.desc.shared_inter && rng_below(r, 3)) s.desc.shared_up_format = random_format(r, !ungated, &other);
  if (s.desc.shared_inter && rng_below(r, 3)) s.desc.shared_down_format = random_format(r, false, &other);
  format_widths(&s);
  do {
    s.desc.flags = flags;
    format_random_form(r, &s);
  } while ((s.form.gate_order == CUMOE_UNGATED) != ungated);
  return s;
}

static void sweep_random_formats(cumoe_context context, int32_t dtype)
{
  if (dtype == CUMOE_F32) return;
  if (!group_begin("%s: random formats, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype))) return;
  const seed_range seeds = test_seeds(on_device(context) ? 120 : 60);
  oracle_device = on_device(context) ? DEVICE_ANY : 0;
  for (int i = seeds.first; i < seeds.end; i++) {
    const char *name;
    rng r = {(uint64_t)i * 5 + (uint64_t)dtype + 1000003};
    layer_spec s = random_format_spec(&r, context, dtype, &name);
    case_begin("seed %d: %s T %" PRId64 " E %d k %d H %d I %d input %d score %d flags %u %u", i, name, s.tokens,
               s.desc.num_experts, s.desc.routing.top_k, s.desc.hidden, s.desc.inter, s.input, s.desc.routing.score,
               s.desc.routing.flags, s.desc.flags);
    run_case(context, &s);
    case_end();
  }
  oracle_device = 0;
  group_end();
}

/* Layers that reach every stage, in sizes on both sides of the kernels' tiles. */
static layer_spec relation_spec(cumoe_context context, int32_t dtype, int which)
{
  static const int64_t tokens[] = {5, 70, 257};
  const bool large = on_device(context);
  layer_spec s = layer_spec_new(dtype, tokens[which] * (large ? 3 : 1), large ? 520 : 72, large ? 264 : 40);
  s.desc.num_experts = 12;
  s.desc.routing = cumoe_routing_deepseek_v3(4, 4, 2, 1.5f);
  s.desc.shared_inter = 48;
  s.shared_gate = true;
  s.residual = RESIDUAL_SEPARATE;
  s.input = which == 1 ? INPUT_LOGITS : INPUT_ROUTER;
  s.select_bias = true;
  s.optional_outputs = true;
  s.seed = (uint64_t)which + 5;
  return s;
}

static void repeat_case(cumoe_context context, const layer_spec *spec)
{
  const layer_inputs in = layer_inputs_new(spec);
  session s;
  layer_outputs first = {0};
  session_open(&s, context, spec, &in);
  for (int i = 0; i < 20; i++) {
    CHECK_OK(session_forward(&s));
    layer_outputs o = session_collect(&s);
    if (i == 0)
      first = o;
    else
      check_outputs_same(&first, &o);
  }
  session_close(&s);
}

static void permute_case(cumoe_context context, const layer_spec *spec, rng *r)
{
  const layer_inputs in = layer_inputs_new(spec);
  int64_t *order = scratch((size_t)spec->tokens, sizeof *order);
  for (int64_t i = 0; i < spec->tokens; i++) order[i] = i;
  for (int64_t i = spec->tokens - 1; i > 0; i--) {
    const int64_t other = rng_below(r, i + 1), kept = order[i];
    order[i] = order[other];
    order[other] = kept;
  }
  const layer_inputs moved = take_tokens(&in, order, spec->tokens);
  const layer_outputs a = run_layer(context, spec, &in), b = run_layer(context, spec, &moved);
  const layer_outputs want = permuted_outputs(spec, &a, order);
  check_outputs_same(&want, &b);
}

/* Told, not demanded: more tokens may bring another kernel, whose sums run in another order. */
static int64_t split_case(cumoe_context context, const layer_spec *spec)
{
  const layer_inputs in = layer_inputs_new(spec);
  const layer_outputs whole = run_layer(context, spec, &in);
  const int64_t parts[] = {1, 2, 16, 1 << 20};
  const size_t row = (size_t)whole.out.cols * cumoe_dtype_bytes((cumoe_dtype)whole.out.dtype);
  int64_t at = 0, different = 0;
  int64_t *order = scratch((size_t)spec->tokens, sizeof *order);
  for (int i = 0; at < spec->tokens; at += least(parts[i++], spec->tokens - at)) {
    layer_spec part = *spec;
    part.tokens = least(parts[i], spec->tokens - at);
    for (int64_t t = 0; t < part.tokens; t++) order[t] = at + t;
    const layer_inputs few = take_tokens(&in, order, part.tokens);
    const layer_outputs o = run_layer(context, &part, &few);
    check_layer(&part, &few, &o);
    for (int64_t t = 0; t < part.tokens; t++)
      different += memcmp(o.out.data + (size_t)t * row, whole.out.data + (size_t)(at + t) * row, row) != 0;
  }
  return different;
}

static void sweep_relations(cumoe_context context, int32_t dtype, rng *r)
{
  int64_t different = 0, tokens = 0;
  if (!group_begin("%s: repeated, permuted, split, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype)))
    return;
  for (int which = 0; which < 3; which++) {
    const layer_spec s = relation_spec(context, dtype, which);
    case_begin("20 times, T %" PRId64, s.tokens);
    repeat_case(context, &s);
    case_end();
    case_begin("permuted, T %" PRId64, s.tokens);
    permute_case(context, &s, r);
    case_end();
    case_begin("split, T %" PRId64, s.tokens);
    different += split_case(context, &s);
    tokens += s.tokens;
    case_end();
  }
  printf("# %s %s: %" PRId64 " of %" PRId64 " tokens have other bits in another batch\n", context_name(context),
         cumoe_dtype_name((cumoe_dtype)dtype), different, tokens);
  group_end();
}

typedef struct big_shape {
  int32_t experts, slots, hidden, inter, up_major, down_major;
} big_shape;

/* The same weights for all numbers of tokens, which decide between the kernels; three tokens take turns. */
static void model_cases(cumoe_context context, int32_t dtype, const big_shape *shape)
{
  static const int64_t tokens[] = {1, 5, 33, 300, 2100};
  layer_spec s = layer_spec_new(dtype, 2100, shape->hidden, shape->inter);
  s.desc.num_experts = shape->experts;
  s.desc.routing = cumoe_routing_qwen3(shape->slots);
  s.distinct = 3;
  s.input = INPUT_ROUTER;
  s.optional_outputs = true;
  s.form.up_major = shape->up_major;
  s.form.down_major = shape->down_major;
  case_begin("E %d k %d H %d I %d major %d %d", shape->experts, shape->slots, shape->hidden, shape->inter,
             s.form.up_major, s.form.down_major);
  const layer_inputs in = layer_inputs_new(&s);
  int64_t *order = scratch(2100, sizeof *order);
  for (int64_t t = 0; t < 2100; t++) order[t] = t;
  for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
    const layer_inputs some = take_tokens(&in, order, tokens[i]);
    s.tokens = tokens[i];
    const layer_outputs o = run_twice(context, &s, &some);
    check_layer(&s, &some, &o);
  }
  case_end();
}

/* Widths of real models with fewer experts. */
static void sweep_models(cumoe_context context, int32_t dtype)
{
  static const big_shape shapes[] = {{8, 2, 1024, 1792, CUMOE_OUT_IN, CUMOE_OUT_IN},
                                     {8, 8, 2048, 768, CUMOE_IN_OUT, CUMOE_IN_OUT},
                                     {8, 6, 2048, 1408, CUMOE_OUT_IN, CUMOE_OUT_IN},
                                     {4, 4, 2880, 2880, CUMOE_OUT_IN, CUMOE_IN_OUT},
                                     {40, 2, 1000, 776, CUMOE_OUT_IN, CUMOE_OUT_IN}}; /* tiles for two rounds, uneven */
  if (!on_device(context)) return; /* sizes that tell CUDA kernels apart; the CPU device has one */
  if (!group_begin("%s: widths of models, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype))) return;
  for (int i = 0; i < (dtype == CUMOE_BF16 ? 5 : 2); i++) model_cases(context, dtype, &shapes[i]);
  group_end();
}

static void check_others_same(const layer_spec *s, const tensor *clean, const tensor *dirty, const bool *bad)
{
  const int64_t width = clean->rows / s->tokens;
  for (int64_t t = 0; t < clean->rows; t++)
    CHECK_MSG(bad[t / width] || tensor_row_equal(clean, dirty, t), "token %" PRId64 " changed with another token's row",
              t / width);
}

/* Rows of NaN, Inf and single bad numbers: nobody else's bits change. */
static void bad_rows_case(cumoe_context context, layer_spec spec)
{
  static const double bad_values[] = {NAN, INFINITY, -INFINITY};
  const layer_inputs in = layer_inputs_new(&spec);
  layer_inputs dirty = in;
  bool *bad = scratch((size_t)spec.tokens, sizeof *bad);
  dirty.x = tensor_copy(&in.x);
  for (int64_t t = 1; t < spec.tokens; t += 6) {
    bad[t] = true;
    for (int64_t i = 0; i < in.x.cols; i += t & 1 ? 1 : 19) tensor_set(&dirty.x, t, i, bad_values[t % 3]);
  }
  const layer_outputs clean = run_layer(context, &spec, &in), got = run_layer(context, &spec, &dirty);
  check_others_same(&spec, &clean.out, &got.out, bad);
  CHECK_OK(cumoe_fault_clear(context, NULL));
}

/* An expert whose weights are NaN: only tokens that weigh it change, and weight 0 is not weighing. */
static void bad_expert_case(cumoe_context context, layer_spec spec)
{
  spec.input = INPUT_IDS;
  spec.pattern = PATTERN_ZIPF;
  const layer_inputs in = layer_inputs_new(&spec);
  layer_inputs dirty = in;
  const int32_t k = spec.desc.routing.top_k;
  bool *bad = scratch((size_t)spec.tokens, sizeof *bad);
  for (int64_t t = 0; t < spec.tokens; t++)
    for (int32_t j = 0; j < k; j++) {
      if (tensor_get(&in.ids, t, j) != 0) continue;
      if (t % 2)
        tensor_set(&in.id_weights, t, j, 0);
      else
        bad[t] = true;
    }
  tensor *down = &dirty.routed.down.data;
  *down = tensor_copy(&in.routed.down.data);
  for (int64_t i = 0; i < down->rows / spec.desc.num_experts * down->cols; i++) tensor_set(down, 0, i, NAN);
  const layer_outputs clean = run_layer(context, &spec, &in), got = run_layer(context, &spec, &dirty);
  check_layer(&spec, &in, &clean);
  check_others_same(&spec, &clean.out, &got.out, bad);
  for (int64_t t = 0; t < spec.tokens; t++)
    if (bad[t]) CHECK_MSG(isnan(tensor_get(&got.out, t, 0)), "token %" PRId64 " hides its expert's NaN", t);
}

static void sweep_hostile(cumoe_context context, int32_t dtype)
{
  if (!group_begin("%s: NaN and infinity stay at home, %s", context_name(context),
                   cumoe_dtype_name((cumoe_dtype)dtype)))
    return;
  for (int which = 0; which < 3; which++)
    for (routing_input input = INPUT_IDS; input <= INPUT_ROUTER; input++) {
      layer_spec s = relation_spec(context, dtype, which);
      s.input = input;
      s.select_bias = input != INPUT_IDS;
      case_begin("rows, T %" PRId64 ", input %d", s.tokens, input);
      bad_rows_case(context, s);
      case_end();
      s.select_bias = false;
      for (int on_input = 0; on_input < 2 && input == INPUT_IDS; on_input++) {
        s.form.bias = on_input ? CUMOE_F32 : 0;
        s.desc.routing.flags |= on_input ? CUMOE_ROUTE_WEIGHT_ON_INPUT : 0;
        case_begin("expert, T %" PRId64 "%s", s.tokens, on_input ? ", weight on input" : "");
        bad_expert_case(context, s);
        case_end();
      }
    }
  group_end();
}

/* How far the output lies from another layer's answer, in bounds; of the worst element. */
static double distance(const layer_spec *s, const layer_inputs *in, const tensor *out)
{
  cumoe_moe_desc desc;
  const layer_case c = layer_case_of(s, in, &desc);
  double worst = 0;
  for (int64_t t = 0; t < s->tokens; t++) {
    const layer_result want = oracle_layer(&c, t);
    for (int32_t i = 0; i < s->desc.hidden; i++)
      worst = fmax(worst, fabs(tensor_get(out, t, i) - want.out[i].value) / want.out[i].bound);
  }
  return worst;
}

static void sweep_controls(cumoe_context context, int32_t dtype)
{
  layer_spec s = layer_spec_new(dtype, 9, 72, 40);
  if (!group_begin("%s: wrong layers are seen, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype)))
    return;
  case_begin("swapped, dropped, zero");
  const layer_inputs in = layer_inputs_new(&s);
  const layer_outputs o = run_layer(context, &s, &in);
  CHECK_MSG(distance(&s, &in, &o.out) <= 1, "the right layer is %.3g bounds away", distance(&s, &in, &o.out));
  layer_inputs other = in;
  other.routed.gate_order = CUMOE_UP_GATE_CONCAT;
  oracle_prepare(&other.routed);
  CHECK_MSG(distance(&s, &other, &o.out) > 10, "gate and up swapped: only %.3g bounds away",
            distance(&s, &other, &o.out));
  other = in;
  other.ids = tensor_copy(&in.ids);
  tensor_set(&other.ids, 0, 3, -1);
  CHECK_MSG(distance(&s, &other, &o.out) > 10, "a dropped slot: only %.3g bounds away", distance(&s, &other, &o.out));
  const tensor zero = tensor_new(o.out.dtype, o.out.rows, o.out.cols);
  CHECK_MSG(distance(&s, &in, &zero) > 10, "an output of zeros: only %.3g bounds away", distance(&s, &in, &zero));
  case_end();
  group_end();
}

/* An expert that stands several times in a token's ids has more rows than there are tokens; [E, in, out], and large
 * enough for few tokens' units to be cut. */
static void sweep_repeated(cumoe_context context)
{
  if (!group_begin("%s: an expert again and again", context_name(context))) return;
  for (int64_t tokens = 2; tokens < 8; tokens += 2) {
    layer_spec s = layer_spec_new(CUMOE_BF16, tokens, 2048, 3264);
    s.desc.num_experts = 12;
    s.desc.routing.top_k = 6;
    s.input = INPUT_IDS;
    s.pattern = PATTERN_ONE;
    s.form.up_major = s.form.down_major = CUMOE_IN_OUT;
    case_begin("T %d", (int)tokens);
    const layer_inputs in = layer_inputs_new(&s);
    const layer_outputs first = run_layer(context, &s, &in), again = run_layer(context, &s, &in);
    check_layer(&s, &in, &first);
    check_outputs_same(&first, &again);
    case_end();
  }
  group_end();
}

/* Tokens of a huge call against the last of them alone, with the same kernels: bitwise. */
typedef struct giant {
  const char *name;
  int64_t tokens;
  int32_t experts, slots, hidden, inter;
  uint32_t flags;
  routing_input input;
  int64_t gib; /* of device memory */
} giant;

static const giant giants[] = {
    {"T k H past 2^31", 37500, 8, 8, 7168, 64, 0, INPUT_IDS, 8},
    {"unreduced out past 2^31", 37500, 8, 8, 7168, 64, CUMOE_MOE_UNREDUCED, INPUT_IDS, 12},
    {"T k I past 2^31", 37500, 8, 8, 64, 7168, 0, INPUT_IDS, 8},
    {"x past 2^31", 300000, 4, 1, 7168, 64, 0, INPUT_IDS, 18},
    {"logits past 2^31", 2100000, 1024, 1, 8, 8, 0, INPUT_ROUTER, 12},
};

enum { TAIL = 64 };

/* Forces one usable row of the operation, the `which`-th for activations and weights of the type; false: there are no
 * more. */
static bool force_row(cumoe_context context, const char *op, int32_t type, int which, const char **name)
{
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    cumoe_variant_info info = {.size = sizeof info};
    if (!CHECK_OK(cumoe_variant_get(context, i, &info))) return false;
    const bool fits = (info.x == 0 || info.x == type) && (info.w == 0 || info.w == type);
    if (!info.usable || strcmp(info.op, op) || !fits || which-- > 0) continue;
    *name = info.name;
    return CHECK_OK(cumoe_variant_force(context, i));
  }
  return false;
}

/* Rows repeat after 4099 tokens, so that large inputs are made quickly. */
static layer_spec giant_spec(const giant *g, int64_t tokens)
{
  layer_spec s = layer_spec_new(CUMOE_BF16, tokens, g->hidden, g->inter);
  s.desc.num_experts = g->experts;
  s.desc.flags = g->flags;
  s.desc.routing = cumoe_routing_qwen3(g->slots);
  s.input = g->input;
  s.pattern = PATTERN_ROUND_ROBIN;
  s.distinct = 4099;
  return s;
}

/* Only the last rows are read; the guards of a buffer that large are left alone. */
static tensor run_tail(session *s, cumoe_status *status)
{
  cumoe_view tail = cumoe_const(s->args.out);
  const int64_t rows = TAIL * (tail.rows / s->spec->tokens);
  session_reset(s);
  *status = session_forward(s);
  CHECK_OK(cumoe_synchronize(s->context, NULL));
  CHECK_OK(cumoe_view_rows(tail, tail.rows - rows, rows, &tail));
  return device_get(s->context, tail);
}

static layer_inputs last_tokens(const layer_inputs *in, int64_t count)
{
  int64_t *order = scratch((size_t)count, sizeof *order);
  for (int64_t i = 0; i < count; i++) order[i] = in->x.rows - count + i;
  return take_tokens(in, order, count);
}

static void compare_giant(session *large, session *small, const char *up, const char *down)
{
  cumoe_status status[2];
  const tensor want = run_tail(small, &status[0]), got = run_tail(large, &status[1]);
  if (status[1] == CUMOE_ERR_NOT_SUPPORTED && strstr(cumoe_last_error(), "2^31 - 1")) return; /* a CTA a logit */
  CHECK_MSG(status[0] == status[1], "%s, %s: %s for few tokens, %s for many", up, down, cumoe_status_name(status[0]),
            cumoe_status_name(status[1]));
  if (status[0] == CUMOE_ERR_NOT_SUPPORTED) return; /* another layout's kernel */
  CHECK_OK(status[0]);
  CHECK_MSG(tensor_equal(&want, &got), "%s, %s: the last tokens differ from the same tokens alone", up, down);
}

static void giant_case(cumoe_context context, const giant *g)
{
  const layer_spec spec = giant_spec(g, g->tokens), tail = giant_spec(g, TAIL);
  const layer_inputs in = layer_inputs_new(&spec), few = last_tokens(&in, TAIL);
  const bool routes = g->input == INPUT_ROUTER;
  const char *up = "", *down = "";
  session large, small;
  session_open(&large, context, &spec, &in);
  session_open(&small, context, &tail, &few);
  for (int i = 0; force_row(context, "up", CUMOE_BF16, i, &up); i++) {
    const int mark = scratch_mark();
    if (!force_row(context, "down", CUMOE_BF16, i, &down)) break;
    if (routes && !force_row(context, "router", CUMOE_BF16, i, &down)) break;
    compare_giant(&large, &small, up, down);
    CHECK_OK(cumoe_variant_force(context, -1));
    scratch_release(mark);
  }
  CHECK_OK(cumoe_variant_force(context, -1));
  check_fault(context, NULL, CUMOE_FAULT_NONE);
  session_close(&large);
  session_close(&small);
}

static void sweep_giants(cumoe_context context)
{
  cumoe_device_info info = {.size = sizeof info};
  if (!group_begin("%s: offsets past 2^31", context_name(context))) return;
  CHECK_OK(cumoe_context_info(context, &info));
  for (size_t i = 0; i < sizeof giants / sizeof giants[0]; i++) {
    case_begin("%s", giants[i].name);
    if (!on_device(context))
      case_skip("too slow on the CPU device");
    else if (info.total_memory >> 30 < 2 * giants[i].gib)
      case_skip("needs %" PRId64 " GiB", giants[i].gib);
    else {
      giant_case(context, &giants[i]);
      case_end();
    }
  }
  group_end();
}

/* Routings on both sides of what up takes over: experts, groups, scores, soft caps. */
static bool set_few_routing(layer_spec *s, int which)
{
  cumoe_routing *r = &s->desc.routing;
  s->desc.num_experts = which % 3 ? 128 : 136;
  switch (which) {
  case 0: *r = cumoe_routing_qwen3(8); break;
  case 1: *r = cumoe_routing_gpt_oss(4); break;
  case 2: *r = cumoe_routing_mixtral(2), s->desc.num_experts = 8; break;
  case 3: *r = cumoe_routing_deepseek_v3(8, 8, 4, 2.5f), s->desc.num_experts = 256, s->select_bias = true; break;
  case 4: *r = cumoe_routing_deepseek_v3(8, 8, 4, 2.5f), s->desc.num_experts = 64; break; /* groups of 8: by itself */
  case 5: *r = cumoe_routing_deepseek_v3(8, 1, 1, 2.8f), s->desc.num_experts = 256, s->select_bias = true; break;
  case 6: *r = cumoe_routing_qwen3(8), s->desc.num_experts = 257; break; /* likewise */
  case 7: *r = cumoe_routing_qwen3(8), r->softcap = 3; break;            /* likewise */
  case 8: *r = cumoe_routing_qwen3(8), s->select_bias = true; break;     /* likewise */
  case 9: *r = cumoe_routing_make(CUMOE_SCORE_SQRT_SOFTPLUS, 6, CUMOE_ROUTE_RENORMALIZE), s->select_bias = true; break;
  case 10: *r = cumoe_routing_make(CUMOE_SCORE_IDENTITY, 5, 0), r->softcap = 3, s->select_bias = true; break;
  case 11: *r = cumoe_routing_qwen3(8), s->desc.num_experts = 250, r->zero_experts = 4, r->identity_experts = 2; break;
  case 12:
    *r = cumoe_routing_mixtral(32), s->desc.num_experts = 32;
    if (s->tokens > 2) s->tokens = s->tokens > 8 ? 8 : 2;
    break;
  default: return false;
  }
  return true;
}

/* The same bits, whoever was the gate; and the same fault. */
static void few_gate_case(cumoe_context context, const layer_spec *spec, int kernel, bool nan)
{
  const char *name;
  const int64_t bad = nan ? spec->tokens / 2 : -1;
  const int32_t fault = nan && bad < spec_present(spec) ? CUMOE_FAULT_NAN_LOGIT : CUMOE_FAULT_NONE;
  layer_outputs got[2];
  layer_inputs in = layer_inputs_new(spec);
  for (int64_t i = 0; nan && i < in.x.cols; i++) tensor_set(&in.x, bad, i, NAN);
  for (int alone = 0; alone < 2; alone++) {
    if (!force_row(context, "few_up", spec->desc.dtype, kernel, &name)) return; /* not on this GPU */
    if (alone) CHECK(force_row(context, "gate", spec->desc.dtype, 0, &name));
    got[alone] = run_layer(context, spec, &in);
    check_fault(context, NULL, fault);
    CHECK_OK(cumoe_variant_force(context, -1));
  }
  check_outputs_same(&got[0], &got[1]);
  if (!nan) check_layer(spec, &in, &got[0]);
}

static void sweep_few_gates(cumoe_context context, int32_t dtype)
{
  static const int32_t tokens[] = {1, 1, 2, 7, 9, 32}; /* the first for the kernel of one token */
  if (!on_device(context) || dtype == CUMOE_F32) return;
  if (!group_begin("%s: the gate in up, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype))) return;
  layer_spec s = layer_spec_new(dtype, 1, 72, 40);
  for (int which = 0; set_few_routing(&s, which); which++)
    for (int i = 0; i < 12; i++) {
      const int kernel = i % 6 > 0, nan = i / 6;
      s = layer_spec_new(dtype, tokens[i % 6], 72, 40);
      (void)set_few_routing(&s, which);
      s.input = INPUT_ROUTER;
      s.optional_outputs = true;
      s.ids_dtype = i % 2 ? CUMOE_I64 : CUMOE_I32;
      s.device_count = which % 4 == 3, s.device_tokens = (int32_t)s.tokens - 1;
      case_begin("routing %d, T %d%s, kernel %d", which, (int)s.tokens, nan ? ", NaN" : "", kernel);
      few_gate_case(context, &s, kernel, nan);
      case_end();
    }
  group_end();
}

/* ---- codes of h, whoever makes them ---- */

static bool runs_wgmma_of_codes(cumoe_context context)
{
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    cumoe_variant_info info = {.size = sizeof info};
    if (!CHECK_OK(cumoe_variant_get(context, i, &info))) return false;
    if (info.usable && !strcmp(info.op, "up") && !strcmp(info.form, "wgmma") && info.x == CUMOE_E4M3) return true;
  }
  return false;
}

/* The quantize that makes codes of e4m3 of the type. */
static bool force_quantize(cumoe_context context, int32_t dtype)
{
  const char *name = "";
  for (int i = 0; force_row(context, "quantize", dtype, i, &name); i++)
    if (strstr(name, "e4m3") && strstr(name, "codes")) return true;
  return CHECK_MSG(false, "no quantize");
}

static layer_spec codes_spec(int32_t dtype, int which)
{
  static const int32_t tokens[] = {400, 130, 517, 260}, inters[] = {128, 384, 256},
                       orders[] = {CUMOE_GATE_UP_CONCAT, CUMOE_UP_GATE_CONCAT, CUMOE_GATE_UP_SEPARATE};
  static const pattern patterns[] = {PATTERN_UNIFORM, PATTERN_ZIPF, PATTERN_LAST, PATTERN_HOSTILE};
  layer_spec s = layer_spec_new(dtype, tokens[which % 4], 384, inters[which % 3]);
  s.desc.num_experts = 4;
  s.desc.up_format = s.desc.down_format = cumoe_format_fp8_block(CUMOE_F32);
  if (which % 5 == 1) s.desc.down_format = cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC);
  if (which % 5 == 2) s.desc.up_format = cumoe_format_fp8_channel(CUMOE_F32);
  if (which % 5 == 3) s.desc.down_format.row_scale = CUMOE_E8M0;
  if (which % 2) s.desc.act = CUMOE_ACT_SWIGLU_OAI, s.desc.act_limit = 7, s.form.bias = dtype;
  s.form.gate_order = orders[which / 2 % 3];
  s.pattern = patterns[which / 3 % 4];
  s.optional_outputs = true;
  s.device_count = which % 3 == 2, s.device_tokens = (int32_t)s.tokens - 9;
  s.seed = (uint64_t)which;
  return s;
}

/* Up makes them in its epilogue, or a launch of their own behind it does: the same bits. */
static void codes_case(cumoe_context context, const layer_spec *spec, bool nan)
{
  static const char remark[] = "makes the codes of h";
  layer_outputs got[2];
  layer_inputs in = layer_inputs_new(spec);
  if (nan) tensor_set(&in.x, 3, 5, NAN);
  for (int apart = 0; apart < 2; apart++) {
    char text[4096];
    session s;
    if (apart && !force_quantize(context, spec->desc.dtype)) return;
    session_open(&s, context, spec, &in);
    CHECK_OK(cumoe_plan_describe(s.plan, s.routed, spec->tokens, text, sizeof text));
    CHECK_MSG((strstr(text, remark) != NULL) == !apart, "%s", text);
    CHECK_OK(session_forward(&s));
    got[apart] = session_collect(&s);
    session_close(&s);
    CHECK_OK(cumoe_variant_force(context, -1));
  }
  check_outputs_same(&got[0], &got[1]);
  check_fault(context, NULL, expected_fault(spec, &in));
  oracle_device = DEVICE_ANY;
  if (!nan) check_layer(spec, &in, &got[0]);
  oracle_device = 0;
}

static void sweep_codes(cumoe_context context, int32_t dtype)
{
  if (!on_device(context) || dtype == CUMOE_F32) return;
  if (!group_begin("%s: codes of h, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype))) return;
  for (int which = 0; which < 30; which++) {
    const layer_spec s = codes_spec(dtype, which);
    case_begin("codes %d, T %d I %d", which, (int)s.tokens, s.desc.inter);
    if (!runs_wgmma_of_codes(context)) {
      case_skip("this GPU cannot run it");
      continue;
    }
    codes_case(context, &s, which % 7 == 6);
    case_end();
  }
  group_end();
}

/* Rows of codes that are weighed before the activation: of one stage or two, so that a tile's end and the next one's
 * begin meet, and of one expert or few, so that tiles are full. */
static void sweep_weighed_codes(cumoe_context context, int32_t dtype)
{
  static const int32_t tokens[] = {365, 700, 1500}, hiddens[] = {32, 192, 64}, inters[] = {112, 512};
  if (dtype == CUMOE_F32) return;
  if (!group_begin("%s: weighed codes, %s", context_name(context), cumoe_dtype_name((cumoe_dtype)dtype))) return;
  oracle_device = on_device(context) ? DEVICE_ANY : 0;
  for (int i = 0; i < (on_device(context) ? 24 : 4); i++) {
    const cumoe_format formats[] = {cumoe_format_fp8_block(CUMOE_F32), cumoe_format_fp8_channel(CUMOE_F32),
                                    cumoe_format_int8(CUMOE_F32), cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC)};
    layer_spec s =
        layer_spec_new(dtype, tokens[i % 3] / (on_device(context) ? 1 : 7), hiddens[i / 2 % 3], inters[i % 2]);
    s.distinct = 61;
    s.desc.num_experts = 1 + i / 4 % 3;
    s.desc.routing.top_k = 1;
    s.desc.routing.flags |= CUMOE_ROUTE_WEIGHT_ON_INPUT;
    s.desc.up_format = formats[i % 4];
    s.form.gate_order = i % 5 ? CUMOE_GATE_UP_CONCAT : CUMOE_UP_GATE_CONCAT;
    s.seed = (uint64_t)i;
    case_begin("%d, T %d H %d I %d", i, (int)s.tokens, s.desc.hidden, s.desc.inter);
    run_case(context, &s);
    case_end();
  }
  oracle_device = 0;
  group_end();
}

static void run_type(cumoe_context context, int32_t dtype, rng *r)
{
  sweep_controls(context, dtype);
  sweep_features(context, dtype);
  sweep_tokens(context, dtype, r);
  sweep_experts(context, dtype, r);
  sweep_random(context, dtype);
  sweep_random_formats(context, dtype);
  sweep_relations(context, dtype, r);
  sweep_hostile(context, dtype);
  sweep_models(context, dtype);
  sweep_few_gates(context, dtype);
  sweep_codes(context, dtype);
  sweep_weighed_codes(context, dtype);
  if (dtype == CUMOE_BF16 && on_device(context)) sweep_repeated(context);
}

int main(int argc, char **argv)
{
  cumoe_context contexts[2];
  test_begin(argc, argv);
  const int count = open_contexts(contexts);
  for (int i = 0; i < count; i++) {
    rng r = {42};
    for (int t = 0; t < 3; t++) run_type(contexts[i], case_dtypes[t], &r);
    sweep_giants(contexts[i]);
    close_context(contexts[i]);
  }
  return test_end();
}
