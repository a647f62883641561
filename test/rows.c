/*
 * Every CUDA kernel of the table once, forced, in two small layers against the oracle: little enough to run under
 * compute-sanitizer (test/gpu.sh). What the kernels have to be able to do is variants.c. ROWS in the environment: only
 * kernels whose name has one of these words, and none that stands there behind a "!".
 */
#include "cases.h"
#include "cases_codes.h"
#include "cases_format.h"
#include "cases_masked.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A layer that the kernel serves. Those of few tokens get as many as they take; combine gets rows of whole lines of L2,
 * which it discards. */
static layer_spec spec_of(const cumoe_variant_info *info, int64_t tokens)
{
  const bool many = tokens > 70, combine = !strcmp(info->op, "combine");
  if (!strncmp(info->op, "few_", 4)) tokens = info->bm;
  layer_spec s = layer_spec_new(info->x ? info->x : CUMOE_BF16, tokens,
                                combine ? 320
                                : many  ? 72
                                        : 264,
                                combine ? 192
                                : many  ? 40
                                        : 136);
  s.input = INPUT_ROUTER;
  s.optional_outputs = true;
  s.distinct = many ? 70 : 0;
  if (!strcmp(info->op, "router")) s.router_dtype = info->w;
  if (combine && info->y != info->x) s.desc.out_dtype = info->y;
  if (row_has_format(info) || !strcmp(info->op, "quantize")) CHECK(format_for_row(info, &s));
  if (!strcmp(info->major, "N")) s.form.up_major = s.form.down_major = CUMOE_IN_OUT;
  return s;
}

/* Operations that no forward launches have cases of their own. */
static void (*own_cases(const char *op))(cumoe_context)
{
  static const struct {
    const char *op;
    void (*cases)(cumoe_context);
  } own[] = {{"quantize_masked", cases_masked_formats},
             {"encode_scales", cases_encode_scales},
             {"encode", cases_encode},
             {"scan", cases_scan},
             {"repack", cases_repack}};
  for (size_t i = 0; i < sizeof own / sizeof *own; i++)
    if (!strcmp(op, own[i].op)) return own[i].cases;
  return NULL;
}

static void run_own_cases(cumoe_context context, const cumoe_variant_info *info, int32_t index)
{
  case_drop();
  CHECK_OK(cumoe_variant_force(context, index));
  cases_forced = true;
  cases_dtype = info->x;
  cases_served = 0;
  own_cases(info->op)(context);
  case_begin("%s serves cases", info->name);
  CHECK_MSG(cases_served > 0, "no case was served");
  CHECK_OK(cumoe_variant_force(context, -1));
  cases_forced = false;
  cases_dtype = 0;
  case_end();
}

/* Whether ROWS asks for it. */
static bool asked_for(const char *name)
{
  const char *words = getenv("ROWS");
  bool any = false, one = false;
  for (const char *at = words ? words : ""; *at;) {
    char word[64];
    int length = 0;
    if (sscanf(at, " %63s%n", word, &length) < 1) break;
    at += length;
    const bool has = strstr(name, word + (*word == '!'));
    if (*word == '!' && has) return false;
    any |= *word != '!', one |= *word != '!' && has;
  }
  return one || !any;
}

enum { TOGETHER = 8 }; /* so that shards have about equally much */

static void run_row(cumoe_context context, int32_t index, int64_t tokens)
{
  cumoe_variant_info info = {.size = sizeof info};
  CHECK_OK(cumoe_variant_get(context, index, &info));
  if (!strcmp(info.arch, "cpu") || !asked_for(info.name)) {
    case_drop();
    return;
  }
  if (!info.usable) {
    case_skip("%s: this GPU cannot run it", info.name);
    return;
  }
  if (!strcmp(info.op, "quantize") && info.x == CUMOE_F32) {
    case_drop(); /* of test/quantize.c: layers with formats are of 16 bits */
    return;
  }
  if (own_cases(info.op)) {
    if (tokens > 70)
      case_drop();
    else
      run_own_cases(context, &info, index);
    return;
  }
  const layer_spec spec = spec_of(&info, tokens);
  const layer_inputs in = layer_inputs_new(&spec);
  CHECK_OK(cumoe_variant_force(context, index));
  const layer_outputs out = run_layer(context, &spec, &in);
  check_layer(&spec, &in, &out);
  check_fault(context, NULL, CUMOE_FAULT_NONE);
  CHECK_OK(cumoe_variant_force(context, -1));
  case_end();
}

int main(int argc, char **argv)
{
  test_begin(argc, argv);
  cumoe_context context = open_context(0);
  if (context) {
    for (int64_t tokens = 70; tokens <= 700; tokens *= 10) /* 700: the map takes two kernels, experts more tiles */
      for (int32_t first = 0; first < cumoe_variant_count(); first += TOGETHER)
        if (group_begin("T %" PRId64 ": rows from %d", tokens, (int)first)) {
          for (int32_t i = first; i < first + TOGETHER && i < cumoe_variant_count(); i++) {
            case_begin("row %d", (int)i);
            run_row(context, i, tokens);
          }
          group_end();
        }
    close_context(context);
  }
  return test_end();
}
