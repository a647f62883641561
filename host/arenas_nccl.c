/* What an engine's communicator gives arenas: letters between the ranks, and windows that all of them reach. */
#include "arenas.h"
#include "context.h"

/* ---- letters: a gather of bytes on a stream of their own ---- */

cumoe_status mail_open(arenas *a)
{
  TRY_CUDA(cudaStreamCreateWithFlags(&a->mail.stream, cudaStreamNonBlocking));
  TRY_CUDA(cudaMalloc(&a->mail.buffer, ((size_t)a->config.ranks + 1) * sizeof(letter)));
  return CUMOE_OK;
}

cumoe_status mail_close(arenas *a)
{
  cumoe_status first = CUMOE_OK;
  if (a->mail.buffer) DROP_CUDA(&first, cudaFree(a->mail.buffer));
  if (a->mail.stream) DROP_CUDA(&first, cudaStreamDestroy(a->mail.stream));
  a->mail.buffer = NULL;
  a->mail.stream = NULL;
  return first;
}

cumoe_status mail_gather(arenas *a, const letter *mine, letter *all)
{
  char *const send = a->mail.buffer, *const receive = send + sizeof *mine;
  const size_t bytes = sizeof *mine, all_bytes = (size_t)a->config.ranks * bytes;
  TRY_CUDA(cudaMemcpyAsync(send, mine, bytes, cudaMemcpyHostToDevice, a->mail.stream));
  TRY(nccl_status(&a->nccl, "ncclAllGather",
                  a->nccl.all_gather(send, receive, bytes, NCCL_UINT8, a->nccl.comm, a->mail.stream)));
  TRY(nccl_await(&a->nccl, "ncclAllGather", a->mail.stream, a->config.timeout_ns, &a->mail.stuck));
  TRY_CUDA(cudaMemcpyAsync(all, receive, all_bytes, cudaMemcpyDeviceToHost, a->mail.stream));
  TRY_CUDA(cudaStreamSynchronize(a->mail.stream));
  return CUMOE_OK;
}

/* ---- windows ---- */

/* NCCL wants whole pages. */
static uint64_t window_bytes(const arenas *a)
{
  const uint64_t page = 4096;
  return (a->bytes + page - 1) / page * page;
}

static cumoe_status window_make(arenas *a, arena_offer *mine)
{
  TRY(nccl_status(&a->nccl, "ncclMemAlloc", a->nccl.mem_alloc(&a->own, window_bytes(a))));
  mine->address = a->own;
  return fill_with_zeros(a->own, a->bytes);
}

/* Collective. Success without a window is NCCL's way to say that this communicator cannot have one. */
static cumoe_status window_open(arenas *a)
{
  const nccl *n = &a->nccl;
  TRY(nccl_status(n, "ncclCommWindowRegister",
                  n->window_register(n->comm, a->own, window_bytes(a), &a->window, NCCL_WINDOW_DEFAULT)));
  REQUIRE(a->window, CUMOE_ERR_NOT_SUPPORTED,
          "ncclCommWindowRegister gave no window: config.comm has no symmetric memory (all ranks must reach each other "
          "by P2P, NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE must not be 0)");
  for (int32_t r = 0; r < a->config.ranks; r++) {
    a->at[r] = r == a->config.rank ? a->own : NULL;
    if (a->at[r]) continue;
    TRY(nccl_status(n, "ncclGetPeerDevicePointer", n->peer_pointer(a->window, 0, r, &a->at[r])));
    REQUIRE(a->at[r], CUMOE_ERR_NOT_SUPPORTED, "rank %d's window is not memory that rank %d reaches", (int)r,
            (int)a->config.rank);
  }
  return CUMOE_OK;
}

/* A communicator that got stuck has been ended by the engine, and its windows with it. */
static void window_close(arenas *a, cumoe_status *first)
{
  const nccl *n = &a->nccl;
  if (a->window && !a->mail.stuck)
    AND_THEN(*first, nccl_status(n, "ncclCommWindowDeregister", n->window_deregister(n->comm, a->window)));
  a->window = NULL;
}

static void window_drop(arenas *a, cumoe_status *first)
{
  if (a->own) AND_THEN(*first, nccl_status(&a->nccl, "ncclMemFree", a->nccl.mem_free(a->own)));
}

const arena_wire window_wire = {"NCCL's windows", CUMOE_WIRE_WINDOW, window_make,
                                window_open,      window_close,      window_drop};
