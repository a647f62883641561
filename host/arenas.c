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

static cumoe_status gather(crew *c)
{
  const cumoe_arenas_config *config = &c->members[0]->config;
  if (c->count == c->ranks || !config->all_gather) return CUMOE_OK;
  const int code = config->all_gather(config->user, &c->letters[c->ranks], c->letters, sizeof *c->letters);
  const cumoe_status status =
      code ? fail(CUMOE_ERR_PEER, "config.all_gather answers %d", code) : check_letters(c, config->rank);
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

static cumoe_status introduce(arenas *a, letter *mine)
{
  int driver = 0;
  uint64_t *facts = mine->facts;
  if (!on_cpu(a->context)) TRY_CUDA(cudaDriverGetVersion(&driver));
  facts[FACT_BYTES] = a->bytes;
  facts[FACT_RANKS] = (uint64_t)a->config.ranks;
  facts[FACT_WIRE] = (uint64_t)a->config.wire;
  facts[FACT_ON_GPU] = !on_cpu(a->context);
  facts[FACT_HOST] = hash_of_file("/proc/sys/kernel/random/boot_id");
  facts[FACT_PIDS] = number_of_file("/proc/self/ns/pid");
  facts[FACT_IPC] = number_of_file("/proc/self/ns/ipc");
  facts[FACT_DRIVER] = (uint64_t)driver;
  facts[FACT_PROCESS] = (uint64_t)getpid();
  return CUMOE_OK;
}

/* What all must have in common; the text of what must be so between processes, and on which devices. */
static const struct {
  arena_fact fact;
  const char *name, *apart;
  bool gpus_only;
} facts_in_common[] = {
    {FACT_BYTES, "bytes", NULL, false},
    {FACT_RANKS, "config.ranks", NULL, false},
    {FACT_WIRE, "config.wire", NULL, false},
    {FACT_ON_GPU, "the device: 0 the CPU, 1 a GPU:", NULL, false},
    {FACT_HOST, NULL, "are on different hosts, or see no /proc/sys/kernel/random/boot_id", false},
    {FACT_PIDS, NULL, "do not see each other's processes: their containers have pid namespaces of their own", false},
    {FACT_IPC, NULL, "are in different IPC namespaces, between which CUDA has no handles", true},
    {FACT_DRIVER, NULL, "have different CUDA drivers", true},
};

/* Of the same letters every rank finds the same, and says so in the same words. */
static cumoe_status compare(const crew *c, bool alone)
{
  const letter *first = &c->letters[0];
  for (size_t i = 0; i < sizeof facts_in_common / sizeof *facts_in_common; i++)
    for (int32_t r = 0; r < c->ranks; r++) {
      const arena_fact fact = facts_in_common[i].fact;
      const uint64_t a = first->facts[fact], b = c->letters[r].facts[fact];
      if (facts_in_common[i].name)
        REQUIRE(a == b, CUMOE_ERR_INVALID_ARGUMENT, "%s is %llu on rank 0 and %llu on rank %d", facts_in_common[i].name,
                (unsigned long long)a, (unsigned long long)b, (int)r);
      else if (!alone && (first->facts[FACT_ON_GPU] || !facts_in_common[i].gpus_only))
        REQUIRE(a == b && a != 0, CUMOE_ERR_NOT_SUPPORTED, "rank 0 and rank %d %s", (int)r, facts_in_common[i].apart);
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

/* Nobody frees what another may have open. */
static cumoe_status take_apart(crew *c)
{
  cumoe_status first = CUMOE_OK, status;
  for (int32_t m = 0; m < c->count; m++)
    if ((status = give_back(c->members[m], close_others)) != CUMOE_OK && first == CUMOE_OK) first = status;
  if (!c->deaf && (status = take(c, nothing)) != CUMOE_OK && first == CUMOE_OK) first = status;
  for (int32_t m = 0; m < c->count; m++)
    if ((status = give_back(c->members[m], drop_own)) != CUMOE_OK && first == CUMOE_OK) first = status;
  return first;
}

static cumoe_status try_wire(crew *c, const arena_wire *wire)
{
  error_text text;
  for (int32_t m = 0; m < c->count; m++) c->members[m]->wire = wire;
  cumoe_status status = take(c, make);
  if (status == CUMOE_OK) status = take(c, open_others);
  if (status == CUMOE_OK) return CUMOE_OK;
  save_error(&text);
  CUMOE_IGNORE(take_apart(c));
  restore_error(&text);
  return status;
}

static cumoe_status connect_ranks(crew *c)
{
  TRY(take(c, introduce));
  const bool alone = in_one_process(c), on_gpus = c->letters[0].facts[FACT_ON_GPU];
  TRY(compare(c, alone));
  for (int32_t m = 0; m < c->count; m++) c->members[m]->alone = alone;
  return try_wire(c, on_gpus ? &ipc_wire : alone ? &heap_wire : &file_wire);
}

/* ---- the object ---- */

static cumoe_status check_bytes(size_t bytes)
{
  const uint64_t most = UINT64_C(1) << 46;
  REQUIRE(bytes >= 1 && bytes <= most, CUMOE_ERR_INVALID_ARGUMENT, "bytes is %zu, must be 1 .. 2^46", bytes);
  return CUMOE_OK;
}

static cumoe_status check_config(const cumoe_arenas_config *c)
{
  REQUIRE(c->wire == CUMOE_WIRE_AUTO || c->wire == CUMOE_WIRE_SHARED, CUMOE_ERR_INVALID_ARGUMENT,
          "config.wire is %d, no cumoe_wire", (int)c->wire);
  REQUIRE(c->ranks >= 1 && c->ranks <= CUMOE_MAX_RANKS, CUMOE_ERR_INVALID_ARGUMENT,
          "config.ranks is %d, must be 1 .. %d", (int)c->ranks, CUMOE_MAX_RANKS);
  REQUIRE(c->rank >= 0 && c->rank < c->ranks, CUMOE_ERR_INVALID_ARGUMENT,
          "config.rank is %d, must be 0 .. ranks - 1 = %d", (int)c->rank, (int)c->ranks - 1);
  REQUIRE(c->all_gather, CUMOE_ERR_INVALID_ARGUMENT, "config.all_gather is null");
  return CUMOE_OK;
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
  const cumoe_status closed = close_others(a), dropped = drop_own(a);
  free(a->letters);
  free(a);
  return closed != CUMOE_OK ? closed : dropped;
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

/* One that is not connected, or not any more. */
static void forget(cumoe_arenas *made, arenas *a)
{
  if (!*made) return;
  (void)retire_object(*made);
  *made = NULL;
  free(a->letters);
  free(a);
}

cumoe_status cumoe_arenas_create(cumoe_context handle, size_t bytes, const cumoe_arenas_config *config,
                                 cumoe_arenas *made)
{
  begin_call(__func__);
  struct context *context;
  cumoe_arenas_config c;
  arenas *a;
  REQUIRE(made, CUMOE_ERR_INVALID_ARGUMENT, "arenas is null");
  *made = NULL;
  TRY(find_context(handle, &context));
  TRY(check_bytes(bytes));
  TRY(take_struct("config", config, &c));
  TRY(check_config(&c));
  TRY(new_arenas(context, bytes, &c, made, &a));
  cumoe_status status = new_letters(c.ranks, &a->letters);
  crew alone = {.members = &a, .count = 1, .ranks = c.ranks, .letters = a->letters};
  if (status == CUMOE_OK) status = connect_ranks(&alone);
  if (status != CUMOE_OK) forget(made, a);
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
  return check_process((*found)->context);
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
  const cumoe_status status = take_apart(&alone);
  free(a->letters);
  free(a);
  return status;
}
