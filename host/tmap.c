/* See tmap.h. */
#include "tmap.h"

#include <stddef.h>
#include <cuda.h>

typedef CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                 const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

_Static_assert(sizeof(CUtensorMap) == sizeof((gemm_sm90_args *)NULL)->weights, "kernels/args.h holds tensor maps");

enum { MAX_RANK = 5 };

/* A tensor from the innermost dimension on; stride[0] is not asked: elements are neighbours. Strides in elements. */
typedef struct tensor {
  const void *base;
  uint32_t rank;
  uint64_t size[MAX_RANK];
  int64_t stride[MAX_RANK];
  uint32_t box[MAX_RANK];
  bool lines; /* L2 fetches them one by one, else by twos */
} tensor;

/* Elements of a tensor map's element. */
static uint32_t unit_of(weight_format format)
{
  return format_bits(format) < 8 ? 8 / (uint32_t)format_bits(format) : 1;
}

/* FORMAT_none: the driver refuses it. */
static CUtensorMapDataType map_type(weight_format format)
{
  switch (format) {
  case FORMAT_f16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  case FORMAT_bf16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  case FORMAT_f32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  case FORMAT_e4m3:
  case FORMAT_s8:
  case FORMAT_af4:
  case FORMAT_u4: /* those of 4 bits: codes of a byte at a time */
  case FORMAT_mx4:
  case FORMAT_nv4: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  case FORMAT_none: break;
  }
  return (CUtensorMapDataType)-1;
}

/* A box is swizzled lines of 128 bytes, or of 64. */
static bool encode(void (*encoder)(void), weight_format format, const tensor *t, void *map)
{
  cuuint64_t size[MAX_RANK], bytes[MAX_RANK];
  cuuint32_t box[MAX_RANK], steps[MAX_RANK] = {1, 1, 1, 1, 1};
  for (uint32_t i = 0; i < t->rank; ++i) size[i] = t->size[i], box[i] = t->box[i];
  size[0] /= unit_of(format), box[0] /= unit_of(format);
  for (uint32_t i = 1; i < t->rank; ++i) bytes[i - 1] = (cuuint64_t)format_bytes(format, t->stride[i]);
  const CUtensorMapSwizzle swizzle =
      format_bytes(format, t->box[0]) == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  return ((encode_tiled)encoder)(map, map_type(format), t->rank, (void *)(uintptr_t)t->base, size, bytes, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 t->lines ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Distance from the half that lies first to the other, in bytes. */
static int64_t half_distance(const expert_matrix *b)
{
  const int64_t distance = (int64_t)((intptr_t)b->base[1] - (intptr_t)b->base[0]);
  return distance < 0 ? -distance : distance;
}

static bool stride_fits(int64_t bytes)
{
  return bytes > 0 && bytes % 16 == 0 && bytes < (int64_t)1 << 40;
}

/* The half that lies first. */
static const void *first_half(const expert_matrix *b, bool gated)
{
  return b->base[gated && (uintptr_t)b->base[1] < (uintptr_t)b->base[0] ? 1 : 0];
}

/* Gate and up of N-major weights lie element by element. */
static bool in_pairs(const expert_matrix *b)
{
  return b->k_stride != 1 && b->n_stride == 2;
}

bool tmap_serves(const expert_matrix *b, int32_t n, int32_t experts, bool gated)
{
  const weight_format f = (weight_format)b->format;
  const int64_t row = b->k_stride == 1 ? b->n_stride : b->k_stride; /* of memory */
  if (b->k_stride != 1 && b->n_stride != 1 && !(gated && b->n_stride == 2)) return false;
  if (b->table[0] || b->table[1] || n % 8 || (intptr_t)first_half(b, gated) % 16) return false;
  if (!stride_fits(format_bytes(f, row * 8)) || !stride_fits(format_bytes(f, row))) return false;
  if (experts > 1 && !stride_fits(format_bytes(f, b->expert_stride))) return false;
  return !gated || in_pairs(b) || stride_fits(half_distance(b));
}

/* Elements of a swizzled line. */
static uint32_t line_of(weight_format format)
{
  return (uint32_t)(WGMMA_BK * 16 / format_bits(format));
}

/* What rows of A are. */
static weight_format rows_of(const gemm_args *g)
{
  if (!g->a_scale) return dense_format(g->dtype);
  return g->rows.element == DT_I8 ? FORMAT_s8 : FORMAT_e4m3;
}

/* (k, 8 channels, half, channel / 8, expert) */
static tensor k_major(const gemm_args *g, const variant *v)
{
  const bool up = v->op == OP_up || v->op == OP_up_keep;
  const int32_t columns = (up ? 2 * v->bn : v->bn) / v->cluster; /* weight rows that a CTA loads for all */
  const uint32_t halves = g->gated ? 2 : 1;
  const weight_format format = (weight_format)g->b.format;
  const int64_t half = g->gated ? half_distance(&g->b) * 8 / format_bits(format) : 8 * g->b.n_stride;
  return (tensor){
      .base = first_half(&g->b, g->gated),
      .rank = 5,
      .size = {(uint64_t)g->k, 8, halves, (uint64_t)g->n / 8, (uint64_t)g->experts},
      .stride = {1, g->b.n_stride, half, 8 * g->b.n_stride, g->experts > 1 ? g->b.expert_stride : 8 * g->b.n_stride},
      .box = {(uint32_t)v->bk, 8, halves, (uint32_t)columns / 8 / halves, 1},
  };
}

/* (channel, or gate and up of each in turn; k; half; expert) */
static tensor n_major(const gemm_args *g)
{
  const bool pairs = g->gated && in_pairs(&g->b), apart = g->gated && !pairs;
  const weight_format format = (weight_format)g->b.format;
  const int64_t all = g->k * g->b.k_stride; /* for dimensions of one */
  return (tensor){
      .base = first_half(&g->b, g->gated),
      .rank = 4,
      .size = {(uint64_t)g->n * (pairs ? 2 : 1), (uint64_t)g->k, apart ? 2 : 1, (uint64_t)g->experts},
      .stride = {1, g->b.k_stride, apart ? half_distance(&g->b) * 8 / format_bits(format) : all,
                 g->experts > 1 ? g->b.expert_stride : all},
      .box = {line_of(format), WGMMA_BK, 1, 1},
      .lines = true,
  };
}

bool tmap_encode(void (*encoder)(void), const variant *v, gemm_sm90_args *args)
{
  const gemm_args *g = &args->g;
  const weight_format format = (weight_format)g->b.format;
  const tensor weights = v->major == MAJOR_N ? n_major(g) : k_major(g, v);
  args->up_first = weights.base != g->b.base[0];
  if (!encode(encoder, format, &weights, args->weights)) return false;
  if (g->row_pair && !g->packed && !g->protocol.x_copy) return unit_of(format) == 1;
  const weight_format rows = rows_of(g);
  const tensor a = {
      .base = g->protocol.x_copy ? g->protocol.x_copy : g->a,
      .rank = 2,
      .size = {(uint64_t)g->k, (uint64_t)g->rows_cap},
      .stride = {1, g->protocol.x_copy || g->rows_cap == 1 ? g->k : g->a_ld}, /* of one row any ld passes the checks */
      .box = {line_of(rows), ROWS_OF_BOX(format_bits(rows))},
  };
  return encode(encoder, rows, &a, args->rows);
}

bool tmap_encode_activated(void (*encoder)(void), const variant *v, down_activated_args *args)
{
  const gemm_sm90_args *gemm = &args->gemm;
  const char *gate = gemm->z[0], *up = gemm->z[1];
  const tensor z = {
      .base = gate < up ? gate : up,
      .rank = 2,
      .size = {(uint64_t)gemm->z_ld, (uint64_t)args->z_rows},
      .stride = {1, gemm->z_ld},
      .box = {KEPT_WIDE, KEPT_TOKENS},
  };
  return encode(encoder, dense_format(gemm->g.dtype), &z, args->kept) && tmap_encode(encoder, v, &args->gemm);
}

bool tmap_encode_few(void (*encoder)(void), few_sm90_args *args)
{
  const gemm_args *up = &args->f.up, *down = &args->f.down;
  const tensor u = n_major(up), d = n_major(down);
  args->up_first = u.base != up->b.base[0];
  return encode(encoder, (weight_format)up->b.format, &u, args->up) &&
         encode(encoder, (weight_format)down->b.format, &d, args->down);
}

static bool matrix_serves(const void *base, int64_t ld, weight_format format)
{
  return (intptr_t)base % 16 == 0 && stride_fits(format_bytes(format, ld));
}

bool tmap_serves_router(const router_args *a)
{
  const weight_format x = dense_format(a->x_dtype), w = dense_format(a->w_dtype);
  return x == w && format_bits(x) == 16 && matrix_serves(a->x, a->x_ld, x) && matrix_serves(a->w, a->w_ld, w);
}

bool tmap_serves_views(const cumoe_view *x, const cumoe_view *w)
{
  const router_args a = {
      .x = x->data, .w = w->data, .x_ld = x->ld, .w_ld = w->ld, .x_dtype = x->dtype, .w_dtype = w->dtype};
  return tmap_serves_router(&a);
}

bool tmap_encode_router(void (*encoder)(void), const variant *v, router_sm90_args *args)
{
  const router_args *r = &args->r;
  args->columns = r->experts < v->bn ? (r->experts + 15) / 16 * 16 : v->bn;
  const tensor x = {
      .base = r->x,
      .rank = 2,
      .size = {(uint64_t)r->hidden, (uint64_t)r->tokens.count},
      .stride = {1, r->x_ld},
      .box = {WGMMA_BK, (uint32_t)v->bm},
  };
  const tensor w = {
      .base = r->w,
      .rank = 2,
      .size = {(uint64_t)r->hidden, (uint64_t)r->experts},
      .stride = {1, r->w_ld},
      .box = {WGMMA_BK, (uint32_t)(args->columns / v->cluster)},
  };
  return encode(encoder, dense_format(r->x_dtype), &x, args->x) &&
         encode(encoder, dense_format(r->w_dtype), &w, args->w);
}

/* ---- gradients of weights ---- */

/* Rows of d in memory, and what they consist of. */
typedef struct gradient_rows {
  int64_t ld;
  int32_t rows, columns;
  bool across; /* columns are outputs */
} gradient_rows;

static gradient_rows rows_of_gradient(const weight_gradient_args *g)
{
  if (g->d.k_stride == 1) return (gradient_rows){g->d.n_stride, g->n, g->k, false};
  return (gradient_rows){g->d.k_stride, g->k, g->n, true};
}

/* Of tokens: what is gathered by vectors, from rows whose distance the kernel has in 32 bits. */
static bool operand_serves(const row_matrix *m)
{
  const weight_format format = dense_format(m->dtype);
  const bool gathered = m->form == OF_TOKEN && m->ld <= INT32_MAX;
  return (m->form == OF_ROW || gathered) && format_bits(format) == 16 && matrix_serves(m->base, m->ld, format);
}

static bool units_fit(const weight_gradient_args *g)
{
  const int64_t most = (int64_t)g->map.experts * 2 * ((g->n + 63) / 64);
  return most * ((g->k + 63) / 64) < INT32_MAX;
}

bool tmap_serves_gradient(const weight_gradient_args *g)
{
  const weight_format format = dense_format(g->d_dtype);
  const gradient_rows d = rows_of_gradient(g);
  const bool gated = g->halves == 2;
  if (!g->padded || g->weighs != WEIGHS_NONE || g->a_n != 1 || !units_fit(g)) return false;
  if (!operand_serves(&g->a) || !operand_serves(&g->b)) return false;
  if (g->d.table[0] || g->d.table[1] || (g->d.k_stride != 1 && g->d.n_stride != 1)) return false;
  if (!matrix_serves(first_half(&g->d, gated), d.ld, format)) return false;
  if (gated && !stride_fits(half_distance(&g->d))) return false;
  return g->map.experts == 1 || stride_fits(format_bytes(format, g->d.expert_stride));
}

/* (column, row) */
static tensor gradient_operand(const weight_gradient_args *g, const variant *v, bool outputs)
{
  const row_matrix *m = outputs ? &g->a : &g->b;
  const int64_t last = g->a_half[g->halves - 1], first = g->a_half[0],
                rows = m->form == OF_TOKEN ? g->map.tokens.count : g->map.rows_cap;
  return (tensor){
      .base = m->base,
      .rank = 2,
      .size = {(uint64_t)(outputs ? (first > last ? first : last) + g->n : g->k), (uint64_t)rows},
      .stride = {1, m->ld},
      .box = {128 / sizeof(uint16_t), (uint32_t)v->bk},
  };
}

/* (column, row, half, expert) */
static tensor gradient_result(const weight_gradient_args *g)
{
  const weight_format format = dense_format(g->d_dtype);
  const gradient_rows d = rows_of_gradient(g);
  const bool gated = g->halves == 2;
  return (tensor){
      .base = first_half(&g->d, gated),
      .rank = 4,
      .size = {(uint64_t)d.columns, (uint64_t)d.rows, gated ? 2 : 1, (uint64_t)g->map.experts},
      .stride = {1, d.ld, gated ? half_distance(&g->d) * 8 / format_bits(format) : d.ld,
                 g->map.experts > 1 ? g->d.expert_stride : d.ld},
      .box = {(uint32_t)(128 * 8 / format_bits(format)), 64, 1, 1},
  };
}

bool tmap_encode_gradient(void (*encoder)(void), const variant *v, weight_gradient_sm90_args *args)
{
  const weight_gradient_args *g = &args->g;
  const weight_format operands = dense_format(g->a.dtype);
  const bool across = rows_of_gradient(g).across;
  const tensor p = gradient_operand(g, v, !across), q = gradient_operand(g, v, across), d = gradient_result(g);
  args->up_first = d.base != g->d.base[0];
  return encode(encoder, operands, &p, args->p) && encode(encoder, operands, &q, args->q) &&
         encode(encoder, dense_format(g->d_dtype), &d, args->d);
}
