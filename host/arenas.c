/*
 * Arenas between ranks: who the ranks are, what they agree on, one step after the other, each known to have succeeded
 * on all before the next. The wires themselves: arenas_wires.c.
 */
#include "arenas.h"
#include "check.h"
#include "context.h"
#include "objects.h"
#include "../include/cumoe/ep.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Those that a call acts for: one rank, which hears of the others by all_gather, or all of them. */
typedef struct crew {
  arenas **members;
  int32_t count, ranks;
  letter *letters; /* [ranks + 1]: of all ranks, and what a single member says */
  uint64_t step;   /* taken so far */
  bool deaf;       /* all_gather failed: nobody knows what the others know */
} crew;

/* Far behind those of create. */
enum { STEP_LEAVING = 100 };

/* With the device entered: one member's part, and what it has to say. */
typedef cumoe_status step_function(arenas *a, letter *mine);

/* ---- letters ---- */

static uint64_t form_of(const crew *c)
{
  return (uint64_t)CUMOE_VERSION << 32 | (uint64_t)sizeof(letter) << 8 | c->step;
}

static letter *letter_of_member(const crew *c, int32_t member)
{
  return &c->letters[c->count == c->ranks ? member : c->ranks];
}

/* The text without the name of the call, which is that of all ranks. */
static void sign(letter *mine, cumoe_status status)
{
  const char *call, *text = cumoe_last_error();
  cumoe_stream stream;
  (void)running_call(&call, &stream);
  if (strncmp(text, call, strlen(call)) == 0) text += strlen(call) + 2;
  mine->status = status;
  mine->text[0] = 0;
  if (status != CUMOE_OK) (void)snprintf(mine->text, sizeof mine->text, "%s", text);
}

static cumoe_status check_letters(const crew *c, int32_t rank)
{
  for (int32_t r = 0; r < c->ranks; r++) {
    const letter *l = &c->letters[r];
    REQUIRE(l->form == form_of(c), CUMOE_ERR_INVALID_ARGUMENT,
            "config.all_gather: what rank %d has of rank %d is of another call, or another version of cumoe", (int)rank,
            (int)r);
    REQUIRE(l->rank == r, CUMOE_ERR_INVALID_ARGUMENT,
            "config.rank is %d on the rank that config.all_gather has at place %d", (int)l->rank, (int)r);
  }
  return CUMOE_OK;
}

static cumoe_status gather_entered(arenas *a, const letter *mine, letter *all)
{
  ON_DEVICE_RELAXED(a->context, mail_gather(a, mine, all));
}

static cumoe_status bring(arenas *a, const letter *mine, letter *all)
{
  if (a->mail.stream) return gather_entered(a, mine, all);
  const int code = a->config.all_gather(a->config.user, mine, all, sizeof *mine);
  return code ? fail(CUMOE_ERR_PEER, "config.all_gather answers %d", code) : CUMOE_OK;
}

static cumoe_status gather(crew *c)
{
  if (c->count == c->ranks) return CUMOE_OK;
  cumoe_status status = bring(c->members[0], &c->letters[c->ranks], c->letters);
  if (status == CUMOE_OK) status = check_letters(c, c->members[0]->config.rank);
  c->deaf = status != CUMOE_OK;
  return status;
}

static cumoe_status enter(arenas *a, step_function *step, letter *mine)
{
  ON_DEVICE_RELAXED(a->context, step(a, mine));
}

/* A step of all ranks: succeeds on all, or on none. */
static cumoe_status take(crew *c, step_function *step)
{
  cumoe_status own = CUMOE_OK;
  error_text text;
  c->step++;
  for (int32_t m = 0; m < c->count; m++) {
    letter *mine = letter_of_member(c, m);
    mine->form = form_of(c);
    mine->rank = c->members[m]->config.rank;
    const cumoe_status status = enter(c->members[m], step, mine);
    sign(mine, status);
    if (own == CUMOE_OK && status != CUMOE_OK) save_error(&text);
    if (own == CUMOE_OK) own = status;
  }
  const cumoe_status heard = gather(c);
  if (own != CUMOE_OK) restore_error(&text);
  TRY(own);
  TRY(heard);
  for (int32_t r = 0; r < c->ranks; r++)
    REQUIRE(c->letters[r].status == CUMOE_OK, CUMOE_ERR_PEER, "rank %d: %s: %.*s", (int)r,
            cumoe_status_name((cumoe_status)c->letters[r].status), LETTER_TEXT - 1, c->letters[r].text);
  return CUMOE_OK;
}

/* ---- who the ranks are ---- */

static uint64_t hash_of_file(const char *path)
{
  unsigned char text[64];
  uint64_t hash = 14695981039346656037u;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  const ssize_t got = file >= 0 ? read(file, text, sizeof text) : 0;
  if (file >= 0) (void)close(file);
  for (ssize_t i = 0; i < got; i++) hash = (hash ^ text[i]) * 1099511628211u;
  return got > 0 ? hash : 0;
}

/* 0: unknown. */
static uint64_t number_of_file(const char *path)
{
  struct stat facts;
  return stat(path, &facts) == 0 ? facts.st_ino : 0;
}

/* Nothing of it touches a GPU. */
static cumoe_status take_comm(arenas *a)
{
  const cumoe_arenas_config *c = &a->config;
  if (!c->comm) return CUMOE_OK;
  TRY(nccl_open(&a->nccl, c->nccl, c->comm));
  TRY(nccl_check(&a->nccl, c->rank, c->ranks, a->context->device));
  REQUIRE(c->wire != CUMOE_WIRE_WINDOW || nccl_has_windows(&a->nccl), CUMOE_ERR_NOT_SUPPORTED,
          "config.wire is CUMOE_WIRE_WINDOW, which needs NCCL %s: this is %s", say_nccl(NCCL_WINDOWS_SINCE).text,
          say_nccl(a->nccl.version).text);
  return CUMOE_OK;
}

static cumoe_status introduce(arenas *a, letter *mine)
{
  int driver = 0;
  uint64_t *facts = mine->facts;
  if (!a->mail.stream) TRY(take_comm(a));
  if (!on_cpu(a->context)) TRY_CUDA(cudaDriverGetVersion(&driver));
  facts[FACT_BYTES] = a->bytes;
  facts[FACT_RANKS] = (uint64_t)a->config.ranks;
  facts[FACT_WIRE] = (uint64_t)a->config.wire;
  facts[FACT_ON_GPU] = !on_cpu(a->context);
  facts[FACT_NCCL] = (uint64_t)a->nccl.version;
  facts[FACT_HOST] = hash_of_file("/proc/sys/kernel/random/boot_id");
  facts[FACT_PIDS] = number_of_file("/proc/self/ns/pid");
  facts[FACT_IPC] = number_of_file("/proc/self/ns/ipc");
  facts[FACT_DRIVER] = (uint64_t)driver;
  facts[FACT_PROCESS] = (uint64_t)getpid();
  return CUMOE_OK;
}

/* What all must have in common. */
static const struct {
  arena_fact fact;
  const char *name;
} common[] = {{FACT_BYTES, "bytes"},
              {FACT_RANKS, "config.ranks"},
              {FACT_WIRE, "config.wire"},
              {FACT_ON_GPU, "the device: 0 the CPU, 1 a GPU:"},
              {FACT_NCCL, "the version of NCCL"}};

/* What processes must have in common to reach each other's memory, and how it is said that they have not. */
static const struct {
  arena_fact fact;
  bool gpus_only;
  const char *words;
} near[] = {
    {FACT_HOST, false, "are on different hosts, or see no /proc/sys/kernel/random/boot_id"},
    {FACT_PIDS, false, "do not see each other's processes: their containers have pid namespaces of their own"},
    {FACT_IPC, true, "are in different IPC namespaces, between which CUDA has no handles"},
    {FACT_DRIVER, true, "have different CUDA drivers"},
};

/* Of the same letters every rank finds the same, and says so in the same words. */
static cumoe_status compare(const crew *c)
{
  for (size_t i = 0; i < sizeof common / sizeof *common; i++)
    for (int32_t r = 0; r < c->ranks; r++) {
      const uint64_t first = c->letters[0].facts[common[i].fact], other = c->letters[r].facts[common[i].fact];
      REQUIRE(first == other, CUMOE_ERR_INVALID_ARGUMENT, "%s is %llu on rank 0 and %llu on rank %d", common[i].name,
              (unsigned long long)first, (unsigned long long)other, (int)r);
    }
  return CUMOE_OK;
}

static cumoe_status check_near(const crew *c, bool on_gpus)
{
  for (size_t i = 0; i < sizeof near / sizeof *near; i++)
    for (int32_t r = 0; r < c->ranks; r++) {
      const uint64_t first = c->letters[0].facts[near[i].fact], other = c->letters[r].facts[near[i].fact];
      REQUIRE((near[i].gpus_only && !on_gpus) || (first == other && first != 0), CUMOE_ERR_NOT_SUPPORTED,
              "rank 0 and rank %d %s", (int)r, near[i].words);
    }
  return CUMOE_OK;
}

static bool in_one_process(const crew *c)
{
  for (int32_t r = 1; r < c->ranks; r++)
    if (!same_process(&c->letters[0], &c->letters[r])) return false;
  return true;
}

/* ---- making ---- */

static cumoe_status make(arenas *a, letter *mine)
{
  return a->wire->make(a, &mine->offer);
}

static cumoe_status open_others(arenas *a, letter *mine)
{
  (void)mine;
  return a->wire->open(a);
}

static cumoe_status close_others(arenas *a)
{
  cumoe_status status = CUMOE_OK;
  if (a->wire) a->wire->close(a, &status);
  return status;
}

static cumoe_status drop_own(arenas *a)
{
  cumoe_status status = CUMOE_OK;
  if (a->wire) a->wire->drop(a, &status);
  a->wire = NULL;
  a->own = NULL;
  a->descriptor = -1;
  return status;
}

/* Also where the device is lost. */
static cumoe_status give_back(arenas *a, cumoe_status (*part)(arenas *a))
{
  GIVE_BACK_RELAXED(a->context, part(a));
}

static cumoe_status nothing(arenas *a, letter *mine)
{
  (void)a, (void)mine;
  return CUMOE_OK;
}

/* Nobody frees what another may have open, nor waits for what does not end. Who has not heard whether the others have
 * succeeded, and has told them of its memory, keeps that until its context ends. */
static cumoe_status take_apart(crew *c)
{
  if (c->members[0]->mail.stuck) return CUMOE_OK;
  cumoe_status first = CUMOE_OK;
  const bool keeps = c->deaf && c->letters;
  for (int32_t m = 0; m < c->count; m++) AND_THEN(first, give_back(c->members[m], close_others));
  if (!c->deaf) AND_THEN(first, take(c, nothing));
  if (c->members[0]->mail.stuck) return first;
  for (int32_t m = 0; m < c->count; m++)
    if (!(keeps && c->members[m]->own)) AND_THEN(first, give_back(c->members[m], drop_own));
  return first;
}

static cumoe_status try_wire(crew *c, const arena_wire *wire)
{
  for (int32_t m = 0; m < c->count; m++) c->members[m]->wire = wire;
  cumoe_status status = take(c, make);
  if (status == CUMOE_OK) status = take(c, open_others);
  if (status != CUMOE_OK) AND_THEN(status, take_apart(c));
  return status;
}

static cumoe_status share(crew *c, bool on_gpus)
{
  const bool alone = in_one_process(c);
  if (!alone) TRY(check_near(c, on_gpus));
  for (int32_t m = 0; m < c->count; m++) c->members[m]->alone = alone;
  return try_wire(c, on_gpus ? &ipc_wire : alone ? &heap_wire : &file_wire);
}

/* All ranks come to the same: of the same letters, and a step that fails fails on all. */
static cumoe_status connect_ranks(crew *c)
{
  error_text before;
  save_error(&before);
  TRY(take(c, introduce));
  TRY(compare(c));
  const uint64_t *facts = c->letters[0].facts;
  const bool on_gpus = facts[FACT_ON_GPU];
  const int32_t wire = (int32_t)facts[FACT_WIRE];
  if (wire == CUMOE_WIRE_WINDOW || (wire == CUMOE_WIRE_AUTO && nccl_has_windows(&c->members[0]->nccl))) {
    const cumoe_status status = try_wire(c, &window_wire);
    if (status == CUMOE_OK || c->deaf || wire == CUMOE_WIRE_WINDOW) return status;
    log_message(CUMOE_LOG_INFO, "no windows: %s", cumoe_last_error());
    restore_error(&before);
  }
  return share(c, on_gpus);
}

/* ---- the object ---- */

static cumoe_status check_bytes(size_t bytes)
{
  const uint64_t most = UINT64_C(1) << 46;
  REQUIRE(bytes >= 1 && bytes <= most, CUMOE_ERR_INVALID_ARGUMENT, "bytes is %zu, must be 1 .. 2^46", bytes);
  return CUMOE_OK;
}

static cumoe_status take_config(const cumoe_arenas_config *from, cumoe_arenas_config *c)
{
  TRY(take_struct("config", from, c));
  REQUIRE(c->wire >= CUMOE_WIRE_AUTO && c->wire <= CUMOE_WIRE_WINDOW, CUMOE_ERR_INVALID_ARGUMENT,
          "config.wire is %d, no cumoe_wire", (int)c->wire);
  REQUIRE(c->ranks >= 1 && c->ranks <= CUMOE_MAX_RANKS, CUMOE_ERR_INVALID_ARGUMENT,
          "config.ranks is %d, must be 1 .. %d", (int)c->ranks, CUMOE_MAX_RANKS);
  REQUIRE(c->rank >= 0 && c->rank < c->ranks, CUMOE_ERR_INVALID_ARGUMENT,
          "config.rank is %d, must be 0 .. ranks - 1 = %d", (int)c->rank, (int)c->ranks - 1);
  REQUIRE(c->all_gather || c->comm, CUMOE_ERR_INVALID_ARGUMENT, "config.all_gather is null, and so is config.comm");
  REQUIRE(c->comm || !c->nccl, CUMOE_ERR_INVALID_ARGUMENT, "config.nccl is given, config.comm is null");
  REQUIRE(c->comm || c->wire != CUMOE_WIRE_WINDOW, CUMOE_ERR_INVALID_ARGUMENT,
          "config.wire is CUMOE_WIRE_WINDOW, config.comm is null");
  return check_timeout("config.timeout_ns", &c->timeout_ns);
}

static cumoe_status new_letters(int32_t ranks, letter **letters)
{
  const size_t bytes = ((size_t)ranks + 1) * sizeof **letters;
  *letters = calloc(1, bytes);
  REQUIRE(*letters, CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", bytes);
  return CUMOE_OK;
}

/* Of a context that closes: its device is entered. */
static cumoe_status end_arenas(void *object)
{
  arenas *a = object;
  cumoe_status status = close_others(a);
  AND_THEN(status, drop_own(a));
  AND_THEN(status, mail_close(a));
  free(a->letters);
  free(a);
  return status;
}

static cumoe_status end_all(struct context *context)
{
  return retire_objects(OBJECT_ARENAS, context, end_arenas);
}

/* Not connected yet, but a handle: what can lack on this rank alone is taken before others hear of it. */
static cumoe_status new_arenas(struct context *context, size_t bytes, const cumoe_arenas_config *config,
                               cumoe_arenas *made, arenas **object)
{
  const size_t ranks = (size_t)config->ranks, room = sizeof(arenas) + ranks * (sizeof(void *) + sizeof(bool));
  arenas *a = *object = calloc(1, room);
  REQUIRE(a, CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", room);
  a->context = context;
  a->config = *config;
  a->bytes = (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
  a->opened = (bool *)(a->at + ranks);
  a->descriptor = -1;
  on_close(context, CLOSE_ARENAS, end_all);
  if ((*made = publish_object(OBJECT_ARENAS, context, a))) return CUMOE_OK;
  free(a);
  return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for a handle");
}

/* One that is not connected. Where it keeps memory, or a gather got stuck, it stays, without a handle that anybody
 * knows, until the context ends: the engine has ended the communicator by then. */
static void forget(cumoe_arenas *made, arenas *a)
{
  if (!*made) return;
  if (!a->mail.stuck && !a->own) {
    (void)retire_object(*made);
    if (a->mail.stream) CUMOE_IGNORE(give_back(a, mail_close));
    free(a->letters);
    free(a);
  }
  *made = NULL;
}

/* Letters by the communicator: what is wrong with that can be told to nobody. */
static cumoe_status open_mail(arenas *a)
{
  if (a->config.all_gather || a->config.ranks == 1) return CUMOE_OK;
  TRY(take_comm(a));
  ON_DEVICE_RELAXED(a->context, mail_open(a));
}

cumoe_status cumoe_arenas_create(cumoe_context handle, size_t bytes, const cumoe_arenas_config *config,
                                 cumoe_arenas *made)
{
  begin_call(__func__);
  struct context *context;
  cumoe_arenas_config c;
  arenas *a;
  error_text text;
  REQUIRE(made, CUMOE_ERR_INVALID_ARGUMENT, "arenas is null");
  *made = NULL;
  TRY(find_context(handle, &context));
  TRY(check_bytes(bytes));
  TRY(take_config(config, &c));
  REQUIRE(!c.comm || !on_cpu(context), CUMOE_ERR_NOT_SUPPORTED, "config.comm: the CPU device has no NCCL");
  TRY(new_arenas(context, bytes, &c, made, &a));
  cumoe_status status = new_letters(c.ranks, &a->letters);
  crew alone = {.members = &a, .count = 1, .ranks = c.ranks, .letters = a->letters};
  if (status == CUMOE_OK) status = open_mail(a);
  if (status == CUMOE_OK) status = connect_ranks(&alone);
  if (status == CUMOE_OK) return CUMOE_OK;
  save_error(&text);
  forget(made, a);
  restore_error(&text);
  return status;
}

static cumoe_status connect_all(arenas **members, int32_t ranks)
{
  crew all = {.members = members, .count = ranks, .ranks = ranks};
  TRY(new_letters(ranks, &all.letters));
  for (int32_t r = 0; r < ranks; r++) members[r]->letters = all.letters;
  const cumoe_status status = connect_ranks(&all);
  for (int32_t r = 0; r < ranks; r++) members[r]->letters = NULL;
  free(all.letters);
  return status;
}

static cumoe_status check_contexts(const cumoe_context *handles, int32_t ranks)
{
  struct context *context;
  REQUIRE(handles, CUMOE_ERR_INVALID_ARGUMENT, "contexts is null");
  REQUIRE(ranks >= 1 && ranks <= CUMOE_MAX_RANKS, CUMOE_ERR_INVALID_ARGUMENT, "ranks is %d, must be 1 .. %d",
          (int)ranks, CUMOE_MAX_RANKS);
  for (int32_t r = 0; r < ranks; r++) TRY(find_context(handles[r], &context));
  return CUMOE_OK;
}

cumoe_status cumoe_arenas_create_all(const cumoe_context *contexts, int32_t ranks, size_t bytes, cumoe_arenas *made)
{
  begin_call(__func__);
  struct context *context;
  arenas *members[CUMOE_MAX_RANKS] = {0};
  cumoe_status status = CUMOE_OK;
  TRY(check_contexts(contexts, ranks));
  TRY(check_bytes(bytes));
  REQUIRE(made, CUMOE_ERR_INVALID_ARGUMENT, "arenas is null");
  memset(made, 0, (size_t)ranks * sizeof *made);
  for (int32_t r = 0; r < ranks && status == CUMOE_OK; r++) {
    const cumoe_arenas_config config = {.rank = r, .ranks = ranks};
    status = find_context(contexts[r], &context);
    if (status == CUMOE_OK) status = new_arenas(context, bytes, &config, &made[r], &members[r]);
  }
  if (status == CUMOE_OK) status = connect_all(members, ranks);
  for (int32_t r = 0; r < ranks && status != CUMOE_OK; r++) forget(&made[r], members[r]);
  return status;
}

static cumoe_status find_arenas(cumoe_arenas handle, arenas **found)
{
  void *object;
  TRY(find_object(OBJECT_ARENAS, "arenas", handle, &object));
  *found = object;
  return CUMOE_OK;
}

cumoe_status cumoe_arenas_get_info(cumoe_arenas handle, cumoe_arenas_info *info)
{
  begin_call(__func__);
  arenas *a;
  TRY(find_arenas(handle, &a));
  TRY(check_struct("info", info));
  cumoe_view_mut own = cumoe_vector_mut(a->own, CUMOE_U8, (int64_t)a->bytes);
  own.device = a->context->device;
  const cumoe_arenas_info record = {0, a->wire->wire, a->config.rank, a->config.ranks, own, a->at};
  give_struct(&record, info);
  return CUMOE_OK;
}

cumoe_status cumoe_arenas_destroy(cumoe_arenas handle)
{
  begin_call(__func__);
  arenas *a;
  if (!handle) return CUMOE_OK;
  TRY(find_arenas(handle, &a));
  if (!retire_object(handle)) return find_arenas(handle, &a);
  crew alone = {.members = &a,
                .count = 1,
                .ranks = a->config.ranks,
                .letters = a->letters,
                .step = STEP_LEAVING,
                .deaf = !a->letters};
  cumoe_status status = take_apart(&alone);
  if (a->mail.stuck) {
    (void)publish_object(OBJECT_ARENAS, a->context, a); /* as in forget */
    return status;
  }
  if (a->mail.stream) AND_THEN(status, give_back(a, mail_close));
  free(a->letters);
  free(a);
  return status;
}
