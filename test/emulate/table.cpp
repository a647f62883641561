/* Kernels by name, of the whole table and of groups. The shim asks when something is launched (test/shim/runtime.c). */
#include "cuda.h"

#include "attention.h"
#include "backward.h"
#include "dealt.h"
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
void run(emulated_index grid, unsigned cluster, unsigned block, void (*kernel)(const void *), const void *args,
         bool together);
} // namespace grid

#define OPERATION(name, arguments, shape, grid, units) using name##_takes = arguments;
#include "../../host/operations.def"

/* What a kernel takes: of form wgmma tensor maps besides. */
template <class A> struct with_maps;
template <> struct with_maps<gemm_args> {
  using type = gemm_sm90_args;
};
template <> struct with_maps<gemm_sm90_args> {
  using type = gemm_sm90_args;
};
template <> struct with_maps<down_activated_args> {
  using type = down_activated_args;
};
template <> struct with_maps<router_args> {
  using type = router_sm90_args;
};
template <> struct with_maps<weight_gradient_args> {
  using type = weight_gradient_sm90_args;
};
#define TAKES_wgmma(op)  with_maps<op##_takes>::type
#define TAKES_tile(op)   op##_takes
#define TAKES_ntile(op)  op##_takes
#define TAKES_thin(op)   op##_takes
#define TAKES_fma(op)    op##_takes
#define TAKES_unpack(op) op##_takes
#define TAKES_stream(op) op##_takes
#define TAKES_mixed(op)  op##_takes
#define TAKES_fixed(op)  op##_takes
#define TAKES_few(op)    op##_takes
#define TAKES_dealt(op)  few_sm90_args
#define TAKES_drawn(op)  op##_takes
#define TAKES_dot(op)    op##_takes

#define ROWS_ALL
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" void VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const TAKES_##form(op));
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" void UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const op##_takes);
#include "variants.def"

#define MOVE(name)             extern "C" void name(const ep_args);
#define MOVE_WITH(name, TAKES) extern "C" void name(const TAKES, const ep_args);
#include "ep/moves.def"

/* Of a captured launch they lie where the graph keeps them, not aligned as tensor maps want. */
template <class A> static A copy_of(const void *args)
{
  A copy;
  memcpy(&copy, args, sizeof copy);
  return copy;
}

template <auto KERNEL, class A> static void call(const void *args)
{
  KERNEL(copy_of<A>(args));
}

template <class A> struct both {
  A of;
  ep_args a;
};
template <auto KERNEL, class A> static void call_with(const void *args)
{
  const auto b = copy_of<both<A>>(args);
  KERNEL(b.of, b.a);
}

#define TEXT(name)  TEXT_(name)
#define TEXT_(name) #name
static struct {
  const char *name;
  void (*kernel)(const void *);
  unsigned cluster;
  bool ran;
} kernels[] = {
#define ROWS_ALL
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  {TEXT(VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)),                                              \
   call<VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK), TAKES_##form(op)>, CLUSTER},
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  {TEXT(UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)),                                                    \
   call<UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES), op##_takes>, CLUSTER},
#include "variants.def"
#define MOVE(name)             {#name, call<name, ep_args>, 1},
#define MOVE_WITH(name, TAKES) {#name, call_with<name, TAKES>, 1},
#include "ep/moves.def"
};

/* KERNELS_RUN in the environment: a file that gets the names of those that were. */
__attribute__((destructor)) static void list_kernels()
{
  const char *to = getenv("KERNELS_RUN");
  FILE *file = to ? fopen(to, "a") : nullptr;
  if (!file) return;
  for (const auto &k : kernels)
    if (k.ran) fprintf(file, "%s\n", k.name);
  fclose(file);
}

extern "C" bool shim_emulate(const char *name, const void *args, const unsigned grid[2], unsigned threads)
{
  /* Where a CTA waits for others of its grid there are few; of many the last one to come waits. */
  const bool of_group = strncmp(name, "cumoe_ep_", 9) == 0 && grid[0] * grid[1] <= 4 * EP_FLAG_WORDS;
  for (auto &k : kernels) {
    if (strcmp(k.name, name) != 0) continue;
    k.ran = true;
    grid::run({grid[0], grid[1], 1}, k.cluster, threads, k.kernel, args, of_group);
    return true;
  }
  return false;
}
