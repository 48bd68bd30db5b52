"""Lowering to the kernel `multiply`."""

from __future__ import annotations

from edge.plugins.lowering.context import Lowering, Node


def lower(at: Lowering, node: Node) -> None:
    at.elementwise("multiply.multiply", node, ("x", "z"))
