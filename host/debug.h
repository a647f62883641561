/* Debug levels. */
#ifndef CUMOE_HOST_DEBUG_H
#define CUMOE_HOST_DEBUG_H

#include "status.h"

/* What is live of the context when it closes is told to the log, at level 1 and up. */
void watch_leaks(struct context *context);

#endif
