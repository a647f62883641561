/*
 * cumoe/ep.h: expert parallelism. Each rank of a group holds some of a layer's experts and has tokens of its own; one
 * call brings the tokens to the experts and the results back.
 *
 *   out = cumoe_ep_forward(tokens of this rank)   what one rank with all experts would answer
 *
 * Ranks are contexts on GPUs that reach each other's memory, or on the CPU device: threads of one process, or processes
 * that have mapped each other's arenas (tested on the CPU device); or GPUs that do not reach each other, see "By NCCL".
 * What is "not served" below is refused with a text by the call that it concerns.
 *
 * Order of calls, on each rank:
 *
 *   cumoe_ep_arena          bytes of the memory that all ranks of the group write
 *   (the engine)            takes that memory, fills it with zeros, and tells every rank where it lies. On GPUs from
 *                           cudaMalloc, or from a pool of which every rank's device has access (cumoe_pool_allow_peer)
 *   cumoe_group_create      all ranks: agree, try the wires
 *   cumoe_ep_workspace      bytes of a call's own memory
 *   cumoe_ep_forward        all ranks, per layer and step; or cumoe_ep_dispatch, cumoe_ep_experts, cumoe_ep_combine
 *   cumoe_group_destroy     all ranks
 *
 * Lanes. A lane is one call under way, with its own part of the arena. On one lane all ranks make the same sequence of
 * calls, one at a time. Calls on different lanes are independent of each other, so two micro-batches may overlap: each
 * from a thread of its own on the CPU device, where a call returns when it is done, or on streams of its own. Layers of
 * one shape share a group.
 *
 * Rounds. An exchange takes max_tokens tokens of each rank. More go in several exchanges: every rank says how many any
 * rank may have (tokens_max), and makes as many as that needs, also with fewer tokens, or none. What is said decides
 * how the experts run and what is sent by NCCL: the arena has places for exchanges of fewer tokens as well, of a
 * quarter of max_tokens, a quarter of that and so on, and the smallest that holds tokens_max is taken. So a group for
 * many tokens decodes as one for few does, if it is told that they are few.
 *
 * Failure. Nobody waits for ever: a rank that does not answer within timeout_ns makes the one that waits give up, which
 * all ranks see in their own memory; they give up as well. On the CPU device all of them answer PEER with a text that
 * names the rank and the phase, now and from then on; on a GPU, where a call only launches, what was launched ends at
 * once from then on and leaves outputs undefined. cumoe_group_fault_read has rank and phase as numbers on both. A group
 * that gave up comes back without the ranks that it has lost (cumoe_group_set_active), or not at all: destroy it, and
 * create another with zeroed arenas. A call that is refused for its arguments has told nobody anything: it may be
 * corrected and made again within the others' timeout.
 *
 * GPUs: experimental. What test/ep.c asks has passed on two and on four H200s of one host, up to eight ranks dealt to
 * them, and on one that ranks share: the bits of EXACT, sums, DEDUP, rounds, the three calls, replays, ranks that stop,
 * abort or are left out. Between processes, one a GPU (test/ranks.c): the bits of EXACT, also from graphs, and a rank
 * that is killed (SIGKILL) or stopped (SIGSTOP) at work: the others name it and the phase by cumoe_group_fault_read
 * after timeout_ns, go on without it or leave, and their contexts end without an error. More than four GPUs: not tried.
 * A call may be captured; a graph counts its exchanges on the device, so it may be replayed in any order with others,
 * as long as all ranks do the same, and must be destroyed before its group. Ranks may share a GPU, for tests: their
 * streams must not share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS), nor be the legacy stream, and while one waits
 * for another the host should make neither memory nor graphs. create lets kernels of the process reach the other ranks'
 * GPUs (cudaDeviceEnablePeerAccess), for good.
 *
 * By NCCL (CUMOE_GROUP_NCCL): ranks without a path between their GPUs, or on several hosts. The kernels write what goes
 * to other ranks into messages of fixed size behind the rank's own arena, and NCCL carries these: after dispatch, and
 * after the experts, one group of ncclSend and ncclRecv to and from every rank, this one included, on the caller's
 * stream. Everything else is as above, with the same bits. No rank needs another's address: config.arenas is not looked
 * at, config.comm is the engine's communicator, of NCCL 2.7.3 or newer, 2.9 for captures, which blocks. NCCL is opened
 * at run time, nothing links it. What is different:
 *   bytes     to each rank always as many tokens as the place holds that tokens_max falls to ("Rounds"), up to four
 *             times as many, whatever there is to say, DEDUP or not. The arena is about twice as large
 *   calls     NCCL's own rules: work of one communicator in the same order on all ranks, captured by all or none, by
 *             one thread at a time. One lane (NOT_SUPPORTED); a second group, of a second communicator, is another
 *   failure   NCCL waits without limit for a rank that does not come: to notice, and to end the communicator
 *             (ncclCommAbort), is the engine's. timeout_ns limits create, on GPUs; when it was up, arena and context
 *             must not go before the communicator has been ended. What NCCL answers is CUDA, or PEER, with its words;
 *             then, after cumoe_group_abort, and once cumoe_group_fault_read has told of it, this rank's later calls
 *             answer PEER, on GPUs too, and send nothing: the others are not told. destroy waits for nobody;
 *             set_active is NOT_SUPPORTED
 *   lost      on GPUs a rank that was killed leaves NCCL's kernel on the others' streams. Their engine asks
 *             cudaStreamQuery, and ncclCommGetAsyncError or a limit of its own; then, in this order, it destroys the
 *             graphs that the group's calls were captured in (NCCL waits for them), calls cumoe_group_abort, or does
 *             not, and ncclCommAbort. Now the stream ends: at once, or, where the group was not aborted, when what
 *             waits behind NCCL has done so for timeout_ns, and cumoe_group_fault_read says TIMEOUT, the phase and a
 *             rank whose message had not come: of more than two ranks any, even this one, as all messages end with the
 *             communicator. Who is lost, the engine's own store knows. Of the group only abort, fault_read and destroy
 *             may be called from ncclCommAbort on, until one of the first two has answered; then any
 *   missing   LIBRARY_MISSING: no NCCL is loaded, or a function is not in it; NOT_SUPPORTED: it is too old;
 *             INVALID_ARGUMENT, WRONG_DEVICE: a communicator of other ranks, of another device
 * On the CPU device config.nccl may be a library of one's own, whose functions of NCCL's names copy the host's memory
 * and have done so when ncclGroupEnd returns; its ncclCommCuDevice answers CUMOE_DEVICE_CPU.
 * Experimental. Seen on two H100s, two and four H200s, a process each, as between hosts (NCCL 2.28.9 over sockets,
 * test/ranks.c): the bits of EXACT, also by DEDUP, sums; a rank killed, and one stopped. Tested on the CPU device
 * against shared memory's bits, between processes also where one is killed or stopped, and over a CUDA runtime and an
 * NCCL that stand in: order of calls, captures, each call failing, a rank that is lost, versions 2.6 to 2.31.
 */
#ifndef CUMOE_EP_H
#define CUMOE_EP_H

#include "moe.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUMOE_MAX_RANKS    1024
#define CUMOE_MAX_LANES    2
#define CUMOE_MAX_REPLICAS 64

typedef struct cumoe_group_s *cumoe_group;

enum {
  CUMOE_GROUP_EXACT = 1u << 0, /* every slot's row comes back by itself, and a rank sums its tokens as one rank with all
                                 experts would, for up to top_k times the bytes: the same bits on the CPU device, and
                                 on GPUs where the same kernels serve both (CUMOE_MOE_BATCH_INVARIANT).
                                 Without it each rank sums what its experts add to a token and rounds that to dtype: one
                                 rounding a rank more, at most 32 ranks, no identity experts (NOT_SUPPORTED) */
  CUMOE_GROUP_DEDUP = 1u << 1, /* a token is sent to those ranks only that have one of its experts, once to each: the
                                 same results, bit for bit, and less on the wire the more ranks there are; its router
                                 and gate come before the first byte, on a GPU with a grid more */
  CUMOE_GROUP_NCCL = 1u << 2   /* ranks that do not reach each other's memory: see "By NCCL" */
};

typedef struct cumoe_group_config {
  uint32_t size;
  uint32_t flags;      /* CUMOE_GROUP_*; the same on all ranks, as all but rank, arenas, comm and nccl */
  int32_t rank, ranks; /* 0 .. ranks - 1; 1 .. CUMOE_MAX_RANKS */
  int32_t lanes;       /* 0 = 1; at most CUMOE_MAX_LANES */
  int32_t reserved;    /* 0 */
  int64_t max_tokens;  /* C: of one rank in one exchange; ranks * C * top_k <= CUMOE_MAX_PAIRS */
  int64_t timeout_ns;  /* how long a rank waits for another; 0 = 30 s. Ranks may differ. cumoe_group_set_timeout */
  void *const *arenas; /* [ranks] where each rank's arena lies, as this rank addresses it; copied. Its own is `arena` */
  void *comm;          /* CUMOE_GROUP_NCCL: ncclComm_t, of these ranks, in this order, and of the context's device */
  void *nccl;          /* dlopen's handle of the library that comm is of; NULL: the libnccl.so.2 that is loaded */
} cumoe_group_config;

/*
 * Bytes of a rank's arena: exact, a pure function of the plan's shape, ranks, lanes, max_tokens and flags; rank,
 * arenas, comm and nccl are not looked at. About 4/3 lanes * ranks * C * (2 H element + 8 k), with EXACT (1 + k) H
 * instead of 2 H; by NCCL twice that. On GPUs, with neither, lanes * ranks * min(C, 32) * (3.1 H element + 16 k) more.
 */
CUMOE_CHECKED cumoe_status cumoe_ep_arena(cumoe_plan plan, const cumoe_group_config *config, size_t *bytes);

/*
 * This rank's membership. Collective: returns when all ranks have called it, agreed and tried the wires, or answers
 * PEER after the timeout. `plan` is the layer as this rank has it: num_experts E of all ranks, local_experts its own,
 * any number of them on each rank. It is copied, and so are its context's rights: the context must outlive the group.
 * Plans with UNREDUCED, or with a top_k above E (zero and identity experts among the choice), are NOT_SUPPORTED.
 *
 * arena [1, bytes] u8, 256-byte aligned, filled with zeros before any other rank is told its address. The group owns it
 * until destroy has returned.
 *
 * What ranks say of themselves is compared word for word: ranks, lanes, max_tokens, flags, E, k, H, dtype and a hash of
 * the rest of the description. INVALID_ARGUMENT, on every rank, with a text that names the first that differs, both
 * values and the rank (of `ranks` on one that hears of another number; ranks that hear of their own alone are a group
 * of so many, and who waits for one that does not write to it answers PEER). Then each rank writes a pattern to the
 * first and the last bytes of what it will write in every other arena, and looks for the others' in its own. A pointer
 * that leads elsewhere is INVALID_ARGUMENT on a rank that sees it, and PEER on the others; so is an arena that was not
 * filled with zeros.
 */
CUMOE_CHECKED cumoe_status cumoe_group_create(cumoe_context context, cumoe_plan plan, const cumoe_group_config *config,
                                              cumoe_view_mut arena, cumoe_group *group);

/*
 * Tells the others that this rank leaves, and waits until they have, at most timeout_ns: until then they may write to
 * the arena. PEER if one has not left in time: the group has ended all the same, but its arena's memory should not be
 * used for something else while that rank may still run. NULL is allowed. No call of this rank may be under way. A
 * context that is destroyed ends its groups without waiting.
 */
CUMOE_API cumoe_status cumoe_group_destroy(cumoe_group group);

/*
 * Gives up: every rank's call that waits, and all later ones, answer PEER; on GPUs, where calls only launch, they end
 * at once ("Failure"). From any thread, at any time.
 */
CUMOE_API cumoe_status cumoe_group_abort(cumoe_group group);

/*
 * How long this rank waits for another from now on: in waits that are under way, in graphs that were captured before,
 * in destroy and set_active. 0 = 30 s. From any thread, at any time; it waits for no work of any stream. Long for the
 * first calls, where some ranks still load or compile, short from then on. INVALID_ARGUMENT below 0. Groups by NCCL:
 * NOT_SUPPORTED.
 */
CUMOE_CHECKED cumoe_status cumoe_group_set_timeout(cumoe_group group, int64_t timeout_ns);

typedef enum cumoe_group_cause {
  CUMOE_GROUP_ALIVE = 0,
  CUMOE_GROUP_TIMEOUT = 1, /* rank `about` did not answer rank `by` in time */
  CUMOE_GROUP_FAILED = 2,  /* a call of rank `by` failed halfway */
  CUMOE_GROUP_ABORTED = 3  /* cumoe_group_abort on rank `by` */
} cumoe_group_cause;

typedef enum cumoe_group_phase {
  CUMOE_PHASE_NONE = 0,
  CUMOE_PHASE_CREATE = 1,
  CUMOE_PHASE_DISPATCH = 2, /* tokens on their way to the experts */
  CUMOE_PHASE_RETURN = 3,   /* results on their way back */
  CUMOE_PHASE_DESTROY = 4,
  CUMOE_PHASE_SET_ACTIVE = 5
} cumoe_group_phase;

typedef struct cumoe_group_fault {
  uint32_t size;
  int32_t cause;     /* cumoe_group_cause: why the group gave up, as this rank knows it */
  int32_t phase;     /* cumoe_group_phase */
  int32_t about, by; /* ranks */
  int32_t reserved;  /* 0 */
} cumoe_group_fault;

/* CUMOE_OK also for a group that gave up: the record says so. Never waits. */
CUMOE_CHECKED cumoe_status cumoe_group_fault_read(cumoe_group group, cumoe_group_fault *fault);

/*
 * Leaves ranks out for good: those that have died, or that an engine wants to do without. `active` is a bit a rank, of
 * rank r bit r % 64 of word r / 64, (ranks + 63) / 64 words of the host, read by the call; 1: it stays.
 *
 * Every rank that stays calls it with the same words, agreed upon through the engine's own store: this call cannot find
 * out who is dead. It waits for the others that stay, at most timeout_ns, and for nobody else; no call of this rank may
 * be under way on any lane (on a GPU: wait for the streams). Then the group is alive again, if it had given up, and all
 * lanes begin anew, with cumoe_ep_dispatch or cumoe_ep_forward. A call may have been answered on one rank and have
 * given up on another: which one is repeated is agreed upon likewise.
 *
 * From then on a rank that was left out gets no tokens and no results and is not waited for, by destroy neither. An
 * expert's places on it are as if they were not in the placement: what has other places is served there (token t at
 * the place t mod count of those that are left), the rest adds nothing and is recorded (EXPERT_MAP). A rank that was
 * left out and runs all the same is told that the group gave up, or ends by its timeout, and disturbs nobody: but its
 * part of each arena must stay mapped until it has ended. It cannot come back; another group may have it.
 *
 * INVALID_ARGUMENT, with nothing done, for words that leave out this rank, bring one back, have one past `ranks` or
 * leave out nobody; INVALID_ARGUMENT, and the group has given up, where another rank says something else; PEER where
 * one has not called in time: call again without it. PEER also where one has aborted or ended meanwhile: what is said
 * may hold already then, so the next call leaves out one more.
 */
CUMOE_API cumoe_status cumoe_group_set_active(cumoe_group group, const uint64_t *active);

/* ---- placement ------------------------------------------------------------------------------------- */

/*
 * Which experts lie where is data, read by each call, the same on all ranks: [E, replicas] i32, an entry for each place
 * where expert e's weights are; unused entries are -1 and come last. An expert in several places (a redundant one)
 * serves token t at entry t mod count. Experts may lie on ranks in any number and order. An expert without a place adds
 * nothing, and an entry that names no rank likewise; both are recorded (EXPERT_MAP). An entry that names no
 * expert there adds nothing, either, and that rank records it (EXPERT_ID).
 */
static inline int32_t cumoe_ep_place(int32_t rank, int32_t local_expert)
{
  return (int32_t)((uint32_t)rank << 16 | (uint32_t)local_expert);
}

/* ---- forward --------------------------------------------------------------------------------------- */

typedef struct cumoe_ep_args {
  uint32_t size;
  int32_t lane;                /* 0 .. lanes - 1 */
  int64_t tokens_max;          /* most tokens that any rank has in this call, the same on all; 0 = max_tokens */
  cumoe_view placement;        /* [E, 1 .. CUMOE_MAX_REPLICAS] i32 */
  const cumoe_moe_args *layer; /* this rank's tokens, as for cumoe_moe_forward; see below */
  int32_t round;               /* of the three calls: 0 .. rounds - 1. cumoe_ep_forward: 0 */
  int32_t reserved;            /* 0 */
} cumoe_ep_args;

/*
 * Bytes of layer.workspace for a call of any number of tokens, 256-byte aligned. Of one call at a time: two lanes need
 * two. Most of it is what ranks * max_tokens tokens need that all choose this rank's experts.
 */
CUMOE_CHECKED cumoe_status cumoe_ep_workspace(cumoe_group group, size_t *bytes);

/*
 * out of cumoe_moe_forward for this rank's tokens, whichever ranks their experts are on. All ranks call it with the
 * same lane, tokens_max and placement; everything else is a rank's own. T = layer.x.rows may be 0, and at most
 * tokens_max. Texts name fields of `layer` as "args.x". Errors: those of cumoe_moe_forward, and on the CPU device PEER.
 *   weights     this rank's experts, local_experts of them
 *   ids         always the layer's: 0 .. E - 1, and zero and identity experts behind
 *   expert_map  absent: the placement says where experts are
 *   shared      computed on the token's own rank, between sending and receiving
 *   counts_out, load  of this rank's experts and all ranks' tokens, of all rounds together
 *   device_tokens     on the CPU device read when the call is made; on GPUs by the kernels, so that a graph serves any
 *                     count up to x.rows. With several rounds a grid more each
 * From 1024 tokens on a rank by itself on its GPU sends rows (not of EXACT) by a stream of the group's, one a lane,
 * which begins behind what `stream` has so far and which `stream` waits for before the call's last grids: to a caller,
 * and in a capture, all is `stream`'s. Where these give each expert 256 rows in the mean, and top_k * inter is at most
 * 4500 for each other rank, its own tokens are computed by themselves while others' travel; bits stay the same.
 * Every token is sent to every rank (an exchange by gathering; CUMOE_GROUP_DEDUP: to those that have an expert of it),
 * its slots only to where their experts are. ids and counts that arrive are checked before they are used: what is out
 * of range drops the slot and is recorded (EXPERT_ID). A fault's token is counted from its round's first one, and of
 * tokens that arrive has the sender's number. Nothing of a call may lie in the group's arena (INVALID_ARGUMENT).
 */
CUMOE_CHECKED cumoe_status cumoe_ep_forward(cumoe_group group, cumoe_weights weights, const cumoe_ep_args *args,
                                            cumoe_stream stream);

/*
 * The same in three calls, for what an engine puts between them: work of its own, or the calls of the other lane. On
 * each lane
 *
 *   cumoe_ep_dispatch   router and gate, tokens to all ranks, shared expert
 *   cumoe_ep_experts    waits for all ranks' tokens, computes, results to all ranks
 *   cumoe_ep_combine    waits for all ranks' results, sums into out
 *
 * with the same arguments in all three, and what these refer to unchanged from the first to the last, workspace
 * included: it holds what one call leaves for the next. cumoe_ep_forward is nothing else, so ranks may mix: one makes
 * the three calls, another the one. With tokens_max above max_tokens the three calls are made for each round in turn,
 * args.round = 0, 1 .. tokens_max / max_tokens rounded up, less one, by all ranks; only out, ids_out and
 * weights_out of that round's tokens are then written; counts_out is set by round 0, the others add to it.
 *
 * Ranks that wait for each other must be able to come there: two lanes driven by one thread of the CPU device are
 * interleaved in the same order on all ranks.
 *
 * Out of order: on the CPU device INVALID_ARGUMENT with a text that names the call that must come next on that lane;
 * nothing has happened. On a GPU the library cannot know what graphs have been replayed in between, and refuses
 * nothing: outputs are then undefined, and waits end by timeout_ns. Each call is stream-ordered and may be captured, by
 * itself or together. cumoe_ep_forward launches a grid or two fewer: what has told the others waits for them as well.
 */
CUMOE_CHECKED cumoe_status cumoe_ep_dispatch(cumoe_group group, cumoe_weights weights, const cumoe_ep_args *args,
                                             cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_ep_experts(cumoe_group group, cumoe_weights weights, const cumoe_ep_args *args,
                                            cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_ep_combine(cumoe_group group, cumoe_weights weights, const cumoe_ep_args *args,
                                            cumoe_stream stream);

#ifdef __cplusplus
}
#endif
#endif
