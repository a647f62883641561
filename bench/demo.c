/*
 * Generates text with a small trained Mixture-of-Experts model, its MoE layers on the GPU if there is one,
 * else on the CPU device: the same calls. The text goes to stdout, everything about it to stderr.
 */
#include <langinfo.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tinylm.h"

typedef struct options {
  const char *model, *prompt;
  int32_t device, tokens;
  cumoe_dtype dtype;
  double temperature; /* 0: greedy */
  uint64_t seed;
} options;

static const char usage[] = "usage: demo [options] [prompt]\n"
                            "  --device auto|cpu|cuda|N  where the MoE layers run (auto: the first GPU, else the CPU)\n"
                            "  --dtype bf16|f32          type of their weights and activations (bf16)\n"
                            "  --tokens N                bytes of text to generate (384)\n"
                            "  --temperature X           of the sampling (0.7); 0 is --greedy\n"
                            "  --greedy                  always the likeliest byte\n"
                            "  --seed N                  of the sampling (1)\n"
                            "  --model FOLDER            config.json and model.safetensors (test/data/tinymoe)\n";

/* ---- options --------------------------------------------------------------------------------------- */

static bool whole(const char *text, long long limit, long long *number)
{
  char *end;
  *number = strtoll(text, &end, 10);
  return *text && !*end && *number >= 0 && *number <= limit;
}

static bool parse_device(const char *text, int32_t *device)
{
  long long ordinal = 0;
  if (strcmp(text, "auto") == 0)
    *device = CUMOE_DEVICE_AUTO;
  else if (strcmp(text, "cpu") == 0)
    *device = CUMOE_DEVICE_CPU;
  else if (strcmp(text, "cuda") == 0 || whole(text, 1 << 16, &ordinal))
    *device = (int32_t)ordinal;
  else
    return false;
  return true;
}

static bool parse_value(const char *name, const char *text, options *o)
{
  long long number = 0;
  char *end;
  if (strcmp(name, "--device") == 0) return parse_device(text, &o->device);
  if (strcmp(name, "--model") == 0) return (o->model = text) != NULL;
  if (strcmp(name, "--dtype") == 0) {
    o->dtype = strcmp(text, "f32") == 0 ? CUMOE_F32 : CUMOE_BF16;
    return o->dtype == CUMOE_F32 || strcmp(text, "bf16") == 0;
  }
  if (strcmp(name, "--temperature") == 0) {
    o->temperature = strtod(text, &end);
    return *text && !*end && o->temperature >= 0 && o->temperature <= 100;
  }
  if (strcmp(name, "--tokens") == 0) {
    bool good = whole(text, 1 << 24, &number);
    o->tokens = (int32_t)number;
    return good;
  }
  if (strcmp(name, "--seed") == 0) {
    bool good = whole(text, INT64_MAX, &number);
    o->seed = (uint64_t)number;
    return good;
  }
  return false;
}

/* 0: go on; otherwise the exit status plus one. */
static int parse_options(int argc, char **argv, options *o)
{
  bool only_prompt = false;
  for (int i = 1; i < argc; i++) {
    const char *arg = argv[i];
    if (only_prompt || arg[0] != '-') {
      o->prompt = arg;
    } else if (strcmp(arg, "--") == 0) {
      only_prompt = true;
    } else if (strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0) {
      fputs(usage, stdout);
      return 1;
    } else if (strcmp(arg, "--greedy") == 0) {
      o->temperature = 0;
    } else if (i + 1 < argc && parse_value(arg, argv[i + 1], o)) {
      i++;
    } else {
      fprintf(stderr, "demo: %s %s: not understood\n%s", arg, i + 1 < argc ? argv[i + 1] : "", usage);
      return 3;
    }
  }
  return 0;
}

/* ---- sampling -------------------------------------------------------------------------------------- */

static uint64_t random_bits(uint64_t *state) /* splitmix64 */
{
  uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
  return z ^ z >> 31;
}

static int32_t likeliest(const float *logits, int32_t vocab)
{
  int32_t best = 0;
  for (int32_t i = 1; i < vocab; i++)
    if (logits[i] > logits[best]) best = i;
  return best;
}

static int32_t sample(const float *logits, int32_t vocab, double temperature, uint64_t *state)
{
  int32_t best = likeliest(logits, vocab);
  if (temperature <= 0) return best;
  double total = 0;
  for (int32_t i = 0; i < vocab; i++) total += exp((double)(logits[i] - logits[best]) / temperature);
  double left = (double)(random_bits(state) >> 11) * 0x1p-53 * total;
  for (int32_t i = 0; i < vocab; i++) {
    left -= exp((double)(logits[i] - logits[best]) / temperature);
    if (left < 0) return i;
  }
  return best;
}

/* ---- generation ------------------------------------------------------------------------------------ */

typedef struct run {
  int32_t *text; /* prompt, then what was generated */
  int32_t length, prompt_length;
  float *logits;
  double prompt_seconds, seconds;
} run;

static double now(void)
{
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void print_byte(int32_t byte)
{
  bool control = (byte < 32 && byte != '\n' && byte != '\t') || byte == 127;
  putchar(control ? '?' : byte);
}

/* Feeds what the model has not seen. When its context is full it starts again from the last half of it. */
static bool feed(tinylm *model, run *r, int32_t fresh)
{
  int32_t context = tinylm_get_config(model)->context;
  if (fresh > context - tinylm_position(model)) {
    tinylm_rewind(model);
    fresh = r->length < context / 2 ? r->length : context / 2;
  }
  return tinylm_forward(model, r->text + r->length - fresh, fresh, 1, r->logits);
}

static bool generate(tinylm *model, const options *o, run *r)
{
  int32_t vocab = tinylm_get_config(model)->vocab;
  uint64_t state = o->seed;
  for (int32_t i = 0; i < r->length; i++) print_byte(r->text[i]);
  fflush(stdout);
  double start = now();
  if (!feed(model, r, r->length)) return false;
  r->prompt_seconds = now() - start;
  for (int32_t i = 0; i < o->tokens; i++) {
    int32_t next = sample(r->logits, vocab, o->temperature, &state);
    r->text[r->length++] = next;
    print_byte(next);
    fflush(stdout);
    if (i + 1 < o->tokens && !feed(model, r, 1)) return false;
  }
  r->seconds = now() - start - r->prompt_seconds;
  putchar('\n');
  fflush(stdout);
  return true;
}

/* ---- report ---------------------------------------------------------------------------------------- */

static void print_load_row(int32_t layer, const int64_t *load, int32_t experts)
{
  static const char *const blocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  static const char *const ascii[] = {" ", ".", ":", "-", "=", "+", "*", "%", "@"};
  const char *const *bars = strcmp(nl_langinfo(CODESET), "UTF-8") == 0 ? blocks : ascii;
  int64_t total = 0;
  int32_t most = 0, least = 0;
  for (int32_t e = 0; e < experts; e++) {
    total += load[e];
    if (load[e] > load[most]) most = e;
    if (load[e] < load[least]) least = e;
  }
  fprintf(stderr, "  layer %-3d |", (int)layer);
  for (int32_t e = 0; e < experts; e++) {
    /* rounded up: an expert with any work at all shows */
    int64_t height = load[most] > 0 ? (load[e] * 8 + load[most] - 1) / load[most] : 0;
    fputs(bars[height], stderr);
  }
  double percent = total > 0 ? 100 / (double)total : 0;
  fprintf(stderr, "|  most: expert %d, %.1f %%   least: expert %d, %.1f %%\n", (int)most, percent * (double)load[most],
          (int)least, percent * (double)load[least]);
}

static bool print_report(tinylm *model, const run *r, const cumoe_device_info *device, cumoe_dtype dtype)
{
  const tinylm_config *c = tinylm_get_config(model);
  int32_t made = r->length - r->prompt_length;
  int64_t *load = calloc((size_t)c->layers * (size_t)c->experts, sizeof *load);
  if (!load || !tinylm_load(model, load)) {
    free(load);
    return false;
  }
  fprintf(stderr, "\n%d tokens, %.0f tokens/s (prompt: %d tokens in %.1f ms) on %s, %s\n", (int)made,
          r->seconds > 0 ? (double)made / r->seconds : 0., (int)r->prompt_length, 1e3 * r->prompt_seconds, device->name,
          cumoe_dtype_name(dtype));
  fprintf(stderr, "expert load, experts 0 .. %d; an even share is %.1f %%\n", (int)c->experts - 1,
          100. / (double)c->experts);
  for (int32_t i = 0; i < c->layers; i++) print_load_row(i, load + (int64_t)i * c->experts, c->experts);
  free(load);
  return true;
}

/* ---- main ------------------------------------------------------------------------------------------ */

static void print_log(void *user, cumoe_log_level level, const char *message)
{
  (void)user;
  (void)level;
  fprintf(stderr, "cumoe: %s\n", message);
}

static bool prepare(const options *o, const tinylm_config *c, run *r)
{
  size_t length = strlen(o->prompt), most = (size_t)c->context / 2;
  const char *prompt = length > most ? o->prompt + length - most : o->prompt;
  r->length = r->prompt_length = (int32_t)strlen(prompt);
  r->text = calloc((size_t)r->length + (size_t)o->tokens + 1, sizeof *r->text);
  r->logits = calloc((size_t)c->vocab, sizeof *r->logits);
  for (int32_t i = 0; r->text && i < r->length; i++) r->text[i] = (unsigned char)prompt[i];
  return r->text && r->logits;
}

static int talk(const options *o, cumoe_context context)
{
  char error[600];
  cumoe_device_info device = {.size = sizeof device};
  run r = {0};
  if (cumoe_context_info(context, &device) != CUMOE_OK) {
    fprintf(stderr, "demo: %s\n", cumoe_last_error());
    return 1;
  }
  tinylm *model = tinylm_create(context, o->model, o->dtype, error, sizeof error);
  if (!model) {
    fprintf(stderr, "demo: %s\n", error);
    return 1;
  }
  const tinylm_config *c = tinylm_get_config(model);
  fprintf(stderr, "cumoe %d.%d.%d, %s, %s: %d layers of %d experts (%d a token), hidden %d\n\n", CUMOE_VERSION_MAJOR,
          CUMOE_VERSION_MINOR, CUMOE_VERSION_PATCH, device.name, cumoe_dtype_name(o->dtype), (int)c->layers,
          (int)c->experts, (int)c->top_k, (int)c->hidden);
  bool room = prepare(o, c, &r);
  bool good = room && generate(model, o, &r) && print_report(model, &r, &device, o->dtype);
  if (!good) fprintf(stderr, "\ndemo: %s\n", room ? tinylm_error(model) : "out of memory");
  free(r.text);
  free(r.logits);
  tinylm_destroy(model);
  return good ? 0 : 1;
}

int main(int argc, char **argv)
{
  options o = {.model = "test/data/tinymoe",
               .prompt = "Ps23:1 The LORD is my shepherd;",
               .device = CUMOE_DEVICE_AUTO,
               .tokens = 384,
               .dtype = CUMOE_BF16,
               .temperature = 0.7,
               .seed = 1};
  int stop = parse_options(argc, argv, &o);
  if (stop) return stop - 1;
  if (!*o.prompt) o.prompt = "\n";
  setlocale(LC_CTYPE, "");
  cumoe_set_log(print_log, NULL, CUMOE_LOG_WARNING);
  cumoe_context context;
  if (cumoe_context_create(o.device, NULL, &context) != CUMOE_OK) {
    fprintf(stderr, "demo: %s\n", cumoe_last_error());
    return 1;
  }
  int status = talk(&o, context);
  cumoe_context_destroy(context);
  return status;
}
