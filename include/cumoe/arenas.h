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
 * What the ranks need for that is one function of the engine's that brings a few bytes of each rank to all, letters in
 * what follows (by MPI, a store, a socket), or a communicator of NCCL, or both. Ranks are threads of one process, or
 * processes, in any mixture.
 *
 * Wires, by which a rank reaches another's arena:
 *   CUMOE_WIRE_SHARED  within a process: its address. Between processes of one host: on the CPU device a file in memory
 *                      (memfd_create, opened by /proc/PID/fd; nothing is left when ranks are killed), on GPUs CUDA's
 *                      inter-process handles of memory of cudaMalloc. Processes must see each other's pids, and on
 *                      GPUs be in one IPC namespace and see each other's GPUs
 *   CUMOE_WIRE_WINDOW  GPUs: a window of the communicator (ncclMemAlloc, ncclCommWindowRegister without
 *                      NCCL_WIN_COLL_SYMMETRIC), whose addresses NCCL tells the host from 2.29.2 on
 *   CUMOE_WIRE_AUTO    WINDOW, where there is a communicator of such a version; if that fails, or else, SHARED
 * Not served: ranks that cannot reach each other's memory (NOT_SUPPORTED, with the ranks in the text): they need no
 * arenas of this kind, see CUMOE_GROUP_NCCL (cumoe/ep.h); communicators that do not block.
 *
 * Experimental. The CPU device is tested between threads and processes. On two H100s were seen: CUDA's handles
 * between processes, also where one of them is killed, addresses within a process, and letters by a communicator of
 * NCCL 2.28.9 (bench/ep.c). The calls, their order and what becomes of failures are tested without a GPU, over a CUDA
 * runtime and an NCCL that stand in; windows have not been run on GPUs yet, for want of an NCCL that has them.
 *
 * NCCL is the engine's: nothing links it, and no other copy is opened. One communicator, one call at a time: no other
 * work of it may be under way on any rank while create or destroy runs (NCCL's own rule), and no stream may be captured
 * by the thread. It must live until destroy has returned.
 *
 * Failure. Ranks compare what they are before any trusts another, and after each step tell each other how it went: all
 * succeed, or none. The rank where it failed answers with its own status and text; all others answer PEER, with that
 * rank and its text. Where all_gather fails on one rank alone, that one cannot know how it went: its arena stays until
 * its context is destroyed, as others may have it. A call that is refused for its arguments, or for want of memory for
 * these letters, has told nobody anything.
 *
 * A rank that does not come. all_gather waits as long as the engine lets it. Letters by the communicator are waited for
 * timeout_ns; then PEER. NCCL's kernel is then still on the device, and what was made stays until the context is
 * destroyed: end the communicator first (ncclCommAbort). Registering a window is a collective call inside NCCL, which
 * waits without limit: a rank that dies in that moment leaves the others there until another thread of theirs ends the
 * communicator.
 */
#ifndef CUMOE_ARENAS_H
#define CUMOE_ARENAS_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cumoe_arenas_s *cumoe_arenas; /* one rank's arena, and its ways to the others' */

typedef enum cumoe_wire { CUMOE_WIRE_AUTO = 0, CUMOE_WIRE_SHARED = 1, CUMOE_WIRE_WINDOW = 2 } cumoe_wire;

typedef struct cumoe_arenas_config {
  uint32_t size;
  int32_t wire;        /* cumoe_wire; the same on all ranks */
  int32_t rank, ranks; /* 0 .. ranks - 1; 1 .. CUMOE_MAX_RANKS, the same on all ranks */
  /*
   * Brings `bytes` bytes of `mine` from every rank to all: those of rank r to all + r * bytes. Called by the thread
   * that is in create or destroy, on all ranks equally often, with the same bytes (below 1 KiB a rank). 0, or anything
   * else when it failed: a rank does not answer, say. How long it waits is the engine's to limit. It must not call
   * cumoe. NULL: by `comm`.
   */
  int (*all_gather)(void *user, const void *mine, void *all, size_t bytes);
  void *user;         /* its first argument; both are used until destroy has returned */
  void *comm;         /* ncclComm_t: of these ranks, in this order, and of the context's device; NULL: none */
  void *nccl;         /* dlopen's handle of the library that comm is of; NULL: the libnccl.so.2 that is loaded */
  int64_t timeout_ns; /* how long letters by comm are waited for; 0 = 30 s */
} cumoe_arenas_config;

/*
 * Collective: all ranks call it, each with a context of its own; all on GPUs, or all on the CPU device. bytes: of each
 * arena, 1 .. 2^46, the same on all ranks. The memory is the object's: not of the context's pool or allocator, and not
 * counted there. It may wait for the device, and is not for a thread that captures.
 *
 * Ranks that differ in an argument: INVALID_ARGUMENT, on all of them, with a text that names it, both values and the
 * ranks; ranks that cannot reach each other, NOT_SUPPORTED, likewise. PEER: all_gather failed, or another rank did.
 * A communicator of other ranks is INVALID_ARGUMENT, of another device WRONG_DEVICE. LIBRARY_MISSING: no NCCL is
 * loaded, or a function is not in it. OUT_OF_MEMORY and CUDA as anywhere; CUDA also for what NCCL answers, with its
 * words.
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
 * then frees the arena: after cumoe_group_destroy. PEER if the gather failed: the object has ended all the same, and
 * its memory, which no other rank may use, is freed. NULL is allowed. A context that is destroyed ends its arenas
 * without telling anybody.
 */
CUMOE_API cumoe_status cumoe_arenas_destroy(cumoe_arenas arenas);

#ifdef __cplusplus
}
#endif
#endif
