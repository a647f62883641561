/*
 * Runs a harness without libFuzzer: every file of a folder as it is, then changed copies of them for some seconds,
 * always the same ones in the same order. Usage: <harness> FOLDER SECONDS FILE; an input that kills the run is left in
 * FILE. Last line: "N inputs, N changed ones".
 */
#include "fuzz.h"

#include <dirent.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <string.h>
#include <time.h>

enum { MAX_INPUTS = 4096, LARGEST = 1 << 16 };

typedef struct input {
  unsigned char *bytes;
  size_t size;
} input;

static input inputs[MAX_INPUTS];
static int input_count;
static unsigned char changed[LARGEST];
static uint64_t state = 1;

static uint64_t next(uint64_t limit)
{
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (state >> 33) % limit;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
  return strcmp((*a)->d_name, (*b)->d_name);
}

static void read_input(const char *folder, const char *name)
{
  char path[4096];
  (void)snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "rb");
  if (!file || name[0] == '.' || input_count == MAX_INPUTS) {
    if (file) (void)fclose(file);
    return;
  }
  input *in = &inputs[input_count++];
  in->size = fread(changed, 1, sizeof changed, file);
  in->bytes = malloc(in->size + 1);
  PROMISE(in->bytes, "no memory");
  memcpy(in->bytes, changed, in->size);
  (void)fclose(file);
}

static void read_folder(const char *folder)
{
  struct dirent **names = NULL;
  const int count = scandir(folder, &names, NULL, by_name);
  for (int i = 0; i < count; i++) {
    read_input(folder, names[i]->d_name);
    free(names[i]);
  }
  free(names);
}

static const char *last_path;
static const unsigned char *last;
static size_t last_size;

static void keep_last(void)
{
  FILE *file = last ? fopen(last_path, "wb") : NULL;
  if (!file) return;
  (void)fwrite(last, 1, last_size, file);
  (void)fclose(file);
}

static void on_abort(int number)
{
  (void)number;
  keep_last();
}

/* From exact heap memory, so that a read past the end is seen. */
static void run_one(const unsigned char *bytes, size_t size)
{
  unsigned char *exact = malloc(size ? size : 1);
  PROMISE(exact, "no memory");
  memcpy(exact, bytes, size);
  last = bytes;
  last_size = size;
  (void)LLVMFuzzerTestOneInput(exact, size);
  last = NULL;
  free(exact);
}

/* Flips, sets, inserts, removes or copies a few bytes. */
static size_t change_once(size_t size)
{
  static const unsigned char telling[] = {0, 1, 0x7f, 0x80, 0xff, '"', '{', '}', '[', ']', '9', '-', '\\'};
  const size_t at = next(size + 1), run = next(8) + 1;
  switch (next(5)) {
  case 0:
    if (at < size) changed[at] ^= (unsigned char)(1u << next(8));
    return size;
  case 1:
    if (at < size) changed[at] = telling[next(sizeof telling)];
    return size;
  case 2:
    if (size + run > LARGEST) return size;
    memmove(changed + at + run, changed + at, size - at);
    memset(changed + at, telling[next(sizeof telling)], run);
    return size + run;
  case 3:
    if (at + run > size) return at;
    memmove(changed + at, changed + at + run, size - at - run);
    return size - run;
  default:
    if (at + run <= size) memmove(changed + at, changed + next(size - run + 1), run);
    return size;
  }
}

/* A changed copy of one input, sometimes with the tail of another. */
static size_t change(void)
{
  const input *a = &inputs[next((uint64_t)input_count)], *b = &inputs[next((uint64_t)input_count)];
  size_t size = a->size;
  memcpy(changed, a->bytes, size);
  if (next(4) == 0 && b->size) {
    const size_t cut = next(size + 1), from = next(b->size);
    size = b->size - from < LARGEST - cut ? cut + b->size - from : LARGEST;
    memcpy(changed + cut, b->bytes + from, size - cut);
  }
  for (uint64_t times = next(6) + 1; times > 0; times--) size = change_once(size);
  return size;
}

int main(int argc, char **argv)
{
  PROMISE(argc == 4, "usage: %s FOLDER SECONDS FILE", argv[0]);
  const time_t end = time(NULL) + atoi(argv[2]);
  long long count = 0;
  last_path = argv[3];
  __sanitizer_set_death_callback(keep_last);
  (void)signal(SIGABRT, on_abort);
  read_folder(argv[1]);
  PROMISE(input_count > 0, "no inputs in %s", argv[1]);
  for (int i = 0; i < input_count; i++) run_one(inputs[i].bytes, inputs[i].size);
  for (; time(NULL) < end; count++) run_one(changed, change());
  for (int i = 0; i < input_count; i++) free(inputs[i].bytes);
  printf("%d inputs, %lld changed ones\n", input_count, count);
  return 0;
}
