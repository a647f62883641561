#!/bin/sh
# Eight threads on one context, and groups with a thread a rank, also by NCCL, over the shim, under ThreadSanitizer.
. test/check/count.sh
. test/check/shimmed.sh
folder=$lib/obj/tsan
flags='-O1 -g1 -fsanitize=thread -fno-omit-frame-pointer'
if ! echo 'int main(void) { return 0; }' | ${CC:-cc} -fsanitize=thread -x c -o /dev/null - 2> /dev/null; then
  skip "threads" "${CC:-cc} has no ThreadSanitizer"
  finish
fi
quiet "build" build_shimmed "$folder" "$flags" trace ep staged || finish
quiet "eight threads on one context" env TSAN_OPTIONS=halt_on_error=1 "$folder/trace" --only threads
quiet "ranks of a group" env TSAN_OPTIONS=halt_on_error=1 "$folder/ep" --device cpu
quiet "ranks by NCCL" env TSAN_OPTIONS=halt_on_error=1 "$folder/staged"
finish
