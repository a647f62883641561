/* THE launch path: a CUDA kernel by handle or a CPU kernel by pointer, with one argument struct. */
#ifndef CUMOE_LAUNCH_H
#define CUMOE_LAUNCH_H

#include "internal.h"
#include "variants.h"

/* `grid`: CTAs for a CUDA row, work units for a CPU row; 0 launches nothing. `early`: may start before the grid ahead of it
 * has ended, if its kernel waits by itself. Inside enter_device/leave_device. */
cumoe_status launch(cumoe_context context, int32_t variant, int64_t grid, bool early, const void *args,
                    cumoe_stream stream);

#endif
