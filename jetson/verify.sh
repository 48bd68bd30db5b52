#!/usr/bin/env bash
# Prove on this board what this repository calls unproven, and write a report for an issue:
#
#   jetson/verify.sh [BUNDLE] [--out FOLDER] [--minutes 60] [--again] [--only STEP,STEP]
#
# The steps go from small to large: doctor, the CPU, a kernel, one plugin at a time, whole engines,
# speed, memory. A step that cannot run says why. A second run continues with the steps that were not
# ok. No settings change: no power mode, no clock. BUNDLE should have kernels for this GPU, made on
# another machine by `edge export demo -o demo-orin --target orin-nano`; otherwise install Triton here.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "$python is missing: run jetson/install.sh, or choose a Python: PYTHON=python3.10 $0" >&2
  exit 1
fi
exec "$python" -m jetson.verify "$@"
