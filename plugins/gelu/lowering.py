"""Lowering to the kernel `gelu`."""

from __future__ import annotations

from edge.plugins.lowering.context import Lowering, Node


def lower(at: Lowering, node: Node) -> None:
    at.elementwise("gelu.gelu", node, ("x",), TANH=node.op == "GeluTanh")
