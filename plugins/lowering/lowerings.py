"""The lowering of every op that has a kernel, collected from the ops' folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType

from edge.plugins.catalogue import ops_in, parts, snake
from edge.plugins.lowering.context import Lower

_PREFIX = "lower_"


def _lowerings(folder: str, module: ModuleType) -> Iterator[tuple[str, Lower]]:
    """Yield the folder's ops, its pairs, and the ops that only a `lower_…` function names."""
    explicit = {
        name: function
        for name, function in vars(module).items()
        if name.startswith(_PREFIX) and function.__module__ == module.__name__
    }
    names = [op.name for op in ops_in(folder)] + [pair.op for pair in getattr(module, "PAIRS", ())]
    for op in names:
        lower = explicit.pop(f"{_PREFIX}{snake(op)}", None) or getattr(module, "lower", None)
        if lower is not None:
            yield op, lower
    for name, lower in explicit.items():
        yield name.removeprefix(_PREFIX).title().replace("_", ""), lower


LOWER: Mapping[str, Lower] = {
    op: lower
    for folder, module in parts("lowering").items()
    for op, lower in _lowerings(folder, module)
}
