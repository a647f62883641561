#!/bin/sh
# Every file given is as clang-format leaves it.
. test/check/count.sh
have clang-format || { skip "format" "clang-format is not installed"; finish; }
for file in $FORMATTED; do
  if text=$(clang-format --style=file --dry-run -Werror "$file" 2>&1); then pass "$file"
  else fail "$file: run make format" "$(printf '%s\n' "$text" | grep -m 3 error)"; fi
done
finish
