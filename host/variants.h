/* The kernel table as the host sees it, and the choice of a row. */
#ifndef CUMOE_VARIANTS_H
#define CUMOE_VARIANTS_H

#include "../kernels/cpu/cpu.h"

typedef enum operation {
#define OPERATION(name, arguments, shape, grid, units) OP_##name,
#include "operations.def"
  OP_COUNT
} operation;

typedef enum arch { ARCH_cpu, ARCH_any, ARCH_sm90 } arch;

/* Algorithms; a row serves what its form can (host/plan.c: serves). */
typedef enum form {
  FORM_ref,     /* CPU: everything */
  FORM_warp,    /* gate: a warp a token */
  FORM_chunk,   /* map: counting by chunks of pairs */
  FORM_scatter, /* permute */
  FORM_rows,    /* router: few tokens, a dot product an expert */
  FORM_tile,    /* GEMM on tensor cores, K-major weights; router: many tokens */
  FORM_ntile,   /* GEMM on tensor cores, N-major weights */
  FORM_thin,    /* GEMM for few rows an expert: weights streamed once, K-major */
  FORM_stream,  /* the same on the tensor cores of sm_90a, for a few more rows */
  FORM_wgmma,   /* GEMM on sm_90a's tensor cores, K-major weights that tensor maps can describe */
  FORM_ring,    /* the experts of few tokens without a map, K-major weights */
  FORM_fma,     /* f32 GEMM by plain FMA, any layout */
  FORM_gather,  /* combine */
  FORM_flat,    /* elementwise */
  FORM_row,     /* softmax, norm: rows of up to bn columns, read once; bk threads a row */
  FORM_sweep    /* softmax, norm: rows of any length, read twice */
} form;

typedef struct variant {
  const char *name, *op_name;
  const unsigned char *image; /* fatbin; NULL on the CPU */
  cpu_kernel *cpu;
  int8_t op, arch, form, in, w; /* DT_*; 0 = chosen at run time */
  int32_t bm, bn, bk, stages, threads, ctas, smem;
} variant;

extern const variant variants[];
extern const int32_t variant_count;

const char *operation_name(operation op);

/* Size of the operation's argument struct. */
int32_t operation_arg_bytes(operation op);

#endif
