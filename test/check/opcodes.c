/*
 * opcodes FILE.cubin: one line "kernel opcode type count" for each kernel and kind of instruction in it, and "kernel
 * relu_predicate 0 count" where it has such as ptxas 13.0 gets wrong (below).
 *
 * Since compute capability 7.0 an instruction is 16 bytes and its low 12 bits are the opcode, so that no
 * disassembler is needed to say which kinds of instruction a kernel has. Atomics on integers and on floats share an
 * opcode on some architectures; bits 73 to 75 tell their element type (other instructions use these bits otherwise).
 */
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned char *read_file(const char *path, size_t *bytes)
{
  FILE *file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) return NULL;
  long end = ftell(file);
  unsigned char *data = end > 0 ? malloc((size_t)end) : NULL;
  rewind(file);
  *bytes = data ? fread(data, 1, (size_t)end, file) : 0;
  fclose(file);
  return data;
}

/* VIMNMX.RELU (sm_90a: opcodes 248, 848, bit 76) whose predicate (bits 81 to 83) is used: max(min(x, n), 0) == n became
 * one, and its predicate does not mean that. */
static int is_relu_predicate(const unsigned char *instruction)
{
  const unsigned op = instruction[0] | (instruction[1] & 15u) << 8;
  return (op == 0x248 || op == 0x848) && instruction[9] >> 4 & 1 && (instruction[10] >> 1 & 7) != 7;
}

static void count_opcodes(const char *kernel, const unsigned char *code, size_t bytes)
{
  enum { OPCODES = 4096, TYPES = 8 };
  static unsigned count[OPCODES][TYPES];
  unsigned relu_predicates = 0;
  memset(count, 0, sizeof count);
  for (size_t i = 0; i + 16 <= bytes; i += 16) {
    count[code[i] | (code[i + 1] & 15) << 8][code[i + 9] >> 1 & 7]++;
    relu_predicates += (unsigned)is_relu_predicate(code + i);
  }
  if (relu_predicates) printf("%s relu_predicate 0 %u\n", kernel, relu_predicates);
  for (unsigned op = 0; op < OPCODES; op++)
    for (unsigned type = 0; type < TYPES; type++)
      if (count[op][type]) printf("%s %03x %u %u\n", kernel, op, type, count[op][type]);
}

int main(int argc, char **argv)
{
  size_t bytes = 0;
  unsigned char *data = argc == 2 ? read_file(argv[1], &bytes) : NULL;
  Elf64_Ehdr header;
  if (bytes < sizeof header) return fprintf(stderr, "usage: opcodes FILE.cubin\n"), 2;
  memcpy(&header, data, sizeof header);
  if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_shoff > bytes ||
      header.e_shnum > (bytes - header.e_shoff) / sizeof(Elf64_Shdr) || header.e_shstrndx >= header.e_shnum)
    return fprintf(stderr, "%s: not an ELF file\n", argv[1]), 2;

  Elf64_Shdr *sections = calloc(header.e_shnum, sizeof *sections);
  if (!sections) return 2;
  memcpy(sections, data + header.e_shoff, header.e_shnum * sizeof *sections);
  const char *names = (const char *)data + sections[header.e_shstrndx].sh_offset;
  for (int i = 0; i < header.e_shnum; i++) {
    const char *name = names + sections[i].sh_name;
    if (strncmp(name, ".text.", 6) == 0 && sections[i].sh_offset + sections[i].sh_size <= bytes)
      count_opcodes(name + 6, data + sections[i].sh_offset, sections[i].sh_size);
  }
  free(sections);
  free(data);
  return 0;
}
