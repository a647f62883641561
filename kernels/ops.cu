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

/* 16-bit results need no more than 2^-20. */
template <class T> constexpr bool FAST = sizeof(T) == 2;

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
  if (ALIGNED && left >= SIZE<T>) return;
#pragma unroll
  for (int i = 0; i < SIZE<T>; i++)
    if (i < left) reinterpret_cast<T *>(&raw)[i] = source[i];
}

template <class T> DEVICE float element_of(const uint4 &raw, int i)
{
  return to_f32(reinterpret_cast<const T *>(&raw)[i]);
}

template <class T, bool ALIGNED> DEVICE void store_packet(T *target, int left, const float (&value)[SIZE<T>])
{
  if (ALIGNED && left >= SIZE<T>) return store_f32<SIZE<T>>(target, value);
#pragma unroll
  for (int i = 0; i < SIZE<T>; i++)
    if (i < left) target[i] = from_f32<T>(value[i]);
}

/* e^x by one MUFU: to 2^-21 (1 + |x|) of itself; below 2^-126 it is 0. */
DEVICE float exp_fast(float x)
{
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

DEVICE float reciprocal_fast(float x)
{
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* ---- elementwise ---- */

/* erfc to 2^-22 of itself: Numerical Recipes, erfcc. A third of erfcf. */
DEVICE float erfc_fast(float x)
{
  const float z = fabsf(x), t = reciprocal_fast(fmaf(.5f, z, 1.f));
  float p = .17087277f;
  p = fmaf(p, t, -.82215223f);
  p = fmaf(p, t, 1.48851587f);
  p = fmaf(p, t, -1.13520398f);
  p = fmaf(p, t, .27886807f);
  p = fmaf(p, t, -.18628806f);
  p = fmaf(p, t, .09678418f);
  p = fmaf(p, t, .37409196f);
  p = fmaf(p, t, 1.00002368f);
  p = fmaf(p, t, -1.26551223f);
  const float tail = t * exp_fast(fmaf(-z, z, p));
  return x < 0.f ? 2.f - tail : tail;
}

DEVICE float sigmoid_fast(float x)
{
  return reciprocal_fast(1.f + exp_fast(-x));
}

template <int FUNCTION, bool QUICK> DEVICE float apply(float x, float other, float factor)
{
  switch (FUNCTION) {
  case EW_ADD: return x + other;
  case EW_MUL: return x * other;
  case EW_SCALE: return factor * x;
  case EW_RELU: return activation<ACT_RELU, QUICK>(0.f, x);
  case EW_SIGMOID: return QUICK ? sigmoid_fast(x) : sigmoid_of<false>(x, 1.f);
  case EW_SILU: return QUICK ? x * sigmoid_fast(x) : activation<ACT_SILU, false>(0.f, x);
  case EW_GELU: return QUICK ? .5f * x * erfc_fast(-.70710678f * x) : activation<ACT_GELU_ERF, false>(0.f, x);
  default:
    return QUICK ? x * sigmoid_fast(1.5957691f * x * fmaf(.044715f * x, x, 1.f))
                 : activation<ACT_GELU_TANH, false>(0.f, x);
  }
}

/* Where a unit lies; left 0: past the last one. */
struct place {
  int64_t row, column;
  int left; /* elements from here on, but no more than a unit has */
};

/* `units` consecutive ones from `first` on. One division for all, if a row has as many. */
template <class T, int UNITS> struct places {
  int64_t in_row, first_row, first;

  DEVICE places(const elementwise_args &a)
  {
    in_row = ceil_div(a.cols, (int64_t)SIZE<T>);
    first = (int64_t)blockIdx.x * UNITS;
    first_row = first < in_row ? 0 : first / in_row;
    first -= first_row * in_row;
  }

  DEVICE place operator()(const elementwise_args &a, int i) const
  {
    const int64_t at = first + i;
    const int64_t rows = in_row >= UNITS ? at >= in_row : (unsigned)at / (unsigned)in_row;
    place p = {first_row + rows, (at - rows * in_row) * SIZE<T>, 0};
    if (p.row < a.rows) p.left = (int)min(a.cols - p.column, (int64_t)SIZE<T>);
    return p;
  }
};

template <class T, int EACH, int THREADS, bool ALIGNED, int FUNCTION>
DEVICE void elementwise_units(const elementwise_args &a)
{
  constexpr bool TWO = FUNCTION == EW_ADD || FUNCTION == EW_MUL;
  const places<T, EACH * THREADS> places_of(a);
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
      y[j] = apply<FUNCTION, FAST<T>>(element_of<T>(x[i], j), TWO ? element_of<T>(other[i], j) : 0.f, a.factor);
    store_packet<T, ALIGNED>(static_cast<T *>(a.y) + at[i].row * a.y_ld + at[i].column, at[i].left, y);
  }
}

template <class T, int EACH, int THREADS, bool ALIGNED> DEVICE void elementwise_any(const elementwise_args &a)
{
  switch (a.function) {
  case EW_ADD: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_ADD>(a);
  case EW_MUL: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_MUL>(a);
  case EW_SCALE: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_SCALE>(a);
  case EW_RELU: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_RELU>(a);
  case EW_SIGMOID: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_SIGMOID>(a);
  case EW_SILU: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_SILU>(a);
  case EW_GELU: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_GELU>(a);
  default: return elementwise_units<T, EACH, THREADS, ALIGNED, EW_GELU_TANH>(a);
  }
}

template <class T, int UNITS, int, int THREADS> DEVICE void elementwise_flat(const elementwise_args &a)
{
  wait_for_earlier_grids();
  if (a.aligned)
    elementwise_any<T, UNITS / THREADS, THREADS, true>(a);
  else
    elementwise_any<T, UNITS / THREADS, THREADS, false>(a);
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

template <class T> DEVICE float exponential(float x)
{
  return FAST<T> ? exp_fast(x) : expf(x);
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
  return x.sum([=](float v) { return exponential<T>(v - most); });
}

template <bool ALIGNED, class T, int PACKETS, int LANES>
DEVICE void store_shares(T *row, float most, float share, row_part<T, PACKETS, LANES> &x)
{
  x.renew();
  x.template store<ALIGNED>(row, [=](int, float(&value)[SIZE<T>]) {
#pragma unroll
    for (int j = 0; j < SIZE<T>; j++) value[j] = exponential<T>(value[j] - most) * share;
  });
}

template <class T, int ROWS, int COLUMNS, int THREADS, bool ALIGNED> DEVICE void softmax_once(const softmax_args &a)
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
template <class T, int THREADS, bool ALIGNED> DEVICE void softmax_twice(const softmax_args &a)
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

template <class T, int ROWS, int COLUMNS, int THREADS> DEVICE void softmax_row(const softmax_args &a)
{
  wait_for_earlier_grids();
  if (a.aligned)
    softmax_once<T, ROWS, COLUMNS, THREADS, true>(a);
  else
    softmax_once<T, ROWS, COLUMNS, THREADS, false>(a);
}

template <class T, int, int, int THREADS> DEVICE void softmax_sweep(const softmax_args &a)
{
  wait_for_earlier_grids();
  if (a.aligned)
    softmax_twice<T, THREADS, true>(a);
  else
    softmax_twice<T, THREADS, false>(a);
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

template <class T, int ROWS, int COLUMNS, int THREADS, bool ALIGNED> DEVICE void norm_once(const norm_args &a)
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

template <class T, int THREADS, bool ALIGNED> DEVICE void norm_twice(const norm_args &a)
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

template <class T, int ROWS, int COLUMNS, int THREADS> DEVICE void norm_row(const norm_args &a)
{
  wait_for_earlier_grids();
  if (a.aligned)
    norm_once<T, ROWS, COLUMNS, THREADS, true>(a);
  else
    norm_once<T, ROWS, COLUMNS, THREADS, false>(a);
}

template <class T, int, int, int THREADS> DEVICE void norm_sweep(const norm_args &a)
{
  wait_for_earlier_grids();
  if (a.aligned)
    norm_twice<T, THREADS, true>(a);
  else
    norm_twice<T, THREADS, false>(a);
}

#define ROWS_ops
#define VARIANT(op, arch, file, form, in, w, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                                    \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      VARIANT_NAME(op, arch, form, in, w, BM, BN, BK)(const __grid_constant__ op##_args a)                             \
  {                                                                                                                    \
    op##_##form<in, BM, BN, WARPS * WARP_SIZE>(a);                                                                     \
  }
#include "variants.def"
