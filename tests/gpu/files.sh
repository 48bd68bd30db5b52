#!/usr/bin/env bash
# List the test files that run kernels, slowest first: those in FILES, or all.
cd "$(dirname "$0")/../.."
if [ -n "${FILES:-}" ]; then
    printf '%s\n' $FILES
else
    printf '%s\n' tests/cuda/test_engine_models.py tests/cuda/test_engine_track.py \
        tests/kernels/test_*.py tests/tensorrt/test_enqueue_*.py tests/cuda/test_engine_*.py
fi | awk '!seen[$0]++'
