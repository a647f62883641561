/* Bulk copies from shared memory to memory (sm_90a): of one thread, in groups. */
#ifndef CUMOE_PTX_STORE_SM90_CUH
#define CUMOE_PTX_STORE_SM90_CUH

#include "device/ptx_sm90.cuh"

/* What of the box lies outside the tensor is not written. */
DEVICE void cp_async_bulk_tensor_4d_store(const void *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                                          const void *shared)
{
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(shared))
               : "memory");
}

DEVICE void cp_async_bulk_commit_group()
{
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Returns when shared memory was read by all groups but the last PENDING. */
template <int PENDING> DEVICE void cp_async_bulk_wait_group_read()
{
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

#endif
