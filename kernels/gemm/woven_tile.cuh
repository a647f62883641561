/*
 * The products of form wgmma with weights of 4 bits and few rows (tokens), for shapes that are WOVEN (gemm/packed.cuh).
 *
 * As in gemm/mixed.cuh a lane takes the 16 bytes of a weight row that hold 32 neighbouring codes of a slab of 128 k,
 * lane q of four k = 32 q and on, and two codes 16 bits apart become a register of an operand: k = 32 q + 8 w + 4 t + j
 * (w, j < 4, t < 2) is multiplied as k 32 w + 8 j + 2 q + t. Rows come by tensor copies in their own order; HELPERS
 * warps of the producers put each stage's into that order where it lies.
 *
 * Four warpgroups of consumers have 64 weight rows each. While one unpacks others are multiplied. A lane asks for the
 * scales of one weight row of its warp, 16 bytes at a time and long before they are used; the lanes of a row get them
 * by shuffles.
 */
#ifndef CUMOE_WOVEN_TILE_CUH
#define CUMOE_WOVEN_TILE_CUH

#include "gemm/packed_tile.cuh"

/* What a stage has besides. */
template <class S> struct woven_stages {
  uint64_t posted[UNITS_AHEAD];    /* which unit it is, for weavers */
  uint64_t rows_there[S::STAGES];  /* as they lie in memory; `full`: woven, and the codes */
};

/* ---- weavers ---- */

/* Of the halves of eight words those that `halves` selects, two by two. */
DEVICE uint4 joined_halves(const uint4 (&v)[4], bool odd, uint32_t halves)
{
  return odd ? make_uint4(__byte_perm(v[0].y, v[0].w, halves), __byte_perm(v[1].y, v[1].w, halves),
                          __byte_perm(v[2].y, v[2].w, halves), __byte_perm(v[3].y, v[3].w, halves))
             : make_uint4(__byte_perm(v[0].x, v[0].z, halves), __byte_perm(v[1].x, v[1].z, halves),
                          __byte_perm(v[2].x, v[2].z, halves), __byte_perm(v[3].x, v[3].z, halves));
}

/* Rows of a stage, where they lie. A warp has octets of rows, OCTETS at once; a lane a row of each, of which it reads
 * 8 k of each 32, k = 32 q + 8 w and on, and writes the 32 k that they become. */
template <class S, int OCTETS> DEVICE void weave_octets(uint32_t rows)
{
  const int r = lane_id() % 8, w = lane_id() / 8;
  const uint32_t from = rows + r * 128 + (w ^ r) * 16, to = rows + w / 2 * S::BM * 128 + r * 128 + (w % 2 * 4 ^ r) * 16;
  uint4 v[OCTETS][4];
#pragma unroll
  for (int o = 0; o < OCTETS; o++)
#pragma unroll
    for (int q = 0; q < 4; q++) v[o][q] = lds_128((from ^ q % 2 * 64) + q / 2 * S::BM * 128 + o * 1024);
  __syncwarp();
#pragma unroll
  for (int o = 0; o < OCTETS; o++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      sts_128((to ^ j * 16) + o * 1024, joined_halves(v[o], j / 2, j % 2 ? 0x7632 : 0x5410));
}

template <class S> DEVICE void weave_stage(wgmma_smem<S> &smem, int stage, int octets)
{
  const uint32_t rows = shared_address(smem.rows[stage]);
#pragma unroll 1
  for (int o = (warp_id() - 1) * 2; o < octets; o += 2 * S::HELPERS)
    weave_octets<S, 2>(rows + o * 1024);
  fence_proxy_async_shared();
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(&smem.full[stage]);
}

/* By HELPERS warps behind the first, unit by unit as producers post them. Rows come by 16: octets are even. */
template <class S> DEVICE void weave(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  pipeline_state<S::STAGES> at;
  pipeline_state<UNITS_AHEAD> slot;
#pragma unroll 1
  for (;; slot.advance()) {
    wait_for(&smem.posted[slot.stage], slot.phase);
    if (smem.units[slot.stage].expert < 0) break;
    const int octets = ceil_div(smem.units[slot.stage].rows, 16) * 2;
#pragma unroll 1
    for (int k0 = 0; k0 < args.g.k; k0 += S::BK, at.advance()) {
      wait_for(&smem.rows_there[at.stage], at.phase);
      weave_stage(smem, at.stage, octets);
    }
  }
  if (lane_id() == 0) mbarrier_arrive(&smem.full[at.stage]);
}

/* ---- consumers: scales ---- */

/* Of a warp's weight rows. Lanes i and i + ROWS have those of row i: of a window of k the first VECTORS' and then the
 * next ones'. */
template <class S> struct woven_scales {
  using W = typename S::CODE;
  using FACTORS = weight_factors<typename S::X, W>;
  static constexpr int ROWS = S::OCTETS * 8, SHARES = WARP_SIZE / ROWS; /* lanes of a row */
  static constexpr int WORDS = scale_bytes_of<S>() / 4;                 /* of a row and stage */
  static constexpr int EACH = 16 / (4 * WORDS), WINDOW = EACH * SHARES; /* stages: of a lane's vector, of all */
  const uint8_t *row; /* this lane's next ones */
  int left;           /* how many there are from there on */
  uint4 now, next;
  bool absent; /* some of a tile's scales are not in its products */

  DEVICE woven_scales(const gemm_sm90_args &args, const tile_unit &tile)
  {
    const int first = consumer_lane() / ROWS * 16,
              own = ((int)(tid_x() / WARP_SIZE) - S::GROUP / WARP_SIZE) * ROWS + consumer_lane() % ROWS;
    row = scales_of(args.g.b.scale, tile.expert, weight_row_of<S>(args, tile, own)) + first * args.g.b.scale.k_stride;
    left = args.g.k / operand<W>::K_PER_SCALE - first;
    absent = false;
    load(args.g.b.scale);
  }

  /* No word is read that has no scale of the row. */
  DEVICE void load(const scale_matrix &s)
  {
    next = make_uint4(0, 0, 0, 0);
    if (s.k_stride == 1 && left >= 16 && ((uintptr_t)row & 15) == 0)
      next = __ldg(reinterpret_cast<const uint4 *>(row));
    else if (left > 0)
      next = s.k_stride == 1 ? words() : bytes(s);
    row += 16 * SHARES * s.k_stride;
    left -= 16 * SHARES;
  }

  DEVICE uint4 words() const
  {
    const int skew = (int)((uintptr_t)row & 3), end = skew + min(left, 16);
    const uint32_t *from = reinterpret_cast<const uint32_t *>(row - skew);
    uint32_t word[5];
#pragma unroll
    for (int w = 0; w < 5; w++) word[w] = w * 4 < end ? __ldg(from + w) : 0;
    return make_uint4(__funnelshift_r(word[0], word[1], skew * 8), __funnelshift_r(word[1], word[2], skew * 8),
                      __funnelshift_r(word[2], word[3], skew * 8), __funnelshift_r(word[3], word[4], skew * 8));
  }

  DEVICE uint4 bytes(const scale_matrix &s) const
  {
    uint32_t word[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
      word[w] = 0;
#pragma unroll 1
      for (int b = 0; b < 4; b++)
        if (w * 4 + b < left) word[w] |= (uint32_t)__ldg(row + (w * 4 + b) * s.k_stride) << b * 8;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }

  /* What products cannot have is left out. */
  DEVICE uint32_t without_absent(uint32_t word, int there)
  {
    bool any = false;
    if (same_type<typename S::X, bf16> && same_type<W, mx4>) {
      any = ((word & 0x7f7f7f7f) + 0x7f7f7f7f & word & 0x80808080) != 0;
    } else {
#pragma unroll
      for (int b = 0; b < 4; b++) any |= scale_is_absent<typename S::X, W>(word >> b * 8 & 255);
    }
    if (!any) return word;
#pragma unroll 1
    for (int b = 0; b < 4; b++) {
      if (!scale_is_absent<typename S::X, W>(word >> b * 8 & 255)) continue;
      word = (word & ~(255u << b * 8)) | (uint32_t)FACTORS::ABSENT << b * 8;
      absent |= b < there;
    }
    return word;
  }

  /* Those of the next window are asked for, and these used. Of any lane of the warp. */
  DEVICE void turn(const scale_matrix &s)
  {
    const int there = left + 16 * SHARES;
    now = make_uint4(without_absent(next.x, there), without_absent(next.y, there - 4),
                     without_absent(next.z, there - 8), without_absent(next.w, there - 12));
    load(s);
  }

  /* Of stage `stage` of the window: of the lane's weight rows and its 32 k. */
  DEVICE FACTORS factors(int stage)
  {
    const int from = stage / EACH * ROWS + consumer_lane() / 4, q = consumer_lane() % 4;
    FACTORS f;
#pragma unroll
    for (int r = 0; r < S::OCTETS; r++) {
      uint32_t word = __shfl_sync(ALL_LANES, now.x, from + r * 8);
      if constexpr (WORDS == 1) {
        f.set(r, __byte_perm(word, 0, 0x4440 + q));
      } else {
        const uint32_t second = __shfl_sync(ALL_LANES, now.y, from + r * 8);
        f.set(r, __byte_perm(word, second, 0x10 + q * 0x22) & 0xffff);
      }
    }
    now = WORDS == 1 ? make_uint4(now.y, now.z, now.w, now.x) : make_uint4(now.z, now.w, now.x, now.y);
    return f;
  }
};

/* ---- consumers: products ---- */

/* Codes of word w of a lane's rows, as operands: of each 16 k and block. */
template <class S, class FACTORS>
DEVICE void unpack_woven(const uint4 (&raw)[S::OCTETS], int w, const FACTORS &factors, uint32_t (&a)[2][S::BLOCKS][4])
{
#pragma unroll
  for (int r = 0; r < S::OCTETS; r++) {
    const uint32_t word = w == 0 ? raw[r].x : w == 1 ? raw[r].y : w == 2 ? raw[r].z : raw[r].w;
    uint32_t pair[4];
    factors.decode(r, word, pair);
#pragma unroll
    for (int j = 0; j < 4; j++)
      a[j / 2][r % S::BLOCKS][j % 2 * 2 + r / S::BLOCKS] = factors.scaled(r, w, pair[j]);
  }
}

/* Keeps the compiler from making operands after the fence. */
template <int BLOCKS> DEVICE void hold_operands(uint32_t (&a)[2][BLOCKS][4])
{
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS * 4; i++) asm volatile("" : "+r"(a[i / 4 / BLOCKS][i / 4 % BLOCKS][i % 4])::"memory");
}

/* release_stage, by lanes or none: behind a branch ptxas would make wgmmas wait for each other (C7513). */
template <class S> DEVICE void release_stage_if(wgmma_smem<S> &smem, int stage, bool there)
{
  __syncwarp();
  if (consumer_lane() < (there ? S::CLUSTER : 0)) mbarrier_arrive_cluster(&smem.empty[stage], consumer_lane());
}

/* acc = weights x rows of one unit, N tokens wide. While 32 k are multiplied the next are unpacked. A stage is released
 * when the next is under way. */
template <class S, int N>
DEVICE void multiply_woven_n(const gemm_sm90_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at,
                             woven_scales<S> &scales, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  using SCALES = woven_scales<S>;
  int turn = 0;
#pragma unroll 1
  for (int left = args.g.k; left > 0; left -= S::BK, at.advance()) {
    if (turn == 0) scales.turn(args.g.b.scale);
    const auto factors = scales.factors(turn);
    turn = turn + 1 == SCALES::WINDOW ? 0 : turn + 1;
    const int row = lane_weight_row<S>();
    const uint32_t codes = shared_address(smem.weights[at.stage]) + row * S::WEIGHT_LINE +
                           (consumer_lane() % 4 ^ row / 2 % 4) * 16;
    const uint32_t tokens = (uint32_t)wgmma_operand(smem.rows[at.stage]);
    wait_for(&smem.full[at.stage], at.phase);
    uint4 raw[S::OCTETS];
#pragma unroll
    for (int r = 0; r < S::OCTETS; r++) raw[r] = lds_128(codes + r * 8 * S::WEIGHT_LINE);
#pragma unroll
    for (int w = 0; w < 4; w++) {
      uint32_t a[2][S::BLOCKS][4];
      unpack_woven<S>(raw, w, factors, a);
      hold_operands(a);
      wgmma_fence();
#pragma unroll
      for (int part = 0; part < 2; part++)
#pragma unroll
        for (int block = 0; block < S::BLOCKS; block++)
          wgmma_registers_m64k16<typename S::X, N>::run(acc[block], a[part][block],
                                                        tokens + w / 2 * (S::BM * 8) + w % 2 * 4 + part * 2);
      wgmma_commit_group();
      wgmma_wait_group<1>();
      if (w == 0) release_stage_if<S>(smem, stage_before(at), left < args.g.k); /* its last products are over */
    }
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  release_stage<S>(smem, stage_before(at));
}

template <class S, int N>
DEVICE void multiply_woven_wide(const gemm_sm90_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at,
                                int rows, woven_scales<S> &scales, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (N > 16)
    if (rows <= N - 16) return multiply_woven_wide<S, N - 16>(args, smem, at, rows, scales, acc);
  multiply_woven_n<S, N>(args, smem, at, scales, acc);
}

/* What is left of the weights' scale multiplies sums: in a gated tile octets are of the halves in turn. */
template <class S>
DEVICE void scale_rest(const gemm_sm90_args &args, int expert, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr float REST = weight_factors<typename S::X, typename S::CODE>::REST;
  if (REST == 1.f && !args.g.b.global[0]) return;
  const bool gated = S::gated(args.g);
  float rest[2];
#pragma unroll
  for (int i = 0; i < 2; i++) rest[i] = global_scale(args.g.b, gated ? i ^ args.up_first : 0, expert) * REST;
#pragma unroll
  for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
    for (int a = 0; a < S::ACCUMULATORS; a++) acc[block][a] *= rest[(block + a / 2 % 2 * S::BLOCKS) % 2];
}

/* acc of one unit. */
template <class S>
DEVICE void multiply_woven(const gemm_sm90_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at, int slot,
                           float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  woven_scales<S> scales(args, smem.units[slot]);
  multiply_woven_wide<S, S::BM>(args, smem, at, __shfl_sync(ALL_LANES, smem.units[slot].rows, 0), scales, acc);
  if (__any_sync(ALL_LANES, scales.absent)) add_absent<S>(args, smem.units[slot], acc);
  scale_rest<S>(args, smem.units[slot].expert, acc);
}

#endif
