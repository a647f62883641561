/* Elementwise operations: forms flat, and gelu. */
#ifndef CUMOE_FLAT_CUH
#define CUMOE_FLAT_CUH

#include "gemm/activation.cuh"
#include "ops/vectors.cuh"

/* 1 / (1 + 2^x) */
DEVICE float logistic(float x)
{
  return rcp_approx_ftz(1.f + ex2_approx_ftz(x));
}

/*
 * The norm_of distribution's share below x. Its tail beyond z = |x| is t 2^(p(t) - z^2 log2(e) / 2) for t = 1 / (2 +
 * .54 z): erfc's usual form, p by least squares of what is greatest, over all of f32. The powers are those of t - .3,
 * so that sums stay short. Of all floats, x times this is at most .85 (10 + 2 x^2) units of 2^-24 off.
 */
DEVICE float normal_share(float x)
{
  const float t = rcp_approx_ftz(fmaf(.54f, fabsf(x), 2.f)), v = t - .3f;
  float p = -90.0855561f;
  p = fmaf(p, v, 1.87384593f);
  p = fmaf(p, v, 32.3086624f);
  p = fmaf(p, v, 1.95668685f);
  p = fmaf(p, v, -9.68069935f);
  p = fmaf(p, v, -2.7219913f);
  p = fmaf(p, v, 3.38639927f);
  p = fmaf(p, v, 4.85385227f);
  p = fmaf(p, v, -1.07144856f);
  const float tail = ex2_approx_ftz(fmaf(-.5f * LOG2_E * x, x, p));
  return fmaf(-copysignf(t, x), tail, x < 0.f ? 0.f : 1.f);
}

template <int FUNCTION> DEVICE float apply(float x, float other, float factor)
{
  switch (FUNCTION) {
  case EW_ADD: return x + other;
  case EW_MUL: return x * other;
  case EW_SCALE: return factor * x;
  case EW_RELU: return activation<ACT_RELU, true>(0.f, x);
  case EW_SIGMOID: return logistic(-LOG2_E * x);
  case EW_SILU: return x * logistic(-LOG2_E * x);
  case EW_GELU: return x * normal_share(x);
  default: return x * logistic(x * fmaf(-.102943240f * x, x, -2.30220820f)); /* 1 + tanh z = 2 logistic(2 z) */
  }
}

/* Where a unit lies; left 0: past the last one. */
struct unit {
  int64_t row, column;
  int left; /* elements from here to the row's end; more than a unit has need not be right */
};

/* UNITS consecutive ones from the CTA's first on. One division for all, if a row has as many. */
template <class T, int UNITS> struct units_of_cta {
  int64_t in_row, first_row, first;

  DEVICE units_of_cta(const elementwise_args &a)
  {
    in_row = ceil_div(a.cols, (int64_t)ELEMENTS<T>);
    first = (int64_t)blockIdx.x * UNITS;
    first_row = first < in_row ? 0 : first / in_row;
    first -= first_row * in_row;
  }

  DEVICE bool in_one_row() const { return in_row - first >= UNITS; }

  DEVICE unit operator()(const elementwise_args &a, int i) const
  {
    const int64_t at = first + i;
    const int64_t rows = in_row >= UNITS ? at >= in_row : (unsigned)at / (unsigned)in_row;
    unit p = {first_row + rows, (at - rows * in_row) * ELEMENTS<T>, 0};
    if (p.row < a.rows) p.left = (int)min(a.cols - p.column, (int64_t)ELEMENTS<T>);
    return p;
  }
};

/* The same where all lie in one row, as those of a matrix without gaps do: one test a CTA, not one a unit. */
template <class T, int UNITS> struct units_in_row : units_of_cta<T, UNITS> {
  using units_of_cta<T, UNITS>::units_of_cta;

  DEVICE unit operator()(const elementwise_args &a, int i) const
  {
    const int64_t column = this->first * ELEMENTS<T>;
    const int left = (int)min(a.cols - column, (int64_t)UNITS * ELEMENTS<T>);
    return {this->first_row, column + i * ELEMENTS<T>, left - i * ELEMENTS<T>};
  }
};

/* Whole units, by 16-byte accesses. */
template <class T, int EACH, int THREADS, int FUNCTION, class UNIT_SOURCE>
DEVICE void elementwise_whole(const elementwise_args &a, const UNIT_SOURCE &units)
{
  constexpr bool TWO = FUNCTION == EW_ADD || FUNCTION == EW_MUL;
  const T *first = static_cast<const T *>(a.a), *second = static_cast<const T *>(a.b);
  unit at[EACH];
  uint4 x[EACH], other[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    at[i] = units(a, i * THREADS + threadIdx.x);
    x[i] = load_whole<T>(first + at[i].row * a.a_ld + at[i].column, at[i].left, true);
    if (TWO) other[i] = load_whole<T>(second + at[i].row * a.b_ld + at[i].column, at[i].left, true);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    float y[ELEMENTS<T>];
#pragma unroll
    for (int j = 0; j < ELEMENTS<T>; j++)
      y[j] = apply<FUNCTION>(element_of<T>(x[i], j), TWO ? element_of<T>(other[i], j) : 0.f, a.factor);
    if (at[i].left >= ELEMENTS<T>)
      st_global(static_cast<T *>(a.y) + at[i].row * a.y_ld + at[i].column, pack_vector<T>(y));
  }
}

/* of(a function of a.function's number), by one way for each. */
template <bool GELU, class F> DEVICE void each_function(const elementwise_args &a, F of)
{
  if (GELU) return of.template operator()<EW_GELU>();
  switch (a.function) {
  case EW_ADD: return of.template operator()<EW_ADD>();
  case EW_MUL: return of.template operator()<EW_MUL>();
  case EW_SCALE: return of.template operator()<EW_SCALE>();
  case EW_RELU: return of.template operator()<EW_RELU>();
  case EW_SIGMOID: return of.template operator()<EW_SIGMOID>();
  case EW_SILU: return of.template operator()<EW_SILU>();
  default: return of.template operator()<EW_GELU_TANH>();
  }
}

template <class T, int EACH, int THREADS, class UNIT_SOURCE> struct whole_units {
  const elementwise_args &a;
  const UNIT_SOURCE &units;

  template <int FUNCTION> DEVICE void operator()() const { elementwise_whole<T, EACH, THREADS, FUNCTION>(a, units); }
};

/* y of a unit of x, and of `other`. */
template <class T> struct one_unit {
  const uint4 &x, &other;
  float factor;
  float (&y)[ELEMENTS<T>];

  template <int FUNCTION> DEVICE void operator()() const
  {
#pragma unroll
    for (int j = 0; j < ELEMENTS<T>; j++) y[j] = apply<FUNCTION>(element_of<T>(x, j), element_of<T>(other, j), factor);
  }
};

/* What is left, element by element: short units, or all. All loads are in flight at once; then every unit passes the
 * same code, of each function once: as registers have no index, units move up to [0]. */
template <class T, bool GELU, int EACH, int THREADS, class UNIT_SOURCE>
DEVICE void elementwise_rest(const elementwise_args &a, const UNIT_SOURCE &units)
{
  const bool two = !GELU && (a.function == EW_ADD || a.function == EW_MUL);
  const T *first = static_cast<const T *>(a.a), *second = static_cast<const T *>(a.b);
  const auto here = [&](const unit &at) { return a.aligned && at.left >= ELEMENTS<T> ? 0 : at.left; };
  uint4 x[EACH] = {}, other[EACH] = {};
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const unit at = units(a, i * THREADS + threadIdx.x);
    load_short<T>(first + at.row * a.a_ld + at.column, here(at), x[i], false);
    if (two) load_short<T>(second + at.row * a.b_ld + at.column, here(at), other[i], false);
  }
#pragma unroll 1
  for (int i = 0; i < EACH; i++) {
    const unit at = units(a, i * THREADS + threadIdx.x);
    float y[ELEMENTS<T>];
    each_function<GELU>(a, one_unit<T>{x[0], other[0], a.factor, y});
    store_vector<T>(static_cast<T *>(a.y) + at.row * a.y_ld + at.column, here(at), y, false);
#pragma unroll
    for (int j = 1; j < EACH; j++) x[j - 1] = x[j], other[j - 1] = other[j];
  }
}

template <class T, bool GELU, int UNITS, int THREADS> DEVICE void elementwise(const elementwise_args &a)
{
  constexpr int EACH = UNITS / THREADS;
  const units_in_row<T, UNITS> one(a);
  const units_of_cta<T, UNITS> any(a);
  if (a.aligned && one.in_one_row())
    each_function<GELU>(a, whole_units<T, EACH, THREADS, units_in_row<T, UNITS>>{a, one});
  else if (a.aligned)
    each_function<GELU>(a, whole_units<T, EACH, THREADS, units_of_cta<T, UNITS>>{a, any});
  if (!a.aligned || a.cols % ELEMENTS<T> != 0) elementwise_rest<T, GELU, EACH, THREADS>(a, any);
}

template <class T, int UNITS, int, int LANES, int, int THREADS, int> DEVICE void form_flat(const elementwise_args &a)
{
  static_assert(LANES == 1, "a unit is a thread's");
  elementwise<T, false, UNITS, THREADS>(a);
}

template <class T, int UNITS, int, int LANES, int, int THREADS, int> DEVICE void form_gelu(const elementwise_args &a)
{
  static_assert(LANES == 1, "a unit is a thread's");
  elementwise<T, true, UNITS, THREADS>(a);
}

#endif
