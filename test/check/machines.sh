#!/bin/sh
# Machine code for MACHINES, a list like ARCHS: compiled, the facts of test/check/kernels.sh asked of each. On demand,
# since it takes minutes (TEST_TIMEOUT=3600 on few cores); what $lib has compiled already is taken from there.
. test/check/count.sh
lib=${LIB:-lib} make=${MAKE:-make}
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES
if [ -z "$MACHINES" ]; then
  skip "machine code for other GPUs" "MACHINES='80 89 90a 100 120' compiles it and looks, in minutes"
  finish
fi
there=$lib/machines
rm -rf "$there" && mkdir -p "$there/obj" || exit 1
# With their times: make sees what is up to date.
to=$(cd "$there/obj" && pwd) || exit 1
(cd "$lib/obj" && cp -p ./*.cubin* ./*.ptx* ./*.rows flags.nvcc toolkit "$to") || exit 1
with() { $make -j"$(nproc)" LIB="$there" ARCHS="$MACHINES" "$@"; }
for arch in $MACHINES; do
  quiet "sm_$arch: compiles" with $(with print-CUBINS | tr ' ' '\n' | grep "\.sm_$arch\.cubin$")
done
text=$(with check T=kernels V=1 2>&1) && pass "$MACHINES: machine code" ||
  fail "$MACHINES: machine code" "$(printf '%s\n' "$text" | grep -A 9 '^ *FAIL')"
while read -r line; do
  [ -z "$line" ] || skip "${line%: *}" "${line##*: }"
done << END
$(printf '%s\n' "$text" | sed -n 's/^ *skip  //p')
END
rm -rf "$there"
finish
