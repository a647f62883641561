/*
 * A launch of the caller's own kernel: its shape and its arguments, changed anywhere, against the checks that stand
 * before CUDA. What they let through must be what CUDA allows, and every parameter must be readable to its last byte.
 *
 * Input: changes (change.h) of a struct that holds both.
 */
#include <cumoe/buffer.h>

#include "change.h"

#include "../../host/context.h"
#include "../../host/module.h"

enum { ARGS = 9, BLOB = 12 };

typedef struct launch_input {
  cumoe_launch launch;
  cumoe_arg args[ARGS];
  int32_t count, any_grid;
} launch_input;

static struct context *cpu;
static cumoe_buffer live, freed;
static char *blob;

static function_facts facts_of(struct context *gpu)
{
  const function_facts f = {.context = gpu,
                            .max_threads = 512,
                            .static_smem = 1024,
                            .max_dynamic_smem = 65536,
                            .parameters = ARGS,
                            .parameter_bytes = {4, 4, 8, 8, 4, 8, 8, 8, BLOB},
                            .name = "kernel"};
  return f;
}

static void set_up(void)
{
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = 1};
  cumoe_context context;
  PROMISE(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &context) == CUMOE_OK, "%s", cumoe_last_error());
  PROMISE(find_context(context, &cpu) == CUMOE_OK, "%s", cumoe_last_error());
  PROMISE(cumoe_buffer_alloc(context, CUMOE_F32, 4, 8, NULL, &live) == CUMOE_OK, "%s", cumoe_last_error());
  PROMISE(cumoe_buffer_alloc(context, CUMOE_F32, 4, 8, NULL, &freed) == CUMOE_OK, "%s", cumoe_last_error());
  cumoe_buffer last = freed;
  PROMISE(cumoe_buffer_free(&last) == CUMOE_OK, "%s", cumoe_last_error());
  blob = calloc(1, BLOB);
  PROMISE(blob, "no memory");
}

static launch_input good(void)
{
  const launch_input p = {.launch = cumoe_launch_elements(1000, NULL),
                          .args = {cumoe_arg_i32(-1), cumoe_arg_u32(1), cumoe_arg_i64(-1), cumoe_arg_u64(1),
                                   cumoe_arg_f32(0.5f), cumoe_arg_f64(0.1), cumoe_arg_view(cumoe_buffer_view(live)),
                                   cumoe_arg_view_mut(cumoe_buffer_view_mut(live)), cumoe_arg_bytes(blob, BLOB)},
                          .count = ARGS};
  return p;
}

/* Owners are none, live, freed or anything; a blob is as long as its argument says, or null. */
static void settle(cumoe_arg *a)
{
  if (a->kind == CUMOE_ARG_BYTES) a->value.blob = a->bytes <= BLOB && a->value.blob ? blob + BLOB - a->bytes : NULL;
  if (a->kind != CUMOE_ARG_VIEW && a->kind != CUMOE_ARG_VIEW_MUT) return;
  if (a->value.view.owner % 4 == 1) a->value.view.owner = live.id;
  if (a->value.view.owner % 4 == 2) a->value.view.owner = freed.id;
}

static void check_shape(const launch_input *p, const function_facts *f)
{
  launch_shape s;
  cumoe_stream stream;
  const cumoe_status status = check_launch(f, &p->launch, p->any_grid % 2 != 0, &s, &stream);
  PROMISE(status == CUMOE_OK || cumoe_last_error()[0], "refused without a text");
  if (status != CUMOE_OK) return;
  const uint64_t threads = (uint64_t)s.block.x * s.block.y * s.block.z;
  PROMISE(threads >= 1 && threads <= 512 && s.block.z <= 64, "%u %u %u", s.block.x, s.block.y, s.block.z);
  PROMISE(p->any_grid % 2 != 0 || (s.grid.x <= INT32_MAX && s.grid.y - 1 < 65535 && s.grid.z - 1 < 65535), "%u %u %u",
          s.grid.x, s.grid.y, s.grid.z);
  PROMISE((uint64_t)s.cluster.x * s.cluster.y * s.cluster.z <= 8, "%u %u %u", s.cluster.x, s.cluster.y, s.cluster.z);
}

static void check_args(const launch_input *p, const function_facts *f)
{
  void *at[CUMOE_MAX_PARAMETERS] = {NULL};
  char copy[BLOB];
  const cumoe_status status = check_arguments(f, p->count == 0 ? NULL : p->args, p->count, at);
  PROMISE(status == CUMOE_OK || cumoe_last_error()[0], "refused without a text");
  if (status != CUMOE_OK) return;
  PROMISE(p->count == ARGS, "%d arguments pass", (int)p->count);
  for (int i = 0; i < ARGS; i++) memcpy(copy, at[i], f->parameter_bytes[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  input in = {data, data + (size < 256 ? size : 256)};
  struct context hopper = {.device = 0, .info = {.cc_major = 9}};
  if (!cpu) set_up();
  const function_facts on_gpu = facts_of(&hopper), on_cpu_device = facts_of(cpu);
  launch_input p = good();
  change(&in, &p, sizeof p);
  if (p.launch.size > sizeof p.launch) p.launch.size = sizeof p.launch;
  for (int i = 0; i < ARGS; i++) settle(&p.args[i]);
  if (p.count > ARGS) p.count = ARGS;
  check_shape(&p, &on_gpu);
  check_args(&p, &on_cpu_device);
  return 0;
}
