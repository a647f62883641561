/* See objects.h. One table for all kinds, so that no two handles are equal. */
#include "objects.h"
#include "context.h"
#include "handles.h"
#include "status.h"

typedef struct record {
  void *object;
  struct context *context;
  uint32_t kind, forks;
} record;

HANDLE_TABLE(objects, record);

_Static_assert(sizeof(void *) == sizeof(uint64_t), "a handle is a pointer's value");

void hold_objects(bool hold)
{
  handles_hold(&objects, hold);
}

static uint64_t id_of(const void *handle)
{
  return (uint64_t)(uintptr_t)handle;
}

void *publish_object(object_kind kind, struct context *context, void *object)
{
  const record r = {object, context, kind, count_forks()};
  return (void *)(uintptr_t)handle_publish(&objects, &r);
}

cumoe_status find_object(object_kind kind, const char *name, const void *handle, void **object)
{
  static const char *const nouns[] = {"a context", "a plan", "weights", "a group", "arenas"};
  record r;
  *object = NULL;
  REQUIRE(handle, CUMOE_ERR_INVALID_ARGUMENT, "%s is null", name);
  REQUIRE(handle_find(&objects, id_of(handle), &r) && r.kind == (uint32_t)kind, CUMOE_ERR_STALE_HANDLE,
          "%s 0x%llx was destroyed, or never was %s", name, (unsigned long long)id_of(handle), nouns[kind]);
  *object = r.object;
  return check_forks(r.forks);
}

bool retire_object(const void *handle)
{
  record was;
  return handle_retire(&objects, id_of(handle), &was);
}

int64_t count_objects(object_kind kind, const struct context *context)
{
  int64_t count = 0;
  uint64_t id;
  record r;
  for (uint32_t i = 0; handle_at(&objects, i, &id, &r); ++i)
    count += id && r.context == context && r.kind == (uint32_t)kind;
  return count;
}

cumoe_status retire_objects(object_kind kind, const struct context *context, cumoe_status (*end)(void *object))
{
  cumoe_status first = CUMOE_OK;
  uint64_t id;
  record r;
  for (uint32_t i = 0; handle_at(&objects, i, &id, &r); ++i) {
    if (!id || r.context != context || r.kind != (uint32_t)kind || !handle_retire(&objects, id, &r)) continue;
    AND_THEN(first, end(r.object));
  }
  return first;
}
