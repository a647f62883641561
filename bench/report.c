/* The printed table and the CSV file: the same numbers, and the facts without which they mean nothing. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef CUMOE_COMMIT
#define CUMOE_COMMIT "unknown"
#endif

const char *failure_text(const bench *b)
{
  return b->error[0] ? b->error : cumoe_last_error();
}

/* ---- facts of the run ---- */

typedef struct facts {
  char driver[64], runtime[32], library[32], date[32], cublas[32];
  const char *commit;
} facts;

static void read_driver(char *text, size_t bytes)
{
  int cuda = 0, length = 0;
  char kernel[40] = "";
  FILE *file = fopen("/sys/module/nvidia/version", "r");
  if (file) {
    if (fgets(kernel, sizeof kernel, file)) kernel[strcspn(kernel, "\n")] = 0;
    fclose(file);
  }
  if (cudaDriverGetVersion(&cuda) == cudaSuccess && cuda > 0)
    length = snprintf(text, bytes, "%s%sCUDA %d.%d", kernel, kernel[0] ? " " : "", cuda / 1000, cuda % 1000 / 10);
  if (length <= 0) snprintf(text, bytes, "none");
}

static facts read_facts(const bench *b)
{
  facts f = {.commit = b->o.commit ? b->o.commit : CUMOE_COMMIT};
  int cuda = 0;
  const int blas = cublas_version(b->blas), version = cumoe_version();
  const time_t now = time(NULL);
  read_driver(f.driver, sizeof f.driver);
  (void)cudaRuntimeGetVersion(&cuda);
  snprintf(f.runtime, sizeof f.runtime, "%d.%d", cuda / 1000, cuda % 1000 / 10);
  snprintf(f.library, sizeof f.library, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
  strftime(f.date, sizeof f.date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
  if (blas)
    snprintf(f.cublas, sizeof f.cublas, "%d.%d.%d", blas / 10000, blas / 100 % 100, blas % 100);
  else
    snprintf(f.cublas, sizeof f.cublas, "none");
  return f;
}

static void forced_text(const bench *b, char *text, size_t bytes)
{
  size_t at = 0;
  text[0] = 0;
  for (int32_t i = 0; i < b->o.forced_count && at < bytes; ++i)
    at += (size_t)snprintf(text + at, bytes - at, "%s%s", i ? "+" : "", b->o.forced[i]);
}

static void routing_text(const bench *b, char *text, size_t bytes)
{
  if (b->o.one)
    snprintf(text, bytes, "one expert");
  else if (b->o.zipf > 0)
    snprintf(text, bytes, "zipf %g", b->o.zipf);
  else
    snprintf(text, bytes, "router");
}

static bool skewed(const bench *b)
{
  return b->o.one || b->o.zipf > 0;
}

/* ---- table ---- */

/* Of weights of several formats by what was measured: part of what this kind of GPU can do at all. */
rates rates_of(const bench *b)
{
  const gpu_rates *r = b->rates;
  return b->o.formats && r->measured.flops16 > 0 ? r->measured : r->datasheet;
}

static void print_rates(const bench *b)
{
  const rates r = rates_of(b);
  printf("floor: max(active weights + activations over %.2f TB/s, products over %.0f TFLOPS",
         1e-12 * r.bytes_per_second, 1e-12 * r.flops16);
  if (b->o.formats) printf(", of codes of 8 bits %.0f", 1e-12 * r.flops8);
  printf("). ");
}

static void print_formats_header(void)
{
  printf("goal: what the layer has to reach on an H200, the smallest of a target and the best peers' times of "
         "bench/targets.def; over: the layer's time over it. peer: the quickest, of a whole layer or its two products "
         "alone. bf16: the layer with weights that are not quantised, same experts, this run; error: of the outputs "
         "against its. Stages by themselves; up "
         "and down only where activations stay as they are. MHz, W: of the SMs, while the layer ran.\n");
}

void print_header(const bench *b)
{
  const facts f = read_facts(b);
  char forced[256], routing[32];
  forced_text(b, forced, sizeof forced);
  routing_text(b, routing, sizeof routing);
  printf("cumoe %s (commit %s, %s), %s\n", f.library, f.commit, cumoe_architectures(), f.date);
  if (b->device.device == CUMOE_DEVICE_CPU)
    printf("%s\n", b->device.name);
  else
    printf("%s, %d multiprocessors, L2 %.0f MB; driver %s, CUDA runtime %s, cuBLAS %s\n", b->device.name,
           (int)b->device.multiprocessors, 1e-6 * (double)b->device.l2_bytes, f.driver, f.runtime, f.cublas);
  if (b->nvml) {
    const clock_state c = clocks_now(b->nvml);
    char text[160];
    clocks_text(&c, text, sizeof text);
    printf("before the run: %s\n", text);
  }
  printf("%s, weights [E, %s], routing by %s%s%s\n", cumoe_dtype_name(b->o.dtype), b->o.in_out ? "in, out" : "out, in",
         routing, forced[0] ? ", forced: " : "", forced);
  if (b->o.check) return;
  printf("Times: microseconds a call, median of graph replays over rotating inputs. layer: the whole of it, "
         "hidden states in, "
         "combined out.\n");
  if (b->rates) print_rates(b);
  if (b->o.formats) {
    print_formats_header();
    return;
  }
  printf("host: of the CPU thread, for an eager call. dense: cuBLAS, one expert's two products with T k rows.\nvs: the "
         "peer's time over the layer's "
         "(above 1: the layer is "
         "faster). MHz, W: of the SMs, while the layer ran.\n");
  if (skewed(b))
    printf("needed: what this would take at the part of the floor that the layer reaches with as many tokens spread "
           "evenly.\n");
}

static const char columns[] = "     T active    layer    floor  of it  TFLOPS   GB/s   host |  router    gate     "
                              "map       up     down combine "
                              "     sum |    dense    vs |";

static void print_columns(const bench *b)
{
  if (b->o.check)
    printf("     T active check\n");
  else if (b->o.formats)
    printf(
        "     T active    layer    floor  of it |     goal  over |     peer                |     bf16  gain  error |  "
        "TFLOPS   GB/s   host |  router    gate     map       up     down combine |  MHz    W check\n");
  else
    printf("%s%s%s  MHz    W check\n", columns, b->o.grouped ? "  grouped    vs |" : "",
           skewed(b) ? "  needed over |" : "");
}

void print_shape(const bench *b, const model *m)
{
  const shape *s = m->shape;
  printf("\n%s: %d experts, %d a token, hidden %d, inter %d\n", s->name, (int)s->experts, (int)s->top_k, (int)s->hidden,
         (int)s->inter);
  if (b->o.formats)
    printf("%s (%s): %.3f GB of weights\n", kind_name(m->kind, b->o.dtype), m->kind->text,
           1e-9 * s->experts * kind_bytes(m->kind, s, b->o.dtype));
  print_columns(b);
}

/* Three or four digits that matter. */
static void print_number(int width, double value)
{
  if (value <= 0)
    printf(" %*s", width, "-");
  else
    printf(" %*.*f", width, value < 99.95 ? 2 : value < 999.5 ? 1 : 0, value);
}

static void print_peer(double peer, double layer)
{
  print_number(8, peer);
  if (peer > 0)
    printf(" %5.2f |", peer / layer);
  else
    printf(" %5s |", "-");
}

static void print_verdict(const verdict *v)
{
  if (verdict_good(v))
    printf(" ok %.2f\n", v->worst);
  else
    printf(" WRONG%s%s%s%s%s\n", v->finite ? "" : " not-finite", v->repeatable ? "" : " not-repeatable",
           v->routed ? "" : " routing", v->faultless ? "" : " fault", v->worst <= 1 ? "" : " value");
}

static void print_layer(const result *r)
{
  const double layer = r->timings[ITEM_layer].median;
  print_number(8, layer);
  print_number(8, r->floor_us);
  if (r->floor_us > 0)
    printf(" %5.1f%%", 100 * r->floor_us / layer);
  else
    printf(" %6s", "-");
}

static void print_work(const result *r)
{
  const double layer = r->timings[ITEM_layer].median;
  print_number(7, 1e-6 * r->flops / layer);
  print_number(6, 1e-3 * r->weight_bytes / layer);
  print_number(6, r->host_us);
  printf(" |");
}

/* The sum of them all. */
static double print_stages(const result *r)
{
  double sum = 0;
  for (int32_t i = ITEM_router; i <= ITEM_combine; ++i) {
    print_number(i == ITEM_up || i == ITEM_down ? 8 : 7, r->timings[i].median);
    sum += r->timings[i].median;
  }
  return sum;
}

/* Beside weights that are not quantised. */
static void print_dense(const result *r)
{
  const double us = kind_is_dense(r->cell->model->kind) ? 0 : r->cell->dense->us;
  print_number(8, us);
  print_number(5, us / r->timings[ITEM_layer].median);
  if (r->verdict.error > 0)
    printf(" %5.2f%%", 100 * r->verdict.error);
  else
    printf(" %6s", "-");
}

static void print_formats_row(const result *r)
{
  const model *m = r->cell->model;
  const double layer = r->timings[ITEM_layer].median;
  goal g = {0};
  const bool known = goal_of(m->kind, m->shape->name, r->cell->tokens, &g);
  print_layer(r);
  printf(" |");
  print_number(8, g.us);
  print_number(5, known ? layer / g.us : 0);
  printf(" |");
  print_number(8, g.peer);
  printf(" %-14s |", known ? g.peer_name : "");
  print_dense(r);
  printf(" |");
  print_work(r);
  (void)print_stages(r);
  printf(" |");
}

static void print_dense_row(const bench *b, const result *r)
{
  const double layer = r->timings[ITEM_layer].median;
  print_layer(r);
  print_work(r);
  print_number(8, print_stages(r));
  printf(" |");
  print_peer(r->timings[ITEM_dense].median, layer);
  if (b->o.grouped) print_peer(r->timings[ITEM_grouped].median, layer);
  if (!skewed(b)) return;
  print_number(8, r->needed_us);
  print_number(4, r->needed_us > 0 ? layer / r->needed_us : 0);
  printf(" |");
}

void print_row(const bench *b, const result *r)
{
  printf("%6lld %6.1f", (long long)r->cell->tokens, r->active);
  if (!b->o.check) {
    if (b->o.formats)
      print_formats_row(r);
    else
      print_dense_row(b, r);
    printf(" %4u %4u", r->clocks.sm_mhz, r->clocks.watts);
  }
  print_verdict(&r->verdict);
  fflush(stdout);
}

/* ---- at the end ---- */

void tally_add(tally *t, const result *r)
{
  const model *m = r->cell->model;
  const double layer = r->timings[ITEM_layer].median, dense = r->cell->dense->us;
  goal g;
  t->cells++;
  t->wrong += !verdict_good(&r->verdict);
  if (layer <= 0) return;
  if (r->floor_us > 0) t->part += log(r->floor_us / layer);
  if (goal_of(m->kind, m->shape->name, r->cell->tokens, &g)) {
    t->goals++;
    t->met += layer <= g.us;
    t->over += log(layer / g.us);
  }
  if (kind_is_dense(m->kind) || dense <= 0) return;
  t->dense++;
  t->gain += log(dense / layer);
}

/* Geometric means. */
void print_tallies(const bench *b, const tally *tallies)
{
  if (!b->o.formats) return;
  printf("\n%-12s %6s %6s %6s %12s %8s %8s\n", "weights", "cells", "wrong", "of it", "goals met", "over", "gain");
  for (int32_t i = 0; i < b->o.kinds_count; ++i) {
    const tally *t = &tallies[i];
    printf("%-12s %6d %6d", kind_name(b->o.kinds[i], b->o.dtype), (int)t->cells, (int)t->wrong);
    if (t->cells && t->part < 0)
      printf(" %5.1f%%", 100 * exp(t->part / t->cells));
    else
      printf(" %6s", "-");
    printf(" %4d of %4d", (int)t->met, (int)t->goals);
    print_number(8, t->goals ? exp(t->over / t->goals) : 0);
    print_number(8, t->dense ? exp(t->gain / t->dense) : 0);
    printf("\n");
  }
}

/* ---- CSV ---- */

bool csv_open(bench *b)
{
  if (!b->o.csv) return true;
  b->csv = fopen(b->o.csv, "w");
  if (!b->csv) return false;
  fputs("side,model,experts,top_k,hidden,inter,dtype,format,routing,forced,tokens,active,layer_us,layer_least_us,"
        "layer_most_us,floor_us,"
        "floor_part,tflops,weights_gbs",
        b->csv);
  for (int32_t i = ITEM_router; i < ITEM_COUNT; ++i) fprintf(b->csv, ",%s_us", item_names[i]);
  fputs(",vs_dense,vs_grouped,needed_us,over_needed,rates,goal_us,peer_us,peer,bf16_us,bf16_error,sm_mhz,watts,host_us,"
        "check,"
        "worst_error,gpu,driver,cuda_runtime,"
        "cublas,"
        "library,commit,date\n",
        b->csv);
  return true;
}

static void csv_number(FILE *file, double value) /* empty: not measured */
{
  if (value > 0)
    fprintf(file, ",%.6g", value);
  else
    fputc(',', file);
}

static void csv_identity(const bench *b, const result *r)
{
  const shape *s = r->cell->model->shape;
  char forced[256], routing[32];
  forced_text(b, forced, sizeof forced);
  routing_text(b, routing, sizeof routing);
  fprintf(b->csv, "cumoe,%s,%d,%d,%d,%d,%s,%s,%s,%s,%lld", s->name, (int)s->experts, (int)s->top_k, (int)s->hidden,
          (int)s->inter, cumoe_dtype_name(b->o.dtype), kind_name(r->cell->model->kind, b->o.dtype), routing, forced,
          (long long)r->cell->tokens);
}

/* By whose rates the floor is; the goal, the best peer and weights that are not quantised. */
static void csv_goal(const bench *b, const result *r)
{
  const model *m = r->cell->model;
  goal g = {.peer_name = ""};
  (void)goal_of(m->kind, m->shape->name, r->cell->tokens, &g);
  fprintf(b->csv, ",%s", b->o.formats ? "measured" : "datasheet");
  csv_number(b->csv, g.us);
  csv_number(b->csv, g.peer);
  fprintf(b->csv, ",%s", g.peer_name);
  csv_number(b->csv, kind_is_dense(m->kind) ? 0 : r->cell->dense->us);
  csv_number(b->csv, r->verdict.error);
}

static void csv_facts(const bench *b, const result *r)
{
  const facts f = read_facts(b);
  fprintf(b->csv, ",%s,%.3g,\"%s\",%s,%s,%s,%s,%s,%s\n", verdict_good(&r->verdict) ? "ok" : "WRONG", r->verdict.worst,
          b->device.name, f.driver, f.runtime, f.cublas, f.library, f.commit, f.date);
  fflush(b->csv);
}

void csv_row(const bench *b, const result *r)
{
  const timing *t = r->timings;
  const double layer = t[ITEM_layer].median;
  if (!b->csv || b->o.check) return;
  csv_identity(b, r);
  csv_number(b->csv, r->active);
  csv_number(b->csv, layer);
  csv_number(b->csv, t[ITEM_layer].least);
  csv_number(b->csv, t[ITEM_layer].most);
  csv_number(b->csv, r->floor_us);
  csv_number(b->csv, r->floor_us / layer);
  csv_number(b->csv, 1e-6 * r->flops / layer);
  csv_number(b->csv, 1e-3 * r->weight_bytes / layer);
  for (int32_t i = ITEM_router; i < ITEM_COUNT; ++i) csv_number(b->csv, t[i].median);
  csv_number(b->csv, t[ITEM_dense].median / layer);
  csv_number(b->csv, t[ITEM_grouped].median / layer);
  csv_number(b->csv, r->needed_us);
  csv_number(b->csv, r->needed_us > 0 ? layer / r->needed_us : 0);
  csv_goal(b, r);
  csv_number(b->csv, r->clocks.sm_mhz);
  csv_number(b->csv, r->clocks.watts);
  csv_number(b->csv, r->host_us);
  csv_facts(b, r);
}

bool ids_open(bench *b)
{
  if (b->o.ids) b->ids = fopen(b->o.ids, "wb");
  return !b->o.ids || b->ids;
}

cumoe_status ids_write(const bench *b, const cell *c)
{
  const size_t bytes = (size_t)c->rows * sizeof(int32_t);
  if (!b->ids) return CUMOE_OK;
  int32_t *ids = malloc(bytes);
  cumoe_status status = ids ? CUMOE_OK : CUMOE_ERR_OUT_OF_MEMORY;
  fprintf(b->ids, "%s %lld %d %d\n", c->model->shape->name, (long long)c->tokens, (int)c->model->shape->routing.top_k,
          (int)c->inputs);
  for (int32_t i = 0; i < c->inputs && status == CUMOE_OK; ++i) {
    status = cumoe_copy_to_host(b->context, ids, bytes, cumoe_const(c->ids[i]), b->stream);
    if (status == CUMOE_OK) fwrite(ids, sizeof *ids, (size_t)c->rows, b->ids);
  }
  free(ids);
  return status;
}
