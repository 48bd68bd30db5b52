#!/usr/bin/env bash
# Everything that waits for an NVIDIA GPU, in one command (meant to take under ten minutes; not yet timed):
#
#   tests/gpu/run.sh [OUT]        OUT.md and OUT.json, docs/measurements/DATE-GPU by default
#
# Needs a driver and a Python with torch, triton, cuda-core and what the runtime and the exporter
# need (the first lines say what is missing). PYTHON chooses it; MODELS and REPEATS shorten it.
# TensorRT's plugins are tested without TensorRT: TENSORRT_INCLUDE names its headers to build them
# with, or EDGE_TENSORRT_PLUGINS a library that was built elsewhere.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET EDGE_DEVICE

echo "== 1. what is here"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || {
    echo "no NVIDIA driver: nothing to do here" >&2
    exit 1
}
"$python" -m tests.gpu.first_cubin || exit 1

failed=0
echo "== 2. every kernel, and the engine, on the GPU"
EDGE_TEST_DEVICE=cuda "$python" -m pytest -q -p no:cacheprovider -m "not slow" \
    tests/gpu tests/kernels tests/cuda || failed=1

echo "== 3. TensorRT's plugins, called without TensorRT"
plugins=${EDGE_TENSORRT_PLUGINS:-}
if [ -z "$plugins" ] && [ -n "${TENSORRT_INCLUDE:-}" ]; then
    make plugins && plugins=$PWD/build/tensorrt/libedge_tensorrt.so || failed=1
fi
[ -n "$plugins" ] || echo "no plugins: what is below TensorRT's interfaces is tested alone"
EDGE_TENSORRT_PLUGINS=$plugins EDGE_TEST_DEVICE=cuda "$python" -m pytest -q -p no:cacheprovider \
    tests/tensorrt/test_enqueue_*.py || failed=1

echo "== 4. correctness and figures of whole models"
name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr -cs 'A-Za-z0-9' '-' | sed 's/-$//')
out=${1:-docs/measurements/$(date +%F)-${name}}
"$python" -m edge.apps.bench.gpu --out "$out" --repeats "${REPEATS:-40}" \
    ${MODELS:+--models "$MODELS"} || failed=1
"$python" -m edge.apps.bench.gpu --out "$out-8-multiprocessors" --repeats "${REPEATS:-40}" \
    --multiprocessors 8 --no-peers --models "${MODELS:-mamba-130m,mamba-2.8b}" || failed=1
[ "$failed" = 0 ] && echo "== all right; figures in $out.md" || echo "== SOMETHING IS WRONG, see above" >&2
exit "$failed"
