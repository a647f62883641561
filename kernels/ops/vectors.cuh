/* What the simple operations share: 16-byte vectors of a row. */
#ifndef CUMOE_VECTORS_CUH
#define CUMOE_VECTORS_CUH

#include "device/ptx.cuh"

/* Elements of a 16-byte vector. */
template <class T> constexpr int ELEMENTS = 16 / (int)sizeof(T);

/*
 * Whole vectors are asked for first, all of a thread; then the short ones, element by element, which has to wait.
 * `left`: elements from here to the row's end, negative past it. It is compared as it is, never clamped: of
 * max(min(left, ELEMENTS), 0) == ELEMENTS, ptxas 13.0 for sm_90a takes the answer from a predicate of VIMNMX.RELU that
 * means something else, and rows were overrun. `aligned`: whether 16-byte accesses are possible; if not, none is whole.
 */
template <class T> DEVICE uint4 load_whole(const T *source, int left, bool aligned)
{
  return ld_global_no_allocate(source, aligned && left >= ELEMENTS<T>);
}

template <class T> DEVICE void load_short(const T *source, int left, uint4 &raw, bool aligned)
{
  if (left <= 0 || (aligned && left >= ELEMENTS<T>)) return;
#pragma unroll
  for (int i = 0; i < ELEMENTS<T>; i++)
    if (i < left) reinterpret_cast<T *>(&raw)[i] = source[i];
}

/* By pairs: of a half taken out alone, the upper one costs an instruction more. */
template <class T> DEVICE float element_of(const uint4 &raw, int i)
{
  const uint32_t *words = reinterpret_cast<const uint32_t *>(&raw);
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(words[i]);
  } else {
    const float2 pair = unpack_pair<T>(words[i / 2]);
    return i % 2 ? pair.y : pair.x;
  }
}

template <class T> DEVICE uint4 pack_vector(const float (&value)[ELEMENTS<T>])
{
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    if constexpr (sizeof(T) == 4)
      word[i] = __float_as_uint(value[i]);
    else
      word[i] = pack_pair<T>(value[2 * i], value[2 * i + 1]);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

template <class T> DEVICE void store_vector(T *target, int left, const float (&value)[ELEMENTS<T>], bool aligned)
{
  if (left <= 0) return;
  if (aligned && left >= ELEMENTS<T>) return st_global(target, pack_vector<T>(value));
#pragma unroll
  for (int i = 0; i < ELEMENTS<T>; i++)
    if (i < left) target[i] = from_f32<T>(value[i]);
}

template <class T> DEVICE uint4 vector_of(float value)
{
  uint32_t word = __float_as_uint(value);
  if constexpr (sizeof(T) == 2) word = pack_pair<T>(value, value);
  return make_uint4(word, word, word, word);
}

constexpr float LOG2_E = 1.44269504f;

#endif
