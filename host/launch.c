/* THE launch path. Kernels and their attributes were set up at context creation; nothing is initialised here. */
#include "launch.h"
#include "context.h"
#include "status.h"
#include "threads.h"

static cumoe_status explain(cudaError_t error, const char *name, const launch_shape *s)
{
  const cumoe_status status = fail_cuda(error, name);
  return fail(status, "%s: %s: kernel %s, grid %u, %u, %u, block %u, %u, %u, shared memory %zu bytes",
              cudaGetErrorName(error), cudaGetErrorString(error), name, s->grid.x, s->grid.y, s->grid.z, s->block.x,
              s->block.y, s->block.z, s->smem);
}

void launch_config(const launch_shape *shape, cumoe_stream stream, cudaLaunchAttribute attributes[LAUNCH_ATTRIBUTES],
                   cudaLaunchConfig_t *config)
{
  unsigned count = 0;
  if (shape->early)
    attributes[count++] = (cudaLaunchAttribute){.id = cudaLaunchAttributeProgrammaticStreamSerialization,
                                                .val = {.programmaticStreamSerializationAllowed = 1}};
  if (shape->cooperative)
    attributes[count++] = (cudaLaunchAttribute){.id = cudaLaunchAttributeCooperative, .val = {.cooperative = 1}};
  if (shape->cluster.x) {
    attributes[count] = (cudaLaunchAttribute){.id = cudaLaunchAttributeClusterDimension};
    attributes[count].val.clusterDim.x = shape->cluster.x;
    attributes[count].val.clusterDim.y = shape->cluster.y;
    attributes[count++].val.clusterDim.z = shape->cluster.z;
  }
  *config = (cudaLaunchConfig_t){.gridDim = shape->grid,
                                 .blockDim = shape->block,
                                 .dynamicSmemBytes = shape->smem,
                                 .stream = stream,
                                 .attrs = attributes,
                                 .numAttrs = count};
}

cumoe_status launch_kernel(cudaKernel_t kernel, const char *name, const launch_shape *shape, void **parameters,
                           cumoe_stream stream)
{
  cudaLaunchAttribute attributes[LAUNCH_ATTRIBUTES];
  cudaLaunchConfig_t config;
  launch_config(shape, stream, attributes, &config);
  const cudaError_t error = driver_launch(&config, kernel, parameters);
  return error == cudaSuccess ? CUMOE_OK : explain(error, name, shape);
}

cumoe_status launch(struct context *context, const launch_step *s, const void *args, cumoe_stream stream)
{
  const variant *v = &variants[s->row];
  if (s->grid == 0) return CUMOE_OK;
  if (v->cpu) {
    threads_run(context->threads, v->cpu, args, s->grid);
    return CUMOE_OK;
  }
  const launch_shape shape = {
      .grid = {(unsigned)s->grid, 1, 1},
      .block = {(unsigned)v->threads, 1, 1},
      .smem = (size_t)v->smem,
      .early = s->early && context->waits[s->row], /* one that starts early and does not wait would race */
  };
  void *parameters[] = {(void *)(uintptr_t)args};
  return launch_kernel(context->kernels[s->row], v->name, &shape, parameters, stream);
}
