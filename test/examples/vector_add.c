/* A kernel of one's own, end to end: owned buffers, a kernel from a PTX file, a checked launch, the result verified. */
#include <cumoe/cumoe.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 1 << 20 };

static float a[N], b[N], sum[N];

static void check(cumoe_status status)
{
  if (status == CUMOE_OK) return;
  fprintf(stderr, "%s: %s\n", cumoe_status_name(status), cumoe_last_error());
  exit(1);
}

static cumoe_buffer upload(cumoe_context context, const float *values)
{
  cumoe_buffer buffer;
  check(cumoe_buffer_alloc(context, CUMOE_F32, 1, N, NULL, &buffer));
  check(cumoe_copy_from_host(context, cumoe_buffer_view_mut(buffer), values, N * sizeof *values, NULL));
  return buffer;
}

/* Buffers go when their scope is left. */
static void add(cumoe_context context, cumoe_function kernel)
{
  CUMOE_AUTO_BUFFER x = upload(context, a);
  CUMOE_AUTO_BUFFER y = upload(context, b);
  CUMOE_AUTO_BUFFER z = {0};
  check(cumoe_buffer_alloc(context, CUMOE_F32, 1, N, NULL, &z));
  const cumoe_launch launch = cumoe_launch_elements(N, NULL);
  const cumoe_arg args[] = {cumoe_arg_view(cumoe_buffer_view(x)), cumoe_arg_view(cumoe_buffer_view(y)),
                            cumoe_arg_view_mut(cumoe_buffer_view_mut(z)), cumoe_arg_i32(N)};
  check(cumoe_launch_kernel(kernel, &launch, args, 4));
  check(cumoe_copy_to_host(context, sum, sizeof sum, cumoe_buffer_view(z), NULL));
  check(cumoe_synchronize(context, NULL));

  /* One argument is too small: refused before anything is launched. */
  const cumoe_arg wrong[] = {args[0], args[1], cumoe_arg_i32(7), args[3]};
  if (cumoe_launch_kernel(kernel, &launch, wrong, 4) == CUMOE_OK) exit(1);
  printf("%s\n", cumoe_last_error());
}

int main(int argc, char **argv)
{
  cumoe_context context;
  cumoe_module module;
  cumoe_function kernel;
  char path[4096];
  const cumoe_status status = cumoe_context_create(0, NULL, &context);
  if (status == CUMOE_ERR_NO_DEVICE) {
    printf("skipped: no GPU: nothing to do\n");
    return 0;
  }
  check(status);
  snprintf(path, sizeof path, "%s.ptx", argc > 0 ? argv[0] : "vector_add"); /* it lies beside the program */
  check(cumoe_module_load_file(context, path, &module));
  check(cumoe_module_function(module, "vector_add", 0, &kernel));
  for (int i = 0; i < N; i++) {
    a[i] = (float)i;
    b[i] = (float)(2 * i);
  }
  add(context, kernel);
  for (int i = 0; i < N; i++)
    if (sum[i] != (float)(3 * i)) {
      fprintf(stderr, "sum[%d] is %g, not %g\n", i, (double)sum[i], (double)(3 * i));
      return 1;
    }
  printf("%d sums are right\n", N);
  check(cumoe_module_unload(&module));
  check(cumoe_context_destroy(context));
  return 0;
}
