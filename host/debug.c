/* Debug levels: the report of leaks, the list of what is live, the check of all red zones. */
#include "debug.h"
#include "block.h"
#include "check.h"
#include "context.h"
#include "memory.h"
#include "objects.h"
#include "status.h"

#include <stdlib.h>
#include <string.h>

#include "../include/cumoe/debug.h"

enum { MAX_SITES = 64, TOLD_SITES = 8 };

/* ---- leaks ---- */

typedef struct site {
  const char *file; /* NULL: all that found no place of their own */
  int32_t line;
  int64_t count;
  size_t bytes;
} site;

static site *site_of(site *sites, int *count, const block *b)
{
  for (int i = 0; i < *count; i++)
    if (sites[i].line == b->line && strcmp(sites[i].file, b->file) == 0) return &sites[i];
  if (*count == MAX_SITES) return &sites[MAX_SITES];
  sites[*count].file = b->file;
  sites[*count].line = b->line;
  return &sites[(*count)++];
}

static void add_sites(const block *list, site *sites, int *count, site *sum)
{
  for (const block *b = list; b != NULL; b = b->older) {
    site *own = site_of(sites, count, b);
    own->count++;
    own->bytes += b->bytes;
    sum->count++;
    sum->bytes += b->bytes;
  }
}

static int by_bytes(const void *a, const void *b)
{
  const site *x = a, *y = b;
  return (x->bytes < y->bytes) - (x->bytes > y->bytes);
}

static cumoe_status report_leaks(struct context *context)
{
  site sites[MAX_SITES + 1] = {{0}}, sum = {0};
  int count = 0;
  add_sites(context->blocks, sites, &count, &sum);
  add_sites(context->pinned, sites, &count, &sum);
  const int64_t plans = count_objects(OBJECT_PLAN, context), weights = count_objects(OBJECT_WEIGHTS, context);
  if (plans || weights)
    log_message(CUMOE_LOG_WARNING, "cumoe: alive at the end of the context on device %d: %lld plans, %lld weights",
                (int)context->device, (long long)plans, (long long)weights);
  if (sum.count == 0) return CUMOE_OK;
  log_message(CUMOE_LOG_WARNING, "cumoe: leaked at the end of the context on device %d: %lld buffers, %zu bytes",
              (int)context->device, (long long)sum.count, sum.bytes);
  qsort(sites, (size_t)count, sizeof sites[0], by_bytes);
  for (int i = 0; i < count && i < TOLD_SITES; i++) {
    log_message(CUMOE_LOG_WARNING, "cumoe: leaked: %lld buffers, %zu bytes from %s:%d", (long long)sites[i].count,
                sites[i].bytes, sites[i].file, (int)sites[i].line);
    sum.count -= sites[i].count;
    sum.bytes -= sites[i].bytes;
  }
  if (sum.count != 0)
    log_message(CUMOE_LOG_WARNING, "cumoe: leaked: %lld buffers, %zu bytes from other places", (long long)sum.count,
                sum.bytes);
  return CUMOE_OK;
}

void watch_leaks(struct context *context)
{
  if (context->debug >= 1) on_close(context, CLOSE_REPORT, report_leaks);
}

/* ---- what is live ---- */

static int64_t visit(const block *list, cumoe_live_fn fn, void *user)
{
  int64_t count = 0;
  for (const block *b = list; b != NULL; b = b->older) {
    const cumoe_buffer_info info = block_info(b);
    if (fn != NULL) fn(user, &info);
    count++;
  }
  return count;
}

int64_t cumoe_debug_live(cumoe_context handle, cumoe_live_fn fn, void *user)
{
  begin_call(__func__);
  struct context *context;
  if (find_context(handle, &context) != CUMOE_OK) return -1;
  lock_blocks();
  const int64_t count = visit(context->blocks, fn, user) + visit(context->pinned, fn, user);
  unlock_blocks();
  return count;
}

/* The lock is held while streams are waited for: what is looked at must not be freed meanwhile. */
static cumoe_status check_all(const block *list, cumoe_buffer_info *first_bad)
{
  for (const block *b = list; b != NULL; b = b->older) {
    const cumoe_status status = block_check(b);
    if (status == CUMOE_ERR_OUT_OF_BOUNDS && first_bad != NULL) {
      const cumoe_buffer_info bad = block_info(b);
      give_struct(&bad, first_bad);
    }
    TRY(status);
  }
  return CUMOE_OK;
}

cumoe_status cumoe_debug_check(cumoe_context handle, cumoe_stream stream, cumoe_buffer_info *first_bad)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  if (first_bad != NULL) TRY(check_struct("first_bad", first_bad));
  TRY(memory_wait(context, stream));
  lock_blocks();
  cumoe_status status = check_all(context->blocks, first_bad);
  if (status == CUMOE_OK) status = check_all(context->pinned, first_bad);
  unlock_blocks();
  return status;
}
