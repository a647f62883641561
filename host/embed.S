/* One fatbin as read-only bytes: IMAGE names the symbol, FATBIN the file. make knows of the file, the assembler's
 * dependency output would not. %progbits: `@` begins a comment on some machines. */
#define GLUE(a, b) a##b
#define END(name)  GLUE(name, _end)

  .section .rodata.IMAGE, "a", %progbits
  .balign 16
  .globl IMAGE
  .hidden IMAGE
  .type IMAGE, %object
IMAGE:
  .incbin FATBIN
  .size IMAGE, . - IMAGE
  .globl END(IMAGE)
  .hidden END(IMAGE)
  .type END(IMAGE), %object
END(IMAGE):
  .byte 0
  .size END(IMAGE), 1

  .section .note.GNU-stack, "", %progbits
