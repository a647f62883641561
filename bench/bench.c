/*
 * Times the layer, its stages and cuBLAS on the shapes of released models. A cell that computes something
 * else than the layer is marked WRONG and makes the exit status 1.
 */
#include "bench.h"

#include <stdlib.h>
#include <string.h>

/* ---- options --------------------------------------------------------------------------------------- */

static const char usage[] =
    "usage: bench [options]\n"
    "  --model A,B       layers of bench/shapes.def by name, or all (the large ones of it; on the CPU "
    "device: toy)\n"
    "  --tokens N,M      token counts (1,8,32,128,512,2048,8192)\n"
    "  --dtype bf16|f16  type of activations and of weights that are not quantised (bf16)\n"
    "  --format A,B      weights: bf16 (not quantised), fp8, fp8-a16, fp8-channel, int8, int4, int4-32, mxfp4, nvfp4,\n"
    "                    all (of the quantised ones). Floors by measured rates; beside each time the goal "
    "(targets.def)\n"
    "                    and that of bf16, if it is among them\n"
    "  --check           look at results only, time nothing\n"
    "  --in-out          weights [E, in, out] instead of [E, out, in]\n"
    "  --masked          for the layer the experts alone, of [E, capacity, H] with counts on the device: as many\n"
    "                    rows, even, and room for four times as many\n"
    "  --invariant       the same bits in any batch: kernels are chosen without T\n"
    "  --zipf X          caller's logits, experts' popularity 1 / rank^X, instead of the router\n"
    "  --one             caller's ids, all tokens to one expert; with it and --zipf the time that this would\n"
    "                    need if it came as near to its floor as evenly spread tokens do is printed too\n"
    "  --variant ROW     force a row of the kernel table, by name or index; repeatable, one an operation\n"
    "  --list            print the rows of the kernel table\n"
    "  --plan            print what each cell launches\n"
    "  --grouped         time cuBLAS's grouped products too\n"
    "  --cublas PATH     the library to open for the peers (libcublas.so.13)\n"
    "  --csv FILE        write the numbers there as well\n"
    "  --ids FILE        write there which experts the tokens went to: peers.py --ids gives its peers the same\n"
    "  --commit TEXT     what to call this build in the header\n"
    "  --device N|cpu    CUDA ordinal or the CPU device (the first GPU)\n"
    "  --quick           few token counts, short samples\n";

static bool parse_tokens(const char *text, options *o)
{
  o->tokens_count = 0;
  for (const char *p = text; *p && o->tokens_count < MAX_TOKENS;) {
    char *end;
    const long long n = strtoll(p, &end, 10);
    if (end == p || n < 1 || n > 1 << 24 || (*end && *end != ',')) return false;
    o->tokens[o->tokens_count++] = n;
    p = *end ? end + 1 : end;
  }
  return o->tokens_count > 0;
}

static bool parse_device(const char *text, options *o)
{
  char *end;
  o->device = strcmp(text, "cpu") == 0 ? CUMOE_DEVICE_CPU : (int32_t)strtol(text, &end, 10);
  return o->device == CUMOE_DEVICE_CPU || (*text >= '0' && *text <= '9' && !*end);
}

static bool parse_formats(const char *text, options *o)
{
  char bad[64];
  o->formats = kinds_parse(text, o, bad, sizeof bad);
  return o->formats;
}

static bool parse_value(const char *name, const char *text, options *o)
{
  char *end;
  if (strcmp(name, "--format") == 0) return parse_formats(text, o);
  if (strcmp(name, "--model") == 0) return (o->models = text) != NULL;
  if (strcmp(name, "--csv") == 0) return (o->csv = text) != NULL;
  if (strcmp(name, "--ids") == 0) return (o->ids = text) != NULL;
  if (strcmp(name, "--cublas") == 0) return (o->cublas = text) != NULL;
  if (strcmp(name, "--commit") == 0) return (o->commit = text) != NULL;
  if (strcmp(name, "--tokens") == 0) return parse_tokens(text, o);
  if (strcmp(name, "--device") == 0) return parse_device(text, o);
  if (strcmp(name, "--dtype") == 0) {
    o->dtype = strcmp(text, "f16") == 0 ? CUMOE_F16 : CUMOE_BF16;
    return o->dtype == CUMOE_F16 || strcmp(text, "bf16") == 0;
  }
  if (strcmp(name, "--zipf") == 0) {
    o->zipf = strtod(text, &end);
    return *text && !*end && o->zipf > 0 && o->zipf <= 8;
  }
  if (strcmp(name, "--variant") == 0 && o->forced_count < MAX_FORCED) {
    o->forced[o->forced_count++] = text;
    return true;
  }
  return false;
}

static bool parse_flag(const char *name, options *o)
{
  if (strcmp(name, "--quick") == 0) return o->quick = true;
  if (strcmp(name, "--grouped") == 0) return o->grouped = true;
  if (strcmp(name, "--list") == 0) return o->list = true;
  if (strcmp(name, "--in-out") == 0) return o->in_out = true;
  if (strcmp(name, "--invariant") == 0) return o->invariant = true;
  if (strcmp(name, "--masked") == 0) return o->masked = true;
  if (strcmp(name, "--plan") == 0) return o->plan = true;
  if (strcmp(name, "--check") == 0) return o->check = true;
  if (strcmp(name, "--one") == 0) return o->one = true;
  return false;
}

/* 0: go on; otherwise the exit status plus one. */
static int parse_options(int argc, char **argv, options *o)
{
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
      fputs(usage, stdout);
      return 1;
    }
    if (parse_flag(argv[i], o)) continue;
    if (i + 1 >= argc || !parse_value(argv[i], argv[i + 1], o)) {
      fprintf(stderr, "bench: %s %s: not understood\n%s", argv[i], i + 1 < argc ? argv[i + 1] : "", usage);
      return 3;
    }
    ++i;
  }
  return 0;
}

static bool in_list(const char *list, const char *name)
{
  const size_t length = strlen(name);
  for (const char *p = list; p; p = strchr(p, ',')) {
    p += *p == ',';
    const size_t part = strcspn(p, ",");
    if ((part == length && memcmp(p, name, length) == 0) || (part == 3 && memcmp(p, "all", 3) == 0)) return true;
  }
  return false;
}

static bool wanted(const bench *b, const shape *s)
{
  if (b->o.models) return in_list(b->o.models, s->name);
  return s->when == (b->device.device == CUMOE_DEVICE_CPU ? SHAPE_cpu : SHAPE_always);
}

/* Every name of the list has to be one: a typo would otherwise measure nothing and succeed. */
static bool models_known(const char *list)
{
  for (const char *p = list; p && *p;) {
    const size_t part = strcspn(p, ",");
    bool known = part == 3 && memcmp(p, "all", 3) == 0;
    for (int32_t i = 0; i < shape_count(); ++i) {
      const shape s = shape_at(i);
      known = known || (strlen(s.name) == part && memcmp(p, s.name, part) == 0);
    }
    if (!known) {
      fprintf(stderr, "bench: %.*s is no row of bench/shapes.def\n", (int)part, p);
      return false;
    }
    p += part;
    p += *p == ',';
  }
  return true;
}

static void default_tokens(options *o, bool cpu)
{
  if (o->tokens_count) return;
  parse_tokens(cpu ? "1,8,64" : o->quick ? "1,32,512,8192" : "1,8,32,128,512,2048,8192", o);
}

/* ---- kernel table ---------------------------------------------------------------------------------- */

static cumoe_status list_variants(bench *b)
{
  for (int32_t i = 0; i < cumoe_variant_count(); ++i) {
    cumoe_variant_info info = {.size = sizeof info};
    TRY(cumoe_variant_get(b->context, i, &info));
    printf("%4d %-10s %s%s\n", (int)i, info.op, info.name, info.usable ? "" : " (not on this device)");
  }
  return CUMOE_OK;
}

/* -1: no such row. */
static int32_t find_variant(bench *b, const char *text)
{
  char *end;
  const long index = strtol(text, &end, 10);
  if (*text && !*end) return index >= 0 && index < cumoe_variant_count() ? (int32_t)index : -1;
  for (int32_t i = 0; i < cumoe_variant_count(); ++i) {
    cumoe_variant_info info = {.size = sizeof info};
    if (cumoe_variant_get(b->context, i, &info) == CUMOE_OK && strcmp(info.name, text) == 0) return i;
  }
  return -1;
}

static cumoe_status force_variants(bench *b)
{
  for (int32_t i = 0; i < b->o.forced_count; ++i) {
    const int32_t index = find_variant(b, b->o.forced[i]);
    if (index < 0) {
      snprintf(b->error, sizeof b->error, "%s is no row of the kernel table (--list prints it)", b->o.forced[i]);
      return CUMOE_ERR_INVALID_ARGUMENT;
    }
    TRY(cumoe_variant_force(b->context, index));
  }
  return CUMOE_OK;
}

/* ---- cells ----------------------------------------------------------------------------------------- */

static void account(result *r)
{
  const cell *c = r->cell;
  const shape *s = c->model->shape;
  const kind *k = c->model->kind;
  const cumoe_dtype dtype = c->bench->o.dtype;
  const double activation_bytes = (double)format_size(dtype, 2 * c->tokens * s->hidden);
  int64_t active = 0;
  for (int64_t i = 0; i < (int64_t)c->inputs * s->experts; ++i) active += c->host_counts[i] > 0;
  r->active = (double)active / c->inputs;
  r->weight_bytes = r->active * kind_bytes(k, s, dtype);
  r->flops = 6.0 * (double)c->rows * s->hidden * s->inter;
  if (!c->bench->rates) return;
  const rates most = rates_of(c->bench);
  const double bytes_us = 1e6 * (r->weight_bytes + activation_bytes) / most.bytes_per_second,
               flops_us = 1e6 * r->flops / (kind_has_codes_of_rows(k) ? most.flops8 : most.flops16);
  r->floor_us = bytes_us > flops_us ? bytes_us : flops_us;
}

static cumoe_status time_cell(bench *b, cell *c, result *r)
{
  work works[ITEM_COUNT] = {{0}};
  peers *p = NULL;
  TRY(check_cell(c, &r->verdict));
  account(r);
  if (b->o.check) return CUMOE_OK;
  cell_works(c, works);
  cumoe_status status = peers_create(c, &p, works);
  if (status == CUMOE_OK) status = measure(b, works, ITEM_COUNT, c->inputs, r->timings, &r->clocks);
  if (status == CUMOE_OK && b->device.device != CUMOE_DEVICE_CPU)
    status = measure_host(b, &works[ITEM_layer], c->inputs, &r->host_us);
  peers_destroy(p);
  return status;
}

static spread spread_of(const bench *b)
{
  if (b->o.one) return SPREAD_one;
  return b->o.zipf > 0 ? SPREAD_zipf : SPREAD_router;
}

/* What the layer takes with evenly spread tokens, and the floor of that. */
static cumoe_status time_even(bench *b, model *m, int64_t tokens, result *even)
{
  cell c;
  work works[ITEM_COUNT] = {{0}};
  *even = (result){.cell = &c};
  cumoe_status status = cell_create(b, m, tokens, SPREAD_even, &c);
  if (status == CUMOE_OK) status = check_cell(&c, &even->verdict);
  if (status == CUMOE_OK) {
    account(even);
    cell_works(&c, works);
    status = measure(b, works, ITEM_layer + 1, c.inputs, even->timings, NULL);
  }
  cell_destroy(&c);
  return status;
}

static cumoe_status add_needed(bench *b, model *m, result *r)
{
  result even;
  if (r->cell->spread == SPREAD_router || b->o.check) return CUMOE_OK;
  TRY(time_even(b, m, r->cell->tokens, &even));
  if (even.floor_us > 0) r->needed_us = r->floor_us * even.timings[ITEM_layer].median / even.floor_us;
  return CUMOE_OK;
}

static cumoe_status print_plan(const model *m, int64_t tokens)
{
  char text[4096];
  TRY(cumoe_plan_describe(m->plan, m->weights, tokens, text, sizeof text));
  printf("%s", text);
  return CUMOE_OK;
}

/* False: wrong or failed. A forced row that cannot serve a cell is neither. */
static bool run_cell(bench *b, model *m, int64_t tokens, reference *dense, tally *t)
{
  cell c;
  result r = {.cell = &c};
  cumoe_status status = cell_create(b, m, tokens, spread_of(b), &c);
  c.dense = dense;
  if (status == CUMOE_OK && b->o.plan) status = print_plan(m, tokens);
  if (status == CUMOE_OK) status = time_cell(b, &c, &r);
  if (status == CUMOE_OK) status = ids_write(b, &c);
  if (status == CUMOE_OK) status = add_needed(b, m, &r);
  if (status == CUMOE_OK) {
    print_row(b, &r);
    csv_row(b, &r);
    tally_add(t, &r);
  } else {
    printf("%6lld  %s: %s\n", (long long)tokens, cumoe_status_name(status), failure_text(b));
    b->error[0] = 0;
  }
  if (kind_is_dense(m->kind)) dense->us = r.timings[ITEM_layer].median;
  cell_destroy(&c);
  if (b->o.forced_count && status == CUMOE_ERR_NOT_SUPPORTED) return true;
  return status == CUMOE_OK && verdict_good(&r.verdict);
}

static bool run_kind(bench *b, const shape *s, int32_t index, reference *dense)
{
  model m;
  bool good = true;
  const cumoe_status status = model_create(b, s, b->o.kinds[index], &m);
  print_shape(b, &m);
  if (status != CUMOE_OK) {
    printf("%s: %s\n", cumoe_status_name(status), failure_text(b));
    good = false;
  }
  for (int32_t i = 0; i < b->o.tokens_count && status == CUMOE_OK; ++i)
    good = run_cell(b, &m, b->o.tokens[i], &dense[i], &b->tallies[index]) && good;
  model_destroy(&m);
  return good;
}

static bool run_shape(bench *b, const shape *s)
{
  reference dense[MAX_TOKENS] = {{0}};
  bool good = true;
  for (int32_t i = 0; i < b->o.tokens_count && b->o.kinds_count > 1; ++i)
    dense[i].out = malloc(REFERENCE * sizeof *dense[i].out);
  for (int32_t i = 0; i < b->o.kinds_count; ++i) good = run_kind(b, s, i, dense) && good;
  for (int32_t i = 0; i < b->o.tokens_count; ++i) free(dense[i].out);
  return good;
}

static bool run_all(bench *b)
{
  bool good = true;
  print_header(b);
  for (int32_t i = 0; i < shape_count(); ++i) {
    const shape s = shape_at(i);
    if (wanted(b, &s)) good = run_shape(b, &s) && good;
  }
  print_tallies(b, b->tallies);
  return good;
}

/* ---- main ------------------------------------------------------------------------------------------ */

/* Where there is a driver, numbers of the CPU would be taken for the GPU's. */
static cumoe_status accept_cpu(bench *b)
{
  int driver = 0;
  (void)cudaDriverGetVersion(&driver);
  if (driver > 0) {
    snprintf(b->error, sizeof b->error, "no GPU is used, --device cpu measures the CPU device: %s", b->device.fallback);
    return CUMOE_ERR_NO_DEVICE;
  }
  printf("on the CPU device, a toy layer: %s\n", b->device.fallback);
  return CUMOE_OK;
}

static cumoe_status start(bench *b)
{
  TRY(bench_open(b));
  const bool cpu = b->device.device == CUMOE_DEVICE_CPU;
  if (cpu && b->o.device != CUMOE_DEVICE_CPU) TRY(accept_cpu(b));
  default_tokens(&b->o, cpu);
  if (!b->o.formats) b->o.kinds[b->o.kinds_count++] = &not_quantised;
  if (b->o.list) return CUMOE_OK;
  b->blas = cpu ? NULL : cublas_open(b);
  if (!cpu && !b->blas) fprintf(stderr, "bench: no cuBLAS peers: %s\n", b->error);
  b->error[0] = 0;
  TRY(force_variants(b));
  return make_noise(b);
}

static void stop(bench *b)
{
  cublas_close(b->blas);
  if (b->csv) fclose(b->csv);
  if (b->ids) fclose(b->ids);
  bench_close(b);
}

int main(int argc, char **argv)
{
  bench b = {.o = {.device = CUMOE_DEVICE_AUTO, .dtype = CUMOE_BF16}, .seed = 1};
  const int early = parse_options(argc, argv, &b.o);
  if (early) return early - 1;
  if (b.o.in_out && b.o.formats) {
    fprintf(stderr, "bench: --in-out is for weights that are not quantised\n");
    return 2;
  }
  if (b.o.models && !models_known(b.o.models)) return 2;
  cumoe_status status = start(&b);
  bool good = status == CUMOE_OK;
  if (good && b.o.list) {
    good = (status = list_variants(&b)) == CUMOE_OK;
  } else if (good && !csv_open(&b)) {
    fprintf(stderr, "bench: %s cannot be written\n", b.o.csv);
    good = false;
  } else if (good && !ids_open(&b)) {
    fprintf(stderr, "bench: %s cannot be written\n", b.o.ids);
    good = false;
  } else if (good) {
    good = run_all(&b);
  }
  if (status != CUMOE_OK) fprintf(stderr, "bench: %s\n", failure_text(&b));
  stop(&b);
  return good ? 0 : 1;
}
