/*
 * A read-only safetensors reader and the small JSON reader it needs, for tests and the demo. Files are input
 * from outside: every length and offset is checked, a bad file is an error text and never a crash.
 */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- JSON: values are spans of the text; nothing is built ---- */

/* One value with its quotes or brackets; begin NULL: absent. Every function takes an absent value and says
 * no. */
typedef struct json {
  const char *begin, *end;
} json;

/* The text as one value: strict grammar, at most 64 levels deep. Absent if it is anything else. */
json json_parse(const char *text, size_t bytes);

/* The member of an object; absent if there is none. */
json json_find(json object, const char *key);

/* Walks an object or an array: start with *value = {0}. key is absent in an array. */
bool json_next(json in, json *key, json *value);

bool json_int(json value, int64_t *number); /* only a whole number that fits */
bool json_number(json value, double *number);
bool json_bool(json value, bool *truth);

/* Unescapes a string into out, NUL-terminated. False if it is no string or does not fit. */
bool json_string(json value, char *out, size_t out_bytes);

/* ---- safetensors ---- */

enum { TENSOR_DIMS = 8, TENSOR_NAME = 128 };

typedef struct file_tensor {
  char name[TENSOR_NAME];
  int32_t dtype; /* cumoe_dtype; 0: a type cumoe does not have */
  int32_t dims;
  int64_t shape[TENSOR_DIMS];
  int64_t count; /* elements */
  size_t bytes;
  const unsigned char *data; /* not necessarily aligned */
} file_tensor;

typedef struct safetensors {
  unsigned char *bytes; /* the whole file */
  file_tensor *tensors;
  int32_t count;
  json metadata; /* __metadata__, or absent */
} safetensors;

/* False with a text in error. close is then allowed and does nothing. */
bool safetensors_open(const char *path, safetensors *file, char *error, size_t error_bytes);

/* The same from memory, which stays the caller's and must outlive the file. */
bool safetensors_parse(const unsigned char *bytes, size_t size, safetensors *file, char *error, size_t error_bytes);

void safetensors_close(safetensors *file);

/* NULL if there is none. */
const file_tensor *safetensors_find(const safetensors *file, const char *name);

/* The whole of a file, NUL-terminated; to be freed. NULL with a text in error. */
unsigned char *file_read(const char *path, size_t *size, char *error, size_t error_bytes);

/* Elements first .. first + count - 1 of an F32, BF16 or F16 tensor as f32 (exact). False for another type or
 * range. */
bool file_floats(const file_tensor *from, int64_t first, int64_t count, float *out);

float bf16_float(uint16_t bits);
uint16_t float_bf16(float value); /* to nearest, ties to even; NaN stays NaN */

#endif
