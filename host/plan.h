/* Pure functions of shapes and device: which kernel, which grid, which workspace. No CUDA call, no globals. */
#ifndef CUMOE_PLAN_H
#define CUMOE_PLAN_H

#include <stdbool.h>
#include "../include/cumoe/moe.h"
#include "variants.h"

/* What a choice depends on besides the shape. */
typedef struct machine {
  int32_t cc;            /* compute capability * 10 (90 = H200); 0 = CPU device */
  int32_t sms;           /* multiprocessors */
  const int32_t *forced; /* by operation: variant + 1, 0 = free; NULL = all free */
  int32_t smem;          /* bytes of shared memory a block may ask for; a row that needs more was not loaded */
} machine;

enum { MIN_CC = 80 }; /* of the GPUs that the library serves */

machine machine_of(const cumoe_device_info *info, const int32_t *forced);

/* Whether the device can run the row: contexts load the kernels of these rows, and only these are chosen. */
bool runs_on(const machine *m, const variant *v);

/* One operation's shape. Fields that an operation does not have stay 0. */
typedef struct shape {
  operation op;
  int32_t in, w;        /* DT_* of activations and weights, where there are none of the result */
  weight_major major;   /* of the weights */
  bool no_tmap;         /* tensor maps cannot describe the weights, or the driver makes none */
  int64_t tokens, rows; /* T; T k, or T when dense */
  int32_t experts;      /* local experts; router, gate: logits a token */
  int32_t n, k;         /* output channels, reduction length; permute: n bytes a token */
  int32_t top_k;
} shape;

/* The row to run: the forced one, else the best one for the shape; -1 if none can. */
int32_t choose(const machine *m, const shape *s);

/* Whether a row of the table reads its operands through tensor maps (host/tmap.c). */
bool takes_tensor_maps(const variant *v);

/* Whether up should put its rows in order in a copy, for the bulk copies that feed its products, rather than gather them. */
bool wants_copy(const machine *m, const shape *up);

/* Whether down can wait for the h of an expert instead of for the end of up (kernels/gemm/handover.cuh). */
bool goes_by_expert(const machine *m, const shape *up, const shape *down);

/* Whether few_up and few_down should do what map, up, down and combine do: rows for both serve the shapes, no row of those is
 * forced, and it pays, or one of theirs is forced. */
bool wants_few(const machine *m, const shape *up, const shape *down);

/* Whether few_up should also do what few_down does, where the router runs before it: no few_down is forced. */
bool few_in_one(const machine *m);

/* Whether few_up should also do what the gate does, where the router runs before it: GATE_IN_FEW_UP, and no gate is forced. */
bool few_up_gates(const machine *m, const gate_args *gate);

/* CTAs (CUDA row) or work units (CPU row) for a chosen row. */
int64_t grid_size(const machine *m, const variant *v, const shape *s);

/*
 * Whether the grid should be launched before the one ahead of it has ended, where the kernel can (host/launch.c). Saves 2 to
 * 5 us a launch. Not for thin grids behind a router's tiles, or that stream for about a millisecond: thin reads its tokens through
 * L1, and a grid that starts early finds the SMs divided as the router ahead wanted, with 28 KiB of L1 left (H200, deepseek-v3
 * T 32: 3812 instead of 3193 us; gpt-oss T 128: 1775, 1490; gpt-oss T 32: 971 or 996, from run to run).
 */
bool starts_early(const variant *v, const shape *s);

/*
 * Whether combine should discard the rows of h and y from L2, so that they are not written to memory while the next layer reads
 * its weights (H200, qwen3-30b T 512: 328 instead of 342 us). Rows must be whole lines. Where L2 has no room for most of them it
 * takes longer than it saves (L2 60 MB, rows of 75 MB: layer 0.4 % less; 92 MB: 2 % more).
 */
bool discards_rows(const cumoe_moe_desc *desc, int64_t tokens);

/* How the map cuts its pairs: the same answer for kernel arguments, workspace and grid. */
typedef struct map_chunks {
  int32_t chunks, chunk_pairs;
} map_chunks;
map_chunks map_chunking(int64_t pairs);

/* Byte offsets of the forward pass's regions in the workspace, each 256-byte aligned. */
typedef struct workspace_layout {
  size_t logits, ids, weights, counts, offsets, row_pair, slot_row, hist, progress, h, few_words, y, shared_h, shared_y,
      shared_logit;
  size_t few_fill; /* bytes from h that the router fills with ones for few_up: h and few_words (kernels/protocol.h) */
  size_t bytes;
} workspace_layout;

/* False if a size overflows 2^62 bytes. */
bool plan_workspace_layout(const cumoe_moe_desc *desc, int64_t tokens, workspace_layout *layout);

#endif
