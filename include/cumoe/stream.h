/*
 * cumoe/stream.h: streams, events and graphs, thin. Optional: every type is CUDA's own, so streams, events and graphs
 * that an engine made itself serve wherever these do, and the other way round.
 *
 * Every call works on the context's device, whichever device is current on the thread, and leaves that and CUDA's
 * last error as they were. CUDA does not check these pointers: using one that was destroyed is the caller's mistake
 * to avoid. Calls that wait or ask are refused on a stream that is being captured (CAPTURE_UNSAFE) instead of
 * breaking the capture; captures of other threads are not disturbed.
 *
 * On the CPU device work is done when the call that asks for it returns. So its one stream and its one event are
 * NULL: creating gives NULL, joins and records do nothing, everything is CUMOE_DONE. There are no times and no
 * graphs: NOT_SUPPORTED.
 *
 * Errors of every call: INVALID_ARGUMENT (a null pointer, a flag or stream that the text names), CUDA, CUDA_STICKY.
 */
#ifndef CUMOE_STREAM_H
#define CUMOE_STREAM_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUevent_st;
struct CUgraphExec_st;
typedef struct CUevent_st *cumoe_event;     /* == cudaEvent_t */
typedef struct CUgraphExec_st *cumoe_graph; /* == cudaGraphExec_t: captured work, ready to run */

/* CUDA's default stream of the calling thread. NULL is the legacy one, which all threads share and nobody can
 * capture. */
#define CUMOE_STREAM_PER_THREAD ((cumoe_stream)0x2)

/* How far work has come. A loop that waits while it is PENDING ends on an error too. */
typedef enum cumoe_progress { CUMOE_FAILED = 0, CUMOE_PENDING = 1, CUMOE_DONE = 2 } cumoe_progress;

/* ---- streams --------------------------------------------------------------------------------------- */

/*
 * A stream that does not wait for the legacy default stream. priority: 0 is the default and the lowest, -1 and less
 * come first when both are ready; CUDA clamps it to the device's range. *stream is NULL on failure.
 */
CUMOE_CHECKED cumoe_status cumoe_stream_create(cumoe_context context, int32_t priority, cumoe_stream *stream);

/*
 * Work in flight goes on; nothing waits. NULL is allowed; a stream under capture is CAPTURE_UNSAFE and lives on. Free
 * the buffers whose home it is first.
 */
CUMOE_API cumoe_status cumoe_stream_destroy(cumoe_context context, cumoe_stream stream);

/* Whether all work on the stream is done; never waits. On an error *progress is CUMOE_FAILED. */
CUMOE_CHECKED cumoe_status cumoe_stream_query(cumoe_context context, cumoe_stream stream, cumoe_progress *progress);

/*
 * What is launched on `waiter` from now on waits for all work on `on` so far; the host does not. `context` is that of
 * `on`; `waiter` may be on another GPU. In a capture of `on`, `waiter` joins the capture. Makes an event and gives it
 * back at once.
 */
CUMOE_CHECKED cumoe_status cumoe_stream_join(cumoe_context context, cumoe_stream waiter, cumoe_stream on);

/* ---- events ---------------------------------------------------------------------------------------- */

enum {
  CUMOE_EVENT_TIMING = 1, /* cumoe_event_elapsed may be asked; makes a record dearer */
  CUMOE_EVENT_SLEEP = 2   /* cumoe_event_synchronize sleeps instead of spinning */
};

/* flags: a sum of the above, or 0. *event is NULL on failure. An event that was never recorded is done. */
CUMOE_CHECKED cumoe_status cumoe_event_create(cumoe_context context, uint32_t flags, cumoe_event *event);
CUMOE_API cumoe_status cumoe_event_destroy(cumoe_context context, cumoe_event event); /* NULL is allowed */

/* Marks the end of all work on the stream so far. May be captured: then the host cannot ask for it (CAPTURE_UNSAFE).
 * The stream is on the context's device. */
CUMOE_CHECKED cumoe_status cumoe_event_record(cumoe_context context, cumoe_event event, cumoe_stream stream);

/* What is launched on the stream from now on waits for the event; the host does not. May be captured. */
CUMOE_CHECKED cumoe_status cumoe_event_wait(cumoe_context context, cumoe_event event, cumoe_stream stream);

/* The host waits. */
CUMOE_CHECKED cumoe_status cumoe_event_synchronize(cumoe_context context, cumoe_event event);

/* Never waits. On an error *progress is CUMOE_FAILED. */
CUMOE_CHECKED cumoe_status cumoe_event_query(cumoe_context context, cumoe_event event, cumoe_progress *progress);

/*
 * Milliseconds between two events that were made with CUMOE_EVENT_TIMING, recorded and passed; resolution about 0.5
 * us. INVALID_ARGUMENT while one of them is pending. *milliseconds is 0 on failure.
 */
CUMOE_CHECKED cumoe_status cumoe_event_elapsed(cumoe_context context, cumoe_event first, cumoe_event last,
                                               float *milliseconds);

/* ---- graphs ---------------------------------------------------------------------------------------- */

typedef enum cumoe_capture {
  CUMOE_CAPTURE_NONE = 0,
  CUMOE_CAPTURE_ACTIVE = 1,
  CUMOE_CAPTURE_INVALIDATED = 2 /* a call broke it: cumoe_graph_end clears it away */
} cumoe_capture;

CUMOE_CHECKED cumoe_status cumoe_graph_status(cumoe_context context, cumoe_stream stream, cumoe_capture *capture);

/*
 * From here to cumoe_graph_end, work that this thread puts on the stream is recorded and not run. Thread-local mode:
 * what other threads do is their business. CAPTURE_UNSAFE if the stream is being captured; INVALID_ARGUMENT for NULL,
 * the legacy stream.
 */
CUMOE_CHECKED cumoe_status cumoe_graph_begin(cumoe_context context, cumoe_stream stream);

/*
 * Ends the capture on the thread that began it and makes what was recorded ready to run. INVALID_ARGUMENT without a
 * capture, CAPTURE_UNSAFE if it was invalidated or other streams were not joined to this one. *graph is NULL on
 * failure, and the capture is over. Memory and kernels that the graph uses must outlive it.
 */
CUMOE_CHECKED cumoe_status cumoe_graph_end(cumoe_context context, cumoe_stream stream, cumoe_graph *graph);

/* Runs the graph in the stream's order. Two launches of one graph never overlap. CAPTURE_UNSAFE on a stream under
 * capture. */
CUMOE_CHECKED cumoe_status cumoe_graph_launch(cumoe_context context, cumoe_graph graph, cumoe_stream stream);

/* Does what the first launch would do besides running it, so that the first launch is as quick as the others. */
CUMOE_CHECKED cumoe_status cumoe_graph_upload(cumoe_context context, cumoe_graph graph, cumoe_stream stream);

/* A launch in flight goes on. NULL is allowed. One thread at a time may use a graph. */
CUMOE_API cumoe_status cumoe_graph_destroy(cumoe_context context, cumoe_graph graph);

#ifdef __cplusplus
}
#endif
#endif
