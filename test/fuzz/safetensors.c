/* The tests' and the demo's reader of safetensors files, and the JSON reader below it. */
#include "fuzz.h"

#include "../../bench/safetensors.h"

#include <string.h>

static void walk(json value, int depth)
{
  json key = {0}, member = {0};
  char text[64];
  int64_t whole;
  double number;
  bool truth;
  (void)json_int(value, &whole);
  (void)json_number(value, &number);
  (void)json_bool(value, &truth);
  if (json_string(value, text, sizeof text)) PROMISE(memchr(text, 0, sizeof text), "a string has no end");
  for (int i = 0; depth < 4 && i < 8 && json_next(value, &key, &member); i++) walk(member, depth + 1);
}

static void read_all(const safetensors *file, const uint8_t *data, size_t size)
{
  float values[4];
  for (int32_t i = 0; i < file->count; i++) {
    const file_tensor *t = &file->tensors[i];
    PROMISE(t->data >= data && t->bytes <= size && t->data + t->bytes <= data + size, "%s lies outside the file",
            t->name);
    PROMISE(safetensors_find(file, t->name), "%s is not found", t->name);
    const int64_t some = t->count < 4 ? t->count : 4;
    (void)file_floats(t, t->count - some, some, values);
    PROMISE(!file_floats(t, t->count, 1, values), "%s can be read past its end", t->name);
  }
  walk(file->metadata, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  safetensors file;
  char error[256] = "";
  walk(json_parse((const char *)data, size), 0);
  if (safetensors_parse(data, size, &file, error, sizeof error))
    read_all(&file, data, size);
  else
    PROMISE(error[0], "refused without a text");
  safetensors_close(&file);
  return 0;
}
