/* few: which units a CTA has, and tickets for more of them. */
#ifndef CUMOE_FEW_SCHEDULE_CUH
#define CUMOE_FEW_SCHEDULE_CUH

#include "few/layout.cuh"

/* ---- units ---- */

/* This CTA's part of `count` things. */
DEVICE few_range part_of_cta(int count)
{
  const int each = count / (int)gridDim.x, more = count - each * (int)gridDim.x, cta = blockIdx.x;
  return {cta * each + min(cta, more), each + (cta < more)};
}

/* A CTA's octets of down: of N-major weights whole pieces of memory, so that some CTAs have none. */
template <class L> DEVICE few_range own_octets(int n)
{
  if constexpr (!L::N_MAJOR) return part_of_cta(n / 8);
  const few_range pieces = part_of_cta(ceil_div(n / 8, L::OCTETS));
  const int first = pieces.first * L::OCTETS;
  return {first, min(pieces.count * L::OCTETS, n / 8 - first)};
}

/*
 * Units one after the other: 16 weight rows of an active expert, which are one octet, gate and up, or two octets, or
 * one if that is all. Up is cut into gridDim.x shares, and unit i is of share i % gridDim.x, so experts are done in
 * their order. In down a CTA goes expert by expert, some channels at a time.
 */
template <class S> struct few_units {
  int active, octet, octets, left; /* left: units from this one on; in up also other shares' */
  int experts, end, step, tiles;   /* of all; octets end there */

  /* Of up. The last share has the fewest, and share gridDim.x none. */
  DEVICE few_units(const gemm_args &g, int active_experts, int share) : active(0), experts(active_experts)
  {
    end = g.n / 8, step = g.gated ? S::UNIT / 2 : S::UNIT;
    tiles = g.gated ? ceil_div(end, S::UNIT / 2) : ceil_div(end, S::UNIT);
    octet = share * step, left = share < gridDim.x ? experts * tiles - share : 0;
    carry();
  }

  /* Of down. */
  DEVICE few_units(few_range own, int active_experts) : active(0), experts(active_experts)
  {
    octet = own.first, end = own.first + own.count, left = experts * ceil_div(own.count, S::OCTETS);
    step = S::OCTETS, tiles = 0;
    octets = min(step, end - octet);
  }

  /* Octets past an expert's last one are the next expert's. */
  DEVICE void carry()
  {
    while (octet >= tiles * step && left > 0) octet -= tiles * step, active++;
    octets = min(step, end - octet);
  }

  DEVICE void next()
  {
    if (S::UP) {
      left -= gridDim.x, octet += (int)gridDim.x * step;
      carry();
    } else {
      left--, active++;
      if (active == experts) active = 0, octet += step;
      octets = min(step, end - octet);
    }
  }

  /* In down one octet comes in slices of 8 rows and twice the k, so that as many bytes are in flight as of two. */
  DEVICE bool wide() const { return S::WIDE && octets == 1; }
};

/*
 * Weights with scales. A stage is 32 rows of 128 bytes, tile 0 and tile 1. Of a unit of at most 16 weight rows (`wide`)
 * tile 1 has the next 128 bytes of the same rows; else the next 16 rows of the same k.
 */
template <class L> DEVICE int few_slices(const gemm_args &g, bool wide)
{
  const int bytes = g.k * L::BITS / 8;
  return wide ? bytes + 255 >> 8 : bytes + 127 >> 7;
}

/* Weights without scales. A warp's slice of a unit: `slice` >= slices() if it has no more of that one. */
template <class S> struct few_cursor {
  few_units<S> unit;
  int narrow, wide, slice; /* slices of a unit of either kind; the next */

  DEVICE few_cursor(const gemm_args &g, few_units<S> first)
      : unit(first), narrow(ceil_div(g.k, S::SLICE_K)), wide(ceil_div(g.k, 2 * S::BK)), slice(warp_id())
  {
  }
  DEVICE int slices() const { return unit.wide() ? wide : narrow; }
  DEVICE bool behind() const { return slice >= slices() && unit.left > 0; }
  DEVICE void next_unit() { slice -= slices(), unit.next(); }
  /* Whether there is one more slice. */
  DEVICE bool find()
  {
    while (behind()) next_unit();
    return unit.left > 0;
  }
};

/* ---- tickets: where one grid does up and down ---- */

/* A CTA draws a ticket for a share of up when it starts, and another when it is done. So what a CTA waits for is always
 * in the hands of one that has started. gridDim.x: none is left. */
DEVICE int share_of_ticket(int before)
{
  const int ctas = gridDim.x, ticket = before + 1; /* -1 at first */
  return ticket < ctas ? ctas - 1 - ticket : ctas;
}
DEVICE int draw_share(const few_args &args)
{
  return share_of_ticket(atomicAdd(args.protocol.tickets, 1));
}

/* The epilogue warp draws, and tells the consumers what comes next, or that nothing does. */
template <class S> struct few_tickets {
  const few_args &args;
  few_smem<S> &smem;
  bool over; /* no share is left, and the consumers know */

  DEVICE void tell(int share)
  {
    if (lane_id() == 0) {
      smem.share[1] = share;
      mbarrier_arrive(&smem.share_ready);
    }
    over = share == gridDim.x;
  }

  DEVICE void check()
  {
    if (over) return;
    const int last = __shfl_sync(ALL_LANES, load_relaxed(args.protocol.tickets), 0);
    if (last >= (int)gridDim.x - 1) tell(gridDim.x);
  }

  DEVICE int draw()
  {
    check();
    return over ? gridDim.x : __shfl_sync(ALL_LANES, lane_id() == 0 ? draw_share(args) : 0, 0);
  }
};

#endif
