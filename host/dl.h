/*
 * Optional shared libraries (NVRTC, cuBLAS): never linked, opened when a call first needs one, kept for good.
 *
 *   static const char *const nvrtc_names[] = {LIBRARY_NAMES("libnvrtc")};
 *   static shared_library nvrtc = {.title = "NVRTC", .variable = "CUMOE_NVRTC_PATH", .probe = "nvrtcGetCUBIN",
 *                                  .names = nvrtc_names};
 *   static shared_symbol compile = {.name = "nvrtcCompileProgram"};
 *   any_function *found;
 *   TRY(find_shared(&nvrtc, &compile, &found));      the first time opens and resolves, later one load each
 *   result = ((nvrtcResult(*)(nvrtcProgram, int, const char *const *))found)(program, 0, NULL);
 *
 * Order: the file that the environment variable names, and no other; a copy that the process has already, so that the
 * engine's is used; the names as given, versioned ones first. A symbol that is missing fails the call that needs it
 * and no other.
 */
#ifndef CUMOE_DL_H
#define CUMOE_DL_H

#include "status.h"

typedef void any_function(void);

/* The versions of CUDA that a library may be of, the runtime's own first. */
#if CUDART_VERSION >= 13000
#define LIBRARY_NAMES(name) name ".so.13", name ".so.12", name ".so", NULL
#else
#define LIBRARY_NAMES(name) name ".so.12", name ".so.13", name ".so", NULL
#endif

typedef struct shared_library {
  const char *title;    /* for texts */
  const char *variable; /* of the environment: a path */
  const char *probe;    /* tells that the process has the library: the newest function of it that is called */
  const char *const *names;
  _Atomic(void *) handle;
} shared_library;

typedef struct shared_symbol {
  const char *name;
  _Atomic uintptr_t address;
} shared_symbol;

/* LIBRARY_MISSING, with what was tried and the loader's own words; nothing is remembered, so a later call tries
 * again. Any thread. Both objects are static. */
cumoe_status find_shared(shared_library *library, shared_symbol *symbol, any_function **function);

/* The copy that the process has already, and no other: for what belongs to an object of the engine's. LIBRARY_MISSING
 * without. */
cumoe_status find_loaded_library(const shared_library *library, void **handle);

#endif
