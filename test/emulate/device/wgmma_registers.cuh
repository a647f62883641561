/* What kernels/device/wgmma_registers.cuh has, done by the CPU: see there. */
#ifndef CUMOE_WGMMA_REGISTERS_CUH
#define CUMOE_WGMMA_REGISTERS_CUH

#include "device/ptx_sm90.cuh"
#include "device/shared.cuh"

DEVICE uint4 lds_128(uint32_t address)
{
  return load_shared<uint4>(address);
}
DEVICE void sts_32(uint32_t address, uint32_t v)
{
  store_shared(address, v);
}
DEVICE void sts_128(uint32_t address, const uint4 &v)
{
  store_shared(address, v);
}
DEVICE void cp_async_ca_8(uint32_t shared, const void *global, int bytes)
{
  grid::require_aligned(at_shared(shared), 8);
  grid::require_aligned(global, 8);
  grid::copy_later(at_shared(shared), global, bytes, 8);
}

DEVICE uint32_t multiply_anew(uint32_t a, uint32_t b)
{
  return a * b;
}

template <class T> DEVICE uint32_t mul_pairs(uint32_t a, uint32_t b)
{
  const float2 x = unpack_pair<T>(a), y = unpack_pair<T>(b);
  return pack_pair<T>(x.x * y.x, x.y * y.y);
}

template <class T, int N> struct wgmma_registers_m64k16 {
  template <int COUNT> static DEVICE void run(float (&d)[COUNT], const uint32_t (&a)[4], uint32_t b)
  {
    wgmma<T, N, false, false>(d, a, 0, 0x40000040ull << 32 | b, true);
  }
};
template <int N> struct wgmma_registers_m64k32_s8 {
  template <int COUNT> static DEVICE void run(int32_t (&d)[COUNT], const uint32_t (&a)[4], uint32_t b, bool add)
  {
    wgmma<s8, N, false, false>(d, a, 0, 0x40000040ull << 32 | b, add);
  }
};
template <int N> struct wgmma_registers_m64k32_e4m3 {
  template <int STRIDE> static DEVICE void run(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b, bool add)
  {
    wgmma<e4m3, N, false, false>(d, a, 0, (uint64_t)(1 << 30 | STRIDE >> 4) << 32 | b, add);
  }
};

#endif
