/* Weights moved to where kernels read them; kernels/repack.h is the definition. */
#include "cpu.h"
#include "../repack.h"

void cpu_repack(const void *args, int64_t begin, int64_t end)
{
  const repack_args *a = args;
  for (int64_t unit = begin; unit < end; unit++) {
    const repack_unit u = repack_unit_of(a, unit);
    uint32_t *to = (uint32_t *)(a->to + u.e * a->to_stride + ((int64_t)u.n * a->in + u.k) * a->bits / 8);
    for (int32_t i = 0; i < 4; i++) to[i] = repack_word(a, u, u.k + i * (32 / a->bits));
    repack_groups(a, u);
  }
}
