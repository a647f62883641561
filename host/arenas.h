/* A rank's arena, what it tells the other ranks while arenas are made, and the wires: ways to reach another's. */
#ifndef CUMOE_HOST_ARENAS_H
#define CUMOE_HOST_ARENAS_H

#include "nccl.h"
#include "status.h"
#include "../include/cumoe/arenas.h"

enum { ARENA_ALIGN = 256, LETTER_TEXT = 256 };

/* What a rank was asked for, and what it is. */
typedef enum arena_fact {
  FACT_BYTES,
  FACT_RANKS,
  FACT_WIRE,
  FACT_ON_GPU,
  FACT_NCCL, /* its version; 0: no communicator */
  FACT_HOST, /* of a boot of a machine; the others below mean something on one host only */
  FACT_PIDS, /* the namespace of pids */
  FACT_IPC,  /* the namespace of System V's objects, which CUDA's handles belong to */
  FACT_DRIVER,
  FACT_PROCESS,
  ARENA_FACTS
} arena_fact;

/* Where its arena is. */
typedef struct arena_offer {
  void *address; /* in its own process */
  uint64_t file, file_device;
  int64_t descriptor;
  char bus[16]; /* of its GPU */
  struct cudaIpcMemHandle_st handle;
} arena_offer;

/* What each rank tells all others after each step. Of fixed size, without pointers that are followed. */
typedef struct letter {
  uint64_t form; /* version, size and step: a letter of something else is none */
  int32_t rank, status;
  uint64_t facts[ARENA_FACTS];
  arena_offer offer;
  char text[LETTER_TEXT]; /* of the failure */
} letter;
_Static_assert(sizeof(letter) < 1024, "what the manual says of all_gather's bytes");

typedef struct arenas arenas;

/* With the context's device entered. close and drop give back what there is, whatever comes before fails. */
typedef struct arena_wire {
  const char *name;
  int32_t wire;                                       /* cumoe_wire */
  cumoe_status (*make)(arenas *a, arena_offer *mine); /* its own, filled with zeros */
  cumoe_status (*open)(arenas *a);                    /* all others', by their offers */
  void (*close)(arenas *a, cumoe_status *first);
  void (*drop)(arenas *a, cumoe_status *first);
} arena_wire;

struct arenas {
  struct context *context;
  cumoe_arenas_config config;
  const arena_wire *wire; /* NULL: nothing is made yet */
  uint64_t bytes;
  letter *letters; /* of all ranks, and then its own; the crew's */
  bool alone;      /* all ranks are in this process */
  int descriptor;  /* of its file; -1: none */
  void *own, *window;
  nccl nccl;
  struct {
    cudaStream_t stream; /* NULL: letters do not go by NCCL */
    void *buffer;
    bool stuck; /* a gather has not ended: nothing that waits for the device may be called */
  } mail;
  bool *opened; /* [ranks], behind these: */
  void *at[];   /* [ranks] */
};

extern const arena_wire heap_wire, file_wire, ipc_wire, window_wire;

/* Of the device that is entered; waits. */
cumoe_status fill_with_zeros(void *data, uint64_t bytes);

/* Letters by the communicator, with the device entered. gather: PEER after config.timeout_ns. */
cumoe_status mail_open(arenas *a);
cumoe_status mail_close(arenas *a);
cumoe_status mail_gather(arenas *a, const letter *mine, letter *all);

static inline bool same_process(const letter *a, const letter *b)
{
  return a->facts[FACT_HOST] == b->facts[FACT_HOST] && a->facts[FACT_PIDS] == b->facts[FACT_PIDS] &&
         a->facts[FACT_PROCESS] == b->facts[FACT_PROCESS];
}

#endif
