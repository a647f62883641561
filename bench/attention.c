/*
 * Times attention and what training adds, by graph replay: causal attention of 32 heads of 128 columns that share 8 of
 * keys, over whole sequences and of one query a sequence beside a cache; its backward; AdamW, norms, loss. TFLOPS: of
 * what causal attention multiplies. TB/s: bytes that have to be read and written, over the time.
 * bench/attention_peer.py times PyTorch's on the same shapes; right after or before, on the same GPU.
 */
#include "bench.h"

enum { HEADS = 32, KV_HEADS = 8, DIM = 128, CACHE = 4096, MOST = 64, LONGEST = 16384, PLACES = 4 };
enum { COLUMNS = 4096, ROWS = 8192, VOCABULARY = 32768 };

typedef enum op { PREFILL, DECODE, BACKWARD, ADAMW, RMSNORM_BACKWARD, SILU_BACKWARD, CROSS_ENTROPY } op;
static const char *const op_names[] = {"prefill",          "decode",        "backward",     "adamw",
                                       "rmsnorm_backward", "silu_backward", "cross_entropy"};

typedef struct timed_item {
  op op;
  int64_t size; /* tokens; decode: sequences */
} timed_item;

static const timed_item items[] = {
    {PREFILL, 512},      {PREFILL, 2048}, {PREFILL, 8192},          {PREFILL, LONGEST},    {DECODE, 1},
    {DECODE, 8},         {DECODE, MOST},  {BACKWARD, 512},          {BACKWARD, 2048},      {BACKWARD, 8192},
    {BACKWARD, LONGEST}, {ADAMW, ROWS},   {RMSNORM_BACKWARD, ROWS}, {SILU_BACKWARD, ROWS}, {CROSS_ENTROPY, 2048}};
enum { ITEMS = sizeof items / sizeof *items };

typedef struct memory {
  cumoe_view_mut q[PLACES], out[PLACES], k[PLACES], v[PLACES], lse, delta, offsets, starts, small, workspace,
      written[3];                                /* like k: what a call writes over, so that it is read by no other */
  cumoe_view_mut out_of[PLACES], lse_of[PLACES]; /* of LONGEST tokens, so of all that are fewer, too */
} memory;

typedef struct job {
  bench *bench;
  memory *memory;
  timed_item item;
} job;

static cumoe_view_mut part(cumoe_view_mut of, cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  return cumoe_matrix_mut(of.data, dtype, rows, cols, cols);
}

static cumoe_attention_args attention_of(const job *j, int32_t i)
{
  const memory *m = j->memory;
  const bool decodes = j->item.op == DECODE;
  const int64_t queries = j->item.size, keys = decodes ? queries * CACHE : queries;
  cumoe_attention_args a = {
      .size = sizeof a, .flags = CUMOE_ATTENTION_CAUSAL, .heads = HEADS, .kv_heads = KV_HEADS, .head_dim = DIM};
  a.q = cumoe_const(part(m->q[i], CUMOE_BF16, queries, HEADS * DIM));
  a.k = cumoe_const(part(m->k[i], CUMOE_BF16, keys, KV_HEADS * DIM));
  a.v = cumoe_const(part(m->v[i], CUMOE_BF16, keys, KV_HEADS * DIM));
  a.out = part(m->out[i], CUMOE_BF16, queries, HEADS * DIM);
  a.lse = part(m->lse, CUMOE_F32, queries, HEADS);
  if (!decodes) return a;
  a.q_offsets = cumoe_vector(m->offsets.data, CUMOE_I32, queries + 1);
  a.k_offsets = cumoe_vector(m->starts.data, CUMOE_I32, queries + 1);
  return a;
}

static cumoe_status attend_backward(const job *j, int32_t i, cumoe_stream stream)
{
  const memory *m = j->memory;
  cumoe_attention_args a = attention_of(j, i);
  const int32_t other = (i + 1) % PLACES;
  a.out.data = m->out_of[i].data;
  a.lse.data = m->lse_of[i].data;
  cumoe_attention_backward_args b = {.size = sizeof b, .forward = &a};
  b.dout = cumoe_const(part(m->q[other], CUMOE_BF16, a.q.rows, a.q.cols));
  b.dq = part(m->written[2], CUMOE_BF16, a.q.rows, a.q.cols);
  b.dk = part(m->written[0], CUMOE_BF16, a.k.rows, a.k.cols);
  b.dv = part(m->written[1], CUMOE_BF16, a.k.rows, a.k.cols);
  b.delta = part(m->delta, CUMOE_F32, a.q.rows, HEADS);
  return cumoe_attention_backward(j->bench->context, &b, stream);
}

static cumoe_status step(const job *j, int32_t i, cumoe_stream stream)
{
  const memory *m = j->memory;
  const int64_t rows = j->item.size;
  cumoe_adamw_args a = {.size = sizeof a, .rate = 1e-4f, .decay = .1f};
  a.gradient = cumoe_const(part(m->q[i], CUMOE_BF16, rows, COLUMNS));
  a.step = cumoe_vector(m->starts.data, CUMOE_I64, 1);
  a.master = part(m->written[0], CUMOE_F32, rows, COLUMNS);
  a.first = part(m->written[1], CUMOE_F32, rows, COLUMNS);
  a.second = part(m->written[2], CUMOE_F32, rows, COLUMNS);
  a.weights = part(m->out[i], CUMOE_BF16, rows, COLUMNS);
  return cumoe_adamw(j->bench->context, &a, stream);
}

static cumoe_status norm_backward(const job *j, int32_t i, cumoe_stream stream)
{
  const memory *m = j->memory;
  const int64_t rows = j->item.size;
  cumoe_norm_backward_args a = {.size = sizeof a, .workspace = m->workspace};
  a.x = cumoe_const(part(m->q[i], CUMOE_BF16, rows, COLUMNS));
  a.weight = cumoe_vector(m->small.data, CUMOE_BF16, COLUMNS);
  a.dy = cumoe_const(part(m->k[i], CUMOE_BF16, rows, COLUMNS));
  a.dx = part(m->out[i], CUMOE_BF16, rows, COLUMNS);
  a.dweight = part(m->delta, CUMOE_F32, 1, COLUMNS);
  return cumoe_rmsnorm_backward(j->bench->context, &a, stream);
}

static cumoe_status loss(const job *j, int32_t i, cumoe_stream stream)
{
  const memory *m = j->memory;
  const int64_t rows = j->item.size;
  float *const numbers = m->delta.data;
  cumoe_cross_entropy_args a = {.size = sizeof a};
  a.logits = cumoe_const(part(m->k[i], CUMOE_BF16, rows, VOCABULARY));
  a.targets = cumoe_vector(m->offsets.data, CUMOE_I32, rows);
  a.loss = cumoe_vector_mut(numbers, CUMOE_F32, 1);
  a.counted = cumoe_vector_mut(numbers + 2, CUMOE_I64, 1);
  a.losses = cumoe_vector_mut(numbers + 4, CUMOE_F32, rows);
  a.dlogits = part(m->written[i % 3], CUMOE_BF16, rows, VOCABULARY);
  return cumoe_cross_entropy(j->bench->context, &a, stream);
}

static cumoe_status call(void *user, int32_t input, cumoe_stream stream)
{
  const job *j = user;
  const memory *m = j->memory;
  const cumoe_attention_args a = attention_of(j, input);
  const cumoe_view_mut y = part(m->out[input], CUMOE_BF16, ROWS, COLUMNS);
  switch (j->item.op) {
  case PREFILL:
  case DECODE: return cumoe_attention(j->bench->context, &a, stream);
  case BACKWARD: return attend_backward(j, input, stream);
  case ADAMW: return step(j, input, stream);
  case RMSNORM_BACKWARD: return norm_backward(j, input, stream);
  case SILU_BACKWARD:
    return cumoe_silu_backward(j->bench->context, cumoe_const(part(m->q[input], CUMOE_BF16, ROWS, COLUMNS)),
                               cumoe_const(part(m->k[input], CUMOE_BF16, ROWS, COLUMNS)), y, stream);
  default: return loss(j, input, stream);
  }
}

static void print_item(const timed_item *i, const timing *t)
{
  const double n = (double)i->size, cells = n * COLUMNS, pairs = n * n / 2 * HEADS * DIM;
  if (t->median <= 0) return;
  printf("%-16s %8lld %12.1f", op_names[i->op], (long long)i->size, t->median);
  switch (i->op) {
  case PREFILL: printf(" %9.1f TFLOPS\n", 4e-6 * pairs / t->median); break;
  case BACKWARD: printf(" %9.1f TFLOPS\n", 1e-5 * pairs / t->median); break;
  case DECODE: printf(" %9.3f TB/s\n", 1e-6 * n * CACHE * KV_HEADS * DIM * 4 / t->median); break;
  case ADAMW: printf(" %9.3f TB/s\n", 1e-6 * cells * 28 / t->median); break;
  case CROSS_ENTROPY: printf(" %9.3f TB/s\n", 1e-6 * n * VOCABULARY * 4 / t->median); break;
  default: printf(" %9.3f TB/s\n", 1e-6 * cells * 6 / t->median);
  }
}

static cumoe_status fill_indices(bench *b, memory *m)
{
  int32_t numbers[2][ROWS + 1];
  for (int32_t i = 0; i <= ROWS; i++) {
    numbers[0][i] = i;
    numbers[1][i] = i <= MOST ? i * CACHE : 0;
  }
  TRY(take(b, &b->store, CUMOE_I32, 1, ROWS + 1, &m->offsets));
  TRY(take(b, &b->store, CUMOE_I32, 1, ROWS + 1, &m->starts));
  TRY(cumoe_copy_from_host(b->context, m->offsets, numbers[0], sizeof numbers[0], NULL));
  TRY(cumoe_copy_from_host(b->context, m->starts, numbers[1], sizeof numbers[1], NULL));
  return cumoe_synchronize(b->context, NULL);
}

/* What the backward is told of the forward. */
static cumoe_status attend_all(bench *b, memory *m)
{
  for (int32_t i = 0; i < PLACES; ++i) {
    const job whole = {b, m, {PREFILL, LONGEST}};
    cumoe_attention_args a = attention_of(&whole, i);
    TRY(take(b, &b->store, CUMOE_BF16, LONGEST, HEADS * DIM, &m->out_of[i]));
    TRY(take(b, &b->store, CUMOE_F32, LONGEST, HEADS, &m->lse_of[i]));
    a.out = m->out_of[i];
    a.lse = m->lse_of[i];
    TRY(cumoe_attention(b->context, &a, NULL));
  }
  return CUMOE_OK;
}

static cumoe_status run(bench *b)
{
  memory m;
  job jobs[ITEMS];
  work works[ITEMS] = {{0}};
  timing timings[ITEMS];
  clock_state clocks = {0};
  size_t workspace = 0;
  TRY(make_noise(b));
  for (int32_t i = 0; i < PLACES; ++i) {
    TRY(take(b, &b->store, CUMOE_BF16, 1, (int64_t)LONGEST * HEADS * DIM, &m.q[i]));
    TRY(take(b, &b->store, CUMOE_BF16, 1, (int64_t)LONGEST * HEADS * DIM, &m.out[i]));
    TRY(take(b, &b->store, CUMOE_BF16, 1, (int64_t)MOST * CACHE * KV_HEADS * DIM, &m.k[i]));
    TRY(take(b, &b->store, CUMOE_BF16, 1, (int64_t)MOST * CACHE * KV_HEADS * DIM, &m.v[i]));
    TRY(fill_noise(b, m.q[i], &b->unit));
    TRY(fill_noise(b, m.k[i], &b->unit));
    TRY(fill_noise(b, m.v[i], &b->unit));
  }
  for (int32_t i = 0; i < 3; ++i) {
    TRY(take(b, &b->store, CUMOE_BF16, 1, (int64_t)MOST * CACHE * KV_HEADS * DIM, &m.written[i]));
    TRY(fill_noise(b, m.written[i], &b->unit));
  }
  TRY(take(b, &b->store, CUMOE_F32, 1, (int64_t)LONGEST * HEADS, &m.lse));
  TRY(take(b, &b->store, CUMOE_F32, 1, (int64_t)LONGEST * HEADS, &m.delta));
  TRY(take(b, &b->store, CUMOE_BF16, 1, COLUMNS, &m.small));
  TRY(fill_noise(b, m.small, &b->unit));
  TRY(cumoe_norm_backward_workspace(b->context, ROWS, COLUMNS, &workspace));
  TRY(take(b, &b->store, CUMOE_U8, 1, (int64_t)workspace, &m.workspace)); /* cross-entropy needs less */
  TRY(fill_indices(b, &m));
  TRY(attend_all(b, &m));
  for (int32_t i = 0; i < ITEMS; ++i) {
    jobs[i] = (job){b, &m, items[i]};
    works[i] = (work){call, &jobs[i], false};
  }
  printf("%s: medians of replays, bf16\n%-16s %8s %12s\n", b->device.name, "operation", "size", "us");
  fflush(stdout);
  TRY(measure(b, works, ITEMS, PLACES, timings, &clocks));
  for (int32_t i = 0; i < ITEMS; ++i) print_item(&items[i], &timings[i]);
  return CUMOE_OK;
}

int main(int argc, char **argv)
{
  return bench_main(argc, argv, "attention", 0, run);
}
