/*
 * The products of form wgmma with weights of 4 bits and few rows (tokens), for shapes that are WOVEN (gemm/packed.cuh).
 *
 * As in gemm/mixed.cuh a lane takes the 16 bytes of a weight row that hold 32 neighbouring codes of a slab of 128 k,
 * lane q of four k = 32 q and on, and two codes 16 bits apart become a register of an operand: k = 32 q + 8 w + 4 t + j
 * (w, j < 4, t < 2) is multiplied as k 32 w + 8 j + 2 q + t. Rows come by tensor copies in their own order; HELPERS
 * warps of the producers put each stage's into that order where it lies.
 *
 * A consumer's warp copies the scales of its weight rows itself, 16 bytes a row at a time and long before they are
 * used, into a place of its own.
 */
#ifndef CUMOE_WOVEN_TILE_CUH
#define CUMOE_WOVEN_TILE_CUH

#include "device/ptx_narrow_sm90.cuh"
#include "gemm/packed_tile.cuh"

/* Of a warp's weight rows, a window of 16 scales each: where it is in vectors those, else the words that it lies in. */
template <class S> struct alignas(16) scale_window {
  static constexpr int ROWS = S::OCTETS * 8, WORDS = 5;
  uint32_t words[ROWS * WORDS];
};

/* What a stage has besides. */
template <class S> struct woven_stages {
  scale_window<S> windows[S::CONSUMERS * S::GROUP / WARP_SIZE][2]; /* a warp's own */
  uint64_t posted[UNITS_AHEAD];                                    /* which unit it is, for weavers */
  uint64_t rows_there[S::STAGES]; /* as they lie in memory; `full`: woven, and the codes */
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

/* OCTETS of rows of a stage, where they lie. A lane has a row of each, of which it reads 8 k of each 32, k = 32 q + 8 w
 * and on, and writes the 32 k that they become. */
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

/* Two octets at once: of one alone its loads' latency is a third of the time. Rows come by 16: octets are even. */
template <class S> DEVICE void weave_stage(wgmma_smem<S> &smem, int stage, int octets)
{
  const uint32_t rows = shared_address(smem.rows[stage]);
#pragma unroll 1
  for (int o = (warp_id() - 1) * 2; o < octets; o += S::HELPERS * 2) weave_octets<S, 2>(rows + o * 1024);
  fence_proxy_async_shared();
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(&smem.full[stage]);
}

/* By HELPERS warps behind the first. */
template <class S> DEVICE void weave(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  follow_units<S>(smem, [&](const tile_unit &tile, int, pipeline_state<S::STAGES> &at) {
    const int octets = ceil_div(tile.rows, 16) * 2;
#pragma unroll 1
    for (int k0 = 0; k0 < args.g.k; k0 += S::BK, at.advance()) {
      wait_for(&smem.rows_there[at.stage], at.phase);
      weave_stage(smem, at.stage, octets);
    }
  });
}

/* ---- consumers: scales ---- */

/* A lane copies those of its row a window ahead; behind a unit's last those of the next unit, if it is posted. */
template <class S> struct woven_scales {
  using W = typename S::CODE;
  using FACTORS = weight_factors<typename S::X, W>;
  using window = scale_window<S>;
  static constexpr int STAGE = scale_bytes_of<S>(), WINDOW = 16 / STAGE; /* bytes of a row and stage; stages */
  const uint8_t *row;                                                    /* this lane's next window */
  int left;                                                              /* scales from there on */
  uint32_t now = 0;                                                      /* which window is in use */
  uint32_t at[S::OCTETS];                                                /* of the lane's rows and k in window 0 */
  pipeline_state<UNITS_AHEAD> coming;                                    /* the next unit */
  bool ahead = false;                                                    /* its first window is on its way */
  bool absent; /* some of a tile's scales are not in its products */

  DEVICE static scale_window<S> *windows(wgmma_smem<S> &smem) { return smem.windows[warp_of_consumers()]; }
  DEVICE static int warp_of_consumers() { return (int)(tid_x() / WARP_SIZE) - S::GROUP / WARP_SIZE; }

  /* Unit by unit. */
  DEVICE void begin(const gemm_sm90_args &args, wgmma_smem<S> &smem)
  {
    __syncwarp(); /* the last unit's are read */
    if (!ahead) ask_for(args, smem, smem.units[coming.stage]);
    const scale_matrix &s = args.g.b.scale;
    const uint32_t first = shared_address(windows(smem)->words) + consumer_lane() % 4 * (STAGE / 4);
#pragma unroll
    for (int r = 0; r < S::OCTETS; r++) {
      const int i = consumer_lane() / 4 + r * 8;
      at[r] = first + (in_vectors(s) ? i * 16 : i * 4 * window::WORDS);
      if (in_words(s)) at[r] += (uintptr_t)row_of(args, smem.units[coming.stage], i) & 3;
    }
    ahead = absent = false;
    coming.advance();
  }

  DEVICE void skip_unit()
  {
    cp_async_wait_group<0>(); /* what came ahead is not used */
    ahead = false;
    coming.advance();
  }

  DEVICE static const uint8_t *row_of(const gemm_sm90_args &args, const tile_unit &tile, int i)
  {
    return scales_of(args.g.b.scale, tile.expert, weight_row_of<S>(args, tile, warp_of_consumers() * window::ROWS + i));
  }

  DEVICE void ask_for(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile)
  {
    row = row_of(args, tile, consumer_lane() % window::ROWS);
    left = args.g.k / operand<W>::K_PER_SCALE;
    copy(args.g.b.scale, smem, now ^ 1);
  }

  DEVICE static bool in_vectors(const scale_matrix &s)
  {
    const uintptr_t places = (uintptr_t)s.base[0] | (uintptr_t)s.base[1] | s.expert_stride | s.n_stride;
    return !s.table[0] && s.k_stride == 1 && s.k_origin == 0 && places % 16 == 0;
  }
  DEVICE static bool in_words(const scale_matrix &s)
  {
    return !in_vectors(s) && s.k_stride == 1;
  }

  /* The next window. No word is read that has no scale of the row. */
  DEVICE void copy(const scale_matrix &s, wgmma_smem<S> &smem, int w)
  {
    uint32_t *words = windows(smem)[w].words;
    if (consumer_lane() < window::ROWS) {
      if (in_vectors(s))
        cp_async_cg_16(shared_address(words + consumer_lane() * 4), row, min(left, 16));
      else
        copy_words(s, words + consumer_lane() * window::WORDS);
    }
    cp_async_commit_group();
    row += 16 * s.k_stride;
    left -= 16;
  }

  DEVICE void copy_words(const scale_matrix &s, uint32_t *to) const
  {
    if (s.k_stride != 1) return copy_strided(s, reinterpret_cast<uint8_t *>(to));
    const int skew = (int)((uintptr_t)row & 3), end = skew + min(left, 16);
#pragma unroll
    for (int i = 0; i < window::WORDS; i++)
      if (i * 4 < end) cp_async_ca_4(shared_address(to + i), row - skew + i * 4, 4);
  }

  DEVICE void copy_strided(const scale_matrix &s, uint8_t *to) const
  {
#pragma unroll 1
    for (int i = 0; i < min(left, 16); i++) to[i] = __ldg(row + i * s.k_stride);
  }

  /* The next window is there, without what products cannot have, and the one after it asked for. */
  DEVICE void turn(const gemm_sm90_args &args, wgmma_smem<S> &smem)
  {
    const scale_matrix &s = args.g.b.scale;
    cp_async_wait_group<0>();
    __syncwarp();
    now ^= 1;
    if (consumer_lane() < window::ROWS) leave_out_absent(s, windows(smem)[now].words);
    __syncwarp();
    if (left > 0) return copy(s, smem, now ^ 1);
    if (!mbarrier_test_wait(&smem.posted[coming.stage], coming.phase)) return;
    ahead = smem.units[coming.stage].expert >= 0;
    if (ahead) ask_for(args, smem, smem.units[coming.stage]);
  }

  /* Of this lane's row. */
  DEVICE void leave_out_absent(const scale_matrix &s, uint32_t *words)
  {
    const bool vectors = in_vectors(s);
    uint32_t *own = words + consumer_lane() * (vectors ? 4 : window::WORDS);
    bool any = false;
#pragma unroll
    for (int w = 0; w < window::WORDS; w++)
      if (w < 4 || !vectors) any |= any_absent(own[w]);
    if (!any) return;
    uint8_t *first = reinterpret_cast<uint8_t *>(own) + (vectors || s.k_stride != 1 ? 0 : (uintptr_t)row & 3);
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
      if (!scale_is_absent<typename S::X, W>(first[i])) continue;
      first[i] = FACTORS::ABSENT;
      absent |= i < left + 16;
    }
  }

  /* Of four scales, or of bytes that may be none. */
  DEVICE static bool any_absent(uint32_t codes)
  {
    if (same_type<W, nv4>) return ((codes & 0x7f7f7f7f) + 0x01010101 & 0x80808080) != 0;
    if (same_type<typename S::X, bf16>) return ((codes & 0x7f7f7f7f) + 0x7f7f7f7f & codes & 0x80808080) != 0;
    bool any = false;
#pragma unroll
    for (int b = 0; b < 4; b++) any |= scale_is_absent<typename S::X, W>(codes >> b * 8 & 255);
    return any;
  }

  /* Of the lane's weight rows and its 32 k, at a stage of all. */
  DEVICE FACTORS factors(int stage) const
  {
    const uint32_t offset = now * (uint32_t)sizeof(window) + stage % WINDOW * STAGE;
    FACTORS f;
#pragma unroll
    for (int r = 0; r < S::OCTETS; r++)
      f.set(r, STAGE == 8 ? lds_u8(at[r] + offset) | lds_u8(at[r] + offset + 1) << 8 : lds_u8(at[r] + offset));
    return f;
  }
};

/* ---- consumers: products ---- */

/* Of codes of word w of a lane's rows those of 16 k, as operands of each block. */
template <class S, class FACTORS>
DEVICE void unpack_woven(const uint4 (&raw)[S::OCTETS], int w, int part, const FACTORS &factors,
                         uint32_t (&a)[S::BLOCKS][4])
{
#pragma unroll
  for (int r = 0; r < S::OCTETS; r++) {
    uint32_t pair[4]; /* of which two are used */
    factors.decode(r, w == 0 ? raw[r].x : w == 1 ? raw[r].y : w == 2 ? raw[r].z : raw[r].w, pair);
#pragma unroll
    for (int j = 0; j < 2; j++) a[r % S::BLOCKS][j * 2 + r / S::BLOCKS] = factors.scaled(r, w, pair[part * 2 + j]);
  }
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
  const int row = lane_weight_row<S>();
  const uint32_t codes0 = shared_address(smem.weights[0]) + row * S::WEIGHT_LINE + (consumer_lane() ^ row / 2) % 4 * 16,
                 tokens0 = (uint32_t)wgmma_operand(smem.rows[0]);
  uint32_t stage = 0, before = 0; /* of the unit; of the ring */
#pragma unroll 1
  for (int left = args.g.k; left > 0; left -= S::BK, at.advance(), stage++) {
    if (stage % woven_scales<S>::WINDOW == 0) scales.turn(args, smem);
    const auto factors = scales.factors(stage);
    const uint32_t codes = codes0 + at.stage * (uint32_t)sizeof smem.weights[0],
                   tokens = tokens0 + at.stage * (uint32_t)(sizeof smem.rows[0] / 16);
    wait_for(&smem.full[at.stage], at.phase);
    uint4 raw[S::OCTETS];
#pragma unroll
    for (int r = 0; r < S::OCTETS; r++) raw[r] = lds_128(codes + r * 8 * S::WEIGHT_LINE);
#pragma unroll
    for (int i = 0; i < S::BK / 16; i++) {
      uint32_t a[S::BLOCKS][4];
      unpack_woven<S>(raw, i / 2, i % 2, factors, a);
      wgmma_fence();
#pragma unroll
      for (int block = 0; block < S::BLOCKS; block++)
        wgmma_registers_m64k16<typename S::X, N>::run(acc[block], a[block], tokens + i / 4 * (S::BM * 8) + i % 4 * 2);
      wgmma_commit_group();
      wgmma_wait_group<1>();
      if (i == 0) release_stage_if<S>(smem, before, stage > 0); /* its products are over */
    }
    before = at.stage;
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  release_stage<S>(smem, before);
}

template <class S, int N>
DEVICE void multiply_woven_wide(const gemm_sm90_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at,
                                int rows, woven_scales<S> &scales, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (N > 16)
    if (rows <= N - 16) return multiply_woven_wide<S, N - 16>(args, smem, at, rows, scales, acc);
  multiply_woven_n<S, N>(args, smem, at, scales, acc);
}

/* The same of any width, which wgmmas choose 32 k at a time: of loops a width ptxas makes wgmmas wait for each other
 * (C7512). */
template <class S>
DEVICE void multiply_woven_rows(const gemm_sm90_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at, int rows,
                                woven_scales<S> &scales, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const int row = lane_weight_row<S>();
  const uint32_t codes0 = shared_address(smem.weights[0]) + row * S::WEIGHT_LINE + (consumer_lane() ^ row / 2) % 4 * 16,
                 tokens0 = (uint32_t)wgmma_operand(smem.rows[0]);
  uint32_t stage = 0, before = 0; /* of the unit; of the ring */
#pragma unroll 1
  for (int left = args.g.k; left > 0; left -= S::BK, at.advance(), stage++) {
    if (stage % woven_scales<S>::WINDOW == 0) scales.turn(args, smem);
    const auto factors = scales.factors(stage);
    const uint32_t codes = codes0 + at.stage * (uint32_t)sizeof smem.weights[0],
                   tokens = tokens0 + at.stage * (uint32_t)(sizeof smem.rows[0] / 16);
    wait_for(&smem.full[at.stage], at.phase);
    uint4 raw[S::OCTETS];
#pragma unroll
    for (int r = 0; r < S::OCTETS; r++) raw[r] = lds_128(codes + r * 8 * S::WEIGHT_LINE);
#pragma unroll
    for (int i = 0; i < S::BK / 32; i++) {
      uint32_t a[2][S::BLOCKS][4];
#pragma unroll
      for (int part = 0; part < 2; part++) unpack_woven<S>(raw, i, part, factors, a[part]);
      multiply_wide<S, S::BM>(a, tokens + i / 2 * (S::BM * 8) + i % 2 * 4, rows, acc);
      wgmma_wait_group<1>();
      if (i == 0) release_stage_if<S>(smem, before, stage > 0); /* its products are over */
    }
    before = at.stage;
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  release_stage<S>(smem, before);
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
                           woven_scales<S> &scales, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  scales.begin(args, smem);
  const int rows = __shfl_sync(ALL_LANES, smem.units[slot].rows, 0);
  if constexpr (S::BM > 64)
    multiply_woven_rows<S>(args, smem, at, rows, scales, acc);
  else
    multiply_woven_wide<S, S::BM>(args, smem, at, rows, scales, acc);
  if (__any_sync(ALL_LANES, scales.absent)) add_absent<S>(args, smem.units[slot], acc);
  scale_rest<S>(args, smem.units[slot].expert, acc);
}

#endif
