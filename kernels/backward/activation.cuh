/* The activation and its slope (kernels/cpu/backward_rows.c). A warp has a row, 8 elements a lane at a time. A CTA a
 * row would leave threads without elements, and so fewer loads in flight. */
#ifndef CUMOE_BACKWARD_ACTIVATION_CUH
#define CUMOE_BACKWARD_ACTIVATION_CUH

#include "backward/rows.cuh"
#include "backward/slope.cuh"

constexpr int PACKET = 8; /* H and I are multiples of it */

template <bool FAST> DEVICE activated gelu_tanh(float g)
{
  const float square = g * g, s = sigmoid<FAST>(1.5957691f * g * (1.f + .044715f * square));
  const float bend = s * (1.f - s); /* 0 where the slope of what is bent overflows */
  return {g * s, bend == 0 ? s : fmaf(g * bend, 1.5957691f * fmaf(.134145f, square, 1.f), s)};
}

DEVICE activated gelu_erf(float g)
{
  const float p = .5f * erfcf(-.70710678f * g);
  return {g * p, fmaf(g, .39894228f * expf(-.5f * g * g), p)};
}

template <int ACT, bool FAST> DEVICE activated activate(float alpha, float g)
{
  if (ACT == ACT_SILU) return times_sigmoid<FAST>(g, 1.f);
  if (ACT == ACT_SWIGLU_OAI) return times_sigmoid<FAST>(g, alpha);
  if (ACT == ACT_GELU_ERF) return gelu_erf(g);
  if (ACT == ACT_GELU_TANH) return gelu_tanh<FAST>(g);
  if (ACT == ACT_RELU) return {g < 0 ? 0.f : g, g <= 0 ? 0.f : 1.f};
  if (ACT == ACT_RELU2) return {g < 0 ? 0.f : g * g, g <= 0 ? 0.f : 2 * g};
  return {g, 1.f};
}

/* In: gate and up before the activation, and d h. Out: h, and in the place of gate and up their gradients (d z). */
struct packet_of_row {
  float gate[PACKET], up[PACKET], h[PACKET], d_h[PACKET];
};

template <int ACT, bool FAST> DEVICE void activate_packet(const activation_args &a, packet_of_row &p)
{
  const gate_bounds bounds = {a.gate_limit, a.act_limit, ACT == ACT_SWIGLU_OAI ? 1.f : 0.f};
#pragma unroll
  for (int i = 0; i < PACKET; i++) {
    if (!a.gated) {
      const activated v = activate<ACT, FAST>(a.act_alpha, p.gate[i]);
      p.h[i] = v.value;
      p.gate[i] = p.d_h[i] * v.slope;
      continue;
    }
    const gated_gradient d = gradient_of_gated<true>(p.gate[i], p.up[i], p.d_h[i], bounds,
                                                     [&](float g) { return activate<ACT, FAST>(a.act_alpha, g); });
    p.h[i] = d.h, p.gate[i] = d.gate, p.up[i] = d.up;
  }
}

template <bool FAST> DEVICE void activate_any(const activation_args &a, packet_of_row &p)
{
  switch (a.act) {
  case ACT_SILU: return activate_packet<ACT_SILU, FAST>(a, p);
  case ACT_SWIGLU_OAI: return activate_packet<ACT_SWIGLU_OAI, FAST>(a, p);
  case ACT_GELU_ERF: return activate_packet<ACT_GELU_ERF, FAST>(a, p);
  case ACT_GELU_TANH: return activate_packet<ACT_GELU_TANH, FAST>(a, p);
  case ACT_RELU: return activate_packet<ACT_RELU, FAST>(a, p);
  case ACT_RELU2: return activate_packet<ACT_RELU2, FAST>(a, p);
  default: return activate_packet<ACT_IDENTITY, FAST>(a, p);
  }
}

/* Gate and up i .. i + 7 of a row: halves one behind the other, or (PAIRS) by twos. */
template <class T> DEVICE void load_halves(const activation_args &a, const T *row, int i, packet_of_row &p)
{
  const bool up_first = a.gated && (a.order == UP_FIRST || a.order == UP_GATE_PAIRS);
  if (a.gated && a.order >= GATE_UP_PAIRS) {
    float first[PACKET], second[PACKET];
    load_f32<PACKET>(row + 2 * i, first);
    load_f32<PACKET>(row + 2 * i + PACKET, second);
#pragma unroll
    for (int j = 0; j < PACKET; j++) {
      const float *from = j < PACKET / 2 ? first + 2 * j : second + 2 * j - PACKET;
      p.gate[j] = up_first ? from[1] : from[0];
      p.up[j] = up_first ? from[0] : from[1];
    }
    return;
  }
  load_f32<PACKET>(row + (up_first ? a.inter : 0) + i, p.gate);
  if (a.gated) load_f32<PACKET>(row + (up_first ? 0 : a.inter) + i, p.up);
}

template <class T> DEVICE void store_halves(const activation_args &a, T *row, int i, const packet_of_row &p)
{
  const bool up_first = a.gated && (a.order == UP_FIRST || a.order == UP_GATE_PAIRS);
  if (a.gated && a.order >= GATE_UP_PAIRS) {
    float first[PACKET], second[PACKET];
#pragma unroll
    for (int j = 0; j < PACKET; j++) {
      float *to = j < PACKET / 2 ? first + 2 * j : second + 2 * j - PACKET;
      to[0] = up_first ? p.up[j] : p.gate[j];
      to[1] = up_first ? p.gate[j] : p.up[j];
    }
    store_f32<PACKET>(row + 2 * i, first);
    store_f32<PACKET>(row + 2 * i + PACKET, second);
    return;
  }
  store_f32<PACKET>(row + (up_first ? a.inter : 0) + i, p.gate);
  if (a.gated) store_f32<PACKET>(row + (up_first ? 0 : a.inter) + i, p.up);
}

/* Without d h (a.d_h NULL: the forward) it is 0. */
template <class T> DEVICE void load_packet(const activation_args &a, const T *z, const T *d_h, int i, packet_of_row &p)
{
  load_halves(a, z, i, p);
#pragma unroll
  for (int j = 0; j < PACKET; j++) p.d_h[j] = 0;
  if (a.d_h) load_f32<PACKET>(d_h + i, p.d_h);
}

/* Returns this lane's part of <d h, h>, with h as rounded to T. What is stored is h times the weight, if a.weighs_h. */
template <class T> DEVICE float activate_row(const activation_args &a, int64_t row, int64_t z_row, float weight)
{
  const int64_t wide = (a.gated ? 2 : 1) * (int64_t)a.inter;
  const T *z = static_cast<const T *>(a.z) + z_row * wide, *d_h = static_cast<const T *>(a.d_h) + row * a.inter;
  T *h = static_cast<T *>(a.h) + row * a.inter, *d_z = static_cast<T *>(a.d_z) + row * wide;
  const float of_z = a.weighs ? weight : 1.f, of_h = a.weighs_h ? weight : 1.f;
  float along = 0;
#pragma unroll 1
  for (int i = lane_id() * PACKET; i < a.inter; i += WARP_SIZE * PACKET) {
    packet_of_row p;
    float given[PACKET];
    load_packet(a, z, d_h, i, p);
#pragma unroll
    for (int j = 0; j < PACKET; j++) {
      given[j] = a.scale * p.d_h[j];
      p.d_h[j] = of_z * given[j];
    }
    activate_any<sizeof(T) == 2>(a, p);
#pragma unroll
    for (int j = 0; j < PACKET; j++) {
      along = fmaf(given[j], to_f32(from_f32<T>(p.h[j])), along);
      p.h[j] *= of_h;
    }
    store_f32<PACKET>(h + i, p.h);
    if (a.d_h) store_halves(a, d_z, i, p);
  }
  return along;
}

template <class T> DEVICE void clear_row(const activation_args &a, int64_t row)
{
  const int64_t wide = (a.gated ? 2 : 1) * (int64_t)a.inter;
  const float zeros[PACKET] = {};
  for (int i = lane_id() * PACKET; i < a.inter; i += WARP_SIZE * PACKET)
    store_f32<PACKET>(static_cast<T *>(a.h) + row * a.inter + i, zeros);
  for (int64_t i = lane_id() * PACKET; a.d_h && i < wide; i += WARP_SIZE * PACKET)
    store_f32<PACKET>(static_cast<T *>(a.d_z) + row * wide + i, zeros);
}

template <class T> DEVICE void activation_of_row(const activation_args &a, int64_t row)
{
  const int64_t pair = pair_kept(a.map, row), z_row = pair >= 0 && a.z_row ? a.z_row[pair] : row;
  const bool there = pair >= 0 && (!a.z_row || (z_row >= 0 && z_row < a.map.tokens.count * a.map.top_k));
  float along = 0;
  if (there)
    along = activate_row<T>(a, row, z_row, weight_of_pair(a.map, pair));
  else
    clear_row<T>(a, row);
  if (!a.along) return;
  along = warp_sum(along);
  if (lane_id() == 0) a.along[row] = (double)along;
}

template <int THREADS> DEVICE void any_activation(const activation_args &a)
{
  const int64_t row = (int64_t)blockIdx.x * (THREADS / WARP_SIZE) + warp_id();
  if (row >= end_of_rows(a.map)) return;
  if (a.dtype == DT_F32) return activation_of_row<f32>(a, row);
  if (a.dtype == DT_F16) return activation_of_row<f16>(a, row);
  activation_of_row<bf16>(a, row);
}

#endif
