#ifndef CUMOE_STREAM_H
#define CUMOE_STREAM_H 
#include "context.h"
#ifdef __cplusplus
extern "C" {
#endif
struct CUevent_st;
struct CUgraphExec_st;
typedef struct CUevent_st *cumoe_event;
typedef struct CUgraphExec_st *cumoe_graph;
#define CUMOE_STREAM_PER_THREAD ((cumoe_stream)0x2)
typedef enum cumoe_progress { CUMOE_FAILED = 0, CUMOE_PENDING = 1, CUMOE_DONE = 2 } cumoe_progress;
CUMOE_CHECKED cumoe_status cumoe_stream_create(cumoe_context context, int32_t priority, cumoe_stream *stream);
CUMOE_API cumoe_status cumoe_stream_destroy(cumoe_context context, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_stream_query(cumoe_context context, cumoe_stream stream, cumoe_progress *progress);
CUMOE_CHECKED cumoe_status cumoe_stream_join(cumoe_context context, cumoe_stream waiter, cumoe_stream on);
enum {
  CUMOE_EVENT_TIMING = 1,
  CUMOE_EVENT_SLEEP = 2
};
CUMOE_CHECKED cumoe_status cumoe_event_create(cumoe_context context, uint32_t flags, cumoe_event *event);
CUMOE_API cumoe_status cumoe_event_destroy(cumoe_context context, cumoe_event event);
CUMOE_CHECKED cumoe_status cumoe_event_record(cumoe_context context, cumoe_event event, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_event_wait(cumoe_context context, cumoe_event event, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_event_synchronize(cumoe_context context, cumoe_event event);
CUMOE_CHECKED cumoe_status cumoe_event_query(cumoe_context context, cumoe_event event, cumoe_progress *progress);
CUMOE_CHECKED cumoe_status cumoe_event_elapsed(cumoe_context context, cumoe_event first, cumoe_event last,
                                               float *milliseconds);
typedef enum cumoe_capture {
  CUMOE_CAPTURE_NONE = 0,
  CUMOE_CAPTURE_ACTIVE = 1,
  CUMOE_CAPTURE_INVALIDATED = 2
} cumoe_capture;
CUMOE_CHECKED cumoe_status cumoe_graph_status(cumoe_context context, cumoe_stream stream, cumoe_capture *capture);
CUMOE_CHECKED cumoe_status cumoe_graph_begin(cumoe_context context, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_graph_end(cumoe_context context, cumoe_stream stream, cumoe_graph *graph);
CUMOE_CHECKED cumoe_status cumoe_graph_launch(cumoe_context context, cumoe_graph graph, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_graph_upload(cumoe_context context, cumoe_graph graph, cumoe_stream stream);
CUMOE_API cumoe_status cumoe_graph_destroy(cumoe_context context, cumoe_graph graph);
#ifdef __cplusplus
}
#endif
#endif
