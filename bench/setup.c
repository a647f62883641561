/* What the programs of this folder share: the table of shapes, the GPU and its rates, opening and closing. */
#include "bench.h"

#include <string.h>

static const shape shapes[] = {
#define SHAPE(name, e, k, h, i, routing, when) {name, e, k, h, i, {0}, SHAPE_##when},
#include "shapes.def"
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

int32_t shape_count(void)
{
  return SHAPES;
}

/* Routings are function calls, so they cannot stand in the table. */
shape shape_at(int32_t index)
{
  const cumoe_routing routings[SHAPES] = {
#define SHAPE(name, e, k, h, i, routing, when) routing,
#include "shapes.def"
  };
  shape s = shapes[index];
  s.routing = routings[index];
  return s;
}

/* Measured: reading by a kernel of its own; cuBLAS's product of 8192^3 in bf16 and in e4m3. */
static const gpu_rates known_gpus[] = {{"H200", {4.8e12, 989e12, 1979e12}, {4.54e12, 789e12, 1418e12}},
                                       {"H100", {3.35e12, 989e12, 1979e12}, {0, 0, 0}},
                                       {"B200", {8e12, 2250e12, 4500e12}, {0, 0, 0}},
                                       {"A100", {2.039e12, 312e12, 624e12}, {0, 0, 0}}};

static void print_log(void *user, cumoe_log_level level, const char *message)
{
  (void)user;
  (void)level;
  fprintf(stderr, "cumoe: %s\n", message);
}

cumoe_status bench_open(bench *b)
{
  cumoe_set_log(print_log, NULL, CUMOE_LOG_WARNING);
  TRY(cumoe_context_create(b->o.device, NULL, &b->context));
  b->device.size = sizeof b->device;
  TRY(cumoe_context_info(b->context, &b->device));
  if (b->device.device == CUMOE_DEVICE_CPU) return CUMOE_OK;
  TRY_CUDA(b, cudaSetDevice(b->device.device));
  TRY_CUDA(b, cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking));
  b->nvml = nvml_open(b);
  for (size_t i = 0; i < sizeof known_gpus / sizeof *known_gpus && !b->rates; ++i)
    if (strstr(b->device.name, known_gpus[i].name)) b->rates = &known_gpus[i];
  return CUMOE_OK;
}

void bench_close(bench *b)
{
  nvml_close(b->nvml);
  store_free(&b->store);
  if (b->context) (void)cumoe_context_destroy(b->context);
  if (b->stream) cudaStreamDestroy(b->stream);
}

int bench_main(int argc, char **argv, const char *name, int32_t device, cumoe_status (*run)(bench *b))
{
  bench b = {.o = {.device = device, .dtype = CUMOE_BF16, .quick = argc == 2}, .seed = 1};
  if (argc > 2 || (argc == 2 && strcmp(argv[1], "--quick") != 0)) {
    fprintf(stderr, "usage: %s [--quick]\n", name);
    return 2;
  }
  cumoe_status status = bench_open(&b);
  if (status == CUMOE_OK) status = run(&b);
  if (status != CUMOE_OK) fprintf(stderr, "%s: %s\n", name, failure_text(&b));
  bench_close(&b);
  return status == CUMOE_OK ? 0 : 1;
}
