/* What dealt wants besides (sm_90a): bulk copies with a cache policy, a counter that nobody waits for. */
#ifndef CUMOE_PTX_HINTED_SM90_CUH
#define CUMOE_PTX_HINTED_SM90_CUH

#include "device/ptx_sm90.cuh"

/* As without a policy (evict_first_policy). */
DEVICE void cp_async_bulk_tensor_4d(void *shared, const void *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                                    uint64_t *barrier, uint64_t policy)
{
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}

DEVICE void store_relaxed(float *target, float value)
{
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(target), "f"(value) : "memory");
}

/* Adds one, and returns what was there; all ones become 0. An addition would be used at once: ptxas makes one of those
 * of all lanes, and tells each its own. */
DEVICE uint32_t count_up(uint32_t *counter)
{
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

#endif
