/*
 * See image.h. All three formats are little-endian, as every host of CUDA is.
 *
 *   fatbin   header (magic, version, its own length, length of the rest), then entries: header, payload. The format is
 *            not published; only what CUDA 13's tools were seen to write is relied on.
 *   cubin    ELF of 64 bits for the machine EM_CUDA
 *   PTX      text: comments, .version, .target
 */
#include "image.h"

#include <elf.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { FATBIN_HEADER = 16, ENTRY_HEADER = 64, ENTRY_PTX = 1, ENTRY_ELF = 2, MACHINE_CUDA = 190 };
static const uint32_t FATBIN_MAGIC = 0xba55ed50;

typedef struct reader {
  const unsigned char *data;
  uint64_t bytes;
  image_facts *facts;
} reader;

static bool refuse(const reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool refuse(const reader *r, const char *format, ...)
{
  va_list list;
  va_start(list, format);
  (void)vsnprintf(r->facts->why, sizeof r->facts->why, format, list);
  va_end(list);
  return false;
}

/* Of bytes that are known to be there, at any alignment. */
static uint64_t field(const reader *r, uint64_t at, size_t width)
{
  uint64_t value = 0;
  memcpy(&value, r->data + at, width);
  return value;
}

static bool within(const reader *r, uint64_t at, uint64_t length)
{
  return at <= r->bytes && length <= r->bytes - at;
}

/* ---- cubin ---- */

static bool check_sections(const reader *r, const Elf64_Ehdr *header)
{
  if (header->e_shnum == 0 || header->e_shentsize != sizeof(Elf64_Shdr))
    return refuse(r, "cubin: %u section headers of %u bytes", header->e_shnum, header->e_shentsize);
  if (!within(r, header->e_shoff, (uint64_t)header->e_shnum * sizeof(Elf64_Shdr)))
    return refuse(r, "cubin: %u section headers at %llu are not within %llu bytes", header->e_shnum,
                  (unsigned long long)header->e_shoff, (unsigned long long)r->bytes);
  if (header->e_shstrndx >= header->e_shnum)
    return refuse(r, "cubin: section %u of %u has the names", header->e_shstrndx, header->e_shnum);
  for (unsigned i = 0; i < header->e_shnum; ++i) {
    Elf64_Shdr section;
    memcpy(&section, r->data + header->e_shoff + i * sizeof section, sizeof section);
    if (section.sh_type != SHT_NOBITS && section.sh_type != SHT_NULL && !within(r, section.sh_offset, section.sh_size))
      return refuse(r, "cubin: section %u, %llu bytes at %llu, is not within %llu bytes", i,
                    (unsigned long long)section.sh_size, (unsigned long long)section.sh_offset,
                    (unsigned long long)r->bytes);
    if (section.sh_type != SHT_NULL && section.sh_link >= header->e_shnum)
      return refuse(r, "cubin: section %u is linked to section %u of %u", i, section.sh_link, header->e_shnum);
  }
  return true;
}

static bool check_segments(const reader *r, const Elf64_Ehdr *header)
{
  if (header->e_phnum == 0) return true; /* relocatable code has none */
  if (header->e_phentsize != sizeof(Elf64_Phdr) ||
      !within(r, header->e_phoff, (uint64_t)header->e_phnum * sizeof(Elf64_Phdr)))
    return refuse(r, "cubin: %u program headers of %u bytes at %llu are not within %llu bytes", header->e_phnum,
                  header->e_phentsize, (unsigned long long)header->e_phoff, (unsigned long long)r->bytes);
  for (unsigned i = 0; i < header->e_phnum; ++i) {
    Elf64_Phdr segment;
    memcpy(&segment, r->data + header->e_phoff + i * sizeof segment, sizeof segment);
    if (!within(r, segment.p_offset, segment.p_filesz))
      return refuse(r, "cubin: segment %u, %llu bytes at %llu, is not within %llu bytes", i,
                    (unsigned long long)segment.p_filesz, (unsigned long long)segment.p_offset,
                    (unsigned long long)r->bytes);
  }
  return true;
}

static bool check_cubin(const reader *r)
{
  Elf64_Ehdr header;
  if (r->bytes < sizeof header)
    return refuse(r, "cubin: %llu bytes, its header has %zu", (unsigned long long)r->bytes, sizeof header);
  memcpy(&header, r->data, sizeof header);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB)
    return refuse(r, "an ELF file, but not of 64 bits, little-endian");
  if (header.e_machine != MACHINE_CUDA)
    return refuse(r, "an ELF file for machine %u, not for CUDA (%d)", header.e_machine, MACHINE_CUDA);
  if (header.e_ehsize != sizeof header) return refuse(r, "cubin: a header of %u bytes", header.e_ehsize);
  return check_sections(r, &header) && check_segments(r, &header);
}

/* ---- PTX ---- */

/* The first byte from `at` on that is neither blank nor comment. */
static uint64_t skip_blank(const reader *r, uint64_t at)
{
  for (; at < r->bytes; ++at) {
    const bool comment = r->data[at] == '/' && at + 1 < r->bytes;
    if (comment && r->data[at + 1] == '/') {
      while (at + 1 < r->bytes && r->data[at + 1] != '\n') ++at;
    } else if (comment && r->data[at + 1] == '*') {
      at += 2;
      while (at + 1 < r->bytes && !(r->data[at] == '*' && r->data[at + 1] == '/')) ++at;
      ++at;
    } else if (!strchr(" \t\r\n\v\f", r->data[at]) || r->data[at] == 0)
      break;
  }
  return at < r->bytes ? at : r->bytes;
}

static bool starts_with(const reader *r, uint64_t at, const char *word)
{
  return within(r, at, strlen(word)) && memcmp(r->data + at, word, strlen(word)) == 0;
}

static uint64_t skip_number(const reader *r, uint64_t at)
{
  while (at < r->bytes && ((r->data[at] >= '0' && r->data[at] <= '9') || r->data[at] == '.')) ++at;
  return at;
}

static bool is_ptx(const reader *r)
{
  return starts_with(r, skip_blank(r, 0), ".version");
}

static bool check_ptx(reader *r)
{
  while (r->bytes && r->data[r->bytes - 1] == 0) --r->bytes;
  for (uint64_t i = 0; i < r->bytes; ++i) {
    const unsigned char c = r->data[i];
    if (c == 0x7f || (c < 0x20 && (c < '\t' || c > '\r')))
      return refuse(r, "PTX: byte %llu is 0x%02x, not text", (unsigned long long)i, c);
  }
  const uint64_t version = skip_blank(r, 0) + strlen(".version");
  const uint64_t number = skip_blank(r, version);
  if (number == version || number == r->bytes || r->data[number] < '0' || r->data[number] > '9')
    return refuse(r, "PTX: no number after .version");
  const uint64_t target = skip_blank(r, skip_number(r, number));
  if (!starts_with(r, target, ".target")) return refuse(r, "PTX: no .target after .version");
  return true;
}

/* ---- fatbin ---- */

/* One entry at `*at`; moves on to the next. A payload that is not compressed is looked into. */
static bool check_entry(const reader *r, uint64_t *at, bool *usable)
{
  if (!within(r, *at, ENTRY_HEADER)) return refuse(r, "fatbin: the entry at %llu is cut off", (unsigned long long)*at);
  const uint64_t kind = field(r, *at, 2), header = field(r, *at + 4, 4), payload = field(r, *at + 8, 8);
  const uint64_t compressed = field(r, *at + 16, 4);
  if (header < ENTRY_HEADER || !within(r, *at, header) || !within(r, *at + header, payload))
    return refuse(r, "fatbin: the entry at %llu, %llu + %llu bytes, is not within %llu bytes", (unsigned long long)*at,
                  (unsigned long long)header, (unsigned long long)payload, (unsigned long long)r->bytes);
  if (compressed > payload)
    return refuse(r, "fatbin: the entry at %llu has %llu compressed bytes in %llu", (unsigned long long)*at,
                  (unsigned long long)compressed, (unsigned long long)payload);
  const reader inside = {r->data + *at + header, payload, r->facts};
  *at += header + payload;
  *usable |= kind == ENTRY_PTX || kind == ENTRY_ELF;
  return kind != ENTRY_ELF || compressed || check_cubin(&inside);
}

/* Bytes after the container are padding. */
static bool check_fatbin(reader *r)
{
  if (r->bytes < FATBIN_HEADER) return refuse(r, "fatbin: %llu bytes, its header has 16", (unsigned long long)r->bytes);
  const uint64_t version = field(r, 4, 2), header = field(r, 6, 2), rest = field(r, 8, 8);
  if (version != 1 || header < FATBIN_HEADER)
    return refuse(r, "fatbin: version %u, header of %u bytes", (unsigned)version, (unsigned)header);
  if (!within(r, header, rest))
    return refuse(r, "fatbin: its header says %llu + %llu bytes, there are %llu", (unsigned long long)header,
                  (unsigned long long)rest, (unsigned long long)r->bytes);
  r->bytes = header + rest;
  bool usable = false;
  for (uint64_t at = header; at < r->bytes;)
    if (!check_entry(r, &at, &usable)) return false;
  return usable || refuse(r, "fatbin: holds neither machine code nor PTX");
}

bool image_inspect(const void *image, size_t bytes, image_facts *facts)
{
  memset(facts, 0, sizeof *facts);
  reader r = {image, bytes, facts};
  if (bytes >= sizeof FATBIN_MAGIC && field(&r, 0, sizeof FATBIN_MAGIC) == FATBIN_MAGIC) {
    facts->kind = IMAGE_FATBIN;
    return check_fatbin(&r);
  }
  if (bytes >= SELFMAG && memcmp(image, ELFMAG, SELFMAG) == 0) {
    facts->kind = IMAGE_CUBIN;
    return check_cubin(&r);
  }
  if (bytes && is_ptx(&r)) {
    facts->kind = IMAGE_PTX;
    return check_ptx(&r);
  }
  return refuse(&r, "%zu bytes that are neither a fatbin nor a cubin nor PTX", bytes);
}
