/* logits[t, e] = x[t] . w[e] + bias[e], summed in double. One unit is one token. */
#include "cpu.h"
#include "element.h"
#include "fault.h"

enum { K_BLOCK = 512, E_BLOCK = 256, LANES = 8 }; /* on the stack: 4 KiB each of x and w, 2 of sums */

static double dot(const double *a, const double *b)
{
  double sum[LANES] = {0}, total = 0;
  for (int k = 0; k < K_BLOCK; k += LANES)
    for (int i = 0; i < LANES; i++) sum[i] += a[k + i] * b[k + i];
  for (int i = 0; i < LANES; i++) total += sum[i];
  return total;
}

/* Fills the block up with zeros, so that dot has one length. */
static void load_block(double *dst, const void *base, int64_t first, int count, int dtype)
{
  load_run(dst, 1, base, first, 1, count, dense_format(dtype));
  for (int k = count; k < K_BLOCK; k++) dst[k] = 0;
}

static float round_logit(int dtype, float logit)
{
  if (dtype == DT_BF16) return bf16_to_float(float_to_bf16(logit));
  return dtype == DT_F16 ? f16_to_float(float_to_f16(logit)) : logit;
}

static void route_token(const router_args *a, int64_t token, int32_t first, int32_t end)
{
  double x[K_BLOCK], w[K_BLOCK], sum[E_BLOCK] = {0};
  for (int32_t k = 0; k < a->hidden; k += K_BLOCK) {
    int count = a->hidden - k < K_BLOCK ? a->hidden - k : K_BLOCK;
    load_block(x, a->x, token * a->x_ld + k, count, a->x_dtype);
    for (int32_t e = first; e < end; e++) {
      load_block(w, a->w, e * a->w_ld + k, count, a->w_dtype);
      sum[e - first] += dot(x, w);
    }
  }
  for (int32_t e = first; e < end; e++) {
    double bias = a->bias ? load_element(a->bias, e, a->bias_dtype) : 0;
    a->logits[token * a->logits_ld + e] = a->scale * round_logit(a->round_dtype, (float)(sum[e - first] + bias));
  }
}

void cpu_router(const void *args, int64_t begin, int64_t end)
{
  const router_args *a = args;
  int64_t tokens = tokens_present(a->tokens);
  for (int64_t token = begin; token < end && token < tokens; token++)
    for (int32_t e = 0; e < a->experts; e += E_BLOCK)
      route_token(a, token, e, a->experts - e < E_BLOCK ? a->experts : e + E_BLOCK);
}
