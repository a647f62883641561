/*
 * drawn: the experts of few tokens, weights with scales: few.cuh's one grid, another way.
 *
 *   drawn_layout.cuh   shapes, shared memory            drawn_products.cuh   4 bits: columns in fixed point, products
 *   drawn_feed.cuh     units; what is asked for ahead   drawn_bytes.cuh      8 bits: columns as codes, products
 *
 * Of weights of 4 bits an SM wants more of its instructions than of its copies, so all warps multiply. A unit is 32
 * weight rows of an expert, 16 gate and the same 16 up channels or 32 channels, by all of k; a part of its k is a
 * warp's, who copies its own slices. CTAs draw units of up, two at a time, of one token one, from one counter; of down
 * each has its own channels. Whose part of a unit of up is the last adds the parts up; those of down are added up where
 * outputs are made. h is all ones until it is written, and is read again until it is. What a warp waits for is always
 * in the hands of one that drew it before.
 *
 * With each slice come the columns of its expert's tokens, up to four, as they lie in memory; the warp brings them into
 * fixed point in their place (device/fixed_point.cuh), as they are of use to no other. Their upper and lower bytes are
 * the mma's eight columns, so a lane has both sums of a token. An expert with more pairs is there again (table.cuh).
 *
 * Of weights of 8 bits columns become codes instead: of groups of 128 k by themselves; of a scale a token once each CTA
 * knows the largest size of the row, of x while the router runs, of h as soon as all of it is written. s8 is multiplied
 * as it lies; e4m3 in f16, where a product of two codes is exact.
 */
#ifndef CUMOE_DRAWN_CUH
#define CUMOE_DRAWN_CUH

#include "few/drawn_bytes.cuh"
#include "few/epilogue.cuh"
#include "few/table.cuh"

/* ---- units ---- */

/* A tile of a unit, by the warp that has all of its sums: h to memory, y to shared memory. Lane l has rows l / 4 and
 * l / 4 + 8 of the tile, and token l % 4. */
template <class P>
DEVICE void finish_drawn(const few_args &args, drawn_smem<P> &smem, const drawn_unit &unit, int tile, int first,
                         const float (&sum)[2])
{
  using Y = typename P::Y;
  const gemm_args &g = P::DOWN ? args.down : args.up;
  const bool gated = !P::DOWN && g.gated;
  const int expert = smem.table.expert[unit.active], octet = unit.octet + (gated ? tile : 2 * tile),
            channel = octet * 8 + lane_id() / 4, end = P::DOWN ? smem.own.first + smem.own.count : g.n / 8;
  const int pair = smem.table.column[unit.active][lane_id() % 4] < 0
                       ? -1
                       : column_pair(smem.table.column[unit.active][lane_id() % 4]);
  if (octet >= end || pair < 0) return;
  float value[2][1], bias[2][1] = {};
#pragma unroll
  for (int o = 0; o < 2; o++) {
    const int half = gated ? o : 0, n = gated ? channel : channel + 8 * o;
    if ((o == 0 || gated || octet + 1 < end) && (!P::DOWN || unit.part == 0)) load_bias(g.b, half, expert, n, bias[o]);
    value[o][0] = weighted(sum[o] * (global_scale(g.b, half, expert) * P::CODE::REST), 1.f, 1.f, bias[o][0]);
  }
#pragma unroll 1
  for (int o = 0; o < (gated || octet + 1 == end ? 1 : 2); o++, value[0][0] = value[1][0]) {
    if (P::ACTIVATED) activate<1>(g, value[0], value[1]);
    if constexpr (P::DOWN)
      smem.y.sums[unit.part * smem.y.part + (pair * smem.y.octets - first) * 8 + channel + 8 * o] = value[0][0];
    else
      store_relaxed(static_cast<Y *>(g.c) + pair * g.c_ld + channel + 8 * o, from_f32<Y>(value[0][0]));
  }
}

/* A warp's part of a unit of up. Whether it was the last one that was missing: then `sum` is the unit's, else zeros. A
 * place is had by one unit after the other; whoever waits for it waits for warps that wait for earlier ones alone. */
template <class L> DEVICE bool add_up_parts(drawn_line<L> &line, const drawn_unit &unit, float (&sum)[L::TILES][2])
{
  const int place = unit.number % L::AWAITED, turn = unit.number / L::AWAITED, lane = lane_id();
  volatile int32_t *turns = line.turn + place;
  while (*turns != turn) __nanosleep(FEW_POLL);
  __syncwarp();
#pragma unroll
  for (int t = 0; t < L::TILES; t++) {
    line.sums[place][unit.part][t][lane] = make_float2(sum[t][0], sum[t][1]);
    sum[t][0] = sum[t][1] = 0.f;
  }
  __threadfence_block();
  __syncwarp();
  const int before = __shfl_sync(ALL_LANES, lane == 0 ? atomicAdd(&line.count[place], 1) : 0, 0);
  if (before + 1 < line.parts) return false;
  __threadfence_block();
#pragma unroll 1
  for (int p = 0; p < line.parts; p++)
#pragma unroll
    for (int t = 0; t < L::TILES; t++) {
      const float2 part = line.sums[place][p][t][lane];
      sum[t][0] += part.x, sum[t][1] += part.y;
    }
  __syncwarp();
  if (lane == 0) {
    line.count[place] = 0;
    __threadfence_block();
    *turns = turn + 1;
  }
  return true;
}

template <class L>
DEVICE void multiply_drawn(const few_args &args, drawn_smem<L> &smem, const drawn_lane<L> &lane,
                           const drawn_slice<L> &at, drawn_stage<L> &stage, float (&sum)[L::TILES][2])
{
  const gemm_args &g = at.unit.down ? args.down : args.up;
  float(&worth)[L::COLUMNS][L::RUNS] = smem.worth[warp_id()];
  if constexpr (L::BYTES) {
    arrange_bytes<L>(args, smem, at, stage, worth);
    return multiply_bytes<L>(stage, lane, worth, at, g.b, sum);
  } else {
    arrange_columns<L>(g, at, smem.table.column[at.unit.active], stage, worth);

    const drawn_reader<L> from(stage, lane, worth, at.unit.columns);
    if constexpr (same_type<typename L::W, mx4>)
      multiply_slice_mx4<L>(from, smem.zeros, at.scales, sum);
    else
      multiply_slice<L>(from, *reinterpret_cast<const volatile uint32_t *>(smem.zeros), at.scales, g.b.scale.dtype,
                        sum);
  }
}

/* A warp's units: of up, unless this is not the first round, and of down those of its CTA's octets from `first` on. */
template <class L> DEVICE void consume_drawn(const few_args &args, drawn_smem<L> &smem, int experts, int first)
{
  const drawn_lane<L> lane;
  drawn_feed<L> feed(args, smem, lane, experts, first);
  float sum[L::TILES][2] = {};
#pragma unroll 1
  for (int i = -(L::STAGES - 1), stage = 0;; i++) { /* the first rounds only ask */
    if (i >= 0) cp_async_wait_group<L::STAGES - 2>();
    __syncwarp(); /* all lanes' copies are there, and the stage before is read */
    const drawn_slice<L> at = feed.next();
    if (args.protocol.weights && feed.routes) {
      const int token = __ffs(feed.routes) - 1;
      feed.routes &= feed.routes - 1;
      if (token < (int)token_total(args.gate.tokens)) write_routing<L>(args, smem.table, (int)gridDim.x - 1 - token);
    }
    if (i < 0) continue;
    if (at.unit.active < 0) break;
    multiply_drawn<L>(args, smem, lane, at, smem.stages[warp_id()][stage], sum);
    stage = stage == L::STAGES - 1 ? 0 : stage + 1;
    if (!at.last) continue;
    if (!at.unit.down && smem.line.parts > 1 && !add_up_parts<L>(smem.line, at.unit, sum)) continue;
#pragma unroll 1
    for (int t = 0; t < L::TILES; t++) { /* the same code: sums move up */
      if (at.unit.down)
        finish_drawn<drawn_part<L, true>>(args, smem, at.unit, t, first, sum[0]);
      else
        finish_drawn<drawn_part<L, false>>(args, smem, at.unit, t, first, sum[0]);
#pragma unroll
      for (int j = 0; j < 2; j++) sum[0][j] = sum[L::TILES - 1][j], sum[L::TILES - 1][j] = 0.f;
    }
  }
}

/* ---- the grid ---- */

template <class L> DEVICE void write_drawn_outputs(const few_args &args, drawn_smem<L> &smem, int first)
{
  const few_outputs<L> outputs(args);
  const int end = min(first + smem.y.octets, smem.own.first + smem.own.count);
#pragma unroll 1
  for (int octet = first; octet < end; octet += 2)
    store_outputs<L>(args, smem, outputs, octet, min(2, end - octet), (octet - first) * 8);
}

template <class L> DEVICE void drawn_gemm(const few_args &args, drawn_smem<L> &smem)
{
  const bool one = args.up.rows_cap <= args.map.top_k; /* token, at most */
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.weights_ready, WARP_SIZE);
    smem.own = part_of_cta(args.down.n / 8), smem.drawn = 0;
    smem.y.cut(args.down.k, smem.own.count, min((int)args.up.rows_cap, (int)L::PAIRS), args.map.local_experts, one);
    smem.zeros[0] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x < L::AWAITED) smem.line.count[threadIdx.x] = smem.line.turn[threadIdx.x] = 0;
  if (threadIdx.x < L::TICKETS) smem.line.ticket[threadIdx.x].x = -1, smem.line.read[threadIdx.x] = 0;
  if (threadIdx.x == WARP_SIZE) smem.line.cut(args.up.k, one);
  const bool early = args.protocol.weights; /* the grid ahead is the router, which reads x as well */
  if constexpr (L::CODE::QUANTISES) prepare_rows_of_codes<L>(args, smem, early);
  wait_for_earlier_grids();
  if constexpr (L::CODE::QUANTISES)
    if (!early) measure_x<L>(args, smem);
  __syncthreads();
  if (threadIdx.x == 0) draw_ticket<L>(args, smem, 0, true);
  check_token_count(args.map.tokens, args.map.fault);
  if (args.protocol.weights) choose_experts<L>(args.gate, smem);
  const int experts = build_few_table<L>(args, smem);
  const int end = smem.own.first + smem.own.count;
#pragma unroll 1
  for (int first = smem.own.first; first == smem.own.first || first < end; first += smem.y.octets) {
    consume_drawn<L>(args, smem, experts, first);
    if (first == smem.own.first && warp_id() == 0) take_weights<L>(args, smem);
    __syncthreads();
    if (threadIdx.x == 0) smem.drawn = 0;
    write_drawn_outputs<L>(args, smem, first);
    __syncthreads();
  }
  if (warp_id() == 1) report_counts<L>(args.map, smem.table);
}

#endif
