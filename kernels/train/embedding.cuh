/* Rows of a table by id, and the sums of what comes back for each. */
#ifndef CUMOE_EMBEDDING_CUH
#define CUMOE_EMBEDDING_CUH

#include "train/elements.cuh"

/* Its row of the table; -1: none. */
DEVICE int64_t row_of_token(const embedding_args &e, int64_t token)
{
  const int64_t id = id_at(e.ids, token);
  if (id < e.vocabulary) return id < 0 ? -1 : id;
  report_fault(e.fault, FAULT_TOKEN_ID, 0, token);
  return -1;
}

template <int THREADS> DEVICE void any_embed(const embedding_args &e)
{
  const int64_t token = blockIdx.x, row = row_of_token(e, token);
  for (int64_t c = threadIdx.x; c < e.cols; c += THREADS) {
    const int64_t to = token * e.y.ld + c, from = row * e.table.ld + c;
    if (e.y.dtype == DT_F32)
      static_cast<uint32_t *>(e.y.data)[to] = row < 0 ? 0 : static_cast<const uint32_t *>(e.table.data)[from];
    else
      static_cast<uint16_t *>(e.y.data)[to] = row < 0 ? 0 : static_cast<const uint16_t *>(e.table.data)[from];
  }
}

template <int THREADS> DEVICE void any_embedding_clear(const embedding_args &e)
{
  const int64_t id = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (id <= e.vocabulary) e.begins[id] = 0;
}

/* Of id v in begins[v + 1]: integers, so their order is nothing. */
template <int THREADS> DEVICE void any_embedding_count(const embedding_args &e)
{
  const int64_t token = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  const int64_t row = token < e.tokens ? row_of_token(e, token) : -1;
  if (row >= 0) atomicAdd(&e.begins[row + 1], 1);
}

/* Counts become sums of all up to them. */
template <int THREADS> DEVICE void any_embedding_scan(const embedding_args &e)
{
  constexpr int WARPS = THREADS / WARP_SIZE;
  __shared__ int32_t part[WARPS];
  int32_t before = 0;
  for (int64_t first = 0; first <= e.vocabulary; first += THREADS) {
    const int64_t id = first + threadIdx.x;
    const int32_t sum = warp_scan(id <= e.vocabulary ? e.begins[id] : 0);
    if (lane_id() == WARP_SIZE - 1) part[warp_id()] = sum;
    __syncthreads();
    int32_t total = 0, earlier = 0;
    for (int w = 0; w < WARPS; w++) {
      if (w == warp_id()) earlier = total;
      total += part[w];
    }
    if (id <= e.vocabulary) e.begins[id] = before + earlier + sum;
    before += total;
    __syncthreads();
  }
}

template <int THREADS> DEVICE void any_embedding_place(const embedding_args &e)
{
  const int64_t token = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  const int64_t row = token < e.tokens ? row_of_token(e, token) : -1;
  if (row >= 0) e.order[atomicAdd(&e.begins[row], 1)] = (int32_t)token;
}

/* Puts up to THREADS tokens of an id in their order: each goes where so many are smaller. */
template <int THREADS> DEVICE void sort_few(int32_t *order, int count)
{
  __shared__ int32_t tokens[THREADS];
  const int own = threadIdx.x;
  if (own < count) tokens[own] = order[own];
  __syncthreads();
  int smaller = 0;
  for (int i = 0; own < count && i < count; i++) smaller += tokens[i] < tokens[own];
  if (own < count) order[smaller] = tokens[own];
  __syncthreads();
}

/* Any number of them: all ids are read again. */
template <int THREADS> DEVICE void list_again(const embedding_args &e, int64_t row, int32_t *order)
{
  __shared__ int found[THREADS / WARP_SIZE];
  int before = 0;
  for (int64_t first = 0; first < e.tokens; first += THREADS) {
    const int64_t token = first + threadIdx.x;
    const bool has = token < e.tokens && id_at(e.ids, token) == row;
    const unsigned lanes = __ballot_sync(ALL_LANES, has);
    if (lane_id() == 0) found[warp_id()] = __popc(lanes);
    __syncthreads();
    int earlier = before;
    for (int w = 0; w < THREADS / WARP_SIZE; w++) {
      earlier += w < warp_id() ? found[w] : 0;
      before += found[w];
    }
    if (has) order[earlier + __popc(lanes & ((1u << lane_id()) - 1))] = (int32_t)token;
    __syncthreads();
  }
}

template <int THREADS> DEVICE void any_embedding_backward(const embedding_args &e)
{
  const int64_t row = blockIdx.x;
  const int begin = row ? e.begins[row - 1] : 0, end = e.begins[row], count = end - begin;
  if (e.accumulate && count == 0) return;
  int32_t *order = e.order + begin;
  if (count > THREADS)
    list_again<THREADS>(e, row, order);
  else if (count > 1)
    sort_few<THREADS>(order, count);
  for_vectors<THREADS>({0, e.cols}, [&](span columns) {
    double sum[VECTOR] = {0};
    if (e.accumulate) get_vector(sum, e.table, row, columns);
    for (int i = 0; i < count; i++) {
      double one[VECTOR];
      get_vector(one, e.y, order[i], columns);
#pragma unroll
      for (int v = 0; v < VECTOR; v++) sum[v] += one[v];
    }
    put_vector(sum, e.table, row, columns);
  });
}

#endif
