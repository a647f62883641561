/*
 * How a rank reaches the arenas. On the CPU device: memory and atomics, by the caller's thread. On a GPU: kernels in
 * the caller's stream; what the host says, in create, abort and destroy, it copies on a stream of the group's own,
 * which waits for no kernel.
 */
#include "context.h"
#include "ep.h"
#include "launch.h"
#include "../kernels/cpu/clock.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- bytes and words ---- */

static cumoe_status copy(const group *g, void *to, const void *from, size_t bytes)
{
  TRY_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, g->stream));
  TRY_CUDA(cudaStreamSynchronize(g->stream));
  return CUMOE_OK;
}

cumoe_status wire_write(const group *g, int32_t rank, uint64_t at, const void *from, size_t bytes)
{
  if (!on_cpu(g->context)) return copy(g, g->arenas[rank] + at, from, bytes);
  memcpy(g->arenas[rank] + at, from, bytes);
  return CUMOE_OK;
}

cumoe_status wire_read(const group *g, uint64_t at, void *to, size_t bytes)
{
  if (!on_cpu(g->context)) return copy(g, to, g->arena + at, bytes);
  memcpy(to, g->arena + at, bytes);
  return CUMOE_OK;
}

cumoe_status wire_store(const group *g, int32_t rank, uint64_t at, uint64_t word)
{
  if (!on_cpu(g->context)) return copy(g, g->arenas[rank] + at, &word, sizeof word);
  cpu_ep_store(g->arenas[rank] + at, word);
  return CUMOE_OK;
}

cumoe_status wire_load(const group *g, uint64_t at, uint64_t *word)
{
  if (!on_cpu(g->context)) return copy(g, word, g->arena + at, sizeof *word);
  *word = cpu_ep_load(g->arena + at);
  return CUMOE_OK;
}

/* The host's own word, the first one. */
static void keep(const group *g, uint64_t word)
{
  uint64_t none = 0, *given_up = (uint64_t *)(uintptr_t)&g->given_up;
  (void)__atomic_compare_exchange_n(given_up, &none, word, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

cumoe_status wire_load_abort(const group *g, uint64_t *word)
{
  *word = __atomic_load_n(&g->given_up, __ATOMIC_ACQUIRE);
  if (*word == 0) TRY(wire_load(g, g->at.abort, word));
  *word = ep_heeded(&g->ways, *word);
  if (g->staged && *word) keep(g, *word); /* later calls leave the communicator alone, which may have been ended */
  return CUMOE_OK;
}

cumoe_status wire_wait(const group *g, uint64_t at, uint32_t least, bool heeds_abort, uint64_t *end)
{
  const int64_t begin = now_ns();
  const struct timespec nap = {.tv_nsec = 50000};
  uint64_t word;
  for (;; nanosleep(&nap, NULL)) {
    *end = 0;
    TRY(wire_load(g, at, &word));
    if ((int32_t)((uint32_t)(word >> 32) - least) >= 0) return CUMOE_OK;
    if (heeds_abort) TRY(wire_load_abort(g, end));
    if (*end) return CUMOE_OK;
    *end = EP_LATE;
    if (g->staged || now_ns() - begin > timeout_of(g)) return CUMOE_OK; /* staged: what was sent has come */
  }
}

static void store_aborts(const group *g, uint64_t word)
{
  uint64_t own = 0;
  for (int32_t r = 0; r < g->shape.ranks; r++)
    if (r != g->rank || (wire_load(g, g->at.abort, &own) == CUMOE_OK && !ep_heeded(&g->ways, own)))
      CUMOE_IGNORE(wire_store(g, r, g->at.abort, word));
}

/* Whoever gives up has a reason, and a text: whether others could be told does not change it. */
void wire_give_up(const group *g, uint64_t word)
{
  error_text why;
  save_error(&why);
  if (g->staged) /* others cannot be told; in create its stream may wait for NCCL */
    keep(g, word);
  else if (on_cpu(g->context))
    cpu_ep_give_up(g->arenas, &g->at, &g->shape, &g->ways, g->rank, word);
  else
    store_aborts(g, word);
  restore_error(&why);
}

/* ---- kernels ---- */

extern const unsigned char cumoe_image_exchange[];
#ifdef CUMOE_SM90
extern const unsigned char cumoe_image_exchange_few_sm90[];
static const unsigned char *const few_image = cumoe_image_exchange_few_sm90;
#else
static const unsigned char *const few_image = NULL;
#endif

/* A kernel for each type of y, or of y and out, where it computes. */
static void name_kernels(group *g)
{
  static const char *const names[MOVES] = {"count",  "slots", "put", "gate_put", "wait_tokens", "take_ids",
                                           "answer", "",      "",    "",         "wait_answers"};
  const char *in = cumoe_dtype_name((cumoe_dtype)g->plan.desc.dtype),
             *out = cumoe_dtype_name((cumoe_dtype)g->plan.desc.out_dtype);
  for (int which = 0; which < MOVES; which++) {
    char *name = g->names[which];
    const size_t room = sizeof g->names[which];
    if (which == MOVE_FEW)
      (void)snprintf(name, room, "cumoe_ep_few_%s", in);
    else if (which == MOVE_RETURN)
      (void)snprintf(name, room, "cumoe_ep_return_%s", in);
    else if (which == MOVE_FINISH)
      (void)snprintf(name, room, "cumoe_ep_finish_%s_%s", in, out);
    else
      (void)snprintf(name, room, "cumoe_ep_%s", names[which]);
  }
}

static cumoe_status find_kernel(group *g, cudaLibrary_t library, move which)
{
  struct cudaFuncAttributes facts;
  TRY_CUDA(cudaLibraryGetKernel(&g->kernels[which], library, g->names[which]));
  TRY_CUDA(cudaFuncGetAttributes(&facts, (const void *)g->kernels[which])); /* loads it now, not in a capture */
  g->early = facts.ptxVersion >= 90 && facts.binaryVersion >= 90;           /* as prepare_kernel (context.c) */
  return CUMOE_OK;
}

/* The row of few tokens of dense weights; of other formats few's rows are for one token. */
static int32_t find_few_row(const group *g)
{
  const int32_t dtype = g->plan.desc.dtype;
  for (int32_t i = 0; i < variant_count && few_image && g->shape.packets > 0; i++) {
    const variant *v = &variants[i];
    if (v->op == OP_few_up && v->form == FORM_few && v->bm == FEW_TOKENS && v->major == MAJOR_K && v->x == dtype &&
        v->format == (int)dense_format(dtype) && v->y == dtype && runs_on(&g->context->machine, v))
      return i + 1;
  }
  return 0;
}

static cumoe_status load_library(cudaLibrary_t *library, const unsigned char *image)
{
  enum cudaLibraryOption option = cudaLibraryBinaryIsPreserved;
  int yes = 1;
  void *value = &yes;
  TRY_CUDA(cudaLibraryLoadData(library, image, NULL, NULL, 0, &option, &value, 1));
  return CUMOE_OK;
}

static cumoe_status open_few(group *g)
{
  g->few_row = find_few_row(g);
  if (!g->few_row) return CUMOE_OK;
  TRY(load_library(&g->few_library, few_image));
  TRY(find_kernel(g, g->few_library, MOVE_FEW));
  return driver_allow_smem(g->context, g->kernels[MOVE_FEW], variants[g->few_row - 1].smem);
}

/* Kernels store to other GPUs' memory: this device has to reach it. */
static cumoe_status reach(group *g, int32_t rank)
{
  struct cudaPointerAttributes facts;
  int can = 0;
  TRY_CUDA(cudaPointerGetAttributes(&facts, g->arenas[rank]));
  REQUIRE(facts.type == cudaMemoryTypeDevice, CUMOE_ERR_WRONG_DEVICE,
          "config.arenas[%d] is %p, not memory of a GPU that this process knows", (int)rank, (void *)g->arenas[rank]);
  if (facts.device == g->context->device) {
    g->here++;
    return CUMOE_OK;
  }
  TRY_CUDA(cudaDeviceCanAccessPeer(&can, g->context->device, facts.device));
  REQUIRE(can, CUMOE_ERR_NOT_SUPPORTED, "config.arenas[%d] is on CUDA device %d, which device %d cannot reach",
          (int)rank, facts.device, (int)g->context->device);
  const cudaError_t error = cudaDeviceEnablePeerAccess(facts.device, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled)
    clear_cuda_error();
  else
    TRY_CUDA(error);
  return CUMOE_OK;
}

/* Of ranks that share a GPU, waits of one may lie in a hardware queue ahead of what another waits for. */
/* Rows and sums beside products leave these most of the GPU's SMs; of few there would be none. */
static bool has_sides(const group *g)
{
  return !g->staged && g->here == 1 && g->shape.ranks > 1 && !g->shape.exact &&
         g->context->machine.sms >= 2 * EP_ASIDE_RETURN_SMS;
}

static cumoe_status open_sides(group *g)
{
  if (!has_sides(g)) return CUMOE_OK;
  for (int32_t l = 0; l < g->shape.lanes; l++) {
    TRY_CUDA(cudaStreamCreateWithFlags(&g->side[l], cudaStreamNonBlocking));
    TRY_CUDA(cudaEventCreateWithFlags(&g->turn[l], cudaEventDisableTiming));
  }
  g->aside_tokens = EP_ASIDE_TOKENS;
  const int64_t inter = g->plan.desc.inter * (int64_t)g->shape.top_k;
  if (inter <= EP_OWN_INTER * (int64_t)(g->shape.ranks - 1)) g->own_rows = EP_OWN_ROWS;
  return CUMOE_OK;
}

static void close_sides(group *g, cumoe_status *first)
{
  for (int32_t l = 0; l < g->shape.lanes; l++) {
    if (g->turn[l]) DROP_CUDA(first, cudaEventDestroy(g->turn[l]));
    if (g->side[l]) DROP_CUDA(first, cudaStreamDestroy(g->side[l]));
    g->turn[l] = NULL, g->side[l] = NULL;
  }
}

static cumoe_status follow(const group *g, int32_t lane, cumoe_stream waiter, cumoe_stream on)
{
  TRY_CUDA(cudaEventRecord(g->turn[lane], on));
  TRY_CUDA(cudaStreamWaitEvent(waiter, g->turn[lane], 0));
  return CUMOE_OK;
}

cumoe_status wire_follow(const group *g, int32_t lane, cumoe_stream waiter, cumoe_stream on)
{
  ON_DEVICE(g->context, follow(g, lane, waiter, on));
}

cumoe_status wire_open(group *g)
{
  if (on_cpu(g->context)) return CUMOE_OK;
  for (int32_t r = 0; !g->staged && r < g->shape.ranks; r++) TRY(reach(g, r));
  TRY_CUDA(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking));
  TRY(load_library(&g->library, cumoe_image_exchange));
  name_kernels(g);
  for (move which = 0; which < MOVES; which++)
    if (which != MOVE_FEW) TRY(find_kernel(g, g->library, which));
  TRY(open_sides(g));
  return open_few(g);
}

cumoe_status wire_close(group *g)
{
  cumoe_status first = CUMOE_OK;
  if (g->library) DROP_CUDA(&first, cudaLibraryUnload(g->library));
  if (g->few_library) DROP_CUDA(&first, cudaLibraryUnload(g->few_library));
  if (g->stream) DROP_CUDA(&first, cudaStreamDestroy(g->stream));
  close_sides(g, &first);
  g->library = g->few_library = NULL;
  g->stream = NULL;
  return first;
}

/* ---- moves ---- */

static uint64_t move_on_cpu(move which, const ep_args *a, const ep_ways *ways)
{
  switch (which) {
  case MOVE_PUT: cpu_ep_put(a, ways); return 0;
  case MOVE_ANSWER: cpu_ep_answer(a, ways); return 0;
  case MOVE_WAIT_TOKENS: return cpu_ep_wait_tokens(a, ways);
  default: return cpu_ep_wait_answers(a, ways);
  }
}

static int64_t parts_of_row(const ep_shape *s)
{
  return ((int64_t)s->hidden * s->element + EP_PART_BYTES - 1) / EP_PART_BYTES;
}

static int64_t between(int64_t n, int64_t least, int64_t most)
{
  return n > most ? most : n < least ? least : n;
}

/* CTAs along x for so many rows, parts of a row along y; of put those that fill behind them. Slots alone have no
 * parts. */
static launch_shape grid_of_rows(const ep_shape *s, int64_t rows, ep_args *a)
{
  const int64_t all = a->sms ? a->sms : EP_MOVE_CTAS;
  const int64_t parts = a->puts == EP_PUTS_SLOTS ? 1 : parts_of_row(s),
                fillers = a->fill_vectors ? (EP_FILL_CTAS + parts - 1) / parts : 0;
  a->movers = (int32_t)between((rows + EP_MOVE_ROWS - 1) / EP_MOVE_ROWS, 1, between(all / parts, 1, EP_MOVE_CTAS));
  return (launch_shape){.grid = {(unsigned)(a->movers + fillers), (unsigned)parts, 1},
                        .block = {EP_MOVE_THREADS, 1, 1}};
}

/* Four ids a thread at a time. */
static launch_shape grid_of_ids(const ep_shape *s)
{
  const int64_t ids = s->capacity * s->ranks * s->top_k, each = 4 * EP_MOVE_THREADS;
  return (launch_shape){.grid = {(unsigned)between((ids + each - 1) / each, 1, EP_MOVE_CTAS), 1, 1},
                        .block = {EP_MOVE_THREADS, 1, 1}};
}

/* CTAs that go through the parts of combine's work: slices of columns as `slicing` (kernels/ep/answer.cuh) and combine
 * have them. Any number of CTAs goes through all parts; another one only takes longer. */
static launch_shape grid_of_return(const group *g, ep_args *a)
{
  const ep_shape *s = &a->shape;
  const int64_t each = COMBINE_TOKENS(s->top_k), of_warp = a->packets == EP_LINED ? EP_LINE_VECTORS : 32;
  const int64_t columns = EP_RETURN_THREADS / 32 * of_warp * 16 / s->element;
  const int64_t all = s->ranks * ((s->capacity + each - 1) / each) * ((s->hidden + columns - 1) / columns);
  const int64_t sms = a->sms ? a->sms : g->context->machine.sms;
  a->movers = (int32_t)between(all, 1, EP_RETURN_RESIDENT * sms);
  return (launch_shape){.grid = {(unsigned)a->movers, 1, 1}, .block = {EP_RETURN_THREADS, 1, 1}};
}

/* By packets a thread for 16 bytes of each row to answer and of each sum, by lines a warp for 30 times as much of each
 * sum, but so few CTAs that all may wait, also those of ranks that share a GPU; and one for flags. */
static launch_shape grid_of_finish(const group *g, ep_args *a)
{
  const ep_shape *s = &a->shape;
  const bool lined = a->packets == EP_LINED;
  const int64_t items = s->packets * (int64_t)s->ranks * s->hidden * s->element / 16;
  const int64_t threads = lined ? s->packets * (ep_line_row(s) / 16) : items;
  const int64_t most = lined ? between(EP_FINISH_CTAS / between(g->here, 1, s->ranks), EP_FINISH_LEAST, EP_FINISH_LINED)
                             : between(EP_FINISH_CTAS / s->ranks, EP_FINISH_LEAST, EP_FINISH_MOST);
  a->movers = (int32_t)between((threads + EP_MOVE_THREADS - 1) / EP_MOVE_THREADS, 1, most);
  return (launch_shape){.grid = {(unsigned)a->movers + 1, 1, 1}, .block = {EP_MOVE_THREADS, 1, 1}};
}

static launch_shape one_cta(int32_t threads)
{
  const unsigned whole_warps = (unsigned)(threads + 31) / 32 * 32;
  return (launch_shape){.grid = {1, 1, 1},
                        .block = {whole_warps < EP_WAIT_THREADS ? whole_warps : EP_WAIT_THREADS, 1, 1}};
}

/* As the row's; a->movers CTAs, as its plan says. */
static launch_shape shape_of_few(const group *g, const ep_args *a)
{
  const variant *v = &variants[g->few_row - 1];
  return (launch_shape){
      .grid = {(unsigned)a->movers, 1, 1}, .block = {(unsigned)v->threads, 1, 1}, .smem = (size_t)v->smem};
}

static launch_shape shape_of_move(const group *g, move which, ep_args *a)
{
  const ep_shape *s = &a->shape;
  switch (which) {
  case MOVE_COUNT: return one_cta(1);
  case MOVE_PUT:
  case MOVE_GATE_PUT: return grid_of_rows(s, a->tokens.count, a);
  case MOVE_TAKE_IDS: return grid_of_ids(s);
  case MOVE_ANSWER: return grid_of_rows(s, s->capacity * s->ranks * ep_answers(s), a);
  case MOVE_FEW: return shape_of_few(g, a);
  case MOVE_RETURN: return grid_of_return(g, a);
  case MOVE_FINISH: return grid_of_finish(g, a);
  case MOVE_WAIT_TOKENS: return one_cta(EP_MOVE_THREADS);
  case MOVE_WAIT_ANSWERS: return one_cta(s->ranks * EP_FLAG_WORDS + 1); /* and a thread for the abort word */
  default: return one_cta(EP_WAIT_THREADS);
  }
}

static cumoe_status launch_move(const group *g, move which, ep_args a, const void *of, cumoe_stream stream)
{
  launch_shape shape = shape_of_move(g, which, &a);
  const bool waits = which == MOVE_WAIT_TOKENS || which == MOVE_WAIT_ANSWERS;
  shape.early = g->early && !a.late && !(g->staged && waits); /* what NCCL does ahead has to have ended */
  void *parameters[] = {of ? (void *)(uintptr_t)of : &a, &a};
  ON_DEVICE(g->context, launch_kernel(g->kernels[which], g->names[which], &shape, parameters, stream));
}

static cumoe_status move_here(const group *g, move which, const ep_args *a, const void *of, cumoe_stream stream)
{
  if (!on_cpu(g->context)) return launch_move(g, which, *a, of, stream);
  uint64_t end = 0;
  if (which == MOVE_PUT) TRY(wire_load_abort(g, &end));
  if (end == 0) end = move_on_cpu(which, a, &g->ways);
  return end ? ep_explain(g, end) : CUMOE_OK;
}

static cumoe_status carry_entered(const group *g, uint64_t pieces, cumoe_stream stream)
{
  ON_DEVICE(g->context, staged_carry(g, pieces, stream));
}

/* The one that failed to send is out of step with the others for good. */
static cumoe_status carry(const group *g, uint64_t pieces, int phase, cumoe_stream stream)
{
  const cumoe_status status = carry_entered(g, pieces, stream);
  if (status != CUMOE_OK) wire_give_up(g, ep_abort_word(EP_FAILED, phase, g->rank, g->rank));
  return status;
}

static cumoe_status staged_move(const group *g, move which, const ep_args *a, const void *of, cumoe_stream stream)
{
  const int32_t tier = ep_tier_for(&g->tiers, a->shape.capacity);
  const uint64_t slots = ep_piece(tier, SEGMENT_IDS) | ep_piece(tier, SEGMENT_WEIGHTS);
  const uint64_t tokens = (uint64_t)1 << PIECE_IN | ep_piece(tier, SEGMENT_X) | slots;
  const uint64_t answers = (uint64_t)1 << PIECE_BACK | ep_piece(tier, SEGMENT_Y);
  const uint64_t end = __atomic_load_n(&g->given_up, __ATOMIC_ACQUIRE);
  ep_args own = *a;
  if (end) return ep_explain(g, end);
  staged_arguments(g, which, tier, &own);
  TRY(move_here(g, which, &own, of, stream));
  if (ep_puts(which)) return carry(g, tokens, EP_DISPATCH, stream);
  return ep_answers_by(which) ? carry(g, answers, EP_RETURN, stream) : CUMOE_OK;
}

cumoe_status wire_move(const group *g, move which, const ep_args *a, const void *of, cumoe_stream stream)
{
  return g->staged ? staged_move(g, which, a, of, stream) : move_here(g, which, a, of, stream);
}
