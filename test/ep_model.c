/*
 * All orders in which ranks can take the steps of kernels/ep/ep.h: three calls of two ranks, with two lanes, and with
 * giving up at any wait, and of three ranks; exchanges counted modulo 4, so that the words wrap. Nothing stale is read,
 * nobody is stuck. A step is one store, or one look at what others stored: stores of one rank are seen in its order,
 * which is what release and acquire promise. Of each way to get it wrong (`mutant`) the same search finds an example.
 */
#include <stdio.h>
#include <stdlib.h>

#include "test.h"

/* BEFORE: exchanges so far, so that the words wrap. */
enum { MOST = 3, CALLS = 3, WRAP = 4, BEFORE = 2, LANES = 2 };

typedef enum mutant {
  RIGHT,
  FLAG_BEFORE_DATA,    /* put tells of tokens before it has written them */
  ANSWER_BEFORE_DATA,  /* likewise */
  NO_WAIT_FOR_TOKENS,  /* of the last rank */
  NO_WAIT_FOR_ANSWERS, /* collect reads at once, and puts of the next call too */
  ANSWERS_EARLY,       /* `back` before the tokens have been read */
  SAME_EXCHANGE,       /* the number is not advanced */
  NOT_EMPTY,           /* a rank that gets no tokens is not told */
  NO_ABORT,            /* a rank that gives up tells nobody, and the others wait without a limit */
  OTHER_ORDER,         /* two lanes in one thread: rank 1 takes the second first */
  MUTANTS
} mutant;

static const char *const mutant_names[MUTANTS] = {"as it is",
                                                  "a flag before its tokens",
                                                  "a flag before its results",
                                                  "no wait for tokens",
                                                  "no wait for results",
                                                  "results told of before tokens are read",
                                                  "an exchange that is not counted",
                                                  "an empty rank that is not told",
                                                  "giving up in silence",
                                                  "lanes of one thread in different orders"};

/* What a rank does in one call, for each peer in turn. */
typedef enum act { WRITE_X, TELL_IN, AWAIT_IN, READ_X, WRITE_Y, TELL_BACK, AWAIT_BACK, READ_Y, ACTS } act;

typedef struct step {
  act what;
  int peer, lane;
} step;

enum { MOST_STEPS = CALLS * LANES * ACTS * MOST };

/* Memory: one buffer a lane. x[l][to][from]: the call whose tokens lie there. */
typedef struct state {
  uint8_t at[MOST]; /* next step; DONE: given up */
  uint8_t x[LANES][MOST][MOST], y[LANES][MOST][MOST], in[LANES][MOST][MOST], back[LANES][MOST][MOST];
  uint8_t abort[MOST];
} state;
enum { GAVE_UP = 255 };

typedef struct model {
  int ranks, lanes;
  mutant mutant;
  bool gives_up; /* any wait may end by the time */
  step steps[MOST][MOST_STEPS];
  int call[MOST][MOST_STEPS], count[MOST];
  /* states seen: open addressing */
  state *seen;
  uint8_t *used;
  size_t size, seen_count;
  state *stack;
  size_t depth, room;
  const char *wrong;
} model;

/* ---- programs ---- */

static void add(model *m, int rank, int call, int lane, act what)
{
  for (int p = 0; p < m->ranks; p++) {
    if (m->mutant == NO_WAIT_FOR_TOKENS && what == AWAIT_IN && p == m->ranks - 1) continue;
    if (m->mutant == NO_WAIT_FOR_ANSWERS && what == AWAIT_BACK) continue;
    /* Rank 0 has no tokens for the last rank in the second call. */
    if (m->mutant == NOT_EMPTY && what == TELL_IN && rank == 0 && call == 1 && p == m->ranks - 1) continue;
    m->call[rank][m->count[rank]] = call;
    m->steps[rank][m->count[rank]++] = (step){what, p, lane};
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
  for (int i = 0; i < 8; i++) add(m, rank, call, lane, order[i]);
}

static void write_programs(model *m)
{
  for (int r = 0; r < m->ranks; r++)
    for (int c = 0; c < CALLS; c++)
      for (int l = 0; l < m->lanes; l++) add_call(m, r, c, m->mutant == OTHER_ORDER && r == 1 ? m->lanes - 1 - l : l);
}

/* ---- steps ---- */

static uint8_t number(const model *m, int call)
{
  return (uint8_t)(((m->mutant == SAME_EXCHANGE ? 1 : call + 1) + BEFORE) % WRAP);
}

/* As signed difference modulo WRAP. */
static bool reached(uint8_t word, uint8_t want)
{
  return (uint8_t)(word - want) % WRAP < WRAP / 2;
}

/* Takes rank r's next step; false: it has to wait. */
static bool take(model *m, state *s, int r)
{
  const step *p = &m->steps[r][s->at[r]];
  const int call = m->call[r][s->at[r]], l = p->lane, o = p->peer;
  const uint8_t n = number(m, call), fresh = (uint8_t)(call + 1);
  switch (p->what) {
  case WRITE_X: s->x[l][o][r] = fresh; break;
  case TELL_IN: s->in[l][o][r] = n; break;
  case AWAIT_IN:
    if (!reached(s->in[l][r][o], n)) return false;
    break;
  case READ_X:
    if (s->x[l][r][o] != fresh) m->wrong = "tokens of another call were read";
    break;
  case WRITE_Y: s->y[l][o][r] = fresh; break;
  case TELL_BACK: s->back[l][o][r] = n; break;
  case AWAIT_BACK:
    if (!reached(s->back[l][r][o], n)) return false;
    break;
  case READ_Y:
    if (s->y[l][r][o] != fresh) m->wrong = "results of another call were read";
    break;
  default: break;
  }
  s->at[r]++;
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

/* A rank that waits has seen that another gave up, or does so itself. */
static bool end_wait(const model *m, state *s, int r)
{
  if (!s->abort[r] && !m->gives_up) return false;
  for (int o = 0; o < m->ranks; o++)
    if (m->mutant != NO_ABORT) s->abort[o] = 1;
  s->at[r] = GAVE_UP;
  return true;
}

static void expand(model *m, const state *from)
{
  bool moved = false, all = true;
  for (int r = 0; r < m->ranks && !m->wrong; r++) {
    if (from->at[r] == GAVE_UP || from->at[r] == m->count[r]) continue;
    all = false;
    state s = *from;
    if (take(m, &s, r)) {
      visit(m, &s);
      moved = true;
    }
    const act what = m->steps[r][from->at[r]].what;
    s = *from;
    /* With the mutant only the first rank has a limit to its patience. */
    if ((what == AWAIT_IN || what == AWAIT_BACK) && !(m->mutant == NO_ABORT && r > 0) && end_wait(m, &s, r)) {
      visit(m, &s);
      moved = true;
    }
  }
  if (!moved && !all && !m->wrong) m->wrong = "ranks wait for each other for ever";
}

/* What went wrong, or NULL. */
static const char *search(int ranks, int lanes, mutant which, bool gives_up, size_t *states)
{
  model *m = calloc(1, sizeof *m);
  state first;
  memset(&first, 0, sizeof first);
  memset(first.in, BEFORE, sizeof first.in);
  memset(first.back, BEFORE, sizeof first.back);
  m->ranks = ranks, m->lanes = lanes, m->mutant = which, m->gives_up = gives_up;
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

static void check_right(int ranks, int lanes, bool gives_up)
{
  size_t states = 0;
  case_begin("%d ranks, %d lanes%s", ranks, lanes, gives_up ? ", giving up" : "");
  const char *wrong = search(ranks, lanes, RIGHT, gives_up, &states);
  CHECK_MSG(wrong == NULL, "%s", wrong);
  CHECK_MSG(states > 500, "only %zu states", states);
  printf("# %zu states\n", states);
  case_end();
}

static void orders(void)
{
  check_right(2, 1, false);
  check_right(2, 1, true);
  check_right(2, 2, true);
  check_right(3, 1, true);
  check_right(3, 2, false);
}

static void mutants(void)
{
  for (mutant m = RIGHT + 1; m < MUTANTS; m++) {
    size_t states = 0;
    case_begin("%s", mutant_names[m]);
    CHECK(search(2, m == OTHER_ORDER ? 2 : 1, m, m == NO_ABORT, &states) != NULL);
    case_end();
  }
}

static const test_group groups[] = {ALONE("all orders", orders, ONCE), ALONE("mutants die", mutants, ONCE)};
TEST_MAIN(groups)
