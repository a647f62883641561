/* The kernel table as the host sees it, and the choice of a row. */
#ifndef CUMOE_VARIANTS_H
#define CUMOE_VARIANTS_H

#include <stdbool.h>
#include "../kernels/cpu/cpu.h"

typedef enum operation {
#define OPERATION(name, arguments, shape, grid, units) OP_##name,
#include "operations.def"
  OP_COUNT
} operation;

typedef enum arch { ARCH_cpu, ARCH_any, ARCH_sm90 } arch;

/* Algorithms; a row serves what its form can (host/choice.c: serves). */
typedef enum form {
  FORM_ref,     /* CPU: everything */
  FORM_warp,    /* gate: a warp a token */
  FORM_rules,   /* gate: the same, and what few models want (GATE_HAS_RULES) */
  FORM_chunk,   /* map: counting by chunks of pairs */
  FORM_scatter, /* permute */
  FORM_codes,   /* quantize: groups of `columns`, or of a whole row */
  FORM_expert,  /* quantize: rows that are an expert's */
  FORM_blocks,  /* encode_scales, encode, scan, repack: everything */
  FORM_dot,     /* router: few tokens, a dot product an expert */
  FORM_tile,    /* GEMM on tensor cores, K-major weights; router: many tokens */
  FORM_ntile,   /* GEMM on tensor cores, N-major weights */
  FORM_unpack,  /* GEMM on tensor cores, K-major weights with scales */
  FORM_thin,    /* GEMM for few rows an expert: weights streamed once, K-major */
  FORM_stream,  /* the same on the tensor cores of sm_90a, for a few more rows, either major */
  FORM_wgmma,   /* GEMM on sm_90a's tensor cores, weights of either major that tensor maps can describe */
  FORM_mixed,   /* GEMM on sm_90a's tensor cores, weights of 4 bits in registers */
  FORM_fixed,   /* the same for few rows an expert, or as few of one token, activations in fixed point */
  FORM_few,     /* the experts of few tokens without a map, either major */
  FORM_dealt,   /* the same behind a router, N-major, where one grid does all */
  FORM_drawn,   /* the same of several tokens, weights with scales */
  FORM_fma,     /* f32 GEMM by plain FMA, any layout */
  FORM_gather,  /* combine */
  FORM_flat,    /* elementwise, all functions but gelu */
  FORM_gelu,    /* gelu alone */
  FORM_row,     /* softmax, norm: rows of up to `columns`, read once; gate_backward: of so many; attention: a warp a
                   query's head */
  FORM_sweep,   /* softmax, norm: rows of any length, read twice */
  FORM_split,   /* attention: few queries a sequence, their keys divided over a cluster's warps; backward: few tiles */
  FORM_any      /* what training adds: everything */
} form;

/* Columns as kernels/variants.def tells them; those that a row's table has not are 0. */
typedef struct variant {
  const char *name, *op_name, *arch_name, *form_name;
  const char *kernel;         /* the one that runs, in the image: another row's where this has none of its own */
  const unsigned char *image; /* fatbin; NULL on the CPU */
  cpu_kernel *cpu;
  int8_t op, arch, form, x, w, y; /* types: DT_*; 0 = chosen at run time, or none */
  int8_t format, scale, major;    /* weight_format, scale_case, weight_major */
  int32_t bm, bn, bk, stages;
  int32_t units, columns, lanes, ahead;
  int32_t cluster, threads, ctas, smem; /* threads: of a CTA */
} variant;

extern const variant variants[];
extern const int32_t variant_count;

const char *operation_name(operation op);
bool operation_is_late(operation op); /* operations.def: LATE */

/* Size of the operation's argument struct; of what a row's kernel takes, which may hold tensor maps besides. */
int32_t operation_arg_bytes(operation op);
int32_t variant_arg_bytes(const variant *v);

#endif
