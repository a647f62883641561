/* The only place that knows how bytes move on either device. */
#ifndef CUMOE_HOST_MEMORY_H
#define CUMOE_HOST_MEMORY_H

#include "status.h"

/* Memory of a pool of CUDA's, in the stream's order; free() on the CPU device. */
cumoe_status memory_free(struct context *context, void *data, cumoe_stream stream);
/* rows of `width` bytes with pitches in bytes; kind as in CUDA, ignored on the CPU */
cumoe_status memory_copy(struct context *context, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                         size_t width, size_t rows, enum cudaMemcpyKind kind, cumoe_stream stream);
cumoe_status memory_fill(struct context *context, void *dst, size_t pitch, uint8_t byte, size_t width, size_t rows,
                         cumoe_stream stream);
/* From another GPU's memory to that of the context; on a stream of the context's. */
cumoe_status memory_copy_peer(struct context *context, void *dst, size_t dst_pitch, int32_t src_device, const void *src,
                              size_t src_pitch, size_t width, size_t rows, cumoe_stream stream);
cumoe_status refuse_capture(struct context *context, cumoe_stream stream); /* CAPTURE_UNSAFE while capturing */
cumoe_status memory_wait(struct context *context, cumoe_stream stream);    /* refuse_capture, then waits */

/* What is on `stream` now, as an event that other streams can wait for; refuses capture. NULL on the CPU device. */
cumoe_status memory_mark(struct context *context, cumoe_stream stream, cudaEvent_t *event);
cumoe_status memory_follow(struct context *context, cumoe_stream stream, cudaEvent_t event); /* NULL: nothing */
cumoe_status memory_unmark(struct context *context, cudaEvent_t event);                      /* NULL: nothing */

/* Pinned host memory; malloc on the CPU device. */
cumoe_status memory_pin(struct context *context, size_t bytes, bool write_combined, void **data);
cumoe_status memory_unpin(struct context *context, void *data);

/* Host memory of the CPU device, aligned; NULL without. */
void *memory_of_host(size_t bytes);

/* Memory that cumoe did not allocate: whether it can be owned, and whether it is a pool's: then memory_free frees
 * it. */
cumoe_status memory_inspect(struct context *context, const void *data, size_t bytes, bool *pooled);

/* Frees memory of any kind, in no stream: what uses it has been waited for. */
cumoe_status memory_drop(struct context *context, void *data);

#endif
