/*
 * Trains the demo's decoder from scratch on the bytes of a text. It can be killed at any moment: started again, it goes
 * on from its last checkpoint, bit for bit. What it leaves in --out: model.safetensors and config.json, which the demo
 * runs, and the loss of each step, loss.svg and loss.csv.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "decoder.h"
#include "safetensors.h"

typedef struct options {
  decoder_config c;
  int64_t steps, seed, interval, threads; /* interval: seconds between checkpoints */
  int32_t device;
  double rate;
  const char *out;
  const char *const *texts;
  int text_count;
  bool fresh;
} options;

static const char usage[] =
    "usage: train [options] FILE ...\n"
    "  --out FOLDER     what is made, and the checkpoint (lib/trained)\n"
    "  --device D       auto, cpu, cuda or N (auto: the first GPU, else the CPU)\n"
    "  --dtype T        f32 or bf16: of activations and of the weights that they meet (f32)\n"
    "  --steps N        of the optimiser (2000; 200 on the CPU)\n"
    "  --batch N        sequences of a step (16; 4 on the CPU)\n"
    "  --length N       bytes of a sequence (128)\n"
    "  --rate X         largest learning rate (0.004)\n"
    "  --seed N         of weights and batches (1)\n"
    "  --interval N     seconds between checkpoints (20); 0: after every step\n"
    "  --threads N      of the CPU device (0: one a core)\n"
    "  --fresh          do not go on from a checkpoint\n"
    "  --layers N (4)   --hidden N (128)   --heads N (4)   --kv-heads N (2)   --head-dim N (32)\n"
    "  --experts N (16) --top-k N (4)      --inter N (128)\n";

static bool complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
static bool complain(const char *format, ...)
{
  va_list list;
  va_start(list, format);
  fprintf(stderr, "train: ");
  vfprintf(stderr, format, list);
  fprintf(stderr, "\n");
  va_end(list);
  return false;
}

static double now(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- options --------------------------------------------------------------------------------------- */

static bool take_number(const char *name, const char *text, options *o)
{
  decoder_config *c = &o->c;
  const struct {
    const char *name;
    int64_t *wide;
    int32_t *narrow;
    int64_t least, most;
  } all[] = {{"--steps", &o->steps, NULL, 1, 1 << 24},
             {"--seed", &o->seed, NULL, 0, INT64_MAX},
             {"--interval", &o->interval, NULL, 0, 1 << 24},
             {"--threads", &o->threads, NULL, 0, 1024},
             {"--batch", NULL, &c->batch, 1, 1 << 16},
             {"--length", NULL, &c->length, 2, 1 << 16},
             {"--layers", NULL, &c->layers, 1, 1024},
             {"--hidden", NULL, &c->hidden, 8, 1 << 16},
             {"--heads", NULL, &c->heads, 1, 1024},
             {"--kv-heads", NULL, &c->kv_heads, 1, 1024},
             {"--head-dim", NULL, &c->head_dim, 8, 256},
             {"--experts", NULL, &c->experts, 1, CUMOE_MAX_EXPERTS},
             {"--top-k", NULL, &c->top_k, 1, CUMOE_MAX_TOP_K},
             {"--inter", NULL, &c->inter, 8, 1 << 16}};
  char *end;
  errno = 0;
  const long long number = strtoll(text, &end, 10);
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    if (strcmp(name, all[i].name) != 0) continue;
    if (!*text || *end || errno || number < all[i].least || number > all[i].most) return false;
    if (all[i].wide) *all[i].wide = number;
    if (all[i].narrow) *all[i].narrow = (int32_t)number;
    return true;
  }
  return false;
}

static bool take_device(const char *text, int32_t *device)
{
  char *end;
  const long ordinal = strtol(text, &end, 10);
  if (strcmp(text, "auto") == 0)
    *device = CUMOE_DEVICE_AUTO;
  else if (strcmp(text, "cpu") == 0)
    *device = CUMOE_DEVICE_CPU;
  else if (strcmp(text, "cuda") == 0)
    *device = 0;
  else if (*text && !*end && ordinal >= 0 && ordinal <= 1 << 16)
    *device = (int32_t)ordinal;
  else
    return false;
  return true;
}

static bool take_option(const char *name, const char *text, options *o)
{
  char *end;
  if (strcmp(name, "--device") == 0) return take_device(text, &o->device);
  if (strcmp(name, "--dtype") == 0) {
    o->c.dtype = strcmp(text, "bf16") == 0 ? CUMOE_BF16 : CUMOE_F32;
    return o->c.dtype == CUMOE_BF16 || strcmp(text, "f32") == 0;
  }
  if (strcmp(name, "--out") == 0) return *(o->out = text) != 0;
  if (strcmp(name, "--rate") != 0) return take_number(name, text, o);
  o->rate = strtod(text, &end);
  return *text && !*end && o->rate > 0 && o->rate < 1;
}

/* 0: go on; otherwise the exit status plus one. */
static int parse_options(int argc, char **argv, options *o)
{
  int i = 1;
  for (; i < argc && argv[i][0] == '-'; i++) {
    if (strcmp(argv[i], "--help") == 0) {
      fputs(usage, stdout);
      return 1;
    }
    if (strcmp(argv[i], "--fresh") == 0) {
      o->fresh = true;
    } else if (i + 1 < argc && take_option(argv[i], argv[i + 1], o)) {
      i++;
    } else {
      complain("%s %s: not understood\n%s", argv[i], i + 1 < argc ? argv[i + 1] : "", usage);
      return 3;
    }
  }
  o->texts = (const char *const *)argv + i;
  o->text_count = argc - i;
  if (o->text_count > 0) return 0;
  complain("no text\n%s", usage);
  return 3;
}

/* ---- the text: one after the other; the last twentieth is held back --------------------------------- */

typedef struct text {
  unsigned char *bytes;
  int64_t size, trained; /* trained: bytes that batches are taken from */
} text;

static bool read_text(const options *o, text *t)
{
  char error[300];
  for (int i = 0; i < o->text_count; i++) {
    size_t size;
    unsigned char *one = file_read(o->texts[i], &size, error, sizeof error);
    if (!one) return complain("%s", error);
    unsigned char *all = realloc(t->bytes, (size_t)t->size + size + 1);
    if (all) {
      memcpy(all + t->size, one, size);
      t->bytes = all;
      t->size += (int64_t)size;
    }
    free(one);
    if (!all) return complain("out of memory");
  }
  t->trained = t->size - t->size / 20;
  const int64_t least = 21 * ((int64_t)o->c.length + 1);
  return t->size >= least || complain("the text has %lld bytes, %lld are the least for sequences of %d",
                                      (long long)t->size, (long long)least, (int)o->c.length);
}

static uint64_t mix(uint64_t z)
{
  z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
  return z ^ z >> 31;
}

/* FNV-1a: whether a checkpoint is of this text. */
static uint64_t hash_of(const text *t)
{
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (int64_t i = 0; i < t->size; i++) hash = (hash ^ t->bytes[i]) * UINT64_C(0x100000001b3);
  return hash;
}

typedef struct batch {
  int32_t *tokens, *targets;
} batch;

static void copy_sequence(const options *o, const text *t, int64_t from, int32_t place, const batch *to)
{
  for (int32_t i = 0; i < o->c.length; i++) {
    to->tokens[place * o->c.length + i] = t->bytes[from + i];
    to->targets[place * o->c.length + i] = t->bytes[from + i + 1];
  }
}

/* That of a step follows from its number: a resumed run draws what an unbroken one does. */
static void draw_batch(const options *o, const text *t, int64_t step, const batch *to)
{
  const uint64_t places = (uint64_t)(t->trained - o->c.length);
  for (int32_t i = 0; i < o->c.batch; i++) {
    const uint64_t number = (uint64_t)step * (uint64_t)o->c.batch + (uint64_t)i;
    const uint64_t at =
        mix(mix((uint64_t)o->seed + UINT64_C(0x9e3779b97f4a7c15)) + number * UINT64_C(0x9e3779b97f4a7c15));
    copy_sequence(o, t, (int64_t)(at % places), i, to);
  }
}

/* ---- files: written beside, then renamed, so that what has the name is whole ------------------------- */

typedef struct file {
  FILE *stream;
  char path[1024], beside[1032];
} file;

static bool open_file(file *f, const char *folder, const char *name)
{
  if (snprintf(f->path, sizeof f->path, "%s/%s", folder, name) >= (int)sizeof f->path) return complain("path too long");
  snprintf(f->beside, sizeof f->beside, "%s.new", f->path);
  f->stream = fopen(f->beside, "wb");
  return f->stream || complain("%s: %s", f->beside, strerror(errno));
}

/* On the disk before it takes the name, and the name before this returns. */
static bool close_file(file *f, const char *folder)
{
  const bool torn = ferror(f->stream); /* some of it was lost before, whatever there is room for now */
  bool good = fflush(f->stream) == 0 && fsync(fileno(f->stream)) == 0 && !torn;
  good = fclose(f->stream) == 0 && good && rename(f->beside, f->path) == 0;
  if (!good) {
    complain("%s: %s", f->path, torn ? "could not be written" : strerror(errno));
    unlink(f->beside);
    return false;
  }
  const int directory = open(folder, O_RDONLY | O_DIRECTORY);
  if (directory >= 0) {
    fsync(directory);
    close(directory);
  }
  return true;
}

/* One tensor of a safetensors file: its line of the header. `at` moves on. */
static void describe_tensor(FILE *to, const char *name, const char *dtype, int64_t rows, int64_t cols, size_t *at)
{
  const size_t bytes = (size_t)(rows * (cols ? cols : 1)) * (strcmp(dtype, "F32") == 0 ? 4 : 2);
  fprintf(to, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%lld", name, dtype, (long long)rows);
  if (cols) fprintf(to, ",%lld", (long long)cols);
  fprintf(to, "],\"data_offsets\":[%zu,%zu]}", *at, *at + bytes);
  *at += bytes;
}

/* The header with its length, padded so that data begins aligned. */
static bool write_header(FILE *to, char *header, size_t bytes)
{
  const size_t padded = (bytes + 7) / 8 * 8;
  unsigned char length[8];
  for (int i = 0; i < 8; i++) length[i] = (unsigned char)(padded >> 8 * i);
  bool good = fwrite(length, 1, 8, to) == 8 && fwrite(header, 1, bytes, to) == bytes;
  for (size_t i = bytes; i < padded; i++) good = putc(' ', to) != EOF && good;
  return good;
}

/* ---- a run ----------------------------------------------------------------------------------------- */

typedef struct run {
  const options *o;
  decoder *model;
  text t;
  batch next;
  float *losses; /* of the steps done, but for those that the device still has */
  int64_t done, read;
  const char *device;
  float *numbers; /* room for the model's numbers */
  char same[700]; /* what a checkpoint has to be of */
} run;

static const char *const states[DECODER_STATES] = {"weights", "first", "second"};

static void say_same(run *r)
{
  const decoder_config *c = &r->o->c;
  snprintf(r->same, sizeof r->same,
           "layers %d hidden %d heads %d %d %d experts %d %d %d batch %d %d steps %lld rate %.17g seed %lld text %llx "
           "in %s on %s",
           (int)c->layers, (int)c->hidden, (int)c->heads, (int)c->kv_heads, (int)c->head_dim, (int)c->experts,
           (int)c->top_k, (int)c->inter, (int)c->batch, (int)c->length, (long long)r->o->steps, r->o->rate,
           (long long)r->o->seed, (unsigned long long)hash_of(&r->t), cumoe_dtype_name(c->dtype), r->device);
}

static bool write_checkpoint(run *r)
{
  file f;
  char *header = NULL;
  size_t bytes = 0, at = 0;
  FILE *text_stream = open_memstream(&header, &bytes);
  if (!text_stream) return complain("out of memory");
  fprintf(text_stream, "{\"__metadata__\":{\"run\":\"%s\",\"step\":\"%lld\"}", r->same, (long long)r->done);
  for (int i = 0; i < DECODER_STATES; i++)
    describe_tensor(text_stream, states[i], "F32", decoder_numbers(r->model), 0, &at);
  describe_tensor(text_stream, "losses", "F32", r->done, 0, &at);
  fprintf(text_stream, "}");
  fclose(text_stream);
  bool good = open_file(&f, r->o->out, "checkpoint");
  const bool opened = good;
  const size_t count = (size_t)decoder_numbers(r->model);
  good = good && write_header(f.stream, header, bytes);
  for (int i = 0; i < DECODER_STATES && good; i++)
    good = decoder_read(r->model, (decoder_state)i, r->numbers) && fwrite(r->numbers, 4, count, f.stream) == count;
  good = good && fwrite(r->losses, 4, (size_t)r->done, f.stream) == (size_t)r->done;
  free(header);
  if (opened && !good) {
    complain("%s: %s", f.beside, ferror(f.stream) ? strerror(errno) : decoder_error(r->model));
    fclose(f.stream);
    unlink(f.beside);
  }
  return good && close_file(&f, r->o->out);
}

static bool load_states(run *r, const safetensors *from)
{
  const file_tensor *losses = safetensors_find(from, "losses");
  for (int i = 0; i < DECODER_STATES; i++) {
    const file_tensor *t = safetensors_find(from, states[i]);
    if (!t || t->count != decoder_numbers(r->model) || !file_floats(t, 0, t->count, r->numbers))
      return complain("the checkpoint has no %s of this model", states[i]);
    if (!decoder_write(r->model, (decoder_state)i, r->numbers)) return complain("%s", decoder_error(r->model));
  }
  r->read = r->done;
  if (!losses || losses->count != r->done || !file_floats(losses, 0, r->done, r->losses))
    return complain("the checkpoint has no losses of %lld steps", (long long)r->done);
  return decoder_set_step(r->model, r->done) || complain("%s", decoder_error(r->model));
}

/* Goes on where the checkpoint ends; false where it is another run's, or broken. Without one there is nothing to do. */
static bool resume(run *r)
{
  char path[1024], error[300], same[sizeof r->same] = "", step[32] = "";
  safetensors from;
  snprintf(path, sizeof path, "%s/checkpoint", r->o->out);
  if (r->o->fresh || access(path, F_OK) != 0) return true;
  if (!safetensors_open(path, &from, error, sizeof error)) return complain("%s", error);
  bool good = json_string(json_find(from.metadata, "run"), same, sizeof same) && strcmp(same, r->same) == 0;
  if (!good) complain("%s is of another run: \"%s\", this one is \"%s\". --fresh begins anew", path, same, r->same);
  if (good) {
    good = json_string(json_find(from.metadata, "step"), step, sizeof step);
    char *end = step;
    r->done = good ? strtoll(step, &end, 10) : -1;
    good = *step && !*end && r->done >= 0 && r->done <= r->o->steps;
    if (!good) complain("%s has no step of 0 .. %lld: \"%s\"", path, (long long)r->o->steps, step);
    good = good && load_states(r, &from);
    if (good) fprintf(stderr, "goes on after step %lld\n", (long long)r->done);
  }
  safetensors_close(&from);
  return good;
}

/* ---- what is left at the end ------------------------------------------------------------------------ */

static void name_piece(const decoder_parameter *p, int32_t piece, char *name, size_t bytes)
{
  const char *place = strstr(p->name, "%d");
  if (place)
    snprintf(name, bytes, "%.*s%d%s", (int)(place - p->name), p->name, (int)piece, place + 2);
  else
    snprintf(name, bytes, "%s", p->name);
}

/* As the demo reads it: bf16, each expert's matrices by their own names. */
static bool write_model(run *r)
{
  const decoder_parameter *list;
  const int32_t count = decoder_parameters(r->model, &list);
  file f;
  char *header = NULL, name[128];
  size_t bytes = 0, at = 0;
  FILE *stream = open_memstream(&header, &bytes);
  if (!stream) return complain("out of memory");
  fprintf(stream, "{\"__metadata__\":{\"format\":\"pt\"}");
  for (int32_t i = 0; i < count; i++)
    for (int32_t piece = 0; piece < list[i].pieces; piece++) {
      name_piece(&list[i], piece, name, sizeof name);
      describe_tensor(stream, name, "BF16", list[i].rows, list[i].cols, &at);
    }
  fprintf(stream, "}");
  fclose(stream);
  bool good = decoder_read(r->model, DECODER_WEIGHTS, r->numbers) || complain("%s", decoder_error(r->model));
  good = good && open_file(&f, r->o->out, "model.safetensors");
  if (!good) return free(header), false;
  good = write_header(f.stream, header, bytes);
  for (int32_t i = 0; i < count; i++) {
    const int64_t numbers = list[i].pieces * list[i].rows * (list[i].cols ? list[i].cols : 1);
    for (int64_t j = 0; j < numbers; j++) {
      const uint16_t bits = float_bf16(r->numbers[list[i].at + j]);
      good = fwrite(&bits, 2, 1, f.stream) == 1 && good;
    }
  }
  free(header);
  return close_file(&f, r->o->out) && good;
}

static bool write_config(run *r)
{
  const decoder_config *c = &r->o->c;
  file f;
  if (!open_file(&f, r->o->out, "config.json")) return false;
  fprintf(f.stream,
          "{\n  \"model_type\": \"qwen3_moe\",\n  \"num_hidden_layers\": %d,\n  \"hidden_size\": %d,\n"
          "  \"vocab_size\": %d,\n  \"max_position_embeddings\": %d,\n  \"num_attention_heads\": %d,\n"
          "  \"num_key_value_heads\": %d,\n  \"head_dim\": %d,\n  \"num_experts\": %d,\n"
          "  \"num_experts_per_tok\": %d,\n  \"moe_intermediate_size\": %d,\n  \"rms_norm_eps\": %g,\n"
          "  \"rope_theta\": %g,\n  \"norm_topk_prob\": true\n}\n",
          (int)c->layers, (int)c->hidden, (int)c->vocab, (int)c->length, (int)c->heads, (int)c->kv_heads,
          (int)c->head_dim, (int)c->experts, (int)c->top_k, (int)c->inter, c->norm_eps, c->rope_base);
  return close_file(&f, r->o->out);
}

enum { WIDTH = 720, HEIGHT = 400, LEFT = 50, BOTTOM = 360, RIGHT = 700, TOP = 30 };

/* A line through the mean of every `group` steps. */
static void draw_line(FILE *to, const run *r, double most, int64_t group, const char *colour, double width)
{
  fprintf(to, "<polyline fill='none' stroke='%s' stroke-width='%g' points='", colour, width);
  for (int64_t i = 0; i < r->done; i += group) {
    const int64_t end = i + group < r->done ? i + group : r->done;
    double sum = 0;
    for (int64_t j = i; j < end; j++) sum += (double)r->losses[j] / (double)(end - i);
    const double x = LEFT + (RIGHT - LEFT) * (double)(i + end) / 2 / (double)r->o->steps;
    fprintf(to, "%.1f,%.1f ", x, BOTTOM - (BOTTOM - TOP) * sum / most);
  }
  fprintf(to, "'/>\n");
}

static bool write_losses(run *r)
{
  file f;
  if (!open_file(&f, r->o->out, "loss.csv")) return false;
  fprintf(f.stream, "step,loss\n");
  for (int64_t i = 0; i < r->done; i++) fprintf(f.stream, "%lld,%.6f\n", (long long)i + 1, (double)r->losses[i]);
  return close_file(&f, r->o->out);
}

static bool write_curve(run *r)
{
  file f;
  double most = 1;
  if (!open_file(&f, r->o->out, "loss.svg")) return false;
  for (int64_t i = 0; i < r->done; i++) most = fmax(most, ceil((double)r->losses[i]));
  fprintf(f.stream,
          "<svg xmlns='http://www.w3.org/2000/svg' width='%d' height='%d' font-family='sans-serif' font-size='12'>\n"
          "<rect width='100%%' height='100%%' fill='white'/>\n<text x='%d' y='18'>loss, nats a byte</text>\n",
          WIDTH, HEIGHT, LEFT);
  for (int i = 0; i <= (int)most; i++) {
    const double y = BOTTOM - (BOTTOM - TOP) * i / most;
    fprintf(f.stream, "<path d='M%d %.1fH%d' stroke='#ddd'/><text x='%d' y='%.1f' text-anchor='end'>%d</text>\n", LEFT,
            y, RIGHT, LEFT - 6, y + 4, i);
  }
  for (int i = 0; i <= 5; i++)
    fprintf(f.stream, "<text x='%d' y='%d' text-anchor='middle'>%lld</text>\n", LEFT + (RIGHT - LEFT) * i / 5,
            BOTTOM + 18, (long long)(r->o->steps * i / 5));
  fprintf(f.stream, "<text x='%d' y='%d' text-anchor='end'>step</text>\n", RIGHT, BOTTOM + 36);
  draw_line(f.stream, r, most, 1, "#9bd", 1);
  draw_line(f.stream, r, most, 1 + r->o->steps / 50, "#036", 2);
  fprintf(f.stream, "</svg>\n");
  return close_file(&f, r->o->out);
}

/* ---- training --------------------------------------------------------------------------------------- */

static volatile sig_atomic_t stopped;

static void stop(int number)
{
  (void)number;
  stopped = 1;
}

/* Up over a tenth of the steps, 100 at most, then down half a cosine to a tenth. */
static float rate_of(const options *o, int64_t step)
{
  const double warm = fmin(100, (double)o->steps / 10 + 1), at = (double)step + 1;
  const double along = (at - warm) / fmax(1, (double)o->steps - warm);
  return (float)(o->rate * (at < warm ? at / warm : .55 + .45 * cos(acos(-1) * along)));
}

static void print_progress(const run *r, double seconds, int64_t since, bool last)
{
  const int64_t tokens = (int64_t)r->o->c.batch * r->o->c.length, fresh = r->done - since;
  const double left = seconds / (double)fresh * (double)(r->o->steps - r->done);
  const bool terminal = isatty(STDERR_FILENO);
  fprintf(stderr, "%sstep %lld of %lld   loss %.3f   %.0f tokens/s   %d:%02d left%s%s", terminal ? "\r" : "",
          (long long)r->done, (long long)r->o->steps, (double)r->losses[r->done - 1],
          (double)(fresh * tokens) / seconds, (int)left / 60, (int)left % 60, terminal ? "   " : "",
          terminal && !last ? "" : "\n");
}

static bool step_once(run *r)
{
  draw_batch(r->o, &r->t, r->done, &r->next);
  if (!decoder_train(r->model, r->next.tokens, r->next.targets, rate_of(r->o, r->done)))
    return complain("%s", decoder_error(r->model));
  r->done++;
  return true;
}

/* Waits for the steps begun. */
static bool read_losses(run *r)
{
  const int32_t count = decoder_losses(r->model, r->losses + r->read);
  if (count < 0) return complain("%s", decoder_error(r->model));
  r->read += count;
  return true;
}

static bool train(run *r)
{
  const int64_t since = r->done;
  const double begin = now(), pause = isatty(STDERR_FILENO) ? .2 : 5;
  double printed = 0, written = begin;
  for (bool last = r->done == r->o->steps || stopped; !last;) {
    if (!step_once(r)) return false;
    last = r->done == r->o->steps || stopped;
    const bool prints = last || now() - printed >= pause, writes = last || now() - written >= (double)r->o->interval;
    if ((prints || writes || r->done - r->read == DECODER_LOSSES) && !read_losses(r)) return false;
    if (prints) {
      print_progress(r, now() - begin, since, last);
      printed = now();
    }
    if (!writes) continue;
    if (!write_checkpoint(r)) return false;
    written = now();
  }
  return true;
}

/* Of the text that was held back, at most four batches of it. */
static bool validate(run *r, double *loss)
{
  const int64_t bytes = (int64_t)r->o->c.batch * r->o->c.length;
  int64_t batches = 0;
  *loss = 0;
  for (int64_t at = r->t.trained; at + bytes < r->t.size && batches < 4; at += bytes, batches++) {
    float one;
    for (int32_t i = 0; i < r->o->c.batch; i++) copy_sequence(r->o, &r->t, at + i * r->o->c.length, i, &r->next);
    if (!decoder_run(r->model, r->next.tokens, r->next.targets, false, &one))
      return complain("%s", decoder_error(r->model));
    *loss += (double)one;
  }
  *loss /= batches > 0 ? (double)batches : NAN;
  return true;
}

static bool finish(run *r)
{
  char path[1024];
  double loss;
  if (!write_losses(r) || !write_curve(r)) return false;
  if (r->done < r->o->steps) return complain("stopped after step %lld: started again, it goes on", (long long)r->done);
  if (!write_config(r) || !write_model(r) || !validate(r, &loss)) return false;
  snprintf(path, sizeof path, "%s/checkpoint", r->o->out);
  unlink(path); /* the next run begins anew */
  if (loss == loss) printf("loss of text held back: %.3f nats a byte, %.3f bits\n", loss, loss / log(2));
  printf("the model is in %s; the demo runs it: make demo DEMO_ARGS=\"--model %s\"\n", r->o->out, r->o->out);
  return true;
}

static bool open_run(run *r, cumoe_context context)
{
  char error[600];
  const size_t tokens = (size_t)r->o->c.batch * (size_t)r->o->c.length;
  struct stat is;
  if (mkdir(r->o->out, 0777) != 0 && errno != EEXIST) return complain("%s: %s", r->o->out, strerror(errno));
  if (stat(r->o->out, &is) != 0 || !S_ISDIR(is.st_mode)) return complain("%s is no folder", r->o->out);
  if (!read_text(r->o, &r->t)) return false;
  say_same(r);
  r->model = decoder_create(context, &r->o->c, error, sizeof error);
  if (!r->model) return complain("%s", error);
  r->numbers = malloc((size_t)decoder_numbers(r->model) * sizeof *r->numbers);
  r->losses = calloc((size_t)r->o->steps, sizeof *r->losses);
  r->next = (batch){malloc(tokens * sizeof(int32_t)), malloc(tokens * sizeof(int32_t))};
  if (!r->numbers || !r->losses || !r->next.tokens || !r->next.targets) return complain("out of memory");
  if (!decoder_start(r->model, (uint64_t)r->o->seed)) return complain("%s", decoder_error(r->model));
  fprintf(stderr, "%lld parameters, %lld bytes of text, %lld steps of %d x %d tokens in %s, on %s\n",
          (long long)decoder_numbers(r->model), (long long)r->t.size, (long long)r->o->steps, (int)r->o->c.batch,
          (int)r->o->c.length, cumoe_dtype_name(r->o->c.dtype), r->device);
  return resume(r);
}

static void close_run(run *r)
{
  decoder_destroy(r->model);
  free(r->numbers);
  free(r->losses);
  free(r->next.tokens);
  free(r->next.targets);
  free(r->t.bytes);
}

int main(int argc, char **argv)
{
  options o = {.c = {.layers = 4,
                     .hidden = 128,
                     .vocab = 256,
                     .heads = 4,
                     .kv_heads = 2,
                     .head_dim = 32,
                     .experts = 16,
                     .top_k = 4,
                     .inter = 128,
                     .length = 128,
                     .norm_eps = 1e-6,
                     .rope_base = 1e4,
                     .balance = .002f,
                     .clip = 1,
                     .decay = .1f,
                     .dtype = CUMOE_F32},
               .device = CUMOE_DEVICE_AUTO,
               .seed = 1,
               .interval = 20,
               .rate = .004,
               .out = "lib/trained"};
  const int status = parse_options(argc, argv, &o);
  if (status) return status - 1;
  const cumoe_context_config config = {.size = sizeof config, .cpu_threads = (int32_t)o.threads};
  cumoe_context context;
  cumoe_device_info info = {.size = sizeof info};
  if (cumoe_context_create(o.device, &config, &context) != CUMOE_OK || cumoe_context_info(context, &info) != CUMOE_OK)
    return complain("%s", cumoe_last_error()), 1;
  const bool on_cpu = info.device == CUMOE_DEVICE_CPU;
  if (!o.steps) o.steps = on_cpu ? 200 : 2000;
  if (!o.c.batch) o.c.batch = on_cpu ? 4 : 16;
  run r = {.o = &o, .device = on_cpu ? "the CPU" : info.name};
  signal(SIGINT, stop);
  signal(SIGTERM, stop);
  const bool good = open_run(&r, context) && train(&r) && finish(&r);
  close_run(&r);
  CUMOE_IGNORE(cumoe_context_destroy(context));
  return good ? 0 : 1;
}
