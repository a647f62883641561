/* A world over the shim: contexts, a stream, a layer whose operands nobody reads, and calls on it. */
#ifndef SHIM_LAYER_H
#define SHIM_LAYER_H

#include "shim.h"
#include "../test.h"

enum { BUFFERS = 8 };

typedef struct world {
  cumoe_context context, other; /* on devices 1 and 0 */
  cudaStream_t stream;          /* of device 1 */
  cumoe_buffer buffers[BUFFERS];
  cumoe_plan plan;
  cumoe_weights weights, shared;
  cumoe_stream made; /* by the library; the same below */
  cumoe_event events[2];
  cumoe_graph captured;
  void *pinned;
  uintptr_t next; /* address of the next operand that nobody touches */
} world;

#define STEP(expression)                                                                                               \
  do {                                                                                                                 \
    const cumoe_status step_ = (expression);                                                                           \
    if (step_ != CUMOE_OK) return step_;                                                                               \
  } while (0)

/* The test's own call of the shim: it has to work. */
#define OWN(call) own_call((call), #call)
bool own_call(cudaError_t error, const char *call);

/* Device memory that no kernel of the shim reads. */
cumoe_view_mut lend(world *w, int32_t dtype, int64_t rows, int64_t cols);
cumoe_view lend_in(world *w, int32_t dtype, int64_t rows, int64_t cols);

/* A context on device 1 with a stream; one on device 0 too, which is then the thread's. */
void open_one(world *w);
void open_two(world *w);

enum { HIDDEN = 512, INTER = 256, FEW_INTER = 1024, EXPERTS = 8, TOP_K = 2 };

cumoe_moe_desc describe(int32_t dtype);
cumoe_weights_desc describe_weights(world *w, int32_t dtype, int32_t experts, int32_t inter, int32_t order);
void bind_layer(world *w, const cumoe_moe_desc *desc, int32_t order);
cumoe_moe_args arguments(world *w, const cumoe_moe_desc *d, int64_t tokens);

/* Layers, with what they need: bf16; the same with FEW_INTER; f16 with a shared expert, on two devices; f32, unreduced
 * and weighing the input. */
void small_layer(world *w);
void wide_layer(world *w);
void shared_layer(world *w);
void unreduced_layer(world *w);
void formats_layer(world *w); /* codes of e4m3 and s8, of activations too; scales by pointers */

/* Calls: the first two and the stages on the small layer, the others on the layer of that name. */
cumoe_status run_routed(world *w);
cumoe_status both_ways(world *w, int64_t tokens);
cumoe_status run_both_ways(world *w);
cumoe_status run_logits(world *w);
cumoe_status run_wide(world *w);
cumoe_status run_wide_routed(world *w);
cumoe_status run_everything(world *w);
cumoe_status run_unreduced(world *w);
cumoe_status run_formats(world *w);
cumoe_status run_router(world *w);
cumoe_status run_stages(world *w);

#endif
