/* What weights.c has of a description: checked, and in normal form. */
#ifndef CUMOE_HOST_WEIGHTS_DESC_H
#define CUMOE_HOST_WEIGHTS_DESC_H

#include "format.h"
#include "weights.h"

static inline cumoe_array data_of(const cumoe_projection *p)
{
  return (cumoe_array){p->data, p->per_expert, p->expert_stride};
}

static inline int64_t expert_stride_of(const cumoe_array *a)
{
  return a->expert_stride ? a->expert_stride : a->data.rows * a->data.ld;
}

static inline const void *bytes_at(const void *base, int64_t bytes)
{
  return base ? (const char *)base + bytes : NULL;
}

bool array_absent(const cumoe_array *a);

/* A stack [experts * rows, cols] becomes expert 0's matrix; the packed stride is the default. */
void unstack_all(cumoe_weights_desc *desc);

/* After that. `dtype`: of the activations. */
cumoe_status check_weights_desc(struct context *context, const cumoe_weights_desc *desc, int32_t *dtype);

/* Where one half (gate or up) of a projection lies: its channel 0 is channel `first` of the projection's. */
typedef struct half {
  const cumoe_projection *projection;
  int64_t first;
} half;

/* A projection of one half or two. */
typedef struct halves {
  half of[2];
  int count;
  int64_t channels; /* of a half */
  int32_t step;     /* channels of memory from one of a half to its next: 2 interleaved */
  bool concatenated;
  int32_t major;
  const cumoe_format *format;
  weight_format class;
} halves;

/* In the order gate, up. */
halves halves_of_up(const cumoe_weights_desc *desc, int32_t dtype);
halves halves_of_down(const cumoe_weights_desc *desc, int32_t dtype);

/* Without pointer tables. */
expert_matrix normal_form(const halves *h);

/* Bytes from where an expert's codes, scales or zero points begin to a half's. */
int64_t code_offset(const halves *h, int half);
int64_t scale_offset(const halves *h, int half);
int64_t zero_offset(const halves *h, int half);

#endif
