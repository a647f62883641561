/*
 * Attention, form tile: a CTA of four warps has M rows and goes through their keys, 32 at a time, while the next ones
 * come into a second buffer; two CTAs an SM hide the rest. Tiles with many keys (the last ones, of causal attention)
 * start first.
 */
#ifndef CUMOE_ATTENTION_TILE_CUH
#define CUMOE_ATTENTION_TILE_CUH

#include "attention/product.cuh"

constexpr int TILE_KEYS = 32;

template <class T, int D, int M> struct tile_smem {
  T q[M * D], k[2][TILE_KEYS * D], v[2][TILE_KEYS * D];
  tile_rows rows;
  row_place place[M];
  row_keys seen[M];
  unsigned char known[2][TILE_KEYS]; /* of paged keys */
};

/* The results of a warp's rows, by way of its own queries, which are not needed any more. Rows that are not finite:
 * bits of `again`. */
template <class T, int D, int MT>
DEVICE void store_rows(const attention_args &a, const attending<T, D, MT, TILE_KEYS> &w, T *queries,
                       const row_place *place, unsigned (&again)[MT][2])
{
  unsigned char *own = reinterpret_cast<unsigned char *>(queries);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = m * 16 + h * 8 + lane_id() / 4;
      const float each = w.sum[m][h] == 0 ? 0.f : 1 / w.sum[m][h];
      bool finite = true, known = w.sum[m][h] == w.sum[m][h]; /* a sum that is NaN is that of what is seen */
#pragma unroll
      for (int c = 0; c < D / 8; c++) {
        const float low = w.out[m][c][h * 2] * each, high = w.out[m][c][h * 2 + 1] * each;
        finite = finite && isfinite(low) && isfinite(high);
        *reinterpret_cast<uint32_t *>(own + chunk_at<D>(r, c) + lane_id() % 4 * 4) = pack_pair<T>(low, high);
      }
      again[m][h] = __ballot_sync(ALL_LANES, known && !finite);
      if (lane_id() % 4 == 0) store_lse(a, place[r], w.most[m][h], w.sum[m][h]);
    }
  __syncwarp();
  const bool aligned = in_chunks(a.out);
#pragma unroll 1
  for (int i = lane_id(); i < MT * 16 * (D / 8); i += WARP_SIZE) {
    const int r = i / (D / 8), c = i % (D / 8);
    const row_place at = place[r];
    if (at.query < 0 || c * 8 >= a.head_dim) continue;
    T *to = static_cast<T *>(a.out.data) + at.query * a.out.ld + (int64_t)at.head * a.head_dim + c * 8;
    const uint4 v = *reinterpret_cast<const uint4 *>(own + chunk_at<D>(r, c));
    if (aligned)
      *reinterpret_cast<uint4 *>(to) = v;
    else
      scatter_chunk(to, v);
  }
  __syncwarp();
}

template <class T, int D, int M, int THREADS>
DEVICE void attend_tile(const attention_args &a, tile_smem<T, D, M> &smem, int kv_head)
{
  constexpr int OWN = M * WARP_SIZE / THREADS, MT = OWN / 16; /* rows of a warp */
  const tile_rows &t = smem.rows;
  place_rows<M, THREADS>(a, t, kv_head, smem.place, smem.seen);
  __syncthreads();
  /* Of ascending queries neither end of what they see descends. */
  const row_keys first = smem.seen[0], last = smem.seen[t.end - t.packed - 1];
  const int begin = first.begin / TILE_KEYS * TILE_KEYS, end = last.end, own = warp_id() * OWN;
  const bool paged = a.pages.data;
  attending<T, D, MT, TILE_KEYS> w;
  w.begin(a, smem.place + own, t.s.index >= 0);
  load_queries<T, D, M, THREADS>(a, smem.q, smem.place);
#pragma unroll 1
  for (int j = begin - TILE_KEYS, odd = 1; j < end; j += TILE_KEYS, odd ^= 1) {
    cp_async_wait_all();
    __syncthreads();
    if (j + TILE_KEYS < end) {
      const int next = odd ^ 1;
      load_keys<T, D, TILE_KEYS, THREADS>(a, smem.k[next], a.k, threadIdx.x, t.s, kv_head, j + TILE_KEYS,
                                          smem.known[next]);
      load_keys<T, D, TILE_KEYS, THREADS>(a, smem.v[next], a.v, threadIdx.x, t.s, kv_head, j + TILE_KEYS,
                                          smem.known[next]);
    }
    if (j < begin) continue;
    float s[MT][TILE_KEYS / 8][4];
    w.score(s, smem.q + own * D, smem.k[odd]);
    w.scale(a, s);
    if (paged || j < last.begin || j + TILE_KEYS > first.end)
      w.mask(s, smem.seen + own, j, paged ? smem.known[odd] : nullptr);
    w.weigh(s);
    w.add(s, smem.v[odd]);
  }
  unsigned again[MT][2];
  w.finish();
  cp_async_wait_all();
  __syncthreads(); /* copies of other threads, where there are no keys */
  store_rows<T, D, MT>(a, w, smem.q + own * D, smem.place + own, again);
  for (int r = 0; r < OWN; r++) {
    const row_place at = smem.place[own + r];
    if (again[r / 16][r / 8 % 2] >> 4 * (r % 8) & 15 && at.query >= 0)
      attend_again<T>(a, at.query, at.head, 0, a.head_dim);
  }
}

template <class T, int M, int D, int LANES, int THREADS, int CLUSTER, int SMEM>
DEVICE void form_tile(const attention_args &a)
{
  static_assert(LANES == 1 && CLUSTER == 1 && exact_smem<sizeof(tile_smem<T, D, M>), SMEM>::OK, "");
  DYNAMIC_SHARED(unsigned char, memory, 1024);
  tile_smem<T, D, M> &smem = *reinterpret_cast<tile_smem<T, D, M> *>(memory);
  for_tiles<M, THREADS>(a, blockIdx.x, gridDim.x, smem.rows,
                        [&](int kv_head) { attend_tile<T, D, M, THREADS>(a, smem, kv_head); });
}

#endif
