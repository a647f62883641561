#!/bin/bash
# On a GPU: every kernel of the table under compute-sanitizer's memcheck, racecheck and synccheck (test/rows.c; those of
# the layer's gradients by test/backward.c), and proof that each tool sees a bug in them. Last line as in test/run.sh.
#
#   test/gpu.sh plant    anywhere with nvcc: builds the test with planted bugs: lib/planted/*/lib/test/rows
#   test/gpu.sh fits     anywhere: whether the bugs still fit the kernels
#   test/gpu.sh          on the GPU machine; all tools side by side, each stopped after SECONDS_EACH (240);
#                        KEEP=FOLDER keeps what they said, PARTS="draw 0/2": these parts alone (parts_of)
#   test/gpu.sh planted  only whether the tools see the planted bugs
cd "$(dirname "$0")/.." || exit 1
. test/check/count.sh
lib=${LIB:-lib} each=${SECONDS_EACH:-240}
planted=$lib/planted

# bug FILE SED: plants it in the copy.
bug() {
  cp "$copy/$1" "$copy/before"
  sed -i "$2" "$copy/$1"
  ! cmp -s "$copy/$1" "$copy/before" || { echo "gpu.sh: the bug for $1 no longer fits it" >&2; exit 1; }
}

copy_tree() {
  copy=$planted/$1
  mkdir -p "$copy/lib" || exit 1
  if [ "$mode" = fits ]; then cp -a kernels "$copy"; return; fi
  cp -a Makefile README.md include host kernels bench test "$copy" && cp -a "$lib/obj" "$copy/lib" || exit 1
}

# A race in a program of its own: another one's reports would use up the limit, a store past the end would end it.
mode=$1
if [ "$mode" = plant ] || [ "$mode" = fits ]; then
  [ "$mode" = plant ] || { planted=$(mktemp -d) && trap 'rm -rf "$planted"' EXIT; }
  rm -rf "$planted"
  copy_tree sums
  # A warp says that its sums are there before they are. (Races of stmatrix, wgmma or copies are not seen.)
  bug kernels/few/products.cuh '/^DEVICE void store_partial/,/^}/{/mbarrier_arrive/d
    /^  wait_for/{p;s/.*/  mbarrier_arrive(\&smem.partial_full[stage_of(buffer)]);/}}'
  copy_tree map
  # Pairs counted by a warp are read while others still count theirs.
  bug kernels/route/map_chunk.cuh '/^  __syncthreads();$/{N;s/^.*\n\(  scan_warps(a, s);\)/\1/}'
  copy_tree rest
  # One thread of a warp misses a barrier.
  bug kernels/route/router_dot.cuh \
    '/^  __syncthreads();$/{N;s/__syncthreads();\n  if (threadIdx.x >= BM \* BN) return;/if (threadIdx.x % 32) &/}'
  # The layer's output goes past its end, to memory that is mapped but nobody's.
  bug kernels/permute/combine.cuh \
    's/\(static_cast<Out \*>(a.out) + token \* a.out_ld + at\), value/\1 + (1 << 19), value/'
  [ "$mode" = plant ] || exit 0
  for copy in sums map rest; do ${MAKE:-make} -C "$planted/$copy" LIB=lib lib/test/rows || exit 1; done
  exit
fi

have compute-sanitizer || PATH=$PATH:/usr/local/cuda/bin
if ! have compute-sanitizer || ! nvidia-smi > /dev/null 2>&1; then
  skip "compute-sanitizer" "no GPU, or not installed"
  finish
fi
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

# run NAME TOOL ROWS PROGRAM...: the tool's exit status and seconds go to NAME.rc, what it says to NAME.log.
run() {
  local name=$1 tool=$2 rows=$3 start=$SECONDS
  shift 3
  ROWS=$rows timeout -k 5 "$each" compute-sanitizer --tool "$tool" --num-cuda-barriers 1024 --error-exitcode 9 \
    --print-limit 200 "$@" > "$work/$name.log" 2>&1
  echo "$? $((SECONDS - start))" > "$work/$name.rc"
}

# Rows that racecheck reports although they have no race, which would use up its limit. It does not follow
#   a lane that arrives for its warp, behind a __syncwarp: of builds of mixed and of dealt in which all lanes arrive it
#   says nothing
#   remote arrivals (mapa), by which wgmma gives back stages whose factors, or e4m3's scales of weights, warps have
#   stored: of a build in which a CTA arrives at its own barrier plainly it says nothing (tried with factors)
#   words that warps poll: what is reported of drawn is tickets alone (few/drawn_feed.cuh), written before a fence and
#   read behind one
unfollowed="sm90_mixed sm90_dealt sm90_drawn cumoe_up_sm90_fixed cumoe_down_sm90_fixed"
unfollowed="$unfollowed wgmma_bf16_mx4 wgmma_bf16_nv4 wgmma_bf16_u4 wgmma_f16_mx4 wgmma_f16_nv4 wgmma_f16_u4"
unfollowed="$unfollowed wgmma_e4m3_e4m3"
# Likewise (the first reason) d h, whose copies a lane lets go ahead for its warp.
unfollowed="$unfollowed down_activated"

# PROGRAM:TOOL:KERNEL. By ROWS, as racecheck of CUDA 13.0 does not survive --kernel-name here.
bugs="sums:racecheck:cumoe_few_up_sm90_few map:racecheck:cumoe_map_any
  rest:synccheck:cumoe_router_any_dot rest:memcheck:cumoe_combine_any_gather"
tools="memcheck racecheck synccheck"
[ "$1" != planted ] || tools=
# Parts of a tool's work, side by side: shards of all rows, of which racecheck takes several times as long, and groups
# of test/backward.c.
parts_of() {
  [ -z "$PARTS" ] || { echo $PARTS; return; }
  case $1 in racecheck) echo {0..7}/8 ;; *) echo {0..1}/2 ;; esac
  echo gradients draw
}
run_part() { # TOOL PART
  local rows= gradients= draw=
  if [ "$1" = racecheck ]; then # a few cases; 8: more units than clusters
    rows=$(printf '!%s ' $unfollowed) gradients="--seeds 7-9" draw="--seeds 0-2"
  fi
  case $2 in
  gradients) run "$1.$2" "$1" "" "$lib/test/backward" --device cuda --only "kernels of gradients" $gradients ;;
  draw) run "$1.$2" "$1" "" "$lib/test/backward" --device cuda --only "kernels that draw" $draw ;;
  *) run "$1.${2%/*}" "$1" "$rows" "$lib/test/rows" --shard "$2" ;;
  esac
}
for tool in $tools; do
  for part in $(parts_of "$tool"); do run_part "$tool" "$part" & done
done
for bug in $bugs; do
  IFS=: read -r program tool kernel <<< "$bug"
  program=$planted/$program/lib/test/rows
  [ ! -x "$program" ] || run "planted.$kernel" "$tool" "$kernel" "$program" --only "T 70:" &
done
wait

# A layer whose one product is of another row may well have the other product of one of these.
reports_of_others() { grep -oE 'access at [a-z0-9_A-Z]+' "$1" | grep -qvE "${unfollowed// /|}"; }
for tool in $tools; do
  for part in $(parts_of "$tool"); do
    name=$tool.${part%/*}
    read -r status took < "$work/$name.rc"
    if [ "$tool:$status" = racecheck:9 ] && ! reports_of_others "$work/$name.log" &&
      grep -q ' passed, 0 failed, ' "$work/$name.log"; then status=0; fi
    case $status:$(tail -n 1 "$work/$name.log") in
    0:*) pass "$tool, $part, $took s: $(grep ' passed, ' "$work/$name.log")" ;;
    124:*) fail "$name: longer than $each s" "$(tail -n 3 "$work/$name.log")" ;;
    *)
      fail "$name, $took s: exit status $status" \
        "$(grep -m 40 -v '^ok' "$work/$name.log"; tail -n 5 "$work/$name.log")" ;;
    esac
  done
done
[ -z "$tools" ] || skip "racecheck: $unfollowed" "what it does not follow: see there"

# seen TOOL KERNEL: the planted bug in it is reported.
seen() {
  [ -f "$work/planted.$2.log" ] || { skip "planted bug in $2, $1" "not built: test/gpu.sh plant"; return; }
  if grep '^========= ' "$work/planted.$2.log" | grep -q "$2"; then pass "$1 sees the planted bug in $2"
  else fail "$1 sees the planted bug in $2" "$(tail -n 20 "$work/planted.$2.log")"; fi
}
for bug in $bugs; do
  IFS=: read -r program tool kernel <<< "$bug"
  seen "$tool" "$kernel"
done
[ -z "$KEEP" ] || cp "$work"/* "$KEEP"
finish
