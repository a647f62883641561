#!/bin/sh
# Each change of mutants.txt is built and has to make a test fail: test/check/mutants.sh [N ...]: those lines only.
# One that makes a program hang is stopped after MUTANT_SECONDS.
. test/check/count.sh
. test/check/shimmed.sh
list=${MUTANTS:-test/check/mutants.txt}
folder=$lib/obj/mutants
shimmed='badargs trace faults ep_launch staged wires'
most='image base buffer pool debug plan lifetimes abi/abi contract faults'

# programs_of SOURCE: those that may notice, the quick ones first
programs_of() {
  case $1 in
  host/ep* | host/group.c) echo badargs ep_launch staged ep ;;
  host/arenas* | host/nccl.c) echo badargs wires staged arenas ;;
  host/moe.c) echo badargs trace ep_launch $most ;;
  host/arguments.c) echo badargs trace contract backward ;;
  host/attention.c) echo badargs trace attention ;;
  host/train.c) echo badargs trace train ;;
  host/backward_check.c) echo badargs backward faults ;;
  host/backward*) echo badargs trace backward ;;
  host/ops.c | host/matmul.c | host/masked.c) echo badargs trace "$(basename "$1" .c)" ;;
  host/quantize.c | host/repack.c) echo badargs trace formats slices quantize ;;
  host/check.c | host/stages.c | host/weights*) echo badargs trace $most ops formats slices masked quantize ;;
  *) echo badargs trace $most ;;
  esac
}
shim_objects=$(for h in $shim_helpers; do echo "$folder/test_$h.c.o"; done)
helper_objects=$(for h in $helpers; do echo "$folder/$(echo "$h" | tr / _).o"; done)

# fails OUTPUT OBJECT SOURCE PROGRAM...: one of them fails with this object in place of the one made from the source.
# 0: its name; 1: all pass; 2: which does not link.
fails() {
  output=$1 object=$2 source_of=$3
  shift 3
  rest=$(for o in "$folder"/host_*.o; do [ "$o" = "$folder/$(echo "$source_of" | tr / _).o" ] || echo "$o"; done)
  for program; do
    case " $shimmed " in
    *" $program "*) others="$shim_objects $(echo "$folder"/test_shim_*.o) $wraps" ;;
    *) others="$helper_objects $cudart" ;;
    esac
    ${CC:-cc} -o "$output" "$folder/test_$(echo "$program" | tr / _).c.o" "$object" $rest "$folder"/kernels_*.o \
      "$folder/images.o" $others -ldl -lpthread -lm || { echo "$program does not link"; return 2; }
    if ! CUDA_VISIBLE_DEVICES= timeout -k 5 "${MUTANT_SECONDS:-240}" "$output" > "$output.log" 2>&1; then
      echo "$program"
      return 0
    fi
  done
  return 1
}

# one NUMBER: one line of the list, in a process of its own
one() {
  line=$(sed -n "$1p" "$list")
  source=${line%%	*} change=${line#*	}
  mutant=$folder/$1.c
  sed "$change" "$source" > "$mutant"
  if cmp -s "$source" "$mutant"; then echo "stale $1: $line"; return; fi
  compile_one="$(cat "$lib/obj/flags.cc") -O1 -g0 -w -iquote host -MF /dev/null"
  if ! eval "$compile_one -c -o $folder/$1.o $mutant" 2> "$folder/$1.log"; then
    echo "stale $1: does not compile: $line"
    return
  fi
  by=$(fails "$folder/$1.bin" "$folder/$1.o" "$source" $(programs_of "$source"))
  case $? in
  0) echo "killed $1 by $by" ;;
  1) echo "alive $1: $line" ;;
  *) echo "line $1: $by" >&2; exit 255 ;; # which ends xargs
  esac
  rm -f "$folder/$1".*
}

wraps=$(for name in $wrap; do echo "-Wl,--wrap=$name"; done)
cudart=$(${MAKE:-make} -s print-LINK_LIBS 2> /dev/null)
if [ "$1" = --one ]; then one "$2"; exit; fi

[ $# -gt 0 ] || set -- $(grep -n '^host/' "$list" | cut -d: -f1)
programs=$(for n; do programs_of "$(sed -n "${n}s/	.*//p" "$list")" | tr ' ' '\n'; done | awk '!seen[$0]++')
compile "$folder" "-O1 -g0" host/*.c kernels/cpu/*.c test/shim/*.c $helpers \
  $(printf 'test/%s.c ' $programs) || exit 1
name_images "$folder" || exit 1
by=$(fails "$folder/whole" "$folder/host_buffer.c.o" host/buffer.c $programs)
case $? in
0) by="$by fails: $(grep -E '^# failed|^not ok' "$folder/whole.log" | head -n 3)" ;;
1) by= ;;
esac
[ -z "$by" ] || { fail "the programs pass unchanged" "$by"; finish; }
printf '%s\n' "$@" | xargs -P "$(nproc 2> /dev/null || echo 2)" -n 1 sh "$0" --one > "$folder/results" ||
  { fail "every mutant links"; finish; }
sort -k1,1 -k2,2n "$folder/results" | grep -v '^killed' | sed 's/^/      /'
passed=$(grep -c '^killed' "$folder/results") failed=$(grep -vc '^killed' "$folder/results")
awk '/^killed/ { n[$4]++ } END { for (p in n) printf "      %d by %s\n", n[p], p }' "$folder/results"
finish
