/* THE launch path. Kernels and their attributes were set up at context creation; nothing is initialised here. */
#include "launch.h"

static cumoe_status explain(cudaError_t error, const variant *v, int64_t grid)
{
  cumoe_status status = fail_cuda(error, v->name);
  return fail(status, "%s: %s: kernel %s, grid %lld, block %d, shared memory %d bytes", cudaGetErrorName(error),
              cudaGetErrorString(error), v->name, (long long)grid, (int)v->threads, (int)v->smem);
}

cumoe_status launch(cumoe_context context, int32_t index, int64_t grid, bool early, const void *args,
                    cumoe_stream stream)
{
  const variant *v = &variants[index];
  if (grid == 0) return CUMOE_OK;
  if (v->cpu) {
    threads_run(context->threads, v->cpu, args, grid);
    return CUMOE_OK;
  }
  if (grid > INT32_MAX)
    return fail(CUMOE_ERR_NOT_SUPPORTED, "%s would need %lld CTAs, the limit is 2^31 - 1", v->name, (long long)grid);
  cudaLaunchAttribute overlap = {.id = cudaLaunchAttributeProgrammaticStreamSerialization,
                                 .val = {.programmaticStreamSerializationAllowed = 1}};
  cudaLaunchConfig_t config = {
      .gridDim = {(unsigned)grid, 1, 1},
      .blockDim = {(unsigned)v->threads, 1, 1},
      .dynamicSmemBytes = (size_t)v->smem,
      .stream = stream,
      .attrs = &overlap,
      .numAttrs = early && context->waits[index], /* one that starts early and does not wait would race */
  };
  void *parameters[] = {(void *)(uintptr_t)args};
  cudaError_t error = cudaLaunchKernelExC(&config, (const void *)context->kernels[index], parameters);
  return error == cudaSuccess ? CUMOE_OK : explain(error, v, grid);
}
