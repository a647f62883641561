#!/bin/sh
# cumoe from PyTorch and transformers, by ctypes; PYTHON= names an interpreter that has them.
. test/check/count.sh
python=${PYTHON:-python3}
if have "$python" && "$python" -c 'import torch' 2> /dev/null; then
  export PYTHONDONTWRITEBYTECODE=1 CUMOE_LIBRARY="$(cd "${LIB:-lib}" && pwd)/test/libcumoe.so"
  exec "$python" test/examples/torch/test.py
fi
skip "PyTorch" "not installed for $python"
finish
