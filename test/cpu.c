/* The CPU device against the oracle: every stage and the layer. The same cases run on CUDA in variants.c. White box where the
 * order of the threads is what matters. */
#include "cases.h"
#include "cases_gemm.h"
#include "cases_layer.h"
#include "cases_ops.h"

#include "../kernels/cpu/cpu.h"

#include <math.h>

static void run_group(const char *name, void (*cases)(cumoe_context), cumoe_context context)
{
  if (!group_begin("cpu %s", name)) return;
  cases(context);
  group_end();
}

/* A thread may be done with the last tokens before another one begins with the first. */
static void test_count_before_data(void)
{
  enum { T = 16, E = 8, K = 2 };
  float logits[T * E], weights[T * K];
  int32_t ids[T * K], present = T + 1;
  uint64_t record = 0;
  uint32_t mirror = 0;
  if (!group_begin("cpu: a count before data of the tokens")) return;
  case_begin("the last tokens first");
  for (int i = 0; i < T * E; i++) logits[i] = NAN;
  const gate_args a = {.logits = logits,
                       .ids = ids,
                       .weights = weights,
                       .logits_ld = E,
                       .ids_ld = K,
                       .weights_ld = K,
                       .tokens = {T, &present},
                       .experts = E,
                       .logits_dtype = DT_F32,
                       .ids_dtype = DT_I32,
                       .top_k = K,
                       .routed_scale = 1,
                       .fault = {&record, &mirror}};
  cpu_gate(&a, T / 2, T);
  cpu_gate(&a, 0, T / 2);
  CHECK_MSG(record >> 56 == FAULT_TOKEN_COUNT && mirror == 1, "fault %d", (int)(record >> 56));
  case_end();
  group_end();
}

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  test_count_before_data();
  cumoe_context context = open_context(CUMOE_DEVICE_CPU);
  if (context) {
    run_group("router", cases_router, context);
    run_group("gate", cases_gate, context);
    run_group("map", cases_map, context);
    run_group("up", cases_up, context);
    run_group("down", cases_down, context);
    run_group("combine", cases_combine, context);
    run_group("layer", cases_layer, context);
    run_group("elementwise", cases_elementwise, context);
    run_group("softmax", cases_softmax, context);
    run_group("norm", cases_norm, context);
    close_context(context);
  }
  return test_end();
}
