/*
 * Every public function with every argument made wrong in every way that its kind allows, one at a time: the right
 * status, a text that names the call and the argument, no CUDA call, no memory taken, nothing written.
 *
 * CALL has a row an argument: its name in texts, where it lies, what it may be; the ways to be wrong follow from its
 * kind. CHANGE is one wrong call spelled out: status, words of the text, what is changed. All run on a CUDA device (the
 * shim's) and on the CPU device; since no CUDA call is made, a GPU could not answer otherwise.
 */
#include <glob.h>
#include <limits.h>
#include <math.h>
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
  void *pointer;    /* of the caller's memory or structs; what is meant by it stands in the row */
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
  cumoe_buffer_info buffer_info;
  cumoe_device_info device_info;
  cumoe_fault fault;
  cumoe_variant_info variant_info;
  cumoe_limit_info limit_info;
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
  cumoe_router_args router;
  cumoe_gate_args gate;
  cumoe_masked_args masked;
  cumoe_moe_grads grads;
  cumoe_gate_backward_args gate_back;
  cumoe_weights_backward_args weights_back;
  cumoe_matmul_args matmul;
  cumoe_format format;
  cumoe_quantize_args quantize;
  cumoe_repack_args repack;
  cumoe_embedding_backward_args embedding;
  cumoe_norm_backward_args norm;
  cumoe_cross_entropy_args loss;
  cumoe_global_norm_args global;
  cumoe_adamw_args adamw;
  cumoe_attention_args attention;
  cumoe_attention_backward_args attended;
  cumoe_rope_args rope;
  float number;
} arguments;

static arguments right; /* the call as it succeeds */

/* Not an argument: what a call may set to null. */
static struct {
  _Alignas(16) unsigned char bytes[2048];
} results;

/* ---- kinds of arguments ------------------------------------------------------------------------------- */

typedef enum kind {
  A_CONTEXT,
  A_PLAN,
  A_WEIGHTS,
  A_VIEW,
  A_NOT_NULL,
  A_SIZE,   /* of a struct that may be older or newer */
  A_INT,    /* int32_t in low .. high, a multiple of step */
  A_LONG,   /* int64_t */
  A_BYTES,  /* size_t, exactly what it is */
  A_VALUE,  /* int64_t; low is a wrong one */
  A_FLAGS,  /* uint32_t, known bits in types */
  A_FLOAT,  /* not negative, finite */
  A_TYPE,   /* int32_t, one of types */
  A_HANDLE, /* of a live buffer */
  A_OBJECT  /* of a live module or function */
} kind;

enum {
  FREE_ROWS = 1, /* any number is legal by itself */
  FREE_COLS = 2,
  LEAST_ROWS = FREE_ROWS | 4, /* more are legal */
  LOOSE = 8,                  /* a wrong shape is noticed at another argument */
  OPTIONAL = 16,              /* may be absent */
  FOREIGN = 32,               /* a plan of another device is noticed */
  CUDA_ONLY = 64,
  OUT = 128,      /* may share memory with no other view ... */
  IN_PLACE = 256, /* ... but with this one */
  PACKED = 512    /* no gap between rows */
};

typedef struct argument {
  const char *name;
  kind kind;
  size_t at;
  int64_t low, high; /* A_INT, A_LONG */
  int32_t step;
  cumoe_status status; /* of a wrong value, where it is not INVALID_ARGUMENT */
  uint32_t types, align;
  unsigned traits;
} argument;

typedef struct function {
  const char *name, *form;
  void (*fill)(arguments *a);
  cumoe_status (*call)(arguments *a);
  const argument *arguments;
  int count;
  void (*undo)(arguments *a); /* after a call that succeeded */
  bool cuda_only;             /* no module can be had on the CPU device */
} function;

static function functions[200];
static int function_count;

#define BIT(type) (1u << CUMOE_##type)
#define FLOATS    (BIT(F32) | BIT(F16) | BIT(BF16))
#define INDICES   (BIT(I32) | BIT(I64))
#define ANY_TYPE  (FLOATS | INDICES | BIT(U8) | BIT(E4M3) | BIT(E8M0) | BIT(I8))
#define OR_F32    (BIT(F32) | BIT(BF16))

/* Rows of CALL: name in texts, member of `arguments`, what it may be. */
#define ROW(name_, kind_, member, ...)                                                                                 \
  {                                                                                                                    \
    .name = name_, .kind = kind_, .at = offsetof(arguments, member), __VA_ARGS__                                       \
  }
#define VIEW(name, member, types_, align_, traits_)                                                                    \
  ROW(name, A_VIEW, member, .types = types_, .align = align_, .traits = traits_)
#define NOT_NULL(name, member)               ROW(name, A_NOT_NULL, member, .low = 0)
#define ON_CUDA_NOT_NULL(name, member)       ROW(name, A_NOT_NULL, member, .traits = CUDA_ONLY)
#define SIZE(name, member)                   ROW(name, A_SIZE, member, .low = 0)
#define INT(name, member, low_, high_)       ROW(name, A_INT, member, .low = low_, .high = high_)
#define LONG(name, member, low_, high_)      ROW(name, A_LONG, member, .low = low_, .high = high_)
#define FLAGS(name, member, known)           ROW(name, A_FLAGS, member, .types = known)
#define FLOAT(name, member)                  ROW(name, A_FLOAT, member, .low = 0)
#define TYPE(name, member, types_)           ROW(name, A_TYPE, member, .types = types_)
#define OBJECT(name)                         ROW(name, A_OBJECT, object, .low = 0)
#define HANDLE(name, member)                 ROW(name, A_HANDLE, member, .low = 0)
#define CONTEXT                              ROW("context", A_CONTEXT, context, .low = 0)
#define PLAN                                 ROW("plan", A_PLAN, plan, .low = 0)
#define FOREIGN_PLAN                         ROW("plan", A_PLAN, plan, .traits = FOREIGN)
#define WEIGHTS(name, member)                ROW(name, A_WEIGHTS, member, .low = 0)
#define VALUE(name, member, wrong_, status_) ROW(name, A_VALUE, member, .low = wrong_, .status = CUMOE_ERR_##status_)

#define RESERVE(name, word) VALUE(name ".reserved", word, 1, NOT_SUPPORTED)

#define FORM(name_, form_, fill_, undo_, on_cuda, expression, ...)                                                     \
  static cumoe_status call_##name_##_##form_(arguments *a)                                                             \
  {                                                                                                                    \
    return expression;                                                                                                 \
  }                                                                                                                    \
  static const argument rows_##name_##_##form_[] = {__VA_ARGS__};                                                      \
  __attribute__((constructor)) static void add_##name_##_##form_(void)                                                 \
  {                                                                                                                    \
    functions[function_count++] = (function){#name_,                                                                   \
                                             #form_,                                                                   \
                                             fill_,                                                                    \
                                             call_##name_##_##form_,                                                   \
                                             rows_##name_##_##form_,                                                   \
                                             sizeof rows_##name_##_##form_ / sizeof(argument),                         \
                                             undo_,                                                                    \
                                             on_cuda};                                                                 \
  }
#define CALL(name, fill, expression, ...)            FORM(name, plain, fill, NULL, false, expression, __VA_ARGS__)
#define CALL_FORM(name, form, fill, expression, ...) FORM(name, form, fill, NULL, false, expression, __VA_ARGS__)
#define CALL_UNDO(name, fill, undo, expression, ...) FORM(name, plain, fill, undo, false, expression, __VA_ARGS__)
#define ON_CUDA(name, fill, expression, ...)         FORM(name, plain, fill, NULL, true, expression, __VA_ARGS__)

/* ---- the bench: a device with everything that calls need ------------------------------------------------ */

enum { TOKENS = 3, HIDDEN = 64, INTER = 16, EXPERTS = 8, TOP_K = 2, PAIRS = TOKENS * TOP_K, ARENA = 1 << 19 };

static struct {
  cumoe_context context, other; /* other: of another device */
  bool cpu;
  cumoe_plan plan, shared_plan, weighing_plan, local_plan, unreduced_plan, ungated_plan, foreign_plan;
  cumoe_weights weights, shared, narrow, halves, ungated, foreign_weights, d_weights, d_shared, same;
  const void *bound, *d_bound; /* where all weights begin; those of gradients */
  cumoe_buffer buffer, freed, foreign, tiny;
  cumoe_stream stream;
  cumoe_event event;
  cumoe_graph graph;
  cumoe_module module;
  cumoe_function function;
  uintptr_t next;
  cumoe_view logits, ids, pair_weights, row; /* for arguments that should not be there */
} bench;

static _Alignas(4096) unsigned char arena[ARENA], arena_before[ARENA];
static _Alignas(64) unsigned char dead[1 << 16]; /* what a destroyed object may look like */
static cumoe_stream no_stream;

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

static cumoe_view_mut give_mut(int32_t dtype, int64_t rows, int64_t cols)
{
  return as_mut(give(dtype, rows, cols));
}

/* What cannot work on the CPU device says so after all checks. */
static cumoe_status unless_cpu(cumoe_status status)
{
  return bench.cpu && status == CUMOE_ERR_NOT_SUPPORTED ? CUMOE_OK : status;
}

/* ---- cumoe/context.h ------------------------------------------------------------------------------------ */

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
}
static void undo_create(arguments *a)
{
  CHECK_OK(cumoe_context_destroy(*(cumoe_context *)a->out));
}
CALL_UNDO(cumoe_context_create, fill_create, undo_create, cumoe_context_create(a->device, a->info, a->out),
          NOT_NULL("context", out), INT("device", device, -2, INT32_MAX), SIZE("config.size", config.size),
          INT("config.cpu_threads", config.cpu_threads, 0, INT32_MAX), INT("config.debug", config.debug, 0, 2),
          INT("config.reserved", config.reserved, 0, 0),
          VALUE("config.pool_initial", config.pool_initial, -1, INVALID_ARGUMENT),
          SIZE("config.allocator.size", allocator.size), NOT_NULL("config.allocator.alloc", allocator.alloc),
          NOT_NULL("config.allocator.free", allocator.free), FLAGS("config.allocator.reserved", allocator.reserved, 0))

static void fill_context(arguments *a)
{
  a->device_info.size = sizeof a->device_info;
  a->info = &a->device_info;
}
CALL(cumoe_context_destroy, fill_context, cumoe_context_destroy(a->context == bench.context ? NULL : a->context),
     ROW("context", A_CONTEXT, context, .traits = OPTIONAL))
CALL(cumoe_context_info, fill_context, cumoe_context_info(a->context, a->info), CONTEXT, NOT_NULL("info", info),
     SIZE("info.size", device_info.size))
CALL(cumoe_synchronize, fill_context, cumoe_synchronize(a->context, no_stream), CONTEXT)
CALL(cumoe_fault_clear, fill_context, cumoe_fault_clear(a->context, no_stream), CONTEXT)
static void fill_fault(arguments *a)
{
  a->fault.size = sizeof a->fault;
  a->info = &a->fault;
}
CALL(cumoe_fault_read, fill_fault, cumoe_fault_read(a->context, no_stream, a->info), CONTEXT, NOT_NULL("fault", info),
     SIZE("fault.size", fault.size))

/* ---- cumoe/buffer.h ------------------------------------------------------------------------------------- */

#define SHAPE TYPE("dtype", dtype, ANY_TYPE), LONG("rows", rows, 0, MOST / 10), LONG("cols", cols, 0, MOST / 6)

#define MOST                      ((int64_t)1 << 46) /* bytes of an address space */
#define OF_BUFFER                 HANDLE("buffer", handle)
#define OUTSIDE                   .status = CUMOE_ERR_OUT_OF_BOUNDS
#define PART(name, member, high_) ROW(name, A_LONG, member, .high = high_, OUTSIDE)

static void fill_alloc(arguments *a)
{
  a->dtype = CUMOE_BF16;
  a->rows = 3;
  a->cols = 5;
}
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
static void undo_alloc(arguments *a)
{
  CHECK_OK(cumoe_buffer_free(a->out));
}
CALL_UNDO(cumoe_buffer_alloc, fill_alloc, undo_alloc,
          cumoe_buffer_alloc(a->context, (cumoe_dtype)a->dtype, a->rows, a->cols, no_stream, (cumoe_buffer *)a->out),
          CONTEXT, SHAPE, NOT_NULL("buffer", out))
CALL_UNDO(cumoe_buffer_alloc_with, fill_alloc, undo_alloc,
          cumoe_buffer_alloc_with(a->context, (cumoe_dtype)a->dtype, a->rows, a->cols, a->flags, no_stream,
                                  (cumoe_buffer *)a->out),
          CONTEXT, SHAPE, FLAGS("flags", flags, 3), NOT_NULL("buffer", out))
CALL_UNDO(cumoe_buffer_adopt, fill_adopt, undo_alloc,
          cumoe_buffer_adopt(a->context, a->pointer, (cumoe_dtype)a->dtype, a->rows, a->cols, no_stream, a->out),
          CONTEXT, NOT_NULL("data", pointer), SHAPE, NOT_NULL("buffer", out))

static void fill_handle(arguments *a)
{
  a->handle = bench.buffer;
  a->buffer = &a->handle;
  a->buffer_info.size = sizeof a->buffer_info;
  a->info = &a->buffer_info;
}
/* The bench's own buffer stays. */
static bool is_right(arguments *a)
{
  return a->buffer && a->out && a->buffer->id == bench.buffer.id;
}
CALL(cumoe_buffer_free, fill_handle, is_right(a) ? CUMOE_OK : cumoe_buffer_free(a->buffer), NOT_NULL("buffer", buffer),
     OF_BUFFER)
CALL(cumoe_buffer_release, fill_handle, is_right(a) ? CUMOE_OK : cumoe_buffer_release(a->buffer, a->out),
     NOT_NULL("buffer", buffer), NOT_NULL("data", out), OF_BUFFER)
CALL(cumoe_buffer_get_info, fill_handle, cumoe_buffer_get_info(a->handle, a->info), OF_BUFFER, NOT_NULL("info", info),
     SIZE("info.size", buffer_info.size))
CALL_UNDO(cumoe_buffer_retain, fill_handle, undo_alloc, cumoe_buffer_retain(a->handle, a->out), OF_BUFFER,
          NOT_NULL("another", out))
CALL(cumoe_buffer_record_use, fill_handle, cumoe_buffer_record_use(a->handle, no_stream), OF_BUFFER)

static void fill_slice(arguments *a)
{
  a->v[0] = cumoe_buffer_view(bench.buffer); /* [8, 64] */
  a->rows = 2;
  a->cols = 4;
  a->dtype = CUMOE_I64;
  a->pointer = (char *)&results + sizeof results / 2;
}
#define OF_VIEW HANDLE("view", v[0].owner)
CALL(cumoe_view_rows, fill_slice, cumoe_view_rows(a->v[0], a->rows, a->cols, a->out), PART("rows", rows, 4),
     PART("rows", cols, 6), OF_VIEW, NOT_NULL("slice", out))
CALL(cumoe_view_rows_mut, fill_slice, cumoe_view_rows_mut(as_mut(a->v[0]), a->rows, a->cols, a->out),
     PART("rows", rows, 4), PART("rows", cols, 6), OF_VIEW, NOT_NULL("slice", out))
CALL(cumoe_view_cols, fill_slice, cumoe_view_cols(a->v[0], a->rows, a->cols, a->out), PART("cols", rows, 60),
     PART("cols", cols, 62), OF_VIEW, NOT_NULL("slice", out))
CALL(cumoe_view_cols_mut, fill_slice, cumoe_view_cols_mut(as_mut(a->v[0]), a->rows, a->cols, a->out),
     PART("cols", rows, 60), PART("cols", cols, 62), OF_VIEW, NOT_NULL("slice", out))
CALL(cumoe_view_split, fill_slice, cumoe_view_split(a->v[0], a->rows, a->out, a->pointer), PART("rows", rows, 8),
     OF_VIEW, NOT_NULL("head", out), NOT_NULL("tail", pointer))
CALL(cumoe_view_split_mut, fill_slice, cumoe_view_split_mut(as_mut(a->v[0]), a->rows, a->out, a->pointer),
     PART("rows", rows, 8), OF_VIEW, NOT_NULL("head", out), NOT_NULL("tail", pointer))
#define CAST_ROWS                                                                                                      \
  TYPE("dtype", dtype, ANY_TYPE), TYPE("view.dtype", v[0].dtype, ANY_TYPE),                                            \
      LONG("view.cols", v[0].cols, 0, INT64_MAX / 4), LONG("view.ld", v[0].ld, 0, INT64_MAX / 4),                      \
      VALUE("view.cols", v[0].cols, 63, LAYOUT), VALUE("view.ld", v[0].ld, 65, LAYOUT),                                \
      VALUE("view.data", v[0].data, 4097, MISALIGNED), OF_VIEW, NOT_NULL("as", out)
CALL(cumoe_view_cast, fill_slice, cumoe_view_cast(a->v[0], (cumoe_dtype)a->dtype, a->out), CAST_ROWS)
CALL(cumoe_view_cast_mut, fill_slice, cumoe_view_cast_mut(as_mut(a->v[0]), (cumoe_dtype)a->dtype, a->out), CAST_ROWS)

static unsigned char host_bytes[4096];

static void fill_copy(arguments *a)
{
  a->v[1] = cumoe_buffer_view(bench.buffer); /* [8, 64] f32 */
  a->v[1].dtype = CUMOE_I32;
  a->v[1].rows = 4;
  a->v[1].cols = 8;
  a->v[0] = a->v[1]; /* the rows below it, as the caller's own memory */
  a->v[0].owner = 0;
  a->v[0].data = (const char *)a->v[1].data + 4 * 64 * 4;
  a->host = host_bytes;
  a->bytes = 128;
  a->pointer = bench.context;
}
#define MOVED(name, member, traits) VIEW(name, member, ANY_TYPE, 4, traits)
#define HOST_BYTES                  NOT_NULL("host pointer", host), ROW("bytes", A_BYTES, bytes, OUTSIDE)
CALL(cumoe_copy_from_host, fill_copy, cumoe_copy_from_host(a->context, as_mut(a->v[1]), a->host, a->bytes, no_stream),
     CONTEXT, MOVED("dst", v[1], LOOSE), HOST_BYTES)
CALL(cumoe_copy_to_host, fill_copy,
     cumoe_copy_to_host(a->context, (void *)(uintptr_t)a->host, a->bytes, a->v[1], no_stream), CONTEXT,
     MOVED("src", v[1], LOOSE), HOST_BYTES)
CALL(cumoe_copy, fill_copy, cumoe_copy(a->context, as_mut(a->v[0]), a->v[1], no_stream), CONTEXT,
     MOVED("dst", v[0], OUT), MOVED("src", v[1], 0))
CALL(cumoe_copy_between, fill_copy,
     cumoe_copy_between(a->context, as_mut(a->v[0]), no_stream, a->pointer, a->v[1], no_stream), CONTEXT,
     ROW("context", A_CONTEXT, pointer, .low = 0), MOVED("dst", v[0], OUT), MOVED("src", v[1], 0))
CALL(cumoe_fill, fill_copy, cumoe_fill(a->context, as_mut(a->v[1]), 0, no_stream), CONTEXT,
     MOVED("dst", v[1], FREE_ROWS | FREE_COLS))
CALL(cumoe_fill_value, fill_copy, cumoe_fill_value(a->context, as_mut(a->v[1]), a->host, no_stream), CONTEXT,
     MOVED("dst", v[1], FREE_ROWS | FREE_COLS), NOT_NULL("value", host))

static void fill_pinned(arguments *a)
{
  a->bytes = 100;
}
static void undo_pinned(arguments *a)
{
  CHECK_OK(cumoe_pinned_free(a->context, *(void **)a->out));
}
CALL_UNDO(cumoe_pinned_alloc, fill_pinned, undo_pinned,
          cumoe_pinned_alloc(a->context, a->bytes, a->flags, (void **)a->out), CONTEXT, FLAGS("flags", flags, 1),
          LONG("bytes", bytes, 0, MOST - 1), NOT_NULL("data", out))
CALL(cumoe_pinned_free, fill_context, cumoe_pinned_free(a->context, a->pointer), CONTEXT,
     VALUE("data", pointer, 4096, STALE_HANDLE))

/* ---- cumoe/pool.h, cumoe/debug.h ------------------------------------------------------------------------ */

static void fill_stats(arguments *a)
{
  a->stats.size = sizeof a->stats;
  a->info = &a->stats;
}
/* The CPU device has no peers. */
static cumoe_status allow_peer(arguments *a)
{
  if (bench.cpu && a->context == bench.context && a->index == 0) return CUMOE_OK;
  return cumoe_pool_allow_peer(a->context, a->index);
}
CALL(cumoe_pool_get_stats, fill_stats, cumoe_pool_get_stats(a->context, a->info), CONTEXT, NOT_NULL("stats", info),
     SIZE("stats.size", stats.size))
CALL(cumoe_pool_reset_highs, fill_context, cumoe_pool_reset_highs(a->context), CONTEXT)
CALL(cumoe_pool_trim, fill_context, cumoe_pool_trim(a->context, a->bytes), CONTEXT)
CALL(cumoe_pool_allow_peer, fill_context, allow_peer(a), CONTEXT, INT("peer", index, 0, 63))
CALL(cumoe_debug_check, fill_handle, cumoe_debug_check(a->context, no_stream, a->info), CONTEXT,
     SIZE("first_bad.size", buffer_info.size))

/* ---- cumoe/moe.h ---------------------------------------------------------------------------------------- */

#define STEPS(name, member, low_, high_, step_, traits_)                                                               \
  ROW(name, A_INT, member, .low = low_, .high = high_, .step = step_, .traits = traits_)
#define ROUTING_ROWS(where)                                                                                            \
  INT("routing.score", where.score, 0, 3), INT("routing.top_k", where.top_k, 1, 4),                                    \
      STEPS("routing.n_group", where.n_group, 2, 8, 2, LOOSE), INT("routing.topk_group", where.topk_group, 1, 4),      \
      INT("routing.group_score", where.group_score, 0, 1), FLAGS("routing.flags", where.flags, 15),                    \
      FLOAT("routed_scale", where.routed_scale), FLOAT("softcap", where.softcap),                                      \
      FLOAT("renorm_eps", where.renorm_eps), FLOAT("renorm_min", where.renorm_min),                                    \
      FLOAT("logit_scale", where.logit_scale), FLOAT("mixer_eps", where.mixer_eps)
#define DESC_ROWS                                                                                                      \
  NOT_NULL("desc", info), SIZE("desc.size", desc.size),                                                                \
      STEPS("desc.num_experts", desc.num_experts, EXPERTS, 1024, 1, LOOSE),                                            \
      INT("desc.local_experts", desc.local_experts, 0, EXPERTS), STEPS("desc.hidden", desc.hidden, 8, 1 << 22, 8, 0),  \
      STEPS("desc.inter", desc.inter, 8, 1 << 22, 8, 0),                                                               \
      STEPS("desc.shared_inter", desc.shared_inter, 0, 1 << 22, 8, 0),                                                 \
      ROW("desc.dtype", A_TYPE, desc.dtype, .types = FLOATS, .status = CUMOE_ERR_NOT_SUPPORTED),                       \
      ROW("desc.out_dtype", A_TYPE, desc.out_dtype, .types = OR_F32 | 1, .status = CUMOE_ERR_NOT_SUPPORTED),           \
      INT("desc.act", desc.act, 0, 6), FLOAT("act_limit", desc.act_limit), FLAGS("desc.flags", desc.flags, 15),        \
      RESERVE("routing", desc.routing.reserved[3]), ROUTING_ROWS(desc.routing),                                        \
      INT("zero_experts", desc.routing.zero_experts, 0, 1024 - EXPERTS),                                               \
      INT("identity_experts", desc.routing.identity_experts, 0, 1024 - EXPERTS)

static void fill_desc(arguments *a)
{
  a->desc = (cumoe_moe_desc){.size = sizeof a->desc,
                             .num_experts = EXPERTS,
                             .local_experts = EXPERTS,
                             .hidden = HIDDEN,
                             .inter = INTER,
                             .dtype = CUMOE_BF16,
                             .out_dtype = CUMOE_BF16,
                             .routing = cumoe_routing_deepseek_v3(TOP_K, 4, 2, 2.5f)};
  a->info = &a->desc;
}
static void undo_plan(arguments *a)
{
  CHECK_OK(cumoe_plan_destroy(*(cumoe_plan *)a->out));
}
/* The reason is the text, cut where the memory for it ends. */
static cumoe_status supports(arguments *a)
{
  char why[400], cut[8];
  memset(cut, 'x', sizeof cut);
  const cumoe_status status = cumoe_moe_supports(a->device, a->info, why, sizeof why);
  if (status != CUMOE_OK) CHECK_MSG(strstr(cumoe_last_error(), why) != NULL, "why is \"%s\"", why);
  CHECK(cumoe_moe_supports(a->device, a->info, cut, 5) == status && cut[5] == 'x');
  CHECK(status == CUMOE_OK || (cut[4] == 0 && !memcmp(cut, why, 4)));
  return cumoe_moe_supports(a->device, a->info, NULL, 0);
}
CALL(cumoe_moe_supports, fill_desc, supports(a), INT("device", device, -2, INT32_MAX), DESC_ROWS)
CALL_UNDO(cumoe_plan_create, fill_desc, undo_plan, cumoe_plan_create(a->context, a->info, a->out), CONTEXT,
          NOT_NULL("plan", out), DESC_ROWS)

/* Each part with a format of its own. */
enum { WIDE = 64 };
static cumoe_format zeros_format(void)
{
  cumoe_format f = cumoe_format_int4(32, CUMOE_F16);
  f.offset = 0;
  f.zero = CUMOE_ZERO_CODES_OUT;
  return f;
}
static void fill_desc_formats(arguments *a)
{
  fill_desc(a);
  a->desc.inter = a->desc.shared_inter = WIDE;
  a->desc.up_format = cumoe_format_fp8_block(CUMOE_F32);
  a->desc.down_format = zeros_format();
  a->desc.shared_up_format = cumoe_format_mxfp4();
  a->desc.shared_down_format = cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES);
}
FORM(cumoe_moe_supports, formats, fill_desc_formats, NULL, false, supports(a), NOT_NULL("desc", info))
FORM(cumoe_plan_create, formats, fill_desc_formats, undo_plan, false, cumoe_plan_create(a->context, a->info, a->out),
     CONTEXT, NOT_NULL("plan", out))

static void fill_plan(arguments *a)
{
  a->plan = bench.plan;
  a->rows = TOKENS;
  a->bytes = 16;
}
#define TOKENS_ROW LONG("tokens", rows, 0, CUMOE_MAX_PAIRS / TOP_K), NOT_NULL("bytes", out)
CALL(cumoe_plan_destroy, fill_plan, cumoe_plan_destroy(a->plan == bench.plan ? NULL : a->plan),
     ROW("plan", A_PLAN, plan, .traits = OPTIONAL))
CALL(cumoe_plan_workspace, fill_plan, cumoe_plan_workspace(a->plan, a->rows, a->out), PLAN, TOKENS_ROW)
CALL(cumoe_plan_describe, fill_plan, cumoe_plan_describe(a->plan, NULL, a->rows, a->out, a->bytes), PLAN,
     LONG("tokens", rows, 1, CUMOE_MAX_PAIRS / TOP_K), NOT_NULL("text", out))
CALL(cumoe_map_workspace, fill_plan, cumoe_map_workspace(a->plan, a->rows, a->out), PLAN, TOKENS_ROW)

static const void *pointers[EXPERTS];

static void fill_bind(arguments *a)
{
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
static void fill_bind_tables(arguments *a)
{
  fill_bind(a);
  for (int e = 0; e < EXPERTS; e++) pointers[e] = a->bind.down.data.data;
  a->bind.gate_up.data.data = NULL;
  a->bind.gate_up.expert_stride = 0;
  a->bind.gate_up.per_expert = pointers;
}
static void undo_bind(arguments *a)
{
  CHECK_OK(cumoe_weights_destroy(*(cumoe_weights *)a->out));
}
#define LAYOUT_OF(name, member, high_) ROW(name, A_INT, member, .low = 1, .high = high_, .status = CUMOE_ERR_LAYOUT)
#define BIND_ROWS                                                                                                      \
  CONTEXT, NOT_NULL("weights", out), NOT_NULL("desc", info), SIZE("desc.size", bind.size),                             \
      LAYOUT_OF("desc.gate_order", bind.gate_order, 6), LAYOUT_OF("desc.up_major", bind.up_major, 2),                  \
      LAYOUT_OF("desc.down_major", bind.down_major, 2), INT("desc.reserved", bind.reserved, 0, 0),                     \
      STEPS("desc.hidden", bind.hidden, 8, INT32_MAX, 8, 0), STEPS("desc.inter", bind.inter, 8, INT32_MAX, 8, 0),      \
      INT("desc.experts", bind.experts, 1, 1024), PROJECTION(down, FLOATS)
#define STRIDE(field, wrong, status) VALUE("desc." #field ".expert_stride", bind.field.expert_stride, wrong, status)
#define PROJECTION(field, types)                                                                                       \
  VIEW("desc." #field, bind.field.data, types, 16, 0), STRIDE(field, -1, LAYOUT), STRIDE(field, INT64_MIN, LAYOUT),    \
      STRIDE(field, 8, LAYOUT), STRIDE(field, 2052, MISALIGNED), STRIDE(field, (int64_t)1 << 61, INVALID_ARGUMENT),    \
      VALUE("desc." #field, bind.field.expert_stride, (int64_t)1 << 45, INVALID_ARGUMENT),                             \
      RESERVE("desc." #field, bind.field.reserved[13]), VIEW("bias", bind.field.bias, OR_F32, 0, OPTIONAL)
FORM(cumoe_weights_bind, strided, fill_bind, undo_bind, false, cumoe_weights_bind(a->context, a->info, a->out),
     BIND_ROWS, PROJECTION(gate_up, BIT(BF16)))
FORM(cumoe_weights_bind, tables, fill_bind_tables, undo_bind, false, cumoe_weights_bind(a->context, a->info, a->out),
     BIND_ROWS)
FORM(cumoe_weights_bind, pointers, fill_bind_separate, undo_bind, false,
     cumoe_weights_bind(a->context, a->info, a->out), BIND_ROWS)

static cumoe_array give_array(cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  return (cumoe_array){.data = give(dtype, rows, cols), .expert_stride = rows * cols};
}
static void fill_bind_formats(arguments *a)
{
  fill_bind(a);
  a->bind.inter = WIDE;
  a->bind.dtype = CUMOE_BF16;
  a->bind.up_format = cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES);
  a->bind.down_format = zeros_format();
  a->bind.gate_up = (cumoe_projection){.data = give(CUMOE_U8, 2 * WIDE, HIDDEN / 2),
                                       .expert_stride = 2 * WIDE * HIDDEN / 2,
                                       .scale = give_array(CUMOE_E4M3, 2 * WIDE, HIDDEN / 16),
                                       .global = give(CUMOE_F32, EXPERTS, 2)};
  a->bind.down = (cumoe_projection){.data = give(CUMOE_I32, HIDDEN, WIDE / 8),
                                    .expert_stride = HIDDEN * WIDE / 8,
                                    .scale = give_array(CUMOE_F16, HIDDEN, WIDE / 32),
                                    .zero = give_array(CUMOE_I32, HIDDEN / 8, WIDE / 32)};
}
/* fp8 with a scale a matrix and one for activations, gate and up apart. */
static void fill_bind_static(arguments *a)
{
  fill_bind(a);
  a->bind.gate_order = CUMOE_GATE_UP_SEPARATE;
  a->bind.dtype = CUMOE_BF16;
  a->bind.up_format = cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC);
  a->bind.gate = (cumoe_projection){.data = give(CUMOE_E4M3, INTER, HIDDEN),
                                    .expert_stride = INTER * HIDDEN,
                                    .scale = give_array(CUMOE_F32, 1, 1),
                                    .input_scale = give(CUMOE_F32, 1, 1)};
  a->bind.up = a->bind.gate;
  a->bind.gate_up = (cumoe_projection){.expert_stride = 0};
}
/* Scales may lie anywhere. */
#define SCALES(field, member, types)                                                                                   \
  VIEW("desc." #field "." #member, bind.field.member.data, types, 0, 0),                                               \
      VALUE("desc." #field "." #member ".expert_stride", bind.field.member.expert_stride, -1, LAYOUT),                 \
      VALUE("desc." #field "." #member, bind.field.member.expert_stride, (int64_t)1 << 61, INVALID_ARGUMENT)
FORM(cumoe_weights_bind, formats, fill_bind_formats, undo_bind, false, cumoe_weights_bind(a->context, a->info, a->out),
     CONTEXT, VIEW("desc.gate_up", bind.gate_up.data, BIT(U8), 16, 0),
     VIEW("desc.down", bind.down.data, BIT(I32), 16, 0), SCALES(gate_up, scale, BIT(E4M3)),
     SCALES(down, scale, BIT(F16)), SCALES(down, zero, BIT(I32)), INT("desc.reserved_end", bind.reserved_end, 0, 0))
FORM(cumoe_weights_bind, static, fill_bind_static, undo_bind, false, cumoe_weights_bind(a->context, a->info, a->out),
     CONTEXT, VIEW("desc.gate", bind.gate.data, BIT(E4M3), 16, LOOSE), SCALES(gate, scale, BIT(F32)))

static void fill_weights(arguments *a)
{
  a->weights = bench.weights;
}
CALL(cumoe_weights_destroy, fill_weights, cumoe_weights_destroy(a->weights == bench.weights ? NULL : a->weights),
     ROW("weights", A_WEIGHTS, weights, .traits = OPTIONAL))

static void fill_forward(arguments *a, cumoe_plan plan)
{
  size_t bytes = 0;
  a->plan = plan;
  a->weights = bench.weights;
  CHECK_OK(cumoe_plan_workspace(plan, TOKENS, &bytes));
  a->args = (cumoe_moe_args){.size = sizeof a->args,
                             .x = give(CUMOE_BF16, TOKENS, HIDDEN),
                             .out = give_mut(CUMOE_BF16, TOKENS, HIDDEN),
                             .residual = give(CUMOE_BF16, TOKENS, HIDDEN),
                             .counts_out = give_mut(CUMOE_I32, 1, EXPERTS),
                             .load = give_mut(CUMOE_I64, 1, EXPERTS),
                             .expert_map = give(CUMOE_I32, 1, EXPERTS),
                             .device_tokens = give(CUMOE_I32, 1, 1),
                             .workspace = give_mut(CUMOE_U8, 1, (int64_t)bytes)};
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
  a->args.expert_scale = give(CUMOE_F32, 1, EXPERTS);
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
#define FORWARD_ROWS                                                                                                   \
  FOREIGN_PLAN, WEIGHTS("weights", weights), NOT_NULL("args", info), SIZE("args.size", args.size),                     \
      FLAGS("args.flags", args.flags, 0), INT("args.reserved", args.reserved, 0, 0),                                   \
      VIEW("args.x", args.x, BIT(BF16), 16, LOOSE),                                                                    \
      VIEW("args.device_tokens", args.device_tokens, BIT(I32), 0, OPTIONAL),                                           \
      VIEW("args.expert_map", args.expert_map, BIT(I32), 0, OPTIONAL), VIEW("args.out", args.out, BIT(BF16), 16, OUT), \
      VIEW("args.residual", args.residual, BIT(BF16), 16, OPTIONAL | IN_PLACE),                                        \
      VIEW("args.counts_out", args.counts_out, BIT(I32), 0, OPTIONAL | OUT),                                           \
      VIEW("args.load", args.load, BIT(I64), 0, OPTIONAL | OUT),                                                       \
      VIEW("args.workspace", args.workspace, BIT(U8), 256, FREE_COLS | OUT),                                           \
      ROW("args.workspace", A_LONG, args.workspace.cols, .status = CUMOE_ERR_WORKSPACE)
CALL_FORM(cumoe_moe_forward, ids, fill_forward_ids, cumoe_moe_forward(a->plan, a->weights, a->info, no_stream),
          FORWARD_ROWS, VIEW("args.ids", args.ids, INDICES, 0, 0), VIEW("args.weights", args.weights, BIT(F32), 0, 0))
CALL_FORM(cumoe_moe_forward, logits, fill_forward_logits, cumoe_moe_forward(a->plan, a->weights, a->info, no_stream),
          FORWARD_ROWS, VIEW("args.logits", args.logits, FLOATS, 0, OPTIONAL),
          VIEW("args.select_bias", args.select_bias, BIT(F32), 0, OPTIONAL),
          VIEW("args.expert_scale", args.expert_scale, BIT(F32), 0, OPTIONAL),
          VIEW("args.ids_out", args.ids_out, INDICES, 0, OPTIONAL | OUT),
          VIEW("args.weights_out", args.weights_out, BIT(F32), 0, OPTIONAL | OUT))
CALL_FORM(cumoe_moe_forward, router, fill_forward_router, cumoe_moe_forward(a->plan, a->weights, a->info, no_stream),
          FORWARD_ROWS, VIEW("args.router_weight", args.router_weight, OR_F32, 16, OPTIONAL),
          VIEW("args.router_bias", args.router_bias, OR_F32, 0, OPTIONAL), WEIGHTS("args.shared", args.shared),
          VIEW("args.shared_gate", args.shared_gate, OR_F32, 16, OPTIONAL))
static void fill_forward_own(arguments *a)
{
  fill_forward_router(a);
  a->args.router_x = give(CUMOE_BF16, TOKENS, HIDDEN);
}
CALL_FORM(cumoe_moe_forward, own, fill_forward_own, cumoe_moe_forward(a->plan, a->weights, a->info, no_stream),
          FORWARD_ROWS, VIEW("args.router_x", args.router_x, BIT(BF16), 16, OPTIONAL))

/* ---- cumoe/backward.h ----------------------------------------------------------------------------------- */

#define SIZES(name, form, kept)                                                                                        \
  CALL_FORM(name, form, fill_plan, kept, PLAN, LONG("tokens", rows, 0, CUMOE_MAX_PAIRS / TOP_K), NOT_NULL("bytes", out))
SIZES(cumoe_moe_kept, plain, cumoe_moe_kept(a->plan, a->rows, a->out))
SIZES(cumoe_moe_backward_workspace, plain, cumoe_moe_backward_workspace(a->plan, a->rows, 0, a->out))
SIZES(cumoe_moe_backward_workspace, kept, cumoe_moe_backward_workspace(a->plan, a->rows, 1, a->out))

static void fill_keep(arguments *a)
{
  size_t bytes = 0;
  fill_forward_router(a);
  CHECK_OK(cumoe_moe_kept(a->plan, TOKENS, &bytes));
  a->v[0] = give(CUMOE_U8, 1, (int64_t)bytes);
}
CALL(cumoe_moe_forward_keep, fill_keep,
     cumoe_moe_forward_keep(a->plan, a->weights, a->info, as_mut(a->v[0]), no_stream), FORWARD_ROWS,
     VIEW("args.router_weight", args.router_weight, OR_F32, 16, OPTIONAL),
     VIEW("args.shared_gate", args.shared_gate, OR_F32, 16, OPTIONAL),
     VIEW("kept", v[0], BIT(U8), 256, FREE_COLS | OUT), ROW("kept", A_LONG, v[0].cols, .status = CUMOE_ERR_WORKSPACE))

static void fill_backward(arguments *a)
{
  size_t kept = 0, bytes = 0;
  fill_forward_own(a);
  CHECK_OK(cumoe_moe_kept(a->plan, TOKENS, &kept));
  CHECK_OK(cumoe_moe_backward_workspace(a->plan, TOKENS, 0, &bytes));
  a->args.out = a->args.workspace = no_view_mut();
  a->args.counts_out = a->args.load = no_view_mut();
  a->args.expert_scale = give(CUMOE_F32, 1, EXPERTS);
  a->args.residual = give(CUMOE_BF16, 1, HIDDEN);
  a->grads = (cumoe_moe_grads){.size = sizeof a->grads,
                               .d_out = give(CUMOE_BF16, TOKENS, HIDDEN),
                               .d_weights = bench.d_weights,
                               .d_shared = bench.d_shared,
                               .d_x = give_mut(CUMOE_BF16, TOKENS, HIDDEN),
                               .d_router_x = give_mut(CUMOE_F32, TOKENS, HIDDEN),
                               .d_router_weight = give_mut(CUMOE_BF16, EXPERTS, HIDDEN),
                               .d_router_bias = give_mut(CUMOE_F32, 1, EXPERTS),
                               .d_logits = give_mut(CUMOE_F32, TOKENS, EXPERTS),
                               .d_pair_weights = give_mut(CUMOE_F32, TOKENS, TOP_K),
                               .d_expert_scale = give_mut(CUMOE_F32, 1, EXPERTS),
                               .d_shared_gate = give_mut(CUMOE_BF16, 1, HIDDEN),
                               .d_residual = give_mut(CUMOE_BF16, 1, HIDDEN),
                               .losses = give_mut(CUMOE_F32, 1, 2),
                               .workspace = give_mut(CUMOE_U8, 1, (int64_t)bytes)};
  a->pointer = &a->grads;
}
static void fill_backward_kept(arguments *a)
{
  size_t bytes = 0;
  fill_backward(a);
  CHECK_OK(cumoe_moe_kept(a->plan, TOKENS, &bytes));
  a->grads.kept = give(CUMOE_U8, 1, (int64_t)bytes);
  CHECK_OK(cumoe_moe_backward_workspace(a->plan, TOKENS, 1, &bytes));
  a->grads.workspace.cols = a->grads.workspace.ld = (int64_t)bytes;
}
#define LAYER_BACKWARD cumoe_moe_backward(a->plan, a->weights, a->info, a->pointer, no_stream)
#define GRADS_ROWS                                                                                                     \
  FOREIGN_PLAN, WEIGHTS("weights", weights), NOT_NULL("args", info), NOT_NULL("grads", pointer),                       \
      SIZE("args.size", args.size), SIZE("grads.size", grads.size), FLAGS("grads.flags", grads.flags, 1),              \
      VIEW("grads.workspace", grads.workspace, BIT(U8), 256, FREE_COLS | OUT),                                         \
      ROW("grads.workspace", A_LONG, grads.workspace.cols, .status = CUMOE_ERR_WORKSPACE)
#define GRAD(name, types, align) VIEW("grads." #name, grads.name, types, align, OPTIONAL | OUT)
CALL_FORM(cumoe_moe_backward, again, fill_backward, LAYER_BACKWARD, GRADS_ROWS, WEIGHTS("args.shared", args.shared),
          ROW("grads.d_weights", A_WEIGHTS, grads.d_weights, .traits = OPTIONAL),
          ROW("grads.d_shared", A_WEIGHTS, grads.d_shared, .traits = OPTIONAL),
          VIEW("args.x", args.x, BIT(BF16), 16, LOOSE),
          VIEW("args.device_tokens", args.device_tokens, BIT(I32), 0, OPTIONAL),
          VIEW("args.shared_gate", args.shared_gate, OR_F32, 16, LOOSE),
          VIEW("args.router_x", args.router_x, BIT(BF16), 16, LOOSE),
          VIEW("grads.d_out", grads.d_out, BIT(BF16), 16, 0), GRAD(d_x, OR_F32, 16), GRAD(d_router_x, OR_F32, 16),
          GRAD(d_router_weight, OR_F32, 0), GRAD(d_router_bias, OR_F32, 0), GRAD(d_logits, BIT(F32), 0),
          GRAD(d_pair_weights, BIT(F32), 0), GRAD(d_expert_scale, BIT(F32), 0), GRAD(d_shared_gate, OR_F32, 0),
          GRAD(d_residual, OR_F32, 0), GRAD(losses, BIT(F32), 0))
CALL_FORM(cumoe_moe_backward, kept, fill_backward_kept, LAYER_BACKWARD, GRADS_ROWS,
          VIEW("grads.kept", grads.kept, BIT(U8), 256, FREE_COLS | LOOSE), GRAD(d_x, OR_F32, 16),
          ROW("grads.kept", A_LONG, grads.kept.cols, .status = CUMOE_ERR_WORKSPACE))
static void fill_backward_ids(arguments *a)
{
  size_t bytes = 0;
  fill_forward_ids(a);
  CHECK_OK(cumoe_moe_backward_workspace(a->plan, TOKENS, 0, &bytes));
  a->grads = (cumoe_moe_grads){.size = sizeof a->grads,
                               .d_out = give(CUMOE_BF16, TOKENS, HIDDEN),
                               .d_pair_weights = give_mut(CUMOE_F32, TOKENS, TOP_K),
                               .workspace = give_mut(CUMOE_U8, 1, (int64_t)bytes)};
  a->pointer = &a->grads;
}
CALL_FORM(cumoe_moe_backward, ids, fill_backward_ids, LAYER_BACKWARD, GRADS_ROWS, GRAD(d_pair_weights, BIT(F32), 0),
          VIEW("args.ids", args.ids, INDICES, 0, 0), VIEW("args.weights", args.weights, BIT(F32), 0, 0))

/* ---- cumoe/stages.h ------------------------------------------------------------------------------------- */

static void fill_router(arguments *a)
{
  a->v[0] = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->v[1] = give(CUMOE_BF16, EXPERTS, HIDDEN);
  a->v[2] = give(CUMOE_F32, 1, EXPERTS);
  a->v[3] = give(CUMOE_F32, TOKENS, EXPERTS);
}
CALL(cumoe_router, fill_router, cumoe_router(a->context, a->v[0], a->v[1], a->v[2], as_mut(a->v[3]), no_stream),
     CONTEXT, VIEW("x", v[0], FLOATS, 16, LOOSE), VIEW("weight", v[1], OR_F32, 16, LOOSE),
     VIEW("bias", v[2], OR_F32, 0, OPTIONAL), VIEW("logits", v[3], BIT(F32), 0, OUT))

static void fill_gate(arguments *a)
{
  a->routing = cumoe_routing_deepseek_v3(TOP_K, 4, 2, 2.5f);
  a->v[0] = give(CUMOE_F32, TOKENS, EXPERTS);
  a->v[1] = give(CUMOE_F32, 1, EXPERTS);
  a->v[2] = give(CUMOE_I32, TOKENS, TOP_K);
  a->v[3] = give(CUMOE_F32, TOKENS, TOP_K);
  a->info = &a->routing;
}
CALL(cumoe_gate, fill_gate,
     cumoe_gate(a->context, a->info, a->v[0], a->v[1], as_mut(a->v[2]), as_mut(a->v[3]), no_stream), CONTEXT,
     NOT_NULL("routing", info), RESERVE("routing", routing.reserved[7]), ROUTING_ROWS(routing),
     VIEW("logits", v[0], FLOATS, 0, LOOSE), VIEW("select_bias", v[1], BIT(F32), 0, OPTIONAL),
     VIEW("ids", v[2], INDICES, 0, OUT), VIEW("weights", v[3], BIT(F32), 0, OUT))

static void fill_router_with(arguments *a)
{
  a->router = (cumoe_router_args){.size = sizeof a->router,
                                  .x = give(CUMOE_BF16, TOKENS, HIDDEN),
                                  .weight = give(CUMOE_BF16, EXPERTS, HIDDEN),
                                  .bias = give(CUMOE_F32, 1, EXPERTS),
                                  .device_tokens = give(CUMOE_I32, 1, 1),
                                  .logits = give_mut(CUMOE_F32, TOKENS, EXPERTS)};
  a->info = &a->router;
}
CALL(cumoe_router_with, fill_router_with, cumoe_router_with(a->context, a->info, no_stream), CONTEXT,
     NOT_NULL("args", info), SIZE("args.size", router.size), FLAGS("args.flags", router.flags, 8),
     FLOAT("logit_scale", router.logit_scale), VIEW("x", router.x, FLOATS, 16, LOOSE),
     VIEW("weight", router.weight, OR_F32, 16, LOOSE), VIEW("bias", router.bias, OR_F32, 0, OPTIONAL),
     VIEW("args.device_tokens", router.device_tokens, BIT(I32), 0, OPTIONAL),
     VIEW("logits", router.logits, BIT(F32), 0, OUT))

static void fill_gate_with(arguments *a)
{
  a->gate = (cumoe_gate_args){.size = sizeof a->gate,
                              .routing = cumoe_routing_deepseek_v3(TOP_K, 4, 2, 2.5f),
                              .logits = give(CUMOE_F32, TOKENS, EXPERTS),
                              .select_bias = give(CUMOE_F32, 1, EXPERTS),
                              .expert_scale = give(CUMOE_F32, 1, EXPERTS),
                              .device_tokens = give(CUMOE_I32, 1, 1),
                              .ids = give_mut(CUMOE_I32, TOKENS, TOP_K),
                              .weights = give_mut(CUMOE_F32, TOKENS, TOP_K)};
  a->info = &a->gate;
}
static void fill_chosen_gate(arguments *a)
{
  fill_gate_with(a);
  a->gate.chosen = cumoe_const(a->gate.ids);
  a->gate.ids = no_view_mut();
  a->gate.select_bias = no_view();
}
#define GATE_ROWS                                                                                                      \
  CONTEXT, NOT_NULL("args", info), SIZE("args.size", gate.size), INT("args.reserved", gate.reserved, 0, 0),            \
      RESERVE("routing", gate.routing.reserved[7]), ROUTING_ROWS(gate.routing),                                        \
      VIEW("logits", gate.logits, FLOATS, 0, LOOSE),                                                                   \
      VIEW("args.expert_scale", gate.expert_scale, BIT(F32), 0, OPTIONAL),                                             \
      VIEW("args.device_tokens", gate.device_tokens, BIT(I32), 0, OPTIONAL),                                           \
      VIEW("weights", gate.weights, BIT(F32), 0, OUT)
CALL(cumoe_gate_with, fill_gate_with, cumoe_gate_with(a->context, a->info, no_stream), GATE_ROWS,
     VIEW("select_bias", gate.select_bias, BIT(F32), 0, OPTIONAL), VIEW("ids", gate.ids, INDICES, 0, OUT))
CALL_FORM(cumoe_gate_with, chosen, fill_chosen_gate, cumoe_gate_with(a->context, a->info, no_stream), GATE_ROWS,
          VIEW("args.chosen", gate.chosen, INDICES, 0, 0))

static void fill_route(arguments *a, int64_t tokens)
{
  a->plan = bench.plan;
  a->weights = bench.weights;
  a->route = (cumoe_route){.size = sizeof a->route,
                           .counts = give_mut(CUMOE_I32, 1, EXPERTS),
                           .offsets = give_mut(CUMOE_I32, 1, EXPERTS + 1),
                           .row_pair = give_mut(CUMOE_I32, 1, tokens * TOP_K),
                           .slot_row = give_mut(CUMOE_I32, tokens, TOP_K),
                           .device_tokens = give(CUMOE_I32, 1, 1)};
  if (bench.cpu) memset(a->route.counts.data, 0, EXPERTS * 4);
  if (bench.cpu && tokens == TOKENS) memset(a->route.slot_row.data, 0xff, PAIRS * 4);
  a->pointer = &a->route;
}
#define ROUTE_ROWS(traits, shape)                                                                                      \
  NOT_NULL("route", pointer), SIZE("route.size", route.size), INT("route.reserved", route.reserved, 0, 0),             \
      VIEW("route.counts", route.counts, BIT(I32), 0, traits),                                                         \
      VIEW("route.offsets", route.offsets, BIT(I32), 0, traits),                                                       \
      VIEW("route.row_pair", route.row_pair, BIT(I32), 0, traits),                                                     \
      VIEW("route.device_tokens", route.device_tokens, BIT(I32), 0, OPTIONAL),                                         \
      VIEW("route.slot_row", route.slot_row, BIT(I32), 0, traits | shape | PACKED)
#define WORKSPACE_STATUS .status = CUMOE_ERR_WORKSPACE

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
#define MAP_ROWS                                                                                                       \
  PLAN, VIEW("ids", v[0], INDICES, 0, LOOSE), VIEW("expert_map", v[1], BIT(I32), 0, OPTIONAL), ROUTE_ROWS(OUT, 0)
CALL(cumoe_map, fill_map, cumoe_map(a->plan, a->v[0], a->v[1], a->pointer, as_mut(a->v[2]), no_stream), MAP_ROWS)
CALL_FORM(cumoe_map, chunks, fill_long_map,
          cumoe_map(a->plan, a->v[0], a->v[1], a->pointer, as_mut(a->v[2]), no_stream), MAP_ROWS,
          ROW("workspace", A_VIEW, v[2], .types = BIT(U8), .align = 16, WORKSPACE_STATUS, .traits = FREE_COLS | OUT),
          ROW("workspace", A_LONG, v[2].cols, .low = 96, .high = 96, WORKSPACE_STATUS))

/* v[0]: [TOKENS or PAIRS, ...] in, v[1]: pair weights, v[2]: out */
static void fill_up(arguments *a)
{
  fill_route(a, TOKENS);
  a->v[0] = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->v[2] = give(CUMOE_BF16, PAIRS, INTER);
}
static void fill_weighing_up(arguments *a)
{
  fill_up(a);
  a->plan = bench.weighing_plan;
  a->v[1] = give(CUMOE_F32, TOKENS, TOP_K);
}
static void fill_permute(arguments *a)
{
  fill_up(a);
  a->v[2] = give(CUMOE_BF16, PAIRS, HIDDEN);
}
static void fill_up_permuted(arguments *a)
{
  fill_up(a);
  a->v[0] = give(CUMOE_BF16, PAIRS, HIDDEN);
}
static void fill_down(arguments *a)
{
  fill_route(a, TOKENS);
  a->v[0] = give(CUMOE_BF16, PAIRS, INTER);
  a->v[2] = give(CUMOE_BF16, PAIRS, HIDDEN);
}
#define LAYER_ROWS        FOREIGN_PLAN, WEIGHTS("weights", weights)
#define TOKEN_ROWS(name)  VIEW(name, v[0], BIT(BF16), 16, LOOSE), ROUTE_ROWS(0, 0)
#define PAIR_ROWS(name)   VIEW(name, v[0], BIT(BF16), 16, LEAST_ROWS), ROUTE_ROWS(0, LOOSE)
#define OUTPUT_ROWS(name) VIEW(name, v[2], BIT(BF16), 16, LEAST_ROWS | OUT)
#define UP(call)          call(a->plan, a->weights, a->v[0], a->pointer, a->v[1], as_mut(a->v[2]), no_stream)
CALL(cumoe_up, fill_up, UP(cumoe_up), LAYER_ROWS, TOKEN_ROWS("x"), OUTPUT_ROWS("h"))
CALL_FORM(cumoe_up, weighing, fill_weighing_up, UP(cumoe_up), LAYER_ROWS, TOKEN_ROWS("x"), OUTPUT_ROWS("h"),
          VIEW("pair_weights", v[1], BIT(F32), 0, 0))
CALL(cumoe_permute, fill_permute, cumoe_permute(a->plan, a->v[0], a->pointer, as_mut(a->v[2]), no_stream), PLAN,
     TOKEN_ROWS("x"), OUTPUT_ROWS("rows"))
CALL(cumoe_up_permuted, fill_up_permuted, UP(cumoe_up_permuted), LAYER_ROWS, PAIR_ROWS("rows"), OUTPUT_ROWS("h"))
CALL(cumoe_down, fill_down, cumoe_down(a->plan, a->weights, a->v[0], a->pointer, as_mut(a->v[2]), no_stream),
     LAYER_ROWS, PAIR_ROWS("h"), OUTPUT_ROWS("y"))

static void fill_combine(arguments *a)
{
  fill_route(a, TOKENS);
  a->combine = (cumoe_combine_args){.size = sizeof a->combine,
                                    .y = give(CUMOE_BF16, PAIRS, HIDDEN),
                                    .pair_weights = give(CUMOE_F32, TOKENS, TOP_K),
                                    .x = give(CUMOE_BF16, TOKENS, HIDDEN),
                                    .shared = give(CUMOE_BF16, TOKENS, HIDDEN),
                                    .shared_logit = give(CUMOE_F32, TOKENS, 1),
                                    .residual = give(CUMOE_BF16, TOKENS, HIDDEN),
                                    .device_tokens = give(CUMOE_I32, 1, 1),
                                    .out = give_mut(CUMOE_BF16, TOKENS, HIDDEN)};
  a->info = &a->combine;
}
CALL(cumoe_combine, fill_combine, cumoe_combine(a->plan, a->pointer, a->info, no_stream), PLAN, ROUTE_ROWS(0, LOOSE),
     NOT_NULL("args", info), SIZE("args.size", combine.size), VIEW("args.y", combine.y, BIT(BF16), 16, LEAST_ROWS),
     VIEW("args.pair_weights", combine.pair_weights, BIT(F32), 0, 0),
     VIEW("args.x", combine.x, BIT(BF16), 16, OPTIONAL), VIEW("args.shared", combine.shared, BIT(BF16), 16, OPTIONAL),
     VIEW("args.shared_logit", combine.shared_logit, BIT(F32), 0, OPTIONAL),
     VIEW("args.residual", combine.residual, BIT(BF16), 16, OPTIONAL | IN_PLACE),
     VIEW("args.device_tokens", combine.device_tokens, BIT(I32), 0, OPTIONAL),
     VIEW("args.out", combine.out, BIT(BF16), 16, OUT))

static void fill_masked(arguments *a)
{
  a->plan = bench.plan;
  a->weights = bench.weights;
  a->masked = (cumoe_masked_args){.size = sizeof a->masked,
                                  .capacity = TOKENS,
                                  .x = give(CUMOE_BF16, EXPERTS * TOKENS, HIDDEN),
                                  .counts = give(CUMOE_I32, 1, EXPERTS),
                                  .offsets = give(CUMOE_I32, 1, EXPERTS + 1),
                                  .out = give_mut(CUMOE_BF16, EXPERTS * TOKENS, HIDDEN),
                                  .workspace = give_mut(CUMOE_U8, 1, EXPERTS * TOKENS * INTER * 2)};
  if (bench.cpu) memset((void *)(uintptr_t)a->masked.counts.data, 0, EXPERTS * 4);
  a->info = &a->masked;
}
CALL(cumoe_masked_forward, fill_masked, cumoe_masked_forward(a->plan, a->weights, a->info, no_stream), FOREIGN_PLAN,
     WEIGHTS("weights", weights), NOT_NULL("args", info), SIZE("args.size", masked.size),
     INT("args.reserved", masked.reserved, 0, 0), LONG("args.capacity", masked.capacity, 0, CUMOE_MAX_PAIRS / EXPERTS),
     VIEW("args.x", masked.x, BIT(BF16), 16, 0), VIEW("args.counts", masked.counts, BIT(I32), 0, 0),
     VIEW("args.offsets", masked.offsets, BIT(I32), 0, 0), VIEW("args.out", masked.out, BIT(BF16), 16, OUT),
     VIEW("args.workspace", masked.workspace, BIT(U8), 256, FREE_COLS | OUT),
     ROW("args.workspace", A_LONG, masked.workspace.cols, .status = CUMOE_ERR_WORKSPACE))

CALL(cumoe_masked_workspace, fill_plan, cumoe_masked_workspace(a->plan, a->rows, a->out), PLAN,
     LONG("capacity", rows, 0, CUMOE_MAX_PAIRS / EXPERTS), NOT_NULL("bytes", out))

/* ---- cumoe/backward.h, the stages ----------------------------------------------------------------------- */

static void fill_gate_backward(arguments *a)
{
  size_t bytes = 0;
  CHECK_OK(cumoe_gate_backward_workspace(bench.context, TOKENS, EXPERTS, TOP_K, &bytes));
  a->gate_back = (cumoe_gate_backward_args){.size = sizeof a->gate_back,
                                            .routing = cumoe_routing_deepseek_v3(TOP_K, 4, 2, 2.5f),
                                            .logits = give(CUMOE_F32, TOKENS, EXPERTS),
                                            .ids = give(CUMOE_I32, TOKENS, TOP_K),
                                            .expert_scale = give(CUMOE_F32, 1, EXPERTS),
                                            .d_weights = give(CUMOE_F32, TOKENS, TOP_K),
                                            .device_tokens = give(CUMOE_I32, 1, 1),
                                            .d_logits = give_mut(CUMOE_F32, TOKENS, EXPERTS),
                                            .d_expert_scale = give_mut(CUMOE_F32, 1, EXPERTS),
                                            .losses = give_mut(CUMOE_F32, 1, 2),
                                            .workspace = give_mut(CUMOE_U8, 1, (int64_t)bytes)};
  a->info = &a->gate_back;
}
CALL(cumoe_gate_backward, fill_gate_backward, cumoe_gate_backward(a->context, a->info, no_stream), CONTEXT,
     NOT_NULL("args", info), SIZE("args.size", gate_back.size), FLAGS("args.flags", gate_back.flags, 1),
     RESERVE("routing", gate_back.routing.reserved[7]), ROUTING_ROWS(gate_back.routing),
     VIEW("args.logits", gate_back.logits, FLOATS, 0, LOOSE), VIEW("args.ids", gate_back.ids, INDICES, 0, 0),
     VIEW("args.expert_scale", gate_back.expert_scale, BIT(F32), 0, LOOSE),
     VIEW("args.d_weights", gate_back.d_weights, BIT(F32), 0, OPTIONAL),
     VIEW("args.device_tokens", gate_back.device_tokens, BIT(I32), 0, OPTIONAL),
     VIEW("args.d_logits", gate_back.d_logits, BIT(F32), 0, OUT),
     VIEW("args.d_expert_scale", gate_back.d_expert_scale, BIT(F32), 0, OPTIONAL | OUT),
     VIEW("args.losses", gate_back.losses, BIT(F32), 0, OPTIONAL | OUT),
     VIEW("args.workspace", gate_back.workspace, BIT(U8), 256, FREE_COLS | OUT),
     ROW("args.workspace", A_LONG, gate_back.workspace.cols, WORKSPACE_STATUS))

static void fill_gate_sizes(arguments *a)
{
  a->rows = TOKENS;
  a->index = EXPERTS;
  a->dtype = TOP_K;
}
CALL(cumoe_gate_backward_workspace, fill_gate_sizes,
     cumoe_gate_backward_workspace(a->context, a->rows, a->index, a->dtype, a->out), CONTEXT,
     LONG("tokens", rows, 0, CUMOE_MAX_PAIRS / TOP_K), INT("experts", index, 1, CUMOE_MAX_EXPERTS),
     INT("top_k", dtype, 1, CUMOE_MAX_TOP_K), NOT_NULL("bytes", out))

static void fill_down_backward(arguments *a)
{
  fill_down(a);
  const cumoe_view h = a->v[0];
  a->v[0] = a->v[2];
  a->v[2] = h;
}
static void fill_up_backward(arguments *a)
{
  fill_route(a, TOKENS);
  a->v[0] = give(CUMOE_BF16, PAIRS, 2 * INTER);
  a->v[2] = give(CUMOE_F32, PAIRS, HIDDEN);
}
#define PRODUCT(call) call(a->plan, a->weights, a->v[0], a->pointer, as_mut(a->v[2]), no_stream), LAYER_ROWS
CALL(cumoe_down_backward, fill_down_backward, PRODUCT(cumoe_down_backward), PAIR_ROWS("d_y"),
     VIEW("d_h", v[2], OR_F32, 16, LEAST_ROWS | OUT))
CALL(cumoe_up_backward, fill_up_backward, PRODUCT(cumoe_up_backward), PAIR_ROWS("d_z"),
     VIEW("d_rows", v[2], OR_F32, 16, LEAST_ROWS | OUT))

static void fill_weights_backward(arguments *a)
{
  fill_route(a, TOKENS);
  a->plan = bench.weighing_plan;
  a->weights = bench.d_weights;
  a->weights_back = (cumoe_weights_backward_args){.size = sizeof a->weights_back,
                                                  .x = give(CUMOE_BF16, TOKENS, HIDDEN),
                                                  .d_z = give(CUMOE_BF16, PAIRS, 2 * INTER),
                                                  .h = give(CUMOE_BF16, PAIRS, INTER),
                                                  .d_y = give(CUMOE_BF16, PAIRS, HIDDEN),
                                                  .pair_weights = give(CUMOE_F32, TOKENS, TOP_K)};
  a->info = &a->weights_back;
}
CALL(cumoe_weights_backward, fill_weights_backward,
     cumoe_weights_backward(a->plan, a->weights, a->pointer, a->info, no_stream), FOREIGN_PLAN,
     WEIGHTS("d_weights", weights), NOT_NULL("args", info), SIZE("args.size", weights_back.size),
     FLAGS("args.flags", weights_back.flags, 1), VIEW("args.x", weights_back.x, BIT(BF16), 16, LOOSE),
     VIEW("args.d_z", weights_back.d_z, BIT(BF16), 16, LEAST_ROWS),
     VIEW("args.h", weights_back.h, BIT(BF16), 16, LEAST_ROWS),
     VIEW("args.d_y", weights_back.d_y, BIT(BF16), 16, LEAST_ROWS),
     VIEW("args.pair_weights", weights_back.pair_weights, BIT(F32), 0, 0), ROUTE_ROWS(0, 0))

static void fill_variant(arguments *a)
{
  a->variant_info.size = sizeof a->variant_info;
  a->info = &a->variant_info;
  for (a->index = 0; a->index < cumoe_variant_count(); a->index++) {
    cumoe_variant_info v = {.size = sizeof v};
    if (cumoe_variant_get(bench.context, a->index, &v) == CUMOE_OK && v.usable) return;
  }
}
static void undo_force(arguments *a)
{
  CHECK_OK(cumoe_variant_force(a->context, -1));
}
CALL(cumoe_variant_get, fill_variant, cumoe_variant_get(a->context, a->index, a->info), CONTEXT,
     INT("index", index, 0, 9999), NOT_NULL("info", info), SIZE("info.size", variant_info.size))
CALL_UNDO(cumoe_variant_force, fill_variant, undo_force, cumoe_variant_force(a->context, a->index), CONTEXT,
          INT("index", index, -1, 9999))

enum { LIMITS = 21 }; /* no_status holds it against cumoe_limit_count() */
static void fill_limit(arguments *a)
{
  a->limit_info.size = sizeof a->limit_info;
  a->info = &a->limit_info;
  a->number = 8;
}
CALL(cumoe_limit_get, fill_limit, cumoe_limit_get(a->context, a->index, a->info), CONTEXT,
     INT("index", index, 0, LIMITS - 1), NOT_NULL("info", info), SIZE("info.size", limit_info.size))
CALL(cumoe_limit_set, fill_limit, cumoe_limit_set(a->context, a->index, a->dtype, (double)a->number), CONTEXT,
     INT("index", index, 0, LIMITS - 1), INT("weights", dtype, 0, 4))

/* ---- cumoe/stream.h ------------------------------------------------------------------------------------- */

static void fill_stream(arguments *a)
{
  a->pointer = bench.event;
}
static void undo_stream(arguments *a)
{
  CHECK_OK(cumoe_stream_destroy(a->context, *(cumoe_stream *)a->out));
}
static void undo_event(arguments *a)
{
  CHECK_OK(cumoe_event_destroy(a->context, *(cumoe_event *)a->out));
}
#define EVENT ON_CUDA_NOT_NULL("event", pointer)
CALL_UNDO(cumoe_stream_create, fill_stream, undo_stream, cumoe_stream_create(a->context, -1, a->out), CONTEXT,
          NOT_NULL("stream", out))
CALL(cumoe_stream_destroy, fill_stream, cumoe_stream_destroy(a->context, NULL), CONTEXT)
CALL(cumoe_stream_query, fill_stream, cumoe_stream_query(a->context, no_stream, a->out), CONTEXT,
     NOT_NULL("progress", out))
CALL(cumoe_stream_join, fill_stream, cumoe_stream_join(a->context, no_stream, bench.stream), CONTEXT)
CALL_UNDO(cumoe_event_create, fill_stream, undo_event, cumoe_event_create(a->context, a->flags, a->out), CONTEXT,
          NOT_NULL("event", out), FLAGS("flags", flags, 3))
CALL(cumoe_event_destroy, fill_stream, cumoe_event_destroy(a->context, NULL), CONTEXT)
CALL(cumoe_event_record, fill_stream, cumoe_event_record(a->context, a->pointer, no_stream), CONTEXT, EVENT)
CALL(cumoe_event_wait, fill_stream, cumoe_event_wait(a->context, a->pointer, no_stream), CONTEXT, EVENT)
CALL(cumoe_event_synchronize, fill_stream, cumoe_event_synchronize(a->context, a->pointer), CONTEXT, EVENT)
CALL(cumoe_event_query, fill_stream, cumoe_event_query(a->context, a->pointer, a->out), CONTEXT, EVENT,
     NOT_NULL("progress", out))
CALL_FORM(cumoe_event_elapsed, from, fill_stream,
          unless_cpu(cumoe_event_elapsed(a->context, a->pointer, bench.event, a->out)), CONTEXT,
          ON_CUDA_NOT_NULL("first", pointer), NOT_NULL("milliseconds", out))
CALL_FORM(cumoe_event_elapsed, to, fill_stream,
          unless_cpu(cumoe_event_elapsed(a->context, bench.event, a->pointer, a->out)), CONTEXT,
          ON_CUDA_NOT_NULL("last", pointer), NOT_NULL("milliseconds", out))

static void fill_graph(arguments *a)
{
  a->pointer = bench.graph;
  a->info = bench.stream;
}
static void fill_graph_end(arguments *a)
{
  fill_graph(a);
  CHECK_OK(unless_cpu(cumoe_graph_begin(bench.context, bench.stream)));
}
static void undo_graph_end(arguments *a)
{
  CHECK_OK(cumoe_graph_destroy(a->context, *(cumoe_graph *)a->out));
}
static void undo_graph_begin(arguments *a)
{
  CHECK_OK(unless_cpu(cumoe_graph_end(a->context, bench.stream, a->out)));
  undo_graph_end(a);
}
#define GRAPH  ON_CUDA_NOT_NULL("graph", pointer)
#define STREAM ON_CUDA_NOT_NULL("stream", info)
CALL(cumoe_graph_status, fill_graph, cumoe_graph_status(a->context, bench.stream, a->out), CONTEXT,
     NOT_NULL("capture", out))
CALL_UNDO(cumoe_graph_begin, fill_graph, undo_graph_begin, unless_cpu(cumoe_graph_begin(a->context, a->info)), CONTEXT,
          STREAM)
CALL_UNDO(cumoe_graph_end, fill_graph_end, undo_graph_end, unless_cpu(cumoe_graph_end(a->context, a->info, a->out)),
          CONTEXT, STREAM, NOT_NULL("graph", out))
CALL(cumoe_graph_launch, fill_graph, unless_cpu(cumoe_graph_launch(a->context, a->pointer, no_stream)), CONTEXT, GRAPH)
CALL(cumoe_graph_upload, fill_graph, unless_cpu(cumoe_graph_upload(a->context, a->pointer, no_stream)), CONTEXT, GRAPH)
CALL(cumoe_graph_destroy, fill_graph, cumoe_graph_destroy(a->context, NULL), CONTEXT)

/* ---- cumoe/kernel.h ------------------------------------------------------------------------------------- */

static const char ptx_text[] = ".version 8.0\n.target sm_80\n.address_size 64\n";
static const char *const options[] = {"-lineinfo"};

static void fill_image(arguments *a)
{
  a->host = ptx_text;
  a->bytes = sizeof ptx_text;
}
static void undo_module(arguments *a)
{
  CHECK_OK(cumoe_module_unload(a->out));
}
static void fill_path(arguments *a)
{
  a->host = "include/cumoe/kernel.h";
}
/* A file that is no device code: the answer says that it was read. */
static cumoe_status unless_read(cumoe_status status)
{
  const bool read = status == CUMOE_ERR_INVALID_ARGUMENT && strstr(cumoe_last_error(), ": image: ") != NULL;
  return read ? CUMOE_OK : status;
}
static void fill_source(arguments *a)
{
  a->host = "extern \"C\" __global__ void nothing() {}";
  a->info = (void *)(uintptr_t) "compute_80";
  a->pointer = (void *)(uintptr_t)options;
  a->index = 1;
}
/* A machine may do without NVRTC. */
static cumoe_status unless_missing(cumoe_status status)
{
  return status == CUMOE_ERR_LIBRARY_MISSING ? CUMOE_OK : unless_cpu(status);
}
static void undo_compile(arguments *a)
{
  cumoe_image_free(a->out);
}
#define SOURCE_ROWS                                                                                                    \
  NOT_NULL("source", host), NOT_NULL("options", pointer), STEPS("option_count", index, 0, 256, 1, LOOSE),              \
      VALUE("log", bytes, 1, INVALID_ARGUMENT)
CALL_UNDO(cumoe_module_load, fill_image, undo_module,
          unless_cpu(cumoe_module_load(a->context, a->host, a->bytes, a->out)), CONTEXT, NOT_NULL("image", host),
          NOT_NULL("module", out))
CALL(cumoe_module_load_file, fill_path, unless_read(cumoe_module_load_file(a->context, a->host, a->out)), CONTEXT,
     NOT_NULL("path", host), NOT_NULL("module", out))
CALL_UNDO(cumoe_module_compile, fill_source, undo_module,
          unless_missing(cumoe_module_compile(a->context, a->host, a->pointer, a->index, NULL, a->bytes, a->out)),
          CONTEXT, SOURCE_ROWS, NOT_NULL("module", out))
CALL_UNDO(cumoe_compile, fill_source, undo_compile,
          unless_missing(cumoe_compile(a->host, a->info, a->pointer, a->index, NULL, a->bytes, a->out)), SOURCE_ROWS,
          NOT_NULL("target", info), NOT_NULL("image", out))

static void fill_module(arguments *a)
{
  a->object = bench.module.id;
  a->host = "add";
  a->dtype = CUMOE_F32;
  a->flags = 1024;
}
static void fill_global(arguments *a)
{
  fill_module(a);
  a->host = "counter";
}
/* The bench's own module stays. */
static cumoe_status unload(arguments *a)
{
  cumoe_module none = {0}, module = {a->object};
  return cumoe_module_unload(a->out == NULL ? NULL : a->object == bench.module.id ? &none : &module);
}
CALL(cumoe_module_unload, fill_module, unload(a), ROW("module", A_OBJECT, object, .traits = OPTIONAL),
     NOT_NULL("module", out))
ON_CUDA(cumoe_module_function, fill_module, cumoe_module_function((cumoe_module){a->object}, a->host, a->flags, a->out),
        OBJECT("module"), NOT_NULL("name", host), NOT_NULL("function", out))
ON_CUDA(cumoe_module_global, fill_global,
        cumoe_module_global((cumoe_module){a->object}, a->host, (cumoe_dtype)a->dtype, a->out), OBJECT("module"),
        NOT_NULL("name", host), TYPE("dtype", dtype, ANY_TYPE), NOT_NULL("global", out))

static void fill_function(arguments *a)
{
  a->object = bench.function.id;
  a->function_info.size = sizeof a->function_info;
  a->info = &a->function_info;
}
static void fill_launch(arguments *a)
{
  fill_function(a);
  a->launch = cumoe_launch_elements(1000, no_stream);
  a->occupancy.size = sizeof a->occupancy;
  a->info = &a->launch;
  a->index = 4;
}
static cumoe_status launch_kernel(arguments *a)
{
  static cumoe_arg list[4];
  for (int i = 0; i < 3; i++) list[i] = cumoe_arg_view(cumoe_buffer_view(bench.buffer));
  list[3] = cumoe_arg_i32(1000);
  return cumoe_launch_kernel((cumoe_function){a->object}, a->info, a->out == NULL ? NULL : list, a->index);
}
ON_CUDA(cumoe_function_get_info, fill_function, cumoe_function_get_info((cumoe_function){a->object}, a->info),
        OBJECT("function"), NOT_NULL("info", info), SIZE("info.size", function_info.size))
ON_CUDA(cumoe_function_block, fill_function, cumoe_function_block((cumoe_function){a->object}, 0, a->out),
        OBJECT("function"), NOT_NULL("threads", out))
#define LAUNCH_ROWS                                                                                                    \
  OBJECT("function"), NOT_NULL("launch", info), SIZE("launch.size", launch.size),                                      \
      FLAGS("launch.flags", launch.flags, 3), INT("launch.block[0]", launch.block[0], 1, 1024),                        \
      INT("launch.block", launch.block[1], 0, 4), INT("launch.block", launch.block[2], 0, 4),                          \
      INT("launch.cluster", launch.cluster[0], 0, 8), INT("launch.cluster", launch.cluster[2], 0, 8),                  \
      INT("launch.dynamic_smem", launch.dynamic_smem, 0, 48 * 1024)
ON_CUDA(cumoe_function_occupancy, fill_launch,
        cumoe_function_occupancy((cumoe_function){a->object}, a->info, a->out == NULL ? NULL : &a->occupancy),
        LAUNCH_ROWS, NOT_NULL("occupancy", out), SIZE("occupancy.size", occupancy.size))
ON_CUDA(cumoe_launch_kernel, fill_launch, launch_kernel(a), LAUNCH_ROWS,
        INT("launch.grid[0]", launch.grid[0], 0, INT32_MAX), INT("launch.grid[1]", launch.grid[1], 1, 65535),
        INT("launch.grid[2]", launch.grid[2], 1, 65535), INT("arg_count", index, 4, 4), NOT_NULL("args", out))

/* ---- cumoe/ops.h ---------------------------------------------------------------------------------------- */

static void fill_elementwise(arguments *a)
{
  for (int i = 0; i < 3; i++) a->v[i] = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->v[3] = give(CUMOE_F32, 1, HIDDEN);
  a->v[4] = give(CUMOE_BF16, 1, HIDDEN);
  a->number = 1e-5f;
}
#define OPERAND(name, member) VIEW(name, member, FLOATS, 0, LOOSE | IN_PLACE)
#define RESULT                VIEW("y", v[2], BIT(BF16), 0, OUT)
#define BINARY(name)                                                                                                   \
  CALL(name, fill_elementwise, name(a->context, a->v[0], a->v[1], as_mut(a->v[2]), no_stream), CONTEXT,                \
       OPERAND("a", v[0]), VIEW("b", v[1], BIT(BF16), 0, IN_PLACE), RESULT)
#define UNARY(name)                                                                                                    \
  CALL(name, fill_elementwise, name(a->context, a->v[0], as_mut(a->v[2]), no_stream), CONTEXT, OPERAND("x", v[0]),     \
       RESULT)
BINARY(cumoe_add)
BINARY(cumoe_mul)
UNARY(cumoe_relu)
UNARY(cumoe_sigmoid)
UNARY(cumoe_silu)
UNARY(cumoe_gelu)
UNARY(cumoe_gelu_tanh)
UNARY(cumoe_softmax)
CALL(cumoe_scale, fill_elementwise, cumoe_scale(a->context, a->number, a->v[0], as_mut(a->v[2]), no_stream), CONTEXT,
     OPERAND("x", v[0]), RESULT)
#define NORM_ROWS CONTEXT, OPERAND("x", v[0]), RESULT, FLOAT("eps", number), VIEW("weight", v[3], OR_F32, 0, OPTIONAL)
CALL(cumoe_rmsnorm, fill_elementwise,
     cumoe_rmsnorm(a->context, a->v[0], a->v[3], a->number, as_mut(a->v[2]), no_stream), NORM_ROWS)
CALL(cumoe_layernorm, fill_elementwise,
     cumoe_layernorm(a->context, a->v[0], a->v[3], a->v[4], a->number, as_mut(a->v[2]), no_stream), NORM_ROWS,
     VIEW("bias", v[4], OR_F32, 0, OPTIONAL))

static void fill_matmul(arguments *a)
{
  size_t bytes = 0;
  CHECK_OK(cumoe_matmul_workspace(bench.context, &bytes));
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
static cumoe_status matmul(arguments *a)
{
  const bool same = a->context == bench.context && a->info && !memcmp(&a->matmul, &right.matmul, sizeof a->matmul);
  return same && !bench.cpu ? CUMOE_OK : cumoe_matmul(a->context, a->info, no_stream);
}
static cumoe_status matmul_prepare(arguments *a)
{
  return a->context == bench.context && !bench.cpu ? CUMOE_OK : cumoe_matmul_prepare(a->context);
}
#define WRONG_STRIDE(name, wrong) VALUE("args." #name, matmul.name, wrong, INVALID_ARGUMENT)
CALL(cumoe_matmul, fill_matmul, matmul(a), CONTEXT, NOT_NULL("args", info), SIZE("args.size", matmul.size),
     FLAGS("args.flags", matmul.flags, 7), WRONG_STRIDE(batch, -1), WRONG_STRIDE(batch, INT64_MIN),
     VALUE("", matmul.batch, INT64_MAX, INVALID_ARGUMENT), WRONG_STRIDE(a_stride, -1),
     WRONG_STRIDE(b_stride, INT64_MIN), WRONG_STRIDE(b_stride, INT64_MAX), WRONG_STRIDE(c_stride, -1),
     WRONG_STRIDE(c_stride, 0), WRONG_STRIDE(c_stride, TOKENS *INTER - 1), VIEW("args.a", matmul.a, FLOATS, 0, LOOSE),
     VIEW("args.b", matmul.b, BIT(BF16), 0, LOOSE), VIEW("args.c", matmul.c, OR_F32, 0, LOOSE | OUT))
CALL(cumoe_matmul_workspace, fill_context, cumoe_matmul_workspace(a->context, a->out), CONTEXT, NOT_NULL("bytes", out))
CALL(cumoe_matmul_prepare, fill_context, matmul_prepare(a), CONTEXT)

/* ---- cumoe/train.h -------------------------------------------------------------------------------------- */

#define WORKSPACE_ROWS(member)                                                                                         \
  VIEW("args.workspace", member, BIT(U8), 256, FREE_COLS | OUT),                                                       \
      ROW("args.workspace", A_LONG, member.cols, .status = CUMOE_ERR_WORKSPACE)
#define TRAIN_CALL(name, fill, ...)                                                                                    \
  CALL(name, fill, name(a->context, a->info, no_stream), CONTEXT, NOT_NULL("args", info), __VA_ARGS__)

#define BACKWARD(name, given)                                                                                          \
  CALL(name, fill_elementwise, name(a->context, a->v[0], a->v[1], as_mut(a->v[2]), no_stream), CONTEXT,                \
       OPERAND(given, v[0]), VIEW("dy", v[1], BIT(BF16), 0, IN_PLACE), VIEW("dx", v[2], BIT(BF16), 0, OUT))
BACKWARD(cumoe_relu_backward, "x")
BACKWARD(cumoe_sigmoid_backward, "x")
BACKWARD(cumoe_silu_backward, "x")
BACKWARD(cumoe_gelu_backward, "x")
BACKWARD(cumoe_gelu_tanh_backward, "x")
BACKWARD(cumoe_softmax_backward, "y")

static void fill_embedding(arguments *a)
{
  a->v[0] = give(CUMOE_BF16, EXPERTS, HIDDEN);
  a->v[1] = give(CUMOE_I32, 1, TOKENS);
  a->v[2] = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->rows = TOKENS;
  a->cols = EXPERTS;
  a->embedding = (cumoe_embedding_backward_args){.size = sizeof a->embedding, .dy = a->v[2], .ids = a->v[1]};
  a->embedding.dtable = give_mut(CUMOE_F32, EXPERTS, HIDDEN);
  a->embedding.workspace = give_mut(CUMOE_U8, 1, 4 * (EXPERTS + 1 + TOKENS));
  a->info = &a->embedding;
}
CALL(cumoe_embedding, fill_embedding, cumoe_embedding(a->context, a->v[0], a->v[1], as_mut(a->v[2]), no_stream),
     CONTEXT, VIEW("table", v[0], FLOATS, 0, LOOSE | FREE_ROWS), VIEW("ids", v[1], INDICES, 0, LOOSE),
     VIEW("y", v[2], BIT(BF16), 0, LOOSE | OUT))
TRAIN_CALL(cumoe_embedding_backward, fill_embedding, SIZE("args.size", embedding.size),
           FLAGS("args.flags", embedding.flags, 1), VIEW("args.dy", embedding.dy, FLOATS, 0, LOOSE),
           VIEW("args.ids", embedding.ids, INDICES, 0, LOOSE),
           VIEW("args.dtable", embedding.dtable, OR_F32, 0, LOOSE | OUT | FREE_ROWS),
           WORKSPACE_ROWS(embedding.workspace))
CALL(cumoe_embedding_backward_workspace, fill_embedding,
     cumoe_embedding_backward_workspace(a->context, a->rows, a->cols, a->out), CONTEXT,
     LONG("tokens", rows, 0, INT32_MAX), LONG("vocabulary", cols, 0, INT32_MAX), NOT_NULL("bytes", out))

static void fill_norm(arguments *a)
{
  a->rows = TOKENS;
  a->cols = HIDDEN;
  a->norm = (cumoe_norm_backward_args){.size = sizeof a->norm, .eps = 1e-5f};
  a->norm.x = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->norm.weight = give(CUMOE_F32, 1, HIDDEN);
  a->norm.dy = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->norm.dx = give_mut(CUMOE_BF16, TOKENS, HIDDEN);
  a->norm.dweight = give_mut(CUMOE_F32, 1, HIDDEN);
  size_t bytes = 0; /* a CUDA device has sums of runs of rows besides */
  CHECK_OK(cumoe_norm_backward_workspace(bench.context, TOKENS, HIDDEN, &bytes));
  a->norm.workspace = give_mut(CUMOE_U8, 1, (int64_t)bytes);
  a->info = &a->norm;
}
static void fill_layernorm(arguments *a)
{
  fill_norm(a);
  a->norm.dbias = give_mut(CUMOE_BF16, 1, HIDDEN);
}
#define NORM_BACKWARD_ROWS                                                                                             \
  SIZE("args.size", norm.size), FLAGS("args.flags", norm.flags, 1), FLOAT("args.eps", norm.eps),                       \
      INT("args.reserved", norm.reserved, 0, 0), VIEW("args.x", norm.x, FLOATS, 0, LOOSE),                             \
      VIEW("args.weight", norm.weight, OR_F32, 0, OPTIONAL), VIEW("args.dy", norm.dy, BIT(BF16), 0, IN_PLACE),         \
      VIEW("args.dx", norm.dx, BIT(BF16), 0, OPTIONAL | OUT),                                                          \
      VIEW("args.dweight", norm.dweight, OR_F32, 0, OPTIONAL | OUT), WORKSPACE_ROWS(norm.workspace)
TRAIN_CALL(cumoe_rmsnorm_backward, fill_norm, NORM_BACKWARD_ROWS)
TRAIN_CALL(cumoe_layernorm_backward, fill_layernorm, NORM_BACKWARD_ROWS,
           VIEW("args.dbias", norm.dbias, OR_F32, 0, OPTIONAL | OUT))
CALL(cumoe_norm_backward_workspace, fill_norm, cumoe_norm_backward_workspace(a->context, a->rows, a->cols, a->out),
     CONTEXT, LONG("rows", rows, 0, MOST / HIDDEN), LONG("cols", cols, 0, INT32_MAX), NOT_NULL("bytes", out))

static void fill_loss(arguments *a)
{
  a->loss = (cumoe_cross_entropy_args){.size = sizeof a->loss, .flags = CUMOE_LOSS_IGNORE, .ignore = 2};
  a->loss.logits = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->loss.targets = give(CUMOE_I32, 1, TOKENS);
  a->loss.loss = give_mut(CUMOE_F32, 1, 1);
  a->loss.losses = give_mut(CUMOE_F32, 1, TOKENS);
  a->loss.counted = give_mut(CUMOE_I64, 1, 1);
  a->loss.dlogits = give_mut(CUMOE_BF16, TOKENS, HIDDEN);
  a->info = &a->loss;
}
TRAIN_CALL(cumoe_cross_entropy, fill_loss, SIZE("args.size", loss.size), INT("args.reserved", loss.reserved, 0, 0),
           VIEW("args.logits", loss.logits, FLOATS, 0, LOOSE | IN_PLACE),
           VIEW("args.targets", loss.targets, INDICES, 0, 0), VIEW("args.loss", loss.loss, BIT(F32), 0, OUT),
           VIEW("args.losses", loss.losses, BIT(F32), 0, OUT), VIEW("args.counted", loss.counted, BIT(I64), 0, OUT),
           VIEW("args.dlogits", loss.dlogits, BIT(BF16), 0, OPTIONAL | OUT))

static void fill_global_norm(arguments *a)
{
  a->v[0] = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->v[1] = give(CUMOE_F32, 1, HIDDEN);
  a->global = (cumoe_global_norm_args){.size = sizeof a->global, .max_norm = 1, .gradients = a->v, .count = 2};
  a->global.norm = give_mut(CUMOE_F32, 1, 1);
  a->global.factor = give_mut(CUMOE_F32, 1, 1);
  a->global.step = give_mut(CUMOE_I64, 1, 1);
  a->global.workspace = give_mut(CUMOE_U8, 1, 8 * (TOKENS + 1));
  a->info = &a->global;
}
/* The list of gradients is the one of these arguments. */
static cumoe_status global_norm(arguments *a)
{
  cumoe_global_norm_args args = a->global;
  if (args.gradients) args.gradients = a->v;
  return cumoe_global_norm(a->context, a->info ? &args : NULL, no_stream);
}
CALL(cumoe_global_norm, fill_global_norm, global_norm(a), CONTEXT, NOT_NULL("args", info),
     SIZE("args.size", global.size), FLOAT("args.max_norm", global.max_norm),
     INT("args.reserved", global.reserved, 0, 0), NOT_NULL("gradients", global.gradients),
     VALUE("count", global.count, -1, INVALID_ARGUMENT), VALUE("count", global.count, (1 << 20) + 1, INVALID_ARGUMENT),
     VIEW("gradients", v[0], FLOATS, 0, LOOSE | FREE_ROWS | FREE_COLS),
     VIEW("gradients", v[1], FLOATS, 0, LOOSE | FREE_ROWS | FREE_COLS),
     VIEW("args.norm", global.norm, BIT(F32), 0, OUT), VIEW("args.factor", global.factor, BIT(F32), 0, OUT),
     VIEW("args.step", global.step, BIT(I64), 0, OPTIONAL | OUT), WORKSPACE_ROWS(global.workspace))
CALL(cumoe_global_norm_workspace, fill_global_norm,
     cumoe_global_norm_workspace(a->context, a->v, a->global.count, a->out), CONTEXT,
     VALUE("count", global.count, -1, INVALID_ARGUMENT),
     VIEW("gradients", v[0], FLOATS, 0, LOOSE | FREE_ROWS | FREE_COLS), NOT_NULL("bytes", out))

static void fill_adamw(arguments *a)
{
  a->adamw = (cumoe_adamw_args){.size = sizeof a->adamw, .rate = 1e-3f, .decay = .1f};
  a->adamw.gradient = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->adamw.step = give(CUMOE_I64, 1, 1);
  a->adamw.factor = give(CUMOE_F32, 1, 1);
  a->adamw.schedule = give(CUMOE_F32, 1, 1);
  a->adamw.master = give_mut(CUMOE_F32, TOKENS, HIDDEN);
  a->adamw.first = give_mut(CUMOE_F32, TOKENS, HIDDEN);
  a->adamw.second = give_mut(CUMOE_F32, TOKENS, HIDDEN);
  a->adamw.weights = give_mut(CUMOE_BF16, TOKENS, HIDDEN);
  a->info = &a->adamw;
}
#define STATE(name) VIEW("args." #name, adamw.name, BIT(F32), 0, LOOSE | OUT)
TRAIN_CALL(cumoe_adamw, fill_adamw, SIZE("args.size", adamw.size), FLAGS("args.flags", adamw.flags, 0),
           FLOAT("args.rate", adamw.rate), FLOAT("args.beta1", adamw.beta1), FLOAT("args.beta2", adamw.beta2),
           FLOAT("args.eps", adamw.eps), FLOAT("args.decay", adamw.decay), INT("args.reserved", adamw.reserved, 0, 0),
           VIEW("args.gradient", adamw.gradient, FLOATS, 0, LOOSE), VIEW("args.step", adamw.step, BIT(I64), 0, 0),
           VIEW("args.factor", adamw.factor, BIT(F32), 0, OPTIONAL),
           VIEW("args.schedule", adamw.schedule, BIT(F32), 0, OPTIONAL), STATE(master), STATE(first), STATE(second),
           VIEW("args.weights", adamw.weights, FLOATS, 0, OPTIONAL | OUT))

/* ---- cumoe/attention.h ---------------------------------------------------------------------------------- */

static void fill_attention(arguments *a)
{
  cumoe_attention_args *t = &a->attention;
  *t = (cumoe_attention_args){.size = sizeof *t, .heads = 4, .kv_heads = 2, .head_dim = 16, .window = 2, .softcap = 30};
  t->q = give(CUMOE_BF16, TOKENS, 64);
  t->k = give(CUMOE_BF16, 2 * TOKENS, 32);
  t->v = give(CUMOE_BF16, 2 * TOKENS, 32);
  t->q_offsets = give(CUMOE_I32, 1, 3);
  t->k_offsets = give(CUMOE_I32, 1, 3);
  t->k_lengths = give(CUMOE_I32, 1, 2);
  t->sinks = give(CUMOE_F32, 1, 4);
  t->out = give_mut(CUMOE_BF16, TOKENS, 64);
  t->lse = give_mut(CUMOE_F32, TOKENS, 4);
  a->info = t;
}
static void fill_paged(arguments *a)
{
  fill_attention(a);
  a->attention.page = 2;
  a->attention.k_offsets = no_view();
  a->attention.pages = give(CUMOE_I32, 2, 3);
}
static void fill_attended(arguments *a)
{
  fill_attention(a);
  a->attended = (cumoe_attention_backward_args){.size = sizeof a->attended, .forward = &a->attention};
  a->attended.dout = give(CUMOE_BF16, TOKENS, 64);
  a->attended.dq = give_mut(CUMOE_BF16, TOKENS, 64);
  a->attended.dk = give_mut(CUMOE_BF16, 2 * TOKENS, 32);
  a->attended.dv = give_mut(CUMOE_BF16, 2 * TOKENS, 32);
  a->attended.dsinks = give_mut(CUMOE_F32, 1, 4);
  a->attended.delta = give_mut(CUMOE_F32, TOKENS, 4);
  a->info = &a->attended;
}
/* The forward call is the one of these arguments. */
static cumoe_status attention_backward(arguments *a)
{
  cumoe_attention_backward_args args = a->attended;
  if (args.forward) args.forward = &a->attention;
  return cumoe_attention_backward(a->context, a->info ? &args : NULL, no_stream);
}
#define HEADS_ROWS                                                                                                     \
  FLAGS("flags", attention.flags, 1), INT("heads", attention.heads, 4, 4), INT("", attention.kv_heads, 2, 2),          \
      ROW("head_dim", A_INT, attention.head_dim, .low = 8, .high = 256, .step = 8),                                    \
      INT("page", attention.page, 0, INT32_MAX), INT("window", attention.window, 0, INT32_MAX),                        \
      INT("reserved", attention.reserved, 0, 0), FLOAT("softcap", attention.softcap),                                  \
      VIEW("q", attention.q, FLOATS, 0, LOOSE), VIEW("k", attention.k, BIT(BF16), 0, LOOSE),                           \
      VIEW("v", attention.v, BIT(BF16), 0, 0), VIEW("q_offsets", attention.q_offsets, BIT(I32), 0, OPTIONAL | LOOSE),  \
      VIEW("k_lengths", attention.k_lengths, BIT(I32), 0, OPTIONAL),                                                   \
      VIEW("sinks", attention.sinks, OR_F32, 0, OPTIONAL)
#define ATTENTION(form, fill, ...)                                                                                     \
  CALL_FORM(cumoe_attention, form, fill, cumoe_attention(a->context, a->info, no_stream), CONTEXT,                     \
            NOT_NULL("args", info), SIZE("args.size", attention.size), HEADS_ROWS,                                     \
            VIEW("out", attention.out, BIT(BF16), 0, OUT), VIEW("lse", attention.lse, BIT(F32), 0, OPTIONAL | OUT),    \
            __VA_ARGS__)
ATTENTION(plain, fill_attention, VIEW("k_offsets", attention.k_offsets, BIT(I32), 0, OPTIONAL))
ATTENTION(paged, fill_paged, VIEW("pages", attention.pages, BIT(I32), 0, LOOSE | FREE_COLS))
CALL(cumoe_attention_backward, fill_attended, attention_backward(a), CONTEXT, NOT_NULL("args", info),
     NOT_NULL("args.forward", attended.forward), SIZE("args.size", attended.size),
     SIZE("args.forward.size", attention.size), HEADS_ROWS, FLAGS("args.flags", attended.flags, 1),
     VIEW("args.dout", attended.dout, BIT(BF16), 0, 0), VIEW("out", attention.out, BIT(BF16), 0, 0),
     VIEW("lse", attention.lse, BIT(F32), 0, 0), VIEW("args.dq", attended.dq, BIT(BF16), 0, OUT),
     VIEW("args.dk", attended.dk, BIT(BF16), 0, OUT), VIEW("args.dv", attended.dv, BIT(BF16), 0, OUT),
     VIEW("args.dsinks", attended.dsinks, BIT(F32), 0, OPTIONAL | OUT),
     VIEW("args.delta", attended.delta, BIT(F32), 0, OUT))

static void fill_rope(arguments *a)
{
  a->rope = (cumoe_rope_args){.size = sizeof a->rope, .heads = 4, .head_dim = 16};
  a->rope.x = give(CUMOE_BF16, TOKENS, 64);
  a->rope.positions = give(CUMOE_I32, 1, TOKENS);
  a->rope.cosine = give(CUMOE_F32, 7, 8);
  a->rope.sine = give(CUMOE_F32, 7, 8);
  a->rope.y = give_mut(CUMOE_BF16, TOKENS, 64);
  a->info = &a->rope;
}
TRAIN_CALL(cumoe_rope, fill_rope, SIZE("args.size", rope.size), FLAGS("args.flags", rope.flags, 3),
           INT("", rope.heads, 4, 4), INT("", rope.head_dim, 16, 16),
           VIEW("args.x", rope.x, FLOATS, 0, LOOSE | IN_PLACE),
           VIEW("args.positions", rope.positions, INDICES, 0, OPTIONAL),
           VIEW("args.cosine", rope.cosine, BIT(F32), 0, LOOSE), VIEW("args.sine", rope.sine, BIT(F32), 0, LOOSE),
           VIEW("args.y", rope.y, BIT(BF16), 0, OUT))

/* ---- cumoe/quantize.h ----------------------------------------------------------------------------------- */

static void fill_quantize_rows(arguments *a)
{
  a->format = cumoe_format_fp8_tensor(CUMOE_ROWS_STATIC);
  a->pointer = &a->format;
  a->v[0] = give(CUMOE_BF16, TOKENS, HIDDEN);
  a->v[1] = give(CUMOE_F32, 1, 1);
  a->v[2] = give(CUMOE_E4M3, TOKENS, HIDDEN);
  a->v[3] = give(CUMOE_F32, 1, TOKENS);
}
CALL(cumoe_quantize_rows, fill_quantize_rows,
     cumoe_quantize_rows(a->context, a->pointer, a->v[0], a->v[1], as_mut(a->v[2]), as_mut(a->v[3]), no_stream),
     CONTEXT, NOT_NULL("format", pointer), VIEW("x", v[0], FLOATS, 16, LOOSE),
     VIEW("static_scale", v[1], BIT(F32), 0, 0), VIEW("codes", v[2], BIT(E4M3), 16, OUT),
     VIEW("scales", v[3], BIT(F32), 0, OUT))

static void fill_quantize(arguments *a)
{
  a->quantize = (cumoe_quantize_args){.size = sizeof a->quantize, .experts = 2, .gate_order = CUMOE_GATE_UP_CONCAT};
  a->quantize.format = cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES);
  a->quantize.weights = give(CUMOE_BF16, 4 * INTER, HIDDEN);
  a->quantize.codes = give_mut(CUMOE_U8, 4 * INTER, HIDDEN / 2);
  a->quantize.scale = give_mut(CUMOE_E4M3, 4 * INTER, HIDDEN / 16);
  a->quantize.global = give_mut(CUMOE_F32, 2, 2);
  a->info = &a->quantize;
}
#define QUANTIZE_ROWS                                                                                                  \
  NOT_NULL("args", info), SIZE("args.size", quantize.size),                                                            \
      INT("args.experts", quantize.experts, 1, CUMOE_MAX_EXPERTS),                                                     \
      ROW("args.gate_order", A_INT, quantize.gate_order, .low = 0, .high = 6, .status = CUMOE_ERR_LAYOUT),             \
      INT("args.reserved", quantize.reserved, 0, 0),                                                                   \
      VALUE("args.format.reserved", quantize.format.reserved[2], 1, NOT_SUPPORTED)
CALL(cumoe_quantize_weights, fill_quantize, cumoe_quantize_weights(a->context, a->info, no_stream), CONTEXT,
     QUANTIZE_ROWS, VIEW("args.weights", quantize.weights, FLOATS, 16, LOOSE),
     VIEW("args.codes", quantize.codes, BIT(U8), 16, OUT), VIEW("args.scale", quantize.scale, BIT(E4M3), 0, OUT),
     VIEW("args.global", quantize.global, BIT(F32), 0, OUT | FREE_COLS))
CALL(cumoe_quantize_shapes, fill_quantize, cumoe_quantize_shapes(a->info), QUANTIZE_ROWS,
     VALUE("args.weights", quantize.weights.rows, 63, INVALID_ARGUMENT))

static void fill_repack(arguments *a)
{
  size_t bytes = 0;
  a->repack =
      (cumoe_repack_args){.size = sizeof a->repack, .experts = 2, .major = CUMOE_IN_OUT, .out = INTER, .in = HIDDEN};
  a->repack.format = cumoe_format_gptq(32, 1);
  a->repack.codes = give(CUMOE_I32, 2 * HIDDEN / 8, INTER);
  a->repack.scale = give(CUMOE_F16, 2 * HIDDEN / 32, INTER);
  a->repack.zero = give(CUMOE_I32, 2 * HIDDEN / 32, INTER / 8);
  CHECK_OK(cumoe_weights_repack_size(&a->repack, &bytes));
  a->v[0] = give(CUMOE_U8, 1, (int64_t)bytes);
  a->info = &a->repack;
  a->host = &a->bind.up;
  a->pointer = &a->format;
}
#define REPACK_ROWS                                                                                                    \
  NOT_NULL("args", info), SIZE("args.size", repack.size), INT("args.experts", repack.experts, 1, CUMOE_MAX_EXPERTS),   \
      INT("args.reserved", repack.reserved, 0, 0),                                                                     \
      ROW("args.major", A_INT, repack.major, .low = 1, .high = 2, .status = CUMOE_ERR_LAYOUT),                         \
      ROW("args.out", A_INT, repack.out, .low = 8, .high = 1 << 24, .step = 8),                                        \
      INT("args.in", repack.in, 16, 1 << 24),                                                                          \
      VALUE("args.format.reserved", repack.format.reserved[2], 1, NOT_SUPPORTED)
CALL(cumoe_weights_repack_size, fill_repack, cumoe_weights_repack_size(a->info, a->out), REPACK_ROWS,
     NOT_NULL("bytes", out))
CALL(cumoe_weights_repack, fill_repack,
     cumoe_weights_repack(a->context, a->info, as_mut(a->v[0]), (void *)(uintptr_t)a->host, a->pointer, no_stream),
     CONTEXT, REPACK_ROWS, VIEW("args.codes", repack.codes, BIT(I32), 0, 0),
     VIEW("args.scale", repack.scale, BIT(F16), 0, 0), VIEW("args.zero", repack.zero, BIT(I32), 0, 0),
     VIEW("to", v[0], BIT(U8), 256, OUT | FREE_COLS), VALUE("to", v[0].cols, 255, WORKSPACE),
     NOT_NULL("projection", host), NOT_NULL("format", pointer))

static void fill_order(arguments *a)
{
  static int32_t g_idx[2 * 32], order[2 * 32];
  for (int32_t k = 0; k < 2 * 32; k++) g_idx[k] = k % 2;
  a->host = g_idx;
  a->out = order;
  a->rows = 2 * 32;
  a->cols = 32;
}
CALL(cumoe_order_of_groups, fill_order, cumoe_order_of_groups(a->host, (int32_t)a->rows, (int32_t)a->cols, a->out),
     NOT_NULL("g_idx", host), NOT_NULL("order", out), VALUE("in", rows, 63, INVALID_ARGUMENT),
     VALUE("in", rows, 0, INVALID_ARGUMENT), VALUE("group", cols, 0, INVALID_ARGUMENT))

static void fill_scan(arguments *a)
{
  a->weights = bench.weights;
  a->v[0] = cumoe_vector(cumoe_buffer_view(bench.buffer).data, CUMOE_I64, CUMOE_SCAN_FIELDS); /* it is filled */
  a->v[0].rows = EXPERTS;
}
CALL(cumoe_weights_scan, fill_scan, cumoe_weights_scan(a->context, a->weights, as_mut(a->v[0]), no_stream), CONTEXT,
     WEIGHTS("weights", weights), VIEW("report", v[0], BIT(I64), 0, OUT))

/* Functions without a row above, and why. */
static const char *const exempt[] = {
    /* cannot fail, whatever they are given: test/base.c */
    "cumoe_status_name", "cumoe_status_text", "cumoe_last_error", "cumoe_version", "cumoe_architectures",
    "cumoe_set_log", "cumoe_dtype_bytes", "cumoe_dtype_name", "cumoe_variant_count", "cumoe_limit_count",
    "cumoe_image_free",
    /* answer with a value: no_status() below */
    "cumoe_buffer_view", "cumoe_buffer_view_mut", "cumoe_buffer_live", "cumoe_fault_pending", "cumoe_debug_live",
    /* of all ranks at once: test/ep.c */
    "cumoe_ep_arena", "cumoe_ep_workspace", "cumoe_ep_forward", "cumoe_ep_dispatch", "cumoe_ep_experts",
    "cumoe_ep_combine", "cumoe_group_create", "cumoe_group_destroy", "cumoe_group_abort", "cumoe_group_fault_read",
    "cumoe_group_set_active", "cumoe_group_set_timeout",
    /* the same: test/arenas.c */
    "cumoe_arenas_create", "cumoe_arenas_create_all", "cumoe_arenas_get_info", "cumoe_arenas_destroy",
    /* what macros call that have a row */
    "cumoe_buffer_alloc_at", "cumoe_buffer_alloc_with_at", "cumoe_pinned_alloc_at"};

/* The manual's example at cumoe_last_error. */
#define SAMPLE "args.x.cols is 63, must be 64"

/* ---- wrong calls spelled out ------------------------------------------------------------------------------ */

typedef struct expectation {
  cumoe_status status;
  const char *words, *how;
} expectation;

#define CHANGE(want, named, ...)                                                                                       \
  if (which == n++) *e = (expectation){CUMOE_ERR_##want, named, #__VA_ARGS__}, (void)(__VA_ARGS__);

static int change_desc(int which, arguments *a, expectation *e)
{
  cumoe_moe_desc *d = &a->desc;
  cumoe_routing *r = &d->routing;
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "desc.act", d->act = CUMOE_ACT_SWIGLU_OAI, d->flags = CUMOE_MOE_UNGATED)
  CHANGE(INVALID_ARGUMENT, "act_alpha", d->act_alpha = NAN)
  CHANGE(INVALID_ARGUMENT, "act_alpha", d->act_alpha = -INFINITY)
  CHANGE(NOT_SUPPORTED, "desc.dtype is unset, must be f32", d->dtype = 0)
  CHANGE(NOT_SUPPORTED, "desc.dtype is 77 (no cumoe_dtype)", d->dtype = 77)
  CHANGE(NOT_SUPPORTED, "desc.out_dtype is u8, must be f32 (or 0: dtype)", d->dtype = CUMOE_F32,
         d->out_dtype = CUMOE_U8)
  CHANGE(NOT_SUPPORTED, "desc.act_limit", d->act_limit = 1, d->flags = CUMOE_MOE_UNGATED)
  CHANGE(NOT_SUPPORTED, "desc.shared_inter", d->shared_inter = 8, d->flags = CUMOE_MOE_UNREDUCED)
  CHANGE(NOT_SUPPORTED, "desc.out_dtype", d->out_dtype = CUMOE_F16)
  CHANGE(INVALID_ARGUMENT, "desc.hidden", d->hidden = (1 << 24) + 8)
  CHANGE(INVALID_ARGUMENT, "desc.inter", d->inter = (1 << 24) + 8)
  CHANGE(INVALID_ARGUMENT, "desc.shared_inter", d->shared_inter = (1 << 24) + 8)
  CHANGE(INVALID_ARGUMENT, "desc.num_experts", d->num_experts = 0, d->local_experts = 0)
  CHANGE(INVALID_ARGUMENT, "routing.top_k", d->num_experts = 64, r->top_k = 33)
  CHANGE(INVALID_ARGUMENT, "routing.top_k", d->num_experts = 2, d->local_experts = 0, r->top_k = 3)
  CHANGE(INVALID_ARGUMENT, "routing.top_k", r->group_score = CUMOE_GROUP_BEST, r->topk_group = 1, r->top_k = 3)
  CHANGE(INVALID_ARGUMENT, "routing.top_k", r->n_group = 4, r->topk_group = 1, r->top_k = 3)
  CHANGE(INVALID_ARGUMENT, "routing.n_group", r->n_group = 3)
  CHANGE(INVALID_ARGUMENT, "routing.n_group", d->num_experts = 256, r->n_group = 128)
  CHANGE(INVALID_ARGUMENT, "routing.topk_group", r->n_group = 0, r->topk_group = 1)
  CHANGE(INVALID_ARGUMENT, "routing.topk_group", r->topk_group = 5)
  CHANGE(INVALID_ARGUMENT, "SCORE_AFTER_TOPK", r->flags = CUMOE_ROUTE_SCORE_AFTER_TOPK)
  CHANGE(NOT_SUPPORTED, "routing.flags has CHOOSE_BY_LOGIT", r->score = CUMOE_SCORE_SOFTMAX,
         r->flags = CUMOE_ROUTE_CHOOSE_BY_LOGIT)
  CHANGE(INVALID_ARGUMENT, "routing.score is SPARSEMIXER", r->score = CUMOE_SCORE_SPARSEMIXER)
  CHANGE(INVALID_ARGUMENT, "routing.score is SPARSEMIXER", r->score = CUMOE_SCORE_SPARSEMIXER, r->n_group = 0,
         r->topk_group = 0, r->flags = CUMOE_ROUTE_CHOOSE_BY_LOGIT)
  CHANGE(INVALID_ARGUMENT, "routing.always_experts is -1", r->always_experts = -1)
  CHANGE(INVALID_ARGUMENT, "routing.always_experts is 2, must be 0 .. top_k - 1", r->always_experts = r->top_k = 2)
  CHANGE(INVALID_ARGUMENT, "routing.n_group is 4, must be 1 .. 64 and divide the", r->always_experts = 1)
  CHANGE(NOT_SUPPORTED, "routing.always_experts is 1, must be 0 with zero", r->always_experts = r->zero_experts = 1)
  CHANGE(NOT_SUPPORTED, "routing.always_experts is 1, must be 0 with SPARSEMIXER and with", r->always_experts = 1,
         r->score = CUMOE_SCORE_SOFTMAX)
  CHANGE(INVALID_ARGUMENT, "routing.logits_dtype is u8, must be", r->logits_dtype = CUMOE_U8)
  CHANGE(NOT_SUPPORTED, "LIMIT_AFTER", d->act = CUMOE_ACT_SWIGLU_OAI, d->flags = CUMOE_MOE_LIMIT_AFTER)
  CHANGE(NOT_SUPPORTED, "identity_experts", r->n_group = 0, r->topk_group = 0, r->identity_experts = 1,
         r->flags = CUMOE_ROUTE_WEIGHT_ON_INPUT)
  return n;
}

static int change_formats(int which, arguments *a, expectation *e)
{
  cumoe_moe_desc *d = &a->desc;
  cumoe_format *u = &d->up_format, *w = &d->down_format, *s = &d->shared_up_format;
  int n = 0;
  CHANGE(NOT_SUPPORTED, "desc.up_format.reserved[10] is 7, must be 0", u->reserved[10] = 7)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.element is 0 (dense), all of desc.up_format", u->element = 0)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.element is 7, not a", u->element = 7)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.element is -1, not a", u->element = -1)
  CHANGE(NOT_SUPPORTED, "desc.up_format.element is 1: activations are f32", d->dtype = d->out_dtype = CUMOE_F32)
  CHANGE(INVALID_ARGUMENT, "desc.down_format.word is 2, must be", w->word = 2)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.word is 4, must be", u->word = 4)
  CHANGE(INVALID_ARGUMENT, "desc.down_format.offset is 16, must be 0 .. 15", w->offset = 16)
  CHANGE(INVALID_ARGUMENT, "desc.down_format.offset is -1, must be 0 .. 15", w->offset = -1)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.offset is 1, must be 0 .. 0", u->offset = 1)
  CHANGE(NOT_SUPPORTED, "desc.up_format.offset is 0, must be 128 for U8", *u = cumoe_format_int8(CUMOE_F32),
         u->element = CUMOE_ELEMENT_U8)
  CHANGE(INVALID_ARGUMENT, "desc.down_format.packed is 2, not a", w->packed = 2)
  CHANGE(INVALID_ARGUMENT, "desc.down_format.packed is -1, not a", w->packed = -1)
  CHANGE(INVALID_ARGUMENT, "desc.down_format.split is -1, must", w->split = -1)
  CHANGE(LAYOUT, "desc.down_format: packed 1, order 0x0, split 0, element 5 is read after", w->packed = 1)
  CHANGE(LAYOUT, "desc.down_format: packed 0, order 0x75316420,", w->order = 0x75316420)
  CHANGE(LAYOUT, "split 16,", w->split = 16)
  CHANGE(LAYOUT, "element 6 is read after cumoe_weights_repack only", w->element = CUMOE_ELEMENT_S4)
  CHANGE(NOT_SUPPORTED, "desc.up_format.scale is unset", u->scale = 0)
  CHANGE(NOT_SUPPORTED, "desc.up_format.scale is e4m3, which scales of element 1 are not", u->scale = CUMOE_E4M3)
  CHANGE(NOT_SUPPORTED, "desc.down_format.scale is e8m0, which scales of element 5 are not", w->scale = CUMOE_E8M0)
  CHANGE(NOT_SUPPORTED, "desc.shared_up_format.scale is bf16, which scales of element 2", s->scale = CUMOE_BF16)
  CHANGE(NOT_SUPPORTED, "desc.up_format.block is {-1, 128}", u->block[0] = -1)
  CHANGE(NOT_SUPPORTED, "desc.up_format.block is {128, -16}", u->block[1] = -16)
  CHANGE(NOT_SUPPORTED, "desc.up_format.block is {128, 24}, must be", u->block[1] = 24)
  CHANGE(NOT_SUPPORTED, "desc.shared_up_format.block[1] is 16, must be 32 with scales of e8m0", s->block[1] = 16)
  CHANGE(NOT_SUPPORTED, "desc.shared_down_format.block[1] is 0, must be 16 with scales of e4m3",
         d->shared_down_format.block[1] = 0)
  CHANGE(NOT_SUPPORTED, "desc.up_format.origin is {-1, 0}, must not be negative", u->origin[0] = -1)
  CHANGE(NOT_SUPPORTED, "desc.up_format.origin is {0, 8}, must not", u->origin[1] = 8)
  CHANGE(NOT_SUPPORTED, "desc.up_format.origin is {1048577, 0}, must be at most {1048576, 1048576}",
         u->origin[0] = (1 << 20) + 1)
  CHANGE(NOT_SUPPORTED, "desc.up_format.origin is {0, 2147483632}, must be at most", u->origin[1] = INT32_MAX - 15)
  CHANGE(NOT_SUPPORTED, "and the second a multiple of 32", s->origin[1] = 16)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.origin[0] is 1, must be 0 with block[0] 0", u->block[0] = 0,
         u->origin[0] = 1)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.joined is 2, must be 0 or 1", u->joined = 2)
  CHANGE(NOT_SUPPORTED, "desc.down_format.zero is 3, must be", w->zero = 3)
  CHANGE(INVALID_ARGUMENT, "desc.down_format.zero_add is 1, must be -16 .. 16, and 0 without", w->zero = 2,
         w->zero_add = 1)
  CHANGE(NOT_SUPPORTED, "desc.up_format.act_order is 1, must be 0, or 1 with ROWS_AS_THEY_ARE", u->act_order = 1)
  CHANGE(NOT_SUPPORTED, "desc.down_format.act_order is 2, must be 0, or 1", w->act_order = 2)
  CHANGE(NOT_SUPPORTED, "desc.up_format.zero is 1, must be", u->zero = 1)
  CHANGE(INVALID_ARGUMENT, "desc.down_format.zero_add is 17, must be -16 .. 16", w->zero_add = 17)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.zero_add is 1, must be -16 .. 16, and 0 without", u->zero_add = 1)
  CHANGE(NOT_SUPPORTED, "desc.up_format.global is 1, must be GLOBAL_NONE", u->global = 1)
  CHANGE(NOT_SUPPORTED, "desc.shared_up_format.global is 3, must be", s->global = 3)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.rows is 5, not a cumoe_rows", u->rows = 5)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.rows is -1, not a cumoe_rows", u->rows = -1)
  CHANGE(NOT_SUPPORTED, "desc.down_format.rows is 2, must be ROWS_AS_THEY_ARE with element 5", w->rows = 2)
  CHANGE(NOT_SUPPORTED, "desc.up_format.row_element is 3, must be 0, or 1", u->row_element = CUMOE_ELEMENT_S8)
  CHANGE(NOT_SUPPORTED, "desc.up_format.row_group is 64, must be 128 with ROWS_GROUP", u->row_group = 64)
  CHANGE(NOT_SUPPORTED, "desc.up_format.row_group is 128, must be", u->rows = CUMOE_ROWS_TOKEN)
  CHANGE(NOT_SUPPORTED, "desc.up_format.row_scale is bf16, must be f32", u->row_scale = CUMOE_BF16)
  CHANGE(NOT_SUPPORTED, "desc.down_format.row_scale is e8m0, must be f32", w->row_scale = CUMOE_E8M0)
  CHANGE(NOT_SUPPORTED, "desc.up_format: rows have 72 codes, must be a multiple of 16", d->hidden = 72)
  CHANGE(NOT_SUPPORTED, "desc.down_format: rows have 80 codes, must be a multiple of 32 (16 bytes)", d->inter = 80)
  CHANGE(NOT_SUPPORTED, "desc.shared_down_format: rows have 16 codes", d->shared_inter = 16)
  CHANGE(INVALID_ARGUMENT, "desc.shared_up_format and desc.shared_down_format must be 0", d->shared_inter = 0)
  return n;
}

/* What the two descriptions have to say of each other. */
static int change_bind_formats(int which, arguments *a, expectation *e)
{
  static const void *gap[EXPERTS], *odd[EXPERTS];
  cumoe_weights_desc *d = &a->bind;
  cumoe_projection *up = &d->gate_up, *down = &d->down;
  const cumoe_projection dense = {.data = {.data = down->data.data,
                                           .rows = HIDDEN,
                                           .cols = WIDE,
                                           .ld = WIDE,
                                           .device = down->data.device,
                                           .dtype = CUMOE_BF16}};
  static const cumoe_format none;
  int n = 0;
  CHANGE(WRONG_DTYPE, "desc.dtype is unset: with a format the activations' type", d->dtype = 0)
  CHANGE(WRONG_DTYPE, "desc.dtype is u8", d->dtype = CUMOE_U8)
  CHANGE(NOT_SUPPORTED, "desc.up_format.element is 2: activations are f32", d->dtype = CUMOE_F32)
  CHANGE(NOT_SUPPORTED, "desc.up_format.reserved[0] is 1", d->up_format.reserved[0] = 1)
  CHANGE(INVALID_ARGUMENT, "desc.up_format.element is 9, not a", d->up_format.element = 9)
  CHANGE(NOT_SUPPORTED, "desc.down_format: rows have 48 codes, must be a multiple of 32", d->inter = 48,
         up->data.rows = 96, up->scale.data.rows = 96)
  CHANGE(LAYOUT, "desc.gate_up: codes are read OUT_IN, the major says IN_OUT", d->up_major = CUMOE_IN_OUT)
  CHANGE(LAYOUT, "desc.down: codes are read OUT_IN", d->down_major = CUMOE_IN_OUT)
  CHANGE(INVALID_ARGUMENT, "desc.down.data.cols is 16, must be 8", down->data.cols = down->data.ld = 16)
  CHANGE(WRONG_DTYPE, "desc.down.data.dtype is u8, must be i32", down->data.dtype = CUMOE_U8)
  CHANGE(NOT_SUPPORTED, "desc.down.data.ld is 16777220, must be at most 16777216 (2^26 bytes)",
         down->data.ld = (1 << 24) + 4, down->expert_stride = 0)
  CHANGE(NOT_SUPPORTED, "desc.gate_up.scale.ld is 67108865, must be at most 67108864",
         up->scale.data.ld = (1 << 26) + 1, up->scale.expert_stride = 0)
  CHANGE(NOT_SUPPORTED, "desc.down.zero.ld is 16777217, must be at most 16777216", down->zero.data.ld = (1 << 24) + 1,
         down->zero.expert_stride = 0)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.scale is absent", up->scale = (cumoe_array){.expert_stride = 0})
  CHANGE(WRONG_DTYPE, "desc.gate_up.scale.dtype is u8, must be e4m3", up->scale.data.dtype = CUMOE_U8)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.scale.cols is 3, must be 4", up->scale.data.cols = 3)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.scale.rows is 127, must be", up->scale.data.rows = 127)
  CHANGE(INVALID_ARGUMENT, "desc.down.scale.cols is 2, must be 3", d->down_format.origin[1] = 16)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.scale has both data and per_expert", up->scale.per_expert = gap)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.scale.per_expert[0] is null", up->scale.data.data = NULL,
         up->scale.expert_stride = 0, up->scale.per_expert = gap)
  CHANGE(MISALIGNED, "desc.down.scale.per_expert[0]", odd[0] = (const char *)down->scale.data.data + 1,
         down->scale.data.data = NULL, down->scale.expert_stride = 0, down->scale.per_expert = odd)
  CHANGE(INVALID_ARGUMENT, "desc.down.scale must be absent: desc.down_format is dense", d->down_format = none,
         *down = dense, down->scale = up->scale)
  CHANGE(INVALID_ARGUMENT, "desc.down.zero is absent", down->zero = (cumoe_array){.expert_stride = 0})
  CHANGE(INVALID_ARGUMENT, "desc.down.zero.rows is 7, must be", down->zero.data.rows = 7)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.zero must be absent: desc.up_format.zero is 0", up->zero = down->zero)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.global is absent", up->global = no_view())
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.global.cols is 3, must be 2", up->global.cols = up->global.ld = 3)
  CHANGE(INVALID_ARGUMENT, "desc.down.global must be absent: the format has none", down->global = up->global)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.input_scale must be absent: the format's rows", up->input_scale = up->global)
  CHANGE(WRONG_DTYPE, "desc.down.zero.dtype is i32, must be f16", d->down_format.zero = CUMOE_ZERO_VALUES,
         down->zero.data.rows = down->scale.data.rows)
  CHANGE(INVALID_ARGUMENT, "desc.down.zero.rows is 8, must be", d->down_format.zero = CUMOE_ZERO_VALUES,
         down->zero.data.dtype = CUMOE_F16)
  CHANGE(INVALID_ARGUMENT, "desc.down.order is absent", d->down_format.act_order = 1)
  CHANGE(INVALID_ARGUMENT, "desc.down.order must be absent: desc.down_format.act_order is 0", down->order = down->zero)
  CHANGE(INVALID_ARGUMENT, "desc.down.order.cols is 2, must be 64", d->down_format.act_order = 1,
         down->order = down->zero, down->order.data.rows = 1)
  CHANGE(WRONG_DTYPE, "desc.down.order.dtype is f16, must be i32", d->down_format.act_order = 1,
         down->order = down->scale, down->order.data.rows = 1, down->order.data.cols = down->order.data.ld = WIDE)
  CHANGE(LAYOUT, "desc.down_format.joined is 1, which is for", d->down_format.joined = 1)
  CHANGE(LAYOUT, "desc.up_format.joined is 1, which is for", d->up_format.joined = 1,
         d->gate_order = CUMOE_GATE_UP_INTERLEAVED)
  CHANGE(LAYOUT, "desc.up_format: block[0] 3, origin[0] 0, must be even", d->up_format.block[0] = 3,
         d->gate_order = CUMOE_UP_GATE_INTERLEAVED)
  CHANGE(LAYOUT, "block[0] 2, origin[0] 1, must be even", d->up_format.block[0] = 2, d->up_format.origin[0] = 1,
         d->gate_order = CUMOE_GATE_UP_INTERLEAVED)
  CHANGE(NOT_SUPPORTED, "desc.up_format.zero is 1: zero points of interleaved", d->up_format = d->down_format,
         up->data = cumoe_matrix(up->data.data, CUMOE_I32, 2 * WIDE, HIDDEN / 8, HIDDEN / 8), up->expert_stride = 0,
         up->data.device = down->data.device, d->gate_order = CUMOE_GATE_UP_INTERLEAVED)
  CHANGE(LAYOUT, "desc.gate_up must be absent", d->gate_order = CUMOE_UNGATED, up->data = no_view(),
         up->expert_stride = 0, up->global = no_view())
  CHANGE(LAYOUT, "and so must their scales", d->gate_order = CUMOE_GATE_UP_SEPARATE, up->data.rows = WIDE,
         up->scale.data.rows = WIDE, up->global.cols = up->global.ld = 1, d->gate = d->up = *up,
         *up = (cumoe_projection){.expert_stride = 0}, d->up.global.ld = 2)
  CHANGE(LAYOUT, "desc.up must be absent", d->up.scale = down->scale)
  CHANGE(LAYOUT, "desc.up must be absent", d->up.zero = down->zero)
  CHANGE(LAYOUT, "desc.up must be absent", d->up.order = down->zero)
  CHANGE(LAYOUT, "desc.up must be absent", d->up.global = up->global)
  CHANGE(LAYOUT, "desc.up must be absent", d->up.input_scale = up->global)
  return n;
}

static int change_bind_static(int which, arguments *a, expectation *e)
{
  cumoe_weights_desc *d = &a->bind;
  cumoe_view other = d->up.input_scale;
  int n = 0;
  other.data = d->gate.scale.data.data;
  CHANGE(INVALID_ARGUMENT, "desc.gate.input_scale is absent", d->gate.input_scale = no_view())
  CHANGE(INVALID_ARGUMENT, "desc.up.input_scale.cols is 2, must be 1",
         d->up.input_scale.cols = d->up.input_scale.ld = 2)
  CHANGE(LAYOUT, "desc.gate.input_scale and desc.up.input_scale must be one", d->up.input_scale = other)
  CHANGE(INVALID_ARGUMENT, "desc.gate.input_scale.rows is 1, must be", d->up_format.rows = CUMOE_ROWS_STATIC_EXPERT)
  CHANGE(LAYOUT, "desc.gate.input_scale and desc.up.input_scale must be one",
         d->up_format.rows = CUMOE_ROWS_STATIC_EXPERT, d->gate.input_scale.rows = d->up.input_scale.rows = d->experts,
         d->up.input_scale.ld = 3)
  CHANGE(LAYOUT, "and so must their scales", d->up.scale.expert_stride = 2)
  CHANGE(LAYOUT, "and so must their scales", d->up.scale.data.ld = 2)
  CHANGE(INVALID_ARGUMENT, "desc.down.input_scale must be absent", d->down.input_scale = other)
  return n;
}

static int change_bind(int which, arguments *a, expectation *e)
{
  static const void *gap[EXPERTS], *odd[EXPERTS];
  cumoe_weights_desc *d = &a->bind;
  int n = 0;
  cumoe_view small = cumoe_buffer_view(bench.buffer); /* 1024 elements of bf16 */
  small.dtype = CUMOE_BF16, small.rows = 16, small.cols = small.ld = 8;
  for (int i = 0; i < EXPERTS; i++) gap[i] = i == 2 ? NULL : d->down.data.data;
  for (int i = 0; i < EXPERTS; i++) odd[i] = (const char *)d->down.data.data + (i == 3 ? 8 : 0);
  CHANGE(INVALID_ARGUMENT, "desc.gate_up", d->up_major = CUMOE_IN_OUT)
  CHANGE(INVALID_ARGUMENT, "desc.down", d->down_major = CUMOE_IN_OUT)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up", d->inter = 24)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up", d->hidden = 72)
  CHANGE(LAYOUT, "desc.gate ", d->gate = d->gate_up)
  CHANGE(LAYOUT, "desc.up ", d->up = d->gate_up)
  CHANGE(LAYOUT, "desc.up ", d->up.per_expert = odd)
  CHANGE(LAYOUT, "desc.up ", d->up.bias = d->down.bias)
  CHANGE(LAYOUT, "desc.up ", d->up.expert_stride = 8)
  CHANGE(NOT_SUPPORTED, "desc.gate.reserved[0]", d->gate.reserved[0] = 1)
  CHANGE(NOT_SUPPORTED, "desc.up.reserved[13]", d->up.reserved[13] = 1)
  CHANGE(LAYOUT, "desc.gate_up", d->gate_order = CUMOE_UNGATED)
  CHANGE(LAYOUT, "desc.gate_up", d->gate_order = CUMOE_GATE_UP_SEPARATE)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up", d->gate_up.per_expert = odd)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up", d->gate_up.expert_stride = INT64_MAX / 8 * 8)
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.data.rows is 255, must be 256 (32 for each of 8 experts), or 32 (expert 0's)",
         d->gate_up.expert_stride = 0, d->gate_up.data.rows = 255)
  CHANGE(INVALID_ARGUMENT, "desc.down.data.rows is 65, must be 64", d->down.data.rows = 65)
  CHANGE(WRONG_DTYPE, "desc.down.data.dtype is unset, must be", d->down.data.dtype = 0)
  CHANGE(INVALID_ARGUMENT, "desc.down.data is absent", d->down.data = (cumoe_view){.dtype = CUMOE_BF16})
  CHANGE(INVALID_ARGUMENT, "desc.gate_up.per_expert[2] is null", d->gate_up.data.data = NULL,
         d->gate_up.expert_stride = 0, d->gate_up.per_expert = gap)
  CHANGE(OUT_OF_BOUNDS, "desc.gate_up", d->hidden = d->inter = 8, d->experts = 4, d->gate_up.data = small,
         d->gate_up.expert_stride = 400, d->gate_up.bias = no_view())
  CHANGE(LAYOUT, "desc.gate_up.expert_stride is 4096, must be 0 with per_expert", d->gate_up.data.data = NULL,
         d->gate_up.per_expert = odd, d->gate_up.expert_stride = 4096)
  CHANGE(MISALIGNED, "desc.gate_up.per_expert[3]", d->gate_up.data.data = NULL, d->gate_up.per_expert = odd,
         d->gate_up.expert_stride = 0)
  return n;
}

static int change_bind_pointers(int which, arguments *a, expectation *e)
{
  cumoe_weights_desc *d = &a->bind;
  cumoe_view bias = d->down.bias, other = bias;
  int n = 0;
  bias.cols = other.cols = INTER;
  other.ld += 8;
  CHANGE(LAYOUT, "same ld", d->up.data.ld += 8)
  CHANGE(LAYOUT, "form", d->up.per_expert = NULL, d->up.data.data = pointers[0])
  CHANGE(INVALID_ARGUMENT, "desc.gate", d->gate.data.cols = 8)
  CHANGE(INVALID_ARGUMENT, "desc.up", d->up.data.cols = 8)
  CHANGE(LAYOUT, "bias form", d->up.bias = bias)
  CHANGE(LAYOUT, "bias form", d->up.bias = bias, d->gate.bias = other)
  CHANGE(LAYOUT, "bias form", d->up.bias = bias, d->gate.bias = bias, d->up.bias.dtype = CUMOE_F32)
  CHANGE(LAYOUT, "expert_stride", d->up.expert_stride = INTER * HIDDEN)
  CHANGE(LAYOUT, "gate_up must be absent", d->gate_up = d->down)
  return n;
}

static int change_create(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "config.pool_initial", a->config.pool_initial = 2, a->config.pool_max = 1)
  CHANGE(INVALID_ARGUMENT, "config.pool_initial", a->config.pool_initial = 2, a->config.pool_keep = 1)
  return n;
}

static int change_router(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "weight.rows is 1025", a->v[1].rows = 1025)
  CHANGE(INVALID_ARGUMENT, "weight.cols is 0, must be", a->v[0].cols = a->v[1].cols = 0)
  return n;
}

static int change_chosen(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "select_bias must be absent: args.chosen", a->gate.select_bias = a->gate.expert_scale)
  return n;
}

/* What a sum over slots has, and a plan without one does not. */
static bool leave_unreduced(arguments *a)
{
  cumoe_combine_args *c = &a->combine;
  a->plan = bench.unreduced_plan;
  c->out.rows = PAIRS;
  c->x = c->shared = c->shared_logit = c->residual = c->pair_weights = no_view();
  return true;
}

static int change_combine(int which, arguments *a, expectation *e)
{
  const cumoe_combine_args full = a->combine;
  cumoe_combine_args *c = &a->combine;
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "args.shared must", leave_unreduced(a), c->shared = full.shared)
  CHANGE(INVALID_ARGUMENT, "args.residual must", leave_unreduced(a), c->residual = full.residual)
  CHANGE(INVALID_ARGUMENT, "args.pair_weights must", leave_unreduced(a), c->pair_weights = full.pair_weights)
  CHANGE(INVALID_ARGUMENT, "args.out overlaps args.residual",
         c->residual = cumoe_matrix(c->out.data, (cumoe_dtype)c->out.dtype, 1, c->out.cols, c->out.ld))
  CHANGE(INVALID_ARGUMENT, "args.out_scale is inf", c->out_scale = INFINITY)
  CHANGE(INVALID_ARGUMENT, "args.residual.rows is 2, must be 3, or 1", c->residual.rows = 2)
  CHANGE(INVALID_ARGUMENT, "args.y is absent, must be [>= 6, 64]", c->y = no_view())
  CHANGE(INVALID_ARGUMENT, "args.shared_logit must be absent: there is no args.shared", c->shared = no_view(),
         c->shared_logit = full.shared_logit)
  CHANGE(WRONG_DTYPE, "args.pair_weights", a->plan = bench.weighing_plan, c->pair_weights.dtype = CUMOE_I32)
  return n;
}

static int change_matmul(int which, arguments *a, expectation *e)
{
  cumoe_matmul_args *m = &a->matmul;
  cumoe_view small = cumoe_buffer_view(bench.buffer); /* 1024 elements of bf16 */
  small.dtype = CUMOE_BF16, small.rows = TOKENS;
  int n = 0;
  CHANGE(OUT_OF_BOUNDS, "args.a", m->a = small, m->a_stride = 900)
  CHANGE(INVALID_ARGUMENT, "args.b", m->flags = 0)
  CHANGE(INVALID_ARGUMENT, "args.c is absent", m->c = (cumoe_view_mut){.data = NULL})
  CHANGE(INVALID_ARGUMENT, "args.a is absent", m->a = m->b = no_view(), m->flags = CUMOE_MATMUL_TRANSPOSE_A)
  return n;
}

static int change_softmax(int which, arguments *a, expectation *e)
{
  const int64_t many = (int64_t)1 << 31;
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "x.cols is 2147483648", a->v[0].rows = a->v[2].rows = 1, a->v[0].cols = a->v[0].ld = many,
         a->v[2].cols = a->v[2].ld = many)
  return n;
}

static int change_alloc(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "", a->rows = a->cols = INT64_MAX)
  CHANGE(INVALID_ARGUMENT, "", a->rows = INT64_MAX / 2, a->cols = 2)
  return n;
}

static int change_force(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "index", a->index = cumoe_variant_count())
  return n;
}

static int change_forward_ids(int which, arguments *a, expectation *e)
{
  cumoe_moe_args *f = &a->args;
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "args.ids", f->ids = no_view())
  CHANGE(INVALID_ARGUMENT, "args.weights", f->weights = no_view())
  CHANGE(INVALID_ARGUMENT, "args.ids", f->logits = bench.logits)
  CHANGE(INVALID_ARGUMENT, "args.ids", f->ids = f->weights = no_view())
  CHANGE(INVALID_ARGUMENT, "args.router_bias", f->router_bias = bench.row)
  CHANGE(INVALID_ARGUMENT, "args.select_bias", f->select_bias = bench.row)
  CHANGE(INVALID_ARGUMENT, "args.ids_out", f->ids_out = as_mut(bench.ids))
  CHANGE(INVALID_ARGUMENT, "args.weights_out", f->weights_out = as_mut(bench.pair_weights))
  CHANGE(INVALID_ARGUMENT, "args.shared ", a->args.shared = bench.shared)
  CHANGE(INVALID_ARGUMENT, "args.x is absent", *f = (cumoe_moe_args){.size = sizeof *f})
  CHANGE(INVALID_ARGUMENT, "args.x is absent", f->x = no_view())
  CHANGE(INVALID_ARGUMENT, SAMPLE, f->x = cumoe_matrix(NULL, CUMOE_BF16, 0, 63, 64))
  CHANGE(WRONG_DTYPE, "args.x.dtype is unset, must be bf16", f->x = cumoe_matrix(NULL, 0, 0, 64, 64))
  CHANGE(WRONG_DEVICE, "args.x is on device 7, the context is on ", f->x.device = 7)
  CHANGE(INVALID_ARGUMENT, "args.out is absent, must be [3, 64]", f->out = (cumoe_view_mut){.data = NULL})
  CHANGE(INVALID_ARGUMENT, "args.out_scale is nan", f->out_scale = NAN)
  CHANGE(INVALID_ARGUMENT, "args.out_scale is -inf", f->out_scale = -INFINITY)
  CHANGE(INVALID_ARGUMENT, "args.shared_gate", f->shared_gate = bench.row)
  CHANGE(INVALID_ARGUMENT, "args.expert_map", a->plan = bench.local_plan, f->expert_map = no_view())
  CHANGE(INVALID_ARGUMENT, "args.out", a->plan = bench.unreduced_plan)
  CHANGE(INVALID_ARGUMENT, "UNREDUCED", a->plan = bench.unreduced_plan, f->out.rows = PAIRS)
  return n;
}

static int change_forward_router(int which, arguments *a, expectation *e)
{
  static struct {
    cumoe_moe_args args;
    uint64_t more;
  } longer;
  cumoe_moe_args *f = &a->args;
  int n = 0;
  longer.args = *f;
  longer.args.size = sizeof longer;
  longer.more = 1;
  CHANGE(NOT_SUPPORTED, "args", a->info = &longer)
  CHANGE(INVALID_ARGUMENT, "args.size", f->size -= 4) /* ends inside a pointer */
  CHANGE(INVALID_ARGUMENT, "weights", a->weights = bench.narrow)
  CHANGE(INVALID_ARGUMENT, "weights", a->weights = bench.shared)
  CHANGE(WRONG_DTYPE, "weights", a->weights = bench.halves)
  CHANGE(LAYOUT, "weights", a->weights = bench.ungated)
  CHANGE(LAYOUT, "weights are gated", a->plan = bench.ungated_plan)
  CHANGE(INVALID_ARGUMENT, "args.x.rows", f->x.rows = CUMOE_MAX_PAIRS / TOP_K + 1)
  CHANGE(INVALID_ARGUMENT, "args.logits", f->logits = bench.logits)
  CHANGE(INVALID_ARGUMENT, "args.ids", f->ids = bench.ids, f->weights = bench.pair_weights)
  CHANGE(INVALID_ARGUMENT, "args.select_bias must be absent: the caller has chosen", f->ids = bench.ids,
         f->select_bias = bench.row)
  CHANGE(INVALID_ARGUMENT, "args.ids_out must be absent: the caller has chosen", f->ids = bench.ids,
         f->ids_out = as_mut(bench.ids))
  CHANGE(INVALID_ARGUMENT, "args.router_weight", f->router_weight = no_view())
  CHANGE(INVALID_ARGUMENT, "args.router_bias", f->router_weight = no_view(), f->logits = bench.logits)
  CHANGE(INVALID_ARGUMENT, "args.shared", f->shared = bench.weights)
  CHANGE(WORKSPACE, "args.workspace", f->workspace = no_view_mut())
  CHANGE(WORKSPACE, "args.workspace", f->workspace.cols = f->workspace.ld = 0)
  CHANGE(INVALID_ARGUMENT, "args.out overlaps args.x", f->out.data = (char *)(uintptr_t)f->x.data + 16)
  CHANGE(INVALID_ARGUMENT, "args.out overlaps args.residual", f->out.data = (char *)(uintptr_t)f->residual.data + 16)
  return n;
}

/* What a copy is told of a view that nobody filled in. */
static int change_copy(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(WRONG_DTYPE, "dst is f32, src is i32", a->v[0].dtype = CUMOE_F32)
  CHANGE(INVALID_ARGUMENT, "src is absent", a->v[1] = (cumoe_view){.data = NULL})
  CHANGE(WRONG_DEVICE, "0 where nothing is said: CUMOE_DEVICE_ANY", a->v[1] = (cumoe_view){a, 4, 8, 8, 0, 0, CUMOE_F32})
  return n;
}

static int change_path(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "path include is no regular file", a->host = "include")
  CHANGE(INVALID_ARGUMENT, "path no/file cannot be opened: No such file", a->host = "no/file")
  return n;
}

static int change_up(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "x is absent", a->v[0] = (cumoe_view){.data = NULL})
  return n;
}

static int change_map(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(WORKSPACE, "workspace", a->v[2] = no_view())
  CHANGE(INVALID_ARGUMENT, "expert_map", a->plan = bench.local_plan, a->v[1] = no_view())
  return n;
}

static int change_masked(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(WORKSPACE, "args.workspace is absent, ", a->masked.workspace = no_view_mut())
  return n;
}

static int change_softmax_backward(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "y.cols is 2147483648", a->v[0].cols = (int64_t)1 << 31)
  return n;
}

static int change_norm_backward(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "args.dbias must be absent: rmsnorm has no bias", a->norm.dbias = a->norm.dweight)
  CHANGE(WORKSPACE, bench.cpu ? "args.workspace is absent, 48 bytes" : "args.workspace is absent, 1072 bytes",
         a->norm.workspace = no_view_mut())
  return n;
}

static int change_loss(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "args.ignore is 2, must be 0 without LOSS_IGNORE", a->loss.flags = 0)
  CHANGE(INVALID_ARGUMENT, "args.flags is 0x2", a->loss.flags = 2)
  CHANGE(INVALID_ARGUMENT, "args.scale is nan", a->loss.scale = NAN)
  return n;
}

static int change_attention(int which, arguments *a, expectation *e)
{
  cumoe_attention_args *t = &a->attention;
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "scale is nan", t->scale = NAN)
  CHANGE(INVALID_ARGUMENT, "pages must be absent: page is 0", t->pages = t->q_offsets)
  CHANGE(INVALID_ARGUMENT, "k_offsets must be absent: keys are paged", t->page = 2)
  return n;
}

static int change_paged(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "q_offsets is absent, and pages has 2", a->attention.q_offsets = no_view())
  CHANGE(INVALID_ARGUMENT, "k_lengths is absent", a->attention.k_lengths = no_view())
  CHANGE(INVALID_ARGUMENT, "pages is absent", a->attention.pages = no_view())
  return n;
}

static int change_attended(int which, arguments *a, expectation *e)
{
  cumoe_attention_args *t = &a->attention;
  int n = 0;
  CHANGE(NOT_SUPPORTED, "page is 1, must be 0: paged keys", t->page = 1, t->pages = t->k_offsets, t->pages.rows = 2,
         t->pages.cols = 1, t->pages.ld = 1, t->k_offsets = no_view())
  CHANGE(INVALID_ARGUMENT, "lse is absent", t->lse = no_view_mut())
  CHANGE(INVALID_ARGUMENT, "args.dsinks must be absent", t->sinks = no_view())
  return n;
}

static int change_global_norm(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "args.norm overlaps args.factor", a->global.count = 0, a->global.factor = a->global.norm)
  return n;
}

static int change_adamw(int which, arguments *a, expectation *e)
{
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "args.beta1 is 1 and args.beta2 0, must be below 1", a->adamw.beta1 = 1)
  CHANGE(INVALID_ARGUMENT, "must be below 1", a->adamw.beta2 = 1)
  return n;
}

/* What backward may not be asked for. */
static int change_backward_ids(int which, arguments *a, expectation *e)
{
  cumoe_moe_grads *g = &a->grads;
  const cumoe_view_mut logits = as_mut(bench.logits), row = as_mut(bench.row);
  int n = 0;
  CHANGE(INVALID_ARGUMENT, "grads.d_logits must be absent: the caller has routed", g->d_logits = logits)
  CHANGE(INVALID_ARGUMENT, "grads.losses must be absent: the caller has routed", g->losses = row)
  CHANGE(INVALID_ARGUMENT, "grads.balance is 1, grads.z 0, must be 0", g->balance = 1)
  CHANGE(INVALID_ARGUMENT, "grads.balance is 0, grads.z -1, must be 0", g->z = -1)
  CHANGE(INVALID_ARGUMENT, "grads.balance is nan, must be finite", g->balance = NAN)
  CHANGE(INVALID_ARGUMENT, "grads.z is inf, must be finite", g->z = INFINITY)
  CHANGE(INVALID_ARGUMENT, "grads.d_router_weight must be absent: there is no router_weight",
         g->d_router_weight = logits)
  CHANGE(INVALID_ARGUMENT, "grads.d_router_bias must be absent: there is no router_weight", g->d_router_bias = row)
  CHANGE(INVALID_ARGUMENT, "grads.d_router_x must be absent: there is no router_x", g->d_router_x = logits)
  CHANGE(INVALID_ARGUMENT, "grads.d_expert_scale must be absent: there is no expert_scale", g->d_expert_scale = row)
  CHANGE(INVALID_ARGUMENT, "grads.d_shared_gate must be absent: there is no shared_gate", g->d_shared_gate = row)
  CHANGE(INVALID_ARGUMENT, "grads.d_residual must be absent: args.residual has not one row", g->d_residual = row)
  CHANGE(INVALID_ARGUMENT, "grads.d_shared is given, there is no shared expert", g->d_shared = bench.d_shared)
  CHANGE(INVALID_ARGUMENT, "grads.d_weights has experts 8, hidden 64, inter 8; the plan needs 8, 64, 16",
         g->d_weights = bench.narrow)
  CHANGE(WRONG_DTYPE, "grads.d_weights is f16, must be bf16 or f32", g->d_weights = bench.halves)
  CHANGE(LAYOUT, "grads.d_weights is ungated, the plan is gated", g->d_weights = bench.ungated)
  CHANGE(WRONG_DEVICE, "grads.d_weights belongs to another", g->d_weights = bench.foreign_weights)
  CHANGE(INVALID_ARGUMENT, "grads.d_weights is weights itself", g->d_weights = bench.weights)
  CHANGE(INVALID_ARGUMENT, "grads.d_weights: gate_up overlaps weights: gate_up", g->d_weights = bench.same)
  CHANGE(INVALID_ARGUMENT, "grads.d_pair_weights overlaps grads.d_weights: gate_up", g->d_weights = bench.d_weights,
         g->d_pair_weights.data = (void *)(uintptr_t)bench.d_bound)
  return n;
}

static const struct {
  const char *name, *form;
  int (*change)(int which, arguments *a, expectation *e);
} changes[] = {{"cumoe_moe_supports", "plain", change_desc},
               {"cumoe_plan_create", "plain", change_desc},
               {"cumoe_moe_supports", "formats", change_formats},
               {"cumoe_plan_create", "formats", change_formats},
               {"cumoe_weights_bind", "formats", change_bind_formats},
               {"cumoe_weights_bind", "static", change_bind_static},
               {"cumoe_context_create", "plain", change_create},
               {"cumoe_buffer_alloc", "plain", change_alloc},
               {"cumoe_variant_force", "plain", change_force},
               {"cumoe_variant_get", "plain", change_force},
               {"cumoe_router", "plain", change_router},
               {"cumoe_gate_with", "chosen", change_chosen},
               {"cumoe_combine", "plain", change_combine},
               {"cumoe_matmul", "plain", change_matmul},
               {"cumoe_softmax", "plain", change_softmax},
               {"cumoe_softmax_backward", "plain", change_softmax_backward},
               {"cumoe_rmsnorm_backward", "plain", change_norm_backward},
               {"cumoe_global_norm", "plain", change_global_norm},
               {"cumoe_adamw", "plain", change_adamw},
               {"cumoe_attention", "plain", change_attention},
               {"cumoe_attention", "paged", change_paged},
               {"cumoe_attention_backward", "plain", change_attended},
               {"cumoe_cross_entropy", "plain", change_loss},
               {"cumoe_weights_bind", "pointers", change_bind_pointers},
               {"cumoe_weights_bind", "strided", change_bind},
               {"cumoe_moe_forward", "ids", change_forward_ids},
               {"cumoe_moe_forward", "router", change_forward_router},
               {"cumoe_moe_backward", "ids", change_backward_ids},
               {"cumoe_map", "chunks", change_map},
               {"cumoe_masked_forward", "plain", change_masked},
               {"cumoe_copy", "plain", change_copy},
               {"cumoe_module_load_file", "plain", change_path},
               {"cumoe_up", "plain", change_up},
               {"cumoe_permute", "plain", change_up},
               {"cumoe_relu", "plain", change_up}};

/* ---- ways to be wrong ------------------------------------------------------------------------------------ */

static const function *now;

/* One wrong call. says: what the text has in it; "" for anything. */
static void expect(arguments *a, cumoe_status want, const char *says, const char *format, long long value)
{
  char what[120], begin[80];
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

/* The right call; pointers into `right` become pointers into its copy. */
static arguments copy_right(arguments *a)
{
  memcpy(a, &right, sizeof right);
  void **const inner[] = {&a->pointer, &a->info, (void **)(void *)&a->buffer, (void **)(void *)&a->config.allocator};
  const uintptr_t begin = (uintptr_t)&right;
  for (int i = 0; i < 4; i++) {
    const uintptr_t at = (uintptr_t)*inner[i];
    if (at >= begin && at < begin + sizeof right) *inner[i] = (char *)a + (at - begin);
  }
  return *a;
}

static void wrong_value(size_t at, const void *value, size_t bytes, cumoe_status want, const char *says,
                        const char *how)
{
  arguments wrong;
  int64_t number = 0;
  copy_right(&wrong);
  memcpy((char *)&wrong + at, value, bytes);
  memcpy(&number, value, bytes < 8 ? bytes : 8);
  expect(&wrong, want, says, how, bytes == 4 ? (long long)(int32_t)number : (long long)number);
}

#define WRONG(type, at, value, want, says, how)                                                                        \
  do {                                                                                                                 \
    const type value_ = (value);                                                                                       \
    wrong_value((at), &value_, sizeof value_, (want), (says), (how));                                                  \
  } while (0)

static cumoe_view right_view(const argument *f)
{
  return *(cumoe_view *)(void *)((char *)&right + f->at);
}

static cumoe_status status_of(const argument *f, cumoe_status otherwise)
{
  return f->status != CUMOE_OK ? f->status : otherwise;
}

static void wrong_types(const argument *f, size_t at, cumoe_status status)
{
  const int32_t types[] = {-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 31, 32, 33, 99, INT32_MIN, INT32_MAX};
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
    if (types[i] < 0 || types[i] > 31 || !(f->types >> types[i] & 1))
      WRONG(int32_t, at, types[i], status, f->name, "dtype %lld");
}

#define WRONG_VIEW(member, value, status, says)                                                                        \
  WRONG(__typeof__(((cumoe_view *)0)->member), f->at + offsetof(cumoe_view, member), value, status, says,              \
        #member " %lld")

static void wrong_extents(const argument *f, cumoe_view v)
{
  const cumoe_status invalid = CUMOE_ERR_INVALID_ARGUMENT, past = v.owner ? CUMOE_ERR_OUT_OF_BOUNDS : invalid;
  const char *loose = f->traits & LOOSE ? "" : f->name;
  const int64_t lengths[] = {-1, INT64_MIN, INT64_MAX};
  for (int i = 0; i < 3; i++) {
    WRONG_VIEW(rows, lengths[i], i == 2 ? past : invalid, loose);
    WRONG_VIEW(cols, lengths[i], i < 2 ? status_of(f, invalid) : invalid, loose);
    WRONG_VIEW(ld, lengths[i], i == 2 ? past : invalid, f->name);
  }
  if (!(f->traits & FREE_ROWS)) WRONG_VIEW(rows, v.rows + (v.owner ? 5 : 1), past, loose);
  if (!(f->traits & FREE_ROWS) && !v.owner) WRONG_VIEW(rows, v.rows - 1, invalid, loose);
  if ((f->traits & LEAST_ROWS) == LEAST_ROWS) WRONG_VIEW(rows, v.rows - 1, invalid, "");
  if (!(f->traits & FREE_COLS) && !v.owner) {
    WRONG_VIEW(cols, v.cols + 1, invalid, loose);
    WRONG_VIEW(cols, v.cols - 1, invalid, loose);
  }
  WRONG_VIEW(ld, v.cols - 1, invalid, f->name);
  if (v.rows < 2) return;
  WRONG_VIEW(ld, INT64_MAX / v.rows, past, f->name);
  WRONG_VIEW(ld, (int64_t)1 << 60, past, f->name);
  WRONG_VIEW(ld, 2 * MOST / v.rows / (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype), past, f->name);
  if (f->traits & PACKED) WRONG_VIEW(ld, v.ld + 1, CUMOE_ERR_LAYOUT, f->name);
}

static void wrong_places(const argument *f, cumoe_view v)
{
  const int64_t element = (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  const uint32_t align = f->align > element ? f->align : (uint32_t)element;
  if (v.data) WRONG_VIEW(data, NULL, v.owner ? CUMOE_ERR_OUT_OF_BOUNDS : CUMOE_ERR_INVALID_ARGUMENT, f->name);
  for (uint32_t by = 1; v.data && v.owner == 0 && by < align; by *= 2)
    WRONG_VIEW(data, (const char *)v.data + by, CUMOE_ERR_MISALIGNED, f->name);
  if (v.rows > 1 && align > element) WRONG_VIEW(ld, v.ld + 1, CUMOE_ERR_MISALIGNED, f->name);
  const int32_t devices[] = {0, 2, 99, -4, CUMOE_DEVICE_AUTO, bench.cpu ? 1 : CUMOE_DEVICE_CPU, INT32_MIN};
  for (int i = 0; i < 7; i++) WRONG_VIEW(device, devices[i], CUMOE_ERR_WRONG_DEVICE, f->name);
  WRONG_VIEW(owner, bench.freed.id, CUMOE_ERR_STALE_HANDLE, f->name);
  WRONG_VIEW(owner, bench.buffer.id + ((uint64_t)4096 << 32), CUMOE_ERR_STALE_HANDLE, f->name);
  WRONG_VIEW(owner, UINT64_MAX, CUMOE_ERR_STALE_HANDLE, f->name);
  WRONG_VIEW(owner, bench.foreign.id, CUMOE_ERR_WRONG_DEVICE, f->name);
  if (v.data) WRONG_VIEW(owner, bench.tiny.id, CUMOE_ERR_OUT_OF_BOUNDS, f->name);
  const cumoe_view none = {.device = CUMOE_DEVICE_ANY, .dtype = v.dtype};
  const cumoe_view stale = {.owner = bench.freed.id, .dtype = v.dtype}; /* as the view of a freed buffer is */
  WRONG(cumoe_view, f->at, stale, CUMOE_ERR_STALE_HANDLE, f->name, "of a freed buffer");
  if (!(f->traits & (LOOSE | OPTIONAL | FREE_ROWS | FREE_COLS)) && v.data)
    WRONG(cumoe_view, f->at, none, CUMOE_ERR_INVALID_ARGUMENT, "", "left out");
}

/* A view of a buffer that is one byte too short. */
static void short_view(const argument *f, cumoe_view v)
{
  const int64_t bytes = ((v.rows - 1) * v.ld + v.cols) * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  cumoe_buffer small = {0};
  if (v.data == NULL || bytes < 2) return;
  CHECK_OK(cumoe_buffer_alloc(bench.context, CUMOE_U8, 1, bytes - 1, no_stream, &small));
  v.data = cumoe_buffer_view(small).data;
  v.owner = small.id;
  WRONG(cumoe_view, f->at, v, CUMOE_ERR_OUT_OF_BOUNDS, f->name, "one byte short");
  CHECK_OK(cumoe_buffer_free(&small));
}

/* What a call may write in its place, it may not write a row further on, or with other gaps between rows. */
static void out_of_place(const argument *f, const argument *g, cumoe_view v)
{
  const cumoe_view with = right_view(g);
  const char *second = (const char *)with.data + with.ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)with.dtype);
  if (with.data == NULL || with.rows < 2) return;
  v.data = second;
  if ((uintptr_t)second % (f->align > 16 ? f->align : 16) == 0)
    WRONG(cumoe_view, f->at, v, CUMOE_ERR_INVALID_ARGUMENT, " overlaps ", "begins in another's second row");
  v.data = with.data;
  v.ld += 16;
  if (v.rows > 1 && !(f->traits & PACKED))
    WRONG(cumoe_view, f->at, v, CUMOE_ERR_INVALID_ARGUMENT, " overlaps ", "has other gaps than another");
}

/* What a call writes begins where another view of the call begins, or its weights. */
static void overlapping(const argument *f, cumoe_view v)
{
  for (int i = 0; i < now->count && f->traits & OUT; i++) {
    const argument *g = &now->arguments[i];
    if (g == f || (g->kind != A_VIEW && g->kind != A_WEIGHTS)) continue;
    if (g->traits & IN_PLACE) {
      out_of_place(f, g, v);
      continue;
    }
    v.data = g->kind == A_WEIGHTS ? bench.bound : right_view(g).data;
    if (v.data && (uintptr_t)v.data % 256 == 0)
      WRONG(cumoe_view, f->at, v, CUMOE_ERR_INVALID_ARGUMENT, " overlaps ", "begins with another");
  }
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
    bool fresh = n < f->low || n > f->high || (f->step > 1 && n % f->step != 0);
    for (int j = 0; j < count; j++) fresh = fresh && list[j] != n;
    if (fresh) list[count++] = n;
  }
  return count;
}

static void wrong_numbers(const argument *f)
{
  int64_t list[8];
  const char *says = f->traits & LOOSE ? "" : f->name;
  const cumoe_status status = status_of(f, CUMOE_ERR_INVALID_ARGUMENT);
  if (status == CUMOE_ERR_WORKSPACE) { /* one byte short; ld as before is legal */
    const int64_t cols = *(int64_t *)(void *)((char *)&right + f->at);
    WRONG(int64_t, f->at, cols - 1, CUMOE_ERR_WORKSPACE, f->name, "%lld");
    WRONG(int64_t, f->at, 1, CUMOE_ERR_WORKSPACE, f->name, "%lld");
    return;
  }
  const bool narrow = f->kind == A_INT;
  const int count = list_numbers(f, narrow ? INT32_MIN : INT64_MIN, narrow ? INT32_MAX : INT64_MAX, list);
  for (int i = 0; i < count; i++)
    if (narrow)
      WRONG(int32_t, f->at, (int32_t)list[i], status, says, "%lld");
    else
      WRONG(int64_t, f->at, list[i], status, says, "%lld");
}

static void wrong_sizes(const argument *f)
{
  const uint32_t size = *(uint32_t *)(void *)((char *)&right + f->at);
  const uint32_t sizes[] = {0, 1, 7, size - 1, 4104, UINT32_MAX};
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

/* Ids near a live one, and others; 0 is none. */
static void wrong_handles(const argument *f, uint64_t live, bool none)
{
  const uint64_t ids[] = {f->kind == A_HANDLE ? bench.freed.id : live + 1000,
                          live + ((uint64_t)1 << 32),
                          live + ((uint64_t)4096 << 32),
                          UINT64_MAX,
                          1,
                          (uint64_t)1 << 32,
                          0xffffffff,
                          0};
  for (int i = 0; i < 7 + none; i++) WRONG(uint64_t, f->at, ids[i], CUMOE_ERR_STALE_HANDLE, f->name, "handle %llx");
}

static void wrong_bytes(const argument *f)
{
  const size_t n = right.bytes, list[] = {0, n - 1, n + 1, n / 2, n * 2, SIZE_MAX};
  for (int i = 0; i < 6; i++) WRONG(size_t, f->at, list[i], f->status, f->name, "%lld");
}

static void wrong_flags(const argument *f)
{
  const uint32_t set = *(uint32_t *)(void *)((char *)&right + f->at);
  for (int b = 0; b < 32; b++)
    if (!(f->types >> b & 1)) WRONG(uint32_t, f->at, set | 1u << b, CUMOE_ERR_INVALID_ARGUMENT, f->name, "%llx");
}

static void wrong_floats(const argument *f)
{
  const float list[] = {-1, -1e-30f, -3e38f, -INFINITY, INFINITY, NAN, -NAN};
  for (int i = 0; i < 7; i++) WRONG(float, f->at, list[i], CUMOE_ERR_INVALID_ARGUMENT, f->name, "float %llx");
}

static void wrong(const argument *f)
{
  if (bench.cpu && f->traits & CUDA_ONLY) return;
  switch (f->kind) {
  case A_CONTEXT:
  case A_PLAN:
  case A_WEIGHTS: wrong_objects(f); break;
  case A_VIEW:
    wrong_extents(f, right_view(f));
    wrong_places(f, right_view(f));
    wrong_types(f, f->at + offsetof(cumoe_view, dtype), CUMOE_ERR_WRONG_DTYPE);
    short_view(f, right_view(f));
    overlapping(f, right_view(f));
    break;
  case A_NOT_NULL: WRONG(void *, f->at, NULL, CUMOE_ERR_INVALID_ARGUMENT, f->name, "null"); break;
  case A_SIZE: wrong_sizes(f); break;
  case A_INT:
  case A_LONG: wrong_numbers(f); break;
  case A_VALUE: WRONG(int64_t, f->at, f->low, f->status, f->name, "%lld"); break;
  case A_BYTES: wrong_bytes(f); break;
  case A_FLAGS: wrong_flags(f); break;
  case A_FLOAT: wrong_floats(f); break;
  case A_TYPE: wrong_types(f, f->at, status_of(f, CUMOE_ERR_WRONG_DTYPE)); break;
  case A_HANDLE: wrong_handles(f, bench.buffer.id, false); break;
  case A_OBJECT: wrong_handles(f, right.object, !(f->traits & OPTIONAL)); break;
  }
}

static void run_changes(void)
{
  for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
    if (strcmp(changes[i].name, now->name) != 0 || strcmp(changes[i].form, now->form) != 0) continue;
    arguments wrong;
    expectation e = {0};
    const int count = changes[i].change(-1, &right, &e);
    for (int c = 0; c < count; c++) {
      copy_right(&wrong);
      changes[i].change(c, &wrong, &e);
      expect(&wrong, e.status, e.words, e.how, 0);
    }
  }
}

/* ---- runs ------------------------------------------------------------------------------------------------ */

static cumoe_weights bind_plain(cumoe_context context, int32_t dtype, int32_t experts, int32_t inter, int32_t order)
{
  cumoe_weights bound = NULL;
  cumoe_weights_desc d = {.size = sizeof d,
                          .experts = experts,
                          .hidden = HIDDEN,
                          .inter = inter,
                          .gate_order = order,
                          .up_major = CUMOE_OUT_IN,
                          .down_major = CUMOE_OUT_IN};
  const uintptr_t next = bench.next; /* nobody reads them: all lie in the same place */
  *(order == CUMOE_UNGATED ? &d.up.data : &d.gate_up.data) =
      give(dtype, (order == CUMOE_UNGATED ? 1 : 2) * (int64_t)experts * inter, HIDDEN);
  d.down.data = give(dtype, (int64_t)experts * HIDDEN, inter);
  bench.next = next;
  CHECK_OK(cumoe_weights_bind(context, &d, &bound));
  return bound;
}

static cumoe_plan plan_for(cumoe_context context, uint32_t route_flags, int32_t shared, int32_t experts, uint32_t flags)
{
  cumoe_plan plan = NULL;
  const cumoe_moe_desc d = {.size = sizeof d,
                            .num_experts = experts,
                            .local_experts = EXPERTS,
                            .hidden = HIDDEN,
                            .inter = INTER,
                            .shared_inter = shared,
                            .dtype = CUMOE_BF16,
                            .flags = flags,
                            .routing = cumoe_routing_make(CUMOE_SCORE_SOFTMAX, TOP_K, route_flags)};
  CHECK_OK(cumoe_plan_create(context, &d, &plan));
  return plan;
}

/* A graph, and a module of the caller's. */
static void open_caller_work(void)
{
  CHECK_OK(cumoe_graph_begin(bench.context, bench.stream));
  CHECK_OK(cumoe_graph_end(bench.context, bench.stream, &bench.graph));
  CHECK_OK(cumoe_module_load(bench.context, ptx_text, sizeof ptx_text, &bench.module));
  CHECK(shim_last_image() != ptx_text); /* CUDA reads what was inspected: a copy */
  CHECK_OK(cumoe_module_function(bench.module, "add", 0, &bench.function));
}

static void open_bench(int32_t device)
{
  bench.cpu = device == CUMOE_DEVICE_CPU;
  bench.next = bench.cpu ? (uintptr_t)arena : SHIM_LENT;
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = 1};
  CHECK_OK(cumoe_context_create(device, &config, &bench.context));
  CHECK_OK(cumoe_context_create(bench.cpu ? 1 : 0, NULL, &bench.other));
  bench.plan = plan_for(bench.context, CUMOE_ROUTE_RENORMALIZE, 0, EXPERTS, 0);
  bench.shared_plan = plan_for(bench.context, CUMOE_ROUTE_RENORMALIZE, 8, EXPERTS, 0);
  bench.weighing_plan = plan_for(bench.context, CUMOE_ROUTE_WEIGHT_ON_INPUT, 0, EXPERTS, 0);
  bench.local_plan = plan_for(bench.context, 0, 0, 2 * EXPERTS, 0);
  bench.unreduced_plan = plan_for(bench.context, 0, 0, EXPERTS, CUMOE_MOE_UNREDUCED);
  bench.ungated_plan = plan_for(bench.context, 0, 0, EXPERTS, CUMOE_MOE_UNGATED);
  bench.foreign_plan = plan_for(bench.other, CUMOE_ROUTE_RENORMALIZE, 0, EXPERTS, 0);
  bench.bound = (const void *)bench.next;
  bench.weights = bind_plain(bench.context, CUMOE_BF16, EXPERTS, INTER, CUMOE_GATE_UP_CONCAT);
  bench.same = bind_plain(bench.context, CUMOE_BF16, EXPERTS, INTER, CUMOE_GATE_UP_CONCAT);
  bench.shared = bind_plain(bench.context, CUMOE_BF16, 1, 8, CUMOE_GATE_UP_CONCAT);
  bench.narrow = bind_plain(bench.context, CUMOE_BF16, EXPERTS, 8, CUMOE_GATE_UP_CONCAT);
  bench.halves = bind_plain(bench.context, CUMOE_F16, EXPERTS, INTER, CUMOE_GATE_UP_CONCAT);
  bench.ungated = bind_plain(bench.context, CUMOE_BF16, EXPERTS, INTER, CUMOE_UNGATED);
  bench.foreign_weights = bind_plain(bench.other, CUMOE_BF16, EXPERTS, INTER, CUMOE_GATE_UP_CONCAT);
  (void)give(CUMOE_BF16, 3 * EXPERTS * INTER, HIDDEN); /* where they lie */
  bench.d_weights = bind_plain(bench.context, CUMOE_BF16, EXPERTS, INTER, CUMOE_GATE_UP_CONCAT);
  bench.d_bound = (const void *)bench.next;
  (void)give(CUMOE_BF16, 3 * EXPERTS * INTER, HIDDEN);
  bench.d_shared = bind_plain(bench.context, CUMOE_F32, 1, 8, CUMOE_GATE_UP_CONCAT);
  (void)give(CUMOE_F32, 3 * 8, HIDDEN);
  bench.logits = give(CUMOE_F32, TOKENS, EXPERTS);
  bench.ids = give(CUMOE_I32, TOKENS, TOP_K);
  bench.pair_weights = give(CUMOE_F32, TOKENS, TOP_K);
  bench.row = give(CUMOE_F32, 1, EXPERTS);
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
  const cumoe_plan plans[] = {bench.plan,           bench.shared_plan,  bench.weighing_plan, bench.local_plan,
                              bench.unreduced_plan, bench.foreign_plan, bench.ungated_plan};
  const cumoe_weights weights[] = {bench.weights,         bench.shared,    bench.narrow,   bench.halves, bench.ungated,
                                   bench.foreign_weights, bench.d_weights, bench.d_shared, bench.same};
  for (int i = 0; i < 7; i++) CHECK_OK(cumoe_plan_destroy(plans[i]));
  for (int i = 0; i < 9; i++) CHECK_OK(cumoe_weights_destroy(weights[i]));
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
  if (!group_begin("%s %s, %s", bench.cpu ? "cpu" : "cuda", f->name, f->form)) return;
  now = f;
  for (int round = 0; round < 2; round++) {
    case_begin("as it should be");
    memset(&right, 0, sizeof right);
    memset(&results, 0, sizeof results);
    bench.next = next;
    right.context = bench.context;
    right.out = &results;
    f->fill(&right);
    CHECK_OK(f->call(&right));
    if (f->undo) f->undo(&right);
    case_end();
    for (int i = 0; i < f->count && round == 0; i++) wrong(&f->arguments[i]);
    if (round == 0) run_changes();
  }
  bench.next = next;
  group_end();
}

static void run_device(int32_t device)
{
  case_begin("open");
  open_bench(device);
  case_end();
  for (int i = 0; i < function_count; i++) run_function(&functions[i]);
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
  case_begin("a slice and itself, whatever the pitch");
  for (int64_t ld = 8; ld <= 64; ld += 8) {
    src.rows = 1;
    src.cols = 8;
    src.ld = ld;
    src.data = cumoe_buffer_view(bench.buffer).data;
    for (src.rows = 1; src.rows <= 4 && (src.rows - 1) * ld + 8 <= 4 * 64; src.rows++) {
      const cumoe_view_mut same = {
          (void *)(uintptr_t)src.data, src.rows, src.cols, src.ld, src.owner, src.device, src.dtype};
      CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_copy(bench.context, same, src, no_stream));
      CHECK(strstr(cumoe_last_error(), "overlaps") != NULL);
    }
  }
  case_end();
  case_begin("one begins where the other ends");
  cumoe_view_mut above, below;
  CHECK_OK(cumoe_view_split_mut(cumoe_buffer_view_mut(bench.buffer), 2, &above, &below));
  below.rows = 2;
  below.ld = 128;
  CHECK_OK(cumoe_copy(bench.context, below, cumoe_const(above), no_stream));
  CHECK_OK(cumoe_copy(bench.context, above, cumoe_const(below), no_stream));
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
  case_begin("limits");
  CHECK_MSG(cumoe_limit_count() == LIMITS, "%d, this test's table says %d", (int)cumoe_limit_count(), LIMITS);
  case_end();
  group_end();
}

/* ---- completeness ----------------------------------------------------------------------------------------- */

static bool is_listed(const char *name)
{
  for (int i = 0; i < function_count; i++)
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

static bool sample_found;

static void check_header(const char *path)
{
  static char text[1 << 18];
  FILE *file = fopen(path, "r");
  if (!CHECK_MSG(file != NULL, "%s cannot be read", path)) return;
  text[fread(text, 1, sizeof text - 1, file)] = 0;
  fclose(file);
  sample_found |= strstr(text, " \"cumoe_moe_forward: " SAMPLE "\". ") != NULL;
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
  case_begin("the manual's example of a text");
  CHECK(sample_found);
  case_end();
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
