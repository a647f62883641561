/* See tune.h. */
#include "tune.h"

#include <string.h>

/* Shapes of operations without weights have none of these: any class will do. */
weights_class weights_class_of(weight_format format)
{
  switch (format) {
  case FORMAT_f32: return WEIGHTS_f32;
  case FORMAT_e4m3: return WEIGHTS_f8;
  case FORMAT_s8: return WEIGHTS_s8;
  case FORMAT_u4:
  case FORMAT_af4:
  case FORMAT_mx4:
  case FORMAT_nv4: return WEIGHTS_w4;
  case FORMAT_bf16:
  case FORMAT_f16:
  case FORMAT_none: return WEIGHTS_w16;
  }
  return WEIGHTS_w16;
}

/* ---- the files: each is read for its lines, for its limits and for their number ---- */

#define LINE(op, weights, up_to, form, BM, BN) {OP_##op, WEIGHTS_##weights, FORM_##form, up_to, BM, BN},
#define VALUES(name, ...)                      [LIMIT_##name] = {__VA_ARGS__},
#define ONE(...)                               +1
#define NOTHING(...)

#define TUNE  LINE
#define LIMIT NOTHING
static const tune_line any_lines[] = {
#include "tune/any.def"
};
#define TUNE  NOTHING
#define LIMIT ONE
_Static_assert(0
#include "tune/any.def"
                   == LIMIT_COUNT,
               "host/tune/any.def states every limit");

#ifdef CUMOE_SM90
#define TUNE  LINE
#define LIMIT NOTHING
static const tune_line h200_lines[] = {
#include "tune/h200.def"
};
#define TUNE  NOTHING
#define LIMIT ONE
_Static_assert(0
#include "tune/h200.def"
                   == LIMIT_COUNT,
               "host/tune/h200.def states every limit");

/* Of a GPU that has not been measured there is no file: `make tune` writes it, and the next build reads it. */
#if __has_include("tune/h100.def")
#define CUMOE_TUNE_H100
#define TUNE  LINE
#define LIMIT NOTHING
static const tune_line h100_lines[] = {
#include "tune/h100.def"
};
#define TUNE  NOTHING
#define LIMIT ONE
_Static_assert(0
#include "tune/h100.def"
                   == LIMIT_COUNT,
               "host/tune/h100.def states every limit");
#endif
#endif

#define LINES(array) .lines = array, .line_count = sizeof array / sizeof array[0]
static const tune_file files[] = {
#define TUNE  NOTHING
#define LIMIT VALUES
#ifdef CUMOE_SM90
    {"h200",
     "H200",
     90,
     LINES(h200_lines),
     {
#include "tune/h200.def"
     }},
#define TUNE  NOTHING
#define LIMIT VALUES
#endif
#ifdef CUMOE_TUNE_H100
    {"h100",
     "H100",
     90,
     LINES(h100_lines),
     {
#include "tune/h100.def"
     }},
#define TUNE  NOTHING
#define LIMIT VALUES
#endif
    {"any",
     "",
     0,
     LINES(any_lines),
     {
#include "tune/any.def"
     }},
};
enum { FILES = sizeof files / sizeof files[0] };

const tune_file *find_tune_file(const char *gpu, int32_t cc)
{
  for (int i = 0; i < FILES; ++i)
    if (files[i].cc == cc && strstr(gpu, files[i].model)) return &files[i];
  for (int i = 0; i < FILES - 1; ++i)
    if (files[i].cc == cc) return &files[i];
  return &files[FILES - 1];
}

/* ---- limits ---- */

limit_words words_of_limit(limit_name limit)
{
  static const limit_words words[] = {
#define LIMIT(name, unit, text) {#name, unit, text},
#include "tune/limits.def"
  };
  return words[limit];
}
