/* THE launch path: a CUDA kernel by handle or a CPU kernel by pointer, with one argument struct. */
#ifndef CUMOE_LAUNCH_H
#define CUMOE_LAUNCH_H

#include "status.h"
#include "plan.h"

/* A grid of 0 launches nothing. Inside enter_device/leave_device. */
cumoe_status launch(struct context *context, const launch_step *s, const void *args, cumoe_stream stream);

/* How a CUDA kernel is launched; a caller's kernel (function.c) may ask for more than a row does. */
typedef struct launch_shape {
  dim3 grid, block, cluster; /* cluster.x 0: none */
  size_t smem;
  bool early, cooperative;
} launch_shape;

enum { LAUNCH_ATTRIBUTES = 3 };

/* CUDA's form of it; `attributes` must outlive `config`. */
void launch_config(const launch_shape *shape, cumoe_stream stream, cudaLaunchAttribute attributes[LAUNCH_ATTRIBUTES],
                   cudaLaunchConfig_t *config);

/* parameters: the address of each one. `name` is for texts. */
cumoe_status launch_kernel(cudaKernel_t kernel, const char *name, const launch_shape *shape, void **parameters,
                           cumoe_stream stream);

#endif
