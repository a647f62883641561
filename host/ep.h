/* A rank's membership in a group, and where everything of an exchange lies. */
#ifndef CUMOE_HOST_EP_H
#define CUMOE_HOST_EP_H

#include "moe.h"
#include "nccl.h"
#include "../include/cumoe/ep.h"
#include "../kernels/cpu/exchange.h"
#include "../kernels/ep/ep.h"

/* On GPUs alone: SLOTS, by dedup ahead of put; GATE_PUT, the gate and put in one; TAKE_IDS, the wait's rest, aside;
 * FEW, the experts of few tokens, which answer by themselves; RETURN, answer by the shard's combine; FINISH, of packets
 * and lines, answer, or wait and sum, or all of it. */
typedef enum move {
  MOVE_COUNT,
  MOVE_SLOTS,
  MOVE_PUT,
  MOVE_GATE_PUT,
  MOVE_WAIT_TOKENS,
  MOVE_TAKE_IDS,
  MOVE_ANSWER,
  MOVE_FEW,
  MOVE_RETURN,
  MOVE_FINISH,
  MOVE_WAIT_ANSWERS,
  MOVES
} move;

static inline bool ep_puts(move which)
{
  return which == MOVE_PUT || which == MOVE_GATE_PUT;
}
static inline bool ep_answers_by(move which)
{
  return which == MOVE_ANSWER || which == MOVE_RETURN;
}

/* An exchange in three parts, each a call of its own or all in one. */
typedef enum ep_part { PART_DISPATCH, PART_EXPERTS, PART_COMBINE, PARTS } ep_part;

/*
 * Tiers. Grids, kernels and what is looked at are for the tokens that segments hold: a group with room for many would
 * pay for that room in each exchange. So it has segments for fewer as well, from the room down by quarters; an exchange
 * takes the least that hold tokens_max, which all ranks know, and kernels see other offsets and another capacity,
 * nothing else. Each rank's are fixed: a stride by tokens_max would serve any number in one set, but a rank that was
 * left out and still stores would then hit another's. Together a third of the room's memory.
 */
typedef enum segment { SEGMENT_X, SEGMENT_IDS, SEGMENT_WEIGHTS, SEGMENT_Y, SEGMENTS } segment;

typedef struct ep_tier {
  int64_t tokens;        /* of a rank */
  uint64_t at[SEGMENTS]; /* the first rank's, in a lane */
} ep_tier;

enum { EP_TIERS = 15, EP_TIER_STEP = 4 };
typedef struct ep_tiers {
  int32_t count;
  ep_tier of[EP_TIERS]; /* the first one: the room */
} ep_tiers;

/* An arena with a tier's segments in the place of the room's. */
static inline ep_layout ep_in_tier(ep_layout at, const ep_tier *tier)
{
  at.x = tier->at[SEGMENT_X], at.ids = tier->at[SEGMENT_IDS];
  at.weights = tier->at[SEGMENT_WEIGHTS], at.y = tier->at[SEGMENT_Y];
  return at;
}

/*
 * By NCCL (CUMOE_GROUP_NCCL) nobody writes to another's memory. Behind its arena a rank has a message for each rank:
 * what it would have written there. NCCL brings every piece of a message to the segment of the arena that it is for.
 * Kernels write messages as they write arenas: arenas[r] is such that this rank's segments there, by the layout `to`,
 * are the message to rank r. Flags are pieces, too, and tell exchanges apart as ever; NCCL has brought them before a
 * kernel that waits for them starts.
 */
enum { PIECE_HELLO, PIECE_IN, PIECE_BACK, PIECE_SEGMENTS, PIECES = PIECE_SEGMENTS + EP_TIERS * SEGMENTS };
_Static_assert(PIECES <= 64, "a set of them is a word");

static inline uint64_t ep_piece(int32_t tier, segment which)
{
  return (uint64_t)1 << (PIECE_SEGMENTS + tier * SEGMENTS + (int)which);
}

typedef struct ep_staging {
  ep_layout to;
  ep_tiers tiers;
  int32_t count; /* of pieces */
  struct {
    uint64_t from, to; /* in the message; the first rank's segment in the arena */
    uint64_t bytes;
  } pieces[PIECES];
  uint64_t messages, message_bytes; /* [ranks] */
  uint64_t bytes;                   /* of the arena, messages included */
} ep_staging;

/* Of one lane. */
ep_staging ep_lay_out_staging(const ep_shape *shape, int32_t rank);

typedef struct group {
  struct context *context;
  cumoe_context handle;     /* of the context */
  struct plan plan;         /* a copy: the caller's may end before the group */
  cumoe_plan shard, shared; /* what a rank does for all: its experts unreduced or summed; the shared expert, or NULL */
  ep_shape shape;
  ep_layout at; /* with the room's segments, as `to` */
  ep_tiers tiers;
  ep_ways ways;
  int32_t rank, here;         /* here: ranks whose arena is on this GPU */
  int64_t timeout_ns;         /* any thread may change it, and the word in the arena, which calls read */
  ep_part next[EP_MAX_LANES]; /* on the CPU device, where a call that has returned is done: what each lane expects */
  cudaStream_t stream;        /* on a GPU, as all of these: for what the host says */
  cudaLibrary_t library, few_library;
  int32_t few_row; /* variant + 1, of which MOVE_FEW does the same; 0: none */
  cudaKernel_t kernels[MOVES];
  char names[MOVES][32];           /* of the kernels */
  bool early;                      /* they may start before the grid ahead has ended */
  int64_t aside_tokens;            /* own tokens from which on rows and sums travel aside; INT64_MAX: never */
  int64_t own_rows;                /* own rows an expert from which on these are a layer of their own */
  cudaStream_t side[EP_MAX_LANES]; /* what goes aside has this stream, */
  cudaEvent_t turn[EP_MAX_LANES];  /* each of the two behind the other by this */
  bool staged;                     /* by NCCL, as what follows */
  bool stuck;                      /* NCCL has not ended: nothing that waits for the group's stream may be called */
  ep_staging staging;
  nccl nccl;
  uint64_t given_up; /* the abort word: the host's own */
  bool asked;        /* to abort, by any thread, since ranks were left out last */
  char *arena;
  ep_layout to;   /* where this rank's segments are in arenas[] */
  char *arenas[]; /* of all ranks; staged: see above */
} group;

/* Offsets of an arena; a pure function. Valid shapes only: nothing overflows 2^62. */
ep_layout ep_lay_out(const ep_shape *shape);

/* Its tiers. */
ep_tiers ep_lay_out_tiers(const ep_shape *shape);

/* Bytes of one rank's segment for so many tokens. */
uint64_t ep_segment_bytes(const ep_shape *shape, int64_t tokens, segment which);

/* The least that holds an exchange of up to so many tokens a rank. */
int32_t ep_tier_for(const ep_tiers *tiers, int64_t tokens);

cumoe_status find_group(cumoe_group handle, group **found);

static inline int64_t timeout_of(const group *g)
{
  return __atomic_load_n(&g->timeout_ns, __ATOMIC_RELAXED);
}

/* In a rank's line of `hello`: its state, for whom the line is, and the facts that it tells of itself; of masks, how
 * far its lanes have come, and {twice the ranks left out, and 1 once its abort word is cleared : 32, hash of the mask :
 * 32}. */
enum { HELLO_STATE = 0, HELLO_FACTS = 8, HELLO_LANES = EP_LINE - 16, HELLO_MASK = EP_LINE - 8 };
_Static_assert(EP_MAX_LANES <= 2, "a word tells how far each lane has come");

/* Where rank `from`'s line lies in an arena. */
static inline uint64_t ep_hello(const group *g, int32_t from)
{
  return g->at.hello + (uint64_t)from * EP_LINE;
}

/* PEER, with words for what an abort word says. */
cumoe_status ep_explain(const group *g, uint64_t word);

/* How ranks join and leave (ep_join.c), with the context's device entered. ep_check_fresh: that the arena was zeros;
 * before ep_join, as no other rank writes to a lane until this one has seen the patterns. Until ep_leave has returned,
 * a rank may write to this arena. */
cumoe_status ep_check_fresh(const group *g);
cumoe_status ep_join(group *g);
cumoe_status ep_leave(group *g);

/* The wires (ep_wire.c): what is opened, in a rank's own arena, or in another's. With the context's device entered, but
 * for moves. */
cumoe_status wire_open(group *g);
cumoe_status wire_follow(const group *g, int32_t lane, cumoe_stream waiter, cumoe_stream on); /* what `on` has so far */
cumoe_status wire_close(group *g); /* the first failure; it is closed all the same */
cumoe_status wire_write(const group *g, int32_t rank, uint64_t at, const void *from, size_t bytes);
cumoe_status wire_read(const group *g, uint64_t at, void *to, size_t bytes);
cumoe_status wire_store(const group *g, int32_t rank, uint64_t at, uint64_t word); /* after all that was written */
cumoe_status wire_load(const group *g, uint64_t at, uint64_t *word);
/* The own abort word, or 0 where it is of a rank that was left out. */
cumoe_status wire_load_abort(const group *g, uint64_t *word);
/* Until the upper half of the own word at `at` has reached `least`: *end is 0. Else the abort word, or EP_LATE. */
cumoe_status wire_wait(const group *g, uint64_t at, uint32_t least, bool heeds_abort, uint64_t *end);
void wire_give_up(const group *g, uint64_t word);
/* Staged groups: pieces (a bit each) of all messages to all ranks, by a stream; and until they have come. */
cumoe_status staged_carry(const group *g, uint64_t pieces, cumoe_stream stream);
cumoe_status staged_bring(group *g, uint64_t pieces);
/* Of a move in a tier's segments: where its kernel writes, or reads. */
void staged_arguments(const group *g, move which, int32_t tier, ep_args *a);
/* In the stream's order; on the CPU device done when it returns, and PEER where the group gave up. of: the gate_args of
 * GATE_PUT, the few_args of FEW, the combine_args of RETURN and FINISH; else NULL. */
cumoe_status wire_move(const group *g, move which, const ep_args *a, const void *of, cumoe_stream stream);

#endif
