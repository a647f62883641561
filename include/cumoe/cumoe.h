/*
 * cumoe: Mixture-of-Experts layers for inference engines, in C.
 *
 * What it computes, for each token t of x [T, H]:
 *
 *   logits[t]      = x[t] Wr^T (+ br)                                        router   [T, E]
 *   ids, weights   = the k best experts of token t and their gate weights     gate     [T, k]
 *   rows           = the (token, slot) pairs ordered by expert                map      [R]
 *   h[r]           = act(x[token(r)] Wgate[e]^T) * (x[token(r)] Wup[e]^T)      up       [R, I]
 *   y[r]           = h[r] Wdown[e]^T                                          down     [R, H]
 *   out[t]         = sum over slots j of weights[t, j] * y[row(t, j)] (+ ...)  combine  [T, H]
 *
 * The letters, used everywhere: T tokens, H hidden, I inter (columns of an expert's intermediate), E experts,
 * k slots per token (top-k), R = T k rows at most. A pair is a (token, slot), numbered token * k + slot. A row is
 * a pair after sorting by expert.
 *
 * Order of calls:
 *
 *   cumoe_context_create    once per device                                       cumoe/context.h
 *   cumoe_plan_create       once per layer shape: meaning, shapes, limits           cumoe/moe.h
 *   cumoe_weights_bind      once per layer: where its weights lie, no copy          cumoe/moe.h
 *   cumoe_plan_workspace    bytes of scratch memory for T tokens                    cumoe/moe.h
 *   cumoe_moe_forward       per step: the whole layer on a stream                   cumoe/moe.h
 *   cumoe_router, _gate ... the stages one by one                                   cumoe/stages.h
 *   cumoe_masked_forward    experts alone, rows as [E, capacity, H]                 cumoe/stages.h
 *   cumoe_ep_forward        the layer with its experts on several ranks             cumoe/ep.h
 *   cumoe_arenas_create     the memory that these ranks share                       cumoe/arenas.h
 *   cumoe_quantize_weights  weights of 8 or 4 bits (cumoe/format.h) out of others   cumoe/quantize.h
 *   cumoe_moe_backward      gradients of the layer, of what forward_keep kept       cumoe/backward.h
 *   cumoe_attention ...     attention and rotary embedding                          cumoe/attention.h
 *   cumoe_adamw ...         what training needs around the layer                    cumoe/train.h
 *
 * Contract of every function that launches work (forward and all stages):
 *   - work is ordered on the given stream; nothing is allocated, nothing waits, no hidden stream is used. Calls of a
 *     group of ranks differ (cumoe/ep.h): kernels, on the CPU device calls, wait for the other ranks, with a limit of
 *     time, and many tokens have a stream of the group's beside the given one, which waits for it;
 *   - it may be the first call inside a CUDA graph capture, and a graph may be replayed after device data
 *     (ids, counts, weights, activations) changed. Kernels of attention, training and the layer's backward are loaded
 *     by the first call that needs them: some milliseconds, also in a capture;
 *   - bad arguments that the host can see are refused before anything happens: a status, a text from
 *     cumoe_last_error() that names the argument, its value and the limit, no CUDA call, no output touched;
 *   - bad device data (expert ids out of range, NaN logits, ...) never faults: see cumoe_fault_read();
 *   - T = 0 is legal: CUMOE_OK and nothing is launched, but that a backward's sums over tokens become zeros. The
 *     operand that T is taken from (x, ids) says its cols and dtype without rows, too: one that is all zero was
 *     forgotten, and is refused by name;
 *   - results are bitwise repeatable for the same inputs, library and GPU model;
 *   - a NaN or Inf in one token's row changes that token's output only;
 *   - structs and views are read during the call and may be reused when it returns; device memory must
 *     stay valid until the stream has passed the call;
 *   - a profiler that reads NVTX sees the call as a range of its name in the domain "cumoe"; without one this costs a
 *     branch. It is looked for when the first context is created.
 *
 * CUDA's last error of the calling thread is the caller's. One that was pending stays so through every cumoe call in
 * which no call of the runtime fails, and is never told as cumoe's. (Such failures are: a query of work that is under
 * way, a look-up of what a module does not have.) With none pending, a call of cumoe's leaves none, but for one that
 * has ended the device.
 *
 * Structs. What may be left out may be zero, for a default; sizes, counts and types are said, and so are layout enums,
 * where zero is an error: no layout is ever guessed. Three kinds, so that a program that was built against older
 * headers goes on working with a newer library:
 *   - one that a call takes or fills by pointer begins with its size, set by the caller (.size = sizeof(the type)). Of
 *     a shorter, older one the library reads or fills what is there; what a longer, newer one has more must be zero
 *     (NOT_SUPPORTED), and is filled with zeros. The size itself is never changed;
 *   - one that lies in another by value (cumoe_routing, cumoe_projection) has no size but a reserve, which must be zero
 *     (NOT_SUPPORTED); all of it zero means absent where it is optional;
 *   - views, handles, cumoe_arg and cumoe_image never change.
 */
#ifndef CUMOE_H
#define CUMOE_H

#include "types.h"
#include "context.h"
#include "pool.h"
#include "buffer.h"
#include "debug.h"
#include "moe.h"
#include "stages.h"
#include "quantize.h"
#include "stream.h"
#include "kernel.h"
#include "ops.h"
#include "ep.h"
#include "arenas.h"
#include "backward.h"
#include "train.h"
#include "attention.h"

#endif
