/* CUDA C++ from source, through NVRTC, which is opened when it is first needed. */
#include "context.h"
#include "dl.h"
#include "module.h"
#include "status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_OPTIONS = 256, ARCH_BYTES = 64 };

/* NVRTC's own header is not needed to build: this is all that is used of it. */
typedef struct _nvrtcProgram *program;
enum {
  NVRTC_SUCCESS = 0,
  NVRTC_OUT_OF_MEMORY = 1,
  NVRTC_INVALID_OPTION = 5,
  NVRTC_COMPILATION = 6,
  NVRTC_BUILTINS = 7
};

typedef int create_function(program *, const char *source, const char *name, int headers, const char *const *contents,
                            const char *const *names);
typedef int compile_function(program, int count, const char *const *options);
typedef int size_function(program, size_t *bytes);
typedef int get_function(program, char *data);
typedef int destroy_function(program *);
typedef const char *text_function(int result);

static const char *const nvrtc_names[] = {LIBRARY_NAMES("libnvrtc")};
static shared_library nvrtc = {
    .title = "NVRTC", .variable = "CUMOE_NVRTC_PATH", .probe = "nvrtcGetCUBIN", .names = nvrtc_names};

typedef enum entry { CREATE, COMPILE, LOG_SIZE, LOG, CUBIN_SIZE, CUBIN, PTX_SIZE, PTX, DESTROY, TEXT, ENTRIES } entry;
static shared_symbol nvrtc_symbols[ENTRIES] = {
    [CREATE] = {.name = "nvrtcCreateProgram"},       [COMPILE] = {.name = "nvrtcCompileProgram"},
    [LOG_SIZE] = {.name = "nvrtcGetProgramLogSize"}, [LOG] = {.name = "nvrtcGetProgramLog"},
    [CUBIN_SIZE] = {.name = "nvrtcGetCUBINSize"},    [CUBIN] = {.name = "nvrtcGetCUBIN"},
    [PTX_SIZE] = {.name = "nvrtcGetPTXSize"},        [PTX] = {.name = "nvrtcGetPTX"},
    [DESTROY] = {.name = "nvrtcDestroyProgram"},     [TEXT] = {.name = "nvrtcGetErrorString"},
};

/* All of them, before any is called. */
static cumoe_status find_entries(any_function *entries[ENTRIES])
{
  for (int i = 0; i < ENTRIES; ++i) TRY(find_shared(&nvrtc, &nvrtc_symbols[i], &entries[i]));
  return CUMOE_OK;
}

typedef struct job {
  any_function *entries[ENTRIES];
  program program;
  char *log; /* the whole of it, "" if there is none */
  const char *const *options;
  int32_t count;
} job;

static cumoe_status fail_nvrtc(const job *j, int result, const char *call)
{
  const char *text = ((text_function *)j->entries[TEXT])(result);
  const char *log = j->log ? j->log : "";
  switch (result) {
  case NVRTC_OUT_OF_MEMORY: return fail(CUMOE_ERR_OUT_OF_MEMORY, "%s: %s", call, text);
  case NVRTC_INVALID_OPTION: return fail(CUMOE_ERR_INVALID_ARGUMENT, "options: %s: %s", text, log);
  case NVRTC_COMPILATION: return fail(CUMOE_ERR_INVALID_ARGUMENT, "source does not compile: %s", log);
  case NVRTC_BUILTINS:
    return fail(CUMOE_ERR_LIBRARY_MISSING, "%s: %s: is libnvrtc-builtins there? %s", call, text, log);
  default: return fail(CUMOE_ERR_NOT_SUPPORTED, "%s: %s (%d): %s", call, text, result, log);
  }
}

#define TRY_NVRTC(job, call, type, entry, ...)                                                                         \
  do {                                                                                                                 \
    const int result_ = ((type *)(job)->entries[entry])(__VA_ARGS__);                                                  \
    if (result_ != NVRTC_SUCCESS) return fail_nvrtc(job, result_, call);                                               \
  } while (0)

/* ---- one compilation ---- */

static cumoe_status read_log(job *j)
{
  size_t bytes = 0;
  TRY_NVRTC(j, "nvrtcGetProgramLogSize", size_function, LOG_SIZE, j->program, &bytes);
  j->log = calloc(1, bytes + 1);
  if (!j->log) return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for a log of %zu bytes", bytes);
  if (bytes) TRY_NVRTC(j, "nvrtcGetProgramLog", get_function, LOG, j->program, j->log);
  return CUMOE_OK;
}

static cumoe_status run_compiler(job *j)
{
  const int result = ((compile_function *)j->entries[COMPILE])(j->program, (int)j->count, j->options);
  TRY(read_log(j));
  return result == NVRTC_SUCCESS ? CUMOE_OK : fail_nvrtc(j, result, "nvrtcCompileProgram");
}

/* Machine code where the target is a GPU's, PTX where it is a virtual one's. */
static cumoe_status take_image(const job *j, cumoe_image *image)
{
  size_t bytes = 0;
  TRY_NVRTC(j, "nvrtcGetCUBINSize", size_function, CUBIN_SIZE, j->program, &bytes);
  const bool machine_code = bytes != 0;
  if (!machine_code) TRY_NVRTC(j, "nvrtcGetPTXSize", size_function, PTX_SIZE, j->program, &bytes);
  image->data = malloc(bytes ? bytes : 1);
  if (!image->data) return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for an image of %zu bytes", bytes);
  image->bytes = bytes;
  TRY_NVRTC(j, machine_code ? "nvrtcGetCUBIN" : "nvrtcGetPTX", get_function, machine_code ? CUBIN : PTX, j->program,
            image->data);
  return CUMOE_OK;
}

static cumoe_status run_job(job *j, const char *source, cumoe_image *image)
{
  TRY(find_entries(j->entries));
  TRY_NVRTC(j, "nvrtcCreateProgram", create_function, CREATE, &j->program, source, "source.cu", 0, NULL, NULL);
  cumoe_status status = run_compiler(j);
  if (status == CUMOE_OK) status = take_image(j, image);
  (void)((destroy_function *)j->entries[DESTROY])(&j->program);
  return status;
}

/* A caller's own target takes the place of ours. */
static bool names_target(const char *option)
{
  return strncmp(option, "-arch", 5) == 0 || strncmp(option, "--gpu-architecture", 18) == 0;
}

static cumoe_status check_options(const char *const *options, int32_t count, bool *targeted)
{
  REQUIRE(count >= 0 && count <= MAX_OPTIONS, CUMOE_ERR_INVALID_ARGUMENT, "option_count is %d, must be 0 .. %d",
          (int)count, MAX_OPTIONS);
  REQUIRE(options || count == 0, CUMOE_ERR_INVALID_ARGUMENT, "options is null, option_count is %d", (int)count);
  for (int32_t i = 0; i < count; ++i) {
    REQUIRE(options[i], CUMOE_ERR_INVALID_ARGUMENT, "options[%d] is null", (int)i);
    *targeted |= names_target(options[i]);
  }
  return CUMOE_OK;
}

static cumoe_status check_source(const char *source, const char *log, size_t log_bytes)
{
  REQUIRE(source, CUMOE_ERR_INVALID_ARGUMENT, "source is null");
  REQUIRE(log || log_bytes == 0, CUMOE_ERR_INVALID_ARGUMENT, "log is null, log_bytes is %zu", log_bytes);
  return CUMOE_OK;
}

static cumoe_status compile(const char *source, const char *target, const char *const *options, int32_t count,
                            char *log, size_t log_bytes, cumoe_image *image)
{
  bool targeted = false;
  char ours[sizeof "--gpu-architecture=" + ARCH_BYTES];
  const char *all[MAX_OPTIONS + 1];
  TRY(check_options(options, count, &targeted));
  if (count) memcpy(all, options, (size_t)count * sizeof *all);
  (void)snprintf(ours, sizeof ours, "--gpu-architecture=%s", target);
  if (!targeted) all[count++] = ours;
  job j = {.options = all, .count = count};
  const cumoe_status status = run_job(&j, source, image);
  if (log_bytes) (void)snprintf(log, log_bytes, "%s", j.log ? j.log : "");
  free(j.log);
  if (status != CUMOE_OK) cumoe_image_free(image);
  return status;
}

void cumoe_image_free(cumoe_image *image)
{
  if (!image) return;
  free(image->data);
  *image = (cumoe_image){0};
}

cumoe_status cumoe_compile(const char *source, const char *target, const char *const *options, int32_t option_count,
                           char *log, size_t log_bytes, cumoe_image *image)
{
  begin_call(__func__);
  REQUIRE(image, CUMOE_ERR_INVALID_ARGUMENT, "image is null");
  *image = (cumoe_image){0};
  if (log && log_bytes) log[0] = 0;
  TRY(check_source(source, log, log_bytes));
  REQUIRE(target && (strncmp(target, "sm_", 3) == 0 || strncmp(target, "compute_", 8) == 0) &&
              strlen(target) < ARCH_BYTES,
          CUMOE_ERR_INVALID_ARGUMENT, "target is %s, must be like sm_90a or compute_90", target ? target : "null");
  return compile(source, target, options, option_count, log, log_bytes, image);
}

/* From 9.0 on a GPU has features that only its own code may use. */
static void name_target(struct context *context, char target[ARCH_BYTES])
{
  const cumoe_device_info *info = &context->info;
  (void)snprintf(target, ARCH_BYTES, "sm_%d%d%s", (int)info->cc_major, (int)info->cc_minor,
                 info->cc_major >= 9 ? "a" : "");
}

cumoe_status cumoe_module_compile(cumoe_context handle, const char *source, const char *const *options,
                                  int32_t option_count, char *log, size_t log_bytes, cumoe_module *module)
{
  begin_call(__func__);
  struct context *context;
  bool targeted = false;
  char target[ARCH_BYTES];
  cumoe_image image = {0};
  REQUIRE(module, CUMOE_ERR_INVALID_ARGUMENT, "module is null");
  module->id = 0;
  if (log && log_bytes) log[0] = 0;
  TRY(find_context(handle, &context));
  TRY(check_source(source, log, log_bytes));
  TRY(check_options(options, option_count, &targeted));
  REQUIRE(!on_cpu(context), CUMOE_ERR_NOT_SUPPORTED, "the CPU device runs no CUDA code");
  name_target(context, target);
  TRY(compile(source, target, options, option_count, log, log_bytes, &image));
  const cumoe_status status = load_module(context, image.data, image.bytes, module);
  cumoe_image_free(&image);
  return status;
}
