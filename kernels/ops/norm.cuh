/* Layernorm and rmsnorm of the rows that row_part.cuh holds. */
#ifndef CUMOE_NORM_CUH
#define CUMOE_NORM_CUH

#include "ops/row_part.cuh"

/*
 * Weights or biases of a thread's vectors, T or f32, aligned as rows are or not. EARLY: aligned ones of T, of which
 * AHEAD vectors are loaded before they are needed: the compiler moves no load above the stores of the vector before.
 */
template <class L, bool EARLY> struct parameters {
  using T = typename L::T;
  uint4 raw[EARLY ? L::AHEAD : 1];

  DEVICE void ask(const void *base, int64_t column, int left, float otherwise, int i)
  {
    if (!EARLY || i >= L::VECTORS) return;
    const T *first = static_cast<const T *>(base) + column + i * L::STEP;
    const int here = base ? left - i * L::STEP : 0;
    uint4 &vector = raw[i % L::AHEAD];
    vector = ld_global(first, here >= ELEMENTS<T>);
    load_short<T>(first, here, vector, true);
    if (!base) vector = vector_of<T>(otherwise);
  }

  /* Of type P: one test a vector, not one an element. */
  template <class P>
  DEVICE void load(const void *base, int64_t column, int here, bool aligned, float otherwise,
                   float (&value)[ELEMENTS<T>])
  {
    const P *first = static_cast<const P *>(base) + column;
    if (aligned && here >= ELEMENTS<T>) return load_f32<ELEMENTS<T>>(first, value);
#pragma unroll
    for (int j = 0; j < ELEMENTS<T>; j++) value[j] = j < here ? to_f32(first[j]) : otherwise;
  }

  DEVICE void get(const void *base, int dtype, int64_t column, int left, bool aligned, float otherwise, int i,
                  float (&value)[ELEMENTS<T>])
  {
    if constexpr (EARLY) {
#pragma unroll
      for (int j = 0; j < ELEMENTS<T>; j++) value[j] = element_of<T>(raw[i % L::AHEAD], j);
    } else {
      const int here = base ? left - i * L::STEP : 0;
      if (sizeof(T) == sizeof(float) || dtype == DT_F32)
        load<float>(base, column + i * L::STEP, here, aligned, otherwise, value);
      else
        load<T>(base, column + i * L::STEP, here, aligned, otherwise, value);
    }
  }
};

template <class L, bool EARLY> struct norm_of {
  using T = typename L::T;
  static constexpr bool ALIGNED = EARLY;
  float mean[L::ROWS], factor[L::ROWS]; /* first the sum of the squared differences to the mean */
  float count, w[ELEMENTS<T>], b[ELEMENTS<T>];
  parameters<L, EARLY> weight, bias;

  DEVICE void ask(const norm_args &a, int64_t column, int left, int i)
  {
    weight.ask(a.weight, column, left, 1.f, i);
    bias.ask(a.bias, column, left, 0.f, i);
  }

  DEVICE void take(const norm_args &a, int64_t column, int left, bool aligned, int i)
  {
    weight.get(a.weight, a.weight_dtype, column, left, aligned, 1.f, i, w);
    bias.get(a.bias, a.bias_dtype, column, left, aligned, 0.f, i, b);
  }

  DEVICE void measure(const norm_args &a, row_part<L> &x, exchange<L> &shared)
  {
    const float each = rcp_approx_ftz((float)a.cols);
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) mean[r] = 0;
    if (a.centered) {
#pragma unroll
      for (int r = 0; r < L::ROWS; r++) mean[r] = x.template reduce<add_op>(r, [](float v) { return v; });
      reduce_row<add_op, L>(mean, shared.part[0]);
#pragma unroll
      for (int r = 0; r < L::ROWS; r++) mean[r] *= each;
    }
    x.renew();
#pragma unroll
    for (int r = 0; r < L::ROWS; r++)
      factor[r] = x.template reduce<add_op>(r, [m = mean[r]](float v) { return (v - m) * (v - m); });
    reduce_row<add_op, L>(factor, shared.part[1]);
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) factor[r] = rsqrtf(fmaf(factor[r], each, a.eps));
  }

  /* The same by parts of a row. Chan, Golub, LeVeque 1979: no cancellation, whatever the mean is. */
  DEVICE void begin()
  {
    count = mean[0] = factor[0] = 0;
  }

  DEVICE void add(const norm_args &a, row_part<L> &x)
  {
    if (!a.centered) {
      factor[0] += x.template reduce<add_op>(0, [](float v) { return v * v; });
      return;
    }
    const float more = x.template reduce<add_op>(0, [](float) { return 1.f; }), total = count + more;
    const float part = x.template reduce<add_op>(0, [](float v) { return v; }) / more, distance = part - mean[0];
    factor[0] += x.template reduce<add_op>(0, [=](float v) { return (v - part) * (v - part); });
    factor[0] += distance * distance * (count * (more / total));
    mean[0] += distance * (more / total);
    count = total;
  }

  DEVICE void finish(const norm_args &a, exchange<L> &shared)
  {
    const float each = rcp_approx_ftz((float)a.cols), before = mean[0];
    mean[0] *= count;
    if (a.centered) reduce_row<add_op, L>(mean, shared.part[0]);
    mean[0] *= each;
    factor[0] += count * (before - mean[0]) * (before - mean[0]);
    reduce_row<add_op, L>(factor, shared.part[1]);
    factor[0] = rsqrtf(fmaf(factor[0], each, a.eps));
  }

  DEVICE void change(int r, float (&value)[ELEMENTS<T>]) const
  {
#pragma unroll
    for (int j = 0; j < ELEMENTS<T>; j++) value[j] = fmaf((value[j] - mean[r]) * factor[r], w[j], b[j]);
  }
};

#endif
