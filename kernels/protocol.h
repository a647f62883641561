/*
 * What the kernels of one forward pass hand each other besides the arrays of the public manual. Every argument struct
 * of args.h that takes part ends with its side of it, `protocol`; all zeros is a kernel that stands alone.
 *
 *   memory           filled before     written by         read by           lies in          lifetime
 *   progress         zeros, by map     up, down           up, down          own region       map to down
 *   x_copy           -                 up                 up                y, or own (1)    up
 *   lines of h, y    -                 up, down           combine           h, y             up to combine
 *   few.weights      ones, by router   few_up             few_up            own region       router to few_up
 *   few.tickets      ones, by router   few_up             few_up            behind weights   router to few_up
 *   h of few_up      ones, by router   few_up             few_up            h                router to few_up
 *
 * Sizes: PROGRESS_WORDS int32_t; x_copy [T k, hidden], exactly what y has; FEW_BYTES for weights and tickets.
 * The workspace (host/plan.c) gives each its region, and records the range that the router fills where it places it. A
 * region is dead outside its lifetime, so no launch depends on what an earlier forward left there.
 * (1) Codes of x, with their scales behind them, have their own region: they are half as long as rows of y, so down,
 * which begins with an expert when its h is there, would write over other experts'.
 */
#ifndef CUMOE_PROTOCOL_H
#define CUMOE_PROTOCOL_H

#include <assert.h>
#include <stdint.h>

/* ---- early reads ---- */

/*
 * A grid may start while the one before it runs (wait_for_earlier_grids). What was complete before the previous grid
 * started is then visible without waiting, and `early_inputs` says that a kernel's small inputs are of that kind:
 *   up, down   weights, counts, offsets; of down_drawn rows and tickets, too, and nobody reads any more where c will be
 *   combine    slot_row, pair_weights, the device's token count
 *   quantize   all there is, and nobody reads any more what it writes: it works beside the grid before it, and waits at
 *              its end, for whoever waits for it
 */

/* ---- progress: up and down of many tokens ---- */

/*
 * Words, by index:
 *   COPY_TICKETS  tickets drawn to copy rows of x: COPY_TICKET rows each
 *   UP_TICKETS    tickets drawn by clusters of an up with x_copy: a unit each
 *   DOWN_TICKETS  the same of down
 *   COPIED        rows in x_copy, of each COPY_GROUP; added after their stores
 *   STORED        of each expert: channels of h that are stored, summed over its row tiles; added by release
 * Whoever waits for a word waits for CTAs that have started: tickets are drawn, not assigned.
 */
enum { PROGRESS_COPY_TICKETS, PROGRESS_UP_TICKETS, PROGRESS_DOWN_TICKETS, PROGRESS_COPIED };
enum { COPY_TICKET = 4, COPY_GROUP = 64 };
#define PROGRESS_STORED(rows)         (PROGRESS_COPIED + (rows) / COPY_GROUP + 1)
#define PROGRESS_WORDS(rows, experts) (PROGRESS_STORED(rows) + (experts))

static_assert(COPY_GROUP % COPY_TICKET == 0, "a ticket's rows are counted in one group");

/* Scales of a workspace's rows of codes: that of group g of row r at g * SCALE_LD(rows) + r, for the copy engine takes
 * 16 bytes from multiples of 16 on. x_copy has them behind the codes. */
enum { SCALE_VECTOR = 4 };
#define SCALE_LD(rows)         (((int64_t)(rows) + SCALE_VECTOR - 1) / SCALE_VECTOR * SCALE_VECTOR)
#define COPIED_SCALES(rows, k) (((int64_t)(rows) * (k) + 15) / 16 * 16)

typedef struct map_protocol {
  int32_t *progress; /* NULL, or PROGRESS_WORDS(T k, local_experts), which map fills with zeros; CUDA only */
} map_protocol;

typedef struct gemm_protocol {
  int32_t *progress; /* with x_copy or by_expert */
  void *x_copy;      /* wgmma, up: NULL, or where the kernel puts its rows in order as it goes */
  int32_t by_expert; /* up counts the channels it has stored, and down waits for an expert's instead of for up's end */
  int32_t early_inputs; /* above */
  int32_t evict_last;   /* c is the library's own, and combine discards it: it should stay in L2 until then */
} gemm_protocol;

/* Rows of h and y that are read for the last time need not reach memory. Their addresses and sizes are whole lines. */
enum { DISCARD_LINE = 128 };

typedef struct combine_protocol {
  void *discard_h;       /* NULL, or h, whose lines are discarded with those of y */
  int64_t discard_h_row; /* bytes of a row of h */
  int32_t early_inputs;  /* above */
} combine_protocol;

/* ---- few_up ---- */

/*
 * h and the words below carry their own flag: all ones is "not written yet", which no value is. A 16-bit element of all
 * ones is a NaN that no rounding gives; a weight fills the low half of its word. Readers poll, and need neither fence
 * nor counter.
 */
#define FEW_NOT_WRITTEN (~(uint64_t)0)

typedef struct few_protocol {
  uint64_t *weights; /* NULL: gate has run. Else [T k], the bits of each pair's weight: few_up does the gate's work */
  int32_t *tickets;  /* NULL: few_down runs next. Else tickets drawn, less one: few_up does its work, too */
} few_protocol;

#define FEW_BYTES(pairs) ((pairs)*8 + 4) /* weights, then tickets */

typedef struct router_protocol {
  void *fill; /* NULL, or memory that the router fills with ones for few_up: h, and FEW_BYTES behind it; CUDA only */
  int32_t fill_vectors; /* of 16 bytes */
} router_protocol;

#endif
