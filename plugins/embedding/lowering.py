"""Lowering to the kernels of `embed`, which read the input `tokens`."""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import Arguments, Lowering, Node, cdiv, next_power_of_2


def lower(at: Lowering, node: Node) -> None:
    """Lower Embed and EmbedInt8."""
    width = at.constant(node.inputs["table"]).shape[1]
    step = int(at.count(node, "scale") > 1)
    _launch(at, node, "embed", at.given(node, "table", "scale"), width, {"SCALE_STEP": step})


def lower_embed_bits(at: Lowering, node: Node) -> None:
    bits = {"BITS": node.attributes["bits"], "SHARED": node.attributes["block_size"]}
    blocks = at.given(node, "packed", "scales")
    _launch(at, node, "embed_bits", blocks, node.attributes["K"], bits)


def _launch(
    at: Lowering,
    node: Node,
    kernel: str,
    pointers: Arguments,
    width: int,
    constants: dict[str, int],
) -> None:
    """Launch one program per 1024 columns: a row of 2560 is three. Each byte is read once."""
    block = min(1024, next_power_of_2(width))
    y = at.new(node.outputs["y"], "f32", "TB", width)
    at.launch(
        f"embed.{kernel}",
        {"tokens": at.input("tokens", "i32", Size(of="TB")), **pointers, "y": at.pointer(y)},
        {"D": width, **constants, "BLOCK": block},
        (Size(of="TB"), Size(times=cdiv(width, block))),
        warps=4,
        stages=1,
    )
