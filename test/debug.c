/* Debug levels: the report of leaks, undeclared uses, poison, red zones; and the same calls with all of it on. */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

enum { MAX_MESSAGES = 32 };

static struct {
  int count, worst;
  char text[MAX_MESSAGES][300];
} heard;

static void hear(void *unused, cumoe_log_level level, const char *message)
{
  (void)unused;
  if (level > CUMOE_LOG_WARNING || heard.count == MAX_MESSAGES) return;
  if (heard.worst == 0 || (int)level < heard.worst) heard.worst = (int)level;
  snprintf(heard.text[heard.count++], sizeof heard.text[0], "%s", message);
}

static void listen_to(void)
{
  memset(&heard, 0, sizeof heard);
  cumoe_set_log(hear, NULL, CUMOE_LOG_WARNING);
}

static void stop_listening(void)
{
  cumoe_set_log(NULL, NULL, CUMOE_LOG_WARNING);
}

/* Messages that hold all these words. */
static int told(const char *word, const char *and)
{
  int found = 0;
  for (int i = 0; i < heard.count; i++) found += strstr(heard.text[i], word) && strstr(heard.text[i], and);
  return found;
}

#define CHECK_TOLD(want, word, and)                                                                                    \
  CHECK_MSG(told(word, and) == (want), "%d of %d messages have \"%s\" and \"%s\"; the first is \"%s\"",                \
            told(word, and), heard.count, word, and, heard.text[0])

static cumoe_context open_at(int32_t device, int32_t level)
{
  const cumoe_context_config config = {.size = sizeof config, .debug = level, .cpu_threads = 1};
  cumoe_context context = NULL;
  CHECK_OK(cumoe_context_create(device, &config, &context));
  return context;
}

/* What a context says at its end. */
static void destroy_and_listen(cumoe_context context)
{
  listen_to();
  CHECK_OK(cumoe_context_destroy(context));
  stop_listening();
}

static void test_leaks(cumoe_context given)
{
  const int32_t device = device_of(given);
  cumoe_buffer buffer, freed = {0}, shared, more;
  void *pinned = NULL;
  char at[64];
  case_begin("count, bytes, places");
  cumoe_context context = open_at(device, 1);
  int line = 0;
  for (int i = 0; i < 3; i++) {
    line = __LINE__ + 1;
    CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 10, 10, NULL, &buffer));
  }
  CHECK_OK(cumoe_buffer_retain(buffer, &shared)); /* told of once */
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 1000, 10, NULL, &freed));
  CHECK_OK(cumoe_buffer_free(&freed));
  CHECK_OK(cumoe_pinned_alloc(context, 77, 0, &pinned));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 0, 10, NULL, &more));
  destroy_and_listen(context);
  CHECK_TOLD(1, "5 buffers", "1277 bytes");
  snprintf(at, sizeof at, "debug.c:%d", line);
  CHECK_TOLD(1, "3 buffers, 1200 bytes", at);
  CHECK_TOLD(1, "1 buffers, 77 bytes", "debug.c:");
  CHECK_MSG(heard.count == 4 && heard.worst == CUMOE_LOG_WARNING, "%d messages", heard.count);
  CHECK_MSG(strstr(heard.text[1], at) != NULL, "the largest does not come first: %s", heard.text[1]);
  case_end();
  case_begin("more places than are told");
  context = open_at(device, 1);
  for (int i = 1; i <= 100; i++)
    CHECK_OK(cumoe_buffer_alloc_at(context, CUMOE_U8, 1, i, NULL, "elsewhere.c", i, &buffer));
  CHECK_OK(cumoe_buffer_alloc_at(context, CUMOE_U8, 1, 1, NULL, NULL, 0, &buffer));
  destroy_and_listen(context);
  CHECK_TOLD(1, "101 buffers", "5051 bytes");
  CHECK_TOLD(8, "1 buffers", "elsewhere.c:");
  CHECK_TOLD(1, "93 buffers", "other places");
  case_end();
  case_begin("places of one line number");
  static const char *const files[] = {"first.c", "second.c", NULL, NULL};
  context = open_at(device, 1);
  for (int i = 0; i < 4; i++) CHECK_OK(cumoe_buffer_alloc_at(context, CUMOE_U8, 1, i + 1, NULL, files[i], 7, &buffer));
  destroy_and_listen(context);
  CHECK_TOLD(1, "1 buffers, 1 bytes", "first.c:7");
  CHECK_TOLD(1, "1 buffers, 2 bytes", "second.c:7");
  CHECK_TOLD(1, "2 buffers, 7 bytes", "?:7");
  case_end();
  case_begin("nothing left, or not asked for");
  listen_to();
  context = open_at(device, 1);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 10, NULL, &buffer));
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_OK(cumoe_context_destroy(context));
  if (getenv("CUMOE_DEBUG") == NULL) {
    context = open_at(device, 0);
    CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 10, NULL, &buffer));
    CHECK_OK(cumoe_context_destroy(context));
  }
  stop_listening();
  CHECK_MSG(heard.count == 0, "%s", heard.text[0]);
  case_end();
}

typedef struct seen {
  int count, pinned;
  uint64_t last_serial;
  bool newest_first;
  size_t bytes;
} seen;

static void see(void *user, const cumoe_buffer_info *info)
{
  seen *s = user;
  s->count++;
  s->pinned += info->pinned;
  s->bytes += info->bytes;
  if (!info->pinned) {
    s->newest_first = s->newest_first && (s->last_serial == 0 || info->serial < s->last_serial);
    s->last_serial = info->serial;
  }
  if (info->size != sizeof *info || strstr(info->file, "debug.c") == NULL) s->count += 1000;
}

static void test_live(cumoe_context given)
{
  const int32_t device = device_of(given);
  cumoe_buffer buffers[10] = {{0}};
  void *pinned = NULL;
  seen s = {.newest_first = true};
  for (int32_t level = 0; level <= 2; level++) {
    case_begin("level %d", (int)level);
    cumoe_context context = open_at(device, level);
    for (int i = 0; i < 10; i++) CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, i, NULL, &buffers[i]));
    for (int i = 0; i < 10; i += 4) CHECK_OK(cumoe_buffer_free(&buffers[i])); /* the first, middle ones */
    CHECK_OK(cumoe_buffer_free(&buffers[9]));                                 /* the last */
    CHECK_OK(cumoe_pinned_alloc(context, 500, 0, &pinned));
    s = (seen){.newest_first = true};
    CHECK(cumoe_debug_live(context, see, &s) == 7 && cumoe_debug_live(context, NULL, NULL) == 7);
    CHECK_MSG(s.count == 7 && s.pinned == 1 && s.newest_first && s.bytes == 1 + 2 + 3 + 5 + 6 + 7 + 500,
              "%d seen, %zu bytes", s.count, s.bytes);
    for (int i = 0; i < 10; i++) CHECK_OK(cumoe_buffer_free(&buffers[i]));
    CHECK_OK(cumoe_pinned_free(context, pinned));
    CHECK(cumoe_debug_live(context, see, &s) == 0 && cumoe_debug_live(NULL, see, &s) == -1);
    CHECK_OK(cumoe_context_destroy(context));
    case_end();
  }
}

/* Streams are ignored by the CPU device, and compared all the same. */
static cumoe_stream make_stream(int32_t device, int number)
{
  cudaStream_t stream = (cudaStream_t)(uintptr_t)(64 * number);
  if (device != CUMOE_DEVICE_CPU) CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

static void end_stream(int32_t device, cumoe_stream stream)
{
  if (device != CUMOE_DEVICE_CPU) CHECK_CUDA(cudaStreamDestroy(stream));
}

/* A buffer of the first stream's and two more streams. */
typedef struct uses {
  int32_t device;
  cumoe_context context;
  cumoe_stream home, other, third;
} uses;

static cumoe_buffer at_home(const uses *u)
{
  cumoe_buffer b = {0};
  CHECK_OK(cumoe_buffer_alloc(u->context, CUMOE_F32, 4, 4, u->home, &b));
  return b;
}

static void fill_on(const uses *u, cumoe_buffer b, cumoe_stream stream)
{
  CHECK_OK(cumoe_fill(u->context, cumoe_buffer_view_mut(b), 1, stream));
}

static void use_at_home(const uses *u)
{
  case_begin("on the home stream only");
  listen_to();
  cumoe_buffer a = at_home(u);
  fill_on(u, a, u->home);
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_MSG(heard.count == 0, "%s", heard.text[0]);
  case_end();
}

static void use_unrecorded(const uses *u)
{
  case_begin("on another, not recorded");
  listen_to();
  char at[64];
  cumoe_buffer a = {0}, b = {0};
  const int line = __LINE__ + 1;
  CHECK_OK(cumoe_buffer_alloc(u->context, CUMOE_F32, 4, 4, u->home, &a));
  CHECK_OK(cumoe_buffer_alloc(u->context, CUMOE_F32, 4, 4, u->other, &b));
  CHECK_OK(cumoe_synchronize(u->context, u->home));
  CHECK_OK(cumoe_copy(u->context, cumoe_buffer_view_mut(b), cumoe_buffer_view(a), u->other));
  fill_on(u, a, u->other);
  CHECK_OK(cumoe_synchronize(u->context, u->other)); /* so that the free below really is safe */
  CHECK(heard.count == 0);
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_OK(cumoe_buffer_free(&b));
  snprintf(at, sizeof at, "debug.c:%d", line);
  CHECK_TOLD(1, at, "cumoe_copy");
  CHECK_MSG(heard.count == 1 && heard.worst == CUMOE_LOG_WARNING, "%d messages", heard.count);
  case_end();
}

static void use_recorded(const uses *u)
{
  case_begin("recorded; recorded too early; on two streams");
  listen_to();
  cumoe_buffer a = at_home(u);
  CHECK_OK(cumoe_synchronize(u->context, u->home));
  fill_on(u, a, u->other);
  CHECK_OK(cumoe_buffer_record_use(a, u->other));
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_MSG(heard.count == 0, "%s", heard.text[0]);
  a = at_home(u);
  CHECK_OK(cumoe_synchronize(u->context, u->home));
  CHECK_OK(cumoe_buffer_record_use(a, u->other));
  fill_on(u, a, u->other);
  fill_on(u, a, u->third);
  CHECK_OK(cumoe_buffer_record_use(a, u->third));
  CHECK_OK(cumoe_synchronize(u->context, u->other));
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_TOLD(1, "cumoe_fill", "without cumoe_buffer_record_use");
  CHECK(heard.count == 1);
  case_end();
}

static void use_on_many(const uses *u)
{
  case_begin("on more streams than a buffer has places for");
  listen_to();
  cumoe_buffer a = at_home(u);
  CHECK_OK(cumoe_synchronize(u->context, u->home));
  cumoe_stream many[10];
  for (int i = 0; i < 10; i++) {
    many[i] = make_stream(u->device, i + 4);
    fill_on(u, a, many[i]);
    CHECK_OK(cumoe_buffer_record_use(a, many[i]));
    fill_on(u, a, many[i]);
    if (i % 2 == 0) CHECK_OK(cumoe_buffer_record_use(a, many[i]));
    CHECK_OK(cumoe_synchronize(u->context, many[i]));
  }
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_TOLD(5, "cumoe_fill", "without cumoe_buffer_record_use");
  for (int i = 0; i < 10; i++) end_stream(u->device, many[i]);
  case_end();
}

static void use_refused(const uses *u)
{
  case_begin("a refused call is no use");
  listen_to();
  cumoe_buffer a = at_home(u);
  cumoe_view_mut v = cumoe_buffer_view_mut(a);
  v.rows = 5;
  CHECK_STATUS(CUMOE_ERR_OUT_OF_BOUNDS, cumoe_fill(u->context, v, 1, u->other));
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_MSG(heard.count == 0, "%s", heard.text[0]);
  case_end();
}

static void test_uses(cumoe_context given)
{
  const int32_t device = device_of(given);
  const uses u = {device, open_at(device, 1), make_stream(device, 1), make_stream(device, 2), make_stream(device, 3)};
  use_at_home(&u);
  use_unrecorded(&u);
  use_recorded(&u);
  use_on_many(&u);
  use_refused(&u);
  stop_listening();
  close_context(u.context);
  end_stream(device, u.home), end_stream(device, u.other), end_stream(device, u.third);
}

/* A whole layer on a foreign stream: the stages know their stream, too. */
static void test_stage_uses(cumoe_context given)
{
  const int32_t device = device_of(given);
  enum { TOKENS = 4, EXPERTS = 8, K = 2 };
  cumoe_buffer logits = {0}, ids = {0}, weights = {0};
  const cumoe_routing routing = cumoe_routing_qwen3(K);
  case_begin("gate");
  cumoe_stream home = make_stream(device, 1), other = make_stream(device, 2);
  cumoe_context context = open_at(device, 1);
  CHECK_OK(cumoe_buffer_alloc_with(context, CUMOE_F32, TOKENS, EXPERTS, CUMOE_ALLOC_ZERO, home, &logits));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_I32, TOKENS, K, other, &ids));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, TOKENS, K, other, &weights));
  CHECK_OK(cumoe_synchronize(context, home));
  CHECK_OK(cumoe_gate(context, &routing, cumoe_buffer_view(logits), no_view(), cumoe_buffer_view_mut(ids),
                      cumoe_buffer_view_mut(weights), other));
  CHECK_OK(cumoe_synchronize(context, other));
  listen_to();
  CHECK_OK(cumoe_buffer_free(&logits));
  CHECK_OK(cumoe_buffer_free(&ids));
  CHECK_OK(cumoe_buffer_free(&weights));
  stop_listening();
  CHECK_TOLD(1, "cumoe_gate", "debug.c:");
  CHECK(heard.count == 1);
  case_end();
  close_context(context);
  end_stream(device, home), end_stream(device, other);
}

static void write_at(cumoe_context context, void *data, int64_t offset, unsigned char byte)
{
  const cumoe_view_mut one = cumoe_vector_mut((char *)data + offset, CUMOE_U8, 1);
  CHECK_OK(cumoe_copy_from_host(context, one, &byte, 1, NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
}

static unsigned char read_at(cumoe_context context, const void *data, int64_t offset)
{
  unsigned char byte = 0;
  CHECK_OK(cumoe_copy_to_host(context, &byte, 1, cumoe_vector((const char *)data + offset, CUMOE_U8, 1), NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  return byte;
}

static void test_fresh(cumoe_context given)
{
  const int32_t device = device_of(given);
  static const int64_t sizes[] = {1, 255, 256, 257, 5000};
  unsigned char *host;
  cumoe_buffer buffer = {0};
  cumoe_context context = open_at(device, 2);
  for (int i = 0; i < 5; i++) {
    case_begin("%" PRId64 " bytes", sizes[i]);
    host = scratch((size_t)sizes[i], 1);
    CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, sizes[i], NULL, &buffer));
    CHECK((uintptr_t)cumoe_buffer_view(buffer).data % 256 == 0);
    CHECK_OK(cumoe_copy_to_host(context, host, (size_t)sizes[i], cumoe_buffer_view(buffer), NULL));
    CHECK_OK(cumoe_synchronize(context, NULL));
    for (int64_t j = 0; j < sizes[i]; j++)
      if (host[j] != 0xFF) CHECK_MSG(false, "byte %" PRId64 " is 0x%02x", j, host[j]);
    CHECK_OK(cumoe_buffer_free(&buffer));
    CHECK_OK(cumoe_buffer_alloc_with(context, CUMOE_U8, 1, sizes[i], CUMOE_ALLOC_ZERO, NULL, &buffer));
    CHECK(read_at(context, cumoe_buffer_view(buffer).data, sizes[i] - 1) == 0);
    CHECK_OK(cumoe_buffer_free(&buffer));
    case_end();
  }
  close_context(context);
}

/* Every byte around a buffer is watched; every byte of it may be written. */
static void zone_case(cumoe_context context, int64_t bytes, int64_t offset, bool good)
{
  char where[64];
  cumoe_buffer buffer = {0}, before = {0};
  cumoe_buffer_info bad = {.size = sizeof bad};
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 100, NULL, &before));
  const int line = __LINE__ + 1;
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, bytes, NULL, &buffer));
  void *data = cumoe_buffer_view_mut(buffer).data;
  CHECK_OK(cumoe_debug_check(context, NULL, &bad));
  const unsigned char was = read_at(context, data, offset);
  write_at(context, data, offset, (unsigned char)(was ^ 1));
  CHECK_STATUS(good ? CUMOE_OK : CUMOE_ERR_OUT_OF_BOUNDS, cumoe_debug_check(context, NULL, &bad));
  CHECK_STATUS(good ? CUMOE_OK : CUMOE_ERR_OUT_OF_BOUNDS, cumoe_debug_check(context, NULL, NULL));
  listen_to();
  CHECK_STATUS(good ? CUMOE_OK : CUMOE_ERR_OUT_OF_BOUNDS, cumoe_buffer_free(&buffer));
  stop_listening();
  CHECK(buffer.id == 0);
  if (!good) {
    snprintf(where, sizeof where, "byte %" PRId64 " %s", offset < 0 ? -offset : offset - bytes + 1,
             offset < 0 ? "before the beginning" : "past the end");
    CHECK_TEXT(where);
    CHECK(bad.data == data && bad.line == line && bad.bytes == (size_t)bytes);
    CHECK_TOLD(1, where, "debug.c");
    CHECK(heard.worst == CUMOE_LOG_ERROR);
  }
  CHECK_OK(cumoe_debug_check(context, NULL, &bad)); /* freed: the rest is fine */
  CHECK_OK(cumoe_buffer_free(&before));
}

static void test_zones(cumoe_context given)
{
  const int32_t device = device_of(given);
  static const int64_t sizes[] = {1, 100, 255, 256, 257, 4096};
  cumoe_context context = open_at(device, 2);
  for (int i = 0; i < 6; i++) {
    const int64_t n = sizes[i];
    const int64_t offsets[] = {0, n / 2, n - 1, -1, -256, -100, n, n + 1, n + 255};
    for (int j = 0; j < 9; j++) {
      case_begin("%" PRId64 " bytes, write at %" PRId64, n, offsets[j]);
      zone_case(context, n, offsets[j], j < 3);
      case_end();
    }
  }
  close_context(context);
}

static void test_zones_elsewhere(cumoe_context given)
{
  const int32_t device = device_of(given);
  cumoe_buffer a = {0}, b = {0}, none = {0};
  cumoe_buffer_info bad = {.size = sizeof bad};
  unsigned char *pinned = NULL;
  void *back = NULL;
  cumoe_context context = open_at(device, 2);
  case_begin("pinned memory");
  CHECK_OK(cumoe_pinned_alloc(context, 300, 0, (void **)&pinned));
  CHECK((uintptr_t)pinned % 256 == 0 && pinned[0] == 0xFF && pinned[299] == 0xFF);
  memset(pinned, 0, 300);
  CHECK_OK(cumoe_debug_check(context, NULL, &bad));
  pinned[300] ^= 1;
  CHECK_STATUS(CUMOE_ERR_OUT_OF_BOUNDS, cumoe_debug_check(context, NULL, &bad));
  CHECK(bad.pinned == 1 && bad.data == pinned);
  CHECK_STATUS(CUMOE_ERR_OUT_OF_BOUNDS, cumoe_pinned_free(context, pinned));
  CHECK_TEXT("byte 1 past the end of the pinned memory of 300 bytes");
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_pinned_free(context, pinned));
  case_end();
  case_begin("shared: looked at by the last");
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 64, NULL, &a));
  CHECK_OK(cumoe_buffer_retain(a, &b));
  write_at(context, cumoe_buffer_view_mut(a).data, -7, 1);
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_STATUS(CUMOE_ERR_OUT_OF_BOUNDS, cumoe_buffer_free(&b));
  case_end();
  cumoe_pool_stats before = {.size = sizeof before}, after = before;
  CHECK_OK(cumoe_pool_get_stats(context, &before));
  case_begin("shared: not released, nor copied");
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 500, NULL, &a));
  CHECK_OK(cumoe_buffer_retain(a, &b));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_buffer_release(&b, &back));
  CHECK(back == NULL && b.id != 0);
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_OK(cumoe_buffer_free(&b));
  CHECK_OK(cumoe_pool_get_stats(context, &after));
  CHECK(after.used == before.used && after.live == before.live);
  case_end();
  case_begin("released: the memory leaves its zones");
  const int64_t live = cumoe_debug_live(context, NULL, NULL);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 500, NULL, &a));
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(a), 0x5A, NULL));
  CHECK_OK(cumoe_buffer_release(&a, &back));
  CHECK(read_at(context, back, 0) == 0x5A && read_at(context, back, 499) == 0x5A);
  CHECK(cumoe_debug_live(context, NULL, NULL) == live);
  CHECK_OK(cumoe_buffer_adopt(context, back, CUMOE_U8, 1, 500, NULL, &a)); /* as its first byte is the allocation's */
  CHECK_OK(cumoe_debug_check(context, NULL, &bad));
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK_OK(cumoe_pool_get_stats(context, &after));
  CHECK(after.used == before.used && after.live == before.live);
  case_end();
  case_begin("no elements");
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 0, 5, NULL, &none));
  CHECK(cumoe_buffer_view(none).data == NULL);
  CHECK_OK(cumoe_debug_check(context, NULL, &bad));
  CHECK_OK(cumoe_buffer_free(&none));
  case_end();
  close_context(context);
}

/* An allocator that lets the test look at memory after it was freed. */
static int keep_alloc(void *user, void **data, size_t bytes, size_t alignment, cumoe_stream stream)
{
  (void)bytes, (void)alignment, (void)stream;
  *data = user;
  return 0;
}

static void keep_free(void *user, void *data, size_t bytes, cumoe_stream stream)
{
  (void)user, (void)data, (void)bytes, (void)stream;
}

static void test_poison_on_free(cumoe_context given)
{
  const int32_t device = device_of(given);
  char *memory = NULL;
  cumoe_buffer buffer = {0};
  cumoe_context plain = NULL, context = NULL;
  case_begin("is NaN");
  if (device == CUMOE_DEVICE_CPU)
    memory = aligned_alloc(256, 4096);
  else
    CHECK_CUDA(cudaMalloc((void **)&memory, 4096));
  const cumoe_allocator keep = {.size = sizeof keep, .alloc = keep_alloc, .free = keep_free, .user = memory};
  const cumoe_context_config config = {.size = sizeof config, .debug = 2, .allocator = &keep};
  CHECK_OK(cumoe_context_create(device, NULL, &plain));
  CHECK_OK(cumoe_context_create(device, &config, &context));
  CHECK_OK(cumoe_buffer_alloc_with(context, CUMOE_U8, 1, 1000, CUMOE_ALLOC_ZERO, NULL, &buffer));
  const char *data = cumoe_buffer_view(buffer).data;
  CHECK(data == memory + 256 && read_at(plain, data, 999) == 0);
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK(read_at(plain, data, 0) == 0xFF && read_at(plain, data, 999) == 0xFF);
  CHECK_OK(cumoe_context_destroy(context));
  CHECK_OK(cumoe_context_destroy(plain));
  if (device == CUMOE_DEVICE_CPU)
    free(memory);
  else
    CHECK_CUDA(cudaFree(memory));
  case_end();
}

/* What the level does is told by what a fresh buffer holds, and by the report. */
static int32_t level_in_force(int32_t device, int32_t configured)
{
  cumoe_buffer buffer = {0};
  cumoe_pool_stats stats = {.size = sizeof stats};
  cumoe_context context = open_at(device, configured);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 256, NULL, &buffer));
  CHECK_OK(cumoe_pool_get_stats(context, &stats));
  destroy_and_listen(context);
  return stats.used > 256 ? 2 : heard.count > 0 ? 1 : 0;
}

static void test_environment(void)
{
  static const struct {
    const char *text;
    int32_t configured, want;
    bool odd;
  } cases[] = {{NULL, 0, 0, false},   {NULL, 2, 2, false}, {"", 0, 0, false},  {"0", 1, 1, false},
               {"1", 0, 1, false},    {"2", 0, 2, false},  {"1", 2, 2, false}, {"3", 0, 0, true},
               {"leaks", 1, 1, true}, {"-1", 0, 0, true},  {"2x", 0, 0, true}, {"10", 0, 0, true}};
  const char *was = getenv("CUMOE_DEBUG");
  char *kept = was ? strdup(was) : NULL;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    case_begin("\"%s\" over %d", cases[i].text ? cases[i].text : "(unset)", (int)cases[i].configured);
    CHECK((cases[i].text ? setenv("CUMOE_DEBUG", cases[i].text, 1) : unsetenv("CUMOE_DEBUG")) == 0);
    listen_to();
    cumoe_context context = open_at(CUMOE_DEVICE_CPU, cases[i].configured);
    CHECK_TOLD(cases[i].odd, "CUMOE_DEBUG", "ignored");
    CHECK_OK(cumoe_context_destroy(context));
    stop_listening();
    CHECK(level_in_force(CUMOE_DEVICE_CPU, cases[i].configured) == cases[i].want);
    case_end();
  }
  CHECK((kept ? setenv("CUMOE_DEBUG", kept, 1) : unsetenv("CUMOE_DEBUG")) == 0);
  free(kept);
}

enum { THREADS = 8 };

typedef struct worker {
  cumoe_context context;
  cumoe_stream other;
  uint64_t seed;
  int rounds, failures;
} worker;

static void *run_worker(void *argument)
{
  worker *w = argument;
  rng r = {w->seed};
  for (int i = 0; i < w->rounds; i++) {
    cumoe_buffer a = {0}, b = {0};
    const int64_t n = 1 + rng_below(&r, 600);
    if (cumoe_buffer_alloc(w->context, CUMOE_U8, 1, n, NULL, &a) != CUMOE_OK) w->failures++;
    if (cumoe_synchronize(w->context, NULL) != CUMOE_OK) w->failures++;
    if (cumoe_buffer_retain(a, &b) != CUMOE_OK) w->failures++;
    if (cumoe_fill(w->context, cumoe_buffer_view_mut(a), 1, w->other) != CUMOE_OK) w->failures++;
    if (cumoe_buffer_record_use(b, w->other) != CUMOE_OK) w->failures++;
    if (i % 8 == 0 && cumoe_debug_check(w->context, NULL, NULL) != CUMOE_OK) w->failures++;
    if (i % 8 == 1 && cumoe_debug_live(w->context, NULL, NULL) < 1) w->failures++;
    if (cumoe_buffer_free(&a) != CUMOE_OK) w->failures++;
    if (cumoe_buffer_free(&b) != CUMOE_OK) w->failures++;
  }
  return NULL;
}

static void test_threads(cumoe_context given)
{
  const int32_t device = device_of(given);
  pthread_t threads[THREADS];
  worker w[THREADS];
  case_begin("%d threads", THREADS);
  cumoe_context context = open_at(device, 2);
  listen_to();
  for (int i = 0; i < THREADS; i++) {
    w[i] = (worker){context, make_stream(device, i + 1), (uint64_t)i, device == CUMOE_DEVICE_CPU ? 500 : 100, 0};
    CHECK(pthread_create(&threads[i], NULL, run_worker, &w[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_MSG(w[i].failures == 0, "thread %d: %d failures", i, w[i].failures);
    end_stream(device, w[i].other);
  }
  stop_listening();
  CHECK_MSG(heard.count == 0, "%s", heard.text[0]);
  CHECK(cumoe_debug_live(context, NULL, NULL) == 0);
  case_end();
  close_context(context);
}

static const test_group groups[] = {
    ALONE("CUMOE_DEBUG", test_environment, ONCE),
    GROUP("leaks", test_leaks, ANYWHERE),
    GROUP("what is live", test_live, ANYWHERE),
    GROUP("undeclared uses", test_uses, ANYWHERE),
    GROUP("undeclared uses by stages", test_stage_uses, ANYWHERE),
    GROUP("fresh memory at level 2", test_fresh, ANYWHERE),
    GROUP("red zones", test_zones, ANYWHERE),
    GROUP("level 2 and all the rest", test_zones_elsewhere, ANYWHERE),
    GROUP("freed memory at level 2", test_poison_on_free, ANYWHERE),
    GROUP("level 2 and threads", test_threads, ANYWHERE),
};
TEST_MAIN(groups)
