#!/usr/bin/env bash
# Collect what a GPU machine without a network needs besides this tree in build/gpu-kit:
#
#   tests/gpu/pack.sh [SM]      90 by default
#
#   kernels.tar.xz    the kernels that tests/gpu/run.sh launches, compiled for sm_SM
#   wheels/           packages that images with torch and triton usually lack
#   libedge_tensorrt*.so    the plugin library and its host, if `make plugins` has built them
#
# Prints the sizes, and the commands to run on that machine. The exit code is 1 if tree and kit
# exceed LIMIT_MB. Kernels compiled earlier come from the cache.
#
#   KIT       another folder           PYTHON    .venv/bin/python, else python3
#   FILES     test files instead of all    MODELS, RECIPES, BLOCKS, DEMOS   as in run.sh; empty: none
#   WHEELS    packages; empty: none    LIMIT_MB  64
#   PYTHON_VERSION, PLATFORMS          of the other machine: 3.12, manylinux on x86-64
#   THERE     folder to unpack the kit into: /tmp/gpu-kit
set -euo pipefail
cd "$(dirname "$0")/../.."
sm=${1:-90}
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
kit=${KIT:-build/gpu-kit} there=${THERE:-/tmp/gpu-kit}
work=$kit.work # what another run of this begins with; it does not travel
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
unset EDGE_PRECOMPILED
if [ -e "$kit" ] && [ ! -e "$kit/kernels.tar.xz" ] && [ -n "$(ls -A "$kit")" ]; then
    echo "$kit is no kit: name another folder by KIT" >&2
    exit 2
fi
rm -rf "$kit" "$work/variants"
mkdir -p "$kit" "$work"

# name==version from constraints.txt, else the version installed here
pinned() {
    grep -E "^$1==" constraints.txt ||
        "$python" -c "import importlib.metadata as m; print('$1==' + m.version('$1'))"
}

wheels() {
    local name platform options=() packages=()
    for platform in ${PLATFORMS:-manylinux_2_31_x86_64 manylinux_2_28_x86_64 manylinux_2_27_x86_64 \
        manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64}; do
        options+=(--platform "$platform")
    done
    for name in $1; do packages+=("$(pinned "$name")"); done
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --implementation cp --python-version "${PYTHON_VERSION:-3.12}" "${options[@]}" \
        --dest "$kit/wheels" "${packages[@]}"
}

# bytes of this tree, without ignored files
tree_bytes() {
    git ls-files -coz --exclude-standard | xargs -0 du -cb 2>/dev/null |
        awk '$2 == "total" { sum += $1 } END { print sum }'
}

limit=$((${LIMIT_MB:-64} << 20)) tree=$(tree_bytes)
too_large="tree and kit are more than ${LIMIT_MB:-64} MiB"
[ "$tree" -le "$limit" ] || { echo "$too_large" >&2 && exit 1; }

# cuda-core needs cuda-bindings, which images with torch have
packages=${WHEELS-cuda-core pydantic pydantic-core annotated-types typing-inspection prompt_toolkit \
wcwidth llguidance}
[ -z "$packages" ] || wheels "$packages"

echo "noting what is launched" >&2
tests/gpu/files.sh | EDGE_TEST_DEVICE=cpu EDGE_TEST_VARIANTS=$work/variants xargs "$python" -m pytest \
    -q -p no:cacheprovider -m "not without_gpu" -n "${JOBS:-$(nproc)}" > "$work/noting.log" ||
    { tail -n 30 "$work/noting.log" >&2 && exit 1; }
demos=${DEMOS-demo demo-fp16 demo-bytes demo-draft}
options=(--bundles "${demos// /,}")
[ -z "${MODELS+set}" ] || options+=(--models "$MODELS")
[ -z "${RECIPES+set}" ] || options+=(--recipes "$RECIPES")
[ -z "${BLOCKS+set}" ] || options+=(--blocks "$BLOCKS")
"$python" -m tests.gpu.variants "$work/variants" "${options[@]}"

"$python" -m tests.gpu.precompile "$work/variants" "$work/kernels" "$sm"
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$work" -cf - kernels |
    xz -9e > "$kit/kernels.tar.xz"

for file in build/tensorrt/libedge_tensorrt*.so; do
    [ ! -e "$file" ] || cp "$file" "$kit"
done

echo
du -ab "$kit" | sort -k 2
total=$((tree + $(du -sb "$kit" | cut -f 1)))
printf '%s bytes with the tree, of %s\n\n' "$total" "$limit"

# plain Python unpacks it: neither pip nor xz is needed there
prepare="mkdir -p $there && python3 -m tarfile -e $kit/kernels.tar.xz $there"
[ -z "$packages" ] ||
    prepare+=" && for w in $kit/wheels/*.whl; do python3 -m zipfile -e \$w $there/packages; done"
settings="PYTHONPATH=$there/packages EDGE_PRECOMPILED=$there/kernels BUNDLES=$there/bundles"
[ ! -e "$kit/libedge_tensorrt.so" ] ||
    settings+=" EDGE_TENSORRT_PLUGINS=\$(realpath $kit/libedge_tensorrt.so)"
echo "with the tree and $kit on the other machine, in the tree:"
for stage in A B C; do
    echo
    echo "$prepare && $settings OUT=$there/gpu-$stage tests/gpu/run.sh $stage; code=\$?;" \
        "tar -C $there -czf \${OUT:-.}/gpu-$stage.tar.gz gpu-$stage; exit \$code"
done
[ "$total" -le "$limit" ] || { echo "$too_large" >&2 && exit 1; }
