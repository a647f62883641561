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

# Hand-written bindings rely on these: test/examples/rust asserts the same numbers. A struct that grows changes both.
for struct in cumoe_view=48 cumoe_buffer=8 cumoe_routing=52 cumoe_moe_desc=100 \
  cumoe_projection=112 cumoe_weights_desc=480 cumoe_moe_args=840; do
  quiet "${struct%=*} has ${struct#*=} bytes" ${CC:-cc} -x c -std=c11 -Iinclude -fsyntax-only - <<- END
	#include <cumoe/cumoe.h>
	_Static_assert(sizeof(${struct%=*}) == ${struct#*=}, "another size");
	END
done
finish
