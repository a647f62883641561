/* What the plan of a layer costs the host: plan_layer for an H200, over the layers of shapes.def. Needs no GPU. */
#include <stdio.h>
#include <time.h>

#include "bench.h"
#include "../host/plan.h"

static double now_ns(void)
{
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static double median_ns(const machine *m, const cumoe_moe_desc *d, const layer_call *c)
{
  enum { ROUNDS = 101, CALLS = 100 };
  double samples[ROUNDS];
  int64_t grids = 0;
  for (int r = 0; r < ROUNDS; ++r) {
    const double start = now_ns();
    for (int i = 0; i < CALLS; ++i) grids += plan_layer(m, d, c).steps[STAGE_router].grid;
    samples[r] = (now_ns() - start) / CALLS;
  }
  return grids > 0 ? summary(samples, ROUNDS).median : 0;
}

int main(void)
{
  static const int64_t tokens[] = {1, 8, 32, 128, 512, 2048, 8192};
  machine m;
  machine_init(&m, "NVIDIA H200", 90, 132, 232448);
  printf("plan_layer for an H200, ns, by tokens\n%-24s", "");
  for (size_t i = 0; i < sizeof tokens / sizeof *tokens; ++i) printf(" %7lld", (long long)tokens[i]);
  for (int32_t s = 0; s < shape_count(); ++s) {
    const shape layer = shape_at(s);
    const cumoe_moe_desc d = {.num_experts = layer.experts,
                              .local_experts = layer.experts,
                              .hidden = layer.hidden,
                              .inter = layer.inter,
                              .dtype = CUMOE_BF16,
                              .out_dtype = CUMOE_BF16,
                              .routing = layer.routing};
    printf("\n%-24s", layer.name);
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; ++i) {
      const bound_matrix best = {.major = MAJOR_K, .tmap = true};
      const layer_call c = {.tokens = tokens[i],
                            .up = best,
                            .down = best,
                            .has_router = true,
                            .router_dtype = CUMOE_BF16,
                            .router_tmap = true};
      printf(" %7.0f", median_ns(&m, &d, &c));
    }
  }
  printf("\n");
  return 0;
}
