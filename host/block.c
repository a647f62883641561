/* Allocations with all that debug levels add to them: red zones, poison, uses on other streams. And pinned memory. */
#include "block.h"
#include "context.h"
#include "debug.h"
#include "memory.h"
#include "pool.h"
#include "status.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { ZONE = 256, ZONE_BYTE = 0xB5, POISON_BYTE = 0xFF };

/* ---- reaching the memory ---- */

static bool in_host_memory(const block *b)
{
  return on_cpu(b->context) || b->kind == BLOCK_PINNED;
}

static cumoe_status write_bytes(const block *b, char *at, uint8_t byte, size_t count)
{
  if (!in_host_memory(b)) return memory_fill(b->context, at, count, byte, count, 1, b->stream);
  memset(at, byte, count);
  __asm__ volatile("" ::"r"(at) : "memory"); /* not even before free() is this dead code */
  return CUMOE_OK;
}

static cumoe_status read_bytes(const block *b, const char *at, unsigned char *to, size_t count)
{
  if (!in_host_memory(b))
    return memory_copy(b->context, to, count, at, count, count, 1, cudaMemcpyDeviceToHost, b->stream);
  memcpy(to, at, count);
  return CUMOE_OK;
}

/* ---- making ---- */

static bool has_zones(const block *b)
{
  return b->data != b->memory;
}

/* The zone behind begins with the byte after the last element. */
static size_t rear_zone(const block *b)
{
  return b->taken - ZONE - b->bytes;
}

static cumoe_status take_memory(block *b, bool write_combined)
{
  void *memory = NULL;
  const bool zones = b->context->debug >= 2 && b->bytes != 0;
  b->taken = zones ? ZONE + (b->bytes + ZONE - 1) / ZONE * ZONE + ZONE : b->bytes;
  if (b->kind != BLOCK_PINNED)
    TRY(pool_alloc(b->context, b->taken, b->stream, &memory));
  else if (b->taken != 0)
    TRY(memory_pin(b->context, b->taken, write_combined, &memory));
  b->memory = memory;
  b->data = zones ? b->memory + ZONE : b->memory;
  return CUMOE_OK;
}

static cumoe_status give_memory_back(const block *b)
{
  switch (b->kind) {
  case BLOCK_POOL: return pool_free(b->context, b->memory, b->taken, b->stream);
  case BLOCK_PINNED: return memory_unpin(b->context, b->memory);
  case BLOCK_FOREIGN_POOLED: return memory_free(b->context, b->memory, b->stream);
  default: return memory_drop(b->context, b->memory);
  }
}

static cumoe_status write_first_bytes(const block *b, uint32_t flags)
{
  const bool poison = flags & CUMOE_ALLOC_POISON || b->context->debug >= 2;
  if (b->memory == NULL) return CUMOE_OK; /* no elements */
  if (has_zones(b)) {
    TRY(write_bytes(b, b->memory, ZONE_BYTE, ZONE));
    TRY(write_bytes(b, b->data + b->bytes, ZONE_BYTE, rear_zone(b)));
  }
  if (flags & CUMOE_ALLOC_ZERO) return write_bytes(b, b->data, 0, b->bytes);
  return poison ? write_bytes(b, b->data, POISON_BYTE, b->bytes) : CUMOE_OK;
}

cumoe_status block_alloc(block *b, uint32_t flags, bool write_combined)
{
  TRY(take_memory(b, write_combined));
  cumoe_status status = write_first_bytes(b, flags);
  if (status != CUMOE_OK) AND_THEN(status, give_memory_back(b));
  return status;
}

block *block_keep(const block *b)
{
  block *kept = malloc(sizeof *kept);
  if (kept != NULL) *kept = *b;
  return kept;
}

/* ---- the context's lists ---- */

static block **list_of(const block *b)
{
  return b->kind == BLOCK_PINNED ? &b->context->pinned : &b->context->blocks;
}

void block_link(block *b)
{
  block **list = list_of(b);
  b->serial = ++b->context->serials;
  b->newer = NULL;
  b->older = *list;
  if (*list != NULL) (*list)->newer = b;
  *list = b;
  on_close(b->context, CLOSE_BUFFERS, buffers_abandon);
  watch_leaks(b->context);
  if (b->kind == BLOCK_PINNED) {
    atomic_fetch_add(&b->context->pool.pinned, b->bytes);
  } else {
    atomic_fetch_add(&b->context->live_buffers, 1);
    atomic_fetch_add(&b->context->live_bytes, b->bytes);
  }
}

void block_unlink(block *b)
{
  if (b->older != NULL) b->older->newer = b->newer;
  if (b->newer != NULL)
    b->newer->older = b->older;
  else
    *list_of(b) = b->older;
  if (b->kind == BLOCK_PINNED) {
    atomic_fetch_sub(&b->context->pool.pinned, b->bytes);
  } else {
    atomic_fetch_sub(&b->context->live_buffers, 1);
    atomic_fetch_sub(&b->context->live_bytes, b->bytes);
  }
}

/* ---- uses on other streams ---- */

block_use *block_use_on(block *b, cumoe_stream stream, bool grow)
{
  block_use *use = b->uses;
  while (use != NULL && use->stream != stream) use = use->next;
  if (use != NULL) return use;
  if (b->own_taken < BLOCK_OWN_USES)
    use = &b->own[b->own_taken++];
  else if (grow)
    use = calloc(1, sizeof *use);
  if (use == NULL) return NULL;
  use->stream = stream;
  use->next = b->uses;
  b->uses = use;
  return use;
}

static void warn_of(const block *b, const block_use *use)
{
  if (use->call != NULL)
    log_message(CUMOE_LOG_WARNING,
                "cumoe: a buffer of %zu bytes, allocated at %s:%d on stream %p, was used on stream %p by %s and freed "
                "without cumoe_buffer_record_use",
                b->bytes, b->file, (int)b->line, (void *)b->stream, (void *)use->stream, use->call);
}

static cumoe_status forget_uses(block *b)
{
  cumoe_status status = CUMOE_OK;
  for (block_use *use = b->uses, *next; use != NULL; use = next) {
    next = use->next;
    AND_THEN(status, memory_unmark(b->context, use->event));
    if (use < b->own || use >= b->own + BLOCK_OWN_USES) free(use);
  }
  b->uses = NULL;
  return status;
}

cumoe_status block_follow(const block *b)
{
  for (const block_use *use = b->uses; use != NULL; use = use->next)
    TRY(memory_follow(b->context, b->stream, use->event));
  return CUMOE_OK;
}

static cumoe_status follow_uses(const block *b)
{
  for (const block_use *use = b->uses; use != NULL; use = use->next) warn_of(b, use);
  TRY(block_follow(b));
  if (b->uses != NULL && b->kind == BLOCK_FOREIGN) return memory_wait(b->context, b->stream); /* cudaFree does not */
  return CUMOE_OK;
}

/* ---- red zones ---- */

static cumoe_status overwritten(const block *b, size_t distance, const char *where)
{
  return fail(CUMOE_ERR_OUT_OF_BOUNDS, "byte %zu %s of the %s of %zu bytes allocated at %s:%d was overwritten",
              distance, where, b->kind == BLOCK_PINNED ? "pinned memory" : "buffer", b->bytes, b->file, (int)b->line);
}

cumoe_status block_check(const block *b)
{
  unsigned char front[ZONE], rear[2 * ZONE];
  if (!has_zones(b)) return CUMOE_OK;
  const size_t behind = rear_zone(b);
  if (!in_host_memory(b)) TRY(refuse_capture(b->context, b->stream));
  TRY(read_bytes(b, b->memory, front, ZONE));
  TRY(read_bytes(b, b->data + b->bytes, rear, behind));
  if (!in_host_memory(b)) TRY(memory_wait(b->context, b->stream));
  for (size_t i = ZONE; i-- > 0;)
    if (front[i] != ZONE_BYTE) return overwritten(b, ZONE - i, "before the beginning");
  for (size_t i = 0; i < behind; i++)
    if (rear[i] != ZONE_BYTE) return overwritten(b, i + 1, "past the end");
  return CUMOE_OK;
}

/* ---- ending ---- */

static bool is_poisoned_at_end(const block *b)
{
  return b->context->debug >= 2 && b->memory != NULL && (b->kind == BLOCK_POOL || b->kind == BLOCK_PINNED);
}

static cumoe_status leave_in_order(const block *b)
{
  TRY(follow_uses(b));
  cumoe_status status = block_check(b);
  if (status == CUMOE_ERR_OUT_OF_BOUNDS) {
    error_text why;
    save_error(&why);
    log_message(CUMOE_LOG_ERROR, "%s", why.text);
  }
  if (is_poisoned_at_end(b)) AND_THEN(status, write_bytes(b, b->data, POISON_BYTE, b->bytes));
  return status;
}

cumoe_status block_end(block *b)
{
  cumoe_status status = leave_in_order(b);
  AND_THEN(status, give_memory_back(b));
  AND_THEN(status, forget_uses(b));
  free(b);
  return status;
}

cumoe_status block_drop(block *b)
{
  cumoe_status status = forget_uses(b);
  switch (b->kind) {
  case BLOCK_POOL: AND_THEN(status, pool_drop(b->context, b->memory, b->taken)); break;
  case BLOCK_PINNED: AND_THEN(status, memory_unpin(b->context, b->memory)); break;
  default: AND_THEN(status, memory_drop(b->context, b->memory));
  }
  free(b);
  return status;
}

cumoe_status block_forget(block *b)
{
  const cumoe_status status = forget_uses(b);
  if (b->kind == BLOCK_POOL) pool_forget(b->context, b->taken);
  free(b);
  return status;
}

cumoe_buffer_info block_info(const block *b)
{
  return (cumoe_buffer_info){.size = sizeof(cumoe_buffer_info),
                             .device = b->context->device,
                             .dtype = b->dtype,
                             .line = b->line,
                             .rows = b->rows,
                             .cols = b->cols,
                             .bytes = b->bytes,
                             .data = b->data,
                             .stream = b->stream,
                             .file = b->file,
                             .serial = b->serial,
                             .handles = (int32_t)b->handles,
                             .pinned = b->kind == BLOCK_PINNED};
}

/* ---- pinned host memory ---- */

cumoe_status cumoe_pinned_alloc_at(cumoe_context handle, size_t bytes, uint32_t flags, const char *file, int line,
                                   void **data)
{
  begin_call("cumoe_pinned_alloc");
  struct context *context;
  REQUIRE(data, CUMOE_ERR_INVALID_ARGUMENT, "data is null");
  *data = NULL;
  TRY(find_context(handle, &context));
  REQUIRE(!(flags & ~(uint32_t)CUMOE_PINNED_WRITE_COMBINED), CUMOE_ERR_INVALID_ARGUMENT,
          "flags is 0x%x, known are 0x%x", flags, CUMOE_PINNED_WRITE_COMBINED);
  REQUIRE(bytes < (size_t)1 << 46, CUMOE_ERR_INVALID_ARGUMENT, "%zu bytes are more than an address space", bytes);
  if (bytes == 0) return CUMOE_OK;
  block b = {.context = context,
             .kind = BLOCK_PINNED,
             .bytes = bytes,
             .rows = 1,
             .cols = (int64_t)bytes,
             .file = file ? file : "?",
             .line = line,
             .dtype = CUMOE_U8};
  TRY(block_alloc(&b, 0, flags & CUMOE_PINNED_WRITE_COMBINED));
  block *kept = block_keep(&b);
  if (kept == NULL) {
    (void)give_memory_back(&b);
    return fail(CUMOE_ERR_OUT_OF_MEMORY, "%zu bytes of host memory", sizeof b);
  }
  lock_blocks();
  block_link(kept);
  unlock_blocks();
  *data = kept->data;
  return CUMOE_OK;
}

cumoe_status cumoe_pinned_free(cumoe_context handle, void *data)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (data == NULL) return CUMOE_OK;
  lock_blocks();
  block *b = context->pinned;
  while (b != NULL && b->data != data) b = b->older;
  if (b != NULL) block_unlink(b);
  unlock_blocks();
  REQUIRE(b != NULL, CUMOE_ERR_STALE_HANDLE, "data %p is not live pinned memory of this context", data);
  return block_end(b);
}
