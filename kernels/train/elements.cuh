/*
 * Elements of a matrix whose type is known at run time, one or a vector at a time, in double or f32. The views of
 * training promise alignment to one element alone: a vector that does not lie aligned, or ends behind its row, is read
 * and written by elements.
 */
#ifndef CUMOE_ELEMENTS_CUH
#define CUMOE_ELEMENTS_CUH

#include "device/ptx.cuh"
#include "train.h"

/* ---- one ---- */

DEVICE double get(const matrix &m, int64_t row, int64_t column)
{
  const int64_t at = row * m.ld + column;
  return m.dtype == DT_F32   ? (double)static_cast<const float *>(m.data)[at]
         : m.dtype == DT_F16 ? (double)to_f32(static_cast<const f16 *>(m.data)[at])
                             : (double)to_f32(static_cast<const bf16 *>(m.data)[at]);
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

template <class T> DEVICE bool is_whole(const T *at, int count)
{
  return count == VECTOR && reinterpret_cast<uintptr_t>(at) % (VECTOR * sizeof(T)) == 0;
}

/* What is not there is 0. */
template <class T, class R> DEVICE void get_from(const T *from, int count, R (&value)[VECTOR])
{
  float of[VECTOR];
  if (is_whole(from, count)) {
    load_f32<VECTOR>(from, of);
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) of[i] = i < count ? to_f32(from[i]) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < VECTOR; i++) value[i] = (R)of[i];
}

template <class T, class R> DEVICE void put_to(T *to, int count, const R (&value)[VECTOR])
{
  using vector = typename bytes_vector<VECTOR * sizeof(T)>::type;
  vector raw;
  T *of = reinterpret_cast<T *>(&raw);
#pragma unroll
  for (int i = 0; i < VECTOR; i++) of[i] = rounded<T>(value[i]);
  if (is_whole(to, count)) {
    *reinterpret_cast<vector *>(to) = raw;
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
      if (i < count) to[i] = of[i];
  }
}

template <class R> DEVICE void get_vector(R (&value)[VECTOR], const matrix &m, int64_t row, span columns)
{
  const int64_t at = row * m.ld + columns.begin;
  const int count = (int)(columns.end - columns.begin);
  if (m.dtype == DT_F32)
    get_from(static_cast<const float *>(m.data) + at, count, value);
  else if (m.dtype == DT_F16)
    get_from(static_cast<const f16 *>(m.data) + at, count, value);
  else
    get_from(static_cast<const bf16 *>(m.data) + at, count, value);
}

/* Rounded once. */
template <class R> DEVICE void put_vector(const R (&value)[VECTOR], const matrix &m, int64_t row, span columns)
{
  const int64_t at = row * m.ld + columns.begin;
  const int count = (int)(columns.end - columns.begin);
  if (m.dtype == DT_F32)
    put_to(static_cast<float *>(m.data) + at, count, value);
  else if (m.dtype == DT_F16)
    put_to(static_cast<f16 *>(m.data) + at, count, value);
  else
    put_to(static_cast<bf16 *>(m.data) + at, count, value);
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
