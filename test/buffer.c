/* What buffers and views can do beyond base.c: flags, shared ownership, uses on other streams, splits, casts, patterns,
 * copies between contexts, pinned memory, typed wrappers. */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cumoe/typed.h>

#include "cuda.h"

static void read_back(cumoe_context context, cumoe_view view, void *host, cumoe_stream stream)
{
  const size_t bytes = (size_t)(view.rows * view.cols) * cumoe_dtype_bytes((cumoe_dtype)view.dtype);
  CHECK_OK(cumoe_copy_to_host(context, host, bytes, view, stream));
  CHECK_OK(cumoe_synchronize(context, stream));
}

static bool all_bytes(const void *data, size_t count, unsigned char want)
{
  const unsigned char *bytes = data;
  for (size_t i = 0; i < count; i++)
    if (bytes[i] != want) return CHECK_MSG(false, "byte %zu is 0x%02x, want 0x%02x", i, bytes[i], want);
  return true;
}

static void test_flags(cumoe_context context)
{
  unsigned char host[300];
  cumoe_buffer buffer = {0}, dirty = {0};
  cumoe_buffer_info info = {.size = sizeof info};
  for (int pass = 0; pass < 2; pass++) {
    case_begin("%s", pass ? "poison" : "zero");
    CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 3, 100, NULL, &dirty));
    CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(dirty), 0x77, NULL));
    CHECK_OK(cumoe_buffer_free(&dirty));
    const int line = __LINE__ + 1;
    CHECK_OK(cumoe_buffer_alloc_with(context, CUMOE_U8, 3, 100, pass ? CUMOE_ALLOC_POISON : CUMOE_ALLOC_ZERO, NULL,
                                     &buffer));
    CHECK_OK(cumoe_buffer_get_info(buffer, &info));
    CHECK(info.line == line && info.handles == 1 && info.pinned == 0 && info.serial > 0);
    read_back(context, cumoe_buffer_view(buffer), host, NULL);
    all_bytes(host, sizeof host, pass ? 0xFF : 0);
    CHECK_OK(cumoe_buffer_free(&buffer));
    case_end();
  }
  case_begin("no elements");
  CHECK_OK(cumoe_buffer_alloc_with(context, CUMOE_F32, 0, 9, CUMOE_ALLOC_ZERO, NULL, &buffer));
  CHECK(cumoe_buffer_view(buffer).data == NULL);
  CHECK_OK(cumoe_buffer_free(&buffer));
  case_end();
  case_begin("zero and poison");
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT,
               cumoe_buffer_alloc_with(context, CUMOE_U8, 1, 1, CUMOE_ALLOC_ZERO | CUMOE_ALLOC_POISON, NULL, &buffer));
  CHECK_TEXT("flags");
  case_end();
}

static void test_retain(cumoe_context context)
{
  cumoe_buffer a = {0}, b = {0}, stale, none = {7};
  cumoe_buffer_info info = {.size = sizeof info};
  void *memory = &a;
  size_t bytes = 0, before = 0;
  case_begin("each handle for itself");
  const int64_t live = cumoe_buffer_live(context, &before);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_I32, 4, 6, NULL, &a));
  CHECK_OK(cumoe_buffer_retain(a, &b));
  CHECK(b.id != 0 && b.id != a.id && cumoe_buffer_live(context, &bytes) == live + 1 && bytes == before + 96);
  const cumoe_view va = cumoe_buffer_view(a), vb = cumoe_buffer_view(b);
  CHECK(va.data == vb.data && va.owner == a.id && vb.owner == b.id && vb.rows == 4 && vb.cols == 6);
  CHECK_OK(cumoe_buffer_get_info(b, &info));
  CHECK(info.handles == 2 && info.bytes == 96);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_buffer_release(&b, &memory));
  CHECK(memory == NULL && b.id != 0);
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(a), 3, NULL));
  stale = a;
  CHECK_OK(cumoe_buffer_free(&a));
  CHECK(a.id == 0 && cumoe_buffer_live(context, NULL) == live + 1);
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_free(&stale)); /* and the other owner keeps its share */
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_retain(stale, &none));
  CHECK(none.id == 0);
  unsigned char host[96];
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_copy_to_host(context, host, 96, va, NULL));
  read_back(context, vb, host, NULL);
  all_bytes(host, 96, 3);
  CHECK_OK(cumoe_buffer_get_info(b, &info));
  CHECK(info.handles == 1);
  CHECK_OK(cumoe_buffer_free(&b));
  CHECK(cumoe_buffer_live(context, &bytes) == live && bytes == before);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_buffer_retain(a, NULL));
  case_end();
  case_begin("destroyed with the context");
  cumoe_context other = open_context(on_device(context) ? 0 : CUMOE_DEVICE_CPU);
  CHECK_OK(cumoe_buffer_alloc(other, CUMOE_I32, 4, 6, NULL, &a));
  CHECK_OK(cumoe_buffer_retain(a, &b));
  CHECK_OK(cumoe_context_destroy(other));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_free(&a));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_buffer_free(&b));
  case_end();
}

enum { SHARERS = 8 };

static void *share_and_free(void *argument)
{
  intptr_t failures = 0;
  for (int i = 0; i < 2000; i++) {
    cumoe_buffer mine = {0};
    if (cumoe_buffer_retain(*(const cumoe_buffer *)argument, &mine) != CUMOE_OK) failures++;
    if (cumoe_buffer_view(mine).data == NULL) failures++;
    if (cumoe_buffer_free(&mine) != CUMOE_OK) failures++;
  }
  return (void *)failures;
}

static void test_retain_threads(cumoe_context context)
{
  pthread_t threads[SHARERS];
  cumoe_buffer buffer = {0};
  cumoe_buffer_info info = {.size = sizeof info};
  case_begin("%d threads", SHARERS);
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 10, 10, NULL, &buffer));
  for (int i = 0; i < SHARERS; i++) CHECK(pthread_create(&threads[i], NULL, share_and_free, &buffer) == 0);
  for (int i = 0; i < SHARERS; i++) {
    void *failures = NULL;
    CHECK(pthread_join(threads[i], &failures) == 0);
    CHECK(failures == NULL);
  }
  CHECK_OK(cumoe_buffer_get_info(buffer, &info));
  CHECK(info.handles == 1);
  CHECK_OK(cumoe_buffer_free(&buffer));
  case_end();
}

static void test_split(cumoe_context context)
{
  CUMOE_AUTO_BUFFER buffer = {0};
  cumoe_view head, tail;
  cumoe_view_mut first, second;
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F16, 10, 6, NULL, &buffer));
  const cumoe_view v = cumoe_buffer_view(buffer);
  for (int64_t at = 0; at <= 10; at++) {
    case_begin("at %" PRId64, at);
    CHECK_OK(cumoe_view_split(v, at, &head, &tail));
    CHECK(head.data == v.data && head.rows == at && tail.rows == 10 - at && head.cols == 6 && tail.cols == 6);
    if (at < 10) CHECK((const char *)tail.data == (const char *)v.data + at * 12);
    CHECK_OK(cumoe_view_split_mut(cumoe_buffer_view_mut(buffer), at, &first, &second));
    const cumoe_view same_head = cumoe_const(first), same_tail = cumoe_const(second);
    CHECK(!memcmp(&same_head, &head, sizeof head) && !memcmp(&same_tail, &tail, sizeof tail));
    CHECK_OK(cumoe_fill(context, first, 1, NULL));
    CHECK_OK(cumoe_fill(context, second, 2, NULL));
    case_end();
  }
}

static void test_cast(cumoe_context context)
{
  CUMOE_AUTO_BUFFER buffer = {0};
  cumoe_view as = {0}, part;
  cumoe_view_mut mut = {0};
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 6, 10, NULL, &buffer));
  const cumoe_view v = cumoe_buffer_view(buffer);
  for (int32_t dtype = CUMOE_F32; dtype <= CUMOE_I64; dtype++) {
    case_begin("f32 to %s and back", cumoe_dtype_name((cumoe_dtype)dtype));
    const int64_t element = (int64_t)cumoe_dtype_bytes((cumoe_dtype)dtype);
    CHECK_OK(cumoe_view_cast(v, (cumoe_dtype)dtype, &as));
    CHECK(as.data == v.data && as.rows == 6 && as.cols == 40 / element && as.ld == 40 / element);
    CHECK(as.dtype == dtype && as.owner == v.owner && as.device == v.device);
    CHECK_OK(cumoe_view_cast_mut(cumoe_buffer_view_mut(buffer), (cumoe_dtype)dtype, &mut));
    const cumoe_view same = cumoe_const(mut);
    CHECK(!memcmp(&same, &as, sizeof as));
    CHECK_OK(cumoe_fill(context, mut, 1, NULL)); /* within its buffer */
    CHECK_OK(cumoe_view_cast(as, CUMOE_F32, &as));
    CHECK(!memcmp(&as, &v, sizeof v));
    case_end();
  }
  case_begin("a row alone");
  part = v;
  part.cols = 8;
  part.ld = 9;
  CHECK_STATUS(CUMOE_ERR_LAYOUT, cumoe_view_cast(part, CUMOE_I64, &as));
  part.rows = 1; /* ld leads nowhere */
  CHECK_OK(cumoe_view_cast(part, CUMOE_I64, &part));
  CHECK(part.cols == 4 && part.ld == 4);
  case_end();
}

/* Every element is the value, every byte around the view is untouched. */
static void pattern_case(cumoe_context context, int32_t dtype, int64_t rows, int64_t cols, int64_t pad, bool uniform)
{
  unsigned char value[8];
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)dtype);
  for (size_t i = 0; i < 8; i++) value[i] = uniform ? 0x42 : (unsigned char)(0x10 * i + 7);
  const cumoe_view_mut v = device_new(context, dtype, rows, cols, pad);
  CHECK_OK(cumoe_fill_value(context, v, value, NULL));
  const tensor got = device_get(context, cumoe_const(v));
  for (int64_t i = 0; i < rows * cols; i++)
    if (memcmp(got.data + (size_t)i * element, value, element) != 0) {
      CHECK_MSG(false, "element %" PRId64 " of %" PRId64 " x %" PRId64 " is wrong", i, rows, cols);
      break;
    }
  check_guards(context, "pattern", v);
}

static void test_patterns(cumoe_context context)
{
  static const int64_t shapes[][3] = {{1, 1, 0}, {1, 2, 0},   {1, 1000, 0}, {1000, 1, 0}, {1000, 1, 3}, {3, 5, 0},
                                      {5, 3, 2}, {33, 65, 1}, {64, 64, 0},  {129, 7, 9},  {0, 5, 1},    {5, 0, 1}};
  for (int32_t dtype = CUMOE_F32; dtype <= CUMOE_I64; dtype++)
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
      for (int uniform = 0; uniform < 2; uniform++) {
        case_begin("%s [%" PRId64 ", %" PRId64 "] + %" PRId64 "%s", cumoe_dtype_name((cumoe_dtype)dtype), shapes[i][0],
                   shapes[i][1], shapes[i][2], uniform ? ", all bytes the same" : "");
        pattern_case(context, dtype, shapes[i][0], shapes[i][1], shapes[i][2], uniform);
        case_end();
      }
}

static void test_pinned(cumoe_context context)
{
  cumoe_pool_stats stats = {.size = sizeof stats};
  cumoe_context other = NULL;
  void *data = &stats, *more = NULL;
  for (uint32_t flags = 0; flags < 2; flags++) {
    case_begin("%s", flags ? "write-combined" : "cacheable");
    cumoe_view_mut v = device_new(context, CUMOE_U8, 1, 1000, 0);
    CHECK_OK(cumoe_pinned_alloc(context, 1000, flags, &data));
    CHECK_OK(cumoe_pinned_alloc(context, 1000, 0, &more));
    CHECK((uintptr_t)data % 256 == 0 && data != NULL && more != data);
    CHECK_OK(cumoe_pool_get_stats(context, &stats));
    CHECK(stats.pinned == 2000);
    for (int i = 0; i < 1000; i++) ((unsigned char *)data)[i] = (unsigned char)(i % 251);
    CHECK_OK(cumoe_copy_from_host(context, v, data, 1000, NULL));
    CHECK_OK(cumoe_copy_to_host(context, more, 1000, cumoe_const(v), NULL));
    CHECK_OK(cumoe_synchronize(context, NULL));
    for (int i = 0; i < 1000; i++)
      if (((unsigned char *)more)[i] != i % 251) CHECK_MSG(false, "byte %d came back wrong", i);
    CHECK_OK(cumoe_pinned_free(context, data));
    CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_pinned_free(context, data));
    CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_pinned_free(context, (char *)more + 1));
    CHECK_OK(cumoe_pinned_free(context, more));
    CHECK_OK(cumoe_pool_get_stats(context, &stats));
    CHECK(stats.pinned == 0);
    case_end();
  }
  case_begin("none");
  CHECK_OK(cumoe_pinned_alloc(context, 0, 0, &data));
  CHECK(data == NULL);
  CHECK_OK(cumoe_pinned_free(context, NULL));
  case_end();
  case_begin("left to the context");
  other = open_context(on_device(context) ? 0 : CUMOE_DEVICE_CPU);
  CHECK_OK(cumoe_pinned_alloc(other, 100, 0, &data));
  CHECK_OK(cumoe_pinned_alloc(other, 200, 0, &more));
  CHECK_STATUS(CUMOE_ERR_STALE_HANDLE, cumoe_pinned_free(context, data)); /* of another context */
  CHECK_OK(cumoe_context_destroy(other));
  case_end();
}

static void between_case(cumoe_context a, cumoe_context b, int64_t rows, int64_t cols, int64_t pad)
{
  rng r = {(uint64_t)(rows * 100 + cols + pad)};
  const tensor t = tensor_integers(&r, CUMOE_I32, rows, cols, 1 << 29);
  const cumoe_view from = device_put(a, &t, pad);
  const cumoe_view_mut to = device_new(b, CUMOE_I32, rows, cols, pad == 0 ? 0 : pad + 1);
  CHECK_OK(cumoe_copy_between(b, to, NULL, a, from, NULL));
  const tensor got = device_get(b, cumoe_const(to));
  check_same("between", &got, &t);
  check_guards(b, "between", to);
}

static void test_between(cumoe_context a, cumoe_context b, const char *what)
{
  static const int64_t shapes[][3] = {{1, 1, 0}, {1, 100, 3}, {7, 9, 0}, {9, 7, 2}, {300, 33, 5}, {0, 4, 1}, {4, 0, 1}};
  if (!group_begin("copies between contexts: %s", what)) return;
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
    for (int back = 0; back < 2; back++) {
      case_begin("[%" PRId64 ", %" PRId64 "] + %" PRId64 "%s", shapes[i][0], shapes[i][1], shapes[i][2],
                 back ? ", back" : "");
      between_case(back ? b : a, back ? a : b, shapes[i][0], shapes[i][1], shapes[i][2]);
      case_end();
    }
  case_begin("of the other context");
  const cumoe_view_mut x = device_new(a, CUMOE_F32, 4, 4, 0), y = device_new(b, CUMOE_F32, 4, 4, 0);
  CHECK_STATUS(CUMOE_ERR_WRONG_DEVICE, cumoe_copy_between(a, y, NULL, b, cumoe_const(x), NULL));
  check_untouched(b, "refused", y, 0);
  case_end();
  group_end();
}

static void test_typed(cumoe_context context)
{
  case_begin("f32: all of them");
  const float in[6] = {1.5f, -2, 3, 4, 5, 6};
  float out[6] = {0};
  cumoe_buffer_f32 a = {{0}}, shared = {{0}};
  cumoe_buffer_info info = {.size = sizeof info};
  cumoe_view_f32 row, as;
  cumoe_view_mut_f32 part, mut_as;
  const int line = __LINE__ + 1;
  CHECK_OK(cumoe_buffer_alloc_f32(context, 2, 3, NULL, &a));
  CHECK_OK(cumoe_buffer_get_info(a.any, &info));
  CHECK(info.dtype == CUMOE_F32 && info.line == line && strstr(info.file, "buffer.c") != NULL);
  CHECK_OK(cumoe_copy_from_host_f32(context, cumoe_buffer_view_mut_f32(a), in, 6, NULL));
  CHECK_STATUS(CUMOE_ERR_OUT_OF_BOUNDS, cumoe_copy_from_host_f32(context, cumoe_buffer_view_mut_f32(a), in, 5, NULL));
  CHECK_STATUS(CUMOE_ERR_OUT_OF_BOUNDS,
               cumoe_copy_from_host_f32(context, cumoe_buffer_view_mut_f32(a), in, (size_t)1 << 63, NULL));
  CHECK_OK(cumoe_view_rows_f32(cumoe_buffer_view_f32(a), 1, 1, &row));
  CHECK_OK(cumoe_view_cols_f32(row, 2, 1, &row));
  CHECK_OK(cumoe_copy_to_host_f32(context, out, 1, row, NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK(out[0] == 6);
  CHECK_OK(cumoe_view_rows_mut_f32(cumoe_buffer_view_mut_f32(a), 0, 1, &part));
  CHECK_OK(cumoe_view_cols_mut_f32(part, 1, 2, &part));
  CHECK_OK(cumoe_fill_f32(context, part, -0.75f, NULL));
  CHECK_OK(cumoe_view_cast_f32(cumoe_buffer_view(a.any), &as));
  CHECK_OK(cumoe_view_cast_mut_f32(cumoe_buffer_view_mut(a.any), &mut_as));
  CHECK(as.any.data == mut_as.any.data && cumoe_const_f32(mut_as).any.data == as.any.data);
  CHECK_OK(cumoe_copy_to_host_f32(context, out, 6, as, NULL));
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK(out[0] == 1.5f && out[1] == -0.75f && out[2] == -0.75f && out[3] == 4 && out[5] == 6);
  CHECK_OK(cumoe_buffer_retain_f32(a, &shared));
  CHECK_OK(cumoe_buffer_free_f32(&a));
  CHECK_OK(cumoe_buffer_free_f32(&shared));
  CHECK(a.any.id == 0 && shared.any.id == 0);
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_buffer_free_f32(NULL));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_buffer_alloc_f32(context, 1, 1, NULL, NULL));
  case_end();

#define TYPED_CASE(NAME, ELEMENT, DTYPE, ...)                                                                          \
  case_begin(#NAME);                                                                                                   \
  {                                                                                                                    \
    const ELEMENT value = __VA_ARGS__;                                                                                 \
    ELEMENT got[4];                                                                                                    \
    cumoe_buffer_##NAME x = {{0}}, y = {{0}};                                                                          \
    CHECK_OK(cumoe_buffer_alloc_##NAME(context, 1, 4, NULL, &x));                                                      \
    CHECK_OK(cumoe_buffer_alloc_##NAME(context, 1, 4, NULL, &y));                                                      \
    CHECK(cumoe_buffer_view_##NAME(x).any.dtype == (DTYPE));                                                           \
    CHECK_OK(cumoe_fill_##NAME(context, cumoe_buffer_view_mut_##NAME(x), value, NULL));                                \
    CHECK_OK(cumoe_copy_##NAME(context, cumoe_buffer_view_mut_##NAME(y), cumoe_buffer_view_##NAME(x), NULL));          \
    CHECK_OK(cumoe_copy_to_host_##NAME(context, got, 4, cumoe_buffer_view_##NAME(y), NULL));                           \
    CHECK_OK(cumoe_synchronize(context, NULL));                                                                        \
    for (int i = 0; i < 4; i++) CHECK(memcmp(&got[i], &value, sizeof value) == 0);                                     \
    CHECK(cumoe_matrix_##NAME(got, 1, 4, 4).any.dtype == (DTYPE));                                                     \
    CHECK(cumoe_matrix_mut_##NAME(got, 2, 2, 2).any.rows == 2);                                                        \
    CHECK_OK(cumoe_buffer_free_##NAME(&x));                                                                            \
    CHECK_OK(cumoe_buffer_free_##NAME(&y));                                                                            \
  }                                                                                                                    \
  case_end();

  TYPED_CASE(f16, cumoe_f16, CUMOE_F16, {0x3c01})
  TYPED_CASE(bf16, cumoe_bf16, CUMOE_BF16, {0x3f81})
  TYPED_CASE(u8, uint8_t, CUMOE_U8, 200)
  TYPED_CASE(i32, int32_t, CUMOE_I32, -123456789)
  TYPED_CASE(i64, int64_t, CUMOE_I64, 0x123456789abcdef0)
}

static void CUDART_CB sleep_a_while(void *unused)
{
  (void)unused;
  usleep(200000);
}

/* The memory goes to the next buffer of the home stream at once; the reader on the other stream still sees the old
 * bytes, because its use was recorded. */
static bool use_case(cumoe_context context, cudaStream_t home, cudaStream_t reader, int handles)
{
  enum { BYTES = 1 << 16 };
  unsigned char *host = scratch(BYTES, 1);
  cumoe_buffer buffer = {0}, other = {0}, next = {0};
  CUMOE_AUTO_BUFFER seen = {0};
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, BYTES, home, &buffer));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, BYTES, reader, &seen));
  if (handles == 2) CHECK_OK(cumoe_buffer_retain(buffer, &other));
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(buffer), 0x11, home));
  CHECK_OK(cumoe_synchronize(context, home));
  CHECK_CUDA(cudaLaunchHostFunc(reader, sleep_a_while, NULL));
  CHECK_OK(cumoe_copy(context, cumoe_buffer_view_mut(seen), cumoe_buffer_view(buffer), reader));
  CHECK_OK(cumoe_buffer_record_use(buffer, reader));
  const void *memory = cumoe_buffer_view(buffer).data;
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_OK(cumoe_buffer_free(&other));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, BYTES, home, &next));
  const bool used_again = cumoe_buffer_view(next).data == memory;
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(next), 0x22, home));
  CHECK_OK(cumoe_synchronize(context, home));
  read_back(context, cumoe_buffer_view(seen), host, reader);
  all_bytes(host, BYTES, 0x11);
  CHECK_OK(cumoe_buffer_free(&next));
  return used_again;
}

static void test_uses_cuda(cumoe_context context)
{
  cudaStream_t home = NULL, reader = NULL;
  cudaGraph_t graph = NULL;
  cumoe_buffer buffer = {0};
  CHECK_CUDA(cudaStreamCreateWithFlags(&home, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamCreateWithFlags(&reader, cudaStreamNonBlocking));
  for (int handles = 1; handles <= 2; handles++) {
    case_begin("the free waits, %d handles", handles);
    const bool used_again = use_case(context, home, reader, handles);
    case_end();
    case_begin("and that proves something");
    if (used_again)
      case_end();
    else
      case_skip("the next buffer got other memory");
  }
  case_begin("recorded often, stream destroyed");
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 64, home, &buffer));
  CHECK_OK(cumoe_synchronize(context, home));
  for (int i = 0; i < 1000; i++) {
    CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(buffer), (uint8_t)i, reader));
    CHECK_OK(cumoe_buffer_record_use(buffer, reader));
  }
  CHECK_CUDA(cudaStreamBeginCapture(reader, cudaStreamCaptureModeGlobal));
  CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE, cumoe_buffer_record_use(buffer, reader));
  CHECK_CUDA(cudaStreamEndCapture(reader, &graph));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(reader));
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_OK(cumoe_synchronize(context, home));
  case_end();
  CHECK_CUDA(cudaStreamDestroy(home));
}

/* Two contexts, of one GPU or two: what comes after the copy on either stream waits for it, and it waits for both. */
static void test_between_streams(cumoe_context a, cumoe_context b)
{
  enum { BYTES = 1 << 16 };
  cudaStream_t sa = NULL, sb = NULL;
  cudaGraph_t graph = NULL;
  CUMOE_AUTO_BUFFER x = {0}, y = {0};
  if (!group_begin("cuda: copies between contexts, in order")) return;
  CHECK_CUDA(cudaStreamCreateWithFlags(&sa, cudaStreamNonBlocking));
  CHECK_CUDA(cudaSetDevice(device_of(b)));
  CHECK_CUDA(cudaStreamCreateWithFlags(&sb, cudaStreamNonBlocking));
  CHECK_CUDA(cudaSetDevice(device_of(a)));
  case_begin("both streams");
  unsigned char *host = scratch(BYTES, 1);
  CHECK_OK(cumoe_buffer_alloc(a, CUMOE_U8, 1, BYTES, sa, &x));
  CHECK_OK(cumoe_buffer_alloc(b, CUMOE_U8, 1, BYTES, sb, &y));
  for (int late = 0; late < 2; late++) {
    CHECK_CUDA(cudaSetDevice(device_of(late ? b : a)));
    CHECK_CUDA(cudaLaunchHostFunc(late ? sb : sa, sleep_a_while, NULL));
    CHECK_CUDA(cudaSetDevice(device_of(a)));
    CHECK_OK(cumoe_fill(a, cumoe_buffer_view_mut(x), 0x31, sa));
    CHECK_OK(cumoe_fill(b, cumoe_buffer_view_mut(y), 0x32, sb));
    CHECK_OK(cumoe_copy_between(b, cumoe_buffer_view_mut(y), sb, a, cumoe_buffer_view(x), sa));
    CHECK_OK(cumoe_fill(a, cumoe_buffer_view_mut(x), 0x33, sa)); /* not before it was read */
    read_back(b, cumoe_buffer_view(y), host, sb);
    all_bytes(host, BYTES, 0x31);
    CHECK_OK(cumoe_synchronize(a, sa));
  }
  case_end();
  case_begin("captured");
  for (int which = 0; which < 2; which++) {
    CHECK_CUDA(cudaStreamBeginCapture(which ? sb : sa, cudaStreamCaptureModeRelaxed));
    CHECK_STATUS(CUMOE_ERR_CAPTURE_UNSAFE,
                 cumoe_copy_between(b, cumoe_buffer_view_mut(y), sb, a, cumoe_buffer_view(x), sa));
    CHECK_CUDA(cudaStreamEndCapture(which ? sb : sa, &graph));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  case_end();
  CHECK_OK(cumoe_buffer_free(&x));
  CHECK_OK(cumoe_buffer_free(&y));
  CHECK_CUDA(cudaStreamDestroy(sa));
  CHECK_CUDA(cudaStreamDestroy(sb));
  group_end();
}

/* A pattern is copies and byte fills: a graph may hold it. */
static void test_pattern_captured(cumoe_context context)
{
  const int32_t value = 0x01020304;
  cudaStream_t stream = NULL;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  cumoe_buffer buffer = {0};
  case_begin("replayed");
  int32_t *host = scratch(33 * 7, sizeof *host);
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_I32, 33, 7, stream, &buffer));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK_OK(cumoe_fill_value(context, cumoe_buffer_view_mut(buffer), &value, stream));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CHECK_OK(cumoe_fill(context, cumoe_buffer_view_mut(buffer), 0, stream));
  CHECK_CUDA(cudaGraphLaunch(exec, stream));
  read_back(context, cumoe_buffer_view(buffer), host, stream);
  for (int i = 0; i < 33 * 7; i++)
    if (host[i] != value) CHECK_MSG(false, "element %d is %" PRId32, i, host[i]);
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
  case_end();
}

/* Streams mean nothing on the CPU device; the handle is checked all the same. */
static void test_uses(cumoe_context context)
{
  cumoe_buffer buffer = {0}, empty = {0};
  case_begin("handles");
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 64, NULL, &buffer));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_U8, 1, 0, NULL, &empty));
  CHECK_OK(cumoe_buffer_record_use(buffer, NULL));
  if (!on_device(context)) CHECK_OK(cumoe_buffer_record_use(buffer, (cumoe_stream)(uintptr_t)64));
  CHECK_OK(cumoe_buffer_record_use(empty, NULL));
  CHECK_OK(cumoe_buffer_free(&buffer));
  CHECK_OK(cumoe_buffer_free(&empty));
  case_end();
}

static void test_devices(cumoe_context contexts[2], int count)
{
  cumoe_context other = open_context(CUMOE_DEVICE_CPU);
  int gpus = 0;
  if (other != NULL) test_between(other, contexts[0], "cpu and the first device");
  if (other != NULL && count == 2) test_between(other, contexts[1], "cpu and cuda");
  if (other != NULL) close_context(other);
  if (!on_device(contexts[count - 1])) return;
  other = open_context(0);
  test_between(contexts[count - 1], other, "one GPU twice");
  test_between_streams(contexts[count - 1], other);
  close_context(other);
  if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 1) {
    other = open_context(1);
    test_between(contexts[count - 1], other, "two GPUs");
    test_between_streams(contexts[count - 1], other);
    close_context(other);
  } else if (group_begin("copies between contexts: two GPUs")) {
    case_begin("both directions");
    case_skip("one GPU only");
    group_end();
  }
}

static const test_group groups[] = {
    GROUP("allocation flags", test_flags, ANYWHERE),
    GROUP("shared ownership", test_retain, ANYWHERE),
    GROUP("shared by threads", test_retain_threads, ANYWHERE),
    GROUP("splits", test_split, ANYWHERE),
    GROUP("casts", test_cast, ANYWHERE),
    GROUP("fill patterns", test_patterns, ANYWHERE),
    GROUP("pinned memory", test_pinned, ANYWHERE),
    GROUP("typed wrappers", test_typed, ANYWHERE),
    GROUP("recorded uses", test_uses, ANYWHERE),
    GROUP("uses on other streams", test_uses_cuda, ON_CUDA),
    GROUP("patterns in a graph", test_pattern_captured, ON_CUDA),
};

int main(int argc, char **argv)
{
  cumoe_context contexts[2];
  test_begin(argc, argv);
  const int count = open_contexts(contexts);
  for (int i = 0; i < count; i++) run_groups(contexts[i], groups, sizeof groups / sizeof groups[0]);
  if (count > 0) test_devices(contexts, count);
  for (int i = 0; i < count; i++) close_context(contexts[i]);
  return test_end();
}
