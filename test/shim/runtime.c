/* The shim's devices, errors, streams, graphs, libraries and launches. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../host/plan.h"
#include "../../kernels/ep/ep.h"

/* ---- errors ---- */

cudaError_t cudaPeekAtLastError(void)
{
  (void)BEGIN(SHIM_NEUTRAL | SHIM_FAULTLESS, "%s", "");
  const cudaError_t error = thread.last;
  (void)shim_end(cudaSuccess);
  return error;
}

cudaError_t cudaGetLastError(void)
{
  (void)BEGIN(SHIM_NEUTRAL | SHIM_FAULTLESS, "%s", "");
  const cudaError_t error = thread.last;
  if (!shim_sticky(error)) thread.last = cudaSuccess;
  (void)shim_end(cudaSuccess);
  return error;
}

const char *cudaGetErrorName(cudaError_t error)
{
  switch ((int)error) {
  case cudaSuccess: return "cudaSuccess";
#define ERROR_CASE(name)                                                                                               \
  case cudaError##name: return "cudaError" #name;
    ERROR_CASE(InvalidValue)
    ERROR_CASE(MemoryAllocation)
    ERROR_CASE(InsufficientDriver)
    ERROR_CASE(NoDevice)
    ERROR_CASE(InvalidDevice)
    ERROR_CASE(NoKernelImageForDevice)
    ERROR_CASE(IllegalAddress)
    ERROR_CASE(StreamCaptureUnsupported)
    ERROR_CASE(StreamCaptureImplicit)
    ERROR_CASE(StreamCaptureInvalidated)
    ERROR_CASE(InvalidResourceHandle)
    ERROR_CASE(SymbolNotFound)
    ERROR_CASE(LaunchFailure)
    ERROR_CASE(InvalidConfiguration)
  default: return "cudaErrorOther";
  }
}

const char *cudaGetErrorString(cudaError_t error)
{
  return error == cudaSuccess ? "no error" : "an error of the shim";
}

/* ---- devices ---- */

cudaError_t cudaDriverGetVersion(int *version)
{
  (void)BEGIN(SHIM_QUERY | SHIM_FAULTLESS, "%s", "");
  *version = shim.driver;
  return shim_end(cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int *count)
{
  cudaError_t error = BEGIN(SHIM_QUERY, "%s", "");
  *count = 0;
  if (error == cudaSuccess && shim.devices == 0) error = cudaErrorNoDevice;
  if (error == cudaSuccess) *count = shim.devices;
  return shim_end(error);
}

cudaError_t cudaGetDevice(int *device)
{
  cudaError_t error = BEGIN(SHIM_QUERY, "%s", "");
  *device = current_device();
  return shim_end(error);
}

cudaError_t cudaSetDevice(int device)
{
  cudaError_t error = BEGIN(SHIM_NEUTRAL, "%d", device);
  if (error == cudaSuccess && (device < 0 || device >= shim.devices)) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) {
    if (thread.depth == 0) thread.depth = 1;
    thread.stack[thread.depth - 1] = &primaries[device];
  }
  return shim_end(error);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *facts, int device)
{
  cudaError_t error = BEGIN(SHIM_QUERY, "%d", device);
  if (error == cudaSuccess && (device < 0 || device >= shim.devices)) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess) {
    memset(facts, 0, sizeof *facts);
    snprintf(facts->name, sizeof facts->name, "Shim %d.%d", shim.major, shim.minor);
    facts->major = shim.major;
    facts->minor = shim.minor;
    facts->totalGlobalMem = shim.memory;
    facts->multiProcessorCount = shim.processors;
    facts->l2CacheSize = 50 << 20;
    facts->sharedMemPerBlock = 48 * 1024;
    facts->sharedMemPerBlockOptin = (size_t)shim.smem;
    facts->sharedMemPerMultiprocessor = (size_t)shim.smem + 1024;
    facts->memoryPoolsSupported = !shim.no_pools;
    facts->pageableMemoryAccessUsesHostPageTables = shim.reads_pages;
  }
  return shim_end(error);
}

/* ---- streams ---- */

static struct CUstream_st defaults[MAX_DEVICES][2]; /* legacy, per thread */

struct CUstream_st *stream_of(cudaStream_t stream)
{
  const int device = current_device();
  if (stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    struct CUstream_st *s = &defaults[device][stream == cudaStreamPerThread];
    s->object.device = device;
    return s;
  }
  return (struct CUstream_st *)object_find(STREAM, stream);
}

cudaError_t stream_takes_work(cudaStream_t stream)
{
  struct CUstream_st *s = stream_of(stream);
  if (s == NULL || s->object.device != current_device()) return cudaErrorInvalidResourceHandle;
  if (s->invalid) return cudaErrorStreamCaptureInvalidated;
  if (s == &defaults[current_device()][0] && implicit_capture()) {
    invalidate_captures();
    return cudaErrorStreamCaptureImplicit;
  }
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT, "flags %u", flags);
  if (error == cudaSuccess) {
    *out = (cudaStream_t)object_new(STREAM, sizeof **out);
    (*out)->flags = flags;
  }
  return shim_end(error);
}

cudaError_t cudaStreamCreate(cudaStream_t *out)
{
  return cudaStreamCreateWithFlags(out, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
  cudaError_t error = BEGIN(SHIM_ALLOC, "%s", "");
  struct CUstream_st *s = (struct CUstream_st *)object_find(STREAM, stream);
  if (s != NULL)
    object_end(&s->object);
  else if (error == cudaSuccess)
    error = cudaErrorInvalidResourceHandle;
  return shim_end(error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
  cudaError_t error = BEGIN(SHIM_SYNC | SHIM_CONTEXT | SHIM_UNSAFE, "%s", "");
  if (error == cudaSuccess) error = stream_takes_work(stream);
  if (error == cudaSuccess && stream_of(stream)->graph != NULL) {
    stream_of(stream)->invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return shim_end(error);
}

/* ---- capture ---- */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
  cudaError_t error = BEGIN(SHIM_QUERY | SHIM_CONTEXT, "%s", "");
  struct CUstream_st *s = stream_of(stream);
  if (error == cudaSuccess && s == NULL) error = cudaErrorInvalidResourceHandle;
  if (error == cudaSuccess && !s->invalid) error = stream_takes_work(stream);
  if (error == cudaSuccess)
    *status = s->graph == NULL ? cudaStreamCaptureStatusNone
              : s->invalid     ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return shim_end(error);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
  cudaError_t error = BEGIN(SHIM_CONTEXT, "mode %d", (int)mode);
  struct CUstream_st *s = (struct CUstream_st *)object_find(STREAM, stream);
  if (error == cudaSuccess && (s == NULL || s->graph != NULL)) error = cudaErrorStreamCaptureUnsupported;
  if (error == cudaSuccess) {
    s->graph = (struct CUgraph_st *)object_new(GRAPH, sizeof *s->graph);
    s->invalid = false;
    s->mode = mode;
    s->thread = pthread_self();
  }
  return shim_end(error);
}

static void end_graph(struct CUgraph_st *graph)
{
  __real_free(graph->nodes);
  object_end(&graph->object);
}

/* False: one has work that the capture's own stream does not wait for. */
static bool end_forks(const struct CUgraph_st *graph)
{
  bool joined = true;
  for (object *o = shim_objects(); o != NULL; o = o->next) {
    struct CUstream_st *s = (struct CUstream_st *)o;
    if (o->kind != STREAM || s->graph != graph || !s->forked) continue;
    joined = joined && !s->loose;
    s->graph = NULL;
    s->forked = s->loose = false;
  }
  return joined;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
  cudaError_t error = BEGIN(SHIM_CONTEXT, "%s", "");
  struct CUstream_st *s = (struct CUstream_st *)object_find(STREAM, stream);
  *out = NULL;
  if (s == NULL || s->graph == NULL) {
    error = error ? error : cudaErrorIllegalState;
  } else {
    if (error == cudaSuccess && s->invalid) error = cudaErrorStreamCaptureInvalidated;
    if (!end_forks(s->graph) && error == cudaSuccess) error = cudaErrorStreamCaptureUnjoined;
    if (error == cudaSuccess)
      *out = s->graph;
    else
      end_graph(s->graph);
    s->graph = NULL;
    s->invalid = false;
  }
  return shim_end(error);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
  cudaError_t error = BEGIN(SHIM_NEUTRAL, "%d", (int)*mode);
  if (error == cudaSuccess) {
    const enum cudaStreamCaptureMode before = thread.mode;
    thread.mode = *mode;
    *mode = before;
  }
  return shim_end(error);
}

void graph_add(struct CUgraph_st *graph, const node *n)
{
  graph->nodes = __real_realloc(graph->nodes, (size_t)(graph->count + 1) * sizeof *n);
  graph->nodes[graph->count++] = *n;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_CONTEXT, "flags %llu", flags);
  if (error == cudaSuccess && object_find(GRAPH, graph) == NULL) error = cudaErrorInvalidValue;
  if (error == cudaSuccess) {
    *out = (cudaGraphExec_t)object_new(GRAPH_EXEC, sizeof **out);
    (*out)->count = graph->count;
    (*out)->nodes = __real_malloc((size_t)graph->count * sizeof *graph->nodes + 1);
    if (graph->count) memcpy((*out)->nodes, graph->nodes, (size_t)graph->count * sizeof *graph->nodes);
  }
  return shim_end(error);
}

/* Of test/emulate/, where that is linked. */
extern bool shim_emulate(const char *kernel, const void *args, const unsigned grid[2], unsigned threads)
    __attribute__((weak));

/* By the caller's thread: it may wait for what others run. */
static cudaError_t run_kernel(const node *n)
{
  if (!shim.emulates || n->kernel_name == NULL) return cudaSuccess;
  shim_unlock();
  const bool known = shim_emulate(n->kernel_name, n->args, n->grid, n->threads);
  shim_lock();
  return known ? cudaSuccess : cudaErrorLaunchFailure;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
  cudaError_t error = BEGIN(SHIM_LAUNCH | SHIM_CONTEXT, "%s", "");
  if (error == cudaSuccess && object_find(GRAPH_EXEC, exec) == NULL) error = cudaErrorInvalidValue;
  if (error == cudaSuccess) error = stream_takes_work(stream);
  for (int i = 0; error == cudaSuccess && i < exec->count; i++) {
    const node *n = &exec->nodes[i];
    if (n->text[0])
      note_text(n->text), error = run_kernel(n);
    else
      error = shim_move(n);
  }
  return shim_end(error);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
  cudaError_t error = BEGIN(SHIM_ALLOC, "%s", "");
  if (object_find(GRAPH_EXEC, exec) != NULL) {
    __real_free(exec->nodes);
    object_end(&exec->object);
  } else if (error == cudaSuccess) {
    error = cudaErrorInvalidValue;
  }
  return shim_end(error);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
  cudaError_t error = BEGIN(SHIM_ALLOC, "%s", "");
  if (object_find(GRAPH, graph) != NULL)
    end_graph(graph);
  else if (error == cudaSuccess)
    error = cudaErrorInvalidValue;
  return shim_end(error);
}

/* ---- libraries ---- */

/* What every library of a caller holds: two kernels, and a variable of 16 bytes that is called counter. Behind them
 * those of groups, whose library is taken for a caller's. */
enum { CALLERS = -1, OF_GROUPS = -2 };
static const variant caller_rows[] = {
    {.name = "add", .op = CALLERS},
    {.name = "nothing", .op = CALLERS},
#define MOVE(move)             {.name = #move, .op = OF_GROUPS},
#define MOVE_WITH(move, takes) {.name = #move, .op = OF_GROUPS, .smem = (int32_t)sizeof(takes)},
#include "../../kernels/ep/moves.def"
};
enum { CALLER_KERNELS = 2, CALLER_ROWS = sizeof caller_rows / sizeof caller_rows[0], ROWS = 1024, COUNTER_BYTES = 16 };
static const size_t add_bytes[] = {8, 8, 8, 4};

/* A kernel's handle is its row of the table. */
static const variant *row_of(const void *kernel)
{
  const variant *v = kernel;
  if (v >= caller_rows && v < caller_rows + CALLER_ROWS) return v;
  return v >= variants && v < variants + variant_count ? v : NULL;
}

static int index_of(const variant *v)
{
  if (variant_count > ROWS) abort(); /* rows would share a place */
  return v >= caller_rows && v < caller_rows + CALLER_ROWS ? ROWS + (int)(v - caller_rows) : (int)(v - variants);
}

static bool is_callers(const void *image)
{
  for (int32_t i = 0; i < variant_count; i++)
    if (variants[i].image == image) return false;
  return true;
}

static const void *last_image;

const void *shim_last_image(void)
{
  return last_image;
}

static bool is_loaded(const variant *v)
{
  for (object *o = shim_objects(); o != NULL; o = o->next) {
    if (o->kind != LIBRARY) continue;
    const void *image = ((struct CUlib_st *)o)->image;
    if (v->op < 0 ? is_callers(image) : image == v->image) return true;
  }
  return false;
}

static int dynamic_limit[MAX_DEVICES][ROWS + CALLER_ROWS]; /* by row: bytes above the default that were asked for */

cudaError_t cudaLibraryLoadData(cudaLibrary_t *out, const void *code, enum cudaJitOption *jit, void **jit_values,
                                unsigned jit_count, enum cudaLibraryOption *options, void **values, unsigned count)
{
  (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values;
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_UNSAFE, "%u options", count);
  if (error == cudaSuccess && shim.no_image) error = cudaErrorNoKernelImageForDevice;
  if (error == cudaSuccess) {
    *out = (cudaLibrary_t)object_new(LIBRARY, sizeof **out);
    (*out)->image = last_image = code;
    if (is_callers(code))
      for (int i = 0; i < MAX_DEVICES * CALLER_KERNELS; i++)
        dynamic_limit[i / CALLER_KERNELS][ROWS + i % CALLER_KERNELS] = 0;
  }
  return shim_end(error);
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
  cudaError_t error = BEGIN(SHIM_ALLOC | SHIM_UNSAFE, "%s", "");
  if (object_find(LIBRARY, library) != NULL)
    object_end(&library->object);
  else if (error == cudaSuccess)
    error = cudaErrorInvalidResourceHandle;
  return shim_end(error);
}

/* Rows are asked for in the table's order: the search goes on from the last one. */
static const variant *row_in(cudaLibrary_t library, const char *name)
{
  static int32_t last;
  const bool callers = variants[last].image != library->image && is_callers(library->image);
  const variant *rows = callers ? caller_rows : variants;
  const int32_t count = callers ? CALLER_ROWS : variant_count, first = callers ? 0 : last;
  for (int32_t n = 0; n < count; n++) {
    const int32_t i = first + n < count ? first + n : first + n - count;
    if ((!callers && rows[i].image != library->image) || strcmp(rows[i].name, name) != 0) continue;
    if (!callers) last = i;
    return &rows[i];
  }
  return NULL;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *out, cudaLibrary_t library, const char *name)
{
  cudaError_t error = BEGIN(SHIM_QUERY, "%s", name);
  if (error == cudaSuccess && object_find(LIBRARY, library) == NULL) error = cudaErrorInvalidResourceHandle;
  if (error == cudaSuccess) {
    const variant *v = shim.missing != NULL && strcmp(name, shim.missing) == 0 ? NULL : row_in(library, name);
    if (v == NULL) error = cudaErrorSymbolNotFound;
    if (v != NULL) *out = (cudaKernel_t)(uintptr_t)v;
  }
  return shim_end(error);
}

cudaError_t cudaLibraryGetKernelCount(unsigned *count, cudaLibrary_t library)
{
  cudaError_t error = BEGIN(SHIM_QUERY, "%s", "");
  if (error == cudaSuccess && object_find(LIBRARY, library) == NULL) error = cudaErrorInvalidResourceHandle;
  if (error == cudaSuccess) *count = CALLER_KERNELS;
  return shim_end(error);
}

cudaError_t cudaLibraryEnumerateKernels(cudaKernel_t *kernels, unsigned count, cudaLibrary_t library)
{
  cudaError_t error = BEGIN(SHIM_QUERY, "%u", count);
  if (error == cudaSuccess && object_find(LIBRARY, library) == NULL) error = cudaErrorInvalidResourceHandle;
  for (unsigned i = 0; error == cudaSuccess && i < count && i < CALLER_KERNELS; i++)
    kernels[i] = (cudaKernel_t)(uintptr_t)&caller_rows[i];
  return shim_end(error);
}

cudaError_t cudaLibraryGetGlobal(void **data, size_t *bytes, cudaLibrary_t library, const char *name)
{
  cudaError_t error = BEGIN(SHIM_QUERY | SHIM_CONTEXT, "%s", name);
  if (error == cudaSuccess && object_find(LIBRARY, library) == NULL) error = cudaErrorInvalidResourceHandle;
  if (error == cudaSuccess && strcmp(name, "counter") != 0) error = cudaErrorSymbolNotFound;
  if (error == cudaSuccess) {
    *data = (void *)(uintptr_t)0x7000; /* no kernel of the shim touches it */
    *bytes = COUNTER_BYTES;
  }
  return shim_end(error);
}

static cudaError_t parameter_of(const void *kernel, size_t index, size_t *offset, size_t *bytes)
{
  const variant *v = row_of(kernel);
  const size_t count = v == &caller_rows[0] ? sizeof add_bytes / sizeof add_bytes[0] : v && v->op >= 0;
  if (v == NULL) return cudaErrorInvalidResourceHandle;
  if (index >= count) return cudaErrorInvalidValue;
  *offset = index * 8;
  *bytes = v->op < 0 ? add_bytes[index] : (size_t)variant_arg_bytes(v) + shim.more_parameter;
  return cudaSuccess;
}

CUresult kernel_parameter(CUkernel kernel, size_t index, size_t *offset, size_t *bytes)
{
  const cudaError_t error = shim_begin("cuKernelGetParamInfo", SHIM_QUERY, "%zu", index);
  return shim_end_driver(error == cudaSuccess ? parameter_of(kernel, index, offset, bytes) : error);
}

/* ---- occupancy: as many blocks as 2048 threads are ---- */

static cudaError_t occupancy(const void *kernel, int *out, int value)
{
  cudaError_t error = BEGIN(SHIM_QUERY | SHIM_CONTEXT, "%s", "");
  if (error == cudaSuccess && row_of(kernel) == NULL) error = cudaErrorInvalidResourceHandle;
  if (error == cudaSuccess) *out = value;
  return shim_end(error);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t smem)
{
  return occupancy(kernel, blocks, threads <= shim.max_threads && smem <= (size_t)shim.smem ? 2048 / threads : 0);
}

cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, const void *kernel, int blocks, int threads)
{
  int value = 0;
  (void)threads;
  const cudaError_t error = occupancy(kernel, &value, shim.smem / (blocks > 0 ? blocks : 1));
  *bytes = (size_t)value;
  return error;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config)
{
  return occupancy(kernel, clusters, config->numAttrs > 0 ? 16 : 0);
}

cudaError_t cudaOccupancyMaxPotentialClusterSize(int *size, const void *kernel, const cudaLaunchConfig_t *config)
{
  (void)config;
  return occupancy(kernel, size, 8);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *facts, const void *kernel)
{
  cudaError_t error = BEGIN(SHIM_QUERY | SHIM_CONTEXT, "%s", row_of(kernel) ? row_of(kernel)->name : "?");
  if (error == cudaSuccess && (row_of(kernel) == NULL || !is_loaded(row_of(kernel))))
    error = cudaErrorInvalidResourceHandle;
  if (error == cudaSuccess && row_of(kernel)->arch == ARCH_sm90 && shim.major != 9)
    error = cudaErrorNoKernelImageForDevice;
  if (error == cudaSuccess) {
    memset(facts, 0, sizeof *facts);
    facts->maxThreadsPerBlock = shim.max_threads;
    facts->numRegs = 64;
    facts->binaryVersion = facts->ptxVersion = shim.major * 10 + shim.minor;
    if (row_of(kernel)->op >= 0) dynamic_limit[current_device()][index_of(row_of(kernel))] = 0;
    const int limit = dynamic_limit[current_device()][index_of(row_of(kernel))];
    facts->maxDynamicSharedSizeBytes = limit > 0 ? limit : 48 * 1024;
  }
  return shim_end(error);
}

CUresult kernel_attribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device)
{
  const variant *v = row_of(kernel);
  cudaError_t error = shim_begin("cuKernelSetAttribute", 0, "%s %d = %d", v ? v->name : "?", (int)attribute, value);
  if (error == cudaSuccess && (v == NULL || value > shim.smem)) error = cudaErrorInvalidValue;
  if (error == cudaSuccess && attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    dynamic_limit[device][index_of(v)] = value;
  return shim_end_driver(error);
}

/* ---- launches ---- */

enum { KEPT = 64 };

static struct {
  const variant *row;
  _Alignas(64) unsigned char args[4096];
} kept[KEPT];
static int kept_count;

const void *shim_last_args(const char *part)
{
  for (int i = kept_count; i > 0 && i > kept_count - KEPT; i--)
    if (strstr(kept[(i - 1) % KEPT].row->name, part) != NULL) return kept[(i - 1) % KEPT].args;
  return NULL;
}

/* Of a kernel's one argument, or of a group's kernel's two, one behind the other; 0: it is a caller's. */
static size_t take_arguments(const variant *v, void **args, unsigned char *to)
{
  const size_t first = v->op >= 0 ? (size_t)variant_arg_bytes(v) : v->op == OF_GROUPS ? (size_t)v->smem : 0;
  if (first) memcpy(to, args[0], first);
  if (v->op != OF_GROUPS) return first;
  memcpy(to + first, args[first != 0], sizeof(ep_args));
  return first + sizeof(ep_args);
}

static cudaError_t check_launch(const CUlaunchConfig *c, const variant *v)
{
  const unsigned threads = c->blockDimX * c->blockDimY * c->blockDimZ;
  if (v == NULL || !is_loaded(v)) return cudaErrorInvalidResourceHandle;
  const int limit = dynamic_limit[current_device()][index_of(v)];
  if (c->gridDimX == 0 || (v->op != OF_GROUPS && c->gridDimY != 1) || c->gridDimY == 0 || c->gridDimZ != 1)
    return cudaErrorInvalidConfiguration;
  if (threads == 0 || threads > (unsigned)shim.max_threads) return cudaErrorInvalidConfiguration;
  if (c->sharedMemBytes > (unsigned)(limit > 48 * 1024 ? limit : 48 * 1024)) return cudaErrorInvalidValue;
  return stream_takes_work(c->hStream);
}

CUresult launch_kernel_ex(const CUlaunchConfig *c, CUfunction kernel, void **args, void **extra)
{
  node n = {.rows = 0};
  const variant *v = row_of(kernel);
  (void)extra;
  snprintf(n.text, sizeof n.text, "%s grid %u block %u smem %u attrs %u stream %d", v ? v->name : "?", c->gridDimX,
           c->blockDimX, c->sharedMemBytes, c->numAttrs, c->hStream != NULL);
  cudaError_t error = shim_begin("cuLaunchKernelEx", SHIM_LAUNCH | SHIM_CONTEXT, "%s", n.text);
  if (error == cudaSuccess) error = check_launch(c, v);
  if (error == cudaSuccess) {
    kept[kept_count % KEPT].row = v;
    n.kernel_name = take_arguments(v, args, n.args) ? v->name : NULL;
    memcpy(kept[kept_count % KEPT].args, n.args, sizeof n.args);
    n.grid[0] = c->gridDimX;
    n.grid[1] = c->gridDimY;
    n.threads = c->blockDimX;
    kept_count++;
    struct CUstream_st *s = stream_of(c->hStream);
    s->loose = s->forked;
    if (s->graph != NULL)
      graph_add(s->graph, &n);
    else
      error = run_kernel(&n);
  }
  return shim_end_driver(error);
}
