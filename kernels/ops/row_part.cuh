/* Softmax, norm: a thread's part of its rows, and reductions over the threads of a row. */
#ifndef CUMOE_ROW_PART_CUH
#define CUMOE_ROW_PART_CUH

#include "device/ptx_sm90.cuh"
#include "ops/vectors.cuh"

/* Of a row of variants.def: ALL rows of up to COLUMNS a CTA, or a cluster of CTAS; ROW_LANES threads a row, LANES of
 * them of a CTA. Of a thread's VECTORS of a row, those from IN_REGISTERS on lie in shared memory, where no other thread
 * reads them. AHEAD: see parameters. */
template <class T_, int ALL_, int COLUMNS, int ROW_LANES, int AHEAD_, int THREADS_, int SMEM = 0> struct row_layout {
  using T = T_;
  static constexpr int THREADS = THREADS_, LANES = ROW_LANES < THREADS ? ROW_LANES : THREADS, CTAS = ROW_LANES / LANES,
                       AT_ONCE = THREADS / LANES, ALL = ALL_, ROWS = ALL / AT_ONCE, STEP = ROW_LANES * ELEMENTS<T>,
                       VECTORS = COLUMNS / STEP, IN_REGISTERS = VECTORS - SMEM / 16 / THREADS, AHEAD = AHEAD_,
                       WARPS = CTAS * ceil_div(LANES, WARP_SIZE);
  static_assert(LANES * CTAS == ROW_LANES && ROWS * AT_ONCE == ALL && VECTORS * STEP == COLUMNS,
                "threads, rows, vectors come out even");
  static_assert(exact_smem<(VECTORS - IN_REGISTERS) * 16 * THREADS, SMEM>::OK);
  static_assert(WARPS == 1 || ROWS == 1, "several rows a thread: within a warp");
};

/* ---- over the threads of a row ---- */

struct add_op {
  static constexpr float NONE = 0;
  static DEVICE float join(float a, float b) { return a + b; }
};
struct max_op {
  static constexpr float NONE = -INFINITY;
  static DEVICE float join(float a, float b) { return fmaxf(a, b); } /* not NaN, if there is anything else */
};

template <class HOW, int LANES, int N> DEVICE void reduce_lanes(float (&value)[N])
{
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2)
#pragma unroll
    for (int r = 0; r < N; r++) value[r] = HOW::join(value[r], __shfl_xor_sync(ALL_LANES, value[r], mask));
}

/* One value of each warp of a row, twice. */
template <class L> struct exchange {
  float part[2][L::WARPS];
};

/* To every warp of the row; valid after sync_row. A cluster needs no barrier before it exits: nobody writes to a CTA's
 * shared memory after its last one. */
template <class L> DEVICE void send(float value, float (&part)[L::WARPS])
{
  if constexpr (L::CTAS > 1) {
    float *place = &part[cluster_ctarank() * (L::WARPS / L::CTAS) + warp_id()];
    if (lane_id() < L::CTAS) st_shared_cluster(place, lane_id(), value);
  } else {
    if (lane_id() == 0) part[warp_id()] = value;
  }
}

template <class L> DEVICE void sync_row()
{
  if constexpr (L::CTAS > 1)
    barrier_cluster();
  else
    __syncthreads();
}

/* of(warp), joined: the same bits in every thread, as joining commutes. */
template <class HOW, class L, class F> DEVICE float reduce_warps(F of)
{
  constexpr int WIDE = L::WARPS > 16 ? 32 : L::WARPS > 8 ? 16 : L::WARPS > 4 ? 8 : 4; /* lanes that read */
  float value[1] = {HOW::NONE};
#pragma unroll
  for (int i = 0; i < L::WARPS; i += WIDE) {
    const int from = i + lane_id() % WIDE;
    if (i + WIDE <= L::WARPS || from < L::WARPS) value[0] = HOW::join(value[0], of(from));
  }
  reduce_lanes<HOW, WIDE>(value);
  return value[0];
}

/* Over the lanes of a warp that share a row. */
template <class HOW, class L> DEVICE void reduce_warp(float (&value)[L::ROWS])
{
  reduce_lanes<HOW, (L::LANES < WARP_SIZE ? L::LANES : WARP_SIZE)>(value);
}

template <class HOW, class L> DEVICE void reduce_row(float (&value)[L::ROWS], float (&part)[L::WARPS])
{
  reduce_warp<HOW, L>(value);
  if constexpr (L::WARPS > 1) {
    send<L>(value[0], part);
    sync_row<L>();
    value[0] = reduce_warps<HOW, L>([&](int w) { return part[w]; });
  }
}

/* ---- a thread's part of its rows ---- */

template <class L> struct row_part {
  using T = typename L::T;
  uint4 raw[L::ROWS][L::IN_REGISTERS > 0 ? L::IN_REGISTERS : 1];
  uint4 *held;       /* in shared memory: of this thread, THREADS apart */
  int left[L::ROWS]; /* columns from this thread's first vector on; 0: no such row */
  bool aligned;

  DEVICE int left_at(int r, int i) const { return left[r] - i * L::STEP; }

  DEVICE uint4 vector(int r, int i) const
  {
    return i < L::IN_REGISTERS ? raw[r][i] : held[(i - L::IN_REGISTERS) * L::THREADS];
  }
  DEVICE uint4 &vector(int r, int i)
  {
    return i < L::IN_REGISTERS ? raw[r][i] : held[(i - L::IN_REGISTERS) * L::THREADS];
  }

  /* Whole vectors. `first`: this thread's first one; `gap`: from one of its rows to the next. */
  DEVICE void ask(const T *first, int64_t gap)
  {
#pragma unroll
    for (int r = 0; r < L::ROWS; r++)
#pragma unroll
      for (int i = 0; i < L::VECTORS; i++) {
        const T *source = first + r * gap + i * L::STEP;
        if (i < L::IN_REGISTERS)
          raw[r][i] = load_whole<T>(source, left_at(r, i), aligned);
        else if (aligned && left_at(r, i) >= ELEMENTS<T>)
          cp_async_cg_16(shared_address(&vector(r, i)), source, 16);
      }
  }

  /* And the short ones, after all whole ones are issued. */
  DEVICE void complete(const T *first, int64_t gap)
  {
#pragma unroll
    for (int r = 0; r < L::ROWS; r++)
#pragma unroll
      for (int i = 0; i < L::VECTORS; i++)
        load_short<T>(first + r * gap + i * L::STEP, left_at(r, i), vector(r, i), aligned);
    if (L::IN_REGISTERS < L::VECTORS) cp_async_wait_all();
  }

  /* Before another pass over the elements: they are converted again rather than kept as f32. */
  DEVICE void renew()
  {
#pragma unroll
    for (int r = 0; r < L::ROWS; r++)
#pragma unroll
      for (int i = 0; i < L::IN_REGISTERS; i++) hold(raw[r][i]);
  }

  /* of(element), joined. By vectors first: shorter chains, smaller errors. Only vectors at the row's end test each
   * element. */
  template <class HOW, class F> DEVICE float reduce(int r, F of) const
  {
    float all = HOW::NONE;
#pragma unroll
    for (int i = 0; i < L::VECTORS; i++) {
      const int here = left_at(r, i);
      const uint4 elements = vector(r, i);
      float part = HOW::NONE;
      if (here >= ELEMENTS<T>) {
        part = of(element_of<T>(elements, 0));
#pragma unroll
        for (int j = 1; j < ELEMENTS<T>; j++) part = HOW::join(part, of(element_of<T>(elements, j)));
      } else if (here > 0) {
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; j++)
          part = HOW::join(part, j < here ? of(element_of<T>(elements, j)) : HOW::NONE);
      }
      all = HOW::join(all, part);
    }
    return all;
  }
};

#endif
