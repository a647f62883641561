/* What kernels/device/ptx.cuh has, done by the CPU: see there. */
#ifndef CUMOE_PTX_CUH
#define CUMOE_PTX_CUH

#include "device/dtype.cuh"

#define DIFFERS_BY_ARCHITECTURE() (void)0

DEVICE void wait_for_earlier_grids_alone() {}
DEVICE void let_next_grid_start() {}
DEVICE void wait_for_earlier_grids() {}

/* ---- words that other CTAs write ---- */

template <class T> DEVICE T load_relaxed(const T *source)
{
  grid::require_aligned(source, sizeof(T));
  grid::polled();
  return *source;
}
DEVICE uint4 load_relaxed_vector(const void *source)
{
  grid::require_aligned(source, 16);
  grid::polled();
  return *static_cast<const uint4 *>(source);
}
template <class T> DEVICE void store_relaxed(T *target, T value)
{
  *target = value;
}
DEVICE int32_t load_acquire(const int32_t *source)
{
  grid::polled();
  return *source;
}
DEVICE void add_release(int32_t *target, int32_t value)
{
  *target += value;
}

/* ---- tensor cores ---- */

DEVICE uint32_t shared_address(const void *pointer)
{
  return (uint32_t)(static_cast<const unsigned char *>(pointer) - grid::dynamic_shared);
}
DEVICE unsigned char *at_shared(uint32_t address)
{
  return grid::dynamic_shared + (int32_t)address;
}

/* What all lanes of a warp have handed in. */
template <class LANE> struct whole_warp {
  void **of_lane;
  whole_warp(void **lanes, const char *missing) : of_lane(lanes)
  {
    for (int l = 0; l < 32; l++)
      if (!of_lane[l]) grid::fail(missing);
  }
  LANE *operator()(int l) const { return static_cast<LANE *>(of_lane[l]); }
};

/* Registers of a lane's part of d += a b; lanes of a quad have neighbouring columns of a, k of b, columns of d. */
template <class D> struct mma_lane {
  D *d;
  const uint32_t *a, *b;
};

/* PER elements a register; of(register, i): element i. */
template <int PER, class D, D (*OF)(uint32_t, int), D (*B_OF)(uint32_t, int) = OF> void mma_of_warp(void **of_lane)
{
  constexpr int K = 8 * PER;
  const whole_warp<mma_lane<D>> lane(of_lane, "an mma without all lanes");
  D a[16][K], b[K][8];
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 4; r++)
      for (int i = 0; i < PER; i++) a[l / 4 + r % 2 * 8][l % 4 * PER + r / 2 * (K / 2) + i] = OF(lane(l)->a[r], i);
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 2; r++)
      for (int i = 0; i < PER; i++) b[l % 4 * PER + r * (K / 2) + i][l / 4] = B_OF(lane(l)->b[r], i);
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 4; r++) {
      D sum = lane(l)->d[r];
      for (int k = 0; k < K; k++) sum += a[l / 4 + r / 2 * 8][k] * b[k][l % 4 * 2 + r % 2];
      lane(l)->d[r] = sum;
    }
}

template <class T> float element_of_pair(uint32_t pair, int i)
{
  const float2 both = unpack_pair<T>(pair);
  return i ? both.y : both.x;
}
inline int32_t element_of_four(uint32_t four, int i)
{
  return (int8_t)(four >> 8 * i);
}
inline int32_t unsigned_of_four(uint32_t four, int i)
{
  return (uint8_t)(four >> 8 * i);
}

template <class T> DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
  mma_lane<float> mine = {d, a, b};
  grid::warp_together(ALL_LANES, &mine, mma_of_warp<2, float, element_of_pair<T>>);
}
DEVICE void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
  mma_lane<int32_t> mine = {d, a, b};
  grid::warp_together(ALL_LANES, &mine, mma_of_warp<4, int32_t, element_of_four>);
}

struct ldmatrix_lane {
  uint32_t *r, address;
};
template <bool TRANSPOSED> void ldmatrix_of_warp(void **of_lane)
{
  const whole_warp<ldmatrix_lane> lane(of_lane, "an ldmatrix without all lanes");
  for (int l = 0; l < 32; l++) grid::require_aligned(at_shared(lane(l)->address), 16);
  for (int l = 0; l < 32; l++)
    for (int m = 0; m < 4; m++) {
      uint16_t of[2];
      for (int i = 0; i < 2; i++) {
        const int row = TRANSPOSED ? l % 4 * 2 + i : l / 4, column = TRANSPOSED ? l / 4 : l % 4 * 2 + i;
        memcpy(&of[i], at_shared(lane(m * 8 + row)->address) + 2 * column, 2);
      }
      lane(l)->r[m] = of[0] | (uint32_t)of[1] << 16;
    }
}
DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address)
{
  ldmatrix_lane mine = {r, address};
  grid::warp_together(ALL_LANES, &mine, ldmatrix_of_warp<false>);
}
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address)
{
  ldmatrix_lane mine = {r, address};
  grid::warp_together(ALL_LANES, &mine, ldmatrix_of_warp<true>);
}

/* ---- copies, loads, stores ---- */

DEVICE void cp_async_cg_16(uint32_t shared, const void *global, int bytes)
{
  grid::require_aligned(at_shared(shared), 16);
  grid::require_aligned(global, 16);
  grid::copy_later(at_shared(shared), global, bytes, 16);
}
DEVICE uint64_t evict_first_policy()
{
  return 0;
}
DEVICE void cp_async_cg_16(uint32_t shared, const void *global, int bytes, uint64_t)
{
  cp_async_cg_16(shared, global, bytes);
}
DEVICE void cp_async_ca_4(uint32_t shared, const void *global, int bytes)
{
  grid::require_aligned(at_shared(shared), 4);
  grid::require_aligned(global, 4);
  grid::copy_later(at_shared(shared), global, bytes, 4);
}
DEVICE void cp_async_commit_group()
{
  grid::commit_copies();
}
template <int PENDING> DEVICE void cp_async_wait_group()
{
  grid::await_copies(PENDING);
}
DEVICE void cp_async_wait_all()
{
  grid::await_copies(grid::ALL_COPIES);
}

DEVICE void st_global(void *global, uint4 v)
{
  grid::require_aligned(global, 16);
  memcpy(global, &v, 16);
}

DEVICE uint4 ld_global(const void *global, bool there)
{
  uint4 v = {0, 0, 0, 0};
  if (!there) return v;
  grid::require_aligned(global, 16);
  memcpy(&v, global, 16);
  return v;
}
DEVICE uint4 ld_global_nc_no_allocate(const void *global, bool there)
{
  return ld_global(global, there);
}
DEVICE uint4 ld_global_no_allocate(const void *global, bool there)
{
  return ld_global(global, there);
}

template <int BYTES> DEVICE uint32_t load_bits(const void *global, bool there)
{
  uint32_t v = 0;
  if (!there) return v;
  grid::require_aligned(global, BYTES);
  memcpy(&v, global, BYTES);
  return v;
}

/* What was discarded is not there any more. */
DEVICE void discard_l2(const void *line)
{
  grid::require_aligned(line, 128);
  memset(const_cast<void *>(line), 0xdd, 128);
}

/* ---- arithmetic ---- */

DEVICE float min_nan(float a, float b)
{
  return a != a || b != b ? NAN : fminf(a, b);
}
DEVICE float max_nan(float a, float b)
{
  return a != a || b != b ? NAN : fmaxf(a, b);
}
DEVICE uint32_t cvt_s8(float value)
{
  const float nearest = nearbyintf(value);
  return value != value ? 0 : (uint32_t)(int32_t)fminf(fmaxf(nearest, -128.f), 127.f) & 0xff;
}
DEVICE uint32_t cvt_e4m3(float value)
{
  const uint32_t bits = __float_as_uint(value), size = bits & 0x7fffffff;
  if (size > 0x7f800000) return 0x7f;
  const float kept = fminf(__uint_as_float(size), 448.f);
  const uint32_t k = __float_as_uint(kept);
  const uint32_t code = kept < 0x1p-6f ? __float_as_uint(kept + 0x1p14f) - 0x46800000
                                       : ((k + 0x7ffff + (k >> 20 & 1)) >> 20) - (120 << 3);
  return code | (bits >> 24 & 0x80);
}
DEVICE uint32_t cvt_e4m3x2(float low, float high)
{
  return cvt_e4m3(low) | cvt_e4m3(high) << 8;
}
DEVICE float of_e4m3(unsigned code)
{
  const int exponent = (int)(code >> 3 & 15), fraction = (int)(code & 7);
  const float size = (code & 127) == 127 ? NAN
                     : exponent          ? ldexpf((float)(8 + fraction), exponent - 10)
                                         : ldexpf((float)fraction, -9);
  return code & 128 ? -size : size;
}
DEVICE uint32_t cvt_f16x2_e4m3x2(uint32_t codes)
{
  return pack_pair<f16>(of_e4m3(codes & 255), of_e4m3(codes >> 8 & 255));
}
DEVICE float flushed(float x)
{
  return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x;
}
DEVICE float ex2_approx_ftz(float x)
{
  return flushed(exp2f(flushed(x)));
}
DEVICE float rcp_approx(float x)
{
  return 1 / x;
}
DEVICE float rcp_approx_ftz(float x)
{
  return flushed(1 / flushed(x));
}

/* ---- the compiler ---- */

DEVICE void hold(uint4 &) {}
DEVICE unsigned ctaid_x()
{
  return blockIdx.x;
}
DEVICE unsigned tid_x()
{
  return threadIdx.x;
}

DEVICE uint32_t max_halves(uint32_t a, uint32_t b)
{
  return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
}

#endif
