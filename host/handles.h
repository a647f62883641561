/*
 * Tables of generation-checked handles: what a stale, null or forged handle names is never found, and nothing crashes.
 *
 * handle = generation << 32 | slot + 1; a slot is live while its generation is odd. Slots are made in chunks that never move or
 * go away, so a lookup needs no lock, and a stale handle finds a slot whose generation has moved on.
 */
#ifndef CUMOE_HANDLES_H
#define CUMOE_HANDLES_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

enum { HANDLE_CHUNKS = 4096, HANDLE_WORDS = 40 /* 8-byte words of the largest record */ };

struct handle_slot;

typedef struct handle_table {
  uint32_t words; /* of a record */
  uint32_t count;
  uint32_t first_free; /* slot + 1 */
  pthread_mutex_t lock;
  _Atomic(struct handle_slot *) chunks[HANDLE_CHUNKS];
} handle_table;

/* A static table of records of a type. */
#define HANDLE_TABLE(type)                                                                                             \
  {                                                                                                                    \
    .words = (sizeof(type) + 7) / 8 + 0 * sizeof(char[sizeof(type) <= 8 * HANDLE_WORDS ? 1 : -1]),                     \
    .lock = PTHREAD_MUTEX_INITIALIZER                                                                                  \
  }

/* Any thread may call any of these. `record`: a whole record of the table's type. */
uint64_t handle_publish(handle_table *table, const void *record, uint32_t bytes); /* 0: no host memory */
bool handle_find(handle_table *table, uint64_t id, void *record, uint32_t bytes);
/* Ends the handle and hands out what it named: only one of several racing callers succeeds. */
bool handle_retire(handle_table *table, uint64_t id, void *record, uint32_t bytes);
/* The live handle in slot `index` and its record, else *id = 0; false past the last slot. */
bool handle_at(handle_table *table, uint32_t index, uint64_t *id, void *record, uint32_t bytes);

#endif
