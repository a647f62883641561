#!/bin/sh
# Each harness of test/fuzz over its kept inputs and over changed ones, for FUZZ_SECONDS in all: first with the driver
# that is always there, then, where clang has it, with libFuzzer. An input that kills a harness is left in lib/obj.
. test/check/count.sh
lib=${LIB:-lib}
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
seconds=${FUZZ_SECONDS:-60} harnesses=$(echo "$FUZZERS" | wc -w)

for name in $FUZZERS; do
  corpus=test/fuzz/corpus/$name
  if "$lib/obj/asan/fuzz/$name" "$corpus" $((seconds / 5 / harnesses)) "$lib/obj/fuzz.$name" > "$work/log" 2>&1; then
    pass "$name: $(tail -n 1 "$work/log")"
  else
    fail "$name: $lib/obj/fuzz.$name" "$(tail -n 30 "$work/log")"
  fi
  [ -x "$lib/obj/fuzz/$name" ] || { skip "$name with libFuzzer" "clang has no runtime for it"; continue; }
  mkdir "$work/new"
  if "$lib/obj/fuzz/$name" -max_total_time=$((seconds * 4 / 5 / harnesses)) -max_len=4096 -timeout=20 \
    -malloc_limit_mb=99999999 -print_final_stats=1 -artifact_prefix="$lib/obj/fuzz.$name." \
    "$work/new" "$corpus" > "$work/log" 2>&1; then
    runs=$(sed -n 's/stat::number_of_executed_units: *//p' "$work/log")
    pass "$name with libFuzzer: $runs runs, $(ls "$work/new" | wc -l) new inputs"
  else
    fail "$name with libFuzzer" "$(tail -n 40 "$work/log")"
  fi
  rm -r "$work/new"
done
finish
