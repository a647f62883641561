#!/bin/sh
# Other CUDA Toolkits that are installed, or those of TOOLKITS: each builds the library, whose machine code and CPU
# device pass. Minutes on many cores; TEST_TIMEOUT=3600 on few.
. test/check/count.sh
lib=${LIB:-lib} make=${MAKE:-make}
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES
own=$(cd "$CUDA_HOME" && pwd -P)
for toolkit in ${TOOLKITS:-/usr/local/cuda-12.[4-9] /usr/local/cuda-1[3-9].[0-9]}; do
  [ -x "$toolkit/bin/nvcc" ] && [ "$(cd "$toolkit" && pwd -P)" != "$own" ] || continue
  there=$lib/toolkits/${toolkit##*/} found=1
  with() {
    $make -j"$(nproc)" LIB="$there" CUDA_HOME="$toolkit" \
      NVCC="$toolkit/bin/nvcc" "$@"
  }
  quiet "$toolkit: builds" with all || continue
  quiet "$toolkit: machine code" with check T=kernels
  quiet "$toolkit: tests" with test T="abi first readme base plan ops"
  rm -rf "$there"
done
[ -n "$found" ] || skip "other CUDA Toolkits" "none is installed; TOOLKITS=/usr/local/cuda-12.4, for example"
finish
