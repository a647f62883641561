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

# Of a struct with a hole an older program would say nothing where a newer library looks for a field.
empty "no struct has a hole" "$(echo '#include <cumoe/cumoe.h>' | ${CC:-cc} -x c -std=c11 -Wpadded -Iinclude -fsyntax-only - 2>&1)"

# Hand-written bindings rely on these: test/examples/rust asserts the same numbers. A struct that grows changes both.
for struct in cumoe_view=48 cumoe_buffer=8 cumoe_routing=128 cumoe_moe_desc=176 \
  cumoe_projection=512 cumoe_weights_desc=2080 cumoe_moe_args=840; do
  quiet "${struct%=*} has ${struct#*=} bytes" ${CC:-cc} -x c -std=c11 -Iinclude -fsyntax-only - <<- END
	#include <cumoe/cumoe.h>
	_Static_assert(sizeof(${struct%=*}) == ${struct#*=}, "another size");
	END
done
finish
