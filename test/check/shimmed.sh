# Sourced: builds programs over the shim (test/shim/) outside the Makefile's own folders, with flags of their own.
# Needs lib/obj/flags.cc and flags.archs, which `make` leaves, and no kernel: nobody without a GPU reads an image.
lib=${LIB:-lib}
shim_helpers='test parts oracle codes'
# What every other program is linked with, as the Makefile has it.
helpers="$(for h in test/*.h; do [ -f "${h%.h}.c" ] && echo "${h%.h}.c"; done)"
helpers="$helpers bench/tinylm.c bench/decoder.c bench/safetensors.c"
wrap=$(sed -n 's/^SHIM_WRAP *:= *//p' Makefile)

# name_images FOLDER: an object with a name for every kernel image, those that not every program links among them
name_images() {
  nm "$1"/host_*.o |
    sed -n 's/.* [Uw] \(cumoe_image_[a-z0-9_]*\)$/const unsigned char \1[16];/p' | sort -u > "$1/images.c"
  ${CC:-cc} -c -o "$1/images.o" "$1/images.c"
}

# compile FOLDER FLAGS FILE...: those that are older than their source or than any header, two at a time.
compile() {
  compile_to=$1 compile_flags=$2 compile_archs="-DCUMOE_ARCHS='\"$(cat "$lib/obj/flags.archs")\"'"
  shift 2
  mkdir -p "$compile_to"
  newest=$(ls -t host/*.h host/*.def include/cumoe/*.h kernels/*.h kernels/*.def test/*.h test/shim/*.h | head -n 1)
  for file; do
    object=$compile_to/$(echo "$file" | tr / _).o
    [ "$object" -nt "$file" ] && [ "$object" -nt "$newest" ] || printf '%s %s\n' "$file" "$object"
  done | xargs -r -P "$(nproc 2> /dev/null || echo 2)" -L 1 \
    sh -c "$(cat "$lib/obj/flags.cc") $compile_archs $compile_flags -MF /dev/null -c -o \$1 \$0"
}

# link_shimmed FOLDER FLAGS PROGRAM: from the objects that compile left there
link_shimmed() {
  ${CC:-cc} $2 -o "$1/$3" "$1/test_$3.c.o" $(for helper in $shim_helpers; do echo "$1/test_$helper.c.o"; done) \
    "$1"/test_shim_*.o "$1"/host_*.o "$1"/kernels_*.o "$1/images.o" \
    $(for name in $wrap; do echo "-Wl,--wrap=$name"; done) -ldl -lpthread -lm
}

# build_shimmed FOLDER FLAGS PROGRAM...
build_shimmed() {
  build_to=$1 build_flags=$2
  shift 2
  compile "$build_to" "$build_flags" host/*.c kernels/cpu/*.c test/shim/*.c \
    $(printf 'test/%s.c ' $shim_helpers "$@") || return 1
  name_images "$build_to" || return 1
  for program; do link_shimmed "$build_to" "$build_flags" "$program" || return 1; done
}
