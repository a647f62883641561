/*
 * Attention on the tensor cores: 16 rows of a tile by keys, online softmax (Dao, arXiv 2307.08691), in one place for
 * the two forms. A lane has rows l/4 and l/4 + 8 of each 16, and of 8 keys or columns 2(l%4) + {0, 1}.
 *
 * Masks cost only where a tile is cut by one. What is not seen has weight 0, and 0 times a NaN or an infinity among the
 * values is NaN; as that always shows in the result, rows that are not finite are done again, key by key (row.cuh), a
 * hundred times as slow; but where the sum of weights is NaN too, which masks keep right.
 */
#ifndef CUMOE_ATTENTION_PRODUCT_CUH
#define CUMOE_ATTENTION_PRODUCT_CUH

#include "attention/row.cuh"

/* Byte offset of 16 bytes in a tile of D columns: the chunks of eight rows lie in different banks. */
template <int D> DEVICE uint32_t chunk_at(int row, int chunk)
{
  return (uint32_t)(row * D * 2 + ((chunk ^ (row & 7)) << 4));
}

/* Every row begins at a multiple of 16 bytes, if its first column does. */
DEVICE bool in_chunks(const matrix &m)
{
  return ((uintptr_t)m.data | (uintptr_t)(m.ld * 2)) % 16 == 0;
}

/* 8 elements that may lie anywhere. */
template <class T> DEVICE uint4 gather_chunk(const T *from)
{
  uint4 v;
  uint16_t *part = reinterpret_cast<uint16_t *>(&v);
#pragma unroll
  for (int i = 0; i < 8; i++) part[i] = reinterpret_cast<const uint16_t *>(from)[i];
  return v;
}

template <class T> DEVICE void scatter_chunk(T *to, const uint4 &v)
{
#pragma unroll
  for (int i = 0; i < 8; i++) reinterpret_cast<uint16_t *>(to)[i] = reinterpret_cast<const uint16_t *>(&v)[i];
}

/* Rows of a tile by THREADS threads; offset(row): of its head in elements, -1: zeros. */
template <class T, int D, int ROWS, int THREADS, class F>
DEVICE void load_tile(T *tile, const matrix &m, int thread, int d, F offset)
{
  constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS;
  static_assert(THREADS % CHUNKS == 0, "a thread's chunk is that of all its rows");
  const int chunk = thread % CHUNKS;
  const bool aligned = in_chunks(m), inside = chunk * 8 < d;
  const T *base = static_cast<const T *>(m.data) + (inside ? chunk * 8 : 0);
#pragma unroll 1
  for (int row = thread / CHUNKS; row < ROWS; row += STEP) {
    const int64_t from = offset(row);
    const bool there = inside && from >= 0;
    unsigned char *to = reinterpret_cast<unsigned char *>(tile) + chunk_at<D>(row, chunk);
    if (aligned)
      cp_async_cg_16(shared_address(to), base + (there ? from : 0), there ? 16 : 0);
    else
      *reinterpret_cast<uint4 *>(to) = there ? gather_chunk(base + from) : make_uint4(0, 0, 0, 0);
  }
}

/* The same of consecutive rows of 16-byte chunks, of which `count` are there: nothing but additions. */
template <class T, int D, int ROWS, int THREADS>
DEVICE void copy_tile(T *tile, const matrix &m, int thread, int d, int64_t first, int64_t column, int count)
{
  constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS;
  static_assert(THREADS % CHUNKS == 0, "a thread's chunk is that of all its rows");
  const int chunk = thread % CHUNKS, row = thread / CHUNKS;
  const T *from = static_cast<const T *>(m.data) + (first + row) * m.ld + column + chunk * 8;
  const int64_t step = STEP * m.ld;
  if (chunk * 8 >= d) count = 0;
#pragma unroll
  for (int i = 0; i < ROWS / STEP; i++) {
    const bool there = row + i * STEP < count;
    const uint32_t to = shared_address(tile) + chunk_at<D>(row + i * STEP, chunk);
    cp_async_cg_16(to, there ? from + i * step : static_cast<const T *>(m.data), there ? 16 : 0);
  }
}

/* What a CTA of a tile is told of one of its rows. */
struct row_place {
  int32_t query, head; /* query -1: no such row */
};
struct row_keys {
  int32_t begin, end;
};

/* ---- sums of MT times 16 rows of a warp, [.][8 columns][element of the lane] ---- */

template <int MT, int CHUNKS> DEVICE void clear(float (&sums)[MT][CHUNKS][4])
{
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int e = 0; e < 4; e++) sums[m][c][e] = 0;
}

/* sums += a b, in 16 columns from 8 * chunk on, over 16 of the reduction; b as ldmatrix_x4 brings it. */
template <class T, int MT, int CHUNKS>
DEVICE void multiply_step(float (&sums)[MT][CHUNKS][4], int chunk, const uint32_t (&a)[MT][4], const uint32_t (&b)[4])
{
  const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
  for (int m = 0; m < MT; m++) {
    mma_m16n8k16<T>(sums[m][chunk], a[m], low);
    mma_m16n8k16<T>(sums[m][chunk + 1], a[m], high);
  }
}

/* 16 columns of sums, from 8 * chunk on, rounded: the left operand of another product. */
template <class T, int MT, int CHUNKS>
DEVICE void round_columns(uint32_t (&a)[MT][4], const float (&sums)[MT][CHUNKS][4], int chunk)
{
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      a[m][i] = pack_pair<T>(sums[m][chunk + i / 2][i % 2 * 2], sums[m][chunk + i / 2][i % 2 * 2 + 1]);
}

/* `value` where a row does not see key first + column. known: NULL, or which of these keys are anywhere. */
template <int MT, int CHUNKS>
DEVICE void mask_rows(float (&s)[MT][CHUNKS][4], const row_keys *seen, int first, const unsigned char *known,
                      float value)
{
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const row_keys range = seen[m * 16 + h * 8 + lane_id() / 4];
      const int begin = range.begin - first, end = range.end - first;
#pragma unroll
      for (int n = 0; n < CHUNKS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int key = n * 8 + lane_id() % 4 * 2 + e;
          if (key < begin || key >= end || (known && !known[key])) s[m][n][h * 2 + e] = value;
        }
    }
}

/* ---- the forward's product ---- */

template <class T, int D, int MT, int N> struct attending {
  static constexpr int CHUNKS = D / 8;
  float out[MT][CHUNKS][4], most[MT][2], sum[MT][2]; /* most: in units of log 2; sum: this lane's part */

  DEVICE void begin(const attention_args &a, const row_place *place, bool of_a_sequence)
  {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const row_place at = place[m * 16 + h * 8 + lane_id() / 4];
        const bool has = a.sinks.data && of_a_sequence && at.query >= 0;
        most[m][h] = has ? load_at(a.sinks, 0, at.head) * LOG2_OF_E : -INFINITY;
        sum[m][h] = lane_id() % 4 == 0 && most[m][h] != -INFINITY;
      }
    clear(out);
  }

  /* s = q k^T. */
  DEVICE void score(float (&s)[MT][N / 8][4], const T *q, const T *k) const
  {
    const int matrix_index = lane_id() / 8, r = lane_id() % 8;
    const uint32_t q_tile = shared_address(q), k_tile = shared_address(k);
    clear(s);
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      uint32_t rows[MT][4];
#pragma unroll
      for (int m = 0; m < MT; m++)
        ldmatrix_x4(rows[m], q_tile + chunk_at<D>(m * 16 + (matrix_index & 1) * 8 + r, step * 2 + (matrix_index >> 1)));
#pragma unroll
      for (int n = 0; n < N / 16; n++) {
        uint32_t keys[4];
        ldmatrix_x4(keys, k_tile + chunk_at<D>(n * 16 + (matrix_index >> 1) * 8 + r, step * 2 + (matrix_index & 1)));
        multiply_step<T>(s, 2 * n, rows, keys);
      }
    }
  }

  /* Of keys first .. first + N - 1. known: NULL, or which of them are anywhere. */
  DEVICE void mask(float (&s)[MT][N / 8][4], const row_keys *seen, int first, const unsigned char *known) const
  {
    mask_rows(s, seen, first, known, -INFINITY);
  }

  /* Scores to units of log 2. */
  DEVICE void scale(const attention_args &a, float (&s)[MT][N / 8][4]) const
  {
    const bool capped = a.softcap > 0;
    const float factor = (float)(capped ? a.scale / a.softcap : a.scale * (double)LOG2_OF_E);
    const float cap = (float)a.softcap * LOG2_OF_E;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[m][n][e] *= factor;
          if (capped) s[m][n][e] = cap * tanh_of(s[m][n][e]);
        }
  }

  /* Scores to weights; what was there shrinks where one is the largest yet. */
  DEVICE void weigh(float (&s)[MT][N / 8][4])
  {
    float smaller[MT][2];
    bool shrinks = false;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float top = most[m][h];
#pragma unroll
        for (int n = 0; n < N / 8; n++) top = fmaxf(top, fmaxf(s[m][n][h * 2], s[m][n][h * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
        smaller[m][h] = top == most[m][h] ? 1.f : ex2_approx_ftz(most[m][h] - top);
        shrinks |= top != most[m][h];
        most[m][h] = top;
        const float base = top == -INFINITY ? 0.f : top;
        float more = 0;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float weight = ex2_approx_ftz(s[m][n][h * 2 + e] - base);
            s[m][n][h * 2 + e] = weight;
            more += weight;
          }
        sum[m][h] = fmaf(sum[m][h], smaller[m][h], more);
      }
    if (!__any_sync(ALL_LANES, shrinks)) return;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[m][c][e] *= smaller[m][e / 2];
  }

  /* out += weights v. */
  DEVICE void add(const float (&s)[MT][N / 8][4], const T *v)
  {
    const int matrix_index = lane_id() / 8, r = lane_id() % 8;
    const uint32_t v_tile = shared_address(v);
#pragma unroll
    for (int step = 0; step < N / 16; step++) {
      uint32_t weights[MT][4];
      round_columns<T>(weights, s, 2 * step);
#pragma unroll
      for (int c = 0; c < CHUNKS / 2; c++) {
        uint32_t values[4];
        ldmatrix_x4_trans(values,
                          v_tile + chunk_at<D>(step * 16 + (matrix_index & 1) * 8 + r, c * 2 + (matrix_index >> 1)));
        multiply_step<T>(out, 2 * c, weights, values);
      }
    }
  }

  /* Lanes' parts to sums, the same in the four that share a row. */
  DEVICE void finish()
  {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        sum[m][h] += __shfl_xor_sync(ALL_LANES, sum[m][h], 1);
        sum[m][h] += __shfl_xor_sync(ALL_LANES, sum[m][h], 2);
      }
  }
};

/* Of a row's keys, in 32 bits. */
DEVICE row_keys keys_of_row(const attention_args &a, const sequence &s, int64_t query)
{
  if (s.keys <= 0) return {0, 0};
  const range seen = keys_seen(a, s, query);
  return {(int32_t)min(seen.begin, s.keys), (int32_t)max(seen.end, (int64_t)0)};
}

/* Who the rows of a tile are, by THREADS threads; to be followed by a barrier. */
template <int ROWS, int THREADS>
DEVICE void place_rows(const attention_args &a, const tile_rows &t, int kv_head, row_place *place, row_keys *seen)
{
  const int group = a.heads / a.kv_heads;
  for (int r = threadIdx.x; r < ROWS; r += THREADS) {
    const bool there = t.packed + r < t.end;
    const query_head at = row_of_tile(a, t, there ? t.packed + r : t.packed, group, kv_head);
    place[r] = {there ? (int32_t)at.query : -1, at.head};
    seen[r] = there ? keys_of_row(a, t.s, at.query) : row_keys{0, 0};
  }
}

DEVICE void store_lse(const attention_args &a, row_place at, float most, float sum)
{
  if (a.lse.data && at.query >= 0)
    store_at(a.lse, at.query, at.head, sum == 0 ? -INFINITY : fmaf(most, LN_2, logf(sum)));
}

/* Keys or values first .. first + ROWS - 1 of the sequence. known: of paged ones, which are anywhere. */
template <class T, int D, int ROWS, int THREADS>
DEVICE void load_keys(const attention_args &a, T *tile, const matrix &m, int thread, const sequence &s, int kv_head,
                      int first, unsigned char *known)
{
  const int64_t column = (int64_t)kv_head * a.head_dim;
  const int count = (int)min(s.keys - first, (int64_t)ROWS);
  if (in_chunks(m) && !a.pages.data)
    return copy_tile<T, D, ROWS, THREADS>(tile, m, thread, a.head_dim, s.key + first, column, count);
  load_tile<T, D, ROWS, THREADS>(tile, m, thread, a.head_dim, [&](int r) {
    const int64_t row = r < count ? row_of_key(a, s, first + r) : -1;
    known[r] = row >= 0;
    return row < 0 ? (int64_t)-1 : row * m.ld + column;
  });
}

/* The queries of a tile's rows. */
template <class T, int D, int ROWS, int THREADS>
DEVICE void load_queries(const attention_args &a, T *tile, const row_place *place)
{
  load_tile<T, D, ROWS, THREADS>(tile, a.q, threadIdx.x, a.head_dim, [&](int r) {
    const row_place at = place[r];
    return at.query < 0 ? (int64_t)-1 : at.query * a.q.ld + (int64_t)at.head * a.head_dim;
  });
}

#endif
