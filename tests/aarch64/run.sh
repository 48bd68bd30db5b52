#!/usr/bin/env bash
# Run the runtime on emulated aarch64: qemu's user mode emulates the instructions of a Cortex-A76
# (those of an Orin's Cortex-A78AE), with Debian's Python and wheels from PyPI.
#
#   tests/aarch64/run.sh [--tests] [FOLDER]     about five minutes on Debian, 300 MB in FOLDER (build/aarch64)
#
# It builds our wheel (plugins/cpu/wheel.sh), installs it beside the wheels that each JetPack pins, and
# shows that it chats, that the models give their golden sentence (tests/golden.json) on `ort`, on
# `cpu` and from a C program over libedge, that NEON products are right, also those of
# int8 matrices (set `i8mm`, which no Orin has, as qemu's processor `max`), and that answers equal those
# of this machine. It shows nothing about speed, a GPU or a Jetson's system. --tests also runs tests
# that need no torch (three minutes more). Needs qemu-aarch64 (apt: qemu-user), Debian's apt-get and
# compiler (g++-aarch64-linux-gnu libc6-dev-arm64-cross), and .venv/bin/python or another PYTHON with
# pip and setuptools 77.
set -euo pipefail
cd "$(dirname "$0")/../.."
more=no
if [ "${1:-}" = --tests ]; then
  more=yes
  shift
fi
folder=$(mkdir -p "${1:-build/aarch64}" && realpath "${1:-build/aarch64}")
root=$folder/root
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1

absent() {
  echo "not run: $1" >&2
  exit 3
}

# Debian's Python for arm64, unpacked but not installed, so this machine's packages do not change
fetch_python() {
  local apt=$folder/apt package cpu
  local -a options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$apt"
    -o "Dir::State::Status=$apt/status" -o "Dir::Cache=$apt" -o APT::Sandbox::User="$(id -un)")
  mkdir -p "$apt/lists/partial" "$apt/archives/partial"
  : >"$apt/status"
  apt-get "${options[@]}" -qq update || absent "the list of arm64 packages cannot be downloaded"
  apt-get "${options[@]}" -qq install -y --no-install-recommends --download-only python3 libstdc++6 \
    || absent "Debian's Python for arm64 cannot be downloaded"
  rm -rf "$root.making"
  for package in "$apt"/archives/*.deb; do
    dpkg-deb -x "$package" "$root.making"
  done
  # onnxruntime reads the CPU's description, and aborts if it is that of an x86
  mkdir -p "$root.making/proc"
  for ((cpu = 0; cpu < $(getconf _NPROCESSORS_CONF); cpu++)); do
    printf '%s\t: %s\n' processor $cpu 'CPU implementer' 0x41 'CPU architecture' 8 \
      'CPU variant' 0x0 'CPU part' 0xd42 'CPU revision' 1
    echo
  done >"$root.making/proc/cpuinfo"
  rm -rf "$apt"
  mv "$root.making" "$root"
}

# download wheels for that Python to a folder: fetch_wheels FOLDER PIP-ARGUMENTS…
fetch_wheels() {
  local to=$1
  shift
  [ -d "$to" ] && return
  rm -rf "$to.making"
  "$python" -m pip install --quiet --disable-pip-version-check --target "$to.making" \
    --no-warn-conflicts --only-binary=:all: --implementation cp --python-version "$version" \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
    --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "$@"
  mv "$to.making" "$to"
}

emulated() {
  local packages=$1
  shift
  PYTHONPATH=$packages qemu-aarch64 -cpu "${PROCESSOR:-cortex-a76}" -L "$root" "$root/usr/bin/python$version" "$@"
}

# install our wheel, and make a folder that has the checks and nothing else of this checkout
install_wheel() {
  local tag newest
  wheel=$(PYTHON=$python plugins/cpu/wheel.sh aarch64)
  tag=${wheel##*-abi3-}
  newest=$(printf '%s\n' manylinux_2_35_aarch64.whl "$tag" | sort -V | tail -n 1)
  if [ "$newest" != manylinux_2_35_aarch64.whl ]; then
    echo "$tag is too new: JetPack 6 has glibc 2.35" >&2
    exit 1
  fi
  rm -rf "$folder/installed" "$folder/checks"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder/installed" \
    --only-binary=:all: --implementation cp --python-version "$version" --abi abi3 \
    --platform "${tag%.whl}" "$wheel"
  mkdir -p "$folder/checks/tests/aarch64"
  cp tests/{__init__,golden,oldest_runtime}.py tests/golden.json "$folder/checks/tests"
  cp tests/aarch64/*.py "$folder/checks/tests/aarch64"
}

# run the installed wheel with the packages of a JetPack: installed FOLDER ARGUMENTS…
installed() {
  (cd "$folder/checks" && emulated "$folder/installed:$folder/$1" "${@:2}")
}

# edge-chat of the installed wheel gives the answer that tests/golden.json has
check_chat() {
  local -a sentence
  local said
  mapfile -t sentence < <("$python" -c 'import json
demo = json.load(open("tests/golden.json"))["bundles"]["demo"]
print(demo["prompt"], demo["answer"], sep="\n")')
  said=$(installed jp6 "$folder/installed/bin/edge-chat" demo --engine cpu --temperature 0 -p "${sentence[0]}")
  if [ "$said" != "${sentence[1]}" ]; then
    echo "edge-chat says: $said" >&2
    exit 1
  fi
  echo "ok: $(basename "$wheel") chats on Python $version"
}

# a C program over libedge, on processors with products of int8 (A76) and without
check_libedge() {
  local built=$folder/libedge cpu
  echo "compiling the C library for aarch64 (a minute on 2 cores)"
  make --silent -C runtime/libedge -j "$(nproc)" CXX=aarch64-linux-gnu-g++ BUILD="$built" >/dev/null
  aarch64-linux-gnu-g++ -x c -std=c99 docs/examples/c/chat_tokens.c -Iruntime/libedge/include \
    -x none -L"$built" -ledge -Wl,-rpath,"$built" -o "$built/chat_tokens"
  for cpu in cortex-a76 cortex-a53; do
    "$python" -m tests.aarch64.chat_tokens qemu-aarch64 -cpu $cpu -L "$root" "$built/chat_tokens"
  done
}

command -v qemu-aarch64 >/dev/null || absent "no qemu-aarch64: apt install qemu-user"
command -v aarch64-linux-gnu-g++ >/dev/null \
  || absent "no aarch64-linux-gnu-g++: apt install g++-aarch64-linux-gnu libc6-dev-arm64-cross"
grep -qs '^ID=debian' /etc/os-release || absent "only Debian's apt has arm64 beside this machine's packages"
[ -d "$root" ] || fetch_python
interpreter=$(find "$root/usr/bin" -name 'python3.*[0-9]' -type f | head -n 1)
version=${interpreter##*python}
mapfile -t needs < <("$python" -c 'import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["ort"], sep="\n")')

install_wheel
here=$("$python" tests/oldest_runtime.py --answers)
for jetpack in 6 7; do
  fetch_wheels "$folder/jp$jetpack" --constraint "jetson/constraints-jp$jetpack.txt" "${needs[@]}"
  installed jp$jetpack tests/oldest_runtime.py
  there=$(installed jp$jetpack tests/oldest_runtime.py --answers)
  if [ "$here" != "$there" ]; then
    printf 'answers differ:\n%s\n%s\n' "$here" "$there" >&2
    exit 1
  fi
  echo "ok: with JetPack $jetpack's pins on aarch64, greedy answers are those of $(uname -m)"
done
check_chat
installed jp6 -m tests.aarch64.products
installed jp6 -m tests.golden cpu
EDGE_CPU_SET=plain installed jp6 -m tests.golden cpu
EDGE_CPU_SET=i8mm PROCESSOR=max installed jp6 -m tests.golden cpu
PROCESSOR=max installed jp6 -m tests.aarch64.products
check_libedge
library=build/tensorrt-aarch64/libedge_tensorrt.so
if [ -e "$library" ]; then
  emulated "$folder/jp7" -m tests.aarch64.load_plugins "$library"
else
  echo "not run: no $library: make plugins-aarch64 TENSORRT_INCLUDE=FOLDER"
fi
[ "$more" = yes ] || exit 0
# the library that lies in this checkout is for this machine
export EDGE_CPU_LIBRARY=$folder/installed/edge/plugins/cpu/_native.abi3.so
fetch_wheels "$folder/pytest" pytest hypothesis
emulated "$folder/jp7:$folder/pytest" -m pytest -q --noconftest -p no:cacheprovider \
  --hypothesis-profile ci \
  tests/test_{bundle,profile_statistics,sampling,speculate_accept,state_ring,text_stream,text_tokenizer}.py
