/* A caller's kernels: facts, checked launches, occupancy. */
#include "buffer.h"
#include "check.h"
#include "context.h"
#include "module.h"
#include "status.h"

#include <stdio.h>
#include <string.h>

enum { WARP = 32, MAX_CLUSTER = 8 /* what every GPU with clusters has */ };
static const uint32_t GRID_LIMIT[] = {INT32_MAX, 65535, 65535}, BLOCK_LIMIT[] = {1024, 1024, 64};

/* ---- the shape of a launch ---- */

static cumoe_status check_grid(const uint32_t grid[3])
{
  for (int i = 0; i < 3; ++i)
    REQUIRE(grid[i] <= GRID_LIMIT[i] && (grid[i] || i == 0), CUMOE_ERR_INVALID_ARGUMENT,
            "launch.grid[%d] is %u, must be %d .. %u", i, grid[i], i > 0, GRID_LIMIT[i]);
  return CUMOE_OK;
}

static cumoe_status check_block(const function_facts *f, uint32_t block[3])
{
  REQUIRE(block[0], CUMOE_ERR_INVALID_ARGUMENT, "launch.block[0] is 0");
  uint64_t threads = 1;
  for (int i = 0; i < 3; ++i) {
    if (block[i] == 0) block[i] = 1;
    REQUIRE(block[i] <= BLOCK_LIMIT[i], CUMOE_ERR_INVALID_ARGUMENT, "launch.block[%d] is %u, the limit is %u", i,
            block[i], BLOCK_LIMIT[i]);
    threads *= block[i];
  }
  REQUIRE(threads <= (uint64_t)f->max_threads, CUMOE_ERR_INVALID_ARGUMENT,
          "launch.block is %u x %u x %u = %llu threads, %s can have %d", block[0], block[1], block[2],
          (unsigned long long)threads, f->name, (int)f->max_threads);
  return CUMOE_OK;
}

static cumoe_status check_cluster(const function_facts *f, uint32_t cluster[3], const uint32_t grid[3], bool any_grid)
{
  if (!cluster[0] && !cluster[1] && !cluster[2]) return CUMOE_OK;
  const cumoe_device_info *info = &f->context->info;
  uint64_t blocks = 1;
  for (int i = 0; i < 3; ++i) {
    if (cluster[i] == 0) cluster[i] = 1;
    REQUIRE(cluster[i] <= MAX_CLUSTER, CUMOE_ERR_INVALID_ARGUMENT, "launch.cluster[%d] is %u, the limit is %d", i,
            cluster[i], MAX_CLUSTER);
    REQUIRE(any_grid || grid[i] % cluster[i] == 0, CUMOE_ERR_INVALID_ARGUMENT,
            "launch.grid[%d] is %u, must be a multiple of cluster[%d], %u", i, grid[i], i, cluster[i]);
    blocks *= cluster[i];
  }
  REQUIRE(blocks <= MAX_CLUSTER, CUMOE_ERR_INVALID_ARGUMENT, "launch.cluster has %llu blocks, the limit is %d",
          (unsigned long long)blocks, MAX_CLUSTER);
  REQUIRE(info->cc_major >= 9, CUMOE_ERR_NOT_SUPPORTED, "launch.cluster: compute capability %d.%d has no clusters",
          (int)info->cc_major, (int)info->cc_minor);
  return CUMOE_OK;
}

static dim3 dimensions(const uint32_t d[3])
{
  return (dim3){d[0], d[1], d[2]};
}

cumoe_status check_launch(const function_facts *f, const cumoe_launch *launch, bool any_grid, launch_shape *shape,
                          cumoe_stream *stream)
{
  cumoe_launch l;
  const uint32_t known = CUMOE_LAUNCH_EARLY | CUMOE_LAUNCH_COOPERATIVE;
  TRY(take_struct("launch", launch, &l));
  REQUIRE((l.flags & ~known) == 0, CUMOE_ERR_INVALID_ARGUMENT, "launch.flags is 0x%x, known are 0x%x", l.flags, known);
  if (!any_grid) TRY(check_grid(l.grid));
  TRY(check_block(f, l.block));
  TRY(check_cluster(f, l.cluster, l.grid, any_grid));
  REQUIRE(l.dynamic_smem <= (uint32_t)f->max_dynamic_smem, CUMOE_ERR_INVALID_ARGUMENT,
          "launch.dynamic_smem is %u bytes, %s was looked up for %d", l.dynamic_smem, f->name,
          (int)f->max_dynamic_smem);
  *shape = (launch_shape){.grid = dimensions(l.grid),
                          .block = dimensions(l.block),
                          .cluster = dimensions(l.cluster),
                          .smem = l.dynamic_smem,
                          .early = (l.flags & CUMOE_LAUNCH_EARLY) && f->context->info.cc_major >= 9,
                          .cooperative = (l.flags & CUMOE_LAUNCH_COOPERATIVE) != 0};
  *stream = l.stream;
  return CUMOE_OK;
}

/* ---- arguments ---- */

static cumoe_status check_view(const function_facts *f, const char *name, const cumoe_view *v)
{
  if (absent(v)) return CUMOE_OK;
  TRY(check_owner(f->context, name, v));
  TRY(check_device(name, v, f->context->device));
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)v->dtype);
  REQUIRE(element, CUMOE_ERR_WRONG_DTYPE, "%s.dtype is %d, not a cumoe_dtype", name, (int)v->dtype);
  return check_extent(name, v, (uint32_t)element);
}

/* Its size, and where its value lies; 0 for an unknown kind. */
static size_t locate(const cumoe_arg *a, void **value)
{
  switch ((cumoe_arg_kind)a->kind) {
  case CUMOE_ARG_I32:
  case CUMOE_ARG_U32:
  case CUMOE_ARG_F32: *value = (void *)(uintptr_t)&a->value; return 4;
  case CUMOE_ARG_I64:
  case CUMOE_ARG_U64:
  case CUMOE_ARG_F64: *value = (void *)(uintptr_t)&a->value; return 8;
  case CUMOE_ARG_VIEW:
  case CUMOE_ARG_VIEW_MUT: *value = (void *)(uintptr_t)&a->value.view.data; return sizeof(void *);
  case CUMOE_ARG_BYTES: *value = (void *)(uintptr_t)a->value.blob; return a->bytes;
  }
  return 0;
}

_Static_assert(offsetof(cumoe_view, data) == offsetof(cumoe_view_mut, data), "locate reads either");

static cumoe_status check_argument(const function_facts *f, int32_t index, const cumoe_arg *a, void **value)
{
  char name[24];
  *value = NULL;
  const size_t bytes = locate(a, value);
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "args[%d].%s", (int)index,
          a->kind == CUMOE_ARG_BYTES ? "bytes is 0" : "kind is not a cumoe_arg_kind");
  REQUIRE(*value, CUMOE_ERR_INVALID_ARGUMENT, "args[%d].value.blob is null", (int)index);
  REQUIRE(bytes == f->parameter_bytes[index], CUMOE_ERR_INVALID_ARGUMENT,
          "args[%d] has %zu bytes, parameter %d of %s has %u", (int)index, bytes, (int)index, f->name,
          f->parameter_bytes[index]);
  (void)snprintf(name, sizeof name, "args[%d]", (int)index);
  if (a->kind == CUMOE_ARG_VIEW) return check_view(f, name, &a->value.view);
  if (a->kind != CUMOE_ARG_VIEW_MUT) return CUMOE_OK;
  const cumoe_view v = cumoe_const(a->value.view_mut);
  return check_view(f, name, &v);
}

cumoe_status check_arguments(const function_facts *f, const cumoe_arg *args, int32_t count,
                             void *parameters[CUMOE_MAX_PARAMETERS])
{
  REQUIRE(count == f->parameters, CUMOE_ERR_INVALID_ARGUMENT, "arg_count is %d, %s has %d parameters", (int)count,
          f->name, (int)f->parameters);
  REQUIRE(args || count == 0, CUMOE_ERR_INVALID_ARGUMENT, "args is null");
  for (int32_t i = 0; i < count; ++i) TRY(check_argument(f, i, &args[i], &parameters[i]));
  return CUMOE_OK;
}

cumoe_status cumoe_launch_kernel(cumoe_function function, const cumoe_launch *launch, const cumoe_arg *args,
                                 int32_t arg_count)
{
  begin_call(__func__);
  function_facts f;
  launch_shape shape = {0};
  cumoe_stream stream = NULL;
  void *parameters[CUMOE_MAX_PARAMETERS];
  TRY(find_function(function, &f));
  TRY(check_launch(&f, launch, false, &shape, &stream));
  begin_call_on(__func__, stream);
  TRY(check_arguments(&f, args, arg_count, parameters));
  if (shape.grid.x == 0) return CUMOE_OK;
  ON_DEVICE(f.context, launch_kernel(f.kernel, f.name, &shape, parameters, stream));
}

/* ---- facts ---- */

static cumoe_status read_info(const function_facts *f, cumoe_function_info *info)
{
  struct cudaFuncAttributes facts;
  TRY_CUDA(cudaFuncGetAttributes(&facts, (const void *)f->kernel));
  cumoe_function_info now = {.registers = facts.numRegs,
                             .static_smem = (int32_t)facts.sharedSizeBytes,
                             .max_dynamic_smem = facts.maxDynamicSharedSizeBytes,
                             .local_bytes = (int32_t)facts.localSizeBytes,
                             .constant_bytes = (int32_t)facts.constSizeBytes,
                             .max_threads = facts.maxThreadsPerBlock,
                             .ptx_version = facts.ptxVersion,
                             .binary_version = facts.binaryVersion,
                             .parameters = f->parameters};
  for (int32_t i = 0; i < f->parameters; ++i) now.parameter_bytes[i] = f->parameter_bytes[i];
  give_struct(&now, info);
  return CUMOE_OK;
}

cumoe_status cumoe_function_get_info(cumoe_function function, cumoe_function_info *info)
{
  begin_call(__func__);
  function_facts f;
  TRY(check_struct("info", info));
  TRY(find_function(function, &f));
  ON_DEVICE_RELAXED(f.context, read_info(&f, info));
}

/* ---- occupancy ---- */

static cumoe_status read_clusters(const function_facts *f, const launch_shape *shape, cumoe_occupancy *o)
{
  cudaLaunchAttribute attributes[LAUNCH_ATTRIBUTES];
  cudaLaunchConfig_t config;
  launch_shape alone = *shape;
  if (f->context->info.cc_major < 9) return CUMOE_OK;
  if (shape->cluster.x) {
    alone.grid = shape->cluster; /* one cluster: the grid must be a multiple, and counts for nothing else */
    launch_config(&alone, NULL, attributes, &config);
    TRY_CUDA(cudaOccupancyMaxActiveClusters(&o->clusters, (const void *)f->kernel, &config));
  }
  alone.cluster = (dim3){0, 0, 0};
  alone.grid = (dim3){1, 1, 1};
  launch_config(&alone, NULL, attributes, &config);
  TRY_CUDA(cudaOccupancyMaxPotentialClusterSize(&o->largest_cluster, (const void *)f->kernel, &config));
  return CUMOE_OK;
}

static cumoe_status read_occupancy(const function_facts *f, const launch_shape *shape, cumoe_occupancy *occupancy)
{
  const void *kernel = (const void *)f->kernel;
  const int threads = (int)(shape->block.x * shape->block.y * shape->block.z);
  size_t spare = 0;
  cumoe_occupancy now = {0};
  TRY_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&now.blocks_per_sm, kernel, threads, shape->smem));
  if (now.blocks_per_sm > 0)
    TRY_CUDA(cudaOccupancyAvailableDynamicSMemPerBlock(&spare, kernel, now.blocks_per_sm, threads));
  now.spare_smem = spare;
  TRY(read_clusters(f, shape, &now));
  give_struct(&now, occupancy);
  return CUMOE_OK;
}

cumoe_status cumoe_function_occupancy(cumoe_function function, const cumoe_launch *launch, cumoe_occupancy *occupancy)
{
  begin_call(__func__);
  function_facts f;
  launch_shape shape = {0};
  cumoe_stream stream = NULL;
  TRY(check_struct("occupancy", occupancy));
  TRY(find_function(function, &f));
  TRY(check_launch(&f, launch, true, &shape, &stream));
  ON_DEVICE_RELAXED(f.context, read_occupancy(&f, &shape, occupancy));
}

static cumoe_status best_block(const function_facts *f, uint32_t dynamic_smem, uint32_t *threads)
{
  int best = 0;
  for (int t = f->max_threads / WARP * WARP; t >= WARP; t -= WARP) {
    int blocks = 0;
    TRY_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, (const void *)f->kernel, t, dynamic_smem));
    if (blocks * t <= best) continue;
    best = blocks * t;
    *threads = (uint32_t)t;
  }
  REQUIRE(best, CUMOE_ERR_INVALID_ARGUMENT, "dynamic_smem is %u: no block of %s runs with so much", dynamic_smem,
          f->name);
  return CUMOE_OK;
}

cumoe_status cumoe_function_block(cumoe_function function, uint32_t dynamic_smem, uint32_t *threads)
{
  begin_call(__func__);
  function_facts f;
  REQUIRE(threads, CUMOE_ERR_INVALID_ARGUMENT, "threads is null");
  *threads = 0;
  TRY(find_function(function, &f));
  ON_DEVICE_RELAXED(f.context, best_block(&f, dynamic_smem, threads));
}
