/*
 * Softmax and norm: form row reads a row once, form sweep twice. The threads of a row take its 16-byte vectors in turn.
 * A thread loads all of its rows' vectors at once and keeps them as they came: bytes in flight are what counts, and as
 * f32 those of 16 bits would take twice the registers.
 */
#ifndef CUMOE_ROWS_CUH
#define CUMOE_ROWS_CUH

#include "ops/norm.cuh"
#include "ops/softmax.cuh"

/* y = the operation of x. `column`: of this thread's first vector; `gap` as for row_part. */
template <class L, class OF, class ARGS>
DEVICE void store_rows(const ARGS &a, typename L::T *first, int64_t gap, int64_t column, row_part<L> &x, OF &of)
{
  using T = typename L::T;
  x.renew();
#pragma unroll
  for (int i = 0; i < L::VECTORS; i++) {
    of.take(a, column, x.left[0], x.aligned, i);
    of.ask(a, column, x.left[0], i + L::AHEAD);
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) {
      const uint4 elements = x.vector(r, i);
      float value[ELEMENTS<T>];
#pragma unroll
      for (int j = 0; j < ELEMENTS<T>; j++) value[j] = element_of<T>(elements, j);
      of.change(r, value);
      store_vector<T>(first + r * gap + i * L::STEP, x.left_at(r, i), value, x.aligned);
    }
  }
}

template <class L, class OF, class ARGS> DEVICE void ask_ahead(const ARGS &a, int64_t column, int left, OF &of)
{
#pragma unroll
  for (int i = 0; i < L::AHEAD; i++) of.ask(a, column, left, i);
}

/* Rows that their threads can hold. */
template <class L, class OF, class ARGS> DEVICE void once(const ARGS &a, exchange<L> &shared, uint4 *held)
{
  using T = typename L::T;
  const int lane = L::CTAS > 1 ? cluster_ctarank() * L::THREADS + threadIdx.x : threadIdx.x % L::LANES;
  const int64_t row = (int64_t)(blockIdx.x / L::CTAS) * L::ALL + threadIdx.x / L::LANES;
  const int column = lane * ELEMENTS<T>;
  const T *source = static_cast<const T *>(a.x) + row * a.x_ld + column;
  row_part<L> x;
  OF of;
  x.held = held + threadIdx.x;
  x.aligned = OF::ALIGNED || a.aligned;
#pragma unroll
  for (int r = 0; r < L::ROWS; r++) x.left[r] = row + r * L::AT_ONCE < a.rows ? a.cols - column : 0;
  x.ask(source, L::AT_ONCE * a.x_ld);
  ask_ahead<L>(a, column, x.left[0], of);
  if (L::CTAS > 1) barrier_cluster(); /* the others' shared memory is theirs by now */
  x.complete(source, L::AT_ONCE * a.x_ld);
  of.measure(a, x, shared);
  store_rows(a, static_cast<T *>(a.y) + row * a.y_ld + column, L::AT_ONCE * a.y_ld, column, x, of);
}

/* A row of any length a CTA. */
template <class L, class OF, class ARGS> DEVICE void twice(const ARGS &a, exchange<L> &shared)
{
  using T = typename L::T;
  constexpr int PART = L::VECTORS * L::STEP;
  const int64_t row = blockIdx.x;
  const T *source = static_cast<const T *>(a.x) + row * a.x_ld;
  row_part<L> x;
  OF of;
  x.aligned = OF::ALIGNED || a.aligned;
  of.begin();
  for (int64_t column = threadIdx.x * ELEMENTS<T>; column < a.cols; column += PART) {
    x.left[0] = (int)(a.cols - column);
    x.ask(source + column, 0);
    x.complete(source + column, 0);
    of.add(a, x);
  }
  of.finish(a, shared);
  for (int64_t column = threadIdx.x * ELEMENTS<T>; column < a.cols; column += PART) {
    x.left[0] = (int)(a.cols - column);
    x.ask(source + column, 0);
    ask_ahead<L>(a, column, x.left[0], of);
    x.complete(source + column, 0);
    store_rows(a, static_cast<T *>(a.y) + row * a.y_ld + column, 0, column, x, of);
  }
}

template <bool SWEEP, class L, class OF, class ARGS>
DEVICE void rows_by(const ARGS &a, exchange<L> &shared, uint4 *held)
{
  if constexpr (SWEEP)
    twice<L, OF>(a, shared);
  else
    once<L, OF>(a, shared, held);
}

template <bool SWEEP, class L> DEVICE void rows_of(const softmax_args &a, exchange<L> &shared, uint4 *held)
{
  rows_by<SWEEP, L, softmax_of<L>>(a, shared, held);
}

template <bool SWEEP, class L> DEVICE void rows_of(const norm_args &a, exchange<L> &shared, uint4 *held)
{
  const bool other = (a.weight && a.weight_dtype == DT_F32) || (a.bias && a.bias_dtype == DT_F32);
  if (!a.aligned || (sizeof(typename L::T) < sizeof(float) && other))
    rows_by<SWEEP, L, norm_of<L, false>>(a, shared, held);
  else
    rows_by<SWEEP, L, norm_of<L, true>>(a, shared, held);
}

template <class T, int UNITS, int COLUMNS, int LANES, int AHEAD, int THREADS, int SMEM, class ARGS>
DEVICE void form_row(const ARGS &a)
{
  using L = row_layout<T, UNITS, COLUMNS, LANES, AHEAD, THREADS, SMEM>;
  __shared__ exchange<L> shared;
  DYNAMIC_SHARED(uint4, held, 16);
  rows_of<false>(a, shared, held);
}

template <class T, int UNITS, int, int LANES, int AHEAD, int THREADS, int SMEM, class ARGS>
DEVICE void form_sweep(const ARGS &a)
{
  constexpr int VECTORS = 4;
  static_assert(UNITS == 1 && LANES == THREADS && SMEM == 0, "a row a CTA, in registers");
  using L = row_layout<T, UNITS, VECTORS * THREADS * ELEMENTS<T>, LANES, AHEAD, THREADS>;
  __shared__ exchange<L> shared;
  rows_of<true>(a, shared, nullptr);
}

#endif
