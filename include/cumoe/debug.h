/*
 * cumoe/debug.h: finding leaks, overruns and races of a program's own.
 *
 * The level is cumoe_context_config.debug or the environment's CUMOE_DEBUG, whichever is higher, read once at
 * creation of the context. Levels work on the CPU device as well.
 *
 *   0  nothing.
 *   1  What is still live at cumoe_context_destroy is told to the log (WARNING): count, bytes, and where most of it
 *      was allocated; and how many plans and weights, where any are. So is, when it is freed, a buffer that cumoe used
 *      on another stream than its home without cumoe_buffer_record_use afterwards (four other streams of a buffer are
 *      watched, and those with a recorded use). Costs a lock for every view of an owned buffer.
 *   2  Also: memory is filled with 0xFF (NaN in every float type) when it is allocated and when it is freed, and
 *      red zones of 256 bytes lie before and behind it. A free waits for the home stream, looks at the zones, and
 *      answers OUT_OF_BOUNDS (and the log: ERROR) if they were written to; the buffer is freed all the same.
 *      cumoe_buffer_release copies the memory out of its zones: its address changes.
 *
 * Adopted memory has no zones. Views keep their shapes: at every level the same calls succeed.
 */
#ifndef CUMOE_DEBUG_H
#define CUMOE_DEBUG_H

#include "buffer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef void (*cumoe_live_fn)(void *user, const cumoe_buffer_info *info);

/*
 * Calls `fn` for every live buffer of the context, then for its pinned memory, each the newest first, and returns
 * their number. `fn` may be NULL; it must not call cumoe: a lock is held. info->size says how much of the struct the
 * library knows. -1 for a bad context.
 */
CUMOE_API int64_t cumoe_debug_live(cumoe_context context, cumoe_live_fn fn, void *user);

/*
 * Waits for `stream`, then for the home stream of every live buffer, and looks at the red zones. OUT_OF_BOUNDS if
 * some were written to; the text and, unless it is NULL, *first_bad (its size field set by the caller) tell of the
 * first. CUMOE_OK below level 2. Not during capture of any of these streams (CAPTURE_UNSAFE). Other threads'
 * allocations and frees wait until it is done.
 */
CUMOE_CHECKED cumoe_status cumoe_debug_check(cumoe_context context, cumoe_stream stream, cumoe_buffer_info *first_bad);

#ifdef __cplusplus
}
#endif
#endif
