#!/bin/bash
# Kernels run by the CPU (test/emulate/) against what the tests want of a GPU. On one of compute capability 8.0: every
# row of the table for any GPU in a layer of 70 tokens, the layer's backward, attention, training. On one of 9.0: every
# row of sm_90a in that layer, those of the backward, of attention and of the operations, and layers, and ranks' shares
# of them, whose rows the library chooses. Groups of ranks on 8 GPUs (CUMOE_EMULATED_GPUS: so many). What it cannot
# show: speed, races between CTAs, what the compiler for GPUs makes of the code. Minutes; arguments: the programs.
. test/check/count.sh
lib=${LIB:-lib}
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
export SMALL=1
# Program, GPU, words of the rows' names (of rows), groups. Two run at a time.
runs='rows sm_80 - T 70:
rows sm_90 sm90 T 70:
backward sm_80 -
backward sm_90 - kernels of gradients
backward sm_90 - kernels that keep
backward sm_90 - kernels that draw
backward sm_90 - captured
backward sm_90 - many rows
attention sm_80 -
attention sm_90 - shapes
train sm_80 -
forward sm_90 - features, bf16
slices sm_90 - shares
variants sm_90 - router_sm90
variants sm_90 - wgmma: cumoe_up_sm90_wgmma_bf16_bf16_bf16_none_K
variants sm_90 - norm_sm90_row_bf16_bf16_1x131072
variants sm_90 - softmax_sm90_row_f32_f32_1x131072
ep sm_80 - ranks on GPUs
ep sm_90 - few tokens on GPUs
staged sm_90 - ranks by NCCL on GPUs'
run() {
  local words=$3 gpus=1
  [ "$words" != - ] || words=
  case $1 in ep | staged) gpus=${CUMOE_EMULATED_GPUS:-8} ;; esac
  GPU=$2 ROWS=$words KERNELS_RUN=$work/kernels CUMOE_EMULATED_GPUS=$gpus \
    "$lib/obj/emulate/bin/$1" --device cuda --only "$4" > "$work/$1 $2 $4" 2>&1
}
while read -r program gpu words only; do
  case " $* " in *" $program "*) ;; *) continue ;; esac
  [ "$(jobs -rp | wc -l)" -lt 2 ] || wait -n
  run "$program" "$gpu" "$words" "$only" &
done <<< "$runs"
wait
for log in "$work"/*\ *; do
  counts=$(sed -n '$s/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$log")
  set -- ${counts:-0 1 0}
  passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
  if [ "$2" -eq 0 ]; then echo "ok    ${log##*/}: $1 passed, $3 skipped"
  else echo "FAIL  ${log##*/}" && grep -v '^ok\|# skipped' "$log" | tail -n 40 | sed 's/^/      /'; fi
done
ran=$(sort -u "$work/kernels")
echo "      $(grep -c _sm90_ <<< "$ran") kernels of sm_90a ran, $(grep -vc _sm90_ <<< "$ran") others"
finish
