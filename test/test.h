/*
 * What all test programs share: cases and checks, random numbers, host tensors, device memory with guards,
 * comparison against (value, bound). Output is TAP-like; the last line is "N passed, N failed, N skipped".
 *
 * A case owns what is made inside it: host memory from scratch(), tensors and device buffers are freed by
 * case_end. Conversions between element types are the tests' own, by arithmetic, not by the library's bit tricks.
 */
#ifndef TEST_H
#define TEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CUMOE_EXPERIMENTAL
#include <cumoe/cumoe.h>

/* ---- program, groups, cases ------------------------------------------------------------------------ */

/* Options: --device cpu|cuda|all (all usable), --only TEXT (groups whose name contains TEXT), --verbose. */
void test_begin(int argc, char **argv);
int test_end(void); /* prints the last line; the program's exit status */

/* CPU and, where there is one, CUDA device 0; a missing CUDA device is one skip. Returns how many. */
int open_contexts(cumoe_context contexts[2]);
cumoe_context open_context(int32_t device); /* NULL: skipped or failed, already counted */
void close_context(cumoe_context context);
bool on_device(cumoe_context context); /* false on the CPU device */
int32_t device_of(cumoe_context context);
const char *context_name(cumoe_context context); /* "cpu", "cuda" */

/* Groups as rows: what each is called, its function, where it runs. `alone` is a function that needs no context. */
typedef struct test_group {
  const char *name;
  void (*run)(cumoe_context context);
  unsigned where;
  void (*alone)(void);
} test_group;
#define GROUP(name_, run_, where_)                                                                                     \
  {                                                                                                                    \
    .name = name_, .run = run_, .where = where_                                                                        \
  }
#define ALONE(name_, alone_, where_)                                                                                   \
  {                                                                                                                    \
    .name = name_, .alone = alone_, .where = where_                                                                    \
  }
enum { ON_CPU = 1, ON_CUDA = 2, ANYWHERE = 3, ONCE = 4 };                       /* ONCE: before any context is open */
void run_groups(cumoe_context context, const test_group *groups, size_t count); /* NULL: those that run once */
/* A whole program: every group on every device. */
int test_main(int argc, char **argv, const test_group *groups, size_t count);
#define TEST_MAIN(groups)                                                                                              \
  int main(int argc, char **argv)                                                                                      \
  {                                                                                                                    \
    return test_main(argc, argv, groups, sizeof groups / sizeof groups[0]);                                            \
  }

int64_t now_ms(void); /* of a clock that nobody sets */

/* A group prints one line. False: not wanted (--only). */
bool group_begin(const char *format, ...) __attribute__((format(printf, 1, 2)));
void group_end(void);
void case_begin(const char *format, ...) __attribute__((format(printf, 1, 2)));
void case_end(void);
void case_skip(const char *format, ...) __attribute__((format(printf, 1, 2))); /* instead of case_end */

void case_drop(void); /* instead of case_end: counts as nothing */

bool test_failed(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4))); /* false */
static inline bool test_result(bool ok) /* which need not be used */
{
  return ok;
}
/* The text is made only where it is printed: it would be a third of some tests' time. */
#define CHECK_MSG(condition, ...)      test_result((condition) || test_failed(__FILE__, __LINE__, __VA_ARGS__))
#define CHECK(condition)               CHECK_MSG(condition, "%s", #condition)
#define CHECK_STATUS(want, expression) test_status((want), (expression), #expression, __FILE__, __LINE__)
#define CHECK_OK(expression)           CHECK_STATUS(CUMOE_OK, expression)
/* The last error has these words. */
#define CHECK_TEXT(words) CHECK_MSG(strstr(cumoe_last_error(), words) != NULL, "the text is \"%s\"", cumoe_last_error())
bool test_status(cumoe_status want, cumoe_status got, const char *expression, const char *file, int line);

void *scratch(size_t count, size_t bytes); /* zeroed, freed by case_end */
int scratch_mark(void);
void scratch_release(int mark); /* frees what scratch() gave since the mark */

/* Element types of layers. Cases deal three of them. */
static const int32_t case_dtypes[] = {
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)
#define DENSE(name, DTYPE, BITS) CUMOE_##DTYPE,
#include "../kernels/formats.def"
};
_Static_assert(sizeof case_dtypes / sizeof *case_dtypes == 3, "a type of layers that the cases leave out");

/* ---- random numbers -------------------------------------------------------------------------------- */

typedef struct rng {
  uint64_t state;
} rng;
uint64_t rng_next(rng *r);
int64_t rng_below(rng *r, int64_t limit); /* 0 .. limit - 1 */
double rng_uniform(rng *r);               /* [0, 1) */
double rng_normal(rng *r);

/* Numbers of the cases that are made at random: 0 .. count - 1, or those of --seeds. */
typedef struct seed_range {
  int first, end;
} seed_range;
seed_range test_seeds(int count);

/* ---- host tensors ---------------------------------------------------------------------------------- */

double round_to(double value, int32_t dtype); /* nearest value of a float type, ties to even */
double unit_roundoff(int32_t dtype);

/* Packed [rows, cols] in host memory. */
typedef struct tensor {
  int32_t dtype;
  int64_t rows, cols;
  unsigned char *data;
} tensor;

tensor tensor_new(int32_t dtype, int64_t rows, int64_t cols);
double tensor_get(const tensor *t, int64_t row, int64_t col);
/* `count` elements from element `first` on, each `step` behind the one before. */
void tensor_get_run(const tensor *t, int64_t first, int64_t step, int64_t count, double *to);
void tensor_set(const tensor *t, int64_t row, int64_t col, double value); /* rounds */
bool tensor_equal(const tensor *a, const tensor *b);                      /* bitwise */
bool tensor_row_equal(const tensor *a, const tensor *b, int64_t row);
tensor tensor_copy(const tensor *t);

/* Normal with this deviation, plus mean; or integers -range .. range. */
tensor tensor_normal(rng *r, int32_t dtype, int64_t rows, int64_t cols, double mean, double deviation);
tensor tensor_integers(rng *r, int32_t dtype, int64_t rows, int64_t cols, int range);

/* Expert ids, k a token, by a pattern. */
typedef enum pattern {
  PATTERN_UNIFORM, /* k different experts */
  PATTERN_ONE,     /* every slot the same expert */
  PATTERN_LAST,    /* every slot the last expert */
  PATTERN_ZIPF,
  PATTERN_ROUND_ROBIN,
  PATTERN_NONE, /* all -1 */
  PATTERN_DUPLICATES,
  PATTERN_HOSTILE, /* a third out of range, a third -1 */
  PATTERN_COUNT
} pattern;
const char *pattern_name(pattern p);
tensor route_tokens(rng *r, pattern p, int32_t dtype, int64_t tokens, int32_t k, int32_t experts);

/* ---- device memory --------------------------------------------------------------------------------- */

/* The byte that fresh device memory is filled with: programs run cases with two of them. */
extern uint8_t test_poison;

/* A poisoned [rows, cols] view with ld = cols + pad, guarded by a row before, a row after, and the pad. */
cumoe_view_mut device_new(cumoe_context context, int32_t dtype, int64_t rows, int64_t cols, int64_t pad);
cumoe_view device_put(cumoe_context context, const tensor *t, int64_t pad);
void device_set(cumoe_context context, cumoe_view_mut view, const tensor *t);
tensor device_get(cumoe_context context, cumoe_view view);
/* Nothing around the view was written. */
bool check_guards(cumoe_context context, const char *what, cumoe_view_mut view);
/* Rows first .. are still poison. */
bool check_untouched(cumoe_context context, const char *what, cumoe_view_mut view, int64_t first);
cumoe_view no_view(void);
cumoe_view_mut no_view_mut(void);
cumoe_view_mut as_mut(cumoe_view v);

/* ---- comparison ------------------------------------------------------------------------------------ */

/* A true value and how far from it a correct result may lie. NaN and infinities must be met exactly. */
typedef struct bounded {
  double value, bound;
} bounded;

/* Compares got[rows, cols] with want[rows * cols]; reports the worst error / bound and its place. */
bool check_bounded(const char *what, const tensor *got, const bounded *want);
bool check_bounded_row(const char *what, const tensor *got, int64_t row, const bounded *want);
bool check_same(const char *what, const tensor *a, const tensor *b); /* bitwise, prints the first difference */

#endif
