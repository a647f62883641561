/* Owners of views. */
#ifndef CUMOE_HOST_BUFFER_H
#define CUMOE_HOST_BUFFER_H

#include "status.h"
#include "../include/cumoe/buffer.h"

/* STALE_HANDLE, WRONG_DEVICE or OUT_OF_BOUNDS if the view has an owner and it is gone, elsewhere, or too small. */
cumoe_status check_owner(struct context *context, const char *what, const cumoe_view *view);
bool buffer_lives(uint64_t id);                            /* not null, forged or freed */
cumoe_status check_live(const char *what, uint64_t owner); /* STALE_HANDLE if there is an owner and it is gone */

void hold_buffers(bool hold); /* around fork() */

#endif
