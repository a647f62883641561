/* How failures are reported: a status, a text a thread, CUDA's own errors. */
#ifndef CUMOE_HOST_STATUS_H
#define CUMOE_HOST_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "range.h"
#include "runtime.h"
#include "../include/cumoe/types.h"

struct context;

/* Names the public call that runs on this thread, for error texts. Every public function starts with it. */
void begin_call(const char *name);

/* The same, and the stream that its operands will be used on: at debug level 1, check_owner compares that with their
 * home stream. Profilers see a range until the call returns. running_call tells the call's name, and false if it has no
 * stream. */
void name_call_on(const char *name, cumoe_stream stream);
#define begin_call_on(name, stream)                                                                                    \
  name_call_on(name, stream);                                                                                          \
  const bool range_pushed_ __attribute__((cleanup(range_pop), unused)) = range_push(name)
bool running_call(const char **name, cumoe_stream *stream);

/* Records "<call>: <text>" for cumoe_last_error and returns status. */
cumoe_status fail(cumoe_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* CUDA's own name and text; classifies out of memory, no device, old driver, sticky errors, capture. Takes back the
 * last error that CUDA keeps for the thread, unless the caller had one pending when the device was entered. */
cumoe_status fail_cuda(cudaError_t error, const char *expression);

/* Before the first CUDA call of a public call that enters no device (enter_device does it): what is pending now is
 * the caller's. clear_cuda_error takes back one of ours that is no failure. */
void note_cuda_error(void);
void clear_cuda_error(void);

/* Whose device this thread's CUDA calls are for, from now on; returns whose they were for. A sticky error makes that
 * context lost: no later call reaches the device, each answers CUDA_STICKY with the first cause (check_alive). */
struct context *run_for(struct context *context);
cumoe_status check_alive(struct context *context);

/* For a call that may succeed after a failure inside it: a success leaves cumoe_last_error alone. */
typedef struct error_text {
  char text[1024];
} error_text;
void save_error(error_text *saved);
void restore_error(const error_text *saved);

/* An element type for texts: "bf16", "unset", "77 (no cumoe_dtype)". */
typedef struct dtype_words {
  char text[32];
} dtype_words;
dtype_words say_dtype(int32_t dtype);

void log_message(cumoe_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

void forget_log_readers(void); /* in the child of a fork() */

#define TRY(expression)                                                                                                \
  do {                                                                                                                 \
    cumoe_status try_status_ = (expression);                                                                           \
    if (try_status_ != CUMOE_OK) return try_status_;                                                                   \
  } while (0)

#define REQUIRE(condition, status, ...)                                                                                \
  do {                                                                                                                 \
    if (!(condition)) return fail(status, __VA_ARGS__);                                                                \
  } while (0)

#define TRY_CUDA(expression)                                                                                           \
  do {                                                                                                                 \
    cudaError_t try_error_ = (expression);                                                                             \
    if (try_error_ != cudaSuccess) return fail_cuda(try_error_, #expression);                                          \
  } while (0)

/* One CUDA call where a status is wanted, as ON_DEVICE does. */
cumoe_status cuda_status(cudaError_t error, const char *expression);
#define CUDA_STATUS(call) cuda_status((call), #call)

/* For what is given back whatever happens: the first failure is the one to report. */
void note_failure(cumoe_status *first, cudaError_t error, const char *call);
#define DROP_CUDA(first, call) note_failure((first), (call), #call)

/* Does `next` whatever `status` is, and keeps the first failure and its text. */
#define AND_THEN(status, next)                                                                                         \
  do {                                                                                                                 \
    error_text and_then_text_;                                                                                         \
    save_error(&and_then_text_);                                                                                       \
    const cumoe_status and_then_status_ = (next);                                                                      \
    if ((status) != CUMOE_OK)                                                                                          \
      restore_error(&and_then_text_);                                                                                  \
    else                                                                                                               \
      (status) = and_then_status_;                                                                                     \
  } while (0)

#endif
