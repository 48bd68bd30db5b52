"""How `kernels.embed` is called: Embed, EmbedInt8 and EmbedBits, of the input `tokens`."""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import Arguments, Lower, Lowering, Node, cdiv, next_power_of_2


def lower_embed(at: Lowering, node: Node) -> None:
    table = at.constant(node.inputs[1])
    scale = at.constant(node.inputs[2]) if node.op == "EmbedInt8" else None
    pointers: Arguments = {
        "table": at.pointer(table),
        "scale": at.pointer(scale),
    }
    step = int(scale is not None and scale.size > 1)
    _launch(at, node, "embed", pointers, table.shape[1], {"SCALE_STEP": step})


def lower_embed_bits(at: Lowering, node: Node) -> None:
    packed, scales = (at.constant(name) for name in node.inputs[1:3])
    pointers: Arguments = {"packed": at.pointer(packed), "scales": at.pointer(scales)}
    bits = {"BITS": node.attributes["bits"], "SHARED": node.attributes["block_size"]}
    _launch(at, node, "embed_bits", pointers, node.attributes["K"], bits)


def _launch(
    at: Lowering,
    node: Node,
    kernel: str,
    pointers: Arguments,
    width: int,
    constants: dict[str, int],
) -> None:
    """1024 columns a program: a row of 2560 is three, and each of its bytes is read once."""
    block = min(1024, next_power_of_2(width))
    y = at.new(node.outputs[0], "f32", "TB", width)
    at.launch(
        f"embed.{kernel}",
        {"tokens": at.input("tokens", "i32", Size(of="TB")), **pointers, "y": at.pointer(y)},
        {"D": width, **constants, "BLOCK": block},
        (Size(of="TB"), Size(times=cdiv(width, block))),
        warps=4,
        stages=1,
    )


LOWER: dict[str, Lower] = {
    "Embed": lower_embed,
    "EmbedInt8": lower_embed,
    "EmbedBits": lower_embed_bits,
}
