/* The threads of a CPU device. */
#ifndef CUMOE_HOST_THREADS_H
#define CUMOE_HOST_THREADS_H

#include <stdint.h>

typedef struct thread_pool thread_pool;
thread_pool *threads_create(int threads); /* 0 = one per core; NULL when out of memory */
void threads_destroy(thread_pool *pool);
int threads_count(const thread_pool *pool);
/* Runs kernel(args, begin, end) over disjoint ranges that cover 0 .. units - 1; returns when all are done. Safe
 * from several threads at once (one job at a time). */
void threads_run(thread_pool *pool, void (*kernel)(const void *, int64_t, int64_t), const void *args, int64_t units);

#endif
