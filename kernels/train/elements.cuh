/*
 * Elements of a matrix whose type is known at run time, one or a vector at a time, in double or f32. The views of
 * training promise alignment to one element alone: a vector that does not lie aligned, or ends behind its row, is read
 * and written by elements.
 */
#ifndef CUMOE_ELEMENTS_CUH
#define CUMOE_ELEMENTS_CUH

#include "device/dtype.cuh"
#include "device/ptx.cuh"
#include "train.h"

/* ---- one ---- */

DEVICE double get(const matrix &m, int64_t row, int64_t column)
{
  return (double)load_any(m.data, row * m.ld + column, m.dtype);
}

/* Rounded once. */
template <class T, class R> DEVICE T rounded(R value)
{
  if constexpr (same_type<R, float>)
    return from_f32<T>(value);
  else if constexpr (same_type<T, f16>)
    return __double2half(value);
  else if constexpr (same_type<T, bf16>)
    return __double2bfloat16(value);
  else
    return (float)value;
}

DEVICE void put(const matrix &m, int64_t row, int64_t column, double value)
{
  const int64_t at = row * m.ld + column;
  if (m.dtype == DT_F32)
    static_cast<float *>(m.data)[at] = (float)value;
  else if (m.dtype == DT_F16)
    static_cast<f16 *>(m.data)[at] = rounded<f16>(value);
  else
    static_cast<bf16 *>(m.data)[at] = rounded<bf16>(value);
}

DEVICE int64_t id_at(const matrix &m, int64_t i)
{
  return m.dtype == DT_I64 ? static_cast<const int64_t *>(m.data)[i] : static_cast<const int32_t *>(m.data)[i];
}

/* ---- vectors ---- */

enum { VECTOR = 4 };

/* Columns begin .. end - 1. */
struct span {
  int64_t begin, end;
};

/* `work`, by the threads of a CTA in turn, on the vectors of a span; the last may be short. */
template <int THREADS, class F> DEVICE void for_vectors(span all, F work)
{
  for (int64_t c = all.begin + VECTOR * (int)threadIdx.x; c < all.end; c += VECTOR * THREADS)
    work(span{c, min(c + VECTOR, all.end)});
}

DEVICE bool is_whole(const matrix &m, int64_t at, int count)
{
  const int64_t bytes = m.dtype == DT_F32 ? 4 : 2;
  return count == VECTOR && ((reinterpret_cast<intptr_t>(m.data) + at * bytes) & (VECTOR * bytes - 1)) == 0;
}

/* A vector as it lies in memory: two or four words. Fetched apart from its conversion, which depends on the type and
 * would wait for each load before the next one is asked for. */
struct __align__(16) raw_vector
{
  uint32_t word[VECTOR];
};

/* What is not there is 0, of a span that lies behind the row all of it. */
DEVICE raw_vector fetch(const matrix &m, int64_t row, span columns)
{
  const int64_t at = row * m.ld + columns.begin;
  const int count = (int)(columns.end - columns.begin);
  const uint32_t *words = static_cast<const uint32_t *>(m.data) + at;
  const uint16_t *halves = static_cast<const uint16_t *>(m.data) + at;
  raw_vector v = {};
  if (is_whole(m, at, count) && m.dtype == DT_F32) {
    const uint4 all = *reinterpret_cast<const uint4 *>(words);
    v = {all.x, all.y, all.z, all.w};
  } else if (is_whole(m, at, count)) {
    const uint2 all = *reinterpret_cast<const uint2 *>(halves);
    v = {all.x, all.y};
  } else if (m.dtype == DT_F32) {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v.word[i] = i < count ? words[i] : 0;
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v.word[i / 2] |= (i < count ? (uint32_t)halves[i] : 0) << i % 2 * 16;
  }
  return v;
}

template <class R> DEVICE void get_values(R (&value)[VECTOR], const raw_vector &v, int dtype)
{
  float of[VECTOR];
  load_any(&v, 0, dtype, of);
#pragma unroll
  for (int i = 0; i < VECTOR; i++) value[i] = (R)of[i];
}

template <class R> DEVICE void get_vector(R (&value)[VECTOR], const matrix &m, int64_t row, span columns)
{
  get_values(value, fetch(m, row, columns), m.dtype);
}

/* `work`, as by for_vectors, with what `bring` fetches of a span: asked for while the one before is worked on. So no
 * span of the thread's may be stored to where a later one lies. */
template <int THREADS, class B, class F> DEVICE void for_fetched_vectors(span all, B bring, F work)
{
  const int64_t first = all.begin + VECTOR * (int)threadIdx.x;
  span now = {first, min(first + VECTOR, all.end)};
  auto here = bring(now);
  while (now.begin < all.end) {
    const int64_t begin = now.begin + VECTOR * THREADS;
    const span next = {begin, min(begin + VECTOR, all.end)};
    const auto following = bring(next);
    work(now, here);
    here = following;
    now = next;
  }
}

template <class T, class R> DEVICE void put_to(T *to, bool whole, int count, const R (&value)[VECTOR])
{
  using vector = typename bytes_vector<VECTOR * sizeof(T)>::type;
  vector raw;
  T *of = reinterpret_cast<T *>(&raw);
#pragma unroll
  for (int i = 0; i < VECTOR; i++) of[i] = rounded<T>(value[i]);
  if (whole) {
    *reinterpret_cast<vector *>(to) = raw;
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
      if (i < count) to[i] = of[i];
  }
}

/* Rounded once. */
template <class R> DEVICE void put_vector(const R (&value)[VECTOR], const matrix &m, int64_t row, span columns)
{
  const int64_t at = row * m.ld + columns.begin;
  const int count = (int)(columns.end - columns.begin);
  const bool whole = is_whole(m, at, count);
  if (m.dtype == DT_F32)
    put_to(static_cast<float *>(m.data) + at, whole, count, value);
  else if (m.dtype == DT_F16)
    put_to(static_cast<f16 *>(m.data) + at, whole, count, value);
  else
    put_to(static_cast<bf16 *>(m.data) + at, whole, count, value);
}

/* What a function of elements of this type is computed in: `work` gets a number of it. Conversions to double and
 * functions in it are what bounds a kernel of 16-bit types otherwise, whose rounding is larger than f32's by far. */
template <class F> DEVICE void in_type_of(const matrix &m, F work)
{
  if (m.dtype == DT_F32)
    work(double());
  else
    work(float());
}

/* What unit blockIdx.x has of a row: NORM_RUN elements. */
struct run_of_row {
  int64_t row;
  span columns;
  DEVICE run_of_row(int64_t cols)
  {
    const int64_t runs = RUNS_IN_ROW(cols);
    row = blockIdx.x / runs;
    const int64_t begin = (blockIdx.x - row * runs) * NORM_RUN;
    columns = {begin, min(begin + NORM_RUN, cols)};
  }
};

#endif
