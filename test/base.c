/*
 * What lies under the layer: status codes, error texts, the log, contexts, buffers, views, copies; on every
 * device there is, and on a machine that has none.
 */
#include <ctype.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda.h"

/* A failed allocation is a result here, and a child of a threaded program makes threads. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
  return "allocator_may_return_null=1";
}
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
  return "allocator_may_return_null=1:die_after_fork=0";
}

static void test_names(void)
{
  case_begin("status codes");
#define CHECK_STATUS_ROW(name, value, text)                                                                            \
  CHECK(CUMOE_##name == (value) && !strcmp(cumoe_status_name((cumoe_status)(value)), "CUMOE_" #name) &&                \
        !strcmp(cumoe_status_text((cumoe_status)(value)), text));
  CUMOE_STATUS_LIST(CHECK_STATUS_ROW)
  for (int i = -3; i < 1000; i += i < 0 ? 1 : 100) {
    if (i == 0) i = 20;
    CHECK(!strcmp(cumoe_status_name((cumoe_status)i), "CUMOE_ERR_UNKNOWN"));
    CHECK(strlen(cumoe_status_text((cumoe_status)i)) > 0);
  }
  case_end();
  case_begin("element types");
  static const struct {
    const char *name;
    int32_t value;
    size_t bytes;
  } types[] = {
#define TYPE_ROW(name, value, bytes) {#name, value, bytes},
      CUMOE_DTYPE_LIST(TYPE_ROW)};
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
    const char *name = cumoe_dtype_name((cumoe_dtype)types[i].value);
    size_t same = 0;
    while (name[same] && toupper((unsigned char)name[same]) == types[i].name[same]) same++;
    CHECK_MSG(same == strlen(types[i].name) && name[same] == 0, "%s is called %s", types[i].name, name);
    CHECK(cumoe_dtype_bytes((cumoe_dtype)types[i].value) == types[i].bytes);
  }
  static const int unknown[] = {-1, 0, 10, 1000};
  for (int i = 0; i < 4; i++) {
    CHECK(cumoe_dtype_bytes((cumoe_dtype)unknown[i]) == 0);
    CHECK(!strcmp(cumoe_dtype_name((cumoe_dtype)unknown[i]), "?"));
  }
  case_end();
  case_begin("version");
  CHECK(cumoe_version() == CUMOE_VERSION);
  CHECK(isdigit((unsigned char)cumoe_architectures()[0]));
  case_end();
}

typedef struct log_record {
  atomic_int count, worst;
  char last[1200];
} log_record;

static void keep_message(void *user, cumoe_log_level level, const char *message)
{
  log_record *log = user;
  atomic_fetch_add(&log->count, 1);
  if ((int)level > atomic_load(&log->worst)) atomic_store(&log->worst, (int)level);
  snprintf(log->last, sizeof log->last, "%s", message);
}

static void count_message(void *user, cumoe_log_level level, const char *message)
{
  (void)level;
  (void)message;
  atomic_fetch_add((atomic_int *)user, 1);
}

static atomic_bool stop;

static void *fail_until_stopped(void *unused)
{
  cumoe_context none = NULL;
  while (!atomic_load(&stop))
    if (cumoe_context_create(-77, NULL, &none) == CUMOE_OK) return unused;
  return NULL;
}

static void test_log(void)
{
  cumoe_context context = NULL;
  case_begin("levels");
  log_record log = {0};
  cumoe_set_log(keep_message, &log, CUMOE_LOG_INFO);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_context_create(-77, NULL, &context));
  CHECK(atomic_load(&log.count) == 0); /* failures are returned; only the trace shows them */
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &context));
  CHECK(atomic_load(&log.count) == 1 && atomic_load(&log.worst) == CUMOE_LOG_INFO);
  cumoe_set_log(keep_message, &log, CUMOE_LOG_TRACE);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_synchronize(NULL, NULL));
  CHECK(atomic_load(&log.count) == 2 && atomic_load(&log.worst) == CUMOE_LOG_TRACE);
  CHECK_MSG(strstr(log.last, cumoe_last_error()) != NULL, "the message is \"%s\"", log.last);
  cumoe_set_log(NULL, NULL, CUMOE_LOG_TRACE);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_synchronize(NULL, NULL));
  CHECK(atomic_load(&log.count) == 2);
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
  case_begin("no message after it was turned off");
  pthread_t threads[4];
  atomic_store(&stop, false);
  for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, fail_until_stopped, NULL) == 0);
  int heard = 0;
  for (int i = 0; i < 100; i++) {
    atomic_int *count = scratch(1, sizeof *count);
    cumoe_set_log(count_message, count, CUMOE_LOG_TRACE);
    if (i % 4 == 0) usleep(1000);
    cumoe_set_log(NULL, NULL, CUMOE_LOG_TRACE);
    const int before = atomic_load(count);
    if (i % 4 == 0) usleep(1000);
    CHECK(atomic_load(count) == before);
    heard += before;
  }
  atomic_store(&stop, true);
  for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  CHECK(heard > 0);
  case_end();
}

static int cuda_devices(void)
{
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

/* AUTO is a GPU where there is one; else the CPU device, a warning that says why, and no error left behind.
 */
static void test_auto(void)
{
  cumoe_context context = NULL;
  log_record log = {0};
  char before[1024];
  cumoe_device_info info = {.size = sizeof info};
  case_begin("GPU or CPU");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_context_create(-77, NULL, &context));
  snprintf(before, sizeof before, "%s", cumoe_last_error());
  cumoe_set_log(keep_message, &log, CUMOE_LOG_WARNING);
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_AUTO, NULL, &context));
  cumoe_set_log(NULL, NULL, CUMOE_LOG_WARNING);
  CHECK_OK(cumoe_context_info(context, &info));
  CHECK_MSG(!strcmp(before, cumoe_last_error()), "the text became \"%s\"", cumoe_last_error());
  if (cuda_devices() > 0) {
    CHECK(info.device >= 0 && info.cc_major >= 8 && atomic_load(&log.count) == 0 && info.fallback[0] == 0);
  } else {
    CHECK(info.device == CUMOE_DEVICE_CPU && info.cc_major == 0 && atomic_load(&log.count) == 1);
    CHECK_MSG(strstr(log.last, "CPU") != NULL && strstr(log.last, "cudaError") != NULL, "the warning is \"%s\"",
              log.last);
    CHECK_MSG(strstr(log.last, info.fallback) && strstr(info.fallback, "cudaError"), "fallback %s", info.fallback);
  }
  CHECK(info.multiprocessors > 0 && info.total_memory > 0 && info.name[0] != 0);
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
  case_begin("ordinals that are not there");
  for (int device = cuda_devices(); device < 100000; device += 33333) {
    context = (cumoe_context)&info;
    const cumoe_status status = cumoe_context_create(device, NULL, &context);
    CHECK(status == CUMOE_ERR_NO_DEVICE || (cuda_devices() == 0 && status == CUMOE_ERR_DRIVER_TOO_OLD));
    CHECK(context == NULL);
    CHECK_TEXT(cuda_devices() > 0 ? "numbered 0 to" : "cudaError");
  }
  case_end();
}

static void test_many_contexts(void)
{
  cumoe_context context = NULL;
  cumoe_context_config config = {.size = sizeof config, .cpu_threads = 3};
  cumoe_device_info info = {.size = sizeof info};
  case_begin("facts");
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &context));
  CHECK_OK(cumoe_context_info(context, &info));
  CHECK(info.device == CUMOE_DEVICE_CPU && info.multiprocessors == 3 && info.size == sizeof info);
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
  case_begin("1000 contexts");
  for (int i = 0; i < 1000; i++) {
    config.cpu_threads = i % 4;
    if (!CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &context))) break;
    cumoe_buffer lost = {0}; /* the context frees what is left */
    if (i % 3 == 0 && !CHECK_OK(cumoe_buffer_alloc(context, CUMOE_I64, i, 5, NULL, &lost))) break;
    if (!CHECK_OK(cumoe_context_destroy(context))) break;
    if (i % 3 == 0) CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_free(&lost));
  }
  case_end();
}

/* ThreadSanitizer cannot follow a child that makes threads after the parent had some. */
#ifdef __SANITIZE_THREAD__
enum { CHILD_THREADS = 1 };
#else
enum { CHILD_THREADS = 3 };
#endif

/* What a child may have: a context and a buffer of its own. The exit status, 0 if all is as promised. */
static int with_own_context(void)
{
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = CHILD_THREADS};
  cumoe_context own = NULL;
  cumoe_buffer mine = {0};
  if (cumoe_context_create(CUMOE_DEVICE_CPU, &config, &own) != CUMOE_OK) return 4;
  if (cumoe_buffer_alloc(own, CUMOE_F32, 3, 3, NULL, &mine) != CUMOE_OK) return 5;
  return cumoe_context_destroy(own) == CUMOE_OK ? 0 : 6;
}

/* The same of one that inherits a context. */
static int in_child(cumoe_context inherited, cumoe_buffer buffer, cumoe_plan plan)
{
  if (cumoe_synchronize(inherited, NULL) != CUMOE_ERR_NOT_SUPPORTED || !strstr(cumoe_last_error(), "fork")) return 1;
  if (cumoe_buffer_free(&buffer) != CUMOE_ERR_NOT_SUPPORTED) return 2;
  if (cumoe_context_destroy(inherited) != CUMOE_ERR_NOT_SUPPORTED) return 3;
  if (cumoe_plan_destroy(plan) != CUMOE_ERR_NOT_SUPPORTED) return 7;
  return with_own_context();
}

static void test_fork(cumoe_context context)
{
  const cumoe_moe_desc desc = {.size = sizeof desc,
                               .num_experts = 4,
                               .local_experts = 4,
                               .hidden = 16,
                               .inter = 16,
                               .dtype = CUMOE_F32,
                               .routing = cumoe_routing_qwen3(2)};
  cumoe_buffer buffer = {0};
  cumoe_plan plan = NULL;
  int status = -1;
  case_begin("the child is told");
  CHECK_OK(cumoe_plan_create(context, &desc, &plan));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 3, 3, NULL, &buffer));
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) _exit(in_child(context, buffer, plan));
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
  CHECK_OK(cumoe_plan_destroy(plan));
  CHECK_OK(cumoe_buffer_free(&buffer));
  case_end();
}

static atomic_bool busy_ends;
static atomic_int busy_turns;

static cumoe_status look_up_nothing(void)
{
  cumoe_function function = {0};
  return cumoe_module_function((cumoe_module){1}, "kernel", 0, &function);
}

static void *allocate_and_free(void *context)
{
  while (!atomic_load(&busy_ends)) {
    cumoe_buffer b = {0};
    if (cumoe_buffer_alloc(context, CUMOE_F32, 1, 8, NULL, &b) == CUMOE_OK) (void)!cumoe_buffer_free(&b);
    for (int i = 0; i < 500; i++) (void)look_up_nothing(); /* mostly this, so that a fork meets it */
    atomic_fetch_add(&busy_turns, 1);
  }
  return NULL;
}

static int within_a_while(void)
{
  alarm(20);
  if (look_up_nothing() != CUMOE_ERR_STALE_HANDLE) return 8;
  return with_own_context();
}

/* What another thread held when the process forked, nobody would give back in the child. */
static void test_fork_while_busy(void)
{
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = 1};
  cumoe_context context = NULL;
  pthread_t thread;
  case_begin("another thread allocates and frees");
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &context));
  atomic_store(&busy_ends, false);
  atomic_store(&busy_turns, 0);
  CHECK(pthread_create(&thread, NULL, allocate_and_free, context) == 0);
  fflush(stdout);
  for (int i = 0, status = -1; i < 60; i++) {
    for (const int turns = atomic_load(&busy_turns); atomic_load(&busy_turns) - turns < 50;) sched_yield();
    const pid_t child = fork();
    if (child == 0) _exit(within_a_while());
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (!CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child %d ended with %d", i, status)) break;
  }
  atomic_store(&busy_ends, true);
  pthread_join(thread, NULL);
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

static void test_lifetime(cumoe_context context)
{
  cumoe_buffer a = {0}, copy, b = {77};
  cumoe_buffer_info info = {.size = sizeof info};
  size_t bytes = 0;
  case_begin("facts");
  const int64_t live = cumoe_buffer_live(context, &bytes);
  const size_t live_bytes = bytes;
  const int line = __LINE__ + 1;
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_BF16, 5, 7, NULL, &a));
  CHECK(cumoe_buffer_live(context, &bytes) == live + 1 && bytes == live_bytes + 70);
  CHECK(cumoe_buffer_live(context, NULL) == live + 1 && cumoe_buffer_live(NULL, &bytes) == 0 && bytes == 0);
  CHECK_OK(cumoe_buffer_get_info(a, &info));
  CHECK(info.dtype == CUMOE_BF16 && info.rows == 5 && info.cols == 7 && info.bytes == 70 && info.stream == NULL);
  CHECK(info.line == line && strstr(info.file, "base.c") != NULL && (uintptr_t)info.data % 256 == 0);
  cumoe_view v = cumoe_buffer_view(a);
  CHECK(v.data == info.data && v.rows == 5 && v.cols == 7 && v.ld == 7 && v.owner == a.id && v.dtype == CUMOE_BF16);
  CHECK(v.device == info.device);
  case_end();
  case_begin("stale");
  copy = a;
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK(a.id == 0 && cumoe_buffer_live(context, NULL) == live);
  CHECK_OK(cumoe_buffer_free(&a)); /* null by now */
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_BF16, 5, 7, NULL, &a));
  CHECK(a.id != copy.id); /* though the slot, and perhaps the memory, is the same */
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_free(&copy));
  CHECK_TEXT("freed");
  CHECK(cumoe_buffer_view(copy).data == NULL && cumoe_buffer_view(copy).owner == copy.id);
  CHECK_OK(cumoe_buffer_free(&a));
  case_end();
  case_begin("more than there is");
  const cumoe_status huge = cumoe_buffer_alloc(context, CUMOE_U8, (int64_t)1 << 45, 1, NULL, &b);
  if (huge == CUMOE_OK && !on_device(context)) { /* a kernel that overcommits promises any amount of host memory */
    CHECK_OK(cumoe_buffer_free(&b));
  } else {
    CHECK_STATUS(CUMOE_ERR_OUT_OF_MEMORY, huge);
    CHECK_TEXT("3518437208");
  }
  CHECK(b.id == 0 && cumoe_buffer_live(context, NULL) == live);
  case_end();
}

static void test_zero_sizes(cumoe_context context)
{
  static const int64_t sizes[][2] = {{0, 0}, {0, 5}, {5, 0}, {0, INT64_MAX}, {INT64_MAX, 0}};
  for (int i = 0; i < 5; i++) {
    case_begin("[%" PRId64 ", %" PRId64 "]", sizes[i][0], sizes[i][1]);
    CUMOE_AUTO_BUFFER a = {0};
    CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, sizes[i][0], sizes[i][1], NULL, &a));
    cumoe_view_mut v = cumoe_buffer_view_mut(a), slice;
    CHECK(v.data == NULL && v.rows == sizes[i][0] && v.cols == sizes[i][1] && a.id != 0);
    CHECK_OK(cumoe_fill(context, v, 1, NULL));
    CHECK_OK(cumoe_copy_from_host(context, v, NULL, 0, NULL));
    CHECK_OK(cumoe_copy_to_host(context, NULL, 0, cumoe_const(v), NULL));
    CHECK_OK(cumoe_copy(context, v, cumoe_const(v), NULL));
    CHECK_OK(cumoe_view_rows_mut(v, v.rows, 0, &slice));
    CHECK_OK(cumoe_view_cols_mut(v, v.cols, 0, &slice));
    CHECK(slice.data == NULL && slice.rows == v.rows && slice.cols == 0);
    CHECK_OK(cumoe_copy(context, slice, cumoe_const(slice), NULL));
    const cumoe_buffer copy = a;
    CHECK_OK(cumoe_buffer_free(&a));
    CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_fill(context, v, 1, NULL));
    CHECK(cumoe_buffer_view(copy).owner == copy.id);
    case_end();
  }
}

static cumoe_buffer made_in_scope(cumoe_context context, bool keep, uint64_t *id)
{
  CUMOE_AUTO_BUFFER x = {0};
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 4, 4, NULL, &x));
  *id = x.id;
  if (keep) return cumoe_buffer_take(&x);
  return (cumoe_buffer){0};
}

static void test_scope(cumoe_context context)
{
  uint64_t id = 0;
  case_begin("freed, unless taken");
  CHECK(made_in_scope(context, false, &id).id == 0);
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_free(&(cumoe_buffer){id}));
  cumoe_buffer kept = made_in_scope(context, true, &id);
  CHECK(kept.id == id);
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(kept), 3, NULL));
  CHECK_OK(cumoe_buffer_free(&kept));
  case_end();
}

static void test_slices(cumoe_context context)
{
  CUMOE_AUTO_BUFFER buffer = {0};
  cumoe_view part;
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F16, 10, 10, NULL, &buffer));
  const cumoe_view v = cumoe_buffer_view(buffer);
  case_begin("within");
  CHECK_OK(cumoe_view_rows(v, 3, 4, &part));
  CHECK((const char *)part.data == (const char *)v.data + 60 && part.rows == 4 && part.cols == 10 && part.ld == 10);
  CHECK_OK(cumoe_view_cols(part, 2, 5, &part));
  CHECK((const char *)part.data == (const char *)v.data + 64 && part.rows == 4 && part.cols == 5 && part.ld == 10);
  CHECK(part.owner == buffer.id && part.dtype == CUMOE_F16 && part.device == v.device);
  CHECK_OK(cumoe_view_rows(part, 4, 0, &part)); /* in place, too */
  CHECK(part.rows == 0 && part.cols == 5);
  CHECK_OK(cumoe_view_cols(v, 10, 0, &part)); /* nothing begins behind the last column */
  CHECK(part.data == v.data && part.rows == 10 && part.cols == 0);
  CHECK_OK(cumoe_view_rows(v, 0, 10, &part));
  CHECK(memcmp(&part, &v, sizeof v) == 0);
  case_end();
  case_begin("foreign views of absurd extent");
  cumoe_view far = cumoe_matrix(&far, CUMOE_I64, INT64_MAX, 8, INT64_MAX / 2);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_view_rows(far, INT64_MAX - 1, 1, &part));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_view_rows(far, 1, 1, &part));
  CHECK_OK(cumoe_view_rows(far, INT64_MAX, 0, &part));
  far.dtype = 99;
  CHECK_STATUS(CUMOE_ERR_WRONG_DTYPE, cumoe_view_rows(far, 0, 1, &part));
  case_end();
}

typedef struct shape {
  int64_t rows, cols, pad;
} shape;

/* In and out of a matrix in the middle of a buffer; every byte around it stays what it was. */
static void copy_case(cumoe_context context, int32_t dtype, shape s, bool owned)
{
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)dtype), width = (size_t)s.cols * element;
  const size_t pitch = (size_t)(s.cols + s.pad) * element, rows = (size_t)s.rows, total = pitch * (rows + 2);
  unsigned char *in = scratch(rows * width + 1, 1), *out = scratch(rows * width + 1, 1), *all = scratch(total, 1);
  rng r = {(uint64_t)(s.rows * 1000 + s.cols * 10 + s.pad)};
  for (size_t i = 0; i < rows * width; i++) in[i] = (unsigned char)rng_next(&r);
  CUMOE_AUTO_BUFFER a = {0}, b = {0};
  CHECK_OK(cumoe_buffer_alloc(context, (cumoe_dtype)dtype, s.rows + 2, s.cols + s.pad, NULL, &a));
  CHECK_OK(cumoe_buffer_alloc(context, (cumoe_dtype)dtype, s.rows, s.cols + 3, NULL, &b));
  cumoe_view_mut whole = cumoe_buffer_view_mut(a), v, w;
  CHECK_OK(cumoe_view_rows_mut(whole, 1, s.rows, &v));
  CHECK_OK(cumoe_view_cols_mut(v, s.pad / 2, s.cols, &v));
  CHECK_OK(cumoe_view_cols_mut(cumoe_buffer_view_mut(b), 2, s.cols, &w));
  if (!owned) {
    v.owner = w.owner = 0;
    v.device = CUMOE_DEVICE_ANY;
  }
  CHECK_OK(cumoe_fill(context, whole, 0xA5, NULL));
  CHECK_OK(cumoe_copy_from_host(context, w, in, rows * width, NULL));
  CHECK_OK(cumoe_copy(context, v, cumoe_const(w), NULL));
  CHECK_OK(cumoe_copy_to_host(context, out, rows * width, cumoe_const(v), NULL));
  CHECK_OK(cumoe_copy_to_host(context, all, total, cumoe_const(whole), NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK(memcmp(in, out, rows * width) == 0);
  for (int pass = 0; pass < 2; pass++) {
    size_t wrong = 0;
    for (size_t i = 0; i < total; i++) {
      const size_t row = i / pitch, at = i % pitch, left = (size_t)(s.pad / 2) * element;
      const bool inside = row >= 1 && row <= rows && at >= left && at < left + width;
      const unsigned char want = !inside ? 0xA5 : pass ? 0x3C : in[(row - 1) * width + at - left];
      if (all[i] != want) wrong++;
    }
    CHECK_MSG(wrong == 0, "%zu bytes wrong after the %s", wrong, pass ? "fill" : "copy");
    CHECK_OK(cumoe_fill(context, v, 0x3C, NULL));
    CHECK_OK(cumoe_copy_to_host(context, all, total, cumoe_const(whole), NULL));
    CHECK_OK(cumoe_synchronize(context, NULL));
  }
}

static void test_copies(cumoe_context context)
{
  static const shape shapes[] = {{1, 1, 0},   {1, 1, 1},   {1, 17, 5},    {17, 1, 3}, {3, 5, 0},   {3, 5, 1},
                                 {64, 64, 0}, {64, 63, 2}, {129, 257, 3}, {0, 5, 1},  {1000, 7, 1}};
  for (int32_t dtype = CUMOE_F32; dtype <= CUMOE_I64; dtype++)
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
      case_begin("%s [%" PRId64 ", %" PRId64 "] + %" PRId64, cumoe_dtype_name((cumoe_dtype)dtype), shapes[i].rows,
                 shapes[i].cols, shapes[i].pad);
      copy_case(context, dtype, shapes[i], i % 2 == 0);
      case_end();
    }
}

enum { HANDLES = 64, CHURN_THREADS = 8 };

typedef struct churn {
  cumoe_context context;
  _Atomic uint64_t *handles; /* that other threads may use after they are freed */
  uint64_t seed;
  int rounds, failures, stale;
} churn;

/* Reads through a handle that another thread may free at any moment: a status or a consistent answer, nothing
 * else. */
static void probe(churn *c, uint64_t id)
{
  cumoe_buffer_info info = {.size = sizeof info};
  cumoe_view slice;
  if (id == 0) return;
  const cumoe_view v = cumoe_buffer_view((cumoe_buffer){id});
  const cumoe_status status = cumoe_buffer_get_info((cumoe_buffer){id}, &info);
  if (v.data != NULL && (v.rows < 1 || v.cols != v.rows + 1 || v.dtype != CUMOE_I32)) c->failures++;
  if (status == CUMOE_ERR_STALE_HANDLE)
    c->stale++;
  else if (status != CUMOE_OK || info.cols != info.rows + 1 || info.bytes != (size_t)(info.rows * info.cols) * 4)
    c->failures++;
  const cumoe_status sliced = cumoe_view_rows(v, 0, v.rows / 2, &slice);
  if (sliced != CUMOE_OK && sliced != CUMOE_ERR_STALE_HANDLE) c->failures++;
}

static void *run_churn(void *argument)
{
  churn *c = argument;
  rng r = {c->seed};
  for (int i = 0; i < c->rounds; i++) {
    cumoe_buffer mine = {0}, old;
    const int64_t rows = 1 + rng_below(&r, 20);
    int32_t in[20 * 21], out[20 * 21];
    const size_t bytes = (size_t)(rows * (rows + 1)) * 4;
    for (int64_t j = 0; j < rows * (rows + 1); j++) in[j] = (int32_t)rng_next(&r);
    if (cumoe_buffer_alloc(c->context, CUMOE_I32, rows, rows + 1, NULL, &mine) != CUMOE_OK) c->failures++;
    if (cumoe_copy_from_host(c->context, cumoe_buffer_view_mut(mine), in, bytes, NULL) != CUMOE_OK) c->failures++;
    if (cumoe_copy_to_host(c->context, out, bytes, cumoe_buffer_view(mine), NULL) != CUMOE_OK) c->failures++;
    if (cumoe_synchronize(c->context, NULL) != CUMOE_OK || memcmp(in, out, bytes) != 0) c->failures++;
    _Atomic uint64_t *place = &c->handles[rng_below(&r, HANDLES)];
    probe(c, atomic_load(place));
    old.id = atomic_exchange(place, mine.id);
    if (cumoe_buffer_free(&old) != CUMOE_OK) c->failures++;
    for (int j = 0; j < 4; j++) probe(c, atomic_load(&c->handles[rng_below(&r, HANDLES)]));
  }
  return NULL;
}

static void test_threads(cumoe_context context)
{
  _Atomic uint64_t handles[HANDLES] = {0};
  churn c[CHURN_THREADS];
  pthread_t threads[CHURN_THREADS];
  case_begin("%d threads", CHURN_THREADS);
  const int64_t live = cumoe_buffer_live(context, NULL);
  for (int i = 0; i < CHURN_THREADS; i++) {
    c[i] = (churn){context, handles, (uint64_t)i + 1, on_device(context) ? 500 : 3000, 0, 0};
    CHECK(pthread_create(&threads[i], NULL, run_churn, &c[i]) == 0);
  }
  int64_t left = 0;
  for (int i = 0; i < CHURN_THREADS; i++) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_MSG(c[i].failures == 0, "thread %d: %d failures", i, c[i].failures);
  }
  for (int i = 0; i < HANDLES; i++) left += atomic_load(&handles[i]) != 0;
  CHECK(cumoe_buffer_live(context, NULL) == live + left);
  for (int i = 0; i < HANDLES; i++) CHECK_OK(cumoe_buffer_free(&(cumoe_buffer){handles[i]}));
  CHECK(cumoe_buffer_live(context, NULL) == live);
  case_end();
}

/* Two threads free one buffer: one of them does. */
static void *free_it(void *argument)
{
  cumoe_buffer mine = *(cumoe_buffer *)argument;
  return cumoe_buffer_free(&mine) == CUMOE_OK ? argument : NULL;
}

static void test_double_free(cumoe_context context)
{
  case_begin("once each");
  for (int i = 0; i < 200; i++) {
    cumoe_buffer buffer = {0};
    pthread_t thread;
    void *other = NULL;
    CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 10, 10, NULL, &buffer));
    CHECK(pthread_create(&thread, NULL, free_it, &buffer) == 0);
    const void *mine = free_it(&buffer);
    CHECK(pthread_join(thread, &other) == 0);
    CHECK((mine != NULL) != (other != NULL));
  }
  case_end();
}

static void test_adopt_cpu(cumoe_context context)
{
  cumoe_buffer buffer = {0}, copy;
  void *back = NULL;
  case_begin("there and back");
  void *memory = malloc(64);
  CHECK_OK(cumoe_buffer_adopt(context, memory, CUMOE_F32, 4, 4, NULL, &buffer));
  CHECK(cumoe_buffer_view(buffer).data == memory);
  copy = buffer;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_buffer_release(&buffer, NULL));
  CHECK_OK(cumoe_buffer_release(&buffer, &back));
  CHECK(back == memory && buffer.id == 0);
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_release(&copy, &back));
  CHECK(back == NULL);
  CHECK_OK(cumoe_buffer_adopt(context, memory, CUMOE_F32, 4, 4, NULL, &buffer));
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 100, 100, NULL, &buffer));
  CHECK_OK(cumoe_buffer_release(&buffer, &back));
  free(back);
  case_end();
}

static void adopt_cuda(cumoe_context context, void *memory, cudaStream_t stream)
{
  cumoe_buffer buffer = {0};
  const size_t bytes = 1 << 20;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT,
               cumoe_buffer_adopt(context, (char *)memory + 512, CUMOE_U8, 1, 16, stream, &buffer));
  CHECK_TEXT("inside");
  CHECK_STATUS(CUMOE_ERR_OUT_OF_BOUNDS,
               cumoe_buffer_adopt(context, memory, CUMOE_U8, 1 << 20, 1 << 12, stream, &buffer));
  CHECK(buffer.id == 0);
  CHECK_OK(cumoe_buffer_adopt(context, memory, CUMOE_U8, 1, (int64_t)bytes, stream, &buffer));
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(buffer), 1, stream));
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaGetLastError());
}

static size_t pool_used(void)
{
  cudaMemPool_t pool = NULL;
  uint64_t used = 0;
  CHECK_CUDA(cudaDeviceGetDefaultMemPool(&pool, 0));
  CHECK_CUDA(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
  return (size_t)used;
}

static void test_adopt_cuda(cumoe_context context)
{
  cumoe_buffer buffer = {0};
  cumoe_context other = NULL;
  cudaStream_t stream = NULL;
  void *memory = NULL, *host = NULL;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  case_begin("cudaMallocAsync");
  const size_t used = pool_used();
  CHECK_CUDA(cudaMallocAsync(&memory, 1 << 20, stream));
  adopt_cuda(context, memory, stream);
  CHECK(pool_used() == used);
  case_end();
  case_begin("cudaMalloc");
  size_t before = 0, after = 0, total = 0;
  for (int i = 0; i < 3; i++) {
    CHECK_CUDA(cudaMalloc(&memory, 64 << 20));
    adopt_cuda(context, memory, stream);
    CHECK_CUDA(cudaMemGetInfo(i == 0 ? &before : &after, &total));
  }
  CHECK_MSG(after >= before, "%zu bytes were not freed", before - after);
  case_end();
  case_begin("memory of the host");
  CHECK_CUDA(cudaMallocHost(&host, 64));
  CHECK_STATUS(CUMOE_ERR_WRONG_DEVICE, cumoe_buffer_adopt(context, host, CUMOE_U8, 1, 64, stream, &buffer));
  CHECK_STATUS(CUMOE_ERR_WRONG_DEVICE, cumoe_buffer_adopt(context, &buffer, CUMOE_U8, 1, 8, stream, &buffer));
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaFreeHost(host));
  case_end();
  case_begin("released memory outlives its context");
  CHECK_OK(cumoe_context_create(0, NULL, &other));
  CHECK_OK(cumoe_buffer_alloc(other, CUMOE_U8, 1 << 10, 1 << 10, stream, &buffer));
  CHECK_OK(cumoe_buffer_release(&buffer, &memory));
  CHECK_OK(cumoe_context_destroy(other));
  CHECK_CUDA(cudaMemsetAsync(memory, 1, 1 << 20, stream));
  CHECK_CUDA(cudaFreeAsync(memory, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  case_end();
  CHECK_CUDA(cudaStreamDestroy(stream));
}

static void *contexts_elsewhere(void *failures)
{
  cumoe_context other = NULL;
  cumoe_buffer buffer = {0};
  cudaStream_t stream = NULL;
  int *wrong = failures;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) *wrong |= 1;
  if (cumoe_context_create(0, NULL, &other) != CUMOE_OK) *wrong |= 2;
  if (cumoe_buffer_alloc(other, CUMOE_U8, 100, 100, stream, &buffer) != CUMOE_OK) *wrong |= 4;
  if (cumoe_fill(other, cumoe_buffer_view_mut(buffer), 1, stream) != CUMOE_OK) *wrong |= 8;
  if (cumoe_synchronize(other, stream) != CUMOE_OK) *wrong |= 16;
  if (cumoe_buffer_free(&buffer) != CUMOE_OK) *wrong |= 32;
  if (cumoe_context_destroy(other) != CUMOE_OK) *wrong |= 64;
  return NULL;
}

static void test_capture(cumoe_context context)
{
  static const enum cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                                     cudaStreamCaptureModeRelaxed};
  for (int m = 0; m < 3; m++) {
    cudaStream_t stream = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cumoe_buffer a = {0}, b = {0}, none = {0};
    unsigned char host[64] = {0}, want[64];
    pthread_t thread;
    int wrong = 0;
    case_begin("mode %d", m);
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 8, 8, stream, &a));
    CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 8, 8, stream, &b));
    cumoe_view_mut va = cumoe_buffer_view_mut(a), vb = cumoe_buffer_view_mut(b), odd;
    CHECK_OK(cumoe_view_cols_mut(vb, 3, 4, &odd));
    CHECK_OK(cumoe_fill(context, va, 7, stream));
    CHECK_CUDA(cudaStreamBeginCapture(stream, modes[m]));
    CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_buffer_alloc(context, CUMOE_U8, 8, 8, stream, &none));
    CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_buffer_free(&a));
    CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_copy_from_host(context, va, host, 64, stream));
    CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_copy_to_host(context, host, 64, cumoe_const(va), stream));
    CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_synchronize(context, stream));
    CHECK_TEXT("captured");
    CHECK_OK(cumoe_copy(context, vb, cumoe_const(va), stream));
    CHECK_OK(cumoe_fill(context, odd, 9, stream));
    CHECK(pthread_create(&thread, NULL, contexts_elsewhere, &wrong) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_MSG(wrong == 0, "another thread failed at 0x%x", wrong);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph)); /* and none of it broke the capture */
    CHECK_CUDA(cudaGetLastError());
    CHECK(a.id != 0 && none.id == 0);
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_OK(cumoe_copy_to_host(context, host, 64, cumoe_const(vb), stream));
    CHECK_OK(cumoe_synchronize(context, stream));
    for (int i = 0; i < 64; i++) want[i] = i % 8 >= 3 && i % 8 < 7 ? 9 : 7;
    CHECK(memcmp(host, want, 64) == 0);
    CHECK_OK(cumoe_buffer_free(&a));
    CHECK_OK(cumoe_buffer_free(&b));
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaStreamDestroy(stream));
    case_end();
  }
}

/* Failures of ours leave no CUDA error behind; an error of the caller's is still there afterwards. */
static void test_last_cuda_error(cumoe_context context)
{
  cumoe_buffer buffer = {0};
  (void)cudaGetLastError();
  case_begin("ours is taken back");
  CHECK_STATUS(CUMOE_ERR_OUT_OF_MEMORY, cumoe_buffer_alloc(context, CUMOE_U8, 1 << 20, 1 << 24, NULL, &buffer));
  CHECK_TEXT("17592186044");
  CHECK_MSG(cudaPeekAtLastError() == cudaSuccess, "%s is left", cudaGetErrorName(cudaPeekAtLastError()));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 64, 64, NULL, &buffer));
  case_end();
  case_begin("the caller's is kept");
  (void)cudaSetDevice(123456);
  const cudaError_t planted = cudaPeekAtLastError();
  CHECK(planted != cudaSuccess);
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(buffer), 1, NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_free(&(cumoe_buffer){1ull << 32 | 99}));
  CHECK_MSG(cudaPeekAtLastError() == planted, "it became %s", cudaGetErrorName(cudaPeekAtLastError()));
  CHECK_STATUS(CUMOE_ERR_OUT_OF_MEMORY, cumoe_buffer_alloc(context, CUMOE_U8, 1 << 20, 1 << 24, NULL, &buffer));
  CHECK_MSG(cudaGetLastError() != cudaSuccess, "the caller's error is gone");
  case_end();
}

static void CUDART_CB sleep_a_while(void *awake)
{
  usleep(300000);
  atomic_store((atomic_bool *)awake, true);
}

/* Work on any stream may still use the context's buffers and kernels. */
static void test_destroy_waits(void)
{
  cumoe_context context = NULL;
  cumoe_buffer buffer = {0};
  cudaStream_t stream = NULL;
  atomic_bool awake = false;
  case_begin("waits");
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_OK(cumoe_context_create(0, NULL, &context));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1 << 10, 1 << 10, stream, &buffer));
  CHECK_CUDA(cudaLaunchHostFunc(stream, sleep_a_while, &awake));
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(buffer), 1, stream));
  CHECK_OK(cumoe_context_destroy(context));
  CHECK(atomic_load(&awake));
  CHECK_CUDA(cudaStreamQuery(stream));
  CHECK_CUDA(cudaStreamDestroy(stream));
  case_end();
}

static int primary_active(int device)
{
  void *entry = NULL;
  int (*state)(int, unsigned *, int *), active = -1;
  unsigned flags = 0;
  enum cudaDriverEntryPointQueryResult found;
  CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &entry, 12000, cudaEnableDefault, &found));
  memcpy(&state, &entry, sizeof state);
  CHECK(entry != NULL && state(device, &flags, &active) == 0);
  return active;
}

/* Half a gigabyte of GPU 0 is not spent by a process that works on GPU 1. Nothing may have used GPU 0 before.
 */
static void test_other_gpu_alone(void)
{
  cumoe_context context = NULL;
  cumoe_buffer buffer = {0};
  int device = -1;
  case_begin("has no context");
  if (cuda_devices() < 2) {
    case_skip("one GPU only");
  } else {
    CHECK(primary_active(0) == 0);
    CHECK_OK(cumoe_context_create(1, NULL, &context));
    CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 64, 64, NULL, &buffer));
    CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(buffer), 1, NULL));
    CHECK_OK(cumoe_synchronize(context, NULL));
    CHECK_OK(cumoe_buffer_free(&buffer));
    CHECK_OK(cumoe_context_destroy(context));
    CHECK_MSG(primary_active(0) == 0, "one was created");
    CHECK_CUDA(cudaGetDevice(&device));
    CHECK_MSG(device == 0, "the current device became %d", device);
    case_end();
  }
}

/* A kernel's name is made of its row's columns. Codes of 4 bits have the type of a byte: their class is at the place of
 * W in the name. */
static const char *type_name(int32_t dtype)
{
  return dtype == 0 ? "x" : dtype == CUMOE_I8 ? "s8" : cumoe_dtype_name((cumoe_dtype)dtype);
}

static const char *class_name(const cumoe_variant_info *v)
{
  static const char *const fours[] = {"u4", "af4", "mx4", "nv4"};
  char part[16];
  for (int i = 0; i < 4 && v->w == CUMOE_U8; i++) {
    snprintf(part, sizeof part, "_%s_", fours[i]);
    if (strstr(v->name, part)) return fours[i];
  }
  return type_name(v->w);
}

static void test_kernel_table(cumoe_context context)
{
  case_begin("names and columns");
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    cumoe_variant_info v = {.size = sizeof v};
    char name[160];
    CHECK_OK(cumoe_variant_get(context, i, &v));
    const bool cpu = !strcmp(v.arch, "cpu");
    if (cpu)
      snprintf(name, sizeof name, "cumoe_%s_cpu", v.op);
    else if (v.bm > 0)
      snprintf(name, sizeof name, "cumoe_%s_%s_%s_%s_%s_%s_%s_%s_%dx%dx%d", v.op, v.arch, v.form, type_name(v.x),
               class_name(&v), type_name(v.y), v.scale, v.major, (int)v.bm, (int)v.bn, (int)v.bk);
    else
      snprintf(name, sizeof name, "cumoe_%s_%s_%s_%s_%s_%dx%dx%d", v.op, v.arch, v.form, type_name(v.x), type_name(v.y),
               (int)v.units, (int)v.columns, (int)v.lanes);
    CHECK_MSG(!strcmp(name, v.name), "%s, by its columns %s", v.name, name);
    CHECK(cpu || (v.warps >= 1 && v.warps <= 32 && v.ctas >= 1 && v.cluster >= 1 && v.smem >= 0));
    CHECK(cpu || (v.bm > 0 ? v.stages >= 1 && v.units == 0 : v.units > 0 && v.ahead >= 0 && v.stages == 0));
  }
  case_end();
}

static const test_group groups[] = {
    ALONE("a GPU that is not used", test_other_gpu_alone, ONCE),
    ALONE("names and texts", test_names, ONCE),
    ALONE("log", test_log, ONCE),
    ALONE("automatic device", test_auto, ONCE),
    ALONE("contexts", test_many_contexts, ONCE),
    GROUP("kernel table", test_kernel_table, ANYWHERE),
    GROUP("fork", test_fork, ANYWHERE),
    ALONE("fork of several threads", test_fork_while_busy, ONCE),
    GROUP("lifetime of buffers", test_lifetime, ANYWHERE),
    GROUP("buffers of no elements", test_zero_sizes, ANYWHERE),
    GROUP("buffers of a scope", test_scope, ANYWHERE),
    GROUP("slices", test_slices, ANYWHERE),
    GROUP("copies", test_copies, ANYWHERE),
    GROUP("buffers and threads", test_threads, ANYWHERE),
    GROUP("freed by two threads at once", test_double_free, ANYWHERE),
    GROUP("adopted and released memory", test_adopt_cpu, ON_CPU),
    GROUP("adopted and released memory", test_adopt_cuda, ON_CUDA),
    GROUP("captures", test_capture, ON_CUDA),
    GROUP("CUDA's last error", test_last_cuda_error, ON_CUDA),
    ALONE("destroying a context with work in flight", test_destroy_waits, ON_CUDA),
};
TEST_MAIN(groups)
