/* What kernels/device/ptx_gradient_sm90.cuh has, done by the CPU: see there. */
#ifndef CUMOE_PTX_GRADIENT_SM90_CUH
#define CUMOE_PTX_GRADIENT_SM90_CUH

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

DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&r)[4])
{
  stmatrix_lane mine = {r, address};
  grid::warp_together(ALL_LANES, &mine, stmatrix_of_warp<false>);
}
DEVICE void sts_64(uint32_t address, float a, float b)
{
  store_shared(address, float2{a, b});
}
DEVICE float2 lds_64(uint32_t address)
{
  return load_shared<float2>(address);
}
DEVICE void sts_32(uint32_t address, uint32_t v)
{
  store_shared(address, v);
}

DEVICE uint64_t wgmma_operand_n_major(const void *shared, int next)
{
  return (uint64_t)(shared_address(shared) >> 4 & 0x3fff) | (uint64_t)(next >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
         1ull << 62;
}
template <class T, int N> struct wgmma_n_major_m64k16 {
  template <int COUNT> static DEVICE void run(float (&d)[COUNT], uint64_t a, uint64_t b, uint32_t add)
  {
    wgmma<T, N, true, true>(d, nullptr, a, b, add != 0);
  }
};

#endif
