#!/bin/sh
# The README speaks of what is there, and every public function is called by a test.
. test/check/count.sh
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

declared > "$work/declared"
[ "$(wc -l < "$work/declared")" -gt 40 ] || fail "declared functions are found" "$(cat "$work/declared")"
# test/badargs.c calls every function, wrongly; another test has to call it for what it does.
tests=$(ls test/*.c test/abi/*.c test/examples/*.c test/examples/*.cpp test/examples/rust/src/*.rs | grep -v badargs)
empty "every public function is called by a test" "$(while read -r name; do
  # A function behind a macro is called by the macro's name: cumoe_buffer_alloc for cumoe_buffer_alloc_at.
  grep -qw -e "$name" -e "${name%_at}" $tests || echo "$name"
done < "$work/declared")"

{
  cat include/cumoe/*.h
  (cd include && printf '#include <%s>\n' cumoe/*.h) | ${CC:-cc} -Iinclude -E -P -
} > "$work/headers"
empty "every cumoe name of the README is in the headers, or a kernel" "$(
  grep -oE '\b(cumoe_[a-z0-9_]+|CUMOE_[A-Z0-9_]+)' README.md | sort -u |
  grep -vxE 'CUMOE_CUDART|cumoe_|cumoe_transformers' | while read -r name; do
  grep -qw -- "$name" "$work/headers" || grep -qw -- "$name" host/*.c || grep -qaF -- "$name" $CUBINS || echo "$name"
done)"
empty "every file of the README is there" "$(
  grep -oE '(`|\()(include|host|kernels|test|bench)/[A-Za-z0-9_./*-]+' README.md | tr -d '`(' |
  sort -u | while read -r path; do ls $path > /dev/null 2>&1 || echo "$path"; done)"

# The table of cudarc's features: function | test, "text", where the text names a group or case of that file.
sed -n '/^| cudarc /,/^$/p' README.md | sed '1,2d' > "$work/table"
[ "$(grep -c '^|' "$work/table")" -gt 20 ] || fail "the table of cudarc's features is found"
empty "every row of the table names a function" "$(
  grep '^|' "$work/table" | awk -F'|' '$3 !~ /cumoe_|CUMOE_/ { print $2 }')"
empty "every row of the table names a test that is there" "$(grep '^|' "$work/table" |
  while IFS='|' read -r _ feature _ proof _; do
  file=$(printf '%s\n' "$proof" | sed -n 's/[^`]*`\([^`]*\)`.*/\1/p')
  text=$(printf '%s\n' "$proof" | sed -n 's/[^"]*"\([^"]*\)".*/\1/p')
  [ -n "$file" ] && [ -f "test/$file" ] || { echo "$feature: no file $file"; continue; }
  [ -z "$text" ] || grep -qF -- "$text" "test/$file" || echo "$feature: $file has no $text"
done)"
finish
