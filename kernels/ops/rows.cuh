/*
 * Softmax and norms. The threads of a row take its 16-byte packets in turn; a thread asks for all that it will have of its rows at
 * once and keeps them as they came: bytes in flight are what counts, and as f32 those of 16 bits would take twice the room. Rows
 * too long for that are read twice.
 */
#ifndef CUMOE_ROWS_CUH
#define CUMOE_ROWS_CUH

#include "device/ptx_sm90.cuh"
#include "ops/packets.cuh"

/* Of a row of variants.def: ALL rows of up to COLUMNS a CTA, or a cluster of CTAS; ROW_LANES threads a row, LANES of them of a CTA. Of
 * a thread's PACKETS of a row, those from KEPT on lie in shared memory, where nobody else looks. AHEAD: see parameters. */
template <class T_, int ALL_, int COLUMNS, int ROW_LANES, int AHEAD_, int THREADS_, int SMEM = 0> struct row_layout {
  using T = T_;
  static constexpr int THREADS = THREADS_, LANES = ROW_LANES < THREADS ? ROW_LANES : THREADS, CTAS = ROW_LANES / LANES,
                       BESIDE = THREADS / LANES, ALL = ALL_, ROWS = ALL / BESIDE, STEP = ROW_LANES * SIZE<T>,
                       PACKETS = COLUMNS / STEP, KEPT = PACKETS - SMEM / 16 / THREADS, AHEAD = AHEAD_,
                       WARPS = CTAS * ceil_div(LANES, WARP_SIZE);
  static_assert(LANES * CTAS == ROW_LANES && ROWS * BESIDE == ALL && PACKETS * STEP == COLUMNS,
                "threads, rows, packets come out even");
  static_assert(exact_smem<(PACKETS - KEPT) * 16 * THREADS, SMEM>::OK);
  static_assert(WARPS == 1 || ROWS == 1, "several rows a thread: within a warp");
};

/* ---- over the threads of a row ---- */

struct adding {
  static constexpr float NONE = 0;
  static DEVICE float join(float a, float b) { return a + b; }
};
struct greater {
  static constexpr float NONE = -INFINITY;
  static DEVICE float join(float a, float b) { return fmaxf(a, b); } /* not NaN, if there is anything else */
};

template <class HOW, int LANES, int N> DEVICE void over_lanes(float (&value)[N])
{
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2)
#pragma unroll
    for (int r = 0; r < N; r++) value[r] = HOW::join(value[r], __shfl_xor_sync(ALL_LANES, value[r], mask));
}

/* What the warps of a row found. */
template <class L> struct exchange {
  float part[2][L::WARPS];
};

/* To every warp of the row, who has it once all have met. A cluster needs no farewell: nobody is written to behind its last
 * barrier. */
template <class L> DEVICE void tell(float value, float (&part)[L::WARPS])
{
  if constexpr (L::CTAS > 1) {
    float *place = &part[cluster_ctarank() * (L::WARPS / L::CTAS) + warp_id()];
    if (lane_id() < L::CTAS) st_shared_cluster(place, lane_id(), value);
  } else {
    if (lane_id() == 0) part[warp_id()] = value;
  }
}

template <class L> DEVICE void meet()
{
  if constexpr (L::CTAS > 1)
    barrier_cluster();
  else
    __syncthreads();
}

/* of(warp), joined: the same bits in every thread, for joining commutes. */
template <class HOW, class L, class F> DEVICE float over_warps(F of)
{
  constexpr int WIDE = L::WARPS > 16 ? 32 : L::WARPS > 8 ? 16 : L::WARPS > 4 ? 8 : 4; /* lanes that look */
  float value[1] = {HOW::NONE};
#pragma unroll
  for (int i = 0; i < L::WARPS; i += WIDE) {
    const int from = i + lane_id() % WIDE;
    if (i + WIDE <= L::WARPS || from < L::WARPS) value[0] = HOW::join(value[0], of(from));
  }
  over_lanes<HOW, WIDE>(value);
  return value[0];
}

/* Over the lanes of a warp that share a row. */
template <class HOW, class L> DEVICE void over_warp(float (&value)[L::ROWS])
{
  over_lanes<HOW, (L::LANES < WARP_SIZE ? L::LANES : WARP_SIZE)>(value);
}

template <class HOW, class L> DEVICE void over_row(float (&value)[L::ROWS], float (&part)[L::WARPS])
{
  over_warp<HOW, L>(value);
  if constexpr (L::WARPS > 1) {
    tell<L>(value[0], part);
    meet<L>();
    value[0] = over_warps<HOW, L>([&](int w) { return part[w]; });
  }
}

/* ---- a thread's part of its rows ---- */

template <class L> struct row_part {
  using T = typename L::T;
  uint4 raw[L::ROWS][L::KEPT > 0 ? L::KEPT : 1];
  uint4 *held;       /* of this thread, by THREADS */
  int left[L::ROWS]; /* columns from this thread's first packet on; 0: no such row */

  DEVICE int left_at(int r, int i) const { return left[r] - i * L::STEP; }

  DEVICE uint4 packet(int r, int i) const { return i < L::KEPT ? raw[r][i] : held[(i - L::KEPT) * L::THREADS]; }
  DEVICE uint4 &packet(int r, int i) { return i < L::KEPT ? raw[r][i] : held[(i - L::KEPT) * L::THREADS]; }

  /* Whole packets. `first`: this thread's first one; `gap`: from one of its rows to the next. */
  template <bool ALIGNED> DEVICE void ask(const T *first, int64_t gap)
  {
#pragma unroll
    for (int r = 0; r < L::ROWS; r++)
#pragma unroll
      for (int i = 0; i < L::PACKETS; i++) {
        const T *source = first + r * gap + i * L::STEP;
        if (i < L::KEPT)
          raw[r][i] = load_whole<T, ALIGNED>(source, left_at(r, i));
        else if (ALIGNED && left_at(r, i) >= SIZE<T>)
          cp_async_cg_16(shared_address(&packet(r, i)), source, 16);
      }
  }

  /* And the short ones, which have to wait. */
  template <bool ALIGNED> DEVICE void complete(const T *first, int64_t gap)
  {
#pragma unroll
    for (int r = 0; r < L::ROWS; r++)
#pragma unroll
      for (int i = 0; i < L::PACKETS; i++)
        load_short<T, ALIGNED>(first + r * gap + i * L::STEP, left_at(r, i), packet(r, i));
    if (L::KEPT < L::PACKETS) cp_async_wait_all();
  }

  /* Before another pass over the elements: they are converted again rather than kept as f32. */
  DEVICE void renew()
  {
#pragma unroll
    for (int r = 0; r < L::ROWS; r++)
#pragma unroll
      for (int i = 0; i < L::KEPT; i++) hold_packet(raw[r][i]);
  }

  /* of(element), joined. By packets first: shorter chains, smaller errors. Only packets at the row's end ask element by
   * element. */
  template <class HOW, class F> DEVICE float over(int r, F of) const
  {
    float all = HOW::NONE;
#pragma unroll
    for (int i = 0; i < L::PACKETS; i++) {
      const int here = left_at(r, i);
      const uint4 elements = packet(r, i);
      float part = HOW::NONE;
      if (here >= SIZE<T>) {
        part = of(element_of<T>(elements, 0));
#pragma unroll
        for (int j = 1; j < SIZE<T>; j++) part = HOW::join(part, of(element_of<T>(elements, j)));
      } else if (here > 0) {
#pragma unroll
        for (int j = 0; j < SIZE<T>; j++) part = HOW::join(part, j < here ? of(element_of<T>(elements, j)) : HOW::NONE);
      }
      all = HOW::join(all, part);
    }
    return all;
  }
};

/* ---- softmax ---- */

DEVICE float exponential(float x)
{
  return power_of_two(LOG2_E * x);
}

/* exp(low - high) for low <= high; 0 for low -infinity, whatever high is. */
DEVICE float shrink(float low, float high)
{
  return low == -INFINITY ? 0.f : power_of_two(LOG2_E * (low - high));
}

template <class L> struct shares {
  using T = typename L::T;
  float most[L::ROWS], share[L::ROWS]; /* of all exponentials relative to `most`; until then their sum */

  DEVICE void ask(const softmax_args &, int64_t, int, int) {}
  DEVICE void take(const softmax_args &, int64_t, int, int) {}

  DEVICE void measure(const softmax_args &, row_part<L> &x, exchange<L> &shared)
  {
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) most[r] = x.template over<greater>(r, [](float v) { return v; });
    over_warp<greater, L>(most);
    x.renew();
    if (L::KEPT < L::PACKETS) __syncwarp(); /* or ptxas keeps in registers what it has read of those in shared memory */
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) share[r] = exponentials(r, x);
    join_warps(shared);
  }

  /* Where there is nothing but -infinity, all are 0. */
  DEVICE float exponentials(int r, const row_part<L> &x) const
  {
    const float base = most[r] == -INFINITY ? 0.f : most[r];
    return x.template over<adding>(r, [=](float v) { return exponential(v - base); });
  }

  /* `most` is the warp's by now, `share` still the thread's. */
  DEVICE void join_warps(exchange<L> &shared)
  {
    over_warp<adding, L>(share);
    if constexpr (L::WARPS > 1) {
      tell<L>(most[0], shared.part[0]);
      tell<L>(share[0], shared.part[1]);
      meet<L>();
      most[0] = over_warps<greater, L>([&](int w) { return shared.part[0][w]; });
      share[0] = over_warps<adding, L>(
          [&, top = most[0]](int w) { return shared.part[1][w] * shrink(shared.part[0][w], top); });
    }
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) share[r] = reciprocal(share[r]);
  }

  /* The same by parts of a row. */
  DEVICE void begin()
  {
    most[0] = -INFINITY, share[0] = 0;
  }

  DEVICE void add(const softmax_args &, row_part<L> &x)
  {
    const float before = most[0];
    most[0] = fmaxf(before, x.template over<greater>(0, [](float v) { return v; }));
    x.renew();
    share[0] = share[0] * shrink(before, most[0]) + exponentials(0, x);
  }

  DEVICE void finish(const softmax_args &, exchange<L> &shared)
  {
    const float before = most[0];
    over_warp<greater, L>(most);
    share[0] *= shrink(before, most[0]);
    join_warps(shared);
  }

  DEVICE void change(int r, float (&value)[SIZE<T>]) const
  {
#pragma unroll
    for (int j = 0; j < SIZE<T>; j++) value[j] = exponential(value[j] - most[r]) * share[r];
  }
};

/* ---- norms ---- */

/*
 * Weights or biases of a thread's packets, T or f32. EARLY: aligned ones of T, of which AHEAD packets are asked for before they are
 * needed: behind the stores of the packet before, none would be.
 */
template <class L, bool ALIGNED, bool EARLY> struct parameters {
  using T = typename L::T;
  uint4 raw[EARLY ? L::AHEAD : 1];

  DEVICE void ask(const void *base, int64_t column, int left, float otherwise, int i)
  {
    if (!EARLY || i >= L::PACKETS) return;
    const T *first = static_cast<const T *>(base) + column + i * L::STEP;
    const int here = base ? left - i * L::STEP : 0;
    uint4 &packet = raw[i % L::AHEAD];
    packet = ld_global(first, here >= SIZE<T>);
    load_short<T, true>(first, here, packet);
    if (!base) packet = packet_of<T>(otherwise);
  }

  DEVICE void get(const void *base, int dtype, int64_t column, int left, float otherwise, int i,
                  float (&value)[SIZE<T>])
  {
    const int here = left - i * L::STEP;
    column += i * L::STEP;
    if (!EARLY && base && ALIGNED && here >= SIZE<T>) return load_any<SIZE<T>>(base, column, dtype, value);
#pragma unroll
    for (int j = 0; j < SIZE<T>; j++)
      value[j] = EARLY              ? element_of<T>(raw[i % L::AHEAD], j)
                 : base && j < here ? load_any(base, column + j, dtype)
                                    : otherwise;
  }
};

template <class L, bool ALIGNED, bool EARLY> struct normal {
  using T = typename L::T;
  float mean[L::ROWS], factor[L::ROWS]; /* first the sum of the squared differences to the mean */
  float count, w[SIZE<T>], b[SIZE<T>];
  parameters<L, ALIGNED, EARLY> weight, bias;

  DEVICE void ask(const norm_args &a, int64_t column, int left, int i)
  {
    weight.ask(a.weight, column, left, 1.f, i);
    bias.ask(a.bias, column, left, 0.f, i);
  }

  DEVICE void take(const norm_args &a, int64_t column, int left, int i)
  {
    weight.get(a.weight, a.weight_dtype, column, left, 1.f, i, w);
    bias.get(a.bias, a.bias_dtype, column, left, 0.f, i, b);
  }

  DEVICE void measure(const norm_args &a, row_part<L> &x, exchange<L> &shared)
  {
    const float each = reciprocal((float)a.cols);
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) mean[r] = 0;
    if (a.centered) {
#pragma unroll
      for (int r = 0; r < L::ROWS; r++) mean[r] = x.template over<adding>(r, [](float v) { return v; });
      over_row<adding, L>(mean, shared.part[0]);
#pragma unroll
      for (int r = 0; r < L::ROWS; r++) mean[r] *= each;
    }
    x.renew();
#pragma unroll
    for (int r = 0; r < L::ROWS; r++)
      factor[r] = x.template over<adding>(r, [m = mean[r]](float v) { return (v - m) * (v - m); });
    over_row<adding, L>(factor, shared.part[1]);
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
      factor[0] += x.template over<adding>(0, [](float v) { return v * v; });
      return;
    }
    const float more = x.template over<adding>(0, [](float) { return 1.f; }), total = count + more;
    const float part = x.template over<adding>(0, [](float v) { return v; }) / more, distance = part - mean[0];
    factor[0] += x.template over<adding>(0, [=](float v) { return (v - part) * (v - part); });
    factor[0] += distance * distance * (count * (more / total));
    mean[0] += distance * (more / total);
    count = total;
  }

  DEVICE void finish(const norm_args &a, exchange<L> &shared)
  {
    const float each = reciprocal((float)a.cols), before = mean[0];
    mean[0] *= count;
    if (a.centered) over_row<adding, L>(mean, shared.part[0]);
    mean[0] *= each;
    factor[0] += count * (before - mean[0]) * (before - mean[0]);
    over_row<adding, L>(factor, shared.part[1]);
    factor[0] = rsqrtf(fmaf(factor[0], each, a.eps));
  }

  DEVICE void change(int r, float (&value)[SIZE<T>]) const
  {
#pragma unroll
    for (int j = 0; j < SIZE<T>; j++) value[j] = fmaf((value[j] - mean[r]) * factor[r], w[j], b[j]);
  }
};

/* ---- forms ---- */

/* y = the operation of x. `column`: of this thread's first packet; `gap` as for row_part. */
template <bool ALIGNED, class L, class OF, class ARGS>
DEVICE void store_rows(const ARGS &a, typename L::T *first, int64_t gap, int64_t column, row_part<L> &x, OF &of)
{
  using T = typename L::T;
  x.renew();
#pragma unroll
  for (int i = 0; i < L::PACKETS; i++) {
    of.take(a, column, x.left[0], i);
    of.ask(a, column, x.left[0], i + L::AHEAD);
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) {
      const uint4 elements = x.packet(r, i);
      float value[SIZE<T>];
#pragma unroll
      for (int j = 0; j < SIZE<T>; j++) value[j] = element_of<T>(elements, j);
      of.change(r, value);
      store_packet<T, ALIGNED>(first + r * gap + i * L::STEP, x.left_at(r, i), value);
    }
  }
}

template <class L, class OF, class ARGS> DEVICE void ask_ahead(const ARGS &a, int64_t column, int left, OF &of)
{
#pragma unroll
  for (int i = 0; i < L::AHEAD; i++) of.ask(a, column, left, i);
}

/* Rows that their threads can hold. */
template <class L, bool ALIGNED, class OF, class ARGS> DEVICE void once(const ARGS &a, exchange<L> &shared, uint4 *held)
{
  using T = typename L::T;
  const int lane = L::CTAS > 1 ? cluster_ctarank() * L::THREADS + threadIdx.x : threadIdx.x % L::LANES;
  const int64_t row = (int64_t)(blockIdx.x / L::CTAS) * L::ALL + threadIdx.x / L::LANES;
  const int column = lane * SIZE<T>;
  const T *source = static_cast<const T *>(a.x) + row * a.x_ld + column;
  row_part<L> x;
  OF of;
  x.held = held + threadIdx.x;
#pragma unroll
  for (int r = 0; r < L::ROWS; r++) x.left[r] = row + r * L::BESIDE < a.rows ? a.cols - column : 0;
  x.template ask<ALIGNED>(source, L::BESIDE * a.x_ld);
  ask_ahead<L>(a, column, x.left[0], of);
  if (L::CTAS > 1) barrier_cluster(); /* the others' shared memory is theirs by now */
  x.template complete<ALIGNED>(source, L::BESIDE * a.x_ld);
  of.measure(a, x, shared);
  store_rows<ALIGNED>(a, static_cast<T *>(a.y) + row * a.y_ld + column, L::BESIDE * a.y_ld, column, x, of);
}

/* A row of any length a CTA. */
template <class L, bool ALIGNED, class OF, class ARGS> DEVICE void twice(const ARGS &a, exchange<L> &shared)
{
  using T = typename L::T;
  constexpr int PART = L::PACKETS * L::STEP;
  const int64_t row = blockIdx.x;
  const T *source = static_cast<const T *>(a.x) + row * a.x_ld;
  row_part<L> x;
  OF of;
  of.begin();
  for (int64_t column = threadIdx.x * SIZE<T>; column < a.cols; column += PART) {
    x.left[0] = (int)(a.cols - column);
    x.template ask<ALIGNED>(source + column, 0);
    x.template complete<ALIGNED>(source + column, 0);
    of.add(a, x);
  }
  of.finish(a, shared);
  for (int64_t column = threadIdx.x * SIZE<T>; column < a.cols; column += PART) {
    x.left[0] = (int)(a.cols - column);
    x.template ask<ALIGNED>(source + column, 0);
    ask_ahead<L>(a, column, x.left[0], of);
    x.template complete<ALIGNED>(source + column, 0);
    store_rows<ALIGNED>(a, static_cast<T *>(a.y) + row * a.y_ld + column, 0, column, x, of);
  }
}

template <bool SWEEP, class L, bool ALIGNED, class OF, class ARGS>
DEVICE void rows_by(const ARGS &a, exchange<L> &shared, uint4 *held)
{
  if constexpr (SWEEP)
    twice<L, ALIGNED, OF>(a, shared);
  else
    once<L, ALIGNED, OF>(a, shared, held);
}

template <bool SWEEP, class L> DEVICE void rows_of(const softmax_args &a, exchange<L> &shared, uint4 *held)
{
  if (a.aligned)
    rows_by<SWEEP, L, true, shares<L>>(a, shared, held);
  else
    rows_by<SWEEP, L, false, shares<L>>(a, shared, held);
}

template <bool SWEEP, class L> DEVICE void rows_of(const norm_args &a, exchange<L> &shared, uint4 *held)
{
  const bool other = (a.weight && a.weight_dtype == DT_F32) || (a.bias && a.bias_dtype == DT_F32);
  if (!a.aligned)
    rows_by<SWEEP, L, false, normal<L, false, false>>(a, shared, held);
  else if (sizeof(typename L::T) < sizeof(float) && other)
    rows_by<SWEEP, L, true, normal<L, true, false>>(a, shared, held);
  else
    rows_by<SWEEP, L, true, normal<L, true, true>>(a, shared, held);
}

template <class T, int UNITS, int COLUMNS, int LANES, int AHEAD, int THREADS, int SMEM, class ARGS>
DEVICE void form_row(const ARGS &a)
{
  using L = row_layout<T, UNITS, COLUMNS, LANES, AHEAD, THREADS, SMEM>;
  __shared__ exchange<L> shared;
  extern __shared__ __align__(16) uint4 held[];
  rows_of<false>(a, shared, held);
}

template <class T, int UNITS, int, int LANES, int AHEAD, int THREADS, int SMEM, class ARGS>
DEVICE void form_sweep(const ARGS &a)
{
  constexpr int PACKETS = 4;
  static_assert(UNITS == 1 && LANES == THREADS && SMEM == 0, "a row a CTA, in registers");
  using L = row_layout<T, UNITS, PACKETS * THREADS * SIZE<T>, LANES, AHEAD, THREADS>;
  __shared__ exchange<L> shared;
  rows_of<true>(a, shared, nullptr);
}

#endif
