/* few: the combine. Every warp that is no consumer sums y over its tokens' slots and writes the CTA's channels. */
#ifndef CUMOE_FEW_OUTPUTS_CUH
#define CUMOE_FEW_OUTPUTS_CUH

#include "few/layout.cuh"

template <class T> DEVICE void store_output(void *base, int64_t index, float value, int dtype)
{
  if (dtype == DT_F32)
    static_cast<float *>(base)[index] = value;
  else
    static_cast<T *>(base)[index] = from_f32<T>(value);
}

/* With the shared expert's output, times out_scale, on the residual, which may be `out` itself. */
template <class T> DEVICE void store_sum(const combine_args &out, int token, int channel, float sum)
{
  const float weight = out.shared ? shared_weight(out, token) : 0.f;
  if (weight != 0) sum = fmaf(weight, to_f32(static_cast<const T *>(out.shared)[token * out.shared_ld + channel]), sum);
  float value = out.out_scale * sum;
  if (out.residual)
    value = fmaf(out.out_scale, sum, load_any(out.residual, token * out.residual_ld + channel, out.out_dtype));
  store_output<T>(out.out, token * out.out_ld + channel, value, out.out_dtype);
}

/* A token's sum over its slots, in their order; one of weight 0 adds nothing, whatever it holds. IDENTITY: some may add
 * x. */
template <class S, bool IDENTITY>
DEVICE float sum_slots(const combine_args &out, const few_smem<S> &smem, int token, int local, int channel)
{
  using T = typename S::Y;
  float sum = 0;
#pragma unroll 4
  for (int pair = token * out.top_k; pair < (token + 1) * out.top_k; pair++) {
    const float weight = smem.table.weight[pair];
    float value = to_f32(smem.y[pair][local]);
    if (IDENTITY && weight != 0 && smem.table.to[pair] == ROW_IDENTITY)
      value = to_f32(static_cast<const T *>(out.x)[token * out.x_ld + channel]);
    if (weight != 0) sum = fmaf(weight, value, sum);
  }
  return sum;
}

/* What a warp has to know of where outputs go besides `out`: nothing, but where they are answers. */
template <class S, bool ANSWERS = S::ANSWERS> struct few_outputs {
  DEVICE few_outputs(const few_args &) {}
};

/* A warp's part of one or two octets, when y of all experts is there. first: where they lie in y. */
template <class S>
DEVICE void store_outputs(const few_args &args, const few_smem<S> &smem, const few_outputs<S> &outputs, int octet,
                          int octets, int first)
{
  if constexpr (S::ANSWERS) return outputs.store(args, smem, octet, octets, first);
  const combine_args &out = args.out;
  const int width = octets * 8, local = first + lane_id() % width, channel = octet * 8 + lane_id() % width,
            tokens = (int)token_total(out.tokens), at_once = WARP_SIZE / width;
  for (int token = (warp_id() - S::EPILOGUE) * at_once + lane_id() / width; token < tokens;
       token += S::WRITERS * at_once) {
    const float sum = args.map.identity_experts > 0 ? sum_slots<S, true>(out, smem, token, local, channel)
                                                    : sum_slots<S, false>(out, smem, token, local, channel);
    store_sum<typename S::Y>(out, token, channel, sum);
  }
}

/* All channels of the CTA; before each round, fill() by the warp that fills y. */
template <class S, class FILL> DEVICE void write_outputs(const few_args &args, few_smem<S> &smem, FILL fill)
{
  const int end = smem.own.first + smem.own.count;
  const few_outputs<S> outputs(args);
  uint32_t phase = 0;
#pragma unroll 1
  for (int octet = smem.own.first; octet < end; octet += S::OCTETS, phase ^= 1) {
    fill(octet > smem.own.first, phase ^ 1);
    wait_for(&smem.y_full, phase);
    wait_for(&smem.weights_ready, 0);
    store_outputs<S>(args, smem, outputs, octet, min(2, end - octet), 0);
#pragma unroll
    for (int i = 2; i < S::OCTETS; i += 2)
      if (end - octet > i) store_outputs<S>(args, smem, outputs, octet + i, min(2, end - octet - i), i * 8);
    mbarrier_arrive(&smem.y_empty);
  }
}

#endif
