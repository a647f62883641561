/* Kernels by name, of the rows that every GPU has, and of groups. The shim asks when something is launched (test/shim/runtime.c). */
#include "cuda.h"

#include "attention.h"
#include "backward.h"
#include "device/common.cuh"
#include "encode.h"
#include "ep/ep.h"
#include "masked.h"
#include "repack.h"
#include "scan.h"
#include "train.h"

namespace grid
{
/* together: CTAs of the grid may wait for each other. */
void run(emulated_index grid, unsigned block, void (*kernel)(const void *), const void *args, bool together);
} // namespace grid

#define OPERATION(name, arguments, shape, grid, units) using name##_takes = arguments;
#include "../../host/operations.def"

/* A row of sm_90a is none here. */
#define IF_any(...) __VA_ARGS__
#define IF_sm90(...)

#define ROWS_ALL
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  IF_##arch(extern "C" void VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const op##_takes);)
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  IF_##arch(extern "C" void UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const op##_takes);)
#include "variants.def"

#define MOVE(name) extern "C" void name(const ep_args);
#define MOVES_OF_GROUPS                                                                                                \
  MOVE(cumoe_ep_count)                                                                                                 \
  MOVE(cumoe_ep_slots)                                                                                                 \
  MOVE(cumoe_ep_put)                                                                                                   \
  MOVE(cumoe_ep_wait_tokens)                                                                                           \
  MOVE(cumoe_ep_answer)                                                                                                \
  MOVE(cumoe_ep_wait_answers)
MOVES_OF_GROUPS

template <auto KERNEL, class A> static void call(const void *args)
{
  KERNEL(*static_cast<const A *>(args));
}

#define TEXT(name)  TEXT_(name)
#define TEXT_(name) #name
static const struct {
  const char *name;
  void (*kernel)(const void *);
} kernels[] = {
#define ROWS_ALL
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  IF_##arch({TEXT(VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)),                                    \
             call<VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK), op##_takes>}, )
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  IF_##arch({TEXT(UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)),                                          \
             call<UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES), op##_takes>}, )
#include "variants.def"
#undef MOVE
#define MOVE(name) {#name, call<name, ep_args>},
    MOVES_OF_GROUPS};

extern "C" bool shim_emulate(const char *name, const void *args, const unsigned grid[2], unsigned threads)
{
  const bool of_group = strncmp(name, "cumoe_ep_", 9) == 0;
  for (const auto &k : kernels)
    if (strcmp(k.name, name) == 0) return grid::run({grid[0], grid[1], 1}, threads, k.kernel, args, of_group), true;
  return false;
}
