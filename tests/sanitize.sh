#!/bin/bash
# Run the CPU kernels under a sanitizer: tests/sanitize.sh PYTHON [address|thread] [pytest options]
#
# Compiles plugins/cpu/src with it into build/sanitize, then runs the kernel tests on each
# instruction set of this machine, and whole models on several threads. Python is not
# instrumented, so reports are about the kernels. Needs g++; takes about twenty minutes of one core.
set -euo pipefail
python=$1 only=${2:-} options=("${@:3}")
cd "$(dirname "$0")/.."

sanitize() { # NAME LIBRARY FLAG...
  local out=build/sanitize/$1 runtime=$2
  mkdir -p "$out"
  if [ ! -e "$out/kernels.so" ] || [ -n "$(find plugins \( -name '*.h' -o -name '*.cpp' \) -newer "$out/kernels.so")" ]; then
    g++ -std=c++17 -O1 -g1 -fno-math-errno -fPIC -Wno-psabi -shared -pthread "${@:3}" \
      plugins/cpu/src/*.cpp -o "$out/kernels.so"
  fi
  # ignore leaks and threads of Python and its packages
  LD_PRELOAD="$(g++ -print-file-name="$runtime") $(g++ -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
    EDGE_CPU_LIBRARY="$PWD/$out/kernels.so" \
    "$python" -m pytest -n 0 -q -p no:cacheprovider tests/kernels tests/test_cpu_engine.py tests/test_cpu_interleave.py \
    tests/test_cpu_tiles.py -k "plain or avx or amx or dotprod or change_no_bit or tiles" "${options[@]}"
}

[ "$only" = thread ] ||
  sanitize address libasan.so -fsanitize=address,undefined -fno-sanitize-recover=undefined
[ "$only" = address ] || sanitize thread libtsan.so -fsanitize=thread
