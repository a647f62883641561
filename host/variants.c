/* Expands kernels/variants.def into the dispatch table. */
#include "variants.h"
#include "internal.h"

_Static_assert((int)DT_F32 == CUMOE_F32 && (int)DT_F16 == CUMOE_F16 && (int)DT_BF16 == CUMOE_BF16 &&
                   (int)DT_U8 == CUMOE_U8 && (int)DT_I32 == CUMOE_I32 && (int)DT_I64 == CUMOE_I64,
               "kernels/args.h and cumoe/types.h number the element types alike");
_Static_assert((int)FAULT_ROUTE == CUMOE_FAULT_ROUTE, "kernels/args.h and cumoe/context.h number the faults alike");

enum { DT_bf16 = DT_BF16, DT_f16 = DT_F16, DT_f32 = DT_F32, DT_x = DT_NONE };

#define ROWS_ALL
#define VARIANT(op, arch, file, form, in, w, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                                    \
  extern const unsigned char cumoe_image_##file[];
#include "../kernels/variants.def"

#define VARIANT(op_, arch_, file, form_, in_, w_, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                               \
  {.name = "cumoe_" #op_ "_" #arch_ "_" #form_ "_" #in_ "_" #w_ "_" #BM "x" #BN "x" #BK,                               \
   .op_name = #op_,                                                                                                    \
   .image = cumoe_image_##file,                                                                                        \
   .op = OP_##op_,                                                                                                     \
   .arch = ARCH_##arch_,                                                                                               \
   .form = FORM_##form_,                                                                                               \
   .in = DT_##in_,                                                                                                     \
   .w = DT_##w_,                                                                                                       \
   .bm = BM,                                                                                                           \
   .bn = BN,                                                                                                           \
   .bk = BK,                                                                                                           \
   .stages = STAGES,                                                                                                   \
   .threads = (WARPS)*32,                                                                                              \
   .ctas = CTAS,                                                                                                       \
   .smem = SMEM},
#define CPU_VARIANT(op_, function)                                                                                     \
  {.name = "cumoe_" #op_ "_cpu", .op_name = #op_, .cpu = function, .op = OP_##op_, .arch = ARCH_cpu, .form = FORM_ref},

const variant variants[] = {
#include "../kernels/variants.def"
};
const int32_t variant_count = sizeof variants / sizeof variants[0];
_Static_assert(sizeof variants / sizeof variants[0] <= MAX_VARIANTS, "raise MAX_VARIANTS");

const char *operation_name(operation op)
{
#define OPERATION(name, arguments, shape, grid, units) [OP_##name] = #name,
  static const char *const names[OP_COUNT] = {
#include "operations.def"
  };
  return names[op];
}

int32_t operation_arg_bytes(operation op)
{
#define OPERATION(name, arguments, shape, grid, units) [OP_##name] = sizeof(arguments),
  static const int32_t bytes[OP_COUNT] = {
#include "operations.def"
  };
  return bytes[op];
}
