/*
 * Groups whose ranks do not reach each other's memory, over the shim's NCCL. On the CPU device its sends are copies
 * between the ranks' threads: the worlds of test/ep.c, with the bits that they have over shared memory; ranks that
 * differ, stop or fail; every call of NCCL failing; its versions. On the shim's GPUs, whose kernels do nothing: create,
 * calls and what becomes of a rank that does not come. On GPUs whose kernels the CPU runs (test/emulate/): those
 * worlds, and of few tokens, whose rows a grid of their own answers.
 */
#include "shim/shim.h"

#define TEST_STAGED
#include "ep.c"

enum { MOST_COMMS = 8 };

static void open_comms(void **made, int32_t ranks)
{
  int devices[MOST_COMMS];
  for (int i = 0; i < MOST_COMMS; i++) devices[i] = gpus ? i % gpus : CUMOE_DEVICE_CPU;
  shim_comms_open(made, ranks, devices);
  comms = made;
}

static void close_comms(void)
{
  shim_comms_close(comms);
  comms = NULL;
}

/* ---- what they answer ---- */

static void answers_by_nccl(void)
{
  void *made[MOST_COMMS];
  for (size_t i = 0; i < sizeof worlds / sizeof *worlds * 2; i++) {
    const world *w = &worlds[i / 2];
    if (w->ranks > MOST_COMMS || w->lanes > 1) continue;
    open_comms(made, w->ranks);
    run_world(w, i % 2);
    close_comms();
  }
}

/* ---- ranks that differ, stop, fail ---- */

static const world three = {
    .ranks = 3, .experts = 8, .top_k = 2, .dtype = CUMOE_BF16, .capacity = 4, .tokens = {4, 3, 0}, .exact = true};

static const struct {
  const char *name;
  trouble trouble;
  cumoe_status own, others;
  const char *own_words, *words;
} fates_by_nccl[] = {
    {"another size", OTHER_SIZE, CUMOE_ERR_INVALID_ARGUMENT, CUMOE_ERR_INVALID_ARGUMENT, "config.max_tokens is",
     "config.max_tokens is"},
    {"other flags", OTHER_FLAGS, CUMOE_ERR_INVALID_ARGUMENT, CUMOE_ERR_INVALID_ARGUMENT, "config.flags is",
     "config.flags is"},
    {"another layer", OTHER_SHAPE, CUMOE_ERR_INVALID_ARGUMENT, CUMOE_ERR_INVALID_ARGUMENT, "the hash of",
     "the hash of"},
    {"no zeros", USED_ARENA, CUMOE_ERR_INVALID_ARGUMENT, CUMOE_ERR_PEER, "not filled with zeros", "ncclGroupEnd: 6"},
    {"a call that is corrected", BAD_CALL, CUMOE_OK, CUMOE_OK, "", ""},
    {"never joins", NEVER_JOINS, CUMOE_OK, CUMOE_ERR_PEER, "", "ncclGroupEnd: 6"},
    {"stops", STOPS_BEFORE, CUMOE_OK, CUMOE_ERR_PEER, "", "ncclGroupEnd: 6"},
    {"aborts", ABORTS, CUMOE_ERR_PEER, CUMOE_ERR_PEER, "rank 1 has aborted the group", "ncclGroupEnd: 6"},
};

static void fates_of_three(void)
{
  void *made[MOST_COMMS];
  shim.patience_ms = 500;
  for (size_t i = 0; i < sizeof fates_by_nccl / sizeof *fates_by_nccl; i++) {
    rank ranks[MOST_RANKS];
    world w = three;
    case_begin("%s", fates_by_nccl[i].name);
    make_world(&w);
    const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
    open_comms(made, w.ranks);
    run_ranks(&w, &out, ranks, 1, fates_by_nccl[i].trouble, 0);
    for (int32_t r = 0; r < w.ranks; r++) {
      const cumoe_status want = r == 1 ? fates_by_nccl[i].own : fates_by_nccl[i].others;
      const char *words = r == 1 ? fates_by_nccl[i].own_words : fates_by_nccl[i].words;
      CHECK_MSG(ranks[r].status == want && strstr(ranks[r].text, words) != NULL, "rank %d: %s, %s", (int)r,
                cumoe_status_name(ranks[r].status), ranks[r].text);
      CHECK(ranks[r].ended == CUMOE_OK); /* waits for nobody */
    }
    if (fates_by_nccl[i].trouble == BAD_CALL) check_exact(&w, &out);
    close_comms();
    case_end();
  }
  shim_reset();
}

/* Call n of NCCL's fails: its rank says so in NCCL's words, the others get stuck in NCCL, and nothing is left. */
static bool fail_at(int64_t n, int code)
{
  void *made[MOST_COMMS];
  rank ranks[MOST_RANKS];
  world w = three;
  int own = 0, peers = 0;
  w.ranks = 2;
  case_begin("call %d of NCCL answers %d", (int)n, code);
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  const int64_t live = shim_live();
  open_comms(made, w.ranks);
  shim_fail(SHIM_LIBRARY, n, false, (cudaError_t)code);
  run_ranks(&w, &out, ranks, NOBODY, NONE, 0);
  const bool failed = shim_failed() != NULL;
  const char *call = failed ? shim_failed() : "";
  for (int32_t r = 0; r < w.ranks; r++) {
    own += ranks[r].status == CUMOE_ERR_CUDA && strstr(ranks[r].text, call) && strstr(ranks[r].text, "of the shim's");
    peers += ranks[r].status == CUMOE_ERR_PEER && strstr(ranks[r].text, "ncclGroupEnd: 6");
    CHECK(ranks[r].ended == CUMOE_OK);
    CHECK((ranks[r].fault.cause == CUMOE_GROUP_FAILED && ranks[r].fault.by == r) || !failed || !ranks[r].group);
  }
  CHECK_MSG(own == failed && peers == (failed ? w.ranks - 1 : 0), "%s: %d, %d: %s, %s", call, own, peers, ranks[0].text,
            ranks[1].text);
  shim_heal();
  if (!failed) check_exact(&w, &out);
  close_comms();
  CHECK(shim_live() == live);
  case_end();
  return failed;
}

static void faults(void)
{
  shim.ends_comms = true;
  for (int64_t n = 1; fail_at(n, n % 2 ? 1 : 5); n++) continue;
  shim_reset();
}

/* ---- which NCCL ---- */

static const struct {
  const char *name;
  int nccl;
  const char *hidden;
  cumoe_status status;
  const char *words;
} versions[] = {
    {"none", 0, NULL, CUMOE_ERR_LIBRARY_MISSING, "has not loaded libnccl.so.2"},
    {"2.6.4", 2604, NULL, CUMOE_ERR_NOT_SUPPORTED, "config.comm needs NCCL 2.7.3, with ncclSend: this is 2.6.4"},
    {"2.7.3", 2703, NULL, CUMOE_OK, ""},
    {"2.8.4", 2804, NULL, CUMOE_OK, ""},
    {"2.9.6", 20906, NULL, CUMOE_OK, ""},
    {"2.27.7", 22707, NULL, CUMOE_OK, ""},
    {"2.28.9", 22809, NULL, CUMOE_OK, ""},
    {"2.29.7", 22907, NULL, CUMOE_OK, ""},
    {"2.30.7", 23007, NULL, CUMOE_OK, ""},
    {"2.31.1", 23101, NULL, CUMOE_OK, ""},
    {"without ncclSend", 22809, "ncclSend", CUMOE_ERR_LIBRARY_MISSING, "NCCL 2.28.9 has no function ncclSend"},
    {"without ncclGroupEnd", 22809, "ncclGroupEnd", CUMOE_ERR_LIBRARY_MISSING, "has no function ncclGroupEnd"},
};

static void all_versions(void)
{
  void *made[MOST_COMMS];
  for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
    rank ranks[MOST_RANKS];
    world w = three;
    case_begin("%s", versions[i].name);
    shim.nccl = versions[i].nccl;
    shim.hidden = versions[i].hidden;
    make_world(&w);
    const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
    open_comms(made, w.ranks);
    run_ranks(&w, &out, ranks, NOBODY, NONE, 0);
    for (int32_t r = 0; r < w.ranks; r++)
      CHECK_MSG(ranks[r].status == versions[i].status && strstr(ranks[r].text, versions[i].words) != NULL,
                "rank %d: %s, %s", (int)r, cumoe_status_name(ranks[r].status), ranks[r].text);
    if (versions[i].status == CUMOE_OK) check_exact(&w, &out);
    close_comms();
    shim_reset();
    case_end();
  }
}

/* Of other ranks, or another device: refused before anything happens. */
static void other_communicators(void)
{
  static const struct {
    int32_t size, of, device;
    cumoe_status status;
    const char *words;
  } wrong[] = {
      {2, 0, CUMOE_DEVICE_CPU, CUMOE_ERR_INVALID_ARGUMENT, "config.comm has 2 ranks, config.ranks is 3"},
      {3, 1, CUMOE_DEVICE_CPU, CUMOE_ERR_INVALID_ARGUMENT, "config.comm is of rank 1, config.rank is 0"},
      {3, 0, 1, CUMOE_ERR_WRONG_DEVICE, "config.comm is of CUDA device 1, context of"},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    void *made[MOST_COMMS], *one[MOST_COMMS];
    const int devices[3] = {wrong[i].device, wrong[i].device, wrong[i].device};
    world w = three;
    rank r = {.w = &w, .all = &r};
    case_begin("%s", wrong[i].words);
    make_world(&w);
    const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
    shim_comms_open(made, wrong[i].size, devices);
    one[0] = made[wrong[i].of];
    comms = one;
    w.ranks = 1; /* in ep.c's own lists */
    r.out = &out;
    make_arena(&r);
    void *arenas[MOST_RANKS];
    cumoe_group_config c = config_of(&r, arenas);
    c.ranks = 3;
    CHECK_OK(cumoe_ep_arena(r.plan, &c, &r.bytes));
    free(r.arena);
    r.arena = aligned(r.bytes);
    shim_mark();
    CHECK_STATUS(wrong[i].status, cumoe_group_create(r.context, r.plan, &c,
                                                     cumoe_vector_mut(r.arena, CUMOE_U8, (int64_t)r.bytes), &r.group));
    CHECK_TEXT(wrong[i].words);
    CHECK_MSG(!strstr(shim_trace(), "nccl"), "%s", shim_trace());
    comms = made;
    close_comms();
    close_rank(r.context);
    free(r.arena);
    case_end();
  }
}

/* A NCCL that loses bytes: where they are missing it is seen, and the others hear of it at once. */
static void torn(void)
{
  void *made[MOST_COMMS];
  rank ranks[MOST_RANKS];
  world w = three;
  case_begin("bytes are lost");
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  open_comms(made, w.ranks);
  shim.torn_sends = true;
  run_ranks(&w, &out, ranks, NOBODY, NONE, 0);
  for (int32_t r = 0; r < w.ranks; r++) {
    const char *words = r == 1 ? "config.comm: what rank 0 has sent to rank 1 is not in its arena"
                               : "rank 1 failed where this one did not";
    CHECK_MSG(ranks[r].status == (r == 1 ? CUMOE_ERR_INVALID_ARGUMENT : CUMOE_ERR_PEER) &&
                  strstr(ranks[r].text, words) != NULL && ranks[r].group == NULL,
              "rank %d: %s", (int)r, ranks[r].text);
  }
  close_comms();
  shim_reset();
  case_end();
}

/* ---- what such a group does not do ---- */

/* A workspace that begins where messages end: refused, and nobody is told anything. */
static void work_in_messages(rank *r)
{
  ep_call c;
  CHECK_OK(cumoe_ep_workspace(r->group, &r->workspace_bytes));
  r->workspaces[0] = (char *)r->arena + r->bytes - 256;
  fill_call(r, 0, 0, &c);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_ep_forward(r->group, r->weights, &c.args, NULL));
  CHECK_TEXT("the group's arena");
}

static void *join_and_ask(void *argument)
{
  rank *r = argument;
  const uint64_t mask = 1;
  keep(r, join(r));
  if (!r->group) return NULL;
  work_in_messages(r);
  if (cumoe_group_set_timeout(r->group, 1) != CUMOE_ERR_NOT_SUPPORTED) keep(r, CUMOE_ERR_INTERNAL);
  keep(r, cumoe_group_set_active(r->group, &mask));
  r->ended = cumoe_group_destroy(r->group);
  return NULL;
}

static void masks_by_nccl(void)
{
  void *made[MOST_COMMS];
  rank r[2] = {{.all = r}, {.all = r, .number = 1}};
  pthread_t threads[2];
  world w = three;
  w.ranks = 2;
  case_begin("ranks are not left out");
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  open_comms(made, 2);
  for (int i = 0; i < 2; i++) r[i].w = &w, r[i].out = &out, make_arena(&r[i]);
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, join_and_ask, &r[i]) == 0);
  for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < 2; i++) {
    CHECK_MSG(r[i].status == CUMOE_ERR_NOT_SUPPORTED && strstr(r[i].text, "make another group"), "%s", r[i].text);
    CHECK(r[i].ended == CUMOE_OK);
    close_rank(r[i].context);
    free(r[i].arena);
  }
  close_comms();
  case_end();
}

/* ---- on GPUs ---- */

/* Of a case on the shim's GPUs: all that it made is gone. */
static void end_gpus(int64_t live)
{
  case_end();
  CHECK(shim_live() == live);
  gpus = 0;
  shim_reset();
}

/* Kernels do nothing here: what is called, and that it is answered. */
static void three_gpus(void)
{
  void *made[MOST_COMMS];
  rank ranks[MOST_RANKS];
  world w = three;
  const int64_t live = shim_live();
  shim.devices = gpus = 3;
  case_begin("three ranks");
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  open_comms(made, w.ranks);
  shim_mark();
  run_ranks(&w, &out, ranks, NOBODY, NONE, 2000000000);
  for (int32_t r = 0; r < w.ranks; r++)
    CHECK_MSG(ranks[r].status == CUMOE_OK && ranks[r].ended == CUMOE_OK && ranks[r].fault.cause == CUMOE_GROUP_ALIVE,
              "rank %d: %s", (int)r, ranks[r].text);
  CHECK(!strstr(shim_trace(), "PeerAccess") && !strstr(shim_trace(), "CanAccessPeer"));
  close_comms();
  close_opened();
  end_gpus(live);
}

/* Create comes back, and waits for no stream; the rest stays until the engine has ended the communicator. */
static void absent_on_gpus(void)
{
  void *made[MOST_COMMS];
  world w = three;
  rank r[2] = {{.w = &w, .all = r, .timeout_ns = 50000000}, {.w = &w, .all = r, .number = 1}};
  const int64_t live = shim_live();
  shim.devices = gpus = 2;
  shim.patience_ms = 20;
  w.ranks = 2;
  case_begin("one of two");
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  open_comms(made, 2);
  r[0].out = &out;
  make_arena(&r[0]);
  shim_mark();
  CHECK_STATUS(CUMOE_ERR_PEER, join(&r[0]));
  CHECK_TEXT("ncclGroupEnd has not ended within 0.05 s");
  CHECK(r[0].group == NULL);
  CHECK_MSG(!strstr(shim_trace(), "waits for ever") && !strstr(shim_trace(), "cudaLibraryUnload"), "%s", shim_trace());
  close_comms();
  close_opened();
  free_shared(r[0].arena);
  end_gpus(live);
}

static void join_two(rank r[2])
{
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) make_arena(&r[i]);
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, only_join, &r[i]) == 0);
  for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < 2; i++) CHECK_MSG(r[i].status == CUMOE_OK, "rank %d: %s", i, r[i].text);
  CHECK_OK(cumoe_ep_workspace(r[0].group, &r[0].workspace_bytes));
  r[0].workspaces[0] = device_bytes(r[0].context, r[0].workspace_bytes);
}

/* What the shim's NCCL captures it does not carry: no graphs. */
static void emulated_gpus(void)
{
  void *made[MOST_COMMS];
  begin_on_gpus();
  for (size_t i = 0; i < sizeof worlds / sizeof *worlds * 2 && !gave_up; i++) {
    const world *w = &worlds[i / 2];
    if (w->ranks > MOST_COMMS || w->lanes > 1) continue;
    open_comms(made, w->ranks);
    run_world(w, i % 2);
    close_comms();
  }
  for (int i = 0; i < 6 && shim.major >= 9 && !gave_up; i++) {
    open_comms(made, 2);
    run_few(i);
    close_comms();
  }
  end_on_gpus();
}

/* A call of rank 0, for which rank 1 does not come. The engine aborts the group, or what waits behind NCCL is up when
 * the communicator has ended: either way the group says what happened, and leaves NCCL alone from then on. */
static void lost_on_gpus(bool aborts, int by)
{
  const uint64_t late = ep_abort_word(EP_TIMEOUT, EP_DISPATCH, 1, by);
  void *made[MOST_COMMS];
  world w = three;
  rank r[2] = {{.w = &w, .all = r}, {.w = &w, .all = r, .number = 1}};
  cumoe_group_fault fault = {.size = sizeof fault};
  uint64_t word = 0;
  const int64_t live = shim_live();
  shim.devices = gpus = 2;
  w.ranks = 2;
  case_begin(aborts ? "the engine aborts" : "a wait is up");
  make_world(&w);
  const tensor out = tensor_new(w.dtype, w.x.rows, w.hidden);
  open_comms(made, 2);
  r[0].out = r[1].out = &out;
  join_two(r);
  const group *g;
  CHECK_OK(find_group(r[0].group, (group **)(uintptr_t)&g));
  char *const abort_word = g->arena + g->at.abort;
  shim.patience_ms = 20;
  CHECK_OK(one_call(&r[0], 0, 0));
  CHECK(cudaSetDevice(0) == cudaSuccess);
  const cudaError_t asked = cudaStreamQuery(r[0].streams[0]);
  CHECK_MSG(asked == cudaErrorNotReady, "the stream answers %d", (int)asked);
  CHECK_OK(cumoe_group_fault_read(r[0].group, &fault));
  CHECK(fault.cause == CUMOE_GROUP_ALIVE);
  if (aborts) CHECK_OK(cumoe_group_abort(r[0].group));
  shim_read(&word, abort_word, sizeof word);
  CHECK_MSG((word != 0) == aborts, "what kernels see is %#llx", (unsigned long long)word);
  close_comms();
  if (!aborts) shim_write(abort_word, &late, sizeof late);
  CHECK_OK(cumoe_group_fault_read(r[0].group, &fault));
  CHECK(fault.cause == (aborts ? CUMOE_GROUP_ABORTED : CUMOE_GROUP_TIMEOUT) && fault.about == !aborts &&
        fault.by == by);
  CHECK(fault.phase == (aborts ? CUMOE_PHASE_NONE : CUMOE_PHASE_DISPATCH));
  shim_mark();
  CHECK_STATUS(CUMOE_ERR_PEER, one_call(&r[0], 0, 1));
  CHECK_TEXT(aborts ? "rank 0 has aborted the group"
             : by   ? "rank 1 gave up: rank 1 had not sent its tokens (dispatch) in time"
                    : "rank 1 has not sent its tokens (dispatch) within 30 s");
  CHECK_MSG(!strstr(shim_trace(), "nccl"), "%s", shim_trace());
  for (int i = 0; i < 2; i++) {
    CHECK_OK(cumoe_group_destroy(r[i].group));
    free_shared(r[i].arena);
  }
  close_opened();
  end_gpus(live);
}

static void lost_ranks_on_gpus(void)
{
  lost_on_gpus(true, 0);
  lost_on_gpus(false, 0);
  lost_on_gpus(false, 1);
}

/* ---- where everything lies ---- */

typedef struct staged_pair {
  const ep_shape *s;
  const ep_staging *g;
  uint64_t from, to; /* ranks */
  uint64_t end;      /* of the pieces so far, in a message */
  int count;
  bool right;
} staged_pair;

/* By the kernels' own sums: what a rank has for another, in the array at `there`, is the message's next piece, and goes
 * to its own segment in the array at `in_arena`. */
static void next_piece(staged_pair *p, uint64_t there, uint64_t in_arena, uint64_t bytes)
{
  const ep_staging *g = p->g;
  const uint64_t base = (p->to - p->from) * g->message_bytes; /* modulo 2^64, as addresses */
  const int i = p->count++;
  p->right &= base + there + p->from * bytes == g->messages + p->to * g->message_bytes + g->pieces[i].from;
  p->right &= g->pieces[i].bytes == bytes && g->pieces[i].to == in_arena;
  p->right &= g->pieces[i].from >= p->end && g->pieces[i].from % 16 == 0;
  p->end = g->pieces[i].from + bytes;
}

static void next_tier(staged_pair *p, const ep_layout *to, const ep_layout *at, int64_t capacity)
{
  const uint64_t tokens = (uint64_t)capacity, row = (uint64_t)p->s->hidden * (uint64_t)p->s->element;
  const uint64_t slots = tokens * (uint64_t)p->s->top_k * 4;
  next_piece(p, to->lane + to->x, at->lane + at->x, tokens * row);
  next_piece(p, to->lane + to->ids, at->lane + at->ids, slots);
  next_piece(p, to->lane + to->weights, at->lane + at->weights, slots);
  next_piece(p, to->lane + to->y, at->lane + at->y, tokens * row * (uint64_t)ep_answers(p->s));
}

static void check_messages(const ep_shape *s, int32_t from, int32_t other)
{
  const ep_staging g = ep_lay_out_staging(s, from), peer = ep_lay_out_staging(s, other);
  const ep_layout at = ep_lay_out(s);
  const ep_tiers tiers = ep_lay_out_tiers(s);
  staged_pair p = {.s = s, .g = &g, .from = (uint64_t)from, .to = (uint64_t)other, .right = true};
  p.right &= g.bytes == peer.bytes && g.messages >= g.to.bases + (uint64_t)s->ranks * 8 && g.to.bases >= at.bytes;
  next_piece(&p, g.to.hello, at.hello, EP_LINE);
  next_piece(&p, g.to.lane + g.to.in, at.lane + at.in, EP_LINE);
  next_piece(&p, g.to.lane + g.to.back, at.lane + at.back, EP_LINE);
  for (int32_t t = 0; t < tiers.count; t++) {
    const ep_layout to = ep_in_tier(g.to, &g.tiers.of[t]), own = ep_in_tier(at, &tiers.of[t]);
    p.right &= to.x < g.bytes && g.tiers.of[t].tokens == tiers.of[t].tokens;
    next_tier(&p, &to, &own, tiers.of[t].tokens);
  }
  p.right &= p.count == g.count && p.end <= g.message_bytes;
  p.right &= g.bytes == g.messages + (uint64_t)s->ranks * g.message_bytes;
  /* The kernel that puts asks for the flags' lines ahead: within the arena. */
  p.right &= at.lane + g.to.back + (uint64_t)s->ranks * EP_LINE <= g.bytes && g.to.back < g.bytes;
  CHECK_MSG(p.right, "%d ranks, rank %d, message to %d", (int)s->ranks, (int)from, (int)other);
}

static void messages(void)
{
  static const int32_t ranks[] = {1, 2, 3, 16, 17, 64, 1024};
  for (size_t i = 0; i < sizeof ranks / sizeof *ranks * 4; i++) {
    const ep_shape s = {.ranks = ranks[i / 4],
                        .lanes = 1,
                        .experts = 256,
                        .top_k = 8,
                        .hidden = 7168,
                        .element = 2,
                        .exact = i / 2 % 2,
                        .capacity = i % 2 ? 1 : 4096};
    case_begin("%d ranks, %d tokens", (int)s.ranks, (int)s.capacity);
    for (int32_t r = 0; r<s.ranks; r += s.ranks> 64 ? 31 : 1)
      for (int32_t to = 0; to<s.ranks; to += s.ranks> 64 ? 31 : 1) check_messages(&s, r, to);
    case_end();
  }
}

static const test_group staged_groups[] = {
    ALONE("messages", messages, ONCE),       ALONE("answers by NCCL", answers_by_nccl, ONCE),
    ALONE("trouble", fates_of_three, ONCE),  ALONE("every call of NCCL fails", faults, ONCE),
    ALONE("versions", all_versions, ONCE),   ALONE("other communicators", other_communicators, ONCE),
    ALONE("lost bytes", torn, ONCE),         ALONE("masks", masks_by_nccl, ONCE),
    ALONE("GPUs", three_gpus, ONCE),         ALONE("a rank that does not come", absent_on_gpus, ONCE),
    ALONE("lost", lost_ranks_on_gpus, ONCE),
};

static const test_group emulated_groups[] = {ALONE("ranks by NCCL on GPUs", emulated_gpus, ONCE)};

int main(int argc, char **argv)
{
  (void)groups; /* test/ep.c runs them */
  test_begin(argc, argv);
  if (shim.emulates) {
    run_groups(NULL, emulated_groups, sizeof emulated_groups / sizeof *emulated_groups);
    return test_end();
  }
  shim_reset();
  run_groups(NULL, staged_groups, sizeof staged_groups / sizeof *staged_groups);
  return test_end();
}
