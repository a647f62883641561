/*
 * Every public function with every argument made wrong in every way that its kind allows, one at a time: the right
 * status, a text that names the call and the argument, no CUDA call, no memory taken, nothing written.
 *
 * A table a function says what its arguments are; the ways to be wrong follow from the kind. Each is run on a CUDA device
 * (the shim's) and on the CPU device.
 */
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shim/shim.h"
#include "test.h"

/* ---- all arguments of all functions ------------------------------------------------------------------- */

enum { POISON = 0x5a };

typedef struct arguments {
  cumoe_context context;
  cumoe_plan plan;
  cumoe_weights weights;
  cumoe_buffer *buffer;
  void *pointer;    /* of the caller's memory or structs; what is meant by it stands in the table */
  void *out;        /* where results go: to `results` */
  void *info;       /* a struct to be filled in: to one of those below */
  const void *host; /* copied from or to */
  size_t bytes;
  int64_t rows, cols;
  int32_t device, dtype, index;
  cumoe_view v[6];
  cumoe_buffer handle;
  cumoe_context_config config;
  cumoe_allocator allocator;
  cumoe_pool_stats stats;
  cumoe_device_info device_info;
  cumoe_fault fault;
  cumoe_buffer_info buffer_info;
  cumoe_variant_info variant_info;
  uint64_t object; /* a module or a function */
  uint32_t flags;
  cumoe_launch launch;
  cumoe_function_info function_info;
  cumoe_occupancy occupancy;
  cumoe_moe_desc desc;
  cumoe_weights_desc bind;
  cumoe_moe_args args;
  cumoe_combine_args combine;
  cumoe_route route;
  cumoe_routing routing;
  cumoe_matmul_args matmul;
  float number;
} arguments;

/* Not an argument: what a call may set to null. */
static struct {
  _Alignas(16) unsigned char bytes[256];
} results;

/* ---- kinds of arguments ------------------------------------------------------------------------------- */

typedef enum kind {
  A_CONTEXT,
  A_PLAN,
  A_WEIGHTS,
  A_VIEW,
  A_NOT_NULL,
  A_SIZE,    /* of a struct that may be older or newer */
  A_INT,     /* int32_t in low .. high, a multiple of step */
  A_LONG,    /* int64_t */
  A_BYTES,   /* size_t, exactly what it is */
  A_VALUE,   /* int64_t; low is a wrong one */
  A_FLAGS,   /* uint32_t, known bits in dtypes */
  A_FLOAT,   /* not negative, not NaN */
  A_DTYPE,   /* int32_t, one of dtypes */
  A_HANDLE,  /* of a live buffer */
  A_OBJECT,  /* of a live module or function */
  A_OVERLAP, /* a view that may not share memory with the one at `with` */
} kind;

enum {
  FREE_ROWS = 1, /* any number is legal by itself */
  FREE_COLS = 2,
  LOOSE = 4,    /* a wrong shape is noticed at another argument */
  OPTIONAL = 8, /* may be absent */
  FOREIGN = 16, /* a plan of another device is noticed */
  CUDA_ONLY = 32
};

typedef struct argument {
  const char *name;
  kind kind;
  size_t at;
  int64_t low, high; /* A_INT, A_LONG */
  int32_t step;
  cumoe_status status; /* of a wrong value, where it is not INVALID_ARGUMENT */
  uint32_t dtypes, align;
  unsigned traits;
  size_t with;
} argument;

typedef struct function {
  const char *name, *title; /* title: of this form of the call */
  void (*fill)(arguments *a);
  cumoe_status (*call)(arguments *a);
  const argument *arguments;
  int count;
  void (*undo)(arguments *a); /* after a call that succeeded */
  bool cuda_only;             /* no module can be had on the CPU device */
} function;

#define BIT(dtype)   (1u << CUMOE_##dtype)
#define FLOATS       (BIT(F32) | BIT(F16) | BIT(BF16))
#define INDICES      (BIT(I32) | BIT(I64))
#define ALL_TYPES    (FLOATS | INDICES | BIT(U8))
#define AT(member)   .at = offsetof(arguments, member)
#define WITH(member) .with = offsetof(arguments, member)

static arguments right; /* the call as it succeeds */

/* ---- the bench: a device with everything that calls need ------------------------------------------------ */

enum { TOKENS = 3, HIDDEN = 64, INTER = 16, EXPERTS = 8, TOP_K = 2, ARENA = 1 << 19 };

static struct {
  cumoe_context context, other; /* other: of another device */
  bool cpu;
  cumoe_plan plan, shared_plan, weighing_plan, foreign_plan;
  cumoe_weights weights, shared, foreign_weights;
  cumoe_buffer buffer, freed, foreign, tiny;
  cumoe_stream stream;
  cumoe_event event;
  cumoe_graph graph;
  cumoe_module module;
  cumoe_function function;
  uintptr_t next;
  size_t workspace;
  cumoe_status before; /* text */
} bench;

static _Alignas(4096) unsigned char arena[ARENA], arena_before[ARENA];
static _Alignas(64) unsigned char dead[1 << 16]; /* what a destroyed object may look like */

static cumoe_view give(int32_t dtype, int64_t rows, int64_t cols)
{
  const uintptr_t at = bench.next;
  bench.next += ((uintptr_t)(rows * cols) * cumoe_dtype_bytes((cumoe_dtype)dtype) + 511) / 256 * 256;
  if (bench.cpu && bench.next > (uintptr_t)arena + ARENA) {
    printf("# the arena is too small\n");
    exit(1);
  }
  return cumoe_matrix((const void *)at, (cumoe_dtype)dtype, rows, cols, cols);
}

static cumoe_view_mut mut(cumoe_view v)
{
  return (cumoe_view_mut){(void *)(uintptr_t)v.data, v.rows, v.cols, v.ld, v.owner, v.device, v.dtype};
}

static cumoe_view_mut give_mut(int32_t dtype, int64_t rows, int64_t cols)
{
  return mut(give(dtype, rows, cols));
}

/* ---- the functions -------------------------------------------------------------------------------------- */

static cumoe_stream no_stream;

/* cumoe/context.h */

static int take_nothing(void *user, void **data, size_t bytes, size_t alignment, cumoe_stream stream)
{
  (void)user, (void)data, (void)bytes, (void)alignment, (void)stream;
  return 1;
}
static void give_nothing(void *user, void *data, size_t bytes, cumoe_stream stream)
{
  (void)user, (void)data, (void)bytes, (void)stream;
}

static void fill_create(arguments *a)
{
  a->config = (cumoe_context_config){
      .size = sizeof a->config, .cpu_threads = 1, .pool_max = 1 << 20, .allocator = &a->allocator};
  a->allocator = (cumoe_allocator){.size = sizeof a->allocator, .alloc = take_nothing, .free = give_nothing};
  a->info = &a->config;
  a->device = CUMOE_DEVICE_CPU;
  a->out = &results;
}
static cumoe_status call_create(arguments *a)
{
  return cumoe_context_create(a->device, a->info, a->out);
}
static void undo_create(arguments *a)
{
  CHECK_OK(cumoe_context_destroy(*(cumoe_context *)a->out));
}
static const argument create_arguments[] = {{"context", A_NOT_NULL, AT(out)},
                                            {"device", A_INT, AT(device), .low = -2, .high = INT32_MAX},
                                            {"config.size", A_SIZE, AT(config.size)},
                                            {"config.cpu_threads", A_INT, AT(config.cpu_threads), .high = INT32_MAX},
                                            {"config.debug", A_INT, AT(config.debug), .high = 2},
                                            {"config.reserved", A_INT, AT(config.reserved)},
                                            {"config.pool_initial", A_VALUE, AT(config.pool_initial), .low = -1},
                                            {"config.allocator.size", A_SIZE, AT(allocator.size)},
                                            {"config.allocator.alloc", A_NOT_NULL, AT(allocator.alloc)},
                                            {"config.allocator.free", A_NOT_NULL, AT(allocator.free)},
                                            {"config.allocator.reserved", A_FLAGS, AT(allocator.reserved)}};

static void fill_context(arguments *a)
{
  a->context = bench.context;
  a->device_info.size = sizeof a->device_info;
  a->info = &a->device_info;
  a->out = &results;
}
static cumoe_status call_destroy(arguments *a)
{
  return cumoe_context_destroy(a->context == bench.context ? NULL : a->context);
}
static const argument destroy_arguments[] = {{"context", A_CONTEXT, AT(context), .traits = OPTIONAL}};

static cumoe_status call_info(arguments *a)
{
  return cumoe_context_info(a->context, a->info);
}
static const argument info_arguments[] = {
    {"context", A_CONTEXT, AT(context)}, {"info", A_NOT_NULL, AT(info)}, {"info.size", A_SIZE, AT(device_info.size)}};

static cumoe_status call_synchronize(arguments *a)
{
  return cumoe_synchronize(a->context, no_stream);
}
static cumoe_status call_fault_clear(arguments *a)
{
  return cumoe_fault_clear(a->context, no_stream);
}
static const argument context_arguments[] = {{"context", A_CONTEXT, AT(context)}};

static void fill_fault(arguments *a)
{
  fill_context(a);
  a->fault.size = sizeof a->fault;
  a->info = &a->fault;
}
static cumoe_status call_fault_read(arguments *a)
{
  return cumoe_fault_read(a->context, no_stream, a->info);
}
static const argument fault_read_arguments[] = {
    {"context", A_CONTEXT, AT(context)}, {"fault", A_NOT_NULL, AT(info)}, {"fault.size", A_SIZE, AT(fault.size)}};

/* cumoe/buffer.h */

static void fill_alloc(arguments *a)
{
  fill_context(a);
  a->dtype = CUMOE_BF16;
  a->rows = 3;
  a->cols = 5;
}
static cumoe_status call_alloc(arguments *a)
{
  return cumoe_buffer_alloc(a->context, (cumoe_dtype)a->dtype, a->rows, a->cols, no_stream, (cumoe_buffer *)a->out);
}
static void undo_alloc(arguments *a)
{
  CHECK_OK(cumoe_buffer_free(a->out));
}
static const argument alloc_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"dtype", A_DTYPE, AT(dtype), .dtypes = ALL_TYPES},
    {"rows", A_LONG, AT(rows), .high = ((int64_t)1 << 46) / 10},
    {"cols", A_LONG, AT(cols), .high = ((int64_t)1 << 46) / 6},
    {"buffer", A_NOT_NULL, AT(out)},
};

static void fill_adopt(arguments *a)
{
  fill_alloc(a);
  if (bench.cpu) {
    a->pointer = malloc(30);
    return;
  }
  cudaSetDevice(1);
  CHECK(cudaMalloc(&a->pointer, 30) == cudaSuccess);
  shim_drop_context();
}
static cumoe_status call_adopt(arguments *a)
{
  return cumoe_buffer_adopt(a->context, a->pointer, (cumoe_dtype)a->dtype, a->rows, a->cols, no_stream, a->out);
}
static const argument adopt_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"data", A_NOT_NULL, AT(pointer)},
    {"dtype", A_DTYPE, AT(dtype), .dtypes = ALL_TYPES},
    {"rows", A_LONG, AT(rows), .high = ((int64_t)1 << 46) / 10},
    {"cols", A_LONG, AT(cols), .high = ((int64_t)1 << 46) / 6},
    {"buffer", A_NOT_NULL, AT(out)},
};

static void fill_handle(arguments *a)
{
  a->handle = bench.buffer;
  a->buffer = &a->handle;
  a->out = &results;
  a->buffer_info.size = sizeof a->buffer_info;
  a->info = &a->buffer_info;
}
static cumoe_status call_free(arguments *a)
{
  cumoe_buffer none = {0};
  if (a->buffer && a->buffer->id == bench.buffer.id) return cumoe_buffer_free(&none);
  return cumoe_buffer_free(a->buffer);
}
static const argument free_arguments[] = {{"buffer", A_NOT_NULL, AT(buffer)}, {"buffer", A_HANDLE, AT(handle)}};

static cumoe_status call_release(arguments *a)
{
  if (a->buffer && a->out && a->buffer->id == bench.buffer.id) return CUMOE_OK;
  return cumoe_buffer_release(a->buffer, a->out);
}
static const argument release_arguments[] = {
    {"buffer", A_NOT_NULL, AT(buffer)}, {"data", A_NOT_NULL, AT(out)}, {"buffer", A_HANDLE, AT(handle)}};

static cumoe_status call_get_info(arguments *a)
{
  return cumoe_buffer_get_info(a->handle, a->info);
}
static const argument get_info_arguments[] = {
    {"buffer", A_HANDLE, AT(handle)}, {"info", A_NOT_NULL, AT(info)}, {"info.size", A_SIZE, AT(buffer_info.size)}};

static void fill_slice(arguments *a)
{
  a->v[0] = cumoe_buffer_view(bench.buffer); /* [8, 64] */
  a->rows = 2;
  a->cols = 4;
  a->out = &results;
}
static cumoe_status call_rows(arguments *a)
{
  return cumoe_view_rows(a->v[0], a->rows, a->cols, a->out);
}
static cumoe_status call_cols(arguments *a)
{
  return cumoe_view_cols(a->v[0], a->rows, a->cols, a->out);
}
static cumoe_status call_rows_mut(arguments *a)
{
  return cumoe_view_rows_mut(mut(a->v[0]), a->rows, a->cols, a->out);
}
static cumoe_status call_cols_mut(arguments *a)
{
  return cumoe_view_cols_mut(mut(a->v[0]), a->rows, a->cols, a->out);
}
static const argument rows_arguments[] = {
    {"rows", A_LONG, AT(rows), .high = 4, .status = CUMOE_ERR_OUT_OF_BOUNDS},
    {"rows", A_LONG, AT(cols), .high = 6, .status = CUMOE_ERR_OUT_OF_BOUNDS},
    {"view", A_HANDLE, AT(v[0].owner)},
    {"slice", A_NOT_NULL, AT(out)},
};
static const argument cols_arguments[] = {
    {"cols", A_LONG, AT(rows), .high = 60, .status = CUMOE_ERR_OUT_OF_BOUNDS},
    {"cols", A_LONG, AT(cols), .high = 62, .status = CUMOE_ERR_OUT_OF_BOUNDS},
    {"view", A_HANDLE, AT(v[0].owner)},
    {"slice", A_NOT_NULL, AT(out)},
};

static unsigned char host_bytes[4096];

static void fill_copy(arguments *a)
{
  fill_context(a);
  a->v[1] = cumoe_buffer_view(bench.buffer); /* [8, 64] f32 */
  a->v[1].dtype = CUMOE_I32;
  a->v[1].rows = 4;
  a->v[1].cols = 8;
  a->v[0] = a->v[1]; /* the rows below it, as the caller's own memory */
  a->v[0].owner = 0;
  a->v[0].data = (const char *)a->v[1].data + 4 * 64 * 4;
  a->host = host_bytes;
  a->bytes = 128;
}
static cumoe_status call_from_host(arguments *a)
{
  return cumoe_copy_from_host(a->context, mut(a->v[1]), a->host, a->bytes, no_stream);
}
static cumoe_status call_to_host(arguments *a)
{
  return cumoe_copy_to_host(a->context, (void *)(uintptr_t)a->host, a->bytes, a->v[1], no_stream);
}
static cumoe_status call_copy(arguments *a)
{
  return cumoe_copy(a->context, mut(a->v[0]), a->v[1], no_stream);
}
static cumoe_status call_fill(arguments *a)
{
  return cumoe_fill(a->context, mut(a->v[1]), 0, no_stream);
}
#define MOVED .align = 4, .dtypes = ALL_TYPES
static const argument from_host_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"dst", A_VIEW, AT(v[1]), MOVED, .traits = LOOSE},
    {"host pointer", A_NOT_NULL, AT(host)},
    {"bytes", A_BYTES, AT(bytes), .status = CUMOE_ERR_OUT_OF_BOUNDS},
};
static const argument to_host_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"src", A_VIEW, AT(v[1]), MOVED, .traits = LOOSE},
    {"host pointer", A_NOT_NULL, AT(host)},
    {"bytes", A_BYTES, AT(bytes), .status = CUMOE_ERR_OUT_OF_BOUNDS},
};
static const argument copy_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"dst", A_VIEW, AT(v[0]), MOVED},
    {"src", A_VIEW, AT(v[1]), MOVED},
    {"dst", A_OVERLAP, AT(v[0]), WITH(v[1])},
};
static const argument fill_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"dst", A_VIEW, AT(v[1]), MOVED, .traits = FREE_ROWS | FREE_COLS},
};

static cumoe_status call_alloc_with(arguments *a)
{
  return cumoe_buffer_alloc_with(a->context, (cumoe_dtype)a->dtype, a->rows, a->cols, (uint32_t)a->index, no_stream,
                                 (cumoe_buffer *)a->out);
}
static const argument alloc_with_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"dtype", A_DTYPE, AT(dtype), .dtypes = ALL_TYPES},
    {"rows", A_LONG, AT(rows), .high = ((int64_t)1 << 46) / 10},
    {"cols", A_LONG, AT(cols), .high = ((int64_t)1 << 46) / 6},
    {"flags", A_FLAGS, AT(index), .dtypes = 3},
    {"buffer", A_NOT_NULL, AT(out)},
};

static cumoe_status call_retain(arguments *a)
{
  return cumoe_buffer_retain(a->handle, a->out);
}
static const argument retain_arguments[] = {{"buffer", A_HANDLE, AT(handle)}, {"another", A_NOT_NULL, AT(out)}};

static cumoe_status call_record_use(arguments *a)
{
  return cumoe_buffer_record_use(a->handle, no_stream);
}
static const argument record_use_arguments[] = {{"buffer", A_HANDLE, AT(handle)}};

static void fill_split(arguments *a)
{
  fill_slice(a);
  a->pointer = (char *)&results + sizeof results / 2;
}
static cumoe_status call_split(arguments *a)
{
  return cumoe_view_split(a->v[0], a->rows, a->out, a->pointer);
}
static cumoe_status call_split_mut(arguments *a)
{
  return cumoe_view_split_mut(mut(a->v[0]), a->rows, a->out, a->pointer);
}
static const argument split_arguments[] = {
    {"rows", A_LONG, AT(rows), .high = 8, .status = CUMOE_ERR_OUT_OF_BOUNDS},
    {"view", A_HANDLE, AT(v[0].owner)},
    {"head", A_NOT_NULL, AT(out)},
    {"tail", A_NOT_NULL, AT(pointer)},
};

static void fill_cast(arguments *a)
{
  fill_slice(a);
  a->dtype = CUMOE_I64;
}
static cumoe_status call_cast(arguments *a)
{
  return cumoe_view_cast(a->v[0], (cumoe_dtype)a->dtype, a->out);
}
static cumoe_status call_cast_mut(arguments *a)
{
  return cumoe_view_cast_mut(mut(a->v[0]), (cumoe_dtype)a->dtype, a->out);
}
static const argument cast_arguments[] = {
    {"dtype", A_DTYPE, AT(dtype), .dtypes = ALL_TYPES},
    {"view.dtype", A_DTYPE, AT(v[0].dtype), .dtypes = ALL_TYPES},
    {"view.cols", A_LONG, AT(v[0].cols), .high = INT64_MAX / 4},
    {"view.ld", A_LONG, AT(v[0].ld), .high = INT64_MAX / 4},
    {"view.cols", A_VALUE, AT(v[0].cols), .low = 63, .status = CUMOE_ERR_LAYOUT},
    {"view.ld", A_VALUE, AT(v[0].ld), .low = 65, .status = CUMOE_ERR_LAYOUT},
    {"view.data", A_VALUE, AT(v[0].data), .low = 4097, .status = CUMOE_ERR_MISALIGNED},
    {"view", A_HANDLE, AT(v[0].owner)},
    {"as", A_NOT_NULL, AT(out)},
};

static cumoe_status call_fill_value(arguments *a)
{
  return cumoe_fill_value(a->context, mut(a->v[1]), a->host, no_stream);
}
static const argument fill_value_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"dst", A_VIEW, AT(v[1]), MOVED, .traits = FREE_ROWS | FREE_COLS},
    {"value", A_NOT_NULL, AT(host)},
};

static void fill_between(arguments *a)
{
  fill_copy(a);
  a->pointer = bench.context;
}
static cumoe_status call_between(arguments *a)
{
  return cumoe_copy_between(a->context, mut(a->v[0]), no_stream, a->pointer, a->v[1], no_stream);
}
static const argument between_arguments[] = {
    {"context", A_CONTEXT, AT(context)}, {"context", A_CONTEXT, AT(pointer)},      {"dst", A_VIEW, AT(v[0]), MOVED},
    {"src", A_VIEW, AT(v[1]), MOVED},    {"dst", A_OVERLAP, AT(v[0]), WITH(v[1])},
};

static void fill_pinned(arguments *a)
{
  fill_context(a);
  a->bytes = 100;
}
static cumoe_status call_pinned_alloc(arguments *a)
{
  return cumoe_pinned_alloc(a->context, a->bytes, (uint32_t)a->index, (void **)a->out);
}
static void undo_pinned(arguments *a)
{
  CHECK_OK(cumoe_pinned_free(a->context, *(void **)a->out));
}
static const argument pinned_alloc_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"flags", A_FLAGS, AT(index), .dtypes = 1},
    {"bytes", A_LONG, AT(bytes), .high = ((int64_t)1 << 46) - 1},
    {"data", A_NOT_NULL, AT(out)},
};
static cumoe_status call_pinned_free(arguments *a)
{
  return cumoe_pinned_free(a->context, a->pointer);
}
static const argument pinned_free_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"data", A_VALUE, AT(pointer), .low = 4096, .status = CUMOE_ERR_STALE_HANDLE},
};

/* cumoe/pool.h, cumoe/debug.h */

static void fill_stats(arguments *a)
{
  fill_context(a);
  a->stats.size = sizeof a->stats;
  a->info = &a->stats;
}
static cumoe_status call_stats(arguments *a)
{
  return cumoe_pool_get_stats(a->context, a->info);
}
static const argument stats_arguments[] = {
    {"context", A_CONTEXT, AT(context)}, {"stats", A_NOT_NULL, AT(info)}, {"stats.size", A_SIZE, AT(stats.size)}};

static cumoe_status call_reset_highs(arguments *a)
{
  return cumoe_pool_reset_highs(a->context);
}
static cumoe_status call_trim(arguments *a)
{
  return cumoe_pool_trim(a->context, a->bytes);
}

/* The CPU device has no peers. */
static cumoe_status call_allow_peer(arguments *a)
{
  if (bench.cpu && a->context == bench.context && a->index == 0) return CUMOE_OK;
  return cumoe_pool_allow_peer(a->context, a->index);
}
static const argument allow_peer_arguments[] = {{"context", A_CONTEXT, AT(context)},
                                                {"peer", A_INT, AT(index), .high = 63}};

static void fill_check(arguments *a)
{
  fill_context(a);
  a->buffer_info.size = sizeof a->buffer_info;
  a->info = &a->buffer_info;
}
static cumoe_status call_check(arguments *a)
{
  return cumoe_debug_check(a->context, no_stream, a->info);
}
static const argument check_arguments[] = {{"context", A_CONTEXT, AT(context)},
                                           {"first_bad.size", A_SIZE, AT(buffer_info.size)}};

/* cumoe/moe.h */

static void fill_desc(arguments *a)
{
  fill_context(a);
  a->desc = (cumoe_moe_desc){.size = sizeof a->desc,
                             .num_experts = EXPERTS,
                             .local_experts = EXPERTS,
                             .hidden = HIDDEN,
                             .inter = INTER,
                             .dtype = CUMOE_BF16,
                             .out_dtype = CUMOE_BF16,
                             .routing = cumoe_routing_deepseek_v3(TOP_K, 4, 2, 2.5f)};
  a->info = &a->desc;
  a->bytes = 200;
}
static cumoe_status call_supports(arguments *a)
{
  return cumoe_moe_supports(a->device, a->info, NULL, 0);
}
static cumoe_status call_plan_create(arguments *a)
{
  return cumoe_plan_create(a->context, a->info, a->out);
}
static void undo_plan(arguments *a)
{
  CHECK_OK(cumoe_plan_destroy(*(cumoe_plan *)a->out));
}
#define ROUTING_FIELDS(where)                                                                                          \
  {"routing.score", A_INT, AT(where.score), .high = 3},                                                                \
      {"routing.top_k", A_INT, AT(where.top_k), .low = 1, .high = 4},                                                  \
      {"routing.n_group", A_INT, AT(where.n_group), .low = 2, .high = 8, .step = 2, .traits = LOOSE},                  \
      {"routing.topk_group", A_INT, AT(where.topk_group), .low = 1, .high = 4},                                        \
      {"routing.group_score", A_INT, AT(where.group_score), .high = 1},                                                \
      {"routing.flags", A_FLAGS, AT(where.flags), .dtypes = 7}, {"routing", A_FLOAT, AT(where.routed_scale)},          \
      {"routing", A_FLOAT, AT(where.softcap)}, {"routing", A_FLOAT, AT(where.renorm_eps)},                             \
  {                                                                                                                    \
    "routing", A_FLOAT, AT(where.renorm_min)                                                                           \
  }
#define RESERVE(what, word)                                                                                            \
  {                                                                                                                    \
#what ".reserved", A_VALUE, AT(word), .low = 1, .status = CUMOE_ERR_NOT_SUPPORTED                                  \
  }
#define DESC_FIELDS                                                                                                    \
  {"desc", A_NOT_NULL, AT(info)}, {"desc.size", A_SIZE, AT(desc.size)},                                                \
      {"desc.num_experts", A_INT, AT(desc.num_experts), .low = EXPERTS, .high = 1024, .traits = LOOSE},                \
      {"desc.local_experts", A_INT, AT(desc.local_experts), .high = EXPERTS},                                          \
      {"desc.hidden", A_INT, AT(desc.hidden), .low = 8, .high = 1 << 22, .step = 8},                                   \
      {"desc.inter", A_INT, AT(desc.inter), .low = 8, .high = 1 << 22, .step = 8},                                     \
      {"desc.shared_inter", A_INT, AT(desc.shared_inter), .high = 1 << 22, .step = 8},                                 \
      {"desc.dtype", A_DTYPE, AT(desc.dtype), .dtypes = FLOATS, .status = CUMOE_ERR_NOT_SUPPORTED},                    \
      {"desc.out_dtype", A_DTYPE, AT(desc.out_dtype), .dtypes = BIT(BF16) | BIT(F32) | 1,                              \
       .status = CUMOE_ERR_NOT_SUPPORTED},                                                                             \
      {"desc.act", A_INT, AT(desc.act), .high = 6}, {"desc", A_FLOAT, AT(desc.act_limit)},                             \
      {"desc.flags", A_FLAGS, AT(desc.flags), .dtypes = 3}, RESERVE(routing, desc.routing.reserved[3]),                \
      ROUTING_FIELDS(desc.routing), {"desc", A_INT, AT(desc.routing.zero_experts), .high = 1024 - EXPERTS},            \
  {                                                                                                                    \
    "desc", A_INT, AT(desc.routing.identity_experts), .high = 1024 - EXPERTS                                           \
  }
static const argument supports_arguments[] = {{"device", A_INT, AT(device), .low = -2, .high = INT32_MAX}, DESC_FIELDS};
static const argument plan_create_arguments[] = {
    {"context", A_CONTEXT, AT(context)}, {"plan", A_NOT_NULL, AT(out)}, DESC_FIELDS};

static void fill_plan(arguments *a)
{
  a->plan = bench.plan;
  a->rows = TOKENS;
  a->out = &results;
}
static cumoe_status call_plan_destroy(arguments *a)
{
  return cumoe_plan_destroy(a->plan == bench.plan ? NULL : a->plan);
}
static cumoe_status call_plan_workspace(arguments *a)
{
  return cumoe_plan_workspace(a->plan, a->rows, a->out);
}
static cumoe_status call_map_workspace(arguments *a)
{
  return cumoe_map_workspace(a->plan, a->rows, a->out);
}
static const argument plan_destroy_arguments[] = {{"plan", A_PLAN, AT(plan), .traits = OPTIONAL}};
static const argument workspace_arguments[] = {{"plan", A_PLAN, AT(plan)},
                                               {"tokens", A_LONG, AT(rows), .high = INT32_MAX / TOP_K},
                                               {"bytes", A_NOT_NULL, AT(out)}};

static const void *pointers[EXPERTS];

static void fill_bind(arguments *a)
{
  fill_context(a);
  a->bind = (cumoe_weights_desc){.size = sizeof a->bind,
                                 .experts = EXPERTS,
                                 .hidden = HIDDEN,
                                 .inter = INTER,
                                 .gate_order = CUMOE_GATE_UP_CONCAT,
                                 .up_major = CUMOE_OUT_IN,
                                 .down_major = CUMOE_OUT_IN};
  a->bind.gate_up.data = give(CUMOE_BF16, 2 * INTER, HIDDEN);
  a->bind.gate_up.expert_stride = 2 * INTER * HIDDEN;
  a->bind.gate_up.bias = give(CUMOE_F32, EXPERTS, 2 * INTER);
  a->bind.down.data = give(CUMOE_BF16, HIDDEN, INTER);
  a->bind.down.expert_stride = INTER * HIDDEN;
  a->bind.down.bias = give(CUMOE_BF16, EXPERTS, HIDDEN);
  a->info = &a->bind;
}
static void fill_bind_separate(arguments *a)
{
  fill_bind(a);
  a->bind.gate_order = CUMOE_GATE_UP_SEPARATE;
  a->bind.gate_up = a->bind.gate;
  for (int e = 0; e < EXPERTS; e++) pointers[e] = (const void *)(bench.next & ~(uintptr_t)255);
  a->bind.gate.data = give(CUMOE_BF16, INTER, HIDDEN);
  a->bind.gate.data.data = NULL;
  a->bind.gate.per_expert = pointers;
  a->bind.up = a->bind.gate;
}
static cumoe_status call_bind(arguments *a)
{
  return cumoe_weights_bind(a->context, a->info, a->out);
}
static void undo_bind(arguments *a)
{
  CHECK_OK(cumoe_weights_destroy(*(cumoe_weights *)a->out));
}
#define STRIDE(field_) "desc." #field_ ".expert_stride"
#define PROJECTION(field_, types)                                                                                      \
  {"desc." #field_, A_VIEW, AT(bind.field_.data), .dtypes = (types), .align = 16},                                     \
      {STRIDE(field_), A_LONG, AT(bind.field_.expert_stride), .high = INT64_MAX, .status = CUMOE_ERR_LAYOUT},          \
      {STRIDE(field_), A_VALUE, AT(bind.field_.expert_stride), .low = 8, .status = CUMOE_ERR_LAYOUT},                  \
      {STRIDE(field_), A_VALUE, AT(bind.field_.expert_stride), .low = 2052, .status = CUMOE_ERR_MISALIGNED},           \
      {STRIDE(field_), A_VALUE, AT(bind.field_.expert_stride), .low = (int64_t)1 << 61},                               \
      {"desc." #field_, A_VALUE, AT(bind.field_.expert_stride), .low = (int64_t)1 << 45},                              \
      {"desc." #field_ ".reserved", A_VALUE, AT(bind.field_.reserved[7]), .low = 1,                                    \
       .status = CUMOE_ERR_NOT_SUPPORTED},                                                                             \
  {                                                                                                                    \
    "bias", A_VIEW, AT(bind.field_.bias), .dtypes = BIT(F32) | BIT(BF16), .traits = OPTIONAL                           \
  }
#define BIND_FIELDS                                                                                                    \
  {"context", A_CONTEXT, AT(context)}, {"weights", A_NOT_NULL, AT(out)}, {"desc", A_NOT_NULL, AT(info)},               \
      {"desc.size", A_SIZE, AT(bind.size)},                                                                            \
      {"desc.gate_order", A_INT, AT(bind.gate_order), .low = 1, .high = 6, .status = CUMOE_ERR_LAYOUT},                \
      {"desc.up_major", A_INT, AT(bind.up_major), .low = 1, .high = 2, .status = CUMOE_ERR_LAYOUT},                    \
      {"desc.down_major", A_INT, AT(bind.down_major), .low = 1, .high = 2, .status = CUMOE_ERR_LAYOUT},                \
      {"desc.reserved", A_INT, AT(bind.reserved), .low = 0, .high = 0},                                                \
      {"desc.hidden", A_INT, AT(bind.hidden), .low = 8, .high = INT32_MAX, .step = 8},                                 \
      {"desc.inter", A_INT, AT(bind.inter), .low = 8, .high = INT32_MAX, .step = 8},                                   \
  {                                                                                                                    \
    "desc.experts", A_INT, AT(bind.experts), .low = 1, .high = 1024                                                    \
  }
static const argument bind_arguments[] = {BIND_FIELDS, PROJECTION(gate_up, BIT(BF16)), PROJECTION(down, FLOATS)};
static const argument bind_separate_arguments[] = {BIND_FIELDS, PROJECTION(down, FLOATS)};

static void fill_weights(arguments *a)
{
  a->weights = bench.weights;
}
static cumoe_status call_weights_destroy(arguments *a)
{
  return cumoe_weights_destroy(a->weights == bench.weights ? NULL : a->weights);
}
static const argument weights_destroy_arguments[] = {{"weights", A_WEIGHTS, AT(weights), .traits = OPTIONAL}};

/* cumoe_moe_forward */

static void fill_forward(arguments *a, cumoe_plan plan)
{
  size_t bytes = 0;
  a->plan = plan;
  a->weights = bench.weights;
  a->args = (cumoe_moe_args){.size = sizeof a->args};
  a->args.x = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->args.out = give_mut(CUMOE_BF16, TOKENS, HIDDEN);
  a->args.residual = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->args.counts_out = give_mut(CUMOE_I32, 1, EXPERTS);
  a->args.load = give_mut(CUMOE_I64, 1, EXPERTS);
  a->args.expert_map = give(CUMOE_I32, 1, EXPERTS);
  a->args.device_tokens = give(CUMOE_I32, 1, 1);
  CHECK_OK(cumoe_plan_workspace(plan, TOKENS, &bytes));
  a->args.workspace = give_mut(CUMOE_U8, 1, (int64_t)bytes);
  bench.workspace = bytes;
  a->info = &a->args;
}
static void fill_forward_ids(arguments *a)
{
  fill_forward(a, bench.plan);
  a->args.ids = give(CUMOE_I32, TOKENS, TOP_K);
  a->args.weights = give(CUMOE_F32, TOKENS, TOP_K);
}
static void fill_forward_logits(arguments *a)
{
  fill_forward(a, bench.plan);
  a->args.logits = give(CUMOE_F32, TOKENS, EXPERTS);
  a->args.select_bias = give(CUMOE_F32, 1, EXPERTS);
  a->args.ids_out = give_mut(CUMOE_I64, TOKENS, TOP_K);
  a->args.weights_out = give_mut(CUMOE_F32, TOKENS, TOP_K);
}
static void fill_forward_router(arguments *a)
{
  fill_forward(a, bench.shared_plan);
  a->args.router_weight = give(CUMOE_BF16, EXPERTS, HIDDEN);
  a->args.router_bias = give(CUMOE_F32, 1, EXPERTS);
  a->args.shared = bench.shared;
  a->args.shared_gate = give(CUMOE_BF16, 1, HIDDEN);
}
static cumoe_status call_forward(arguments *a)
{
  return cumoe_moe_forward(a->plan, a->weights, a->info, no_stream);
}
#define OVER(out_, in_)                                                                                                \
  {                                                                                                                    \
#out_, A_OVERLAP, AT(args.out_), WITH(args.in_)                                                                    \
  }
#define FORWARD_FIELDS                                                                                                 \
  {"plan", A_PLAN, AT(plan), .traits = FOREIGN}, {"weights", A_WEIGHTS, AT(weights)}, {"args", A_NOT_NULL, AT(info)},  \
      {"args.size", A_SIZE, AT(args.size)}, {"args.flags", A_FLAGS, AT(args.flags)},                                   \
      {"args.reserved", A_INT, AT(args.reserved)},                                                                     \
      {"args.x", A_VIEW, AT(args.x), .dtypes = BIT(BF16), .align = 16, .traits = LOOSE},                               \
      {"args.device_tokens", A_VIEW, AT(args.device_tokens), .dtypes = BIT(I32), .traits = OPTIONAL},                  \
      {"args.expert_map", A_VIEW, AT(args.expert_map), .dtypes = BIT(I32), .traits = OPTIONAL},                        \
      {"args.out", A_VIEW, AT(args.out), .dtypes = BIT(BF16), .align = 16},                                            \
      {"args.residual", A_VIEW, AT(args.residual), .dtypes = BIT(BF16), .align = 16, .traits = OPTIONAL},              \
      {"args.counts_out", A_VIEW, AT(args.counts_out), .dtypes = BIT(I32), .traits = OPTIONAL},                        \
      {"args.load", A_VIEW, AT(args.load), .dtypes = BIT(I64), .traits = OPTIONAL},                                    \
      {"args.workspace", A_VIEW, AT(args.workspace), .dtypes = BIT(U8), .align = 256, .traits = FREE_COLS},            \
      {"args.workspace", A_LONG, AT(args.workspace.cols), .high = -1, .status = CUMOE_ERR_WORKSPACE}, OVER(out, x),    \
      OVER(out, counts_out), OVER(out, load), OVER(out, workspace), OVER(out, device_tokens), OVER(out, expert_map),   \
      OVER(counts_out, load), OVER(counts_out, workspace), OVER(load, x), OVER(workspace, x),                          \
      OVER(workspace, residual), OVER(workspace, device_tokens)
static const argument forward_ids_arguments[] = {
    FORWARD_FIELDS,
    {"args.ids", A_VIEW, AT(args.ids), .dtypes = INDICES},
    {"args.weights", A_VIEW, AT(args.weights), .dtypes = BIT(F32)},
    OVER(out, ids),
    OVER(out, weights),
    OVER(workspace, ids),
};
static const argument forward_logits_arguments[] = {
    FORWARD_FIELDS,
    {"args.logits", A_VIEW, AT(args.logits), .dtypes = FLOATS, .traits = OPTIONAL},
    {"args.select_bias", A_VIEW, AT(args.select_bias), .dtypes = BIT(F32), .traits = OPTIONAL},
    {"args.ids_out", A_VIEW, AT(args.ids_out), .dtypes = INDICES, .traits = OPTIONAL},
    {"args.weights_out", A_VIEW, AT(args.weights_out), .dtypes = BIT(F32), .traits = OPTIONAL},
    OVER(out, logits),
    OVER(ids_out, logits),
    OVER(ids_out, weights_out),
    OVER(weights_out, select_bias),
};
static const argument forward_router_arguments[] = {
    FORWARD_FIELDS,
    {"args.router_weight", A_VIEW, AT(args.router_weight), .dtypes = BIT(BF16) | BIT(F32), .align = 16},
    {"args.router_bias", A_VIEW, AT(args.router_bias), .dtypes = BIT(BF16) | BIT(F32), .traits = OPTIONAL},
    {"args.shared", A_WEIGHTS, AT(args.shared)},
    {"args.shared_gate", A_VIEW, AT(args.shared_gate), .dtypes = BIT(BF16) | BIT(F32), .align = 16, .traits = OPTIONAL},
    OVER(out, router_weight),
    OVER(workspace, router_weight),
    OVER(load, shared_gate),
};

/* cumoe/stages.h */

static void fill_router(arguments *a)
{
  a->context = bench.context;
  a->v[0] = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->v[1] = give(CUMOE_BF16, EXPERTS, HIDDEN);
  a->v[2] = give(CUMOE_F32, 1, EXPERTS);
  a->v[3] = give(CUMOE_F32, TOKENS, EXPERTS);
}
static cumoe_status call_router(arguments *a)
{
  return cumoe_router(a->context, a->v[0], a->v[1], a->v[2], mut(a->v[3]), no_stream);
}
static const argument router_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"x", A_VIEW, AT(v[0]), .dtypes = FLOATS, .align = 16, .traits = LOOSE},
    {"weight", A_VIEW, AT(v[1]), .dtypes = BIT(BF16) | BIT(F32), .align = 16, .traits = LOOSE},
    {"bias", A_VIEW, AT(v[2]), .dtypes = BIT(BF16) | BIT(F32), .traits = OPTIONAL},
    {"logits", A_VIEW, AT(v[3]), .dtypes = BIT(F32)},
    {"logits", A_OVERLAP, AT(v[3]), WITH(v[0])},
    {"logits", A_OVERLAP, AT(v[3]), WITH(v[1])},
    {"logits", A_OVERLAP, AT(v[3]), WITH(v[2])},
};

static void fill_gate(arguments *a)
{
  a->context = bench.context;
  a->routing = cumoe_routing_deepseek_v3(TOP_K, 4, 2, 2.5f);
  a->v[0] = give(CUMOE_F32, TOKENS, EXPERTS);
  a->v[1] = give(CUMOE_F32, 1, EXPERTS);
  a->v[2] = give(CUMOE_I32, TOKENS, TOP_K);
  a->v[3] = give(CUMOE_F32, TOKENS, TOP_K);
  a->info = &a->routing;
}
static cumoe_status call_gate(arguments *a)
{
  return cumoe_gate(a->context, a->info, a->v[0], a->v[1], mut(a->v[2]), mut(a->v[3]), no_stream);
}
static const argument gate_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"routing", A_NOT_NULL, AT(info)},
    RESERVE(routing, routing.reserved[9]),
    ROUTING_FIELDS(routing),
    {"logits", A_VIEW, AT(v[0]), .dtypes = FLOATS, .traits = LOOSE},
    {"select_bias", A_VIEW, AT(v[1]), .dtypes = BIT(F32), .traits = OPTIONAL},
    {"ids", A_VIEW, AT(v[2]), .dtypes = INDICES},
    {"weights", A_VIEW, AT(v[3]), .dtypes = BIT(F32)},
};

static void fill_route(arguments *a, int64_t tokens)
{
  a->plan = bench.plan;
  a->weights = bench.weights;
  a->route = (cumoe_route){.size = sizeof a->route,
                           .counts = give_mut(CUMOE_I32, 1, EXPERTS),
                           .offsets = give_mut(CUMOE_I32, 1, EXPERTS + 1),
                           .row_pair = give_mut(CUMOE_I32, 1, tokens * TOP_K),
                           .slot_row = give_mut(CUMOE_I32, tokens, TOP_K)};
  if (bench.cpu) memset(a->route.counts.data, 0, EXPERTS * 4);
  a->pointer = &a->route;
}
#define ROUTE_FIELDS                                                                                                   \
  {"route", A_NOT_NULL, AT(pointer)}, {"route.size", A_SIZE, AT(route.size)},                                          \
      {"route.reserved", A_INT, AT(route.reserved)}, {"route.counts", A_VIEW, AT(route.counts), .dtypes = BIT(I32)},   \
      {"route.offsets", A_VIEW, AT(route.offsets), .dtypes = BIT(I32)},                                                \
  {                                                                                                                    \
    "route.row_pair", A_VIEW, AT(route.row_pair), .dtypes = BIT(I32)                                                   \
  }

static void fill_map(arguments *a)
{
  fill_route(a, TOKENS);
  a->v[0] = give(CUMOE_I32, TOKENS, TOP_K);
  a->v[1] = give(CUMOE_I32, 1, EXPERTS);
  a->v[2] = give(CUMOE_U8, 1, 16);
}
static void fill_long_map(arguments *a)
{
  fill_route(a, 1500);
  a->v[0] = give(CUMOE_I32, 1500, TOP_K);
  a->v[1] = give(CUMOE_I32, 1, EXPERTS);
  a->v[2] = give(CUMOE_U8, 1, 3 * EXPERTS * 4);
}
static cumoe_status call_map(arguments *a)
{
  return cumoe_map(a->plan, a->v[0], a->v[1], a->pointer, mut(a->v[2]), no_stream);
}
#define MAP_FIELDS                                                                                                     \
  {"plan", A_PLAN, AT(plan)}, {"ids", A_VIEW, AT(v[0]), .dtypes = INDICES, .traits = LOOSE},                           \
      {"expert_map", A_VIEW, AT(v[1]), .dtypes = BIT(I32), .traits = OPTIONAL}, ROUTE_FIELDS,                          \
  {                                                                                                                    \
    "route.slot_row", A_VIEW, AT(route.slot_row), .dtypes = BIT(I32)                                                   \
  }
static const argument map_arguments[] = {MAP_FIELDS};
static const argument long_map_arguments[] = {
    MAP_FIELDS,
    {"workspace", A_VIEW, AT(v[2]), .dtypes = BIT(U8), .align = 16, .status = CUMOE_ERR_WORKSPACE, .traits = FREE_COLS},
    {"workspace", A_LONG, AT(v[2].cols), .low = 96, .high = 96, .status = CUMOE_ERR_WORKSPACE, .traits = OPTIONAL},
};

static void fill_up(arguments *a)
{
  fill_route(a, TOKENS);
  a->v[0] = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->v[2] = give(CUMOE_BF16, TOKENS * TOP_K, INTER);
}
static void fill_weighing_up(arguments *a)
{
  fill_up(a);
  a->plan = bench.weighing_plan;
  a->v[1] = give(CUMOE_F32, TOKENS, TOP_K);
}
static cumoe_status call_up(arguments *a)
{
  return cumoe_up(a->plan, a->weights, a->v[0], a->pointer, a->v[1], mut(a->v[2]), no_stream);
}
#define UP_FIELDS                                                                                                      \
  {"plan", A_PLAN, AT(plan), .traits = FOREIGN}, {"weights", A_WEIGHTS, AT(weights)},                                  \
      {"x", A_VIEW, AT(v[0]), .dtypes = BIT(BF16), .align = 16, .traits = LOOSE}, ROUTE_FIELDS,                        \
      {"route.slot_row", A_VIEW, AT(route.slot_row), .dtypes = BIT(I32)},                                              \
      {"h", A_VIEW, AT(v[2]), .dtypes = BIT(BF16), .align = 16, .traits = FREE_ROWS},                                  \
      {"h", A_LONG, AT(v[2].rows), .low = TOKENS * TOP_K, .high = INT64_MAX, .traits = LOOSE},                         \
  {                                                                                                                    \
    "h", A_OVERLAP, AT(v[2]), WITH(v[0])                                                                               \
  }
static const argument up_arguments[] = {UP_FIELDS};
static const argument weighing_up_arguments[] = {UP_FIELDS, {"pair_weights", A_VIEW, AT(v[1]), .dtypes = BIT(F32)}};

static void fill_permute(arguments *a)
{
  fill_route(a, TOKENS);
  if (bench.cpu) memset(a->route.slot_row.data, 0xff, TOKENS * TOP_K * 4);
  a->v[0] = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->v[2] = give(CUMOE_BF16, TOKENS * TOP_K, HIDDEN);
}
static cumoe_status call_permute(arguments *a)
{
  return cumoe_permute(a->plan, a->v[0], a->pointer, mut(a->v[2]), no_stream);
}
static const argument permute_arguments[] = {
    {"plan", A_PLAN, AT(plan)},
    {"x", A_VIEW, AT(v[0]), .dtypes = BIT(BF16), .align = 16, .traits = LOOSE},
    ROUTE_FIELDS,
    {"route.slot_row", A_VIEW, AT(route.slot_row), .dtypes = BIT(I32)},
    {"rows", A_VIEW, AT(v[2]), .dtypes = BIT(BF16), .align = 16, .traits = FREE_ROWS},
    {"rows", A_LONG, AT(v[2].rows), .low = TOKENS * TOP_K, .high = INT64_MAX, .traits = LOOSE},
    {"rows", A_OVERLAP, AT(v[2]), WITH(v[0])},
};

static void fill_up_permuted(arguments *a)
{
  fill_route(a, TOKENS);
  a->v[0] = give(CUMOE_BF16, TOKENS * TOP_K, HIDDEN);
  a->v[2] = give(CUMOE_BF16, TOKENS * TOP_K, INTER);
}
static cumoe_status call_up_permuted(arguments *a)
{
  return cumoe_up_permuted(a->plan, a->weights, a->v[0], a->pointer, a->v[1], mut(a->v[2]), no_stream);
}
static const argument up_permuted_arguments[] = {
    {"plan", A_PLAN, AT(plan), .traits = FOREIGN},
    {"weights", A_WEIGHTS, AT(weights)},
    {"rows", A_VIEW, AT(v[0]), .dtypes = BIT(BF16), .align = 16, .traits = FREE_ROWS},
    {"rows", A_LONG, AT(v[0].rows), .low = TOKENS * TOP_K, .high = INT64_MAX, .traits = LOOSE},
    ROUTE_FIELDS,
    {"route.slot_row", A_VIEW, AT(route.slot_row), .dtypes = BIT(I32), .traits = LOOSE},
    {"h", A_VIEW, AT(v[2]), .dtypes = BIT(BF16), .align = 16, .traits = FREE_ROWS},
    {"h", A_LONG, AT(v[2].rows), .low = TOKENS * TOP_K, .high = INT64_MAX, .traits = LOOSE},
    {"h", A_OVERLAP, AT(v[2]), WITH(v[0])},
};

static void fill_down(arguments *a)
{
  fill_route(a, TOKENS);
  a->v[0] = give(CUMOE_BF16, TOKENS * TOP_K, INTER);
  a->v[2] = give(CUMOE_BF16, TOKENS * TOP_K, HIDDEN);
}
static cumoe_status call_down(arguments *a)
{
  return cumoe_down(a->plan, a->weights, a->v[0], a->pointer, mut(a->v[2]), no_stream);
}
static const argument down_arguments[] = {
    {"plan", A_PLAN, AT(plan), .traits = FOREIGN},
    {"weights", A_WEIGHTS, AT(weights)},
    {"h", A_VIEW, AT(v[0]), .dtypes = BIT(BF16), .align = 16, .traits = FREE_ROWS},
    {"h", A_LONG, AT(v[0].rows), .low = TOKENS * TOP_K, .high = INT64_MAX, .traits = LOOSE},
    ROUTE_FIELDS,
    {"route.slot_row", A_VIEW, AT(route.slot_row), .dtypes = BIT(I32), .traits = LOOSE},
    {"y", A_VIEW, AT(v[2]), .dtypes = BIT(BF16), .align = 16, .traits = FREE_ROWS},
    {"y", A_LONG, AT(v[2].rows), .low = TOKENS * TOP_K, .high = INT64_MAX, .traits = LOOSE},
    {"y", A_OVERLAP, AT(v[2]), WITH(v[0])},
};

static void fill_combine(arguments *a)
{
  fill_route(a, TOKENS);
  if (bench.cpu) memset(a->route.slot_row.data, 0xff, TOKENS * TOP_K * 4);
  a->combine = (cumoe_combine_args){.size = sizeof a->combine,
                                    .y = give(CUMOE_BF16, TOKENS * TOP_K, HIDDEN),
                                    .pair_weights = give(CUMOE_F32, TOKENS, TOP_K),
                                    .x = give(CUMOE_BF16, TOKENS, HIDDEN),
                                    .shared = give(CUMOE_BF16, TOKENS, HIDDEN),
                                    .shared_logit = give(CUMOE_F32, TOKENS, 1),
                                    .residual = give(CUMOE_BF16, TOKENS, HIDDEN),
                                    .device_tokens = give(CUMOE_I32, 1, 1),
                                    .out = give_mut(CUMOE_BF16, TOKENS, HIDDEN)};
  a->info = &a->combine;
}
static cumoe_status call_combine(arguments *a)
{
  return cumoe_combine(a->plan, a->pointer, a->info, no_stream);
}
static const argument combine_arguments[] = {
    {"plan", A_PLAN, AT(plan)},
    ROUTE_FIELDS,
    {"route.slot_row", A_VIEW, AT(route.slot_row), .dtypes = BIT(I32), .traits = LOOSE},
    {"args", A_NOT_NULL, AT(info)},
    {"args.size", A_SIZE, AT(combine.size)},
    {"args.y", A_VIEW, AT(combine.y), .dtypes = BIT(BF16), .align = 16, .traits = FREE_ROWS},
    {"args.pair_weights", A_VIEW, AT(combine.pair_weights), .dtypes = BIT(F32)},
    {"args.x", A_VIEW, AT(combine.x), .dtypes = BIT(BF16), .align = 16, .traits = OPTIONAL},
    {"args.shared", A_VIEW, AT(combine.shared), .dtypes = BIT(BF16), .align = 16, .traits = OPTIONAL},
    {"args.shared_logit", A_VIEW, AT(combine.shared_logit), .dtypes = BIT(F32), .traits = OPTIONAL},
    {"args.residual", A_VIEW, AT(combine.residual), .dtypes = BIT(BF16), .align = 16, .traits = OPTIONAL},
    {"args.device_tokens", A_VIEW, AT(combine.device_tokens), .dtypes = BIT(I32), .traits = OPTIONAL},
    {"args.out", A_VIEW, AT(combine.out), .dtypes = BIT(BF16), .align = 16},
    {"args.out", A_OVERLAP, AT(combine.out), WITH(combine.y)},
    {"args.out", A_OVERLAP, AT(combine.out), WITH(combine.x)},
    {"args.out", A_OVERLAP, AT(combine.out), WITH(combine.pair_weights)},
    {"args.out", A_OVERLAP, AT(combine.out), WITH(combine.shared)},
};

static void fill_variant(arguments *a)
{
  fill_context(a);
  a->variant_info.size = sizeof a->variant_info;
  a->info = &a->variant_info;
  for (a->index = 0; a->index < cumoe_variant_count(); a->index++) {
    cumoe_variant_info v = {.size = sizeof v};
    if (cumoe_variant_get(a->context, a->index, &v) == CUMOE_OK && v.usable) return;
  }
}
static cumoe_status call_variant_get(arguments *a)
{
  return cumoe_variant_get(a->context, a->index, a->info);
}
static cumoe_status call_variant_force(arguments *a)
{
  return cumoe_variant_force(a->context, a->index);
}
static void undo_force(arguments *a)
{
  CHECK_OK(cumoe_variant_force(a->context, -1));
}
static const argument variant_get_arguments[] = {{"context", A_CONTEXT, AT(context)},
                                                 {"index", A_INT, AT(index), .high = 9999},
                                                 {"info", A_NOT_NULL, AT(info)},
                                                 {"info.size", A_SIZE, AT(variant_info.size)}};
static const argument variant_force_arguments[] = {{"context", A_CONTEXT, AT(context)},
                                                   {"index", A_INT, AT(index), .low = -1, .high = 9999}};

/* cumoe/stream.h */

/* What cannot work on the CPU device says so after all checks. */
static cumoe_status unless_cpu(cumoe_status status)
{
  return bench.cpu && status == CUMOE_ERR_NOT_SUPPORTED ? CUMOE_OK : status;
}

static void fill_stream(arguments *a)
{
  fill_context(a);
  a->pointer = bench.event;
}
static cumoe_status call_stream_create(arguments *a)
{
  return cumoe_stream_create(a->context, -1, a->out);
}
static void undo_stream(arguments *a)
{
  CHECK_OK(cumoe_stream_destroy(a->context, *(cumoe_stream *)a->out));
}
static cumoe_status call_stream_destroy(arguments *a)
{
  return cumoe_stream_destroy(a->context, NULL);
}
static cumoe_status call_stream_query(arguments *a)
{
  return cumoe_stream_query(a->context, no_stream, a->out);
}
static cumoe_status call_stream_join(arguments *a)
{
  return cumoe_stream_join(a->context, no_stream, bench.stream);
}
static cumoe_status call_event_create(arguments *a)
{
  return cumoe_event_create(a->context, a->flags, a->out);
}
static void undo_event(arguments *a)
{
  CHECK_OK(cumoe_event_destroy(a->context, *(cumoe_event *)a->out));
}
static cumoe_status call_event_destroy(arguments *a)
{
  return cumoe_event_destroy(a->context, NULL);
}
static cumoe_status call_event_record(arguments *a)
{
  return cumoe_event_record(a->context, a->pointer, no_stream);
}
static cumoe_status call_event_wait(arguments *a)
{
  return cumoe_event_wait(a->context, a->pointer, no_stream);
}
static cumoe_status call_event_synchronize(arguments *a)
{
  return cumoe_event_synchronize(a->context, a->pointer);
}
static cumoe_status call_event_query(arguments *a)
{
  return cumoe_event_query(a->context, a->pointer, a->out);
}
static cumoe_status call_event_elapsed_from(arguments *a)
{
  return unless_cpu(cumoe_event_elapsed(a->context, a->pointer, bench.event, a->out));
}
static cumoe_status call_event_elapsed_to(arguments *a)
{
  return unless_cpu(cumoe_event_elapsed(a->context, bench.event, a->pointer, a->out));
}
#define CONTEXT_ROW                                                                                                    \
  {                                                                                                                    \
    "context", A_CONTEXT, AT(context)                                                                                  \
  }
static const argument stream_out_arguments[] = {CONTEXT_ROW, {"stream", A_NOT_NULL, AT(out)}};
static const argument progress_arguments[] = {CONTEXT_ROW, {"progress", A_NOT_NULL, AT(out)}};
static const argument event_create_arguments[] = {
    CONTEXT_ROW, {"event", A_NOT_NULL, AT(out)}, {"flags", A_FLAGS, AT(flags), .dtypes = 3}};
static const argument event_arguments[] = {CONTEXT_ROW, {"event", A_NOT_NULL, AT(pointer), .traits = CUDA_ONLY}};
static const argument event_query_arguments[] = {
    CONTEXT_ROW, {"event", A_NOT_NULL, AT(pointer), .traits = CUDA_ONLY}, {"progress", A_NOT_NULL, AT(out)}};
static const argument elapsed_from_arguments[] = {
    CONTEXT_ROW, {"first", A_NOT_NULL, AT(pointer), .traits = CUDA_ONLY}, {"milliseconds", A_NOT_NULL, AT(out)}};
static const argument elapsed_to_arguments[] = {
    CONTEXT_ROW, {"last", A_NOT_NULL, AT(pointer), .traits = CUDA_ONLY}, {"milliseconds", A_NOT_NULL, AT(out)}};

static void fill_graph(arguments *a)
{
  fill_context(a);
  a->pointer = bench.graph;
  a->host = bench.stream;
}
static cumoe_status call_graph_status(arguments *a)
{
  return cumoe_graph_status(a->context, bench.stream, a->out);
}
static cumoe_status call_graph_begin(arguments *a)
{
  return unless_cpu(cumoe_graph_begin(a->context, (cumoe_stream)(uintptr_t)a->host));
}
static void undo_graph_begin(arguments *a)
{
  cumoe_graph graph = NULL;
  CHECK_OK(unless_cpu(cumoe_graph_end(a->context, bench.stream, &graph)));
  CHECK_OK(cumoe_graph_destroy(a->context, graph));
}
static void fill_graph_end(arguments *a)
{
  fill_graph(a);
  CHECK_OK(unless_cpu(cumoe_graph_begin(a->context, bench.stream)));
}
static cumoe_status call_graph_end(arguments *a)
{
  return unless_cpu(cumoe_graph_end(a->context, (cumoe_stream)(uintptr_t)a->host, a->out));
}
static void undo_graph_end(arguments *a)
{
  CHECK_OK(cumoe_graph_destroy(a->context, *(cumoe_graph *)a->out));
}
static cumoe_status call_graph_launch(arguments *a)
{
  return unless_cpu(cumoe_graph_launch(a->context, a->pointer, no_stream));
}
static cumoe_status call_graph_upload(arguments *a)
{
  return unless_cpu(cumoe_graph_upload(a->context, a->pointer, no_stream));
}
static cumoe_status call_graph_destroy(arguments *a)
{
  return cumoe_graph_destroy(a->context, NULL);
}
static const argument capture_arguments[] = {CONTEXT_ROW, {"capture", A_NOT_NULL, AT(out)}};
static const argument graph_begin_arguments[] = {CONTEXT_ROW, {"stream", A_NOT_NULL, AT(host), .traits = CUDA_ONLY}};
static const argument graph_end_arguments[] = {
    CONTEXT_ROW, {"stream", A_NOT_NULL, AT(host), .traits = CUDA_ONLY}, {"graph", A_NOT_NULL, AT(out)}};
static const argument graph_arguments[] = {CONTEXT_ROW, {"graph", A_NOT_NULL, AT(pointer), .traits = CUDA_ONLY}};

/* cumoe/kernel.h */

static const char ptx_text[] = ".version 8.0\n.target sm_80\n.address_size 64\n";

static void fill_image(arguments *a)
{
  fill_context(a);
  a->host = ptx_text;
  a->bytes = sizeof ptx_text;
}
static cumoe_status call_module_load(arguments *a)
{
  return unless_cpu(cumoe_module_load(a->context, a->host, a->bytes, a->out));
}
static void undo_module(arguments *a)
{
  CHECK_OK(cumoe_module_unload(a->out));
}
static void fill_path(arguments *a)
{
  fill_context(a);
  a->host = "include/cumoe/kernel.h";
}
/* A file that is no device code: the answer says that it was read. */
static cumoe_status call_module_load_file(arguments *a)
{
  const cumoe_status status = cumoe_module_load_file(a->context, a->host, a->out);
  const bool read = status == CUMOE_ERR_INVALID_ARGUMENT && strstr(cumoe_last_error(), ": image: ") != NULL;
  return read ? CUMOE_OK : status;
}
static const char *const no_options[] = {"-lineinfo"};
static void fill_source(arguments *a)
{
  fill_context(a);
  a->host = "extern \"C\" __global__ void nothing() {}";
  a->pointer = (void *)(uintptr_t)no_options;
  a->index = 1;
}
/* A machine may do without NVRTC. */
static cumoe_status unless_missing(cumoe_status status)
{
  return status == CUMOE_ERR_LIBRARY_MISSING ? CUMOE_OK : unless_cpu(status);
}
static cumoe_status call_module_compile(arguments *a)
{
  return unless_missing(cumoe_module_compile(a->context, a->host, a->pointer, a->index, NULL, a->bytes, a->out));
}
static void fill_target(arguments *a)
{
  fill_source(a);
  a->info = (void *)(uintptr_t) "compute_80";
}
static cumoe_status call_compile(arguments *a)
{
  return unless_missing(cumoe_compile(a->host, a->info, a->pointer, a->index, NULL, a->bytes, a->out));
}
static void undo_compile(arguments *a)
{
  cumoe_image_free(a->out);
}
static const argument module_load_arguments[] = {
    CONTEXT_ROW, {"image", A_NOT_NULL, AT(host)}, {"module", A_NOT_NULL, AT(out)}};
static const argument module_load_file_arguments[] = {
    CONTEXT_ROW, {"path", A_NOT_NULL, AT(host)}, {"module", A_NOT_NULL, AT(out)}};
#define SOURCE_ROWS                                                                                                    \
  {"source", A_NOT_NULL, AT(host)}, {"options", A_NOT_NULL, AT(pointer)},                                              \
      {"option_count", A_INT, AT(index), .high = 256, .traits = LOOSE},                                                \
  {                                                                                                                    \
    "log", A_VALUE, AT(bytes), .low = 1                                                                                \
  }
static const argument module_compile_arguments[] = {CONTEXT_ROW, SOURCE_ROWS, {"module", A_NOT_NULL, AT(out)}};
static const argument compile_arguments[] = {
    SOURCE_ROWS, {"target", A_NOT_NULL, AT(info)}, {"image", A_NOT_NULL, AT(out)}};

static void fill_module(arguments *a)
{
  fill_context(a);
  a->object = bench.module.id;
  a->host = "add";
  a->dtype = CUMOE_F32;
  a->flags = 1024;
}
static cumoe_status call_module_unload(arguments *a)
{
  cumoe_module none = {0}, module = {a->object};
  return cumoe_module_unload(a->out == NULL ? NULL : a->object == bench.module.id ? &none : &module);
}
static cumoe_status call_module_function(arguments *a)
{
  return cumoe_module_function((cumoe_module){a->object}, a->host, a->flags, a->out);
}
static void fill_global(arguments *a)
{
  fill_module(a);
  a->host = "counter";
}
static cumoe_status call_module_global(arguments *a)
{
  return cumoe_module_global((cumoe_module){a->object}, a->host, (cumoe_dtype)a->dtype, a->out);
}
static void fill_function(arguments *a)
{
  fill_context(a);
  a->object = bench.function.id;
  a->function_info.size = sizeof a->function_info;
  a->info = &a->function_info;
}
static cumoe_status call_function_info(arguments *a)
{
  return cumoe_function_get_info((cumoe_function){a->object}, a->info);
}
static cumoe_status call_function_block(arguments *a)
{
  return cumoe_function_block((cumoe_function){a->object}, 0, a->out);
}
static void fill_launch(arguments *a)
{
  fill_function(a);
  a->launch = cumoe_launch_elements(1000, no_stream);
  a->occupancy.size = sizeof a->occupancy;
  a->info = &a->launch;
  a->index = 4;
}
static cumoe_status call_launch_kernel(arguments *a)
{
  static cumoe_arg list[4];
  for (int i = 0; i < 3; i++) list[i] = cumoe_arg_view(cumoe_buffer_view(bench.buffer));
  list[3] = cumoe_arg_i32(1000);
  return cumoe_launch_kernel((cumoe_function){a->object}, a->info, a->out == NULL ? NULL : list, a->index);
}
static cumoe_status call_function_occupancy(arguments *a)
{
  return cumoe_function_occupancy((cumoe_function){a->object}, a->info, a->out == NULL ? NULL : &a->occupancy);
}
#define MODULE_ROW                                                                                                     \
  {                                                                                                                    \
    "module", A_OBJECT, AT(object)                                                                                     \
  }
#define FUNCTION_ROW                                                                                                   \
  {                                                                                                                    \
    "function", A_OBJECT, AT(object)                                                                                   \
  }
static const argument module_unload_arguments[] = {{"module", A_OBJECT, AT(object), .traits = OPTIONAL},
                                                   {"module", A_NOT_NULL, AT(out)}};
static const argument module_function_arguments[] = {
    MODULE_ROW, {"name", A_NOT_NULL, AT(host)}, {"function", A_NOT_NULL, AT(out)}};
static const argument module_global_arguments[] = {MODULE_ROW,
                                                   {"name", A_NOT_NULL, AT(host)},
                                                   {"dtype", A_DTYPE, AT(dtype), .dtypes = ALL_TYPES},
                                                   {"global", A_NOT_NULL, AT(out)}};
static const argument function_info_arguments[] = {
    FUNCTION_ROW, {"info", A_NOT_NULL, AT(info)}, {"info.size", A_SIZE, AT(function_info.size)}};
static const argument function_block_arguments[] = {FUNCTION_ROW, {"threads", A_NOT_NULL, AT(out)}};
#define LAUNCH_ROWS                                                                                                    \
  FUNCTION_ROW, {"launch", A_NOT_NULL, AT(info)}, {"launch.size", A_SIZE, AT(launch.size)},                            \
      {"launch.flags", A_FLAGS, AT(launch.flags), .dtypes = 3},                                                        \
      {"launch.block[0]", A_INT, AT(launch.block[0]), .low = 1, .high = 1024},                                         \
      {"launch.block", A_INT, AT(launch.block[1]), .low = 0, .high = 4},                                               \
      {"launch.block", A_INT, AT(launch.block[2]), .low = 0, .high = 4},                                               \
      {"launch.cluster", A_INT, AT(launch.cluster[0]), .low = 0, .high = 8},                                           \
      {"launch.cluster", A_INT, AT(launch.cluster[2]), .low = 0, .high = 8},                                           \
  {                                                                                                                    \
    "launch.dynamic_smem", A_INT, AT(launch.dynamic_smem), .low = 0, .high = 48 * 1024                                 \
  }
static const argument launch_arguments[] = {LAUNCH_ROWS,
                                            {"launch.grid[0]", A_INT, AT(launch.grid[0]), .high = INT32_MAX},
                                            {"launch.grid[1]", A_INT, AT(launch.grid[1]), .low = 1, .high = 65535},
                                            {"launch.grid[2]", A_INT, AT(launch.grid[2]), .low = 1, .high = 65535},
                                            {"arg_count", A_INT, AT(index), .low = 4, .high = 4},
                                            {"args", A_NOT_NULL, AT(out)}};
static const argument occupancy_arguments[] = {
    LAUNCH_ROWS, {"occupancy", A_NOT_NULL, AT(out)}, {"occupancy.size", A_SIZE, AT(occupancy.size)}};

/* cumoe/ops.h */

static void fill_elementwise(arguments *a)
{
  fill_context(a);
  for (int i = 0; i < 3; i++) a->v[i] = give(CUMOE_BF16, TOKENS, HIDDEN);
}
static cumoe_status call_add(arguments *a)
{
  return cumoe_add(a->context, a->v[0], a->v[1], mut(a->v[2]), no_stream);
}
static cumoe_status call_mul(arguments *a)
{
  return cumoe_mul(a->context, a->v[0], a->v[1], mut(a->v[2]), no_stream);
}
static cumoe_status call_scale(arguments *a)
{
  return cumoe_scale(a->context, a->number, a->v[0], mut(a->v[2]), no_stream);
}
static cumoe_status call_relu(arguments *a)
{
  return cumoe_relu(a->context, a->v[0], mut(a->v[2]), no_stream);
}
static cumoe_status call_sigmoid(arguments *a)
{
  return cumoe_sigmoid(a->context, a->v[0], mut(a->v[2]), no_stream);
}
static cumoe_status call_silu(arguments *a)
{
  return cumoe_silu(a->context, a->v[0], mut(a->v[2]), no_stream);
}
static cumoe_status call_gelu(arguments *a)
{
  return cumoe_gelu(a->context, a->v[0], mut(a->v[2]), no_stream);
}
static cumoe_status call_gelu_tanh(arguments *a)
{
  return cumoe_gelu_tanh(a->context, a->v[0], mut(a->v[2]), no_stream);
}
static cumoe_status call_softmax(arguments *a)
{
  return cumoe_softmax(a->context, a->v[0], mut(a->v[2]), no_stream);
}
static const argument binary_arguments[] = {{"context", A_CONTEXT, AT(context)},
                                            {"a", A_VIEW, AT(v[0]), .dtypes = FLOATS, .traits = LOOSE},
                                            {"b", A_VIEW, AT(v[1]), .dtypes = BIT(BF16)},
                                            {"y", A_VIEW, AT(v[2]), .dtypes = BIT(BF16)}};
static const argument unary_arguments[] = {{"context", A_CONTEXT, AT(context)},
                                           {"x", A_VIEW, AT(v[0]), .dtypes = FLOATS, .traits = LOOSE},
                                           {"y", A_VIEW, AT(v[2]), .dtypes = BIT(BF16)}};

static void fill_norm(arguments *a)
{
  fill_elementwise(a);
  a->v[3] = give(CUMOE_F32, 1, HIDDEN);
  a->v[4] = give(CUMOE_BF16, 1, HIDDEN);
  a->number = 1e-5f;
}
static cumoe_status call_layernorm(arguments *a)
{
  return cumoe_layernorm(a->context, a->v[0], a->v[3], a->v[4], a->number, mut(a->v[2]), no_stream);
}
static cumoe_status call_rmsnorm(arguments *a)
{
  return cumoe_rmsnorm(a->context, a->v[0], a->v[3], a->number, mut(a->v[2]), no_stream);
}
#define NORM_FIELDS                                                                                                    \
  {"context", A_CONTEXT, AT(context)}, {"x", A_VIEW, AT(v[0]), .dtypes = FLOATS, .traits = LOOSE},                     \
      {"y", A_VIEW, AT(v[2]), .dtypes = BIT(BF16)}, {"eps", A_FLOAT, AT(number)},                                      \
      {"weight", A_VIEW, AT(v[3]), .dtypes = BIT(F32) | BIT(BF16), .traits = OPTIONAL},                                \
  {                                                                                                                    \
    "overlaps weight", A_OVERLAP, AT(v[2]), WITH(v[3])                                                                 \
  }
static const argument rmsnorm_arguments[] = {NORM_FIELDS};
static const argument layernorm_arguments[] = {
    NORM_FIELDS,
    {"bias", A_VIEW, AT(v[4]), .dtypes = BIT(F32) | BIT(BF16), .traits = OPTIONAL},
    {"overlaps bias", A_OVERLAP, AT(v[2]), WITH(v[4])},
};

static void fill_matmul(arguments *a)
{
  size_t bytes = 0;
  fill_context(a);
  CHECK_OK(cumoe_matmul_workspace(a->context, &bytes));
  a->matmul = (cumoe_matmul_args){.size = sizeof a->matmul, .flags = CUMOE_MATMUL_TRANSPOSE_B, .batch = 2};
  a->matmul.a = give(CUMOE_BF16, TOKENS, HIDDEN); /* of both products */
  a->matmul.b = give(CUMOE_BF16, 2 * INTER, HIDDEN);
  a->matmul.b.rows = INTER;
  a->matmul.b_stride = INTER * HIDDEN;
  a->matmul.c = give_mut(CUMOE_F32, 2 * TOKENS, INTER);
  a->matmul.c.rows = TOKENS;
  a->matmul.c_stride = TOKENS * INTER;
  a->matmul.workspace = give_mut(CUMOE_U8, 1, (int64_t)bytes);
  a->info = &a->matmul;
}
/* cuBLAS does not run on the shim: there, what is right ends at the checks. */
static cumoe_status call_matmul(arguments *a)
{
  const bool same = a->context == bench.context && a->info && !memcmp(&a->matmul, &right.matmul, sizeof a->matmul);
  return same && !bench.cpu ? CUMOE_OK : cumoe_matmul(a->context, a->info, no_stream);
}
static cumoe_status call_matmul_workspace(arguments *a)
{
  return cumoe_matmul_workspace(a->context, a->out);
}
static cumoe_status call_matmul_prepare(arguments *a)
{
  return a->context == bench.context && !bench.cpu ? CUMOE_OK : cumoe_matmul_prepare(a->context);
}
static const argument matmul_arguments[] = {
    {"context", A_CONTEXT, AT(context)},
    {"args", A_NOT_NULL, AT(info)},
    {"args.size", A_SIZE, AT(matmul.size)},
    {"args.flags", A_FLAGS, AT(matmul.flags), .dtypes = 7},
    {"args.batch", A_VALUE, AT(matmul.batch), .low = -1},
    {"args.batch", A_VALUE, AT(matmul.batch), .low = INT64_MIN},
    {"", A_VALUE, AT(matmul.batch), .low = INT64_MAX},
    {"args.a_stride", A_VALUE, AT(matmul.a_stride), .low = -1},
    {"args.b_stride", A_VALUE, AT(matmul.b_stride), .low = INT64_MIN},
    {"args.b_stride", A_VALUE, AT(matmul.b_stride), .low = INT64_MAX},
    {"args.c_stride", A_VALUE, AT(matmul.c_stride), .low = -1},
    {"args.c_stride", A_VALUE, AT(matmul.c_stride), .low = 0},
    {"args.c_stride", A_VALUE, AT(matmul.c_stride), .low = TOKENS * INTER - 1},
    {"args.a", A_VIEW, AT(matmul.a), .dtypes = FLOATS, .traits = LOOSE},
    {"args.b", A_VIEW, AT(matmul.b), .dtypes = BIT(BF16), .traits = LOOSE},
    {"args.c", A_VIEW, AT(matmul.c), .dtypes = BIT(BF16) | BIT(F32), .traits = LOOSE},
    {"args.c overlaps args.a", A_OVERLAP, AT(matmul.c), WITH(matmul.a)},
    {"args.c overlaps args.b", A_OVERLAP, AT(matmul.c), WITH(matmul.b)},
};
static const argument matmul_workspace_arguments[] = {{"context", A_CONTEXT, AT(context)},
                                                      {"bytes", A_NOT_NULL, AT(out)}};

#define FORM(name_, title_, fill_, call_, table, undo_)                                                                \
  {                                                                                                                    \
#name_, title_, fill_, call_, table, (int)(sizeof table / sizeof table[0]), undo_, false                           \
  }
#define ON_CUDA(name_, fill_, call_, table)                                                                            \
  {                                                                                                                    \
    .name = #name_, .title = "", .fill = fill_, .call = call_, .arguments = table,                                     \
    .count = (int)(sizeof table / sizeof table[0]), .cuda_only = true                                                  \
  }
static const function functions[] = {
    FORM(cumoe_context_create, "", fill_create, call_create, create_arguments, undo_create),
    FORM(cumoe_context_destroy, "", fill_context, call_destroy, destroy_arguments, NULL),
    FORM(cumoe_context_info, "", fill_context, call_info, info_arguments, NULL),
    FORM(cumoe_synchronize, "", fill_context, call_synchronize, context_arguments, NULL),
    FORM(cumoe_fault_read, "", fill_fault, call_fault_read, fault_read_arguments, NULL),
    FORM(cumoe_fault_clear, "", fill_context, call_fault_clear, context_arguments, NULL),
    FORM(cumoe_buffer_alloc, "", fill_alloc, call_alloc, alloc_arguments, undo_alloc),
    FORM(cumoe_buffer_adopt, "", fill_adopt, call_adopt, adopt_arguments, undo_alloc),
    FORM(cumoe_buffer_free, "", fill_handle, call_free, free_arguments, NULL),
    FORM(cumoe_buffer_release, "", fill_handle, call_release, release_arguments, NULL),
    FORM(cumoe_buffer_get_info, "", fill_handle, call_get_info, get_info_arguments, NULL),
    FORM(cumoe_view_rows, "", fill_slice, call_rows, rows_arguments, NULL),
    FORM(cumoe_view_cols, "", fill_slice, call_cols, cols_arguments, NULL),
    FORM(cumoe_view_rows_mut, "", fill_slice, call_rows_mut, rows_arguments, NULL),
    FORM(cumoe_view_cols_mut, "", fill_slice, call_cols_mut, cols_arguments, NULL),
    FORM(cumoe_copy_from_host, "", fill_copy, call_from_host, from_host_arguments, NULL),
    FORM(cumoe_copy_to_host, "", fill_copy, call_to_host, to_host_arguments, NULL),
    FORM(cumoe_copy, "", fill_copy, call_copy, copy_arguments, NULL),
    FORM(cumoe_fill, "", fill_copy, call_fill, fill_arguments, NULL),
    FORM(cumoe_buffer_alloc_with, "", fill_alloc, call_alloc_with, alloc_with_arguments, undo_alloc),
    FORM(cumoe_buffer_retain, "", fill_handle, call_retain, retain_arguments, undo_alloc),
    FORM(cumoe_buffer_record_use, "", fill_handle, call_record_use, record_use_arguments, NULL),
    FORM(cumoe_view_split, "", fill_split, call_split, split_arguments, NULL),
    FORM(cumoe_view_split_mut, "", fill_split, call_split_mut, split_arguments, NULL),
    FORM(cumoe_view_cast, "", fill_cast, call_cast, cast_arguments, NULL),
    FORM(cumoe_view_cast_mut, "", fill_cast, call_cast_mut, cast_arguments, NULL),
    FORM(cumoe_fill_value, "", fill_copy, call_fill_value, fill_value_arguments, NULL),
    FORM(cumoe_copy_between, "", fill_between, call_between, between_arguments, NULL),
    FORM(cumoe_pinned_alloc, "", fill_pinned, call_pinned_alloc, pinned_alloc_arguments, undo_pinned),
    FORM(cumoe_pinned_free, "", fill_context, call_pinned_free, pinned_free_arguments, NULL),
    FORM(cumoe_pool_get_stats, "", fill_stats, call_stats, stats_arguments, NULL),
    FORM(cumoe_pool_reset_highs, "", fill_context, call_reset_highs, context_arguments, NULL),
    FORM(cumoe_pool_trim, "", fill_context, call_trim, context_arguments, NULL),
    FORM(cumoe_pool_allow_peer, "", fill_context, call_allow_peer, allow_peer_arguments, NULL),
    FORM(cumoe_debug_check, "", fill_check, call_check, check_arguments, NULL),
    FORM(cumoe_moe_supports, "", fill_desc, call_supports, supports_arguments, NULL),
    FORM(cumoe_plan_create, "", fill_desc, call_plan_create, plan_create_arguments, undo_plan),
    FORM(cumoe_plan_destroy, "", fill_plan, call_plan_destroy, plan_destroy_arguments, NULL),
    FORM(cumoe_plan_workspace, "", fill_plan, call_plan_workspace, workspace_arguments, NULL),
    FORM(cumoe_weights_bind, "strided", fill_bind, call_bind, bind_arguments, undo_bind),
    FORM(cumoe_weights_bind, "pointers", fill_bind_separate, call_bind, bind_separate_arguments, undo_bind),
    FORM(cumoe_weights_destroy, "", fill_weights, call_weights_destroy, weights_destroy_arguments, NULL),
    FORM(cumoe_moe_forward, "ids", fill_forward_ids, call_forward, forward_ids_arguments, NULL),
    FORM(cumoe_moe_forward, "logits", fill_forward_logits, call_forward, forward_logits_arguments, NULL),
    FORM(cumoe_moe_forward, "router", fill_forward_router, call_forward, forward_router_arguments, NULL),
    FORM(cumoe_router, "", fill_router, call_router, router_arguments, NULL),
    FORM(cumoe_gate, "", fill_gate, call_gate, gate_arguments, NULL),
    FORM(cumoe_map, "", fill_map, call_map, map_arguments, NULL),
    FORM(cumoe_map, "chunks", fill_long_map, call_map, long_map_arguments, NULL),
    FORM(cumoe_map_workspace, "", fill_plan, call_map_workspace, workspace_arguments, NULL),
    FORM(cumoe_up, "", fill_up, call_up, up_arguments, NULL),
    FORM(cumoe_up, "weighing", fill_weighing_up, call_up, weighing_up_arguments, NULL),
    FORM(cumoe_permute, "", fill_permute, call_permute, permute_arguments, NULL),
    FORM(cumoe_up_permuted, "", fill_up_permuted, call_up_permuted, up_permuted_arguments, NULL),
    FORM(cumoe_down, "", fill_down, call_down, down_arguments, NULL),
    FORM(cumoe_combine, "", fill_combine, call_combine, combine_arguments, NULL),
    FORM(cumoe_add, "", fill_elementwise, call_add, binary_arguments, NULL),
    FORM(cumoe_mul, "", fill_elementwise, call_mul, binary_arguments, NULL),
    FORM(cumoe_scale, "", fill_elementwise, call_scale, unary_arguments, NULL),
    FORM(cumoe_relu, "", fill_elementwise, call_relu, unary_arguments, NULL),
    FORM(cumoe_sigmoid, "", fill_elementwise, call_sigmoid, unary_arguments, NULL),
    FORM(cumoe_silu, "", fill_elementwise, call_silu, unary_arguments, NULL),
    FORM(cumoe_gelu, "", fill_elementwise, call_gelu, unary_arguments, NULL),
    FORM(cumoe_gelu_tanh, "", fill_elementwise, call_gelu_tanh, unary_arguments, NULL),
    FORM(cumoe_softmax, "", fill_elementwise, call_softmax, unary_arguments, NULL),
    FORM(cumoe_layernorm, "", fill_norm, call_layernorm, layernorm_arguments, NULL),
    FORM(cumoe_rmsnorm, "", fill_norm, call_rmsnorm, rmsnorm_arguments, NULL),
    FORM(cumoe_matmul, "", fill_matmul, call_matmul, matmul_arguments, NULL),
    FORM(cumoe_matmul_workspace, "", fill_context, call_matmul_workspace, matmul_workspace_arguments, NULL),
    FORM(cumoe_matmul_prepare, "", fill_context, call_matmul_prepare, context_arguments, NULL),
    FORM(cumoe_variant_get, "", fill_variant, call_variant_get, variant_get_arguments, NULL),
    FORM(cumoe_variant_force, "", fill_variant, call_variant_force, variant_force_arguments, undo_force),
    FORM(cumoe_stream_create, "", fill_stream, call_stream_create, stream_out_arguments, undo_stream),
    FORM(cumoe_stream_destroy, "", fill_stream, call_stream_destroy, context_arguments, NULL),
    FORM(cumoe_stream_query, "", fill_stream, call_stream_query, progress_arguments, NULL),
    FORM(cumoe_stream_join, "", fill_stream, call_stream_join, context_arguments, NULL),
    FORM(cumoe_event_create, "", fill_stream, call_event_create, event_create_arguments, undo_event),
    FORM(cumoe_event_destroy, "", fill_stream, call_event_destroy, context_arguments, NULL),
    FORM(cumoe_event_record, "", fill_stream, call_event_record, event_arguments, NULL),
    FORM(cumoe_event_wait, "", fill_stream, call_event_wait, event_arguments, NULL),
    FORM(cumoe_event_synchronize, "", fill_stream, call_event_synchronize, event_arguments, NULL),
    FORM(cumoe_event_query, "", fill_stream, call_event_query, event_query_arguments, NULL),
    FORM(cumoe_event_elapsed, "from", fill_stream, call_event_elapsed_from, elapsed_from_arguments, NULL),
    FORM(cumoe_event_elapsed, "to", fill_stream, call_event_elapsed_to, elapsed_to_arguments, NULL),
    FORM(cumoe_graph_status, "", fill_graph, call_graph_status, capture_arguments, NULL),
    FORM(cumoe_graph_begin, "", fill_graph, call_graph_begin, graph_begin_arguments, undo_graph_begin),
    FORM(cumoe_graph_end, "", fill_graph_end, call_graph_end, graph_end_arguments, undo_graph_end),
    FORM(cumoe_graph_launch, "", fill_graph, call_graph_launch, graph_arguments, NULL),
    FORM(cumoe_graph_upload, "", fill_graph, call_graph_upload, graph_arguments, NULL),
    FORM(cumoe_graph_destroy, "", fill_graph, call_graph_destroy, context_arguments, NULL),
    FORM(cumoe_module_load, "", fill_image, call_module_load, module_load_arguments, undo_module),
    FORM(cumoe_module_load_file, "", fill_path, call_module_load_file, module_load_file_arguments, NULL),
    FORM(cumoe_module_compile, "", fill_source, call_module_compile, module_compile_arguments, undo_module),
    FORM(cumoe_compile, "", fill_target, call_compile, compile_arguments, undo_compile),
    FORM(cumoe_module_unload, "", fill_module, call_module_unload, module_unload_arguments, NULL),
    ON_CUDA(cumoe_module_function, fill_module, call_module_function, module_function_arguments),
    ON_CUDA(cumoe_module_global, fill_global, call_module_global, module_global_arguments),
    ON_CUDA(cumoe_function_get_info, fill_function, call_function_info, function_info_arguments),
    ON_CUDA(cumoe_function_block, fill_function, call_function_block, function_block_arguments),
    ON_CUDA(cumoe_function_occupancy, fill_launch, call_function_occupancy, occupancy_arguments),
    ON_CUDA(cumoe_launch_kernel, fill_launch, call_launch_kernel, launch_arguments),
};
enum { FUNCTIONS = sizeof functions / sizeof functions[0] };

/* Functions without a row above, and why. */
static const char *const exempt[] = {
    /* cannot fail, whatever they are given: test/base.c */
    "cumoe_status_name", "cumoe_status_text", "cumoe_last_error", "cumoe_version", "cumoe_architectures",
    "cumoe_set_log", "cumoe_dtype_bytes", "cumoe_dtype_name", "cumoe_variant_count", "cumoe_image_free",
    /* answer with a value: no_status() below */
    "cumoe_buffer_view", "cumoe_buffer_view_mut", "cumoe_buffer_live", "cumoe_fault_pending", "cumoe_debug_live",
    /* what macros call that have a row */
    "cumoe_buffer_alloc_at", "cumoe_buffer_alloc_with_at", "cumoe_pinned_alloc_at"};

/* ---- ways to be wrong ------------------------------------------------------------------------------------ */

static const function *now;

/* One wrong call. says: what the text has in it; "" for anything. */
static void expect(arguments *a, cumoe_status want, const char *says, const char *format, long long value)
{
  char what[80], begin[80];
  arguments before;
  snprintf(what, sizeof what, format, value);
  snprintf(begin, sizeof begin, "%s: ", now->name);
  case_begin("%s %s", says, what);
  memcpy(&before, a, sizeof before);
  memcpy(arena_before, arena, sizeof arena);
  memset(&results, POISON, sizeof results);
  const int64_t heap = shim_heap();
  shim_mark();
  const cumoe_status got = now->call(a);
  CHECK_MSG(got == want, "status %s, want %s: %s", cumoe_status_name(got), cumoe_status_name(want), cumoe_last_error());
  CHECK_MSG(got == CUMOE_OK || (strncmp(cumoe_last_error(), begin, strlen(begin)) == 0 &&
                                strstr(cumoe_last_error() + strlen(begin), says) != NULL),
            "the text is \"%s\"", cumoe_last_error());
  CHECK_MSG(shim_calls(SHIM_ALL) == 0, "CUDA was called: %s", shim_trace());
  CHECK_MSG(shim_heap() == heap, "memory was taken or freed");
  CHECK_MSG(memcmp(&before, a, sizeof before) == 0, "an argument was changed");
  CHECK_MSG(memcmp(arena, arena_before, sizeof arena) == 0, "memory was written");
  for (size_t i = 0; i < sizeof results; i++)
    if (results.bytes[i] != POISON && results.bytes[i] != 0) CHECK_MSG(false, "a result was written");
  case_end();
}

/* Pointers into `right` become pointers into its copy. */
static void rebase(arguments *a)
{
  void **const inner[] = {&a->pointer, &a->info, (void **)(void *)&a->buffer, (void **)(void *)&a->config.allocator};
  const uintptr_t begin = (uintptr_t)&right;
  for (int i = 0; i < 4; i++) {
    const uintptr_t at = (uintptr_t)*inner[i];
    if (at >= begin && at < begin + sizeof right) *inner[i] = (char *)a + (at - begin);
  }
}

static void wrong_value(size_t at, const void *value, size_t bytes, cumoe_status want, const char *says,
                        const char *how)
{
  arguments wrong;
  int64_t number = 0;
  memcpy(&wrong, &right, sizeof wrong);
  rebase(&wrong);
  memcpy((char *)&wrong + at, value, bytes);
  memcpy(&number, value, bytes < 8 ? bytes : 8);
  expect(&wrong, want, says, how, bytes == 4 ? (long long)(int32_t)number : (long long)number);
}

#define WRONG(type, at, value, want, says, how)                                                                        \
  do {                                                                                                                 \
    const type value_ = (value);                                                                                       \
    wrong_value((at), &value_, sizeof value_, (want), (says), (how));                                                  \
  } while (0)

static void wrong_views(const argument *f)
{
  const cumoe_view v = *(cumoe_view *)(void *)((char *)&right + f->at);
  const int64_t element = (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  const uint32_t align = f->align > element ? f->align : (uint32_t)element;
  const char *loose = f->traits & LOOSE ? "" : f->name;
  const size_t at = f->at;
#define WRONG_VIEW(member, value, status_, says)                                                                       \
  WRONG(__typeof__(v.member), at + offsetof(cumoe_view, member), value, status_, says, #member " %lld")
  if (v.data) WRONG_VIEW(data, NULL, v.owner ? CUMOE_ERR_OUT_OF_BOUNDS : CUMOE_ERR_INVALID_ARGUMENT, f->name);
  for (uint32_t by = 1; v.data && v.owner == 0 && by < align; by *= 2)
    WRONG_VIEW(data, (const char *)v.data + by, CUMOE_ERR_MISALIGNED, f->name);
  const int64_t lengths[] = {-1, INT64_MIN, INT64_MAX};
  for (int i = 0; i < 3; i++) {
    const cumoe_status past = i == 2 && v.owner ? CUMOE_ERR_OUT_OF_BOUNDS : CUMOE_ERR_INVALID_ARGUMENT;
    WRONG_VIEW(rows, lengths[i], past, loose);
    WRONG_VIEW(cols, lengths[i], i < 2 && f->status ? f->status : CUMOE_ERR_INVALID_ARGUMENT, loose);
    WRONG_VIEW(ld, lengths[i], past, f->name);
  }
  if (!(f->traits & FREE_ROWS)) {
    const cumoe_status wrong = v.owner ? CUMOE_ERR_OUT_OF_BOUNDS : CUMOE_ERR_INVALID_ARGUMENT;
    if (!v.owner) WRONG_VIEW(rows, v.rows + 1, CUMOE_ERR_INVALID_ARGUMENT, loose);
    if (!v.owner) WRONG_VIEW(rows, v.rows - 1, CUMOE_ERR_INVALID_ARGUMENT, loose);
    if (v.owner) WRONG_VIEW(rows, v.rows + 5, wrong, loose);
  }
  if (!(f->traits & FREE_COLS) && !v.owner) {
    WRONG_VIEW(cols, v.cols + 1, CUMOE_ERR_INVALID_ARGUMENT, loose);
    WRONG_VIEW(cols, v.cols - 1, CUMOE_ERR_INVALID_ARGUMENT, loose);
  }
  WRONG_VIEW(ld, v.cols - 1, CUMOE_ERR_INVALID_ARGUMENT, f->name);
  if (v.rows > 1)
    WRONG_VIEW(ld, INT64_MAX / v.rows, v.owner ? CUMOE_ERR_OUT_OF_BOUNDS : CUMOE_ERR_INVALID_ARGUMENT, f->name);
  if (v.rows > 1)
    WRONG_VIEW(ld, (int64_t)1 << 60, v.owner ? CUMOE_ERR_OUT_OF_BOUNDS : CUMOE_ERR_INVALID_ARGUMENT, f->name);
  if (v.rows > 1 && align > element) WRONG_VIEW(ld, v.ld + 1, CUMOE_ERR_MISALIGNED, f->name);
  const int32_t types[] = {-1, 0, 1, 2, 3, 4, 5, 6, 7, 31, 32, 33, 99, INT32_MIN, INT32_MAX};
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
    if (types[i] < 0 || types[i] > 31 || !(f->dtypes >> types[i] & 1))
      WRONG_VIEW(dtype, types[i], CUMOE_ERR_WRONG_DTYPE, f->name);
  const int32_t devices[] = {0, 2, 99, -4, CUMOE_DEVICE_AUTO, bench.cpu ? 1 : CUMOE_DEVICE_CPU, INT32_MIN};
  for (int i = 0; i < 7; i++) WRONG_VIEW(device, devices[i], CUMOE_ERR_WRONG_DEVICE, f->name);
  WRONG_VIEW(owner, bench.freed.id, CUMOE_ERR_STALE_HANDLE, f->name);
  WRONG_VIEW(owner, bench.buffer.id + ((uint64_t)4096 << 32), CUMOE_ERR_STALE_HANDLE, f->name);
  WRONG_VIEW(owner, UINT64_MAX, CUMOE_ERR_STALE_HANDLE, f->name);
  WRONG_VIEW(owner, bench.foreign.id, CUMOE_ERR_WRONG_DEVICE, f->name);
  if (v.data) WRONG_VIEW(owner, bench.tiny.id, CUMOE_ERR_OUT_OF_BOUNDS, f->name);
}

/* A view of a buffer that is one byte too short. */
static void short_view(const argument *f)
{
  cumoe_view v = *(cumoe_view *)(void *)((char *)&right + f->at);
  const int64_t bytes = ((v.rows - 1) * v.ld + v.cols) * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  cumoe_buffer small = {0};
  if (v.data == NULL || bytes < 2) return;
  CHECK_OK(cumoe_buffer_alloc(bench.context, CUMOE_U8, 1, bytes - 1, no_stream, &small));
  v.data = cumoe_buffer_view(small).data;
  v.owner = small.id;
  WRONG(cumoe_view, f->at, v, CUMOE_ERR_OUT_OF_BOUNDS, f->name, "one byte short");
  CHECK_OK(cumoe_buffer_free(&small));
}

/* Values outside low .. high, or between steps. */
static int list_numbers(const argument *f, int64_t least, int64_t most, int64_t *list)
{
  const int64_t tries[] = {
      f->low > least ? f->low - 1 : 0, f->high < most ? f->high + 1 : 0,          least, most, -1, 0,
      f->step > 1 ? f->low + 1 : 0,    f->step > 1 ? most / f->step * f->step : 0};
  int count = 0;
  for (int i = 0; i < 8; i++) {
    const int64_t n = tries[i];
    bool new = n < f->low || n > f->high || (f->step > 1 && n % f->step != 0);
    for (int j = 0; j < count; j++) new = new &&list[j] != n;
    if (new) list[count++] = n;
  }
  return count;
}

static cumoe_status status_of(const argument *f)
{
  return f->status != CUMOE_OK ? f->status : CUMOE_ERR_INVALID_ARGUMENT;
}

static void wrong_numbers(const argument *f)
{
  int64_t list[8];
  const char *says = f->traits & LOOSE ? "" : f->name;
  if (f->kind == A_INT) {
    const int count = list_numbers(f, INT32_MIN, INT32_MAX, list);
    for (int i = 0; i < count; i++) WRONG(int32_t, f->at, (int32_t)list[i], status_of(f), says, "%lld");
    return;
  }
  const int count = list_numbers(f, INT64_MIN, INT64_MAX, list);
  for (int i = 0; i < count; i++)
    if (f->status != CUMOE_ERR_WORKSPACE) WRONG(int64_t, f->at, list[i], status_of(f), says, "%lld");
  if (f->status == CUMOE_ERR_WORKSPACE) { /* one byte short; ld as before is legal */
    const int64_t cols = *(int64_t *)(void *)((char *)&right + f->at);
    WRONG(int64_t, f->at, cols - 1, CUMOE_ERR_WORKSPACE, f->name, "%lld");
    WRONG(int64_t, f->at, 1, CUMOE_ERR_WORKSPACE, f->name, "%lld");
  }
}

static void wrong_sizes(const argument *f)
{
  const uint32_t sizes[] = {0, 1, 7, 4097, 1u << 31, UINT32_MAX};
  for (int i = 0; i < 6; i++) WRONG(uint32_t, f->at, sizes[i], CUMOE_ERR_INVALID_ARGUMENT, f->name, "%lld");
}

static void wrong_objects(const argument *f)
{
  if (!(f->traits & OPTIONAL)) WRONG(void *, f->at, NULL, CUMOE_ERR_INVALID_ARGUMENT, f->name, "null");
  WRONG(void *, f->at, (void *)dead, CUMOE_ERR_STALE_HANDLE, f->name, "destroyed");
  if (f->traits & FOREIGN)
    WRONG(void *, f->at, (void *)bench.foreign_plan, CUMOE_ERR_WRONG_DEVICE, "", "of another device");
  if (f->kind == A_WEIGHTS && !(f->traits & OPTIONAL))
    WRONG(void *, f->at, (void *)bench.foreign_weights, CUMOE_ERR_WRONG_DEVICE, f->name, "of another device");
}

static void wrong_handles(const argument *f)
{
  const uint64_t live = bench.buffer.id;
  const uint64_t ids[] = {
      bench.freed.id, live + ((uint64_t)1 << 32), live + ((uint64_t)4096 << 32), UINT64_MAX, 1, (uint64_t)1 << 32,
      0xffffffff};
  for (int i = 0; i < 7; i++) WRONG(uint64_t, f->at, ids[i], CUMOE_ERR_STALE_HANDLE, f->name, "handle %llx");
}

static void wrong_modules(const argument *f)
{
  const uint64_t live = right.object;
  const uint64_t ids[] = {live + ((uint64_t)1 << 32),
                          live + ((uint64_t)4096 << 32),
                          live + 1000,
                          UINT64_MAX,
                          1,
                          (uint64_t)1 << 32,
                          0xffffffff,
                          0};
  for (int i = 0; i < (f->traits & OPTIONAL ? 7 : 8); i++)
    WRONG(uint64_t, f->at, ids[i], CUMOE_ERR_STALE_HANDLE, f->name, "handle %llx");
}

static void wrong_bytes(const argument *f)
{
  const size_t n = right.bytes, list[] = {0, n - 1, n + 1, n / 2, n * 2, SIZE_MAX};
  for (int i = 0; i < 6; i++) WRONG(size_t, f->at, list[i], status_of(f), f->name, "%lld");
}

static void wrong_flags(const argument *f)
{
  const uint32_t set = *(uint32_t *)(void *)((char *)&right + f->at);
  for (int b = 0; b < 32; b++)
    if (!(f->dtypes >> b & 1)) WRONG(uint32_t, f->at, set | 1u << b, CUMOE_ERR_INVALID_ARGUMENT, f->name, "%llx");
}

static void wrong_floats(const argument *f)
{
  const float list[] = {-1, -1e-30f, -3e38f, -__builtin_inff(), __builtin_nanf(""), -__builtin_nanf("")};
  for (int i = 0; i < 6; i++) WRONG(float, f->at, list[i], CUMOE_ERR_INVALID_ARGUMENT, f->name, "float %llx");
}

static void wrong_types(const argument *f)
{
  const cumoe_status status = f->status != CUMOE_OK ? f->status : CUMOE_ERR_WRONG_DTYPE;
  const int32_t types[] = {-1, 0, 1, 2, 3, 4, 5, 6, 7, 31, 32, 33, 99, INT32_MIN, INT32_MAX};
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
    if (types[i] < 0 || types[i] > 31 || !(f->dtypes >> types[i] & 1))
      WRONG(int32_t, f->at, types[i], status, f->name, "%lld");
}

/* The output begins where the other one begins. */
static void overlapping(const argument *f)
{
  const cumoe_view out = *(cumoe_view *)(void *)((char *)&right + f->at),
                   in = *(cumoe_view *)(void *)((char *)&right + f->with);
  cumoe_view wrong = out;
  wrong.data = in.data;
  if ((uintptr_t)wrong.data % 256 == 0)
    WRONG(cumoe_view, f->at, wrong, CUMOE_ERR_INVALID_ARGUMENT, f->name, "begins with another");
}

static void wrong(const argument *f)
{
  if (bench.cpu && f->traits & CUDA_ONLY) return;
  switch (f->kind) {
  case A_CONTEXT:
  case A_PLAN:
  case A_WEIGHTS: wrong_objects(f); break;
  case A_VIEW:
    wrong_views(f);
    short_view(f);
    break;
  case A_NOT_NULL: WRONG(void *, f->at, NULL, CUMOE_ERR_INVALID_ARGUMENT, f->name, "null"); break;
  case A_SIZE: wrong_sizes(f); break;
  case A_INT:
  case A_LONG: wrong_numbers(f); break;
  case A_VALUE: WRONG(int64_t, f->at, f->low, status_of(f), f->name, "%lld"); break;
  case A_BYTES: wrong_bytes(f); break;
  case A_FLAGS: wrong_flags(f); break;
  case A_FLOAT: wrong_floats(f); break;
  case A_DTYPE: wrong_types(f); break;
  case A_HANDLE: wrong_handles(f); break;
  case A_OBJECT: wrong_modules(f); break;
  case A_OVERLAP: overlapping(f); break;
  }
}

/* ---- runs ------------------------------------------------------------------------------------------------ */

static cumoe_weights bind_plain(cumoe_context context, int32_t experts, int32_t inter)
{
  cumoe_weights bound = NULL;
  cumoe_weights_desc d = {.size = sizeof d,
                          .experts = experts,
                          .hidden = HIDDEN,
                          .inter = inter,
                          .gate_order = CUMOE_GATE_UP_CONCAT,
                          .up_major = CUMOE_OUT_IN,
                          .down_major = CUMOE_OUT_IN};
  d.gate_up.data = give(CUMOE_BF16, 2 * (int64_t)experts * inter, HIDDEN);
  d.down.data = give(CUMOE_BF16, (int64_t)experts * HIDDEN, inter);
  CHECK_OK(cumoe_weights_bind(context, &d, &bound));
  return bound;
}

static cumoe_plan plan_for(cumoe_context context, uint32_t flags, int32_t shared)
{
  cumoe_plan plan = NULL;
  const cumoe_moe_desc d = {.size = sizeof d,
                            .num_experts = EXPERTS,
                            .hidden = HIDDEN,
                            .inter = INTER,
                            .shared_inter = shared,
                            .dtype = CUMOE_BF16,
                            .routing = cumoe_routing_make(CUMOE_SCORE_SOFTMAX, TOP_K, flags)};
  CHECK_OK(cumoe_plan_create(context, &d, &plan));
  return plan;
}

/* A graph, and a module of the caller's. */
static void open_caller_work(void)
{
  CHECK_OK(cumoe_graph_begin(bench.context, bench.stream));
  CHECK_OK(cumoe_graph_end(bench.context, bench.stream, &bench.graph));
  CHECK_OK(cumoe_module_load(bench.context, ptx_text, sizeof ptx_text, &bench.module));
  CHECK_OK(cumoe_module_function(bench.module, "add", 0, &bench.function));
}

static void open_bench(int32_t device)
{
  bench.cpu = device == CUMOE_DEVICE_CPU;
  bench.next = bench.cpu ? (uintptr_t)arena : (uintptr_t)1 << 40;
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = 1};
  CHECK_OK(cumoe_context_create(device, &config, &bench.context));
  CHECK_OK(cumoe_context_create(bench.cpu ? 1 : 0, NULL, &bench.other));
  bench.plan = plan_for(bench.context, CUMOE_ROUTE_RENORMALIZE, 0);
  bench.shared_plan = plan_for(bench.context, CUMOE_ROUTE_RENORMALIZE, 8);
  bench.weighing_plan = plan_for(bench.context, CUMOE_ROUTE_WEIGHT_ON_INPUT, 0);
  bench.foreign_plan = plan_for(bench.other, CUMOE_ROUTE_RENORMALIZE, 0);
  bench.weights = bind_plain(bench.context, EXPERTS, INTER);
  bench.shared = bind_plain(bench.context, 1, 8);
  bench.foreign_weights = bind_plain(bench.other, EXPERTS, INTER);
  CHECK_OK(cumoe_buffer_alloc(bench.context, CUMOE_F32, 8, 64, no_stream, &bench.buffer));
  CHECK_OK(cumoe_buffer_alloc(bench.context, CUMOE_U8, 1, 1, no_stream, &bench.tiny));
  CHECK_OK(cumoe_buffer_alloc(bench.other, CUMOE_F32, 64, 64, no_stream, &bench.foreign));
  CHECK_OK(cumoe_buffer_alloc(bench.context, CUMOE_F32, 8, 64, no_stream, &bench.freed));
  cumoe_buffer gone = bench.freed;
  CHECK_OK(cumoe_buffer_free(&gone));
  CHECK_OK(cumoe_stream_create(bench.context, 0, &bench.stream));
  CHECK_OK(cumoe_event_create(bench.context, CUMOE_EVENT_TIMING, &bench.event));
  CHECK_OK(cumoe_event_record(bench.context, bench.event, bench.stream));
  if (!bench.cpu) open_caller_work();
}

static void close_bench(void)
{
  CHECK_OK(cumoe_event_destroy(bench.context, bench.event));
  CHECK_OK(cumoe_graph_destroy(bench.context, bench.graph));
  CHECK_OK(cumoe_stream_destroy(bench.context, bench.stream));
  CHECK_OK(cumoe_module_unload(&bench.module));
  bench.graph = NULL;
  CHECK_OK(cumoe_plan_destroy(bench.plan));
  CHECK_OK(cumoe_plan_destroy(bench.shared_plan));
  CHECK_OK(cumoe_plan_destroy(bench.weighing_plan));
  CHECK_OK(cumoe_plan_destroy(bench.foreign_plan));
  CHECK_OK(cumoe_weights_destroy(bench.weights));
  CHECK_OK(cumoe_weights_destroy(bench.shared));
  CHECK_OK(cumoe_weights_destroy(bench.foreign_weights));
  CHECK_OK(cumoe_buffer_free(&bench.buffer));
  CHECK_OK(cumoe_buffer_free(&bench.tiny));
  CHECK_OK(cumoe_buffer_free(&bench.foreign));
  CHECK_OK(cumoe_context_destroy(bench.context));
  CHECK_OK(cumoe_context_destroy(bench.other));
}

/* The call as it should be works before and after all the wrong ones. */
static void run_function(const function *f)
{
  const uintptr_t next = bench.next;
  if (bench.cpu && f->cuda_only) return;
  if (!group_begin("%s %s%s%s", bench.cpu ? "cpu" : "cuda", f->name, f->title[0] ? ", " : "", f->title)) return;
  now = f;
  for (int round = 0; round < 2; round++) {
    case_begin("as it should be");
    memset(&right, 0, sizeof right);
    memset(&results, 0, sizeof results);
    bench.next = next;
    f->fill(&right);
    CHECK_OK(f->call(&right));
    if (f->undo) f->undo(&right);
    case_end();
    if (round == 0)
      for (int i = 0; i < f->count; i++) wrong(&f->arguments[i]);
  }
  bench.next = next;
  group_end();
}

static void run_device(int32_t device)
{
  case_begin("open");
  open_bench(device);
  case_end();
  for (int i = 0; i < FUNCTIONS; i++) run_function(&functions[i]);
  case_begin("close");
  close_bench();
  case_end();
}

/* Columns of one matrix side by side touch nowhere; with other distances between their rows they do. */
static void side_by_side(void)
{
  if (!group_begin("columns side by side")) return;
  case_begin("open");
  open_bench(1);
  case_end();
  case_begin("one pitch, two pitches");
  cumoe_view_mut dst;
  cumoe_view src;
  CHECK_OK(cumoe_view_cols_mut(cumoe_buffer_view_mut(bench.buffer), 16, 8, &dst));
  CHECK_OK(cumoe_view_cols(cumoe_buffer_view(bench.buffer), 0, 8, &src));
  dst.rows = src.rows = 4;
  CHECK_OK(cumoe_copy(bench.context, dst, src, no_stream));
  dst.ld = 128;
  shim_mark();
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_copy(bench.context, dst, src, no_stream));
  CHECK(strstr(cumoe_last_error(), "overlaps") != NULL && shim_calls(SHIM_ALL) == 0);
  dst.ld = 64;
  dst.data = (char *)dst.data - 9 * 4; /* column 7: the last of src */
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_copy(bench.context, dst, src, no_stream));
  case_end();
  case_begin("close");
  close_bench();
  case_end();
  group_end();
}

/* Functions that answer with a value. */
static void no_status(void)
{
  size_t bytes = 77;
  cumoe_context fake = (cumoe_context)(void *)dead;
  const cumoe_buffer stale = {UINT64_MAX}, null = {0};
  if (!group_begin("functions without a status")) return;
  case_begin("buffers and faults of no context");
  CHECK(cumoe_buffer_live(NULL, &bytes) == 0 && bytes == 0 && cumoe_buffer_live(fake, NULL) == 0);
  CHECK(cumoe_debug_live(NULL, NULL, NULL) == -1 && cumoe_debug_live(fake, NULL, NULL) == -1);
  CHECK(cumoe_fault_pending(NULL) == 0 && cumoe_fault_pending(fake) == 0);
  case_end();
  case_begin("views of no buffer");
  CHECK(cumoe_buffer_view(stale).data == NULL && cumoe_buffer_view(stale).owner == UINT64_MAX);
  CHECK(cumoe_buffer_view_mut(null).data == NULL && cumoe_buffer_view_mut(null).rows == 0);
  case_end();
  group_end();
}

/* ---- completeness ----------------------------------------------------------------------------------------- */

static bool is_listed(const char *name)
{
  for (int i = 0; i < FUNCTIONS; i++)
    if (!strcmp(functions[i].name, name)) return true;
  for (size_t i = 0; i < sizeof exempt / sizeof exempt[0]; i++)
    if (!strcmp(exempt[i], name)) return true;
  return false;
}

/* The function that a declaration declares: the last word before its first parenthesis. */
static void check_declaration(const char *from)
{
  char name[80] = "";
  const char *end = strchr(from, '('), *begin = end;
  if (end == NULL) return;
  while (begin[-1] == '_' || (begin[-1] >= 'a' && begin[-1] <= 'z') || (begin[-1] >= '0' && begin[-1] <= '9')) begin--;
  snprintf(name, sizeof name, "%.*s", (int)(end - begin), begin);
  case_begin("%s", name);
  CHECK_MSG(is_listed(name), "%s has no row in the table of wrong arguments, and no exemption", name);
  case_end();
}

static void check_header(const char *path)
{
  static char text[1 << 18];
  FILE *file = fopen(path, "r");
  if (!CHECK_MSG(file != NULL, "%s cannot be read", path)) return;
  text[fread(text, 1, sizeof text - 1, file)] = 0;
  fclose(file);
  for (const char *at = text; (at = strstr(at, "\nCUMOE_")) != NULL; at++)
    if (!strncmp(at + 1, "CUMOE_API ", 10) || !strncmp(at + 1, "CUMOE_CHECKED ", 14)) check_declaration(at);
}

static void every_function(void)
{
  glob_t found;
  if (!group_begin("every declared function has a row")) return;
  case_begin("headers");
  CHECK(glob("include/cumoe/*.h", 0, NULL, &found) == 0 && found.gl_pathc > 4);
  case_end();
  for (size_t i = 0; i < found.gl_pathc; i++) check_header(found.gl_pathv[i]);
  globfree(&found);
  group_end();
}

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  shim_reset();
  run_device(1);
  run_device(CUMOE_DEVICE_CPU);
  side_by_side();
  no_status();
  every_function();
  return test_end();
}
