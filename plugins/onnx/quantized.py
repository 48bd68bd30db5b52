"""Bodies of the int8 ops without state, in the ONNX text syntax."""

from __future__ import annotations

# function name → body of standard ops, and what ONNX Runtime does faster, where it differs
BODIES: dict[str, str] = {}
ORT_BODIES: dict[str, str] = {}
