/* NVRTC and cuBLAS as far as the host layer uses them: what dlopen and dlsym give. A call may be made to fail with any
 * of the library's own codes (channel SHIM_LIBRARY). The compiler's image is what the shim's driver takes for one. */
#include "core.h"

#include <dlfcn.h>
#include <string.h>

void *__real_dlopen(const char *name, int flags);
void *__real_dlsym(void *handle, const char *symbol);
void *__wrap_dlopen(const char *name, int flags);
void *__wrap_dlsym(void *handle, const char *symbol);

static char nvrtc_handle, cublas_handle;
static const char ptx[] = ".version 8.0\n.target sm_90\n.address_size 64\n", log_text[] = "a remark";

static int planned(const char *name)
{
  return shim_planned(SHIM_LIBRARY, name);
}

static int make(object **out, const char *name)
{
  const int code = planned(name);
  if (code == 0) *out = object_new(FOREIGN, sizeof **out);
  return code;
}

static int end(object *o, const char *name)
{
  const int code = planned(name);
  object_end(o);
  return code;
}

/* ---- NVRTC ---- */

static int create_program(object **p, const char *source, const char *name, int headers, const char *const *contents,
                          const char *const *names)
{
  (void)source, (void)name, (void)headers, (void)contents, (void)names;
  return make(p, "nvrtcCreateProgram");
}
static int compile_program(object *p, int count, const char *const *options)
{
  (void)p, (void)count, (void)options;
  return planned("nvrtcCompileProgram");
}
static int log_size(object *p, size_t *bytes)
{
  (void)p;
  *bytes = sizeof log_text;
  return planned("nvrtcGetProgramLogSize");
}
static int get_log(object *p, char *to)
{
  (void)p;
  memcpy(to, log_text, sizeof log_text);
  return planned("nvrtcGetProgramLog");
}
static int cubin_size(object *p, size_t *bytes)
{
  (void)p;
  *bytes = shim.ptx_only ? 0 : sizeof ptx;
  return planned("nvrtcGetCUBINSize");
}
static int ptx_size(object *p, size_t *bytes)
{
  (void)p;
  *bytes = sizeof ptx;
  return planned("nvrtcGetPTXSize");
}
static int get_image(object *p, char *to)
{
  (void)p;
  memcpy(to, ptx, sizeof ptx);
  return planned("nvrtcGetCUBIN");
}
static int destroy_program(object **p)
{
  return end(*p, "nvrtcDestroyProgram");
}
static const char *error_text(int code)
{
  return code == 0 ? "success" : "an error of the shim's compiler";
}

/* ---- cuBLAS ---- */

static int create_handle(object **out)
{
  return make(out, "cublasCreate");
}
static int destroy_handle(object *o)
{
  return end(o, "cublasDestroy");
}
static int set_mode(object *o, int mode)
{
  (void)o, (void)mode;
  return planned("cublasSetMathMode");
}
static int set_stream(object *o, cudaStream_t stream)
{
  (void)o, (void)stream;
  return planned("cublasSetStream");
}
static int set_workspace(object *o, void *workspace, size_t bytes)
{
  (void)o, (void)workspace, (void)bytes;
  return planned("cublasSetWorkspace");
}
/* The arguments are the test on a GPU's to check. */
static int multiply(object *o, ...)
{
  (void)o;
  return planned("cublasGemmStridedBatchedEx_64");
}

/* ---- the loader ---- */

#define FUNCTION(handle, name, function)                                                                               \
  {                                                                                                                    \
    &handle, name, (void (*)(void))function                                                                            \
  }
static const struct {
  const void *handle;
  const char *name;
  void (*function)(void);
} functions[] = {
    FUNCTION(nvrtc_handle, "nvrtcCreateProgram", create_program),
    FUNCTION(nvrtc_handle, "nvrtcCompileProgram", compile_program),
    FUNCTION(nvrtc_handle, "nvrtcGetProgramLogSize", log_size),
    FUNCTION(nvrtc_handle, "nvrtcGetProgramLog", get_log),
    FUNCTION(nvrtc_handle, "nvrtcGetCUBINSize", cubin_size),
    FUNCTION(nvrtc_handle, "nvrtcGetCUBIN", get_image),
    FUNCTION(nvrtc_handle, "nvrtcGetPTXSize", ptx_size),
    FUNCTION(nvrtc_handle, "nvrtcGetPTX", get_image),
    FUNCTION(nvrtc_handle, "nvrtcDestroyProgram", destroy_program),
    FUNCTION(nvrtc_handle, "nvrtcGetErrorString", error_text),
    FUNCTION(cublas_handle, "cublasCreate_v2", create_handle),
    FUNCTION(cublas_handle, "cublasDestroy_v2", destroy_handle),
    FUNCTION(cublas_handle, "cublasSetMathMode", set_mode),
    FUNCTION(cublas_handle, "cublasSetStream_v2", set_stream),
    FUNCTION(cublas_handle, "cublasSetWorkspace_v2", set_workspace),
    FUNCTION(cublas_handle, "cublasGemmStridedBatchedEx_64", multiply),
};

void *__wrap_dlopen(const char *name, int flags)
{
  const bool nvrtc = name != NULL && strstr(name, "libnvrtc.so") != NULL;
  const bool cublas = name != NULL && strstr(name, "libcublas.so") != NULL;
  if (name != NULL && strstr(name, "libnccl.so") != NULL) return shim.nccl != 0 ? shim_nccl_handle() : NULL;
  if (!nvrtc && !cublas) return __real_dlopen(name, flags);
  if (shim.no_libraries || flags & RTLD_NOLOAD) return NULL;
  return nvrtc ? &nvrtc_handle : &cublas_handle;
}

void *__wrap_dlsym(void *handle, const char *symbol)
{
  void *found = NULL;
  if (handle == shim_nccl_handle()) return nccl_function(symbol);
  if (handle != &nvrtc_handle && handle != &cublas_handle) return __real_dlsym(handle, symbol);
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
    if (functions[i].handle == handle && strcmp(functions[i].name, symbol) == 0 &&
        (shim.hidden == NULL || strcmp(shim.hidden, symbol) != 0))
      memcpy(&found, &functions[i].function, sizeof found);
  return found;
}
