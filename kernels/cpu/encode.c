/* Weights become codes with scales; kernels/encode.h is the definition. */
#include "cpu.h"
#include "../encode.h"

static float weight_at(const encode_args *a, const encode_block *b, int32_t n, int32_t k)
{
  return load_element(a->w, ((int64_t)b->e * a->out + n) * a->w_ld + k, a->dtype);
}

/* Of channels n, n + step, ... before n_end. */
static extremes extremes_of(const encode_args *a, const encode_block *b, int32_t n, int32_t n_end, int32_t step)
{
  extremes e = extremes_none();
  for (; n < n_end; n += step)
    for (int32_t k = b->k; k < b->k_end; k++) extremes_add(&e, weight_at(a, b, n, k));
  return e;
}

static void store_code(const encode_args *a, int64_t row, int32_t k, uint8_t code)
{
  uint8_t *codes = (uint8_t *)a->codes + row * a->codes_ld;
  if (format_bits((weight_format)a->format) == 8)
    codes[k] = code;
  else
    codes[k / 2] = (uint8_t)(k % 2 ? codes[k / 2] | code << 4 : code);
}

/* Channels n .. n_end - 1 have one scale; returns their zero point. */
static int32_t encode_channels(const encode_args *a, const encode_block *b, int32_t n, int32_t n_end)
{
  const float global = a->global ? a->global[b->e * a->global_ld + encode_half(a, n)] : 1;
  extremes e = extremes_none();
  float scale;
  if (ENCODE_SCALES_FIRST(a)) {
    scale = encode_read_scale(a, b);
  } else {
    e = extremes_of(a, b, n, n_end, 1);
    const stored_scale s = encode_scale(a, e, global);
    encode_store_scale(a, b, encode_scale_row(a, b->e, n), s);
    scale = s.value;
  }
  const float factor = encode_factor(a, scale, global);
  const int32_t zero = encode_zero(a, e, factor);
  for (; n < n_end; n++)
    for (int32_t k = b->k; k < b->k_end; k++)
      store_code(a, (int64_t)b->e * a->out + n, k, encode_weight(a->format, weight_at(a, b, n, k), factor, zero));
  return zero;
}

void cpu_encode_scales(const void *args, int64_t begin, int64_t end)
{
  const encode_args *a = args;
  for (int64_t task = begin; task < end; task++) {
    int32_t step;
    const encode_block b = encode_scales_task(a, task, &step);
    if (b.n >= b.n_end) continue;
    encode_store_scales(a, &b, extremes_of(a, &b, b.n, b.n_end, step));
  }
}

void cpu_encode(const void *args, int64_t begin, int64_t end)
{
  const encode_args *a = args;
  for (int64_t task = begin; task < end; task++) {
    const encode_block b = encode_task(a, task);
    uint32_t zeros = 0;
    if (b.n >= b.n_end) continue;
    if (!a->zero) {
      (void)encode_channels(a, &b, b.n, b.n_end);
      continue;
    }
    for (int32_t n = b.n; n < b.n_end; n++)
      zeros |= (uint32_t)(encode_channels(a, &b, n, n + 1) - a->offset - a->zero_add) << n % 8 * 4;
    a->zero[((int64_t)b.e * ((a->out + 7) / 8) + b.n / 8) * a->zero_ld + b.block] = zeros;
  }
}
