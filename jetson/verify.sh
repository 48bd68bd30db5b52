#!/usr/bin/env bash
# Prove on this board what this repository calls unproven, and write a report for an issue:
#
#   jetson/verify.sh [BUNDLE] [--out FOLDER] [--minutes 60] [--again] [--only STEP,STEP]
#
# From the least to the most: doctor, the CPU, a kernel, one plugin at a time, whole engines, speed,
# memory. What cannot be tried says why. Run again, it goes on with what was not ok. Nothing is set:
# no power mode, no clock. BUNDLE should have kernels for this GPU, made on another machine by
# `edge export demo -o demo-orin --target orin-nano`; without them Triton has to be installed here.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "$python is missing: run jetson/install.sh, or name a Python: PYTHON=python3.10 $0" >&2
  exit 1
fi
exec "$python" -m jetson.verify "$@"
