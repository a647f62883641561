/*
 * The objects behind the API's pointers. The value of a cumoe_context, a cumoe_plan or a cumoe_weights is a handle
 * (handles.h), never an address: one that is stale, forged or of another kind is not found, and nothing is read
 * through it.
 */
#ifndef CUMOE_OBJECTS_H
#define CUMOE_OBJECTS_H

#include <stdbool.h>
#include <stdint.h>

#include "../include/cumoe/types.h"

struct context;

typedef enum object_kind { OBJECT_CONTEXT, OBJECT_PLAN, OBJECT_WEIGHTS, OBJECT_GROUP, OBJECT_ARENAS } object_kind;

/* A handle for what belongs to `context`; NULL without host memory. */
void *publish_object(object_kind kind, struct context *context, void *object);

/* What a handle names. INVALID_ARGUMENT for NULL, STALE_HANDLE if it is none of this kind, or no longer, NOT_SUPPORTED
 * in a child of the process that made it. `name` is for the text. Takes no lock, and does not look at the object. */
cumoe_status find_object(object_kind kind, const char *name, const void *handle, void **object);

/* Ends a handle that was found; false: another thread was faster, and the object is that one's to end. */
bool retire_object(const void *handle);

/* Of a context whose handle has ended: how many it has; and all of them, each handed to `end`: the first failure. */
int64_t count_objects(object_kind kind, const struct context *context);
cumoe_status retire_objects(object_kind kind, const struct context *context, cumoe_status (*end)(void *object));

void hold_objects(bool hold); /* around fork() */

#endif
