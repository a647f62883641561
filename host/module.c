/* Modules: device code from bytes to kernels and variables. Tables of modules and functions, as of buffers. */
#include "module.h"
#include "context.h"
#include "handles.h"
#include "image.h"
#include "status.h"

#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LOG_BYTES = 4096, JIT_OPTIONS = 2, DEFAULT_SMEM = 48 * 1024 };

/* What the driver may write to whenever it compiles PTX, lazily too: lives as long as the library. */
typedef struct jit {
  enum cudaJitOption options[JIT_OPTIONS];
  void *values[JIT_OPTIONS];
  char log[LOG_BYTES];
} jit;

typedef struct module_record {
  struct context *context;
  cudaLibrary_t library;
  jit *jit;
} module_record;

HANDLE_TABLE(modules, module_record);
HANDLE_TABLE(functions, function_facts);

/* Looking kernels up and unloading exclude each other: no function is published into a module that has gone, and no
 * limit on shared memory is lowered. */
static pthread_mutex_t lookup_lock = PTHREAD_MUTEX_INITIALIZER;

static cumoe_status stale(const char *what, uint64_t id)
{
  return fail(CUMOE_ERR_STALE_HANDLE, "%s 0x%llx was unloaded, or never was a %s", what, (unsigned long long)id, what);
}

static cumoe_status find_module(cumoe_module module, module_record *m)
{
  if (!handle_find(&modules, module.id, m)) return stale("module", module.id);
  return check_process(m->context);
}

cumoe_status find_function(cumoe_function function, function_facts *facts)
{
  if (!handle_find(&functions, function.id, facts)) return stale("function", function.id);
  return check_process(facts->context);
}

/* ---- loading ---- */

static jit *new_jit(void)
{
  jit *j = calloc(1, sizeof *j);
  if (!j) return NULL;
  j->options[0] = cudaJitErrorLogBuffer;
  j->options[1] = cudaJitErrorLogBufferSizeBytes;
  j->values[0] = j->log;
  j->values[1] = (void *)(uintptr_t)LOG_BYTES;
  return j;
}

static cumoe_status explain_load(struct context *context, cudaError_t error, const char *call, const jit *j)
{
  const cumoe_status status = fail_cuda(error, call);
  const size_t length = strnlen(j->log, sizeof j->log);
  if (status == CUMOE_ERR_CUDA_STICKY) return status;
  return fail(status, "%s: %s (%d): %s, on device %d, a %s of compute capability %d.%d%s%.*s", call,
              cudaGetErrorName(error), (int)error, cudaGetErrorString(error), (int)context->device, context->info.name,
              (int)context->info.cc_major, (int)context->info.cc_minor, length ? "; the compiler says: " : "",
              (int)length, j->log);
}

/* Asks for a kernel that no module has: that it is missing is known only once the code was loaded. */
static cudaError_t load_by_asking(cudaLibrary_t library)
{
  cudaKernel_t none = NULL;
  const cudaError_t error = cudaLibraryGetKernel(&none, library, "cumoe: no such kernel");
  if (error != cudaErrorSymbolNotFound) return error;
  clear_cuda_error();
  return cudaSuccess;
}

/* Loading is lazy in most processes: touching a kernel makes the driver do it, and compile, now. Code that cannot be
 * loaded (another architecture's, PTX that does not compile) counts as no kernels. */
static cumoe_status touch(struct context *context, cudaLibrary_t library, const jit *j)
{
  unsigned count = 0;
  cudaKernel_t first = NULL;
  struct cudaFuncAttributes facts;
  cudaError_t error = cudaLibraryGetKernelCount(&count, library);
  if (error == cudaSuccess && count == 0) error = load_by_asking(library);
  if (error == cudaSuccess && count) error = cudaLibraryEnumerateKernels(&first, 1, library);
  if (error == cudaSuccess && count) error = cudaFuncGetAttributes(&facts, (const void *)first);
  return error == cudaSuccess ? CUMOE_OK : explain_load(context, error, "loading its kernels", j);
}

static cumoe_status load_entered(struct context *context, const void *image, jit *j, cudaLibrary_t *library)
{
  const cudaError_t error = cudaLibraryLoadData(library, image, j->options, j->values, JIT_OPTIONS, NULL, NULL, 0);
  if (error != cudaSuccess) {
    *library = NULL;
    return explain_load(context, error, "cudaLibraryLoadData", j);
  }
  const cumoe_status status = touch(context, *library, j);
  if (status != CUMOE_OK && cudaLibraryUnload(*library) != cudaSuccess) clear_cuda_error();
  return status;
}

static cumoe_status load_library(struct context *context, const void *image, jit *j, cudaLibrary_t *library)
{
  ON_DEVICE_RELAXED(context, load_entered(context, image, j, library));
}

/* The handle is gone already. */
static cumoe_status unload_library(const module_record *m)
{
  GIVE_BACK_RELAXED(m->context, CUDA_STATUS(cudaLibraryUnload(m->library)));
}

static close_function unload_all;

static cumoe_status publish_module(struct context *context, const void *image, cumoe_module *module)
{
  module_record m = {.context = context, .jit = new_jit()};
  if (!m.jit) return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for a module");
  on_close(context, CLOSE_MODULES, unload_all);
  cumoe_status status = load_library(context, image, m.jit, &m.library);
  if (status == CUMOE_OK) {
    module->id = handle_publish(&modules, &m);
    if (module->id) return CUMOE_OK;
    (void)unload_library(&m);
    status = fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for another module handle");
  }
  free(m.jit);
  return status;
}

cumoe_status load_module(struct context *context, const void *image, size_t bytes, cumoe_module *module)
{
  image_facts facts;
  REQUIRE(image_inspect(image, bytes, &facts), CUMOE_ERR_INVALID_ARGUMENT, "image: %s", facts.why);
  REQUIRE(!on_cpu(context), CUMOE_ERR_NOT_SUPPORTED, "the CPU device runs no CUDA code");
  return publish_module(context, image, module);
}

/* CUDA reads what was inspected, even if another thread writes to the caller's memory meanwhile. The copy is aligned,
 * as machine code has to be, and ends with a NUL, as PTX has to. */
cumoe_status cumoe_module_load(cumoe_context handle, const void *image, size_t bytes, cumoe_module *module)
{
  begin_call(__func__);
  struct context *context;
  REQUIRE(module, CUMOE_ERR_INVALID_ARGUMENT, "module is null");
  module->id = 0;
  TRY(find_context(handle, &context));
  REQUIRE(image, CUMOE_ERR_INVALID_ARGUMENT, "image is null");
  char *copy = bytes < SIZE_MAX ? malloc(bytes + 1) : NULL;
  REQUIRE(copy, CUMOE_ERR_OUT_OF_MEMORY, "no host memory for a copy of %zu bytes", bytes);
  memcpy(copy, image, bytes);
  copy[bytes] = 0;
  const cumoe_status status = load_module(context, copy, bytes, module);
  free(copy);
  return status;
}

static cumoe_status read_open_file(int file, const char *path, char **data, size_t *bytes)
{
  struct stat facts;
  REQUIRE(fstat(file, &facts) == 0, CUMOE_ERR_INVALID_ARGUMENT, "path %s cannot be read: %s", path, strerror(errno));
  REQUIRE(S_ISREG(facts.st_mode), CUMOE_ERR_INVALID_ARGUMENT, "path %s is no regular file", path);
  const size_t length = (size_t)facts.st_size;
  *data = malloc(length + 1);
  REQUIRE(*data, CUMOE_ERR_OUT_OF_MEMORY, "no host memory for the %zu bytes of %s", length, path);
  for (*bytes = 0; *bytes < length;) {
    const ssize_t more = read(file, *data + *bytes, length - *bytes);
    if (more < 0 && errno == EINTR) continue;
    REQUIRE(more > 0, CUMOE_ERR_INVALID_ARGUMENT, "path %s: %zu of %zu bytes could be read: %s", path, *bytes, length,
            more < 0 ? strerror(errno) : "it became shorter");
    *bytes += (size_t)more;
  }
  (*data)[length] = 0;
  return CUMOE_OK;
}

/* Without waiting: a pipe that nobody writes to would otherwise open when somebody does. */
static cumoe_status read_file(const char *path, char **data, size_t *bytes)
{
  const int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  REQUIRE(file >= 0, CUMOE_ERR_INVALID_ARGUMENT, "path %s cannot be opened: %s", path, strerror(errno));
  const cumoe_status status = read_open_file(file, path, data, bytes);
  (void)close(file);
  return status;
}

cumoe_status cumoe_module_load_file(cumoe_context handle, const char *path, cumoe_module *module)
{
  begin_call(__func__);
  struct context *context;
  char *data = NULL;
  size_t bytes = 0;
  REQUIRE(module, CUMOE_ERR_INVALID_ARGUMENT, "module is null");
  module->id = 0;
  TRY(find_context(handle, &context));
  REQUIRE(path, CUMOE_ERR_INVALID_ARGUMENT, "path is null");
  cumoe_status status = read_file(path, &data, &bytes);
  if (status == CUMOE_OK && data) status = load_module(context, data, bytes, module);
  free(data);
  return status;
}

/* ---- unloading ---- */

/* With the lock held. */
static void retire_functions(uint64_t module)
{
  uint64_t id;
  function_facts f;
  for (uint32_t i = 0; handle_at(&functions, i, &id, &f); ++i)
    if (id && f.module == module) (void)handle_retire(&functions, id, &f);
}

static cumoe_status unload(uint64_t id)
{
  module_record m;
  pthread_mutex_lock(&lookup_lock);
  const bool live = handle_retire(&modules, id, &m);
  if (live) retire_functions(id);
  pthread_mutex_unlock(&lookup_lock);
  if (!live) return stale("module", id);
  const cumoe_status status = unload_library(&m);
  free(m.jit);
  return status;
}

cumoe_status cumoe_module_unload(cumoe_module *module)
{
  begin_call(__func__);
  module_record m;
  REQUIRE(module, CUMOE_ERR_INVALID_ARGUMENT, "module is null");
  if (module->id == 0) return CUMOE_OK;
  TRY(find_module(*module, &m));
  const uint64_t id = module->id;
  module->id = 0;
  return unload(id);
}

static cumoe_status unload_all(struct context *context)
{
  uint64_t id;
  module_record m;
  cumoe_status first = CUMOE_OK;
  for (uint32_t i = 0; handle_at(&modules, i, &id, &m); ++i) {
    if (!id || m.context != context) continue;
    AND_THEN(first, unload(id));
  }
  return first;
}

/* ---- kernels ---- */

/* CUDA tells the end of the table by an error, which could also be a failure: only one that comes twice is the end. */
static cumoe_status read_parameters(function_facts *f)
{
  size_t offset = 0, bytes = 0;
  for (f->parameters = 0;; ++f->parameters) {
    const size_t index = (size_t)f->parameters;
    cudaError_t error = driver_kernel_parameter(f->kernel, index, &offset, &bytes);
    if (error == cudaErrorInvalidValue) {
      const cudaError_t again = driver_kernel_parameter(f->kernel, index, &offset, &bytes);
      if (again == error) return CUMOE_OK;
      error = again == cudaSuccess ? cudaErrorUnknown : again; /* the first answer was none */
    }
    if (error != cudaSuccess) return fail_cuda(error, "cuKernelGetParamInfo");
    REQUIRE(index < CUMOE_MAX_PARAMETERS && bytes <= UINT16_MAX, CUMOE_ERR_NOT_SUPPORTED,
            "kernel %s has more than %d parameters, or one of more than 64 KiB", f->name, CUMOE_MAX_PARAMETERS);
    f->parameter_bytes[index] = (uint16_t)bytes;
  }
}

/* The limit is a property of the kernel on this device, whoever looks it up: never lowered, for another may count on
 * it. */
static cumoe_status set_smem(function_facts *f, uint32_t wanted, const struct cudaFuncAttributes *facts)
{
  const uint64_t total = (uint64_t)wanted + facts->sharedSizeBytes;
  const int32_t limit = f->context->info.smem_per_block_optin;
  REQUIRE(total <= (uint64_t)limit, CUMOE_ERR_INVALID_ARGUMENT,
          "max_dynamic_smem is %u: with the %zu static bytes of %s more than the %d of this GPU", wanted,
          facts->sharedSizeBytes, f->name, (int)limit);
  f->max_dynamic_smem = facts->maxDynamicSharedSizeBytes;
  if ((int64_t)wanted <= f->max_dynamic_smem) return CUMOE_OK;
  f->max_dynamic_smem = (int32_t)wanted;
  return driver_allow_smem(f->context, f->kernel, (int)wanted);
}

static cumoe_status look_up(const module_record *m, const char *name, uint32_t max_dynamic_smem, function_facts *f)
{
  struct cudaFuncAttributes facts;
  cudaError_t error = cudaLibraryGetKernel(&f->kernel, m->library, name);
  if (error == cudaErrorSymbolNotFound) {
    clear_cuda_error();
    return fail(CUMOE_ERR_INVALID_ARGUMENT, "name: there is no kernel %s in the module; C++ kernels need extern \"C\"",
                name);
  }
  if (error != cudaSuccess) return explain_load(m->context, error, "cudaLibraryGetKernel", m->jit);
  TRY(read_parameters(f));
  error = cudaFuncGetAttributes(&facts, (const void *)f->kernel);
  if (error != cudaSuccess) return explain_load(m->context, error, "cudaFuncGetAttributes", m->jit);
  f->max_threads = facts.maxThreadsPerBlock;
  f->static_smem = (int32_t)facts.sharedSizeBytes;
  return set_smem(f, max_dynamic_smem, &facts);
}

static cumoe_status look_up_entered(const module_record *m, const char *name, uint32_t max_dynamic_smem,
                                    function_facts *f)
{
  ON_DEVICE_RELAXED(m->context, look_up(m, name, max_dynamic_smem, f));
}

/* With the lock held. */
static cumoe_status publish_function(cumoe_module module, const char *name, uint32_t max_dynamic_smem,
                                     cumoe_function *function)
{
  module_record m;
  TRY(find_module(module, &m));
  function_facts f = {.context = m.context, .module = module.id};
  REQUIRE(name, CUMOE_ERR_INVALID_ARGUMENT, "name is null");
  REQUIRE(name[0], CUMOE_ERR_INVALID_ARGUMENT, "name is empty");
  (void)snprintf(f.name, sizeof f.name, "%s", name);
  TRY(look_up_entered(&m, name, max_dynamic_smem, &f));
  function->id = handle_publish(&functions, &f);
  return function->id ? CUMOE_OK : fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for another function handle");
}

cumoe_status cumoe_module_function(cumoe_module module, const char *name, uint32_t max_dynamic_smem,
                                   cumoe_function *function)
{
  begin_call(__func__);
  REQUIRE(function, CUMOE_ERR_INVALID_ARGUMENT, "function is null");
  function->id = 0;
  module_record known; /* in a child of fork it is not, and who held the lock is not there */
  TRY(find_module(module, &known));
  pthread_mutex_lock(&lookup_lock);
  const cumoe_status status = publish_function(module, name, max_dynamic_smem, function);
  pthread_mutex_unlock(&lookup_lock);
  return status;
}

/* ---- variables ---- */

static cumoe_status find_global(const module_record *m, const char *name, cumoe_dtype dtype, cumoe_view_mut *global)
{
  const size_t element = cumoe_dtype_bytes(dtype);
  void *data = NULL;
  size_t bytes = 0;
  const cudaError_t error = cudaLibraryGetGlobal(&data, &bytes, m->library, name);
  if (error == cudaErrorSymbolNotFound) {
    clear_cuda_error();
    return fail(CUMOE_ERR_INVALID_ARGUMENT, "name: there is no variable %s in the module", name);
  }
  if (error != cudaSuccess) return explain_load(m->context, error, "cudaLibraryGetGlobal", m->jit);
  REQUIRE(bytes % element == 0, CUMOE_ERR_WRONG_DTYPE, "dtype is %s: the %zu bytes of %s are no multiple of its %zu",
          cumoe_dtype_name(dtype), bytes, name, element);
  *global = cumoe_vector_mut(data, dtype, (int64_t)(bytes / element));
  global->device = m->context->device;
  return CUMOE_OK;
}

cumoe_status cumoe_module_global(cumoe_module module, const char *name, cumoe_dtype dtype, cumoe_view_mut *global)
{
  begin_call(__func__);
  module_record m;
  REQUIRE(global, CUMOE_ERR_INVALID_ARGUMENT, "global is null");
  memset(global, 0, sizeof *global);
  TRY(find_module(module, &m));
  REQUIRE(name && name[0], CUMOE_ERR_INVALID_ARGUMENT, "name is %s", name ? "empty" : "null");
  REQUIRE(cumoe_dtype_bytes(dtype), CUMOE_ERR_WRONG_DTYPE, "dtype is %d, not a cumoe_dtype", (int)dtype);
  ON_DEVICE_RELAXED(m.context, find_global(&m, name, dtype, global));
}
