/*
 * A group of one rank on a GPU, over the shim: the three calls launch what cumoe_ep_forward launches, round by round,
 * and the waits by themselves; they can be captured each by itself; whatever fails in them is answered and leaves
 * nothing.
 */
#include <stdio.h>
#include <string.h>

#include "shim/layer.h"
#include "../host/ep.h"

enum { TOKENS = 7, CAPACITY = 4, ROUNDS = 2, PARTS_OF_CALL = 3 };

typedef struct member {
  world w;
  cumoe_group group;
  void *arenas[1], *comms[1];
  cumoe_view_mut arena;
  cumoe_group_config config; /* flags; max_tokens 0: CAPACITY */
  cumoe_moe_args layer;
  cumoe_ep_args args;
} member;

typedef cumoe_status ep_function(cumoe_group group, cumoe_weights weights, const cumoe_ep_args *args,
                                 cumoe_stream stream);
static ep_function *const parts[PARTS_OF_CALL] = {cumoe_ep_dispatch, cumoe_ep_experts, cumoe_ep_combine};

/* A layer, and an arena. */
static void prepare(member *m)
{
  size_t bytes = 0;
  shim_reset();
  m->w.next = SHIM_LENT;
  small_layer(&m->w);
  OWN(cudaSetDevice(1));
  const bool by_nccl = m->config.flags & CUMOE_GROUP_NCCL;
  const int device = 1;
  if (by_nccl) shim_comms_open(m->comms, 1, &device);
  m->config = (cumoe_group_config){.size = sizeof m->config,
                                   .flags = m->config.flags,
                                   .ranks = 1,
                                   .max_tokens = m->config.max_tokens ? m->config.max_tokens : CAPACITY,
                                   .arenas = by_nccl ? NULL : m->arenas,
                                   .comm = m->comms[0]};
  CHECK_OK(cumoe_ep_arena(m->w.plan, &m->config, &bytes));
  OWN(cudaMalloc(&m->arenas[0], bytes));
  m->arena = cumoe_vector_mut(m->arenas[0], CUMOE_U8, (int64_t)bytes);
}

static cumoe_status enter(member *m)
{
  shim_pause(true);
  CHECK_OK(cumoe_fill(m->w.context, m->arena, 0, NULL));
  CHECK_OK(cumoe_synchronize(m->w.context, NULL));
  shim_pause(false);
  return cumoe_group_create(m->w.context, m->w.plan, &m->config, m->arena, &m->group);
}

static void join(member *m)
{
  const cumoe_moe_desc d = describe(CUMOE_BF16);
  size_t bytes = 0;
  prepare(m);
  CHECK_OK(enter(m));
  CHECK_OK(cumoe_ep_workspace(m->group, &bytes));
  m->layer = arguments(&m->w, &d, TOKENS);
  m->layer.ids = m->layer.weights = (cumoe_view){0};
  m->layer.logits = lend_in(&m->w, CUMOE_F32, TOKENS, EXPERTS);
  m->layer.workspace = lend(&m->w, CUMOE_U8, 1, (int64_t)bytes);
  m->args = (cumoe_ep_args){.size = sizeof m->args,
                            .tokens_max = CAPACITY * ROUNDS,
                            .placement = lend_in(&m->w, CUMOE_I32, EXPERTS, 1),
                            .layer = &m->layer};
}

static void leave(member *m)
{
  CHECK_OK(cumoe_group_destroy(m->group));
  if (m->comms[0]) shim_comms_close(m->comms);
  OWN(cudaFree(m->arenas[0]));
  CHECK_OK(cumoe_context_destroy(m->w.context));
  OWN(cudaStreamDestroy(m->w.stream));
}

static cumoe_status in_parts(member *m)
{
  for (m->args.round = 0; m->args.round < ROUNDS; m->args.round++)
    for (int part = 0; part < PARTS_OF_CALL; part++) STEP(parts[part](m->group, m->w.weights, &m->args, m->w.stream));
  m->args.round = 0;
  return CUMOE_OK;
}

static void check_last_round(const member *m)
{
  const gate_args *gate = shim_last_args("_gate_");
  CHECK(gate && gate->tokens.count == TOKENS - CAPACITY);
  CHECK(gate && gate->logits == (const float *)m->layer.logits.data + CAPACITY * EXPERTS);
}

static const char *next_line(const char *line)
{
  line += strcspn(line, "\n");
  return line + (*line == '\n');
}

/* Of a launch: it may start before the grid ahead has ended. */
static bool is_early(const char *line)
{
  const char *attributes = strstr(line, "attrs ");
  return attributes && attributes[6] == '1';
}

/* The stages' launches; returns how many there are of the exchange, whose kernels the shim does not know. */
static int64_t stages_of(char *to, const char *trace)
{
  int64_t moves = 0;
  for (const char *line = trace; *line; line = next_line(line)) {
    const size_t length = strcspn(line, "\n") + 1;
    const bool is_move = strncmp(line, "cuLaunchKernelEx cumoe_ep_", 26) == 0;
    moves += is_move;
    if (!is_move && strncmp(line, "cuLaunchKernelEx", 16) == 0) memcpy(to, line, length), to += length;
  }
  *to = 0;
  return moves;
}

static void launches(void)
{
  static char whole[1 << 16], parted[1 << 16];
  member m = {0};
  case_begin("the same launches");
  join(&m);
  shim_mark();
  CHECK_OK(cumoe_ep_forward(m.group, m.w.weights, &m.args, m.w.stream));
  CHECK(shim_calls(SHIM_LAUNCH) >= 6 * ROUNDS && shim_calls(SHIM_ALLOC | SHIM_SYNC | SHIM_QUERY) == 0);
  check_last_round(&m);
  CHECK(strlen(shim_trace()) < sizeof whole && stages_of(whole, shim_trace()) == 3 * ROUNDS);
  shim_mark();
  CHECK_OK(in_parts(&m));
  CHECK(strlen(shim_trace()) < sizeof parted && stages_of(parted, shim_trace()) == 4 * ROUNDS);
  CHECK_MSG(strcmp(whole, parted) == 0, "%s\nand\n%s", whole, parted);
  check_last_round(&m);
  leave(&m);
  case_end();
}

static void captures(void)
{
  member m = {0};
  case_begin("captured one by one");
  join(&m);
  for (int part = 0; part < PARTS_OF_CALL; part++) {
    cumoe_graph graph = NULL;
    CHECK_OK(cumoe_graph_begin(m.w.context, m.w.stream));
    CHECK_OK(parts[part](m.group, m.w.weights, &m.args, m.w.stream));
    CHECK_OK(cumoe_graph_end(m.w.context, m.w.stream, &graph));
    CHECK_OK(cumoe_graph_launch(m.w.context, graph, m.w.stream));
    CHECK_OK(cumoe_graph_destroy(m.w.context, graph));
  }
  leave(&m);
  case_end();
}

static cumoe_status come_and_go(member *m)
{
  const cumoe_status status = enter(m), left = cumoe_group_destroy(m->group);
  return status != CUMOE_OK ? status : left;
}

/* Of CUDA or of the heap: the status says so, the text names the call, and nothing is left. */
static void fail_each(member *m, cumoe_status (*act)(member *m), shim_channel channel)
{
  bool failed = true;
  CHECK_OK(act(m)); /* what is made once */
  const int64_t live = shim_live(), heap = shim_heap();
  for (int64_t n = 1; failed; n++) {
    shim_fail(channel, n, false, cudaErrorInvalidValue);
    const cumoe_status status = act(m);
    failed = shim_failed() != NULL;
    const char *what = failed ? shim_failed() : "none";
    const bool matters = failed && strcmp(what, "cudaThreadExchangeStreamCaptureMode") != 0; /* beside a capture only */
    CHECK_MSG((status != CUMOE_OK) == matters, "call %d, %s: %s", (int)n, what, cumoe_status_name(status));
    CHECK(!matters || strstr(cumoe_last_error(), "cumoe_") == cumoe_last_error());
    shim_heal();
    m->args.round = 0;
    CHECK_MSG(shim_live() == live && shim_heap() == heap, "call %d", (int)n);
  }
}

static void faults(void)
{
  member m = {0};
  case_begin("every call of an exchange fails");
  join(&m);
  fail_each(&m, in_parts, SHIM_CUDA);
  cumoe_group_fault fault = {.size = sizeof fault};
  CHECK_OK(cumoe_group_fault_read(m.group, &fault));
  CHECK(fault.cause == CUMOE_GROUP_FAILED && fault.by == 0);
  leave(&m);
  case_end();
  m = (member){0};
  case_begin("every call of create and destroy fails");
  prepare(&m);
  fail_each(&m, come_and_go, SHIM_CUDA);
  fail_each(&m, come_and_go, SHIM_HEAP);
  m.group = NULL;
  leave(&m);
  case_end();
}

/* Put, answer and sum, and of tokens that the device counts, by dedup, a grid more a round each. */
static void grids(void)
{
  static char stages[1 << 16];
  for (int i = 0; i < 4; i++) {
    member m = {.config.flags = i % 2 ? CUMOE_GROUP_DEDUP : 0};
    case_begin("grids besides, %d", i);
    join(&m);
    if (i / 2) m.layer.device_tokens = lend_in(&m.w, CUMOE_I32, 1, 1);
    m.layer.counts_out = lend(&m.w, CUMOE_I32, 1, EXPERTS);
    shim_mark();
    CHECK_OK(cumoe_ep_forward(m.group, m.w.weights, &m.args, m.w.stream));
    CHECK(strlen(shim_trace()) < sizeof stages && stages_of(stages, shim_trace()) == (3 + i / 2 + i % 2) * ROUNDS);
    const gate_args *gate = shim_last_args("_gate_");
    CHECK(gate && (gate->tokens.device != NULL) == (i / 2 != 0));
    CHECK(gate && (i / 2 == 0 || gate->tokens.device != m.layer.device_tokens.data));
    leave(&m);
    case_end();
  }
}

/* One exchange takes the caller's count as it is. */
static void one_round(void)
{
  static char stages[1 << 16];
  member m = {0};
  case_begin("one round");
  join(&m);
  m.layer.x.rows = m.layer.logits.rows = m.layer.out.rows = m.args.tokens_max = CAPACITY;
  m.layer.residual = (cumoe_view){0};
  m.layer.device_tokens = lend_in(&m.w, CUMOE_I32, 1, 1);
  shim_mark();
  CHECK_OK(cumoe_ep_forward(m.group, m.w.weights, &m.args, m.w.stream));
  CHECK(strlen(shim_trace()) < sizeof stages && stages_of(stages, shim_trace()) == 3);
  const gate_args *gate = shim_last_args("_gate_");
  CHECK(gate && gate->tokens.device == m.layer.device_tokens.data);
  leave(&m);
  case_end();
}

static bool launched(const char *words)
{
  return strstr(shim_trace(), words) != NULL;
}

/* One grid makes what few tokens' experts answer, and stores it where it is wanted; of calls by themselves, which end
 * in between, two do. */
static void few_answers(void)
{
  for (int parted = 0; parted < 2; parted++) {
    member m = {0};
    case_begin("few tokens answer by themselves, %d", parted);
    join(&m);
    for (int32_t i = 0; i < cumoe_variant_count(); i++) {
      cumoe_variant_info info = {.size = sizeof info};
      CHECK_OK(cumoe_variant_get(m.w.context, i, &info));
      if (info.usable && strstr(info.name, "cumoe_few_up_sm90_few_bf16_bf16_bf16_none_K_32x"))
        CHECK_OK(cumoe_variant_force(m.w.context, i));
    }
    shim_mark();
    CHECK_OK(parted ? in_parts(&m) : cumoe_ep_forward(m.group, m.w.weights, &m.args, m.w.stream));
    const bool there = strstr(cumoe_architectures(), "90a") != NULL;
    CHECK(launched("cumoe_ep_few_bf16") == (there && !parted) && launched("cumoe_few_up_") == (there && parted));
    CHECK(launched("cumoe_ep_return_bf16") == !there && launched("cumoe_ep_finish_bf16_bf16"));
    leave(&m);
    case_end();
  }
}

/* Put is the gate, unless that has rules, or ranks are counted in between; answers come from the shard's combine; of
 * few tokens one grid waits for them and adds them up, which else a combine does. */
static void merged(void)
{
  for (int i = 0; i < 6; i++) {
    static const uint32_t ways[] = {0, CUMOE_GROUP_DEDUP, CUMOE_GROUP_EXACT};
    member m = {.config.flags = ways[i % 3]};
    const bool rules = i / 3, dedup = i % 3 == 1, exact = i % 3 == 2;
    case_begin("grids that do others' work, %d", i);
    join(&m);
    if (rules) m.layer.expert_scale = lend_in(&m.w, CUMOE_F32, 1, EXPERTS);
    shim_mark();
    CHECK_OK(cumoe_ep_forward(m.group, m.w.weights, &m.args, m.w.stream));
    CHECK(launched("cumoe_ep_gate_put") == (!rules && !dedup) && launched("cumoe_gate_") == (rules || dedup));
    CHECK(launched("cumoe_ep_return_bf16") && !launched("cumoe_ep_answer"));
    CHECK(launched("cumoe_ep_finish_bf16_bf16") == !exact && launched("cumoe_combine_") == exact);
    leave(&m);
    case_end();
  }
}

/* ---- aside ---- */

/* As a group of more ranks has it, each on its GPU; sums go as rows. */
static void join_aside(member *m, bool own)
{
  enum { ROOM = 40 };
  group *g;
  m->config.max_tokens = ROOM;
  join(m);
  m->args.tokens_max = ROOM;
  CHECK_OK(find_group(m->group, &g));
  OWN(cudaStreamCreateWithFlags(&g->side[0], cudaStreamNonBlocking));
  OWN(cudaEventCreateWithFlags(&g->turn[0], cudaEventDisableTiming));
  g->aside_tokens = 1;
  g->own_rows = own ? 0 : INT64_MAX;
  size_t bytes = 0;
  CHECK_OK(cumoe_ep_workspace(m->group, &bytes));
  m->layer.workspace = lend(&m->w, CUMOE_U8, 1, (int64_t)bytes);
}

/* A letter a launch, a capital one if it may start before the grid ahead has ended; "/": a stream behind the other. */
static void say_launches(char *to, const char *trace)
{
  static const struct {
    const char *name;
    char letter;
  } known[] = {
      {"ep_put ", 'p'}, {"ep_gate_put", 'g'}, {"ep_wait_tokens", 'w'}, {"ep_take_ids", 't'}, {"map_", 'm'},
      {"up_", 'u'},     {"down_", 'd'},       {"ep_return", 'r'},      {"combine_", 'c'},    {"ep_wait_answers", 'a'}};
  for (const char *line = trace; *line; line = next_line(line)) {
    const char *name = line + strlen("cuLaunchKernelEx cumoe_");
    if (strncmp(line, "cudaStreamWaitEvent", 19) == 0) *to++ = '/';
    if (strncmp(line, "cuLaunchKernelEx cumoe_", 23) != 0) continue;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
      if (strncmp(name, known[i].name, strlen(known[i].name)) == 0)
        *to++ = (char)(known[i].letter - (is_early(line) ? 'a' - 'A' : 0));
  }
  *to = 0;
}

/* What is behind two streams starts late; own tokens' down early, ahead of sums. */
static void launches_aside(void)
{
  static const char *const want[] = {"/pGWTMWUD/r/aC", "/pGM/wTMU/wUD/Dr/DCr/aC"};
  for (int i = 0; i < 2; i++) {
    char order[256];
    member m = {0};
    case_begin("rows and sums aside, %d", i);
    join_aside(&m, i == 1);
    shim_mark();
    CHECK_OK(cumoe_ep_forward(m.group, m.w.weights, &m.args, m.w.stream));
    CHECK(shim_calls(SHIM_ALLOC | SHIM_SYNC | SHIM_QUERY) == 0);
    say_launches(order, shim_trace());
    CHECK_MSG(strcmp(order, want[i]) == 0, "%s, not %s", order, want[i]);
    leave(&m);
    case_end();
  }
}

static cumoe_status call_aside(member *m)
{
  return cumoe_ep_forward(m->group, m->w.weights, &m->args, m->w.stream);
}

static void faults_aside(void)
{
  member m = {0};
  cumoe_graph graph = NULL;
  case_begin("captured, and every call of it fails");
  join_aside(&m, true);
  CHECK_OK(cumoe_graph_begin(m.w.context, m.w.stream));
  CHECK_OK(call_aside(&m));
  CHECK_OK(cumoe_graph_end(m.w.context, m.w.stream, &graph));
  CHECK_OK(cumoe_graph_launch(m.w.context, graph, m.w.stream));
  CHECK_OK(cumoe_graph_destroy(m.w.context, graph));
  fail_each(&m, call_aside, SHIM_CUDA);
  leave(&m);
  case_end();
}

/* ---- by NCCL ---- */

/* Moves between ranks, "m", or "M" for one that may start before the grid ahead has ended, and groups of NCCL's calls,
 * "n", in their order; the layer's stages are left out. */
static void order_of(char *to, const char *trace)
{
  for (const char *line = trace; *line; line = next_line(line)) {
    if (strncmp(line, "cuLaunchKernelEx cumoe_ep_", 26) == 0) *to++ = is_early(line) ? 'M' : 'm';
    if (strncmp(line, "ncclGroupEnd", 12) == 0) *to++ = 'n';
  }
  *to = 0;
}

static void launches_by_nccl(void)
{
  static char order[1 << 16];
  for (int i = 0; i < 2; i++) {
    member m = {.config.flags = CUMOE_GROUP_NCCL | (i ? CUMOE_GROUP_EXACT : 0)};
    case_begin("%s", i ? "in parts" : "in one call");
    join(&m);
    shim_mark();
    CHECK_OK(i ? in_parts(&m) : cumoe_ep_forward(m.group, m.w.weights, &m.args, m.w.stream));
    CHECK(shim_calls(SHIM_ALLOC | SHIM_SYNC | SHIM_QUERY) == 0);
    order_of(order, shim_trace());
    CHECK_MSG(strcmp(order, "MnmMnmMnmMnm") == 0, "%s", order);
    check_last_round(&m);
    leave(&m);
    case_end();
  }
}

static void captures_by_nccl(void)
{
  member m = {.config.flags = CUMOE_GROUP_NCCL};
  case_begin("captured");
  join(&m);
  cumoe_graph graph = NULL;
  CHECK_OK(cumoe_graph_begin(m.w.context, m.w.stream));
  CHECK_OK(cumoe_ep_forward(m.group, m.w.weights, &m.args, m.w.stream));
  CHECK_OK(cumoe_graph_end(m.w.context, m.w.stream, &graph));
  CHECK_OK(cumoe_graph_launch(m.w.context, graph, m.w.stream));
  CHECK_OK(cumoe_graph_destroy(m.w.context, graph));
  leave(&m);
  case_end();
}

static cumoe_status live(member *m)
{
  cumoe_status status = enter(m);
  if (status == CUMOE_OK) status = in_parts(m);
  const cumoe_status left = cumoe_group_destroy(m->group);
  return status != CUMOE_OK ? status : left;
}

static void faults_by_nccl(void)
{
  member m = {.config.flags = CUMOE_GROUP_NCCL};
  case_begin("every call of a group's life fails");
  join(&m);
  CHECK_OK(cumoe_group_destroy(m.group));
  fail_each(&m, live, SHIM_CUDA);
  fail_each(&m, live, SHIM_LIBRARY);
  fail_each(&m, live, SHIM_HEAP);
  m.group = NULL;
  leave(&m);
  case_end();
}

/* Once a send has failed this rank is out of step: it says so, and sends nothing more. */
static void out_of_step(void)
{
  member m = {.config.flags = CUMOE_GROUP_NCCL};
  cumoe_group_fault fault = {.size = sizeof fault};
  case_begin("out of step");
  join(&m);
  shim_fail(SHIM_LIBRARY, 1, false, cudaErrorInvalidValue);
  CHECK_STATUS(CUMOE_ERR_CUDA, cumoe_ep_forward(m.group, m.w.weights, &m.args, m.w.stream));
  CHECK_TEXT("ncclGroupStart: 1: an error of the shim's NCCL");
  shim_heal();
  shim_mark();
  CHECK_STATUS(CUMOE_ERR_PEER, cumoe_ep_forward(m.group, m.w.weights, &m.args, m.w.stream));
  CHECK_TEXT("rank 0 gave up: a call of its own failed before it had sent its tokens");
  CHECK(!strstr(shim_trace(), "nccl"));
  CHECK_OK(cumoe_group_fault_read(m.group, &fault));
  CHECK(fault.cause == CUMOE_GROUP_FAILED && fault.phase == CUMOE_PHASE_DISPATCH && fault.by == 0);
  leave(&m);
  case_end();
}

/* Masks are refused as on the CPU device: here nobody else is there. */
static void masks(void)
{
  member m = {0};
  const uint64_t alone = 1, nobody = 0;
  case_begin("masks");
  join(&m);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_set_active(m.group, &alone));
  CHECK_TEXT("active leaves out no rank");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_set_active(m.group, &nobody));
  CHECK_TEXT("active leaves out rank 0");
  group *g;
  CHECK_OK(find_group(m.group, &g)); /* as if it were one of more ranks: a word of the mask is full at 64 */
  const uint64_t all[] = {UINT64_MAX, 2}, here = g->ways.active[0];
  g->shape.ranks = 64, g->ways.active[0] = UINT64_MAX;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_set_active(m.group, all));
  CHECK_TEXT("active leaves out no rank");
  g->shape.ranks = 65;
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_group_set_active(m.group, all));
  CHECK_TEXT("active[1] is 0x2, has a rank past");
  g->shape.ranks = 1, g->ways.active[0] = here;
  leave(&m);
  case_end();
}

/* What kernels read while they wait: on the device, set without a wait for the caller's streams. */
static void timeouts(void)
{
  member m = {0};
  group *g;
  uint64_t word = 0;
  case_begin("how long it waits");
  join(&m);
  CHECK_OK(find_group(m.group, &g));
  CHECK_OK(wire_load(g, g->at.timeout, &word));
  CHECK(word == UINT64_C(30000000000));
  CHECK_OK(cumoe_group_set_timeout(m.group, 12345));
  CHECK_OK(wire_load(g, g->at.timeout, &word));
  CHECK(word == 12345);
  leave(&m);
  case_end();
}

static const test_group groups[] = {
    ALONE("launches", launches, ONCE),
    ALONE("captures", captures, ONCE),
    ALONE("faults", faults, ONCE),
    ALONE("grids", grids, ONCE),
    ALONE("one round", one_round, ONCE),
    ALONE("merged", merged, ONCE),
    ALONE("few answers", few_answers, ONCE),
    ALONE("masks", masks, ONCE),
    ALONE("timeouts", timeouts, ONCE),
    ALONE("launches aside", launches_aside, ONCE),
    ALONE("faults aside", faults_aside, ONCE),
    ALONE("launches by NCCL", launches_by_nccl, ONCE),
    ALONE("captures by NCCL", captures_by_nccl, ONCE),
    ALONE("faults by NCCL", faults_by_nccl, ONCE),
    ALONE("out of step", out_of_step, ONCE),
};
TEST_MAIN(groups)
