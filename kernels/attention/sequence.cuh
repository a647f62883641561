/* Attention: which keys a query sees, and which rows a tile has (cumoe/attention.h says what is inconsistent). */
#ifndef CUMOE_SEQUENCE_CUH
#define CUMOE_SEQUENCE_CUH

#include "attention.h"
#include "device/ptx.cuh"

struct sequence {
  int64_t index, first, queries; /* index -1: none, of queries that see nothing; first: of its queries */
  int64_t key, keys;             /* key: row of the first one, unless they are paged */
};

DEVICE sequence no_sequence(int64_t first, int64_t queries)
{
  return {-1, first, queries, 0, 0};
}

/* Without REPORT it is no call, which would have to keep registers. */
template <bool REPORT = true> DEVICE int64_t bad_sequence(const attention_args &a, int64_t index)
{
  if (REPORT) report_fault(a.fault, FAULT_SEQUENCE, 0, index);
  return 0;
}

DEVICE bool queries_fit(const attention_args &a, int64_t first, int64_t count)
{
  return first >= 0 && count >= 0 && first <= a.queries - count;
}

/* Its keys; 0 of them if what is said of them is inconsistent. */
template <bool REPORT> DEVICE void find_keys(const attention_args &a, sequence &s)
{
  const int32_t *offsets = a.k_offsets ? a.k_offsets : a.pages.data ? nullptr : a.q_offsets;
  const int64_t room = a.pages.data ? (int64_t)a.page_count * a.page : a.keys;
  s.key = offsets ? offsets[s.index] : 0;
  s.keys = a.k_lengths ? a.k_lengths[s.index] : offsets ? offsets[s.index + 1] - s.key : a.keys;
  if (s.key < 0 || s.keys < 0 || s.key > room - s.keys || s.keys > ATTENTION_MOST_KEYS)
    s.keys = bad_sequence<REPORT>(a, s.index);
}

/* Without queries if what is said of them is inconsistent. */
template <bool REPORT = true> DEVICE sequence sequence_of(const attention_args &a, int64_t index)
{
  sequence s = {index, 0, a.queries, 0, 0};
  if (a.q_offsets) {
    s.first = a.q_offsets[index];
    s.queries = a.q_offsets[index + 1] - s.first;
  }
  if (!queries_fit(a, s.first, s.queries)) s.queries = bad_sequence<REPORT>(a, index);
  find_keys<REPORT>(a, s);
  return s;
}

/* The first one that has the query, by a warp. */
DEVICE sequence sequence_with(const attention_args &a, int64_t query)
{
  if (!a.q_offsets && a.sequences == 1) return sequence_of(a, 0);
  for (int64_t i = 0; i < a.sequences; i += WARP_SIZE) {
    const int64_t own = i + lane_id();
    bool has = false;
    if (own < a.sequences) {
      const int64_t first = a.q_offsets[own], count = a.q_offsets[own + 1] - first;
      has = queries_fit(a, first, count) && query >= first && query < first + count;
    }
    const unsigned found = __ballot_sync(ALL_LANES, has);
    if (found) return sequence_of(a, i + __ffs(found) - 1);
  }
  return no_sequence(0, 0);
}

/* begin .. end - 1: of a sequence's keys, or of rows of queries. */
struct range {
  int64_t begin, end;
};

DEVICE range keys_seen(const attention_args &a, const sequence &s, int64_t query)
{
  const int64_t at = s.keys - s.queries + (query - s.first);
  const int64_t back = a.window ? at - a.window + 1 : 0;
  const int64_t ahead = a.causal ? at + 1 : a.window ? at + a.window : s.keys;
  return {max(back, (int64_t)0), min(ahead, s.keys)};
}

/* Those that see key j. */
DEVICE range queries_seeing(const attention_args &a, const sequence &s, int64_t j)
{
  const int64_t row = s.first + j - (s.keys - s.queries), end = s.first + s.queries; /* row: whose own key it is */
  const int64_t begin = a.causal ? row : a.window ? row - a.window + 1 : s.first;
  return {max(begin, s.first), a.window ? min(row + a.window, end) : end};
}

/* -1: there is none. */
DEVICE int64_t row_of_key(const attention_args &a, const sequence &s, int64_t j)
{
  if (!a.pages.data) return s.key + j;
  const int page_of = (unsigned)j / (unsigned)a.page;
  const int64_t page = static_cast<const int32_t *>(a.pages.data)[s.index * a.pages.ld + page_of];
  const int64_t row = page * a.page + (j - (int64_t)page_of * a.page);
  if (page >= 0 && row < a.keys) return row;
  (void)bad_sequence(a, s.index);
  return -1;
}

/* ---- tiles ---- */

/* Rows packed .. end - 1 of a sequence: row r is head r % group of those that share keys, of query r / group. */
struct tile_rows {
  sequence s;
  int64_t packed, end;
};

/* Piece i of the queries begins with them: -1 what lies before the sequences, S what lies behind. */
DEVICE int64_t piece_begin(const attention_args &a, int64_t i)
{
  return i < 0 ? 0 : i <= a.sequences ? a.q_offsets[i] : a.queries;
}

DEVICE int64_t first_slot(int64_t offset, int64_t i, int group, int rows)
{
  return i < 0 ? 0 : offset * group / rows + i + 1;
}

/* The piece that the slot is of, by the whole CTA; offsets that do not ascend within the queries are not `regular`. */
template <int THREADS>
DEVICE int64_t piece_of_slot(const attention_args &a, int64_t slot, int group, int rows, bool &regular)
{
  int64_t pieces = 0;
  regular = true;
  for (int64_t i = 0; i <= a.sequences; i += THREADS) {
    const int64_t own = i + threadIdx.x;
    bool before = false, ascends = true;
    if (own <= a.sequences) {
      const int64_t offset = a.q_offsets[own], last = own == 0 ? 0 : a.q_offsets[own - 1];
      ascends = offset >= last && offset <= a.queries;
      before = ascends && first_slot(offset, own, group, rows) <= slot;
      if (blockIdx.x == 0 && own < a.sequences) (void)sequence_of(a, own); /* what is inconsistent is reported */
    }
    pieces += __syncthreads_count(before);
    regular = !__syncthreads_or(!ascends) && regular;
  }
  return pieces - 1;
}

/* The rows of unit `slot` of `slots`; false: there are none. Irregular: a unit is up to `rows` heads of one query. */
template <int THREADS>
DEVICE bool find_rows(const attention_args &a, int64_t slot, int group, int rows, tile_rows &t, bool &regular)
{
  regular = true;
  if (!a.q_offsets) {
    t.s = a.sequences == 1 ? sequence_of(a, 0) : no_sequence(0, a.queries);
    t.packed = slot * rows;
    t.end = min(a.queries * group, t.packed + rows);
    return t.packed < t.end;
  }
  const int64_t piece = piece_of_slot<THREADS>(a, slot, group, rows, regular);
  if (regular) {
    const int64_t begin = piece_begin(a, piece), end = piece_begin(a, piece + 1);
    t.packed = (slot - first_slot(begin, piece, group, rows)) * rows;
    t.end = min((end - begin) * group, t.packed + rows);
    t.s = piece < 0 || piece >= a.sequences ? no_sequence(begin, end - begin) : sequence_of(a, piece);
    return t.packed < t.end;
  }
  const int64_t parts = ceil_div(group, rows), query = slot / parts;
  if (query >= a.queries) return false;
  t.s = sequence_with(a, query);
  if (t.s.index < 0) t.s.first = query;
  const int64_t first = (query - t.s.first) * group;
  t.packed = first + slot % parts * rows;
  t.end = min(first + group, t.packed + rows);
  return true;
}

/* Calls work(kv_head) of the tiles of CTA (or cluster) `index` of `count`, with `t` in shared memory; one, but where
 * offsets are irregular. The last slots come first: causal attention has most keys there. */
template <int ROWS, int THREADS, class F>
DEVICE void for_tiles(const attention_args &a, unsigned index, unsigned count, tile_rows &t, F work)
{
  const int group = a.heads / a.kv_heads, slots = (int)(count / (unsigned)a.kv_heads);
  const int kv_head = (int)(index % (unsigned)a.kv_heads);
#pragma unroll 1
  for (int64_t slot = slots - 1 - (int)(index / (unsigned)a.kv_heads);; slot += slots) {
    tile_rows found;
    bool regular;
    const bool there = find_rows<THREADS>(a, slot, group, ROWS, found, regular);
    if (there) {
      if (threadIdx.x == 0) t = found;
      __syncthreads();
      work(kv_head);
      __syncthreads();
    }
    if (regular || slot + slots >= a.queries * ceil_div(group, ROWS)) return;
  }
}

/* A row's query, as a row of q, and head. */
struct query_head {
  int64_t query;
  int head;
};

DEVICE query_head row_of_tile(const attention_args &a, const tile_rows &t, int64_t packed, int group, int kv_head)
{
  const int64_t query = packed >> 31 ? packed / group : (unsigned)packed / (unsigned)group;
  return {t.s.first + query, kv_head * group + (int)(packed - query * group)};
}

#endif
