/*
 * What stands between a caller's bytes and CUDA, without a GPU: the inspection of device code, the checks of a launch,
 * optional libraries, and the record of a lost device.
 */
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../host/context.h"
#include "../host/dl.h"
#include "../host/image.h"
#include "../host/module.h"
#include "test.h"

enum { SECTIONS = 4, CUBIN_BYTES = sizeof(Elf64_Ehdr) + sizeof(Elf64_Phdr) + 64 + SECTIONS * sizeof(Elf64_Shdr) };
enum { ENTRY = 64, FATBIN_BYTES = 16 + ENTRY + CUBIN_BYTES };

typedef struct cubin {
  Elf64_Ehdr header;
  Elf64_Phdr segment;
  unsigned char code[64];
  Elf64_Shdr sections[SECTIONS];
} cubin;
_Static_assert(sizeof(cubin) == CUBIN_BYTES, "no gaps");

static cubin make_cubin(void)
{
  cubin c = {.header = {.e_ident = {0x7f, 'E', 'L', 'F', ELFCLASS64, ELFDATA2LSB, 1, 0x41, 8},
                        .e_type = ET_EXEC,
                        .e_machine = 190,
                        .e_phoff = offsetof(cubin, segment),
                        .e_shoff = offsetof(cubin, sections),
                        .e_ehsize = sizeof(Elf64_Ehdr),
                        .e_phentsize = sizeof(Elf64_Phdr),
                        .e_phnum = 1,
                        .e_shentsize = sizeof(Elf64_Shdr),
                        .e_shnum = SECTIONS,
                        .e_shstrndx = 1},
             .segment = {.p_type = PT_LOAD, .p_offset = offsetof(cubin, code), .p_filesz = 64}};
  for (int i = 1; i < SECTIONS; i++)
    c.sections[i] = (Elf64_Shdr){.sh_type = SHT_PROGBITS, .sh_offset = offsetof(cubin, code), .sh_size = 64};
  c.sections[3].sh_type = SHT_NOBITS; /* memory only: larger than the file */
  c.sections[3].sh_size = 1 << 20;
  return c;
}

typedef struct fatbin {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t rest;
  uint16_t kind, unknown;
  uint32_t entry_bytes;
  uint64_t payload_bytes;
  uint32_t compressed_bytes, fields[11];
  cubin payload;
} fatbin;
_Static_assert(sizeof(fatbin) == FATBIN_BYTES, "no gaps");

static fatbin make_fatbin(void)
{
  return (fatbin){.magic = 0xba55ed50,
                  .version = 1,
                  .header_bytes = 16,
                  .rest = ENTRY + CUBIN_BYTES,
                  .kind = 2,
                  .entry_bytes = ENTRY,
                  .payload_bytes = CUBIN_BYTES,
                  .payload = make_cubin()};
}

/* From a block of exactly that size: the sanitizers see a byte too far. */
static bool inspect(const void *image, size_t bytes, image_facts *facts)
{
  char *copy = malloc(bytes + (bytes == 0));
  memcpy(copy, image, bytes);
  const bool good = image_inspect(copy, bytes, facts);
  CHECK_MSG(good == (facts->why[0] == 0), "%s with the reason \"%s\"", good ? "accepted" : "refused", facts->why);
  free(copy);
  return good;
}

static void accept(const void *image, size_t bytes, image_kind kind)
{
  image_facts facts;
  CHECK_MSG(inspect(image, bytes, &facts), "refused: %s", facts.why);
  CHECK(facts.kind == kind);
}

static void refuse(const void *image, size_t bytes, const char *why)
{
  image_facts facts;
  CHECK_MSG(!inspect(image, bytes, &facts), "accepted");
  CHECK_MSG(strstr(facts.why, why) != NULL, "the reason is \"%s\"", facts.why);
}

static void test_cubins(void)
{
  cubin c = make_cubin();
  case_begin("whole and cut");
  accept(&c, sizeof c, IMAGE_CUBIN);
  for (size_t i = 0; i < sizeof c; i++) refuse(&c, i, "");
  case_end();
#define WITH(change, why)                                                                                              \
  case_begin(#change);                                                                                                 \
  c = make_cubin();                                                                                                    \
  c.change;                                                                                                            \
  refuse(&c, sizeof c, why);                                                                                           \
  case_end();
  WITH(header.e_ident[EI_CLASS] = ELFCLASS32, "64 bits")
  WITH(header.e_ident[EI_DATA] = ELFDATA2MSB, "little-endian")
  WITH(header.e_machine = EM_X86_64, "machine 62")
  WITH(header.e_ehsize = 52, "header of 52")
  WITH(header.e_shnum = 0, "0 section headers")
  WITH(header.e_shentsize = 40, "of 40 bytes")
  WITH(header.e_shnum = SECTIONS + 1, "not within")
  WITH(header.e_shoff = UINT64_MAX, "not within")
  WITH(header.e_shoff = UINT64_MAX - 100, "not within")
  WITH(header.e_shoff++, "not within")
  WITH(header.e_shstrndx = SECTIONS, "has the names")
  WITH(header.e_phentsize = 32, "program headers")
  WITH(header.e_phnum = 100, "program headers")
  WITH(header.e_phoff = UINT64_MAX - 8, "program headers")
  WITH(segment.p_filesz = CUBIN_BYTES, "segment 0")
  WITH(segment.p_offset = UINT64_MAX, "segment 0")
  WITH(sections[2].sh_size = UINT64_MAX, "section 2")
  WITH(sections[2].sh_offset = CUBIN_BYTES + 1, "section 2")
  WITH(sections[2].sh_offset = UINT64_MAX - 1, "section 2")
  WITH(sections[1].sh_link = SECTIONS, "linked to section 4")
#undef WITH
  case_begin("relocatable: no segments");
  c = make_cubin();
  c.header.e_phnum = 0;
  accept(&c, sizeof c, IMAGE_CUBIN);
  case_end();
}

static void test_fatbins(void)
{
  fatbin f = make_fatbin();
  case_begin("whole, cut and padded");
  unsigned char padded[FATBIN_BYTES + 24] = {0};
  memcpy(padded, &f, sizeof f);
  accept(&f, sizeof f, IMAGE_FATBIN);
  accept(padded, sizeof padded, IMAGE_FATBIN);
  for (size_t i = 0; i < sizeof f; i++) refuse(&f, i, "");
  case_end();
#define WITH(change, why)                                                                                              \
  case_begin(#change);                                                                                                 \
  f = make_fatbin();                                                                                                   \
  f.change;                                                                                                            \
  refuse(&f, sizeof f, why);                                                                                           \
  case_end();
  WITH(magic++, "neither")
  WITH(version = 2, "version 2")
  WITH(header_bytes = 8, "header of 8")
  WITH(header_bytes = UINT16_MAX, "its header says 65535")
  WITH(rest++, "its header says")
  WITH(rest = UINT64_MAX, "its header says")
  WITH(rest = 0, "neither machine code nor PTX")
  WITH(rest = 17, "cut off")
  WITH(kind = 3, "neither machine code nor PTX")
  WITH(entry_bytes = 8, "not within")
  WITH(entry_bytes = UINT32_MAX, "not within")
  WITH(payload_bytes++, "not within")
  WITH(payload_bytes = UINT64_MAX, "not within")
  WITH(payload_bytes = UINT64_MAX - ENTRY + 1, "not within")
  WITH(payload_bytes -= 8, "cubin")
  WITH(compressed_bytes = CUBIN_BYTES + 1, "compressed bytes")
  WITH(payload.header.e_machine = 62, "machine 62")
  WITH(payload.header.e_shoff = UINT64_MAX, "not within")
#undef WITH
  case_begin("what is compressed is not looked into");
  f = make_fatbin();
  f.compressed_bytes = 100;
  memset(&f.payload, 0x55, sizeof f.payload);
  accept(&f, sizeof f, IMAGE_FATBIN);
  f.kind = 1;
  accept(&f, sizeof f, IMAGE_FATBIN);
  case_end();
}

static void test_ptx(void)
{
  static const struct {
    const char *text, *why; /* NULL: accepted */
  } texts[] = {
      {".version 8.0\n.target sm_80\n", NULL},
      {"  \n\t// a comment\n/* and\nanother */ .version 9.0 // here\n\n.target sm_90a, debug\n.address_size 64\n",
       NULL},
      {"//\n//\n.version 7.8\n//\n.target sm_52", NULL},
      {".version\n", "no number"},
      {".version", "no number"},
      {".version x", "no number"},
      {".version8.0\n.target sm_80", "no number"},
      {".version 8.0\n", "no .target"},
      {".version 8.0\n.entry f", "no .target"},
      {".version 8.0 .target sm_80\n", NULL},
      {".version 8.0 /* a\nb */ .target sm_80", NULL},
      {".version 8.0x .target sm_80\n", "no .target"},
      {".version 8.0\n.target sm_80\n\001", "byte 27 is 0x01"},
      {".version 8.0\n.target sm_80\n\177", "byte 27 is 0x7f"},
      {"version 8.0", "neither"},
      {"// only a comment", "neither"},
      {"/* never closed .version 8.0", "neither"},
      {"/", "neither"},
      {"/*", "neither"},
      {"/*/", "neither"},
      {" ", "neither"},
  };
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    const size_t length = strlen(texts[i].text);
    case_begin("\"%.30s\"", texts[i].text);
    for (size_t end = length; end <= length + 1; end++) { /* without and with its NUL */
      if (texts[i].why != NULL) {
        refuse(texts[i].text, end, texts[i].why);
        continue;
      }
      accept(texts[i].text, end, IMAGE_PTX);
    }
    case_end();
  }
  case_begin("a NUL inside");
  refuse(".version 8.0\n\0.target sm_80\n", 28, "byte 13 is 0x00");
  case_end();
  case_begin("no bytes");
  refuse("", 0, "0 bytes");
  refuse("\0\0\0\0", 4, "neither");
  case_end();
}

static function_facts fake_function(struct context *context)
{
  function_facts f = {.context = context,
                      .max_threads = 512,
                      .static_smem = 1024,
                      .max_dynamic_smem = 65536,
                      .parameters = 9,
                      .parameter_bytes = {4, 4, 8, 8, 4, 8, 8, 8, 12},
                      .name = "kinds"};
  return f;
}

static void shape_case(const function_facts *f, cumoe_launch l, cumoe_status want, const char *word)
{
  launch_shape shape;
  cumoe_stream stream;
  case_begin("grid %u %u %u, block %u %u %u, cluster %u %u %u, %u bytes, flags %x", l.grid[0], l.grid[1], l.grid[2],
             l.block[0], l.block[1], l.block[2], l.cluster[0], l.cluster[1], l.cluster[2], l.dynamic_smem, l.flags);
  CHECK_STATUS(want, check_launch(f, &l, false, &shape, &stream));
  CHECK_MSG(want == CUMOE_OK || strstr(cumoe_last_error(), word) != NULL, "the text is \"%s\"", cumoe_last_error());
  case_end();
}

static void test_shapes(void)
{
  const cumoe_status bad = CUMOE_ERR_INVALID_ARGUMENT;
  struct context hopper = {.device = 0, .info = {.cc_major = 9}}, ampere = {.device = 0, .info = {.cc_major = 8}};
  const function_facts f = fake_function(&hopper), old = fake_function(&ampere);
#define SHAPE(...) ((cumoe_launch){.size = sizeof(cumoe_launch), __VA_ARGS__})
  shape_case(&f, SHAPE(.grid = {1, 1, 1}, .block = {512}), CUMOE_OK, "");
  shape_case(&f, SHAPE(.grid = {0, 1, 1}, .block = {32, 4, 4}), CUMOE_OK, "");
  shape_case(&f, SHAPE(.grid = {INT32_MAX, 65535, 65535}, .block = {8, 8, 8}), CUMOE_OK, "");
  shape_case(&f, SHAPE(.grid = {8, 2, 1}, .block = {32}, .cluster = {4, 2}, .flags = 3), CUMOE_OK, "");
  shape_case(&f, SHAPE(.grid = {1, 1, 1}, .block = {32}, .dynamic_smem = 65536), CUMOE_OK, "");
  shape_case(&old, SHAPE(.grid = {8, 1, 1}, .block = {32}, .flags = 3), CUMOE_OK, "");
  shape_case(&f, SHAPE(.grid = {1, 1, 1}, .block = {1025}), bad, "the limit is 1024");
  shape_case(&f, SHAPE(.grid = {1, 1, 1}, .block = {1, 1, 65}), bad, "the limit is 64");
  shape_case(&f, SHAPE(.grid = {1, 1, 1}, .block = {513}), bad, "513 threads, kinds can have 512");
  shape_case(&f, SHAPE(.grid = {1, 1, 1}, .block = {1024, 1024, 64}), bad, "67108864 threads");
  shape_case(&f, SHAPE(.grid = {1, 1, 1}, .block = {32}, .dynamic_smem = 65537), bad, "was looked up for 65536");
  shape_case(&f, SHAPE(.grid = {6, 1, 1}, .block = {32}, .cluster = {4}), bad, "multiple of cluster[0], 4");
  shape_case(&f, SHAPE(.grid = {9, 1, 1}, .block = {32}, .cluster = {9}), bad, "the limit is 8");
  shape_case(&f, SHAPE(.grid = {8, 8, 1}, .block = {32}, .cluster = {4, 4}), bad, "16 blocks");
  shape_case(&old, SHAPE(.grid = {8, 1, 1}, .block = {32}, .cluster = {2}), CUMOE_ERR_NOT_SUPPORTED,
             "8.0 has no clusters");
  shape_case(&f, (cumoe_launch){.size = 3}, bad, "launch.size is 3");
#undef SHAPE
  case_begin("normal form");
  launch_shape shape;
  cumoe_stream stream = NULL;
  cumoe_launch l = cumoe_launch_elements(257, CUMOE_STREAM_PER_THREAD);
  l.block[1] = l.block[2] = 0;
  l.flags = CUMOE_LAUNCH_EARLY;
  CHECK_OK(check_launch(&f, &l, false, &shape, &stream));
  CHECK(shape.grid.x == 2 && shape.grid.y == 1 && shape.block.x == 256 && shape.block.y == 1 && shape.block.z == 1);
  CHECK(shape.cluster.x == 0 && shape.early && !shape.cooperative && stream == CUMOE_STREAM_PER_THREAD);
  CHECK_OK(check_launch(&old, &l, false, &shape, &stream));
  CHECK(!shape.early);
  case_end();
  case_begin("for n elements");
  static const int64_t n[] = {0, 1, 256, 257, 256ll * INT32_MAX};
  static const uint32_t blocks[] = {0, 1, 1, 2, INT32_MAX};
  for (int i = 0; i < 5; i++) CHECK(cumoe_launch_elements(n[i], NULL).grid[0] == blocks[i]);
  l = cumoe_launch_elements(-1, NULL);
  CHECK_STATUS(bad, check_launch(&f, &l, false, &shape, &stream));
  l = cumoe_launch_elements(256ll * INT32_MAX + 1, NULL);
  CHECK_STATUS(bad, check_launch(&f, &l, false, &shape, &stream));
  case_end();
}

typedef struct arguments {
  cumoe_arg list[9];
  char blob[12];
} arguments;

static void fill_arguments(arguments *a, cumoe_buffer buffer)
{
  memcpy(a->blob, "eleven chars", sizeof a->blob);
  const cumoe_arg list[9] = {cumoe_arg_i32(-1),
                             cumoe_arg_u32(4000000000u),
                             cumoe_arg_i64(INT64_MIN),
                             cumoe_arg_u64(UINT64_MAX),
                             cumoe_arg_f32(0.5f),
                             cumoe_arg_f64(0.1),
                             cumoe_arg_view(cumoe_buffer_view(buffer)),
                             cumoe_arg_view_mut(cumoe_buffer_view_mut(buffer)),
                             cumoe_arg_bytes(a->blob, sizeof a->blob)};
  memcpy(a->list, list, sizeof list);
}

static void test_arguments(cumoe_context context)
{
  const cumoe_status bad = CUMOE_ERR_INVALID_ARGUMENT;
  struct context *found;
  if (!CHECK_OK(find_context(context, &found))) return;
  const function_facts f = fake_function(found);
  cumoe_buffer buffer = {0}, freed = {0};
  arguments a;
  void *at[CUMOE_MAX_PARAMETERS] = {NULL};
  case_begin("all kinds");
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 4, 8, NULL, &buffer));
  CHECK_OK(cumoe_buffer_alloc(context, CUMOE_F32, 4, 8, NULL, &freed));
  const cumoe_view stale = cumoe_buffer_view(freed);
  CHECK_OK(cumoe_buffer_free(&freed));
  fill_arguments(&a, buffer);
  CHECK_OK(check_arguments(&f, a.list, 9, at));
  CHECK(*(int32_t *)at[0] == -1 && *(uint32_t *)at[1] == 4000000000u && *(int64_t *)at[2] == INT64_MIN);
  CHECK(*(uint64_t *)at[3] == UINT64_MAX && *(float *)at[4] == 0.5f && *(double *)at[5] == 0.1);
  CHECK(*(void **)at[6] == cumoe_buffer_view(buffer).data && *(void **)at[7] == *(void **)at[6]);
  CHECK(at[8] == a.blob);
  case_end();
#define WRONG(status, index, argument, word)                                                                           \
  case_begin("args[%d]: %s", index, #argument);                                                                        \
  fill_arguments(&a, buffer);                                                                                          \
  a.list[index] = argument;                                                                                            \
  CHECK_STATUS(status, check_arguments(&f, a.list, 9, at));                                                            \
  CHECK_TEXT(word);                                                                                                    \
  case_end();
  WRONG(bad, 0, cumoe_arg_i64(1), "args[0] has 8 bytes, parameter 0 of kinds has 4")
  WRONG(bad, 2, cumoe_arg_u32(1), "args[2] has 4 bytes, parameter 2 of kinds has 8")
  WRONG(bad, 6, cumoe_arg_f32(1), "args[6] has 4 bytes")
  WRONG(bad, 4, cumoe_arg_view(cumoe_buffer_view(buffer)), "args[4] has 8 bytes")
  WRONG(bad, 8, cumoe_arg_bytes(a.blob, 11), "args[8] has 11 bytes, parameter 8 of kinds has 12")
  WRONG(bad, 8, cumoe_arg_bytes(a.blob, 0), "args[8].bytes is 0")
  WRONG(bad, 8, cumoe_arg_bytes(NULL, 12), "args[8].value.blob is null")
  WRONG(bad, 8, cumoe_arg_bytes(a.blob, SIZE_MAX), "args[8] has 4294967295 bytes")
  WRONG(bad, 1, (cumoe_arg){.kind = 0}, "args[1].kind")
  WRONG(bad, 1, (cumoe_arg){.kind = 10}, "args[1].kind")
  WRONG(CUMOE_ERR_STALE_HANDLE, 6, cumoe_arg_view(stale), "args[6] is a view of a buffer that was freed")
  cumoe_view_mut elsewhere = cumoe_buffer_view_mut(buffer), beyond = elsewhere, odd = elsewhere;
  elsewhere.owner = 0;
  elsewhere.device = 7;
  beyond.rows = 5;
  odd.owner = 0;
  odd.data = (char *)odd.data + 2;
  WRONG(CUMOE_ERR_WRONG_DEVICE, 7, cumoe_arg_view_mut(elsewhere), "args[7] is on device 7")
  WRONG(CUMOE_ERR_OUT_OF_BOUNDS, 7, cumoe_arg_view_mut(beyond), "args[7]")
  WRONG(CUMOE_ERR_MISALIGNED, 7, cumoe_arg_view_mut(odd), "args[7].data")
  odd.dtype = 99;
  WRONG(CUMOE_ERR_WRONG_DTYPE, 7, cumoe_arg_view_mut(odd), "args[7].dtype is 99")
#undef WRONG
  case_begin("an absent view is a null pointer");
  fill_arguments(&a, buffer);
  a.list[6] = cumoe_arg_view(no_view());
  CHECK_OK(check_arguments(&f, a.list, 9, at));
  CHECK(*(void **)at[6] == NULL);
  case_end();
  case_begin("count");
  fill_arguments(&a, buffer);
  CHECK_STATUS(bad, check_arguments(&f, a.list, 8, at));
  CHECK_STATUS(bad, check_arguments(&f, a.list, 10, at));
  CHECK_STATUS(bad, check_arguments(&f, a.list, -1, at));
  CHECK_STATUS(bad, check_arguments(&f, NULL, 9, at));
  const function_facts none = {.context = found, .name = "nothing"};
  CHECK_OK(check_arguments(&none, NULL, 0, at));
  CHECK_OK(cumoe_buffer_free(&buffer));
  case_end();
}

static void test_libraries(void)
{
  static const char *const no_names[] = {"libnosuch.so.9", "libnosuch.so", NULL};
  static const char *const names[] = {"libnosuch.so.9", "libm.so.6", NULL};
  static shared_library missing = {
      .title = "Nosuch", .variable = "CUMOE_NOSUCH_PATH", .probe = "nosuch_version", .names = no_names};
  static shared_library maths = {
      .title = "Maths", .variable = "CUMOE_MATHS_PATH", .probe = "nosuch_version", .names = names};
  static shared_library named = {
      .title = "Maths", .variable = "CUMOE_NAMED_PATH", .probe = "nosuch_version", .names = no_names};
  static shared_library present = {.title = "C", .variable = "CUMOE_C_PATH", .probe = "malloc", .names = no_names};
  static shared_symbol version = {.name = "nosuch_version"}, lgamma = {.name = "lgamma"}, again = {.name = "lgamma"},
                       third = {.name = "nosuch_version"}, allocate = {.name = "malloc"};
  any_function *function = NULL;
  case_begin("missing");
  CHECK_STATUS(CUMOE_ERR_LIBRARY_MISSING, find_shared(&missing, &version, &function));
  CHECK_TEXT("Nosuch is needed");
  CHECK_TEXT("libnosuch.so.9, libnosuch.so");
  CHECK_TEXT("CUMOE_NOSUCH_PATH");
  case_end();
  case_begin("by the second name, found once");
  for (int i = 0; i < 2; i++) {
    function = NULL;
    CHECK_OK(find_shared(&maths, &lgamma, &function));
    CHECK(function != NULL && ((double (*)(double))function)(1) == 0);
  }
  case_end();
  case_begin("a missing function");
  CHECK_STATUS(CUMOE_ERR_LIBRARY_MISSING, find_shared(&maths, &third, &function));
  CHECK_TEXT("Maths has no function nosuch_version");
  CHECK_OK(find_shared(&maths, &again, &function));
  case_end();
  case_begin("by the environment, and by nothing else");
  setenv("CUMOE_NAMED_PATH", "/nosuch/libm.so", 1);
  setenv("CUMOE_MATHS_PATH", "/nosuch/libm.so", 1); /* open already */
  shared_symbol first = {.name = "lgamma"};
  CHECK_STATUS(CUMOE_ERR_LIBRARY_MISSING, find_shared(&named, &first, &function));
  CHECK_TEXT("CUMOE_NAMED_PATH could not be opened: /nosuch/libm.so");
  setenv("CUMOE_NAMED_PATH", "libm.so.6", 1);
  CHECK_OK(find_shared(&named, &first, &function)); /* a failure is not remembered */
  CHECK_OK(find_shared(&maths, &again, &function));
  unsetenv("CUMOE_NAMED_PATH");
  unsetenv("CUMOE_MATHS_PATH");
  case_end();
  case_begin("what the process has already");
  CHECK_OK(find_shared(&present, &allocate, &function));
  case_end();
}

static cumoe_status touch_device(struct context *context)
{
  begin_call("later_call");
  ON_DEVICE(context, CUMOE_OK);
}

static void test_lost(void)
{
  static struct context one = {.device = 3}, other = {.device = 4};
  case_begin("the first cause stays");
  CHECK(run_for(&one) == NULL);
  begin_call("first_call");
  CHECK_STATUS(CUMOE_ERR_CUDA, fail_cuda(cudaErrorInvalidValue, "cudaFirst(x)"));
  CHECK_OK(check_alive(&one));
  CHECK_STATUS(CUMOE_ERR_CUDA_STICKY, fail_cuda(cudaErrorIllegalAddress, "cudaFirst(x)"));
  begin_call("second_call");
  CHECK_STATUS(CUMOE_ERR_CUDA_STICKY, fail_cuda(cudaErrorLaunchFailure, "cudaSecond(x)"));
  CHECK_TEXT("second_call: cudaSecond: cudaErrorLaunchFailure");
  CHECK(run_for(NULL) == &one);
  case_end();
  case_begin("later calls do not reach CUDA");
  CHECK_STATUS(CUMOE_ERR_CUDA_STICKY, touch_device(&one)); /* would crash: there is no driver here, or no such device */
  CHECK_TEXT("later_call: device 3 was lost earlier, in first_call: cudaFirst: cudaErrorIllegalAddress (700)");
  case_end();
  case_begin("another device lives on");
  CHECK_OK(check_alive(&other));
  case_end();
  case_begin("an error of no device is nobody's");
  CHECK_STATUS(CUMOE_ERR_CUDA_STICKY, fail_cuda(cudaErrorLaunchFailure, "cudaThird(x)"));
  CHECK_OK(check_alive(&other));
  case_end();
}

static const test_group groups[] = {
    ALONE("cubins", test_cubins, ONCE),
    ALONE("fatbins", test_fatbins, ONCE),
    ALONE("PTX", test_ptx, ONCE),
    ALONE("optional libraries", test_libraries, ONCE),
    ALONE("a lost device", test_lost, ONCE),
    ALONE("shapes of launches", test_shapes, ON_CPU),
    GROUP("arguments of launches", test_arguments, ON_CPU),
};
TEST_MAIN(groups)
