/* What kernels/device/ptx_gradient_sm90.cuh has, done by the CPU: see there. */
#ifndef CUMOE_PTX_GRADIENT_SM90_CUH
#define CUMOE_PTX_GRADIENT_SM90_CUH

#include "device/ptx_store_sm90.cuh"
#include "device/shared.cuh"

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
