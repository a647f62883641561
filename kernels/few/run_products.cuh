/* run: consumer warps, which multiply and leave parts; and the outputs, which are sums of down's. */
#ifndef CUMOE_RUN_PRODUCTS_CUH
#define CUMOE_RUN_PRODUCTS_CUH

#include "few/outputs.cuh"
#include "few/run_feed.cuh"
#include "few/schedule.cuh"

/* ---- products ---- */

/* A thread's vector of every `step`-th row, by N columns. */
template <class S, int N>
DEVICE void multiply_rows(const uint4 *weights, const float (*columns)[S::COLUMNS], int rows, int width, int first,
                          int step, float (&sum)[S::COLUMNS][8])
{
#pragma unroll(N == 1 ? 4 : N == 2 ? 2 : 1)
  for (int r = first; r < rows; r += step) {
    const uint4 raw = weights[r * width];
    float x[N];
    load_f32<N>(columns[r], x);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 w = unpack_pair<typename S::W>(words[i]);
#pragma unroll
      for (int c = 0; c < N; c++) {
        sum[c][2 * i] = fmaf(w.x, x[c], sum[c][2 * i]);
        sum[c][2 * i + 1] = fmaf(w.y, x[c], sum[c][2 * i + 1]);
      }
    }
  }
}

/* A consumer thread: its vector of a unit's rows, which threads of several groups share, row by row. */
template <class S> struct run_consumer {
  const few_args &args;
  run_smem<S> &smem;
  float sum[S::COLUMNS][8];
  int width = 0, vector = 0, group = 0, groups = 0;
  int done = -1; /* the share's flag */

  DEVICE run_consumer(const few_args &a, run_smem<S> &s) : args(a), smem(s) { clear(); }

  DEVICE void clear()
  {
#pragma unroll
    for (int c = 0; c < S::COLUMNS; c++)
#pragma unroll
      for (int i = 0; i < 8; i++) sum[c][i] = 0.f;
  }

  DEVICE void locate(int of)
  {
    if (width == of) return;
    width = of, groups = S::CONSUMER_THREADS / of;
    group = threadIdx.x / of, vector = threadIdx.x - group * of;
  }

  template <int N> DEVICE void multiply(int stage, int rows)
  {
    multiply_rows<S, N>(smem.stages[stage] + vector, smem.columns[stage], rows, width, group, groups, sum);
  }

  DEVICE void multiply(const run_stage &run, int stage)
  {
    if (group >= groups) return;
    if constexpr (S::COLUMNS == 1) {
      multiply<1>(stage, run.rows);
    } else {
      switch (columns_at_once<S>(run.columns)) {
      case 1: multiply<1>(stage, run.rows); break;
      case 2: multiply<2>(stage, run.rows); break;
      case 4: multiply<4>(stage, run.rows); break;
      default: multiply<8>(stage, run.rows);
      }
    }
  }

  /* What other groups have, in their order. */
  DEVICE void fold(float (&s)[8])
  {
    if (group > 0 && group < groups) {
      smem.fold[threadIdx.x][0] = make_float4(s[0], s[1], s[2], s[3]);
      smem.fold[threadIdx.x][1] = make_float4(s[4], s[5], s[6], s[7]);
    }
    bar_sync(RUN_CONSUMERS_BARRIER, S::CONSUMER_THREADS);
    for (int g = 1; g < groups && group == 0; g++) {
      const float4 low = smem.fold[g * width + vector][0], high = smem.fold[g * width + vector][1];
      s[0] += low.x, s[1] += low.y, s[2] += low.z, s[3] += low.w;
      s[4] += high.x, s[5] += high.y, s[6] += high.z, s[7] += high.w;
    }
    bar_sync(RUN_CONSUMERS_BARRIER, S::CONSUMER_THREADS);
  }

  /* The share's part of a unit goes to memory. */
  DEVICE void leave(const run_stage &run)
  {
    const run_parts<S> parts(args, smem, run.down);
#pragma unroll
    for (int c = 0; c < S::COLUMNS; c++) {
      if (c >= run.columns) continue;
      if (groups > 1) fold(sum[c]);
      if (group > 0) continue;
      float4 *to = reinterpret_cast<float4 *>(parts.of(smem, run.share, run.active, run.unit, c) + vector * 8);
      to[0] = make_float4(sum[c][0], sum[c][1], sum[c][2], sum[c][3]);
      to[1] = make_float4(sum[c][4], sum[c][5], sum[c][6], sum[c][7]);
    }
    bar_sync(RUN_CONSUMERS_BARRIER, S::CONSUMER_THREADS);
    const int now = run.last == RUN_SHARE ? (int)RUN_DONE : parts.number(run.active, run.unit);
    if (threadIdx.x == 0) add_release(parts.flags + run.share, now - done);
    done = run.last == RUN_SHARE ? -1 : now;
    clear();
  }
};

template <class S> DEVICE void run_consume(const few_args &args, run_smem<S> &smem)
{
  run_consumer<S> consumer(args, smem);
  pipeline_state<S::STAGES> at;
#pragma unroll 1
  while (true) {
    wait_for(&smem.full[at.stage], at.phase);
    const run_stage run = smem.stage[at.stage];
    if (run.rows == 0) return;
    consumer.locate(run.width);
    consumer.multiply(run, at.stage);
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(&smem.empty[at.stage]);
    at.advance();
    STAMP(threadIdx.x == 0, run.down ? 7 : 5);
    if (run.last) consumer.leave(run);
    STAMP(threadIdx.x == 0 && run.last, run.down ? 8 : 6);
  }
}

/* ---- outputs ---- */

/* y of the pairs, rounded, in the CTA's channels; lies where stages were. */
template <class S> struct run_outputs_smem {
  float y[S::PAIRS][S::OUT_OCTETS * 8];
};

/* Four channels of a pair: sums of a lane's parts, and then of the lanes that share them. */
template <class S>
DEVICE float4 sum_parts(const run_smem<S> &smem, const run_parts<S> &parts, const run_shares &shares, int pair,
                        int channel, bool there)
{
  constexpr int AT_ONCE = 4;
  const run_line &line = parts.line;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (there) {
    const int place = smem.place[pair], active = place / S::COLUMNS;
    const auto at = line.find(0, channel);
    const int begin = shares.of(line.begin(active, at.unit)), last = shares.of(line.last_row(active, at.unit));
    const float *from = parts.of(smem, 0, active, at.unit, place % S::COLUMNS) + at.in_unit;
#pragma unroll 1
    for (int s = begin + lane_id() % S::SHARERS; s <= last; s += AT_ONCE * S::SHARERS) {
      uint4 part[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        part[i] = make_uint4(0, 0, 0, 0);
        if (s + i * S::SHARERS <= last) part[i] = load_relaxed_vector(from + (s + i * S::SHARERS) * parts.most);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        sum.x += __uint_as_float(part[i].x), sum.y += __uint_as_float(part[i].y);
        sum.z += __uint_as_float(part[i].z), sum.w += __uint_as_float(part[i].w);
      }
    }
  }
#pragma unroll
  for (int mask = 1; mask < S::SHARERS; mask *= 2) {
    sum.x += __shfl_xor_sync(ALL_LANES, sum.x, mask), sum.y += __shfl_xor_sync(ALL_LANES, sum.y, mask);
    sum.z += __shfl_xor_sync(ALL_LANES, sum.z, mask), sum.w += __shfl_xor_sync(ALL_LANES, sum.w, mask);
  }
  return sum;
}

template <class S>
DEVICE void sum_pairs(const few_args &args, run_smem<S> &smem, const run_shares &shares, int octet, int octets)
{
  using Y = typename S::Y;
  const run_parts<S> parts(args, smem, true);
  run_outputs_smem<S> &out = *reinterpret_cast<run_outputs_smem<S> *>(&smem.stages);
  static_assert(sizeof out <= sizeof smem.stages, "room for it");
  const int fours = octets * 2, items = (int)token_total(args.map.tokens) * args.map.top_k * fours;
  const int each = WARP_SIZE / S::SHARERS; /* items of a warp */
#pragma unroll 1
  for (int first = warp_id() * each; first < items; first += S::THREADS / S::SHARERS) {
    const int item = first + lane_id() / S::SHARERS, pair = min(item, items - 1) / fours,
              local = (item - pair * fours) * 4, channel = octet * 8 + local;
    const bool there = item < items && smem.table.to[pair] >= 0 && smem.table.weight[pair] != 0;
    const float4 sum = sum_parts<S>(smem, parts, shares, pair, channel, there);
    if (!there || lane_id() % S::SHARERS) continue;
    float bias[4];
    load_bias(args.down.b, 0, smem.table.to[pair], channel, bias);
    float *y = &out.y[pair][local];
    y[0] = to_f32(from_f32<Y>(sum.x + bias[0])), y[1] = to_f32(from_f32<Y>(sum.y + bias[1]));
    y[2] = to_f32(from_f32<Y>(sum.z + bias[2])), y[3] = to_f32(from_f32<Y>(sum.w + bias[3]));
  }
}

/* A token's sum over its slots, as in outputs.cuh. */
template <class S>
DEVICE float sum_run_slots(const few_args &args, const run_smem<S> &smem, int token, int local, int channel)
{
  using T = typename S::Y;
  const combine_args &out = args.out;
  const run_outputs_smem<S> &of = *reinterpret_cast<const run_outputs_smem<S> *>(&smem.stages);
  float sum = 0;
#pragma unroll 4
  for (int pair = token * out.top_k; pair < (token + 1) * out.top_k; pair++) {
    const float weight = smem.table.weight[pair];
    if (weight == 0) continue;
    float value = of.y[pair][local];
    if (smem.table.to[pair] == ROW_IDENTITY) value = to_f32(static_cast<const T *>(out.x)[token * out.x_ld + channel]);
    sum = fmaf(weight, value, sum);
  }
  if (!out.shared) return sum;
  const float weight = shared_weight(out, token);
  if (weight == 0) return sum;
  return fmaf(weight, to_f32(static_cast<const T *>(out.shared)[token * out.shared_ld + channel]), sum);
}

template <class S> DEVICE void store_run(const few_args &args, const run_smem<S> &smem, int octet, int octets)
{
  const combine_args &out = args.out;
  const int width = octets * 8, items = (int)token_total(out.tokens) * width;
#pragma unroll 1
  for (int item = threadIdx.x; item < items; item += S::THREADS) {
    const int token = item / width, local = item - token * width, channel = octet * 8 + local;
    const float sum = sum_run_slots<S>(args, smem, token, local, channel);
    float value = out.out_scale * sum;
    if (out.residual)
      value = fmaf(out.out_scale, sum, load_any(out.residual, token * out.residual_ld + channel, out.out_dtype));
    store_output<typename S::Y>(out.out, token * out.out_ld + channel, value, out.out_dtype);
  }
}

/* All threads; nobody needs stages any more, and all pairs' weights are there. */
template <class S> DEVICE void run_outputs(const few_args &args, run_smem<S> &smem, int experts)
{
  const run_parts<S> parts(args, smem, true);
  const run_shares shares(smem.line[1], experts);
  for (int s = threadIdx.x; s < shares.count; s += S::THREADS)
    while (load_acquire(parts.flags + s) < RUN_DONE) {
    }
  __syncthreads();
  STAMP(threadIdx.x == 0, 9);
  const few_range own = part_of_cta(args.down.n / 8);
  const int end = own.first + own.count;
#pragma unroll 1
  for (int octet = own.first; octet < end; octet += S::OUT_OCTETS) {
    const int octets = min(end - octet, (int)S::OUT_OCTETS);
    sum_pairs<S>(args, smem, shares, octet, octets);
    __syncthreads();
    store_run<S>(args, smem, octet, octets);
    __syncthreads();
  }
  STAMP(threadIdx.x == 0, 10);
}

#endif
