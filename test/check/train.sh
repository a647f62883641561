#!/bin/sh
# make train's program with a small model: the same bits from any number of threads, and after being killed at any
# moment, also on a GPU where there is one; the loss falls; the demo runs what it leaves.
. test/check/count.sh
lib=${LIB:-lib}
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
size="--layers 2 --hidden 32 --heads 2 --kv-heads 1 --head-dim 16 --experts 4 --top-k 2 --inter 16"
size="$size --batch 2 --length 32"
device=cpu

# train FOLDER SECONDS [option ...]: killed after so many.
train() {
  folder=$work/$1 seconds=$2
  shift 2
  timeout -s KILL "$seconds" "$lib/train" --device "$device" --out "$folder" --steps 60 $size --rate 0.01 "$@" \
    test/data/prose.txt
}
same() { cmp "$work/$1/model.safetensors" "$work/$2/model.safetensors" && cmp "$work/$1/loss.svg" "$work/$2/loss.svg"; }

train whole 60 --threads 1 > "$work/log" 2>&1 && pass "trains" || fail "trains" "$(cat "$work/log")"
loss=$(sed -n 's/^loss of text held back: \(.*\) nats.*/\1/p' "$work/log")
quiet "the loss falls: $loss nats, 5.55 without learning" awk "BEGIN { exit !(${loss:-9} > 1 && ${loss:-9} < 5) }"
empty "no checkpoint is left" "$(ls "$work/whole" | grep checkpoint)"
quiet "another number of threads" train threads 60 --threads 3
quiet "gives the same bits" same whole threads

# Sooner and later: in the middle of a step, of a checkpoint, of the model.
kills=0
set -- 0.06 0.1 0.15 0.2 0.5
until train killed "$1" --interval 0 > "$work/log" 2>&1 || [ "$kills" -eq 200 ]; do
  set -- "$2" "$3" "$4" "$5" "$1"
  kills=$((kills + 1))
done
if [ "$kills" -gt 0 ]; then pass "killed $kills times"; else fail "killed" "never: it was too quick"; fi
quiet "gives the same bits" same whole killed

train other 0.3 --interval 0 --threads 1 > /dev/null 2>&1
if [ -f "$work/other/checkpoint" ]; then
  case $(train other 60 --seed 2 2>&1) in
  *"is of another run"*) pass "a checkpoint of another run is refused" ;;
  *) fail "a checkpoint of another run is refused" ;;
  esac
  quiet "unless the run is a fresh one" train other 60 --seed 2 --fresh
  printf 'x' | dd of="$work/killed/checkpoint" 2> /dev/null
  case $(train killed 60 2>&1) in
  *checkpoint*) pass "a broken one is refused" ;;
  *) fail "a broken one is refused" ;;
  esac
else skip "a checkpoint of another run" "none was written in time"; fi

quiet "trains in bf16" train bf16 60 --dtype bf16
close() { # in the mean of the run: single steps part where a token goes to another expert
  paste -d, "$work/whole/loss.csv" "$work/bf16/loss.csv" | \
    awk -F, 'NR > 1 { apart += ($2 - $4) / 60 } END { exit !(NR == 61 && apart < .1 && apart > -.1) }'
}
quiet "and comes as far" close

device=cuda
if train gpu 60 > "$work/log" 2>&1; then
  loss=$(sed -n 's/^loss of text held back: \(.*\) nats.*/\1/p' "$work/log")
  quiet "on the GPU the loss falls: $loss nats" awk "BEGIN { exit !(${loss:-9} > 1 && ${loss:-9} < 5) }"
  for seconds in 1 1.5 2 2.5; do train stopped "$seconds" --interval 0 > /dev/null 2>&1 && break; done
  quiet "and killed, goes on" train stopped 60
  quiet "with the same bits" same gpu stopped
else skip "training on the GPU" "$(tail -1 "$work/log")"; fi

text=$("$lib/demo" --device cpu --dtype f32 --model "$work/whole" --tokens 40 --greedy "the " 2> "$work/log")
[ ${#text} -ge 40 ] && pass "the demo runs the model" || fail "the demo runs the model" "$(cat "$work/log")"
finish
