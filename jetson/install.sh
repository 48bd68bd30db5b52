#!/usr/bin/env bash
# Install edge on a Jetson Orin with JetPack 6.2 or 7.2, from this checkout, without root:
#
#   jetson/install.sh [--dry-run] [--venv DIR] [--wheel FILE] [--no-plugins]
#
# --dry-run      print what would be done, and do nothing
# --venv DIR     the virtual environment, .venv in this checkout by default
# --wheel FILE   install this wheel of mamba-edge instead of the checkout
# --no-plugins   do not build the TensorRT plugin library, which the tensorrt engine needs
#
# It installs PyPI's ONNX Runtime for CPUs, unless a build for GPUs is already installed, in the virtual
# environment or the system (docs/use/onnx-runtime.md).
#
# Run it again to update an installation. Commands that need root are printed, not run.
# EDGE_JETSON_ROOT replaces / as the root of the system's files (the tests set it).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(dirname "$here")
root=${EDGE_JETSON_ROOT:-}
dry_run=no venv=$checkout/.venv wheel='' plugins=yes

refuse() {
  printf 'edge: %s\n' "$@" >&2
  exit 1
}

usage() {
  sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
}

read_arguments() {
  while [ $# -gt 0 ]; do
    case $1 in
      --dry-run) dry_run=yes ;;
      --no-plugins) plugins=no ;;
      --venv | --wheel)
        if [ $# -lt 2 ]; then
          usage >&2
          exit 2
        fi
        if [ "$1" = --venv ]; then venv=$2; else wheel=$2; fi
        shift
        ;;
      -h | --help)
        usage
        exit 0
        ;;
      *)
        usage >&2
        exit 2
        ;;
    esac
    shift
  done
  if [ -n "$wheel" ] && [ ! -f "$wheel" ]; then refuse "$wheel: no such wheel"; fi
}

# print a command, and run it unless this is a dry run
run() {
  printf '+ %s\n' "$(printf '%q ' "$@" | sed 's/ $//')"
  [ "$dry_run" = yes ] || "$@"
}

# -- which board, and which JetPack ---------------------------------------------------------------

detect_board() {
  local machine model
  machine=$(uname -m)
  [ "$machine" = aarch64 ] \
    || refuse "this machine is $machine, a Jetson is aarch64: use \`make chat\` here"
  [ -r "$root/etc/nv_tegra_release" ] || refuse \
    "not a Jetson: /etc/nv_tegra_release is missing" \
    "on other machines use: pip install \"mamba-edge[cuda,ort]\", or \`make chat\`"
  model=$(tr -d '\0' <"$root/proc/device-tree/model" 2>/dev/null || true)
  case $model in
    *Orin*) board=$model ;;
    '') refuse "the board does not say what it is: /proc/device-tree/model is not readable" ;;
    *) refuse "unknown board $model: only the Orin family (sm_87) is supported" ;;
  esac
}

detect_jetpack() {
  local line major minor
  line=$(head -n 1 "$root/etc/nv_tegra_release")
  if ! [[ $line =~ R([0-9]+)\ \(release\),\ REVISION:\ ([0-9]+)\.([0-9]+) ]]; then
    refuse "/etc/nv_tegra_release has an unknown form: $line"
  fi
  major=${BASH_REMATCH[1]} minor=${BASH_REMATCH[2]}
  l4t=$major.$minor.${BASH_REMATCH[3]}
  if [ "$major" = 36 ] && [ "$minor" -ge 4 ]; then
    jetpack=6 version=3.10 cuda=12-6
  elif [ "$major" = 39 ] && [ "$minor" -ge 2 ]; then
    jetpack=7 version=3.12 cuda=13-2
  else
    refuse "L4T $l4t is not supported: JetPack 6.2 has L4T 36.4 or 36.5, JetPack 7.2 has 39.2" \
      "flash one of these: jetson/README.md"
  fi
  echo "$board, L4T $l4t: JetPack $jetpack"
  if [ "$l4t" = 36.4.7 ]; then
    echo "note: L4T 36.4.7 refuses large allocations, so edge allocates memory in pieces." \
      "Update to L4T 36.5 to avoid this."
  fi
}

# -- what apt has to install ----------------------------------------------------------------------

tensorrt_include=/usr/include/aarch64-linux-gnu

cuda_include() {
  local folder
  for folder in "${CUDA_HOME:-/usr/local/cuda}"/include /usr/local/cuda/targets/*/include; do
    if [ -f "$root$folder/cuda_runtime_api.h" ]; then
      echo "$folder"
      return
    fi
  done
}

check_packages() {
  local -a missing=()
  python=${PYTHON:-python$version}
  if ! command -v "$python" >/dev/null; then
    missing+=("python$version" "python$version-venv")
  elif ! "$python" -I -c 'import ensurepip, venv' 2>/dev/null; then
    missing+=("python$version-venv")
  fi
  if [ "$plugins" = yes ]; then
    command -v make >/dev/null && command -v g++ >/dev/null || missing+=(build-essential)
    command -v cmake >/dev/null || missing+=(cmake)
    if [ ! -f "$root$tensorrt_include/NvInfer.h" ]; then
      missing+=(libnvinfer-headers-dev libnvinfer10 libnvonnxparsers10 python3-libnvinfer)
    fi
    [ -n "$(cuda_include)" ] || missing+=("cuda-cudart-dev-$cuda")
  fi
  [ ${#missing[@]} -gt 0 ] || return 0
  refuse "these packages are missing; install them, then run this again:" \
    "  sudo apt install $(pinned "${missing[@]}")"
}

# NVIDIA's repository for JetPack 7 also has TensorRT 11, which does not list the Orin Nano
pinned() {
  local package
  local -a named=()
  for package in "$@"; do
    if [ "$jetpack" = 7 ] && [[ $package == *nv[io]n* ]]; then package="'$package=10.16.*'"; fi
    named+=("$package")
  done
  echo "${named[*]}"
}

check_python() {
  local found
  found=$("$python" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  [ "$found" = "$version" ] || refuse \
    "$python is Python $found, but JetPack $jetpack has TensorRT for Python $version"
}

# -- installing -----------------------------------------------------------------------------------

make_environment() {
  if [ -f "$venv/pyvenv.cfg" ]; then
    grep -qi '^include-system-site-packages *= *true' "$venv/pyvenv.cfg" || refuse \
      "$venv does not see the system's packages, such as TensorRT" \
      "remove it, or choose another folder: --venv DIR"
    return
  fi
  run "$python" -I -m venv --system-site-packages "$venv"
}

# ONNX Runtime's builds for GPUs are packages of other names with the same module: pip would
# overwrite it with the build for CPUs
ort_extra() {
  local interpreter=$venv/bin/python others
  [ -x "$interpreter" ] || interpreter=$python
  others=$("$interpreter" -I -c 'from importlib.metadata import packages_distributions as p
print(*{*p().get("onnxruntime", ())} - {"onnxruntime"})')
  if [ -n "$others" ]; then
    echo "note: $others is installed and stays" >&2
  else
    echo ,ort
  fi
}

install_runtime() {
  local what extras
  local -a pip=("$venv/bin/python" -I -m pip install --quiet --disable-pip-version-check)
  # setuptools would package modules that an earlier build left in build/lib
  [ ! -d "$checkout/build/lib" ] || run rm -rf "$checkout/build/lib"
  what="file://$(realpath "${wheel:-$checkout}")"
  extras=cuda,server$(ort_extra)
  run "${pip[@]}" --constraint "$here/constraints-jp$jetpack.txt" "mamba-edge[$extras] @ $what"
  # pip does not replace an installed package by a wheel of the same version
  [ -z "$wheel" ] || run "${pip[@]}" --no-deps --force-reinstall "$wheel"
}

build_plugins() {
  [ "$plugins" = yes ] || return 0
  run make -C "$checkout" plugins "TENSORRT_INCLUDE=$tensorrt_include" "CUDA_INCLUDE=$(cuda_include)"
  # the installed package looks for it there (edge/runtime/tensorrt/library.py)
  run install -D -m 644 "$checkout/build/tensorrt/libedge_tensorrt.so" \
    "$venv/lib/python$version/site-packages/edge/plugins/tensorrt/lib/libedge_tensorrt.so"
}

read_arguments "$@"
detect_board
detect_jetpack
check_packages
check_python
make_environment
install_runtime
build_plugins
run "$venv/bin/edge" doctor
[ "$dry_run" = yes ] || echo "done: try $venv/bin/edge-chat, then verify the board with jetson/verify.sh"
