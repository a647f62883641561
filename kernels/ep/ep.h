/*
 * The exchange between the ranks of a group: where everything lies in a rank's arena, and the arguments of what moves
 * tokens there and results back. Plain C, shared by host, CPU kernels and CUDA.
 *
 * An arena is memory that every rank of the group can write. Of each lane it holds one segment a rank:
 *   x, ids, weights  segment s = the tokens of rank s, written by rank s; at most `capacity`, so it cannot overflow
 *   y                segment s = what rank s answers for this rank's tokens, row for row; written by rank s
 * ids are the reader's local experts, or -1. Sender and reader share the number of a token, so no index travels: by
 * gathering its number in the round; by dedup how many tokens the reader has got before it, which the sender alone must
 * know. There are several such sets of segments, each for a quarter of the tokens of the one before (tiers, host/ep.h):
 * an exchange takes the smallest that holds what all ranks know to come; a kernel sees other offsets and another
 * capacity, and nothing else. Flags and packets are one for all: nothing is read of a segment beyond what the flags of
 * this exchange tell of, so what others have left, here or in another set, is never seen.
 *
 * A flag is a word {exchange : 32, tokens : 32} in the reader's arena, one a writer, stored with release after the data
 * and read with acquire before them. On GPUs it is EP_FLAG_WORDS of them in a line, which says n when all do: up to so
 * many CTAs tell for themselves, and need not wait for each other first. Exchange n of a lane, on every rank:
 *   put     data to all ranks, then `in` = {n, tokens} to all ranks, those that get nothing included
 *   wait    until all own `in` words say n; compute
 *   answer  rows of y to their tokens' ranks, then `back` = {n, 0} to all ranks
 *   wait    until all own `back` words say n; collect
 * One buffer is enough. put n + 1 overwrites what a reader had of n: its `back` n, sent after its last read, was seen.
 * answer n + 1 overwrites y of n: the `in` n + 1 of that token's rank, sent after its collect, was seen. A word says n
 * or n - 1 whenever somebody waits for n, so words are compared by their difference and may wrap.
 *
 * Ranks that are left out (cumoe_group_set_active) get nothing, are not waited for, and what they still
 * write, into their own segments, words and the abort word, is not looked at. Those that stay agree on the exchange to
 * go on from, for one of them may have completed n where another gave up: each tells the number that it has come to,
 * after its last store of any other word, waits until all have told, clears its own abort word and takes the largest;
 * then waits until all have cleared theirs. So nobody gives up for what is over, the words of the next exchange are in
 * nobody's arena yet, and nobody clears an abort of what comes next.
 *
 * Of few tokens (shape.packets), between GPUs, what is small goes as packets: words that have data in one half and the
 * exchange in the other, so that it is there once it is seen, and no flag has to wait until it was stored. Slots are
 * packets where put is the gate as well: `in` then tells of x alone, with EP_PACKED beside the tokens. Answers are
 * packets in every exchange of so few tokens at most: `back` then tells that what was put has been read, which is what
 * the next put waits for, and nothing of the answers. Packets of n + 1 overwrite those of n as data beside flags do.
 * Answers of more tokens than few serves, all ranks' together, go as lines instead: 120 bytes of data and their flag,
 * which eight lanes of a warp store and load as one, so that the links carry half of what packets would be.
 *
 * test/ep_model.c goes through all orders of this.
 */
#ifndef CUMOE_KERNELS_EP_H
#define CUMOE_KERNELS_EP_H

#include "../args.h"

#ifdef __CUDACC__
#define EP_BOTH static __host__ __device__ inline
#else
#define EP_BOTH static inline
#endif

enum { EP_NEAR_RANKS = 16 };                 /* up to so many, arguments hold their arenas: a load less */
enum { EP_FLAG_WORDS = 16, EP_PACKET = 16 }; /* bytes of a packet, of which 8 are data */
enum { EP_PACKET_RUN = 32 }; /* so many 16-byte vectors' first packets lie one behind the other, then the second ones */
enum { EP_LINE_LANES = 8, EP_LINES = 4, EP_LINE_VECTORS = 30 }; /* a warp's lines, and the vectors that they hold */
enum { EP_LINE = 128, EP_ALIGN = 256, EP_MAX_RANKS = 1024, EP_MAX_LANES = 2, EP_MAX_REPLICAS = 64 };
enum { EP_PLACE_SHIFT = 16 }; /* an entry of a placement: rank << 16 | local expert */

typedef struct ep_shape {
  int32_t ranks, lanes, experts, top_k, hidden;
  int32_t element;  /* bytes of an element of x and y */
  int32_t exact;    /* a row of y for each slot; else one a rank, the sum of what it has */
  int32_t packets;  /* exchanges of up to so many tokens go by packets; 0: none */
  int64_t capacity; /* tokens of one rank in one exchange */
} ep_shape;

/* Rows of y a token and rank. */
EP_BOTH int32_t ep_answers(const ep_shape *s)
{
  return s->exact ? s->top_k : 1;
}

/* Bytes of a row of y as packets: whole runs, so that a warp's lanes store, and load, what lies side by side. */
EP_BOTH int64_t ep_packet_row(const ep_shape *s)
{
  const int64_t run = EP_PACKET_RUN * 16, row = (int64_t)s->hidden * s->element;
  return (row + run - 1) / run * run * 2;
}

/* Likewise as lines: all that a warp stores at once. */
EP_BOTH int64_t ep_line_row(const ep_shape *s)
{
  const int64_t vectors = (int64_t)s->hidden * s->element / 16;
  return (vectors + EP_LINE_VECTORS - 1) / EP_LINE_VECTORS * (EP_LINES * EP_LINE);
}

/* How a rank's sums go, in an exchange of up to so many tokens a rank. Few's grids make packets. */
typedef enum ep_form { EP_ROWS, EP_PACKETS, EP_LINED } ep_form;

EP_BOTH ep_form ep_form_of(const ep_shape *s, int64_t tokens)
{
  return tokens > s->packets ? EP_ROWS : tokens * s->ranks <= FEW_TOKENS ? EP_PACKETS : EP_LINED;
}

/* What a put moves. Aside (below) it is two grids at once, each of which has half of the words of a flag. */
typedef enum ep_load { EP_PUTS_ALL, EP_PUTS_ROWS, EP_PUTS_SLOTS } ep_load;

/* Words of a flag are told by the two in turn. */
EP_BOTH int ep_is_word_of(int load, int word)
{
  return load == EP_PUTS_ALL || word % 2 == (load == EP_PUTS_SLOTS);
}

/* Bytes from the arena's start; those below `lane` from the start of a lane's part, one every lane_bytes. */
typedef struct ep_layout {
  uint64_t hello;        /* [ranks] lines: what each rank says of itself before anything moves */
  uint64_t abort;        /* a line: its first word is not 0 once a rank has given up */
  uint64_t bases;        /* [ranks] addresses of all arenas */
  uint64_t every_expert; /* [experts] i32: 0, 1, 2 ... */
  uint64_t first_expert; /* [capacity] i32: 0 */
  uint64_t active;       /* a bit a rank: it has not been left out; for CUDA kernels */
  uint64_t timeout;      /* a word: nanoseconds that this rank waits for another; the host changes it at any time */
  uint64_t lane, lane_bytes;
  uint64_t exchange;        /* a line: exchanges of this lane so far */
  uint64_t in, back;        /* [ranks] lines */
  uint64_t x, ids, weights; /* [ranks, capacity, hidden | top_k | top_k] */
  uint64_t y;               /* [ranks, capacity, answers, hidden] */
  uint64_t slots;           /* [ranks, packets, top_k] packets: id, weight */
  uint64_t sums, lines;     /* [ranks, packets] rows of y as packets, and as lines */
  uint64_t bytes;
} ep_layout;

/* One exchange of one lane. */
typedef struct ep_args {
  char *arena;
  ep_shape shape;
  ep_layout at;
  int32_t rank, lane;
  int32_t local_experts;
  int32_t zero_experts, identity_experts;
  /* put */
  const void *x, *ids;  /* [tokens, hidden], [tokens, top_k] */
  const float *weights; /* [tokens, top_k] */
  int64_t x_ld, ids_ld, weights_ld;
  const int32_t *placement; /* [experts, replicas] */
  int64_t placement_ld;
  int32_t replicas, ids_dtype;
  token_count tokens;
  int64_t first_token; /* of these in the call: replicas are taken in turn by it */
  int32_t *rows;       /* out: [tokens, top_k or ranks] rows of y, ROW_DROPPED, ROW_IDENTITY */
  int32_t *slots;      /* kernels, by dedup: [tokens, ranks] a token's row there, or -1; else NULL */
  uint32_t *sent;      /* likewise: [ranks] tokens to each */
  /* count, a kernel: the round's part of all tokens */
  token_count all_tokens;
  int32_t *present;
  /* wait, answer */
  int32_t *arrived;      /* kernels: [ranks] tokens of each */
  int32_t *ids_here;     /* [ranks * capacity, top_k], checked */
  const void *y_here;    /* [ranks * capacity * answers, hidden] */
  const int32_t *counts; /* NULL, or [local_experts] rows of this round, which answer adds to the sum */
  int32_t *counts_sum;
  /* kernels */
  int32_t then_waits;   /* put and answer go on with their wait, finish with the sum */
  int32_t early;        /* the grid ahead is this call's and has waited for those before it: what they left is there */
  int32_t tells;        /* finish: that all has been read, as the grid ahead, which answers, does not */
  int32_t packets;      /* of gate_put: slots go as packets; of return and finish, an ep_form: how answers go */
  int32_t movers;       /* CTAs along x that move rows, or all of few's; of put those behind fill with ones what few_up
                         wants so */
  int32_t fill_vectors; /* of 16 bytes */
  void *fill;
  int32_t aside; /* put is two grids side by side, neither of which counts the exchange: who waits does, and leaves ids
                     to a grid of their own */
  int32_t own;   /* this rank's own tokens are a layer of their own: their rows stay where they are */
  int32_t more;  /* of return: another one of the exchange follows, which tells; of the wait for tokens: which counts */
  int32_t puts;  /* aside, of put and of the wait for tokens: an ep_load, what this grid moves or waits for */
  int32_t late;  /* the host: behind more than one grid, so that this one does not start early */
  int32_t sms;   /* the host: of rows aside and of return, that it has; 0: all */
  fault_sink fault;
  char *near[EP_NEAR_RANKS]; /* kernels: the arenas of up to so many ranks */
} ep_args;

/* The CUDA kernels' grids: parts of a row lie along y, rows along x; so many rows a CTA, up to so many CTAs. */
enum { EP_PART_BYTES = 4096, EP_MOVE_THREADS = 512, EP_WAIT_THREADS = 1024, EP_MOVE_ROWS = 8, EP_MOVE_CTAS = 128 };
/* Aside: from so many tokens on; CTAs of put that have an SM each (8 fill the links with stores), SMs that the combine
 * which answers has beside a product, of which it has parts of whole tiles of columns. Own tokens are a layer of their
 * own from so many rows an expert on, as every expert's weights are read twice, and where as much travels as hides
 * what that costs: each rank sends a row to `ranks` - 1, and each multiplies top_k rows by 3 * inter columns; so many
 * of inter * top_k for each other rank at most. */
enum { EP_ASIDE_TOKENS = 1024, EP_ASIDE_PUT_CTAS = 16, EP_ASIDE_RETURN_SMS = 40, EP_ASIDE_COLUMNS = 256 };
enum { EP_OWN_ROWS = 256, EP_OWN_INTER = 4500 };
enum { EP_RETURN_THREADS = 128, EP_RETURN_RESIDENT = 4, EP_FILL_CTAS = 32 };
enum { EP_FINISH_CTAS = 128, EP_FINISH_LEAST = 16, EP_FINISH_MOST = 32, EP_FINISH_LINED = 64 };
/* CTAs of finish: of all ranks of a group, or of those on this GPU; of one, by packets and by lines */
enum { EP_PACKET_TOKENS = 32 }; /* above, twice the bytes take longer than waiting for what was stored */
#define EP_PACKED 0x80000000u   /* in a flag's number of tokens: their slots come as packets */

/* Why a rank gave up, in its abort word: 1 << 63 | cause << 56 | phase << 48 | about << 16 | by. */
enum { EP_NO_CAUSE = 0, EP_TIMEOUT = 1, EP_FAILED = 2, EP_ASKED = 3 };
enum { EP_NO_PHASE = 0, EP_CREATE = 1, EP_DISPATCH = 2, EP_RETURN = 3, EP_DESTROY = 4, EP_ACTIVE = 5 };

EP_BOTH uint64_t ep_abort_word(int cause, int phase, int about, int by)
{
  return (uint64_t)1 << 63 | (uint64_t)cause << 56 | (uint64_t)phase << 48 | (uint64_t)about << 16 | (uint64_t)by;
}

EP_BOTH uint64_t ep_flag(uint32_t exchange, uint32_t tokens)
{
  return (uint64_t)exchange << 32 | tokens;
}

#endif
