/* The arenas of a call's ranks: where things lie in them, and rows moved by warps. */
#ifndef CUMOE_EP_ARENA_CUH
#define CUMOE_EP_ARENA_CUH

#include "ep/words.cuh"
#include "ep/ep.h"

DEVICE char *arena_of(const ep_args &a, int rank)
{
  if (a.shape.ranks <= EP_NEAR_RANKS) return a.near[rank];
  return reinterpret_cast<char *const *>(a.arena + a.at.bases)[rank];
}

DEVICE char *lane_of(const ep_args &a, int rank)
{
  return arena_of(a, rank) + a.at.lane + (uint64_t)a.lane * a.at.lane_bytes;
}

/* Of this rank and lane: exchanges so far, CTAs that have come to the end of a put, of an answer, where they count each
 * other, the last exchange in which a peer has sent an id that is none, and CTAs of a put that has slots alone. */
struct counters {
  unsigned long long exchanges;
  unsigned put, answered;
  int32_t distrusted;
  unsigned put_slots;
};
DEVICE counters *counters_of(const ep_args &a)
{
  return reinterpret_cast<counters *>(lane_of(a, a.rank) + a.at.exchange);
}

/* Of the exchange, behind its wait for tokens. */
DEVICE bool has_been_distrusted(const ep_args &a, uint32_t exchange)
{
  return load_relaxed(&counters_of(a)->distrusted) == (int32_t)exchange;
}

/* The rank has not been left out. The host changes these bits between calls. */
DEVICE const uint64_t *active_ranks(const ep_args &a)
{
  return reinterpret_cast<const uint64_t *>(a.arena + a.at.active);
}
DEVICE bool is_among(const uint64_t *active, int rank)
{
  return active[rank / 64] >> rank % 64 & 1;
}
DEVICE bool is_active(const ep_args &a, int rank)
{
  return is_among(active_ranks(a), rank);
}

/* Of this round; from L2, whatever L1 holds of it where a grid ahead still runs. */
DEVICE unsigned tokens_of_round(const ep_args &a)
{
  const int64_t there = a.tokens.device ? load_relaxed(a.tokens.device) : a.tokens.count;
  return (unsigned)min(max(there, (int64_t)0), a.tokens.count);
}

/* Brings the words that this grid is going to read into L2, while the grid ahead still runs: the layer's weights have
 * driven them out. */
DEVICE void look_ahead(const ep_args &a, uint64_t words)
{
  if (threadIdx.x == 0) prefetch(counters_of(a));
  if (threadIdx.x == 1) prefetch(a.arena + a.at.abort);
  if (threadIdx.x == 2) prefetch(a.arena + a.at.active);
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x)
    prefetch(lane_of(a, a.rank) + words + (uint64_t)r * EP_LINE);
}

DEVICE void look_ahead_at_places(const ep_args &a)
{
  const int64_t entries = (a.shape.experts - 1) * a.placement_ld + a.replicas;
  for (int64_t i = threadIdx.x * (int64_t)(EP_LINE / sizeof(int32_t)); i < entries;
       i += blockDim.x * (int64_t)(EP_LINE / sizeof(int32_t)))
    prefetch(a.placement + i);
}

/* ---- rows ---- */

/* A warp moves a part of a row, 16 bytes a thread at a time: blockIdx.y says which part, and all its loads are under
 * way together. Rows are dealt to the warps of blockIdx.x. */
constexpr int WARPS = 16, PART = 8 * WARP_SIZE;
static_assert(PART * 16 == EP_PART_BYTES && WARPS * WARP_SIZE == EP_MOVE_THREADS, "the host makes the grids");

struct row_part {
  uint4 value[8];
};

DEVICE int row_vectors(const ep_args &a)
{
  return a.shape.hidden * a.shape.element / 16;
}

DEVICE int vector_of(int i)
{
  return (int)blockIdx.y * PART + i * WARP_SIZE + lane_id();
}

DEVICE void load_part(row_part &p, const void *row, int width)
{
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (vector_of(i) < width) p.value[i] = load_relaxed_vector(static_cast<const uint4 *>(row) + vector_of(i));
}

DEVICE void store_part(const row_part &p, void *row, int width)
{
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (vector_of(i) < width) static_cast<uint4 *>(row)[vector_of(i)] = p.value[i];
}

/* Rows are dealt to the warps of CTAs 0 .. movers - 1 along x; those behind them do something else. */
DEVICE unsigned cta_of_grid(const ep_args &a)
{
  return blockIdx.y * a.movers + blockIdx.x;
}
DEVICE unsigned ctas_of_grid(const ep_args &a)
{
  return a.movers * gridDim.y;
}

/* ---- packets ---- */

/* 8 bytes of data in two words, each of which has half of them and the number of the exchange: whoever finds that
 * number has the data, so nothing is waited for before a flag is set. A word says n or what an exchange before it has
 * left, and only where it was told that there is one; so unlike flags it is compared as it is. */
struct packet {
  ulonglong2 words;
};
static_assert(sizeof(packet) == EP_PACKET, "the host lays them out");

DEVICE packet make_packet(uint32_t exchange, uint2 data)
{
  const uint64_t tag = (uint64_t)exchange << 32;
  return {make_ulonglong2(tag | data.x, tag | data.y)};
}
DEVICE bool is_of(const packet &p, uint32_t exchange)
{
  return (uint32_t)(p.words.x >> 32) == exchange && (uint32_t)(p.words.y >> 32) == exchange;
}
DEVICE uint2 data_of(const packet &p)
{
  return make_uint2((uint32_t)p.words.x, (uint32_t)p.words.y);
}

/* Of a slot, from rank `from` in rank `at`'s arena: the expert there, or -1, and the weight. */
DEVICE char *slot_packet(const ep_args &a, int at, int from, int row, int slot)
{
  return lane_of(a, at) + a.at.slots + (((uint64_t)from * a.shape.packets + row) * a.shape.top_k + slot) * EP_PACKET;
}

/* Of 16 bytes of a row of y, likewise: the first of two packets, SECOND_PACKET before the other. */
constexpr int SECOND_PACKET = EP_PACKET_RUN * EP_PACKET;
DEVICE char *sum_packets(const ep_args &a, int at, int from, int row, int vector)
{
  return lane_of(a, at) + a.at.sums + ((uint64_t)from * a.shape.packets + row) * ep_packet_row(&a.shape) +
         vector / EP_PACKET_RUN * (2 * SECOND_PACKET) + vector % EP_PACKET_RUN * EP_PACKET;
}

DEVICE void store_as_packets(char *at, uint32_t exchange, uint4 data)
{
  store_words_system(at, make_packet(exchange, make_uint2(data.x, data.y)).words);
  store_words_system(at + SECOND_PACKET, make_packet(exchange, make_uint2(data.z, data.w)).words);
}

/* ---- lines ---- */

/* A warp has 30 vectors of a row at once, in four lines: seven lanes of a line one each, the last one, whose other half
 * is the flag, half of one. */
DEVICE bool has_flag()
{
  return lane_id() % EP_LINE_LANES == EP_LINE_LANES - 1;
}
DEVICE bool has_second_half()
{
  return has_flag() && lane_id() & EP_LINE_LANES;
}
DEVICE int vector_of_lane()
{
  constexpr int WHOLE = EP_LINE_LANES - 1;
  const int line = lane_id() / EP_LINE_LANES, at = lane_id() % EP_LINE_LANES;
  return has_flag() ? EP_LINES * WHOLE + line / 2 : line * WHOLE + at;
}
static_assert(EP_LINES * EP_LINE_LANES == WARP_SIZE && EP_LINE_LANES * 16 == EP_LINE &&
                  EP_LINE_VECTORS == EP_LINES * (EP_LINE_LANES - 1) + EP_LINES / 2,
              "a warp's lanes have them all");

DEVICE int parts_of_row(const ep_args &a)
{
  return ceil_div(row_vectors(a), (int)EP_LINE_VECTORS);
}

/* No line is of exchange 0 before it was stored. */
DEVICE uint64_t line_flag(uint32_t exchange)
{
  return (uint64_t)1 << 32 | exchange;
}

/* A warp's part of a row of y, which rank `from` has stored: its number, in the order of memory; its lines. */
DEVICE int sum_part(const ep_args &a, int from, int row, int part)
{
  return (from * a.shape.packets + row) * parts_of_row(a) + part;
}
DEVICE char *sum_lines(const ep_args &a, int at, int part)
{
  return lane_of(a, at) + a.at.lines + (uint64_t)part * (EP_LINES * EP_LINE);
}

DEVICE uint4 data_of(const line_words &line)
{
  const uint64_t low = line.words.x, high = line.words.y;
  return make_uint4((uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32));
}

/* By a whole warp: the lane's vector, to the lane's place in the lines at `at`. */
DEVICE void store_as_lines(char *at, uint32_t exchange, uint4 data)
{
  const uint64_t low = (uint64_t)data.y << 32 | data.x, high = (uint64_t)data.w << 32 | data.z;
  const uint64_t first = has_second_half() ? high : low, second = has_flag() ? line_flag(exchange) : high;
  store_line_system(at + lane_id() * 16, make_ulonglong2(first, second));
}

#endif
