#include "gradient.h"

#include <math.h>

double *doubles_of(const tensor *from)
{
  double *to = scratch((size_t)(from->rows * from->cols + 1), sizeof *to);
  for (int64_t i = 0; i < from->rows * from->cols; i++) to[i] = tensor_get(from, 0, i);
  return to;
}

double dot_of(const double *a, const double *b, int64_t count)
{
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

/* Central, of fourth order: what is left out is h^4 / 30 of the fifth derivative. */
static double derivative(scalar_function *f, const void *user, double *x)
{
  static const double at[] = {1, -1, 2, -2}, weight[] = {8, -8, -1, 1};
  const double h = 1. / 1024, before = *x;
  double sum = 0;
  for (int i = 0; i < 4; i++) {
    *x = before + at[i] * h;
    sum += weight[i] * f(user);
  }
  *x = before;
  return sum / (12 * h);
}

void check_gradient(const char *what, scalar_function *f, const void *user, double *x, const tensor *got, double slack)
{
  const int64_t count = got->rows * got->cols;
  bounded *want = scratch((size_t)count + 1, sizeof *want);
  double most = 0;
  for (int64_t i = 0; i < count; i++) {
    want[i].value = derivative(f, user, x + i);
    most = fmax(most, fabs(want[i].value));
  }
  for (int64_t i = 0; i < count; i++)
    want[i].bound = unit_roundoff(got->dtype) * fabs(want[i].value) + slack * most + 1e-10 +
                    (got->dtype == CUMOE_F16 ? 0x1p-25 : 0);
  check_bounded(what, got, want);
}

void check_threads(const char *name, tensor (*run)(cumoe_context context))
{
  static const int32_t threads[] = {1, 2, 5};
  cumoe_context contexts[3] = {0};
  tensor first = {0};
  case_begin("%s", name);
  for (int i = 0; i < 3; i++) {
    const cumoe_context_config config = {.size = sizeof config, .cpu_threads = threads[i]};
    if (!CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &contexts[i]))) break;
    const tensor got = run(contexts[i]);
    if (i == 0) first = got;
    check_same("another number of threads", &got, &first);
  }
  case_end();
  for (int i = 0; i < 3; i++) CHECK_OK(cumoe_context_destroy(contexts[i]));
}
