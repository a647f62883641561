/*
 * Attention, form split: 16 rows, as decoding has them, whose keys are dealt in tiles of 16 to all warps of a cluster.
 * Bound by the cache that is read: a warp has two tiles of keys and values on their way and waits for nobody. The parts
 * are added in the order of the warps, then of the CTAs, each of which finishes its share of the columns.
 */
#ifndef CUMOE_ATTENTION_SPLIT_CUH
#define CUMOE_ATTENTION_SPLIT_CUH

#include "attention/product.cuh"
#include "device/ptx_sm90.cuh"

constexpr int SPLIT_ROWS = 16, SPLIT_KEYS = 16, SPLIT_STAGES = 3, SPLIT_WARPS = 4, MOST_CTAS = 8;

/* Of a row: the largest score, and the sum of exp2 of all less this. */
struct row_part_of {
  float most, sum;
};

template <class T, int D> struct split_smem {
  T q[SPLIT_ROWS * D];
  union {
    struct {
      T k[SPLIT_KEYS * D], v[SPLIT_KEYS * D];
    } ring[SPLIT_WARPS][SPLIT_STAGES];
    float out[SPLIT_WARPS][SPLIT_ROWS * D]; /* then: what each warp has */
  };
  float inbox[SPLIT_ROWS * D]; /* of each CTA of the cluster: this one's columns */
  row_part_of part[SPLIT_WARPS][SPLIT_ROWS], parts[MOST_CTAS][SPLIT_ROWS];
  tile_rows rows;
  row_place place[SPLIT_ROWS];
  row_keys seen[SPLIT_ROWS];
  unsigned char known[SPLIT_WARPS][SPLIT_STAGES][SPLIT_KEYS];
};

/* What a part counts for in their sum. */
DEVICE float share_of(row_part_of part, float most)
{
  return part.most == most ? 1.f : ex2_approx_ftz(part.most - most);
}

/* A warp's part: its tiles are `parts` apart. */
template <class T, int D>
DEVICE void attend_part(const attention_args &a, split_smem<T, D> &smem, int kv_head, int part, int parts)
{
  const int warp = warp_id();
  const tile_rows &t = smem.rows;
  const bool paged = a.pages.data;
  const int end = smem.seen[t.end - t.packed - 1].end, step = parts * SPLIT_KEYS;
  const int begin = smem.seen[0].begin / SPLIT_KEYS * SPLIT_KEYS + part * SPLIT_KEYS;
  attending<T, D, 1, SPLIT_KEYS> w;
  w.begin(a, smem.place, t.s.index >= 0 && part == 0);
#pragma unroll 1
  for (int j = begin - (SPLIT_STAGES - 1) * step, i = 0; j < end; j += step, i = i == SPLIT_STAGES - 1 ? 0 : i + 1) {
    const int ahead = j + (SPLIT_STAGES - 1) * step, slot = i == 0 ? SPLIT_STAGES - 1 : i - 1;
    cp_async_wait_group<SPLIT_STAGES - 2>();
    __syncwarp();
    if (ahead < end) {
      auto &to = smem.ring[warp][slot];
      load_keys<T, D, SPLIT_KEYS, WARP_SIZE>(a, to.k, a.k, lane_id(), t.s, kv_head, ahead, smem.known[warp][slot]);
      load_keys<T, D, SPLIT_KEYS, WARP_SIZE>(a, to.v, a.v, lane_id(), t.s, kv_head, ahead, smem.known[warp][slot]);
    }
    cp_async_commit_group();
    if (j < begin) continue;
    float s[1][SPLIT_KEYS / 8][4];
    w.score(s, smem.q, smem.ring[warp][i].k);
    w.scale(a, s);
    w.mask(s, smem.seen, j, paged ? smem.known[warp][i] : nullptr);
    w.weigh(s);
    w.add(s, smem.ring[warp][i].v);
  }
  w.finish();
  cp_async_wait_all();
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = h * 8 + lane_id() / 4;
    if (lane_id() % 4 == 0) smem.part[warp][r] = {w.most[0][h], w.sum[0][h]};
#pragma unroll
    for (int c = 0; c < D / 8; c++)
#pragma unroll
      for (int e = 0; e < 2; e++) smem.out[warp][r * D + c * 8 + lane_id() % 4 * 2 + e] = w.out[0][c][h * 2 + e];
  }
  __syncthreads();
}

DEVICE row_part_of join_parts(const row_part_of *parts, int count, int gap)
{
  row_part_of all = {-INFINITY, 0};
  for (int i = 0; i < count; i++) all.most = fmaxf(all.most, parts[i * gap].most);
  for (int i = 0; i < count; i++) all.sum = fmaf(parts[i * gap].sum, share_of(parts[i * gap], all.most), all.sum);
  return all;
}

/* The warps' parts become the CTA's, which goes to those of the cluster that have its columns. */
template <class T, int D, int CTAS, int THREADS> DEVICE void send_parts(split_smem<T, D> &smem)
{
  constexpr int COLUMNS = D / CTAS; /* of a CTA */
  const unsigned rank = CTAS > 1 ? cluster_ctarank() : 0;
  if (threadIdx.x < SPLIT_ROWS) {
    const row_part_of all = join_parts(&smem.part[0][threadIdx.x], SPLIT_WARPS, SPLIT_ROWS);
    for (int to = 0; to < CTAS; to++) {
      row_part_of &place = smem.parts[rank][threadIdx.x];
      if (CTAS == 1) {
        place = all;
      } else {
        st_shared_cluster(&place.most, to, all.most);
        st_shared_cluster(&place.sum, to, all.sum);
      }
    }
  }
  for (int i = threadIdx.x; i < SPLIT_ROWS * D; i += THREADS) {
    const int row = i / D, column = i % D;
    float most = -INFINITY, sum = 0;
    for (int w = 0; w < SPLIT_WARPS; w++) most = fmaxf(most, smem.part[w][row].most);
    for (int w = 0; w < SPLIT_WARPS; w++) sum = fmaf(smem.out[w][i], share_of(smem.part[w][row], most), sum);
    float *place = &smem.inbox[(rank * SPLIT_ROWS + row) * COLUMNS + column % COLUMNS];
    if (CTAS == 1)
      *place = sum;
    else
      st_shared_cluster(place, column / COLUMNS, sum);
  }
}

/* This CTA's columns of the result. Rows that are not finite there are done again. */
template <class T, int D, int CTAS, int THREADS>
DEVICE void store_columns(const attention_args &a, split_smem<T, D> &smem)
{
  constexpr int COLUMNS = D / CTAS;
  const int rank = CTAS > 1 ? (int)cluster_ctarank() : 0, first = rank * COLUMNS;
  for (int row = warp_id(); row < SPLIT_ROWS; row += THREADS / WARP_SIZE) {
    const row_place at = smem.place[row];
    if (at.query < 0) continue;
    const row_part_of all = join_parts(&smem.parts[0][row], CTAS, SPLIT_ROWS);
    const float each = all.sum == 0 ? 0.f : 1 / all.sum;
    bool finite = true;
    for (int c = lane_id(); c < COLUMNS && first + c < a.head_dim; c += WARP_SIZE) {
      float sum = 0;
      for (int i = 0; i < CTAS; i++)
        sum = fmaf(smem.inbox[(i * SPLIT_ROWS + row) * COLUMNS + c], share_of(smem.parts[i][row], all.most), sum);
      finite = finite && isfinite(sum * each);
      store_at(a.out, at.query, (int64_t)at.head * a.head_dim + first + c, sum * each);
    }
    if (rank == 0 && lane_id() == 0) store_lse(a, at, all.most, all.sum);
    __syncwarp();
    if (all.sum == all.sum && __any_sync(ALL_LANES, !finite))
      attend_again<T>(a, at.query, at.head, first, min(first + COLUMNS, a.head_dim));
  }
}

template <class T, int ROWS, int D, int, int THREADS, int CLUSTER, int SMEM>
DEVICE void form_split(const attention_args &a)
{
  static_assert(ROWS == SPLIT_ROWS && THREADS == SPLIT_WARPS * WARP_SIZE, "");
  static_assert((CLUSTER == 1 || CLUSTER == MOST_CTAS) && exact_smem<sizeof(split_smem<T, D>), SMEM>::OK, "");
  DYNAMIC_SHARED(unsigned char, memory, 1024);
  split_smem<T, D> &smem = *reinterpret_cast<split_smem<T, D> *>(memory);
  const int rank = CLUSTER > 1 ? (int)cluster_ctarank() : 0;
  for_tiles<ROWS, THREADS>(a, blockIdx.x / CLUSTER, gridDim.x / CLUSTER, smem.rows, [&](int kv_head) {
    place_rows<ROWS, THREADS>(a, smem.rows, kv_head, smem.place, smem.seen);
    __syncthreads();
    load_queries<T, D, ROWS, THREADS>(a, smem.q, smem.place);
    cp_async_wait_all();
    if (CLUSTER > 1) barrier_cluster(); /* every CTA has begun, and has read its inbox of the tile before */
    __syncthreads();
    attend_part<T, D>(a, smem, kv_head, rank * SPLIT_WARPS + warp_id(), CLUSTER * SPLIT_WARPS);
    send_parts<T, D, CLUSTER, THREADS>(smem);
    if (CLUSTER > 1)
      barrier_cluster();
    else
      __syncthreads();
    store_columns<T, D, CLUSTER, THREADS>(a, smem);
  });
}

#endif
