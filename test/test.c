#include "test.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

uint8_t test_poison = 0xff;

/* ---- program, groups, cases ------------------------------------------------------------------------ */

enum { MAX_ALLOCATIONS = 1 << 16, MAX_PRINTED = 10 };

static struct {
  bool want_cpu, want_cuda, verbose;
  const char *only;
  int64_t passed, failed, skipped;
  int groups, met; /* groups run, groups begun */
  int shard, shards;
  bool seeded;
  seed_range seeds;
  char group[160], name[320];
  int64_t group_cases, group_failed, group_skipped;
  int printed;
  bool case_failed;
  double worst; /* of the group: largest error / bound */
  char worst_at[480];
  void *memory[MAX_ALLOCATIONS];
  int memory_count;
  cumoe_buffer buffers[MAX_ALLOCATIONS];
  int buffer_count;
} test;

void test_begin(int argc, char **argv)
{
  test.want_cpu = test.want_cuda = true;
  test.shards = 1;
  for (int i = 1; i < argc; i++) {
    const char *value = i + 1 < argc ? argv[i + 1] : "";
    if (!strcmp(argv[i], "--verbose"))
      test.verbose = true;
    else if (!strcmp(argv[i], "--only"))
      test.only = value, i++;
    else if (!strcmp(argv[i], "--shard")) {
      if (sscanf(value, "%d/%d", &test.shard, &test.shards) != 2 || test.shards < 1)
        test.want_cpu = test.want_cuda = false;
      i++;
    } else if (!strcmp(argv[i], "--seeds")) {
      if (sscanf(value, "%d-%d", &test.seeds.first, &test.seeds.end) != 2) test.want_cpu = test.want_cuda = false;
      test.seeded = true, i++;
    } else if (!strcmp(argv[i], "--device")) {
      test.want_cpu = !strcmp(value, "cpu") || !strcmp(value, "all");
      test.want_cuda = !strcmp(value, "cuda") || !strcmp(value, "all");
      i++;
    }
    if (!test.want_cpu && !test.want_cuda) {
      fprintf(stderr, "usage: %s [--device cpu|cuda|all] [--only TEXT] [--shard I/N] [--seeds FIRST-END] [--verbose]\n",
              argv[0]);
      exit(2);
    }
  }
}

seed_range test_seeds(int count)
{
  return test.seeded ? test.seeds : (seed_range){0, count};
}

int64_t now_ms(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int test_end(void)
{
  printf("%" PRId64 " passed, %" PRId64 " failed, %" PRId64 " skipped\n", test.passed, test.failed, test.skipped);
  return test.failed ? 1 : 0;
}

cumoe_context open_context(int32_t device)
{
  cumoe_context context = NULL;
  const char *name = device == CUMOE_DEVICE_CPU ? "cpu" : "cuda";
  if (!(device == CUMOE_DEVICE_CPU ? test.want_cpu : test.want_cuda)) return NULL;
  cumoe_status status = cumoe_context_create(device, NULL, &context);
  if (status == CUMOE_OK) return context;
  if (device != CUMOE_DEVICE_CPU && (status == CUMOE_ERR_NO_DEVICE || status == CUMOE_ERR_DRIVER_TOO_OLD)) {
    test.skipped++;
    printf("ok %d - %s # SKIP %s\n", ++test.groups, name, cumoe_last_error());
    return NULL;
  }
  test.failed++;
  printf("not ok %d - open %s: %s: %s\n", ++test.groups, name, cumoe_status_name(status), cumoe_last_error());
  return NULL;
}

int open_contexts(cumoe_context contexts[2])
{
  int count = 0;
  for (int i = 0; i < 2; i++) {
    contexts[count] = open_context(i == 0 ? CUMOE_DEVICE_CPU : 0);
    if (contexts[count] != NULL) count++;
  }
  return count;
}

void close_context(cumoe_context context)
{
  size_t bytes = 0;
  case_begin("close %s", context_name(context));
  CHECK_MSG(cumoe_buffer_live(context, &bytes) == 0, "%zu bytes of buffers are still live", bytes);
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

int32_t device_of(cumoe_context context)
{
  cumoe_device_info info = {.size = sizeof info};
  CHECK_OK(cumoe_context_info(context, &info));
  return info.device;
}

bool on_device(cumoe_context context)
{
  return device_of(context) != CUMOE_DEVICE_CPU;
}

const char *context_name(cumoe_context context)
{
  return on_device(context) ? "cuda" : "cpu";
}

bool group_begin(const char *format, ...)
{
  va_list args;
  va_start(args, format);
  vsnprintf(test.group, sizeof test.group, format, args);
  va_end(args);
  test.group_cases = test.group_failed = test.group_skipped = 0;
  test.printed = 0;
  test.worst = 0;
  test.worst_at[0] = 0;
  if (test.only && !strstr(test.group, test.only)) return false;
  return test.met++ % test.shards == test.shard; /* a shard takes every N-th group */
}

void group_end(void)
{
  printf("%sok %d - %s: %" PRId64 " cases", test.group_failed ? "not " : "", ++test.groups, test.group,
         test.group_cases);
  if (test.group_failed) printf(", %" PRId64 " failed", test.group_failed);
  if (test.group_skipped) printf(", %" PRId64 " skipped", test.group_skipped);
  if (test.worst > 0) printf(", worst error/bound %.3f (%s)", test.worst, test.worst_at);
  printf("\n");
  fflush(stdout);
}

void run_groups(cumoe_context context, const test_group *groups, size_t count)
{
  const unsigned here = context == NULL ? ONCE : on_device(context) ? ON_CUDA : ON_CPU;
  for (size_t i = 0; i < count; i++) {
    if (!(groups[i].where & here)) continue;
    if (!group_begin("%s%s%s", context ? context_name(context) : "", context ? ": " : "", groups[i].name)) continue;
    if (groups[i].alone)
      groups[i].alone();
    else
      groups[i].run(context);
    group_end();
  }
}

int test_main(int argc, char **argv, const test_group *groups, size_t count)
{
  cumoe_context contexts[2];
  test_begin(argc, argv);
  run_groups(NULL, groups, count);
  const int devices = open_contexts(contexts);
  for (int i = 0; i < devices; i++) {
    run_groups(contexts[i], groups, count);
    close_context(contexts[i]);
  }
  return test_end();
}

void case_begin(const char *format, ...)
{
  va_list args;
  va_start(args, format);
  vsnprintf(test.name, sizeof test.name, format, args);
  va_end(args);
  test.case_failed = false;
}

static void free_case(void)
{
  while (test.buffer_count > 0) CHECK_OK(cumoe_buffer_free(&test.buffers[--test.buffer_count]));
  while (test.memory_count > 0) free(test.memory[--test.memory_count]);
}

void case_end(void)
{
  free_case();
  test.group_cases++;
  if (test.case_failed)
    test.failed++, test.group_failed++;
  else
    test.passed++;
  if (test.verbose) printf("# %s %s\n", test.case_failed ? "failed" : "passed", test.name);
}

void case_drop(void)
{
  free_case();
}

void case_skip(const char *format, ...)
{
  va_list args;
  free_case();
  test.skipped++;
  test.group_skipped++;
  if (test.printed++ > MAX_PRINTED) return;
  printf("# skipped %s: ", test.name);
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  printf("\n");
}

bool test_failed(const char *file, int line, const char *format, ...)
{
  va_list args;
  test.case_failed = true;
  if (test.printed++ > MAX_PRINTED) return false;
  printf("# failed %s: %s: %s:%d: ", test.group, test.name, file, line);
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  printf("\n");
  return false;
}

bool test_status(cumoe_status want, cumoe_status got, const char *expression, const char *file, int line)
{
  if (got == want) return true;
  return test_failed(file, line, "%s is %s, want %s; last error: %s", expression, cumoe_status_name(got),
                     cumoe_status_name(want), cumoe_last_error());
}

void *scratch(size_t count, size_t bytes)
{
  void *p = calloc(count ? count : 1, bytes ? bytes : 1);
  if (p == NULL || test.memory_count == MAX_ALLOCATIONS) {
    fprintf(stderr, "out of scratch memory in %s\n", test.name);
    exit(2);
  }
  test.memory[test.memory_count++] = p;
  return p;
}

int scratch_mark(void)
{
  return test.memory_count;
}

void scratch_release(int mark)
{
  while (test.memory_count > mark) free(test.memory[--test.memory_count]);
}

/* ---- random numbers -------------------------------------------------------------------------------- */

/* splitmix64 */
uint64_t rng_next(rng *r)
{
  uint64_t z = r->state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

int64_t rng_below(rng *r, int64_t limit)
{
  return (int64_t)(rng_next(r) % (uint64_t)limit);
}

double rng_uniform(rng *r)
{
  return (double)(rng_next(r) >> 11) * 0x1p-53;
}

/* Four uniform numbers from one draw: a bell of variance 1, at most 3.5 from its middle. Large tests draw millions. */
double rng_normal(rng *r)
{
  uint64_t draw = rng_next(r);
  uint64_t sum = (draw & 0xffff) + (draw >> 16 & 0xffff) + (draw >> 32 & 0xffff) + (draw >> 48);
  return ((double)sum - 2 * 65535.0) * (1.7320508075688772 / 65536);
}

/* ---- host tensors ---------------------------------------------------------------------------------- */

typedef struct float_format {
  int digits, lowest, highest, bits; /* significant bits; exponents of the smallest and largest normal; bits in all */
} float_format;

static float_format format_of(int32_t dtype)
{
  switch ((cumoe_dtype)dtype) {
  case CUMOE_F16: return (float_format){11, -14, 15, 16};
  case CUMOE_BF16: return (float_format){8, -126, 127, 16};
  case CUMOE_F32:
  case CUMOE_U8:
  case CUMOE_I32:
  case CUMOE_I64:
  case CUMOE_E4M3:
  case CUMOE_E8M0:
  case CUMOE_I8: break;
  }
  return (float_format){24, -126, 127, 32};
}

/* ldexp(1, exponent), for exponents of normal doubles; much faster. */
static double power_of_two(int exponent)
{
  uint64_t bits = (uint64_t)(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* ilogb, likewise; of a subnormal one less than any normal's. */
static int exponent_of(double value)
{
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (int)(bits >> 52 & 0x7ff) - 1023;
}

double unit_roundoff(int32_t dtype)
{
  return power_of_two(-format_of(dtype).digits);
}

double round_to(double value, int32_t dtype)
{
  float_format f = format_of(dtype);
  if (value == 0 || !isfinite(value)) return value;
  int own = exponent_of(value), exponent = own < f.lowest ? f.lowest : own > f.highest ? f.highest : own;
  double step = power_of_two(exponent - f.digits + 1), rounded = nearbyint(value / step) * step;
  return fabs(rounded) >= power_of_two(f.highest + 1) ? copysign(INFINITY, value) : rounded;
}

static uint64_t encode(double value, int32_t dtype)
{
  float_format f = format_of(dtype);
  uint64_t sign = signbit(value) ? 1ull << (f.bits - 1) : 0;
  uint64_t infinity = ((1ull << (f.bits - f.digits)) - 1) << (f.digits - 1);
  double magnitude = fabs(round_to(value, dtype));
  if (isnan(value)) return sign | infinity | 1ull << (f.digits - 2);
  if (isinf(magnitude)) return sign | infinity;
  double steps = magnitude * power_of_two(f.digits - 1 - f.lowest); /* in smallest subnormals */
  if (steps < power_of_two(f.digits - 1)) return sign | (uint64_t)steps;
  int exponent = exponent_of(magnitude);
  uint64_t fraction = (uint64_t)(magnitude * power_of_two(f.digits - 1 - exponent)) - (1ull << (f.digits - 1));
  return sign | (uint64_t)(exponent - f.lowest + 1) << (f.digits - 1) | fraction;
}

static double decode(uint64_t code, int32_t dtype)
{
  if (dtype == CUMOE_BF16) { /* half of what tests read: the upper half of a float */
    const uint32_t bits = (uint32_t)code << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  float_format f = format_of(dtype);
  double sign = code >> (f.bits - 1) ? -1 : 1;
  uint64_t fraction = code & ((1ull << (f.digits - 1)) - 1), top = (1ull << (f.bits - f.digits)) - 1;
  uint64_t exponent = code >> (f.digits - 1) & top;
  if (exponent == top) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * (double)fraction * power_of_two(f.lowest - f.digits + 1);
  return sign * (double)(fraction | 1ull << (f.digits - 1)) * power_of_two((int)exponent + f.lowest - f.digits);
}

tensor tensor_new(int32_t dtype, int64_t rows, int64_t cols)
{
  tensor t = {dtype, rows, cols, scratch((size_t)(rows * cols), cumoe_dtype_bytes((cumoe_dtype)dtype))};
  return t;
}

double tensor_get(const tensor *t, int64_t row, int64_t col)
{
  int64_t i = row * t->cols + col;
  switch ((cumoe_dtype)t->dtype) {
  case CUMOE_F32: return ((const float *)(const void *)t->data)[i];
  case CUMOE_I32: return ((const int32_t *)(const void *)t->data)[i];
  case CUMOE_I64: return (double)((const int64_t *)(const void *)t->data)[i];
  case CUMOE_I8: return (int8_t)t->data[i];
  case CUMOE_E4M3: /* as codes: what they mean the oracle says */
  case CUMOE_E8M0:
  case CUMOE_U8: return t->data[i];
  case CUMOE_F16:
  case CUMOE_BF16: return decode(((const uint16_t *)(const void *)t->data)[i], t->dtype);
  }
  return NAN;
}

/* Most of what an oracle does: the usual type has a loop of its own. */
void tensor_get_run(const tensor *t, int64_t first, int64_t step, int64_t count, double *to)
{
  const uint16_t *halves = (const uint16_t *)(const void *)t->data;
  if (t->dtype == CUMOE_BF16)
    for (int64_t i = 0; i < count; i++) to[i] = decode(halves[first + i * step], CUMOE_BF16);
  else
    for (int64_t i = 0; i < count; i++) to[i] = tensor_get(t, 0, first + i * step);
}

void tensor_set(const tensor *t, int64_t row, int64_t col, double value)
{
  int64_t i = row * t->cols + col;
  switch ((cumoe_dtype)t->dtype) {
  case CUMOE_F32: ((float *)(void *)t->data)[i] = (float)value; break;
  case CUMOE_I32: ((int32_t *)(void *)t->data)[i] = (int32_t)value; break;
  case CUMOE_I64: ((int64_t *)(void *)t->data)[i] = (int64_t)value; break;
  case CUMOE_I8: t->data[i] = (uint8_t)(int8_t)value; break;
  case CUMOE_E4M3:
  case CUMOE_E8M0:
  case CUMOE_U8: t->data[i] = (uint8_t)value; break;
  case CUMOE_F16:
  case CUMOE_BF16: ((uint16_t *)(void *)t->data)[i] = (uint16_t)encode(value, t->dtype);
  }
}

static size_t tensor_bytes(const tensor *t)
{
  return (size_t)(t->rows * t->cols) * cumoe_dtype_bytes((cumoe_dtype)t->dtype);
}

bool tensor_equal(const tensor *a, const tensor *b)
{
  return a->dtype == b->dtype && a->rows == b->rows && a->cols == b->cols && !memcmp(a->data, b->data, tensor_bytes(a));
}

bool tensor_row_equal(const tensor *a, const tensor *b, int64_t row)
{
  const size_t bytes = (size_t)a->cols * cumoe_dtype_bytes((cumoe_dtype)a->dtype);
  return !memcmp(a->data + (size_t)row * bytes, b->data + (size_t)row * bytes, bytes);
}

tensor tensor_copy(const tensor *t)
{
  tensor c = tensor_new(t->dtype, t->rows, t->cols);
  memcpy(c.data, t->data, tensor_bytes(t));
  return c;
}

tensor tensor_normal(rng *r, int32_t dtype, int64_t rows, int64_t cols, double mean, double deviation)
{
  tensor t = tensor_new(dtype, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) tensor_set(&t, 0, i, mean + deviation * rng_normal(r));
  return t;
}

tensor tensor_integers(rng *r, int32_t dtype, int64_t rows, int64_t cols, int range)
{
  tensor t = tensor_new(dtype, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) tensor_set(&t, 0, i, (double)(rng_below(r, 2 * range + 1) - range));
  return t;
}

const char *pattern_name(pattern p)
{
  static const char *names[PATTERN_COUNT] = {"uniform",     "one",  "last",       "zipf",
                                             "round-robin", "none", "duplicates", "hostile"};
  return names[p];
}

static int64_t hostile_id(rng *r, int32_t experts)
{
  const int64_t bad[] = {-1, -1, -1, -2, experts, INT32_MIN, INT32_MAX};
  return bad[rng_below(r, 7)];
}

static int64_t pattern_id(rng *r, pattern p, int64_t token, int32_t slot, int32_t k, int32_t experts)
{
  switch (p) {
  case PATTERN_ONE: return experts / 3;
  case PATTERN_LAST: return experts - 1;
  case PATTERN_ZIPF: return (int64_t)(pow((double)experts + 1, rng_uniform(r)) - 1) % experts;
  case PATTERN_ROUND_ROBIN: return (token * k + slot) % experts;
  case PATTERN_NONE: return -1;
  case PATTERN_DUPLICATES: return (token * 7 + slot / 2) % experts;
  case PATTERN_HOSTILE: return rng_below(r, 3) ? hostile_id(r, experts) : rng_below(r, experts);
  default: return 0;
  }
}

static int64_t common_divisor(int64_t a, int64_t b)
{
  return b == 0 ? a : common_divisor(b, a % b);
}

tensor route_tokens(rng *r, pattern p, int32_t dtype, int64_t tokens, int32_t k, int32_t experts)
{
  tensor ids = tensor_new(dtype, tokens, k);
  for (int64_t token = 0; token < tokens; token++) {
    int64_t start = rng_below(r, experts), step = 1 + rng_below(r, experts);
    while (common_divisor(step, experts) != 1) step--;
    for (int32_t slot = 0; slot < k; slot++) {
      int64_t id = p == PATTERN_UNIFORM ? (start + step * slot) % experts : pattern_id(r, p, token, slot, k, experts);
      tensor_set(&ids, token, slot, (double)id);
    }
  }
  return ids;
}

/* ---- device memory --------------------------------------------------------------------------------- */

cumoe_view_mut as_mut(cumoe_view v)
{
  return (cumoe_view_mut){(void *)(uintptr_t)v.data, v.rows, v.cols, v.ld, v.owner, v.device, v.dtype};
}

cumoe_view no_view(void)
{
  return (cumoe_view){0};
}
cumoe_view_mut no_view_mut(void)
{
  return (cumoe_view_mut){0};
}

cumoe_view_mut device_new(cumoe_context context, int32_t dtype, int64_t rows, int64_t cols, int64_t pad)
{
  cumoe_buffer buffer;
  cumoe_view_mut view = {0};
  if (test.buffer_count == MAX_ALLOCATIONS) return view;
  if (!CHECK_OK(cumoe_buffer_alloc(context, (cumoe_dtype)dtype, rows + 2, cols + pad, NULL, &buffer))) return view;
  test.buffers[test.buffer_count++] = buffer;
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(buffer), test_poison, NULL));
  CHECK_OK(cumoe_view_rows_mut(cumoe_buffer_view_mut(buffer), 1, rows, &view));
  CHECK_OK(cumoe_view_cols_mut(view, 0, cols, &view));
  return view;
}

void device_set(cumoe_context context, cumoe_view_mut view, const tensor *t)
{
  if (t->rows * t->cols > 0) CHECK_OK(cumoe_copy_from_host(context, view, t->data, tensor_bytes(t), NULL));
}

cumoe_view device_put(cumoe_context context, const tensor *t, int64_t pad)
{
  cumoe_view_mut view = device_new(context, t->dtype, t->rows, t->cols, pad);
  device_set(context, view, t);
  return cumoe_const(view);
}

tensor device_get(cumoe_context context, cumoe_view view)
{
  tensor t = tensor_new(view.dtype, view.rows, view.cols);
  if (t.rows * t.cols > 0) CHECK_OK(cumoe_copy_to_host(context, t.data, tensor_bytes(&t), view, NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  return t;
}

bool check_guards(cumoe_context context, const char *what, cumoe_view_mut view)
{
  tensor all = device_get(context, cumoe_buffer_view((cumoe_buffer){view.owner}));
  int64_t bytes = (int64_t)cumoe_dtype_bytes((cumoe_dtype)all.dtype), width = all.cols * bytes;
  for (int64_t row = 0; row < all.rows; row++)
    for (int64_t i = row == 0 || row == all.rows - 1 ? 0 : view.cols * bytes; i < width; i++)
      if (all.data[row * width + i] != test_poison)
        return CHECK_MSG(false, "%s: written outside, row %" PRId64 " byte %" PRId64 " of [%" PRId64 ", %" PRId64 "]",
                         what, row - 1, i, view.rows, view.cols);
  return true;
}

bool check_untouched(cumoe_context context, const char *what, cumoe_view_mut view, int64_t first)
{
  tensor t = device_get(context, cumoe_const(view));
  size_t bytes = tensor_bytes(&t), row = bytes / (size_t)(t.rows ? t.rows : 1);
  for (size_t i = (size_t)first * row; i < bytes; i++)
    if (t.data[i] != test_poison)
      return CHECK_MSG(false, "%s: row %zu was written, rows from %" PRId64 " on must stay", what, i / row, first);
  return true;
}

/* ---- comparison ------------------------------------------------------------------------------------ */

/* Error in units of the bound: 0 met exactly, above 1 wrong. */
static double excess(double got, bounded want)
{
  if (isnan(want.value)) return isnan(got) ? 0 : INFINITY;
  if (isnan(got)) return INFINITY;
  if (isinf(want.bound)) return 0; /* overflow is allowed on this element */
  if (got == want.value) return 0;
  if (isinf(got) || isinf(want.value) || want.bound == 0) return INFINITY;
  return fabs(got - want.value) / want.bound;
}

static bool compare(const char *what, const tensor *got, int64_t first, int64_t rows, const bounded *want)
{
  double worst = 0;
  int64_t at = 0, wrong = 0;
  if (!CHECK_MSG(got->cols > 0, "%s: nothing there to compare", what)) return false;
  for (int64_t i = 0; i < rows * got->cols; i++) {
    double e = excess(tensor_get(got, first, i), want[i]);
    if (e > 1) wrong++;
    if (e > worst) worst = e, at = i;
  }
  if (worst > test.worst) {
    test.worst = worst;
    snprintf(test.worst_at, sizeof test.worst_at, "%s, %s", test.name, what);
  }
  return CHECK_MSG(worst <= 1,
                   "%s: %" PRId64 " of %" PRId64 " elements wrong, worst at row %" PRId64 " col %" PRId64
                   ": got %.9g, want %.9g within %.3g (error/bound %.3g)",
                   what, wrong, rows * got->cols, first + at / got->cols, at % got->cols, tensor_get(got, first, at),
                   want[at].value, want[at].bound, worst);
}

bool check_bounded(const char *what, const tensor *got, const bounded *want)
{
  return compare(what, got, 0, got->rows, want);
}

bool check_bounded_row(const char *what, const tensor *got, int64_t row, const bounded *want)
{
  return compare(what, got, row, 1, want);
}

bool check_same(const char *what, const tensor *a, const tensor *b)
{
  size_t bytes = tensor_bytes(a);
  if (!CHECK_MSG(a->dtype == b->dtype && bytes == tensor_bytes(b), "%s: shapes differ", what)) return false;
  for (size_t i = 0; i < bytes; i++)
    if (a->data[i] != b->data[i]) {
      int64_t element = (int64_t)(i / cumoe_dtype_bytes((cumoe_dtype)a->dtype));
      return CHECK_MSG(false, "%s: not bitwise equal at row %" PRId64 " col %" PRId64 ": %.9g and %.9g", what,
                       element / a->cols, element % a->cols, tensor_get(a, 0, element), tensor_get(b, 0, element));
    }
  return true;
}
