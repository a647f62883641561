/* Inputs that change a struct: 4 bytes a change, offset (two bytes), kind, value. */
#ifndef CHANGE_H
#define CHANGE_H

#include "fuzz.h"

#include <string.h>

typedef struct input {
  const uint8_t *at, *end;
} input;

static inline uint8_t next_byte(input *in)
{
  return in->at < in->end ? *in->at++ : 0;
}

/* Changes the struct as the rest of the input says. */
static inline void change(input *in, void *object, size_t size)
{
  static const int64_t words[] = {0,         1,          -1,         2,          3,         4,         7,
                                  8,         16,         24,         32,         1023,      1024,      1025,
                                  INT32_MAX, INT32_MIN,  INT64_MAX,  INT64_MIN,  1ll << 31, 1ll << 32, 1ll << 46,
                                  1ll << 62, 0x7f800000, 0x7fc00000, 0xbf800000, 0x10001,   0x10100,   0x10302,
                                  0x10700,   5,          6,          48};
  unsigned char *bytes = object;
  while (in->at < in->end) {
    size_t at = next_byte(in);
    at = (at | (size_t)next_byte(in) << 8) % size;
    const uint8_t kind = next_byte(in), value = next_byte(in);
    const int64_t word = words[value % (sizeof words / sizeof *words)];
    const size_t width = kind % 4 == 0 ? 1 : kind % 2 ? 4 : 8;
    int64_t now = 0;
    at -= at % width;
    if (at + width > size) continue;
    memcpy(&now, bytes + at, width);
    now = kind % 4 == 0  ? now ^ value
          : kind % 8 < 4 ? word
                         : (int64_t)((uint64_t)now + (uint64_t)(int64_t)(int8_t)value);
    memcpy(bytes + at, &now, width);
  }
}

#endif
