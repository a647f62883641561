/*
 * Matrix products: 2 x 2, checked by hand, then 512 x 512, timed beside a naive loop on one core. On the GPU if there
 * is one (by cuBLAS, opened when it is first needed), else on the CPU.
 */
#include <cumoe/cumoe.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void check(cumoe_status status)
{
  if (status == CUMOE_OK) return;
  fprintf(stderr, "%s: %s\n", cumoe_status_name(status), cumoe_last_error());
  exit(1);
}

static double now(void)
{
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A square matrix on the device; freed with its context. */
static cumoe_view_mut upload(cumoe_context context, const float *values, int64_t n)
{
  cumoe_buffer buffer;
  check(cumoe_buffer_alloc(context, CUMOE_F32, n, n, NULL, &buffer));
  check(cumoe_copy_from_host(context, cumoe_buffer_view_mut(buffer), values, (size_t)(n * n) * sizeof *values, NULL));
  return cumoe_buffer_view_mut(buffer);
}

static void download(cumoe_context context, float *values, cumoe_view_mut from)
{
  check(cumoe_copy_to_host(context, values, (size_t)(from.rows * from.cols) * sizeof *values, cumoe_const(from), NULL));
  check(cumoe_synchronize(context, NULL));
}

/* Scratch memory for products on one stream. */
static cumoe_view_mut workspace(cumoe_context context)
{
  size_t bytes;
  cumoe_buffer buffer;
  check(cumoe_matmul_workspace(context, &bytes));
  check(cumoe_buffer_alloc(context, CUMOE_U8, 1, (int64_t)bytes, NULL, &buffer));
  return cumoe_buffer_view_mut(buffer);
}

static void two_by_two(cumoe_context context, cumoe_view_mut scratch)
{
  const float a[] = {1, 2, 3, 4}, b[] = {5, 6, 7, 8}, zero[4] = {0};
  float c[4];
  cumoe_matmul_args args = {.size = sizeof args,
                            .a = cumoe_const(upload(context, a, 2)),
                            .b = cumoe_const(upload(context, b, 2)),
                            .c = upload(context, zero, 2),
                            .workspace = scratch};
  check(cumoe_matmul(context, &args, NULL));
  download(context, c, args.c);
  printf("[1 2; 3 4] [5 6; 7 8] = [%g %g; %g %g]\n", c[0], c[1], c[2], c[3]);
  if (c[0] != 19 || c[1] != 22 || c[2] != 43 || c[3] != 50) exit(1);
}

static void naive(const float *a, const float *b, float *c, int n)
{
  for (int i = 0; i < n; i++)
    for (int j = 0; j < n; j++) {
      float sum = 0;
      for (int k = 0; k < n; k++) sum += a[i * n + k] * b[k * n + j];
      c[i * n + j] = sum;
    }
}

static float *matrix(int n, unsigned seed)
{
  float *m = malloc((size_t)(n * n) * sizeof *m);
  if (!m) exit(1);
  for (int i = 0; i < n * n; i++) m[i] = (float)((unsigned)i * 2654435761u % (1999 + seed)) / 1000.f - 1.f;
  return m;
}

/* The least of a few runs. */
static double seconds_of(cumoe_context context, const cumoe_matmul_args *args)
{
  double best = 1e9;
  for (int i = 0; i < 5; i++) {
    const double start = now();
    check(cumoe_matmul(context, args, NULL));
    check(cumoe_synchronize(context, NULL));
    if (now() - start < best) best = now() - start;
  }
  return best;
}

static void thousand(cumoe_context context, cumoe_view_mut scratch)
{
  enum { N = 512 };
  float *a = matrix(N, 0), *b = matrix(N, 8), *c = matrix(N, 0), *want = matrix(N, 0);
  cumoe_matmul_args args = {.size = sizeof args,
                            .a = cumoe_const(upload(context, a, N)),
                            .b = cumoe_const(upload(context, b, N)),
                            .c = upload(context, c, N),
                            .workspace = scratch};
  const double start = now();
  naive(a, b, want, N);
  const double loop = now() - start, library = seconds_of(context, &args);
  float worst = 0;
  download(context, c, args.c);
  for (int i = 0; i < N * N; i++) worst = fmaxf(worst, fabsf(c[i] - want[i]));
  printf("%d x %d x %d: naive loop %.0f ms, cumoe_matmul %.3f ms (%.1f GFLOPS), %.0f times as fast; largest difference "
         "%g\n",
         N, N, N, 1e3 * loop, 1e3 * library, 2e-9 * N * N * N / library, loop / library, (double)worst);
  free(a);
  free(b);
  free(c);
  free(want);
  if (!(worst < 0.02f)) exit(1); /* sums of 512 products of up to 1 in f32 */
}

int main(void)
{
  cumoe_context context;
  check(cumoe_context_create(CUMOE_DEVICE_AUTO, NULL, &context));
  cumoe_device_info info = {.size = sizeof info};
  check(cumoe_context_info(context, &info));
  printf("%s\n", info.name);
  if (cumoe_matmul_prepare(context) == CUMOE_ERR_LIBRARY_MISSING) { /* a GPU, but no cuBLAS */
    printf("%s\nthe CPU instead\n", cumoe_last_error());
    check(cumoe_context_destroy(context));
    check(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &context));
  }
  const cumoe_view_mut scratch = workspace(context);
  two_by_two(context, scratch);
  thousand(context, scratch);
  check(cumoe_context_destroy(context));
  return 0;
}
