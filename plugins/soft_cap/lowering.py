"""Lowering to the kernel `soft_cap`."""

from __future__ import annotations

from edge.plugins.lowering.context import Lowering, Node


def lower(at: Lowering, node: Node) -> None:
    at.elementwise("soft_cap.soft_cap", node, ("x",), CAP=float(node.attributes["cap"]))
