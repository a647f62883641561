/* Element types under the names of variants.def, and their vectors to and from f32. */
#ifndef CUMOE_DTYPE_CUH
#define CUMOE_DTYPE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/common.cuh"

using f32 = float;
using f16 = __half;
using bf16 = __nv_bfloat16;
using s32 = int32_t;

/* Bytes of codes: one of 8 bits, or two of 4, the lower nibble first. */
struct e4m3 {
  uint8_t code;
};
struct s8 {
  int8_t code;
};
struct u4 {
  uint8_t codes;
};
struct af4 {
  uint8_t codes;
};
struct mx4 {
  uint8_t codes;
};
struct nv4 {
  uint8_t codes;
};

/* A row of formats.def: elements of 16 bytes, what sums are in, how a weight becomes the type that is multiplied. */
template <class W> struct operand;
#define FORMAT(name, DTYPE, BITS_, K_PER_SCALE_, SCALE_, ACCUMULATOR)                                                  \
  template <> struct operand<name> {                                                                                   \
    static constexpr int BITS = BITS_, PER_16 = 128 / BITS, K_PER_SCALE = K_PER_SCALE_;                                \
    static constexpr element_type SCALE = DT_##SCALE_;                                                                 \
    using accumulator = ACCUMULATOR;                                                                                   \
  };
#include "formats.def"

template <class A, class B> constexpr bool same_type = false;
template <class A> constexpr bool same_type<A, A> = true;

/* 16 bytes of weights as the X that are multiplied: themselves, where the types are one. */
template <class X, class W> DEVICE const uint4 &unpack(const uint4 &raw)
{
  static_assert(same_type<X, W>, "no unpacking for this format yet");
  return raw;
}

DEVICE float to_f32(f32 value)
{
  return value;
}
DEVICE float to_f32(f16 value)
{
  return __half2float(value);
}
DEVICE float to_f32(bf16 value)
{
  return __bfloat162float(value);
}

template <class T> DEVICE T from_f32(float value);
template <> DEVICE f32 from_f32<f32>(float value)
{
  return value;
}
template <> DEVICE f16 from_f32<f16>(float value)
{
  return __float2half_rn(value);
}
template <> DEVICE bf16 from_f32<bf16>(float value)
{
  return __float2bfloat16_rn(value);
}

/* Two elements in one register, the first in the low half. */
template <class T> DEVICE uint32_t pack_pair(float low, float high);
template <> DEVICE uint32_t pack_pair<f16>(float low, float high)
{
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&pair);
}
template <> DEVICE uint32_t pack_pair<bf16>(float low, float high)
{
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&pair);
}

template <class T> DEVICE float2 unpack_pair(uint32_t pair);
template <> DEVICE float2 unpack_pair<f16>(uint32_t pair)
{
  return __half22float2(*reinterpret_cast<__half2 *>(&pair));
}
template <> DEVICE float2 unpack_pair<bf16>(uint32_t pair)
{
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/* The widest register vector that N bytes can be moved in (N a power of two or a multiple of 16). */
template <int BYTES> struct bytes_vector {
  using type = uint4;
};
template <> struct bytes_vector<2> {
  using type = uint16_t;
};
template <> struct bytes_vector<4> {
  using type = uint32_t;
};
template <> struct bytes_vector<8> {
  using type = uint2;
};

/* N consecutive elements as f32, by the widest loads there are: `source` is aligned to min(N elements, 16 bytes). */
template <int N, class T> DEVICE void load_f32(const T *source, float (&value)[N])
{
  using vector = typename bytes_vector<N * sizeof(T)>::type;
  constexpr int VECTORS = N * sizeof(T) / sizeof(vector), EACH = N / VECTORS;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    vector raw = reinterpret_cast<const vector *>(source)[v];
#pragma unroll
    for (int i = 0; i < EACH; i++) value[v * EACH + i] = to_f32(reinterpret_cast<T *>(&raw)[i]);
  }
}

/* Rounds N consecutive elements; alignment as above. */
template <int N, class T> DEVICE void store_f32(T *target, const float (&value)[N])
{
  using vector = typename bytes_vector<N * sizeof(T)>::type;
  constexpr int VECTORS = N * sizeof(T) / sizeof(vector), EACH = N / VECTORS;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    vector raw;
#pragma unroll
    for (int i = 0; i < EACH; i++) reinterpret_cast<T *>(&raw)[i] = from_f32<T>(value[v * EACH + i]);
    reinterpret_cast<vector *>(target)[v] = raw;
  }
}

/* Dense types known only at run time; the host lets no other pass. */
DEVICE float load_any(const void *base, int64_t index, int dtype)
{
  float value;
  switch (dtype) {
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)
#define DENSE(name, DTYPE, BITS)                                                                                       \
  case DT_##DTYPE:                                                                                                     \
    value = to_f32(static_cast<const name *>(base)[index]);                                                            \
    break;
#include "formats.def"
  default: __builtin_unreachable();
  }
  return value;
}

template <int N> DEVICE void load_any(const void *base, int64_t index, int dtype, float (&value)[N])
{
  switch (dtype) {
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)
#define DENSE(name, DTYPE, BITS)                                                                                       \
  case DT_##DTYPE:                                                                                                     \
    load_f32<N>(static_cast<const name *>(base) + index, value);                                                       \
    break;
#include "formats.def"
  default: __builtin_unreachable();
  }
}

#endif
