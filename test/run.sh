#!/bin/sh
# Runs test programs and sums their counts: test/run.sh [program ...]; without arguments, all of lib/test. Needs
# only lib/test and test/, so both can be carried to another machine.
#
# A program ends with the line "N passed, N failed, N skipped" and exits 0 exactly when nothing failed; one in a
# folder `examples` has no such line: its exit status is the answer, and "skipped: why" as its last line says that this
# machine cannot run it. Breaking these rules, a crash and a timeout each count as a failure. The sum is the last line;
# the exit status is 0 when nothing failed and something passed.
# V=1 shows all output, TEST_TIMEOUT is in seconds.
case $0 in */*) cd "${0%/*}/.." || exit 1 ;; esac
lib=${LIB:-lib}
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT

if [ $# -eq 0 ]; then
  for program in "$lib"/test/* "$lib"/test/abi/* "$lib"/test/examples/*; do
    [ -f "$program" ] && [ -x "$program" ] && set -- "$@" "$program"
  done
fi

cores=$(nproc 2> /dev/null || echo 1)

# Output and exit status of a program. The long ones are cut into shards that run side by side where there are cores.
run() {
  case ${1##*/}:$cores in
  variants:[89] | variants:??* | forward:[89] | forward:??*) run_shards "$1" $((cores * 3 / 4)) ;;
  *) timeout "${TEST_TIMEOUT:-900}" "$1" 2>&1; echo "exit status $?" ;;
  esac
}

run_shards() {
  parts=$(mktemp -d) worst=0
  for i in $(seq 0 $(($2 - 1))); do
    { timeout "${TEST_TIMEOUT:-900}" "$1" --shard "$i/$2" 2>&1; echo "exit status $?"; } > "$parts/$i" &
  done
  wait
  for i in $(seq 0 $(($2 - 1))); do
    status=$(sed -n '$s/.*exit status //p' "$parts/$i")
    [ "$status" -gt "$worst" ] && worst=$status
    sed '$d' "$parts/$i" | grep -v "$line"
  done
  cat "$parts"/* | awk '/^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ { p += $1; f += $3; s += $5 }
    END { printf "%d passed, %d failed, %d skipped\n", p, f, s }'
  rm -r "$parts"
  echo "exit status $worst"
}

passed=0 failed=0 skipped=0
line='^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed, \([0-9][0-9]*\) skipped$'
for program; do
  name=${program##*/}
  start=$(date +%s)
  if [ -n "$V" ]; then
    echo "== $program"
    run "$program" | tee "$log"
  else
    run "$program" > "$log"
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
    $(($(date +%s) - start)) "${trouble:+   ($trouble)}"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -ne 0 ]
