/* The CPU device against the oracle: every stage and the layer. The same cases run on CUDA in variants.c. */
#include "cases.h"
#include "cases_gemm.h"
#include "cases_layer.h"
#include "cases_ops.h"

static void run_group(const char *name, void (*cases)(cumoe_context), cumoe_context context)
{
  if (!group_begin("cpu %s", name)) return;
  cases(context);
  group_end();
}

int main(int argc, char **argv)
{
  test_begin(argc, argv);
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
