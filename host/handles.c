/* See handles.h. Making and ending handles takes the table's mutex. */
#include "handles.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_SLOTS = 1024 };

/* A record is stored word by word, so that a lookup that races with the handle's end reads garbage at worst,
 * and sees by the generation that it did. */
typedef struct handle_slot {
  _Atomic uint32_t generation; /* odd: live */
  uint32_t next_free;          /* slot + 1 */
  _Atomic uint64_t words[];
} handle_slot;

static size_t slot_bytes(const handle_table *table)
{
  return sizeof(handle_slot) + table->words * sizeof(uint64_t);
}

static handle_slot *slot_at(handle_table *table, uint32_t index)
{
  handle_slot *chunk = atomic_load_explicit(&table->chunks[index / CHUNK_SLOTS], memory_order_acquire);
  if (!chunk) return NULL;
  return (handle_slot *)(void *)((char *)chunk + index % CHUNK_SLOTS * slot_bytes(table));
}

static void read_record(const handle_table *table, handle_slot *slot, void *record)
{
  for (uint32_t i = 0; i < table->words; ++i) {
    const uint64_t word = atomic_load_explicit(&slot->words[i], memory_order_acquire);
    memcpy((char *)record + i * sizeof word, &word, sizeof word);
  }
}

static void write_record(const handle_table *table, handle_slot *slot, const void *record)
{
  for (uint32_t i = 0; i < table->words; ++i) {
    uint64_t word;
    memcpy(&word, (const char *)record + i * sizeof word, sizeof word);
    atomic_store_explicit(&slot->words[i], word, memory_order_release);
  }
}

/* The slot of a handle that lives, else NULL. */
static handle_slot *live_slot(handle_table *table, uint64_t id)
{
  const uint32_t name = (uint32_t)id, generation = (uint32_t)(id >> 32);
  if (name == 0 || !(generation & 1) || (name - 1) / CHUNK_SLOTS >= HANDLE_CHUNKS) return NULL;
  handle_slot *slot = slot_at(table, name - 1);
  return slot && atomic_load_explicit(&slot->generation, memory_order_acquire) == generation ? slot : NULL;
}

void handles_hold(handle_table *table, bool hold)
{
  (void)(hold ? pthread_mutex_lock(&table->lock) : pthread_mutex_unlock(&table->lock));
}

bool handle_lives(handle_table *table, uint64_t id)
{
  return live_slot(table, id) != NULL;
}

/* The generation is looked at before and after: a word written for a later handle was written after the generation
 * had moved on. */
bool handle_find(handle_table *table, uint64_t id, void *record)
{
  handle_slot *slot = live_slot(table, id);
  if (!slot) return false;
  read_record(table, slot, record);
  return atomic_load_explicit(&slot->generation, memory_order_relaxed) == (uint32_t)(id >> 32);
}

/* With the lock held: a dead slot's index + 1, or 0 when there is no memory. */
static uint32_t take_slot(handle_table *table)
{
  if (table->first_free) {
    const uint32_t taken = table->first_free;
    table->first_free = slot_at(table, taken - 1)->next_free;
    return taken;
  }
  if (table->count == (uint32_t)CHUNK_SLOTS * HANDLE_CHUNKS) return 0;
  if (table->count % CHUNK_SLOTS == 0) {
    handle_slot *chunk = calloc(CHUNK_SLOTS, slot_bytes(table));
    if (!chunk) return 0;
    atomic_store_explicit(&table->chunks[table->count / CHUNK_SLOTS], chunk, memory_order_release);
  }
  return ++table->count;
}

uint64_t handle_publish(handle_table *table, const void *record)
{
  uint64_t id = 0;
  pthread_mutex_lock(&table->lock);
  const uint32_t name = take_slot(table);
  if (name) {
    handle_slot *slot = slot_at(table, name - 1);
    const uint32_t generation = atomic_load_explicit(&slot->generation, memory_order_relaxed) + 1;
    write_record(table, slot, record);
    atomic_store_explicit(&slot->generation, generation, memory_order_release);
    id = (uint64_t)generation << 32 | name;
  }
  pthread_mutex_unlock(&table->lock);
  return id;
}

/* A slot whose generations are used up is never taken again, so no handle ever names two objects. */
bool handle_retire(handle_table *table, uint64_t id, void *record)
{
  pthread_mutex_lock(&table->lock);
  const bool live = handle_find(table, id, record);
  if (live) {
    const uint32_t name = (uint32_t)id, dead = (uint32_t)(id >> 32) + 1;
    handle_slot *slot = slot_at(table, name - 1);
    atomic_store_explicit(&slot->generation, dead, memory_order_release);
    if (dead != 0) {
      slot->next_free = table->first_free;
      table->first_free = name;
    }
  }
  pthread_mutex_unlock(&table->lock);
  return live;
}

bool handle_at(handle_table *table, uint32_t index, uint64_t *id, void *record)
{
  *id = 0;
  pthread_mutex_lock(&table->lock);
  const bool exists = index < table->count;
  if (exists) {
    const uint64_t generation = atomic_load_explicit(&slot_at(table, index)->generation, memory_order_relaxed);
    const uint64_t named = generation << 32 | (index + 1);
    if (handle_find(table, named, record)) *id = named;
  }
  pthread_mutex_unlock(&table->lock);
  return exists;
}
