#!/bin/sh
# No line of a source is over 120 columns, and every file given is as clang-format leaves it.
. test/check/count.sh
# The headers of test/abi are a frozen copy.
empty "no line over 120 columns" "$(find Makefile .ci include host kernels bench test -type f \
  ! -path 'test/abi/include/*' \( -name '*.[chS]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.rs' \
  -o -name '*.def' -o -name '*.sh' -o -name '*.py' -o -name Makefile -o -name run \) \
  -exec awk 'length > 120 { print FILENAME ":" FNR ": " length " columns" }' {} +)"
have clang-format || { skip "format" "clang-format is not installed"; finish; }
# All at once; file by file, five times as slow, only to say which one it is.
if clang-format --style=file --dry-run -Werror $FORMATTED > /dev/null 2>&1; then
  for file in $FORMATTED; do pass "$file"; done
  finish
fi
for file in $FORMATTED; do
  if text=$(clang-format --style=file --dry-run -Werror "$file" 2>&1); then pass "$file"
  else fail "$file: run make format" "$(printf '%s\n' "$text" | grep -m 3 error)"; fi
done
finish
