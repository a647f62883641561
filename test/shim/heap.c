/* The heap and thread creation of everything that is linked with --wrap: counted, and made to fail on demand. */
#include "shim.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *block, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void __real_free(void *block);
int __real_pthread_create(pthread_t *made, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);

void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *block, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void __wrap_free(void *block);
int __wrap_pthread_create(pthread_t *made, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);

bool shim_heap_fails(shim_channel channel, const char *name);

static atomic_llong blocks;

static void *counted(void *block)
{
  if (block != NULL) atomic_fetch_add(&blocks, 1);
  return block;
}

int64_t shim_heap(void)
{
  return atomic_load(&blocks);
}

void *__wrap_malloc(size_t bytes)
{
  return shim_heap_fails(SHIM_HEAP, "malloc") ? NULL : counted(__real_malloc(bytes));
}

void *__wrap_calloc(size_t count, size_t bytes)
{
  return shim_heap_fails(SHIM_HEAP, "calloc") ? NULL : counted(__real_calloc(count, bytes));
}

void *__wrap_realloc(void *block, size_t bytes)
{
  if (shim_heap_fails(SHIM_HEAP, "realloc")) return NULL;
  void *moved = __real_realloc(block, bytes);
  if (block == NULL) counted(moved);
  return moved;
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
  return shim_heap_fails(SHIM_HEAP, "aligned_alloc") ? NULL : counted(__real_aligned_alloc(alignment, bytes));
}

void __wrap_free(void *block)
{
  if (block != NULL) atomic_fetch_sub(&blocks, 1);
  __real_free(block);
}

int __wrap_pthread_create(pthread_t *made, const pthread_attr_t *attributes, void *(*run)(void *), void *argument)
{
  if (shim_heap_fails(SHIM_THREAD, "pthread_create")) return EAGAIN;
  return __real_pthread_create(made, attributes, run, argument);
}
