/* few, weights with scales: a consumer warp's way through its slices, and what it asks memory for ahead. */
#ifndef CUMOE_FEW_FEED_CUH
#define CUMOE_FEW_FEED_CUH

#include "few/arrange.cuh"
#include "few/schedule.cuh"

/* n / block, for n below 2^21: a division of integers would be twenty instructions. */
DEVICE int few_quotient(int n, int block)
{
  return (int)(((float)n + .5f) * rcp_approx_ftz((float)block));
}

/* Units of up's share, then, where the grid does both, of down (few_units); slices of each go to the consumers in turn.
 * What can be worked out anew takes no registers. */
template <class L> struct few_walk {
  using U = few_part<L, operation_up>;
  using D = few_part<L, operation_down>;
  int active, octet, left, slice;
  bool down;

  DEVICE void start_up(const few_args &args, int experts, int share)
  {
    const few_units<U> first(args.up, experts, share);
    active = first.active, octet = first.octet, left = first.left, slice = warp_id(), down = false;
  }
  DEVICE void start_down(const few_memory<L> &smem, int experts)
  {
    const few_units<D> first(smem.own, experts);
    active = first.active, octet = first.octet, left = first.left, slice = warp_id(), down = true;
  }

  template <bool DOWN> DEVICE static const gemm_args &gemm(const few_args &args) { return DOWN ? args.down : args.up; }
  template <bool DOWN> DEVICE static bool gated(const few_args &args) { return !DOWN && args.up.gated; }
  template <bool DOWN> DEVICE static int step(const few_args &args)
  {
    return gated<DOWN>(args) ? L::OCTETS / 2 : L::OCTETS;
  }

  /* Of the unit at hand. */
  template <bool DOWN> DEVICE int weight_octets(const few_args &args, const few_memory<L> &smem) const
  {
    const int end = DOWN ? smem.own.first + smem.own.count : args.up.n / 8;
    return min(step<DOWN>(args), end - octet) * (gated<DOWN>(args) ? 2 : 1);
  }

  template <bool DOWN> DEVICE void next_unit(const few_args &args, int experts)
  {
    const int each = step<DOWN>(args);
    if (DOWN) {
      left--, active++;
      if (active == experts) active = 0, octet += each;
    } else {
      const int all = args.up.n / 8 + each - 1 & ~(each - 1);
      left -= gridDim.x, octet += (int)gridDim.x * each;
      while (octet >= all && left > 0) octet -= all, active++;
    }
  }
};

/*
 * What a consumer warp asks for, two slices ahead: codes straight into stages, scales into L2. The next slice's scales
 * are on their way to registers, from which they go to shared memory.
 */
template <class L> struct few_feed {
  using W = typename L::W;
  static constexpr bool BYTES = L::BITS == 8, ZEROS = same_type<W, u4>;
  static constexpr int GROUP = operand<W>::K_PER_SCALE, RAW = BYTES ? 1 : GROUP == 32 ? 4 : 8; /* nv4: of two groups */

  const few_args &args;
  few_memory<L> &smem;
  const int experts;
  few_walk<L> at; /* the slice to ask for next */
  pipeline_state<L::STAGES> to;
  const char *even, *odd; /* octets 0 and 2, 1 and 3: of row l/8, vector l%8 of the first slice */
  const char *scale;      /* of the lane's row */
  const uint32_t *zero;
  int rows; /* weight octets of the unit */
  bool pairs;
  struct {
    const char *scale;
    const uint32_t *zero;
    int k; /* the first of the slice, of the lane's row; past the end: the lane has no row */
    bool down, pairs;
  } asked;
  uint32_t raw[RAW], raw_zero[ZEROS ? 8 : 1], slot = 0;

  DEVICE few_feed(const few_args &a, few_memory<L> &s, int e) : args(a), smem(s), experts(e) {}

  DEVICE void start_up(int share)
  {
    at.start_up(args, experts, share);
    if (at.left > 0) locate<false>();
  }
  DEVICE void start_down()
  {
    at.start_down(smem, experts);
    if (at.left > 0) locate<true>();
  }

  /* ---- a unit ---- */

  template <bool DOWN> DEVICE void locate()
  {
    const gemm_args &g = at.template gemm<DOWN>(args);
    const bool gated = at.template gated<DOWN>(args);
    const few_halves of = DOWN ? few_halves{smem.table.down[at.active], nullptr} : smem.table.weights[at.active];
    const int stride = (int)(g.b.n_stride * L::BITS / 8), lane = lane_id();
    const int64_t first = (int64_t)(at.octet * 8 + lane / 8) * stride + lane % 8 * 16;
    even = static_cast<const char *>(of.low) + first;
    odd = gated ? static_cast<const char *>(of.high) + first : even + (int64_t)8 * stride;
    rows = at.template weight_octets<DOWN>(args, smem);
    locate_scales(g, gated);
  }

  /* A lane's row of the unit: that of its number, of a stage. */
  DEVICE bool is_wide() const { return rows <= 2; }
  DEVICE int lane_octet() const { return is_wide() ? lane_id() / 8 % 2 : lane_id() / 8; }

  DEVICE void locate_scales(const gemm_args &g, bool gated)
  {
    const scale_matrix &s = g.b.scale;
    const int o = lane_octet(), half = gated ? o % 2 : 0, expert = smem.table.expert[at.active];
    const int channel = (at.octet + (gated ? o / 2 : o)) * 8 + lane_id() % 8, n = channel + s.n_origin[half];
    const int row = s.block_n == 1 ? n : few_quotient(n, s.block_n);
    scale = static_cast<const char *>(scale_base(s, half, expert)) +
            (int64_t)row * (int)s.n_stride * (int)scale_bytes(s.dtype);
    if constexpr (GROUP > 0) {
      const int groups = (int)s.n_stride | s.k_origin / GROUP | g.k / GROUP;
      pairs = s.k_stride == 1 && ((groups | (int)reinterpret_cast<uintptr_t>(scale)) & 1) == 0;
    }
    if constexpr (ZEROS) {
      const uint32_t *words = zero_words(&g.b, half, expert);
      zero = words ? words + (int64_t)(channel / 8) * g.b.zero.n_stride : nullptr;
    }
  }

  /* Whether there is one more slice of the product. */
  template <bool DOWN> DEVICE bool find()
  {
    bool moved = false;
    while (at.left > 0) {
      const int octets = moved ? at.template weight_octets<DOWN>(args, smem) : rows,
                slices = few_slices<L>(at.template gemm<DOWN>(args), octets <= 2);
      if (at.slice < slices) {
        if (moved) locate<DOWN>();
        return true;
      }
      at.slice -= slices, at.template next_unit<DOWN>(args, experts), moved = true;
    }
    return false;
  }

  /* ---- a slice ---- */

  template <bool DOWN> DEVICE void copy_codes(const gemm_args &g)
  {
    few_stage_of<L> &stage = smem.stages[warp_id()][to.stage];
    const int r = lane_id() / 8, vector = lane_id() % 8, stride = (int)(g.b.n_stride * L::BITS / 8);
    const bool wide = is_wide();
    const int in_row = at.slice * (wide ? 256 : 128), left = g.k * L::BITS / 8 - in_row - vector * 16;
    const int swizzle = (r & 1) << 2 | r >> 1; /* scaled.cuh: few_codes */
    const uint32_t first = shared_address(&stage.codes[r][vector ^ swizzle]),
                   second = shared_address(&stage.codes[4 + r][vector ^ swizzle ^ 2]);
    const char *a = even + in_row, *b = odd + in_row;
    const int64_t four = (int64_t)4 * stride;
    const int tile = wide ? 128 : at.template gated<DOWN>(args) ? 8 * stride : 16 * stride;
    const uint64_t policy = evict_first_policy();
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const int all = left > (wide ? t * 128 : 0) ? 16 : 0, octets = wide ? rows : rows - 2 * t;
      const int low = octets > 0 ? all : 0, high = octets > 1 ? all : 0;
      cp_async_cg_16(first + t * 2048, a, low, policy);
      cp_async_cg_16(second + t * 2048, a + four, low, policy);
      cp_async_cg_16(first + t * 2048 + 1024, b, high, policy);
      cp_async_cg_16(second + t * 2048 + 1024, b + four, high, policy);
      a += tile, b += tile;
    }
  }

  /* Where the slice's scales are. */
  DEVICE void ask_scales(const gemm_args &g)
  {
    const scale_matrix &s = g.b.scale;
    const int k = (is_wide() ? 2 * at.slice + lane_id() / 16 : at.slice) * L::BK;
    const int block = GROUP > 0 ? (k + s.k_origin) / max(GROUP, 1) : few_quotient(k + s.k_origin, s.block_k);
    const char *first = scale + (int64_t)block * (int)s.k_stride * (GROUP > 0 ? 1 : (int)scale_bytes(s.dtype));
    asked.k = lane_octet() < rows ? k : g.k, asked.down = at.down, asked.pairs = pairs;
    asked.scale = ZEROS ? scale : first, asked.zero = zero;
    if (asked.k < g.k) prefetch_l2_line(first);
  }

  DEVICE void load_scales(const gemm_args &g)
  {
    const int dtype = g.b.scale.dtype;
    if constexpr (GROUP > 0)
      load_groups(g);
    else if (dtype == DT_F32)
      load_blocks<4>(g);
    else if (dtype == DT_E8M0 || dtype == DT_E4M3)
      load_blocks<1>(g);
    else
      load_blocks<2>(g);
  }

  template <int SIZE> DEVICE void load_blocks(const gemm_args &g)
  {
    const scale_matrix &s = g.b.scale;
    if constexpr (!ZEROS) {
      raw[0] = load_bits<SIZE>(asked.scale, asked.k < g.k);
    } else {
      const int bytes = (int)s.k_stride * SIZE;
#pragma unroll
      for (int i = 0; i < RAW; i++) {
        const bool there = asked.k + 32 * i < g.k;
        const int64_t block = few_quotient(asked.k + 32 * i + s.k_origin, s.block_k);
        raw[i] = load_bits<SIZE>(asked.scale + block * bytes, there);
        raw_zero[i] = load_bits<4>(asked.zero + block * (int)g.b.zero.k_stride, there && asked.zero);
      }
    }
  }

  /* Scales of a byte, two by two. */
  DEVICE void load_groups(const gemm_args &g)
  {
    const int step = (int)g.b.scale.k_stride;
    if (asked.pairs) {
#pragma unroll
      for (int i = 0; i < RAW; i++) raw[i] = load_bits<2>(asked.scale + 2 * i, asked.k + 2 * i * GROUP < g.k);
      return;
    }
#pragma unroll
    for (int i = 0; i < RAW; i++)
      raw[i] = load_bits<1>(asked.scale + 2 * i * step, asked.k + 2 * i * GROUP < g.k) |
               load_bits<1>(asked.scale + (2 * i + 1) * step, asked.k + (2 * i + 1) * GROUP < g.k) << 8;
  }

  DEVICE void put_scales(const expert_matrix &b)
  {
    auto &of = smem.scales[warp_id()][slot++ & 1];
    const int row = lane_id();
    if constexpr (GROUP == 32) {
      of.of_row[row] = make_uint2(raw[0] | raw[1] << 16, raw[2] | raw[3] << 16);
    } else if constexpr (GROUP == 16) {
      of.of_row[row] =
          make_uint4(raw[0] | raw[1] << 16, raw[2] | raw[3] << 16, raw[4] | raw[5] << 16, raw[6] | raw[7] << 16);
    } else if constexpr (BYTES) {
      of.of_row[row] = scale_value(raw[0], b.scale.dtype);
    } else {
      const bool zeros = b.zero.table[0] || b.zero.base[0];
#pragma unroll
      for (int i = 0; i < RAW; i++) {
        of.of_row[row][i] = scale_value(raw[i], b.scale.dtype);
        of.zero[row][i] = (int8_t)(b.offset + (zeros ? (int)(raw_zero[i] >> row % 8 * 4 & 15) + b.zero.add : 0));
      }
    }
  }

  template <bool DOWN> DEVICE void ask()
  {
    const gemm_args &g = at.template gemm<DOWN>(args);
    copy_codes<DOWN>(g);
    ask_scales(g);
    at.slice += L::CONSUMERS;
  }

  /* One slice more: a cp.async group, also for none. DOWN: of down, else of up, and then of down where the grid does
   * both. */
  template <bool DOWN> DEVICE void next()
  {
    if (!DOWN && !at.down && !find<false>() && args.protocol.tickets) start_down();
    if (DOWN || at.down) {
      if (find<true>()) ask<true>();
    } else if (at.left > 0) {
      ask<false>();
    }
    cp_async_commit_group();
    to.advance();
  }
  template <bool DOWN> DEVICE void load_next()
  {
    load_scales(DOWN || asked.down ? args.down : args.up);
  }

  /* The first slices: STAGES - 1. */
  template <bool DOWN> DEVICE void begin()
  {
    static_assert(L::STAGES == 3, "scales are asked for two slices ahead");
    asked.k = 1 << 30, asked.down = DOWN;
    next<DOWN>();
    load_next<DOWN>();
    next<DOWN>();
  }

  /* Before a slice is multiplied: its scales are there, the next's come. By a warp, whose copies have come. */
  template <bool DOWN> DEVICE void turn()
  {
    put_scales(at.template gemm<DOWN>(args).b);
    __syncwarp(); /* all lanes' copies and scales are there, and the stage before is read */
    load_next<DOWN>();
    next<DOWN>();
  }
};

#endif
