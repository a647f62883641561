/* few: the epilogue warp. It adds the consumers' parts of a unit, then bias and activation; h to memory, y to shared
 * memory. */
#ifndef CUMOE_FEW_EPILOGUE_CUH
#define CUMOE_FEW_EPILOGUE_CUH

#include "few/n_major.cuh"
#include "few/outputs.cuh"
#include "few/routing.cuh"
#include "few/schedule.cuh"
#include "gemm/epilogue.cuh"

/* The consumers' parts, in the order of k. Lane l: [j + 2h] is weight row l/4 + 8h, token 2 (l%4) + j; where SCALED, j
 * 0 in every lane. `slices` of the unit: who had none has no part. */
template <class S>
DEVICE void add_partials(few_smem<S> &smem, int slices, typename S::RING &buffer, float (&sum)[S::TILES][4])
{
  wait_for(&smem.partial_full[stage_of(buffer)], phase_of(buffer));
  if constexpr (S::SCALED) {
#pragma unroll
    for (int w = 0; w < S::CONSUMERS; w++) {
      if (w >= slices) continue;
#pragma unroll
      for (int t = 0; t < S::TILES; t++) {
        const float2 part = smem.partial[stage_of(buffer)][w][t][lane_id() / 4];
        sum[t][0] += part.x, sum[t][2] += part.y;
      }
    }
  } else {
#pragma unroll
    for (int w = 0; w < S::CONSUMERS; w++) {
#pragma unroll
      for (int t = 0; t < S::TILES; t++) {
        const float4 part = smem.partial[stage_of(buffer)][w][t][lane_id()];
        sum[t][0] += part.x, sum[t][1] += part.y, sum[t][2] += part.z, sum[t][3] += part.w;
      }
    }
  }
  mbarrier_arrive(&smem.partial_empty[stage_of(buffer)]);
  buffer.advance();
}

/* What the sums of a tile's 8 rows are multiplied by, besides the scales of blocks. */
template <class S> DEVICE float rest_of_scale(const gemm_args &g, int half, int expert)
{
  if (!S::SCALED) return 1.f;
  return global_scale(g.b, half, expert) * S::CODE::REST;
}

/* Of two tokens a tile's channel `to`, or two, 8 apart. Weights of rows come later: few_down applies them to its
 * outputs. */
template <class S, class STORE>
DEVICE void finish_tile(const gemm_args &g, const few_column *columns, int to, int count, float low_bias,
                        float high_bias, float (&sum)[4], STORE store)
{
#pragma unroll 1
  for (int j = 0; j < min(S::COLUMNS, 2); j++) {
    float low[1] = {weighted(sum[0], 1.f, 1.f, low_bias)}, high[1] = {weighted(sum[2], 1.f, 1.f, high_bias)};
    sum[0] = sum[1], sum[2] = sum[3];
    if (columns[j] < 0) continue;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      if (S::ACTIVATED) activate<1>(g, low, high);
      store(to + i * 8, column_pair(columns[j]), from_f32<typename S::Y>(low[0]));
      low[0] = high[0];
    }
  }
}

/* Lane l has channel l/4 (gated), or l/4 and l/4 + 8, of two tokens. store(channel of the unit, row, value). All tiles
 * pass the same code: their sums move up to [0]. */
template <class S, class STORE>
DEVICE void finish_unit(const few_args &args, few_smem<S> &smem, const few_units<S> &unit, typename S::RING &buffer,
                        STORE store)
{
  const gemm_args &g = gemm_of<S>(args);
  const bool gated = S::gated(g);
  const int expert = smem.table.expert[unit.active], local = S::N_MAJOR ? row_channel<S>(g) : lane_id() / 4,
            channel = unit.octet * 8 + local;
  const few_column *columns = smem.table.column[unit.active] + lane_id() % 4 * 2;
  const int each = gated ? 1 : 2; /* octets of a tile */
  const bool second = unit.octets > 1;
  float low_bias[S::TILES][1], high_bias[S::TILES][1] = {};
#pragma unroll
  for (int t = 0; t < S::TILES; t++) {
    const int first = channel + t * each * 8, octets = unit.octets - t * each;
    if (t > 0 && octets <= 0) continue;
    load_bias(g.b, 0, expert, first, low_bias[t]);
    if (gated || (t == 0 ? second : octets > 1))
      load_bias(g.b, gated ? 1 : 0, expert, gated ? first : first + 8, high_bias[t]);
  }
  const float low_rest = rest_of_scale<S>(g, 0, expert), high_rest = rest_of_scale<S>(g, gated ? 1 : 0, expert);
  float sum[S::TILES][4] = {};
  int slices = 0;
  if constexpr (S::SCALED) slices = few_slices<S>(g, unit.octets <= each);
  add_partials<S>(smem, slices, buffer, sum);
  if constexpr (S::N_MAJOR)
    if (few_in_pairs<S>(g)) part_pairs<S>(smem.table.weights[unit.active], sum);
#pragma unroll
  for (int t = 0; t < (S::SCALED ? S::TILES : 0); t++) sum[t][0] *= low_rest, sum[t][2] *= high_rest;
#pragma unroll 1
  for (int t = 0; t < S::TILES && (t == 0 || t * each < unit.octets); t++) {
    finish_tile<S>(g, columns, local + t * each * 8, min(each, unit.octets - t * each), low_bias[0][0], high_bias[0][0],
                   sum[0], store);
#pragma unroll
    for (int i = 1; i < S::TILES; i++) {
      low_bias[i - 1][0] = low_bias[i][0], high_bias[i - 1][0] = high_bias[i][0];
#pragma unroll
      for (int j = 0; j < 4; j++) sum[i - 1][j] = sum[i][j];
    }
  }
}

/* A share of up. */
template <class S>
DEVICE void finish_up(const few_args &args, few_smem<S> &smem, int experts, int share, few_tickets<S> &tickets,
                      typename S::RING &buffer)
{
  using Y = typename S::Y;
  few_units<S> unit(args.up, experts, share);
#pragma unroll 1
  for (; unit.left > 0; unit.next()) {
    finish_unit<S>(args, smem, unit, buffer, [&](int local, int row, Y value) {
      store_relaxed(static_cast<Y *>(args.up.c) + row * args.up.c_ld + unit.octet * 8 + local, value);
    });
    tickets.check(); /* all consumers have part in a unit, so they know of this share by now */
  }
}

template <class S>
DEVICE void finish_down(const few_args &args, few_smem<S> &smem, int experts, typename S::RING &buffer)
{
  few_units<S> unit(smem.own, experts);
  write_outputs<S>(args, smem, [&](bool again, uint32_t phase) {
    if (again) wait_for(&smem.y_empty, phase);
#pragma unroll 1
    for (int i = 0; i < experts; i++, unit.next())
      finish_unit<S>(args, smem, unit, buffer,
                     [&](int local, int row, typename S::Y value) { smem.y[row][local] = value; });
    mbarrier_arrive(&smem.y_full);
  });
}

/* The next share that has units, or gridDim.x; the consumers know. Of every share it draws it writes the routing. */
template <class S> DEVICE int next_share(const few_args &args, few_smem<S> &smem, int experts, few_tickets<S> &tickets)
{
  int share;
  do {
    share = tickets.draw();
    if (args.protocol.weights && share < gridDim.x) write_routing<S>(args, smem.table, share);
  } while (share < gridDim.x && few_units<S>(args.up, experts, share).left <= 0);
  if (!tickets.over) tickets.tell(share);
  return share;
}

template <class S> DEVICE void few_finish(const few_args &args, few_smem<S> &smem, int experts)
{
  typename S::RING buffer;
  if constexpr (S::UP) {
    few_tickets<S> tickets = {args, smem, !args.protocol.tickets};
    int share = smem.share[0];
    do {
      finish_up<S>(args, smem, experts, share, tickets, buffer);
      if (!args.protocol.tickets) return;
      share = next_share<S>(args, smem, experts, tickets);
    } while (share < gridDim.x);
  } else {
    wait_for_earlier_grids();
  }
  finish_down<few_part<typename S::layout, operation_down>>(args, smem, experts, buffer);
}

#endif
