/* What kernels/device/ptx_sm90.cuh has, done by the CPU: see there. */
#ifndef CUMOE_PTX_SM90_CUH
#define CUMOE_PTX_SM90_CUH

#include "device/ptx.cuh"

#include "../../shim/tensor_map.h"

/* ---- mbarrier ---- */

DEVICE void mbarrier_init(uint64_t *barrier, uint32_t count)
{
  grid::require_aligned(barrier, 8);
  const grid::mbarrier begun = {0, (uint16_t)count, (uint16_t)count, 0};
  memcpy(barrier, &begun, sizeof begun);
}
DEVICE void fence_mbarrier_init() {}
DEVICE void mbarrier_arrive(uint64_t *barrier)
{
  grid::arrive(barrier, 1, 0);
}
template <class T> DEVICE T *of_cta(T *mine, uint32_t rank)
{
  return reinterpret_cast<T *>(grid::in_cluster(mine, rank));
}
DEVICE void mbarrier_arrive_cluster(uint64_t *barrier, uint32_t rank)
{
  grid::arrive(of_cta(barrier, rank), 1, 0);
}
DEVICE void st_shared_cluster(float *place, uint32_t rank, float value)
{
  *of_cta(place, rank) = value;
}
DEVICE void st_async_cluster(int32_t *place, uint32_t rank, int32_t value, uint64_t *barrier)
{
  grid::land_later([=] {
    *of_cta(place, rank) = value;
    grid::arrive(of_cta(barrier, rank), 0, -(int64_t)sizeof value);
  });
}
DEVICE void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes)
{
  grid::arrive(barrier, 1, bytes);
}
DEVICE void cp_async_mbarrier_arrive_noinc(uint64_t *barrier)
{
  grid::arrive_behind_copies(barrier);
}
DEVICE bool mbarrier_try_wait(uint64_t *barrier, uint32_t parity)
{
  grid::wait_for_phase(barrier, parity);
  return true;
}
DEVICE bool mbarrier_test_wait(uint64_t *barrier, uint32_t parity)
{
  grid::polled();
  return grid::barrier_at(barrier).phase != parity;
}

/* ---- bulk copies ---- */

DEVICE void cp_async_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *barrier)
{
  grid::require_aligned(shared, 16);
  grid::require_aligned(global, 16);
  if (bytes % 16) grid::fail("a bulk copy of no whole vectors");
  grid::land_later([=] {
    memcpy(shared, global, bytes);
    grid::arrive(barrier, 0, -(int64_t)bytes);
  });
}

/* Where the swizzle of `vectors` of 16 bytes puts what an address names. */
DEVICE uint32_t swizzled(uint32_t address, int vectors)
{
  return address ^ (address >> 7 & (uint32_t)(vectors - 1)) << 4;
}

/* An element of a box: in memory (NULL: outside of the tensor), and how far behind the box's first in shared memory. */
struct box_walk {
  shim_tensor_map map;
  int32_t first[5];
  int bytes, count; /* of an element; elements */

  box_walk(const void *tensor, const int32_t *at, int rank)
  {
    memcpy(&map, tensor, sizeof map);
    if (map.rank != rank) grid::fail("a tensor map of another rank");
    bytes = (int)map.stride[0], count = 1;
    for (int i = 0; i < rank; i++) first[i] = at[i], count *= map.box[i];
  }
  unsigned char *element(int index) const
  {
    uint64_t at = map.base;
    for (int i = 0; i < map.rank; i++) {
      const int64_t place = (int64_t)first[i] + index % map.box[i];
      if (place < 0 || place > map.last[i]) return nullptr;
      at += (uint64_t)place * map.stride[i];
      index /= map.box[i];
    }
    return reinterpret_cast<unsigned char *>(at);
  }
  unsigned char *place(unsigned char *shared, int index) const
  {
    return at_shared(swizzled(shared_address(shared) + (uint32_t)(index * bytes), map.swizzle));
  }
};

/* Lines of a box are whole or end inside: element by element only where that matters is not worth a second way. */
inline void land_box(const box_walk &box, unsigned char *shared)
{
  for (int i = 0; i < box.count; i++) {
    const unsigned char *from = box.element(i);
    if (from)
      memcpy(box.place(shared, i), from, (size_t)box.bytes);
    else
      memset(box.place(shared, i), 0, (size_t)box.bytes);
  }
}

template <int RANK>
void copy_box(void *to, const void *map, const int32_t (&at)[RANK], uint64_t *barrier, uint16_t ctas)
{
  unsigned char *shared = static_cast<unsigned char *>(to);
  grid::require_aligned(shared, 128);
  const box_walk box(map, at, RANK);
  grid::land_later([=] {
    land_box(box, shared);
    const int bytes = box.count * box.bytes;
    for (uint32_t rank = 0; rank < 16; rank++) {
      if (!(ctas >> rank & 1)) continue;
      if (rank != grid::cluster_rank()) memcpy(of_cta(shared, rank), shared, (size_t)bytes);
      grid::arrive(of_cta(barrier, rank), 0, -(int64_t)bytes);
    }
    if (!(ctas >> grid::cluster_rank() & 1)) grid::fail("a multicast that leaves out its own CTA");
  });
}

DEVICE uint16_t only_this_cta()
{
  return (uint16_t)(1u << grid::cluster_rank());
}
DEVICE void cp_async_bulk_tensor_2d(void *shared, const void *map, int32_t c0, int32_t c1, uint64_t *barrier)
{
  copy_box<2>(shared, map, {c0, c1}, barrier, only_this_cta());
}
DEVICE void cp_async_bulk_tensor_4d(void *shared, const void *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                                    uint64_t *barrier)
{
  copy_box<4>(shared, map, {c0, c1, c2, c3}, barrier, only_this_cta());
}
DEVICE void cp_async_bulk_tensor_5d(void *shared, const void *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                                    int32_t c4, uint64_t *barrier)
{
  copy_box<5>(shared, map, {c0, c1, c2, c3, c4}, barrier, only_this_cta());
}
DEVICE void cp_async_bulk_tensor_5d_multicast(void *shared, const void *map, int32_t c0, int32_t c1, int32_t c2,
                                              int32_t c3, int32_t c4, uint64_t *barrier, uint16_t ctas)
{
  copy_box<5>(shared, map, {c0, c1, c2, c3, c4}, barrier, ctas);
}
DEVICE void cp_async_bulk_tensor_4d_multicast(void *shared, const void *map, int32_t c0, int32_t c1, int32_t c2,
                                              int32_t c3, uint64_t *barrier, uint16_t ctas)
{
  copy_box<4>(shared, map, {c0, c1, c2, c3}, barrier, ctas);
}
DEVICE void cp_async_bulk_tensor_2d_multicast(void *shared, const void *map, int32_t c0, int32_t c1, uint64_t *barrier,
                                              uint16_t ctas)
{
  copy_box<2>(shared, map, {c0, c1}, barrier, ctas);
}

DEVICE void prefetch_l2(const void *from, uint32_t bytes)
{
  grid::require_aligned(from, 16);
  if (bytes % 16) grid::fail("a prefetch of no whole vectors");
}
DEVICE void prefetch_tensormap(const void *) {}
DEVICE void st_global_16(void *to, const uint4 &value, bool)
{
  st_global(to, value);
}
DEVICE void fence_proxy_async_shared() {}
DEVICE void fence_proxy_async_global() {}

/* ---- warps, clusters ---- */

DEVICE uint32_t cluster_ctarank()
{
  return grid::cluster_rank();
}
DEVICE bool elect_one()
{
  __syncwarp();
  return grid::lane() == (grid::late() ? 31 : 0);
}
DEVICE void barrier_cluster()
{
  grid::cluster_barrier();
}
template <int> DEVICE void setmaxnreg_dec() {}
template <int> DEVICE void setmaxnreg_inc() {}
DEVICE void bar_sync(int barrier, int threads)
{
  grid::named_barrier(barrier, threads);
}

struct stmatrix_lane {
  const uint32_t *r;
  uint32_t address;
};
template <bool TRANSPOSED> void stmatrix_of_warp(void **of_lane)
{
  const whole_warp<stmatrix_lane> lane(of_lane, "an stmatrix without all lanes");
  for (int l = 0; l < 32; l++) grid::require_aligned(at_shared(lane(l)->address), 16);
  for (int l = 0; l < 32; l++)
    for (int m = 0; m < 4; m++)
      for (int i = 0; i < 2; i++) {
        const int row = TRANSPOSED ? l % 4 * 2 + i : l / 4, column = TRANSPOSED ? l / 4 : l % 4 * 2 + i;
        const uint16_t value = (uint16_t)(lane(l)->r[m] >> 16 * i);
        memcpy(at_shared(lane(m * 8 + row)->address) + 2 * column, &value, 2);
      }
}
DEVICE void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4])
{
  stmatrix_lane mine = {r, address};
  grid::warp_together(ALL_LANES, &mine, stmatrix_of_warp<true>);
}

/* ---- wgmma: each warp by itself, at once or when it waits ---- */

template <int COUNT> DEVICE void hold(float (&)[COUNT]) {}
template <int COUNT> DEVICE void hold(int32_t (&)[COUNT]) {}
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit_group()
{
  grid::warp_together(ALL_LANES, &grid::dynamic_shared, [](void **) { grid::commit_group(true); });
}
template <int PENDING> DEVICE void wgmma_wait_group()
{
  grid::warp_together(ALL_LANES, &grid::dynamic_shared, [](void **) { grid::await_groups(PENDING, true); });
}

DEVICE uint64_t wgmma_operand(const void *shared, int each = 1)
{
  return (uint64_t)(shared_address(shared) >> 4 & 0x3fff) | 1ull << 16 | (uint64_t)(each * 1024 >> 4) << 32 |
         1ull << 62;
}

/* What a descriptor says of the 128-byte swizzle, and where element k of a row lies. */
template <int BYTES, bool N_MAJOR> struct wgmma_matrix {
  uint32_t start, leading, stride;

  wgmma_matrix(uint64_t descriptor)
      : start((uint32_t)(descriptor & 0x3fff) << 4), leading((uint32_t)(descriptor >> 16 & 0x3fff) << 4),
        stride((uint32_t)(descriptor >> 32 & 0x3fff) << 4)
  {
    if (descriptor >> 62 != 1) grid::fail("an operand of wgmma in another swizzle");
  }
  const unsigned char *at(int row, int k) const
  {
    const int line = N_MAJOR ? k : row, place = N_MAJOR ? row % (128 / BYTES) : k;
    const uint32_t further = N_MAJOR ? (uint32_t)(row / (128 / BYTES)) * leading : 0;
    return at_shared(
        swizzled(start + further + (uint32_t)(line / 8) * stride + (uint32_t)(line % 8 * 128 + place * BYTES), 8));
  }
};

/* What elements are added up as. */
template <class T> struct wgmma_element;
template <> struct wgmma_element<bf16> {
  static constexpr int BYTES = 2;
  static float of(const void *p)
  {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return __uint_as_float((uint32_t)bits << 16);
  }
};
template <> struct wgmma_element<f16> {
  static constexpr int BYTES = 2;
  static float of(const void *p)
  {
    _Float16 value;
    memcpy(&value, p, 2);
    return value;
  }
};
template <> struct wgmma_element<e4m3> {
  static constexpr int BYTES = 1;
  static float of(const void *p) { return of_e4m3(*static_cast<const uint8_t *>(p)); }
};
template <> struct wgmma_element<s8> {
  static constexpr int BYTES = 1;
  static int32_t of(const void *p) { return *static_cast<const int8_t *>(p); }
};
template <class T> using wgmma_sum = decltype(wgmma_element<T>::of(nullptr));

/* A lane's part. */
template <class D> struct wgmma_lane {
  D *d;
  const uint32_t *a; /* in registers; NULL: in shared memory */
  uint64_t a_at, b_at;
  bool add;
};

template <class T, int N, bool A_N_MAJOR, bool B_N_MAJOR> struct wgmma_of_warp {
  using element = wgmma_element<T>;
  using D = wgmma_sum<T>;
  static constexpr int K = 32 / element::BYTES;
  D *d[32];
  uint32_t a_registers[32][4];
  bool in_registers, add;
  uint64_t a_at, b_at;
  int warp;

  D a_of(int row, int k) const
  {
    if (!in_registers) return element::of(wgmma_matrix<element::BYTES, A_N_MAJOR>(a_at).at(warp % 4 * 16 + row, k));
    constexpr int EACH = 4 / element::BYTES; /* of a register */
    const uint32_t *r = a_registers[row % 8 * 4 + k / EACH % 4];
    return element::of(reinterpret_cast<const char *>(&r[row / 8 + k / (4 * EACH) * 2]) + k % EACH * element::BYTES);
  }

  void operator()() const
  {
    const wgmma_matrix<element::BYTES, B_N_MAJOR> from(b_at);
    D b[K][N], a[K], sum[N];
    for (int n = 0; n < N; n++)
      for (int k = 0; k < K; k++) b[k][n] = element::of(from.at(n, k));
    for (int row = 0; row < 16; row++) {
      for (int k = 0; k < K; k++) a[k] = a_of(row, k);
      const auto mine = [&](int n) -> D & { return d[row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row / 8 * 2 + n % 2]; };
      for (int n = 0; n < N; n++) sum[n] = add ? mine(n) : 0;
      for (int k = 0; k < K; k++)
        for (int n = 0; n < N; n++) sum[n] += a[k] * b[k][n];
      for (int n = 0; n < N; n++) mine(n) = sum[n];
    }
  }

  static void begin(void **of_lane)
  {
    wgmma_of_warp work;
    const whole_warp<wgmma_lane<D>> lane(of_lane, "a wgmma without all lanes");
    for (int l = 0; l < 32; l++) {
      if (lane(l)->a_at != lane(0)->a_at || lane(l)->b_at != lane(0)->b_at || lane(l)->add != lane(0)->add)
        grid::fail("lanes whose wgmma are different");
      work.d[l] = lane(l)->d;
      if (lane(l)->a) memcpy(work.a_registers[l], lane(l)->a, sizeof work.a_registers[l]);
    }
    work.in_registers = lane(0)->a != nullptr, work.add = lane(0)->add;
    work.a_at = lane(0)->a_at, work.b_at = lane(0)->b_at, work.warp = (int)threadIdx.x / 32;
    grid::group_later(work, true);
  }
};

template <class T, int N, bool A_N_MAJOR, bool B_N_MAJOR, int COUNT>
void wgmma(wgmma_sum<T> (&d)[COUNT], const uint32_t *registers, uint64_t a, uint64_t b, bool add)
{
  static_assert(COUNT >= N / 2, "sums of a thread");
  wgmma_lane<wgmma_sum<T>> mine = {d, registers, a, b, add};
  grid::warp_together(ALL_LANES, &mine, wgmma_of_warp<T, N, A_N_MAJOR, B_N_MAJOR>::begin);
}

template <class T, int N, bool N_MAJOR = false> struct wgmma_m64k16 {
  template <int COUNT> static DEVICE void run(float (&d)[COUNT], uint64_t a, uint64_t b, uint32_t add)
  {
    wgmma<T, N, N_MAJOR, false>(d, nullptr, a, b, add != 0);
  }
};
template <class T, int N> struct wgmma_m64k32 {
  template <int COUNT> static DEVICE void run(wgmma_sum<T> (&d)[COUNT], uint64_t a, uint64_t b, uint32_t add)
  {
    wgmma<T, N, false, false>(d, nullptr, a, b, add != 0);
  }
};

#endif
