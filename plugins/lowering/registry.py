"""Every op that has a kernel, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping

from edge.plugins.lowering import norm, views
from edge.plugins.lowering.context import Lower

LOWER: Mapping[str, Lower] = {
    op: lower for module in (norm, views) for op, lower in module.LOWER.items()
}
