/* Softmax of the rows that row_part.cuh holds. */
#ifndef CUMOE_SOFTMAX_CUH
#define CUMOE_SOFTMAX_CUH

#include "ops/row_part.cuh"

DEVICE float exponential(float x)
{
  return ex2_approx_ftz(LOG2_E * x);
}

/* exp(low - high) for low <= high; 0 for low -infinity, whatever high is. */
DEVICE float shrink(float low, float high)
{
  return low == -INFINITY ? 0.f : ex2_approx_ftz(LOG2_E * (low - high));
}

template <class L> struct softmax_of {
  using T = typename L::T;
  static constexpr bool ALIGNED = false; /* known to be */
  float most[L::ROWS], share[L::ROWS];   /* of all exponentials relative to `most`; until then their sum */

  DEVICE void ask(const softmax_args &, int64_t, int, int) {}
  DEVICE void take(const softmax_args &, int64_t, int, bool, int) {}

  DEVICE void measure(const softmax_args &, row_part<L> &x, exchange<L> &shared)
  {
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) most[r] = x.template reduce<max_op>(r, [](float v) { return v; });
    reduce_warp<max_op, L>(most);
    x.renew();
    if (L::IN_REGISTERS < L::VECTORS)
      __syncwarp(); /* or ptxas keeps in registers what it has read of those in shared memory */
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) share[r] = exponentials(r, x);
    join_warps(shared);
  }

  /* Where there is nothing but -infinity, all are 0. */
  DEVICE float exponentials(int r, const row_part<L> &x) const
  {
    const float base = most[r] == -INFINITY ? 0.f : most[r];
    return x.template reduce<add_op>(r, [=](float v) { return exponential(v - base); });
  }

  /* `most` is the warp's by now, `share` still the thread's. */
  DEVICE void join_warps(exchange<L> &shared)
  {
    reduce_warp<add_op, L>(share);
    if constexpr (L::WARPS > 1) {
      send<L>(most[0], shared.part[0]);
      send<L>(share[0], shared.part[1]);
      sync_row<L>();
      most[0] = reduce_warps<max_op, L>([&](int w) { return shared.part[0][w]; });
      share[0] = reduce_warps<add_op, L>(
          [&, top = most[0]](int w) { return shared.part[1][w] * shrink(shared.part[0][w], top); });
    }
#pragma unroll
    for (int r = 0; r < L::ROWS; r++) share[r] = rcp_approx_ftz(share[r]);
  }

  /* The same by parts of a row. */
  DEVICE void begin()
  {
    most[0] = -INFINITY, share[0] = 0;
  }

  DEVICE void add(const softmax_args &, row_part<L> &x)
  {
    const float before = most[0];
    most[0] = fmaxf(before, x.template reduce<max_op>(0, [](float v) { return v; }));
    x.renew();
    share[0] = share[0] * shrink(before, most[0]) + exponentials(0, x);
  }

  DEVICE void finish(const softmax_args &, exchange<L> &shared)
  {
    const float before = most[0];
    reduce_warp<max_op, L>(most);
    share[0] *= shrink(before, most[0]);
    join_warps(shared);
  }

  DEVICE void change(int r, float (&value)[ELEMENTS<T>]) const
  {
#pragma unroll
    for (int j = 0; j < ELEMENTS<T>; j++) value[j] = exponential(value[j] - most[r]) * share[r];
  }
};

#endif
