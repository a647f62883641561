/*
 * All orders in which ranks can take the steps of kernels/ep/ep.h: three calls of two ranks, with two lanes, and with
 * giving up at any wait, and of three ranks; exchanges counted modulo 4, so that the words wrap. Two calls of three
 * ranks, of which the last is left out whenever the others have given up or are done, and one more call of those; it
 * may have died at any step, or go on taking its own; or one of those that stay aborts when it has left it out, which
 * nobody may clear. Three calls of three ranks, in the second of which one has
 * nothing for another: dedup. Packets: ranks of two threads each, for what one stores as packets nothing orders with
 * the other's flags; in all of three calls, or mixed with calls and ranks without. Lines, whose words come at once, in
 * all calls, or mixed with packets and rows. Nothing stale is read, nobody is
 * stuck, and nobody that stays gives up twice. A step is one store, or one look at what others stored: stores of one
 * thread are seen in its order, which is what release and acquire promise. Of each way to get it wrong (`mutant`) the
 * same search finds an example.
 */
#include <stdio.h>
#include <stdlib.h>

#include "test.h"

/* BEFORE: exchanges so far, so that the words wrap. */
enum { MOST = 3, CALLS = 3, WRAP = 4, BEFORE = 2, LANES = 2, THREADS = 2 };

typedef enum mutant {
  RIGHT,
  FLAG_BEFORE_DATA,    /* put tells of tokens before it has written them */
  ANSWER_BEFORE_DATA,  /* likewise */
  NO_WAIT_FOR_TOKENS,  /* of the last rank */
  NO_WAIT_FOR_ANSWERS, /* collect reads at once, and puts of the next call too */
  ANSWERS_EARLY,       /* `back` before the tokens have been read */
  SAME_EXCHANGE,       /* the number is not advanced */
  NOT_EMPTY,           /* a rank that gets no tokens is not told */
  TOLD_OF_ALL,         /* a rank is told of tokens that went to others */
  NO_ABORT,            /* a rank that gives up tells nobody, and the others wait without a limit */
  OTHER_ORDER,         /* two lanes in one thread: rank 1 takes the second first */
  NOT_AGREED,          /* those that stay go on from where each of them is */
  NOT_ADVANCED,        /* they take the largest number once more */
  CLEARED_EARLY,       /* the abort word, before all have told */
  WAITS_FOR_LOST,      /* the call after it */
  HEEDS_LOST,          /* the abort word of the rank that was left out */
  NOT_MET_AGAIN,       /* those that stay do not wait until all have cleared theirs */
  SLOTS_AS_THEY_ARE,   /* a packet of a slot is taken without a look at its number */
  SUMS_AS_THEY_ARE,    /* of a sum, likewise */
  HALF_A_PACKET,       /* one of its two words is looked at */
  NOT_TOLD_PACKED,     /* a flag does not say that its slots are packets */
  BACK_NOT_AWAITED,    /* as all results have come */
  NEXT_BEFORE_SUMS,    /* the next call begins, and not all sums have been taken */
  DEAF_TO_ABORT,       /* who waits for a packet */
  LINES_AS_THEY_ARE,   /* as SUMS */
  NOT_ANSWERED,        /* a sum that a rank takes for one that nobody awaits */
  MUTANTS,
  FIRST_OF_PACKETS = SLOTS_AS_THEY_ARE,
  FIRST_OF_LINES = LINES_AS_THEY_ARE
} mutant;

static const char *const mutant_names[MUTANTS] = {"as it is",
                                                  "a flag before its tokens",
                                                  "a flag before its results",
                                                  "no wait for tokens",
                                                  "no wait for results",
                                                  "results told of before tokens are read",
                                                  "an exchange that is not counted",
                                                  "an empty rank that is not told",
                                                  "an empty rank that is told of tokens",
                                                  "giving up in silence",
                                                  "lanes of one thread in different orders",
                                                  "going on from different exchanges",
                                                  "going on with a number that was used",
                                                  "an abort word cleared too early",
                                                  "waiting for a rank that was left out",
                                                  "heeding a rank that was left out",
                                                  "an abort word that another rank still clears",
                                                  "slots taken as they are",
                                                  "sums taken as they are",
                                                  "half a packet",
                                                  "slots as packets, which is not told",
                                                  "packets for all, and no wait for flags",
                                                  "a call that begins before all sums are taken",
                                                  "waiting for a packet whatever happens",
                                                  "lines taken as they are",
                                                  "a sum that is awaited and not sent"};

/* What a rank does in one call, for each peer in turn. BEGIN counts the exchange, LEAVE_OUT clears the abort word:
 * once, for no peer, likewise ABORT. These, and TELL_MASK to AWAIT_CLEARED, are of a rank that stays, after its last
 * call. Of packets each word by
 * itself is written, and taken when both are there; MEET waits for the rank's other thread. */
typedef enum act {
  BEGIN,
  WRITE_X,
  TELL_IN,
  AWAIT_IN,
  READ_X,
  WRITE_Y,
  TELL_BACK,
  AWAIT_BACK,
  READ_Y,
  TELL_MASK,
  AWAIT_MASK,
  LEAVE_OUT,
  TELL_CLEARED,
  AWAIT_CLEARED,
  ABORT,
  WRITE_SLOT,
  TAKE_SLOT,
  WRITE_SUM,
  TAKE_SUM,
  WRITE_LINE,
  TAKE_LINE,
  MEET,
  ACTS
} act;

typedef struct step {
  act what;
  int peer, lane;
  int at; /* the word of a packet that is written; the step of the other thread that MEET waits for */
} step;

enum { MOST_STEPS = (CALLS + 1) * LANES * ACTS * MOST };

/* How a call's sums go. */
typedef enum form { ROWS, WORDS, LINES } form;

/* Two words, each with the number of its exchange, and the call that it is of. */
typedef struct packet {
  uint8_t number[2], call[2];
} packet;

/* Memory: one buffer a lane. x[l][to][from]: the call whose tokens lie there. ids: likewise, of slots that lie beside
 * them. */
typedef struct state {
  uint8_t at[THREADS * MOST]; /* next step; GAVE_UP. Thread t of rank r: t * ranks + r */
  packet slots[MOST][MOST], sums[MOST][MOST], lines[MOST][MOST];
  uint8_t ids[MOST][MOST], packed[MOST][MOST]; /* the latter: of the word `in` */
  uint8_t x[LANES][MOST][MOST], y[LANES][MOST][MOST], in[LANES][MOST][MOST], back[LANES][MOST][MOST];
  uint8_t some[LANES][MOST][MOST]; /* of the word `in`: it tells of tokens */
  uint8_t n[LANES][MOST];          /* exchanges of a rank so far */
  uint8_t abort[MOST];             /* 1 + by whom */
  uint8_t told[MOST][MOST];        /* of [to][from]: 1 + n, with the mask */
  uint8_t furthest[MOST];          /* 1 + the largest n heard of */
  uint8_t cleared[MOST][MOST];     /* of [to][from] */
  uint8_t aborted;
} state;
enum { GAVE_UP = 255 };

typedef struct model {
  int ranks, lanes, calls;
  mutant mutant;
  bool gives_up; /* any wait may end by the time */
  bool loses;    /* the last rank: the others leave it out */
  bool aborts;   /* then the first one aborts, and there is no other call */
  bool dedup;
  int threads;
  form sums[CALLS];
  bool slots[CALLS][MOST]; /* which calls and ranks have packets of slots */
  step steps[THREADS * MOST][MOST_STEPS];
  int call[THREADS * MOST][MOST_STEPS], count[THREADS * MOST];
  int after[MOST]; /* the step to go on from when it has given up; 0: none */
  /* states seen: open addressing */
  state *seen;
  uint8_t *used;
  size_t size, seen_count;
  state *stack;
  size_t depth, room;
  const char *wrong;
} model;

/* Rank 0 has no tokens for the last rank in the second call. */
static bool has_none(const model *m, int rank, int peer, int call)
{
  return (m->dedup || m->mutant == NOT_EMPTY) && rank == 0 && call == 1 && peer == m->ranks - 1;
}

/* ---- programs ---- */

static void add_step(model *m, int rank, int call, step s)
{
  m->call[rank][m->count[rank]] = call;
  m->steps[rank][m->count[rank]++] = s;
}

static bool is_lost(const model *m, int rank)
{
  return m->loses && rank == m->ranks - 1;
}

/* For each peer; after the last rank was left out, which is what call == m->calls says, for those that stay. */
static void add(model *m, int rank, int call, int lane, act what)
{
  for (int p = 0; p < m->ranks; p++) {
    const bool waits = what == AWAIT_IN || what == AWAIT_BACK;
    if (call == m->calls && is_lost(m, p) && !(m->mutant == WAITS_FOR_LOST && waits)) continue;
    if (m->mutant == NO_WAIT_FOR_TOKENS && what == AWAIT_IN && p == m->ranks - 1) continue;
    if (m->mutant == NO_WAIT_FOR_ANSWERS && what == AWAIT_BACK) continue;
    const bool none = has_none(m, rank, p, call);
    if (m->mutant == NOT_EMPTY && what == TELL_IN && none) continue;
    if (m->dedup && none && (what == WRITE_X || what == READ_Y)) continue;
    add_step(m, rank, call, (step){what, p, lane, 0});
  }
}

static void add_call(model *m, int rank, int call, int lane)
{
  static const act right[] = {WRITE_X, TELL_IN, AWAIT_IN, READ_X, WRITE_Y, TELL_BACK, AWAIT_BACK, READ_Y};
  act order[8];
  memcpy(order, right, sizeof order);
  if (m->mutant == FLAG_BEFORE_DATA) order[0] = TELL_IN, order[1] = WRITE_X;
  if (m->mutant == ANSWER_BEFORE_DATA) order[4] = TELL_BACK, order[5] = WRITE_Y;
  if (m->mutant == ANSWERS_EARLY) order[3] = WRITE_Y, order[4] = TELL_BACK, order[5] = READ_X;
  add_step(m, rank, call, (step){BEGIN, rank, lane, 0});
  for (int i = 0; i < 8; i++) add(m, rank, call, lane, order[i]);
}

/* One lane. */
static void add_leaving_out(model *m, int rank)
{
  const step clear = {LEAVE_OUT, rank, 0, 0};
  m->after[rank] = m->count[rank];
  if (m->mutant == CLEARED_EARLY) add_step(m, rank, m->calls, clear);
  add(m, rank, m->calls, 0, TELL_MASK);
  add(m, rank, m->calls, 0, AWAIT_MASK);
  if (m->mutant != CLEARED_EARLY) add_step(m, rank, m->calls, clear);
  add(m, rank, m->calls, 0, TELL_CLEARED);
  if (m->mutant != NOT_MET_AGAIN) add(m, rank, m->calls, 0, AWAIT_CLEARED);
  if (!m->aborts)
    add_call(m, rank, m->calls, 0);
  else if (rank == 0)
    add_step(m, rank, m->calls, (step){ABORT, rank, 0, 0});
}

/* Nothing is sent to, and comes from, whom a rank has no tokens for: both sides see that in the flag. */
static void add_all(model *m, int thread, int call, act what)
{
  const bool of_tokens =
      what == WRITE_X || what == WRITE_SLOT || what == TAKE_SUM || what == TAKE_LINE || what == READ_Y;
  const int words = what == WRITE_SLOT || what == WRITE_SUM ? 2 : 1;
  for (int p = 0; p < m->ranks; p++)
    for (int i = 0; i < words; i++)
      if (!of_tokens || !has_none(m, thread % m->ranks, p, call)) add_step(m, thread, call, (step){what, p, 0, i});
}

/* Until the other thread has taken all that it has so far. */
static void meet(model *m, int thread, int call, int other)
{
  add_step(m, thread, call, (step){MEET, other, 0, m->count[other]});
}

/* One thread has rows and flags, the other what goes as packets. */
static void add_call_of_packets(model *m, int rank, int call)
{
  const int other = m->ranks + rank;
  const form sums = m->sums[call];
  add_step(m, rank, call, (step){BEGIN, rank, 0, 0});
  meet(m, other, call, rank);
  if (m->slots[call][rank]) add_all(m, other, call, WRITE_SLOT);
  add_all(m, rank, call, WRITE_X);
  add_all(m, rank, call, TELL_IN);
  add_all(m, rank, call, AWAIT_IN);
  add_all(m, rank, call, TAKE_SLOT);
  add_all(m, rank, call, READ_X);
  meet(m, rank, call, other); /* the grid ends */
  meet(m, other, call, rank);
  if (sums != ROWS) add_all(m, other, call, sums == WORDS ? WRITE_SUM : WRITE_LINE);
  if (sums != ROWS) add_all(m, other, call, sums == WORDS ? TAKE_SUM : TAKE_LINE);
  if (sums == ROWS) add_all(m, rank, call, WRITE_Y);
  add_all(m, rank, call, TELL_BACK);
  if (!(sums != ROWS && m->mutant == BACK_NOT_AWAITED)) add_all(m, rank, call, AWAIT_BACK);
  if (sums == ROWS) add_all(m, rank, call, READ_Y);
  if (m->mutant != NEXT_BEFORE_SUMS) meet(m, rank, call, other);
}

static void write_programs(model *m)
{
  for (int r = 0; r < m->ranks && m->threads > 1; r++)
    for (int c = 0; c < m->calls; c++) add_call_of_packets(m, r, c);
  for (int r = 0; r < m->ranks && m->threads == 1; r++) {
    for (int c = 0; c < m->calls; c++)
      for (int l = 0; l < m->lanes; l++) add_call(m, r, c, m->mutant == OTHER_ORDER && r == 1 ? m->lanes - 1 - l : l);
    if (m->loses && !is_lost(m, r)) add_leaving_out(m, r);
  }
}

/* ---- steps ---- */

/* As signed difference modulo WRAP. */
static bool reached(uint8_t word, uint8_t want)
{
  return (uint8_t)(word - want) % WRAP < WRAP / 2;
}

/* As leaving out does: the largest number that any rank that stays has come to. */
static void hear(state *s, int r, uint8_t told)
{
  if (s->furthest[r] == 0 || ((uint8_t)(told - s->furthest[r]) % WRAP == 1)) s->furthest[r] = told;
}

static bool sends_packets(const model *m, int rank, int call)
{
  return m->threads > 1 && m->slots[call][rank];
}

static void write_word(packet *p, int word, uint8_t number, uint8_t call)
{
  p->number[word] = number;
  p->call[word] = call;
}

/* False: it has not come. */
static bool take_packet(model *m, const packet *p, uint8_t number, uint8_t call, bool as_it_is)
{
  if (!as_it_is && p->number[0] != number) return false;
  if (!as_it_is && m->mutant != HALF_A_PACKET && p->number[1] != number) return false;
  if (p->call[0] != call || p->call[1] != call) m->wrong = "a packet of another call was taken";
  return true;
}

/* Slots that are no packets lie beside the rows. */
static bool take_slot(model *m, const state *s, int r, int o, uint8_t n, uint8_t call)
{
  if (!s->some[0][r][o]) return true;
  if (s->packed[r][o]) return take_packet(m, &s->slots[r][o], n, call, m->mutant == SLOTS_AS_THEY_ARE);
  if (s->ids[r][o] != call) m->wrong = "slots of another call were read";
  return true;
}

/* Takes the thread's next step; false: it has to wait. */
static bool take(model *m, state *s, int thread)
{
  const step *p = &m->steps[thread][s->at[thread]];
  const int call = m->call[thread][s->at[thread]], l = p->lane, o = p->peer, r = thread % m->ranks;
  const uint8_t n = s->n[l][r], fresh = (uint8_t)(call + 1);
  switch (p->what) {
  case BEGIN:
    if (!(m->mutant == SAME_EXCHANGE && call > 0) && !(m->mutant == NOT_ADVANCED && call == m->calls))
      s->n[l][r] = (uint8_t)(n + 1) % WRAP;
    break;
  case WRITE_X:
    s->x[l][o][r] = fresh;
    if (m->threads > 1 && !sends_packets(m, r, call)) s->ids[o][r] = fresh;
    break;
  case TELL_IN:
    s->in[l][o][r] = n;
    s->packed[o][r] = sends_packets(m, r, call) && m->mutant != NOT_TOLD_PACKED;
    s->some[l][o][r] = m->mutant == TOLD_OF_ALL || !has_none(m, r, o, call);
    break;
  case AWAIT_IN:
    if (!reached(s->in[l][r][o], n)) return false;
    break;
  case READ_X:
    if (s->some[l][r][o] && s->x[l][r][o] != fresh) m->wrong = "tokens of another call were read";
    break;
  case WRITE_Y:
    if (s->some[l][r][o]) s->y[l][o][r] = fresh;
    break;
  case TELL_BACK: s->back[l][o][r] = n; break;
  case AWAIT_BACK:
    if (!reached(s->back[l][r][o], n)) return false;
    break;
  case READ_Y:
    if (s->y[l][r][o] != fresh) m->wrong = "results of another call were read";
    break;
  case TELL_MASK: s->told[o][r] = (uint8_t)(n + 1); break;
  case AWAIT_MASK:
    if (!s->told[r][o]) return false;
    hear(s, r, s->told[r][o]);
    break;
  case LEAVE_OUT:
    if (s->aborted) m->wrong = "an abort was cleared";
    s->abort[r] = 0;
    if (m->mutant != NOT_AGREED && s->furthest[r]) s->n[l][r] = (uint8_t)(s->furthest[r] - 1);
    break;
  case TELL_CLEARED: s->cleared[o][r] = 1; break;
  case AWAIT_CLEARED:
    if (!s->cleared[r][o]) return false;
    break;
  case ABORT: s->aborted = 1; break;
  case WRITE_SLOT: write_word(&s->slots[o][r], p->at, n, fresh); break;
  case TAKE_SLOT:
    if (!take_slot(m, s, r, o, n, fresh)) return false;
    break;
  case WRITE_SUM:
    if (s->some[l][r][o]) write_word(&s->sums[o][r], p->at, n, fresh);
    break;
  case TAKE_SUM:
    if (!take_packet(m, &s->sums[r][o], n, fresh, m->mutant == SUMS_AS_THEY_ARE)) return false;
    break;
  case WRITE_LINE:
    if (m->mutant == NOT_ANSWERED && call == 1 && r == 0 && o == 1) break;
    for (int i = 0; s->some[l][r][o] && i < 2; i++) write_word(&s->lines[o][r], i, n, fresh);
    break;
  case TAKE_LINE:
    if (!take_packet(m, &s->lines[r][o], n, fresh, m->mutant == LINES_AS_THEY_ARE)) return false;
    break;
  case MEET:
    if (s->at[o] == GAVE_UP || s->at[o] < p->at) return false;
    break;
  default: break;
  }
  s->at[thread]++;
  return true;
}

/* ---- the search ---- */

static size_t slot_of(const model *m, const state *s)
{
  uint64_t hash = 14695981039346656037u;
  for (size_t i = 0; i < sizeof *s; i++) hash = (hash ^ ((const unsigned char *)s)[i]) * 1099511628211u;
  size_t at = (size_t)(hash ^ hash >> 29) & (m->size - 1);
  while (m->used[at] && memcmp(&m->seen[at], s, sizeof *s)) at = (at + 1) & (m->size - 1);
  return at;
}

static void grow(model *m)
{
  model larger = *m;
  larger.size = m->size ? m->size * 2 : 1 << 16;
  larger.seen = malloc(larger.size * sizeof *larger.seen);
  larger.used = calloc(larger.size, 1);
  for (size_t i = 0; i < m->size; i++) {
    if (!m->used[i]) continue;
    const size_t at = slot_of(&larger, &m->seen[i]);
    larger.seen[at] = m->seen[i], larger.used[at] = 1;
  }
  free(m->seen), free(m->used);
  *m = larger;
}

static void visit(model *m, const state *s)
{
  if (m->seen_count * 2 >= m->size) grow(m);
  const size_t at = slot_of(m, s);
  if (m->used[at]) return;
  m->used[at] = 1, m->seen[at] = *s, m->seen_count++;
  if (m->depth == m->room) m->stack = realloc(m->stack, (m->room = m->room ? m->room * 2 : 1024) * sizeof *m->stack);
  m->stack[m->depth++] = *s;
}

/* A rank that waits has seen that another gave up, or does so itself. What it does next, if it stays, is to leave the
 * last rank out; there is no giving up behind that. */
static bool end_wait(model *m, state *s, int thread)
{
  const int r = thread % m->ranks;
  const bool again = m->after[r] && s->at[r] >= m->after[r], meets = m->steps[thread][s->at[thread]].what == MEET;
  const bool told = s->abort[r] && !(again && is_lost(m, s->abort[r] - 1) && m->mutant != HEEDS_LOST);
  if (!told && (again || meets || !m->gives_up)) return false;
  if (again) m->wrong = "who stays has given up again";
  for (int o = 0; o < m->ranks; o++)
    if (m->mutant != NO_ABORT) s->abort[o] = (uint8_t)(1 + r);
  s->at[thread] = m->after[r] && !again ? (uint8_t)m->after[r] : GAVE_UP;
  return true;
}

static bool may_end(const model *m, act what, int r)
{
  if (m->mutant == NOT_ANSWERED) return false;
  if (what == TAKE_SLOT || what == TAKE_SUM || what == TAKE_LINE) return m->mutant != DEAF_TO_ABORT;
  /* With the mutant only the first rank has a limit to its patience. */
  return what == MEET || ((what == AWAIT_IN || what == AWAIT_BACK) && !(m->mutant == NO_ABORT && r > 0));
}

static void expand(model *m, const state *from)
{
  bool moved = false, all = true;
  for (int t = 0; t < m->threads * m->ranks && !m->wrong; t++) {
    if (from->at[t] == GAVE_UP || from->at[t] == m->count[t]) continue;
    all = false;
    state s = *from;
    if (take(m, &s, t)) {
      visit(m, &s);
      moved = true;
    }
    s = *from;
    if (may_end(m, m->steps[t][from->at[t]].what, t % m->ranks) && end_wait(m, &s, t)) {
      visit(m, &s);
      moved = true;
    }
  }
  if (!moved && !all && !m->wrong) m->wrong = "ranks wait for each other for ever";
}

typedef enum ending {
  ALL_CALLS,
  GIVING_UP,
  LEAVING_OUT,
  ABORTING,
  DEDUP,
  PACKETS,
  SOME_PACKETS,
  LINED,
  SOME_LINES
} ending;

/* Slots and sums need not go together: slots are packets where put is the gate as well. */
static void choose_packets(model *m, ending how)
{
  static const form some[CALLS] = {WORDS, ROWS, WORDS}, some_lines[CALLS] = {LINES, WORDS, LINES};
  static const bool slots[CALLS][MOST] = {{true, true}, {true, false}, {false, true}};
  m->threads = how >= PACKETS ? THREADS : 1;
  for (int c = 0; c < CALLS; c++) {
    m->sums[c] = how == PACKETS ? WORDS : how == LINED ? LINES : how == SOME_LINES ? some_lines[c] : some[c];
    for (int r = 0; r < m->ranks; r++) m->slots[c][r] = how == PACKETS || how == LINED || slots[c][r];
  }
}

/* What went wrong, or NULL. */
static const char *search(int ranks, int lanes, mutant which, ending how, size_t *states)
{
  model *m = calloc(1, sizeof *m);
  const packet none = {{BEFORE, BEFORE}, {0, 0}};
  state first;
  memset(&first, 0, sizeof first);
  memset(first.in, BEFORE, sizeof first.in);
  memset(first.back, BEFORE, sizeof first.back);
  memset(first.n, BEFORE, sizeof first.n);
  for (int i = 0; i < MOST * MOST; i++)
    first.slots[i / MOST][i % MOST] = first.sums[i / MOST][i % MOST] = first.lines[i / MOST][i % MOST] = none;
  m->ranks = ranks, m->lanes = lanes, m->mutant = which;
  m->gives_up = how != ALL_CALLS, m->loses = how == LEAVING_OUT || how == ABORTING, m->aborts = how == ABORTING,
  m->dedup = how >= DEDUP, m->calls = m->loses ? CALLS - 1 : CALLS;
  choose_packets(m, how);
  write_programs(m);
  visit(m, &first);
  while (m->depth && !m->wrong) {
    const state s = m->stack[--m->depth];
    expand(m, &s);
  }
  const char *wrong = m->wrong;
  *states = m->seen_count;
  free(m->seen), free(m->used), free(m->stack), free(m);
  return wrong;
}

static void check_right(int ranks, int lanes, ending how)
{
  static const char *const hows[] = {"",
                                     ", giving up",
                                     ", leaving one out",
                                     ", leaving one out, then an abort",
                                     ", dedup",
                                     ", packets",
                                     ", some packets",
                                     ", lines",
                                     ", lines and packets"};
  size_t states = 0;
  case_begin("%d ranks, %d lanes%s", ranks, lanes, hows[how]);
  const char *wrong = search(ranks, lanes, RIGHT, how, &states);
  CHECK_MSG(wrong == NULL, "%s", wrong);
  CHECK_MSG(states > 500, "only %zu states", states);
  printf("# %zu states\n", states);
  case_end();
}

static void orders(void)
{
  check_right(2, 1, ALL_CALLS);
  check_right(2, 1, GIVING_UP);
  check_right(2, 2, GIVING_UP);
  check_right(3, 1, GIVING_UP);
  check_right(3, 2, ALL_CALLS);
  check_right(3, 1, LEAVING_OUT);
  check_right(3, 1, ABORTING);
  check_right(3, 1, DEDUP);
  check_right(2, 1, PACKETS);
  check_right(2, 1, SOME_PACKETS);
  check_right(2, 1, LINED);
  check_right(2, 1, SOME_LINES);
}

static void mutants(void)
{
  for (mutant m = RIGHT + 1; m < MUTANTS; m++) {
    const bool packets = m >= FIRST_OF_PACKETS, masks = m >= NOT_AGREED && !packets;
    const ending how = m >= FIRST_OF_LINES  ? LINED
                       : packets            ? PACKETS
                       : m == NOT_MET_AGAIN ? ABORTING
                       : masks              ? LEAVING_OUT
                       : m == NO_ABORT      ? GIVING_UP
                       : m == TOLD_OF_ALL   ? DEDUP
                                            : ALL_CALLS;
    size_t states = 0;
    case_begin("%s", mutant_names[m]);
    CHECK(search(masks ? 3 : 2, m == OTHER_ORDER ? 2 : 1, m, how, &states) != NULL);
    case_end();
  }
}

static const test_group groups[] = {ALONE("all orders", orders, ONCE), ALONE("mutants die", mutants, ONCE)};
TEST_MAIN(groups)
