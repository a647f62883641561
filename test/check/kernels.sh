#!/bin/sh
# Facts of the machine code: every row of the table is there, no spills, no local memory, no float atomics, no trap, the
# registers and shared memory of as many CTAs an SM as the row says, as many wgmma as its tile asks for, and from sm_90
# on a wait for earlier grids.
. test/check/count.sh
lib=${LIB:-lib}
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

# The table, as lines "file kernel warps ctas smem op arch form BM BN BK"; of operations without tiles no last three.
printf '%s\n' '#define ROWS_ALL' \
  '#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM) \
    @ file cumoe_##op##_##arch##_##form##_##X##_##W##_##Y##_##SCALE##_##MAJOR##_##BM##x##BN##x##BK \
    WARPS CTAS SMEM op arch form BM BN BK @' \
  '#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM) \
    @ file cumoe_##op##_##arch##_##form##_##X##_##Y##_##UNITS##x##COLUMNS##x##LANES WARPS CTAS SMEM op arch form @' \
  '#include "kernels/variants.def"' | ${CC:-cc} -E -P $ARCH_DEFINES -I. - | tr '@' '\n' |
  awk 'NF == 11 || NF == 8' > "$work/rows"
[ -s "$work/rows" ] && pass "the table has $(wc -l < "$work/rows") rows" || fail "the table has rows"
empty "kernel names are unique" "$(awk '{ print $2 }' "$work/rows" | sort | uniq -d)"
empty "every row's file is built" "$(awk '{ print $1 }' "$work/rows" | sort -u | while read -r stem; do
  [ -n "$(ls "$lib/obj/$stem".sm_*.cubin 2> /dev/null)" ] || echo "$stem"
done)"

# Rows are sized by CUDA 13's ptxas for sm_80 and sm_90a; that of 12.x, and other machine code, spill some registers of
# some of them: slower, not wrong. without_spills NAME COMPLAINTS ARCH
without_spills() {
  case $2/$CUDA_VERSION/$3 in
  /* | */1[3-9].*/80 | */1[3-9].*/90a) empty "$1" "$2" ;;
  *) skip "$1" "$(printf '%s\n' "$2" | wc -l) complaints, sm_$3 with the ptxas of CUDA $CUDA_VERSION" ;;
  esac
}

for cubin in $CUBINS; do
  name=${cubin##*/} stem=${cubin##*/} stem=${stem%.sm_*} arch=${cubin##*.sm_} arch=${arch%.cubin}
  readelf -sW "$cubin" 2> /dev/null | awk '$4 == "FUNC" && $5 == "GLOBAL" { print $NF }' | sort > "$work/kernels"
  awk -v stem="$stem" '$1 == stem { print $2 }' "$work/rows" | sort > "$work/wanted"
  # Groups load theirs by name.
  case $stem in
  exchange) grep -o 'cumoe_ep_[a-z0-9_]*' kernels/ep/moves.def | grep -v '_ep_few_' | sort -u > "$work/wanted" ;;
  exchange_few_sm90) grep -o 'cumoe_ep_few_[a-z0-9_]*' kernels/ep/moves.def | sort -u > "$work/wanted" ;;
  esac
  empty "$name: all rows of the table" "$(comm -13 "$work/kernels" "$work/wanted")"
  empty "$name: no kernel outside the table" "$(comm -23 "$work/kernels" "$work/wanted")"
  # ptxas -v, kept by the build: a stack frame is local memory
  without_spills "$name: no spills, no local memory" "$(awk '/Function properties for/ { name = $NF }
    /bytes stack frame/ && !/ 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads/ { print name ": " $0 }
    / bytes stack frame/ { seen++ } END { if (!seen) print "no ptxas report" }' "$cubin.log")" "$arch"
  # An SM has 64 Ki registers, given out in eights a thread; of sm_90 and sm_100, 228 KiB of shared memory, of which a
  # CTA costs one more. Elsewhere (sm_120: 100 KiB) fewer CTAs than the row says may fit: slower, not wrong.
  case $arch in [1-8][0-9] | 12*) kib=0 ;; *) kib=228 ;; esac
  empty "$name: registers and shared memory of the CTAs an SM" "$(awk -v stem="$stem" -v sm=$((kib * 1024)) '
    NR == FNR { if ($1 == stem) { threads[$2] = $3 * 32; ctas[$2] = $4; smem[$2] = $5 } next }
    /Compiling entry function/ { split($0, q, "\047"); kernel = q[2]; next }
    /: Used [0-9]+ registers/ && kernel != "" {
      seen[kernel] = 1; match($0, /Used [0-9]+/); registers = substr($0, RSTART + 5, RLENGTH - 5)
      bytes = smem[kernel] + (match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH - 11) : 0) + 1024
      if (int((registers + 7) / 8) * 8 * threads[kernel] * ctas[kernel] > 65536)
        print kernel ": " registers " registers, " ctas[kernel] " CTAs of " threads[kernel] " threads"
      if (bytes <= sm && bytes * ctas[kernel] > sm)
        print kernel ": " bytes " bytes of shared memory, " ctas[kernel] " CTAs"
      kernel = ""
    }
    END { for (k in ctas) if (!(k in seen)) print k ": no ptxas report" }' "$work/rows" "$cubin.log")"
done

${CC:-cc} -std=c11 -Wall -Wextra -Werror -O1 -o "$work/opcodes" test/check/opcodes.c || fail "opcodes.c compiles"
for arch in $(for cubin in $CUBINS; do a=${cubin##*.sm_}; echo "${a%.cubin}"; done | sort -u); do
  ${NVCC:-nvcc} -cubin -arch="sm_$arch" -O3 -std=c++17 -o "$work/probe" test/check/probe.cu 2> "$work/log" &&
    "$work/opcodes" "$work/probe" > "$work/probe.$arch" || { fail "probe for sm_$arch" "$(cat "$work/log")"; continue; }
  for what in float_red float_atom double_red half_red trap local_memory; do
    # An opcode that integer atomics share counts with its type only.
    awk -v what=$what '$1 ~ /^plain/ { plain[$2] = 1 } $1 == "int_atomics" { shared[$2] = 1; allowed[$2 "." $3] = 1 }
      $1 == what { pair[$2 "." $3] = $2 }
      END { for (p in pair) if (!(pair[p] in plain) && !(p in allowed)) print pair[p] in shared ? p : pair[p] }' \
      "$work/probe.$arch" | sort -u > "$work/guilty"
    [ -s "$work/guilty" ] || { fail "sm_$arch: $what can be told from other code"; continue; }
    found=$(for cubin in $CUBINS; do
      case $cubin in *.sm_"$arch".cubin) "$work/opcodes" "$cubin" ;; esac
    done | awk -v bad="$(tr '\n' ' ' < "$work/guilty")" '
      BEGIN { n = split(bad, b); for (i = 1; i <= n; i++) is[b[i]] = 1 }
      is[$2] || is[$2 "." $3] { print $1 ": opcode 0x" $2 " type " $3 ", " $4 " times" }')
    complain=empty
    [ $what = local_memory ] && complain=without_spills
    $complain "sm_$arch: no $what ($(tr '\n' ' ' < "$work/guilty" | sed 's/ $//'))" "$found" "$arch"
  done
  # host/context.c lets every kernel of these start before the grid ahead has ended.
  case $arch in [1-8][0-9]*) [ ${#arch} -gt 2 ] || continue ;; esac
  awk '$1 ~ /^plain/ { plain[$2] = 1 } $1 == "grid_wait" { op[$2] = 1 }
    END { for (o in op) if (!(o in plain)) print o }' \
    "$work/probe.$arch" > "$work/waits"
  [ "$(wc -l < "$work/waits")" -eq 1 ] ||
    { fail "sm_$arch: a wait for earlier grids can be told from other code"; continue; }
  empty "sm_$arch: every kernel waits for earlier grids" "$(for cubin in $CUBINS; do
    case $cubin in *.sm_"$arch".cubin) "$work/opcodes" "$cubin" ;; esac
  done | awk -v wait="$(cat "$work/waits")" '{ seen[$1] = 1 } $2 == wait { waits[$1] = 1 }
    END { for (k in seen) if (!(k in waits)) print k }')"
done

empty "sm_90a: no minimum fused with a comparison (opcodes.c)" "$(for cubin in $CUBINS; do
  case $cubin in *.sm_90a.cubin) "$work/opcodes" "$cubin" ;; esac
done | awk '$2 == "relu_predicate" { print $1 ": " $4 }')"

quiet "the bugs that test/gpu.sh plants fit the kernels" bash test/gpu.sh fits

# An instruction per 16 k (of codes times codes 32), 64-row block and token width; the widths are the multiples of 16 up
# to the tile's, and each has a loop of its own (gemm/warpgroup_tile.cuh). The two consumers share the blocks of the
# tile; an up tile has gate and up rows. The router has its tokens in the blocks, and one loop. few, dealt
# and drawn have none; of fixed's, of bytes with weights in registers, nothing is expected, as they are of an opcode not
# looked for.
# mixed takes tokens by wgmma from 32 on, a slab of 128 k and 128 weight rows of a consumer at once (gemm/mixed.cuh);
# of u4 it has loops for scales of the activations' type and for others.
# wgmma of 4-bit weights has no loop for 48 and for 16 tokens (gemm/packed_tile.cuh), but in tiles of 64
# (gemm/woven_tile.cuh).
# Gradients of weights have a loop over blocks of BM and half of one behind it, for two widths
# (kernels/backward/gradient.cuh).
# wgmma of e4m3 has loops of that kind for 128, 64, 48, 32 and 16 tokens (gemm/scaled_tile.cuh), and one for a tile of
# one block of 64 tokens, of a piece, and, of an up that gathers, one of two (gemm/token_tile.cuh; the one that has
# tokens in registers is of another opcode).
awk '$7 == "sm90" && NF == 11 && $8 == "mixed" { print $2, ($9 / 16 - 1) * 128 / 16 * 2 * ($2 ~ /_u4_/ ? 2 : 1) }
  $7 == "sm90" && NF == 11 && $8 != "few" && $8 != "mixed" && $8 != "fixed" && $8 != "dealt" && $8 != "drawn" {
    k = $2 ~ /_(e4m3|s8)_(e4m3|s8)_/ ? 32 : 16
    blocks = $8 == "wgmma" && $2 ~ /_e4m3_e4m3_/ ? $9 / 64 : 0
    widths = blocks ? 5 : $8 == "wgmma" && $2 ~ /_(mx4|nv4|u4)_/ && $9 > 64 ? $9 / 16 - 2 : $9 / 16
    own = $6 == "router" ? $11 / k * $9 / 64 : widths * $11 / k * ($6 ~ /^up/ ? 2 : 1) * $10 / 64 / 2
    if ($6 == "weight_gradient") own = $11 / k * $9 / 64 / 2 * 3 / 2 * 2
    print $2, ($6 ~ /^up/ ? blocks * (blocks + 1) / 2 : blocks / 2) * $11 / k + own
  }' "$work/rows" | sort > "$work/expected"
if [ -s "$work/expected" ]; then
  awk '$1 ~ /^plain/ { plain[$2] = 1 } $1 ~ /^wgmma/ && $4 == 3 { op[$2] = 1 }
    END { for (o in op) if (!(o in plain)) print o }' \
    "$work/probe.90a" > "$work/wgmma"
  if [ "$(wc -l < "$work/wgmma")" -ne 4 ]; then fail "wgmma can be told from other code" "$(cat "$work/wgmma")"
  else
    for cubin in $CUBINS; do
      case $cubin in *.sm_90a.cubin) "$work/opcodes" "$cubin" ;; esac
    done | awk -v wgmma="$(tr '\n' ' ' < "$work/wgmma")" '
      BEGIN { n = split(wgmma, w); for (i = 1; i <= n; i++) is[w[i]] }
      $2 in is { count[$1] += $4 }
      END { for (k in count) print k, count[k] }' | sort > "$work/counted"
    empty "wgmma: as many as the tiles ask for, in no other kernel" "$(diff "$work/expected" "$work/counted")"
  fi
fi
finish
