/*
 * Times the layer's backward by graph replay: the layers of shapes.def (those that always run), 2048, 8192 and 32768
 * tokens (up to --most), bf16, gradients of the layer's type, from the router on. TFLOPS: of the grouped products,
 * three times the forward's for both ways. `forward` is cumoe_moe_forward, `without weights` the backward without
 * gradients of weights, `dense` all six products of both ways by cuBLAS, of one expert with all rows: without routing.
 * bench/backward_peer.py times PyTorch's on the same shapes; right after or before, on the same GPU.
 *
 *   lib/bench/backward [--quick | --once] [--apart] [--whole] [--most TOKENS] [model ...]
 *   --quick: short samples; --whole: the layer's ways alone, not their parts, nor `dense`; --once: one call, for a
 *   profiler; --apart: replays one at a time, behind a pause, as the peers' are timed. Those in a row take 1 to 2 %
 *   more both ways, forward up to 12 %: the GPU's power is the limit.
 */
#include "bench.h"

#include <stdlib.h>
#include <string.h>

typedef enum part { BOTH, FORWARD, KEEP, BACKWARD, NO_WEIGHTS, GATE, DOWN, UP, DENSE, PARTS } part;
static const char *const part_names[PARTS] = {"both",          "forward",         "forward_keep",
                                              "backward",      "without weights", "gate_backward",
                                              "down_backward", "up_backward",     "dense"};

/* Up and down; of rows, twice, and of weights. */
enum { DENSE_PRODUCTS = 6 };

/* One layer, its gradients, and one call's operands. */
typedef struct training {
  bench *bench;
  store store;
  model model;
  cell cell;
  cumoe_weights gradients;
  cumoe_view d_out;
  bool once;  /* forward_keep and backward, eagerly: for a profiler */
  bool whole; /* without GATE and what follows it, nor NO_WEIGHTS */
  cumoe_view_mut kept, scratch, d_x, d_router, d_logits, d_pairs, gate_scratch, d_rows;
  dense_product dense[DENSE_PRODUCTS]; /* of the first expert's weights */
} training;

typedef struct job {
  training *training;
  part part;
} job;

static cumoe_moe_args args_of(const training *t, int32_t i)
{
  const cell *c = &t->cell;
  return (cumoe_moe_args){.size = sizeof(cumoe_moe_args),
                          .x = c->x[i],
                          .router_weight = t->model.router,
                          .select_bias = t->model.select_bias,
                          .out = c->out,
                          .workspace = c->workspace};
}

static cumoe_status run_forward(const training *t, int32_t i, cumoe_stream stream)
{
  const cumoe_moe_args a = args_of(t, i);
  return cumoe_moe_forward_keep(t->model.plan, t->model.weights, &a, t->kept, stream);
}

static cumoe_status run_backward(const training *t, int32_t i, bool weights, cumoe_stream stream)
{
  cumoe_moe_args a = args_of(t, i);
  const cumoe_moe_grads g = {.size = sizeof g,
                             .d_out = t->d_out,
                             .kept = cumoe_const(t->kept),
                             .d_weights = weights ? t->gradients : NULL,
                             .d_x = t->d_x,
                             .d_router_weight = weights ? t->d_router : (cumoe_view_mut){0},
                             .workspace = t->scratch};
  a.out = a.workspace = (cumoe_view_mut){0};
  return cumoe_moe_backward(t->model.plan, t->model.weights, &a, &g, stream);
}

static cumoe_status run_gate(const training *t, int32_t i, cumoe_stream stream)
{
  const cumoe_gate_backward_args a = {.size = sizeof a,
                                      .routing = t->model.shape->routing,
                                      .logits = cumoe_const(t->cell.logits[i]),
                                      .ids = cumoe_const(t->cell.ids[i]),
                                      .d_weights = cumoe_const(t->d_pairs),
                                      .d_logits = t->d_logits,
                                      .workspace = t->gate_scratch};
  return cumoe_gate_backward(t->bench->context, &a, stream);
}

/* d y and d z are what the cell has of y and h. */
static cumoe_status run_product(const training *t, int32_t i, bool down, cumoe_stream stream)
{
  const cell *c = &t->cell;
  const cumoe_view wide =
      cumoe_matrix(t->kept.data, CUMOE_BF16, c->rows, 2 * t->model.shape->inter, 2 * t->model.shape->inter);
  if (down) return cumoe_down_backward(t->model.plan, t->model.weights, cumoe_const(c->y), &c->route[i], c->h, stream);
  return cumoe_up_backward(t->model.plan, t->model.weights, wide, &c->route[i], t->d_rows, stream);
}

static cumoe_status run_dense(const training *t, int32_t i)
{
  const shape *s = t->model.shape;
  const int64_t expert = i % s->experts * (int64_t)s->hidden * s->inter * 2; /* bytes of a matrix of down */
  for (int p = 0; p < DENSE_PRODUCTS; ++p) {
    dense_product d = t->dense[p];
    if (d.b == t->model.gate_up.data.data) d.b = (const char *)d.b + 2 * expert;
    if (d.b == t->model.down.data.data) d.b = (const char *)d.b + expert;
    TRY(cublas_multiply(t->bench, &d));
  }
  return CUMOE_OK;
}

static cumoe_status call(void *user, int32_t i, cumoe_stream stream)
{
  const job *j = user;
  training *t = j->training;
  switch (j->part) {
  case FORWARD: return cell_forward(&t->cell, i, false, stream);
  case KEEP: return run_forward(t, i, stream);
  case BACKWARD: return run_backward(t, i, true, stream);
  case NO_WEIGHTS: return run_backward(t, i, false, stream);
  case BOTH: TRY(run_forward(t, i, stream)); return run_backward(t, i, true, stream);
  case GATE: return run_gate(t, i, stream);
  case DENSE: return run_dense(t, i); /* on the handle's stream, which is the bench's */
  default: return run_product(t, i, j->part == DOWN, stream);
  }
}

/* Bound like the weights: one below the other, gate and up in one matrix. */
static cumoe_status create_gradients(training *t)
{
  const shape *s = t->model.shape;
  const int64_t experts = s->experts, inter = s->inter, hidden = s->hidden;
  cumoe_view_mut up, down;
  TRY(take(t->bench, &t->store, CUMOE_BF16, experts * 2 * inter, hidden, &up));
  TRY(take(t->bench, &t->store, CUMOE_BF16, experts * hidden, inter, &down));
  const cumoe_weights_desc d = {.size = sizeof d,
                                .experts = s->experts,
                                .hidden = s->hidden,
                                .inter = s->inter,
                                .gate_order = CUMOE_GATE_UP_CONCAT,
                                .up_major = CUMOE_OUT_IN,
                                .down_major = CUMOE_OUT_IN,
                                .gate_up.data = cumoe_const(up),
                                .down.data = cumoe_const(down)};
  return cumoe_weights_bind(t->bench->context, &d, &t->gradients);
}

static cumoe_status create_room(training *t, int64_t tokens)
{
  bench *b = t->bench;
  const shape *s = t->model.shape;
  store *in = &t->cell.store;
  size_t kept = 0, scratch = 0, gate = 0;
  cumoe_view_mut d_out;
  TRY(cumoe_moe_kept(t->model.plan, tokens, &kept));
  TRY(cumoe_moe_backward_workspace(t->model.plan, tokens, 1, &scratch));
  TRY(cumoe_gate_backward_workspace(b->context, tokens, s->experts, s->top_k, &gate));
  TRY(take(b, in, CUMOE_U8, 1, (int64_t)kept, &t->kept));
  TRY(take(b, in, CUMOE_U8, 1, (int64_t)scratch, &t->scratch));
  TRY(take(b, in, CUMOE_U8, 1, (int64_t)gate, &t->gate_scratch));
  TRY(take(b, in, CUMOE_BF16, tokens, s->hidden, &d_out));
  TRY(take(b, in, CUMOE_BF16, tokens, s->hidden, &t->d_x));
  TRY(take(b, in, CUMOE_BF16, s->experts, s->hidden, &t->d_router));
  TRY(take(b, in, CUMOE_F32, tokens, s->experts, &t->d_logits));
  TRY(take(b, in, CUMOE_F32, tokens, s->top_k, &t->d_pairs));
  TRY(take(b, in, CUMOE_BF16, tokens * s->top_k, s->hidden, &t->d_rows));
  TRY(fill_noise(b, d_out, &b->unit));
  TRY(fill_noise(b, cumoe_matrix_mut(t->d_pairs.data, CUMOE_BF16, tokens, 2 * s->top_k, 2 * s->top_k), &b->small));
  t->d_out = cumoe_const(d_out);
  return CUMOE_OK;
}

/* Operands of their own, random: the power that a product draws, and so its speed, depends on them. */
static cumoe_status create_dense(training *t)
{
  bench *b = t->bench;
  store *in = &t->cell.store;
  const int64_t rows = t->cell.rows, hidden = t->model.shape->hidden, inter = t->model.shape->inter;
  const void *up = t->model.gate_up.data.data, *down = t->model.down.data.data;
  cumoe_view_mut x, z, h, wide, narrow, y, d_up, d_down;
  TRY(take(b, in, CUMOE_BF16, rows, hidden, &x));
  TRY(take(b, in, CUMOE_BF16, rows, 2 * inter, &z));
  TRY(take(b, in, CUMOE_BF16, rows, inter, &h));
  TRY(take(b, in, CUMOE_BF16, rows, hidden, &y));
  TRY(take(b, in, CUMOE_BF16, rows, 2 * inter, &wide));
  TRY(take(b, in, CUMOE_BF16, rows, inter, &narrow));
  TRY(take(b, in, CUMOE_BF16, 2 * inter, hidden, &d_up));
  TRY(take(b, in, CUMOE_BF16, hidden, inter, &d_down));
  TRY(fill_noise(b, x, &b->unit));
  TRY(fill_noise(b, z, &b->unit));
  TRY(fill_noise(b, h, &b->unit));
  const dense_product products[DENSE_PRODUCTS] = {{x.data, up, wide.data, rows, 2 * inter, hidden, false, true},
                                                  {h.data, down, y.data, rows, hidden, inter, false, true},
                                                  {x.data, down, narrow.data, rows, inter, hidden, false, false},
                                                  {z.data, up, y.data, rows, hidden, 2 * inter, false, false},
                                                  {x.data, h.data, d_down.data, hidden, inter, rows, true, false},
                                                  {z.data, x.data, d_up.data, 2 * inter, hidden, rows, true, false}};
  memcpy(t->dense, products, sizeof products);
  return CUMOE_OK;
}

static void print_parts(const training *t, int64_t tokens, const timing *timings)
{
  const shape *s = t->model.shape;
  const double flops = 6. * (double)tokens * s->top_k * s->hidden * s->inter;
  static const double times[PARTS] = {3, 1, 1, 2, 1, 0, 1. / 3, 2. / 3, 3};
  for (int p = 0; p < PARTS; ++p) {
    if (timings[p].median <= 0) continue;
    printf("%-16s %6lld %-16s %10.1f", s->name, (long long)tokens, part_names[p], timings[p].median);
    if (times[p] > 0) printf(" %8.1f TFLOPS", 1e-6 * times[p] * flops / timings[p].median);
    printf("\n");
  }
  fflush(stdout);
}

static cumoe_status run_cell(training *t, int64_t tokens)
{
  job jobs[PARTS];
  work works[PARTS] = {{0}};
  timing timings[PARTS];
  clock_state clocks = {0};
  TRY(cell_create(t->bench, &t->model, tokens, SPREAD_router, &t->cell));
  TRY(create_room(t, tokens));
  for (int32_t i = 0; i < t->cell.inputs; ++i) { /* ids, routes and logits of the stages */
    TRY(cell_forward(&t->cell, i, true, t->bench->stream));
    TRY(cumoe_router(t->bench->context, t->cell.x[i], t->model.router, (cumoe_view){0}, t->cell.logits[i],
                     t->bench->stream));
    TRY(cumoe_map(t->model.plan, cumoe_const(t->cell.ids[i]), (cumoe_view){0}, &t->cell.route[i], t->cell.map_workspace,
                  t->bench->stream));
  }
  if (t->once) return call(&(job){t, BOTH}, 0, t->bench->stream);
  const bool dense = t->bench->blas && create_dense(t) == CUMOE_OK; /* else there is no room */
  for (int p = 0; p < PARTS; ++p) {
    jobs[p] = (job){t, (part)p};
    const bool left = (p == DENSE && !dense) || (t->whole && (p == NO_WEIGHTS || p >= GATE));
    works[p] = (work){call, left ? NULL : &jobs[p], p == DENSE};
  }
  TRY(measure(t->bench, works, PARTS, t->cell.inputs, timings, &clocks));
  print_parts(t, tokens, timings);
  return CUMOE_OK;
}

static cumoe_status run_shape(bench *b, const shape *s, bool once, bool whole, int64_t most)
{
  static const int64_t tokens[] = {2048, 8192, 32768};
  training t = {.bench = b, .once = once, .whole = whole};
  cumoe_status status = model_create(b, s, &not_quantised, &t.model);
  if (status == CUMOE_OK) status = create_gradients(&t);
  for (int i = 0; i < 3 && tokens[i] <= most && status == CUMOE_OK; ++i) {
    status = run_cell(&t, tokens[i]);
    if (status == CUMOE_OK) status = cumoe_synchronize(b->context, b->stream);
    cell_destroy(&t.cell);
    if (i == 0 || status != CUMOE_ERR_OUT_OF_MEMORY) continue;
    printf("%-16s %6lld does not fit\n", s->name, (long long)tokens[i]);
    status = CUMOE_OK;
  }
  if (t.gradients) (void)cumoe_weights_destroy(t.gradients);
  model_destroy(&t.model);
  store_free(&t.store);
  return status;
}

static bool is_asked_for(int argc, char **argv, const char *name)
{
  int named = 0;
  for (int i = 1; i < argc; ++i) {
    if (!strcmp(argv[i], "--most")) ++i;
    if (i >= argc || argv[i][0] == '-') continue;
    if (!strcmp(argv[i], name)) return true;
    ++named;
  }
  return !named;
}

int main(int argc, char **argv)
{
  bench b = {.o = {.device = 0, .dtype = CUMOE_BF16}, .seed = 1};
  bool once = false, whole = false;
  int64_t most = INT64_MAX;
  for (int i = 1; i < argc; ++i) {
    if (!strcmp(argv[i], "--most") && i + 1 < argc) {
      most = atoll(argv[++i]);
      continue;
    }
    const bool is_once = !strcmp(argv[i], "--once"), is_quick = !strcmp(argv[i], "--quick"),
               is_apart = !strcmp(argv[i], "--apart"), is_whole = !strcmp(argv[i], "--whole");
    if (argv[i][0] == '-' && !is_once && !is_quick && !is_apart && !is_whole) {
      fprintf(stderr, "usage: backward [--quick | --once] [--apart] [--whole] [--most TOKENS] [model ...]\n");
      return 2;
    }
    once |= is_once;
    whole |= is_whole;
    b.o.quick |= is_quick;
    b.o.apart |= is_apart;
  }
  cumoe_status status = bench_open(&b);
  if (status == CUMOE_OK) status = make_noise(&b);
  if (status == CUMOE_OK && !once) b.blas = cublas_open(&b);
  if (status == CUMOE_OK && !once && !b.blas) printf("# no cuBLAS: %s\n", b.error);
  printf("%s: medians of replays, bf16\n%-16s %6s %-16s %10s\n", b.device.name, "model", "tokens", "part", "us");
  for (int32_t i = 0; i < shape_count() && status == CUMOE_OK; ++i) {
    const shape s = shape_at(i);
    if (s.when == SHAPE_always && is_asked_for(argc, argv, s.name)) status = run_shape(&b, &s, once, whole, most);
  }
  if (status != CUMOE_OK) fprintf(stderr, "backward: %s\n", failure_text(&b));
  cublas_close(b.blas);
  bench_close(&b);
  return status == CUMOE_OK ? 0 : 1;
}
