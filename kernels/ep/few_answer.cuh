/* few, whose outputs are what a rank answers: packets, stored in the tokens' ranks' arenas by the warps that sum them up.
 */
#ifndef CUMOE_EP_FEW_ANSWER_CUH
#define CUMOE_EP_FEW_ANSWER_CUH

#include "ep/flags.cuh"
#include "few/few.cuh"

/* The exchange whose tokens a CTA has; known behind its first barrier. */
DEVICE const ep_args *&exchange_of_cta()
{
  __shared__ const ep_args *a;
  return a;
}

/* What the wait for tokens has left is there, as the grid ahead has ended. */
template <class S> struct few_outputs<S, true> {
  using Y = typename S::Y;
  static constexpr int PACKET_CHANNELS = 8 / sizeof(Y);
  const ep_args &a;
  uint32_t exchange, arrived; /* arrived: a bit a token, in the order of segments; at most FEW_TOKENS */

  DEVICE few_outputs(const few_args &) : a(*exchange_of_cta()), exchange(exchange_now(a))
  {
    const int token = lane_id(), capacity = (int)a.shape.capacity, source = token / capacity;
    const bool came = source < a.shape.ranks && token - source * capacity < load_relaxed(&a.arrived[source]);
    arrived = __ballot_sync(ALL_LANES, came);
  }

  /* Lanes of PACKET_CHANNELS channels have the same token, and are here together; the first of them stores. */
  DEVICE void store(const few_args &args, int token, int channel, float sum) const
  {
    if (!(arrived >> token & 1)) return;
    const int first = lane_id() / PACKET_CHANNELS * PACKET_CHANNELS, capacity = (int)a.shape.capacity,
              source = token / capacity, row = token - source * capacity;
    const unsigned together = ((1u << PACKET_CHANNELS) - 1) << first;
    const Y value = from_f32<Y>(args.out.out_scale * sum);
    const uint32_t bits = *reinterpret_cast<const uint16_t *>(&value),
                   pair = bits | __shfl_xor_sync(together, bits, 1) << 16, next = __shfl_xor_sync(together, pair, 2);
    if (lane_id() != first) return;
    char *at = sum_packets(a, source, a.rank, row, channel / (2 * PACKET_CHANNELS));
    if (channel & PACKET_CHANNELS) at += SECOND_PACKET;
    store_words_system(at, make_packet(exchange, make_uint2(pair, next)).words);
  }
};

#endif
