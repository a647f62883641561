/* One allocation: what the handles of a buffer share, or pinned memory. Made and ended in block.c. */
#ifndef CUMOE_BLOCK_H
#define CUMOE_BLOCK_H

#include "status.h"
#include "../include/cumoe/buffer.h"

struct context;

typedef enum block_kind { BLOCK_POOL, BLOCK_FOREIGN, BLOCK_FOREIGN_POOLED, BLOCK_PINNED } block_kind;

/* On another stream than the home stream. */
typedef struct block_use {
  struct block_use *next;
  cumoe_stream stream;
  cudaEvent_t event; /* after the last recorded use; NULL: none recorded yet, or the CPU device */
  const char *call;  /* the first call since then that used it; NULL: none. Kept at debug level 1 and up */
} block_use;

enum { BLOCK_OWN_USES = 4 };

typedef struct block {
  struct block *newer, *older; /* in the context's list */
  struct context *context;
  block_kind kind;
  char *memory, *data; /* as allocated; what the caller sees of it. They differ if there are red zones */
  size_t taken, bytes;
  int64_t rows, cols;
  cumoe_stream stream; /* home */
  const char *file;
  int32_t line, dtype;
  uint64_t serial;
  uint32_t handles; /* with the lock held, like `uses` and the list */
  block_use *uses;
  block_use own[BLOCK_OWN_USES]; /* the first ones of the list: launches take no memory */
  int32_t own_taken;
} block;

/* One lock for all blocks and handles of the process (buffer.c). */
void lock_blocks(void);
void unlock_blocks(void);

/* Gets memory for a block that states everything else; flags as in cumoe_buffer_alloc_with. Nothing to undo when it
 * fails. */
cumoe_status block_alloc(block *b, uint32_t flags, bool write_combined);

/* A copy of `b` on the host's heap; NULL without memory. */
block *block_keep(const block *b);

/* With the lock held: into and out of the context's lists and counts. */
void block_link(block *b);
void block_unlink(block *b);

/* Of an unlinked block; frees `b` itself, too. block_end in its home stream's order; block_drop when the device is
 * idle; block_forget leaves the memory to the caller. */
cumoe_status block_end(block *b);
cumoe_status block_drop(block *b);
cumoe_status block_forget(block *b);

/* With the lock held. The use of a block on a stream; NULL without host memory, and, unless it may `grow`, when the
 * block's own places are taken. */
block_use *block_use_on(block *b, cumoe_stream stream, bool grow);

/* With the lock held, or of an unlinked block: its home stream waits for recorded uses. */
cumoe_status block_follow(const block *b);

/* OUT_OF_BOUNDS if the red zones were written to. Waits for the home stream. */
cumoe_status block_check(const block *b);

cumoe_buffer_info block_info(const block *b);

/* Frees what is live of a context that closes (buffer.c). */
cumoe_status buffers_abandon(struct context *context);

#endif
