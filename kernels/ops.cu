/*
 * Elementwise operations, softmax and norms. All are bound by memory: a thread has four 16-byte loads in flight (add and
 * mul: eight), and a row that fits into the registers of its CTA is read once.
 *
 * Which thread holds which element depends on the shape alone: where 16-byte accesses are not possible, the same elements
 * move one by one, and the bits of the result stay what they are.
 */
#include "act.cuh"
#include "mma.cuh"

/* Elements of a 16-byte packet. */
template <class T> constexpr int SIZE = 16 / (int)sizeof(T);

/* ---- packets ---- */

/*
 * Whole packets are asked for first, all of a thread; then the short ones, element by element, which has to wait. `left`:
 * elements from here to the row's end, negative past it. It is compared as it is, never clamped: of
 * max(min(left, SIZE), 0) == SIZE, ptxas 13.0 for sm_90a takes the answer from a predicate of VIMNMX.RELU that means something
 * else, and rows were overrun.
 */
template <class T, bool ALIGNED> DEVICE uint4 load_whole(const T *source, int left)
{
  return ld_global_no_allocate(source, ALIGNED && left >= SIZE<T>);
}

template <class T, bool ALIGNED> DEVICE void load_short(const T *source, int left, uint4 &raw)
{
  if (left <= 0 || (ALIGNED && left >= SIZE<T>)) return;
#pragma unroll
  for (int i = 0; i < SIZE<T>; i++)
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

template <class T, bool ALIGNED> DEVICE void store_packet(T *target, int left, const float (&value)[SIZE<T>])
{
  if (left <= 0) return;
  if (ALIGNED && left >= SIZE<T>) return store_f32<SIZE<T>>(target, value);
#pragma unroll
  for (int i = 0; i < SIZE<T>; i++)
    if (i < left) target[i] = from_f32<T>(value[i]);
}

/* 2^x to 2^-22 of itself; below 2^-126 it is 0. */
DEVICE float power_of_two(float x)
{
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* To 2^-23 of itself; 0 from 2^126 on. */
DEVICE float reciprocal(float x)
{
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* ---- elementwise ---- */

constexpr float LOG2_E = 1.44269504f;

/* 1 / (1 + 2^x) */
DEVICE float logistic(float x)
{
  return reciprocal(1.f + power_of_two(x));
}

/*
 * The normal distribution's share below x. Its tail beyond z = |x| is t 2^(p(t) - z^2 log2(e) / 2) for t = 1 / (2 + .54 z): erfc's
 * usual form, p by least squares of what is greatest, over all of f32. The powers are those of t - .3, so that sums stay short.
 * Of all floats, x times this is at most .85 (10 + 2 x^2) units of 2^-24 off.
 */
DEVICE float normal_share(float x)
{
  const float t = reciprocal(fmaf(.54f, fabsf(x), 2.f)), v = t - .3f;
  float p = -90.0855561f;
  p = fmaf(p, v, 1.87384593f);
  p = fmaf(p, v, 32.3086624f);
  p = fmaf(p, v, 1.95668685f);
  p = fmaf(p, v, -9.68069935f);
  p = fmaf(p, v, -2.7219913f);
  p = fmaf(p, v, 3.38639927f);
  p = fmaf(p, v, 4.85385227f);
  p = fmaf(p, v, -1.07144856f);
  const float tail = power_of_two(fmaf(-.5f * LOG2_E * x, x, p));
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
struct place {
  int64_t row, column;
  int left; /* elements from here to the row's end; more than a unit has need not be right */
};

/* UNITS consecutive ones from the CTA's first on. One division for all, if a row has as many. */
template <class T, int UNITS> struct places {
  int64_t in_row, first_row, first;

  DEVICE places(const elementwise_args &a)
  {
    in_row = ceil_div(a.cols, (int64_t)SIZE<T>);
    first = (int64_t)blockIdx.x * UNITS;
    first_row = first < in_row ? 0 : first / in_row;
    first -= first_row * in_row;
  }

  DEVICE bool in_one_row() const { return in_row - first >= UNITS; }

  DEVICE place operator()(const elementwise_args &a, int i) const
  {
    const int64_t at = first + i;
    const int64_t rows = in_row >= UNITS ? at >= in_row : (unsigned)at / (unsigned)in_row;
    place p = {first_row + rows, (at - rows * in_row) * SIZE<T>, 0};
    if (p.row < a.rows) p.left = (int)min(a.cols - p.column, (int64_t)SIZE<T>);
    return p;
  }
};

/* The same where all lie in one row, as those of a matrix without gaps do: one look for the CTA, not one a unit. */
template <class T, int UNITS> struct places_in_row : places<T, UNITS> {
  using places<T, UNITS>::places;

  DEVICE place operator()(const elementwise_args &a, int i) const
  {
    const int64_t column = this->first * SIZE<T>;
    const int left = (int)min(a.cols - column, (int64_t)UNITS * SIZE<T>);
    return {this->first_row, column + i * SIZE<T>, left - i * SIZE<T>};
  }
};

template <class T, int EACH, int THREADS, bool ALIGNED, int FUNCTION, class PLACES>
DEVICE void elementwise_units(const elementwise_args &a, const PLACES &places_of)
{
  constexpr bool TWO = FUNCTION == EW_ADD || FUNCTION == EW_MUL;
  const T *first = static_cast<const T *>(a.a), *second = static_cast<const T *>(a.b);
  place at[EACH];
  uint4 x[EACH], other[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    at[i] = places_of(a, i * THREADS + threadIdx.x);
    x[i] = load_whole<T, ALIGNED>(first + at[i].row * a.a_ld + at[i].column, at[i].left);
    if (TWO) other[i] = load_whole<T, ALIGNED>(second + at[i].row * a.b_ld + at[i].column, at[i].left);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    load_short<T, ALIGNED>(first + at[i].row * a.a_ld + at[i].column, at[i].left, x[i]);
    if (TWO) load_short<T, ALIGNED>(second + at[i].row * a.b_ld + at[i].column, at[i].left, other[i]);
    float y[SIZE<T>];
#pragma unroll
    for (int j = 0; j < SIZE<T>; j++)
      y[j] = apply<FUNCTION>(element_of<T>(x[i], j), TWO ? element_of<T>(other[i], j) : 0.f, a.factor);
    store_packet<T, ALIGNED>(static_cast<T *>(a.y) + at[i].row * a.y_ld + at[i].column, at[i].left, y);
  }
}

template <class T, int EACH, int THREADS, bool ALIGNED, class PLACES>
DEVICE void elementwise_any(const elementwise_args &a, const PLACES &at)
{
  switch (a.function) {
  case EW_ADD: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_ADD>(a, at);
  case EW_MUL: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_MUL>(a, at);
  case EW_SCALE: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_SCALE>(a, at);
  case EW_RELU: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_RELU>(a, at);
  case EW_SIGMOID: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_SIGMOID>(a, at);
  case EW_SILU: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_SILU>(a, at);
  case EW_GELU: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_GELU>(a, at);
  default: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_GELU_TANH>(a, at);
  }
}

template <class T, int UNITS, int, int THREADS> DEVICE void form_flat(const elementwise_args &a)
{
  const places_in_row<T, UNITS> one(a);
  const places<T, UNITS> any(a);
  if (a.aligned && one.in_one_row())
    elementwise_any<T, UNITS / THREADS, THREADS, true>(a, one);
  else if (a.aligned)
    elementwise_any<T, UNITS / THREADS, THREADS, true>(a, any);
  else
    elementwise_any<T, UNITS / THREADS, THREADS, false>(a, any);
}

/* ---- rows: what softmax and norms share ---- */

struct adding {
  static DEVICE float join(float a, float b) { return a + b; }
};
struct greater {
  static DEVICE float join(float a, float b) { return fmaxf(a, b); } /* not NaN, if there is anything else */
};

/* Over the LANES threads of a row: lanes of a warp, or the CTA by way of shared memory, other for each use. The same bits in
 * every thread: joining commutes. */
template <class HOW, int LANES> DEVICE float over_row(float value, float (&shared)[WARP_SIZE])
{
  constexpr int WARPS = LANES / WARP_SIZE;
#pragma unroll
  for (int mask = (WARPS ? WARP_SIZE : LANES) / 2; mask > 0; mask /= 2)
    value = HOW::join(value, __shfl_xor_sync(ALL_LANES, value, mask));
  if (WARPS <= 1) return value;
  if (lane_id() == 0) shared[warp_id()] = value;
  __syncthreads();
  value = shared[lane_id() % (WARPS ? WARPS : 1)];
#pragma unroll
  for (int mask = WARPS / 2; mask > 0; mask /= 2) value = HOW::join(value, __shfl_xor_sync(ALL_LANES, value, mask));
  return value;
}

DEVICE float exponential(float x)
{
  return power_of_two(LOG2_E * x);
}

/* PACKETS packets of a row from `first` on, in the registers of LANES threads: packet i of a lane is number i * LANES + lane.
 * They stay as they came, half as wide as f32 where registers are what limits the loads in flight. */
template <class T, int PACKETS, int LANES> struct row_part {
  uint4 raw[PACKETS];
  int left; /* columns from this thread's first packet on */

  static DEVICE int column(int i) { return i * LANES * SIZE<T>; }
  DEVICE int left_at(int i) const { return left - column(i); }

  /* What lies past the row's end is 0. `row` and `cols` begin at this thread's first packet. */
  template <bool ALIGNED> DEVICE void load(const T *row, int cols)
  {
    left = cols;
#pragma unroll
    for (int i = 0; i < PACKETS; i++) raw[i] = load_whole<T, ALIGNED>(row + column(i), left_at(i));
#pragma unroll
    for (int i = 0; i < PACKETS; i++) load_short<T, ALIGNED>(row + column(i), left_at(i), raw[i]);
  }

  /* Before another pass over the elements: they are converted again rather than kept as f32, which would take the registers
   * of other warps' loads. */
  DEVICE void renew()
  {
#pragma unroll
    for (int i = 0; i < PACKETS; i++) asm volatile("" : "+r"(raw[i].x), "+r"(raw[i].y), "+r"(raw[i].z), "+r"(raw[i].w));
  }

  /* A sum for each packet first: shorter chains, smaller errors. Only packets at the row's end ask element by element. */
  template <class F> DEVICE float sum(F of) const
  {
    float total = 0;
#pragma unroll
    for (int i = 0; i < PACKETS; i++) {
      float part = 0;
      if (left_at(i) >= SIZE<T>) {
#pragma unroll
        for (int j = 0; j < SIZE<T>; j++) part += of(element_of<T>(raw[i], j));
      } else {
#pragma unroll
        for (int j = 0; j < SIZE<T>; j++) part += j < left_at(i) ? of(element_of<T>(raw[i], j)) : 0.f;
      }
      total += part;
    }
    return total;
  }

  DEVICE float greatest() const
  {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < PACKETS; i++) {
      const bool whole = left_at(i) >= SIZE<T>;
#pragma unroll
      for (int j = 0; j < SIZE<T>; j++) {
        const float v = element_of<T>(raw[i], j);
        most = fmaxf(most, whole || j < left_at(i) ? v : -INFINITY);
      }
    }
    return most;
  }

  /* change(packet, its elements) */
  template <bool ALIGNED, class F> DEVICE void store(T *row, F change) const
  {
#pragma unroll
    for (int i = 0; i < PACKETS; i++) {
      float value[SIZE<T>];
#pragma unroll
      for (int j = 0; j < SIZE<T>; j++) value[j] = element_of<T>(raw[i], j);
      change(i, value);
      store_packet<T, ALIGNED>(row + column(i), left_at(i), value);
    }
  }
};

/* ---- softmax ---- */

template <class T, int PACKETS, int LANES> DEVICE float exponentials(row_part<T, PACKETS, LANES> &x, float most)
{
  x.renew();
  return x.sum([=](float v) { return exponential(v - most); });
}

template <bool ALIGNED, class T, int PACKETS, int LANES>
DEVICE void store_shares(T *row, float most, float share, row_part<T, PACKETS, LANES> &x)
{
  x.renew();
  x.template store<ALIGNED>(row, [=](int, float(&value)[SIZE<T>]) {
#pragma unroll
    for (int j = 0; j < SIZE<T>; j++) value[j] = exponential(value[j] - most) * share;
  });
}

template <class T, int ROWS, int COLUMNS, int THREADS, bool ALIGNED> DEVICE void once(const softmax_args &a)
{
  constexpr int LANES = THREADS / ROWS;
  __shared__ float shared[2][WARP_SIZE];
  const int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / LANES;
  const int column = threadIdx.x % LANES * SIZE<T>;
  row_part<T, COLUMNS / LANES / SIZE<T>, LANES> x;
  x.template load<ALIGNED>(static_cast<const T *>(a.x) + row * a.x_ld + column, row < a.rows ? a.cols - column : 0);
  const float most = over_row<greater, LANES>(x.greatest(), shared[0]);
  const float share = 1.f / over_row<adding, LANES>(exponentials(x, most), shared[1]);
  store_shares<ALIGNED>(static_cast<T *>(a.y) + row * a.y_ld + column, most, share, x);
}

/* exp(low - high) for low <= high; 0 for low -infinity, whatever high is. */
DEVICE float shrink(float low, float high)
{
  return low == -INFINITY ? 0.f : expf(low - high);
}

/* The greatest so far and the sum relative to it, in one pass; then the row again. */
template <class T, int THREADS, bool ALIGNED> DEVICE void twice(const softmax_args &a)
{
  constexpr int PACKETS = 4, STEP = PACKETS * THREADS * SIZE<T>;
  __shared__ float shared[2][WARP_SIZE];
  const int64_t row = blockIdx.x;
  const T *source = static_cast<const T *>(a.x) + row * a.x_ld;
  row_part<T, PACKETS, THREADS> x;
  float most = -INFINITY, sum = 0;
  for (int64_t column = threadIdx.x * SIZE<T>; column < a.cols; column += STEP) {
    x.template load<ALIGNED>(source + column, (int)(a.cols - column));
    const float before = most;
    most = fmaxf(most, x.greatest());
    const float base = most == -INFINITY ? 0.f : most; /* nothing but -infinity yet: all exponentials are 0 */
    sum = sum * shrink(before, most) + exponentials(x, base);
  }
  const float top = over_row<greater, THREADS>(most, shared[0]);
  const float share = 1.f / over_row<adding, THREADS>(sum * shrink(most, top), shared[1]);
  for (int64_t column = threadIdx.x * SIZE<T>; column < a.cols; column += STEP) {
    x.template load<ALIGNED>(source + column, (int)(a.cols - column));
    store_shares<ALIGNED>(static_cast<T *>(a.y) + row * a.y_ld + column, top, share, x);
  }
}

/* ---- norms ---- */

/* Weights or biases of one packet, T or f32; `otherwise` if there are none. */
template <class T, bool ALIGNED>
DEVICE void load_parameters(const void *base, int dtype, int64_t column, int left, float otherwise,
                            float (&value)[SIZE<T>])
{
  if (base && ALIGNED && left >= SIZE<T>) {
    if (dtype == DT_F32)
      load_f32<SIZE<T>>(static_cast<const float *>(base) + column, value);
    else
      load_f32<SIZE<T>>(static_cast<const T *>(base) + column, value);
    return;
  }
#pragma unroll
  for (int j = 0; j < SIZE<T>; j++) value[j] = base && j < left ? load_any(base, column + j, dtype) : otherwise;
}

/* row = (x - mean) * factor * weight + bias; `first`: the column where `row` begins. */
template <bool ALIGNED, class T, int PACKETS, int LANES>
DEVICE void store_normal(const norm_args &a, T *row, int64_t first, float mean, float factor,
                         row_part<T, PACKETS, LANES> &x)
{
  x.renew();
  x.template store<ALIGNED>(row, [&](int i, float(&value)[SIZE<T>]) {
    float weight[SIZE<T>], bias[SIZE<T>];
    load_parameters<T, ALIGNED>(a.weight, a.weight_dtype, first + x.column(i), x.left_at(i), 1.f, weight);
    load_parameters<T, ALIGNED>(a.bias, a.bias_dtype, first + x.column(i), x.left_at(i), 0.f, bias);
#pragma unroll
    for (int j = 0; j < SIZE<T>; j++) value[j] = fmaf((value[j] - mean) * factor, weight[j], bias[j]);
  });
}

template <class T, int ROWS, int COLUMNS, int THREADS, bool ALIGNED> DEVICE void once(const norm_args &a)
{
  constexpr int LANES = THREADS / ROWS;
  __shared__ float shared[2][WARP_SIZE];
  const int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / LANES;
  const int column = threadIdx.x % LANES * SIZE<T>;
  row_part<T, COLUMNS / LANES / SIZE<T>, LANES> x;
  x.template load<ALIGNED>(static_cast<const T *>(a.x) + row * a.x_ld + column, row < a.rows ? a.cols - column : 0);
  float mean = 0;
  if (a.centered) mean = over_row<adding, LANES>(x.sum([](float v) { return v; }), shared[0]) / (float)a.cols;
  x.renew();
  const float squares = x.sum([=](float v) { return (v - mean) * (v - mean); });
  const float factor = 1.f / sqrtf(over_row<adding, LANES>(squares, shared[1]) / (float)a.cols + a.eps);
  store_normal<ALIGNED>(a, static_cast<T *>(a.y) + row * a.y_ld + column, column, mean, factor, x);
}

/* Numbers seen, their mean, and the sum of their squared differences to it. */
struct moments {
  float count, mean, squares;

  /* Chan, Golub, LeVeque 1979: no cancellation, whatever the mean is. */
  template <class PART> DEVICE void take(const PART &x)
  {
    const float more = x.sum([](float) { return 1.f; }), total = count + more;
    const float part = x.sum([](float v) { return v; }) / more, distance = part - mean;
    squares += x.sum([=](float v) { return (v - part) * (v - part); });
    squares += distance * distance * (count * (more / total));
    mean += distance * (more / total);
    count = total;
  }
};

template <class T, int THREADS, bool ALIGNED> DEVICE void twice(const norm_args &a)
{
  constexpr int PACKETS = 4, STEP = PACKETS * THREADS * SIZE<T>;
  __shared__ float shared[2][WARP_SIZE];
  const int64_t row = blockIdx.x;
  const T *source = static_cast<const T *>(a.x) + row * a.x_ld;
  row_part<T, PACKETS, THREADS> x;
  moments seen = {0, 0, 0};
  for (int64_t column = threadIdx.x * SIZE<T>; column < a.cols; column += STEP) {
    x.template load<ALIGNED>(source + column, (int)(a.cols - column));
    if (a.centered)
      seen.take(x);
    else
      seen.squares += x.sum([](float v) { return v * v; });
  }
  const float mean = a.centered ? over_row<adding, THREADS>(seen.count * seen.mean, shared[0]) / (float)a.cols : 0.f;
  if (a.centered) seen.squares += seen.count * (seen.mean - mean) * (seen.mean - mean);
  const float factor = 1.f / sqrtf(over_row<adding, THREADS>(seen.squares, shared[1]) / (float)a.cols + a.eps);
  for (int64_t column = threadIdx.x * SIZE<T>; column < a.cols; column += STEP) {
    x.template load<ALIGNED>(source + column, (int)(a.cols - column));
    store_normal<ALIGNED>(a, static_cast<T *>(a.y) + row * a.y_ld + column, column, mean, factor, x);
  }
}

/* ---- kernels ---- */

template <class T, int ROWS, int COLUMNS, int THREADS, class ARGS> DEVICE void form_row(const ARGS &a)
{
  if (a.aligned)
    once<T, ROWS, COLUMNS, THREADS, true>(a);
  else
    once<T, ROWS, COLUMNS, THREADS, false>(a);
}

template <class T, int, int, int THREADS, class ARGS> DEVICE void form_sweep(const ARGS &a)
{
  if (a.aligned)
    twice<T, THREADS, true>(a);
  else
    twice<T, THREADS, false>(a);
}

#define ROWS_ops
#define VARIANT(op, arch, file, form, in, w, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                                    \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      VARIANT_NAME(op, arch, form, in, w, BM, BN, BK)(const __grid_constant__ op##_args a)                             \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    form_##form<in, BM, BN, WARPS * WARP_SIZE>(a);                                                                     \
  }
#include "variants.def"
