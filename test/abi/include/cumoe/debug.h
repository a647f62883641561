#ifndef CUMOE_DEBUG_H
#define CUMOE_DEBUG_H 
#include "buffer.h"
#ifdef __cplusplus
extern "C" {
#endif
typedef void (*cumoe_live_fn)(void *user, const cumoe_buffer_info *info);
CUMOE_API int64_t cumoe_debug_live(cumoe_context context, cumoe_live_fn fn, void *user);
CUMOE_CHECKED cumoe_status cumoe_debug_check(cumoe_context context, cumoe_stream stream, cumoe_buffer_info *first_bad);
#ifdef __cplusplus
}
#endif
#endif
