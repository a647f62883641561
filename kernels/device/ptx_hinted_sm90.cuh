/* Wrappers of bulk copies with a cache policy (sm_90a). */
#ifndef CUMOE_PTX_HINTED_SM90_CUH
#define CUMOE_PTX_HINTED_SM90_CUH

#include "device/ptx_sm90.cuh"

/* As without a policy (evict_first_policy). */
DEVICE void cp_async_bulk_hinted(void *shared, const void *global, uint32_t bytes, uint64_t *barrier, uint64_t policy)
{
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}

#endif
