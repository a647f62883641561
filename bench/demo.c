/*
 * Generates text with a small trained Mixture-of-Experts model, on the GPU if there is one, else on the CPU device: the
 * same calls. The text goes to stdout, everything about it to stderr.
 */
#include <langinfo.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kinds.h"
#include "tinylm.h"

typedef struct options {
  const char *model, *prompt, *text;
  const char *weights; /* NULL: of dtype, and nothing is scored; or a name of weight_names, or "all" */
  int32_t device, tokens, bytes;
  cumoe_dtype dtype;
  double temperature; /* 0: greedy */
  uint64_t seed;
} options;

static const char usage[] = "usage: demo [options] [prompt]\n"
                            "  --device auto|cpu|cuda|N  where the model runs (auto: the first GPU, else the CPU)\n"
                            "  --dtype bf16|f32          type of weights and activations (bf16)\n"
                            "  --tokens N                bytes of text to generate (384)\n"
                            "  --temperature X           of the sampling (0.7); 0 is --greedy\n"
                            "  --greedy                  always the likeliest byte\n"
                            "  --seed N                  of the sampling (1)\n"
                            "  --model FOLDER            config.json and model.safetensors (test/data/tinymoe)\n"
                            "  --weights NAME            experts' weights, quantised when they are loaded: bf16 (not\n"
                            "                            quantised), fp8, fp8-a16, fp8-channel, int8, int4, int4-32,\n"
                            "                            mxfp4, nvfp4; also scores them. all: a table of them\n"
                            "  --text FILE               what is scored (test/data/prose.txt)\n"
                            "  --bytes N                 how much of it (65536)\n";

/* ---- formats of weights ---------------------------------------------------------------------------- */

typedef struct weights {
  const char *name;
  cumoe_format format;
} weights;

enum {
#define ONE(name, text, goal, format) +1
  WEIGHTS = 1 KIND_LIST(ONE)
};

static weights weights_at(int32_t i)
{
#define WEIGHTS_OF(name, text, goal, format) {name, format},
  const weights all[WEIGHTS] = {{"bf16", {0}}, KIND_LIST(WEIGHTS_OF)};
  return all[i];
}

/* -1: no such name. NULL: not quantised. */
static int32_t find_weights(const char *name)
{
  for (int32_t i = 0; i < WEIGHTS; i++)
    if (!name || strcmp(weights_at(i).name, name) == 0) return i;
  return -1;
}

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
  if (strcmp(name, "--text") == 0) return (o->text = text) != NULL;
  if (strcmp(name, "--weights") == 0) {
    o->weights = text;
    return strcmp(text, "all") == 0 || find_weights(text) >= 0;
  }
  if (strcmp(name, "--bytes") == 0) {
    bool good = whole(text, 1 << 24, &number) && number >= 2;
    o->bytes = (int32_t)number;
    return good;
  }
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

/* ---- generation ------------------------------------------------------------------------------------ */

typedef struct run {
  int32_t *text; /* prompt, then what was generated */
  int32_t length, prompt_length;
  double prompt_seconds, seconds;
} run;

static double now(void)
{
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void print_byte(const options *o, int32_t byte)
{
  if (o->weights && strcmp(o->weights, "all") == 0) return;
  bool control = (byte < 32 && byte != '\n' && byte != '\t') || byte == 127;
  putchar(control ? '?' : byte);
}

/* The device is some tokens ahead of what is printed. */
static void show_token(void *user, int32_t token)
{
  print_byte(user, token);
  fflush(stdout);
}

/* A context that is full begins again from the last half of it. */
static bool restart(tinylm *model, run *r)
{
  const int32_t half = tinylm_get_config(model)->context / 2, count = r->length < half ? r->length : half;
  tinylm_rewind(model);
  return tinylm_forward(model, r->text + r->length - count, count, 0, NULL);
}

static bool generate(tinylm *model, const options *o, run *r)
{
  uint64_t state = o->seed;
  options copy = *o;
  for (int32_t i = 0; i < r->length; i++) print_byte(o, r->text[i]);
  fflush(stdout);
  double start = now();
  if (!restart(model, r)) return false;
  r->prompt_seconds = now() - start;
  for (int32_t made = 0; made < o->tokens;) {
    const int32_t room = tinylm_get_config(model)->context - tinylm_position(model), left = o->tokens - made;
    int32_t count = left < room ? left : room;
    if (count > TINYLM_NOISE) count = TINYLM_NOISE;
    if (count == 0 && !restart(model, r)) return false;
    if (!tinylm_generate(model, count, o->temperature, &state, r->text + r->length, show_token, &copy)) return false;
    r->length += count;
    made += count;
  }
  r->seconds = now() - start - r->prompt_seconds;
  print_byte(o, '\n');
  fflush(stdout);
  return true;
}

/* ---- score ----------------------------------------------------------------------------------------- */

/* Bytes as tokens; NULL: cannot be read, or are none. */
static int32_t *read_text(const options *o, int32_t *count)
{
  FILE *file = fopen(o->text, "rb");
  int32_t *text = file ? malloc((size_t)o->bytes * sizeof *text) : NULL;
  *count = 0;
  for (int c; text && *count < o->bytes && (c = getc(file)) != EOF;) text[(*count)++] = c;
  if (file) fclose(file);
  if (*count >= 2) return text;
  free(text);
  return NULL;
}

/* Bits that the model needs to tell the next byte. */
static double bits_of(const float *logits, int32_t vocab, int32_t next)
{
  double total = 0, most = (double)logits[tinylm_likeliest(logits, vocab)];
  for (int32_t i = 0; i < vocab; i++) total += exp((double)logits[i] - most);
  return (log(total) - ((double)logits[next] - most)) / log(2);
}

/* The text in windows of the model's context, of each of which the first byte is given. */
static bool score(tinylm *model, const int32_t *text, int32_t count, double *bits)
{
  const tinylm_config *c = tinylm_get_config(model);
  float *logits = malloc((size_t)c->context * (size_t)c->vocab * sizeof *logits);
  bool good = logits != NULL;
  int64_t scored = 0;
  *bits = 0;
  for (int32_t first = 0; good && first + 1 < count; first += c->context) {
    int32_t length = count - first < c->context ? count - first : c->context;
    tinylm_rewind(model);
    good = tinylm_forward(model, text + first, length, length, logits);
    for (int32_t i = 0; good && i + 1 < length; i++, scored++)
      *bits += bits_of(logits + (int64_t)i * c->vocab, c->vocab, text[first + i + 1]);
  }
  tinylm_rewind(model);
  free(logits);
  *bits /= (double)scored;
  return good;
}

/* What the layers of the unquantised model saw and gave, of one window of the text. */
typedef struct memory {
  float *in, *out; /* [layers, count, hidden] */
  int64_t size;    /* of a layer */
  int32_t count;
} memory;

static void remember(void *user, const tinylm_seen *seen)
{
  memory *m = user;
  memcpy(m->in + seen->layer * m->size, seen->in, (size_t)m->size * sizeof *m->in);
  memcpy(m->out + seen->layer * m->size, seen->out, (size_t)m->size * sizeof *m->out);
}

static bool remember_window(tinylm *model, const int32_t *text, int32_t count, memory *m)
{
  const tinylm_config *c = tinylm_get_config(model);
  m->count = count < c->context ? count : c->context;
  m->size = (int64_t)m->count * c->hidden;
  m->in = malloc((size_t)(c->layers * m->size) * sizeof *m->in);
  m->out = malloc((size_t)(c->layers * m->size) * sizeof *m->out);
  if (!m->in || !m->out) return false;
  tinylm_observe(model, remember, m);
  bool good = tinylm_forward(model, text, m->count, 0, NULL);
  tinylm_observe(model, NULL, NULL);
  tinylm_rewind(model);
  return good;
}

/* Of the layers' outputs from the same inputs: the root of the mean square error, over that of the outputs. */
static bool layer_error(tinylm *model, const memory *m, double *error)
{
  const tinylm_config *c = tinylm_get_config(model);
  float *out = malloc((size_t)m->size * sizeof *out);
  double wrong = 0, size = 0;
  bool good = out != NULL;
  for (int32_t l = 0; l < c->layers && good; l++) {
    const float *want = m->out + l * m->size;
    good = tinylm_moe(model, l, m->in + l * m->size, m->count, out, NULL, NULL);
    for (int64_t i = 0; i < m->size && good; i++) {
      const double d = (double)out[i] - (double)want[i];
      wrong += d * d;
      size += (double)want[i] * (double)want[i];
    }
  }
  free(out);
  *error = sqrt(wrong / size);
  return good;
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
  for (int32_t i = 0; r->text && i < r->length; i++) r->text[i] = (unsigned char)prompt[i];
  return r->text != NULL;
}

static tinylm *load(const options *o, cumoe_context context, int32_t index)
{
  char error[600];
  const weights w = weights_at(index);
  tinylm *model = tinylm_create_quantised(context, o->model, o->dtype, &w.format, error, sizeof error);
  if (!model) fprintf(stderr, "demo: %s: %s\n", w.name, error);
  return model;
}

static void print_model(const options *o, const tinylm *model, const cumoe_device_info *device)
{
  const tinylm_config *c = tinylm_get_config(model);
  fprintf(stderr, "cumoe %d.%d.%d, %s, %s: %d layers of %d experts (%d a token), hidden %d\n\n", CUMOE_VERSION_MAJOR,
          CUMOE_VERSION_MINOR, CUMOE_VERSION_PATCH, device->name, cumoe_dtype_name(o->dtype), (int)c->layers,
          (int)c->experts, (int)c->top_k, (int)c->hidden);
}

static bool print_score(const options *o, tinylm *model)
{
  double bits = 0;
  int32_t count;
  int32_t *text = read_text(o, &count);
  bool good = text && score(model, text, count, &bits);
  if (good)
    fprintf(stderr, "\nexperts' weights in %s: %lld bytes; %.4f bits a byte of %s (%d bytes)\n", o->weights,
            (long long)tinylm_expert_bytes(model), bits, o->text, (int)count);
  else if (!text)
    fprintf(stderr, "\ndemo: %s cannot be read, or is of less than two bytes\n", o->text);
  free(text);
  return good;
}

static int talk(const options *o, cumoe_context context, const cumoe_device_info *device)
{
  run r = {0};
  tinylm *model = load(o, context, find_weights(o->weights));
  if (!model) return 1;
  print_model(o, model, device);
  bool room = prepare(o, tinylm_get_config(model), &r);
  bool good = room && generate(model, o, &r) && print_report(model, &r, device, o->dtype);
  good = good && (!o->weights || print_score(o, model));
  const char *why = room ? tinylm_error(model) : "out of memory";
  if (!good && *why) fprintf(stderr, "\ndemo: %s\n", why);
  free(r.text);
  tinylm_destroy(model);
  return good ? 0 : 1;
}

/* ---- all formats ----------------------------------------------------------------------------------- */

/* What the models are compared by. `own` is what the unquantised one writes, drawn as it says: on it that one needs its
 * entropy, and every other as many bits more as it differs. */
typedef struct texts {
  int32_t *given, *own;
  int32_t given_count, own_count;
  memory seen;
} texts;

static bool write_own(const options *o, tinylm *model, texts *t)
{
  options draw = *o;
  run r = {0};
  draw.temperature = 1;
  draw.tokens = o->bytes / 8 + 2;
  bool good = prepare(&draw, tinylm_get_config(model), &r) && generate(model, &draw, &r);
  tinylm_rewind(model);
  t->own = r.text;
  t->own_count = r.length;
  return good && remember_window(model, t->given, t->given_count, &t->seen);
}

/* A line of the table. */
static bool compare(const options *o, tinylm *model, int32_t index, texts *t)
{
  const tinylm_config *c = tinylm_get_config(model);
  const double count_of_weights = 3. * c->layers * c->experts * c->hidden * c->inter,
               bytes = (double)tinylm_expert_bytes(model);
  double bits = 0, own = 0, error = 0;
  run r = {0};
  bool good = prepare(o, c, &r) && (index > 0 || write_own(o, model, t)) &&
              score(model, t->given, t->given_count, &bits) && score(model, t->own, t->own_count, &own) &&
              layer_error(model, &t->seen, &error) && generate(model, o, &r);
  if (good)
    printf("%-12s %10.0f %9.3f %12.4f %9.4f %8.2f %% %10.0f\n", weights_at(index).name, bytes,
           8 * bytes / count_of_weights, bits, own, 100 * error,
           r.seconds > 0 ? (r.length - r.prompt_length) / r.seconds : 0.);
  else
    fprintf(stderr, "demo: %s: %s\n", weights_at(index).name, tinylm_error(model));
  fflush(stdout);
  free(r.text);
  return good;
}

static int table(const options *o, cumoe_context context, const cumoe_device_info *device)
{
  texts t = {0};
  t.given = read_text(o, &t.given_count);
  bool good = t.given != NULL;
  if (!good) fprintf(stderr, "demo: %s cannot be read, or is of less than two bytes\n", o->text);
  for (int32_t i = 0; i < WEIGHTS && good; i++) {
    tinylm *model = load(o, context, i);
    if (model && i == 0) {
      print_model(o, model, device);
      printf("bits a byte: of %s, %d bytes, and of %d that the bf16 model writes itself. error: of the MoE layers' "
             "outputs\n%-12s %10s %9s %12s %9s %10s %10s\n",
             o->text, (int)t.given_count, (int)(o->bytes / 8), "weights", "bytes", "bits each", "bits a byte",
             "its own", "error", "tokens/s");
    }
    good = model && compare(o, model, i, &t);
    tinylm_destroy(model);
  }
  free(t.given);
  free(t.own);
  free(t.seen.in);
  free(t.seen.out);
  return good ? 0 : 1;
}

int main(int argc, char **argv)
{
  options o = {.model = "test/data/tinymoe",
               .prompt = "Ps23:1 The LORD is my shepherd;",
               .text = "test/data/prose.txt",
               .bytes = 65536,
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
  cumoe_device_info device = {.size = sizeof device};
  int status = 1;
  if (cumoe_context_info(context, &device) != CUMOE_OK)
    fprintf(stderr, "demo: %s\n", cumoe_last_error());
  else if (o.weights && strcmp(o.weights, "all") == 0)
    status = table(&o, context, &device);
  else
    status = talk(&o, context, &device);
  cumoe_context_destroy(context);
  if (fflush(stdout) == 0 && !ferror(stdout)) return status;
  perror("demo: standard output");
  return 1;
}
