/*
 * The map: from ids to rows, by counting. A pair's rank among its expert's pairs is what lies before it: in its warp
 * (match), in earlier warps (counts in shared memory), in earlier chunks (counts in global memory). Nothing depends on
 * the order in which warps or CTAs run.
 */
#ifndef CUMOE_MAP_CHUNK_CUH
#define CUMOE_MAP_CHUNK_CUH

#include "route/pairs.cuh"

/* 32 warps in blocks of 8: the rows of an expert in seven warps still count in a byte. */
constexpr int RUN = 1024, RUN_WARPS = RUN / WARP_SIZE, BLOCK_WARPS = 8, BLOCKS = RUN_WARPS / BLOCK_WARPS;

struct map_shared {
  int32_t next[MAX_EXPERTS]; /* counts first, then the row that the run's first pair of each expert gets */
  union {
    int32_t earlier[MAX_EXPERTS]; /* rows in earlier chunks */
    int32_t warp_rows[RUN_WARPS]; /* of the experts that a warp scans */
  };
  uint16_t in_block[BLOCKS][MAX_EXPERTS];  /* rows in each block of warps */
  uint8_t in_warp[RUN_WARPS][MAX_EXPERTS]; /* rows in each warp, then in the earlier warps of its block */
};
static_assert(sizeof(map_shared) <= 48 * 1024, "static shared memory");

struct pair_range {
  int64_t begin, end, padded_end; /* this chunk's pairs; up to padded_end: of tokens that are not there */
};

DEVICE pair_range chunk_of(const map_args &a)
{
  const unsigned chunk = blockIdx.x + a.first_chunk, begins = chunk < a.chunks ? chunk : chunk - a.chunks;
  int64_t begin = (int64_t)begins * a.chunk_pairs, end = begin + a.chunk_pairs;
  return {begin, min(end, token_total(a.tokens) * a.top_k), min(end, a.tokens.count * a.top_k)};
}

/* Integer sums: the order of the atomics does not show. */
DEVICE void count_chunk(const map_args &a, pair_range chunk, int32_t *count)
{
  for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  for (int64_t pair = chunk.begin + threadIdx.x; pair < chunk.end; pair += blockDim.x) {
    int to = destination<false>(a, pair);
    if (to >= 0) atomicAdd(&count[to], 1);
  }
  __syncthreads();
}

template <int PAIRS> DEVICE void map_count_chunk(const map_args &a)
{
  __shared__ int32_t count[MAX_EXPERTS];
  count_chunk(a, chunk_of(a), count);
  for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x)
    a.hist[(int64_t)blockIdx.x * a.local_experts + e] = count[e];
}

/* Every CTA adds up the whole table: cheaper than a third launch, and `earlier` falls out of it. */
DEVICE void sum_chunks(const map_args &a, map_shared &s)
{
  const int columns = round_up(a.local_experts, WARP_SIZE), readers = blockDim.x / columns;
  const int e = threadIdx.x % columns, reader = threadIdx.x / columns;
  s.next[threadIdx.x] = s.earlier[threadIdx.x] = 0;
  __syncthreads();
  if (e < a.local_experts && reader < readers) {
    int total = 0, earlier = 0;
#pragma unroll 16
    for (int chunk = reader; chunk < a.chunks; chunk += readers) {
      int rows = a.hist[(int64_t)chunk * a.local_experts + e];
      total += rows;
      if (chunk < blockIdx.x) earlier += rows;
    }
    atomicAdd(&s.next[e], total);
    atomicAdd(&s.earlier[e], earlier);
  }
  __syncthreads();
}

/* Sum of `count` over the threads before this one. */
DEVICE int scan_threads(int count, int32_t *warp_rows)
{
  const int inclusive = warp_scan(count);
  __syncthreads();
  if (lane_id() == WARP_SIZE - 1) warp_rows[warp_id()] = inclusive;
  __syncthreads();
  const int of_warp = warp_rows[lane_id()];
  return __shfl_sync(ALL_LANES, warp_scan(of_warp) - of_warp, warp_id()) + inclusive - count;
}

/* Counts to offsets, a thread an expert; the first CTA writes them out. */
DEVICE void lay_out_rows(const map_args &a, map_shared &s)
{
  const int e = threadIdx.x;
  const bool is_expert = e < a.local_experts;
  const int count = is_expert ? s.next[e] : 0, earlier = is_expert && a.chunks > 1 ? s.earlier[e] : 0;
  const int offset = scan_threads(count, s.warp_rows);
  if (is_expert) s.next[e] = offset + earlier;
  __syncthreads();
  if (blockIdx.x != 0 || !is_expert) return;
  a.counts[e] = count;
  a.offsets[e] = offset;
  if (e == a.local_experts - 1) a.offsets[e + 1] = offset + count;
  if (a.counts_out) a.counts_out[e] = count;
  if (a.load) a.load[e] += count;
}

/* Rows a warp -> rows in the earlier warps of its block and rows a block; a thread takes four experts of a
 * block. */
DEVICE void scan_warps(const map_args &a, map_shared &s)
{
  constexpr int WORDS = MAX_EXPERTS / 4;
  const int word = threadIdx.x % WORDS, block = threadIdx.x / WORDS;
  if (word * 4 >= a.local_experts) return;
  uint32_t rows[BLOCK_WARPS], before = 0;
#pragma unroll
  for (int w = 0; w < BLOCK_WARPS; w++)
    rows[w] = reinterpret_cast<uint32_t *>(s.in_warp[block * BLOCK_WARPS + w])[word];
#pragma unroll
  for (int w = 0; w < BLOCK_WARPS; w++) {
    reinterpret_cast<uint32_t *>(s.in_warp[block * BLOCK_WARPS + w])[word] = before;
    if (w < BLOCK_WARPS - 1) before += rows[w];
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    s.in_block[block][word * 4 + i] = (before >> 8 * i & 0xff) + (rows[BLOCK_WARPS - 1] >> 8 * i & 0xff);
}

/* A thread's pair: the local expert it goes to, and its place among the warp's pairs of that expert. */
struct ranked_pair {
  int64_t pair;
  int to, before;
};

DEVICE ranked_pair rank_run(const map_args &a, map_shared &s, pair_range chunk, int64_t begin)
{
  const int64_t pair = begin + threadIdx.x;
  const int to = pair < chunk.end ? destination<true>(a, pair) : ROW_DROPPED;
  uint8_t *own = s.in_warp[warp_id()];
  for (int word = lane_id(); word * 4 < a.local_experts; word += WARP_SIZE) reinterpret_cast<uint32_t *>(own)[word] = 0;
  __syncwarp();
  const unsigned peers = __match_any_sync(ALL_LANES, to);
  const int before = __popc(peers & ((1u << lane_id()) - 1));
  if (to >= 0 && before == 0) own[to] = __popc(peers);
  __syncthreads();
  scan_warps(a, s);
  __syncthreads();
  return {pair, to, before};
}

DEVICE int rows_in_run(const map_shared &s, int expert)
{
  int rows = 0;
  for (int block = 0; block < BLOCKS; block++) rows += s.in_block[block][expert];
  return rows;
}

DEVICE void place_pair(const map_args &a, const map_shared &s, pair_range chunk, ranked_pair r)
{
  int row = r.to;
  if (r.to >= 0) {
    row = s.next[r.to] + s.in_warp[warp_id()][r.to] + r.before;
    for (int block = 0; block < warp_id() / BLOCK_WARPS; block++) row += s.in_block[block][r.to];
    a.row_pair[row] = (int32_t)r.pair;
  }
  if (r.pair < chunk.padded_end) a.slot_row[r.pair] = row;
}

/* For up and down, which begin when this grid is complete. */
DEVICE void clear_progress(const map_args &a)
{
  if (!a.protocol.progress) return;
  const int64_t words = PROGRESS_WORDS(a.tokens.count * a.top_k, a.local_experts),
                step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) a.protocol.progress[i] = 0;
}

/* The first run is ranked before rows are laid out: alone, it needs no other count. */
template <int PAIRS> DEVICE void map_chunk(const map_args &a)
{
  static_assert(PAIRS == RUN && RUN >= MAX_EXPERTS, "a thread a pair, a thread an expert");
  __shared__ __align__(16) map_shared s;
  const pair_range chunk = chunk_of(a);
  const bool is_expert = threadIdx.x < a.local_experts;
  check_token_count(a.tokens, a.fault);
  clear_progress(a);
  ranked_pair r = rank_run(a, s, chunk, chunk.begin);
  if (a.chunks > 1)
    sum_chunks(a, s);
  else if (chunk.end - chunk.begin > RUN)
    count_chunk(a, chunk, s.next);
  else if (is_expert)
    s.next[threadIdx.x] = rows_in_run(s, threadIdx.x);
  lay_out_rows(a, s);
  for (int64_t begin = chunk.begin;;) {
    place_pair(a, s, chunk, r);
    begin += RUN;
    if (begin >= chunk.padded_end) break;
    __syncthreads();
    if (is_expert) s.next[threadIdx.x] += rows_in_run(s, threadIdx.x);
    r = rank_run(a, s, chunk, begin);
  }
}

#endif
