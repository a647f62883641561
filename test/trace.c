/*
 * What the host layer calls of CUDA: launches make no allocating, waiting or asking call and leave the thread's device
 * and last error alone; what machines of all kinds are answered; which status each CUDA error becomes; several threads
 * on one context.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codes.h"
#include "shim/layer.h"
#include "../host/context.h"
#include "../host/ep.h"
#include "../host/handles.h"
#include "../host/tmap.h"
#include "../kernels/attention.h"
#include "../kernels/backward.h"

typedef struct launching {
  const char *name;
  void (*prepare)(world *w);
  cumoe_status (*act)(world *w);
  const char *kernels; /* the operations in order */
} launching;

static cumoe_status clear_fault(world *w)
{
  return cumoe_fault_clear(w->context, w->stream);
}

static const launching launches[] = {
    {"forward from ids", small_layer, run_routed, "map up down combine "},
    {"forward from logits", small_layer, run_logits, "gate map map up down combine "},
    {"forward of one token", wide_layer, run_wide, "few "},
    {"forward of one token from the router", wide_layer, run_wide_routed, "router few "},
    {"forward with everything", shared_layer, run_everything, "router gate map up down router up down combine "},
    {"forward, unreduced", unreduced_layer, run_unreduced, "gate map up down combine "},
    {"router of many tokens", small_layer, run_router, "router "},
    {"stages", small_layer, run_stages, "router gate map up permute up down combine "},
    {"fault word cleared", small_layer, clear_fault, ""},
};
enum { LAUNCHES = sizeof launches / sizeof launches[0] };

/* "up down " from the lines of the trace that launch cumoe_up_... and cumoe_down_... */
static void list_kernels(const char *trace, char *list, size_t bytes)
{
  static const char begin[] = "cuLaunchKernelEx cumoe_";
  list[0] = 0;
  for (const char *at = trace; (at = strstr(at, begin)) != NULL;) {
    at += sizeof begin - 1;
    const size_t used = strlen(list);
    snprintf(list + used, bytes - used, "%.*s ", (int)strcspn(at, "_"), at);
  }
}

typedef enum before { NO_DEVICE, ITS_DEVICE, OTHER_DEVICE, BEFORES } before;

static void make_current(before b)
{
  shim_drop_context();
  if (b == ITS_DEVICE) OWN(cudaSetDevice(1));
  if (b == OTHER_DEVICE) OWN(cudaSetDevice(0));
}

static void end_world(world *w)
{
  CHECK_OK(cumoe_weights_destroy(w->weights));
  CHECK_OK(cumoe_weights_destroy(w->shared));
  CHECK_OK(cumoe_plan_destroy(w->plan));
  CHECK_OK(cumoe_context_destroy(w->context));
  CHECK_OK(cumoe_context_destroy(w->other));
  if (w->stream) OWN(cudaStreamDestroy(w->stream));
}

/* Nothing but launches, fills, and what is cheap anywhere; everything as it was before. */
static void check_launch(const launching *l, world *w, before b, bool pending)
{
  char kernels[400];
  make_current(b);
  if (pending) CHECK(cudaSetDevice(99) == cudaErrorInvalidDevice);
  const cudaError_t error = shim_last_error();
  const int device = shim_current_device();
  const int64_t implicit = shim_implicit();
  shim_mark();
  CHECK_OK(l->act(w));
  const int64_t cheap = shim_calls(SHIM_NEUTRAL) + shim_calls(SHIM_LAUNCH) + shim_calls(SHIM_MOVE);
  CHECK_MSG(shim_calls(SHIM_ALL) == cheap && shim_calls(SHIM_ALLOC | SHIM_SYNC | SHIM_QUERY) == 0, "%s", shim_trace());
  CHECK(strstr(shim_trace(), "cudaThreadExchange") == NULL && strstr(shim_trace(), "cudaSetDevice") == NULL);
  CHECK(shim_current_device() == device && shim_last_error() == error && shim_implicit() == implicit);
  CHECK(strstr(shim_trace(), "stream 0") == NULL);
  list_kernels(shim_trace(), kernels, sizeof kernels);
  CHECK_MSG(strcmp(kernels, l->kernels) == 0, "the kernels are: %s", kernels);
  shim_heal();
}

/* The same in a capture that is the process's first: nothing of it is refused, and the graph launches the same. */
static void check_captured(const launching *l, world *w)
{
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  make_current(ITS_DEVICE);
  OWN(cudaStreamBeginCapture(w->stream, cudaStreamCaptureModeGlobal));
  CHECK_OK(l->act(w));
  OWN(cudaStreamEndCapture(w->stream, &graph));
  if (graph == NULL) return;
  OWN(cudaGraphInstantiate(&exec, graph, 0));
  OWN(cudaGraphLaunch(exec, w->stream));
  OWN(cudaGraphExecDestroy(exec));
  OWN(cudaGraphDestroy(graph));
}

static void test_launches(void)
{
  for (int i = 0; i < LAUNCHES; i++) {
    const launching *l = &launches[i];
    world w = {.next = SHIM_LENT};
    shim_drop_context();
    l->prepare(&w);
    case_begin("%s, captured first", l->name);
    check_captured(l, &w);
    case_end();
    for (int b = 0; b < BEFORES; b++)
      for (int pending = 0; pending < 2; pending++) {
        case_begin("%s, device %d, %s", l->name, b, pending ? "an error pending" : "no error");
        check_launch(l, &w, (before)b, pending);
        case_end();
      }
    case_begin("%s: end", l->name);
    end_world(&w);
    case_end();
  }
}

/* What the kernels were told, of a forward call with everything. */
static void test_arguments(void)
{
  world w = {.next = SHIM_LENT};
  case_begin("forward with everything");
  shared_layer(&w);
  const uintptr_t from = w.next;
  CHECK_OK(run_everything(&w));
  w.next = from; /* the same operands again */
  cumoe_moe_desc d = describe(CUMOE_F16);
  d.out_dtype = CUMOE_F32;
  d.shared_inter = 128;
  const cumoe_moe_args a = arguments(&w, &d, 64);
  const gate_args *gate = shim_last_args("gate");
  const map_args *map = shim_last_args("cumoe_map_");
  const gemm_args *up = shim_last_args("up"), *down = shim_last_args("down");
  const combine_args *combine = shim_last_args("combine");
  const router_args *router = shim_last_args("router");
  const char *begin = a.workspace.data, *end = begin + a.workspace.cols;
  CHECK(router->x == a.x.data && router->experts == 1 && router->hidden == HIDDEN); /* the shared gate */
  CHECK(gate->experts == EXPERTS && gate->top_k == TOP_K && gate->tokens.count == 64 && gate->routed_scale == 1);
  CHECK(map->local_experts == EXPERTS && map->top_k == TOP_K && map->num_experts == EXPERTS);
  CHECK(map->ids == gate->ids && map->tokens.device == gate->tokens.device && map->tokens.device != NULL);
  CHECK(up->a == a.x.data && up->n == INTER && up->k == HIDDEN && up->experts == EXPERTS && up->rows_cap == 128);
  CHECK(up->counts == map->counts && up->offsets == map->offsets && up->row_pair == map->row_pair && up->gated == 1);
  CHECK(up->protocol.early_inputs == 1 &&
        down->protocol.early_inputs == 1); /* the shared expert lies between the map and up */
  CHECK(down->a == up->c && down->n == HIDDEN && down->k == INTER && down->act == ACT_IDENTITY && !down->gated);
  const gemm_sm90_args *shared =
      shim_last_args("cumoe_down_sm90_wgmma"); /* the shared expert's, without a map's words */
  CHECK(shared != NULL && shared->g.counts == NULL && !shared->g.protocol.by_expert);
  CHECK(combine->y == down->c && combine->out == a.out.data && combine->residual == a.out.data && combine->reduce == 1);
  CHECK(combine->pair_weights == gate->weights && combine->shared_logit == router->logits && combine->out_scale == 1);
  CHECK(combine->shared != NULL && combine->slot_row == map->slot_row && combine->protocol.early_inputs == 1);
  CHECK((const char *)up->c >= begin && (const char *)down->c >= begin && (const char *)combine->shared < end);
  case_end();
  case_begin("end");
  end_world(&w);
  case_end();
}

/* Both projections in fp8, stacked. */
static void codes_layer(world *w)
{
  cumoe_moe_desc d = describe(CUMOE_BF16);
  d.up_format = d.down_format = cumoe_format_fp8_block(CUMOE_F32);
  open_one(w);
  CHECK_OK(cumoe_plan_create(w->context, &d, &w->plan));
  cumoe_weights_desc weights = describe_weights(w, CUMOE_E4M3, EXPERTS, INTER, CUMOE_GATE_UP_CONCAT);
  weights.up_format = weights.down_format = d.up_format;
  weights.dtype = CUMOE_BF16;
  weights.gate_up.scale.data = lend_in(w, CUMOE_F32, EXPERTS * 2 * INTER / 128, HIDDEN / 128);
  weights.down.scale.data = lend_in(w, CUMOE_F32, EXPERTS * HIDDEN / 128, INTER / 128);
  CHECK_OK(cumoe_weights_bind(w->context, &weights, &w->weights));
}

static cumoe_status run_from_router(world *w)
{
  const cumoe_moe_desc d = describe(CUMOE_BF16);
  cumoe_moe_args a = arguments(w, &d, 3000);
  a.router_weight = lend_in(w, CUMOE_BF16, EXPERTS, HIDDEN);
  return cumoe_moe_forward(w->plan, w->weights, &a, w->stream);
}

/* Many tokens: up copies its rows to where down will write, and counts in what the map has cleared. */
static void test_copy_arguments(void)
{
  world w = {.next = SHIM_LENT};
  case_begin("forward from logits");
  small_layer(&w);
  CHECK_OK(run_logits(&w));
  const map_args *map = shim_last_args("cumoe_map_any");
  const gemm_sm90_args *up = shim_last_args("cumoe_up_sm90_wgmma"), *down = shim_last_args("cumoe_down_sm90_wgmma");
  CHECK(up->g.protocol.x_copy == down->g.c && up->g.protocol.x_copy != NULL && down->g.protocol.x_copy == NULL &&
        !up->g.packed);
  CHECK(up->g.protocol.progress == map->protocol.progress && map->protocol.progress != NULL &&
        up->g.row_pair == map->row_pair);
  CHECK(up->g.protocol.by_expert && down->g.protocol.by_expert && down->g.protocol.progress == map->protocol.progress &&
        down->g.protocol.early_inputs);
  CHECK(!up->g.protocol.early_inputs); /* the map lies right ahead of up */
  CHECK(map->tokens.count * map->top_k == up->g.rows_cap);
  const combine_args *combine = shim_last_args("combine");
  CHECK(combine->protocol.discard_h == up->g.c && combine->protocol.discard_h_row == INTER * 2 &&
        up->g.protocol.evict_last && down->g.protocol.evict_last);
  end_world(&w);
  case_end();
  case_begin("codes lie apart from y, which down writes while up reads, and are made beside the router");
  w = (world){.next = SHIM_LENT};
  codes_layer(&w);
  CHECK_OK(run_logits(&w));
  up = shim_last_args("cumoe_up_sm90_wgmma"), down = shim_last_args("cumoe_down_sm90_wgmma");
  CHECK(up && down && up->g.rows.mode != ROWS_AS_THEY_ARE && up->g.protocol.by_expert && down->g.protocol.by_expert);
  const char *y = down->g.c, *copy = up->g.protocol.x_copy, *y_end = y + up->g.rows_cap * HIDDEN * 2;
  CHECK(copy && (copy >= y_end || copy + up->g.rows_cap * (HIDDEN + HIDDEN / 128 * 4) <= y));
  const quantize_args *codes = shim_last_args("cumoe_quantize");
  CHECK(codes && !codes->early_inputs); /* nothing that has waited lies ahead */
  CHECK_OK(run_from_router(&w));
  codes = shim_last_args("cumoe_quantize");
  CHECK(codes && codes->early_inputs); /* the router has */
  end_world(&w);
  case_end();
  case_begin("stages: what is lent is not discarded");
  w = (world){.next = SHIM_LENT};
  small_layer(&w);
  CHECK_OK(run_stages(&w));
  combine = shim_last_args("combine");
  const gemm_args *lent_up = shim_last_args("cumoe_up_"), *lent_down = shim_last_args("cumoe_down_");
  CHECK(combine != NULL && combine->protocol.discard_h == NULL && !lent_up->protocol.evict_last &&
        !lent_down->protocol.evict_last);
  end_world(&w);
  case_end();
}

/* A row of few_down forced: it keeps few_up from doing all. */
static void force_few_down(world *w)
{
  cumoe_variant_info v = {.size = sizeof v};
  int32_t row = 0;
  for (; row < cumoe_variant_count(); row++) {
    CHECK_OK(cumoe_variant_get(w->context, row, &v));
    if (strcmp(v.op, "few_down") == 0 && v.w == CUMOE_BF16 && strcmp(v.major, "K") == 0) break;
  }
  CHECK_OK(cumoe_variant_force(w->context, row));
}

/* The same of one token, where two kernels are told alike what map, up, down and combine would be. */
static void test_few_arguments(void)
{
  world w = {.next = SHIM_LENT};
  case_begin("forward of one token");
  wide_layer(&w);
  force_few_down(&w);
  CHECK_OK(run_wide(&w));
  const gate_args *gate = shim_last_args("gate");
  const few_args *few = shim_last_args("few_up");
  const gemm_args *up = &few->up, *down = &few->down;
  const combine_args *out = &few->out;
  CHECK(memcmp(few, shim_last_args("few_down"), sizeof *few) == 0);
  CHECK(up->n == FEW_INTER && up->k == HIDDEN && up->gated && up->tokens.count == 1 && up->rows_cap == TOP_K);
  CHECK((const char *)up->b.base[0] > (const char *)up->b.base[1]); /* up lies first */
  CHECK(down->a == up->c && down->a_ld == FEW_INTER && down->n == HIDDEN && down->k == FEW_INTER && !down->gated);
  CHECK(few->map.ids == gate->ids && few->map.top_k == TOP_K && few->map.local_experts == EXPERTS);
  CHECK(few->map.counts_out != NULL);
  CHECK(out->pair_weights == gate->weights && out->out_scale == 1 && out->reduce == 1);
  CHECK(out->residual == out->out && out->hidden == HIDDEN && out->shared == NULL);
  CHECK(!few->protocol.weights && !few->protocol.tickets); /* nobody would clear them */
  end_world(&w);
  case_end();
}

/* From hidden states one kernel does all. The router fills with ones what its CTAs hand each other: h, and the words
 * behind it, which have a region of their own. */
static void test_few_from_router(void)
{
  world w = {.next = SHIM_LENT};
  case_begin("forward of one token");
  wide_layer(&w);
  CHECK_OK(run_wide_routed(&w));
  const router_args *router = shim_last_args("router");
  const few_args *few = shim_last_args("few_up");
  const char *fill = router->protocol.fill, *end = fill + 16 * (ptrdiff_t)router->protocol.fill_vectors,
             *words = (const char *)few->protocol.weights;
  CHECK(fill == few->up.c && words >= fill + 2 * TOP_K * FEW_INTER && (uintptr_t)fill % 16 == 0);
  CHECK((const char *)few->protocol.tickets == words + 8 * TOP_K && end >= words + FEW_BYTES(TOP_K) &&
        end <= words + 256);
  CHECK(few->gate.logits == router->logits && few->gate.experts == EXPERTS && few->gate.top_k == TOP_K);
  CHECK(few->gate.ids == few->map.ids && few->gate.ids_dtype == DT_I64 && few->gate.weights == few->out.pair_weights);
  end_world(&w);
  case_end();
}

/* From logits of the caller's, too: a fill comes first. */
static void test_few_from_logits(void)
{
  char fill[64];
  world w = {.next = SHIM_LENT};
  case_begin("forward of one token, filled");
  wide_layer(&w);
  shim_mark();
  CHECK_OK(run_wide(&w));
  const few_args *few = shim_last_args("few_up");
  const uintptr_t h = (uintptr_t)few->up.c, words = (uintptr_t)few->protocol.weights;
  const size_t bytes = (words - h + FEW_BYTES(TOP_K) + 255) / 256 * 256;
  snprintf(fill, sizeof fill, "cudaMemsetAsync %zu, byte 255", bytes);
  CHECK(h % 256 == 0 && words >= h + 2 * TOP_K * FEW_INTER);
  CHECK_MSG(strstr(shim_trace(), fill) && strstr(shim_trace(), fill) < strstr(shim_trace(), "cumoe_few_up"), "%s: %s",
            fill, shim_trace());
  CHECK(few->gate.logits != NULL && few->gate.ids == few->map.ids && few->gate.weights == few->out.pair_weights);
  end_world(&w);
  case_end();
}

/* One token too, but with an output or weights that those two do not make. */
static void check_not_few(const char *name, uint32_t flags, uint32_t routing)
{
  char kernels[400];
  world w = {.next = SHIM_LENT};
  case_begin("%s", name);
  cumoe_moe_desc d = describe(CUMOE_BF16);
  d.inter = FEW_INTER, d.flags = flags, d.routing.flags |= routing;
  open_one(&w);
  bind_layer(&w, &d, CUMOE_GATE_UP_CONCAT);
  cumoe_moe_args a = arguments(&w, &d, 1);
  a.logits = lend_in(&w, CUMOE_F32, 1, EXPERTS);
  shim_mark();
  CHECK_OK(cumoe_moe_forward(w.plan, w.weights, &a, w.stream));
  list_kernels(shim_trace(), kernels, sizeof kernels);
  CHECK_MSG(strcmp(kernels, "gate map up down combine ") == 0, "the kernels are: %s", kernels);
  end_world(&w);
  case_end();
}

static void test_not_few(void)
{
  check_not_few("unreduced", CUMOE_MOE_UNREDUCED, 0);
  check_not_few("weights on the input", 0, CUMOE_ROUTE_WEIGHT_ON_INPUT);
}

typedef enum automatic { CPU, GPU, EITHER } automatic;

typedef struct machine_case {
  const char *name;
  cumoe_status status;
  const char *says;
  automatic becomes; /* what an automatic device is there */
} machine_case;

#define MACHINE(name, status, says, becomes, ...)                                                                      \
  if (which == n++) *m = (machine_case){name, CUMOE_##status, says, becomes}, (void)(__VA_ARGS__);

/* False: there are no more. */
static bool set_machine(int which, machine_case *m)
{
  int n = 0;
  MACHINE("no driver", ERR_NO_DEVICE, "no CUDA driver", CPU, shim.driver = 0)
  MACHINE("no GPU", ERR_NO_DEVICE, "cudaErrorNoDevice", CPU, shim.devices = 0)
  MACHINE("one GPU", ERR_NO_DEVICE, "device 1 does not exist", GPU, shim.devices = 1)
  MACHINE("compute capability 7.5", ERR_NO_KERNEL_IMAGE, "7.5", CPU, shim.major = 7, shim.minor = 5)
  MACHINE("no memory pools", ERR_NOT_SUPPORTED, "memory pools", CPU, shim.no_pools = true)
  MACHINE("no machine code", ERR_NO_KERNEL_IMAGE, "this build has code for", CPU, shim.no_image = true)
  MACHINE("no tensor maps", ERR_DRIVER_TOO_OLD, "cuTensorMapEncodeTiled", CPU, shim.hidden = "cuTensorMapEncodeTiled")
  MACHINE("a kernel is not in its image", ERR_INTERNAL, "cumoe_gate_any_warp_x_x_8x0x32", CPU,
          shim.missing = "cumoe_gate_any_warp_x_x_8x0x32")
  MACHINE("a kernel's argument is longer", ERR_INTERNAL, "the host's has", CPU, shim.more_parameter = 8)
  MACHINE("kernels of few threads", ERR_INTERNAL, "compiled for 64 threads", CPU, shim.max_threads = 64)
  MACHINE("four bytes of memory", ERR_OUT_OF_MEMORY, "cudaMalloc", EITHER, shim.memory = 4)
  MACHINE("compute capability 8.0", OK, "", GPU, shim.major = 8, shim.smem = 163 * 1024)
  MACHINE("compute capability 8.9", OK, "", GPU, shim.major = 8, shim.minor = 9, shim.smem = 99 * 1024)
  MACHINE("compute capability 10.0", OK, "", GPU, shim.major = 10)
  return which < n;
}

static void check_machine(const machine_case *m)
{
  const int64_t live = shim_live(), heap = shim_heap();
  cumoe_context context = NULL;
  CHECK_STATUS(m->status, cumoe_context_create(1, NULL, &context));
  CHECK_MSG(m->status == CUMOE_OK || strstr(cumoe_last_error(), m->says) != NULL, "the text is \"%s\"",
            cumoe_last_error());
  if (m->status != CUMOE_OK) {
    CHECK(context == NULL);
    CHECK_OK(cumoe_context_create(CUMOE_DEVICE_AUTO, NULL, &context));
    CHECK(on_device(context) == (m->becomes == GPU) || m->becomes == EITHER);
  }
  CHECK_OK(cumoe_context_destroy(context));
  CHECK(shim_live() == live && shim_heap() == heap);
  shim_reset();
}

/* On a GPU without the sm_90a code, no row of it is chosen, and a grid does not start before the one ahead has
 * ended. */
static void check_portable(bool early)
{
  world w = {.next = SHIM_LENT};
  small_layer(&w);
  shim_mark();
  CHECK_OK(run_routed(&w));
  CHECK_OK(run_logits(&w));
  CHECK(strstr(shim_trace(), "sm90") == NULL && strstr(shim_trace(), "cuTensorMap") == NULL);
  CHECK_MSG((strstr(shim_trace(), "attrs 1") != NULL) == early, "%s", shim_trace());
  cumoe_variant_info info = {.size = sizeof info};
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    CHECK_OK(cumoe_variant_get(w.context, i, &info));
    if (strcmp(info.arch, "sm90") != 0) continue;
    CHECK(!info.usable);
    CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_variant_force(w.context, i));
  }
  end_world(&w);
  shim_reset();
}

/* What a graph cannot hold is refused while the stream is captured: nothing changes, and the capture goes on. */
static void test_refused_in_capture(void)
{
  world w = {0};
  cumoe_buffer buffer = {0}, plain = {0}, none = {0};
  cudaGraph_t graph = NULL;
  unsigned char host[64] = {0};
  void *memory = NULL;
  case_begin("buffers");
  open_one(&w);
  OWN(cudaSetDevice(1));
  OWN(cudaMalloc(&memory, 64));
  CHECK_OK(cumoe_buffer_alloc(w.context, CUMOE_U8, 1, 64, w.stream, &buffer));
  CHECK_OK(cumoe_buffer_adopt(w.context, memory, CUMOE_U8, 1, 64, w.stream, &plain));
  const cumoe_view_mut v = cumoe_buffer_view_mut(buffer), u = cumoe_buffer_view_mut(plain);
  OWN(cudaStreamBeginCapture(w.stream, cudaStreamCaptureModeGlobal));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_buffer_alloc(w.context, CUMOE_U8, 1, 64, w.stream, &none));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_buffer_free(&buffer));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_buffer_free(&plain));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_copy_from_host(w.context, v, host, 64, w.stream));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_copy_to_host(w.context, host, 64, cumoe_const(v), w.stream));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE,
               cumoe_copy_between(w.context, u, w.stream, w.context, cumoe_const(v), w.stream));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_synchronize(w.context, w.stream));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_debug_check(w.context, w.stream, NULL));
  CHECK_OK(cumoe_copy(w.context, u, cumoe_const(v), w.stream));
  CHECK(buffer.id != 0 && plain.id != 0 && none.id == 0);
  OWN(cudaStreamEndCapture(w.stream, &graph));
  OWN(cudaGraphDestroy(graph));
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_OK(cumoe_buffer_free(&plain));
  OWN(cudaStreamDestroy(w.stream));
  CHECK_OK(cumoe_context_destroy(w.context));
  case_end();
  shim_reset();
}

/* Waits, trims, tries once more; then the sizes are told. */
static void test_full_device(void)
{
  cumoe_context context = NULL;
  cumoe_buffer buffer = {0};
  cumoe_pool_stats stats = {.size = sizeof stats};
  case_begin("one retry");
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  shim_mark();
  CHECK_STATUS(CUMOE_ERR_OUT_OF_MEMORY, cumoe_buffer_alloc(context, CUMOE_U8, 1 << 20, 1 << 24, NULL, &buffer));
  CHECK_TEXT("17592186044416 bytes asked");
  CHECK(strstr(shim_trace(), "cudaStreamSynchronize") != NULL && strstr(shim_trace(), "cudaMemPoolTrimTo") != NULL);
  CHECK_OK(cumoe_pool_get_stats(context, &stats));
  CHECK(stats.oom_retries == 1 && stats.used == 0 && stats.live == 0 && stats.allocs == 0);
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

/* Has memory when it is asked for the second time. */
static int refuse_once(void *user, void **data, size_t bytes, size_t alignment, cumoe_stream stream)
{
  static _Alignas(256) char memory[256];
  int *asked = user;
  (void)bytes, (void)alignment, (void)stream;
  if (++*asked == 1) return 1;
  CHECK_MSG(strstr(shim_trace(), "cudaStreamSynchronize") != NULL, "%s", shim_trace());
  *data = memory;
  return 0;
}

static void keep_memory(void *user, void *data, size_t bytes, cumoe_stream stream)
{
  (void)user, (void)data, (void)bytes, (void)stream;
}

static void test_full_allocator(void)
{
  int asked = 0;
  const cumoe_allocator allocator = {
      .size = sizeof allocator, .alloc = refuse_once, .free = keep_memory, .user = &asked};
  const cumoe_context_config config = {.size = sizeof config, .allocator = &allocator};
  cumoe_context context = NULL;
  cumoe_buffer buffer = {0};
  case_begin("asked again when the stream has passed");
  CHECK_OK(cumoe_context_create(1, &config, &context));
  shim_mark();
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 64, NULL, &buffer));
  CHECK(asked == 2);
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

/* The arena of a group's only rank, zeroed as it has to be before the group is made. */
static cumoe_view_mut group_arena(const world *w, const cumoe_group_config *config, cumoe_buffer *arena)
{
  size_t bytes = 0;
  CHECK_OK(cumoe_ep_arena(w->plan, config, &bytes));
  CHECK_OK(cumoe_buffer_alloc(w->context, CUMOE_U8, 1, (int64_t)bytes, NULL, arena));
  const cumoe_view_mut whole = cumoe_buffer_view_mut(*arena);
  CHECK_OK(cumoe_fill(w->context, whole, 0, NULL));
  return whole;
}

/* A rank that was left out says in all arenas that it has given up. Behind that an abort is heard all the same. */
static void test_group_abort(void)
{
  const ep_shape shape = {
      .ranks = 1, .lanes = 1, .experts = EXPERTS, .top_k = TOP_K, .hidden = HIDDEN, .element = 2, .capacity = 4};
  const uint64_t words[] = {0, ep_abort_word(EP_TIMEOUT, EP_DISPATCH, 0, 1)};
  for (int late = 0; late < 2; late++) {
    case_begin("abort%s", late ? " behind a left-out rank's word" : "");
    world w = {.next = SHIM_LENT};
    cumoe_group ranks = NULL;
    cumoe_buffer arena = {0};
    void *base = NULL;
    const cumoe_group_config config = {.size = sizeof config, .ranks = 1, .max_tokens = 4, .arenas = &base};
    cumoe_group_fault fault = {.size = sizeof fault};
    small_layer(&w);
    const cumoe_view_mut whole = group_arena(&w, &config, &arena);
    base = whole.data;
    CHECK_OK(cumoe_group_create(w.context, w.plan, &config, whole, &ranks));
    OWN(cudaSetDevice(1));
    OWN(cudaMemcpyAsync((char *)base + ep_lay_out(&shape).abort, &words[late], 8, cudaMemcpyHostToDevice, w.stream));
    CHECK_OK(cumoe_group_fault_read(ranks, &fault));
    CHECK(fault.cause == CUMOE_GROUP_ALIVE);
    CHECK_OK(cumoe_group_abort(ranks));
    CHECK_OK(cumoe_group_fault_read(ranks, &fault));
    CHECK_MSG(fault.cause == CUMOE_GROUP_ABORTED, "%d", (int)fault.cause);
    const cumoe_status ended = cumoe_group_destroy(ranks);
    CHECK(ended == CUMOE_OK || ended == CUMOE_ERR_PEER);
    CHECK_OK(cumoe_buffer_free(&arena));
    end_world(&w);
    case_end();
  }
}

/* What is put back on the way out, or entered to give something back, may fail in silence. */
static bool is_silent(const char *call)
{
  return !strncmp(call, "cuCtx", 5) || !strcmp(call, "cudaThreadExchangeStreamCaptureMode");
}

/* All calls fail from the nth on: the text is of the first, and names the call that the user made. */
static void test_group_texts(void)
{
  for (int ends = 0; ends < 2; ends++)
    for (int nth = 1, failed = 1; failed; nth++) {
      world w = {.next = SHIM_LENT};
      cumoe_group ranks = NULL;
      cumoe_buffer arena = {0};
      void *base = NULL;
      const cumoe_group_config config = {
          .size = sizeof config, .ranks = 1, .max_tokens = 4, .timeout_ns = 100000000, .arenas = &base};
      case_begin("a group %s, call %d", ends ? "that ends" : "that is made", nth);
      small_layer(&w);
      const cumoe_view_mut whole = group_arena(&w, &config, &arena);
      base = whole.data;
      if (ends) CHECK_OK(cumoe_group_create(w.context, w.plan, &config, whole, &ranks));
      shim_mark();
      shim_fail(SHIM_CUDA, nth, true, cudaErrorInvalidValue);
      const cumoe_status status =
          ends ? cumoe_group_destroy(ranks) : cumoe_group_create(w.context, w.plan, &config, whole, &ranks);
      const char *first = shim_failed(), *text = cumoe_last_error(),
                 *call = ends ? "cumoe_group_destroy: " : "cumoe_group_create: ";
      failed = first != NULL;
      CHECK_MSG(status == CUMOE_OK || is_silent(first) || strstr(text, first), "%s failed first: %s", first, text);
      CHECK_MSG(status == CUMOE_OK || !strncmp(text, call, strlen(call)), "%s: %s", call, text);
      shim_heal();
      if (!ends && ranks) CHECK_OK(cumoe_group_destroy(ranks));
      CHECK_OK(cumoe_buffer_free(&arena));
      end_world(&w);
      case_end();
      shim_reset();
    }
}

/* ---- formats by themselves: what one needs is loaded without another ---- */

static void lend_projection(world *w, cumoe_projection *p, const cumoe_format *f, int64_t out, int64_t in,
                            int32_t halves)
{
  const bool bytes = f->element == CUMOE_ELEMENT_E4M3 || f->element == CUMOE_ELEMENT_S8;
  const int64_t cols = bytes ? in : f->word == 4 ? in / 8 : in / 2;
  const int32_t dtype = f->element == CUMOE_ELEMENT_E4M3 ? CUMOE_E4M3
                        : bytes                          ? CUMOE_I8
                        : f->word == 4                   ? CUMOE_I32
                                                         : CUMOE_U8;
  p->data = lend_in(w, dtype, EXPERTS * halves * out, cols);
  p->scale.data =
      lend_in(w, f->scale, EXPERTS * halves * format_blocks(f->block[0], 0, out), format_blocks(f->block[1], 0, in));
  if (f->global) p->global = lend_in(w, CUMOE_F32, EXPERTS, halves);
}

static void run_format_alone(const cumoe_format *f, int64_t tokens)
{
  world w = {.next = SHIM_LENT};
  cumoe_moe_desc d = describe(CUMOE_BF16);
  d.up_format = d.down_format = *f;
  open_one(&w);
  CHECK_OK(cumoe_plan_create(w.context, &d, &w.plan));
  cumoe_weights_desc weights = describe_weights(&w, CUMOE_U8, EXPERTS, INTER, CUMOE_GATE_UP_CONCAT);
  weights.dtype = CUMOE_BF16;
  weights.up_format = weights.down_format = *f;
  lend_projection(&w, &weights.gate_up, f, INTER, HIDDEN, 2);
  lend_projection(&w, &weights.down, f, HIDDEN, INTER, 1);
  CHECK_OK(cumoe_weights_bind(w.context, &weights, &w.weights));
  cumoe_moe_args a = arguments(&w, &d, tokens);
  a.ids = lend_in(&w, CUMOE_I32, tokens, TOP_K);
  a.weights = lend_in(&w, CUMOE_F32, tokens, TOP_K);
  CHECK_OK(cumoe_moe_forward(w.plan, w.weights, &a, w.stream));
  end_world(&w);
}

static void test_formats_alone(void)
{
  static const struct {
    int major, minor, smem;
  } machines[] = {{8, 0, 163 * 1024}, {8, 9, 99 * 1024}, {9, 0, 227 * 1024}, {10, 0, 227 * 1024}};
  const cumoe_format formats[] = {cumoe_format_fp8_block(CUMOE_F32),
                                  cumoe_format_fp8_channel(CUMOE_F32),
                                  cumoe_format_int8(CUMOE_F32),
                                  cumoe_format_int4(128, CUMOE_BF16),
                                  cumoe_format_mxfp4(),
                                  cumoe_format_nvfp4(CUMOE_GLOBAL_NONE),
                                  cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES)};
  for (size_t m = 0; m < sizeof machines / sizeof *machines; m++)
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
      case_begin("compute capability %d.%d, format %d alone", machines[m].major, machines[m].minor, (int)f);
      shim_reset();
      shim.major = machines[m].major, shim.minor = machines[m].minor, shim.smem = machines[m].smem;
      run_format_alone(&formats[f], 1);
      run_format_alone(&formats[f], 300);
      case_end();
    }
  shim_reset();
}

static int count_calls(const char *name)
{
  int count = 0;
  for (const char *at = shim_trace(); (at = strstr(at, name)) != NULL; at++) count++;
  return count;
}

/* The shim does everything at once: that streams wait for each other shows in the calls only. */
static void test_orders(void)
{
  world w = {0};
  cumoe_buffer a = {0}, b = {0}, plain = {0}, empty = {0};
  void *memory = NULL;
  case_begin("for recorded uses and for copies between contexts");
  open_two(&w);
  OWN(cudaSetDevice(1));
  OWN(cudaMalloc(&memory, 64));
  CHECK_OK(cumoe_buffer_alloc(w.context, CUMOE_U8, 1, 64, w.stream, &a));
  CHECK_OK(cumoe_buffer_alloc(w.other, CUMOE_U8, 1, 64, NULL, &b));
  CHECK_OK(cumoe_buffer_adopt(w.context, memory, CUMOE_U8, 1, 64, w.stream, &plain));
  shim_mark();
  CHECK_OK(cumoe_copy_between(w.other, cumoe_buffer_view_mut(b), NULL, w.context, cumoe_buffer_view(a), w.stream));
  CHECK(count_calls("cudaStreamWaitEvent") == 2);
  shim_mark();
  CHECK_OK(cumoe_copy_between(w.other, cumoe_buffer_view_mut(b), NULL, w.context, cumoe_buffer_view(a), NULL));
  CHECK(count_calls("cudaStreamWaitEvent") == 2); /* NULL is a stream of each device */
  shim_mark();
  CHECK_OK(cumoe_buffer_alloc(w.context, CUMOE_U8, 0, 64, w.stream, &empty));
  CHECK_OK(cumoe_buffer_record_use(empty, NULL)); /* there is nothing to free */
  CHECK_OK(cumoe_buffer_free(&empty));
  CHECK(count_calls("cudaEvent") == 0);
  CHECK_OK(cumoe_buffer_record_use(a, NULL));
  CHECK_OK(cumoe_buffer_record_use(plain, NULL));
  shim_mark();
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK(count_calls("cudaStreamWaitEvent") == 1 && count_calls("cudaStreamSynchronize") == 0);
  shim_mark();
  CHECK_OK(cumoe_buffer_free(&plain));
  CHECK(count_calls("cudaStreamWaitEvent") == 1 && count_calls("cudaStreamSynchronize") == 2);
  CHECK_OK(cumoe_buffer_free(&b));
  OWN(cudaStreamDestroy(w.stream));
  CHECK_OK(cumoe_context_destroy(w.context));
  CHECK_OK(cumoe_context_destroy(w.other));
  case_end();
  shim_reset();
}

/* CUDA says so by an error, which nobody is left with. */
static void test_pending(void)
{
  cumoe_context context = NULL;
  cumoe_event event = NULL;
  cumoe_progress progress = CUMOE_DONE;
  float milliseconds = 1;
  case_begin("an event");
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  CHECK_OK(cumoe_event_create(context, CUMOE_EVENT_TIMING, &event));
  make_current(ITS_DEVICE);
  shim_fail(SHIM_CUDA, 3, false, cudaErrorNotReady); /* after the context and the mode of captures */
  CHECK_OK(cumoe_event_query(context, event, &progress));
  CHECK(progress == CUMOE_PENDING && shim_last_error() == cudaSuccess);
  shim_fail(SHIM_CUDA, 3, false, cudaErrorNotReady);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_event_elapsed(context, event, event, &milliseconds));
  CHECK(milliseconds == 0 && shim_last_error() == cudaSuccess);
  shim_heal();
  CHECK_OK(cumoe_event_destroy(context, event));
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

static void test_event_flags(void)
{
  static const struct {
    uint32_t flags;
    const char *asked;
  } cases[] = {{0, "flags 2"},
               {CUMOE_EVENT_TIMING, "flags 0"},
               {CUMOE_EVENT_SLEEP, "flags 3"},
               {CUMOE_EVENT_TIMING | CUMOE_EVENT_SLEEP, "flags 1"}};
  cumoe_context context = NULL;
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    cumoe_event event = NULL;
    case_begin("0x%x", cases[i].flags);
    shim_mark();
    CHECK_OK(cumoe_event_create(context, cases[i].flags, &event));
    CHECK_MSG(strstr(shim_trace(), cases[i].asked) != NULL, "%s", shim_trace());
    CHECK_OK(cumoe_event_destroy(context, event));
    case_end();
  }
  CHECK_OK(cumoe_context_destroy(context));
}

/* A caller's kernel, looked up twice: what the first was promised stays. */
static void test_functions(void)
{
  static const char ptx[] = ".version 8.0\n.target sm_80\n.address_size 64\n";
  world w = {.next = SHIM_LENT};
  cumoe_module module = {0};
  cumoe_function more = {0}, less = {0};
  uint32_t threads = 0;
  cumoe_launch l = cumoe_launch_elements(1000, NULL);
  case_begin("shared memory");
  open_one(&w);
  const cumoe_arg args[4] = {cumoe_arg_view(lend_in(&w, CUMOE_F32, 1, 1000)),
                             cumoe_arg_view(lend_in(&w, CUMOE_F32, 1, 1000)),
                             cumoe_arg_view_mut(lend(&w, CUMOE_F32, 1, 1000)), cumoe_arg_i32(1000)};
  CHECK_OK(cumoe_module_load(w.context, ptx, sizeof ptx, &module));
  CHECK_OK(cumoe_module_function(module, "add", 100 * 1024, &more));
  CHECK_OK(cumoe_module_function(module, "add", 1024, &less));
  l.dynamic_smem = 100 * 1024;
  CHECK_OK(cumoe_launch_kernel(more, &l, args, 4));
  case_end();
  case_begin("the largest of equal blocks");
  CHECK_OK(cumoe_function_block(more, 0, &threads));
  CHECK_MSG(threads == 1024, "%u", threads);
  case_end();
  case_begin("end");
  CHECK_OK(cumoe_module_unload(&module));
  end_world(&w);
  case_end();
}

/* A slot whose generations are used up is left alone: its first handle would be valid again. */
static void test_generations(void)
{
  HANDLE_TABLE(table, uint64_t);
  const uint64_t record = 7;
  uint64_t was = 0;
  case_begin("used up");
  const uint64_t first = handle_publish(&table, &record);
  CHECK(first == ((uint64_t)1 << 32 | 1) && handle_retire(&table, first, &was) && was == 7);
  *(uint32_t *)(void *)table.chunks[0] = UINT32_MAX - 1; /* of the first slot: its last dead one */
  const uint64_t last = handle_publish(&table, &record);
  CHECK(last == ((uint64_t)UINT32_MAX << 32 | 1) && handle_retire(&table, last, &was));
  const uint64_t next = handle_publish(&table, &record);
  CHECK_MSG(next == ((uint64_t)1 << 32 | 2) && !handle_lives(&table, first), "%#llx", (unsigned long long)next);
  free(table.chunks[0]);
  case_end();
}

/* The CPU has no streams that could wait. */
static void test_copies_to_the_cpu(void)
{
  world w = {0};
  cumoe_context cpu = NULL;
  cumoe_buffer a = {0}, b = {0};
  open_one(&w);
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, NULL, &cpu));
  CHECK_OK(cumoe_buffer_alloc(w.context, CUMOE_U8, 1, 64, w.stream, &a));
  CHECK_OK(cumoe_buffer_alloc(cpu, CUMOE_U8, 1, 64, NULL, &b));
  for (int back = 0; back < 2; back++) {
    case_begin(back ? "from the CPU" : "to the CPU");
    shim_mark();
    CHECK_OK(back ? cumoe_copy_between(w.context, cumoe_buffer_view_mut(a), w.stream, cpu, cumoe_buffer_view(b), NULL)
                  : cumoe_copy_between(cpu, cumoe_buffer_view_mut(b), NULL, w.context, cumoe_buffer_view(a), w.stream));
    const char *copies = strstr(shim_trace(), "cudaMemcpy");
    CHECK_MSG(copies && strstr(copies, "cudaStreamSynchronize"), "%s", shim_trace());
    case_end();
  }
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_OK(cumoe_buffer_free(&b));
  OWN(cudaStreamDestroy(w.stream));
  CHECK_OK(cumoe_context_destroy(w.context));
  CHECK_OK(cumoe_context_destroy(cpu));
  shim_reset();
}

/* Between red zones what is released is a copy, of what recorded uses leave. */
static void test_release_of_a_copy(void)
{
  const cumoe_context_config config = {.size = sizeof config, .debug = 2};
  cumoe_context context = NULL;
  cumoe_stream other = NULL;
  cumoe_buffer a = {0};
  void *memory = NULL;
  case_begin("behind recorded uses");
  CHECK_OK(cumoe_context_create(0, &config, &context));
  CHECK_OK(cumoe_stream_create(context, 0, &other));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 64, NULL, &a));
  CHECK_OK(cumoe_buffer_record_use(a, other));
  shim_mark();
  CHECK_OK(cumoe_buffer_release(&a, &memory));
  const char *waits = strstr(shim_trace(), "cudaStreamWaitEvent"), *copies = strstr(shim_trace(), "cudaMemcpy");
  CHECK_MSG(waits && copies && waits < copies && memory, "%s", shim_trace());
  OWN(cudaFreeAsync(memory, NULL));
  CHECK_OK(cumoe_stream_destroy(context, other));
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
  shim_reset();
}

/* Access is granted to a peer only if what is sent to it comes back unchanged; else it is taken back. */
static void test_peers(void)
{
  for (int broken = 0; broken < 2; broken++) {
    cumoe_context a = NULL, b = NULL;
    cumoe_buffer x = {0}, y = {0};
    unsigned char host[64] = {0};
    case_begin(broken ? "access breaks copies" : "no path");
    shim_reset();
    shim.broken_peers = broken;
    shim.no_peers = !broken;
    CHECK_OK(cumoe_context_create(1, NULL, &a));
    CHECK_OK(cumoe_context_create(0, NULL, &b));
    CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_pool_allow_peer(a, 0));
    CHECK_MSG(strstr(cumoe_last_error(), broken ? "comes back changed" : "cannot reach") != NULL, "the text is \"%s\"",
              cumoe_last_error());
    CHECK_OK(cumoe_buffer_alloc(a, CUMOE_U8, 1, 64, NULL, &x));
    CHECK_OK(cumoe_buffer_alloc(b, CUMOE_U8, 1, 64, NULL, &y));
    CHECK_OK(cumoe_fill(a, cumoe_buffer_view_mut(x), 9, NULL));
    CHECK_OK(cumoe_copy_between(b, cumoe_buffer_view_mut(y), NULL, a, cumoe_buffer_view(x), NULL));
    CHECK_OK(cumoe_copy_to_host(b, host, 64, cumoe_buffer_view(y), NULL));
    CHECK(host[0] == 9 && host[63] == 9); /* copies work as before */
    CHECK_OK(cumoe_buffer_free(&x));
    CHECK_OK(cumoe_buffer_free(&y));
    CHECK_OK(cumoe_context_destroy(a));
    CHECK_OK(cumoe_context_destroy(b));
    case_end();
  }
  shim_reset();
}

static void test_machines(void)
{
  machine_case m;
  for (int i = 0; set_machine(i, &m); i++) {
    case_begin("%s", m.name);
    check_machine(&m);
    case_end();
  }
  case_begin("rows on compute capability 8.0");
  shim.major = 8, shim.smem = 163 * 1024;
  check_portable(false);
  case_end();
  case_begin("rows on compute capability 10.0");
  shim.major = 10;
  check_portable(true);
  case_end();
}

/* Must come first: the driver is looked up once. */
static void test_old_driver(void)
{
  case_begin("no cuCtxPushCurrent");
  cumoe_context context = NULL;
  shim.hidden = "cuCtxPushCurrent";
  CHECK_STATUS(CUMOE_ERR_DRIVER_TOO_OLD, cumoe_context_create(1, NULL, &context));
  CHECK_TEXT("cuCtxPushCurrent");
  shim_reset();
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

enum { MOST_ERRORS = 20 };

static const struct {
  cumoe_status status;
  cudaError_t errors[MOST_ERRORS]; /* up to cudaSuccess */
} statuses[] = {
    {CUMOE_ERR_CUDA, {cudaErrorInvalidValue, cudaErrorUnknown, cudaErrorNotSupported, cudaErrorInvalidResourceHandle}},
    {CUMOE_ERR_OUT_OF_MEMORY, {cudaErrorMemoryAllocation}},
    {CUMOE_ERR_DRIVER_TOO_OLD,
     {cudaErrorInsufficientDriver, cudaErrorCallRequiresNewerDriver, cudaErrorUnsupportedPtxVersion,
      cudaErrorSystemDriverMismatch, cudaErrorCompatNotSupportedOnDevice}},
    {CUMOE_ERR_NO_DEVICE,
     {cudaErrorNoDevice, cudaErrorInvalidDevice, cudaErrorDevicesUnavailable, cudaErrorDeviceNotLicensed,
      cudaErrorStubLibrary, cudaErrorSystemNotReady, cudaErrorMpsConnectionFailed, cudaErrorMpsServerNotReady}},
    {CUMOE_ERR_NO_KERNEL_IMAGE,
     {cudaErrorNoKernelImageForDevice, cudaErrorInvalidKernelImage, cudaErrorInvalidPtx, cudaErrorJitCompilerNotFound,
      cudaErrorJitCompilationDisabled}},
    {CUMOE_ERR_CAPTURE_UNSAFE,
     {cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated, cudaErrorStreamCaptureMerge,
      cudaErrorStreamCaptureUnmatched, cudaErrorStreamCaptureUnjoined, cudaErrorStreamCaptureIsolation,
      cudaErrorStreamCaptureImplicit, cudaErrorStreamCaptureWrongThread, cudaErrorCapturedEvent}},
    {CUMOE_ERR_CUDA_STICKY,
     {cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorIllegalAddress, cudaErrorLaunchTimeout,
      cudaErrorContextIsDestroyed, cudaErrorAssert, cudaErrorHardwareStackError, cudaErrorIllegalInstruction,
      cudaErrorMisalignedAddress, cudaErrorInvalidAddressSpace, cudaErrorInvalidPc, cudaErrorLaunchFailure,
      cudaErrorTensorMemoryLeak, cudaErrorMpsClientTerminated, cudaErrorExternalDevice, (cudaError_t)226}},
};

/* A synchronisation that meets the error, and what comes after it. */
static void check_error(cudaError_t error, cumoe_status status)
{
  cumoe_context context = NULL;
  const bool sticky = status == CUMOE_ERR_CUDA_STICKY;
  case_begin("error %d", (int)error);
  cumoe_buffer buffer = {0};
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 1, NULL, &buffer));
  make_current(ITS_DEVICE);
  shim_fail(SHIM_CUDA, 3, false, error); /* after the context and the mode of captures: the stream's state */
  CHECK_STATUS(status, cumoe_synchronize(context, NULL));
  CHECK_MSG(strstr(cumoe_last_error(), sticky ? "lost" : "cudaStreamIsCapturing") != NULL ||
                strstr(cumoe_last_error(), "cudaStreamIsCapturing") != NULL,
            "the text is \"%s\"", cumoe_last_error());
  if (!sticky) CHECK(shim_last_error() == cudaSuccess);
  shim_heal();
  shim_mark();
  CHECK_STATUS(sticky ? CUMOE_ERR_CUDA_STICKY : CUMOE_OK, cumoe_synchronize(context, NULL));
  CHECK((shim_calls(SHIM_ALL) == 0) == sticky);
  CHECK_STATUS(sticky ? CUMOE_ERR_CUDA_STICKY : CUMOE_OK, cumoe_buffer_free(&buffer));
  if (sticky) CHECK_TEXT("lost earlier");
  (void)cumoe_context_destroy(context);
  case_end();
}

static void test_errors(void)
{
  for (size_t s = 0; s < sizeof statuses / sizeof statuses[0]; s++)
    for (int i = 0; statuses[s].errors[i] != cudaSuccess; i++) check_error(statuses[s].errors[i], statuses[s].status);
  case_begin("a driver that is there, but too old");
  shim.driver = 11000;
  cumoe_context context = NULL;
  shim_fail(SHIM_CUDA, 1, true, cudaErrorInsufficientDriver);
  CHECK_STATUS(CUMOE_ERR_DRIVER_TOO_OLD, cumoe_context_create(1, NULL, &context));
  shim_reset();
  case_end();
  case_begin("a kernel that cannot be launched");
  world w = {.next = SHIM_LENT};
  small_layer(&w);
  make_current(ITS_DEVICE);
  shim_fail(SHIM_CUDA, 2, false, cudaErrorInvalidValue);
  CHECK_STATUS(CUMOE_ERR_CUDA, run_routed(&w));
  CHECK(strstr(cumoe_last_error(), "kernel cumoe_map") != NULL &&
        strstr(cumoe_last_error(), "grid 1, 1, 1, block 1024, 1, 1") != NULL);
  shim_heal();
  end_world(&w);
  case_end();
  case_begin("memory that is not the device's");
  void *pinned = NULL;
  cumoe_buffer owned = {0};
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  make_current(ITS_DEVICE);
  OWN(cudaHostAlloc(&pinned, 64, 0));
  CHECK_STATUS(CUMOE_ERR_WRONG_DEVICE, cumoe_buffer_adopt(context, pinned, CUMOE_U8, 1, 64, NULL, &owned));
  OWN(cudaFreeHost(pinned));
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
  case_begin("a failed relaxing leaves the thread as strict as it was");
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  make_current(ITS_DEVICE);
  shim_fail(SHIM_CUDA, 2, false, cudaErrorInvalidValue);
  cumoe_buffer buffer = {0};
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 1, NULL, &buffer));
  CHECK(shim_failed() != NULL && strcmp(shim_failed(), "cudaThreadExchangeStreamCaptureMode") == 0);
  CHECK(shim_capture_mode() == cudaStreamCaptureModeGlobal && shim_last_error() == cudaSuccess);
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_OK(cumoe_context_destroy(context));
  case_end();
}

/* More CTAs than a grid may have. */
static void test_grids(void)
{
  enum { WIDE = 1 << 15 };
  case_begin("2^32 CTAs");
  world w = {.next = (uintptr_t)1 << 30};
  cumoe_moe_desc d = describe(CUMOE_BF16);
  const int64_t tokens = (int64_t)1 << 30;
  d.hidden = WIDE;
  d.routing.top_k = 1;
  open_one(&w);
  CHECK_OK(cumoe_plan_create(w.context, &d, &w.plan));
  const cumoe_route route = {.size = sizeof route,
                             .counts = lend(&w, CUMOE_I32, 1, EXPERTS),
                             .offsets = lend(&w, CUMOE_I32, 1, EXPERTS + 1),
                             .row_pair = lend(&w, CUMOE_I32, 1, tokens),
                             .slot_row = lend(&w, CUMOE_I32, tokens, 1)};
  const cumoe_combine_args a = {.size = sizeof a,
                                .y = lend_in(&w, CUMOE_BF16, tokens, WIDE),
                                .pair_weights = lend_in(&w, CUMOE_F32, tokens, 1),
                                .out = lend(&w, CUMOE_BF16, tokens, WIDE)};
  shim_mark();
  CHECK_STATUS(CUMOE_ERR_NOT_SUPPORTED, cumoe_combine(w.plan, &route, &a, w.stream));
  CHECK(strstr(cumoe_last_error(), "4294967296 CTAs") != NULL && shim_calls(SHIM_LAUNCH) == 0);
  end_world(&w);
  case_end();
  case_begin("rows of 2 GiB");
  cumoe_view_mut there;
  world v = {.next = (uintptr_t)1 << 30};
  shim.memory = (size_t)5 << 30;
  open_one(&v);
  CHECK_OK(cumoe_buffer_alloc(v.context, CUMOE_U8, 2, ((int64_t)1 << 31) + 8, v.stream, &v.buffers[0]));
  CHECK_OK(cumoe_view_cols_mut(cumoe_buffer_view_mut(v.buffers[0]), 1, 3, &there));
  unsigned char in[6] = {1, 2, 3, 4, 5, 6}, out[6] = {0};
  shim_mark();
  CHECK_OK(cumoe_fill(v.context, there, 9, v.stream));
  CHECK_OK(cumoe_copy_from_host(v.context, there, in, 6, v.stream));
  CHECK_OK(cumoe_copy_to_host(v.context, out, 6, cumoe_const(there), v.stream));
  CHECK(memcmp(in, out, 6) == 0);
  CHECK(strstr(shim_trace(), "2DAsync") == NULL); /* whose pitches end at 2^31 - 1 */
  CHECK_OK(cumoe_buffer_free(&v.buffers[0]));
  end_world(&v);
  shim_reset();
  case_end();
}

/* Pageable memory that the GPU reads itself has been read when a copy returns. */
static void test_pages(void)
{
  for (int reads = 0; reads < 2; reads++) {
    unsigned char bytes[64] = {0};
    void *pinned = NULL;
    world w = {.next = (uintptr_t)1 << 30};
    case_begin("copies of pageable memory, %d", reads);
    shim.reads_pages = reads;
    open_one(&w);
    CHECK_OK(cumoe_buffer_alloc(w.context, CUMOE_U8, 1, 64, w.stream, &w.buffers[0]));
    CHECK_OK(cumoe_pinned_alloc(w.context, 64, 0, &pinned));
    const cumoe_view_mut v = cumoe_buffer_view_mut(w.buffers[0]);
    for (int i = 0; i < 4; i++) {
      void *host = i / 2 ? pinned : bytes;
      shim_mark();
      CHECK_OK(i % 2 ? cumoe_copy_to_host(w.context, host, 64, cumoe_const(v), w.stream)
                     : cumoe_copy_from_host(w.context, v, host, 64, w.stream));
      CHECK((strstr(shim_trace(), "cudaStreamSynchronize") != NULL) == (reads && host == bytes));
    }
    CHECK_OK(cumoe_pinned_free(w.context, pinned));
    CHECK_OK(cumoe_buffer_free(&w.buffers[0]));
    end_world(&w);
    shim_reset();
    case_end();
  }
}

/* The kernels' whole names, in the order of the text. */
static void list_names(const char *text, char *list, size_t bytes)
{
  size_t used = 0;
  list[0] = 0;
  for (const char *at = text; (at = strstr(at, " cumoe_")) != NULL; at++)
    used += (size_t)snprintf(list + used, bytes - used, "%.*s ", (int)strcspn(at + 1, ", \n"), at + 1);
}

static cumoe_status forward_from_router(world *w, int64_t tokens)
{
  cumoe_moe_desc d = describe(CUMOE_BF16);
  d.inter = FEW_INTER;
  cumoe_moe_args a = arguments(w, &d, tokens);
  a.router_weight = lend_in(w, CUMOE_BF16, EXPERTS, HIDDEN);
  return cumoe_moe_forward(w->plan, w->weights, &a, w->stream);
}

/* A description names what a forward launches, and follows the limits that are set. */
static void test_descriptions(void)
{
  static const int64_t tokens[] = {1, 8, 33, 1000, 5000};
  char text[4096], few[4096], named[2000], launched[2000];
  cumoe_limit_info info = {.size = sizeof info};
  world w = {.next = (uintptr_t)1 << 30};
  wide_layer(&w);
  for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
    case_begin("T %d", (int)tokens[i]);
    CHECK_OK(cumoe_plan_describe(w.plan, i % 2 ? w.weights : NULL, tokens[i], text, sizeof text));
    shim_mark();
    CHECK_OK(forward_from_router(&w, tokens[i]));
    list_names(shim_trace(), launched, sizeof launched);
    list_names(text, named, sizeof named);
    CHECK_MSG(strcmp(named, launched) == 0, "described: %s\nlaunched: %s", named, launched);
    CHECK_MSG(strlen(text) < sizeof text / 2 && strstr(text, "workspace "), "%s", text);
    CHECK_MSG(strstr(text, strstr(cumoe_architectures(), "90a") ? "(kernels for sm_90)" : "(portable kernels)"), "%s",
              text);
    case_end();
  }
  case_begin("limits");
  CHECK_OK(cumoe_plan_describe(w.plan, w.weights, 1, few, sizeof few));
  for (int32_t i = 0; i < cumoe_limit_count(); i++) {
    CHECK_OK(cumoe_limit_get(w.context, i, &info));
    CHECK(*info.name && *info.unit && *info.text);
    if (strcmp(info.name, "few_bytes") == 0) CHECK_OK(cumoe_limit_set(w.context, i, 0, 0));
  }
  CHECK_OK(cumoe_plan_describe(w.plan, w.weights, 1, text, sizeof text));
  CHECK((strstr(few, "cumoe_few_up") != NULL) == (strcmp(few, text) != 0) && strstr(text, "cumoe_few_up") == NULL);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_limit_set(w.context, 0, 0, 0. / 0.));
  case_end();
  case_begin("arguments");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_plan_describe(w.plan, NULL, 1, text, 0));
  CHECK_OK(cumoe_plan_describe(w.plan, NULL, 1, text, 5));
  CHECK(strcmp(text, "1 to") == 0);
  end_world(&w);
  case_end();
  case_begin("of a shared expert, and on compute capability 8.0");
  world other = {.next = (uintptr_t)1 << 30}, portable = other;
  shared_layer(&other);
  CHECK_OK(cumoe_plan_describe(other.plan, other.weights, 64, text, sizeof text));
  CHECK_MSG(strstr(text, "shared_h") != NULL, "%s", text);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_plan_describe(other.plan, other.shared, 64, text, sizeof text));
  end_world(&other);
  shim.major = 8, shim.smem = 163 * 1024;
  small_layer(&portable);
  CHECK_OK(cumoe_plan_describe(portable.plan, portable.weights, 64, text, sizeof text));
  CHECK_MSG(strstr(text, "sm90") == NULL && strstr(text, "cumoe_up_any") != NULL, "%s", text);
  CHECK_MSG(strstr(text, "(portable kernels)") != NULL, "%s", text);
  end_world(&portable);
  shim_reset();
  case_end();
}

#define REFUSED(want, word, call)                                                                                      \
  do {                                                                                                                 \
    CHECK_STATUS(want, call);                                                                                          \
    CHECK_TEXT(word);                                                                                                  \
  } while (0)

/* What may be adopted, and how it is freed. */
static void adopt(world *w)
{
  void *here = NULL, *there = NULL;
  cumoe_buffer owned = {0};
  make_current(OTHER_DEVICE);
  OWN(cudaMalloc(&there, 512));
  make_current(ITS_DEVICE);
  OWN(cudaMalloc(&here, 512));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "inside",
          cumoe_buffer_adopt(w->context, (char *)here + 256, CUMOE_U8, 1, 8, NULL, &owned));
  REFUSED(CUMOE_ERR_OUT_OF_BOUNDS, "512 bytes", cumoe_buffer_adopt(w->context, here, CUMOE_U8, 1, 513, NULL, &owned));
  REFUSED(CUMOE_ERR_WRONG_DEVICE, "device 0", cumoe_buffer_adopt(w->context, there, CUMOE_U8, 1, 8, NULL, &owned));
  REFUSED(CUMOE_ERR_WRONG_DEVICE, "not device memory", cumoe_buffer_adopt(w->context, w, CUMOE_U8, 1, 8, NULL, &owned));
  CHECK_OK(cumoe_buffer_adopt(w->context, here, CUMOE_U8, 1, 512, w->stream, &owned));
  shim_mark();
  CHECK_OK(cumoe_buffer_free(&owned));
  CHECK(strstr(shim_trace(), "cudaFree ") != NULL && strstr(shim_trace(), "cudaStreamSynchronize") != NULL);
  CHECK_OK(cumoe_buffer_alloc(w->context, CUMOE_U8, 1, 512, w->stream, &owned));
  CHECK_OK(cumoe_buffer_release(&owned, &here));
  CHECK_OK(cumoe_buffer_adopt(w->context, here, CUMOE_U8, 1, 512, w->stream, &owned));
  shim_mark();
  CHECK_OK(cumoe_buffer_free(&owned));
  CHECK(strstr(shim_trace(), "cudaFreeAsync") != NULL && shim_calls(SHIM_SYNC) == 0);
  make_current(OTHER_DEVICE);
  OWN(cudaFree(there));
}

/* Which weights tensor maps can describe. */
#define SERVED(a) tmap_serves(&(a).b, (a).n, (a).experts, (a).gated)

static void map_weights(world *w)
{
  (void)w;
  gemm_args a = {.n = 64, .k = 64, .experts = 8, .gated = 1};
  a.b = (expert_matrix){.base = {(void *)4096, (void *)8192},
                        .expert_stride = 4096,
                        .n_stride = 64,
                        .k_stride = 1,
                        .format = FORMAT_bf16};
  CHECK(SERVED(a));
  gemm_args b = a;
#define NOT_SERVED(change)                                                                                             \
  b = a;                                                                                                               \
  change;                                                                                                              \
  CHECK(!SERVED(b))
  NOT_SERVED(b.b.k_stride = 64);
  NOT_SERVED(b.b.table[0] = (const void *const *)4096);
  NOT_SERVED(b.b.table[1] = (const void *const *)4096);
  NOT_SERVED(b.n = 60);
  NOT_SERVED((b.gated = 0, b.b.base[0] = (void *)4104));
  NOT_SERVED(b.b.n_stride = 60);
  NOT_SERVED(b.b.n_stride = 0);
  NOT_SERVED(b.b.n_stride = (int64_t)1 << 37);
  NOT_SERVED(b.b.expert_stride = 4);
  NOT_SERVED(b.b.base[1] = (void *)4100);
  NOT_SERVED(b.b.base[1] = b.b.base[0]);
  b = a, b.b.n_stride = 1, b.b.k_stride = 64;
  CHECK(SERVED(b));
  b.b.base[1] = (void *)4100;
  CHECK(!SERVED(b));
  b.b.base[1] = (void *)4098, b.b.n_stride = 2, b.b.k_stride = 128;
  CHECK(SERVED(b));
  b.b.base[1] = b.b.base[0], b.b.base[0] = (void *)4098; /* up first */
  CHECK(SERVED(b));
  b.gated = 0, b.b.base[0] = (void *)4096;
  CHECK(!SERVED(b));
  b.gated = 1, b.b.base[0] = (void *)4098, b.b.k_stride = 132;
  CHECK(!SERVED(b));
  a.experts = 1;
  a.gated = 0;
  a.b.expert_stride = 4;
  a.b.base[1] = NULL;
  CHECK(SERVED(a));
}

static void combine_otherwise(world *w)
{
  cumoe_moe_desc d = describe(CUMOE_BF16);
  cumoe_plan plan = NULL;
  const cumoe_view rows = lend_in(w, CUMOE_BF16, 3, HIDDEN);
  const cumoe_route route = {.size = sizeof route,
                             .counts = lend(w, CUMOE_I32, 1, EXPERTS),
                             .offsets = lend(w, CUMOE_I32, 1, EXPERTS + 1),
                             .row_pair = lend(w, CUMOE_I32, 1, 3 * TOP_K),
                             .slot_row = lend(w, CUMOE_I32, 3, TOP_K)};
  cumoe_combine_args a = {.size = sizeof a,
                          .out_scale = 2,
                          .y = lend_in(w, CUMOE_BF16, 3 * TOP_K, HIDDEN),
                          .out = lend(w, CUMOE_BF16, 3 * TOP_K, HIDDEN)};
  d.flags = CUMOE_MOE_UNREDUCED;
  CHECK_OK(cumoe_plan_create(w->context, &d, &plan));
  CHECK_OK(cumoe_combine(plan, &route, &a, NULL));
  CHECK_OK(cumoe_plan_destroy(plan));
  d.flags = 0;
  d.routing.identity_experts = 1;
  CHECK_OK(cumoe_plan_create(w->context, &d, &plan));
  a.out = lend(w, CUMOE_BF16, 3, HIDDEN);
  a.pair_weights = lend_in(w, CUMOE_F32, 3, TOP_K);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "args.x", cumoe_combine(plan, &route, &a, NULL));
  a.x = rows;
  CHECK_OK(cumoe_combine(plan, &route, &a, NULL));
  CHECK_OK(cumoe_plan_destroy(plan));
}

/* A forced row that cannot serve is no reason to take another one. */
static void force_wrongly(world *w)
{
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    cumoe_variant_info info = {.size = sizeof info};
    CHECK_OK(cumoe_variant_get(w->context, i, &info));
    if (!info.usable || strcmp(info.op, "up") != 0 || strcmp(info.major, "N") != 0 || info.x != CUMOE_BF16) continue;
    CHECK_OK(cumoe_variant_force(w->context, i));
    REFUSED(CUMOE_ERR_NOT_SUPPORTED, "one is forced", run_routed(w));
    CHECK_OK(cumoe_variant_force(w->context, -1));
  }
}

static void use_functions(world *w)
{
  static const char ptx[] = ".version 8.0\n.target sm_80\n.address_size 64\n";
  cumoe_module module = {0};
  cumoe_function add = {0};
  cumoe_view_mut global;
  cumoe_graph graph = NULL;
  uint32_t threads = 0;
  cumoe_launch l = cumoe_launch_elements(0, NULL);
  CHECK_OK(cumoe_module_load(w->context, ptx, sizeof ptx - 1, &module)); /* without its NUL: copied */
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "sub", cumoe_module_function(module, "sub", 0, &add));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "max_dynamic_smem", cumoe_module_function(module, "add", 1 << 20, &add));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "name", cumoe_module_function(module, "", 0, &add));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "nowhere", cumoe_module_global(module, "nowhere", CUMOE_F32, &global));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "name", cumoe_module_global(module, "", CUMOE_F32, &global));
  CHECK_OK(cumoe_module_function(module, "add", 0, &add));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "dynamic_smem", cumoe_function_block(add, UINT32_MAX, &threads));
  const cumoe_arg args[4] = {cumoe_arg_view(lend_in(w, CUMOE_F32, 1, 8)), cumoe_arg_view(lend_in(w, CUMOE_F32, 1, 8)),
                             cumoe_arg_view_mut(lend(w, CUMOE_F32, 1, 8)), cumoe_arg_i32(0)};
  shim_mark();
  CHECK_OK(cumoe_launch_kernel(add, &l, args, 4));
  CHECK(shim_calls(SHIM_ALL) == 0); /* of nothing */
  cumoe_module copy = module;
  cumoe_function_info info = {.size = sizeof info};
  CHECK_OK(cumoe_module_unload(&module));
  REFUSED(CUMOE_ERR_STALE_HANDLE, "function", cumoe_launch_kernel(add, &l, args, 4));
  REFUSED(CUMOE_ERR_STALE_HANDLE, "function", cumoe_function_get_info(add, &info));
  REFUSED(CUMOE_ERR_STALE_HANDLE, "module", cumoe_module_unload(&copy));
  cumoe_context context = NULL;
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  CHECK_OK(cumoe_module_load(context, ptx, sizeof ptx, &module));
  CHECK(module.id != copy.id); /* though the slot may be the same */
  CHECK_OK(cumoe_module_function(module, "add", 0, &add));
  CHECK_OK(cumoe_context_destroy(context));
  REFUSED(CUMOE_ERR_STALE_HANDLE, "function", cumoe_launch_kernel(add, &l, args, 4));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "not being captured", cumoe_graph_end(w->context, w->stream, &graph));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "every thread", cumoe_stream_destroy(w->context, CUMOE_STREAM_PER_THREAD));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "peer is 7", cumoe_pool_allow_peer(w->context, 7));
  CHECK_OK(cumoe_pool_allow_peer(w->context, 1));
}

static void many_threads(world *w)
{
  (void)w;
  cumoe_context context = NULL;
  cumoe_device_info info = {.size = sizeof info};
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = 100000};
  shim_fail(SHIM_THREAD, 4, true, cudaErrorMemoryAllocation); /* more than three cannot be had */
  CHECK_OK(cumoe_context_create(CUMOE_DEVICE_CPU, &config, &context));
  CHECK_OK(cumoe_context_info(context, &info));
  CHECK(info.multiprocessors == 4);
  CHECK_OK(cumoe_context_destroy(context));
  shim_heal();
}

/* What belongs to one context, or to the caller, is left alone by what happens to another. */
static void leave_alone(world *w)
{
  cumoe_context context = NULL;
  cumoe_buffer kept = {0}, also = {0}, gone[2] = {{0}};
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  CHECK_OK(cumoe_buffer_alloc(w->context, CUMOE_F32, 1, 8, NULL, &kept));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 1, 8, NULL, &gone[0]));
  CHECK_OK(cumoe_buffer_alloc(w->context, CUMOE_F32, 1, 8, NULL, &also));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 1, 8, NULL, &gone[1]));
  CHECK_OK(cumoe_context_destroy(context));
  CHECK_OK(cumoe_buffer_free(&also));
  CHECK_OK(cumoe_fill(w->context, cumoe_buffer_view_mut(kept), 0, NULL));
  CHECK_OK(cumoe_buffer_free(&kept));
  make_current(ITS_DEVICE);
  CHECK(cudaSetDevice(99) == cudaErrorInvalidDevice); /* pending; a failure of ours does not take it away */
  REFUSED(CUMOE_ERR_OUT_OF_MEMORY, "bytes asked",
          cumoe_buffer_alloc(w->context, CUMOE_F32, 1 << 20, 1 << 20, NULL, &kept));
  CHECK(shim_last_error() != cudaSuccess);
  shim_heal();
  shim_engine_context(1); /* on the same GPU: it does */
  shim_mark();
  CHECK_OK(run_routed(w));
  CHECK(strstr(shim_trace(), "cuCtxPush") == NULL && strstr(shim_trace(), "cuCtxGetDevice") != NULL);
  shim_engine_context(0);
  shim_mark();
  CHECK_OK(run_routed(w));
  CHECK(strstr(shim_trace(), "cuCtxPush") != NULL && shim_current_device() == 0);
}

/* Of several failures, the first is told; of a lost device, what lost it. */
static void first_cause(world *w)
{
  cumoe_context context = NULL;
  for (int n = 2; n < 60; n++) {
    shim_fail(SHIM_CUDA, n, true, cudaErrorInvalidValue);
    if (cumoe_context_create(1, NULL, &context) == CUMOE_OK) CHECK(false);
    CHECK_MSG(strstr(cumoe_last_error(), shim_failed()) != NULL || strstr(shim_failed(), "Exchange") != NULL,
              "%s failed: %s", shim_failed(), cumoe_last_error());
    shim_heal();
  }
  for (int n = 1; n < 60; n++) {
    cumoe_buffer left[2];
    void *pinned[2];
    cumoe_stream streams[2];
    CHECK_OK(cumoe_context_create(1, NULL, &context));
    for (int i = 0; i < 2; i++) {
      CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 1, 100, NULL, &left[i]));
      CHECK_OK(cumoe_pinned_alloc(context, 100, 0, &pinned[i]));
      CHECK_OK(cumoe_stream_create(context, 0, &streams[i]));
    }
    shim_fail(SHIM_CUDA, n, true, cudaErrorInvalidValue);
    const bool failed = cumoe_context_destroy(context) != CUMOE_OK;
    if (failed)
      CHECK_MSG(strstr(cumoe_last_error(), shim_failed()) != NULL || strstr(shim_failed(), "Exchange") != NULL,
                "%s failed: %s", shim_failed(), cumoe_last_error());
    shim_heal();
  }
  const void *matrices[EXPERTS];
  cumoe_weights bound = NULL;
  cumoe_weights_desc d = describe_weights(w, CUMOE_BF16, EXPERTS, INTER, CUMOE_GATE_UP_CONCAT);
  for (int e = 0; e < EXPERTS; e++) matrices[e] = lend_in(w, CUMOE_BF16, HIDDEN, INTER).data;
  d.down.data.data = NULL;
  d.down.data.rows = HIDDEN;
  d.down.per_expert = matrices;
  make_current(ITS_DEVICE);
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  CHECK_OK(cumoe_weights_bind(context, &d, &bound));
  shim_fail(SHIM_CUDA, 3, false, cudaErrorIllegalAddress);
  REFUSED(CUMOE_ERR_CUDA_STICKY, "IllegalAddress", cumoe_synchronize(context, NULL));
  REFUSED(CUMOE_ERR_CUDA_STICKY, "lost earlier", cumoe_weights_destroy(bound));
  CHECK_TEXT("IllegalAddress");
  CHECK_STATUS(CUMOE_ERR_CUDA_STICKY, cumoe_context_destroy(context));
  shim_heal();
  CHECK_OK(cumoe_context_create(1, NULL, &context));
  shim_mark();
  cumoe_context again = NULL;
  CHECK_OK(cumoe_context_create(1, NULL, &again));
  CHECK(strstr(shim_trace(), "ByVersion cuCtx") == NULL); /* looked up once */
  CHECK_OK(cumoe_context_destroy(again));
  CHECK_OK(cumoe_context_destroy(context));
}

/* Without NVRTC, without cuBLAS, without one of their functions. */
static void no_libraries(world *w)
{
  (void)w;
  cumoe_image image;
  shim.hidden = "nvrtcGetPTX";
  REFUSED(CUMOE_ERR_LIBRARY_MISSING, "nvrtcGetPTX", cumoe_compile("", "sm_90a", NULL, 0, NULL, 0, &image));
  shim.hidden = NULL;
  const char *const target[] = {"-arch=sm_80"}, *const hole[] = {NULL};
  char log[4];
  CHECK_OK(cumoe_compile("", "sm_90a", target, 1, log, sizeof log, &image));
  CHECK(strcmp(log, "a r") == 0);
  cumoe_image_free(&image);
  cumoe_image_free(NULL);
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "options[0]", cumoe_compile("", "sm_90a", hole, 1, NULL, 0, &image));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "target is gpu", cumoe_compile("", "gpu", NULL, 0, NULL, 0, &image));
  REFUSED(CUMOE_ERR_INVALID_ARGUMENT, "log is null", cumoe_compile("", "sm_90a", NULL, 0, NULL, 9, &image));
}

/* Every unit once, and no other. */
static void count_units(const void *args, int64_t begin, int64_t end)
{
  atomic_int *const units = *(atomic_int *const *)args;
  for (int64_t i = begin; i < end; i++) atomic_fetch_add(&units[i], 1);
}

static void deal_units(world *w)
{
  enum { MOST = 100 };
  static atomic_int units[2 * MOST];
  atomic_int *const counts = units;
  (void)w;
  thread_pool *pool = threads_create(3);
  for (int64_t n = 0; n <= MOST; n++) {
    for (int i = 0; i < 2 * MOST; i++) atomic_store(&units[i], 0);
    threads_run(pool, count_units, &counts, n);
    for (int i = 0; i < 2 * MOST; i++) CHECK(atomic_load(&units[i]) == (i < n));
  }
  threads_destroy(pool);
  threads_destroy(NULL);
}

/* 1200 pairs: two chunks, so they are counted first. */
static void two_chunks(world *w)
{
  const cumoe_moe_desc d = describe(CUMOE_BF16);
  char kernels[200];
  cumoe_moe_args a = arguments(w, &d, 600);
  a.ids = lend_in(w, CUMOE_I32, 600, TOP_K);
  a.weights = lend_in(w, CUMOE_F32, 600, TOP_K);
  shim_mark();
  CHECK_OK(cumoe_moe_forward(w->plan, w->weights, &a, w->stream));
  list_kernels(shim_trace(), kernels, sizeof kernels);
  CHECK_MSG(strncmp(kernels, "map map ", 8) == 0, "%s", kernels);
  const cumoe_route route = {.size = sizeof route,
                             .counts = lend(w, CUMOE_I32, 1, EXPERTS),
                             .offsets = lend(w, CUMOE_I32, 1, EXPERTS + 1),
                             .row_pair = lend(w, CUMOE_I32, 1, 600 * TOP_K),
                             .slot_row = lend(w, CUMOE_I32, 600, TOP_K)};
  const cumoe_view none = {0};
  shim_mark();
  CHECK_OK(cumoe_map(w->plan, a.ids, none, &route, lend(w, CUMOE_U8, 1, 1024), w->stream));
  list_kernels(shim_trace(), kernels, sizeof kernels);
  CHECK_MSG(strcmp(kernels, "map map ") == 0, "%s", kernels);
}

static void products(world *w)
{
  static const char *const names[] = {"cublasCreate_v2",    "cublasDestroy_v2",      "cublasSetMathMode",
                                      "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmStridedBatchedEx_64"};
  size_t bytes = 0;
  CHECK_OK(cumoe_matmul_workspace(w->context, &bytes));
  cumoe_matmul_args m = {.size = sizeof m,
                         .flags = CUMOE_MATMUL_TF32,
                         .a = lend_in(w, CUMOE_F16, 8, 16),
                         .b = lend_in(w, CUMOE_F16, 16, 8),
                         .c = lend(w, CUMOE_F16, 8, 8)};
  REFUSED(CUMOE_ERR_WORKSPACE, "absent", cumoe_matmul(w->context, &m, NULL));
  m.workspace = lend(w, CUMOE_U8, 1, (int64_t)bytes - 1);
  REFUSED(CUMOE_ERR_WORKSPACE, "are needed", cumoe_matmul(w->context, &m, NULL));
  m.workspace = lend(w, CUMOE_U8, 1, (int64_t)bytes);
  for (int i = 0; i < 6; i++) {
    shim.hidden = names[i];
    REFUSED(CUMOE_ERR_LIBRARY_MISSING, names[i], cumoe_matmul(w->context, &m, NULL));
  }
  shim.hidden = NULL;
  CHECK_OK(cumoe_matmul(w->context, &m, NULL));
  CHECK_OK(cumoe_matmul_prepare(w->context));
  m.a = lend_in(w, CUMOE_F16, 8, 0);
  m.b = lend_in(w, CUMOE_F16, 0, 8);
  CHECK_OK(cumoe_matmul(w->context, &m, NULL));
  shim_fail(SHIM_LIBRARY, 3, false, (cudaError_t)13);
  CHECK_STATUS(CUMOE_ERR_CUDA, cumoe_matmul(w->context, &m, NULL));
  CHECK_TEXT("CUBLAS_STATUS_EXECUTION_FAILED");
}

/* Of a device that a kernel of somebody's has ended, as cuBLAS meets it. */
static void product_on_lost(world *w)
{
  size_t bytes = 0;
  CHECK_OK(cumoe_matmul_prepare(w->context));
  CHECK_OK(cumoe_matmul_workspace(w->context, &bytes));
  const cumoe_matmul_args m = {.size = sizeof m,
                               .a = lend_in(w, CUMOE_F16, 8, 16),
                               .b = lend_in(w, CUMOE_F16, 16, 8),
                               .c = lend(w, CUMOE_F16, 8, 8),
                               .workspace = lend(w, CUMOE_U8, 1, (int64_t)bytes)};
  shim_fail(SHIM_CUDA, INT64_MAX, false, cudaErrorIllegalAddress);
  CHECK_OK(cumoe_matmul(w->context, &m, w->stream));
  const int64_t calls = shim_seen(SHIM_CUDA);
  shim_fail(SHIM_LIBRARY, 3, false, (cudaError_t)13);
  shim_fail(SHIM_CUDA, calls, false, cudaErrorIllegalAddress);
  CHECK_STATUS(CUMOE_ERR_CUDA_STICKY, cumoe_matmul(w->context, &m, w->stream));
  CHECK_TEXT("cudaStreamIsCapturing: cudaErrorIllegalAddress");
  shim_heal();
}

static void operations(world *w)
{
  const cumoe_view wide = lend_in(w, CUMOE_BF16, 4, 64), bias = lend_in(w, CUMOE_F32, 1, 32), none = {0};
  cumoe_view x = wide, empty = wide, odd = wide;
  const cumoe_view_mut y = lend(w, CUMOE_BF16, 4, 32);
  x.cols = 32; /* rows apart */
  odd.cols = 32;
  odd.data = (const char *)odd.data + 2;
  empty.cols = 0;
  cumoe_view_mut nothing = y;
  nothing.cols = 0;
  const cumoe_view views[] = {x, odd};
  for (int i = 0; i < 2; i++) {
    CHECK_OK(cumoe_add(w->context, views[i], views[i], y, NULL));
    CHECK_OK(cumoe_mul(w->context, cumoe_const(y), views[i], y, NULL));
    CHECK_OK(cumoe_add(w->context, views[i], cumoe_const(y), y, NULL));
    CHECK_OK(cumoe_silu(w->context, views[i], y, NULL));
    CHECK_OK(cumoe_softmax(w->context, views[i], y, NULL));
    CHECK_OK(cumoe_layernorm(w->context, views[i], bias, bias, 0, y, NULL));
    CHECK_OK(cumoe_rmsnorm(w->context, views[i], none, 0, y, NULL));
  }
  shim_mark();
  CHECK_OK(cumoe_add(w->context, empty, empty, nothing, NULL));
  CHECK_OK(cumoe_softmax(w->context, empty, nothing, NULL));
  CHECK(shim_calls(SHIM_ALL) == 0);
}

/* The first call of an operation loads its kernels, also in a capture; from then on nothing but launches. */
static void training(world *w)
{
  const cumoe_view_mut y = lend(w, CUMOE_F32, 4, 32), sizes = lend(w, CUMOE_U8, 1, 4096);
  const cumoe_view x = lend_in(w, CUMOE_F32, 4, 32), ids = lend_in(w, CUMOE_I32, 1, 4);
  const cumoe_norm_backward_args n = {
      .size = sizeof n, .x = x, .dy = x, .dx = y, .dweight = lend(w, CUMOE_F32, 1, 32), .workspace = sizes};
  const cumoe_embedding_backward_args e = {
      .size = sizeof e, .dy = x, .ids = ids, .dtable = lend(w, CUMOE_F32, 9, 32), .workspace = sizes};
  const cumoe_attention_args a = {.size = sizeof a,
                                  .heads = 2,
                                  .kv_heads = 2,
                                  .head_dim = 16,
                                  .softcap = 0x1p60f,
                                  .q = lend_in(w, CUMOE_BF16, 100, 32),
                                  .k = lend_in(w, CUMOE_BF16, 100, 32),
                                  .v = lend_in(w, CUMOE_BF16, 100, 32),
                                  .out = lend(w, CUMOE_BF16, 100, 32)};
  char kernels[400];
  for (int round = 0; round < 2; round++) {
    shim_mark();
    CHECK_OK(cumoe_silu_backward(w->context, x, x, y, NULL));
    CHECK_OK(cumoe_rmsnorm_backward(w->context, &n, NULL));
    CHECK_OK(cumoe_embedding_backward(w->context, &e, NULL));
    CHECK_OK(cumoe_attention(w->context, &a, NULL));
    CHECK(round == 0 || shim_calls(SHIM_ALL) == shim_calls(SHIM_NEUTRAL) + shim_calls(SHIM_LAUNCH));
    list_kernels(shim_trace(), kernels, sizeof kernels);
    CHECK_MSG(strcmp(kernels,
                     "elementwise norm norm norm norm embedding embedding embedding embedding embedding attention ") ==
                  0,
              "the kernels are: %s", kernels);
  }
  const attention_args *told = shim_last_args("attention");
  CHECK(told != NULL && told->softcap == 0); /* one that changes no score would overflow */
}

/* Rows of a forward that keeps: by one kernel that copies x ahead and hands over by expert; without it by two. */
static void keeping(world *w)
{
  char kernels[400];
  const gemm_sm90_args *keep = shim_last_args("cumoe_up_keep");
  CHECK(keep->g.gated && keep->g.c && keep->z_ld == 2 * INTER && keep->g.protocol.progress);
  CHECK((char *)keep->z[1] == (char *)keep->z[0] + INTER * 2 && keep->g.protocol.by_expert);
  CHECK(keep->g.row_pair && !keep->g.packed && !keep->g.protocol.x_copy); /* too few rows an expert */
  const map_args *map = shim_last_args("cumoe_map_any");
  CHECK(map->protocol.progress == keep->g.protocol.progress);
  CHECK_OK(both_ways(w, 3000));
  keep = shim_last_args("cumoe_up_keep");
  CHECK(keep->g.protocol.x_copy && keep->g.protocol.x_copy != keep->g.c && keep->g.protocol.x_copy != keep->g.a);
  for (int32_t i = 0; i < cumoe_variant_count(); i++) {
    cumoe_variant_info v = {.size = sizeof v};
    CHECK_OK(cumoe_variant_get(w->context, i, &v));
    if (!strcmp(v.op, "up") && !strcmp(v.form, "tile") && v.x == CUMOE_BF16 && v.bm == 128)
      CHECK_OK(cumoe_variant_force(w->context, i));
  }
  shim_mark();
  CHECK_OK(both_ways(w, 3000));
  CHECK_OK(cumoe_variant_force(w->context, -1));
  list_kernels(shim_trace(), kernels, sizeof kernels);
  CHECK_MSG(strncmp(kernels, "router gate map map copy up activation down ", 44) == 0, "the kernels are: %s", kernels);
  const gemm_args *up = shim_last_args("cumoe_up_");
  CHECK(up->packed && up->row_pair && up->a_ld == HIDDEN && up->n == 2 * INTER && !up->gated && up->a != NULL);
}

/* The same of the layer's backward; what its kernels of products are told. */
static void backward(world *w)
{
  char kernels[400];
  for (int round = 0; round < 2; round++) {
    shim_mark();
    CHECK_OK(run_both_ways(w));
    CHECK(round == 0 || shim_calls(SHIM_ALL) == shim_calls(SHIM_NEUTRAL) + shim_calls(SHIM_LAUNCH));
    list_kernels(shim_trace(), kernels, sizeof kernels);
    CHECK_MSG(strcmp(kernels, "router gate map map up down combine "
                              "pad down down gate gate gate cut weight add bias down gather ") == 0,
              "the kernels are: %s", kernels);
  }
  const gemm_args *down = shim_last_args("cumoe_down_drawn");
  const weight_gradient_args *runs = shim_last_args("cumoe_weight_gradient");
  const down_activated_args *act = shim_last_args("cumoe_down_activated");
  const pad_args *pad = shim_last_args("cumoe_pad");
  const int64_t rows = pad->rows_cap;
  CHECK(rows % ROW_STEP == 0 && rows >= 600 * TOP_K && pad->map.rows_cap == 600 * TOP_K);
  CHECK(down->counts == pad->counts && down->offsets == pad->offsets && down->rows_cap == rows && !down->b.bias[0]);
  CHECK(down->k == 2 * INTER && down->n == HIDDEN && down->a == act->d_z[0] && down->b.n_stride == 1);
  CHECK(!down->protocol.early_inputs); /* the grid ahead made d z: there are no gradients of weights in between */
  CHECK(act->gemm.g.offsets == pad->offsets && act->z_offsets == pad->map.offsets && act->along);
  CHECK(act->row_weight == pad->row_weight && pad->row_weight && act->z_rows == pad->map.rows_cap);
  const gate_backward_args *gate = shim_last_args("cumoe_gate_backward");
  CHECK(gate->has_pairs && gate->pairs.parts == act->along && gate->pairs.d_weights == gate->d_weights);
  CHECK(gate->beside == (gate->balance == 0) && gate->pairs.map.slot_row == pad->slot_row);
  CHECK(pad->row_token && act->gemm.g.row_pair == pad->row_token && act->gemm.g.a == gate->pairs.d_out.base);
  CHECK(!act->gemm.g.protocol.by_expert && !runs->beside && !runs->d_h); /* there is nobody who would count */
  CHECK(runs->n == 2 * EXPERTS && runs->k == HIDDEN && runs->map.experts == 3 && runs->padded);
  CHECK(runs->d.expert_stride == 2 * EXPERTS * HIDDEN);
  keeping(w);
}

static const struct {
  const char *name;
  void (*test)(world *w);
} corners[] = {
    {"adopted memory", adopt},
    {"tensor maps", map_weights},
    {"combine: unreduced, identity experts", combine_otherwise},
    {"a forced row that cannot serve", force_wrongly},
    {"functions, graphs, peers", use_functions},
    {"threads", many_threads},
    {"what is left alone", leave_alone},
    {"the first cause", first_cause},
    {"other libraries", no_libraries},
    {"units dealt to threads", deal_units},
    {"a map in two chunks", two_chunks},
    {"products", products},
    {"a product on a device that is lost", product_on_lost},
    {"operations", operations},
    {"training", training},
    {"backward of the layer", backward},
};

static void test_corners(void)
{
  for (size_t i = 0; i < sizeof corners / sizeof corners[0]; i++) {
    world w = {.next = SHIM_LENT};
    case_begin("%s", corners[i].name);
    small_layer(&w);
    corners[i].test(&w);
    end_world(&w);
    shim_reset();
    case_end();
  }
}

enum { THREADS = 8, ROUNDS = 300 };

typedef struct seat {
  world w;
  int number;
  int64_t wrong;
} seat;

static atomic_uint_fast64_t shared_ids[4]; /* handles that any thread may look at, stale at times */

#define WANT(condition) s->wrong += (condition) ? 0 : 1

/* One round of everything a thread may do; the text of its failures is its own. */
static void take_turn(seat *s, int round)
{
  world *w = &s->w;
  cumoe_buffer mine = {0};
  cumoe_fault fault = {.size = sizeof fault};
  char text[64];
  const uintptr_t next = w->next;
  WANT(cumoe_buffer_alloc(w->context, CUMOE_F32, s->number + 1, 16, w->stream, &mine) == CUMOE_OK);
  WANT(cumoe_fill(w->context, cumoe_buffer_view_mut(mine), (uint8_t)round, w->stream) == CUMOE_OK);
  WANT(run_routed(w) == CUMOE_OK);
  w->next = next;
  atomic_store(&shared_ids[s->number % 4], mine.id);
  const cumoe_buffer seen = {atomic_load(&shared_ids[(s->number + 1) % 4])};
  const cumoe_view view = cumoe_buffer_view(seen);
  WANT(view.data == NULL || view.cols == 16);
  const cumoe_status used = cumoe_fill(w->context, cumoe_buffer_view_mut(seen), 1, w->stream);
  WANT(used == CUMOE_OK || used == CUMOE_ERR_STALE_HANDLE || used == CUMOE_ERR_INVALID_ARGUMENT ||
       used == CUMOE_ERR_CUDA);
  WANT(cumoe_plan_workspace(w->plan, -1 - s->number, &(size_t){0}) == CUMOE_ERR_INVALID_ARGUMENT);
  snprintf(text, sizeof text, "tokens is %d,", -1 - s->number);
  WANT(strstr(cumoe_last_error(), text) != NULL);
  WANT(cumoe_fault_read(w->context, w->stream, &fault) == CUMOE_OK && cumoe_fault_pending(w->context) == 0);
  WANT(cumoe_buffer_live(w->context, NULL) >= 1);
  if (round % 50 == s->number) cumoe_set_log(NULL, NULL, CUMOE_LOG_INFO);
  WANT(cumoe_buffer_free(&mine) == CUMOE_OK);
}

static void *sit(void *argument)
{
  seat *s = argument;
  if (s->number % 2) WANT(cudaSetDevice(s->number / 2 % 2) == cudaSuccess);
  const int device = shim_current_device();
  WANT(cumoe_context_create(s->number == 7 ? 0 : 1, NULL, &s->w.other) == CUMOE_OK);
  for (int round = 0; round < ROUNDS; round++) take_turn(s, round);
  WANT(cumoe_context_destroy(s->w.other) == CUMOE_OK);
  WANT(shim_current_device() == device && shim_last_error() == cudaSuccess);
  return NULL;
}

static void test_threads(void)
{
  case_begin("%d threads on one context", THREADS);
  world w = {.next = SHIM_LENT};
  static seat seats[THREADS];
  pthread_t threads[THREADS];
  shim_drop_context();
  small_layer(&w);
  const int64_t live = shim_live();
  for (int i = 0; i < THREADS; i++) {
    seats[i] = (seat){.w = w, .number = i};
    CHECK(pthread_create(&threads[i], NULL, sit, &seats[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_MSG(seats[i].wrong == 0, "thread %d: %lld things were wrong", i, (long long)seats[i].wrong);
  }
  CHECK(shim_live() == live && cumoe_buffer_live(w.context, NULL) == 0);
  end_world(&w);
  case_end();
}

static const test_group groups[] = {
    ALONE("a driver that lacks a function", test_old_driver, ONCE),
    ALONE("launches", test_launches, ONCE),
    ALONE("arguments of the kernels", test_arguments, ONCE),
    ALONE("arguments of up with a copy", test_copy_arguments, ONCE),
    ALONE("arguments of the kernels of few tokens", test_few_arguments, ONCE),
    ALONE("arguments of the kernels of few tokens, from the router", test_few_from_router, ONCE),
    ALONE("arguments of the kernels of few tokens, from logits", test_few_from_logits, ONCE),
    ALONE("few tokens of other layers", test_not_few, ONCE),
    ALONE("machines", test_machines, ONCE),
    ALONE("a full device", test_full_device, ONCE),
    ALONE("a full allocator", test_full_allocator, ONCE),
    ALONE("a group's abort", test_group_abort, ONCE),
    ALONE("texts of a group", test_group_texts, ONCE),
    ALONE("each format by itself", test_formats_alone, ONCE),
    ALONE("streams that wait", test_orders, ONCE),
    ALONE("kernels of the caller's", test_functions, ONCE),
    ALONE("generations of handles", test_generations, ONCE),
    ALONE("flags of events", test_event_flags, ONCE),
    ALONE("what is pending", test_pending, ONCE),
    ALONE("copies that have arrived", test_copies_to_the_cpu, ONCE),
    ALONE("a copy that is released", test_release_of_a_copy, ONCE),
    ALONE("peers", test_peers, ONCE),
    ALONE("refused in a capture", test_refused_in_capture, ONCE),
    ALONE("the status of each CUDA error", test_errors, ONCE),
    ALONE("grids", test_grids, ONCE),
    ALONE("copies of pageable memory", test_pages, ONCE),
    ALONE("descriptions of plans", test_descriptions, ONCE),
    ALONE("corners", test_corners, ONCE),
    ALONE("threads", test_threads, ONCE),
};

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  shim_reset();
  run_groups(NULL, groups, sizeof groups / sizeof groups[0]);
  return test_end();
}
