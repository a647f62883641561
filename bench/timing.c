/* Times by graph replay: what a call costs an engine that captured its step, launch gaps inside included. */
#include "bench.h"

#include <stdlib.h>
#include <time.h>

enum { MAX_SAMPLES = 15, MAX_REPEATS = 64 };

typedef struct effort {
  int32_t samples;
  double sample_us; /* a sample is at least this long: event times are good to half a microsecond */
} effort;

static effort effort_of(const bench *b)
{
  if (b->o.coarse) return (effort){5, 300};
  return b->o.quick ? (effort){7, 1000} : (effort){11, 3000};
}

static int by_value(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

timing summary(double *samples, int32_t count)
{
  qsort(samples, (size_t)count, sizeof *samples, by_value);
  return (timing){samples[count / 2], samples[0], samples[count - 1]};
}

/* ---- CUDA ---- */

typedef struct replay {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  int32_t calls, repeats; /* calls in the graph; graphs in a sample */
  double samples[MAX_SAMPLES];
} replay;

static cumoe_status elapsed(bench *b, const cudaEvent_t events[2], double *us)
{
  float ms = 0;
  TRY_CUDA(b, cudaEventSynchronize(events[1]));
  TRY_CUDA(b, cudaEventElapsedTime(&ms, events[0], events[1]));
  *us = 1e3 * (double)ms;
  return CUMOE_OK;
}

/* Two passes over the inputs without a graph: the first warms up, the second says how long a call is. */
static cumoe_status estimate(bench *b, const work *w, int32_t inputs, const cudaEvent_t events[2], double *us)
{
  for (int32_t pass = 0; pass < 2; ++pass) {
    TRY_CUDA(b, cudaEventRecord(events[0], b->stream));
    for (int32_t i = 0; i < inputs; ++i) TRY(w->call(w->user, i, b->stream));
    TRY_CUDA(b, cudaEventRecord(events[1], b->stream));
    TRY(elapsed(b, events, us));
  }
  *us /= inputs;
  return CUMOE_OK;
}

static cumoe_status capture(bench *b, const work *w, int32_t inputs, replay *r)
{
  cumoe_status status = CUMOE_OK;
  TRY_CUDA(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal));
  for (int32_t i = 0; i < r->calls && status == CUMOE_OK; ++i) status = w->call(w->user, i % inputs, b->stream);
  const cudaError_t ended = cudaStreamEndCapture(b->stream, &r->graph);
  if (status != CUMOE_OK) return status;
  TRY_CUDA(b, ended);
  TRY_CUDA(b, cudaGraphInstantiate(&r->exec, r->graph, 0));
  return CUMOE_OK;
}

static cumoe_status prepare(bench *b, const work *w, int32_t inputs, const cudaEvent_t events[2], replay *r)
{
  const double least = effort_of(b).sample_us;
  double us;
  TRY(estimate(b, w, inputs, events, &us));
  /* Short calls fill a graph of eight, so that the gap between two graphs does not count as theirs. */
  r->calls = us * MAX_INPUTS > 4000 ? inputs : MAX_INPUTS;
  const double wanted = least / (us * r->calls) + 1;
  r->repeats = wanted > MAX_REPEATS ? MAX_REPEATS : (int32_t)wanted;
  return capture(b, w, inputs, r);
}

static cumoe_status sample(bench *b, replay *r, int32_t number, const cudaEvent_t events[2], clock_state *clocks)
{
  double us;
  TRY_CUDA(b, cudaEventRecord(events[0], b->stream));
  for (int32_t i = 0; i < r->repeats; ++i) TRY_CUDA(b, cudaGraphLaunch(r->exec, b->stream));
  TRY_CUDA(b, cudaEventRecord(events[1], b->stream));
  if (clocks) *clocks = clocks_now(b->nvml);
  TRY(elapsed(b, events, &us));
  r->samples[number] = us / ((double)r->repeats * r->calls);
  return CUMOE_OK;
}

static void discard(replay *r)
{
  if (r->exec) cudaGraphExecDestroy(r->exec);
  if (r->graph) cudaGraphDestroy(r->graph);
  r->exec = NULL;
  r->graph = NULL;
}

/* A peer that cannot be captured is not timed. */
static cumoe_status unless_optional(const work *w, replay *r, cumoe_status status)
{
  if (status == CUMOE_OK || !w->optional) return status;
  discard(r);
  (void)cudaGetLastError();
  return CUMOE_OK;
}

/* All works in turn, so that what changes meanwhile meets all alike. The untimed replay in front of a sample lets the
 * host run ahead of the device. */
static cumoe_status measure_in_turn(bench *b, const work *works, int32_t count, int32_t inputs,
                                    const cudaEvent_t events[2], replay *replays, clock_state *clocks)
{
  const int32_t samples = effort_of(b).samples;
  for (int32_t i = 0; i < count; ++i) {
    if (!works[i].user) continue;
    TRY(unless_optional(&works[i], &replays[i], prepare(b, &works[i], inputs, events, &replays[i])));
  }
  for (int32_t n = 0; n < samples * count; ++n) {
    const int32_t s = n / count, i = n % count;
    if (!replays[i].exec) continue;
    TRY_CUDA(b, cudaGraphLaunch(replays[i].exec, b->stream));
    TRY(sample(b, &replays[i], s, events, i == 0 && s == samples - 1 ? clocks : NULL));
  }
  return CUMOE_OK;
}

/* One work after the other, each behind a pause, in which the GPU cools: single calls, as peer_time.py has them. */
static cumoe_status measure_apart(bench *b, const work *works, int32_t count, const cudaEvent_t events[2],
                                  replay *replays, clock_state *clocks)
{
  const struct timespec pause = {0, 500000000};
  for (int32_t i = 0; i < count; ++i) {
    replay *r = &replays[i];
    double us;
    if (!works[i].user) continue;
    r->calls = r->repeats = 1;
    cumoe_status status = estimate(b, &works[i], 1, events, &us);
    if (status == CUMOE_OK) status = capture(b, &works[i], 1, r);
    TRY(unless_optional(&works[i], r, status));
    if (!r->exec) continue;
    nanosleep(&pause, NULL);
    TRY_CUDA(b, cudaGraphLaunch(r->exec, b->stream));
    for (int32_t s = 0; s < effort_of(b).samples; ++s) TRY(sample(b, r, s, events, i == 0 ? clocks : NULL));
  }
  return CUMOE_OK;
}

static cumoe_status measure_replays(bench *b, const work *works, int32_t count, int32_t inputs, replay *replays,
                                    timing *timings, clock_state *clocks)
{
  cudaEvent_t events[2];
  TRY_CUDA(b, cudaEventCreate(&events[0]));
  TRY_CUDA(b, cudaEventCreate(&events[1]));
  const cumoe_status status = b->o.apart ? measure_apart(b, works, count, events, replays, clocks)
                                         : measure_in_turn(b, works, count, inputs, events, replays, clocks);
  for (int32_t i = 0; i < count && status == CUMOE_OK; ++i)
    if (replays[i].exec) timings[i] = summary(replays[i].samples, effort_of(b).samples);
  cudaEventDestroy(events[0]);
  cudaEventDestroy(events[1]);
  return status;
}

static cumoe_status measure_cuda(bench *b, const work *works, int32_t count, int32_t inputs, timing *timings,
                                 clock_state *clocks)
{
  replay *replays = calloc((size_t)count, sizeof *replays);
  if (!replays) return CUMOE_ERR_OUT_OF_MEMORY;
  const cumoe_status status = measure_replays(b, works, count, inputs, replays, timings, clocks);
  for (int32_t i = 0; i < count; ++i) discard(&replays[i]);
  free(replays);
  return status;
}

/* ---- the host ---- */

static double now_us(void)
{
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

/* What an eager call costs the thread that makes it: a few at a time, so that none waits for room in the queue of
 * launches. */
cumoe_status measure_host(bench *b, const work *w, int32_t inputs, double *us)
{
  enum { ROUNDS = 31, CALLS = 8 };
  double samples[ROUNDS];
  for (int32_t r = -1; r < ROUNDS; ++r) {
    const double start = now_us();
    for (int32_t i = 0; i < CALLS; ++i) TRY(w->call(w->user, i % inputs, b->stream));
    if (r >= 0) samples[r] = (now_us() - start) / CALLS;
    TRY_CUDA(b, cudaStreamSynchronize(b->stream));
  }
  *us = summary(samples, ROUNDS).median;
  return CUMOE_OK;
}

/* ---- CPU ---- */

static cumoe_status measure_cpu(const work *works, int32_t count, int32_t inputs, timing *timings)
{
  enum { SAMPLES = 7 };
  double samples[SAMPLES];
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t s = 0; s < SAMPLES && works[i].user; ++s) {
      const double start = now_us();
      for (int32_t j = 0; j < inputs; ++j) TRY(works[i].call(works[i].user, j, NULL));
      samples[s] = (now_us() - start) / inputs;
    }
    if (works[i].user) timings[i] = summary(samples, SAMPLES);
  }
  return CUMOE_OK;
}

cumoe_status measure(bench *b, const work *works, int32_t count, int32_t inputs, timing *timings, clock_state *clocks)
{
  for (int32_t i = 0; i < count; ++i) timings[i] = (timing){0, 0, 0};
  if (b->device.device == CUMOE_DEVICE_CPU) return measure_cpu(works, count, inputs, timings);
  return measure_cuda(b, works, count, inputs, timings, clocks);
}
