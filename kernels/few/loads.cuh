/* few: how weights without scales and tokens come to a consumer warp's stages, and h that is still being written. */
#ifndef CUMOE_FEW_LOADS_CUH
#define CUMOE_FEW_LOADS_CUH

#include "few/n_major.cuh"

/* ---- copies ---- */

/* Vectors of 16 bytes; those of odd rows are swizzled, so that two rows do not meet in a bank. */
DEVICE int few_vector(int row, int vector, int vectors)
{
  return row * vectors + (vectors > 4 ? vector ^ (row & 1) << 2 : vector);
}

/* By a warp: 32 lanes bring 512 bytes of a row. */
template <class S>
DEVICE void copy_wide_weights(const gemm_args &g, const few_units<S> &unit, few_halves of, int slice,
                              few_stage<S> &stage)
{
  using W = typename S::W;
  const int k = slice * 2 * S::BK + lane_id() * 8;
  const W *row = static_cast<const W *>(of.low) + unit.octet * 8 * g.b.n_stride + k;
  const uint32_t to = shared_address(stage.weights);
#pragma unroll
  for (int i = 0; i < 8; i++)
    cp_async_cg_16(to + few_vector(i, lane_id(), WARP_SIZE) * 16, row + i * g.b.n_stride, k < g.k ? 16 : 0,
                   evict_first_policy());
}

/* By a warp: 16 lanes bring 256 bytes of a row. */
template <class S>
DEVICE void copy_weights(const gemm_args &g, const few_units<S> &unit, few_halves of, int slice, few_stage<S> &stage)
{
  using W = typename S::W;
  if constexpr (S::N_MAJOR) return copy_n_major(g, unit, of, slice, stage);
  if (unit.wide()) return copy_wide_weights(g, unit, of, slice, stage);
  const int k0 = slice * S::BK;
  const int row = lane_id() / S::VECTORS, vector = lane_id() % S::VECTORS, k = k0 + vector * 8;
  const bool gated = S::gated(g);
  const int64_t at = (unit.octet * 8 + row) * g.b.n_stride + k, step = S::COPY_ROWS * g.b.n_stride;
  const W *low = static_cast<const W *>(of.low) + at;
  const W *high = static_cast<const W *>(of.high) + (gated ? at : at + 8 * g.b.n_stride);
  const int low_bytes = k < g.k ? 16 : 0, high_bytes = gated || unit.octets > 1 ? low_bytes : 0;
  const uint32_t to = shared_address(stage.weights) + few_vector(row, vector, S::VECTORS) * 16;
#pragma unroll
  for (int i = 0; i < S::COPIES / 2; i++) {
    cp_async_cg_16(to + i * WARP_SIZE * 16, low + i * step, low_bytes, evict_first_policy());
    cp_async_cg_16(to + (i + S::COPIES / 2) * WARP_SIZE * 16, high + i * step, high_bytes, evict_first_policy());
  }
}

/* Of x, or of h. */
template <class S, int VECTORS>
DEVICE void copy_column_vectors(const gemm_args &g, const few_column (&of)[FEW_COLUMNS], int slice, few_stage<S> &stage)
{
  const int vector = lane_id() % VECTORS, k = (slice * VECTORS + vector) * 8;
  const uint4 all = *reinterpret_cast<const uint4 *>(of); /* by one load, ahead of the copies */
#pragma unroll
  for (int i = 0; i < S::COLUMNS; i += WARP_SIZE / VECTORS) {
    const int c = i + lane_id() / VECTORS;
    if (c >= S::COLUMNS) continue;
    const int first = VECTORS < 16 ? c : i;
    const uint32_t two = first < 2 ? all.x : first < 4 ? all.y : first < 6 ? all.z : all.w;
    const few_column column = (few_column)(c % 2 ? two >> 16 : two);
    const int row = column < 0 ? 0 : S::GATHERED ? column_token(column) : column_pair(column);
    cp_async_cg_16(shared_address(stage.columns) + few_vector(c, vector, VECTORS) * 16,
                   static_cast<const typename S::X *>(g.a) + row * g.a_ld + k, column >= 0 && k < g.k ? 16 : 0);
  }
}

template <class S>
DEVICE void copy_columns(const gemm_args &g, const few_units<S> &unit, const few_column (&of)[FEW_COLUMNS], int slice,
                         few_stage<S> &stage)
{
  if (unit.wide())
    copy_column_vectors<S, 2 * S::SLICE_K / 8>(g, of, slice, stage);
  else
    copy_column_vectors<S, S::SLICE_K / 8>(g, of, slice, stage);
}

/* A consumer warp's copies: a cp.async group for each slice, also for none. */
template <class L> struct few_copier {
  using U = few_part<L, operation_up>;
  using D = few_part<L, operation_down>;
  const few_args &args;
  few_memory<L> &smem;
  few_cursor<U> up;
  few_cursor<D> down;
  pipeline_state<L::STAGES> to;

  DEVICE few_copier(const few_args &a, few_memory<L> &s, int experts, int share)
      : args(a), smem(s), up(a.up, {a.up, experts, share}), down(a.down, {s.own, experts})
  {
  }

  DEVICE few_stage_of<L> &stage() const { return smem.stages[warp_id()][to.stage]; }
  DEVICE void advance()
  {
    cp_async_commit_group();
    to.advance();
  }

  DEVICE void down_weights()
  {
    const void *of = smem.table.down[down.unit.active];
    copy_weights<D>(args.down, down.unit, {of, of}, down.slice, stage());
  }
  DEVICE void down_columns()
  {
    copy_columns<D>(args.down, down.unit, smem.table.column[down.unit.active], down.slice, stage());
  }
  DEVICE void next_of_down()
  {
    if (down.find()) down_weights(), down_columns();
    down.slice += L::CONSUMERS;
    advance();
  }
  /* After the last one of up come down's, where the grid does both: with as much of h as there is. */
  DEVICE void next_of_up()
  {
    if (!up.find() && args.protocol.tickets) return next_of_down();
    if (up.unit.left > 0) {
      const int active = up.unit.active;
      copy_weights<U>(args.up, up.unit, smem.table.weights[active], up.slice, stage());
      copy_columns<U>(args.up, up.unit, smem.table.column[active], up.slice, stage());
      up.slice += L::CONSUMERS;
    }
    advance();
  }
};

/* ---- columns to registers ---- */

/* What a lane feeds of the columns: of column l/4. */
template <class S, int VECTORS> DEVICE void load_columns(const few_stage<S> &stage, uint4 (&x)[VECTORS / 4])
{
  const uint4 *columns = reinterpret_cast<const uint4 *>(stage.columns);
  const int row = lane_id() / 4;
#pragma unroll
  for (int i = 0; i < VECTORS / 4; i++)
    x[i] = row < S::COLUMNS ? columns[few_vector(row, i * 4 + lane_id() % 4, VECTORS)] : make_uint4(0, 0, 0, 0);
}

/* Some element is all ones: not written yet (protocol.h). */
template <int N> DEVICE bool has_unwritten(const uint4 (&x)[N])
{
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < N; i++) most = __vimax3_u16x2(__vimax3_u16x2(most, x[i].x, x[i].y), x[i].z, x[i].w);
  return most >= 0xffff0000u || (most & 0xffff) == 0xffff;
}

/* A slice's columns of h once more, until they are written. By a warp. */
template <class S, int VECTORS>
DEVICE void poll_columns(const gemm_args &g, const few_column (&of)[FEW_COLUMNS], int slice, few_stage<S> &stage)
{
  const int vector = lane_id() % VECTORS, k = (slice * VECTORS + vector) * 8;
#pragma unroll 1
  for (int c = lane_id() / VECTORS; c < S::COLUMNS; c += WARP_SIZE / VECTORS) {
    if (of[c] < 0 || k >= g.k) continue;
    uint4 h[1];
    do h[0] = load_relaxed_vector(static_cast<const typename S::X *>(g.a) + column_pair(of[c]) * g.a_ld + k);
    while (has_unwritten(h));
    reinterpret_cast<uint4 *>(stage.columns)[few_vector(c, vector, VECTORS)] = h[0];
  }
  __syncwarp();
}

/* h_complete: by an earlier grid. */
template <class S, int VECTORS>
DEVICE void take_columns(const gemm_args &g, bool h_complete, const few_column (&of)[FEW_COLUMNS], int slice,
                         few_stage<S> &stage, uint4 (&x)[VECTORS / 4])
{
  load_columns<S, VECTORS>(stage, x);
  if (S::UP || h_complete || !__any_sync(ALL_LANES, has_unwritten(x))) return;
  __syncwarp();
  poll_columns<S, VECTORS>(g, of, slice, stage);
  load_columns<S, VECTORS>(stage, x);
}

#endif
