/*
 * Up and down of many tokens on sm_90a, between the ranks of a group: up's copy of rows waits for those that follow,
 * expert by expert, and down counts what is there of each expert's results, which another grid returns meanwhile.
 */
#ifndef CUMOE_EP_GEMM_RANKS_CUH
#define CUMOE_EP_GEMM_RANKS_CUH

#include "ep/flags.cuh"
#include "gemm/wgmma.cuh"

struct operation_up_arriving : operation_up {
  static constexpr bool ARRIVES = true;
};
struct operation_down_answered : operation_down {
  static constexpr bool ANSWERS = true;
};

/* The exchange whose rows a CTA has; known behind its first barrier. */
DEVICE const ep_args *&exchange_of_cta()
{
  __shared__ const ep_args *a;
  return a;
}

/* Rows that other ranks send, or this one to itself. Nothing is kept meanwhile: producers have few registers. */
struct rows_that_follow {
  DEVICE void wait(const gemm_args &args, bool asks, int32_t pair) const
  {
    const ep_args &a = *exchange_of_cta();
    const uint32_t token = (uint32_t)pair / (uint32_t)args.top_k;
    if (asks && token < (uint32_t)(a.shape.ranks * a.shape.capacity)) wait_for_chunk(a, (int32_t)token);
    __syncwarp();
    __threadfence();
  }

  DEVICE static void wait_for_chunk(const ep_args &a, int32_t token)
  {
    const int capacity = (int)a.shape.capacity, source = token / capacity;
    const char *lane = lane_of(a, a.rank);
    const int turn = load_relaxed(reinterpret_cast<const int32_t *>(lane + a.at.turns) + token);
    if (turn < 0 || turn >= capacity) return; /* no row is sent, whatever was said of its ids */
    const char *word = lane + a.at.chunks + (source * ep_chunks(capacity) + turn / EP_CHUNK) * sizeof(uint64_t);
    uint32_t none;
    wait_for_word<true>(a, word, exchange_now(a), EP_DISPATCH, source, &none);
  }
};

template <class S> struct rank_hooks<S, true> {
  DEVICE static int32_t *tickets(const gemm_args &args)
  {
    return S::ARRIVES ? exchange_of_cta()->progress : args.protocol.progress + PROGRESS_UNIT_TICKETS;
  }

  DEVICE static void copy_rows(const gemm_args &args) { ::copy_rows<typename S::X>(args, rows_that_follow{}); }

  /* By a consumer: its channels of a tile's rows are stored. */
  DEVICE static void add_answered(const gemm_args &args, const tile_unit &tile, int group)
  {
    const int channels = wgmma_channels<S>(args), each = channels / S::CONSUMERS, there = args.n - tile.n * channels;
    bar_sync(1 + group, S::GROUP);
    if (threadIdx.x % S::GROUP == 0)
      add_release(exchange_of_cta()->progress + 1 + tile.expert, tile.rows * min(each, there - group * each));
  }
};

#endif
