/* The kernel of vector_add.c again, compiled from source while the program runs. */
#include <cumoe/cumoe.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 1000 };

static const char source[] =
    "extern \"C\" __global__ void vector_add(const float *a, const float *b, float *sum, int n)\n"
    "{\n"
    "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "  if (i < n) sum[i] = a[i] + b[i];\n"
    "}\n";

static void check(cumoe_status status)
{
  if (status == CUMOE_OK) return;
  fprintf(stderr, "%s: %s\n", cumoe_status_name(status), cumoe_last_error());
  exit(1);
}

static cumoe_view_mut vector(cumoe_context context)
{
  cumoe_buffer buffer; /* freed with its context */
  check(cumoe_buffer_alloc(context, CUMOE_F32, 1, N, NULL, &buffer));
  return cumoe_buffer_view_mut(buffer);
}

static int run(cumoe_context context, cumoe_function kernel)
{
  static float a[N], b[N], sum[N];
  for (int i = 0; i < N; i++) {
    a[i] = (float)i;
    b[i] = 0.5f;
  }
  const cumoe_view_mut x = vector(context), y = vector(context), z = vector(context);
  check(cumoe_copy_from_host(context, x, a, sizeof a, NULL));
  check(cumoe_copy_from_host(context, y, b, sizeof b, NULL));
  const cumoe_launch launch = cumoe_launch_elements(N, NULL);
  const cumoe_arg args[] = {cumoe_arg_view_mut(x), cumoe_arg_view_mut(y), cumoe_arg_view_mut(z), cumoe_arg_i32(N)};
  check(cumoe_launch_kernel(kernel, &launch, args, 4));
  check(cumoe_copy_to_host(context, sum, sizeof sum, cumoe_const(z), NULL));
  check(cumoe_synchronize(context, NULL));
  int wrong = 0;
  for (int i = 0; i < N; i++) wrong += sum[i] != (float)i + 0.5f;
  return wrong;
}

int main(void)
{
  cumoe_context context;
  cumoe_module module;
  cumoe_function kernel;
  cumoe_image image;
  char log[2048];

  /* Compiling needs NVRTC, but no GPU; what the compiler says can be read. */
  const char *const options[] = {"-lineinfo"};
  const cumoe_status found = cumoe_compile(source, "compute_80", options, 1, NULL, 0, &image);
  if (found == CUMOE_ERR_LIBRARY_MISSING) {
    printf("skipped: %s\n", cumoe_last_error());
    return 0;
  }
  check(found);
  printf("%zu bytes of PTX\n", image.bytes);
  cumoe_image_free(&image);
  if (cumoe_compile("__global__ void f() { oops }", "compute_80", NULL, 0, log, sizeof log, &image) == CUMOE_OK)
    return 1;
  printf("%s", log);

  const cumoe_status status = cumoe_context_create(0, NULL, &context);
  if (status == CUMOE_ERR_NO_DEVICE) {
    printf("skipped: no GPU: nothing to do\n");
    return 0;
  }
  check(status);
  check(cumoe_module_compile(context, source, options, 1, NULL, 0, &module)); /* for this very GPU */
  check(cumoe_module_function(module, "vector_add", 0, &kernel));
  const int wrong = run(context, kernel);
  printf("%d of %d sums are wrong\n", wrong, N);
  check(cumoe_module_unload(&module));
  check(cumoe_context_destroy(context));
  return wrong != 0;
}
