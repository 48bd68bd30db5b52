"""Lowering to the kernel `squared_relu`."""

from __future__ import annotations

from edge.plugins.lowering.context import Lowering, Node


def lower(at: Lowering, node: Node) -> None:
    at.elementwise("squared_relu.squared_relu", node, ("x",))
