/*
 * A program of the day on which test/abi/include was frozen: built against that copy, run with today's library. It
 * makes a layer, whole and by its stages, and reads every struct that the library fills; then the same with structs of
 * other sizes, as older and newer programs have them. What it says must stay true: see README.md here.
 */
#include "../test.h"

#include <string.h>

enum { TOKENS = 3, EXPERTS = 4, TOP_K = 2, HIDDEN = 16, INTER = 8, LARGEST = 4096 };

/* Small whole numbers: every sum is exact in f32, in any order. */
static float number(int64_t i)
{
  return (float)(i * 7 % 5 - 2);
}

static tensor numbers(int64_t rows, int64_t cols)
{
  const tensor t = tensor_new(CUMOE_F32, rows, cols);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) tensor_set(&t, r, c, number(r * cols + c + r * r));
  return t;
}

typedef struct layer {
  cumoe_context context;
  cumoe_plan plan;
  cumoe_weights weights;
  tensor x, gate_up, down, ids, pair_weights, want;
  cumoe_view on_device[3]; /* x, ids, pair_weights */
} layer;

/* out[t] = sum of w[t, j] * ((x Wg^T) * (x Wu^T)) Wd^T */
static void compute(layer *l)
{
  for (int64_t t = 0; t < TOKENS; t++)
    for (int64_t o = 0; o < HIDDEN; o++) {
      double sum = 0;
      for (int j = 0; j < TOP_K; j++) {
        const int64_t e = (int64_t)tensor_get(&l->ids, t, j);
        double y = 0;
        for (int64_t i = 0; i < INTER; i++) {
          double g = 0, u = 0;
          for (int64_t h = 0; h < HIDDEN; h++) {
            g += tensor_get(&l->x, t, h) * tensor_get(&l->gate_up, e * 2 * INTER + i, h);
            u += tensor_get(&l->x, t, h) * tensor_get(&l->gate_up, e * 2 * INTER + INTER + i, h);
          }
          y += g * u * tensor_get(&l->down, e * HIDDEN + o, i);
        }
        sum += tensor_get(&l->pair_weights, t, j) * y;
      }
      tensor_set(&l->want, t, o, sum);
    }
}

/* `less`: so many bytes fewer than the structs had on that day: their zeros need not be said. */
static void make_layer(layer *l, cumoe_context context, uint32_t less)
{
  const cumoe_moe_desc desc = {.size = (uint32_t)sizeof desc - less,
                               .num_experts = EXPERTS,
                               .hidden = HIDDEN,
                               .inter = INTER,
                               .dtype = CUMOE_F32,
                               .act = CUMOE_ACT_IDENTITY,
                               .routing = cumoe_routing_make(CUMOE_SCORE_SOFTMAX, TOP_K, 0)};
  *l = (layer){.context = context, .x = numbers(TOKENS, HIDDEN), .gate_up = numbers(EXPERTS * 2 * INTER, HIDDEN)};
  l->down = numbers(EXPERTS * HIDDEN, INTER);
  l->ids = tensor_new(CUMOE_I32, TOKENS, TOP_K);
  l->pair_weights = tensor_new(CUMOE_F32, TOKENS, TOP_K);
  l->want = tensor_new(CUMOE_F32, TOKENS, HIDDEN);
  for (int t = 0; t < TOKENS; t++)
    for (int j = 0; j < TOP_K; j++) {
      tensor_set(&l->ids, t, j, (t + 2 * j) % EXPERTS);
      tensor_set(&l->pair_weights, t, j, j ? 0.5 : 2);
    }
  compute(l);
  const cumoe_weights_desc where = {.size = (uint32_t)sizeof where - less,
                                    .experts = EXPERTS,
                                    .hidden = HIDDEN,
                                    .inter = INTER,
                                    .gate_order = CUMOE_GATE_UP_CONCAT,
                                    .up_major = CUMOE_OUT_IN,
                                    .down_major = CUMOE_OUT_IN,
                                    .gate_up.data = device_put(context, &l->gate_up, 0),
                                    .down.data = device_put(context, &l->down, 0)};
  char why[64];
  CHECK_OK(cumoe_moe_supports(CUMOE_DEVICE_CPU, &desc, why, sizeof why));
  CHECK_OK(cumoe_plan_create(context, &desc, &l->plan));
  CHECK_OK(cumoe_weights_bind(context, &where, &l->weights));
  const tensor *const inputs[] = {&l->x, &l->ids, &l->pair_weights};
  for (int i = 0; i < 3; i++) l->on_device[i] = device_put(context, inputs[i], 0);
}

static void end_layer(layer *l)
{
  CHECK_OK(cumoe_weights_destroy(l->weights));
  CHECK_OK(cumoe_plan_destroy(l->plan));
}

static void check_out(const layer *l, cumoe_view_mut out)
{
  CHECK_OK(cumoe_synchronize(l->context, NULL));
  const tensor got = device_get(l->context, cumoe_const(out));
  check_same("out", &got, &l->want);
}

/* A struct with more behind it, as a newer program has. */
#define LONGER(type)                                                                                                   \
  union {                                                                                                              \
    type now;                                                                                                          \
    unsigned char bytes[LARGEST];                                                                                      \
  }

static void run_forward(const layer *l)
{
  size_t bytes = 0;
  CHECK_OK(cumoe_plan_workspace(l->plan, TOKENS, &bytes));
  const cumoe_view_mut out = device_new(l->context, CUMOE_F32, TOKENS, HIDDEN, 0);
  LONGER(cumoe_moe_args)
  args = {.now = {.size = sizeof args.now,
                  .x = l->on_device[0],
                  .ids = l->on_device[1],
                  .weights = l->on_device[2],
                  .out = out,
                  .workspace = device_new(l->context, CUMOE_U8, 1, (int64_t)bytes, 0)}};
  CHECK_OK(cumoe_moe_forward(l->plan, l->weights, &args.now, NULL));
  check_out(l, out);
  args.now.size = sizeof args;
  CHECK_OK(cumoe_moe_forward(l->plan, l->weights, &args.now, NULL));
  args.bytes[LARGEST - 1] = 1;
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_moe_forward(l->plan, l->weights, &args.now, NULL));
}

static void run_stages(const layer *l, uint32_t more)
{
  const int64_t rows = TOKENS * TOP_K;
  size_t bytes = 0;
  CHECK_OK(cumoe_map_workspace(l->plan, TOKENS, &bytes));
  LONGER(cumoe_route)
  route = {.now = {.size = (uint32_t)sizeof route.now + more,
                   .counts = device_new(l->context, CUMOE_I32, 1, EXPERTS, 0),
                   .offsets = device_new(l->context, CUMOE_I32, 1, EXPERTS + 1, 0),
                   .row_pair = device_new(l->context, CUMOE_I32, 1, rows, 0),
                   .slot_row = device_new(l->context, CUMOE_I32, TOKENS, TOP_K, 0)}};
  const cumoe_view_mut h = device_new(l->context, CUMOE_F32, rows, INTER, 0),
                       y = device_new(l->context, CUMOE_F32, rows, HIDDEN, 0),
                       sorted = device_new(l->context, CUMOE_F32, rows, HIDDEN, 0),
                       workspace = device_new(l->context, CUMOE_U8, 1, (int64_t)bytes, 0);
  LONGER(cumoe_combine_args)
  args = {.now = {.size = (uint32_t)sizeof args.now + more,
                  .y = cumoe_const(y),
                  .pair_weights = l->on_device[2],
                  .out = device_new(l->context, CUMOE_F32, TOKENS, HIDDEN, 0)}};
  const cumoe_route *r = &route.now;
  CHECK_OK(cumoe_map(l->plan, l->on_device[1], no_view(), r, workspace, NULL));
  CHECK_OK(cumoe_up(l->plan, l->weights, l->on_device[0], r, no_view(), h, NULL));
  CHECK_OK(cumoe_permute(l->plan, l->on_device[0], r, sorted, NULL));
  CHECK_OK(cumoe_up_permuted(l->plan, l->weights, cumoe_const(sorted), r, no_view(), h, NULL));
  CHECK_OK(cumoe_down(l->plan, l->weights, cumoe_const(h), r, y, NULL));
  CHECK_OK(cumoe_combine(l->plan, r, &args.now, NULL));
  check_out(l, args.now.out);
  route.now.size = sizeof route;
  route.bytes[LARGEST - 1] = 1;
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_down(l->plan, l->weights, cumoe_const(h), r, y, NULL));
  route.now.size = offsetof(cumoe_route, row_pair); /* what lies behind counts as zero */
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_down(l->plan, l->weights, cumoe_const(h), r, y, NULL));
}

static void run_others(cumoe_context context)
{
  const tensor logits = numbers(TOKENS, EXPERTS), a = numbers(2, 4), want = tensor_new(CUMOE_F32, 2, 2);
  const cumoe_routing routing = cumoe_routing_mixtral(1);
  const cumoe_view_mut ids = device_new(context, CUMOE_I32, TOKENS, 1, 0),
                       weights = device_new(context, CUMOE_F32, TOKENS, 1, 0);
  CHECK_OK(cumoe_gate(context, &routing, device_put(context, &logits, 0), no_view(), ids, weights, NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  const tensor got = device_get(context, cumoe_const(weights));
  for (int t = 0; t < TOKENS; t++) CHECK(tensor_get(&got, t, 0) == 1);
  if (on_device(context)) return; /* needs cuBLAS */
  cumoe_matmul_args m = {.size = sizeof m, .flags = CUMOE_MATMUL_TRANSPOSE_B, .a = device_put(context, &a, 0)};
  m.b = m.a;
  m.c = device_new(context, CUMOE_F32, 2, 2, 0);
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) {
      double sum = 0;
      for (int k = 0; k < 4; k++) sum += tensor_get(&a, i, k) * tensor_get(&a, j, k);
      tensor_set(&want, i, j, sum);
    }
  CHECK_OK(cumoe_matmul(context, &m, NULL));
  const tensor product = device_get(context, cumoe_const(m.c));
  check_same("product", &product, &want);
}

/* ---- what the library fills --------------------------------------------------------------------------- */

static cumoe_buffer buffer;

static cumoe_status fill_device(cumoe_context context, void *info)
{
  return cumoe_context_info(context, info);
}
static cumoe_status fill_buffer(cumoe_context context, void *info)
{
  (void)context;
  return cumoe_buffer_get_info(buffer, info);
}
static cumoe_status fill_pool(cumoe_context context, void *info)
{
  return cumoe_pool_get_stats(context, info);
}
static cumoe_status fill_fault(cumoe_context context, void *info)
{
  return cumoe_fault_read(context, NULL, info);
}
static cumoe_status fill_variant(cumoe_context context, void *info)
{
  return cumoe_variant_get(context, 0, info);
}

/* All of it, its first half, and all with more behind, the end of which no version will ever reach. */
static void check_filled(cumoe_context context, const char *name, uint32_t size,
                         cumoe_status (*fill)(cumoe_context, void *))
{
  static _Alignas(16) unsigned char whole[LARGEST], half[LARGEST], more[LARGEST], poison[LARGEST];
  const uint32_t part = size / 16 * 8, largest = LARGEST;
  case_begin("%s", name);
  memset(poison, 0x5a, LARGEST);
  memcpy(whole, poison, LARGEST), memcpy(half, poison, LARGEST), memcpy(more, poison, LARGEST);
  memcpy(whole, &size, 4), memcpy(half, &part, 4), memcpy(more, &largest, 4);
  CHECK_OK(fill(context, whole));
  CHECK_OK(fill(context, half));
  CHECK_OK(fill(context, more));
  CHECK(!memcmp(whole, &size, 4) && !memcmp(half, &part, 4) && !memcmp(more, &largest, 4));
  CHECK(!memcmp(whole + 4, half + 4, part - 4) && !memcmp(whole + 4, more + 4, size - 4));
  CHECK(memcmp(whole + 4, poison, size - 4) != 0);
  CHECK(!memcmp(whole + size, poison, LARGEST - size) && !memcmp(half + part, poison, LARGEST - part));
  memset(poison, 0, 64);
  CHECK(!memcmp(more + LARGEST - 64, poison, 64));
  case_end();
}

static void run_filled(cumoe_context context)
{
  if (!group_begin("%s: structs that the library fills", context_name(context))) return;
  case_begin("a buffer");
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 5, 7, NULL, &buffer));
  case_end();
  check_filled(context, "device", sizeof(cumoe_device_info), fill_device);
  check_filled(context, "buffer", sizeof(cumoe_buffer_info), fill_buffer);
  check_filled(context, "pool", sizeof(cumoe_pool_stats), fill_pool);
  check_filled(context, "fault", sizeof(cumoe_fault), fill_fault);
  check_filled(context, "variant", sizeof(cumoe_variant_info), fill_variant);
  case_begin("free");
  CHECK_OK(cumoe_buffer_free(&buffer));
  case_end();
  group_end();
}

static void run_layers(cumoe_context context)
{
  static const uint32_t less[] = {0, 8, sizeof((cumoe_routing *)0)->reserved};
  if (!group_begin("%s: layers", context_name(context))) return;
  for (int i = 0; i < 3; i++) {
    layer l;
    case_begin("descriptions shorter by %u", less[i]);
    make_layer(&l, context, less[i]);
    run_forward(&l);
    run_stages(&l, 0);
    run_stages(&l, 64);
    end_layer(&l);
    case_end();
  }
  case_begin("gate and product");
  run_others(context);
  case_end();
  group_end();
}

/* Of a config of 8 bytes only cpu_threads is there. */
static void run_short_config(void)
{
  cumoe_context context = NULL;
  const cumoe_context_config config = {.size = 8, .cpu_threads = 2, .debug = 77};
  cumoe_device_info info = {.size = sizeof info};
  if (!group_begin("a short config")) return;
  case_begin("threads");
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &context));
  CHECK_OK(cumoe_context_info(context, &info));
  CHECK(info.multiprocessors == 2);
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
  group_end();
}

int main(int argc, char **argv)
{
  cumoe_context contexts[2];
  test_begin(argc, argv);
  const int count = open_contexts(contexts);
  for (int i = 0; i < count; i++) {
    run_layers(contexts[i]);
    run_filled(contexts[i]);
    close_context(contexts[i]);
  }
  run_short_config();
  return test_end();
}
