/* What a profiler sees: a range for each call on a stream, in the library's domain, closed however the call ends. The
 * profiler is test/tool/profiler.c, named to NVTX before the first context. */
#include "test.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *open_profiler(void)
{
  static char path[512];
  const char *lib = getenv("LIB");
  snprintf(path, sizeof path, "%s/test/profiler.so", lib && lib[0] ? lib : "lib");
  void *library = dlopen(path, RTLD_NOW);
  if (!library) return NULL;
  CHECK(setenv("NVTX_INJECTION64_PATH", path, 1) == 0);
  return dlsym(library, "profiler_text");
}

/* What was noted since the last time. */
static bool noted(char *text, const char *want)
{
  const bool same = CHECK_MSG(strcmp(text, want) == 0, "noted \"%s\", not \"%s\"", text, want);
  text[0] = 0;
  return same;
}

static void test_ranges(char *text)
{
  cumoe_context context = NULL;
  if (!group_begin("ranges of calls on a stream")) return;
  case_begin("domain, a call, a refused call, one without a stream");
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &context));
  noted(text, "domain cumoe");
  const cumoe_view_mut a = device_new(context, CUMOE_F32, 3, 5, 0), b = device_new(context, CUMOE_F32, 3, 4, 0);
  text[0] = 0;
  CHECK_OK(cumoe_fill(context, a, 1, NULL));
  noted(text, " <cumoe_fill>");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_copy(context, a, cumoe_const(b), NULL));
  CHECK_OK(cumoe_relu(context, cumoe_const(a), a, NULL));
  noted(text, " <cumoe_copy> <cumoe_relu>");
  cumoe_device_info info = {.size = sizeof info};
  CHECK_OK(cumoe_context_info(context, &info));
  noted(text, "");
  case_end();
  close_context(context);
  group_end();
}

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  char *text = open_profiler();
  if (text) {
    test_ranges(text);
  } else {
    case_begin("ranges");
    case_skip("no lib/test/profiler.so: the toolkit has no NVTX headers");
    case_end();
  }
  return test_end();
}
