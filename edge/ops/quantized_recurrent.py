"""Causal convolution and selective scans on int8 values."""

from __future__ import annotations

from edge.ops.spec import Op

ALL: tuple[Op, ...] = ()
