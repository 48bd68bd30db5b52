#!/usr/bin/env bash
# Compiles the plugin library against the headers of several TensorRT versions, and lists successes.
#
#   EDGE_TENSORRT_HEADERS=/a/include:/b/include plugins/tensorrt/matrix.sh [cmake options]
set -euo pipefail
if [ -z "${EDGE_TENSORRT_HEADERS:-}" ]; then
  echo "skipped: set EDGE_TENSORRT_HEADERS to folders with NvInferRuntime.h, separated by colons"
  exit 0
fi
source_folder=$(cd "$(dirname "$0")" && pwd)
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
IFS=: read -ra folders <<<"$EDGE_TENSORRT_HEADERS"
for number in "${!folders[@]}"; do
  cmake -S "$source_folder" -B "$built/$number" -DTENSORRT_INCLUDE="${folders[$number]}" "$@" \
    >"$built/log" || { cat "$built/log"; exit 1; }
  if ! cmake --build "$built/$number" --parallel 2 >"$built/log" 2>&1 \
    || [ ! -e "$built/$number/libedge_tensorrt.so" ]; then
    cat "$built/log"
    echo "failed: ${folders[$number]}"
    exit 1
  fi
  echo "compiled: ${folders[$number]}"
done
