"""Lowering of the gated delta rule: token by token for up to `FEW` tokens and for trees, else by
chunks.

A program for any number of rows has the kernels for both, because it also runs one token of many
sequences. `delta_rule.scan` runs up to `FEW` tokens there too, so that steps have the same bits in
every batch, and the kernels for chunks run more. Each does nothing where the other runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge.launch import Size
from edge.plugins.lowering.context import (
    Arguments,
    Lowering,
    Node,
    Warps,
    cdiv,
    next_power_of_2,
)
from edge.plugins.selective_scan.lowering import logs, steering
from edge.plugins.selective_scan_heads.lowering import warps_for_states

_ELEMENTS = 4096  # elements of the state per program
_VALUES = ("x", "dt", "B", "C")
FEW = 16  # tokens of a run that go one by one
# of _by_chunks
CHUNK = 32  # tokens of a chunk
_CHANNELS = 16  # of a program of `scan`
_COLUMNS = 32  # at a time in `prepare`
_UNREAD = ("x", "dt", "slots", "ancestors", "X_STRIDE", "DT_STRIDE")  # by the scan of chunks
_WIDEST = 256  # maximum of N: a program has whole rows of a state


def lower(at: Lowering, node: Node) -> None:
    """Launch one program for some channels of a head; rows of the state are independent."""
    heads, p, n = (int(node.attributes[name]) for name in ("heads", "head_dim", "d_state"))
    views = {name: at.view(node.inputs[name]) for name in _VALUES}
    y = at.new(node.outputs["y"], "f32", "TB", heads * p)
    arguments = {
        **at.given(node, *_VALUES, "A", "dt_bias"),
        "state": at.state(node.inputs["ssm_state"], "f32"),
        **logs(at, node, {name: views[name] for name in ("x", "dt", "B")}),
        "y": at.pointer(y),
        **steering(at),
    }
    constants = {
        "HEADS": heads,
        "P": p,
        "N": n,
        "GROUPS": int(node.attributes["groups"]),
        "BETA_MAX": float(node.attributes["beta_max"]),
        **{f"{name.upper()}_STRIDE": view.stride for name, view in views.items()},
    }
    chunks = at.regime.many and n <= _WIDEST
    block_n = next_power_of_2(n)
    block_p = min(next_power_of_2(p), max(1, _ELEMENTS // block_n))
    at.launch(
        "delta_rule.scan",
        arguments,
        {
            **constants,
            "BLOCK_P": block_p,
            "BLOCK_N": block_n,
            "TREE": at.regime.kind == "tree",
            **({"FEW": FEW} if chunks else {}),
        },
        (Size(times=heads), Size(times=cdiv(p, block_p)), Size(of="B")),
        warps=warps_for_states(block_p * block_n),
        stages=1,
        settles=True,
    )
    if chunks:
        _by_chunks(at, node, arguments, constants)


def _by_chunks(
    at: Lowering, node: Node, arguments: Arguments, constants: Mapping[str, int | float]
) -> None:
    """Launch `prepare`, with a program for each chunk and head, and the scan from chunk to chunk.

    The scan has a program for 16 channels of a head: 128 programs for the 16 heads of Qwen3.5-0.8B.
    Each warp has a piece of N. For N up to 128 the tiles of a chunk fit into the 99 KB of an RTX's
    multiprocessor while they are read ahead; wider ones are not read ahead.
    """
    heads, p, n = (int(constants[name]) for name in ("HEADS", "P", "N"))
    between = _between(at, node, heads, p, n)
    sizes = {**constants, "CHUNK": CHUNK, "FEW": FEW}
    wide = n > 128
    warps: Warps = 8 if wide else 4
    logged = ("log_x", "log_dt", "log_B")
    given = (*_VALUES, "A", "dt_bias", *logged, "slots", "tokens", "batch")
    at.launch(
        "delta_terms.prepare",
        {**{name: arguments[name] for name in given}, **between},
        {**sizes, "BLOCK": _COLUMNS, "LEVELS": CHUNK.bit_length() - 1},
        (Size(of="T", per=CHUNK), Size(of="B"), Size(times=heads)),
        warps=4,
        stages=2,
    )
    at.launch(
        "delta_chunks.scan",
        {**{n: value for n, value in arguments.items() if n not in _UNREAD}, **between},
        {
            **{n: value for n, value in sizes.items() if n not in _UNREAD},
            "BLOCK_P": _CHANNELS,
            "BLOCK_N": max(16 * warps, next_power_of_2(n)),
            "PIECES": warps,
        },
        (Size(times=heads), Size(times=cdiv(p, _CHANNELS)), Size(of="B")),
        warps=warps,
        stages=1 if wide else 2,
    )


def _between(at: Lowering, node: Node, heads: int, p: int, n: int) -> Arguments:
    """Return buffers for what `prepare` computes."""
    widths = {
        "fades": 2 * heads,
        "wanted": heads * p,
        "known": heads * n,
        "mixture": heads * CHUNK,
    }
    return {
        name: at.pointer(at.new(f"{node.outputs['y']}.{name}", "f32", "TB", width))
        for name, width in widths.items()
    }
