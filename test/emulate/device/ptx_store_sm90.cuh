/* What kernels/device/ptx_store_sm90.cuh has, done by the CPU: see there. */
#ifndef CUMOE_PTX_STORE_SM90_CUH
#define CUMOE_PTX_STORE_SM90_CUH

#include "device/ptx_sm90.cuh"
#include "device/shared.cuh"

DEVICE void cp_async_bulk_tensor_4d_store(const void *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                                          const void *shared)
{
  const int32_t at[] = {c0, c1, c2, c3};
  const box_walk box(map, at, 4);
  unsigned char *from = static_cast<unsigned char *>(const_cast<void *>(shared));
  grid::require_aligned(from, 128);
  grid::group_later(
      [=] {
        for (int i = 0; i < box.count; i++)
          if (box.element(i)) memcpy(box.element(i), box.place(from, i), (size_t)box.bytes);
      },
      false);
}
DEVICE void cp_async_bulk_commit_group()
{
  grid::commit_group(false);
}
template <int PENDING> DEVICE void cp_async_bulk_wait_group_read()
{
  grid::await_groups(PENDING, false);
}

#endif
