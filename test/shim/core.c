/* The shim's state: the record of calls, the plan of faults, the live objects. */
#include "core.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

shim_machine shim;
_Thread_local thread_state thread;
struct CUctx_st primaries[MAX_DEVICES] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct {
  struct {
    int64_t nth, seen;
    bool armed, forever;
    cudaError_t error;
  } plan[SHIM_CHANNELS];
  const char *failed;
  int64_t faults, implicit, unknown;
  bool paused;
  cudaError_t lost[MAX_DEVICES];
  int64_t calls[8]; /* by bit of the kinds */
  char *text;
  size_t length, room;
  object *objects;
  int64_t live;
} state;

/* ---- machine ---- */

void shim_reset(void)
{
  shim = (shim_machine){.devices = 2,
                        .major = 9,
                        .driver = 13000,
                        .memory = (size_t)1 << 30,
                        .smem = 227 * 1024,
                        .processors = 132,
                        .max_threads = 1024,
                        .nccl = 22907,
                        .patience_ms = 60000};
  shim_heal();
  shim_drop_context();
  shim_mark();
}

cudaError_t shim_last_error(void)
{
  return thread.last;
}

enum cudaStreamCaptureMode shim_capture_mode(void)
{
  return thread.mode;
}

int shim_current_device(void)
{
  return thread.depth ? thread.stack[thread.depth - 1]->device : -1;
}

int current_device(void)
{
  return thread.depth ? thread.stack[thread.depth - 1]->device : 0;
}

void shim_engine_context(int device)
{
  static struct CUctx_st engines[MAX_DEVICES];
  engines[device].device = device;
  thread.depth = 1;
  thread.stack[0] = &engines[device];
}

void shim_drop_context(void)
{
  thread.depth = 0;
}

/* ---- the trace ---- */

void note_text(const char *text)
{
  const size_t length = strlen(text);
  if (state.length + length + 2 > state.room) {
    state.room = 2 * (state.room + length + 1024);
    state.text = __real_realloc(state.text, state.room);
  }
  memcpy(state.text + state.length, text, length);
  state.length += length;
  memcpy(state.text + state.length++, "\n", 2);
}

void shim_note(const char *name)
{
  char text[128];
  snprintf(text, sizeof text, "%s @%d", name, shim_current_device());
  pthread_mutex_lock(&lock);
  if (!state.paused) note_text(text);
  pthread_mutex_unlock(&lock);
}

void shim_mark(void)
{
  pthread_mutex_lock(&lock);
  state.length = 0;
  memset(state.calls, 0, sizeof state.calls);
  note_text("");
  state.length = 0;
  state.text[0] = 0;
  pthread_mutex_unlock(&lock);
}

const char *shim_trace(void)
{
  return state.text;
}

int64_t shim_calls(unsigned kinds)
{
  int64_t sum = 0;
  if (kinds == SHIM_ALL) return state.calls[7];
  for (int i = 0; i < 6; i++)
    if (kinds & 1u << i) sum += state.calls[i];
  return sum;
}

int64_t shim_implicit(void)
{
  return state.implicit;
}

int64_t shim_unknown(void)
{
  return state.unknown;
}

/* ---- faults ---- */

bool shim_sticky(cudaError_t error)
{
  return error == cudaErrorIllegalAddress || error == cudaErrorLaunchFailure || error == cudaErrorECCUncorrectable;
}

void shim_fail(shim_channel channel, int64_t nth, bool forever, cudaError_t error)
{
  pthread_mutex_lock(&lock);
  state.plan[channel].nth = nth;
  state.plan[channel].seen = 0;
  state.plan[channel].armed = true;
  state.plan[channel].forever = forever;
  state.plan[channel].error = error;
  state.failed = NULL;
  pthread_mutex_unlock(&lock);
}

int64_t shim_seen(shim_channel channel)
{
  return state.plan[channel].seen;
}

const char *shim_failed(void)
{
  return state.failed;
}

int64_t shim_faults(void)
{
  return state.faults;
}

void shim_heal(void)
{
  pthread_mutex_lock(&lock);
  memset(state.plan, 0, sizeof state.plan);
  memset(state.lost, 0, sizeof state.lost);
  thread.last = cudaSuccess;
  thread.mode = cudaStreamCaptureModeGlobal;
  pthread_mutex_unlock(&lock);
}

/* With the lock held: whether this call of the channel is to fail. */
static bool is_planned(shim_channel channel, const char *name)
{
  if (!state.plan[channel].armed || state.paused) return false;
  const int64_t seen = ++state.plan[channel].seen;
  if (seen != state.plan[channel].nth && !(state.plan[channel].forever && seen > state.plan[channel].nth)) return false;
  if (state.failed == NULL) state.failed = name;
  state.faults++;
  return true;
}

void shim_pause(bool on)
{
  pthread_mutex_lock(&lock);
  state.paused = on;
  pthread_mutex_unlock(&lock);
}

int shim_planned(shim_channel channel, const char *name)
{
  pthread_mutex_lock(&lock);
  const int error = is_planned(channel, name) ? (int)state.plan[channel].error : 0;
  pthread_mutex_unlock(&lock);
  return error;
}

bool shim_heap_fails(shim_channel channel, const char *name)
{
  return shim_planned(channel, name) != 0;
}

static cudaError_t needs_context(void)
{
  if (thread.depth == 0) {
    state.implicit++;
    thread.stack[thread.depth++] = &primaries[0];
  }
  return state.lost[current_device()];
}

static cudaError_t why_not(const char *name, unsigned kinds)
{
  if (kinds & SHIM_FAULTLESS) return cudaSuccess;
  if (shim.driver == 0) return cudaErrorInsufficientDriver;
  if (is_planned(SHIM_CUDA, name)) {
    const cudaError_t error = state.plan[SHIM_CUDA].error;
    if (shim_sticky(error)) state.lost[current_device()] = error;
    return error;
  }
  if (kinds & SHIM_CONTEXT) {
    const cudaError_t lost = needs_context();
    if (lost != cudaSuccess) return lost;
  }
  if (kinds & SHIM_UNSAFE && capture_forbids()) {
    invalidate_captures();
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

static void count_call(unsigned kinds)
{
  state.calls[7]++;
  for (int i = 0; i < 6; i++)
    if (kinds & 1u << i) state.calls[i]++;
}

/* Adds a word to a text; most of a trace is words, and a sanitizer's printf is slow. */
static size_t add_word(char *text, size_t used, size_t room, const char *word)
{
  size_t length = strlen(word);
  if (length > room - 1 - used) length = room - 1 - used;
  memcpy(text + used, word, length);
  text[used + length] = 0;
  return used + length;
}

static size_t add_formatted(char *text, size_t used, size_t room, const char *format, va_list list)
{
  if (strcmp(format, "%s") == 0) return add_word(text, used, room, va_arg(list, const char *));
  const int length = vsnprintf(text + used, room - used, format, list);
  return used + (size_t)length < room ? used + (size_t)length : room - 1;
}

cudaError_t shim_begin(const char *name, unsigned kinds, const char *format, ...)
{
  const int current = shim_current_device(); /* a digit, or -1 */
  const char device[3] = {current < 0 ? '-' : (char)('0' + current), current < 0 ? '1' : 0, 0};
  char text[320];
  pthread_mutex_lock(&lock);
  if (!state.paused) count_call(kinds);
  size_t used = add_word(text, add_word(text, 0, sizeof text, name), sizeof text, " ");
  va_list list;
  va_start(list, format);
  used = add_formatted(text, used, sizeof text, format, list);
  va_end(list);
  add_word(text, add_word(text, used, sizeof text, " @"), sizeof text, device);
  if (!state.paused) note_text(text);
  const cudaError_t error = why_not(name, kinds);
  if (error != cudaSuccess && !state.paused) note_text("  fails");
  if (kinds & SHIM_SYNC && is_stuck(current_device())) note_text("  waits for ever");
  return error;
}

cudaError_t shim_end(cudaError_t error)
{
  if (error != cudaSuccess) thread.last = error;
  pthread_mutex_unlock(&lock);
  return error;
}

void shim_unlock(void)
{
  pthread_mutex_unlock(&lock);
}

void shim_lock(void)
{
  pthread_mutex_lock(&lock);
}

CUresult shim_end_driver(cudaError_t error)
{
  pthread_mutex_unlock(&lock);
  return (CUresult)error;
}

/* ---- objects ---- */

object *shim_objects(void)
{
  return state.objects;
}

object *object_new(object_kind kind, size_t bytes)
{
  object *o = __real_calloc(1, bytes);
  o->kind = kind;
  o->device = current_device();
  o->next = state.objects;
  state.objects = o;
  state.live++;
  return o;
}

void object_end(object *o)
{
  object **at = &state.objects;
  while (*at != o) at = &(*at)->next;
  *at = o->next;
  state.live--;
  __real_free(o);
}

object *object_find(object_kind kind, const void *o)
{
  for (object *at = state.objects; at != NULL; at = at->next)
    if (at == o && at->kind == kind) return at;
  return NULL;
}

block *block_holding(const void *at, size_t bytes)
{
  const uintptr_t begin = (uintptr_t)at;
  for (object *o = state.objects; o != NULL; o = o->next) {
    block *b = (block *)o;
    if (o->kind == DEVICE_BLOCK && begin >= b->at && begin - b->at <= b->bytes && bytes <= b->bytes - (begin - b->at))
      return b;
  }
  return NULL;
}

/* The first stream after `from` in the list of all objects. */
static struct CUstream_st *next_stream(object *from)
{
  while (from != NULL && from->kind != STREAM) from = from->next;
  return (struct CUstream_st *)from;
}

bool is_stuck(int device)
{
  for (struct CUstream_st *s = next_stream(state.objects); s != NULL; s = next_stream(s->object.next))
    if (s->stuck && s->object.device == device) return true;
  return false;
}

void set_stuck(cudaStream_t stream, bool stuck)
{
  pthread_mutex_lock(&lock);
  if (object_find(STREAM, stream) != NULL) stream->stuck = stuck;
  pthread_mutex_unlock(&lock);
}

bool capture_forbids(void)
{
  if (thread.mode == cudaStreamCaptureModeRelaxed) return false;
  for (struct CUstream_st *s = next_stream(state.objects); s != NULL; s = next_stream(s->object.next)) {
    if (s->graph == NULL || s->invalid) continue;
    if (pthread_equal(s->thread, pthread_self())
            ? s->mode != cudaStreamCaptureModeRelaxed
            : s->mode == cudaStreamCaptureModeGlobal && thread.mode == cudaStreamCaptureModeGlobal)
      return true;
  }
  return false;
}

void invalidate_captures(void)
{
  for (struct CUstream_st *s = next_stream(state.objects); s != NULL; s = next_stream(s->object.next))
    if (s->graph != NULL && s->mode != cudaStreamCaptureModeRelaxed) s->invalid = true;
}

bool implicit_capture(void)
{
  for (struct CUstream_st *s = next_stream(state.objects); s != NULL; s = next_stream(s->object.next))
    if (s->graph != NULL && !s->invalid && !(s->flags & cudaStreamNonBlocking)) return true;
  return false;
}

int64_t shim_live(void)
{
  return state.live;
}

bool shim_has(const void *it)
{
  for (object *o = state.objects; o != NULL; o = o->next)
    if (o == it) return true;
  return false;
}

size_t shim_device_bytes(int device)
{
  size_t sum = 0;
  for (object *o = state.objects; o != NULL; o = o->next)
    if (o->kind == DEVICE_BLOCK && o->device == device && !((block *)o)->alias) sum += ((block *)o)->bytes;
  return sum;
}

void shim_print_live(void)
{
  static const char *const names[KINDS] = {"device block",
                                           "pinned block",
                                           "pool",
                                           "stream",
                                           "event",
                                           "library",
                                           "graph",
                                           "executable graph",
                                           "handle of another library"};
  for (object *o = state.objects; o != NULL; o = o->next)
    printf("# live: %s of device %d\n", names[o->kind], o->device);
}

bool shim_guards_whole(void)
{
  for (object *o = state.objects; o != NULL; o = o->next) {
    const block *b = (const block *)o;
    if (o->kind != HOST_BLOCK) continue;
    for (size_t i = 0; i < GUARD; i++)
      if (b->backing[i] != GUARD_BYTE || b->backing[GUARD + b->bytes + i] != GUARD_BYTE) return false;
  }
  return true;
}

void shim_write(void *device, const void *from, size_t bytes)
{
  pthread_mutex_lock(&lock);
  block *b = block_holding(device, bytes);
  memcpy(b->backing + ((uintptr_t)device - b->at), from, bytes);
  pthread_mutex_unlock(&lock);
}

void shim_read(void *to, const void *device, size_t bytes)
{
  pthread_mutex_lock(&lock);
  block *b = block_holding(device, bytes);
  memcpy(to, b->backing + ((uintptr_t)device - b->at), bytes);
  pthread_mutex_unlock(&lock);
}

block *shim_alias(const void *at)
{
  pthread_mutex_lock(&lock);
  block *b = block_at(at);
  if (b != NULL) b = alias_of(b);
  pthread_mutex_unlock(&lock);
  return b;
}

void shim_alias_end(block *b)
{
  pthread_mutex_lock(&lock);
  end_block(b);
  pthread_mutex_unlock(&lock);
}

void count_unknown(void)
{
  state.unknown++;
}
