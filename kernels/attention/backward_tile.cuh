/*
 * Backward of attention by tiles. With p the weights, delta = <dout, out> and dp = dout v^T - delta:
 *   dv = p^T dout,   ds = p dp (times the soft cap's slope),   dq = scale ds k,   dk = scale ds^T q.
 * Two kernels, each of which makes p and ds for itself from lse. So every sum is one CTA's, and its bits are the same
 * on every run.
 *   dq   a CTA has M rows (a query and one of the heads that share keys) and goes through their keys; it also stores
 *        the rows' delta, which dkv reads
 *   dkv  a CTA has KEYS keys of a head and goes through the rows that see them, sequence by sequence
 * A pair that is not seen has weight 0, and 0 times a NaN is NaN. As in the forward (product.cuh), rows whose results
 * are not finite are therefore done again, key by key.
 */
#ifndef CUMOE_ATTENTION_BACKWARD_TILE_CUH
#define CUMOE_ATTENTION_BACKWARD_TILE_CUH

#include "attention/backward_row.cuh"
#include "attention/product.cuh"

/* ---- the products, in fewer registers than the forward's ---- */

/* Byte offsets in a tile of D columns at which a lane's rows of ldmatrix begin, for the first columns. z and w are the
 * caller's: addresses of its two left operands. The offsets of other columns differ only in bits that are 0 here, so
 * one exclusive or makes them. hold(), in the loops, has the compiler make them anew: kept, they fill registers. */
template <int D> DEVICE uint4 lane_offsets()
{
  const int matrix_index = lane_id() / 8, r = lane_id() % 8;
  return make_uint4(chunk_at<D>((matrix_index & 1) * 8 + r, matrix_index >> 1), /* x: of rows, or of [k, n] */
                    chunk_at<D>((matrix_index >> 1) * 8 + r, matrix_index & 1), /* y: of [n, k] */
                    0, 0);
}

/* s += a b^T; rows, columns: this lane's addresses (lane_offsets) in a and in b. */
template <class T, int D, int MT, int N> DEVICE void multiply(float (&s)[MT][N / 8][4], uint32_t rows, uint32_t columns)
{
#pragma unroll
  for (int step = 0; step < D / 16; step++) {
    uint32_t a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) ldmatrix_x4(a[m], (rows ^ step * 32u) + m * 16 * D * 2);
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
      uint32_t b[4];
      ldmatrix_x4(b, (columns ^ step * 32u) + n * 16 * D * 2);
      multiply_step<T>(s, 2 * n, a, b);
    }
  }
}

/* sums += s b, with s rounded; rows: this lane's address in b. */
template <class T, int D, int MT, int N>
DEVICE void add_product(float (&sums)[MT][D / 8][4], const float (&s)[MT][N / 8][4], uint32_t rows)
{
#pragma unroll
  for (int step = 0; step < N / 16; step++) {
    uint32_t a[MT][4];
    round_columns<T>(a, s, 2 * step);
#pragma unroll
    for (int c = 0; c < D / 16; c++) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, (rows ^ c * 32u) + step * 16 * D * 2);
      multiply_step<T>(sums, 2 * c, a, b);
    }
  }
}

/* ---- weights and the gradients of scores ---- */

/* q k^T times factor: a score in units of log 2, or, where scores are capped, what the tanh is taken of. */
struct score_units {
  float factor, cap;
  bool capped;
  DEVICE explicit score_units(const attention_args &a) : capped(a.softcap > 0)
  {
    factor = (float)(capped ? a.scale / a.softcap : a.scale * (double)LOG2_OF_E);
    cap = (float)a.softcap * LOG2_OF_E;
  }
};

/* s, of q k^T, becomes the pair's weight. dp, of dout v^T - delta, becomes what the weight is multiplied by in the
 * gradient of the score. lse: in units of log 2. */
DEVICE void weigh_pair(const score_units &u, float &s, float &dp, float lse)
{
  if (u.capped) {
    const float t = tanh_of(s * u.factor);
    dp *= 1 - t * t;
    s = ex2_approx_ftz(fmaf(t, u.cap, -lse));
  } else {
    s = ex2_approx_ftz(fmaf(s, u.factor, -lse));
  }
}

/* -infinity, of a row without any score above it, becomes +infinity, which makes all its weights 0. */
DEVICE float lse_in_log_2(float lse)
{
  return lse == -INFINITY ? INFINITY : lse * LOG2_OF_E;
}

/* dp times the weights: the gradients of scores. */
template <int MT, int N> DEVICE void times_weights(float (&dp)[MT][N / 8][4], const float (&weights)[MT][N / 8][4])
{
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) dp[m][n][e] = weights[m][n][e] * dp[m][n][e];
}

/* A warp's sums times factor, rounded, into its rows of a tile. again: of which rows a lane found an element that is
 * not finite (is_marked). */
template <class T, int D, int MT>
DEVICE void stage_sums(T *rows, const float (&sums)[MT][D / 8][4], float factor, unsigned (&again)[MT][2])
{
  unsigned char *own = reinterpret_cast<unsigned char *>(rows);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      bool finite = true;
#pragma unroll
      for (int c = 0; c < D / 8; c++) {
        const float low = sums[m][c][h * 2] * factor, high = sums[m][c][h * 2 + 1] * factor;
        finite = finite && isfinite(low) && isfinite(high);
        *reinterpret_cast<uint32_t *>(own + chunk_at<D>(m * 16 + h * 8 + lane_id() / 4, c) + lane_id() % 4 * 4) =
            pack_pair<T>(low, high);
      }
      again[m][h] = __ballot_sync(ALL_LANES, !finite);
    }
  __syncwarp();
}

/* Of eight rows, four lanes each. */
DEVICE bool is_marked(unsigned again, int row)
{
  return again >> 4 * row & 15;
}

/* ROWS rows of a warp from its tile to memory; offset(row): of its head in elements, -1: nowhere. */
template <class T, int D, int ROWS, class F> DEVICE void store_tile(const matrix &m, const T *tile, int d, F offset)
{
  const bool aligned = in_chunks(m);
#pragma unroll 1
  for (int i = lane_id(); i < ROWS * (D / 8); i += WARP_SIZE) {
    const int r = i / (D / 8), c = i % (D / 8);
    const int64_t at = offset(r);
    if (at < 0 || c * 8 >= d) continue;
    T *to = static_cast<T *>(m.data) + at + c * 8;
    const uint4 v = *reinterpret_cast<const uint4 *>(reinterpret_cast<const unsigned char *>(tile) + chunk_at<D>(r, c));
    if (aligned)
      *reinterpret_cast<uint4 *>(to) = v;
    else
      scatter_chunk(to, v);
  }
}

/* Consecutive rows of keys or values, `count` of which are there. */
template <class T, int D, int ROWS, int THREADS>
DEVICE void load_rows(const matrix &m, T *tile, int d, int64_t first, int64_t column, int count)
{
  if (in_chunks(m)) return copy_tile<T, D, ROWS, THREADS>(tile, m, (int)tid_x(), d, first, column, count);
  load_tile<T, D, ROWS, THREADS>(tile, m, (int)tid_x(), d,
                                 [&](int r) { return r < count ? (first + r) * m.ld + column : (int64_t)-1; });
}

/* The rows that `place` names, of q or dout. */
template <class T, int D, int ROWS, int THREADS>
DEVICE void load_placed(const matrix &m, T *tile, int d, const row_place *place)
{
  load_tile<T, D, ROWS, THREADS>(tile, m, (int)tid_x(), d, [&](int r) {
    const row_place at = place[r];
    return at.query < 0 ? (int64_t)-1 : at.query * m.ld + (int64_t)at.head * d;
  });
}

/* ---- dq ---- */

template <class T, int D, int M, int N> struct dq_smem {
  T q[M * D], dout[M * D], k[2][N * D], v[2][N * D];
  tile_rows rows;
  row_place place[M];
  row_keys seen[M];
  float delta[M];
};

/* delta = <dout, out> of a warp's rows, to shared memory and, by one who `stores`, to a.delta: D / 8 lanes a row. */
template <class T, int D, int ROWS>
DEVICE void make_deltas(const attention_args &a, const T *dout, const row_place *place, float *delta, bool stores)
{
  constexpr int CHUNKS = D / 8;
  const int chunk = lane_id() % CHUNKS;
  const bool aligned = in_chunks(a.out);
#pragma unroll 2
  for (int r = lane_id() / CHUNKS; r < ROWS; r += WARP_SIZE / CHUNKS) {
    const row_place at = place[r];
    float sum = 0;
    if (at.query >= 0 && chunk * 8 < a.head_dim) {
      const T *from = static_cast<const T *>(a.out.data) + at.query * a.out.ld + (int64_t)at.head * a.head_dim;
      uint4 x = aligned ? reinterpret_cast<const uint4 *>(from)[chunk] : gather_chunk(from + chunk * 8);
      uint4 y = *reinterpret_cast<const uint4 *>(reinterpret_cast<const unsigned char *>(dout) + chunk_at<D>(r, chunk));
#pragma unroll
      for (int i = 0; i < 8; i++)
        sum = fmaf(to_f32(reinterpret_cast<const T *>(&x)[i]), to_f32(reinterpret_cast<const T *>(&y)[i]), sum);
    }
#pragma unroll
    for (int mask = CHUNKS / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
    if (chunk == 0) delta[r] = sum;
    if (chunk == 0 && at.query >= 0 && stores) store_at(a.delta, at.query, at.head, sum);
  }
  __syncwarp();
}

template <class T> __device__ __noinline__ void dq_again(const attention_args &a, int64_t query, int head, float delta)
{
  dq_of_row(a, query, head, delta);
}

/* dp begins with -delta of its row: the product is added onto it. */
template <int MT, int CHUNKS> DEVICE void begin_rows(float (&dp)[MT][CHUNKS][4], const float *delta)
{
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float from = -delta[m * 16 + h * 8 + lane_id() / 4];
#pragma unroll
      for (int n = 0; n < CHUNKS; n++) dp[m][n][h * 2] = dp[m][n][h * 2 + 1] = from;
    }
}

/* The sums of a warp's rows over keys begin .. end - 1, of N * PARTS of which the CTA has the first N. */
template <class T, int D, int M, int N, int THREADS, int MT, int PARTS = 1>
DEVICE void sum_dq(const attention_args &a, dq_smem<T, D, M, N> &smem, int kv_head, int begin, int end, int own,
                   float (&dq)[MT][D / 8][4])
{
  constexpr int STEP = N * PARTS;
  const sequence &s = smem.rows.s;
  const score_units units(a);
  uint4 lane = lane_offsets<D>();
  lane.z = shared_address(smem.q + own * D) + lane.x;
  lane.w = shared_address(smem.dout + own * D) + lane.x;
  float lse[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = own + m * 16 + h * 8 + lane_id() / 4;
      const row_place at = smem.place[r];
      lse[m][h] = at.query < 0 ? INFINITY : lse_in_log_2(load_at(a.lse, at.query, at.head));
    }
  clear(dq);
#pragma unroll 1
  for (int j = begin, odd = 0; j < end; j += STEP, odd ^= 1) {
    cp_async_wait_all();
    __syncthreads();
    if (j + STEP < end) {
      const int count = (int)min(s.keys - (j + STEP), (int64_t)N);
      const int64_t column = (int64_t)kv_head * a.head_dim;
      load_rows<T, D, N, THREADS>(a.k, smem.k[odd ^ 1], a.head_dim, s.key + j + STEP, column, count);
      load_rows<T, D, N, THREADS>(a.v, smem.v[odd ^ 1], a.head_dim, s.key + j + STEP, column, count);
    }
    float p[MT][N / 8][4], dp[MT][N / 8][4];
    hold(lane);
    clear(p);
    begin_rows(dp, smem.delta + own);
    const uint32_t k = shared_address(smem.k[odd]);
    multiply<T, D, MT, N>(p, lane.z, k + lane.y);
    multiply<T, D, MT, N>(dp, lane.w, shared_address(smem.v[odd]) + lane.y);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) weigh_pair(units, p[m][n][e], dp[m][n][e], lse[m][e / 2]);
    if (j < smem.seen[smem.rows.end - smem.rows.packed - 1].begin || j + N > smem.seen[0].end)
      mask_rows(p, smem.seen + own, j, nullptr, 0);
    times_weights<MT, N>(dp, p);
    add_product<T, D, MT, N>(dq, dp, k + lane.x);
  }
}

/* Fetches the tile's rows and makes their deltas. Returns the keys that they see, from the part's first on. */
template <class T, int D, int M, int N, int THREADS>
DEVICE row_keys begin_dq(const attention_args &a, dq_smem<T, D, M, N> &smem, int kv_head, int part)
{
  constexpr int OWN = M * WARP_SIZE / THREADS;
  const tile_rows &t = smem.rows;
  const int own = warp_id() * OWN, d = a.head_dim;
  place_rows<M, THREADS>(a, t, kv_head, smem.place, smem.seen);
  __syncthreads();
  /* Of ascending queries neither end of what they see descends. */
  const int begin = smem.seen[0].begin / N * N + part * N, end = smem.seen[t.end - t.packed - 1].end;
  load_placed<T, D, M, THREADS>(a.q, smem.q, d, smem.place);
  load_placed<T, D, M, THREADS>(a.dout, smem.dout, d, smem.place);
  if (begin < end) {
    const int count = (int)min(t.s.keys - begin, (int64_t)N);
    load_rows<T, D, N, THREADS>(a.k, smem.k[0], d, t.s.key + begin, (int64_t)kv_head * d, count);
    load_rows<T, D, N, THREADS>(a.v, smem.v[0], d, t.s.key + begin, (int64_t)kv_head * d, count);
  }
  cp_async_wait_all();
  __syncthreads();
  make_deltas<T, D, OWN>(a, smem.dout + own * D, smem.place + own, smem.delta + own, part == 0);
  return {begin, end};
}

template <class T, int D, int M, int N, int THREADS>
DEVICE void dq_of_tile(const attention_args &a, dq_smem<T, D, M, N> &smem, int kv_head)
{
  constexpr int OWN = M * WARP_SIZE / THREADS, MT = OWN / 16; /* rows of a warp */
  const int own = warp_id() * OWN, d = a.head_dim;
  const row_keys keys = begin_dq<T, D, M, N, THREADS>(a, smem, kv_head, 0);
  float dq[MT][D / 8][4];
  unsigned again[MT][2];
  sum_dq<T, D, M, N, THREADS, MT>(a, smem, kv_head, keys.begin, keys.end, own, dq);
  stage_sums<T, D, MT>(smem.q + own * D, dq, (float)a.scale, again);
  store_tile<T, D, OWN>(a.dq, smem.q + own * D, d, [&](int r) {
    const row_place at = smem.place[own + r];
    return at.query < 0 ? (int64_t)-1 : at.query * a.dq.ld + (int64_t)at.head * d;
  });
  __syncwarp();
  for (int r = 0; r < OWN; r++) {
    const row_place at = smem.place[own + r];
    if (is_marked(again[r / 16][r / 8 % 2], r % 8) && at.query >= 0)
      dq_again<T>(a, at.query, at.head, smem.delta[own + r]);
  }
}

/* ---- dk, dv ---- */

template <class T, int D, int KEYS, int N> struct dkv_smem {
  T k[KEYS * D], v[KEYS * D], q[2][N * D], dout[2][N * D];
  sequence s;
  int64_t packed, end; /* rows of the sequence that see some of the tile's keys, from the CTA's first step on */
  int64_t first_key;   /* the tile's first row of k */
  int steps, kv_head;
  row_place place[2][N];
  alignas(8) float lse[2][N], delta[2][N]; /* read two at a time, as what follows is */
  alignas(4) unsigned char seen[2][N][2];  /* first and end of the tile's keys that a row sees */
};

template <class T> __device__ __noinline__ void dkv_again(const attention_args &a, int64_t row, int kv_head)
{
  dkv_of_row(a, row, kv_head);
}

/* Which queries and heads the N rows of a part's step `step` are. */
template <int PARTS, class T, int D, int KEYS, int N>
DEVICE void place_step(const attention_args &a, dkv_smem<T, D, KEYS, N> &smem, int64_t step)
{
  const int r = (int)tid_x(), group = a.heads / a.kv_heads;
  const int64_t packed = smem.packed + step * (PARTS * N) + r;
  if (r >= N) return;
  if (packed >= smem.end) {
    smem.place[step & 1][r] = {-1, 0};
    return;
  }
  const int64_t query = packed >> 31 ? packed / group : (unsigned)packed / (unsigned)group;
  smem.place[step & 1][r] = {(int32_t)(smem.s.first + query), smem.kv_head * group + (int)(packed - query * group)};
}

/* Fetches lse and delta of a step's rows, and finds which of the tile's keys they see. True: this thread's row does not
 * see all of them. */
template <class T, int D, int KEYS, int N>
DEVICE bool prepare_rows(const attention_args &a, dkv_smem<T, D, KEYS, N> &smem, int slot)
{
  const int r = (int)tid_x();
  if (r >= N) return false;
  const row_place at = smem.place[slot][r];
  const bool there = at.query >= 0;
  const int64_t query = there ? at.query : 0;
  cp_async_ca_4(shared_address(&smem.lse[slot][r]), static_cast<const float *>(a.lse.data) + query * a.lse.ld + at.head,
                there ? 4 : 0);
  cp_async_ca_4(shared_address(&smem.delta[slot][r]),
                static_cast<const float *>(a.delta.data) + query * a.delta.ld + at.head, there ? 4 : 0);
  const range seen = keys_seen(a, smem.s, query);
  const int64_t begin = smem.s.key + seen.begin - smem.first_key, end = smem.s.key + seen.end - smem.first_key;
  const int from = (int)min(max(begin, (int64_t)0), (int64_t)KEYS), to = (int)min(max(end, (int64_t)0), (int64_t)KEYS);
  smem.seen[slot][r][0] = (unsigned char)from;
  smem.seen[slot][r][1] = (unsigned char)to;
  return there && (from > 0 || to < KEYS);
}

/* As begin_rows; here a warp's keys are rows of p and dp, and a step's queries are columns. */
template <int N> DEVICE void begin_columns(float (&dp)[1][N / 8][4], const float *delta)
{
#pragma unroll
  for (int n = 0; n < N / 8; n++) {
    const float2 d = *reinterpret_cast<const float2 *>(delta + n * 8 + lane_id() % 4 * 2);
    dp[0][n][0] = dp[0][n][2] = -d.x;
    dp[0][n][1] = dp[0][n][3] = -d.y;
  }
}

template <int N>
DEVICE void weigh_columns(const score_units &units, float (&p)[1][N / 8][4], float (&dp)[1][N / 8][4], const float *lse)
{
#pragma unroll
  for (int n = 0; n < N / 8; n++) {
    const float2 l = *reinterpret_cast<const float2 *>(lse + n * 8 + lane_id() % 4 * 2);
    const float low = lse_in_log_2(l.x), high = lse_in_log_2(l.y);
#pragma unroll
    for (int e = 0; e < 4; e++) weigh_pair(units, p[0][n][e], dp[0][n][e], e % 2 ? high : low);
  }
}

template <int N> DEVICE void mask_columns(float (&p)[1][N / 8][4], const unsigned char (*seen)[2], int key)
{
#pragma unroll
  for (int n = 0; n < N / 8; n++) {
    const uint32_t both = *reinterpret_cast<const uint32_t *>(seen[n * 8 + lane_id() % 4 * 2]);
    const uint32_t range[2] = {both & 0xffff, both >> 16};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int own = key + e / 2 * 8;
      if (own < (int)(range[e % 2] & 0xff) || own >= (int)(range[e % 2] >> 8)) p[0][n][e] = 0;
    }
  }
}

/* Adds what the sequence's queries bring to the tile's dk and dv. Its loop begins one step early, which only loads. */
template <int PARTS, class T, int D, int KEYS, int N, int THREADS>
DEVICE void add_sequence(const attention_args &a, dkv_smem<T, D, KEYS, N> &smem, float (&dk)[1][D / 8][4],
                         float (&dv)[1][D / 8][4])
{
  const score_units units(a);
  const int own = warp_id() * 16, d = a.head_dim;
  uint4 lane = lane_offsets<D>();
  lane.z = shared_address(smem.k + own * D) + lane.x;
  lane.w = shared_address(smem.v + own * D) + lane.x;
  place_step<PARTS>(a, smem, 0);
  __syncthreads();
  bool cut = false;
#pragma unroll 1
  for (int step = -1; step < smem.steps; step++) {
    cp_async_wait_all();
    const bool masked = __syncthreads_or(cut);
    if (step + 1 < smem.steps) {
      const int next = (step + 1) & 1;
      cut = prepare_rows(a, smem, next);
      load_placed<T, D, N, THREADS>(a.q, smem.q[next], d, smem.place[next]);
      load_placed<T, D, N, THREADS>(a.dout, smem.dout[next], d, smem.place[next]);
      place_step<PARTS>(a, smem, step + 2);
    }
    if (step < 0) continue;
    const int slot = step & 1;
    float p[1][N / 8][4], dp[1][N / 8][4];
    hold(lane);
    clear(p);
    begin_columns<N>(dp, smem.delta[slot]);
    const uint32_t q = shared_address(smem.q[slot]), dout = shared_address(smem.dout[slot]);
    multiply<T, D, 1, N>(p, lane.z, q + lane.y);
    multiply<T, D, 1, N>(dp, lane.w, dout + lane.y);
    weigh_columns<N>(units, p, dp, smem.lse[slot]);
    if (masked) mask_columns<N>(p, smem.seen[slot], own + lane_id() / 4);
    times_weights<1, N>(dp, p);
    add_product<T, D, 1, N>(dv, p, dout + lane.x);
    add_product<T, D, 1, N>(dk, dp, q + lane.x);
  }
}

/* The rows of the sequence that see some of keys first_key .. first_key + count - 1, of every PARTS steps the one that
 * is the part's; false: nobody sees them. By the whole CTA. */
template <int PARTS, class T, int D, int KEYS, int N>
DEVICE bool find_queries(const attention_args &a, dkv_smem<T, D, KEYS, N> &smem, const sequence &s, int64_t first_key,
                         int64_t count, int part)
{
  const int64_t from = max(first_key - s.key, (int64_t)0), to = min(first_key + count - s.key, s.keys);
  const int64_t begin = queries_seeing(a, s, from).begin, end = queries_seeing(a, s, to - 1).end;
  const int group = a.heads / a.kv_heads;
  if (begin >= end) return false;
  __syncthreads(); /* all are done with the sequence before */
  if (threadIdx.x == 0) {
    smem.s = s;
    smem.packed = (begin - s.first) * group + part * N;
    smem.end = (end - s.first) * group;
    smem.steps = (int)ceil_div(max(smem.end - smem.packed, (int64_t)0), (int64_t)PARTS * N);
  }
  __syncthreads();
  return true;
}

/* Which of sequences first .. first + 31 have keys among rows first_key .. first_key + count - 1. */
DEVICE unsigned sequences_with_keys(const attention_args &a, int64_t first, int64_t first_key, int64_t count)
{
  const int64_t own = first + lane_id();
  bool has = false;
  if (own < a.sequences) {
    const sequence s = sequence_of<false>(a, own);
    has = s.queries > 0 && max(first_key, s.key) < min(first_key + count, s.key + s.keys);
  }
  return __ballot_sync(ALL_LANES, has);
}

/* The sums of a part's steps. Behind it nobody needs the tiles in shared memory any more. */
template <int PARTS, class T, int D, int KEYS, int N, int THREADS>
DEVICE void sum_dkv(const attention_args &a, dkv_smem<T, D, KEYS, N> &smem, int kv_head, int64_t first_key, int part,
                    float (&dk)[1][D / 8][4], float (&dv)[1][D / 8][4])
{
  static_assert(KEYS == THREADS / WARP_SIZE * 16 && N <= THREADS && KEYS <= 255, "16 keys a warp");
  const int d = a.head_dim, count = (int)min((int64_t)KEYS, a.keys - first_key);
  const int64_t column = (int64_t)kv_head * d;
  load_rows<T, D, KEYS, THREADS>(a.k, smem.k, d, first_key, column, count);
  load_rows<T, D, KEYS, THREADS>(a.v, smem.v, d, first_key, column, count);
  if (threadIdx.x == 0) {
    smem.first_key = first_key;
    smem.kv_head = kv_head;
  }
  clear(dk);
  clear(dv);
#pragma unroll 1
  for (int64_t i = 0; i < a.sequences; i += WARP_SIZE)
    for (unsigned found = sequences_with_keys(a, i, first_key, count); found; found &= found - 1)
      if (find_queries<PARTS>(a, smem, sequence_of<false>(a, i + __ffs(found) - 1), first_key, count, part))
        add_sequence<PARTS, T, D, KEYS, N, THREADS>(a, smem, dk, dv);
  cp_async_wait_all();
  __syncthreads(); /* copies of other threads, where nobody sees these keys */
}

template <class T, int D, int KEYS, int N, int THREADS>
DEVICE void dkv_of_tile(const attention_args &a, dkv_smem<T, D, KEYS, N> &smem, int kv_head, int64_t first_key)
{
  const int own = warp_id() * 16, d = a.head_dim, count = (int)min((int64_t)KEYS, a.keys - first_key);
  const int64_t column = (int64_t)kv_head * d;
  float dk[1][D / 8][4], dv[1][D / 8][4];
  sum_dkv<1, T, D, KEYS, N, THREADS>(a, smem, kv_head, first_key, 0, dk, dv);
  unsigned of_k[1][2], of_v[1][2];
  stage_sums<T, D, 1>(smem.k + own * D, dk, (float)a.scale, of_k);
  stage_sums<T, D, 1>(smem.v + own * D, dv, 1, of_v);
  store_tile<T, D, 16>(a.dk, smem.k + own * D, d,
                       [&](int r) { return own + r < count ? (first_key + own + r) * a.dk.ld + column : (int64_t)-1; });
  store_tile<T, D, 16>(a.dv, smem.v + own * D, d,
                       [&](int r) { return own + r < count ? (first_key + own + r) * a.dv.ld + column : (int64_t)-1; });
  __syncwarp();
  for (int r = 0; r < 16; r++)
    if (is_marked(of_k[0][r / 8] | of_v[0][r / 8], r % 8) && own + r < count)
      dkv_again<T>(a, first_key + own + r, kv_head);
}

/* ---- rows of variants.def ---- */

template <class T, int M, int D, int N, int THREADS, int SMEM> DEVICE void tile_attention_dq(const attention_args &a)
{
  static_assert(exact_smem<sizeof(dq_smem<T, D, M, N>), SMEM>::OK, "");
  DYNAMIC_SHARED(unsigned char, memory, 1024);
  dq_smem<T, D, M, N> &smem = *reinterpret_cast<dq_smem<T, D, M, N> *>(memory);
  for_tiles<M, THREADS>(a, blockIdx.x, gridDim.x, smem.rows,
                        [&](int kv_head) { dq_of_tile<T, D, M, N, THREADS>(a, smem, kv_head); });
}

/* Keys that come first are seen by most, if causal, and start first. */
template <class T, int KEYS, int D, int N, int THREADS, int SMEM>
DEVICE void tile_attention_dkv(const attention_args &a)
{
  static_assert(exact_smem<sizeof(dkv_smem<T, D, KEYS, N>), SMEM>::OK, "");
  DYNAMIC_SHARED(unsigned char, memory, 1024);
  const int tile = (int)(blockIdx.x / (unsigned)a.kv_heads), kv_head = (int)(blockIdx.x % (unsigned)a.kv_heads);
  for (int64_t i = threadIdx.x; blockIdx.x == 0 && i < a.sequences; i += THREADS) (void)sequence_of(a, i);
  dkv_of_tile<T, D, KEYS, N, THREADS>(a, *reinterpret_cast<dkv_smem<T, D, KEYS, N> *>(memory), kv_head,
                                      (int64_t)tile * KEYS);
}

#endif
