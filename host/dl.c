/* See dl.h. */
#include "dl.h"
#include "status.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;

static const char *loader_text(void)
{
  const char *text = dlerror();
  return text ? text : "no reason given";
}

/* The whole program's handle finds what was linked or loaded for all to see; a library that an engine keeps to itself
 * is found by its name. */
static void *find_loaded(const shared_library *library)
{
  void *program = dlopen(NULL, RTLD_NOW | RTLD_LOCAL);
  if (program && dlsym(program, library->probe)) return program;
  for (const char *const *name = library->names; *name; ++name) {
    void *handle = dlopen(*name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (handle) return handle;
  }
  return NULL;
}

cumoe_status find_loaded_library(const shared_library *library, void **handle)
{
  *handle = find_loaded(library);
  REQUIRE(*handle, CUMOE_ERR_LIBRARY_MISSING, "%s is needed, and the process has not loaded %s", library->title,
          library->names[0]);
  return CUMOE_OK;
}

static cumoe_status open_named(const shared_library *library, void **handle)
{
  char first[512] = "", names[256] = "";
  for (const char *const *name = library->names; *name; ++name) {
    *handle = dlopen(*name, RTLD_NOW | RTLD_LOCAL);
    if (*handle) return CUMOE_OK;
    const size_t used = strlen(names);
    if (name == library->names) (void)snprintf(first, sizeof first, "%s", loader_text());
    (void)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", *name);
  }
  return fail(CUMOE_ERR_LIBRARY_MISSING,
              "%s is needed, and none of its names could be opened: %s (%s); set %s to its file", library->title, names,
              first, library->variable);
}

static cumoe_status open_library(const shared_library *library, void **handle)
{
  const char *path = secure_getenv(library->variable);
  if (path && path[0]) {
    *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (*handle) return CUMOE_OK;
    return fail(CUMOE_ERR_LIBRARY_MISSING, "%s is needed, and %s could not be opened: %s", library->title,
                library->variable, loader_text());
  }
  *handle = find_loaded(library);
  return *handle ? CUMOE_OK : open_named(library, handle);
}

static cumoe_status opened(shared_library *library, void **handle)
{
  cumoe_status status = CUMOE_OK;
  pthread_mutex_lock(&open_lock);
  *handle = atomic_load_explicit(&library->handle, memory_order_relaxed);
  if (!*handle) {
    status = open_library(library, handle);
    if (status == CUMOE_OK) atomic_store_explicit(&library->handle, *handle, memory_order_relaxed);
  }
  pthread_mutex_unlock(&open_lock);
  return status;
}

cumoe_status find_shared(shared_library *library, shared_symbol *symbol, any_function **function)
{
  uintptr_t address = atomic_load_explicit(&symbol->address, memory_order_acquire);
  if (address == 0) {
    void *handle = NULL;
    TRY(opened(library, &handle));
    address = (uintptr_t)dlsym(handle, symbol->name);
    REQUIRE(address, CUMOE_ERR_LIBRARY_MISSING, "%s has no function %s: %s", library->title, symbol->name,
            loader_text());
    atomic_store_explicit(&symbol->address, address, memory_order_release);
  }
  memcpy(function, &address, sizeof *function);
  return CUMOE_OK;
}
