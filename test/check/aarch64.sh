#!/bin/sh
# The library for aarch64, and the CPU device there: cross compiler and qemu, both Debian's. The kernels are the same
# machine code; without NVIDIA's runtime for aarch64 one stands in that finds no GPU.
. test/check/count.sh
lib=${LIB:-lib} make=${MAKE:-make} machine=aarch64-linux-gnu
for tool in $machine-gcc qemu-aarch64; do
  have $tool || { skip "aarch64" "$tool is not installed"; finish; }
done
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES
there=$lib/aarch64
rm -rf "$there" && mkdir -p "$there/obj" "$there/cuda"
cp -p "$lib"/obj/*.cubin* "$lib"/obj/*.ptx* "$lib"/obj/*.fatbin "$lib"/obj/flags.nvcc "$lib"/obj/flags.archs \
  "$there/obj"
runtime=$CUDA_HOME/targets/sbsa-linux/lib
[ -f "$runtime/libcudart_static.a" ] || runtime=$there/cuda
build() {
  $make -j"$(nproc)" LIB="$there" CC=$machine-gcc LD=$machine-ld AR=$machine-ar OBJCOPY=$machine-objcopy \
    NM=$machine-nm CUDA_LIB="$runtime" "$@"
}
# Every call answers cudaErrorNoDevice.
stand_in() {
  $machine-nm -u "$there/libcumoe.a" | awk '$2 ~ /^cuda/ && !seen[$2]++ { print "int " $2 "(void) { return 100; }" }' |
    sed 's/int \(cudaGetError[NS][a-z]*\)(void).*/const char *\1(int e) { return e ? "no device" : ""; }/' \
      > "$there/cuda/runtime.c" && $machine-gcc -w -c -o "$there/cuda/runtime.o" "$there/cuda/runtime.c" &&
    $machine-ar rcs "$there/cuda/libcudart_static.a" "$there/cuda/runtime.o"
}
programs="examples/first examples/readme abi/abi formats ops"
quiet "builds" build "$there/libcumoe.a" || finish
[ "$runtime" != "$there/cuda" ] || quiet "a runtime that finds no GPU" stand_in
# shellcheck disable=SC2086
quiet "programs link" build $(for program in $programs; do echo "$there/test/$program"; done)
for program in $programs; do
  quiet "$program runs" timeout 900 qemu-aarch64 -L /usr/$machine "$there/test/$program"
done
rm -rf "$there"
finish
