/* Contexts: device facts, kernels, pool, fault record. Whatever is slow or may fail happens here, once. */
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "buffer.h"
#include "check.h"
#include "memory.h"
#include "objects.h"
#include "pool.h"
#include "status.h"
#include "threads.h"
#include "weights.h"

enum { MAX_DEBUG_LEVEL = 2, DEFAULT_SMEM = 48 * 1024, WAITS_FROM = 90 };

/* ---- fork: neither CUDA nor the worker threads survive it ---- */

static atomic_uint forks;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

/* A lock that another thread holds meanwhile would stay locked in the child for good. */
static void hold_tables(void)
{
  hold_buffers(true);
  hold_objects(true);
}

static void release_tables(void)
{
  hold_objects(false);
  hold_buffers(false);
}

static void begin_child(void)
{
  release_tables();
  forget_log_readers();
  atomic_fetch_add(&forks, 1);
}

static void watch_forks(void)
{
  (void)pthread_atfork(hold_tables, release_tables, begin_child);
}

uint32_t count_forks(void)
{
  return atomic_load_explicit(&forks, memory_order_relaxed);
}

cumoe_status check_forks(uint32_t before)
{
  if (before != count_forks())
    return fail(CUMOE_ERR_NOT_SUPPORTED, "context was made before fork(); a child process must make its own");
  return CUMOE_OK;
}

cumoe_status check_process(const struct context *context)
{
  return check_forks(context->forks);
}

cumoe_status find_context(cumoe_context handle, struct context **context)
{
  void *found;
  TRY(find_object(OBJECT_CONTEXT, "context", handle, &found));
  *context = found;
  return CUMOE_OK;
}

/* ---- the driver, for what the runtime cannot do ---- */

cumoe_status find_driver_function(const char *name, unsigned version, driver_function **function)
{
  void *entry = NULL;
  enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  TRY_CUDA(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess)
    return fail(CUMOE_ERR_DRIVER_TOO_OLD, "the CUDA driver has no %s of CUDA %u.%u", name, version / 1000,
                version % 1000 / 10);
  memcpy(function, &entry, sizeof *function);
  return CUMOE_OK;
}

static struct {
  CUresult (*get_current)(CUcontext *);
  CUresult (*push_current)(CUcontext);
  CUresult (*pop_current)(CUcontext *);
  CUresult (*get_device)(CUdevice *);
  CUresult (*retain_primary)(CUcontext *, CUdevice);
  CUresult (*kernel_parameter)(CUkernel, size_t, size_t *, size_t *);
  CUresult (*set_attribute)(CUfunction_attribute, int, CUkernel, CUdevice);
  CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
  bool complete;
} driver;
static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;

static cumoe_status look_up_driver(void)
{
  TRY(find_driver_function("cuCtxGetCurrent", 12000, (driver_function **)&driver.get_current));
  TRY(find_driver_function("cuCtxPushCurrent", 12000, (driver_function **)&driver.push_current));
  TRY(find_driver_function("cuCtxPopCurrent", 12000, (driver_function **)&driver.pop_current));
  TRY(find_driver_function("cuCtxGetDevice", 12000, (driver_function **)&driver.get_device));
  TRY(find_driver_function("cuDevicePrimaryCtxRetain", 12000, (driver_function **)&driver.retain_primary));
  TRY(find_driver_function("cuKernelGetParamInfo", 12040, (driver_function **)&driver.kernel_parameter));
  TRY(find_driver_function("cuKernelSetAttribute", 12000, (driver_function **)&driver.set_attribute));
  TRY(find_driver_function("cuLaunchKernelEx", 12000, (driver_function **)&driver.launch));
  driver.complete = true;
  return CUMOE_OK;
}

/* Not pthread_once: a look-up that fails is tried again by the next context. */
static cumoe_status find_driver(void)
{
  pthread_mutex_lock(&driver_lock);
  cumoe_status status = driver.complete ? CUMOE_OK : look_up_driver();
  pthread_mutex_unlock(&driver_lock);
  return status;
}

/* The driver's codes are the runtime's. */
#define TRY_DRIVER(name, call)                                                                                         \
  do {                                                                                                                 \
    CUresult try_result_ = (call);                                                                                     \
    if (try_result_ != CUDA_SUCCESS) return fail_cuda((cudaError_t)try_result_, name);                                 \
  } while (0)

cudaError_t driver_kernel_parameter(cudaKernel_t kernel, size_t index, size_t *offset, size_t *bytes)
{
  return (cudaError_t)driver.kernel_parameter(kernel, index, offset, bytes);
}

cumoe_status driver_allow_smem(const struct context *context, cudaKernel_t kernel, int bytes)
{
  const CUfunction_attribute limit = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  TRY_DRIVER("cuKernelSetAttribute", driver.set_attribute(limit, bytes, kernel, context->device));
  return CUMOE_OK;
}

cudaError_t driver_launch(const cudaLaunchConfig_t *c, cudaKernel_t kernel, void **parameters)
{
  const CUlaunchConfig config = driver_config(c);
  return (cudaError_t)driver.launch(&config, (CUfunction)(void *)kernel, parameters, NULL);
}

/* ---- current device ---- */

/* Not cudaSetDevice: to restore the device of a thread that has none yet, that would create a CUDA context on
 * GPU 0, half a gigabyte of it. A current context of the engine's own making is left alone if it is on the
 * same GPU. */
static cumoe_status push_device(struct context *context, device_scope *scope)
{
  CUcontext current = NULL;
  CUdevice device = -1;
  TRY_DRIVER("cuCtxGetCurrent", driver.get_current(&current));
  if (current == context->primary) return CUMOE_OK;
  if (current != NULL) TRY_DRIVER("cuCtxGetDevice", driver.get_device(&device));
  if (device == context->device) return CUMOE_OK;
  TRY_DRIVER("cuCtxPushCurrent", driver.push_current(context->primary));
  scope->pushed = true;
  return CUMOE_OK;
}

cumoe_status enter_lost_device(struct context *context, device_scope *scope)
{
  *scope = (device_scope){.outer = run_for(context)};
  if (on_cpu(context)) return CUMOE_OK;
  note_cuda_error();
  const cumoe_status status = push_device(context, scope);
  if (status != CUMOE_OK) (void)run_for(scope->outer);
  return status;
}

cumoe_status enter_device(struct context *context, device_scope *scope)
{
  TRY(check_alive(context));
  return enter_lost_device(context, scope);
}

void leave_device(device_scope *scope)
{
  CUcontext ours = NULL;
  if (scope->pushed) (void)driver.pop_current(&ours);
  (void)run_for(scope->outer);
}

enum cudaStreamCaptureMode relax_capture(void)
{
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) clear_cuda_error();
  return mode;
}

/* Relaxed before, or relaxing failed: there is nothing to restore. */
void restore_capture(enum cudaStreamCaptureMode before)
{
  if (before != cudaStreamCaptureModeRelaxed && cudaThreadExchangeStreamCaptureMode(&before) != cudaSuccess)
    clear_cuda_error();
}

/* ---- opening a CUDA device ---- */

static cumoe_status read_facts(struct context *context)
{
  struct cudaDeviceProp facts;
  TRY_CUDA(cudaGetDeviceProperties(&facts, context->device));
  cumoe_device_info *info = &context->info;
  info->cc_major = facts.major;
  info->cc_minor = facts.minor;
  info->multiprocessors = facts.multiProcessorCount;
  info->l2_bytes = facts.l2CacheSize;
  info->smem_per_block_optin = (int32_t)facts.sharedMemPerBlockOptin;
  info->smem_per_sm = (int32_t)facts.sharedMemPerMultiprocessor;
  info->total_memory = (int64_t)facts.totalGlobalMem;
  (void)snprintf(info->name, sizeof info->name, "%.*s", (int)sizeof info->name - 1, facts.name);
  context->reads_pages = facts.pageableMemoryAccessUsesHostPageTables;
  machine_init(&context->machine, info->name, info->cc_major * 10 + info->cc_minor, info->multiprocessors,
               info->smem_per_block_optin);
  if (facts.memoryPoolsSupported) return CUMOE_OK;
  return fail(CUMOE_ERR_NOT_SUPPORTED, "device %d (%s) has no memory pools", context->device, info->name);
}

static cumoe_status no_image(struct context *context, const char *what, const char *why)
{
  const cumoe_device_info *info = &context->info;
  return fail(CUMOE_ERR_NO_KERNEL_IMAGE,
              "device %d is a %s of compute capability %d.%d; this build has code for %s (%s: %s)", context->device,
              info->name, info->cc_major, info->cc_minor, cumoe_architectures(), what, why);
}

static cumoe_status load_image(struct context *context, const variant *v)
{
  if (context->library_count == MAX_IMAGES) return fail(CUMOE_ERR_INTERNAL, "more than %d kernel images", MAX_IMAGES);
  enum cudaLibraryOption option = cudaLibraryBinaryIsPreserved; /* rodata: the driver needs no copy */
  int yes = 1;
  void *value = &yes;
  cudaLibrary_t library = NULL;
  cudaError_t error = cudaLibraryLoadData(&library, v->image, NULL, NULL, 0, &option, &value, 1);
  if (error != cudaSuccess) {
    cumoe_status status = fail_cuda(error, "cudaLibraryLoadData");
    return status == CUMOE_ERR_NO_KERNEL_IMAGE ? no_image(context, v->name, cudaGetErrorName(error)) : status;
  }
  context->images[context->library_count] = v->image;
  context->libraries[context->library_count++] = library;
  return CUMOE_OK;
}

/* Reading the attributes makes the driver load the kernel now; its lazy loading could otherwise fall into a
 * capture. */
static cumoe_status prepare_kernel(struct context *context, const variant *v, cudaKernel_t kernel, bool *waits)
{
  struct cudaFuncAttributes facts;
  cudaError_t error = cudaFuncGetAttributes(&facts, (const void *)kernel);
  if (error != cudaSuccess) {
    cumoe_status status = fail_cuda(error, "cudaFuncGetAttributes");
    return status == CUMOE_ERR_NO_KERNEL_IMAGE ? no_image(context, v->name, cudaGetErrorName(error)) : status;
  }
  if (facts.maxThreadsPerBlock < v->threads)
    return fail(CUMOE_ERR_INTERNAL, "%s was compiled for %d threads, its row has %d", v->name, facts.maxThreadsPerBlock,
                v->threads);
  size_t offset = 0, bytes = 0;
  TRY_DRIVER("cuKernelGetParamInfo", driver.kernel_parameter(kernel, 0, &offset, &bytes));
  if (bytes != (size_t)variant_arg_bytes(v))
    return fail(CUMOE_ERR_INTERNAL, "%s takes an argument of %zu bytes, the host's has %d", v->name, bytes,
                (int)variant_arg_bytes(v));
  /* wait_for_earlier_grids is empty in code that was compiled for less than sm_90. On a newer GPU such code still runs,
   * from its PTX: what counts is the architecture that it was written out for, not the one that runs it. */
  *waits = facts.ptxVersion >= WAITS_FROM && facts.binaryVersion >= WAITS_FROM;
  if (v->smem + (int)facts.sharedSizeBytes <= DEFAULT_SMEM) return CUMOE_OK;
  return driver_allow_smem(context, kernel, v->smem);
}

static cumoe_status load_kernel(struct context *context, int32_t index, cudaLibrary_t library)
{
  const variant *v = &variants[index];
  cudaKernel_t kernel = NULL;
  cudaError_t error = cudaLibraryGetKernel(&kernel, library, v->kernel);
  if (error == cudaErrorSymbolNotFound) {
    clear_cuda_error();
    return fail(CUMOE_ERR_INTERNAL, "kernel %s is not in its image", v->kernel);
  }
  if (error != cudaSuccess) {
    cumoe_status status = fail_cuda(error, "cudaLibraryGetKernel");
    return status == CUMOE_ERR_NO_KERNEL_IMAGE ? no_image(context, v->name, cudaGetErrorName(error)) : status;
  }
  TRY(prepare_kernel(context, v, kernel, &context->waits[index]));
  context->kernels[index] = kernel;
  return CUMOE_OK;
}

/* A row that needs more shared memory than the GPU has stays without a kernel. */
static cumoe_status load_row(struct context *context, int32_t index)
{
  const variant *v = &variants[index];
  if (context->kernels[index] || !runs_on(&context->machine, v)) return CUMOE_OK;
  int32_t image = 0;
  while (image < context->library_count && context->images[image] != v->image) image++;
  if (image == context->library_count) TRY(load_image(context, v));
  return load_kernel(context, index, context->libraries[image]);
}

/* The format of weights without which nobody launches the row, or none: most processes have one format or two, and
 * loading the kernels for all takes as long as all else of a context. */
static weight_format needed_for(const variant *v)
{
  const weight_format format = (weight_format)v->format;
  return v->bm && format_is_scaled(format) ? format : FORMAT_none;
}

/* Whether the row may be chosen for weights of the format; without one, for any. */
static bool is_for(const variant *v, weight_format format)
{
  return needed_for(v) == FORMAT_none ? format == FORMAT_none : takes_format(v, format);
}

static cumoe_status load_rows(struct context *context, weight_format format)
{
  for (int32_t i = 0; i < variant_count; i++)
    if (is_for(&variants[i], format) && !operation_is_late((operation)variants[i].op)) TRY(load_row(context, i));
  return CUMOE_OK;
}

static cumoe_status load_kernels(struct context *context)
{
  if (context->machine.cc < MIN_CC) return no_image(context, "kernels", "compute capability 8.0 is the least");
  return load_rows(context, FORMAT_none);
}

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;

cumoe_status load_for_weights(struct context *context, weight_format format)
{
  if (on_cpu(context) || !format_is_scaled(format)) return CUMOE_OK;
  const enum cudaStreamCaptureMode before = relax_capture();
  pthread_mutex_lock(&load_lock);
  const cumoe_status status = load_rows(context, format);
  pthread_mutex_unlock(&load_lock);
  restore_capture(before);
  return status;
}

static cumoe_status load_rows_of(struct context *context, operation op)
{
  for (int32_t i = 0; i < variant_count; i++)
    if (variants[i].op == (int)op && variants[i].image) TRY(load_row(context, i));
  atomic_store_explicit(&context->loaded[op], true, memory_order_release);
  return CUMOE_OK;
}

cumoe_status load_for_operation(struct context *context, operation op)
{
  if (on_cpu(context) || atomic_load_explicit(&context->loaded[op], memory_order_acquire)) return CUMOE_OK;
  const enum cudaStreamCaptureMode before = relax_capture();
  pthread_mutex_lock(&load_lock);
  const cumoe_status status = load_rows_of(context, op);
  pthread_mutex_unlock(&load_lock);
  restore_capture(before);
  return status;
}

cumoe_status load_for_row(struct context *context, int32_t index)
{
  const operation op = (operation)variants[index].op;
  if (operation_is_late(op)) ON_DEVICE(context, load_for_operation(context, op));
  if (needed_for(&variants[index]) == FORMAT_none) return CUMOE_OK;
  ON_DEVICE(context, load_for_weights(context, needed_for(&variants[index])));
}

/* In a stream of its own: the default stream would drag a capture of another thread into an error. */
static cumoe_status make_fault_record(struct context *context)
{
  TRY_CUDA(cudaHostAlloc((void **)&context->fault.mirror, sizeof *context->fault.mirror,
                         cudaHostAllocMapped | cudaHostAllocPortable));
  *context->fault.mirror = 0;
  TRY_CUDA(cudaMalloc((void **)&context->fault.record, sizeof *context->fault.record));
  cudaStream_t stream = NULL;
  TRY_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaError_t error = cudaMemsetAsync(context->fault.record, 0, sizeof *context->fault.record, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cudaError_t ended = cudaStreamDestroy(stream);
  if (error == cudaSuccess) error = ended;
  return error == cudaSuccess ? CUMOE_OK : fail_cuda(error, "clearing the fault record");
}

static cumoe_status open_entered(struct context *context)
{
  TRY(read_facts(context));
  TRY(pool_open(context));
  TRY(load_kernels(context));
  if (context->info.cc_major == 9) TRY(find_driver_function("cuTensorMapEncodeTiled", 12000, &context->encode_tiled));
  return make_fault_record(context);
}

/* The runtime never gives a primary context back either: memory and streams of the engine may live in it. */
static cumoe_status open_cuda(struct context *context, int32_t device)
{
  note_cuda_error();
  int count = 0;
  TRY_CUDA(cudaGetDeviceCount(&count));
  if (device >= count)
    return fail(CUMOE_ERR_NO_DEVICE, "device %d does not exist: CUDA devices here are numbered 0 to %d", device,
                count - 1);
  TRY(find_driver());
  TRY_DRIVER("cuDevicePrimaryCtxRetain", driver.retain_primary(&context->primary, device));
  context->device = context->info.device = device;
  device_scope scope;
  TRY(enter_device(context, &scope));
  enum cudaStreamCaptureMode before = relax_capture();
  cumoe_status status = open_entered(context);
  restore_capture(before);
  leave_device(&scope);
  return status;
}

/* ---- closing ---- */

/* Work in flight may use the buffers and the code, on any stream. cudaDeviceSynchronize would wait for it,
 * but break every capture under way on the device; cudaFree waits just as well, and breaks none. */
static cumoe_status wait_device(struct context *context)
{
  if (context->fault.record != NULL) TRY_CUDA(cudaFree(context->fault.record));
  return CUMOE_OK;
}

void on_close(struct context *context, close_step step, close_function *close)
{
  atomic_store_explicit(&context->closers[step], close, memory_order_release);
}

/* The first failure. */
static cumoe_status run_closers(struct context *context)
{
  cumoe_status first = CUMOE_OK;
  for (int step = 0; step < CLOSE_STEPS; step++) {
    close_function *const close = atomic_load_explicit(&context->closers[step], memory_order_acquire);
    if (close != NULL) AND_THEN(first, close(context));
  }
  return first;
}

/* Works on half-made contexts and on a lost device: every object is given back whatever the others say. */
static cumoe_status close_entered(struct context *context)
{
  cumoe_status status = wait_device(context);
  AND_THEN(status, run_closers(context));
  for (int32_t i = 0; i < context->library_count; i++) DROP_CUDA(&status, cudaLibraryUnload(context->libraries[i]));
  if (context->fault.mirror != NULL) DROP_CUDA(&status, cudaFreeHost(context->fault.mirror));
  AND_THEN(status, pool_close(context));
  return status;
}

static cumoe_status close_cuda(struct context *context)
{
  device_scope scope;
  cumoe_status status = enter_lost_device(context, &scope);
  const bool entered = status == CUMOE_OK;
  enum cudaStreamCaptureMode before = relax_capture();
  AND_THEN(status, close_entered(context));
  restore_capture(before);
  leave_device(&scope);
  return entered && status == CUMOE_ERR_CUDA_STICKY ? check_alive(context) : status;
}

/* ---- the CPU device ---- */

static cumoe_status open_cpu(struct context *context, int32_t threads)
{
  cumoe_device_info *info = &context->info;
  context->device = info->device = CUMOE_DEVICE_CPU;
  context->threads = threads_create(threads);
  if (context->threads == NULL) return fail(CUMOE_ERR_OUT_OF_MEMORY, "the CPU device's threads could not be made");
  info->multiprocessors = threads_count(context->threads);
  info->total_memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  (void)snprintf(info->name, sizeof info->name, "CPU, %d threads", info->multiprocessors);
  machine_init(&context->machine, info->name, 0, info->multiprocessors, 0);
  context->fault.record = &context->cpu_fault_record;
  context->fault.mirror = &context->cpu_fault_mirror;
  return CUMOE_OK;
}

static void close_cpu(struct context *context)
{
  (void)run_closers(context);
  threads_destroy(context->threads);
}

/* ---- create, destroy ---- */

static cumoe_status close_device(struct context *context)
{
  cumoe_status status = CUMOE_OK;
  if (on_cpu(context))
    close_cpu(context);
  else
    status = close_cuda(context);
  free(context);
  return status;
}

static cumoe_status open_device(struct context *context, int32_t device, const cumoe_context_config *config)
{
  TRY(pool_configure(&context->pool, config));
  return device == CUMOE_DEVICE_CPU ? open_cpu(context, config->cpu_threads) : open_cuda(context, device);
}

/* fallback: why this device and no other; "" for the one that was asked for. */
static cumoe_status open_one(int32_t device, const cumoe_context_config *config, const char *fallback,
                             cumoe_context *made)
{
  struct context *context = calloc(1, sizeof *context);
  if (context == NULL) return fail(CUMOE_ERR_OUT_OF_MEMORY, "%zu bytes of host memory", sizeof *context);
  context->device = CUMOE_DEVICE_CPU;
  context->forks = count_forks();
  context->info.size = sizeof context->info;
  context->debug = config->debug;
  (void)snprintf(context->info.fallback, sizeof context->info.fallback, "%s", fallback);
  cumoe_status status = open_device(context, device, config);
  if (status == CUMOE_OK) *made = publish_object(OBJECT_CONTEXT, context, context);
  if (status == CUMOE_OK && *made == NULL) status = fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for another context");
  if (status != CUMOE_OK) {
    AND_THEN(status, close_device(context));
    return status;
  }
  log_message(CUMOE_LOG_INFO, "cumoe: device %d: %s (%s)", context->device, context->info.name,
              kernels_in_words(&context->machine));
  return CUMOE_OK;
}

/* The first ordinal that opens; without any, the reason given is that of device 0. */
static cumoe_status open_auto(const cumoe_context_config *config, cumoe_context *made)
{
  error_text before, why;
  save_error(&before);
  for (int32_t device = 0;; device++) {
    cumoe_status status = open_one(device, config, "", made);
    if (status == CUMOE_OK) break;
    if (device == 0) save_error(&why);
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) clear_cuda_error();
    if (device + 1 < count) continue;
    log_message(CUMOE_LOG_WARNING, "no usable GPU, the CPU device is used instead: %s", why.text);
    TRY(open_one(CUMOE_DEVICE_CPU, config, why.text, made));
    break;
  }
  restore_error(&before);
  return CUMOE_OK;
}

/* The level that is configured, or the environment's if that is higher. */
static cumoe_status choose_debug_level(int32_t configured, int32_t *level)
{
  REQUIRE(configured >= 0 && configured <= MAX_DEBUG_LEVEL, CUMOE_ERR_INVALID_ARGUMENT,
          "config.debug is %d, must be 0 .. %d", (int)configured, MAX_DEBUG_LEVEL);
  const char *text = getenv("CUMOE_DEBUG");
  *level = configured;
  if (text == NULL || text[0] == 0) return CUMOE_OK;
  const int32_t wanted = text[0] - '0';
  if (text[1] != 0 || wanted < 0 || wanted > MAX_DEBUG_LEVEL)
    log_message(CUMOE_LOG_WARNING, "cumoe: CUMOE_DEBUG is \"%s\", must be 0 .. %d: ignored", text, MAX_DEBUG_LEVEL);
  else if (wanted > configured)
    *level = wanted;
  return CUMOE_OK;
}

/* Everything that can be refused before a device is touched. */
static cumoe_status check_config(const cumoe_context_config *from, cumoe_context_config *to)
{
  memory_pool unused = {.cuda = NULL};
  *to = (cumoe_context_config){.size = sizeof *to};
  if (from != NULL) TRY(take_struct("config", from, to));
  REQUIRE(to->cpu_threads >= 0, CUMOE_ERR_INVALID_ARGUMENT, "config.cpu_threads is %d, must be 0 (one a core) or more",
          (int)to->cpu_threads);
  REQUIRE(to->reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "config.reserved is %d, must be 0", (int)to->reserved);
  TRY(pool_configure(&unused, to));
  return choose_debug_level(to->debug, &to->debug);
}

cumoe_status cumoe_context_create(int32_t device, const cumoe_context_config *config, cumoe_context *context)
{
  begin_call(__func__);
  cumoe_context_config c;
  if (context == NULL) return fail(CUMOE_ERR_INVALID_ARGUMENT, "context is NULL");
  *context = NULL;
  TRY(check_config(config, &c));
  if (device < CUMOE_DEVICE_CPU)
    return fail(CUMOE_ERR_INVALID_ARGUMENT, "device is %d: give an ordinal, CUMOE_DEVICE_AUTO or CUMOE_DEVICE_CPU",
                device);
  (void)pthread_once(&fork_once, watch_forks);
  ranges_open();
  return device == CUMOE_DEVICE_AUTO ? open_auto(&c, context) : open_one(device, &c, "", context);
}

cumoe_status cumoe_context_destroy(cumoe_context handle)
{
  begin_call(__func__);
  struct context *context;
  if (handle == NULL) return CUMOE_OK;
  TRY(find_context(handle, &context));
  return retire_object(handle) ? close_device(context) : find_context(handle, &context);
}

cumoe_status cumoe_context_info(cumoe_context handle, cumoe_device_info *info)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_struct("info", info));
  give_struct(&context->info, info);
  return CUMOE_OK;
}

cumoe_status cumoe_synchronize(cumoe_context handle, cumoe_stream stream)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  return memory_wait(context, stream);
}

/* ---- fault record ---- */

int cumoe_fault_pending(cumoe_context handle)
{
  begin_call(__func__);
  struct context *context;
  if (find_context(handle, &context) != CUMOE_OK) return 0;
  return __atomic_load_n(context->fault.mirror, __ATOMIC_ACQUIRE) != 0;
}

cumoe_status cumoe_fault_read(cumoe_context handle, cumoe_stream stream, cumoe_fault *fault)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_struct("fault", fault));
  uint64_t record = 0;
  if (on_cpu(context)) {
    record = __atomic_load_n(context->fault.record, __ATOMIC_ACQUIRE);
  } else {
    TRY(memory_wait(context, stream)); /* also refuses capture */
    TRY(memory_copy(context, &record, sizeof record, context->fault.record, sizeof record, sizeof record, 1,
                    cudaMemcpyDeviceToHost, stream));
    TRY(memory_wait(context, stream));
  }
  const cumoe_fault first = {.code = (int32_t)(record >> 56),
                             .slot = (int32_t)(record >> 44 & 0xfff),
                             .token = (int64_t)(record & 0xfffffffffffULL)};
  give_struct(&first, fault);
  return CUMOE_OK;
}

cumoe_status cumoe_fault_clear(cumoe_context handle, cumoe_stream stream)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (on_cpu(context)) {
    __atomic_store_n(context->fault.record, 0, __ATOMIC_RELEASE);
    __atomic_store_n(context->fault.mirror, 0, __ATOMIC_RELEASE);
    return CUMOE_OK;
  }
  TRY(memory_fill(context, context->fault.record, sizeof(uint64_t), 0, sizeof(uint64_t), 1, stream));
  return memory_fill(context, context->fault.mirror, sizeof(uint32_t), 0, sizeof(uint32_t), 1, stream);
}
