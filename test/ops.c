/*
 * Elementwise operations, softmax and norms beyond their values (test/cases_ops.c, run by cpu and variants): what is
 * refused, captures as the first call of a context, repeated bits, offsets past 2^31.
 */
#include <math.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "cases.h"

typedef enum op { ADD, MUL, SCALE, RELU, SIGMOID, SILU, GELU, GELU_TANH, SOFTMAX, LAYERNORM, RMSNORM, OPS } op;
static const char *const names[] = {"add",  "mul",       "scale",   "relu",      "sigmoid", "silu",
                                    "gelu", "gelu_tanh", "softmax", "layernorm", "rmsnorm"};

static cumoe_status call(cumoe_context c, op o, cumoe_view x, cumoe_view other, cumoe_view weight, cumoe_view_mut y,
                         cumoe_stream stream)
{
  switch (o) {
  case ADD: return cumoe_add(c, x, other, y, stream);
  case MUL: return cumoe_mul(c, x, other, y, stream);
  case SCALE: return cumoe_scale(c, 2, x, y, stream);
  case RELU: return cumoe_relu(c, x, y, stream);
  case SIGMOID: return cumoe_sigmoid(c, x, y, stream);
  case SILU: return cumoe_silu(c, x, y, stream);
  case GELU: return cumoe_gelu(c, x, y, stream);
  case GELU_TANH: return cumoe_gelu_tanh(c, x, y, stream);
  case SOFTMAX: return cumoe_softmax(c, x, y, stream);
  case LAYERNORM: return cumoe_layernorm(c, x, weight, weight, 1e-5f, y, stream);
  default: return cumoe_rmsnorm(c, x, weight, 1e-5f, y, stream);
  }
}

/* y may be x itself, or the columns beside it; anything else that shares memory with it is refused. */
static void test_overlaps(cumoe_context context)
{
  for (op o = 0; o < OPS; o++) {
    case_begin("%s", names[o]);
    cumoe_view_mut all = device_new(context, CUMOE_BF16, 9, 48, 0), x, y,
                   weight = device_new(context, CUMOE_BF16, 1, 16, 0);
    CHECK_OK(cumoe_fill(context, all, 0x3c, NULL));
    CHECK_OK(cumoe_fill(context, weight, 0x3c, NULL));
    const cumoe_view w = cumoe_const(weight);
    CHECK_OK(cumoe_view_cols_mut(all, 0, 16, &x));
    CHECK_OK(cumoe_view_cols_mut(all, 8, 16, &y));
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, call(context, o, cumoe_const(x), cumoe_const(x), w, y, NULL));
    CHECK_TEXT("y overlaps");
    CHECK_OK(cumoe_view_cols_mut(all, 16, 16, &y));
    CHECK_OK(call(context, o, cumoe_const(x), cumoe_const(x), w, y, NULL));
    CHECK_OK(call(context, o, cumoe_const(x), cumoe_const(y), w, x, NULL));
    y = x;
    y.ld = 32;
    y.owner = 0;
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, call(context, o, cumoe_const(x), cumoe_const(x), w, y, NULL));
    CHECK_OK(cumoe_view_rows_mut(x, 0, 8, &x));
    CHECK_OK(cumoe_view_rows_mut(all, 1, 8, &y));
    CHECK_OK(cumoe_view_cols_mut(y, 0, 16, &y));
    CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, call(context, o, cumoe_const(x), cumoe_const(x), w, y, NULL));
    case_end();
  }
  case_begin("a weight that is written");
  cumoe_view_mut x = device_new(context, CUMOE_F32, 4, 16, 0), first;
  CHECK_OK(cumoe_view_rows_mut(x, 2, 1, &first));
  CHECK_STATUS(CUMOE_ERR_INVALID_ARGUMENT, cumoe_rmsnorm(context, cumoe_const(x), cumoe_const(first), 1e-5f, x, NULL));
  check_untouched(context, "x", x, 0);
  case_end();
}

static void test_gaps(cumoe_context context)
{
  for (op o = 0; o < OPS; o++) {
    rng r = {7};
    case_begin("%s", names[o]);
    tensor data = tensor_normal(&r, CUMOE_BF16, 6, 24, 0, 1), other = tensor_normal(&r, CUMOE_BF16, 6, 24, 0, 1), first;
    for (int gaps = 0; gaps < 8; gaps++) {
      cumoe_view x = device_put(context, &data, gaps & 1 ? 8 : 0), b = device_put(context, &other, gaps & 2 ? 16 : 0);
      cumoe_view weight = b;
      weight.rows = 1;
      cumoe_view_mut y = device_new(context, CUMOE_BF16, 6, 24, gaps & 4 ? 32 : 0);
      CHECK_OK(call(context, o, x, b, weight, y, NULL));
      tensor got = device_get(context, cumoe_const(y));
      check_guards(context, "y", y);
      if (gaps == 0) first = got;
      check_same("other gaps", &got, &first);
    }
    case_end();
  }
}

static void test_repeats(cumoe_context context)
{
  static const int32_t cols[] = {100, 2000, 30000};
  for (op o = 0; o < OPS; o++)
    for (int i = 0; i < 9; i++) {
      rng r = {(uint64_t)i};
      case_begin("%s %s cols %d", names[o], cumoe_dtype_name((cumoe_dtype)case_dtypes[i % 3]), cols[i / 3]);
      tensor data = tensor_normal(&r, case_dtypes[i % 3], 17, cols[i / 3], 0, 1), first = {0};
      const cumoe_view x = device_put(context, &data, 8), weight = device_put(context, &data, 0);
      cumoe_view w = weight;
      w.rows = 1;
      for (int round = 0; round < (on_device(context) ? 20 : 2); round++) {
        cumoe_view_mut y = device_new(context, x.dtype, x.rows, x.cols, 8);
        CHECK_OK(call(context, o, x, weight, w, y, NULL));
        tensor got = device_get(context, cumoe_const(y));
        if (round == 0) first = got;
        if (!check_same("again", &got, &first)) break;
      }
      case_end();
    }
}

/* All operations of a fresh context in one graph; replayed with other data, they write what eager calls write. */
static void test_capture(void)
{
  cumoe_context context = NULL;
  cudaStream_t stream;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  case_begin("all operations");
  CHECK_OK(cumoe_context_create(0, NULL, &context));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cumoe_view_mut x = device_new(context, CUMOE_F16, 33, 777, 7), other = device_new(context, CUMOE_F16, 33, 777, 1),
                 weight = device_new(context, CUMOE_F16, 1, 777, 0), y[OPS];
  for (op o = 0; o < OPS; o++) y[o] = device_new(context, CUMOE_F16, 33, 777, 3);
  CHECK_OK(cumoe_synchronize(context, NULL));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  for (op o = 0; o < OPS; o++)
    CHECK_OK(call(context, o, cumoe_const(x), cumoe_const(other), cumoe_const(weight), y[o], stream));
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  for (uint64_t seed = 0; seed < 3; seed++) {
    rng r = {seed};
    tensor data[3] = {tensor_normal(&r, CUMOE_F16, 33, 777, 0, 1), tensor_normal(&r, CUMOE_F16, 33, 777, 0, 1),
                      tensor_normal(&r, CUMOE_F16, 1, 777, 0, 1)};
    device_set(context, x, &data[0]);
    device_set(context, other, &data[1]);
    device_set(context, weight, &data[2]);
    CHECK_OK(cumoe_synchronize(context, NULL));
    CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess && cudaStreamSynchronize(stream) == cudaSuccess);
    for (op o = 0; o < OPS; o++) {
      cumoe_view_mut eager = device_new(context, CUMOE_F16, 33, 777, 3);
      CHECK_OK(call(context, o, cumoe_const(x), cumoe_const(other), cumoe_const(weight), eager, NULL));
      tensor a = device_get(context, cumoe_const(eager)), b = device_get(context, cumoe_const(y[o]));
      check_same(names[o], &b, &a);
      check_guards(context, names[o], y[o]);
    }
  }
  CHECK(cudaGraphExecDestroy(exec) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  case_end();
  close_context(context);
}

/* A part of a huge matrix, packed. */
static tensor get_part(cumoe_context context, cumoe_view_mut all, int64_t row, int64_t first, int64_t count)
{
  cumoe_view part;
  CHECK_OK(cumoe_view_rows(cumoe_const(all), row, 1, &part));
  CHECK_OK(cumoe_view_cols(part, first, count, &part));
  return device_get(context, part);
}

/* One row of more than 2^31 elements. 0x3c3c is 1.0586 in f16, and twice that has the exponent above. */
static void giant_row(cumoe_context context)
{
  const int64_t cols = ((int64_t)1 << 31) + 4099, places[] = {0, 123456789, ((int64_t)1 << 31) - 8, cols - 16};
  cumoe_buffer buffer;
  case_begin("[1, 2^31 + 4099]");
  if (cumoe_buffer_alloc(context, CUMOE_F16, 1, cols, NULL, &buffer) == CUMOE_ERR_OUT_OF_MEMORY) {
    case_skip("not enough memory");
    return;
  }
  cumoe_view_mut all = cumoe_buffer_view_mut(buffer);
  CHECK_OK(cumoe_fill(context, all, 0x3c, NULL));
  CHECK_OK(cumoe_scale(context, 2, cumoe_const(all), all, NULL));
  for (int i = 0; i < 4; i++) {
    tensor t = get_part(context, all, 0, places[i], 16);
    for (int j = 0; j < 16; j++)
      CHECK_MSG(((const uint16_t *)(const void *)t.data)[j] == 0x403c, "element %lld", (long long)places[i] + j);
  }
  CHECK_OK(cumoe_buffer_free(&buffer));
  case_end();
}

/* Rows further apart than 2^30 elements: what they hold is what a packed matrix gives. */
static void giant_ld(cumoe_context context, int32_t dtype, int64_t cols)
{
  const int64_t ld = ((int64_t)1 << 30) + 8;
  cumoe_buffer buffer;
  rng r = {3};
  case_begin("[4, %d] %s with ld 2^30 + 8", (int)cols, cumoe_dtype_name((cumoe_dtype)dtype));
  if (cumoe_buffer_alloc(context, (cumoe_dtype)dtype, 4, ld, NULL, &buffer) == CUMOE_ERR_OUT_OF_MEMORY) {
    case_skip("not enough memory");
    return;
  }
  cumoe_view_mut x, y;
  tensor data = tensor_normal(&r, dtype, 4, cols, 0, 1);
  CHECK_OK(cumoe_view_cols_mut(cumoe_buffer_view_mut(buffer), 0, cols, &x));
  CHECK_OK(cumoe_view_cols_mut(cumoe_buffer_view_mut(buffer), (cols + 15) / 8 * 8, cols, &y));
  device_set(context, x, &data);
  const cumoe_view packed = device_put(context, &data, 0);
  cumoe_view weight = packed;
  weight.rows = 1;
  for (op o = 0; o < OPS; o++) {
    cumoe_view_mut want = device_new(context, dtype, 4, cols, 0);
    CHECK_OK(cumoe_fill(context, y, 0xff, NULL));
    CHECK_OK(call(context, o, cumoe_const(x), cumoe_const(x), weight, y, NULL));
    CHECK_OK(call(context, o, packed, packed, weight, want, NULL));
    tensor a = device_get(context, cumoe_const(y)), b = device_get(context, cumoe_const(want));
    check_same(names[o], &a, &b);
  }
  CHECK_OK(cumoe_buffer_free(&buffer));
  case_end();
}

static void test_giants(cumoe_context context)
{
  if (!on_device(context)) {
    case_begin("giants");
    case_skip("run on CUDA instead");
  } else {
    giant_row(context);
    giant_ld(context, CUMOE_F16, 100);
    giant_ld(context, CUMOE_BF16, 5000);
    giant_ld(context, CUMOE_BF16, 30001);
  }
}

static const test_group groups[] = {
    ALONE("captured", test_capture, ON_CUDA),
    GROUP("overlaps", test_overlaps, ANYWHERE),
    GROUP("gaps", test_gaps, ANYWHERE),
    GROUP("the same bits", test_repeats, ANYWHERE),
    GROUP("offsets past 2^31", test_giants, ANYWHERE),
};
TEST_MAIN(groups)
