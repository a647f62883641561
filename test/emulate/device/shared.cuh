/* Loads and stores of shared memory by address. */
#ifndef CUMOE_EMULATE_SHARED_CUH
#define CUMOE_EMULATE_SHARED_CUH

#include "device/ptx.cuh"

template <class T> DEVICE T load_shared(uint32_t address)
{
  T v;
  grid::require_aligned(at_shared(address), sizeof v);
  memcpy(&v, at_shared(address), sizeof v);
  return v;
}
template <class T> DEVICE void store_shared(uint32_t address, const T &v)
{
  grid::require_aligned(at_shared(address), sizeof v);
  memcpy(at_shared(address), &v, sizeof v);
}
DEVICE uint32_t lds_32(uint32_t address)
{
  return load_shared<uint32_t>(address);
}

#endif
