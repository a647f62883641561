/*
 * Backward of attention, form split: tiles as in backward_tile.cuh, each of a cluster. Where tiles are few, or the
 * longest is most of the work, a tile's steps are dealt to the cluster's CTAs in turn. What each has is added in the
 * order of the CTAs, every one of which finishes its share of the rows: dq's, or keys'.
 */
#ifndef CUMOE_ATTENTION_BACKWARD_SPLIT_CUH
#define CUMOE_ATTENTION_BACKWARD_SPLIT_CUH

#include "attention/backward_tile.cuh"
#include "device/ptx_attention_sm90.cuh"

/* Rows of sums in shared memory are so far apart: the eight that a warp writes at a time lie in different banks. */
template <int D> constexpr int SUM_GAP = D + 8;

/* A warp's sums, to its rows. */
template <int D, int MT> DEVICE void share_sums(float *rows, const float (&sums)[MT][D / 8][4])
{
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int c = 0; c < D / 8; c++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float *row = rows + (m * 16 + h * 8 + lane_id() / 4) * SUM_GAP<D>;
        *reinterpret_cast<float2 *>(row + c * 8 + lane_id() % 4 * 2) =
            make_float2(sums[m][c][h * 2], sums[m][c][h * 2 + 1]);
      }
}

/* The sum of a row of all the cluster's CTAs times factor, by a warp, to row `to` of m from `column` on. False: an
 * element is not finite. */
template <class T, int D, int CTAS>
DEVICE bool store_sum(const matrix &m, int64_t to, int64_t column, int d, const float *row, float factor)
{
  bool finite = true;
  if (lane_id() < D / 4) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < CTAS; i++) {
      const float4 part = ld_shared_cluster(reinterpret_cast<const float4 *>(row) + lane_id(), i);
      sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    sum = make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
    finite = isfinite(sum.x) && isfinite(sum.y) && isfinite(sum.z) && isfinite(sum.w);
    const uint2 rounded = make_uint2(pack_pair<T>(sum.x, sum.y), pack_pair<T>(sum.z, sum.w));
    T *place = static_cast<T *>(m.data) + to * m.ld + column + lane_id() * 4;
    const T *each = reinterpret_cast<const T *>(&rounded);
    if (lane_id() * 4 >= d)
      finite = true;
    else if (in_chunks(m))
      *reinterpret_cast<uint2 *>(place) = rounded;
    else
      for (int i = 0; i < 4; i++) place[i] = each[i];
  }
  return !__any_sync(ALL_LANES, !finite);
}

template <class T, int M, int D, int N, int THREADS, int CTAS, int SMEM>
DEVICE void split_attention_dq(const attention_args &a)
{
  using layout = dq_smem<T, D, M, N>;
  constexpr int OWN = M * WARP_SIZE / THREADS, MT = OWN / 16, WARPS = THREADS / WARP_SIZE;
  static_assert(exact_smem<sizeof(layout), SMEM>::OK && M * SUM_GAP<D> * sizeof(float) <= offsetof(layout, rows), "");
  DYNAMIC_SHARED(unsigned char, memory, 1024);
  layout &smem = *reinterpret_cast<layout *>(memory);
  float *const sums = reinterpret_cast<float *>(memory); /* over the tiles, once they are done */
  const int rank = (int)cluster_ctarank();
  for_tiles<M, THREADS>(a, blockIdx.x / CTAS, gridDim.x / CTAS, smem.rows, [&](int kv_head) {
    const int own = warp_id() * OWN;
    const row_keys keys = begin_dq<T, D, M, N, THREADS>(a, smem, kv_head, rank);
    float dq[MT][D / 8][4];
    sum_dq<T, D, M, N, THREADS, MT, CTAS>(a, smem, kv_head, keys.begin, keys.end, own, dq);
    __syncthreads();
    share_sums<D, MT>(sums + own * SUM_GAP<D>, dq);
    barrier_cluster();
    for (int r = rank * (M / CTAS) + warp_id(); r < (rank + 1) * (M / CTAS); r += WARPS) {
      const row_place at = smem.place[r];
      if (at.query < 0) continue;
      if (!store_sum<T, D, CTAS>(a.dq, at.query, (int64_t)at.head * a.head_dim, a.head_dim, sums + r * SUM_GAP<D>,
                                 (float)a.scale))
        dq_again<T>(a, at.query, at.head, smem.delta[r]);
    }
    barrier_cluster(); /* all have read what is here */
  });
}

template <class T, int KEYS, int D, int N, int THREADS, int CTAS, int SMEM>
DEVICE void split_attention_dkv(const attention_args &a)
{
  using layout = dkv_smem<T, D, KEYS, N>;
  constexpr int WARPS = THREADS / WARP_SIZE, SUMS = KEYS * SUM_GAP<D>;
  static_assert(exact_smem<sizeof(layout), SMEM>::OK && 2 * SUMS * sizeof(float) <= offsetof(layout, s), "");
  DYNAMIC_SHARED(unsigned char, memory, 1024);
  float *const sums = reinterpret_cast<float *>(memory);
  const unsigned index = blockIdx.x / CTAS;
  const int kv_head = (int)(index % (unsigned)a.kv_heads), rank = (int)cluster_ctarank(), own = warp_id() * 16;
  const int64_t first_key = (int64_t)(index / (unsigned)a.kv_heads) * KEYS, column = (int64_t)kv_head * a.head_dim;
  for (int64_t i = threadIdx.x; blockIdx.x == 0 && i < a.sequences; i += THREADS) (void)sequence_of(a, i);
  float dk[1][D / 8][4], dv[1][D / 8][4];
  sum_dkv<CTAS, T, D, KEYS, N, THREADS>(a, *reinterpret_cast<layout *>(memory), kv_head, first_key, rank, dk, dv);
  share_sums<D, 1>(sums + own * SUM_GAP<D>, dk);
  share_sums<D, 1>(sums + SUMS + own * SUM_GAP<D>, dv);
  barrier_cluster();
  for (int r = rank * (KEYS / CTAS) + warp_id(); r < (rank + 1) * (KEYS / CTAS); r += WARPS) {
    const int64_t key = first_key + r;
    const float *row = sums + r * SUM_GAP<D>;
    if (key >= a.keys) break;
    const bool k = store_sum<T, D, CTAS>(a.dk, key, column, a.head_dim, row, (float)a.scale);
    const bool v = store_sum<T, D, CTAS>(a.dv, key, column, a.head_dim, row + SUMS, 1);
    if (!k || !v) dkv_again<T>(a, key, kv_head);
  }
  barrier_cluster(); /* all have read what is here */
}

#endif
