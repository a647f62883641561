/*
 * Codes of 4 bits as bytes that mma takes. A word of eight codes becomes PARTS times two words of four signed bytes,
 * parts whose sum is UNIT times the values:
 *
 *   u4    16 times a code less 8, of even codes and of odd ones
 *   mx4   twice a value, of codes in their order: less its size, and twice its size where there is no sign. PRMT
 *         looks a nibble's lower three bits up in eight bytes, and where its upper bit is set spreads the upper bit of
 *         what it finds, which here is 0. Products of both parts go into the same sums.
 */
#ifndef CUMOE_CODE_BYTES_CUH
#define CUMOE_CODE_BYTES_CUH

#include "device/ptx_narrow_sm90.cuh"

/* A constant that stays in a register of its own: PRMT takes one constant as it is, but for a second one, or one that
 * is known to be the same in all lanes, there would be a move each time. */
DEVICE uint32_t kept_in_register(uint32_t value)
{
  uint32_t kept;
  asm volatile("shfl.sync.idx.b32 %0, %1, 0, 31, -1;" : "=r"(kept) : "r"(value));
  return kept;
}

template <class W> struct code_bytes;

template <> struct code_bytes<u4> {
  static constexpr int PARTS = 1;
  static constexpr bool IN_ORDER = false;
  static constexpr float UNIT = 16.f;

  DEVICE void make(uint32_t codes, uint32_t (&bytes)[1][2]) const
  {
    bytes[0][0] = (codes << 4 ^ 0x80808080) & 0xf0f0f0f0;
    bytes[0][1] = (codes ^ 0x80808080) & 0xf0f0f0f0;
  }
};

template <> struct code_bytes<mx4> {
  static constexpr int PARTS = 2;
  static constexpr bool IN_ORDER = true;
  static constexpr float UNIT = 2.f;
  const uint32_t less[2] = {kept_in_register(0xfdfeff00), kept_in_register(0xf4f8fafc)},
                 twice[2] = {kept_in_register(0x06040200), kept_in_register(0x18100c08)};

  DEVICE void make(uint32_t codes, uint32_t (&bytes)[2][2]) const
  {
    const uint32_t sizes = codes & 0x77777777;
    bytes[0][0] = table_bytes(less[0], less[1], sizes);
    bytes[0][1] = table_bytes(less[0], less[1], sizes >> 16);
    bytes[1][0] = table_bytes(twice[0], twice[1], codes);
    bytes[1][1] = table_bytes(twice[0], twice[1], codes >> 16);
  }
};

#endif
