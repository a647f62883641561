#!/bin/sh
# Branch coverage of host/ by the programs that need no GPU: test/check/coverage.sh [program ...]. Prints a line a file,
# the branches never taken, and the sum; fails below COVERAGE_LEAST per cent. uncovered.txt says why those that are left
# are left.
. test/check/count.sh
. test/check/shimmed.sh
least=${COVERAGE_LEAST:-95}
folder=$lib/obj/coverage
[ $# -eq 0 ] && set -- faults badargs trace base buffer pool debug lifetimes image kernel stream ranges ops matmul \
  contract plan graph golden arenas wires
have gcov || { skip "coverage" "gcov is not installed"; finish; }

# gcc counts a branch for each half of a condition, so the build is plain: no inlining, no merging.
flags='-O0 -g0 --coverage -fprofile-update=atomic'
rm -f "$folder"/*.gcda "$folder"/*.gcov
shimmed=$(grep -l '^.include "shim/' test/*.c | sed 's|test/\(.*\)\.c|\1|')
compile "$folder" "$flags" host/*.c || exit 1
compile "$folder" "-O1 -g0" kernels/cpu/*.c test/shim/*.c $helpers $(printf 'test/%s.c ' "$@") || exit 1
name_images "$folder" || exit 1
cudart=$(${MAKE:-make} -s print-LINK_LIBS)
for program; do
  case " $(echo $shimmed) " in
  *" $program "*) link_shimmed "$folder" "--coverage -Wl,-u,__gcov_dump" "$program" || exit 1 ;;
  *) ${CC:-cc} --coverage -o "$folder/$program" "$folder/test_$program.c.o" \
    $(for h in $helpers; do echo "$folder/$(echo "$h" | tr / _).o"; done) \
    "$folder"/host_*.o "$folder"/kernels_*.o "$folder/images.o" $cudart || exit 1 ;;
  esac
  quiet "$program" env CUDA_VISIBLE_DEVICES= "$folder/$program"
done

# gcov writes FILE.gcov for the headers too; only host/*.c counts.
report=$folder/report.txt
rm -f "$folder/branches.txt"
for f in "$folder"/host_*.c.gcda; do gcov -b -c -t "$f" 2> /dev/null; done |
  awk -v list="$folder/branches.txt" '
  /^ *-: *0:Source:/ { sub(/.*Source:/, ""); file = $0; next }
  file !~ /^host\/[a-z_0-9]*\.c$/ { next }
  /^branch/ {
    all[file]++
    if ($0 ~ /never executed|taken 0/) { missed[file]++; printf "%s:%s: branch %s: %s\n", file, line, $2, text > list }
    next
  }
  /^ *[-#=0-9*]+: *[0-9]+:/ {
    text = $0; sub(/^[^:]*: */, "", text)
    line = text; sub(/:.*/, "", line)
    sub(/^[0-9]*:/, "", text)
  }
  function show(name, n, without) {
    printf "%-20s %5d of %5d branches, %5.1f %%\n", name, n - without, n, 100 * (n - without) / n
  }
  END {
    for (f in all) { show(f, all[f], missed[f]); a += all[f]; m += missed[f] }
    show("~ all of host/", a, m)
  }' | sort > "$report"
sort -t: -k1,1 -k2,2n "$folder/branches.txt"
cat "$report"
percent=$(sed -n 's/^~.* \([0-9.]*\) %$/\1/p' "$report")
if awk "BEGIN { exit !($percent >= $least) }"; then pass "branches of host/: $percent %"
else fail "branches of host/: $percent %, at least $least"; fi
finish
