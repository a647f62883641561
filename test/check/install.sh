#!/bin/sh
# Installs into a staging folder and builds programs against it the way users do: pkg-config, CMake, cargo.
. test/check/count.sh
lib=$(cd "${LIB:-lib}" && pwd) make=${MAKE:-make}
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES
stage=$lib/prefix
prefix=$stage/usr
rm -rf "$stage"
install() { $make install LIB="${LIB:-lib}" DESTDIR="$stage" PREFIX=/usr; }
# The shared library is installed only where it was made; everything after that has both side by side.
[ -e "$lib/libcumoe.so" ] && asked=1 || asked=
if [ -z "$asked" ]; then
  quiet "make install" install || finish
  empty "without make shared no shared library is installed" "$(find "$prefix" -name '*shared*' -o -name '*.so*')"
  quiet "make shared" $make shared LIB="${LIB:-lib}" || finish
fi
quiet "make install, with the shared library" install || finish
PKG_CONFIG_PATH=$prefix/lib/pkgconfig
export PKG_CONFIG_PATH

# COMPILER AND FLAGS, SOURCE, with what pkg-config says.
built_by_pkg_config() {
  $1 -o "$stage/program" "test/examples/$2" $(pkg-config --cflags --libs cumoe) && "$stage/program"
}
if have pkg-config; then
  for compiler in "${CC:-cc}" clang; do
    have "$compiler" || { skip "pkg-config, $compiler" "not installed"; continue; }
    quiet "pkg-config, $compiler: build and run" built_by_pkg_config "$compiler -std=c11" first.c
  done
  # An engine calls the CUDA runtime itself.
  quiet "pkg-config, an engine: build and run" built_by_pkg_config "${CC:-cc} -std=c11 -I$CUDA_INCLUDE" engine.c
  for compiler in "${CXX:-g++}" clang++; do
    have "$compiler" || { skip "pkg-config, $compiler" "not installed"; continue; }
    quiet "pkg-config, $compiler: build and run" built_by_pkg_config "$compiler -std=c++17" raii.cpp
  done
  quiet "pkg-config: the version of the headers" test "$(pkg-config --modversion cumoe)" = "$VERSION"
else
  skip "pkg-config" "not installed"
fi

# ---- the shared library ----

so=$prefix/lib/libcumoe.so.$VERSION soname=libcumoe.so.${VERSION%.*}
declared > "$stage/declared"
nm -D --defined-only "$so" | awk '{ print $3 }' | sort > "$stage/exported"
empty "the shared library shows what the headers declare, and nothing else" \
  "$(comm -3 "$stage/declared" "$stage/exported")"
quiet "its SONAME is $soname" grep -q "SONAME.*\[$soname\]" <<- END
	$(readelf -d "$so")
END
empty "it needs the C library alone" \
  "$(readelf -d "$so" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' | grep -vE '^(lib(c|m|dl|pthread|rt)|ld-linux-.*)\.so')"
empty "it has no executable stack" "$(readelf -lW "$so" | grep 'GNU_STACK.*E')"

# needs PROGRAM: yes where it loads the shared library.
needs() { readelf -d "$1" | grep -q "NEEDED.*\[$soname\]"; }
shared_by_pkg_config() {
  ${CC:-cc} -std=c11 -o "$stage/loads" test/examples/first.c $(pkg-config --cflags --libs cumoe-shared) &&
    needs "$stage/loads" && LD_LIBRARY_PATH=$prefix/lib "$stage/loads"
}
archive_beside_shared() { ! needs "$stage/program" && "$stage/program"; }

# An engine's shared object with the archive inside: ENGINE FLAGS. It runs, and shows its own function alone.
cat > "$stage/main.c" << 'END'
int engine_layer(void);
int main(void) { return engine_layer(); }
END
engine_object() {
  ${CC:-cc} -std=c11 -fPIC -shared -Dmain=engine_layer -o "$stage/lib$1.so" test/examples/first.c \
    $(pkg-config --cflags --libs cumoe) $2 && ${CC:-cc} -o "$stage/$1" "$stage/main.c" -L"$stage" -l"$1" &&
    LD_LIBRARY_PATH=$stage "$stage/$1"
}
shows() { nm -D --defined-only "$stage/lib$1.so" | awk '{ print $3 }'; }

if have pkg-config; then
  quiet "pkg-config, the shared library: build and run" shared_by_pkg_config
  quiet "pkg-config, the archive beside it: a program has it inside" archive_beside_shared
  quiet "an engine's shared object: build and run" engine_object open
  # All but those of members of the archive that it does not use.
  beside_the_layer "$prefix/lib/libcumoe.a" "$stage/member.o" > "$stage/others"
  quiet "it shows cumoe's functions too" test "$(shows open | grep -c ^cumoe_)" -eq \
    "$(grep -cvxFf "$stage/others" "$stage/declared")"
  quiet "the same with pkg-config's hide: build and run" engine_object hidden "$(pkg-config --variable=hide cumoe)"
  quiet "it shows the engine's alone" test "$(shows hidden)" = engine_layer
else
  skip "pkg-config, the shared library" "not installed"
fi

# ---- CMake, cargo, by hand ----

built_by_cmake() {
  cmake -S test/examples -B "$stage/cmake-$1" -DCMAKE_PREFIX_PATH="$prefix" -DCUMOE_CUDART="$1" \
    -DCUDAToolkit_ROOT="$CUDA_HOME" && cmake --build "$stage/cmake-$1" || return 1
  LD_LIBRARY_PATH=$CUDA_LIB "$stage/cmake-$1/first" && LD_LIBRARY_PATH=$CUDA_LIB "$stage/cmake-$1/engine" &&
    needs "$stage/cmake-$1/loads" && "$stage/cmake-$1/loads"
}
cmake_hides() { test "$(nm -D --defined-only "$stage/cmake-static/libhidden.so" | awk '{ print $3 }')" = engine_layer; }
# Without the archive and the CUDA Toolkit.
cmake_shared_alone() {
  mkdir "$stage/alone" && cat > "$stage/alone/CMakeLists.txt" << END || return 1
cmake_minimum_required(VERSION 3.18)
project(alone LANGUAGES C)
find_package(cumoe ${VERSION%.*} REQUIRED COMPONENTS shared)
if(TARGET CUDA::cudart OR TARGET cumoe::cumoe)
  message(FATAL_ERROR "more than the shared library")
endif()
END
  cmake -S "$stage/alone" -B "$stage/alone/build" -DCMAKE_PREFIX_PATH="$prefix"
}
# A component that is asked for besides leaves the archive; one that is none is not found.
cmake_components() {
  mkdir "$stage/parts" && cat > "$stage/parts/CMakeLists.txt" << END || return 1
cmake_minimum_required(VERSION 3.18)
project(parts LANGUAGES C)
find_package(cumoe ${VERSION%.*} REQUIRED OPTIONAL_COMPONENTS shared)
find_package(cumoe ${VERSION%.*} QUIET COMPONENTS nonsense)
if(cumoe_FOUND OR NOT TARGET cumoe::cumoe)
  message(FATAL_ERROR "found: \${cumoe_FOUND}")
endif()
END
  cmake -S "$stage/parts" -B "$stage/parts/build" -DCMAKE_PREFIX_PATH="$prefix" -DCUDAToolkit_ROOT="$CUDA_HOME"
}
if have cmake; then
  quiet "CMake, static CUDA runtime: build and run" built_by_cmake static
  quiet "CMake, shared CUDA runtime: build and run" built_by_cmake shared
  quiet "CMake, cumoe::hidden: an engine's shared object shows its own functions alone" cmake_hides
  quiet "CMake, the component shared asks for no CUDA Toolkit" cmake_shared_alone
  quiet "CMake, components that are optional, and none" cmake_components
else
  skip "CMake" "not installed"
fi

built_by_cargo() {
  cp -r test/examples/rust "$stage/rust" && cd "$stage/rust" && RUSTFLAGS="-D warnings" cargo run --offline
}
if have cargo && have pkg-config && have python3; then quiet "cargo: build and run" built_by_cargo
else skip "cargo" "needs cargo, pkg-config and python3"; fi

# The README's line for this folder.
built_by_hand() {
  line=$(sed -n 's/^| by hand.*`\(cc .*\)` |$/\1/p' README.md |
    sed "s|app.c|test/examples/first.c|; s| lib/libcumoe.a| $lib/libcumoe.a|; s|/usr/local/cuda/lib64|$CUDA_LIB|")
  [ -n "$line" ] && eval "$line -o $stage/by-hand" && "$stage/by-hand"
}
quiet "the README's line by hand: build and run" built_by_hand

quiet "make uninstall" $make uninstall LIB="${LIB:-lib}" DESTDIR="$stage" PREFIX=/usr
empty "nothing is left" "$(find "$prefix" -type f -o -type l)"
rm -rf "$stage"
[ -n "$asked" ] || rm -f "$lib/libcumoe.so"
finish
