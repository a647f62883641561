#ifndef CUMOE_KERNEL_H
#define CUMOE_KERNEL_H 
#include "context.h"
#ifdef __cplusplus
extern "C" {
#endif
typedef struct cumoe_module {
  uint64_t id;
} cumoe_module;
typedef struct cumoe_function {
  uint64_t id;
} cumoe_function;
CUMOE_CHECKED cumoe_status cumoe_module_load(cumoe_context context, const void *image, size_t bytes,
                                             cumoe_module *module);
CUMOE_CHECKED cumoe_status cumoe_module_load_file(cumoe_context context, const char *path, cumoe_module *module);
CUMOE_CHECKED cumoe_status cumoe_module_compile(cumoe_context context, const char *source, const char *const *options,
                                                int32_t option_count, char *log, size_t log_bytes,
                                                cumoe_module *module);
typedef struct cumoe_image {
  void *data;
  size_t bytes;
} cumoe_image;
CUMOE_CHECKED cumoe_status cumoe_compile(const char *source, const char *target, const char *const *options,
                                         int32_t option_count, char *log, size_t log_bytes, cumoe_image *image);
CUMOE_API void cumoe_image_free(cumoe_image *image);
CUMOE_API cumoe_status cumoe_module_unload(cumoe_module *module);
CUMOE_CHECKED cumoe_status cumoe_module_global(cumoe_module module, const char *name, cumoe_dtype dtype,
                                               cumoe_view_mut *global);
CUMOE_CHECKED cumoe_status cumoe_module_function(cumoe_module module, const char *name, uint32_t max_dynamic_smem,
                                                 cumoe_function *function);
enum { CUMOE_MAX_PARAMETERS = 64 };
typedef struct cumoe_function_info {
  uint32_t size;
  int32_t registers;
  int32_t static_smem, max_dynamic_smem;
  int32_t local_bytes;
  int32_t constant_bytes;
  int32_t max_threads;
  int32_t ptx_version, binary_version;
  int32_t parameters;
  uint32_t parameter_bytes[CUMOE_MAX_PARAMETERS];
} cumoe_function_info;
CUMOE_CHECKED cumoe_status cumoe_function_get_info(cumoe_function function, cumoe_function_info *info);
enum { CUMOE_LAUNCH_EARLY = 1, CUMOE_LAUNCH_COOPERATIVE = 2 };
typedef struct cumoe_launch {
  uint32_t size;
  uint32_t flags;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster[3];
  uint32_t dynamic_smem;
  cumoe_stream stream;
} cumoe_launch;
static inline cumoe_launch cumoe_launch_elements(int64_t n, cumoe_stream stream)
{
  cumoe_launch l = {(uint32_t)sizeof(cumoe_launch), 0, {0, 1, 1}, {256, 1, 1}, {0, 0, 0}, 0, stream};
  int64_t blocks = n < 0 ? -1 : n / 256 + (n % 256 != 0);
  l.grid[0] = blocks < 0 || blocks > INT32_MAX ? UINT32_MAX : (uint32_t)blocks;
  return l;
}
typedef enum cumoe_arg_kind {
  CUMOE_ARG_I32 = 1,
  CUMOE_ARG_U32 = 2,
  CUMOE_ARG_I64 = 3,
  CUMOE_ARG_U64 = 4,
  CUMOE_ARG_F32 = 5,
  CUMOE_ARG_F64 = 6,
  CUMOE_ARG_VIEW = 7,
  CUMOE_ARG_VIEW_MUT = 8,
  CUMOE_ARG_BYTES = 9
} cumoe_arg_kind;
typedef struct cumoe_arg {
  uint32_t kind;
  uint32_t bytes;
  union {
    int64_t i64;
    uint64_t u64;
    int32_t i32;
    uint32_t u32;
    float f32;
    double f64;
    cumoe_view view;
    cumoe_view_mut view_mut;
    const void *blob;
  } value;
} cumoe_arg;
#define CUMOE_ARG_CONSTRUCTOR(name,type,KIND) \
  static inline cumoe_arg cumoe_arg_##name(type value) \
  { \
    cumoe_arg a; \
    a.kind = CUMOE_ARG_##KIND; \
    a.bytes = 0; \
    a.value.name = value; \
    return a; \
  }
CUMOE_ARG_CONSTRUCTOR(i32, int32_t, I32)
CUMOE_ARG_CONSTRUCTOR(u32, uint32_t, U32)
CUMOE_ARG_CONSTRUCTOR(i64, int64_t, I64)
CUMOE_ARG_CONSTRUCTOR(u64, uint64_t, U64)
CUMOE_ARG_CONSTRUCTOR(f32, float, F32)
CUMOE_ARG_CONSTRUCTOR(f64, double, F64)
CUMOE_ARG_CONSTRUCTOR(view, cumoe_view, VIEW)
CUMOE_ARG_CONSTRUCTOR(view_mut, cumoe_view_mut, VIEW_MUT)
#undef CUMOE_ARG_CONSTRUCTOR
static inline cumoe_arg cumoe_arg_bytes(const void *blob, size_t bytes)
{
  cumoe_arg a;
  a.kind = CUMOE_ARG_BYTES;
  a.bytes = bytes > UINT32_MAX ? UINT32_MAX : (uint32_t)bytes;
  a.value.blob = blob;
  return a;
}
CUMOE_CHECKED cumoe_status cumoe_launch_kernel(cumoe_function function, const cumoe_launch *launch,
                                               const cumoe_arg *args, int32_t arg_count);
typedef struct cumoe_occupancy {
  uint32_t size;
  int32_t blocks_per_sm;
  int32_t clusters;
  int32_t largest_cluster;
  uint64_t spare_smem;
} cumoe_occupancy;
CUMOE_CHECKED cumoe_status cumoe_function_occupancy(cumoe_function function, const cumoe_launch *launch,
                                                    cumoe_occupancy *occupancy);
CUMOE_CHECKED cumoe_status cumoe_function_block(cumoe_function function, uint32_t dynamic_smem, uint32_t *threads);
#ifdef __cplusplus
}
#endif
#endif
