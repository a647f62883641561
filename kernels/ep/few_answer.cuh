/* few, whose outputs are what a rank answers: packets, stored in the tokens' ranks' arenas by the warps that sum them
 * up. */
#ifndef CUMOE_EP_FEW_ANSWER_CUH
#define CUMOE_EP_FEW_ANSWER_CUH

#include "ep/flags.cuh"
#include "few/few.cuh"

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

  /* As store_outputs. Lanes that have a token's channels one after the other make packets; the first of each stores. */
  DEVICE void store(const few_args &args, const few_smem<S> &smem, int octet, int octets, int first) const
  {
    const int width = octets * 8, local = first + lane_id() % width, channel = octet * 8 + lane_id() % width,
              tokens = (int)token_total(args.out.tokens), at_once = WARP_SIZE / width;
    for (int next = (warp_id() - S::EPILOGUE) * at_once; next < tokens; next += S::WRITERS * at_once) {
      const int token = next + lane_id() / width;
      const bool came = token < tokens && arrived >> token & 1;
      const float sum = came ? sum_slots<S, false>(args.out, smem, token, local, channel) : 0.f;
      const Y value = from_f32<Y>(args.out.out_scale * sum);
      const uint32_t bits = *reinterpret_cast<const uint16_t *>(&value),
                     two = bits | __shfl_xor_sync(ALL_LANES, bits, 1) << 16, more = __shfl_xor_sync(ALL_LANES, two, 2);
      if (came && lane_id() % PACKET_CHANNELS == 0) store_packet(token, channel, make_uint2(two, more));
    }
  }

  DEVICE void store_packet(int token, int channel, uint2 data) const
  {
    const int capacity = (int)a.shape.capacity, source = token / capacity, row = token - source * capacity;
    char *at = sum_packets(a, source, a.rank, row, channel / (2 * PACKET_CHANNELS));
    if (channel & PACKET_CHANNELS) at += SECOND_PACKET;
    store_words_system(at, make_packet(exchange, data).words);
  }
};

#endif
