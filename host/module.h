/* Modules and functions behind their handles, and the checks of a launch, which need no GPU. */
#ifndef CUMOE_MODULE_H
#define CUMOE_MODULE_H

#include "status.h"
#include "launch.h"
#include "../include/cumoe/kernel.h"

/* A kernel with the facts that a launch is checked against, read once. */
typedef struct function_facts {
  struct context *context;
  cudaKernel_t kernel;
  uint64_t module;
  int32_t max_threads, static_smem, max_dynamic_smem, parameters;
  uint16_t parameter_bytes[CUMOE_MAX_PARAMETERS];
  char name[64]; /* for texts; cut off if need be */
} function_facts;

/* Of an image in memory of ours: aligned to 8 bytes, and PTX with a NUL at its end or behind it. */
cumoe_status load_module(struct context *context, const void *image, size_t bytes, cumoe_module *module);

/* STALE_HANDLE unless the function and its context live. */
cumoe_status find_function(cumoe_function function, function_facts *facts);

/* Checks a caller's launch and gives it its normal form. `any_grid`: the grid is not looked at. */
cumoe_status check_launch(const function_facts *facts, const cumoe_launch *launch, bool any_grid, launch_shape *shape,
                          cumoe_stream *stream);

/* Checks arguments against the parameter table and points at each value. A view's is its data. */
cumoe_status check_arguments(const function_facts *facts, const cumoe_arg *args, int32_t count,
                             void *parameters[CUMOE_MAX_PARAMETERS]);

#endif
