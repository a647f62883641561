/*
 * Codes of 4 bits as bytes that mma takes. A word of eight codes becomes PARTS times two words of four signed bytes,
 * parts whose sum is UNIT times the values:
 *
 *   u4    16 times a code less 8, of even codes and of odd ones
 *   mx4   twice a value, of codes in their order: less its size, and twice its size where there is no sign. PRMT looks a
 *         nibble's lower three bits up in eight bytes, and where its upper bit is set spreads the upper bit of what it
 *         finds, which here is 0. Products of both parts go into the same sums.
 */
#ifndef CUMOE_CODE_BYTES_CUH
#define CUMOE_CODE_BYTES_CUH

#include "device/dtype.cuh"

template <class W> struct code_bytes;

template <> struct code_bytes<u4> {
  static constexpr int PARTS = 1;
  static constexpr bool IN_ORDER = false;
  static constexpr float UNIT = 16.f;

  DEVICE static void make(uint32_t codes, uint32_t (&bytes)[1][2])
  {
    bytes[0][0] = (codes << 4 ^ 0x80808080) & 0xf0f0f0f0;
    bytes[0][1] = (codes ^ 0x80808080) & 0xf0f0f0f0;
  }
};

template <> struct code_bytes<mx4> {
  static constexpr int PARTS = 2;
  static constexpr bool IN_ORDER = true;
  static constexpr float UNIT = 2.f;

  DEVICE static void make(uint32_t codes, uint32_t (&bytes)[2][2])
  {
    constexpr uint32_t LESS[2] = {0xfdfeff00, 0xf4f8fafc}, TWICE[2] = {0x06040200, 0x18100c08};
    const uint32_t sizes = codes & 0x77777777;
    bytes[0][0] = __byte_perm(LESS[0], LESS[1], sizes);
    bytes[0][1] = __byte_perm(LESS[0], LESS[1], sizes >> 16);
    bytes[1][0] = __byte_perm(TWICE[0], TWICE[1], codes);
    bytes[1][1] = __byte_perm(TWICE[0], TWICE[1], codes >> 16);
  }
};

#endif
