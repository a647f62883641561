/* Elements of a matrix whose type is known at run time, in double. */
#ifndef CUMOE_ELEMENTS_CUH
#define CUMOE_ELEMENTS_CUH

#include "device/ptx.cuh"
#include "train.h"

DEVICE double get(const matrix &m, int64_t row, int64_t column)
{
  const int64_t at = row * m.ld + column;
  return m.dtype == DT_F32   ? (double)static_cast<const float *>(m.data)[at]
         : m.dtype == DT_F16 ? (double)to_f32(static_cast<const f16 *>(m.data)[at])
                             : (double)to_f32(static_cast<const bf16 *>(m.data)[at]);
}

/* Rounded once. */
DEVICE void put(const matrix &m, int64_t row, int64_t column, double value)
{
  const int64_t at = row * m.ld + column;
  if (m.dtype == DT_F32)
    static_cast<float *>(m.data)[at] = (float)value;
  else if (m.dtype == DT_F16)
    static_cast<f16 *>(m.data)[at] = __double2half(value);
  else
    static_cast<bf16 *>(m.data)[at] = __double2bfloat16(value);
}

DEVICE int64_t id_at(const matrix &m, int64_t i)
{
  return m.dtype == DT_I64 ? static_cast<const int64_t *>(m.data)[i] : static_cast<const int32_t *>(m.data)[i];
}

/* Elements begin .. end - 1 of a row, which unit blockIdx.x has. */
struct run_of_row {
  int64_t row, begin, end;
  DEVICE run_of_row(int64_t cols)
  {
    const int64_t runs = RUNS_IN_ROW(cols);
    row = blockIdx.x / runs;
    begin = (blockIdx.x - row * runs) * NORM_RUN;
    end = min(begin + NORM_RUN, cols);
  }
};

#endif
