/*
 * Formats of weights by their definition, in double and by arithmetic: what a code is, which scale belongs to a weight,
 * what becomes of activations. Nothing here is the library's.
 */
#ifndef TEST_CODES_H
#define TEST_CODES_H

#include "test.h"

/* A projection on the host: E matrices below one another, [E * rows, cols], as the device has them without padding.
 * With a format: in units of storage, and what the format has besides; `data` NULL where it has not. */
typedef struct host_projection {
  tensor data, bias;  /* bias: [E, channels] */
  tensor scale, zero; /* [E * rows, blocks along in]; zero: words, or values like scales */
  tensor global;      /* [E, halves] or [E, 1] */
  tensor input_scale; /* [1, 1] or [E, 1] */
  tensor order;       /* [E, in] */
} host_projection;

/* Code of an element; e4m3 0x7f and 0xff are NaN. */
double element_value(int32_t element, unsigned code);
unsigned element_codes(int32_t element); /* how many there are */
double scale_value(int32_t dtype, unsigned bits);
unsigned e4m3_nearest(double value); /* of a number in range; scales are made with it */

int32_t format_code_bits(const cumoe_format *f); /* 8 or 4 */
int32_t format_storage(const cumoe_format *f);   /* dtype of an element of a view; of a format that is not dense */
int64_t format_unit(const cumoe_format *f);      /* codes it holds */
int64_t format_blocks(int32_t block, int32_t origin, int64_t count);
int64_t format_block(int32_t block, int32_t origin, int64_t at); /* of element `at` of an axis */
bool format_is_dense(const cumoe_format *f);
bool format_has_codes(const cumoe_format *f); /* of activations */

/* Where a channel lies: row of its expert's matrix, and of which shape that is. */
typedef struct channel_place {
  const host_projection *projection;
  const cumoe_format *format;
  int64_t expert, experts, channel; /* channel: of the projection's matrix */
  int64_t outs, ins;                /* of the matrix */
  int half, halves;                 /* gate 0, up 1; of how many in the matrix */
  bool interleaved;
} channel_place;

int64_t format_scale_rows(const cumoe_format *f, int64_t outs, int halves, bool interleaved);
unsigned code_get(const channel_place *at, int64_t in);
void code_set(const channel_place *at, int64_t in, unsigned code);
void scale_set(const channel_place *at, int64_t in, double value); /* E8M0, E4M3: the code */
void zero_set(const channel_place *at, int64_t in, unsigned code);
void value_set(const channel_place *at, int64_t in, double value);
/* weights[k] is what activation k is multiplied with. */
void decode_channel(const channel_place *at, double *weights);

/* Activations as codes: code * scale. `step`: the distance between neighbouring codes there, times the scale. */
typedef struct quantised {
  double value, step;
} quantised;
/* The scale of a group whose largest magnitude is `most`. */
float group_scale(const cumoe_format *f, float most, float static_scale);
quantised quantise(const cumoe_format *f, float x, float scale);

#endif
