#!/bin/sh
# Every public header alone, as C99, C11 and C++17, without and with the experimental part.
. test/check/count.sh
strict="-pedantic -Wall -Wextra -Wshadow -Werror -Iinclude -fsyntax-only"
for header in include/cumoe/*.h; do
  for compiler in "${CC:-cc} -x c -std=c99" "${CC:-cc} -x c -std=c11" "${CXX:-g++} -x c++ -std=c++17" \
    "clang -x c -std=c99" "clang++ -x c++ -std=c++17"; do
    have "${compiler%% *}" || { skip "${header##*/} $compiler" "not installed"; continue; }
    text=$(for part in '' '#define CUMOE_EXPERIMENTAL'; do
      printf '%s\n#include <cumoe/%s>\n' "$part" "${header##*/}" | $compiler $strict - 2>&1
    done)
    empty "${header##*/} $compiler" "$text"
  done
done

# A status that is dropped is a warning, one that is dropped on purpose is none. (gcc before C23 takes no cast for
# that.)
dropping() {
  printf '#include <cumoe/typed.h>\nvoid f(cumoe_buffer_f32 *a);\nvoid f(cumoe_buffer_f32 *a) { %s; }\n' "$1" |
    $compiler -Wall -Wextra -Werror -Iinclude -S -o /dev/null - 2>&1
}
for compiler in "${CC:-cc} -x c -std=c11" "${CC:-cc} -x c -std=c2x" "${CXX:-g++} -x c++ -std=c++17" \
  "clang -x c -std=c99" "clang++ -x c++ -std=c++17"; do
  have "${compiler%% *}" || { skip "dropped status, $compiler" "not installed"; continue; }
  for call in 'cumoe_buffer_retain(a->any, 0)' 'cumoe_buffer_retain_f32(*a, a)'; do
    case $compiler in *gcc*c11 | cc*c11) cast= ;; *) cast="(void)$call" ;; esac
    empty "dropped on purpose, $compiler: $call" "$(dropping "CUMOE_IGNORE($call); $cast")"
    case $(dropping "$call") in
    *unused-result* | *unused-value*) pass "dropped, $compiler: $call" ;;
    *) fail "dropped, $compiler: $call" "no warning" ;;
    esac
  done
done

# Of a struct with a hole an older program would say nothing where a newer library looks for a field.
empty "no struct has a hole" "$(echo '#include <cumoe/cumoe.h>' |
  ${CC:-cc} -x c -std=c11 -Wpadded -Iinclude -fsyntax-only - 2>&1)"

# Other machines are refused with a sentence.
refused() {
  case $(echo '#include <cumoe/cumoe.h>' | $2 -x c -std=c11 -Iinclude -fsyntax-only - 2>&1) in
  *"$3"*) pass "$1 are refused" ;;
  *) fail "$1 are refused" "no sentence" ;;
  esac
}
refused "32 bits" "${CC:-cc} -U__SIZEOF_POINTER__ -D__SIZEOF_POINTER__=4" "machines of 64 bits"
refused "big-endian machines" "${CC:-cc} -U__BYTE_ORDER__ -D__BYTE_ORDER__=4321" "little-endian machines"

# What lies in other structs by value, and views and handles, never changes its size.
for struct in cumoe_view=48 cumoe_buffer=8 cumoe_arg=56 cumoe_image=16 cumoe_routing=128 cumoe_format=128 \
  cumoe_projection=512; do
  quiet "${struct%=*} has ${struct#*=} bytes" ${CC:-cc} -x c -std=c11 -Iinclude -fsyntax-only - <<- END
	#include <cumoe/cumoe.h>
	_Static_assert(sizeof(${struct%=*}) == ${struct#*=}, "another size");
	END
done

# The crate of test/examples/rust reads the headers when it is built.
crate=test/examples/rust/cumoe-sys
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
if have python3; then
  quiet "the Rust crate's script reads the headers" python3 $crate/bindings.py include "$work/bindings.rs"
  empty "it finds every function" "$({
    grep -o 'pub fn cumoe_[a-z0-9_]*' "$work/bindings.rs" | sed 's/pub fn //'
    declared
  } | sort | uniq -u)"
  # rustc lays structs out and compares sizes and offsets with the C compiler's.
  if have rustc; then
    quiet "structs lie in Rust as in C" env OUT_DIR="$work" rustc --edition 2021 --crate-type lib --emit metadata \
      -D warnings -o "$work/crate" $crate/src/lib.rs
  else skip "structs lie in Rust as in C" "no rustc"; fi
else skip "the Rust crate's script" "no python3"; fi
quiet "the crate's version is cumoe's" grep -qx "version = \"$VERSION\"" $crate/Cargo.toml
finish
