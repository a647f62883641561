/*
 * A caller's own kernels: run-time compilation (needs NVRTC, no GPU), and on a GPU modules of every kind, lookups,
 * launches, occupancy, and what is left after a kernel has lost the device. Loads lib/test/kernel.*, made from
 * test/kernel.cu.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "test.h"

static const char *built(const char *suffix)
{
  static char path[512];
  const char *lib = getenv("LIB");
  snprintf(path, sizeof path, "%s/test/kernel%s", lib && lib[0] ? lib : "lib", suffix);
  return path;
}

static void *read_whole(const char *path, size_t *bytes)
{
  FILE *file = fopen(path, "rb");
  *bytes = 0;
  if (!CHECK_MSG(file != NULL, "%s cannot be read", path)) return NULL;
  char *data = scratch(1 << 20, 1);
  *bytes = fread(data, 1, 1 << 20, file);
  fclose(file);
  return data;
}

static const char *const suffixes[] = {".ptx", ".fatbin", ".sm_80.cubin", ".sm_90.cubin"};

/* Bytes that pass the inspection are refused for the device only. */
static void test_cpu(cumoe_context context)
{
  cumoe_module module;
  char folder[] = "/tmp/cumoe-XXXXXX", fifo[40];
  for (int i = 0; i < 4; i++) {
    size_t bytes = 0;
    case_begin("kernel%s", suffixes[i]);
    CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_module_load_file(context, built(suffixes[i]), &module));
    CHECK(module.id == 0);
    char *data = read_whole(built(suffixes[i]), &bytes);
    CHECK(bytes > 100);
    CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_module_load(context, data, bytes, &module));
    if (i > 0) CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_module_load(context, data, bytes - 1, &module));
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_module_load(context, data + 1, bytes - 1, &module));
    case_end();
  }
  case_begin("files");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_module_load_file(context, "no/such/file", &module));
  CHECK_TEXT("no/such/file cannot be opened: No such file");
  CHECK(mkdtemp(folder) && mkfifo(strcat(strcpy(fifo, folder), "/fifo"), 0600) == 0);
  const char *const strange[] = {"test", "/dev/null", fifo};
  for (int i = 0; i < 3; i++) {
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_module_load_file(context, strange[i], &module));
    CHECK_TEXT("is no regular file");
  }
  CHECK(unlink(fifo) == 0 && rmdir(folder) == 0);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_module_load_file(context, "test/kernel.cu", &module));
  CHECK_TEXT("neither a fatbin nor a cubin nor PTX");
  case_end();
  case_begin("source");
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_module_compile(context, "", NULL, 0, NULL, 0, &module));
  case_end();
}

static const char plain_source[] =
    "extern \"C\" __global__ void add(const float *a, const float *b, float *sum, int n)\n"
    "{\n"
    "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "  if (i < n) sum[i] = a[i] + b[i];\n"
    "}\n";

static bool have_nvrtc(void)
{
  cumoe_image image;
  const cumoe_status status = cumoe_compile("", "compute_80", NULL, 0, NULL, 0, &image);
  cumoe_image_free(&image);
  return status != CUMOE_ERR_LIBRARY_MISSING;
}

static void *compile_in_thread(void *failures)
{
  cumoe_image image;
  if (cumoe_compile(plain_source, "sm_80", NULL, 0, NULL, 0, &image) != CUMOE_OK) ++*(int *)failures;
  cumoe_image_free(&image);
  return NULL;
}

static void test_targets(cumoe_context context)
{
  static const char *const targets[] = {"sm_80", "sm_90a", "compute_80"};
  cumoe_image image;
  cumoe_module module;
  char log[256];
  for (int i = 0; i < 3; i++) {
    case_begin("%s", targets[i]);
    CHECK_OK(cumoe_compile(plain_source, targets[i], NULL, 0, log, sizeof log, &image));
    CHECK_MSG(log[0] == 0, "the log is \"%s\"", log);
    const char *text = image.data;
    if (i < 2) CHECK(image.bytes > 64 && memcmp(text, "\177ELF", 4) == 0);
    if (i == 2) CHECK(image.bytes > 64 && text[image.bytes - 1] == 0 && strstr(text, ".target sm_80") != NULL);
    CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_module_load(context, image.data, image.bytes, &module));
    cumoe_image_free(&image);
    CHECK(image.data == NULL && image.bytes == 0);
    case_end();
  }
}

static void test_compile(cumoe_context context)
{
  static const char *const value[] = {"-DVALUE=3", "--std=c++17"}, *const target[] = {"-arch=compute_75"},
                           *const unknown[] = {"--nonsense"};
  const cumoe_status bad = CUMOE_ERR_INVALID_ARGUMENT;
  cumoe_image image;
  char log[4096], tiny[9];
  if (!have_nvrtc()) {
    case_begin("NVRTC");
    case_skip("it is not installed: %s", cumoe_last_error());
    return;
  }
  test_targets(context);
  case_begin("a source that does not compile");
  CHECK_STATUS(bad, cumoe_compile("__global__ void f() { nonsense(1); }", "sm_80", NULL, 0, log, sizeof log, &image));
  CHECK_TEXT("cumoe_compile: source does not compile: source.cu(1): error");
  CHECK_TEXT("nonsense");
  CHECK(strstr(log, "source.cu(1): error") == log && strstr(log, "1 error detected") != NULL && image.data == NULL);
  CHECK_STATUS(bad, cumoe_compile("nonsense", "sm_80", NULL, 0, tiny, sizeof tiny, &image));
  CHECK_MSG(strcmp(tiny, "source.c") == 0, "the log is \"%s\"", tiny);
  case_end();
  case_begin("a warning");
  CHECK_OK(cumoe_compile("__global__ void f() { int unused; }", "sm_80", NULL, 0, log, sizeof log, &image));
  CHECK_MSG(strstr(log, "unused") != NULL, "the log is \"%s\"", log);
  cumoe_image_free(&image);
  case_end();
  case_begin("options");
  const char *needs_value = "#if VALUE != 3\n#error no value\n#endif\n";
  CHECK_OK(cumoe_compile(needs_value, "sm_80", value, 2, NULL, 0, &image));
  cumoe_image_free(&image);
  CHECK_STATUS(bad, cumoe_compile(needs_value, "sm_80", NULL, 0, NULL, 0, &image));
  CHECK_OK(cumoe_compile(plain_source, "sm_90", target, 1, NULL, 0, &image));
  CHECK(strstr(image.data, ".target sm_75") != NULL);
  cumoe_image_free(&image);
  CHECK_STATUS(bad, cumoe_compile(plain_source, "sm_80", unknown, 1, NULL, 0, &image));
  CHECK_TEXT("options: ");
  CHECK_STATUS(bad, cumoe_compile(plain_source, "sm_1", NULL, 0, NULL, 0, &image));
  CHECK_STATUS(bad, cumoe_compile(plain_source, "90", NULL, 0, NULL, 0, &image));
  CHECK_TEXT("target is 90, must be like sm_90a");
  case_end();
  case_begin("four threads");
  pthread_t threads[4];
  int failures[4] = {0};
  for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, compile_in_thread, &failures[i]) == 0);
  for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0 && failures[i] == 0);
  case_end();
}

static int32_t major_of(cumoe_context context)
{
  cumoe_device_info info = {.size = sizeof info};
  CHECK_OK(cumoe_context_info(context, &info));
  return info.cc_major;
}

/* A module that runs on this GPU: the fatbin, or nothing works. */
static cumoe_function look_up(cumoe_context context, const char *name, uint32_t smem, cumoe_module *module)
{
  cumoe_function function = {0};
  if (module->id == 0) CHECK_OK(cumoe_module_load_file(context, built(".fatbin"), module));
  CHECK_OK(cumoe_module_function(*module, name, smem, &function));
  return function;
}

static tensor counting(int32_t dtype, int64_t n, double first)
{
  tensor t = tensor_new(dtype, 1, n);
  for (int64_t i = 0; i < n; i++) tensor_set(&t, 0, i, first + (double)i);
  return t;
}

static void check_add(cumoe_context context, cumoe_function add)
{
  enum { N = 1000 };
  const tensor a = counting(CUMOE_F32, N, 0), b = counting(CUMOE_F32, N, 5000);
  const cumoe_view_mut sum = device_new(context, CUMOE_F32, 1, N, 0);
  const cumoe_arg args[] = {cumoe_arg_view(device_put(context, &a, 0)), cumoe_arg_view(device_put(context, &b, 0)),
                            cumoe_arg_view_mut(sum), cumoe_arg_i32(N)};
  const cumoe_launch launch = cumoe_launch_elements(N, NULL);
  if (!CHECK_OK(cumoe_launch_kernel(add, &launch, args, 4))) return;
  const tensor got = device_get(context, cumoe_const(sum));
  int wrong = 0;
  for (int64_t i = 0; i < N; i++) wrong += tensor_get(&got, 0, i) != 5000 + 2 * (double)i;
  CHECK_MSG(wrong == 0, "%d of %d sums are wrong", wrong, N);
  check_guards(context, "sum", sum);
}

/* Code for another GPU is refused at the latest when a kernel is looked up. */
static void load_case(cumoe_context context, const char *suffix, int32_t only_for)
{
  cumoe_module module = {0};
  cumoe_function add = {0};
  case_begin("kernel%s", suffix);
  cumoe_status status = cumoe_module_load_file(context, built(suffix), &module);
  if (status == CUMOE_OK) status = cumoe_module_function(module, "add", 0, &add);
  if (only_for != 0 && only_for != major_of(context))
    CHECK_STATUS(CUMOE_ERR_NO_KERNEL_IMAGE, status);
  else if (CHECK_OK(status))
    check_add(context, add);
  CHECK_OK(cumoe_module_unload(&module));
  CHECK(module.id == 0);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  case_end();
}

static void test_load(cumoe_context context)
{
  static const char bad_ptx[] =
      ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f()\n{\n  nonsense;\n}\n";
  cumoe_module module = {0};
  size_t bytes = 0;
  load_case(context, ".ptx", 0);
  load_case(context, ".fatbin", 0);
  load_case(context, ".sm_80.cubin", 8);
  load_case(context, ".sm_90.cubin", 9);
  case_begin("from memory at any alignment, which may go");
  char *data = read_whole(built(".fatbin"), &bytes), *moved = scratch(bytes + 1, 1);
  memcpy(moved + 1, data, bytes);
  CHECK_OK(cumoe_module_load(context, moved + 1, bytes, &module));
  memset(moved, 0, bytes + 1);
  check_add(context, look_up(context, "add", 0, &module));
  CHECK_OK(cumoe_module_unload(&module));
  case_end();
  case_begin("PTX that does not compile: the compiler's words");
  CHECK_STATUS(CUMOE_ERR_NO_KERNEL_IMAGE, cumoe_module_load(context, bad_ptx, sizeof bad_ptx, &module));
  CHECK_TEXT("the compiler says: ");
  CHECK_TEXT("nonsense");
  CHECK(module.id == 0 && cudaPeekAtLastError() == cudaSuccess);
  case_end();
  case_begin("from source");
  if (have_nvrtc()) {
    CHECK_OK(cumoe_module_compile(context, plain_source, NULL, 0, NULL, 0, &module));
    check_add(context, look_up(context, "add", 0, &module));
    CHECK_OK(cumoe_module_unload(&module));
    case_end();
  } else {
    case_skip("NVRTC is not installed");
  }
}

static void test_facts(cumoe_context context)
{
  static const uint32_t sizes[] = {4, 4, 8, 8, 4, 8, 8, 8, 12};
  cumoe_module module = {0};
  cumoe_function function;
  cumoe_function_info info = {.size = sizeof info};
  case_begin("parameters");
  CHECK_OK(cumoe_function_get_info(look_up(context, "kinds", 0, &module), &info));
  CHECK(info.parameters == 9 && memcmp(info.parameter_bytes, sizes, sizeof sizes) == 0);
  CHECK(info.registers > 0 && info.max_threads > 0 && info.ptx_version >= 80 && info.binary_version >= 80);
  CHECK_OK(cumoe_function_get_info(look_up(context, "nothing", 0, &module), &info));
  CHECK(info.parameters == 0);
  case_end();
  case_begin("memory and threads");
  CHECK_OK(cumoe_function_get_info(look_up(context, "limited", 0, &module), &info));
  CHECK(info.static_smem >= 1024 && info.static_smem < 4096 && info.max_threads == 128 && info.local_bytes == 0);
  CHECK(info.max_dynamic_smem > 40 * 1024 && info.max_dynamic_smem <= 48 * 1024);
  case_end();
  case_begin("dynamic shared memory is never lowered");
  CHECK_OK(cumoe_function_get_info(look_up(context, "shared_sum", 64 << 10, &module), &info));
  CHECK(info.max_dynamic_smem == 64 << 10);
  CHECK_OK(cumoe_function_get_info(look_up(context, "shared_sum", 0, &module), &info));
  CHECK(info.max_dynamic_smem == 64 << 10);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_module_function(module, "shared_sum", 1u << 30, &function));
  CHECK(function.id == 0);
  case_end();
  case_begin("names");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_module_function(module, "no_such_kernel", 0, &function));
  CHECK_TEXT("no kernel no_such_kernel");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_module_function(module, "", 0, &function));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  case_end();
  case_begin("close");
  CHECK_OK(cumoe_module_unload(&module));
  case_end();
}

static void test_globals(cumoe_context context)
{
  const float five = 5;
  const tensor x = counting(CUMOE_F32, 100, 0);
  cumoe_module module = {0};
  cumoe_view_mut scale, counters, none;
  case_begin("written and read");
  const cumoe_function scaled = look_up(context, "scaled", 0, &module);
  CHECK_OK(cumoe_module_global(module, "scale", CUMOE_F32, &scale));
  CHECK_OK(cumoe_module_global(module, "counters", CUMOE_I32, &counters));
  CHECK(scale.rows == 1 && scale.cols == 1 && counters.cols == 4);
  CHECK_OK(cumoe_copy_from_host(context, scale, &five, sizeof five, NULL));
  cumoe_view v = device_put(context, &x, 0);
  const cumoe_launch launch = cumoe_launch_elements(100, NULL);
  const cumoe_arg args[] = {cumoe_arg_view(v), cumoe_arg_i32(100)};
  CHECK_OK(cumoe_launch_kernel(scaled, &launch, args, 2));
  const tensor got = device_get(context, v), count = device_get(context, cumoe_const(counters));
  for (int64_t i = 0; i < 100; i++) CHECK(tensor_get(&got, 0, i) == 5 * (double)i);
  CHECK(tensor_get(&count, 0, 3) == 100 && tensor_get(&count, 0, 0) == 0);
  case_end();
  case_begin("wrong");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_module_global(module, "nowhere", CUMOE_F32, &none));
  CHECK(none.data == NULL && cudaPeekAtLastError() == cudaSuccess);
  CHECK_STATUS(CUMOE_ERR_WRONG_DTYPE, cumoe_module_global(module, "scale", CUMOE_I64, &none));
  CHECK_OK(cumoe_module_unload(&module));
  case_end();
}

typedef struct triple {
  short a;
  char b[10];
} triple;

static void test_arguments(cumoe_context context)
{
  cumoe_module module = {0};
  case_begin("every kind arrives");
  const cumoe_function kinds = look_up(context, "kinds", 0, &module);
  const tensor in = counting(CUMOE_I64, 1, 0x400c000000000000); /* the double 3.5 */
  const cumoe_view_mut out = device_new(context, CUMOE_I64, 1, 9, 0);
  const triple t = {-7, {0, 0, 0, 0, 0, 0, 0, 0, 0, 9}};
  cumoe_arg args[] = {cumoe_arg_i32(-1),
                      cumoe_arg_u32(4000000000u),
                      cumoe_arg_i64(-5000000000),
                      cumoe_arg_u64(1ull << 62),
                      cumoe_arg_f32(0.25f),
                      cumoe_arg_f64(1e300),
                      cumoe_arg_view(device_put(context, &in, 0)),
                      cumoe_arg_view_mut(out),
                      cumoe_arg_bytes(&t, sizeof t)};
  const double want[] = {-1, 4000000000.0, -5000000000.0, 4611686018427387904.0, 0.25, 1e300, 3.5, -7, 9};
  cumoe_launch launch = {.size = sizeof launch, .grid = {1, 1, 1}, .block = {1}};
  double got[9] = {0};
  CHECK_OK(cumoe_launch_kernel(kinds, &launch, args, 9));
  CHECK_OK(cumoe_copy_to_host(context, got, sizeof got, cumoe_const(out), NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  for (int i = 0; i < 9; i++) CHECK_MSG(got[i] == want[i], "value %d is %g, not %g", i, got[i], want[i]);
  /* refused against the parameter table */
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_launch_kernel(kinds, &launch, args, 8));
  args[0] = cumoe_arg_i64(1);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_launch_kernel(kinds, &launch, args, 9));
  CHECK_TEXT("args[0] has 8 bytes, parameter 0 of kinds has 4");
  /* nothing is launched for no elements */
  launch.grid[0] = 0;
  args[0] = cumoe_arg_i32(1);
  CHECK_OK(cumoe_launch_kernel(kinds, &launch, args, 9));
  CHECK_OK(cumoe_module_unload(&module));
  case_end();
}

static int32_t read_int(cumoe_context context, cumoe_view_mut at)
{
  int32_t value = -1;
  CHECK_OK(cumoe_copy_to_host(context, &value, sizeof value, cumoe_const(at), NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  return value;
}

static cumoe_view_mut zero_ints(cumoe_context context, int64_t n)
{
  const cumoe_view_mut v = device_new(context, CUMOE_I32, 1, n, 0);
  CHECK_OK(cumoe_fill(context, v, 0, NULL));
  return v;
}

static bool all_are(cumoe_context context, cumoe_view_mut v, double value)
{
  const tensor got = device_get(context, cumoe_const(v));
  for (int64_t i = 0; i < got.cols; i++)
    if (tensor_get(&got, 0, i) != value) return false;
  return true;
}

static void test_shapes(cumoe_context context)
{
  enum { WORDS = 25600, STEPS = 8 };
  cumoe_module module = {0};
  case_begin("100 KiB of dynamic shared memory");
  const cumoe_function sum = look_up(context, "shared_sum", WORDS * 4, &module);
  const cumoe_view_mut total = zero_ints(context, 1);
  const cumoe_arg sum_args[] = {cumoe_arg_i32(WORDS), cumoe_arg_view_mut(total)};
  cumoe_launch launch = {.size = sizeof launch, .grid = {1, 1, 1}, .block = {1024}, .dynamic_smem = WORDS * 4};
  CHECK_OK(cumoe_launch_kernel(sum, &launch, sum_args, 2));
  CHECK(read_int(context, total) == WORDS / 2 * (WORDS - 1));
  case_end();
  case_begin("cluster");
  const cumoe_function cluster = look_up(context, "cluster_size", 0, &module);
  const cumoe_view_mut sizes = zero_ints(context, 16);
  const cumoe_arg size_arg = cumoe_arg_view_mut(sizes);
  launch = (cumoe_launch){.size = sizeof launch, .grid = {16, 1, 1}, .block = {64}, .cluster = {4}};
  const int32_t major = major_of(context);
  CHECK_STATUS(major < 9 ? CUMOE_ERR_NOT_SUPPORTED : CUMOE_OK, cumoe_launch_kernel(cluster, &launch, &size_arg, 1));
  if (major == 9) CHECK(all_are(context, sizes, 4));
  case_end();
  case_begin("a chain of early launches keeps its order");
  const cumoe_function step = look_up(context, "step", 0, &module);
  const cumoe_view_mut x = zero_ints(context, 1);
  const cumoe_arg step_args[] = {cumoe_arg_view_mut(x), cumoe_arg_i64(20000)};
  launch = (cumoe_launch){.size = sizeof launch, .grid = {64, 1, 1}, .block = {64}, .flags = CUMOE_LAUNCH_EARLY};
  int32_t want = 0;
  for (int i = 0; i < STEPS; i++) {
    CHECK_OK(cumoe_launch_kernel(step, &launch, step_args, 2));
    want = 3 * want + 1;
  }
  CHECK(read_int(context, x) == want);
  case_end();
  case_begin("cooperative: as many blocks as fit, and one more is refused");
  const cumoe_function meet = look_up(context, "meet", 0, &module);
  cumoe_device_info info = {.size = sizeof info};
  cumoe_occupancy fits = {.size = sizeof fits};
  launch = (cumoe_launch){.size = sizeof launch, .grid = {1, 1, 1}, .block = {256}, .flags = CUMOE_LAUNCH_COOPERATIVE};
  CHECK_OK(cumoe_context_info(context, &info));
  CHECK_OK(cumoe_function_occupancy(meet, &launch, &fits));
  launch.grid[0] = (uint32_t)(fits.blocks_per_sm * info.multiprocessors);
  const cumoe_view_mut arrived = zero_ints(context, 1), met = zero_ints(context, launch.grid[0] + 1);
  const cumoe_arg meet_args[] = {cumoe_arg_view_mut(arrived), cumoe_arg_view_mut(met)};
  CHECK_OK(cumoe_launch_kernel(meet, &launch, meet_args, 2));
  CHECK(read_int(context, arrived) == (int32_t)launch.grid[0]);
  launch.grid[0]++;
  CHECK_STATUS(CUMOE_ERR_CUDA, cumoe_launch_kernel(meet, &launch, meet_args, 2));
  CHECK_TEXT("kernel meet, grid");
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK_OK(cumoe_module_unload(&module));
  case_end();
}

static void test_occupancy(cumoe_context context)
{
  cumoe_module module = {0};
  uint32_t threads = 0;
  cumoe_occupancy o = {.size = sizeof o};
  cumoe_launch launch = {.size = sizeof launch, .block = {128}};
  case_begin("blocks");
  const cumoe_function limited = look_up(context, "limited", 0, &module);
  CHECK_OK(cumoe_function_occupancy(limited, &launch, &o));
  CHECK(o.blocks_per_sm >= 8 && o.blocks_per_sm <= 16 && o.spare_smem > 1024 && o.clusters == 0);
  CHECK(major_of(context) < 9 ? o.largest_cluster == 0 : o.largest_cluster >= 8);
  CHECK_OK(cumoe_function_block(limited, 0, &threads));
  CHECK(threads > 0 && threads <= 128 && threads % 32 == 0);
  launch.block[0] = 129;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_function_occupancy(limited, &launch, &o));
  case_end();
  case_begin("much shared memory: fewer blocks");
  const cumoe_function sum = look_up(context, "shared_sum", 90 << 10, &module);
  launch = (cumoe_launch){.size = sizeof launch, .block = {128}, .dynamic_smem = 90 << 10};
  CHECK_OK(cumoe_function_occupancy(sum, &launch, &o));
  CHECK(o.blocks_per_sm >= 1 && o.blocks_per_sm <= 2);
  if (major_of(context) >= 9) {
    launch.cluster[0] = 2;
    CHECK_OK(cumoe_function_occupancy(sum, &launch, &o));
    CHECK(o.clusters > 0);
  }
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_function_block(sum, 1u << 30, &threads));
  CHECK_OK(cumoe_module_unload(&module));
  case_end();
}

static void test_capture(cumoe_context context)
{
  cumoe_module module = {0};
  cumoe_stream stream = NULL;
  cumoe_graph graph = NULL;
  case_begin("captured, launched twice");
  CHECK_OK(cumoe_stream_create(context, 0, &stream));
  const cumoe_view_mut x = zero_ints(context, 1);
  const cumoe_arg args[] = {cumoe_arg_view_mut(x), cumoe_arg_i64(0)};
  const cumoe_function step = look_up(context, "step", 0, &module);
  const cumoe_launch launch = {.size = sizeof launch, .grid = {1, 1, 1}, .block = {1}, .stream = stream};
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK_OK(cumoe_graph_begin(context, stream));
  CHECK_OK(cumoe_launch_kernel(step, &launch, args, 2));
  CHECK_OK(cumoe_graph_end(context, stream, &graph));
  CHECK_OK(cumoe_graph_launch(context, graph, stream));
  CHECK_OK(cumoe_graph_launch(context, graph, stream));
  CHECK_OK(cumoe_synchronize(context, stream));
  CHECK(read_int(context, x) == 4);
  CHECK_OK(cumoe_graph_destroy(context, graph));
  CHECK_OK(cumoe_stream_destroy(context, stream));
  CHECK_OK(cumoe_module_unload(&module));
  case_end();
}

/* In a process of its own, which cannot use the GPU afterwards. True: everything is as it should be. */
static bool lose_device(void)
{
  cumoe_context context = NULL;
  cumoe_module module = {0};
  char first[1024];
  const cumoe_launch launch = {.size = sizeof launch, .grid = {1, 1, 1}, .block = {1}};
  if (!CHECK_OK(cumoe_context_create(0, NULL, &context))) return false;
  const cumoe_view_mut x = zero_ints(context, 1);
  const cumoe_arg nowhere = cumoe_arg_view_mut(no_view_mut());
  const cumoe_function function = look_up(context, "crash", 0, &module);
  bool ok = CHECK_OK(cumoe_launch_kernel(function, &launch, &nowhere, 1));
  ok &= CHECK_STATUS(CUMOE_ERR_CUDA_STICKY, cumoe_synchronize(context, NULL));
  ok &= CHECK_TEXT("cudaErrorIllegalAddress");
  snprintf(first, sizeof first, "%s", cumoe_last_error());
  ok &= CHECK_STATUS(CUMOE_ERR_CUDA_STICKY, cumoe_fill(context, x, 0, NULL)) && CHECK_TEXT(first);
  ok &= CHECK_STATUS(CUMOE_ERR_CUDA_STICKY, cumoe_launch_kernel(function, &launch, &nowhere, 1)) && CHECK_TEXT(first);
  ok &= CHECK_STATUS(CUMOE_ERR_CUDA_STICKY, cumoe_context_destroy(context)) && CHECK_TEXT(first);
  return ok;
}

/* The case is not ended: its device memory is gone already. */
static void crash(void)
{
  case_begin("a kernel writes to nowhere");
  const bool ok = lose_device();
  fflush(stdout);
  _exit(ok ? 0 : 1);
}

static void test_lost(void)
{
  case_begin("in a child");
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "kernel", "--crash", (char *)NULL);
    _exit(99);
  }
  int status = 0;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child's status is 0x%x", (unsigned)status);
  case_end();
}

static const test_group groups[] = {
    GROUP("modules", test_cpu, ON_CPU),
    GROUP("run-time compilation", test_compile, ON_CPU),
    GROUP("loading", test_load, ON_CUDA),
    GROUP("facts of kernels", test_facts, ON_CUDA),
    GROUP("variables", test_globals, ON_CUDA),
    GROUP("arguments", test_arguments, ON_CUDA),
    GROUP("launches", test_shapes, ON_CUDA),
    GROUP("occupancy", test_occupancy, ON_CUDA),
    GROUP("a kernel's first launch in a capture", test_capture, ON_CUDA),
    ALONE("a lost device", test_lost, ON_CUDA),
};

int main(int argc, char **argv)
{
  const bool child = argc > 1 && strcmp(argv[1], "--crash") == 0;
  if (child) crash();
  return test_main(argc, argv, groups, sizeof groups / sizeof groups[0]);
}
