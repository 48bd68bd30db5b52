#!/usr/bin/env bash
# Build a wheel of the package, with its library, for a machine of this or of another kind.
#
#   plugins/cpu/wheel.sh x86_64|aarch64 [FOLDER]    prints its path in FOLDER (build/wheels)
#
# One wheel serves Python 3.10 and later, since the library uses no Python API. It brings its own
# libstdc++, so it needs only the glibc that its name tells: manylinux_2_34 is 2.34. Another machine's
# needs Debian's cross compiler. PYTHON (.venv/bin/python) has setuptools 77 or later. The library
# stays in FOLDER/MACHINE/native and is compiled again when a source is newer.
set -euo pipefail
case ${1:-} in
  x86_64 | aarch64) machine=$1 ;;
  *)
    echo "usage: plugins/cpu/wheel.sh x86_64|aarch64 [FOLDER]" >&2
    exit 2
    ;;
esac
root=$(realpath "$(dirname "$0")/../..")
folder=${2:-$root/build/wheels}
mkdir -p "$folder"
folder=$(realpath "$folder")
cd "$root"
here=$folder/$machine
library=edge/plugins/cpu/_native.abi3.so
python=${PYTHON:-.venv/bin/python}

compiler() {
  local packages=g++
  cxx=g++
  if [ "$machine" != "$(uname -m)" ]; then
    cxx=$machine-linux-gnu-g++
    packages=$([ "$machine" = aarch64 ] && echo g++-aarch64-linux-gnu libc6-dev-arm64-cross \
      || echo g++-x86-64-linux-gnu libc6-dev-amd64-cross)
  fi
  command -v "$cxx" >/dev/null || {
    echo "no wheel for $machine: there is no $cxx; on Debian: apt install $packages" >&2
    exit 3
  }
}

# setuptools for that machine, with nothing from the compiler and the folders of this Python. What
# nobody calls of libstdc++ is left out: it would need a newer glibc
setup() {
  local link="$cxx -shared"
  env -u PYTHONDONTWRITEBYTECODE _PYTHON_HOST_PLATFORM="linux-$machine" CC="$cxx" CXX="$cxx" \
    CFLAGS=-DNDEBUG CXXFLAGS=-DNDEBUG LDSHARED="$link" LDCXXSHARED="$link" \
    LDFLAGS="-s -static-libstdc++ -Wl,--exclude-libs,ALL,--gc-sections" \
    "$python" -W ignore setup.py -q "$@"
}

compile() {
  local native=$here/native/$library
  if [ -e "$native" ] && [ -z "$(find setup.py pyproject.toml plugins/cpu/src plugins/*/cpu*.h \
    runtime/libedge/src runtime/libedge/include -newer "$native")" ]; then return; fi
  compiler
  rm -rf "$here/native"
  echo "compiling the kernels for $machine (a minute on 2 cores)" >&2
  setup build_ext --force --build-lib "$here/native" --build-temp "$here/objects" >&2
  [ -e "$native" ] || { echo "no wheel for $machine: its library was not compiled" >&2; exit 1; }
}

# the newest glibc that the library asks for; one that asks for a libstdc++ is for machines like this
platform() {
  local native=$here/native/$library glibc
  glibc=$(readelf -VW "$native" | grep -o '\bGLIBC_[0-9][0-9.]*' | sort -uV | tail -n 1)
  if readelf -dW "$native" | grep -q 'NEEDED.*libstdc++'; then
    echo "linux_$machine"
  else
    echo "manylinux_$(tr . _ <<<"${glibc#GLIBC_}")_$machine"
  fi
}

compile
cxx=false  # from here on, nothing is left to compile
rm -rf "$here/lib" "$folder"/mamba_edge-*_"$machine".whl
mkdir -p "$here/lib/${library%/*}"
cp -p "$here/native/$library" "$here/lib/$library"
setup egg_info --egg-base "$here" build --build-base "$here" --build-lib "$here/lib" \
  bdist_wheel --plat-name "$(platform)" --bdist-dir "$here/wheel" --dist-dir "$folder" >&2
wheel=$(echo "$folder"/mamba_edge-*_"$machine".whl)
[[ $("$python" -m zipfile -l "$wheel") = *"$library"* ]] || {
  echo "$wheel: has no library" >&2
  exit 1
}
echo "$wheel"
