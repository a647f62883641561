/*
 * Tables of generation-checked handles: what a stale, null or forged handle names is never found, and nothing
 * crashes.
 *
 * handle = generation << 32 | slot + 1; a slot is live while its generation is odd. Slots are made in chunks that
 * never move or go away, so a lookup needs no lock, and a stale handle finds a slot whose generation has moved on.
 */
#ifndef CUMOE_HANDLES_H
#define CUMOE_HANDLES_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

enum { HANDLE_CHUNKS = 4096 };

struct handle_slot;

typedef struct handle_table {
  uint32_t words; /* of 8 bytes, of a record */
  uint32_t count;
  uint32_t first_free; /* slot + 1 */
  pthread_mutex_t lock;
  _Atomic(struct handle_slot *) chunks[HANDLE_CHUNKS];
} handle_table;

/* A table of records of a type. */
#define HANDLE_TABLE(name, type)                                                                                       \
  _Static_assert(sizeof(type) % 8 == 0, "a record is whole words");                                                    \
  static handle_table name = {.words = sizeof(type) / 8, .lock = PTHREAD_MUTEX_INITIALIZER}

/* Any thread may call any of these. `record`: one of the table's type. */
uint64_t handle_publish(handle_table *table, const void *record); /* 0: no host memory */
bool handle_find(handle_table *table, uint64_t id, void *record);
bool handle_lives(handle_table *table, uint64_t id);
/* Ends the handle and hands out what it named: only one of several racing callers succeeds. */
bool handle_retire(handle_table *table, uint64_t id, void *record);
/* The live handle in slot `index` and its record, else *id = 0; false past the last slot. */
bool handle_at(handle_table *table, uint32_t index, uint64_t *id, void *record);

void handles_hold(handle_table *table, bool hold); /* its lock, around fork() */

#endif
