#!/bin/sh
# Runs test programs and sums their counts: test/run.sh [program ...]; without arguments, all of lib/test. Needs
# only lib/test and test/, so both can be carried to another machine.
#
# A program ends with the line "N passed, N failed, N skipped" and exits 0 exactly when nothing failed; one in a
# folder `examples` has no such line: its exit status is the answer, and "skipped: why" as its last line says that this
# machine cannot run it. Breaking these rules, a crash and a timeout each count as a failure. The sum is the last line;
# the exit status is 0 when nothing failed and something passed.
# With 8 cores or more, or where GPUs are hidden (CUDA_VISIBLE_DEVICES is empty), programs run side by side, and with 8
# cores the long ones in shards; a line is printed in its turn.
# V=1 shows all output, TEST_TIMEOUT is in seconds.

# run.sh --job FOLDER INDEX SHARD SHARDS: one program of the list in the folder, or a part of it
if [ "$1" = --job ]; then
  program=$(sed -n "$3p" "$2/programs") part=$2/$3.$4 start=$(date +%s)
  shard=
  [ "$5" -gt 1 ] && shard="--shard $4/$5"
  { timeout "${TEST_TIMEOUT:-900}" "$program" $shard 2>&1; echo "exit status $?"; } > "$part.log"
  echo $(($(date +%s) - start)) > "$part.seconds"
  mv "$part.seconds" "$part.done"
  exit 0
fi

case $0 in */*) cd "${0%/*}/.." || exit 1 ;; esac
lib=${LIB:-lib}
work=$(mktemp -d) || exit 1
log=$work/log
trap 'kill $runner 2> /dev/null; rm -rf "$work"' EXIT

if [ $# -eq 0 ]; then
  for program in "$lib"/test/* "$lib"/test/abi/* "$lib"/test/examples/*; do
    [ -f "$program" ] && [ -x "$program" ] && set -- "$@" "$program"
  done
fi
# Alone and last, unless GPUs are hidden: those that look at how much of a GPU's memory is free, and ranks that wait for
# each other on one GPU.
alone() {
  [ -n "${CUDA_VISIBLE_DEVICES-all}" ] || return 1
  case ${1##*/} in arenas | base | ep | graph | pool) return 0 ;; esac
  return 1
}
first='' last=''
for program; do
  if alone "$program"; then last="$last $program"; else first="$first $program"; fi
done
set -- $first $last
printf '%s\n' "$@" > "$work/programs"

# The long ones first.
cores=$(nproc 2> /dev/null || echo 1)
together=$([ "$cores" -ge 8 ] || [ -z "${CUDA_VISIBLE_DEVICES-all}" ] && echo yes)
shards_of() {
  case ${1##*/} in variants | forward) [ "$cores" -ge 8 ] && echo $((cores * 3 / 4)) || echo 1 ;; *) echo 1 ;; esac
}
index=0
for program; do
  index=$((index + 1)) shards=$(shards_of "$program") list=$work/together
  case ${program##*/} in
  variants | forward | cpu | faults) list=$work/long ;;
  esac
  ! alone "$program" || list=$work/alone
  [ -n "$together" ] || list=$work/alone
  for shard in $(seq 0 $((shards - 1))); do echo "$index $shard $shards"; done >> "$list"
done
touch "$work/long" "$work/together" "$work/alone"
{
  cat "$work/long" "$work/together" | xargs -r -P "$cores" -L 1 sh "test/run.sh" --job "$work"
  xargs -r -P 1 -L 1 sh "test/run.sh" --job "$work" < "$work/alone"
} &
runner=$!

# Output, exit status and seconds of program INDEX in SHARDS parts, when all are there.
collect() {
  worst=0 seconds=0
  for shard in $(seq 0 $(($2 - 1))); do
    while [ ! -f "$work/$1.$shard.done" ]; do sleep 0.1; done
    status=$(sed -n '$s/.*exit status //p' "$work/$1.$shard.log") took=$(cat "$work/$1.$shard.done")
    [ "$status" -gt "$worst" ] && worst=$status
    [ "$took" -gt "$seconds" ] && seconds=$took
    sed '$d' "$work/$1.$shard.log" | grep -v "$line"
  done
  cat "$work/$1".*.log | awk '/^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ { p += $1; f += $3; s += $5; n++ }
    END { if (n == '"$2"') printf "%d passed, %d failed, %d skipped\n", p, f, s }'
  echo "exit status $worst"
}

passed=0 failed=0 skipped=0 index=0
line='^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed, \([0-9][0-9]*\) skipped$'
for program; do
  name=${program##*/} index=$((index + 1))
  collect $index "$(shards_of "$program")" > "$log"
  if [ -n "$V" ]; then
    echo "== $program"
    cat "$log"
  fi
  status=$(tail -n 1 "$log" | sed -n 's/.*exit status \([0-9]*\)$/\1/p')
  counts=$(tail -n 2 "$log" | head -n 1 | sed -n "s/$line/\1 \2 \3/p")
  trouble=
  case $program in
  */examples/*)
    counts="1 0 0"
    case $(tail -n 2 "$log" | head -n 1) in skipped:*) counts="0 0 1" ;; esac
    if [ "$status" -ne 0 ]; then counts="0 1 0" trouble="exit status $status"; fi ;;
  *)
    if [ -z "$counts" ]; then counts="0 1 0" trouble="no closing line, exit status $status"; fi
    bad=${counts#* } bad=${bad% *}
    if [ "$status" -eq 124 ]; then trouble="timeout after ${TEST_TIMEOUT:-900} s"
    elif [ -z "$trouble" ] && [ "$bad" -eq 0 ] && [ "$status" -ne 0 ]; then
      counts="${counts%% *} 1 ${counts##* }" trouble="exit status $status"
    elif [ -z "$trouble" ] && [ "$bad" -ne 0 ] && [ "$status" -eq 0 ]; then trouble="exit status 0"
    fi ;;
  esac
  set_of_counts=$counts
  p=${set_of_counts%% *} s=${set_of_counts##* } f=${set_of_counts#* } f=${f% *}
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  [ "$f" -ne 0 ] && [ -z "$V" ] && tail -n 60 "$log" | sed 's/^/    /'
  verdict=ok
  [ "$f" -ne 0 ] && verdict=FAIL
  printf '%-4s %-16s %6d passed %4d failed %4d skipped %5d s%s\n' "$verdict" "$name" "$p" "$f" "$s" \
    "$seconds" "${trouble:+   ($trouble)}"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -ne 0 ]
