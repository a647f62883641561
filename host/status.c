/* Status codes, error text, log, element types: everything that needs no context. */
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "status.h"
#include "context.h"

/* The Makefile states the architectures it compiles for. */
#ifndef CUMOE_ARCHS
#define CUMOE_ARCHS "none stated"
#endif

#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

static _Thread_local struct {
  const char *call;    /* public function that runs */
  cumoe_stream stream; /* that it works on */
  bool on_stream;      /* if it does */
  cudaError_t pending; /* CUDA's last error when the device was entered: the caller's, not ours */
  struct context *on;  /* the context whose device was entered */
  error_text error;
} thread_state;

/* ---- names ---- */

#define STATUS_NAME(name, value, text) [value] = "CUMOE_" #name,
#define STATUS_TEXT(name, value, text) [value] = text,
static const char *const status_names[] = {CUMOE_STATUS_LIST(STATUS_NAME)};
static const char *const status_texts[] = {CUMOE_STATUS_LIST(STATUS_TEXT)};

const char *cumoe_status_name(cumoe_status status)
{
  return (size_t)status < LENGTH(status_names) ? status_names[status] : "CUMOE_ERR_UNKNOWN";
}

const char *cumoe_status_text(cumoe_status status)
{
  return (size_t)status < LENGTH(status_texts) ? status_texts[status] : "a status this version does not know";
}

#define DTYPE_BYTES(name, value, bytes) [value] = bytes,
static const uint8_t dtype_sizes[] = {CUMOE_DTYPE_LIST(DTYPE_BYTES)};

size_t cumoe_dtype_bytes(cumoe_dtype dtype)
{
  return (size_t)dtype < LENGTH(dtype_sizes) ? dtype_sizes[dtype] : 0;
}

const char *cumoe_dtype_name(cumoe_dtype dtype)
{
  switch (dtype) {
  case CUMOE_F32: return "f32";
  case CUMOE_F16: return "f16";
  case CUMOE_BF16: return "bf16";
  case CUMOE_U8: return "u8";
  case CUMOE_I32: return "i32";
  case CUMOE_I64: return "i64";
  case CUMOE_E4M3: return "e4m3";
  case CUMOE_E8M0: return "e8m0";
  case CUMOE_I8: return "i8";
  }
  return "?";
}

dtype_words say_dtype(int32_t dtype)
{
  dtype_words words = {"unset"};
  if (cumoe_dtype_bytes((cumoe_dtype)dtype) != 0)
    (void)snprintf(words.text, sizeof words.text, "%s", cumoe_dtype_name((cumoe_dtype)dtype));
  else if (dtype != 0)
    (void)snprintf(words.text, sizeof words.text, "%d (no cumoe_dtype)", (int)dtype);
  return words;
}

int cumoe_version(void)
{
  return CUMOE_VERSION;
}

const char *cumoe_architectures(void)
{
  return CUMOE_ARCHS;
}

/* ---- log ---- */

/* Callers hold the lock for reading while fn runs, so that no message arrives after cumoe_set_log has
 * returned. */
static pthread_rwlock_t log_lock = PTHREAD_RWLOCK_INITIALIZER;
static atomic_int log_level; /* 0 without a callback: the common case costs one load */
static cumoe_log_fn log_fn;
static void *log_user;

void cumoe_set_log(cumoe_log_fn fn, void *user, cumoe_log_level level)
{
  pthread_rwlock_wrlock(&log_lock);
  log_fn = fn;
  log_user = user;
  atomic_store(&log_level, fn != NULL ? (int)level : 0);
  pthread_rwlock_unlock(&log_lock);
}

void log_message(cumoe_log_level level, const char *format, ...)
{
  if ((int)level > atomic_load_explicit(&log_level, memory_order_relaxed)) return;
  char text[sizeof(error_text)];
  va_list list;
  va_start(list, format);
  (void)vsnprintf(text, sizeof text, format, list);
  va_end(list);

  pthread_rwlock_rdlock(&log_lock);
  if (log_fn != NULL && (int)level <= atomic_load_explicit(&log_level, memory_order_relaxed))
    log_fn(log_user, level, text);
  pthread_rwlock_unlock(&log_lock);
}

void forget_log_readers(void)
{
  log_lock = (pthread_rwlock_t)PTHREAD_RWLOCK_INITIALIZER;
}

/* ---- last error ---- */

const char *cumoe_last_error(void)
{
  return thread_state.error.text;
}

void begin_call(const char *name)
{
  thread_state.call = name;
  thread_state.on_stream = false;
}

void name_call_on(const char *name, cumoe_stream stream)
{
  thread_state.call = name;
  thread_state.stream = stream;
  thread_state.on_stream = true;
}

bool running_call(const char **name, cumoe_stream *stream)
{
  *name = thread_state.call;
  *stream = thread_state.stream;
  return thread_state.on_stream;
}

void save_error(error_text *saved)
{
  *saved = thread_state.error;
}

void restore_error(const error_text *saved)
{
  thread_state.error = *saved;
}

cumoe_status fail(cumoe_status status, const char *format, ...)
{
  error_text next; /* the arguments may point into the present text */
  const char *call = thread_state.call != NULL ? thread_state.call : "cumoe";
  int used = snprintf(next.text, sizeof next.text, "%s: ", call);
  if (used < 0 || (size_t)used >= sizeof next.text) used = 0;
  va_list list;
  va_start(list, format);
  (void)vsnprintf(next.text + used, sizeof next.text - (size_t)used, format, list);
  va_end(list);
  thread_state.error = next;
  log_message(CUMOE_LOG_TRACE, "%s: %s", cumoe_status_name(status), next.text);
  return status;
}

/* ---- CUDA's errors ---- */

void note_cuda_error(void)
{
  thread_state.pending = cudaPeekAtLastError();
}

/* CUDA keeps one error a thread. If the caller had one pending, ours has overwritten it; leaving ours in
 * place at least keeps the caller's later check failing, as it should. */
void clear_cuda_error(void)
{
  if (thread_state.pending == cudaSuccess) (void)cudaGetLastError();
}

/* Driver version 0 is cudart's way to say that there is no driver library at all. */
static cumoe_status driver_status(void)
{
  int version = 0;
  cudaError_t error = cudaDriverGetVersion(&version);
  return error != cudaSuccess || version == 0 ? CUMOE_ERR_NO_DEVICE : CUMOE_ERR_DRIVER_TOO_OLD;
}

enum { ERROR_CONTAINED = 226 }; /* cudaErrorContained, for which older toolkits have no name */

static cumoe_status classify(cudaError_t error)
{
  switch ((int)error) {
  case cudaErrorMemoryAllocation: return CUMOE_ERR_OUT_OF_MEMORY;

  case cudaErrorInsufficientDriver: return driver_status();
  case cudaErrorCallRequiresNewerDriver:
  case cudaErrorUnsupportedPtxVersion:
  case cudaErrorSystemDriverMismatch:
  case cudaErrorCompatNotSupportedOnDevice: return CUMOE_ERR_DRIVER_TOO_OLD;

  case cudaErrorNoDevice:
  case cudaErrorInvalidDevice:
  case cudaErrorDevicesUnavailable:
  case cudaErrorDeviceNotLicensed:
  case cudaErrorStubLibrary:
  case cudaErrorSystemNotReady:
  case cudaErrorMpsConnectionFailed:
  case cudaErrorMpsServerNotReady: return CUMOE_ERR_NO_DEVICE;

  case cudaErrorNoKernelImageForDevice:
  case cudaErrorInvalidKernelImage:
  case cudaErrorInvalidPtx:
  case cudaErrorJitCompilerNotFound:
  case cudaErrorJitCompilationDisabled: return CUMOE_ERR_NO_KERNEL_IMAGE;

  case cudaErrorStreamCaptureUnsupported:
  case cudaErrorStreamCaptureInvalidated:
  case cudaErrorStreamCaptureMerge:
  case cudaErrorStreamCaptureUnmatched:
  case cudaErrorStreamCaptureUnjoined:
  case cudaErrorStreamCaptureIsolation:
  case cudaErrorStreamCaptureImplicit:
  case cudaErrorStreamCaptureWrongThread:
  case cudaErrorCapturedEvent: return CUMOE_ERR_CAPTURE_UNSAFE;

  /* CUDA's manual says of each: "leaves the process in an inconsistent state". */
  case cudaErrorECCUncorrectable:
  case cudaErrorNvlinkUncorrectable:
  case ERROR_CONTAINED:
  case cudaErrorIllegalAddress:
  case cudaErrorLaunchTimeout:
  case cudaErrorContextIsDestroyed:
  case cudaErrorAssert:
  case cudaErrorHardwareStackError:
  case cudaErrorIllegalInstruction:
  case cudaErrorMisalignedAddress:
  case cudaErrorInvalidAddressSpace:
  case cudaErrorInvalidPc:
  case cudaErrorLaunchFailure:
  case cudaErrorTensorMemoryLeak:
  case cudaErrorMpsClientTerminated:
  case cudaErrorExternalDevice: return CUMOE_ERR_CUDA_STICKY;

  default: return CUMOE_ERR_CUDA;
  }
}

struct context *run_for(struct context *context)
{
  struct context *before = thread_state.on;
  thread_state.on = context;
  return before;
}

/* The first cause stays: what other threads and later calls meet are its consequences. */
static cumoe_status lose_device(cudaError_t error, const char *expression, int name)
{
  const cumoe_status status = fail(CUMOE_ERR_CUDA_STICKY, "%.*s: %s (%d): %s", name, expression,
                                   cudaGetErrorName(error), (int)error, cudaGetErrorString(error));
  struct context *context = thread_state.on;
  int32_t alive = 0;
  if (context != NULL && atomic_compare_exchange_strong(&context->lost, &alive, 1)) {
    save_error(&context->lost_cause);
    atomic_store_explicit(&context->lost, 2, memory_order_release);
  }
  return status;
}

cumoe_status check_alive(struct context *context)
{
  if (atomic_load_explicit(&context->lost, memory_order_acquire) != 2) return CUMOE_OK;
  return fail(CUMOE_ERR_CUDA_STICKY, "device %d was lost earlier, in %s", (int)context->device,
              context->lost_cause.text);
}

cumoe_status fail_cuda(cudaError_t error, const char *expression)
{
  cumoe_status status = classify(error);
  int name = (int)strcspn(expression, "("); /* the call without its arguments */
  if (status == CUMOE_ERR_CUDA_STICKY) return lose_device(error, expression, name);
  clear_cuda_error();
  if (error == cudaErrorInsufficientDriver && status == CUMOE_ERR_NO_DEVICE)
    return fail(status, "no CUDA driver is installed (%.*s: %s)", name, expression, cudaGetErrorName(error));
  return fail(status, "%.*s: %s (%d): %s", name, expression, cudaGetErrorName(error), (int)error,
              cudaGetErrorString(error));
}

cumoe_status cuda_status(cudaError_t error, const char *expression)
{
  return error == cudaSuccess ? CUMOE_OK : fail_cuda(error, expression);
}

void note_failure(cumoe_status *first, cudaError_t error, const char *call)
{
  if (error == cudaSuccess) return;
  if (*first == CUMOE_OK)
    *first = fail_cuda(error, call);
  else
    clear_cuda_error();
}
