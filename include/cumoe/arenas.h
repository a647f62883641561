/*
 * cumoe/arenas.h: the memory that the ranks of a group (cumoe/ep.h) write for each other. Each rank gets an arena,
 * filled with zeros, and the addresses of all others, as this rank addresses them. An engine that has such memory
 * already (symmetric memory of torch, NVSHMEM, mappings of its own) needs none of this.
 *
 *   cumoe_ep_arena(plan, &group_config, &bytes)             the same on all ranks
 *   cumoe_arenas_create(context, bytes, &config, &arenas)   all ranks
 *   cumoe_arenas_get_info(arenas, &info)                    group_config.arenas = info.arenas
 *   cumoe_group_create(context, plan, &group_config, info.arena, &group)
 *   ...
 *   cumoe_group_destroy(group)
 *   cumoe_arenas_destroy(arenas)                            all ranks
 *
 * What the ranks need for that is one function of the engine's that brings a few bytes of each rank to all (MPI, a
 * store, a socket). Ranks are threads of one process, or processes of one host, in any mixture.
 *
 * Wires, by which a rank reaches another's arena:
 *   CUMOE_WIRE_SHARED  within a process: its address. Between processes of one host: on the CPU device a file in memory
 *                      (memfd_create, opened by /proc/PID/fd; nothing is left when ranks are killed), on GPUs CUDA's
 *                      inter-process handles of memory of cudaMalloc. Processes must see each other's pids, and on
 *                      GPUs be in one IPC namespace and see each other's GPUs
 * Not served: memory that other hosts reach; copies through the host for GPUs that cannot reach each other
 * (NOT_SUPPORTED, with the ranks in the text).
 *
 * Experimental. The CPU device is tested between threads and processes. On GPUs the calls and their order are tested
 * without one; handles between processes have not been run on GPUs yet.
 *
 * Failure. Ranks compare what they are before any trusts another, and after each step tell each other how it went: all
 * succeed, or none. The rank where it failed answers with its own status and text; all others answer PEER, with that
 * rank and its text. A call that is refused for its arguments, or for want of host memory, has told nobody anything.
 */
#ifndef CUMOE_ARENAS_H
#define CUMOE_ARENAS_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cumoe_arenas_s *cumoe_arenas; /* one rank's arena, and its ways to the others' */

typedef enum cumoe_wire { CUMOE_WIRE_AUTO = 0, CUMOE_WIRE_SHARED = 1 } cumoe_wire;

typedef struct cumoe_arenas_config {
  uint32_t size;
  int32_t wire;        /* cumoe_wire; the same on all ranks */
  int32_t rank, ranks; /* 0 .. ranks - 1; 1 .. CUMOE_MAX_RANKS, the same on all ranks */
  /*
   * Brings `bytes` bytes of `mine` from every rank to all: those of rank r to all + r * bytes. Called by the thread
   * that is in create or destroy, on all ranks equally often, with the same bytes (below 1 KiB a rank). 0, or anything
   * else when it failed: a rank does not answer, say. How long it waits is the engine's to limit: nothing else here
   * waits for another rank. It must not call cumoe.
   */
  int (*all_gather)(void *user, const void *mine, void *all, size_t bytes);
  void *user; /* its first argument; both are used until destroy has returned */
} cumoe_arenas_config;

/*
 * Collective: all ranks call it, each with a context of its own; all on GPUs, or all on the CPU device. bytes: of each
 * arena, 1 .. 2^46, the same on all ranks. The memory is the object's: not of the context's pool or allocator, and not
 * counted there. It may wait for the device, and is not for a thread that captures.
 *
 * Ranks that differ in an argument: INVALID_ARGUMENT, on all of them, with a text that names it, both values and the
 * ranks; ranks that cannot reach each other, NOT_SUPPORTED, likewise. PEER: all_gather failed, or another rank did.
 * OUT_OF_MEMORY and CUDA as anywhere.
 */
CUMOE_CHECKED cumoe_status cumoe_arenas_create(cumoe_context context, size_t bytes, const cumoe_arenas_config *config,
                                               cumoe_arenas *arenas);

/* The same for `ranks` contexts of one process, by one thread: arenas [ranks], rank r's of contexts[r]. All or none. */
CUMOE_CHECKED cumoe_status cumoe_arenas_create_all(const cumoe_context *contexts, int32_t ranks, size_t bytes,
                                                   cumoe_arenas *arenas);

typedef struct cumoe_arenas_info {
  uint32_t size;
  int32_t wire; /* the one that was found: never AUTO */
  int32_t rank, ranks;
  cumoe_view_mut arena; /* [1, bytes] u8, aligned to 256 bytes: this rank's own */
  void *const *arenas;  /* [ranks], of all ranks; this rank's own is arena.data. Lives as long as the object */
} cumoe_arenas_info;

CUMOE_CHECKED cumoe_status cumoe_arenas_get_info(cumoe_arenas arenas, cumoe_arenas_info *info);

/*
 * Collective, but for arenas of create_all: gives the ways to the others back, waits in all_gather until all have, and
 * then frees the arena: after cumoe_group_destroy. PEER if all_gather failed: the object has ended all the same and its
 * memory is freed; no other rank may use it. NULL is allowed. A context that is destroyed ends its arenas without
 * telling anybody.
 */
CUMOE_API cumoe_status cumoe_arenas_destroy(cumoe_arenas arenas);

#ifdef __cplusplus
}
#endif
#endif
