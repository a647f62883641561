#!/bin/sh
# What the archive brings into a program: exactly the declared functions, no start-up code, no C++, no surprises.
. test/check/count.sh
archive=${LIB:-lib}/libcumoe.a
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

declared > "$work/declared"
# What the members share has a prefix and is hidden.
nm -g --defined-only "$archive" 2> /dev/null | awk 'NF == 3 && $3 !~ /^cumoe_internal_/ { print $3 }' | sort -u \
  > "$work/exported"
nm -g --undefined-only "$archive" 2> /dev/null | awk 'NF == 2 && $2 !~ /^cumoe_/ { print $2 }' | sort -u \
  > "$work/needed"
objdump -t "$archive" > "$work/table" 2> /dev/null
readelf -SW "$archive" > "$work/sections" 2> /dev/null

[ -s "$work/exported" ] || fail "the archive has symbols" "$archive"
empty "every declared function is exported" "$(comm -23 "$work/declared" "$work/exported")"
empty "every exported symbol is declared" "$(comm -13 "$work/declared" "$work/exported")"
empty "members that are known" "$(ar t "$archive" | grep -vx 'cumoe.o\|groups.o\|train.o')"
empty "what members share is hidden" "$(readelf -sW "$archive" |
  awk '$8 ~ /^cumoe_internal_/ && $7 != "UND" && $6 != "HIDDEN" { print $8 }')"
beside_the_layer "$archive" "$work/member.o" > "$work/others"
empty "the layer needs one member" "$(echo 'int main(void) { return cumoe_moe_forward(0, 0, 0, 0); }' |
  ${CC:-cc} -include include/cumoe/cumoe.h -x c - -x none "$archive" ${CUDA_LIB:+-L"$CUDA_LIB"} -lcudart_static -ldl \
  -lpthread -lrt -lm -o "$work/layer" 2>&1; nm "$work/layer" | awk '{ print $NF }' | grep -xFf "$work/others")"

# The CUDA runtime, and nothing of the driver, cuBLAS, NVRTC, NCCL or C++; nothing that ends the process or prints.
empty "no undefined internal names" "$(grep -v '^cuda[A-Z]' "$work/needed" | while read -r name; do
  printf 'extern char %s[]; const void *p_%s = %s;\n' "$name" "$name" "$name"
done | { cat; echo 'int main(void) { return 0; }'; } > "$work/needed.c"
  ${CC:-cc} -w -fno-builtin "$work/needed.c" -o "$work/needed.out" -lm -lpthread -ldl -lrt 2>&1 |
  sed -n 's/.*undefined reference to/undefined:/p')"
empty "no forbidden library" "$(grep -E '^(cu[A-Z]|cublas|nvrtc|nccl|_Z|__cxa|__gxx|__cudaRegister)' "$work/needed")"
unwanted='_?exit|_Exit|quick_exit|abort|__assert_fail|raise|signal|sigaction'
unwanted="$unwanted|v?f?printf|__v?f?printf_chk|puts|putchar|fputs|fputc|fwrite|perror|stdout|stderr"
empty "no exit, abort or printing" "$(grep -xE "$unwanted" "$work/needed")"
empty "no code at program start or end" \
  "$(grep -oE '\.(init_array|fini_array|preinit_array|ctors|dtors|init|fini)\b' "$work/sections")"
empty "no executable stack" "$(grep 'note.GNU-stack' "$work/sections" | grep -E ' W?A?X '
  grep -q note.GNU-stack "$work/sections" || echo missing)"
empty "kernel images are read-only" "$(grep -E ' O .* cumoe_image_' "$work/table" | grep -v '\.rodata')"

# Data that changes: thread-local or listed, with a reason, in globals.allow.
empty "no unlisted writable globals" "$(awk '$3 == "O" && $4 ~ /^\.(data|bss)/ && $4 !~ /^\.data\.rel\.ro/ { print $NF }
  $3 ~ /^\.(tdata|tbss)/ { print $NF }' "$work/table" | sed 's/\.[0-9]*$//' | sort -u |
  while read -r name; do grep -q "^$name\( \|$\)" test/check/globals.allow || echo "$name"; done)"

# A program with functions of its own, named like each internal one: it keeps them, and the library calls none of them.
nm "$archive" 2> /dev/null |
  awk '$2 ~ /[tT]/ && $3 ~ /^[a-z_][a-z0-9_]*$/ && $3 !~ /^cumoe_/ { print $3 }' | sort -u > "$work/internal"
{
  echo 'static int calls;'
  sed 's/.*/int &(void) { return ++calls; }/' "$work/internal"
  echo 'int example(void); int main(void) { if (example() != 0 || calls != 0) return 1;'
  sed 's/.*/  &();/' "$work/internal"
  echo "  return calls != $(wc -l < "$work/internal"); }"
} > "$work/namesakes.c"
namesakes() {
  ${CC:-cc} -w -fno-builtin -c "$work/namesakes.c" -o "$work/namesakes.o" &&
    ${CC:-cc} -std=c11 -Iinclude -Dmain=example -c test/examples/first.c -o "$work/example.o" &&
    ${CC:-cc} "$work/example.o" "$work/namesakes.o" "$archive" \
      ${CUDA_LIB:+-L"$CUDA_LIB"} -lcudart_static -ldl -lpthread -lrt -lm \
      -o "$work/namesakes" && "$work/namesakes"
}
[ "$(grep -cxE 'choose|plan_layer|check_all' "$work/internal")" -eq 3 ] ||
  fail "internal names are found" "$(cat "$work/internal")"
quiet "a program with $(wc -l < "$work/internal") functions named like internal ones keeps its own" namesakes
finish
