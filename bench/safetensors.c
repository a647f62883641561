#include "safetensors.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../include/cumoe/types.h"

/* ---- JSON ------------------------------------------------------------------------------------------ */

/* Every skip_ function returns the first byte after what it names, or NULL if that is not there. */

enum { JSON_DEPTH = 64 };

static const char *skip_space(const char *p, const char *end)
{
  while (p < end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r')) p++;
  return p;
}

static bool at(const char *p, const char *end, char c)
{
  return p && p < end && *p == c;
}

static int hex_digit(char c)
{
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

static const char *skip_escape(const char *p, const char *end)
{
  if (++p >= end) return NULL;
  if (*p != 'u') return strchr("\"\\/bfnrt", *p) && *p ? p + 1 : NULL;
  for (int i = 0; i < 4; i++)
    if (++p >= end || hex_digit(*p) < 0) return NULL;
  return p + 1;
}

static const char *skip_string(const char *p, const char *end)
{
  if (!at(p, end, '"')) return NULL;
  p++;
  while (p && p < end && *p != '"') {
    if ((unsigned char)*p < 0x20) return NULL;
    p = *p == '\\' ? skip_escape(p, end) : p + 1;
  }
  return at(p, end, '"') ? p + 1 : NULL;
}

static const char *skip_digits(const char *p, const char *end)
{
  const char *first = p;
  while (p < end && *p >= '0' && *p <= '9') p++;
  return p > first ? p : NULL;
}

static const char *skip_number(const char *p, const char *end)
{
  if (at(p, end, '-')) p++;
  p = at(p, end, '0') ? p + 1 : skip_digits(p, end);
  if (at(p, end, '.')) p = skip_digits(p + 1, end);
  if (at(p, end, 'e') || at(p, end, 'E')) {
    p++;
    if (at(p, end, '+') || at(p, end, '-')) p++;
    p = skip_digits(p, end);
  }
  return p;
}

static const char *skip_word(const char *p, const char *end, const char *word)
{
  size_t length = strlen(word);
  return (size_t)(end - p) >= length && memcmp(p, word, length) == 0 ? p + length : NULL;
}

static const char *skip_value(const char *p, const char *end, int depth);

static const char *skip_container(const char *p, const char *end, int depth)
{
  bool object = *p == '{';
  char close = object ? '}' : ']';
  p = skip_space(p + 1, end);
  if (at(p, end, close)) return p + 1;
  for (;;) {
    if (object) {
      p = skip_string(p, end);
      if (!p) return NULL;
      p = skip_space(p, end);
      if (!at(p, end, ':')) return NULL;
      p = skip_space(p + 1, end);
    }
    p = skip_value(p, end, depth);
    if (!p) return NULL;
    p = skip_space(p, end);
    if (at(p, end, close)) return p + 1;
    if (!at(p, end, ',')) return NULL;
    p = skip_space(p + 1, end);
  }
}

static const char *skip_value(const char *p, const char *end, int depth)
{
  if (p >= end) return NULL;
  switch (*p) {
  case '{':
  case '[': return depth > 0 ? skip_container(p, end, depth - 1) : NULL;
  case '"': return skip_string(p, end);
  case 't': return skip_word(p, end, "true");
  case 'f': return skip_word(p, end, "false");
  case 'n': return skip_word(p, end, "null");
  default: return skip_number(p, end);
  }
}

json json_parse(const char *text, size_t bytes)
{
  const char *end = text + bytes;
  json value = {skip_space(text, end), NULL};
  value.end = skip_value(value.begin, end, JSON_DEPTH);
  if (value.end && skip_space(value.end, end) == end) return value;
  return (json){NULL, NULL};
}

bool json_next(json in, json *key, json *value)
{
  if (!in.begin || (*in.begin != '{' && *in.begin != '[')) return false;
  const char *p = skip_space(value->begin ? value->end : in.begin + 1, in.end);
  if (value->begin && at(p, in.end, ',')) p = skip_space(p + 1, in.end);
  if (p >= in.end || *p == '}' || *p == ']') return false;
  *key = (json){NULL, NULL};
  if (*in.begin == '{') {
    *key = (json){p, skip_string(p, in.end)};
    if (!key->end) return false;
    p = skip_space(key->end, in.end);
    if (!at(p, in.end, ':')) return false;
    p = skip_space(p + 1, in.end);
  }
  *value = (json){p, skip_value(p, in.end, JSON_DEPTH)};
  return value->end != NULL;
}

json json_find(json object, const char *key)
{
  json name, value = {NULL, NULL};
  char text[TENSOR_NAME];
  while (json_next(object, &name, &value))
    if (json_string(name, text, sizeof text) && strcmp(text, key) == 0) return value;
  return (json){NULL, NULL};
}

bool json_int(json value, int64_t *number)
{
  if (!value.begin || value.begin == value.end) return false;
  const char *p = value.begin;
  bool negative = *p == '-';
  int64_t n = 0;
  p += negative;
  if (p == value.end) return false;
  for (; p < value.end; p++) {
    if (*p < '0' || *p > '9' || n > (INT64_MAX - 9) / 10) return false;
    n = n * 10 + (*p - '0');
  }
  *number = negative ? -n : n;
  return true;
}

bool json_number(json value, double *number)
{
  char text[64];
  if (!value.begin || !(*value.begin == '-' || (*value.begin >= '0' && *value.begin <= '9'))) return false;
  size_t length = (size_t)(value.end - value.begin);
  if (length >= sizeof text) return false;
  memcpy(text, value.begin, length);
  text[length] = 0;
  *number = strtod(text, NULL);
  return true;
}

bool json_bool(json value, bool *truth)
{
  if (!value.begin || (*value.begin != 't' && *value.begin != 'f')) return false;
  *truth = *value.begin == 't';
  return true;
}

static uint32_t escape_code(const char *digits)
{
  uint32_t code = 0;
  for (int i = 0; i < 4; i++) code = code << 4 | (uint32_t)hex_digit(digits[i]);
  return code;
}

static size_t utf8_encode(uint32_t code, char out[4])
{
  if (code < 0x80) {
    out[0] = (char)code;
    return 1;
  }
  size_t tail = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  static const unsigned char lead[] = {0, 0xc0, 0xe0, 0xf0};
  out[0] = (char)(lead[tail] | code >> 6 * tail);
  for (size_t i = 1; i <= tail; i++) out[i] = (char)(0x80 | (code >> 6 * (tail - i) & 0x3f));
  return tail + 1;
}

/* One character of a string that skip_string has accepted: its bytes in out; *p moves past it. */
static size_t unescape(const char **p, const char *end, char out[4])
{
  const char *s = *p;
  if (*s != '\\') {
    out[0] = *s;
    *p = s + 1;
    return 1;
  }
  if (s[1] != 'u') {
    static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
    const char *found = strchr(from, s[1]);
    out[0] = found ? to[found - from] : s[1];
    *p = s + 2;
    return 1;
  }
  uint32_t code = escape_code(s + 2);
  *p = s + 6;
  if (code >= 0xd800 && code < 0xdc00 && end - *p >= 6 && s[6] == '\\' && s[7] == 'u') {
    uint32_t low = escape_code(s + 8);
    if (low >= 0xdc00 && low < 0xe000) {
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
      *p = s + 12;
    }
  }
  return utf8_encode(code, out);
}

bool json_string(json value, char *out, size_t out_bytes)
{
  if (!value.begin || *value.begin != '"') return false;
  const char *p = value.begin + 1, *end = value.end - 1;
  size_t length = 0;
  while (p < end) {
    char bytes[4];
    size_t n = unescape(&p, end, bytes);
    /* a NUL would cut the C string short and make two different names equal */
    if (length + n >= out_bytes || bytes[0] == 0) return false;
    memcpy(out + length, bytes, n);
    length += n;
  }
  if (out_bytes == 0) return false;
  out[length] = 0;
  return true;
}

/* ---- safetensors ----------------------------------------------------------------------------------- */

static bool say(char *error, size_t error_bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));

static bool say(char *error, size_t error_bytes, const char *format, ...)
{
  va_list list;
  va_start(list, format);
  vsnprintf(error, error_bytes, format, list);
  va_end(list);
  return false;
}

unsigned char *file_read(const char *path, size_t *size, char *error, size_t error_bytes)
{
  FILE *stream = fopen(path, "rb");
  if (!stream) {
    say(error, error_bytes, "%s: cannot be opened", path);
    return NULL;
  }
  long length = fseek(stream, 0, SEEK_END) == 0 ? ftell(stream) : -1;
  unsigned char *bytes = length >= 0 && length < LONG_MAX ? malloc((size_t)length + 1) : NULL;
  if (!bytes)
    say(error, error_bytes, "%s: no size, or no memory for %ld bytes", path, length);
  else if (fseek(stream, 0, SEEK_SET) != 0 || fread(bytes, 1, (size_t)length, stream) != (size_t)length) {
    say(error, error_bytes, "%s: cannot be read", path);
    free(bytes);
    bytes = NULL;
  } else {
    bytes[length] = 0;
    *size = (size_t)length;
  }
  fclose(stream);
  return bytes;
}

typedef struct type_name {
  const char *name;
  int32_t dtype;
  int64_t bytes;
} type_name;

static const type_name types[] = {
    {"F32", CUMOE_F32, 4}, {"BF16", CUMOE_BF16, 2},
    {"F16", CUMOE_F16, 2}, {"I32", CUMOE_I32, 4},
    {"I64", CUMOE_I64, 8}, {"U8", CUMOE_U8, 1},
    {"F64", 0, 8},         {"I8", CUMOE_I8, 1},
    {"I16", 0, 2},         {"U16", 0, 2},
    {"U32", 0, 4},         {"U64", 0, 8},
    {"BOOL", 0, 1},        {"F8_E4M3", CUMOE_E4M3, 1},
    {"F8_E5M2", 0, 1},     {"F8_E8M0", CUMOE_E8M0, 1},
    {"C64", 0, 8},
};

static const type_name *find_type(json name)
{
  char text[16];
  if (!json_string(name, text, sizeof text)) return NULL;
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
    if (strcmp(text, types[i].name) == 0) return &types[i];
  return NULL;
}

/* The shape, and its product where that stays below 2^48: no file is as large, and bytes cannot overflow. */
static bool read_shape(json shape, file_tensor *t)
{
  json key, value = {NULL, NULL};
  t->dims = 0;
  t->count = 1;
  if (!shape.begin || *shape.begin != '[') return false;
  while (json_next(shape, &key, &value)) {
    int64_t n;
    if (t->dims == TENSOR_DIMS || !json_int(value, &n) || n < 0 || n > INT64_C(1) << 48) return false;
    if (n > 0 && t->count > (INT64_C(1) << 48) / n) return false;
    t->shape[t->dims++] = n;
    t->count *= n;
  }
  return true;
}

static bool read_offsets(json offsets, int64_t *begin, int64_t *end)
{
  json key, value = {NULL, NULL};
  return offsets.begin && *offsets.begin == '[' && json_next(offsets, &key, &value) && json_int(value, begin) &&
         json_next(offsets, &key, &value) && json_int(value, end) && !json_next(offsets, &key, &value);
}

static bool read_tensor(json entry, const unsigned char *data, size_t data_bytes, file_tensor *t, char *error,
                        size_t error_bytes)
{
  const type_name *type = find_type(json_find(entry, "dtype"));
  int64_t begin, end;
  if (!type) return say(error, error_bytes, "tensor %s: unknown dtype", t->name);
  if (!read_shape(json_find(entry, "shape"), t)) return say(error, error_bytes, "tensor %s: bad shape", t->name);
  if (!read_offsets(json_find(entry, "data_offsets"), &begin, &end) || begin < 0 || end < begin ||
      (uint64_t)end > data_bytes)
    return say(error, error_bytes, "tensor %s: data_offsets outside the file", t->name);
  if (end - begin != t->count * type->bytes)
    return say(error, error_bytes, "tensor %s: data_offsets do not fit shape and dtype", t->name);
  t->dtype = type->dtype;
  t->bytes = (size_t)(end - begin);
  t->data = data + begin;
  return true;
}

static bool read_header(json header, const unsigned char *data, size_t data_bytes, safetensors *file, char *error,
                        size_t error_bytes)
{
  json key, value = {NULL, NULL};
  int32_t entries = 0;
  if (!header.begin || *header.begin != '{') return say(error, error_bytes, "the header is not a JSON object");
  while (json_next(header, &key, &value)) entries++;
  file->tensors = calloc((size_t)entries + 1, sizeof *file->tensors);
  if (!file->tensors) return say(error, error_bytes, "no memory for %d tensors", (int)entries);
  value = (json){NULL, NULL};
  while (json_next(header, &key, &value)) {
    file_tensor *t = &file->tensors[file->count];
    if (!json_string(key, t->name, sizeof t->name)) return say(error, error_bytes, "a tensor's name is too long");
    if (strcmp(t->name, "__metadata__") == 0) {
      file->metadata = value;
      continue;
    }
    if (safetensors_find(file, t->name)) return say(error, error_bytes, "tensor %s: twice", t->name);
    if (!read_tensor(value, data, data_bytes, t, error, error_bytes)) return false;
    file->count++;
  }
  return true;
}

bool safetensors_parse(const unsigned char *bytes, size_t size, safetensors *file, char *error, size_t error_bytes)
{
  *file = (safetensors){0};
  if (size < 8) return say(error, error_bytes, "%zu bytes are no safetensors file", size);
  uint64_t length = 0;
  for (int i = 7; i >= 0; i--) length = length << 8 | bytes[i];
  if (length > size - 8)
    return say(error, error_bytes, "the header of %llu bytes reaches past the end", (unsigned long long)length);
  json header = json_parse((const char *)bytes + 8, (size_t)length);
  const unsigned char *data = bytes + 8 + length;
  if (read_header(header, data, size - 8 - (size_t)length, file, error, error_bytes)) return true;
  safetensors_close(file);
  return false;
}

bool safetensors_open(const char *path, safetensors *file, char *error, size_t error_bytes)
{
  char why[256];
  size_t size;
  *file = (safetensors){0};
  unsigned char *bytes = file_read(path, &size, error, error_bytes);
  if (!bytes) return false;
  if (!safetensors_parse(bytes, size, file, why, sizeof why)) {
    free(bytes);
    return say(error, error_bytes, "%s: %s", path, why);
  }
  file->bytes = bytes;
  return true;
}

void safetensors_close(safetensors *file)
{
  free(file->tensors);
  free(file->bytes);
  *file = (safetensors){0};
}

const file_tensor *safetensors_find(const safetensors *file, const char *name)
{
  for (int32_t i = 0; i < file->count; i++)
    if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i];
  return NULL;
}

/* ---- numbers --------------------------------------------------------------------------------------- */

static float bits_float(uint32_t bits)
{
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

float bf16_float(uint16_t bits)
{
  return bits_float((uint32_t)bits << 16);
}

uint16_t float_bf16(float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float f16_float(uint16_t bits)
{
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (rest >= 0x7c00) return bits_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return bits_float(sign | ((rest << 13) + (112u << 23)));
  float subnormal = (float)rest * (1.f / 16777216.f);
  return sign ? -subnormal : subnormal;
}

bool file_floats(const file_tensor *from, int64_t first, int64_t count, float *out)
{
  if (first < 0 || count < 0 || first > from->count || count > from->count - first) return false;
  if (from->dtype == CUMOE_F32) {
    memcpy(out, from->data + first * 4, (size_t)count * 4);
    return true;
  }
  if (from->dtype != CUMOE_BF16 && from->dtype != CUMOE_F16) return false;
  for (int64_t i = 0; i < count; i++) {
    uint16_t bits;
    memcpy(&bits, from->data + (first + i) * 2, sizeof bits);
    out[i] = from->dtype == CUMOE_BF16 ? bf16_float(bits) : f16_float(bits);
  }
  return true;
}
