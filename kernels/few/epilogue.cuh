/* few: the epilogue warp. It adds the consumers' parts of a unit, then bias and activation; h to memory, y to shared
 * memory. */
#ifndef CUMOE_FEW_EPILOGUE_CUH
#define CUMOE_FEW_EPILOGUE_CUH

#include "few/outputs.cuh"
#include "few/routing.cuh"
#include "few/schedule.cuh"
#include "gemm/epilogue.cuh"

/* The consumers' parts, in the order of k. Lane l: [j + 2h] is weight row l/4 + 8h, token 2 (l%4) + j. */
template <class S> DEVICE void add_partials(few_smem<S> &smem, pipeline_state<S::BUFFERS> &buffer, float (&sum)[4])
{
  wait_for(&smem.partial_full[buffer.stage], buffer.phase);
#pragma unroll
  for (int w = 0; w < S::CONSUMERS; w++) {
    const float4 part = smem.partial[buffer.stage][w][lane_id()];
    sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
  }
  mbarrier_arrive(&smem.partial_empty[buffer.stage]);
  buffer.advance();
}

/* Lane l has channel l/4 (gated), or l/4 and l/4 + 8, of two tokens. store(channel of the unit, row, value). */
template <class S, class STORE>
DEVICE void finish_unit(const few_args &args, few_smem<S> &smem, const few_units<S> &unit,
                        pipeline_state<S::BUFFERS> &buffer, STORE store)
{
  const gemm_args &g = gemm_of<S>(args);
  const bool gated = S::gated(g);
  const int expert = smem.table.expert[unit.active], local = lane_id() / 4, channel = unit.octet * 8 + local;
  const few_column *columns = smem.table.column[unit.active] + lane_id() % 4 * 2;
  const bool second = unit.octets > 1;
  const float none[1] = {1.f}; /* weights of rows, which few_down applies to its outputs */
  float low_bias[1], high_bias[1] = {};
  load_bias(g.b, 0, expert, channel, low_bias);
  if (gated || second) load_bias(g.b, gated ? 1 : 0, expert, gated ? channel : channel + 8, high_bias);
  float sum[4] = {};
  add_partials<S>(smem, buffer, sum);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    if (columns[j] < 0) continue;
    const int row = pair_of(columns[j]);
    float low[1] = {sum[j]}, high[1] = {sum[j + 2]};
    finish<S::OPERATION::EPILOGUE, false>(g, none, low_bias, high_bias, low, high);
    store(local, row, from_f32<typename S::Y>(low[0]));
    if (gated || !second) continue;
    if (S::ACTIVATED) activate<1>(g, high, low);
    store(local + 8, row, from_f32<typename S::Y>(high[0]));
  }
}

/* A share of up. */
template <class S>
DEVICE void finish_up(const few_args &args, few_smem<S> &smem, int experts, int share, few_tickets<S> &tickets,
                      pipeline_state<S::BUFFERS> &buffer)
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
DEVICE void finish_down(const few_args &args, few_smem<S> &smem, int experts, pipeline_state<S::BUFFERS> &buffer)
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

template <class S> DEVICE void few_finish(const few_args &args, few_smem<S> &smem, int experts)
{
  pipeline_state<S::BUFFERS> buffer;
  if constexpr (S::UP) {
    few_tickets<S> tickets = {args, smem, !args.protocol.tickets};
    int share = smem.share[0];
    finish_up<S>(args, smem, experts, share, tickets, buffer);
    if (!args.protocol.tickets) return;
    do {
      share = tickets.draw();
      if (args.protocol.weights && share < gridDim.x) write_routing<S>(args, share, smem.scratch[1]);
      if (share < gridDim.x && few_units<S>(args.up, experts, share).left <= 0) continue;
      if (!tickets.over) tickets.tell(share);
      finish_up<S>(args, smem, experts, share, tickets, buffer);
    } while (share < gridDim.x);
  } else {
    wait_for_earlier_grids();
  }
  finish_down<few_part<typename S::layout, operation_down>>(args, smem, experts, buffer);
}

#endif
