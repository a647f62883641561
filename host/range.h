/* Ranges for profilers (NVTX): one for each public call on a stream, named like it, in the domain "cumoe". */
#ifndef CUMOE_RANGE_H
#define CUMOE_RANGE_H

#include <stdbool.h>

/* Finds the profiler, if this process runs under one. Once; before the first range. */
void ranges_open(void);

/* Without a profiler: a branch each. The pair is made by begin_call_on (status.h). */
bool range_push(const char *name);
void range_pop(const bool *pushed);

#endif
