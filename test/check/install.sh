#!/bin/sh
# Installs into a staging folder and builds programs against it the way users do: pkg-config, CMake, cargo.
. test/check/count.sh
lib=$(cd "${LIB:-lib}" && pwd) make=${MAKE:-make}
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES
stage=$lib/prefix
rm -rf "$stage"
quiet "make install" $make install LIB="${LIB:-lib}" DESTDIR="$stage" PREFIX=/usr || finish
prefix=$stage/usr
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

built_by_cmake() {
  cmake -S test/examples -B "$stage/cmake-$1" -DCMAKE_PREFIX_PATH="$prefix" -DCUMOE_CUDART="$1" \
    -DCUDAToolkit_ROOT="$CUDA_HOME" && cmake --build "$stage/cmake-$1" || return 1
  LD_LIBRARY_PATH=$CUDA_LIB "$stage/cmake-$1/first" && LD_LIBRARY_PATH=$CUDA_LIB "$stage/cmake-$1/engine"
}
if have cmake; then
  quiet "CMake, static CUDA runtime: build and run" built_by_cmake static
  quiet "CMake, shared CUDA runtime: build and run" built_by_cmake shared
else
  skip "CMake" "not installed"
fi

built_by_cargo() {
  cp -r test/examples/rust "$stage/rust" && cd "$stage/rust" && RUSTFLAGS="-D warnings" cargo run --offline
}
if have cargo && have pkg-config; then quiet "cargo: build and run" built_by_cargo
else skip "cargo" "not installed"; fi

# The README's line for this folder.
built_by_hand() {
  line=$(sed -n 's/^| by hand.*`\(cc .*\)` |$/\1/p' README.md |
    sed "s|app.c|test/examples/first.c|; s|-Llib|-L$lib|; s|/usr/local/cuda/lib64|$CUDA_LIB|")
  [ -n "$line" ] && eval "$line -o $stage/by-hand" && "$stage/by-hand"
}
quiet "the README's line by hand: build and run" built_by_hand

quiet "make uninstall" $make uninstall LIB="${LIB:-lib}" DESTDIR="$stage" PREFIX=/usr
empty "nothing is left" "$(find "$prefix" -type f)"
rm -rf "$stage"
finish
