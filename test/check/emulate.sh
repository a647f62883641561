#!/bin/bash
# Kernels of any GPU, run by the CPU (test/emulate/), against what the tests want of a GPU: every such row of the table
# in a layer of 70 tokens, the layer's backward, attention, groups of ranks on 8 GPUs (CUMOE_EMULATED_GPUS: so many). What
# it cannot show: speed, races between CTAs, what the compiler for GPUs makes of the code, kernels of sm_90a. Some
# minutes; one argument: one of the programs.
. test/check/count.sh
lib=${LIB:-lib}
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
programs=${*:-rows backward attention ep}
for program in $programs; do
  only= gpus=1
  [ "$program" = rows ] && only="T 70:"
  [ "$program" = ep ] && only="ranks on GPUs" gpus=${CUMOE_EMULATED_GPUS:-8}
  CUMOE_EMULATED_GPUS=$gpus "$lib/obj/emulate/bin/$program" --device cuda --only "$only" > "$work/$program" 2>&1 &
done
wait
for program in $programs; do
  counts=$(sed -n '$s/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$work/$program")
  set -- ${counts:-0 1 0}
  passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
  if [ "$2" -eq 0 ]; then echo "ok    $program: $1 passed, $3 skipped"
  else echo "FAIL  $program" && grep -v '^ok\|# skipped' "$work/$program" | tail -n 40 | sed 's/^/      /'; fi
done
finish
